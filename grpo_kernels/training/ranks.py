"""The processes of a run: what they tell each other, and the model on all of them, as copies with reduced gradients (DDP) or in
shards (FSDP2). torchrun, `accelerate launch`, srun and Ray Train set ranks in the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint

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
        return slice(*(-(-count * rank // self.world) for rank in (self.rank, self.rank + 1)))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

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
        result: Any = None
        error, message = None, ""
        try:
            result = function()
        except Exception as caught:  # which may not be fit to be sent
            error, message = caught, f"{type(caught).__name__}: {caught}"
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
        """Broadcast rank 0's parameters and buffers: training would never remove an initial difference between ranks."""
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
        """The exit status of the program; of several processes each ends here with it, once all are done."""
        if self.world > 1:
            # DDP still holds the process group, whose destructor may wait for ever for a thread of gloo that waits for Python.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        return status


class Inside(nn.Module):
    """Runs any function of the model in a forward of its own. The hooks of a wrapper around it, which reduce gradients and
    gather shards, fire whatever the function does: reads the head's weight as an attribute, say, or samples in a loop."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


class ParallelModel:
    """A causal language model in the layout of the run: "ddp" or "fsdp2", in a run of one process neither.

    Ranks have to make the same calls in the same number and order; under "fsdp2" those without gradients too, and every
    forward of the model within them, because each gathers shards from all ranks."""

    def __init__(self, model: Any, ranks: Ranks, layout: str, *, frozen: bool = False) -> None:
        self.model, self.ranks = model, ranks
        self.layout = layout if ranks.world > 1 else "single"
        self.inside: Any = Inside(model)
        if frozen:
            model.eval().requires_grad_(False)
        if self.layout == "ddp" and not frozen:
            self.inside = nn.parallel.DistributedDataParallel(self.inside, broadcast_buffers=False)
        elif self.sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(ranks.device.type, (ranks.world,))
            # The classes that the model says must stay whole: its decoder layers.
            whole = set(getattr(model, "_no_split_modules", None) or ())
            for module in model.modules():
                if type(module).__name__ in whole:
                    fully_shard(module, mesh=mesh)
            # Embedding, norm and head are the root's: plain tensors in its forward, also where they are tied.
            fully_shard(self.inside, mesh=mesh)

    @property
    def sharded(self) -> bool:
        """Whether a forward gathers parameters from other ranks."""
        return self.layout == "fsdp2"

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(model, *arguments), whose backward reduces gradients to their mean over the ranks. It returns a tuple,
        named tuple or dict of tensors: what wrappers find tensors in."""
        return self.inside(function, *arguments)

    @torch.no_grad()
    def without_gradients(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(model, *arguments), which may return anything."""
        if not self.sharded:
            return function(self.model, *arguments)
        try:
            return self.inside(function, *arguments)
        finally:
            self.inside.reshard()  # which a forward leaves to the backward

    def autocast(self, dtype: str) -> AbstractContextManager:
        """Around a forward: its arithmetic. Copies of the weights are kept until it ends; of gathered shards they would become the
        whole model."""
        if dtype == "float32":
            return nullcontext()
        return torch.autocast(self.ranks.device.type, getattr(torch, dtype), cache_enabled=not self.sharded)

    def reduction(self, wanted: bool) -> AbstractContextManager:
        """Around forward and backward: False leaves gradients as sums of this rank, to be reduced by a later backward. Sharded
        gradients are reduced every time: unreduced ones would be whole on each rank."""
        return nullcontext() if wanted or self.layout != "ddp" else self.inside.no_sync()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most `max_norm`. Returns the norm before, of the whole model."""
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def state(self, *optimizers: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """The states of model and optimizers, whole whatever the layout, on the CPU of rank 0; empty on the others, which have to
        call it too."""
        options = checkpoint.StateDictOptions(full_state_dict=True, cpu_offload=True)
        return checkpoint.get_state_dict(self.model, optimizers, options=options)

    def load_state(self, state: tuple[dict[str, Any], dict[str, Any]], *optimizers: torch.optim.Optimizer) -> None:
        """Load what `state` returned, which only rank 0 needs to have."""
        how: dict[str, Any] = {"full_state_dict": True, "broadcast_from_rank0": self.ranks.world > 1}
        checkpoint.set_model_state_dict(self.model, state[0], options=checkpoint.StateDictOptions(**how))
        options = checkpoint.StateDictOptions(**how, strict=False)  # rank 0 alone has the optimizer's names
        for optimizer in optimizers:
            checkpoint.set_optimizer_state_dict(self.model, optimizer, state[1], options=options)
