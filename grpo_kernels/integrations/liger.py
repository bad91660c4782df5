"""Liger's GRPO losses under their own names and signatures, on our kernels, on GPU and CPU.

    from grpo_kernels.integrations.liger import LigerFusedLinearGRPOLoss      # was liger_kernel.chunked_loss
    from grpo_kernels.integrations.liger import triton_grpo_loss              # was liger_kernel.transformers.grpo_loss
    from grpo_kernels.integrations.liger import fused_selective_log_softmax   # was liger_kernel.ops.grpo_loss

Signatures, defaults, values and gradients are those of Liger-Kernel 0.8.5, which need not be installed. What differs:

- Bad input raises ValueError, where Liger asserts, and more of it is refused: a delta of at most 1, masks other than 0 and 1.
- Masked positions do not count, whatever they hold: not in LUSPO, whose Liger versions weigh the padding too (or multiply by
  the length twice), and not in VESPO's sum of log-weights, where a token of weight 0 leaves alone instead of silencing its
  sequence.
- A delta below 1 + eps_high has its whole gradient: Liger's Triton loss drops that of tokens with A < 0 between the two.
- A gradient that overwrites the logits bumps their version counter: autograd raises where something needs the old values.
- The gradients of a reduced loss are made in the forward and handed over once: a second backward raises RuntimeError.
- `compiled` and `chunk_size` change nothing: nothing is compiled, and chunks follow from the vocabulary.
- The head's gradient is summed in fp32, logits are never rounded, and strided inputs are welcome.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ..batch import TokenBatch
from ..checks import require, values_are_checked
from ..kl import Kl
from ..layout import of_a_leaf
from ..logprobs import linear_logprobs, token_logprobs
from ..losses import grpo_loss, linear_grpo_loss, total
from ..objective import Objective
from ..ops import bounded_exp
from ..surrogates import Cispo, Clip, Sapo, Surrogate, Vespo
from ..token_stage import TokenRows, kl_of_rows
from ..transform import LogitTransform

Tensor = torch.Tensor

#: The version whose signatures and values these are.
LIGER_VERSION = "0.8.5"

AGGREGATES = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "constant",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "vespo": "token-mean",
}
#: Loss types that are not clipped: they have a ratio of their own.
UNCLIPPED = ("cispo", "sapo", "vespo")
#: Loss types whose denominator is the token count of all micro-batches and ranks.
GLOBAL_COUNT = ("dapo", "cispo", "vespo")


def liger_objective(
    loss_type: str = "dapo",
    *,
    importance_sampling_level: str = "token",
    beta: float = 0.04,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
    vespo: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0),
    max_completion_length: int | None = None,
) -> Objective:
    """Liger's options as an Objective, for the functions of grpo_kernels itself. Raises ValueError naming what is wrong.

    loss_type    "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" or "vespo": surrogate and denominator.
    importance_sampling_level   "token", or "sequence" for the losses that clip.
    beta         weight of the KL, by k3; use_bias_correction_kl: times the ratio.
    epsilon_low, epsilon_high, delta   clip widths and two-sided bound, as in `Clip`. As in Liger, epsilon_high is CISPO's cap,
                 an absolute ratio, and delta means nothing to CISPO, SAPO and VESPO.
    sapo_temperatures   (for A > 0, for the others).
    vespo        (k, lambda) for A >= 0, then for the others.
    max_completion_length   tokens, which dr_grpo divides by; nothing to the others."""
    require(loss_type in AGGREGATES, "loss_type", loss_type, f"it must be one of {', '.join(AGGREGATES)}.")
    levels = ("token",) if loss_type in UNCLIPPED else ("token", "sequence")
    remedy = f"with loss_type={loss_type!r} it must be {' or '.join(levels)}."
    require(importance_sampling_level in levels, "importance_sampling_level", importance_sampling_level, remedy)
    if loss_type == "dr_grpo":
        remedy = "dr_grpo divides by it: pass the completion budget, a whole number of tokens."
        require(max_completion_length is not None, "max_completion_length", max_completion_length, remedy)
    surrogate: Surrogate
    if loss_type == "cispo":
        surrogate = Cispo(epsilon_high)
        if epsilon_high < 1:
            warnings.warn(
                f"epsilon_high={epsilon_high} is CISPO's cap, an absolute ratio: below 1 it caps on-policy tokens too. "
                "The paper's value is near 5.", stacklevel=3,
            )  # fmt: skip
    elif loss_type == "sapo":
        surrogate = Sapo(*sapo_temperatures)
    elif loss_type == "vespo":
        k_pos, lambda_pos, k_neg, lambda_neg = vespo
        surrogate = Vespo(k_pos, max(lambda_pos, 1e-4), k_neg, max(lambda_neg, 1e-4))
    else:
        # Below 0 there is no ratio to be clipped.
        surrogate = Clip(min(epsilon_low, 1.0), epsilon_high, math.inf if delta is None else delta)
    return Objective(
        surrogate,
        level="sequence-sum" if loss_type == "vespo" else importance_sampling_level,
        aggregate=AGGREGATES[loss_type],
        beta=beta,
        kl=Kl("k3", weighting="ratio" if use_bias_correction_kl else "none"),
        max_tokens=max_completion_length if loss_type == "dr_grpo" else None,
    )


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    """`linear_grpo_loss` as Liger's module of this name: hidden states and head in, `(loss, metrics)` out.

    The options are Liger's, read on every call; see `liger_objective`, where sapo_temperature_pos and sapo_temperature_neg are
    sapo_temperatures, and vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg are vespo. `temperature` divides the
    logits. use_ref_model=False leaves the KL out, which is then 0 in the metrics, with a warning if beta is not 0."""

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("sapo_temperature_pos", sapo_temperature_pos),
            ("sapo_temperature_neg", sapo_temperature_neg),
            ("delta", delta),
        ):
            require(value is None or value > 0, name, value, "it must be positive.")
        self.beta = beta
        self.compiled = compiled
        self.use_ref_model = use_ref_model
        self.chunk_size = chunk_size
        self.epsilon_low = epsilon_low
        self.epsilon_high = epsilon_high
        self.loss_type = loss_type
        self.max_completion_length = max_completion_length
        self.importance_sampling_level = importance_sampling_level
        self.sapo_temperature_pos = sapo_temperature_pos
        self.sapo_temperature_neg = sapo_temperature_neg
        self.temperature = temperature
        self.delta = delta
        self.use_bias_correction_kl = use_bias_correction_kl
        self.vespo_k_pos = vespo_k_pos
        self.vespo_lambda_pos = vespo_lambda_pos
        self.vespo_k_neg = vespo_k_neg
        self.vespo_lambda_neg = vespo_lambda_neg

    def objective(self) -> Objective:
        """What the options stand for. Raises ValueError naming the option that is wrong."""
        return liger_objective(
            self.loss_type, importance_sampling_level=self.importance_sampling_level,
            beta=self.beta if self.use_ref_model else 0.0, epsilon_low=self.epsilon_low, epsilon_high=self.epsilon_high,
            delta=self.delta, use_bias_correction_kl=self.use_bias_correction_kl,
            sapo_temperatures=(self.sapo_temperature_pos, self.sapo_temperature_neg),
            vespo=(self.vespo_k_pos, self.vespo_lambda_pos, self.vespo_k_neg, self.vespo_lambda_neg),
            max_completion_length=self.max_completion_length,
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
        """(loss, (mean KL, share of clipped tokens)), the KL only with beta != 0; the loss is 0-d fp32.

        _input         [B, T, H], lin_weight [V, H], bias [V]: the policy's last hidden states and head.
        selected_token_ids, attention_mask, old_per_token_logps, ref_per_token_logps   [B, T]; advantages [B].
        ref_input, ref_weight, ref_bias   the reference's, in place of its log-probs.
        vllm_is_ratio  [B], [B, 1] or [B, T]: weights of the policy term.
        num_items_in_batch   tokens of all micro-batches and ranks, which dapo, cispo and vespo divide by, times the number
                       of ranks. None: those of this micro-batch, averaged over the ranks by a collective."""
        objective, transform = self.objective(), LogitTransform(temperature=self.temperature)
        if self.beta != 0 and not self.use_ref_model:
            warnings.warn(
                f"beta={self.beta} has no effect with use_ref_model=False: there is no reference, the KL is 0.", stacklevel=2
            )
        mask = _as_bool("attention_mask", attention_mask)
        if objective.beta == 0:
            ref_per_token_logps = None
        elif ref_per_token_logps is None:
            if ref_input is None or ref_weight is None:
                raise ValueError(
                    f"ref_per_token_logps and ref_input are None, but beta={self.beta} wants a reference: pass one of them "
                    "(ref_input with ref_weight), or set beta=0."
                )
            with torch.no_grad():
                ref_per_token_logps, _ = linear_logprobs(
                    ref_input, ref_weight, selected_token_ids, bias=ref_bias, mask=mask, transform=transform
                )
        elif ref_input is not None:
            warnings.warn("ref_per_token_logps and ref_input are both given: ref_per_token_logps is used.", stacklevel=2)
        batch = _batch(
            selected_token_ids, advantages, mask, old_per_token_logps, ref_per_token_logps, vllm_is_ratio, objective,
            names=("attention_mask", "old_per_token_logps", "ref_per_token_logps"),
        )  # fmt: skip
        out = linear_grpo_loss(
            _input, lin_weight, batch, objective, bias=bias, transform=transform,
            normalizer=_normalizer(self.loss_type, batch, num_items_in_batch),
        )  # fmt: skip
        kl, clipped = _kl_and_clipped(out.logps.reshape(-1), objective, out.rows, batch)
        if kl is None and self.beta != 0:
            kl = torch.zeros_like(clipped)
        return out.loss, tuple(_masked_mean(x, batch) for x in (kl, clipped) if x is not None)


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
    """`grpo_loss` as Liger's function of this name, from logits [B, L + 1, V] whose last position is not looked at.

    completion_ids, completion_mask, old_logp, ref_logp   [B, L]; advantages [B]; vllm_is_ratio [B], [B, 1] or [B, L].
    reduce   True: (loss, [mean KL if beta != 0, share of clipped tokens]), 0-d fp32.
             False: (loss, KL or None, clipped) of each token, [B, L] fp32, 0 where masked; only the loss is differentiable.
    inplace  True: the backward writes the gradient over the logits, as in Liger. False: into memory of its own; a reduced
             loss makes it in the forward, in one visit of the logits less. "forward", which Liger lacks: both, so the logits
             are gone once the loss is there. Logits that are a leaf are never overwritten.
    max_completion_length   None: L.
    num_items_in_batch   tokens of all micro-batches and ranks, as in `LigerFusedLinearGRPOLoss`.
    eps_low and eps_high are the epsilon_low and epsilon_high of `liger_objective`, `temperature` divides the logits, and
    everything else is as in `LigerFusedLinearGRPOLoss`. Raises ValueError naming what is wrong."""
    for name, value in (("logits", logits), ("completion_ids", completion_ids), ("advantages", advantages)):
        require(isinstance(value, Tensor), name, value, "pass a tensor.")
    if not isinstance(inplace, bool):
        require(inplace == "forward", "inplace", inplace, 'it must be True, False or "forward".')
    taken = delta is None or loss_type not in UNCLIPPED
    require(taken, "delta", delta, f"two-sided clipping means nothing to loss_type={loss_type!r}: leave it None.")
    B, L = completion_ids.shape
    if logits.dim() != 3 or logits.shape[:2] != (B, L + 1):
        raise ValueError(
            f"logits has shape {list(logits.shape)}, but completion_ids has {list(completion_ids.shape)}: logits must be "
            f"[{B}, {L + 1}, V], the last position being that of the token after the completion."
        )
    objective = liger_objective(
        loss_type, importance_sampling_level=importance_sampling_level, beta=beta, epsilon_low=eps_low, epsilon_high=eps_high,
        delta=delta, use_bias_correction_kl=use_bias_correction_kl,
        sapo_temperatures=(sapo_temperature_pos, sapo_temperature_neg),
        vespo=(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg),
        max_completion_length=max(L, 1) if max_completion_length is None else max_completion_length,
    )  # fmt: skip
    if beta != 0 and ref_logp is None:
        raise ValueError(f"ref_logp is None, but beta={beta}: pass the reference's log-probs, or set beta=0.")
    mask = _as_bool("completion_mask", completion_mask)
    if mask is None:
        mask = torch.ones((B, L), dtype=torch.bool, device=completion_ids.device)
    # The extra position is a masked one. A view of the logits without it would cost a second copy of the gradient.
    batch = _batch(
        completion_ids, advantages, mask, old_logp, ref_logp if beta != 0 else None, vllm_is_ratio, objective, padding=1,
        names=("completion_mask", "old_logp", "ref_logp"),
    )  # fmt: skip
    transform = LogitTransform(temperature=temperature)
    normalizer = _normalizer(loss_type, batch, num_items_in_batch) if reduce else 1.0
    rows = (objective if reduce else replace(objective, aggregate="token-sum")).token_rows(batch, normalizer)
    if of_a_leaf(logits):
        inplace = False
    if reduce and inplace is not True:
        out = grpo_loss(logits, batch, objective, transform=transform, normalizer=normalizer, inplace=inplace == "forward")
        loss, logps = out.loss, out.logps.reshape(-1)
    else:
        own, _ = token_logprobs(logits, batch.targets, mask=batch.mask, transform=transform, inplace=bool(inplace))
        logps = own.reshape(-1)
        loss = _TokenLosses.apply(logps, objective, rows, batch)
        logps = logps.detach()
    kl, clipped = _kl_and_clipped(logps, objective, rows, batch)
    if not reduce:
        parts = (x if x is None else x.view(B, L + 1)[:, :-1] for x in (loss, kl, clipped))
        return tuple(parts)
    metrics = [_masked_mean(x, batch) for x in (kl, clipped) if x is not None]
    return (loss if loss.dim() == 0 else total(loss)), metrics


@torch.no_grad()
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """Log-probs [B, L] fp32 of the last L of `input_ids`, from logits [B, L + 1, V] whose last position is not looked at;
    0 where `mask`, of which the last L count too, is 0. `temperature` divides the logits. No gradient."""
    L = logits.shape[1] - 1
    ids = input_ids[:, input_ids.shape[1] - L :]
    read = None if mask is None else mask[:, mask.shape[1] - L :] != 0
    return token_logprobs(logits[:, :-1], ids, mask=read, transform=LogitTransform(temperature=temperature))[0]


class _TokenLosses(torch.autograd.Function):
    """The token stage, token by token: what it gets from upstream takes the place of (multiplies) the weights."""

    @staticmethod
    def forward(ctx: Any, logps: Tensor, objective: Objective, rows: TokenRows, batch: TokenBatch) -> Tensor:
        ctx.save_for_backward(logps)
        ctx.call = objective, rows, batch
        return objective.token_stage(logps, None, rows, batch)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
        (logps,) = ctx.saved_tensors
        objective, rows, batch = ctx.call
        d_losses = torch.where(rows.trained, d_losses, 0.0)  # whatever arrives at masked tokens
        return objective.token_stage(logps, None, rows.weighted(d_losses), batch)[1], None, None, None


def _as_bool(name: str, mask: Tensor | None) -> Tensor | None:
    """A 0/1 mask of any dtype. A fraction would be a weight, which is not what a mask is."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    found = mask != 0
    if values_are_checked(mask) and not torch.equal(mask, found.to(mask.dtype)):
        raise ValueError(f"{name} holds other numbers than 0 and 1: pass weights as vllm_is_ratio.")
    return found


