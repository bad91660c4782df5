"""Generate the pages and pictures that show result files or facts of the code.

    python -m benchmarks.report [--write | --check] [--results DIR]

Prints benchmarks/RESULTS.md. With --write or --check it writes or checks RESULTS.md, the generated
blocks of README.md and docs/, and the pictures.
"""

from __future__ import annotations

import html
import itertools
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
    reasons,
    render,
    replace_block,
    size,
    source,
    timed,
)
from grpo_kernels.diagnosis.step import MOST_TIMES
from grpo_kernels.formulas.surrogates import PolicyGradient
from grpo_kernels.objective import NUMERICS, PRESETS

README = ROOT / "README.md"
DOCS = ROOT / "docs"
REPORT = Path(__file__).parent / "RESULTS.md"
FIGURES = DOCS / "benchmarks.md"
GUIDE = Path(__file__).parent / "README.md"
COMMAND = "python -m benchmarks.report --write"
#: Pictures that the page of figures shows.
PICTURES = ("logits", "hidden", "length", "active")
#: Written by `benchmarks.resources`: {version of Triton: {target: figures}}.
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
    """Return a Markdown table with a line for each preset of an objective.

    The columns: its name, the formula of its policy term, whether ratios are per token or per
    sequence, what the sum of the losses is divided by, and the trainers whose constants are known
    for it (the values of `numerics=`).
    """
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
    """Return a part of an objective as a Python expression.

    Defaults of 0 and infinity are left out, because they switch something off.
    """
    shown = []
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name == "kind":
            shown.append(f'"{value}"')
        elif isinstance(value, float):
            switches_something_off = value == 0 or not math.isfinite(value)
            if value != field.default or not switches_something_off:
                shown.append(f"{field.name}={value:g}")
    return f"{type(part).__name__}({', '.join(shown)})"


# ---- ours and the fastest other

SCALED = "upstream 0.5"  # in names of variants of ours that only the tables show
WITHOUT_PEERS = ("kept",)  # suites of operations that no other project has
#: Least number of rows and ids of the cells that are compared with plain PyTorch. In smaller ones
#: the fixed cost of a call shows (`small_calls`).
PROMISED_ROWS = 64
PROMISED_IDS = 8192
#: Providers of plain PyTorch, by the start of their names.
PLAIN = (EAGER, "pairs in PyTorch", "torch.compile", "torch linear_cross_entropy")
#: {suite: its words in the first table of docs/benchmarks.md}.
FRONT_SUITES = {"logits": "from logits", "hidden": "from hidden states"}
FRONT_ROWS = 1_000  # this number of rows is shown, or the nearest that was measured


class Standing(NamedTuple):
    """The fastest of our rows in a cell, and the fastest correct row of another project."""

    record: Record
    cell: Cell
    ours: Row
    peer: Row

    @property
    def ratio(self) -> float:
        """The time of the other project's row divided by ours. Above 1, ours is faster."""
        return float(self.peer["ms"] / self.ours["ms"])

    @property
    def title(self) -> str:
        """The suite, the dtype and the shape, in words."""
        suite = SUITES[self.record["suite"]].title
        return f"{suite}, {DTYPES[self.cell['dtype']]}, {size(self.cell)}"


def right(cell: Cell) -> list[Row]:
    """Return the rows that were timed and checked: not limits, and not another contract."""
    return [row for row in timed(cell) if "errors" in row]


def standings(folder: Path, machine: str, plain: bool = False) -> list[Standing]:
    """Return the standings of the cells of a machine, the largest speed-up first.

    Cells have at least BATCH rows, PROMISED_IDS ids, and a correct row of ours and of another
    project. With `plain` the other rows are of plain PyTorch, and PROMISED_ROWS rows are enough.
    """
    least_rows = PROMISED_ROWS if plain else BATCH
    all_standings = []
    for suite in SUITES:
        if suite in WITHOUT_PEERS and not plain:
            continue
        record = results.load(folder / machine / f"{suite}.json")
        for cell in record.get("cells", ()):
            ours = [row for row in right(cell) if _is_ours(row)]
            peers = [row for row in right(cell) if not row["name"].startswith(OURS)]
            if plain:
                peers = [row for row in peers if row["name"].startswith(PLAIN)]
            is_large = cell["rows"] >= least_rows and cell["vocab"] >= PROMISED_IDS
            if ours and peers and is_large:
                all_standings.append(Standing(record, cell, _fastest(ours), _fastest(peers)))
    return sorted(all_standings, key=lambda standing: -standing.ratio)


