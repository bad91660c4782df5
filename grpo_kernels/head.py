"""A language model's head that computes log-probs and losses in its own forward, so that hooks on the head fire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from .batch import TokenBatch
from .checks import describe
from .logprobs import linear_logprobs
from .losses import check_specs, linear_grpo_loss
from .objective import Objective
from .specs import LogitTransform, as_transform

Tensor = torch.Tensor


class HeadLogprobs(NamedTuple):
    logps: Tensor
    entropy: Tensor | None

    def __repr__(self) -> str:
        return describe(self)


class HeadLoss(NamedTuple):
    """The tensors of a `LossOutput` as a tuple, since wrappers such as DDP and FSDP look for tensors in tuples.

    loss, logps, entropy   as in `LossOutput`.
    metrics                with metrics=True, else None."""

    loss: Tensor
    logps: Tensor
    entropy: Tensor
    metrics: dict[str, Tensor] | None

    def __repr__(self) -> str:
        return describe(self)


class _AsGiven:
    """Hides an argument from the hooks of the head. FSDP's mixed precision casts all floats among the arguments, in dataclasses
    too, and an old log-prob in 16 bits makes the ratio wrong by percents."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @classmethod
    def wrap(cls, x: Any) -> Any:
        floats = isinstance(x, Tensor) and x.is_floating_point()
        return cls(x) if floats or isinstance(x, (TokenBatch, Objective, tuple)) else x

    @classmethod
    def unwrap(cls, x: Any) -> Any:
        return x.value if isinstance(x, cls) else x


