"""The gradient of a head from columns drawn in each row, with three steps of the grid. Each run draws other columns. Our dense
gradient, CCE with its filter and the bare products are those of the contract `hidden`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

from benchmarks.cases import Result
from benchmarks.providers import provider
from benchmarks.providers.ours import native, objective
from benchmarks.sparse_cases import SparseCase
from grpo_kernels import Options, Sparse, linear_grpo_loss

STEPS = (64, 256, 1024)


def _register(fraction: int) -> None:
    @provider(f"grpo_kernels, sparse 1/{fraction}", "sparse", drawn=True)
    def sparse(case: SparseCase) -> Callable[[], Result]:
        spec, backend, seeds = objective(case.cell), native(case), count()

        def run() -> Result:
            options = Options(sparse=Sparse(1 / fraction, next(seeds)), backend=backend)
            return case.gradients(linear_grpo_loss(case.hidden, case.weight, replace(case.batch), spec, options=options).loss)

        return run


for _fraction in STEPS:
    _register(_fraction)
