"""What is built and for which machines: linkage of the compiled module, sources that no quick run
would show to be wrong, and the build for the Hugging Face `kernels` library.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub_kernel import build

import grpo_kernels.core.compiled

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
SOURCES = {path.name: path.read_text() for path in sorted((ROOT / "grpo_kernels").rglob("*.py"))}
PROJECT = (ROOT / "pyproject.toml").read_text()

# ---- linkage

#: What begins a block that functions may stand in.
SCOPE = re.compile(r"\b(namespace|struct|class|union|enum)\b[^;{}()]*$")


def compiled_per_processor():
    """The sources of `add_kernels`, and the headers that they include."""
    _, _, kernels = (ROOT / "CMakeLists.txt").read_text().partition("function(add_kernels")
    found = [ROOT / name for name in dict.fromkeys(re.findall(r"csrc/\w+\.cpp", kernels))]
    for path in found:
        included = [CSRC / name for name in re.findall(r'#include "(\w+\.h)"', path.read_text())]
        found += [header for header in included if header not in found]
    return found


def visible_functions(source):
    """The heads of functions with a body that other files' copies could replace: inline, members or
    templates, not static, not in an unnamed namespace and not inlined always.
    """
    source = re.sub(r"//.*|\\\n|^\s*#.*", "", source, flags=re.M)
    found, scopes, start = [], [], 0
    for match in re.finditer(r"[{};]", source):
        head, start = " ".join(source[start : match.start()].split()), match.end()
        if match[0] == "}":
            scopes.pop()
        elif match[0] == "{" and SCOPE.search(head):
            scopes.append(head)
        elif match[0] == "{":
            member = bool(scopes) and not scopes[-1].startswith("namespace")
            kept = re.search(r"always_inline" if member else r"always_inline|\bstatic\b", head)
            if (
                "(" in head
                and not kept
                and not {"namespace", "body"} & {*scopes}
                and (member or re.search(r"\binline\b|^template", head))
            ):
                found.append(head)
            scopes.append("body")
    return found


@pytest.mark.parametrize("path", compiled_per_processor(), ids=lambda path: path.name)
def test_no_function_is_shared_between_processors(path):
    """Of visible copies the linker would keep any one, and a processor could then run instructions
    that it lacks.
    """
    assert visible_functions(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("namespace a { inline int f(int x) { return x; } }", ["inline int f(int x)"]),
        ("struct A { int x; int f() const { return x; } };", ["int f() const"]),
        (
            "template <class T> T f(T x) { if (x) { return x; } return x; }",
            ["template <class T> T f(T x)"],
        ),
        (
            (
                "namespace a { namespace { inline int f() { return 1; } struct A { int g() { return"
                " 2; } }; } }"
            ),
            [],
        ),
        (
            (
                "static inline int f() { return 1; } int g() { return 2; } enum A { B }; const int"
                " c[] = {1};"
            ),
            [],
        ),
        ("[[gnu::always_inline]] inline int f() { return 1; }", []),
    ],
)
def test_visible_functions_are_seen(source, found):
    assert visible_functions(source) == found


# ---- sources of the Triton kernels


def test_program_ids_are_64_bit_and_on_the_axis_that_has_room():
    """A row number times a stride is beyond 2^31 in real batches, and axes 1 and 2 of a grid end at
    65 535.
    """
    calls = [call for text in SOURCES.values() for call in re.findall(r"\bprogram_id\(.*", text)]
    assert (
        len(calls) >= 4
        and [call for call in calls if not call.startswith("program_id(0).to(tl.int64)")] == []
    )


def test_no_atomics_and_nothing_that_tunes_itself():
    """Without these, the order of sums and the choice of tiles are the same in every run and for
    every number of rows.
    """
    words = {
        name: re.findall(r"\b(?:atomic_\w+|autotune|heuristics)\b", text)
        for name, text in SOURCES.items()
    }
    assert not [name for name, found in words.items() if found]


def test_kernels_are_launched_on_the_device_of_their_data():
    """Which need not be the current one."""

    def launches(node):
        return {
            x
            for x in ast.walk(node)
            if isinstance(x, ast.Call) and ast.unparse(x.func).startswith("kernel[")
        }

    tree = ast.parse((ROOT / "grpo_kernels/core/backends/triton/launch.py").read_text())
    (guard,) = (
        x
        for x in ast.walk(tree)
        if isinstance(x, ast.With) and "on_device(" in ast.unparse(x.items[0])
    )
    texts = [text for name, text in SOURCES.items() if "launch" not in str(name)]
    assert (
        len(launches(guard)) == 1
        and launches(guard) == launches(tree)
        and not any("_kernel[" in text for text in texts)
    )


# ---- the wheel, and the build for the `kernels` library


def test_no_upper_pins():
    """Of what the package itself needs:

    an upper bound would hold back the torch of a whole environment.
    """
    (needed,) = re.findall(r"^dependencies = \[(.*?)^\]", PROJECT, re.MULTILINE | re.DOTALL)
    names, pins = zip(*re.findall(r'"([\w-]+)([^;"]*)', needed), strict=True)
    assert {*names} == {"torch", "triton"} and all(re.fullmatch(r">=[\d.]+", pin) for pin in pins)


def test_workflows_and_hooks_use_the_versions_of_the_project():
    """The tested Pythons are those of the classifiers, the ruff of the hook that of the tests."""
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    (matrix,) = re.findall(r"^        python: \[(.*)\]$", workflow, re.MULTILINE)
    assert re.findall(r"[\d.]+", matrix) == pythons
    (ruff,) = re.findall(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (hook,) = re.findall(
        r"^    rev: v(.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE
    )
    assert hook == ruff
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == grpo_kernels.__version__.removesuffix(".dev0")


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Two versions, in a repository each."""
    return [
        build(tmp_path_factory.mktemp(f"v{version}"), version, ["cpu"])[0] for version in (1, 2)
    ]


