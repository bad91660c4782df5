"""The products of bf16 and of fp32 operands against float64 products of the same operands.

The rule: an error is at most a few fp32 roundings of the sum of the absolute terms; a result rounded to bf16 is 1000 times
worse than that. Strides, and what lies past an end: fuzz_kernels.py."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import pytest
import torch

from grpo_kernels.rows.backends import cpu_products
from support import amx
from support.processes import finish, start

if cpu_products.available() is not None:
    pytest.skip(cpu_products.available() or "", allow_module_level=True)


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
        stack.enter_context(cpu_products.using(engine))
        assert cpu_products._engine_for(dtype) == engine
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
        product(cpu_products.logits, hidden, weight, None, shape=(len(hidden), len(weight))),
        product(cpu_products.d_hidden, gradient, weight, shape=tuple(hidden.shape)),
        product(cpu_products.d_weight, gradient, hidden, None, shape=tuple(weight.shape)),
    )


def check(got, a, b, start=0.0, engine=""):
    """got = start + a @ b."""
    begin = torch.as_tensor(start).double()
    exact, size = begin + a.double() @ b.double(), begin.abs() + a.double().abs() @ b.double().abs()
    split = a.dtype == FP32 and (engine or cpu_products._engine_for(FP32)) == "amx"
    stored = 2.0**-8 * exact.abs() if got.dtype == BF16 else 0.0
    beyond = (got.double() - exact).abs() - stored - (SPLIT_TOLERANCE if split else TOLERANCE) * size
    assert (beyond <= 1e-37).all(), beyond.max()


@pytest.mark.parametrize("n, h, v", SHAPES)
def test_values(n, h, v, dtype):
    """The weight's gradient from 0, on top of what is there and of a sum elsewhere; in fp32, and rounded once at the end."""
    hidden, weight, gradient = operands(n, h, v, dtype)
    bias, start = torch.randn(v), torch.randn(v, h)
    check(product(cpu_products.logits, hidden, weight, bias, shape=(n, v)), hidden, weight.T, bias)
    for of in (gradient, gradient.to(dtype)):
        logits, d_hidden, d_weight = products(hidden, weight, of)
        check(logits, hidden, weight.T)
        check(d_hidden, of.to(dtype), weight)
        check(d_weight, of.to(dtype).T, hidden)
        total = start.clone()
        cpu_products.d_weight(of, hidden, total, total)
        check(total, of.to(dtype).T, hidden, start)
        rounded = product(cpu_products.d_weight, of, hidden, start, shape=(v, h), dtype=BF16)
        assert torch.equal(rounded, total.bfloat16())
        assert torch.equal(product(cpu_products.d_weight, of, hidden, None, shape=(v, h), dtype=BF16), d_weight.bfloat16())


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
    "found, allowed, agree, engine, reason",
    [
        ((INTEL, FEATURES, SAVED), True, True, "amx", None),
        ((AMD, FEATURES, SAVED), True, True, "amx", None),
        ((AMD, 0, SAVED), True, True, "avx512bf16", "has no AMX"),
        ((INTEL, 0, SAVED), True, True, "fp32", "has no AMX"),
        ((INTEL, 1 << 24, SAVED), True, True, "fp32", "has no AMX"),  # tiles of int8 only
        ((INTEL, FEATURES, 1 << 17), True, True, "fp32", "does not save"),
        ((INTEL, FEATURES, SAVED), False, True, "fp32", "does not let"),
        ((INTEL, FEATURES, SAVED), True, False, "fp32", "differ"),
    ],
)
def test_the_engine_of_a_processor(found, allowed, agree, engine, reason):
    with amx.processor(found, allowed, agree):
        assert cpu_products.engine() == cpu_products.automatic() == engine
        why_not = cpu_products.engines()
        assert (why_not["amx"] is None) == (reason is None) and (reason or "") in (why_not["amx"] or "")
        assert cpu_products.available() is None and why_not["avx512bf16"] is why_not["fp32"] is why_not["torch"] is None


@pytest.mark.parametrize("setting", ["auto", "", *cpu_products.ENGINES])
def test_the_setting_names_the_engine(setting, monkeypatch):
    monkeypatch.setenv(cpu_products.SETTING, setting)
    with amx.processor(amx.INTEL):
        assert cpu_products.engine() == (setting if setting in cpu_products.ENGINES else "amx")
        assert cpu_products.available() == ("GRPO_KERNELS_PRODUCTS=torch" if setting == "torch" else None)


@pytest.mark.parametrize(
    "setting, words",
    [
        ("amx", r"=amx: the system does not let .* auto, or take one of avx512bf16, fp32, torch\."),
        ("AMX", "=AMX: it is auto or one of"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting, words, monkeypatch):
    monkeypatch.setenv(cpu_products.SETTING, setting)
    with amx.processor((INTEL, FEATURES, SAVED), allowed=False), pytest.raises(ValueError, match=words):
        cpu_products.engine()


def test_fp32_operands_are_split_only_where_torch_may_use_less_than_fp32(monkeypatch):
    def mixed():
        raise RuntimeError("you have used mix of the legacy and new APIs")

    answers = [(lambda: "highest", "avx512bf16"), (lambda: "high", "amx"), (lambda: "medium", "amx"), (mixed, "avx512bf16")]
    with amx.processor(amx.INTEL), cpu_products.using("amx"):
        for precision, engine in answers:
            monkeypatch.setattr(torch, "get_float32_matmul_precision", precision)
            assert cpu_products._engine_for(FP32) == engine and cpu_products._engine_for(BF16) == "amx"


def test_tiles_agree_and_are_released():
    """What the first use checks on a processor with AMX; and a thread keeps no tiles, which other code with tiles would find."""
    with amx.tiles(agree=None) as emulator:
        assert cpu_products.engines()["amx"] is None and cpu_products.engine() == "amx"
        if emulator is not None:
            assert emulator.amx_executed() > 100_000 and emulator.amx_configured() == 0


# ---- memory


#: Each product where the address space has room for its operands, and for `room` bytes of the memory that it works in.
WITHOUT_MEMORY = """
import contextlib, resource, statistics, sys
import torch
from grpo_kernels.rows.backends import cpu_products
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
stack.enter_context(cpu_products.using(engine))
small, tall, wide = torch.zeros(n, 1), torch.zeros(8 * n, 1), torch.zeros(n, 64)
calls = [  # (product, arguments, result, packed)
    (cpu_products.d_hidden, (torch.randn(n, 2), bf16(2, 1)), small, 0),
    (cpu_products.logits, (bf16(n, 513), bf16(64, 513), None), wide, packed[0]),
    (cpu_products.d_weight, (torch.randn(8 * n, 1), bf16(8 * n, 1), None), torch.zeros(1, 1), packed[1]),
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
    ("engine", "threads"), [("avx512bf16", 1), ("avx512bf16", 2), pytest.param("amx", 2, marks=pytest.mark.slow)]
)
def test_a_product_without_memory_raises_memory_error_and_the_process_goes_on(engine, threads):
    # With a threshold of its own glibc's malloc gives large blocks back at once: none of an earlier call is found again. With one
    # arena none is found in the 64 MiB of address space that another one, of a thread that may have ended, has reserved.
    finish(start(WITHOUT_MEMORY, engine, str(threads), MALLOC_MMAP_THRESHOLD_=str(1 << 17), MALLOC_ARENA_MAX="1"))
