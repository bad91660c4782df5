"""KL estimators with their weights: values and slopes against autograd through the oracle, expectations against exact sums."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from grpo_kernels import Objective
from grpo_kernels.formulas.kl import ESTIMATORS, SCORES, WEIGHTINGS, Kl, as_kl, check_kl, kl_terms
from grpo_kernels.formulas.ops import ops
from support import oracle
from support.oracle import Spec

Tensor = torch.Tensor
F64 = torch.float64
NAMES = [name for name in ESTIMATORS if name != "distillation"]


def terms(kl: Kl, logp: Tensor, old: Tensor, ref: Tensor, log_ratio: Tensor | None = None) -> list[Tensor]:
    """kl_terms as tensors of logp's shape: value, slope with the ratio held still, slope through the ratio, their sum."""
    x = logp - old if log_ratio is None else log_ratio
    return [torch.as_tensor(t, dtype=logp.dtype) + 0 * logp for t in kl_terms(logp, old, ref, x, kl.clamps, **kl.formula)]


def spec_of(kl: Kl) -> Spec:
    assert isinstance(kl.estimator, str)
    return Spec(
        kl=kl.estimator,
        kl_weighting=kl.weighting,
        straight_through=kl.straight_through,
        clamp_log=kl.clamp_log,
        clamp=kl.clamp,
    )