def described(folder):
    return json.loads((folder / "metadata.json").read_text())


def loaded(folder, monkeypatch):
    """As the library's loader does: by the file of the build, under its id."""
    name = described(folder)["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.mark.filterwarnings("ignore:grpo_kernels falls back to eager PyTorch")
def test_two_builds_live_side_by_side_and_compute_the_loss(builds, monkeypatch):
    """And a layer takes the place of a forward, with the weight of the module that it is put
    into.
    """
    kernels = [loaded(folder, monkeypatch) for folder in builds]
    modules = [importlib.import_module(f"{kernel.__name__}.core.compiled") for kernel in kernels]
    assert (
        len({grpo_kernels.core.compiled.NAMESPACE, *(module.NAMESPACE for module in modules)}) == 3
    )
    head, hidden, targets = (
        SimpleNamespace(weight=torch.randn(31, 8), bias=None),
        torch.randn(2, 5, 8),
        torch.randint(31, (2, 5)),
    )
    logps = torch.log_softmax(hidden @ head.weight.T, -1).gather(-1, targets[..., None])[..., 0]
    for kernel in kernels:
        torch.testing.assert_close(
            kernel.layers.LinearLogProbs.forward(head, hidden, targets), logps, rtol=1e-4, atol=1e-5
        )
        batch, objective = (
            kernel.TokenBatch(targets, torch.tensor([1.0, -0.4])),
            kernel.Objective.preset("dapo", beta=0.0),
        )
        assert float(
            kernel.layers.LinearGRPOLoss.forward(head, hidden, batch, objective).loss
        ) == pytest.approx(-0.3, rel=1e-5)


def test_a_build_is_relocatable_and_its_digests_are_those_of_its_files(builds):
    """Nothing inside is imported by its absolute name; another version has another id."""
    one, other = map(described, builds)
    assert (
        one["id"] != other["id"]
        and one["id"].isidentifier()
        and {"__init__.py", "layers.py"} <= one["digest"]["files"].keys()
    )
    for name, digest in one["digest"]["files"].items():
        data = (builds[0] / name).read_bytes()
        assert digest == base64.b64encode(hashlib.sha256(data).digest()).decode()
        imports = (
            [x for x in ast.walk(ast.parse(data)) if isinstance(x, ast.ImportFrom)]
            if name.endswith(".py")
            else []
        )
        assert not [
            x for x in imports if not x.level and (x.module or "").startswith("grpo_kernels")
        ], name
