"""FIPO: tokens are weighted by how far the policy has moved at the tokens that follow them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import TokenBatch
from ..checks import FLOATING, LARGEST, SMALLEST, Checked, require, require_shape, require_tensor
from .filters import BOUND
from .token_inputs import TokenInputs

#: Bounds of the weight of a token that `FutureKl.safety` concerns.
SAFE_WEIGHTS = (0.8, 1.0)


@dataclass(frozen=True)
class FutureKl(Checked):
    """Weigh the policy term of token t by clip(e^F_t, low, high), a constant for the gradient.

    F_t = sum over k >= t of gamma^(k - t) log r_k, the future KL: over the trained tokens of the
    sequence from t on whose ratio r_k is at most `cutoff`, with gamma = 2^(-1 / half_life). Where
    the policy has raised the log-probs of what follows, a token counts more. Source: FIPO, arXiv
    2603.19835, eq. 7 and 8.

    half_life    distance in tokens at which a log-ratio counts half. Masked tokens add nothing, but
                 the distance counts them.
    low, high    bounds of the weight
    cutoff       a token with a larger ratio does not enter the sums
    safety       a token with a negative advantage and a larger ratio has a weight in [0.8, 1]

    `cutoff` and `safety` may be infinite, which switches them off. The ratio is that of the token
    itself. A NaN in it reaches the weights of the tokens before it.
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
        super().__post_init__()
        remedy = "the lower bound of the weight is in [0, high]."
        require(self.low <= self.high, "low", self.low, remedy)

    def weights(self, batch: TokenBatch, logps: Tensor) -> Tensor:
        """Return the weights for log-probs that are known before the loss, for
        `TokenBatch.weights`: fp32, the shape of targets, 0 where masked.

        The loss then needs one pass over the logits, since its weights do not depend on them. They
        are exact for the policy of these log-probs, for example the policy of the last mini-batch.

        logps   float, the shape of targets. The batch must have old_logps and advantages.
        """
        batch.check_sequences("future_kl needs")
        require_tensor("logps", logps, FLOATING, "floats of targets' shape")
        require_shape("logps", logps, batch.targets.shape, "targets")
        for name in ("old_logps", "advantages"):
            remedy = "future_kl compares log-probs with it, and reads the sign of the advantages."
            require(getattr(batch, name) is not None, name, None, remedy)
        given = batch.table("old_logps", "advantages")
        old_logps = given["old_logps"]
        logps = torch.where(batch.trained, logps.detach().flatten().float(), 0.0)
        if batch.on_policy is not None:
            old_logps = torch.where(batch.on_policy_tokens, logps, old_logps)
        weights = self._weights(logps - old_logps, given["advantages"], batch)
        return torch.where(batch.trained, weights, 0.0).view(batch.targets.shape)

    def apply(self, logps: Tensor, inputs: TokenInputs, batch: TokenBatch) -> Tensor:
        """Return the weight of the policy term of each token, fp32 [num_tokens].

        logps   fp32 [num_tokens] of these inputs, which are all tokens of the batch
        """
        log_ratios = logps - inputs.old_or_current(logps)
        weights = self._weights(log_ratios, inputs.advantages, batch)
        # A token of weight 0 stays out, whatever its own weight is.
        policy_weight = inputs.policy_weight
        return torch.where(policy_weight != 0, policy_weight * weights, 0.0)

    def _weights(self, log_ratios: Tensor, advantages: Tensor, batch: TokenBatch) -> Tensor:
        """Return clip(e^F_t, low, high), fp32 [num_tokens], from each token's log-ratio."""
        log_ratios = log_ratios.double().clamp(-BOUND, BOUND)
        # A comparison with NaN is False, so a NaN stays in the sum.
        counts = batch.trained & ~(log_ratios > math.log(self.cutoff))
        log_gamma = -math.log(2.0) / self.half_life
        future = future_sums(torch.where(counts, log_ratios, 0.0), log_gamma, batch)
        weights = future.clamp(max=BOUND).exp().clamp(self.low, self.high)
        is_unsafe = (advantages < 0) & (log_ratios > math.log(self.safety))
        return torch.where(is_unsafe, weights.clamp(*SAFE_WEIGHTS), weights).float()


def future_sums(values: Tensor, log_gamma: float, batch: TokenBatch) -> Tensor:
    """Return sum over k >= t of gamma^(k - t) values_k within each sequence, fp64 [num_tokens].

    After the step with `reach`, a sum has the terms of 2 * reach tokens: log2(T) steps.
    """
    num_tokens = values.numel()
    longest = num_tokens if batch.cu_seqlens is not None else batch.targets.shape[-1]
    assert batch.sequences is not None
    sequence_ids = batch.spread(torch.arange(batch.sequences, device=values.device))
    reach = 1
    while reach < longest:
        is_inside = sequence_ids[:-reach] == sequence_ids[reach:]
        later = torch.where(is_inside, math.exp(log_gamma * reach) * values[reach:], 0.0)
        values = torch.cat((values[:-reach] + later, values[-reach:]))
        reach *= 2
    return values
