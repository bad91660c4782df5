"""The parts of the reference trainer, which trainer.py puts together.

This file has what all of them use: imports of optional packages, and the processes (ranks) of a
run.
"""

from __future__ import annotations

import importlib
import math
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
    """Import and return a module that the trainer needs.

    Raises ModuleNotFoundError, which says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the trainer needs {module}, which is not installed: pip install '.[train]' in a"
            " checkout of grpo_kernels"
        ) from error


class Ranks:
    """The processes of a run, and the rank of this one. One process alone does not communicate.

    If WORLD_SIZE is above 1 in the environment and there is no process group yet, one is created:
    NCCL on CUDA devices, gloo on the CPU.

    rank           rank of this process
    world          number of processes
    main           whether this is rank 0
    shared_error   the exception that `together` raised on all ranks, or None
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made_group = False
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Python objects are sent over gloo, so that they do not wait for the device.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
            self.made_group = True
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.main = self.rank == 0
        self.shared_error: BaseException | None = None

    def share(self, count: int) -> slice:
        """Return the slice of `count` items that belongs to this rank.

        The slices of all ranks follow each other. Their lengths differ by at most one.
        """
        start, stop = (math.ceil(count * rank / self.world) for rank in (self.rank, self.rank + 1))
        return slice(start, stop)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether the flag of any rank is True, on every rank."""
        return any(self.gather(flag))

    def together(self, function: Callable[[], T]) -> list[T]:
        """Call a function on all ranks. Return its results on all ranks, on every rank.

        If it raises on one rank, all ranks raise, so that none waits for a rank that has failed.
        Ranks where it did not raise raise ValueError if the cause is a ValueError or an OSError
        (wrong arguments, or the machine), else RuntimeError.
        """
        if self.world == 1:
            return [function()]
        result: Any = None
        error = None
        message = ""
        try:
            result = function()
        except Exception as caught:  # it may not be possible to pickle, so its text is sent
            error = caught
            message = f"{type(caught).__name__}: {caught}"
        kind = ValueError if isinstance(error, (ValueError, OSError)) else RuntimeError
        outcomes = self.gather((result, message, kind))
        for rank, (_, text, kind) in enumerate(outcomes):
            if text:
                self.shared_error = error or kind(f"process {rank} of the run failed: {text}")
                raise self.shared_error
        return [outcome for outcome, _, _ in outcomes]

    def on_main(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 only. Return its result on every rank.

        The other ranks wait for it, and raise if it raises.
        """
        return self.together(lambda: function() if self.main else None)[0]  # type: ignore[return-value]

    @torch.no_grad()
    def make_same(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of rank 0 to all ranks.

        Training would never remove an initial difference between ranks.
        """
        if self.world == 1:
            return
        for x in model.state_dict().values():
            on_device = x.to(self.device)
            dist.broadcast(on_device, 0)
            x.copy_(on_device)

    def close(self) -> None:
        """Destroy the process group if `__init__` created it. All ranks must call this."""
        if self.made_group and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
            self.made_group = False

    def leave(self, status: int) -> int:
        """Return the exit status of the program, or end this process if there are others."""
        if self.world > 1:
            # A normal exit may hang: DDP still has the process group, whose destructor waits for a
            # thread of gloo that waits for Python.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        return status
