"""The budgets of the Triton kernels on GPUs that need not be there, and the reader of assembly that they rest on."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from benchmarks import assembly, resources
from benchmarks.assembly import bits, code, flops, loops
from benchmarks.launches import OBJECTIVES, QUICK, SHORT, TARGETS, TRANSFORMS, Case, cases, compiling
from benchmarks.resources import Report, broken, report
from grpo_kernels.vocabulary.backends import triton as backend

pytestmark = pytest.mark.skipif(
    not isinstance(backend._stats_kernel, JITFunction), reason="TRITON_INTERPRET=1: there is nothing to compile"
)


@pytest.mark.parametrize("target", TARGETS)
def test_budgets(target: str) -> None:
    """No spills, no fp64, wide accesses, registers and threads as `LAUNCH` intends."""
    for case in QUICK:
        found = report(target, case)
        print(resources.line(found))
        assert not broken(case, found), (target, str(case), broken(case, found))


@pytest.mark.slow
def test_budgets_of_every_kernel() -> None:
    results = list(resources.measure_all(list(TARGETS), cases()))
    assert not [(found.target, found.kernel, found.case, failures) for found, failures in results if failures]


def test_the_cases_are_what_the_library_launches() -> None:
    every = cases()
    assert set(QUICK) < set(every) and len(set(every)) == len(every)
    assert len({(case.kernel, str(case)) for case in every}) == len(every)  # so a line of the report says which it is
    for kernel in ("stats", "pull", "fused"):
        these = [case for case in every if case.kernel == kernel]
        assert {case.transform for case in these} == set(TRANSFORMS)
        assert {case.logits for case in these} == {torch.float32, torch.bfloat16, torch.float16}
        assert {(case.vocab > SHORT, case.aligned, case.entropy) for case in these} == {
            (long, aligned, entropy) for long in (False, True) for aligned in (False, True) for entropy in (False, True)
        }
    assert {case.objective for case in every} == set(OBJECTIVES) and {"grpo", "cispo", "grpo + k1", "grpo + k3"} < set(
        OBJECTIVES
    )


# ---- budgets can be broken


@pytest.fixture(scope="module")
def fused() -> Report:
    return report("sm_90", Case("fused"))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"spilled": 8}, "bytes spilled 8"),
        ({"stack": 16}, "bytes spilled 16"),
        ({"registers": 136}, "registers 136, at most 128"),
        ({"programs": 0}, "resident threads 0, at least 512"),
        ({"fp64": True}, "fp64"),
        ({"loads": [64, 128]}, "bits per load 64"),
        ({"stores": [64]}, "bits per store 64"),
        ({"stores": []}, "bits per store 0"),
        ({"in_flight": 16.0}, "KiB in flight 16"),
    ],
)
def test_a_broken_budget_is_named(fused: Report, change: dict, words: str) -> None:
    assert not broken(Case("fused"), fused)
    (failure,) = broken(Case("fused"), replace(fused, **change))
    assert failure.startswith(words)


def test_only_a_narrowed_gradient_may_be_stored_by_64_bits(fused: Report) -> None:
    narrow = replace(fused, stores=[64])
    assert not broken(Case("fused", torch.float32, torch.bfloat16), narrow)
    assert broken(Case("fused", torch.float32, torch.float32), narrow)


def test_a_kernel_with_too_few_registers_is_seen_to_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend.LAUNCH, "fused", (1024, 16))  # a tile of 128 logits per thread in 64 registers
    found = report("sm_90", Case("fused", vocab=1 << 18, stride=1 << 18))
    assert found.registers <= 64 and found.spilled + found.stack > 0
    assert any(words.startswith("bytes spilled") for words in broken(Case("fused"), found))


def test_the_command_fails_on_a_broken_budget(
    fused: Report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "resources.json"
    monkeypatch.setattr(sys, "argv", ["resources", "--target", "sm_90", "--quick", "--json", str(path)])
    for failures in ([], ["registers 999, at most 128"]):
        monkeypatch.setattr(resources, "measure_all", lambda targets, cases, failures=failures: [(fused, failures)])
        assert resources.main() == len(failures)
        assert ("registers 999" in capsys.readouterr().out) == bool(failures)
        (kernel,) = json.loads(path.read_text())["kernels"]
        assert kernel["registers"] == fused.registers and kernel["beyond budget"] == failures


# ---- figures


@pytest.mark.parametrize(
    "case, read, written",
    [
        (Case("stats"), 2, 0),
        (Case("pull"), 2, 2),
        (Case("fused"), 4, 2),  # the second read is meant to be served by L2
        (Case("fused", gradient=None), 2, 0),
        (Case("pull", torch.float32, torch.bfloat16), 4, 2),
        (Case("fused", torch.float32, torch.float32, transform="softcap", entropy=True), 8, 4),
        (Case("fused", vocab=50257, stride=50257), 4, 2),
        (Case("fused", vocab=1024, stride=1024), 4, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_bytes_per_logit(target: str, case: Case, read: int, written: int) -> None:
    found = report(target, case)
    assert (found.read, found.written, found.counted) == (read, written, True)
    # One exponential per logit and pass, two more for tanh, and one or so per tile for the running maximum.
    passes = (read / case.logits.itemsize) * (3 if case.transform == "softcap" else 1)
    assert passes <= found.special <= passes + 0.5
    assert 2 * passes <= found.flops < found.instructions * 2


def test_occupancy() -> None:
    hopper, ampere, cdna = TARGETS["sm_90"], TARGETS["sm_80"], TARGETS["gfx942"]
    assert hopper.occupancy(warps=32, registers=64, shared=0) == (1, "registers")
    assert hopper.occupancy(warps=32, registers=32, shared=0) == (2, "registers")
    assert hopper.occupancy(warps=32, registers=16, shared=0) == (2, "threads")
    assert hopper.occupancy(warps=16, registers=97, shared=0) == (1, "registers")  # 104 are given
    assert hopper.occupancy(warps=1, registers=16, shared=0) == (32, "programs")
    assert hopper.occupancy(warps=4, registers=32, shared=100 << 10) == (2, "shared memory")
    assert ampere.occupancy(warps=4, registers=32, shared=100 << 10) == (1, "shared memory")
    assert cdna.occupancy(warps=16, registers=128, shared=0) == (1, "registers")
    assert cdna.occupancy(warps=16, registers=129, shared=0) == (0, "registers")


@pytest.mark.parametrize("case", QUICK[:3], ids=str)
def test_occupancy_agrees_with_the_compiler(case: Case) -> None:
    """AMD's assembly states the waves per SIMD, of which a compute unit has four."""
    with compiling("gfx942") as launches:
        case.launch()
    ((_, kernel),) = launches
    stated = int(code(kernel).split("; Occupancy: ")[1].split()[0])
    assert TARGETS["gfx942"].occupancy(1, assembly.taken(kernel)["registers"], 0)[0] in (
        4 * stated,
        TARGETS["gfx942"].programs,
    )


