"""Group-normalised advantages against plain Python floats."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kernels import TokenBatch, checks, group_advantages
from grpo_kernels.rewards.advantages import NUMERICS, pass_at_k_advantages, zero_variance
from grpo_kernels.rewards.estimators import ADVANTAGES, Evidence
from support import advantage_oracle, oracle
from support.advantage_oracle import close

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
    packed, offsets = torch.zeros(6, dtype=torch.int64), torch.tensor([0, 2, 2, 3, 4, 6, 6])  # as many tokens as sequences
    batch = TokenBatch.from_rewards(packed, rewards, group_size=3, cu_seqlens=offsets)
    assert torch.equal(batch.flat("advantages"), batch.spread(group_advantages(rewards, group_size=3)))  # type: ignore[arg-type]


# ---- baselines and scales beyond GRPO's

BASELINES = ["mean", "leave-one-out", "length"]
ALL_SCALES = ["group", "batch", "none", "mean", "others"]
IDS = [0, 1, 0, 2, 1, 0, 2, 2, 2, 1, 3, 1, 4, 4]  # interleaved, one group of one, one of two


def options_of(baseline: str, n: int) -> dict[str, object]:
    lengths = torch.randint(1, 40, (n,)) if baseline == "length" else None
    return {"baseline": baseline, "lengths": lengths}


def reference(rewards: list[float | None], ids: list[int], **options: object) -> torch.Tensor:
    if isinstance(options.get("lengths"), torch.Tensor):
        options["lengths"] = options["lengths"].tolist()  # type: ignore[attr-defined]
    return torch.tensor(advantage_oracle.group_advantages(rewards, ids, **options), dtype=torch.float64)  # type: ignore[arg-type]


@pytest.mark.parametrize("singleton", ["zero", "raw"])
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("scale", ALL_SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_every_baseline_with_every_scale(baseline: str, scale: str, unbiased: bool, singleton: str) -> None:
    rewards = torch.randn(len(IDS)) + 0.5
    options = {**options_of(baseline, len(IDS)), "scale": scale, "unbiased": unbiased, "eps": 1e-3, "singleton": singleton}
    got = group_advantages(rewards, groups=torch.tensor(IDS), **options)  # type: ignore[arg-type]
    close(got, reference(rewards.tolist(), IDS, **options))
    assert got.abs().max() > 0.1 and (got[10] != 0) == (singleton == "raw")


def test_rloo_and_dr_grpo_in_numbers() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    rloo = group_advantages(rewards, group_size=3, baseline="leave-one-out", scale="none")
    assert torch.equal(rloo, torch.tensor([1.0, -0.5, -0.5, 1.0, -0.5, -0.5]))
    weighted = group_advantages(
        rewards, group_size=3, baseline="length", scale="none", lengths=torch.tensor([2, 1, 1, 0, 0, 0])
    )
    assert torch.equal(weighted, torch.tensor([0.5, -0.5, -0.5, 0.0, 0.0, 0.0]))  # the second group has no tokens
    maxrl = group_advantages(rewards, group_size=3, scale="mean", eps=0.0)
    torch.testing.assert_close(maxrl, torch.tensor([2.0, -1.0, -1.0, 2.0, -1.0, -1.0]))
    assert not group_advantages(-rewards, group_size=3, scale="mean", eps=0.0).any()
    assert torch.equal(group_advantages(rewards, group_size=3, baseline="none", scale="none"), rewards)


def test_equal_others_are_not_divided() -> None:
    """NeMo-RL's own std of equal rewards is rounding noise that passes its test for 0: 0.7 stands for that here."""
    got = group_advantages(torch.tensor([1.0] + [0.7] * 7), group_size=8, **NUMERICS["nemo-rl"])
    assert got[0] == pytest.approx(0.3, rel=1e-6)
    assert float(got[1]) == pytest.approx((0.7 - 5.2 / 7) / (math.sqrt(0.09 / 7) + 1e-6) * 1.0, rel=1e-4)
    pair = group_advantages(torch.tensor([1.0, 0.25]), group_size=2, **NUMERICS["nemo-rl"])
    assert torch.equal(pair, torch.tensor([0.75, -0.75]))


