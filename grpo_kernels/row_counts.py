"""Row counts of a batch: a GPU sends them to the host early, and tensor versions tell when they are stale; rows in the order of
their work."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


class Counts:
    """Numbers that are being copied from a GPU to the host. Reading them waits for the copy only, not for later work."""

    def __init__(self, counts: Tensor) -> None:
        with torch.cuda.device(counts.device):
            self.values = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
            self.values.copy_(counts, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def on_host(self) -> list[int]:
        self.event.synchronize()
        return self.values.tolist()


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
