"""Extreme values: the largest vocabularies and batches, extreme log-ratios, temperatures and rewards, the limits of fp16, and exact
zeros. Tests that take gigabytes are marked slow and have a smaller version."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from grpo_kernels import (
    LogitTransform,
    LossOutput,
    Objective,
    TokenBatch,
    group_advantages,
    grpo_loss,
    linear_grpo_loss,
    token_logprobs,
)
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.formulas.surrogates import Clip
from grpo_kernels.rewards.returns import whiten
from support.advantage_oracle import group_advantages as plain_advantages
from support.cases import assert_no_worse, build, run
from support.oracle import Spec

Tensor = torch.Tensor

E60 = math.exp(60.0)
HALVES = [torch.bfloat16, torch.float16]
#: Half a unit in the last place, relative.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def room_for(gigabytes: float) -> None:
    """Skips the test if the machine has less free memory."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    free = next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable")), 0.0)
    if free < gigabytes:
        pytest.skip(f"it wants {gigabytes} GB of memory, {free:.1f} are free")


# ---- sizes


def rows_by_float64(logits: Tensor, targets: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logps, entropies, gradient of sum slope_i logp_i) of rows [n, V]."""
    x = logits.detach().double().requires_grad_()
    log_p = x.log_softmax(-1)
    logps = log_p.gather(1, targets[:, None])[:, 0]
    (gradient,) = torch.autograd.grad((logps * slopes.double()).sum(), x)
    return logps.detach(), -(log_p.exp() * log_p).sum(1).detach(), gradient


def check_rows(
    logits: Tensor, targets: Tensor, slopes: Tensor, logps: Tensor, entropy: Tensor, gradient: Tensor, tiny: float = 1e-6
) -> None:
    exact_logps, exact_entropy, exact = rows_by_float64(logits, targets, slopes)
    assert (logps.double() - exact_logps).abs().max() <= 2e-6 * exact_logps.abs().max()
    assert (entropy.double() - exact_entropy).abs().max() <= 2e-6 * exact_entropy.abs().max()
    smallest = 2.0**-25 if gradient.dtype == torch.float16 else 0.0
    room = (ROUNDING[gradient.dtype] + 4e-6) * exact.abs() + tiny * exact.abs().amax(1, keepdim=True) * 1e-3 + smallest
    assert ((gradient.double() - exact).abs() <= room).all(), ((gradient.double() - exact).abs() - room).max()
    assert exact.abs().amax(1).min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("vocab", [1_000_003, 1 << 20])
def test_a_million_words(backend: str, vocab: int, dtype: torch.dtype) -> None:
    logits = (2.0 * torch.randn(2, vocab)).to(dtype)
    targets, advantages = torch.tensor([vocab - 1, 17]), torch.tensor([1.5, -0.5])
    out, gradient = fused(logits, targets, advantages, backend)
    check_rows(logits, targets, -advantages, out.logps, out.entropy, gradient)


def fused(logits: Tensor, targets: Tensor, advantages: Tensor, backend: str) -> tuple[LossOutput, Tensor]:
    """`reinforce` without a denominator, whose slopes are the advantages with the other sign."""
    leaf = logits.clone().requires_grad_()
    batch = TokenBatch(targets, advantages)
    out = grpo_loss(leaf, batch, Objective.preset("reinforce", aggregate="token-sum"), backend=backend)
    out.loss.backward()
    assert leaf.grad is not None
    return out, leaf.grad


@pytest.mark.parametrize("vocab", [1, 2, 17])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_one_row(backend: str, shape: tuple[int, ...], vocab: int) -> None:
    logits = torch.randn(*shape, vocab)
    targets, advantages = torch.zeros(shape, dtype=torch.int64), torch.full((1,), 2.0)
    out, gradient = fused(logits, targets, advantages, backend)
    if vocab == 1:
        assert out.loss == 0 and not out.logps.any() and not out.entropy.any() and not gradient.any()
    else:
        rows = logits.view(1, -1), targets.view(1), -advantages
        check_rows(*rows, out.logps.view(1), out.entropy.view(1), gradient.view(1, -1))


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_zero_rows_of_a_strided_vocabulary_stay_in_the_graph(layer: int, shape: tuple[int, ...], backend: str) -> None:
    """An empty micro-batch gives a differentiable 0: its backward fills .grad, and DDP's ranks do not wait for each other."""
    leaf, targets = torch.randn(*shape, 14, requires_grad=True), torch.zeros(shape, dtype=torch.int64)
    logits = leaf[..., ::2]
    if layer == 1:
        loss = token_logprobs(logits, targets, backend=backend)[0].sum()
    else:
        batch = TokenBatch(targets, torch.ones(shape))
        loss = grpo_loss(logits, batch, Objective.preset("dapo"), backend=backend).loss
    loss.backward()
    assert loss == 0 and leaf.grad is not None and leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_that_is_a_column_of_a_matrix(dtype: torch.dtype, backend: str) -> None:
    g = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 8, generator=g).to(dtype) for n in (6, 31))
    columns = torch.randn(31, 3, generator=g, requires_grad=True)
    batch = TokenBatch(torch.arange(6), torch.randn(6, generator=g))
    found = []
    for bias in (columns[:, 1], columns[:, 1].contiguous()):
        out = linear_grpo_loss(hidden, weight, batch, Objective.preset("dapo"), bias=bias, backend=backend)
        found.append((out.loss, *torch.autograd.grad(out.loss, columns)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and found[0][1][:, 1].any()


def many_rows(n: int, backend: str) -> None:
    """Short rows, all in one batch, DAPO's loss with a KL."""
    V = 5
    logits, targets = torch.randn(n, V), torch.randint(V, (n,))
    exact = logits.double().requires_grad_()
    logps = exact.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    old = (logps.detach() - 0.3 * torch.randn(n)).float()
    ref = (logps.detach() - 0.3 * torch.randn(n)).float()
    advantages = torch.randn(n)
    mask = torch.rand(n) < 0.9
    ratio, d = (logps - old.double()).exp(), ref.double() - logps
    A = advantages.double()
    terms = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.28) * A) + 0.1 * (d.exp() - d - 1)
    loss = terms[mask].sum() / int(mask.sum())
    (want,) = torch.autograd.grad(loss, exact)
    leaf = logits.clone().requires_grad_()
    batch = TokenBatch(targets, advantages, mask=mask, old_logps=old, ref_logps=ref)
    out = grpo_loss(leaf, batch, Objective.preset("dapo", beta=0.1), backend=backend)
    out.loss.backward()
    assert leaf.grad is not None
    assert abs(out.loss.double() - loss) <= 1e-6 * terms.abs().mean()
    near_a_bound = ((ratio - 0.8).abs() < 1e-5) | ((ratio - 1.28).abs() < 1e-5)
    error = (leaf.grad.double() - want).abs()[~near_a_bound]
    assert error.max() <= 4e-6 * want.abs().max() and near_a_bound.sum() < 1e-3 * n
    assert not leaf.grad[~mask].any()


