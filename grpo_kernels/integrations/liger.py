"""Liger's GRPO losses under their own names and signatures, on our kernels, on GPU and CPU.

    # was liger_kernel.chunked_loss
    from grpo_kernels.integrations.liger import LigerFusedLinearGRPOLoss
    # was liger_kernel.transformers.grpo_loss
    from grpo_kernels.integrations.liger import triton_grpo_loss
    # was liger_kernel.ops.grpo_loss
    from grpo_kernels.integrations.liger import fused_selective_log_softmax

Signatures, defaults, values and gradients equal Liger-Kernel 0.8.5, which need not be
installed. What differs on purpose:

- Bad input raises ValueError, where Liger asserts, and more of it is refused: a delta of at most 1,
  masks other than 0 and 1.
- Masked positions do not count, whatever they hold: not in LUSPO, whose Liger versions weigh the
  padding too (or multiply by the length twice), and not in VESPO's sum of log-weights, where a
  token of weight 0 leaves alone instead of silencing its sequence.
  `LigerFusedLinearGRPOLoss(as_liger=True)` counts them as Liger does.
- A delta below 1 + eps_high has its whole gradient: Liger's Triton loss drops it for tokens with A
  < 0 between the two.
- A gradient that overwrites the logits bumps their version counter: autograd raises where something
  needs the old values.
- The gradients of a reduced loss are made in the forward and handed over once: a second backward
  raises RuntimeError.
- `compiled` and `chunk_size` change nothing: nothing is compiled, and chunks follow from the
  vocabulary.
- The head's gradient is summed in fp32, logits are never rounded, and strided inputs are welcome.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..batch import TokenBatch
from ..checks import is_leaf_or_view_of_leaf, refuse_unknown, require, values_are_checked
from ..core.loss_formulas import sum_losses as total
from ..distributed import global_normalizer
from ..formulas.kl import Kl
from ..formulas.token_inputs import TokenInputs
from ..logprobs import linear_logprobs, token_logprobs
from ..losses import grpo_loss, linear_grpo_loss, objective_loss
from ..objective import PRESETS, Objective
from ..options import Head
from ..transform import LogitTransform
from ._swap import Adapter, NotCovered, Slots, adapt_arguments, unknown_option, with_trainer_names
from ._tensors import (
    BY_ITEMS,
    CLIPPED,
    at_least_one,
    default_group,
    distillation_batch,
    divergence_of,
    ratio_terms,
    surrogate_of,
)

__all__ = [
    "LIGER_VERSION", "LigerFusedLinearGRPOLoss", "LigerFusedLinearJSD", "bind", "fused_selective_log_softmax", "liger_objective", "patch",
    "triton_grpo_loss",
]  # fmt: skip


#: The version whose signatures and values these are.
LIGER_VERSION = "0.8.5"
#: The versions whose classes gave the same losses, metrics and gradients as ours, for every option
#: that they have.
ADAPTER = Adapter(
    "Liger", "liger-kernel", ("0.6.5", "0.7.0", "0.8.2", "0.8.4", LIGER_VERSION),
    {"LigerFusedLinearGRPOLoss": "liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss"},
    {"axolotl: `plugins: [grpo_kernels.plugins.axolotl.FusedGRPO]` and `trl: {use_liger_loss: true}`":
     "the loss of its GRPO trainers, where TRL calls Liger's",
     'ms-swift: `--external_plugins "$(python -m grpo_kernels plugin ms_swift)" --use_liger_kernel true`':
     "the GRPO loss where ms-swift calls Liger's"},
)  # fmt: skip
#: By the package of a trainer's object: Liger itself, and a TRL with a copy of it.
COPIES = {"liger-kernel": ADAPTER.tested, "trl": ("1.13",)}
#: What trainers call the attribute that holds Liger's object, the newest first.
ATTRIBUTES = ("liger_loss", "liger_grpo_loss")

#: Options of `liger_objective` that stand for several of Liger's.
TOGETHER = {
    "sapo_temperatures": ("sapo_temperature_pos", "sapo_temperature_neg"),
    "vespo": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
}
#: Options of Liger's loss that are no part of an objective, and where they belong.
NO_OBJECTIVE = {
    "temperature": (
        "it divides the logits: pass transform=LogitTransform(temperature) to the function of the"
        " loss."
    ),
    **dict.fromkeys(("compiled", "chunk_size"), "it changes nothing here: leave it out."),
}


def liger_objective(loss_type: str = "dapo", **options: Any) -> Objective:
    """Convert Liger's options to an `Objective`, for the functions of grpo_kernels.

    loss_type    "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" or "vespo": surrogate
                 and denominator

    The options are those of `LigerFusedLinearGRPOLoss`, with the same defaults:

    importance_sampling_level   "token", or "sequence" for the losses that clip
    beta         weight of the KL, estimated by k3; use_bias_correction_kl multiplies it by the
                 ratio
    epsilon_low, epsilon_high, delta   clip widths and two-sided bound, as in `Clip`. As in Liger,
                                       epsilon_high is the cap of CISPO's ratio, and CISPO, SAPO and
                                       VESPO ignore delta.
    sapo_temperature_pos, sapo_temperature_neg   for A > 0, for all other A; sapo_temperatures
                                                 passes both
    vespo_k_pos, vespo_lambda_pos   for A >= 0
    vespo_k_neg, vespo_lambda_neg   for A < 0; vespo passes all four
    max_completion_length   tokens per completion, the divisor of dr_grpo; other losses ignore it

    temperature, compiled and chunk_size are not part of an objective and are refused. Raises
    ValueError naming what is wrong.
    """
    for name in [name for name in TOGETHER if name in options]:
        parts = TOGETHER[name]
        values = options.pop(name)
        remedy = (
            f"it stands for {', '.join(parts)}: pass {len(parts)} numbers, and none of these names."
        )
        fits = isinstance(values, tuple | list) and len(values) == len(parts)
        require(fits and not options.keys() & parts, name, values, remedy)
        options |= zip(parts, values, strict=True)
    for name in options.keys() & NO_OBJECTIVE:
        require(False, name, options[name], NO_OBJECTIVE[name])
    refuse_unknown("liger_objective", options, OPTIONS)
    return _objective_of(SimpleNamespace(**OPTIONS | options | {"loss_type": loss_type}))


def _objective_of(options: Any) -> Objective:
    """The objective of an object that has Liger's options."""
    surrogate = surrogate_of(options)
    kind = options.loss_type
    level = options.importance_sampling_level
    require(
        level in ("token", "sequence"),
        "importance_sampling_level",
        level,
        'it must be "token" or "sequence".',
    )
    # Liger's own message, because callers match on it.
    remedy = (
        f"Sequence-level importance sampling is not supported for loss_type={kind!r}. Use"
        " importance_sampling_level='token' instead."
    )
    require(level == "token" or kind in CLIPPED, "importance_sampling_level", level, remedy)
    if kind == "cispo" and options.epsilon_high < 1:
        warnings.warn(
            f"epsilon_high={options.epsilon_high} is CISPO's cap, an absolute ratio: below 1 it caps on-policy tokens too. "
            "The paper's value is near 5.", stacklevel=3,
        )  # fmt: skip
    return Objective(
        surrogate, level="sequence-sum" if kind == "vespo" else level, aggregate=PRESETS[kind].aggregate,
        beta=options.beta if options.use_ref_model else 0.0, kl=Kl("k3", weighting="ratio" if options.use_bias_correction_kl else "none"),
        max_tokens=options.max_completion_length if kind == "dr_grpo" else None,
    )  # fmt: skip


