"""Time and extra memory of one training step's loss and gradient at a model's size, compared with eager PyTorch; and of the matrix
products in it by everything that can make them here."""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .. import Objective, TokenBatch, grpo_loss, linear_grpo_loss
from ..rows import products
from ..rows.backends import cpu_products
from ..rows.memory import release
from .machine import memory_available

Tensor = torch.Tensor

#: (vocabulary, hidden size) of a model for each device. SMALL_VOCAB is used if there is little memory.
SIZES = {"cpu": (151_936, 896), "gpu": (151_936, 4096)}
SMALL_VOCAB = 32_000
MOST_ROWS = {"cpu": 256, "gpu": 8192}
PROBE_ROWS = 64
EAGER_SECONDS = 0.6  # the number of rows is chosen so that eager PyTorch takes about this long
#: Bytes per logit and per element of the head at the peak of eager PyTorch or of ours: copies in bf16 and fp32, gradients.
LOGIT_BYTES, HEAD_BYTES = 20, 12
SECONDS = 2.5  # for the rounds of one level
LEAST, MOST = 5, 9  # rounds
LONGEST = 60.0  # seconds, after which no round begins even if there were fewer than LEAST
#: The upper quartile over the lower one of what rounds say, above which they say nothing.
MOST_SPREAD = 1.5
#: Slower than another is what takes this many times as long.
MOST_TIMES = 1.05
UNKNOWN_MEMORY = 2 << 30  # if the system does not tell how much is free


@dataclass
class Timing:
    """Medians of one contender; gain: lower quartile, median and upper quartile over the rounds of how many times as fast it was as
    the first contender, None for that one."""

    name: str
    ms: float
    extra_mb: float | None  # None: this system does not tell
    runs: int
    gain: tuple[float, float, float] | None = None

    @property
    def steady(self) -> bool:
        """Whether the rounds agree well enough to compare."""
        return self.gain is None or (self.runs >= LEAST and self.gain[2] <= MOST_SPREAD * self.gain[0])

    @property
    def slower(self) -> bool:
        """By more than 5 % in three quarters of the rounds, however they spread."""
        return self.gain is not None and self.runs >= LEAST and self.gain[2] * MOST_TIMES < 1

    @property
    def faster(self) -> bool:
        """As `slower`."""
        return self.gain is not None and self.runs >= LEAST and self.gain[0] > MOST_TIMES


@dataclass
class Step:
    """The contenders at one level, eager PyTorch first; at level "products" those in use come first. `reason` says why there are
    none."""

    level: str
    rows: int
    hidden: int | None
    vocab: int
    dtype: str
    timings: list[Timing] = field(default_factory=list)
    reason: str | None = None

    @property
    def what(self) -> str:
        return "matrix products" if self.level == "products" else f"a step from {self.level}"


