"""The report: everything in README.md and docs/ that is made from result files or from the code,
RESULTS.md, and the pictures.

    python -m benchmarks.report [--write | --check] [--results DIR]

Prints RESULTS.md, or writes or checks all pages and pictures.
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from torch.torch_version import TorchVersion

from benchmarks import SWITCH, parser_of, results, swaps
from benchmarks.results import RESULTS, ROOT
from benchmarks.suites import EAGER, OURS, SUITES
from benchmarks.tables import (
    BATCH,
    DTYPES,
    Cell,
    Record,
    Row,
    Table,
    comparison,
    details,
    display_name,
    figure,
    headline,
    machines,
    megabytes,
    named,
    processor,
    render,
    replace_block,
    size,
    source,
    timed,
)
from grpo_kernels.diagnosis.step import MOST_TIMES
from grpo_kernels.formulas.surrogates import PolicyGradient
from grpo_kernels.objective import NUMERICS, PRESETS

README, DOCS, REPORT = ROOT / "README.md", ROOT / "docs", Path(__file__).parent / "RESULTS.md"
FIGURES = DOCS / "benchmarks.md"
GUIDE = Path(__file__).parent / "README.md"
COMMAND = "python -m benchmarks.report --write"
#: Pictures that the page of figures shows.
PICTURES = ("logits", "hidden", "length", "active")
#: What `benchmarks.resources` has found of the budgets, by version of Triton and by target.
BUDGETS = RESULTS / "budgets.json"


# ---- presets

DENOMINATORS = {
    "token-mean": "trained tokens",
    "seq-mean-token-mean": "sequences",
    "seq-mean-token-sum": "sequences",
    "group-mean": "groups",
    "token-sum": "1",
    "constant": "sequences x `max_tokens`",
}


def presets() -> str:
    """The published objectives, and which trainers' constants each is known with."""
    rows = [["preset", "surrogate", "ratio level", "aggregate", "`numerics=`"]]
    for name, objective in PRESETS.items():
        parts: list[Any] = [objective.surrogate, *objective.filters]
        if objective.future_kl is not None:
            parts.append(objective.future_kl)
        policy = ", ".join(f"`{_call(part)}`" for part in parts)
        level = "no ratio" if isinstance(objective.surrogate, PolicyGradient) else objective.level
        aggregate = f"{objective.aggregate} (over {DENOMINATORS[objective.aggregate]})"
        trainers = ", ".join(trainer for trainer, known in NUMERICS.items() if name in known)
        rows.append([f"`{name}`", policy, level, aggregate, trainers])
    return render(rows, markdown=True).replace("---:", "---")


def _call(part: Any) -> str:
    """The Python expression of a part of an objective: its class and its numbers, without defaults
    that switch something off.
    """
    shown = []
    for f in fields(part):
        value = getattr(part, f.name)
        if f.name == "kind":
            shown.append(f'"{value}"')
        elif isinstance(value, float) and (value != f.default or (value and math.isfinite(value))):
            shown.append(f"{f.name}={value:g}")
    return f"{type(part).__name__}({', '.join(shown)})"


# ---- ours and the fastest other

SCALED = "upstream 0.5"  # a variant of ours that only the tables show
WITHOUT_PEERS = ("kept",)  # no other project has this operation
PROMISED = 64  # rows
#: How the names of plain PyTorch begin: a user who has it needs nothing else.
PLAIN = (EAGER, "pairs in PyTorch", "torch.compile", "torch linear_cross_entropy")
#: What a user asks first: the suites, and the number of rows, or the nearest that was measured.
ASKED, ASKED_ROWS = {"logits": "from logits", "hidden": "from hidden states"}, 1_000


class Standing(NamedTuple):
    """One cell: the fastest of ours, and the fastest correct other implementation."""

    record: Record
    cell: Cell
    ours: Row
    peer: Row

    @property
    def ratio(self) -> float:
        """Above 1: ours is faster."""
        return float(self.peer["ms"] / self.ours["ms"])

    @property
    def title(self) -> str:
        suite = SUITES[self.record["suite"]].title
        return f"{suite}, {DTYPES[self.cell['dtype']]}, {size(self.cell)}"


def right(cell: Cell) -> list[Row]:
    """Return the rows that were timed and checked: not limits, and not another contract."""
    return [row for row in timed(cell) if "errors" in row]


