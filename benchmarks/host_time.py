"""What a loss from logits in place costs the host: torch and this package, without Triton's own launch and without a GPU.

    python -m benchmarks.host_time [--write]

Everything runs as it would for CUDA tensors, on tiny tensors of the CPU, but for the launch of a kernel, which does nothing,
and the checks of values, which a GPU leaves out. `--write` keeps the figures in results/host_time.json."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from benchmarks import results
from benchmarks.harness import RESULTS
from benchmarks.launches import compiling
from benchmarks.machine import machine
from grpo_kernels import Objective, TokenBatch, grpo_loss
from grpo_kernels.rows import backends
from grpo_kernels.rows.backends import triton as backend

PATH = RESULTS / "host_time.json"
CALLS, ROUNDS = 100, 20


def losses() -> dict[str, Callable[[], Any]]:
    """{what: a loss from logits in place}, with all that a batch usually has."""
    targets, logits = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    objective, of_model = Objective.preset("dapo", beta=0.04), logits * 1
    fields: dict[str, Any] = {"old_logps": torch.zeros(4, 8), "ref_logps": torch.zeros(4, 8)}
    masked = TokenBatch(targets, torch.randn(4), mask=targets == 0, **fields)
    whole = TokenBatch(targets, torch.randn(4), **fields)
    return {
        "with a mask": lambda: grpo_loss(of_model, masked, objective, inplace=True),
        "without": lambda: grpo_loss(of_model, whole, objective, inplace=True),
    }


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[list[str]]:
    """Inside, kernels are not launched, but their names appended to the list."""
    launched: list[str] = []

    def launch(self: Any, *_: Any, **__: Any) -> None:
        launched.append(self.__name__)

    ours = [module for name, module in list(sys.modules.items()) if name.startswith("grpo_kernels")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiling("sm_90"))  # for a driver: nothing is compiled
        stack.enter_context(mock.patch.object(JITFunction, "run", launch))
        stack.enter_context(mock.patch.object(backends, "unavailable", lambda name: None))
        stack.enter_context(mock.patch.object(backends, "_made", lambda name, strict: backend.Kernels(strict)))
        for module in ours:
            if hasattr(module, "values_are_checked"):
                stack.enter_context(mock.patch.object(module, "values_are_checked", lambda _: False))
        yield launched


class Operations(TorchDispatchMode):
    """Inside, the names of torch's operations are appended to `names`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        self.names.append(str(operation))
        return operation(*given, **(options or {}))


def operations(call: Callable[[], Any]) -> list[str]:
    """Torch's operations in a call, in order."""
    with Operations() as found:
        call()
    return found.names


def microseconds(call: Callable[[], Any]) -> list[float]:
    """Of one call, in each of ROUNDS."""
    taken = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        taken.append(1e6 * (time.perf_counter() - begin) / CALLS)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"into {PATH.name}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    with as_on_a_gpu():
        for name, call in losses().items():
            microseconds(call)  # what is made once is made
            taken, names = microseconds(call), operations(call)
            found[name] = {
                "least": round(min(taken), 1),
                "median": round(statistics.median(taken), 1),
                "operations": len(names),
            }
            print(f"{name:12} {found[name]['median']} us, at least {found[name]['least']}, {len(names)} operations of torch")
    if args.write:
        command = "python -m benchmarks.host_time --write"
        results.save(PATH, {"command": command, "date": time.strftime("%Y-%m-%d"), "machine": machine("cpu"), "us": found})


if __name__ == "__main__":
    main()
