"""Who is measured. Each module registers what one project offers; a provider states which contracts, devices and dtypes
it supports, and turns a case into something to run. One that cannot take part says why, and shows up with that reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from benchmarks.cases import Cell

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Unavailable(Exception):
    """Why a provider cannot take part."""


@dataclass
class Run:
    call: Callable[[], Any]  # a Result, but for a limit
    restore: Callable[[], None] | None = None  # brings back what `call` overwrites; untimed, before each call


@dataclass(frozen=True)
class Provider:
    name: str
    contracts: tuple[str, ...]
    make: Callable[[Any], Run]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = DTYPES
    limit: bool = False  # not a contender: what the hardware needs for the least that the contract asks for
    memory: Callable[[Cell], float] | None = None  # bytes beyond the inputs, where that may be more than there is

    def reason_against(self, cell: Cell, device: str, free: float) -> str | None:
        """Why it does not take part in `cell`, as far as that can be told without trying."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if cell.dtype not in self.dtypes:
            return f"does not take {str(cell.dtype).removeprefix('torch.')}"
        need = self.memory(cell) if self.memory else 0
        return f"would need {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free" if need > free else None


_registry: list[Provider] = []


def provider(name: str, *contracts: str, **fields: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Registers the decorated function, which takes a case and returns a Run, or just what a Run calls."""

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def as_run(case: Any) -> Run:
            made = make(case)
            return made if isinstance(made, Run) else Run(made, getattr(case, "restore", None))

        _registry.append(Provider(name, contracts, as_run, **fields))
        return make

    return register


def peer(module: str, package: str) -> ModuleType:
    """A module of another project, or Unavailable: `package` is what pip calls it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        hint = f"pip install {package}" if module.startswith(f"{missing.name}") else f"{module} needs {missing.name}"
        raise Unavailable(f"not installed: {hint}") from missing
    except (ImportError, OSError, RuntimeError, AttributeError) as failure:
        raise Unavailable(f"import of {module} fails: {first_line(failure)}") from failure


def first_line(failure: BaseException) -> str:
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0][:160]}" if lines else type(failure).__name__


def providers(contract: str) -> list[Provider]:
    """In the order of the tables: ours, PyTorch, the peers, the limits."""
    for name in ("ours", "pytorch", "trl", "liger", "cce", "verl", "quack", "limits"):
        importlib.import_module(f"{__name__}.{name}")
    return [p for p in _registry if contract in p.contracts]
