"""What stands between tensors and kernels that take addresses: what the module refuses, checks that `python -O` leaves in, and
rows in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels import Options, linear_logprobs
from grpo_kernels.formulas.token_stage import NOTHING, TokenRows, TokenStage
from grpo_kernels.rows.backends import cpu, cpu_products, load
from grpo_kernels.rows.partials import SLOPES, LogitRows, Partials, RowTransform, Second, Slopes, partials_of
from grpo_kernels.rows.ragged import Ragged
from support.processes import start

Tensor = torch.Tensor
Call = Callable[[Any, dict[str, Tensor]], Any]

N, V, H = 6, 40, 8
ENTROPY, JSD = partials_of(("entropy",)), partials_of(("entropy", "divergence"), "jsd")

no_module = pytest.mark.skipif(cpu.available() is not None, reason="the compiled module is missing")


# ---- kernels


def rows(x: dict[str, Tensor], read: bool = True) -> LogitRows:
    plain = RowTransform(1.0, 0.0, 1.0)
    second = Second(x["second.logits"], plain, "jsd", 0.5) if "second.logits" in x else None
    return LogitRows(
        x["logits"], x["targets"], x["read"] if read else None, RowTransform(1.0, 0.0, x["inv_temperature"]), second
    )


def partials(x: dict[str, Tensor]) -> Partials:
    return Partials(x["partials"], JSD, "jsd", 0.5) if "second.logits" in x else Partials(x["partials"], ENTROPY)


def slots(x: dict[str, Tensor]) -> Ragged:
    return Ragged(x["slots.ids"], torch.arange(N + 1), x["slots.rows"])


def fused(b: Any, x: dict[str, Tensor]) -> None:
    weight = x["divergence_weight"] if "second.logits" in x else None
    inputs = TokenRows(x["targets"], x["read"], x["advantages"], x["policy_weight"], x["old_logps"], divergence_weight=weight)
    b.fused(rows(x), TokenStage(NOTHING, inputs), x["out"])


def pull(b: Any, x: dict[str, Tensor]) -> None:
    names = SLOPES if "second.logits" in x else SLOPES[:4]
    b.pull(rows(x, False), partials(x), Slopes(x["slopes"], names), x["out"])


def product(name: str, *operands: str) -> tuple[Call, tuple[str, ...]]:
    return (lambda b, x: getattr(b, name)(*(x[operand] for operand in operands))), operands


ROWS = ("logits", "inv_temperature", "targets")
BESIDE = (*ROWS, "second.logits")
#: Functions of a backend, and the tensors that they take to a kernel, by their names in an error.
OF_ROWS: dict[str, tuple[Call, tuple[str, ...]]] = {
    "stats": (lambda b, x: b.stats(rows(x), ENTROPY), (*ROWS, "read")),
    "pull": (pull, (*ROWS, "out", "partials", "slopes")),
    "fused": (fused, (*ROWS, "read", "out")),
    "select": (lambda b, x: b.select(rows(x), partials(x), 0.1, x["starts"]), (*ROWS, "partials", "starts")),
    "stats beside": (lambda b, x: b.stats(rows(x), JSD), (*BESIDE, "read")),
    "mixed beside": (lambda b, x: b.mixed(rows(x), partials(x)), ("logits", "inv_temperature", "second.logits", "read", "partials")),
    "pull beside": (pull, (*BESIDE, "out", "partials", "slopes")),
    "fused beside": (fused, (*BESIDE, "read", "out")),
}  # fmt: skip
OF_SLOTS: dict[str, tuple[Call, tuple[str, ...]]] = {
    "slot_logits": (lambda b, x: b.slot_logits(x["hidden"], x["weight"], slots(x)), ("hidden", "weight", "slots.ids", "slots.rows")),
    "add_weight_rows": (
        lambda b, x: b.add_weight_rows(x["values"], slots(x), x["weight"], x["out"]), ("values", "weight", "out", "slots.ids", "slots.rows")
    ),
    "add_hidden_rows": (
        lambda b, x: b.add_hidden_rows(x["values"], slots(x), x["hidden"], x["out"]), ("values", "hidden", "out", "slots.ids", "slots.rows")
    ),
}  # fmt: skip
OF_PRODUCTS: dict[str, tuple[Call, tuple[str, ...]]] = {
    "logits": product("logits", "hidden", "weight", "bias", "out"),
    "d_hidden": product("d_hidden", "gradient", "weight", "out"),
    "d_weight": product("d_weight", "gradient", "hidden", "start", "out"),
}


def arguments(function: str) -> dict[str, Tensor]:
    """What every function takes, right."""
    beside = "beside" in function
    out = {"add_weight_rows": (N, H), "add_hidden_rows": (V, H), "logits": (N, V), "d_hidden": (N, H), "d_weight": (V, H)}
    vectors = ("inv_temperature", "advantages", "policy_weight", "old_logps", "divergence_weight", "values")
    return {
        "logits": torch.randn(1, N, V), "out": torch.zeros(out.get(function, (1, N, V))),
        "targets": torch.arange(N), "read": torch.ones(N, dtype=torch.bool), "starts": torch.zeros(N, dtype=torch.int64),
        "partials": torch.rand(len(JSD if beside else ENTROPY), N) + 1.0, "slopes": torch.rand(5 if beside else 4, N),
        "slots.ids": torch.arange(N), "slots.rows": torch.arange(N),
        "hidden": torch.randn(N, H), "weight": torch.randn(V, H), "bias": torch.zeros(V), "gradient": torch.randn(N, V),
        "start": torch.zeros(V, H), **{name: torch.rand(N) for name in vectors},
        **({"second.logits": torch.randn(1, N, V)} if beside else {}),
    }  # fmt: skip


def spoiled(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    other = torch.float64 if x.is_floating_point() else torch.int32
    yield "of another dtype", x.to(other)
    yield "too short", x.narrow(1 if x.dim() == 3 else -1, 0, x.shape[1 if x.dim() == 3 else -1] - 1)
    yield "strided", torch.stack([x, x], -1)[..., 0]
    yield "elsewhere", x.to("meta")


def not_refused(backend: Any, functions: dict[str, Any], sorts: tuple[str, ...], runs: bool = True) -> list[str]:
    """Wrong tensors that a function takes, or refuses with an error that does not name them. With assertions left out, too."""
    found = []
    for function, (call, names) in functions.items():
        if runs:
            call(backend, arguments(function))
        for name in names:
            for sort, wrong in spoiled(arguments(function)[name]):
                if sort not in sorts:
                    continue
                try:
                    call(backend, arguments(function) | {name: wrong})
                    found.append(f"{function}: {name} {sort}")
                except ValueError as error:
                    if name not in str(error) and sort != "too short":  # then it is the others that are too long
                        found.append(f"{function}: {name} {sort}: {error}")
    return found


SORTS = ("of another dtype", "too short", "strided", "elsewhere")


def everything_not_refused() -> list[str]:
    found = not_refused(cpu.Kernels(), OF_ROWS | OF_SLOTS, SORTS)
    return found + (not_refused(cpu_products, OF_PRODUCTS, SORTS) if cpu_products.available() is None else [])


@no_module
def test_a_wrong_tensor_does_not_reach_a_kernel() -> None:
    assert everything_not_refused() == []


def test_a_wrong_tensor_does_not_reach_a_triton_kernel() -> None:
    """Vectors are copied where they are strided, and Triton itself knows dtypes and devices."""
    pytest.importorskip("triton")
    kernels, functions = load("triton").Kernels(), {k: v for k, v in OF_ROWS.items() if k != "fused beside"}  # the three before
    big = ("logits", "out", "second.logits")
    matrices = {name: (call, tuple(x for x in names if x in big)) for name, (call, names) in functions.items()}
    assert not_refused(kernels, matrices, ("of another dtype", "strided"), False) == []
    call, names = OF_SLOTS["add_weight_rows"]
    of_slots = OF_SLOTS | {"add_weight_rows": (call, tuple(x for x in names if x != "slots.rows"))}  # offsets say that
    assert not_refused(kernels, functions | of_slots, ("too short",), False) == []


# ---- the module itself


class Maybe(int):
    """An address that may be 0."""


def wrong(x: Any) -> Iterator[int]:
    """Addresses that cannot be right."""
    if isinstance(x, int) and x > 1 << 20:
        yield from (x + 1,) if isinstance(x, Maybe) else (x + 1, 0)


@no_module
def test_arguments_that_cannot_be_right_are_refused() -> None:
    """Each line: what makes an object or calls, right arguments, and for a place among them what else is wrong there than the
    addresses and the number of threads, which comes last."""
    m, memory = cpu._cpu, torch.zeros(3, 96, dtype=torch.int64)
    a, b, c = (x.data_ptr() for x in memory)
    maybe, huge, sizes, dtypes = Maybe(c), 2**62, (-1, -(2**63), 2**62), (-1, 3)
    shapes = [(2, 2, 0), *((2, 2, size) for size in sizes), (2, -1, 4), (2**40, 2**40, 4)]
    strides = [(huge, 4, 1), (8, -(2**63), 1), (8, 4, 2)]
    of_rows: dict[int, Any] = {1: dtypes, 2: shapes, 3: strides, 4: (1, *sizes), 5: (5, *sizes)}
    rows = (a, 0, (2, 2, 4), (8, 4, 1), 0, 4)

    def named(bits: int, n: int = 4) -> Any:
        return m.Named(b, (bits.bit_count(), n), (n, 1), bits)

    def matrix(dtype: int = 0, rows: int = 4, columns: int = 4) -> Any:
        return m.Matrix(a, dtype, (rows, columns), (columns, 1))

    def logits(n: int, vocab: int) -> Any:
        return m.LogitRows(a, 0, (1, n, vocab), (n * vocab, vocab, 1), 0, n, 1.0, 0.0, 1.0, 0)

    def program(numbers: int, inputs: int, outputs: int) -> Any:
        return m.Program("x", numbers, inputs, [], [0] * outputs)

    own, square, slots, out = logits(4, 4), matrix(), m.Slots(c, c, 4), m.Memory(a, 0, (1, 4, 4), (16, 4, 1), 0, 4)
    second, unknown = m.Second(own, 0, 0.0, c, c, c), m.Second(own, 2, 0.5, 0, 0, 0)
    others = [m.Second(logits(*shape), 0, 0.0, c, c, c) for shape in ((2, 4), (4, 3))]
    outs = [m.Memory(a, 0, (1, 2, 4), (8, 4, 1), 0, 2), m.Memory(a, 0, (1, 4, 3), (12, 3, 1), 0, 4)]
    three, short, low, narrow = named(0b111), named(0b111, 3), matrix(1), matrix(0, 4, 3)
    table: list[tuple[Any, tuple[Any, ...], dict[int, Any]]] = [
        (m.Memory, rows, of_rows),
        (m.LogitRows, (*rows, 1.0, 0.0, 1.0, maybe), of_rows),
        (m.Second, (own, 0, 0.5, maybe, maybe, maybe), {1: (-1, 4)}),
        (m.Named, (b, (3, 4), (4, 1), 0b111), {1: [(2, 4), (3, huge)], 2: [(huge, 1), (4, 2)], 3: (0b11, 0)}),
        (m.Matrix, (a, 0, (4, 4), (4, 1)), {1: dtypes, 2: [(-1, 4), (4, huge), (2**40, 2**40)], 3: [(huge, 1), (4, 2)]}),
        (m.Slots, (c, c, 4), {2: sizes}),
        (m.stats, (own, None, c, 0, three, 1), {1: others, 4: (named(0b11), named(0b10111), named(1 << 20), short)}),
        (m.stats, (own, second, c, 0, named(0b1111000111), 1), {4: (three, named(0b111000111))}),
        (m.mixed, (own, second, 0, named(0b11000011), named(0b11), 1), {1: (unknown, *others), 3: (three,), 4: (named(0b1),)}),
        (m.pull, (own, None, c, three, named(1), out, 1), {3: (named(0b11),), 4: (named(0b10), named(1, 3)), 5: outs}),
        (m.pull, (own, second, c, named(0b11000111), named(0b10001), out, 1), {1: (unknown, *others), 3: (three,), 4: (named(1),)}),
        (
            m.fused, (program(0, 2, 3), [], [], False, own, None, c, 0, out, three, 1),
            {
                0: (program(1, 2, 3), program(0, 2, 1), program(0, 3, 3)), 1: ([1.0],), 2: ([c],), 5: (second, *others), 8: outs,
                9: (named(0b11), short, named(1 << 20)),
            },
        ),
        (m.scale, (a, 0, 4, 2.0, 1), {1: dtypes, 2: sizes}),
        (m.select, (own, c, three, 2.0**35, c, 4, Maybe(a), b, maybe, 1), {2: (named(0b1),), 5: sizes}),
        (m.slot_logits, (square, square, slots, b, 1), {1: (narrow,)}),
        *((add, (b, slots, square, square, 1), {3: (narrow,)}) for add in (m.add_weight_rows, m.add_hidden_rows)),
    ]  # fmt: skip
    if m.has_products():
        ends = (narrow, matrix(0, 3, 4), matrix(2))
        table += [
            (m.logits_product, ("fp32", square, square, maybe, square, 1), {0: ("torch",), 1: (narrow, low), 2: (narrow, low), 4: (*ends, low)}),
            (m.d_hidden, ("fp32", square, square, square, 1), {0: ("torch",), 1: (narrow, low), 2: ends, 3: (*ends, low)}),
            (m.d_weight, ("fp32", square, square, None, square, 1), {1: (ends[1], low), 2: ends[1:], 3: (*ends, low), 4: ends}),
        ]  # fmt: skip
    for make, right, places in table:
        make(*right)
        for place, x in enumerate(right):
            threads = (0, -1) if place == len(right) - 1 and not isinstance(make, type) else ()
            for value in (*wrong(x), *places.get(place, ()), *threads):
                with pytest.raises(ValueError):
                    make(*right[:place], value, *right[place + 1 :])
                    pytest.fail(f"{make} took {value} as argument {place}")


# ---- heads of any strides: `view` of recipes


def test_main_grad_of_a_transposed_parameter(backend: str) -> None:
    """The flag is that of the parameter, of which kernels take a copy."""
    weight: Any = torch.nn.Parameter(torch.randn(H, V).t())
    given, options = (torch.randn(N, H), weight, torch.arange(N)), Options(backend=backend)
    (want,) = torch.autograd.grad(linear_logprobs(*given, options=options).logps.sum(), weight)
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(V, H), False
    linear_logprobs(*given, options=replace(options, weight_grad=weight.main_grad)).logps.sum().backward()
    assert weight.grad_added_to_main_grad is True
    torch.testing.assert_close(weight.main_grad, want)


# ---- without assertions

OPTIMISED = """
assert False, "assertions are on"
from rows.test_raw_pointers import everything_not_refused
for line in everything_not_refused():
    print("not refused,", line)
"""


@no_module
def test_python_without_assertions() -> None:
    process = start(OPTIMISED, PYTHONOPTIMIZE="1")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and output == "", output
