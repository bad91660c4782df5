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
    # Split an option that stands for several, such as vespo=(2.0, 3.0, 3.0, 2.0).
    for name, parts in TOGETHER.items():
        if name not in options:
            continue
        values = options.pop(name)
        remedy = (
            f"it stands for {', '.join(parts)}: pass {len(parts)} numbers, and none of these names."
        )
        fits = isinstance(values, tuple | list) and len(values) == len(parts)
        require(fits and not options.keys() & parts, name, values, remedy)
        options |= zip(parts, values, strict=True)
    # Options of Liger's loss that belong elsewhere, each with a text that says where.
    for name in options.keys() & NO_OBJECTIVE:
        require(False, name, options[name], NO_OBJECTIVE[name])
    refuse_unknown("liger_objective", options, OPTIONS)
    # OPTIONS has the defaults.
    return _objective_of(SimpleNamespace(**OPTIONS | options | {"loss_type": loss_type}))


def _objective_of(options: Any) -> Objective:
    """Return the objective that Liger's options describe.

    options   an object with the options as attributes, such as a `LigerFusedLinearGRPOLoss`

    Raises ValueError naming the option that is wrong.
    """
    surrogate = surrogate_of(options)
    loss_type = options.loss_type
    level = options.importance_sampling_level
    remedy = 'it must be "token" or "sequence".'
    require(level in ("token", "sequence"), "importance_sampling_level", level, remedy)
    # Liger's own message, because callers match on it.
    remedy = (
        f"Sequence-level importance sampling is not supported for loss_type={loss_type!r}. Use"
        " importance_sampling_level='token' instead."
    )
    is_supported = level == "token" or loss_type in CLIPPED
    require(is_supported, "importance_sampling_level", level, remedy)
    if loss_type == "cispo" and options.epsilon_high < 1:
        warnings.warn(
            f"epsilon_high={options.epsilon_high} is CISPO's cap, an absolute ratio: below 1 it"
            " caps on-policy tokens too. The paper's value is near 5.",
            stacklevel=3,
        )
    if loss_type == "vespo":
        level = "sequence-sum"  # its ratio is the product over the sequence
    return Objective(
        surrogate,
        level=level,
        aggregate=PRESETS[loss_type].aggregate,
        beta=options.beta if options.use_ref_model else 0.0,
        kl=Kl("k3", weighting="ratio" if options.use_bias_correction_kl else "none"),
        max_tokens=options.max_completion_length if loss_type == "dr_grpo" else None,
    )


# ---- Liger's tensors as a TokenBatch and a denominator


def as_bool(name: str, mask: Tensor | None) -> Tensor | None:
    """Return a mask as bool, None for None.

    name   the argument's name, for the error
    mask   0 and 1 in any dtype. A fraction would be a weight, so it raises ValueError.
    """
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
    """Return Liger's tensors as a batch.

    ids          int64 [B, T]
    advantages   fp32 [B]
    objective    the objective of the loss
    padding      number of masked positions to add after the last one, so that the batch fits logits
                 [B, T + padding, V]
    weights      fp32 [B], [B, 1] or [B, T], importance weights, or None
    fields       more fields of `TokenBatch`, among them mask=, bool [B, T] or None
    """
    mask = fields["mask"]
    has_sequence_weights = weights is not None and weights.numel() == len(ids)
    if weights is not None and has_sequence_weights and objective.surrogate.absorbs_weights:
        # This surrogate multiplies the weights of all tokens into the ratio of their sequence. The
        # weight of a sequence must enter once: put it on the first trained token.
        trained = mask
        if trained is None:
            trained = torch.ones(ids.shape, dtype=torch.bool, device=ids.device)
        first = trained & (trained.cumsum(1) == 1)
        # 1e-8 is Liger's least weight.
        weights = torch.where(first, weights.reshape(-1, 1).clamp(min=1e-8), 1.0)

    def pad(x: Any) -> Any:
        is_per_token = x is not None and x.shape == ids.shape
        return torch.nn.functional.pad(x, (0, padding)) if is_per_token and padding > 0 else x

    padded_fields = {name: pad(x) for name, x in fields.items()}
    return TokenBatch(pad(ids), pad(advantages), weights=pad(weights), **padded_fields)


