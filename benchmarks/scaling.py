"""Memory, time and bytes on the wire of the head under tensor and data parallelism, on paper: the tables of SCALING.md.

    python -m benchmarks.scaling [--model 7B | 70B | 671B] [--tokens 32768] [--tp 1 2 4 8] [--dp 1 8 64 1024] [--gpu h200]
    python -m benchmarks.scaling --hidden 5120 --vocab 151936 --params 32.8e9 --active 0.3     a model of your own
    python -m benchmarks.scaling --bandwidth 4 --flops 700 --nvlink 350 --network 40 --efficiency 1    rates that you measured
    python -m benchmarks.scaling --write                                                  the page, from the defaults

Estimates from counted bytes and flops; nothing here is measured. SCALING.md says what the columns are. N: rows (tokens) that
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
from benchmarks.roofline import GPUS, Shape, Table, render
from benchmarks.tables import replace_block

PAGE = Path(__file__).parent / "SCALING.md"
COMMAND = "python -m benchmarks.scaling --write"

#: Bytes a logit of losses that keep the logits, in fp32, counted from their elementwise passes. Bytes held at the peak:
#: eager's log-softmax, its upstream gradient and its gradient (as in the CPU benchmark); Megatron-LM's softmax, which its
#: gradient overwrites. Bytes moved, besides what products write and read: eager's log-softmax 4 + 4, zeros 4, its gradient
#: 8 + 4; Megatron-LM's maximum 4, subtraction, exp, division and scaling 8 each, sum 4. 16-bit logits are cast, and so are
#: their gradients: 6 each.
EAGER_HELD, EAGER_MOVED = 12, 24
MEGATRON_HELD, MEGATRON_MOVED = 4, 40
CASTS_MOVED = 12
#: Bytes a row and rank of the one all-gather of a vocabulary-parallel head: maximum, sum, entropy's sum, target's logit.
PARTIALS = 16
CONTEXTS = tuple(1024 * k for k in (8, 16, 32, 64, 128))


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    params: float
    active_params: float  # that a token meets; fewer than `params` in a mixture of experts
    vocab: int = 151936


#: The sizes of Qwen3-8B, Qwen2.5-72B and DeepSeek-V3 (their model cards), with one vocabulary.
MODELS = {
    "7B": Model("7B", 4096, 8.2e9, 8.2e9),
    "70B": Model("70B", 8192, 72.7e9, 72.7e9),
    "671B": Model("671B", 7168, 671e9, 37e9),
}


@dataclass(frozen=True)
class Cluster:
    """Rates as reached: bytes/s and flop/s of a GPU, bytes/s in one direction of its links inside a node and between nodes."""

    name: str
    bandwidth: float
    flops: float
    nvlink: float
    network: float
    latency: float = 5e-6  # seconds of a step of a collective
    node: int = 8  # GPUs

    def link(self, ranks: int, stride: int = 1) -> float:
        """Bytes/s of each rank of a group of every `stride`-th GPU. In a ring, the GPUs of a node share its network cards."""
        inside = max(1, self.node // stride)
        return self.nvlink if ranks <= inside else min(self.nvlink, inside * self.network)

    def steps(self, ranks: int) -> float:
        """Seconds that a collective takes without any bytes: up and down a tree."""
        return 2 * math.ceil(math.log2(ranks)) * self.latency


#: Data sheets, GB/s: NVLink in one direction (half of the total that the sheet prints), network a GPU (one 400 Gb/s card).
LINKS = {"h100": (450.0, 50.0), "h200": (450.0, 50.0), "b200": (900.0, 50.0)}


def cluster(gpu: str, efficiency: float = 0.75, latency: float = 5e-6) -> Cluster:
    name, bandwidth, flops = GPUS[gpu]
    nvlink, network = LINKS[gpu]
    tera, giga = 1e12 * efficiency, 1e9 * efficiency
    return Cluster(name, tera * bandwidth, tera * flops, giga * nvlink, giga * network, latency)


# ---- counted


@dataclass(frozen=True)
class Cost:
    """Of one rank, for the N rows of its tensor-parallel group, forward and backward of the head."""

    held: float  # bytes at the peak: weight, its fp32 gradient, d_hidden, logits
    moved: float  # bytes of device memory beside the operands of the products
    flops: float
    wire: float  # bytes sent, and as many received
    collectives: int

    def seconds(self, at: Cluster, tp: int) -> float:
        """Computation and communication are assumed not to overlap."""
        return self.flops / at.flops + self.moved / at.bandwidth + self.wire_seconds(at, tp)

    def wire_seconds(self, at: Cluster, tp: int) -> float:
        return self.wire / at.link(tp) + self.collectives * at.steps(tp)


def reduce_scatter(size: float, ranks: int) -> float:
    """Bytes that a rank sends in a ring, of a tensor of `size` bytes; an all-gather sends as many, an all-reduce twice that."""
    return size * (ranks - 1) / ranks


def element(whole: Shape) -> int:
    return whole.unit // (whole.rows * whole.vocab)


def vocabulary_parallel(whole: Shape, tp: int, active: float) -> Cost:
    """Ours: all rows on every rank, V / tp rows of the head. With tp = 1 it is the fused head of one device."""
    d_hidden = whole.rows * whole.hidden * element(whole)
    # Chunks without a gradient follow those with one. The sum of d_hidden is an all-reduce here; with sequence parallelism
    # it is an all-gather of the hidden states and a reduce-scatter, of as many bytes.
    chunk, rows = whole.plan(active, tp).chunk, int(whole.rows * active)
    exchanges = math.ceil(rows / chunk) + math.ceil((whole.rows - rows) / chunk)
    second_visit = 4 * active * whole.rows * whole.vocab if tp > 1 else 0
    return Cost(
        held=(weights(whole) + whole.held(tp)) / tp + d_hidden,
        moved=(whole.tiles(active) + whole.sums(active, tp) + second_visit) / tp,
        flops=(1 + 2 * active) * whole.product / tp,
        wire=PARTIALS * whole.rows * (tp - 1) + 2 * reduce_scatter(d_hidden, tp),
        collectives=exchanges + 1 if tp > 1 else 0,
    )


def weight_gathered(whole: Shape, tp: int, active: float) -> Cost:
    """Our fused head of one device on N / tp rows, with the whole weight gathered and its fp32 gradient scattered. This is
    its best case: the layers in front are sequence-parallel, so no hidden states are sent."""
    own = vocabulary_parallel(replace(whole, rows=-(-whole.rows // tp)), 1, active)
    return replace(own, wire=reduce_scatter(weights(whole), tp), collectives=2 if tp > 1 else 0)


def megatron(whole: Shape, tp: int, active: float) -> Cost:
    """The vocabulary-parallel cross-entropy of Megatron-LM, unfused, on logits [N, V / tp] that are kept: three all-reduces of
    a row's maximum, target and sum, and three products of all rows."""
    shared = _kept(whole, tp, megatron_held(whole) / tp, (MEGATRON_MOVED + casts(whole)) / tp)
    return replace(shared, wire=shared.wire + 3 * 2 * reduce_scatter(4 * whole.rows, tp), collectives=4 if tp > 1 else 0)


