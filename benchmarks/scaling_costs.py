"""The costs of the head under tensor and data parallelism, by scheme: bytes held, bytes moved and sent, flops.

N: rows (tokens) that the ranks of a tensor-parallel group share in a micro-batch; a: the share of them that get a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.roofline import GPUS, Shape

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
    active_params: float  # parameters used for a token; fewer than `params` in a mixture of experts
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
    """The costs of one rank for forward and backward of the head, with the N rows of its tensor-parallel group."""

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
    """Our fused head of one device on N / tp rows, with the whole weight gathered and its fp32 gradient scattered. This is the best
    case of this scheme: the layers before are sequence-parallel, so no hidden states are sent."""
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
    """Bytes held by Megatron-LM: the softmax, and the gradient of 16-bit logits."""
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
    """The V from which on cutting the vocabulary saves more time in products than its collectives take, for any N."""
    return (size + PARTIALS * tp / (2 * hidden)) / (1 + 2 * active) * flops / link


def least_rows(whole: Shape, tp: int, active: float, at: Cluster) -> float:
    """The N from which on the time saved exceeds the latency of one exchange and one sum, in one chunk."""
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
    """The head's share (of the parameters, of the flops). The flops of the body are 6 per token and parameter other than head and
    embedding. The part of attention that grows with the context is left out, so the second is an upper bound for long contexts."""
    head = model.vocab * model.hidden
    mine = (1 + 2 * active) * 2 * head
    return head / model.params, mine / (mine + 6 * (model.active_params - 2 * head))
