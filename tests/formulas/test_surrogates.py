"""Each surrogate: its value against the oracle's, its slope against autograd through the oracle, and the tokens that it selects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from grpo_kernels import Objective, TokenBatch, grpo_loss
from grpo_kernels.formulas import surrogates
from grpo_kernels.formulas.ops import bounded_exp, finite, ops
from grpo_kernels.formulas.surrogates import (
    A2po,
    Cispo,
    Clip,
    ClipCov,
    Custom,
    Dro,
    Gmpo,
    ImportanceSampling,
    KlCov,
    PolicyGradient,
    Sapo,
    Surrogate,
    Vespo,
    check_surrogate,
    covariance,
)
from support import oracle
from support.oracle import Spec

Tensor = torch.Tensor
F64 = torch.float64

SURROGATES: list[tuple[Surrogate, Spec]] = [
    (Clip(), Spec()),
    (Clip(0.2, 0.28), Spec(eps_high=0.28)),
    (Clip(0.0, 0.0), Spec(eps_low=0.0, eps_high=0.0)),
    (Clip(1.0, 2.0), Spec(eps_low=1.0, eps_high=2.0)),
    (Clip(3e-4, 4e-4), Spec(eps_low=3e-4, eps_high=4e-4)),
    (Clip(0.2, 0.28, delta=3.0), Spec(eps_high=0.28, delta=3.0)),
    (Clip(0.2, 0.28, delta=1.28), Spec(eps_high=0.28, delta=1.28)),
    (Clip(0.2, 0.28, delta=1.1), Spec(eps_high=0.28, delta=1.1)),
    (Cispo(), Spec("cispo")),
    (Cispo(1.28, 0.8), Spec("cispo", cap=1.28, low=0.8)),
    (Cispo(math.inf), Spec("cispo", cap=math.inf)),
    (PolicyGradient(), Spec("policy-gradient")),
    (ImportanceSampling(), Spec("importance-sampling")),
    (Gmpo(), Spec("importance-sampling")),  # of the sequence's ratio; what is its own is in `in_sequence`
    (Sapo(1.0, 2.0), Spec("sapo", tau=(1.0, 2.0))),  # numbers that fp32 has
    (Sapo(0.25, 4.0), Spec("sapo", tau=(0.25, 4.0))),
    (Vespo(), Spec("vespo")),
    (Vespo(1.0, 0.5, 0.0, 2.0**-10), Spec("vespo", vespo=(1.0, 0.5, 0.0, 2.0**-10))),
    (Dro(), Spec("dro")),
    (Dro(0.05), Spec("dro", pull=0.05)),
    (A2po(), Spec("regression", pull=1e-3)),
    (A2po(2.0), Spec("regression", pull=2.0)),
    (ClipCov(0.2, 0.28), Spec("clip-cov", eps_high=0.28)),
    (KlCov(), Spec("kl-cov")),
    (KlCov(0.1), Spec("kl-cov", pull=0.1)),
]
every_surrogate = pytest.mark.parametrize(
    "surrogate, spec", SURROGATES, ids=lambda v: str(v) if isinstance(v, Surrogate) else ""
)


def test_every_surrogate_of_the_package_is_here() -> None:
    known = {c for c in vars(surrogates).values() if isinstance(c, type) and issubclass(c, Surrogate)}
    assert known - {Surrogate, Custom, surrogates.NoPolicyTerm} == {type(s) for s, _ in SURROGATES}


def bounds_of(spec: Spec) -> list[float]:
    """Ratios where the loss has a kink."""
    bounds = [*oracle.ratio_bounds(spec), spec.delta or math.inf, *([1.0] if spec.surrogate == "kl-cov" else [])]
    return [b for b in bounds if 0 < b < math.inf]


def grid(spec: Spec) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """(logp, old, advantage, selected): ratios from e^-6 to e^6, dense around 1 and on both sides of each kink, both signs
    of the advantage and 0; `selected` only where the surrogate takes it."""
    near = torch.tensor([s * 10.0**-k for k in range(3, 13) for s in (-1, 1)], dtype=F64)
    x = torch.cat(
        [
            torch.linspace(-6, 6, 241, dtype=F64) + 1.7e-5,
            torch.linspace(-0.4, 0.4, 321, dtype=F64) + 1.7e-5,
            *(math.log(b) + near for b in bounds_of(spec)),
        ]
    )
    x, advantage = torch.meshgrid(x, torch.tensor([-2.5, -1e-3, 0.0, 1e-3, 1.0, 3.0], dtype=F64), indexing="ij")
    x, advantage = x.flatten(), advantage.flatten()
    logp = -1.0 - 3.0 * torch.rand(x.shape, dtype=F64)
    selected = (torch.rand(x.shape) < 0.5).to(F64)
    return logp, logp - x, advantage, (selected,) if spec.surrogate in ("clip-cov", "kl-cov") else ()


@every_surrogate
def test_value_and_slope(surrogate: Surrogate, spec: Spec) -> None:
    logp, old, advantage, selected = grid(spec)
    leaf = logp.clone().requires_grad_()
    expected = oracle.surrogate(spec, leaf - old, leaf, advantage, *(s != 0 for s in selected))
    (slope,) = torch.autograd.grad(expected.sum(), leaf)
    loss, got = surrogate(logp, old, advantage, *selected)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, slope, rtol=1e-12, atol=1e-12)
    assert got.count_nonzero() > 100
    if surrogate.zero_at_zero_advantage:
        assert not loss[advantage == 0].any() and not got[advantage == 0].any()
    else:
        assert got[advantage == 0].any()


@every_surrogate
def test_slope_is_the_derivative(surrogate: Surrogate, spec: Spec) -> None:
    """Central differences of our own value (for a detached ratio: of -weight * logp)."""
    logp, old, advantage, selected = grid(spec)
    bounds = torch.tensor(bounds_of(spec), dtype=F64)
    smooth = (
        ((logp - old)[:, None] - bounds.log()).abs().amin(1) > 1e-5 if len(bounds) else torch.ones_like(logp, dtype=torch.bool)
    )
    h = 1e-6
    shift = h if surrogate.detached_ratio else 0.0  # moving both keeps the ratio
    up, down = (surrogate(logp + d, old + d * (shift / h), advantage, *selected)[0] for d in (h, -h))
    numeric = ((up - down) / (2 * h))[smooth]
    slope = surrogate(logp, old, advantage, *selected)[1][smooth]
    torch.testing.assert_close(slope, numeric, rtol=1e-6, atol=1e-6)
    assert smooth.sum() > 0.9 * len(logp)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("bound", ["low", "high", "delta"])
def test_a_ratio_on_a_bound_counts_as_inside(bound: str, sign: float) -> None:
    """Bounds that are exact in binary and their exact ratio, as autograd of min and clamp treats them."""
    surrogate, spec = Clip(0.5, 1.0, delta=4.0), Spec(eps_low=0.5, eps_high=1.0, delta=4.0)
    r = {"low": 0.5, "high": 2.0, "delta": 4.0}[bound]
    old = torch.zeros(1, dtype=F64)
    for neighbour in (math.nextafter(r, 0), r, math.nextafter(r, 9)):
        logp = torch.tensor([math.log(neighbour)], dtype=F64, requires_grad=True)
        expected = oracle.surrogate(spec, logp - old, logp, torch.full((1,), sign, dtype=F64))
        (autograd,) = torch.autograd.grad(expected.sum(), logp)
        _, slope = surrogate(logp.detach(), old, torch.full((1,), sign, dtype=F64))
        if float(logp.detach().exp()) == r or neighbour == r:
            inside = {"low": True, "high": True, "delta": sign < 0}[bound]
            assert float(slope) == (-r * sign if inside else 0.0), "inside"
        assert float(slope) == pytest.approx(float(autograd), rel=1e-12)


def test_clip_by_hand() -> None:
    """Ratios 2 and 1/2 with both signs, from the definition alone."""
    logp = torch.tensor([2.0, 0.5, 2.0, 0.5], dtype=F64).log()
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=F64)
    loss, slope = Clip(0.2, 0.3)(logp, torch.zeros(4, dtype=F64), advantage)
    torch.testing.assert_close(loss, torch.tensor([-1.3, -0.5, 2.0, 0.8], dtype=F64))
    torch.testing.assert_close(slope, torch.tensor([0.0, -0.5, 2.0, 0.0], dtype=F64))
    loss, slope = Clip(0.2, 0.3, delta=1.5)(logp, torch.zeros(4, dtype=F64), advantage)
    torch.testing.assert_close(loss, torch.tensor([-1.3, -0.5, 1.5, 0.8], dtype=F64))
    torch.testing.assert_close(slope, torch.tensor([0.0, -0.5, 0.0, 0.0], dtype=F64))


def test_delta_is_dual_clip() -> None:
    """For delta >= 1 + eps_high the two-sided bound is dual clip (arXiv 1912.09729): A < 0: min(max(-rA, -clip(r)A), -cA)."""
    logp, old, advantage, _ = grid(Spec())
    r = (logp - old).exp()
    single = torch.maximum(-r * advantage, -r.clamp(0.8, 1.28) * advantage)
    dual = torch.where(advantage < 0, torch.minimum(single, -3.0 * advantage), single)
    torch.testing.assert_close(Clip(0.2, 0.28, delta=3.0)(logp, old, advantage)[0], dual, rtol=1e-12, atol=1e-12)


@every_surrogate
def test_huge_log_ratios_are_finite(surrogate: Surrogate, spec: Spec) -> None:
    """A token far outside the bounds has a finite slope that pulls it back: neither 0 nor NaN."""
    x = torch.tensor([1e3, -1e3, 1e5, -1e5, 89.0, -104.0, 60.5, 1e-30, 0.0])
    logp = torch.full_like(x, -2.0)
    for advantage in (1.0, -1.0, 0.0):
        for selected in (0.0, 1.0):
            extra = (torch.full_like(x, selected),) if surrogate.selects else ()
            loss, slope = surrogate(logp, logp - x, torch.full_like(x, advantage), *extra)
            assert torch.isfinite(loss).all() and torch.isfinite(slope).all()
            if advantage == 0.0 and surrogate.zero_at_zero_advantage:
                assert not loss.any() and not slope.any()
    assert bounded_exp(torch.tensor([math.inf, -math.inf])).tolist() == [pytest.approx(math.exp(60), rel=1e-5), 0.0]
    assert finite(torch.tensor([math.inf, -math.inf, 2.0])).tolist() == pytest.approx([1e30, -1e30, 2.0])


def test_a_token_of_huge_ratio_and_negative_advantage_has_a_large_slope() -> None:
    """e^60 bounds the exponent, not the slope: with A < 0 nothing is clipped there, and the slope is a large positive one."""
    logp, old = torch.tensor([-2.0]), torch.tensor([-1002.0])
    for surrogate in (Clip(), ImportanceSampling(), KlCov()):
        extra = (torch.ones(1),) if surrogate.selects else ()
        assert surrogate(logp, old, torch.tensor([-1.0]), *extra)[1] > 1e20
    assert Clip(delta=3.0)(logp, old, torch.tensor([-1.0]))[1] == 0


@pytest.mark.parametrize("surrogate", [Cispo(), PolicyGradient(), Vespo()], ids=str)
def test_impossible_tokens_without_advantage_add_nothing(surrogate: Surrogate) -> None:
    """0 * -inf would be NaN."""
    loss, slope = surrogate(torch.tensor([-math.inf]), torch.tensor([-1.0]), torch.zeros(1))
    assert loss == 0 and slope == 0


@every_surrogate
def test_check_surrogate_accepts_it(surrogate: Surrogate, spec: Spec) -> None:
    check_surrogate(surrogate)


# ---- by hand


def test_sapo_by_hand() -> None:
    """At r = 1 the gate is 1/2 and the slope that of the policy gradient, whatever tau is; at r = 2, tau = 1: sigmoid(1)."""
    one, zero = torch.zeros(2, dtype=F64), torch.tensor([1.5, -1.5], dtype=F64)
    loss, slope = Sapo(0.7, 1.3)(one, one, zero)
    assert loss.tolist() == pytest.approx([-2 / 0.7 * 1.5, 2 / 1.3 * 1.5]) and slope.tolist() == pytest.approx([-1.5, 1.5])
    r2 = torch.tensor([math.log(2.0)], dtype=F64)
    loss, slope = Sapo()(r2, torch.zeros(1, dtype=F64), torch.ones(1, dtype=F64))
    gate = 1 / (1 + math.exp(-1))
    assert float(loss) == pytest.approx(-4 * gate) and float(slope) == pytest.approx(-4 * gate * (1 - gate) * 2)


def test_vespo_by_hand() -> None:
    """phi = 1 at w = 1, e^(lambda + k log w - lambda w) elsewhere; the published exponents are (2, 3) and (3, 2)."""
    logp = torch.full((4,), -2.0, dtype=F64)
    w, advantage = torch.tensor([1.0, 2.0, 1.0, 2.0], dtype=F64), torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=F64)
    loss, slope = Vespo()(logp, logp - w.log(), advantage)
    phi = [1.0, math.exp(3) * 4 * math.exp(-6), 1.0, math.exp(2) * 8 * math.exp(-4)]
    assert (-slope * advantage).tolist() == pytest.approx(phi)
    assert loss.tolist() == pytest.approx([2 * p * a for p, a in zip(phi, advantage.tolist(), strict=True)])


def test_dro_and_a2po_by_hand() -> None:
    logp, old, a = torch.tensor([-1.0], dtype=F64), torch.tensor([-1.5], dtype=F64), torch.tensor([2.0], dtype=F64)
    loss, slope = Dro(0.4)(logp, old, a)
    assert float(loss) == pytest.approx(2.0 + 0.05) and float(slope) == pytest.approx(-2.0 + 0.2)
    loss, slope = A2po(0.4)(logp, old, a)
    assert float(loss) == pytest.approx(1.8**2) and float(slope) == pytest.approx(2 * 0.4 * -1.8)


@pytest.mark.parametrize("surrogate", [Gmpo(0.25, 0.5), Vespo(), Clip()], ids=str)
def test_in_sequence_is_its_derivative(surrogate: Surrogate) -> None:
    x = torch.linspace(-30, 30, 4001, dtype=F64) + 1e-5
    x = torch.cat([x, torch.linspace(-0.6, 0.6, 601, dtype=F64) + 1e-5])
    for a in (-1.5, 0.0, 2.0):
        advantage = torch.full_like(x, a)
        leaf = x.clone().requires_grad_()
        value, derivative = surrogate.in_sequence(leaf, advantage)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
        if not surrogate.detached_ratio:
            torch.testing.assert_close(torch.as_tensor(derivative, dtype=F64).expand_as(x), slope)
        expected = oracle.in_sequence(
            Spec({Gmpo: "gmpo", Vespo: "vespo", Clip: "clip"}[type(surrogate)], eps_low=0.25, eps_high=0.5),
            x, advantage, torch.ones_like(x), oracle.Margin(),
        )  # fmt: skip
        torch.testing.assert_close(value.detach(), expected, rtol=0, atol=0)


def test_gmpo_clips_where_a_token_would_gain() -> None:
    x = torch.tensor([1.0, -1.0])
    assert Gmpo(0.2, 0.4).in_sequence(x, torch.ones(2))[0].tolist() == pytest.approx([0.4, -1.0])
    assert Gmpo(0.2, 0.4).in_sequence(x, -torch.ones(2))[0].tolist() == pytest.approx([1.0, -0.2])
    assert Gmpo(0.2, 0.4).in_sequence(x, torch.zeros(2))[0].tolist() == [0.0, 0.0]


# ---- selection


def many_tokens(n: int = 2000, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logps, old_logps, advantages, trained), fp32"""
    g = torch.Generator().manual_seed(seed)
    logps = -4.0 * torch.rand(n, generator=g)
    return logps, logps - 0.3 * torch.randn(n, generator=g), torch.randn(n, generator=g), torch.rand(n, generator=g) < 0.8


