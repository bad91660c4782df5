"""The policy and its reference on the processes of a run: what the processes tell each other; a
model on all of them, as copies with reduced gradients (DDP) or in shards (FSDP2); its log-probs and
the loss of a micro-batch, from hidden states or from logits. torchrun, `accelerate launch`, srun
and Ray Train set ranks in the environment.

Shape suffixes: B completions, P prompt width, T completion width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as checkpoint

from ..batch import TokenBatch
from ..logprobs import linear_logprobs, token_logprobs
from ..losses import grpo_loss, linear_grpo_loss
from ..objective import Denominators, Objective
from ..options import Head, Options
from ..token_sets import TokenSets
from ..transform import LogitTransform
from . import Ranks
from .config import TrainConfig

T = TypeVar("T")


# ---- a model on all of them


class Inside(nn.Module):
    """Run any function of the model inside a forward. The hooks of a wrapper around it,
    which reduce gradients and gather shards, fire whatever the function does: reads the head's
    weight as an attribute, say, or samples in a loop.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


class ParallelModel:
    """A causal language model in the layout of the run: "ddp" or "fsdp2", in a run of one process
    neither.

    Ranks have to make the same calls in the same number and order; under "fsdp2" those without
    gradients too, and every forward of the model within them, because each gathers shards from all
    ranks.
    """

    def __init__(self, model: Any, ranks: Ranks, layout: str, *, frozen: bool = False) -> None:
        self.model = model
        self.ranks = ranks
        self.layout = layout if ranks.world > 1 else "single"
        self.inside: Any = Inside(model)
        if frozen:
            model.eval().requires_grad_(False)
        if self.layout == "ddp" and not frozen:
            self.inside = nn.parallel.DistributedDataParallel(self.inside, broadcast_buffers=False)
        elif self.sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(ranks.device.type, (ranks.world,))
            # The classes that the model says must stay whole: its decoder layers.
            whole = set(getattr(model, "_no_split_modules", None) or ())
            for module in model.modules():
                if type(module).__name__ in whole:
                    fully_shard(module, mesh=mesh)
            # Embedding, norm and head are the root's: plain tensors in its forward, also where they
            # are tied.
            fully_shard(self.inside, mesh=mesh)

    @property
    def sharded(self) -> bool:
        """Whether a forward gathers parameters from other ranks."""
        return self.layout == "fsdp2"

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(model, *arguments), whose backward reduces gradients to their mean over the
        ranks. It returns a tuple, named tuple or dict of tensors: what wrappers find tensors in.
        """
        return self.inside(function, *arguments)

    @torch.no_grad()
    def without_gradients(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(model, *arguments), which may return anything."""
        if not self.sharded:
            return function(self.model, *arguments)
        try:
            return self.inside(function, *arguments)
        finally:
            self.inside.reshard()  # which a forward leaves to the backward

    def autocast(self, dtype: str) -> AbstractContextManager:
        """Around a forward: its arithmetic. Copies of the weights are kept until it ends; of
        gathered shards they would become the whole model.
        """
        if dtype == "float32":
            return nullcontext()
        return torch.autocast(
            self.ranks.device.type, getattr(torch, dtype), cache_enabled=not self.sharded
        )

    def reduction(self, wanted: bool) -> AbstractContextManager:
        """Around forward and backward: False leaves gradients as sums of this rank, to be reduced
        by a later backward. Sharded gradients are reduced every time: unreduced ones would be whole
        on each rank.
        """
        return nullcontext() if wanted or self.layout != "ddp" else self.inside.no_sync()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most `max_norm`.

        Returns the norm before, of the whole model.
        """
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def state(self, *optimizers: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """The states of model and optimizers, whole whatever the layout, on the CPU of rank 0;
        empty on the others, which have to call it too.
        """
        options = checkpoint.StateDictOptions(full_state_dict=True, cpu_offload=True)
        return checkpoint.get_state_dict(self.model, optimizers, options=options)

    def load_state(
        self, state: tuple[dict[str, Any], dict[str, Any]], *optimizers: torch.optim.Optimizer
    ) -> None:
        """Load what `state` returned, which only rank 0 needs to have."""
        how: dict[str, Any] = {
            "full_state_dict": True,
            "broadcast_from_rank0": self.ranks.world > 1,
        }
        checkpoint.set_model_state_dict(
            self.model, state[0], options=checkpoint.StateDictOptions(**how)
        )
        options = checkpoint.StateDictOptions(
            **how, strict=False
        )  # rank 0 alone has the optimizer's names
        for optimizer in optimizers:
            checkpoint.set_optimizer_state_dict(self.model, optimizer, state[1], options=options)


# ---- what it is given, and its loss and log-probs


@dataclass(frozen=True)
class Completions:
    """Left-padded prompts, each followed by its completion."""

    ids: Tensor  # [B, P + T] int64
    # [B, P + T] bool: prompt tokens and completion tokens up to and including the first end token
    attention: Tensor
    prompt_width: int  # P
    logps: Tensor | None = (
        # [B, T] fp32: of each token under what it was drawn from: temperature, top-k, top-p, min-p
        None
    )
    finished: Tensor | None = (
        None  # [B] bool: an end token was sampled, and not only the budget used up
    )
    kept: TokenSets | None = (
        # the set that each token was drawn from, B * T rows; None: all from the whole vocabulary
        None
    )

    @property
    def targets(self) -> Tensor:
        """[B, T]"""
        return self.ids[:, self.prompt_width :]

    @property
    def mask(self) -> Tensor:
        """[B, T]:

        the tokens that were sampled, known from when sampling stopped and not from the padding id.
        """
        return self.attention[:, self.prompt_width :]

    @property
    def tokens(self) -> list[list[int]]:
        """The sampled ids of each completion, the end token included."""
        rows = zip(self.targets.tolist(), self.mask.sum(1).tolist(), strict=True)
        return [ids[:length] for ids, length in rows]

    def __getitem__(self, rows: slice | Tensor) -> Completions:
        logps, finished = (None if x is None else x[rows] for x in (self.logps, self.finished))
        kept = self.kept
        if kept is not None:
            numbers = torch.arange(kept.rows, device=self.ids.device).view(self.targets.shape)
            kept = kept.take(numbers[rows].flatten())
        return Completions(
            self.ids[rows], self.attention[rows], self.prompt_width, logps, finished, kept
        )

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What a forward is given. The last token predicts nothing and is not fed."""
        attention = self.attention[:, :-1]
        return {
            "input_ids": self.ids[:, :-1],
            "attention_mask": attention.long(),
            "position_ids": positions(attention),
        }


