"""The shape of the package, read from its source with `ast`: which module imports which, and sizes.

A rule is a function from a package (its files as text) to the list of what breaks it. Each rule is tried on the package, where it
must find nothing, and on a made-up package that breaks it, where it must find exactly that."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
NAME = "grpo_kernels"
Files = dict[str, str]  # path from the root -> text

MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 650, 70, 12

#: Functions that may be longer: a kernel in one piece, and a signature that is Liger's.
LONG_FUNCTIONS = {
    "vocabulary/backends/triton_kernels.py: _fused_kernel",
    "vocabulary/backends/triton_divergence_kernels.py: _two_pull_kernel",
    "integrations/liger.py: triton_grpo_loss",
}

#: Signatures that may be longer.
LONG_SIGNATURES = {
    # Kernels, and what is compiled into them: one parameter for each pointer, stride and option.
    "vocabulary/backends/triton_kernels.py: _stats_kernel",
    "vocabulary/backends/triton_kernels.py: _pull_kernel",
    "vocabulary/backends/triton_kernels.py: _fused_kernel",
    "vocabulary/backends/triton_rows.py: _fold",
    "vocabulary/backends/triton_rows.py: _softmax_partials",
    "vocabulary/backends/triton_gradient.py: _write_tile",
    "vocabulary/backends/triton_gradient.py: _write_gradient",
    "vocabulary/backends/triton_sparse_kernels.py: _add_hidden_rows_kernel",
    "vocabulary/backends/triton_select_kernels.py: _select_kernel",
    "vocabulary/backends/triton_divergence_kernels.py: _two_stats_kernel",
    "vocabulary/backends/triton_divergence_kernels.py: _mixed_kernel",
    "vocabulary/backends/triton_divergence_kernels.py: _two_pull_kernel",
    "vocabulary/backends/triton_divergence_kernels.py: _partials_of_two",
    "vocabulary/backends/triton_divergence_kernels.py: _pulled",
    "formulas/token_stage.py: token_terms",
    # Signatures of other packages, which ours stand in for.
    "integrations/liger.py: triton_grpo_loss",
    "integrations/liger.py: LigerFusedLinearGRPOLoss.__init__",
    "integrations/liger.py: LigerFusedLinearGRPOLoss.forward",
    "integrations/openrlhf.py: PolicyLoss.__init__",
    "integrations/trl_distillation.py: divergence_loss",
    "integrations/unsloth.py: selective_log_softmax",
    "integrations/unsloth.py: log_softmax_and_entropy",
    # A public function: every option of published advantages is a keyword.
    "rewards/advantages.py: group_advantages",
    # The doors: what was a keyword before there were specs goes on to be one.
    "losses.py: linear_grpo_loss",
    "model.py: loss_from_model",
    "logprobs.py: token_logprobs",
    "logprobs.py: linear_logprobs",
}


@pytest.fixture(scope="module")
def package() -> Files:
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / NAME).rglob("*.py"))}


# ---- what a file imports


class Import(NamedTuple):
    names: tuple[str, ...]  # absolute: what it can mean, the most specific first
    line: int
    in_function: bool


def module_of(path: str) -> str:
    """Its name: "grpo_kernels/a/__init__.py" is "grpo_kernels.a"."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str, text: str) -> Iterator[Import]:
    """All imports of a file that run, which those under `if TYPE_CHECKING:` do not."""
    module = module_of(path)
    above = module if path.endswith("__init__.py") else module.rpartition(".")[0]

    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            children: list[ast.AST] = [*node.orelse]
        else:
            children = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.Import):
            yield from (Import((alias.name,), node.lineno, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = above.split(".")
            base = ".".join(parts[: len(parts) + 1 - node.level]) if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            yield from (Import((f"{base}.{alias.name}", base), node.lineno, in_function) for alias in node.names)
        in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in children:
            yield from visit(child, in_function)

    yield from visit(ast.parse(text), False)


def own_imports(package: Files) -> dict[str, list[tuple[str, Import]]]:
    """path -> (path of the imported file of the package, import). `from a import b` is an import of a/b.py if that exists, else
    of a."""
    files = {module_of(path): path for path in package}
    found: dict[str, list[tuple[str, Import]]] = {path: [] for path in package}
    for path, text in package.items():
        for one in imports(path, text):
            target = next((files[name] for name in one.names if name in files), None)
            if target is not None:
                found[path].append((target, one))
    return found


def reached(start: str, edges: dict[str, set[str]]) -> set[str]:
    """All files that `start` imports, by way of others too."""
    seen: set[str] = set()
    queue = [*edges[start]]
    while queue:
        at = queue.pop()
        if at not in seen:
            seen.add(at)
            queue += edges[at]
    return seen


def room(path: str) -> str:
    """ "training" of "grpo_kernels/training/trainer.py", and "" of a file of no room."""
    return Path(path).parts[1] if len(Path(path).parts) > 2 else ""


def short(path: str) -> str:
    return path.removeprefix(f"{NAME}/")


# ---- rules about imports


def no_circle(package: Files) -> list[str]:
    """Imports inside functions count: they hide a circle, they do not remove it."""
    edges = {path: {target for target, _ in found} for path, found in own_imports(package).items()}
    return [short(path) for path in package if path in reached(path, edges)]


def no_import_in_a_function(package: Files) -> list[str]:
    """Of the package's own modules. The command line may: `doctor` must not need what `train` needs."""
    return [
        f"{short(path)}:{one.line}"
        for path, found in own_imports(package).items()
        for _, one in found
        if one.in_function and short(path) != "__main__.py"
    ]


def nobody_imports_the_trainer(package: Files) -> list[str]:
    return [
        f"{short(path)}:{one.line}"
        for path, found in own_imports(package).items()
        for target, one in found
        if room(target) == "training" and room(path) != "training" and short(path) != "__main__.py"
    ]


def the_vocabulary_stage_knows_no_loss(package: Files) -> list[str]:
    """Where formulas are compiled into a kernel, they are imported."""
    return [
        f"{short(path)}:{one.line}"
        for path, found in own_imports(package).items()
        for target, one in found
        if room(path) == "vocabulary"
        and not short(path).startswith(("vocabulary/backends/triton", "vocabulary/backends/cpu.py"))
        if room(target) == "formulas" or short(target) == "objective.py"
    ]


def the_core_needs_torch_alone(package: Files) -> list[str]:
    """At import time, of all that `import grpo_kernels` imports."""
    at_import = {path: {target for target, one in found if not one.in_function} for path, found in own_imports(package).items()}
    start = f"{NAME}/__init__.py"
    allowed = {*sys.stdlib_module_names, "torch", NAME}
    return [
        f"{short(path)}: {one.names[-1]}"
        for path in sorted({start} | reached(start, at_import))
        for one in imports(path, package[path])
        if not one.in_function and one.names[-1].partition(".")[0] not in allowed
    ]


# ---- rules about what reaches memory by its address


def asserts_only_narrow_types(package: Files) -> list[str]:
    """`python -O` leaves asserts out: what a wrong argument or a wrong tensor would break is raised. An assert tells mypy what is
    true anyway: that something is not None, or of what type it is."""

    def narrows(test: ast.expr) -> bool:
        if isinstance(test, ast.BoolOp):
            return isinstance(test.op, ast.And) and all(map(narrows, test.values))
        if isinstance(test, ast.Compare):
            return isinstance(test.ops[0], ast.IsNot) and ast.unparse(test.comparators[0]) == "None"
        return isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"

    return [
        f"{short(path)}:{node.lineno}"
        for path, text in package.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assert) and not narrows(node.test)
    ]


def addresses_are_taken_behind_checks(package: Files) -> list[str]:
    """Files that call the compiled module take addresses from the functions of cpu_module.py, which check the tensors."""
    files = {short(path): text for path, text in package.items()}
    return [
        path
        for path, text in files.items()
        if re.search(r"\b_cpu\b", text) and "data_ptr" in text and path != "vocabulary/backends/cpu_module.py"
    ]


# ---- rules about sizes


def functions(package: Files) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """("room/file.py: Class.name", its tree), of methods and functions inside functions too."""

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}" if name else child.name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield inner, child
            yield from visit(child, inner)

    for path, text in package.items():
        yield from ((f"{short(path)}: {name}", function) for name, function in visit(ast.parse(text), ""))


