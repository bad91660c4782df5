"""KL estimators with their weights: values and slopes against autograd through the oracle."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

import pytest
import torch

from grpo_kernels import Objective
from grpo_kernels.formulas.kl import Kl, check_kl
from grpo_kernels.formulas.ops import ops
from grpo_kernels.formulas.surrogates import NoPolicyTerm
from support import objectives as stages

Tensor = torch.Tensor
assert_close = torch.testing.assert_close


def terms(kl: Any, logp: Tensor, old: Tensor, ref: Tensor, level: str = "token") -> tuple[Tensor, Tensor]:
    """Value and slope of each token, fp32, of an objective that has nothing but the KL; two tokens are a sequence."""
    objective = Objective(NoPolicyTerm(), level=level, aggregate="token-sum", beta=1.0, kl=kl)
    return stages.run(objective, stages.packed(len(logp), 2, old_logps=old, ref_logps=ref), logp.float())[:2]


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
def test_small_distances_keep_their_digits(kl: Kl, slope: Callable[[Tensor], Tensor]) -> None:
    """e^d - d - 1 is no more negative than rounding, and value + slope is not 1 - e^d + e^d - d - 1, in which half of the digits
    of a d of 1e-4 would be lost in fp32."""
    logp = -torch.rand(1000) * 10
    ref = logp + torch.randn(1000) * 1e-4
    value, ours = terms(kl, logp, logp, ref)
    assert kl.estimator != "k3" or value.min() > -2e-7
    assert_close(ours.double(), slope(ref.double() - logp.double()), rtol=1e-6, atol=0 if kl.weighting != "none" else 1.3e-7)


# ---- the specification


@pytest.mark.parametrize(
    "call, message",
    [
        *((lambda name=name: Objective(kl=name), "^(kl|estimator)=") for name in ("k4", "+", None)),
        *((lambda bound=bound: Kl(clamp_log=bound), "^clamp_log=") for bound in (0.0, nan)),
        *((lambda bound=bound: Kl(clamp=bound), "^clamp=") for bound in (-1.0, "10")),
        *(
            (lambda own=own: Kl("distillation", **own), "^estimator=")
            for own in ({"weighting": "ratio"}, {"straight_through": True}, {"clamp": 10.0})
        ),
        # Unpacked, a tensor of two tokens would look like a pair (value, slope).
        (lambda: Objective(kl=lambda a, b, c: c - a), r"returned a Tensor \[3\].*return value and slope of each token"),
        (lambda: check_kl("distillation"), "slope of the KL estimator distillation is"),  # of a detached weight
        (
            lambda: check_kl(Kl(other_sign, weighting="ratio")),
            "slope of the KL estimator other_sign is .* autograd gives .* ref_logp=",
        ),
        (lambda: check_kl(flat_beyond), "slope of the KL estimator flat_beyond is .* autograd gives .* ref_logp="),
    ],
)
def test_refusals(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def flat_beyond(logp, old_logp, ref_logp):
    """k2 whose slope forgets what is far away."""
    d = ref_logp - logp
    return 0.5 * d * d, ops.where(ops.abs(d) < 4.0, -d, 0.0)


def other_sign(logp, old_logp, ref_logp):
    d = ref_logp - logp
    return 0.5 * d * d, d
