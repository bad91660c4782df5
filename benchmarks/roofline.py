"""The least time that each scheme can take on a device, compared with the times measured there.

    python -m benchmarks.roofline [--gpu h200] [--rows 8192 --hidden 4096 --vocab 151936 --dtype bfloat16] [--markdown]
    python -m benchmarks.roofline --bandwidth 3.0 --flops 700           TB/s and dense TFLOP/s of your own
    python -m benchmarks.roofline --results benchmarks/results/amd-epyc-avx512bf16      rates and times of a machine's result files
    python -m benchmarks.roofline --kernels [--write]                   what binds each row kernel on each GPU, see kernel_bounds.py
    python -m benchmarks.roofline --sparse [--write]    what sparse gradients would take on H100 and H200, see sparse_bounds.py

A limit is the counted bytes divided by a bandwidth, or the counted flops divided by a rate: an estimate that no kernel reaches. The
bandwidth and the rate are those of a data sheet (--gpu), given by you, or those of plain copies and bare matrix products on the
machine of the result files; with --gpu these are looked for under benchmarks/results. N rows, H hidden size, V vocabulary; U:
one pass over the logits [N, V]; a product: 2NHV flops; a: the share of rows that get a gradient."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernel_bounds, results, sparse_bounds
from benchmarks.harness import RESULTS
from benchmarks.printing import Table, render
from grpo_kernels.rows.products import Plan, Work

# ---- counted


@dataclass(frozen=True)
class Shape:
    rows: int
    hidden: int
    vocab: int
    dtype: str = "bfloat16"
    device: str = "cuda"

    @property
    def unit(self) -> int:
        """Bytes of the logits."""
        return self.rows * self.vocab * getattr(torch, self.dtype).itemsize

    @property
    def product(self) -> int:
        """Flops of one matrix product."""
        return 2 * self.rows * self.hidden * self.vocab

    @property
    def gradient_size(self) -> int:
        """Bytes of an element of a chunk's gradient."""
        return 2 if self.dtype == "bfloat16" else 4

    def work(self, ranks: int = 1) -> Work:
        """The work of the engine for these rows, with `ranks` that share the vocabulary."""
        size = getattr(torch, self.dtype).itemsize
        apart = self.device != "cpu" and self.gradient_size == 2
        return Work(self.vocab, self.hidden, apart, d_hidden=size, d_weight=size, ranks=ranks)

    def plan(self, active: float = 1.0, ranks: int = 1) -> Plan:
        """Rows of its chunks, and of the blocks of those that get a gradient."""
        return self.work(ranks).plan(self.device, int(self.rows * active), gathered=active < 1)

    def blocks(self, active: float, ranks: int = 1) -> int:
        return -(-int(self.rows * active) // self.plan(active, ranks).block)

    def held(self, ranks: int = 1) -> int:
        """Bytes of logits and their gradients, plus an fp32 sum of d_weight, which is not needed if one block has all rows."""
        work = self.work(ranks)
        many = work.plan(self.device, 1 << 60)
        block = min(self.rows, many.block) * 2 if work.apart else 0
        return (min(self.rows, many.chunk) * 4 + block) * self.vocab

    def tiles(self, active: float) -> float:
        """Bytes that chunks of logits move: fp32 written and read, the gradient written, then read by two products."""
        return self.rows * self.vocab * (4 + 4 + active * 3 * self.gradient_size)

    def sums(self, active: float, ranks: int = 1) -> float:
        """Bytes that summing d_weight over blocks moves: fp32 written once, then read and written, rounded at the end."""
        size = getattr(torch, self.dtype).itemsize
        further = self.blocks(active, ranks) - 1
        return self.vocab * self.hidden * (size if further <= 0 else 4 + 8 * further + (4 + size if size < 4 else 0))

    def memory(self, active: float) -> dict[str, float]:
        """Bytes, of our engine and of what it does without."""
        plan, rows = self.plan(active), int(self.rows * active)
        size = getattr(torch, self.dtype).itemsize
        return {
            f"all logits, {self.dtype}": self.unit,
            "a chunk of logits": 4 * min(self.rows, plan.chunk) * self.vocab,
            "a block of their gradients": 2 * min(rows, plan.block) * self.vocab if self.work().apart else 0,
            "sum of d_weight": self.vocab * self.hidden * (4 if self.blocks(active) > 1 else size),
            "at most at a time, with all gradients": self.work().peak(plan, rows, gathered=active < 1),
        }


@dataclass(frozen=True)
class Scheme:
    """A way to compute a contract (see cases.CONTRACTS), described by the passes over the logits, or the products, that it
    needs."""

    contract: str | None  # None: no contract of the benchmarks asks for it
    short: str
    name: str
    passes: float = 0
    dense: float = 0  # products of all rows
    skipped: float = 0  # products of the rows with a gradient

    def work(self, shape: Shape, active: float) -> tuple[float, float]:
        """(bytes, flops)."""
        return self.passes * shape.unit, (self.dense + self.skipped * active) * shape.product


SCHEMES = (
    Scheme("logits-forward", "1U", "log-probs from logits, read once: 1U", passes=1),
    Scheme("logits", "2U", "loss and gradient from logits, read and written once: 2U", passes=2),
    Scheme("logits", "3U", "the same through log-probs under autograd, read twice: 3U", passes=3),
    Scheme(None, "4U", "the same with a ratio per sequence, read three times: 4U", passes=4),
    Scheme("hidden-forward", "1", "log-probs from hidden states: 1 product", dense=1),
    Scheme("hidden", "3", "loss and gradients from hidden states, all rows: 3 products", dense=3),
    Scheme("hidden", "1+2a", "the same, gradients of the rows that have one: 1 + 2a", dense=1, skipped=2),
    Scheme("hidden", "1+3a", "the same through log-probs under autograd, logits computed again: 1 + 3a", dense=1, skipped=3),
    Scheme("hidden-frozen", "1+a", "frozen head: 1 + a", dense=1, skipped=1),
    Scheme("hidden-frozen", "1+2a", "frozen head through log-probs under autograd: 1 + 2a", dense=1, skipped=2),
)


def estimate(rows: int, hidden: int, vocab: int, bandwidth: float, flops: float, active: float) -> dict[str, float]:
    """Milliseconds of each part on a GPU, with `bandwidth` in bytes/s and `flops` in flop/s as reached; `active` is the share
    of rows that get a gradient. bf16 logits at logits level; bf16 operands and fp32 logits at hidden level."""
    shape = Shape(rows, hidden, vocab)
    unit, product = shape.unit / bandwidth, shape.product / flops
    tiles, sums = shape.tiles(active) / bandwidth, shape.sums(active) / bandwidth
    parts = {
        "logits level: read and write (2U)": 2 * unit,
        "logits level, a kernel of three passes (3U)": 3 * unit,
        "hidden level: three dense products": 3 * product,
        "hidden level: our products (1 + 2a)": (1 + 2 * active) * product,
        "hidden level: passes over chunks of logits": tiles,
        "hidden level: sums of d_weight": sums,
        "hidden level: our total": (1 + 2 * active) * product + tiles + sums,
        "hidden level, four products (recompute)": (1 + 3 * active) * product + tiles + sums,
    }
    return {name: 1e3 * seconds for name, seconds in parts.items()}


# ---- rates


@dataclass(frozen=True)
class Rates:
    """The rates that limits are computed from: bytes/s of reading, of reading and writing, and flop/s by dtype."""

    name: str
    read: float
    copy: float
    flops: dict[str, float]

    def ms(self, scheme: Scheme, shape: Shape, active: float) -> float | None:
        """None where there is no rate."""
        moved, computed = scheme.work(shape, active)
        bandwidth = self.read if scheme.passes == 1 else self.copy
        rate = self.flops.get(shape.dtype, 0)
        if (moved and not bandwidth) or (computed and not rate):
            return None
        return 1e3 * max(moved / bandwidth if moved else 0, computed / rate if computed else 0)


#: Data sheets: TB/s and dense bf16 TFLOP/s (without sparsity) of the SXM and OAM modules.
GPUS = {
    "a100": ("A100 SXM 80 GB", 2.039, 312.0),
    "h100": ("H100 SXM", 3.35, 989.0),
    "h200": ("H200 SXM", 4.8, 989.0),
    "b200": ("B200", 8.0, 2250.0),
    "mi300x": ("MI300X", 5.3, 1307.0),
}


def given(name: str, bandwidth: float, flops: float) -> Rates:
    """From TB/s and dense 16-bit TFLOP/s."""
    dense = {"bfloat16": flops * 1e12, "float16": flops * 1e12}
    return Rates(f"{name}: {bandwidth:g} TB/s, {flops:g} TFLOP/s", bandwidth * 1e12, bandwidth * 1e12, dense)


#: The head of an 8B model, and the GPUs, for the estimate of sparse gradients.
OF_SPARSE = (Shape(8192, 4096, 151936), [given(name, *rates) for name, *rates in (GPUS["h100"], GPUS["h200"])])


def measured(records: Iterable[dict[str, Any]]) -> Rates:
    """The best rates of copies, reads and bare products in the result files of one machine; 0 if there are none."""
    read, copy, flops = 0.0, 0.0, dict[str, float]()
    name = ""
    for record in records:
        name = record["machine"]["name"]
        for cell in record["cells"]:
            for row in cell["providers"]:
                if not row.get("limit") or row["status"] != "ok":
                    continue
                read = max(read, 1e9 * row.get("gbps_1u", 0))
                copy = max(copy, 1e9 * row.get("gbps_2u", 0))
                if "tflops" in row:
                    flops[cell["dtype"]] = max(flops.get(cell["dtype"], 0), 1e12 * row["tflops"])
    rates = [f"{x / 1e9:.4g} GB/s {what}" for x, what in ((read, "read"), (copy, "read and written")) if x]
    rates += [f"{x / 1e12:.3g} TFLOP/s {dtype}" for dtype, x in sorted(flops.items())]
    return Rates(f"measured, {name}: {', '.join(rates)}", read or copy, copy, flops)


# ---- pages


def limits(shape: Shape, sources: Sequence[Rates], shares: Sequence[float]) -> Table:
    """Head and rows: milliseconds of each scheme, by source and share of rows with a gradient."""
    columns = [(rates, a) for rates in sources for a in shares]
    rows = [["scheme", *(f"a = {a:g}" if len(sources) == 1 else f"({sources.index(r) + 1}) a = {a:g}" for r, a in columns)]]
    for scheme in SCHEMES:
        rows.append([scheme.name, *(_ms(rates.ms(scheme, shape, a)) for rates, a in columns)])
    for name, moved in (("chunks of logits", shape.tiles), ("sums of d_weight", shape.sums)):
        added = [_ms(1e3 * moved(a) / rates.copy) if rates.copy else "" for rates, a in columns]
        rows.append([f"our engine's traffic beside its products: {name}", *added])
    return rows


def against(cell: dict[str, Any], sources: Sequence[Rates], device: str) -> Table:
    """Head and rows of a table: the limit of each scheme of a cell's contract, in per cent of the measured times."""
    shape = Shape(cell["rows"], cell["hidden"] or 0, cell["vocab"], cell["dtype"], device)
    limits: list[tuple[str, float]] = []
    for i, rates in enumerate(sources):
        mark, seen = f"({i + 1}) " if len(sources) > 1 else "", set[float]()
        for scheme in SCHEMES:
            limit = rates.ms(scheme, shape, cell["active"]) if scheme.contract == cell["contract"] else None
            if limit is not None and limit not in seen:  # if every row has a gradient, two schemes are the same
                limits.append((f"{mark}{scheme.short} = {_ms(limit)} ms", limit))
                seen.add(limit)
    rows = [["provider", "ms", "extra MB", *(f"% of {name}" for name, _ in limits)]]
    for row in cell["providers"]:
        if row["status"] == "ok":
            extra = f"{row['extra_mb']:.0f}" if "extra_mb" in row else ""
            name = row["name"] + (" (limit)" if row.get("limit") else "")
            shares = [100 * limit / row["ms"] for _, limit in limits]
            rows.append([name, _ms(row["ms"]), extra, *(f"{x:.0f}" if x >= 10 else f"{x:.1f}" for x in shares)])
    return rows


def _ms(x: float | None) -> str:
    return "" if x is None else f"{x:.3g}" if x < 100 else f"{x:.0f}"


def page(
    shape: Shape, sources: Sequence[Rates], shares: Sequence[float], records: Sequence[dict[str, Any]], markdown: bool = False
) -> str:
    """Limits of a shape, then the cells of the result files."""
    numbered = [f"({i + 1}) {rates.name}" for i, rates in enumerate(sources)] if len(sources) > 1 else [sources[0].name]
    size = f"{shape.rows:,} x {shape.hidden:,} x {shape.vocab:,}, {shape.dtype}"
    out = [_title(f"ESTIMATE, not measured: limits of {size}; ms, by the share a of rows with a gradient", markdown)]
    out += ["Rates: " + "; ".join(numbered), render(limits(shape, sources, shares), markdown)]
    held = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in shape.memory(shares[0]).items())
    out += [f"Memory at a = {shares[0]:g}: {held}."]
    order = [scheme.contract for scheme in SCHEMES]
    cells = [(record, cell) for record in records for cell in record["cells"] if cell["contract"] in order]
    for record, cell in sorted(cells, key=lambda both: order.index(both[1]["contract"])):
        dims = " x ".join(f"{cell[x]:,}" for x in ("rows", "hidden", "vocab") if cell[x])
        active = "" if cell["active"] == 1 else f", a = {cell['active']:g}"
        title = f"MEASURED, {record['machine']['name']}, {record['date']}, {cell['contract']}: {dims}, {cell['dtype']}{active}"
        out += [_title(title, markdown), render(against(cell, sources, record["machine"]["device"]), markdown)]
    return "\n\n".join(out)