class Output(torch.autograd.Function):
    """Returns the same memory as the output of a computation, because a leaf may not be overwritten in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@dataclass
class Contender:
    name: str
    run: Callable[[], object]
    restore: Callable[[], object] = lambda: None  # inputs that a run overwrites, untimed


def measure(level: str, backend: str, device: torch.device) -> Step:
    """Eager PyTorch and `backend` at level "logits" or "hidden"; at level "products" all products that can run on the CPU."""
    found = _shape(level, device)
    if found.reason is not None:
        return found
    head = None if level == "logits" else _head(found, device)
    if level == "products":
        assert head is not None
        found.rows = PROBE_ROWS
        return _compared(found, makers_of_products(found, head.detach()), device)
    probe = contenders(replace(found, rows=PROBE_ROWS), backend, device, head)[0]
    timed(probe, device)
    affordable = int(EAGER_SECONDS / min(timed(probe, device) for _ in range(3)) * 1e3 * PROBE_ROWS)
    found.rows = max(PROBE_ROWS, min(found.rows, affordable)) // 32 * 32
    del probe
    return _compared(found, contenders(found, backend, device, head), device)


def _compared(found: Step, chosen: list[Contender], device: torch.device) -> Step:
    times = interleaved(chosen, device)
    first = times[chosen[0].name]
    for c in chosen:
        own = times[c.name]
        against = None if own is first else gain(first, own)
        found.timings.append(Timing(c.name, statistics.median(own), extra_memory(c, device), len(own), against))
    return found


def _shape(level: str, device: torch.device) -> Step:
    """The shape that memory allows, without timings."""
    free = memory_free(device)
    kind = "cpu" if device.type == "cpu" else "gpu"
    vocab, width = SIZES[kind]
    if free < 3 * HEAD_BYTES * vocab * width:
        vocab, width = SMALL_VOCAB, min(width, 1024)
    # On a CPU logits are fp32, as trainers have them there; from hidden states bf16 is where plain PyTorch may be faster.
    fp32 = device.type == "cpu" and (level == "logits" or not torch_has_bf16())
    head = 0 if level == "logits" else HEAD_BYTES * vocab * width
    rows = min(MOST_ROWS[kind], int((free / 2 - head) / (LOGIT_BYTES * vocab)))
    step = Step(level, rows, None if level == "logits" else width, vocab, "float32" if fp32 else "bfloat16")
    if rows < PROBE_ROWS:
        step.reason = f"only {free / 1e9:.1f} GB of memory are free"
    return step


def torch_has_bf16() -> bool:
    """Whether torch has products of bf16 for this CPU: without AVX-512 they take many times as long as those of fp32."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _head(step: Step, device: torch.device) -> Tensor:
    """[V, H]. A few random rows, repeated: random numbers for all rows would take longer than the measurement."""
    assert step.hidden is not None
    few = 2 / step.hidden**0.5 * torch.randn(1013, step.hidden, generator=torch.Generator().manual_seed(1))
    few = few.to(device, getattr(torch, step.dtype))
    return few[torch.arange(step.vocab, device=device) % len(few)].requires_grad_()


