"""Advantages of completions and of tokens, against plain Python floats."""

from __future__ import annotations

import math
import warnings
from functools import partial
from math import nan

import pytest
import torch

from grpo_kernels import Objective, PolicyGradient, TokenBatch, TokenSets, group_advantages
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.losses import objective_loss
from grpo_kernels.rewards.advantages import (
    BASELINES,
    NUMERICS,
    SCALES,
    a2po_values,
    gpg_scale,
    greedy_baseline_advantages,
    group_metrics,
    pass_at_k_advantages,
    zero_variance,
)
from grpo_kernels.rewards.estimators import ADVANTAGES, Evidence
from grpo_kernels.rewards.returns import (
    GUARDS,
    WHITENING,
    discounted_returns,
    gae,
    kl_in_reward,
    optimal_token_advantages,
    process_advantages,
    self_distilled_advantages,
    whiten,
)
from support import advantage_oracle as oracle
from support.advantage_oracle import Ragged, close
from support.oracle import kl_estimate
from support.pairs import label, pairs, refusals

assert_close = torch.testing.assert_close

# ---- groups of completions

IDS = [0, 1, 0, 2, 1, 0, 2, 2, 2, 1, 3, 1, 4, 4]  # one group of one, one of two
GROUPS = {
    "interleaved": IDS,
    "any integers": [10**12 * i - 7 for i in IDS],
    "alone": list(range(14)),
}
#: Rewards, with the size of one.
REWARDS = {
    "plain": lambda: (torch.randn(14) + 0.5, 1.0),
    "missing": lambda: (torch.where(torch.arange(14) % 5 == 1, nan, torch.randn(14)), 1.0),
    "huge": lambda: (1e30 * torch.randn(14), 1e30),  # whose squares overflow in fp32
    "double": lambda: (torch.randn(14).double() + 1000.0, 1.0),
    "outliers": lambda: (
        torch.randn(14).double() + 1e6 * (torch.arange(14) % 6 == 0),
        1.0,
    ),  # beside which the others cancel
}


