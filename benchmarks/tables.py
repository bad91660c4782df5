"""Everything in README.md and docs/ that is generated, and benchmarks/RESULTS.md: presets from the code, figures from result files.

    python -m benchmarks.tables [--write] [--results DIR]

Prints the blocks and the report, or writes both. Tests compare them with the code and the files."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks import front, results
from benchmarks.cell_tables import SWEEPS, comparison, details, headline, machines, multiples, source, sweep
from benchmarks.harness import RESULTS
from benchmarks.printing import render, replace_block
from benchmarks.roofline import estimate, given
from benchmarks.suites import SUITES
from grpo_kernels.formulas.surrogates import PolicyGradient
from grpo_kernels.presets import NUMERICS, PRESETS

ROOT = Path(__file__).parent.parent
README, FIGURES, OBJECTIVES = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "objectives.md"
DIVERGENCES = ROOT / "docs" / "divergences.md"
REPORT = Path(__file__).parent / "RESULTS.md"

#: Pictures that the page of figures shows.
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


def presets_by_surrogate() -> str:
    """The presets' names only, grouped by their surrogate."""
    by_surrogate: dict[str, list[str]] = {}
    for name, objective in PRESETS.items():
        by_surrogate.setdefault(type(objective.surrogate).__name__, []).append(f"`{name}`")
    several = {surrogate: names for surrogate, names in by_surrogate.items() if len(names) > 1}
    alone = {surrogate: names for surrogate, names in by_surrogate.items() if len(names) == 1}
    rows = [["policy term", "presets"], *([f"`{surrogate}`", ", ".join(names)] for surrogate, names in several.items())]
    rows.append(["one each: " + ", ".join(f"`{surrogate}`" for surrogate in alone), ", ".join(n for (n,) in alone.values())])
    return render(rows, markdown=True).replace("---:", "---")


def _call(part: Any) -> str:
    """The Python expression of a part of an objective: its class and its numbers, without defaults that switch something off."""
    shown = []
    for f in fields(part):
        value = getattr(part, f.name)
        if f.name == "kind":
            shown.append(f'"{value}"')
        elif isinstance(value, float) and (value != f.default or (value and math.isfinite(value))):
            shown.append(f"{f.name}={value:g}")
    return f"{type(part).__name__}({', '.join(shown)})"


# ---- suites


def picture(folder: Path, machine: str, name: str, page: Path) -> str:
    """A link from a page to the plot of a suite, or to the front; "" if there is none."""
    path = folder / machine / "plots" / f"{name}.svg"
    title = SUITES[name].title if name in SUITES else "Time and memory of every implementation in two cells of the table"
    return f"![{title}]({Path(os.path.relpath(path, page.parent)).as_posix()})" if path.exists() else ""


def absent(suite: str, device: str = "") -> str:
    return f"Not measured yet: `python -m benchmarks --suite {suite}{device}`."


# ---- blocks of pages


def figures(folder: Path, suite: str, device: str = "cpu") -> str:
    """The headline tables of a suite, with all machines that were measured side by side."""
    records = (results.load(folder / name / f"{suite}.json") for name in machines(folder, device))
    found = [record for record in records if record.get("cells")]
    return "\n\n".join([*map(source, found), *map(comparison, headline(*found))]) if found else absent(suite)


def divergences(folder: Path) -> str:
    """Every direction from hidden states, as multiples of the limit, a table for each CPU that was measured."""
    suites = {"reverse": "divergence", "forward": "divergence-forward", "jsd": "divergence-jsd"}
    parts = []
    for name in machines(folder, "cpu"):
        records = {what: results.load(folder / name / f"{suite}.json") for what, suite in suites.items()}
        measured = {what: record for what, record in records.items() if record.get("cells")}
        parts += [source(next(iter(measured.values()))), multiples(measured)] if measured else []
    return "\n\n".join(parts) or absent(" ".join(suites.values()))


def pictures(folder: Path, device: str = "cpu", page: Path = FIGURES) -> str:
    links = [picture(folder, name, suite, page) for suite in PICTURES for name in machines(folder, device)]
    return "\n\n".join(link for link in links if link) or "No plots yet: `python -m benchmarks.plots`."


