"""The documentation is right:

links lead somewhere, examples run, named tests exist, every public name is shown.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import io
import json
import math
import re
import textwrap
import tokenize
from pathlib import Path
from types import FunctionType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from grpo_kernels import (
    Objective,
    TokenBatch,
    linear_grpo_loss,
    linear_logprobs,
    objective_loss,
)
from repository import notebook
from support import pages
from support.inside import count_products
from support.pages import EXAMPLES, QUICKSTART, README, REFERENCE, ROOT

ARCHITECTURE = ROOT / "docs" / "architecture.md"

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
        if not re.match(r"\w+:", link) and (
            not target.exists() or (anchor and anchor not in pages.anchors(target))
        ):
            wrong.append(link)
    assert not wrong
    assert (
        pages.slug("torch.compile and `torch.func`: FusedLMHead")
        == "torchcompile-and-torchfunc-fusedlmhead"
    )


def test_the_first_example_of_the_quickstart_runs_as_pasted(capsys):
    """It needs no names but its own, and three updates on one batch lower the loss."""
    first = pages.examples(QUICKSTART)[0]
    assert len(first.code.splitlines()) <= 40
    exec(compile(first.code, first.name, "exec"), {})
    printed = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"loss ([-+][\d.]+)", printed)]
    entropies = [float(x) for x in re.findall(r"entropy ([\d.]+)", printed)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]
    assert all(6 < x < math.log(1000) for x in entropies) and len(entropies) == 3


def test_the_readme_is_short_and_answers_the_first_questions():
    """What it is, what it saves, how to install it, what to change in TRL: in this order."""
    text = README.read_text()
    answers = (
        "Fused kernels for RL post-training losses",
        "![Bar charts of time and memory",
        "pip install .",
        "from grpo_kernels.integrations.trl import FusedGRPOTrainer as GRPOTrainer",
        "linear_grpo_loss(",
        "## Support",
        "## Limits",
    )
    places = [text.find(answer) for answer in answers]
    assert -1 not in places and places == sorted(places)
    assert len(text.splitlines()) <= 150


def test_recipes_are_short():
    recipes = pages.examples(ROOT / "docs" / "recipes.md")
    assert len(recipes) >= 8 and not [x.name for x in recipes if x.needs]
    assert not [x.name for x in recipes if len(x.code.splitlines()) > 40]


def test_the_notebook_is_what_the_page_says_and_prints():
    """`python tests/repository/notebook.py` writes it. Numbers agree up to rounding."""
    cells = json.loads(notebook.NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert ["".join(cell["source"]) for cell in code] == [x for _, x in notebook.sections()]
    number = re.compile(r"[-+]?\d+\.\d+")
    for cell, printed in zip(code, notebook.executed(), strict=True):
        kept = "".join(text for output in cell["outputs"] for text in output["text"])
        assert number.sub("x", kept) == number.sub("x", printed)
        pairs = zip(number.findall(kept), number.findall(printed), strict=True)
        assert all(math.isclose(float(a), float(b), abs_tol=2e-3) for a, b in pairs)


@pytest.mark.parametrize(
    "page", [*EXAMPLES, ROOT / NAME / "integrations" / "README.md"], ids=name_of
)
def test_examples_run(page):
    """In the order of the page, in one namespace, which begins with the names that
    docs/functions.md introduces. Of those that need a GPU or a trainer the imports exist; the tests
    of the adapters run what they show.
    """
    names = pages.given()
    for example in pages.examples(page):
        if not example.needs and "integrations" not in page.parts:
            exec(compile(example.code, example.name, "exec"), names)
            continue
        for module, imported in re.findall(
            rf"^ *from ({NAME}[\w.]*) import ([\w, ]+)", example.code, re.MULTILINE
        ):
            spec = importlib.util.find_spec(module)
            assert spec is not None and spec.origin, f"{example.name}: {module}"
            for name in re.findall(r"(\w+)(?: as \w+)?", imported):
                known = re.search(
                    rf"\b{name}\b", Path(spec.origin).read_text()
                ) or importlib.util.find_spec(f"{module}.{name}")
                assert known, f"{example.name}: {module}.{name}"


# ---- docs/architecture.md: its worked examples, and its table of matmuls


def test_the_worked_examples_compute_what_the_page_says():
    """The gradient of the surrogate and the loss of the composition, in float64."""
    names = pages.given()
    logits = names["logits"]
    for example in pages.examples(ARCHITECTURE):
        exec(compile(example.code, example.name, "exec"), names)
        if "quadratic_penalty" in example.code:
            found = logits.grad.clone()
    mask = names["mask"]
    targets = names["targets"].unsqueeze(-1)
    z = logits.detach().double().requires_grad_()
    logps = z.log_softmax(-1).gather(-1, targets).squeeze(-1)
    losses = -names["advantages"] * logps + 0.25 * (logps - names["old_logps"]).square()
    losses[mask].mean().backward()
    torch.testing.assert_close(found.double(), z.grad, rtol=1e-5, atol=1e-7)

    log_p = (names["hidden"].double() @ names["weight"].double().T).log_softmax(-1)
    rejected = log_p.gather(-1, names["teacher_ids"].view(*mask.shape, -1))
    margins = (1.0 + rejected - log_p.gather(-1, targets)).clamp(min=0.0).sum(-1)
    without_margins = objective_loss(names["result"].logps, names["batch"], names["objective"])
    added = names["out"].loss - without_margins.loss
    torch.testing.assert_close(added.double(), 0.1 * margins[mask].mean(), rtol=1e-5, atol=0)


def loss_by_statistics(hidden, weight, names):
    return linear_grpo_loss(hidden, weight, names["batch"], Objective.preset("kl_cov")).loss


def sum_of_logprobs(hidden, weight, names, entropy=False):
    logps, entropies = linear_logprobs(
        hidden, weight, names["targets"], mask=names["mask"], entropy=entropy
    )
    return logps.sum() if entropies is None else logps.sum() + entropies.sum()


#: How each row of the table begins, and the call that it is about.
MATMULS = {
    "`linear_grpo_loss`, token level": lambda h, w, names: (
        linear_grpo_loss(h, w, names["batch"], Objective.preset("dapo")).loss
    ),
    "`linear_grpo_loss`, sequence level": lambda h, w, names: (
        linear_grpo_loss(h, w, names["batch"], Objective.preset("gspo")).loss
    ),
    "`linear_logprobs` and its backward, gradient of log-probs only": sum_of_logprobs,
    "`linear_logprobs` and its backward, with a gradient of entropy": functools.partial(
        sum_of_logprobs, entropy=True
    ),
    "a loss of statistics": loss_by_statistics,
}


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("row", MATMULS)
def test_matmuls_are_those_of_the_table(row, is_frozen, monkeypatch):
    pattern = rf"^\| {re.escape(row)}.* \| (\d).* \| (\d).* \|$"
    (counts,) = re.findall(pattern, ARCHITECTURE.read_text(), re.MULTILINE)
    names = pages.given()
    rows = count_products(monkeypatch)
    weight = names["weight"].detach().requires_grad_(not is_frozen)
    MATMULS[row](names["hidden"], weight, names).backward()
    assert sum(rows.values()) == int(counts[is_frozen]) * int(names["mask"].sum())


def test_the_captured_loss_gives_what_a_new_call_gives(monkeypatch):
    """The example of a CUDA graph, with a stand-in whose replay calls the captured function again.

    It shows that a write into the tensors of the batch reaches the next replay.
    """
    names = pages.given()
    names["advantages"] = names["advantages"].clone()  # [B, T] that may be written
    new = SimpleNamespace(
        hidden=names["hidden"].detach().flip(0),
        targets=names["targets"].clone(),
        advantages=-names["advantages"],
        old_logps=names["old_logps"] - 0.1,
    )
    names["steps"] = [new]
    results = ("loss", "clip_high", "grad_hidden", "grad_weight")

    def replay():
        for name, result in zip(results, names["step"](), strict=True):
            names[name].copy_(result)

    for name in ("CUDAGraph", "Stream", "current_stream", "graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    torch.cuda.CUDAGraph.return_value.replay = replay
    exec(pages.example("torch.cuda.CUDAGraph"), names)
    hidden = new.hidden.requires_grad_()
    batch = TokenBatch(new.targets, new.advantages, mask=names["mask"], old_logps=new.old_logps)
    out = linear_grpo_loss(hidden, names["weight"], batch, names["objective"])
    expected = torch.autograd.grad(out.loss, (hidden, names["weight"]))
    assert torch.equal(names["loss"], out.loss)
    assert torch.equal(names["clip_high"], out.metrics["clip_high"])
    assert torch.equal(names["grad_hidden"], expected[0])
    assert torch.equal(names["grad_weight"], expected[1])


# ---- files that are named

#: Suffixes of files in the repository, and what such a name looks like in a text: a path, without
#: patterns and the sides of a diff.
SUFFIXES = "py|pyi|cpp|h|md|json|toml|ya?ml|sh|svg|png|jsonl|txt"
FILE = re.compile(
    rf"(?<![\w/.*<{{>-])(?:[ab]/(?=grpo_kernels/))?(\w[\w./-]*\.(?:{SUFFIXES}))(?![\w(/]|\.\w)"
)
#: Files that users have, or that a run writes.
NOT_OURS = {
    "your_program.py", "my_loss.py", "my_losses.py", "gsm8k.yaml", "trl/trainer/grpo_trainer.py",
    "config.yaml", "runs/gsm8k/config.yaml", "metrics.jsonl", "samples.jsonl", "summary.txt", "summary.md", "metadata.json", "rows.jsonl", "json/kit.json",
    "DIR/json/STAGE.json", "json/NAME.json", "a/b.py",
}  # fmt: skip
#: Programs that are gone, of which pages with these words may speak.
GONE, GONE_SAYS = {
    "benchmarks/exact_kl.py", "benchmarks/sparse_training.py", "benchmarks/replay.py", "score_centering.py", "vocab_parallel.py",
}, "in the history of this repository"  # fmt: skip


def missing_files(text, folder, paths):
    """The files that a text in this folder names and that are not there.

    `paths`: of all files, relative to the root.
    """
    text = re.sub(r"https?://\S+", "", text)
    allowed = NOT_OURS | (GONE if GONE_SAYS in text else set())
    return [
        name
        for name in FILE.findall(text)
        if name not in allowed
        and not (folder / name).exists()
        and not any(path == name or path.endswith(f"/{name}") for path in paths)
    ]


def told(path):
    """What a file tells its reader: a page, or the docstrings and comments of a program."""
    text = path.read_text()
    if path.suffix != ".py":
        return text
    nodes = (
        x
        for x in ast.walk(ast.parse(text))
        if isinstance(x, (ast.Module, ast.ClassDef, ast.FunctionDef))
    )
    comments = (
        x.string
        for x in tokenize.generate_tokens(io.StringIO(text).readline)
        if x.type == tokenize.COMMENT
    )
    return "\n".join([*(ast.get_docstring(x) or "" for x in nodes), *comments])


def test_files_that_are_named_exist():
    """In pages, docstrings and comments. The changelog names those of former versions."""
    paths = [name_of(path) for path in pages.tracked("*")]
    readers = [
        path
        for path in pages.tracked("*.md", "*.py")
        if path.name not in ("CHANGELOG.md", "test_docs.py")
    ]
    suspects = [
        path for path in readers if missing_files(path.read_text(), path.parent, paths)
    ]  # strings may name anything
    wrong = {
        name_of(path): names
        for path in suspects
        if (names := missing_files(told(path), path.parent, paths))
    }
    assert len(readers) > 200 and not wrong
    text = (
        "`blocks.py`, test_readme.py, (core/matmuls.py), benchmarks/README.md; a/grpo_kernels/batch.py"
        " <x>.py *.json f.py() replay.py."
    )
    assert missing_files(text, ROOT, paths) == ["blocks.py", "test_readme.py", "replay.py"]


#: A module of the package, and names in it.
DOTTED = re.compile(rf"(?<![\w./]){NAME}((?:\.[A-Za-z_]\w*)+)")


def missing_names(text):
    """Dotted names of the package in a text that lead nowhere.

    Sources are read, because adapters import trainers.
    """
    found = []
    for dotted in DOTTED.findall(re.sub(r"https?://\S+", "", text)):
        parts = dotted[1:].split(".")
        homes = [(ROOT / NAME).joinpath(*parts[:i]) for i in range(len(parts), -1, -1)]
        depth, home = next(
            (len(parts) - i, file)
            for i, path in enumerate(homes)
            for file in (path.with_suffix(".py"), path / "__init__.py")
            if file.is_file()
        )
        rest = parts[depth:]
        if rest and not re.search(rf"\b{rest[0]}\b", home.read_text()):
            found.append(NAME + dotted)
    return found


def test_names_of_modules_exist():
    wrong = {
        name_of(page): names
        for page in MARKDOWN
        if page.name != "CHANGELOG.md" and (names := missing_names(page.read_text()))
    }
    assert not wrong
    now = re.findall(
        r"^\| .* \| (.*) \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )  # the second column of its table
    assert len(now) > 20 and missing_names("\n".join(now)) == []
    text = (
        f"`{NAME}.specs`, {NAME}.model.FusedLMHead, {NAME}.rewards.nothing.f,"
        f" torch.ops.{NAME}.stats"
    )
    assert missing_names(text) == [f"{NAME}.specs", f"{NAME}.rewards.nothing.f"]


# ---- the words

#: Words that this project used in a meaning of its own, or that make a sentence hard to read.
WORDS = (
    r"visits?|pulls?(?! request)|slopes? of|beside|of its own|of one's own|that of|those of|rooms?|doors?|"
    r"nobody|once more|and kin|for good"
)


def private_words(text):
    """The words above in a text, generated blocks, code and quotations left out."""
    text = re.sub(r"<!-- (\w+): generated.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    text = re.sub(r'"[^"\n]*"|https?://\S+', "", pages.without_code(text))
    return re.findall(rf"\b({WORDS})\b", text, re.IGNORECASE)


def test_pages_use_the_words_of_the_field():
    written = [page for page in MARKDOWN if page.name != "RESULTS.md"]
    wrong = {name_of(page): found for page in written if (found := private_words(page.read_text()))}
    assert len(written) > 20 and not wrong, "say it in the words of the PyTorch documentation"
    assert private_words("The slope of a visit beside `that of` others") == [
        "slope of",
        "visit",
        "beside",
    ]


#: The worst of these, which docstrings and comments do without.
WORST = re.compile(r"\b(visits?|beside|nobody|and kin|of one's own)\b", re.IGNORECASE)


def test_code_is_commented_in_the_words_of_the_field():
    files = pages.tracked("grpo_kernels/*.py", "benchmarks/*.py", "examples/*.py")
    wrong = {name_of(path): found for path in files if (found := WORST.findall(told(path)))}
    assert len(files) > 100 and not wrong, "say it in the words of the PyTorch documentation"


# ---- examples in docstrings

#: An assignment of a call, or an import: what begins code in a docstring, and not a formula.
CODE = re.compile(r"^ *(?:\w+(?:, \w+)* = [\w.]+\(|from \S+ import |import \w)", re.MULTILINE)


def broken_code(docstring):
    """The indented paragraphs of a docstring that look like code and do not parse."""
    paragraphs = re.findall(r"(?:^    .*\n?)+", docstring, re.MULTILINE)
    wrong = []
    for paragraph in (x for x in paragraphs if CODE.search(x)):
        try:
            ast.parse(textwrap.dedent(paragraph))
        except SyntaxError:
            wrong.append(paragraph)
    return wrong


def test_code_in_docstrings_parses():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    seen, wrong = 0, {}
    for path in sorted((ROOT / NAME).rglob("*.py")):
        nodes = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, kinds)]
        texts = [ast.get_docstring(x) or "" for x in nodes]
        seen += sum(bool(CODE.search(text)) for text in texts)
        if broken := [code for text in texts for code in broken_code(text)]:
            wrong[name_of(path)] = broken
    assert seen > 30 and not wrong
    assert broken_code("Text.\n\n    out = f(x) out.loss\n")
    assert not broken_code("Text.\n\n    out = f(x)\n    loss = policy * (surrogate)\n")


# ---- what breaks elsewhere


def unproved(row):
    """What a line of the table of tests/README.md names and does not exist: tests as "file: `test`,
    `test`; file: all", and sentences of the documentation as [file](../file): "sentence".
    """
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
    return found + [
        sentence
        for file, sentence in quoted
        if sentence not in " ".join((ROOT / file).read_text().split())
    ]


def test_what_breaks_elsewhere_has_a_proof_that_exists():
    rows = re.findall(r"^\| \d+ \|.*", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 40 and [missing for row in rows for missing in unproved(row)] == []
    assert all(
        re.search(r"\]\(https://github.com/[\w./-]+/issues/\d+\)", row)
        and re.search("`(test|check)_", row)
        for row in rows
    )
    wrong = (
        "test_docs: `test_nothing`",
        "test_nothing: all",
        '[README.md](../README.md): "Coffee" |',
    )
    assert all(map(unproved, wrong))


# ---- the reference

#: The modules that users import.
MODULES = (
    NAME, *(f"{NAME}.{x}" for x in "objective distributed model losses formulas.surrogates formulas.kl formulas.filters".split()),
    *(f"{NAME}.rewards.{x}" for x in "advantages returns corrections entropy".split()),
    *(f"{NAME}.integrations.{x}" for x in "areal liger megatron miles nemo_rl openrlhf prime_rl skyrl slime trl unsloth verl".split()),
)  # fmt: skip
#: Helpers of a public class, which its page says all about.
NOT_SHOWN = {"SequenceRatio", "check_linear", "check_specs", "forward_of", "plain_head"}


def public(module):
    """The functions and classes that a module defines; what the package exports, if it is the
    package.
    """
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in module.__all__}
    own = {
        name: x
        for name, x in vars(module).items()
        if getattr(x, "__module__", None) == module.__name__
    }
    return {
        name: x
        for name, x in own.items()
        if not name.startswith("_") and isinstance(x, (FunctionType, type))
    }


def test_the_reference_has_every_public_name_once():
    """Under the name that it is imported by."""
    shown = [
        name
        for page in REFERENCE
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    objects = {
        id(getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]))
        for name in shown
    }
    assert len(set(shown)) == len(shown)
    package = importlib.import_module(NAME)
    assert not {f"{NAME}.{name}" for name in package.__all__} - {*shown}, (
        "a public name needs a line `::: NAME` on a page of docs/api"
    )
    others = [name for name in MODULES if "formulas" not in name and not name.endswith(".trl")]
    for name in others:
        named = {
            attribute
            for attribute, x in public(importlib.import_module(name)).items()
            if callable(x) and id(x) not in objects
        }
        assert not named - NOT_SHOWN, name
