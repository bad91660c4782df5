"""What the Triton kernels cost, which are compiled without a GPU:

their budgets, and the reader of assembly.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from benchmarks import assembly, resources
from benchmarks.assembly import loops
from benchmarks.launches import (
    KINDS,
    OBJECTIVES,
    QUICK,
    SHORT,
    TARGETS,
    TRANSFORMS,
    Case,
    backend,
    cases,
)
from benchmarks.resources import broken, report

pytestmark = pytest.mark.skipif(
    not isinstance(backend.softmax_sums_kernel, JITFunction),
    reason="TRITON_INTERPRET=1: there is nothing to compile",
)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.long
@pytest.mark.parametrize(
    "target",
    [
        target if target == "sm_90" else pytest.param(target, marks=pytest.mark.slow)
        for target in TARGETS
    ],
)
def test_budgets(target):
    """No spills, no fp64, wide accesses, registers and threads as `LAUNCH` intends, and hardly any
    shared memory: GPUs lend a program 48 KiB and more.
    """
    of_others = QUICK[13::2] if target == "sm_90" else []
    for case in [*QUICK[:12], *of_others]:
        found = report(target, case)
        assert not broken(case, found), (target, str(case), broken(case, found))
        assert target not in ("sm_80", "gfx942") or found.shared <= 1024


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_budgets_of_every_kernel(target):
    results = list(resources.judge_all([target], cases()))
    assert not [
        (found.target, found.kernel, found.case, failures)
        for found, failures in results
        if failures
    ]


def test_the_cases_are_what_the_library_launches():
    """Each has a name of its own; every kernel in all dtypes, layouts and transforms."""
    every = cases()
    assert {*QUICK} < {*every} and len({(case.kernel, str(case)) for case in every}) == len(every)
    assert {case.kernel for case in every} == {*KINDS} and {case.objective for case in every} == {
        *OBJECTIVES
    }
    for kernel in ("stats", "pull", "fused"):
        these = [case for case in every if case.kernel == kernel]
        assert {case.transform for case in these} == {*TRANSFORMS} and {
            case.logits_dtype for case in these
        } == {FP32, BF16, FP16}
        assert len({(case.vocab > SHORT, case.aligned, case.entropy) for case in these}) == 8


# ---- budgets can be broken


@pytest.fixture(scope="module")
def fused():
    return report("sm_90", Case("fused"))


def loop(loads=4, width=128, store=128, in_flight=4, local=0):
    """Stands for a loop of the machine code."""
    return SimpleNamespace(
        loads=[width] * loads, stores=[store] * bool(store), in_flight=in_flight, local=local
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spilled": 16}, "bytes spilled 16, at most 8"),
        ({"loops": (loop(in_flight=8, local=1),)}, "reloads in loops 1, at most 0"),
        ({"registers": 136}, "registers 136, at most 128"),
        ({"programs": 0}, "resident threads 0, at least 512"),
        ({"fp64": True}, "fp64"),
        ({"loops": (loop(width=64),)}, "bits per load 64"),
        ({"loops": (loop(in_flight=8, store=64),)}, "bits per store 64"),
        (
            {"loops": (loop(in_flight=8), loop(in_flight=1))},
            "loads before the first wait 1, at least 4",
        ),
    ],
)
def test_a_broken_budget_is_named(fused, change, words):
    assert not broken(Case("fused"), fused)
    (failure,) = broken(Case("fused"), replace(fused, **change))
    assert failure.startswith(words)


def test_a_kernel_with_too_few_registers_is_seen_to_spill(monkeypatch):
    launch = backend.launch.LAUNCH["fused"]
    monkeypatch.setitem(
        backend.launch.LAUNCH, "fused", type(launch)(1024, 16)
    )  # 128 logits per thread in 64 registers
    found = report("sm_90", Case("fused", vocab=1 << 18, stride=1 << 18))
    assert found.registers <= 64 and found.spilled + found.stack > 0
    assert any(words.startswith("bytes spilled") for words in broken(Case("fused"), found))


# ---- figures


@pytest.mark.parametrize(
    ("target", "case", "read", "written", "most"),
    [
        ("sm_90", Case("stats"), 2, 0, 9.0),
        ("sm_90", Case("pull"), 2, 2, 9.0),
        ("sm_90", Case("fused"), 4, 2, 17.0),  # the second read is meant to be served by L2
        ("sm_90", Case("fused", FP32, FP32, transform="softcap", entropy=True), 8, 4, 45.0),
        ("gfx942", Case("pull", FP32, BF16), 4, 2, 20.0),
        ("gfx942", Case("fused", gradient_dtype=None), 2, 0, 12.0),
        ("gfx942", Case("fused", vocab=50257, stride=50257), 4, 2, 30.0),
    ],
    ids=str,
)
def test_bytes_and_instructions_per_logit(target, case, read, written, most):
    """One exponential per logit and pass, two more for tanh, and one or so per tile for the running
    maximum. On Hopper the most instructions, so that the cost of a change is noticed.
    """
    found = report(target, case)
    assert (found.size * len(found.loops), found.written) == (read, written)
    passes = len(found.loops) * (3 if case.transform == "softcap" else 1)
    special, fp32, every = (
        found.issued("special"),
        found.issued("fp32"),
        found.issued(*assembly.PIPES),
    )
    assert passes <= special <= passes + 0.25 and passes <= fp32 < every - special
    assert every <= most


# ---- assembly

ISSUED = """
L_BB10:
LDG.E.128 R4, desc[UR8][R68.64] @@ 0 0
LDG.E.EL.128 R8, desc[UR8][R68.64+0x4000] @@ 1 0
FADD R1, R4, R5 @@ 7 1
MUFU.EX2 R2, R1 @@ 2 0
FFMA R3, R8, R9, R2 @@ 7 6
STG.E.64 desc[UR8][R2.64], R2 @@ 7 0
@P0 bra L_BB10 @@ 7 0
ret @@ 7 0
"""


def test_loads_in_flight_are_read_from_the_barriers():
    def loop(lines):
        return assembly.Loop(tuple(assembly._nvidia(lines)))

    (lines,) = loops(ISSUED)
    found = loop(lines)
    assert (found.loads, found.stores, found.in_flight, found.local) == ([128, 128], [64], 2, 0)
    assert found.issued == {"memory": 3, "fp32": 2, "special": 1, "other": 1}
    again = [i for i, line in enumerate(lines) if "LDG" in line][1]
    waited = [
        *lines[:again],
        lines[again + 1],
        lines[again],
        *lines[again + 2 :],
    ]  # load, wait, load
    assert (
        loop(waited).in_flight == 1
        and loop([*lines, "STL.64 [R1], R4 @@ 7 0", "LDL R4, [R1+0x8] @@ 3 0"]).local == 2
    )
