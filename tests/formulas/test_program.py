"""Formulas as programs of the C++ kernel: the same numbers as torch, bitwise except for the last
bits of exp and log. A formula that cannot be a program is refused, or computed in torch, with a
reason.
"""

from __future__ import annotations

import itertools
import sys
import types
import warnings
from math import inf, nan

import pytest
import torch
from torch import Tensor

from grpo_kernels import Objective, Options, TokenBatch, grpo_loss, use
from grpo_kernels.core.backends import cpu
from grpo_kernels.formulas.formula_keys import key_of
from grpo_kernels.formulas.ops import bounded_exp, finite, ops
from grpo_kernels.formulas.program import FormulaRefused, Tracer
from grpo_kernels.formulas.surrogates import Clip, Custom, Surrogate

if cpu.unavailable_reason() is not None:
    pytest.skip(cpu.unavailable_reason() or "", allow_module_level=True)


# ---- the program is the function


def traced(function, names, inputs, parameters=()):
    """Check the program of `function`, of these inputs and a tuple of parameters, against what
    torch makes of it.
    """
    tracer = Tracer()
    result = function(*map(tracer.input, names), tuple(tracer.parameter() for _ in parameters))
    program = tracer.program("it", result)
    expected = function(*inputs, parameters)
    same(cpu.run_program(program, program.scalar_values(parameters), inputs), expected)


def ordered(x):
    """int64, one apart for neighbours among the numbers of fp32."""
    bits = x.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(2**31) - bits, bits)


def same(found, expected):
    """No further apart than 2 of the numbers that fp32 has; zeros of both signs are equal."""
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        y = torch.as_tensor(y, dtype=torch.float32).expand_as(x)
        fine = (
            (x == y)
            | (x.isnan() & y.isnan())
            | (~x.isnan() & ~y.isnan() & ((ordered(x) - ordered(y)).abs() <= 2))
        )
        assert fine.all(), (i, x[~fine][:4], y[~fine][:4])


def arithmetic(a, b, c, params):
    return (
        -a, abs(a), ops.abs(a), ops.exp(a), ops.log(a), ops.sqrt(a), ops.sigmoid(a), ops.tanh(a), a.tanh(), torch.tanh(b), a + b, 0.1 + a + 1e-8, a - b, 0.3 - a,
        a * b * 0.7, a / b, a / 0.3, -4.0 / a, a**2 + b**3, 1.0, -0.25, bounded_exp(20 * a), finite(1e30 * a * b),
    )  # fmt: skip


def extremes(a, b, c, params):
    """Numbers of the call stay Python numbers, as they are beside tensors:

    1 - 0.2 in fp64, then rounded.
    """
    (p,) = params
    return (
        ops.minimum(a, b), ops.maximum(a, b), ops.minimum(a, 0.1), ops.minimum(0.2, b), ops.maximum(a, 0.1), ops.maximum(0.2, b),
        a * ops.minimum(0.1, 0.2), a + ops.maximum(1, 2.5), ops.where(a >= 1.0 - p, ops.maximum(p, 2.0) * a, abs(-p / 3) * a),
    )  # fmt: skip


def conditions(a, b, c, params):
    return (
        ops.where(a < b, c, 1.0), ops.where(a <= b, 1.0, c), ops.where(a > b, c, -c), ops.where(a >= b, 1.0, 0.0),
        ops.where(a == b, a, c), ops.where(a != a, 5.0, c), ops.where(((a < b) & (b < c)) | ~(a < 0.5), a, b), (a < b) * c,
        ops.where(ops.where(a > 0.0, b < c, b > c), a, b),
    )  # fmt: skip


@pytest.mark.parametrize(
    "function, parameters", [(arithmetic, ()), (extremes, (0.2,)), (conditions, ())]
)
def test_operations_are_those_of_torch(function, parameters):
    """On all triples of special numbers, and at random."""
    special = (0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, -3e38, 88.9, -104.0, inf, -inf, nan)
    points = torch.tensor(list(itertools.product(special, repeat=3))).T
    points = torch.cat([points, torch.randn(3, 20000) * torch.tensor([1.0, 10.0]).repeat(10000)], 1)
    traced(function, "abc", list(points.contiguous()), parameters)


