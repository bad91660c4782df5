"""The loss of a token and its gradients, from its log-prob and entropy.

    loss_t = policy_weight_t * (surrogate_t + auxiliary_loss_t) + kl_weight_t * KL_t
             - entropy_weight_t * entropy_t - nll_weight_t * logp_t

`token_loss` is that line for one token, given the log-ratio at the objective's level.
`TokenLossFormula` is what the kernels get of a loss: this line with its functions, numbers and
inputs, as a program (program.py) or, in torch, as it stands here. Steps that need more than one
token (the log-ratio of a sequence, filters and selections over a batch) are the objective's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import describe
from .kl import Kl, kl_terms
from .ops import log_probs, ops, without_branches
from .program import Made, Program, Run, Tracer, Trial, is_own, key_of

# ---- terms at listed ids

ExtraIdFunction = Callable[[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, ...]]

#: The smallest probability of the ids that a row does not list: fp32 keeps no digit of a smaller
#: one.
LEAST_OUTSIDE = 1e-6


class AuxiliaryLosses(NamedTuple):
    """What functions of listed ids give, of k ids in n rows.

    term     fp32 [n], the term of each row.
    slopes   fp32 [k], d term / d log-prob of each id.
    outside  fp32 [n], d term / d log P, P the probability of all ids that the row does not list.
             None: no function has it.
    """

    term: Tensor
    slopes: Tensor
    outside: Tensor | None = None


def logp_term(logp: Tensor, values: Tensor, advantage: Tensor, sums: Any) -> tuple[Tensor, Tensor]:
    """sum_v c_v log p_v, with the values c."""
    return torch.where(values == 0, 0.0, values * logp), values


def prob_term(logp: Tensor, values: Tensor, advantage: Tensor, sums: Any) -> tuple[Tensor, Tensor]:
    """sum_v r_v p_v, with the values r."""
    term = values * logp.exp()
    return term, term


class ExtraIdTerms(NamedTuple):
    """The terms of all rows. `parts`: functions as above with their values; ids lie in the order of
    rows.

    offsets   int64 [n + 1], where the ids of each row begin.
    """

    parts: tuple[tuple[ExtraIdFunction, Tensor], ...]
    offsets: Tensor

    @property
    def rows(self) -> Tensor:
        """int64 [k], the row of each id. Made anew at each call."""
        return torch.repeat_interleave(self.offsets.diff(), output_size=self.parts[0][1].numel())

    def of(self, logps: Tensor, advantages: Tensor) -> AuxiliaryLosses:
        """The terms from log-probs [k] and advantages [n]. Sums are fp64, in the order of ids.
        Raises ValueError where a function sums or returns anything but one number of each id.
        """
        rows = self.rows

        def is_number_of_ids(x: Any) -> bool:
            return isinstance(x, Tensor) and x.shape == logps.shape

        def sums(x: Any) -> Tensor:
            if not is_number_of_ids(x):
                raise ValueError(
                    f"sums is given a {type(x).__name__} that is no number of each id: pass what"
                    " has the shape of logp."
                )
            return self._sums(x)[rows]

        term = torch.zeros_like(logps)
        slopes = torch.zeros_like(logps)
        outside: Tensor | None = None
        for function, values in self.parts:
            result = without_branches(function, logps, values, advantages[rows], sums)
            if not (
                isinstance(result, tuple)
                and len(result) in (2, 3)
                and all(map(is_number_of_ids, result))
            ):
                raise ValueError(
                    f"listed={function!r} returned no pair of tensors of the shape of logp: return"
                    " (term, slope)."
                )
            term = term + result[0]
            slopes = slopes + result[1]
            if len(result) == 3:
                outside = result[2] if outside is None else outside + result[2]
        if outside is None:
            return AuxiliaryLosses(self._sums(term), slopes)
        # `outside` is equal for the ids of a row.
        of_first_id = torch.cat([outside, outside.new_zeros(1)])[self.offsets[:-1]]
        return AuxiliaryLosses(
            self._sums(term), slopes, torch.where(self.offsets.diff() > 0, of_first_id, 0.0)
        )

    def _sums(self, x: Tensor) -> Tensor:
        total = torch.segment_reduce(
            x.double(), "sum", offsets=self.offsets, initial=0, unsafe=True
        )
        return total.float()


def probability_outside(logp: Any, sums: Callable[[Any], Any]) -> Any:
    """Return the probability of all ids that a row does not list, at least LEAST_OUTSIDE."""
    return (1.0 - sums(logp.exp())).clamp(min=LEAST_OUTSIDE)


@dataclass(frozen=True, eq=False, repr=False)
class TokenInputs:
    """The flat rows of a batch with the weights of an objective; every tensor is [n]."""

    targets: Tensor  # int64
    processed: (
        Tensor | None
    )  # bool: rows whose logits are processed, `loss_mask` or some of these; None = all
    advantages: Tensor  # fp32, like all that follow
    policy_weight: Tensor
    old_logps: Tensor | None = None  # None = on-policy
    ref_logps: Tensor | None = None  # None without a KL term, as is its weight
    kl_weight: Tensor | None = None
    entropy_weight: Tensor | None = None  # None without a bonus
    nll_weight: Tensor | None = None
    divergence_weight: Tensor | None = (
        None  # of the divergence from a second stream of rows; None without one
    )
    sampler_logps: Tensor | None = (
        None  # where a trust region compares with them; None = it compares with old_logps
    )
    weights: Tensor | None = None  # of the batch, as given
    loss_mask: Tensor | None = None  # bool: rows where the batch's mask is set; None = all
    __repr__ = describe

    @property
    def mask(self) -> Tensor:
        """bool [n]: `loss_mask`, never None."""
        return (
            torch.ones_like(self.targets, dtype=torch.bool)
            if self.loss_mask is None
            else self.loss_mask
        )

    def program_inputs(self, *more: str) -> dict[str, Tensor]:
        """PROGRAM_INPUTS, and `more` fields, of those that these rows have."""
        return {
            name: x for name in (*PROGRAM_INPUTS, *more) if (x := getattr(self, name)) is not None
        }

    def __getitem__(self, rows: slice | Tensor) -> TokenInputs:
        """What the token stage takes of these rows."""
        given = self.program_inputs("divergence_weight")
        cut = (
            torch.stack([*given.values()])[:, rows]
            if isinstance(rows, Tensor)
            else [x[rows] for x in given.values()]
        )
        return TokenInputs(self.targets[rows], None, **dict(zip(given, cut, strict=True)))

    def weighted(self, factor: Tensor) -> TokenInputs:
        """Every term of every row times `factor` [n]."""
        names = ("policy_weight", "kl_weight", "entropy_weight", "nll_weight", "divergence_weight")
        terms = {name: getattr(self, name) for name in names}
        return replace(
            self,
            **{
                name: torch.where(w != 0, w * factor, 0.0)
                for name, w in terms.items()
                if w is not None
            },
        )


# fmt: off
def token_loss(
    logp, entropy, log_ratio, old_logp, ref_logp, anchor_logp, advantage,
    policy_weight, kl_weight, entropy_weight, nll_weight,
    surrogate_params, trust_params, entropy_floor, ratio_bounds, kl_clamps,
    SURROGATE, DETACHED, LEVEL, TRUST, ESTIMATOR, SCORE, WEIGHTING, STRAIGHT_THROUGH, auxiliary_loss=None,
):
    """(loss, d loss / d logp, d loss / d log-ratio, d loss / d entropy, d loss / d listed) of a
    token; None leaves a term out.

    log_ratio is the one at LEVEL. d loss / d log-ratio is nonzero only where the gradient flows
    through the log-ratio of a sequence; at the other levels, and for a detached ratio, d loss / d
    logp is the whole slope. TRUST compares with anchor_logp.

    If a number of a token with a nonzero policy weight is NaN, its loss and its gradient are NaN,
    whatever SURROGATE, TRUST, the entropy floor and the bounds of the ratio return for it. The
    exception is anchor_logp: a NaN in `sampler_logps` means that the sampler did not score the
    token, and TRUST drops it.
    """
    zero = policy_weight * 0.0
    # The minimum is NaN if one of the numbers is. A sum would also be NaN for inf - inf.
    smallest = ops.minimum(logp if LEVEL == "token" else log_ratio, advantage)
    if LEVEL == "token" and old_logp is not logp:
        smallest = ops.minimum(smallest, old_logp)
    if entropy_floor is not None:
        smallest = ops.minimum(smallest, entropy)
    sound = smallest == smallest
    out = policy_weight == 0.0
    policy_weight = ops.where(sound, policy_weight, smallest)
    if entropy_floor is not None:
        low = below_floor(entropy, entropy_floor[0])
        out = out | low
        if entropy_weight is not None:
            entropy_weight = ops.where(low, 0.0, entropy_weight)
    out_of_listed = out  # what TRUST thinks of the token says nothing of the other ids of its row
    if TRUST is not None:
        out = out | (sound & ~TRUST(logp, anchor_logp, advantage, trust_params))
    bounded = log_ratio
    if ratio_bounds is not None:
        bounded = ops.minimum(ops.maximum(log_ratio, ratio_bounds[0]), ratio_bounds[1])
    if LEVEL == "token" and ratio_bounds is None:
        loss, slope = SURROGATE(logp, old_logp, advantage, surrogate_params)
    elif DETACHED:  # a weight of logp
        loss, slope = SURROGATE(logp, logp - bounded, advantage, surrogate_params)
    else:  # of the ratio alone
        loss, slope = SURROGATE(bounded, zero, advantage, surrogate_params)
        slope = ops.where(bounded == log_ratio, slope, 0.0)
    # A token of weight 0 contributes 0 even where its ratio is NaN.
    loss = ops.where(out, 0.0, policy_weight * loss)
    d_logp = ops.where(out, 0.0, policy_weight * slope)
    listed_weight = zero
    if auxiliary_loss is not None:
        loss = loss + ops.where(out_of_listed, 0.0, policy_weight * auxiliary_loss)
        listed_weight = ops.where(out_of_listed, 0.0, policy_weight)
    d_ratio = zero
    if LEVEL == "sequence" or LEVEL == "sequence-sum":
        if not DETACHED:
            d_ratio = d_logp
            d_logp = zero
    if kl_weight is not None:
        kl, kl_slope, through_ratio, both = kl_terms(
            logp, old_logp, ref_logp, ratio_of_kl(log_ratio, logp - old_logp, LEVEL), kl_clamps,
            ESTIMATOR, SCORE, WEIGHTING, STRAIGHT_THROUGH,
        )
        loss = loss + kl_weight * kl
        if LEVEL == "sequence" and WEIGHTING == "ratio":
            d_logp = d_logp + kl_weight * kl_slope
            d_ratio = d_ratio + kl_weight * through_ratio
        else:
            d_logp = d_logp + kl_weight * both
    grad_entropy = zero
    if entropy_weight is not None:
        loss = loss - entropy_weight * entropy
        grad_entropy = -entropy_weight
    if nll_weight is not None:
        loss = loss - ops.where(nll_weight == 0.0, 0.0, nll_weight * logp)
        d_logp = d_logp - nll_weight
    return loss, d_logp, d_ratio, grad_entropy, listed_weight
# fmt: on


def below_floor(entropy, floor):
    """Return whether an entropy is below the floor: what `EntropyFloor` drops. False for NaN."""
    return entropy < floor


def ratio_of_kl(log_ratio, own, LEVEL):
    """The log-ratio that weighs a token's KL: that of LEVEL, and at "sequence-sum" the token's own,
    because the ratio of a whole sequence is a product of many and would dominate the KL.
    """
    if LEVEL == "sequence-sum":
        return own
    else:
        return log_ratio


#: Inputs of a program beside log-prob and entropy, which come first: fields of `TokenInputs`.
PROGRAM_INPUTS = (
    "old_logps", "ref_logps", "sampler_logps", "advantages", "policy_weight", "kl_weight", "entropy_weight", "nll_weight",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class TokenFormula:
    """What an objective computes for a token.

    chosen   the arguments of `token_loss` that are fixed at compile time: functions and choices.
    numbers  those that are numbers of a call, tuples or None: changing them compiles nothing."""

    chosen: dict[str, Any]
    numbers: dict[str, Any]
    _programs: dict[tuple[str, ...], Any] = field(default_factory=dict, repr=False)

    def terms(
        self, given: dict[str, Any], log_ratio: Any = None, **numbers: Any
    ) -> tuple[Any, ...]:
        """`token_loss` of the inputs `given`, tensors or symbols by name. `log_ratio`: None for a
        token's own. `numbers`: those that are others than usual.
        """
        logp = given["logps"]
        old = given.get("old_logps", logp)
        return token_loss(
            logp, given["entropy"], logp - old if log_ratio is None else log_ratio, old, given.get("ref_logps"),
            given.get("sampler_logps", old), given["advantages"],
            given["policy_weight"], given.get("kl_weight"), given.get("entropy_weight"), given.get("nll_weight"),
            **{**self.numbers, **numbers}, **self.chosen, auxiliary_loss=given.get("auxiliary_loss"),
        )  # fmt: skip


class TokenLosses(NamedTuple):
    """What the token stage makes of rows, each fp32 [n]."""

    losses: Tensor
    grad_logps: Tensor
    grad_entropy: Tensor | None  # None without a bonus
    grad_auxiliary_loss: Tensor  # d loss / d the row's term in the log-probs of listed ids

    @property
    def statistic_grads(self) -> dict[str, Tensor]:
        """What arrives at the statistics of the rows, by name."""
        own = {"logps": self.grad_logps}
        return own if self.grad_entropy is None else own | {"entropy": self.grad_entropy}


class TokenLossFormula(NamedTuple):
    """The token stage of an objective whose slopes depend on one token alone, for these rows.
    `rows.divergence_weight` is the weight of the divergence from a second stream, where there is
    one.
    """

    formula: TokenFormula
    inputs: TokenInputs

    def select(self, rows: slice | Tensor) -> TokenLossFormula:
        """That of these rows only."""
        if isinstance(rows, slice) and rows.indices(n := self.inputs.targets.numel()) == (0, n, 1):
            return self
        return self._replace(inputs=self.inputs[rows])

    def compute(
        self, logps: Tensor, entropy: Tensor | None, auxiliary_loss: Tensor | None = None
    ) -> TokenLosses:
        """The terms of these rows in torch.

        `auxiliary_loss` fp32 [n]: those in the log-probs of listed ids.
        """
        given = {
            "logps": logps,
            "entropy": entropy,
            "auxiliary_loss": auxiliary_loss,
            **self.inputs.program_inputs(),
        }
        losses, grad_logps, _, grad_entropy, grad_auxiliary_loss = self.formula.terms(given)
        return TokenLosses(
            losses,
            grad_logps,
            None if self.inputs.entropy_weight is None else grad_entropy,
            grad_auxiliary_loss,
        )

    def program(self) -> tuple[Program, list[float]]:
        """(the program, its numbers): (loss, d loss / d log-prob, d loss / d entropy) from the
        log-prob, the entropy and those of PROGRAM_INPUTS that the rows have. Raises FormulaRefused
        where a formula cannot be traced.
        """
        made, numbers, _ = self._made()
        return made.checked(), numbers

    def program_inputs(self, program: Program) -> dict[str, Tensor]:
        """The inputs of the program that the rows have, which are its last, fp32 [n] in one piece,
        by name.
        """
        return {
            name: getattr(self.inputs, name).contiguous()
            for name in program.inputs
            if name in PROGRAM_INPUTS
        }

    def compare_once(self, run: Run) -> None:
        """`Made.compare_once`, on random inputs; where `key_of` cannot tell whether a formula has
        changed, at each call.
        """
        made, numbers, trial = self._made()
        made.compare_once(run, numbers, trial)

    def _made(self) -> tuple[Made, list[float], Callable[[], Trial]]:
        formula, present = self.formula, tuple(self.inputs.program_inputs())
        cached = formula._programs.get(present)
        if cached is not None:
            theirs, keys, result = cached
            if keys == tuple(map(key_of, theirs)):
                return result
        names, chosen, numbers = ("logps", "entropy", *present), formula.chosen, formula.numbers
        outputs = ("loss", "d_logp", "d_ratio", "grad_entropy")

        def made_of(inputs: Iterable[Any], **parameters: Any) -> dict[str, Any]:
            terms = formula.terms(dict(zip(names, inputs, strict=True)), **parameters)
            made = dict(zip(outputs, terms, strict=False))
            del made["d_ratio"]  # which is 0 where a token's slope depends on that token alone
            return made

        def build(tracer: Tracer) -> list[Any]:
            inputs = [*map(tracer.input, names)]
            parameters = {
                name: None if x is None else tuple(tracer.parameter() for _ in x)
                for name, x in numbers.items()
            }
            return [*made_of(inputs, **parameters).values()]

        def trial() -> Trial:
            inputs = random_inputs(names)
            return inputs, lambda: made_of(inputs)

        keys = {name: key_of(x) for name, x in chosen.items()}
        shape = tuple(x if x is None else len(x) for x in numbers.values())
        made = Made.of((*keys.values(), present, shape), name_of(chosen), build)
        result = (
            made,
            made.checked().numbers([*chain.from_iterable(x or () for x in numbers.values())]),
            trial,
        )
        if None not in keys.values():
            theirs = {name: x for name, x in chosen.items() if callable(x) and not is_own(x)}
            formula._programs[present] = (
                tuple(theirs.values()),
                tuple(keys[name] for name in theirs),
                result,
            )
        return result


def _nothing(logp, old_logp, advantage, params):
    return 0.0 * logp, 0.0 * logp


#: The formula of a loss without a term that depends on log-probs.
NOTHING = TokenFormula(
    {"SURROGATE": _nothing, "DETACHED": False, "LEVEL": "token", "TRUST": None, **Kl().formula},
    {
        "surrogate_params": (),
        "trust_params": (),
        "entropy_floor": None,
        "ratio_bounds": None,
        "kl_clamps": None,
    },
)


# ---- programs


def name_of(chosen: dict[str, Any]) -> str:
    """The formulas in a program in words:

    those of the user if there are any, else the surrogate.
    """
    names = {getattr(f, "__qualname__", repr(f)): is_own(f) for f in chosen.values() if callable(f)}
    theirs = [name for name, own in names.items() if not own]
    return ", ".join(theirs or list(names)[:1])


def random_inputs(names: tuple[str, ...], points: int = 512, odd: bool = True) -> list[Tensor]:
    """fp32 [points] of each input: log-probs and others as in `log_probs`, numbers with zeros among
    them, and a few that are infinite or NaN, if `odd`.
    """
    g = torch.Generator().manual_seed(0)
    logp, _ = log_probs(points, g)
    tensors = []
    for name in names:
        if name.endswith("logps"):
            x = (logp if name == "logps" else logp + log_probs(points, g)[1]).float()
        elif name == "entropy":
            x = 6.0 * torch.rand(points, generator=g)
        else:
            x = torch.randn(points, generator=g) * (torch.rand(points, generator=g) < 0.75)
        if odd:
            at = torch.randint(0, points, (9,), generator=g)
            x = x.index_copy(0, at, torch.tensor([torch.inf, -torch.inf, torch.nan] * 3))
        tensors.append(x)
    return tensors
