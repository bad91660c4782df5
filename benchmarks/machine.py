"""The machine that figures were measured on, and whether the kernels run there."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch

from grpo_kernels.core import backends
from grpo_kernels.core.backends import cpu_matmuls, native
from grpo_kernels.diagnosis.machine import advice, best_isa, facts, processor, version

ENVIRONMENT = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "MALLOC_",
    "GLIBC_",
    "LD_PRELOAD",
    "PYTORCH_",
    "GRPO_KERNELS_",
)  # prefixes
NATIVE = {"cpu": "cpu", "cuda": "triton"}  # the backend of the kernels on each device
PACKAGES = (
    "triton",
    "transformers",
    "trl",
    "liger-kernel",
    "cut-cross-entropy",
    "verl",
    "quack-kernels",
)


def kind(device: str) -> str:
    """The kind of machine, which names the folder of its results:

    see `kind_of_cpu`, or the GPU's name.
    """
    return kind_of_cpu(*processor()) if device == "cpu" else _hyphened(torch.cuda.get_device_name())


def kind_of_cpu(model: str, flags: frozenset[str]) -> str:
    """Maker, line, family and the best instructions for products: "amd-epyc-family-26-avx512bf16".
    Generations of AMD, which the family tells apart, differ in what products cost, and so do ratios
    to other implementations.
    """
    line, _, family = re.sub(r"\((r|tm)\)", "", model.lower()).partition(", family ")
    brand = re.search(r"(?:amd|intel) [a-z]+", line)
    best = "amx" if flags >= {"amx_tile", "amx_bf16"} else best_isa(flags)
    return _hyphened(
        f"{brand[0] if brand else line}{f' family {family}' if family else ''} {best or ''}"
    )


def _hyphened(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def machine(device: str) -> dict:
    """A description of the machine and the packages, for the result files."""
    reason = backends.unavailable(NATIVE[device])
    facts = {
        "device": device,
        "kind": kind(device),
        "cpu": processor()[0],
        "threads": torch.get_num_threads(),
        "environment": environment(),
        "huge pages": _huge_pages(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": versions(),
        "backend": NATIVE[device] if reason is None else f"eager ({reason})",
        "library": library(),
    }
    if device == "cpu":
        own = {"instruction set": native.load().isa()} if reason is None else {}
        return facts | {"name": facts["cpu"], "products": cpu_matmuls.engine()} | own
    p = torch.cuda.get_device_properties(0)
    known = {
        "name": p.name,
        "capability": f"{p.major}.{p.minor}",
        "multiprocessors": p.multi_processor_count,
    }
    known |= {"memory_gb": round(p.total_memory / 1e9, 1), "cuda": torch.version.cuda}
    return facts | known | _nvidia_smi("driver_version")


def require_kernels(device: str) -> None:
    """Raises SystemExit with the remedy if the kernels for `device` are missing or out of date:
    otherwise eager PyTorch, or old code, would be measured in their place.
    """
    if device == "cpu":
        reasons = [
            f"{f.problem}\n  -> {f.remedy}" for f in advice(facts(torch.device(device))) if f.blocks
        ]
    else:
        reason = backends.unavailable(NATIVE[device])
        reasons = (
            [] if reason is None else [f"the kernels for {device} tensors do not run: {reason}"]
        )
    if reasons:
        raise SystemExit("\n".join(["Nothing was measured.", *reasons]))


#: Load average per processor from which on timings are not trusted.
BUSY = 0.5


def load_warning(load: float, processors: int) -> str | None:
    """Return a sentence if other programs use the processors; None for an idle machine.

    load   the average number of running threads over the last minute."""
    if load < BUSY * processors:
        return None
    return (
        f"warning: the machine is loaded (load {load:.1f} on {processors} processors): timings will"
        " be too long and spread. Stop the other programs, wait a minute, and start again."
    )


def environment() -> dict[str, str]:
    """Environment variables that allocators and thread pools read.

    A path is shortened to the name of the file.
    """
    return {
        name: value.rpartition("/")[2]
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT)
    }


def library() -> str:
    """A hash of the compiled module, or "none"."""
    try:
        path = native.load().__file__
    except ImportError:
        return "none"
    assert path is not None
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _huge_pages() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().partition("[")[2].partition("]")[0] if path.exists() else ""


def versions() -> dict[str, str]:
    """Versions of the packages whose code is measured, where they are installed."""
    return {name: there for name in PACKAGES if (there := version(name))}


def gpu_state(device: str) -> dict[str, str]:
    """Clock, power and temperature now, if nvidia-smi is there; empty on a CPU."""
    return _nvidia_smi("clocks.sm", "power.draw", "temperature.gpu") if device == "cuda" else {}


def _nvidia_smi(*fields: str) -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    values = answer.stdout.strip().split(", ")
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}
