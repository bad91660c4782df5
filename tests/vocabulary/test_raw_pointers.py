"""What stands between tensors and kernels that take addresses: checks that `python -O` leaves in, and rows in one piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from grpo_kernels import Exact, Objective, TokenBatch, TokenSets, linear_grpo_loss, linear_logprobs
from grpo_kernels.formulas.token_stage import TokenRows
from grpo_kernels.rows.backends import cpu, cpu_products
from grpo_kernels.rows.partials import Partials, RowTransform, Slopes, Teacher, partials_of
from grpo_kernels.rows.ragged import Ragged
from support.bits import same_bits
from support.processes import start

Tensor = torch.Tensor

N, V, H = 6, 40, 8
DAPO = Objective.preset("dapo", entropy_coef=0.01)
ENTROPY, JSD = partials_of(("entropy",)), partials_of(("entropy", "divergence"), "jsd")

no_module = pytest.mark.skipif(cpu.available() is not None, reason="the compiled module is missing")


# ---- kernels

Call = Callable[..., Any]


def transform(x: dict[str, Tensor]) -> RowTransform:
    return RowTransform(1.0, 0.0, x["inv_temperature"])


def teacher(x: dict[str, Tensor]) -> Teacher:
    return Teacher(x["teacher.logits"], RowTransform(1.0, 0.0, 1.0), "jsd", 0.5)


def stats_of(x: dict[str, Tensor], *of_teacher: Any) -> Partials:
    return Partials(x["partials"], JSD if of_teacher else ENTROPY, *of_teacher)


def slots(x: dict[str, Tensor]) -> Ragged:
    return Ragged(x["slots.ids"], torch.arange(N + 1), x["slots.rows"])


def fused(b: Any, x: dict[str, Tensor], *of_teacher: Teacher) -> None:
    rows = TokenRows(
        x["targets"], x["read"], x["advantages"], x["policy_weight"], x["old_logps"], entropy_weight=x["entropy_weight"],
        divergence_weight=x["divergence_weight"] if of_teacher else None,
    )  # fmt: skip
    b.fused(x["logits"], rows, DAPO, transform(x), x["out"], teacher=of_teacher[0] if of_teacher else None)


def pull(b: Any, x: dict[str, Tensor], *of_teacher: Teacher) -> None:
    slopes = Slopes(
        x["slopes.target"], x["slopes.constant"], x["slopes.log"], None, x["slopes.teacher"] if of_teacher else None
    )
    stats = stats_of(x, "jsd", 0.5) if of_teacher else stats_of(x)
    b.pull(x["logits"], x["targets"], stats, slopes, transform(x), x["out"], teacher=of_teacher[0] if of_teacher else None)


ROWS = ("logits", "inv_temperature", "targets")
FUSED = (*ROWS, "read", "out", "advantages", "policy_weight", "old_logps", "entropy_weight")
PULL = (*ROWS, "out", "partials", "slopes.target", "slopes.constant", "slopes.log")

#: Functions of a backend, and the tensors that they take to a kernel, by their names in an error.
OF_ROWS: dict[str, tuple[Callable[[Any, dict[str, Tensor]], Any], tuple[str, ...]]] = {
    "stats": (lambda b, x: b.stats(x["logits"], x["targets"], x["read"], transform(x), ENTROPY), (*ROWS, "read")),
    "pull": (pull, PULL),
    "fused": (fused, FUSED),
    "select": (
        lambda b, x: b.select(x["logits"][0], x["targets"], stats_of(x), transform(x), 0.1, x["starts"]), (*ROWS, "partials", "starts")
    ),
    "stats beside a teacher": (
        lambda b, x: b.stats(x["logits"], x["targets"], x["read"], transform(x), JSD, teacher=teacher(x)),
        (*ROWS, "read", "teacher.logits"),
    ),
    "mixed": (
        lambda b, x: b.mixed(x["logits"], stats_of(x, "jsd", 0.5), transform(x), teacher(x), x["read"]),
        ("logits", "inv_temperature", "read", "teacher.logits", "partials"),
    ),
    "pull beside a teacher": (lambda b, x: pull(b, x, teacher(x)), (*PULL, "slopes.teacher", "teacher.logits")),
    "fused beside a teacher": (lambda b, x: fused(b, x, teacher(x)), (*FUSED, "divergence_weight", "teacher.logits")),
}  # fmt: skip
OF_SLOTS: dict[str, tuple[Callable[[Any, dict[str, Tensor]], Any], tuple[str, ...]]] = {
    "slot_logits": (
        lambda b, x: b.slot_logits(x["hidden"], x["weight"], slots(x)), ("hidden", "weight", "slots.ids", "slots.rows")
    ),
    "add_weight_rows": (
        lambda b, x: b.add_weight_rows(x["values"], slots(x), x["weight"], x["out"]),
        ("values", "weight", "out", "slots.ids", "slots.rows"),
    ),
    "add_hidden_rows": (
        lambda b, x: b.add_hidden_rows(x["values"], slots(x), x["hidden"], x["out"]),
        ("values", "hidden", "out", "slots.ids", "slots.rows"),
    ),
}  # fmt: skip
OF_PRODUCTS: dict[str, tuple[Callable[[Any, dict[str, Tensor]], Any], tuple[str, ...]]] = {
    "logits": (lambda b, x: b.logits(x["hidden"], x["weight"], x["bias"], x["out"]), ("hidden", "weight", "bias", "out")),
    "d_hidden": (lambda b, x: b.d_hidden(x["gradient"], x["weight"], x["out"]), ("gradient", "weight", "out")),
    "d_weight": (
        lambda b, x: b.d_weight(x["gradient"], x["hidden"], x["start"], x["out"]), ("gradient", "hidden", "start", "out")
    ),
}  # fmt: skip


def arguments(function: str) -> dict[str, Tensor]:
    """What every function takes, right."""
    beside = function == "mixed" or "teacher" in function
    out = {"add_weight_rows": (N, H), "add_hidden_rows": (V, H), "logits": (N, V), "d_hidden": (N, H), "d_weight": (V, H)}
    return {
        "logits": torch.randn(1, N, V), "teacher.logits": torch.randn(1, N, V), "out": torch.zeros(out.get(function, (1, N, V))),
        "targets": torch.arange(N), "read": torch.ones(N, dtype=torch.bool), "starts": torch.zeros(N, dtype=torch.int64),
        "partials": torch.rand(len(JSD if beside else ENTROPY), N) + 1.0,
        "slots.ids": torch.arange(N), "slots.rows": torch.arange(N),
        "hidden": torch.randn(N, H), "weight": torch.randn(V, H), "bias": torch.zeros(V), "gradient": torch.randn(N, V),
        "start": torch.zeros(V, H),
        **{
            name: torch.rand(N) for name in (
                "inv_temperature", "advantages", "policy_weight", "old_logps", "entropy_weight", "divergence_weight", "values",
                "slopes.target", "slopes.constant", "slopes.log", "slopes.teacher",
            )
        },
    }  # fmt: skip


def spoiled(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    other = torch.float64 if x.is_floating_point() else torch.int32
    yield "of another dtype", x.to(other)
    yield "too short", x.narrow(1 if x.dim() == 3 else -1, 0, x.shape[1 if x.dim() == 3 else -1] - 1)
    yield "strided", torch.stack([x, x], -1)[..., 0]
    yield "elsewhere", x.to("meta")


#: Inputs of a formula, which are made contiguous.
COPIED = ("advantages", "policy_weight", "old_logps", "entropy_weight", "divergence_weight")


def not_refused(backend: Any, functions: dict[str, Any], sorts: tuple[str, ...], runs: bool = True) -> list[str]:
    """Wrong tensors that a function takes, or refuses with an error that does not name them. With assertions left out, too."""
    found = []
    for function, (call, names) in functions.items():
        if runs:
            call(backend, arguments(function))
        for name in names:
            for sort, wrong in spoiled(arguments(function)[name]):
                if sort not in sorts or (sort == "strided" and name in COPIED):
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
    found = not_refused(cpu, OF_ROWS, SORTS) + not_refused(cpu, OF_SLOTS, SORTS)
    return found + (not_refused(cpu_products, OF_PRODUCTS, SORTS) if cpu_products.available() is None else [])


@no_module
def test_a_wrong_tensor_does_not_reach_a_kernel() -> None:
    assert everything_not_refused() == []


def test_a_wrong_tensor_does_not_reach_a_triton_kernel() -> None:
    """Vectors are copied where they are strided, and Triton itself knows dtypes and devices."""
    triton = pytest.importorskip("grpo_kernels.rows.backends.triton")
    functions = {name: given for name, given in OF_ROWS.items() if name != "fused beside a teacher"}  # the three before
    matrices = {
        name: (call, tuple(x for x in names if x in ("logits", "out", "teacher.logits")))
        for name, (call, names) in functions.items()
    }
    assert not_refused(triton, matrices, ("of another dtype", "strided"), False) == []
    call, names = OF_SLOTS["add_weight_rows"]
    of_slots = OF_SLOTS | {"add_weight_rows": (call, tuple(x for x in names if x != "slots.rows"))}  # offsets say that
    assert not_refused(triton, functions | of_slots, ("too short",), False) == []


# ---- heads of any strides; those of the policy: `view` of recipes


def test_a_reference_of_any_strides(backend: str) -> None:
    """Its log-probs of sampled tokens over sets, and its whole distribution."""
    hidden, weight, sets = (
        torch.randn(N, H),
        torch.randn(V, H),
        TokenSets.from_lists([[i, i + 7, 39] if i % 3 else [] for i in range(N)]),
    )
    for kl, fields in (("k3", {"kept": sets}), (Exact("jsd"), {}), (Exact("jsd"), {"kept": sets})):
        batch = TokenBatch(torch.arange(N)[None], torch.ones(1), **fields)  # type: ignore[arg-type]
        found = []
        for head in (weight, weight.t().contiguous().t()):
            leaf, objective = torch.ones(1, N, H, requires_grad=True), Objective.preset("grpo", beta=0.3, kl=kl)
            linear_grpo_loss(leaf, weight, batch, objective, reference=(hidden[None], head), backend=backend).loss.backward()
            found.append(leaf.grad)
        assert found[0].any() and same_bits(*found)


def test_main_grad_of_a_transposed_parameter(backend: str) -> None:
    """The flag is that of the parameter, of which kernels take a copy."""
    weight: Any = torch.nn.Parameter(torch.randn(H, V).t())
    hidden, targets = torch.randn(N, H), torch.arange(N)
    for options in ({}, {"kept": TokenSets.from_lists([[i, i + 7, 39] for i in range(N)])}):
        (want,) = torch.autograd.grad(linear_logprobs(hidden, weight, targets, backend=backend, **options)[0].sum(), weight)
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(V, H), False
        linear_logprobs(hidden, weight, targets, weight_grad=weight.main_grad, backend=backend, **options)[0].sum().backward()
        assert weight.grad_added_to_main_grad is True
        torch.testing.assert_close(weight.main_grad, want)


# ---- without assertions

OPTIMISED = """
assert False, "assertions are on"
from vocabulary.test_raw_pointers import everything_not_refused
for line in everything_not_refused():
    print("not refused,", line)
