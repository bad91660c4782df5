"""Processor, threads, memory and GPUs, and the findings about them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..rows import backends
from . import Finding, numbers


def processor() -> tuple[str, frozenset[str]]:
    """(model, instruction set flags); no flags where the system does not list them."""
    info = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", info, re.MULTILINE)
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return name, frozenset(flags[1].split() if flags else ())


def cpu() -> dict[str, Any]:
    model, _ = processor()
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    quota = cgroup_limits(Path("/sys/fs/cgroup"), _read("/proc/self/cgroup"))[0]
    available = min(x for x in (os.cpu_count() or 1, affinity, quota) if x is not None)
    try:
        load: float | None = round(os.getloadavg()[0], 2)
    except OSError:
        load = None
    return {
        "model": model,
        "processors": os.cpu_count(),
        "affinity": affinity,
        "cgroup_processors": quota,
        "usable_processors": available,
        "torch_threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "load": load,
        "openmp": sorted(set(re.findall(r"lib(?:gomp|iomp5|omp)[-.\w]*\.(?:so|dylib)[.\d]*", _read("/proc/self/maps")))),
        "memory_available": memory_available(),
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
    policy = environ.get("OMP_WAIT_POLICY", "").lower()
    spins = policy == "active" or environ.get("KMP_BLOCKTIME") == "infinite"
    if spins or (policy != "passive" and load is not None and load > found["processors"]):
        why = "OpenMP threads that wait never sleep" if spins else f"the machine is busy (load {load:g})"
        problem = f"{why}: where processes share processors, threads that spin take them from those that work"
        findings.append(Finding(problem, "set OMP_WAIT_POLICY=PASSIVE before Python starts", False, slows=True))
    if len(found["openmp"]) > 1:
        problem = f"several OpenMP runtimes are loaded, each with its threads: {', '.join(found['openmp'])}"
        remedy = "import torch first, or install packages from one source (pip or conda)"
        findings.append(Finding(problem, remedy, False, slows=True))
    return findings


def memory_available() -> int | None:
    """Bytes that this process can still allocate; None where the system does not say."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    limit = cgroup_limits(Path("/sys/fs/cgroup"), _read("/proc/self/cgroup"))[1]
    known = [x for x in (int(match[1]) * 1024 if match else None, limit) if x is not None]
    return min(known) if known else None


