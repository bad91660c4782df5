"""What only the Triton kernels have: launches, alignment, tiles that are copied ahead, formulas.
Their values are asked for in test_row_kernels.py and its kin, which run beside this file: as
compiled by test_triton_compiled.py, on a GPU by benchmarks/gpu_kit.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_slot_products import close
from torch import Tensor

from grpo_kernels.core.backends import triton
from grpo_kernels.core.backends.triton.launch import LAUNCH, Choice
from grpo_kernels.core.softmax import RowTransform
from grpo_kernels.formulas.filters import TRUST_REGIONS, EntropyFloor, TrustRegion
from grpo_kernels.formulas.kl import ESTIMATORS, WEIGHTINGS, Kl
from grpo_kernels.formulas.ops import ops
from grpo_kernels.formulas.surrogates import Cispo, Custom
from grpo_kernels.formulas.token_inputs import TokenInputs
from grpo_kernels.objective import PRESETS, Objective
from support.kernel_rows import (
    DTYPES,
    PLAIN,
    Rows,
    assert_equal_results,
    assert_near_float64,
    fused_loss_call,
    matrix,
    slots_of,
    to_logit_rows,
)

WIDTH = 0.5
backend = triton.Kernels()


def drawn(vocab, dtype=torch.float32, n=3, transform=PLAIN):
    return Rows(torch.randn(1, n, vocab).to(dtype), transform)


def with_bonus(r):
    return r.only("logps", "entropy")


def set_choices(patch, choice):
    for kind in LAUNCH:
        patch.setitem(LAUNCH, kind, choice)


# ---- formulas


def bend(x):
    return ops.where(~(x != x), x * ops.sigmoid(x), 0.0)


def tilted(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> Any:
    """A surrogate with a helper, a module-level number, annotations and one parameter."""
    x = (logp - old_logp) / WIDTH
    s = ops.sigmoid(x)
    return (
        -advantage * logp + params[0] * bend(x),
        -advantage + params[0] * (s + x * s * (1.0 - s)) / WIDTH,
    )


def squashed(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> Any:
    """A surrogate whose log-ratio saturates."""
    t = ops.tanh(params[0] * (logp - old_logp))
    return -advantage * t / params[0] + 0.5 * t * t, -(advantage - params[0] * t) * (1.0 - t * t)


FAMILY = {
    **{
        name: objective
        for name, objective in PRESETS.items()
        if objective.gradient_is_per_token and objective.exact is None
    },
    **{
        f"{e}, {w}": Objective(beta=0.3, kl=Kl(e, w))
        for e in ESTIMATORS
        for w in WEIGHTINGS
        if e != "distillation"
    },
    **{
        f"{kind} from the sampler": Objective(filters=(TrustRegion(kind, 0.02, 0.01, "sampler"),))
        for kind in TRUST_REGIONS
    },
    "k3+": Objective(beta=0.3, kl="k3+"),
    "clamped k3": Objective(beta=0.3, kl=Kl("k3", "ratio", clamp_log=0.4, clamp=0.05)),
    "bounded ratio": Objective(log_ratio_bounds=(-0.2, 0.3)),
    "bounded ratio, detached": Objective(Cispo(), log_ratio_bounds=(-0.2, 0.3)),
    "entropy floor and bonus": Objective(entropy_coef=0.1, filters=(EntropyFloor(6.2),)),
    "of one's own": Objective(Custom(tilted, (0.3,)), beta=0.1, entropy_coef=0.05),
}


@pytest.mark.parametrize("old", [True, False], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("name", FAMILY)
def test_the_family_compiles_to_what_torch_runs(name, old):
    """The formulas are tested against the oracle under torch; here the fused kernel, with the
    programs that are made of them.
    """
    compare_with_torch(FAMILY[name], old)


@pytest.mark.parametrize("width", [8.0, 0.01], ids=["beyond 1", "near 0"])
def test_tanh_of_a_formula(width):
    """Of numbers of both signs."""
    compare_with_torch(Objective(Custom(squashed, (width,))), True)


def compare_with_torch(objective, old):
    """Run the fused kernel and the formula in torch on the same rows, and compare losses and
    gradients.
    """
    r, n = drawn(531, n=6), 6
    base = -math.log(531) + 0.3 * torch.randn(n)
    rows = TokenInputs(
        r.targets, None, torch.randn(n), torch.rand(n), base if old else None, base + 0.3 * torch.randn(n),
        kl_weight=objective.beta * torch.rand(n) if objective.beta else None, nll_weight=torch.rand(n),
        entropy_weight=objective.entropy_coef * torch.rand(n) if objective.entropy_coef else None, sampler_logps=base + 0.1 * torch.randn(n),
    )  # fmt: skip
    outs = [torch.full_like(r.logits, math.nan) for _ in range(2)]
    ours = backend.fused_loss(to_logit_rows(r), objective.loss_formula(rows), outs[0])
    visits = backend.loss_in_two_passes(to_logit_rows(r), objective.loss_formula(rows), outs[1], 8)
    for got, want in ((ours.losses, visits.losses), (outs[0], outs[1])):
        assert want.abs().max() > 1e-3 and (got - want).abs().max() <= 3e-6 * want.abs().max()


# ---- launches

CHOICES = {
    "one access": Choice(32, 1),
    "an end of two tiles, one kept": Choice(32, 2, ends=2, kept=1, hints=True),
    "an end of three, all kept": Choice(64, 4, ends=3, kept=3),
    "copied ahead": Choice(64, 2, ends=2, kept=1, stages=3),
}
#: Whole tiles and columns beside them: rows of many tiles, of as many as are loaded at once, and of
#: one.
LENGTHS = [(5, -117), (2, 0), (0, 7), (0, 257), (0, 1031)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_gives_the_same_rows(choice, dtype, monkeypatch):
    """Whatever lies before the first 16-byte boundary."""
    taken = CHOICES[choice]
    set_choices(monkeypatch, taken)
    for tiles, columns in LENGTHS[DTYPES.index(dtype) :: 2]:
        vocab = tiles * taken.threads * taken.accesses * (16 // dtype.itemsize) + columns
        r = with_bonus(drawn(vocab, dtype, transform=RowTransform(1.3, 0.0, 0.7)))
        peeled = fused_loss_call(backend, r)
        assert_near_float64(r, peeled)
        wider = torch.full(
            (1, r.count, vocab + 3), 3.0, dtype=dtype
        )  # no boundary is where the logits' is
        _, beside = fused_loss_call(backend, r, wider[..., :vocab])
        assert (wider[..., vocab:] == 3.0).all()
        if vocab % 16:  # else threads take other columns, and sums have another order
            assert torch.equal(beside, peeled[1])


@pytest.mark.parametrize("V", (151_936, 128_257))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_real_length_as_they_are_launched(dtype, V):
    r = with_bonus(drawn(V, dtype, 3, RowTransform(1.0, 0.0, 0.8)))
    found = fused_loss_call(backend, r)
    assert_near_float64(r, found)
    assert_equal_results(fused_loss_call(backend, r, r.logits), found, "in place")


# ---- products over slots


@pytest.mark.parametrize("width", (20, 48))
def test_an_id_with_many_slots_is_summed_in_pieces(width, monkeypatch):
    """Of 16 slots here, the last longer.

    Its bits do not depend on what other ids have, nor on how columns go to programs.
    """
    monkeypatch.setattr(triton, "PIECE", 16)
    counts = {0: 31, 1: 32, 2: 5, 3: 33, 4: 161, 5: 1, 7: 48}
    ids = torch.tensor([id for id, count in counts.items() for _ in range(count)])
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    slots, values, hidden = (
        slots_of([[id] for id in ids.tolist()]),
        torch.randn(len(ids)),
        matrix(len(ids), width, torch.float32, 4),
    )
    terms, zeros = values.double()[:, None] * hidden.double(), torch.zeros(8, width)
    want, size = (zeros.double().index_add(0, ids, x) for x in (terms, terms.abs()))
    out = zeros.clone()
    backend.add_grad_weight_of_pairs(values, slots, hidden, out)
    close(out, want, size + 1e-30, 40)  # of a piece, and of pieces: fewer roundings than slots
    monkeypatch.setitem(LAUNCH, "pairs", LAUNCH["pairs"]._replace(threads=32))
    for id in counts:
        alone = zeros.clone()
        backend.add_grad_weight_of_pairs(
            values, slots._replace(ids=torch.where(ids == id, id, -1)), hidden, alone
        )
        assert torch.equal(alone[id], out[id]) and not alone[torch.arange(8) != id].any(), id
