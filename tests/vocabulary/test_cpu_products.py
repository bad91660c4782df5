"""The products of bf16 and of fp32 operands against float64 products of the same operands.

The rule: an error is at most a few fp32 roundings of the sum of the absolute terms; a result rounded to bf16 is 1000 times
worse than that."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from grpo_kernels.vocabulary.backends import cpu_products
from support.processes import finish, start

if cpu_products.available() is not None:
    pytest.skip(cpu_products.available() or "", allow_module_level=True)

Tensor = torch.Tensor

TOLERANCE = 4e-7
FP32, BF16 = torch.float32, torch.bfloat16
# N, H, V: single elements, tails of every tile and panel, several blocks along each inner dimension (256 or 512 long), odd pairs.
SHAPES = [
    (1, 1, 1),
    (1, 7, 1031),
    (7, 63, 65),
    (63, 65, 7),
    (65, 1000, 1031),
    (64, 128, 192),
    (1031, 65, 63),
    (12, 1537, 512),
    (3, 640, 2049),
]


KINDS = [(BF16, BF16), (BF16, FP32), (FP32, FP32)]  # operands, gradient


def operands(n: int, h: int, v: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight and an fp32 gradient."""
    return torch.randn(n, h).to(dtype), torch.randn(v, h).to(dtype), torch.randn(n, v)


