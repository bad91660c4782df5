"""The policy and its reference on the ranks of a run, with their log-probs and the loss of a
micro-batch, from hidden states or from logits.

A model is a copy on each rank (DDP), or its parameters are sharded over the ranks (FSDP2).
torchrun, `accelerate launch`, srun and Ray Train set the ranks in the environment.

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


# ---- a model on all ranks


class FunctionOfModel(nn.Module):
    """Runs any function of a model inside a forward, so that DDP or FSDP2 can wrap it.

    The hooks of the wrapper gather shards and reduce gradients around the forward. The function may
    read the head's weight as an attribute, or sample in a loop.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(model, *arguments), inside the hooks of DDP or FSDP2."""
        return function(self.model, *arguments)


class ParallelModel:
    """A causal language model on all ranks of a run.

    model     the model of this rank
    layout    "ddp": a copy on each rank. "fsdp2": sharded over the ranks. With one rank: neither.
    frozen    whether the model is not trained

    All ranks must make the same calls in the same order, because each call may communicate. Under
    "fsdp2" this is also true for calls without gradients, and for each forward within them.
    """

    def __init__(self, model: Any, ranks: Ranks, layout: str, *, frozen: bool = False) -> None:
        """Copy or shard a model over the ranks.

        model    a causal language model of transformers, the same on all ranks
        ranks    the ranks of the run
        layout   "ddp": a copy on each rank. "fsdp2": parameters are sharded. One rank has neither.
        frozen   whether the model is not trained
        """
        self.model = model
        self.ranks = ranks
        self.layout = layout if ranks.world > 1 else "single"
        self.wrapped: Any = FunctionOfModel(model)
        if frozen:
            model.eval().requires_grad_(False)
        if self.layout == "ddp" and not frozen:
            self.wrapped = nn.parallel.DistributedDataParallel(
                self.wrapped, broadcast_buffers=False
            )
        elif self.sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(ranks.device.type, (ranks.world,))
            # transformers lists the classes of decoder layers. Each layer is gathered as a whole.
            layer_classes = set(getattr(model, "_no_split_modules", None) or ())
            for module in model.modules():
                if type(module).__name__ in layer_classes:
                    fully_shard(module, mesh=mesh)
            # Embedding, norm and head belong to the root. They are plain tensors in its forward,
            # also if they are tied.
            fully_shard(self.wrapped, mesh=mesh)

    @property
    def sharded(self) -> bool:
        """Return whether a forward gathers parameters from other ranks."""
        return self.layout == "fsdp2"

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(model, *arguments). Its backward averages gradients over the ranks.

        The function must return a tuple, named tuple or dict of tensors, so that DDP and FSDP2 find
        the tensors.
        """
        return self.wrapped(function, *arguments)

    @torch.no_grad()
    def without_gradients(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(model, *arguments), computed without gradients.

        The result of the function may have any type.
        """
        if not self.sharded:
            return function(self.model, *arguments)
        try:
            return self.wrapped(function, *arguments)
        finally:
            # FSDP2 frees the gathered parameters of the root only in a backward. None follows here.
            self.wrapped.reshard()

    def autocast(self, dtype: str) -> AbstractContextManager:
        """Return a context in which a forward computes in `dtype`.

        Autocast caches converted weights until the context ends. With shards this cache would grow
        to the whole model, so it is switched off.
        """
        if dtype == "float32":
            return nullcontext()
        return torch.autocast(
            self.ranks.device.type, getattr(torch, dtype), cache_enabled=not self.sharded
        )

    def reduction(self, is_needed: bool) -> AbstractContextManager:
        """Return a context for forward and backward, after which DDP has reduced gradients or not.

        is_needed   True: reduce the gradients over the ranks in the backward. False: only add this
                    rank's gradient to `.grad`, for a later backward to reduce. FSDP2 always
                    reduces, because unreduced gradients are not sharded.
        """
        if is_needed or self.layout != "ddp":
            return nullcontext()
        return self.wrapped.no_sync()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most `max_norm`.

        Returns the norm of the gradient of the whole model before scaling, 0-d.
        """
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        # With FSDP2 it is a DTensor, whose shards add up to the norm of the whole model.
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def state(self, *optimizers: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states of the model and of optimizers, not sharded, on the CPU of rank 0.

        They are empty on other ranks, which must call this too.
        """
        options = checkpoint.StateDictOptions(full_state_dict=True, cpu_offload=True)
        return checkpoint.get_state_dict(self.model, optimizers, options=options)

    def load_state(
        self, state: tuple[dict[str, Any], dict[str, Any]], *optimizers: torch.optim.Optimizer
    ) -> None:
        """Load states that `ParallelModel.state` returned. All ranks must call this.

        state        (states of the model, states of the optimizers) on rank 0, two empty
                     dictionaries on other ranks
        optimizers   the optimizers whose states were saved
        """
        model_state, optimizer_state = state
        has_other_ranks = self.ranks.world > 1
        options = checkpoint.StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=has_other_ranks
        )
        checkpoint.set_model_state_dict(self.model, model_state, options=options)
        # Not strict, because only rank 0 has the names of the optimizer's state.
        options = checkpoint.StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=has_other_ranks, strict=False
        )
        for optimizer in optimizers:
            checkpoint.set_optimizer_state_dict(
                self.model, optimizer, optimizer_state, options=options
            )


