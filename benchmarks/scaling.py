"""Estimates of memory, time and bytes sent for the head under tensor and data parallelism: the tables of SCALING.md.

    python -m benchmarks.scaling [--model 7B | 70B | 671B] [--tokens 32768] [--tp 1 2 4 8] [--dp 1 8 64 1024] [--gpu h200]
    python -m benchmarks.scaling --hidden 5120 --vocab 151936 --params 32.8e9 --active 0.3     a model of your own
    python -m benchmarks.scaling --bandwidth 4 --flops 700 --nvlink 350 --network 40 --efficiency 1    rates that you measured
    python -m benchmarks.scaling --write                                                  the page, from the defaults

Estimates are computed from counted bytes and flops; nothing is measured. SCALING.md explains the columns. N: rows (tokens) that
the ranks of a tensor-parallel group share in a micro-batch; a: the share of them that get a gradient. MB and GB are 10^6 and
10^9 bytes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cell_tables import figure
from benchmarks.roofline import Shape, Table, render
from benchmarks.scaling_costs import (
    CONTEXTS,
    EAGER_HELD,
    LINKS,
    MODELS,
    SCHEMES,
    Cluster,
    Model,
    cluster,
    element,
    head_gradient,
    head_share,
    least_rows,
    least_vocabulary,
    megatron,
    megatron_held,
    most_rows,
    optimizer,
    vocabulary_parallel,
    weight_gathered,
    weights,
)
from benchmarks.tables import replace_block

PAGE = Path(__file__).parent / "SCALING.md"
COMMAND = "python -m benchmarks.scaling --write"

# ---- tables


@dataclass(frozen=True)
class Setup:
    models: Sequence[Model]
    at: Cluster
    compared: Sequence[Cluster]
    tokens: int = 32768
    tp: Sequence[int] = (1, 2, 4, 8)
    dp: Sequence[int] = (1, 8, 64, 1024)
    step_tokens: int = 1 << 26
    active: float = 0.5
    dtype: str = "bfloat16"

    def shape(self, model: Model, rows: int | None = None) -> Shape:
        return Shape(self.tokens if rows is None else rows, model.hidden, model.vocab, self.dtype)


def assumed(s: Setup) -> str:
    at, vocabularies = s.at, " / ".join(sorted({f"{m.vocab:,}" for m in s.models}))
    return (
        f"N = {s.tokens:,} rows, V = {vocabularies}, {s.dtype}, a = {s.active:g}; steps of {s.step_tokens:,} tokens. {at.name}, as reached: "
        f"{at.bandwidth / 1e12:.3g} TB/s,\n{at.flops / 1e12:.4g} TFLOP/s, {at.nvlink / 1e9:.4g} GB/s over NVLink and "
        f"{at.network / 1e9:.3g} GB/s over the network in one direction, {1e6 * at.latency:.3g} us a step of a collective."
    )


def shares(s: Setup) -> Table:
    dp, tp = s.dp[-1], s.tp[-1]
    rows = [
        ["head of a model", "H", "parameters, G", "% of all", f"GB with optimizer, TP {tp}, DP {dp:,}", "% of a token's flops"]
    ]
    for model in s.models:
        head, (params, flops) = model.vocab * model.hidden, head_share(model, s.active)
        state = optimizer(element(s.shape(model)), dp) * head / tp
        rows.append(
            [model.name, f"{model.hidden:,}", *(figure(x) for x in (head / 1e9, 100 * params, state / 1e9, 100 * flops))]
        )
    return rows


def memory(s: Setup) -> Table:
    rows = [["GB of the head, a rank", *(f"TP {tp}" for tp in s.tp)]]
    for model in s.models:
        for name, scheme in SCHEMES.items():
            held = (scheme(s.shape(model), tp, s.active).held for tp in s.tp)
            rows.append([f"{model.name}: {name}", *(figure(x / 1e9) for x in held)])
    return rows


def time(s: Setup) -> Table:
    last = s.tp[-1]
    rows = [["ms of the head (of which on the wire)", *(f"TP {tp}" for tp in s.tp), f"bytes sent a token, TP {last}"]]
    for model in s.models:
        for name, scheme in SCHEMES.items():
            costs = [(tp, scheme(s.shape(model), tp, s.active)) for tp in s.tp]
            cells = [f"{figure(1e3 * c.seconds(s.at, tp))} ({figure(1e3 * c.wire_seconds(s.at, tp))})" for tp, c in costs]
            rows.append([f"{model.name}: {name}", *cells, f"{costs[-1][1].wire / s.tokens:,.0f}"])
    return rows


def interconnects(s: Setup) -> Table:
    """V* by interconnect, and V* / V: the part of the saved time that communication takes."""
    model, tp = s.models[0], s.tp[-1]
    rows = [[f"V* of {model.name}, TP {tp}", "NVLink", "% of V", "network, one rank a node", "% of V"]]
    for at in s.compared:
        size = element(s.shape(model))
        least = [least_vocabulary(model.hidden, tp, s.active, size, at.flops, link) for link in (at.nvlink, at.network)]
        rows.append([at.name, *(cell for v in least for cell in (f"{v:,.0f}", figure(100 * v / model.vocab)))])
    return rows


def crossings(s: Setup) -> Table:
    """Our scheme compared with the others, one column per model."""
    tp, at = s.tp[-1], s.at
    rows: Table = [[f"at TP {tp}", *(model.name for model in s.models)]]
    columns = []
    for model in s.models:
        shape = s.shape(model)
        ours, gathered, kept = (scheme(shape, tp, s.active) for scheme in (vocabulary_parallel, weight_gathered, megatron))
        every = [scheme(shape, tp, 1).seconds(at, tp) for scheme in (megatron, vocabulary_parallel)]
        waits = (ours.collectives - 1) * at.steps(tp) / ours.seconds(at, tp)
        columns.append(
            {
                "1: least N": least_rows(shape, tp, s.active, at),
                "1: latency of the exchanges, % of our time": 100 * waits,
                "2: N*": most_rows(model.hidden, model.vocab, tp, element(shape)),
                "2: bytes sent, gathering / ours": gathered.wire / ours.wire,
                "2: bytes held, gathering / ours": gathered.held / ours.held,
                f"3: time, Megatron-LM / ours, a = {s.active:g}": kept.seconds(at, tp) / ours.seconds(at, tp),
                "3: time, Megatron-LM / ours, a = 1": every[0] / every[1],
                "3: bytes held, Megatron-LM / ours": kept.held / ours.held,
                "3: rows of a chunk": shape.plan(s.active, tp).chunk,
                "3: rows of a block": shape.plan(s.active, tp).block,
                "4: weight and gradient of the whole head, GB": weights(shape) / 1e9,
            }
        )
    return rows + [[name, *(figure(column[name]) for column in columns)] for name in columns[0]]


def data_parallel(s: Setup) -> Table:
    tp = s.tp[-1]
    rows = [[f"DP, at TP {tp}", "tokens a rank", *(f"{m.name}: GB, ms, %" for m in s.models)]]
    for dp in s.dp:
        tokens, cells = s.step_tokens / dp, []
        for model in s.models:
            sent = head_gradient(model, tp, dp, element(s.shape(model)))
            seconds = sent / s.at.link(dp, tp) + (2 * s.at.steps(dp) if dp > 1 else 0)
            head = vocabulary_parallel(s.shape(model), tp, s.active).seconds(s.at, tp) * tokens / s.tokens
            cells.append(", ".join(figure(x) for x in (sent / 1e9, 1e3 * seconds, 100 * seconds / head)))
        rows.append([f"{dp:,}", f"{tokens:,.0f}", *cells])
    return rows


def contexts(s: Setup) -> Table:
    model, tp = s.models[0], s.tp[-1]
    rows = [["context = N, GB", "rows a rank, CP 8", f"logits, {s.dtype}", "eager", "ours, TP 1", "avoided"]]
    rows[0] += [f"Megatron-LM, TP {tp}", f"ours, TP {tp}", "avoided", f"d_hidden, H = {model.hidden:,}"]
    for n in CONTEXTS:
        whole, logits = s.shape(model, n), n * model.vocab
        eager, kept, ours, part = EAGER_HELD * logits, megatron_held(whole) * logits / tp, whole.held(), whole.held(tp) / tp
        sizes = [whole.unit, eager, ours, eager - ours, kept, part, kept - part, n * model.hidden * element(whole)]
        rows.append([f"{n:,}", f"{n // 8:,}", *(figure(x / 1e9) for x in sizes)])
    return rows


TABLES = (shares, memory, time, interconnects, crossings, data_parallel, contexts)


def blocks(s: Setup, markdown: bool = False) -> dict[str, str]:
    """The generated parts of the page, by name."""
    return {"assumed": assumed(s)} | {table.__name__: render(table(s), markdown) for table in TABLES}


def insert(text: str) -> str:
    """The page with its tables from the defaults."""
    for name, block in blocks(defaults(), markdown=True).items():
        text = replace_block(text, PAGE.name, name, block, COMMAND)
    return text


def defaults() -> Setup:
    return Setup(tuple(MODELS.values()), cluster("h200"), [cluster(gpu) for gpu in LINKS])


# ---- command line


def within(kind: type, least: float, most: float = math.inf) -> Callable[[str], Any]:
    """A type of argparse for numbers of a range."""

    def read(text: str) -> Any:
        if not least <= (x := kind(text)) <= most:
            raise argparse.ArgumentTypeError(f"{text}: pass something from {least:g} to {most:g}.")
        return x

    return read


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = defaults()
    add, count, positive, share = parser.add_argument, within(int, 1), within(float, 1e-9), within(float, 0, 1)
    add("--write", action="store_true", help="write the tables of SCALING.md, from the defaults")
    add("--model", choices=MODELS, help="default: all")
    add("--hidden", type=count, help="a model of your own, with --params")
    add("--vocab", type=count, help="default 151936")
    add("--params", type=positive, help="all parameters, head and embedding included")
    add("--active-params", type=positive, help="those that a token meets (default: all)")
    add("--tokens", type=count, default=own.tokens, help="rows of a micro-batch of a tensor-parallel group")
    add("--tp", type=count, nargs="+", default=own.tp)
    add("--dp", type=count, nargs="+", default=own.dp)
    add("--step-tokens", type=count, default=own.step_tokens, help="of a step, over all ranks")
    add("--active", type=share, default=own.active, metavar="SHARE", help="of rows with a gradient, 0 to 1")
    add("--dtype", choices=("bfloat16", "float32"), default=own.dtype)
    add("--gpu", choices=LINKS, default="h200")
    units = {"bandwidth": ("TB/s", 1e12), "flops": ("TFLOP/s", 1e12), "nvlink": ("GB/s", 1e9), "network": ("GB/s", 1e9)}
    for name, (unit, _) in units.items():
        add(f"--{name}", type=positive, metavar=unit, help="of a GPU, in place of the data sheet's")
    add("--efficiency", type=positive, default=0.75, help="of all rates; 1 for rates that you measured")
    add("--latency", type=positive, default=5.0, metavar="US", help="of a step of a collective")
    args = parser.parse_args(argv)
    if args.write:
        PAGE.write_text(insert(PAGE.read_text()))
        return
    if max(args.tp) == 1:
        parser.error("--tp 1: the tables compare a head that is cut, so pass a size above 1 as well.")
    if (args.hidden is None) != (args.params is None) or (args.hidden and args.model):
        parser.error("a model is --model, or --hidden and --params together.")
    if args.dtype == "float32" and args.flops is None:
        parser.error("--dtype float32: the data sheets' rates are those of bf16, so pass --flops of fp32 products.")

    changed = {x: args.efficiency * unit * getattr(args, x) for x, (_, unit) in units.items() if getattr(args, x) is not None}
    sheets = {gpu: cluster(gpu, args.efficiency, args.latency * 1e-6) for gpu in LINKS}
    at = sheets[args.gpu]
    if changed:
        at = replace(at, name=f"{at.name} with rates as given", **changed)
    models = [MODELS[args.model]] if args.model else list(MODELS.values())
    if args.hidden:
        models = [Model("model", args.hidden, args.params, args.active_params or args.params)]
    setup = Setup(
        [replace(model, vocab=args.vocab or model.vocab) for model in models],
        at,
        [at] if changed else list(sheets.values()),
        tokens=args.tokens,
        tp=sorted(args.tp),
        dp=sorted(args.dp),
        step_tokens=args.step_tokens,
        active=args.active,
        dtype=args.dtype,
    )
    print("ESTIMATE, not measured: benchmarks/SCALING.md explains the columns.", *blocks(setup).values(), sep="\n\n")


if __name__ == "__main__":
    main()
