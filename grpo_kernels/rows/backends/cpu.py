"""The CPU backend: C++ kernels (csrc/), AVX-512, AVX2 or plain code picked at run time. The second part of the file turns tensors
into arguments of the compiled module: the only place that takes addresses, each behind a check of what C++ will take to be there.

There are no RL formulas here: `fused` has those of token_stage.py traced into a program, which C++ runs between its two visits of a
row. A formula that cannot be traced costs a second visit of the logits with the formulas in torch; `strict` refuses it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...formulas.program import FormulaRefused, Program
from ...formulas.token_stage import TokenStage
from ..divergence import KINDS
from ..partials import SLOPES, LogitRows, Partials, RowTransform, Slopes
from ..ragged import Ragged
from ..selection import Drawn, capacity, per_unit
from . import Backend, FusedRows, fall_back, native

if TYPE_CHECKING:
    from ... import _cpu

    _import_error: str
else:
    try:
        _cpu = native.load()
    except ImportError as error:
        _cpu = None
        _import_error = str(error)

Tensor = torch.Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

#: Bytes of logits in a block of rows that is visited twice. A block has a fixed cost of 100-200 us (two parallel regions and
#: the token stage), so it should be large, but no larger than the last-level cache: on 2 cores that share 32 MiB, blocks of
#: 8 / 16 / 32 MiB took 1.57 / 1.40 / 1.32 times a copy of the logits. Large servers have about 4 MiB of cache per thread.
BLOCK_BYTES_PER_THREAD = 4 << 20


def available() -> str | None:
    """None if this backend can run, else the reason in words."""
    if _cpu is None:
        command = native.build_command(native.package())
        return f"the compiled module is missing: {_import_error}. `{command}` builds it, with a C++17 compiler"
    return None


@functools.cache
def last_level_cache() -> int:
    """Bytes of one last-level cache; 32 MiB where the system does not say."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(size.removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 20


