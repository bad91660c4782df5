"""Random calls of the compiled module with hostile sizes, strides, values and addresses; run by test_sanitizers.py.

    python tests/vocabulary/fuzz_kernels.py MODULE SEED FIRST CALLS [EMULATOR]

Every buffer lies between protected pages, next to the end of one or the beginning of the other; rows that a call must not read are
protected, too. So an access one byte too far ends the process. That is why this is a process of its own (without torch, so that the
threads are those of the module). Results are compared with float64 where the values allow it, and all other bytes must not change.
Every instruction set runs, AMX by way of the library EMULATOR. Call number i depends only on SEED and i."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

PAGE = mmap.PAGESIZE
FP32, BF16, FP16 = range(3)
STORED: tuple[Any, ...] = (np.float32, np.uint16, np.float16)
SIZE = (4, 2, 2)
libc = ctypes.CDLL(None, use_errno=True)


# ---- memory


def protect(address: int, size: int, mode: int) -> None:
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mode) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


@dataclass(eq=False)
class Buffer:
    address: int
    bytes: Array  # the requested part
    pages: Array  # the accessible part

    def typed(self, dtype: Any) -> Array:
        return self.bytes.view(dtype)


class Memory:
    """Buffers between protected pages."""

    def __init__(self, size: int) -> None:
        self.map = mmap.mmap(-1, size)
        self.all = np.frombuffer(self.map, np.uint8)
        self.base = self.all.ctypes.data

    def reset(self, rng: np.random.Generator) -> None:
        protect(self.base, len(self.all), mmap.PROT_READ | mmap.PROT_WRITE)
        protect(self.base, PAGE, 0)
        self.used, self.rng, self.buffers = PAGE, rng, []  # type: int, np.random.Generator, list[Buffer]

    def take(self, size: int) -> Buffer:
        inside = max(-(-size // PAGE), 1) * PAGE
        first, self.used = self.used, self.used + inside + PAGE
        protect(self.base + self.used - PAGE, PAGE, 0)
        pages = self.all[first : first + inside]
        pages[:] = self.rng.integers(1, 256, inside, dtype=np.uint8)
        start = first + (inside - size if self.rng.integers(2) else 0)
        self.buffers.append(Buffer(self.base + start, self.all[start : start + size], pages))
        return self.buffers[-1]

    def holding(self, x: Array) -> Buffer:
        buffer = self.take(x.nbytes)
        buffer.typed(x.dtype)[:] = x.ravel()
        return buffer

    def address(self, x: Array | None) -> int:
        """Of a copy; 0 for None."""
        return 0 if x is None else self.holding(x).address

    def check(
        self, call: Callable[[], object], written: dict[Buffer, Array | None], guard: Callable[[int], None] = lambda mode: None
    ) -> None:
        """Call, and assert that nothing has changed except the given places: all of a buffer (None), or its bytes at a bool mask.
        guard(mode) protects what the call must not touch."""
        before = [b.pages.copy() for b in self.buffers]
        guard(0)
        call()
        guard(mmap.PROT_READ | mmap.PROT_WRITE)
        for buffer, old in zip(self.buffers, before, strict=True):
            same = buffer.pages == old
            if buffer in written:
                at = buffer.bytes.ctypes.data - buffer.pages.ctypes.data
                mask = written[buffer]
                same[at : at + len(buffer.bytes)] |= True if mask is None else mask
            assert same.all(), f"buffer {self.buffers.index(buffer)}: byte {np.flatnonzero(~same)[0]} of its pages was written"


# ---- numbers


def widen(stored: Array, dtype: int) -> Array:
    if dtype == BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def narrow(x: Array, dtype: int) -> Array:
    """fp32 as it is stored: to nearest even, NaN stays NaN."""
    if dtype != BF16:
        return x.astype(STORED[dtype])
    u = x.astype(np.float32).view(np.uint32)
    rounded = (u + np.uint32(0x7FFF) + (u >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    x = rng.standard_normal(shape) * 3.0
    if kind == "wild":
        x = np.where(rng.random(shape) < 0.02, rng.choice([np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0], size=shape), x)
    if kind == "masked":
        x = np.where(rng.random(shape) < 0.4, -np.inf, x)
    return x.astype(np.float32)


ROUNDING = (6e-8, 2.0**-8, 2.0**-11)  # relative, of a store
STEP = (1.2e-38, 1.2e-38, 2.0**-24)  # the smallest that counts
EPS = 1.2e-7


def assert_near(what: str, got: Array, exact: Array, room: Array | float) -> None:
    """Where `exact` is a number; NaN where it is NaN."""
    numbers = np.isfinite(exact)
    off = np.where(numbers, np.abs(np.where(numbers, got, 0.0) - np.where(numbers, exact, 0.0)), 0.0)
    if not (off <= room).all():
        at = np.unravel_index(np.argmax(off - room), off.shape)
        raise AssertionError(f"{what} at {at}: {got[at]}, not {exact[at]}")
    assert np.isnan(got[np.isnan(exact)]).all(), f"{what} is not NaN"


# ---- matrices and rows


@dataclass
class Matrix:
    """Rows in a buffer. own_pages: bytes from row to row where each ends its pages, else 0."""

    buffer: Buffer
    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    starts: Array  # the element at which each row begins
    own_pages: int = 0

    @classmethod
    def make(cls, memory: Memory, rows: int, columns: int, dtype: int, kind: str = "plain") -> Matrix:
        stride = columns + int(memory.rng.choice([0, 0, 1, 16, 37]))
        size = (max(rows - 1, 0) * stride + columns) * SIZE[dtype] if rows and columns else 0
        made = cls(memory.take(size), dtype, (rows, columns), (stride, 1), np.arange(rows) * stride)
        if size:
            made.put(np.arange(rows), numbers(memory.rng, (rows, columns), kind))
        return made

    @classmethod
    def of_logits(cls, memory: Memory, outer: int, inner: int, vocab: int, dtype: int) -> Matrix:
        """[outer, inner, vocab] in one of several layouts."""
        rng, step = memory.rng, vocab
        layout = rng.choice(["dense", "gaps", "transposed", "pages"])
        if layout == "gaps":
            step = vocab + int(rng.integers(70))
        elif layout == "pages":
            step = -(-vocab * SIZE[dtype] // PAGE) * PAGE // SIZE[dtype]
        strides = (step * inner + (int(rng.integers(70)) if layout == "gaps" else 0), step)
        if layout == "transposed":
            strides = (step, step * outer)
        a, t = np.divmod(np.arange(outer * inner), inner)
        starts = a * strides[0] + t * strides[1]
        buffer = memory.take((int(starts.max()) + vocab) * SIZE[dtype])
        at_end = (buffer.address + len(buffer.bytes)) % PAGE == 0
        own = strides[1] * SIZE[dtype] if layout == "pages" and at_end else 0
        return cls(buffer, dtype, (outer, inner, vocab), (*strides, 1), starts, own)

    def index(self, rows: Array) -> Array:
        return self.starts[rows, None] + np.arange(self.shape[-1])

    def put(self, rows: Array, x: Array) -> Array:
        """Store x, and return what it is there, in fp32."""
        self.buffer.typed(STORED[self.dtype])[self.index(rows)] = narrow(x, self.dtype)
        return self.read(rows)

    def read(self, rows: Array) -> Array:
        return widen(self.buffer.typed(STORED[self.dtype])[self.index(rows)], self.dtype)

    @property
    def values(self) -> Array:
        return self.read(np.arange(len(self.starts)))

    def mask(self, rows: Array | None = None) -> Array:
        """Their bytes in the buffer; None: of all rows."""
        elements = np.zeros(len(self.buffer.bytes) // SIZE[self.dtype], bool)
        if elements.size:
            elements[self.index(np.arange(len(self.starts)) if rows is None else rows)] = True
        return elements.repeat(SIZE[self.dtype])

    def protect(self, rows: Array, mode: int) -> None:
        for i in rows if self.own_pages else ():
            end = self.buffer.address + (int(self.starts[i]) + self.shape[-1]) * SIZE[self.dtype]
            protect(end - self.own_pages, self.own_pages, mode)

    @property
    def where(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        return self.buffer.address, self.dtype, self.shape, self.strides


@dataclass
class Transform:
    scale: float
    softcap: float
    inverse: Array  # fp32 [n]
    per_row: bool
    tame: bool  # a gradient is as exact as its terms

    @classmethod
    def draw(cls, rng: np.random.Generator, n: int) -> Transform:
        tame = bool(rng.random() < 0.8)
        scale = rng.choice([1.0, 1.0, 0.5, -2.0] if tame else [30.0, 1e-4, 0.0, np.nan, np.inf])
        softcap, per_row = rng.choice([0.0, 0.0, 30.0] if tame else [0.0, 1e-3, 1e30]), bool(rng.integers(2))
        inverse = rng.choice([1.0, 1 / 0.7] if tame else [1e-2, 1e3, np.nan, 0.0], size=n if per_row else 1)
        return cls(float(scale), float(softcap), np.broadcast_to(inverse.astype(np.float32), (n,)).copy(), per_row, tame)

    def arguments(self, memory: Memory) -> tuple[float, float, float, int]:
        fixed = 1.0 if self.per_row or not len(self.inverse) else float(self.inverse[0])
        return self.scale, self.softcap, fixed, memory.address(self.inverse) if self.per_row else 0

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """z and dz/dx of fp32 rows in fp64; factors and the scaled x are fp32, as the kernels define them."""
        inverse, scale, cap = self.inverse[:, None], np.float32(self.scale), np.float32(self.softcap)
        slope = scale * inverse
        if cap > 0:
            u = np.tanh((x * (scale / cap)).astype(np.float64))
            return u * (cap * inverse), slope * (1 - u * u)
        return (x * slope).astype(np.float64), slope * np.ones_like(x, np.float64)


# ---- calls of rows


class Rows:
    """Rows of logits that a call takes, beside a second stream or not, and what is to be found of them."""

    def __init__(self, module: ModuleType, memory: Memory) -> None:
        rng = memory.rng
        self.module, self.memory, self.rng = module, memory, rng
        outer, inner = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        self.vocab = int(rng.choice([1, 2, 3, 15, 16, 17, 33, 64, 65, 129, 1031, 2047, 2048, 2049, 4100, 16500]))
        self.first = int(rng.integers(outer * inner))
        self.n = int(rng.integers(1, outer * inner - self.first + 1)) if rng.random() < 0.95 else 0
        self.at, self.threads = np.arange(self.first, self.first + self.n), int(rng.choice([1, 2, 3, 8, 1000]))
        self.others = np.setdiff1d(np.arange(outer * inner), self.at)
        self.dtypes = [int(x) for x in rng.integers(3, size=2)]
        self.kind, self.transform = str(rng.choice(["plain", "plain", "wild", "masked"])), Transform.draw(rng, self.n)
        self.logits = Matrix.of_logits(memory, outer, inner, self.vocab, self.dtypes[0])
        x = self.logits.put(self.at, numbers(rng, (self.n, self.vocab), self.kind))
        self.x, (self.z, self.slope) = x, self.transform(x)
        outside = rng.choice([-1, -100, self.vocab, 2**62, -(2**63)], size=self.n)
        self.targets = np.where(rng.random(self.n) < 0.1, outside, rng.integers(0, self.vocab, self.n))
        self.read = rng.random(self.n) < 0.8 if rng.integers(2) else np.ones(self.n, bool)
        self.own = module.LogitRows(*self.logits.where, self.first, self.n, *self.transform.arguments(memory))
        self.of_targets, self.of_read = memory.address(self.targets), memory.address(None if self.read.all() else self.read)
        self.second: Any = None
        self.direction, self.weighted = int(rng.integers(-3, 3)), bool(rng.integers(2))
        if self.direction >= 0:
            other = Matrix.of_logits(memory, outer, inner, self.vocab, self.dtypes[1])
            near = self.z if rng.integers(2) else numbers(rng, self.z.shape, self.kind)
            self.w = other.put(self.at, near).astype(np.float64)
            rows = module.LogitRows(*other.where, self.first, self.n, 1.0, 0.0, 1.0, 0)
            weight, *known = (memory.address(numbers(rng, (self.n,), self.kind)) for _ in range(3))
            self.second = module.Second(rows, self.direction, 0.3, weight if self.weighted else 0, *known)

    def __str__(self) -> str:
        return f"rows {self.first}+{self.n} of {self.logits.shape}, {self.logits.strides}, {self.dtypes}, {self.kind}, {self.transform}"

    def each_isa(self, call: Callable[[], object], unread: Array, written: dict[Buffer, Array | None]) -> Any:
        """Call with each instruction set, the rows `unread` protected; gives its name after each."""
        kept = self.logits.buffer.pages.copy()
        for isa in self.module.isas():
            self.module.use_isa(isa)
            self.logits.buffer.pages[:] = kept
            self.memory.check(call, written, lambda mode: self.logits.protect(unread, mode))
            yield isa

    def exact(self, z: Array) -> dict[str, Array]:
        """Statistics of rows in float64; NaN for broken rows."""
        top = z.max(1, keepdims=True)
        broken = ~np.isfinite(top) | np.isnan(z).any(1, keepdims=True)
        d = np.where(broken, np.nan, z - top)
        e = np.exp(d)
        inside = (self.targets >= 0) & (self.targets < self.vocab)
        of_target = np.where(inside, np.take_along_axis(z, np.where(inside, self.targets, 0)[:, None], 1)[:, 0], np.nan)
        products = np.where(e == 0, 0.0, e * np.where(e == 0, 0.0, d))
        return {
            "max": top[:, 0],
            "sum": e.sum(1),
            "target": of_target,
            "weighted": products.sum(1),
            "squares": (e * e).sum(1),
            "d": d,
        }

    def stats(self) -> None:
        kind, ids = int(self.rng.integers(3)), bool(self.rng.integers(2))
        wanted = [0, 1, 2, *range(3, 3 + kind), *([5] if ids else []), *(range(6, 10) if self.second else ())]
        to = Matrix.make(self.memory, len(wanted), self.n, FP32)
        named = self.module.Named(to.buffer.address, to.shape, to.strides, sum(1 << k for k in wanted))
        unread = np.concatenate([self.others, self.at[~self.read]])
        call = lambda: self.module.stats(self.own, self.second, self.of_targets, self.of_read, named, self.threads)  # noqa: E731
        names = ("max", "sum", "target", "weighted", "squares")
        for isa in self.each_isa(call, unread, {to.buffer: to.mask()}):
            found = dict(zip(wanted, to.values, strict=True)) if self.n else {}
            for k, x in found.items():
                nothing = x.view(np.int32) == -1 if k == 5 else x == (1.0 if k in (1, 7) else 0.0)
                assert nothing[~self.read].all(), f"{isa}: what is not read has a statistic, {k}"
            if not found or not self.transform.tame:
                continue
            exact, read = self.exact(self.z), self.read
            sums = exact["sum"]
            for k, name in enumerate(names[: 3 + kind]):
                fine = read & ((name == "target") | np.isfinite(sums)) & (np.isfinite(sums) | (np.isnan(exact[name])))
                room = EPS * 2e2 * (sums + np.abs(exact[name]))[fine] if k in (1, 3, 4) else 2e-5
                assert_near(f"{isa}: {name}", found[k][fine], exact[name][fine], room)
            assert np.isnan(found[1][read & np.isnan(self.z).any(1)]).all(), f"{isa}: a NaN has vanished"
            if ids:
                first, fine = found[5].view(np.int32), read & np.isfinite(sums)
                assert (self.z[fine, first[fine]] >= exact["max"][fine] - 2e-5).all(), f"{isa}: the largest logit is elsewhere"
            if self.second:
                other, fine = self.exact(self.w), read & np.isfinite(sums) & np.isfinite(self.exact(self.w)["sum"])
                assert (found[6][fine] == other["max"][fine]).all(), isa
                assert_near(f"{isa}: the other sum", found[7][fine], other["sum"][fine], 2e2 * EPS * other["sum"][fine])
        self.pull()

    def place(self) -> Matrix:
        """Where the gradient goes: elsewhere, into the logits, or narrower there."""
        where, dtype = str(self.rng.choice(["apart", "in place", "narrower, in place"])), int(self.rng.integers(3))
        if where == "apart":
            return Matrix.of_logits(self.memory, *self.logits.shape, dtype)  # type: ignore[misc]
        if where == "in place" or self.logits.dtype != FP32 or dtype == FP32:
            return self.logits
        a, b, _ = self.logits.strides
        return Matrix(self.logits.buffer, dtype, self.logits.shape, (2 * a, 2 * b, 1), 2 * self.logits.starts)

    def slopes(self, count: int) -> list[Array]:
        kind = str(self.rng.choice(["plain", "plain", "wild"]))
        found = (numbers(self.rng, (self.n,), kind) * (self.rng.random(self.n) < 0.8) for _ in range(count))
        return [np.where(self.read, x, 0.0).astype(np.float32) for x in found]

    def pull(self) -> None:
        exact, more = self.exact(self.z), int(self.rng.integers(3))
        wanted = [0, *((1, 2, 3)[: 2 * (more > 0) + (more > 1)]), *([4] if self.second else [])]
        slopes = dict(zip(wanted, self.slopes(len(wanted)), strict=True))
        partials = [exact[name] for name in ("max", "sum", "target")] + ([exact["max"], exact["sum"]] if self.second else [])
        if self.rng.random() < 0.1:
            partials, exact = [numbers(self.rng, (self.n,), "wild") for _ in partials], {}
        of, to = self.place(), [Matrix.make(self.memory, len(x), self.n, FP32) for x in (partials, wanted)]
        for matrix, rows in zip(to, (partials, list(slopes.values())), strict=True):
            if self.n:
                matrix.put(np.arange(len(rows)), np.stack(rows).astype(np.float32))
        bits = (0b111 | (0b11000000 if self.second else 0), sum(1 << k for k in wanted))
        named = [self.module.Named(x.buffer.address, x.shape, x.strides, b) for x, b in zip(to, bits, strict=True)]
        out = self.module.Memory(*of.where, self.first, self.n)
        call = lambda: self.module.pull(self.own, self.second, self.of_targets, *named, out, self.threads)  # noqa: E731
        idle = self.at[~np.any(list(slopes.values()), 0)] if of.buffer is not self.logits.buffer else self.at[:0]
        for isa in self.each_isa(call, np.concatenate([self.others, idle]), {of.buffer: of.mask(self.at)}):
            if exact and self.n:
                self.check_gradient(isa, of, slopes, exact)

    def check_gradient(self, isa: str, of: Matrix, slopes: dict[int, Array], exact: dict[str, Array]) -> None:
        got, beside = of.read(self.at), slopes.get(4, np.zeros(self.n)) != 0
        idle = ~np.any(list(slopes.values()), 0)
        assert (got[idle] == 0).all(), f"{isa}: a row has no slope, and a gradient"
        broken = ~idle & ~beside & (~np.isfinite(exact["sum"]) | ~np.isfinite(list(slopes.values())).all(0))
        assert np.isnan(got[broken]).all(), f"{isa}: a broken row is not NaN"
        fine = ~idle & ~broken & ~beside & np.isfinite(exact["target"])
        if not self.transform.tame or not fine.any():
            return
        target, constant, log, prob = (slopes.get(k, np.zeros(self.n))[fine, None].astype(np.float64) for k in range(4))
        logp = exact["d"][fine] - np.log(exact["sum"][fine, None])
        p, hit = np.exp(logp), np.arange(self.vocab) == self.targets[fine, None]
        logp = np.where(p > 0, logp, 0.0)
        term = p * (constant + log * logp + prob * p)
        want = (np.where(hit, -target * np.where(p > 0, np.expm1(logp), -1.0), -target * p) + term) * self.slope[fine]
        size = np.abs(target) * (p + hit) + p * (np.abs(constant) + np.abs(log) * (np.abs(logp) + 1) + np.abs(prob))
        room = ROUNDING[of.dtype] * np.abs(want) + STEP[of.dtype] + EPS * 2e3 * size * np.abs(self.slope[fine]) + 1e-35
        want = np.where(np.abs(want) < 6e4, want, np.inf)
        assert_near(f"{isa}: gradient in {of.dtype}", got[fine], want, room)

    def fused(self) -> None:
        """Both visits in one call, with the formula a logp + b entropy."""
        bonus, gradient, n = bool(self.rng.integers(2)), self.rng.random() < 0.8, self.n
        a, b = self.slopes(2)
        if not bonus:
            b[:] = 0
        steps = [("mul", 0, 2, 0), ("mul", 1, 3, 0), ("add", 4, 5, 0)]
        program = self.module.Program("a logp + b entropy", 0, 4, steps, [6, 2, 3])
        to, of = Matrix.make(self.memory, 4 if self.second else 3, n, FP32), self.place()
        inputs = [self.memory.address(x) for x in (a, b)]
        named = self.module.Named(to.buffer.address, to.shape, to.strides, (1 << to.shape[0]) - 1)
        out = self.module.Memory(*of.where, self.first, n) if gradient else None
        call = lambda: self.module.fused(  # noqa: E731
            program, [], inputs, bonus, self.own, self.second, self.of_targets, self.of_read, out, named, self.threads
        )
        kept = of.buffer is not self.logits.buffer or not gradient
        written: dict[Buffer, Array | None] = {to.buffer: to.mask()}
        if gradient:
            # An fp32 row whose beginning holds a narrower gradient has exponentials in the rest.
            written[of.buffer] = of.mask(self.at) if kept else self.logits.mask(self.at)
        unread = np.concatenate([self.others, self.at[~self.read] if kept else self.at[:0]])
        exact = self.exact(self.z)
        for isa in self.each_isa(call, unread, written):
            if not n:
                continue
            logps, entropy, losses = to.values[:3]
            assert not to.values[:, ~self.read].any(), f"{isa}: a row that is not read has a value"
            fine = self.read & np.isfinite(exact["sum"])
            with np.errstate(invalid="ignore"):
                want = (
                    exact["target"] - exact["max"] - np.log(exact["sum"]),
                    np.log(exact["sum"]) - exact["weighted"] / exact["sum"],
                )
            if self.transform.tame:
                for what, x, y in (("log-prob", logps, want[0]), ("entropy", entropy, want[1])):
                    assert_near(f"{isa}: {what}", x[fine], y[fine], 5e-5)
            assert np.isnan(entropy[self.read & np.isnan(self.z).any(1)]).all(), f"{isa}: a NaN has vanished"
            if self.second and self.weighted:
                continue
            assert np.array_equal(losses, a * logps + b * entropy, equal_nan=True), f"{isa}: losses"
            if gradient:
                slopes = {0: a, 1: (-b * np.where(b == 0, 0.0, want[1])).astype(np.float32), 2: -b}
                self.check_gradient(isa, of, slopes, exact)

    def select(self) -> None:
        """Columns of rows, from their statistics: what is drawn has the mass that the probabilities have."""
        m, n, step = self.module, self.n, float(self.rng.choice([1.0, 0.5, 1 / 16, 1 / 256, 1 / 4096]))
        m.use_isa(str(self.rng.choice(m.isas())))
        partials, capacity = Matrix.make(self.memory, 3, n, FP32), int(1 / step) + 3
        named = m.Named(partials.buffer.address, partials.shape, partials.strides, 0b111)
        m.stats(self.own, None, self.of_targets, 0, named, self.threads)
        starts = self.rng.integers(0, 2**40, n)
        ids, taken, masses = (self.memory.take(size) for size in (4 * n * capacity, 4 * n * capacity, 8 * n))
        of_starts, addresses = self.memory.address(starts), (ids.address, taken.address, masses.address)
        self.memory.check(
            lambda: m.select(self.own, self.of_targets, named, 2.0**31 / step, of_starts, capacity, *addresses, self.threads),
            {ids: None, taken: None, masses: None},
        )
        found, logits = (x.reshape(n, capacity) for x in (ids.typed(np.int32), taken.typed(np.float32)))
        top, total = partials.values[:2] if n else (starts, starts)
        inverse = np.float32(1) / total
        for i in range(n):
            columns, target, mass = found[i][found[i] >= 0], self.targets[i], int(masses.typed(np.int64)[i])
            assert (found[i][len(columns) :] == -1).all() and (np.diff(columns) > 0).all() and (columns < self.vocab).all()
            assert np.array_equal(logits[i, : len(columns)], self.x[i, columns], equal_nan=True)
            assert not 0 <= target < self.vocab or target in columns
            if not np.isfinite(inverse[i]) or not np.isfinite(top[i]):
                assert len(columns) == (0 <= target < self.vocab) and mass == 0
                continue
            p = np.exp(np.minimum(self.z[i] - top[i], 0)) * inverse[i]
            hit, whole, sure = np.arange(self.vocab) == target, p >= step * (1 - 1e-4), p >= step * (1 + 1e-4)
            assert np.isin(np.flatnonzero(sure), columns).all()
            if np.array_equal(whole, sure):
                sampled = p[~hit & ~whole].sum()
                assert abs(mass - sampled / step * 2**31) <= self.vocab + 2e-4 * 2**31 / step
                assert len(columns) - int((whole | hit).sum()) == ((int(starts[i]) + mass) >> 31) - (int(starts[i]) >> 31)


def scale(module: ModuleType, memory: Memory) -> None:
    rng = memory.rng
    dtype, n, factor = (
        int(rng.integers(3)),
        int(rng.choice([0, 1, 2, 15, 17, 1000, 200_003])),
        float(rng.choice([0.3, 0.0, np.nan])),
    )
    data = memory.holding(narrow(numbers(rng, (n,), "wild"), dtype))
    before = data.bytes.copy()
    want = widen(narrow(widen(before.view(STORED[dtype]), dtype) * np.float32(factor), dtype), dtype)
    for isa in module.isas():
        module.use_isa(isa)
        data.bytes[:] = before
        memory.check(lambda: module.scale(data.address, dtype, n, factor, int(rng.choice([1, 2, 1000]))), {data: None})
        assert np.array_equal(widen(data.typed(STORED[dtype]), dtype), want, equal_nan=True), isa


# ---- products

#: The library that executes the instructions of AMX where the processor does not; see tests/support/amx.py.
EMULATORS: list[ctypes.CDLL] = []
SIZES = (1, 2, 5, 6, 7, 31, 33, 63, 64, 65, 129, 191, 193, 511, 513, 1030, 0)


def product(module: ModuleType, memory: Memory) -> None:
    """One of the three products, of bf16 or fp32 operands."""
    rng = memory.rng
    n, h, v = (int(rng.choice(SIZES)) for _ in range(3))
    engine = str(rng.choice([name for name in module.products() if name != "amx" or EMULATORS]))
    operand, which, threads = int(rng.integers(2)), int(rng.integers(3)), int(rng.choice([1, 2, 3, 1000]))
    kind, start = str(rng.choice(["plain", "plain", "wild", "masked"])), str(rng.choice(["none", "out", "other"]))
    gradient = int(rng.integers(2)) if operand == BF16 else FP32
    result = int(rng.integers(2)) if which == 2 and start != "out" else FP32
    print(
        f"product {which} by {engine}, {n} x {h} x {v}, {kind}, {operand} {gradient} {result}, {start}, {threads}", flush=True
    )
    shapes = ((n, h, operand), (v, h, operand)), ((n, v, gradient), (v, h, operand)), ((n, v, gradient), (n, h, operand))
    a, b = (Matrix.make(memory, *shape, kind) for shape in shapes[which])
    out = Matrix.make(memory, *((n, v), (n, h), (v, h))[which], result)
    begin = None if start == "none" else out if start == "out" else Matrix.make(memory, v, h, FP32)
    bias = None if start == "none" else numbers(rng, (v,), "plain")
    to: list[Any] = [module.Matrix(*x.where) for x in (a, b, out)]
    if which == 0:
        of_bias = memory.address(bias)
        call = lambda: module.logits_product(engine, *to[:2], of_bias, to[2], threads)  # noqa: E731
    elif which == 1:
        call = lambda: module.d_hidden(engine, *to, threads)  # noqa: E731
    else:
        first = None if begin is None else module.Matrix(*begin.where)
        call = lambda: module.d_weight(engine, *to[:2], first, to[2], threads)  # noqa: E731
    added: Any = (
        0.0 if which == 1 else (0.0 if bias is None else bias) if which == 0 else 0.0 if begin is None else begin.values
    )
    # As they are multiplied: rounded in products of bf16.
    left, right = (widen(narrow(x.values, operand), operand).astype(np.float64) for x in (a, b))
    left, right = (left.T, right) if which == 2 else (left, right.T if which == 0 else right)
    exact, size = left @ right + added, np.abs(left) @ np.abs(right) + np.abs(added)
    memory.check(call, {out.buffer: out.mask()})
    fine = np.isfinite(exact) & (size < 1e38)
    split = 3 * 2.0**-16 if engine == "amx" and operand == FP32 else 0.0  # of fp32 as two numbers in bf16
    stored = ROUNDING[result] * np.abs(exact) if result == BF16 else 0.0
    assert_near(engine, out.values, np.where(fine, exact, np.inf), np.where(fine, (4e-7 + split) * size + stored, 0.0) + 1e-37)
    assert not np.isfinite(out.values[~np.isfinite(size)]).any(), "a NaN or an infinity has vanished"


def sparse(module: ModuleType, memory: Memory) -> None:
    """One of the three products over slots (row, id), of which some are not used. What no slot in use names holds NaN."""
    rng = memory.rng
    n, v, which = int(rng.choice([1, 2, 5, 17, 60])), int(rng.choice([1, 2, 5, 17, 60])), int(rng.integers(3))
    h, threads = int(rng.choice([0, 1, 2, 3, 15, 16, 17, 33, 64, 100, 129, 1023, 1025, 2100])), int(rng.choice([1, 2, 3, 1000]))
    (first, other), kind = (int(x) for x in rng.integers(3, size=2)), str(rng.choice(["plain", "plain", "wild"]))
    module.use_isa(str(rng.choice(module.isas())))
    print(f"slots {which}, {n} x {h} x {v}, {kind}, {first} {other}, {module.isa()}, {threads}", flush=True)
    rows = np.repeat(np.arange(n), rng.integers(0, int(rng.choice([1, 3, 12])), n))
    m = len(rows)
    ids = np.where(rng.random(m) < 0.3, -rng.integers(1, 5, m), rng.integers(0, v, m))
    values = np.where(rng.random(m) < 0.2, 0.0, rng.standard_normal(m)).astype(np.float32)
    used = (ids >= 0) & ((which == 0) | (values != 0))
    slots = module.Slots(memory.address(ids), memory.address(rows), m)
    by_row, by_id = rows[used], ids[used]

    def matrix(count: int, dtype: int, named: Array) -> Matrix:
        made, unnamed = Matrix.make(memory, count, h, dtype, kind), np.setdiff1d(np.arange(count), named)
        if h and len(unnamed):
            made.put(unnamed, np.full((len(unnamed), h), np.nan, np.float32))
        return made

    if which == 0:
        hidden, weight, out = matrix(n, first, by_row), matrix(v, other, by_id), memory.take(4 * m)
        operands = module.Matrix(*hidden.where), module.Matrix(*weight.where)
        memory.check(lambda: module.slot_logits(*operands, slots, out.address, threads), {out: None})
        got, other = out.typed(np.float32), FP32
        assert (got[~used] == -np.inf).all()
        terms = hidden.values[by_row].astype(np.float64) * weight.values[by_id]
        got, exact, size = got[used], terms.sum(1), np.abs(terms).sum(1)
    else:
        frm, into, counts = (by_id, by_row, (v, n)) if which == 1 else (by_row, by_id, (n, v))
        source, target = matrix(counts[0], first, frm), Matrix.make(memory, counts[1], h, other)
        start, add = target.values.astype(np.float64), module.add_weight_rows if which == 1 else module.add_hidden_rows
        operands, of_values, touched = (
            (module.Matrix(*source.where), module.Matrix(*target.where)),
            memory.address(values),
            np.unique(into),
        )
        memory.check(lambda: add(of_values, slots, *operands, threads), {target.buffer: target.mask(touched)})
        exact = np.zeros_like(start) if which == 1 else start
        size, terms = np.abs(exact), values[used, None].astype(np.float64) * source.values[frm]
        np.add.at(exact, into, terms)
        np.add.at(size, into, np.abs(terms))
        got, exact, size = target.values[touched], exact[touched], size[touched]
    fine = np.isfinite(exact) & (size < 1e4)
    room = ROUNDING[other] * np.abs(exact) + STEP[other] + EPS * (h / 8 + m + 8) * size
    assert_near("sums", got, np.where(fine, exact, np.inf), np.where(fine, room, 0.0))
    assert not np.isfinite(got[~np.isfinite(size)]).any(), "a NaN or an infinity has vanished"


# ---- what is refused


def refusals(m: ModuleType, memory: Memory) -> int:
    """Arguments that cannot be right raise ValueError, and nothing is written. Each line: what makes an object or calls, right
    arguments, and for a place among them what is wrong there."""
    memory.reset(np.random.default_rng(0))
    a, b, c = (memory.holding(np.zeros(96)).address for _ in range(3))
    huge, sizes = 2**62, (-1, -(2**63), 2**62)
    shapes, strides = (
        [(2, 2, s) for s in (0, *sizes)] + [(2, -1, 4), (2**40, 2**40, 4)],
        [(huge, 4, 1), (8, -(2**63), 1), (8, 4, 2)],
    )
    of_rows: dict[int, Any] = {0: (0, a + 1), 1: (-1, 3, 2**31 - 1), 2: shapes, 3: strides, 4: (1, *sizes), 5: (5, *sizes)}
    of_matrix: dict[int, Any] = {0: (0, a + 2), 1: (-1, 3), 2: [(-1, 4), (4, huge), (2**40, 2**40)], 3: [(huge, 1), (4, 2)]}
    rows = (a, FP32, (2, 2, 4), (8, 4, 1), 0, 4)

    def named(bits: int, n: int = 4, address: int = b) -> Any:
        return m.Named(address, (bin(bits).count("1"), n), (n, 1), bits)

    def matrix(dtype: int = FP32, *shape: int) -> Any:
        return m.Matrix(a, dtype, shape or (4, 4), ((shape or (4, 4))[1], 1))

    own, short, narrow = (
        m.LogitRows(a, FP32, (1, n, v), (n * v, v, 1), 0, n, 1.0, 0.0, 1.0, 0) for n, v in ((4, 4), (2, 4), (4, 3))
    )
    out, slots, square, low = m.Memory(a, FP32, (1, 4, 4), (16, 4, 1), 0, 4), m.Slots(c, c, 4), matrix(), matrix(BF16)
    second, unknown = m.Second(own, 0, 0.0, c, c, c), m.Second(own, 2, 0.5, 0, 0, 0)
    others, program = (m.Second(short, 0, 0.0, c, c, c), m.Second(narrow, 0, 0.0, c, c, c)), m.Program("x", 0, 2, [], [0, 0, 0])
    programs = [m.Program("x", 1, 2, [], [0, 0, 0]), m.Program("x", 0, 2, [], [0]), m.Program("x", 0, 3, [], [0, 0, 0])]
    less, more = named(0b11), named(1 << 20)
    outs = [m.Memory(a, FP32, (1, 2, 4), (8, 4, 1), 0, 2), m.Memory(a, FP32, (1, 4, 3), (12, 3, 1), 0, 4)]
    threads = (0, -1)
    table: list[tuple[Any, tuple[Any, ...], dict[int, Any]]] = [
        (m.Memory, rows, of_rows),
        (m.LogitRows, (*rows, 1.0, 0.0, 1.0, 0), {**of_rows, 9: (c + 1,)}),
        (m.Second, (own, 0, 0.5, c, c, c), {1: (-1, 3), 3: (c + 1,), 4: (c + 1,), 5: (c + 1,)}),
        (m.Named, (b, (3, 4), (4, 1), 0b111), {0: (0, b + 1), 1: [(2, 4), (3, huge)], 2: [(huge, 1), (4, 2)], 3: (0b11, 0)}),
        (m.Matrix, (a, FP32, (4, 4), (4, 1)), of_matrix),
        (m.Slots, (c, c, 4), {0: (0, c + 4), 1: (0, c + 1), 2: sizes}),
        (m.stats, (own, None, c, 0, named(0b111), 1), {1: others, 2: (0, c + 4), 4: (less, named(0b10111), more, named(0b111, 3)), 5: threads}),
        (m.stats, (own, second, c, 0, named(0b1111000111), 1), {4: (named(0b111), named(0b111000111))}),
        (m.mixed, (own, second, 0, named(0b11000011), named(0b11), 1), {1: (unknown, *others), 3: (named(0b111),), 4: (named(0b1),), 5: threads}),
        (m.pull, (own, None, c, named(0b111), named(1), out, 1), {2: (0, c + 1), 3: (less,), 4: (named(0b10), named(1, 3)), 5: outs, 6: threads}),
        (m.pull, (own, second, c, named(0b11000111), named(0b10001), out, 1), {1: (unknown, *others), 3: (named(0b111),), 4: (named(1),)}),
        (m.fused, (program, [], [], False, own, None, c, 0, out, named(0b111), 1), {
            0: programs, 1: ([1.0],), 2: ([c],), 5: (second, *others), 6: (0, c + 1), 8: outs, 9: (less, named(0b111, 3), more), 10: threads,
        }),
        (m.scale, (a, FP32, 4, 2.0, 1), {0: (0, a + 1), 1: (-1, 3), 2: sizes, 4: threads}),
        (m.select, (own, c, named(0b111), 2.0**35, c, 4, a, b, c, 1), {
            1: (0, c + 1), 2: (named(0b1),), 4: (0, c + 1), 5: sizes, 6: (a + 1,), 7: (0, b + 1), 8: (c + 4,), 9: threads,
        }),
        (m.slot_logits, (square, square, slots, b, 1), {1: (matrix(FP32, 4, 3),), 3: (0, b + 1), 4: threads}),
        (m.add_weight_rows, (b, slots, square, square, 1), {0: (0, b + 1), 3: (matrix(FP32, 4, 3),), 4: threads}),
        (m.add_hidden_rows, (b, slots, square, square, 1), {0: (0, b + 1), 3: (matrix(FP32, 4, 3),), 4: threads}),
    ]  # fmt: skip
    if m.has_products():
        wrong = (matrix(FP32, 4, 3), matrix(FP32, 3, 4), matrix(FP16))
        table += [
            (m.logits_product, ("fp32", square, square, 0, square, 1), {0: ("torch",), 1: (wrong[0], low), 2: (wrong[0], low), 3: (b + 1,), 4: (*wrong, low), 5: threads}),
            (m.d_hidden, ("fp32", square, square, square, 1), {0: ("torch",), 1: (wrong[0], low), 2: wrong, 3: (*wrong, low), 4: threads}),
            (m.d_weight, ("fp32", square, square, None, square, 1), {1: (wrong[1], low), 2: wrong[1:], 3: (*wrong, low), 4: wrong, 5: threads}),
        ]  # fmt: skip
    refused = 0

    def each() -> None:
        nonlocal refused
        for make, right, places in table:
            make(*right)
            for place, values in places.items():
                for value in values:
                    try:
                        make(*right[:place], value, *right[place + 1 :])
                    except ValueError:
                        refused += 1
                        continue
                    raise AssertionError(f"{make.__name__} took {value} as argument {place}")

    memory.check(each, dict.fromkeys(memory.buffers))  # by the calls that are right
    return refused


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_cpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(path: str, seed: str, first: str, calls: str, emulator: str = "") -> None:
    module, memory = load(path), Memory(32 << 20)
    if emulator:
        EMULATORS.append(ctypes.CDLL(emulator))
        EMULATORS[0].amx_install()
        module.ask_for_tiles()  # granted where the processor has them
    print(f"{refusals(module, memory)} calls refused")
    kinds: list[Any] = [Rows.stats, Rows.fused, Rows.stats, Rows.fused, sparse, Rows.stats, sparse, Rows.select, scale]
    if module.has_products():
        kinds.append(product)
    for i in range(int(first), int(first) + int(calls)):
        memory.reset(np.random.default_rng([int(seed), i]))
        with np.errstate(all="ignore"):
            kind = kinds[i % len(kinds)]
            print(f"{i}: {kind.__qualname__}", flush=True)
            if kind.__qualname__.startswith("Rows"):
                rows = Rows(module, memory)
                print(rows, flush=True)
                kind(rows)
            else:
                kind(module, memory)
    print(f"{calls} calls were right")


if __name__ == "__main__":
    main(*sys.argv[1:])
