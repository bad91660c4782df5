"""Vocabulary-parallel heads and logits equal whole ones, on 1, 2 and 4 ranks and by merging parts in one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from grpo_kernels import Objective, grpo_loss
from grpo_kernels.distributed import VocabShard
from grpo_kernels.vocabulary import backends
from grpo_kernels.vocabulary.merging import merge
from grpo_kernels.vocabulary.rows import RowTransform
from grpo_kernels.vocabulary.shard import on_shard
from support.cases import build, same_bits
from support.processes import checks_of, run_whole_products
from support.rows import EVERYTHING, LOGPS, slopes_of

MODULE, KEPT = "vocab_parallel_checks", "kept_parallel_checks"


@pytest.mark.parametrize("check", checks_of(MODULE))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_ranks(on_ranks: Callable[..., dict[str, str]], ranks: int, check: str) -> None:
    assert on_ranks(MODULE, ranks)[check] == "ok", on_ranks(MODULE, ranks)[check]


@pytest.mark.parametrize("check", checks_of(KEPT))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_kept_sets_on_ranks(on_ranks: Callable[..., dict[str, str]], ranks: int, check: str) -> None:
    assert on_ranks(KEPT, ranks)[check] == "ok", on_ranks(KEPT, ranks)[check]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("module", [MODULE, KEPT])
def test_whole_products(module: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backend, and in place and not, with each way to cut the vocabulary."""
    run_whole_products(module, ranks, tmp_path, monkeypatch)


@pytest.mark.parametrize("cuts", [(0, 61), (0, 20, 61), (0, 0, 1, 60, 61), tuple(range(62))])
def test_parts_merge_to_the_whole(cuts: tuple[int, ...], backend: str) -> None:
    module = backends.load(backend)
    case = build(vocab=61)
    logits, targets = case.logits.reshape(1, -1, 61).clone(), case.targets.reshape(-1)
    logits[0, 5, :30] = -torch.inf
    read = case.mask.reshape(-1)  # type: ignore[union-attr]
    transform = RowTransform(1.0, 0.0, 0.7)
    parts = []
    for lo, hi in pairwise(cuts):
        if lo == hi:
            part = torch.tensor([-torch.inf, 0.0, torch.nan, 0.0, 0.0, -1.0])[:, None].expand(6, targets.numel()).clone()
            part[5] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
        else:
            part = module.stats(logits[..., lo:hi], targets - lo, read, transform, EVERYTHING).values
        parts.append(part)
    starts = torch.tensor([[lo] * targets.numel() for lo, _ in pairwise(cuts)], dtype=torch.int32)
    found = merge(torch.stack(parts), EVERYTHING, read, starts)
    logp = (logits[0].double() * 0.7).log_softmax(-1)
    expected = logp.gather(1, targets[:, None])[:, 0][read]
    plogp = torch.where(logp == -torch.inf, 0.0, logp.exp() * logp)
    torch.testing.assert_close(found.logps[read].double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.entropy[read].double(), -plogp.sum(-1)[read], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.sum_squares[read].double(), logp.exp().square().sum(-1)[read], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.top_prob[read].double(), logp.exp().amax(-1)[read], rtol=1e-6, atol=1e-6)
    assert torch.equal(found.top_id[read], logits[0].argmax(-1)[read]) and (found.top_id[~read] == -1).all()
    assert not found.logps[~read].any() and not found.entropy[~read].any() and not found.sum_squares[~read].any()


def test_no_part_has_the_target() -> None:
    partials = torch.tensor([[[0.0], [1.0], [torch.nan]], [[1.0], [2.0], [torch.nan]]])
    assert merge(partials, LOGPS, None).logps.isnan().all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_without_a_group_one_rank_has_it_all(level: str, backend: str) -> None:
    """Bit by bit where rows are visited twice with and without a shard: always those of sequence levels. At token level
    the fused kernels of "cpu" and "triton" take their sums in another order than their two visits."""
    case, objective = build(), Objective(level=level, beta=0.1)
    results = []
    for shard in (None, VocabShard(0, case.logits.shape[-1])):
        leaf = case.logits.clone().requires_grad_()
        out = grpo_loss(leaf, case.batch(), objective, shard=shard, backend=backend)
        out.loss.backward()
        results.append((out.loss.detach(), out.logps, leaf.grad))
    if level == "sequence" or backend == "eager":
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    else:
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)


def test_a_shards_backend_takes_a_range_of_rows(backend: str) -> None:
    """As every backend does: the block by block visits of a loss ask for it. Padding of those rows becomes 0, others stay."""
    case = build()
    V, n = case.logits.shape[-1], case.targets.numel()
    module = on_shard(backends.load(backend), VocabShard(0, V - 3))  # three columns are padding
    logits, targets = case.logits.clone(), case.targets.reshape(-1).clamp(max=V - 4)
    transform, lo, hi = RowTransform(1.0, 0.0, 1.0), 5, n - 4
    whole = module.stats(logits, targets, None, transform, EVERYTHING)
    part = module.stats(logits, targets[lo:hi], None, transform, EVERYTHING, rows=(lo, hi))
    assert torch.equal(part.values, whole.values[:, lo:hi])
    slopes = slopes_of(whole, torch.ones(n), torch.ones(n))
    outs = [torch.full_like(logits, torch.nan) for _ in range(2)]
    module.pull(logits, targets, whole, slopes, transform, outs[0])
    module.pull(logits, targets[lo:hi], part, slopes.at(slice(lo, hi)), transform, outs[1], rows=(lo, hi))
    all_rows, some_rows = (out.view(n, V) for out in outs)
    assert torch.equal(some_rows[lo:hi], all_rows[lo:hi]) and not all_rows[:, -3:].any() and all_rows.abs().max() > 0.1
    assert some_rows[:lo].isnan().all() and some_rows[hi:].isnan().all()
