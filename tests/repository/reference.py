"""The contents of the API reference: the modules that users import, their public names, and docstrings as Markdown.

`make docs` draws it (docs/api/, docs/site_docstrings.py); test_api_reference.py checks that it is whole."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

PACKAGE = "grpo_kernels"
#: The modules that users import.
MODULES = (
    PACKAGE,
    *(
        f"{PACKAGE}.{name}"
        for name in (
            "objective",
            "formulas.surrogates",
            "formulas.kl",
            "formulas.filters",
            "rewards.advantages",
            "rewards.returns",
            "rewards.corrections",
            "rewards.entropy",
            "distributed",
            "head",
            "losses",
            "integrations.areal",
            "integrations.liger",
            "integrations.liger_slot",
            "integrations.nemo_rl",
            "integrations.openrlhf",
            "integrations.prime_rl",
            "integrations.skyrl",
            "integrations.slime",
            "integrations.trl",
            "integrations.trl_head",
            "integrations.unsloth",
            "integrations.verl",
        )
    ),
)
#: `name, name   text`, the form of lists of parameters in docstrings; what follows it, further in, belongs to it.
ENTRY = re.compile(r"(?P<names>[\w\"<>:-]+(?:, [\w\"-]+)*(?: \[[^]]*\])?) {2,}(?P<text>\S.*)")

#: A < that would begin a tag, outside of backquotes.
ANGLE = re.compile(r"<(?=[a-zA-Z/])(?=[^`]*(?:`[^`]*`[^`]*)*$)")


def public(module: ModuleType) -> dict[str, Any]:
    """The functions, classes and upper-case constants that a module defines; what the package exports, if it is the package."""
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in module.__all__}
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (getattr(value, "__module__", None) == module.__name__ and isinstance(value, (FunctionType, type)))
    }


def members(cls: type) -> Iterator[tuple[str, Any, FunctionType]]:
    """(name, what holds the docstring, the function below it) of the public methods and properties that a class defines."""
    for name, value in vars(cls).items():
        function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
        if not name.startswith("_") and isinstance(function, FunctionType) and function.__module__ == cls.__module__:
            yield name, value if isinstance(value, property) else function, function


def markdown(text: str) -> str:
    """Lists of parameters as lists of Markdown; code, which is indented by four, as it is."""
    lines: list[str] = []
    within = -1  # the column where the text of the list's last entry begins
    nested = paragraph = False  # whether the last line is of an entry within an entry, of a second paragraph of an entry
    for line in inspect.cleandoc(text).splitlines():
        indent = len(line) - len(line.lstrip())
        if within >= 0 or indent < 4:
            line = ANGLE.sub("&lt;", line)
        entry = ENTRY.fullmatch(line.strip())
        if entry and (indent == 0 or indent == within):
            if lines and lines[-1] and not indent and (within < 0 or paragraph):
                lines.append("")
            lines.append(f"{'    ' * (indent > 0)}- **{entry['names']}**: {entry['text']}")
            within, nested, paragraph = (within, True, False) if indent else (entry.start("text"), False, False)
        elif nested and indent == within:  # of the outer entry again
            lines += ["", f"    {line.strip()}"]
            nested, paragraph = False, True
        elif within >= 0 and indent:
            lines.append(f"{'    ' * (nested or paragraph)}  {line.strip()}")
        else:
            lines += [""] * bool(within >= 0 and line and lines[-1]) + [line]
            within, nested, paragraph = (within if not line else -1), False, False
    return "\n".join(lines)