def grid(clamp_log: float = math.inf, clamp: float = math.inf) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, old, ref): d from -8 to 8, dense on both sides of 0 and of where the clamps set in; ratios e^-3 to e^3."""
    near = torch.tensor([s * 10.0**-k for k in range(2, 12) for s in (-1, 1)], dtype=F64)
    kinks = [0.0, clamp_log, -clamp_log, clamp, -clamp, math.sqrt(2 * clamp)]  # k1 and abs, k2 reach `clamp` there
    low, high = 0.0, 60.0
    for _ in range(200 if clamp < math.inf else 0):  # where k3 does, for d > 0
        middle = (low + high) / 2
        low, high = (middle, high) if math.exp(middle) - middle - 1 < clamp else (low, middle)
    kinks += [low] if low else []
    d = torch.cat([torch.linspace(-8, 8, 161, dtype=F64) + 1e-5, *(k + near for k in kinks if math.isfinite(k))])
    d, x = torch.meshgrid(d, torch.tensor([-3.0, -0.4, 0.0, 0.7, 3.0], dtype=F64), indexing="ij")
    d, x = d.flatten(), x.flatten()
    logp = -1.0 - 3.0 * torch.rand(d.shape, dtype=F64)
    return logp, logp - x, logp + d


@pytest.mark.parametrize("clamps", [(math.inf, math.inf), (3.0, math.inf), (math.inf, 2.0), (5.0, 4.0), (1.5, 10.0)], ids=str)
@pytest.mark.parametrize("straight_through", [False, True], ids=["own slope", "straight-through"])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_value_and_slope(name: str, weighting: str, straight_through: bool, clamps: tuple[float, float]) -> None:
    kl = Kl(name, weighting, straight_through, *clamps)
    logp, old, ref = grid(*clamps)
    leaf = logp.clone().requires_grad_()
    expected = oracle.kl_term(spec_of(kl), leaf, old, ref, leaf - old)
    (slope,) = torch.autograd.grad(expected.sum(), leaf)
    value, _, _, ours = terms(kl, logp, old, ref)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(ours, slope, rtol=1e-11, atol=1e-11)
    assert ours.count_nonzero() > 100


@pytest.mark.parametrize("clamps", [(math.inf, math.inf), (3.0, 2.0)], ids=str)
@pytest.mark.parametrize("straight_through", [False, True], ids=["own slope", "straight-through"])
@pytest.mark.parametrize("weighting", ["none", "ratio", "detached-ratio"])
@pytest.mark.parametrize("name", NAMES)
def test_the_two_parts_of_the_slope(name: str, weighting: str, straight_through: bool, clamps: tuple[float, float]) -> None:
    """The ratio of another level is an input of its own: its slope and the token's add up to the whole."""
    kl = Kl(name, weighting, straight_through, *clamps)
    logp, old, ref = grid(*clamps)
    leaf, ratio = logp.clone().requires_grad_(), (logp - old + 0.3).requires_grad_()
    expected = oracle.kl_term(spec_of(kl), leaf, old, ref, ratio)
    still, through = torch.autograd.grad(expected.sum(), [leaf, ratio], allow_unused=True)
    value, slope, through_ratio, both = terms(kl, logp, old, ref, ratio.detach())
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(slope, still, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(through_ratio, torch.zeros_like(logp) if through is None else through, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(both, slope + through_ratio, rtol=1e-10, atol=1e-10)


def test_distillation() -> None:
    logp, old, ref = grid()
    old = torch.minimum(old, torch.tensor(-1e-3, dtype=F64))
    kl = Kl("distillation")
    leaf = logp.clone().requires_grad_()
    expected = oracle.kl_term(Spec(kl="distillation"), leaf, old, ref, leaf - old)
    (slope,) = torch.autograd.grad(expected.sum(), leaf)
    value, _, _, ours = terms(kl, logp, old, ref)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, slope, rtol=1e-12, atol=1e-12)
    dropped = logp.exp() - old.exp() < -0.2
    assert 0.05 < dropped.double().mean() < 0.9
    torch.testing.assert_close(value[dropped], 1e-3 * (logp - old)[dropped] ** 2)


def test_by_hand() -> None:
    """d = 0.5, r = 2."""
    logp, old, ref = (torch.tensor([v], dtype=F64) for v in (-1.0, -1.0 - math.log(2), -0.5))
    k3, e = math.exp(0.5) - 1.5, math.exp(0.5)
    for kl, value, slope in (
        (Kl("k1"), -0.5, 1.0),
        (Kl("k2"), 0.125, -0.5),
        (Kl("k3"), k3, 1 - e),
        (Kl("abs"), 0.5, -1.0),
        (Kl("k3", straight_through=True), k3, -0.5),
        (Kl("k3", "ratio"), 2 * k3, -2 * 0.5),  # -r d exactly
        (Kl("k3", "detached-ratio"), 2 * k3, 2 * (1 - e)),
        (Kl("k1", "ratio"), -1.0, 2 * (1 - 0.5)),
        (Kl("k2", "ratio"), 0.25, 2 * (0.125 - 0.5)),
        (Kl("k3", "score"), k3, -0.5),
        (Kl("k1", "score"), -0.5, 0.5),
        (Kl("k2", "score"), 0.125, -0.375),
        (Kl("k1", clamp_log=0.3), -0.3, 0.0),
        (Kl("k3", clamp=0.1), 0.1, 0.0),
        (Kl("k3", straight_through=True, clamp=0.1), 0.1, -0.5),
    ):
        got = terms(kl, logp, old, ref)
        assert (float(got[0]), float(got[3])) == (pytest.approx(value), pytest.approx(slope)), kl


# ---- expectations of the slopes, by sums over a whole vocabulary


@pytest.mark.parametrize(
    "kl, gradient_of",
    [
        (Kl("k1"), "nothing"),
        (Kl("k2"), "KL(policy || reference)"),
        (Kl("k3"), "KL(reference || policy)"),
        (Kl("k1", straight_through=True), "KL(policy || reference)"),
        (Kl("k3", straight_through=True), "KL(policy || reference)"),
        (Kl("abs", straight_through=True), "KL(policy || reference)"),
        (Kl("k1", "score"), "KL(policy || reference)"),
        (Kl("k3", "score"), "KL(policy || reference)"),
        (Kl("k1", "ratio"), "KL(policy || reference)"),
        (Kl("k3", "ratio"), "KL(policy || reference)"),
        (Kl("k2", "score"), "its own mean"),
        (Kl("k2", "ratio"), "its own mean"),
    ],
    ids=str,
)
def test_expected_gradient(kl: Kl, gradient_of: str) -> None:
    """The expectation over samples of the policy, or of another policy with the ratio as weight, is the documented one."""
    logits, other, ref = (torch.randn(40, dtype=F64) for _ in range(3))
    leaf = logits.clone().requires_grad_()
    log_p, log_q = leaf.log_softmax(0), ref.log_softmax(0)
    log_old = other.log_softmax(0) if kl.weighting == "ratio" else log_p.detach()
    _, _, _, slope = terms(kl, log_p.detach(), log_old, log_q)
    (ours,) = torch.autograd.grad((log_old.exp() * slope * log_p).sum(), leaf, retain_graph=True)
    wanted = {
        "nothing": 0 * log_p.sum(),
        "KL(policy || reference)": (log_p.exp() * (log_p - log_q)).sum(),
        "KL(reference || policy)": (log_q.exp() * (log_q - log_p)).sum(),
        "its own mean": (log_p.exp() * (log_p - log_q) ** 2 / 2).sum(),
    }[gradient_of]
    (expected,) = torch.autograd.grad(wanted, leaf)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_mean_value_is_the_kl(name: str) -> None:
    """On samples of the policy, and off-policy with the weight of the ratio."""
    p, q, old = (torch.randn(50, dtype=F64).log_softmax(0) for _ in range(3))
    kl = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * terms(Kl(name), p, p, q)[0]).sum(), kl, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close((old.exp() * terms(Kl(name, "ratio"), p, old, q)[0]).sum(), kl, rtol=1e-10, atol=1e-12)
    assert name != "k3" or (terms(Kl(name), p, p, q)[0] >= 0).all()