def logits_gathered(whole: Shape, tp: int, active: float) -> Cost:
    """Eager PyTorch: all logits on every rank, gathered in bf16, each rank with the columns' gradients of its own."""
    shared = _kept(whole, tp, EAGER_HELD, EAGER_MOVED + casts(whole))
    return replace(shared, wire=shared.wire + reduce_scatter(whole.unit, tp), collectives=2 if tp > 1 else 0)


def megatron_held(whole: Shape) -> int:
    """With the gradient of 16-bit logits beside the softmax."""
    return MEGATRON_HELD + (element(whole) if element(whole) < 4 else 0)


def casts(whole: Shape) -> int:
    return CASTS_MOVED if element(whole) < 4 else 0


def _kept(whole: Shape, tp: int, held: float, moved: float) -> Cost:
    """Three products of all rows, their logits kept, with bytes a logit of the whole vocabulary as given."""
    logits, d_hidden = whole.rows * whole.vocab, whole.rows * whole.hidden * element(whole)
    return Cost(
        held=weights(whole) / tp + d_hidden + held * logits,
        moved=(moved + 3 * element(whole) / tp) * logits,
        flops=3 * whole.product / tp,
        wire=2 * reduce_scatter(d_hidden, tp),
        collectives=0,
    )


def weights(whole: Shape) -> int:
    """Bytes of the head and of its fp32 gradient."""
    return whole.vocab * whole.hidden * (element(whole) + 4)


SCHEMES: dict[str, Callable[[Shape, int, float], Cost]] = {
    "vocabulary-parallel, fused (ours)": vocabulary_parallel,
    "weight gathered, N / TP rows each (ours)": weight_gathered,
    "Megatron-LM cross-entropy, logits [N, V / TP]": megatron,
    "eager, logits gathered": logits_gathered,
}


def least_vocabulary(hidden: int, tp: int, active: float, size: int, flops: float, link: float) -> float:
    """The V from which cutting the vocabulary saves more time in products than its collectives take, whatever N is."""
    return (size + PARTIALS * tp / (2 * hidden)) / (1 + 2 * active) * flops / link


def least_rows(whole: Shape, tp: int, active: float, at: Cluster) -> float:
    """The N from which the time that it saves exceeds the latency of one exchange and one sum, in one chunk."""
    products = (1 - 1 / tp) * (1 + 2 * active) * whole.product / at.flops
    sent = vocabulary_parallel(whole, tp, active).wire / at.link(tp)
    return whole.rows * 2 * at.steps(tp) / (products - sent)


def most_rows(hidden: int, vocab: int, tp: int, size: int) -> float:
    """The N up to which a vocabulary-parallel head sends fewer bytes than gathering the weight once and scattering its
    gradient once."""
    return vocab * (size + 4) / (2 * size + PARTIALS * tp / hidden)


def head_gradient(model: Model, tp: int, dp: int, size: int) -> float:
    """Bytes that a rank sends in a step for the head: its fp32 gradient, and the new weight of a sharded optimizer."""
    return reduce_scatter((4 + size) * model.vocab * model.hidden / tp, dp)


def optimizer(size: int, dp: int) -> float:
    """Bytes a parameter: weight, fp32 gradient; sharded: two fp32 moments, and the fp32 weight where the weight is not."""
    return size + 4 + (8 + (4 if size < 4 else 0)) / dp


def head_share(model: Model, active: float) -> tuple[float, float]:
    """(of the parameters, of the flops). Body: 6 a parameter and token that is neither head nor embedding; attention's part
    that grows with the context is left out, so the second is an upper bound at long contexts."""
    head = model.vocab * model.hidden
    mine = (1 + 2 * active) * 2 * head
    return head / model.params, mine / (mine + 6 * (model.active_params - 2 * head))


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
        found = [least_vocabulary(model.hidden, tp, s.active, size, at.flops, link) for link in (at.nvlink, at.network)]
        rows.append([at.name, *(cell for v in found for cell in (f"{v:,.0f}", figure(100 * v / model.vocab)))])
    return rows


def crossings(s: Setup) -> Table:
    """Ours beside the other schemes, a column a model."""
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
