"""The budgets of the Triton kernels, which are compiled without a GPU, and the reader of assembly."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.runtime.jit import JITFunction

from benchmarks import assembly, instructions, resources, sass
from benchmarks.assembly import bits, code, loops
from benchmarks.launches import OBJECTIVES, QUICK, SHORT, TARGETS, TRANSFORMS, Case, cases, compiling
from benchmarks.other_launches import DTYPES, KERNELS, OTHER_QUICK, PRODUCTS, SELECTIONS, other_cases
from benchmarks.resources import Report, broken, report
from grpo_kernels.vocabulary.backends import triton as backend
from grpo_kernels.vocabulary.backends.triton_choices import Choice

pytestmark = pytest.mark.skipif(
    not isinstance(backend._stats_kernel, JITFunction), reason="TRITON_INTERPRET=1: there is nothing to compile"
)


@pytest.mark.parametrize("target", TARGETS)
def test_budgets(target: str) -> None:
    """No spills, no fp64, wide accesses, registers and threads as `LAUNCH` intends."""
    for case in [*QUICK, *OTHER_QUICK[1::2]] if target == "sm_90" else QUICK:
        found = report(target, case)
        print(resources.line(found))
        assert not broken(case, found), (target, str(case), broken(case, found))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_budgets_of_every_kernel(target: str) -> None:
    results = list(resources.measure_all([target], [*cases(), *other_cases()]))
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


def test_the_other_cases_are_all_kernels_dtypes_and_layouts() -> None:
    every = other_cases()
    assert set(OTHER_QUICK) < set(every) and len({(case.kernel, str(case)) for case in every}) == len(every)
    assert {case.kernel for case in every} == {kernel for kernel, _ in KERNELS} | set(PRODUCTS) | set(SELECTIONS)
    for kernel, divergence in KERNELS:
        these = [case for case in every if case.kernel == kernel and getattr(case, "divergence", "") == divergence]
        streams = {(case.logits, case.teacher, case.gradient) for case in these}  # type: ignore[attr-defined]
        assert streams == {d if kernel == "two_pull" else (d[0], d[1], d[0]) for d in DTYPES}
        capped = {(case.logits, case.teacher) for case in these if case.transform == "softcap"}  # type: ignore[attr-defined]
        assert capped == {d[:2] for d in DTYPES}
        assert {case.transform for case in these} == set(TRANSFORMS) and {case.aligned for case in these} == {True, False}


# ---- budgets can be broken


@pytest.fixture(scope="module")
def fused() -> Report:
    return report("sm_90", Case("fused"))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"spilled": 8}, "bytes spilled 8"),
        ({"stack": 16}, "bytes spilled 16"),
        ({"reloads": 1}, "reloads in loops 1, at most 0"),
        ({"registers": 136}, "registers 136, at most 128"),
        ({"programs": 0}, "resident threads 0, at least 512"),
        ({"fp64": True}, "fp64"),
        ({"loads": [64, 128]}, "bits per load 64"),
        ({"stores": [64]}, "bits per store 64"),
        ({"stores": []}, "bits per store 0"),
        ({"together": [(8, 4, 128), (1, 4, 128)]}, "loads before the first wait 1, at least 8"),
        ({"together": [(2, 4, 128), (8, 4, 128)]}, "loads before the first wait 2, at least 8"),
        ({"together": [(2, 4, 128), (4, 4, 128)], "stages": 1}, "loads before the first wait 2, at least 4"),
    ],
)
def test_a_broken_budget_is_named(fused: Report, change: dict, words: str) -> None:
    assert not broken(Case("fused"), fused)
    (failure,) = broken(Case("fused"), replace(fused, **change))
    assert failure.startswith(words)


def test_budgets_of_two_streams_can_be_broken() -> None:
    """All loads of a tile of both streams must be in flight, half of them for a mixture. A narrower stream has narrower loads."""
    of_jsd, reverse = OTHER_QUICK[4], replace(OTHER_QUICK[4], divergence="reverse")
    found = report("sm_90", of_jsd)
    half = replace(found, together=[(2, 4, 128)])
    assert not broken(of_jsd, half) and broken(reverse, half) == ["loads before the first wait 2, at least 4"]
    assert broken(of_jsd, replace(found, loads=[64, 128])) == ["bits per load 64, at least 128"]
    narrow = replace(of_jsd, logits=torch.float32)
    assert not broken(narrow, replace(half, loads=[64, 128], stores=[64]))
    assert broken(OTHER_QUICK[-1], replace(found, registers=136))[0] == "registers 136, at most 128"


def test_only_a_narrowed_gradient_may_be_stored_by_64_bits(fused: Report) -> None:
    narrow = replace(fused, stores=[64])
    assert not broken(Case("fused", torch.float32, torch.bfloat16), narrow)
    assert broken(Case("fused", torch.float32, torch.float32), narrow)


def test_a_kernel_with_too_few_registers_is_seen_to_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend.LAUNCH, "fused", Choice(1024, 16))  # a tile of 128 logits per thread in 64 registers
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
    monkeypatch.setattr(resources, "BUDGETS", tmp_path / "budgets.json")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--write"])
    assert resources.main() == 1
    ((version, targets),) = json.loads((tmp_path / "budgets.json").read_text()).items()
    assert version == triton.__version__ and targets["sm_90"]["kernels"] == 1
    assert targets["sm_90"]["beyond"] == [f"fused {fused.case}: registers 999, at most 128"]
    assert targets["sm_90"]["in flight"] == fused.in_flight


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
    assert passes <= found.special <= passes + 0.25
    assert passes <= found.fp32 < found.instructions - found.special


#: The most instructions per logit of the kernels on Hopper, so that the cost of a change is noticed.
@pytest.mark.parametrize(
    "case, most",
    [
        (Case("stats"), 9.0),
        (Case("pull"), 8.0),
        (Case("fused"), 17.0),
        (Case("fused", torch.float32, torch.bfloat16), 17.5),
        (Case("fused", vocab=128257, stride=128257), 17.0),
        (Case("fused", transform="softcap"), 36.5),
    ],
    ids=str,
)
def test_instructions_per_logit(case: Case, most: float) -> None:
    """One fused multiply-add before the exponential; one running maximum and sum a thread, not one an access."""
    assert report("sm_90", case).instructions <= most


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_instructions_of_a_way_are_those_of_its_kernels(target: str) -> None:
    """Ours, and one of another project's if it is installed: two visits, the second of which writes."""
    (ours,) = (way for way in instructions.WAYS if way.name == "grpo_kernels, in place")
    works, found = instructions.count(target, ours), report(target, Case("fused"))
    assert [work.writes for work in works] == [False, True]
    assert sum(sum(work.issued.values()) for work in works) == pytest.approx(found.instructions, abs=0.02)
    assert sum(work.issued["special"] for work in works) == pytest.approx(found.special, abs=0.02)
    assert [(work.together, work.loads) for work in works] == [(some, every) for some, every, _ in found.together]


