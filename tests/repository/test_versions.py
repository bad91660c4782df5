"""The tables of docs/versions.md are what their result file says, and the environments cover what the package asks for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trainer_versions
import versions
from matrix import ENVIRONMENTS, quick, same
from versions import ROOT

from grpo_kernels._version import __version__
from support import each_value

PROJECT = (ROOT / "pyproject.toml").read_text()


def test_the_page_says_what_the_file_says() -> None:
    record = versions.load()
    assert set(record) <= {"environments", "trainers"}
    text = versions.PAGE.read_text()
    assert versions.updated(text, record) == text
    for cell in record["environments"].values():
        assert f"| {cell['torch']} | {cell['triton']} |" in text


def test_the_oldest_and_every_python_that_is_asked_for_have_an_environment() -> None:
    asked = {name: re.search(rf'"{name}>=([\d.]+)', PROJECT)[1] for name in ("torch", "triton")}  # type: ignore[index]
    oldest = ENVIRONMENTS["oldest"]
    assert same(oldest.torch, asked["torch"]) and same(str(oldest.triton), asked["triton"])
    assert {e.python for e in ENVIRONMENTS.values()} == set(re.findall(r"Python :: (3\.\d+)", PROJECT))
    assert oldest.python == re.search(r'requires-python = ">=([\d.]+)"', PROJECT)[1]  # type: ignore[index]


def test_the_selection_is_of_files_that_are_there() -> None:
    adapters = [f"integrations/test_{file}.py" for trainer in trainer_versions.TRAINERS.values() for file in trainer.files]
    for name in (*versions.QUICK, *adapters):
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text() if test else (ROOT / "tests" / file).is_file(), name


class Item:
    """What each_value.py reads of a test."""

    path = Path("test_it.py")

    def __init__(self, name: str, **params: object) -> None:
        self.nodeid = f"test_it.py::{name}[{'-'.join(map(str, params.values()))}]"
        self.callspec = SimpleNamespace(params=params)


def test_the_quick_selection_is_every_value_of_each_parameter() -> None:
    values = [object() for _ in range(3)], [object() for _ in range(4)]
    items = [Item("test_product", a=a, b=b) for a in values[0] for b in values[1]] + [Item("test_alone")]
    left_out: list[Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    kept = list(items)
    each_value.pytest_collection_modifyitems(SimpleNamespace(hook=hook), kept)  # type: ignore[arg-type]
    assert len(kept) == 5 and kept[-1] is items[-1]
    assert sorted(map(id, [*kept, *left_out])) == sorted(map(id, items))
    params = [item.callspec.params for item in kept[:-1]]
    assert {p["a"] for p in params} == set(values[0]) and {p["b"] for p in params} == set(values[1])


def test_the_changelog_names_the_version() -> None:
    """Between releases what comes is "Unreleased"; in a release that is empty, and the newest heading is its number."""
    log = (ROOT / "CHANGELOG.md").read_text()
    (newest, changes), *_ = re.findall(r"^## \[(.+?)\](.*?)(?=^## )", log, re.MULTILINE | re.DOTALL)
    assert newest == "Unreleased"
    number, _, between = __version__.partition(".dev")
    if between:
        assert f"What becomes {number}.\n" in changes and "\n### Moving from " in changes and f"## [{number}]" not in log
    else:
        assert not changes.strip() and re.findall(r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$", log, re.MULTILINE)[0] == number


def test_without_triton_no_single_test_is_asked_for() -> None:
    """Its file skips itself there, and pytest ends with an error."""
    every, bare = quick(ENVIRONMENTS["newest"]), quick(ENVIRONMENTS["bare"])
    assert every == [f"tests/{name}" for name in versions.QUICK] and any("::" in name for name in every)
    assert bare == [name for name in every if "::" not in name]


@pytest.mark.parametrize(
    ("summary", "passed", "failed", "skipped"),
    [
        ("812 passed, 3 skipped in 61.02s (0:01:01)", 812, 0, 3),
        ("2 failed, 810 passed, 1 warning in 3s", 810, 2, 0),
        ("1 passed, 2 errors in 3s", 1, 2, 0),
        ("4 deselected in 3s", 0, 0, 0),
    ],
)
def test_the_last_line_of_a_run(summary: str, passed: int, failed: int, skipped: int) -> None:
    assert versions.outcome(summary) == {"passed": passed, "failed": failed, "skipped": skipped}


@pytest.mark.parametrize(
    ("status", "text"), [(2, "1 error in 1s"), (5, "3 skipped in 1s"), (0, "3 skipped in 1s"), (-9, ""), (0, "")]
)
def test_a_run_that_tested_nothing_is_no_line(status: int, text: str) -> None:
    with pytest.raises(SystemExit, match=f"ended with {status}"):
        versions.tested(subprocess.CompletedProcess([], status, text))


def test_failures_are_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.CompletedProcess([], 1, "E  values differ\n1 failed, 5 passed in 1s\n")
    assert versions.tested(done) == {"passed": 5, "failed": 1, "skipped": 0}
    assert "values differ" in capsys.readouterr().err


def cell(torch: str, triton: str = "3.9.0", **changed: Any) -> dict[str, Any]:
    counts = {"passed": 1200, "failed": 0, "skipped": 4, "seconds": 61.2}
    line = {"python": "3.11.7", "torch": torch, "triton": triton, "numpy": "-", "wheel": "cp311-cp311", "tests": "quick"}
    return line | counts | changed


def test_a_line_replaces_its_former_self_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "versions.json"
    versions.keep("environments", {"old": cell("2.9.0"), "new": cell("2.10.0")}, file)
    versions.keep("trainers", {"trl 1": {"version": "1"}}, file)
    versions.keep("environments", {"old": cell("2.9.1", failed=7)}, file)
    found = versions.load(file)
    assert found["environments"]["old"]["torch"] == "2.9.1" and found["environments"]["new"]["torch"] == "2.10.0"
    assert found["trainers"]["trl 1"]["version"] == "1" and found["trainers"]["trl 1"]["date"]
    table = versions.environments(found["environments"].items()).splitlines()
    assert [row.split(" | ")[2] for row in table[2:4]] == ["2.9.1", "2.10.0"]  # by number, not by letter
    assert "| cp311-cp311 | 1,200 | 7 | 4 | 61 | quick |" in table[2]


def test_versions_begin_with_what_was_asked_for() -> None:
    assert same("2.13.0+cpu", "2.13.0") and same("3.11.7", "3.11") and same("-", "-")
    assert not same("2.1.0", "2.10.0") and not same("3.9.0", "-") and not same("-", "3.9.0")


def test_trainers_newest_first() -> None:
    lines = {
        v: {"trainer": t, "version": v, "ran": "", "result": "", "beside": "", "date": ""}
        for t, v in (("verl", "0.9.1"), ("TRL", "1.4.0"), ("TRL", "1.16.0"))
    }
    shown = re.findall(r"^\| (\w+ [\d.]+) ", versions.trainers(lines.items()), re.MULTILINE)
    assert shown == ["TRL 1.16.0", "TRL 1.4.0", "verl 0.9.1"]


def test_a_folder_without_a_known_trainer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "else-1.0.dist-info").mkdir()
    with pytest.raises(SystemExit, match="no folder with the metadata of a known trainer"):
        trainer_versions.line(str(tmp_path), [])
