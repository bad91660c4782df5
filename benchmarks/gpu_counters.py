"""Measure calls of every public function on a GPU, for benchmarks/gpu_kit.py.

The stage `counters` asks how many kernels the calls compile, where they make the host wait, how
much host time they take, and whether a CUDA graph of them gives the same result. The stage
`memcheck` only runs them.

Add a new public function to CASES, and to CAPTURED if trainers would capture it in a CUDA graph.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from benchmarks.harness import compilations
from benchmarks.results import ROOT
from grpo_kernels import LogitTransform, Objective
from grpo_kernels.formulas.surrogates import Clip

sys.path.insert(0, str(ROOT / "tests"))
from support.call_cases import CallCase, problem
from support.on_device import OnDevice
from support.public_functions import (
    PreparedCall,
    bind_arguments,
    function_and_arguments,
    make_batch,
)

# ---- kernels that have run


def loaded_kernels() -> list[dict]:
    """Return the resources of the package's compiled kernels that this process has launched.

    Each has "kernel" (its name), "registers" and "spills" per thread, "shared" (bytes of shared
    memory of a program) and "warps" of a program. The CUDA driver gives the first two.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("grpo_kernels.")]
    kernels: dict[str, Any] = {}
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                kernels[value.__name__] = value
    loaded = []
    for name, kernel in kernels.items():
        # Triton has a tuple of caches for each device. The first has the compiled kernels.
        for caches in kernel.device_caches.values():
            for compiled in caches[0].values():
                if compiled.module is None:  # compiled, but not launched
                    continue
                loaded.append(
                    {
                        "kernel": name,
                        "registers": compiled.n_regs,
                        "spills": compiled.n_spills,
                        "shared": compiled.metadata.shared,
                        "warps": compiled.metadata.num_warps,
                    }
                )
    return loaded


# ---- calls

# Fields that several of the cases below share.
HEAD = {"source": "hidden"}  # from hidden states, not from logits
ALL = {"mask": "none"}  # no token is masked
LOGPS = {"function": "logprobs"}
DIVERGENCE = {"function": "divergence", "other": "whole"}  # from a teacher's whole vocabulary
EXACT = {**HEAD, "objective": "dapo, exact", "exact": "jsd"}
#: {name: the call of a public function}. Some tokens are masked, unless a case says mask="none".
CASES = {
    "grpo_loss": CallCase(objective="dapo, k3"),
    "grpo_loss, in place": CallCase(objective="dapo, k3", inplace=True),
    "linear_grpo_loss": CallCase(**HEAD, objective="dapo, k3"),
    "linear_grpo_loss, kept sets": CallCase(**HEAD, kept="some"),
    "linear_grpo_loss, wide kept sets": CallCase(**HEAD, kept="long"),
    "linear_grpo_loss, divergence": CallCase(**EXACT, other="whole"),
    "token_logprobs": CallCase(**LOGPS, **ALL),
    "token_logprobs, masked": CallCase(**LOGPS),
    "token_logprobs, masked, several ids": CallCase(**LOGPS, also="at"),
    "linear_logprobs": CallCase(**LOGPS, **ALL, **HEAD),
    "linear_logprobs, masked": CallCase(**LOGPS, **HEAD),
    "linear_logprobs, several ids": CallCase(**LOGPS, **ALL, **HEAD, also="at"),
    "token_divergence": CallCase(**DIVERGENCE, exact="forward"),
    "linear_divergence": CallCase(**DIVERGENCE, **ALL, **HEAD, exact="jsd"),
    "linear_divergence, masked": CallCase(**DIVERGENCE, **HEAD, exact="jsd"),
}
#: The calls that are documented to make the host wait, and why.
WAITS = {
    "linear_logprobs, masked": "rows are picked by the mask",
    "linear_divergence, masked": "rows are picked by the mask",
    "TokenBatch and linear_grpo_loss": (
        "row counts, sent to the host when the batch is made, are needed right after"
    ),
}
#: The calls that a trainer would capture in a CUDA graph.
CAPTURED = (
    *(name for name in CASES if name.startswith(("grpo_loss", "token_logprobs"))), "linear_grpo_loss", "linear_grpo_loss, kept sets",
    "linear_grpo_loss, wide kept sets", "linear_grpo_loss, divergence",
    "linear_divergence",
)  # fmt: skip
#: Runs a call and its backward, and returns the values and the gradients.
Step = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class StepOfCall:
    """A step, and what a test of its CUDA graph needs to know."""

    #: Shares memory with the first argument of the call, so that you can overwrite the argument.
    first_argument: Tensor
    step: Step
    #: Whether a replay must give the same bits. It need not if the call has matmuls, which may run
    #: another kernel during capture.
    is_exact: bool