def contenders(step: Step, backend: str, device: torch.device, head: Tensor | None) -> list[Contender]:
    """Eager PyTorch first. All compute the clipped loss of fresh log-probs, and the gradients of logits or of hidden states
    and head."""
    g = torch.Generator().manual_seed(2)
    dtype, rows, vocab = getattr(torch, step.dtype), step.rows, step.vocab
    targets = torch.randint(0, vocab, (rows,), generator=g).to(device)
    advantages = torch.randn(rows, generator=g).to(device)
    objective = Objective.preset("dapo")

    def eager(logits: Tensor, leaves: list[Tensor]) -> object:
        logps = torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0]
        ratio = torch.exp(logps - old_logps)
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).mean()
        return torch.autograd.grad(loss, leaves)

    def batch() -> TokenBatch:
        return TokenBatch(targets, advantages, old_logps=old_logps)

    def old_logps_of(logits: Tensor) -> Tensor:
        logps = logits.detach().float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return logps + 0.3 * torch.randn(rows, generator=g).to(device)

    if head is not None:
        hidden = torch.randn(rows, head.shape[1], generator=g).to(device, dtype).requires_grad_()
        leaves = [hidden, head]
        old_logps = old_logps_of(hidden @ head.t())

        def linear() -> object:
            loss = linear_grpo_loss(hidden, head, batch(), objective, backend=backend, strict=True).loss
            return torch.autograd.grad(loss, leaves)

        return [Contender("eager PyTorch", lambda: eager(hidden @ head.t(), leaves)), Contender("linear_grpo_loss", linear)]

    few = (2 * torch.randn(rows, 1013, generator=g)).to(device, dtype)
    logits = few.repeat(1, -(-vocab // 1013))[:, :vocab].contiguous().requires_grad_()
    overwritten = logits.detach().clone().requires_grad_()
    old_logps = old_logps_of(logits)

    def fused(leaf: Tensor, inplace: bool) -> object:
        x = Output.apply(leaf) if inplace else leaf
        loss = grpo_loss(x, batch(), objective, inplace=inplace, backend=backend, strict=True).loss
        return torch.autograd.grad(loss, [leaf])

    return [
        Contender("eager PyTorch", lambda: eager(logits, [logits])),
        Contender("grpo_loss", lambda: fused(logits, False)),
        Contender("grpo_loss, in place", lambda: fused(overwritten, True), lambda: overwritten.detach().copy_(logits)),
    ]


def makers_of_products(step: Step, head: Tensor) -> list[Contender]:
    """All that can make the three products of a step here, those in use first, and at the end torch.mm as eager PyTorch calls it,
    which rounds results to the dtype of the operands."""
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(step.rows, head.shape[1], generator=g).to(head.dtype)
    gradient = torch.randn(step.rows, 1013, generator=g).repeat(1, -(-step.vocab // 1013))[:, : step.vocab].to(head.dtype)
    in_use = cpu_products.engine()
    able = [name for name, reason in cpu_products.engines().items() if reason is None]

    def maker(name: str) -> Contender:
        with cpu_products.using(name):
            made = products.products_for(head, None, head.dtype)
            rows = hidden.to(made.dtype)
            slopes = gradient.to(made.gradient_buffer(made.logits(rows), exact=False).dtype)

        def run() -> object:
            with cpu_products.using(name):
                return made.logits(rows), made.d_hidden(slopes), made.add_d_weight(None, slopes, rows, last=True)

        return Contender(name, run)

    rounded = Contender("torch.mm", lambda: (hidden @ head.t(), gradient @ head, gradient.t() @ hidden))
    return [*(maker(name) for name in sorted(able, key=lambda name: name != in_use)), rounded]


def interleaved(chosen: list[Contender], device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each, round by round. In a round all take their turn, the last one first in every other, so that a change of
    the machine's speed affects all of them. A stall does not cost rounds."""
    times: dict[str, list[float]] = {c.name: [] for c in chosen}
    for contender in chosen:
        timed(contender, device)  # compiles kernels and fills the allocator
    begin = time.perf_counter()
    for done in range(MOST):
        if time.perf_counter() - begin > (SECONDS if done >= LEAST else LONGEST):
            break
        for contender in chosen if done % 2 == 0 else reversed(chosen):
            times[contender.name].append(timed(contender, device))
    return times


def gain(first: list[float], other: list[float]) -> tuple[float, float, float]:
    """The quartiles over the rounds of how many times as fast the other was. A stall is in one round, and so in none of them."""
    ratios = [a / b for a, b in zip(first, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return low, middle, high


def timed(contender: Contender, device: torch.device) -> float:
    """Milliseconds of one run."""
    contender.restore()
    _wait(device)
    begin = time.perf_counter()
    result = contender.run()
    _wait(device)
    ms = 1e3 * (time.perf_counter() - begin)
    del result
    return ms


def extra_memory(contender: Contender, device: torch.device) -> float | None:
    """MB that a run needs beyond its inputs, at its peak; None if the system does not tell. It must have run before: on a CPU the
    memory of code loaded by a first run would be counted, too."""
    contender.restore()
    gc.collect()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        _wait(device)
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        contender.run()
        _wait(device)
        return float(module.max_memory_allocated() - before) / 1e6
    release()  # frees the memory of earlier results, which a run would otherwise reuse unnoticed
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc: returns free memory, so that a run does not reuse what another has allocated
        libc.malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _resident("VmRSS")
        contender.run()
        return max(0, _resident("VmHWM") - before) / 1e6
    except (OSError, ValueError):  # not Linux, or a sandbox
        return None


def _resident(key: str) -> int:
    match = re.search(rf"^{key}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(key)
    return int(match[1]) * 1024


def memory_free(device: torch.device) -> int:
    """Bytes."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    known = memory_available()
    return UNKNOWN_MEMORY if known is None else known


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