def test_a_kernel_without_loops_is_counted_whole() -> None:
    """A program of 4 warps processes 1024 logits, 8 per thread: as many exponentials, and the counted instructions."""
    pytest.importorskip("trl")
    (theirs,) = (way for way in instructions.WAYS if way.name == "TRL kernel + loss")
    forward, backward = instructions.count("sm_90", theirs)
    assert (forward.writes, backward.writes) == (False, True)
    assert 1 <= backward.issued["special"] < 1.5 and 1 <= forward.issued["special"] < 1.5
    assert 10 < sum(backward.issued.values()) < 60


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


@pytest.mark.parametrize("apart, in_flight", [(False, 2), (True, 1)])
def test_loads_in_flight_are_read_from_the_barriers(apart: bool, in_flight: int) -> None:
    text = ISSUED
    if apart:  # load, wait, load, wait
        lines = text.splitlines()
        lines[3], lines[4] = lines[4], lines[3]
        text = "\n".join(lines)
    (lines,) = loops(text)
    loop = sass.Loop(tuple(sass._nvidia(lines)))
    assert loop.loads == [128, 128] and loop.stores == [64] and loop.in_flight == in_flight
    assert loop.issued == {"memory": 3, "fp32": 2, "special": 1, "other": 1} and loop.local == 0
    spilling = [*lines[:2], "STL.64 [R1], R4 @@ 7 0", "LDL R4, [R1+0x8] @@ 3 0", *lines[2:]]
    assert sass.Loop(tuple(sass._nvidia(spilling))).local == 2


COPIED = """
L_BB10:
DEPBAR.LE SB0, 0x{left} @@ 7 0
LDS.128 R4, [R0] @@ 1 0
MUFU.EX2 R2, R4 @@ 2 2
LDGSTS.E.BYPASS.128 [R97], desc[UR32][R12.64], !P1 @@ 7 0
LDGDEPBAR @@ 0 0
LDGSTS.E.BYPASS.128 [R97+0x4000], desc[UR32][R14.64], !P4 @@ 7 0
LDGDEPBAR @@ 0 0
@P0 bra L_BB10 @@ 7 0
ret @@ 7 0
"""


@pytest.mark.parametrize("left, in_flight", [(2, 4), (1, 3), (0, 2)])
def test_copies_into_shared_memory_are_in_flight_until_their_group_is_waited_for(left: int, in_flight: int) -> None:
    (lines,) = loops(COPIED.format(left=left))
    loop = sass.Loop(tuple(sass._nvidia(lines)))
    assert loop.loads == [128, 128] and not loop.stores and loop.in_flight == in_flight
    assert loop.issued["memory"] == 2


def test_rows_of_one_access_a_thread_are_not_asked_for_more() -> None:
    """The assembler unrolls the loop over their tiles, which then has several loads."""
    found = report("sm_90", Case("pull", torch.float32, torch.float32, vocab=1024, stride=1024))
    assert not broken(
        Case("pull", torch.float32, torch.float32, vocab=1024, stride=1024), replace(found, together=[(1, 4, 128)])
    )
    assert broken(Case("pull", torch.float32, torch.float32), replace(found, together=[(1, 4, 128)]))


def test_an_amd_wait_leaves_a_number_of_accesses_outstanding() -> None:
    lines = ["global_load_dwordx4 v[0:3], v4, s[0:1]", "global_load_dwordx4 v[4:7], v4, s[0:1]", "s_waitcnt vmcnt(1)"]
    lines += ["v_exp_f32_e32 v8, v0", "s_waitcnt vmcnt(0)", "v_add_f32_e32 v9, v8, v4"]
    assert sass.Loop(tuple(sass._amd(lines))).in_flight == 2
    assert sass.Loop(tuple(sass._amd([lines[0], lines[4], lines[1], lines[4], lines[3]]))).in_flight == 1


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
    """The end of the loop stands above its start, and there is a path around it that passes no other loop."""
    (inner,) = loops(NESTED)
    assert any("v4.b32" in line for line in inner) and not any("st.global" in line for line in inner)


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
