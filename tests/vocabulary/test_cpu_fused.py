"""The C++ kernel of one visit against the float64 oracle, for every instruction set that this processor runs: where
exponentials are kept, rows whose maximum rises along the way, what must not be read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from grpo_kernels import Objective, TokenBatch
from grpo_kernels.formulas.surrogates import Clip, Custom, PolicyGradient
from grpo_kernels.vocabulary.backends import FusedRows, cpu, two_visits
from grpo_kernels.vocabulary.rows import RowTransform
from support.cases import DTYPES, OBJECTIVES, assert_no_worse, build, run

if cpu.available() is not None:
    pytest.skip(cpu.available() or "", allow_module_level=True)

from grpo_kernels import _cpu

Tensor = torch.Tensor
PLAIN = RowTransform(1.0, 0.0, 1.0)
TRANSFORMS = {
    "plain": PLAIN,
    "temperature": RowTransform(1.0, 0.0, 1 / 0.7),
    "softcap": RowTransform(1.0, 5.0, 1.0),
    "mirrored, all": RowTransform(-0.5, 3.0, 1 / 1.3),
}
WITHOUT = Objective(PolicyGradient(), beta=0.2, kl="k2")
WITH = Objective(PolicyGradient(), beta=0.2, kl="k2", entropy_coef=0.3)
STEP = 64  # elements of a step in the widest instruction set
EPS = 1.2e-7


@pytest.fixture(params=_cpu.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _cpu.use_isa(request.param)
    yield request.param
    _cpu.use_isa(_cpu.isas()[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name, (make, _) in OBJECTIVES.items() if make().one_pass])
def test_every_objective(name: str, dtype: torch.dtype) -> None:
    make, spec = OBJECTIVES[name]
    case = build(dtype, vocab=133, transform={"temperature": 0.8})
    (expected, gradient), (naive, naive_gradient) = case.expected(spec), case.naive(spec)
    out, ours = run(case, make(), "cpu")
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_no_worse(out.logps.reshape(-1), naive.logps, expected.logps, "logps")
    assert_no_worse(out.entropy.reshape(-1), naive.entropy, expected.entropy, "entropy")
    assert_no_worse(ours, naive_gradient, gradient, "gradient")


# ---- one row at a time


def batch_of(n: int, vocab: int, **fields: Any) -> TokenBatch:
    g = torch.Generator().manual_seed(n + vocab)
    return TokenBatch(
        torch.randint(0, vocab, (n,), generator=g),
        torch.randn(n, generator=g),
        ref_logps=-5.0 * torch.rand(n, generator=g),
        **fields,
    )


def by_kernel(
    logits: Tensor,
    batch: TokenBatch,
    objective: Objective = WITHOUT,
    transform: RowTransform = PLAIN,
    out: Tensor | None = None,
) -> FusedRows:
    return cpu.fused(logits, objective.token_rows(batch, 1.0), objective, transform, out)


def exact(logits: Tensor, batch: TokenBatch, objective: Objective, transform: RowTransform = PLAIN) -> tuple[Tensor, ...]:
    """(log-probs, entropy, losses, gradient, by how much its elements may be off because of the slope) in float64."""
    x = logits.double().requires_grad_()
    z = x * transform.scale
    if transform.softcap:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    t = transform.inv_temperature
    log_p = (z.flatten(0, 1) * (t.double()[:, None] if isinstance(t, Tensor) else t)).log_softmax(-1)
    entropy = -torch.where(log_p.isinf(), 0.0, log_p.exp() * torch.where(log_p.isinf(), 0.0, log_p)).sum(-1)
    logps = log_p.gather(1, batch.targets[:, None])[:, 0]
    assert batch.ref_logps is not None
    d = batch.ref_logps.double() - logps
    losses = -batch.advantages.double() * logps + objective.beta * d * d / 2 - objective.entropy_coef * entropy
    (gradient,) = torch.autograd.grad(losses.sum(), x)
    # 1 - p is known to a few units of the row's sum, which is fp32. The parts of a slope are rounded, and may cancel.
    parts = batch.advantages.double().abs() + objective.beta * (batch.ref_logps.double().abs() + logps.detach().abs())
    off = 4 * EPS * (log_p.detach().exp() * parts[:, None]).scatter_add_(1, batch.targets[:, None], parts[:, None])
    return logps.detach(), entropy.detach(), losses.detach(), gradient, off.view_as(x)


def assert_near(found: FusedRows, gradient: Tensor | None, expected: tuple[Tensor, ...], logits: Tensor) -> None:
    """A few roundings of the largest logit, and one of the gradient's dtype."""
    finite = logits.double()[logits.isfinite()].abs()
    unit = EPS * max(1.0, float(finite.max()))
    for name, x, y in zip(("logps", "entropy", "losses"), (found.logps, found.entropy, found.losses), expected, strict=False):
        assert ((x - y).abs() <= 8 * unit * (1 + y.abs())).all(), (name, (x - y).abs().max())
    if gradient is not None:
        rounding = {torch.float32: 4e-6, torch.bfloat16: 4.1e-3, torch.float16: 5e-4}[gradient.dtype]
        tiny = 6e-8 if gradient.dtype == torch.float16 else 0.0  # below its normal range
        y = expected[3]
        steep = y.abs().amax(-1, keepdim=True)
        off = (gradient.double() - y).abs() - (rounding * y.abs() + tiny + 16 * unit * steep + expected[4])
        assert (off <= 0).all(), off.max()


