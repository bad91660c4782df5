"""The README's tables, figures and tree are those of the code, the result files and the repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import tables

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def test_generated_blocks_are_current() -> None:
    text = README.read_text()
    assert tables.insert(text) == text, "run `python -m benchmarks.tables --write`"


def tree() -> list[str]:
    """Paths of the annotated tree, folders with a trailing slash."""
    block = README.read_text().split("## What is where")[1].split("```")[1]
    paths, folders = [], []  # type: list[str], list[tuple[int, str]]
    for line in block.strip("\n").splitlines()[1:]:
        indent, names = re.match(r"( *)(.*?)(?:  +.*)?$", line).groups()  # type: ignore[union-attr]
        folders = [f for f in folders if f[0] < len(indent)]
        parent = folders[-1][1] if folders else ""
        for name in names.split():
            paths.append(parent + name)
            if name.endswith("/"):
                folders.append((len(indent), parent + name))
    return paths


def test_every_path_of_the_tree_exists() -> None:
    missing = [p for p in tree() if not (ROOT / p).exists()]
    assert not missing


def test_every_source_file_is_in_the_tree() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    known = tree()
    # A folder that the tree does not open stands for what is in it.
    closed = [p for p in known if p.endswith("/") and not any(q != p and q.startswith(p) for q in known)]
    absent = [
        f
        for f in listed
        if f not in known and not f.startswith(tuple(closed)) and not f.endswith(("__init__.py", ".gitignore"))
    ]
    assert not absent