def test_covariance_by_hand() -> None:
    logps, advantages = torch.tensor([-1.0, -3.0, -77.0]), torch.tensor([2.0, 0.0, 50.0])
    assert covariance(logps, advantages, torch.tensor([True, True, False])).tolist() == [1.0, 1.0, 0.0]
    none = torch.zeros(3, dtype=torch.bool)
    assert not covariance(logps, advantages, none).any()
    for surrogate in (ClipCov(), KlCov()):
        assert not surrogate.select(logps, logps, advantages, none).any()


@pytest.mark.parametrize("share", [0.0, 2e-4, 0.01, 0.25, 1.0])
def test_kl_cov_selects_the_largest_covariances(share: float) -> None:
    logps, old, advantages, trained = many_tokens()
    selected = KlCov(share=share).select(logps, old, advantages, trained)
    cov, n = covariance(logps, advantages, trained), int(trained.sum())
    assert selected.dtype == torch.float32 and set(selected.tolist()) <= {0.0, 1.0}
    assert int(selected.sum()) == max(math.floor(share * n), 1) and not selected[~trained].any()
    taken = selected.bool()
    left = trained & ~taken
    assert not left.any() or cov[taken].min() >= cov[left].max()


@pytest.mark.parametrize("share", [0.0, 2e-4, 0.01, 0.1, 1.0])
def test_clip_cov_selects_from_its_band(share: float) -> None:
    logps, old, advantages, trained = many_tokens()
    surrogate = ClipCov(0.2, 0.28, share=share, low=0.5, high=1.5)
    torch.manual_seed(4)
    selected = surrogate.select(logps, old, advantages, trained)
    cov, n, r = covariance(logps, advantages, trained), int(trained.sum()), (logps - old).exp()
    clipped = ((r > 1.28) & (advantages > 0)) | ((r < 0.8) & (advantages < 0))
    eligible = trained & ~clipped & (cov > 0.5) & (cov < 1.5)
    assert 0 < eligible.sum() < 0.5 * n
    assert selected.dtype == torch.float32 and not selected[~eligible].any()
    assert int(selected.sum()) == min(max(math.floor(share * n), 1), int(eligible.sum()))
    torch.manual_seed(4)
    assert torch.equal(selected, surrogate.select(logps, old, advantages, trained))
    if 0.005 < share < 1:
        assert not torch.equal(selected, surrogate.select(logps, old, advantages, trained)), "the seed decides"


