"""No inline function that is compiled for several processors is visible outside its file. Of visible copies the linker would
keep any one, and a processor could then run instructions that it lacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"

#: What begins a block that functions may stand in.
SCOPE = re.compile(r"\b(namespace|struct|class|union|enum)\b[^;{}()]*$")


def compiled_per_processor() -> list[Path]:
    """The sources of `add_kernels`, and the headers that they include."""
    cmake = (ROOT / "CMakeLists.txt").read_text()
    kernels = cmake[cmake.index("function(add_kernels") :]
    found = [CSRC.parent / name for name in dict.fromkeys(re.findall(r"csrc/\w+\.cpp", kernels))]
    for path in found:
        for name in re.findall(r'#include "(\w+\.h)"', path.read_text()):
            if CSRC / name not in found:
                found.append(CSRC / name)
    return found


def visible_functions(source: str) -> list[str]:
    """The heads of functions with a body that other files' copies could replace: inline, members or templates, not static, not
    in an unnamed namespace and not inlined always."""
    source = re.sub(r"//.*|\\\n|^\s*#.*", "", source, flags=re.M)
    found, scopes, start = [], [], 0
    for match in re.finditer(r"[{};]", source):
        head, start = source[start : match.start()].strip(), match.end()
        if match[0] == "}":
            scopes.pop()
        elif match[0] == "{":
            hidden = any(scope == "namespace" or scope == "body" for scope in scopes)
            if SCOPE.search(head):
                scopes.append(" ".join(head.split()))
                continue
            member = bool(scopes) and not scopes[-1].startswith("namespace")
            shared = member or "inline" in head.split() or head.startswith("template")
            kept = "static" in head.split() and not member
            if "(" in head and not hidden and shared and not kept and "always_inline" not in head:
                found.append(" ".join(head.split()))
            scopes.append("body")
    return found


def test_the_check_detects_visible_functions() -> None:
    assert visible_functions("namespace a { inline int f(int x) { return x; } }") == ["inline int f(int x)"]
    assert visible_functions("struct A { int x; int f() const { return x; } };") == ["int f() const"]
    assert visible_functions("template <class T> T f(T x) { if (x) { return x; } return x; }") == [
        "template <class T> T f(T x)"
    ]
    assert not visible_functions(
        "namespace a { namespace { inline int f() { return 1; } struct A { int g() { return 2; } }; } }"
    )
    assert not visible_functions("static inline int f() { return 1; } int g() { return 2; } enum A { B }; const int c[] = {1};")
    assert not visible_functions("[[gnu::always_inline]] inline int f() { return 1; }")


@pytest.mark.parametrize("path", compiled_per_processor(), ids=lambda path: path.name)
def test_no_function_is_shared_between_processors(path: Path) -> None:
    assert visible_functions(path.read_text()) == []