def denominator(
    objective: Objective, loss_type: str, batch: TokenBatch, num_items: float | Tensor | None
) -> float | Tensor | None:
    """Return the denominator of Liger's loss, or None for the denominator of this batch.

    objective   the objective of the loss
    loss_type   Liger's. Only "dapo", "cispo" and "vespo" divide by a global number of tokens.
    batch       the micro-batch
    num_items   number of tokens of all micro-batches and ranks. None: those of this micro-batch on
                all ranks, which takes a collective.
    """
    group = default_group()
    if loss_type not in BY_ITEMS or (num_items is None and group is None):
        return None
    items: Any = global_normalizer(objective, batch) if num_items is None else num_items
    ranks = 1 if group is None else group.size()
    return at_least_one(items / ranks)  # gradients are averaged over the ranks


# ---- masked positions as Liger's chunked loss counts them


def weights_with_padding(weights: Tensor, mask: Tensor) -> Tensor:
    """Return weights [B, T] that give VESPO the ratio of each sequence that it has in Liger.

    weights   [B, T], importance weights
    mask      bool [B, T], the trained tokens

    Liger multiplies the weights of masked positions into the ratio of the sequence too, and clamps
    weights to [1e-8, exp(20)]. Our loss multiplies those of trained tokens alone, so each trained
    token gets an equal share (in the log) of Liger's product.
    """
    logs = weights.float().log().clamp(math.log(1e-8), 20.0)
    num_trained = mask.sum(1, keepdim=True).clamp(min=1)
    log_share = logs.sum(1, keepdim=True) / num_trained
    return log_share.exp().expand_as(weights)