# ---- completions, their loss and log-probs


@dataclass(frozen=True)
class Completions:
    """Completions with their left-padded prompts.

    ids            int64 [B, P + T]: prompts, then completions
    attention      bool [B, P + T]: False for padding, before a prompt or after a completion
    prompt_width   P
    logps          fp32 [B, T]: log-prob of each token under the distribution it was sampled from,
                   after temperature, top-k, top-p and min-p; or None
    finished       bool [B]: True if the completion ended with an end token, False if it used up its
                   budget; or None
    kept           the set of ids that each token was sampled from, B * T rows; None if all tokens
                   were sampled from the whole vocabulary
    """

    ids: Tensor
    attention: Tensor
    prompt_width: int
    logps: Tensor | None = None
    finished: Tensor | None = None
    kept: TokenSets | None = None

    @property
    def targets(self) -> Tensor:
        """Return the ids of the completions, [B, T]."""
        return self.ids[:, self.prompt_width :]

    @property
    def mask(self) -> Tensor:
        """Return which ids of the completions were sampled, bool [B, T].

        The padding id cannot tell, because it may be an end token.
        """
        return self.attention[:, self.prompt_width :]

    @property
    def tokens(self) -> list[list[int]]:
        """Return the sampled ids of each completion, with its end token."""
        rows = zip(self.targets.tolist(), self.mask.sum(1).tolist(), strict=True)
        return [ids[:length] for ids, length in rows]

    def __getitem__(self, rows: slice | Tensor) -> Completions:
        """Return some of the completions.

        rows   a slice, or int64 [number of completions to return]: their indices
        """
        kept = self.kept
        if kept is not None:
            # The sets of completion b are the rows b * T to (b + 1) * T - 1.
            token_rows = torch.arange(kept.rows, device=self.ids.device).view(self.targets.shape)
            kept = kept.take(token_rows[rows].flatten())
        return Completions(
            self.ids[rows],
            self.attention[rows],
            self.prompt_width,
            logps=None if self.logps is None else self.logps[rows],
            finished=None if self.finished is None else self.finished[rows],
            kept=kept,
        )

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Return the inputs of a forward of the model, without the last token of each row.

        The last token predicts nothing.
        """
        attention = self.attention[:, :-1]
        return {
            "input_ids": self.ids[:, :-1],
            "attention_mask": attention.long(),
            "position_ids": positions(attention),
        }


def positions(attention: Tensor) -> Tensor:
    """Return the position ids of tokens: how many real tokens precede each one in its row.

    attention   bool [B, L]: False for padding, whose position does not matter

    The result is int64 [B, L].
    """
    return (attention.long().cumsum(1) - 1).clamp(min=0)


def completion_logits(model: Any, completions: Completions) -> Tensor:
    """Return logits [B, T, V], of which row t predicts token t of the completion.

    model         a causal language model of transformers
    completions   B completions of T tokens with their prompts

    Only the last T positions go through the head. Raises ValueError for a model that ignores
    `logits_to_keep`.
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
    """The tensors of `LossOutput`, as a tuple in which DDP and FSDP2 find them."""

    loss: Tensor
    logps: Tensor
    metrics: dict[str, Tensor]


