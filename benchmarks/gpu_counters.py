"""The measurements of the stages `counters` and `memcheck` of the GPU kit. For calls of every
public function, which are cases of the tests: what they compile, where they make the host wait,
how much host time they take, and whether a CUDA graph of them gives the same result.

A new entry point of the package registers in CASES, and in CAPTURED if it is to be captured.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
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
    """Registers, spills and shared memory of the package's kernels that this process has launched,
    as the driver reports them.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("grpo_kernels.")]
    kernels = {
        x.__name__: x
        for module in modules
        for x in vars(module).values()
        if isinstance(x, JITFunction)
    }
    return [
        {
            "kernel": name, "registers": compiled.n_regs, "spills": compiled.n_spills, "shared": compiled.metadata.shared,
            "warps": compiled.metadata.num_warps,
        }
        for name, kernel in kernels.items() for caches in kernel.device_caches.values()
        for compiled in caches[0].values() if compiled.module is not None
    ]  # fmt: skip


# ---- calls

HEAD, ALL = {"source": "hidden"}, {"mask": "none"}
LOGPS, DIVERGENCE = {"function": "logprobs"}, {"function": "divergence", "other": "whole"}
EXACT = {**HEAD, "objective": "dapo, exact", "exact": "jsd"}
#: {entry point: a call of it}. Where nothing else is said some tokens are masked.
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
#: Those that are documented to make the host wait, and why.
WAITS = {
    "linear_logprobs, masked": "rows are picked by the mask",
    "linear_divergence, masked": "rows are picked by the mask",
    "TokenBatch and linear_grpo_loss": (
        "row counts, sent to the host when the batch is made, are needed right after"
    ),
}
#: Those that a trainer would capture in a CUDA graph.
CAPTURED = (
    *(name for name in CASES if name.startswith(("grpo_loss", "token_logprobs"))), "linear_grpo_loss", "linear_grpo_loss, kept sets",
    "linear_grpo_loss, wide kept sets", "linear_grpo_loss, divergence",
    "linear_divergence",
)  # fmt: skip
#: A call with its backward: values and gradients.
Step = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Made:
    """A call whose tensors are made. given: the one that is overwritten before a replay. exact:
    whether a replay gives the same bits; products may run another kernel while they are captured.
    """

    given: Tensor
    step: Step
    exact: bool


def calls(
    device: str, rows: int, vocab: int, width: int, dtype: str = "bfloat16"
) -> dict[str, Made]:
    """The calls of CASES over four sequences of equal length; each has been made once."""
    found = {}
    with OnDevice(device):
        for name, case in CASES.items():
            size = {"lengths": (rows // 4,) * 4, "vocab": vocab, "width": width, "dtype": dtype}
            call = PreparedCall(replace(case, **size))
            found[name] = Made(call.leaves[0].detach(), stepped(call), case.source == "logits")
            found[name].step()
    return found


def stepped(call: PreparedCall) -> Step:
    def step() -> tuple[Tensor, ...]:
        values = call.values(*([call.leaves[0] * 1] if call.p.case.inplace else ()))
        total = (
            values["loss"]
            if "loss" in values
            else sum(x.sum() for x in values.values() if x.requires_grad)
        )
        return *(x.detach() for x in values.values()), *torch.autograd.grad(total, call.leaves)

    return step


def batches(device: str, rows: int, vocab: int, width: int) -> dict[str, Callable[[], Any]]:
    """A batch that is made, alone and in a call."""
    with OnDevice(device):
        masked, whole = (
            problem(CallCase(**HEAD, mask=mask, lengths=(rows // 4,) * 4, vocab=vocab, width=width))
            for mask in ("some", "none")
        )
        function, (_, objective), given = function_and_arguments(masked)
    return {
        "TokenBatch, masked": lambda: make_batch(masked), "TokenBatch": lambda: make_batch(whole),
        "TokenBatch and linear_grpo_loss": lambda: function(*masked.given.values(), make_batch(masked), objective, **given),
    }  # fmt: skip


def recompilations(
    device: str, vocab: int, width: int, lengths: int = 30, schedules: int = 10, longest: int = 300
) -> int:
    """Counts the kernels and graphs that random lengths and schedules compile, after one call of
    each entry point.
    """
    draw = random.Random(0)
    entries = [
        CASES[name]
        for name in (
            "grpo_loss",
            "linear_grpo_loss",
            "linear_grpo_loss, kept sets",
            "token_logprobs",
        )
    ]

    def step(length: int, low: float, high: float, beta: float, temperature: float) -> None:
        objective = Objective.preset("dapo", surrogate=Clip(low, high), beta=beta)
        for case in entries:
            call = PreparedCall(
                replace(case, lengths=(length, length), vocab=vocab, width=width, dtype="bfloat16")
            )
            function, after, given = function_and_arguments(call.p, objective=objective)
            call.call = bind_arguments(
                function, after, given | {"transform": LogitTransform(temperature=temperature)}
            )
            stepped(call)()
        problem.cache_clear()

    kinds = [
        (
            draw.random(),
            draw.random(),
            draw.random() + 1e-3,
            draw.choice((1.0, 0.5, draw.random() + 0.1)),
        )
        for _ in range(schedules)
    ]
    with OnDevice(device):
        step(longest, *kinds[0])  # every kernel: sets of few rows have ids of few slots
        with compilations() as count:
            for i in range(lengths):
                step(
                    min(longest, draw.choice((1, 16, draw.randint(2, 300)))), *kinds[i % schedules]
                )
            return count()


# ---- waits and time of the host


def first_wait(step: Callable[[], Any]) -> str | None:
    """Where `step` first makes the host wait for CUDA; None if nowhere. The debug mode of torch
    does not report waits for an event, so these are counted here, except for events that are over.
    Everything before `step` is over.
    """

    def wait(event: torch.cuda.Event) -> None:
        if not event.query():
            raise RuntimeError("a synchronizing event")

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with mock.patch.object(torch.cuda.Event, "synchronize", wait):
            step()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return " < ".join(
            f"{Path(f.filename).name}:{f.lineno} {f.line}"
            for f in reversed(traceback.extract_tb(error.__traceback__))
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def host_ms(call: Callable[[], Any], runs: int = 30) -> float:
    """The median host time of a call, whose work the device does later.

    The device is idle when a run starts.
    """
    taken = []
    for _ in range(runs):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return statistics.median(taken)


# ---- CUDA graphs

#: The largest difference of a replay from a plain call, if products run another kernel: gradients
#: are bf16.
REPLAYED = 1e-2


def replay_differs(what: Made) -> str | None:
    """Captures a step, replays it on another input and compares with a plain call; None, or what is
    wrong, in words.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a first call, so that nothing created at first use is captured
        what.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            captured = what.step()
    except RuntimeError as refused:
        return f"cannot be captured: {str(refused).splitlines()[0]}"
    before = [x.clone() for x in captured]
    with torch.no_grad():
        what.given.copy_(torch.randn_like(what.given))
    graph.replay()
    torch.cuda.synchronize()
    plain = what.step()
    if what.exact and not all(torch.equal(a, b) for a, b in zip(captured, plain, strict=True)):
        return "a replay gives other bits than a plain call"
    off = max(
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(captured, plain, strict=True)
    )
    if not off <= REPLAYED:
        return f"a replay is off by {off:.1e}"
    if all(torch.equal(a, b) for a, b in zip(before, captured, strict=True)):
        return "the replay wrote nothing"
    return None
