# The compiled module. Memory is passed as addresses with shapes and strides in elements; an
# optional address is 0 if there is
# none. N is the number of rows of a call. See csrc/kernels.h for the meaning of the arguments,
# csrc/arguments.h for the checks.

from collections.abc import Sequence

class Rows:
    """Rows first .. first + count - 1 of a tensor [A, T, V], numbered a * T + t."""

    def __init__(
        self,
        address: int,
        dtype: int,
        shape: Sequence[int],
        strides: Sequence[int],
        first: int,
        count: int,
        /,
    ) -> None: ...

class LogitRows:
    """Rows of logits and their transform. `inverse_temperatures`: fp32 [N], or 0 to use
    `inverse_temperature`.
    """

    def __init__(
        self, address: int, dtype: int, shape: Sequence[int], strides: Sequence[int], first: int, count: int,
        scale: float, softcap: float, inverse_temperature: float, inverse_temperatures: int, /,
    ) -> None: ...  # fmt: skip

class ReferenceRows:
    """The reference's logits and the divergence from them. The vectors are fp32 [N], 0 where a
    kernel does not need them.
    """

    def __init__(
        self,
        logits: LogitRows,
        direction: int,
        mixture: float,
        divergence_weight: int,
        log_sum_ratio: int,
        center: int,
        /,
    ) -> None: ...

class NamedRows:
    """fp32 [q, N]: one row for each name whose bit is set."""

    def __init__(
        self, address: int, shape: Sequence[int], strides: Sequence[int], names: int, /
    ) -> None: ...

class Matrix:
    """A row-major matrix. The elements of a row are contiguous."""

    def __init__(
        self, address: int, dtype: int, shape: Sequence[int], strides: Sequence[int], /
    ) -> None: ...

class RowIdPairs:
    """(row, id) pairs, int64 [count] each. A pair with a negative id is unused."""

    def __init__(self, ids: int, rows: int, count: int, /) -> None: ...

class Program:
    """A loss formula: (operation, registers of its operands) of each instruction, and the
    registers of its outputs.
    """

    def __init__(
        self,
        name: str,
        num_numbers: int,
        num_inputs: int,
        steps: list[tuple[str, int, int, int]],
        outputs: list[int],
        /,
    ) -> None: ...
    def run(
        self, numbers: list[float], inputs: list[int], outputs: list[int], count: int, /
    ) -> None: ...

def softmax_sums(
    policy: LogitRows,
    reference: ReferenceRows | None,
    targets: int,
    mask: int,
    sums: NamedRows,
    threads: int,
    /,
) -> None: ...
def mixture_sums(
    policy: LogitRows,
    reference: ReferenceRows,
    mask: int,
    sums: NamedRows,
    mixture_sums: NamedRows,
    threads: int,
    /,
) -> None: ...
def softmax_gradient(
    policy: LogitRows, reference: ReferenceRows | None, targets: int, sums: NamedRows, coefficients: NamedRows,
    grad_logits: Rows, threads: int, /,
) -> None: ...  # fmt: skip
def fused_loss(
    program: Program, numbers: list[float], inputs: list[int], loss_has_entropy: bool, policy: LogitRows,
    reference: ReferenceRows | None, targets: int, mask: int, grad_logits: Rows | None, outputs: NamedRows, threads: int, /,
) -> None: ...  # fmt: skip
def scale(data: int, dtype: int, count: int, factor: float, threads: int, /) -> None: ...
def pair_logits(
    hidden: Matrix, weight: Matrix, pairs: RowIdPairs, logits: int, threads: int, /
) -> None: ...
def write_grad_hidden_of_pairs(
    values: int, pairs: RowIdPairs, weight: Matrix, grad_hidden: Matrix, threads: int, /
) -> None: ...
def add_grad_weight_of_pairs(
    values: int, pairs: RowIdPairs, hidden: Matrix, grad_weight: Matrix, threads: int, /
) -> None: ...
def has_matmuls() -> bool: ...
def matmul_engines() -> list[str]: ...
def processor() -> tuple[str, int, int]: ...
def request_amx_permission() -> int: ...
def num_vocab_splits(engine: str, width: int, vocab: int, /) -> int: ...
def logits(
    engine: str, hidden: Matrix, weight: Matrix, bias: int, out: Matrix, threads: int, /
) -> None: ...
def grad_hidden(
    engine: str, grad_logits: Matrix, weight: Matrix, out: Matrix, threads: int, /
) -> None: ...
def grad_weight(
    engine: str,
    grad_logits: Matrix,
    hidden: Matrix,
    start: Matrix | None,
    out: Matrix,
    threads: int,
    /,
) -> None: ...

built_from: str

def compiler() -> str: ...
def isa() -> str: ...
def isas() -> list[str]: ...
def use_isa(name: str) -> None: ...
