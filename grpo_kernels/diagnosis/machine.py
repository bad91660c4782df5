"""Processor, threads, memory and GPUs, and the findings about them."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..rows import backends
from . import Finding, first_line


def processor() -> tuple[str, frozenset[str]]:
    """(model, instruction set flags); no flags where the system does not list them."""
    info = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", info, re.MULTILINE)
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return name, frozenset(flags[1].split() if flags else ())


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


def thread_findings(found: Mapping[str, Any], environ: Mapping[str, str]) -> list[Finding]:
    findings = []
    threads, usable, load = found["torch_threads"], found["usable_processors"], found["load"]
    if threads > usable:
        problem = f"torch uses {threads} threads on {usable:g} processors (affinity or container limit)"
        findings.append(Finding(problem, f"set OMP_NUM_THREADS={max(1, int(usable))}", False, slows=True))
    elif threads == 1 and usable >= 2:
        cause = "; torchrun sets OMP_NUM_THREADS=1" if environ.get("OMP_NUM_THREADS") == "1" else ""
        remedy = f"set OMP_NUM_THREADS to the processors of each process (alone: {int(usable)}) if losses run on the CPU"
        findings.append(Finding(f"torch uses 1 of {usable:g} processors{cause}", remedy, False, slows=True))
    if load > found["processors"] and environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        problem = f"the machine is busy (load {load:g}): threads that wait and spin take processors from those that work"
        findings.append(Finding(problem, "set OMP_WAIT_POLICY=PASSIVE before Python starts", False, slows=True))
    return findings


def memory_available() -> float:
    """Bytes that this process can still allocate; 2 GiB where the system does not say."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return min(float(match[1]) * 1024 if match else 2**31, cgroup_limits()[1])


def cgroup_limits() -> tuple[float, float]:
    """(processors, bytes still free) that control groups (version 2) grant; inf where they set no limit. A container may see its
    own group as the root, so all groups above are read."""
    processors, memory = math.inf, math.inf
    own = re.search(r"^0::/(.*)$", _read("/proc/self/cgroup"), re.MULTILINE)
    for group in (Path(own[1]), *Path(own[1]).parents) if own else ():
        folder = Path("/sys/fs/cgroup") / group
        if quota := re.match(r"(\d+) (\d+)", _read(folder / "cpu.max")):
            processors = min(processors, int(quota[1]) / int(quota[2]))
        if limit := re.match(r"\d+", _read(folder / "memory.max")):
            cache = re.search(r"^inactive_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)  # can be dropped
            used = int(_read(folder / "memory.current") or 0) - (int(cache[1]) if cache else 0)
            memory = min(memory, int(limit[0]) - used)
    return processors, memory


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


# ---- GPUs


def where() -> torch.device:
    """Where losses run here: on the accelerator if Triton has a driver for it, else on the CPU. "cuda" (NVIDIA, AMD) is
    returned even if Triton cannot run, so that this is reported as a problem."""
    kind = _accelerator()
    served = kind is not None and (kind == "cuda" or backends.native_backend(torch.device(kind))[1] is None)
    return torch.device(str(kind) if served else "cpu")


def _accelerator() -> str | None:
    """The type of torch's device other than the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else accelerator.type


def gpus() -> dict[str, Any]:
    """{"available", "reason" (why not), "devices"}, see grpo_kernels/diagnosis/doctor.py."""
    kind = where().type
    devices: list[dict[str, Any]] = []
    if kind == "cpu":
        other = _accelerator()
        return {"available": False, "reason": f"no kernels for {other} tensors" if other else why_no_gpu(), "devices": devices}
    module = torch.get_device_module(kind)
    for index in range(module.device_count()):
        p = module.get_device_properties(index)
        # "9.0" (NVIDIA), "gfx942:..." (AMD), "xpu".
        capability = f"{p.major}.{p.minor}" if torch.version.cuda else getattr(p, "gcnArchName", kind)
        free, total = (round(size / 1e9, 1) for size in module.mem_get_info(index))
        known = {"name": p.name, "capability": capability, "multiprocessors": getattr(p, "multi_processor_count", None)}
        devices.append(known | {"memory_gb": total, "free_gb": free})
    return {"available": True, "reason": None, "devices": devices}


def device_present() -> bool:
    """Whether the system has a GPU's driver loaded and a device for it, NVIDIA's or AMD's."""
    return any(Path(p).exists() for p in ("/dev/nvidia0", "/dev/dxg", "/dev/kfd"))


def why_no_gpu() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "torch sees none"


def gpu_findings(found: Mapping[str, Any], present: bool) -> list[Finding]:
    if present and not found["available"]:
        remedy = "install a torch built for your driver (pytorch.org/get-started); make the GPU visible to this process (CUDA_VISIBLE_DEVICES)"
        return [Finding(f"there is a GPU, but torch cannot use it: {found['reason']}", remedy, True)]
    return []
