"""The compiled Triton kernels, and how often they are compiled:

no GPU is needed. Budgets: test_resources.py.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_kernels.core.divergence import DivergenceKind
from grpo_kernels.core.softmax import LogitRows, ReferenceRows, RowTransform
from grpo_kernels.formulas.surrogates import Cispo, Clip, Custom, PolicyGradient, ops
from grpo_kernels.objective import Objective
from support.kernel_rows import Rows, random_slots, two_passes, values_for
from support.processes import interpreted

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from benchmarks.assembly import code, taken
from benchmarks.launches import KERNELS, OBJECTIVES, TARGETS, compiling, device_name, token_inputs
from grpo_kernels.core.backends import triton as backend

pytestmark = pytest.mark.skipif(
    not isinstance(backend.softmax_sums_kernel, JITFunction),
    reason="TRITON_INTERPRET=1: there is nothing to compile",
)

PLAIN = RowTransform(1.0, 0.0, 1.0)


def fuse(logits, objective, transform=PLAIN, rows=None):
    """A launch of the fused kernel, in place."""
    rows = token_inputs(logits.shape[0] * logits.shape[1], objective) if rows is None else rows
    KERNELS.fused_loss(
        LogitRows(logits, rows.targets, rows.processed, transform),
        objective.loss_formula(rows),
        logits,
    )


def on_vectors(n, objective, offset=0):
    """A launch of the formula alone, on vectors that start at `offset` in their memory."""
    logps, entropy, log_ratios = torch.zeros(3, n + offset)[:, offset:]
    inputs = token_inputs(n, objective, offset=offset)
    if objective.level != "token":
        inputs = replace(inputs, log_ratios=log_ratios)
    KERNELS.evaluate_formula(objective.loss_formula(inputs), logps, entropy)


@pytest.mark.parametrize("target", TARGETS)
def test_formulas_on_vectors_compile_ahead_of_time(target):
    """One kernel for each formula, without spills, in fp32 alone."""
    sequence_level = [Objective.preset(name) for name in ("gspo", "gspo_token", "gmpo", "vespo")]
    objectives = [*OBJECTIVES.values(), *sequence_level]
    with compiling(target) as launches:
        for objective in objectives:
            on_vectors(700, replace(objective, entropy_coef=0.01))
    assert {name for name, _ in launches} == {"evaluate_formula_kernel"}
    assert len(launches) == len(objectives)
    for _, kernel in launches:
        assert not re.search(r"\.f64|_f64", code(kernel)) and not taken(kernel)["spilled"], (
            kernel.metadata.name
        )


def test_minimum_and_maximum_of_a_formula_keep_nan():
    """The hardware's default drops it, as no test on a CPU would show:

    a row of NaN would get a finite loss.
    """
    with compiling("sm_90") as launches:
        logits = torch.zeros(1, 2, 64)
        fuse(logits, Objective())
    ((_, kernel),) = launches
    assembly = code(kernel)
    # exp(min(x, 60)), min(r, delta) A, clip(r): the lane reductions of the row's maximum use the
    # plain form.
    assert (
        assembly.count("min.NaN.f32") >= 4
        and assembly.count("max.NaN.f32") >= 1
        and "min.f32" not in assembly
    )


def variants():
    """Kernels for sm_90 in Triton's own cache, by the function that they were compiled from."""
    kernels, device = (
        [x for x in vars(backend).values() if isinstance(x, JITFunction)],
        device_name("sm_90"),
    )
    return {
        kernel.__name__: len(kernel.device_caches[device][0])
        for kernel in kernels
        if device in kernel.device_caches
    }