def cgroup_limits(root: Path, membership: str) -> tuple[float | None, int | None]:
    """(processors, bytes still free) that control groups grant; None where they set no limit.

    `membership` is /proc/self/cgroup. A container may see its own group as the root, so both places are read."""
    processors, memory = [], []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        kinds = controllers.split(",")
        for group in (Path(path), *Path(path).parents):
            inside = str(group).lstrip("/")
            if controllers == "":  # version 2: one tree
                quota, *period = _read(root / inside / "cpu.max").split() or [""]
                folder = root / inside
                limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
            else:
                quota = _read(root / "cpu" / inside / "cpu.cfs_quota_us") if "cpu" in kinds else ""
                period = [_read(root / "cpu" / inside / "cpu.cfs_period_us")]
                folder = root / "memory" / inside
                limit = _read(folder / "memory.limit_in_bytes") if "memory" in kinds else ""
                used = _read(folder / "memory.usage_in_bytes")
            if quota.strip().isdecimal() and period and period[0].strip().isdecimal():
                processors.append(int(quota) / int(period[0]))
            if limit.strip().isdecimal() and used.strip().isdecimal():
                cache = re.search(r"^(?:total_)?inactive_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
                memory.append(max(0, int(limit) - int(used) + (int(cache[1]) if cache else 0)))  # files can be dropped
    return min(processors, default=None), min(memory, default=None)


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
    """{"available", "reason" (why not), "other", "driver", "devices"}, see grpo_kernels/diagnosis/doctor.py."""
    kind, accelerator = where().type, _accelerator()
    facts: dict[str, Any] = {"available": kind != "cpu", "reason": None, "other": accelerator if kind == "cpu" else None}
    facts |= {"driver": None, "devices": []}
    if not facts["available"]:
        return facts | {"reason": why_no_gpu(torch.version.cuda, torch.version.hip, os.environ, device_present())}
    facts["driver"] = _driver()
    module = torch.get_device_module(kind)
    for index in range(module.device_count()):
        p = module.get_device_properties(index)
        free, total = module.mem_get_info(index)
        facts["devices"].append(
            {
                "name": p.name,
                "capability": _capability(kind, p),
                "multiprocessors": getattr(p, "multi_processor_count", getattr(p, "max_compute_units", None)),
                "memory": total,
                "free": free,
            }
        )
    return facts


def _capability(kind: str, properties: Any) -> str:
    """ "9.0" (NVIDIA), "gfx942:..." (AMD), "xpu"."""
    if kind != "cuda":
        return kind
    return f"{properties.major}.{properties.minor}" if torch.version.hip is None else str(properties.gcnArchName)


def device_present() -> bool:
    """Whether the system has a GPU's driver loaded and a device for it, NVIDIA's or AMD's."""
    return any(Path(p).exists() for p in ("/dev/nvidia0", "/dev/dxg", "/dev/kfd"))


def why_no_gpu(cuda: str | None, hip: str | None, environ: Mapping[str, str], present: bool) -> str:
    if cuda is None and hip is None:
        return "torch was built without CUDA or ROCm"
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if environ.get(name, "0").split(",")[0].strip() in ("", "-1"):
            return f"{name}={environ[name]!r} hides it"
    if not present:
        return "the system shows none to this process"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "torch sees none"


def gpu_findings(found: Mapping[str, Any], present: bool, archs: Sequence[str]) -> list[Finding]:
    """`archs`: what torch was compiled for, torch.cuda.get_arch_list()."""
    if found["other"] is not None:
        problem = f"there are no kernels for {found['other']} tensors: eager PyTorch computes their losses"
        return [Finding(problem, "nothing is wrong; CPUs and what Triton has a driver for have kernels", False)]
    if not found["available"]:
        if not present:
            return []
        remedy = "install a torch built for your driver (pytorch.org/get-started); make the GPU visible to this process"
        return [Finding(f"there is a GPU, but torch cannot use it: {found['reason']}", remedy, True)]
    findings = []
    for device in found["devices"]:
        if not re.fullmatch(r"\d+\.\d+", device["capability"]):  # AMD, Intel
            findings.append(untested(device))
            continue
        name = f"{device['name']} (compute capability {device['capability']})"
        capability = numbers(device["capability"])
        if not runs_on(capability, archs):
            remedy = f"install a torch whose torch.cuda.get_arch_list() covers it; this one has {', '.join(archs)}"
            findings.append(Finding(f"torch has no kernels for {name}", remedy, True))
        if capability < (8, 0):
            remedy = 'if kernels fail, pass backend="eager"'
            findings.append(Finding(f"{name} is older than the kernels were compiled and tested for (8.0)", remedy, False))
    return findings


#: The architectures of AMD's GPUs that kernels were compiled for ahead of time.
COMPILED_FOR = "gfx942"


def untested(device: Mapping[str, Any]) -> Finding:
    """The finding about a GPU of a kind on which none of our kernels has run."""
    name = f"{device['name']} ({device['capability']})"
    if device["capability"].startswith(COMPILED_FOR):
        known = f"the kernels have budgets for {COMPILED_FOR} and have not run there"
    else:
        known = "the kernels have not even been compiled for it ahead of time"
    remedy = 'go by the test below, which compares them with float64 here; backend="eager" runs without them'
    return Finding(f"untested: {name}: {known}", remedy, False)


def runs_on(capability: tuple[int, ...], archs: Sequence[str]) -> bool:
    """Whether code for `archs` runs there: sm_XY on the same major version, compute_XY (translated at load) on any later one."""
    for arch in archs:
        kind, _, digits = arch.partition("_")
        digits = re.sub(r"\D", "", digits)
        if len(digits) < 2:
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return not archs


def _driver() -> str | None:
    if torch.version.hip is not None or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def distributed() -> dict[str, Any]:
    """{"available", "backends"} of torch.distributed."""
    d = torch.distributed
    if not d.is_available():
        return {"available": False, "backends": []}
    return {"available": True, "backends": [b for b in ("nccl", "gloo", "mpi", "ucc") if getattr(d, f"is_{b}_available")()]}
