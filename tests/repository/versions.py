"""What runs under which versions: `python tests/repository/versions.py [NAME ...]`, of environments, of trainers, or "environments"
for all of them. Without a name it writes the pages again that are made of benchmarks/results/versions.json and of what each
adapter declares; with `--write` the new lines go there too, those of today beside the others.

An environment: an sdist is made from the checkout and a wheel from the sdist; the wheel goes into a virtual environment that holds
torch, the test runner and nothing else, and the tests run against it from a folder without the package's source, but for those
about this repository. `doctor` must find nothing to repair with the C++ module, and the example of the quickstart must run. `pip`'s
own settings (PIP_INDEX_URL, ...) decide whether torch is a CPU build.

A trainer: a folder that holds one version of one package, as `pip install --no-deps --target FOLDER NAME==VERSION` makes it, or a
name: then what this environment has of it. Folders given by `--with` hold what it imports and this environment lacks. Of TRL two
steps of GRPO with a KL run with its own loss and with ours: "loss" is the whole loss inside the model's forward
(`integrations.trl`), "slot" the loss in Liger's place (`integrations.liger.patch`) beside Liger's, "head" log-probs and entropies
alone (`integrations.trl.fused_lm_head`); the result says whether the first step's comparison ran and how far the logged losses and
gradient norms are apart. Of the others the tests run that compare the adapter with the trainer's own functions. Trainers that do
not install here are known by a contract, which the line names."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from benchmarks.results import load  # noqa: E402
from benchmarks.tables import render, replace_block  # noqa: E402
from grpo_kernels.integrations import adapters  # noqa: E402
from grpo_kernels.integrations._swap import OVERRIDE  # noqa: E402

FILE, PAGE = ROOT / "benchmarks" / "results" / "versions.json", ROOT / "docs" / "versions.md"
COMMAND = "python tests/repository/versions.py"

#: What `--quick` runs in an environment, so many cases that every value of each parameter occurs
#: (tests/support/on_device.py): log-probs and losses from logits, from hidden states and over kept sets by the eager and the C++
#: backend, divergences, torch.compile, the C++ kernels alone, Triton's kernels in its interpreter, and the machine code that
#: Triton makes of them, with its budgets.
QUICK = (
    "core/test_objectives.py", "core/test_combinations.py", "core/test_rows.py", "core/test_autograd.py",
    "core/test_cost.py", "core/test_compile.py",
    "rows/test_row_kernels.py", "rows/test_two_row_kernels.py",
    "rows/test_triton_compiled.py", "rows/test_triton_compile.py", "benchmarks/test_resources.py::test_budgets",
)  # fmt: skip

Fields = dict[str, Any]


def run(
    *command: str | Path, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Nothing of the caller's own paths goes in."""
    outside = ("PYTHON", "PYTEST", "GRPO_KERNELS", "TRITON")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(outside)} | variables
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )


def call(*command: str | Path, cwd: Path = ROOT) -> str:
    """What it printed; its last words and an exit if it failed."""
    done = run(*command, cwd=cwd)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def tested(
    python: str | Path, *arguments: str, cwd: Path = ROOT, **variables: str
) -> tuple[dict[str, int], list[str]]:
    """What a run of pytest came to, errors being failures, and the names of the tests that
    failed. SystemExit if none ran.
    """
    done = run(
        python,
        "-m",
        "pytest",
        "-q",
        "-rfEs",
        "-p",
        "no:cacheprovider",
        *arguments,
        cwd=cwd,
        **variables,
    )
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1]
    found = {
        word: sum(map(int, re.findall(rf"(\d+) {word}", summary)))
        for word in ("passed", "failed", "error", "skipped")
    }
    found["failed"] += found.pop("error")
    if done.returncode not in (0, 1) or not found["passed"] + found["failed"]:
        reasons = re.findall(
            r"^(?:SKIPPED \[\d+\] \S+ |ERROR \S+ - )(.*)$", done.stdout, re.MULTILINE
        )
        sys.exit((reasons or [f"pytest ended with {done.returncode}: {summary}"])[0][:160])
    names = sorted(
        {
            name.partition("[")[0]
            for name in re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", done.stdout, re.MULTILINE)
        }
    )
    print(done.stdout[-12000:] if names else "", file=sys.stderr)
    return found, names