def positions(attention: Tensor) -> Tensor:
    """Positions count real tokens, so that left padding moves nothing."""
    return (attention.long().cumsum(1) - 1).clamp(min=0)


def completion_logits(model: Any, completions: Completions) -> Tensor:
    """Logits [B, T, V] whose row t predicts completion token t; of what is fed, only the last T
    positions go through the head.
    """
    width = completions.targets.shape[1]
    out = model(**completions.inputs, logits_to_keep=width, use_cache=False)
    if out.logits.shape[1] != width:
        raise ValueError(
            f"{type(model).__name__} gives {out.logits.shape[1]} logits for logits_to_keep={width}:"
            " it ignores that."
        )
    return out.logits


class LossParts(NamedTuple):
    """Of `LossOutput`, the tensors: wrappers of a model look for them in what a forward returns."""

    loss: Tensor
    logps: Tensor
    metrics: dict[str, Tensor]


class Losses:
    """`config.loss` for the model of a run; its methods run inside a forward of that model or of
    its reference.
    """

    def __init__(
        self, config: TrainConfig, policy: ParallelModel, reference: ParallelModel | None
    ) -> None:
        self.config = config
        self.policy = policy
        self.reference = reference
        self.linear = config.loss == "linear"
        backend = "eager" if config.loss == "eager" else config.backend
        self.options = Options(backend=backend)
        for each in (policy, reference):
            if self.linear and each is not None:
                each.without_gradients(check_projection)
        # A model that softcaps its logits needs their values in its own backward.
        softcap = getattr(policy.model.config.get_text_config(), "final_logit_softcapping", None)
        self.inplace = config.loss == "logits" and softcap is None

    def loss(
        self, model: Any, completions: Completions, batch: TokenBatch, objective: Objective, normalizer: Tensor | Denominators
    ) -> LossParts:  # fmt: skip
        """The objective of one micro-batch:

        from hidden states, so that logits never exist, or from the model's logits.
        """
        options: dict[str, Any] = {"normalizer": normalizer, "options": self.options}
        with self.policy.autocast(self.config.dtype):
            rows = self.rows(model, completions)
            second = None
            if objective.exact is not None:  # the other side of the divergence
                assert self.reference is not None
                second = self.reference.without_gradients(self.rows, completions)
        # The logits of candidate sets are read twice.
        inplace = self.inplace and batch.kept is None
        own = {"reference": second} if self.linear else {"ref_logits": second, "inplace": inplace}
        out = self.of_rows((linear_grpo_loss, grpo_loss), rows, batch, objective, **options, **own)
        return LossParts(out.loss, out.logps, out.metrics)

    def of_rows(
        self, functions: tuple[Any, Any], rows: Any, *arguments: Any, **options: Any
    ) -> Any:
        """What the function of hidden states and head returns, or that of logits."""
        if not self.linear:
            return functions[1](
                rows, *arguments, transform=LogitTransform(self.config.temperature), **options
            )
        with self.policy.autocast(self.config.dtype):
            return functions[0](*rows, *arguments, **options)

    def rows(self, model: Any, completions: Completions) -> Any:
        """A model's hidden states and head, or its logits:

        rows [B, T], of which row t predicts completion token t.
        """
        if not self.linear:
            return completion_logits(model, completions)
        hidden = model.get_decoder()(**completions.inputs, use_cache=False).last_hidden_state
        return hidden[:, -completions.targets.shape[1] :], head_of(model, self.config.temperature)

    def logps(self, model: Any, completions: Completions) -> Tensor:
        """[B, T]:

        log-probs of the sampled tokens, over the sets that they were sampled from where these are
        replayed.
        """
        return self._layer_1(model, completions)[0]

    def sum_squares(self, model: Any, completions: Completions) -> Tensor:
        """[B, T]:

        the sum of the squared probabilities of all tokens that might have been sampled, likewise.
        """
        return self._layer_1(model, completions, also=("sum_squares",)).also["sum_squares"]

    def _layer_1(self, model: Any, completions: Completions, **options: Any) -> Any:
        options |= {"mask": completions.mask, "kept": completions.kept, "options": self.options}
        with self.policy.autocast(self.config.dtype):
            rows = self.rows(model, completions)
        return self.of_rows((linear_logprobs, token_logprobs), rows, completions.targets, **options)


