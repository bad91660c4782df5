"""The products of bf16 and of fp32 operands against float64 products of the same operands.

The rule: an error is at most a few fp32 roundings of the sum of the absolute terms; a result rounded to bf16 is 1000 times
worse than that. Strides, and what lies past an end: fuzz_kernels.py."""

from __future__ import annotations

import errno
import functools
import re
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from grpo_kernels.core.backends import cpu_matmuls
from support import amx
from support.processes import finish, start

if cpu_matmuls.unavailable_reason() is not None:
    pytest.skip(cpu_matmuls.unavailable_reason() or "", allow_module_level=True)


TOLERANCE = 5e-7
#: Of fp32 operands as two bf16 numbers, each right to 2^-8: what is left of either element, and the product of the smaller ones.
SPLIT_TOLERANCE = 3 * 2**-16 + TOLERANCE
FP32, BF16 = torch.float32, torch.bfloat16
# N, H, V: single elements, tails of every tile and panel, several blocks along each inner dimension (256 or 512 long), odd pairs,
# several parts of the vocabulary (16,384 ids).
SHAPES = [
    (1, 1, 1),
    (1, 7, 1031),
    (7, 63, 65),
    (63, 65, 7),
    (33, 520, 1031),
    (64, 128, 192),
    (1031, 65, 63),
    (12, 1537, 130),
    (3, 640, 2049),
    (2, 33, 16500),
]


#: Ways to multiply, and the operands that they differ in.
WAYS = [("avx512bf16", BF16), ("avx512bf16", FP32), ("fp32", BF16), ("amx", BF16), ("amx", FP32)]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]} {way[1]}".replace("torch.", ""))
def dtype(request):
    """The type of the operands, multiplied in one of the ways."""
    engine, dtype = request.param
    with ExitStack() as stack:
        if engine == "amx":
            stack.enter_context(amx.tiles())
            torch.set_float32_matmul_precision("high")
            stack.callback(torch.set_float32_matmul_precision, "highest")
        stack.enter_context(cpu_matmuls.using(engine))
        assert cpu_matmuls._engine_for(dtype) == engine
        yield dtype


def operands(n, h, v, dtype=BF16):
    """hidden, weight and an fp32 gradient."""
    return torch.randn(n, h).to(dtype), torch.randn(v, h).to(dtype), torch.randn(n, v)


def product(function, *arguments, shape, dtype=FP32):
    out = torch.full(shape, torch.nan, dtype=dtype)
    function(*arguments, out)
    return out


def products(hidden, weight, gradient):
    """Logits, and the gradients of hidden states and weight."""
    return (
        product(cpu_matmuls.logits, hidden, weight, None, shape=(len(hidden), len(weight))),
        product(cpu_matmuls.grad_hidden, gradient, weight, shape=tuple(hidden.shape)),
        product(cpu_matmuls.grad_weight, gradient, hidden, None, shape=tuple(weight.shape)),
    )


def check(got, a, b, start=0.0, engine=""):
    """got = start + a @ b."""
    begin = torch.as_tensor(start).double()
    exact, size = begin + a.double() @ b.double(), begin.abs() + a.double().abs() @ b.double().abs()
    split = a.dtype == FP32 and (engine or cpu_matmuls._engine_for(FP32)) == "amx"
    stored = 2.0**-8 * exact.abs() if got.dtype == BF16 else 0.0
    beyond = (
        (got.double() - exact).abs() - stored - (SPLIT_TOLERANCE if split else TOLERANCE) * size
    )
    assert (beyond <= 1e-37).all(), beyond.max()


@pytest.mark.parametrize("n, h, v", SHAPES)
def test_values(n, h, v, dtype):
    """The weight's gradient from 0, on top of what is there and of a sum elsewhere; in fp32, and
    rounded once at the end.
    """
    hidden, weight, gradient = operands(n, h, v, dtype)
    bias, start = torch.randn(v), torch.randn(v, h)
    check(product(cpu_matmuls.logits, hidden, weight, bias, shape=(n, v)), hidden, weight.T, bias)
    for of in (gradient, gradient.to(dtype)):
        logits, d_hidden, d_weight = products(hidden, weight, of)
        check(logits, hidden, weight.T)
        check(d_hidden, of.to(dtype), weight)
        check(d_weight, of.to(dtype).T, hidden)
        total = start.clone()
        cpu_matmuls.grad_weight(of, hidden, total, total)
        check(total, of.to(dtype).T, hidden, start)
        rounded = product(cpu_matmuls.grad_weight, of, hidden, start, shape=(v, h), dtype=BF16)
        assert torch.equal(rounded, total.bfloat16())
        assert torch.equal(
            product(cpu_matmuls.grad_weight, of, hidden, None, shape=(v, h), dtype=BF16),
            d_weight.bfloat16(),
        )