def _batch(
    ids: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    old: Tensor | None,
    ref: Tensor | None,
    weights: Tensor | None,
    objective: Objective,
    *,
    names: tuple[str, str, str],
    padding: int = 0,
) -> TokenBatch:
    """Liger's tensors as a TokenBatch, with `padding` masked positions after the last one."""
    shape = ids.shape
    for name, x in zip(names, (mask, old, ref), strict=True):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {list(x.shape)}, but the token ids have {list(shape)}: they must be the same.")
    if weights is not None:
        whole = (shape[:1], (*shape[:1], 1))
        if weights.shape not in (*whole, shape):
            raise ValueError(f"vllm_is_ratio has shape {list(weights.shape)}: pass [B], [B, 1] or {list(shape)}.")
        if objective.surrogate.absorbs_weights and weights.shape in whole:
            # One per sequence counts once in the ratio: at its first trained token.
            trained = torch.ones(shape, dtype=torch.bool, device=ids.device) if mask is None else mask
            first = trained & (trained.cumsum(1) == 1)
            weights = torch.where(first, weights.reshape(-1, 1).clamp(min=1e-8), 1.0)

    def padded(x: Tensor | None) -> Tensor | None:
        return x if x is None or not padding or x.shape != shape else torch.nn.functional.pad(x, (0, padding))

    if advantages.dim() == 2 and advantages.shape == shape:
        advantages = torch.nn.functional.pad(advantages, (0, padding))
    return TokenBatch(
        torch.nn.functional.pad(ids, (0, padding)), advantages.to(torch.float32), mask=padded(mask), old_logps=padded(old),
        ref_logps=padded(ref), weights=padded(weights),
    )  # fmt: skip


