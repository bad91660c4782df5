"""Full sequences == 2 shards == 4 shards == packed; the targets of shifted ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_kernels import TokenBatch
from grpo_kernels.batch import shift_targets
from support.cases import build
from support.processes import checks_of, run_whole_products

MODULE = "context_parallel_checks"


@pytest.mark.parametrize("check", checks_of(MODULE))
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(on_ranks: Callable[..., dict[str, str]], ranks: int, check: str) -> None:
    assert on_ranks(MODULE, ranks)[check] == "ok", on_ranks(MODULE, ranks)[check]


@pytest.mark.slow
def test_whole_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every objective on four ranks."""
    run_whole_products(MODULE, 4, tmp_path, monkeypatch)


def test_a_context_group_needs_sequences_and_torch_distributed() -> None:
    case = build()
    with pytest.raises(ValueError, match=r"context_group.*init_process_group"):
        case.batch(context_group=object())


def test_shift_of_padded_ids() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 1, 2, 3]])
    targets, mask = shift_targets(ids)
    assert targets.tolist() == [[6, 7, 8, 0], [1, 2, 3, 0]]
    assert mask.tolist() == [[True, True, True, False]] * 2
    prompt = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    _, mask = shift_targets(ids, mask=prompt)
    assert mask.tolist() == [[False, True, True, False], [True, True, False, False]]


def test_shift_never_crosses_a_sequence() -> None:
    ids = torch.arange(10, 21)
    cu_seqlens = torch.tensor([0, 4, 4, 5, 11], dtype=torch.int32)
    position_ids = torch.tensor([0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5])
    segment_ids = torch.tensor([7, 7, 7, 7, 2, 5, 5, 5, 5, 5, 5])
    completion = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    expected = [row for lo, hi in ((0, 4), (4, 5), (5, 11)) for row in [*range(lo + 1, hi), None]]
    for given in (
        {"cu_seqlens": cu_seqlens},
        {"segment_ids": segment_ids},
        {"segment_ids": (position_ids == 0).cumsum(-1)},
    ):
        targets, mask = shift_targets(ids, mask=completion, **given)
        for i, at in enumerate(expected):
            assert bool(mask[i]) == (at is not None and bool(completion[at])), i
            assert at is None or int(targets[i]) == int(ids[at])
    two = torch.stack([ids, ids])
    targets, mask = shift_targets(two, segment_ids=torch.stack([segment_ids, torch.zeros_like(segment_ids)]))
    assert mask[0].tolist() == [at is not None for at in expected] and mask[1].tolist() == [True] * 10 + [False]


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 0), (2, 1)])
def test_shift_of_empty_and_single_token_sequences(shape: tuple[int, ...]) -> None:
    targets, mask = shift_targets(torch.zeros(shape, dtype=torch.int64))
    assert targets.shape == shape and not mask.any()


def test_shift_refuses() -> None:
    ids = torch.arange(6)
    with pytest.raises(ValueError, match=r"ids is torch\.float32"):
        shift_targets(ids.float())
    with pytest.raises(ValueError, match="both given"):
        shift_targets(ids, cu_seqlens=torch.tensor([0, 6]), segment_ids=ids)
    with pytest.raises(ValueError, match=r"segment_ids has dtype torch\.int64 and shape \[3\]"):
        shift_targets(ids, segment_ids=ids[:3])
    with pytest.raises(ValueError, match="cu_seqlens"):
        shift_targets(ids, cu_seqlens=torch.tensor([0, 5]))
    assert isinstance(TokenBatch(*shift_targets(ids)[:1], torch.ones(6)), TokenBatch)
