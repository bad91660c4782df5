"""`TokenInputs`: all that the loss of a token depends on, except its log-prob and entropy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..checks import describe
from .ops import ops

#: The old log-prob of a token that the batch marks as on-policy. No log-prob is that large.
ON_POLICY = 1e30

#: The fields of `TokenInputs` that the formula of a token-level loss reads, in the order in which
#: kernels receive them.
TOKEN_LEVEL_INPUTS = (
    "old_logps",
    "ref_logps",
    "sampler_logps",
    "advantages",
    "policy_weight",
    "kl_weight",
    "entropy_weight",
    "nll_weight",
)
#: The fields that any formula reads. The last two follow from the log-probs of other tokens or ids,
#: so a formula with one of them runs on vectors only.
PROGRAM_INPUTS = (*TOKEN_LEVEL_INPUTS, "log_ratios", "auxiliary_loss")
#: The fields that multiply a term of the loss.
TERM_WEIGHTS = (
    "policy_weight",
    "kl_weight",
    "entropy_weight",
    "nll_weight",
    "divergence_weight",
)


def old_or_current(old_logp: Any, logp: Any) -> Any:
    """Return old_logp of each token, or logp where old_logp is the mark ON_POLICY (1e30).

    The mark says that the token was sampled from the current policy, so that its old log-prob
    equals its log-prob.

    old_logp   fp32 [num_tokens], log-prob at the start of the update, or the mark
    logp       fp32 [num_tokens], log-prob under the policy

    For the kernels the function is called once with symbols in place of both tensors: objects that
    record the operations on them.
    """
    # A log-prob is at most 0, so a number as large as the mark is no log-prob.
    return ops.where(old_logp >= ON_POLICY, logp, old_logp)


@dataclass(frozen=True, eq=False, repr=False)
class TokenInputs:
    """The tokens of a batch as flat tensors, with the weight of each loss term.

    `Objective.token_inputs` makes them. All tensors are [num_tokens], and fp32 unless it says int64
    or bool. In masked tokens the fp32 tensors are 0, except that `old_logps` may have the mark
    ON_POLICY. A weight of a term contains the coefficient of the term and 1 / denominator, so the
    loss is the sum of weight * term.

    targets             int64: id of the sampled token
    processed           bool: tokens whose logits are read, `loss_mask` or a part of it; None: all
    advantages          advantage of each token
    policy_weight       weight of the policy term, the weights of the batch included
    old_logps           log-prob at the start of the update, or the mark ON_POLICY; None: all tokens
                        are on-policy
    ref_logps           log-prob under the reference; None without a KL estimate
    kl_weight           weight of the KL estimate; None without one
    entropy_weight      weight of the entropy bonus; None without one
    nll_weight          weight of -log-prob; None without `TokenBatch.nll_weights`
    divergence_weight   weight of the divergence of whole distributions; None without one
    sampler_logps       log-prob that a trust region compares with; None: it compares with old_logps
    log_ratios          log-ratio of the token's sequence; None: use the log-ratio of the token
    auxiliary_loss      loss of extra ids, which are ids besides the target whose log-probs the loss
                        uses. It is added to the surrogate; None without such ids
    weights             `TokenBatch.weights`; None if the batch has none
    loss_mask           bool: the mask of the batch; None: all tokens are trained
    marks_on_policy     whether old_logps may contain the mark ON_POLICY
    """

    targets: Tensor
    processed: Tensor | None
    advantages: Tensor
    policy_weight: Tensor
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    kl_weight: Tensor | None = None
    entropy_weight: Tensor | None = None
    nll_weight: Tensor | None = None
    divergence_weight: Tensor | None = None
    sampler_logps: Tensor | None = None
    log_ratios: Tensor | None = None
    auxiliary_loss: Tensor | None = None
    weights: Tensor | None = None
    loss_mask: Tensor | None = None
    marks_on_policy: bool = False
    __repr__ = describe

    @property
    def mask(self) -> Tensor:
        """The loss mask as a tensor, bool [num_tokens], all True if `loss_mask` is None."""
        if self.loss_mask is None:
            return torch.ones_like(self.targets, dtype=torch.bool)
        return self.loss_mask

    def old_or_current(self, logps: Tensor) -> Tensor:
        """Return the old log-prob of each token, fp32 [num_tokens].

        It is `logps` for on-policy tokens: tokens whose old log-prob is the mark ON_POLICY, or all
        tokens if there are no old log-probs.

        logps   fp32 [num_tokens], log-prob of each token under the policy
        """
        if self.old_logps is None:
            return logps
        if not self.marks_on_policy:
            return self.old_logps
        return old_or_current(self.old_logps, logps)

    def formula_inputs(self, logps: Tensor, entropy: Tensor | None) -> dict[str, Any]:
        """Return the inputs of the loss formula by name, to compute it in torch.

        The dictionary has "logps", "entropy" (also if it is None), and those fields of this object
        in PROGRAM_INPUTS that are not None, such as "old_logps" and "advantages". Each is fp32
        [num_tokens].

        A batch may mark tokens as on-policy by the old log-prob ON_POLICY (1e30). The result has
        `logps` in place of such a mark. The kernels replace marks themselves, so `program_inputs`,
        which returns the inputs for the kernels, keeps them.

        logps     fp32 [num_tokens], log-prob of each token under the policy
        entropy   fp32 [num_tokens] in nats; None if no term reads it
        """
        named: dict[str, Any] = {"logps": logps, "entropy": entropy, **self.program_inputs()}
        if self.marks_on_policy:
            named["old_logps"] = self.old_or_current(logps)
        return named

    def program_inputs(self) -> dict[str, Tensor]:
        """Return those fields of this object in PROGRAM_INPUTS that are not None, by name.

        They are the inputs of the loss formula in a kernel, such as "advantages". Log-prob and
        entropy are not among them, because the kernels compute both. Each is fp32 [num_tokens].
        """
        fields = self.__dict__
        return {name: fields[name] for name in PROGRAM_INPUTS if fields[name] is not None}

    def select(self, token_ids: slice | Tensor) -> TokenInputs:
        """Return the inputs of some of the tokens, for a loss formula or a divergence.

        The result has `targets`, `divergence_weight` and the fields in PROGRAM_INPUTS. The masks
        and `weights` are None, because neither a formula nor a divergence reads them.

        token_ids   the tokens to select: a slice, or indices int64 [num_selected]
        """
        tensors = self.program_inputs()
        if self.divergence_weight is not None:
            tensors["divergence_weight"] = self.divergence_weight
        if isinstance(token_ids, slice):
            selected = [x[token_ids] for x in tensors.values()]
        else:
            # Index a stack of all tensors once, which takes less host time than one index a tensor.
            stacked = torch.stack(list(tensors.values()))
            selected = list(stacked.index_select(1, token_ids).unbind())
        named = dict(zip(tensors, selected, strict=True))
        return TokenInputs(
            targets=self.targets[token_ids],
            processed=None,
            marks_on_policy=self.marks_on_policy,
            **named,
        )

    def weighted(self, factor: Tensor) -> TokenInputs:
        """Return these inputs with the weight of every loss term multiplied by a factor.

        A weight of 0 stays 0, even if the factor is infinite or NaN.

        factor   fp32 [num_tokens] or 0-d
        """
        weights: dict[str, Any] = {}
        for name in TERM_WEIGHTS:
            weight = getattr(self, name)
            if weight is not None:
                weights[name] = torch.where(weight != 0, weight * factor, 0.0)
        return replace(self, **weights)
