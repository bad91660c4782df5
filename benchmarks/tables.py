"""Everything in README.md that is generated, and benchmarks/RESULTS.md: presets from the code, figures from result files.

    python -m benchmarks.tables [--write] [--results DIR]

Prints the README's blocks and the report, or writes both. Tests compare them with the code and the files."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.harness import RESULTS
from benchmarks.roofline import estimate, given, render
from benchmarks.suites import SUITES
from grpo_kernels.formulas.surrogates import PolicyGradient
from grpo_kernels.presets import NUMERICS, PRESETS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
REPORT = Path(__file__).parent / "RESULTS.md"

Record = dict[str, Any]  # a result file, see results.py
Cell = dict[str, Any]
Row = dict[str, Any]

OURS, EAGER = "grpo_kernels", "eager PyTorch"
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
#: What a suite varies: (field of a cell, what it is).
SWEEPS = {
    "rows": ("rows", "rows"),
    "vocab": ("vocab", "vocabulary"),
    "active": ("active", "share of sequences with an advantage"),
    "length": ("rows", "tokens in the batch (one sequence from 65,536 on)"),
}
#: Pictures that the README shows.
PICTURES = ("logits", "hidden", "length", "active")


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
        policy = ", ".join(f"`{_call(part)}`" for part in (objective.surrogate, *objective.filters))
        level = "no ratio" if isinstance(objective.surrogate, PolicyGradient) else objective.level
        aggregate = f"{objective.aggregate} (over {DENOMINATORS[objective.aggregate]})"
        trainers = ", ".join(trainer for trainer, known in NUMERICS.items() if name in known)
        rows.append([f"`{name}`", policy, level, aggregate, trainers])
    return render(rows, markdown=True).replace("---:", "---")


def _call(part: Any) -> str:
    """The expression that makes it: its class and its numbers, without defaults that switch something off."""
    shown = []
    for f in fields(part):
        value = getattr(part, f.name)
        if f.name == "kind":
            shown.append(f'"{value}"')
        elif isinstance(value, float) and (value != f.default or (value and math.isfinite(value))):
            shown.append(f"{f.name}={value:g}")
    return f"{type(part).__name__}({', '.join(shown)})"


# ---- parts of a result file


def machines(folder: Path) -> list[str]:
    """The folders that hold result files, the CPU's first."""
    found = {path.parent.name for path in folder.glob("*/*.json")}
    return sorted(found, key=lambda name: (name != "cpu", name))


def shapes(record: Record) -> list[list[Cell]]:
    """The cells, those of one shape together: they differ in their dtype."""
    found: dict[tuple, list[Cell]] = {}
    for cell in record["cells"]:
        found.setdefault((cell["rows"], cell["hidden"], cell["vocab"], cell["active"]), []).append(cell)
    return list(found.values())


def headline(record: Record) -> list[Cell]:
    """The cells of one shape: the first with rows enough for a training batch."""
    every = shapes(record)
    return next((cells for cells in every if cells[0]["rows"] >= 256), every[0])


def size(cell: Cell) -> str:
    return " x ".join(f"{cell[x]:,}" for x in ("rows", "hidden", "vocab") if cell[x])


def fixed(cell: Cell, varied: str) -> str:
    """The shape without what a suite varies."""
    letters = (("N", "rows"), ("H", "hidden"), ("V", "vocab"))
    return ", ".join(f"{letter} = {cell[x]:,}" for letter, x in letters if x != varied)


def limit(cell: Cell) -> str:
    """The name of what times are divided by."""
    return cell["limit"]["name"].split(",")[0] if cell["limit"] else EAGER


def ratio(cell: Cell, row: Row) -> float | None:
    """The time of a row divided by that of the limit, or by that of eager PyTorch where there is no limit."""
    if cell["limit"]:
        return row["ms"] / cell["limit"]["ms"]
    base = next((r["ms"] for r in cell["providers"] if r["name"] == EAGER and r["status"] == "ok"), None)
    return row["ms"] / base if base else None


