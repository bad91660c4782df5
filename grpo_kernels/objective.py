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
from .formulas.formula_keys import is_of_package
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
    """The denominators of the loss terms, for the argument `normalizer=` of a loss.

    policy    denominator of the policy term
    kl        denominator of the KL
    entropy   denominator of the entropy bonus

    Each is a number, a 0-d tensor or None. None is the denominator of this batch alone. For KL and
    entropy bonus None is the denominator of the policy term instead, unless the objective has a
    `kl_aggregate` or an `entropy_aggregate`.
    """

    policy: float | Tensor | None
    kl: float | Tensor | None = None
    entropy: float | Tensor | None = None

    def __truediv__(self, num_ranks: float) -> Denominators:
        """Return the denominators divided by a number. A denominator of None stays None.

        Divide by the number of ranks if gradients are averaged over ranks instead of summed.

        num_ranks   number, above 0
        """
        return Denominators(*(None if x is None else x / num_ranks for x in self))


NO_DENOMINATORS = Denominators(None)


def _as_denominators(
    normalizer: float | Tensor | Denominators | None, batch: TokenBatch
) -> Denominators:
    """Convert the argument `normalizer=` of a loss to `Denominators`.

    Each denominator of the result is a float, a 0-d fp32 tensor on the device of the batch, or
    None, which stands for the denominator of this batch alone.

    normalizer   `Denominators`; a number or 0-d tensor, which is the denominator of the policy
                 term; or None
    batch        the batch of the loss

    Raises ValueError for a denominator that is not a finite number above 0.
    """
    if normalizer is None:
        return NO_DENOMINATORS
    if not isinstance(normalizer, Denominators):
        return Denominators(_as_denominator(normalizer, batch))
    return Denominators(*(None if x is None else _as_denominator(x, batch) for x in normalizer))


def _as_denominator(denominator: float | Tensor, batch: TokenBatch) -> float | Tensor:
    """Convert a denominator to a float, or to a 0-d fp32 tensor on the device of the batch.

    Raises ValueError if it is not a finite number above 0. A tensor may be 0 if the batch has no
    trained token. The value of a tensor on a GPU is only checked in strict mode, because the host
    would have to wait for it.

    denominator   number, or tensor of one element
    batch         the batch of the loss
    """
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
    """Return whether the class of an object is a frozen dataclass of this package.

    The loss formula of an objective with such objects is made once and kept, because their
    attributes and properties cannot change. A class of the user may have properties that change.

    part   a surrogate, a KL or a filter of an objective
    """
    # What @dataclass(...) was called with; None if the class is no dataclass itself.
    params = vars(type(part)).get("__dataclass_params__")
    return params is not None and params.frozen and is_of_package(type(part))