def nan(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = nan(hidden.shape[0], weight.shape[0])
    cpu_products.logits(hidden, weight, bias, out)
    return out


def d_hidden_of(gradient: Tensor, weight: Tensor) -> Tensor:
    out = nan(gradient.shape[0], weight.shape[1])
    cpu_products.d_hidden(gradient, weight, out)
    return out


def d_weight_of(gradient: Tensor, hidden: Tensor, dtype: torch.dtype = FP32) -> Tensor:
    out = nan(gradient.shape[1], hidden.shape[1]).to(dtype)
    cpu_products.d_weight(gradient, hidden, None, out)
    return out


def check(got: Tensor, a: Tensor, b: Tensor, start: Tensor | None = None) -> None:
    """got = start + a @ b."""
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if start is not None:
        exact, size = exact + start.double(), size + start.double().abs()
    worst = ((got.double() - exact).abs() / size).max().item()
    assert worst <= TOLERANCE, worst


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("n, h, v", SHAPES)
def test_logits(n: int, h: int, v: int, dtype: torch.dtype) -> None:
    hidden, weight, _ = operands(n, h, v, dtype)
    bias = torch.randn(v)
    check(logits_of(hidden, weight), hidden, weight.T)
    check(logits_of(hidden, weight, bias), hidden, weight.T, bias)


@pytest.mark.parametrize("dtype, of_gradient", KINDS)
@pytest.mark.parametrize("n, h, v", SHAPES)
def test_d_hidden(n: int, h: int, v: int, dtype: torch.dtype, of_gradient: torch.dtype) -> None:
    _, weight, gradient = operands(n, h, v, dtype)
    gradient = gradient.to(of_gradient)
    check(d_hidden_of(gradient, weight), gradient.to(dtype), weight)


@pytest.mark.parametrize("dtype, of_gradient", KINDS)
@pytest.mark.parametrize("n, h, v", SHAPES)
def test_d_weight(n: int, h: int, v: int, dtype: torch.dtype, of_gradient: torch.dtype) -> None:
    """From 0, on top of what is there, and on top of a sum elsewhere; in fp32, and rounded once at the end."""
    hidden, _, gradient = operands(n, h, v, dtype)
    gradient = gradient.to(of_gradient)
    first = d_weight_of(gradient, hidden)
    check(first, gradient.to(dtype).T, hidden)
    start = torch.randn(v, h)
    total = start.clone()
    cpu_products.d_weight(gradient, hidden, total, total)
    check(total, gradient.to(dtype).T, hidden, start)
    rounded = nan(v, h).bfloat16()
    kept = start.clone()
    cpu_products.d_weight(gradient, hidden, kept, rounded)
    assert torch.equal(rounded, total.bfloat16()) and torch.equal(kept, start)
    assert torch.equal(d_weight_of(gradient, hidden, BF16), first.bfloat16())


def test_the_result_is_not_rounded_to_bf16() -> None:
    hidden, weight, gradient = operands(16, 256, 300)
    for got in (logits_of(hidden, weight), d_hidden_of(gradient, weight), d_weight_of(gradient, hidden)):
        assert (got != got.bfloat16().float()).float().mean() > 0.9


def test_an_fp32_gradient_counts_as_its_bf16_rounding() -> None:
    hidden, weight, gradient = operands(37, 129, 601)
    gradient *= torch.logspace(-30, 30, 601)
    rounded = gradient.bfloat16()
    assert torch.equal(d_hidden_of(gradient, weight), d_hidden_of(rounded, weight))
    assert torch.equal(d_weight_of(gradient, hidden), d_weight_of(rounded, hidden))


def inner_part(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix of NaN inside a larger one: odd stride, odd offset."""
    return torch.full((rows + 2, columns + 5), torch.nan, dtype=dtype)[1 : rows + 1, 3 : columns + 3]


def frame_is_nan(part: Tensor) -> bool:
    whole = part._base
    assert whole is not None
    return int(whole.isnan().sum()) == whole.numel() - part.numel()


@pytest.mark.parametrize("dtype, of_gradient", KINDS)
def test_strided_operands_and_results(dtype: torch.dtype, of_gradient: torch.dtype) -> None:
    n, h, v = 29, 581, 1091
    hidden, weight, gradient = operands(n, h, v, dtype)
    gradient = gradient.to(of_gradient)
    part_hidden = inner_part(n, h, dtype).copy_(hidden)
    part_weight = inner_part(v, h, dtype).copy_(weight)
    part_gradient = inner_part(n, v, of_gradient).copy_(gradient)
    out, d_hidden, d_weight = (inner_part(a, b, torch.float32) for a, b in ((n, v), (n, h), (v, h)))
    start, rounded = inner_part(v, h, torch.float32).copy_(torch.randn(v, h)), inner_part(v, h, torch.bfloat16)
    cpu_products.logits(part_hidden, part_weight, None, out)
    cpu_products.d_hidden(part_gradient, part_weight, d_hidden)
    cpu_products.d_weight(part_gradient, part_hidden, None, d_weight)
    cpu_products.d_weight(part_gradient, part_hidden, start, rounded)
    assert torch.equal(out, logits_of(hidden, weight)) and frame_is_nan(out)
    assert torch.equal(d_hidden, d_hidden_of(gradient, weight)) and frame_is_nan(d_hidden)
    assert torch.equal(d_weight, d_weight_of(gradient, hidden)) and frame_is_nan(d_weight)
    total = start.clone()
    cpu_products.d_weight(gradient, hidden, total, total)
    assert torch.equal(rounded, total.bfloat16()) and frame_is_nan(rounded) and frame_is_nan(start)


@pytest.mark.parametrize("dtype, of_gradient", KINDS)
@pytest.mark.parametrize("n, h, v", [(1, 7, 131), (7, 63, 65), (65, 1000, 131), (3, 640, 1045)])
def test_nothing_is_read_past_an_end(n: int, h: int, v: int, dtype: torch.dtype, of_gradient: torch.dtype) -> None:
    """Every operand and result ends where a protected page begins: one byte too far and the process dies."""
    libc = ctypes.CDLL(None)

    def at_end_of_page(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        size = rows * columns * dtype.itemsize
        readable = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, readable + mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert libc.mprotect(ctypes.c_void_p(address + readable), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        tensor = torch.frombuffer(memory, dtype=dtype, count=rows * columns, offset=readable - size)
        return tensor.view(rows, columns).copy_(torch.randn(rows, columns))

    hidden, weight = at_end_of_page(n, h, dtype), at_end_of_page(v, h, dtype)
    gradient, bias = at_end_of_page(n, v, of_gradient), at_end_of_page(1, v, torch.float32)[0]
    out, d_hidden, d_weight = (at_end_of_page(a, b, torch.float32) for a, b in ((n, v), (n, h), (v, h)))
    rounded = at_end_of_page(v, h, torch.bfloat16)
    cpu_products.logits(hidden, weight, bias, out)
    cpu_products.d_hidden(gradient, weight, d_hidden)
    cpu_products.d_weight(gradient, hidden, d_weight, rounded)
    cpu_products.d_weight(gradient, hidden, d_weight, d_weight)
    assert torch.equal(rounded, d_weight.bfloat16())
    assert torch.equal(out, logits_of(hidden, weight, bias))
    assert torch.equal(d_hidden, d_hidden_of(gradient, weight))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_reach_their_rows_and_columns_only(bad: float, dtype: torch.dtype) -> None:
    n, h, v = 9, 70, 130
    hidden, weight, gradient = operands(n, h, v, dtype)
    logits, d_hidden, d_weight = logits_of(hidden, weight), d_hidden_of(gradient, weight), d_weight_of(gradient, hidden)

    hidden[4, 69], gradient[5, 129] = bad, bad
    broken = logits_of(hidden, weight)
    assert not broken[4].isfinite().any()
    broken[4] = logits[4]
    assert torch.equal(broken, logits)

    broken = d_hidden_of(gradient, weight)
    assert not broken[5].isfinite().any()
    broken[5] = d_hidden[5]
    assert torch.equal(broken, d_hidden)

    broken = d_weight_of(gradient, hidden)
    assert not broken[129].isfinite().any() and not broken[:, 69].isfinite().any()
    broken[129], broken[:, 69] = d_weight[129], d_weight[:, 69]
    assert torch.equal(broken, d_weight)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    hidden, weight, gradient = operands(45, 700, 2100, dtype)
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        results.append((logits_of(hidden, weight), d_hidden_of(gradient, weight), d_weight_of(gradient, hidden)))
    for other in results[1:]:
        for one_thread, several in zip(results[0], other, strict=True):
            assert torch.equal(one_thread, several)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(3, 8), slice(12, 31)])
def test_a_row_does_not_depend_on_the_others(rows: slice, dtype: torch.dtype) -> None:
    hidden, weight, gradient = operands(31, 700, 1100, dtype)
    assert torch.equal(logits_of(hidden[rows], weight), logits_of(hidden, weight)[rows])
    assert torch.equal(d_hidden_of(gradient[rows], weight), d_hidden_of(gradient, weight)[rows])
    assert torch.equal(d_weight_of(gradient[:, rows], hidden), d_weight_of(gradient, hidden)[rows])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_no_rows(dtype: torch.dtype) -> None:
    hidden, weight, gradient = operands(0, 70, 100, dtype)
    assert logits_of(hidden, weight).shape == (0, 100)
    assert d_hidden_of(gradient, weight).shape == (0, 70)
    assert torch.equal(d_weight_of(gradient, hidden), torch.zeros(100, 70))


#: Each product where the address space has room for its operands, and for `room` bytes of the memory that it works in.
WITHOUT_MEMORY = """
import resource, statistics, sys
import torch
from grpo_kernels.vocabulary.backends import cpu_products

def statm():
    return [int(pages) * resource.getpagesize() for pages in open("/proc/self/statm").read().split()[:2]]

def bf16(*shape):
    return torch.randn(shape).bfloat16()

threads, n = int(sys.argv[1]), 100_000
torch.set_num_threads(threads)
small, tall, wide = torch.zeros(n, 1), torch.zeros(8 * n, 1), torch.zeros(n, 64)
calls = [  # (product, arguments, result, bytes of an operand that is packed for all threads first)
    (cpu_products.d_hidden, (torch.randn(n, 2), bf16(2, 1)), small, 0),
    (cpu_products.logits, (bf16(n, 513), bf16(64, 513), None), wide, 2 * n * 272 * 4),
    (cpu_products.d_weight, (torch.randn(8 * n, 1), bf16(8 * n, 1), None), torch.zeros(1, 1), 4 * n * 256),
]
for product, arguments, out, packed in calls:
    product(*arguments, out)
    right = out.clone()
    # A thread that has ended may leave the 8 MiB of its stack behind, for the next call to find.
    for room in (0, packed // 2, packed + (8 << 20 if threads == 1 else 1 << 20)):
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
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_product_without_memory_raises_memory_error_and_the_process_goes_on(threads: int) -> None:
    # With a threshold of its own glibc's malloc gives large blocks back at once: none of an earlier call is found again. With one
    # arena none is found in the 64 MiB of address space that another one, of a thread that may have ended, has reserved.
    finish(start(WITHOUT_MEMORY, str(threads), MALLOC_MMAP_THRESHOLD_=str(1 << 17), MALLOC_ARENA_MAX="1"))


def test_wrong_operands_are_refused() -> None:
    hidden, weight, gradient = operands(4, 8, 16)
    for bad_hidden, bad_weight, out in (
        (hidden.float(), weight, nan(4, 16)),
        (hidden, weight[:, :7], nan(4, 16)),
        (hidden, weight, nan(4, 15)),
        (hidden, weight.T.contiguous().T, nan(4, 16)),
        (hidden, weight, nan(4, 16).double()),
    ):
        with pytest.raises(ValueError, match=r"the C\+\+ kernels take"):
            cpu_products.logits(bad_hidden, bad_weight, None, out)
    with pytest.raises(ValueError, match=r"the C\+\+ kernels take"):
        cpu_products.d_hidden(gradient.half(), weight, nan(4, 8))
    for begin, out in ((None, nan(16, 8).half()), (nan(16, 8).bfloat16(), nan(16, 8))):
        with pytest.raises(ValueError, match=r"the C\+\+ kernels take"):
            cpu_products.d_weight(gradient, hidden, begin, out)
    with pytest.raises(ValueError, match=r"the C\+\+ kernels take"):  # a bf16 gradient beside fp32 operands
        cpu_products.d_hidden(gradient.bfloat16(), weight.float(), nan(4, 8))