def standings(folder: Path, machine: str, plain: bool = False) -> list[Standing]:
    """The standings of all cells of a training batch that have both, the strongest first. plain:
    against plain PyTorch alone, of all cells that the promise is about.
    """
    found = []
    for suite in SUITES:
        record = results.load(folder / machine / f"{suite}.json")
        for cell in record.get("cells", ()) if plain or suite not in WITHOUT_PEERS else ():
            ours = [
                row
                for row in right(cell)
                if row["name"].startswith(OURS) and "eager backend" not in row["name"]
            ]
            peers = [row for row in right(cell) if not row["name"].startswith(OURS)]
            peers = [row for row in peers if row["name"].startswith(PLAIN) or not plain]
            if ours and peers and cell["rows"] >= (PROMISED if plain else BATCH):
                fastest = (min(rows, key=lambda row: row["ms"]) for rows in (ours, peers))
                found.append(Standing(record, cell, *fastest))
    return sorted(found, key=lambda standing: -standing.ratio)


def promise(folder: Path, machine: str) -> tuple[bool, str]:
    """Whether nothing is slower than plain PyTorch on this machine; and the cells where it is, or
    the line that none is.
    """
    compared = standings(folder, machine, plain=True)
    broken = [standing for standing in reversed(compared) if standing.ratio * MOST_TIMES < 1]
    what = f"of {len(compared)} cells of {PROMISED} rows or more on {machine}"
    if not broken:
        return (
            True,
            (
                "Slower than plain PyTorch (eager, torch.compile, linear_cross_entropy) by more"
                f" than 5 %: none {what}."
            ),
        )
    lines = [
        f"  {one.title}: {_span(one.ours)}, {_span(one.peer)}: {1 / one.ratio:.2f} times as long"
        for one in broken
    ]
    remedy = (
        "`python -m grpo_kernels doctor` compares the engines of matmuls that can run here;"
        " GRPO_KERNELS_PRODUCTS chooses another."
    )
    return False, "\n".join(
        [f"Slower than plain PyTorch by more than 5 %: {len(broken)} {what}:", *lines, remedy]
    )


def _span(row: Row) -> str:
    return f"{display_name(row['name'])} {figure(row['ms'])} ms ({figure(row['p20'])} to {figure(row['p80'])})"


# ---- the figure of the README

#: The machine whose result files the README shows, and the suites, from top to bottom.
README_MACHINE, README_SUITES = "nvidia-h100-80gb-hbm3", ("hidden", "logits")
#: Variants of ours that the README leaves out: they answer other questions than "how fast is it".
VARIANTS = (SCALED, "grad_scale", "eager backend", "layer 1")


def readme_cells(folder: Path) -> dict[str, tuple[Record, Cell, list[Row]]]:
    """Return {suite: (result file, its largest bf16 cell, the rows that the README shows)}.

    The rows are sorted by time. Empty if the machine was not measured.
    """
    cells = {}
    for suite in README_SUITES:
        record = results.load(folder / README_MACHINE / f"{suite}.json")
        candidates = [cell for cell in record.get("cells", ()) if cell["dtype"] == "bfloat16"]
        if not candidates:
            return {}
        cell = max(candidates, key=lambda one: one["rows"] * one["vocab"])
        rows = [row for row in right(cell) if not any(word in row["name"] for word in VARIANTS)]
        cells[suite] = (record, cell, sorted(rows, key=lambda row: row["ms"]))
    return cells


