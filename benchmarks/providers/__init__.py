"""The implementations that are measured. Each module of this folder registers those of one project.

A provider states which contracts, devices and dtypes it supports, and makes a callable from a case.
A provider that cannot run is listed with the reason.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from benchmarks.cases import Case, Cell, Result, Tensor, policy_loss

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: On a CPU whose 16-bit matmuls in torch take more than this many times as long as those in fp32,
#: implementations that use them are not run: one run would take minutes.
MAX_MATMUL_SLOWDOWN = 10.0
#: Matmuls of fewer multiplications, rows x hidden size x vocabulary, are run in any case.
SLOW_MATMUL_SIZE = 1e9
#: The parameter `beta` of TRL and Liger for each divergence from hidden states.
BETAS = {"divergence-forward": 0.0, "divergence": 1.0, "divergence-jsd": 0.5}


class Unavailable(Exception):
    """The reason why a provider cannot run."""


@dataclass
class Run:
    """A provider's computation for a case.

    call      the timed function. It returns a Result, except for a limit.
    restore   restores the inputs that `call` overwrites. It runs before each call and is not timed.
    """

    call: Callable[[], Any]
    restore: Callable[[], None] | None = None


@dataclass(frozen=True)
class Provider:
    """An implementation that can be measured.

    name                 its name in the tables
    contracts            the contracts that it computes
    make                 makes its Run from a case
    devices, dtypes      those that it supports
    limit                whether it is not an implementation, but measures the least time that the
                         hardware needs for the contract
    part                 of a limit: the part of the contract that this one computes. The fastest
                         limit of each part counts.
    differs_from_contract   whether it computes something else than the contract, as its name says.
                         It is timed for comparison, and its results are not checked.
    needs_accumulation   whether it differs from other providers only if a step has several
                         micro-batches
    memory               the bytes that it needs for a cell in addition to the inputs. None: few.
    """

    name: str
    contracts: tuple[str, ...]
    make: Callable[[Any], Run]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = DTYPES
    limit: bool = False
    part: str | None = None
    differs_from_contract: bool = False
    needs_accumulation: bool = False
    memory: Callable[[Cell], float] | None = None

    @property
    def late(self) -> bool:
        """Return whether it compiles for seconds at each new shape. It is then checked last."""
        return "torch.compile" in self.name

    def reason_against(self, cell: Cell, device: str, free: float) -> str | None:
        """Return why it cannot run for a cell, or None if nothing is known against it.

        free   free bytes of memory
        """
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        dtype = str(cell.dtype).removeprefix("torch.")
        if cell.dtype not in self.dtypes:
            return f"does not take {dtype}"
        if device == "cpu" and self._uses_torch_matmuls(cell):
            slowdown = matmul_slowdown(cell.dtype)
            if slowdown > MAX_MATMUL_SLOWDOWN:
                return (
                    f"torch's {dtype} matmuls take {slowdown:.0f} times as long as fp32 ones here"
                )
        needed = self.memory(cell) if self.memory else 0
        if needed > free:
            return f"would need {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
        return None

    def _uses_torch_matmuls(self, cell: Cell) -> bool:
        """Return whether torch computes large matmuls with the whole head, in the cell's dtype.

        This package, and the limits of its matmuls, compute them in another dtype where that is
        faster. A loss over candidate sets need not multiply with the whole head.
        """
        is_ours = self.name.startswith("grpo_kernels") or ", ours" in self.name
        if is_ours or cell.hidden is None or cell.contract == "kept":
            return False
        return cell.rows * cell.hidden * cell.vocab > SLOW_MATMUL_SIZE


@functools.cache
def matmul_slowdown(dtype: torch.dtype) -> float:
    """Return how many times as long as in fp32 a matmul in `dtype` takes in torch on this CPU.

    It is measured on the gradient of hidden states, grad_logits [64, V] @ weight [V, 256] with V =
    4,096: on a CPU without instructions for bf16, this one is the slowest of the three matmuls of a
    head.
    """
    seconds = {}
    for operand_dtype in (torch.float32, dtype):
        grad_logits = torch.ones(64, 4096, dtype=operand_dtype)
        weight = torch.ones(4096, 256, dtype=operand_dtype)
        runs = []
        for _ in range(3):
            start = time.perf_counter()
            torch.mm(grad_logits, weight)
            runs.append(time.perf_counter() - start)
        seconds[operand_dtype] = min(runs)
    return seconds[dtype] / seconds[torch.float32]


_registry: list[Provider] = []


def provider(
    name: str, *contracts: str, **fields: Any
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Return a decorator that registers a provider.

    The decorated function takes a case and returns a Run, or the function that is timed.

    fields   further fields of Provider
    """

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Register the decorated function, and return it unchanged."""

        def make_run(case: Any) -> Run:
            """Return the Run of a case. Its default `restore` is that of the case."""
            run_or_function = make(case)
            if isinstance(run_or_function, Run):
                return run_or_function
            return Run(call=run_or_function, restore=getattr(case, "restore", None))

        _registry.append(Provider(name, contracts, make_run, **fields))
        return make

    return register


#: A function of the inputs of a case (see Case.inputs). It returns log-probs, or the tuple
#: (log-probs, entropy).
Logps = Callable[..., Any]


def logps_provider(
    name: str, *contracts: str, suffix: str = " + loss", **fields: Any
) -> Callable[[Callable[[Case], Logps]], Any]:
    """Return a decorator that registers an implementation of log-probs.

    The decorated function takes a case and returns a function of its inputs. For contracts with a
    policy loss, the loss is computed from the log-probs in PyTorch, and `suffix` is added to the
    name.
    """

    def register(make: Callable[[Case], Logps]) -> Callable[[Case], Logps]:
        """Register the decorated function for all contracts, and return it unchanged."""

        def make_call(case: Case) -> Callable[[], Result]:
            return with_loss(case, make(case))

        without_loss = [
            contract
            for contract in contracts
            if contract == "cross-entropy" or contract.endswith("-forward")
        ]
        with_policy_loss = [contract for contract in contracts if contract not in without_loss]
        provider(name, *without_loss, **fields)(make_call)
        provider(name + suffix, *with_policy_loss, **fields)(make_call)
        return make

    return register


def with_loss(case: Case, logps: Logps) -> Callable[[], Result]:
    """Return a function that computes the contract of a case from log-probs.

    case    the inputs, and the contract: log-probs alone, the cross-entropy, or a policy loss
    logps   takes the inputs of the case, and returns log-probs or (log-probs, entropy)

    The returned function takes no arguments. It returns the loss and its gradients, or for
    contracts without a gradient the log-probs.
    """
    batch = case.batch
    contract = case.cell.contract

    def target_logps() -> Tensor:
        """Return the log-probs in the shape of the targets, [N] or [B, T]."""
        outputs = logps(*case.inputs())
        if isinstance(outputs, tuple):
            outputs = outputs[0]  # without the entropy
        return outputs.view(batch.targets.shape)

    def forward_results() -> Result:
        """Return log-probs [N], and the entropy [N] if the implementation computes it."""
        outputs = logps(*case.inputs())
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        return dict(zip(("logps", "entropy"), outputs, strict=False))  # the entropy may be missing

    if contract.endswith("forward"):
        return torch.no_grad()(forward_results)
    if contract == "cross-entropy":
        return lambda: case.gradients(-target_logps().mean())
    return lambda: case.gradients(policy_loss(target_logps(), batch, case.cell))


def peer(module: str, package: str) -> ModuleType:
    """Import and return a module of another project.

    module    full name, such as "cut_cross_entropy"
    package   the name of the project for pip, such as "cut-cross-entropy"

    Raises Unavailable if the import fails. It names what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        # `missing.name` is the module itself or a parent of it, or a module that it imports.
        if module.startswith(f"{missing.name}"):
            hint = f"pip install {package}"
        else:
            hint = f"{module} needs {missing.name}"
        raise Unavailable(f"not installed: {hint}") from missing
    except (ImportError, OSError, RuntimeError, AttributeError) as failure:
        raise Unavailable(f"import of {module} fails: {first_line(failure)}") from failure


def first_line(failure: BaseException) -> str:
    """Return the type of an exception and the first 160 characters of its message."""
    lines = str(failure).strip().splitlines()
    name = type(failure).__name__
    return f"{name}: {lines[0][:160]}" if lines else name


def providers(contract: str) -> list[Provider]:
    """Return the providers of a contract, after importing every module of this folder.

    They come in the order of the tables: ours, PyTorch, other projects, limits.
    """
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    first_names = ("grpo_kernels", "eager PyTorch", "torch")

    def order(candidate: Provider) -> tuple[bool, int]:
        """Return the sort key: limits come last, then the index in `first_names` counts."""
        for i, name in enumerate(first_names):
            if candidate.name.startswith(name):
                return candidate.limit, i
        return candidate.limit, len(first_names)

    return sorted((p for p in _registry if contract in p.contracts), key=order)
