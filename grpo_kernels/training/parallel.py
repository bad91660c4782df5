"""The model on several processes: copies with reduced gradients (DDP), or parameters in shards (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint

from .ranks import Ranks

Tensor = torch.Tensor

LAYOUTS = ("ddp", "fsdp2")


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

    def reduction(self, wanted: bool) -> AbstractContextManager:
        """Around forward and backward: False leaves gradients as sums of this rank, to be reduced by a later backward. Sharded
        gradients are reduced every time: unreduced ones would be whole on each rank."""
        return nullcontext() if wanted or self.layout != "ddp" else self.inside.no_sync()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most `max_norm`. Returns the norm before, of the whole model."""
        return whole_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    # ---- states of one format, whatever the layout: whole tensors by the model's own names

    def state(self) -> dict[str, Tensor]:
        """The model's state on the CPU, on rank 0; {} on the others, which have to call it too."""
        return checkpoint.get_model_state_dict(self.model, options=self._options())  # type: ignore[return-value]

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned, which only rank 0 needs to have."""
        checkpoint.set_model_state_dict(self.model, state, options=self._options(loading=True))  # type: ignore[arg-type]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return checkpoint.get_optimizer_state_dict(self.model, optimizer, options=self._options())

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        checkpoint.set_optimizer_state_dict(self.model, optimizer, state, options=self._options(loading=True, optimizer=True))

    def _options(self, loading: bool = False, optimizer: bool = False) -> checkpoint.StateDictOptions:
        several = self.ranks.world > 1
        return checkpoint.StateDictOptions(
            full_state_dict=True, cpu_offload=not loading, broadcast_from_rank0=loading and several, strict=not optimizer
        )


def whole_tensor(x: Any) -> Tensor:
    """A tensor whose shards may be on several ranks, on each."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


@torch.no_grad()
def same_on_all_ranks(model: nn.Module, ranks: Ranks) -> None:
    """Broadcast rank 0's parameters and buffers: training would never remove an initial difference between ranks."""
    if ranks.world > 1:
        for x in model.state_dict().values():
            there = x.to(ranks.device)
            dist.broadcast(there, 0)
            x.copy_(there)
