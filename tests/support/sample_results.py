"""Result files with made-up figures, for tests of tables and plots: the real suites, providers and reasons."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks import results
from benchmarks.cases import CONTRACTS, Cell
from benchmarks.measure import describe
from benchmarks.providers import Provider, providers
from benchmarks.suites import SUITES, Planned

MACHINES = {
    "sample-cpu": {"device": "cpu", "name": "Sample CPU", "threads": 2, "instruction set": "avx2"},
    "sample-gpu": {"device": "cuda", "name": "Sample GPU", "threads": 8},
}
OTHER = {"other-cpu": {"device": "cpu", "name": "Other CPU", "threads": 2, "instruction set": "avx512", "products": "amx"}}
LONG = 20_000  # rows above which eager PyTorch does not fit


def write(folder: Path, machines: dict[str, dict] = MACHINES, faster: float = 1.0) -> Path:
    """<machine>/<suite>.json for all suites on these machines. faster: divides all times."""
    for kind, about in machines.items():
        for name, suite in SUITES.items():
            record = {
                "suite": name,
                "title": suite.title,
                "contract": CONTRACTS[suite.contract],
                "command": f"python -m benchmarks --suite {name}",
                "date": "2000-01-01",
                "machine": {"kind": kind, "torch": "2.0", "versions": {"trl": "1.0"}} | about,
                "cells": [_cell(planned, about["device"], faster) for planned in suite.plan(about["device"], False)],
            }
            results.save(folder / kind / f"{name}.json", record)
    return folder


def _cell(planned: Planned, device: str, faster: float) -> dict:
    cell, only = planned
    taking_part = [p for p in providers(cell.contract) if (only is None or p.limit or p.name in only) and not p.part]
    ways = [p for p in providers(cell.contract) if p.part and device in p.devices]
    floor = (
        1e-7
        / faster
        * cell.rows
        * cell.vocab
        * (1 + (cell.hidden or 0) / 100)
        * cell.dtype.itemsize
        * (0.3 + 0.7 * cell.active)
    )
    rows = []
    for i, p in enumerate(taking_part):
        row = {"name": p.name} | ({"limit": True} if p.limit else {})
        rows.append(row)
        reason = p.reason_against(cell, device, float("inf"))
        if p.name == "eager PyTorch" and cell.rows > LONG:
            reason = "would need 80 GB, 60 GB are free"
        if reason is not None:
            row |= {"status": "skipped", "reason": reason}
        elif "16-bit" in p.name and cell.dtype != torch.float32:
            row |= {
                "status": "wrong",
                "reason": "d_logits is off by 2.0e-01, more than 3e-02",
                "errors": {"loss": 1e-3, "d_logits": 0.2},
            }
        elif p.name == "Liger fused linear GRPO" and cell.rows > 4000:
            row |= {"status": "failed", "reason": "RuntimeError: CUDA error: an illegal memory access was encountered"}
        else:
            x = 1.0 + 0.01 * i if p.limit else 1.1 + 0.9 * i
            ms = x * floor
            row |= {"status": "ok", "ms": ms, "p20": 0.97 * ms, "p80": 1.05 * ms, "runs": 5}
            if not p.limit:
                chunk = 4e-6 * min(cell.rows, 512) * cell.vocab
                row["extra_mb"] = chunk if p.name.startswith("grpo_kernels") else 1.2e-5 * cell.rows * cell.vocab
                errors = {"loss": 1e-7, "d_logits": 1e-6 * (i + 1), "d_logits, worst row": 2e-6 * (i + 1)}
                row |= {"errors": errors, "compiles": i % 3, "syncs": None}
            if cell.hidden is None:
                row |= {"gbps_2u": 5e3 / ms, "gbps_3u": 7.5e3 / ms}
            elif cell.contract != "step":
                row |= {"tflops": 1e3 / ms, "flop_convention": "6NHV"}
                row |= {"tflops_dense": 1.5e3 / ms} if cell.active < 1 else {}
    if ways:
        rows.append(_products(ways, floor, cell))
    limits = [{"name": r["name"], "ms": r["ms"]} for r in rows if r.get("limit") and r["status"] == "ok"]
    limit = min(limits, key=lambda r: r["ms"], default=None)
    for row in rows:
        if row["status"] == "ok":
            row["x_limit"] = row["ms"] / limit["ms"] if limit else None
            if cell.contract == "logits":
                row["x_copy"] = row["ms"] / next(r["ms"] for r in rows if r["name"] == "copy")
    return describe(cell) | {"limit": limit, "providers": rows, "seconds": 1.0, "fingerprint": f"{cell}"}


def _products(ways: list[Provider], ms: float, cell: Cell) -> dict:
    """The sum of the first way of each part; the second takes twice as long, and so on."""
    shown = {p.name: 1.0 + [q.name for q in ways if q.part == p.part].index(p.name) for p in ways}
    row = {"name": "products", "limit": True, "status": "ok", "ms": ms, "p20": 0.97 * ms, "p80": 1.05 * ms, "runs": 5}
    row |= {"ways": shown, "of": [name for name, one in shown.items() if one == 1.0]}
    row |= {"tflops": 1e3 / ms, "flop_convention": "6NHV"}
    return row | ({"tflops_dense": 1.5e3 / ms} if cell.active < 1 else {})
