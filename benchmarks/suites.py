"""The benchmark suites: their cells on a CPU and on a GPU, and the loop that measures them."""

from __future__ import annotations

import os
import sys
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

# Vocabulary sizes of models.
QWEN = 151936
LLAMA = 128256
GEMMA = 262144
FP32 = torch.float32
BF16 = torch.bfloat16
OURS = "grpo_kernels"
LOST_DEVICE = 75  # exit status: run the same command again (EX_TEMPFAIL)

# Selections of providers. Suites with many cells leave out the providers that compile for seconds
# at each new shape on a CPU, and those that take many times longer than the others.

#: For suites that vary one size, on a CPU.
SWEEP = (OURS, "grpo_kernels, layer 1 + loss", EAGER, "TRL fused head + loss")
#: SWEEP plus the fastest implementations of other projects on a CPU.
MANY_ROWS = (
    *SWEEP,
    "torch.compile",
    "CCE (torch.compile) + loss",
    "torch linear_cross_entropy + loss",
)
#: SWEEP plus the fastest implementations of other projects on a GPU.
PEERS = (
    *SWEEP,
    "Liger fused linear GRPO",
    "CCE, filtered (flat states) + loss",
    "CCE, unfiltered + loss",
    "verl kernel + loss",
)
#: Cross-entropies at a large vocabulary. Left out are the options of torch's function with which a
#: run takes hundreds of times as long as the matmuls.
CROSS_ENTROPIES = (
    OURS, "grpo_kernels, layer 1", "grpo_kernels, the whole DAPO loss", "torch linear_cross_entropy",
    "torch linear_cross_entropy, chunks of 256 rows", EAGER, "torch.compile", "CCE (torch.compile)",
)  # fmt: skip
FROM_LOGITS = (OURS, "grpo_kernels, in place", "grpo_kernels, new gradient", EAGER, "torch.compile")

SCALED_LOGITS = ("grpo_kernels, in place, grad_scale", "grpo_kernels, new gradient, grad_scale")


class Planned(NamedTuple):
    """A cell of a suite, and the names of its providers in addition to the limits (None: all)."""

    cell: Cell
    only: tuple[str, ...] | None = None


Plan = list[Planned]
Shape = tuple[int, int | None, int]  # rows, hidden size (None: from logits), vocabulary
LARGE = (8192, 4096, QWEN)
#: The largest sizes of a cell with --quick.
QUICK = {
    "cpu": {"rows": 64, "hidden": 256, "vocab": 32768, "layers": 2},
    "cuda": {"rows": 2048, "layers": 4},
}


@dataclass(frozen=True)
class Suite:
    """Cells that answer one question. `contract` describes the suite on pages."""

    name: str
    title: str
    contract: str
    cpu: Plan
    cuda: Plan

    def plan(self, device: str, quick: bool) -> Plan:
        """Return the cells for a device.

        device  "cpu" or "cuda"
        quick   whether to return only one cell of each dtype, with the sizes limited to QUICK
        """
        cells = self.cpu if device == "cpu" else self.cuda
        if not quick:
            return cells
        largest = QUICK[device]
        enough = [planned for planned in cells if planned.cell.rows >= largest["rows"]]
        first_of_dtype: dict[torch.dtype, Planned] = {}
        for planned in enough or cells:
            first_of_dtype.setdefault(planned.cell.dtype, planned)
        return [
            Planned(_shrink(planned.cell, largest), planned.only)
            for planned in first_of_dtype.values()
        ]


def _shrink(cell: Cell, largest: dict[str, int]) -> Cell:
    """Return the cell with each size limited to the one in `largest`.

    largest  {field of Cell: its largest value}. Fields that are None stay None
    """
    sizes = {}
    for name, most in largest.items():
        size = getattr(cell, name)
        if size is not None:
            sizes[name] = min(size, most)
    return replace(cell, **sizes)


def plan(
    contract: str,
    *shapes: Shape,
    dtypes: tuple[torch.dtype, ...] = (FP32, BF16),
    only: tuple[str, ...] | None = None,
    **fields: Any,
) -> Plan:
    """Return a cell for each shape and dtype.

    contract    a key of CONTRACTS
    only        names of the providers in addition to the limits. None: all
    fields      further fields of all cells. They replace the default number of sequences
    """
    cells = []
    for rows, hidden, vocab in shapes:
        for dtype in dtypes:
            further_fields = {"sequences": _num_sequences(rows, hidden)} | fields
            cell = Cell(contract, rows, vocab, dtype, hidden, **further_fields)
            cells.append(Planned(cell, only))
    return cells


