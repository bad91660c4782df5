"""The parts of the reference trainer, one concern per file; `grpo_kernels/training/trainer.py` puts
them together. Here is what all of them share: packages that may not be installed, and the processes
of a run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

T = TypeVar("T")


def require(module: str) -> ModuleType:
    """Import an optional dependency of the trainer, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the trainer needs {module}, which is not installed: pip install '.[train]' in a"
            " checkout of grpo_kernels"
        ) from error


class Ranks:
    """This process among those of the run; one process alone is a world of 1, where nothing here
    communicates.

    Where WORLD_SIZE is above 1 and no process group exists, one is made: NCCL on CUDA devices, gloo
    on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made = False
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Objects travel over gloo, so that they need not wait for the device.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
            self.made = True
        self.rank, self.world = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        self.main = self.rank == 0
        #: The exception that `together` raised, which all ranks have then raised.
        self.shared_error: BaseException | None = None

    def share(self, count: int) -> slice:
        """This rank's part of `count` things:

        consecutive, the parts in the order of the ranks, at most one longer.
        """
        return slice(*(-(-count * rank // self.world) for rank in (self.rank, self.rank + 1)))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def together(self, function: Callable[[], T]) -> list[T]:
        """The function's results on each rank. If it raises on one, all ranks raise, so that none
        waits for a rank that has failed.
        """
        if self.world == 1:
            return [function()]
        result: Any = None
        error = None
        message = ""
        try:
            result = function()
        except Exception as caught:  # which may not be fit to be sent
            error = caught
            message = f"{type(caught).__name__}: {caught}"
        # ValueError and OSError: arguments or the machine are to blame.
        kind = ValueError if isinstance(error, (ValueError, OSError)) else RuntimeError
        outcomes = self.gather((result, message, kind))
        for rank, (_, text, kind) in enumerate(outcomes):
            if text:
                self.shared_error = error or kind(f"process {rank} of the run failed: {text}")
                raise self.shared_error
        return [outcome for outcome, _, _ in outcomes]

    def on_main(self, function: Callable[[], T]) -> T:
        """Its result on rank 0, on every rank; the others wait for it, and fail if it fails."""
        return self.together(lambda: function() if self.main else None)[0]  # type: ignore[return-value]

    @torch.no_grad()
    def make_same(self, model: nn.Module) -> None:
        """Broadcast rank 0's parameters and buffers:

        training would never remove an initial difference between ranks.
        """
        for x in model.state_dict().values() if self.world > 1 else ():
            there = x.to(self.device)
            dist.broadcast(there, 0)
            x.copy_(there)

    def close(self) -> None:
        """Leave the group if it was made here; all ranks have to."""
        if self.made and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
            self.made = False

    def leave(self, status: int) -> int:
        """The exit status of the program; of several processes each ends here with it, once all are
        done.
        """
        if self.world > 1:
            # DDP still holds the process group, whose destructor may wait for ever for a thread of
            # gloo that waits for Python.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        return status