class FusedLMHead(nn.Linear):
    """The linear layer `head`, with its own weight and bias, and two more ways to be called.

        head = FusedLMHead.install(model)                  # or of a module of yours: FusedLMHead(linear)

        head(hidden)                                       # logits, as before
        head(hidden, targets, entropy=True)                # HeadLogprobs(logps, entropy): linear_logprobs
        head(hidden, batch, objective, normalizer=tokens)  # HeadLoss(loss, logps, entropy, metrics): linear_grpo_loss

    Why: FSDP, ZeRO-3 and offloading gather a module's weight around its forward. Code that reads `lm_head.weight` as an
    attribute gets a shard, or (FSDP2, `full_tensor()`) a gradient that is not averaged over the ranks, without an error.
    Calling the head runs these hooks. It also works in the forward of a model that is wrapped as a whole in DDP or FSDP.

    Parameters are the same objects, under the same names: optimizers, tied embeddings and checkpoints are not affected.
    Install before fully_shard, DDP or deepspeed.initialize, and before PEFT wraps the head.

    head       a plain nn.Linear [V, H]. Raises ValueError for anything else (LoRA, quantised, sharded, hooked, installed twice).
    transform  softcap and scale of the model's logits, which `head(hidden)` leaves to the model as before:
               LogitTransform.of(model), which `install` takes by itself; None: there are none. The temperature is an argument
               of the calls.
    """

    def __init__(self, head: nn.Linear, *, transform: LogitTransform | None = None) -> None:
        _check_plain(head)
        nn.Module.__init__(self)
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight = head.weight
        self.register_parameter("bias", head.bias)
        self.transform = as_transform(transform)
        self.training = head.training
        for name, value in vars(head).items():  # attributes that libraries have set on it
            self.__dict__.setdefault(name, value)

    def __call__(self, hidden: Tensor, *arguments: Any, **options: Any) -> Any:
        kept = {name: _AsGiven.wrap(x) for name, x in options.items()}
        out = super().__call__(hidden, *map(_AsGiven.wrap, arguments), **kept)
        if isinstance(out, HeadLogprobs) and out.logps.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"the head's log-probs were cast to {out.logps.dtype} on their way out: give the group of the head FSDP2's "
                "MixedPrecisionPolicy with output_dtype=None (accelerate sets one): log-probs of 16 bits make wrong ratios."
            )
        return out

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        targets: Tensor | TokenBatch | None = None,
        objective: Objective | None = None,
        *,
        temperature: float | Tensor = 1.0,
        metrics: bool = False,
        **options: Any,
    ) -> Tensor | HeadLogprobs | HeadLoss:
        """logits, HeadLogprobs or HeadLoss, by what is given besides `hidden` [..., H].

        targets      int64, the leading shape of hidden; or a TokenBatch, with an `objective`.
        temperature  a number or a tensor, see LogitTransform; for log-probs and losses.
        metrics      True: those of `LossOutput` are in the result of a loss.
        options      of `linear_logprobs` (mask, entropy, backend, ...) or `linear_grpo_loss` (normalizer, reference, ...), but
                     not what the head has itself: weight, bias and transform are a ValueError. So is weight_grad of a head that
                     FSDP or ZeRO-3 gathers; under DDP see `linear_grpo_loss`."""
        targets, objective, temperature = map(_AsGiven.unwrap, (targets, objective, temperature))
        options = {name: _AsGiven.unwrap(x) for name, x in options.items()}
        for name in ("weight", "bias", "transform"):
            if name in options:
                raise ValueError(
                    f"{name} is an option of this call, but the head has its own: leave it out (softcap and scale are given to "
                    "FusedLMHead(head, transform=...), the temperature to the call)."
                )
        if targets is None:
            if objective is not None or options or metrics:
                raise ValueError(
                    "targets is None, so the head gives logits: objective and options want targets or a TokenBatch."
                )
            return super().forward(hidden)
        if isinstance(objective, TokenBatch):
            check_specs(targets, objective)
        if isinstance(targets, TokenBatch) != (objective is not None):
            raise ValueError(
                f"targets is a {type(targets).__name__} and objective a {type(objective).__name__}: pass a TokenBatch with an "
                "Objective for a loss, or ids alone for log-probs."
            )
        options["transform"] = replace(self.transform, temperature=temperature)
        if not isinstance(targets, TokenBatch):
            if metrics:
                raise ValueError("metrics=True: only a loss has them, pass a TokenBatch and an Objective.")
            logps, entropy, *more = linear_logprobs(hidden, self.weight, targets, bias=self.bias, **options)
            # Copies, not views: FSDP2 loses its hook on a view when the caller writes to it in place, and warns of it.
            entropy = None if entropy is None else entropy.clone()
            if more:  # as the function that has these options
                return logps.clone(), entropy, {name: x.clone() for name, x in more[0].items()}  # type: ignore[return-value]
            return HeadLogprobs(logps.clone(), entropy)
        assert objective is not None
        self._check_not_cast(targets, options.get("normalizer"))
        out = linear_grpo_loss(hidden, self.weight, targets, objective, bias=self.bias, **options)
        return HeadLoss(out.loss, out.logps, out.entropy, dict(out.metrics) if metrics else None)

    def _check_not_cast(self, batch: TokenBatch, normalizer: Any) -> None:
        """Raise ValueError if FSDP has cast the tensors of the batch to 16 bits before they reached the head."""
        if not getattr(self, "_is_fsdp_managed_module", False):
            return
        given = [(f.name, getattr(batch, f.name)) for f in fields(batch)]
        given += [("normalizer", x) for x in (normalizer if isinstance(normalizer, tuple) else (normalizer,))]
        for name, x in given:
            if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16):
                raise ValueError(
                    f"{name} is {x.dtype}: FSDP's mixed precision casts the arguments of a wrapped model's forward, and log-probs "
                    "of 16 bits make wrong ratios. Give the root MixedPrecisionPolicy(..., cast_forward_inputs=False), and pass "
                    "float32; token ids need no cast."
                )

    def plain(self) -> nn.Linear:
        """An nn.Linear of the same parameters."""
        with torch.device("meta"):  # allocates no parameters: they are replaced below
            linear = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        linear.weight = self.weight
        linear.register_parameter("bias", self.bias)
        linear.training = self.training
        return linear

    @classmethod
    def install(cls, model: Any, *, transform: LogitTransform | None = None) -> FusedLMHead:
        """Put one in the place of a Hugging Face model's head; softcap and scale are `LogitTransform.of(model)` unless given.

        Raises ValueError, with the model as it was, where the head is not a plain linear layer or the model not known."""
        old = model.get_output_embeddings()
        transform = LogitTransform.of(model) if transform is None else transform
        head = cls(old, transform=transform)
        model.set_output_embeddings(head)
        return head

    @staticmethod
    def undo(model: Any) -> nn.Linear:
        """Put a plain nn.Linear back, with the parameters as they are now. Raises ValueError where there is nothing to undo."""
        head = model.get_output_embeddings()
        if not isinstance(head, FusedLMHead):
            raise ValueError(f"the head of the model is a {type(head).__name__}, not a FusedLMHead: there is nothing to undo.")
        linear = head.plain()
        model.set_output_embeddings(linear)
        return linear


def _refuse(head: Any, reason: str, remedy: str) -> NoReturn:
    raise ValueError(f"head is a {type(head).__module__}.{type(head).__name__}, {reason}: {remedy}")