def _num_sequences(rows: int, hidden: int | None) -> int:
    """Return the number of sequences: 16, 14 or 8, the first of these that divides the rows.

    Batches of 65,536 rows and more from hidden states are one sequence.
    """
    if hidden is not None and rows >= 65536:
        return 1
    return next(count for count in (16, 14, 8) if rows % count == 0)


def gpu(contract: str, *shapes: Shape, **fields: Any) -> Plan:
    """Return a bf16 cell for each shape."""
    return plan(contract, *shapes, dtypes=(BF16,), **fields)


def each(field: str, values: tuple[float, ...], contract: str, *shapes: Shape, **more: Any) -> Plan:
    """Return the cells of `shapes` for each value of a field, such as "active".

    more    further arguments of `plan`
    """
    cells: Plan = []
    for value in values:
        cells += plan(contract, *shapes, **{field: value}, **more)
    return cells


def _logits(name: str, title: str, *more_shapes: Shape) -> Suite:
    """Return a suite of losses from logits. The suite has the name of its contract.

    more_shapes     shapes on a CPU in addition to 256 and 1000 rows
    """
    all_providers = plan(name, (256, None, QWEN))
    few_providers = plan(name, (1000, None, QWEN), *more_shapes, only=FROM_LOGITS)
    large = gpu(name, (8192, None, QWEN), (8192, None, LLAMA))
    fp32 = plan(name, (2048, None, QWEN), dtypes=(FP32,))
    return Suite(name, title, name, cpu=all_providers + few_providers, cuda=large + fp32)


def _head(name: str, title: str, more: Plan | None = None) -> Suite:
    """Return a suite of losses from hidden states. The suite has the name of its contract.

    more    cells on a CPU in addition to 256 rows
    """
    return Suite(
        name, title, name, cpu=plan(name, (256, 1024, QWEN)) + (more or []), cuda=gpu(name, LARGE)
    )