def readme_figure(folder: Path) -> str:
    """The README's picture and the paragraph under it."""
    cells = readme_cells(folder)
    if not cells:
        return absent(*README_SUITES)
    record, cell, _ = cells["hidden"]

    def cost(name: str) -> tuple[str, str]:
        row = named(cell, name)
        assert row is not None, name
        return f"{figure(row['ms'])} ms", f"{row['extra_mb'] / 1000:.1f} GB"

    (ours, our_memory), (eager, eager_memory) = cost(OURS), cost(EAGER)
    fast_llm, fast_llm_memory = cost("Fast-LLM kernel + products")
    compiled, compiled_memory = cost("CCE (torch.compile) + loss")
    filtered, filtered_memory = cost("CCE, filtered (flat states) + loss")
    others = [
        row for row in right(cell) if row["name"].startswith((EAGER, "Fast-LLM", "CCE (", "CCE, f"))
    ]
    their_errors = [max(row["errors"].values()) for row in others if "16-bit" not in row["name"]]
    our_error = max(named(cell, OURS)["errors"].values())
    versions = record["machine"]["versions"]
    text = f"""**From hidden states, the DAPO loss and its gradients take {ours} and {our_memory}; eager PyTorch takes {eager} and {eager_memory}**
({cell["rows"]:,} tokens, hidden size {cell["hidden"]:,}, vocabulary {cell["vocab"]:,}, bf16, one {record["machine"]["name"]}).
Fast-LLM's kernel is faster ({fast_llm}), but it needs {fast_llm_memory} and rounds the logits to 16 bits. CCE (cut-cross-entropy) with `torch.compile` takes {compiled} and
{compiled_memory}. CCE's own kernel with filtered gradients needs the least memory, {filtered_memory}, but takes {filtered}. The worst relative gradient error is {max(their_errors):.0e}
for eager PyTorch and these three, and {our_error:.0e} for this package. Memory is the peak on top of the inputs. Every implementation passed a check against float64 first.
Measured on {record["date"]} with torch {record["machine"]["torch"]} and Triton {versions["triton"]}."""
    path = folder / README_MACHINE / "plots" / "readme.svg"
    link = Path(os.path.relpath(path, README.parent)).as_posix()
    alternative = (
        "Bar charts of time and memory of each implementation, from hidden states and from logits"
    )
    return f"![{alternative}]({link})\n\n{text}"


# ---- the front: what a user asks first, then the largest and the smallest speed-up


def asked(folder: Path, machine: str) -> dict[str, list[Standing]]:
    """DAPO from logits and from hidden states, in fp32 and bf16; then both ends of all cells."""
    every, found = standings(folder, machine), {}
    for suite, words in ASKED.items():
        for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16")):
            of = [x for x in every if x.record["suite"] == suite and x.cell["dtype"] == dtype]
            of.sort(key=lambda x: (abs(x.cell["rows"] - ASKED_ROWS), -x.cell["vocab"]))
            found[f"{words}, {short}"] = of[:1]
    return found | {
        "largest speed-up of all cells": every[:1],
        "smallest speed-up of all cells": every[-1:],
    }


def front(folder: Path) -> str:
    """Every machine that was measured, side by side."""
    of_machines = {
        machine: asked(folder, machine)
        for machine in reversed(machines(folder))
        if standings(folder, machine)
    }
    if not of_machines:
        return "Not measured yet: `python -m benchmarks`."
    alone = len(of_machines) == 1
    lines, sources = (
        [],
        [f"Cells have {ASKED_ROWS:,} rows, or the closest number that was measured."],
    )
    for words in next(iter(of_machines.values())):
        for x in (x for found in of_machines.values() for x in found[words]):
            eager, way = named(x.cell, EAGER), x.ours["name"].removeprefix(OURS).removeprefix(", ")
            what = (
                f"{words}: {x.title if 'cells' in words else size(x.cell)}"
                + f"; {processor(x.record)}" * (not alone)
            )
            costs = [
                f"{way}: " * bool(way) + _cost(x.ours),
                f"{display_name(x.peer['name'])}: {_cost(x.peer)}",
                _cost(eager) if eager else "",
            ]
            lines.append([what, *costs, f"x {x.ratio:.2f}"])
            sources.append(f"- {source(x.record)}")
    on = (
        f"; {processor(next(iter(of_machines[machines(folder)[-1]].values()))[0].record)}"
        if alone
        else ""
    )
    head = [
        f"loss and gradient of DAPO{on}",
        "ours",
        "fastest other that passes the check against float64",
        EAGER,
        "speed-up",
    ]
    links = [picture(folder, machine, "front", FIGURES) for machine in of_machines]
    without = [] if machines(folder, "cuda") else [gpus(folder, FIGURES)]
    table = render([head, *lines], markdown=True).replace(
        "---: | ---: | ---:", "--- | --- | ---", 1
    )
    note, *origins = dict.fromkeys(sources)
    return "\n\n".join([table, note, "\n".join(origins), *filter(None, links), *without])


