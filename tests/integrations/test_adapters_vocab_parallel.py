"""Adapters of trainers on logits and heads that are cut over two tensor-parallel ranks.

Each adapter on two ranks is compared with itself on one rank, which other tests compare with the
trainers.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from grpo_kernels import TokenSets
from grpo_kernels.integrations import areal, miles, skyrl, slime, verl
from support.processes import checks_of
from support.trainers import (
    values_and_gradients,
)

N, H, WIDTH = 11, 6, 13
V = (
    2 * WIDTH
)  # the last ids are padding of the head: no target, but in the softmax, as they are for the trainers

G = torch.Generator().manual_seed(7)
LOGITS, HIDDEN, WEIGHT = (
    2 * torch.randn(N, V, generator=G),
    torch.randn(N, H, generator=G),
    torch.randn(V, H, generator=G),
)
TOKENS, KEEP = (
    torch.tensor([0, WIDTH - 1, WIDTH, V - 4, 5, 20, 3, 14, 9, 16, 2]),
    torch.rand(N, V, generator=G) < 0.3,
)
KEEP[2, :WIDTH], KEEP[3, WIDTH:] = False, False  # none on one rank
#: In one rank's part alone, in both, without the target, empty.
LISTS = [[0, 2], [WIDTH + 1], [1, WIDTH], [], [int(TOKENS[4])], *[[3, WIDTH + 2, 7]] * (N - 5)]
REPLAY = slime.Replay(TokenSets.from_lists(LISTS), torch.tensor([bool(row) for row in LISTS]))
SETS = torch.where(KEEP, torch.arange(V), -1).sort(-1, descending=True).values[:, :9]
SETS = torch.where(SETS == TOKENS[:, None], -1, SETS)
SETS[:, 0], SETS[1], SETS[2, 1:] = TOKENS, -1, -1


@functools.cache
def alone():
    """A process group with this rank only."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def own(x, rank, dim=-1):
    return x.split(WIDTH, dim)[rank].clone()


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


def of_slime(x, group, mask=None, **options):
    mask = (
        mask
        if isinstance(mask, slime.Replay) or mask is None or x.shape[-1] == V
        else own(mask, dist.get_rank())
    )
    return slime.calculate_log_probs_and_entropy(
        x, TOKENS, group, log_prob_keep_mask=mask, **options
    )


ENTROPY = {"with_entropy": True}
#: Calls of logits and a group; no group is all ranks, as torch.distributed and slime have it.
OF_LOGITS = {
    "areal": lambda x, group: areal.gather_logprobs(x, TOKENS, 1.0, tp_group=group),
    "areal, entropy": lambda x, group: areal.gather_logprobs_entropy(x, TOKENS, 0.7, tp_group=group),
    "areal, trees": lambda x, group: areal.mapped_logprobs_entropy(x, torch.arange(N) // 3, TOKENS, 0.7, tp_group=group),
    "slime": of_slime, "slime, entropy": functools.partial(of_slime, **ENTROPY), "slime, mask": functools.partial(of_slime, mask=KEEP, **ENTROPY),
    "slime, no group": lambda x, group: of_slime(x, None if x.shape[-1] < V else group, with_entropy_grad=False, **ENTROPY),
    "slime, replay": functools.partial(of_slime, mask=REPLAY, **ENTROPY),
    "slime, head": lambda x, group: slime.calculate_topk_log_probs(x, SETS, group, temperature=0.7),
    "miles, head": lambda x, group: miles.selected_log_probs_and_entropy(x, SETS, group=group, vocab_size=V - 2, with_entropy=True),
    "slime, entropy of sets": functools.partial(of_slime, mask=REPLAY, entropy_over="kept", **ENTROPY),
}  # fmt: skip


def of_skyrl(h, w, group):
    start = dist.get_rank() * WIDTH if len(w) < V else 0
    return skyrl.fused_lm_head_logprobs(
        "torch", h[None], w, TOKENS[None], start, start + len(w), 4, group, False
    )


def of_skyrls_sets(h, w, group):
    start = dist.get_rank() * WIDTH if len(w) < V else 0
    bounds = {"vocab_start_index": start, "vocab_end_index": start + len(w)}
    return skyrl.sample_support_logprobs(
        h, TOKENS, SETS, tp_group=group, lm_head_weight=w, **bounds
    )[0]


#: Calls of hidden states, a head and a group; verl's are in Megatron's layout, [S, 1, H].
OF_HEADS = {
    "skyrl": of_skyrl, "skyrl, no group": lambda h, w, group: of_skyrl(h, w, None if len(w) < V else group), "skyrl, sets": of_skyrls_sets,
    "verl": lambda h, w, group: verl.linear_cross_entropy(h[:, None], w, TOKENS[None], 0.7, "none", group),
}  # fmt: skip


def check_logits(rank, ranks):
    """Values on this rank, and its columns of the gradient."""
    for call in OF_LOGITS.values():
        *values, gradient = values_and_gradients(
            lambda x, call=call: call(x, dist.group.WORLD), own(LOGITS, rank)
        )
        *expected, whole = values_and_gradients(lambda x, call=call: call(x, alone()), LOGITS)
        same([*values, gradient], [*expected, own(whole, rank)])


def check_heads(rank, ranks):
    """The gradient of hidden is this rank's share: the shares of all add up to it."""
    for call in OF_HEADS.values():
        *values, d_hidden, d_weight = values_and_gradients(
            lambda h, w, call=call: call(h, w, dist.group.WORLD), HIDDEN, own(WEIGHT, rank, 0)
        )
        *expected, whole, whole_weight = values_and_gradients(
            lambda h, w, call=call: call(h, w, alone()), HIDDEN, WEIGHT
        )
        assert (d_hidden - whole).abs().max() > 0.1
        dist.all_reduce(d_hidden)
        same([*values, d_weight, d_hidden], [*expected, own(whole_weight, rank, 0), whole])


# ---- the test


@pytest.mark.parametrize("check", checks_of(__name__))
def test_on_two_ranks(on_ranks, check):
    assert on_ranks(__name__, 2)[check] == "ok", on_ranks(__name__, 2)[check]
