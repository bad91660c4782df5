"""The GPU kit on a CPU, with the versions of a machine that has a GPU: `python tests/repository/rehearsal.py [--python PYTHON]`.

Runs the four calls of docs/gpu.md in turn, with the same command lines and `--rehearse`. Each starts from the results of the
one before and has an empty work folder, as on a machine that keeps nothing. Without --python an environment is created first
(matrix.py, "gpu"), and the wheels of other projects are downloaded for it. Prints a table with one line per call. Exit status 1
if a stage failed, if something was left out that LEFT_OUT does not name, or if a peer cannot be imported."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from matrix import ENVIRONMENTS, call, interpreter  # noqa: E402

from benchmarks.gpu_plan import CALLS, COMPARED, FURTHER, REHEARSED_SUITES  # noqa: E402

#: Beside what such a machine has, of what the stages and the peers import.
BESIDE = (
    "numpy<2.4",
    "pytest",
    "pytest-xdist",
    "pytest-timeout",
    "hypothesis",
    "matplotlib",
    "transformers==5.17.0",
    "pandas",
    "pyarrow",
    "cloudpickle",
)
#: What cannot run without a GPU.
LEFT_OUT = {
    "waits of the host", "host time of a call", "CUDA graphs", "registers of the kernels as loaded",
    "compute-sanitizer, which is not installed", "bytes of device memory, which ncu counts on a GPU", *(f"suite {name}" for name in (*COMPARED, *FURTHER) if name not in REHEARSED_SUITES),
}  # fmt: skip


#: Peers that the page has no wheels of.
WITHOUT_WHEELS = {"Unsloth chunked log-probs + loss"}


def wheels_of_the_page() -> list[str]:
    """The arguments of the `pip download` on docs/gpu.md, without the folder."""
    (command,) = re.findall(r"^pip download (.*?)^```", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE | re.DOTALL)
    words = command.replace("\\\n", " ").split()
    return [word for word in words if word not in ("-d", "WHEELS")]


def environment(work: Path) -> Path:
    """A new one, and its Python."""
    wanted = ENVIRONMENTS["gpu"]
    shutil.rmtree(work / "venv", ignore_errors=True)
    call(interpreter(wanted.python), "-m", "venv", work / "venv")
    python = work / "venv" / "bin" / "python"
    pins = (f"torch=={wanted.torch}", f"triton=={wanted.triton}")
    call(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *pins, *BESIDE)
    return python


def one_call(number: int, python: Path, wheels: Path, home: Path, minutes: float) -> str:
    """A line of the table. `home` holds what the call before brought, and gets what this one brings."""
    out = home.with_name(f"call-{number}")
    shutil.rmtree(out, ignore_errors=True)
    command = [python, "-m", "benchmarks.gpu_kit", "--out", out, "--call", number, "--minutes", minutes, "--rehearse"]
    command += ["--wheels", wheels] if any(stage.name == "install" for stage in CALLS[number]) else []
    command += ["--resume", home] if home.exists() else []
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "GRPO_KERNELS", "TRITON"))}
    began = time.monotonic()
    done = subprocess.run([str(word) for word in command], cwd=ROOT, env=kept, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - began
    if done.returncode != 0:
        sys.exit(f"call {number} ended with {done.returncode}\n{done.stdout[-6000:]}")
    shutil.copy(out / "results.tar.gz", home)
    left = left_out(home, [stage.name for stage in CALLS[number]])
    if left - LEFT_OUT:
        sys.exit(f"call {number} left out what a CPU can run: {', '.join(sorted(left - LEFT_OUT))}")
    if number == 1 and missing(home):
        sys.exit("\n".join(f"{name}: {why}" for name, why in missing(home).items()))
    return f"| {number} | {', '.join(stage.name for stage in CALLS[number])} | {len(list(out.iterdir()))} | {len(left)} | {seconds:.0f} |"


def missing(archive: Path) -> dict[str, str]:
    """{peer: reason} of those that cannot be imported although a CPU could run them."""
    with tarfile.open(archive) as tar:
        file = tar.extractfile("json/peers.json")
        assert file is not None
        reasons = json.load(file)["reasons"]
    said = ("not installed", "import of")
    return {name: why for name, why in reasons.items() if why and why.startswith(said) and name not in WITHOUT_WHEELS}


def left_out(archive: Path, stages: Sequence[str]) -> set[str]:
    found: set[str] = set()
    with tarfile.open(archive) as tar:
        for stage in stages:
            file = tar.extractfile(f"json/{stage}.json")
            assert file is not None
            found |= set(json.load(file).get("left_out", []))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse all calls and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="of an environment that has all that the kit needs (default: a new one)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "rehearsal", help="where things are made")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each call")
    options = parser.parse_args(arguments)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    home, wheels = work / "home.tar.gz", work / "wheels"
    home.unlink(missing_ok=True)
    python = environment(work) if options.python is None else options.python.absolute()
    call(python, "-m", "pip", "download", "--quiet", "--dest", wheels, *wheels_of_the_page())
    rows = [one_call(number, python, wheels, home, options.minutes) for number in CALLS]
    print("| call | stages | files | left out | seconds |\n| ---: | --- | ---: | ---: | ---: |")
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