def reasons(cells: list[Cell], what: str = "dtype") -> str:
    """The providers that were not timed, one line per reason. Their cells are named by the field `what`, unless it is all
    of them. "" if all were timed."""
    found: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        mark = DTYPES[cell["dtype"]] if what == "dtype" else f"{cell[what]:,}"
        for row in cell["providers"]:
            if row["status"] != "ok":
                found.setdefault(f"{row['status']}, {row['reason']}", {}).setdefault(row["name"], []).append(mark)
    return "".join(f"\n- {reason}: {named(names, len(cells))}" for reason, names in found.items())


def named(names: dict[str, list[str]], every: int) -> str:
    """The providers, each with its cells, unless it is all of them."""
    return "; ".join(name if len(marks) == every else f"{name} [{', '.join(marks)}]" for name, marks in names.items())


def source(record: Record, packages: bool = False) -> str:
    """The machine and the command of a result file, in a line."""
    m = record["machine"]
    parts = [m["name"]] if m["device"] == "cuda" else [m["name"], f"{m['threads']} threads"]
    parts += [m["instruction set"]] if "instruction set" in m else []
    parts += [f"torch {m['torch']}"]
    if packages:
        parts += [f"{name} {version}" for name, version in m["versions"].items()]
    return f"{', '.join(parts)}; {record['date']}; `{record['command']}`."


# ---- numbers


def figure(x: float | None, digits: int = 3) -> str:
    """`digits` significant digits, all of those before the point."""
    if x is None:
        return ""
    places = digits - 1 - math.floor(math.log10(abs(x))) if x else 0
    return f"{x:,.{max(0, places)}f}"


def times(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}" if x < 100 else f"{x:.0f}"


def megabytes(row: Row) -> str:
    return "" if row.get("extra_mb") is None else f"{row['extra_mb']:,.0f}"


def worst(row: Row) -> str:
    return f"{max(row['errors'].values()):.0e}" if row.get("errors") else ""


# ---- tables


def comparison(cells: list[Cell]) -> str:
    """Cells of one shape side by side: the providers that were timed, then the reasons of the others."""
    head = [size(cells[0])]
    for cell in cells:
        head += [f"{DTYPES[cell['dtype']]} ms", f"x {limit(cell)}", "extra MB"]
    head.append("worst error " + " / ".join(DTYPES[cell["dtype"]] for cell in cells))
    lines = [head]
    for name in dict.fromkeys(row["name"] for cell in cells for row in cell["providers"]):
        line, errors, label = [], [], name
        for cell in cells:
            row = next((r for r in cell["providers"] if r["name"] == name and r["status"] == "ok"), None)
            line += ["", "", ""] if row is None else [figure(row["ms"]), times(ratio(cell, row)), megabytes(row)]
            errors.append(worst(row) if row else "")
            if row and row.get("limit"):
                label = f"{name} (limit)"
        if any(line):
            lines.append([label, *line, " / ".join(e for e in errors if e)])
    return render(lines, markdown=True) + _without(reasons(cells))


def details(cell: Cell) -> str:
    """A cell with everything that was measured of it."""
    timed = [row for row in cell["providers"] if row["status"] == "ok"]
    rates = {
        "gbps_1u": "GB/s (1U)",
        "gbps_2u": "GB/s (2U)",
        "gbps_3u": "GB/s (3U)",
        "tflops": f"TFLOP/s ({next((r['flop_convention'] for r in timed if 'flop_convention' in r), '')})",
        "tflops_dense": "as if dense",
    }
    rates = {key: head for key, head in rates.items() if any(key in row for row in timed)}
    errors = list(dict.fromkeys(name for row in timed for name in row.get("errors", {})))
    head = [
        f"{size(cell)}, {DTYPES[cell['dtype']]}", "ms", "p20", "p80", "runs", f"x {limit(cell)}", "x copy", *rates.values(), "% of limit",
        "extra MB", *(f"error of {name}" for name in errors), "compiles", "syncs",
    ]  # fmt: skip
    lines = [head]
    for row in timed:
        x = ratio(cell, row)
        lines.append(
            [
                row["name"] + (" (limit)" if row.get("limit") else ""),
                *(figure(row[key]) for key in ("ms", "p20", "p80")),
                str(row["runs"]),
                times(x),
                times(row.get("x_copy")),
                *(figure(row.get(key)) for key in rates),
                f"{100 / x:.0f}" if x and cell["limit"] else "",
                megabytes(row),
                *(f"{row['errors'][name]:.0e}" if name in row.get("errors", {}) else "" for name in errors),
                *("" if row.get(key) is None else str(row[key]) for key in ("compiles", "syncs")),
            ]
        )
    kept = [i for i in range(len(head)) if i == 0 or any(line[i] for line in lines[1:])]
    return render([[line[i] for i in kept] for line in lines], markdown=True) + _without(reasons([cell]))


