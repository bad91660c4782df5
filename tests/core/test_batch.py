"""TokenBatch and TokenSets: sequences, shifted targets and other devices; sets of every format and
from logits, cut, joined, shifted. The oracle of sets is a list of lists.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_kernels import (
    EntropyFloor,
    EntropyQuantile,
    Kl,
    NoPolicyTerm,
    Objective,
    OffPolicySequences,
    Options,
    TokenBatch,
    TokenSets,
    TrustRegion,
    grpo_loss,
    linear_grpo_loss,
)
from grpo_kernels.batch import shift_sets, shift_targets
from grpo_kernels.losses import objective_loss
from grpo_kernels.rewards.corrections import off_policy_sequence_mask
from support.bits import same_bits
from support.pairs import label, pairs

OFFSETS = [0, 2, 2, 7, 10]  # four sequences, the second empty
#: All terms; sums of sequences and of tokens.
OBJECTIVE = Objective.preset("gspo", beta=0.1, kl_aggregate="token-mean")


def ids(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def slopes(batch, objective=None):
    """Of a loss, by the log-probs of all tokens: whatever a batch says shows in them."""
    objective = objective or (OBJECTIVE if batch.ref_logps is not None else Objective())
    logps = (
        torch.linspace(-3.0, -0.5, batch.targets.numel()).view(batch.targets.shape).requires_grad_()
    )
    return torch.autograd.grad(objective_loss(logps, batch, objective).loss, logps)[0]


def batch_of(packed, **changes):
    """Every field given, one number a token."""
    shape = (10,) if packed else (3, 4)
    g = torch.Generator().manual_seed(4)
    given = {
        name: torch.rand(shape, generator=g) for name in ("advantages", "weights", "nll_weights")
    }
    given |= {
        name: -1 - torch.rand(shape, generator=g)
        for name in ("old_logps", "ref_logps", "sampler_logps")
    }
    cuts = {"cu_seqlens": torch.tensor(OFFSETS)} if packed else {}
    return TokenBatch(ids(*shape), **{**given, **cuts, **changes})


def test_as_many_rows_as_packed_sequences():
    """A tensor of that length is one number a token; [B, 1] says that it is one a sequence.

    Square batches are not transposed.
    """
    square, values = ids(3, 3), torch.tensor([1.0, 2.0, 3.0])
    assert same_bits(
        slopes(TokenBatch(square, values)), slopes(TokenBatch(square, values[:, None].expand(3, 3)))
    )
    reinforce, offsets = Objective.preset("reinforce"), torch.tensor([0, 2, 2, 3])
    for each, expected in ((values, [1, 2, 3]), (values[:, None], [1, 1, 3])):
        found = slopes(TokenBatch(ids(3), each, cu_seqlens=offsets), reinforce)
        torch.testing.assert_close(-3 * found, torch.tensor(expected).float())


# ---- without advantages

TEACHER = Objective.preset("distillation", kl="k3")
#: Objectives without a policy term.
NO_TERM = {
    "an estimator": (TEACHER, {}),
    "the whole distribution": (Objective.preset("distillation"), {"ref_logits": True}),
    "sequences": (
        replace(TEACHER, level="sequence", kl=Kl("k3", "ratio"), aggregate="seq-mean-token-mean"),
        {},
    ),
    "a bonus of some": (
        Objective(NoPolicyTerm(), entropy_coef=0.1, filters=(EntropyFloor(1.0),)),
        {},
    ),
    "a bonus of the most": (
        Objective(NoPolicyTerm(), entropy_coef=0.1, filters=(EntropyQuantile(0.5),)),
        {},
    ),
    "likelihood alone": (Objective(NoPolicyTerm()), {"skip_inactive": True}),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", NO_TERM)
def test_an_objective_without_a_policy_term_needs_no_advantages(name, packed, backend):
    """Loss and gradient are those with any advantages, from logits and from hidden states."""
    objective, how = NO_TERM[name]
    options = Options(backend, strict=True, skip_inactive=how.get("skip_inactive", False))
    of_term = {"ref_logps": None} if "ref_logits" in how else {}
    any_, none = batch_of(packed, **of_term), batch_of(packed, advantages=None, **of_term)
    assert none.advantages is None and "advantages" not in repr(none)
    hidden, weight = torch.randn(*any_.targets.shape, 8), torch.randn(11, 8)
    teacher = torch.randn(*any_.targets.shape, 11)
    results = []
    for batch in (any_, none, none.to("cpu"), replace(none, mask=torch.ones_like(none.targets))):
        leaves = [x.clone().requires_grad_() for x in (hidden @ weight.T, hidden, weight)]
        given = {"ref_logits": teacher} if "ref_logits" in how else {}
        first = grpo_loss(leaves[0], batch, objective, options=options, **given)
        given = {"reference": (teacher, torch.eye(11))} if given else {}
        second = linear_grpo_loss(*leaves[1:], batch, objective, options=options, **given)
        gradients = torch.autograd.grad(first.loss + second.loss, leaves)
        assert all(x.isfinite().all() and x.any() for x in gradients)
        assert {*first.metrics} >= {"zero_advantage", "entropy"}
        results.append((first.loss, second.loss, *gradients))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def listed_term(logp, values, advantage, sums):
    return advantage * values * logp, advantage * values


@pytest.mark.parametrize(
    "objective, says",
    [
        (Objective(), "Clip"),
        (Objective.preset("sampled_distillation", beta=0.0), "PolicyGradient"),
        (Objective.preset("gspo"), "Clip"),
        (Objective(NoPolicyTerm(), entropy_coef=0.1, filters=(OffPolicySequences(),)), "a filter"),
        (Objective(NoPolicyTerm(), entropy_coef=0.1, filters=(TrustRegion(),)), "a filter"),
        (Objective(NoPolicyTerm(), listed=listed_term), "listed"),
    ],
)
def test_what_reads_advantages_refuses_a_batch_without(objective, says):
    batch = TokenBatch(ids(3, 4), old_logps=-torch.ones(3, 4))
    with pytest.raises(
        ValueError, match=f"^advantages is None, but .*{says}.* see group_advantages"
    ):
        objective_loss(-torch.ones(3, 4), batch, objective, entropy=torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"^advantages is None, but their signs"):
        off_policy_sequence_mask(batch, -torch.ones(3, 4), delta=0.5)


# ---- other devices


@pytest.mark.parametrize("missing", [None, "mask", "full"])
def test_a_batch_goes_to_another_device(missing):
    """Fields and sets; dtypes stay. The loss and the metrics of a copy are those of the batch."""
    kept = TokenSets.from_lists([[i, 11] if i % 3 else [11] for i in range(10)]).with_values(
        torch.arange(17.0)[:16]
    )
    own = {
        "mask": torch.arange(10) % 4 != 1,
        "targets": torch.arange(10, dtype=torch.int32),
        "on_policy": torch.arange(10) % 3 == 0,
        "kept": kept,
    }
    batch, there = replace(batch_of(True), **own, missing=missing), torch.device("meta")
    batch.count_in_mask("trained")  # what is kept beside the fields goes too
    moved = batch.to(there)
    assert (
        isinstance(moved.kept, TokenSets)
        and moved.kept.values is not None
        and moved.kept.values.device == there
    )
    assert (
        all(x.device == there for x in vars(moved).values() if isinstance(x, Tensor))
        and moved.targets.dtype == torch.int32
    )
    logits, objective, options = (
        torch.randn(10, 12),
        Objective.preset("dapo", beta=0.1),
        Options("eager"),
    )
    expected = grpo_loss(logits, batch, objective, options=options)
    assert expected.loss != 0 and expected.metrics["outside_set"] > 0 and batch.to("cpu") is batch
    for copied in (
        copy.deepcopy(batch),
        batch.to("cpu:0"),
    ):  # which is no device of the batch's name
        found = grpo_loss(logits, copied, objective, options=options)
        assert torch.equal(found.loss, expected.loss)
        assert all(
            torch.equal(value, expected.metrics[name]) for name, value in found.metrics.items()
        )


# ---- targets of shifted ids


def test_shift_never_crosses_a_sequence():
    """Of padded ids, and of packed ones whose sequences are known in two ways; a mask is that of
    the tokens.
    """
    at, cuts, segments = (
        torch.arange(10, 21),
        [0, 4, 4, 5, 11],
        torch.tensor([7, 7, 7, 7, 2, 5, 5, 5, 5, 5, 5]),
    )
    completion = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1]).bool()
    expected = [row for lo, hi in pairwise(cuts) for row in [*range(lo + 1, hi), None][: hi - lo]]
    known = [{"cu_seqlens": torch.tensor(cuts).int()}, {"segment_ids": segments}]
    for segmented in known:
        targets, mask = shift_targets(at, mask=completion, **segmented)
        assert mask.tolist() == [row is not None and bool(completion[row]) for row in expected]
        assert all(
            row is None or target == at[row]
            for target, row in zip(targets.tolist(), expected, strict=True)
        )
    two = {"segment_ids": torch.stack([segments, torch.zeros_like(segments)])}
    assert shift_targets(at.repeat(2, 1), **two)[1].tolist() == [
        [row is not None for row in expected],
        [True] * 10 + [False],
    ]
    targets, mask = shift_targets(
        torch.tensor([[5, 6, 7], [9, 1, 2]]), mask=torch.tensor([[0, 1, 1], [0, 1, 0]])
    )
    assert targets.tolist() == [[6, 7, 0], [1, 2, 0]] and mask.int().tolist() == [
        [1, 1, 0],
        [1, 0, 0],
    ]


# ---- sets


INF, NAN = math.inf, math.nan
DTYPES = st.sampled_from([torch.int32, torch.int64])
BOUND = st.none() | st.integers(-10, 10)
SOME = [[3, 1], [], [7], [2, 9, 4], []]
#: For tests of random sets, on busy machines too.
examples = settings(max_examples=60, deadline=None)

#: Rows as lists of ids, in any order, each once; with empty ones and without any.
ROWS = st.lists(st.lists(st.integers(0, 40), max_size=6, unique=True), max_size=8)


def number(row, token):
    """The value of an id in these tests."""
    return row + token / 64


def build(rows, values=False, dtype=torch.int64):
    ids = torch.tensor([token for row in rows for token in row], dtype=dtype)
    offsets = torch.tensor([sum(map(len, rows[:i])) for i in range(len(rows) + 1)])
    numbers = [number(i, token) for i, row in enumerate(rows) for token in row]
    return TokenSets(ids, offsets, torch.tensor(numbers, dtype=torch.float32) if values else None)


def lists(sets):
    cuts = sets.offsets.tolist()
    return [sets.ids[a:b].tolist() for a, b in pairwise(cuts)]


def assert_facts(sets, rows, bound=False):
    """Asserts the ids and the facts that the host knows.

    bound: the known largest id may be an upper bound.
    """
    assert lists(sets) == rows and sets.offsets.dtype == torch.int64
    assert sets.rows == len(sets) == len(rows)
    assert sets.empty_rows == sum(not row for row in rows)
    assert sets.longest == max(map(len, rows), default=0)
    largest = max((token for row in rows for token in row), default=-1)
    assert sets.largest_id >= largest if bound else sets.largest_id == largest
    assert all(
        type(fact) is int for fact in (sets.rows, sets.empty_rows, sets.longest, sets.largest_id)
    )


def assert_part(part, rows, index, bound=True):
    """The rows of this index, with their values."""
    assert_facts(part, [rows[i] for i in index], bound=bound)
    assert part.values is not None and part.values.tolist() == [
        number(i, token) for i in index for token in rows[i]
    ]


def values_of(rows):
    return [[number(i, token) for token in row] for i, row in enumerate(rows)]


# ---- formats


@examples
@given(rows=ROWS, dtype=DTYPES, fill=st.sampled_from([-1, -100, 41]), seed=st.integers(0, 1000))
def test_every_format_gives_the_same_sets(rows, dtype, fill, seed):
    """Ids and offsets, ids and counts, lists, padding wherever it stands in a row; and back."""
    whole, numbers = [*range(len(rows))], values_of(rows)
    sets = build(rows, True, dtype=dtype)
    counts = torch.tensor([len(row) for row in rows], dtype=dtype)
    ids, values = torch.full((len(rows), 8), fill, dtype=dtype), torch.full((len(rows), 8), NAN)
    for i, row in enumerate(rows):
        places = (
            torch.randperm(8, generator=torch.Generator().manual_seed(seed + i))[: len(row)]
            .sort()
            .values
        )
        ids[i, places], values[i, places] = torch.tensor(row, dtype=dtype), torch.tensor(numbers[i])
    of_lists = TokenSets.from_lists(rows, numbers)
    made = [
        sets,
        TokenSets.from_counts(sets.ids, counts, sets.values),
        TokenSets.from_padded(ids, fill, values),
        of_lists,
    ]
    for each in made:
        assert_part(each, rows, whole, bound=False)
    assert {x.ids.dtype for x in made[:3]} <= {dtype} and of_lists.ids.dtype == torch.int32
    for plain in (
        TokenSets.from_counts(sets.ids, counts),
        TokenSets.from_lists([row or None for row in rows]),
        build(rows),
    ):
        assert_facts(plain, rows)
        assert plain.values is None
    assert sets.counts.tolist() == counts.tolist() and sets.row_of.tolist() == [
        i for i, row in enumerate(rows) for _ in row
    ]
    for other in (-1, 77):
        padded, longest = sets.padded(other), max(map(len, rows), default=0)
        assert padded.tolist() == [row + [other] * (longest - len(row)) for row in rows]
        assert_facts(TokenSets.from_padded(padded, other), rows)
    assert sets.mask(41).tolist() == [
        [not row or token in row for token in range(41)] for row in rows
    ]


def test_lists_of_sequences():
    """Each token either has a record or was not generated.

    Sequences without records may have any mask.
    """
    generated = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    records = [[[2, 1], None], [[7], [2, 1], []], None, [[3], [4], [5], [6]]]
    expected = [[[], [2, 1], [], []], [[7], [], [2, 1], []], [[]] * 4, [[3], [4], [5], [6]]]
    assert_facts(
        TokenSets.from_lists(records, generated=generated),
        [row for rows in expected for row in rows],
    )
    # Packed: the same rows, with each sequence cut to another length.
    packed = torch.cat([generated[b, : 4 - b % 2] for b in range(4)])
    records[1], records[3] = records[1][:2], records[3][:3]
    rows = [row for b in range(4) for row in expected[b][: 4 - b % 2]]
    assert_facts(
        TokenSets.from_lists(records, generated=packed, cu_seqlens=torch.tensor([0, 4, 7, 11, 14])),
        rows,
    )
    assert_facts(TokenSets.from_lists(records[0] + records[1], generated=packed[:7]), rows[:7])


# ---- rows


@examples
@given(
    rows=ROWS, start=BOUND, stop=BOUND, step=st.sampled_from([None, 1, 2, -1, -3]), data=st.data()
)
@example(rows=SOME, start=3, stop=1, step=None, data=None)
@example(rows=SOME, start=9, stop=20, step=None, data=None)
def test_rows_are_taken_as_of_a_list(rows, start, stop, step, data):
    """Slices, indices and masks."""
    sets, count = build(rows, True), len(rows)
    assert_part(sets[slice(start, stop, step)], rows, [*range(count)[slice(start, stop, step)]])
    if not count or data is None:
        return
    index = data.draw(st.lists(st.integers(-count, count - 1), max_size=6))
    mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    for where in (
        index,
        torch.tensor(index, dtype=torch.int32),
        torch.tensor(index, dtype=torch.int64),
    ):
        assert_part(sets[where], rows, [i % count for i in index])
    for where in (mask, torch.tensor(mask)):
        assert_part(sets[where], rows, [i for i in range(count) if mask[i]])


@examples
@given(rows=ROWS, more=ROWS, cuts=st.lists(st.integers(0, 8), max_size=3), values=st.booleans())
def test_parts_put_together_are_the_whole(rows, more, cuts, values):
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    sets, others = build(rows, values), build(more, values)
    whole = TokenSets.cat([*(sets[a:b] for a, b in pairwise(edges)), others])
    assert_facts(whole, rows + more, bound=True)
    assert (whole.values is not None) == values and torch.equal(
        whole.offsets[: len(rows) + 1], sets.offsets
    )
    if values:
        assert torch.equal(whole.values, torch.cat([sets.values, others.values]))
    wide = TokenSets.cat([build([[2**40]]), build([[1]], dtype=torch.int32)])
    assert wide.ids.dtype == torch.int64 and lists(wide) == [[2**40], [1]]


@examples
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4), data=st.data())
def test_shifted_packed(lengths, data):
    """The target of a row is in the set of a row, wherever its token has a record."""
    total = sum(lengths)
    rows = data.draw(
        st.lists(
            st.lists(st.integers(0, 40), max_size=3, unique=True), min_size=total, max_size=total
        )
    )
    cuts = torch.tensor([0, *lengths]).cumsum(0)
    index = [i for a, b in pairwise(cuts.tolist()) for i in [*range(a + 1, b), -1][: b - a]]
    segments = torch.repeat_interleave(torch.tensor(lengths))
    for known in ({"cu_seqlens": cuts}, {"cu_seqlens": cuts.int()}, {"segment_ids": segments}):
        shifted = shift_sets(build(rows, True), torch.zeros(total, dtype=torch.int64), **known)
        assert_facts(shifted, [rows[i] if i >= 0 else [] for i in index], bound=True)
        assert shifted.values is not None
        assert shifted.values.tolist() == [
            number(i, token) for i in index if i >= 0 for token in rows[i]
        ]


# ---- from logits: the ids that samplers keep, in the order of each sampler, in float64, one row at
# a time

#: If a sum of probabilities is this near to top_p, or a probability to min_p, fp32 and fp64 may
#: decide differently.
MARGIN = 1e-5
ORDERS = pytest.mark.parametrize("order", ["vllm", "sglang"])


class Oracle:
    """Of a row [V] of fp64 logits over the temperature those that stay, others -inf; `near` says
    how near a decision was.
    """

    def __init__(self):
        self.near = INF

    def top_k(self, z, k):
        if k is None or k < 1 or k >= len(z):
            return z
        return torch.where(z >= z.sort(descending=True).values[k - 1], z, -INF)

    def top_p(self, z, p):
        """Ascending, of equal ones those with the larger id first; a sum that stays at or below 1 -
        p goes.
        """
        if p is None or p == 1:
            return z
        ascending = len(z) - 1 - z.flip(0).sort(stable=True).indices
        sums = z.softmax(0)[ascending].cumsum(0)
        self.near = min(self.near, float((sums - (1 - p))[sums > 0].abs().min()))
        gone = sums <= 1 - p
        gone[-1] = False
        return z.index_fill(0, ascending[gone], -INF)

    def min_p(self, z, p):
        share = z.softmax(0) / z.softmax(0).max()
        if p and (share < 1).any():
            self.near = min(self.near, float((share[share < 1] - p).abs().min()))
        return torch.where(share >= (p or 0.0), z, -INF)

    def kept(self, logits, order, temperature, k, p, m):
        z = logits.double() / (max(temperature, 0.01) if order == "vllm" else temperature)
        if order == "vllm":
            z = self.top_p(self.top_k(self.min_p(z, m), k), p)
        elif m:
            z = self.min_p(self.top_p(self.top_k(z, k), p), m)
        else:
            z = torch.where(self.top_k(z, k) > -INF, self.top_p(z, p), -INF)
        return (z > -INF).nonzero()[:, 0].tolist()


def oracle(logits, order, temperature=1.0, **rules):
    one, given = Oracle(), [rules.get(name) for name in ("top_k", "top_p", "min_p")]
    return [
        one.kept(row, order, temperature, *given) for row in logits.reshape(-1, logits.shape[-1])
    ], one.near


def kept(logits, **rules):
    return lists(TokenSets.from_logits(logits, **rules))


@ORDERS
@examples
@given(
    # A coarse grid: many logits are equal.
    rows=st.lists(
        st.lists(st.integers(-6, 6) | st.just(-INF), min_size=7, max_size=7), min_size=1, max_size=3
    ),
    grid=st.sampled_from([1.0, 0.5]),
    temperature=st.sampled_from([1.0, 0.7, 2.0, 0.001]),
    top_k=st.sampled_from([None, 0, -1, 1, 2, 3, 7, 9]),
    top_p=st.sampled_from([None, 1.0, 0.05, 0.33, 0.71, 0.9, 0.999]),
    min_p=st.sampled_from([None, 0.0, 0.01, 0.2, 0.77, 1.0]),
)
def test_as_the_samplers_do(order, rows, grid, temperature, **rules):
    logits = torch.tensor(rows) * grid
    assume((logits > -INF).any(-1).all())
    expected, near = oracle(logits, order, temperature, **rules)
    assume(near > MARGIN)
    sets = TokenSets.from_logits(logits, temperature=temperature, order=order, **rules)
    nothing = (
        rules["top_k"] in (None, 0, -1, 7, 9) and rules["top_p"] in (None, 1) and not rules["min_p"]
    )
    assert_facts(sets, [[]] * len(rows) if nothing else expected)
    assert sets.ids.dtype == torch.int32


RULES = [{"top_k": 50}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.9, "min_p": 0.02}]


TEMPERATURES = {
    "one": torch.tensor(0.8), "of sequences": torch.tensor([0.7, 1.3]),
    "of tokens": torch.tensor([[0.3, 1.0, 2.0, 0.001, 0.8], [0.7, 0.9, 5.0, 1.0, 0.6]]),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    pairs(
        rules=RULES, dtype=[torch.float32, torch.bfloat16, torch.float16, torch.float64], temperature=list(TEMPERATURES),
        order=["vllm", "sglang"], targets=[False, True],
    ),
    ids=label,
)  # fmt: skip
def test_of_a_model(case):
    """Flat and peaked rows of some thousand logits:

    the sort is of few in the one and of all in the other. Targets are put in.
    """
    rules, dtype, name, order, with_targets = case.values()
    sharpness, temperature = torch.tensor([0.01, 0.5, 1.0, 3.0, 8.0]), TEMPERATURES[name]
    logits = (
        torch.randn(2, 5, 5003, generator=torch.Generator().manual_seed(1)) * sharpness[:, None]
    ).to(dtype)
    each = temperature.reshape(-1, 1 if temperature.dim() < 2 else 5).expand(2, 5).flatten()
    found = [
        oracle(row, order, float(t), **rules)
        for row, t in zip(logits.flatten(0, 1), each, strict=True)
    ]
    assert min(near for _, near in found) > 1e-8
    expected, targets = [rows[0] for rows, _ in found], None
    if with_targets:
        targets = torch.tensor([[0, 1, 8, -100, 5002], [5003, 3, 2**40, 5, 77]])
        expected = [
            sorted({*row, x} if 0 <= x < 5003 else row)
            for row, x in zip(expected, targets.flatten().tolist(), strict=True)
        ]
        assert_facts(TokenSets.from_logits(logits, targets=targets, order=order), [[]] * 10)
    given = float(temperature) if name == "one" else temperature
    assert kept(logits, temperature=given, order=order, targets=targets, **rules) == expected