# ---- Liger's tensors as a TokenBatch and a denominator


def as_bool(name: str, mask: Tensor | None) -> Tensor | None:
    """A 0/1 mask of any dtype as bool. A fraction is refused, since it would be a weight."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    nonzero = mask != 0
    if values_are_checked(mask) and not torch.equal(mask, nonzero.to(mask.dtype)):
        raise ValueError(f"{name} holds other numbers than 0 and 1: pass weights as vllm_is_ratio.")
    return nonzero


def token_batch(
    ids: Tensor,
    advantages: Tensor,
    objective: Objective,
    *,
    padding: int = 0,
    weights: Tensor | None,
    **fields: Tensor | None,
) -> TokenBatch:
    """Liger's tensors as a TokenBatch, with `padding` masked positions after the last one; `fields`
    are those of TokenBatch.
    """
    mask = fields["mask"]
    if weights is not None and objective.surrogate.absorbs_weights and weights.numel() == len(ids):
        # A weight of a sequence enters its ratio once: at its first trained token.
        trained = (
            torch.ones(ids.shape, dtype=torch.bool, device=ids.device) if mask is None else mask
        )
        first = trained & (trained.cumsum(1) == 1)
        weights = torch.where(first, weights.reshape(-1, 1).clamp(min=1e-8), 1.0)

    def padded(x: Any) -> Any:
        return (
            x
            if x is None or not padding or x.shape != ids.shape
            else torch.nn.functional.pad(x, (0, padding))
        )

    given = {name: padded(x) for name, x in (fields | {"weights": weights}).items()}
    return TokenBatch(padded(ids), padded(advantages), **given)


def denominator(
    objective: Objective, loss_type: str, batch: TokenBatch, num_items: float | Tensor | None
) -> float | Tensor | None:
    """Liger's denominator where it is not the batch's own:

    the average over ranks of the tokens given or found.
    """
    group = default_group()
    if loss_type not in BY_ITEMS or (num_items is None and group is None):
        return None
    items: Any = global_normalizer(objective, batch) if num_items is None else num_items
    return at_least_one(items / (1 if group is None else group.size()))


# ---- masked positions as Liger's chunked loss counts them


def weights_with_padding(weights: Tensor, mask: Tensor) -> Tensor:
    """VESPO's weights [B, T] for Liger's result: Liger multiplies the weights of masked positions
    into the ratio of the sequence too, and replaces 0 by 1e-8. Here each trained token gets an
    equal share of that product.
    """
    logs = weights.float().log().clamp(math.log(1e-8), 20.0)
    return (
        (logs.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1))
        .exp()
        .expand_as(weights)
    )


def rows_with_padding(batch: TokenBatch, objective: Objective) -> TokenInputs:
    """LUSPO's rows for Liger's result: the mean over all positions of the padded sequence, masked
    ones included, times the number of its trained tokens. The ratio of a sequence is still over its
    trained tokens.
    """
    share = batch.spread(batch.lengths).float() / batch.targets.numel()
    return replace(
        objective.token_inputs(replace(batch, mask=None), 1.0).weighted(share),
        loss_mask=batch.named_mask("trained"),
    )


# ---- the loss from hidden states


@dataclass(eq=False, repr=False)
class LigerFusedLinearGRPOLoss(torch.nn.Module):
    """A drop-in for Liger's module of this name: it returns `(loss, metrics)` from hidden states.

    The options are Liger's. They are read on every call; see `liger_objective`. `temperature`
    divides the logits. With use_ref_model=False there is no KL: it is 0 in the metrics, and a
    warning is given if beta is not 0.

    as_liger   True: LUSPO and VESPO count masked positions, as Liger's chunked loss does, with a
               warning. Use it to compare a run with Liger number by number. It changes nothing
               else.
    grad_scale   the factor of the loss before the backward, as in `linear_grpo_loss`, or a function
                 without arguments that returns it. `patch` sets it to 1 / the accumulation steps of
                 the trainer.
    any_version   True: no warning if the installed version of Liger was not tested
    """

    beta: float = 0.04
    compiled: bool = True
    use_ref_model: bool = True
    chunk_size: int = 1
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    _: KW_ONLY
    as_liger: bool = False
    grad_scale: float | Callable[[], float] = 1.0
    any_version: InitVar[bool] = False

    def __post_init__(self, any_version: bool) -> None:
        super().__init__()
        version = ADAPTER.untested(any_version)
        if version is not None and importlib.util.find_spec("liger_kernel"):
            warnings.warn(f"{version}: loss and metrics are as in {LIGER_VERSION}.", stacklevel=3)

    def objective(self) -> Objective:
        """The objective that the options describe.

        Raises ValueError naming the option that is wrong.
        """
        return _objective_of(self)

    @adapt_arguments
    @with_trainer_names(
        hidden="_input", weight="lin_weight", targets="selected_token_ids", mask="attention_mask", old_logps="old_per_token_logps",
        ref_logps="ref_per_token_logps", weights="vllm_is_ratio", normalizer="num_items_in_batch",
    )  # fmt: skip
    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor | None,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(loss, (mean KL, share of clipped tokens)), the KL only with beta != 0; the loss is 0-d
        fp32.

        _input         [B, T, H], lin_weight [V, H], bias [V]: the policy's last hidden states and
                       head.
        selected_token_ids, attention_mask, old_per_token_logps, ref_per_token_logps   [B, T]
        advantages     [B]
        ref_input, ref_weight, ref_bias   the reference's, in place of its log-probs.
        vllm_is_ratio  [B], [B, 1] or [B, T]: weights of the policy term.
        num_items_in_batch   tokens of all micro-batches and ranks, which dapo, cispo and vespo
                             divide by, times the number of ranks. None: those of this micro-batch,
                             averaged over the ranks by a collective.
        """
        objective = self.objective()
        transform = LogitTransform(temperature=self.temperature)
        mask = as_bool("attention_mask", attention_mask)
        padded = (
            self.loss_type
            if self.as_liger and mask is not None and self.loss_type in ("luspo", "vespo")
            else None
        )
        for said, message in (
            (self.beta != 0 and not self.use_ref_model,
             f"beta={self.beta} has no effect with use_ref_model=False: there is no reference, the KL is 0."),
            (padded, f"as_liger=True: loss_type={padded!r} counts masked positions, as Liger does. Leave it out once your runs agree."),
            # In Liger's words, which callers match on.
            (self.use_ref_model and ref_per_token_logps is not None and ref_input is not None,
             "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps."),
        ):  # fmt: skip
            if said:
                warnings.warn(message, stacklevel=2)
        ref = None if objective.beta == 0 else ref_per_token_logps
        if objective.beta != 0 and ref is None and ref_input is not None and ref_weight is not None:
            with torch.no_grad():
                read = None if padded == "luspo" else mask
                head = Head(ref_weight, ref_bias)
                ref, _ = linear_logprobs(
                    ref_input, head, selected_token_ids, mask=read, transform=transform
                )
        weights = vllm_is_ratio
        if (
            padded == "vespo"
            and weights is not None
            and mask is not None
            and weights.shape == selected_token_ids.shape
        ):
            weights = weights_with_padding(weights, mask)
        batch = token_batch(
            selected_token_ids,
            advantages,
            objective,
            mask=mask,
            old_logps=old_per_token_logps,
            ref_logps=ref,
            weights=weights,
        )
        if padded == "luspo":
            own = linear_logprobs(
                _input, Head(lin_weight, bias), selected_token_ids, transform=transform
            )[0].flatten()
            rows = rows_with_padding(batch, objective)
            loss = total(_TokenLosses.apply(own, objective, rows, batch))
            logps = own.detach()
        else:
            D = denominator(objective, self.loss_type, batch, num_items_in_batch)
            grad_scale = self.grad_scale() if callable(self.grad_scale) else self.grad_scale
            out = linear_grpo_loss(
                _input,
                Head(lin_weight, bias),
                batch,
                objective,
                transform=transform,
                normalizer=D,
                grad_scale=grad_scale,
            )
            loss = out.loss
            logps = out.logps
            rows = out.rows
        kl, clipped = _kl_and_clipped(logps, objective, rows, batch)
        if kl is None and self.beta != 0:
            kl = torch.zeros_like(clipped)
        return loss, tuple(_metrics(kl, clipped, batch))


