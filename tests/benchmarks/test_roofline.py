"""Limits against figures computed by hand, and the page for a made-up result file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks import kernel_bounds, roofline, sparse_bounds
from benchmarks.cases import CONTRACTS
from benchmarks.kernel_bounds import Chip, bounds
from benchmarks.launches import TARGETS
from benchmarks.printing import marked, render
from benchmarks.roofline import GPUS, SCHEMES, Rates, Shape, against, estimate, given, measured
from benchmarks.sass import PIPES
from grpo_kernels.vocabulary.blocks import BLOCK_BYTES, CHUNK_BYTES

QWEN = Shape(8192, 4096, 151936)


def limit(rates: Rates, contract: str | None, short: str, active: float = 1.0, shape: Shape = QWEN) -> float:
    (scheme,) = (s for s in SCHEMES if (s.contract, s.short) == (contract, short))
    found = rates.ms(scheme, shape, active)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "gpu, unit, product",
    [("h100", 0.743, 10.309), ("h200", 0.5187, 10.309), ("b200", 0.3112, 4.5314)],
)
def test_the_worked_table(gpu: str, unit: float, product: float) -> None:
    """U = 8192 * 151936 * 2 B = 2.49 GB; a product is 2 * 8192 * 4096 * 151936 = 10.2 Tflop."""
    rates = given(gpu, *GPUS[gpu][1:])
    for contract, short, active, expected in (
        ("logits-forward", "1U", 1.0, unit),
        ("logits", "2U", 1.0, 2 * unit),
        ("logits", "3U", 1.0, 3 * unit),
        (None, "4U", 0.2, 4 * unit),
        ("hidden-forward", "1", 0.5, product),
        ("hidden", "3", 0.5, 3 * product),
        ("hidden", "1+2a", 1.0, 3 * product),
        ("hidden", "1+2a", 0.5, 2 * product),
        ("hidden", "1+2a", 0.2, 1.4 * product),
        ("hidden", "1+3a", 1.0, 4 * product),
        ("hidden", "1+3a", 0.2, 1.6 * product),
        ("hidden-frozen", "1+a", 1.0, 2 * product),
        ("hidden-frozen", "1+2a", 1.0, 3 * product),
    ):
        assert limit(rates, contract, short, active) == pytest.approx(expected, rel=1e-3), (contract, short, active)


def test_every_contract_with_a_limit_has_a_scheme() -> None:
    without = {"step", "kept", "sparse", "cross-entropy"}  # the products of the last are those of "hidden"
    without |= {contract for contract in CONTRACTS if "divergence" in contract}  # of two streams of logits or hidden states
    assert {scheme.contract for scheme in SCHEMES} - {None} == set(CONTRACTS) - without


def test_a_processor() -> None:
    """46 GB/s read, 69 GB/s read and written, 0.46 and 0.229 TFLOP/s: the same shape on two cores."""
    rates = Rates("two cores", 46e9, 69e9, {"bfloat16": 0.46e12, "float32": 0.229e12})
    single = Shape(8192, 4096, 151936, "float32", "cpu")
    assert limit(rates, "logits-forward", "1U") == pytest.approx(54, abs=0.2)
    assert limit(rates, "logits-forward", "1U", shape=single) == pytest.approx(108, abs=0.5)
    assert limit(rates, "logits", "2U") == pytest.approx(72, abs=0.5)
    assert limit(rates, "hidden", "3") == pytest.approx(66.5e3, rel=0.01)
    assert limit(rates, "hidden", "3", shape=single) == pytest.approx(134e3, rel=0.01)


def test_without_a_rate_there_is_no_limit() -> None:
    """A data sheet's 16-bit rate says nothing about fp32 products."""
    hidden = next(s for s in SCHEMES if s.contract == "hidden")
    assert given("x", 4.8, 989).ms(hidden, Shape(64, 64, 64, "float32"), 1.0) is None