def rows_with_padding(batch: TokenBatch, objective: Objective) -> TokenInputs:
    """Return inputs of the token losses that give LUSPO the value that it has in Liger.

    batch       the micro-batch, [B, T]
    objective   the objective of LUSPO

    Liger takes the mean over all positions of the padded sequences, masked ones included, and
    multiplies the loss of each by the number of trained tokens of its sequence. The ratio of a
    sequence is over its trained tokens, as in our loss.
    """
    # The number of trained tokens of each sequence [B], copied to its positions [B * T].
    num_trained = batch.spread(batch.lengths)
    weight = num_trained.float() / batch.targets.numel()
    all_positions = objective.token_inputs(replace(batch, mask=None), 1.0)
    # Without the mask all positions have a weight. `loss_mask` still has the trained tokens.
    return replace(all_positions.weighted(weight), loss_mask=batch.named_mask("trained"))


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
        """Return (loss, metrics), where metrics are (mean KL, share of clipped tokens).

        _input         [B, T, H], the policy's last hidden states
        lin_weight     [V, H], the weight of its head
        selected_token_ids
                       int64 [B, T]
        attention_mask
                       [B, T], 1 for trained tokens; None if all are
        advantages     fp32 [B]
        bias           [V], the bias of the head, or None
        ref_per_token_logps, old_per_token_logps
                       fp32 [B, T], log-probs of the reference and of the policy at the start of the
                       update; None for an old policy that equals the current one
        ref_input, ref_weight, ref_bias
                       hidden states and head of the reference, used without ref_per_token_logps
        vllm_is_ratio  fp32 [B], [B, 1] or [B, T], weights of the policy term, or None
        num_items_in_batch
                       number of tokens of all micro-batches and ranks, the denominator of "dapo",
                       "cispo" and "vespo". None: those of this micro-batch on all ranks, which
                       takes a collective.

        The results are 0-d fp32. The KL is left out of the metrics if beta is 0.
        """
        objective = self.objective()
        transform = LogitTransform(temperature=self.temperature)
        mask = as_bool("attention_mask", attention_mask)
        # With as_liger, LUSPO and VESPO count masked positions.
        counts_padding = self.as_liger and mask is not None
        is_padded_luspo = counts_padding and self.loss_type == "luspo"
        is_padded_vespo = counts_padding and self.loss_type == "vespo"
        if self.beta != 0 and not self.use_ref_model:
            warnings.warn(
                f"beta={self.beta} has no effect with use_ref_model=False: there is no reference,"
                " the KL is 0.",
                stacklevel=2,
            )
        if is_padded_luspo or is_padded_vespo:
            warnings.warn(
                f"as_liger=True: loss_type={self.loss_type!r} counts masked positions, as Liger"
                " does. Leave it out once your runs agree.",
                stacklevel=2,
            )
        if self.use_ref_model and ref_per_token_logps is not None and ref_input is not None:
            # Liger's own message, because callers match on it.
            warnings.warn(
                "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.",
                stacklevel=2,
            )
        ref_logps = None if objective.beta == 0 else ref_per_token_logps
        needs_ref_logps = objective.beta != 0 and ref_logps is None
        if needs_ref_logps and ref_input is not None and ref_weight is not None:
            with torch.no_grad():
                ref_logps, _ = linear_logprobs(
                    ref_input,
                    Head(ref_weight, ref_bias),
                    selected_token_ids,
                    mask=None if is_padded_luspo else mask,
                    transform=transform,
                )
        weights = vllm_is_ratio
        if is_padded_vespo and mask is not None and weights is not None:
            if weights.shape == selected_token_ids.shape:
                weights = weights_with_padding(weights, mask)
        batch = token_batch(
            selected_token_ids,
            advantages,
            objective,
            mask=mask,
            old_logps=old_per_token_logps,
            ref_logps=ref_logps,
            weights=weights,
        )
        head = Head(lin_weight, bias)
        if is_padded_luspo:
            # The loss needs the log-probs of masked positions, so it is computed from log-probs.
            logps = linear_logprobs(_input, head, selected_token_ids, transform=transform).logps
            logps = logps.flatten()
            rows = rows_with_padding(batch, objective)
            loss = total(_TokenLosses.apply(logps, objective, rows, batch))
            logps = logps.detach()
        else:
            grad_scale = self.grad_scale() if callable(self.grad_scale) else self.grad_scale
            out = linear_grpo_loss(
                _input,
                head,
                batch,
                objective,
                transform=transform,
                normalizer=denominator(objective, self.loss_type, batch, num_items_in_batch),
                grad_scale=grad_scale,
            )
            loss = out.loss
            logps = out.logps
            rows = out.rows
        kl, clipped = _kl_and_clipped(logps, objective, rows, batch)
        if kl is None and self.beta != 0:
            kl = torch.zeros_like(clipped)  # Liger reports a KL if beta is not 0
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
    # The options of the loss by name. First of all, because locals() has only the arguments here.
    options = SimpleNamespace(**locals())
    remedy = 'it must be True, False or "forward".'
    require(inplace in (True, False, "forward"), "inplace", inplace, remedy)
    remedy = f"two-sided clipping means nothing to loss_type={loss_type!r}: leave it None."
    require(delta is None or loss_type in CLIPPED, "delta", delta, remedy)
    B, L = completion_ids.shape
    # `LigerFusedLinearGRPOLoss` has other names of the clip widths, and use_ref_model.
    options.epsilon_low = eps_low
    options.epsilon_high = eps_high
    options.use_ref_model = True
    if max_completion_length is None:
        options.max_completion_length = max(L, 1)
    objective = _objective_of(options)
    mask = as_bool("completion_mask", completion_mask)
    if mask is None:
        mask = torch.ones((B, L), dtype=torch.bool, device=completion_ids.device)
    # The extra position is masked. A view of the logits without it would cost a second copy of the
    # gradient.
    batch = token_batch(
        completion_ids,
        advantages,
        objective,
        padding=1,
        mask=mask,
        old_logps=old_logp,
        ref_logps=ref_logp if beta != 0 else None,
        weights=vllm_is_ratio,
    )
    transform = LogitTransform(temperature)
    if is_leaf_or_view_of_leaf(logits):
        inplace = False
    if reduce and inplace is not True:
        # One pass computes the loss and its gradient.
        out = grpo_loss(
            logits,
            batch,
            objective,
            transform=transform,
            normalizer=denominator(objective, loss_type, batch, num_items_in_batch),
            inplace=inplace == "forward",
        )
        kl, clipped = _kl_and_clipped(out.logps, objective, out.rows, batch)
        return out.loss, _metrics(kl, clipped, batch)

    logps = token_logprobs(
        logits, batch.targets, mask=batch.mask, transform=transform, inplace=bool(inplace)
    ).logps
    if reduce:
        normalizer = denominator(objective, loss_type, batch, num_items_in_batch)
        out = objective_loss(logps, batch, objective, normalizer=normalizer)
        kl, clipped = _kl_and_clipped(out.logps, objective, out.rows, batch)
        return out.loss, _metrics(kl, clipped, batch)

    rows = replace(objective, aggregate="token-sum").token_inputs(batch, 1.0)
    losses = _TokenLosses.apply(logps.flatten(), objective, rows, batch)
    kl, clipped = _kl_and_clipped(logps.detach(), objective, rows, batch)

    def without_last_position(x: Tensor) -> Tensor:
        return x.view(B, L + 1)[:, :-1]

    return (
        without_last_position(losses),
        None if kl is None else without_last_position(kl),
        without_last_position(clipped),
    )


