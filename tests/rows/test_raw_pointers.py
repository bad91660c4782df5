"""What stands between tensors and kernels that take addresses:

wrong tensors are refused, also by `python -O`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import Objective
from grpo_kernels.core.backends import cpu, cpu_matmuls
from grpo_kernels.core.divergence import DivergenceKind
from grpo_kernels.core.pairs import Pairs
from grpo_kernels.core.softmax import (
    COEFFICIENTS,
    GradientCoefficients,
    LogitRows,
    ReferenceRows,
    RowTransform,
    SoftmaxSums,
    sums_for,
)
from grpo_kernels.formulas.surrogates import NoPolicyTerm, PolicyGradient
from grpo_kernels.formulas.token_inputs import TokenInputs
from support.processes import start

Call = Callable[[Any, dict[str, Tensor]], Any]

N, V, H = 6, 40, 8
KIND = DivergenceKind("jsd", 0.5)
ENTROPY, JSD = sums_for(("entropy",)), sums_for(("entropy", "divergence"), "jsd")

no_module = pytest.mark.skipif(
    cpu.unavailable_reason() is not None, reason="the compiled module is missing"
)


# ---- kernels


def rows(x, mask=True):
    plain = RowTransform(1.0, 0.0, 1.0)
    reference = (
        ReferenceRows(x["reference.logits"], plain, KIND) if "reference.logits" in x else None
    )
    return LogitRows(
        x["logits"],
        x["targets"],
        x["mask"] if mask else None,
        RowTransform(1.0, 0.0, x["inverse_temperature"]),
        reference,
    )


def sums(x):
    return (
        SoftmaxSums(x["sums"], JSD, KIND)
        if "reference.logits" in x
        else SoftmaxSums(x["sums"], ENTROPY)
    )


def pairs(x):
    return Pairs(x["pairs.ids"], torch.arange(N + 1), x["pairs.rows"])


def fused(b, x):
    weight = x["divergence_weight"] if "reference.logits" in x else None
    inputs = TokenInputs(
        x["targets"],
        x["mask"],
        x["advantages"],
        x["policy_weight"],
        x["old_logps"],
        divergence_weight=weight,
    )
    b.fused_loss(rows(x), Objective(NoPolicyTerm()).loss_formula(inputs), x["out"])


def evaluate(b, x):
    inputs = TokenInputs(x["targets"], None, x["advantages"], x["policy_weight"], x["old_logps"])
    b.evaluate_formula(Objective(PolicyGradient()).loss_formula(inputs), x["logps"], x["entropy"])


def gradient(b, x):
    names = COEFFICIENTS if "reference.logits" in x else COEFFICIENTS[:4]
    b.softmax_gradient(
        rows(x, False), sums(x), GradientCoefficients(x["coefficients"], names), x["out"]
    )


def product(name, *operands):
    return (lambda b, x: getattr(b, name)(*(x[operand] for operand in operands))), operands


ROWS = ("logits", "inverse_temperature", "targets")
BESIDE = (*ROWS, "reference.logits")
#: Functions of a backend, and the tensors that they take to a kernel, by their names in an error.
OF_ROWS = {
    "sums": (lambda b, x: b.softmax_sums(rows(x), ENTROPY), (*ROWS, "mask")),
    "gradient": (gradient, (*ROWS, "out", "sums", "coefficients")),
    "fused": (fused, (*ROWS, "mask", "out")),
    "evaluate": (evaluate, ("logps", "entropy")),
    "sums beside": (lambda b, x: b.softmax_sums(rows(x), JSD), (*BESIDE, "mask")),
    "mixture beside": (lambda b, x: b.run_mixture_kernel(rows(x), sums(x)), ("logits", "inverse_temperature", "reference.logits", "mask", "sums")),
    "gradient beside": (gradient, (*BESIDE, "out", "sums", "coefficients")),
    "fused beside": (fused, (*BESIDE, "mask", "out")),
}  # fmt: skip
OF_PAIRS = {
    "pair_logits": (lambda b, x: b.pair_logits(x["hidden"], x["weight"], pairs(x)), ("hidden", "weight", "pairs.ids", "pairs.rows")),
    "write_grad_hidden_of_pairs": (
        lambda b, x: b.write_grad_hidden_of_pairs(x["values"], pairs(x), x["weight"], x["out"]), ("values", "weight", "out", "pairs.ids", "pairs.rows")
    ),
    "add_grad_weight_of_pairs": (
        lambda b, x: b.add_grad_weight_of_pairs(x["values"], pairs(x), x["hidden"], x["out"]), ("values", "hidden", "out", "pairs.ids", "pairs.rows")
    ),
}  # fmt: skip
OF_PRODUCTS = {
    "logits": product("logits", "hidden", "weight", "bias", "out"),
    "grad_hidden": product("grad_hidden", "grad_logits", "weight", "out"),
    "grad_weight": product("grad_weight", "grad_logits", "hidden", "start", "out"),
}


def arguments(function):
    """What every function takes, right."""
    beside = "beside" in function
    out = {
        "write_grad_hidden_of_pairs": (N, H),
        "add_grad_weight_of_pairs": (V, H),
        "logits": (N, V),
        "grad_hidden": (N, H),
        "grad_weight": (V, H),
    }
    vectors = (
        "inverse_temperature",
        "advantages",
        "policy_weight",
        "old_logps",
        "divergence_weight",
        "values",
        "logps",
        "entropy",
    )
    return {
        "logits": torch.randn(1, N, V), "out": torch.zeros(out.get(function, (1, N, V))),
        "targets": torch.arange(N), "mask": torch.ones(N, dtype=torch.bool),
        "sums": torch.rand(len(JSD if beside else ENTROPY), N) + 1.0, "coefficients": torch.rand(5 if beside else 4, N),
        "pairs.ids": torch.arange(N), "pairs.rows": torch.arange(N),
        "hidden": torch.randn(N, H), "weight": torch.randn(V, H), "bias": torch.zeros(V), "grad_logits": torch.randn(N, V),
        "start": torch.zeros(V, H), **{name: torch.rand(N) for name in vectors},
        **({"reference.logits": torch.randn(1, N, V)} if beside else {}),
    }  # fmt: skip


def spoiled(x):
    other = torch.float64 if x.is_floating_point() else torch.int32
    yield "of another dtype", x.to(other)
    yield (
        "too short",
        x.narrow(1 if x.dim() == 3 else -1, 0, x.shape[1 if x.dim() == 3 else -1] - 1),
    )
    yield "strided", torch.stack([x, x], -1)[..., 0]
    yield "elsewhere", x.to("meta")


def not_refused(backend, functions):
    """Wrong tensors that a function takes, or refuses with an error that does not name them.

    With assertions left out, too.
    """
    found = []
    for function, (call, names) in functions.items():
        call(backend, arguments(function))
        for name in names:
            for sort, wrong in spoiled(arguments(function)[name]):
                try:
                    call(backend, arguments(function) | {name: wrong})
                    found.append(f"{function}: {name} {sort}")
                except ValueError as error:
                    if (
                        name not in str(error) and sort != "too short"
                    ):  # then it is the others that are too long
                        found.append(f"{function}: {name} {sort}: {error}")
    return found


def everything_not_refused():
    found = not_refused(cpu.Kernels(), OF_ROWS | OF_PAIRS)
    return found + (
        not_refused(cpu_matmuls, OF_PRODUCTS) if cpu_matmuls.unavailable_reason() is None else []
    )


@no_module
def test_a_wrong_tensor_does_not_reach_a_kernel():
    assert everything_not_refused() == []


@no_module
def test_rows_that_cannot_be_are_refused():
    """By the module:

    no address or one that is not aligned, no dtype, sizes and strides beyond memory, rows behind
    the last.
    """
    at = torch.zeros(64).data_ptr()
    right = (at, 0, (2, 2, 4), (8, 4, 1), 0, 4)
    cpu._cpu.Rows(*right)
    for place, wrong in (
        (0, 0), (0, at + 1), (1, 3), (2, (2, 2, -1)), (2, (2**40, 2**40, 4)), (3, (2**62, 4, 1)), (3, (8, 4, 2)), (4, -1), (5, 5),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            cpu._cpu.Rows(*right[:place], wrong, *right[place + 1 :])


# ---- without assertions

OPTIMISED = """
assert False, "assertions are on"
from rows.test_raw_pointers import everything_not_refused
for line in everything_not_refused():
    print("not refused,", line)
"""


@no_module
def test_python_without_assertions():
    process = start(OPTIMISED, PYTHONOPTIMIZE="1")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and output == "", output


# ---- the limit of the instruction sets

LIMITED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("grpo_kernels._cpu", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(*module.isas(), module.isa(), module.has_matmuls())
"""


@no_module
@pytest.mark.parametrize("limit", ["", "avx2", "avx512", "avx512bf16", "avx3"])
def test_the_setting_limits_the_instruction_sets(limit):
    """Without the setting the module uses all that this processor has."""
    everything = start(LIMITED, cpu._cpu.__file__, GRPO_KERNELS_ISA="")
    *every, best, products = everything.communicate(timeout=60)[0].split()
    assert best == every[0] and products == str(best == "avx512bf16")
    limited = start(LIMITED, cpu._cpu.__file__, GRPO_KERNELS_ISA=limit)
    output = limited.communicate(timeout=60)[0]
    if limit == "avx3":
        assert (
            "ImportError: GRPO_KERNELS_ISA=avx3: choose avx2, avx512 or avx512bf16, or unset it"
            in output
        )
        return
    allowed = every[every.index(limit) :] if limit in every else every
    assert output.split() == [*allowed, allowed[0], str(allowed[0] == "avx512bf16")]
