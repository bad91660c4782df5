"""Row counts of a batch: a GPU sends them to the host early, and tensor versions tell when they are stale; rows in the order of
their work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .batch import TokenBatch
    from .formulas.token_stage import TokenRows
    from .objective import Objective
    from .vocabulary.kept import KeptRows

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


def split_rows(
    batch: TokenBatch, rows: TokenRows, objective: Objective, kept: KeptRows | None
) -> tuple[Tensor, int]:  # fmt: skip
    """(indices of the rows that are read over the whole vocabulary, those that can have a gradient first, each kind in order;
    how many of them can), without waiting for the device."""
    n, device = rows.targets.numel(), rows.targets.device
    read, active = rows.read, batch.marked(objective.active_rows) if rows.active is None else rows.active
    same = read is active
    if kept is not None:
        if kept.has_all:
            return torch.empty(0, dtype=torch.int64, device=device), 0
        read, active = kept.others(read), kept.others(active)
    if read is None and active is None:
        return torch.arange(n, device=device), n
    rank = torch.full_like(rows.targets, 2)
    for value, mask in ((1, read), (0, active)):
        rank = torch.full_like(rank, value) if mask is None else torch.where(mask, value, rank)
    order = torch.argsort(rank, stable=True)
    kind = str if kept is None else whole
    can_have = batch.count(kind(objective.active_rows), active)
    return order[: can_have if same else batch.count(kind("trained"), read)], can_have
