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

#: Makes `import NAME` fail as if it were not installed; without "grpo_kernels._cpu" no installed
#: copy offers one either.
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
    for name in getattr(importlib.import_module(imports or module), "BEFORE_THE_RANKS", ()):
        importlib.import_module(name)
    run, children = getattr(importlib.import_module(module), function), {}
    gc.freeze()  # the imports stay, and are shared
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = str(rank)
            become_rank(run, rank, *arguments)
        children[child] = rank
    failed = 0
    while children:
        child, status = os.wait()
        del children[child]
        if status and not failed:
            failed = 1
            signal.signal(
                signal.SIGALRM, lambda *_: [os.kill(other, signal.SIGKILL) for other in children]
            )
            signal.alarm(5)  # the others may wait for the one that failed, or have more to say
    sys.exit(failed)


def become_rank(run: Callable[..., None], rank: int, *arguments: Any) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(
            1, signal.SIGKILL
        )  # PR_SET_PDEATHSIG: killed with the process that it came from
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
        k: v
        for k, v in os.environ.items()
        if k != "PYTEST_ADDOPTS" and not k.startswith("PYTEST_XDIST")
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
    environment = for_its_own_pytest() | {
        "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path), "GRPO_KERNELS_TEST_BACKENDS": "triton",
    }  # fmt: skip
    found = said(command, env=environment, cwd=Path(__file__).parents[2], timeout=1800)
    assert " passed" in found and "skipped" not in found, found


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

    An outcome is "ok", or the error of the first rank that reports one. The first failure ends the run, since the other ranks may be waiting for that one.
    """
    process = start_ranks(ranks, check_as_rank, module, ranks, str(folder), imports=module)
    output = ""
    try:
        output = process.communicate(timeout=900)[0]
    finally:
        process.kill()
    found = {}
    for rank in reversed(range(ranks)):
        report = folder / f"rank{rank}.json"
        lines = json.loads(report.read_text()) if report.exists() else {}
        for name in checks_of(module):
            said = lines.get(name, f"not run on rank {rank}: {output[-2000:]}")
            if said != "ok" and (found.get(name, "ok") == "ok" or name in lines):
                found[name] = said
            found.setdefault(name, said)
    return found


def check_as_rank(rank: int, module: str, ranks: int, folder: str) -> None:
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