class Kernels(Backend):
    """`strict`: no second pass over the logits for a formula in torch, and a program is compared with torch before its first
    use."""

    writes_behind_reads = True

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    # ---- rows of logits

    def stats(self, rows: LogitRows, names: tuple[str, ...]) -> Partials:
        (lo, n), vocab = part_of(rows), rows.logits.shape[2]
        result = Partials.empty(names, n, rows.logits.device, rows.second)
        at = of_partials(result, n)
        of_rows = vector("targets", rows.targets, torch.int64, n), vector("read", rows.read, torch.bool, n)
        own = (at["max"], at["sum"], at["target"], at.get("weighted", 0), at.get("squares", 0), at.get("top", 0))
        if rows.second is None:
            of_logits = rows_of("logits", rows.logits)
            transform = (rows.transform.scale, rows.transform.softcap, *inverse_temperature(rows.transform, n))
            _cpu.stats(*of_logits, vocab, lo, n, *of_rows, *transform, *own, torch.get_num_threads())
        else:
            both = (at["teacher_max"], at["teacher_sum"], at["cross"], at["excess"])
            streams, kind = _streams(rows, n), KINDS.index(rows.second.kind)
            _cpu.divergence_stats(*streams, kind, vocab, lo, n, *of_rows, *own, *both, torch.get_num_threads())
        return result

    def mixed(self, rows: LogitRows, partials: Partials) -> Tensor:
        assert rows.second is not None
        lo, n = part_of(rows)
        result, at, log_sums = torch.empty(2, n, dtype=torch.float32), of_partials(partials, n), partials.log_sums
        first, _, step = matrix("result", result, (2, n))
        _cpu.divergence_mixed(
            *_streams(rows, n), rows.second.mixture, rows.logits.shape[2], lo, n, vector("read", rows.read, torch.bool, n),
            at["max"], at["sum"], at["teacher_max"], at["teacher_sum"], vector("log_sums", log_sums, torch.float32, n),
            first, first + 4 * step, torch.get_num_threads(),
        )  # fmt: skip
        return result

    def pull(self, rows: LogitRows, partials: Partials, slopes: Slopes, out: Tensor) -> None:
        (lo, n), vocab = part_of(rows), rows.logits.shape[2]
        at, targets = of_partials(partials, n), vector("targets", rows.targets, torch.int64, n)
        *of_row, of_divergence = of_slopes(slopes, n)
        to = (*rows_of("out", out, rows.logits.shape).out, vocab, lo, n, targets)
        own = (at["max"], at["sum"], at["target"], *of_row)
        if not of_divergence:
            of_logits = rows_of("logits", rows.logits)
            transform = (rows.transform.scale, rows.transform.softcap, *inverse_temperature(rows.transform, n))
            _cpu.pull(*of_logits, *to, *transform, *own, torch.get_num_threads())
            return
        assert rows.second is not None
        log_sums, center = partials.log_sums, partials.center
        both = (vector("log_sums", log_sums, torch.float32, n), vector("center", center, torch.float32, n), of_divergence)
        streams, kind = _streams(rows, n), (KINDS.index(rows.second.kind), rows.second.mixture)
        tops = (at["teacher_max"], at["teacher_sum"])
        _cpu.divergence_pull(*streams, *kind, *to, *own, *tops, *both, torch.get_num_threads())

    def fused(self, rows: LogitRows, stage: TokenStage, out: Tensor | None) -> FusedRows:
        """Both passes over a row and the formulas between them, run by one thread per row."""
        if self.strict:
            stage.compare_once(_run)
        try:
            program, numbers = stage.program()
            compiled = _compiled(program)
        except FormulaRefused as refusal:
            if self.strict:
                raise
            fall_back("a second visit of the logits, with the formulas in PyTorch, which is slower", str(refusal).rstrip("."))
            threads = torch.get_num_threads()
            of_row = rows.logits.shape[-1] * rows.logits.element_size() * (1 if rows.second is None else 2)
            block_rows = max(last_level_cache(), BLOCK_BYTES_PER_THREAD * threads) // of_row
            return self.two_visits(rows, stage, out, max(block_rows, threads))
        of_logits, n, inputs = rows_of("logits", rows.logits), rows.n, stage.inputs(program)
        of_inputs = [vector(name, x, torch.float32, n) for name, x in inputs.items()]
        of_out = (0, *of_logits.out[1:]) if out is None else rows_of("out", out, rows.logits.shape).out
        by, to = (compiled, numbers, of_inputs, stage.formula.bonus), (*of_out, rows.logits.shape[2], n)
        of_rows = vector("targets", rows.targets, torch.int64, n), vector("read", rows.read, torch.bool, n)
        results = torch.empty(3 if rows.second is None else 4, n, dtype=torch.float32).unbind()
        found = [vector("results", x, torch.float32, n) for x in results]
        if rows.second is None:
            transform = (rows.transform.scale, rows.transform.softcap, *inverse_temperature(rows.transform, n))
            _cpu.fused(*by, *of_logits, *to, *of_rows, *transform, *found, torch.get_num_threads())
        else:
            kind, weight = (KINDS.index(rows.second.kind), rows.second.mixture), stage.rows.divergence_weight
            weight = None if weight is None else weight.contiguous()
            of_weight = vector("divergence_weight", weight, torch.float32, n)
            _cpu.divergence_fused(*by, *_streams(rows, n), *kind, *to, *of_rows, of_weight, *found, torch.get_num_threads())
        return FusedRows(*results)

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        number = float(factor)
        if number == 1.0:
            return
        if gradient.is_contiguous() and gradient.dtype in DTYPES:
            address, dtype, _ = matrix("gradient", gradient.view(1, -1), (1, gradient.numel()))
            _cpu.scale(address, dtype, gradient.numel(), number, torch.get_num_threads())
        else:
            gradient.mul_(number)

    # ---- products over slots

    def slot_logits(self, hidden: Tensor, weight: Tensor, slots: Ragged) -> Tensor:
        m, width = slots.ids.numel(), weight.shape[1]
        logits = torch.empty(m, dtype=torch.float32)
        _cpu.slot_logits(
            *_matrix_rows("hidden", hidden, width), *_matrix_rows("weight", weight, width), width,
            *_of_slots(slots, m), vector("logits", logits, torch.float32, m), m, torch.get_num_threads(),
        )  # fmt: skip
        return logits

    def add_weight_rows(self, values: Tensor, slots: Ragged, weight: Tensor, out: Tensor) -> None:
        _add_rows(_cpu.add_weight_rows, values, slots, "weight", weight, out)

    def add_hidden_rows(self, values: Tensor, slots: Ragged, hidden: Tensor, out: Tensor) -> None:
        _add_rows(_cpu.add_hidden_rows, values, slots, "hidden", hidden, out)

    # ---- columns of sparse gradients

    def masses(self, rows: LogitRows, partials: Partials, step: float) -> Tensor:
        sums = torch.empty(rows.n, dtype=torch.int64)
        _select(rows, partials, step, None, None, sums)
        return sums

    def select(self, rows: LogitRows, partials: Partials, step: float, starts: Tensor) -> Drawn:
        shape = (rows.n, capacity(step))
        drawn = Drawn(torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.float32))
        _select(rows, partials, step, starts, drawn, None)
        return drawn


