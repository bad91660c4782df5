"""Docstrings as Markdown, for the API reference:

an extension of griffe, which mkdocstrings reads them with.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

#: `name, name   text`, the form of lists of parameters in docstrings; what follows it, further in,
#:               belongs to it.
ENTRY = re.compile(r"(?P<names>[\w\"<>:-]+(?:, [\w\"-]+)*(?: \[[^]]*\])?) {2,}(?P<text>\S.*)")

#: A < that would begin a tag, outside of backquotes.
ANGLE = re.compile(r"<(?=[a-zA-Z/])(?=[^`]*(?:`[^`]*`[^`]*)*$)")


def markdown(text: str) -> str:
    """Lists of parameters as lists of Markdown; code, which is indented by four, as it is."""
    lines: list[str] = []
    within = -1  # the column where the text of the list's last entry begins
    nested = paragraph = (
        # whether the last line is of an entry within an entry, of a second paragraph of an entry
        False
    )
    for line in inspect.cleandoc(text).splitlines():
        indent = len(line) - len(line.lstrip())
        if within >= 0 or indent < 4:
            line = ANGLE.sub("&lt;", line)
        entry = ENTRY.fullmatch(line.strip())
        if entry and (indent == 0 or indent == within):
            if lines and lines[-1] and not indent and (within < 0 or paragraph):
                lines.append("")
            lines.append(f"{'    ' * (indent > 0)}- **{entry['names']}**: {entry['text']}")
            within, nested, paragraph = (
                (within, True, False) if indent else (entry.start("text"), False, False)
            )
        elif nested and indent == within:  # of the outer entry again
            lines += ["", f"    {line.strip()}"]
            nested, paragraph = False, True
        elif within >= 0 and indent:
            lines.append(f"{'    ' * (nested or paragraph)}  {line.strip()}")
        else:
            lines += [""] * bool(within >= 0 and line and lines[-1]) + [line]
            within, nested, paragraph = (within if not line else -1), False, False
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
