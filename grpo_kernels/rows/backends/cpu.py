"""The CPU backend: C++ kernels (csrc/), AVX-512 or AVX2, picked at run time. The second part of the file turns tensors
into arguments of the compiled module: the only place that takes addresses, each behind a check of what C++ will take to be there.

There are no RL formulas here: those of token_stage.py are traced into a program, which C++ runs on vectors (`evaluate`), or
between its two visits of a row (`fused`). A formula that cannot be traced runs in torch, which for `fused` costs a second visit of
the logits; `strict` refuses it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...formulas.program import FormulaRefused, Program
from ...formulas.token_stage import TokenStage
from ..divergence import KINDS
from ..partials import OF_KERNELS, SLOPES_OF_KERNELS, LogitRows, Partials, RowTransform, Slopes
from ..ragged import Ragged
from . import Backend, eager, fall_back, native

if TYPE_CHECKING:
    import grpo_kernels._cpu as _cpu

    _import_error: str
else:
    try:
        _cpu = native.load()
    except ImportError as error:
        _cpu = None
        _import_error = str(error)


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

NO_AVX2 = "the C++ kernels need AVX2, which this processor does not have"

#: Bytes of logits in a block of rows that is visited twice. A block has a fixed cost of 100-200 us (two parallel regions and
#: the token stage), so it should be large, but no larger than the last-level cache: on 2 cores that share 32 MiB, blocks of
#: 8 / 16 / 32 MiB took 1.57 / 1.40 / 1.32 times a copy of the logits. Large servers have about 4 MiB of cache per thread.
BLOCK_BYTES_PER_THREAD = 4 << 20


def available() -> str | None:
    """None if this backend can run, else the reason in words."""
    if _cpu is None and native.why_not_here() is not None:
        return native.why_not_here()
    if _cpu is None:
        command = native.build_command(native.package())
        return f"the compiled module is missing: {_import_error}. `{command}` builds it, with a C++17 compiler"
    return None if _cpu.isa() else NO_AVX2


@functools.cache
def last_level_cache() -> int:
    """Bytes of one last-level cache; 32 MiB where the system does not say."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(size.removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 20