class Losses:
    """Losses and log-probs of a run, from hidden states or from logits as `config.loss` says.

    The methods run inside a forward of the policy or of its reference, see `ParallelModel`.

    reference   the frozen reference of the KL term, or None

    Raises ValueError with config.loss="linear" if it is not known how a model computes its logits.
    """

    def __init__(
        self, config: TrainConfig, policy: ParallelModel, reference: ParallelModel | None
    ) -> None:
        """Choose how losses and log-probs are computed.

        config      the options of the run
        policy      the model that is trained
        reference   the frozen reference of the KL term, or None

        Raises ValueError with config.loss="linear" if it is not known how a model computes its
        logits.
        """
        self.config = config
        self.policy = policy
        self.reference = reference
        self.linear = config.loss == "linear"
        backend = "eager" if config.loss == "eager" else config.backend
        self.options = Options(backend=backend)
        for model in (policy, reference):
            if self.linear and model is not None:
                model.without_gradients(check_projection)
        # The backward of a softcap needs the values of the logits, so they must not be overwritten.
        softcap = getattr(policy.model.config.get_text_config(), "final_logit_softcapping", None)
        self.inplace = config.loss == "logits" and softcap is None

    def loss(
        self,
        model: Any,
        completions: Completions,
        batch: TokenBatch,
        objective: Objective,
        normalizer: Tensor | Denominators,
    ) -> LossParts:
        """Return the loss of one micro-batch.

        With config.loss="linear" it is computed from hidden states, and the logits never exist as a
        whole.

        model         the policy
        completions   the completions of the micro-batch
        batch         their targets, advantages and log-probs
        normalizer    the denominator of the loss, see `global_normalizer`
        """
        with self.policy.autocast(self.config.dtype):
            # (hidden states, head) or logits
            source = self.logits_or_hidden(model, completions)
            reference_source = None
            if objective.exact is not None:  # a divergence from the reference over all ids
                assert self.reference is not None
                reference_source = self.reference.without_gradients(
                    self.logits_or_hidden, completions
                )
        if self.linear:
            hidden, head = source
            with self.policy.autocast(self.config.dtype):
                out = linear_grpo_loss(
                    hidden,
                    head,
                    batch,
                    objective,
                    reference=reference_source,
                    normalizer=normalizer,
                    options=self.options,
                )
        else:
            out = grpo_loss(
                source,
                batch,
                objective,
                ref_logits=reference_source,
                transform=LogitTransform(self.config.temperature),
                normalizer=normalizer,
                # With candidate sets the logits are read twice, so they must not be overwritten.
                inplace=self.inplace and batch.kept is None,
                options=self.options,
            )
        return LossParts(out.loss, out.logps, out.metrics)

    def logits_or_hidden(self, model: Any, completions: Completions) -> Any:
        """Return (hidden states [B, T, H], head) with config.loss="linear", else logits [B, T, V].

        Position t predicts token t of the completion.

        model         the policy or the reference
        completions   completions of T tokens with their prompts
        """
        if not self.linear:
            return completion_logits(model, completions)
        hidden = model.get_decoder()(**completions.inputs, use_cache=False).last_hidden_state
        width = completions.targets.shape[1]
        return hidden[:, -width:], head_of(model, self.config.temperature)

    def logps(self, model: Any, completions: Completions) -> Tensor:
        """Return log-probs of the sampled tokens, fp32 [B, T], 0 for padding.

        If `completions` has the candidate sets of the tokens (the ids left by top-k, top-p or
        min-p), log-probs are normalised over these sets, otherwise over the vocabulary.

        model   the policy or the reference
        """
        return self._logprobs(model, completions).logps

    def sum_squares(self, model: Any, completions: Completions) -> Tensor:
        """Return the sum of the squared probabilities at each sampled token, fp32 [B, T].

        It is over the same ids as in `logps`.
        """
        return self._logprobs(model, completions, also=("sum_squares",)).also["sum_squares"]

    def _logprobs(self, model: Any, completions: Completions, also: tuple[str, ...] = ()) -> Any:
        """Return the result of `linear_logprobs` or `token_logprobs` for the sampled tokens.

        model         the policy or the reference
        completions   the completions, with the candidate sets of their tokens if they have any
        also          names of statistics that the result has in addition
        """
        arguments: dict[str, Any] = {
            "mask": completions.mask,
            "kept": completions.kept,  # the ids that each token was sampled from; None for all
            "also": also,
            "options": self.options,
        }
        targets = completions.targets
        with self.policy.autocast(self.config.dtype):
            source = self.logits_or_hidden(model, completions)
            if self.linear:
                hidden, head = source
                return linear_logprobs(hidden, head, targets, **arguments)
        transform = LogitTransform(self.config.temperature)
        return token_logprobs(source, targets, transform=transform, **arguments)


