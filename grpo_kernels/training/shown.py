"""Texts of models and data sets in messages and logs."""

from __future__ import annotations

#: Characters of a text that are shown from its beginning, and from its end.
BEGINNING, END = 120, 120


def shown(text: str) -> str:
    """A text between quotes on one line. What is no printable character, such as the end of a line or a terminal's commands, stands
    as its escape, and a long text without its middle, with how much that is."""
    left_out = len(text) - BEGINNING - END
    if left_out <= 0:
        return repr(text)
    return f"{text[:BEGINNING]!r} ... {left_out} characters ... {text[-END:]!r}"


def pair(prompt: str, completion: str) -> str:
    """A prompt and its completion, as lines that follow what is said of them."""
    return f"\n  prompt     {shown(prompt)}\n  completion {shown(completion)}"
