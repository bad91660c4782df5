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
from typing import Any, NoReturn

#: Python code for a new process, see `start`. It makes the import of the modules {missing} fail, as
#: if they were not installed. If "grpo_kernels._cpu" is among them, no installed copy of the
#: package is found either. With few garbage collections (the default threshold is 700 objects),
#: imports take a quarter less time.
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

    code          the Python code that it runs
    arguments     its command line, sys.argv[1:]
    environment   environment variables to change

    Returns the process. stdout and stderr go into one pipe.
    """
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    # With few garbage collections, imports take a quarter less time.
    code = f"import gc; gc.set_threshold(50_000)\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes: subprocess.Popen[str]) -> None:
    """Wait for processes of `start`, and assert that all exit with 0.

    The error has the last 4000 characters of the output of each process that failed. All processes
    are killed if one takes more than 900 seconds.
    """
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
    take longer than most checks.

    ranks       number of ranks
    function    a function of a module that a new process can import
    arguments   values whose repr is Python code
    imports     name of a module, "" for the module of the function. Its BEFORE_THE_RANKS, if it has
                one, names further modules to import before the forks.
    """
    call = (ranks, function.__module__, function.__name__, arguments, imports)
    return start(f"from support import processes; processes.become_ranks(*{call!r})")


def become_ranks(
    ranks: int, module: str, function: str, arguments: tuple[Any, ...], imports: str
) -> None:
    """Fork this process into ranks, wait for them, and exit with 1 if one failed, otherwise with 0.

    `start_ranks` calls this in a new process, and describes the arguments. `module` and `function`
    are names.
    """
    for name in getattr(importlib.import_module(imports or module), "BEFORE_THE_RANKS", ()):
        importlib.import_module(name)
    function_of_rank = getattr(importlib.import_module(module), function)
    gc.freeze()  # garbage collection would write to memory of the imports, which ranks share
    ranks_of_children = {}  # {process id: rank}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = str(rank)
            become_rank(function_of_rank, rank, *arguments)
        ranks_of_children[child] = rank

    def kill_children(signal_number: int, frame: object) -> None:
        """Kill all ranks that still run. This is a signal handler, and ignores its arguments."""
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


def become_rank(function: Callable[..., None], rank: int, *arguments: Any) -> NoReturn:
    """Call function(rank, *arguments), and end this process with 0, or with 1 if it raised.

    On Linux the process is also killed when its parent ends, so that no rank waits forever for
    others.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    status = 1
    try:
        function(rank, *arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads of gloo may abort an orderly exit


def for_its_own_pytest() -> dict[str, str]:
    """Return the environment variables for a pytest process that this pytest does not influence.

    Options in PYTEST_ADDOPTS and the variables of a pytest-xdist worker are left out.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name != "PYTEST_ADDOPTS" and not name.startswith("PYTEST_XDIST")
    }


def checked_output(command: Sequence[str], **keywords: Any) -> str:
    """Run a command, assert that it succeeds, and return what it writes to stdout.

    The error has the exit status and the ends of stdout and stderr.

    command    program and arguments
    keywords   of subprocess.run, such as env, cwd and timeout
    """
    process = subprocess.run(command, capture_output=True, text=True, **keywords)
    assert process.returncode == 0, (
        f"{process.returncode}: {' '.join(command)}\n{process.stdout[-6000:]}"
        f"\n{process.stderr[-6000:]}"
    )
    return process.stdout


def interpreted(cases: Path) -> None:
    """Assert that all tests of a file pass in Triton's interpreter and none is skipped.

    The tests run in a new pytest process, because Triton decides at its import whether it
    interprets kernels.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(cases)]
    environment = {
        **for_its_own_pytest(),
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GRPO_KERNELS_TEST_BACKENDS": "triton",
    }
    output = checked_output(command, env=environment, cwd=Path(__file__).parents[2], timeout=1800)
    assert " passed" in output and "skipped" not in output, output


# ---- checks that run on all ranks of a group, started once for all of them


def checks_of(module: str) -> dict[str, Callable[[int, int], None]]:
    """Return the functions check_*(rank, ranks) of a test module by name, in their order.

    Each is called on every rank of a process group, with the rank and the number of ranks.

    module   name of the module
    """
    return {
        name: value
        for name, value in vars(importlib.import_module(module)).items()
        if name.startswith("check_")
    }


def run_checks(module: str, ranks: int, folder: Path) -> dict[str, str]:
    """Run the checks of a module on several gloo processes, and return {check: outcome}.

    An outcome is "ok", or the error of the first rank that reports one. The first failure ends the
    run, because the other ranks may be waiting for the one that failed.

    module   name of the module, see `checks_of`
    ranks    number of processes
    folder   an empty folder, in which each rank writes its outcomes to rank{rank}.json
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

    reports   for each rank, {check: outcome} of the checks that it has run
    output    what all ranks printed
    """
    for report in reports:
        if report.get(name, "ok") != "ok":
            return report[name]
    last_lines = output[-2000:]
    not_run = [rank for rank, report in enumerate(reports) if name not in report]
    return f"not run on rank {not_run[-1]}: {last_lines}" if not_run else "ok"


def check_as_rank(rank: int, module: str, ranks: int, folder: str) -> None:
    """Run the checks of a module on one rank, and write {check: outcome} to a file in `folder`.

    The file is rank{rank}.json. It is written after each check, so that it has all outcomes if the
    process is killed. The process ends at the first check that fails.
    """
    import torch.distributed as dist

    report = {}
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    for name, check_function in checks_of(module).items():
        try:
            check_function(rank, ranks)
            report[name] = "ok"
        except BaseException:
            report[name] = f"on rank {rank}: {traceback.format_exc()}"
        (Path(folder) / f"rank{rank}.json").write_text(json.dumps(report))
        if report[name] != "ok":
            sys.exit(report[name])
    dist.barrier()
