"""Objectives: a surrogate, the level of its ratio, filters, a KL, an entropy bonus, an aggregate.

An `Objective` gives each token the weights of its loss terms (`token_inputs`), and computes the
loss of tokens and its gradients from their log-probs and entropies (`token_losses`). Kernels
receive the loss of a token as a formula (`loss_formula`).

The end of the file has the published objectives by name (`PRESETS`) and, for each trainer, what it
does differently: clip widths, clamps, denominators, the KL (`NUMERICS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .batch import TokenBatch
from .checks import (
    LARGEST,
    SMALLEST,
    Checked,
    as_number,
    flat,
    refuse_unknown,
    require,
    require_number,
    require_one_of,
    require_whole,
    values_are_checked,
)
from .formulas.divergence import Exact
from .formulas.extra_id_terms import ExtraIdFunction, ExtraIdTerms, logp_term, prob_term
from .formulas.filters import (
    TRUST_REGIONS,
    EntropyFloor,
    Filter,
    OffPolicySequences,
    SamplerMismatch,
    TrustRegion,
    check_filters,
)
from .formulas.formula_keys import is_own
from .formulas.future_kl import FutureKl
from .formulas.kl import Kl, KlTerms, as_kl, kl_terms
from .formulas.surrogates import (
    LEVELS,
    A2po,
    Cispo,
    Clip,
    ClipCov,
    Dro,
    Gmpo,
    ImportanceSampling,
    KlCov,
    NoPolicyTerm,
    PolicyGradient,
    Sapo,
    Surrogate,
    Vespo,
    check_log_ratio_bounds,
)  # fmt: skip
from .formulas.token_inputs import ON_POLICY, TokenInputs
from .formulas.token_loss import (
    FormulaFunctions,
    FormulaNumbers,
    ObjectiveFormula,
    TokenLosses,
    TokenLossFormula,
    log_ratio_of_kl,
)

F = TypeVar("F", bound=Filter)

#: Evaluates a formula: (formula, logps, entropy) -> losses and gradients, fp32 [num_tokens] each.
Evaluate = Callable[[TokenLossFormula, Tensor, Any], TokenLosses]

AGGREGATES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "group-mean",
    "token-sum",
    "constant",
)


class Denominators(NamedTuple):
    """The denominators of policy term, KL and entropy bonus, for `normalizer=` of a loss.

    Each is a number, a 0-d tensor or None, which stands for the denominator of this batch alone. If
    the denominator of the KL or the entropy bonus is None and `Objective.kl_aggregate` or
    `entropy_aggregate` too, the term has the denominator of the policy term.
    """

    policy: float | Tensor | None
    kl: float | Tensor | None = None
    entropy: float | Tensor | None = None

    def __truediv__(self, num_ranks: float) -> Denominators:
        """Divide by the number of ranks, if gradients are averaged over ranks instead of summed."""
        return Denominators(*(None if x is None else x / num_ranks for x in self))


NO_DENOMINATORS = Denominators(None)


def _check_normalizer(
    normalizer: float | Tensor | Denominators | None, batch: TokenBatch
) -> Denominators:
    """Return `normalizer=` as `Denominators` of floats or 0-d fp32 tensors.

    A single number is the denominator of the policy term. Raises ValueError for a denominator that
    is not a finite number above 0.
    """
    if normalizer is None:
        return NO_DENOMINATORS
    if not isinstance(normalizer, Denominators):
        return Denominators(_check_denominator(normalizer, batch))
    return Denominators(*(None if x is None else _check_denominator(x, batch) for x in normalizer))


def _check_denominator(denominator: float | Tensor, batch: TokenBatch) -> float | Tensor:
    """Return a denominator as a float or a 0-d fp32 tensor on the device of the batch."""
    remedy = "the denominator is a finite number above 0, over all micro-batches and ranks."
    if not isinstance(denominator, Tensor):
        require_number("normalizer", denominator, remedy, SMALLEST, LARGEST)
        return float(denominator)
    if denominator.numel() != 1:
        raise ValueError(
            f"normalizer has shape {list(denominator.shape)}: pass a number or a 0-d tensor."
        )
    if values_are_checked(denominator):
        # The denominator of a batch without trained tokens may be 0.
        nothing_is_trained = batch.mask is not None and not batch.mask.any()
        lowest = 0 if nothing_is_trained else SMALLEST
        require_number("normalizer", float(denominator), remedy, lowest, LARGEST)
    scalar = denominator.detach().reshape(())
    return scalar.to(batch.targets.device, torch.float32, non_blocking=True)


def _is_immutable(part: object) -> bool:
    """Return whether an object always has the same attributes and properties.

    It does if its class is a frozen dataclass of this package. A class of the user may have
    properties whose values change.
    """
    params = vars(type(part)).get("__dataclass_params__")
    return params is not None and params.frozen and is_own(type(part))


def _refuse_unknown_fields(changes: dict[str, Any], surrogate: Any) -> None:
    """Raise an error for the first name that is not a field of an Objective.

    A number of the surrogate raises ValueError, any other name TypeError.
    """
    unknown = {name: value for name, value in changes.items() if name not in FIELDS}
    numbers = {
        name: value for name, value in unknown.items() if name in surrogate.__dataclass_fields__
    }
    if numbers:
        raise ValueError(
            f"{', '.join(numbers)} is a number of the surrogate, not of the Objective:"
            f" pass surrogate={replace(surrogate, **numbers)!r}."
        )
    if unknown:
        remedy = f"It has {', '.join(FIELDS)}. Clip bounds go into surrogate={surrogate!r}."
        refuse_unknown("Objective.preset", unknown, FIELDS, remedy)


@dataclass(frozen=True)
class Objective(Checked):
    """An objective of the GRPO family.

    surrogate           the policy term of a token, see formulas/surrogates.py: Clip, Cispo, Sapo,
                        Gmpo, Vespo, ... or Custom
    level               at which level the ratio is computed (`importance_sampling_level`):
                        "token"            r = exp(logp - old_logp) of the token
                        "sequence"         exp of the mean log-ratio over the trained tokens of the
                                           sequence, with the gradient through the mean (GSPO, arXiv
                                           2507.18071 eq. 5). A surrogate that detaches the ratio
                                           has its gradient at the token.
                        "sequence-token"   that ratio in value, with the gradient of each token's
                                           own ratio (GSPO-token, eq. 14)
                        "sequence-sum"     exp of the sum, the ratio of the whole completion (RLOO
                                           arXiv 2402.14740, VESPO)
    aggregate           how the terms of tokens become one number; D is the denominator:
                        "token-mean"            sum over tokens / D, D = number of trained tokens
                        "seq-mean-token-mean"   sum of the means of sequences / D, D = B
                        "seq-mean-token-sum"    sum over tokens / D, D = B
                        "group-mean"            sum over groups of the mean over the tokens of the
                                                group / D, D = number of groups
                        "token-sum"             sum over tokens / D, D = 1
                        "constant"              sum over tokens / D, D = B * max_tokens (Dr. GRPO,
                                                arXiv 2503.20783)
                        A fully masked sequence adds 0 and counts in B, unless count_empty=False.
    beta, kl            weight and estimator of the KL to the reference. An estimator is "k1", "k2",
                        "k3" or "abs", with "+" for its straight-through form, a `Kl`, or a function
                        (logp, old_logp, ref_logp) -> (value, slope). An `Exact` is the divergence
                        of the whole distributions instead. The batch's weights do not multiply the
                        KL. A log-prob below -1e4, -inf included, counts as -1e4, and exponents are
                        at most 60: k3 of a target with p = 0 is about e^60 = 1.1e26, k3 of a
                        reference with p = 0 about 1e4. Strict mode raises ValueError for a log-prob
                        of -inf, of the policy or the reference, at a trained token.
    entropy_coef        weight of the entropy bonus, which is subtracted from the loss
    max_tokens          the completion budget of "constant": the constant of the paper, not the
                        padded length
    filters             which tokens are left out of the policy term, see formulas/filters.py. At
                        most one filter of each kind.
    log_ratio_bounds    (low, high): the log-ratio at `level` is clamped, without gradient outside,
                        as by torch.clamp (verl: -20, 20). None: it is bounded at 60 in the exponent
                        only, and keeps its gradient.
    kl_aggregate,
    entropy_aggregate   aggregate of the KL and of the entropy bonus, with a denominator over this
                        batch unless `normalizer` is a `Denominators`. None: `aggregate`, with the
                        denominator of the policy term.
    count_empty         whether a fully masked sequence counts in the denominator (not so in verl
                        and OpenRLHF)
    listed              what the terms of a batch's `logp_terms` are: a function (logp, values,
                        advantage, sums) -> (term, slope), see formulas/extra_id_terms.py. None:
                        value * logp. They are weighted, filtered and aggregated like the policy
                        term, except that a `TrustRegion` drops the sampled token alone.
    future_kl           a `FutureKl`, which weighs the policy term of a token by the ratios of the
                        tokens that follow it (FIPO), at level "token" only. None: no such weights.

    The denominator D is for one process and one micro-batch. If a batch is split, pass
    `normalizer=` to the loss: D over all micro-batches and ranks, see
    `distributed.global_normalizer`. Raises ValueError naming the field that is wrong.
    """

    surrogate: Surrogate = field(default_factory=Clip)
    level: str = "token"
    aggregate: str = "token-mean"
    beta: float = 0.0
    kl: str | Kl | Exact | Callable[..., Any] = "k3"
    entropy_coef: float = 0.0
    max_tokens: int | None = None
    filters: tuple[Filter, ...] = ()
    log_ratio_bounds: tuple[float, float] | None = None
    kl_aggregate: str | None = None
    entropy_aggregate: str | None = None
    count_empty: bool = True
    listed: ExtraIdFunction | None = None
    future_kl: FutureKl | None = None
    ranges = (
        ("beta", "the KL weight is a finite number >= 0.", 0, LARGEST),
        ("entropy_coef", "it must be a finite number.", -LARGEST, LARGEST),
    )

    def __post_init__(self) -> None:
        """Check the fields, then compute the cached properties."""
        super().__post_init__()
        if not isinstance(self.surrogate, Surrogate):
            raise ValueError(
                f"surrogate={self.surrogate!r}: pass Clip(), Cispo(), PolicyGradient() or"
                " Custom(your_function)."
            )
        self._check_level_and_aggregates()
        if self.listed is not None:
            is_function = callable(self.listed) and not isinstance(self.listed, type)
            remedy = "pass a function (logp, values, advantage, sums) -> (term, slope), or None."
            require(is_function, "listed", self.listed, remedy)
        if self.max_tokens is not None:
            remedy = "the completion budget is a whole number of at least 1 token."
            require_whole("max_tokens", self.max_tokens, remedy)
            object.__setattr__(self, "max_tokens", as_number(self.max_tokens))
        check_filters(self.filters, self.level)
        if self.log_ratio_bounds is not None:
            check_log_ratio_bounds(self.log_ratio_bounds, self.surrogate)
        if self.future_kl is not None:
            remedy = "pass a FutureKl, or None."
            require(isinstance(self.future_kl, FutureKl), "future_kl", self.future_kl, remedy)
            remedy = 'its sums are over the ratios of tokens: it needs level="token".'
            require(self.level == "token", "future_kl", self.future_kl, remedy)
        # Compute the cached properties now, because torch.compile cannot trace cached_property.
        for name, compute in COMPUTED_ONCE.items():
            object.__setattr__(self, name, compute(self))
        if self.exact is not None and self.filter(SamplerMismatch) is not None:
            remedy = (
                "an exact divergence is not part of what a SamplerMismatch drops: mask the"
                " sequences with rewards.corrections.sampler_mismatch_mask, and leave the filter"
                " out."
            )
            require(False, "filters", self.filters, remedy)

    def _check_level_and_aggregates(self) -> None:
        """Raise ValueError unless the level fits the surrogate and the aggregates are known."""
        surrogate = self.surrogate
        require_one_of("level", self.level, LEVELS)
        levels = " or ".join(repr(level) for level in surrogate.levels)
        remedy = f"{type(surrogate).__name__} is defined at level {levels} only."
        require(self.level in surrogate.levels, "level", self.level, remedy)
        require_one_of("aggregate", self.aggregate, AGGREGATES)
        for name in ("kl_aggregate", "entropy_aggregate"):
            if getattr(self, name) is not None:
                require_one_of(name, getattr(self, name), AGGREGATES)

    @classmethod
    def preset(cls, name: str, *, numerics: str | None = None, **changes: Any) -> Objective:
        """Return a published objective by name (`PRESETS`), with fields replaced by `changes`.

        numerics   "trl", "verl", "openrlhf", ...: take the constants, clamps and denominators of
                   that trainer. None: those of the paper.

        Raises ValueError for an unknown name or trainer, and for a trainer without this objective.
        Raises TypeError for an unknown field.
        """
        require_one_of("preset", name, PRESETS)
        published = PRESETS[name]
        _refuse_unknown_fields(changes, published.surrogate)
        changes_of_trainer: Changes = {}
        if numerics is not None:
            require_one_of("numerics", numerics, NUMERICS)
            if name not in NUMERICS[numerics]:
                raise ValueError(
                    f"preset {name!r}: {numerics} has no such objective, only"
                    f" {', '.join(NUMERICS[numerics])}."
                )
            changes_of_trainer = NUMERICS[numerics][name]
        values = {name: getattr(published, name) for name in FIELDS}
        return cls(**{**values, **changes_of_trainer, **changes})

    def filter(self, kind: type[F]) -> F | None:
        """Return the filter of this class, None if there is none."""
        for candidate in self.filters:
            if isinstance(candidate, kind):
                return candidate
        return None

    # ---- what follows from the fields

    @cached_property
    def exact(self) -> Exact | None:
        """`kl` if it is an `Exact` and beta is not 0, otherwise None."""
        return self.kl if isinstance(self.kl, Exact) and self.beta != 0 else None

    @cached_property
    def kl_spec(self) -> Kl:
        """`kl` as a `Kl`. If `kl` is an `Exact`, it is the default `Kl` and not used."""
        return Kl() if isinstance(self.kl, Exact) else as_kl(self.kl)

    @cached_property
    def has_kl_estimate(self) -> bool:
        """Whether the loss contains an estimate of the KL from the sampled tokens."""
        return self.beta != 0 and not isinstance(self.kl, Exact)

    @cached_property
    def compares_with_sampler(self) -> bool:
        """Whether a trust region compares the policy with the sampler's log-probs."""
        trust = self.filter(TrustRegion)
        return trust is not None and trust.anchor == "sampler"

    @property
    def aggregates(self) -> tuple[str, str, str]:
        """The aggregates of policy term, KL and entropy bonus.

        A term that the loss does not have gets that of the policy term.
        """
        kl = self.kl_aggregate if self.beta != 0 else None
        entropy = self.entropy_aggregate if self.entropy_coef != 0 else None
        return (self.aggregate, kl or self.aggregate, entropy or self.aggregate)

    @cached_property
    def formula_is_torch_only(self) -> bool:
        """Whether no kernel can evaluate the formula of a token.

        Autograd computes the slope of the surrogate, or the surrogate takes the tokens that it has
        selected from the batch as a tensor. A kernel evaluates any other formula that can be
        traced, see `Backend.evaluate_formula`.
        """
        return self.surrogate.selects or self.surrogate.in_torch

    @cached_property
    def gradient_is_per_token(self) -> bool:
        """Whether the gradient of a token depends on this token alone.

        Then a kernel computes loss and gradient while it reads a row of logits once.
        """
        if self.level != "token" or self.future_kl is not None or self.formula_is_torch_only:
            return False
        return all(f.is_per_token for f in self.filters)

    @cached_property
    def gradient_is_per_sequence(self) -> bool:
        """Whether the gradient of a token depends on the tokens of its sequence at most."""
        if self.surrogate.selects:
            return False
        return all(f.is_per_token or f.is_per_sequence for f in self.filters)

    @cached_property
    def reads_advantages(self) -> bool:
        """Whether a batch must have advantages."""
        no_term = isinstance(self.surrogate, NoPolicyTerm) and self.listed is None
        return not no_term or any(f.reads_advantages for f in self.filters)

    @cached_property
    def reads_sequences(self) -> bool:
        """Whether the loss depends on which tokens form a sequence, apart from its aggregate."""
        if self.level != "token" or self.future_kl is not None:
            return True
        return any(isinstance(f, (OffPolicySequences, SamplerMismatch)) for f in self.filters)

    @cached_property
    def needs_entropy(self) -> bool:
        """Whether entropy has a gradient."""
        return self.entropy_coef != 0

    @cached_property
    def through_sequence(self) -> bool:
        """Whether a gradient flows through the log-ratio of a sequence to all of its tokens."""
        if self.level == "sequence" and self.beta != 0 and self.kl_spec.weighting == "ratio":
            return True
        is_sequence = self.level in ("sequence", "sequence-sum")
        return is_sequence and not self.surrogate.detached_ratio

    @cached_property
    def gradient_mask(self) -> str:
        """The name of a mask of the batch outside of which all gradients are exactly 0.

        "trained"        the loss mask
        "contributing"   its tokens with a policy or likelihood term that is not always 0
        "sequences"      its tokens in sequences that have such a token

        `TokenBatch.named_mask` returns the mask.
        """
        if not self.surrogate.zero_at_zero_advantage or self.beta != 0 or self.entropy_coef != 0:
            return "trained"
        return "sequences" if self.through_sequence else "contributing"

    # ---- denominators

    def normalizer(self, batch: TokenBatch) -> float | Tensor:
        """Return the denominator D of one batch, a number or a 0-d tensor.

        Sum it over micro-batches and ranks, see `distributed.global_normalizer`. It may be 0, which
        a loss replaces by 1. If ranks share sequences (`TokenBatch.context_group`), each rank gets
        its share.
        """
        return self._denominator(batch, self.aggregate)

    def denominators(self, batch: TokenBatch) -> Denominators:
        """Return `normalizer` for each term, with its own aggregate."""
        return Denominators(*(self._denominator(batch, name) for name in self.aggregates))

    def _denominator(self, batch: TokenBatch, aggregate: str) -> float | Tensor:
        """Return the denominator of an aggregate for one batch, this rank's share of it."""
        if aggregate == "token-sum":
            return 1.0
        if aggregate == "token-mean":
            if batch.mask is None:
                return float(batch.tokens)
            return batch.mask.sum(dtype=torch.float32)  # exact up to 2^24 tokens
        if aggregate == "group-mean":
            is_same_group = batch.same_group()
            counts = torch.ones_like(is_same_group[0])
            if not self.count_empty:
                tokens_of_group = is_same_group @ self._with_sequences(batch).lengths
                counts = (tokens_of_group > 0).to(is_same_group.dtype)
            # Each sequence counts as 1 / (sequences of its group).
            return (counts / is_same_group.sum(1)).sum().float() / batch.context_ranks
        num_sequences: Any = self._with_sequences(batch).sequences
        if not self.count_empty:
            num_sequences = (batch.lengths > 0).sum().float()
        share: float | Tensor = num_sequences / batch.context_ranks
        if aggregate != "constant":
            return share
        if self.max_tokens is None:
            raise ValueError(
                'max_tokens is None, but aggregate="constant" divides by B * max_tokens: set it to'
                ' the completion budget (Objective.preset("dr_grpo", max_tokens=1024)), or pass'
                " normalizer= to the loss."
            )
        return share * self.max_tokens

    def _denominator_over_ranks(self, batch: TokenBatch, aggregate: str) -> float | Tensor:
        """Return the denominator of a batch over all ranks that share its sequences, at least 1."""
        denominator = self._denominator(batch, aggregate)
        if batch.context_group is not None and aggregate != "token-sum":
            share = torch.zeros((), dtype=torch.float64, device=batch.targets.device) + denominator
            denominator = batch.over_context(share).float()
        # A batch without trained tokens has the loss 0 / 1.
        if isinstance(denominator, Tensor):
            return denominator.clamp(min=1.0)
        return max(denominator, 1.0)

    def _with_sequences(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch, after checking that it tells which tokens form a sequence.

        Raises ValueError if it does not, which happens for packed targets without cu_seqlens.
        """
        if batch.sequences is not None:
            return batch
        return batch.check_sequences(
            f'aggregate="{self.aggregate}", level="{self.level}" and filters={self.filters} need'
        )

    # ---- the inputs of tokens

    def token_inputs(
        self,
        batch: TokenBatch,
        normalizer: float | Tensor | Denominators | None = None,
        skip_inactive: bool = False,
    ) -> TokenInputs:
        """Return the flat tokens of a batch with the weight of each loss term.

        It does not wait for the device. Raises ValueError if the batch lacks something that the
        objective needs.

        skip_inactive   whether to leave out of `processed` the tokens that change neither loss nor
                        gradient: advantage or weight 0, without KL and entropy bonus. Only if the
                        gradient is per token.
        """
        self._check_batch(batch)
        denominators = _check_normalizer(normalizer, batch)
        mask = batch.named_mask("trained")
        processed = mask
        if skip_inactive and self.gradient_is_per_token:
            processed = batch.named_mask(self.gradient_mask)
        weight = self._token_weight(batch, self.aggregate, denominators.policy)
        tensors = batch.table(*self._names_of_tensors)
        if batch.advantages is None:
            tensors["advantages"] = torch.zeros_like(weight)
        marks_on_policy = batch.on_policy is not None and batch.old_logps is not None
        if marks_on_policy:
            is_on_policy = batch.on_policy_tokens
            tensors["old_logps"] = tensors["old_logps"].masked_fill(is_on_policy, ON_POLICY)
        policy_weight = weight
        if batch.weights is not None:
            policy_weight = self._policy_weight(weight, tensors["weights"])
        kl_weight = None
        if self.beta != 0:
            kl_weight = self.beta * self._weight_of_term(
                weight, batch, self.kl_aggregate, denominators.kl
            )
        entropy_weight = None
        if self.entropy_coef != 0:
            entropy_weight = self.entropy_coef * self._weight_of_term(
                weight, batch, self.entropy_aggregate, denominators.entropy
            )
        return TokenInputs(
            targets=flat(batch.targets).long(),
            processed=processed,
            policy_weight=policy_weight,
            kl_weight=kl_weight if self.has_kl_estimate else None,
            divergence_weight=None if self.has_kl_estimate else kl_weight,
            entropy_weight=entropy_weight,
            nll_weight=tensors.pop("nll_weights", None),
            loss_mask=mask,
            marks_on_policy=marks_on_policy,
            **tensors,
        )

    @cached_property
    def _names_of_tensors(self) -> tuple[str, ...]:
        """The fields of a batch that the loss of a token reads, as far as the batch has them."""
        names = ["advantages", "weights", "nll_weights", "old_logps"]
        if self.has_kl_estimate:
            names.append("ref_logps")
        if self.compares_with_sampler:
            names.append("sampler_logps")
        return tuple(names)

    def _check_batch(self, batch: TokenBatch) -> None:
        """Raise ValueError if the batch lacks something that the objective needs."""
        if self.has_kl_estimate and batch.ref_logps is None:
            raise ValueError(
                f"ref_logps is None, but beta={self.beta}: pass the reference's log-probs, or set"
                " beta=0."
            )
        if batch.advantages is None and self.reads_advantages:
            raise ValueError(
                f"advantages is None, but {type(self.surrogate).__name__}, a filter or `listed`"
                " reads them: pass a float tensor [B] or [B, T], see group_advantages. Only an"
                " objective of NoPolicyTerm, such as the preset distillation, needs none."
            )
        if self.listed is not None and batch.logp_terms is None:
            raise ValueError(
                f"logp_terms is None, but listed={self.listed!r} makes terms of it: list ids with"
                " values, or leave listed out."
            )
        if self.compares_with_sampler and batch.sampler_logps is None:
            raise ValueError(
                'sampler_logps is None, but TrustRegion(anchor="sampler") compares with them: pass'
                " them."
            )
        if self.filter(SamplerMismatch) is not None and batch.sampler_logps is None:
            raise ValueError(
                "sampler_logps is None, but SamplerMismatch compares with them: pass them."
            )
        if self.reads_sequences:
            self._with_sequences(batch)
        if self.future_kl is not None:
            remedy = "a rank does not know the later tokens of a sequence that ranks share."
            require(batch.context_group is None, "future_kl", self.future_kl, remedy)
        weights = batch.weights
        if weights is None or not self.surrogate.absorbs_weights:
            return
        name = type(self.surrogate).__name__
        if weights.shape != batch.targets.shape:
            raise ValueError(
                f"weights has shape {list(weights.shape)}, but {name} multiplies the weights of a"
                " sequence's tokens into its ratio: pass one per token,"
                f" {list(batch.targets.shape)}."
            )

    def _weight_of_term(
        self,
        weight: Tensor,
        batch: TokenBatch,
        aggregate: str | None,
        denominator: float | Tensor | None,
    ) -> Tensor:
        """Return the weight of the KL or the entropy bonus of each token, without its coefficient.

        weight        fp32 [num_tokens], weight of the policy term
        aggregate     aggregate of this term; None: that of the policy term
        denominator   denominator of this term; None: that of this batch, or with aggregate=None
                      that of the policy term
        """
        if aggregate is None and denominator is None:
            return weight
        return self._token_weight(batch, aggregate or self.aggregate, denominator)

    def _token_weight(
        self, batch: TokenBatch, aggregate: str, denominator: float | Tensor | None
    ) -> Tensor:
        """Return the weight of each token in the mean `aggregate`, fp32 [num_tokens].

        The loss is the sum of weight * loss over tokens. Masked tokens have the weight 0.

        denominator   of the mean over tokens, sequences or groups; None: that of this batch
        """
        is_callers = isinstance(denominator, Tensor)
        if denominator is None:
            denominator = self._denominator_over_ranks(batch, aggregate)
        divisor = self._divisor_of_token(batch, aggregate, denominator)
        if batch.mask is None:
            shape = batch.targets.shape
            ones = torch.ones(shape, dtype=torch.float32, device=batch.targets.device)
            return (ones / divisor).flatten()
        # bool / fp32 tensor is fp32, so the mask needs no conversion, which would be a launch.
        gives_fp32 = isinstance(divisor, Tensor) and divisor.dtype == torch.float32
        mask = batch.mask if gives_fp32 else batch.mask.float()
        weight = mask / divisor
        if is_callers:
            # It may be 0 if no token is trained, and 0 / 0 must not reach the loss.
            weight = torch.where(batch.mask, weight, 0.0)
        return weight.flatten()

    def _divisor_of_token(
        self, batch: TokenBatch, aggregate: str, denominator: float | Tensor
    ) -> float | Tensor:
        """Return the divisor of each token's loss, a number or fp32 that broadcasts to targets.

        "seq-mean-token-mean"   denominator * number of trained tokens of its sequence
        "group-mean"            denominator * number of trained tokens of all answers to its prompt
        other aggregates        denominator
        """
        if aggregate not in ("seq-mean-token-mean", "group-mean"):
            return denominator
        num_tokens = self._with_sequences(batch).lengths
        if aggregate == "group-mean":
            num_tokens = batch.same_group() @ num_tokens  # [B, B] @ [B]: a sum over each group
        return batch.broadcast((num_tokens.clamp(min=1.0) * denominator).float())

    def _policy_weight(self, weight: Tensor, weights: Tensor) -> Tensor:
        """Return the weight of the policy term of each token, fp32 [num_tokens].

        It is weight * weights. If the surrogate multiplies `weights` into the ratio of the sequence
        instead (`absorbs_weights`), it is `weight`, and 0 for a token whose weight in the batch
        is 0.

        weight    fp32 [num_tokens], weight of each token in the aggregate
        weights   fp32 [num_tokens], the weights of the batch
        """
        if not self.surrogate.absorbs_weights:
            return weight * weights
        if values_are_checked(weights) and (weights < 0).any():
            raise ValueError(
                "weights holds negative numbers, but the surrogate takes their logarithm: pass"
                " importance weights >= 0."
            )
        return torch.where(weights != 0, weight, 0.0)

    # ---- the loss of tokens

    @property
    def formula(self) -> ObjectiveFormula:
        """The loss of a token. It is made once, unless an object of the user may change it."""
        formula: ObjectiveFormula | None = self.__dict__.get("_formula")
        if formula is None:
            formula = self._make_formula()
            if self._formula_is_fixed and not torch.compiler.is_compiling():
                self.__dict__["_formula"] = formula
        return formula

    @cached_property
    def _formula_is_fixed(self) -> bool:
        """Whether the formula depends on objects of this package alone, which do not change."""
        return all(_is_immutable(x) for x in (self.surrogate, self.kl_spec, *self.filters))

    def _make_formula(self) -> ObjectiveFormula:
        """Return the loss of a token: the functions and the numbers of all terms of this objective.

        Raises ValueError for a NaN among the parameters of the surrogate.
        """
        surrogate = self.surrogate
        params = surrogate.params
        if not torch.compiler.is_compiling() and any(math.isnan(x) for x in params):
            name = getattr(surrogate.function, "__qualname__", repr(surrogate))
            raise ValueError(
                f"the parameters of {name} are {params}: a NaN among them would make the loss one."
            )
        trust = self.filter(TrustRegion)
        floor = self.filter(EntropyFloor)
        bounds = self.log_ratio_bounds
        kl = self.kl_spec if self.beta else NO_KL
        functions = FormulaFunctions(
            surrogate=surrogate.formula,
            ratio_is_detached=surrogate.detached_ratio,
            level=self.level,
            trust_region=None if trust is None else TRUST_REGIONS[trust.kind],
            kl=kl.formula,
        )
        numbers = FormulaNumbers(
            surrogate_params=params,
            trust_params=() if trust is None else trust.params,
            entropy_floor=None if floor is None else (float(floor.threshold),),
            ratio_bounds=None if bounds is None else (float(bounds[0]), float(bounds[1])),
            kl_clamps=kl.clamps if self.beta else None,
        )
        return ObjectiveFormula(functions, numbers)

    def loss_formula(self, inputs: TokenInputs) -> TokenLossFormula:
        """Return the loss of tokens as the kernels receive it.

        The gradient must be per token. `inputs` is what `token_inputs` returned, or a part of it.
        """
        return TokenLossFormula(self.formula, inputs)

    def extra_id_terms(self, batch: TokenBatch) -> ExtraIdTerms:
        """Return the functions of the extra ids of a batch, which must have such ids."""
        assert batch.extra_ids is not None
        parts: list[tuple[ExtraIdFunction, Tensor]] = []
        for function, sets in (
            (self.listed or logp_term, batch.logp_terms),
            (prob_term, batch.prob_terms),
        ):
            if sets is not None and sets.values is not None:
                parts.append((function, sets.values.detach().float()))
        return ExtraIdTerms(tuple(parts), batch.extra_ids.offsets)

    def token_losses(
        self,
        logps: Tensor,
        entropy: Tensor | None,
        inputs: TokenInputs,
        batch: TokenBatch | None = None,
        log_ratio: Tensor | None = None,
        auxiliary_loss: Tensor | None = None,
        evaluate: Evaluate = TokenLossFormula.compute,
    ) -> TokenLosses:
        """Compute the loss of each token and its gradients. The sum of the losses is the loss.

        Three steps: the log-ratio of each sequence, the formula of each token with the log-ratio as
        an input, and the gradient of the log-ratio, which reaches all tokens of the sequence. At
        token level there is only the second.

        logps, entropy   fp32 [num_tokens], exactly 0 in masked tokens
        inputs           of these tokens
        batch            the batch of the tokens, for its sequences. An objective whose gradient is
                         per token does not need it, and takes any part of the tokens.
        log_ratio        what `log_ratio` returns, if the caller has computed it
        auxiliary_loss   fp32 [num_tokens], the terms of extra ids
        evaluate         evaluates the formula: in torch, or `Backend.evaluate_formula`, which needs
                         the entropy. A formula that is torch-only runs in torch.
        """
        formula = self.formula
        changed: dict[str, Any] = {}
        if not self.gradient_is_per_token:
            assert batch is not None
            inputs = self._apply_filters(logps, entropy, inputs, batch)
            if self.future_kl is not None:
                changed["policy_weight"] = self.future_kl.apply(logps, inputs, batch)
            if self.surrogate.selects:
                formula = self._with_selection(formula, logps, inputs)
        if self.level != "token":
            assert batch is not None
            if log_ratio is None:
                log_ratio = self.log_ratio(logps, inputs, batch)
            changed["log_ratios"] = log_ratio
        if auxiliary_loss is not None:
            changed["auxiliary_loss"] = auxiliary_loss
        if changed:
            inputs = replace(inputs, **changed)

        if self.formula_is_torch_only:
            evaluate = TokenLossFormula.compute
        losses = evaluate(TokenLossFormula(formula, inputs), logps, entropy)
        if self.through_sequence:
            assert batch is not None
            grad_logps = self._gradient_through_sequence(
                losses.grad_log_ratios, logps, inputs, batch
            )
            losses = losses._replace(grad_logps=losses.grad_logps + grad_logps)
        return losses

    def _with_selection(
        self, formula: ObjectiveFormula, logps: Tensor, inputs: TokenInputs
    ) -> ObjectiveFormula:
        """Return the formula with the tokens that the surrogate selects as its last parameter."""
        old_logps = inputs.old_or_current(logps)
        selected = self.surrogate.select(logps, old_logps, inputs.advantages, inputs.mask)
        return formula.with_surrogate_params((*formula.numbers.surrogate_params, selected))

    def _gradient_through_sequence(
        self, grad_log_ratios: Tensor, logps: Tensor, inputs: TokenInputs, batch: TokenBatch
    ) -> Tensor:
        """Return the part of d loss / d logp that flows through the log-ratio of a sequence.

        The log-ratio is a mean or sum of f(x_s) over the trained tokens s of the sequence, where
        x_s is the log-ratio of a token and f is `Surrogate.in_sequence`. So the gradient of token s
        is f'(x_s) times the mean or sum of `grad_log_ratios` over the sequence.

        grad_log_ratios   fp32 [num_tokens], d (loss of token t) / d (log-ratio of its sequence)
        logps             fp32 [num_tokens], log-prob of each token under the policy

        Return fp32 [num_tokens], 0 in masked tokens.
        """
        grads = self._reduce_over_sequences(grad_log_ratios, batch)
        grads = torch.where(inputs.mask, grads, 0.0)
        log_ratios = _token_log_ratios(logps, inputs)
        _, derivative = self.surrogate.in_sequence(log_ratios, inputs.advantages)
        return grads * derivative

    def log_ratio(self, logps: Tensor, inputs: TokenInputs, batch: TokenBatch) -> Tensor:
        """Return the log-ratio of each token at the objective's `level`, fp32 [num_tokens].

        At level "token" it is x_t = logp_t - old_logp_t (0 if on-policy). At the other levels all
        tokens of a sequence share one number, over the trained tokens s of the sequence:

            "sequence", "sequence-token"   mean of (f(x_s) + log w_s)
            "sequence-sum"                 sum of (f(x_s) + log w_s)

        f is `Surrogate.in_sequence`: the identity, except that GMPO and VESPO clamp x_s. The second
        term exists only if the surrogate multiplies the weights w of the batch into the ratio
        instead of the loss (`absorbs_weights`, VESPO). Then w_s = 0 adds no log-weight.

        logps    fp32 [num_tokens], log-prob of each token under the policy
        inputs   of the same tokens; has the old log-probs, the mask and the weights
        batch    of the same tokens; knows which tokens form a sequence
        """
        log_ratios = _token_log_ratios(logps, inputs)
        if self.level == "token":
            return log_ratios
        terms, _ = self.surrogate.in_sequence(log_ratios, inputs.advantages)
        if self.surrogate.absorbs_weights and inputs.weights is not None:
            log_weights = inputs.weights.abs().log().clamp(*LOG_WEIGHT_BOUNDS)
            # A weight of 0 drops its token from the loss (`_policy_weight`), not from the ratio.
            terms = terms + torch.where(inputs.weights == 0, 0.0, log_weights)
        return self._reduce_over_sequences(torch.where(inputs.mask, terms, 0.0), batch)

    def kl_terms(self, logps: Tensor, inputs: TokenInputs, log_ratio: Tensor) -> KlTerms:
        """Return the KL estimate of each token and its derivatives, fp32 [num_tokens] each.

        logps       fp32 [num_tokens], log-prob of each token under the policy
        inputs      of the same tokens, with log-probs under the reference
        log_ratio   fp32 [num_tokens], what `log_ratio` returns
        """
        old_logps = inputs.old_or_current(logps)
        kl = self.kl_spec
        return kl_terms(
            logps,
            old_logps,
            inputs.ref_logps,
            log_ratio=log_ratio_of_kl(log_ratio, logps - old_logps, self.level),
            clamps=kl.clamps,
            **kl.formula,
        )

    def _reduce_over_sequences(self, x: Tensor, batch: TokenBatch) -> Tensor:
        """Return the sum or mean of x over the sequence of each token, fp32 [num_tokens].

        It is the sum at level "sequence-sum", otherwise the mean over the trained tokens. x is
        [num_tokens] and must be 0 in masked tokens.
        """
        total = batch.sequence_sum(x)
        if self.level != "sequence-sum":
            total = total / batch.lengths.clamp(min=1.0)
        return batch.spread(total).float()

    def _apply_filters(
        self, logps: Tensor, entropy: Tensor | None, inputs: TokenInputs, batch: TokenBatch
    ) -> TokenInputs:
        """Return the inputs with weight 0 for the tokens that filters of the batch drop.

        A token that a filter of entropy keeps although its entropy is NaN gets the weight NaN.
        `token_loss` computes the filters that decide per token.
        """
        for f in self.filters:
            if f.is_per_token:
                continue
            keep = f.keep(logps, entropy, inputs, batch)
            if isinstance(f, SamplerMismatch):
                inputs = self._drop_sequences(inputs, keep, f.normalize, batch)
                continue
            policy_weight = torch.where(keep, inputs.policy_weight, 0.0)
            if f.filters_entropy and entropy is not None:
                is_unknown = entropy.isnan() & (policy_weight != 0)
                policy_weight = torch.where(is_unknown, entropy, policy_weight)
            inputs = replace(inputs, policy_weight=policy_weight)
            if f.filters_entropy and inputs.entropy_weight is not None:
                entropy_weight = self._filter_entropy_weight(inputs.entropy_weight, keep, batch)
                inputs = replace(inputs, entropy_weight=entropy_weight)
        return inputs

    def _drop_sequences(
        self, inputs: TokenInputs, keep: Tensor, normalize: bool, batch: TokenBatch
    ) -> TokenInputs:
        """Return the inputs with weight 0 in all terms of dropped sequences.

        keep        bool [num_tokens], the same for all tokens of a sequence
        normalize   whether the denominators count the sequences that are left
        """
        policy, kl, entropy = self.aggregates
        aggregates = {"policy_weight": policy, "kl_weight": kl, "entropy_weight": entropy}
        weights: dict[str, Any] = {}
        for name, aggregate in aggregates.items():
            weight = getattr(inputs, name)
            if weight is not None:
                if normalize:
                    weight = weight * self._denominator_ratio(keep, batch, aggregate)
                weights[name] = torch.where(keep, weight, 0.0)
        if inputs.nll_weight is not None:
            weights["nll_weight"] = torch.where(keep, inputs.nll_weight, 0.0)
        return replace(inputs, **weights)

    def _denominator_ratio(self, keep: Tensor, batch: TokenBatch, aggregate: str) -> float | Tensor:
        """Return the factor by which weights grow if dropped sequences are not counted.

        The weight of a token contains 1 / denominator. The factor is the denominator of all
        sequences over that of the sequences that are left. With "group-mean" the weight also
        contains 1 / (trained tokens of the group), which is replaced in the same way.

        keep        bool [num_tokens], the same for all tokens of a sequence
        aggregate   one of AGGREGATES

        Return a number, a 0-d fp32 tensor or fp32 [num_tokens].
        """
        if aggregate == "token-sum":
            return 1.0
        lengths = batch.lengths
        kept_lengths = batch.sequence_sum(keep & batch.trained)
        if aggregate == "token-mean":
            return (lengths.sum() / kept_lengths.sum().clamp(min=1.0)).float()
        is_left = (lengths == 0) | (kept_lengths > 0)
        share = torch.ones_like(lengths)
        more_per_token = share
        if aggregate == "group-mean":
            # Each sequence counts as its share of the group.
            same = batch.same_group()
            share = share / same.sum(1)
            is_left = same @ is_left.double() > 0
            lengths = same @ lengths
            kept_lengths = same @ kept_lengths
            more_per_token = lengths / kept_lengths.clamp(min=1.0)
        if self.count_empty:
            count = share.sum()
            count_left = (share * is_left).sum()
        else:
            count = (share * (lengths > 0)).sum()
            count_left = (share * (kept_lengths > 0)).sum()
        return batch.spread(more_per_token * count / count_left.clamp(min=1.0)).float()

    def _filter_entropy_weight(
        self, entropy_weight: Tensor, keep: Tensor, batch: TokenBatch
    ) -> Tensor:
        """Return the weight of the entropy bonus of each token after a filter, fp32 [num_tokens].

        Dropped tokens have the weight 0. With entropy_aggregate="token-mean" the weights of the
        others grow so that their sum stays the same: the bonus is a mean over the kept tokens of
        this batch. Ranks that share its sequences (`TokenBatch.context_group`) count them together.

        entropy_weight   fp32 [num_tokens], before the filter
        keep             bool [num_tokens]
        """
        kept_weight = torch.where(keep, entropy_weight, 0.0)
        if self.entropy_aggregate != "token-mean":
            return kept_weight
        sums = [x.sum(dtype=torch.float64) for x in (kept_weight, entropy_weight)]
        kept_sum, total = batch.over_context(torch.stack(sums)).unbind()
        return kept_weight * torch.where(kept_sum == 0, 0.0, total / kept_sum).float()


#: The KL of an objective without one, so that all of these objectives share a compiled formula.
NO_KL = Kl()
#: Bounds of the log of a batch's weight in the ratio of a sequence: log(1e-8) and 20.
LOG_WEIGHT_BOUNDS = (-18.420680743952367, 20.0)


def _token_log_ratios(logps: Tensor, inputs: TokenInputs) -> Tensor:
    """Return logp - old_logp of each token, fp32 [num_tokens], whatever the objective's level is.

    An on-policy token has no old log-prob: its log-ratio is 0, or NaN if its logp is NaN. A token
    is on-policy if the inputs have no old_logps, or if the old log-prob is the mark ON_POLICY.
    """
    if inputs.old_logps is not None and not inputs.marks_on_policy:
        return logps - inputs.old_logps
    # logp - logp would also be NaN for an infinite logp.
    on_policy = torch.where(logps.isnan(), logps, 0.0)
    if inputs.old_logps is None:
        return on_policy
    return torch.where(inputs.old_logps >= ON_POLICY, on_policy, logps - inputs.old_logps)


#: The functions of cached properties. A function may read the properties before it.
COMPUTED_ONCE = {
    name: value.func
    for name, value in vars(Objective).items()
    if isinstance(value, cached_property)
}

# ---- published objectives, and the constants with which trainers compute them

Changes = dict[str, Any]
FIELDS = tuple(f.name for f in fields(Objective))
_BY_SEQUENCE = "seq-mean-token-mean"

#: Published objectives, by the papers. dapo and bnpo differ in the normaliser only: DAPO's is the
#: token count of the whole batch (pass `normalizer=` when it is split), BNPO's the count of the
#: micro-batch at hand.
PRESETS: dict[str, Objective] = {
    "grpo": Objective(aggregate=_BY_SEQUENCE),
    "dapo": Objective(Clip(0.2, 0.28)),
    "bnpo": Objective(),
    "dr_grpo": Objective(aggregate="constant"),
    "ppo": Objective(Clip(0.2, 0.2, delta=3.0)),
    "gspo": Objective(Clip(3e-4, 4e-4), level="sequence", aggregate=_BY_SEQUENCE),
    "gspo_token": Objective(Clip(3e-4, 4e-4), level="sequence-token", aggregate=_BY_SEQUENCE),
    "luspo": Objective(level="sequence", aggregate="seq-mean-token-sum"),
    "gmpo": Objective(Gmpo(), level="sequence", aggregate=_BY_SEQUENCE),
    "fipo": Objective(Clip(0.2, 0.28, delta=10.0), future_kl=FutureKl()),
    "cispo": Objective(Cispo(5.0)),
    "sapo": Objective(Sapo(), aggregate=_BY_SEQUENCE),
    "vespo": Objective(Vespo(), level="sequence-sum"),
    "reinforce": Objective(PolicyGradient()),
    "rloo": Objective(level="sequence-sum", aggregate=_BY_SEQUENCE),
    "importance_sampling": Objective(ImportanceSampling(), aggregate="token-sum"),
    "dppo_tv": Objective(ImportanceSampling(), filters=(TrustRegion("tv"),)),
    "dppo_kl": Objective(ImportanceSampling(), filters=(TrustRegion("kl", 0.05, 0.05),)),
    "ipo": Objective(ImportanceSampling(), filters=(TrustRegion("symmetric-tv", 0.1, 0.1),)),
    "rollout_is": Objective(Cispo(math.inf), filters=(TrustRegion("ratio"),)),
    "clip_cov": Objective(ClipCov()),
    "kl_cov": Objective(KlCov()),
    "dro": Objective(Dro()),
    "a2po": Objective(A2po(), level="sequence-sum", aggregate=_BY_SEQUENCE),
    "distillation": Objective(NoPolicyTerm(), beta=1.0, kl=Exact("reverse")),
    "sampled_distillation": Objective(PolicyGradient(), beta=1.0, kl="distillation"),
}

#: What a trainer's KL is, where it has one in the loss; its weight is part of a trainer's numbers
#: where the KL is on by default.
_VERL_KL = Kl("k3", clamp_log=20.0, clamp=10.0)


#: The clip widths of PPO, where the paper of an objective has others.
_SYMMETRIC: Changes = {"surrogate": Clip(0.2, 0.2)}
#: Bounds of log-ratios.
_WITHIN_20: Changes = {"log_ratio_bounds": (-20.0, 20.0)}
_BELOW_10: Changes = {"log_ratio_bounds": (-math.inf, 10.0)}


def _each(common: Changes, presets: dict[str, Changes]) -> dict[str, Changes]:
    """Return the changes of each preset, after the changes that all of them have in common."""
    return {name: {**common, **changes} for name, changes in presets.items()}


#: The loss types of TRL, which Liger and Unsloth have taken over, clip widths included.
_LOSS_TYPES: dict[str, Changes] = {
    "grpo": {},
    "dapo": _SYMMETRIC,
    "bnpo": {},
    "dr_grpo": {},
    "gspo": _SYMMETRIC,
    "cispo": {},
    "sapo": {},
    "vespo": {},
}

#: trainer -> its own names of presets -> changes to that preset. Versions: see
#: integrations/README.md.
NUMERICS: dict[str, dict[str, Changes]] = {
    "trl": _each(
        {"kl": Kl("k3", weighting="ratio"), "entropy_aggregate": "token-mean"},
        {
            **_LOSS_TYPES,
            "luspo": {},
            "gmpo": {"kl": "k3"},
            "rloo": {},
            "a2po": {},
        },
    ),
    "liger": _each(
        {"beta": 0.04},
        {
            **_LOSS_TYPES,
            "luspo": {},
        },
    ),
    "unsloth": {**_LOSS_TYPES, "dr_grpo": {"max_tokens": 8192}},
    "verl": _each(
        {"kl": _VERL_KL, "count_empty": False},
        {
            "grpo": {
                "surrogate": Clip(0.2, 0.2, delta=3.0),
                "aggregate": "token-mean",
                **_WITHIN_20,
            },
            "dapo": {"surrogate": Clip(0.2, 0.28, delta=3.0), **_WITHIN_20},
            "dr_grpo": {"surrogate": Clip(0.2, 0.2, delta=3.0), **_WITHIN_20},
            "ppo": _WITHIN_20,
            "gspo": {**_SYMMETRIC, "level": "sequence-token", **_BELOW_10},
            "gspo_token": {**_SYMMETRIC, **_BELOW_10},
            "sapo": _WITHIN_20,
            "gmpo": {"surrogate": Gmpo(0.2, 0.2), "count_empty": True},
            "cispo": {"surrogate": Cispo(cap=1.2, low=0.8), **_WITHIN_20},
            "reinforce": {},
            "dppo_tv": {"surrogate": Cispo(3.0), **_WITHIN_20},
            "dppo_kl": {
                "surrogate": Cispo(3.0),
                "filters": (TrustRegion("kl", 0.2, 0.2),),
                **_WITHIN_20,
            },
            "clip_cov": {},
            "kl_cov": {"surrogate": KlCov(0.1)},
            "dro": {},
        },
    ),
    "openrlhf": _each(
        {
            "kl": Kl("k1", clamp=10.0),
            "kl_aggregate": "token-mean",
            "entropy_aggregate": "token-mean",
        },
        {
            "grpo": {"aggregate": "token-mean", **_WITHIN_20},
            "dapo": _WITHIN_20,
            "gspo": {**_SYMMETRIC, "count_empty": False},
        },
    ),
    "slime": _each(
        {"kl": "k1"},
        {
            # A mean of its own for every rollout, unless it is told to calculate_per_token_loss, as
            # DAPO wants it.
            "grpo": {},
            "dapo": {},
            "gspo": _SYMMETRIC,
            "cispo": {"surrogate": Cispo(cap=1.2, low=0.8), "aggregate": "seq-mean-token-mean"},
        },
    ),
    "areal": {
        "grpo": {"aggregate": "token-mean"},
        "dapo": {},
        "gspo": {**_SYMMETRIC, "aggregate": "token-mean"},
        "sapo": {"aggregate": "token-mean"},
    },
    "nemo-rl": _each(
        {"beta": 0.01, "kl": Kl("k3", weighting="score", clamp_log=20.0, clamp=10.0)},
        {
            "grpo": {"aggregate": "token-mean"},
            "dapo": {},
            "gspo": _SYMMETRIC,
            "cispo": {"surrogate": Cispo(cap=1.2, low=0.8)},
            "reinforce": {},
        },
    ),
    "skyrl": _each(
        {
            "beta": 1e-3,
            "kl": _VERL_KL,
            "kl_aggregate": "seq-mean-token-mean",
            "entropy_aggregate": "token-mean",
        },
        {
            "grpo": {"aggregate": "token-mean", **_WITHIN_20},
            "dapo": _WITHIN_20,
            "ppo": _WITHIN_20,
            "gspo": {**_SYMMETRIC, "level": "sequence-token", **_BELOW_10},
            "sapo": _WITHIN_20,
            "cispo": _WITHIN_20,
            "rollout_is": {},
            "dppo_tv": _WITHIN_20,
            "dppo_kl": _WITHIN_20,
            "importance_sampling": {},
            "clip_cov": {},
            "kl_cov": {"surrogate": KlCov(1.0, 0.2)},
        },
    ),
    "prime-rl": {
        # kappa (log r)^2 to the sampler, which is also the anchor of the ratio: pass its log-probs
        # as old_logps and ref_logps.
        "dppo_tv": {"beta": 2e-3, "kl": "k2"},
        "ipo": {"beta": 2e-3, "kl": "k2"},
        "sampled_distillation": {},
    },
    "torchtitan": {
        "grpo": {"aggregate": "token-mean", "log_ratio_bounds": (-10.0, 10.0)},
        "dapo": {**_SYMMETRIC, "log_ratio_bounds": (-10.0, 10.0)},
    },
}
