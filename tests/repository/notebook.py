"""Write examples/recipes.ipynb from docs/recipes.md: `python tests/repository/notebook.py`.

The notebook has the setup and the first recipes, with what their code prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE, NOTEBOOK = ROOT / "docs" / "recipes.md", ROOT / "examples" / "recipes.ipynb"
#: Sections of the page that the notebook shows.
SECTIONS = ("Setup", "DAPO with an entropy bonus", "GSPO", "A surrogate of your own")

Cell = dict[str, Any]


def sections() -> list[tuple[str, str]]:
    """(text, code) of each section that the notebook shows; the text includes the heading."""
    parts = re.split(r"^(?=## )", PAGE.read_text(), flags=re.MULTILINE)
    found = {part.splitlines()[0].removeprefix("## "): part for part in parts[1:]}
    pairs = []
    for title in SECTIONS:
        text, code = re.fullmatch(
            r"(.*?)```python\n(.*?)^```.*", found[title], re.DOTALL | re.MULTILINE
        ).groups()
        pairs.append((re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).strip(), code.strip()))
    return pairs


def executed() -> list[str]:
    """What the code of each section prints, run in order in one namespace."""
    names: dict[str, Any] = {"__name__": "recipes"}
    outputs = []
    for i, (_, code) in enumerate(sections()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{PAGE.name}, cell {i + 1}", "exec"), names)
        outputs.append(printed.getvalue())
    return outputs


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def notebook() -> Cell:
    """The notebook in format 4.5, which needs no package to write."""
    cells: list[Cell] = [
        {
            "cell_type": "markdown",
            "id": "title",
            "metadata": {},
            "source": lines(
                "# Recipes\n\nThe first recipes of docs/recipes.md, executed on a CPU."
            ),
        }
    ]
    for i, ((text, code), output) in enumerate(zip(sections(), executed(), strict=True), 1):
        cells.append(
            {"cell_type": "markdown", "id": f"text-{i}", "metadata": {}, "source": lines(text)}
        )
        stream = {"name": "stdout", "output_type": "stream", "text": lines(output)}
        cells.append(
            {
                "cell_type": "code",
                "execution_count": i,
                "id": f"code-{i}",
                "metadata": {},
                "outputs": [stream] if output else [],
                "source": lines(code),
            }
        )
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": python, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def main() -> int:
    NOTEBOOK.write_text(json.dumps(notebook(), indent=1) + "\n")
    print(f"written: {NOTEBOOK.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
