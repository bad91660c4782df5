"""Processor, threads, memory and GPUs, and the findings about them."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..rows import backends
from . import Finding, first_line


def _find(pattern: str, path: str | Path, otherwise: str = "") -> str:
    """What the group of a pattern matches in a file of the system; `otherwise` where there is no such file or match."""
    try:
        match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return otherwise
    return match[1] if match else otherwise


def processor() -> tuple[str, frozenset[str]]:
    """(model, instruction set flags); no flags where the system does not list them."""
    model = _find(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo", platform.processor() or platform.machine())
    return model.strip(), frozenset(_find(r"^flags\s*:\s*(.+)$", "/proc/cpuinfo").split())


def cpu() -> dict[str, Any]:
    processors = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else processors
    return {
        "model": processor()[0],
        "processors": processors,
        "usable_processors": min(affinity, cgroup_limits()[0]),
        "torch_threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "free_gb": round(memory_available() / 1e9, 1),
    }


def thread_findings(found: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Finding]:
    threads, usable, load = found["torch_threads"], found["usable_processors"], found["load"]
    if threads > usable:
        problem = f"torch uses {threads} threads on {usable:g} processors (affinity or container limit)"
        yield Finding(problem, f"set OMP_NUM_THREADS={max(1, int(usable))}", slows=True)
    elif threads == 1 and usable >= 2:
        cause = "; torchrun sets OMP_NUM_THREADS=1" if environ.get("OMP_NUM_THREADS") == "1" else ""
        remedy = f"set OMP_NUM_THREADS to the processors of each process (alone: {int(usable)}) if losses run on the CPU"
        yield Finding(f"torch uses 1 of {usable:g} processors{cause}", remedy, slows=True)
    if load > found["processors"] and environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        problem = f"the machine is busy (load {load:g}): threads that wait and spin take processors from those that work"
        yield Finding(problem, "set OMP_WAIT_POLICY=PASSIVE before Python starts", slows=True)


def memory_available() -> float:
    """Bytes that this process can still allocate; 2 GiB where the system does not say."""
    return min(1024 * float(_find(r"^MemAvailable:\s*(\d+) kB", "/proc/meminfo", "2097152")), cgroup_limits()[1])


def cgroup_limits() -> tuple[float, float]:
    """(processors, bytes still free) that control groups (version 2) grant; inf where they set no limit. A container may see its
    own group as the root, so all groups above are read."""
    processors, memory = math.inf, math.inf
    own = Path("/sys/fs/cgroup") / _find(r"^0::/(.*)$", "/proc/self/cgroup")
    for folder in (own, *own.parents):
        quota, period = (_find(pattern, folder / "cpu.max", "inf") for pattern in (r"^(\d+) \d+", r"^\d+ (\d+)"))
        cache = _find(r"^inactive_file (\d+)", folder / "memory.stat", "0")  # can be dropped
        used = float(_find(r"^(\d+)", folder / "memory.current", "0")) - float(cache)
        if quota != "inf":
            processors = min(processors, float(quota) / float(period))
        memory = min(memory, float(_find(r"^(\d+)", folder / "memory.max", "inf")) - used)
    return processors, memory


# ---- GPUs


def where() -> torch.device:
    """Where losses run here: on the accelerator if Triton has a driver for it, else on the CPU. "cuda" (NVIDIA, AMD) is
    returned even if Triton cannot run, so that this is reported as a problem."""
    device = torch.accelerator.current_accelerator(check_available=True)
    served = device is not None and (device.type == "cuda" or backends.native_backend(device)[1] is None)
    return torch.device(device.type if device is not None and served else "cpu")


def gpus() -> dict[str, Any]:
    """{"available", "reason" (why not), "devices"}, see grpo_kernels/diagnosis/doctor.py."""
    kind, devices = where().type, list[dict[str, Any]]()
    if kind == "cpu":
        return {"available": False, "reason": why_no_gpu(), "devices": devices}
    module = torch.get_device_module(kind)
    for index in range(module.device_count()):
        p = module.get_device_properties(index)
        # "9.0" (NVIDIA), "gfx942:..." (AMD), "xpu".
        capability = f"{p.major}.{p.minor}" if torch.version.cuda else getattr(p, "gcnArchName", kind)
        free, total = (round(size / 1e9, 1) for size in module.mem_get_info(index))
        known = {"name": p.name, "capability": capability, "multiprocessors": getattr(p, "multi_processor_count", None)}
        devices.append(known | {"memory_gb": total, "free_gb": free})
    return {"available": True, "reason": None, "devices": devices}


def why_no_gpu() -> str:
    if torch.accelerator.is_available():
        return f"no kernels for {torch.accelerator.current_accelerator()} tensors"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "torch sees none"


def device_present() -> bool:
    """Whether the system has a GPU's driver loaded and a device for it, NVIDIA's or AMD's."""
    return any(map(os.path.exists, ("/dev/nvidia0", "/dev/dxg", "/dev/kfd")))


def gpu_findings(found: Mapping[str, Any], present: bool) -> Iterator[Finding]:
    if present and not found["available"]:
        remedy = "install a torch built for your driver (pytorch.org/get-started); make the GPU visible to this process (CUDA_VISIBLE_DEVICES)"
        yield Finding(f"there is a GPU, but torch cannot use it: {found['reason']}", remedy, grave=True)