def head_of(model: Any, temperature: float) -> Head:
    """The projection to logits of a causal language model, with what its own forward does to them.
    Of a model that is not known plain logits are assumed, which `check_projection` compares with
    its own.
    """
    try:
        transform = LogitTransform.of(model, temperature=temperature)
    except ValueError:
        transform = LogitTransform(temperature)
    head = model.get_output_embeddings()
    return Head(head.weight, getattr(head, "bias", None), transform)


@torch.no_grad()
def check_projection(model: Any) -> None:
    """Raise ValueError unless backbone, head and transform give the log-probs that the model itself
    gives.
    """
    ids = torch.arange(4, device=next(model.parameters()).device)[None]
    try:
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise ValueError(f"the head is a {type(head).__name__}, not a plain linear layer")
        expected = token_logprobs(model(input_ids=ids, use_cache=False).logits, ids)[0]
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        off = float((linear_logprobs(hidden, head_of(model, 1.0), ids)[0] - expected).abs().max())
        if not off <= 1e-3 * (1.0 + float(expected.abs().max())):
            raise ValueError(f"log-probs differ by up to {off:.2g} from the model's own forward")
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"loss='linear' does not know how {type(model).__name__} makes its logits ({error}):"
            " use loss='logits'."
        ) from error


# ---- activations that are computed again in the backward pass, in the network that samples
#
# The policy stays in eval mode for the whole run: completions, old log-probs, reference and
# gradient then come from one network, and before the first step of an update every ratio is 1.
# With dropout every forward would be another network.


@contextmanager
def recomputing(model: Any) -> Iterator[None]:
    """Around forward and backward: layers recompute where this was switched on. They do so in
    training mode alone, which the modules inside them, dropout among them, do not get.
    """
    layers = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", False)
    ]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@torch.no_grad()
def check_recomputing(model: Any) -> None:
    """Raise ValueError if layers that recompute are another network than the one that samples."""
    ids = (
        torch.arange(8, device=next(model.parameters()).device)[None]
        % model.config.get_text_config().vocab_size
    )
    expected = model(input_ids=ids, use_cache=False).logits
    with recomputing(model):
        recomputed = model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(recomputed, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise ValueError(
            f"gradient_checkpointing=True switches on the dropout of {type(model).__name__}, and it"
            " would train another network than the one that samples: set the dropout in the"
            " model's configuration to 0, or leave gradient_checkpointing off."
        )
