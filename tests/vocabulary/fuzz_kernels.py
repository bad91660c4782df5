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

    def snapshot(self) -> list[Array]:
        return [b.pages.copy() for b in self.buffers]

    def check(self, before: list[Array], written: dict[Buffer, Array | None]) -> None:
        """Asserts that nothing has changed except the given places: all of a buffer (None), or its bytes at a bool mask."""
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
    x = rng.standard_normal(shape) * {"large": 1e4, "tiny": 1e-30}.get(kind, 3.0)
    if kind == "wild":
        wild = [np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0]
        x = np.where(rng.random(shape) < 0.02, rng.choice(wild, size=shape), x)
    if kind == "masked":
        x = np.where(rng.random(shape) < 0.4, -np.inf, x)
    return x.astype(np.float32)


ROUNDING = (6e-8, 2.0**-8, 2.0**-11)  # relative, of a store
STEP = (1.2e-38, 1.2e-38, 2.0**-24)  # the smallest that counts
HIGHEST = (3e38, 3e38, 6.5e4)
EPS = 1.2e-7
CUTOFF = 1.7e-38  # exp(-87), taken as 0


# ---- rows of logits


@dataclass
class Rows:
    """[outer, inner, vocab] in a buffer."""

    buffer: Buffer
    dtype: int
    strides: tuple[int, int]
    starts: Array  # the element at which each row begins
    vocab: int
    own_pages: int  # bytes from row to row where each row ends its pages, else 0

    def index(self, rows: Array) -> Array:
        return self.starts[rows, None] + np.arange(self.vocab)

    def read(self, rows: Array) -> Array:
        return widen(self.buffer.typed(STORED[self.dtype])[self.index(rows)], self.dtype)

    def mask(self, rows: Array) -> Array:
        """Their bytes in the buffer."""
        elements = np.zeros(len(self.buffer.bytes) // SIZE[self.dtype], bool)
        elements[self.index(rows)] = True
        return elements.repeat(SIZE[self.dtype])

    def protect(self, rows: Array, mode: int) -> None:
        for i in rows if self.own_pages else ():
            end = self.buffer.address + (int(self.starts[i]) + self.vocab) * SIZE[self.dtype]
            protect(end - self.own_pages, self.own_pages, mode)


def make_rows(memory: Memory, outer: int, inner: int, vocab: int, dtype: int) -> Rows:
    rng = memory.rng
    layout = rng.choice(["dense", "gaps", "transposed", "pages"])
    strides = (vocab * inner, vocab)
    if layout == "gaps":
        step = vocab + int(rng.integers(70))
        strides = (step * inner + int(rng.integers(70)), step)
    elif layout == "transposed":
        step = vocab + int(rng.integers(3))
        strides = (step, step * outer)
    elif layout == "pages":
        step = -(-vocab * SIZE[dtype] // PAGE) * PAGE // SIZE[dtype]
        strides = (step * inner, step)
    a, t = np.divmod(np.arange(outer * inner), inner)
    starts = a * strides[0] + t * strides[1]
    buffer = memory.take((int(starts.max()) + vocab) * SIZE[dtype])
    at_end = (buffer.address + len(buffer.bytes)) % PAGE == 0
    return Rows(buffer, dtype, strides, starts, vocab, strides[1] * SIZE[dtype] if layout == "pages" and at_end else 0)


@dataclass
class Transform:
    scale: float
    softcap: float
    inverse: Array  # fp32 [count]
    per_row: bool

    @classmethod
    def draw(cls, rng: np.random.Generator, count: int) -> Transform:
        scales = [1.0, 0.5, -2.0, 30.0, 1e-4, 0.0, np.nan, np.inf]
        scale = float(rng.choice(scales, p=[0.5, 0.1, 0.1, 0.1, 0.08, 0.04, 0.04, 0.04]))
        per_row = bool(rng.integers(2))
        inverse = rng.choice(
            [1.0, 1 / 0.7, 1e-2, 1e3, np.nan, 0.0], size=count if per_row else 1, p=[0.5, 0.3, 0.08, 0.08, 0.02, 0.02]
        )
        inverse = np.broadcast_to(inverse.astype(np.float32), (count,)).copy()
        return cls(scale, float(rng.choice([0.0, 0.0, 30.0, 1e-3, 1e30])), inverse, per_row)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """z and dz/dx of fp32 rows in fp64; factors and the scaled x are fp32, as the kernels define them."""
        inverse, scale, cap = self.inverse[:, None], np.float32(self.scale), np.float32(self.softcap)
        slope = scale * inverse
        if cap > 0:
            u = (x * (scale / cap)).astype(np.float64)
            e = np.exp(-2 * np.abs(u))
            return np.tanh(u) * (cap * inverse), slope * 4 * e / (1 + e) ** 2
        return (x * slope).astype(np.float64), slope * np.ones_like(x, np.float64)


class RowCalls:
    """stats and pull on the same logits."""

    whole = False  # all rows of them

    def __init__(self, module: ModuleType, memory: Memory) -> None:
        rng = memory.rng
        self.module, self.memory, self.rng = module, memory, rng
        self.outer, self.inner = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        self.vocab = int(rng.choice([1, 2, 3, 15, 16, 17, 33, 64, 65, 129, 1031, 2047, 2048, 2049, 4100, 16500]))
        rows = self.outer * self.inner
        self.first = 0 if self.whole else int(rng.integers(rows))
        self.count = rows if self.whole else int(rng.integers(rows - self.first + 1))
        self.at = np.arange(self.first, self.first + self.count)
        self.others = np.setdiff1d(np.arange(rows), self.at)
        self.dtype, self.threads = int(rng.integers(3)), int(rng.choice([1, 2, 3, 8, 1000]))
        self.kind = str(rng.choice(["plain", "plain", "large", "tiny", "wild", "masked"]))
        self.logits = make_rows(memory, self.outer, self.inner, self.vocab, self.dtype)
        x = narrow(numbers(rng, (self.count, self.vocab), self.kind), self.dtype)
        self.logits.buffer.typed(STORED[self.dtype])[self.logits.index(self.at)] = x
        self.transform = Transform.draw(rng, self.count)
        self.z, self.slope = self.transform(widen(x, self.dtype))
        targets = rng.integers(0, self.vocab, self.count)
        outside = rng.choice([-1, -100, self.vocab, 2**62, -(2**63)], size=self.count)
        self.targets = np.where(rng.random(self.count) < 0.1, outside, targets)
        self.targets_at = memory.holding(self.targets)
        t = self.transform
        per_row = memory.holding(t.inverse).address if t.per_row else 0
        fixed = 1.0 if t.per_row or not self.count else float(t.inverse[0])
        self.numbers = (t.scale, t.softcap, fixed, per_row)

    def __str__(self) -> str:
        t = self.transform
        return (
            f"rows {self.first}+{self.count} of [{self.outer}, {self.inner}, {self.vocab}], dtype {self.dtype}, strides "
            f"{self.logits.strides}, {self.kind}, scale {t.scale}, softcap {t.softcap}, 1/T {t.inverse.tolist()}, "
            f"threads {self.threads}"
        )

    def run(self) -> None:
        read = self.rng.random(self.count) < 0.8 if self.rng.integers(2) else np.ones(self.count, bool)
        read_at = 0 if read.all() else self.memory.holding(read.astype(np.uint8)).address
        # max, sum, target; weighted, squares (which goes with weighted) and top if wanted
        outs, kind, ids = (
            [self.memory.take(4 * self.count) for _ in range(6)],
            int(self.rng.integers(3)),
            bool(self.rng.integers(2)),
        )
        entropy, squares = kind > 0, kind > 1
        wanted = (True, True, True, entropy, squares, ids)
        addresses = [b.address if w else 0 for b, w in zip(outs, wanted, strict=True)]
        unread = np.concatenate([self.others, self.at[~read]])
        for isa in self.module.isas():
            self.module.use_isa(isa)
            before = self.memory.snapshot()
            self.logits.protect(unread, 0)
            self.module.stats(
                self.logits.buffer.address, self.dtype, self.inner, *self.logits.strides, self.vocab, self.first, self.count,
                self.targets_at.address, read_at, *self.numbers, *addresses, self.threads,
            )  # fmt: skip
            self.logits.protect(unread, mmap.PROT_READ | mmap.PROT_WRITE)
            self.memory.check(before, {b: None for b, address in zip(outs, addresses, strict=True) if address})
            stats = [b.typed(np.int32 if b is outs[5] else np.float32).copy() for b in outs]
            self.check_stats(isa, [x if w else None for x, w in zip(stats, wanted, strict=True)], read)
        self.run_grads(stats, kind, read)

    def check_stats(self, isa: str, stats: list[Any], read: Array) -> None:
        for vector, nothing in zip(stats, (0.0, 1.0, 0.0, 0.0, 0.0, -1), strict=True):
            assert vector is None or (vector[~read] == nothing).all(), isa
        top, total, chosen, weighted, squares, first = stats
        for i in np.flatnonzero(read):
            z, target = self.z[i], self.targets[i]
            inside = 0 <= target < self.vocab
            at_target = z[target] if inside else np.nan
            size = np.abs(z[np.isfinite(z)]).max(initial=0.0)
            if (z == -np.inf).all():
                assert total[i] == 0, f"{isa}: row {i} is not 0 but {total[i]}"
                continue
            if np.isnan(z).any() or (z == np.inf).any():
                assert np.isnan(total[i]), f"{isa}: row {i} is not NaN but {total[i]}"
                continue
            assert np.isnan(chosen[i]) if not inside else near(chosen[i], at_target, 4 * EPS * size), (
                f"{isa}: target of row {i}"
            )
            assert near(top[i], z.max(), 4 * EPS * size), f"{isa}: maximum of row {i}: {top[i]}, not {z.max()}"
            d = z - z.max()
            e = np.exp(d)
            product = np.where(e > 0, e * np.where(e > 0, d, 0.0), 0.0)
            off = EPS * (8 + 8 * size)  # relative, of each exp
            if off > 0.1 or size > 3e37:
                continue
            assert near(total[i], e.sum(), off * e.sum() + self.vocab * CUTOFF), (
                f"{isa}: sum of row {i}: {total[i]}, not {e.sum()}"
            )
            room = off * (np.abs(product).sum() + e.sum()) + 100 * self.vocab * CUTOFF
            assert weighted is None or near(weighted[i], product.sum(), room), f"{isa}: {weighted[i]}, not {product.sum()}"
            square = (e * e).sum()
            assert squares is None or near(squares[i], square, 2 * off * square + self.vocab * CUTOFF), (
                f"{isa}: sum of squares of row {i}: {squares[i]}, not {square}"
            )
            # Another id may have the same logit, or one that the kernel's arithmetic makes the same.
            assert first is None or (0 <= first[i] < self.vocab and near(z[first[i]], z.max(), 8 * EPS * size)), (
                f"{isa}: the largest logit of row {i} is not at {first[i]}"
            )

    def run_grads(self, stats: list[Array], kind: int, read: Array) -> None:
        rng, n, entropy = self.rng, self.count, kind > 0
        slopes = rng.choice(["plain", "plain", "wild"])
        d_logps, d_entropy, d_prob = (numbers(rng, (n,), slopes) * (rng.random(n) < 0.8) * read for _ in range(3))
        d_logps, d_entropy, d_prob = (np.where(read, x, 0.0).astype(np.float32) for x in (d_logps, d_entropy, d_prob))
        if not entropy:
            d_entropy = np.zeros_like(d_logps)
        if kind < 2:
            d_prob = np.zeros_like(d_logps)
        top, total, chosen, weighted = stats[:4]
        rubbish = rng.random() < 0.1
        if rubbish:
            top, total, chosen = (numbers(rng, (n,), "wild") for _ in range(3))
        H = np.log(total) - weighted / total if entropy else np.zeros(n, np.float32)
        with np.errstate(all="ignore"):
            constant = np.where(d_entropy == 0, 0.0, -d_entropy * H).astype(np.float32)
        given = (top, total, chosen, d_logps, constant, -d_entropy, d_prob)
        wanted = (True, True, True, True, entropy, entropy, kind > 1)
        addresses = [self.memory.holding(v.astype(np.float32)).address if w else 0 for v, w in zip(given, wanted, strict=True)]
        where, out = self.place_of_gradient()
        idle = (
            self.at[(d_logps == 0) & (d_entropy == 0) & (constant == 0) & (d_prob == 0)]
            if out.buffer is not self.logits.buffer
            else self.at[:0]
        )
        kept = self.logits.buffer.pages.copy()
        unread = np.concatenate([self.others, idle])
        for isa in self.module.isas():
            self.module.use_isa(isa)
            self.logits.buffer.pages[:] = kept
            before = self.memory.snapshot()
            self.logits.protect(unread, 0)
            self.module.pull(
                self.logits.buffer.address, self.dtype, self.inner, *self.logits.strides, out.buffer.address, out.dtype,
                *out.strides, self.vocab, self.first, n, self.targets_at.address, *self.numbers, *addresses, self.threads,
            )  # fmt: skip
            self.logits.protect(unread, mmap.PROT_READ | mmap.PROT_WRITE)
            self.memory.check(before, {out.buffer: out.mask(self.at)})
            if not rubbish:
                self.check_grads(f"{isa}, {where}, {out.dtype}", out, total, (H, d_logps, d_entropy, d_prob))

    def place_of_gradient(self) -> tuple[str, Rows]:
        where, dtype = str(self.rng.choice(["apart", "in place", "narrower, in place"])), int(self.rng.integers(3))
        if where == "apart":
            return where, make_rows(self.memory, self.outer, self.inner, self.vocab, dtype)
        if where == "in place" or self.dtype != FP32 or dtype == FP32:
            return where, self.logits
        a, b = self.logits.strides
        return where, Rows(self.logits.buffer, dtype, (2 * a, 2 * b), 2 * self.logits.starts, self.vocab, 0)

    def check_grads(self, what: str, out: Rows, total: Array, slopes: tuple[Array, ...]) -> None:
        got, dtype, (H, d_logps, d_entropy, d_prob) = out.read(self.at), out.dtype, slopes
        for i in range(self.count):
            a, b, c, z = float(d_logps[i]), float(d_entropy[i]), float(d_prob[i]), self.z[i]
            if a == b == c == 0:
                assert (got[i] == 0).all(), f"{what}: row {i} has no slope, and a gradient"
                continue
            finite = z[z > -np.inf]
            if np.isnan(total[i]) or total[i] == 0 or not np.isfinite([a, b, c]).all():
                assert np.isnan(got[i]).all(), f"{what}: row {i} is not NaN"
                continue
            size = np.abs(finite).max()
            plain = abs(self.transform.scale * float(self.transform.inverse[i]))  # without a softcap
            steep = plain * (abs(a) + abs(b) + abs(c))
            if EPS * size > 1e-2 or not steep < 1e30:
                continue
            logp = z - z.max() - np.log(np.exp(z - z.max()).sum())
            p = np.exp(logp)
            term = np.where(p > 0, p * (np.where(p > 0, logp, 0.0) + H[i]), 0.0)
            exact, room = -a * p - b * term + c * p * p, np.abs(a * p) + np.abs(b) * (np.abs(term) + p) + 2 * np.abs(c) * p
            at = self.targets[i]
            if 0 <= at < self.vocab:
                exact[at] = -a * np.expm1(logp[at]) - b * term[at] + c * p[at] ** 2
                room[at] += abs(a)
            slope = np.abs(self.slope[i])
            small = -np.log(slope / max(plain, 1e-300) + 1e-300)  # exp is as inexact as its argument is large
            exact, room = exact * self.slope[i], room * slope * EPS * (16 + 16 * size + 2 * abs(H[i]) + 2 * small)
            room += ROUNDING[dtype] * np.abs(exact) + STEP[dtype] + 100 * CUTOFF * steep
            off = np.where(np.abs(exact) < HIGHEST[dtype], np.abs(got[i] - exact), 0.0)
            j = int(np.argmax(off - room))
            assert (off <= room).all(), f"{what}: row {i}, element {j}: {got[i, j]}, not {exact[j]}"


def near(got: Any, exact: Any, room: float) -> bool:
    return bool(got == np.float32(exact) or abs(float(got) - exact) <= room)


class FusedCall(RowCalls):
    """Both visits in one call, with the formula a logp + b entropy."""

    whole = True

    def run(self) -> None:
        rng, n, module = self.rng, self.count, self.module
        bonus, gradient, kind = bool(rng.integers(2)), rng.random() < 0.8, rng.choice(["plain", "plain", "wild"])
        read = rng.random(n) < 0.8 if rng.integers(2) else np.ones(n, bool)
        read_at = 0 if read.all() else self.memory.holding(read.astype(np.uint8)).address
        a, b = (np.where(read, numbers(rng, (n,), kind) * (rng.random(n) < 0.8), 0.0).astype(np.float32) for _ in range(2))
        if not bonus:
            b[:] = 0
        inputs = [self.memory.holding(x).address for x in (a, b)]
        steps = [("mul", 0, 2, 0), ("mul", 1, 3, 0), ("add", 4, 5, 0)]
        program = module.Program("a logp + b entropy", 0, 4, steps, [6, 2, 3])
        outs = [self.memory.take(4 * n) for _ in range(3)]
        where, out = self.place_of_gradient()
        kept = self.logits.buffer.pages.copy()
        unread = self.at[~read] if not gradient or out.buffer is not self.logits.buffer else self.at[:0]
        expected = self.expected()
        for isa in module.isas():
            module.use_isa(isa)
            self.logits.buffer.pages[:] = kept
            before = self.memory.snapshot()
            self.logits.protect(unread, 0)
            module.fused(
                program, [], inputs, bonus, self.logits.buffer.address, self.dtype, self.inner, *self.logits.strides,
                out.buffer.address if gradient else 0, out.dtype, *out.strides, self.vocab, n, self.targets_at.address, read_at,
                *self.numbers, *(x.address for x in outs), self.threads,
            )  # fmt: skip
            self.logits.protect(unread, mmap.PROT_READ | mmap.PROT_WRITE)
            written: dict[Buffer, Any] = {x: None for x in outs}
            if gradient:
                # An fp32 row whose beginning holds a narrower gradient has exponentials in the rest.
                written[out.buffer] = self.logits.mask(self.at) if out.buffer is self.logits.buffer else out.mask(self.at)
            self.memory.check(before, written)
            logps, entropy, _ = (x.typed(np.float32).copy() for x in outs)
            assert (logps[~read] == 0).all() and (entropy[~read] == 0).all(), isa
            self.check_values(isa, logps, entropy, expected, read)
            if gradient:
                slopes = (expected[1], a, b, np.zeros_like(a))
                self.check_grads(f"{isa}, {where}, {out.dtype}, bonus {bonus}", out, expected[2], slopes)

    def expected(self) -> tuple[Array, Array, Array]:
        """Log-probs, entropies and sums of the rows; NaN where a row is broken."""
        logps, entropies, sums = (np.full(self.count, np.nan) for _ in range(3))
        for i, z in enumerate(self.z):
            if np.isnan(z).any() or (z == np.inf).any() or (z == -np.inf).all():
                continue
            d = z - z.max()
            e = np.exp(d)
            sums[i] = e.sum()
            entropies[i] = np.log(sums[i]) - np.where(e > 0, e * np.where(e > 0, d, 0.0), 0.0).sum() / sums[i]
            if 0 <= self.targets[i] < self.vocab:
                logps[i] = d[self.targets[i]] - np.log(sums[i])
        return logps, entropies, sums

    def check_values(self, isa: str, logps: Array, entropy: Array, expected: tuple[Array, Array, Array], read: Array) -> None:
        for i in np.flatnonzero(read):
            size = np.abs(self.z[i][np.isfinite(self.z[i])]).max(initial=0.0)
            if np.isnan(expected[2][i]):
                assert np.isnan(logps[i]) and np.isnan(entropy[i]), f"{isa}: row {i} is not NaN"
            elif EPS * size < 1e-2:
                room = EPS * (16 + 16 * size)
                for what, x, y in (("log-prob", logps[i], expected[0][i]), ("entropy", entropy[i], expected[1][i])):
                    fine = np.isnan(x) if np.isnan(y) else near(x, y, room * (1 + abs(y)))
                    assert fine, f"{isa}: {what} of row {i} is {x}, not {y}"


class ScaleCall:
    def __init__(self, module: ModuleType, memory: Memory) -> None:
        rng = memory.rng
        self.module, self.memory = module, memory
        self.dtype, self.threads = int(rng.integers(3)), int(rng.choice([1, 2, 1000]))
        self.count = int(rng.choice([0, 1, 2, 15, 16, 17, 1000, 70_001, 200_003]))
        self.factor = float(rng.choice([0.3, -2.0, 0.0, 1e-30, np.nan, np.inf]))
        self.x = narrow(numbers(rng, (self.count,), "wild"), self.dtype)
        self.data = memory.holding(self.x)

    def __str__(self) -> str:
        return f"scale {self.count} of dtype {self.dtype} by {self.factor}, threads {self.threads}"

    def run(self) -> None:
        want = widen(narrow(widen(self.x, self.dtype) * np.float32(self.factor), self.dtype), self.dtype)
        for isa in self.module.isas():
            self.module.use_isa(isa)
            self.data.typed(self.x.dtype)[:] = self.x
            before = self.memory.snapshot()
            self.module.scale(self.data.address, self.dtype, self.count, self.factor, self.threads)
            self.memory.check(before, {self.data: None})
            got = widen(self.data.typed(self.x.dtype), self.dtype)
            assert np.array_equal(got, want, equal_nan=True), isa


@dataclass
class Matrix:
    buffer: Buffer
    dtype: int
    stride: int
    index: Array

    @classmethod
    def make(cls, memory: Memory, rows: int, columns: int, dtype: int, kind: str) -> Matrix:
        rng = memory.rng
        stride = columns + int(rng.choice([0, 0, 1, 16, 37]))
        index = np.arange(rows)[:, None] * stride + np.arange(columns)
        buffer = memory.take((int(index.max()) + 1) * SIZE[dtype] if index.size else 0)
        matrix = cls(buffer, dtype, stride, index)
        if index.size:
            buffer.typed(STORED[dtype])[index] = narrow(numbers(rng, (rows, columns), kind), dtype)
        return matrix

    @property
    def values(self) -> Array:
        return widen(self.buffer.typed(STORED[self.dtype])[self.index], self.dtype)

    @property
    def rounded(self) -> Array:
        """Rounded as in products of bf16 operands."""
        return widen(narrow(self.values, BF16), BF16).astype(np.float64)

    @property
    def mask(self) -> Array:
        elements = np.zeros(len(self.buffer.bytes) // SIZE[self.dtype], bool)
        elements[self.index] = True
        return elements.repeat(SIZE[self.dtype])


#: The library that executes the instructions of AMX where the processor does not; see tests/support/amx.py.
EMULATORS: list[ctypes.CDLL] = []


def engines(module: ModuleType) -> list[str]:
    return [name for name in module.products() if name != "amx" or EMULATORS]


class ProductCall:
    """One of the three products, of bf16 or fp32 operands."""

    SIZES = (0, 1, 2, 5, 6, 7, 31, 33, 63, 64, 65, 129, 191, 193, 511, 513, 1030)

    def __init__(self, module: ModuleType, memory: Memory) -> None:
        rng = memory.rng
        self.module, self.memory, self.rng = module, memory, rng
        self.n, self.h, self.v = (int(rng.choice(self.SIZES, p=[0.04] + [0.06] * 16)) for _ in range(3))
        self.which, self.threads = str(rng.choice(["logits", "d_hidden", "d_weight"])), int(rng.choice([1, 2, 3, 1000]))
        self.kind, self.operand = str(rng.choice(["plain", "plain", "wild", "masked"])), int(rng.choice([FP32, BF16]))
        self.engine = str(rng.choice(engines(module)))
        self.gradient = int(rng.choice([FP32, BF16])) if self.operand == BF16 else FP32
        # The sum begins at 0, at what `out` holds, or elsewhere.
        self.start = str(rng.choice(["none", "out", "other"]))
        self.result = FP32 if self.which != "d_weight" or self.start == "out" else int(rng.choice([FP32, BF16]))

    def __str__(self) -> str:
        types = f"operands {self.operand}, gradient {self.gradient}, result {self.result}"
        return f"{self.which} by {self.engine} {self.n} x {self.h} x {self.v}, {self.kind}, {types}, start {self.start}, threads {self.threads}"

    def product(self, left: Matrix, right: Matrix) -> tuple[Array, Array]:
        """The operands' values as they are multiplied."""
        rounded = self.operand == BF16
        return (left.rounded, right.rounded) if rounded else (left.values.astype(np.float64), right.values.astype(np.float64))

    def run(self) -> None:
        n, h, v, m, memory = self.n, self.h, self.v, self.module, self.memory
        start: Array = np.zeros(1)
        is_bf16, gradient_is_bf16 = self.operand == BF16, self.gradient == BF16
        if self.which == "logits":
            a, b = (Matrix.make(memory, rows, h, self.operand, self.kind) for rows in (n, v))
            out = Matrix.make(memory, n, v, FP32, "plain")
            bias = memory.holding(numbers(self.rng, (v,), "plain")) if self.start != "none" else None
            before, (left, right) = memory.snapshot(), self.product(a, b)
            right = right.T
            start = start if bias is None else bias.typed(np.float32)
            m.logits_product(
                self.engine, is_bf16, a.buffer.address, a.stride, b.buffer.address, b.stride, bias.address if bias else 0,
                out.buffer.address, out.stride, n, h, v, self.threads,
            )  # fmt: skip
        elif self.which == "d_hidden":
            a, b = Matrix.make(memory, n, v, self.gradient, self.kind), Matrix.make(memory, v, h, self.operand, self.kind)
            out = Matrix.make(memory, n, h, FP32, "plain")
            before, (left, right) = memory.snapshot(), self.product(a, b)
            m.d_hidden(
                self.engine, a.buffer.address, gradient_is_bf16, a.stride, b.buffer.address, is_bf16, b.stride,
                out.buffer.address, out.stride, n, h, v, self.threads,
            )  # fmt: skip
        else:
            a, b = Matrix.make(memory, n, v, self.gradient, self.kind), Matrix.make(memory, n, h, self.operand, self.kind)
            out = Matrix.make(memory, v, h, self.result, "plain")
            begin = {"none": None, "out": out}.get(self.start) or Matrix.make(memory, v, h, FP32, "plain")
            before, (left, right) = memory.snapshot(), self.product(a, b)
            left, given = left.T, self.start != "none"
            start = begin.values if given else start
            m.d_weight(
                self.engine, a.buffer.address, gradient_is_bf16, a.stride, b.buffer.address, is_bf16, b.stride,
                begin.buffer.address if given else 0, begin.stride, out.buffer.address, self.result == BF16, out.stride,
                n, h, v, self.threads,
            )  # fmt: skip
        memory.check(before, {out.buffer: out.mask})
        with np.errstate(invalid="ignore", over="ignore"):
            exact, size = left @ right + start, np.abs(left) @ np.abs(right) + np.abs(start)
        fine = np.isfinite(exact) & (size < 1e38)
        off = np.where(fine, np.abs(out.values - np.where(fine, exact, 0.0)), 0.0)
        stored = 2.0**-8 * np.where(fine, np.abs(exact), 0.0) if self.result == BF16 else 0.0
        split = 3 * 2.0**-16 if self.engine == "amx" and self.operand == FP32 else 0.0  # of fp32 as two numbers in bf16
        assert (off <= (4e-7 + split) * np.where(fine, size, 0.0) + stored + 1e-37).all(), off.max()
        assert not np.isfinite(out.values[~np.isfinite(size)]).any(), "a NaN or an infinity has vanished"


class SparseCall:
    """One of the three sparse products, over slots (row, id) of which some are not used. What no slot in use names is
    protected, or holds NaN."""

    SIZES = (0, 1, 2, 3, 15, 16, 17, 33, 64, 100, 129)

    def __init__(self, module: ModuleType, memory: Memory) -> None:
        rng = memory.rng
        self.module, self.memory, self.rng = module, memory, rng
        self.n, self.v = (int(rng.choice([1, 2, 5, 17, 60])) for _ in range(2))
        self.h = int(rng.choice([*self.SIZES, 1023, 1025, 2100]))
        self.which, self.threads = str(rng.choice(["logits", "d_hidden", "d_weight"])), int(rng.choice([1, 2, 3, 1000]))
        self.source, self.other = (int(rng.integers(3)) for _ in range(2))
        self.kind = str(rng.choice(["plain", "plain", "tiny", "wild"]))
        self.isa = str(rng.choice(module.isas()))
        counts = rng.integers(0, int(rng.choice([1, 3, 12])), self.n)
        self.rows = np.repeat(np.arange(self.n), counts)
        self.ids = np.where(
            rng.random(len(self.rows)) < 0.3, -rng.integers(1, 5, len(self.rows)), rng.integers(0, self.v, len(self.rows))
        )
        values = rng.standard_normal(len(self.rows)).astype(np.float32)
        self.values = np.where(rng.random(len(values)) < 0.2, np.float32(0), values)

    def __str__(self) -> str:
        what = f"{self.which} {self.n} x {self.h} x {self.v}, {len(self.ids)} slots, {self.kind}"
        return f"sparse {what}, dtypes {self.source} {self.other}, {self.isa}, threads {self.threads}"

    def matrix(self, rows: int, dtype: int, used: Array) -> Matrix:
        """NaN in all rows but those of `used`."""
        made = Matrix.make(self.memory, rows, self.h, dtype, self.kind)
        unused = np.setdiff1d(np.arange(rows), used)
        if made.index.size:
            made.buffer.typed(STORED[dtype])[made.index[unused]] = narrow(np.full(1, np.nan, np.float32), dtype)
        return made

    def run(self) -> None:
        self.module.use_isa(self.isa)
        memory, m = self.memory, self.module
        counted = (self.ids >= 0) & ((self.which == "logits") | (self.values != 0))
        ids, rows = (memory.holding(x.astype(np.int64)) for x in (self.ids, self.rows))
        used_rows, used_ids = self.rows[counted], self.ids[counted]
        if self.which == "logits":
            hidden, weight = self.matrix(self.n, self.source, used_rows), self.matrix(self.v, self.other, used_ids)
            out = memory.take(4 * len(self.ids))
            before = memory.snapshot()
            m.slot_logits(
                hidden.buffer.address, hidden.dtype, hidden.stride, self.n, weight.buffer.address, weight.dtype, weight.stride,
                self.v, self.h, ids.address, rows.address, out.address, len(self.ids), self.threads,
            )  # fmt: skip
            memory.check(before, {out: None})
            found = out.typed(np.float32)
            assert (found[~counted] == -np.inf).all()
            factors = hidden.values[used_rows].astype(np.float64), weight.values[used_ids].astype(np.float64)
            self.compare(found[counted], (factors[0] * factors[1]).sum(1), np.abs(factors[0] * factors[1]).sum(1), FP32)
            return
        values, by_id = memory.holding(self.values), self.which == "d_weight"
        into, frm = (used_ids, used_rows) if by_id else (used_rows, used_ids)
        source = self.matrix(self.n if by_id else self.v, self.source, frm)
        out_rows = self.v if by_id else self.n
        target = Matrix.make(memory, out_rows, self.h, self.other, "plain")
        before, start = memory.snapshot(), target.values.astype(np.float64)
        add, sizes = (m.add_hidden_rows, (self.n, self.v)) if by_id else (m.add_weight_rows, (self.v, self.n))
        add(
            values.address, ids.address, rows.address, len(self.ids), source.buffer.address, source.dtype, source.stride, sizes[0],
            target.buffer.address, target.dtype, target.stride, sizes[1], self.h, self.threads,
        )  # fmt: skip
        touched = np.unique(into)
        written = np.zeros(len(target.buffer.bytes) // SIZE[self.other], bool)
        if target.index.size:
            written[target.index[touched]] = True
        memory.check(before, {target.buffer: written.repeat(SIZE[self.other])})
        exact = start if by_id else np.zeros_like(start)
        size, terms = np.abs(exact), self.values[counted, None].astype(np.float64) * source.values[frm].astype(np.float64)
        np.add.at(exact, into, terms)
        np.add.at(size, into, np.abs(terms))
        self.compare(target.values[touched], exact[touched], size[touched], self.other)

    def compare(self, found: Array, exact: Array, size: Array, dtype: int) -> None:
        fine = np.isfinite(exact) & (size < HIGHEST[dtype] / 4)
        off = np.abs(np.where(fine, found, 0.0) - np.where(fine, exact, 0.0))
        stored = ROUNDING[dtype] * np.abs(np.where(fine, exact, 0.0)) + STEP[dtype]
        terms = max(self.h / 8 if self.which == "logits" else len(self.ids), 1) + 8
        assert (off <= stored + EPS * terms * np.where(fine, size, 0.0)).all(), off.max()
        assert not np.isfinite(found[np.isnan(size) | np.isinf(size)]).any(), "a NaN or an infinity has vanished"


class SelectCall(RowCalls):
    """Columns of rows, from their statistics: what is drawn has the mass that the probabilities have."""

    def run(self) -> None:
        self.module.use_isa(str(self.rng.choice(self.module.isas())))
        for a in range(self.outer):  # rows of one stride
            at = self.at[self.at // self.inner == a]
            if len(at):
                self.select(at)

    def select(self, at: Array) -> None:
        m, memory, k, vocab = self.module, self.memory, len(at), self.vocab
        own, t = at - self.first, self.transform
        step = float(self.rng.choice([1.0, 0.5, 1 / 16, 1 / 256, 1 / 4096]))
        capacity = int(1 / step) + 3
        per_row = memory.holding(t.inverse[own].copy()).address if t.per_row else 0
        numbers = (*self.numbers[:3], per_row)
        targets, starts = memory.holding(self.targets[own].copy()), memory.holding(self.rng.integers(0, 2**40, k))
        top, total, target, masses = (memory.take(width * k) for width in (4, 4, 4, 8))
        first = self.logits.buffer.address + int(self.logits.starts[at[0]]) * SIZE[self.dtype]
        rows = (first, self.dtype, k, 0, self.logits.strides[1], vocab, 0, k)
        m.stats(*rows, targets.address, 0, *numbers, top.address, total.address, target.address, 0, 0, 0, self.threads)
        ids, taken = memory.take(4 * k * capacity), memory.take(4 * k * capacity)
        before = memory.snapshot()
        m.select(
            first, self.dtype, self.logits.strides[1], vocab, k, targets.address, *numbers, top.address, total.address, 2.0**31 / step,
            starts.address, capacity, ids.address, taken.address, masses.address, self.threads,
        )  # fmt: skip
        memory.check(before, {ids: None, taken: None, masses: None})
        found, x = ids.typed(np.int32).reshape(k, capacity), widen(self.logits.read(at), FP32)
        inverse = np.float32(1) / total.typed(np.float32)
        usable = np.isfinite(inverse) & np.isfinite(top.typed(np.float32))
        for i in range(k):
            columns = found[i][found[i] >= 0]
            assert (found[i][len(columns) :] == -1).all() and (np.diff(columns) > 0).all() and (columns < vocab).all()
            assert np.array_equal(
                taken.typed(np.float32).reshape(k, capacity)[i, : len(columns)], x[i, columns], equal_nan=True
            )
            inside = 0 <= self.targets[own][i] < vocab
            assert not inside or self.targets[own][i] in columns
            mass, start = int(masses.typed(np.int64)[i]), int(starts.typed(np.int64)[i])
            if not usable[i]:
                assert len(columns) == inside and mass == 0
                continue
            p = np.exp(np.minimum(self.z[own][i] - top.typed(np.float32)[i], 0)) * inverse[i]
            whole = p >= step * (1 - 1e-4)
            sure, small = (
                p >= step * (1 + 1e-4),
                np.where(np.arange(vocab) == self.targets[own][i], 0.0, np.where(whole, 0.0, p)),
            )
            assert np.isin(np.flatnonzero(sure), columns).all()
            if np.array_equal(whole, sure):
                assert abs(mass - small.sum() / step * 2**31) <= vocab + 2e-4 * 2**31 / step
                crossings = ((start + mass) >> 31) - (start >> 31)
                drawn = len(columns) - int((whole | (np.arange(vocab) == self.targets[own][i])).sum())
                assert drawn == crossings, (drawn, crossings)


def refusals(module: ModuleType, memory: Memory) -> int:
    """Calls whose arguments cannot be right raise ValueError and write nothing."""
    memory.reset(np.random.default_rng(0))
    buffers = [memory.holding(np.zeros(64, np.float64)).address for _ in range(12)]
    stats = dict(
        logits=buffers[0], dtype=0, inner=2, outer_stride=8, inner_stride=4, vocab=4, first=0, count=4, targets=buffers[1], read=0,
        scale=1.0, softcap=0.0, inverse=1.0, inverses=0, max=buffers[2], sum=buffers[3], target=buffers[4], weighted=0, squares=0,
        top=0, threads=1,
    )  # fmt: skip
    grads = dict(
        logits=buffers[0], dtype=0, inner=2, outer_stride=8, inner_stride=4, out=buffers[5], out_dtype=0, out_outer=8, out_inner=4,
        vocab=4, first=0, count=4, targets=buffers[1], scale=1.0, softcap=0.0, inverse=1.0, inverses=0, max=buffers[2],
        sum=buffers[3], target=buffers[4], slope=buffers[6], constant=0, log=0, prob=0, threads=1,
    )  # fmt: skip
    scale = dict(data=buffers[0], dtype=0, count=4, factor=2.0, threads=1)
    logits = dict(
        engine="fp32",
        bf=False,
        hidden=buffers[0],
        hs=4,
        weight=buffers[1],
        ws=4,
        bias=0,
        out=buffers[2],
        os=4,
        rows=4,
        width=4,
        vocab=4,
        threads=1,
    )
    d_hidden = dict(
        engine="fp32",
        gradient=buffers[0],
        gbf=True,
        gs=4,
        weight=buffers[1],
        bf=True,
        ws=4,
        out=buffers[2],
        os=4,
        rows=4,
        width=4,
        vocab=4,
        threads=1,
    )
    d_weight = dict(
        engine="fp32", gradient=buffers[0], gbf=False, gs=4, hidden=buffers[1], bf=True, hs=4, start=buffers[3], ss=4, out=buffers[2], obf=True, os=4,
        rows=4, width=4, vocab=4, threads=1,
    )  # fmt: skip
    fused = dict(
        program=module.Program("a sum", 0, 2, [("add", 0, 1, 0)], [2, 0, 1]), numbers=[], vectors=[], with_entropy=False,
        logits=buffers[0], dtype=0, inner=2, outer_stride=8, inner_stride=4, out=buffers[5], out_dtype=0, out_outer=8, out_inner=4,
        vocab=4, count=4, targets=buffers[1], read=0, scale=1.0, softcap=0.0, inverse=1.0, inverses=0, logps=buffers[2],
        entropy=buffers[3], losses=buffers[4], threads=1,
    )  # fmt: skip
    slots = dict(ids=memory.holding(np.zeros(4, np.int64)).address, slot_rows=memory.holding(np.zeros(4, np.int64)).address)
    buffers += slots.values()
    slot_logits = dict(
        hidden=buffers[0], dtype=0, hs=4, rows=4, weight=buffers[1], out_dtype=0, ws=4, vocab=4, width=4, **slots,
        logits=buffers[2], count=4, threads=1,
    )  # fmt: skip
    sums = dict(
        values=buffers[3], **slots, count=4, source=buffers[0], dtype=0, hs=4, vocab=4, out=buffers[2], out_dtype=0, os=4,
        rows=4, width=4, threads=1,
    )  # fmt: skip
    select = dict(
        logits=buffers[0], dtype=0, hs=4, vocab=4, count=4, targets=buffers[1], scale=1.0, softcap=0.0, inverse=1.0, inverses=0,
        max=buffers[2], sum=buffers[3], per_unit=2.0**35, starts=buffers[4], capacity=4, found=buffers[5], taken=buffers[6],
        masses=buffers[7], threads=1,
    )  # fmt: skip
    calls = [(module.stats, stats), (module.select, select), (module.pull, grads), (module.fused, fused), (module.scale, scale)]
    calls += [(module.slot_logits, slot_logits), (module.add_weight_rows, sums), (module.add_hidden_rows, sums)]
    if module.has_products():
        calls += [(module.logits_product, logits), (module.d_hidden, d_hidden), (module.d_weight, d_weight)]
    optional = {"read", "inverses", "weighted", "squares", "top", "constant", "log", "prob", "bias", "start", "found", "masses"}
    refused = 0
    for function, good in calls:
        function(*good.values())
        before = memory.snapshot()
        bad: list[tuple[str, object]] = [("threads", 0), ("threads", -1)]
        bad += [
            (k, v)
            for k in ("count", "first", "rows", "width", "capacity")
            if type(good.get(k)) is int
            for v in (-1, -(2**63), 2**62)
        ]
        bad += [("vocab", v) for v in (-1, -(2**63), 2**62) if "vocab" in good]
        bad += [(k, v) for k in ("vocab", "inner") if "inner" in good for v in (0, -3)]
        bad += [(k, v) for k in ("dtype", "out_dtype") if k in good for v in (-1, 3, 2**31 - 1)]
        bad += [
            (k, v)
            for k in good
            if "stride" in k or k in ("hs", "ws", "os", "gs", "ss", "out_outer", "out_inner")
            for v in (2**62, -(2**63))
        ]
        pointers = [k for k, v in good.items() if isinstance(v, int) and v in buffers]
        may_be_null = optional | ({"out"} if "program" in good else set())
        bad += [(k, 0) for k in pointers if k not in may_be_null] + [(k, good[k] + 1) for k in pointers]  # type: ignore[operator]
        if "engine" in good:
            bad.append(("engine", "torch"))
        if good.get("gbf"):
            bad.append(("bf", False))  # beside fp32 operands
        if "squares" in good:
            bad.append(("squares", buffers[7]))  # without the weighted sum
        if "program" in good:
            bad += [("numbers", [1.0]), ("vectors", [buffers[6]]), ("program", module.Program("x", 0, 2, [], [0]))]
            bad += [("program", module.Program("x", 0, 3, [], [0, 1, 2]))]
        for name, value in bad:
            try:
                function(*(good | {name: value}).values())
            except ValueError:
                refused += 1
                continue
            raise AssertionError(f"{function.__name__} took {name}={value}")
        memory.check(before, {})
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
    kinds: list[Any] = [RowCalls, RowCalls, FusedCall, RowCalls, FusedCall, ScaleCall, SparseCall, SparseCall, SelectCall]
    if module.has_products():
        kinds.append(ProductCall)
    for i in range(int(first), int(first) + int(calls)):
        memory.reset(np.random.default_rng([int(seed), i]))
        with np.errstate(all="ignore"):
            call = kinds[i % len(kinds)](module, memory)
            print(f"{i}: {call}", flush=True)
            call.run()
    print(f"{calls} calls were right")


if __name__ == "__main__":
    main(*sys.argv[1:])
