"""How many rows of a batch are of a kind: numbers that a GPU sends to the host before they are asked for, and when they are old."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

KINDS = ("trained", "contributing", "sequences")

UNSEEN = (
    "changed, but torch saw no write into its tensors (through NumPy, DLPack or .data, or in inference mode): write with "
    "torch operations outside of inference mode, or make a new TokenBatch."
)


def versions_of(*tensors: Tensor | None) -> list[int]:
    """Of tensors that have a version, which inference mode makes none with."""
    return [x._version for x in tensors if x is not None and not x.is_inference()]


class Counts:
    """Numbers on their way from a GPU to the host: asking for them waits for the copy, not for work queued since."""

    def __init__(self, counts: Tensor) -> None:
        with torch.cuda.device(counts.device):
            self.values = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
            self.values.copy_(counts, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def on_host(self) -> list[int]:
        self.event.synchronize()
        return self.values.tolist()
