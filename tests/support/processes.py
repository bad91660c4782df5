"""Run tests in separate processes: on several ranks, or in another environment."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

#: Code that makes the import of the modules {missing} fail, as if they were not installed. If
#: "grpo_kernels._cpu" is among them, no installed copy of the package is found either.
WITHOUT = """
import gc, importlib.metadata, sys
gc.set_threshold(50_000)
class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(name == m or name.startswith(m + ".") for m in {missing!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
distribution = importlib.metadata.distribution
def known(name):
    if name == "grpo_kernels" and "grpo_kernels._cpu" in {missing!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)
importlib.metadata.distribution = known
"""


def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start a Python process that can import the same modules as this one, and those of the tests.

    code          what it runs
    arguments     its command line
    environment   environment variables to change
    """
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    # With few garbage collections, imports take a quarter less time.
    code = f"import gc; gc.set_threshold(50_000)\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(*processes: subprocess.Popen[str]) -> None:
    """Wait for all processes, and assert that none failed. The error has the output of those."""
    try:
        outputs = [process.communicate(timeout=900)[0] for process in processes]
        failed = [
            out[-4000:]
            for process, out in zip(processes, outputs, strict=True)
            if process.returncode != 0
        ]
        assert not failed, "\n\n".join(failed)
    finally:
        for process in processes:
            process.kill()


def start_ranks(
    ranks: int, function: Callable[..., None], *arguments: Any, imports: str = ""
) -> subprocess.Popen[str]:
    """Start `function(rank, *arguments)` on several ranks, and return the process that starts them.

    This process imports the module of the function once and then forks the ranks, because imports
    take longer than most checks. It also imports the modules that BEFORE_THE_RANKS lists in the
    module `imports` (default: the module of the function).
    """
    call = (ranks, function.__module__, function.__name__, arguments, imports)
    return start(f"from support import processes; processes.become_ranks(*{call!r})")


def become_ranks(
    ranks: int, module: str, function: str, arguments: tuple[Any, ...], imports: str
) -> None:
    """Fork this process into ranks, wait for them, and exit with 1 if one failed.

    See `start_ranks`, which calls this in a new process.
    """
    for name in getattr(importlib.import_module(imports or module), "BEFORE_THE_RANKS", ()):
        importlib.import_module(name)
    run = getattr(importlib.import_module(module), function)
    gc.freeze()  # garbage collection would write to memory of the imports, which ranks share
    ranks_of_children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = str(rank)
            become_rank(run, rank, *arguments)
        ranks_of_children[child] = rank

    def kill_children(*_: Any) -> None:
        for child in ranks_of_children:
            os.kill(child, signal.SIGKILL)

    exit_code = 0
    while ranks_of_children:
        child, status = os.wait()
        del ranks_of_children[child]
        if status != 0 and exit_code == 0:
            exit_code = 1
            # The other ranks may wait for the one that failed. They get 5 seconds to report errors.
            signal.signal(signal.SIGALRM, kill_children)
            signal.alarm(5)
    sys.exit(exit_code)


#: Option of prctl: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


def become_rank(run: Callable[..., None], rank: int, *arguments: Any) -> None:
    """Call run(rank, *arguments), and end the process with 0, or with 1 if it raised."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    status = 1
    try:
        run(rank, *arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads of gloo may abort an orderly exit


def for_its_own_pytest() -> dict[str, str]:
    """Return the environment for an independent pytest process, without options of this pytest."""
    return {
        name: value
        for name, value in os.environ.items()
        if name != "PYTEST_ADDOPTS" and not name.startswith("PYTEST_XDIST")
    }


def said(command: Sequence[str], **how: Any) -> str:
    """Run a command, assert that it succeeds, and return what it prints."""
    run = subprocess.run(command, capture_output=True, text=True, **how)
    assert run.returncode == 0, (
        f"{run.returncode}: {' '.join(command)}\n{run.stdout[-6000:]}\n{run.stderr[-6000:]}"
    )
    return run.stdout


def interpreted(cases: Path) -> None:
    """Assert that all tests of a file pass in Triton's interpreter and none is skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(cases)]
    environment = {
        **for_its_own_pytest(),
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GRPO_KERNELS_TEST_BACKENDS": "triton",
    }
    output = said(command, env=environment, cwd=Path(__file__).parents[2], timeout=1800)
    assert " passed" in output and "skipped" not in output, output


# ---- checks that run on all ranks of a group, started once for all of them


def checks_of(module: str) -> dict[str, Callable[[int, int], None]]:
    """Return the functions check_*(rank, ranks) of a test module, in their order."""
    return {
        name: value
        for name, value in vars(importlib.import_module(module)).items()
        if name.startswith("check_")
    }


def run_checks(module: str, ranks: int, folder: Path) -> dict[str, str]:
    """Run the checks of a module on several gloo processes, and return the outcome of each.

    An outcome is "ok", or the error of the first rank that reports one. The first failure ends the
    run, because the other ranks may be waiting for the one that failed.

    folder   for the files in which ranks report outcomes
    """
    process = start_ranks(ranks, check_as_rank, module, ranks, str(folder), imports=module)
    output = ""
    try:
        output = process.communicate(timeout=900)[0]
    finally:
        process.kill()
    reports = []
    for rank in range(ranks):
        path = folder / f"rank{rank}.json"
        reports.append(json.loads(path.read_text()) if path.exists() else {})
    return {name: _outcome_of_check(name, reports, output) for name in checks_of(module)}


def _outcome_of_check(name: str, reports: list[dict[str, str]], output: str) -> str:
    """Return "ok" if all ranks report this, or else the first error.

    Errors of ranks that have run the check come before those of ranks that have not.

    reports   for each rank, the outcome of the checks that it has run
    output    of all ranks
    """
    for report in reports:
        if report.get(name, "ok") != "ok":
            return report[name]
    last_lines = output[-2000:]
    not_run = [rank for rank, report in enumerate(reports) if name not in report]
    return f"not run on rank {not_run[-1]}: {last_lines}" if not_run else "ok"


def check_as_rank(rank: int, module: str, ranks: int, folder: str) -> None:
    """Run the checks of a module on one rank, and write their outcomes to a file in `folder`.

    The file is written after each check, so that it has all outcomes if the process is killed.
    """
    import torch.distributed as dist

    report = {}
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    for name, check in checks_of(module).items():
        try:
            check(rank, ranks)
            report[name] = "ok"
        except BaseException:
            report[name] = f"on rank {rank}: {traceback.format_exc()}"
        (Path(folder) / f"rank{rank}.json").write_text(json.dumps(report))
        if report[name] != "ok":
            sys.exit(report[name])
    dist.barrier()
