"""Surrogates and KL estimators:

values and slopes against autograd, those of a user, and the refusals.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from math import inf, nan

import pytest
import torch

from grpo_kernels import Objective, Options, TokenBatch, TokenSets, grpo_loss
from grpo_kernels.formulas import surrogates
from grpo_kernels.formulas.filters import (
    EntropyFloor,
    EntropyQuantile,
    OffPolicySequences,
    SamplerMismatch,
    TrustRegion,
)
from grpo_kernels.formulas.future_kl import FutureKl
from grpo_kernels.formulas.kl import DetachedWeight, Kl, check_kl, k3, log_gap, sdar_gate
from grpo_kernels.formulas.ops import bounded_exp, ops
from grpo_kernels.formulas.surrogates import (
    Cispo,
    Clip,
    ClipCov,
    Custom,
    Dro,
    NoPolicyTerm,
    Sapo,
    Vespo,
    check_surrogate,
)
from support import objectives as stages

assert_close = torch.testing.assert_close


# ---- surrogates of a user


def squared(logp, old_logp, advantage, params):
    x = logp - old_logp
    return -advantage * logp + params[0] * x * x, -advantage + 2 * params[0] * x


def squared_alone(logp, old_logp, advantage, params):
    return squared(logp, old_logp, advantage, params)[0]


def cispo_alone(logp, old_logp, advantage, params):
    return -bounded_exp(logp - old_logp).clamp(max=params[0]).detach() * advantage * logp


@pytest.mark.parametrize("level", surrogates.LEVELS)
def test_slope_from_autograd_is_that_of_the_formula(level, backend):
    """Value and gradient, also in inference mode."""
    batch = TokenBatch(torch.randint(17, (3, 5)), torch.randn(3), old_logps=-3 + torch.randn(3, 5))
    logits, options = torch.randn(3, 5, 17).requires_grad_(), Options(backend, strict=True)
    pair = Cispo(2.0), Custom(cispo_alone, (2.0,), True, slope="autograd")
    of_logp = (
        Custom(squared, torch.tensor([0.25])),
        Custom(squared_alone, (0.25,), slope="autograd"),
    )
    for both in (pair, of_logp) if level == "token" else (pair,):
        found = []
        for surrogate in both:
            objective = Objective(surrogate, level=level)
            loss = grpo_loss(logits, batch, objective, options=options).loss
            with torch.inference_mode():
                again = grpo_loss(logits.detach(), batch, objective, options=options).loss
            found.append((loss, again, *torch.autograd.grad(loss, logits)))
        assert_close(*found, rtol=2e-6, atol=2e-7)
        assert_close(*found[0][:2])
        assert found[0][2].any()


def half_square(slope, **fields):
    def formula(logp, old_logp, advantage, params):
        x = logp - old_logp
        return 0.5 * x * x, slope(x, advantage)

    return Custom(formula, **fields)


@pytest.mark.parametrize(
    "surrogate, message",
    [
        (half_square(lambda x, a: 1.01 * x), r"slope of .*formula.* autograd gives .* at logp="),
        (half_square(lambda x, a: ops.where(a == 0.0, 0.0, x)), "slope of .*formula.* advantage=0"),
        (
            half_square(lambda x, a: x, zero_at_zero_advantage=True),
            "the loss of .* not 0 at advantage 0",
        ),
        (ops.exp, "^surrogate=.*Custom"),
    ],
    ids=["a percent", "without advantage", "declared 0", "a function"],
)
def test_check_surrogate_names_what_is_wrong(surrogate, message):
    constant = Custom(lambda logp, old_logp, advantage, params: advantage, slope="autograd")
    assert constant(*torch.ones(3, 2))[1].tolist() == [0.0, 0.0]
    for fine in (half_square(lambda x, a: x), constant):
        check_surrogate(fine)
    with pytest.raises(ValueError, match=message):
        check_surrogate(surrogate)


def saturated(logp, old_logp, advantage, params):
    t = ops.tanh(params[0] * (logp - old_logp))
    return -advantage * t / params[0], -advantage * (1.0 - t * t)


def test_tanh_has_its_derivative_in_every_backend(backend):
    """Near 0, beyond 1, and where it is 1 to the last bit; the slope of autograd is that of the
    formula.
    """
    for width in (1e-3, 1.0, 30.0):
        check_surrogate(Custom(saturated, (width,)))
        x = torch.linspace(-3.0, 3.0, 24).view(2, 12)
        targets, logits = torch.zeros(2, 12, dtype=torch.int64), torch.randn(2, 12, 17)
        old = logits.log_softmax(-1)[..., 0] - x
        exact = logits.double().requires_grad_()
        loss = -(width * (exact.log_softmax(-1)[..., 0] - old)).tanh().div(width).mean()
        loss.backward()
        for surrogate in (
            Custom(saturated, (width,)),
            Custom(lambda *given: saturated(*given)[0], (width,), slope="autograd"),
        ):
            leaf = logits.clone().requires_grad_()
            options = Options(backend, strict=True)
            batch = TokenBatch(targets, torch.ones(2), old_logps=old)
            ours = grpo_loss(leaf, batch, Objective(surrogate), options=options).loss
            ours.backward()
            assert_close(ours.double(), loss.detach(), rtol=1e-5, atol=1e-7)
            assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)
    # The bits of a token do not depend on the length of the tensor.
    x = torch.randn(37)
    assert all(torch.equal(ops.tanh(x[:n]), ops.tanh(x)[:n]) for n in range(37))


def steep(power, slope=None):
    def formula(logp, old_logp, advantage, params):
        r = ops.exp(power * (logp - old_logp))
        return -r * advantage, -(power if slope is None else slope) * r * advantage

    return formula


#: A surrogate, and what is said of it.
NOT_FINITE = {
    # e^(20 x) times 20 is beyond fp32 from x = 4.3 on; with 50 from 1.7 on, and e^(50 x) beyond
    # fp64 from 14.2 on.
    "in fp64": (
        Custom(steep(50.0)),
        r"overflows at log-ratio 1\.[67]\d*: in float32 its value is .*bounded_exp",
    ),
    "in fp32": (
        Custom(steep(20.0)),
        r"overflows at log-ratio 4\.[34]\d*: in float32 its value is .* slope -?inf.*clamp",
    ),
    "by autograd": (
        Custom(lambda *given: steep(20.0)(*given)[0], slope="autograd"),
        r"overflows at log-ratio 4\.[34]\d*: in float32 its value is",
    ),
    "declared 0": (Custom(steep(50.0), zero_at_zero_advantage=True), "overflows at log-ratio"),
    "below": (Custom(steep(-20.0)), r"overflows at log-ratio -4\.[234]\d*"),
    # The slope is wrong where nothing overflows: that is said, whatever happens further away.
    "wrong as well": (
        Custom(steep(20.0, slope=21.0)),
        r"the slope of .* is .*, but autograd gives",
    ),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_an_overflow_is_told_from_a_wrong_slope(name):
    surrogate, message = NOT_FINITE[name]
    with pytest.raises(ValueError, match=message):
        check_surrogate(surrogate)
    for power in (1.0, 3.0):
        check_surrogate(Custom(steep(power)))


def test_a_slope_that_is_wrong_far_away_is_found():
    def formula(logp, old_logp, advantage, params):
        x = logp - old_logp
        return 0.5 * x * x, ops.where(ops.abs(x) > 10.0, 2.0 * x, x)

    with pytest.raises(ValueError, match=r"slope of .* autograd gives"):
        check_surrogate(Custom(formula))

    def kl(logp, old_logp, ref_logp):
        e = ops.exp(9.0 * (ref_logp - logp))
        return e, -9.0 * e

    with pytest.raises(
        ValueError, match=r"KL estimator .*kl overflows at ref_logp - logp = 9\.[67]"
    ):
        check_kl(kl)


# ---- fields


#: What each field refuses.
PARAMETERS = {
    Clip: {"eps_low": (1.1, "0.2", True), "eps_high": (nan,), "delta": (1.0,)},
    Cispo: {"cap": (0.0,), "low": (-0.1, 6.0)},
    Sapo: {"tau_pos": (0.0,), "tau_neg": (nan,)},
    Vespo: {"k_pos": (-1.0,), "lambda_pos": (1e-5,), "k_neg": (inf,), "lambda_neg": ("2",)},
    Dro: {"beta": (-1.0,)},
    TrustRegion: {"kind": ("kl2",), "low": (-0.1,), "high": (nan,), "anchor": ("ref",)},
    Kl: {
        "estimator": ("k4",),
        "weighting": ("mean",),
        "clamp_log": (0.0, nan),
        "clamp": (-1.0, "10"),
    },
    EntropyFloor: {"threshold": (nan,)},
    EntropyQuantile: {"share": (0.0, 1.1)},
    OffPolicySequences: {"delta": (inf,), "advantage_of": ("batch", None)},
    SamplerMismatch: {"threshold": (0.9, nan), "normalize": (1, None)},
    FutureKl: {
        "half_life": (0.0, inf),
        "low": (-0.1, 1.3),
        "high": (0.0, inf),
        "cutoff": (0.0, nan),
        "safety": (0.0, "10"),
    },
    ClipCov: {
        "eps_low": (2.0,),
        "eps_high": (inf,),
        "share": (1.1,),
        "low": (nan,),
        "high": (0.5,),
    },
}


@pytest.mark.parametrize("kind", PARAMETERS, ids=lambda kind: kind.__name__)
def test_bad_parameters_name_the_field(kind):
    assert [*PARAMETERS[kind]] == [
        f.name for f in fields(kind) if f.name not in ("process_group", "straight_through")
    ]
    for name, values in PARAMETERS[kind].items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name}="):
                kind(**{name: value})


# ---- KL estimators, with their weights


def terms(kl, logp, old, ref, level="token"):
    """Value and slope of each token, fp32, of an objective that has nothing but the KL; two tokens
    are a sequence.
    """
    objective = Objective(NoPolicyTerm(), level=level, aggregate="token-sum", beta=1.0, kl=kl)
    return stages.package_losses(
        objective, stages.packed(len(logp), 2, old_logps=old, ref_logps=ref), logp.float()
    )[:2]


@pytest.mark.parametrize(
    "kl, slope",
    [
        (Kl("k3"), lambda d: 1 - d.exp()),
        *((Kl("k1", w), lambda d: 1 - d) for w in ("ratio", "score")),
        *((Kl("k2", w), lambda d: d * d / 2 - d) for w in ("ratio", "score")),
        *((Kl("k3", w), lambda d: -d) for w in ("ratio", "score")),
    ],
    ids=lambda x: f"{x.estimator} {x.weighting}" if isinstance(x, Kl) else "",
)
def test_small_distances_keep_their_digits(kl, slope):
    """e^d - d - 1 is no more negative than rounding, and value + slope is not 1 - e^d + e^d - d -
    1, in which half of the digits of a d of 1e-4 would be lost in fp32.
    """
    logp = -torch.rand(1000) * 10
    ref = logp + torch.randn(1000) * 1e-4
    value, ours = terms(kl, logp, logp, ref)
    of_exp = 2 * 2.0**-23  # exp is within two spacings of fp32, here of 1
    assert kl.estimator != "k3" or value.min() >= -(of_exp + 2.0**-23)
    assert_close(
        ours.double(),
        slope(ref.double() - logp.double()),
        rtol=1e-6,
        atol=0 if kl.weighting != "none" else of_exp,
    )


# ---- what is no formula


@pytest.mark.parametrize(
    "call, message",
    [
        # Unpacked, a tensor of two tokens would look like a pair (loss, slope).
        (
            lambda: Custom(squared_alone, (0.25,)),
            r'alone returned a Tensor \[3\].*return loss and slope.*slope="autograd"',
        ),
        (
            lambda: Custom(squared, (0.25,), slope="autograd"),
            r"squared returned a Tensor .3., a Tensor .3. .*return loss of each",
        ),
        (
            lambda: Custom(lambda x, *_: (x.mean(), x)),
            r"returned a Tensor \[\], a Tensor \[3\] .*loss and slope of each",
        ),
        *(
            (
                call,
                (
                    rf"{name} has a branch on values of tokens \(line \d+ of"
                    rf" {name}\).*ops.where\(condition, a, b\)"
                ),
            )
            for name, call in (
                ("branching", lambda: Custom(branching)),
                ("branching", lambda: Custom(branching, slope="autograd")),
                ("smallest", lambda: Custom(smallest)),
                ("branching_kl", lambda: Objective(kl=branching_kl)),
                ("branching_terms", lambda: of_listed()),
            )
        ),
        (lambda: Custom(squared, 0.25), "parameters=0.25: pass a tuple"),
        (lambda: Custom(squared, (0.25,), slope="torch"), "slope='torch'"),
        (lambda: Custom("squared"), "function='squared'"),
        *((lambda name=name: Objective(kl=name), "^(kl|estimator)=") for name in ("k4", "+", None)),
        *(
            (lambda own=own: Kl("distillation", **own), "^estimator=")
            for own in ({"weighting": "ratio"}, {"straight_through": True}, {"clamp": 10.0})
        ),
        (
            lambda: Objective(kl=lambda a, b, c: c - a),
            r"returned a Tensor \[3\].*return value and slope of each token",
        ),
        (
            lambda: check_kl("distillation"),
            "slope of the KL estimator distillation is",
        ),  # of a detached weight
        (
            lambda: check_kl(Kl(other_sign, weighting="ratio")),
            "slope of the KL estimator other_sign is .* autograd gives .* ref_logp=",
        ),
        (
            lambda: check_kl(flat_beyond),
            "slope of the KL estimator flat_beyond is .* autograd gives .* ref_logp=",
        ),
    ],
)
def test_what_formulas_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_declared_weight_needs_no_slope():
    """Its own derivative is not asked for, that of the estimator is."""
    check_kl("sdar")
    check_kl(DetachedWeight(sdar_gate, k3))
    undeclared = partial(DetachedWeight.__call__, DetachedWeight(sdar_gate, log_gap))
    wrong = DetachedWeight(sdar_gate, other_sign)
    for kl, name in ((undeclared, "partial"), (wrong, "other_sign"), (Kl(wrong), "other_sign")):
        with pytest.raises(ValueError, match=f"slope of the KL estimator .*{name}.* autograd"):
            check_kl(kl)
    for own in ({"weight": 0.5}, {"estimator": "k3"}):
        (field,) = own
        with pytest.raises(ValueError, match=f"^{field}="):
            DetachedWeight(**{"weight": sdar_gate, "estimator": k3} | own)


def branching(logp, old_logp, advantage, params):
    r = ops.exp(logp - old_logp)
    if r > 1.0:
        return -advantage * r, -advantage * r
    return 0.0 * r, 0.0 * r


def smallest(logp, old_logp, advantage, params):
    r = min(ops.exp(logp - old_logp), 2.0)
    return -advantage * r, -advantage * r


def branching_kl(logp, old_logp, ref_logp):
    return (logp, 1.0) if logp > old_logp and logp > ref_logp else (0.0 * logp, 0.0)


def branching_terms(logp, values, advantage, sums):
    return (logp, values) if not logp > -1.0 else (values, logp)


def of_listed():
    listed = TokenSets.from_lists([[1, 2], [3]]).with_values(torch.ones(3))
    batch = TokenBatch(torch.tensor([1, 2]), torch.ones(2), logp_terms=listed)
    return grpo_loss(
        torch.randn(2, 7), batch, Objective(listed=branching_terms), options=Options("eager")
    )


def flat_beyond(logp, old_logp, ref_logp):
    """k2 whose slope forgets what is far away."""
    d = ref_logp - logp
    return 0.5 * d * d, ops.where(ops.abs(d) < 4.0, -d, 0.0)


def other_sign(logp, old_logp, ref_logp):
    d = ref_logp - logp
    return 0.5 * d * d, d