def calls(
    device: str, rows: int, vocab: int, width: int, dtype: str = "bfloat16"
) -> dict[str, StepOfCall]:
    """Prepare the calls of CASES on a device, run each once, and return them by name.

    The first run compiles the kernels, so that later runs can be timed or captured.

    rows    number of tokens, in four sequences of equal length
    vocab   vocabulary size
    width   hidden size
    """
    size: dict[str, Any] = {
        "lengths": (rows // 4,) * 4,
        "vocab": vocab,
        "width": width,
        "dtype": dtype,
    }
    prepared = {}
    with OnDevice(device):  # the test cases name no device for their tensors
        for name, case in CASES.items():
            call = PreparedCall(replace(case, **size))
            prepared[name] = StepOfCall(
                first_argument=call.leaves[0].detach(),
                step=_step_of(call),
                is_exact=case.source == "logits",
            )
            prepared[name].step()
    return prepared


def _step_of(call: PreparedCall) -> Step:
    """Return a function that runs the call and its backward."""

    def step() -> tuple[Tensor, ...]:
        """Return the detached results of the call, then the gradient of each of its leaves.

        The backward starts from the loss, or, if the call has none, from the sum of all results
        that require a gradient.
        """
        if call.p.case.inplace:
            # The call overwrites its logits, and a leaf must not be overwritten.
            values = call.values(call.leaves[0] * 1)
        else:
            values = call.values()
        if "loss" in values:
            total: Any = values["loss"]
        else:
            total = sum(value.sum() for value in values.values() if value.requires_grad)
        detached_values = [value.detach() for value in values.values()]
        gradients = torch.autograd.grad(total, call.leaves)
        return (*detached_values, *gradients)

    return step


def batches(device: str, rows: int, vocab: int, width: int) -> dict[str, Callable[[], Any]]:
    """Return {name: function}. Two of them make a `TokenBatch`, the third also computes its loss.

    The tensors of the batches are made here, on the device. Sizes: see `calls`.
    """
    size: dict[str, Any] = {"lengths": (rows // 4,) * 4, "vocab": vocab, "width": width}
    with OnDevice(device):
        masked = problem(CallCase(**HEAD, mask="some", **size))
        unmasked = problem(CallCase(**HEAD, mask="none", **size))
        function, (_, objective), keywords = function_and_arguments(masked)

    def batch_and_loss() -> Any:
        """Make a batch with a mask, and compute the loss of the objective, without a backward."""
        tensors = masked.given.values()  # hidden states and weight
        return function(*tensors, make_batch(masked), objective, **keywords)

    return {
        "TokenBatch, masked": lambda: make_batch(masked),
        "TokenBatch": lambda: make_batch(unmasked),
        "TokenBatch and linear_grpo_loss": batch_and_loss,
    }


# ---- recompilation

#: The calls of CASES that `recompilations` repeats.
_REPEATED = ("grpo_loss", "linear_grpo_loss", "linear_grpo_loss, kept sets", "token_logprobs")


class _Schedule(NamedTuple):
    """Numbers that a trainer may change at each step. None of them may be compiled in."""

    eps_low: float
    eps_high: float
    beta: float
    temperature: float


def _random_schedule(rng: random.Random) -> _Schedule:
    """Draw a schedule. beta is never 0, because a loss without a KL term has another kernel."""
    return _Schedule(
        eps_low=rng.random(),
        eps_high=rng.random(),
        beta=rng.random() + 1e-3,
        temperature=rng.choice((1.0, 0.5, rng.random() + 0.1)),
    )


def recompilations(
    device: str, vocab: int, width: int, lengths: int = 30, schedules: int = 10, longest: int = 300
) -> int:
    """Count the kernels and graphs that calls compile when lengths and schedules change.

    One step with the longest sequences comes first and is not counted.

    lengths     number of steps, each with a random sequence length
    schedules   number of random schedules, which the steps use in turn
    longest     the largest sequence length
    """
    rng = random.Random(0)
    random_schedules = [_random_schedule(rng) for _ in range(schedules)]
    with OnDevice(device):
        # The longest sequences come first, because candidate sets of few tokens have too few ids
        # to need every kernel.
        _run_repeated_calls(longest, vocab, width, random_schedules[0])
        with compilations() as count:
            for i in range(lengths):
                length = min(longest, rng.choice((1, 16, rng.randint(2, 300))))
                _run_repeated_calls(length, vocab, width, random_schedules[i % schedules])
            return count()


def _run_repeated_calls(length: int, vocab: int, width: int, schedule: _Schedule) -> None:
    """Run a step of each call of _REPEATED with two sequences of `length` tokens, in bf16.

    vocab, width    vocabulary size and hidden size
    schedule        parameters of the objective, and the temperature
    """
    clip = Clip(schedule.eps_low, schedule.eps_high)
    objective = Objective.preset("dapo", surrogate=clip, beta=schedule.beta)
    transform = LogitTransform(temperature=schedule.temperature)
    for name in _REPEATED:
        case = replace(
            CASES[name], lengths=(length, length), vocab=vocab, width=width, dtype="bfloat16"
        )
        call = PreparedCall(case)
        function, arguments, keywords = function_and_arguments(call.p, objective=objective)
        call.call = bind_arguments(function, arguments, keywords | {"transform": transform})
        _step_of(call)()
    problem.cache_clear()  # the tensors of all these cases would fill the memory


# ---- waits and time of the host


def first_wait(step: Callable[[], Any]) -> str | None:
    """Return the stack where `step` first makes the host wait for CUDA, or None if it never does.

    The stack is one line, innermost call first. PyTorch's sync debug mode reports all waits but
    those for an event, so `torch.cuda.Event.synchronize` is replaced too. Waiting for an event that
    has already happened takes no time and is not reported.
    """

    def wait(event: torch.cuda.Event) -> None:
        """Replace Event.synchronize: raise if the event has not happened yet."""
        if not event.query():
            # PyTorch's own messages contain the word "synchronizing", too.
            raise RuntimeError("a synchronizing event")

    # Work that was started before `step` must not make `step` wait.
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with mock.patch.object(torch.cuda.Event, "synchronize", wait):
            step()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        frames = reversed(traceback.extract_tb(error.__traceback__))
        return " < ".join(f"{Path(x.filename).name}:{x.lineno} {x.line}" for x in frames)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def host_ms(call: Callable[[], Any], runs: int = 30) -> float:
    """Return the median time that the host spends in a call, in milliseconds.

    The device is idle when a run starts. The call may return before the device is done.
    """
    times_ms = []
    for _ in range(runs):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times_ms.append(1e3 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return statistics.median(times_ms)


# ---- CUDA graphs

#: The largest relative difference between a replay and a plain call whose matmuls may run in
#: another kernel. Gradients are bf16.
MOST_DIFFERENCE = 1e-2


def replay_differs(call: StepOfCall) -> str | None:
    """Capture a step in a CUDA graph, and compare a replay for another input with a plain call.

    Return None if they agree, and otherwise what is wrong, in words.
    """
    # The first step on a new stream may create state, such as cuBLAS workspaces, which must not
    # happen during capture.
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        call.step()
    torch.cuda.current_stream().wait_stream(side_stream)

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            outputs = call.step()
    except RuntimeError as error:
        return f"cannot be captured: {str(error).splitlines()[0]}"
    # Capture runs no kernel, so the outputs hold whatever was in their memory.
    outputs_before_replay = [x.clone() for x in outputs]

    with torch.no_grad():
        call.first_argument.copy_(torch.randn_like(call.first_argument))
    graph.replay()
    torch.cuda.synchronize()
    expected = call.step()

    if call.is_exact and not _all_equal(outputs, expected):
        return "a replay gives other bits than a plain call"
    difference = max(
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(outputs, expected, strict=True)
    )
    if not difference <= MOST_DIFFERENCE:  # also true for NaN
        return f"a replay is off by {difference:.1e}"
    if _all_equal(outputs_before_replay, outputs):
        return "the replay wrote nothing"
    return None


def _all_equal(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether each tensor has the same elements as its counterpart."""
    return all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))
