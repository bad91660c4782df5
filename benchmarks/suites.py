"""The suites:

which cells are measured on a CPU and on a GPU, with which providers, and the loop over them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import results
from benchmarks.cases import CONTRACTS, OF_SEQUENCES, Cell
from benchmarks.machine import machine
from benchmarks.measure import DeviceLost, measure
from benchmarks.providers import first_line, providers
from benchmarks.results import Record
from benchmarks.tables import EAGER, LEGEND, details, source

QWEN, LLAMA, GEMMA = 151936, 128256, 262144  # vocabularies
FP32, BF16 = torch.float32, torch.bfloat16
OURS = "grpo_kernels"
LOST_DEVICE = 75  # exit status: run the same command again (EX_TEMPFAIL)

#: Providers of sweeps: without those that compile for seconds at each new shape on a CPU, or take
#: many times longer than the others.
SWEEP = (OURS, "grpo_kernels, layer 1 + loss", EAGER, "TRL fused head + loss")
#: With the fastest of the other projects' on a CPU, and on a GPU.
MANY_ROWS = (
    *SWEEP,
    "torch.compile",
    "CCE (torch.compile) + loss",
    "torch linear_cross_entropy + loss",
)
PEERS = (
    *SWEEP,
    "Liger fused linear GRPO",
    "CCE, filtered (flat states) + loss",
    "CCE, unfiltered + loss",
    "verl kernel + loss",
)
#: Of a large vocabulary: without the options of torch's function with which a run takes hundreds of
#: times the products.
CROSS_ENTROPIES = (
    OURS, "grpo_kernels, layer 1", "grpo_kernels, the whole DAPO loss", "torch linear_cross_entropy",
    "torch linear_cross_entropy, chunks of 256 rows", EAGER, "torch.compile", "CCE (torch.compile)",
)  # fmt: skip
FROM_LOGITS = (OURS, "grpo_kernels, in place", "grpo_kernels, new gradient", EAGER, "torch.compile")

SCALED_LOGITS = ("grpo_kernels, in place, grad_scale", "grpo_kernels, new gradient, grad_scale")


class Planned(NamedTuple):
    cell: Cell
    only: tuple[str, ...] | None = None  # providers in addition to the limits; None: all


Plan = list[Planned]
Shape = tuple[int, int | None, int]  # rows, hidden size, vocabulary
LARGE = (8192, 4096, QWEN)
#: The most that a cell has with --quick.
QUICK = {
    "cpu": {"rows": 64, "hidden": 256, "vocab": 32768, "layers": 2},
    "cuda": {"rows": 2048, "layers": 4},
}


@dataclass(frozen=True)
class Suite:
    name: str
    title: str
    contract: str
    cpu: Plan
    cuda: Plan

    def plan(self, device: str, quick: bool) -> Plan:
        """quick: a cell of each dtype, made small."""
        cells, most = (self.cpu, QUICK["cpu"]) if device == "cpu" else (self.cuda, QUICK["cuda"])
        if not quick:
            return cells
        first = {
            one.cell.dtype: one
            for one in reversed([one for one in cells if one.cell.rows >= most["rows"]] or cells)
        }
        return [
            Planned(replace(cell, **_least(cell, most)), only)
            for cell, only in reversed(first.values())
        ]


def _least(cell: Cell, most: dict[str, int]) -> dict[str, int]:
    return {
        name: min(x, size) for name, x in most.items() if (size := getattr(cell, name)) is not None
    }


def plan(
    contract: str, *shapes: Shape, dtypes: tuple[torch.dtype, ...] = (FP32, BF16), only: tuple[str, ...] | None = None,
    **more: Any,
) -> Plan:  # fmt: skip
    """A cell for each shape and dtype.

    Its sequences are as many as divide the rows, and one from 65,536 rows on.
    """
    cells = []
    for (n, h, v), dtype in ((shape, dtype) for shape in shapes for dtype in dtypes):
        sequences = (
            1 if n >= 65536 and h else next(count for count in (16, 14, 8) if n % count == 0)
        )
        cells.append(
            Planned(Cell(contract, n, v, dtype, h, **{"sequences": sequences, **more}), only)
        )
    return cells


def gpu(contract: str, *shapes: Shape, **more: Any) -> Plan:
    return plan(contract, *shapes, dtypes=(BF16,), **more)


def _logits(name: str, title: str, *many: Shape) -> Suite:
    """Contracts on logits have the names of their suites."""
    cpu = plan(name, (256, None, QWEN)) + plan(name, (1000, None, QWEN), *many, only=FROM_LOGITS)
    cuda = gpu(name, (8192, None, QWEN), (8192, None, LLAMA)) + plan(
        name, (2048, None, QWEN), dtypes=(FP32,)
    )
    return Suite(name, title, name, cpu, cuda)


def _head(name: str, title: str, *many: Plan) -> Suite:
    """From hidden states: 256 rows and more."""
    return Suite(
        name,
        title,
        name,
        [*plan(name, (256, 1024, QWEN)), *(one for cells in many for one in cells)],
        gpu(name, LARGE),
    )


def _swept(
    name: str, title: str, cpu: list[Shape], cuda: list[Shape], shares: tuple[float, ...] = (1.0,),
    only: tuple[str, ...] | None = None,
) -> Suite:  # fmt: skip
    """From hidden states with few providers, in fp32 on a CPU and in bf16 on a GPU.

    shares: of sequences with an advantage.
    """
    on_cpu = each("active", shares, "hidden", *cpu, dtypes=(FP32,), only=only or SWEEP)
    return Suite(
        name,
        title,
        "hidden",
        on_cpu,
        each("active", shares, "hidden", *cuda, dtypes=(BF16,), only=only or PEERS),
    )


def each(field: str, values: tuple[float, ...], contract: str, *shapes: Shape, **more: Any) -> Plan:
    """A plan for each value of a field of the cells."""
    return [one for x in values for one in plan(contract, *shapes, **{field: x}, **more)]


SEQUENCES = (
    OURS,
    EAGER,
    "torch.compile",
    "TRL fused head + loss",
    "torch linear_cross_entropy + loss",
)
KEPT = ("grpo_kernels, into weight_grad", OURS, "pairs in PyTorch, autograd")
DIVERGENCES = (OURS, "TRL chunked divergence + mean")
VOCABULARIES = (32768, 65536, LLAMA, QWEN, GEMMA)
SHARED, TREES = (0.0, 0.5, 0.875), (OURS, "grpo_kernels, rollouts one by one")
SHARES = (1.0, 0.5, 0.25, 0.75, 0.125)  # with an advantage; those of the targets first
MANY = (1000, 1024, QWEN)
SUITES = {
    s.name: s
    for s in (
        _logits("logits", "Loss and gradient from logits", (4096, None, QWEN)),
        _logits("logits-forward", "Log-probs and entropy from logits"),
        Suite(
            "hidden", "Loss and gradients from hidden states", "hidden",
            # Row counts that are a whole number of chunks, and some that are not: 700 and 1000 are
            # no multiples of 16.
            plan("hidden", (16, 1024, QWEN), (256, 1024, QWEN))
            + plan("hidden", (700, 1024, QWEN), MANY, (4096, 1024, QWEN), only=MANY_ROWS),
            gpu("hidden", LARGE, (8192, 4096, LLAMA), (4096, 2304, GEMMA)),
        ),
        Suite(
            "logits-accumulation", "Loss from logits, divided by 4 before its backward", "logits",
            plan("logits", (256, None, QWEN), only=(*FROM_LOGITS, *SCALED_LOGITS), accumulation=4),
            gpu("logits", (8192, None, QWEN), accumulation=4),
        ),
        Suite(
            "hidden-accumulation", "Loss from hidden states, divided by 4 before its backward", "hidden",
            plan("hidden", (256, 1024, QWEN), only=(OURS, "grpo_kernels, grad_scale", EAGER, *MANY_ROWS[4:6]), accumulation=4),
            gpu("hidden", LARGE, accumulation=4),
        ),
        Suite(
            "kept", "Loss and gradients over candidate sets, from hidden states", "kept",
            plan("kept", (256, 1024, QWEN)) + plan("kept", (8192, 1024, QWEN), only=KEPT),
            gpu("kept", (256, 1024, QWEN), (8192, 1024, QWEN)),
        ),
        Suite(
            "trees", "Loss and gradients of rollouts that share rows, from hidden states", "trees",
            each("shared", SHARED, "trees", (256, 1024, QWEN), dtypes=(FP32,), only=TREES),
            each("shared", SHARED, "trees", LARGE, dtypes=(BF16,), only=TREES),
        ),
        Suite(
            "forms", "Loss and gradients with terms at extra ids, from hidden states", "forms",
            plan("forms", (256, 1024, QWEN)), gpu("forms", LARGE),
        ),
        Suite(
            "logits-forms", "Loss and gradient with terms at extra ids, from logits", "logits-forms",
            plan("logits-forms", (256, None, QWEN)), gpu("logits-forms", (8192, None, QWEN)),
        ),
        _head("divergence", "Exact KL to a teacher, from hidden states", plan("divergence", MANY, only=DIVERGENCES)),
        _head("divergence-forward", "Exact forward KL to a teacher, from hidden states"),
        _head("divergence-jsd", "Exact JSD to a teacher, from hidden states"),
        _logits("logits-divergence", "Exact KL to a teacher, from logits"),
        Suite(
            "draft", "Soft cross-entropy of a draft head, from hidden states", "draft",
            plan("draft", (256, 1024, QWEN), sequences=1), gpu("draft", LARGE, sequences=1),
        ),
        _head("hidden-frozen", "Loss from hidden states, frozen head"),
        Suite(
            "hidden-sequence", "Sequence-level losses from hidden states: GSPO (also with a frozen head) and VESPO", "gspo",
            # Liger's takes nine to twenty times the products on a CPU.
            plan("gspo", (256, 1024, QWEN), only=(*SEQUENCES, "Liger fused linear GRPO"))
            + [one for name in OF_SEQUENCES[1:] for one in plan(name, (256, 1024, QWEN), only=SEQUENCES)]
            + plan("gspo", MANY, only=SEQUENCES[:2]),
            [one for contract in OF_SEQUENCES for one in gpu(contract, LARGE)],
        ),
        _head("hidden-forward", "Log-probs from hidden states"),
        Suite(
            "cross-entropy", "Cross-entropy from hidden states", "cross-entropy",
            plan("cross-entropy", (256, 1024, QWEN), MANY, only=CROSS_ENTROPIES) + plan("cross-entropy", (64, 256, 32768)),
            gpu("cross-entropy", LARGE),
        ),
        _swept(
            "rows", "From hidden states, by the number of rows",
            [(n, 256, 32768) for n in (64, 256, 1024, 4096, 8192)], [(n, 4096, QWEN) for n in (1024, 4096, 8192, 32768)],
        ),
        _swept(
            "vocab", "From hidden states, by vocabulary",
            [(128, 512, v) for v in VOCABULARIES], [(8192, 4096, v) for v in VOCABULARIES],
        ),
        _swept("active", "From hidden states, by the share of sequences with an advantage", [(128, 1024, QWEN)], [LARGE], SHARES),
        _swept(
            "length", "From hidden states, long batches and sequences: time and memory",
            [(n, 128, 32768) for n in (4096, 16384, 65536)], [(n, 1024, QWEN) for n in (8192, 65536, 131072, 262144)],
            only=(OURS, EAGER),
        ),
        Suite(
            "step", "A training step end to end", "step",
            plan("step", (256, 128, QWEN), dtypes=(FP32,), layers=2), gpu("step", (8192, 896, QWEN), layers=24),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class How:
    """How suites are run. With `fresh` all cells are measured again, with `first` only the first of
    each suite is, without providers that compile for long. `choices` are the settings of our
    launches, where they are not the package's (see tune.apply).
    """

    device: str
    out: Path
    quick: bool = False
    first: bool = False
    fresh: bool = False
    choices: Record | None = None

    @property
    def effort(self) -> Record:
        if self.quick:
            return {"seconds": 0.2, "least": 5}
        return (
            {"seconds": 0.5, "least": 20} if self.device == "cuda" else {"seconds": 1.0, "least": 5}
        )


def run(names: list[str], how: How) -> tuple[list[Path], list[str]]:
    """Measures the cells that the result files do not hold yet, prints each, and returns the paths,
    and the cells that could not be measured, each with the reason. If a provider breaks CUDA for
    this process, that is recorded and the process exits with LOST_DEVICE. The same command then
    continues without that provider, until the code or the machine changes. On a GPU a file is
    written after each provider.
    """
    here = machine(how.device) | ({"choices": how.choices} if how.choices else {})
    # That of the kit names a temporary folder.
    command = os.environ.get(
        "BENCHMARKS_COMMAND", " ".join(["python -m benchmarks", *sys.argv[1:]])
    )
    origin = results.origin(here, command)
    print(f"{source(origin, packages=True)} Backend: {here['backend']}.\n\n{LEGEND}", flush=True)
    paths = {name: how.out / here["kind"] / f"{name}.json" for name in names}
    return [*paths.values()], [
        line for name, path in paths.items() for line in _run(SUITES[name], path, origin, how)
    ]


def _run(suite: Suite, path: Path, origin: Record, how: How) -> Iterator[str]:
    """Measures one suite and yields the cells that could not be measured."""
    here, planned = origin["machine"], suite.plan(how.device, how.quick)
    planned = [_promptly(suite, planned[0])] if how.first else planned
    marks = [results.fingerprint(*one, how.quick, here) for one in planned]
    done = (
        {}
        if how.fresh
        else {cell.get("fingerprint"): cell for cell in results.load(path).get("cells", [])}
    )
    broke = (
        path.parent / "lost" / f"{results.setting(here)}.json"
    )  # of this code: {contract, dtype: {provider: why}}
    about = {
        "suite": suite.name,
        "title": suite.title,
        "contract": CONTRACTS[suite.contract],
    } | origin

    def save(*unfinished: Record) -> None:
        results.save(
            path, about | {"cells": [*(done[mark] for mark in marks if mark in done), *unfinished]}
        )

    print(f"\n# {suite.title}: {CONTRACTS[suite.contract]}", flush=True)
    for (cell, only), mark in zip(planned, marks, strict=True):
        before = "\n(measured before)" * (mark in done)
        if not before:
            lost = results.load(broke)
            known = lost.setdefault(f"{cell.contract}, {cell.dtype}", {})
            try:
                parts = save if how.device == "cuda" else None
                earlier = [done[other] for other in marks if other in done]
                done[mark] = measure(
                    cell, how.device, only=only, known=known, save=parts, earlier=earlier,
                    **how.effort,
                )  # fmt: skip
            except DeviceLost as failure:
                known[failure.provider] = failure.reason
                results.save(broke, lost)
                print(
                    f"\n{failure}: CUDA is unusable in this process. Run the same command again.",
                    file=sys.stderr,
                )
                raise SystemExit(LOST_DEVICE) from failure
            except Exception as failure:  # the other cells are still measured
                line = f"{suite.name}, {cell}: {first_line(failure)}"
                print(f"\n{line}", file=sys.stderr, flush=True)
                yield line
                continue
            done[mark] |= {"fingerprint": mark} | origin
            save()
        print(f"\n{details(done[mark], markdown=False)}{before}", flush=True)


def _promptly(suite: Suite, planned: Planned) -> Planned:
    """The same without providers that compile for long."""
    names = (
        p.name
        for p in providers(suite.contract)
        if not p.late and p.name in (planned.only or [p.name])
    )
    return Planned(planned.cell, tuple(names))