@pytest.mark.parametrize("vocab", [1, 3, 16, 63, 64, 65, 129, 1003, 4111])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(dtype: torch.dtype, transform: RowTransform, vocab: int) -> None:
    logits, batch = (4 * torch.randn(2, 3, vocab)).to(dtype), batch_of(6, vocab)
    for objective in (WITHOUT, WITH):
        out = torch.full_like(logits, torch.nan)
        found = by_kernel(logits, batch, objective, transform, out)
        assert_near(found, out, exact(logits, batch, objective, transform), logits)
        alone = by_kernel(logits, batch, objective, transform)
        assert all(torch.equal(x, y) for x, y in zip(found[:3], alone[:3], strict=True))


@pytest.mark.parametrize("objective", [WITHOUT, WITH], ids=["without bonus", "with bonus"])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_in_any_dtype_and_place(dtype: torch.dtype, out_dtype: torch.dtype, objective: Objective) -> None:
    """Apart, over the logits, and narrower at the beginning of its row of logits."""
    logits, batch = (4 * torch.randn(1, 5, 1003)).to(dtype), batch_of(5, 1003)
    out = torch.full(logits.shape, torch.nan, dtype=out_dtype)
    kept = logits.clone()
    found = by_kernel(logits, batch, objective, out=out)
    assert torch.equal(logits, kept)
    assert_near(found, out, exact(logits, batch, objective), logits)
    if out_dtype == dtype:
        by_kernel(kept, batch, objective, out=kept)
        assert torch.equal(kept, out)
    elif out_dtype.itemsize < dtype.itemsize:
        narrow = kept.view(out_dtype)[..., :1003]
        by_kernel(kept, batch, objective, out=narrow)
        assert torch.equal(narrow, out)


