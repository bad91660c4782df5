"""The executor of compiled kernels reports what a kernel must not do: faults that are planted in sound kernels."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if shutil.which("cc") is None:
    pytest.skip("the machine of the executor is built by a C compiler", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from support.ptx.launches import executing
from support.ptx.program import FAULTS, Fault, Program

OUTSIDE, MISALIGNED, APART, SHARED, DEVICE, PROGRAMS, NOTHING, UNDER_WAY = FAULTS


@triton.jit(do_not_specialize=["begin"])
def _planted(x, begin, out, n, PLANTED: tl.constexpr, BLOCK: tl.constexpr):
    """out = x from `begin` on; with a fault, if it is named."""
    x = x + begin
    if PLANTED == "promise":
        x = tl.multiple_of(x, 16)
    if PLANTED == "pointer":
        x = x + 1
    at = tl.arange(0, BLOCK)
    mask = at < n
    if PLANTED == "mask":
        mask = at <= n
    tl.store(out + at, tl.load(x + at, mask=mask), mask=at < n)


compiled = pytest.mark.skipif(not isinstance(_planted, JITFunction), reason="TRITON_INTERPRET=1: there is nothing to compile")


def outcome(call: Any, *arguments: Any, **options: Any) -> set[str]:
    """The kinds of faults that are reported."""
    try:
        with executing("sm_90"):
            call(*arguments, **options)
    except Fault as fault:
        return set(fault.faults)
    return set()


@compiled
@pytest.mark.parametrize(
    "planted, fault",
    [("", None), ("mask", OUTSIDE), ("pointer", OUTSIDE), ("promise", MISALIGNED)],
    ids=("none", "mask off by one", "pointer one element too far", "16 bytes promised of an address of 8"),
)
@pytest.mark.parametrize("padded", (False, True))
def test_an_address_that_is_wrong(planted: str, fault: str | None, padded: bool) -> None:
    """Also where it is in the memory of the tensor, between its rows."""
    n = 256 if planted in ("pointer", "promise") else 200
    memory = torch.arange(700.0)
    x = memory[: 2 + n] if not padded else memory.as_strided((2, 2 + n), (n + 5, 1))
    assert x.data_ptr() % 16 == 0
    out = torch.zeros(n)
    found = outcome(_planted[(1,)], x, 2, out, n, planted, 256, num_warps=2)
    assert found == ({fault} if fault else set())
    if not fault:
        assert torch.equal(out, memory[2 : 2 + n])


# ---- kernels written by hand, for what Triton does not let one plant

HEAD = """
.extern .shared .align 16 .b8 memory[];
.visible .entry kernel(
	.param .u64 kernel_param_0
)
.reqntid 64
{
	.reg .pred 	%p<4>;
	.reg .b32 	%r<8>;
	.reg .b64 	%rd<4>;
	mov.u32 %r1, %tid.x;
	ld.param.b64 %rd1, [kernel_param_0];
	shl.b32 %r2, %r1, 4;
	cvt.u64.u32 %rd2, %r2;
	add.s64 %rd2, %rd2, %rd1;
	mov.b32 %r3, memory;
	add.s32 %r3, %r3, %r2;
	setp.lt.u32 %p1, %r1, 32;
	setp.lt.u32 %p2, %r1, 5;
	xor.b32 %r4, %r2, 512;
	BODY
	ret;
}
"""
COPY = "cp.async.cg.shared.global [ %r3 + 0 ], [ %rd2 + 0 ], 16;\ncp.async.commit_group;\n"
WAIT, BARRIER, READ = "cp.async.wait_group 0;\n", "bar.sync 0;\n", "ld.shared.b32 %r5, [%r3];\n"
OF_THE_OTHER_WARP = "ld.shared.b32 %r5, [%r4];\n"
TWO_COPIES = COPY + COPY.replace("%r3 + 0", "%r3 + 1024") + "cp.async.wait_group 1;\n"


def by_hand(body: str, order: int = 0) -> tuple[set[str], torch.Tensor]:
    x = torch.arange(256, dtype=torch.int32)
    try:
        Program(HEAD.replace("BODY", body)).run([x.data_ptr()], [x], 1, 2048, order)
    except Fault as fault:
        return set(fault.faults), x
    return set(), x


@pytest.mark.parametrize("order", (0, 1))
@pytest.mark.parametrize(
    "body, faults",
    [
        (COPY + WAIT + BARRIER + OF_THE_OTHER_WARP + BARRIER + "st.global.b32 [%rd2], %r5;\n", set()),
        (COPY + READ + WAIT, {UNDER_WAY}),
        (TWO_COPIES + "ld.shared.b32 %r5, [%r3];\n" + WAIT, set()),
        (TWO_COPIES + "ld.shared.b32 %r5, [%r3+1024];\n" + WAIT, {UNDER_WAY}),
        (COPY + WAIT + OF_THE_OTHER_WARP, {SHARED}),
        (COPY + BARRIER + OF_THE_OTHER_WARP + WAIT, {UNDER_WAY}),
        (COPY + "st.global.b32 [%rd2], %r1;\n" + WAIT, {UNDER_WAY}),
        (READ, {NOTHING}),
        ("@%p1 bra $AFTER;\n" + BARRIER + "$AFTER:\n", {APART}),
        ("@%p2 bra $AFTER;\n" + BARRIER + "$AFTER:\n" + BARRIER, {APART}),
        ("@%p2 shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;\n", {APART}),
        ("ld.shared.b32 %r5, [%r3+2048];\n", {OUTSIDE}),
        ("ld.shared.b32 %r5, [%r3+2];\n", {MISALIGNED}),
    ],
)
def test_shared_memory_and_barriers(body: str, faults: set[str], order: int) -> None:
    found, x = by_hand(body, order)
    assert faults <= found and bool(faults) == bool(found)  # one may bring another with it
    if "st.global" in body and not faults:
        want = torch.arange(256, dtype=torch.int32)
        want[::4] = want.view(2, 128).flip(0).reshape(-1)[::4]
        assert torch.equal(x, want)