class Kernels(Backend):
    """`strict`: no second pass over the logits for a formula in torch; a program is compared with torch before its first use."""

    writes_behind_reads = True

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    # ---- rows of logits

    def stats(self, rows: LogitRows, names: tuple[str, ...]) -> Partials:
        n = _count(rows)
        result = Partials.empty(names, n, rows.logits.device, rows.second)
        _cpu.softmax_sums(*_streams(rows, n), *_of_rows(rows, n), of_partials(result), torch.get_num_threads())
        return result

    def mixed(self, rows: LogitRows, partials: Partials) -> Tensor:
        n, result, of = _count(rows), torch.empty(2, rows.n, dtype=torch.float32), of_partials(partials)
        log_sums, read = partials.log_sums, vector("read", rows.read, torch.bool, n)
        own, second = _streams(rows, n, log_sums=log_sums)
        assert second is not None
        _cpu.mixture_sums(own, second, read, of, named("result", result, 0b11), torch.get_num_threads())
        return result

    def pull(self, rows: LogitRows, partials: Partials, slopes: Slopes, out: Tensor) -> None:
        n, log_sums, center, of = _count(rows), None, None, of_partials(partials)
        if "divergence" in slopes.names:
            log_sums, center = partials.log_sums, partials.center
        else:
            rows = rows._replace(second=None)
        own, second = _streams(rows, n, log_sums=log_sums, center=center)
        targets = vector("targets", rows.targets, torch.int64, n)
        of_slopes = named("slopes", slopes.values, bits(slopes.names, SLOPES_OF_KERNELS))
        to = memory(_cpu.Rows, "out", out, rows, n)
        _cpu.softmax_gradient(own, second, targets, of, of_slopes, to, torch.get_num_threads())

    def fused(self, rows: LogitRows, stage: TokenStage, out: Tensor | None) -> Tensor:
        """Both passes over a row and the formulas between them, run by one thread per row."""
        made = self._programs(stage)
        if made is None:
            threads = torch.get_num_threads()
            of_row = rows.logits.shape[-1] * rows.logits.element_size() * (1 if rows.second is None else 2)
            block_rows = max(last_level_cache(), BLOCK_BYTES_PER_THREAD * threads) // of_row
            return self.two_visits(rows, stage, out, max(block_rows, threads))
        n, weight = _count(rows), stage.rows.divergence_weight
        weight = None if weight is None or rows.second is None else weight.contiguous()
        streams = _streams(rows, n, weight=weight)
        results = torch.empty(3 if rows.second is None else 4, n, dtype=torch.float32)
        _fused(made, stage, rows, streams, _of_rows(rows, n), out, results)
        return results

    def _programs(self, stage: TokenStage) -> Programs | None:
        """What C++ runs of a token stage; None if it cannot, which `strict` refuses."""
        if self.strict:
            stage.compare_once(_run)
        try:
            program, numbers = stage.program()
            return Programs(program, _compiled(program), numbers)
        except FormulaRefused as refusal:
            if self.strict:
                raise
            fall_back("a second visit of the logits, with the formulas in PyTorch, which is slower", str(refusal).rstrip("."))
            return None

    def evaluate(self, stage: TokenStage, logps: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        made = self._programs(stage)
        if made is None:
            return eager.Kernels().evaluate(stage, logps, entropy)
        program, given = made.program, {"logps": logps, "entropy": entropy, **stage.inputs(made.program)}
        losses, grad_logps, grad_entropy = _run(program, made.numbers, [given[name] for name in program.inputs])
        return losses, grad_logps, None if stage.rows.entropy_weight is None else grad_entropy

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        number = float(factor)
        if number == 1.0:
            return
        if gradient.is_contiguous() and gradient.dtype in DTYPES and gradient.is_cpu:
            _cpu.scale(gradient.data_ptr(), DTYPES[gradient.dtype], gradient.numel(), number, torch.get_num_threads())
        else:
            gradient.mul_(number)

    # ---- products over slots

    def slot_logits(self, hidden: Tensor, weight: Tensor, slots: Ragged) -> Tensor:
        logits = torch.empty(slots.ids.numel(), dtype=torch.float32)
        of_logits = vector("logits", logits, torch.float32, slots.ids.numel())
        operands = matrix("hidden", hidden), matrix("weight", weight)
        _cpu.pair_logits(*operands, _slots(slots), of_logits, torch.get_num_threads())
        return logits

    def add_weight_rows(self, values: Tensor, slots: Ragged, weight: Tensor, out: Tensor) -> None:
        of_values = vector("values", values, torch.float32, slots.ids.numel())
        _cpu.add_grad_hidden_of_pairs(
            of_values, _slots(slots), matrix("weight", weight), matrix("out", out), torch.get_num_threads()
        )

    def add_hidden_rows(self, values: Tensor, slots: Ragged, hidden: Tensor, out: Tensor) -> None:
        of_values = vector("values", values, torch.float32, slots.ids.numel())
        _cpu.add_grad_weight_of_pairs(
            of_values, _slots(slots), matrix("hidden", hidden), matrix("out", out), torch.get_num_threads()
        )


class Programs(NamedTuple):
    """The program of a token stage, compiled, with its numbers."""

    program: Program
    compiled: _cpu.Program
    numbers: list[float]


def _fused(
    made: Programs, stage: TokenStage, rows: LogitRows, streams: tuple[_cpu.LogitRows, _cpu.ReferenceRows | None], at: tuple[int, int],
    out: Tensor | None, results: Tensor,
) -> None:  # fmt: skip
    """The call of C++. `at`: the addresses of targets and of what is read."""
    inputs = stage.inputs(made.program)
    of_inputs = [vector(name, x, torch.float32, results.shape[1]) for name, x in inputs.items()]
    to = None if out is None else memory(_cpu.Rows, "out", out, rows, _count(rows))
    _cpu.fused_loss(
        made.compiled, made.numbers, of_inputs, stage.rows.entropy_weight is not None, *streams, *at, to,
        named("results", results, (1 << results.shape[0]) - 1), torch.get_num_threads(),
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _compiled(program: Program) -> _cpu.Program:
    numbers = len(program.numbers_used)
    try:
        return _cpu.Program(program.name, numbers, len(program.inputs), list(program.steps), list(program.outputs))
    except ValueError as error:
        raise FormulaRefused(str(error)) from None


def _run(program: Program, numbers: list[float], inputs: list[Tensor]) -> list[Tensor]:
    """The outputs of a program for inputs fp32 [n]."""
    n = inputs[0].numel()
    outputs = [torch.empty(n, dtype=torch.float32) for _ in program.outputs]
    of_inputs = [vector(name, x, torch.float32, n) for name, x in zip(program.inputs, inputs, strict=True)]
    of_outputs = [vector("outputs", x, torch.float32, n) for x in outputs]
    _compiled(program).run(numbers, of_inputs, of_outputs, n)
    return outputs


# ---- tensors as arguments. `name` is what an error calls the tensor, which the caller keeps until the kernel is done.


def wrong(name: str, x: Tensor, taken: str, why: object = "") -> ValueError:
    """The error about a tensor that would be read or written as something else than it is."""
    of = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} with strides {list(x.stride())} on {x.device}"
    return ValueError(f"{name} is {of}: the C++ kernels take {taken} on a CPU.{f' ({why})' if why else ''}")


def vector(name: str, x: Tensor | None, dtype: torch.dtype, n: int) -> int:
    """The address of n values in one piece; 0 for None."""
    if x is None:
        return 0
    if x.dtype != dtype or x.shape != (n,) or not x.is_contiguous() or not x.is_cpu:
        raise wrong(name, x, f"{str(dtype).removeprefix('torch.')} [{n}] in one piece")
    return x.data_ptr()


def matrix(name: str, x: Tensor) -> _cpu.Matrix:
    """Rows that are in one piece each."""
    why: object = ""
    try:
        if x.is_cpu:
            return _cpu.Matrix(x.data_ptr(), DTYPES[x.dtype], x.shape, x.stride())
    except (KeyError, TypeError, ValueError) as error:
        why = error
    raise wrong(name, x, "a matrix in fp32, bf16 or fp16 with unit stride in its last dimension", why)


def named(name: str, x: Tensor, names: int) -> _cpu.NamedRows:
    """Rows fp32 [q, n], for each name whose bit is set."""
    why: object = ""
    try:
        if x.is_cpu and x.dtype == torch.float32:
            return _cpu.NamedRows(x.data_ptr(), x.shape, x.stride(), names)
    except (TypeError, ValueError) as error:
        why = error
    raise wrong(name, x, "float32 [names, n] with unit stride in its last dimension", why)


@functools.lru_cache(maxsize=256)
def bits(names: tuple[str, ...], table: tuple[str, ...]) -> int:
    """A bit for each of the names that the table has, at its place there."""
    return sum(1 << table.index(name) for name in names if name in table)


def of_partials(partials: Partials) -> _cpu.NamedRows:
    """The partials that C++ knows, which come first."""
    names = bits(partials.names, OF_KERNELS)
    count = names.bit_count()
    return named("partials", partials.values if count == len(partials.names) else partials.values[:count], names)


Made = TypeVar("Made")


def memory(make: Callable[..., Made], name: str, x: Tensor, rows: LogitRows, n: int, *more: float) -> Made:
    """Those n rows of x [A, T, V] that `rows` means of its logits."""
    why: object = ""
    try:
        if x.is_cpu:
            first = 0 if rows.part is None else rows.part[0]
            return make(x.data_ptr(), DTYPES[x.dtype], x.shape, x.stride(), first, n, *more)
    except (KeyError, TypeError, ValueError) as error:
        why = error
    raise wrong(name, x, f"rows {list(rows.logits.shape)} in fp32, bf16 or fp16 with unit stride in V", why)


def _count(rows: LogitRows) -> int:
    """How many rows of the logits are meant."""
    if rows.part is not None:
        return rows.part[1] - rows.part[0]
    shape = rows.logits.shape
    return shape[0] * shape[1]


def _logits(name: str, x: Tensor, transform: RowTransform, rows: LogitRows, n: int) -> _cpu.LogitRows:
    t = transform.inv_temperature
    own = (1.0, vector("inv_temperature", t, torch.float32, n)) if isinstance(t, Tensor) else (t, 0)
    return memory(_cpu.LogitRows, name, x, rows, n, transform.scale, transform.softcap, *own)


def _streams(
    rows: LogitRows, n: int, weight: Tensor | None = None, log_sums: Tensor | None = None, center: Tensor | None = None
) -> tuple[_cpu.LogitRows, _cpu.ReferenceRows | None]:
    """The logits, and the second stream with what is known of both."""
    own, second = _logits("logits", rows.logits, rows.transform, rows, n), rows.second
    if second is None:
        return own, None
    known = (("divergence_weight", weight), ("log_sums", log_sums), ("center", center))
    addresses = (vector(name, x, torch.float32, n) for name, x in known)
    other = _logits("second.logits", second.logits, second.transform, rows, n)
    return own, _cpu.ReferenceRows(other, KINDS.index(second.kind), second.mixture, *addresses)


def _of_rows(rows: LogitRows, n: int) -> tuple[int, int]:
    """The addresses of targets and of what is read."""
    return vector("targets", rows.targets, torch.int64, n), vector("read", rows.read, torch.bool, n)


def _slots(slots: Ragged) -> _cpu.RowIdPairs:
    """Ids and rows, whose values are trusted."""
    m = slots.ids.numel()
    return _cpu.RowIdPairs(vector("slots.ids", slots.ids, torch.int64, m), vector("slots.rows", slots.rows, torch.int64, m), m)