RANDOM = torch.Generator().manual_seed(0)  # so that the rows do not depend on which files were imported before
RISING = {
    "slowly, in every step": torch.arange(5000) * 1e-3,
    "by more than 1 in every step": torch.arange(5000) * 0.05,
    "by much in every step": torch.arange(5000) * 0.5,
    "from the lowest number": torch.cat([torch.full((1000,), -3e38), torch.randn(4000, generator=RANDOM)]),
    "from minus infinity": torch.cat([torch.full((1000,), -torch.inf), torch.randn(4000, generator=RANDOM)]),
    "in the last element": torch.cat([torch.randn(4999, generator=RANDOM), torch.tensor([30.0])]),
    "in the first vector behind the steps": torch.cat(
        [torch.randn(4992, generator=RANDOM), torch.tensor([40.0]), torch.randn(7, generator=RANDOM)]
    ),
    "never": -torch.arange(5000) * 0.01,
    "in the middle of a step": torch.randn(5000, generator=RANDOM).index_fill(0, torch.tensor([STEP * 20 + 37]), 25.0),
}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", RISING)
def test_rows_whose_maximum_rises(name: str, dtype: torch.dtype) -> None:
    """Exponentials are kept relative to the maximum so far, which the second visit makes up for."""
    logits, batch = RISING[name].to(dtype).view(1, 1, 5000).repeat(1, 4, 1), batch_of(4, 5000)
    batch = TokenBatch(torch.tensor([4999, 1777, 4992, 2500]), batch.advantages, ref_logps=batch.ref_logps)
    out = torch.full_like(logits, torch.nan)
    found = by_kernel(logits, batch, out=out)
    assert_near(found, out, exact(logits, batch, WITHOUT), logits)
    stats = cpu.stats(logits, batch.targets, None, PLAIN, ("max", "sum", "target", "weighted"))
    assert torch.equal(stats.logps, found.logps) and torch.equal(stats.entropy, found.entropy)
    assert torch.equal(stats.max, logits[0].amax(-1).float())


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_target_of_a_peaked_row_keeps_its_digits(dtype: torch.dtype) -> None:
    """1 - p to a few units of the row's sum, which is fp32, however close p is to 1."""
    logits = torch.zeros(1, 1, 1000, dtype=dtype)
    logits[..., 5] = 16.0
    batch = TokenBatch(torch.tensor([5]), torch.ones(1), ref_logps=torch.zeros(1))
    objective = Objective(PolicyGradient())
    expected = exact(logits, batch, objective)[3][0, 0, 5]
    by_kernel(logits, batch, objective, out=logits)
    rounding = 3e-7 + {torch.float32: EPS, torch.bfloat16: 8e-3}[dtype] * abs(expected)
    assert 0 < -expected < 2e-4 and abs(logits[0, 0, 5].double() - expected) <= rounding


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("objective", [WITHOUT, WITH], ids=["without bonus", "with bonus"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [0, 500, 1002])
def test_nan_and_infinity_show_in_their_row(dtype: torch.dtype, objective: Objective, poison: float, at: int) -> None:
    logits, batch = (4 * torch.randn(1, 3, 1003)).to(dtype), batch_of(3, 1003)
    clean = logits.clone()
    expected = by_kernel(clean, batch, objective, out=clean)
    logits[0, 1, at] = poison
    found = by_kernel(logits, batch, objective, out=logits)
    assert found.logps[1].isnan() and found.losses[1].isnan() and logits[0, 1].isnan().all()
    for row in (0, 2):
        assert found.losses[row] == expected.losses[row] and torch.equal(logits[0, row], clean[0, row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_rows_are_not_looked_at(dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(2, 3, 1000)).to(dtype)
    mask = torch.tensor([True, False, True, True, False, True])
    batch = batch_of(6, 1000, mask=mask)
    for objective in (WITHOUT, WITH):
        out = torch.full_like(logits, torch.nan)
        expected = by_kernel(logits, batch, objective, out=out)
        poisoned = logits.clone()
        poisoned.view(6, 1000)[~mask] = torch.nan
        found = by_kernel(poisoned, batch, objective, out=poisoned)
        assert torch.equal(poisoned, out) and (poisoned.view(6, 1000)[~mask] == 0).all()
        for x, y in zip(found[:3], expected[:3], strict=True):
            assert torch.equal(x, y) and (x[~mask] == 0).all() and x[mask].all()


def test_rows_without_a_slope_have_a_gradient_of_zero() -> None:
    logits = torch.randn(1, 3, 500)
    batch = TokenBatch(torch.tensor([1, 2, 3]), torch.tensor([0.0, 1.0, 0.0]))
    by_kernel(logits, batch, Objective(Clip()), out=logits)
    assert (logits[0, [0, 2]] == 0).all() and logits[0, 1].all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("objective", [WITHOUT, WITH], ids=["without bonus", "with bonus"])
def test_a_row_depends_on_nothing_but_itself(dtype: torch.dtype, objective: Objective) -> None:
    """Bitwise: not on the number of threads, nor on the rows beside it, nor on what a thread's memory held before."""
    temperatures = torch.linspace(0.5, 2.0, 12)
    logits, batch = (4 * torch.randn(3, 4, 20011)).to(dtype), batch_of(12, 20011)
    out = torch.empty_like(logits)
    expected = by_kernel(logits, batch, objective, RowTransform(1.0, 0.0, temperatures), out)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        again = torch.full_like(logits, torch.nan)
        small = torch.randn(1, threads, 7).to(dtype)
        by_kernel(small, batch_of(threads, 7), objective, out=small)  # a row of another size
        found = by_kernel(logits, batch, objective, RowTransform(1.0, 0.0, temperatures), again)
        assert torch.equal(again, out) and all(torch.equal(x, y) for x, y in zip(found[:3], expected[:3], strict=True))
    torch.set_num_threads(1)
    for row in range(12):
        one = logits.view(12, 1, 20011)[row : row + 1].clone()
        alone = TokenBatch(
            *(x[row : row + 1] for x in (batch.targets, batch.advantages)), ref_logps=batch.ref_logps[row : row + 1]
        )  # type: ignore[index]
        found = by_kernel(one, alone, objective, RowTransform(1.0, 0.0, temperatures[row : row + 1]), one)
        assert torch.equal(one[0, 0], out.view(12, 20011)[row]) and found.losses == expected.losses[row]


@pytest.mark.parametrize("layout", ["all but the last token", "every second row", "a column of sequences", "padded vocabulary"])
def test_strides(layout: str) -> None:
    whole = torch.randn(4, 6, 1003)
    views = {
        "all but the last token": lambda x: x[:, :-1],
        "every second row": lambda x: x[:, ::2],
        "a column of sequences": lambda x: x.transpose(0, 1),
        "padded vocabulary": lambda x: x[..., 1:1000],
    }
    logits = views[layout](whole)
    batch, dense = batch_of(logits.shape[0] * logits.shape[1], logits.shape[2]), logits.contiguous()
    if dense.data_ptr() == logits.data_ptr():
        dense = dense.clone()
    by_kernel(dense, batch, out=dense)
    around = whole.clone()
    by_kernel(logits, batch, out=logits)
    assert torch.equal(logits, dense)
    views[layout](around).copy_(dense)
    assert torch.equal(whole, around)


def test_two_visits_give_the_same_result() -> None:
    """The way of formulas that cannot be traced."""
    logits, batch = torch.randn(2, 5, 3001), batch_of(10, 3001, old_logps=torch.full((10,), -8.0))
    for objective in (Objective(Clip(), beta=0.1), Objective(Clip(), beta=0.1, entropy_coef=0.2)):
        rows = objective.token_rows(batch, 1.0)
        out, other = torch.empty_like(logits), torch.empty_like(logits)
        found = cpu.fused(logits, rows, objective, PLAIN, out)
        expected = two_visits(cpu, logits, rows, objective, PLAIN, other, 3)  # type: ignore[arg-type]
        for x, y in zip((*found[:3], out), (*expected[:3], other), strict=True):
            torch.testing.assert_close(x, y, rtol=2e-6, atol=1e-6)


def test_an_infinite_slope_gives_nan_gradients() -> None:
    def steep(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
        return -advantage * logp, advantage * 1e38 * 1e10

    logits = torch.randn(1, 2, 100)
    batch = TokenBatch(torch.tensor([1, 2]), torch.tensor([1.0, -1.0]))
    by_kernel(logits, batch, Objective(Custom(steep)), out=logits)
    assert logits.isnan().all()


@pytest.mark.parametrize("entropy_coef", [0.0, 1e-3])
def test_a_coefficient_beyond_fp32_gives_nan_gradients(entropy_coef: float) -> None:
    """The slope is finite, its product with 1 / temperature is not: with kept exponentials and without them."""

    def steep(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
        return -advantage * logp, advantage * 1e38

    logits = torch.randn(1, 2, 100)
    logits[..., 0] = -1e4  # an exponential of 0
    batch = TokenBatch(torch.tensor([1, 2]), torch.tensor([1.0, -1.0]))
    objective = Objective(Custom(steep), entropy_coef=entropy_coef)
    cpu.fused(logits, objective.token_rows(batch, 1.0), objective, RowTransform(1.0, 0.0, 1e4), logits)
    assert logits.isnan().all()


@pytest.mark.parametrize("target", [-1, 1000, 1 << 60])
def test_a_target_out_of_range(target: int) -> None:
    logits, batch = torch.randn(1, 2, 1000), batch_of(2, 1000)
    batch.targets[0] = target
    around = torch.full((3, 2, 1000), 7.0)
    found = cpu.fused(logits, WITHOUT.token_rows(batch, 1.0), WITHOUT, PLAIN, around[1:2])
    assert found.logps[0].isnan() and math.isfinite(found.logps[1])
    assert (around[[0, 2]] == 7.0).all() and around[1, 0].isnan().all() and around[1, 1].isfinite().all()
