"""Counts the bytes that ranks send each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from grpo_kernels.rows import parallel as shard

Tensor = torch.Tensor


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """Bytes of each collective, by name; any other than these two fails."""
    sizes: dict[str, list[int]] = {"all_gather": [], "all_reduce": []}
    gather, reduce = shard.all_gather, dist.all_reduce

    def all_gather(out: Tensor, x: Tensor, group: Any) -> None:
        sizes["all_gather"].append(x.numel() * x.element_size())
        gather(out, x, group)

    def all_reduce(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes["all_reduce"].append(x.numel() * x.element_size())
        return reduce(x, *args, **kwargs)

    others = ("all_gather", "broadcast", "barrier", "reduce_scatter_tensor", "all_to_all_single", "all_gather_object")
    refuse = {name: mock.Mock(side_effect=AssertionError(f"a collective of its own: {name}")) for name in others}
    with (
        mock.patch.object(shard, "all_gather", all_gather),
        mock.patch.multiple(dist, all_reduce=all_reduce, **refuse),
    ):
        yield sizes