def test_twenty_thousand_rows(backend: str) -> None:
    many_rows(20_011, backend)


@pytest.mark.slow
def test_a_million_rows(backend: str) -> None:
    room_for(2)
    many_rows(1_000_003, backend)


class Output(torch.autograd.Function):
    """The same memory, as the output of something that needs a gradient: a leaf could not be overwritten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, needs: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def in_place(rows: int, vocab: int, dtype: torch.dtype, backend: str, looked_at: list[int]) -> None:
    """The logits take nearly all memory. Rows repeat, so that they are created quickly."""
    some, whole = torch.randn(64, vocab).to(dtype), torch.empty(rows, vocab, dtype=dtype)
    for lo in range(0, rows, 64):
        whole[lo : lo + 64] = some[: min(64, rows - lo)]
    targets, advantages = torch.randint(vocab, (rows,)), torch.randn(rows)
    kept = whole[looked_at].clone()
    logits = Output.apply(whole[None], torch.ones((), requires_grad=True))
    batch = TokenBatch(targets[None], advantages[None])
    objective = Objective.preset("reinforce", aggregate="token-sum")
    out = grpo_loss(logits, batch, objective, inplace=True, backend=backend)
    out.loss.backward()
    assert out.logps.isfinite().all() and (out.logps[0] < 0).all()
    at = torch.tensor(looked_at)
    check_rows(kept, targets[at], -advantages[at], out.logps[0, at], out.entropy[0, at], whole[at])


@pytest.mark.parametrize("dtype", HALVES)
def test_rows_in_place(backend: str, dtype: torch.dtype) -> None:
    in_place(70, 20_011, dtype, backend, [0, 1, 63, 64, 69])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
def test_more_than_2_to_the_31_logits(backend: str, dtype: torch.dtype) -> None:
    """With a vocabulary of a million; the rows on both sides of element 2^31 are among those compared."""
    room_for(9)
    vocab, rows = 1_000_003, 2200
    border = (1 << 31) // vocab
    in_place(rows, vocab, dtype, backend, [0, 1, border - 1, border, border + 1, rows - 1])


def from_hidden(n: int, vocab: int, backend: str) -> None:
    """Every row of the batch has a gradient; the weight's sums over all of them."""
    width = 2
    hidden, weight = torch.randn(n, width), torch.randn(vocab, width)
    targets, advantages = torch.randint(vocab, (n,)), torch.randn(n)
    want_hidden, want_weight = torch.zeros(n, width).double(), torch.zeros(vocab, width).double()
    want_logps = torch.zeros(n).double()
    for lo in range(0, n, 128):
        rows = slice(lo, lo + 128)
        h, a, ids = hidden[rows].double(), advantages[rows].double(), targets[rows, None]
        log_p = (h @ weight.double().T).log_softmax(-1)
        want_logps[rows] = log_p.gather(1, ids)[:, 0]
        d_logits = log_p.exp_().mul_(a[:, None])
        d_logits.scatter_add_(1, ids, -a[:, None])
        want_hidden[rows] = d_logits @ weight.double()
        want_weight += d_logits.T @ h
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    batch = TokenBatch(targets, advantages)
    out = linear_grpo_loss(*leaves, batch, Objective.preset("reinforce", aggregate="token-sum"), backend=backend)
    out.loss.backward()
    assert (out.logps.double() - want_logps).abs().max() <= 2e-6 * want_logps.abs().max()
    for leaf, want in zip(leaves, (want_hidden, want_weight), strict=True):
        assert leaf.grad is not None
        assert (leaf.grad.double() - want).abs().max() <= 1e-5 * want.abs().max()