#: Liger's options and their defaults.
OPTIONS = {f.name: f.default for f in fields(LigerFusedLinearGRPOLoss) if not f.kw_only}


# ---- the loss from logits


@adapt_arguments
@with_trainer_names(
    targets="completion_ids", mask="completion_mask", old_logps="old_logp", ref_logps="ref_logp", weights="vllm_is_ratio",
    epsilon_low="eps_low", epsilon_high="eps_high",
)  # fmt: skip
def triton_grpo_loss(
    logits: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool | str = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: float | Tensor | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Any, ...]:
    """Compute `grpo_loss` with the arguments of Liger's function of this name.

    logits   [B, L + 1, V]; the last position is ignored
    completion_ids, completion_mask, old_logp, ref_logp   [B, L]
    advantages   [B]
    vllm_is_ratio   [B], [B, 1] or [B, L]
    reduce   True: returns (loss, [mean KL if beta != 0, share of clipped tokens]), 0-d fp32. False:
             returns (loss, KL or None, clipped) of each token, [B, L] fp32, 0 in masked tokens.
             Only the loss is differentiable.
    inplace  True: the backward writes the gradient over the logits, as in Liger. False: the
             gradient gets a new buffer; a reduced loss at token level (except VESPO) computes it in
             the forward, which saves a pass. "forward", which Liger does not have: the forward
             overwrites the logits with the gradient. Logits that are a leaf are never overwritten.
    max_completion_length   None: L
    num_items_in_batch   tokens of all micro-batches and ranks, as in `LigerFusedLinearGRPOLoss`

    eps_low and eps_high are epsilon_low and epsilon_high of `liger_objective`. `temperature`
    divides the logits. All other arguments are as in `LigerFusedLinearGRPOLoss`. Raises ValueError
    naming what is wrong.
    """
    options = SimpleNamespace(
        **locals()
    )  # Liger's other functions call two of them otherwise, and have a third
    require(
        inplace in (True, False, "forward"),
        "inplace",
        inplace,
        'it must be True, False or "forward".',
    )
    remedy = f"two-sided clipping means nothing to loss_type={loss_type!r}: leave it None."
    require(delta is None or loss_type in CLIPPED, "delta", delta, remedy)
    B, L = completion_ids.shape
    options.epsilon_low = eps_low
    options.epsilon_high = eps_high
    options.use_ref_model = True
    options.max_completion_length = (
        max(L, 1) if max_completion_length is None else max_completion_length
    )
    objective = _objective_of(options)
    mask = as_bool("completion_mask", completion_mask)
    if mask is None:
        mask = torch.ones((B, L), dtype=torch.bool, device=completion_ids.device)
    # The extra position is masked. A view of the logits without it would cost a second copy of the
    # gradient.
    batch = token_batch(
        completion_ids, advantages, objective, padding=1, mask=mask, old_logps=old_logp, ref_logps=ref_logp if beta != 0 else None,
        weights=vllm_is_ratio,
    )  # fmt: skip
    transform = LogitTransform(temperature)
    normalizer = denominator(objective, loss_type, batch, num_items_in_batch) if reduce else 1.0
    how = False if is_leaf_or_view_of_leaf(logits) else inplace
    if reduce and how is not True:
        out = grpo_loss(
            logits,
            batch,
            objective,
            transform=transform,
            normalizer=normalizer,
            inplace=how == "forward",
        )
    else:
        own = token_logprobs(
            logits, batch.targets, mask=batch.mask, transform=transform, inplace=bool(how)
        ).logps
        if not reduce:
            rows = replace(objective, aggregate="token-sum").token_inputs(batch, normalizer)
            losses = _TokenLosses.apply(own.flatten(), objective, rows, batch)
            of_tokens = (losses, *_kl_and_clipped(own.detach(), objective, rows, batch))
            return tuple(x if x is None else x.view(B, L + 1)[:, :-1] for x in of_tokens)
        out = objective_loss(own, batch, objective, normalizer=normalizer)
    return out.loss, _metrics(*_kl_and_clipped(out.logps, objective, out.rows, batch), batch)


