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
        """Find the rank of this process, and create a process group if there is none.

        device   the device of this process
        """
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
        start = math.ceil(count * self.rank / self.world)
        stop = math.ceil(count * (self.rank + 1) / self.world)
        return slice(start, stop)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks, on every rank.

        value   any object that can be pickled
        """
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

        If it raises on one rank, all ranks raise, so that none waits for a rank that has failed. A
        rank where the function raised raises the same exception. The other ranks raise ValueError
        if the cause is a ValueError or an OSError (wrong arguments, or the machine), else
        RuntimeError.

        function   its result must be possible to pickle
        """
        if self.world == 1:
            return [function()]
        result: Any = None
        own_error: Exception | None = None
        message = ""
        error_type: type[Exception] = RuntimeError
        try:
            result = function()
        except Exception as error:
            own_error = error
            # The exception itself may not be possible to pickle, so only its text is sent.
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, (ValueError, OSError)):
                error_type = ValueError
        outcomes = self.gather((result, message, error_type))
        for rank, (_, rank_message, rank_error_type) in enumerate(outcomes):
            if rank_message:
                text = f"process {rank} of the run failed: {rank_message}"
                self.shared_error = own_error or rank_error_type(text)
                raise self.shared_error
        return [rank_result for rank_result, _, _ in outcomes]

    def on_main(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 only. Return its result on every rank.

        The other ranks wait for it, and raise if it raises.
        """
        return self.together(lambda: function() if self.main else None)[0]  # type: ignore[return-value]

    @torch.no_grad()
    def make_same(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of rank 0 to all ranks.

        model   on each rank a model of the same architecture, on any device

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
        """Return the exit status of the program. With several ranks, end this process with it.

        A normal exit may hang: DDP still has the process group, whose destructor waits for a thread
        of gloo that waits for Python.
        """
        if self.world > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        return status