def test_from_hidden_states(backend: str) -> None:
    from_hidden(300, 20_011, backend)


@pytest.mark.slow
def test_more_than_2_to_the_31_logits_that_never_exist(backend: str) -> None:
    room_for(3)
    from_hidden(16_500, 130_500, backend)


# ---- log-ratios, temperatures


@pytest.mark.parametrize("x", [1000.0, -1000.0])
@pytest.mark.parametrize("A", [1.0, -1.0])
def test_log_ratios_of_a_thousand(backend: str, x: float, A: float) -> None:
    """Clip, dual clip and k3 by hand: value, and the slope in the gradient of the target's logit."""
    logits = torch.tensor([[1.0, -0.5, 0.25]])
    targets = torch.tensor([1])
    log_p = logits.double().log_softmax(-1)
    logp, away = log_p[0, 1], 1 - log_p[0, 1].exp()

    def check(objective: Objective, value: float, slope: float, **fields: Tensor) -> None:
        leaf = logits.clone().requires_grad_()
        out = grpo_loss(leaf, TokenBatch(targets, torch.tensor([A]), **fields), objective, backend=backend)
        out.loss.backward()
        assert leaf.grad is not None
        assert float(out.loss) == pytest.approx(value, rel=2e-6, abs=0), objective
        assert float(leaf.grad[0, 1]) == pytest.approx(slope * float(away), rel=2e-6, abs=0), objective
        assert all(v.isfinite() for v in out.metrics.values())

    old = {"old_logps": (logp - x).float()[None]}
    if x > 0:
        check(Objective(Clip(0.2, 0.28)), -1.28 if A > 0 else E60, 0.0 if A > 0 else E60, **old)
        check(Objective(Clip(0.2, 0.28, delta=3.0)), -1.28 if A > 0 else 3.0, 0.0, **old)
    else:
        check(Objective(Clip(0.2, 0.28)), 0.0 if A > 0 else 0.8, 0.0, **old)
    ref = {"ref_logps": (logp + x).float()[None]}
    k3, slope = (E60, -E60) if x > 0 else (999.0, 1.0)
    check(Objective(Clip(), beta=0.5), -A + 0.5 * k3, -A + 0.5 * slope, **ref)
    check(Objective(Clip(), beta=0.5, kl=Kl("k2")), -A + 0.25 * x * x, -A - 0.5 * x, **ref)


