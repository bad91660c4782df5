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
    listed       whether the loss has terms at further ids: "none" or "some"
    also         statistics besides log-probs: "nothing", "entropy", "detached" (entropy without
                 gradient), "sum_squares", "at" (further ids), "log_kept_mass" or "all"
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
        changed = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"CallCase({', '.join(changed)})"

    @property
    def draws_sets(self) -> bool:
        return self.kept != "none"

    @property
    def is_composed(self) -> bool:
        """Whether statistics of tokens are composed of several calls, whose gradients are rounded
        one by one.
        """
        pairs = (
            self.rows != "own"
            or self.other == "listed"
            or self.listed != "none"
            or self.also in ("at", "all")
        )
        return self.kept != "none" or pairs

    @property
    def rounds_twice(self) -> bool:
        """Whether an element of a gradient is a sum of gradients that are each rounded to its
        dtype. From logits this takes a second pass, for a divergence or log_kept_mass: the kernel
        and single logits give theirs to different elements.
        """
        beside = self.kept != "none" or self.rows != "own" or self.listed != "none"
        has_second_pass = (self.other != "none" and beside) or self.also in ("log_kept_mass", "all")
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
#: Objectives that differ in what they ask of the rest: levels, passes, filters, KLs, bonuses,
#: selections, groups.
KINDS = (
    "dapo", "gspo, k3 by the ratio", "grpo, k3 and entropy", "vespo", "clip-cov", "entropy quantile, bonus of its own",
    "dppo-kl to the sampler, k3", "off-policy sequences", "distillation", "dapo, exact", "distillation, exact",
)  # fmt: skip
#: Axes whose pairs are covered. The rest is drawn: it does not meet the numbers of a row.
PAIRED = tuple(name for name in AXES if name not in ("lengths", "upstream", "normalizer", "given"))


def legal(r: CallCase) -> CallCase:
    """Return the case, with options that are refused or meaningless with the others reset."""
    plain: dict[str, Any] = {}
    spec = SPECS[r.objective]
    if r.source == "logits":
        plain |= {
            "bias": "none",
            "head": "of hidden",
            "width": 8,
            "frozen": "nothing",
            "weight_grad": "none",
        }
    else:
        plain |= {"inplace": False, "extreme": "none"}
        if r.dtype != "float32":
            plain["head"] = "of hidden"
        if r.frozen != "nothing":
            plain["weight_grad"] = "none"
    if r.function != "loss":
        plain |= {
            "objective": "dapo",
            "given": "everything",
            "normalizer": None,
            "skip_inactive": False,
        }
        plain |= {"upstream": 1.0, "layout": "padded" if r.layout == "packed" else r.layout}
        if r.function == "divergence":
            plain |= {
                "other": "whole" if r.other == "none" else r.other,
                "also": "nothing",
                "missing": "include",
            }
        else:
            plain["other"] = "none"
    else:
        plain["also"] = "nothing"
        if r.layout == "without offsets" and (
            spec.level != "token" or not _counts_tokens(spec) or spec.off_policy is not None
        ):
            plain["layout"] = "packed"
        if spec.beta and spec.kl != "exact":
            plain["other"] = "none"
        if r.other != "none" and not spec.beta:
            plain["objective"] = {"sequence": "gspo, exact"}.get(spec.level, "dapo, exact")
        if spec.kl == "exact" and spec.beta and r.other == "none":
            plain["other"] = "whole"
    now = replace(r, **plain)
    plain = {}
    if not now.draws_sets:
        plain["missing"] = "include"
    if now.other == "listed" and now.draws_sets:
        plain |= {"kept": "none", "missing": "include"}
    if now.other != "listed":
        plain["tail"] = "bin"
    if now.other == "none":
        plain |= {"exact": "reverse", "squared": False}
    if (now.view == "transposed" and now.inplace) or now.view == "columns apart":
        plain["inplace"] = False
    if now.transform == "per sequence" and now.layout == "without offsets":
        plain["transform"] = "temperature"
    if now.extreme == "absent" and now.other != "none":
        plain["extreme"] = "none"
    if now.vocab == 1:
        plain["extreme"] = "none"
    if now.function == "divergence" or now.other not in ("none", "whole", "near"):
        plain["rows"] = "own"
    elif now.rows != "own" and now.transform.startswith("per "):
        plain["transform"] = "temperature"
    if (
        now.extreme == "absent" and plain.get("rows", now.rows) != "own"
    ):  # no target may be among those that are absent
        plain["extreme"] = "none"
    if now.function != "loss" or now.extreme == "absent":
        plain["listed"] = "none"
    if now.ranks > 1:
        plain["vocab"] = max(now.vocab, 2 * now.ranks)
    result = replace(now, **plain)
    return replace(result, inplace=False) if result.is_composed else result


