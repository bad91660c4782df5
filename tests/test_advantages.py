"""Group-normalised advantages against plain Python floats."""

from __future__ import annotations

import math

import oracle
import pytest
import torch

from grpo_kernels import TokenBatch, group_advantages

SCALES = ["group", "batch", "none"]


def check(rewards: torch.Tensor, ids: list[int], got: torch.Tensor, **options: object) -> None:
    expected = oracle.group_advantages(rewards.tolist(), ids, **options)  # type: ignore[arg-type]
    assert got.dtype == torch.float32 and got.shape == rewards.shape
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=2e-7, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("eps", [1e-4, 1e-6, 0.0])
@pytest.mark.parametrize("scale", SCALES)
def test_matches_plain_python(scale: str, eps: float, unbiased: bool, dtype: torch.dtype) -> None:
    rewards = torch.randn(24).to(dtype)
    got = group_advantages(rewards, group_size=6, scale=scale, unbiased=unbiased, eps=eps)
    check(rewards, [i // 6 for i in range(24)], got, scale=scale, unbiased=unbiased, eps=eps)
    assert got.abs().max() > 0.1


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "ids",
    [
        [0, 1, 0, 2, 1, 0, 2, 2, 2, 1],  # interleaved
        [-7, 10**12, -7, 4, 10**12, 4, 4, -7, 4, 3],  # any integers, a group of one
        [5] * 10,
        list(range(10)),
    ],
    ids=["interleaved", "sparse", "one group", "all alone"],
)
def test_groups_in_any_order(ids: list[int], scale: str, unbiased: bool) -> None:
    rewards = torch.randn(10)
    got = group_advantages(rewards, groups=torch.tensor(ids), scale=scale, unbiased=unbiased)
    check(rewards, ids, got, scale=scale, unbiased=unbiased)
    order = torch.randperm(10)
    permuted = group_advantages(rewards[order], groups=torch.tensor(ids)[order], scale=scale, unbiased=unbiased)
    torch.testing.assert_close(permuted, got[order], rtol=2e-7, atol=1e-12)


def test_group_size_equals_groups() -> None:
    rewards = torch.randn(12)
    assert torch.equal(
        group_advantages(rewards, group_size=4),
        group_advantages(rewards, groups=torch.arange(12).div(4, rounding_mode="floor")),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 0.9, -0.1, 1 / 3, 1e-30, 1e30])
def test_equal_rewards_are_exactly_zero(reward: float, scale: str, dtype: torch.dtype) -> None:
    """The rounded mean of n equal rewards need not be that reward: the residue over eps would be an advantage of 1e-3."""
    for n in range(2, 65):
        rewards = torch.full((n,), reward, dtype=dtype)
        assert not group_advantages(rewards, group_size=n, scale=scale, eps=1e-9).any(), n
    other = torch.tensor([reward] * 7 + [0.0, 1.0, 0.5, 0.25, 0.0, 1.0, 1.0], dtype=dtype)
    got = group_advantages(other, group_size=7, scale=scale)
    assert not got[:7].any() and got[7:].any()


@pytest.mark.parametrize("scale", SCALES)
def test_group_of_one_is_zero(scale: str) -> None:
    assert not group_advantages(torch.tensor([3.0, -2.0, 0.5]), group_size=1, scale=scale).any()


def test_zero_mean_and_unit_std() -> None:
    got = group_advantages(torch.randn(5, dtype=torch.float64), group_size=5, eps=0.0)
    assert abs(float(got.sum())) < 1e-6 and float(got.std()) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [1e30, 1e-30, 1e38])
def test_extreme_rewards(size: float, scale: str) -> None:
    """Squares of these overflow or underflow in fp32."""
    rewards = torch.tensor([1.0, -1.0, 0.5, 0.25]) * size
    got = group_advantages(rewards, group_size=4, scale=scale)
    check(rewards, [0] * 4, got, scale=scale)
    assert torch.isfinite(got).all() and (scale == "none" or size < 1 or got.abs().max() > 0.5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_integer_rewards(dtype: torch.dtype) -> None:
    rewards = torch.tensor([0, 1, 1, 0, 1, 1]).to(dtype)
    assert torch.equal(group_advantages(rewards, group_size=3), group_advantages(rewards.float(), group_size=3))


def test_no_rewards() -> None:
    for options in ({"group_size": 8}, {"groups": torch.zeros(0, dtype=torch.int64)}):
        got = group_advantages(torch.zeros(0), **options)
        assert got.shape == (0,) and got.dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scale", SCALES)
def test_rewards_that_are_not_finite(bad: float, scale: str) -> None:
    rewards = torch.randn(8)
    rewards[5] = bad
    with pytest.raises(ValueError, match=rf"rewards\[5\]={bad}"):
        group_advantages(rewards, group_size=4, scale=scale)


def test_input_is_not_modified_and_not_differentiated() -> None:
    rewards = torch.randn(8, requires_grad=True)
    before = rewards.detach().clone()
    got = group_advantages(rewards, group_size=4)
    assert not got.requires_grad and torch.equal(rewards.detach(), before) and rewards._version == 0


def test_batch_from_rewards() -> None:
    rewards = torch.randn(6)
    targets = torch.zeros(6, 3, dtype=torch.int64)
    for options in ({"group_size": 3}, {"groups": torch.tensor([0, 1, 0, 1, 0, 1]), "scale": "none"}):
        batch = TokenBatch.from_rewards(targets, rewards, mask=targets == 0, **options)
        assert torch.equal(batch.advantages, group_advantages(rewards, **options))
        assert batch.mask is not None and batch.mask.all()
