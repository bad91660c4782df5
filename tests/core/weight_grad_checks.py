"""The caller's memory for the gradient of a head's weight, with hooks that reduce gradients. Run by test_weight_grad.py on two
ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from grpo_kernels import Objective, Options, TokenBatch, TokenSets
from grpo_kernels.model import FusedLMHead

Tensor = torch.Tensor
BEFORE_THE_RANKS = ("torch.distributed.fsdp",)
V, H, ROWS = 23, 6, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(H, H)
        self.lm_head = FusedLMHead(nn.Linear(H, V, bias=False))

    def forward(self, x: Tensor, batch: TokenBatch, **options: Any) -> Tensor:
        return self.lm_head(
            torch.tanh(self.body(x)), batch, Objective.preset("dapo"), normalizer=4.0, options=Options(**options)
        ).loss


def data(rank: int, kept: bool) -> tuple[Tensor, TokenBatch]:
    g = torch.Generator().manual_seed(rank)
    targets = torch.randint(V, (ROWS,), generator=g)
    sets = TokenSets.from_lists([[1, 2], [], [5 + rank], [3, 20, 9], [0, 7]]) if kept else None
    return torch.randn(ROWS, H, generator=g), TokenBatch(targets, torch.randn(ROWS, generator=g), kept=sets)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def expected(ranks: int, kept: bool) -> dict[str, Tensor]:
    """The mean over ranks, in one process."""
    whole = model()
    for rank in range(ranks):
        (whole(*data(rank, kept)) / ranks).backward()
    return {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def assert_mean(found: Tensor | None, want: Tensor) -> None:
    assert found is not None and want.abs().max() > 1e-3
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-7)


def check_ddp_leaves_zeros(rank: int, ranks: int) -> None:
    """As documented: what it reduces is not what was added."""
    wrapped = DistributedDataParallel(model())
    total = torch.zeros(V, H)
    wrapped(*data(rank, True), weight_grad=total).backward()
    weight = wrapped.module.lm_head.weight
    assert weight.grad is not None and not weight.grad.any() and total.any()
    assert_mean(wrapped.module.body.weight.grad, expected(ranks, True)["body.weight"])


def check_ddp_without_the_head(rank: int, ranks: int) -> None:
    """The remedy of the page: the buffer is reduced once, after two micro-batches."""
    for kept in (True, False):
        inner = model()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["lm_head.weight"])
        wrapped, total = DistributedDataParallel(inner), torch.zeros(V, H)
        with wrapped.no_sync():
            wrapped(*data(rank, kept), weight_grad=total).backward()
        wrapped(*data(rank, kept), weight_grad=total).backward()
        assert inner.lm_head.weight.grad is None
        dist.all_reduce(total)
        want = expected(ranks, kept)
        assert_mean(total / ranks, 2 * want["lm_head.weight"])
        assert_mean(inner.body.weight.grad, 2 * want["body.weight"])


def check_fsdp2(rank: int, ranks: int) -> None:
    """Refused where it gathers the head, in its own group or in the root's; with the head left whole it works."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for own_group in (False, True):
        sharded = model()
        if own_group:
            fully_shard(sharded.lm_head, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for kept in (True, False):
            try:
                sharded(*data(rank, kept), weight_grad=torch.zeros(V, H))
            except ValueError as error:
                assert "FSDP gathers this weight" in str(error), error
            else:
                raise AssertionError("nobody would have reduced this gradient")
    inner = model()
    fully_shard(inner, mesh=mesh, ignored_params={inner.lm_head.weight})
    total, want = torch.zeros(V, H), expected(ranks, True)
    inner(*data(rank, True), weight_grad=total).backward()
    dist.all_reduce(total)
    assert_mean(total / ranks, want["lm_head.weight"])
    assert_mean(inner.body.weight.grad.full_tensor(), want["body.weight"])


def check_megatron(rank: int, ranks: int) -> None:
    """A hook after the gradient was accumulated, which adds it to main_grad unless the flag is set, and drops it, as Megatron's
    does; then one reduction of main_grad."""
    for kept in (True, False):
        mine = copy.deepcopy(model())
        weight = mine.lm_head.weight
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(V, H), False  # type: ignore[assignment]
        seen = []

        def hook(p: Any, seen: list[bool] = seen) -> None:
            seen.append(p.grad is not None and p.grad.shape == p.shape)
            if not p.grad_added_to_main_grad:
                p.main_grad.add_(p.grad)
            p.grad = None

        weight.register_post_accumulate_grad_hook(hook)
        mine(*data(rank, kept), weight_grad=weight.main_grad).backward()
        mine(*data(rank, kept), weight_grad=weight.main_grad).backward()
        assert seen == [True, True] and weight.grad is None and weight.grad_added_to_main_grad is True
        dist.all_reduce(weight.main_grad)
        assert_mean(weight.main_grad / ranks, 2 * expected(ranks, kept)["lm_head.weight"])
