# What the kernels take, made of addresses and of shapes and strides in elements; see csrc/arguments.h and csrc/module.cpp.

from collections.abc import Sequence

class Memory:
    """Rows `first` to `first + count` of [A, T, V] in memory."""

    def __init__(
        self, address: int, dtype: int, shape: Sequence[int], strides: Sequence[int], first: int, count: int, /
    ) -> None: ...

class LogitRows:
    """Such rows of logits with their transform."""

    def __init__(
        self, address: int, dtype: int, shape: Sequence[int], strides: Sequence[int], first: int, count: int,
        scale: float, softcap: float, inv_temperature: float, inv_temperatures: int, /,
    ) -> None: ...  # fmt: skip

class Second:
    """The other stream of a divergence, and what is known of both rows."""

    def __init__(self, rows: LogitRows, direction: int, mixture: float, weight: int, log_sums: int, center: int, /) -> None: ...

class Named:
    """fp32 [q, n]: a row for each name whose bit is set."""

    def __init__(self, address: int, shape: Sequence[int], strides: Sequence[int], names: int, /) -> None: ...

class Matrix:
    def __init__(self, address: int, dtype: int, shape: Sequence[int], strides: Sequence[int], /) -> None: ...

class Slots:
    """Pairs of a row and an id."""

    def __init__(self, ids: int, rows: int, count: int, /) -> None: ...

class Program:
    """A formula, see csrc/kernels.h: (operation, registers of its operands) of each instruction."""

    def __init__(
        self, name: str, numbers: int, inputs: int, steps: list[tuple[str, int, int, int]], outputs: list[int], /
    ) -> None: ...
    def run(self, numbers: list[float], inputs: list[int], outputs: list[int], count: int, /) -> None: ...

class Listed:
    """Terms of ids that the m tokens of rows list, k ids in all: (program, its numbers, ids, where those of each token begin,
    advantages of tokens, values of ids for each part, m, k)."""

    def __init__(
        self,
        program: Program,
        numbers: list[float],
        ids: int,
        starts: int,
        advantages: int,
        values: list[int],
        m: int,
        k: int,
        /,
    ) -> None: ...

class Tokens:
    """m tokens of n rows: where those of each row begin in `order`."""

    def __init__(self, starts: int, order: int, n: int, m: int, listed: Listed | None, /) -> None: ...

def stats(own: LogitRows, second: Second | None, targets: int, read: int, to: Named, threads: int, /) -> None: ...
def mixed(own: LogitRows, second: Second, read: int, of: Named, to: Named, threads: int, /) -> None: ...
def pull(
    own: LogitRows, second: Second | None, targets: int, of: Named, slopes: Named, out: Memory, threads: int, /
) -> None: ...
def fused(
    program: Program, numbers: list[float], inputs: list[int], with_entropy: bool, own: LogitRows, second: Second | None,
    targets: int, read: int, out: Memory | None, to: Named, threads: int, tokens: Tokens | None, /,
) -> None: ...  # fmt: skip
def scale(data: int, dtype: int, count: int, factor: float, threads: int, /) -> None: ...
def slot_logits(hidden: Matrix, weight: Matrix, slots: Slots, logits: int, threads: int, /) -> None: ...
def add_weight_rows(values: int, slots: Slots, weight: Matrix, out: Matrix, threads: int, /) -> None: ...
def add_hidden_rows(values: int, slots: Slots, hidden: Matrix, out: Matrix, threads: int, /) -> None: ...
def has_products() -> bool: ...
def products() -> list[str]: ...
def processor() -> tuple[str, int, int]: ...
def ask_for_tiles() -> int: ...
def d_hidden_parts(engine: str, width: int, vocab: int, /) -> int: ...
def logits_product(engine: str, hidden: Matrix, weight: Matrix, bias: int, out: Matrix, threads: int, /) -> None: ...
def d_hidden(engine: str, gradient: Matrix, weight: Matrix, out: Matrix, threads: int, /) -> None: ...
def d_weight(engine: str, gradient: Matrix, hidden: Matrix, start: Matrix | None, out: Matrix, threads: int, /) -> None: ...

built_from: str

def compiler() -> str: ...
def isa() -> str: ...
def isas() -> list[str]: ...
def use_isa(name: str) -> None: ...
