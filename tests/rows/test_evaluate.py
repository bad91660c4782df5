"""`Backend.evaluate`, a loss formula on vectors, of every backend against the formula in torch, in
float64 and with numbers that are NaN or infinite. support/ptx/runs.py runs the same for the Triton
kernel as compiled, benchmarks/gpu_kit.py on a GPU.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from grpo_kernels import TokenBatch, objective_loss, use
from grpo_kernels.core import backends
from grpo_kernels.formulas.filters import EntropyFloor, TrustRegion
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.formulas.ops import ops
from grpo_kernels.formulas.program import FormulaRefused
from grpo_kernels.formulas.surrogates import Cispo, Custom
from grpo_kernels.formulas.token_inputs import TokenInputs
from grpo_kernels.formulas.token_loss import random_inputs
from grpo_kernels.objective import PRESETS, Objective
from support.kernel_rows import KERNELS, TRITON, kernels

#: More than one program of Triton's has, and more than one block of C++.
ROWS = 700


def tilted(logp, old_logp, advantage, params):
    s = 1.0 / (1.0 + ops.exp(old_logp - logp))
    return -advantage * logp + params[0] * s, -advantage + params[0] * s * (1.0 - s)


OBJECTIVES = {
    **{
        name: objective
        for name, objective in PRESETS.items()
        if objective.exact is None and not objective.formula_is_torch_only
    },
    "k3 by the ratio of the sequence": Objective(
        level="sequence", beta=0.3, kl=Kl("k3", "ratio"), entropy_coef=0.05
    ),
    "bounded ratio of the sequence": Objective(
        level="sequence-token", log_ratio_bounds=(-0.2, 0.3)
    ),
    "k3 by the ratio, clamped": Objective(
        beta=0.3, kl=Kl("k3", "ratio", clamp_log=0.4, clamp=0.05)
    ),
    "entropy floor and bonus": Objective(entropy_coef=0.1, filters=(EntropyFloor(3.0),)),
    "trust region of the sampler": Objective(
        filters=(TrustRegion("kl", 0.02, 0.01, "sampler"),), beta=0.1
    ),
    "bounded ratio": Objective(Cispo(), log_ratio_bounds=(-0.2, 0.3)),
    "of a caller": Objective(Custom(tilted, (0.3,)), beta=0.1, entropy_coef=0.05),
}


@pytest.fixture(params=KERNELS)
def module(request):
    with kernels(request.param) as module:
        yield module


def given(
    objective: Objective, n: int = ROWS, off_policy: bool = True
) -> tuple[TokenInputs, Tensor, Tensor]:
    """(rows, log-probs, entropies) of plain numbers, fp32 [n]; a third of the weights are 0."""
    g = torch.Generator().manual_seed(3)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(n, generator=g)

    logps = -0.01 - 5.0 * torch.rand(n, generator=g)
    weight = torch.rand(n, generator=g) * (torch.rand(n, generator=g) < 0.7)
    log_ratios = None if objective.level == "token" else normal(0.3)
    rows = TokenInputs(
        torch.zeros(n, dtype=torch.int64), None, normal(1.0), weight, logps + normal(0.3) if off_policy else None,
        ref_logps=logps + normal(0.3) if objective.beta else None, kl_weight=objective.beta * weight if objective.beta else None,
        entropy_weight=objective.entropy_coef * weight if objective.entropy_coef else None, nll_weight=0.1 * weight.flip(0),
        sampler_logps=logps + normal(0.3), log_ratios=log_ratios, auxiliary_loss=None if off_policy else normal(1.0),
    )  # fmt: skip
    return rows, logps, 6.0 * torch.rand(n, generator=g)


def changed(rows: TokenInputs, change) -> TokenInputs:
    """The rows with every fp32 tensor changed."""
    tensors = {
        f.name: x
        for f in fields(rows)
        if isinstance(x := getattr(rows, f.name), Tensor) and x.is_floating_point()
    }
    return replace(rows, **{name: change(x) for name, x in tensors.items()})


@pytest.mark.parametrize("off_policy", [True, False], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_formula_on_vectors_is_that_of_torch(module, name, off_policy):
    """In float64. A few roundings of numbers of their size are allowed."""
    objective = OBJECTIVES[name]
    rows, logps, entropy = given(objective, off_policy=off_policy)
    loss_formula = objective.loss_formula(rows)
    found = module.evaluate_formula(loss_formula, logps, entropy)
    exact = objective.loss_formula(changed(rows, Tensor.double)).compute(
        logps.double(), entropy.double()
    )
    assert (exact.grad_log_ratios is None) == (objective.level == "token")
    assert (exact.grad_auxiliary_loss is None) == off_policy
    nonzero = {"losses", "grad_entropy", "grad_auxiliary_loss"}
    nonzero.add("grad_log_ratios" if objective.through_sequence else "grad_logps")
    for name, ours, theirs in zip(exact._fields, found, exact, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == torch.float32 and ours.shape == (ROWS,)
            assert name not in nonzero or theirs.abs().max() > 1e-3
            torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_is_no_number_is_what_torch_makes_of_it(module, name):
    """NaN and infinities in any input, in the same places and of the same sign."""
    objective = OBJECTIVES[name]
    rows, _, _ = given(objective, 512)
    loss_formula = objective.loss_formula(rows)
    names = ("logps", "entropy", *rows.program_inputs())
    logps, entropy, *odd = random_inputs(names)
    loss_formula = loss_formula._replace(
        inputs=replace(
            rows, marks_on_policy=True, **dict(zip(rows.program_inputs(), odd, strict=True))
        )
    )
    found, wanted = (
        module.evaluate_formula(loss_formula, logps, entropy),
        backends.load("eager").Kernels().evaluate_formula(loss_formula, logps, entropy),
    )
    assert not wanted[0].isfinite().all()
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            # Numbers whose terms cancel are off by a rounding of these, so that the few largest are
            # left to rtol.
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_row_does_not_depend_on_how_many_there_are(module):
    """Of none, of one, of whole blocks and of one more."""
    objective = OBJECTIVES["entropy floor and bonus"]
    rows, logps, entropy = given(objective, 1100)
    whole = module.evaluate_formula(objective.loss_formula(rows), logps, entropy)
    for n in (0, 1, 255, 256, 257, 512, 1025):
        some = module.evaluate_formula(
            objective.loss_formula(changed(rows, lambda x, n=n: x[:n])), logps[:n], entropy[:n]
        )
        assert all(x is y or torch.equal(x, y[:n]) for x, y in zip(some, whole, strict=True)), n


def test_vectors_may_begin_anywhere(module):
    objective = OBJECTIVES["dapo"]
    rows, logps, entropy = given(objective)
    whole = module.evaluate_formula(objective.loss_formula(rows), logps, entropy)
    for first in (1, 2, 3):
        some = module.evaluate_formula(
            objective.loss_formula(changed(rows, lambda x, k=first: x[k:])),
            logps[first:],
            entropy[first:],
        )
        assert all(x is y or torch.equal(x, y[first:]) for x, y in zip(some, whole, strict=True))


def untraced(logp, old_logp, advantage, params):
    return -advantage * torch.sinh(logp), -advantage * torch.cosh(logp)


def test_a_formula_that_is_no_program_runs_in_torch_and_strict_refuses_it(monkeypatch):
    objective = Objective(Custom(untraced))
    rows, logps, entropy = given(objective)
    loss_formula = objective.loss_formula(rows)
    wanted = loss_formula.compute(logps, entropy)
    name = "triton" if TRITON else "cpu"
    if backends.unavailable(name):
        pytest.skip("needs the kernels")
    module = backends.load(name)
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    falls_back, strict = (
        (module.OrEager(), module.Kernels(True))
        if TRITON
        else (module.Kernels(), module.Kernels(True))
    )
    with pytest.warns(
        RuntimeWarning,
        match=r"formulas in PyTorch.*untraced cannot run in the kernels: torch\.sinh",
    ):
        found = falls_back.evaluate_formula(loss_formula, logps, entropy)
    assert torch.equal(found.losses, wanted.losses)
    assert torch.equal(found.grad_logps, wanted.grad_logps) and found.grad_entropy is None
    with pytest.raises(FormulaRefused, match="untraced cannot run in the kernels"):
        strict.evaluate_formula(loss_formula, logps, entropy)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_objective_loss_refuses_such_a_formula_in_strict_mode(level):
    name = "triton" if TRITON else "cpu"
    if backends.unavailable(name):
        pytest.skip("needs the kernels")
    batch = TokenBatch(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2))
    logps = -torch.rand(2, 3)
    with use(backend=name, strict=True):
        objective_loss(logps, batch, Objective(level=level))
        with pytest.raises(FormulaRefused, match="untraced cannot run in the kernels"):
            objective_loss(logps, batch, Objective(Custom(untraced), level=level))