@pytest.mark.parametrize("singleton", ["zero", "raw"])
@pytest.mark.parametrize("scale", ALL_SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_equal_rewards_are_zero_for_every_estimator(baseline: str, scale: str, singleton: str) -> None:
    for n in range(2, 65):
        options = {**options_of(baseline, n), "scale": scale, "singleton": singleton, "eps": 0.0}
        got = group_advantages(torch.full((n,), 0.7), group_size=n, **options)  # type: ignore[arg-type]
        assert not got.any(), n
        several = group_advantages(
            torch.tensor([[0.7, 0.1, 0.3]] * n), group_size=n, reward_weights=[0.1, 0.7, 0.3], combine="gdpo", **options
        )  # type: ignore[arg-type]
        assert not several.any(), n


# ---- missing rewards


@pytest.mark.parametrize("scale", ALL_SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_missing_rewards_count_nowhere(baseline: str, scale: str) -> None:
    rewards = torch.randn(len(IDS)) + 0.5
    rewards[[0, 6, 9]] = math.nan
    options = {**options_of(baseline, len(IDS)), "scale": scale, "missing": "skip"}
    got = group_advantages(rewards, groups=torch.tensor(IDS), **options)  # type: ignore[arg-type]
    close(got, reference([None if math.isnan(r) else r for r in rewards.tolist()], IDS, **options))
    assert not got[[0, 6, 9]].any() and got.abs().max() > 0.1
    kept = ~rewards.isnan()  # as if the others had never been there
    if options["lengths"] is not None:
        options["lengths"] = options["lengths"][kept]  # type: ignore[index]
    without = group_advantages(rewards[kept], groups=torch.tensor(IDS)[kept], **options)  # type: ignore[arg-type]
    torch.testing.assert_close(got[kept], without, rtol=1e-6, atol=1e-9)


def test_no_reward_at_all() -> None:
    rewards = torch.tensor([math.nan, math.nan, 1.0, 0.0])
    assert torch.equal(group_advantages(rewards, group_size=2, missing="skip", scale="none"), torch.tensor([0, 0, 0.5, -0.5]))
    with pytest.raises(ValueError, match=r"rewards\[0\]=nan"):
        group_advantages(rewards, group_size=2)
    with pytest.raises(ValueError, match=r"rewards\[1\]=inf"):
        group_advantages(torch.tensor([0.0, math.inf]), group_size=2, missing="skip")


# ---- several reward functions


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
@pytest.mark.parametrize("combine", ["sum", "gdpo"])
def test_several_rewards(combine: str, baseline: str, missing: bool) -> None:
    rewards = torch.randn(len(IDS), 3)
    rewards[:, 1] *= 100
    rewards[torch.tensor(IDS) == 2, 2] = 0.7  # one function cannot tell the answers to a prompt apart
    if missing:
        rewards[1, 0] = rewards[5, 1] = math.nan
        rewards[3] = math.nan
    rows: list[list[float | None]] = [[None if math.isnan(r) else r for r in row] for row in rewards.tolist()]
    weights = [1.0, 0.1, 2.0]
    got = group_advantages(
        rewards, groups=torch.tensor(IDS), reward_weights=weights, combine=combine, baseline=baseline, missing="skip"
    )
    if combine == "sum":
        close(got, reference(advantage_oracle.summed(rows, weights), IDS, baseline=baseline))
    else:
        close(got, torch.tensor(advantage_oracle.gdpo(rows, weights, IDS, baseline=baseline), dtype=torch.float64))
    assert got.abs().max() > 0.5 and (got[3] == 0) == missing


def test_gdpo_keeps_apart_what_a_sum_mixes_up() -> None:
    """Rewards (1, 0) and (0, 1) have one sum but not one advantage (the example of arXiv 2601.05242)."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    assert not group_advantages(rewards, group_size=4, reward_weights=[1, 1]).any()
    assert group_advantages(rewards, group_size=4, reward_weights=[1, 1], combine="gdpo").isfinite().all()
    assert group_advantages(rewards, group_size=4, reward_weights=torch.tensor([2.0, 1.0]), combine="gdpo").abs().min() > 0.1


# ---- trainers' numbers, in their own fp32


def per_group(rewards: torch.Tensor, size: int, one: object) -> torch.Tensor:
    return torch.cat([one(group) for group in rewards.split(size)])  # type: ignore[operator]


TRAINERS = {
    "trl": lambda r: (r - r.nanmean()) / ((r - r.nanmean()).square().nansum().div((~r.isnan()).sum() - 1).sqrt() + 1e-4),
    "verl": lambda r: (r - r.mean()) / (r.std() + 1e-6),
    "skyrl": lambda r: (r - r.mean()) / (r.std() + 1e-6),
    "slime": lambda r: (r - r.mean()) / (r.std() + 1e-6),
    "openrlhf": lambda r: (r - r.mean()) / (r.std() + 1e-9),
    "prime-rl": lambda r: r - r.mean(),
    "areal": lambda r: ((r.double() - r.double().mean()) / (r.double().std() + 1e-5)).float(),
    "torchtitan": lambda r: (r - r.mean()) / (r.std(unbiased=False) + 1e-6),
    "nemo-rl": lambda r: torch.stack([(x - o.mean()) / (o.std() + 1e-6) for x, o in zip(r, rest(r), strict=True)]),
}


def rest(r: torch.Tensor) -> list[torch.Tensor]:
    return [torch.cat((r[:i], r[i + 1 :])) for i in range(len(r))]


def test_every_trainer_has_its_formula() -> None:
    assert set(TRAINERS) == set(NUMERICS)


@pytest.mark.parametrize("name", NUMERICS)
def test_trainers_formulas(name: str) -> None:
    rewards = torch.randn(24)
    got = group_advantages(rewards, group_size=6, **NUMERICS[name])
    torch.testing.assert_close(got, per_group(rewards, 6, TRAINERS[name]), rtol=2e-5, atol=2e-6)
    others = [other for other in NUMERICS if other != name and NUMERICS[other] != NUMERICS[name]]
    small = rewards * 1e-4  # where eps matters, so that every set differs from every other
    mine = group_advantages(small, group_size=6, **NUMERICS[name])
    torch.testing.assert_close(mine, per_group(small, 6, TRAINERS[name]), rtol=1e-3, atol=1e-8)
    alone = group_advantages(rewards, group_size=1, **NUMERICS[name])
    for other in others:
        differs = not torch.allclose(mine, group_advantages(small, group_size=6, **NUMERICS[other]), rtol=1e-6)
        assert differs or not torch.equal(alone, group_advantages(rewards, group_size=1, **NUMERICS[other])), other


def test_trl_leaves_out_unscored_completions() -> None:
    rewards = torch.randn(12)
    rewards[[2, 7]] = math.nan
    expected = per_group(rewards, 4, TRAINERS["trl"]).nan_to_num(0.0)
    got = group_advantages(rewards, group_size=4, **NUMERICS["trl"])
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


def test_verl_group_of_one() -> None:
    """mean := 0, std := 1; its RLOO has the reward itself."""
    rewards, ids = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([0, 1, 1])
    assert group_advantages(rewards, groups=ids, **NUMERICS["verl"])[0] == pytest.approx(3 / (1 + 1e-6))
    rloo = group_advantages(rewards, groups=ids, **{**NUMERICS["verl"], "baseline": "leave-one-out", "scale": "none"})
    assert torch.equal(rloo, torch.tensor([3.0, 1.0, -1.0]))


# ---- properties


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_permutation_and_shift(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 20))
    numbers = st.floats(-100, 100, width=32)
    rewards = torch.tensor(data.draw(st.lists(numbers, min_size=n, max_size=n)))
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    order = torch.tensor(data.draw(st.permutations(range(n))))
    options = {
        "baseline": data.draw(st.sampled_from(["mean", "leave-one-out"])),
        "scale": data.draw(st.sampled_from(["group", "batch", "none"])),
        "unbiased": data.draw(st.booleans()),
    }
    got = group_advantages(rewards, groups=ids, **options)
    permuted = group_advantages(rewards[order], groups=ids[order], **options)
    torch.testing.assert_close(permuted, got[order], rtol=1e-6, atol=1e-9)
    shifted = group_advantages(rewards.double() + 1000.0, groups=ids, **options)
    torch.testing.assert_close(shifted, got, rtol=1e-4, atol=1e-6)
    flat = zero_variance(rewards, groups=ids)
    assert not got[flat].any()
    if options["scale"] == "none":
        assert got[~flat].any() == bool((~flat).any())


# ---- refusals


REFUSALS = {
    "baseline": {"baseline": "median"},
    "scale": {"scale": "std"},
    "combine": {"combine": "max"},
    "combine='gdpo'": {"combine": "gdpo"},
    "missing": {"missing": "ignore"},
    "singleton": {"singleton": "one"},
    "eps": {"eps": -1.0},
    "lengths": {"baseline": "length"},
    "lengths=": {"lengths": torch.ones(4)},
    r"lengths is \[3\]": {"baseline": "length", "lengths": torch.ones(3)},
    r"lengths\[1\]=-1": {"baseline": "length", "lengths": torch.tensor([1, -1, 1, 1])},
    "scale='group'": {"baseline": "none"},
    r"rewards has shape \[4\].*\[B, K\]": {"reward_weights": [1.0]},
    r"rewards has shape \[4, 2\].*weights": {"rewards": torch.ones(4, 2)},
    r"reward_weights has shape \[3\]": {"rewards": torch.ones(4, 2), "reward_weights": [1.0, 1.0, 1.0]},
    r"rewards\[2, 1\]=nan": {"rewards": torch.tensor([[0.0, 1], [1, 1], [0, math.nan], [1, 1]]), "reward_weights": [1, 1]},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message: str) -> None:
    options = {"rewards": torch.zeros(4), "group_size": 2, **REFUSALS[message]}
    with pytest.raises(ValueError, match=message):
        group_advantages(**options)  # type: ignore[arg-type]


# ---- groups of one, lists, integers

ALONE: dict[str, Callable[..., torch.Tensor]] = {
    "mean": group_advantages,
    "leave-one-out": functools.partial(group_advantages, baseline="leave-one-out", scale="none"),
    "batch": functools.partial(group_advantages, scale="batch"),
    "pass at k": pass_at_k_advantages,
    "from_rewards": lambda rewards, **which: (
        TokenBatch.from_rewards(torch.zeros(len(rewards), 2, dtype=torch.int64), rewards, **which).advantages
    ),
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("which", [{"group_size": 1}, {"groups": torch.tensor([7, 3, 5])}], ids=["group_size", "groups"])
def test_groups_of_one_completion_are_warned_of_once(name: str, which: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert not any(ALONE[name](torch.tensor([3.0, -2.0, 0.5]), **which).any() for _ in range(3))
    (warning,) = seen
    assert warning.filename == __file__
    for part in ("all advantages are 0", "one completion", "several completions", "remax", "singleton='raw'"):
        assert part in str(warning.message)


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 1, "singleton": "raw"},
        {"group_size": 1, "baseline": "none", "scale": "none"},
        {"groups": torch.tensor([0, 0, 1])},
        {"group_size": 3},
    ],
    ids=str,
)
def test_groups_that_may_differ_are_not_warned_of(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group_advantages(torch.tensor([1.0, 1.0, 1.0]), **options)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("kind", ["list", "tuple", "integers", "bools", "numpy"])
def test_rewards_are_numbers_of_any_kind(name: str, kind: str) -> None:
    """Every estimator gives what it gives for a float tensor."""
    whole = [1, 0, 1, 1, 0, 0]
    rewards = {
        "list": whole, "tuple": tuple(map(float, whole)), "integers": torch.tensor(whole), "bools": torch.tensor(whole) > 0,
        "numpy": pytest.importorskip("numpy").array(whole),
    }[kind]  # fmt: skip
    per_token = torch.arange(18.0).view(6, 3)
    evidence: dict[str, Any] = {
        "group_size": 3, "columns": per_token[:, :2], "reward_weights": [1.0, 2.0], "greedy_rewards": torch.ones(6),
        "mask": torch.ones(6, 3, dtype=torch.bool), "steps": per_token, "values": per_token, "old_logps": -per_token,
        "sum_squares": 1 / (1 + per_token),
    }  # fmt: skip
    found = ADVANTAGES[name](Evidence(rewards, **evidence))
    expected = ADVANTAGES[name](Evidence(torch.tensor(whole).float(), **evidence))
    assert torch.equal(found, expected) and expected.any()
    batch = TokenBatch.from_rewards(torch.zeros(6, 3, dtype=torch.int64), rewards, group_size=3)
    assert torch.equal(batch.advantages, group_advantages(torch.tensor(whole).float(), group_size=3))


def test_a_list_that_holds_no_numbers_is_refused() -> None:
    for wrong in ([1.0, None], ["1"], [[1.0], [1.0, 2.0]], None, "12"):
        with pytest.raises(ValueError, match=r"rewards is .*: pass numbers"):
            group_advantages(wrong, group_size=2)  # type: ignore[arg-type]
    several = [[1.0, 0.0], [2.0, 1.0]]
    found = group_advantages(several, group_size=2, reward_weights=[1.0, 2.0])
    assert torch.equal(found, group_advantages(torch.tensor(several), group_size=2, reward_weights=[1.0, 2.0]))
