"""Losses of draft heads with the head's vocabulary sharded over ranks, with padding ids, against
one process; and with positions sharded over data-parallel ranks.
"""

from __future__ import annotations

import pytest
import test_draft_heads as one_process
import torch
import torch.distributed as dist

from grpo_kernels import Head, LogitTransform, Options, draft_head_loss
from grpo_kernels.distributed import VocabShard
from support.inside import executors

MODULE = "test_draft_heads_ranks"
V = one_process.V
MASK = one_process.LEFT_PADDED
TRANSFORM = LogitTransform(temperature=0.7, softcap=5.0, scale=1.3)
BACKENDS = sorted({name.partition(" ")[0] for name in executors()})
#: The logit of padding ids, if they were part of a softmax: they would have all of its mass.
PADDING = 100.0


def widths_of(ranks):
    """How many rows of the head each rank has, by name. Rows beyond V are padding."""
    return {
        "even": [*(V // ranks,) * (ranks - 1), V - V // ranks * (ranks - 1)],
        "padded": [V // ranks + 5] * ranks,
        "uneven": [7, *(0,) * (ranks - 2), V - 7],
    }


def shard_of_head(weight, bias, widths, rank):
    """This rank's rows of the head, and its part of the vocabulary."""
    start = sum(widths[:rank])
    stop = min(start + widths[rank], V)
    missing = widths[rank] - max(stop - start, 0)
    weight = torch.cat([weight[start:stop], torch.full((missing, weight.shape[1]), PADDING)])
    bias = torch.cat([bias[start:stop], torch.full((missing,), PADDING)])
    return weight.detach(), bias.detach(), VocabShard.of(weight, vocab=V)


def arguments_of(kind, policy, ids):
    """The arguments that one process and a rank share."""
    teacher = policy.detach() if kind == "soft" else None
    labels = ids if kind == "hard" else None
    return teacher, {"kind": kind, "ids": labels, "mask": MASK, "transform": TRANSFORM}


def cases(ranks):
    """(kind, widths, backend) of each case."""
    return [
        (kind, widths, backend)
        for kind in ("soft", "hard")
        for widths in widths_of(ranks).values()
        for backend in BACKENDS
    ]


def check_shards_of_the_vocabulary(rank, ranks):
    """Loss, metrics and gradients are those of one process, and the values equal on all ranks."""
    drafts, policy, weight, bias, ids = one_process.problem()
    for kind, widths, backend in cases(ranks):
        teacher, common = arguments_of(kind, policy, ids)
        whole = draft_head_loss(
            drafts, teacher, Head(weight, bias), options=Options(backend), **common
        )
        exact = torch.autograd.grad(whole.loss, drafts)
        local_weight, local_bias, shard = shard_of_head(weight, bias, widths, rank)
        out = draft_head_loss(
            drafts,
            teacher,
            Head(local_weight, local_bias),
            options=Options(backend, shard=shard),
            **common,
        )
        gradients = torch.autograd.grad(out.loss, drafts)
        for name, value in whole.metrics.items():
            torch.testing.assert_close(out.metrics[name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out.token_losses, whole.token_losses, rtol=1e-5, atol=1e-5)
        for gradient, x in zip(gradients, exact, strict=True):
            torch.testing.assert_close(gradient, x, rtol=1e-5, atol=1e-6)
        of_first = out.token_losses.detach().clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(of_first, out.token_losses)


def check_shares_of_the_gradient(rank, ranks):
    """With reduce_hidden=False each rank gets a share, whose sum is the gradient."""
    drafts, policy, weight, bias, ids = one_process.problem()
    for kind in ("soft", "hard"):
        teacher, common = arguments_of(kind, policy, ids)
        whole = draft_head_loss(drafts, teacher, Head(weight, bias), **common)
        exact = torch.autograd.grad(whole.loss, drafts)
        widths = widths_of(ranks)["padded"]
        local_weight, local_bias, shard = shard_of_head(weight, bias, widths, rank)
        shard = VocabShard(shard.start, V, reduce_hidden=False)
        out = draft_head_loss(
            drafts, teacher, Head(local_weight, local_bias), options=Options(shard=shard), **common
        )
        for share, x in zip(torch.autograd.grad(out.loss, drafts), exact, strict=True):
            assert not torch.allclose(share, x, rtol=1e-2)
            dist.all_reduce(share)
            torch.testing.assert_close(share, x, rtol=1e-5, atol=1e-6)


def check_data_parallel_ranks(rank, ranks):
    """With the number of positions of all ranks as normalizer, losses add up to that of all."""
    shape = (ranks, one_process.T)
    drafts, policy, weight, _, _ = one_process.problem(depths=1, shape=shape)
    mask = torch.arange(one_process.T) >= torch.arange(ranks)[:, None]
    whole = draft_head_loss(drafts, policy, weight, mask=mask)
    mine = slice(rank, rank + 1)
    local = (drafts[0][mine], policy[mine], weight)
    with torch.no_grad():
        positions = draft_head_loss(*local, mask=mask[mine]).metrics["positions"][0]
    dist.all_reduce(positions)
    assert positions == whole.metrics["positions"][0]
    loss = draft_head_loss(*local, mask=mask[mine], normalizer=positions).loss.detach()
    dist.all_reduce(loss)
    torch.testing.assert_close(loss, whole.loss.detach())


@pytest.mark.parametrize("check", [name for name in list(globals()) if name.startswith("check_")])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(on_ranks, ranks, check):
    assert on_ranks(MODULE, ranks)[check] == "ok", on_ranks(MODULE, ranks)[check]