def _without(lines: str) -> str:
    return f"\n\nNot timed:\n{lines}" if lines else ""


def sweep(record: Record) -> str:
    """Times and memory by what the suite varies, a table per dtype."""
    field, what = SWEEPS[record["suite"]]
    out = []
    for dtype in dict.fromkeys(cell["dtype"] for cell in record["cells"]):
        cells = [cell for cell in record["cells"] if cell["dtype"] == dtype]
        names = list(dict.fromkeys(row["name"] for cell in cells for row in cell["providers"]))
        values = [f"{cell[field]:,g}" if field == "active" else f"{cell[field]:,}" for cell in cells]
        for unit, show in (("ms (x limit)", _time_cell), ("extra MB", lambda cell, row: megabytes(row))):
            lines = [[f"{unit} by {what}, {DTYPES[dtype]}, {fixed(cells[0], field)}", *values]]
            for name in names:
                rows = [next((r for r in cell["providers"] if r["name"] == name), None) for cell in cells]
                line = [
                    "" if row is None else show(cell, row) if row["status"] == "ok" else row["status"]
                    for cell, row in zip(cells, rows, strict=True)
                ]
                limiting = any(row and row.get("limit") for row in rows)
                if any(row and row["status"] == "ok" for row in rows) and not (limiting and unit == "extra MB"):
                    lines.append([name + (" (limit)" if limiting else ""), *line])
            out.append(render(lines, markdown=True))
        out[-1] += _without(reasons(cells, field))
    return "\n\n".join(out)


def _time_cell(cell: Cell, row: Row) -> str:
    return f"{figure(row['ms'])} ({times(ratio(cell, row))})"


def picture(folder: Path, machine: str, suite: str, page: Path) -> str:
    """A link from a page to the suite's plot; "" if there is none."""
    path = folder / machine / "plots" / f"{suite}.svg"
    return f"![{SUITES[suite].title}]({Path(os.path.relpath(path, page.parent)).as_posix()})" if path.exists() else ""


def absent(suite: str, device: str = "") -> str:
    return f"Not measured yet: `python -m benchmarks --suite {suite}{device}`."


# ---- the README's blocks


def figures(folder: Path, machine: str, suite: str) -> str:
    """The headline table of a suite on one machine."""
    record = results.load(folder / machine / f"{suite}.json")
    return f"{source(record)}\n\n{comparison(headline(record))}" if record.get("cells") else absent(suite)


def pictures(folder: Path, machine: str) -> str:
    links = [picture(folder, machine, suite, README) for suite in PICTURES]
    return "\n\n".join(link for link in links if link) or "No plots yet: `python -m benchmarks.plots`."


def gpus(folder: Path) -> str:
    """Both contracts on every GPU that was measured."""
    found = [name for name in machines(folder) if name != "cpu"]
    if not found:
        return (
            "**No GPU has been measured yet, so there is no GPU figure here.** `python -m benchmarks.gpu_kit --out DIR` "
            "checks, tunes and measures all of this on one, in ten minutes."
        )
    return "\n\n".join(
        f"**{SUITES[suite].title}.** {figures(folder, name, suite)}" for name in found for suite in ("logits", "hidden")
    ) + "".join(f"\n\n{pictures(folder, name)}" for name in found)