def _counts_tokens(spec: Any) -> bool:
    return {spec.aggregate, spec.kl_aggregate, spec.entropy_aggregate} <= {
        "token-mean",
        "token-sum",
        None,
    }


def covering(seed: int = 0, **fixed: Any) -> list[CallCase]:
    """Return cases in which every two values of two options meet, if `legal` allows it.

    For a pair of values that is missing, a few random cases with it are drawn. The one with the
    most missing pairs is taken.

    fixed   options that have one value in all cases
    """
    rng = random.Random(seed)
    axes = {name: dict.fromkeys(AXES[name]) for name in PAIRED if name not in fixed}
    if "objective" in axes:
        axes["objective"] = dict.fromkeys(KINDS)
    covered: set[Any] = set()
    cases: list[CallCase] = []

    def pairs(case: CallCase) -> set[Any]:
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


def each_value(cases: list[CallCase], beside: Sequence[str], axes: Sequence[str]) -> list[CallCase]:
    """Return some of the cases, which cover each value of `axes` with all values of `beside`."""
    covered: set[Any] = set()
    chosen = []
    for case in cases:
        values_beside = tuple(getattr(case, name) for name in beside)
        combined = {(*values_beside, name, getattr(case, name)) for name in axes}
        if combined - covered:
            chosen.append(case)
        covered |= combined
    return chosen


def random_case(rng: random.Random, **fixed: Any) -> CallCase:
    """Return a random case with the options `fixed`, if `legal` allows them."""
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
    at            further ids of each token whose log-probs are asked for, or None
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
    def spec(self) -> Any:
        return SPECS[self.case.objective]

    @property
    def shape(self) -> torch.Size:
        return self.targets.shape

    def by_row(self, x: Tensor) -> Tensor:
        """bool [N, ...] of tokens -> [rows, ...]: of any token of a row."""
        if self.rows is None:
            return x
        return (
            torch.zeros(self.leading.numel(), *x.shape[1:], dtype=torch.int64).index_add(
                0, self.rows, x.long()
            )
            > 0
        )

    @property
    def leading(self) -> torch.Size:
        """The shape of the rows."""
        return next(iter(self.clean.values())).shape[:-1]


def taken(p: Problem, rows: list[int], some: Callable[[Tensor], Tensor], **changes: Any) -> Problem:
    """Some rows of a problem:

    `some` takes them, or their sequences, out of a tensor that has one of each.
    """

    def of(x: Any) -> Any:
        if isinstance(x, dict):
            return {
                name: value if name in ("weight", "bias") else of(value)
                for name, value in x.items()
            }
        return some(x) if isinstance(x, Tensor) and x.dim() else x

    def lists(x: Any) -> Any:
        return None if x is None else [x[i] for i in rows]

    o = p.other
    other = (
        None if o is None else replace(o, rows=o.rows[rows], given=of(o.given), ids=lists(o.ids))
    )
    parts = {
        name: of(getattr(p, name))
        for name in ("given", "targets", "fields", "transform", "temperature")
    }
    return replace(p, **{**parts, "other": other, "sets": lists(p.sets), **changes})


def of_sequences(p: Problem, sequences: list[int]) -> Problem:
    """Some sequences of a padded problem, as a batch of their own."""
    B, T = p.shape
    rows = torch.arange(B * T).view(B, T)[sequences].reshape(-1).tolist()

    def some(x: Tensor) -> Tensor:
        return x[sequences].contiguous() if len(x) == B else x

    upstream = {name: some(x) if x.dim() and name != "at" else x for name, x in p.upstream.items()}
    at = None if p.at is None else [p.at[i] for i in rows]
    if p.at is not None:
        upstream["at"] = torch.cat([p.upstream["at"].split([*map(len, p.at)])[i] for i in rows])
    return taken(
        p, rows, some, ids=p.ids[rows], trained=p.trained[rows], upstream=upstream, at=at, keep=None if p.keep is None else p.keep[rows],
        clean={name: x if name in ("weight", "bias") else some(x) for name, x in p.clean.items()},
        seen={name: some(x) if isinstance(x, Tensor) and x.dim() else x for name, x in p.seen.items()},
        sequences=[list(range(T * i, T * i + T)) for i in range(len(sequences))],
    )  # fmt: skip


