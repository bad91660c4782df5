"""Versions of packages and settings of the environment."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping

import torch

from ..rows.backends import BACKENDS, cpu_products
from . import Finding

PACKAGES = ("triton", "numpy", "transformers", "trl", "accelerate", "deepspeed", "liger-kernel", "flash-attn", "verl", "vllm")

SETTINGS = {
    "GRPO_KERNELS_BACKEND": "auto, eager, cpu or triton: what runs where a call leaves backend at auto",
    cpu_products.SETTING: f"auto, {', '.join(cpu_products.ENGINES)}: who makes the matrix products of losses from hidden states on a CPU",
    "GRPO_KERNELS_STRICT": "1: a fallback to eager raises instead of warning",
    "GRPO_KERNELS_CHECK": "1: ids, temperatures and offsets are checked on a GPU too, which waits for it at each call",
    "GRPO_KERNELS_ANY_VERSION": "1: adapters do not compare their first step under a version of a trainer that was not tested",
    "TRITON_INTERPRET": '1: backend="triton" runs CPU tensors in Triton\'s interpreter (slow, for tests)',
}
#: Prefixes of variables that affect which device is seen, how threads wait and where kernels are compiled.
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


def version_findings() -> list[Finding]:
    """About trainers; that torch is new enough pip sees to."""
    findings = []
    for package, tested in tested_trainers().items():
        installed = version(package)
        if installed is not None and not any(installed == t or installed.startswith(t + ".") for t in tested):
            findings.append(
                Finding(
                    f"{package} is {installed}, but its adapter was tested with {', '.join(tested)}",
                    "nothing, if the warning of the first step says that its arithmetic and ours agree; else install that one",
                    False,
                )
            )
    return findings


def tested_trainers() -> dict[str, tuple[str, ...]]:
    """{package: tested versions} of the adapters."""
    from ..integrations import adapters

    return {adapter.package: adapter.tested for adapter in adapters().values() if adapter.tested}


# ---- settings


def variables() -> dict[str, str]:
    """The environment variables that are set and affect the kernels."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(WATCHED)}


def setting_findings(environ: Mapping[str, str]) -> list[Finding]:
    findings = []
    flags: dict[str, str | None] = dict.fromkeys(("", "0", "1"))
    values = dict.fromkeys(SETTINGS, flags)
    values["GRPO_KERNELS_BACKEND"] = dict.fromkeys(("auto", *BACKENDS))
    values[cpu_products.SETTING] = {"": None, "auto": None, **cpu_products.engines()}
    for name, value in environ.items():
        if name in values:
            reason = values[name].get(value, "there is no such value")
            able = ", ".join(v for v, why in values[name].items() if v and why is None)
            raises = values[name] is not flags
            says = f"{reason}, and calls raise" if raises else "it has no effect"
            if reason is not None:
                findings.append(Finding(f"{name}={value}: {says}", f"set it to one of {able}, or unset it", raises))
        elif name.startswith("GRPO_KERNELS_") and not name.startswith("GRPO_KERNELS_TEST"):
            known = ", ".join(s for s in SETTINGS if s.startswith("GRPO_KERNELS_"))
            findings.append(Finding(f"{name} is not a setting of this version", f"there are {known}", False))
    rounds = environ.get("NVIDIA_TF32_OVERRIDE") == "1" or torch.get_float32_matmul_precision() != "highest"
    if rounds and torch.cuda.is_available():
        remedy = (
            "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and NVIDIA_TF32_OVERRIDE (some container images set them), and call "
            'torch.set_float32_matmul_precision("highest") before losses from fp32 hidden states'
        )
        findings.append(Finding("fp32 matrix products are rounded to TF32, and log-probs with them", remedy, False))
    if environ.get("TRITON_INTERPRET") == "1" and torch.cuda.is_available():
        findings.append(Finding("TRITON_INTERPRET=1: kernels run on the CPU, very slowly", "unset TRITON_INTERPRET", True))
    return findings