def estimate_h200() -> str:
    rates = given("", 4.8, 989)
    columns = [estimate(8192, 4096, 151936, 0.75 * rates.copy, 0.75 * rates.flops["bfloat16"], a) for a in (1.0, 0.5, 0.2)]
    head = ["estimated ms, by the share a of rows with a gradient", "a = 1", "a = 0.5", "a = 0.2"]
    return render([head, *([name, *(f"{c[name]:.1f}" for c in columns)] for name in columns[0])], markdown=True)


def blocks(folder: Path = RESULTS) -> dict[str, str]:
    """{name: text} of what stands between the README's markers."""
    return {
        "presets": presets(),
        "logits_cpu": figures(folder, "cpu", "logits"),
        "hidden_cpu": figures(folder, "cpu", "hidden"),
        "kept_cpu": figures(folder, "cpu", "kept"),
        "plots_cpu": pictures(folder, "cpu"),
        "gpus": gpus(folder),
        "estimate_h200": estimate_h200(),
    }


COMMAND = "python -m benchmarks.tables --write"


def marked(name: str, command: str = COMMAND) -> tuple[str, str]:
    return f"<!-- {name}: generated by `{command}` -->", f"<!-- end of {name} -->"


def replace_block(text: str, page: str, name: str, block: str, command: str = COMMAND) -> str:
    """The page with what stands between the markers of `name` replaced."""
    start, end = marked(name, command)
    head, _, rest = text.partition(start)
    _, found, tail = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} lacks the markers of {name}: {start} ... {end}")
    return f"{head}{start}\n{block}\n{end}{tail}"


def insert(text: str, folder: Path = RESULTS) -> str:
    """The README with every block replaced by what the code and the result files say now."""
    for name, block in blocks(folder).items():
        text = replace_block(text, README.name, name, block)
    return text


# ---- the report

INTRODUCTION = """# Results

Generated by `python -m benchmarks.tables --write` from the files in `results/`; `python -m benchmarks` measures them.

All contenders of a table run interleaved in one process, each checked against float64 first: implementations that fail the
check are not timed. `ms` is the median of `runs`, `p20` and `p80` are quantiles. The limit is what the hardware needs for
the least that the contract asks for, measured in the same run: one read and one write of the logits (a copy, or in place),
or the bare matrix products; the fastest counts. GB/s count the logits read (1U), read and written once (2U), or read twice
and written (3U), whatever a contender really moves; TFLOP/s count the products that are due (N rows, H hidden size, V
vocabulary, a the share of rows with a gradient). `extra MB` is the peak beyond the inputs, results included. The error of
the loss is relative to the mean absolute advantage, those of log-probs and entropies are the largest, those of gradients
relative in the Euclidean norm: of all rows, and of the worst row; of a model's gradients that of the worst parameter.
`compiles` counts compilations at three further row counts after the first, `syncs` waits of the host for a GPU."""


def report(folder: Path = RESULTS) -> str:
    """benchmarks/RESULTS.md: every suite on every machine."""
    out = [INTRODUCTION]
    for machine in machines(folder) or ["cpu"]:
        out.append(f"## {machine}")
        for name, suite in SUITES.items():
            record = results.load(folder / machine / f"{name}.json")
            out.append(f"### {suite.title}")
            if not record.get("cells"):
                out.append(absent(name))
                continue
            out += [f"{record['contract'][0].upper()}{record['contract'][1:]}.", source(record, packages=True)]
            out.append(picture(folder, machine, name, REPORT))
            out += [sweep(record)] if name in SWEEPS else [details(cell) for cell in record["cells"]]
    if not any(name != "cpu" for name in machines(folder)):
        out += ["## GPUs", gpus(folder)]
    return "\n\n".join(part for part in out if part) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update README.md and benchmarks/RESULTS.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    args = parser.parse_args(argv)
    folder = args.results.resolve()
    if args.write:
        README.write_text(insert(README.read_text(), folder))
        REPORT.write_text(report(folder))
    else:
        for name, block in blocks(folder).items():
            print(f"{name}\n{block}\n")
        print(report(folder))


if __name__ == "__main__":
    main()
