"""Describe the machine on which figures are measured, and check that the kernels run on it."""

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

#: Prefixes of environment variables that change speed or memory.
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
)
NATIVE = {"cpu": "cpu", "cuda": "triton"}  # {device: the backend whose kernels run on it}
#: Packages whose versions are recorded.
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
    """Return the kind of this machine, which names the folder of its results.

    This is the name of the GPU, or `kind_of_cpu` for a CPU.
    """
    if device == "cpu":
        return kind_of_cpu(*processor())
    return _hyphened(torch.cuda.get_device_name())


def kind_of_cpu(model: str, flags: frozenset[str]) -> str:
    """Return a name for all CPUs with similar speed ratios, e.g. "amd-epyc-family-26-avx512bf16".

    It has the maker, the product line, the family, and the best instructions for matmuls. The
    family tells generations of AMD apart, on which matmuls differ in speed.

    model   the name of the processor, with ", family N" at its end if the family is known
    flags   its CPU flags
    """
    without_trademarks = re.sub(r"\((r|tm)\)", "", model.lower())
    name, _, family = without_trademarks.partition(", family ")
    maker_and_line = re.search(r"(?:amd|intel) [a-z]+", name)
    words = [maker_and_line[0] if maker_and_line else name]
    if family:
        words.append(f"family {family}")
    has_amx = flags >= {"amx_tile", "amx_bf16"}
    words.append("amx" if has_amx else best_isa(flags) or "")
    return _hyphened(" ".join(words))


def _hyphened(name: str) -> str:
    """Return a name in lower case, with a hyphen for each run of other characters."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def machine(device: str) -> dict:
    """Return a description of the machine and its packages, for the result files.

    device  "cpu" or "cuda", where the figures are measured

    Figures are measured again if any of it changes.
    """
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
        facts["name"] = facts["cpu"]
        facts["products"] = cpu_matmuls.engine()
        if reason is None:
            facts["instruction set"] = native.load().isa()
        return facts
    gpu = torch.cuda.get_device_properties(0)
    facts |= {
        "name": gpu.name,
        "capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "memory_gb": round(gpu.total_memory / 1e9, 1),
        "cuda": torch.version.cuda,
    }
    return facts | _nvidia_smi("driver_version")


def require_kernels(device: str) -> None:
    """Raise SystemExit with the remedy if the kernels for `device` are missing or out of date.

    Otherwise eager PyTorch, or old code, would be measured in their place.
    """
    reasons = []
    if device == "cpu":
        for finding in advice(facts(torch.device(device))):
            if finding.blocks:
                reasons.append(f"{finding.problem}\n  -> {finding.remedy}")
    else:
        reason = backends.unavailable(NATIVE[device])
        if reason is not None:
            reasons.append(f"the kernels for {device} tensors do not run: {reason}")
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
    """Return the environment variables that allocators and thread pools read.

    A path is shortened to the name of the file.
    """
    return {
        name: value.rpartition("/")[2]
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT)
    }


def library() -> str:
    """Return a hash of the compiled C++ module, or "none" if it cannot be imported."""
    try:
        path = native.load().__file__
    except ImportError:
        return "none"
    assert path is not None
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _huge_pages() -> str:
    """Return when Linux uses huge pages, such as "madvise", or "" if it does not say."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists():
        return ""
    # The file lists all settings, with the current one in brackets: always [madvise] never.
    return path.read_text().partition("[")[2].partition("]")[0]


def versions() -> dict[str, str]:
    """Return the versions of those PACKAGES that are installed."""
    installed = {name: version(name) for name in PACKAGES}
    return {name: number for name, number in installed.items() if number}


def gpu_state(device: str) -> dict[str, str]:
    """Return the current clock, power and temperature of the GPU, or {} on a CPU."""
    if device != "cuda":
        return {}
    return _nvidia_smi("clocks.sm", "power.draw", "temperature.gpu")


def _nvidia_smi(*fields: str) -> dict[str, str]:
    """Return what nvidia-smi reports about the first GPU, or {} if it fails or is not installed."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    values = answer.stdout.strip().split(", ")
    if len(values) != len(fields):
        return {}
    return dict(zip(fields, values, strict=True))
