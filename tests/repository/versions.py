"""What ran under which versions: benchmarks/results/versions.json, and the tables of docs/versions.md that are made of it; and
the tables of adapters, on their page and in docs/adoption.md, that are made of what each declares.

`python tests/repository/versions.py` writes all of them again. matrix.py and trainer_versions.py add lines with `--write`."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from benchmarks.results import load  # noqa: E402
from benchmarks.tables import render, replace_block  # noqa: E402
from grpo_kernels.integrations import adapters  # noqa: E402

FILE, PAGE = ROOT / "benchmarks" / "results" / "versions.json", ROOT / "docs" / "versions.md"
COMMAND = "python tests/repository/versions.py"

#: What `matrix.py --quick` runs in an environment, so many cases that every value of each parameter occurs
#: (tests/support/each_value.py): log-probs and losses from logits, from hidden states and over kept sets by the eager and the C++
#: backend, divergences, torch.compile, the C++ kernels alone, Triton's kernels in its interpreter, and the machine code that
#: Triton makes of them, with its budgets.
QUICK = (
    "core/test_objectives.py", "core/test_combinations.py", "core/test_rows.py", "core/test_autograd.py",
    "core/test_cost.py", "core/test_compile.py",
    "rows/test_row_kernels.py", "rows/test_two_row_kernels.py",
    "rows/test_triton_compiled.py", "rows/test_triton_compile.py", "benchmarks/test_resources.py::test_budgets",
)  # fmt: skip

Record = dict[str, dict[str, Any]]  # line -> fields


# ---- what a run of pytest came to


def outcome(summary: str) -> dict[str, int]:
    """The numbers in the last line that pytest prints; errors are failures."""
    found = {word: sum(map(int, re.findall(rf"(\d+) {word}", summary))) for word in ("passed", "failed", "error", "skipped")}
    return found | {"failed": found["failed"] + found.pop("error")}


def tested(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """The same of a process, whose failures are printed. SystemExit if it ended before its tests, or found none."""
    found = outcome((done.stdout.strip().splitlines() or [""])[-1])
    if done.returncode not in (0, 1) or not found["passed"] + found["failed"]:
        sys.exit(f"pytest ended with {done.returncode}\n{done.stdout[-6000:]}")
    if found["failed"]:
        print(done.stdout[-12000:], file=sys.stderr)
    return found


# ---- the tables


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def environments(lines: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """From the oldest torch to the newest, then what was run."""
    found = sorted(lines, key=lambda line: [numbers(line[1][key]) for key in ("torch", "triton", "python")])
    rows = ["environment Python torch triton NumPy wheel passed failed skipped seconds tests date".split()]
    for name, c in found:
        shown = (
            "{python}|{torch}|{triton}|{numpy}|{wheel}|{passed:,}|{failed:,}|{skipped:,}|{seconds:.0f}|{tests}|{date}".format(
                **c
            )
        )
        rows.append([name, *shown.split("|")])
    parts = [f"`{name.partition('.py')[0]}`" + " in part" * ("::" in name) for name in QUICK]
    quick = (
        f"quick: of {', '.join(parts)} so many cases that every value of each parameter occurs. all: every test of the package."
    )
    return f"{render(rows, markdown=True)}\n\n{quick}"


def trainers(lines: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """By trainer, from its newest version to its oldest."""
    newest_first = sorted(lines, key=lambda line: numbers(line[1]["version"]), reverse=True)
    found = sorted(newest_first, key=lambda line: line[1]["trainer"].lower())
    rows = [["trainer", "what ran", "result", "beside", "date"]]
    return text_of(rows + [[f"{c['trainer']} {c['version']}", c["ran"], c["result"], c["beside"], c["date"]] for _, c in found])


def text_of(rows: list[list[str]]) -> str:
    return render(rows, markdown=True).replace("---:", "---")


def declared() -> str:
    """What each adapter is written for, by its declaration."""
    rows = [["trainer", "module", "package", "tested with", "functions that are replaced"]]
    for name, adapter in adapters().items():
        homes: dict[str, list[str]] = {}
        for path in adapter.replaces.values():
            places = [each.rpartition(".") for each in ([path] if isinstance(path, str) else path)]
            homes.setdefault(" or ".join(f"`{home}`" for home, _, _ in places), []).append(f"`{places[0][2]}`")
        replaced = "; ".join(f"{', '.join(names)} of {home}" for home, names in homes.items())
        rows.append([
            adapter.trainer, f"`{name}`", f"`{adapter.package}`", ", ".join(adapter.tested) or "-",
            replaced or "none: an object for its own hook",
        ])  # fmt: skip
    return text_of(rows)


def configured() -> str:
    """What a configuration names."""
    rows = [["trainer", "what to set", "what it does"]]
    rows += [[adapter.trainer, name, does] for adapter in adapters().values() for name, does in adapter.configured.items()]
    return text_of(rows)


# ---- the file and the pages


def blocks() -> dict[Path, dict[str, str]]:
    """{page: {name: text}} of what stands between a page's markers."""
    record = load(FILE)
    return {
        PAGE: {"environments": environments(record["environments"].items()), "trainers": trainers(record["trainers"].items())},
        ROOT / "grpo_kernels" / "integrations" / "README.md": {"adapters": declared()},
        ROOT / "docs" / "adoption.md": {"configured": configured()},
    }


def write(part: str = "trainers", lines: Record | None = None) -> None:
    """Keep these lines, of today, beside the others that are there, and bring the pages up to date."""
    record, today = load(FILE), datetime.date.today().isoformat()
    record[part] |= {name: fields | {"date": today} for name, fields in (lines or {}).items()}
    FILE.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    for page, parts in blocks().items():
        for name, text in parts.items():
            page.write_text(replace_block(page.read_text(), page.name, name, text, COMMAND))


if __name__ == "__main__":
    write()