def _cost(row: Row) -> str:
    """Return time and memory with no-break spaces, so that a number stays with its unit."""
    return f"{figure(row['ms'])}\u00a0ms, {megabytes(row) or '0'}\u00a0MB"


# ---- blocks of pages


def picture(folder: Path, machine: str, name: str, page: Path) -> str:
    """A link from a page to the plot of a suite, or to the front; "" if there is none."""
    path = folder / machine / "plots" / f"{name}.svg"
    title = (
        SUITES[name].title
        if name in SUITES
        else "Time and memory of every implementation, from logits and from hidden states"
    )
    return (
        f"![{title}]({Path(os.path.relpath(path, page.parent)).as_posix()})"
        if path.exists()
        else ""
    )


def absent(*suites: str) -> str:
    return f"Not measured yet: `python -m benchmarks --suite {' '.join(suites)}`."


def figures(folder: Path, suite: str, device: str = "cpu") -> str:
    """The headline tables of a suite, with all machines that were measured side by side."""
    records = (results.load(folder / name / f"{suite}.json") for name in machines(folder, device))
    found = [record for record in records if record.get("cells")]
    return (
        "\n\n".join([*map(source, found), *map(comparison, headline(*found))])
        if found
        else absent(suite)
    )


def pictures(folder: Path, device: str = "cpu", page: Path = FIGURES) -> str:
    links = [
        picture(folder, name, suite, page)
        for suite in PICTURES
        for name in machines(folder, device)
    ]
    return "\n\n".join(filter(None, links)) or f"No plots yet: `{COMMAND}`."


def gpus(folder: Path, page: Path = FIGURES) -> str:
    """Both contracts on every GPU that was measured."""
    if not machines(folder, "cuda"):
        guide = Path(os.path.relpath(GUIDE, page.parent)).as_posix()
        return (
            "**No GPU has run this package yet: its compiled kernels run in the tests, in an"
            " emulator of their PTX, which shows neither the last compile step, nor the order of"
            " memory that the hardware keeps, nor any time.** `python3 -m benchmarks.gpu_kit --out"
            " DIR` checks, tunes and measures all of this on one, in four calls of ten minutes:"
            f" [benchmarks/README.md]({guide})."
        )
    tables = [f"**{SUITES[suite].title}.** {figures(folder, suite, 'cuda')}" for suite in ASKED]
    return "\n\n".join([*tables, pictures(folder, "cuda", page)])


# ---- other tables


def swapped(record: Record) -> str:
    return f"{source(record)}\n\n{render(swaps.table(record), markdown=True)}"


def budgets() -> Table:
    record = results.load(BUDGETS)
    lines = [
        [
            "Triton",
            "target",
            "kernels",
            "beyond their budgets",
            "most bytes spilled",
            "least KiB in flight",
        ]
    ]
    for version, target in (
        (x, target) for x in sorted(record, key=TorchVersion) for target in record[x]
    ):
        of = record[version][target]
        counts = (
            str(of["kernels"]),
            "; ".join(of["beyond"]) or "0",
            str(of["spilled"]),
            f"{of['in flight']:.0f}",
        )
        lines.append([version, target, *counts])
    return lines


# ---- pages


def blocks(folder: Path = RESULTS) -> dict[Path, dict[str, str]]:
    """{page: {name: text}} of what stands between a page's markers."""
    return {
        README: {"figure": readme_figure(folder)},
        DOCS / "objectives.md": {"presets": presets()},
        FIGURES: {
            "front": front(folder),
            **{
                f"{suite.replace('-', '_')}_cpu": figures(folder, suite)
                for suite in (
                    "logits",
                    "hidden",
                    "kept",
                    "divergence",
                    "logits-divergence",
                    "draft",
                )
            },
            "plots_cpu": pictures(folder),
            "gpus": gpus(folder),
        },
        ROOT / "grpo_kernels" / "integrations" / "README.md": {
            "swaps": swapped(results.load(swaps.FILE))
        },
        GUIDE: {"budgets": render(budgets(), markdown=True)},
    }


