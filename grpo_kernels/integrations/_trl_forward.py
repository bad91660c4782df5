"""Computes the loss inside a model's forward: the object that TRL passes to the model, and the forward that uses it."""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ..batch import TokenBatch
from ..formulas.token_stage import TokenRows
from ..logprobs import linear_logprobs
from ..losses import LossOutput, linear_grpo_loss
from ..model import plain_head
from ..objective import Objective
from ..specs import LogitTransform, Options
from ._trl_replay import Replay
from ._trl_specs import router
from .trl_head import gathered

Tensor = torch.Tensor


class LossCall:
    """The arguments of one loss, passed through the wrappers of a model. Not a dataclass, because FSDP would cast its
    tensors."""

    def __init__(
        self, batch: TokenBatch, objective: Objective, normalizer: float | Tensor, options: Options, with_graph: bool = False
    ) -> None:
        self.batch, self.objective, self.normalizer, self.options = batch, objective, normalizer, options
        self.with_graph = with_graph
        self.read: tuple[Tensor, Tensor] | None = None  # log-probs and entropies as TRL got them
        self.own: Any = None  # what TRL's own head gives
        self.output: Any = None  # of the outermost wrapper, because DDP and FSDP put hooks on its tensors
        self.rows: TokenRows | None = None

    def through(self, model: Any, trls_own: Callable[[Any, dict[str, Any]], Any] | None = None) -> Any:
        """The model as TRL calls it. It passes this call to the model, and returns the result without the loss and detached;
        with `with_graph`, log-probs and entropies are leaves of a graph that begins there.

        trls_own   is given the model and its arguments first, and its result is kept."""

        def call(**kwargs: Any) -> Any:
            self.own = None if trls_own is None else trls_own(model, kwargs)
            self.output = out = model(**kwargs, grpo=self)
            detached = {name: x.detach() for name, x in out.items() if name != "loss"}
            if self.options.skip_inactive:
                detached |= self.filled(detached["log_probs"], detached["entropy"])
            self.read = detached["log_probs"], detached["entropy"]
            if self.with_graph and torch.is_grad_enabled():
                for x in self.read:
                    x.requires_grad_()
            return type(out)(**detached)

        return call

    def filled(self, log_probs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
        """The values that TRL gets for tokens that were not projected: a ratio of 1, and the mean entropy of the other
        tokens."""
        batch = self.batch
        read = batch.marked(self.objective.active_rows)
        assert read is not None
        read = read.view(entropy.shape)
        mean = (entropy * read).sum() / read.sum()
        others = torch.zeros_like(log_probs) if batch.old_logps is None else batch.old_logps
        return {"log_probs": torch.where(read, log_probs, others), "entropy": torch.where(read, entropy, mean)}

    def loss(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> LossOutput:
        out = linear_grpo_loss(
            hidden, weight, self.batch, self.objective, bias=bias, transform=transform, normalizer=self.normalizer,
            options=self.options,
        )  # fmt: skip
        self.rows = out.rows
        return out


# ---- the model


def _fp32_cast(head: Any) -> Any:
    """The forward that TRL's cast_lm_head_to_fp32 put on a head; None where it did not."""
    cast = vars(head).get("forward")
    return cast if getattr(cast, "__module__", "") == "trl.trainer.grpo_trainer" else None


class Forward:
    """A model's forward with two more branches: a call with `grpo=` returns the loss, and one with TRL's `fused_lm_head=True`
    and without gradients returns log-probs. All other calls go to the previous forward."""

    def __init__(self, model: Any, counts: Counter[str], replay: Replay | None = None) -> None:
        self.model, self.counts, self.active, self.replay = model, counts, True, replay
        # After accelerate has prepared a model, accelerate's forward wraps TRL's.
        self.previous = model.forward
        trls = vars(model).get("_original_forward", self.previous)
        markers = [getattr(forward, "grpo_kernels", None) for forward in (self.previous, trls)]
        if any(ours is not None and ours.active for ours in markers):
            raise RuntimeError(
                f"the forward of {type(model).__name__} is not TRL's fused LM head, but ours already: undo() that."
            )
        if markers[1] is not None:
            trls = markers[1].trls  # accelerate still calls our removed forward, which passes the call on
        self.trls = trls
        theirs = inspect.getclosurevars(trls).nonlocals
        names = ("temperature", "final_logit_softcapping", "logit_scale", "cast_lm_head_to_fp32", "backbone_attr", "outputs")
        missing = [name for name in names if name not in theirs]
        if missing:
            raise RuntimeError(
                f"the forward of {type(model).__name__} is not TRL's fused LM head (it does not know {', '.join(missing)}): it was "
                "patched by another package, or this TRL is not known. Undo that patch first."
            )
        self.transform = LogitTransform(
            float(theirs["temperature"]), theirs["final_logit_softcapping"], float(theirs["logit_scale"])
        )
        self.fp32_head: bool = theirs["cast_lm_head_to_fp32"]
        self.backbone: str = theirs["backbone_attr"]
        self.outputs = set(theirs["outputs"])
        plain_head(model, _fp32_cast)

    def install(self) -> None:
        @functools.wraps(type(self.model).forward)  # generate() validates its arguments against this signature
        def forward(model: Any, *args: Any, grpo: LossCall | None = None, **kwargs: Any) -> Any:
            if grpo is not None:
                return self.loss(grpo, args, kwargs)
            if self.active and self.scores(kwargs):
                return self.log_probs(args, kwargs)
            return self.previous(*args, **kwargs)

        forward.grpo_kernels = self  # type: ignore[attr-defined]
        self.model.forward = self.ours = types.MethodType(forward, self.model)

    def remove(self) -> None:
        self.active = False
        if vars(self.model).get("forward") is self.ours:
            self.model.forward = self.previous
        # Otherwise accelerate's forward wraps ours, which from now on only passes calls on.

    def scores(self, kwargs: dict[str, Any]) -> bool:
        return (
            kwargs.get("fused_lm_head", False)
            and not torch.is_grad_enabled()
            and kwargs.get("labels") is not None
            and kwargs.get("shift_labels") is None
            and not kwargs.get("output_router_logits")
            and self.outputs <= {"log_probs", "entropy"}
        )

    def loss(self, call: LossCall, args: Any, kwargs: dict[str, Any]) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput

        tokens = call.batch.targets.shape[1]
        states, router_logits, attention_mask = self.hidden(args, kwargs)
        states = states[:, -tokens - 1 : -1]
        out = self.head(states, functools.partial(call.loss, transform=self.transform))
        aux_loss: Any = None
        if kwargs.get("output_router_logits"):
            from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

            experts = router(self.model.config.get_text_config())
            assert experts is not None
            aux_loss = load_balancing_loss_func(router_logits, *experts, attention_mask)
        return FusedCausalLMOutput(loss=out.loss, log_probs=out.logps, entropy=out.entropy, aux_loss=aux_loss)

    def log_probs(self, args: Any, kwargs: dict[str, Any]) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput

        labels = kwargs["labels"][:, 1:]
        mask = labels != -100
        states = self.hidden(args, kwargs)[0][:, :-1]
        kept = None if self.replay is None else self.replay.rows(labels)

        def score(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
            entropy = "entropy" in self.outputs
            return linear_logprobs(
                hidden, weight, labels, bias=bias, mask=mask, transform=self.transform, entropy=entropy, kept=kept
            )

        log_probs, entropy = self.head(states, score)
        self.counts["scored"] += 1
        items = kwargs.get("num_items_in_batch")
        loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items)
        return FusedCausalLMOutput(loss=loss, log_probs=log_probs, entropy=entropy, label_mask=mask)

    def hidden(self, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Any, Any]:
        """(hidden states [B, L, H], router logits, attention mask) of the backbone, called with TRL's arguments."""
        ours = ("fused_lm_head", "labels", "shift_labels", "num_items_in_batch")
        kwargs = {name: value for name, value in kwargs.items() if name not in ours} | {"use_cache": False}
        states = getattr(self.model, self.backbone)(*args, **kwargs)
        return states.last_hidden_state, getattr(states, "router_logits", None), kwargs.get("attention_mask")

    def head(self, states: Tensor, function: Any) -> Any:
        """function(hidden, weight, bias) with a head that is whole on this rank."""
        from trl.trainer.utils import maybe_gather_lm_head_ctx  # DeepSpeed ZeRO-3

        head = plain_head(self.model, _fp32_cast)
        weight, bias = head.weight, head.bias
        precision: Any = nullcontext()
        if self.fp32_head:
            states, precision = states.float(), torch.autocast(states.device.type, enabled=False)
        with precision, maybe_gather_lm_head_ctx(weight, bias):
            return function(states, gathered(weight), None if bias is None else gathered(bias))
