"""Estimators around the group normalisation and per token, against plain Python loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kernels.formulas.kl import Kl
from grpo_kernels.rewards.advantages import (
    NUMERICS,
    a2po_values,
    gpg_scale,
    greedy_baseline_advantages,
    group_advantages,
    group_metrics,
    pass_at_k_advantages,
    zero_variance,
)
from grpo_kernels.rewards.returns import (
    WHITENING,
    discounted_returns,
    gae,
    kl_in_reward,
    optimal_token_advantages,
    process_advantages,
    whiten,
)
from support import advantage_oracle as oracle
from support.advantage_oracle import close

Tensor = torch.Tensor


# ---- per completion


@pytest.mark.parametrize("scale", ["group", "none"])
def test_pass_at_k(scale: str) -> None:
    rewards = torch.randn(20).double()
    rewards[5:10] = torch.tensor([0.7, 0.1, 0.7, 0.3, 0.7], dtype=torch.float64)  # two best
    rewards[10:15] = 0.7
    got = pass_at_k_advantages(rewards, group_size=5, scale=scale)
    expected = []
    for g in range(4):
        group = rewards[5 * g : 5 * g + 5].tolist()
        best, second = sorted(group, reverse=True)[:2]
        divisor = oracle.std(group) + 1e-6 if scale == "group" else 1.0
        expected += [(best - second) / divisor if r == best else 0.0 for r in group]
    close(got, expected)
    assert got.count_nonzero() == 2
    assert not pass_at_k_advantages(rewards, group_size=1, scale=scale).any()
    order = torch.randperm(20)
    ids = torch.arange(20) // 5
    torch.testing.assert_close(pass_at_k_advantages(rewards[order], groups=ids[order], scale=scale), got[order])


def test_greedy_baseline() -> None:
    rewards, greedy = torch.tensor([1.0, 0.0, 0.7, 0.7]), torch.tensor([0.0, 0.0, 0.7, 1.0])
    close(greedy_baseline_advantages(rewards, greedy), (rewards.double() - greedy.double()).tolist())
    assert greedy_baseline_advantages(rewards, greedy)[2] == 0
    with pytest.raises(ValueError, match=r"greedy_rewards has shape \[2\]"):
        greedy_baseline_advantages(rewards, greedy[:2])
    with pytest.raises(ValueError, match=r"greedy_rewards\[1\]=nan"):
        greedy_baseline_advantages(rewards[:2], torch.tensor([0.0, math.nan]))


def test_gpg() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    assert gpg_scale(rewards) == pytest.approx(8 / 3)
    assert gpg_scale(rewards, group_size=2) == pytest.approx(8 / 2)
    assert gpg_scale(torch.zeros(4)) == 4.0 and gpg_scale(torch.zeros(4), group_size=2) == 4.0
    scaled = gpg_scale(rewards) * group_advantages(rewards, group_size=4, scale="none", singleton="raw")
    close(scaled, [8 / 3 * a for a in [0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]])


@pytest.mark.parametrize("beta", [0.01, 0.5, 100.0])
def test_a2po_values(beta: float) -> None:
    rewards, ids = torch.randn(9).double(), [0, 1, 0, 2, 1, 1, 0, 3, 0]
    rewards[[1, 4, 5]] = 0.7
    got = a2po_values(rewards, groups=torch.tensor(ids), beta=beta)
    for i, g in enumerate(ids):
        group = [r for r, h in zip(rewards.tolist(), ids, strict=True) if h == g]
        best = max(group)  # e^{r / beta} alone overflows at beta = 0.01
        expected = best + beta * math.log(math.fsum(math.exp((r - best) / beta) for r in group) / len(group))
        assert float(got[i]) == pytest.approx(expected, rel=1e-6)
    assert got[1] == torch.tensor(0.7) and a2po_values(torch.tensor([1e4, 0.0]), group_size=2, beta=0.01).isfinite().all()
    with pytest.raises(ValueError, match="beta=0"):
        a2po_values(rewards, group_size=9, beta=0)


# ---- metrics


def test_zero_variance_is_exact() -> None:
    rewards = torch.tensor([0.7] * 9 + [0.7] * 8 + [0.7 + 1e-7] + [math.nan] * 8 + [0.1] + [math.nan] * 9)
    got = zero_variance(rewards, group_size=9).view(4, 9).all(1)
    assert got.tolist() == [True, False, True, True] and got.dtype == torch.bool
    assert zero_variance(torch.zeros(0), group_size=3).shape == (0,)


def test_group_metrics() -> None:
    nan = math.nan
    rewards = torch.tensor([1, 1, 1, 0, 0, nan, 0, 1, 1, 0.5, 0.5, 0.5, nan, nan, nan])
    metrics = group_metrics(rewards, group_size=3)
    scored = [1, 1, 1, 0, 0, 0, 1, 1, 0.5, 0.5, 0.5]
    expected = {
        "zero_variance": 3 / 4,
        "all_wrong": 1 / 4,
        "all_correct": 1 / 4,
        "reward_mean": oracle.mean(scored),
        "reward_std": oracle.std(scored),
        "group_std": oracle.std([0, 1, 1]) / 4,
        "missing": 4 / 15,
    }
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        assert metrics[name].shape == () and metrics[name].dtype == torch.float32
        assert float(metrics[name]) == pytest.approx(value, rel=1e-6), name
    signed = group_metrics(torch.tensor([-1.0, -1.0, 0.5, -1.0]), group_size=2, extremes=(-1.0, 1.0))
    assert signed["all_wrong"] == 0.5 and signed["all_correct"] == 0
    for empty in (torch.zeros(0), torch.full((4,), nan)):
        values = {name: float(v) for name, v in group_metrics(empty, group_size=2).items()}
        assert values.pop("missing") == float(len(empty) > 0) and set(values.values()) == {0.0}


# ---- per token


class Tokens:
    """Ragged sequences with holes in their masks, as lists for the reference and packed or padded for the package."""

    def __init__(self, lengths: list[int], seed: int = 0, holes: bool = True) -> None:
        g = torch.Generator().manual_seed(seed)
        self.lengths, self.longest = lengths, max([*lengths, 1])
        self.rows = sum(lengths)
        self.mask = torch.rand(self.rows, generator=g) > (0.3 if holes else -1.0)
        self.cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        self.generator = g

    def random(self) -> Tensor:
        """fp64 [N], with garbage where the mask is False."""
        x = torch.randn(self.rows, generator=self.generator, dtype=torch.float64)
        garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e300])[torch.arange(self.rows) % 4].double()
        return torch.where(self.mask, x, garbage)

    def lists(self, x: Tensor) -> list[list[float]]:
        return [row.tolist() for row in x.split(self.lengths)]

    def masked(self, x: Tensor) -> list[list[float | None]]:
        rows = zip(self.lists(x), self.lists(self.mask), strict=True)
        return [[v if keep else None for v, keep in zip(*row, strict=True)] for row in rows]

    def pad(self, x: Tensor) -> Tensor:
        filler = {torch.bool: False, torch.int64: 0}.get(x.dtype, math.nan)
        out = torch.full((len(self.lengths), self.longest), filler, dtype=x.dtype)
        for b, row in enumerate(x.split(self.lengths)):
            out[b, : len(row)] = row
        return out

    def unpad(self, x: Tensor) -> Tensor:
        return torch.cat([x[b, :n] for b, n in enumerate(self.lengths)])

    def both(self, function: object, *tensors: Tensor, **options: object) -> Tensor:
        """The packed result, after a look at the padded one and at that for masked tokens."""
        packed = function(*tensors, mask=self.mask, cu_seqlens=self.cu_seqlens, **options)  # type: ignore[operator]
        per_token = [name for name, x in options.items() if isinstance(x, Tensor) and x.shape == (self.rows,)]
        options = {name: self.pad(x) if name in per_token else x for name, x in options.items()}  # type: ignore[arg-type]
        padded = function(*map(self.pad, tensors), mask=self.pad(self.mask), **options)  # type: ignore[operator]
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (packed, padded)), strict=True):
            assert a.dtype == b.dtype == torch.float32 and b.shape == (len(self.lengths), self.longest)
            assert not a[~self.mask].any() and not b[~self.pad(self.mask)].any()
            torch.testing.assert_close(self.unpad(b), a, rtol=1e-6, atol=1e-12)
        return packed


RAGGED = [5, 1, 0, 9, 2, 33, 1]


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.0])
def test_discounted_returns(gamma: float) -> None:
    tokens = Tokens(RAGGED)
    rewards = tokens.random()
    got = tokens.both(discounted_returns, rewards, gamma=gamma)
    close(got, flat(oracle.returns_to_go(tokens.masked(rewards), gamma)))


def test_tokens_of_a_tool_are_not_discounted() -> None:
    mask = torch.tensor([[True, False, False, True]])
    got = discounted_returns(torch.tensor([[0.0, math.nan, 5.0, 1.0]]), gamma=0.5, mask=mask)
    assert got.tolist() == [[0.5, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.0)])
def test_gae(gamma: float, lam: float) -> None:
    tokens = Tokens(RAGGED)
    rewards, values = tokens.random(), tokens.random()
    advantages, returns = oracle.gae(tokens.masked(rewards), tokens.lists(values), gamma, lam)
    got = tokens.both(gae, rewards, values, gamma=gamma, lam=lam)
    close(got[0], flat(advantages))
    close(got[1], flat(returns))
    per_sequence = tokens.both(gae, rewards, values, gamma=gamma, lam=torch.full((len(RAGGED),), lam))
    torch.testing.assert_close(per_sequence[0], got[0], rtol=1e-6, atol=1e-6)


def test_gae_with_lambda_1_is_the_return_less_the_value() -> None:
    tokens = Tokens(RAGGED)
    rewards, values = tokens.random(), tokens.random()
    advantages, returns = tokens.both(gae, rewards, values, gamma=0.9, lam=1.0)
    expected = tokens.both(discounted_returns, rewards, gamma=0.9)
    torch.testing.assert_close(returns, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(advantages, torch.where(tokens.mask, expected - values.float(), 0.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("scale", ["group", "none"])
def test_process_advantages(scale: str, gamma: float) -> None:
    tokens = Tokens([5, 1, 9, 2, 33, 0])
    ends = torch.rand(tokens.rows, generator=tokens.generator) > 0.5
    rewards = torch.where(ends, tokens.random(), math.nan)
    steps: list[list[float | None]] = [[None if math.isnan(r) else r for r in row] for row in tokens.lists(rewards)]
    for groups in ([0, 0, 1, 1, 2, 2], [7, 3, 7, 3, 7, 3]):
        expected = oracle.process_advantages(steps, tokens.lists(tokens.mask), groups, gamma, scale=scale)  # type: ignore[arg-type]
        got = tokens.both(process_advantages, rewards, groups=torch.tensor(groups), gamma=gamma, scale=scale)
        close(got, flat(expected))
        assert got.abs().max() > 0.5
    torch.testing.assert_close(
        tokens.both(process_advantages, rewards, group_size=2, scale=scale),
        tokens.both(process_advantages, rewards, groups=torch.tensor([0, 0, 1, 1, 2, 2]), scale=scale),
    )


def test_process_advantages_of_one_step_are_those_of_the_outcome() -> None:
    outcome = torch.randn(6)
    rewards = torch.full((6, 4), math.nan)
    rewards[:, -1] = outcome
    got = process_advantages(rewards, group_size=3)
    assert torch.equal(got, group_advantages(outcome, group_size=3)[:, None].expand(6, 4))
    assert group_advantages(outcome, group_size=3, dtype=torch.float64).dtype == torch.float64


KL = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - d - 1,
    "abs": abs,
}


@pytest.mark.parametrize("kl", KL)
def test_kl_in_reward(kl: str) -> None:
    tokens = Tokens(RAGGED)
    logps, ref_logps, rewards = tokens.random(), tokens.random(), tokens.random()
    outcome = torch.randn(len(RAGGED))
    terms = [
        [None if a is None else 0.3 * KL[kl](b - a) for a, b in zip(*pair, strict=True)]
        for pair in zip(tokens.masked(logps), tokens.lists(ref_logps), strict=True)
    ]
    per_token = [
        [0.0 if k is None else r - k for r, k in zip(*pair, strict=True)]
        for pair in zip(tokens.lists(rewards), terms, strict=True)
    ]
    options = {"beta": 0.3, "kl": kl, "mask": tokens.mask, "cu_seqlens": tokens.cu_seqlens}
    got = tokens.both(kl_in_reward, rewards, logps, ref_logps, beta=0.3, kl=kl)
    close(got, flat(per_token))
    close(kl_in_reward(rewards, logps, ref_logps, per="sequence", **options), [math.fsum(row) for row in per_token])  # type: ignore[arg-type]

    penalties = [math.fsum(k for k in row if k is not None) for row in terms]
    whole = [r - p for r, p in zip(outcome.tolist(), penalties, strict=True)]
    close(kl_in_reward(outcome, logps, ref_logps, per="sequence", **options), whole)  # type: ignore[arg-type]
    spread = kl_in_reward(outcome, logps, ref_logps, **options)  # type: ignore[arg-type]
    for b, (row, ks) in enumerate(zip(tokens.lists(spread.double()), terms, strict=True)):
        last = max((t for t, k in enumerate(ks) if k is not None), default=-1)
        expected = [0.0 if k is None else -k + (float(outcome[b]) if t == last else 0.0) for t, k in enumerate(ks)]
        assert row == pytest.approx(expected, rel=1e-6, abs=1e-7)
    padded = kl_in_reward(outcome, tokens.pad(logps), tokens.pad(ref_logps), beta=0.3, kl=kl, mask=tokens.pad(tokens.mask))
    torch.testing.assert_close(tokens.unpad(padded), spread)


def test_kl_in_reward_with_a_clamp() -> None:
    got = kl_in_reward(
        torch.zeros(1, 2), torch.tensor([[0.0, 0.0]]), torch.tensor([[5.0, 0.0]]), beta=1.0, kl=Kl("k3", clamp=10.0)
    )
    assert got.tolist() == [[-10.0, 0.0]]
    with pytest.raises(ValueError, match="gradient"):
        kl_in_reward(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), beta=1.0, kl=Kl("k3", weighting="ratio"))


@pytest.mark.parametrize("weighted", [False, True])
def test_optimal_token_advantages(weighted: bool) -> None:
    tokens = Tokens([5, 3, 9, 2, 33, 0, 1, 20])
    groups = [0, 0, 1, 1, 0, 0, 2, 1]
    rewards = tokens.random()
    logps = torch.where(tokens.mask, -tokens.random().abs(), math.nan)
    squares = torch.where(tokens.mask, logps.exp() ** 2 + 0.1, math.inf)
    weights = torch.where(tokens.mask, tokens.random().abs(), math.nan) if weighted else None
    expected = oracle.optimal_token_advantages(
        tokens.masked(rewards),
        tokens.lists(logps),
        tokens.lists(squares),
        groups,
        None if weights is None else tokens.lists(weights),
    )
    options = {"groups": torch.tensor(groups)} | ({} if weights is None else {"weights": weights})
    close(tokens.both(optimal_token_advantages, rewards, logps, squares, **options), flat(expected), rtol=1e-5)


def test_optimal_token_advantages_of_equal_outcomes_are_zero() -> None:
    rewards = torch.zeros(4, 6)
    rewards[:, -1] = 0.7
    logps = -torch.rand(4, 6)
    got = optimal_token_advantages(rewards, logps, logps.exp() ** 2 + 0.01, group_size=4)
    assert not got.any()
    rewards[0, -1] = 0.0
    assert (optimal_token_advantages(rewards, logps, logps.exp() ** 2 + 0.01, group_size=4) != 0).all()


def test_reinforce_plus_plus() -> None:
    """Returns of rewards that include the KL, whitened over the tokens: mean 0, variance 1."""
    tokens = Tokens(RAGGED)
    rewards = kl_in_reward(
        torch.randn(len(RAGGED)), tokens.random(), tokens.random(), beta=0.1, mask=tokens.mask, cu_seqlens=tokens.cu_seqlens
    )
    advantages = whiten(discounted_returns(rewards, mask=tokens.mask, cu_seqlens=tokens.cu_seqlens), tokens.mask)
    trained = advantages[tokens.mask].double()
    assert abs(float(trained.mean())) < 1e-6 and float(trained.var()) == pytest.approx(1.0, rel=1e-5)


# ---- whitening


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-4])
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("guard", ["add", "floor", "std"])
def test_whiten(guard: str, unbiased: bool, size: float, shift_mean: bool) -> None:
    tokens = Tokens(RAGGED)
    x = tokens.random() * size
    x[tokens.mask] += 3.0
    got = whiten(x, tokens.mask, unbiased=unbiased, guard=guard, eps=1e-8, shift_mean=shift_mean)
    expected = oracle.whiten(x[tokens.mask].tolist(), unbiased=unbiased, eps=1e-8, guard=guard, shift_mean=shift_mean)
    close(got[tokens.mask], expected)
    assert not got[~tokens.mask].any()


def test_whiten_equal_values() -> None:
    for n in range(1, 40):
        assert not whiten(torch.full((n,), 0.7), eps=0.0).any()
        assert torch.equal(whiten(torch.full((n,), 0.7), shift_mean=False), torch.full((n,), 0.7))
    assert not whiten(torch.randn(3, 4), torch.zeros(3, 4, dtype=torch.bool)).any()
    assert whiten(torch.zeros(0, 3)).shape == (0, 3)


def test_whitening_of_the_trainers() -> None:
    x = torch.randn(50)
    centred = x - x.mean()
    expected = {
        "trl": centred / (x.std() + 1e-4),
        "verl": centred * torch.rsqrt(x.var() + 1e-8),
        "skyrl": centred * torch.rsqrt(x.var() + 1e-8),
        "openrlhf": centred * x.var(unbiased=False).clamp(min=1e-8).rsqrt(),
        "nemo-rl": centred * x.var(unbiased=False).clamp(min=1e-8).rsqrt(),
    }
    assert set(expected) == set(WHITENING)
    for name, options in WHITENING.items():
        torch.testing.assert_close(whiten(x, **options), expected[name], rtol=2e-6, atol=1e-6)


# ---- verl's own code, where it is installed


def test_every_estimator_of_verl() -> None:
    """All but GDPO, whose rewards travel in a batch object: here it is a sum of `group_advantages`, whitened."""
    theirs = pytest.importorskip("verl.trainer.ppo.core_algos")
    ids = torch.tensor([0, 0, 0, 0, 1, 2, 1, 2, 2, 3])  # 3: a group of one
    b, t = len(ids), 12
    lengths = torch.randint(2, t, (b,))
    mask = torch.arange(t) < lengths[:, None]
    outcome, greedy = torch.randn(b), torch.randn(b)
    rewards = torch.nn.functional.one_hot(lengths - 1, t) * outcome[:, None]
    dense, values = torch.randn(b, t), torch.randn(b, t)
    logps = -torch.rand(b, t)
    squares = logps.exp() ** 2 + 0.05
    path = {"old_log_probs": logps, "sum_pi_squared": squares}
    raw = NUMERICS["verl"]
    plain = {**raw, "scale": "none"}
    keep = ids != 3  # its pass@k refuses a group of one
    best = pass_at_k_advantages(outcome[keep], groups=ids[keep])

    class Config(dict):  # type: ignore[type-arg]
        gamma = 0.9

    expected = {
        "grpo": ({}, group_advantages(outcome, groups=ids, **raw)),
        "grpo_vectorized": ({}, group_advantages(outcome, groups=ids, **raw)),
        "rloo": ({}, group_advantages(outcome, groups=ids, **{**plain, "baseline": "leave-one-out"})),
        "rloo_vectorized": ({}, group_advantages(outcome, groups=ids, baseline="leave-one-out", scale="none")),
        "opo": ({}, group_advantages(outcome, groups=ids, **{**plain, "baseline": "length"}, lengths=lengths)),
        "gpg": ({}, gpg_scale(outcome) * group_advantages(outcome, groups=ids, **plain)),
        "remax": ({"reward_baselines": greedy}, greedy_baseline_advantages(outcome, greedy)),
        "grpo_passk": ({"config": {}}, best),
        "reinforce_plus_plus": ({"config": Config()}, whiten(discounted_returns(rewards, gamma=0.9, mask=mask), mask)),
        "reinforce_plus_plus_baseline": (
            {},
            whiten(group_advantages(outcome, groups=ids, **plain)[:, None].expand(b, t), mask, **WHITENING["verl"]),
        ),
        "optimal_token_baseline": (path, optimal_token_advantages(rewards, logps, squares, groups=ids, mask=mask)),
    }
    for name, (options, ours) in expected.items():
        rows = keep if name == "grpo_passk" else torch.ones(b, dtype=torch.bool)
        if name in ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "grpo_passk") or "base" in name:
            options = {**options, "index": ids[rows].numpy()}
        call = theirs.ADV_ESTIMATOR_REGISTRY[name]
        got = call(token_level_rewards=rewards[rows].clone(), response_mask=mask[rows].float(), **options)[0]
        ours = torch.where(mask[rows], ours if ours.dim() == 2 else ours[:, None], 0.0)
        torch.testing.assert_close(ours, got, rtol=1e-5, atol=2e-6, msg=name)
    options = {"token_level_rewards": dense, "values": values, "response_mask": mask.float(), "gamma": 0.97, "lam": 0.9}
    got = theirs.compute_gae_advantage_return(**options)
    ours = gae(dense, values, gamma=0.97, lam=0.9, mask=mask)
    torch.testing.assert_close(ours[1][mask], got[1][mask], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(whiten(ours[0], mask)[mask], got[0][mask], rtol=1e-5, atol=2e-6)
    for name in ("k1", "k2", "k3", "abs"):
        kl = dense - 0.1 * theirs.kl_penalty(logps, values, name) * mask
        ours = kl_in_reward(dense, logps, values, beta=0.1, kl=Kl(name, clamp=10.0), mask=mask)
        torch.testing.assert_close(ours[mask], kl[mask], rtol=1e-5, atol=2e-6)


# ---- properties and refusals


def test_no_estimator_waits_for_the_device() -> None:
    """Meta tensors have no data, so reading a value raises. On a GPU such a read would make the host wait."""
    r, ids = torch.zeros(8, device="meta"), torch.zeros(8, dtype=torch.int64, device="meta")
    x, mask = r.view(2, 4), torch.ones(2, 4, dtype=torch.bool, device="meta")
    for baseline in ("mean", "leave-one-out", "length"):
        for scale in ("group", "batch", "none", "mean", "others"):
            lengths = ids if baseline == "length" else None
            group_advantages(r, groups=ids, baseline=baseline, scale=scale, lengths=lengths, missing="skip", singleton="raw")
    group_advantages(r.view(4, 2), group_size=2, reward_weights=[1.0, 2.0], combine="gdpo")
    pass_at_k_advantages(r, groups=ids)
    greedy_baseline_advantages(r, r)
    gpg_scale(r, groups=ids)
    a2po_values(r, groups=ids)
    zero_variance(r, groups=ids)
    group_metrics(r, groups=ids)
    discounted_returns(x, gamma=0.9, mask=mask)
    gae(x, x, lam=torch.zeros(2, device="meta"), mask=mask)
    process_advantages(x, group_size=2, mask=mask)
    kl_in_reward(r[:2], x, x, beta=0.1, mask=mask)
    kl_in_reward(r, r, r, beta=0.1, cu_seqlens=ids[:3], per="token")
    optimal_token_advantages(x, x, x, group_size=2, weights=x, mask=mask)
    whiten(x, mask)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_any_layout(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    """Padded equals packed equals the loops, whatever the lengths."""
    tokens = Tokens(lengths, seed)
    rewards, values = tokens.random(), tokens.random()
    advantages, returns = oracle.gae(tokens.masked(rewards), tokens.lists(values), gamma, lam)
    got = tokens.both(gae, rewards, values, gamma=gamma, lam=lam)
    for mine, theirs in zip(got, (advantages, returns), strict=True):
        torch.testing.assert_close(mine.double(), torch.tensor(flat(theirs), dtype=torch.float64), rtol=1e-5, atol=1e-6)


ONES = torch.ones(2, 3)
REFUSALS = {
    "gamma=1.5": lambda: discounted_returns(ONES, gamma=1.5),
    "lam=-1": lambda: gae(ONES, ONES, lam=-1),
    r"values has shape \[3\]": lambda: gae(ONES, ONES[0]),
    r"rewards is nan at \[1\]": lambda: discounted_returns(torch.tensor([0.0, math.nan])),
    "rewards is torch.int64": lambda: discounted_returns(ONES.long()),
    r"mask has shape \[2\]": lambda: discounted_returns(ONES, mask=torch.ones(2).bool()),
    r"rewards has shape \[1, 2, 3\]": lambda: discounted_returns(ONES[None]),
    r"cu_seqlens goes with packed.*\[2, 3\]": lambda: discounted_returns(ONES, cu_seqlens=torch.tensor([0, 6])),
    r"cu_seqlens=\[0, 2\].*3": lambda: discounted_returns(ONES[0], cu_seqlens=torch.tensor([0, 2])),
    r"cu_seqlens=\[0, 3, 2, 3\]": lambda: discounted_returns(ONES[0], cu_seqlens=torch.tensor([0, 3, 2, 3])),
    "cu_seqlens has dtype torch.float32": lambda: discounted_returns(ONES[0], cu_seqlens=torch.tensor([0.0, 3.0])),
    "group_size=3": lambda: process_advantages(ONES, group_size=3),
    "beta=-1": lambda: kl_in_reward(ONES, ONES, ONES, beta=-1),
    "per='batch'": lambda: kl_in_reward(ONES, ONES, ONES, beta=1, per="batch"),
    "kl='k9'": lambda: kl_in_reward(ONES, ONES, ONES, beta=1, kl="k9"),
    r"rewards has shape \[3\]": lambda: kl_in_reward(ONES[0], ONES, ONES, beta=1),
    "guard='max'": lambda: whiten(ONES, guard="max"),
    "eps=-1": lambda: whiten(ONES, eps=-1),
    "values is list": lambda: whiten([1.0]),  # type: ignore[arg-type]
    r"values is inf at \[0, 1\]": lambda: whiten(torch.tensor([[0.0, math.inf]])),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSALS[message]()
