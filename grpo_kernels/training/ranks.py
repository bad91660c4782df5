"""Communication among the processes of a run. torchrun, `accelerate launch`, srun and Ray Train set ranks in the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Tensor = torch.Tensor
T = TypeVar("T")


class Ranks:
    """This process among those of the run; one process alone is a world of 1, where nothing here communicates.

    Where WORLD_SIZE is above 1 and no process group exists, one is made: NCCL on CUDA devices, gloo on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.made = device, False
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Objects travel over gloo, so that they need not wait for the device.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
            self.made = True
        joined = dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self.main = self.rank == 0
        #: The exception that `together` raised, which all ranks have then raised.
        self.shared_error: BaseException | None = None

    def share(self, count: int) -> slice:
        """This rank's part of `count` things: consecutive, the parts in the order of the ranks, at most one longer."""
        size, longer = divmod(count, self.world)
        first = self.rank * size + min(self.rank, longer)
        return slice(first, first + size + (self.rank < longer))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def rows(self, tensor: Tensor, width: int) -> Tensor:
        """Tensors [b, t] of all ranks as one [B, width] on the CPU, filled up with 0."""
        parts = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in self.gather(tensor.cpu())]
        return torch.cat(parts)

    def any(self, flag: bool) -> bool:
        if self.world == 1:
            return flag
        flags = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    def together(self, function: Callable[[], T]) -> list[T]:
        """The function's results on each rank. If it raises on one, all ranks raise, so that none waits for a rank that has
        failed."""
        if self.world == 1:
            return [function()]
        result, error, message = None, None, None
        try:
            result = function()
        except Exception as caught:
            # What the arguments or the machine are to blame for; the exception itself may not be fit to be sent.
            error = caught
            message = (isinstance(caught, (ValueError, OSError)), f"{type(caught).__name__}: {caught}")
        outcomes = self.gather((result, message))
        failed = [(rank, *told) for rank, (_, told) in enumerate(outcomes) if told is not None]
        if not failed:
            return [outcome for outcome, _ in outcomes]  # type: ignore[misc]
        rank, blame, text = failed[0]
        self.shared_error = error or (ValueError if blame else RuntimeError)(f"process {rank} of the run failed: {text}")
        raise self.shared_error

    def on_main(self, function: Callable[[], Any]) -> None:
        """Run it on rank 0, while the others wait for it, and fail if it fails."""
        self.together(lambda: function() if self.main else None)

    def close(self) -> None:
        """Leave the group if it was made here; all ranks have to."""
        if self.made and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
            self.made = False

    def leave(self, status: int) -> int:
        """The exit status of the program; of several processes each ends here with it, once all are done."""
        if self.world > 1:
            # DDP still holds the process group, whose destructor may wait for ever for a thread of gloo that waits for Python.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        return status
