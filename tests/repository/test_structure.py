"""No circle of imports in the package, read from its source: also those of functions, and those for
types alone. And the planted faults of tests/faults.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

from faults import FAULTS

ROOT = Path(__file__).parents[2]
NAME = "grpo_kernels"
Files = dict[str, str]  # path in the package -> text


def imports(path, text, files):
    """The files that a file imports, wherever it does.

    `from .a import b` is an import of a/b.py if that exists, else of a.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            level, module = (
                getattr(node, "level", 0),
                (getattr(node, "module", None) or "").split("."),
            )
            base = Path(NAME, path).parts[:-level] if level else ()
            for alias in node.names:
                inside = Path(*base, *module)
                for part in (inside.joinpath(*alias.name.split(".")), inside):
                    wanted = (
                        [
                            str(part.relative_to(NAME) / "__init__.py"),
                            f"{part.relative_to(NAME)}.py",
                        ]
                        if NAME in part.parts[:1]
                        else []
                    )
                    if known := [target for target in wanted if target in files]:
                        yield known[0]
                        break


def circles(files):
    """Groups of files that all reach each other, the largest first."""
    reached = {path: {*imports(path, text, files)} for path, text in files.items()}
    for between in files:  # paths through each file in turn
        for path in files:
            reached[path] |= reached[between] if between in reached[path] else set()
    found = {frozenset(b for b in reached[a] if a in reached[b]) for a in files}
    return sorted((set(circle) for circle in found if circle), key=len, reverse=True)


PACKAGE = {
    str(path.relative_to(ROOT / NAME)): path.read_text()
    for path in sorted((ROOT / NAME).rglob("*.py"))
}


def test_imports_have_no_circle():
    """Neither those that run, inside of functions too, nor those for types alone:

    both tie files together.
    """
    assert len(PACKAGE) > 50 and circles(PACKAGE) == []


def test_a_circle_is_seen():
    files = {
        "__init__.py": "from .user import f\nVERSION = 1",
        "room/__init__.py": "",
        "room/deep.py": "from .. import VERSION",
        "room/other.py": "from . import deep",
        "user.py": (
            "def f():\n    from .room import other\n    import grpo_kernels.above\n    return other"
        ),
        "above.py": "import math",
        "types.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import typed",
        "typed.py": "from .types import x",
    }
    assert circles(files) == [
        {"__init__.py", "room/deep.py", "room/other.py", "user.py"},
        {"types.py", "typed.py"},
    ]


def test_each_fault_changes_one_place():
    """The faults that prove the tests' power still fit the code."""
    assert FAULTS and all(fault.old != fault.new for fault in FAULTS)
    assert not [fault for fault in FAULTS if (ROOT / fault.file).read_text().count(fault.old) != 1]
    assert not [
        fault for fault in FAULTS for name in fault.tests.split() if not (ROOT / name).is_file()
    ]
