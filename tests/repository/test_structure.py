"""No circle of imports in the package, read from its source: also those of functions, and those for types alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = "grpo_kernels"
Files = dict[str, str]  # path in the package -> text

#: Today's circles, all of them closed by imports under `if TYPE_CHECKING:`. They only get fewer and smaller: a new one, or one more
#: file in one of these, is an error, and so is a file that is not in its circle any more and still stands here.
CIRCLES: list[set[str]] = [
    {
        "__init__.py",
        "divergences.py",
        "head.py",
        "logprobs.py",
        "loss_stages.py",
        "losses.py",
        "model.py",
        "operators.py",
        "options.py",
        "reference.py",
        "supports.py",
        "rows/backends/cpu.py",
        "rows/backends/cpu_divergence.py",
        "rows/backends/cpu_module.py",
        "rows/backends/cpu_products.py",
        "rows/backends/cpu_select.py",
        "rows/backends/cpu_sparse.py",
        "rows/hidden.py",
        "rows/products.py",
        "rows/sampled.py",
        "rows/sources.py",
        "rows/stage.py",
        "rows/teachers.py",
    },
    {
        "batch.py",
        "formulas/filters.py",
        "formulas/token_stage.py",
        "missing.py",
        "objective.py",
        "published.py",
        "rewards/corrections.py",
        "rewards/estimators.py",
        "row_counts.py",
        "sparsity.py",
        "rows/backends/__init__.py",
        "rows/kept.py",
        "rows/selection.py",
        "rows/shard.py",
    },
    {
        "token_set_checks.py",
        "token_set_formats.py",
        "token_set_rules.py",
        "token_sets.py",
    },
]


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


def test_circles_are_those_that_are_known() -> None:
    found = circles(PACKAGE)
    assert not [circle - known for circle, known in zip(found, CIRCLES, strict=False) if circle - known], "a new circle"
    assert found == sorted(CIRCLES, key=len, reverse=True), "a circle is gone or smaller: take its files off the list"


def test_imports_that_run_have_no_circle() -> None:
    """Those inside of functions count: they hide a circle, they do not remove it."""
    assert len(PACKAGE) > 50 and circles(PACKAGE, typed=False) == []


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