INTRODUCTION = f"""# All results

Generated by `{COMMAND}` from the files in `results/`; `python -m benchmarks` measures them.
[docs/benchmarks.md](../docs/benchmarks.md) has a selection and says how to read it.

All implementations of a table ran interleaved in one process. Each was checked against float64 first, and is not timed if it fails.

- `ms` is the median of `runs`; `p20` and `p80` are quantiles. `host ms` is the time of the host, on a GPU.
- The limit is the least work that the result needs, timed in the same run. From logits it is one read and one write of the logits (a
  copy, or in place). From hidden states it is the sum of the bare matmuls, each timed alone and computed by the fastest way known (torch.mm,
  oneDNN, ours, ours in chunks).
- GB/s count the logits as read once (1U), or as read and written once (2U), whatever an implementation really reads and writes.
- TFLOP/s count the matmuls that are needed: N rows, hidden size H, V ids, and a share a of the rows with a gradient.
- `extra MB` is the peak beyond the inputs, results included.
- The error of a loss is relative to the mean absolute advantage. The error of log-probs and entropies is the largest absolute error. The error of
  a gradient is relative, in the Euclidean norm: of all rows, and of the worst row. For a model's gradients it is the error of the worst parameter."""


def measured_suites(folder: Path, machine: str) -> list[str]:
    """The names of the suites that were measured on a machine, in their order."""
    files = {name: folder / machine / f"{name}.json" for name in SUITES}
    return [name for name, path in files.items() if results.load(path).get("cells")]


def report(folder: Path = RESULTS) -> str:
    """benchmarks/RESULTS.md: every suite on every machine."""
    out = [INTRODUCTION]
    for machine in reversed(machines(folder)):  # GPUs first
        out.append(f"## {machine}")
        for name in measured_suites(folder, machine):
            record = results.load(folder / machine / f"{name}.json")
            out += [
                f"### {SUITES[name].title}",
                f"{record['contract'][0].upper()}{record['contract'][1:]}.",
                source(record, packages=True),
                picture(folder, machine, name, REPORT),
            ]
            out += [details(cell) for cell in record["cells"]]
        missing = [name for name in SUITES if name not in measured_suites(folder, machine)]
        if missing:
            out.append(f"Suites not measured on this machine: {', '.join(missing)}.")
    if not machines(folder):
        out.append(absent(*SUITES))
    if not machines(folder, "cuda"):
        out += ["## GPUs", gpus(folder, REPORT)]
    return "\n\n".join(part for part in out if part) + "\n"


def pages(folder: Path = RESULTS) -> Iterator[tuple[Path, Callable[[], str]]]:
    """(page, what it should be now) of all that is generated."""
    yield REPORT, lambda: report(folder)
    for page, parts in blocks(folder).items():
        yield page, lambda page=page, parts=parts: updated(page, parts)


def updated(page: Path, parts: dict[str, str]) -> str:
    text = page.read_text()
    for name, block in parts.items():
        text = replace_block(text, page.name, name, block, COMMAND)
    return text


def stale() -> list[Path]:
    """Pages and pictures that are not those of the result files and of the code."""
    from benchmarks import plots

    shown = plots.pictures(RESULTS)
    of_nothing = [path for path in RESULTS.glob("*/plots/*.svg") if path not in shown]
    old = of_nothing + [
        path
        for path, one in shown.items()
        if plots.described(one) not in html.unescape(path.read_text())
    ]
    return old + [page for page, made in pages() if made() != page.read_text()]


def main(argv: list[str] | None = None) -> None:
    others = "folder of result files; of others, --write makes pictures alone"
    args = parser_of("benchmarks.report", __doc__, {
        "--write": SWITCH | {"help": "update pictures, README.md, docs/ and benchmarks/RESULTS.md"},
        "--check": SWITCH | {"help": "name what --write would change, and exit with 1 if there is any"},
        "--results": {"type": Path, "default": RESULTS, "help": others},
    }).parse_args(argv)  # fmt: skip
    folder = args.results.resolve()
    if args.check:
        old = stale()
        raise SystemExit("\n".join(["out of date:", *map(str, old)]) if old else 0)
    if not args.write:
        print(report(folder))
        return
    from benchmarks import plots

    written = [plots.save(shown, path) for path, shown in plots.pictures(folder).items()]
    if folder == RESULTS:
        for page, made in pages():
            page.write_text(made())
            written.append(page)
    print("written:", *dict.fromkeys(written), sep="\n")


if __name__ == "__main__":
    main()