def test_traffic_and_memory_beside_the_products() -> None:
    chunk = CHUNK_BYTES["cuda"] // (4 * 151936) // 64 * 64
    block = round(BLOCK_BYTES["cuda"] / (2 * 151936 * chunk)) * chunk
    longer = replace(QWEN, rows=20000)
    assert QWEN.plan(1.0) == (chunk, 8192) and QWEN.blocks(1.0) == QWEN.blocks(0.2) == 1
    assert longer.plan(1.0) == (chunk, block) and longer.blocks(1.0) == -(-20000 // block)
    logits, head = 8192 * 151936, 151936 * 4096
    assert QWEN.tiles(1.0) == 14 * logits and QWEN.tiles(0.5) == 11 * logits  # 4 + 4 + 2 a (one write, two reads)
    assert QWEN.sums(0.2) == QWEN.sums(1.0) == 2 * head  # one block: straight into bf16
    assert longer.sums(1.0) == (4 + 8 * (longer.blocks(1.0) - 1) + 6) * head
    memory = QWEN.memory(1.0)
    assert memory["all logits, bfloat16"] == pytest.approx(2.49e9, rel=1e-3)
    assert memory["sum of d_weight"] == longer.memory(1.0)["sum of d_weight"] / 2 == 2 * head
    assert memory["a chunk of logits"] == chunk * 151936 * 4 and memory["a block of their gradients"] == 2 * logits
    assert memory["at most at a time, with all gradients"] == 2 * logits + 2 * head + 2 * 8192 * 4096
    assert longer.held() == (4 * chunk + 2 * block) * 151936


def test_the_estimate_is_the_sum_of_its_parts() -> None:
    parts = estimate(8192, 4096, 151936, 0.75 * 4.8e12, 0.75 * 989e12, 0.5)
    ours = (
        "hidden level: our products (1 + 2a)",
        "hidden level: passes over chunks of logits",
        "hidden level: sums of d_weight",
    )
    assert parts["hidden level: our total"] == pytest.approx(sum(parts[name] for name in ours))
    assert parts["hidden level: three dense products"] == pytest.approx(3 * 10.309 / 0.75, rel=1e-3)
    assert parts["hidden level: our products (1 + 2a)"] == pytest.approx(2 * 10.309 / 0.75, rel=1e-3)
    assert parts["logits level: read and write (2U)"] == pytest.approx(2 * 0.5187 / 0.75, rel=1e-3)


# ---- with result files


def row(name: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "status": "ok", "ms": ms, "p20": ms, "p80": ms, "runs": 9} | more


def cell(contract: str, hidden: int | None, providers: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    shape = {"contract": contract, "rows": 1000, "hidden": hidden, "vocab": 50000, "dtype": "bfloat16", "active": 1.0}
    return shape | {"providers": providers} | more


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """U = 0.1 GB, copied at 400 GB/s in 0.5 ms; a product is 0.1 Tflop, three at 10 TFLOP/s take 30 ms."""
    files = {
        "logits": [
            cell(
                "logits",
                None,
                [
                    row("ours", 1.0, extra_mb=3.0),
                    {"name": "crooked", "status": "wrong", "reason": "d_logits is off"},
                    row("copy", 0.5, limit=True, gbps_2u=400.0, gbps_3u=600.0),
                ],
            )
        ],
        "hidden": [
            cell(
                "hidden",
                1000,
                [
                    row("ours", 25.0, tflops=8.0),
                    row("products, slow", 40.0, limit=True, tflops=5.0),
                    row("products", 20.0, limit=True, tflops=10.0),
                ],
                active=0.5,
            )
        ],
        "step": [cell("step", 1000, [row("ours", 7.0)])],
    }
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    for name, cells in files.items():
        record = {"suite": name, "date": "2031-01-02", "machine": {"name": "Made-up 1", "device": "cuda"}, "cells": cells}
        (folder / f"{name}.json").write_text(json.dumps(record))
    return folder


def test_rates_are_those_of_the_best_limits(machine: Path) -> None:
    rates = measured(roofline.load(machine))
    assert (rates.read, rates.copy, rates.flops) == (4e11, 4e11, {"bfloat16": 1e13})
    assert "Made-up 1" in rates.name and "measured" in rates.name


def test_per_cent_of_each_scheme(machine: Path) -> None:
    records = {record["suite"]: record["cells"][0] for record in roofline.load(machine)}
    rates = measured(roofline.load(machine))
    head, *rows = against(records["logits"], [rates], "cuda")
    assert head[3:] == ["% of 2U = 0.5 ms", "% of 3U = 0.75 ms"]
    assert rows == [["ours", "1", "3", "50", "75"], ["copy (limit)", "0.5", "", "100", "150"]]
    head, *rows = against(records["hidden"], [rates], "cuda")
    assert head[3:] == ["% of 3 = 30 ms", "% of 1+2a = 20 ms", "% of 1+3a = 25 ms"]
    assert rows[0] == ["ours", "25", "", "120", "80", "100"] and rows[2][3:] == ["150", "100", "125"]
    head, *_ = against(records["logits"], [rates, given("half", 0.2, 5)], "cuda")
    assert head[3] == "% of (1) 2U = 0.5 ms" and head[5] == "% of (2) 2U = 1 ms"
    head, *_ = against(records["hidden"] | {"active": 1.0}, [rates], "cuda")
    assert head[3:] == ["% of 3 = 30 ms", "% of 1+3a = 40 ms"]


def test_the_page_says_what_is_estimated_and_what_measured(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roofline.main(["--results", str(machine)])
    text = capsys.readouterr().out
    assert text.startswith("ESTIMATE, not measured: limits of 1,000 x 1,000 x 50,000, bfloat16")
    assert "MEASURED, Made-up 1, 2031-01-02, logits: 1,000 x 50,000" in text and "hidden: 1,000 x 1,000 x 50,000" in text
    assert "crooked" not in text and "step" not in text and "data sheet" not in text
    roofline.main(["--results", str(machine), "--gpu", "h200", "--vocab", "7", "--markdown"])
    text = capsys.readouterr().out
    assert "data sheet, H200 SXM: 4.8 TB/s" in text and "(2) measured, Made-up 1" in text
    assert "8,192 x 4,096 x 7" in text and "**MEASURED" not in text and "| scheme |" in text


def test_a_gpu_without_result_files_is_an_estimate_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roofline, "RESULTS", tmp_path)
    roofline.main(["--gpu", "mi300x"])
    text = capsys.readouterr().out
    assert "MI300X: 5.3 TB/s, 1307 TFLOP/s" in text and "MEASURED" not in text
    with pytest.raises(SystemExit):
        roofline.main(["--bandwidth", "3"])
    with pytest.raises(SystemExit):
        roofline.main(["--results", str(tmp_path)])
    assert "there are no result files" in capsys.readouterr().err


def test_a_gpu_finds_its_result_files(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roofline, "RESULTS", machine.parent)
    roofline.main(["--gpu", "h200"])
    assert "MEASURED, Made-up 1" in capsys.readouterr().out
    roofline.main(["--gpu", "b200"])
    assert "MEASURED" not in capsys.readouterr().out


def test_markdown() -> None:
    assert render([["a", "b"], ["x", "1"]], markdown=True) == "| a | b |\n| --- | ---: |\n| x | 1 |"


# ---- bounds of kernels


def visit(**issued: float) -> dict[str, Any]:
    counted = dict.fromkeys(PIPES, 0.0) | issued
    return {
        "kernel": "k",
        "writes": False,
        "issued": counted,
        "together": 1,
        "loads": 4,
        "registers": 64,
        "spilled": 0,
        "threads": 32,
    }


def test_the_limiting_resource_by_hand() -> None:
    """1000 rows of 1000 logits; a chip of 10 multiprocessors at 1 GHz, 1 TB/s."""
    chip = Chip("a chip", "sm_90", 10, 1.0, 1.0, fp32=64)
    way = {"bytes": 6, "visits": [visit(special=1, fp32=2, memory=0.5, other=2.5, scalar=9), visit(special=3, fp32=4, other=3)]}
    found = bounds(way, chip, 1000, 1000)
    assert found == pytest.approx(
        {
            "issue": 1e6 * 16 / 128 / 1e10 * 1e3,  # AMD's scalar unit works beside
            "special": 1e6 * 4 / 16 / 1e10 * 1e3,
            "fp32": 1e6 * 6 / 64 / 1e10 * 1e3,
            "memory": 6e6 / 0.85e12 * 1e3,
        }
    )
    assert kernel_bounds._cell(found) == "0.01 / **0.03** / 0.01 / 0.01"


def test_the_page_has_the_tables_of_the_files() -> None:
    """`python -m benchmarks.roofline --kernels --write` makes them."""
    text = kernel_bounds.PAGE.read_text()
    assert kernel_bounds.insert(text) == text
    record = json.loads(kernel_bounds.PATH.read_text())
    for version in record.values():
        assert version["targets"].keys() == TARGETS.keys()
    assert all(f"{way} |" in text for way in ("Liger GRPO loss", "TRL kernel + loss", "grpo_kernels, in place"))


def test_both_pages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    roofline.main(["--kernels", "--markdown"])
    assert "| grpo_kernels, in place |" in capsys.readouterr().out
    page = tmp_path / "gpu.md"
    blocks = (marked(name, kernel_bounds.COMMAND) for name in kernel_bounds.tables())
    page.write_text("\n".join(f"{start}\nold\n{end}" for start, end in blocks))
    monkeypatch.setattr(kernel_bounds, "PAGE", page)
    roofline.main(["--kernels", "--write"])
    assert "old" not in page.read_text() and "| Liger GRPO loss |" in page.read_text()


def test_sparse_gradients_by_hand() -> None:
    """1000 rows of 100 columns in 10,000, H = 500: 1 TB/s, 1 TFLOP/s. Each row of the weight is drawn ten times."""
    shape = Shape(1000, 500, 10_000)
    found = sparse_bounds.parts(shape, 100, 1 / 256, 1e12, 1e12)
    expected = [1e10 / 1e12, 1.2e8 / 1e12, 396 * 259e3 / 1e12, 101e3 * 1e3 / 1e12, (1e4 + 1e5 + 2e4) * 1e3 / 1e12]
    assert list(found.values())[:5] == pytest.approx([1e3 * x for x in expected])
    assert found["all of it"] == pytest.approx(1e3 * sum(expected))
    assert found["x three products"] == pytest.approx(sum(expected) / 0.03)
    assert found["dense, all of it"] > 30


def test_the_page_of_sparse_gradients_has_the_estimate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`python -m benchmarks.roofline --sparse --write` makes it."""
    text, page = sparse_bounds.PAGE.read_text(), tmp_path / "page.md"
    roofline.main(["--sparse", "--markdown"])
    assert capsys.readouterr().out.strip() in text
    block = marked("sparse_estimate", sparse_bounds.COMMAND)
    page.write_text("\nold\n".join(block))
    monkeypatch.setattr(sparse_bounds, "PAGE", page)
    roofline.main(["--sparse", "--write"])
    assert "old" not in page.read_text() and page.read_text().count("ESTIMATE") == 3
