"""Time the loss and gradient of one training step at the size of a model, next to plain PyTorch.

On a CPU a step from hidden states is also timed with each engine that can compute its matmuls.
"""

from __future__ import annotations

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

#: (rows, vocabulary, hidden size) on each kind of device, the largest first.
SIZES = {
    "cpu": ((64, 151_936, 896), (64, 32_000, 512)),
    "gpu": ((8192, 151_936, 4096), (4096, 151_936, 1024), (2048, 32_000, 1024)),
}
#: Peak memory of any contender, in bytes per logit and per element of the head: copies in bf16 and
#: fp32, and gradients.
LOGIT_BYTES = 20
HEAD_BYTES = 12
#: How often each contender runs.
ROUNDS = 5
#: If the upper quartile of the speed-ups is this many times the lower one, they are not judged.
MOST_SPREAD = 1.5
#: A contender is slower than another if it takes more than this many times as long.
MOST_TIMES = 1.05
#: What a loss is multiplied by that is averaged over four micro-batches.
ACCUMULATION_SCALE = 1 / 4

PLAIN = "eager PyTorch"
DIVIDED = "grpo_loss, loss / 4"
DIVIDED_WITH_GRAD_SCALE = "the same with grad_scale"


# ---- results


@dataclass
class Timing:
    """The time of one contender.

    name   what was timed, see `make_contenders`
    ms     median over the rounds, in milliseconds
    runs   number of rounds
    gain   how many times as fast it was as the first contender: lower quartile, median and upper
           quartile over the rounds. None for the first contender.
    """

    name: str
    ms: float
    runs: int
    gain: tuple[float, float, float] | None = None

    @property
    def verdict(self) -> str:
        """How the contender compares with the first one.

        "faster" or "slower": by more than 5 % in three quarters of the rounds. "unsteady": the
        rounds differ too much to compare. "alike": otherwise.
        """
        if self.gain is None:
            return "alike"
        lower, _, upper = self.gain
        if upper * MOST_TIMES < 1:
            return "slower"
        if lower > MOST_TIMES:
            return "faster"
        return "unsteady" if upper > MOST_SPREAD * lower else "alike"


@dataclass
class Step:
    """The size of a step and the times of its contenders.

    level     "logits" or "hidden": what the loss is computed from. "matmuls": from hidden states,
              with each engine (implementation of matmuls on the CPU)
    rows      number of tokens
    hidden    hidden size; None at the level "logits"
    vocab     size of the vocabulary
    dtype     of logits or hidden states, a name of torch
    timings   the first is plain PyTorch, or at "matmuls" the engine in use
    """

    level: str
    rows: int
    hidden: int | None
    vocab: int
    dtype: str
    timings: list[Timing] = field(default_factory=list)

    @property
    def title(self) -> str:
        """What was timed, in words."""
        if self.level == "matmuls":
            return "a step from hidden, by each engine"
        return f"a step from {self.level}"

    def timing(self, name: str) -> Timing | None:
        """Return the timing of the contender of this name, None if it was not timed."""
        return next((timing for timing in self.timings if timing.name == name), None)


def measure(level: str, backend: str, device: torch.device) -> Step:
    """Time the loss and gradient of a training step in several ways, and return the times.

    level     "logits", "hidden" or "matmuls": what is timed, see `make_contenders`
    backend   the backend of our losses
    device    where the step runs

    Returns a `Step` with a `Timing` for each way. Raises MemoryError if no size fits into half of
    the free memory.
    """
    step = largest_step(level, device)
    times = time_in_turns(make_contenders(step, backend, device), device)
    first_times = next(iter(times.values()))
    for name, contender_times in times.items():
        is_first = contender_times is first_times
        step.timings.append(
            Timing(
                name,
                ms=statistics.median(contender_times),
                runs=len(contender_times),
                gain=None if is_first else quartiles_of_gain(first_times, contender_times),
            )
        )
    return step


def largest_step(level: str, device: torch.device) -> Step:
    """Return the largest size of a step that takes at most half of the free memory.

    level    "logits", "hidden" or "matmuls": what the loss is computed from, see `Step`
    device   where the step will run

    The result is a `Step` without timings. Raises MemoryError if no size in `SIZES` fits.
    """
    is_cpu = device.type == "cpu"
    if is_cpu:
        free_bytes = memory_available()
    else:
        free_bytes = torch.get_device_module(device).mem_get_info(device)[0]
    # On a CPU trainers have fp32 logits. From hidden states bf16 is where plain PyTorch may win.
    uses_fp32 = is_cpu and (level == "logits" or not torch_has_bf16())
    for rows, vocab, hidden in SIZES["cpu" if is_cpu else "gpu"]:
        step = Step(
            level,
            rows,
            hidden=None if level == "logits" else hidden,
            vocab=vocab,
            dtype="float32" if uses_fp32 else "bfloat16",
        )
        peak_bytes = LOGIT_BYTES * rows * vocab + HEAD_BYTES * vocab * (step.hidden or 0)
        if peak_bytes < free_bytes / 2:
            return step
    raise MemoryError(f"only {free_bytes / 1e9:.1f} GB of memory are free")


