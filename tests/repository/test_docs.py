"""The documentation is right: links lead somewhere, examples run, named tests exist, every public name is shown."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import FunctionType

import pytest

from grpo_kernels.core.backends import cpu
from support import pages
from support.pages import EXAMPLES, README, REFERENCE, ROOT
from support.processes import finish, start

MARKDOWN = pages.tracked("*.md")
NAME = "grpo_kernels"


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", MARKDOWN, ids=name_of)
def test_links_lead_somewhere(page):
    wrong = []
    for link in pages.links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not re.match(r"\w+:", link) and (not target.exists() or (anchor and anchor not in pages.anchors(target))):
            wrong.append(link)
    assert not wrong
    assert pages.slug("torch.compile and `torch.func`: FusedLMHead") == "torchcompile-and-torchfunc-fusedlmhead"


def test_the_first_example_runs_as_pasted(capsys):
    first = pages.examples(README)[0]
    assert len(first.code.splitlines()) <= 14
    exec(compile(first.code, first.name, "exec"), {})
    _, entropy, norm = capsys.readouterr().out.rsplit(maxsplit=2)
    assert 0 < float(entropy) < 7 and float(norm) > 0  # log(1000) nats at most, and a gradient


@pytest.mark.parametrize("page", [*EXAMPLES, ROOT / NAME / "integrations" / "README.md"], ids=name_of)
def test_examples_run(page):
    """In the order of the page, in one namespace, which begins with the names that docs/functions.md introduces. Of those that
    need a GPU or a trainer the imports exist; the tests of the adapters run what they show."""
    names = pages.given()
    for example in pages.examples(page)[page == README :]:  # the README's first has a test of its own
        if not example.needs and "integrations" not in page.parts:
            exec(compile(example.code, example.name, "exec"), names)
            continue
        for module, imported in re.findall(rf"^ *from ({NAME}[\w.]*) import ([\w, ]+)", example.code, re.MULTILINE):
            spec = importlib.util.find_spec(module)
            assert spec is not None and spec.origin, f"{example.name}: {module}"
            for name in re.findall(r"(\w+)(?: as \w+)?", imported):
                known = re.search(rf"\b{name}\b", Path(spec.origin).read_text()) or importlib.util.find_spec(f"{module}.{name}")
                assert known, f"{example.name}: {module}.{name}"


# ---- the worked example of docs/architecture.md is a real change: applied to a copy, a statistic is there everywhere

#: All statistics with a gradient at once, so that their slopes add up, beside those of float64.
PROGRAM = """
import importlib.machinery, sys
sys.path.insert(0, {folder!r})
sys.meta_path.insert(0, importlib.machinery.PathFinder)  # before the finder of an editable installation
import torch
import grpo_kernels
from grpo_kernels import LogitTransform, Options, TokenSets, linear_logprobs, token_logprobs

def exactly(rows, targets, sets):
    keep = torch.zeros_like(rows, dtype=torch.bool)
    for i, ids in enumerate(sets):
        keep[i, list(ids) or slice(None)] = True
    log_p = (rows / 0.7).masked_fill(~keep, -1e30).log_softmax(1)
    p = log_p.exp()
    return log_p.gather(1, targets[:, None])[:, 0], -(p * log_p.clamp(min=-1e5)).sum(1), (p**2).sum(1), (p**3).sum(1)

assert grpo_kernels.__file__.startswith({folder!r})
torch.manual_seed(0)
hidden, weight, targets, upstream = torch.randn(7, 8), torch.randn(61, 8), torch.randint(61, (7,)), torch.randn(4, 7)
some = [sorted({{int(t), 3, 9, 40}}) if i % 2 else [] for i, t in enumerate(targets)]
for backend in ("eager", "cpu"):
    for given in ((hidden @ weight.T,), (hidden, weight)):
        for sets in ([[]] * 7, some):
            leaves, wide = ([x.detach().to(kind).requires_grad_() for x in given] for kind in (torch.float32, torch.float64))
            function = token_logprobs if len(given) == 1 else linear_logprobs
            asked = {{"also": ("sum_squares", "sum_cubes"), "kept": TokenSets.from_lists(sets), "entropy": True}}
            how = {{"transform": LogitTransform(0.7), "options": Options(backend, strict=True)}}
            found = function(*leaves, targets, **asked, **how)
            values = (found.logps, found.entropy, found.also["sum_squares"], found.also["sum_cubes"])
            expected = exactly(wide[0] if len(wide) == 1 else wide[0] @ wide[1].T, targets, sets)
            for these in (values, expected):
                sum((x * d).sum() for x, d in zip(these, upstream)).backward()
            for x, y in [*zip(values, expected), *((a.grad, b.grad) for a, b in zip(leaves, wide))]:
                torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=5e-6)
