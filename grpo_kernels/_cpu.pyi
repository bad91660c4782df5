# Addresses as integers, sizes and strides in elements; see csrc/module.cpp.

def stats(
    logits: int, dtype: int, inner_count: int, outer_stride: int, inner_stride: int, vocab: int, first: int, count: int,
    targets: int, read: int, scale: float, softcap: float, inv_temperature: float, inv_temperatures: int,
    max: int, sum: int, target: int, weighted: int, squares: int, top: int, threads: int, /,
) -> None: ...  # fmt: skip
def pull(
    logits: int, dtype: int, inner_count: int, outer_stride: int, inner_stride: int,
    out: int, out_dtype: int, out_outer_stride: int, out_inner_stride: int, vocab: int, first: int, count: int,
    targets: int, scale: float, softcap: float, inv_temperature: float, inv_temperatures: int,
    max: int, sum: int, target: int, slope: int, constant: int, log: int, prob: int, threads: int, /,
) -> None: ...  # fmt: skip

class Stream:
    """Rows of logits and their transform."""

    def __init__(
        self, logits: int, dtype: int, inner_count: int, outer_stride: int, inner_stride: int,
        scale: float, softcap: float, inv_temperature: float, inv_temperatures: int, /,
    ) -> None: ...  # fmt: skip

def divergence_stats(
    student: Stream, teacher: Stream, direction: int, vocab: int, first: int, count: int, targets: int, read: int,
    max: int, sum: int, target: int, weighted: int, squares: int, top: int,
    teacher_max: int, teacher_sum: int, cross: int, excess: int, threads: int, /,
) -> None: ...  # fmt: skip
def divergence_mixed(
    student: Stream, teacher: Stream, mixture: float, vocab: int, first: int, count: int, read: int,
    max: int, sum: int, teacher_max: int, teacher_sum: int, log_sums: int, student_kl: int, teacher_kl: int, threads: int, /,
) -> None: ...  # fmt: skip
def divergence_pull(
    student: Stream, teacher: Stream, direction: int, mixture: float,
    out: int, out_dtype: int, out_outer_stride: int, out_inner_stride: int, vocab: int, first: int, count: int,
    targets: int, max: int, sum: int, target: int, slope: int, constant: int, log: int, prob: int,
    teacher_max: int, teacher_sum: int, log_sums: int, center: int, teacher_slope: int, threads: int, /,
) -> None: ...  # fmt: skip

class Program:
    """A formula, see csrc/program.h: (operation, registers of its operands) of each instruction."""

    def __init__(
        self, name: str, numbers: int, inputs: int, steps: list[tuple[str, int, int, int]], outputs: list[int], /
    ) -> None: ...
    def run(self, numbers: list[float], inputs: list[int], outputs: list[int], count: int, /) -> None: ...

def fused(
    program: Program, numbers: list[float], inputs: list[int], with_entropy: bool,
    logits: int, dtype: int, inner_count: int, outer_stride: int, inner_stride: int,
    out: int, out_dtype: int, out_outer_stride: int, out_inner_stride: int, vocab: int, count: int,
    targets: int, read: int, scale: float, softcap: float, inv_temperature: float, inv_temperatures: int,
    logps: int, entropy: int, losses: int, threads: int, /,
) -> None: ...  # fmt: skip
def divergence_fused(
    program: Program, numbers: list[float], inputs: list[int], with_entropy: bool,
    student: Stream, teacher: Stream, direction: int, mixture: float,
    out: int, out_dtype: int, out_outer_stride: int, out_inner_stride: int, vocab: int, count: int,
    targets: int, read: int, weight: int, logps: int, entropy: int, losses: int, divergence: int, threads: int, /,
) -> None: ...  # fmt: skip
def scale(data: int, dtype: int, count: int, factor: float, threads: int, /) -> None: ...
def has_products() -> bool: ...
def products() -> list[str]: ...
def processor() -> tuple[str, int, int]: ...
def ask_for_tiles() -> bool: ...
def d_hidden_parts(engine: str, width: int, vocab: int, /) -> int: ...
def logits_product(
    engine: str, is_bf16: bool, hidden: int, hidden_stride: int, weight: int, weight_stride: int, bias: int, out: int, out_stride: int,
    rows: int, width: int, vocab: int, threads: int, /,
) -> None: ...  # fmt: skip
def d_hidden(
    engine: str, gradient: int, gradient_is_bf16: bool, gradient_stride: int,
    weight: int, weight_is_bf16: bool, weight_stride: int, out: int, out_stride: int, rows: int, width: int, vocab: int, threads: int, /,
) -> None: ...  # fmt: skip
def d_weight(
    engine: str, gradient: int, gradient_is_bf16: bool, gradient_stride: int, hidden: int, hidden_is_bf16: bool, hidden_stride: int,
    start: int, start_stride: int, out: int, out_is_bf16: bool, out_stride: int,
    rows: int, width: int, vocab: int, threads: int, /,
) -> None: ...  # fmt: skip
def select(
    logits: int, dtype: int, stride: int, vocab: int, count: int, targets: int,
    scale: float, softcap: float, inv_temperature: float, inv_temperatures: int, max: int, sum: int,
    per_unit: float, starts: int, capacity: int, ids: int, taken: int, masses: int, threads: int, /,
) -> None: ...  # fmt: skip
def slot_logits(
    hidden: int, hidden_dtype: int, hidden_stride: int, rows: int, weight: int, weight_dtype: int, weight_stride: int,
    vocab: int, width: int, ids: int, slot_rows: int, logits: int, count: int, threads: int, /,
) -> None: ...  # fmt: skip
def add_weight_rows(
    values: int, ids: int, slot_rows: int, count: int, weight: int, weight_dtype: int, weight_stride: int, vocab: int,
    out: int, out_dtype: int, out_stride: int, rows: int, width: int, threads: int, /,
) -> None: ...  # fmt: skip
def add_hidden_rows(
    values: int, ids: int, slot_rows: int, count: int, hidden: int, hidden_dtype: int, hidden_stride: int, rows: int,
    out: int, out_dtype: int, out_stride: int, vocab: int, width: int, threads: int, /,
) -> None: ...  # fmt: skip

built_from: str

def compiler() -> str: ...
def isa() -> str: ...
def isas() -> list[str]: ...
def use_isa(name: str) -> None: ...