def test_every_eligible_token_has_its_chance() -> None:
    logps, old, advantages, trained = many_tokens(200)
    surrogate = ClipCov(share=0.02, low=0.5, high=1.5)
    count = sum(surrogate.select(logps, old, advantages, trained) for _ in range(400))
    assert isinstance(count, Tensor)
    eligible = ClipCov(share=1.0, low=0.5, high=1.5).select(logps, old, advantages, trained).bool()
    assert (count[eligible] > 0).all() and not count[~eligible].any()


@pytest.mark.parametrize("share, n, count", [(0.29, 100, 28), (2e-4, 100_000, 20), (0.7, 10, 7), (0.1, 30, 3)])
def test_the_count_is_that_of_double_precision(share: float, n: int, count: int) -> None:
    """As int(share * n) has it in Python; in fp32, 0.29 * 100 is 29."""
    assert count == max(int(share * n), 1)
    selected = KlCov(share=share).select(torch.randn(n), torch.zeros(n), torch.randn(n), torch.ones(n, dtype=torch.bool))
    assert int(selected.sum()) == count


@pytest.mark.parametrize("surrogate", [ClipCov(share=0.5), KlCov(share=0.5)], ids=str)
def test_masked_tokens_do_not_change_the_selection(surrogate: Surrogate) -> None:
    logps, old, advantages, trained = many_tokens(64)
    torch.manual_seed(1)
    clean = surrogate.select(logps, old, advantages, trained)
    torch.manual_seed(1)
    rubbish = torch.where(trained, 0.0, 1e6)
    assert torch.equal(clean, surrogate.select(logps + rubbish, old, advantages - rubbish, trained))