# ---- environments

#: About the checkout, not about the package: the same whatever torch is. The budgets of compiled kernels are not: versions of
#: Triton order loads differently.
REPOSITORY = (
    *(
        f"benchmarks/{file.name}"
        for file in (ROOT / "tests" / "benchmarks").glob("test_*.py")
        if file.stem != "test_resources"
    ),
    "repository",
    "rows/test_sanitizers.py",
)


@dataclass(frozen=True)
class Environment:
    """`triton` None: not installed, nor is anything else that the wheel asks for beside torch."""

    python: str
    torch: str
    triton: str | None
    beside: tuple[str, ...] = ()


#: Each torch with the Triton that it asks for. NumPy is what Triton's interpreter needs, and the interpreter of Triton 3.6 and
#: before one older than 2.4. "gpu" is what machines with a GPU have.
#: "development" is what constraints.txt names.
ENVIRONMENTS = {
    "oldest": Environment("3.10", "2.9.0", "3.5.0", ("numpy<2.4",)),
    "2.10": Environment("3.11", "2.10.0", "3.6.0", ("numpy<2.4",)),
    "gpu": Environment("3.12", "2.11.0", "3.6.0", ("numpy<2.4",)),
    "3.13": Environment("3.13", "2.11.0", "3.6.0", ("numpy<2.4",)),
    "2.12": Environment("3.12", "2.12.1", "3.7.1", ("numpy",)),
    "development": Environment("3.11", "2.13.0", "3.9.0", ("numpy",)),
    "bare": Environment("3.11", "2.13.0", None),
    "2.14": Environment("3.13", "2.14.1", "3.8.0", ("numpy",)),
    "newest": Environment("3.11", "2.15.0", "3.9.0", ("numpy",)),
}

VERSIONS = """
import importlib.metadata as metadata, platform, grpo_kernels
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "-"
assert metadata.version("grpo_kernels") == grpo_kernels.__version__
print(grpo_kernels.__file__, platform.python_version(), *map(version, ("torch", "triton", "numpy")), sep="\\n")
"""
#: The example of the quickstart, from the folder of the tests.
EXAMPLE = """
import sys
sys.path.insert(0, "tests")
from support.pages import QUICKSTART, examples
exec(examples(QUICKSTART)[0].code)
"""


def wheel(python: Path, work: Path) -> Path:
    """The wheel for this Python, made of the checkout's sdist unless an environment of this run
    has made it.
    """
    if not [*work.glob("*.tar.gz")]:
        call(sys.executable, "-m", "build", "--sdist", "--outdir", work, ROOT)
    version = call(
        python, "-c", "import sys; print(min(sys.version_info[1], 12))"
    ).strip()  # 3.12's serves all later ones
    if not any(work.glob(f"*-cp3{version}-*.whl")):
        call(
            python,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            work,
            next(work.glob("*.tar.gz")),
        )
    return next(work.glob(f"*-cp3{version}-*.whl"))


