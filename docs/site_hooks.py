"""Hooks of `mkdocs build`: add pages from outside docs/, and rewrite links between pages.

Each page of the repository has one place on the site, and links to it lead there. A link to a file
that is not a page becomes plain text, because the site has no copy of the source.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: Place on the site -> file of the repository.
OUTSIDE = {
    "index.md": "README.md",
    "trainers.md": "grpo_kernels/integrations/README.md",
    "needs.md": "tests/README.md",
    "results.md": "benchmarks/RESULTS.md",
    "benchmarking.md": "benchmarks/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
#: Code, in which nothing is a link.
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def source_of(place: str) -> Path:
    """The file of the repository that is shown at a place of the site."""
    return ROOT / OUTSIDE[place] if place in OUTSIDE else DOCS / place


def place_of(source: Path) -> str | None:
    """The place of a file on the site: of a page, or of a picture; None: it has none."""
    path = source.relative_to(ROOT).as_posix()
    outside = {file: place for place, file in OUTSIDE.items()}
    if path in outside:
        return outside[path]
    if path.startswith("docs/") and source.suffix == ".md":
        return path.removeprefix("docs/")
    return path.removeprefix("docs/") if source.suffix in (".svg", ".png") else None


def with_links(text: str, place: str) -> str:
    """The page at `place` with its links as the site needs them."""
    return "".join(
        part if i % 2 else LINK.sub(lambda m: _link(m, place), part)
        for i, part in enumerate(_parts(text))
    )


def _parts(text: str) -> list[str]:
    """Text and code in turns. A link whose text is code stays text."""
    parts = [""]
    for part in CODE.split(text):
        within = parts[-1].rfind("[") > parts[-1].rfind("]") or part.startswith("](")
        if len(parts) % 2 and CODE.fullmatch(part) and not within:
            parts += [part, ""]
        else:
            parts[-1] += part
    return parts


def _link(match: re.Match[str], place: str) -> str:
    mark, text, link = match.groups()
    path, _, anchor = link.partition("#")
    if not path or re.match(r"\w+:", link):
        return match[0]
    target = place_of((source_of(place).parent / path).resolve())
    if target is None:
        return text
    relative = os.path.relpath(target, os.path.dirname(place)).replace(os.sep, "/")
    return f"{mark}[{text}]({relative}{'#' * bool(anchor)}{anchor})"


def pictures(text: str, place: str) -> dict[str, Path]:
    """{place on the site: file} of the pictures of a page that are not in docs/."""
    found = [
        (source_of(place).parent / link).resolve() for mark, _, link in LINK.findall(text) if mark
    ]
    return {str(place_of(path)): path for path in found if not path.is_relative_to(DOCS)}


# ---- what mkdocs calls


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    places = [*OUTSIDE, *(file.src_uri for file in files.documentation_pages())]
    for place in OUTSIDE:
        files.append(File.generated(config, place, content=source_of(place).read_text()))
    for place in places:
        for picture, path in pictures(source_of(place).read_text(), place).items():
            if files.get_file_from_path(picture) is None:
                files.append(File.generated(config, picture, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return with_links(markdown, page.file.src_uri)
