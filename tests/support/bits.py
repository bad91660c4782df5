"""Tensors compared: bit by bit, before and after a call, and by the rule by which errors are judged."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits (NaN equals itself; -0 does not equal 0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def snapshot(**tensors: Tensor | None) -> Callable[[], None]:
    """Remember tensors; calling the result asserts that their bits have not changed."""
    before = {k: v.detach().clone() for k, v in tensors.items() if isinstance(v, Tensor)}

    def check() -> None:
        for name, old in before.items():
            new = tensors[name]
            assert new is not None and same_bits(old, new.detach()), f"{name} was modified"

    return check


def assert_no_worse(ours: Tensor, naive: Tensor, exact: Tensor, what: str, tiny: float = 4e-6) -> None:
    """Our largest and our rms error are at most those of the naive computation, plus `tiny` times the largest value. A single value
    is a mean of terms of about 1 that may cancel, so there it is `tiny` at least."""
    assert ours.shape == exact.shape, f"{what}: shape {list(ours.shape)}, expected {list(exact.shape)}"
    assert torch.isfinite(ours).all(), f"{what}: not finite"
    if exact.numel() == 0:
        return
    ours, naive, exact = ours.detach(), naive.detach(), exact.detach()
    scale = float(exact.abs().max())
    assert scale > 0, f"{what}: the case is trivial"
    mine, theirs = (ours.double() - exact.double()).abs(), (naive.double() - exact.double()).abs()
    for kind, a, b in (
        ("largest", mine.max(), theirs.max()),
        ("rms", mine.square().mean().sqrt(), theirs.square().mean().sqrt()),
    ):
        assert float(a) <= float(b) + tiny * (max(scale, 1.0) if exact.numel() == 1 else scale), (
            f"{what}: {kind} error {float(a):.3e}, naive {float(b):.3e}, scale {scale:.3e}"
        )