def test_a_selected_token_has_no_gradient_in_clip_cov() -> None:
    """End to end, with every eligible token selected; the others keep what Clip gives them."""
    logps, old, advantages, trained = many_tokens(300)
    batch = TokenBatch(torch.zeros(300, dtype=torch.int64), advantages, mask=trained, old_logps=old)
    logps = torch.where(trained, logps, 0.0)
    everything = {}
    for surrogate in (ClipCov(share=1.0, low=0.5, high=1.5), Clip()):
        objective = Objective(surrogate)
        everything[type(surrogate)] = objective.token_stage(logps, None, objective.token_rows(batch), batch)
    selected = ClipCov(share=1.0, low=0.5, high=1.5).select(logps, batch.flat("old_logps"), batch.flat("advantages"), trained)
    losses, slopes, _ = everything[ClipCov]
    assert selected.sum() > 20 and not losses[selected != 0].any() and not slopes[selected != 0].any()
    for ours, plain in zip(everything[ClipCov][:2], everything[Clip][:2], strict=True):
        torch.testing.assert_close(ours[selected == 0], plain[selected == 0], rtol=1e-6, atol=0)


def test_params_are_the_fields_in_order() -> None:
    assert Clip(0.1, 0.3, 2.0).params == (0.1, 0.3, 2.0)
    assert Cispo(4.0, 0.5).params == (4.0, 0.5)
    assert PolicyGradient().params == ImportanceSampling().params == Gmpo(0.1, 0.2).params == ()
    assert Vespo(1, 2, 3, 4).params == (1.0, 2.0, 3.0, 4.0) and KlCov(0.5, 0.1).params == (0.5, 0.1)
    assert Custom(squared, (1, 2)).params == (1.0, 2.0)