def head_of(model: Any, temperature: float) -> Head:
    """Return the head of a causal language model, with its softcap, scale and temperature.

    If the class of the model is not known, the head has no softcap and no scale. `check_projection`
    finds out whether this is wrong.
    """
    try:
        transform = LogitTransform.of(model, temperature=temperature)
    except ValueError:
        transform = LogitTransform(temperature)
    head = model.get_output_embeddings()
    return Head(head.weight, getattr(head, "bias", None), transform)


@torch.no_grad()
def check_projection(model: Any) -> None:
    """Raise ValueError unless hidden states and `head_of` give the model's own log-probs.

    They are compared on four tokens.
    """
    ids = torch.arange(4, device=next(model.parameters()).device)[None]
    try:
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise ValueError(f"the head is a {type(head).__name__}, not a plain linear layer")
        logits = model(input_ids=ids, use_cache=False).logits
        expected = token_logprobs(logits, ids).logps
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        logps = linear_logprobs(hidden, head_of(model, 1.0), ids).logps
        error = float((logps - expected).abs().max())
        if not error <= 1e-3 * (1.0 + float(expected.abs().max())):  # a NaN is an error
            raise ValueError(f"log-probs differ by up to {error:.2g} from the model's own forward")
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"loss='linear' does not know how {type(model).__name__} makes its logits ({error}):"
            " use loss='logits'."
        ) from error


# ---- gradient checkpointing in eval mode
#
# The policy stays in eval mode for the whole run, without dropout. Completions, old log-probs and
# gradient are then computed by the same network, and before the first step of an update every ratio
# is 1.


@contextmanager
def recomputing(model: Any) -> Iterator[None]:
    """Let layers with gradient checkpointing recompute activations in this context.

    model   the policy, which is in eval mode

    transformers recomputes only in training mode. Only the layers themselves are set to it, not the
    modules inside them, so that dropout stays off.
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
    """Raise ValueError if gradient checkpointing changes the logits, such as by dropout.

    model   a causal language model in eval mode, whose layers have gradient checkpointing

    The logits with and without recomputing are compared on eight tokens.
    """
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.arange(8, device=next(model.parameters()).device)[None] % vocab_size
    expected = model(input_ids=ids, use_cache=False).logits
    with recomputing(model):
        recomputed = model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(recomputed, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise ValueError(
            f"gradient_checkpointing=True switches on the dropout of {type(model).__name__}, and it"
            " would train another network than the one that samples: set the dropout in the"
            " model's configuration to 0, or leave gradient_checkpointing off."
        )