@pytest.mark.parametrize("columns", (1031, 1040))
def test_no_length_no_schedule_and_no_mixture_compiles_again(columns):
    before, draw = variants(), random.Random(0)
    with compiling("sm_90") as launches:
        for call in range(20):
            A, T = (
                (1, 1)
                if call == 1
                else (1, 16)
                if call == 2
                else (draw.randint(1, 5), draw.randint(1, 70))
            )
            n = A * T
            extra = call % 2  # [:, :-1] of a longer tensor, and vectors that start anywhere
            logits = torch.zeros(A, T + extra, columns, dtype=torch.bfloat16)[:, :T]
            clip = Clip(draw.random(), draw.random(), 1.001 + draw.random())
            objective = Objective(
                clip, beta=draw.random() + 1e-3, entropy_coef=draw.choice((1.0, draw.random()))
            )
            transform = RowTransform(
                draw.choice((1.0, 16.0, draw.random())),
                draw.choice((1.0, 30.0)),
                draw.choice((1.0, 0.5)),
            )
            fuse(
                logits, objective, transform, token_inputs(n, objective, offset=draw.randint(0, 3))
            )
            two_passes(
                KERNELS,
                Rows(logits, transform),
                logits,
                (0, n) if call % 3 else (n // 3, n - n // 4),
            )
            reference = ReferenceRows(
                torch.zeros_like(logits),
                transform,
                DivergenceKind("jsd", draw.choice((0.5, draw.random()))),
            )
            two_passes(KERNELS, Rows(logits, transform, reference))
            KERNELS.scale_(torch.zeros(n, columns, dtype=torch.bfloat16), torch.ones(()))
            on_vectors(n, objective, draw.randint(0, 3))
            width, half = draw.choice((16, 48, 1024)), torch.bfloat16
            launch_slots(n, draw.choice((16, 17, 50)), width, half, half, 3 * (columns % 2))
            if call == 0:
                first = variants()
    several = (
        "scale_kernel",
        "softmax_sums_kernel",
    )  # of other lengths; also for the top id alone, beside a second stream
    assert all(
        count <= before.get(name, 0) + 1 for name, count in first.items() if name not in several
    ), (before, first)
    assert variants() == first and len({name for name, _ in launches}) == 12


def bent(extra):
    def formula(logp, old_logp, advantage, params):
        r = ops.exp(logp - old_logp) * factor(extra)
        return -advantage * r, -advantage * r

    return formula


def factor(x):
    return 2.0 * x


def test_each_formula_has_its_own_kernel(monkeypatch):
    """A closure too, whatever its name; and a helper that is defined again makes another.

    Those that compute the same share one.
    """
    logits, surrogates = (
        torch.zeros(1, 2, 64),
        [Clip(), Cispo(), PolicyGradient(), Custom(bent(1.0)), Custom(bent(3.0))],
    )
    with compiling("sm_90") as launches:
        for objective in (
            *map(Objective, surrogates),
            *(Objective(beta=0.1, kl=kl) for kl in ("k1", "k2", "k3")),
        ):
            fuse(logits, objective)
        assert len({kernel.asm["cubin"] for _, kernel in launches}) == 8
        for surrogate, same in (
            (Clip(0.1, 0.4, 3.0), 0),
            (Custom(bent(1.0)), 3),
            (Custom(bent(1.0), (0.3,)), 3),
        ):
            fuse(logits, Objective(surrogate))
            assert launches[-1][1] is launches[same][1]
        monkeypatch.setattr(f"{__name__}.factor", lambda x: 5.0 * x)
        fuse(logits, Objective(surrogates[3]))
        assert all(launches[-1][1] is not kernel for _, kernel in launches[:-1])


# ---- products over slots


def launch_slots(n, vocab, width, hidden, weight, gap=0):
    slots = random_slots(n, vocab)
    x, y = (
        torch.zeros(rows, width + gap, dtype=dtype)[:, :width]
        for rows, dtype in ((n, hidden), (vocab, weight))
    )
    KERNELS.pair_logits(x, y, slots)
    KERNELS.write_grad_hidden_of_pairs(values_for(slots), slots, y, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "PIECE", 4)  # so that an id may be cut
        KERNELS.add_grad_weight_of_pairs(values_for(slots), slots, x, y)


# ---- kernels that the compiler refuses, and what stands in for them


@pytest.mark.long
def test_values_and_gradients_in_the_interpreter():
    pytest.importorskip("numpy")  # Triton's interpreter imports it
    interpreted(Path(__file__).with_name("triton_fallback_cases.py"))