def test_ratio_bounds() -> None:
    assert Clip(0.2, 0.28).ratio_bounds == pytest.approx((0.8, 1.28))
    assert Cispo(5.0, 0.1).ratio_bounds == (0.1, 5.0)
    assert ClipCov(0.2, 0.28).ratio_bounds == pytest.approx((0.8, 1.28))
    for other in (PolicyGradient(), ImportanceSampling(), Sapo(), Vespo(), Gmpo(), Dro(), A2po(), KlCov()):
        assert other.ratio_bounds == (0.0, math.inf)


def squared(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    x = logp - old_logp
    return -advantage * logp + params[0] * x * x, -advantage + 2 * params[0] * x


def test_a_surrogate_of_a_user() -> None:
    logp, old, advantage, _ = grid(Spec())
    loss, slope = Custom(squared, (0.25,))(logp, old, advantage)
    torch.testing.assert_close(loss, -advantage * logp + 0.25 * (logp - old) ** 2)
    torch.testing.assert_close(slope, -advantage + 0.5 * (logp - old))


def test_ops_take_tensors_and_numbers() -> None:
    a, b = torch.tensor([1.0, -2.0]), torch.tensor([0.0, 3.0])
    assert ops.minimum(a, b).tolist() == [0.0, -2.0] and ops.maximum(a, b).tolist() == [1.0, 3.0]
    assert ops.minimum(a, 0.5).tolist() == [0.5, -2.0] and ops.maximum(a, 0.5).tolist() == [1.0, 0.5]
    assert ops.minimum(2.0, 3.0) == 2.0 and ops.maximum(2.0, 3.0) == 3.0


def off_by_a_percent(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    r = ops.exp(logp - old_logp)
    return -r * advantage, -1.01 * r * advantage


def test_check_surrogate_names_a_wrong_slope() -> None:
    with pytest.raises(ValueError, match=r"slope of .*off_by_a_percent.* autograd gives .* at logp="):
        check_surrogate(Custom(off_by_a_percent))


def far_off(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """A surrogate that is correct for ratios up to e^3, and wrong beyond."""
    x = logp - old_logp
    return 0.5 * x * x, ops.where(ops.abs(x) < 3.5, x, 0.0)


def off_at_zero(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """A surrogate that is correct except where the advantage is 0."""
    x = logp - old_logp
    return 0.5 * x * x, ops.where(advantage == 0.0, 0.0, x)


@pytest.mark.parametrize("function, where", [(far_off, "logp="), (off_at_zero, "advantage=0")])
def test_check_surrogate_looks_beyond_e3_and_at_zero_advantage(function: Any, where: str) -> None:
    with pytest.raises(ValueError, match=f"slope of .*{function.__name__}.*{where}"):
        check_surrogate(Custom(function))


# ---- the slope from autograd


def loss_alone(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> Tensor:
    return squared(logp, old_logp, advantage, params)[0]


def cispo_alone(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> Tensor:
    return -bounded_exp(logp - old_logp).clamp(max=params[0]).detach() * advantage * logp


def constant(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> Tensor:
    return advantage


def test_a_formula_without_its_slope_is_refused() -> None:
    """Unpacked, a tensor of two tokens would look like a pair (loss, slope)."""
    with pytest.raises(ValueError, match=r'loss_alone returned a Tensor \[3\].*return loss and slope.*slope="autograd"'):
        Custom(loss_alone, (0.25,))
    with pytest.raises(ValueError, match=r"squared returned a Tensor .3., a Tensor .3. .*return loss of each token"):
        Custom(squared, (0.25,), slope="autograd")
    with pytest.raises(ValueError, match="slope='torch'"):
        Custom(squared, (0.25,), slope="torch")


@pytest.mark.parametrize("level", ["token", "sequence", "sequence-token", "sequence-sum"])
@pytest.mark.parametrize("inference", [False, True])
def test_slope_from_autograd_is_that_of_the_formula(level: str, inference: bool, backend: str) -> None:
    """Value and gradient, also of tensors that were made in inference mode."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 17, generator=g)
    with torch.inference_mode(inference):
        batch = TokenBatch(
            torch.randint(17, (3, 5), generator=g), torch.randn(3, generator=g), old_logps=-3 + torch.randn(3, 5, generator=g)
        )
    formula: dict[str, Callable[..., Any]] = {
        "squared": lambda **more: Custom(squared if not more else loss_alone, (0.25,), **more),
        "cispo": lambda **more: Custom(cispo_alone, (2.0,), True, **more) if more else Cispo(2.0),
    }
    for make in formula.values():
        if level != "token" and make is formula["squared"]:
            continue  # it uses logp itself
        found = []
        for surrogate in (make(), make(slope="autograd")):
            leaf = logits.clone().requires_grad_()
            out = grpo_loss(leaf, batch, Objective(surrogate, level=level), backend=backend, strict=True)
            out.loss.backward()
            assert leaf.grad is not None
            found.append((out.loss.detach(), leaf.grad))
        torch.testing.assert_close(*found, rtol=2e-6, atol=2e-7)
        assert found[0][1].any()
    with torch.inference_mode():
        out = grpo_loss(logits, batch, Objective(make(slope="autograd"), level=level), backend=backend)
        torch.testing.assert_close(out.loss, found[0][0], rtol=2e-6, atol=2e-7)


def test_a_loss_that_does_not_depend_on_the_policy_has_no_slope() -> None:
    loss, slope = Custom(constant, slope="autograd")(*(torch.tensor([-1.0, -2.0]) for _ in range(2)), torch.tensor([3.0, 4.0]))
    assert loss.tolist() == [3.0, 4.0] and slope.tolist() == [0.0, 0.0]
    check_surrogate(Custom(constant, slope="autograd"))


# ---- refusals


@pytest.mark.parametrize(
    "kind, field, values",
    [
        (Clip, "eps_low", (-0.1, 1.1, math.nan, "0.2", True)),
        (Clip, "eps_high", (-0.1, math.inf, math.nan)),
        (Clip, "delta", (1.0, 0.5, math.nan, None)),
        (Cispo, "cap", (0.0, -1.0, math.nan)),
        (Cispo, "low", (-0.1, 6.0, math.nan)),
        (Sapo, "tau_pos", (0.0, -1.0, math.inf)),
        (Sapo, "tau_neg", (0.0, -1.0, math.nan)),
        (Vespo, "k_pos", (-1.0, math.inf)),
        (Vespo, "k_neg", (-1.0, math.nan)),
        (Vespo, "lambda_pos", (0.0, 1e-5, math.inf)),
        (Vespo, "lambda_neg", (-1.0, "2")),
        (Gmpo, "eps_low", (-0.1, math.nan)),
        (Gmpo, "eps_high", (-0.1, None)),
        (Dro, "beta", (-1.0, math.inf, math.nan)),
        (A2po, "beta", (0.0, -1.0, math.inf)),
        (ClipCov, "eps_low", (-0.1, 2.0)),
        (ClipCov, "eps_high", (-0.1, math.inf)),
        (ClipCov, "share", (-0.1, 1.1, math.nan)),
        (ClipCov, "low", (math.nan, None)),
        (ClipCov, "high", (1.0, 0.5)),
        (KlCov, "coef", (-1.0, math.inf)),
        (KlCov, "share", (-0.1, 1.1)),
    ],
)
def test_bad_parameters_name_the_field(kind: type[Surrogate], field: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{field}="):
            kind(**{field: value})


def test_every_parameter_has_a_refusal() -> None:
    """The list above is complete."""
    (mark,) = (m for m in test_bad_parameters_name_the_field.pytestmark if m.name == "parametrize")
    tested = {(kind, field) for kind, field, _ in mark.args[1]}
    assert tested == {(type(s), f.name) for s, _ in SURROGATES for f in fields(s)}  # type: ignore[arg-type]
