"""What must not change a result: the same bits, or the same values, of calls that say the same in
another way.

From logits, on a CPU (eager, C++) and in the Triton kernels, the log-prob, entropy and gradient of
a row depend on neither the rows beside it, nor their order and number, nor on the number of threads
or multiprocessors; the loss not on the threads.

From hidden states: the same call gives the same bits again. With the C++ products (AVX512_BF16,
AMX; operands in bf16, or weight in fp32) neither the number of threads, nor other rows, nor how
many are taken at a time change a bit of a row. All other products are a library's, which may choose
another kernel for another number of rows or threads: these are compared as numbers.

Not promised: metrics, which are means; a sequence padded to another length, whose sum is divided
differently; in Triton, rows at other strides, where 128-bit accesses become single ones (a slice of
the vocabulary).
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from grpo_kernels import Denominators
from grpo_kernels.distributed import global_normalizer
from grpo_kernels.losses import objective_loss
from support.bits import same_bits
from support.call_cases import (
    DTYPES,
    KINDS,
    CallCase,
    legal,
    problem,
    random_case,
    select_sequences,
)
from support.inside import in_chunks, our_products
from support.objectives import OBJECTIVES
from support.oracle import Answer
from support.public_functions import (
    assert_matches_oracle,
    expected_and_tolerance,
    make_batch,
    make_call,
    make_leaves,
    make_objective,
    named_outputs,
    normalizer_argument,
    run_backward,
    run_call,
)

PLAIN = {
    "mask": "some",
    "spread": 3.0,
    "vocab": 61,
    "upstream": 1.0,
    "extreme": "none",
    "frozen": "nothing",
    "inplace": False,
}


def drawn(seed, **fixed):
    return random_case(random.Random(seed), **{**PLAIN, **fixed})


#: Each kind of objective at both levels, and log-probs and divergences.
CASES = [
    *(
        drawn(i, function="loss", objective=kind, source=source)
        for source in ("logits", "hidden")
        for i, kind in enumerate(KINDS)
    ),
    *(
        drawn(i, function=function, source=x)
        for i, function in enumerate(("logprobs", "divergence"))
        for x in ("logits", "hidden")
    ),
]
#: A loss of one pass, one of two, and log-probs.
CALLS = (
    {"objective": "grpo, k3 and entropy"}, {"objective": "gspo, k3 by the ratio"}, {"function": "logprobs"},
)  # fmt: skip
#: Objectives that look at all tokens, or at those of a group.
WHOLE_BATCH = (
    "clip-cov",
    "kl-cov",
    "entropy quantile, bonus of its own",
    "means of groups",
    "far from the sampler",  # a mean over the sequences that the filter keeps
    "far from the sampler, groups",
)
PER_ROW = ("logps", "entropy", "hidden")
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def assert_same_bits(found, expected, what, names=None, rows=slice(None)):
    """Of all values and gradients, or of these `names`; of `rows` of what is expected."""
    for kind in ("values", "gradients"):
        mine, theirs = getattr(found, kind), getattr(expected, kind)
        assert mine.keys() == theirs.keys()
        for name, x in mine.items():
            if names is None or name in names:
                y = theirs[name][rows] if theirs[name].dim() else theirs[name]
                assert same_bits(x, y), f"{what}: {name} differs by {(x - y).abs().max()}"


@each_case
def test_the_same_call_gives_the_same_bits(case, backend):
    """Again, and under activation checkpointing."""
    p = problem(case)
    first = run_call(p, backend=backend)
    assert_same_bits(run_call(p, backend=backend), first, "again")
    if not case.inplace and case.weight_grad == "none":
        again = run_call(
            p, backend=backend, call=lambda f: lambda *x: checkpoint(f, *x, use_reentrant=False)
        )
        assert_same_bits(again, first, "checkpointed")


#: Few long rows and many short ones, which torch divides differently.
SHAPES = (
    (13, 5003, "bfloat16"),
    (3, 40_009, "float32"),
    (1, 40_009, "bfloat16"),
    (40_009, 3, "float32"),
)
OF_THREADS = [
    legal(CallCase(lengths=(n,), vocab=vocab, dtype=dtype, **x))
    for n, vocab, dtype in SHAPES
    for x in CALLS
]


@pytest.mark.parametrize("case", CASES + OF_THREADS, ids=str)
def test_threads_change_no_bit(case, backend):
    """From hidden states a library's products may change with them:

    then the values are compared.
    """
    p = problem(case)
    first = run_call(p, backend=backend)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        found = run_call(p, backend=backend)
        (
            assert_matches_oracle(p, found)
            if case.source == "hidden"
            else assert_same_bits(found, first, f"{threads} threads")
        )


@pytest.mark.skipif(
    not our_products(torch.bfloat16), reason="this processor has no products of ours"
)
@pytest.mark.parametrize("dtype", [name for name, dtype in DTYPES.items() if our_products(dtype)])
@pytest.mark.parametrize("n, width, vocab", [(45, 24, 61), (37, 96, 1031)])
@pytest.mark.parametrize("kind", CALLS, ids=str)
def test_with_our_products_a_row_depends_on_no_other(
    kind, n, width, vocab, dtype, backend, monkeypatch
):
    """Nor on how many are taken at a time, and all of the result not on threads."""
    p = problem(
        legal(
            CallCase(
                source="hidden",
                lengths=(1,) * n,
                width=width,
                vocab=vocab,
                dtype=dtype,
                normalizer=7.0,
                **kind,
            )
        )
    )
    whole = run_call(p, backend=backend)
    for threads in (2, 7):
        torch.set_num_threads(threads)
        assert_same_bits(run_call(p, backend=backend), whole, f"{threads} threads")
    for rows in (torch.randperm(n).tolist(), [0], [n - 1], [*range(3, 20)]):
        assert_same_bits(
            run_call(select_sequences(p, rows), backend=backend),
            whole,
            f"rows {rows}",
            PER_ROW,
            rows,
        )
    for rows in (1, 7, 16):
        in_chunks(monkeypatch, rows)
        assert_same_bits(run_call(p, backend=backend), whole, f"{rows} at a time", PER_ROW)


@pytest.mark.parametrize("case", [r for r in CASES if r.function == "loss"], ids=str)
def test_rows_that_are_skipped_contribute_nothing(case, backend):
    skipping, reading = (
        problem(legal(replace(case, skip_inactive=skip))) for skip in (True, False)
    )
    found, whole = run_call(skipping, backend=backend), run_call(reading, backend=backend)
    assert_same_bits(found, whole, "skipped", ("loss", "logits"))
    assert_matches_oracle(skipping, found)


ROWS = [
    (x, v, d)
    for v, d in ((61, "float32"), (5003, "bfloat16"), (40_009, "float32"), (40_009, "bfloat16"))
    for x in CALLS
]
OF_ROWS = [
    CallCase(lengths=(1,) * 7, vocab=v, dtype=d, transform="temperature", **x) for x, v, d in ROWS
]
BY_ROWS = [
    legal(
        replace(
            r,
            layout="padded",
            lengths=(3, 1, 4, 2),
            mask="some",
            weight_grad="none",
            rows="own",
            listed="none",
        )
    )
    for r in CASES
    if r.objective not in WHOLE_BATCH
]


def in_parts(case, backend):
    """Sequences in another order, fewer and more: from logits each row keeps its bits. With one
    denominator the losses and gradients of parts add up to those of the whole.
    """
    case = legal(replace(case, normalizer=None))
    p, n = problem(case), len(case.lengths)
    halves = [*range(n // 2)], [*range(n // 2, n)]
    if case.function == "loss":
        found = global_normalizer(
            make_objective(case), [make_batch(select_sequences(p, half)) for half in halves]
        )
        numbers = tuple(map(float, found)) if isinstance(found, Denominators) else float(found)
        p = replace(p, case=replace(case, normalizer=numbers))
    whole = run_call(p, backend=backend)
    for rows in (torch.randperm(n).tolist(), [1], [*range(n)] * 3, *halves):
        part = run_call(select_sequences(p, rows), backend=backend)
        for kind in ("values", "gradients"):
            for name, x in getattr(part, kind).items():
                mine = getattr(whole, kind)[name]
                if not x.dim() or name in ("weight", "bias", "at"):
                    continue
                if case.source == "logits":
                    assert same_bits(x, mine[rows]), f"sequences {rows}: {name}"
                else:
                    rtol = 2e-2 if x.dtype != torch.float32 else 1e-4
                    torch.testing.assert_close(x, mine[rows], rtol=rtol, atol=1e-4)
    exact, room = expected_and_tolerance(case)
    if exact.clear:
        parts = [run_call(select_sequences(p, half), backend=backend) for half in halves]
        for kind, name in (("values", "loss"), ("gradients", "weight"), ("gradients", "bias")):
            if name in getattr(exact, kind):
                total = sum(getattr(part, kind)[name].double() for part in parts)
                off = (total - getattr(exact, kind)[name]).abs()
                assert (off <= 4 * getattr(room, kind)[name] + 1e-6).all(), name


BY_ROWS += [
    CallCase(objective=x, lengths=(5, 3, 0, 4, 1, 6))
    for x in OBJECTIVES
    if x not in WHOLE_BATCH and "exact" not in x
]


@pytest.mark.parametrize("case", BY_ROWS, ids=str)
def test_sequences_do_not_see_each_other(case, backend):
    in_parts(case, backend)


@pytest.mark.parametrize("case", OF_ROWS, ids=str)
def test_a_row_depends_on_no_other(case, backend):
    """Each a sequence, beside masked ones of NaN."""
    torch.set_num_threads(1 if backend == "triton" else 7)
    in_parts(case, backend)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "case", [*(r for r in CASES if r.source == "hidden"), CallCase(source="hidden", bias="plain")], ids=str
)  # fmt: skip
def test_rows_are_projected_some_at_a_time(case, rows, backend, monkeypatch):
    in_chunks(monkeypatch, rows)
    assert_matches_oracle(problem(case), run_call(problem(case), backend=backend))


@pytest.mark.parametrize(
    "case", [r for r in CASES if r.function == "loss" and r.source == "logits"], ids=str
)
def test_a_loss_is_log_probs_and_the_loss_of_these(case, backend):
    """Layer 2 equals layer 1 with autograd through the token stage, beside divergences of their
    own; log-probs bit by bit: before the first update the ratio is 1.
    """
    rows = case.rows if case.other == "none" else "own"  # a divergence alone has no rows of tokens
    p = problem(
        legal(
            replace(
                case, kept="none", listed="none", skip_inactive=False, dtype="float32", rows=rows
            )
        )
    )
    leaves, given = make_leaves(p), {"normalizer": normalizer_argument(p.case)}

    def alone(function):
        return named_outputs(
            make_call(
                replace(p, case=replace(p.case, function=function, also="entropy")), backend=backend
            )(*leaves.values())
        )

    found = alone("logprobs")
    given |= {"entropy": found["entropy"], **({} if p.other is None else alone("divergence"))}
    found["loss"] = objective_loss(
        found["logps"], make_batch(p), make_objective(p.case), **given
    ).loss
    run_backward(p, found)
    assert_matches_oracle(
        p,
        Answer({name: x.detach() for name, x in found.items()}, {"logits": leaves["logits"].grad}),
    )
    if p.other is None:
        assert same_bits(
            make_call(p, backend=backend)(p.given["logits"]).logps, found["logps"].detach()
        )
