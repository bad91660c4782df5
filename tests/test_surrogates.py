"""Each surrogate and KL estimator: its value against the oracle's, its slope against autograd through the oracle."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from oracle import Spec

from grpo_kernels.surrogates import (
    KL_ESTIMATORS,
    Cispo,
    Clip,
    Custom,
    PolicyGradient,
    Surrogate,
    bounded_exp,
    check_surrogate,
    ops,
    token_terms,
)

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
    (PolicyGradient(), Spec("policy-gradient")),
]


def grid() -> tuple[Tensor, Tensor, Tensor]:
    """(logp, old, advantage): ratios from e^-6 to e^6, dense around 1, both signs of the advantage and 0."""
    x = torch.cat([torch.linspace(-6, 6, 241, dtype=F64), torch.linspace(-0.4, 0.4, 321, dtype=F64)]) + 1.7e-5
    x, advantage = torch.meshgrid(x, torch.tensor([-2.5, -1e-3, 0.0, 1e-3, 1.0, 3.0], dtype=F64), indexing="ij")
    logp = -1.0 - 3.0 * torch.rand(x.shape, dtype=F64)
    return logp.flatten(), (logp - x).flatten(), advantage.flatten()


@pytest.mark.parametrize("surrogate, spec", SURROGATES, ids=lambda v: str(v) if isinstance(v, Surrogate) else "")
def test_value_and_slope(surrogate: Surrogate, spec: Spec) -> None:
    logp, old, advantage = grid()
    leaf = logp.clone().requires_grad_()
    expected = oracle.surrogate(spec, leaf - old, leaf, advantage)
    (slope,) = torch.autograd.grad(expected.sum(), leaf)
    loss, got = surrogate(logp, old, advantage)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, slope, rtol=1e-12, atol=1e-12)
    assert got.count_nonzero() > 100 and not got[advantage == 0].any()


@pytest.mark.parametrize("surrogate, spec", SURROGATES, ids=lambda v: str(v) if isinstance(v, Surrogate) else "")
def test_slope_is_the_derivative(surrogate: Surrogate, spec: Spec) -> None:
    """Central differences of our own value (for a detached ratio: of -weight * logp)."""
    logp, old, advantage = grid()
    bounds = torch.tensor([b for b in (*oracle.ratio_bounds(spec), spec.delta or math.inf) if 0 < b < math.inf], dtype=F64)
    smooth = (
        ((logp - old)[:, None] - bounds.log()).abs().amin(1) > 1e-5 if len(bounds) else torch.ones_like(logp, dtype=torch.bool)
    )
    h = 1e-6
    shift = h if surrogate.detached_ratio else 0.0  # moving both keeps the ratio
    up, down = surrogate(logp + h, old + shift, advantage)[0], surrogate(logp - h, old - shift, advantage)[0]
    numeric = ((up - down) / (2 * h))[smooth]
    slope = surrogate(logp, old, advantage)[1][smooth]
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
    logp, old, advantage = grid()
    r = (logp - old).exp()
    single = torch.maximum(-r * advantage, -r.clamp(0.8, 1.28) * advantage)
    dual = torch.where(advantage < 0, torch.minimum(single, -3.0 * advantage), single)
    torch.testing.assert_close(Clip(0.2, 0.28, delta=3.0)(logp, old, advantage)[0], dual, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_value_and_slope(name: str) -> None:
    logp = -4 * torch.rand(200, dtype=F64)
    ref = logp + 4 * torch.randn(200, dtype=F64)
    leaf = logp.clone().requires_grad_()
    expected = oracle.kl_estimate(name, leaf, ref)
    (slope,) = torch.autograd.grad(expected.sum(), leaf)
    value, got = KL_ESTIMATORS[name](logp, logp, ref)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.as_tensor(got, dtype=F64).expand(200), slope, rtol=1e-12, atol=1e-12)
    assert set(KL_ESTIMATORS) == {"k1", "k2", "k3"}


def test_k3_estimates_the_kl() -> None:
    """Exactly: the mean of k1 and of k3 under p is KL(p || q), and k3 is never negative."""
    p, q = torch.randn(50, dtype=F64).softmax(0), torch.randn(50, dtype=F64).softmax(0)
    kl = (p * (p / q).log()).sum()
    for name in ("k1", "k3"):
        value, _ = KL_ESTIMATORS[name](p.log(), p.log(), q.log())
        torch.testing.assert_close((p * value).sum(), kl, rtol=1e-10, atol=1e-12)
    assert (KL_ESTIMATORS["k3"](p.log(), p.log(), q.log())[0] >= 0).all()


def test_k3_near_zero_keeps_its_sign() -> None:
    """fp32, differences of single ulps of logp: e^d - d - 1 must not be more negative than rounding."""
    logp = -torch.rand(1000) * 10
    ref = logp + torch.randn(1000) * 1e-4
    value, slope = KL_ESTIMATORS["k3"](logp, logp, ref)
    assert value.min() > -2e-7
    d = ref.double() - logp.double()
    torch.testing.assert_close(slope.double(), 1 - d.exp(), rtol=0, atol=1.3e-7)


@pytest.mark.parametrize("surrogate, spec", SURROGATES, ids=lambda v: str(v) if isinstance(v, Surrogate) else "")
def test_huge_log_ratios_are_finite(surrogate: Surrogate, spec: Spec) -> None:
    """A token far outside is pulled back with a bounded slope, not frozen and not NaN."""
    x = torch.tensor([1e3, -1e3, 1e5, -1e5, 89.0, -104.0])
    logp = torch.full_like(x, -2.0)
    for sign in (1.0, -1.0):
        loss, slope = surrogate(logp, logp - x, torch.full_like(x, sign))
        assert torch.isfinite(loss).all() and torch.isfinite(slope).all()
    for name in KL_ESTIMATORS:
        value, slope = KL_ESTIMATORS[name](logp, logp, logp + x)
        assert torch.isfinite(value).all() and torch.isfinite(torch.as_tensor(slope)).all()
    _, slope = KL_ESTIMATORS["k3"](logp, logp, logp + x)
    assert (slope[x > 0] < -1e20).all()
    assert bounded_exp(torch.tensor([math.inf, -math.inf])).tolist() == [pytest.approx(math.exp(60), rel=1e-5), 0.0]


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
@pytest.mark.parametrize("kl", [None, "k1", "k2", "k3"])
def test_token_terms(kl: str | None, entropy_coef: float) -> None:
    """The weighted terms of a token and both slopes, against autograd through the same sum written out."""
    logp, old, advantage = grid()
    n = len(logp)
    ref, entropy = logp + 0.5 * torch.randn(n, dtype=F64), 3 * torch.rand(n, dtype=F64)
    policy_weight, token_weight = torch.rand(n, dtype=F64), torch.rand(n, dtype=F64)
    x, h = logp.clone().requires_grad_(), entropy.clone().requires_grad_()
    expected = policy_weight * oracle.surrogate(Spec(), x - old, x, advantage) - entropy_coef * token_weight * h
    if kl is not None:
        expected = expected + 0.7 * token_weight * oracle.kl_estimate(kl, x, ref)
    d_x, d_h = torch.autograd.grad(expected.sum(), [x, h])
    surrogate = Clip()
    losses, d_logp, d_entropy = token_terms(
        logp, old, ref, entropy, advantage, policy_weight, token_weight, 0.7, entropy_coef,
        surrogate.function, surrogate.params, None if kl is None else KL_ESTIMATORS[kl], entropy_coef != 0,
    )  # fmt: skip
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_logp, d_x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_entropy, d_h, rtol=1e-12, atol=1e-12)


def test_params_are_the_fields_in_order() -> None:
    assert Clip(0.1, 0.3, 2.0).params == (0.1, 0.3, 2.0)
    assert Cispo(4.0, 0.5).params == (4.0, 0.5)
    assert PolicyGradient().params == ()
    assert Custom(squared, (1, 2)).params == (1.0, 2.0)


def test_ratio_bounds() -> None:
    assert Clip(0.2, 0.28).ratio_bounds == pytest.approx((0.8, 1.28))
    assert Cispo(5.0, 0.1).ratio_bounds == (0.1, 5.0)
    assert PolicyGradient().ratio_bounds == (0.0, math.inf)


def squared(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    x = logp - old_logp
    return -advantage * logp + params[0] * x * x, -advantage + 2 * params[0] * x


def test_custom() -> None:
    logp, old, advantage = grid()
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


def test_check_surrogate_accepts_right_slopes_and_names_a_wrong_one() -> None:
    for surrogate in (Clip(0.2, 0.28), Clip(0.1, 0.3, delta=3.0), Cispo(5.0), Cispo(2.0, 0.5), PolicyGradient()):
        check_surrogate(surrogate)
    with pytest.raises(ValueError, match=r"slope of .*off_by_a_percent.* autograd gives .* at logp="):
        check_surrogate(Custom(off_by_a_percent))
