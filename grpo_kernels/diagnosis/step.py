"""Times of one training step's loss and gradient at a model's size, compared with eager PyTorch; on a CPU also by
everything that can make its matrix products."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..batch import TokenBatch
from ..losses import grpo_loss, linear_grpo_loss
from ..objective import Objective
from ..rows.backends import cpu_products, use
from .machine import memory_available

Tensor = torch.Tensor

#: (rows, vocabulary, hidden size) for each device: of a model, and where there is little memory.
SIZES = {
    "cpu": ((256, 151_936, 896), (256, 32_000, 512)),
    "gpu": ((8192, 151_936, 4096), (4096, 151_936, 1024), (2048, 32_000, 1024)),
}
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


@dataclass
class Timing:
    """Medians of one contender; gain: lower quartile, median and upper quartile over the rounds of how many times as fast it was as
    the first contender, None for that one."""

    name: str
    ms: float
    runs: int
    gain: tuple[float, float, float] | None = None

    @property
    def verdict(self) -> str:
        """ "slower" or "faster" than the first by more than 5 % in three quarters of the rounds; "unsteady" where the rounds do not
        agree well enough to say so; else "alike"."""
        if self.gain is None:
            return "alike"
        if self.runs >= LEAST and self.gain[2] * MOST_TIMES < 1:
            return "slower"
        if self.runs < LEAST or self.gain[2] > MOST_SPREAD * self.gain[0]:
            return "unsteady"
        return "faster" if self.gain[0] > MOST_TIMES else "alike"


@dataclass
class Step:
    """The contenders at one level: first eager PyTorch, or at "products" what makes matrix products now. `reason`: why there is
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
        return "a step from hidden, by each engine" if self.level == "products" else f"a step from {self.level}"


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
    """Eager PyTorch and `backend` at level "logits" or "hidden"; at level "products" all engines that can make products on this
    CPU."""
    found = _shape(level, device)
    if found.reason is not None:
        return found
    probe = contenders(replace(found, rows=PROBE_ROWS), backend, device)[0]
    timed(probe, device)
    affordable = int(EAGER_SECONDS / min(timed(probe, device) for _ in range(3)) * 1e3 * PROBE_ROWS)
    most = PROBE_ROWS if level == "products" else min(found.rows, affordable)
    found.rows = max(PROBE_ROWS, most) // 32 * 32
    chosen = contenders(found, backend, device)
    times = interleaved(chosen, device)
    first = times[chosen[0].name]
    for name, own in times.items():
        found.timings.append(Timing(name, statistics.median(own), len(own), None if own is first else gain(first, own)))
    return found


def _shape(level: str, device: torch.device) -> Step:
    """The largest shape for half of the memory, without timings."""
    kind = "cpu" if device.type == "cpu" else "gpu"
    free = memory_available() if kind == "cpu" else torch.get_device_module(device).mem_get_info(device)[0]
    # On a CPU logits are fp32, as trainers have them there; from hidden states bf16 is where plain PyTorch may be faster.
    fp32 = kind == "cpu" and (level == "logits" or not torch_has_bf16())
    for rows, vocab, width in SIZES[kind]:
        step = Step(level, rows, None if level == "logits" else width, vocab, "float32" if fp32 else "bfloat16")
        if LOGIT_BYTES * rows * vocab + HEAD_BYTES * vocab * (step.hidden or 0) < free / 2:
            return step
    return replace(step, reason=f"only {free / 1e9:.1f} GB of memory are free")


def torch_has_bf16() -> bool:
    """Whether torch has products of bf16 for this CPU: without AVX-512 they take many times as long as those of fp32."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def contenders(step: Step, backend: str, device: torch.device) -> list[Contender]:
    """Eager PyTorch first, or the engine of products in use. All compute the clipped loss of fresh log-probs, and the gradients of
    logits or of hidden states and head."""
    g = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device)

    # A few random columns, repeated: random numbers for all would take longer than the measurement.
    repeated = torch.arange(step.vocab, device=device) % 1013
    if step.hidden is None:
        inputs = [2 * random(step.rows, 1013)[:, repeated]]
    else:
        inputs = [random(step.rows, step.hidden), 2 / step.hidden**0.5 * random(1013, step.hidden)[repeated]]
    leaves = [x.to(getattr(torch, step.dtype)).contiguous().requires_grad_() for x in inputs]
    targets, advantages = torch.randint(0, step.vocab, (step.rows,), generator=g).to(device), random(step.rows)
    loss_of: Any = grpo_loss if step.hidden is None else linear_grpo_loss

    def log_probs() -> Tensor:
        logits = leaves[0] if step.hidden is None else leaves[0] @ leaves[1].t()
        return torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0]

    old_logps = log_probs().detach() + 0.3 * random(step.rows)
    batch = TokenBatch(targets, advantages, old_logps=old_logps)

    def eager() -> object:
        ratio = torch.exp(log_probs() - old_logps)
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).mean()
        return torch.autograd.grad(loss, leaves)

    def ours(own: list[Tensor] = leaves, front: Any = lambda own: own, engine: str | None = None, **how: bool) -> object:
        by = contextlib.nullcontext() if engine is None else cpu_products.using(engine)
        with use(backend=backend, strict=True), by:
            return torch.autograd.grad(loss_of(*front(own), batch, Objective.preset("dapo"), **how).loss, own)

    if step.level == "products":
        able = sorted((name for name, reason in cpu_products.engines().items() if reason is None), key=_not_in_use)
        return [Contender(name, functools.partial(ours, engine=name)) for name in able]
    found = [Contender("eager PyTorch", eager), Contender(loss_of.__name__, ours)]
    if step.hidden is None:
        overwritten = leaves[0].detach().clone().requires_grad_()
        in_place = functools.partial(ours, [overwritten], lambda own: [Output.apply(*own)], inplace=True)
        found.append(Contender("grpo_loss, in place", in_place, lambda: overwritten.detach().copy_(leaves[0])))
    return found


def _not_in_use(engine: str) -> bool:
    return engine != cpu_products.engine()


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


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