def _streams(rows: LogitRows, n: int) -> tuple[_cpu.Stream, _cpu.Stream]:
    """Both streams, of which n rows are taken."""
    assert rows.second is not None
    own, second, t = rows.transform, rows_of("second.logits", rows.second.logits, rows.logits.shape), rows.second.transform
    first = _cpu.Stream(*rows_of("logits", rows.logits), own.scale, own.softcap, *inverse_temperature(own, n))
    return first, _cpu.Stream(*second, t.scale, t.softcap, *inverse_temperature(t, n))


@functools.lru_cache(maxsize=256)
def _compiled(program: Program) -> _cpu.Program:
    numbers = len(program.numbers_used)
    try:
        return _cpu.Program(program.name, numbers, len(program.inputs), list(program.steps), list(program.outputs))
    except ValueError as error:
        raise FormulaRefused(str(error)) from None


def _run(program: Program, numbers: list[float], inputs: list[Tensor]) -> list[Tensor]:
    """The outputs of a program for inputs fp32 [n]."""
    n, outputs = inputs[0].numel(), [torch.empty_like(inputs[0]) for _ in program.outputs]
    of_inputs, of_outputs = ([vector("inputs", x, torch.float32, n) for x in xs] for xs in (inputs, outputs))
    _compiled(program).run(numbers, of_inputs, of_outputs, n)
    return outputs


def _select(
    rows: LogitRows, partials: Partials, step: float, starts: Tensor | None, drawn: Drawn | None, masses: Tensor | None
) -> None:
    logits, transform, n = rows.logits[0], rows.transform, rows.n
    address, dtype, stride = matrix("logits", logits, (n, logits.shape[1]))
    at, places = of_partials(partials, n), n * capacity(step)
    ids, taken = (None, None) if drawn is None else (x.view(-1) for x in drawn)
    _cpu.select(
        address, dtype, stride, logits.shape[1], n, vector("targets", rows.targets, torch.int64, n),
        transform.scale, transform.softcap, *inverse_temperature(transform, n), at["max"], at["sum"],
        per_unit(step), vector("starts", starts, torch.int64, n), capacity(step), vector("ids", ids, torch.int32, places),
        vector("taken", taken, torch.float32, places), vector("masses", masses, torch.int64, n), torch.get_num_threads(),
    )  # fmt: skip


def _add_rows(kernel: Callable[..., None], values: Tensor, slots: Ragged, name: str, source: Tensor, out: Tensor) -> None:
    m, width = slots.ids.numel(), source.shape[1]
    kernel(
        vector("values", values, torch.float32, m), *_of_slots(slots, m), m,
        *_matrix_rows(name, source, width), *_matrix_rows("out", out, width), width, torch.get_num_threads(),
    )  # fmt: skip


def _matrix_rows(name: str, x: Tensor, width: int) -> tuple[int, int, int, int]:
    """Address, dtype, stride and number of rows."""
    return *matrix(name, x, (x.shape[0], width)), x.shape[0]