def environment(name: str, work: Path, quick: bool) -> Fields:
    """A line of the table. quick: every value of each parameter; no products, in tests that start
    pytest neither.
    """
    wanted, home = ENVIRONMENTS[name], work / name
    if not shutil.which(f"python{wanted.python}"):
        sys.exit(f"no Python {wanted.python} here: put python{wanted.python} on the path")
    tests, python = home / "checkout", home / "venv" / "bin" / "python"
    for folder in ("tests", "benchmarks", "examples", "docs"):
        shutil.copytree(ROOT / folder, tests / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tests)
    call(f"python{wanted.python}", "-m", "venv", home / "venv")
    built, pip = wheel(python, work), (python, "-m", "pip", "install", "--quiet", "--no-cache-dir")
    exactly = [f"torch=={wanted.torch}", *([f"triton=={wanted.triton}"] if wanted.triton else [])]
    call(*pip, *exactly, *wanted.beside, "pytest", "hypothesis")
    # With its dependencies, where they are there already, pip refuses a wheel whose ranges these versions are outside of.
    call(*pip, *([] if wanted.triton else ["--no-deps"]), built)
    call(*pip, *exactly)

    file, *found = call(
        python, "-W", "ignore", "-c", VERSIONS, cwd=tests
    ).split()  # torch warns where NumPy is missing
    line = dict(zip(("python", "torch", "triton", "numpy"), found, strict=True))
    asked = all(
        line[key].startswith(getattr(wanted, key) or "-") for key in ("python", "torch", "triton")
    )
    if not Path(file).is_relative_to(home) or not asked:
        sys.exit(f"{name} is {wanted}, and {python} has {line} and tests {file}")
    print(call(python, "-m", "grpo_kernels", "doctor", "--quick", cwd=tests), file=sys.stderr)
    call(python, "-W", "ignore", "-c", EXAMPLE, cwd=tests)
    # A single test of a file that skips itself is an error to pytest, and without Triton that file does.
    some = [f"tests/{file}" for file in QUICK if wanted.triton or "::" not in file]
    chosen, plugin = (
        some if quick else [f"--ignore=tests/{path}" for path in REPOSITORY],
        "-p support.on_device" * quick,
    )
    began = time.monotonic()
    counts, _ = tested(
        python,
        *chosen,
        cwd=tests,
        PYTEST_ADDOPTS=plugin,
        GRPO_KERNELS_TEST_FIRST=str(int(quick)),
        PYTHONPATH=str(tests / "tests"),
    )
    shutil.rmtree(home)  # several GB with CUDA builds
    seconds, kind = round(time.monotonic() - began, 1), "-".join(built.stem.split("-")[2:4])
    return line | counts | {"seconds": seconds, "wheel": kind, "tests": "quick" if quick else "all"}


# ---- trainers


@dataclass(frozen=True)
class Trainer:
    """The tests of an adapter: `select` of those in `files`. `contract`: what stands in for a package that is not installed,
    `version` the one that it was written from, where the adapter declares none. `beside`: what else has a part in the result.
    """

    files: tuple[str, ...] = ()
    select: str = ""
    contract: str = ""
    version: str = "2026.8"
    beside: tuple[str, ...] = ()


FUNCTIONS, LOSSES, SETS = "bound_functions", "policy_losses", "replayed_sets"
#: By module of the adapter, which declares the rest.
TRAINERS = {
    "trl": Trainer(beside=("liger-kernel",)),
    "verl": Trainer(
        (LOSSES, "trainer_distillation"), "verl and (itself or fused_forward or all_losses)"
    ),
    "liger": Trainer(("liger",), "every_way"),
    "openrlhf": Trainer((FUNCTIONS, LOSSES), "openrlhf and (own_file or itself)"),
    "areal": Trainer((FUNCTIONS,), "areal and own_file"),
    "skyrl": Trainer((FUNCTIONS, LOSSES), "skyrl and (own_file or itself)"),
    "unsloth": Trainer((FUNCTIONS,), "unsloth and own_file"),
    "slime": Trainer(
        (FUNCTIONS, LOSSES, SETS),
        "slime",
        "a float64 transcription of its functions and their signatures",
    ),
    "miles": Trainer((FUNCTIONS, SETS), "miles", "stand-ins with its signatures, in float64"),
    "prime_rl": Trainer(
        (FUNCTIONS, LOSSES, SETS), "prime", "a float64 transcription, its hooks by path"
    ),
    "nemo_rl": Trainer(("nemo_rl",), "", "a float64 transcription of August 2026"),
    "megatron": Trainer(
        ("megatron", "megatron_trainers"), "", "stand-ins with its hook, in float64", "0.18"
    ),
}
#: The name under which a folder of pip has a package -> the module of its adapter.
MODULES = {adapter.package.replace("-", "_"): name for name, adapter in adapters().items()}


