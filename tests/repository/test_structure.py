"""No circle of imports in the package, read from its source: also those of functions, and those for types alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = "grpo_kernels"
Files = dict[str, str]  # path in the package -> text


def imports(path: str, text: str, files: Files, typed: bool) -> Iterator[str]:
    """The files that a file imports, wherever it does. `from .a import b` is an import of a/b.py if that exists, else of a.
    typed: whether those under `if TYPE_CHECKING:` count."""
    folder = Path(NAME, path).parent

    def visit(node: ast.AST) -> Iterator[str]:
        if not typed and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, ast.ImportFrom) or isinstance(node, ast.Import):
            level = getattr(node, "level", 0)
            base = "/".join(folder.parts[: len(folder.parts) + 1 - level]) if level else ""
            module = getattr(node, "module", None)
            inside = "/".join(filter(None, (base, (module or "").replace(".", "/"))))
            names = [f"{inside}/{alias.name}" if module or level else alias.name.replace(".", "/") for alias in node.names]
            for name in names:
                wanted = [f"{part}{end}".removeprefix(f"{NAME}/") for part in (name, inside) for end in (".py", "/__init__.py")]
                yield from [target for target in wanted if target in files][:1]
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(ast.parse(text))


def circles(files: Files, typed: bool = True) -> list[set[str]]:
    """Groups of files that all reach each other, the largest first."""
    edges = {path: {*imports(path, text, files, typed)} for path, text in files.items()}
    reached: dict[str, set[str]] = {}
    for start in files:
        queue, seen = [*edges[start]], set()
        while queue:
            if (at := queue.pop()) not in seen:
                seen.add(at)
                queue += edges[at]
        reached[start] = seen
    found = {frozenset(b for b in reached[a] if a in reached[b]) for a in files}
    return sorted((set(circle) for circle in found if circle), key=len, reverse=True)


PACKAGE = {str(path.relative_to(ROOT / NAME)): path.read_text() for path in sorted((ROOT / NAME).rglob("*.py"))}


def test_imports_have_no_circle() -> None:
    """Neither those that run, inside of functions too, nor those for types alone: both tie files together."""
    assert len(PACKAGE) > 50 and circles(PACKAGE) == []


def test_a_circle_is_seen() -> None:
    files = {
        "__init__.py": "from .user import f\nVERSION = 1",
        "room/__init__.py": "",
        "room/deep.py": "from .. import VERSION",
        "room/other.py": "from . import deep",
        "user.py": "def f():\n    from .room import other\n    import grpo_kernels.above\n    return other",
        "above.py": "import math",
        "types.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import typed",
        "typed.py": "from .types import x",
    }
    assert circles(files) == [{"__init__.py", "room/deep.py", "room/other.py", "user.py"}, {"types.py", "typed.py"}]
    assert circles(files, typed=False) == [{"__init__.py", "room/deep.py", "room/other.py", "user.py"}]
