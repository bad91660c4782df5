"""Facts about processor, memory, GPUs, compiled module, versions and settings of this machine, and
the problems (`Finding`) that follow from them.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..core import backends
from ..core.backends import BACKENDS, cpu_matmuls
from ..core.backends.cpu import NO_AVX2
from ..core.backends.native import (
    PACKAGE,
    build_command,
    built_from,
    load,
    package,
    package_version,
    source_digest,
    unsupported_machine,
)
from ..integrations import adapters
from ..integrations._swap import matches_version
from . import Finding, first_line


def _search_file(pattern: str, path: str | Path, default: str = "") -> str:
    """Return the first group of the first match of a pattern in a system file.

    pattern   a regular expression with one group
    path      the file, such as "/proc/cpuinfo"

    `^` and `$` match at each line. Returns `default` if the file cannot be read or has no match.
    """
    try:
        match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return default
    return match[1] if match else default


def processor() -> tuple[str, frozenset[str]]:
    """Return (model, instruction set flags) of the CPU, from /proc/cpuinfo.

    The flags are empty if the system does not list them. The model includes the CPU family, because
    virtual machines often hide the name: family 25 is AMD Zen 3 or 4, family 26 is Zen 5.
    """
    default_model = platform.processor() or platform.machine()
    model = _search_file(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo", default_model).strip()
    family = _search_file(r"^cpu family\s*:\s*(\d+)$", "/proc/cpuinfo")
    if family:
        model = f"{model}, family {family}"
    flags = _search_file(r"^flags\s*:\s*(.+)$", "/proc/cpuinfo")
    return model, frozenset(flags.split())


def cpu_facts() -> dict[str, Any]:
    """Return the entry "cpu" of the report, see grpo_kernels/diagnosis/doctor.py."""
    processors = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else processors
    processor_limit, _ = cgroup_limits()
    return {
        "model": processor()[0],
        "processors": processors,
        "usable_processors": min(affinity, processor_limit),
        "torch_threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "free_gb": round(memory_available() / 1e9, 1),
    }


def memory_available() -> float:
    """Return the number of bytes that this process can still allocate.

    Assumes 2 GiB if the system does not say.
    """
    available_kib = float(_search_file(r"^MemAvailable:\s*(\d+) kB", "/proc/meminfo", "2097152"))
    _, memory_limit = cgroup_limits()
    return min(1024 * available_kib, memory_limit)


def cgroup_limits() -> tuple[float, float]:
    """Return (processors, free bytes of memory) that control groups (version 2) grant.

    A limit that no group sets is inf. The limits of all parent groups are read as well, because a
    container may see its own group as the root.
    """
    processors = math.inf
    memory = math.inf
    own_group = Path("/sys/fs/cgroup") / _search_file(r"^0::/(.*)$", "/proc/self/cgroup")
    for folder in (own_group, *own_group.parents):
        # cpu.max holds "QUOTA PERIOD", or "max PERIOD" if there is no limit.
        quota = _search_file(r"^(\d+) \d+", folder / "cpu.max", "inf")
        period = _search_file(r"^\d+ (\d+)", folder / "cpu.max", "inf")
        if quota != "inf":
            processors = min(processors, float(quota) / float(period))
        limit = float(_search_file(r"^(\d+)", folder / "memory.max", "inf"))
        used = float(_search_file(r"^(\d+)", folder / "memory.current", "0"))
        # The kernel can drop this part of the file cache.
        droppable = float(_search_file(r"^inactive_file (\d+)", folder / "memory.stat", "0"))
        memory = min(memory, limit - (used - droppable))
    return processors, memory


# ---- GPUs


def device_of_losses() -> torch.device:
    """Return the device whose kernels are tested: the accelerator if Triton has a driver for it,
    else the CPU.

    Returns "cuda" (NVIDIA, AMD) even if Triton cannot run, so that this is reported as a problem.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    _, reason_against_triton = backends.native_backend(accelerator)
    if accelerator.type == "cuda" or reason_against_triton is None:
        return torch.device(accelerator.type)
    return torch.device("cpu")


