"""Score centering: terms at extra ids that remove the drift of a sampler from the gradient.

Extra ids are ids besides the sampled token whose log-probs the loss uses. Here each token lists
ids that its sampler finds likely.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checks import Checked, require
from .extra_id_terms import logp_term, probability_outside
from .filters import TrustRegion
from .surrogates import PolicyGradient, Surrogate

#: Log-prob of an unlisted id, in nats, when a trust region compares its two probabilities. Each
#: unlisted id is rare.
UNLISTED_LOGP = -40.0


@dataclass(frozen=True)
class ScoreCentering(Checked):
    """Remove the drift that a sampler other than the policy causes in the gradient.

    An `ExtraIdFunction` for `Objective(listed=)`. Source: arXiv 2609.20807.

        surrogate = Cispo(2.0)
        sets = TokenSets.from_padded(sampler_ids, values=sampler_logps)  # its 128 likeliest ids
        batch = TokenBatch(targets, advantages, old_logps=sampler, logp_terms=sets)
        objective = Objective(surrogate, listed=ScoreCentering(surrogate))

    p_v and q_v are the probabilities of id v under the policy and under the sampler, A is the
    advantage, and sg stops the gradient. The policy term of a token has the gradient
    -A w grad log p, whose mean over the tokens that q samples is not 0. To make the mean 0, each
    listed id v adds to the loss

        A sg(c_v) log p_v,   c_v = q_v w_v             if tail=False
                             c_v = q_v w_v - a p_v     if tail=True

    With tail=True all unlisted ids count as if q / p were the same number r for each of them:
    r = (1 - sum q_v) / (1 - sum p_v) over the listed ids, both at least 1e-6, and a = r w(1 / r),
    where w(1 / r) is the weight of an id with p / q = 1 / r.

    surrogate   the surrogate of the objective. It defines the weight w: 1 for `PolicyGradient()`,
                p / q clamped to [low, cap] for `Cispo(cap, low)`. The old_logps of the batch must
                be the log-probs of the sampler.
    trust       the trust region of the objective, outside of which w is 0, or None
    tail        True: the token lists the likeliest ids of the sampler. False: it lists all ids that
                the sampler can choose, such as a candidate set.

    With tail=True, w = 1 and 1 - sum p_v >= 1e-6 the gradient of a listed logit j is A (q_j - p_j),
    with an error of a few fp32 roundings however large r is, if the log-probs are float64 as
    `grpo_loss` passes them.

    The `weights` of a batch multiply both the policy term and these terms. Do not pass importance
    weights of tokens (TIS) there, which would undo the centering: `Cispo` has such weights. Raises
    ValueError naming the argument that is wrong.
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
        """Make the `ScoreCentering` with the surrogate and the trust region of an `Objective`.

        Score centering adds to the loss a term at each id that a token lists, so that the gradient
        of the policy term has the mean 0 over the tokens that the sampler draws.

        objective   an `Objective`
        tail        True: the listed ids are the likeliest ids of the sampler, and the terms also
                    account for all other ids. False: the sampler can draw the listed ids only.

        Raises ValueError unless the objective has level="token".
        """
        require(
            objective.level == "token",
            "level",
            objective.level,
            "score centering weights each id by its own ratio, which is not defined for a"
            ' sequence: pass level="token".',
        )
        trust_region = objective.filter(TrustRegion)  # its filter of this class, or None
        return cls(surrogate=objective.surrogate, trust=trust_region, tail=tail)

    def __call__(
        self, logp: Tensor, values: Tensor, advantage: Tensor, sum_over_ids: Any
    ) -> tuple[Tensor, ...]:
        """Return the term A c log p of each listed id, and its derivative A c in log p.

            c = q w                    if tail is False
            c = q w - r w(1 / r) p     if tail is True

        c counts as a constant. p and q are the probabilities of the id under the policy and under
        the sampler, w is the weight of the id in the surrogate, and A is the advantage. r is the
        ratio q / p of all unlisted ids together, and w(1 / r) is the weight of an id with
        p / q = 1 / r.

        logp           float64 [num_ids], log p of each id
        values         float [num_ids], log q of each id
        advantage      fp32 [num_ids], A of the token that lists the id
        sum_over_ids   function x -> y, [num_ids] each: y is the sum of x over all ids that the same
                       token lists

        Return (term, derivative), float64 [num_ids] each, as an `ExtraIdFunction` does.
        """
        p = logp.exp()
        q = values.exp()
        coefficient = q * self.advantage_times_weight(logp, values, advantage)
        if not self.tail:
            return logp_term(logp, coefficient, advantage, sum_over_ids)
        # `sum_over_ids` gives all ids of a token the same number, so r is [num_ids]. r may be 1e6.
        # The gradient of a listed logit is a difference of numbers of this size and is at most 1,
        # so the log-probs must be float64.
        unlisted_q = probability_outside(values, sum_over_ids)
        unlisted_p = probability_outside(logp, sum_over_ids)
        r = unlisted_q / unlisted_p
        # The weight depends on log p - log q alone, so any two log-probs that differ by
        # log(p / q) = -log r give A w(1 / r): here -log r and 0. The trust region compares
        # probabilities: add the small log-prob of an unlisted id to both.
        unlisted_weight = self.advantage_times_weight(
            logp=-r.log(), sampler_logp=0.0 * r, advantage=advantage, trust_offset=UNLISTED_LOGP
        )
        # logp_term returns c * log p and its derivative c.
        return logp_term(logp, coefficient - r * p * unlisted_weight, advantage, sum_over_ids)

    def advantage_times_weight(
        self,
        logp: Tensor,
        sampler_logp: Tensor,
        advantage: Tensor,
        trust_offset: float = 0.0,
    ) -> Tensor:
        """Return A w of each id: its advantage times its weight in the surrogate, float [num_ids].

        The surrogate returns its loss and d loss / d logp = -A w. Outside of the trust region, if
        there is one, w is 0.

        logp           float [num_ids], log-prob of each id under the policy
        sampler_logp   float [num_ids], log-prob of each id under the sampler
        advantage      float [num_ids], A of the token that lists the id
        trust_offset   number that is added to both log-probs for the trust region. The surrogate
                       needs only their difference, but the trust region compares two probabilities.
        """
        _, slope = self.surrogate(logp, sampler_logp, advantage)  # slope = d loss / d logp
        if self.trust is None:
            return -slope
        is_trusted = self.trust.keeps(logp + trust_offset, sampler_logp + trust_offset, advantage)
        return torch.where(is_trusted, -slope, 0.0)
