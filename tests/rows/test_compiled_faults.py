"""The executor of compiled kernels reports what a kernel must not do:

faults in kernels written by hand.
"""

from __future__ import annotations

import shutil

import pytest
import torch

pytest.importorskip("triton")
if shutil.which("cc") is None:
    pytest.skip("the machine of the executor is built by a C compiler", allow_module_level=True)

from support.ptx.program import FAULTS, Fault, Program

OUTSIDE, MISALIGNED, APART, SHARED, DEVICE, PROGRAMS, NOTHING, UNDER_WAY = FAULTS

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


def by_hand(body, order=0):
    """The kinds of faults that are reported, and memory that the kernel gets, of 64 times 16 bytes,
    with two numbers between two rows behind it that belong to no tensor.
    """
    memory = torch.arange(512, dtype=torch.int32)
    x, rows = memory[:256], memory[256:].as_strided((2, 100), (102, 1), 256)
    try:
        Program(HEAD.replace("BODY", body)).run([x.data_ptr()], [x, rows], 1, 2048, order)
    except Fault as fault:
        return set(fault.faults), x
    return set(), x


@pytest.mark.parametrize("order", (0, 1))
@pytest.mark.parametrize(
    "body, faults",
    [
        (
            COPY + WAIT + BARRIER + OF_THE_OTHER_WARP + BARRIER + "st.global.b32 [%rd2], %r5;\n",
            set(),
        ),
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
        ("ld.global.b32 %r5, [%rd1+1420];\n", set()),
        ("ld.global.b32 %r5, [%rd1+1424];\n", {OUTSIDE}),
        ("ld.global.b32 %r5, [%rd1+2048];\n", {OUTSIDE}),
        ("ld.global.b32 %r5, [%rd2+2];\n", {MISALIGNED}),
    ],
)
def test_a_fault_is_reported(body, faults, order):
    found, x = by_hand(body, order)
    assert faults <= found and bool(faults) == bool(found)  # one may bring another with it
    if "st.global" in body and not faults:
        want = torch.arange(256, dtype=torch.int32)
        want[::4] = want.view(2, 128).flip(0).reshape(-1)[::4]
        assert torch.equal(x, want)
