"""The inputs of a cell and the reference results in float64, for every contract."""

from __future__ import annotations

from benchmarks import cases, divergence_cases, kept_cases, sparse_cases
from benchmarks.cases import Cell, Result
from benchmarks.divergence_cases import TeacherCase, TwoLogitsCase
from benchmarks.kept_cases import KeptCase

Case = cases.Case | KeptCase | TeacherCase | TwoLogitsCase


def make_case(cell: Cell, device: str, seed: int = 0) -> Case:
    if cell.contract in divergence_cases.EXACT:
        return divergence_cases.make_divergence(cell, device, seed)
    if cell.contract == "sparse":
        return sparse_cases.make_sparse(cell, device, seed)
    return (kept_cases.make_kept if cell.contract == "kept" else cases.make_case)(cell, device, seed)


def reference(case: Case) -> Result:
    if isinstance(case, (TeacherCase, TwoLogitsCase)):
        return divergence_cases.divergence_reference(case)
    return kept_cases.kept_reference(case) if isinstance(case, KeptCase) else cases.reference(case)
