"""The suites: which cells are measured on a CPU and on a GPU, with which providers, and the loop over them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import results
from benchmarks.cases import CONTRACTS, Cell
from benchmarks.harness import busy_neighbour
from benchmarks.machine import machine
from benchmarks.measure import DeviceLost, measure
from benchmarks.printing import LEGEND, table
from benchmarks.providers import first_line, providers

QWEN, LLAMA, GEMMA = 151936, 128256, 262144  # vocabularies
FP32, BF16 = torch.float32, torch.bfloat16
OURS, EAGER = "grpo_kernels", "eager PyTorch"
FEW = (OURS, EAGER)
#: Providers of sweeps: without those that compile for seconds at each new shape on a CPU, or take many times longer than the
#: others.
SWEEP = (OURS, "grpo_kernels, layer 1 + loss", EAGER, "TRL fused head + loss")
#: The fastest of the other projects' on a CPU.
AT_ANY_COUNT = ("torch.compile", "CCE (torch.compile) + loss", "torch linear_cross_entropy + loss")
PEERS = (
    *SWEEP,
    "Liger fused linear GRPO",
    "CCE, filtered (flat states) + loss",
    "CCE, unfiltered + loss",
    "verl kernel + loss",
)
#: Of a large vocabulary: without the options of torch's function with which a run takes hundreds of times the products.
CROSS_ENTROPIES = (
    OURS,
    "grpo_kernels, layer 1",
    "grpo_kernels, the whole DAPO loss",
    "torch linear_cross_entropy",
    "torch linear_cross_entropy, chunks of 256 rows",
    EAGER,
    "torch.compile",
    "CCE (torch.compile)",
)
LOST_DEVICE = 75  # exit status: run the same command again (EX_TEMPFAIL)


class Planned(NamedTuple):
    cell: Cell
    only: tuple[str, ...] | None = None  # providers that take part beside the limits; None: all


@dataclass(frozen=True)
class Suite:
    name: str
    title: str
    contract: str
    plan: Callable[[str, bool], list[Planned]]  # (device, quick)


def _logits(contract: str) -> Callable[[str, bool], list[Planned]]:
    few = (OURS, "grpo_kernels, in place", "grpo_kernels, new gradient", EAGER, "torch.compile")
    many = [Planned(Cell(contract, 1000, QWEN, dtype, sequences=8), few) for dtype in (FP32, BF16)]

    def plan(device: str, quick: bool) -> list[Planned]:
        if device == "cpu":
            cells = [Planned(Cell(contract, 64 if quick else 256, QWEN, dtype)) for dtype in (FP32, BF16)]
            return cells if quick else cells + many
        shapes = [(4096, QWEN, BF16)] if quick else [(8192, QWEN, BF16), (8192, LLAMA, BF16), (2048, QWEN, FP32)]
        return [Planned(Cell(contract, *shape)) for shape in shapes]

    return plan


def _hidden(device: str, quick: bool) -> list[Planned]:
    if device == "cuda":
        shapes = [(8192, 4096, QWEN), (8192, 4096, LLAMA), (4096, 2304, GEMMA)]
        return [Planned(_head("hidden", n, h, v, BF16)) for n, h, v in (shapes[:1] if quick else shapes)]
    if quick:
        return [Planned(_head("hidden", 64, 256, 32768, dtype)) for dtype in (FP32, BF16)]
    # Row counts that are a whole number of chunks, and some that are not: 700 and 1000 are no multiples of 16. With many rows
    # the slowest contenders would take minutes.
    sequences = {16: 16, 256: 16, 700: 14, 1000: 8}
    return [
        Planned(_head("hidden", n, 1024, QWEN, dtype, sequences=of), None if n <= 256 else (*SWEEP, *AT_ANY_COUNT))
        for n, of in sequences.items()
        for dtype in (FP32, BF16)
    ]


def _cross_entropy(device: str, quick: bool) -> list[Planned]:
    if device == "cuda":
        return [Planned(_head("cross-entropy", 2048 if quick else 8192, 4096, QWEN, BF16))]
    every_option = [Planned(_head("cross-entropy", 64, 256, 32768, dtype)) for dtype in (FP32, BF16)]
    if quick:
        return every_option
    counts = {256: 16, 1000: 8}
    large = [
        Planned(_head("cross-entropy", n, 1024, QWEN, dtype, sequences=of), CROSS_ENTROPIES)
        for n, of in counts.items()
        for dtype in (FP32, BF16)
    ]
    return large + every_option


def _one_head(contract: str) -> Callable[[str, bool], list[Planned]]:
    def plan(device: str, quick: bool) -> list[Planned]:
        if device == "cuda":
            return [Planned(_head(contract, 2048 if quick else 8192, 4096, QWEN, BF16))]
        if quick:
            return [Planned(_head(contract, 64, 512, 32768, FP32), (*SWEEP, "TRL fused head"))]
        return [Planned(_head(contract, 256, 1024, QWEN, dtype)) for dtype in (FP32, BF16)]

    return plan


def _kept(device: str, quick: bool) -> list[Planned]:
    shapes = [(64, 256, 32768)] if quick else [(256, 1024, QWEN), (8192, 1024, QWEN)]
    dtypes = (BF16,) if device == "cuda" else (FP32, BF16)
    few = ("grpo_kernels, into weight_grad", OURS, "pairs in PyTorch, autograd")
    return [
        Planned(_head("kept", n, h, v, dtype), few if n > 256 and device == "cpu" else None)
        for n, h, v in shapes
        for dtype in dtypes
    ]


def _sparse(device: str, quick: bool) -> list[Planned]:
    """Cells by the mean entropy of the rows. Many rows are measured at two entropies, and only with ours: a cell takes minutes."""
    if device == "cuda":
        return [
            Planned(_head("sparse", 8192, 4096, QWEN, BF16, entropy=e)) for e in ((0.6,) if quick else (0.6, 0.3, 2.0, 6.0))
        ]
    if quick:
        return [Planned(_head("sparse", 64, 256, 32768, dtype, entropy=0.6)) for dtype in (FP32, BF16)]
    few = [_head("sparse", 256, 1024, QWEN, dtype, entropy=e) for e in (0.6, 0.3, 2.0, 6.0) for dtype in (FP32, BF16)]
    many_rows = [_head("sparse", 2048, 1024, QWEN, dtype, entropy=e) for e in (0.6, 6.0) for dtype in (FP32, BF16)]
    ours = tuple(p.name for p in providers("sparse") if p.name.startswith(OURS))
    return [*map(Planned, few), *(Planned(cell, ours) for cell in many_rows)]


def _divergence(contract: str) -> Callable[[str, bool], list[Planned]]:
    def plan(device: str, quick: bool) -> list[Planned]:
        if device == "cuda":
            return [Planned(_head(contract, 2048 if quick else 8192, 4096, QWEN, BF16))]
        if quick:
            return [Planned(_head(contract, 64, 256, 32768, FP32))]
        planned = [Planned(_head(contract, 256, 1024, QWEN, dtype)) for dtype in (FP32, BF16)]
        few = (OURS, "TRL chunked divergence + mean")
        more = [Planned(_head(contract, 1000, 1024, QWEN, dtype, sequences=8), few) for dtype in (FP32, BF16)]
        return planned + (more if contract == "divergence" else [])

    return plan


def _rows(device: str, quick: bool) -> list[Planned]:
    if device == "cuda":
        counts = (1024, 4096) if quick else (1024, 4096, 8192, 32768)
        return [Planned(_head("hidden", n, 4096, QWEN, BF16), PEERS) for n in counts]
    counts = (64, 256) if quick else (64, 256, 1024, 4096, 8192)
    return [Planned(_head("hidden", n, 256, 32768, FP32), SWEEP) for n in counts]


def _vocab(device: str, quick: bool) -> list[Planned]:
    sizes = (32768, QWEN) if quick else (32768, 65536, LLAMA, QWEN, GEMMA)
    if device == "cuda":
        return [Planned(_head("hidden", 2048 if quick else 8192, 4096, v, BF16), PEERS) for v in sizes]
    return [Planned(_head("hidden", 32 if quick else 128, 256 if quick else 512, v, FP32), SWEEP) for v in sizes]


def _active(device: str, quick: bool) -> list[Planned]:
    shares = (1.0, 0.25) if quick else (1.0, 0.5, 0.25, 0.75, 0.125)  # those of the targets first
    if device == "cuda":
        return [Planned(_head("hidden", 2048 if quick else 8192, 4096, QWEN, BF16, a), PEERS) for a in shares]
    shape = (64, 512, 32768) if quick else (128, 1024, QWEN)
    return [Planned(_head("hidden", *shape, FP32, a), SWEEP) for a in shares]


def _length(device: str, quick: bool) -> list[Planned]:
    """Cells by the number of tokens in a batch, up to what fits into memory. From 65,536 on they are one sequence."""
    if device == "cuda":
        tokens, shape, dtype = (8192, 65536) if quick else (8192, 65536, 131072, 262144), (1024, QWEN), BF16
    else:
        tokens, shape, dtype = (1024, 2048) if quick else (4096, 16384, 65536), (64, 8192) if quick else (128, 32768), FP32
    return [Planned(_head("hidden", n, *shape, dtype, sequences=16 if n < 65536 else 1), FEW) for n in tokens]


def _step(device: str, quick: bool) -> list[Planned]:
    if device == "cuda":
        cell = Cell("step", 2048 if quick else 8192, QWEN, BF16, hidden=896, layers=4 if quick else 24)
        return [Planned(cell)]
    return [Planned(Cell("step", 64 if quick else 256, 16384 if quick else QWEN, FP32, hidden=128, layers=2))]


def _head(
    contract: str, rows: int, hidden: int, vocab: int, dtype: torch.dtype, active: float = 1.0, sequences: int = 16,
    entropy: float | None = None,
) -> Cell:  # fmt: skip
    return Cell(contract, rows, vocab, dtype, hidden, active, sequences=sequences, entropy=entropy)


SUITES = {
    s.name: s
    for s in (
        Suite("logits", "Loss and gradient from logits", "logits", _logits("logits")),
        Suite("logits-forward", "Log-probs and entropy from logits", "logits-forward", _logits("logits-forward")),
        Suite("hidden", "Loss and gradients from hidden states", "hidden", _hidden),
        Suite("kept", "Loss and gradients over kept sets, from hidden states", "kept", _kept),
        Suite("sparse", "Loss and sparse gradients, by the mean entropy of the rows", "sparse", _sparse),
        Suite("divergence", "Exact KL to a teacher, from hidden states", "divergence", _divergence("divergence")),
        Suite("divergence-forward", "The same, forward", "divergence-forward", _divergence("divergence-forward")),
        Suite("divergence-jsd", "The same, Jensen-Shannon", "divergence-jsd", _divergence("divergence-jsd")),
        Suite("logits-divergence", "Exact KL to a teacher, from logits", "logits-divergence", _logits("logits-divergence")),
        Suite("hidden-frozen", "Loss from hidden states, frozen head", "hidden-frozen", _one_head("hidden-frozen")),
        Suite("hidden-forward", "Log-probs from hidden states", "hidden-forward", _one_head("hidden-forward")),
        Suite("cross-entropy", "Cross-entropy from hidden states", "cross-entropy", _cross_entropy),
        Suite("rows", "From hidden states, by the number of rows", "hidden", _rows),
        Suite("vocab", "From hidden states, by vocabulary", "hidden", _vocab),
        Suite("active", "From hidden states, by the share of sequences with an advantage", "hidden", _active),
        Suite("length", "From hidden states, long batches and sequences: time and memory", "hidden", _length),
        Suite("step", "A training step end to end", "step", _step),
    )
}


@dataclass
class _Record:
    """The result file of a suite, as it grows."""

    suite: Suite
    path: Path
    here: dict[str, Any]
    marks: list[str]  # of the requested cells, in order
    done: dict[str, dict[str, Any]]  # by mark
    lost: list[dict[str, str]]  # providers that broke CUDA

    @staticmethod
    def continued(suite: Suite, path: Path, here: dict[str, Any], marks: list[str], fresh: bool) -> _Record:
        """The record with the results that the file has already, unless they are to be measured again."""
        former = results.load(path)
        done = {cell["fingerprint"]: cell for cell in former.get("cells", []) if cell.get("fingerprint") in marks and not fresh}
        lost = [entry for entry in former.get("lost", []) if entry["setting"] == results.setting(here)]
        return _Record(suite, path, here, marks, done, lost)

    def save(self, *unfinished: dict[str, Any]) -> None:
        cells = [*(self.done[mark] for mark in self.marks if mark in self.done), *unfinished]
        about = {"suite": self.suite.name, "title": self.suite.title, "contract": CONTRACTS[self.suite.contract]}
        lost = {"lost": self.lost} if self.lost else {}
        results.save(self.path, about | _origin(self.here) | {"cells": cells} | lost)


def run(
    suites: list[str], device: str, out: Path, *,
    quick: bool = False, first: bool = False, fresh: bool = False, busy: bool = False, choices: dict[str, Any] | None = None,
) -> tuple[list[Path], list[str]]:  # fmt: skip
    """Measures the cells that the result files under `out` do not hold yet, prints each, and returns the paths, and the cells
    that could not be measured, each with the reason. With `fresh` it measures all of them, with `first` the first of each
    suite, without providers that compile for long; with `busy` beside a process that keeps one core busy. `choices` are the
    settings of our launches, where they are not the package's (see tune.apply). If a provider breaks CUDA for this process,
    that is recorded and the process exits with LOST_DEVICE. The same command then continues without that provider, until the
    code or the machine changes. On a GPU a file is written after each provider."""
    here = machine(device) | ({"neighbour": "one core busy"} if busy else {}) | ({"choices": choices} if choices else {})
    folder = out / here["kind"]
    print(heading(here), flush=True)
    paths, unmeasured = [], []
    for name in suites:
        suite = SUITES[name]
        path = folder / f"{name}.json"
        paths.append(path)
        plan = [_promptly(suite, suite.plan(device, quick)[0])] if first else suite.plan(device, quick)
        fingerprints = [results.fingerprint(*planned, quick, here) for planned in plan]
        record = _Record.continued(suite, path, here, fingerprints, fresh)
        print(f"\n# {suite.title}: {CONTRACTS[suite.contract]}", flush=True)
        for planned, mark in zip(plan, fingerprints, strict=True):
            if mark in record.done:
                print(f"\n{table(record.done[mark])}\n(measured before)", flush=True)
                continue
            known = _known(folder, planned.cell, here)
            effort = _effort(device, quick) | ({"save": record.save} if device == "cuda" else {})
            try:
                with busy_neighbour() if busy else contextlib.nullcontext():
                    cell = measure(planned.cell, device, only=planned.only, known=known, **effort)
            except DeviceLost as failure:
                record.lost.append(_lost(planned.cell, failure, here))
                record.save()
                print(f"\n{failure}: CUDA is unusable in this process. Run the same command again.", file=sys.stderr)
                raise SystemExit(LOST_DEVICE) from failure
            except Exception as failure:  # the other cells are still measured
                unmeasured.append(f"{name}, {planned.cell}: {first_line(failure)}")
                print(f"\n{unmeasured[-1]}", file=sys.stderr, flush=True)
                continue
            record.done[mark] = cell | {"fingerprint": mark} | _origin(here)
            record.save()
            print(f"\n{table(cell)}", flush=True)
    return paths, unmeasured


def _promptly(suite: Suite, planned: Planned) -> Planned:
    """The same without providers that compile for long."""
    names = planned.only or tuple(p.name for p in providers(suite.contract))
    late = {p.name for p in providers(suite.contract) if p.late}
    return Planned(planned.cell, tuple(name for name in names if name not in late))


def heading(here: dict[str, Any]) -> str:
    """A text that says what runs where and how to read the tables."""
    parts = [here["name"], f"{here['threads']} threads", f"torch {here['torch']}"]
    parts += [f"{name} {version}" for name, version in here["versions"].items()]
    parts += [f"backend {here['backend']}", *(here[x] for x in ("instruction set", "neighbour") if x in here)]
    return f"{', '.join(parts)}\n\n{LEGEND}"


def _effort(device: str, quick: bool) -> dict[str, Any]:
    """The effort for a cell: seconds per provider, fewest runs, whether to count."""
    if quick:
        return {"seconds": 0.2, "least": 5, "counters": False}
    return {"seconds": 0.5, "least": 20} if device == "cuda" else {"seconds": 1.0, "least": 5}


def _lost(cell: Cell, failure: DeviceLost, here: dict[str, Any]) -> dict[str, str]:
    return {
        "provider": failure.provider,
        "contract": cell.contract,
        "dtype": str(cell.dtype),
        "reason": failure.reason,
        "setting": results.setting(here),
    }


def _known(folder: Path, cell: Cell, here: dict[str, Any]) -> dict[str, str]:
    """{provider: reason} of those that broke CUDA on this contract and dtype, in any suite."""
    key = (cell.contract, str(cell.dtype), results.setting(here))
    entries = [entry for path in sorted(folder.glob("*.json")) for entry in results.load(path).get("lost", [])]
    return {e["provider"]: e["reason"] for e in entries if (e["contract"], e["dtype"], e["setting"]) == key}


def _origin(here: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": here,
    }
