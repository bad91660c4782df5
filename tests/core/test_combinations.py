"""Calls in which every two values of two axes meet (see support/call_cases.py), against float64, on
every executor.

Behind `slow`: every three values of three axes. Behind `nightly`: random calls, as many as
GRPO_KERNELS_FUZZ says.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from itertools import product

import pytest

from support.call_cases import AXES, PAIRED, CallCase, covering, problem, random_case
from support.inside import executor, executors
from support.public_functions import check_case, expected_and_tolerance

MANY = int(os.environ.get("GRPO_KERNELS_FUZZ", "2000"))
EXECUTORS = executors()
LOGPS = CallCase(function="logprobs")
ITSELF = CallCase(objective="dapo, exact", other="itself", inplace=True, seed=1)
#: Call cases, each with all combinations of the values of some axes: rows with and without sets beside
#: a second stream; sets, and a factor that the backward brings; real vocabularies, and more rows
#: than a dimension of a grid has; sets of one to thousands of ids; a frozen head, whose log-probs
#: have their gradient made in the forward; impossible logits, those at the ends of a dtype and,
#: from hidden states, beyond fp16; a teacher that is the same logits, which are overwritten; no
#: rows, and no trained row; temperatures that are none at tokens that missing="mask" takes out.
TABLE = [
    (CallCase(objective="dapo, exact", kept="some", missing="full", other="near"), {"seed": (0, 1)}),
    (CallCase(kept="some", upstream=0.5), {"source": AXES["source"], "frozen": ("nothing", "hidden"), "objective": ("dapo", "gspo")}),
    (replace(LOGPS, lengths=(2,)), {"vocab": (1000, 32_001, 129_921, 151_936), "dtype": ("float32", "bfloat16")}),
    (replace(LOGPS, lengths=(65_537,), vocab=3), {}),
    (replace(LOGPS, kept="some", missing="mask", transform="per token"), {"source": AXES["source"]}),
    (replace(LOGPS, lengths=(1,), vocab=1_000_003), {}),
    (CallCase(mask="none", rows="shuffled", objective="dapo, exact", other="near", transform="softcap", dtype="float16", seed=283756), {"exact": ("reverse", "tv"), "vocab": (1, 2, 300), "spread": (3.0, 30.0), "source": AXES["source"]}),
    (CallCase(lengths=(9,), vocab=4000, kept="long"), {"function": ("loss", "logprobs"), "source": AXES["source"]}),
    # with sets of the width of a group, 64
    (CallCase(lengths=(200,), vocab=65, kept="long"), {"source": AXES["source"]}),
    (replace(LOGPS, source="hidden", frozen="weight"), {"also": ("nothing", "detached"), "rows": AXES["rows"]}),
    (LOGPS, {"extreme": ("absent", "ends"), "dtype": AXES["dtype"], "vocab": (7, 300, 9000)}),
    (replace(LOGPS, source="hidden", dtype="float16", spread=5e4), {"transform": ("none", "everything")}),
    (ITSELF, {"exact": AXES["exact"], "dtype": ("float32", "bfloat16"), "objective": ("dapo, exact", "gspo, exact")}),
    (replace(ITSELF, inplace=False), {"exact": AXES["exact"], "kept": ("some",)}),
    (replace(ITSELF, objective="dapo", function="divergence"), {"exact": AXES["exact"]}),
    *((CallCase(lengths=lengths, layout=layout, mask="all"), {"source": AXES["source"], "dtype": AXES["dtype"], "function": ("loss", "logprobs")})
      for lengths, layout in (((0,), "packed"), ((), "padded"), ((0, 0), "padded"), ((3, 2), "padded"))),
]  # fmt: skip
PAIRS = covering()
PAIRS += [
    replace(r, **dict(zip(axes, x, strict=True)))
    for r, axes in TABLE
    for x in product(*axes.values())
]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairs(case):
    """Eager (the first executor), and one instruction set after the other."""
    for name in dict.fromkeys((EXECUTORS[0], EXECUTORS[case.seed % len(EXECUTORS)])):
        with executor(name) as backend:
            check_case(case, backend=backend)


def test_room_is_small_where_numbers_are_plain():
    """What is compared would not pass whatever came out."""
    plain = [
        r
        for r in covering()
        if (r.spread, r.dtype, r.width, r.extreme, r.transform)
        == (3.0, "float32", 8, "none", "none")
        and r.vocab > 2
    ]
    rooms = [[x.values["logps"] for x in expected_and_tolerance(r)] for r in plain]
    assert len(rooms) > 5 and all((room <= 2e-4 * (1 + exact.abs())).all() for exact, room in rooms)


@pytest.mark.slow
@pytest.mark.parametrize("axis", PAIRED)
def test_triples(axis):
    for i, value in enumerate(dict.fromkeys(AXES[axis])):
        each(covering(seed=i + 1, **{axis: value}), check_case)


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXECUTORS)
def test_random_calls(name):
    rng = random.Random(os.environ.get("GRPO_KERNELS_FUZZ_SEED", "0"))
    with executor(name) as backend:
        each(
            (random_case(rng) for _ in range(MANY)), lambda case: check_case(case, backend=backend)
        )


def each(cases, run):
    for case in cases:
        run(case)
        problem.cache_clear()
        expected_and_tolerance.cache_clear()