def torch_has_bf16() -> bool:
    """Return whether torch has fast bf16 matmuls for this CPU.

    Without AVX-512 they take many times as long as in fp32.
    """
    has_mkldnn = torch.backends.mkldnn.is_available()
    return has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


# ---- the contenders


@dataclass
class Contender:
    """A way to compute the loss and its gradients.

    run          returns the gradients of the loss times `loss_scale`
    restore      restores inputs that a run overwrites; its time is not counted
    loss_scale   what the loss is multiplied by
    """

    name: str
    run: Callable[[], object]
    restore: Callable[[], object] = lambda: None
    loss_scale: float = 1.0


def make_contenders(step: Step, backend: str, device: torch.device) -> list[Contender]:
    """Return the ways to compute the loss of a step and its gradients that are to be timed.

    All get the same random inputs. The first is the one that the others are compared with. The
    level of the step decides which they are:

    "logits"    plain PyTorch, and `grpo_loss` in several ways. Gradient of the logits.
    "hidden"    plain PyTorch, and `linear_grpo_loss`. Gradients of hidden states and head.
    "matmuls"   `linear_grpo_loss` with each engine (implementation of matmuls on the CPU) that can
                run here, the engine in use first. Which one is fastest depends on the CPU.

    step      level, sizes and dtype
    backend   the backend that computes our losses
    device    where the inputs are
    """
    # [logits] or [hidden states, head]
    leaves, batch = make_inputs(step, device)
    for leaf in leaves:
        leaf.requires_grad_()
    if step.level == "matmuls":
        return contenders_by_engine(leaves, batch, backend)

    def run_plain() -> object:
        return torch.autograd.grad(plain_loss(leaves, batch), leaves)

    plain = Contender(PLAIN, run_plain)
    if step.level == "logits":
        (logits,) = leaves
        return [plain, *contenders_from_logits(logits, batch, backend)]

    def run_ours() -> object:
        return torch.autograd.grad(our_loss(leaves, batch, backend), leaves)

    return [plain, Contender("linear_grpo_loss", run_ours)]


def contenders_by_engine(leaves: list[Tensor], batch: TokenBatch, backend: str) -> list[Contender]:
    """Return our loss from hidden states with each engine of matmuls, the one in use first.

    An engine is an implementation of matmuls on the CPU, such as torch.mm or AMX kernels. It can be
    chosen by an environment variable.

    leaves    [hidden states [rows, hidden], head [vocab, hidden]]
    batch     targets, advantages and old log-probs of the tokens
    backend   the backend of the loss
    """

    def run_with(engine: str) -> object:
        with cpu_matmuls.using(engine):
            return torch.autograd.grad(our_loss(leaves, batch, backend), leaves)

    in_use = cpu_matmuls.engine()
    # `engines` gives the reason why an engine cannot run here, or None.
    usable = [name for name, reason in cpu_matmuls.engines().items() if reason is None]
    usable.sort(key=lambda name: name != in_use)
    return [Contender(name, functools.partial(run_with, name)) for name in usable]


def contenders_from_logits(logits: Tensor, batch: TokenBatch, backend: str) -> list[Contender]:
    """Return four ways to compute our loss from logits and its gradient, to be timed.

    1. The loss and its gradient.
    2. The same in place: the gradient overwrites the logits.
    3. The loss times 1 / 4, as for the average over four micro-batches. The backward of this
       product takes a pass over the gradient.
    4. The same product, and the factor passed as grad_scale too. The gradient is computed with it,
       so the backward takes no further pass.

    logits    [rows, vocab], a leaf that requires grad
    batch     targets, advantages and old log-probs of the tokens
    backend   the backend of the loss
    """
    overwritten = logits.detach().clone().requires_grad_()  # by the second way

    def run(**arguments: Any) -> object:
        return torch.autograd.grad(our_loss([logits], batch, backend, **arguments), logits)

    def run_in_place() -> object:
        output = ModelOutput.apply(overwritten)  # a leaf is never overwritten
        loss = our_loss([output], batch, backend, inplace=True)
        return torch.autograd.grad(loss, overwritten)

    def restore_logits() -> object:
        return overwritten.detach().copy_(logits)

    def run_divided(**arguments: Any) -> object:
        loss = our_loss([logits], batch, backend, **arguments) * ACCUMULATION_SCALE
        return torch.autograd.grad(loss, logits)

    def run_divided_with_grad_scale() -> object:
        return run_divided(grad_scale=ACCUMULATION_SCALE)

    return [
        Contender("grpo_loss", run),
        Contender("grpo_loss, in place", run_in_place, restore=restore_logits),
        Contender(DIVIDED, run_divided, loss_scale=ACCUMULATION_SCALE),
        Contender(
            DIVIDED_WITH_GRAD_SCALE, run_divided_with_grad_scale, loss_scale=ACCUMULATION_SCALE
        ),
    ]