def test_results_depend_on_no_threads_and_a_row_on_no_other(dtype):
    for n, h, v in ((35, 280, 700), (3, 17, 16500)):
        hidden, weight, gradient = operands(n, h, v, dtype)
        whole = products(hidden, weight, gradient)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, whole, products(hidden, weight, gradient)))
        for rows in (slice(2, 3), slice(12, 31)):
            logits, d_hidden, _ = products(hidden[rows], weight, gradient[rows])
            assert torch.equal(logits, whole[0][rows]) and torch.equal(d_hidden, whole[1][rows])
            d_weight = products(hidden, weight[rows], gradient[:, rows])[2]
            assert torch.equal(d_weight, whole[2][rows])


# ---- the choice

FEATURES, SAVED = amx.INTEL[1:]
AMD, INTEL = "AuthenticAMD", "GenuineIntel"


@pytest.mark.parametrize(
    "found, refusal, difference, engine, reason",
    [
        ((INTEL, FEATURES, SAVED), 0, None, "amx", None),
        ((AMD, FEATURES, SAVED), 0, None, "amx", None),
        ((AMD, 0, SAVED), 0, None, "avx512bf16", "has no AMX"),
        ((INTEL, 0, SAVED), 0, None, "fp32", "has no AMX"),
        ((INTEL, 1 << 24, SAVED), 0, None, "fp32", "has no AMX"),  # tiles of int8 only
        ((INTEL, 1 << 22, SAVED), 0, None, "fp32", "has no AMX"),
        ((INTEL, FEATURES, 1 << 17), 0, None, "fp32", "does not save"),
        ((INTEL, FEATURES, 1 << 18), 0, None, "fp32", "does not save"),
        ((INTEL, FEATURES, SAVED), errno.EINVAL, None, "fp32", "does not let this process use AMX: Linux has it from version 5.16"),
        ((INTEL, FEATURES, SAVED), errno.ENOSPC, None, "fp32", "does not let this process use AMX: the alternate signal stack"),
        ((INTEL, FEATURES, SAVED), errno.EIO, None, "fp32", "does not let this process use AMX: Input/output error"),
        ((INTEL, FEATURES, SAVED), 0, "3 elements differ", "fp32", "the AMX matmuls are wrong on this machine: 3 elements differ"),
        ((AMD, FEATURES, SAVED), 0, "3 elements differ", "avx512bf16", "the AMX matmuls are wrong on this machine"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:the AMX matmuls are wrong")
def test_the_engine_of_a_processor(found, refusal, difference, engine, reason):
    with amx.processor(found, refusal, difference):
        assert cpu_matmuls.engine() == cpu_matmuls.fastest_engine() == engine
        why_not = cpu_matmuls.engines()
        assert (why_not["amx"] is None) == (reason is None) and (reason or "") in (
            why_not["amx"] or ""
        )
        assert (
            cpu_matmuls.unavailable_reason() is None
            and why_not["avx512bf16"] is why_not["fp32"] is why_not["torch"] is None
        )
        assert cpu_matmuls.amx_mismatch() == (why_not["amx"] if difference else None)


@pytest.mark.parametrize("setting", ["auto", "", *cpu_matmuls.ENGINES])
def test_the_setting_names_the_engine(setting, monkeypatch):
    monkeypatch.setenv(cpu_matmuls.SETTING, setting)
    with amx.processor(amx.INTEL, difference=None):
        assert cpu_matmuls.engine() == (setting if setting in cpu_matmuls.ENGINES else "amx")
        assert cpu_matmuls.unavailable_reason() == (
            "GRPO_KERNELS_PRODUCTS=torch" if setting == "torch" else None
        )


@pytest.mark.parametrize(
    "setting, words",
    [
        ("amx", r"=amx: the system does not let .* auto, or take one of avx512bf16, fp32, torch\."),
        ("AMX", "=AMX: it is auto or one of"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting, words, monkeypatch):
    monkeypatch.setenv(cpu_matmuls.SETTING, setting)
    with amx.processor(amx.INTEL, refusal=errno.EPERM), pytest.raises(ValueError, match=words):
        cpu_matmuls.engine()


def test_amx_by_name_is_refused_if_it_is_wrong(monkeypatch):
    monkeypatch.setenv(cpu_matmuls.SETTING, "amx")
    words = (
        "=amx: the AMX matmuls are wrong on this machine: all differs; .* one of avx512bf16, fp32,"
        " torch"
    )
    with amx.processor(amx.INTEL, difference="all differs"), pytest.raises(ValueError, match=words):
        cpu_matmuls.engine()


def test_fp32_operands_are_split_only_where_torch_may_use_less_than_fp32(monkeypatch):
    def mixed():
        raise RuntimeError("you have used mix of the legacy and new APIs")

    answers = [
        (lambda: "highest", "avx512bf16"),
        (lambda: "high", "amx"),
        (lambda: "medium", "amx"),
        (mixed, "avx512bf16"),
    ]
    with amx.processor(amx.INTEL, difference=None), cpu_matmuls.using("amx"):
        for precision, engine in answers:
            monkeypatch.setattr(torch, "get_float32_matmul_precision", precision)
            assert (
                cpu_matmuls._engine_for(FP32) == engine and cpu_matmuls._engine_for(BF16) == "amx"
            )


# ---- the comparison before AMX is used


def test_right_amx_products_pass_and_release_their_tiles():
    """A thread keeps no tiles, which other code with tiles would find. The number of instructions bounds the time that the
    comparison takes on a processor: at 50 cycles each, 300,000 take 6 ms."""
    with amx.tiles(difference="as compared") as emulator:
        before = 0 if emulator is None else emulator.amx_executed()
        assert (
            cpu_matmuls.engines()["amx"] is None
            and cpu_matmuls.engine() == "amx"
            and cpu_matmuls.amx_mismatch() is None
        )
        if emulator is not None:
            assert (
                100_000 < emulator.amx_executed() - before < 300_000
                and emulator.amx_configured() == 0
            )


#: amx_break in amx_emulator.cpp -> a product in which it shows.
BROKEN_PROCESSORS = {"sums are replaced": 1, "last pair is left out": 2, "odd elements are left out": 3, "last row is not stored": 4,
                     "sums are rounded to bf16": 5}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN_PROCESSORS)
def test_a_broken_amx_unit_is_not_used(fault, monkeypatch, recwarn):
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    with amx.tiles(difference="as compared") as emulator:
        if emulator is None:
            pytest.skip("the AMX unit of this processor cannot be broken")
        emulator.amx_break(BROKEN_PROCESSORS[fault])
        try:
            assert cpu_matmuls.engine() == "fp32"
        finally:
            emulator.amx_break(0)
        assert (
            cpu_matmuls.engine() == cpu_matmuls.fastest_engine() == "fp32"
            and "are wrong" in cpu_matmuls.engines()["amx"]
        )
        hidden, weight, _ = operands(5, 70, 33)
        check(product(cpu_matmuls.logits, hidden, weight, None, shape=(5, 33)), hidden, weight.T)
    (warning,) = recwarn
    assert re.search(
        r"^the AMX matmuls are wrong on this machine: \d+ elements of \w+.* operands differ from the engine fp32 \(N = .*"
        r"GRPO_KERNELS_PRODUCTS=fp32 instead.*doctor", str(warning.message),
    )  # fmt: skip


def without_last(axis):
    """The operands without the last element of the inner dimension."""
    return lambda x: (
        x.narrow(axis, 0, x.shape[axis] - 1) if x.shape[axis] > 1 else torch.zeros_like(x)
    )


def up_to(axis, n):
    return lambda x: x.narrow(axis, 0, min(n, x.shape[axis]))


def broken_inner(change_of_axis):
    """Faults along the inner dimension of each product."""
    return {
        "logits": lambda made, hidden, weight, bias, out: made(change_of_axis(1)(hidden), change_of_axis(1)(weight), bias, out),
        "grad_hidden": lambda made, gradient, weight, out: made(change_of_axis(1)(gradient), change_of_axis(0)(weight), out),
        "grad_weight": lambda made, gradient, hidden, start, out: made(change_of_axis(0)(gradient), change_of_axis(0)(hidden), start, out),
    }  # fmt: skip


def broken_result(change):
    """A fault of the result of each product."""

    def broken(made, *arguments):
        made(*arguments)
        change(arguments[-1])

    return dict.fromkeys(("logits", "grad_hidden", "grad_weight"), broken)


def beyond(out):
    """Write the element after the last one."""
    out.as_strided(
        (1,), (1,), out.storage_offset() + (len(out) - 1) * out.stride(0) + out.shape[1]
    ).fill_(1.0)


def truncated(x):
    """fp32 as bf16 without rounding."""
    return (x.view(torch.int32) >> 16 << 16).view(FP32).bfloat16() if x.dtype == FP32 else x


def low_part_lost(x):
    return x.bfloat16().to(x.dtype)


#: Faults of an engine -> of some product: a call that has them, made with the right one.
BROKEN_ENGINES = {
    "the last row is not written": broken_result(lambda out: out[-1].fill_(cpu_matmuls.UNWRITTEN)),
    "the last column is 0": broken_result(lambda out: out[:, -1].zero_()),
    "it writes past the end": broken_result(beyond),
    "results are rounded to bf16": broken_result(lambda out: out.copy_(out.bfloat16())),
    "two rows change places": broken_result(lambda out: out.copy_(out.roll(1, 0))),
    "the last term is left out": broken_inner(without_last),
    "only the first block is summed": broken_inner(lambda axis: up_to(axis, 256)),
    "only the first 512 terms are summed": broken_inner(lambda axis: up_to(axis, 512)),
    "only the first part of the vocabulary": {"grad_hidden": broken_inner(lambda axis: up_to(axis, 16384))["grad_hidden"]},
    "the bias is left out": {"logits": lambda made, hidden, weight, bias, out: made(hidden, weight, None, out)},
    "the sum before is dropped": {"grad_weight": lambda made, gradient, hidden, start, out: made(gradient, hidden, None, out)},
    "the sum begins at what is there": {
        "grad_weight": lambda made, gradient, hidden, start, out: made(gradient, hidden, out.float() if start is None else start, out)
    },
    "a gradient is truncated": {
        "grad_hidden": lambda made, gradient, weight, out: made(truncated(gradient) if weight.dtype == BF16 else gradient, weight, out),
        "grad_weight": lambda made, gradient, hidden, start, out: made(
            truncated(gradient) if hidden.dtype == BF16 else gradient, hidden, start, out
        ),
    },
    "low parts are lost on the left": {
        "logits": lambda made, hidden, weight, bias, out: made(hidden, low_part_lost(weight), bias, out),
        "grad_hidden": lambda made, gradient, weight, out: made(low_part_lost(gradient), weight, out),
        "grad_weight": lambda made, gradient, hidden, start, out: made(low_part_lost(gradient), hidden, start, out),
    },
    "low parts are lost on the right": {
        "logits": lambda made, hidden, weight, bias, out: made(low_part_lost(hidden), weight, bias, out),
        "grad_hidden": lambda made, gradient, weight, out: made(gradient, low_part_lost(weight), out),
        "grad_weight": lambda made, gradient, hidden, start, out: made(gradient, low_part_lost(hidden), start, out),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "name"),
    [(fault, name) for fault, products in BROKEN_ENGINES.items() for name in products],
)
def test_a_broken_engine_is_found(fault, name, monkeypatch):
    """Each fault in each product. The right engine is another one that is right, so this needs no
    emulator.
    """
    made, broken = getattr(cpu_matmuls, name), BROKEN_ENGINES[fault][name]

    def call(*arguments, engine_name, threads):
        right = functools.partial(made, engine_name="fp32", threads=threads)
        broken(right, *arguments) if engine_name == "amx" else made(
            *arguments, engine_name=engine_name, threads=threads
        )

    other = [n for n in ("logits", "grad_hidden", "grad_weight") if n != name]
    for n in other:
        right = functools.partial(getattr(cpu_matmuls, n), engine_name="fp32")
        monkeypatch.setattr(
            cpu_matmuls, n, lambda *a, engine_name, threads, right=right: right(*a, threads=threads)
        )
    monkeypatch.setattr(cpu_matmuls, name, call)
    found = cpu_matmuls.first_difference("amx", "avx512bf16")
    assert (
        found is not None
        and f"elements of {name}" in found
        and "differ from the engine avx512bf16" in found
    )


def test_engines_that_differ_in_the_order_of_their_sums_are_equal_in_the_comparison():
    """Every partial sum is an integer below 2^24, which fp32 holds exactly."""
    assert cpu_matmuls.first_difference("fp32", "avx512bf16") is None
    for n, h, v in cpu_matmuls.SHAPES:
        for hidden, weight, gradient in ((0, 0, 1), (0, 1, 0), (1, 0, 0)):
            bits = [
                cpu_matmuls.WIDE if wide else cpu_matmuls.NARROW
                for wide in (hidden, weight, gradient)
            ]
            shapes = ((n, h), (v, h), (n, v))
            x, w, g = (
                cpu_matmuls.integers(*shape, b).abs().double()
                for shape, b in zip(shapes, bits, strict=True)
            )
            assert all(
                operand.min() >= 1 and (operand == operand.round()).all() for operand in (x, w, g)
            )
            more = 2.0**cpu_matmuls.LARGE
            assert max((x @ w.T).max() + more, (g @ w).max(), (g.T @ x).max() + more) < 2**24


def test_the_comparison_starts_no_threads():
    """Starting them, and waiting for them on a busy machine, takes longer than the products."""
    code = """
import os, torch
from grpo_kernels.core.backends import cpu_matmuls
torch.set_num_threads(8)
before = len(os.listdir("/proc/self/task"))
assert cpu_matmuls.first_difference("fp32", "avx512bf16") is None
assert len(os.listdir("/proc/self/task")) == before
"""
    finish(start(code, OMP_NUM_THREADS="8"))


def test_a_comparison_without_memory_fails(monkeypatch):
    def without_memory(*_, **how):
        raise MemoryError("no memory")

    monkeypatch.setattr(cpu_matmuls, "grad_weight", without_memory)
    assert (
        cpu_matmuls.first_difference("fp32", "avx512bf16")
        == "the comparison with avx512bf16 failed: MemoryError: no memory"
    )


class Counted:
    """A comparison that takes time and counts its calls."""

    def __init__(self, difference):
        self.calls, self.difference = [], difference

    def __call__(self, *engines):
        self.calls.append(engines)
        time.sleep(0.2)
        return self.difference


@pytest.mark.parametrize("difference", [None, "3 elements differ"])
def test_threads_that_come_first_compare_and_warn_once(difference, monkeypatch, recwarn):
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    compare = Counted(difference)
    with amx.processor(amx.INTEL), mock.patch.object(cpu_matmuls, "first_difference", compare):
        begin = threading.Barrier(8)

        def ask(i):
            begin.wait()
            return cpu_matmuls.engines()["amx"] if i % 4 == 3 else cpu_matmuls.engine()

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(8)))
        expected = "amx" if difference is None else "fp32"
        assert {a for i, a in enumerate(answers) if i % 4 != 3} == {expected}
        assert {a for i, a in enumerate(answers) if i % 4 == 3} == {cpu_matmuls.engines()["amx"]}
        for _ in range(3):
            assert cpu_matmuls.engine() == cpu_matmuls.fastest_engine() == expected
        assert compare.calls == [("amx", "fp32")]
        assert len(recwarn) == (0 if difference is None else 1)


def test_a_warning_that_is_an_error_is_raised_once(monkeypatch):
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    with amx.processor(amx.INTEL, difference="3 elements differ"), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="3 elements differ"):
            cpu_matmuls.engine()
        assert cpu_matmuls.engine() == "fp32"


@pytest.mark.parametrize(
    "setting, found",
    [
        ("auto", (AMD, 0, SAVED)), ("auto", (INTEL, 0, SAVED)), ("auto", (INTEL, FEATURES, 0)), ("avx512bf16", amx.INTEL),
        ("fp32", amx.INTEL), ("torch", amx.INTEL),
    ],
)  # fmt: skip
def test_nothing_is_asked_or_compared_without_amx_or_with_another_engine(
    setting, found, monkeypatch
):
    monkeypatch.setenv(cpu_matmuls.SETTING, setting)
    with (
        amx.processor(found),
        mock.patch.object(cpu_matmuls, "first_difference") as compare,
        mock.patch.object(cpu_matmuls._cpu, "request_amx_permission") as ask,
    ):
        assert cpu_matmuls.engine() != "amx"
        assert not compare.called and not ask.called


def test_asking_for_amx_says_why_it_is_refused():
    """Also where the processor has none, which the choice asks first."""
    answer = cpu_matmuls._cpu.request_amx_permission()
    assert cpu_matmuls._cpu.request_amx_permission() == answer and answer in {
        0,
        *cpu_matmuls.REFUSALS,
    }
    if cpu_matmuls._cpu.processor()[1] & cpu_matmuls.AMX_TILE == 0:
        assert answer != 0


def test_a_process_that_is_forked_during_the_choice_can_choose():
    """A thread of the parent holds the lock, which it never releases in the child."""
    code = """
import os, threading, time
from grpo_kernels.core.backends import cpu_matmuls
held, done = threading.Event(), threading.Event()
def hold():
    with cpu_matmuls._lock:
        held.set()
        done.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    os._exit(0 if cpu_matmuls.engine() in cpu_matmuls.ENGINES else 1)
for _ in range(600):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
done.set()
assert ended and status == 0
"""
    finish(start(code))


# ---- memory


#: Each product where the address space has room for its operands, and for `room` bytes of the memory that it works in.
WITHOUT_MEMORY = """
import contextlib, resource, statistics, sys
import torch
from grpo_kernels.core.backends import cpu_matmuls
from support import amx

def statm():
    return [int(pages) * resource.getpagesize() for pages in open("/proc/self/statm").read().split()[:2]]

def bf16(*shape):
    return torch.randn(shape).bfloat16()

engine, threads, n = sys.argv[1], int(sys.argv[2]), 100_000
torch.set_num_threads(threads)
# Bytes of an operand that is packed for all threads first: of logits and of d_weight.
packed = {"avx512bf16": (n * 2 * 272 * 4, 4 * n * 256), "amx": (n // 32 * 17 * 2 * 272 * 4, n // 4 * 2 * 272 * 4)}[engine]
stack = contextlib.ExitStack()
if engine == "amx":
    stack.enter_context(amx.tiles())
stack.enter_context(cpu_matmuls.using(engine))
small, tall, wide = torch.zeros(n, 1), torch.zeros(8 * n, 1), torch.zeros(n, 64)
calls = [  # (product, arguments, result, packed)
    (cpu_matmuls.grad_hidden, (torch.randn(n, 2), bf16(2, 1)), small, 0),
    (cpu_matmuls.logits, (bf16(n, 513), bf16(64, 513), None), wide, packed[0]),
    (cpu_matmuls.grad_weight, (torch.randn(8 * n, 1), bf16(8 * n, 1), None), torch.zeros(1, 1), packed[1]),
]
for product, arguments, out, packed in calls:
    product(*arguments, out)
    right = out.clone()
    # A thread that has ended may leave the 8 MiB of its stack behind, for the next call to find.
    rooms = (0, packed // 2, packed + (8 << 20 if threads == 1 else 1 << 20))
    for room in rooms[:2] if engine == "amx" and not packed else rooms:  # d_hidden by tiles works in a few MB
        used, refused = [], 0
        for _ in range(8):
            resource.setrlimit(resource.RLIMIT_AS, (statm()[0] + room, -1))  # anew, so that a leak finds room each time
            try:
                product(*arguments, out)
            except MemoryError:
                refused += 1
            used.append(statm())
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        # What the interpreter, malloc or a thread takes or gives back in between is one jump; a leak grows with each trial.
        assert refused > 4, (product.__name__, "found memory where there is none", room, used)
        for sizes in zip(*used):
            growths = [later - earlier for earlier, later in zip(sizes, sizes[1:])]
            assert statistics.median(growths) < 1 << 14, (product.__name__, "memory was not given back", room, growths)
    product(*arguments, out.zero_())
    assert torch.equal(out, right), product.__name__
stack.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize(
    ("engine", "threads"),
    [("avx512bf16", 1), ("avx512bf16", 2), pytest.param("amx", 2, marks=pytest.mark.slow)],
)
def test_a_product_without_memory_raises_memory_error_and_the_process_goes_on(engine, threads):
    # With a threshold of its own glibc's malloc gives large blocks back at once: none of an earlier call is found again. With one
    # arena none is found in the 64 MiB of address space that another one, of a thread that may have ended, has reserved.
    finish(
        start(
            WITHOUT_MEMORY,
            engine,
            str(threads),
            MALLOC_MMAP_THRESHOLD_=str(1 << 17),
            MALLOC_ARENA_MAX="1",
        )
    )