def gpus(folder: Path, page: Path = FIGURES) -> str:
    """Both contracts on every GPU that was measured."""
    if not machines(folder, "cuda"):
        guide = Path(os.path.relpath(ROOT / "docs" / "gpu.md", page.parent)).as_posix()
        return (
            "**No GPU has run this package yet: its compiled kernels run in the tests, in an emulator of their PTX, which shows neither "
            "the last compile step, nor the order of memory that the hardware keeps, nor any time.** `python3 -m benchmarks.gpu_kit --out "
            f"DIR` checks, tunes and measures all of this on one, in four calls of ten minutes: [docs/gpu.md]({guide})."
        )
    tables = [f"**{SUITES[suite].title}.** {figures(folder, suite, 'cuda')}" for suite in ("logits", "hidden")]
    return "\n\n".join([*tables, pictures(folder, "cuda", page)])


def estimate_h200() -> str:
    rates = given("", 4.8, 989)
    columns = [estimate(8192, 4096, 151936, 0.75 * rates.copy, 0.75 * rates.flops["bfloat16"], a) for a in (1.0, 0.5, 0.2)]
    head = ["estimated ms, by the share a of rows with a gradient", "a = 1", "a = 0.5", "a = 0.2"]
    return render([head, *([name, *(f"{c[name]:.1f}" for c in columns)] for name in columns[0])], markdown=True)


def front_block(folder: Path) -> str:
    """Our strongest and our weakest cell on every machine that was measured, GPUs first."""
    names = [name for name in reversed(machines(folder)) if front.standings(folder, name)]
    if not names:
        return "Not measured yet: `python -m benchmarks`."
    links = [picture(folder, name, front.NAME, README) for name in names]
    without = [] if machines(folder, "cuda") else [gpus(folder, README)]
    return "\n\n".join([*filter(None, links), front.table(folder, names), front.sources(folder, names), *without])


def blocks(folder: Path = RESULTS) -> dict[Path, dict[str, str]]:
    """{page: {name: text}} of what stands between a page's markers."""
    return {
        README: {"front": front_block(folder), "presets_by_surrogate": presets_by_surrogate()},
        OBJECTIVES: {"presets": presets()},
        DIVERGENCES: {
            "divergences_cpu": divergences(folder),
            "logits_divergence_cpu": figures(folder, "logits-divergence"),
        },
        FIGURES: {
            "logits_cpu": figures(folder, "logits"),
            "hidden_cpu": figures(folder, "hidden"),
            "cross_entropy_cpu": figures(folder, "cross-entropy"),
            "kept_cpu": figures(folder, "kept"),
            "plots_cpu": pictures(folder),
            "gpus": gpus(folder),
            "estimate_h200": estimate_h200(),
        },
    }


COMMAND = "python -m benchmarks.tables --write"


def updated(page: Path, folder: Path = RESULTS) -> str:
    """The page with every block replaced by what the code and the result files say now."""
    text = page.read_text()
    for name, block in blocks(folder)[page].items():
        text = replace_block(text, page.name, name, block, COMMAND)
    return text


# ---- the report

INTRODUCTION = """# Results

Generated by `python -m benchmarks.tables --write` from the files in `results/`; `python -m benchmarks` measures them.

All contenders of a table run interleaved in one process, each checked against float64 first: implementations that fail the
check are not timed. `ms` is the median of `runs`, `p20` and `p80` are quantiles. The limit is what the hardware needs for
the least that the contract asks for, measured in the same run: one read and one write of the logits (a copy, or in place),
or the bare matrix products, each by the fastest way known (torch.mm, oneDNN, ours, ours in chunks). Where the runs of a contender are of two
kinds, such as with and without page faults, both times are shown with their shares. GB/s count the logits read (1U), read and written once (2U), or read twice
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
    if not machines(folder, "cuda"):
        out += ["## GPUs", gpus(folder, REPORT)]
    return "\n\n".join(part for part in out if part) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update README.md, docs/ and benchmarks/RESULTS.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    args = parser.parse_args(argv)
    folder = args.results.resolve()
    if args.write:
        for page, text in {page: updated(page, folder) for page in blocks(folder)}.items():
            page.write_text(text)
        REPORT.write_text(report(folder))
    else:
        for page, blocks_of_page in blocks(folder).items():
            for name, block in blocks_of_page.items():
                print(f"{page.name}: {name}\n{block}\n")
        print(report(folder))


if __name__ == "__main__":
    main()
