"""Every public name documents each of its parameters, in a form that can be converted to Markdown."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from reference import MODULES, markdown, members, public


def documentation(holder: Any, module: ModuleType) -> str:
    """Its docstring, and those of what it refers to by a name in backquotes."""
    own = inspect.getdoc(holder) or ""
    referred = (getattr(module, name, None) for name in re.findall(r"`(\w+)`", own))
    # Of a string or a number that is not the object's own.
    return "\n".join([own, *(inspect.getdoc(other) or "" for other in referred if isinstance(other, Callable))])  # type: ignore[arg-type]


def undocumented(parameters: Any, text: str) -> list[str]:
    return [name for name in parameters if not name.startswith("_") and name != "self" and not re.search(rf"\b{name}\b", text)]


def gaps(module: ModuleType) -> Iterator[str]:
    """A parameter may be explained by its function, its class, the method that this one overrides, or for a whole module
    of functions of one signature by the module."""
    for name, value in public(module).items():
        if not callable(value) or not getattr(value, "__module__", "").startswith("grpo_kernels"):
            continue
        home = sys.modules[value.__module__]
        shared = home.__doc__
        if not inspect.getdoc(value):
            yield f"{name}: no docstring"
        fields = [*inspect.signature(value).parameters]
        # A field may have a comment (#:) of its own above it.
        commented = re.findall(r"#:.*\n +(\w+):", inspect.getsource(home)) if hasattr(value, "__annotations__") else []
        text = documentation(value, home)
        yield from (f"{name}: {p}" for p in undocumented(fields, f"{text}\n{shared}") if p not in commented)
        if isinstance(value, type):
            for member, holder, function in members(value):
                inherited = [getattr(base, member, None) for base in value.__mro__[1:]]
                about = "\n".join(inspect.getdoc(x) or "" for x in (holder, *inherited))
                if not about.strip():
                    yield f"{name}.{member}: no docstring"
                signature = inspect.signature(function).parameters
                yield from (
                    f"{name}.{member}: {p}" for p in undocumented(signature, f"{about}\n{text}\n{shared}") if p != "cls"
                )


@pytest.mark.parametrize("name", MODULES)
def test_every_parameter_is_documented(name: str) -> None:
    if name.endswith(".trl"):
        pytest.importorskip("trl")
    module = importlib.import_module(name)
    assert module.__doc__
    assert not list(gaps(module))


def test_lists_of_parameters_become_lists_of_markdown() -> None:
    text = """What it is.

        level   "a": one
                line more
                "b-c"   nested
                        and more
                of level again
        beta, kl  weights [B], of <name>, in `<code>`

        Raises ValueError."""
    assert markdown(text) == (
        'What it is.\n\n- **level**: "a": one\n  line more\n    - **"b-c"**: nested\n      and more\n\n    of level again\n\n- **beta, kl**: weights [B], of &lt;name>, in `<code>`\n\nRaises ValueError.'
    )