def short_files(package: Files) -> list[str]:
    return [short(path) for path, text in package.items() if len(text.splitlines()) > MAX_LINES]


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    def lines(node: ast.stmt) -> int:
        assert node.end_lineno is not None
        return node.end_lineno - node.lineno + 1

    return lines(function) - (lines(function.body[0]) if ast.get_docstring(function) is not None else 0)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    return len(given.posonlyargs + given.args + given.kwonlyargs)


def short_functions(package: Files) -> list[str]:
    long = [name for name, function in functions(package) if lines_without_docstring(function) > MAX_FUNCTION_LINES]
    return [name for name in long if name not in LONG_FUNCTIONS]


def short_signatures(package: Files) -> list[str]:
    long = [name for name, function in functions(package) if parameters(function) > MAX_PARAMETERS]
    return [name for name in long if name not in LONG_SIGNATURES]


# ---- each rule on the package, and on a made-up package that breaks it

LONG_BODY = '    """Says\n    a lot."""\n' + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
MANY = ", ".join(f"a{i}" for i in range(MAX_PARAMETERS))

BROKEN: dict[Callable[[Files], list[str]], tuple[Files, list[str]]] = {
    no_circle: (
        {
            "__init__.py": "from .user import f\nVERSION = 1",
            "room/__init__.py": "",
            "room/deep.py": "from .. import VERSION",
            "room/other.py": "from . import deep",
            "user.py": "def f():\n    from .room import other\n    return other",
            "above.py": "from .user import f",
            "types.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import typed",
            "typed.py": "from . import types",
        },
        ["__init__.py", "room/deep.py", "room/other.py", "user.py"],
    ),
    no_import_in_a_function: (
        {
            "__init__.py": "",
            "a.py": "import math\ndef f():\n    import torch, json\n    return math",
            "b.py": "class B:\n    def f(self):\n        from .a import f\n",
            "c.py": "def f():\n    if 1:\n        import grpo_kernels.a",
            "__main__.py": "def main():\n    from . import a",
        },
        ["b.py:3", "c.py:3"],
    ),
    nobody_imports_the_trainer: (
        {
            "training/__init__.py": "",
            "training/loop.py": "from . import data",
            "training/data.py": "",
            "__main__.py": "from .training import loop",
            "losses.py": "import math\nfrom .training.loop import step",
            "rewards/a.py": "def f():\n    from ..training import data",
        },
        ["losses.py:2", "rewards/a.py:2"],
    ),
    the_vocabulary_stage_knows_no_loss: (
        {
            "objective.py": "",
            "formulas/__init__.py": "",
            "formulas/kl.py": "",
            "vocabulary/rows.py": "from ..formulas import kl",
            "vocabulary/backends/eager.py": "import math\nfrom ...objective import Objective",
            "vocabulary/backends/cpu_module.py": "import typing\nif typing.TYPE_CHECKING:\n    from ...objective import Objective",
            "vocabulary/backends/cpu.py": "from ...formulas import kl",
            "vocabulary/backends/triton_formulas.py": "from ...formulas import kl",
        },
        ["vocabulary/rows.py:1", "vocabulary/backends/eager.py:2"],
    ),
    the_core_needs_torch_alone: (
        {
            "__init__.py": "from .a import f",
            "a.py": "import torch.nn\nfrom .b import g\ndef f():\n    import numpy",
            "b.py": "try:\n    from triton.language import exp\nexcept ImportError:\n    pass",
            "adapter.py": "import trl",
        },
        ["b.py: triton.language"],
    ),
    asserts_only_narrow_types: (
        {
            "a.py": "assert x is not None\nassert isinstance(x, int) and y is not None, x",
            "b.py": "assert x > 0\nassert x is not None or y\nif x:\n    assert x is None",
        },
        ["b.py:1", "b.py:2", "b.py:4"],
    ),
    addresses_are_taken_behind_checks: (
        {
            "vocabulary/backends/cpu_module.py": "_cpu = load()\ndef vector(x):\n    return x.data_ptr()",
            "vocabulary/backends/cpu.py": "from .cpu_module import _cpu, vector\n_cpu.stats(vector(x))",
            "vocabulary/backends/cpu_sparse.py": "from .cpu_module import _cpu\n_cpu.add(x.data_ptr())",
            "vocabulary/overlap.py": "x.data_ptr()",
        },
        ["vocabulary/backends/cpu_sparse.py"],
    ),
    short_files: (
        {"long.py": "x = 1\n" * (MAX_LINES + 1), "fits.py": "x = 1\n" * MAX_LINES},
        ["long.py"],
    ),
    short_functions: (
        {
            "a.py": f"class A:\n    x = 1\ndef fits():\n{LONG_BODY}\ndef long():\n{LONG_BODY}    x = 2\n",
            "integrations/liger.py": f"def triton_grpo_loss():\n{LONG_BODY}    x = 2\n",
        },
        ["a.py: long"],
    ),
    short_signatures: (
        {
            "a.py": f"class A:\n    def fits({MANY}): ...\n    def long(self, {MANY}): ...\ndef key(*, {MANY}, last=1): ...",
            "formulas/token_stage.py": f"def token_terms({MANY}, last): ...",
        },
        ["a.py: A.long", "a.py: key"],
    ),
}


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_rule(rule: Callable[[Files], list[str]], package: Files) -> None:
    assert len(package) > 50 and f"{NAME}/__init__.py" in package
    assert rule(package) == []


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_a_rule_detects_a_violation(rule: Callable[[Files], list[str]]) -> None:
    files, expected = BROKEN[rule]
    assert rule({f"{NAME}/{path}": text for path, text in files.items()}) == expected


def test_files_of_the_benchmarks_are_short() -> None:
    files = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "benchmarks").rglob("*.py")}
    assert len(files) > 20 and short_files(files) == []


def test_exceptions_are_still_needed(package: Files) -> None:
    """A name that no longer breaks its rule has to leave the list."""
    found = dict(functions(package))
    assert {name for name in LONG_FUNCTIONS if lines_without_docstring(found[name]) <= MAX_FUNCTION_LINES} == set()
    assert {name for name in LONG_SIGNATURES if parameters(found[name]) <= MAX_PARAMETERS} == set()


def test_the_files_that_start_first_exist() -> None:
    """tests/conftest.py names them."""
    (tuple_,) = re.findall(r"^LONG = \((.*?)^\)", (ROOT / "tests" / "conftest.py").read_text(), re.DOTALL | re.MULTILINE)
    names = re.findall(r'"(.+?)"', tuple_)
    assert len(names) > 5 and [name for name in names if not (ROOT / "tests" / name).is_file()] == []
