"""Checks of the source for mistakes that no quick run on a CPU would show. See tests/README.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "grpo_kernels").rglob("*.py"))


def program_ids(tree: ast.AST) -> Iterator[tuple[ast.Call, ast.AST]]:
    """Calls of `program_id`, each with the node around it."""
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, ast.Call) and getattr(child.func, "attr", None) == "program_id":
                yield child, parent


def cast_to_64_bit(call: ast.Call, parent: ast.AST, tree: ast.AST) -> bool:
    """`call.to(tl.int64)`"""
    return isinstance(parent, ast.Attribute) and any(
        isinstance(node, ast.Call) and node.func is parent and parent.attr == "to" and ast.unparse(node.args[0]) == "tl.int64"
        for node in ast.walk(tree)
    )


def test_program_ids_are_64_bit_and_on_the_axis_that_has_room() -> None:
    """A row number times a stride is beyond 2^31 in real batches, and axes 1 and 2 of a grid end at 65 535."""
    found = 0
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for call, parent in program_ids(tree):
            found += 1
            where = f"{path.name}:{call.lineno}"
            assert ast.unparse(call.args[0]) == "0", where
            assert cast_to_64_bit(call, parent, tree), where
    assert found >= 4  # a kernel each for statistics, gradients, the fused loss, scaling


@pytest.mark.parametrize("source", ["tl.program_id(0) * stride", "tl.program_id(0).to(tl.int32) * stride", "tl.program_id(0)"])
def test_a_program_id_of_32_bits_is_seen(source: str) -> None:
    tree = ast.parse(f"row = {source}")
    ((call, parent),) = program_ids(tree)
    assert not cast_to_64_bit(call, parent, tree)


def test_no_atomics_and_nothing_that_tunes_itself() -> None:
    """Without these, the order of sums and the choice of tiles are the same in every run and for every number of rows."""
    for path in SOURCES:
        words = re.findall(r"\b(?:atomic_\w+|autotune|heuristics)\b", path.read_text())
        assert not words, (path.name, words)


def test_kernels_are_launched_on_the_device_of_their_data() -> None:
    """Which need not be the current one."""
    tree = ast.parse((ROOT / "grpo_kernels" / "vocabulary" / "backends" / "triton.py").read_text())

    def launches(node: ast.AST) -> list[ast.AST]:
        return [x for x in ast.walk(node) if isinstance(x, ast.Call) and getattr(x.func, "id", None) == "run"]

    guarded = [
        call
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and ast.unparse(node.items[0]).startswith("on_device(")
        for call in launches(node)
    ]
    assert len(launches(tree)) >= 4 and {id(x) for x in guarded} == {id(x) for x in launches(tree)}


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_kernels_hardly_take_shared_memory(target: str) -> None:
    """GPUs lend a program 48 KiB and more. These exchange a few numbers a row, so no GPU is too small for a tile."""
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    from benchmarks.launches import QUICK
    from benchmarks.resources import report
    from grpo_kernels.vocabulary.backends import triton as backend

    if not isinstance(backend._stats_kernel, JITFunction):
        pytest.skip("TRITON_INTERPRET=1: there is nothing to compile")
    taken = [report(target, case).shared for case in QUICK]
    assert 0 < max(taken) <= 1024


def test_no_upper_pins() -> None:
    """Of what the package itself needs: an upper bound would hold back the torch of a whole environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w.-]+", line)[0] for line in project["dependencies"]]  # type: ignore[index]
    assert set(names) <= {"torch", "triton"}
    for requirement in project["dependencies"]:
        assert not re.search(r"<|==|~=", requirement.split(";")[0]), requirement