RUN = """
import dataclasses, sys, tempfile, warnings
from pathlib import Path
import trl
from support import trl_cases
from trl.trainer import utils
from grpo_kernels.integrations import liger
from grpo_kernels.integrations.trl import fused_lm_head, patch

SLOT = "_ChunkedLogProbFunction"

names = {f.name for f in dataclasses.fields(trl.GRPOConfig)}
whole = hasattr(utils, "add_fused_lm_head")
options = {"beta": 0.05}
if "loss_type" in names:  # the default is the newest that there is
    options["loss_type"] = "bnpo" if trl.GRPOConfig.loss_type == "bnpo" else "dapo"
if not whole:
    options["use_liger_loss" if "use_liger_loss" in names else "use_liger_kernel"] = True  # the first is TRL's own, before 0.25
    if "liger_kernel_config" in names:
        options["liger_kernel_config"] = dict.fromkeys(("rope", "swiglu", "rms_norm", "cross_entropy", "fused_linear_cross_entropy"), False)
work = Path(tempfile.mkdtemp())
path = trl_cases.save_model(work / "model")
histories, said = [], []
for ours in (False, True):
    trainer = trl_cases.make_trainer(path, work / str(ours), steps=2, **options)
    slot = next((getattr(trainer, name) for name in liger.ATTRIBUTES if hasattr(trainer, name)), None)
    place, put = ("loss", patch) if whole else ("slot", liger.patch) if slot else ("head", lambda _: fused_lm_head())
    if place == "slot":
        slot.compiled = False
    if place == "head":
        for refused in (patch, liger.patch, *[put] * (not hasattr(utils, SLOT))):
            try:
                refused(trainer)
            except RuntimeError as error:
                if "install " in str(error):
                    continue
            sys.exit(f"TRL {trl.__version__} has no place for {refused.__module__}, which did not say so")
        if not hasattr(utils, SLOT):
            print("RESULT", trl.__version__, "none")
            sys.exit()
    if ours:
        made = put(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said += [str(w.message) for w in caught if "They agree" in str(w.message)]
    histories.append([h for h in trl_cases.history(trainer) if "grad_norm" in h])
assert made.counts["fused"] == (4 if place == "head" else 2) and set(made.counts) <= {"fused", "scored"}, made.counts
apart = max(abs(a[k] - b[k]) / max(1.0, abs(b[k])) for a, b in zip(*histories) for k in ("loss", "grad_norm"))
print("RESULT", trl.__version__, place, "compared" if said else "known", f"{apart:.1e}")
"""


