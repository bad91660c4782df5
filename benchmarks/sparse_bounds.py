"""An estimate of the time of sparse gradients on a GPU: counted bytes and flops, divided by the reachable share of a data
sheet's rates. `python -m benchmarks.roofline --sparse` prints it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.printing import Table, render, replace_block
from grpo_kernels.rows.selection import capacity

if TYPE_CHECKING:
    from benchmarks.roofline import Rates, Shape

PAGE = Path(__file__).parent.parent / "docs" / "sparse_gradients.md"
COMMAND = "python -m benchmarks.roofline --sparse --write"
STEP = 1 / 256
#: Mean columns of a row. The last is the most that a row of this step can have.
COLUMNS = (8, 32, 160, capacity(STEP))
#: The reachable shares of a data sheet's bandwidth and flops.
REACHED = 0.75
#: Bytes moved for each place of the padded columns: filled, drawn and copied (40); ids and rows as int64 (20); sorting the ids,
#: four passes that read and write 12 bytes (96); computing values from logits, about twenty passes of PyTorch of about 12 bytes
#: (240).
PLACE = 40 + 20 + 96 + 240


def parts(shape: Shape, columns: float, step: float, bandwidth: float, flops: float) -> dict[str, float]:
    """Milliseconds of each part of a loss and its gradients, bf16 operands and fp32 logits, with `bandwidth` in bytes/s and
    `flops` in flop/s as reached, and `columns` drawn a row on average. Rows of the weight and of the hidden states count as read
    from memory."""
    size, drawn, row = 2, shape.rows * columns, 2 * shape.hidden
    moved = {
        "logits: written, read for statistics, read to draw": 3 * 4 * shape.rows * shape.vocab,
        "columns: drawn, kept, sorted": PLACE * shape.rows * capacity(step),
        "gradient of the hidden states, from rows of the weight": (drawn + shape.rows) * row,
        "gradient of the weight: zeros, rows of hidden states, rows that are added to": (
            shape.vocab + drawn + 2 * min(drawn, shape.vocab)
        ) * size * shape.hidden,
    }  # fmt: skip
    seconds = {"one product": shape.product / flops} | {name: x / bandwidth for name, x in moved.items()}
    dense = 3 * shape.product / flops + (shape.tiles(1.0) + shape.sums(1.0)) / bandwidth
    total = sum(seconds.values())
    ms = {name: 1e3 * x for name, x in (seconds | {"all of it": total, "dense, all of it": dense}).items()}
    return ms | {"x three products": total * flops / (3 * shape.product)}


def table(shape: Shape, rates: Rates) -> Table:
    columns = [
        parts(shape, x, STEP, REACHED * rates.copy, REACHED * rates.flops[shape.dtype]) for x in COLUMNS
    ]  # fmt: skip
    head = [f"ESTIMATE in ms, {rates.name}", *(f"{x} columns a row" for x in COLUMNS)]
    return [head, *([name, *(f"{c[name]:.2f}" for c in columns)] for name in columns[0])]


def page(shape: Shape, every: list[Rates], markdown: bool) -> str:
    size = f"{shape.rows:,} x {shape.hidden:,} x {shape.vocab:,}, {shape.dtype}, step 1/{1 / STEP:.0f}"
    said = f"ESTIMATE, not measured: {size}, {REACHED:.0%} of the bandwidth and of the flops of the data sheets."
    return "\n\n".join([said, *(render(table(shape, rates), markdown) for rates in every)])


def insert(text: str, shape: Shape, every: list[Rates]) -> str:
    """docs/sparse_gradients.md with its estimate replaced."""
    return replace_block(text, PAGE.name, "sparse_estimate", page(shape, every, markdown=True), COMMAND)