@adapt_arguments
@torch.no_grad()
@with_trainer_names(targets="input_ids")
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """Return the log-probs of the last L columns of input_ids, fp32 [B, L], without a gradient.

    logits        [B, L + 1, V]; the last position is ignored
    input_ids     int64 [B, T] with T >= L, prompt and completion
    temperature   divides the logits
    mask          [B, T] with T >= L: the result is 0 where the last L columns are 0. None: all
                  positions are computed.

    The decorator makes errors use the names of these arguments.
    """
    L = logits.shape[1] - 1
    # A slice from -L would be the whole tensor for L = 0.
    ids = input_ids[:, input_ids.shape[1] - L :]
    is_computed = None if mask is None else mask[:, mask.shape[1] - L :] != 0
    transform = LogitTransform(temperature)
    return token_logprobs(logits[:, :-1], ids, mask=is_computed, transform=transform).logps


class _TokenLosses(torch.autograd.Function):
    """The loss of each token from its log-prob, with an upstream gradient for each token.

    forward   logps fp32 [N] -> losses fp32 [N]
    backward  gradient of losses [N] -> gradient of logps [N]. The upstream gradient of a token
              multiplies its weight in the loss, and the loss is computed again with these weights.
              At sequence level the gradient of one log-prob depends on several tokens, so
              multiplying the gradient of each token would be wrong.

    rows    the inputs of the loss for each token: weights, advantages, old log-probs
    batch   the batch of N tokens
    """

    @staticmethod
    def forward(
        ctx: Any, logps: Tensor, objective: Objective, rows: TokenInputs, batch: TokenBatch
    ) -> Tensor:
        ctx.save_for_backward(logps)
        ctx.objective = objective
        ctx.rows = rows
        ctx.batch = batch
        losses = objective.token_losses(logps, None, rows, batch)
        return losses.losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        (logps,) = ctx.saved_tensors
        # Masked tokens have weight 0, whatever their upstream gradient is.
        rows = ctx.rows.weighted(grad_losses)
        losses = ctx.objective.token_losses(logps, None, rows, ctx.batch)
        return losses.grad_logps, None, None, None


