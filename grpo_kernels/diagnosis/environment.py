"""Versions of packages and settings of the environment."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping

import torch

from ..integrations import adapters
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


def version_findings() -> Iterator[Finding]:
    """About trainers whose adapters were tested with other versions; that torch is new enough pip sees to."""
    for adapter in adapters().values():
        installed = version(adapter.package)
        if installed is not None and adapter.tested and not any(f"{installed}.".startswith(f"{t}.") for t in adapter.tested):
            yield Finding(
                f"{adapter.package} is {installed}, but its adapter was tested with {', '.join(adapter.tested)}",
                "nothing, if the warning of the first step says that its arithmetic and ours agree; else install that one",
            )


# ---- settings


def variables() -> dict[str, str]:
    """The environment variables that are set and affect the kernels."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(WATCHED)}


def setting_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    engines = cpu_products.engines()
    able = [name for name, reason in engines.items() if reason is None]
    choices = {"GRPO_KERNELS_BACKEND": ["auto", *BACKENDS], cpu_products.SETTING: ["", "auto", *able]}  # others raise in calls
    for name, value in environ.items():
        known = choices.get(name, ["", "0", "1"])
        if name in SETTINGS and value not in known:
            reason = engines.get(value) or "there is no such value"
            says = f"{reason}, and calls raise" if name in choices else "it has no effect"
            remedy = f"set it to one of {', '.join(filter(None, known))}, or unset it"
            yield Finding(f"{name}={value}: {says}", remedy, grave=name in choices)
        elif name.startswith("GRPO_KERNELS_") and name not in SETTINGS and not name.startswith("GRPO_KERNELS_TEST"):
            there = ", ".join(s for s in SETTINGS if s.startswith("GRPO_KERNELS_"))
            yield Finding(f"{name} is not a setting of this version", f"there are {there}")
    if not torch.cuda.is_available():
        return
    if environ.get("NVIDIA_TF32_OVERRIDE") == "1" or torch.get_float32_matmul_precision() != "highest":
        yield Finding(
            "fp32 matrix products are rounded to TF32, and log-probs with them",
            "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and NVIDIA_TF32_OVERRIDE (some container images set them), and call "
            'torch.set_float32_matmul_precision("highest") before losses from fp32 hidden states',
        )
    if environ.get("TRITON_INTERPRET") == "1":
        yield Finding("TRITON_INTERPRET=1: kernels run on the CPU, very slowly", "unset TRITON_INTERPRET", grave=True)
