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
    "core/test_sets_and_teachers.py", "core/test_cost.py", "core/test_compile.py",
    "rows/test_row_kernels.py", "rows/test_two_row_kernels.py",
    "rows/test_triton_compiled.py", "rows/test_triton_compile.py", "benchmarks/test_resources.py::test_budgets",
)  # fmt: skip

Record = dict[str, dict[str, dict[str, Any]]]  # part -> line -> fields


# ---- what a run of pytest came to


def outcome(summary: str) -> dict[str, int]:
    """The numbers in the last line that pytest prints; errors are failures."""
    found = {
        word: int(m[1]) if (m := re.search(rf"(\d+) {word}", summary)) else 0
        for word in ("passed", "failed", "error", "skipped")
    }
    found["failed"] += found.pop("error")
    return found


def tested(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """The same of a process, whose failures are printed. SystemExit if it ended before its tests, or found none."""
    lines = done.stdout.strip().splitlines() or [""]
    if done.returncode not in (0, 1) or not (found := outcome(lines[-1]))["passed"] + found["failed"]:
        sys.exit(f"pytest ended with {done.returncode}\n{done.stdout[-6000:]}")
    if found["failed"]:
        print(done.stdout[-12000:], file=sys.stderr)
    return found


# ---- the file


def load(file: Path = FILE) -> Record:
    return json.loads(file.read_text()) if file.exists() else {}


def keep(part: str, lines: dict[str, dict[str, Any]], file: Path = FILE) -> None:
    """These lines, and of the others those that are there already."""
    record = load(file)
    today = datetime.date.today().isoformat()
    record[part] = record.get(part, {}) | {name: fields | {"date": today} for name, fields in lines.items()}
    file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


# ---- the tables


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def environments(lines: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """From the oldest torch to the newest, then what was run."""
    found = sorted(lines, key=lambda line: (numbers(line[1]["torch"]), numbers(line[1]["triton"]), numbers(line[1]["python"])))
    rows = ["environment Python torch triton NumPy wheel passed failed skipped seconds tests date".split()]
    for name, c in found:
        counts = (f"{c[key]:,}" for key in ("passed", "failed", "skipped"))
        what = (c[key] for key in ("python", "torch", "triton", "numpy", "wheel"))
        rows.append([name, *what, *counts, f"{c['seconds']:.0f}", c["tests"], c["date"]])
    parts = {name.partition(".py")[0]: " in part" if "::" in name else "" for name in QUICK}
    quick = ", ".join(f"`{file}`{part}" for file, part in parts.items())
    return f"{render(rows, markdown=True)}\n\nquick: of {quick} so many cases that every value of each parameter occurs. all: every test of the package."


def trainers(lines: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """By trainer, from its newest version to its oldest."""
    newest_first = sorted(lines, key=lambda line: numbers(line[1]["version"]), reverse=True)
    found = sorted(newest_first, key=lambda line: line[1]["trainer"].lower())
    rows = [["trainer", "what ran", "result", "beside", "date"]]
    rows += [[f"{c['trainer']} {c['version']}", c["ran"], c["result"], c["beside"], c["date"]] for _, c in found]
    return text_of(rows)


def text_of(rows: list[list[str]]) -> str:
    return render(rows, markdown=True).replace("---:", "---")


def declared() -> str:
    """What each adapter is written for, by its declaration."""
    rows = [["trainer", "module", "package", "tested with", "functions that are replaced"]]
    for name, adapter in adapters().items():
        homes: dict[str, list[str]] = {}
        for path in adapter.replaces.values():
            paths = [path] if isinstance(path, str) else path
            home = " or ".join(f"`{each.rpartition('.')[0]}`" for each in paths)
            homes.setdefault(home, []).append(f"`{paths[0].rpartition('.')[2]}`")
        replaced = (
            "; ".join(f"{', '.join(names)} of {home}" for home, names in homes.items()) or "none: an object for its own hook"
        )
        rows.append([adapter.trainer, f"`{name}`", f"`{adapter.package}`", ", ".join(adapter.tested) or "-", replaced])
    return text_of(rows)


def configured() -> str:
    """What a configuration names."""
    rows = [["trainer", "what to set", "what it does"]]
    rows += [[adapter.trainer, name, does] for adapter in adapters().values() for name, does in adapter.configured.items()]
    return text_of(rows)


#: Page -> block -> what it shows.
OF_ADAPTERS = {
    ROOT / "grpo_kernels" / "integrations" / "README.md": ("adapters", declared),
    ROOT / "docs" / "adoption.md": ("configured", configured),
}


def of_adapters(page: Path) -> str:
    """The text of a page with its table of adapters replaced."""
    name, table = OF_ADAPTERS[page]
    return replace_block(page.read_text(), page.name, name, table(), COMMAND)


def updated(text: str, record: Record) -> str:
    """The page with its tables replaced."""
    for part, table in (("environments", environments), ("trainers", trainers)):
        text = replace_block(text, PAGE.name, part, table(record.get(part, {}).items()), COMMAND)
    return text


def write(part: str, lines: dict[str, dict[str, Any]]) -> None:
    """Keep these lines and bring the page up to date."""
    keep(part, lines)
    PAGE.write_text(updated(PAGE.read_text(), load()))


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(), load()))
    for page in OF_ADAPTERS:
        page.write_text(of_adapters(page))