@adapt_arguments
@torch.no_grad()
@with_trainer_names(targets="input_ids")
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """Return the log-probs [B, L] of the last L of `input_ids`, fp32, without a gradient.

    logits        [B, L + 1, V]; the last position is ignored
    mask          the last L columns count: the result is 0 where they are 0
    temperature   divides the logits
    """
    L = logits.shape[1] - 1
    ids = input_ids[:, input_ids.shape[1] - L :]
    read = None if mask is None else mask[:, mask.shape[1] - L :] != 0
    return token_logprobs(logits[:, :-1], ids, mask=read, transform=LogitTransform(temperature))[0]


class _TokenLosses(torch.autograd.Function):
    """The token stage, token by token:

    what it gets from upstream takes the place of (multiplies) the weights.
    """

    @staticmethod
    def forward(
        ctx: Any, logps: Tensor, objective: Objective, rows: TokenInputs, batch: TokenBatch
    ) -> Tensor:
        ctx.save_for_backward(logps)
        ctx.call = objective, rows, batch
        return objective.token_losses(logps, None, rows, batch)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
        (logps,) = ctx.saved_tensors
        objective, rows, batch = ctx.call
        # Whatever arrives at masked tokens, which have weight 0.
        return (
            objective.token_losses(logps, None, rows.weighted(d_losses), batch)[1],
            None,
            None,
            None,
        )


