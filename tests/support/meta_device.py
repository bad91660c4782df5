"""Meta tensors as those of a device that is no CPU: they have no values that the host could read, and copies from pageable memory,
which wait for a real device too, can be made errors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_kernels import TokenSets

Tensor = torch.Tensor

#: What reading a value of a meta tensor raises.
WAITS = (NotImplementedError, RuntimeError)


class CopyError(Exception):
    """The host copies to the device, and waits for that."""


def make_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors are those of a device that computes eagerly, and that the host cannot copy to without a wait."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which does not know this device
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    _refuse_copies(monkeypatch)


def _refuse_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of the host become tensors of a device by factories that fill them (torch.full) alone; indices are on the device.
    No mode of torch does this, because it is off while a backward runs."""

    def refuse(owner: Any, name: str, copies: Callable[..., bool]) -> None:
        given = getattr(owner, name)

        @functools.wraps(given)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("non_blocking") and copies(*args, **kwargs):
                raise CopyError(name)
            return given(*args, **kwargs)

        monkeypatch.setattr(owner, name, checked)

    for name in ("tensor", "as_tensor", "asarray"):
        refuse(torch, name, lambda data, *_, device=None, **__: _is_meta(device) and not _on_device(data))
    refuse(Tensor, "new_tensor", lambda x, data, *_, device=None, **__: _is_meta(device or x) and not _on_device(data))
    refuse(Tensor, "type_as", lambda x, other: _from_host(x) and _is_meta(other))
    refuse(Tensor, "to", lambda x, *args, **named: _from_host(x) and any(map(_is_meta, (*args, *named.values()))))
    for name in ("copy_", "set_"):
        refuse(Tensor, name, lambda x, *args: _on_device(x) and any(map(_from_host, args)))
    for name in ("__getitem__", "__setitem__"):
        refuse(Tensor, name, lambda x, index, *_: _on_device(x) and _has_host_indices(index))


def _is_meta(x: Any) -> bool:
    return _on_device(x) or (isinstance(x, str | torch.device) and torch.device(x).type == "meta")


def _on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_meta


def _from_host(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cpu"


def _has_host_indices(index: Any) -> bool:
    return any(isinstance(x, list) or _from_host(x) for x in (index if isinstance(index, tuple) else (index,)))


def on_meta(x: Any) -> Any:
    """A tensor, sets, or the values of a dict, in the shape that they have, on the device."""
    if isinstance(x, dict):
        return {name: on_meta(value) for name, value in x.items()}
    if isinstance(x, TokenSets):
        return x._apply(on_meta)
    return torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x