# ---- assembly

NESTED = """
	mov.b32 %r1, 0;
	bra.uni $L__BB0_2;
$L__BB0_4:
	st.global.b32 [%rd1], %r1;
$L__BB0_5:
	@%p3 bra $L__BB0_6;
$L__BB0_2:
	ld.global.b8 %rs1, [%rd2];
	@%p1 bra $L__BB0_5;
$L__BB0_3:
	@%p4 ld.global.L1::evict_last.v4.b32 {%r2, %r3, %r4, %r5}, [%rd3];
	fma.rn.f32 %f1, %f2, %f3, %f4;
	@%p2 bra $L__BB0_3;
	bra.uni $L__BB0_4;
$L__BB0_6:
	ret;
"""


def test_the_loop_over_rows_is_not_taken_for_one_over_a_row() -> None:
    """Its end stands above its start, and one way around it passes no other loop."""
    (inner,) = loops(NESTED)
    assert assembly.accesses(assembly.LOAD, inner) == [128] and not assembly.accesses(assembly.STORE, inner)
    assert sum(map(flops, inner)) == 2


@pytest.mark.parametrize(
    "access, width",
    [
        ("ld.global.L1::evict_first.L2::cache_hint.v4.b32", 128),
        ("ld.global.v8.b32", 256),
        ("ld.global.b16", 16),
        ("st.global.v2.b64", 128),
        ("st.global.L1::evict_first.v2.b32", 64),
        ("buffer_load_dwordx4", 128),
        ("buffer_load_ushort", 16),
        ("global_load_short_d16_hi", 16),
        ("global_store_dword", 32),
        ("buffer_store_byte", 8),
    ],
)
def test_width_of_an_access(access: str, width: int) -> None:
    assert bits(access) == width


@pytest.mark.parametrize(
    "instruction, count",
    [
        ("fma.rn.f32 \t%r1, %r2, %r3, %r4;", 2),
        ("@%p1 mul.f32 \t%r1, %r2, %r3;", 1),
        ("fma.rn.f32x2 \t%rd1, %rd2, %rd3, %rd4;", 4),
        ("sub.rn.f32.bf16 \t%r1, %rs1, %r2;", 1),
        ("max.f32 \t%r1, %r2, %r3;", 1),
        ("max3.f32 \t%r1, %r2, %r3, %r4;", 2),
        ("add.s32 \t%r1, %r2, %r3;", 0),
        ("mov.b32 \t%r1, %r2;", 0),
        ("cvt.f32.bf16 \t%r1, %rs1;", 0),
        ("v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]", 4),
        ("v_fmac_f32_e32 v0, v1, v2", 2),
        ("v_max3_f32 v0, v1, v2, v3", 2),
        ("v_add_u32_e32 v0, v1, v2", 0),
    ],
)
def test_operations_of_an_instruction(instruction: str, count: int) -> None:
    assert flops(instruction) == count
