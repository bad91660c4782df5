"""The documentation is correct: links and anchors exist, examples run, commands exist, the site has every page."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reference import MODULES, public

from support import pages
from support.pages import EXAMPLES, README, REFERENCE, ROOT, Example

MARKDOWN = pages.tracked("*.md")
#: Helpers of a public class, which its page says all about.
NOT_SHOWN = {"check_linear", "check_specs", "forward_of", "plain_head"}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in pages.links(page):
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in pages.anchors(target)):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    text = page.read_text()
    for module in re.findall(r"python -m ((?:benchmarks|grpo_kernels|examples)[\w.]*\w)", text):
        assert importlib.util.find_spec(module), module
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"^make (\w+)|`make (\w+)`", text, re.MULTILINE):
        assert "".join(target) in targets, target


# ---- examples


def test_the_first_example_runs_as_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    first = pages.examples(README)[0]
    assert len(first.code.splitlines()) <= 14
    exec(compile(first.code, first.name, "exec"), {})
    _, entropy, norm = capsys.readouterr().out.rsplit(maxsplit=2)
    assert 0 < float(entropy) < 7 and float(norm) > 0  # log(1000) nats at most, and a gradient


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path) -> None:
    """In the order of the page, in one namespace, which begins with the names that docs/functions.md introduces."""
    names = pages.given()
    for example in pages.examples(page)[page == README :]:  # the README's first has a test of its own
        if example.needs:
            imports_exist(example)
            continue
        exec(compile(example.code, example.name, "exec"), names)


def imports_exist(example: Example) -> None:
    """Asserts that the names and modules which an example imports from this package exist, for examples that are not run."""
    for node in ast.walk(ast.parse(example.code)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("grpo_kernels"):
            continue
        module = str(node.module)
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin, f"{example.name}: {module}"
        source = Path(spec.origin).read_text()
        for name in (alias.name for alias in node.names):
            known = re.search(rf"\b{name}\b", source) or importlib.util.find_spec(f"{module}.{name}")
            assert known, f"{example.name}: {module}.{name}"


def test_examples_inside_of_trainers_import_what_is_there() -> None:
    """They need the trainers; the tests of the adapters run what they show."""
    found = pages.examples(ROOT / "grpo_kernels" / "integrations" / "README.md")
    assert len(found) > 5
    for example in found:
        imports_exist(example)


def test_an_example_that_is_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page.write_text("# A page\n\n```python\ngrpo_loss(logits)\n```\n\n<!-- not run: needs a GPU -->\n```python\nx = 1\n```\n")
    (first, second) = pages.examples(page)
    assert (first.needs, first.line, second.needs) == ("", 3, "a GPU")
    with pytest.raises(NameError, match="grpo_loss"):
        exec(first.code, pages.given())
    wrong = Example(page, 1, "from grpo_kernels.formulas import no_such_formula", "a GPU")
    with pytest.raises(AssertionError, match="no_such_formula"):
        imports_exist(wrong)


def test_headings_become_the_anchors_that_links_name() -> None:
    assert pages.slug("A head that hooks see: FusedLMHead") == "a-head-that-hooks-see-fusedlmhead"
    assert pages.slug("torch.compile and `torch.func`") == "torchcompile-and-torchfunc"


def test_the_way_of_a_call_names_what_is_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+\.py)`:\s+`(\w+)`", page)
    assert len(named) > 10
    for path, name in named:
        source = (ROOT / "grpo_kernels" / path).read_text()
        assert re.search(rf"^\s*(?:def|class) {name}\b", source, re.MULTILINE), f"{path}: {name}"


# ---- the site


def site_hooks() -> Any:
    """docs/site_hooks.py, which needs no mkdocs before mkdocs calls it."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def in_nav(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [place for part in parts for place in in_nav(part)]


def test_the_site_has_every_page_once() -> None:
    yaml = pytest.importorskip("yaml")
    listed = in_nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    hooks = site_hooks()
    assert len(set(listed)) == len(listed)
    assert all(hooks.source_of(place).exists() for place in listed)
    assert {*listed} == {hooks.place_of(page) for page in MARKDOWN}


def test_links_are_those_of_the_site() -> None:
    """Between pages wherever they stand; a file that is no page becomes its text, code stays as it is."""
    rewritten = site_hooks().with_links
    text = "[a](docs/functions.md#a-batch) ![b](docs/replay.svg) [`c`](grpo_kernels/losses.py) `[d](docs/gpu.md)` [e](https://e.org)"
    assert rewritten(text, "index.md") == (
        "[a](functions.md#a-batch) ![b](replay.svg) `c` `[d](docs/gpu.md)` [e](https://e.org)"
    )
    assert rewritten("[a](../benchmarks/RESULTS.md) [b](#c)", "benchmarks.md") == "[a](results.md) [b](#c)"
    assert rewritten("[a](../functions.md)", "api/losses.md") == "[a](../functions.md)"
    assert rewritten("[a](../../docs/kept_sets.md)", "trainers.md") == "[a](kept_sets.md)"
    block = "```\n[a](README.md)\n```\n"
    assert rewritten(block + "[`x`, y](README.md)", "changelog.md") == block + "[`x`, y](index.md)"


def test_the_reference_has_every_public_name() -> None:
    """Once, under the name that it is imported by."""
    shown = [name for page in REFERENCE for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    assert len(set(shown)) == len(shown)
    for name in shown:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    package = importlib.import_module("grpo_kernels")
    missing = {f"grpo_kernels.{name}" for name in package.__all__} - {*shown}
    assert not missing, "a public name needs a line `::: NAME` on a page of docs/api"
    objects = [getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in shown]
    absent = [
        f"{name}.{attribute}"
        for name in MODULES
        if not name.startswith(("grpo_kernels.formulas", "grpo_kernels.integrations.trl"))
        for attribute, value in public(importlib.import_module(name)).items()
        if callable(value) and not any(value is other for other in objects) and attribute not in NOT_SHOWN
    ]
    assert not absent


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings_handlers.python", reason='pip install -e ".[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    page = (tmp_path / "api" / "losses.html").read_text()
    assert 'id="grpo_kernels.grpo_loss"' in page and "<strong>skip_inactive</strong>" in page
    assert list(tmp_path.glob("benchmarks/results/*/plots/front.svg"))
    assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', (tmp_path / "index.html").read_text())