def _normalizer(loss_type: str, batch: TokenBatch, num_items: float | Tensor | None) -> float | Tensor | None:
    """Liger's denominator where it is not the batch's own: the average over ranks of the tokens given or found."""
    if loss_type not in GLOBAL_COUNT:
        return None
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_items is None:
        if world == 1:
            return None
        count = torch.full((), batch.rows, device=batch.targets.device) if batch.mask is None else batch.mask.sum()
        num_items = count.to(torch.float32)
        dist.all_reduce(num_items)
    if isinstance(num_items, Tensor):
        return (num_items.to(torch.float32) / world).clamp(min=1.0)
    return max(num_items / world, 1.0)


def _kl_and_clipped(logps: Tensor, objective: Objective, rows: TokenRows, batch: TokenBatch) -> tuple[Tensor | None, Tensor]:
    """fp32 [n], 0 where masked: the KL term (None with beta = 0) as it is in the loss, and 1 where the ratio is clipped."""
    x = objective.log_ratio(logps, rows, batch)
    ratio = bounded_exp(x)
    low, high = objective.surrogate.ratio_bounds
    clipped = ((ratio < low) & (rows.advantages < 0)) | ((ratio > high) & (rows.advantages > 0))
    kl = None if rows.ref_logps is None else kl_of_rows(objective, logps, rows, x)[0]
    if rows.trained is not None:
        clipped &= rows.trained
        kl = None if kl is None else torch.where(rows.trained, kl, 0.0)
    return kl, clipped.to(torch.float32)


def _masked_mean(values: Tensor, batch: TokenBatch) -> Tensor:
    """Over the trained tokens of the batch; `values` are 0 elsewhere."""
    count = values.numel() if batch.mask is None else batch.mask.sum()
    return values.sum() / (max(count, 1) if isinstance(count, int) else count.clamp(min=1))
