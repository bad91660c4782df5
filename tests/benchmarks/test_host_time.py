"""What a call asks of the host: no clock, but the operations of torch and the kernels that it launches."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from benchmarks import host_time
from grpo_kernels.vocabulary.backends import triton as backend

pytestmark = pytest.mark.skipif(
    not isinstance(backend._stats_kernel, JITFunction), reason="TRITON_INTERPRET=1: kernels are not launched"
)


@pytest.mark.parametrize("what, most", [("with a mask", 26), ("without", 18)])
def test_operations_of_a_loss_in_place(what: str, most: int) -> None:
    """One kernel, and a microsecond or two of the host for each operation: views, weights, vectors that a mask cuts, the sum."""
    with host_time.as_on_a_gpu() as launched:
        call = host_time.losses()[what]
        call()
        launched.clear()
        names = host_time.operations(call)
    assert launched == ["_fused_kernel"]
    assert len(names) <= most, names
    # A mask is the weight of each token: ones beside it would be read by nobody.
    assert sum(name.startswith("aten.ones") for name in names) == (what == "without"), names
