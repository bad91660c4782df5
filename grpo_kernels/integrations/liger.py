"""Liger's GRPO losses under their own names and signatures, on our kernels, on GPU and CPU.

    from grpo_kernels.integrations.liger import LigerFusedLinearGRPOLoss      # was liger_kernel.chunked_loss
    from grpo_kernels.integrations.liger import triton_grpo_loss              # was liger_kernel.transformers.grpo_loss
    from grpo_kernels.integrations.liger import fused_selective_log_softmax   # was liger_kernel.ops.grpo_loss

Signatures, defaults, values and gradients are those of Liger-Kernel 0.8.5, which need not be installed. Under an installed version
that was not tested, the first call of `LigerFusedLinearGRPOLoss` also runs Liger's, and goes on or refuses with the difference.
What differs on purpose:

- Bad input raises ValueError, where Liger asserts, and more of it is refused: a delta of at most 1, masks other than 0 and 1.
- Masked positions do not count, whatever they hold: not in LUSPO, whose Liger versions weigh the padding too (or multiply by
  the length twice), and not in VESPO's sum of log-weights, where a token of weight 0 leaves alone instead of silencing its
  sequence. `LigerFusedLinearGRPOLoss(as_liger=True)` counts them as Liger does.
- A delta below 1 + eps_high has its whole gradient: Liger's Triton loss drops that of tokens with A < 0 between the two.
- A gradient that overwrites the logits bumps their version counter: autograd raises where something needs the old values.
- The gradients of a reduced loss are made in the forward and handed over once: a second backward raises RuntimeError.
- `compiled` and `chunk_size` change nothing: nothing is compiled, and chunks follow from the vocabulary.
- The head's gradient is summed in fp32, logits are never rounded, and strided inputs are welcome.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from ..batch import TokenBatch
from ..checks import require
from ..formulas.ops import bounded_exp
from ..formulas.token_stage import TokenRows
from ..layout import of_a_leaf
from ..logprobs import linear_logprobs, token_logprobs
from ..losses import grpo_loss, linear_grpo_loss
from ..objective import Objective
from ..rows.run import total
from ..specs import LogitTransform
from ._liger_specs import (
    UNCLIPPED,
    as_bool,
    denominator,
    liger_objective,
    rows_with_padding,
    token_batch,
    weights_with_padding,
)
from ._liger_trial import compare_first_call

__all__ = ["LIGER_VERSION", "LigerFusedLinearGRPOLoss", "fused_selective_log_softmax", "liger_objective", "triton_grpo_loss"]

Tensor = torch.Tensor

#: The version whose signatures and values these are.
LIGER_VERSION = "0.8.5"


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    """`linear_grpo_loss` as Liger's module of this name: hidden states and head in, `(loss, metrics)` out.

    The options are Liger's, read on every call; see `liger_objective`, where sapo_temperature_pos and sapo_temperature_neg are
    sapo_temperatures, and vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg are vespo. `temperature` divides the
    logits. use_ref_model=False leaves the KL out, which is then 0 in the metrics, with a warning if beta is not 0.

    as_liger   True: LUSPO and VESPO count masked positions as Liger's chunked loss does, with a warning, so that a run can be
               compared with Liger's number by number before it is improved. Everything else is the same either way.
    any_version   True: no comparison with an installed Liger that was not tested.

    Raises RuntimeError in the first call, where that comparison fails."""

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
        *,
        as_liger: bool = False,
        any_version: bool = False,
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
        self.as_liger = as_liger
        compare_first_call(self, "liger_kernel.chunked_loss", any_version)

    def objective(self) -> Objective:
        """The objective that the options describe. Raises ValueError naming the option that is wrong."""
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
        mask = as_bool("attention_mask", attention_mask)
        padded = self._counts_padding(mask)
        read = None if padded == "luspo" else mask
        if self.use_ref_model and ref_per_token_logps is not None and ref_input is not None:
            # In Liger's words, which callers match on.
            warnings.warn("Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.", stacklevel=2)
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
                    ref_input, ref_weight, selected_token_ids, bias=ref_bias, mask=read, transform=transform
                )
        if padded == "vespo" and vllm_is_ratio is not None and vllm_is_ratio.shape == selected_token_ids.shape:
            assert mask is not None
            vllm_is_ratio = weights_with_padding(vllm_is_ratio, mask)
        batch = token_batch(
            selected_token_ids, advantages, mask, old_per_token_logps, ref_per_token_logps, vllm_is_ratio, objective,
            names=("attention_mask", "old_per_token_logps", "ref_per_token_logps"),
        )  # fmt: skip
        if padded == "luspo":
            own, _ = linear_logprobs(_input, lin_weight, selected_token_ids, bias=bias, transform=transform)
            rows = rows_with_padding(batch, objective)
            loss = total(_TokenLosses.apply(own.reshape(-1), objective, rows, batch))
            logps = own.detach().reshape(-1)
        else:
            out = linear_grpo_loss(
                _input, lin_weight, batch, objective, bias=bias, transform=transform,
                normalizer=denominator(self.loss_type, batch, num_items_in_batch),
            )  # fmt: skip
            loss, logps, rows = out.loss, out.logps.reshape(-1), out.rows
        kl, clipped = _kl_and_clipped(logps, objective, rows, batch)
        if kl is None and self.beta != 0:
            kl = torch.zeros_like(clipped)
        return loss, tuple(_masked_mean(x, batch) for x in (kl, clipped) if x is not None)

    def _counts_padding(self, mask: Tensor | None) -> str | None:
        """The loss type, if masked positions are to count in it as in Liger."""
        if not self.as_liger or self.loss_type not in ("luspo", "vespo") or mask is None:
            return None
        warnings.warn(
            f"as_liger=True: loss_type={self.loss_type!r} counts masked positions, as Liger does. Leave it out once your runs agree.",
            stacklevel=3,
        )
        return self.loss_type


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
             loss at token level (but VESPO) makes it in the forward, in one visit of the logits less. "forward", which Liger
             lacks: both, so the logits are gone once the loss is there. Logits that are a leaf are never overwritten.
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
    mask = as_bool("completion_mask", completion_mask)
    if mask is None:
        mask = torch.ones((B, L), dtype=torch.bool, device=completion_ids.device)
    # The extra position is masked. A view of the logits without it would cost a second copy of the gradient.
    batch = token_batch(
        completion_ids, advantages, mask, old_logp, ref_logp if beta != 0 else None, vllm_is_ratio, objective, padding=1,
        names=("completion_mask", "old_logp", "ref_logp"),
    )  # fmt: skip
    transform = LogitTransform(temperature=temperature)
    normalizer = denominator(loss_type, batch, num_items_in_batch) if reduce else 1.0
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
        # Whatever arrives at masked tokens, which have weight 0.
        return objective.token_stage(logps, None, rows.weighted(d_losses), batch)[1], None, None, None


def _kl_and_clipped(logps: Tensor, objective: Objective, rows: TokenRows, batch: TokenBatch) -> tuple[Tensor | None, Tensor]:
    """fp32 [n], 0 where masked: the KL term (None with beta = 0) as it is in the loss, and 1 where the ratio is clipped."""
    x = objective.log_ratio(logps, rows, batch)
    clipped = torch.logical_or(*objective.surrogate.clipped(bounded_exp(x), rows.advantages))
    kl = None if rows.ref_logps is None else objective.kl_terms(logps, rows, x)[0]
    if rows.trained is not None:
        clipped &= rows.trained
        kl = None if kl is None else torch.where(rows.trained, kl, 0.0)
    return kl, clipped.to(torch.float32)


def _masked_mean(values: Tensor, batch: TokenBatch) -> Tensor:
    """Over the trained tokens of the batch; `values` are 0 elsewhere."""
    count = values.numel() if batch.mask is None else batch.mask.sum()
    return values.sum() / (max(count, 1) if isinstance(count, int) else count.clamp(min=1))
