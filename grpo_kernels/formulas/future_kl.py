"""FIPO's weights of tokens, computed from how far the policy has moved at the tokens after them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import TokenBatch
from ..checks import FLOATING, LARGEST, SMALLEST, Checked, require, require_shape, require_tensor
from .ops import LOG_RATIO_BOUND
from .token_inputs import TokenInputs

#: Bounds of the weight of a token with a ratio above `FutureKl.safety` and a negative advantage.
SAFE_WEIGHTS = (0.8, 1.0)


@dataclass(frozen=True)
class FutureKl(Checked):
    """Weights of the policy term by the future KL (FIPO, arXiv 2603.19835, eq. 7 and 8).

    The policy term of token t is multiplied by a weight without gradient:

        weight_t is exp(F_t), clipped to [low, high]
        F_t      = sum over k >= t of gamma^(k - t) * log r_k,   gamma = 2^(-1 / half_life)

    r_k is the ratio exp(logp - old_logp) of token k. The sum is over the trained tokens of the same
    sequence with a ratio of at most `cutoff`. So a token counts more if the policy has raised the
    log-probs of the tokens after it.

    half_life    distance in tokens at which a log-ratio counts half. Masked tokens add nothing, but
                 the distance counts them.
    low, high    bounds of the weight
    cutoff       tokens with a larger ratio are left out of the sum; math.inf: none
    safety       a token with a larger ratio and a negative advantage has a weight in [0.8, 1];
                 math.inf: none

    A NaN ratio makes the weights of its token and of the tokens before it NaN. Raises ValueError
    naming the field that is wrong.
    """

    half_life: float = 32.0
    low: float = 1.0
    high: float = 1.2
    cutoff: float = 10.0
    safety: float = 10.0
    ranges = (
        ("half_life", "the half-life is a finite number of tokens above 0.", SMALLEST, LARGEST),
        ("low", "the lower bound of the weight is in [0, high].", 0),
        ("high", "the upper bound of the weight is a finite number above 0.", SMALLEST, LARGEST),
        ("cutoff safety", "it is a ratio above 0 (math.inf switches it off).", SMALLEST),
    )

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is outside of its range. `low` is at most `high`."""
        super().__post_init__()
        remedy = "the lower bound of the weight is in [0, high]."
        require(self.low <= self.high, "low", self.low, remedy)

    def weights(self, batch: TokenBatch, logps: Tensor) -> Tensor:
        """Return the future-KL weight of each token, for `TokenBatch(weights=)`.

            weight_t is exp(F_t), clipped to [low, high]
            F_t      = sum over k >= t of gamma^(k - t) * (logp_k - old_logp_k)

        with gamma = 2^(-1 / half_life). The sum is over the trained tokens of the sequence of t
        with a ratio exp(logp_k - old_logp_k) of at most `cutoff`.

        Use this method instead of `Objective(future_kl=)` if log-probs of the policy are known
        before the loss, for example from the last mini-batch. The loss then needs one pass over the
        logits instead of two, because the weights do not depend on the logits.

        batch   must have old_logps and advantages, and tell which tokens form a sequence
        logps   float, the shape of targets: log-probs of the tokens under the policy

        Return fp32 in the shape of targets, 0 in masked tokens. Raises ValueError if the batch
        lacks one of these three.
        """
        batch.check_sequences("future_kl needs")
        require_tensor("logps", logps, FLOATING, "floats of targets' shape")
        require_shape("logps", logps, batch.targets.shape, "targets")
        for name in ("old_logps", "advantages"):
            remedy = "future_kl compares log-probs with it, and reads the sign of the advantages."
            require(getattr(batch, name) is not None, name, None, remedy)
        tensors = batch.table("old_logps", "advantages")
        old_logps = tensors["old_logps"]
        logps = torch.where(batch.trained, logps.detach().flatten().float(), 0.0)
        if batch.on_policy is not None:
            old_logps = torch.where(batch.on_policy_tokens, logps, old_logps)
        log_ratios = logps - old_logps
        weights = self._weights(log_ratios, tensors["advantages"], batch)
        return torch.where(batch.trained, weights, 0.0).view(batch.targets.shape)

    def weighted_policy_weight(
        self, logps: Tensor, inputs: TokenInputs, batch: TokenBatch
    ) -> Tensor:
        """Return the weight of each token's policy term times its future-KL weight.

            future-KL weight of token t = exp(F_t), clipped to [low, high]
            F_t = sum over k >= t of gamma^(k - t) * (logp_k - old_logp_k),  gamma < 1

        with gamma = 2^(-1 / half_life). The sum is over the trained tokens of the same sequence
        with a ratio exp(logp_k - old_logp_k) of at most `cutoff`.

        logps    fp32 [num_tokens], log-prob of each token under the policy
        inputs   of all tokens of the batch: old log-probs, advantages and policy weights
        batch    the batch of the tokens; tells which tokens form a sequence

        Return fp32 [num_tokens].
        """
        log_ratios = logps - inputs.old_or_current(logps)
        weights = self._weights(log_ratios, inputs.advantages, batch)
        # A token of policy weight 0 has no policy term, even if the log-ratio of a later token, and
        # with it the future-KL weight, is NaN.
        policy_weight = inputs.policy_weight
        return torch.where(policy_weight != 0, policy_weight * weights, 0.0)

    def _weights(self, log_ratios: Tensor, advantages: Tensor, batch: TokenBatch) -> Tensor:
        """Return the future-KL weight of each token, fp32 [num_tokens].

            weight_t is exp(F_t), clipped to [low, high]
            F_t      = sum over k >= t of gamma^(k - t) * log r_k,   gamma = 2^(-1 / half_life)

        The sum is over the trained tokens k of the sequence of t with a ratio r_k of at most
        `cutoff`. If token t has a negative advantage and a ratio above `safety`, its weight is then
        also clamped to [0.8, 1] (SAFE_WEIGHTS).

        So that all numbers stay finite, each log-ratio is clamped to [-60, 60] (LOG_RATIO_BOUND)
        and F_t to at most 60. A NaN log-ratio makes the weights of its token and of the tokens
        before it NaN. Sums are computed in fp64.

        log_ratios   fp32 [num_tokens], log r_t = logp_t - old_logp_t
        advantages   fp32 [num_tokens]
        batch        tells which tokens are trained and which form a sequence
        """
        log_ratios = log_ratios.double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        # "not above the cutoff" is True for NaN, so a NaN stays in the sum.
        is_summed = batch.trained & ~(log_ratios > math.log(self.cutoff))
        log_gamma = -math.log(2.0) / self.half_life
        # F_t of each token
        future_kl = future_sums(torch.where(is_summed, log_ratios, 0.0), log_gamma, batch)
        weights = future_kl.clamp(max=LOG_RATIO_BOUND).exp().clamp(self.low, self.high)
        is_unsafe = (advantages < 0) & (log_ratios > math.log(self.safety))
        return torch.where(is_unsafe, weights.clamp(*SAFE_WEIGHTS), weights).float()