"""


def test_a_new_statistic_is_a_change_of_two_files(tmp_path):
    (change,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^diff --git", change, re.MULTILINE)) == 2
    shutil.copytree(ROOT / NAME, tmp_path / NAME, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-p1", "-"], input=change, text=True, cwd=tmp_path, check=True)
    shutil.copy(cpu._cpu.__file__, tmp_path / NAME)
    finish(start(PROGRAM.format(folder=str(tmp_path))))


# ---- what breaks elsewhere


def unproved(row):
    """What a line of the table of tests/README.md names and does not exist: tests as "file: `test`, `test`; file: all", and
    sentences of the documentation as [file](../file): "sentence"."""
    found, tests = [], ROOT / "tests"
    for file, names in re.findall(r"([\w/]+(?:\.py)?): ((?:`\w+`(?:, )?)+|all\b)", row):
        path = ROOT / file if "/" in file else next(tests.rglob(f"{file}.py"), tests / file)
        text = path.read_text() if path.is_file() else ""
        found += [
            f"{file}: {name}"
            for name in re.findall(r"\w+", names)
            if not text or (name != "all" and f"def {name}(" not in text)
        ]
    quoted = re.findall(r'\[([\w/.]+)\]\(\.\./[\w/.]+\): "(.*?)"(?=\.| \|)', row)
    return found + [sentence for file, sentence in quoted if sentence not in " ".join((ROOT / file).read_text().split())]


def test_what_breaks_elsewhere_has_a_proof_that_exists():
    rows = re.findall(r"^\| \d+ \|.*", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 40 and [missing for row in rows for missing in unproved(row)] == []
    assert all(
        re.search(r"\]\(https://github.com/[\w./-]+/issues/\d+\)", row) and re.search("`(test|check)_", row) for row in rows
    )
    wrong = ("test_docs: `test_nothing`", "test_nothing: all", '[README.md](../README.md): "Coffee" |')
    assert all(map(unproved, wrong))


# ---- the reference

#: The modules that users import.
MODULES = (
    NAME, *(f"{NAME}.{x}" for x in "objective distributed model losses formulas.surrogates formulas.kl formulas.filters".split()),
    *(f"{NAME}.rewards.{x}" for x in "advantages returns corrections entropy".split()),
    *(f"{NAME}.integrations.{x}" for x in "areal liger miles nemo_rl openrlhf prime_rl skyrl slime trl unsloth verl".split()),
)  # fmt: skip
#: Helpers of a public class, which its page says all about.
NOT_SHOWN = {"check_linear", "check_specs", "forward_of", "plain_head"}


def public(module):
    """The functions and classes that a module defines; what the package exports, if it is the package."""
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in module.__all__}
    own = {name: x for name, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__}
    return {name: x for name, x in own.items() if not name.startswith("_") and isinstance(x, (FunctionType, type))}


def test_the_reference_has_every_public_name_once():
    """Under the name that it is imported by."""
    shown = [name for page in REFERENCE for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    objects = {id(getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2])) for name in shown}
    assert len(set(shown)) == len(shown)
    package = importlib.import_module(NAME)
    assert not {f"{NAME}.{name}" for name in package.__all__} - {*shown}, (
        "a public name needs a line `::: NAME` on a page of docs/api"
    )
    others = [name for name in MODULES if "formulas" not in name and not name.endswith(".trl")]
    for name in others:
        named = {
            attribute for attribute, x in public(importlib.import_module(name)).items() if callable(x) and id(x) not in objects
        }
        assert not named - NOT_SHOWN, name