def _kl_and_clipped(
    logps: Tensor, objective: Objective, rows: TokenInputs, batch: TokenBatch
) -> tuple[Tensor | None, Tensor]:
    """Return (KL term, 1 where the ratio is clipped) of each token, fp32 [N], 0 where masked.

    objective   defines the ratio, its clip range and the KL
    logps       fp32, N elements: the policy's log-probs
    rows        the inputs of the loss for each token, such as `LossOutput.rows`: mask, advantages,
                reference log-probs
    batch       the batch of N tokens

    The KL term is as in the loss, and None if the loss has none.
    """
    _, is_clipped, kl = ratio_terms(objective, logps, rows, batch)
    if kl is not None:
        kl = torch.where(rows.mask, kl, 0.0)
    return kl, (is_clipped & rows.mask).float()


def _metrics(kl: Tensor | None, clipped: Tensor, batch: TokenBatch) -> list[Tensor]:
    """Return [mean of kl, mean of clipped] over the trained tokens, without the mean of a None.

    kl, clipped   fp32 [N], 0 for masked tokens; kl may be None
    batch         has the mask of trained tokens, None if all are trained
    """
    count = at_least_one(clipped.numel() if batch.mask is None else batch.mask.sum())
    return [x.sum() / count for x in (kl, clipped) if x is not None]


# ---- the loss in the place of Liger's, in trainers that keep it as an attribute


def patch(trainer: Any, *, strict: bool = False, any_version: bool = False) -> Slots:
    """Make one existing trainer compute its loss with our kernels instead of Liger's.

    Such a trainer has Liger's GRPO loss as an object in an attribute, and calls it in every step.
    This function puts our loss into that attribute. It has the options of the trainer's object,
    such as loss_type, beta and the clip widths.

        slots = patch(trainer)
        trainer.train()
        print(slots.counts)   # Counter({'fused': 400}): calls that our kernels computed
        slots.undo()          # the trainer has Liger's object again

    trainer       a trainer of TRL 0.17 to 1.13 with use_liger_kernel=True (use_liger_loss=True
                  before 0.25), or of ms-swift
    strict        True: a call that our loss does not support raises RuntimeError. False: Liger's
                  object computes it, and `counts` has the reason.
    any_version   False: if the installed Liger-Kernel (or a TRL with a copy of it) was not tested,
                  the first call is computed by both losses and compared. True: it is not compared.

    Options that Liger's loss does not have are not available: the entropy bonus, the entropy
    quantile and off-policy masks.

    Raises RuntimeError if the trainer has no Liger loss, if it was patched before, and in the first
    step if the two losses differ.
    """
    present = [name for name in ATTRIBUTES if callable(getattr(trainer, name, None))]
    if not present:
        raise RuntimeError(
            f"{type(trainer).__name__} has no loss of Liger's ({' or '.join(ATTRIBUTES)}). With TRL"
            " 0.25 to 1.13 make the trainer with use_liger_kernel=True (TRL 0.17 to 0.24, and in"
            " axolotl: use_liger_loss=True). With TRL 1.14 call integrations.trl.fused_lm_head()"
            " instead, and from 1.15 on integrations.trl.patch(trainer). Before 0.17 install a"
            " newer TRL."
        )
    attribute = present[0]
    liger_loss = getattr(trainer, attribute)
    slots = _slots_of_package(liger_loss, strict, any_version)

    def grad_scale() -> float:
        # The trainer divides the loss by this number before the backward. Our loss computes its
        # gradient in the forward. With the factor this is the gradient of the divided loss, so
        # the backward takes no further pass over it.
        return 1.0 / accumulation_steps(trainer)

    # Raises RuntimeError if the attribute already has our loss, which has no options.
    our_loss = _loss_with_options_of(liger_loss, slots, grad_scale)
    slots.replace_attribute(trainer, attribute, our_loss)
    return slots


def accumulation_steps(trainer: Any) -> int:
    """Return the number by which a transformers Trainer divides the loss of each micro-batch.

    trainer   a Trainer of transformers

    That is the number of micro-batches of the current optimizer step. The last step of an epoch may
    have fewer than args.gradient_accumulation_steps.
    """
    steps: Any = getattr(trainer, "current_gradient_accumulation_steps", None)
    if steps is None:  # an older transformers
        steps = getattr(getattr(trainer, "args", None), "gradient_accumulation_steps", 1)
    return int(steps)


