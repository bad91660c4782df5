"""Row counts of a batch: a GPU sends them to the host early, and tensor versions tell when they are stale."""

from __future__ import annotations

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
