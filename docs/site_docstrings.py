"""Docstrings as Markdown, for the API reference: an extension of griffe, which mkdocstrings reads them with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "repository"))

from reference import markdown


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