def bind(*, strict: bool = False, any_version: bool = False) -> Slots:
    """Make trainers that are created from now on use our loss instead of Liger's.

    Replaces the class `liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss`, which a trainer imports
    and calls with its options. `patch` replaces the loss of one existing trainer instead.

    strict        True: a call that our loss does not support raises RuntimeError. False: Liger's
                  class computes it.
    any_version   False: if the installed Liger-Kernel was not tested, the first call is computed by
                  both losses, and RuntimeError is raised if they differ. True: it is not compared.

    Returns `Slots`, the record of what is replaced. Its `undo()` restores Liger's class, but not in
    trainers that already have our loss.
    """
    from liger_kernel import chunked_loss

    liger_class = chunked_loss.LigerFusedLinearGRPOLoss
    slots = _slots_of_package(liger_class(), strict, any_version)

    def make_loss(*args: Any, **kwargs: Any) -> Any:
        """Return our loss with these options, or Liger's if ours does not support one of them."""
        liger_loss = liger_class(*args, **kwargs)
        try:
            return _loss_with_options_of(liger_loss, slots)
        except NotCovered as reason:
            slots.leave_to_trainer(reason, "LigerFusedLinearGRPOLoss", liger_class)
            return liger_loss

    vars(make_loss)["grpo_kernels"] = True  # so that a second bind() is refused
    slots.replace_attribute(chunked_loss, "LigerFusedLinearGRPOLoss", make_loss)
    return slots


def _slots_of_package(liger_loss: Any, strict: bool, any_version: bool) -> Slots:
    """Return an empty record of replaced functions for the package that an object comes from.

    `Slots` checks the installed version of that package against the versions that were tested.

    liger_loss            Liger's loss object. Its class is from Liger-Kernel, or from a TRL that
                          has a copy of it.
    strict, any_version   as in `Slots`
    """
    package = type(liger_loss).__module__.partition(".")[0].replace("_", "-")
    adapter = replace(ADAPTER, package=package, tested=COPIES.get(package, ()))
    return Slots(adapter, strict, any_version)


def _loss_with_options_of(
    theirs: Any, slots: Slots, grad_scale: Callable[[], float] | float = 1.0
) -> Any:
    """Return a function that computes Liger's GRPO loss and can replace one of its loss objects.

    theirs       Liger's loss object. Ours gets its options. It computes the calls that ours does
                 not support.
    slots        the record of replaced functions: it counts the calls of ours. Under a version of
                 Liger that was not tested, its `trial` compares the first call with `theirs`.
    grad_scale   the factor by which the trainer multiplies the loss before the backward

    Raises NotCovered if `theirs` has an option that ours does not have, and RuntimeError if
    `theirs` is not Liger's GRPO loss.
    """
    # Our class has the option names of Liger's. An older Liger lacks some, which keep our defaults.
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
    # (name, value) of an option of a newer Liger that is set, or None.
    unknown = unknown_option(theirs, names)
    if unknown is not None:
        raise NotCovered(f"option {unknown[0]}={unknown[1]!r}, which grpo_kernels does not know")
    our_module = LigerFusedLinearGRPOLoss(
        **{name: getattr(theirs, name) for name in names},
        grad_scale=grad_scale,
        any_version=True,  # `slots` checks the version
    )
    ours = adapt_arguments(our_module.forward, theirs)
    compared = slots.trial.compare_first_calls(ours, theirs)
    return slots.counted(compared, theirs)


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
        """Return the mean divergence over all tokens that are not ignored, 0-d fp32.

        student_input    [N, H_student]
        student_weight   [V, H_student]
        teacher_input    [N, H_teacher]
        teacher_weight   [V, H_teacher]
        shift_labels     int64 [N]: tokens with the label `ignore_index` do not count. Other labels
                         are not read. None: all tokens count.
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