def _refuse_unknown_fields(changes: dict[str, Any], surrogate: Any) -> None:
    """Raise an error if a name in `changes` is not a field of `Objective`.

    A clip width, for example, is a field of the surrogate and not of the objective. Raises
    ValueError for a field of the surrogate, with the surrogate to pass instead, and TypeError for
    any other name.

    changes     names and new values, from the keyword arguments of `Objective.preset`
    surrogate   the surrogate of the preset
    """
    unknown = {name: value for name, value in changes.items() if name not in FIELDS}
    surrogate_changes = {
        name: value for name, value in unknown.items() if name in surrogate.__dataclass_fields__
    }
    if surrogate_changes:
        raise ValueError(
            f"{', '.join(surrogate_changes)} is a number of the surrogate, not of the Objective:"
            f" pass surrogate={replace(surrogate, **surrogate_changes)!r}."
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
    aggregate           how the terms of tokens become one number, with the denominator D and the
                        number of sequences B:
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
    listed              the terms of the ids in a batch's `logp_terms`: a function (logp, values,
                        advantage, sum_over_ids) -> (term, slope), see formulas/extra_id_terms.py.
                        None: value * logp. The terms are weighted, filtered and aggregated like the
                        policy term, except that a `TrustRegion` drops the sampled token alone.
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
        """Check the fields, then compute the cached properties.

        Raises ValueError naming the field that is wrong.
        """
        super().__post_init__()
        if not isinstance(self.surrogate, Surrogate):
            raise ValueError(
                f"surrogate={self.surrogate!r}: pass Clip(), Cispo(), PolicyGradient() or"
                " Custom(your_function)."
            )
        self._check_level_and_aggregates()
        if self.listed is not None:
            is_function = callable(self.listed) and not isinstance(self.listed, type)
            remedy = (
                "pass a function (logp, values, advantage, sum_over_ids) -> (term, slope), or None."
            )
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
        # Compute the cached properties now, because torch.compile cannot trace cached_property. The
        # dataclass is frozen, so assign by object.__setattr__.
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
        """Raise ValueError unless `level` and the three aggregates are valid.

        The surrogate must be defined at the level, and each aggregate must be one of AGGREGATES.
        """
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
        """Return a published objective, such as "grpo" or "dapo".

        name       a name in `PRESETS`
        numerics   the trainer whose constants, clamps and denominators to use, a name in
                   `NUMERICS` such as "trl" or "verl". None: use the numbers of the paper.
        changes    fields of `Objective` to replace, which take precedence over the trainer's

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
        values = {field_name: getattr(published, field_name) for field_name in FIELDS}
        return cls(**{**values, **changes_of_trainer, **changes})

    def filter(self, kind: type[F]) -> F | None:
        """Return the filter of the objective that is an instance of a class, or None.

        kind   a subclass of `Filter`, such as `TrustRegion`
        """
        for candidate in self.filters:
            if isinstance(candidate, kind):
                return candidate
        return None

    # ---- what follows from the fields

    @cached_property
    def exact(self) -> Exact | None:
        """`kl` if it is an `Exact` divergence and beta is not 0, otherwise None."""
        return self.kl if isinstance(self.kl, Exact) and self.beta != 0 else None

    @cached_property
    def kl_spec(self) -> Kl:
        """`kl` as a `Kl`, an estimate from the sampled tokens.

        If `kl` is an `Exact`, a divergence of whole distributions, the result is the default `Kl()`
        and is not used.
        """
        return Kl() if isinstance(self.kl, Exact) else as_kl(self.kl)

    @cached_property
    def has_kl_estimate(self) -> bool:
        """Whether the loss contains a KL that is estimated from the sampled tokens."""
        return self.beta != 0 and not isinstance(self.kl, Exact)

    @cached_property
    def compares_with_sampler(self) -> bool:
        """Whether a trust region compares the policy with the sampler's log-probs."""
        trust = self.filter(TrustRegion)
        return trust is not None and trust.anchor == "sampler"

    @property
    def aggregates(self) -> tuple[str, str, str]:
        """The aggregates of policy term, KL and entropy bonus, three names in AGGREGATES.

        For the KL this is `kl_aggregate`, and for the entropy bonus `entropy_aggregate`. If that is
        None, or if the coefficient of the term is 0, it is the aggregate of the policy term.
        """
        # A term with the coefficient 0 does not exist. Its aggregate must not raise an error for a
        # batch that lacks what the aggregate needs.
        kl = self.kl_aggregate if self.beta != 0 else None
        entropy = self.entropy_aggregate if self.entropy_coef != 0 else None
        return (self.aggregate, kl or self.aggregate, entropy or self.aggregate)

    @cached_property
    def formula_is_torch_only(self) -> bool:
        """Whether only torch, and no kernel, can compute the loss formula of a token.

        This is so in two cases: if autograd computes the derivative of the surrogate, or if the
        surrogate selects tokens of the batch and takes the selection as a tensor. Kernels compute
        any other formula whose operations can be recorded, see `Backend.evaluate_formula`.
        """
        return self.surrogate.selects or self.surrogate.slope_is_by_autograd

    @cached_property
    def gradient_is_per_token(self) -> bool:
        """Whether the gradient of a token depends on this token alone, and kernels can compute it.

        A kernel then computes loss and gradient while it reads a row of logits once.
        """
        if self.level != "token" or self.future_kl is not None or self.formula_is_torch_only:
            return False
        return all(f.is_per_token for f in self.filters)

    @cached_property
    def gradient_is_per_sequence(self) -> bool:
        """Whether the gradient of a token depends on no token of another sequence."""
        if self.surrogate.selects:
            return False
        return all(f.is_per_token or f.is_per_sequence for f in self.filters)

    @cached_property
    def reads_advantages(self) -> bool:
        """Whether a batch must have advantages: for a policy term, or for a filter."""
        has_policy_term = not isinstance(self.surrogate, NoPolicyTerm) or self.listed is not None
        return has_policy_term or any(f.reads_advantages for f in self.filters)

    @cached_property
    def reads_sequences(self) -> bool:
        """Whether level, filters or `future_kl` depend on which tokens form a sequence.

        The aggregate may depend on it too, which this property does not consider.
        """
        if self.level != "token" or self.future_kl is not None:
            return True
        return any(isinstance(f, (OffPolicySequences, SamplerMismatch)) for f in self.filters)

    @cached_property
    def needs_entropy(self) -> bool:
        """Whether the loss has an entropy bonus, so that it has a gradient through the entropy."""
        return self.entropy_coef != 0

    @cached_property
    def through_sequence(self) -> bool:
        """Whether the loss of a token has a gradient at all tokens of its sequence.

        It has if the log-ratio of the sequence, a mean or sum over these tokens, has a gradient.
        The ratio may be part of the surrogate, or at level "sequence" the weight of the KL.
        """
        if self.level == "sequence" and self.beta != 0 and self.kl_spec.weighting == "ratio":
            return True
        is_sequence = self.level in ("sequence", "sequence-sum")
        return is_sequence and not self.surrogate.detached_ratio

    @cached_property
    def gradient_mask(self) -> str:
        """The name of a mask of the batch: outside of it all gradients are exactly 0.

        `TokenBatch.named_mask` returns the mask of this name:

        "trained"        all trained tokens (the loss mask)
        "contributing"   trained tokens with a nonzero weight and a nonzero advantage or listed ids,
                         or with a nonzero `nll_weights`
        "sequences"      trained tokens of sequences that have a contributing token
        """
        # Most policy terms are 0 at tokens with advantage 0. KL and entropy bonus have a gradient
        # there too, and so have some surrogates.
        has_other_terms = self.beta != 0 or self.entropy_coef != 0
        if has_other_terms or not self.surrogate.zero_at_zero_advantage:
            return "trained"
        # The gradient of a contributing token may reach all tokens of its sequence.
        return "sequences" if self.through_sequence else "contributing"

    # ---- denominators

    def normalizer(self, batch: TokenBatch) -> float | Tensor:
        """Return the denominator D of the policy term for one batch, a number or a 0-d tensor.

        `distributed.global_normalizer` adds up D over micro-batches and ranks. D may be 0 if the
        batch has no trained token. A loss then divides by 1. If ranks share sequences
        (`TokenBatch.context_group`), each rank gets its share of D, and the shares add up to D.

        batch   the batch

        Raises ValueError if the batch or the objective lacks what the aggregate needs.
        """
        return self._denominator(batch, self.aggregate)

    def denominators(self, batch: TokenBatch) -> Denominators:
        """Return the denominators of policy term, KL and entropy bonus for one batch.

        Each is computed as in the method `normalizer`, with the aggregate of its term.

        batch   the batch
        """
        return Denominators(*(self._denominator(batch, name) for name in self.aggregates))

    def _denominator(self, batch: TokenBatch, aggregate: str) -> float | Tensor:
        """Return the denominator of an aggregate for one batch, a number or a 0-d tensor.

            "token-sum"             1
            "token-mean"            number of trained tokens
            "group-mean"            number of groups (all answers to one prompt)
            "constant"              num_sequences * max_tokens
            "seq-mean-token-mean"   num_sequences
            "seq-mean-token-sum"    num_sequences

        Sequences and groups without a trained token are not counted, unless `count_empty`.

        If several ranks (`batch.context_ranks`) have parts of the same sequences, the results of
        these ranks add up to the denominator: each rank counts 1 / context_ranks of each sequence
        or group. Each token is on one rank only, so "token-mean" counts the tokens of this rank.

        batch       the batch
        aggregate   one of AGGREGATES

        Raises ValueError if the batch or the objective lacks what the aggregate needs.
        """
        if aggregate == "token-sum":
            return 1.0
        if aggregate == "token-mean":
            if batch.mask is None:
                return float(batch.tokens)
            return batch.mask.sum(dtype=torch.float32)  # exact up to 2^24 tokens
        if aggregate == "group-mean":
            # fp64 [num_sequences, num_sequences], 1 for two sequences of one group, otherwise 0. A
            # product with it is a sum over the group of each sequence.
            is_same_group = batch.same_group()
            is_counted = torch.ones_like(is_same_group[0])  # 1 or 0 for each sequence
            if not self.count_empty:
                self._require_sequences(batch)
                tokens_of_group = is_same_group @ batch.lengths
                is_counted = (tokens_of_group > 0).to(is_same_group.dtype)
            # Each sequence counts as 1 / (sequences of its group), so that each group counts as 1.
            sequences_of_group = is_same_group.sum(1)
            num_groups = (is_counted / sequences_of_group).sum().float()
            return num_groups / batch.context_ranks
        self._require_sequences(batch)
        num_sequences: Any = batch.sequences  # an int; below perhaps a 0-d tensor
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
        """Return the denominator of an aggregate for one batch, summed over ranks, at least 1.

        The sum is over the ranks that have parts of the same sequences (`batch.context_group`), if
        there are any.

        batch       the batch
        aggregate   one of AGGREGATES

        Return a number or a 0-d fp32 tensor.
        """
        denominator = self._denominator(batch, aggregate)  # with a context_group, of this rank
        if batch.context_group is not None and aggregate != "token-sum":
            # A number or tensor becomes a new tensor, because the sum over ranks is in place.
            share = torch.zeros((), dtype=torch.float64, device=batch.targets.device) + denominator
            denominator = batch.over_context(share).float()
        # A batch without trained tokens has the denominator 0, and its loss shall be 0, not 0 / 0.
        if isinstance(denominator, Tensor):
            return denominator.clamp(min=1.0)
        return max(denominator, 1.0)

    def _require_sequences(self, batch: TokenBatch) -> None:
        """Raise ValueError if the batch does not tell which tokens form a sequence.

        That is the case if its targets are packed and it has no cu_seqlens.
        """
        if batch.sequences is None:
            batch.check_sequences(
                f'aggregate="{self.aggregate}", level="{self.level}" and filters={self.filters}'
                " need"
            )

    # ---- the inputs of tokens

    def token_inputs(
        self,
        batch: TokenBatch,
        normalizer: float | Tensor | Denominators | None = None,
        skip_inactive: bool = False,
    ) -> TokenInputs:
        """Return the tokens of a batch as flat tensors, with the weight of each loss term.

        The weight of a term contains its coefficient and 1 / denominator, so that the loss is the
        sum of weight * term over all tokens and terms. The host does not wait for a GPU.

        batch           the batch
        normalizer      the denominators of the loss terms, or one number for the policy term. None:
                        the denominators of this batch.
        skip_inactive   True: tokens that change neither loss nor gradient are left out of
                        `TokenInputs.processed`. These are tokens with advantage or weight 0, if the
                        objective has no KL and no entropy bonus. This has no effect if the gradient
                        of a token depends on other tokens.

        Raises ValueError if the batch lacks something that the objective needs.
        """
        self._check_batch(batch)
        denominators = _as_denominators(normalizer, batch)
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
            # Formulas replace the mark ON_POLICY by the log-prob under the policy.
            is_on_policy = batch.on_policy_tokens
            tensors["old_logps"] = tensors["old_logps"].masked_fill(is_on_policy, ON_POLICY)
        policy_weight = weight
        if batch.weights is not None:
            policy_weight = self._policy_weight(weight, tensors["weights"])
        kl_weight = None  # of the KL estimate, or of the divergence if `kl` is an Exact
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
        """The names of the float fields of a batch that the loss of a token reads.

        A batch may lack some of these fields.
        """
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
            self._require_sequences(batch)
        if self.future_kl is not None:
            remedy = "a rank does not know the later tokens of a sequence that ranks share."
            require(batch.context_group is None, "future_kl", self.future_kl, remedy)
        weights = batch.weights
        if weights is None or not self.surrogate.absorbs_weights:
            return
        # The ratio of a sequence contains the weight of each of its tokens.
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
        """Return the weight of the KL or the entropy bonus of each token, fp32 [num_tokens].

        The coefficient of the term (beta or entropy_coef) is not included. If both `aggregate` and
        `denominator` are None, the result is `weight`.

        weight        fp32 [num_tokens], weight of each token in the aggregate of the policy term
        batch         the batch of these tokens
        aggregate     aggregate of this term; None: the aggregate of the policy term
        denominator   denominator of this term, a number or a 0-d tensor; None: the denominator of
                      this batch
        """
        if aggregate is None and denominator is None:
            return weight
        return self._token_weight(batch, aggregate or self.aggregate, denominator)

    def _token_weight(
        self, batch: TokenBatch, aggregate: str, denominator: float | Tensor | None
    ) -> Tensor:
        """Return the weight of each token in an aggregate, fp32 [num_tokens].

        The sum of weight * loss over the tokens is the aggregate of their losses. Masked tokens
        have the weight 0.

        batch         the batch of these tokens
        aggregate     one of AGGREGATES, for example "token-mean"
        denominator   the denominator D of the aggregate, a number or a 0-d tensor; None: the
                      denominator of this batch
        """
        # A denominator that the caller passed may be 0 if it is a tensor: a value on a GPU is not
        # checked, because the host would have to wait for it.
        may_be_zero = isinstance(denominator, Tensor)
        if denominator is None:
            denominator = self._denominator_over_ranks(batch, aggregate)
        divisor = self._divisor_of_token(batch, aggregate, denominator)
        if batch.mask is None:
            shape = batch.targets.shape
            ones = torch.ones(shape, dtype=torch.float32, device=batch.targets.device)
            return (ones / divisor).flatten()
        # bool / fp32 tensor is fp32. Without a conversion of the mask, a GPU has one launch less.
        gives_fp32 = isinstance(divisor, Tensor) and divisor.dtype == torch.float32
        mask = batch.mask if gives_fp32 else batch.mask.float()
        weight = mask / divisor
        if may_be_zero:
            # The denominator is 0 if no token is trained, and 0 / 0 must not reach the loss.
            weight = torch.where(batch.mask, weight, 0.0)
        return weight.flatten()

    def _divisor_of_token(
        self, batch: TokenBatch, aggregate: str, denominator: float | Tensor
    ) -> float | Tensor:
        """Return the number that the loss of each token is divided by in an aggregate.

            "seq-mean-token-mean"   denominator * (trained tokens of its sequence)
            "group-mean"            denominator * (trained tokens of its group)
            other aggregates        denominator

        The group of a sequence is all answers to its prompt.

        batch         the batch
        aggregate     one of AGGREGATES
        denominator   the denominator of the aggregate, a number or a 0-d tensor

        Return a number, or an fp32 tensor that broadcasts to the shape of targets.
        """
        if aggregate not in ("seq-mean-token-mean", "group-mean"):
            return denominator
        self._require_sequences(batch)
        num_tokens = batch.lengths  # trained tokens of each sequence, fp64 [num_sequences]
        if aggregate == "group-mean":
            # A product with this matrix is a sum over the group of each sequence.
            num_tokens = batch.same_group() @ num_tokens
        divisor = num_tokens.clamp(min=1.0) * denominator
        return batch.broadcast(divisor.float())

    def _policy_weight(self, weight: Tensor, weights: Tensor) -> Tensor:
        """Return the weight of the policy term of each token, fp32 [num_tokens].

        Most surrogates are multiplied by the weights of the batch, so the result is
        weight * weights. Some multiply the weights of the batch into the ratio of the sequence
        instead (`Surrogate.absorbs_weights`). The result is then `weight`, but 0 where `weights` is
        0.

        weight    fp32 [num_tokens], weight of each token in the aggregate
        weights   fp32 [num_tokens], `TokenBatch.weights`

        Raises ValueError for a negative weight, if the surrogate takes its logarithm.
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
        """The loss of a token as a formula: the functions and numbers of all of its terms.

        The formula is made once and kept, unless the objective contains objects of the user, which
        may change.
        """
        formula: ObjectiveFormula | None = self.__dict__.get("_formula")
        if formula is None:
            formula = self._make_formula()
            if self._formula_is_fixed and not torch.compiler.is_compiling():
                self.__dict__["_formula"] = formula
        return formula

    @cached_property
    def _formula_is_fixed(self) -> bool:
        """Whether surrogate, KL and filters are objects of this package, which cannot change.

        The formula that is made from them can then be kept. Objects of the user may change.
        """
        return all(_is_immutable(x) for x in (self.surrogate, self.kl_spec, *self.filters))

    def _make_formula(self) -> ObjectiveFormula:
        """Make the formula of a token: the functions and numbers of all terms of the objective.

        Raises ValueError for a NaN among the parameters of the surrogate.
        """
        surrogate = self.surrogate
        params = surrogate.params
        if not torch.compiler.is_compiling() and any(math.isnan(x) for x in params):
            name = getattr(surrogate.function, "__qualname__", repr(surrogate))
            raise ValueError(
                f"the parameters of {name} are {params}: a NaN among them would make the loss NaN."
            )
        trust = self.filter(TrustRegion)
        floor = self.filter(EntropyFloor)
        bounds = self.log_ratio_bounds
        # Without a KL, objectives with different `kl` have the same formula and share its code.
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
        """Return the loss of tokens as the kernels receive it: the formula with its inputs.

        The gradient of a token must depend on this token alone (`gradient_is_per_token`).

        inputs   from `token_inputs`, of all or some of the tokens of a batch
        """
        return TokenLossFormula(self.formula, inputs)

    def extra_id_terms(self, batch: TokenBatch) -> ExtraIdTerms:
        """Return the functions that make loss terms of the extra ids of a batch.

        Extra ids are ids besides the sampled token whose log-probs the loss uses. A batch lists
        them for each token, with a value for each id, in up to two fields:

            `TokenBatch.logp_terms`   get the function `listed`, or the default `logp_term`
            `TokenBatch.prob_terms`   get the function `prob_term`

        batch   a batch with at least one of these fields

        Return an `ExtraIdTerms`: each function with the values of its ids, and the offsets of the
        ids of each token.
        """
        assert batch.extra_ids is not None
        parts: list[tuple[ExtraIdFunction, Tensor]] = []
        term_of_logps = logp_term if self.listed is None else self.listed
        for function, listed_ids in (
            (term_of_logps, batch.logp_terms),
            (prob_term, batch.prob_terms),
        ):
            # A batch has checked that the ids of these fields have values.
            if listed_ids is not None and listed_ids.values is not None:
                parts.append((function, listed_ids.values.detach().float()))
        return ExtraIdTerms(tuple(parts), batch.extra_ids.offsets)

    def token_losses(
        self,
        logps: Tensor,
        entropy: Tensor | None,
        inputs: TokenInputs,
        batch: TokenBatch | None = None,
        auxiliary_loss: Tensor | None = None,
        evaluate: Evaluate = TokenLossFormula.compute,
    ) -> TokenLosses:
        """Compute the loss of each token and its gradients. The sum of the losses is the loss.

        If the gradient of a token depends on other tokens, filters, the weights of `future_kl` and
        the selection of tokens by the surrogate are applied first. Then there are three steps:
        1. The log-ratio of each sequence is computed.
        2. The formula of each token is evaluated, with the log-ratio as an input.
        3. If the log-ratio has a gradient, it is passed on to all tokens of the sequence.
        At level "token" there is only step 2.

        logps            fp32 [num_tokens], log-prob of each token under the policy, exactly 0 in
                         masked tokens
        entropy          fp32 [num_tokens] in nats, exactly 0 in masked tokens; None if neither a
                         term nor a filter reads it
        inputs           of these tokens, from `token_inputs`
        batch            the batch of these tokens, which tells which tokens form a sequence. It may
                         be None if the gradient is per token (`gradient_is_per_token`). The other
                         arguments may then belong to any part of the tokens of a batch.
        auxiliary_loss   fp32 [num_tokens], the sum of the terms of extra ids; None: no such terms
        evaluate         evaluates the formula: in torch, or `Backend.evaluate_formula`, which needs
                         the entropy. A formula that no kernel can compute runs in torch in any
                         case.
        """
        formula = self.formula
        changed: dict[str, Any] = {}  # inputs of the formula that depend on the log-probs
        if not self.gradient_is_per_token:
            assert batch is not None
            inputs = self._apply_filters(logps, entropy, inputs, batch)
            if self.future_kl is not None:
                changed["policy_weight"] = self.future_kl.weighted_policy_weight(
                    logps, inputs, batch
                )
            if self.surrogate.selects:
                formula = self._with_selection(formula, logps, inputs)
        if self.level != "token":
            assert batch is not None
            # Step 1: the log-ratio of each sequence.
            ratio = self._sequence_ratio(logps, inputs, batch)
            changed["log_ratios"] = ratio.log_ratios()
        if auxiliary_loss is not None:
            changed["auxiliary_loss"] = auxiliary_loss
        if changed:
            inputs = replace(inputs, **changed)

        # Step 2: the formula of each token.
        if self.formula_is_torch_only:
            evaluate = TokenLossFormula.compute
        losses = evaluate(TokenLossFormula(formula, inputs), logps, entropy)
        # Step 3: the gradient of the log-ratio of each sequence.
        if self.through_sequence:
            grad_logps = ratio.gradient(losses.grad_log_ratios)
            losses = losses._replace(grad_logps=losses.grad_logps + grad_logps)
        return losses

    def _with_selection(
        self, formula: ObjectiveFormula, logps: Tensor, inputs: TokenInputs
    ) -> ObjectiveFormula:
        """Return the formula with one more parameter of the surrogate: the tokens that it selects.

        The parameter is fp32 [num_tokens], 1 for a token that the surrogate selects from the batch
        to treat it differently, otherwise 0.

        formula   the formula of the objective
        logps     fp32 [num_tokens], log-prob of each token of the batch under the policy
        inputs    of the same tokens
        """
        old_logps = inputs.old_or_current(logps)
        selected = self.surrogate.select(logps, old_logps, inputs.advantages, inputs.mask)
        params = (*formula.numbers.surrogate_params, selected)
        return formula.with_surrogate_params(params)

    def log_ratio(self, logps: Tensor, inputs: TokenInputs, batch: TokenBatch) -> Tensor:
        """Return the log-ratio of each token at the objective's `level`, fp32 [num_tokens].

        At level "token" it is x_t = logp_t - old_logp_t (0 if on-policy). At the other levels all
        tokens of a sequence have the same log-ratio, computed from its trained tokens s:

            "sequence", "sequence-token"   mean over s of f(x_s)
            "sequence-sum"                 sum over s of f(x_s)

        f is `Surrogate.clip_log_ratios`: the identity, except that GMPO and VESPO clamp x_s.
        "sequence" and "sequence-token" have the same log-ratio and differ in its gradient alone.

        VESPO multiplies the weights w of the batch into the ratio instead of the loss
        (`absorbs_weights`). With such a surrogate, log |w_s| is added to f(x_s). It is clamped to
        [log 1e-8, 20], and is 0 for w_s = 0.

        logps    fp32 [num_tokens], log-prob of each token under the policy
        inputs   of the same tokens; has the old log-probs, the mask and the weights
        batch    of the same tokens; knows which tokens form a sequence
        """
        if self.level == "token":
            return _token_log_ratios(logps, inputs)
        return self._sequence_ratio(logps, inputs, batch).log_ratios()

    def _sequence_ratio(
        self, logps: Tensor, inputs: TokenInputs, batch: TokenBatch
    ) -> SequenceRatio:
        """Return the log-ratio of each sequence, at any level but "token".

        The method `log_ratio` says how it is computed.

        logps    fp32 [num_tokens], log-prob of each token under the policy
        inputs   of the same tokens; has the old log-probs, the mask and the weights
        batch    of the same tokens; tells which tokens form a sequence
        """
        token_log_ratios = _token_log_ratios(logps, inputs)
        terms, derivative = self.surrogate.clip_log_ratios(token_log_ratios, inputs.advantages)
        if self.surrogate.absorbs_weights and inputs.weights is not None:
            log_weights = inputs.weights.abs().log().clamp(*LOG_WEIGHT_BOUNDS)
            # A token with weight 0 has no loss (`_policy_weight`), but stays part of the ratio.
            terms = terms + torch.where(inputs.weights == 0, 0.0, log_weights)
        if inputs.loss_mask is not None:
            terms = torch.where(inputs.loss_mask, terms, 0.0)
        num_tokens: Tensor | None = None  # the log-ratio is a sum over the sequence
        if self.level != "sequence-sum":
            # It is a mean. At least 1, because a fully masked sequence would divide by 0.
            num_tokens = batch.lengths.clamp(min=1.0)
        return SequenceRatio(
            terms=terms,
            derivative=derivative,
            num_tokens=num_tokens,
            mask=inputs.loss_mask,
            batch=batch,
        )

    def kl_terms(self, logps: Tensor, inputs: TokenInputs, log_ratio: Tensor) -> KlTerms:
        """Return the KL estimate of each token against the reference, and its derivatives.

        The result has these fields, fp32 [num_tokens] each. k is the estimate, and w its weight,
        which is 1 or the ratio exp(log_ratio), as `Kl.weighting` says:

            value                w k
            grad_fixed_ratio     w dk / d logp, the derivative while w is a constant
            grad_through_ratio   d value / d log_ratio; 0 if w is a constant
            grad_both            the sum of both derivatives

        beta is not included. At level "sequence-sum", w is the ratio of the token instead, because
        the ratio of a whole sequence, a product over its tokens, would dominate the KL.

        logps       fp32 [num_tokens], log-prob of each token under the policy
        inputs      of the same tokens, with the log-probs under the reference, and the old
                    log-probs, which the ratio of a token and some estimators need
        log_ratio   fp32 [num_tokens], log-ratio at the objective's level, from the method
                    `log_ratio`
        """
        old_logps = inputs.old_or_current(logps)
        token_log_ratio = logps - old_logps
        kl = self.kl_spec
        # kl.formula has the estimator and its options.
        return kl_terms(
            logps,
            old_logps,
            inputs.ref_logps,
            log_ratio=log_ratio_of_kl(log_ratio, token_log_ratio, self.level),
            clamps=kl.clamps,
            **kl.formula,
        )

    def _apply_filters(
        self, logps: Tensor, entropy: Tensor | None, inputs: TokenInputs, batch: TokenBatch
    ) -> TokenInputs:
        """Return the inputs with policy weight 0 for the tokens that filters drop.

        Depending on the filter, other weights of these tokens become 0 too. Filters that decide
        about each token alone (`Filter.is_per_token`) are not applied here, because the formula of
        a token contains them.

        logps     fp32 [num_tokens], log-prob of each token under the policy
        entropy   fp32 [num_tokens] in nats; None if no filter reads it. If a filter keeps tokens by
                  entropy, a kept token with the entropy NaN gets the weight NaN.
        inputs    of the same tokens
        batch     the batch of these tokens
        """
        for f in self.filters:
            if f.is_per_token:
                continue  # part of the formula
            keep = f.keep(logps, entropy, inputs, batch)
            if isinstance(f, SamplerMismatch):
                inputs = self._drop_sequences(inputs, keep, f.normalize, batch)
                continue
            policy_weight = torch.where(keep, inputs.policy_weight, 0.0)
            if f.filters_entropy and entropy is not None:
                # The filter keeps a token whose entropy is NaN. Make its loss NaN, too, instead of
                # hiding the NaN.
                is_nan = entropy.isnan() & (policy_weight != 0)
                policy_weight = torch.where(is_nan, entropy, policy_weight)
            inputs = replace(inputs, policy_weight=policy_weight)
            if f.filters_entropy and inputs.entropy_weight is not None:
                entropy_weight = self._filter_entropy_weight(inputs.entropy_weight, keep, batch)
                inputs = replace(inputs, entropy_weight=entropy_weight)
        return inputs

    def _drop_sequences(
        self, inputs: TokenInputs, keep: Tensor, normalize: bool, batch: TokenBatch
    ) -> TokenInputs:
        """Return the inputs with weight 0 in all loss terms for the tokens of dropped sequences.

        inputs      of all tokens of the batch
        keep        bool [num_tokens], False in dropped sequences, and the same for all tokens of a
                    sequence
        normalize   True: multiply the weights of all other tokens, so that their denominators count
                    only the sequences that are left. False: leave the weights of all other tokens
                    unchanged. The weight of the NLL (`TokenBatch.nll_weights`) has no denominator,
                    and stays in both cases.
        batch       the batch of these tokens
        """
        policy, kl, entropy = self.aggregates
        aggregates = {"policy_weight": policy, "kl_weight": kl, "entropy_weight": entropy}
        new_weights: dict[str, Any] = {}
        for name, aggregate in aggregates.items():
            weight = getattr(inputs, name)
            if weight is not None:
                if normalize:
                    weight = weight * self._denominator_ratio(keep, batch, aggregate)
                new_weights[name] = torch.where(keep, weight, 0.0)
        if inputs.nll_weight is not None:
            new_weights["nll_weight"] = torch.where(keep, inputs.nll_weight, 0.0)
        return replace(inputs, **new_weights)

    def _denominator_ratio(self, keep: Tensor, batch: TokenBatch, aggregate: str) -> float | Tensor:
        """Return the factor by which weights of tokens grow because a filter dropped sequences.

        With `SamplerMismatch(normalize=True)` they do not count in the denominator of the loss. The
        weight of a token contains 1 / denominator, so the factor is

            denominator of all sequences / denominator of the sequences that are left

        With "group-mean" the weight also contains 1 / (trained tokens of the group), where a group
        is all answers to one prompt. So the factor is also multiplied by

            trained tokens of the group / trained tokens of the group that are left

        keep        bool [num_tokens], False in dropped sequences, and the same for all tokens of a
                    sequence
        batch       the batch of these tokens
        aggregate   one of AGGREGATES

        Return a number, a 0-d fp32 tensor or fp32 [num_tokens]. If nothing is left, all weights are
        0 already. A denominator of at least 1 then keeps the factor finite.
        """
        if aggregate == "token-sum":  # a sum over tokens has no denominator
            return 1.0
        # Trained tokens of each sequence, and those that are left, fp64 [num_sequences] each.
        num_trained = batch.lengths
        num_left = batch.sequence_sum(keep & batch.trained)
        if aggregate == "token-mean":  # the denominator is the number of trained tokens
            return (num_trained.sum() / num_left.sum().clamp(min=1.0)).float()
        # A sequence without trained tokens has none that could be dropped, so it is left.
        is_left = (num_trained == 0) | (num_left > 0)
        if aggregate != "group-mean":  # a mean over sequences: each adds 1 to the denominator
            one = torch.ones_like(num_trained)
            return batch.spread(self._count_ratio(one, num_trained, num_left, is_left)).float()

        # A product with this matrix [num_sequences, num_sequences] is a sum over the group of each
        # sequence.
        same_group = batch.same_group()
        group_size = same_group.sum(1)
        group_trained = same_group @ num_trained
        group_left = same_group @ num_left
        # A group is left if any of its sequences is.
        is_group_left = same_group @ is_left.double() > 0
        count_ratio = self._count_ratio(1 / group_size, group_trained, group_left, is_group_left)
        token_ratio = group_trained / group_left.clamp(min=1.0)
        return batch.spread(token_ratio * count_ratio).float()

    def _count_ratio(
        self, part: Tensor, num_trained: Tensor, num_left: Tensor, is_left: Tensor
    ) -> Tensor:
        """Return how many sequences or groups count, divided by how many count that are left.

        All arguments are [num_sequences]. For groups each sequence has the numbers of its group.

        part          what a sequence adds to the count: 1, or 1 / (sequences of its group), so that
                      each group adds 1
        num_trained   fp64: number of trained tokens
        num_left      fp64: number of those that are left
        is_left       bool: whether the sequence, or a sequence of the group, is left

        `count_empty` says whether sequences or groups without trained tokens count. The result is
        fp64 [num_sequences], the same number for all.
        """
        if self.count_empty:
            count = part.sum()
            count_left = (part * is_left).sum()
        else:
            count = (part * (num_trained > 0)).sum()
            count_left = (part * (num_left > 0)).sum()
        return (count / count_left.clamp(min=1.0)).expand_as(part)

    def _filter_entropy_weight(
        self, entropy_weight: Tensor, keep: Tensor, batch: TokenBatch
    ) -> Tensor:
        """Return the weight of the entropy bonus of each token after a filter, fp32 [num_tokens].

        Dropped tokens have the weight 0. With entropy_aggregate="token-mean" the bonus is a mean
        over the kept tokens, so their weights are multiplied by

            (sum of all weights before the filter) / (sum of the weights of kept tokens)

        This factor is 0 if no kept token has a weight. Both sums include the other ranks that have
        parts of the same sequences (`TokenBatch.context_group`). With any other aggregate the
        weights of kept tokens do not change.

        entropy_weight   fp32 [num_tokens], weight before the filter
        keep             bool [num_tokens], tokens that the filter keeps
        batch            the batch of these tokens
        """
        kept_weight = torch.where(keep, entropy_weight, 0.0)
        if self.entropy_aggregate != "token-mean":
            return kept_weight
        sums = [x.sum(dtype=torch.float64) for x in (kept_weight, entropy_weight)]
        # Add up both sums over the ranks in one call, because each call is a collective.
        sums_over_ranks = batch.over_context(torch.stack(sums))
        kept_sum, total = sums_over_ranks.unbind()
        factor = torch.where(kept_sum == 0, 0.0, total / kept_sum)
        return kept_weight * factor.float()


@dataclass(frozen=True, eq=False)
class SequenceRatio:
    """The log-ratio of each sequence: a mean or sum of terms over its trained tokens.

    A term is the log-ratio logp - old_logp of a token, or a function of it such as a clamp.

    terms        fp32 [num_tokens], 0 in masked tokens
    derivative   of each term with respect to the token's log-prob, fp32 [num_tokens]. The number
                 1.0 if each term is the log-ratio itself.
    num_tokens   trained tokens of each sequence, fp64 [num_sequences], at least 1: the log-ratio is
                 a mean. None: it is a sum.
    mask         bool [num_tokens]: the trained tokens; None: all
    batch        the batch of the tokens; tells which tokens form a sequence
    """

    terms: Tensor
    derivative: Tensor | float
    num_tokens: Tensor | None
    mask: Tensor | None
    batch: TokenBatch

    def log_ratios(self) -> Tensor:
        """Return the log-ratio of each token's sequence, fp32 [num_tokens].

        All tokens of a sequence get the same number.
        """
        return self._reduce(self.terms)

    def gradient(self, grad_log_ratios: Tensor) -> Tensor:
        """Return d loss / d logp of each token through the log-ratio of its sequence.

        The loss of each token t depends on the log-ratio of its sequence, which depends on the
        log-prob of every trained token s of the sequence. So by the chain rule

            d loss / d logp_s = derivative[s] * sum over t of grad_log_ratios[t]

        for a log-ratio that is a sum. If it is a mean, the sum over t becomes a mean. Terms of the
        loss that depend on logp directly, such as a KL, have a gradient that the caller adds.

        grad_log_ratios   fp32 [num_tokens], d (loss of token t) / d (log-ratio of its sequence),
                          0 in masked tokens

        Return fp32 [num_tokens], 0 in masked tokens.
        """
        grad_terms = self._reduce(grad_log_ratios)  # the mean or sum over t
        if self.mask is not None:
            grad_terms = torch.where(self.mask, grad_terms, 0.0)
        if isinstance(self.derivative, Tensor):  # otherwise it is 1.0
            grad_terms = grad_terms * self.derivative
        return grad_terms

    def _reduce(self, x: Tensor) -> Tensor:
        """Return the mean or sum of x over the sequence of each token, fp32 [num_tokens].

        It is a mean over the trained tokens if `num_tokens` is given, otherwise a sum. All tokens
        of a sequence get the same number.

        x   fp32 [num_tokens], 0 in masked tokens
        """
        total = self.batch.sequence_sum(x)  # fp64 [num_sequences]
        if self.num_tokens is not None:
            total = total / self.num_tokens
        return self.batch.spread(total, torch.float32)  # the value of each token's sequence


#: The `Kl` in the formula of an objective without a KL. It is the same for all of these objectives,
#: so that they share a compiled formula.
NO_KL = Kl()
#: Bounds of the log of a token's weight if it is part of the ratio of a sequence: log(1e-8) and 20.
LOG_WEIGHT_BOUNDS = (-18.420680743952367, 20.0)


def _token_log_ratios(logps: Tensor, inputs: TokenInputs) -> Tensor:
    """Return the log-ratio logp - old_logp of each token, fp32 [num_tokens].

    A token is on-policy if the inputs have no old_logps, or if its old log-prob is the mark
    ON_POLICY (1e30). Its log-ratio is 0, or NaN if its log-prob is NaN, so that the loss is NaN
    instead of hiding it.

    logps    fp32 [num_tokens], log-prob of each token under the policy
    inputs   of the same tokens; has the old log-probs
    """
    if inputs.old_logps is not None and not inputs.marks_on_policy:
        return logps - inputs.old_logps  # the old log-probs contain no mark
    # 0, or NaN where logp is NaN. logp - logp would also be NaN for an infinite logp.
    on_policy = torch.where(logps.isnan(), logps, 0.0)
    if inputs.old_logps is None:
        return on_policy
    return torch.where(inputs.old_logps >= ON_POLICY, on_policy, logps - inputs.old_logps)


#: The cached properties of `Objective` in the order of the class: name -> function that computes
#: the property. A function may read the properties before it.
COMPUTED_ONCE = {
    name: value.func
    for name, value in vars(Objective).items()
    if isinstance(value, cached_property)
}

# ---- published objectives, and the constants with which trainers compute them

Changes = dict[str, Any]
FIELDS = tuple(f.name for f in fields(Objective))
_BY_SEQUENCE = "seq-mean-token-mean"

#: Published objectives by name, with the constants of their papers. "dapo" and "bnpo" differ in
#: their clip widths and in the denominator: DAPO counts the tokens of the whole batch (pass
#: `normalizer=` if the batch is split), BNPO those of one micro-batch.
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

#: The KL of verl and SkyRL.
_VERL_KL = Kl("k3", clamp_log=20.0, clamp=10.0)


#: The clip widths of PPO, for a trainer that does not use those of the paper.
_SYMMETRIC: Changes = {"surrogate": Clip(0.2, 0.2)}
#: Bounds of the log-ratio.
_WITHIN_20: Changes = {"log_ratio_bounds": (-20.0, 20.0)}
_BELOW_10: Changes = {"log_ratio_bounds": (-math.inf, 10.0)}


def _with_common(common: Changes, presets: dict[str, Changes]) -> dict[str, Changes]:
    """Return the changes of each preset, with the changes that all presets have in common added.

    common    name of a field of `Objective` -> its value in all presets of a trainer
    presets   name of a preset -> {name of a field: its value}, which take precedence over `common`

    Return a dictionary like `presets`.
    """
    return {name: {**common, **changes} for name, changes in presets.items()}


#: The loss types of TRL, which Liger and Unsloth share, with the clip widths of TRL.
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

#: trainer -> preset that the trainer has -> fields of `Objective` that the trainer sets in another
#: way than the preset. Versions of the trainers: see integrations/README.md.
NUMERICS: dict[str, dict[str, Changes]] = {
    "trl": _with_common(
        {"kl": Kl("k3", weighting="ratio"), "entropy_aggregate": "token-mean"},
        {
            **_LOSS_TYPES,
            "luspo": {},
            "gmpo": {"kl": "k3"},
            "rloo": {},
            "a2po": {},
        },
    ),
    "liger": _with_common(
        {"beta": 0.04},
        {
            **_LOSS_TYPES,
            "luspo": {},
        },
    ),
    "unsloth": {**_LOSS_TYPES, "dr_grpo": {"max_tokens": 8192}},
    "verl": _with_common(
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
    "openrlhf": _with_common(
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
    "slime": _with_common(
        {"kl": "k1"},
        {
            # Each rollout has its own mean, unless calculate_per_token_loss is set, as DAPO needs.
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
    "nemo-rl": _with_common(
        {"beta": 0.01, "kl": Kl("k3", weighting="score", clamp_log=20.0, clamp=10.0)},
        {
            "grpo": {"aggregate": "token-mean"},
            "dapo": {},
            "gspo": _SYMMETRIC,
            "cispo": {"surrogate": Cispo(cap=1.2, low=0.8)},
            "reinforce": {},
        },
    ),
    "skyrl": _with_common(
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
        # The loss has kappa (log r)^2, where r is the ratio to the sampler. Pass the log-probs of
        # the sampler as old_logps and as ref_logps.
        "dppo_tv": {"beta": 2e-3, "kl": "k2"},
        "ipo": {"beta": 2e-3, "kl": "k2"},
        "sampled_distillation": {},
    },
    "torchtitan": {
        "grpo": {"aggregate": "token-mean", "log_ratio_bounds": (-10.0, 10.0)},
        "dapo": {**_SYMMETRIC, "log_ratio_bounds": (-10.0, 10.0)},
    },
}