def _of_slots(slots: Ragged, m: int) -> tuple[int, int]:
    """The addresses of ids and rows, whose values are trusted."""
    return vector("slots.ids", slots.ids, torch.int64, m), vector("slots.rows", slots.rows, torch.int64, m)


# ---- tensors as addresses and numbers. `name` is what an error calls the tensor, which the caller keeps until the kernel is done.


def wrong(name: str, x: Tensor, taken: str) -> ValueError:
    """The error about a tensor that would be read or written as something else than it is."""
    of = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} with strides {list(x.stride())} on {x.device}"
    return ValueError(f"{name} is {of}: the C++ kernels take {taken} on a CPU.")


def vector(name: str, x: Tensor | None, dtype: torch.dtype, n: int) -> int:
    """The address of n values in one piece; 0 for None."""
    if x is None:
        return 0
    if x.dtype != dtype or x.shape != (n,) or not x.is_contiguous() or x.device.type != "cpu":
        raise wrong(name, x, f"{str(dtype).removeprefix('torch.')} [{n}] in one piece")
    return x.data_ptr()


def matrix(name: str, x: Tensor, shape: tuple[int, int], dtypes: Collection[torch.dtype] = DTYPES) -> tuple[int, int, int]:
    """Address, dtype and stride of rows that are in one piece each."""
    # contiguous() does not change the strides of an empty tensor
    plain = x.shape == shape and (x.stride(1) == 1 or shape[1] == 1 or x.numel() == 0)
    if not plain or x.dtype not in dtypes or x.device.type != "cpu":
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise wrong(name, x, f"{names} {list(shape)} with unit stride in the last dimension")
    return x.data_ptr(), DTYPES[x.dtype], x.stride(0)


class Rows(NamedTuple):
    """Rows of logits [A, T, V], of which `inner` is T."""

    address: int
    dtype: int
    inner: int
    outer_stride: int
    inner_stride: int

    @property
    def out(self) -> tuple[int, int, int, int]:
        """As memory for the gradient of rows."""
        return self.address, self.dtype, self.outer_stride, self.inner_stride


def rows_of(name: str, x: Tensor, shape: torch.Size | None = None) -> Rows:
    """The rows of x [A, T, V]; `shape`: what it must have."""
    plain = x.dim() == 3 and (shape is None or x.shape == shape) and (x.stride(2) == 1 or x.shape[2] == 1 or x.numel() == 0)
    if not plain or x.dtype not in DTYPES or x.device.type != "cpu":
        raise wrong(name, x, f"fp32, bf16 or fp16 {'[A, T, V]' if shape is None else list(shape)} with unit stride in V")
    return Rows(x.data_ptr(), DTYPES[x.dtype], x.shape[1], x.stride(0), x.stride(1))


def part_of(rows: LogitRows) -> tuple[int, int]:
    """(the first row, how many) of those of the logits that are meant."""
    all_rows = rows.logits.shape[0] * rows.logits.shape[1]
    lo, hi = rows.part or (0, all_rows)
    if not 0 <= lo <= hi <= all_rows:
        raise ValueError(f"rows={rows.part}: the logits have {all_rows}.")
    return lo, hi - lo


def of_partials(partials: Partials, n: int) -> dict[str, int]:
    """The address of each partial of n rows, by name."""
    first, _, step = matrix("partials", partials.values, (len(partials.names), n), (torch.float32,))
    return {name: first + 4 * step * i for i, name in enumerate(partials.names)}


def of_slopes(slopes: Slopes, n: int) -> tuple[int, ...]:
    """The addresses of the slopes of n rows in the order of SLOPES; 0 where there is none."""
    first, _, step = matrix("slopes", slopes.values, (len(slopes.names), n), (torch.float32,))
    return tuple(first + 4 * step * slopes.names.index(name) if name in slopes.names else 0 for name in SLOPES)


def inverse_temperature(transform: RowTransform, n: int) -> tuple[float, int]:
    """The number, and the address of the per-row values or 0."""
    t = transform.inv_temperature
    return (1.0, vector("inv_temperature", t, torch.float32, n)) if isinstance(t, Tensor) else (t, 0)