#: Where the wrappers are made that change nothing but dtypes and places: accelerate's, and the autocast that it puts in them.
_PASSES_ON = ("accelerate.hooks", "accelerate.utils.operations", "torch.amp.autocast_mode")


def forward_of(module: nn.Module) -> Any:
    """The function that makes what a call of the module returns: its class's forward, or what was put in its place on the instance.

    Accelerate's wrappers are passed through: autocast, the cast of outputs to fp32, and its own hooks that move weights."""
    hook = getattr(module, "_hf_hook", None)
    foreign = any(type(one).__module__ != "accelerate.hooks" for one in getattr(hook, "hooks", (hook,)) if one is not None)
    forward = vars(module).get("forward", type(module).forward)
    while True:
        forward = getattr(forward, "__func__", forward)
        inner = getattr(forward, "func", forward)  # of a functools.partial
        made_in = getattr(inner, "__globals__", {}).get("__name__", type(inner).__module__)
        plain = forward is type(module).forward or made_in not in _PASSES_ON or not hasattr(forward, "__wrapped__")
        if plain or (foreign and made_in == "accelerate.hooks"):
            return forward
        forward = forward.__wrapped__


def check_linear(head: Any, known: Any = None) -> None:
    """Raise ValueError unless a call of the module is x W^T + b with its own weight and bias, and nothing else.

    A FusedLMHead is such a module, and so is a head that FSDP2 or ZeRO-3 has sharded or accelerate has hooked.
    known   a forward that the caller knows to be the same thing, where the instance has been given one."""
    if hasattr(head, "token_adapter"):
        _refuse(head, "PEFT's trainable tokens", "without trainable_token_indices, or with modules_to_save for the embeddings.")
    if hasattr(head, "base_layer"):
        remedy = "take it out of the adapter's target_modules, or merge the adapter (merge_and_unload)."
        _refuse(head, "which carries an adapter", remedy)
    plain = (nn.Linear.forward, FusedLMHead.forward)
    if not isinstance(head, nn.Linear) or type(head).forward not in plain or forward_of(head) not in (*plain, known):
        _refuse(head, "whose forward is not that of torch.nn.Linear", "its logits may be more than hidden @ weight.T.")
    if any(True for _ in head.children()) or set(head._parameters) - {"weight", "bias"} or head._buffers:
        _refuse(head, "with parameters or modules besides weight and bias", "a parametrised layer has to be made plain first.")
    kind = type(head.weight.data)
    if kind is not torch.Tensor and not hasattr(head.weight, "placements"):
        _refuse(head, f"whose weight is a {kind.__module__}.{kind.__name__}", "a quantised weight has to be made plain first.")


def plain_head(model: Any, known: Callable[[Any], Any] = lambda head: None) -> Any:
    """The output embeddings of a language model, whose weight (and bias, if it has one) make the logits. Raises ValueError where
    a call of them is more than a product with these.

    known   of a head, the forward on its instance that the caller knows to be the same thing, see `check_linear`."""
    head = model.get_output_embeddings()
    # PEFT's modules_to_save: a copy that is trained, whose weight it hands out.
    inner = head.original_module if hasattr(head, "modules_to_save") else head
    check_linear(inner, known(inner))
    weight = head.weight
    if not isinstance(weight, Tensor) or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        dtype = getattr(weight, "dtype", None)
        raise ValueError(f"the weight of the head is {dtype}: it must be float32, bfloat16 or float16.")
    return head


#: Hooks of a module that would be lost with it: those of its calls, and those of its checkpoints.
CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS = (
    *CALL_HOOKS, "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def _check_plain(head: Any) -> None:
    """Raise ValueError unless the head can be replaced by one that computes x W^T + b from its parameters, all here."""
    if isinstance(head, FusedLMHead):
        _refuse(head, "installed already", "use it as it is.")
    check_linear(head)
    if "forward" in vars(head) or any(getattr(head, hooks) for hooks in HOOKS):
        _refuse(head, "with hooks, which would be lost", "install the fused head first, and register them on it.")
    if hasattr(head.weight, "placements"):
        _refuse(
            head, "whose weight is a DTensor",
            "install before fully_shard. A head that a tensor-parallel plan has cut: linear_grpo_loss(..., shard=VocabShard.of(weight)).",
        )  # fmt: skip
    if head.weight.dim() != 2 or "weight" not in head._parameters:  # FSDP1 leaves a view of its own
        _refuse(head, f"whose weight has shape {list(head.weight.shape)}", "install before ZeRO-3 or FSDP shards it.")