def of_trl(**variables: str) -> str:
    """Of the three adapters, the one for which this TRL has a place."""
    # TRL 1.15 has its head as Triton kernels alone.
    done = run(
        sys.executable,
        "-W",
        "ignore",
        "-c",
        RUN,
        TORCHDYNAMO_DISABLE="1",
        TRITON_INTERPRET="1",
        **variables,
    )
    found = re.findall(r"^RESULT \S+ (.*)", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        said = [
            line for line in done.stderr.splitlines() if line.strip() and not line.startswith(" ")
        ] or ["no output"]
        return f"failed: {said[-1][:160]}"
    if found[0] == "none":
        return "none: this TRL has no hook for our adapters, and they raise an error that says so"
    return "{}; {}; {} apart".format(*found[0].split())


def of_tests(trainer: Trainer, **variables: str) -> str:
    """What its tests came to. They compare number by number: the adapter's own comparison would
    only hide what they find.
    """
    files = [f"tests/integrations/test_{file}.py" for file in trainer.files]
    try:
        counts, names = tested(
            sys.executable, *files, "-k", trainer.select, **{OVERRIDE: "1"}, **variables
        )
    except SystemExit as error:
        return f"failed: {error}"
    shown = ", ".join(
        f"{counts[word]} {word}" for word in ("passed", "failed", "skipped") if counts[word]
    )
    return shown + (f": {', '.join(f'`{name}`' for name in names)}" if names else "")


def installed(name: str, folders: Sequence[Path]) -> str:
    """The version of a package that is imported where `folders` come first."""
    found = metadata.distributions(name=name, path=[*map(str, folders), *sys.path])
    return next((one.version for one in found), "-")


def of_trainer(argument: str, beside: Sequence[Path]) -> tuple[str, Fields]:
    """The name of the line, and its fields."""
    folder = Path(argument).resolve()
    inside = {
        path.name.removesuffix(".dist-info").partition("-")[::2]
        for path in folder.glob("*.dist-info")
    }
    package, version = next(
        ((name, version) for name, version in inside if name in MODULES), (argument, "")
    )
    if package not in MODULES:
        sys.exit(
            f"{argument} is no environment ({', '.join(ENVIRONMENTS)}), nor a folder or name of"
            f" {', '.join(MODULES)}"
        )
    trainer, adapter = TRAINERS[MODULES[package]], adapters()[MODULES[package]]
    folders = [*([folder] if version else []), ROOT, ROOT / "tests", *beside]
    if not version:
        version = (
            (adapter.tested or (trainer.version,))[-1]
            if trainer.contract
            else metadata.version(package)
        )
    given = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "HF_HUB_OFFLINE": "1"}
    theirs = "its own functions and ours: " + ", ".join(f"`test_{file}`" for file in trainer.files)
    return f"{package} {version}", {
        "trainer": (
            {"Liger": "Liger-Kernel", "Unsloth": "Unsloth (zoo)"}.get(
                adapter.trainer, adapter.trainer
            )
        ),
        "version": version,
        "ran": (
            "two steps of GRPO, its own loss and ours"
            if package == "trl"
            else trainer.contract or theirs
        ),
        "result": of_trl(**given) if package == "trl" else of_tests(trainer, **given),
        "beside": ", ".join(
            f"{name} {installed(name, beside)}"
            for name in ("torch", "transformers", *trainer.beside)
        ),
    }


# ---- the tables


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def environments(lines: Iterable[tuple[str, Fields]]) -> str:
    """From the oldest torch to the newest, then what was run."""
    found = sorted(
        lines, key=lambda line: [numbers(line[1][key]) for key in ("torch", "triton", "python")]
    )
    rows = [
        "environment Python torch triton NumPy wheel passed failed skipped seconds tests date".split()
    ]
    for name, c in found:
        shown = "{python}|{torch}|{triton}|{numpy}|{wheel}|{passed:,}|{failed:,}|{skipped:,}|{seconds:.0f}|{tests}|{date}".format(
            **c
        )
        rows.append([name, *shown.split("|")])
    files = ", ".join(f"`{name.partition('.py')[0]}`" for name in QUICK)
    quick = (
        f"quick: a subset of the cases of {files}, so large that every value of each parameter"
        " occurs. all: the whole test suite."
    )
    return f"{render(rows, markdown=True)}\n\n{quick}"


def trainers(lines: Iterable[tuple[str, Fields]]) -> str:
    """By trainer, from its newest version to its oldest. Versions with one result share a row."""
    newest_first = sorted(lines, key=lambda line: numbers(line[1]["version"]), reverse=True)
    found = sorted(newest_first, key=lambda line: line[1]["trainer"].lower())
    groups: dict[tuple[str, ...], list[Fields]] = {}
    for _, c in found:
        outcome, _, _ = c["result"].partition(re.search(r"; \S+ apart$|$", c["result"])[0] or "\0")
        groups.setdefault((c["trainer"], c["ran"], outcome, c["beside"]), []).append(c)
    rows = [["trainer", "versions", "what ran", "result", "with", "dates"]]
    for (trainer, ran, outcome, beside), members in groups.items():
        apart = [float(x) for c in members for x in re.findall(r"(\S+) apart$", c["result"])]
        result = f"{outcome}; at most {max(apart):.1e} apart" if apart else outcome
        dates = sorted({c["date"] for c in members})
        versions = ", ".join(c["version"] for c in members)
        rows.append(
            [trainer, versions, ran, result, beside, " to ".join({dates[0]: 0, dates[-1]: 0})]
        )
    return text_of(rows)


