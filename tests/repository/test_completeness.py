"""What each new part of a loss needs among the tests. The messages say which file to edit."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_kernels.core.backends import Backend
from grpo_kernels.core.backends.eager import Kernels
from grpo_kernels.formulas import filters, surrogates
from grpo_kernels.formulas.kl import ESTIMATORS
from grpo_kernels.objective import AGGREGATES, PRESETS
from support import objectives

TESTS = Path(__file__).parents[1]
OBJECTIVES_PY = "tests/support/objectives.py"

#: Each kernel of a backend: the test that compares it with float64 in every backend, and the call
#: in that test, or in tests/support/kernel_rows.py, that runs it.
KERNEL_TESTS = {
    "run_sums_kernel": ("rows/test_row_kernels.py", ".softmax_sums("),
    "run_mixture_kernel": ("rows/test_row_kernels.py", ".softmax_sums("),
    "run_gradient_kernel": ("rows/test_row_kernels.py", ".softmax_gradient("),
    "fused_loss": ("rows/test_row_kernels.py", ".fused_loss("),
    "evaluate_formula": ("rows/test_evaluate.py", ".evaluate_formula("),
    "scale_": ("rows/test_row_kernels.py", ".scale_("),
    "pair_logits": ("rows/test_slot_products.py", ".pair_logits("),
    "write_grad_hidden_of_pairs": ("rows/test_slot_products.py", ".write_grad_hidden_of_pairs"),
    "add_grad_weight_of_pairs": ("rows/test_slot_products.py", ".add_grad_weight_of_pairs"),
}


def subclasses_in(module, base):
    """Return the names of the subclasses of `base` that a module defines."""
    classes = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, base)]
    return {x.__name__ for x in classes if x is not base and x.__module__ == module.__name__}


def refuse_missing(what, names, covered, remedy):
    missing = sorted(set(names) - set(covered))
    assert not missing, f"{what} {', '.join(missing)}: {remedy}"


def test_presets_have_a_float64_reference():
    refuse_missing(
        "no float64 reference for the presets",
        PRESETS.keys() - {"distillation"},  # OBJECTIVES has it with each KL
        objectives.PAPERS,
        f"add the formula to tests/support/oracle.py and a Spec to PAPERS in {OBJECTIVES_PY}.",
    )


def test_surrogates_have_a_float64_reference():
    without_formula = {"Custom", "NoPolicyTerm"}
    refuse_missing(
        "no float64 reference for the surrogates",
        subclasses_in(surrogates, surrogates.Surrogate) - without_formula,
        {type(surrogate).__name__ for surrogate, _ in objectives.SURROGATES},
        "add the formula to `surrogate` in tests/support/oracle.py and a line to SURROGATES in"
        f" {OBJECTIVES_PY}.",
    )


def test_filters_have_a_float64_reference():
    tested = {
        type(x).__name__ for option in objectives.FILTERS for x in option.ours.get("filters", ())
    }
    refuse_missing(
        "no float64 reference for the filters",
        subclasses_in(filters, filters.Filter),
        tested,
        f"add it to `filters` in tests/support/oracle.py and a line to FILTERS in {OBJECTIVES_PY}.",
    )


def test_kl_estimators_have_a_float64_reference():
    refuse_missing(
        "no float64 reference for the KL estimators",
        ESTIMATORS,
        {option.theirs.get("kl") for option in objectives.KLS},
        "add the formula to `kl_estimate` in tests/support/oracle.py and a line to KLS in"
        f" {OBJECTIVES_PY}.",
    )


def test_aggregates_have_a_float64_reference():
    refuse_missing(
        "no float64 reference for the aggregates",
        AGGREGATES,
        {option.theirs.get("aggregate") for option in objectives.AGGREGATES},
        f"add it to `denominator` in tests/support/oracle.py and to AGGREGATES in {OBJECTIVES_PY}.",
    )


def test_kernels_have_a_test():
    """The kernels are the methods that eager PyTorch implements."""
    kernels = [
        name
        for name, method in vars(Kernels).items()
        if callable(method) and not name.startswith("_") and hasattr(Backend, name)
    ]
    refuse_missing(
        "no test of the kernels",
        kernels,
        KERNEL_TESTS,
        "compare it with float64 in a test in tests/rows, and name the test in KERNEL_TESTS of"
        " tests/repository/test_completeness.py.",
    )


@pytest.mark.parametrize("kernel", KERNEL_TESTS)
def test_the_test_of_a_kernel_runs_it(kernel):
    file, call = KERNEL_TESTS[kernel]
    text = (TESTS / file).read_text() + (TESTS / "support" / "kernel_rows.py").read_text()
    assert hasattr(Kernels, kernel), f"eager PyTorch has no kernel {kernel!r}: remove its line"
    assert call in text, f"{file} does not call {call!r}: name the test that runs {kernel!r}"
