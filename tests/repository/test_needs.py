"""Every need has its proof: the tests that tests/repository/needs.py names exist, and tests/README.md is up to date."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import needs
import pytest
from needs import NEEDS, Need

ROOT = Path(__file__).parents[2]


@cache
def functions(path: Path) -> frozenset[str]:
    """Those at the top of a file: what pytest collects, what a stage or a check is."""
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def missing(need: Need) -> list[str]:
    """The named tests and sentences that do not exist."""
    found = []
    for name in (*need.proof.split(), *need.gpu.split()):
        path, function = needs.file_of(name), name.partition("::")[2]
        if not path.is_file() or (function and function not in functions(path)):
            found.append(name)
    for file, sentence in need.says:
        if plain(sentence) not in plain((ROOT / file).read_text()):
            found.append(f"{file}: {sentence}")
    return found


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.breaks)
def test_what_is_named_exists(need: Need) -> None:
    assert need.proof.split() and not missing(need)


def test_what_does_not_exist_is_missed() -> None:
    assert missing(Need("", "", "test_needs test_needs::test_what_does_not_exist_is_missed")) == []
    for need in (
        Need("", "", "test_needs::test_nothing"),
        Need("", "", "test_nothing"),
        Need("", "", "test_needs", gpu="benchmarks/gpu_stages.py::nothing"),
        Need("", "", "test_needs", says=(("README.md", "It makes coffee."),)),
    ):
        assert len(missing(need)) == 1, need


def test_proofs_run() -> None:
    """A named test is one that pytest collects, is run by one, or belongs to those for a GPU."""
    for need in NEEDS:
        for name in need.proof.split():
            file, _, function = name.partition("::")
            if file.startswith("test_"):
                assert not function or function.startswith("test_"), name
            else:
                runners = [p for p in needs.TESTS.rglob("test_*.py") if p.stem != "test_needs" and file in p.read_text()]
                assert runners and function, name


def test_every_need_is_there_once_and_somebody_had_it() -> None:
    titles = [need.breaks for need in NEEDS]
    assert len(set(titles)) == len(titles) == 48
    for need in NEEDS:
        assert need.seen.split() and all(needs.thread(name) for name in need.seen.split()), need.breaks
        for name in need.seen.split():
            project = name.partition("#")[0]
            assert "/" in project or project in needs.PROJECTS, name


def test_the_page_is_current() -> None:
    assert needs.PAGE.read_text() == needs.page(), "run `python tests/repository/needs.py`"
    for file in re.findall(r"\]\(\.\./([^)]+)\)", needs.page()):
        assert (ROOT / file).is_file(), file