def future_sums(values: Tensor, log_gamma: float, batch: TokenBatch) -> Tensor:
    """Return the discounted sum of values from each token to the end of its sequence.

        result[t] = sum over k >= t of gamma^(k - t) * values[k], for k in the sequence of t

    values      fp64 [num_tokens], one sequence after the other
    log_gamma   log of the discount gamma, at most 0
    batch       the batch of the tokens; tells which tokens form a sequence

    Return fp64 [num_tokens].

    The sums are computed by doubling. Suppose sums[t] covers the `reach` tokens from t on. Adding
    gamma^reach * sums[t + reach] makes it cover 2 * reach tokens. So log2(length of the longest
    sequence) steps suffice, where a loop over tokens would take as many steps as tokens.
    """
    num_tokens = values.numel()
    # No sequence is longer than this. The exact lengths of packed sequences are on the device, and
    # reading them would make the host wait.
    longest = num_tokens if batch.cu_seqlens is not None else batch.targets.shape[-1]
    assert batch.sequences is not None
    # The number of each token's sequence.
    sequence_ids = batch.spread(torch.arange(batch.sequences, device=values.device))
    sums = values
    reach = 1  # sums[t] covers the tokens t, ..., t + reach - 1 of its sequence
    while reach < longest:
        is_same_sequence = sequence_ids[:-reach] == sequence_ids[reach:]
        later = torch.where(is_same_sequence, math.exp(log_gamma * reach) * sums[reach:], 0.0)
        # The sums of the last `reach` tokens are complete: no token is `reach` tokens later.
        sums = torch.cat((sums[:-reach] + later, sums[-reach:]))
        reach *= 2
    return sums