AXES = {
    "baseline": BASELINES, "scale": SCALES, "rewards": list(REWARDS), "unbiased": [True, False], "eps": [1e-4, 1e-6, 1.0, 0.0],
    "singleton": ["zero", "raw"],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:all advantages are 0")
@pytest.mark.parametrize("case", pairs(**AXES), ids=label)
def test_group_advantages(case):
    """Every pair of options; what is 0 is exactly 0."""
    rewards, size = REWARDS[case["rewards"]]()
    options = {**case, "eps": case["eps"] * size, "missing_rewards": "skip"}
    del options["rewards"]
    if options["baseline"] == "none" and options["scale"] != "none":
        options["baseline"] = "mean"
    lengths = {"lengths": torch.randint(0, 4, (14,))} if options["baseline"] == "length" else {}
    listed = [None if math.isnan(r) else r for r in rewards.tolist()]
    for ids in GROUPS.values():
        got = group_advantages(rewards, groups=torch.tensor(ids), **options, **lengths)
        want = torch.tensor(
            oracle.group_advantages(
                listed, ids, **options, **{k: v.tolist() for k, v in lengths.items()}
            )
        )
        residue = (
            1e-6 * want.abs().max() if lengths else 0.0
        )  # a reward may equal the mean by lengths, which is then rounded
        close(got, want, atol=residue + 1e-12 * size)
        assert lengths or torch.equal(got == 0, want == 0)


@pytest.mark.parametrize("baseline", BASELINES[:3])
@pytest.mark.parametrize("reward", [0.1, 0.7, -0.9, 1 / 3, 1e-30, 1e30])
def test_equal_rewards_are_exactly_zero(baseline, reward):
    """The rounded mean of n equal rewards need not be that reward:

    the residue over eps would be an advantage of 1e-3.
    """
    for n in range(2, 65, 3):
        lengths = torch.randint(1, 40, (2 * n,)) if baseline == "length" else None
        rewards = torch.cat([torch.full((n,), reward), reward * torch.rand(n)])
        options = {"baseline": baseline, "eps": 0.0, "singleton": "raw", "lengths": lengths}
        assert not group_advantages(rewards, group_size=n, **options)[:n].any(), n


@pytest.mark.parametrize("combine", ["sum", "gdpo"])
@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
def test_several_rewards(combine, baseline):
    rewards, weights = torch.randn(14, 3) * torch.tensor([1.0, 100.0, 1.0]), [1.0, 0.1, 2.0]
    rewards[torch.tensor(IDS) == 2, 2] = (
        0.7  # one function cannot tell the answers to a prompt apart
    )
    rewards[1, 0] = rewards[5, 1] = rewards[3] = nan
    rows = [[None if math.isnan(r) else r for r in row] for row in rewards.tolist()]
    options = {"baseline": baseline, "missing_rewards": "skip"}
    want = (
        oracle.gdpo(rows, weights, IDS, **options)
        if combine == "gdpo"
        else oracle.group_advantages(oracle.summed(rows, weights), IDS, **options)
    )
    close(
        group_advantages(
            rewards, groups=torch.tensor(IDS), reward_weights=weights, combine=combine, **options
        ),
        want,
    )


#: What the trainers add to the std of a group; None: they divide by none.
EPS = {
    "trl": 1e-4,
    "verl": 1e-6,
    "skyrl": 1e-6,
    "slime": 1e-6,
    "openrlhf": 1e-9,
    "areal": 1e-5,
    "torchtitan": 1e-6,
    "prime-rl": None,
}


def theirs(name, x):
    """The trainers' own lines, for a group."""
    if name == "nemo-rl":
        others = [torch.cat((x[:i], x[i + 1 :])) for i in range(len(x))]
        return torch.stack(
            [(r - o.mean()) / (o.std() + 1e-6) for r, o in zip(x, others, strict=True)]
        )
    eps = EPS[name]
    return (x - x.mean()) / (1.0 if eps is None else x.std(unbiased=name != "torchtitan") + eps)


@pytest.mark.filterwarnings("ignore:1 of the 2 groups have one completion")
@pytest.mark.parametrize("name", NUMERICS)
def test_trainers_formulas(name):
    """Where eps matters too, and for a group of one, whose mean verl and SkyRL take for 0 and its
    std for 1. TRL lets go of completions that were not scored.
    """
    for size in (1.0, 1e-4):
        groups = size * torch.randn(4, 6)
        got = group_advantages(groups.view(-1), group_size=6, **NUMERICS[name])
        wanted = torch.cat([theirs(name, group) for group in groups])
        assert_close(got, wanted, rtol=1e-3 if size < 1 else 2e-5, atol=2e-6 * size)
    alone = group_advantages([3.0, 1.0, 0.0], groups=torch.tensor([0, 1, 1]), **NUMERICS[name])[0]
    assert float(alone) == (pytest.approx(3 / (1 + 1e-6)) if name in ("verl", "skyrl") else 0.0)
    if name == "trl":
        assert_close(
            group_advantages([nan, *groups[0]], group_size=7, **NUMERICS[name])[1:],
            got[:6],
            rtol=1e-3,
            atol=0,
        )


@pytest.mark.parametrize("scale", ["group", "none"])
def test_pass_at_k(scale):
    rewards = torch.randn(20).double()
    rewards[5:10] = torch.tensor([0.7, 0.1, 0.7, 0.3, 0.7], dtype=torch.float64)  # three best
    rewards[10:15] = 0.7
    expected = []
    for group in rewards.view(4, 5).tolist():
        best, second = sorted(group, reverse=True)[:2]
        expected += [
            (best - second) / (oracle.std(group) + 1e-6 if scale == "group" else 1.0) * (r == best)
            for r in group
        ]
    got = pass_at_k_advantages(rewards, group_size=5, scale=scale)
    close(got, expected)
    assert got.count_nonzero() == 2


def test_greedy_baseline_and_gpg():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    assert greedy_baseline_advantages(rewards, 0.7 * rewards.flip(0)).tolist() == pytest.approx(
        [1, 0, -0.7, -0.7, 1, 1, 0, -0.7]
    )
    assert gpg_scale(rewards) == pytest.approx(8 / 3) and gpg_scale(
        rewards, group_size=2
    ) == pytest.approx(8 / 2)
    assert gpg_scale(torch.zeros(4)) == gpg_scale(torch.zeros(4), group_size=2) == 4.0


@pytest.mark.parametrize("beta", [0.01, 0.5, 100.0])
def test_a2po_values(beta):
    """e^{r / beta} alone overflows at beta = 0.01."""
    rewards = torch.randn(14).double()
    groups = [[r for r, h in zip(rewards.tolist(), IDS, strict=True) if h == g] for g in IDS]
    want = [
        max(x) + beta * math.log(oracle.mean([math.exp((r - max(x)) / beta) for r in x]))
        for x in groups
    ]
    close(a2po_values(rewards, groups=torch.tensor(IDS), beta=beta), want)


def test_group_metrics():
    rewards = torch.tensor([1, 1, 1, 0, 0, nan, 0, 1, 1, 0.5, 0.5, 0.5, nan, nan, nan])
    scored = [1, 1, 1, 0, 0, 0, 1, 1, 0.5, 0.5, 0.5]
    expected = {
        "zero_variance": 3 / 4, "all_wrong": 1 / 4, "all_correct": 1 / 4, "missing": 4 / 15, "single": 0.0,
        "reward_mean": oracle.mean(scored), "reward_std": oracle.std(scored), "group_std": oracle.std([0, 1, 1]) / 4,
    }  # fmt: skip
    assert {
        name: float(v) for name, v in group_metrics(rewards, group_size=3).items()
    } == pytest.approx(expected)
    signed = group_metrics(torch.tensor([-1.0, nan, 0.5, -1.0]), group_size=2, extremes=(-1.0, 1.0))
    assert signed["all_wrong"] == 0.5 and signed["all_correct"] == 0
    assert signed["single"] == 0.5  # the other completion of the first group has no reward
    assert group_metrics(rewards[:4], groups=torch.tensor([7, 3, 3, 5]))["single"] == 2 / 3


# ---- groups of one


def test_groups_of_one_completion_are_warned_of_once(monkeypatch):
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        group_advantages([3.0, 1.0, 2.0], group_size=1, singleton="raw")
        assert not seen
        assert not any(group_advantages([3.0, -2.0, 0.5], group_size=1).any() for _ in range(3))
        assert not any(
            group_advantages([3.0, -2.0], groups=torch.tensor([1, 2])).any() for _ in range(3)
        )
    (warning,) = seen
    assert warning.filename == __file__ and "all advantages are 0" in str(warning.message)


def test_many_groups_of_one_completion_are_warned_of_once(monkeypatch):
    """From a quarter of the groups on, whatever their number is; never where nothing is lost."""
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    few = [0, 1, 1, 2, 2, 3, 3, 4, 4]  # one of five
    quarter = few[:7]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        group_advantages(torch.arange(9.0), groups=torch.tensor(few))
        group_advantages(torch.arange(7.0), groups=torch.tensor(quarter), singleton="raw")
        group_advantages(
            torch.arange(7.0), groups=torch.tensor(quarter), baseline="none", scale="none"
        )
        assert not seen
        group_advantages(torch.arange(7.0), groups=torch.tensor(quarter))
        group_advantages(torch.arange(3.0), groups=torch.tensor([0, 1, 1]))
        TokenBatch.from_rewards(
            torch.zeros(3, 2).long(), torch.arange(3.0), groups=torch.tensor([0, 1, 1])
        )
    (warning,) = seen
    assert warning.filename == __file__ and "1 of the 4 groups have one completion" in str(
        warning.message
    )
    assert "group_metrics" in str(warning.message)


# ---- tokens


def agree(rows, function, want, *tensors, **options):
    """Padded and packed rows give what the oracle gives."""
    given = {"mask": rows.mask, **options}
    flat = {
        k: x[rows.inside] if torch.is_tensor(x) and x.shape == rows.mask.shape else x
        for k, x in given.items()
    }
    packed = function(
        *(x[rows.inside] if x.dim() == 2 else x for x in tensors),
        cu_seqlens=rows.cu_seqlens,
        **flat,
    )
    for got in (function(*tensors, **given), packed):
        for one, wanted in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
            rows.check(one, wanted, rtol=1e-5, atol=1e-6)


@pytest.fixture(params=[[5, 1, 0, 9, 2, 33, 1], [1, 1], [12, 0, 3, 7]], ids=str)
def rows(request):
    return Ragged(request.param)


def at_end(rewards, mask):
    """At the last trained token of each sequence."""
    return torch.where(mask & (mask.cumsum(1) == mask.sum(1, keepdim=True)), rewards[:, None], 0.0)


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.97, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_returns_and_gae(rows, gamma, lam):
    rewards, values = rows.random(), rows.random()
    agree(
        rows,
        discounted_returns,
        [oracle.returns_to_go(rows.lists(rewards), gamma)],
        rewards,
        gamma=gamma,
    )
    want = oracle.gae(rows.lists(rewards), rows.lists(values), gamma, lam)
    for decay in (lam, torch.full((len(rows.mask),), lam), torch.full(rows.mask.shape, lam)):
        agree(rows, gae, want, rewards, values, gamma=gamma, lam=decay)


@pytest.mark.parametrize(
    "case", pairs(gamma=[1.0, 0.9], scale=["group", "none"], order=[1, -1]), ids=label
)
def test_process_advantages(rows, case):
    gamma, scale, order = case.values()
    rewards = torch.where(torch.rand(rows.mask.shape) > 0.5, rows.random(), nan)
    groups = [i // 2 for i in range(len(rewards))][::order]
    steps = [[None if math.isnan(r) else r for r in row] for row in rows.lists(rewards)]
    want = oracle.process_advantages(steps, groups, gamma, scale=scale)
    agree(
        rows,
        process_advantages,
        [want],
        rewards,
        groups=torch.tensor(groups),
        gamma=gamma,
        scale=scale,
    )


#: Estimators -> log p(token), log q(token) -> the estimate.
KLS = {
    **{kind: partial(kl_estimate, kind) for kind in ("k1", "k2", "k3", "abs")},
    Kl("k3", clamp_log=1.0, clamp=0.6): lambda p, q: kl_estimate("k3", p, q, 1.0).clamp(max=0.6),
}


@pytest.mark.parametrize("kl", KLS, ids=str)
def test_kl_in_reward(rows, kl):
    """Of rewards of tokens and of whole completions, which go to the last trained token."""
    logps, ref_logps, rewards = rows.random(), rows.random(), rows.random()
    outcome = torch.randn(len(rows.mask)).double()
    penalty = torch.where(rows.mask, 0.3 * KLS[kl](logps, ref_logps), 0.0)
    given = {"beta": 0.3, "kl": kl}
    agree(rows, kl_in_reward, [rows.lists(rewards - penalty)], rewards, logps, ref_logps, **given)
    if outcome.numel() < rows.mask.sum():
        agree(
            rows,
            kl_in_reward,
            [rows.lists(at_end(outcome, rows.mask) - penalty)],
            outcome,
            logps,
            ref_logps,
            **given,
        )


@pytest.mark.parametrize("weighted", [False, True])
def test_optimal_token_advantages(rows, weighted):
    groups = [i % 3 for i in range(len(rows.mask))]
    rewards, logps, weights = (
        rows.random(),
        rows.poisoned(-rows.random().abs()),
        rows.poisoned(rows.random().abs()),
    )
    squares = rows.poisoned(logps.exp() ** 2 + 0.1)
    given = {"weights": weights} if weighted else {}
    lists = [rows.lists(x) for x in (rewards, logps, squares)]
    want = oracle.optimal_token_advantages(*lists, groups, *map(rows.lists, given.values()))
    agree(
        rows,
        optimal_token_advantages,
        [want],
        rewards,
        logps,
        squares,
        groups=torch.tensor(groups),
        **given,
    )


@pytest.mark.parametrize("size", [0.2, 100.0])
@pytest.mark.parametrize(
    "case", pairs(strength=[0.0, 0.5, 1.0], clip=[0.2, 0.0, 3.0], negative_only=[False, True]),
    ids=label,
)  # fmt: skip
def test_self_distilled_advantages(rows, case, size):
    """Of one advantage a sequence, some of them 0, and of one a token."""
    old, teacher = (rows.poisoned(-size * rows.random().abs()) for _ in range(2))
    of_sequence = torch.randn(len(rows.mask)).double()
    of_sequence[::3] = 0.0
    of_token = rows.random()
    for advantages in (of_sequence[:, None].expand(rows.mask.shape), of_token):
        lists = zip(*map(rows.lists, (advantages, old, teacher)), strict=True)
        want = [
            [oracle.self_distilled(*x, **case) for x in zip(*row, strict=True)] for row in lists
        ]
        agree(rows, self_distilled_advantages, [want], advantages, old, teacher, **case)
    want = self_distilled_advantages(
        of_sequence[:, None].expand(rows.mask.shape), old, teacher, mask=rows.mask, **case
    )
    got = self_distilled_advantages(of_sequence[:, None], old, teacher, mask=rows.mask, **case)
    assert torch.equal(got, want)


@pytest.mark.parametrize("size", [1.0, 1e-4])
@pytest.mark.parametrize(
    "case", pairs(guard=GUARDS, unbiased=[True, False], shift_mean=[True, False]), ids=label
)
def test_whiten(rows, size, case):
    x = rows.random() * size + 3.0
    rows.check(
        whiten(x, rows.mask, **case),
        [oracle.whiten(x[rows.mask].tolist(), eps=1e-8, **case)] if rows.mask.any() else [],
    )


@pytest.mark.parametrize("name", WHITENING)
def test_whitening_of_the_trainers(name):
    for x in (torch.randn(50), 1e-4 * torch.randn(50)):
        variance = x.double().var(unbiased=name in ("trl", "verl", "skyrl"))
        divisor = {"trl": variance.sqrt() + 1e-4, "verl": (variance + 1e-8).sqrt()}
        divisor["skyrl"] = divisor["verl"]
        expected = (x - x.double().mean()) / divisor.get(name, variance.clamp(min=1e-8).sqrt())
        close(whiten(x, **WHITENING[name]), expected, rtol=2e-6, atol=1e-6)


# ---- estimators by name

B, T = 8, 3


def evidence_of(device="cpu"):
    rewards = torch.tensor([0.1, 0.5, 0.2, 0.9, 0.0, 1.0, 0.3, 0.3])
    mask = torch.arange(T) < torch.tensor([3, 1, 2, 3, 3, 2, 1, 3])[:, None]
    given = {
        "rewards": rewards, "columns": torch.stack([rewards, 1 - rewards.square()], 1), "mask": mask, "greedy_rewards": torch.rand(B),
        "steps": torch.where(mask & (torch.rand(B, T) < 0.6), torch.rand(B, T), nan), "values": torch.rand(B, T),
        "old_logps": -torch.rand(B, T), "sum_squares": 0.5 * torch.rand(B, T) + 0.4,
    }  # fmt: skip
    return Evidence(
        group_size=4, reward_weights=[1.0, 2.0], **{name: x.to(device) for name, x in given.items()}
    )


def in_groups(e, **options):
    return group_advantages(e.rewards, group_size=4, **options)


def returned(e, gamma=1.0, **options):
    return discounted_returns(
        at_end(in_groups(e, scale="none", **options), e.mask), gamma=gamma, mask=e.mask
    )


#: What each name stands for, written with the functions of the library, also with options.
EXPECTED = [
    ("group", {}, in_groups),
    (
        "group",
        {"baseline": "leave-one-out", "scale": "none"},
        lambda e: in_groups(e, baseline="leave-one-out", scale="none"),
    ),
    ("rloo", {}, lambda e: in_groups(e, baseline="leave-one-out", scale="none")),
    ("opo", {}, lambda e: in_groups(e, baseline="length", scale="none", lengths=e.mask.sum(1))),
    ("maxrl", {}, lambda e: in_groups(e, scale="mean", eps=0.0)),
    (
        "gdpo",
        {},
        lambda e: group_advantages(
            e.columns, group_size=4, combine="gdpo", reward_weights=[1.0, 2.0]
        ),
    ),
    ("pass_at_k", {}, lambda e: pass_at_k_advantages(e.rewards, group_size=4)),
    ("gpg", {}, lambda e: gpg_scale(e.rewards, group_size=4) * in_groups(e, scale="none")),
    ("remax", {}, lambda e: greedy_baseline_advantages(e.rewards, e.greedy_rewards)),
    ("reinforce_pp", {}, lambda e: whiten(returned(e, baseline="none"), e.mask)),
    (
        "reinforce_pp",
        {"gamma": 0.5, "baseline": "mean", "unbiased": False},
        lambda e: whiten(returned(e, 0.5), e.mask, unbiased=False),
    ),
    ("gae", {}, lambda e: whiten(gae(at_end(e.rewards, e.mask), e.values, mask=e.mask)[0], e.mask)),
    ("process", {}, lambda e: process_advantages(e.steps, group_size=4)),
    (
        "optimal_token",
        {},
        lambda e: optimal_token_advantages(
            at_end(e.rewards, e.mask), e.old_logps, e.sum_squares, group_size=4, mask=e.mask
        ),
    ),
]


@pytest.mark.parametrize("name, options, function", EXPECTED)
def test_a_name_is_its_function(name, options, function):
    """Also in a batch, where what it needs to know goes beside the fields."""
    evidence = evidence_of()
    assert set(ADVANTAGES) == {name for name, *_ in EXPECTED}
    expected = function(evidence)
    assert (
        torch.equal(ADVANTAGES[name](evidence, **options), expected) and expected.abs().max() > 0.1
    )
    known = {k: x for k, x in vars(evidence).items() if x is not None and k != "rewards"}
    batch = TokenBatch.from_rewards(
        torch.zeros(B, T, dtype=torch.int64), evidence.rewards, estimator=name, **known, **options
    )
    assert torch.equal(batch.advantages, expected) and torch.equal(
        batch.old_logps, evidence.old_logps
    )
    assert batch.groups.tolist() == [0] * 4 + [1] * 4
    if name != "opo":  # whose lengths are counted in a padded mask
        mask, offsets = known["mask"], torch.tensor([0, *known["mask"].sum(1)]).cumsum(0)
        flat = {
            k: x[mask] if torch.is_tensor(x) and x.shape == mask.shape else x
            for k, x in known.items()
        }
        flat |= {"cu_seqlens": offsets, **options}
        packed = TokenBatch.from_rewards(
            batch.targets[mask], evidence.rewards, estimator=name, **flat
        ).advantages
        assert_close(packed.reshape(-1), expected[mask] if expected.dim() == 2 else expected)


def test_as_many_sequences_as_tokens():
    """An advantage of a sequence is not read as one of a token."""
    offsets = torch.tensor([0, 0, 2, 3])
    batch = TokenBatch.from_rewards(
        torch.zeros(3, dtype=torch.int64),
        [3.0, 1.0, 2.0],
        group_size=3,
        scale="none",
        cu_seqlens=offsets,
    )
    assert (
        objective_loss(
            torch.tensor([1.0, 2.0, 4.0]), batch, Objective(PolicyGradient(), aggregate="token-sum")
        ).loss
        == 3
    )


def test_two_kinds_of_missing():
    """Rewards that are NaN, and targets outside of their sets."""
    given = {
        "targets": ONES.long(),
        "rewards": [1.0, nan],
        "group_size": 2,
        "missing_rewards": "skip",
    }
    batch = TokenBatch.from_rewards(**given, kept=SIX, missing="mask")
    assert batch.advantages.tolist() == [0.0, 0.0] and batch.missing == "mask"
    assert batch.trained.tolist() == [True, False, True, True, False, True]
    with pytest.raises(ValueError, match=r"rewards\[1\]=nan"):
        TokenBatch.from_rewards(**given | {"missing_rewards": "raise"}, kept=SIX, missing="mask")
    steps = {"estimator": "process", "groups": torch.zeros(2).long(), "steps": ONES.cumsum(0)}
    with pytest.raises(ValueError, match="missing_rewards='drop'"):
        TokenBatch.from_rewards(ONES.long(), [], **steps, missing_rewards="drop")


def test_rewards_that_are_not_read_may_be_missing():
    given = {"estimator": "process", "groups": torch.zeros(2).long(), "steps": ONES.cumsum(0)}
    without, beside = (
        TokenBatch.from_rewards(ONES.long(), x, **given).advantages for x in ([], [0.0, 1.0])
    )
    assert torch.equal(without, beside) and without.any()


def test_no_estimator_waits_for_the_device():
    """Meta tensors have no data, so reading a value raises.

    On a GPU such a read would make the host wait.
    """
    e, x, ids = (
        evidence_of("meta"),
        torch.zeros(2, 4, device="meta"),
        torch.zeros(8, dtype=torch.int64, device="meta"),
    )
    for estimator in ADVANTAGES.values():
        estimator(e)
    for function in (gpg_scale, a2po_values, zero_variance, group_metrics):
        function(e.rewards, groups=ids)
    kl_in_reward(x[:, 0], x, x, beta=0.1, mask=x == 0)
    self_distilled_advantages(x[:, 0], x, x, mask=x == 0)


# ---- refusals

ONES, FOUR, TWO = torch.ones(2, 3), torch.zeros(4), torch.ones(4, 2)
#: Sets of six tokens with the id 1, of which two lack it.
SIX = TokenSets.from_lists([[1], [2], [], [1, 2], [3], [1]])
ALONE = {"evidence": Evidence(FOUR, group_size=2, greedy_rewards=FOUR)}
WITHOUT = Evidence(FOUR, group_size=2)

REFUSED = [
    (
        group_advantages,
        {"rewards": FOUR, "group_size": 2},
        {
            "baseline='median'": {"baseline": "median"},
            "scale='group'": {"baseline": "none"},
            "combine='gdpo'": {"combine": "gdpo"},
            "eps=-1.0": {"eps": -1.0},
            "lengths=.None": {"baseline": "length"},
            r"rewards has shape \[4, 2\].*4 prompts with 2 completions each, pass rewards.flatten\(\) with group_size=2.*weights": {
                "rewards": TWO
            },
            "missing_rewards='drop': it must be one of raise, skip": {"missing_rewards": "drop"},
            r"rewards\[1\]=nan": {"rewards": [0.0, nan]},
            "group_size=3 does not divide the 4 rewards": {"group_size": 3},
            "group_size=None.*pass exactly one of them": {"group_size": None},
        },
    ),
    (a2po_values, {"rewards": FOUR, "group_size": 2}, {"beta=0": {"beta": 0}}),
    (
        pass_at_k_advantages,
        {"rewards": FOUR, "group_size": 2},
        {"scale='batch'": {"scale": "batch"}},
    ),
    (
        gae,
        {"rewards": ONES, "values": ONES},
        {
            "gamma=1.5": {"gamma": 1.5},
            r"cu_seqlens goes with packed.*\[2, 3\]": {"cu_seqlens": torch.tensor([0, 6])},
        },
    ),
    (
        discounted_returns,
        {"rewards": ONES[0], "cu_seqlens": torch.tensor([0, 3])},
        {
            r"cu_seqlens=\[0, 2\].*3": {"cu_seqlens": torch.tensor([0, 2])},
        },
    ),
    (
        process_advantages,
        {"rewards": ONES, "group_size": 2},
        {"group_size=3": {"group_size": 3}, "gamma=2": {"gamma": 2}},
    ),
    (
        kl_in_reward,
        {"rewards": ONES, "logps": ONES, "ref_logps": ONES, "beta": 1.0},
        {
            "beta=-1": {"beta": -1},
            "kl=.*gradient": {"kl": Kl("k3", weighting="ratio")},
        },
    ),
    (
        self_distilled_advantages,
        {"advantages": ONES, "old_logps": ONES, "teacher_logps": ONES},
        {
            "strength=2": {"strength": 2},
            "clip=-0.1": {"clip": -0.1},
            r"advantages has shape \[3\]": {"advantages": ONES[0]},
            r"teacher_logps has shape \[3\]": {"teacher_logps": ONES[0]},
            r"teacher_logps\[0, 0\]=nan": {"teacher_logps": ONES * nan},
            r"advantages\[0, 0\]=nan": {"advantages": ONES * nan},
        },
    ),
    (
        whiten,
        {"values": ONES},
        {
            "eps=-1": {"eps": -1},
        },
    ),
    (
        ADVANTAGES["remax"],
        ALONE,
        {
            "greedy_rewards=None: the advantages 'remax' are estimated from it": {
                "evidence": WITHOUT
            },
        },
    ),
    (
        ADVANTAGES["group"],
        ALONE,
        {
            "'gamma' is no argument of the advantages 'group'": {"gamma": 1},
        },
    ),
    (
        TokenBatch.from_rewards,
        {"targets": ONES.long(), "rewards": [0.0, 1.0], "group_size": 2},
        {
            "estimator='grpo': it must be one of group, rloo": {"estimator": "grpo"},
            r"rewards has shape \[1, 2\].*pass rewards.flatten\(\) with group_size=2": {
                "rewards": torch.ones(1, 2)
            },
            "missing='skip': .* kept is None.*missing_rewards=": {"missing": "skip"},
            "missing='mask': .* kept is None.*missing_rewards=": {"missing": "mask"},
            "missing='skip': it must be one of 'include'.*missing_rewards=": {
                "missing": "skip",
                "kept": SIX,
            },
            "rewards has 2 numbers, but targets 1 sequences": {
                "targets": ONES[0].long(),
                "cu_seqlens": torch.tensor([0, 3]),
            },
            r"cu_seqlens has shape \[\]: pass int32": {
                "targets": ONES[0].long(),
                "cu_seqlens": torch.tensor(3),
            },
            r"targets has shape \[\]: pass": {"targets": torch.tensor(2)},
        },
    ),
]


@refusals(REFUSED)
def test_refusals(refused):
    refused()