def _is_ours(row: Row) -> bool:
    """Whether a row shows our kernels. The eager backend is for machines without them."""
    return row["name"].startswith(OURS) and "eager backend" not in row["name"]


def _fastest(rows: list[Row]) -> Row:
    """Return the row with the smallest median time."""
    return min(rows, key=lambda row: row["ms"])


def promise(folder: Path, machine: str) -> tuple[bool, str]:
    """Compare all cells of a machine with plain PyTorch.

    Returns whether ours takes at most MOST_TIMES as long in every cell, and a text that lists the
    cells where it takes longer.
    """
    compared = standings(folder, machine, plain=True)
    broken = [standing for standing in reversed(compared) if standing.ratio * MOST_TIMES < 1]
    what = (
        f"of {len(compared)} cells of {PROMISED_ROWS} rows and {PROMISED_IDS:,} ids or more on"
        f" {machine}"
    )
    if not broken:
        kept = (
            "Slower than plain PyTorch (eager, torch.compile, linear_cross_entropy) by more"
            f" than 5 %: none {what}."
        )
        return True, kept
    lines = [f"Slower than plain PyTorch by more than 5 %: {len(broken)} {what}:"]
    for standing in broken:
        spans = f"{_span(standing.ours)}, {_span(standing.peer)}"
        lines.append(f"  {standing.title}: {spans}: {1 / standing.ratio:.2f} times as long")
    lines.append(
        "`python -m grpo_kernels doctor` compares the engines of matmuls that can run here;"
        " GRPO_KERNELS_PRODUCTS chooses another."
    )
    return False, "\n".join(lines)


def _span(row: Row) -> str:
    """Return the name of a row, its median, and its quantiles."""
    quantiles = f"{figure(row['p20'])} to {figure(row['p80'])}"
    return f"{display_name(row['name'])} {figure(row['ms'])} ms ({quantiles})"


# ---- the figure of the README

#: The machine whose result files the README shows, and the suites, from top to bottom.
README_MACHINE = "nvidia-h100-80gb-hbm3"
README_SUITES = ("hidden", "logits")
#: Words in the names of our variants that the README leaves out.
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
        cell = max(candidates, key=lambda candidate: candidate["rows"] * candidate["vocab"])
        rows = [row for row in right(cell) if not any(word in row["name"] for word in VARIANTS)]
        cells[suite] = (record, cell, sorted(rows, key=lambda row: row["ms"]))
    return cells