@pytest.mark.parametrize("temperature", [1e-3, 0.03, 1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperatures(backend: str, dtype: torch.dtype, temperature: float) -> None:
    case = build(dtype, transform={"temperature": temperature})
    case.fields["old_logps"] = None
    beta = 0.04 if temperature > 1e-3 else 0.0  # log-probs below -10,000, as there are then, count as that in a KL
    spec = Spec(aggregate="seq-mean-token-mean", beta=beta, entropy_coef=0.01)
    objective = Objective.preset("grpo", beta=beta, entropy_coef=0.01)
    out, gradient = run(case, objective, backend)
    (expected, exact), (naive, other) = case.expected(spec), case.naive(spec)
    # 1 / T is fp32: at 1e-3 it moves logits of 10,000 by half of their last place.
    assert_no_worse(out.logps.reshape(-1), naive.logps, expected.logps, "logps")
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss", 1e-5)
    assert_no_worse(gradient, other, exact, "gradient", 1e-5 if temperature >= 1 else 2e-3)
    rows = torch.full(case.targets.shape, temperature)
    by_row, same = run(replace(case, transform={"temperature": rows}), objective, backend)
    assert_no_worse(by_row.logps.reshape(-1), naive.logps, expected.logps, "logps, by row")
    assert_no_worse(same, other, exact, "gradient, by row", 1e-5 if temperature >= 1 else 2e-3)


# ---- the ends of fp16


def test_the_largest_halves(backend: str) -> None:
    """65504 is a logit like any other, beside it, below it and alone; infinity shows in its own row only."""
    logits = (2.0 * torch.randn(5, 300)).half()
    logits[0, 7] = 65504.0
    logits[1] = logits[1] * 1e4  # many near the end
    logits[2] = -65504.0
    logits[2, 4] = -65472.0
    logits[4, 9] = math.inf
    targets = torch.tensor([7, int(logits[1].argmax()), 4, 0, 9])
    leaf = logits.clone().requires_grad_()
    logps, entropy = token_logprobs(leaf, targets, entropy=True, backend=backend)
    assert entropy is not None
    exact = logits.double().log_softmax(-1)
    want = exact.gather(1, targets[:, None])[:, 0]
    assert ((logps[:4].detach().double() - want[:4]).abs() <= 2e-6 * want[:4].abs() + 1e-7).all() and logps[4].isnan()
    logps[:4].sum().backward()
    assert leaf.grad is not None
    expected = F.one_hot(targets[:4], 300) - exact[:4].exp()
    assert (leaf.grad[:4].double() - expected).abs().max() <= 2.0**-11
    assert not leaf.grad[4].any()  # it has no upstream gradient


@pytest.mark.parametrize("scale", [2.0**16, 2.0**24])
def test_a_loss_scale(backend: str, scale: float) -> None:
    """The gradient is made after the scale: small ones keep their digits, those that fp16 cannot hold are infinite."""
    logits, targets = torch.randn(6, 50).half(), torch.randint(50, (6,))
    advantages = torch.tensor([1.0, 1e-7, -1e-4, 300.0, -2.0, 0.0])
    leaf = logits.clone().requires_grad_()
    batch = TokenBatch(targets, advantages)
    out = grpo_loss(leaf, batch, Objective.preset("reinforce", aggregate="token-sum"), backend=backend)
    (out.loss * scale).backward()
    assert leaf.grad is not None
    exact = rows_by_float64(logits, targets, -advantages)[2] * scale
    want = exact.half()
    assert want.isinf().any() and (want[1] != 0).all()
    finite = want.isfinite() & (exact.abs() < 65000)
    assert torch.equal(leaf.grad.isinf() | ~finite, ~finite) and not leaf.grad.isnan().any()
    assert torch.equal(
        leaf.grad[exact.abs() > 65520].isinf(), torch.ones_like(leaf.grad[exact.abs() > 65520], dtype=torch.bool)
    )
    error = (leaf.grad.double() - exact).abs()[finite]
    assert (error <= 2.0**-11 * 1.02 * exact.abs()[finite] + 2.0**-24).all()


def test_logits_that_fp16_could_not_hold(backend: str) -> None:
    """From fp16 hidden states they are fp32."""
    hidden, weight = (200.0 * torch.randn(4, 8)).half(), (200.0 * torch.randn(30, 8)).half()
    logits = hidden.double() @ weight.double().T
    assert logits.abs().amax(1).min() > 65504
    targets = logits.argmax(1)
    targets[0] = 3
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    batch = TokenBatch(targets, torch.tensor([1e-3, 1.0, 1.0, 1.0]))
    transform = LogitTransform(temperature=1e4)
    objective = Objective.preset("reinforce", aggregate="token-sum")
    out = linear_grpo_loss(h, w, batch, objective, transform=transform, backend=backend)
    out.loss.backward()
    logps, _, gradient = rows_by_float64(logits / 1e4, targets, torch.tensor([-1e-3, -1.0, -1.0, -1.0]))
    assert (out.logps.double() - logps).abs().max() <= 1e-5 * logps.abs().max()
    for leaf, want in ((h, gradient @ weight.double() / 1e4), (w, gradient.T @ hidden.double() / 1e4)):
        assert leaf.grad is not None
        assert (leaf.grad.double() - want).abs().max() <= 2e-3 * want.abs().max()


# ---- rewards


ESTIMATORS = [
    {},
    {"unbiased": False},
    {"scale": "batch"},
    {"scale": "none"},
    {"scale": "mean"},
    {"scale": "others"},
    {"baseline": "leave-one-out", "scale": "none"},
    {"baseline": "leave-one-out", "scale": "others"},
]
#: Beyond the range of fp32 when squared; beside each other, and beside ordinary ones.
HUGE = [
    [1e30, -1e30, 3e29, 0.0],
    [1e30, 0.0, 1.0, 2.0],
    [1e30, 1e30, 1e30, 2e30],
    [-3e38, 3e38, 1e38, -1e38],
    [1e-30, 2e-30, 0.0, 5e-31],
    [1e30, 1.0, -1e-30, 0.0],
]


@pytest.mark.parametrize("rewards, options", product(HUGE, ESTIMATORS), ids=str)
def test_rewards_of_1e30(rewards: list[float], options: dict[str, Any]) -> None:
    """Results are finite and correct, although the variance would overflow in fp32."""
    given = torch.tensor([*rewards, *(-r for r in rewards)])
    got = group_advantages(given, group_size=4, eps=1e-6, **options)
    want = plain_advantages(given.tolist(), [0] * 4 + [1] * 4, eps=1e-6, **options)
    end = torch.finfo(torch.float32).max
    expected = torch.tensor(want, dtype=torch.float64).clamp(-end, end)
    error = (got.double().clamp(-end, end) - expected).abs()
    assert not got.isnan().any() and (error <= 1e-6 * expected.abs() + 1e-7 * expected.abs().max()).all(), (got, expected)


def test_rewards_of_1e30_reach_the_gradient(backend: str) -> None:
    rewards, targets = torch.tensor([1e30, -1e30, 1e30, 1e30]), torch.randint(9, (4, 3))
    logits = torch.randn(4, 3, 9)
    small, large = (
        gradient_of(logits, TokenBatch.from_rewards(targets, r, group_size=2, eps=0.0), backend)
        for r in (rewards / 1e30, rewards)
    )
    assert torch.equal(small, large) and small[:2].any() and not small[2:].any()


def gradient_of(logits: Tensor, batch: TokenBatch, backend: str) -> Tensor:
    leaf = logits.clone().requires_grad_()
    grpo_loss(leaf, batch, Objective.preset("grpo"), backend=backend).loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def test_whitening_of_1e30() -> None:
    x = torch.tensor([1e30, -1e30, 5e29, 0.0])
    want = (x.double() - x.double().mean()) / x.double().std()
    assert (whiten(x).double() - want).abs().max() <= 1e-6


@pytest.mark.parametrize("options", [*ESTIMATORS, {"eps": 0.0}, {"singleton": "zero", "eps": 1e-9}], ids=str)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e30, -7e-39, 3e38, 0.0])
def test_equal_rewards_and_groups_of_one_are_exactly_zero(reward: float, options: dict[str, Any]) -> None:
    """Exactly 0, next to a group that has advantages."""
    rewards = torch.tensor([reward] * 7 + [0.25, 0.75, reward])
    groups = torch.tensor([4] * 7 + [2, 2, 9])
    got = group_advantages(rewards, groups=groups, **options)
    assert got[:7].tolist() == [0.0] * 7 and float(got[9]) == 0.0
    assert got[7:9].isfinite().all() and (got[7] < 0 < got[8] or options.get("scale") == "batch")


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo", "gspo", "sapo", "reinforce"])
@pytest.mark.parametrize("size", [1, 4])
def test_no_advantage_is_no_gradient(backend: str, size: int, name: str) -> None:
    """Groups of one and groups of equal rewards: not small, but zero, in the loss as in every bit of the gradient."""
    logits, targets = torch.randn(4, 3, 9), torch.randint(9, (4, 3))
    old = -torch.rand(4, 3)
    batch = TokenBatch.from_rewards(targets, torch.full((4,), 0.1), group_size=size, old_logps=old)
    leaf = logits.clone().requires_grad_()
    out = grpo_loss(leaf, batch, Objective.preset(name), backend=backend)
    out.loss.backward()
    assert leaf.grad is not None
    assert out.loss == 0 and not leaf.grad.any() and (out.logps < 0).all()
    other = TokenBatch.from_rewards(targets, torch.tensor([0.1, 0.2, 0.3, 0.1]), group_size=4, old_logps=old)
    assert grpo_loss(logits, other, Objective.preset(name), backend=backend).loss != 0
