"""The tensors that operators return."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor


class Allocations(TorchDispatchMode):
    """The shapes of all tensors that operators return in this context, except for views of existing ones."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {
            x.untyped_storage().data_ptr() for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor) and x.numel() and x.untyped_storage().data_ptr() not in known:
                self.shapes.append(tuple(x.shape))
        return out
