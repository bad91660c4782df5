"""Tests in processes of their own: several ranks, or another environment."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

#: Makes `import NAME` fail as if it were not installed; without "grpo_kernels._cpu" no installed copy offers one either.
WITHOUT = """
import importlib.metadata, sys
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
    """A Python process that finds what this one finds, the tests' modules included."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(*processes: subprocess.Popen[str]) -> None:
    """Wait for all of them, and show what those that failed have said."""
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
        failed = [out[-4000:] for process, out in zip(processes, outputs, strict=True) if process.returncode != 0]
        assert not failed, "\n\n".join(failed)
    finally:
        for process in processes:
            process.kill()


def for_its_own_pytest() -> dict[str, str]:
    """The environment for a pytest in a process of its own: it is no worker of this one, and does not take its options."""
    return {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS" and not k.startswith("PYTEST_XDIST")}


def interpreted(cases: Path) -> None:
    """All cases of a file pass in Triton's interpreter, and none is skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(cases)]
    environment = for_its_own_pytest() | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    root = Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout


# ---- checks that run on all ranks of a group, started once for all of them


def checks_of(module: str) -> dict[str, Callable[[int, int], None]]:
    """Functions check_*(rank, ranks) of a test module, in their order."""
    return {name: value for name, value in vars(importlib.import_module(module)).items() if name.startswith("check_")}


def run_checks(module: str, ranks: int, folder: Path) -> dict[str, str]:
    """What each check of `module` came to on `ranks` gloo processes: "ok", or what went wrong on the first rank that says.

    The first failure ends the run, since the other ranks may be waiting for that one."""
    code = f"from support import processes; processes.check_as_rank({module!r}, {ranks}, {str(folder)!r})"
    processes = [start(code, RANK=str(rank)) for rank in range(ranks)]
    outputs = []
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = {}
    for rank in reversed(range(ranks)):
        report = folder / f"rank{rank}.json"
        lines = json.loads(report.read_text()) if report.exists() else {}
        for name in checks_of(module):
            said = lines.get(name, f"not run on rank {rank}: {outputs[rank][-2000:]}")
            if said != "ok" and (found.get(name, "ok") == "ok" or name in lines):
                found[name] = said
            found.setdefault(name, said)
    return found


def check_as_rank(module: str, ranks: int, folder: str) -> None:
    import torch.distributed as dist

    rank, report = int(os.environ["RANK"]), {}
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for name, check in checks_of(module).items():
        try:
            check(rank, ranks)
            report[name] = "ok"
        except BaseException:
            report[name] = f"on rank {rank}: {traceback.format_exc()}"
        (Path(folder) / f"rank{rank}.json").write_text(json.dumps(report))
        if report[name] != "ok":
            os._exit(1)
    dist.barrier()
    os._exit(0)  # threads of gloo may abort an orderly exit
