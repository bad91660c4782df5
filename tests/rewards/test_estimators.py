"""The tables of estimators and corrections are complete, and each entry computes the same as its function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_kernels import TokenBatch, group_advantages
from grpo_kernels.rewards import advantages, corrections, estimators, returns
from grpo_kernels.rewards.estimators import ADVANTAGES, CORRECTIONS, Evidence

B, T = 8, 3


@pytest.fixture
def evidence() -> Evidence:
    rewards = torch.tensor([0.1, 0.5, 0.2, 0.9, 0.0, 1.0, 0.3, 0.3])
    mask = torch.arange(T) < torch.tensor([3, 1, 2, 3, 3, 2, 1, 3])[:, None]
    steps = torch.where(mask & (torch.rand(B, T) < 0.6), torch.rand(B, T), torch.nan)
    return Evidence(
        rewards, group_size=4, columns=torch.stack([rewards, 1 - rewards.square()], 1), reward_weights=[1.0, 2.0], mask=mask,
        greedy_rewards=torch.rand(B), steps=steps, values=torch.rand(B, T), old_logps=-torch.rand(B, T),
        sum_squares=0.5 * torch.rand(B, T) + 0.4,
    )  # fmt: skip


def at_end(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(mask.shape)
    for row, (reward, length) in enumerate(zip(rewards, mask.sum(1), strict=True)):
        found[row, length - 1] = reward
    return found


#: What each name stands for, written with the functions of the library.
EXPECTED: dict[str, Callable[[Evidence], torch.Tensor]] = {
    "group": lambda e: group_advantages(e.rewards, group_size=4),
    "rloo": lambda e: group_advantages(e.rewards, group_size=4, baseline="leave-one-out", scale="none"),
    "opo": lambda e: group_advantages(e.rewards, group_size=4, baseline="length", scale="none", lengths=e.mask.sum(1)),
    "maxrl": lambda e: group_advantages(e.rewards, group_size=4, scale="mean", eps=0.0),
    "gdpo": lambda e: group_advantages(e.columns, group_size=4, combine="gdpo", reward_weights=[1.0, 2.0]),
    "pass_at_k": lambda e: advantages.pass_at_k_advantages(e.rewards, group_size=4),
    "gpg": lambda e: advantages.gpg_scale(e.rewards, group_size=4) * group_advantages(e.rewards, group_size=4, scale="none"),
    "remax": lambda e: advantages.greedy_baseline_advantages(e.rewards, e.greedy_rewards),
    "reinforce_pp": lambda e: returns.whiten(
        returns.discounted_returns(at_end(e.rewards, e.mask), mask=e.mask), e.mask
    ),
    "gae": lambda e: returns.whiten(returns.gae(at_end(e.rewards, e.mask), e.values, mask=e.mask)[0], e.mask),
    "process": lambda e: returns.process_advantages(e.steps, group_size=4),
    "optimal_token": lambda e: returns.optimal_token_advantages(
        at_end(e.rewards, e.mask), e.old_logps, e.sum_squares, group_size=4, mask=e.mask
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_name_is_its_function(evidence: Evidence, name: str) -> None:
    found, expected = ADVANTAGES[name](evidence), EXPECTED[name](evidence)
    assert torch.equal(found, expected) and found.abs().max() > 0.1
    assert ADVANTAGES[name].per_token == (found.dim() == 2)


def test_every_estimator_and_every_correction_of_the_library_has_a_name() -> None:
    """Functions that give advantages, and those that give weights or masks of a batch: none is left out of the tables."""
    source = inspect.getsource(estimators)
    for module, name in ((advantages, "_advantages"), (returns, "_advantages")):
        public = [n for n, f in vars(module).items() if n.endswith(name) and inspect.isfunction(f)]
        assert public and all(source.count(n) >= 2 for n in public), public  # imported and used
    corrected = {
        f for n, f in vars(corrections).items()
        if inspect.isfunction(f) and f.__module__ == corrections.__name__ and not n.startswith("_") and n != "correction_metrics"
    }  # fmt: skip
    assert {entry.function for entry in CORRECTIONS.values()} == corrected


def test_options_change_what_is_estimated(evidence: Evidence) -> None:
    found = ADVANTAGES["group"](evidence, scale="none", baseline="leave-one-out")
    assert torch.equal(found, EXPECTED["rloo"](evidence))
    found = ADVANTAGES["reinforce_pp"](evidence, gamma=0.5, baseline="mean", unbiased=False)
    centred = group_advantages(evidence.rewards, group_size=4, scale="none")
    discounted = returns.discounted_returns(at_end(centred, evidence.mask), gamma=0.5, mask=evidence.mask)
    assert torch.equal(found, returns.whiten(discounted, evidence.mask, unbiased=False))


def test_what_is_missing_or_unknown_is_named(evidence: Evidence) -> None:
    with pytest.raises(ValueError, match="greedy_rewards=None: the advantages 'remax' are estimated from it"):
        ADVANTAGES["remax"](Evidence(evidence.rewards, group_size=4))
    for name, option in (("remax", "scale"), ("group", "gamma"), ("group", "mask"), ("pass_at_k", "baseline")):
        with pytest.raises(TypeError, match=f"'{option}' is no argument of the advantages '{name}'"):
            ADVANTAGES[name](evidence, **{option: 1})
    with pytest.raises(ValueError, match="estimator='grpo': it must be one of group, rloo"):
        TokenBatch.from_rewards(torch.zeros(B, T, dtype=torch.int64), evidence.rewards, group_size=4, estimator="grpo")
    with pytest.raises(ValueError, match="rewards is list: pass numbers, a tensor or a list"):
        TokenBatch.from_rewards(torch.zeros(2, T, dtype=torch.int64), [1.0, None], group_size=2)


def test_a_batch_is_made_with_any_estimator(evidence: Evidence) -> None:
    """Padded and packed; what an estimator needs to know goes beside the fields of the batch."""
    targets = torch.zeros(B, T, dtype=torch.int64)
    known = {name: getattr(evidence, name) for name in ("greedy_rewards", "old_logps", "sum_squares", "mask")}
    for name in ("rloo", "remax", "reinforce_pp", "optimal_token"):
        batch = TokenBatch.from_rewards(targets, evidence.rewards, group_size=4, estimator=name, **known)
        assert torch.equal(batch.advantages, EXPECTED[name](evidence))
        assert torch.equal(batch.old_logps, evidence.old_logps) and batch.groups.tolist() == [0] * 4 + [1] * 4
    lengths = evidence.mask.sum(1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    packed = {name: getattr(evidence, name)[evidence.mask] for name in ("old_logps", "sum_squares")}
    batch = TokenBatch.from_rewards(
        targets[evidence.mask], evidence.rewards, group_size=4, estimator="optimal_token", cu_seqlens=offsets,
        mask=torch.ones(int(lengths.sum()), dtype=torch.bool), **packed,
    )  # fmt: skip
    torch.testing.assert_close(batch.advantages, EXPECTED["optimal_token"](evidence)[evidence.mask])


# ---- corrections


@pytest.fixture
def batch() -> TokenBatch:
    mask = torch.arange(T) < torch.tensor([3, 1, 2, 3])[:, None]
    old, sampler = -torch.rand(4, T), -2 * torch.rand(4, T)
    return TokenBatch(torch.zeros(4, T, dtype=torch.int64), torch.tensor([1.0, -1.0, 0.5, -0.5]), mask=mask, old_logps=old,
                      sampler_logps=sampler)  # fmt: skip


def test_corrections_multiply_weights_and_cut_masks(batch: TokenBatch) -> None:
    once = CORRECTIONS["tis"](batch, high=1.1)
    assert torch.equal(once.weights, corrections.importance_weights(batch, high=1.1))
    twice = CORRECTIONS["geometric_mask"](once, low=0.8, high=1.3)
    kept = corrections.rejection_mask(batch, over="mean", low=0.8, high=1.3)
    assert torch.equal(twice.weights, once.weights * kept) and 0 < kept.sum() < batch.mask.sum()
    whole = CORRECTIONS["tis"](
        TokenBatch(batch.targets, batch.advantages, weights=torch.full((4,), 2.0), old_logps=batch.old_logps,
                   sampler_logps=batch.sampler_logps, mask=batch.mask), high=1.1,
    )  # fmt: skip
    assert torch.equal(whole.weights, 2 * once.weights)
    cut = CORRECTIONS["without_truncated"](batch, finished=torch.tensor([True, False, True, False]))
    assert cut.mask.sum(1).tolist() == [3, 0, 2, 0] and cut.weights is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("importance_weights", lambda b: corrections.importance_weights(b)),
        ("sequence_tis", lambda b: corrections.importance_weights(b, level="sequence", high=2.0)),
        ("icepop", lambda b: corrections.importance_weights(b, mode="mask", low=0.5, high=5.0)),
        ("sequence_mask", lambda b: corrections.importance_weights(b, level="sequence", mode="mask", high=3.0)),
        ("veto", lambda b: corrections.rejection_mask(b, over="min", low=1e-4)),
        ("off_policy_mask", lambda b: corrections.off_policy_sequence_mask(b, b.old_logps, delta=0.5)),
        ("m2po", lambda b: corrections.second_moment_mask(b, threshold=0.04)),
    ],
)
def test_a_correction_is_its_function(batch: TokenBatch, name: str, expected: Any) -> None:
    assert torch.equal(CORRECTIONS[name](batch).weights, expected(batch))


def test_corrections_name_what_they_do_not_know(batch: TokenBatch) -> None:
    with pytest.raises(TypeError, match="'gamma' is no argument of the correction 'tis'"):
        CORRECTIONS["tis"](batch, gamma=1)
    with pytest.raises(ValueError, match="finished=None: the correction 'without_truncated' needs"):
        CORRECTIONS["without_truncated"](batch)
    with pytest.raises(ValueError, match="high=inf: pass low=, high= or both"):
        CORRECTIONS["rejection_mask"](batch, high=math.inf)
