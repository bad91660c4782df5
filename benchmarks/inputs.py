"""The inputs of a cell and the answer in float64, whatever its contract."""

from __future__ import annotations

from benchmarks import cases, kept_cases
from benchmarks.cases import Cell, Result
from benchmarks.kept_cases import KeptCase

Case = cases.Case | KeptCase


def make_case(cell: Cell, device: str, seed: int = 0) -> Case:
    return (kept_cases.make_kept if cell.contract == "kept" else cases.make_case)(cell, device, seed)


def reference(case: Case) -> Result:
    return kept_cases.kept_reference(case) if isinstance(case, KeptCase) else cases.reference(case)