class ModelOutput(torch.autograd.Function):
    """Identity. Its result may be overwritten in place, which a leaf may not."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def our_loss(leaves: list[Tensor], batch: TokenBatch, backend: str, **arguments: Any) -> Tensor:
    """Return the DAPO loss of this package, 0-d fp32.

    leaves      [logits], or [hidden states, weight of the head]
    batch       targets, advantages and old log-probs of the tokens
    backend     the backend that computes it; a fallback to another one raises
    arguments   other arguments of `grpo_loss` or `linear_grpo_loss`
    """
    loss_function: Any = grpo_loss if len(leaves) == 1 else linear_grpo_loss
    with use(backend=backend, strict=True):
        return loss_function(*leaves, batch, Objective.preset("dapo"), **arguments).loss


def make_inputs(step: Step, device: torch.device) -> tuple[list[Tensor], TokenBatch]:
    """Return random inputs of a step, and a batch with old log-probs near the present ones.

    step     sizes, dtype and level
    device   device of the results

    The inputs are [logits] or [hidden states, head].
    """
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    # A thousand random columns, repeated: drawing all of them would take longer than the steps.
    num_columns = 1013
    column_ids = torch.arange(step.vocab, device=device) % num_columns
    if step.hidden is None:
        inputs = [2 * random(step.rows, num_columns)[:, column_ids]]
    else:
        hidden = random(step.rows, step.hidden)
        head = 2 / step.hidden**0.5 * random(num_columns, step.hidden)[column_ids]
        inputs = [hidden, head]
    leaves = [x.to(getattr(torch, step.dtype)).contiguous() for x in inputs]
    targets = torch.randint(0, step.vocab, (step.rows,), generator=generator).to(device)
    advantages = random(step.rows)
    old_logps = plain_logps(leaves, targets) + 0.3 * random(step.rows)
    return leaves, TokenBatch(targets, advantages, old_logps=old_logps)


# ---- plain PyTorch


def plain_logits(leaves: list[Tensor]) -> Tensor:
    """Return logits from [logits] or from [hidden states, head]."""
    return leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].t()


def plain_logps(leaves: list[Tensor], targets: Tensor) -> Tensor:
    """Return the log-probs of targets from [logits] or from [hidden states, head]."""
    logps = torch.log_softmax(plain_logits(leaves).float(), -1)
    return logps.gather(-1, targets[..., None])[..., 0]


def clipped_loss(logps: Tensor, old_logps: Any, advantages: Tensor) -> Tensor:
    """Return the clipped loss of each token, with the bounds of DAPO.

    logps, old_logps, advantages   float, of one shape, which the result has too
    """
    ratio = torch.exp(logps - old_logps)
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)


def plain_loss(leaves: list[Tensor], batch: TokenBatch) -> Tensor:
    """Return the loss of DAPO for a batch without a mask and with one advantage per token."""
    assert batch.advantages is not None
    logps = plain_logps(leaves, batch.targets)
    return clipped_loss(logps, batch.old_logps, batch.advantages).mean()


# ---- time


def time_in_turns(contenders: list[Contender], device: torch.device) -> dict[str, list[float]]:
    """Return the time of each contender in each round, in milliseconds, by name.

    contenders   ways to compute the same, with the same inputs
    device       where they run

    All run once in a round, in the opposite order in every other round, so that a change of the
    machine's speed affects all of them.
    """
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        time_run(contender, device)  # compiles kernels and fills the allocator
    for round_index in range(ROUNDS):
        order = contenders if round_index % 2 == 0 else contenders[::-1]
        for contender in order:
            times[contender.name].append(time_run(contender, device))
    return times


def time_run(contender: Contender, device: torch.device) -> float:
    """Return the time of one run in milliseconds. Restoring its inputs does not count.

    contender   what runs
    device      where it runs. The host waits for it before and after the run.
    """
    synchronize = torch.get_device_module(device).synchronize
    contender.restore()
    synchronize()
    start = time.perf_counter()
    gradients = contender.run()
    synchronize()
    ms = 1e3 * (time.perf_counter() - start)
    del gradients  # frees their memory after the time is taken
    return ms


def quartiles_of_gain(
    first_times: list[float], other_times: list[float]
) -> tuple[float, float, float]:
    """Return (lower quartile, median, upper quartile) of first time / other time over the rounds.

    A stall of the machine in one round does not change them much.

    first_times, other_times   times of two contenders in the same rounds
    """
    gains = [first / other for first, other in zip(first_times, other_times, strict=True)]
    lower, median, upper = statistics.quantiles(gains, n=4, method="inclusive")
    return lower, median, upper
