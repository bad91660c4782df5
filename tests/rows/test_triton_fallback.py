"""Kernels that Triton's compiler refuses, and what stands in for them: the compiler itself here, values in the interpreter."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.processes import interpreted

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from grpo_kernels.rows import backends
from grpo_kernels.rows.backends import eager
from grpo_kernels.rows.backends import triton as backend

compiles = pytest.mark.skipif(
    not isinstance(backend._stats_kernel, JITFunction), reason="TRITON_INTERPRET=1: there is nothing to compile"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing has failed, and nothing is compiled, in this process or on disk."""
    monkeypatch.setattr(backend.launch, "_remembered", {})
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    monkeypatch.delenv("GRPO_KERNELS_STRICT", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in (backend._stats_kernel, backend._fused_kernel):
        if isinstance(kernel, JITFunction):
            monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))


def test_values_and_gradients_in_the_interpreter() -> None:
    pytest.importorskip("numpy")  # Triton's interpreter imports it
    interpreted(Path(__file__).with_name("triton_fallback_cases.py"))


def test_auto_alone_may_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "unavailable", lambda name: None)
    monkeypatch.setattr(backend, "serves", lambda device: device.type == "cuda")
    gpu = torch.device("cuda")
    assert type(backends.pick("auto", gpu)) is backend.OrEager
    assert all(type(x) is backend.Kernels for x in (backends.pick("auto", gpu, strict=True), backends.pick("triton", gpu)))
    monkeypatch.setenv("GRPO_KERNELS_STRICT", "1")
    assert type(backends.pick("auto", gpu)) is backend.Kernels


@compiles
@pytest.mark.parametrize("served", ["cuda", "xpu"])
def test_the_device_is_the_one_that_tritons_driver_serves(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is called: "cuda" for NVIDIA and AMD, "xpu" for Intel."""
    active = SimpleNamespace(
        get_current_target=lambda: GPUTarget(served, "some", 32), get_active_torch_device=lambda: torch.device(served, 0)
    )
    driver = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    monkeypatch.setattr(triton.backends, "backends", {served: driver})
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    backend.launch.driver_failure.cache_clear()
    assert type(backends.pick("auto", torch.device(served))) is backend.OrEager
    assert type(backends.pick("triton", torch.device(served))) is backend.Kernels
    other = torch.device({"cuda": "xpu", "xpu": "cuda"}[served])
    with pytest.warns(RuntimeWarning, match=f"no kernels for {other.type} tensors"):
        assert type(backends.pick("auto", other)) is eager.Kernels
    with pytest.raises(RuntimeError, match="the data is on the CPU"):
        backends.pick("triton", torch.device("cpu"))
    monkeypatch.setattr(triton.backends, "backends", {})
    with pytest.raises(RuntimeError, match="finds no device that it has a driver for"):
        backends.pick("auto", torch.device(served), strict=True)
    backend.launch.driver_failure.cache_clear()