def text_of(rows: list[list[str]]) -> str:
    return render(rows, markdown=True).replace("---:", "---")


def declared() -> str:
    """What each adapter is written for, by its declaration."""
    rows = [["trainer", "module", "package", "tested with", "functions that are replaced"]]
    for name, adapter in adapters().items():
        homes: dict[str, list[str]] = {}
        for path in adapter.replaces.values():
            places = [each.rpartition(".") for each in ([path] if isinstance(path, str) else path)]
            homes.setdefault(" or ".join(f"`{home}`" for home, _, _ in places), []).append(
                f"`{places[0][2]}`"
            )
        replaced = "; ".join(f"{', '.join(names)} of {home}" for home, names in homes.items())
        rows.append([
            adapter.trainer, f"`{name}`", f"`{adapter.package}`", ", ".join(adapter.tested) or "-",
            replaced or "none: an object for its own hook",
        ])  # fmt: skip
    return text_of(rows)


def configured() -> str:
    """What a configuration names."""
    rows = [["trainer", "what to set", "what it does"]]
    rows += [
        [adapter.trainer, name, does]
        for adapter in adapters().values()
        for name, does in adapter.configured.items()
    ]
    return text_of(rows)


# ---- the file and the pages


def blocks() -> dict[Path, dict[str, str]]:
    """{page: {name: text}} of what stands between a page's markers."""
    record = load(FILE)
    return {
        PAGE: {
            "environments": environments(record["environments"].items()),
            "trainers": trainers(record["trainers"].items()),
        },
        ROOT / "grpo_kernels" / "integrations" / "README.md": {
            "adapters": declared(),
            "configured": configured(),
        },
    }


def write(lines: dict[str, dict[str, Fields]]) -> None:
    """Keep these lines, of today, beside the others that are there, and bring the pages up to
    date.
    """
    record, today = load(FILE), datetime.date.today().isoformat()
    for part, found in lines.items():
        record[part] |= {name: fields | {"date": today} for name, fields in found.items()}
    FILE.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    for page, parts in blocks().items():
        for name, text in parts.items():
            page.write_text(replace_block(page.read_text(), page.name, name, text, COMMAND))


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what is named and print its lines; 1 if any failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(ENVIRONMENTS)}; a trainer, or a folder with one",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the selection of docs/versions.md: 50 seconds to 7 minutes each",
    )
    parser.add_argument(
        "--with",
        dest="beside",
        nargs="+",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="packages that trainers import",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep the lines in benchmarks/results and docs/versions.md",
    )
    options, work, failed = parser.parse_args(arguments), ROOT / "build" / "matrix", False
    shutil.rmtree(work, ignore_errors=True)
    for argument in [*ENVIRONMENTS] if options.names == ["environments"] else options.names:
        try:
            if argument in ENVIRONMENTS:
                part, name, fields = (
                    "environments",
                    argument,
                    environment(argument, work, options.quick),
                )
            else:
                part, (name, fields) = (
                    "trainers",
                    of_trainer(argument, [folder.resolve() for folder in options.beside]),
                )
        except SystemExit as error:
            print(f"{argument} failed: {error}", file=sys.stderr)
            failed = True
            continue
        print(name, json.dumps(fields), flush=True)
        failed |= bool(fields.get("failed")) or "failed" in fields.get("result", "")
        if options.write:
            write({part: {name: fields}})
    if not options.names:
        write({})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