def gpu_facts() -> dict[str, Any]:
    """Return the entry "gpu" of the report, see grpo_kernels/diagnosis/doctor.py."""
    device_type = device_of_losses().type
    if device_type == "cpu":
        return {"available": False, "reason": why_no_gpu(), "devices": []}
    module = torch.get_device_module(device_type)
    devices = list[dict[str, Any]]()
    for index in range(module.device_count()):
        properties = module.get_device_properties(index)
        if torch.version.cuda:
            capability = f"{properties.major}.{properties.minor}"
        else:  # "gfx942:..." on AMD
            capability = getattr(properties, "gcnArchName", device_type)
        free_bytes, total_bytes = module.mem_get_info(index)
        devices.append(
            {
                "name": properties.name,
                "capability": capability,
                "multiprocessors": getattr(properties, "multi_processor_count", None),
                "memory_gb": round(total_bytes / 1e9, 1),
                "free_gb": round(free_bytes / 1e9, 1),
            }
        )
    return {"available": True, "reason": None, "devices": devices}


def why_no_gpu() -> str:
    """Return in a few words why losses cannot run on a GPU."""
    if torch.accelerator.is_available():
        return f"no kernels for {torch.accelerator.current_accelerator()} tensors"
    if not torch.backends.cuda.is_built():
        return "this torch is a build for CPUs"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return first_line(error)
    return "torch sees none"


def device_present() -> bool:
    """Return whether the system has a device file of an NVIDIA or AMD GPU."""
    return any(map(os.path.exists, ("/dev/nvidia0", "/dev/dxg", "/dev/kfd")))


# ---- the compiled module


def module_facts() -> dict[str, Any]:
    """Return the entry "native" of the report, see grpo_kernels/diagnosis/doctor.py.

    If the module cannot be imported, "reason" is the message of the ImportError, and all other
    values are empty.
    """
    facts: dict[str, Any] = {
        "path": None,
        "reason": None,
        "compiler": None,
        "instruction_set": None,
        "instruction_sets": [],
    }
    try:
        native = load()
    except ImportError as error:
        facts["reason"] = str(error)
        return facts
    facts["path"] = native.__file__
    functions = {"compiler": "compiler", "instruction_set": "isa", "instruction_sets": "isas"}
    for key, function in functions.items():
        if hasattr(native, function):  # a module that is out of date may lack some
            facts[key] = getattr(native, function)()
    return facts


def matmul_engine() -> str | None:
    """Return the name of the engine that computes matmuls on the CPU.

    An engine is an implementation of matmuls, such as torch.mm. Returns None if the environment
    variable names an engine that cannot run here, or if the compiled module is out of date.
    """
    try:
        return cpu_matmuls.engine()
    except (AttributeError, ValueError):
        return None


def best_isa(flags: frozenset[str]) -> str | None:
    """Return the best instruction set of the C++ module for a processor with these flags.

    Returns None if there is none, or if the flags are not known (empty). csrc/module.cpp chooses in
    the same way.
    """
    if flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}:
        return "avx512bf16" if "avx512_bf16" in flags else "avx512"
    return "avx2" if flags >= {"avx2", "fma"} else None


# ---- versions and settings

PACKAGES = (
    "triton",
    "numpy",
    "transformers",
    "trl",
    "accelerate",
    "deepspeed",
    "liger-kernel",
    "flash-attn",
    "verl",
    "vllm",
)

#: Instruction sets of csrc/processor.h, and the environment variable that limits them.
ISAS = ("avx2", "avx512", "avx512bf16")
ISA_SETTING = "GRPO_KERNELS_ISA"
SETTINGS = {
    "GRPO_KERNELS_BACKEND": (
        "auto, eager, cpu or triton: the backend of calls that leave backend at auto"
    ),
    cpu_matmuls.SETTING: (
        f"auto, {', '.join(cpu_matmuls.ENGINES)}: the engine that computes the matmuls of losses from"
        " hidden states on a CPU"
    ),
    ISA_SETTING: (
        f"{', '.join(ISAS)}: the highest instruction set that the C++ module uses; unset: the"
        " processor's best"
    ),
    "GRPO_KERNELS_STRICT": "1: a fallback to eager raises instead of warning",
    "GRPO_KERNELS_CHECK": (
        "1: ids, temperatures and offsets are checked on a GPU too; each call then waits for the GPU"
    ),
    "GRPO_KERNELS_ANY_VERSION": (
        "1: adapters do not compare their first step under a version of a trainer that was not"
        " tested"
    ),
    "TRITON_INTERPRET": (
        '1: backend="triton" runs CPU tensors in Triton\'s interpreter (slow, for tests)'
    ),
}
#: Prefixes of environment variables that affect the visible devices, the threads, the precision of
#: matmuls, or the compilation of kernels.
REPORTED_PREFIXES = ("OMP_", "KMP_", "GOMP_", "MKL_", "CUDA_", "HIP_", "ROCR_", "NVIDIA_TF32", "TORCH_", "TRITON_", "PYTORCH_", "LD_PRELOAD",
           "CC", "CXX", "GRPO_KERNELS_")  # fmt: skip