def _swept(
    name: str,
    title: str,
    cpu: list[Shape],
    cuda: list[Shape],
    shares: tuple[float, ...] = (1.0,),
    only: tuple[str, ...] | None = None,
) -> Suite:
    """Return a suite that varies one size: from hidden states, in fp32 on a CPU, bf16 on a GPU.

    shares  shares of sequences with an advantage; each shape is measured with each of them
    only    the providers. None: SWEEP on a CPU and PEERS on a GPU
    """
    return Suite(
        name,
        title,
        "hidden",
        cpu=each("active", shares, "hidden", *cpu, dtypes=(FP32,), only=only or SWEEP),
        cuda=each("active", shares, "hidden", *cuda, dtypes=(BF16,), only=only or PEERS),
    )


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
SMALL_VOCABULARIES = (128, 512, 2048, 8192, 32768)
#: Shares of tokens that use the hidden state of another token: groups of 1, 2 and 8 sequences.
SHARED = (0.0, 0.5, 0.875)
TREES = (OURS, "grpo_kernels, rollouts one by one")
#: Shares of sequences with an advantage. Those with a performance target come first.
SHARES = (1.0, 0.5, 0.25, 0.75, 0.125)
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
            # Only the first cell has Liger: it takes 9 to 20 times as long as the matmuls on a CPU.
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
        Suite(
            "small-logits", "Small calls from logits, by vocabulary", "logits",
            plan("logits", *[(96, None, v) for v in SMALL_VOCABULARIES], dtypes=(FP32,), only=FROM_LOGITS),
            gpu("logits", *[(96, None, v) for v in SMALL_VOCABULARIES]),
        ),
        Suite(
            "small-hidden", "Small calls from hidden states, by vocabulary", "hidden",
            plan("hidden", *[(96, 64, v) for v in SMALL_VOCABULARIES], dtypes=(FP32,), only=(OURS, EAGER, "torch.compile")),
            gpu("hidden", *[(96, 64, v) for v in SMALL_VOCABULARIES]),
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
    """How suites are run.

    out     the folder of the result files
    quick   small cells and few runs
    first   only the first cell of each suite, without providers that compile for long
    fresh   measure again the cells that the result files already hold
    choices settings of our kernel launches that replace the package's, see tune.apply
    """

    device: str
    out: Path
    quick: bool = False
    first: bool = False
    fresh: bool = False
    choices: Record | None = None

    @property
    def effort(self) -> Record:
        """Seconds of timing and least number of runs of each provider, see harness.interleaved."""
        if self.quick:
            return {"seconds": 0.2, "least": 5}
        if self.device == "cuda":
            return {"seconds": 0.5, "least": 20}
        return {"seconds": 1.0, "least": 5}


def run(names: list[str], how: How) -> tuple[list[Path], list[str]]:
    """Measure the cells of suites that the result files do not hold yet, and print all cells.

    Returns the paths of the result files, and a line for each cell that could not be measured. On a
    GPU a file is also written after each provider. If a provider breaks CUDA for this process, that
    is recorded and the process exits with LOST_DEVICE. The same command then continues without that
    provider, until the code or the machine changes.
    """
    here = machine(how.device)
    if how.choices:
        here = here | {"choices": how.choices}
    # benchmarks.gpu_kit passes its command, because sys.argv names a temporary folder there.
    own_command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    origin = results.origin(here, os.environ.get("BENCHMARKS_COMMAND", own_command))
    print(f"{source(origin, packages=True)} Backend: {here['backend']}.\n\n{LEGEND}", flush=True)
    paths = []
    unmeasured: list[str] = []
    for name in names:
        path = how.out / here["kind"] / f"{name}.json"
        paths.append(path)
        unmeasured += _run_suite(SUITES[name], path, origin, how)
    return paths, unmeasured


def _run_suite(suite: Suite, path: Path, origin: Record, how: How) -> list[str]:
    """Measure the cells of a suite that its result file does not hold, and print all of them.

    Returns a line for each cell that could not be measured.

    path    the result file, which is written after each cell
    origin  the fields of the file that say how it was measured, see results.origin

    Raises SystemExit(LOST_DEVICE) if a provider breaks CUDA for this process.
    """
    here = origin["machine"]
    planned = suite.plan(how.device, how.quick)
    if how.first:
        planned = [_promptly(suite, planned[0])]
    # A cell that was measured has the fingerprint of its settings and of the code.
    fingerprints = [results.fingerprint(*one, how.quick, here) for one in planned]
    done: dict[str, Record] = {}
    if not how.fresh:
        done = {cell.get("fingerprint"): cell for cell in results.load(path).get("cells", [])}
    header = {"suite": suite.name, "title": suite.title, "contract": CONTRACTS[suite.contract]}

    def cells_so_far() -> list[Record]:
        """Return the records of the measured cells, in the order of the plan."""
        return [done[mark] for mark in fingerprints if mark in done]

    def save(*unfinished: Record) -> None:
        """Write the result file, with the cell that is being measured at its end."""
        results.save(path, header | origin | {"cells": [*cells_so_far(), *unfinished]})

    unmeasured = []
    print(f"\n# {suite.title}: {CONTRACTS[suite.contract]}", flush=True)
    for (cell, only), mark in zip(planned, fingerprints, strict=True):
        if mark in done:
            print(f"\n{details(done[mark], markdown=False)}\n(measured before)", flush=True)
            continue
        # Providers that broke CUDA with this code.
        lost_path = path.parent / "lost" / f"{results.setting(here)}.json"
        lost = results.load(lost_path)  # {"contract, dtype": {provider: reason}}
        known = lost.setdefault(f"{cell.contract}, {cell.dtype}", {})
        try:
            measured = measure(
                cell,
                how.device,
                only=only,
                known=known,
                save=save if how.device == "cuda" else None,
                earlier=cells_so_far(),
                **how.effort,
            )
        except DeviceLost as failure:
            known[failure.provider] = failure.reason
            results.save(lost_path, lost)
            print(
                f"\n{failure}: CUDA is unusable in this process. Run the same command again.",
                file=sys.stderr,
            )
            raise SystemExit(LOST_DEVICE) from failure
        except Exception as failure:  # the other cells are still measured
            unmeasured.append(f"{suite.name}, {cell}: {first_line(failure)}")
            print(f"\n{unmeasured[-1]}", file=sys.stderr, flush=True)
            continue
        done[mark] = measured | {"fingerprint": mark} | origin
        save()
        print(f"\n{details(done[mark], markdown=False)}", flush=True)
    return unmeasured


def _promptly(suite: Suite, planned: Planned) -> Planned:
    """Return the cell with all of its providers but those that compile for long."""
    names = [provider.name for provider in providers(suite.contract) if not provider.late]
    if planned.only is not None:
        names = [name for name in names if name in planned.only]
    return Planned(planned.cell, tuple(names))