def _kl_and_clipped(
    logps: Tensor, objective: Objective, rows: TokenInputs, batch: TokenBatch
) -> tuple[Tensor | None, Tensor]:
    """fp32 [n], 0 where masked:

    the KL term (None with beta = 0) as it is in the loss, and 1 where the ratio is clipped.
    """
    _, clipped, kl = ratio_terms(objective, logps, rows, batch)
    return None if kl is None else torch.where(rows.mask, kl, 0.0), (clipped & rows.mask).float()


def _metrics(kl: Tensor | None, clipped: Tensor, batch: TokenBatch) -> list[Tensor]:
    """Means over the trained tokens of the batch, of values that are 0 elsewhere."""
    count = at_least_one(clipped.numel() if batch.mask is None else batch.mask.sum())
    return [x.sum() / count for x in (kl, clipped) if x is not None]


# ---- the loss in the place of Liger's, in trainers that keep it as an attribute


def patch(trainer: Any, **how: bool) -> Slots:
    """Replace the loss object of one trainer, and return `Slots`, which restore it.

        slots = liger.patch(trainer)     # one trainer that exists
        slots = liger.bind()             # or every trainer of this process that will be made

    For TRL 0.17 to 1.13 with use_liger_kernel=True (use_liger_loss before 0.25), and for ms-swift.
    The constants are those that the trainer passed to its own object. If the version of
    Liger-Kernel (or of a TRL that contains a copy of it) was not tested, the first call is compared
    with the trainer's own object. Options that Liger's loss does not have are not available: the
    entropy bonus, the entropy quantile and off-policy masks.

    how   strict and any_version of `Slots`

    Raises RuntimeError for a trainer without such an object or with ours, and in the first step if
    the comparison fails.
    """
    name = next((name for name in ATTRIBUTES if callable(getattr(trainer, name, None))), None)
    if name is None:
        raise RuntimeError(
            f"{type(trainer).__name__} has no loss of Liger's ({' or '.join(ATTRIBUTES)}): make it"
            " with use_liger_kernel=True (TRL 0.17 to 0.24, and in axolotl: use_liger_loss=True)."
            " Other versions of TRL have no such place: before 0.17 install a newer one, in 1.14"
            " take integrations.trl.fused_lm_head(), from 1.15 on integrations.trl.patch(trainer)."
        )
    theirs = getattr(trainer, name)
    slots = _slots(theirs, **how)

    def grad_scale() -> float:
        return 1.0 / accumulation_steps(trainer)

    slots.replace_attribute(trainer, name, _in_place_of(theirs, slots, grad_scale))
    return slots


