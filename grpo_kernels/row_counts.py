"""Row counts of a batch: a GPU sends them to the host early, and tensor versions tell when they are stale."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor

KINDS = ("trained", "contributing", "sequences")


def whole(kind: str) -> str:
    """The kind of those of these rows that have no set of kept ids: they run over the whole vocabulary."""
    return f"{kind}, whole"


UNSEEN = (
    "changed, but torch saw no write into its tensors (through NumPy, DLPack or .data, or in inference mode): write with "
    "torch operations outside of inference mode, or make a new TokenBatch."
)


def versions_of(*tensors: Tensor | None) -> list[int]:
    """The version counters of the tensors; a tensor made in inference mode has none."""
    return [x._version for x in tensors if x is not None and not x.is_inference()]


#: Devices with events and copies to pinned memory that run beside the host, where counts are sent ahead. ROCm's devices are called
#: cuda; on xpu this has not been run.
AHEAD = ("cuda", "xpu")


def sends_ahead(device: torch.device) -> bool:
    return device.type in AHEAD


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured into a graph."""
    if device.type == "meta":  # which has no module
        return False
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)  # xpu: not in every torch
    return asked is not None and bool(asked())


class Counts:
    """Numbers that are being copied from a GPU to the host. The first reading waits for the copy only, not for later work; the
    others wait for nothing. While a graph is captured the host can do neither."""

    def __init__(self, counts: Tensor) -> None:
        _refuse_capture(counts.device)
        module = torch.get_device_module(counts.device)
        with module.device(counts.device):
            values = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
            values.copy_(counts, non_blocking=True)
            event = module.Event()
            event.record()
        self.device, self.known = counts.device, list[int]()
        self.sent: tuple[Tensor, Any] | None = (values, event)

    def on_host(self) -> list[int]:
        if self.sent is not None:
            _refuse_capture(self.device)
            values, event = self.sent
            event.synchronize()
            self.known, self.sent = values.tolist(), None
        return self.known


def _refuse_capture(device: torch.device) -> None:
    if is_capturing(device):
        raise RuntimeError(
            "a graph is being captured, and the host does not know the row counts of this TokenBatch yet: call the loss once on this "
            "batch before capturing, and again after a write into its mask, advantages or weights."
        )
