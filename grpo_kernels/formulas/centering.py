"""Score centering: terms at extra ids that remove the drift of a sampler from the gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checks import Checked, require
from .extra_id_terms import logp_term, probability_outside
from .filters import TrustRegion
from .surrogates import PolicyGradient, Surrogate

#: A trust region sees the ids of the tail with log-probs that are lower by this many nats, because
#: each of them is rare.
RARE = 40.0


@dataclass(frozen=True)
class ScoreCentering(Checked):
    """Remove the drift that a sampler other than the policy causes in the gradient.

    Pass it as `Objective(listed=)`. Source: arXiv 2609.20807.

        surrogate = Cispo(2.0)
        sets = TokenSets.from_padded(sampler_ids, values=sampler_logps)  # its 128 likeliest ids
        batch = TokenBatch(targets, advantages, old_logps=sampler, logp_terms=sets)
        objective = Objective(surrogate, listed=ScoreCentering(surrogate))

    p is the policy, q the sampler, and A the advantage. The policy term of a token has the gradient
    -A w grad log p, whose mean over the tokens that q samples is not 0. To make it 0, the loss gets
    the term A sum_v sg(q_v w_v) log p_v over the listed ids v, whose values are log q_v. sg stops
    the gradient.

    surrogate   the surrogate of the objective. It defines the weight w: 1 for `PolicyGradient()`,
                p / q clamped to [low, cap] for `Cispo(cap, low)`. The old_logps of the batch must
                be the log-probs of the sampler.
    trust       the trust region of the objective, outside of which w is 0, or None
    tail        True: the list has the likeliest ids of q. All other ids count as if p / q were the
                same for each of them: the coefficient of log p_v is then q_v w_v - a p_v, where
                a = r w(1 / r), r = (1 - sum q) / (1 - sum p), and both masses are at least 1e-6.
                With w = 1 and 1 - sum p >= 1e-6 the gradient of a listed logit is A (q_j - p_j),
                with an error of a few fp32 roundings however large r is, if the log-probs are
                float64 as `grpo_loss` passes them. False: the list has all ids of q, as a candidate
                set has.

    A batch's `weights` multiply both terms: those of a token (TIS) would undo the centering,
    `Cispo` has them. Raises ValueError naming the argument that is wrong.
    """

    surrogate: Surrogate = field(default_factory=PolicyGradient)
    trust: TrustRegion | None = None
    tail: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError naming the argument that is wrong.

        The surrogate must be defined for a single token, so that it is defined for a listed id.
        """
        is_per_token = (
            isinstance(self.surrogate, Surrogate)
            and not self.surrogate.selects
            and "token" in self.surrogate.levels
        )
        remedy = "pass the objective's surrogate, for example PolicyGradient() or Cispo(2.0)."
        require(is_per_token, "surrogate", self.surrogate, remedy)
        is_trust_region = isinstance(self.trust, TrustRegion | None)
        require(is_trust_region, "trust", self.trust, "pass a TrustRegion or None.")

    @classmethod
    def of(cls, objective: Any, *, tail: bool = True) -> ScoreCentering:
        """Return the score centering for the surrogate and trust region of an `Objective`.

        Raises ValueError unless the objective has level="token".
        """
        require(
            objective.level == "token",
            "level",
            objective.level,
            "the ratio of a sequence is no weight of an id.",
        )
        return cls(objective.surrogate, objective.filter(TrustRegion), tail)

    def __call__(
        self, logp: Tensor, values: Tensor, advantage: Tensor, sums: Any
    ) -> tuple[Tensor, ...]:
        """Return the term of each listed id and its derivative, as an `ExtraIdFunction`.

        The term is A c log p with the constant c = q w, and with `tail` c = q w - a p, see the
        class.

        logp        float64 [num_ids], log p of each id under the policy
        values      [num_ids], log q of each id under the sampler
        advantage   fp32 [num_ids], A of the token that lists the id
        sums        sums numbers of ids over the ids of each token
        """
        p = logp.exp()
        q = values.exp()
        coefficient = q * self.weighted(logp, values, advantage)
        if not self.tail:
            return logp_term(logp, coefficient, advantage, sums)
        # `rest` may be 1e6. The gradient of a listed logit is a difference of numbers of its size
        # and is at most 1, for which float64 log-probs have the digits.
        rest = probability_outside(values, sums) / probability_outside(logp, sums)
        weight = self.weighted(-rest.log(), 0.0 * rest, advantage, RARE)
        return logp_term(logp, coefficient - rest * p * weight, advantage, sums)

    def weighted(
        self, logp: Tensor, sampler: Tensor, advantage: Tensor, rare: float = 0.0
    ) -> Tensor:
        """Return A w of ids, -1 times the slope of the surrogate, or 0 outside of the trust region.

        logp, sampler   log-probs of the ids under the policy and the sampler
        advantage       A, of the same shape
        rare            the trust region sees both log-probs lowered by this
        """
        _, slope = self.surrogate(logp, sampler, advantage)
        weighted = -slope
        if self.trust is None:
            return weighted
        is_trusted = self.trust.keeps(logp - rare, sampler - rare, advantage)
        return torch.where(is_trusted, weighted, 0.0)