def accumulation_steps(trainer: Any) -> int:
    """Return by what a trainer of transformers divides the loss of a micro-batch."""
    steps: Any = getattr(trainer, "current_gradient_accumulation_steps", None)
    if steps is None:
        steps = getattr(getattr(trainer, "args", None), "gradient_accumulation_steps", 1)
    return int(steps)


def bind(**how: bool) -> Slots:
    """Replace `liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss` by our class for later imports.

    `undo()` restores it, but not in trainers that exist already. Options and errors are those of
    `patch`.
    """
    from liger_kernel import chunked_loss

    theirs = chunked_loss.LigerFusedLinearGRPOLoss
    slots = _slots(theirs(), **how)

    def make(*args: Any, **kwargs: Any) -> Any:
        own = theirs(*args, **kwargs)
        try:
            return _in_place_of(own, slots)
        except NotCovered as reason:
            slots.leave_to_trainer(reason, "LigerFusedLinearGRPOLoss", theirs)
            return own

    vars(make)["grpo_kernels"] = True
    slots.replace_attribute(chunked_loss, "LigerFusedLinearGRPOLoss", make)
    return slots


def _slots(theirs: Any, **how: bool) -> Slots:
    package = type(theirs).__module__.partition(".")[0].replace("_", "-")
    return Slots(replace(ADAPTER, package=package, tested=COPIES.get(package, ())), **how)


