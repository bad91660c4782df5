"""Processor, threads, memory, GPUs, the compiled module, versions and settings, and the findings
about them.
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


def _find(pattern: str, path: str | Path, otherwise: str = "") -> str:
    """What the group of a pattern matches in a file of the system; `otherwise` where there is no
    such file or match.
    """
    try:
        match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return otherwise
    return match[1] if match else otherwise


def processor() -> tuple[str, frozenset[str]]:
    """(model, instruction set flags); no flags where the system does not list them. The family
    tells generations of AMD apart (25: Zen 3 and 4, 26: Zen 5), which the name that a virtual
    machine has may not.
    """
    model = _find(
        r"^model name\s*:\s*(.+)$", "/proc/cpuinfo", platform.processor() or platform.machine()
    ).strip()
    family = _find(r"^cpu family\s*:\s*(\d+)$", "/proc/cpuinfo")
    return f"{model}, family {family}" if family else model, frozenset(
        _find(r"^flags\s*:\s*(.+)$", "/proc/cpuinfo").split()
    )


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


def memory_available() -> float:
    """Bytes that this process can still allocate; 2 GiB where the system does not say."""
    return min(
        1024 * float(_find(r"^MemAvailable:\s*(\d+) kB", "/proc/meminfo", "2097152")),
        cgroup_limits()[1],
    )


def cgroup_limits() -> tuple[float, float]:
    """(processors, bytes still free) that control groups (version 2) grant; inf where they set no
    limit. A container may see its own group as the root, so all groups above are read.
    """
    processors = math.inf
    memory = math.inf
    own = Path("/sys/fs/cgroup") / _find(r"^0::/(.*)$", "/proc/self/cgroup")
    for folder in (own, *own.parents):
        quota, period = (
            _find(pattern, folder / "cpu.max", "inf") for pattern in (r"^(\d+) \d+", r"^\d+ (\d+)")
        )
        cache = _find(r"^inactive_file (\d+)", folder / "memory.stat", "0")  # can be dropped
        used = float(_find(r"^(\d+)", folder / "memory.current", "0")) - float(cache)
        if quota != "inf":
            processors = min(processors, float(quota) / float(period))
        memory = min(memory, float(_find(r"^(\d+)", folder / "memory.max", "inf")) - used)
    return processors, memory


# ---- GPUs


def where() -> torch.device:
    """Where losses run here: on the accelerator if Triton has a driver for it, else on the CPU.
    "cuda" (NVIDIA, AMD) is returned even if Triton cannot run, so that this is reported as a
    problem.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    served = device is not None and (
        device.type == "cuda" or backends.native_backend(device)[1] is None
    )
    return torch.device(device.type if device is not None and served else "cpu")


def gpus() -> dict[str, Any]:
    """{"available", "reason" (why not), "devices"}, see grpo_kernels/diagnosis/doctor.py."""
    kind = where().type
    devices = list[dict[str, Any]]()
    if kind == "cpu":
        return {"available": False, "reason": why_no_gpu(), "devices": devices}
    module = torch.get_device_module(kind)
    for index in range(module.device_count()):
        p = module.get_device_properties(index)
        # "9.0" (NVIDIA), "gfx942:..." (AMD), "xpu".
        capability = (
            f"{p.major}.{p.minor}" if torch.version.cuda else getattr(p, "gcnArchName", kind)
        )
        free, total = (round(size / 1e9, 1) for size in module.mem_get_info(index))
        known = {
            "name": p.name,
            "capability": capability,
            "multiprocessors": getattr(p, "multi_processor_count", None),
        }
        devices.append(known | {"memory_gb": total, "free_gb": free})
    return {"available": True, "reason": None, "devices": devices}


def why_no_gpu() -> str:
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
    """Whether the system has a GPU's driver loaded and a device for it, NVIDIA's or AMD's."""
    return any(map(os.path.exists, ("/dev/nvidia0", "/dev/dxg", "/dev/kfd")))


# ---- the compiled module


def module() -> dict[str, Any]:
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
        return facts | {"reason": str(error)}
    facts["path"] = native.__file__
    functions = {"compiler": "compiler", "instruction_set": "isa", "instruction_sets": "isas"}
    # A module that is out of date may lack some.
    return facts | {
        name: getattr(native, function)()
        for name, function in functions.items()
        if hasattr(native, function)
    }


def engine() -> str | None:
    """What computes matmuls on the CPU; None if the setting names something that cannot, or the
    module is out of date.
    """
    try:
        return cpu_matmuls.engine()
    except (AttributeError, ValueError):
        return None


def best_isa(flags: frozenset[str]) -> str | None:
    """The best instruction set of csrc/module.cpp for a processor with these flags; None if none of
    them is known.
    """
    if not flags:
        return None
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
        "auto, eager, cpu or triton: what runs where a call leaves backend at auto"
    ),
    cpu_matmuls.SETTING: (
        f"auto, {', '.join(cpu_matmuls.ENGINES)}: what computes the matmuls of losses from"
        " hidden states on a CPU"
    ),
    ISA_SETTING: (
        f"{', '.join(ISAS)}: the highest instruction set that the C++ module uses; unset: the"
        " processor's best"
    ),
    "GRPO_KERNELS_STRICT": "1: a fallback to eager raises instead of warning",
    "GRPO_KERNELS_CHECK": (
        "1: ids, temperatures and offsets are checked on a GPU too, which waits for it at each call"
    ),
    "GRPO_KERNELS_ANY_VERSION": (
        "1: adapters do not compare their first step under a version of a trainer that was not"
        " tested"
    ),
    "TRITON_INTERPRET": (
        '1: backend="triton" runs CPU tensors in Triton\'s interpreter (slow, for tests)'
    ),
}
#: Prefixes of variables that affect which device is seen, how threads wait and where kernels are
#: compiled.
WATCHED = ("OMP_", "KMP_", "GOMP_", "MKL_", "CUDA_", "HIP_", "ROCR_", "NVIDIA_TF32", "TORCH_", "TRITON_", "PYTORCH_", "LD_PRELOAD",
           "CC", "CXX", "GRPO_KERNELS_")  # fmt: skip


