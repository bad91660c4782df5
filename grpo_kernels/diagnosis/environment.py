"""Versions of packages and settings of the environment."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..rows.backends import BACKENDS, cpu_products
from . import Finding, numbers

OPTIONAL = ("numpy", "transformers", "trl", "accelerate", "deepspeed", "liger-kernel", "flash-attn", "verl", "vllm")
OLDEST_TORCH = (2, 9)

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
    libc = " ".join(platform.libc_ver()) or None
    build = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    system = {"python": platform.python_version(), "os": platform.platform(), "libc": libc}
    return {"torch": torch.__version__, **build, "triton": version("triton"), **system} | {p: version(p) for p in OPTIONAL}


def version_findings(found: Mapping[str, str | None], torch_requires: Sequence[str]) -> list[Finding]:
    """torch_requires: the requirements in the metadata of the installed torch."""
    findings = []
    if numbers(found["torch"] or "") < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        findings.append(Finding(f"torch is {found['torch']}", f"install torch {oldest} or newer", True))
    pinned = next((m[1] for r in torch_requires if (m := re.match(r"(?:pytorch-)?triton\s*\(?==\s*([\d.]+)", r))), None)
    if pinned is not None and found["triton"] is not None and numbers(pinned) != numbers(found["triton"]):
        problem = f"triton is {found['triton']}, but this torch was built for {pinned}"
        findings.append(Finding(problem, f"if kernels fail to compile: pip install triton=={pinned}", False))
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
    """{package: tested versions} of the adapters. They are read from the sources, because importing an adapter may import
    its trainer."""
    packages = {"trl_head": "trl", "unsloth": "unsloth_zoo"}
    tested = {}
    for path in sorted((Path(__file__).parents[1] / "integrations").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "TESTED":
                tested[packages.get(path.stem, path.stem.replace("_", "-"))] = ast.literal_eval(node.value)
    return tested


# ---- settings


def variables() -> dict[str, str]:
    """The environment variables that are set and affect the kernels."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(WATCHED)}


def setting_findings(environ: Mapping[str, str]) -> list[Finding]:
    findings = []
    for name, value in environ.items():
        if name == "GRPO_KERNELS_BACKEND":
            if value not in ("auto", *BACKENDS):
                remedy = f"set it to one of {', '.join(('auto', *BACKENDS))}, or unset it"
                findings.append(Finding(f"{name}={value} names no backend, and every call raises", remedy, True))
        elif name == cpu_products.SETTING:
            reasons = {"auto": None, **cpu_products.engines()}
            reason = reasons.get(value or "auto", "there are no such products")
            if reason is not None:
                able = ", ".join(other for other, why in reasons.items() if why is None)
                problem = f"{name}={value}: {reason}, and every loss from hidden states on a CPU raises"
                findings.append(Finding(problem, f"set it to one of {able}, or unset it", True))
        elif name in SETTINGS and value not in ("", "0", "1"):
            findings.append(Finding(f"{name}={value} has no effect", f"set {name}=1, or unset it", False))
        elif name.startswith("GRPO_KERNELS_") and name not in SETTINGS and not name.startswith("GRPO_KERNELS_TEST"):
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