def _title(text: str, markdown: bool) -> str:
    return f"**{text}**" if markdown else text


def load(folder: Path, **wanted: Any) -> list[dict[str, Any]]:
    """The result files of a machine, with those cells that have the wanted rows, hidden, vocab and dtype (None: any; cells
    on logits have no hidden size)."""

    def fits(cell: dict[str, Any]) -> bool:
        return all(value is None or cell[name] in (value, None) for name, value in wanted.items())

    records = [results.load(path) for path in sorted(folder.glob("*.json"))]
    return [record | {"cells": [cell for cell in record["cells"] if fits(cell)]} for record in records]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=GPUS, help="rates of its data sheet (default h200, if no rates are given)")
    parser.add_argument("--bandwidth", type=float, metavar="TB/s")
    parser.add_argument("--flops", type=float, metavar="TFLOP/s", help="dense, 16 bit")
    parser.add_argument("--results", type=Path, metavar="DIR", help="result files of one machine")
    for name in ("rows", "hidden", "vocab"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--active", type=float, nargs="+", default=[1.0, 0.5, 0.2], metavar="SHARE")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="bounds of the row kernels, by their instructions")
    parser.add_argument("--sparse", action="store_true", help="sparse gradients on H100 and H200, on paper")
    parser.add_argument(
        "--write", action="store_true", help="with --kernels, --sparse: the tables of docs/gpu.md, of docs/sparse_gradients.md"
    )
    args = parser.parse_args(argv)
    if args.sparse:
        if args.write:
            sparse_bounds.PAGE.write_text(sparse_bounds.insert(sparse_bounds.PAGE.read_text(), *OF_SPARSE))
        else:
            print(sparse_bounds.page(*OF_SPARSE, args.markdown))
        return
    if args.kernels:
        if args.write:
            kernel_bounds.write()
        else:
            print("\n\n".join(render(table, args.markdown) for table in kernel_bounds.tables().values()))
        return
    if (args.bandwidth is None) != (args.flops is None):
        parser.error("--bandwidth and --flops belong together: give both, or --gpu.")
    if args.results is not None and not any(args.results.glob("*.json")):
        parser.error(f"--results {args.results}: there are no result files; python -m benchmarks makes them.")

    sources = []
    if args.bandwidth is not None:
        sources.append(given("given", args.bandwidth, args.flops))
    elif args.gpu or args.results is None:
        gpu = args.gpu or "h200"
        sources.append(given(f"data sheet, {GPUS[gpu][0]}", *GPUS[gpu][1:]))
        args.results = args.results or next(iter(sorted(RESULTS.glob(f"*{gpu}*"))), None)
    every: list[dict[str, Any]] = []
    if args.results is not None:
        every = load(args.results)
        sources.append(measured(every))
    shape = {name: getattr(args, name) for name in ("rows", "hidden", "vocab", "dtype")}
    defaults: dict[str, Any] = {"rows": 8192, "hidden": 4096, "vocab": 151936, "dtype": "bfloat16"}
    measured_shapes = [cell for record in every for cell in record["cells"] if cell["contract"] == "hidden"]
    if not args.gpu and measured_shapes:
        largest = max(measured_shapes, key=lambda cell: cell["rows"] * cell["hidden"] * cell["vocab"])
        defaults = {name: largest[name] for name in defaults}
    device = every[0]["machine"]["device"] if every else "cuda"
    chosen = Shape(**{name: defaults[name] if value is None else value for name, value in shape.items()}, device=device)
    records = load(args.results, **shape) if args.results is not None else []
    print(page(chosen, sources, args.active, records, args.markdown))


if __name__ == "__main__":
    main()