def version(package: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of torch, Python, the system and `PACKAGES`; None if not installed."""
    build = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    system = {"python": platform.python_version(), "os": platform.platform()}
    return build | system | {package: version(package) for package in PACKAGES}


def version_findings() -> Iterator[Finding]:
    """Yield a finding for each installed trainer whose version its adapter was not tested with.

    The version of torch needs no check: pip installs one that is new enough.
    """
    for adapter in adapters().values():
        installed = version(adapter.package)
        if installed is None or not adapter.tested:
            continue
        if not matches_version(installed, adapter.tested):
            yield Finding(
                f"{adapter.package} is {installed}, but its adapter was tested with"
                f" {', '.join(adapter.tested)}",
                "nothing, if the warning at the first step says that both compute the same; else"
                " install a tested version",
            )


def environment_variables() -> dict[str, str]:
    """Return the environment variables that are set and may affect the kernels."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(REPORTED_PREFIXES)
    }


def setting_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each setting of this package that has a wrong value or an unknown name.

    environ   environment variables
    """
    for name, value in environ.items():
        if name in SETTINGS:
            finding = _setting_finding(name, value)
            if finding is not None:
                yield finding
        elif name.startswith("GRPO_KERNELS_") and not name.startswith("GRPO_KERNELS_TEST"):
            names = ", ".join(known for known in SETTINGS if known.startswith("GRPO_KERNELS_"))
            yield Finding(f"{name} is not a setting of this version", f"there are {names}")


def _setting_finding(name: str, value: str) -> Finding | None:
    """Return a finding if a setting has a wrong value, else None.

    name   a key of `SETTINGS`
    """
    engines = cpu_matmuls.engines()  # the reason why an engine cannot run here, or None
    usable_engines = [engine for engine, reason in engines.items() if reason is None]
    allowed_values = {
        "GRPO_KERNELS_BACKEND": ["auto", *BACKENDS],
        cpu_matmuls.SETTING: ["", "auto", *usable_engines],
        ISA_SETTING: ["", *ISAS],
    }
    is_switch = name not in allowed_values  # on or off
    allowed = ["", "0", "1"] if is_switch else allowed_values[name]
    if value in allowed:
        return None
    if is_switch:
        consequence = "it has no effect"
    else:
        reason = engines.get(value) or "there is no such value"
        effect = "the C++ module does not load" if name == ISA_SETTING else "calls raise"
        consequence = f"{reason}, and {effect}"
    choices = ", ".join(choice for choice in allowed if choice)
    remedy = f"set it to one of {choices}, or unset it"
    return Finding(f"{name}={value}: {consequence}", remedy, grave=not is_switch)


# ---- the findings


def facts(device: torch.device) -> dict[str, Any]:
    """Return the part of the report that is known before any test runs.

    device   where losses run, see `device_of_losses`

    grpo_kernels/diagnosis/doctor.py lists the keys.
    """
    return {
        "versions": {"grpo_kernels": package_version(), **versions()},
        "package": package(),
        "native": module_facts(),
        "matmuls": {"engine": matmul_engine(), "engines": cpu_matmuls.engines()},
        "cpu": cpu_facts(),
        "gpu": gpu_facts(),
        "device": device.type,
        "environment": environment_variables(),
        "settings": SETTINGS,
    }


def module_findings(report: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings about the package and the compiled module.

    If the processor cannot run the module, this is the only finding about the module.

    report    the facts, see `facts`
    environ   environment variables
    """
    native = report["native"]
    shadows = report["package"]["shadows"]
    if shadows:
        yield Finding(
            f"the checkout at {PACKAGE.parent} hides the installed package at {shadows}",
            "start Python in another directory to use the installed package",
        )
    # The module loads on a processor without AVX2 too. Its instruction set is then "".
    lacks_avx2 = native["instruction_set"] == ""
    reason = unsupported_machine() or (NO_AVX2 if lacks_avx2 else None)
    if reason:
        yield Finding(
            f"CPU tensors run in eager PyTorch: {reason}",
            "use a processor with AVX2, or a GPU",
            slows=True,
        )
        return
    command = build_command(report["package"])
    # If losses run on a GPU, its kernels can be tested without the compiled module.
    is_needed = report["device"] == "cpu"
    if native["reason"] and is_needed:
        yield Finding(
            "the compiled module is missing, CPU tensors fall back to eager PyTorch:"
            f" {native['reason']}",
            f"{command}; it needs a C++17 compiler (Debian, Ubuntu: apt-get install g++), and its"
            " output says what failed",
            grave=True,
            blocks=True,
        )
    path = native["path"]
    digest = source_digest(PACKAGE.parent)  # None if the C++ sources are not here
    if path and digest is not None and digest != built_from(Path(path)):
        yield Finding(
            f"the compiled module is out of date: {path} was built from other C++ sources than"
            f" those in {PACKAGE.parent}",
            command,
            grave=True,
            blocks=is_needed,
        )
    _, flags = processor()
    best = best_isa(flags)
    if native["instruction_set"] and best is not None and best != native["instruction_set"]:
        rebuild = f"{command} (with GCC 10 or Clang 9, or newer)"
        yield Finding(
            f"the compiled module runs {native['instruction_set']} code, but this processor has {best}",
            f"unset {ISA_SETTING}" if environ.get(ISA_SETTING) else rebuild,
            slows=True,
        )


