"""The implementations that are measured. Each module of this folder registers those of one project.
A provider states which contracts, devices and dtypes it supports, and makes a callable from a case.
One that cannot take part is listed with the reason.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from benchmarks.cases import Case, Cell, Result, Tensor, policy_loss

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


#: TRL's and Liger's parameter for the divergences from hidden states.
BETAS = {"divergence-forward": 0.0, "divergence": 1.0, "divergence-jsd": 0.5}


class Unavailable(Exception):
    """Why a provider cannot take part."""


@dataclass
class Run:
    call: Callable[[], Any]  # a Result, except for a limit
    restore: Callable[[], None] | None = (
        None  # restores the inputs that `call` overwrites; runs untimed before each call
    )


@dataclass(frozen=True)
class Provider:
    name: str
    contracts: tuple[str, ...]
    make: Callable[[Any], Run]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = DTYPES
    limit: bool = False  # not a contender: the least time that the hardware needs for the contract
    part: str | None = (
        None  # for a limit: one way to compute this part of it; the fastest way counts
    )
    # it computes another contract, as its name says: it is timed for comparison and not checked
    beside: bool = False
    needs_accumulation: bool = False  # it is another one only if the loss is divided
    memory: Callable[[Cell], float] | None = (
        None  # bytes beyond the inputs, for providers that may need more than is free
    )

    @property
    def late(self) -> bool:
        """Whether it compiles for seconds at each new shape; others are checked first."""
        return "torch.compile" in self.name

    def reason_against(self, cell: Cell, device: str, free: float) -> str | None:
        """The reason why it cannot take part in `cell`, if that is known without a run; else
        None.
        """
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if cell.dtype not in self.dtypes:
            return f"does not take {str(cell.dtype).removeprefix('torch.')}"
        need = self.memory(cell) if self.memory else 0
        return (
            f"would need {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free" if need > free else None
        )


_registry: list[Provider] = []


def provider(
    name: str, *contracts: str, **fields: Any
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Registers the decorated function, which takes a case and returns a Run or its callable."""

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def as_run(case: Any) -> Run:
            made = make(case)
            return made if isinstance(made, Run) else Run(made, getattr(case, "restore", None))

        _registry.append(Provider(name, contracts, as_run, **fields))
        return make

    return register


Logps = Callable[
    ..., Any
]  # of the inputs of a case (see Case.inputs): log-probs, or (log-probs, entropy)


def logps_provider(
    name: str, *contracts: str, suffix: str = " + loss", **fields: Any
) -> Callable[[Callable[[Case], Logps]], Any]:
    """Registers log-probs: by themselves for contracts without a loss, and with the loss in torch
    for the others. The decorated function takes a case and returns a function of its inputs.
    """

    def register(make: Callable[[Case], Logps]) -> Callable[[Case], Logps]:
        alone = [c for c in contracts if c == "cross-entropy" or c.endswith("-forward")]
        for label, of in ((name, alone), (name + suffix, [c for c in contracts if c not in alone])):
            provider(label, *of, **fields)(lambda case: with_loss(case, make(case)))
        return make

    return register


def with_loss(case: Case, logps: Logps) -> Callable[[], Result]:
    """The contract of a case by these log-probs."""
    batch, contract = case.batch, case.cell.contract

    def of_targets() -> Tensor:
        found = logps(*case.inputs())
        return (found[0] if isinstance(found, tuple) else found).view(batch.targets.shape)

    def alone() -> Result:
        found = logps(*case.inputs())
        return dict(
            zip(("logps", "entropy"), found if isinstance(found, tuple) else (found,), strict=False)
        )

    if contract.endswith("forward"):
        return torch.no_grad()(alone)
    if contract == "cross-entropy":
        return lambda: case.gradients(-of_targets().mean())
    return lambda: case.gradients(policy_loss(of_targets(), batch, case.cell))


def peer(module: str, package: str) -> ModuleType:
    """A module of another project. Raises Unavailable; `package` is the project's name for pip."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        hint = (
            f"pip install {package}"
            if module.startswith(f"{missing.name}")
            else f"{module} needs {missing.name}"
        )
        raise Unavailable(f"not installed: {hint}") from missing
    except (ImportError, OSError, RuntimeError, AttributeError) as failure:
        raise Unavailable(f"import of {module} fails: {first_line(failure)}") from failure


def first_line(failure: BaseException) -> str:
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0][:160]}" if lines else type(failure).__name__


def providers(contract: str) -> list[Provider]:
    """In the order of the tables:

    ours, PyTorch, the peers, the limits. Every module of this folder is asked.
    """
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    first = ("grpo_kernels", "eager PyTorch", "torch")

    def place(p: Provider) -> tuple[bool, int]:
        return p.limit, next((i for i, x in enumerate(first) if p.name.startswith(x)), len(first))

    return sorted((p for p in _registry if contract in p.contracts), key=place)
