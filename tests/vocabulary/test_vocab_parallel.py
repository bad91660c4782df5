"""Vocabulary-parallel heads and logits equal whole ones, on 1, 2 and 4 ranks and by merging parts in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_kernels import Objective, Options, grpo_loss
from grpo_kernels.distributed import VocabShard
from grpo_kernels.rows import backends
from grpo_kernels.rows.parallel import on_shard
from grpo_kernels.rows.partials import merge
from support.bits import same_bits
from support.doors import batch_of
from support.kernel_rows import Rows, visited
from support.processes import checks_of, run_whole_products
from support.recipes import Recipe, problem

MODULE = "vocab_parallel_checks"


@pytest.mark.parametrize("check", checks_of(MODULE))
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_ranks(on_ranks: Callable[..., dict[str, str]], ranks: int, check: str) -> None:
    assert on_ranks(MODULE, ranks)[check] == "ok", on_ranks(MODULE, ranks)[check]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_products(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every recipe with each way to cut its vocabulary."""
    run_whole_products(MODULE, ranks, tmp_path, monkeypatch)


def test_no_part_has_the_target() -> None:
    partials = torch.tensor([[[0.0], [1.0], [torch.nan]], [[1.0], [2.0], [torch.nan]]])
    assert merge(partials, ("max", "sum", "target"), None).logps.isnan().all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_without_a_group_one_rank_has_it_all(level: str, backend: str) -> None:
    """Bit by bit where rows are visited twice with and without a shard: always those of sequence levels. At token level
    the fused kernels of "cpu" and "triton" take their sums in another order than their two visits."""
    p, objective = problem(Recipe(objective="dapo, k3", lengths=(7, 4, 2, 0, 6))), Objective(level=level, beta=0.1)
    results = []
    for shard in (None, VocabShard(0, p.recipe.vocab)):
        leaf = p.given["logits"].clone().requires_grad_()
        out = grpo_loss(leaf, batch_of(p), objective, options=Options(shard=shard, backend=backend))
        out.loss.backward()
        results.append((out.loss.detach(), out.logps, leaf.grad))
    if level == "sequence" or backend == "eager":
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    else:
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)


def test_a_shards_backend_takes_a_range_of_rows(backend: str) -> None:
    """As every backend does: the block by block visits of a loss ask for it. Padding of those rows becomes 0, others stay."""
    vocab, n = 61, 12
    module = on_shard(backends.load(backend).Kernels(), VocabShard(0, vocab - 3))  # three columns are padding
    r = Rows(torch.randn(2, 6, vocab), targets=torch.randint(vocab - 3, (n,)))
    (whole, gradient), out = visited(module, r), torch.full_like(r.logits, torch.nan)
    part, _ = visited(module, r, out, (5, n - 4))
    assert all(torch.equal(x, whole[name][5 : n - 4]) for name, x in part.items())
    all_rows, some_rows = gradient.view(n, vocab), out.view(n, vocab)
    assert torch.equal(some_rows[5:-4], all_rows[5:-4]) and not all_rows[:, -3:].any() and all_rows.abs().max() > 0.1
    assert some_rows[:5].isnan().all() and some_rows[-4:].isnan().all()