def amx_findings() -> Iterator[Finding]:
    """Yield a finding if AMX matmuls were wrong when they were compared before their first use."""
    # A text that says what differed, or None.
    mismatch = cpu_matmuls.amx_mismatch()
    if mismatch is not None:
        yield Finding(
            f"{mismatch}; losses from hidden states on the CPU are right, but use another engine,"
            " which may be slower",
            "report this with the output of `python -m grpo_kernels doctor --json`; "
            f"{cpu_matmuls.SETTING}=fp32 or avx512bf16 skips the comparison and its warning",
            grave=True,
            slows=True,
        )


def machine_findings(report: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings about threads, load, and GPUs that torch does not use well.

    report    the facts, see `facts`
    environ   environment variables
    """
    cpu = report["cpu"]
    threads = cpu["torch_threads"]
    usable = max(1, int(cpu["usable_processors"]))
    if threads > usable:
        yield Finding(
            f"torch uses {threads} threads on {usable} processors (affinity or container limit)",
            f"set OMP_NUM_THREADS={usable}",
            slows=True,
        )
    if threads == 1 < usable:
        yield Finding(
            f"torch uses 1 of {usable} processors (torchrun sets OMP_NUM_THREADS=1)",
            f"set OMP_NUM_THREADS to the processors of each process (alone: {usable}) if losses run"
            " on the CPU",
            slows=True,
        )
    if cpu["load"] > cpu["processors"] and environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        yield Finding(
            f"the machine is busy (load {cpu['load']:g}): waiting threads that spin take processors"
            " from working ones",
            "set OMP_WAIT_POLICY=PASSIVE before Python starts",
            slows=True,
        )
    if device_present() and report["gpu"]["reason"]:
        yield Finding(
            f"there is a GPU, but torch cannot use it: {report['gpu']['reason']}",
            "install a torch built for your driver (pytorch.org/get-started); make the GPU visible"
            " to this process (CUDA_VISIBLE_DEVICES)",
            grave=True,
        )
    if not torch.cuda.is_available():
        return
    if cpu_matmuls.less_than_fp32() or environ.get("NVIDIA_TF32_OVERRIDE") == "1":
        yield Finding(
            "fp32 matmuls are rounded to TF32, and log-probs with them",
            "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and NVIDIA_TF32_OVERRIDE (some container images"
            ' set them), and call torch.set_float32_matmul_precision("highest") before losses from'
            " fp32 hidden states",
        )
    if environ.get("TRITON_INTERPRET") == "1":
        yield Finding(
            "TRITON_INTERPRET=1: kernels run on the CPU, very slowly",
            "unset TRITON_INTERPRET",
            grave=True,
        )


def advice(report: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return all findings that follow from `facts`: what is missing, wrong or slow."""
    return [*module_findings(report, environ), *amx_findings(), *machine_findings(report, environ)]
