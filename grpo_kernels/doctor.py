"""python -m grpo_kernels doctor: which backend runs here and why, checked against float64."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Sequence

import torch

from . import __version__, backends
from .batch import TokenBatch
from .losses import grpo_loss
from .objective import Objective
from .surrogates import Clip

SETTINGS = {
    "GRPO_KERNELS_STRICT": "1: a fallback to eager raises instead of warning",
    "GRPO_KERNELS_CHECK": "1: ids, temperatures and offsets are checked on a GPU too, which waits for it at each call",
    "TRITON_INTERPRET": '1: backend="triton" runs CPU tensors in Triton\'s interpreter (slow, for tests)',
}


def self_test(backend: str, device: torch.device) -> float:
    """Largest gradient error of a small clipped objective against float64, relative to the largest entry."""
    g = torch.Generator().manual_seed(0)
    logits, old, advantages = (
        3 * torch.randn(17, 1003, generator=g),
        torch.randn(2, 17, generator=g),
        torch.randn(17, generator=g),
    )
    targets = torch.randint(0, 1003, (17,), generator=g)

    exact = logits.double().requires_grad_()
    logps = exact.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    old, ref = logps.detach().float() + 0.3 * old
    ratio, d = torch.exp(logps - old), ref - logps
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages) + 0.1 * (torch.exp(d) - d - 1)
    (expected,) = torch.autograd.grad(loss.mean(), exact)

    x = logits.to(device).requires_grad_()
    tensors = [t.to(device) for t in (targets, advantages, old, ref)]
    batch = TokenBatch(tensors[0], tensors[1], old_logps=tensors[2], ref_logps=tensors[3])
    out = grpo_loss(x, batch, Objective(surrogate=Clip(0.2, 0.28), beta=0.1), backend=backend)
    (gradient,) = torch.autograd.grad(out.loss, x)
    return float((gradient.double().cpu() - expected).abs().max() / expected.abs().max())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0 if every available backend passes its self-test and this machine's device has its own."""
    parser = argparse.ArgumentParser(prog="python -m grpo_kernels doctor", description=main.__doc__)
    parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    print(
        f"grpo_kernels {__version__}, torch {torch.__version__}, triton {_version('triton')}, Python {platform.python_version()}"
    )
    print(f"device: {device.type} ({where}), {torch.get_num_threads()} CPU threads\n")

    healthy = True
    for name in backends.BACKENDS:
        reason = backends.unavailable(name)
        target = device if name != "cpu" else torch.device("cpu")
        if reason is None and name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            reason = "no GPU"
        if reason is not None:
            print(f"{name:8} not available: {reason}")
            continue
        error = self_test(name, target)
        passed = error < 1e-5
        healthy &= passed
        print(f"{name:8} {'ok' if passed else 'WRONG'}: gradient error {error:.1e} against float64{_detail(name)}")

    native = {"cpu": "cpu", "cuda": "triton"}[device.type]
    reason = backends.unavailable(native)
    if reason is None:
        print(f'\nbackend="auto" uses {native} for {device.type} tensors.')
    else:
        healthy = False
        print(f'\nbackend="auto" falls back to eager, with a warning: {reason}')
    print("\nsettings (environment):")
    for name, meaning in SETTINGS.items():
        print(f"  {name}={os.environ.get(name, '')!s:3} {meaning}")
    return 0 if healthy else 1


def _detail(name: str) -> str:
    if name != "cpu":
        return ""
    from . import _cpu

    return f" ({_cpu.isa()}, {_cpu.compiler()})"
