"""Times of one training step's loss and gradient at a model's size, compared with plain PyTorch; on
a CPU also with each engine that can compute its matmuls.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..batch import TokenBatch
from ..core.backends import cpu_matmuls, use
from ..losses import grpo_loss, linear_grpo_loss
from ..objective import Objective
from .machine import memory_available

#: (rows, vocabulary, hidden size) for each device: of a model, and where there is little memory.
SIZES = {
    "cpu": ((64, 151_936, 896), (64, 32_000, 512)),
    "gpu": ((8192, 151_936, 4096), (4096, 151_936, 1024), (2048, 32_000, 1024)),
}
#: Bytes per logit and per element of the head at the peak of eager PyTorch or of ours: copies in
#: bf16 and fp32, gradients.
LOGIT_BYTES = 20
HEAD_BYTES = 12
ROUNDS = 5
#: The upper quartile over the lower one of what rounds say, above which they say nothing.
MOST_SPREAD = 1.5
#: Slower than another is what takes this many times as long.
MOST_TIMES = 1.05


# ---- plain PyTorch


def plain_rows(leaves: list[Tensor]) -> Tensor:
    """Rows of logits, given or from hidden states and a head."""
    return leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].t()


def plain_logps(leaves: list[Tensor], targets: Tensor) -> Tensor:
    """Log-probs of tokens from logits, or from hidden states and a head."""
    return torch.log_softmax(plain_rows(leaves).float(), -1).gather(-1, targets[..., None])[..., 0]


def plain_loss(leaves: list[Tensor], batch: TokenBatch) -> Tensor:
    """The loss of DAPO, which autograd differentiates, of a batch without a mask and with an
    advantage a token.
    """
    assert batch.advantages is not None
    return clipped(plain_logps(leaves, batch.targets), batch.old_logps, batch.advantages).mean()


def clipped(logps: Tensor, old_logps: Any, advantages: Tensor) -> Tensor:
    ratio = torch.exp(logps - old_logps)
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)


# ---- what is found


@dataclass
class Timing:
    """Medians of one contender; gain: lower quartile, median and upper quartile over the rounds of
    how many times as fast it was as the first contender, None for that one.
    """

    name: str
    ms: float
    runs: int
    gain: tuple[float, float, float] | None = None

    @property
    def verdict(self) -> str:
        """ "slower" or "faster" than the first by more than 5 % in three quarters of the rounds;
        "unsteady" where rounds do not agree well enough to say so; else "alike".
        """
        if self.gain is None:
            return "alike"
        low, _, high = self.gain
        if high * MOST_TIMES < 1:
            return "slower"
        if low > MOST_TIMES:
            return "faster"
        return "unsteady" if high > MOST_SPREAD * low else "alike"


@dataclass
class Step:
    """The contenders at one level:

    first plain PyTorch, or at "matmuls" the engine of matmuls in use.
    """

    level: str
    rows: int
    hidden: int | None
    vocab: int
    dtype: str
    timings: list[Timing] = field(default_factory=list)

    @property
    def what(self) -> str:
        return (
            "a step from hidden, by each engine"
            if self.level == "matmuls"
            else f"a step from {self.level}"
        )


def measure(level: str, backend: str, device: torch.device) -> Step:
    """Plain PyTorch and `backend` at level "logits" or "hidden"; at level "matmuls" all engines
    that can compute matmuls on this CPU.
    """
    found = largest(level, device)
    (first, times), *others = interleaved(contenders(found, backend, device), device).items()
    found.timings = [Timing(first, statistics.median(times), len(times))]
    found.timings += [
        Timing(name, statistics.median(own), len(own), gain(times, own)) for name, own in others
    ]
    return found


def largest(level: str, device: torch.device) -> Step:
    """The largest shape for half of the memory, without timings.

    Raises MemoryError where there is none.
    """
    kind = "cpu" if device.type == "cpu" else "gpu"
    free = (
        memory_available()
        if kind == "cpu"
        else torch.get_device_module(device).mem_get_info(device)[0]
    )
    # On a CPU logits are fp32, as trainers have them there; from hidden states bf16 is where plain
    # PyTorch may be faster.
    fp32 = kind == "cpu" and (level == "logits" or not torch_has_bf16())
    for rows, vocab, width in SIZES[kind]:
        step = Step(
            level,
            rows,
            None if level == "logits" else width,
            vocab,
            "float32" if fp32 else "bfloat16",
        )
        if LOGIT_BYTES * rows * vocab + HEAD_BYTES * vocab * (step.hidden or 0) < free / 2:
            return step
    raise MemoryError(f"only {free / 1e9:.1f} GB of memory are free")


def torch_has_bf16() -> bool:
    """Whether torch has bf16 matmuls for this CPU:

    without AVX-512 they take many times as long as those of fp32.
    """
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


# ---- the contenders


class Output(torch.autograd.Function):
    """Returns the same memory as the output of a computation, because a leaf may not be overwritten
    in place.
    """

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


def inputs(step: Step, device: torch.device) -> tuple[list[Tensor], TokenBatch]:
    """Logits [rows, vocab], or hidden states [rows, hidden] and a head, in the step's dtype; and
    tokens, with old log-probs near those of the rows.
    """
    g = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device)

    # A few random columns, repeated: random numbers for all would take longer than the measurement.
    repeated = torch.arange(step.vocab, device=device) % 1013
    if step.hidden is None:
        rows = [2 * random(step.rows, 1013)[:, repeated]]
    else:
        rows = [
            random(step.rows, step.hidden),
            2 / step.hidden**0.5 * random(1013, step.hidden)[repeated],
        ]
    leaves = [x.to(getattr(torch, step.dtype)).contiguous() for x in rows]
    targets = torch.randint(0, step.vocab, (step.rows,), generator=g).to(device)
    return leaves, TokenBatch(
        targets, random(step.rows), old_logps=plain_logps(leaves, targets) + 0.3 * random(step.rows)
    )


def contenders(step: Step, backend: str, device: torch.device) -> list[Contender]:
    """Plain PyTorch first, or the engine of matmuls in use. All compute the clipped loss of fresh
    log-probs, and the gradients of logits or of hidden states and head.
    """
    leaves, batch = inputs(step, device)
    for leaf in leaves:
        leaf.requires_grad_()
    loss_of: Any = grpo_loss if step.hidden is None else linear_grpo_loss

    def ours(
        own: list[Tensor] = leaves, front: Any = list, by: str | None = None, **how: bool
    ) -> object:
        engine = contextlib.nullcontext() if by is None else cpu_matmuls.using(by)
        with use(backend=backend, strict=True), engine:
            return torch.autograd.grad(
                loss_of(*front(own), batch, Objective.preset("dapo"), **how).loss, own
            )

    if step.level == "matmuls":
        able = (name for name, reason in cpu_matmuls.engines().items() if reason is None)
        in_use_first = sorted(able, key=lambda name: name != cpu_matmuls.engine())
        return [Contender(name, functools.partial(ours, by=name)) for name in in_use_first]
    plain = Contender(
        "eager PyTorch", lambda: torch.autograd.grad(plain_loss(leaves, batch), leaves)
    )
    found = [plain, Contender(loss_of.__name__, ours)]
    if step.hidden is None:
        overwritten = leaves[0].detach().clone().requires_grad_()
        in_place = functools.partial(
            ours, [overwritten], lambda own: [Output.apply(*own)], inplace=True
        )
        found.append(
            Contender(
                "grpo_loss, in place", in_place, lambda: overwritten.detach().copy_(leaves[0])
            )
        )
    return found


# ---- time


def interleaved(chosen: list[Contender], device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each, round by round. In a round all take their turn, the last one first in
    every other, so that a change of the machine's speed affects all of them.
    """
    times: dict[str, list[float]] = {c.name: [] for c in chosen}
    for contender in chosen:
        timed(contender, device)  # compiles kernels and fills the allocator
    for done in range(ROUNDS):
        for contender in chosen[:: 1 if done % 2 == 0 else -1]:
            times[contender.name].append(timed(contender, device))
    return times


def gain(first: list[float], other: list[float]) -> tuple[float, float, float]:
    """The quartiles over the rounds of how many times as fast the other was.

    A stall is in one round, and so in none of them.
    """
    low, middle, high = statistics.quantiles(
        [a / b for a, b in zip(first, other, strict=True)], n=4, method="inclusive"
    )
    return low, middle, high


def timed(contender: Contender, device: torch.device) -> float:
    """Milliseconds of one run."""
    wait = torch.get_device_module(device).synchronize
    contender.restore()
    wait()
    begin = time.perf_counter()
    result = contender.run()
    wait()
    ms = 1e3 * (time.perf_counter() - begin)
    del result
    return ms