# ---- fp32


def test_k3_near_zero_keeps_its_sign() -> None:
    """fp32, differences of single ulps of logp: e^d - d - 1 must not be more negative than rounding."""
    logp = -torch.rand(1000) * 10
    ref = logp + torch.randn(1000) * 1e-4
    value, slope, _, _ = terms(Kl("k3"), logp, logp, ref)
    assert value.min() > -2e-7
    d = ref.double() - logp.double()
    torch.testing.assert_close(slope.double(), 1 - d.exp(), rtol=0, atol=1.3e-7)


@pytest.mark.parametrize("weighting", ["ratio", "score"])
@pytest.mark.parametrize("name", list(SCORES), ids=lambda f: f.__name__)
def test_slopes_with_weight_do_not_cancel(name: Any, weighting: str) -> None:
    """value + slope is 1 - e^d + e^d - d - 1 for k3: computed so, a d of 1e-4 would lose half of its digits in fp32."""
    logp = -torch.rand(1000) * 10
    ref = logp + torch.randn(1000) * 1e-4
    _, _, _, both = terms(Kl(name.__name__, weighting), logp, logp, ref)
    d = ref.double() - logp.double()
    exact = {"k1": 1 - d, "k2": d * d / 2 - d, "k3": -d}[name.__name__]
    torch.testing.assert_close(both.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("clamps", [(math.inf, math.inf), (20.0, 10.0)], ids=str)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_huge_log_ratios_are_finite(name: str, weighting: str, clamps: tuple[float, float]) -> None:
    far = [1000.0, -1000.0, 1e5, -1e5, 89.0, -104.0, 0.0]
    d, x = (torch.tensor(v) for v in zip(*product(far, far), strict=True))
    logp = torch.full_like(d, -2.0)
    for straight_through in (False, True):
        for term in terms(Kl(name, weighting, straight_through, *clamps), logp, logp - x, logp + d):
            assert torch.isfinite(term).all() and torch.isfinite(term * term.sign() * 1e3).all()


def test_huge_distillation_is_finite() -> None:
    logp, far = torch.full((4,), -2.0), torch.tensor([1000.0, -1000.0, 60.0, 0.0])
    for term in terms(Kl("distillation"), logp, logp - far, logp + far):
        assert torch.isfinite(term).all()


def test_a_clamped_kl_has_no_slope_and_an_unclamped_one_has() -> None:
    """The token that is furthest from the reference has no slope with verl's clamps, and the largest slope without them."""
    logp, ref = torch.tensor([-30.0, -3.0]), torch.tensor([-1.0, -1.0])
    assert terms(Kl("k3", clamp_log=20.0, clamp=10.0), logp, logp, ref)[3].tolist()[0] == 0
    pulled = terms(Kl("k3"), logp, logp, ref)[3]
    assert pulled[0] < -1e12 and pulled[0] < pulled[1] < 0


# ---- the specification


def test_names() -> None:
    assert as_kl("k3") == Kl("k3") == Kl() and as_kl("k1+") == Kl("k1", straight_through=True)
    assert as_kl(Kl("k2")) == Kl("k2") and as_kl(half_square).function is half_square
    assert Objective(kl="abs+").kl_spec == Kl("abs", straight_through=True)
    assert set(ESTIMATORS) == {"k1", "k2", "k3", "abs", "distillation"}
    assert Kl().clamps is None and Kl(clamp=10.0).clamps == (math.inf, 10.0)


@pytest.mark.parametrize("name", ["k4", "k3++", "", "+", 3, None])
def test_unknown_names(name: Any) -> None:
    with pytest.raises(ValueError, match=r"^(kl|estimator)="):
        Objective(kl=name)


@pytest.mark.parametrize(
    "field, fields",
    [
        ("estimator", {"estimator": "k5"}),
        ("estimator", {"estimator": None}),
        ("weighting", {"weighting": "sequence"}),
        ("weighting", {"weighting": None}),
        ("clamp_log", {"clamp_log": 0.0}),
        ("clamp_log", {"clamp_log": math.nan}),
        ("clamp", {"clamp": -1.0}),
        ("clamp", {"clamp": "10"}),
        ("estimator", {"estimator": "distillation", "weighting": "ratio"}),
        ("estimator", {"estimator": "distillation", "straight_through": True}),
        ("estimator", {"estimator": "distillation", "clamp": 10.0}),
    ],
    ids=str,
)
def test_refusals_name_the_field(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{field}="):
        Kl(**fields)


def half_square(logp: Any, old_logp: Any, ref_logp: Any) -> Any:
    """A user's estimator: |d| where it is large, like a Huber loss."""
    d = ref_logp - logp
    return ops.where(ops.abs(d) < 1.0, 0.5 * d * d, ops.abs(d) - 0.5), -ops.minimum(ops.maximum(d, -1.0), 1.0)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_an_estimator_of_yours_takes_every_weight(weighting: str) -> None:
    logp, old, ref = grid()
    kl = Kl(half_square, weighting)
    leaf = logp.clone().requires_grad_()
    d, x = ref - leaf, leaf - old
    huber = torch.where(d.abs() < 1, d * d / 2, d.abs() - 0.5)
    weight = {
        "none": torch.ones_like(leaf),
        "ratio": x.exp(),
        "detached-ratio": x.detach().exp(),
        "score": torch.exp(leaf - logp),
    }[weighting]
    (slope,) = torch.autograd.grad((weight * huber).sum(), leaf)
    value, _, _, both = terms(kl, logp, old, ref)
    torch.testing.assert_close(value, (weight * huber).detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(both, slope, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k3+"])
def test_check_kl_accepts_those_of_the_package(name: str) -> None:
    check_kl(name)
    check_kl("distillation", detached=True)
    check_kl(half_square)


def flat_beyond(logp: Tensor, old_logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Tensor]:
    """k2 whose slope forgets what is far away."""
    d = ref_logp - logp
    return 0.5 * d * d, ops.where(ops.abs(d) < 4.0, -d, 0.0)


def other_sign(logp: Tensor, old_logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Tensor]:
    d = ref_logp - logp
    return 0.5 * d * d, d


@pytest.mark.parametrize("estimator", [flat_beyond, other_sign, Kl(other_sign, weighting="ratio")])
def test_check_kl_names_a_wrong_slope(estimator: Any) -> None:
    with pytest.raises(
        ValueError, match=r"slope of the KL estimator (flat_beyond|other_sign) is .* autograd gives .* ref_logp="
    ):
        check_kl(estimator)
    with pytest.raises(ValueError, match="distillation"):
        check_kl("distillation")  # of a detached weight


def test_an_estimator_without_its_slope_is_refused() -> None:
    """Unpacked, a tensor of two tokens would look like a pair (loss, slope)."""
    for make in (lambda: Kl(lambda a, b, c: 0.5 * (c - a) ** 2), lambda: Objective(kl=lambda a, b, c: 0.5 * (c - a) ** 2)):
        with pytest.raises(ValueError, match=r"returned a Tensor \[3\].*return value and slope of each token"):
            make()