def sliced(tensors: dict[str, Tensor], columns: slice) -> dict[str, Tensor]:
    """The part of logits, weight and bias that belongs to these columns of the vocabulary."""
    part = {
        "logits": lambda x: x[..., columns],
        "weight": lambda x: x[columns],
        "bias": lambda x: x[columns],
    }
    return {name: part[name](x) if name in part else x for name, x in tensors.items()}


#: How rows lie in memory.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: (
        x.transpose(0, -2 if x.dim() > 2 else -1)
        .contiguous()
        .transpose(0, -2 if x.dim() > 2 else -1)
    ),
    "columns apart": lambda x: torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0],
    "rows apart": lambda x: torch.cat([x, torch.full_like(x, math.nan)], -1)[..., : x.shape[-1]],
}
RUBBISH = (math.nan, math.inf, -math.inf, 1e30)


def handed(x: Tensor, seed: int) -> Tensor:
    """Integers or bools as a caller may have them: of another dtype, and of other strides."""
    x = x if seed % 2 == 0 else x.int() if x.dtype == torch.int64 else x.long()
    return x if seed % 3 else torch.stack([x, x + x], -1)[..., 0]


@cache
def problem(r: CallCase) -> Problem:
    """The tensors of a case, the same at every call: nobody may write to them."""
    g = torch.Generator().manual_seed(r.seed)
    lengths, spec, V = torch.tensor(r.lengths, dtype=torch.int64), SPECS[r.objective], r.vocab
    B, N = len(lengths), int(lengths.sum())
    shape = (B, max(r.lengths, default=4)) if r.layout == "padded" else (N,)
    n = math.prod(shape)
    offsets = (
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
        if r.layout == "packed"
        else None
    )

    def normal(*size: int) -> Tensor:
        return torch.randn(size or shape, generator=g, dtype=torch.float64)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size or shape, generator=g, dtype=torch.float64)

    inside = (
        (torch.arange(shape[1]) < lengths[:, None])
        if len(shape) == 2
        else torch.ones(shape, dtype=torch.bool)
    )
    mask = {"none": inside, "some": inside & (uniform() < 0.75), "all": torch.zeros_like(inside)}[
        r.mask
    ]
    has_mask = r.mask != "none" or not bool(inside.all())
    trained = mask.reshape(-1)
    ids, row_of = torch.randint(V, (n,), generator=g), None
    transform = _transform(r, shape, uniform)
    if r.rows == "own":
        leaves, of_rows = _leaves(r, shape, ids, transform, normal, g)
    else:  # of shared ones nobody names some, and half of the tokens of a row are one id
        count = n if r.rows == "shuffled" else n // 2 + 1
        row_of = (
            torch.randperm(n, generator=g)
            if r.rows == "shuffled"
            else torch.randint(count, (n,), generator=g)
        )
        ids = torch.where(uniform(n) < 0.5, row_of % V, ids) if r.rows == "shared" else ids
        of_one = torch.zeros(count, dtype=torch.int64).index_put((row_of,), ids)
        leaves, of_rows = _leaves(r, (count,), of_one, transform, normal, g)
    rows = of_rows if row_of is None else of_rows[row_of]

    sets = keep = None
    if r.draws_sets:
        sets, keep, outside = _sets(r, ids, g)
        trained = trained & ~outside if r.missing == "mask" else trained
    sequences = oracle.sequences_of(torch.zeros(shape), offsets)
    logps = oracle.Rows(rows, ids, transform, sequences, keep=keep).chosen.detach().reshape(shape)
    seen = _fields(r, logps, sequences, normal, uniform)
    rubbish = torch.tensor(RUBBISH).repeat(n // 4 + 1)[:n].view(shape)
    whole = trained.view(shape)

    def spoil(x: Any) -> Any:
        return (
            torch.where(whole, x, rubbish).float()
            if isinstance(x, Tensor) and x.shape == whole.shape
            else x
        )

    fields = {name: spoil(x.float() if isinstance(x, Tensor) else x) for name, x in seen.items()}
    if r.seed % 4 == 3:  # from NumPy
        fields = {name: x.double() for name, x in fields.items()}
    own: dict[str, Any] = {
        "mask": handed(mask, r.seed) if has_mask else None,
        "cu_seqlens": None if offsets is None else handed(offsets, r.seed),
    }
    named = (
        {}
        if row_of is None
        else {
            "rows": torch.where(
                mask, row_of.view(shape), 10**6 - 2 * 10**6 * (torch.arange(n).view(shape) % 2)
            )
        }
    )
    if "group-mean" in (spec.aggregate, spec.kl_aggregate, spec.entropy_aggregate):
        own["groups"] = torch.arange(len(sequences)) // 2
    if r.given == "marked":
        own["on_policy"] = _marked(r, shape, len(sequences), g)
    targets = (
        torch.where(mask, ids.view(shape), V + 7 - 2000 * (torch.arange(n).view(shape) % 2))
        if has_mask
        else ids.view(shape)
    )
    p = Problem(
        r, {}, leaves, handed(targets, r.seed), ids, sequences, {**fields, **own, **named}, {**seen, **own, "mask": whole}, trained, transform,
        spoil(transform["temperature"]), sets, keep, rows=row_of,
    )  # fmt: skip
    p.given = _poisoned(p)
    if r.other != "none":
        p.other = _other(p, of_rows, normal, g)
    if r.also in ("at", "all"):
        counts = torch.randint(0, min(V, 4) + 1, (n,), generator=g).tolist()
        p.at = [torch.randperm(V, generator=g)[:count].tolist() for count in counts]
    p.upstream = {
        name: normal()
        for name in ("logps", "entropy", "sum_squares", "log_kept_mass", "divergence")
    }
    p.upstream["loss"] = torch.tensor(r.upstream)
    p.upstream["at"] = normal(sum(map(len, p.at or [])))
    if r.listed != "none":  # some of the ids of its softmax, its target among them or not
        inside = torch.ones(n, V, dtype=torch.bool) if keep is None else keep
        lists = [
            row.nonzero()[:, 0][torch.randperm(int(row.sum()), generator=g)][: i % 5].tolist()
            for i, row in enumerate(inside)
        ]
        c, of_p = normal(2, sum(map(len, lists))).float()
        p.terms = lists, c, of_p
    return p


def _marked(r: CallCase, shape: tuple[int, ...], num_sequences: int, g: torch.Generator) -> Tensor:
    """Which tokens are on-policy: one bool a token, or one a sequence where those are known."""
    by_token = r.layout == "without offsets" or r.seed % 3 == 0
    size = shape if by_token else (num_sequences, 1)
    return handed(torch.rand(size, generator=g) < 0.5, r.seed)


def _transform(
    r: CallCase, shape: tuple[int, ...], uniform: Callable[..., Tensor]
) -> dict[str, Any]:
    plain: dict[str, Any] = {"temperature": 1.0, "softcap": None, "scale": 1.0}
    rows = {
        "per sequence": (len(r.lengths), 1) if len(shape) == 2 else (len(r.lengths),),
        "per token": shape,
    }
    if r.transform in rows:
        return {**plain, "temperature": 0.4 + 1.6 * uniform(*rows[r.transform]).float()}
    chosen = {
        "none": {}, "temperature": {"temperature": 0.7}, "softcap": {"softcap": 15.0}, "scale": {"scale": -1.7},
        "everything": {"temperature": 1.3, "softcap": 9.0, "scale": -0.8},
    }  # fmt: skip
    return {**plain, **chosen[r.transform]}


def _leaves(
    r: CallCase,
    shape: tuple[int, ...],
    ids: Tensor,
    transform: dict[str, Any],
    normal: Callable[..., Tensor],
    g: torch.Generator,
) -> tuple[dict[str, Tensor], Tensor]:
    """(the tensors that get a gradient, rounded to their dtype; the logits [N, V] in float64)."""
    V, dtype, n = r.vocab, DTYPES[r.dtype], ids.numel()
    if r.source == "hidden":
        width = r.width
        head = torch.bfloat16 if r.head == "bfloat16" else dtype
        leaves = {
            "hidden": normal(*shape, width).to(dtype),
            "weight": (r.spread * width**-0.5 * normal(V, width)).to(head),
        }
        if r.bias != "none":
            leaves["bias"] = normal(V).to(head)
        rows = oracle.project(leaves, torch.float64)
        return leaves, rows.detach()
    x = (r.spread * normal(n, V)).clamp(-6e4, 6e4)
    sign = math.copysign(1.0, transform["scale"])
    if r.extreme == "far":
        below = torch.tensor([0.0, 60.0, 88.0, 100.0, 300.0, 700.0])[
            torch.randint(6, (n,), generator=g)
        ]
        x.scatter_add_(
            1,
            (ids if r.seed % 2 else torch.zeros_like(ids))[:, None],
            -sign * below[:, None].double(),
        )
    elif r.extreme == "confident":
        x.scatter_add_(
            1,
            torch.randint(V, (n, 1), generator=g),
            torch.full((n, 1), 20.0 * sign, dtype=torch.float64),
        )
    elif r.extreme == "absent":  # of a fifth of the rows all but the target
        gone = (torch.rand(n, V, generator=g) < 0.4) | (torch.arange(n) % 5 == 2)[:, None]
        x.masked_fill_(gone.scatter(1, ids[:, None], False), -sign * math.inf)
    elif r.extreme == "ends":  # far from 0, where a constant changes nothing, and far apart
        x = (x + torch.tensor([-6e4, 6e4, 1e4, 0.0])[torch.arange(n) % 4, None]) * torch.tensor(
            [1, 1, 1, 1e4]
        )[torch.arange(n) % 4, None]
        x.clamp_(-65_504, 65_504)
    x = x.to(dtype)
    return {"logits": x.view(*shape, V)}, x.double()


def _sets(r: CallCase, ids: Tensor, g: torch.Generator) -> tuple[list[list[int]], Tensor, Tensor]:
    """(ids of each row's set, bool [N, V] what each softmax runs over, bool [N] targets that their
    sets lack).
    """
    n, V = len(ids), r.vocab
    sizes = torch.randint(1, min(V, V if r.kept == "long" else 9) + 1, (n,), generator=g).tolist()
    share = {"some": 0.6, "all": 1.1, "empty": 0.0, "whole": 1.1, "long": 0.9}[r.kept]
    has = (torch.rand(n, generator=g) < share).tolist()
    sets, keep = [], torch.zeros(n, V, dtype=torch.bool)
    for i, target in enumerate(ids.tolist()):
        order = torch.randperm(V, generator=g).tolist()
        chosen = order if r.kept == "whole" else order[: sizes[i]]
        if (
            i % 3 == 0 and target not in chosen
        ):  # a third of the targets is put in, a third left out, a third as it falls
            chosen[-1] = target
        elif i % 3 == 1 and target in chosen and V > 1 and r.kept != "whole":
            chosen = [x for x in chosen if x != target] or [(target + 1) % V]
        sets.append(chosen if has[i] else [])
        keep[i, chosen if has[i] else slice(None)] = True
    outside = ~keep.gather(1, ids[:, None])[:, 0]
    if r.missing == "full":
        keep |= outside[:, None]
    if r.function == "divergence":  # no target belongs to a row
        return sets, keep, outside & False
    return sets, keep.scatter(1, ids[:, None], True), outside


def _fields(
    r: CallCase,
    logps: Tensor,
    sequences: list[list[int]],
    normal: Callable[..., Tensor],
    uniform: Callable[..., Tensor],
) -> dict[str, Any]:
    spec = SPECS[r.objective]
    advantages = {"token": normal(), "column": normal(len(sequences), 1)}.get(
        r.given, normal(len(sequences), 1)
    )
    if r.layout == "without offsets":
        advantages = normal()
    elif r.given != "column" and r.given != "token" and len(sequences) != logps.numel():
        advantages = advantages[:, 0]
    advantages = torch.where(uniform(*advantages.shape) < 0.15, 0.0, advantages)
    old = logps - torch.where(uniform() < 0.5, 0.1, 0.6) * normal()
    old = old.clamp(-300.0, -1e-2) if spec.trust else old
    by_sequence = (
        r.given == "column" and r.layout != "without offsets" and spec.surrogate != "vespo"
    )
    each = (len(sequences), 1) if by_sequence else logps.shape
    seen = {
        "advantages": advantages, "old_logps": old, "ref_logps": logps + 0.7 * normal(), "sampler_logps": (old + 0.3 * normal()).clamp(-300.0, -1e-2),
        "weights": torch.where(uniform(*each) < 0.1, 0.0, 0.3 + uniform(*each)), "nll_weights": 0.1 * uniform(),
    }  # fmt: skip
    gone = {"on-policy": ("old_logps", "weights", "nll_weights"), "column": ("nll_weights",)}.get(
        r.given, ()
    )
    gone = gone if r.other == "none" else (*gone, "ref_logps")
    # In fp32, as the caller has them.
    return {name: x.float().double() for name, x in seen.items() if name not in gone}


def _poisoned(p: Problem) -> dict[str, Tensor]:
    """What the caller passes:

    rubbish in rows that are not read, in logits and weights outside of all sets, between the rows.
    """
    r, given, read = p.case, dict(p.clean), p.by_row(p.trained)
    rubbish, outside = torch.tensor(RUBBISH).repeat(len(read) // 4 + 1)[: len(read), None], None
    if p.keep is not None and r.also not in ("log_kept_mass", "all"):
        single = (p.keep.sum(1) == 1) & torch.tensor([bool(x) for x in p.sets or []])
        outside = ~p.by_row(p.keep & ~single[:, None])
    if r.source == "logits":
        x = given["logits"].flatten(0, -2).clone()
        x[~read] = rubbish[~read].to(x.dtype)
        if outside is not None:
            x = torch.where(outside, rubbish.to(x.dtype), x)
        given["logits"] = VIEWS[r.view](x.view(given["logits"].shape))
        return given
    hidden, nobody = given["hidden"].clone(), None
    if outside is not None:
        read = read & ~outside.all(1)
        nobody = outside[read].all(0) if bool(read.any()) else None
    hidden[~read.view(p.leading)] = math.nan
    given["hidden"] = VIEWS[r.view](hidden)
    for name in ("weight", "bias"):
        if name in given:
            x = given[name].clone()
            if nobody is not None and p.case.other == "none":
                x[nobody] = math.nan
            given[name] = VIEWS[r.view](x) if name == "weight" else x
    if r.bias == "column":
        given["bias"] = torch.stack([given["bias"], given["bias"]], 1)[:, 0]
    return given


def _other(
    p: Problem, rows: Tensor, normal: Callable[..., Tensor], g: torch.Generator
) -> SecondDistribution:
    r, kind, (n, V), read = p.case, p.case.other, rows.shape, p.by_row(p.trained)
    own = {"temperature": 0.9, "softcap": 15.0, "scale": 1.3}
    transform = own if kind in ("own", "itself") else p.transform
    if r.source == "hidden":
        h, w = (
            (p.clean["hidden"], p.clean["weight"])
            if kind == "near"
            else (normal(*p.leading, 5).bfloat16(), normal(V, 5).bfloat16())
        )
        h = (h.double() + 0.3 * normal(*h.shape)).to(h.dtype) if kind == "near" else h
        x = oracle.project({"hidden": h, "weight": w}, torch.float64)
        hidden = h.clone()
        hidden[~read.view(p.leading)] = math.nan
        given = {"hidden": VIEWS[r.view](hidden), "weight": VIEWS[r.view](w)}
    else:
        dtype = (torch.float32, torch.bfloat16)[r.seed % 2]
        x = (
            torch.where(rows.isfinite(), rows, 0.0) + 0.3 * normal(n, V)
            if kind == "near"
            else 3.0 * normal(n, V)
        )
        x = rows if kind == "itself" else x.to(dtype)
        logits = x.clone()
        logits[~read] = math.nan
        given, x = {"logits": VIEWS[r.view](logits.view(*p.leading, V))}, x.double()
    ids = None
    if kind == "listed":
        counts = torch.randint(0, min(V, 6) + 1, (n,), generator=g).tolist()
        ids = [torch.randperm(V, generator=g)[:count].tolist() for count in counts]
    return SecondDistribution(kind, x if p.rows is None else x[p.rows], given, transform, ids)
