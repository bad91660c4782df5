"""Random calls of the C++ kernels with hostile sizes, strides, values and addresses; run by
test_sanitizers.py.

    PYTHONPATH=tests:. python tests/rows/fuzz_kernels.py SEED FIRST CALLS [EMULATOR]

Everything that a kernel gets lies between protected pages, next to the end of one or the beginning
of the other, and what it must not write is read-only; rows that it must not read are protected,
too. So an access one byte too far ends the process, which is why this is one of its own. Results
are compared with float64 as the tests of the kernels do it. Every instruction set runs, AMX by way
of the library EMULATOR. Call number i depends only on SEED and i.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import random
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from grpo_kernels.core.backends import cpu, cpu_matmuls
from grpo_kernels.core.softmax import RowTransform
from support import amx
from support.bits import same_bits
from support.kernel_rows import (
    DTYPES,
    KINDS,
    Rows,
    assert_near_float64,
    ways_to_compute,
    with_reference,
)

Draw = random.Random

PAGE = mmap.PAGESIZE
#: Of bytes that nobody has written: a number near the end of fp32 and bf16, a NaN of fp16, an id
#: that no vocabulary has.
UNWRITTEN = 0x7F
libc = ctypes.CDLL(None, use_errno=True)


def protect(address, size, mode):
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mode) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


class Memory:
    """Tensors between protected pages."""

    def __init__(self, size=64 << 20):
        self.draw, self.bytes = Draw(), torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        self.begin()

    def begin(self):
        """Forget what was taken."""
        self.used = PAGE
        self.taken = []  # pages, where the tensor begins in them, the tensor
        protect(self.bytes.data_ptr(), len(self.bytes), 0)

    def strided(self, shape, strides, dtype):
        extent = (
            1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
            if math.prod(shape)
            else 0
        )
        size = extent * dtype.itemsize
        pages = self.bytes[self.used :][: max(-(-size // PAGE), 1) * PAGE]
        self.used += len(pages) + PAGE
        protect(pages.data_ptr(), len(pages), mmap.PROT_READ | mmap.PROT_WRITE)
        first = self.draw.choice([0, len(pages) - size])
        made = pages.fill_(UNWRITTEN)[first : first + size].view(dtype).as_strided(shape, strides)
        self.taken.append((pages, first, made))
        return made

    def empty(self, *shape, dtype=torch.float32, **_):
        """Stands in for torch.empty."""
        shape = shape if not shape or isinstance(shape[0], int) else tuple(shape[0])
        return self.strided(shape, [math.prod(shape[i + 1 :]) for i in range(len(shape))], dtype)

    def holding(self, x):
        return self.strided(x.shape, x.stride(), x.dtype).copy_(x)

    def matrix(self, rows, columns, dtype):
        """Random numbers, rows apart or not."""
        stride = columns + self.draw.choice([0, 0, 1, 16, 37])
        return self.strided((rows, columns), (stride, 1), dtype).copy_(torch.randn(rows, columns))

    def rows(self, x, layout):
        """A copy of x [A, T, V] as rows of logits may lie."""
        (A, T, V), size, gap = x.shape, x.element_size(), self.draw.randrange(70)
        step = {"gaps": V + gap, "pages": -(-V * size // PAGE) * PAGE // size}.get(layout, V)
        strides = (
            (step, step * A, 1)
            if layout == "transposed"
            else (step * T + gap * (layout == "gaps"), step, 1)
        )
        return self.strided((A, T, V), strides, x.dtype).copy_(x)

    @contextmanager
    def guarded(self, *written, unread=()):
        """While a kernel runs: what it makes is taken from here, vectors that it is given are
        copied to here, and of the rest it may write only `written`. `unread`: rows on pages of
        their own.
        """
        vector, table = cpu.vector_argument, cpu.table_argument

        def here(x):
            inside = x is None or 0 <= x.data_ptr() - self.bytes.data_ptr() < len(self.bytes)
            return x if inside or not x.is_contiguous() else self.holding(x)

        before, of_written = len(self.taken), {x.data_ptr() for x in written}
        for pages, first, _ in self.taken:
            if pages.data_ptr() + first not in of_written:
                protect(pages.data_ptr(), len(pages), mmap.PROT_READ)
        for row in unread:
            protect(row.data_ptr() // PAGE * PAGE, -(-row.nbytes // PAGE) * PAGE, 0)
        with (
            mock.patch.object(torch, "empty", self.empty),
            mock.patch.object(
                cpu, "vector_argument", lambda name, x, *more: vector(name, here(x), *more)
            ),
            mock.patch.object(
                cpu, "table_argument", lambda name, x, *more: table(name, here(x), *more)
            ),
        ):
            yield
        for i, (pages, first, x) in enumerate(self.taken):
            protect(pages.data_ptr(), len(pages), mmap.PROT_READ | mmap.PROT_WRITE)
            if i >= before or pages.data_ptr() + first in of_written:
                elements = torch.zeros(len(pages), dtype=torch.bool)
                strides = [stride * x.itemsize for stride in x.stride()]
                elements.as_strided((*x.shape, x.itemsize), (*strides, 1), first).fill_(True)
                assert (elements | (pages == UNWRITTEN)).all(), (
                    f"bytes beside {list(x.shape)} {x.stride()} were written"
                )


def threads(draw):
    """How many the module is asked to take; torch itself keeps to one."""
    count = draw.choice([1, 2, 3, 8, 1000])
    torch.get_num_threads = lambda: count


# ---- rows of logits

VOCABULARIES = [1, 2, 3, 15, 16, 17, 33, 64, 65, 129, 1031, 2047, 2048, 2049, 4100, 16500]
WILD = torch.tensor([math.nan, math.inf, -math.inf, 1e4, -1e4, 0.0])


def numbers(kind, *shape):
    x, rare = 3.0 * torch.randn(shape), torch.rand(shape)
    if kind == "wild":
        return torch.where(rare < 0.02, WILD[torch.randint(len(WILD), shape)], x)
    return torch.where(rare < 0.4, -math.inf, x) if kind == "masked" else x


def transform(draw, n, absurd):
    scale = draw.choice([30.0, 1e-4, 0.0, math.nan, math.inf] if absurd else [1.0, 1.0, 0.5, -2.0])
    inverse = torch.tensor([1e-2, 1e3, math.nan, 0.0] if absurd else [1.0, 1 / 0.7, 2.0])
    t = inverse[torch.randint(len(inverse), (n,))]
    return RowTransform(
        scale,
        draw.choice([0.0, 1e-3, 1e30] if absurd else [0.0, 0.0, 30.0]),
        t if draw.random() < 0.5 else float(inverse[0]),
    )


def drawn_rows(draw, absurd):
    """A call, and which of its rows it is about."""
    vocab = draw.choice(VOCABULARIES)
    A, T = draw.randint(1, 3), draw.randint(1, 5 if vocab < 2000 else 2)
    n, kind = A * T, draw.choice(["plain", "plain", "wild", "masked"])
    lo = draw.randrange(n)
    nowhere = torch.tensor([-1, -100, vocab, 2**62, -(2**63)])[torch.randint(5, (n,))]
    targets = torch.where(torch.rand(n) < 0.1, nowhere, torch.randint(vocab, (n,)))
    read = torch.rand(n) < 0.8 if draw.random() < 0.5 else None
    r = Rows(
        numbers(kind, A, T, vocab).to(draw.choice(DTYPES)),
        transform(draw, n, absurd),
        None,
        read,
        targets,
    )
    if draw.random() < 0.5:
        other = r.logits.float() if draw.random() < 0.5 else numbers(kind, A, T, vocab)
        r = with_reference(r, other.to(draw.choice(DTYPES)), draw.choice(KINDS))
    r.upstream = {name: x * (torch.rand(n) < 0.8) for name, x in r.upstream.items()}
    return r, (lo, lo if draw.random() < 0.05 else draw.randint(lo + 1, n))


def gradient_for(memory, logits, layout):
    """Where the gradient goes: elsewhere, into the logits, or narrower there."""
    dtype, where = (
        memory.draw.choice(DTYPES),
        memory.draw.choice(["apart", "in place", "narrower, in place"]),
    )
    if where == "apart":
        return memory.rows(torch.full(logits.shape, 7.0, dtype=dtype), layout)
    return (
        logits.view(dtype)[..., : logits.shape[-1]]
        if where != "in place" and dtype.itemsize < logits.itemsize
        else logits
    )


def rows(memory):
    """Statistics, gradients and losses of rows, beside a second stream or not."""
    draw = memory.draw
    absurd, layouts = (
        draw.random() < 0.2,
        draw.choices(["dense", "gaps", "transposed", "pages"], k=3),
    )
    r, part = drawn_rows(draw, absurd)
    print(
        f"rows {part} of {list(r.logits.shape)} {layouts}, {r.logits.dtype}, {r.transform}",
        flush=True,
    )
    outside = [i for i in range(r.count) if not part[0] <= i < part[1]]
    unread = [i for i in range(r.count) if i in outside or (r.mask is not None and not r.mask[i])]
    for way, one in ways_to_compute(r):
        found = []
        for isa in cpu._cpu.isas():
            cpu._cpu.use_isa(isa)
            memory.begin()
            logits, second, hidden = memory.rows(r.logits, layouts[0]), r.reference, list[Tensor]()
            if second is not None:
                second = second._replace(logits=memory.rows(second.logits, layouts[1]))
            out = gradient_for(memory, logits, layouts[2])
            apart = out.data_ptr() != logits.data_ptr()
            for x, layout, gone in (
                (logits, layouts[0], unread if apart else outside),
                (second and second.logits, layouts[1], unread),
            ):
                hidden += (
                    [x[divmod(i, x.shape[1])] for i in gone]
                    if x is not None and layout == "pages"
                    else []
                )
            before = out.clone()
            with memory.guarded(out, unread=hidden):
                values, _ = way(
                    cpu.Kernels(), replace(one, logits=logits, reference=second), out, part
                )
            gradient, kept = (x.reshape(r.count, -1) if r.count else x for x in (out, before))
            assert same_bits(gradient[outside], kept[outside]), "rows that were not asked for"
            found.append(
                ({name: x.clone() for name, x in values.items()}, gradient[slice(*part)].clone())
            )
        if not absurd:
            assert_near_float64(one.at(*part), *found)


# ---- products

SIZES = (1, 2, 5, 6, 7, 31, 33, 63, 64, 65, 129, 191, 193, 511, 513, 1030, 0)


def products(memory, engines):
    """Of bf16 or fp32 operands; d_weight is added to what is there."""
    from test_cpu_products import check  # which is for processors that have them

    (n, h, v), engine, dtype = (
        memory.draw.choices(SIZES, k=3),
        memory.draw.choice(engines),
        memory.draw.choice(DTYPES[:2]),
    )
    print(f"products by {engine}, {n} x {h} x {v}, {dtype}", flush=True)
    hidden, weight, gradient = (
        memory.matrix(n, h, dtype),
        memory.matrix(v, h, dtype),
        memory.matrix(n, v, torch.float32),
    )
    bias, total, rounded = (
        memory.holding(torch.randn(v)),
        memory.matrix(v, h, torch.float32),
        gradient.to(dtype),
    )
    start = total.clone()
    for function, operands, out, (a, b), added in (
        (
            cpu_matmuls.logits,
            (hidden, weight, bias),
            memory.matrix(n, v, torch.float32),
            (hidden, weight.T),
            bias,
        ),
        (
            cpu_matmuls.grad_hidden,
            (gradient, weight),
            memory.matrix(n, h, torch.float32),
            (rounded, weight),
            0.0,
        ),
        (cpu_matmuls.grad_weight, (gradient, hidden, total), total, (rounded.T, hidden), start),
    ):
        with memory.guarded(out):
            function(*operands, out, engine_name=engine)
        check(out, a, b, added, engine)


def main(seed, first, calls, emulator=""):
    engines = [name for name in cpu._cpu.matmul_engines() if name != "amx"]
    if emulator:
        amx.install(Path(emulator))
        cpu._cpu.request_amx_permission()  # granted where the processor has them
        engines = cpu._cpu.matmul_engines()
    torch.set_num_threads(1)
    memory = Memory()
    for i in range(int(first), int(first) + int(calls)):
        memory.begin()
        memory.draw.seed(f"{seed} {i}")
        torch.manual_seed(memory.draw.randrange(2**60))
        threads(memory.draw)
        print(i, end=": ", flush=True)
        if i % 3 == 2 and cpu._cpu.has_matmuls():
            products(memory, engines)
        else:
            rows(memory)
    print(f"{calls} calls were right")


if __name__ == "__main__":
    main(*sys.argv[1:])
