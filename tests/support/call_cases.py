"""Calls of the public functions as data, for tests that compare all of them with the oracle.

CallCase   the options of a call, as a few plain values that print well
Problem    the tensors of a call, which `problem(case)` draws from the seed of the case

`covering` returns cases in which all pairs of options meet. For a new option of a call, add a field
to CallCase, its values to AXES, combinations that are refused to `legal`, its tensors to `problem`,
its argument to `function_and_arguments` (public_functions.py), and its result to `answer`
(oracle.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from support import oracle
from support.objectives import OBJECTIVES

SPECS = {name: spec for name, (_, spec) in OBJECTIVES.items()}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class CallCase:
    """The options of a call. `legal` resets options that have no meaning with the others.

    function     "loss", "logprobs" or "divergence"
    source       "logits" or "hidden" (hidden states and a head)
    lengths      number of tokens of each sequence
    layout       "padded", "packed", or "without offsets" (packed without cu_seqlens)
    view         strides of logits, or of hidden states and weight, see VIEWS
    rows         the row of each token: "own", "shared" by several tokens, or "shuffled"
    mask         "none", "some", or "all" of the tokens are masked
    spread       standard deviation of the logits
    extreme      "far": targets up to 700 below the other logits. "confident": an id 20 above them.
                 "absent": logits of -inf. "ends": logits at the ends of fp16.
    transform    "none", "temperature", "softcap", "scale", "everything", "per sequence" or "per
                 token" (temperatures)
    objective    a key of OBJECTIVES (objectives.py)
    given        fields of the batch. "everything". "on-policy": no old log-probs and weights.
                 "column": advantages [B, 1]. "token": an advantage per token. "marked": some
                 sequences or tokens are marked as on-policy.
    normalizer   None, a number, or one for policy term, KL and entropy bonus
    upstream     the upstream gradient of the loss
    bias         "none", "plain", or "column" (a column of a matrix)
    head         dtype of the weight: "of hidden", or "bfloat16" with fp32 hidden states
    width        size of the hidden states
    frozen       "nothing", "weight" or "hidden": the tensor that requires no gradient
    kept         tokens with a candidate set: "none", "some" or "all". "empty": all sets are empty.
                 "whole": sets of the whole vocabulary. "long": sets of any size.
    missing      what to do with a target that is not in its set: "include", "full" or "mask"
    other        a reference. "none". "whole": another model. "near": with the policy's weight.
                 "listed": a teacher known at some ids. "own": with its own transform. "itself": the
                 policy's logits with another transform.
    exact        the divergence: "reverse", "forward", "jsd", "jsd .1" (mixture 0.1) or "tv"
    tail         of a "listed" teacher: "bin", "ignore", "renormalise" or "generalised"
    squared      whether the divergence is multiplied by the temperature squared
    listed       whether the loss has terms at extra ids: "none" or "some"
    also         statistics besides log-probs: "nothing", "entropy", "detached" (entropy without
                 gradient), "sum_squares", "at" (extra ids), "log_kept_mass" or "all"
    weight_grad  memory that the gradient of the weight is added to: "none", "float32" or "of
                 weight" (its dtype)
    ranks        number of shards of the vocabulary
    """

    function: str = "loss"
    source: str = "logits"
    lengths: tuple[int, ...] = (4, 2, 0, 5)
    layout: str = "padded"
    vocab: int = 61
    dtype: str = "float32"
    view: str = "whole"
    rows: str = "own"
    mask: str = "some"
    spread: float = 3.0
    extreme: str = "none"
    transform: str = "none"
    objective: str = "dapo"
    given: str = "everything"
    normalizer: Any = None
    upstream: float = 1.0
    inplace: bool = False
    skip_inactive: bool = False
    bias: str = "none"
    head: str = "of hidden"
    width: int = 8
    frozen: str = "nothing"
    kept: str = "none"
    missing: str = "include"
    other: str = "none"
    exact: str = "reverse"
    tail: str = "bin"
    squared: bool = False
    listed: str = "none"
    also: str = "entropy"
    weight_grad: str = "none"
    ranks: int = 1
    seed: int = 0

    def __str__(self) -> str:
        """Return the options that differ from their defaults, as a call of CallCase."""
        changed = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"CallCase({', '.join(changed)})"

    @property
    def draws_sets(self) -> bool:
        """Return whether tokens have candidate sets."""
        return self.kept != "none"

    @property
    def is_composed(self) -> bool:
        """Return whether the statistics of tokens come from several kernel calls.

        The gradients of these calls are rounded separately.
        """
        has_pairs = (
            self.rows != "own"
            or self.other == "listed"
            or self.listed != "none"
            or self.also in ("at", "all")
        )
        return self.draws_sets or has_pairs

    @property
    def rounds_twice(self) -> bool:
        """Return whether an element of a gradient is a sum of gradients that were rounded to its
        dtype.

        From logits this takes a second pass over all logits, for a divergence or log_kept_mass. The
        first pass and the pass for single logits write different elements.
        """
        has_pairs = self.draws_sets or self.rows != "own" or self.listed != "none"
        has_second_pass = (self.other != "none" and has_pairs) or self.also in (
            "log_kept_mass",
            "all",
        )
        return self.is_composed and (self.source == "hidden" or has_second_pass)


#: Values of each axis, for all pairs of them and for random cases.
AXES: dict[str, tuple[Any, ...]] = {
    "function": ("loss", "logprobs", "loss", "divergence"),
    "source": ("logits", "hidden"),
    "lengths": ((4, 2, 0, 5), (1,), (3, 3), (1, 1, 7, 2, 4)),
    "layout": ("padded", "packed", "without offsets"),
    "vocab": (61, 2, 131, 2100, 1),
    "dtype": tuple(DTYPES),
    "view": ("whole", "transposed", "columns apart", "rows apart"),
    "mask": ("some", "none", "all"),
    "spread": (3.0, 0.05, 30.0),
    "extreme": ("none", "far", "confident", "absent"),
    "transform": (
        "none",
        "temperature",
        "softcap",
        "scale",
        "everything",
        "per sequence",
        "per token",
    ),
    "objective": tuple(SPECS),
    "given": ("everything", "on-policy", "token", "column", "marked"),
    "normalizer": (None, 7.0, (7.0, 3.0, None), (None, 3.0, 5.0)),
    "upstream": (1.0, 0.5, 1024.0),
    "inplace": (False, True),
    "skip_inactive": (False, True),
    "bias": ("none", "plain", "column"),
    "head": ("of hidden", "bfloat16"),
    "width": (8, 1, 600),
    "frozen": ("nothing", "weight", "hidden"),
    "kept": ("none", "some", "all", "empty", "whole"),
    "missing": ("include", "full", "mask"),
    "other": ("none", "whole", "near", "listed", "own"),
    "exact": ("reverse", "forward", "jsd", "jsd .1", "tv"),
    "tail": ("bin", "ignore", "renormalise", "generalised"),
    "squared": (False, True),
    "also": ("entropy", "nothing", "detached", "sum_squares", "at", "log_kept_mass", "all"),
    "weight_grad": ("none", "float32", "of weight"),
    "rows": ("own", "shared", "shuffled"),
    "listed": ("none", "some"),
}
#: Objectives that differ in what they need: levels, statistics, filters, KL terms, entropy bonuses,
#: selected tokens, groups.
KINDS = (
    "dapo", "gspo, k3 by the ratio", "grpo, k3 and entropy", "vespo", "clip-cov",
    "entropy quantile, bonus of its own", "dppo-kl to the sampler, k3", "off-policy sequences",
    "distillation", "dapo, exact", "distillation, exact",
)  # fmt: skip
#: Axes whose pairs are covered. The others are drawn at random, because they do not change how a
#: row is computed.
PAIRED = tuple(name for name in AXES if name not in ("lengths", "upstream", "normalizer", "given"))


def legal(case: CallCase) -> CallCase:
    """Return the case, with options that are refused or meaningless with the others reset."""
    case = replace(case, **_resets_by_source(case), **_resets_by_function(case))
    case = replace(case, **_resets_by_other_options(case))
    return replace(case, inplace=False) if case.is_composed else case


def _resets_by_source(case: CallCase) -> dict[str, Any]:
    """Return {option: value} of the options that `source` makes meaningless or that it refuses.

    The values are defaults, or others that the source allows.
    """
    if case.source == "logits":
        # There is no head.
        return {
            "bias": "none",
            "head": "of hidden",
            "width": 8,
            "frozen": "nothing",
            "weight_grad": "none",
        }
    # The caller has no logits that could be overwritten or set to extreme values.
    resets: dict[str, Any] = {"inplace": False, "extreme": "none"}
    if case.dtype != "float32":
        resets["head"] = "of hidden"
    if case.frozen != "nothing":
        resets["weight_grad"] = "none"
    return resets


def _resets_by_function(case: CallCase) -> dict[str, Any]:
    """Return {option: value} of the options to reset because of `function`.

    For a loss, its objective decides about more options.
    """
    if case.function == "loss":
        return {"also": "nothing", **_resets_by_objective(case)}
    resets: dict[str, Any] = {
        "objective": "dapo",
        "given": "everything",
        "normalizer": None,
        "skip_inactive": False,
        "upstream": 1.0,
        # Only a loss takes cu_seqlens.
        "layout": "padded" if case.layout == "packed" else case.layout,
    }
    if case.function == "divergence":
        resets["other"] = "whole" if case.other == "none" else case.other
        resets["also"] = "nothing"
        resets["missing"] = "include"
    else:
        resets["other"] = "none"
    return resets


def _resets_by_objective(case: CallCase) -> dict[str, Any]:
    """Return {option: value} of the options of a loss to reset because of its objective.

    For example, a sequence-level loss needs to know the sequences, and only an exact KL reads the
    logits of a reference.
    """
    spec = SPECS[case.objective]
    has_exact_kl = spec.beta and spec.kl == "exact"
    needs_sequences = (
        spec.level != "token" or not _counts_tokens(spec) or spec.off_policy is not None
    )
    resets: dict[str, Any] = {}
    if case.layout == "without offsets" and needs_sequences:
        resets["layout"] = "packed"
    if spec.beta and not has_exact_kl:
        resets["other"] = "none"
    if case.other != "none" and not spec.beta:
        resets["objective"] = "gspo, exact" if spec.level == "sequence" else "dapo, exact"
    if has_exact_kl and case.other == "none":
        resets["other"] = "whole"
    return resets


def _resets_by_other_options(case: CallCase) -> dict[str, Any]:
    """Return {option: value} of the options to reset because of each other.

    case   with the resets of `_resets_by_source` and `_resets_by_function`
    """
    resets: dict[str, Any] = {}
    if not case.draws_sets:
        resets["missing"] = "include"
    if case.other == "listed" and case.draws_sets:
        resets |= {"kept": "none", "missing": "include"}
    if case.other != "listed":
        resets["tail"] = "bin"
    if case.other == "none":
        resets |= {"exact": "reverse", "squared": False}
    if (case.view == "transposed" and case.inplace) or case.view == "columns apart":
        resets["inplace"] = False
    if case.transform == "per sequence" and case.layout == "without offsets":
        resets["transform"] = "temperature"
    if case.extreme == "absent" and case.other != "none":
        resets["extreme"] = "none"
    if case.vocab == 1:
        resets["extreme"] = "none"
    if case.function == "divergence" or case.other not in ("none", "whole", "near"):
        resets["rows"] = "own"
    elif case.rows != "own" and case.transform.startswith("per "):
        resets["transform"] = "temperature"
    if case.extreme == "absent" and resets.get("rows", case.rows) != "own":
        # The target of another token of the row may be absent.
        resets["extreme"] = "none"
    if case.function != "loss" or case.extreme == "absent":
        resets["listed"] = "none"
    if case.ranks > 1:
        resets["vocab"] = max(case.vocab, 2 * case.ranks)
    return resets


def _counts_tokens(spec: oracle.Spec) -> bool:
    """Return whether all means of a loss are over tokens, so that it needs no sequences."""
    aggregates = {spec.aggregate, spec.kl_aggregate, spec.entropy_aggregate}
    return aggregates <= {"token-mean", "token-sum", None}


def covering(seed: int = 0, **fixed: Any) -> list[CallCase]:
    """Return cases in which every two values of two options meet, if `legal` allows it.

    For a pair of values that is missing, a few random cases with it are drawn. The one with the
    most missing pairs is taken.

    fixed   options that have one value in all cases
    """
    rng = random.Random(seed)
    # dict.fromkeys removes repeated values, and keeps their order.
    axes = {name: dict.fromkeys(AXES[name]) for name in PAIRED if name not in fixed}
    if "objective" in axes:
        axes["objective"] = dict.fromkeys(KINDS)
    covered: set[Any] = set()
    cases: list[CallCase] = []

    def pairs(case: CallCase) -> set[Any]:
        """Return all pairs ((axis, value), (axis, value)) of a case."""
        values = [(name, getattr(case, name)) for name in axes]
        return set(combinations(values, 2))

    for (first_name, first_values), (second_name, second_values) in combinations(axes.items(), 2):
        for first, second in product(first_values, second_values):
            pair = ((first_name, first), (second_name, second))
            if pair in covered:
                continue
            wanted = {**dict(pair), **fixed}
            candidates = []
            for _ in range(6):
                case = random_case(rng, **{"objective": rng.choice(KINDS), **wanted})
                # `legal` may have changed the pair.
                values = [*pair, *fixed.items()]
                if all(getattr(case, name) == value for name, value in values):
                    candidates.append(case)
            if candidates:
                cases.append(max(candidates, key=lambda case: len(pairs(case) - covered)))
                covered |= pairs(cases[-1])
    return cases


def each_value(
    cases: list[CallCase], combined_with: Sequence[str], axes: Sequence[str]
) -> list[CallCase]:
    """Return some of the cases, with every combination that occurs in them.

    A combination is a value of one of `axes`, together with values of all of `combined_with`.

    combined_with, axes   names of fields of CallCase
    """
    covered: set[Any] = set()
    chosen = []
    for case in cases:
        fixed_values = tuple(getattr(case, name) for name in combined_with)
        combinations_of_case = {(*fixed_values, name, getattr(case, name)) for name in axes}
        if combinations_of_case - covered:
            chosen.append(case)
        covered |= combinations_of_case
    return chosen


def random_case(rng: random.Random, **fixed: Any) -> CallCase:
    """Return a random case.

    rng     the random generator
    fixed   options that are not drawn. `legal` resets them if they do not fit the others.
    """
    options = {name: rng.choice(values) for name, values in AXES.items()}
    # Each option has its default half of the time. Otherwise `legal` would reset most of them.
    default = CallCase()
    for name in options:
        if rng.random() >= 0.5:
            options[name] = getattr(default, name)
    options["function"] = rng.choice(AXES["function"])
    options["source"] = rng.choice(AXES["source"])
    return legal(CallCase(**{**options, "seed": rng.randrange(10**6), **fixed}))


# ---- the tensors of a case


@dataclass
class SecondDistribution:
    """A reference or teacher, see `CallCase.other`.

    kind        the value of `CallCase.other`
    rows        float64 [N, V], its logits before the transform
    given       the tensors that the caller passes: logits, or hidden and weight
    transform   its temperature, softcap and scale
    ids         the ids at which a teacher is known, for each token; None: all
    """

    kind: str
    rows: Tensor
    given: dict[str, Tensor]
    transform: dict[str, Any]
    ids: list[list[int]] | None = None


@dataclass
class Problem:
    """The tensors of a call, with N tokens.

    given         the tensors that the caller passes: logits, or hidden, weight and bias. NaN and
                  inf stand where nothing may read, and between rows.
    clean         the same with 0 there, contiguous, for the oracle
    targets       as the caller passes them, with ids outside of the vocabulary where masked
    ids           int64 [N]: the targets, valid everywhere
    sequences     the tokens of each sequence
    fields        further fields of the batch, as the caller passes them
    seen          the same without NaN, for the oracle
    trained       bool [N]
    transform     temperature, softcap and scale
    temperature   as the caller passes it
    sets          the candidate set of each token, or None
    keep          bool [N, V]: the ids in the softmax of each token; None: all
    other         the reference, or None
    at            extra ids of each token whose log-probs are asked for, or None
    rows          int64 [N]: the row of each token; None: token i has row i
    terms         (ids of each token, values of logp_terms, values of prob_terms), or None
    upstream      the upstream gradients of log-probs and statistics by name
    columns       the part of the vocabulary that this rank has
    """

    case: CallCase
    given: dict[str, Tensor]
    clean: dict[str, Tensor]
    targets: Tensor
    ids: Tensor
    sequences: list[list[int]]
    fields: dict[str, Any]
    seen: dict[str, Any]
    trained: Tensor
    transform: dict[str, Any]
    temperature: Any
    sets: list[list[int]] | None = None
    keep: Tensor | None = None
    other: SecondDistribution | None = None
    at: list[list[int]] | None = None
    rows: Tensor | None = None
    terms: tuple[list[list[int]], Tensor, Tensor] | None = None
    upstream: dict[str, Tensor] = field(default_factory=dict)
    columns: slice = field(default_factory=lambda: slice(None))

    @property
    def spec(self) -> oracle.Spec:
        """The loss of the case, as the oracle computes it."""
        return SPECS[self.case.objective]

    @property
    def shape(self) -> torch.Size:
        """The shape of the targets: [B, T], or [N] if sequences are packed."""
        return self.targets.shape

    def by_row(self, x: Tensor) -> Tensor:
        """Return which rows have a token for which x is True, bool [rows, ...].

        x   bool [N, ...], a value per token
        """
        if self.rows is None:
            return x
        counts = torch.zeros(self.leading.numel(), *x.shape[1:], dtype=torch.int64)
        return counts.index_add(0, self.rows, x.long()) > 0

    @property
    def leading(self) -> torch.Size:
        """The shape of logits or hidden states without their last dimension."""
        return next(iter(self.clean.values())).shape[:-1]


def select_tokens(
    p: Problem, rows: list[int], part_of: Callable[[Tensor], Tensor], **changes: Any
) -> Problem:
    """Return the problem p with only some of its tokens.

    rows      the indices of these tokens, 0 to N - 1
    part_of   returns the part of a tensor that has a value per token or per sequence
    changes   fields of the result that are set to other values
    """

    def part_of_field(x: Any) -> Any:
        """Return part_of(x), for a dictionary the parts of its tensors. A head is not changed."""
        if isinstance(x, dict):
            return {
                name: value if name in ("weight", "bias") else part_of_field(value)
                for name, value in x.items()
            }
        has_rows = isinstance(x, Tensor) and x.dim() > 0
        return part_of(x) if has_rows else x

    def part_of_lists(lists: list[list[int]] | None) -> list[list[int]] | None:
        """Return the lists of the tokens `rows`."""
        return None if lists is None else [lists[i] for i in rows]

    other = p.other
    if other is not None:
        other = replace(
            other,
            rows=other.rows[rows],
            given=part_of_field(other.given),
            ids=part_of_lists(other.ids),
        )
    fields = {
        "given": part_of_field(p.given),
        "targets": part_of_field(p.targets),
        "fields": part_of_field(p.fields),
        "transform": part_of_field(p.transform),
        "temperature": part_of_field(p.temperature),
        "other": other,
        "sets": part_of_lists(p.sets),
    }
    return replace(p, **{**fields, **changes})


def select_sequences(p: Problem, sequences: list[int]) -> Problem:
    """Return the padded problem p [B, T] with only some of its sequences.

    sequences   the indices of these sequences, 0 to B - 1
    """
    num_sequences, length = p.shape
    tokens = torch.arange(num_sequences * length).view(num_sequences, length)
    rows = tokens[sequences].reshape(-1).tolist()

    def part_of(x: Tensor) -> Tensor:
        """Return the rows of the sequences of a tensor [B, ...], and others unchanged."""
        return x[sequences].contiguous() if len(x) == num_sequences else x

    upstream = {
        name: part_of(x) if x.dim() and name != "at" else x for name, x in p.upstream.items()
    }
    ids_at = None
    if p.at is not None:
        # The upstream gradients of all tokens' ids are in one vector.
        ids_at = [p.at[i] for i in rows]
        upstream_of_token = p.upstream["at"].split([len(ids) for ids in p.at])
        upstream["at"] = torch.cat([upstream_of_token[i] for i in rows])
    clean = {name: x if name in ("weight", "bias") else part_of(x) for name, x in p.clean.items()}
    seen = {
        name: part_of(x) if isinstance(x, Tensor) and x.dim() else x for name, x in p.seen.items()
    }
    return select_tokens(
        p,
        rows,
        part_of,
        ids=p.ids[rows],
        trained=p.trained[rows],
        upstream=upstream,
        at=ids_at,
        keep=None if p.keep is None else p.keep[rows],
        clean=clean,
        seen=seen,
        sequences=[list(range(length * i, length * (i + 1))) for i in range(len(sequences))],
    )


def slice_vocabulary(tensors: dict[str, Tensor], columns: slice) -> dict[str, Tensor]:
    """Return the tensors of one shard of the vocabulary.

    tensors   "logits" [..., V], "weight" [V, H] and "bias" [V] are sliced, others unchanged
    columns   the ids of the shard
    """
    parts = dict(tensors)
    if "logits" in parts:
        parts["logits"] = parts["logits"][..., columns]
    for name in ("weight", "bias"):
        if name in parts:
            parts[name] = parts[name][columns]
    return parts


def _transposed(x: Tensor) -> Tensor:
    """Return the same values with the first and another dimension swapped in memory."""
    dim = -2 if x.dim() > 2 else -1
    return x.transpose(0, dim).contiguous().transpose(0, dim)


def _columns_apart(x: Tensor) -> Tensor:
    """Return the same values with a NaN after each element in memory."""
    return torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0]


def _rows_apart(x: Tensor) -> Tensor:
    """Return the same values with NaN after each row in memory."""
    return torch.cat([x, torch.full_like(x, math.nan)], -1)[..., : x.shape[-1]]


#: The strides of logits, hidden states and weight.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": _transposed,
    "columns apart": _columns_apart,
    "rows apart": _rows_apart,
}
#: Values of elements that the package must not read.
RUBBISH = (math.nan, math.inf, -math.inf, 1e30)


def as_caller_passes(x: Tensor, seed: int) -> Tensor:
    """Return integers or bools as a caller may pass them, with the same values as x.

    x      int64, int32 or bool
    seed   if odd, the result has another dtype: int32 for int64, int64 for others. If a multiple of
           3, the result has a gap after each element in memory.
    """
    if seed % 2 == 1:
        x = x.int() if x.dtype == torch.int64 else x.long()
    if seed % 3 == 0:
        x = torch.stack([x, x + x], -1)[..., 0]
    return x


def _alternating(shape: tuple[int, ...], even: int, odd: int) -> Tensor:
    """Return int64 [*shape] with `even` at tokens 0, 2, 4, ... and `odd` at tokens 1, 3, 5, ..."""
    return even + (odd - even) * (torch.arange(math.prod(shape)).view(shape) % 2)


@cache
def problem(case: CallCase) -> Problem:
    """Draw the tensors of a case. Each call returns the same tensors, so do not write to them.

    All numbers come from the seed of the case.
    """
    g = torch.Generator().manual_seed(case.seed)
    spec = SPECS[case.objective]
    lengths = torch.tensor(case.lengths, dtype=torch.int64)
    if case.layout == "padded":
        shape: tuple[int, ...] = (len(lengths), max(case.lengths, default=4))
    else:
        shape = (int(lengths.sum()),)
    num_tokens = math.prod(shape)
    offsets = None
    if case.layout == "packed":
        zero = torch.zeros(1, dtype=torch.int64)
        offsets = torch.cat([zero, lengths.cumsum(0)]).to(torch.int32)

    def normal(*size: int) -> Tensor:
        """Draw normal numbers, float64 of this size or, without one, of the targets' shape."""
        return torch.randn(size or shape, generator=g, dtype=torch.float64)

    def uniform(*size: int) -> Tensor:
        """Draw numbers in [0, 1), float64 of this size or, without one, of the targets' shape."""
        return torch.rand(size or shape, generator=g, dtype=torch.float64)

    # The mask and the targets.
    in_sequence = torch.ones(shape, dtype=torch.bool)
    if case.layout == "padded":
        in_sequence = torch.arange(shape[1]) < lengths[:, None]
    is_some = in_sequence & (uniform() < 0.75)
    masks = {"none": in_sequence, "some": is_some, "all": torch.zeros_like(in_sequence)}
    mask = masks[case.mask]
    has_mask = case.mask != "none" or not bool(in_sequence.all())
    trained = mask.reshape(-1)
    ids = torch.randint(case.vocab, (num_tokens,), generator=g)

    # The logits of each token.
    transform = _transform(case, shape, uniform)
    row_of = None
    if case.rows == "own":
        leaves, logits_of_rows = _leaves(case, shape, ids, transform, normal, g)
        logits = logits_of_rows
    else:
        row_of, num_rows = _rows_of_tokens(case, num_tokens, g)
        if case.rows == "shared":
            # Half of the tokens of a row have the same target.
            ids = torch.where(uniform(num_tokens) < 0.5, row_of % case.vocab, ids)
        row_ids = torch.zeros(num_rows, dtype=torch.int64).index_put((row_of,), ids)
        leaves, logits_of_rows = _leaves(case, (num_rows,), row_ids, transform, normal, g)
        logits = logits_of_rows[row_of]

    sets = None
    keep = None
    if case.draws_sets:
        sets, keep, outside = _sets(case, ids, g)
        if case.missing == "mask":
            trained = trained & ~outside
    trained_tokens = trained.view(shape)

    # The other fields of the batch.
    sequences = oracle.sequences_of(torch.zeros(shape), offsets)
    rows = oracle.Rows(logits, ids, transform, sequences, keep=keep)
    logps = rows.chosen.detach().reshape(shape)
    seen = _fields(case, logps, sequences, normal, uniform)
    rubbish = torch.tensor(RUBBISH).repeat(num_tokens // 4 + 1)[:num_tokens].view(shape)

    def spoil(x: Any) -> Any:
        """Put RUBBISH into the tokens of x that are not trained, as fp32.

        x is returned unchanged if it does not have a value per token.
        """
        if isinstance(x, Tensor) and x.shape == shape:
            return torch.where(trained_tokens, x, rubbish).float()
        return x

    fields = {name: spoil(x.float()) for name, x in seen.items()}
    if case.seed % 4 == 3:
        # float64, the default dtype of NumPy.
        fields = {name: x.double() for name, x in fields.items()}
    structure: dict[str, Any] = {
        "mask": as_caller_passes(mask, case.seed) if has_mask else None,
        "cu_seqlens": None if offsets is None else as_caller_passes(offsets, case.seed),
    }
    if "group-mean" in (spec.aggregate, spec.kl_aggregate, spec.entropy_aggregate):
        structure["groups"] = torch.arange(len(sequences)) // 2
    if case.given == "marked":
        structure["on_policy"] = _marked(case, shape, len(sequences), g)
    rows_field = {}
    if row_of is not None:
        no_row = _alternating(shape, even=10**6, odd=-(10**6))
        rows_field["rows"] = torch.where(mask, row_of.view(shape), no_row)
    targets = ids.view(shape)
    if has_mask:
        no_id = _alternating(shape, even=case.vocab + 7, odd=case.vocab + 7 - 2000)
        targets = torch.where(mask, targets, no_id)

    p = Problem(
        case=case,
        given={},
        clean=leaves,
        targets=as_caller_passes(targets, case.seed),
        ids=ids,
        sequences=sequences,
        fields={**fields, **structure, **rows_field},
        seen={**seen, **structure, "mask": trained_tokens},
        trained=trained,
        transform=transform,
        temperature=spoil(transform["temperature"]),
        sets=sets,
        keep=keep,
        rows=row_of,
    )
    p.given = _poisoned(p)
    if case.other != "none":
        p.other = _other(p, logits_of_rows, normal, g)
    if case.also in ("at", "all"):
        p.at = _random_ids(num_tokens, min(case.vocab, 4), case.vocab, g)
    for name in ("logps", "entropy", "sum_squares", "log_kept_mass", "divergence"):
        p.upstream[name] = normal()
    p.upstream["loss"] = torch.tensor(case.upstream)
    p.upstream["at"] = normal(sum(len(ids_of_token) for ids_of_token in p.at or []))
    if case.listed != "none":
        p.terms = _terms(num_tokens, case.vocab, keep, normal, g)
    return p


def _rows_of_tokens(case: CallCase, num_tokens: int, g: torch.Generator) -> tuple[Tensor, int]:
    """Return the row of each token, int64 [N], and the number of rows.

    This is for tokens whose logits are not in their own order, see `CallCase.rows`. "shuffled"
    gives a permutation of N rows. "shared" draws one of N // 2 + 1 rows for each token, so that
    some rows have several tokens and some have none.

    num_tokens   N
    """
    if case.rows == "shuffled":
        return torch.randperm(num_tokens, generator=g), num_tokens
    num_rows = num_tokens // 2 + 1
    return torch.randint(num_rows, (num_tokens,), generator=g), num_rows


def _random_ids(num_tokens: int, most: int, vocab: int, g: torch.Generator) -> list[list[int]]:
    """Return a list of 0 to `most` different random ids for each of `num_tokens` tokens.

    most    at most the size of the vocabulary
    vocab   ids are below this number
    """
    counts = torch.randint(0, most + 1, (num_tokens,), generator=g).tolist()
    return [torch.randperm(vocab, generator=g)[:count].tolist() for count in counts]


def _terms(
    num_tokens: int,
    vocab: int,
    keep: Tensor | None,
    normal: Callable[..., Tensor],
    g: torch.Generator,
) -> tuple[list[list[int]], Tensor, Tensor]:
    """Draw `Problem.terms`, the loss terms at extra ids of N = `num_tokens` tokens.

    Returns (0 to 4 ids of each token, values of logp_terms, values of prob_terms). The values are
    fp32 [number of ids of all tokens].

    keep     bool [N, V], the ids in the softmax of each token, from which its ids are drawn; None:
             all
    normal   draws normal numbers of a shape, see `problem`
    """
    if keep is None:
        keep = torch.ones(num_tokens, vocab, dtype=torch.bool)
    lists = []
    for i, row in enumerate(keep):
        order = torch.randperm(int(row.sum()), generator=g)
        lists.append(row.nonzero()[:, 0][order][: i % 5].tolist())
    logp_values, prob_values = normal(2, sum(len(ids) for ids in lists)).float()
    return lists, logp_values, prob_values


def _marked(
    case: CallCase, shape: tuple[int, ...], num_sequences: int, g: torch.Generator
) -> Tensor:
    """Draw the field `on_policy` of a batch: which tokens or sequences are on-policy.

    Returns one value per token, in the shape of the targets, or one per sequence [B, 1]. The dtype
    is that of `as_caller_passes`.

    shape           of the targets. Packed targets without offsets have no sequences and get values
                    of tokens.
    num_sequences   B
    """
    by_token = case.layout == "without offsets" or case.seed % 3 == 0
    size = shape if by_token else (num_sequences, 1)
    return as_caller_passes(torch.rand(size, generator=g) < 0.5, case.seed)


def _transform(
    case: CallCase, shape: tuple[int, ...], uniform: Callable[..., Tensor]
) -> dict[str, Any]:
    """Return temperature, softcap and scale of the logits, see `CallCase.transform`.

    The temperature is a number, or fp32 with one value per token or sequence, in [0.4, 2). A
    softcap of None means none.

    shape     of the targets: (B, T), or (N,) if sequences are packed
    uniform   draws numbers in [0, 1) of a shape, see `problem`
    """
    plain: dict[str, Any] = {"temperature": 1.0, "softcap": None, "scale": 1.0}
    if case.transform == "per token":
        return plain | {"temperature": 0.4 + 1.6 * uniform(*shape).float()}
    if case.transform == "per sequence":
        size = (len(case.lengths), 1) if len(shape) == 2 else (len(case.lengths),)
        return plain | {"temperature": 0.4 + 1.6 * uniform(*size).float()}
    changes: dict[str, dict[str, Any]] = {
        "none": {},
        "temperature": {"temperature": 0.7},
        "softcap": {"softcap": 15.0},
        "scale": {"scale": -1.7},
        "everything": {"temperature": 1.3, "softcap": 9.0, "scale": -0.8},
    }
    return plain | changes[case.transform]


def _leaves(
    case: CallCase,
    shape: tuple[int, ...],
    ids: Tensor,
    transform: dict[str, Any],
    normal: Callable[..., Tensor],
    g: torch.Generator,
) -> tuple[dict[str, Tensor], Tensor]:
    """Draw logits, or hidden states and a head.

    Returns (the tensors that get a gradient by name, in the dtypes of the case; the logits that
    they have, float64 [rows, V]). The tensors are "logits" [*shape, V], or "hidden" [*shape, H],
    "weight" [V, H] and optionally "bias" [V].

    shape       of the rows, without the vocabulary or width
    ids         int64 [rows], a target of each row, to which extreme logits refer
    transform   of the logits, whose sign of the scale says which logits are likely
    normal      draws normal numbers of a shape, see `problem`
    """
    dtype = DTYPES[case.dtype]
    if case.source == "hidden":
        head_dtype = torch.bfloat16 if case.head == "bfloat16" else dtype
        weight_scale = case.spread * case.width**-0.5
        leaves = {
            "hidden": normal(*shape, case.width).to(dtype),
            "weight": (weight_scale * normal(case.vocab, case.width)).to(head_dtype),
        }
        if case.bias != "none":
            leaves["bias"] = normal(case.vocab).to(head_dtype)
        return leaves, oracle.project(leaves, torch.float64).detach()
    logits = (case.spread * normal(ids.numel(), case.vocab)).clamp(-6e4, 6e4)
    sign = math.copysign(1.0, transform["scale"])
    logits = _with_extremes(case, logits, ids, sign, g).to(dtype)
    return {"logits": logits.view(*shape, case.vocab)}, logits.double()


def _with_extremes(
    case: CallCase, logits: Tensor, ids: Tensor, sign: float, g: torch.Generator
) -> Tensor:
    """Return logits [rows, V] with the values that `case.extreme` asks for, see `CallCase.extreme`.

    logits   float64 [rows, V], which may be overwritten
    ids      int64 [rows], the target of each row
    sign     the sign of the scale: with -1, small logits are likely
    """
    num_rows, vocab = logits.shape
    if case.extreme == "far":
        distances = torch.tensor([0.0, 60.0, 88.0, 100.0, 300.0, 700.0])
        distance = distances[torch.randint(6, (num_rows,), generator=g)].double()
        far_ids = ids if case.seed % 2 else torch.zeros_like(ids)
        logits.scatter_add_(1, far_ids[:, None], -sign * distance[:, None])
    elif case.extreme == "confident":
        likely = torch.randint(vocab, (num_rows, 1), generator=g)
        distance = torch.full((num_rows, 1), 20.0 * sign, dtype=torch.float64)
        logits.scatter_add_(1, likely, distance)
    elif case.extreme == "absent":
        # Of a fifth of the rows, only the target is left.
        is_alone = (torch.arange(num_rows) % 5 == 2)[:, None]
        absent = (torch.rand(num_rows, vocab, generator=g) < 0.4) | is_alone
        logits.masked_fill_(absent.scatter(1, ids[:, None], False), -sign * math.inf)
    elif case.extreme == "ends":
        # In turn: around -6e4, around 6e4, around 1e4, and from one end to the other.
        turn = torch.arange(num_rows) % 4
        shift = torch.tensor([-6e4, 6e4, 1e4, 0.0])[turn, None]
        factor = torch.tensor([1, 1, 1, 1e4])[turn, None]
        logits = ((logits + shift) * factor).clamp_(-65_504, 65_504)
    return logits


def _sets(
    case: CallCase, ids: Tensor, g: torch.Generator
) -> tuple[list[list[int]], Tensor, Tensor]:
    """Draw the candidate set of each token, see `CallCase.kept`.

    ids   int64 [N], the targets

    Returns
    sets      the ids of each set; empty: the token has none
    keep      bool [N, V], the ids in the softmax of each token
    outside   bool [N], tokens whose target is not in their set
    """
    num_tokens = len(ids)
    largest = case.vocab if case.kept == "long" else min(case.vocab, 9)
    sizes = torch.randint(1, largest + 1, (num_tokens,), generator=g).tolist()
    share = {"some": 0.6, "all": 1.1, "empty": 0.0, "whole": 1.1, "long": 0.9}[case.kept]
    has_set = (torch.rand(num_tokens, generator=g) < share).tolist()
    sets = []
    keep = torch.zeros(num_tokens, case.vocab, dtype=torch.bool)
    for i, target in enumerate(ids.tolist()):
        order = torch.randperm(case.vocab, generator=g).tolist()
        chosen = order if case.kept == "whole" else order[: sizes[i]]
        # A third of the sets gets the target, a third loses it, and a third stays as drawn.
        if i % 3 == 0 and target not in chosen:
            chosen[-1] = target
        elif i % 3 == 1 and target in chosen and case.vocab > 1 and case.kept != "whole":
            chosen = [x for x in chosen if x != target] or [(target + 1) % case.vocab]
        if has_set[i]:
            sets.append(chosen)
            keep[i, chosen] = True
        else:
            sets.append([])
            keep[i] = True
    outside = ~keep.gather(1, ids[:, None])[:, 0]
    if case.missing == "full":
        keep |= outside[:, None]
    if case.function == "divergence":
        # A divergence has no targets.
        return sets, keep, torch.zeros_like(outside)
    return sets, keep.scatter(1, ids[:, None], True), outside


def _fields(
    case: CallCase,
    logps: Tensor,
    sequences: list[list[int]],
    normal: Callable[..., Tensor],
    uniform: Callable[..., Tensor],
) -> dict[str, Any]:
    """Draw the advantages, log-probs of other policies and weights of the batch.

    Returns tensors by the name of their field. They are float64, but each number is one of fp32. A
    tensor has one value per token, in the shape of the targets, or one per sequence, [B] or [B, 1].

    logps             the policy's log-probs, in the shape of the targets. Those of other policies
                      are drawn near them.
    sequences         the tokens of each sequence
    normal, uniform   draw numbers of a shape, by default that of the targets, see `problem`
    """
    spec = SPECS[case.objective]
    num_sequences = len(sequences)
    without_offsets = case.layout == "without offsets"
    # All are drawn in each case, so that a case has the same numbers whatever `given` is.
    per_token = normal()
    per_column = normal(num_sequences, 1)
    advantages = normal(num_sequences, 1)
    if case.given == "token":
        advantages = per_token
    elif case.given == "column":
        advantages = per_column
    if without_offsets:
        advantages = normal()
    elif case.given not in ("column", "token") and num_sequences != logps.numel():
        advantages = advantages[:, 0]
    advantages = torch.where(uniform(*advantages.shape) < 0.15, 0.0, advantages)

    distance = torch.where(uniform() < 0.5, 0.1, 0.6)
    old_logps = logps - distance * normal()
    if spec.trust:
        old_logps = old_logps.clamp(-300.0, -1e-2)
    weight_per_sequence = (
        case.given == "column" and not without_offsets and spec.surrogate != "vespo"
    )
    weight_shape = (num_sequences, 1) if weight_per_sequence else logps.shape
    fields = {
        "advantages": advantages,
        "old_logps": old_logps,
        "ref_logps": logps + 0.7 * normal(),
        "sampler_logps": (old_logps + 0.3 * normal()).clamp(-300.0, -1e-2),
        "weights": torch.where(uniform(*weight_shape) < 0.1, 0.0, 0.3 + uniform(*weight_shape)),
        "nll_weights": 0.1 * uniform(),
    }
    if case.given == "on-policy":
        left_out = {"old_logps", "weights", "nll_weights"}
    elif case.given == "column":
        left_out = {"nll_weights"}
    else:
        left_out = set()
    if case.other != "none":
        left_out.add("ref_logps")
    return {name: x.float().double() for name, x in fields.items() if name not in left_out}


def _poisoned(p: Problem) -> dict[str, Tensor]:
    """Return the tensors that the caller passes, with rubbish where the package must not read.

    These places are rows without a trained token, logits and rows of the weight outside all
    candidate sets, and memory between rows.
    """
    case = p.case
    read_rows = p.by_row(p.trained)
    outside = None
    if p.keep is not None and case.also not in ("log_kept_mass", "all"):
        # A set of one id has a log-prob of 0, so that not even this logit is read.
        has_set = torch.tensor([bool(ids) for ids in p.sets or []])
        is_single = (p.keep.sum(1) == 1) & has_set
        outside = ~p.by_row(p.keep & ~is_single[:, None])
    if case.source == "logits":
        return _poisoned_logits(p, read_rows, outside)
    return _poisoned_head(p, read_rows, outside)


def _poisoned_logits(p: Problem, read_rows: Tensor, outside: Tensor | None) -> dict[str, Tensor]:
    """Return the logits that the caller passes, with RUBBISH where the package must not read.

    read_rows   bool [rows], rows with a trained token
    outside     bool [rows, V], logits outside all candidate sets, or None
    """
    logits = p.clean["logits"]
    x = logits.flatten(0, -2).clone()
    rubbish = torch.tensor(RUBBISH).repeat(len(x) // 4 + 1)[: len(x), None].to(x.dtype)
    x[~read_rows] = rubbish[~read_rows]
    if outside is not None:
        x = torch.where(outside, rubbish, x)
    return {**p.clean, "logits": VIEWS[p.case.view](x.view(logits.shape))}


def _poisoned_head(p: Problem, read_rows: Tensor, outside: Tensor | None) -> dict[str, Tensor]:
    """Return hidden states, weight and bias that the caller passes.

    They are NaN where the package must not read.

    read_rows   bool [rows], rows with a trained token
    outside     bool [rows, V], logits outside all candidate sets, or None
    """
    case = p.case
    unread_ids = None
    if outside is not None:
        read_rows = read_rows & ~outside.all(1)
        if bool(read_rows.any()):
            unread_ids = outside[read_rows].all(0)
    given = dict(p.clean)
    hidden = given["hidden"].clone()
    hidden[~read_rows.view(p.leading)] = math.nan
    given["hidden"] = VIEWS[case.view](hidden)
    for name in ("weight", "bias"):
        if name in given:
            x = given[name].clone()
            if unread_ids is not None and case.other == "none":
                x[unread_ids] = math.nan
            given[name] = x
    given["weight"] = VIEWS[case.view](given["weight"])
    if case.bias == "column":
        given["bias"] = torch.stack([given["bias"], given["bias"]], 1)[:, 0]
    return given


def _other(
    p: Problem, rows: Tensor, normal: Callable[..., Tensor], g: torch.Generator
) -> SecondDistribution:
    """Draw the reference or teacher, see `CallCase.other`.

    Rows that no trained token has are NaN in what the caller passes.

    rows     float64 [rows, V], the policy's logits before the transform
    normal   draws normal numbers of a shape, see `problem`
    """
    case = p.case
    num_rows, vocab = rows.shape
    read_rows = p.by_row(p.trained).view(p.leading)
    transform = p.transform
    if case.other in ("own", "itself"):
        transform = {"temperature": 0.9, "softcap": 15.0, "scale": 1.3}
    if case.source == "hidden":
        if case.other == "near":
            hidden = p.clean["hidden"]
            weight = p.clean["weight"]
            hidden = (hidden.double() + 0.3 * normal(*hidden.shape)).to(hidden.dtype)
        else:
            hidden = normal(*p.leading, 5).bfloat16()
            weight = normal(vocab, 5).bfloat16()
        logits = oracle.project({"hidden": hidden, "weight": weight}, torch.float64)
        hidden = hidden.clone()
        hidden[~read_rows] = math.nan
        given = {"hidden": VIEWS[case.view](hidden), "weight": VIEWS[case.view](weight)}
    else:
        if case.other == "itself":
            normal(num_rows, vocab)  # so that later draws are the same for each `other`
            x = rows
        else:
            noise = normal(num_rows, vocab)
            if case.other == "near":
                x = torch.where(rows.isfinite(), rows, 0.0) + 0.3 * noise
            else:
                x = 3.0 * noise
            x = x.to(torch.bfloat16 if case.seed % 2 else torch.float32)
        poisoned = x.clone().view(*p.leading, vocab)
        poisoned[~read_rows] = math.nan
        given = {"logits": VIEWS[case.view](poisoned)}
        logits = x.double()
    ids = None
    if case.other == "listed":
        ids = _random_ids(num_rows, min(vocab, 6), vocab, g)
    if p.rows is not None:
        logits = logits[p.rows]
    return SecondDistribution(case.other, logits, given, transform, ids)