def version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    build = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    system = {"python": platform.python_version(), "os": platform.platform()}
    return build | system | {package: version(package) for package in PACKAGES}


def version_findings() -> Iterator[Finding]:
    """About trainers whose adapters were tested with other versions; that torch is new enough pip
    sees to.
    """
    for adapter in adapters().values():
        installed = version(adapter.package)
        if (
            installed is not None
            and adapter.tested
            and not matches_version(installed, adapter.tested)
        ):
            yield Finding(
                f"{adapter.package} is {installed}, but its adapter was tested with"
                f" {', '.join(adapter.tested)}",
                "nothing, if the warning of the first step says that its arithmetic and ours agree;"
                " else install that one",
            )


def variables() -> dict[str, str]:
    """The environment variables that are set and affect the kernels."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(WATCHED)}


def setting_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    engines = cpu_matmuls.engines()
    able = [name for name, reason in engines.items() if reason is None]
    choices = {
        "GRPO_KERNELS_BACKEND": ["auto", *BACKENDS],
        cpu_matmuls.SETTING: ["", "auto", *able],
        ISA_SETTING: ["", *ISAS],
    }
    for name, value in environ.items():
        known = choices.get(name, ["", "0", "1"])
        if name in SETTINGS and value not in known:
            reason = engines.get(value) or "there is no such value"
            consequence = "the C++ module does not load" if name == ISA_SETTING else "calls raise"
            says = f"{reason}, and {consequence}" if name in choices else "it has no effect"
            remedy = f"set it to one of {', '.join(filter(None, known))}, or unset it"
            yield Finding(f"{name}={value}: {says}", remedy, grave=name in choices)
        elif (
            name.startswith("GRPO_KERNELS_")
            and name not in SETTINGS
            and not name.startswith("GRPO_KERNELS_TEST")
        ):
            there = ", ".join(s for s in SETTINGS if s.startswith("GRPO_KERNELS_"))
            yield Finding(f"{name} is not a setting of this version", f"there are {there}")


# ---- what is found, and what to do about it


def facts(device: torch.device) -> dict[str, Any]:
    """What grpo_kernels/diagnosis/doctor.py says of machine, package and settings, before anything
    runs.
    """
    return {
        "versions": {"grpo_kernels": package_version(), **versions()},
        "package": package(),
        "native": module(),
        "matmuls": {"engine": engine(), "engines": cpu_matmuls.engines()},
        "cpu": cpu(),
        "gpu": gpus(),
        "device": device.type,
        "environment": variables(),
        "settings": SETTINGS,
    }


def module_findings(report: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Finding]:
    """About the package, and the compiled module where the processor could run one."""
    native = report["native"]
    shadows = report["package"]["shadows"]
    if shadows:
        yield Finding(
            f"the checkout at {PACKAGE.parent} hides the installed package at {shadows}",
            "start Python in another directory to use the installed package",
        )
    unserved = unsupported_machine() or (NO_AVX2 if native["instruction_set"] == "" else None)
    if unserved:
        yield Finding(
            f"CPU tensors run in eager PyTorch: {unserved}",
            "take a processor with AVX2, or a GPU",
            slows=True,
        )
        return
    command = build_command(report["package"])
    needed = report["device"] == "cpu"  # elsewhere the tests mean something without it
    if native["reason"] and needed:
        yield Finding(
            "the compiled module is missing, CPU tensors fall back to eager PyTorch:"
            f" {native['reason']}",
            f"{command}; it needs a C++17 compiler (Debian, Ubuntu: apt-get install g++), and its"
            " output says what failed",
            grave=True,
            blocks=True,
        )
    path = native["path"]
    if path and source_digest(PACKAGE.parent) not in (None, built_from(Path(path))):
        yield Finding(
            f"the compiled module is out of date: {path} was built from other C++ sources than"
            f" those in {PACKAGE.parent}",
            command,
            grave=True,
            blocks=needed,
        )
    best = best_isa(processor()[1])
    if native["instruction_set"] and best not in (None, native["instruction_set"]):
        rebuild = f"{command} (with GCC 10 or Clang 9, or newer)"
        yield Finding(
            f"the compiled module runs {native['instruction_set']} code, but this processor has {best}",
            f"unset {ISA_SETTING}" if environ.get(ISA_SETTING) else rebuild,
            slows=True,
        )


def amx_findings() -> Iterator[Finding]:
    """About AMX matmuls that failed the comparison before their first use."""
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
    """About threads, load and GPUs."""
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
            f"the machine is busy (load {cpu['load']:g}): threads that wait and spin take"
            " processors from those that work",
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
    """What `facts` say is wrong or slow."""
    return [*module_findings(report, environ), *amx_findings(), *machine_findings(report, environ)]
