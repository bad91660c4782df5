"""The suites: which cells are measured on a CPU and on a GPU, with which providers, and the loop over them."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import results
from benchmarks.cases import CONTRACTS, Cell
from benchmarks.machine import machine
from benchmarks.measure import DeviceLost, measure
from benchmarks.providers import first_line, providers
from benchmarks.tables import EAGER, LEGEND, details

QWEN, LLAMA, GEMMA = 151936, 128256, 262144  # vocabularies
FP32, BF16 = torch.float32, torch.bfloat16
OURS = "grpo_kernels"
LOST_DEVICE = 75  # exit status: run the same command again (EX_TEMPFAIL)

#: Providers of sweeps: without those that compile for seconds at each new shape on a CPU, or take many times longer than the
#: others.
SWEEP = (OURS, "grpo_kernels, layer 1 + loss", EAGER, "TRL fused head + loss")
#: With the fastest of the other projects' on a CPU, and on a GPU.
MANY_ROWS = (*SWEEP, "torch.compile", "CCE (torch.compile) + loss", "torch linear_cross_entropy + loss")
PEERS = (
    *SWEEP,
    "Liger fused linear GRPO",
    "CCE, filtered (flat states) + loss",
    "CCE, unfiltered + loss",
    "verl kernel + loss",
)
#: Of a large vocabulary: without the options of torch's function with which a run takes hundreds of times the products.
CROSS_ENTROPIES = (
    OURS, "grpo_kernels, layer 1", "grpo_kernels, the whole DAPO loss", "torch linear_cross_entropy",
    "torch linear_cross_entropy, chunks of 256 rows", EAGER, "torch.compile", "CCE (torch.compile)",
)  # fmt: skip
FROM_LOGITS = (OURS, "grpo_kernels, in place", "grpo_kernels, new gradient", EAGER, "torch.compile")


class Planned(NamedTuple):
    cell: Cell
    only: tuple[str, ...] | None = None  # providers that take part beside the limits; None: all


Plan = list[Planned]
Shape = tuple[int, int | None, int]  # rows, hidden size, vocabulary


@dataclass(frozen=True)
class Suite:
    name: str
    title: str
    contract: str
    cells: dict[str, Plan]  # by "cpu", "cpu quick", "cuda", "cuda quick"

    def plan(self, device: str, quick: bool) -> Plan:
        return self.cells[device + " quick" * quick]


def plan(
    contract: str, *shapes: Shape, dtypes: tuple[torch.dtype, ...] = (FP32, BF16), only: tuple[str, ...] | None = None, **more: Any
) -> Plan:  # fmt: skip
    """A cell for each shape and dtype. Its sequences are as many as divide the rows, and one from 65,536 rows on."""
    cells = []
    for (n, h, v), dtype in ((shape, dtype) for shape in shapes for dtype in dtypes):
        sequences = 1 if n >= 65536 and h else next(count for count in (16, 14, 8) if n % count == 0)
        cells.append(Planned(Cell(contract, n, v, dtype, h, **{"sequences": sequences, **more}), only))
    return cells


def _logits(contract: str, *many: Shape) -> dict[str, Plan]:
    def of(*shapes: Shape, **more: Any) -> Plan:
        return plan(contract, *shapes, **more)

    return {
        "cpu": of((256, None, QWEN)) + of((1000, None, QWEN), *many, only=FROM_LOGITS),
        "cpu quick": of((64, None, QWEN)),
        "cuda": of((8192, None, QWEN), (8192, None, LLAMA), dtypes=(BF16,)) + of((2048, None, QWEN), dtypes=(FP32,)),
        "cuda quick": of((4096, None, QWEN), dtypes=(BF16,)),
    }


def _head(
    contract: str, cpu: Plan, quick: Plan, cuda: tuple[Shape, ...] = ((8192, 4096, QWEN),), few: Shape = (2048, 4096, QWEN)
) -> dict[str, Plan]:
    """Of one contract from hidden states; on a GPU in bf16."""
    on_gpu = {"cuda": plan(contract, *cuda, dtypes=(BF16,)), "cuda quick": plan(contract, few, dtypes=(BF16,))}
    return {"cpu": cpu, "cpu quick": quick} | on_gpu


def _divergence(contract: str, *many: Shape) -> dict[str, Plan]:
    few = (OURS, "TRL chunked divergence + mean")
    cpu = plan(contract, (256, 1024, QWEN)) + plan(contract, *many, only=few)
    return _head(contract, cpu, plan(contract, (64, 256, 32768), dtypes=(FP32,)))


def _one_head(contract: str) -> dict[str, Plan]:
    quick = plan(contract, (64, 512, 32768), dtypes=(FP32,), only=(*SWEEP, "TRL fused head"))
    return _head(contract, plan(contract, (256, 1024, QWEN)), quick)


def _swept(cpu: Plan, quick: Plan, cuda: Plan, cuda_quick: Plan) -> dict[str, Plan]:
    """Cells from hidden states: with few providers, in fp32 on a CPU and in bf16 on a GPU."""
    return {"cpu": cpu, "cpu quick": quick, "cuda": cuda, "cuda quick": cuda_quick}


def _on_cpu(*shapes: Shape, only: tuple[str, ...] = SWEEP, **more: Any) -> Plan:
    return plan("hidden", *shapes, dtypes=(FP32,), only=only, **more)


def _on_gpu(*shapes: Shape, only: tuple[str, ...] = PEERS, **more: Any) -> Plan:
    return plan("hidden", *shapes, dtypes=(BF16,), only=only, **more)


def _sparse() -> dict[str, Plan]:
    """Cells by the mean entropy of the rows. Many rows are measured at two entropies, and only with ours: a cell takes
    minutes."""
    ours = (OURS, *(f"grpo_kernels, sparse 1/{fraction}" for fraction in (64, 256, 1024)))

    def of(shape: Shape, *entropies: float, **more: Any) -> Plan:
        return [one for entropy in entropies for one in plan("sparse", shape, entropy=entropy, **more)]

    large = (8192, 4096, QWEN)
    return {
        "cpu": of((256, 1024, QWEN), 0.6, 0.3, 2.0, 6.0) + of((2048, 1024, QWEN), 0.6, 6.0, only=ours),
        "cpu quick": of((64, 256, 32768), 0.6),
        "cuda": of(large, 0.6, 0.3, 2.0, 6.0, dtypes=(BF16,)),
        "cuda quick": of(large, 0.6, dtypes=(BF16,)),
    }


FEW = (OURS, EAGER)
KEPT = ("grpo_kernels, into weight_grad", OURS, "pairs in PyTorch, autograd")
SHARES = (1.0, 0.5, 0.25, 0.75, 0.125)  # with an advantage; those of the targets first
_small, _large = (64, 256, 32768), (8192, 4096, QWEN)
_options = plan("cross-entropy", _small)
SUITES = {
    s.name: s
    for s in (
        Suite("logits", "Loss and gradient from logits", "logits", _logits("logits", (4096, None, QWEN))),
        Suite("logits-forward", "Log-probs and entropy from logits", "logits-forward", _logits("logits-forward")),
        Suite(
            "hidden", "Loss and gradients from hidden states", "hidden",
            _head(
                "hidden",
                # Row counts that are a whole number of chunks, and some that are not: 700 and 1000 are no multiples of 16.
                plan("hidden", (16, 1024, QWEN), (256, 1024, QWEN))
                + plan("hidden", (700, 1024, QWEN), (1000, 1024, QWEN), (4096, 1024, QWEN), only=MANY_ROWS),
                plan("hidden", _small), (_large, (8192, 4096, LLAMA), (4096, 2304, GEMMA)), _large,
            ),
        ),
        Suite(
            "kept", "Loss and gradients over kept sets, from hidden states", "kept",
            _head(
                "kept", plan("kept", (256, 1024, QWEN)) + plan("kept", (8192, 1024, QWEN), only=KEPT), plan("kept", _small),
                ((256, 1024, QWEN), (8192, 1024, QWEN)), _small,
            ),
        ),
        Suite("sparse", "Loss and sparse gradients, by the mean entropy of the rows", "sparse", _sparse()),
        Suite("divergence", "Exact KL to a teacher, from hidden states", "divergence", _divergence("divergence", (1000, 1024, QWEN))),
        Suite("divergence-forward", "The same, forward", "divergence-forward", _divergence("divergence-forward")),
        Suite("divergence-jsd", "The same, Jensen-Shannon", "divergence-jsd", _divergence("divergence-jsd")),
        Suite("logits-divergence", "Exact KL to a teacher, from logits", "logits-divergence", _logits("logits-divergence")),
        Suite("hidden-frozen", "Loss from hidden states, frozen head", "hidden-frozen", _one_head("hidden-frozen")),
        Suite("hidden-forward", "Log-probs from hidden states", "hidden-forward", _one_head("hidden-forward")),
        Suite(
            "cross-entropy", "Cross-entropy from hidden states", "cross-entropy",
            _head(
                "cross-entropy",
                plan("cross-entropy", (256, 1024, QWEN), (1000, 1024, QWEN), only=CROSS_ENTROPIES) + _options, _options,
            ),
        ),
        Suite(
            "rows", "From hidden states, by the number of rows", "hidden",
            _swept(
                _on_cpu(*((n, 256, 32768) for n in (64, 256, 1024, 4096, 8192))), _on_cpu(*((n, 256, 32768) for n in (64, 256))),
                _on_gpu(*((n, 4096, QWEN) for n in (1024, 4096, 8192, 32768))), _on_gpu(*((n, 4096, QWEN) for n in (1024, 4096))),
            ),
        ),
        Suite(
            "vocab", "From hidden states, by vocabulary", "hidden",
            _swept(
                _on_cpu(*((128, 512, v) for v in (32768, 65536, LLAMA, QWEN, GEMMA))), _on_cpu((32, 256, 32768), (32, 256, QWEN)),
                _on_gpu(*((8192, 4096, v) for v in (32768, 65536, LLAMA, QWEN, GEMMA))), _on_gpu((2048, 4096, 32768), (2048, 4096, QWEN)),
            ),
        ),
        Suite(
            "active", "From hidden states, by the share of sequences with an advantage", "hidden",
            _swept(
                [x for a in SHARES for x in _on_cpu((128, 1024, QWEN), active=a)],
                [x for a in (1.0, 0.25) for x in _on_cpu((64, 512, 32768), active=a)],
                [x for a in SHARES for x in _on_gpu(_large, active=a)],
                [x for a in (1.0, 0.25) for x in _on_gpu((2048, 4096, QWEN), active=a)],
            ),
        ),
        Suite(
            "length", "From hidden states, long batches and sequences: time and memory", "hidden",
            _swept(
                _on_cpu(*((n, 128, 32768) for n in (4096, 16384, 65536)), only=FEW), _on_cpu((1024, 64, 8192), (2048, 64, 8192), only=FEW),
                _on_gpu(*((n, 1024, QWEN) for n in (8192, 65536, 131072, 262144)), only=FEW),
                _on_gpu((8192, 1024, QWEN), (65536, 1024, QWEN), only=FEW),
            ),
        ),
        Suite(
            "step", "A training step end to end", "step",
            _swept(
                plan("step", (256, 128, QWEN), dtypes=(FP32,), layers=2), plan("step", (64, 128, 16384), dtypes=(FP32,), layers=2),
                plan("step", (8192, 896, QWEN), dtypes=(BF16,), layers=24), plan("step", (2048, 896, QWEN), dtypes=(BF16,), layers=4),
            ),
        ),
    )
}  # fmt: skip


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
    quick: bool = False, first: bool = False, fresh: bool = False, choices: dict[str, Any] | None = None,
) -> tuple[list[Path], list[str]]:  # fmt: skip
    """Measures the cells that the result files under `out` do not hold yet, prints each, and returns the paths, and the cells
    that could not be measured, each with the reason. With `fresh` it measures all of them, with `first` the first of each
    suite, without providers that compile for long. `choices` are the settings of our launches, where they are not the package's
    (see tune.apply). If a provider breaks CUDA for this process, that is recorded and the process exits with LOST_DEVICE. The
    same command then continues without that provider, until the code or the machine changes. On a GPU a file is written after
    each provider."""
    here = machine(device) | ({"choices": choices} if choices else {})
    effort: dict[str, Any] = {"seconds": 0.5, "least": 20} if device == "cuda" else {"seconds": 1.0, "least": 5}
    if quick:
        effort = {"seconds": 0.2, "least": 5, "counters": False}
    print(heading(here), flush=True)
    paths, unmeasured = [], []
    for name in suites:
        suite = SUITES[name]
        paths.append(out / here["kind"] / f"{name}.json")
        planned = [_promptly(suite, suite.plan(device, quick)[0])] if first else suite.plan(device, quick)
        marks = [results.fingerprint(*one, quick, here) for one in planned]
        record = _Record.continued(suite, paths[-1], here, marks, fresh)
        print(f"\n# {suite.title}: {CONTRACTS[suite.contract]}", flush=True)
        for (cell, only), mark in zip(planned, marks, strict=True):
            if mark in record.done:
                print(f"\n{details(record.done[mark], markdown=False)}\n(measured before)", flush=True)
                continue
            key = {"contract": cell.contract, "dtype": str(cell.dtype), "setting": results.setting(here)}
            save = record.save if device == "cuda" else None
            try:
                found = measure(cell, device, only=only, known=_known(out / here["kind"], key), save=save, **effort)
            except DeviceLost as failure:
                record.lost.append({"provider": failure.provider, "reason": failure.reason} | key)
                record.save()
                print(f"\n{failure}: CUDA is unusable in this process. Run the same command again.", file=sys.stderr)
                raise SystemExit(LOST_DEVICE) from failure
            except Exception as failure:  # the other cells are still measured
                unmeasured.append(f"{name}, {cell}: {first_line(failure)}")
                print(f"\n{unmeasured[-1]}", file=sys.stderr, flush=True)
                continue
            record.done[mark] = found | {"fingerprint": mark} | _origin(here)
            record.save()
            print(f"\n{details(found, markdown=False)}", flush=True)
    return paths, unmeasured


def _promptly(suite: Suite, planned: Planned) -> Planned:
    """The same without providers that compile for long."""
    late = {p.name for p in providers(suite.contract) if p.late}
    names = planned.only or tuple(p.name for p in providers(suite.contract))
    return Planned(planned.cell, tuple(name for name in names if name not in late))


def heading(here: dict[str, Any]) -> str:
    """A text that says what runs where and how to read the tables."""
    parts = [here["name"], f"{here['threads']} threads", f"torch {here['torch']}"]
    parts += [f"{name} {version}" for name, version in here["versions"].items()]
    parts += [f"backend {here['backend']}", *(here[x] for x in ("instruction set",) if x in here)]
    return f"{', '.join(parts)}\n\n{LEGEND}"


def _known(folder: Path, key: dict[str, str]) -> dict[str, str]:
    """{provider: reason} of those that broke CUDA on this contract and dtype, in any suite."""
    entries = [entry for path in sorted(folder.glob("*.json")) for entry in results.load(path).get("lost", [])]
    return {entry["provider"]: entry["reason"] for entry in entries if key.items() <= entry.items()}


def _origin(here: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": here,
    }