def _in_place_of(theirs: Any, slots: Slots, grad_scale: Callable[[], float] | float = 1.0) -> Any:
    """Our loss with the constants of their object, which is also called while `slots` compares the
    two. Raises NotCovered if an option is set that ours does not have.

    grad_scale   what the trainer multiplies the loss by
    """
    names = [
        name
        for name in inspect.signature(LigerFusedLinearGRPOLoss).parameters
        if hasattr(theirs, name)
    ]
    missing = {"beta", "epsilon_low", "epsilon_high", "loss_type", "temperature"} - {*names}
    if missing:
        raise RuntimeError(
            f"a {type(theirs).__name__} without {', '.join(sorted(missing))} is not Liger's GRPO"
            " loss, or is replaced by grpo_kernels already: call undo() of the object that replaced"
            " it."
        )
    unknown = unknown_option(theirs, names)
    if unknown is not None:
        raise NotCovered(f"option {unknown[0]}={unknown[1]!r}, which grpo_kernels does not know")
    ours = LigerFusedLinearGRPOLoss(
        **{name: getattr(theirs, name) for name in names},
        grad_scale=grad_scale,
        any_version=True,
    ).forward
    return slots.counted(
        slots.trial.compare_first_calls(adapt_arguments(ours, theirs), theirs), theirs
    )


# ---- Liger's fused linear Jensen-Shannon divergence


@dataclass(eq=False, repr=False)
class LigerFusedLinearJSD(torch.nn.Module):
    """The mean divergence between student and teacher, from hidden states and weights of both.

    Values are Liger's. Logits are fp32, while Liger's may be rounded to 16 bits, and the gradient
    of the weight is summed in fp32. It also runs on a CPU.

    jsd_beta      0: KL(teacher, student). 1: KL(student, teacher). Between 0 and 1: the JSD, with
                  jsd_beta as the weight of the teacher in the mixture.
    ignore_index  the label of tokens that do not count
    temperature   divides the logits of both
    accum_dtype   has no effect: sums are fp32

    Raises ValueError naming the argument that is wrong.
    """

    jsd_beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    accum_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self.objective = Objective.preset("distillation", kl=divergence_of(float(self.jsd_beta)))
        self.transform = LogitTransform(self.temperature)

    @adapt_arguments
    @with_trainer_names(
        hidden="student_input",
        weight="student_weight",
        mask="shift_labels",
        targets="shift_labels",
        reference="teacher_input",
    )
    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """The mean over the tokens whose label counts, 0-d fp32.

        student_input, teacher_input    [N, H], with hidden sizes of their own; student_weight,
                                        teacher_weight  [V, H].
        shift_labels                    int64 [N], of which only `ignore_index` is looked at; None:
                                        all tokens count.
        """
        mask = None if shift_labels is None else shift_labels != self.ignore_index
        batch = distillation_batch(mask, student_input[..., 0])
        reference = (teacher_input.detach(), teacher_weight.detach())
        return linear_grpo_loss(
            student_input,
            student_weight,
            batch,
            self.objective,
            reference=reference,
            transform=self.transform,
        ).loss
