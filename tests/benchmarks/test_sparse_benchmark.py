"""The suite `sparse`: rows have the requested entropy, and noise is distinguished from a wrong gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")  # of the benchmarks
pytest.importorskip("triton")

from benchmarks import cell_tables
from benchmarks.cases import Cell
from benchmarks.inputs import make_case
from benchmarks.measure import measure
from benchmarks.printing import DRAWN, table
from benchmarks.providers import Provider, Run, providers
from benchmarks.sparse_cases import SparseCase
from support.benchmark_cells import BF16, FP32, QUICKLY, by_name, nothing_compiles, poisoned_memory, tiny  # noqa: F401 - fixtures


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("wanted", [0.3, 6.0])
def test_rows_have_the_entropy_that_was_asked_for(wanted: float, dtype: torch.dtype) -> None:
    case = make_case(Cell("sparse", 128, 2048, dtype, 64, entropy=wanted), "cpu")
    assert isinstance(case, SparseCase)
    p = (case.hidden.double() @ case.weight.double().t()).softmax(-1).detach()
    found = torch.special.entr(p).sum(-1)
    assert case.entropy == pytest.approx(float(found.mean()), rel=1e-2) == pytest.approx(wanted, rel=0.3)
    chosen = p.gather(1, case.batch.targets[:, None]).log().mean()
    assert float(-chosen) == pytest.approx(wanted, rel=0.3)  # targets are drawn from the rows


def test_a_cell_has_an_entropy_where_its_contract_does() -> None:
    for contract, entropy in (("sparse", None), ("hidden", 2.0)):
        with pytest.raises(ValueError, match="nats"):
            Cell(contract, 32, 512, FP32, 64, entropy=entropy)


def changed(change: Any) -> Provider:
    """Our provider at step 1/64 with a changed result."""
    ours = next(p for p in providers("sparse") if p.name.endswith("1/64"))

    def make(case: SparseCase) -> Run:
        run = ours.make(case)
        return Run(lambda: change(run.call()))

    return replace(ours, name="changed", make=make)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found | {"d_hidden": 2 * found["d_hidden"]},
        lambda found: found | {"d_weight": math.nan * found["d_weight"]},
        lambda found: found | {"loss": found["loss"] + 0.01},
    ],
    ids=["factor", "NaN", "loss"],
)
def test_noise_is_shown_and_what_is_no_noise_is_wrong(change: Any) -> None:
    drawn = next(p for p in providers("sparse") if p.name.endswith("1/64"))
    cell = measure(tiny("sparse"), "cpu", candidates=[drawn, changed(change)], **QUICKLY)
    rows = by_name(cell)
    assert rows["changed"]["status"] == "wrong" and "off by" in rows["changed"]["reason"]
    noise = max(x for name, x in rows[drawn.name]["errors"].items() if name in ("d_hidden", "d_weight"))
    assert rows[drawn.name]["status"] == "ok" and 1e-3 < noise < 0.5  # far above rounding
    for text in (table(cell), cell_tables.details(cell)):
        assert DRAWN in text and f"mean entropy {cell['entropy_reached']:.2f} nats" in text
    assert f"noise {noise:.1%}" in table(cell) and f"noise {noise:.1%}" in cell_tables.comparison([cell])


def test_each_run_draws_other_columns() -> None:
    run = next(p for p in providers("sparse") if p.name.endswith("1/64")).make(make_case(tiny("sparse"), "cpu"))
    first, second = run.call(), run.call()
    assert torch.equal(first["loss"], second["loss"]) and not torch.equal(first["d_weight"], second["d_weight"])