# ---- formulas of a user


def loss_of(surrogate, backend="cpu", strict=False, on_policy=False):
    """Loss and gradient of a small batch."""
    g = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(6, 50, generator=g)).requires_grad_()
    targets, numbers = torch.randint(0, 50, (6,), generator=g), torch.rand(2, 6, generator=g)
    objective = surrogate if isinstance(surrogate, Objective) else Objective(surrogate)
    batch = TokenBatch(
        targets,
        2 * numbers[0] - 1,
        old_logps=None if on_policy else -4 * numbers[1],
    )
    loss = grpo_loss(logits, batch, objective, options=Options(backend=backend, strict=strict)).loss
    return loss.detach(), *torch.autograd.grad(loss, logits)


def linear(logp, old_logp, advantage, params, weight=1.0):
    x = (params[0] if params else 1.0) * weight * advantage
    return -x * logp, -x


def made(weight):
    return lambda *given: linear(*given, weight)


def calls(function, run):
    """How often `function` is entered while `run` runs."""
    code, entered = getattr(function, "func", function).__code__, []
    sys.setprofile(
        lambda frame, event, arg: (
            entered.append(1) if event == "call" and frame.f_code is code else None
        )
    )
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(entered)


@pytest.mark.parametrize(
    "make, first, second, again",
    [
        (made, 0.51, 0.51, False),
        (made, 0.52, 1.52, True),
        (lambda parameter: Custom(made(0.57), (parameter,)), 0.5, 1.5, False),
        (lambda width: Clip(width, 0.58), 0.1, 0.3, False),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_formula_is_traced_again_only_where_it_differs(make, first, second, again, strict):
    """Made anew at each step it is the same formula; numbers in `params` follow a schedule.

    So is its comparison with torch.
    """
    one, other = (x if isinstance(x, Surrogate) else Custom(x) for x in (make(first), make(second)))
    loss_of(one, strict=strict)
    assert (calls(other.function, lambda: loss_of(other, strict=strict)) > 0) == again
    assert calls(other.function, lambda: loss_of(other, strict=strict)) == 0
    assert calls(one.function, lambda: loss_of(one, strict=strict)) == 0
    for objective, on_policy in itertools.product(
        (Objective(one), Objective(other)), (False, True)
    ):
        found, expected = (
            loss_of(objective, backend, strict, on_policy) for backend in ("cpu", "eager")
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


C = None
helper = None


HELPERS = {0.5: lambda x: 0.5 * x, 2.5: lambda x: 2.5 * x, -1.0: lambda x: -1.0 * x}
#: What a formula uses: how it does, and what a cell of a notebook makes of the names C and helper,
#: with a number c.
REDEFINED = {
    "a constant": (lambda x: C * x, lambda c: {"C": c}),
    "a helper": (lambda x: helper(x), lambda c: {"helper": HELPERS[c]}),
    "a closure": (lambda x: helper(x), lambda c: {"helper": lambda x: c * x}),
    "a helper in an inner function": (
        lambda x: (lambda: helper(x))(),
        lambda c: {"helper": HELPERS[c]},
    ),
    "an attribute of an object": (lambda x: C.c * x, lambda c: {"C": types.SimpleNamespace(c=c)}),
}


def uses(logp, old_logp, advantage, params):
    return -advantage * used(logp), -advantage * used(1.0 + 0.0 * logp)  # noqa: F821


@pytest.mark.parametrize("kind", REDEFINED)
@pytest.mark.parametrize("strict", [False, True])
def test_what_a_formula_uses_may_be_defined_again(kind, strict):
    """A cell of a notebook is run again:

    the formula stays, what it uses is another. So it does while an objective is kept.
    """
    used, cell = REDEFINED[kind]
    names = {**globals(), "__name__": "notebook", **cell(0.5)}
    names["used"] = types.FunctionType(used.__code__, names)
    objective = kept = Objective(Custom(types.FunctionType(uses.__code__, names)))
    for c in (0.5, 2.5, -1.0, 0.5):
        names.update(cell(c))
        expected = loss_of(Custom(linear, (c,)), "eager")
        for objective in (kept, Objective(kept.surrogate)):
            torch.testing.assert_close(
                loss_of(objective, strict=strict), expected, rtol=1e-5, atol=1e-7
            )


# ---- refusals


def hyperbolic(logp, old_logp, advantage, params):
    return -torch.sinh(logp - old_logp) * advantage, -torch.cosh(logp - old_logp) * advantage


def branching(logp, old_logp, advantage, params):
    if (advantage > 0.0).all() if isinstance(advantage, Tensor) else advantage > 0.0:
        return -logp * advantage, -advantage
    return -logp * advantage, -1.0 * advantage


def long(logp, old_logp, advantage, params):
    """0.001 logp, a thousand times."""
    return -advantage * sum((0.001 * logp for _ in range(1000)), logp * 0.0), -advantage


@pytest.mark.parametrize(
    "function, words",
    [
        (
            hyperbolic,
            (
                "hyperbolic",
                "sinh",
                "names of `ops`",
                f"line {hyperbolic.__code__.co_firstlineno + 1} of hyperbolic",
            ),
        ),
        (branching, ("branching", "ops.where(condition, a, b)")),
        (long, ("long", "registers", "512")),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_cannot_be_traced_is_computed_in_torch(function, words, monkeypatch):
    """With one warning; a refusal by strict is remembered."""
    surrogate = Custom(function)
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    with pytest.warns(RuntimeWarning, match="second pass") as caught:
        found = loss_of(surrogate)
    assert len(caught) == 1 and all(word in str(caught[0].message) for word in words)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        loss_of(surrogate)
    torch.testing.assert_close(found, loss_of(surrogate, "eager"), rtol=1e-5, atol=1e-7)

    def refused():
        with pytest.raises(FormulaRefused) as refusal:
            loss_of(surrogate, strict=True)
        assert all(word in str(refusal.value) for word in words)

    refused()
    assert calls(function, refused) == 0


def test_a_parameter_that_is_nan_is_refused_by_name(backend):
    with pytest.raises(ValueError, match=r"linear.*nan"):
        loss_of(Custom(linear, (nan,)), backend)


@pytest.mark.parametrize("factor", [1.0, 1e-7])
def test_strict_compares_a_formula_with_torch(factor):
    """When it is first used; numbers of a tiny output are told apart like those of a large one."""

    def two_faced(logp, old_logp, advantage, params):
        own = factor if isinstance(logp, Tensor) else 2 * factor
        return -own * advantage * logp, -own * advantage

    with pytest.raises(FormulaRefused, match="two_faced gives loss"), use(strict=True):
        loss_of(Custom(two_faced), "auto")
    with pytest.raises(FormulaRefused, match="two_faced gives loss"):
        loss_of(Custom(two_faced), strict=True)


def test_a_tracer_refuses_numbers_as_conditions_and_tells_constants_apart():
    tracer = Tracer()
    x = tracer.input("x")
    for refused in (lambda: x & x, lambda: ~x, lambda: ops.where(x, x, 0.0)):
        with pytest.raises(FormulaRefused, match="it needs a condition"):
            refused()
    constants = [tracer.as_symbol(value) for value in (1, 1.0, True, 0.0, -0.0)]
    assert len({id(symbol) for symbol in constants}) == len(constants)
    assert tracer.as_symbol(1) is constants[0]


def test_a_function_that_changes_what_a_name_means_has_no_key():
    """Its results may differ from call to call, so nothing that was made of it serves again."""

    def importing(logp, old_logp, advantage, params):
        import math

        return -advantage * logp * math.pi, -advantage * math.pi

    def rebinding(logp, old_logp, advantage, params):
        global scale
        scale = 2.0
        return -advantage * logp, -advantage

    def plain(logp, old_logp, advantage, params):
        return -advantage * logp, -advantage

    assert key_of(importing) is None and key_of(rebinding) is None and key_of(plain) is not None