"""


@no_module
def test_python_without_assertions() -> None:
    process = start(OPTIMISED, PYTHONOPTIMIZE="1")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and output == "", output


# ---- calls of the binding; those of one stream: fuzz_kernels.refusals


@no_module
def test_calls_over_two_streams_that_cannot_be_right_are_refused() -> None:
    from grpo_kernels import _cpu

    x, targets, memory = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(9, 2)
    stream, short = (_cpu.Stream(x.data_ptr(), 0, n, 8 * n, 8, 1.0, 0.0, 1.0, 0) for n in (2, 1))
    at = [row.data_ptr() for row in memory]
    nothing, one = _cpu.Program("nothing", 0, 2, [], [0, 0, 0]), _cpu.Program("one", 0, 2, [], [0])

    def stats(direction: int, cross: int) -> None:
        _cpu.divergence_stats(
            stream, stream, direction, 8, 0, 2, targets.data_ptr(), 0, *at[:3], 0, 0, 0, *at[3:5], cross, at[6], 1
        )

    def loss(program: Any, direction: int, dtype: int, last: int) -> None:
        outs = (*at[:3], last)
        _cpu.divergence_fused(
            program, [], [], False, stream, stream, direction, 0.0, 0, dtype, 16, 8, 8, 2, targets.data_ptr(), 0, 0, *outs, 1
        )  # type: ignore[call-arg]

    stats(1, at[5])
    loss(nothing, 0, 0, at[3])
    assert (memory[3] == 0).all() and (memory[0] == -math.log(8)).all()
    for call, words in (
        (lambda: stats(3, at[5]), "direction=3"), (lambda: stats(1, 0), "cross=0"),
        (lambda: _cpu.divergence_mixed(stream, short, 0.5, 8, 0, 2, 0, *at[:7], 1), "inner_count=1"),
        (lambda: loss(nothing, 3, 0, at[3]), "direction=3"), (lambda: loss(nothing, 0, 0, 0), "divergence=0"),
        (lambda: loss(nothing, 0, 7, at[3]), "out_dtype=7"), (lambda: loss(one, 0, 0, at[3]), "does not give a loss and two slopes"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()