def readme_figure(folder: Path) -> str:
    """Return the README's picture and the paragraph under it, in Markdown.

    The figures of the paragraph are those of the cell from hidden states, see `readme_cells`.

    folder   of result files
    """
    cells = readme_cells(folder)
    if not cells:
        return absent(*README_SUITES)
    record, cell, _ = cells["hidden"]

    def cost(name: str) -> tuple[str, str]:
        """Return the time in ms and the memory in GB of a provider in `cell`, as text."""
        row = named(cell, name)
        assert row is not None, name
        return f"{figure(row['ms'])} ms", f"{row['extra_mb'] / 1000:.1f} GB"

    ours, our_memory = cost(OURS)
    eager, eager_memory = cost(EAGER)
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
Fast-LLM's kernel is faster ({fast_llm}), but it needs {fast_llm_memory} and rounds the logits to 16 bits. CCE (cut-cross-entropy) has two implementations: that with
`torch.compile` takes {compiled} and {compiled_memory}, and the kernel that skips small gradients needs the least memory, {filtered_memory}, but takes {filtered}. The largest relative error
of a row of a gradient is {max(their_errors):.0e} for eager PyTorch and these three, and {our_error:.0e} for this package. Memory is the peak on top of the inputs, gradients included.
Measured on {record["date"]} with torch {record["machine"]["torch"]} and Triton {versions["triton"]}."""
    path = folder / README_MACHINE / "plots" / "readme.svg"
    link = Path(os.path.relpath(path, README.parent)).as_posix()
    alternative = (
        "Bar charts of time and memory of each implementation, from hidden states and from logits"
    )
    return f"![{alternative}]({link})\n\n{text}"


# ---- the first table of docs/benchmarks.md


def asked(folder: Path, machine: str) -> dict[str, list[Standing]]:
    """Return {description of the line: [its standing]} for the first table.

    The lines are DAPO from logits and from hidden states, in fp32 and bf16, then the largest and
    the smallest speed-up of all cells. A list is empty if there is no such cell.
    """
    all_standings = standings(folder, machine)
    standings_of_lines = {}
    for suite, words in FRONT_SUITES.items():
        for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16")):
            candidates = [
                standing
                for standing in all_standings
                if standing.record["suite"] == suite and standing.cell["dtype"] == dtype
            ]
            candidates.sort(key=_distance_to_front_rows)
            standings_of_lines[f"{words}, {short}"] = candidates[:1]
    return standings_of_lines | {
        "largest speed-up of all cells": all_standings[:1],
        "smallest speed-up of all cells": all_standings[-1:],
    }


def _distance_to_front_rows(standing: Standing) -> tuple[int, int]:
    """Return a sort key: the distance to FRONT_ROWS, then the largest vocabulary comes first."""
    cell = standing.cell
    return abs(cell["rows"] - FRONT_ROWS), -cell["vocab"]


def front(folder: Path) -> str:
    """Return the first table, with every machine that was measured, and its sources and plots.

    folder   of result files
    """
    of_machines = {
        machine: asked(folder, machine)
        for machine in reversed(machines(folder))
        if standings(folder, machine)
    }
    if not of_machines:
        return "Not measured yet: `python -m benchmarks`."
    descriptions = next(iter(of_machines.values()))  # the same for each machine
    all_lines = [
        (words, standing)
        for words in descriptions
        for standings_of_lines in of_machines.values()
        for standing in standings_of_lines[words]
    ]
    # With one machine, its name is in the head of the table. Otherwise it is in every line.
    is_alone = len(of_machines) == 1
    title = "loss and gradient of DAPO"
    if is_alone:
        title += f"; {processor(all_lines[0][1].record)}"
    head = [title, "ours", "fastest other that passes the check against float64", EAGER, "speed-up"]
    lines = [_front_line(words, standing, not is_alone) for words, standing in all_lines]
    table = render([head, *lines], markdown=True)
    # Times and memory are text, so that their columns are aligned to the left.
    table = table.replace("---: | ---: | ---:", "--- | --- | ---", 1)
    note = f"Cells have {FRONT_ROWS:,} rows, or the closest number that was measured."
    sources = dict.fromkeys(f"- {source(standing.record)}" for _, standing in all_lines)
    links = [picture(folder, machine, "front", FIGURES) for machine in of_machines]
    parts = [table, note, "\n".join(sources), *(link for link in links if link)]
    if not machines(folder, "cuda"):
        parts.append(gpus(folder, FIGURES))
    return "\n\n".join(parts)


def _front_line(words: str, standing: Standing, with_machine: bool) -> list[str]:
    """Return a line of the first table: what, ours, the fastest other, eager PyTorch, speed-up.

    words           the description of the line, see `asked`
    with_machine    whether the line names its machine
    """
    cell = standing.cell
    ours = standing.ours
    peer = standing.peer
    what = f"{words}: {standing.title if 'cells' in words else size(cell)}"
    if with_machine:
        what += f"; {processor(standing.record)}"
    variant = ours["name"].removeprefix(OURS).removeprefix(", ")
    eager = named(cell, EAGER)
    return [
        what,
        f"{variant}: {_cost(ours)}" if variant else _cost(ours),
        f"{display_name(peer['name'])}: {_cost(peer)}",
        _cost(eager) if eager else "",
        f"x {standing.ratio:.2f}",
    ]


def _cost(row: Row) -> str:
    """Return time and memory with no-break spaces, so that a number stays with its unit."""
    return f"{figure(row['ms'])}\u00a0ms, {megabytes(row) or '0'}\u00a0MB"


# ---- blocks of pages


def picture(folder: Path, machine: str, name: str, page: Path) -> str:
    """Return a link from a page to a plot, or "" if there is no such plot.

    name    a suite, or "front" for the plot of the first table
    """
    path = folder / machine / "plots" / f"{name}.svg"
    if not path.exists():
        return ""
    if name in SUITES:
        title = SUITES[name].title
    else:
        title = "Time and memory of every implementation, from logits and from hidden states"
    return f"![{title}]({Path(os.path.relpath(path, page.parent)).as_posix()})"


def absent(*suites: str) -> str:
    """Return a sentence that says how to measure missing suites."""
    return f"Not measured yet: `python -m benchmarks --suite {' '.join(suites)}`."


def figures(folder: Path, suite: str, device: str = "cpu") -> str:
    """Return the headline tables of a suite for each machine, and what was not timed in them.

    Without results, returns a sentence that says how to measure them.

    folder   of result files
    device   "cpu" or "cuda"
    """
    parts = []
    shown: list[Cell] = []
    for machine in machines(folder, device):
        record = results.load(folder / machine / f"{suite}.json")
        if record.get("cells"):
            shapes = headline(record)
            parts += [source(record), *map(comparison, shapes)]
            shown += itertools.chain(*shapes)
    return "\n\n".join([*parts, *reasons(shown)]) if parts else absent(suite)


def small_calls(folder: Path, device: str = "cpu") -> str:
    """Return Markdown tables of the times of small calls, in ms, with a line for each vocabulary.

    There is a table for each machine that has the results of both suites.

    device   "cpu" or "cuda"
    """
    parts = []
    for machine in machines(folder, device):
        from_logits = results.load(folder / machine / "small-logits.json")
        from_hidden = results.load(folder / machine / "small-hidden.json")
        if not from_logits.get("cells") or not from_hidden.get("cells"):
            continue
        table = [["ids"]]
        for place in ("from logits", "from hidden states"):
            table[0] += [f"{place}: ours, ms", "eager PyTorch", "torch.compile"]
        # Both suites have the same vocabularies in the same order.
        # An interrupted run may have measured fewer sizes in one suite.
        cells = zip(from_logits["cells"], from_hidden["cells"], strict=False)
        for cells_of_size in cells:
            line = [f"{cells_of_size[0]['vocab']:,}"]
            for cell in cells_of_size:
                ours = _fastest([row for row in right(cell) if _is_ours(row)])
                others = [named(cell, EAGER), named(cell, "torch.compile")]
                line += [figure(row["ms"]) if row else "" for row in (ours, *others)]
            table.append(line)
        parts += [source(from_logits), render(table, markdown=True)]
    return "\n\n".join(parts) if parts else absent("small-logits", "small-hidden")


def pictures(folder: Path, device: str = "cpu", page: Path = FIGURES) -> str:
    """Return links to the plots of the suites PICTURES, in Markdown.

    folder   of result files
    device   "cpu" or "cuda": the machines whose plots are shown
    page     the page that shows the links, which are relative to it
    """
    links = []
    for suite in PICTURES:
        for machine in machines(folder, device):
            link = picture(folder, machine, suite, page)
            if link:
                links.append(link)
    return "\n\n".join(links) or f"No plots yet: `{COMMAND}`."


#: Shown in place of figures as long as no GPU has any. {link} leads to benchmarks/README.md.
NO_GPU = (
    "**No GPU has run this package yet: its compiled kernels run in the tests, in an"
    " emulator of their PTX, which shows neither the last compile step, nor the order of"
    " memory that the hardware keeps, nor any time.** `python3 -m benchmarks.gpu_kit --out"
    " DIR` checks, tunes and measures all of this on one, in four calls of ten minutes:"
    " [benchmarks/README.md]({link})."
)


def gpus(folder: Path, page: Path = FIGURES) -> str:
    """Return the figures of all measured GPUs in Markdown, or how to measure one if there are none.

    folder   of result files
    page     the page that shows the text: links are relative to it
    """
    if not machines(folder, "cuda"):
        return NO_GPU.format(link=Path(os.path.relpath(GUIDE, page.parent)).as_posix())
    tables = []
    for suite in FRONT_SUITES:
        tables.append(f"**{SUITES[suite].title}.** {figures(folder, suite, 'cuda')}")
    return "\n\n".join([*tables, pictures(folder, "cuda", page)])


# ---- other tables


def swapped(record: Record) -> str:
    """Return the table of benchmarks.swaps with its source."""
    return f"{source(record)}\n\n{render(swaps.table(record), markdown=True)}"


def budgets() -> Table:
    """Return the outcomes of benchmarks.resources as a table.

    It has a line for each version of Triton and target, see resources.outcome for the columns.
    """
    record = results.load(BUDGETS)
    table = [
        [
            "Triton",
            "target",
            "kernels",
            "beyond their budgets",
            "most bytes spilled",
            "least KiB in flight",
        ]
    ]
    for version in sorted(record, key=TorchVersion):
        for target, outcome in record[version].items():
            table.append(
                [
                    version,
                    target,
                    str(outcome["kernels"]),
                    "; ".join(outcome["beyond"]) or "0",
                    str(outcome["spilled"]),
                    f"{outcome['in flight']:.0f}",
                ]
            )
    return table


# ---- pages

#: Suites whose tables for CPUs are in docs/benchmarks.md.
SHOWN_SUITES = ("logits", "hidden", "kept", "divergence", "logits-divergence", "draft")


def blocks(folder: Path = RESULTS) -> dict[Path, dict[str, str]]:
    """Return {page: {name of a generated block: its text}}."""
    of_figures = {"front": front(folder)}
    for suite in SHOWN_SUITES:
        of_figures[f"{suite.replace('-', '_')}_cpu"] = figures(folder, suite)
    of_figures["small"] = small_calls(folder)
    of_figures["plots_cpu"] = pictures(folder)
    of_figures["gpus"] = gpus(folder)
    integrations = ROOT / "grpo_kernels" / "integrations" / "README.md"
    return {
        README: {"figure": readme_figure(folder)},
        DOCS / "objectives.md": {"presets": presets()},
        FIGURES: of_figures,
        integrations: {"swaps": swapped(results.load(swaps.FILE))},
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
    """Return the names of the suites that were measured on a machine, in the order of SUITES."""
    files = {name: folder / machine / f"{name}.json" for name in SUITES}
    return [name for name, path in files.items() if results.load(path).get("cells")]


def report(folder: Path = RESULTS) -> str:
    """Return the text of benchmarks/RESULTS.md: every suite on every machine."""
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
    """Yield (page, function that returns its current text) for every generated page."""
    yield REPORT, lambda: report(folder)
    for page, parts in blocks(folder).items():
        yield page, lambda page=page, parts=parts: updated(page, parts)


def updated(page: Path, parts: dict[str, str]) -> str:
    """Return the text of a page with its generated blocks replaced."""
    text = page.read_text()
    for name, block in parts.items():
        text = replace_block(text, page.name, name, block, COMMAND)
    return text


def stale() -> list[Path]:
    """Return the paths that --write would change: pages, pictures, and pictures without results."""
    from benchmarks import plots

    shown = plots.pictures(RESULTS)
    old = [path for path in RESULTS.glob("*/plots/*.svg") if path not in shown]
    for path, picture_of_path in shown.items():
        # The file contains the numbers that it shows.
        if plots.described(picture_of_path) not in html.unescape(path.read_text()):
            old.append(path)
    old += [page for page, current_text in pages() if current_text() != page.read_text()]
    return old


def main(argv: list[str] | None = None) -> None:
    """Run the command with these arguments; None: those of the process."""
    results_help = (
        "folder of result files; of another than the default, --write only makes pictures"
    )
    args = parser_of("benchmarks.report", __doc__, {
        "--write": SWITCH | {"help": "update pictures, README.md, docs/ and benchmarks/RESULTS.md"},
        "--check": SWITCH | {"help": "name what --write would change, and exit with 1 if there is any"},
        "--results": {"type": Path, "default": RESULTS, "help": results_help},
    }).parse_args(argv)  # fmt: skip
    folder = args.results.resolve()
    if args.check:
        old = stale()
        raise SystemExit("\n".join(["out of date:", *map(str, old)]) if old else 0)
    if not args.write:
        print(report(folder))
        return
    from benchmarks import plots

    written = [plots.save(picture, path) for path, picture in plots.pictures(folder).items()]
    if folder == RESULTS:
        for page, current_text in pages():
            page.write_text(current_text())
            written.append(page)
    print("written:", *dict.fromkeys(written), sep="\n")


if __name__ == "__main__":
    main()
