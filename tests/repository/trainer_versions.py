"""The adapters beside several versions of each trainer: `python tests/repository/trainer_versions.py TRAINER ...`.

A TRAINER is a folder that holds one version of one package, as `pip install --no-deps --target FOLDER NAME==VERSION` makes it, or
a name: then what this environment has of it. Folders given by `--beside` hold what a trainer imports and this environment lacks.

Of TRL two steps of GRPO with a KL run with its own loss and with ours: "loss" is the whole loss inside the model's
forward (`integrations.trl`), "slot" the loss in Liger's place (`integrations.liger.patch`) beside Liger's, "head" log-probs and
entropies alone (`integrations.trl.fused_lm_head`); the result says whether the first step's comparison ran and how far the logged
losses and gradient norms are apart. Of the others the tests run that compare the adapter with the trainer's own functions.
Trainers that do not install here are known by a contract, which the line names. `--write` puts the lines into
docs/versions.md."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import versions

from grpo_kernels.integrations import adapters
from grpo_kernels.integrations._swap import OVERRIDE

ROOT = Path(__file__).parents[2]
TESTS = "tests/integrations/test_"


@dataclass(frozen=True)
class Trainer:
    """The tests of an adapter: `select` of those in `files`. `contract`: what stands in for a package that is not installed,
    `version` the one that it was written from, where the adapter declares none. `beside`: what else has a part in the result."""

    files: tuple[str, ...] = ()
    select: str = ""
    contract: str = ""
    version: str = "2026.8"
    beside: tuple[str, ...] = ()


FUNCTIONS, LOSSES, SETS = "bound_functions", "policy_losses", "replayed_sets"
#: By module of the adapter, which declares the rest.
TRAINERS = {
    "trl": Trainer(beside=("liger-kernel",)),
    "verl": Trainer(("verl", LOSSES, "trainer_distillation"), "test_verl.py or test_verl_itself or (verl and itself)"),
    "liger": Trainer(("liger",), "every_way or defaults"),
    "openrlhf": Trainer((FUNCTIONS, LOSSES), "openrlhf and (own_file or itself)"),
    "areal": Trainer((FUNCTIONS,), "areal and own_file"),
    "skyrl": Trainer((FUNCTIONS, LOSSES), "skyrl and (own_file or itself)"),
    "unsloth": Trainer((FUNCTIONS,), "unsloth and own_file"),
    "slime": Trainer((FUNCTIONS, LOSSES, SETS), "slime", "a float64 transcription of its functions and their signatures"),
    "miles": Trainer((FUNCTIONS, SETS), "miles", "stand-ins with its signatures, in float64"),
    "prime_rl": Trainer((FUNCTIONS, LOSSES, SETS), "prime", "a float64 transcription, its hooks by path"),
    "nemo_rl": Trainer(("nemo_rl",), "", "a float64 transcription of August 2026"),
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


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


def trl_result(environment: dict[str, str]) -> str:
    """Of the three adapters, the one for which this TRL has a place."""
    # TRL 1.15 has its head as Triton kernels alone.
    done = run(environment | {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1"}, "-W", "ignore", "-c", RUN)
    found = re.findall(r"^RESULT \S+ (.*)", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith(" ")] or ["no output"]
        return f"failed: {said[-1][:160]}"
    if found[0] == "none":
        return "none: it has no place for any of ours, and they say so"
    return "{}; {}; {} apart".format(*found[0].split())


def test_result(trainer: Trainer, environment: dict[str, str]) -> str:
    """What the tests came to, with the names of those that failed, or why none ran."""
    files = [f"{TESTS}{file}.py" for file in trainer.files]
    # The tests compare number by number themselves: the adapter's own comparison would only hide what they find.
    done = run(
        environment | {OVERRIDE: "1"}, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", *files, "-k", trainer.select
    )
    lines = done.stdout.strip().splitlines() or ["no output"]
    found = versions.outcome(lines[-1])
    if done.returncode not in (0, 1) or not found["passed"] + found["failed"]:
        reasons = re.findall(r"^(?:SKIPPED \[\d+\] \S+ |ERROR \S+ - )(.*)$", done.stdout, re.MULTILINE)
        return f"failed: {(reasons or lines[-1:])[0][:160]}"
    names = sorted({name.partition("[")[0] for name in re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", done.stdout, re.MULTILINE)})
    print(done.stdout[-6000:] if names else "", file=sys.stderr)
    counts = ", ".join(f"{found[word]} {word}" for word in ("passed", "failed", "skipped") if found[word])
    return counts + (f": {', '.join(f'`{name}`' for name in names)}" if names else "")


def installed(name: str, folders: Sequence[Path]) -> str:
    """The version of a package that is imported where `folders` come first."""
    found = metadata.distributions(name=name, path=[*map(str, folders), *sys.path])
    return next((one.version for one in found), "-")


def line(argument: str, beside: Sequence[Path]) -> tuple[str, dict[str, Any]]:
    """The name of the line, and its fields."""
    folder = Path(argument).resolve()
    inside = {path.name.removesuffix(".dist-info").partition("-")[::2] for path in folder.glob("*.dist-info")}
    package, version = next(((name, version) for name, version in inside if name in MODULES), (argument, ""))
    if package not in MODULES:
        sys.exit(f"{argument} is no folder with the metadata of a known trainer, nor one of {', '.join(MODULES)}")
    trainer, adapter = TRAINERS[MODULES[package]], adapters()[MODULES[package]]
    folders = [*([folder] if version else []), ROOT, ROOT / "tests", *beside]
    if not version:
        version = (adapter.tested or (trainer.version,))[-1] if trainer.contract else metadata.version(package)
    environment = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "HF_HUB_OFFLINE": "1"}
    theirs = "its own functions and ours: " + ", ".join(f"`test_{file}`" for file in trainer.files)
    return f"{package} {version}", {
        "trainer": {"Liger": "Liger-Kernel", "Unsloth": "Unsloth (zoo)"}.get(adapter.trainer, adapter.trainer),
        "version": version,
        "ran": "two steps of GRPO, its own loss and ours" if package == "trl" else trainer.contract or theirs,
        "result": trl_result(environment) if package == "trl" else test_result(trainer, environment),
        "beside": ", ".join(f"{name} {installed(name, beside)}" for name in ("torch", "transformers", *trainer.beside)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a version failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainers", nargs="+", metavar="TRAINER", help=f"a folder, or one of {', '.join(MODULES)}")
    parser.add_argument("--beside", nargs="+", type=Path, default=[], metavar="FOLDER", help="packages that trainers import")
    parser.add_argument("--write", action="store_true", help="keep the lines in benchmarks/results and docs/versions.md")
    options = parser.parse_args(arguments)
    lines, today = {}, datetime.date.today().isoformat()
    for argument in options.trainers:
        name, fields = line(argument, [folder.resolve() for folder in options.beside])
        lines[name] = fields | {"date": today}
        print(f"{name}: {fields['result']}", file=sys.stderr, flush=True)
        if options.write:
            versions.write("trainers", {name: fields})
    print(versions.trainers(lines.items()))
    return int(any("failed" in fields["result"] for fields in lines.values()))


if __name__ == "__main__":
    sys.exit(main())
