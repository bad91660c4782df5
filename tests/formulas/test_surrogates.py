"""Each surrogate: its value against the oracle's, its slope against autograd through the oracle, and the tokens that it selects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from math import inf, nan
from typing import Any

import pytest
import torch

from grpo_kernels import Objective, Options, TokenBatch, grpo_loss
from grpo_kernels.formulas import surrogates
from grpo_kernels.formulas.ops import bounded_exp, ops
from grpo_kernels.formulas.surrogates import (
    Cispo,
    Clip,
    ClipCov,
    Custom,
    Dro,
    KlCov,
    Sapo,
    Surrogate,
    Vespo,
    check_surrogate,
    covariance,
)

Tensor = torch.Tensor
assert_close = torch.testing.assert_close


# ---- selection


def many_tokens(n: int = 2000) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logps, old_logps, advantages, trained), fp32"""
    logps = -4.0 * torch.rand(n)
    return logps, logps - 0.3 * torch.randn(n), torch.randn(n), torch.rand(n) < 0.8


@pytest.mark.parametrize("share, n", [(0.0, 2000), (2e-4, 100_000), (0.01, 2000), (0.29, 100), (0.7, 10), (0.1, 30), (1.0, 50)])
def test_kl_cov_selects_the_largest_covariances(share: float, n: int) -> None:
    """As many as int(share * n) has it in Python, at least one; in fp32, 0.29 * 100 is 29."""
    logps, old, advantages, trained = many_tokens(2 * n)
    trained = torch.arange(2 * n) % 2 == 0
    selected = KlCov(share=share).select(logps, old, advantages, trained)
    cov, taken = covariance(logps, advantages, trained), selected.bool()
    assert selected.dtype == torch.float32 and torch.equal(selected, taken.float())
    assert int(taken.sum()) == max(int(share * n), 1) and not taken[~trained].any()
    left = trained & ~taken
    assert not left.any() or cov[taken].min() >= cov[left].max()


@pytest.mark.parametrize("share", [0.0, 2e-4, 0.01, 0.1, 1.0])
def test_clip_cov_selects_from_its_band(share: float) -> None:
    logps, old, advantages, trained = many_tokens()
    surrogate = ClipCov(0.2, 0.28, share=share, low=0.5, high=1.5)
    selected = surrogate.select(torch.where(trained, logps, 1e6), old, torch.where(trained, advantages, -1e6), trained)
    cov, n, r = covariance(logps, advantages, trained), int(trained.sum()), (logps - old).exp()
    clipped = ((r > 1.28) & (advantages > 0)) | ((r < 0.8) & (advantages < 0))
    eligible = trained & ~clipped & (cov > 0.5) & (cov < 1.5)
    assert 0 < eligible.sum() < 0.5 * n
    assert selected.dtype == torch.float32 and not selected[~eligible].any()
    assert int(selected.sum()) == min(max(math.floor(share * n), 1), int(eligible.sum()))
    if share == 0.1:  # every eligible token has its chance
        assert torch.equal(sum(surrogate.select(logps, old, advantages, trained) for _ in range(400)) > 0, eligible)


# ---- surrogates of a user


def squared(logp, old_logp, advantage, params):
    x = logp - old_logp
    return -advantage * logp + params[0] * x * x, -advantage + 2 * params[0] * x


def squared_alone(logp, old_logp, advantage, params):
    return squared(logp, old_logp, advantage, params)[0]


def cispo_alone(logp, old_logp, advantage, params):
    return -bounded_exp(logp - old_logp).clamp(max=params[0]).detach() * advantage * logp


@pytest.mark.parametrize("level", surrogates.LEVELS)
def test_slope_from_autograd_is_that_of_the_formula(level: str, backend: str) -> None:
    """Value and gradient, also in inference mode."""
    batch = TokenBatch(torch.randint(17, (3, 5)), torch.randn(3), old_logps=-3 + torch.randn(3, 5))
    logits, options = torch.randn(3, 5, 17).requires_grad_(), Options(backend, strict=True)
    pair = Cispo(2.0), Custom(cispo_alone, (2.0,), True, slope="autograd")
    of_logp = Custom(squared, (0.25,)), Custom(squared_alone, (0.25,), slope="autograd")
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


def half_square(slope: Callable[[Tensor, Tensor], Tensor], **fields: Any) -> Custom:
    def formula(logp, old_logp, advantage, params):
        x = logp - old_logp
        return 0.5 * x * x, slope(x, advantage)

    return Custom(formula, **fields)


@pytest.mark.parametrize(
    "surrogate, message",
    [
        (half_square(lambda x, a: 1.01 * x), r"slope of .*formula.* autograd gives .* at logp="),
        (half_square(lambda x, a: ops.where(ops.abs(x) < 3.5, x, 0.0)), "slope of .*formula.* logp="),
        (half_square(lambda x, a: ops.where(a == 0.0, 0.0, x)), "slope of .*formula.* advantage=0"),
        (half_square(lambda x, a: x * nan), "slope of .*formula.* is nan"),
        (half_square(lambda x, a: x, zero_at_zero_advantage=True), "the loss of .* not 0 at advantage 0"),
    ],
    ids=["a percent", "beyond e^3", "without advantage", "NaN", "declared 0"],
)
def test_check_surrogate_names_what_is_wrong(surrogate: Surrogate, message: str) -> None:
    constant = Custom(lambda logp, old_logp, advantage, params: advantage, slope="autograd")
    assert constant(*torch.ones(3, 2))[1].tolist() == [0.0, 0.0]
    for fine in (half_square(lambda x, a: x), constant):
        check_surrogate(fine)
    with pytest.raises(ValueError, match=message):
        check_surrogate(surrogate)


# ---- refusals


@pytest.mark.parametrize(
    "make, message",
    [
        # Unpacked, a tensor of two tokens would look like a pair (loss, slope).
        (lambda: Custom(squared_alone, (0.25,)), r'alone returned a Tensor \[3\].*return loss and slope.*slope="autograd"'),
        (
            lambda: Custom(squared, (0.25,), slope="autograd"),
            r"squared returned a Tensor .3., a Tensor .3. .*return loss of each",
        ),
        (lambda: Custom(lambda *x: ()), "returned nothing"),
        (lambda: Custom(squared, (0.25,), slope="torch"), "slope='torch'"),
        (lambda: Custom("squared"), "function='squared'"),  # type: ignore[arg-type]
    ],
)
def test_a_function_that_does_not_return_what_it_should_is_refused(make: Callable[[], Surrogate], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


#: What each field refuses.
PARAMETERS = {
    Clip: {"eps_low": (-0.1, 1.1, "0.2", True), "eps_high": (-0.1, inf, nan), "delta": (1.0, nan, None)},
    Cispo: {"cap": (0.0, nan), "low": (-0.1, 6.0, nan)},
    Sapo: {"tau_pos": (0.0, inf), "tau_neg": (0.0, nan)},
    Vespo: {"k_pos": (-1.0, inf), "lambda_pos": (1e-5, inf), "k_neg": (-1.0, nan), "lambda_neg": (-1.0, "2")},
    Dro: {"beta": (-1.0, inf, nan)},
    ClipCov: {"eps_low": (2.0,), "eps_high": (inf,), "share": (-0.1, 1.1, nan), "low": (nan,), "high": (1.0, 0.5)},
}


@pytest.mark.parametrize("kind", PARAMETERS, ids=lambda kind: kind.__name__)
def test_bad_parameters_name_the_field(kind: type[Surrogate]) -> None:
    assert list(PARAMETERS[kind]) == [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name, values in PARAMETERS[kind].items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name}="):
                kind(**{name: value})
