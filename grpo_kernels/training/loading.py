"""The policy and its tokenizer from disk or the Hub, on the device and with the kernels that the config asks for."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

import torch

from ..rows import backends
from . import recompute, require
from .config import TrainConfig
from .data import FILE_LOADERS


def pick_device(name: str) -> torch.device:
    """The device of this process; of several on a machine, each has its own."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}: it must be auto, cpu, cuda or one of several as in cuda:1.")
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: torch sees no CUDA device here; use device='cpu' or 'auto'.")
    if device.index is None:
        # A launcher may show each process all devices of the machine, or its own alone.
        local = os.environ.get("LOCAL_RANK")
        index = torch.cuda.current_device() if local is None else int(local) % torch.cuda.device_count()
        return torch.device("cuda", index)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"device={name!r}: of several processes each has a device of its own; use device='cuda' or 'auto'.")
    count = torch.cuda.device_count()
    if device.index >= count:
        raise ValueError(f"device={name!r}: torch sees {count} CUDA devices here, of which the last is cuda:{count - 1}.")
    return device


def check_names(config: TrainConfig, names: tuple[str, ...]) -> None:
    """Raise ValueError for a path that is not there. What looks like a path is never asked of the Hub, which without a network
    would take minutes to say no."""
    for field in names:
        name = getattr(config, field)
        if not name or os.path.exists(name):
            continue
        owner, slash, _ = name.partition("/")
        hub = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) and os.path.splitext(name)[1] not in FILE_LOADERS
        if not hub:
            raise ValueError(f"{field}={name!r}: there is no such file or folder, and the Hub has no such names.")
        if slash and os.path.isdir(owner):
            raise ValueError(
                f"{field}={name!r}: the folder {owner!r} is here and has no {name.rpartition('/')[2]!r}. If the Hub's is meant, "
                f"start the run where there is no folder {owner!r}."
            )


def check_backend(name: str, device: torch.device) -> None:
    """Raise ValueError for a backend of the kernels that is unknown or cannot run on the device."""
    try:
        backends.pick(name, device)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def pick_attention(config: TrainConfig, device: torch.device) -> str:
    name = config.attn_implementation
    has_flash = importlib.util.find_spec("flash_attn") is not None
    if name == "auto":
        return "flash_attention_2" if has_flash and device.type == "cuda" and config.dtype != "float32" else "sdpa"
    if name.startswith("flash_attention"):
        asked = f"attn_implementation={name!r}"
        if device.type != "cuda":
            raise ValueError(f"{asked} needs a CUDA device, but device is {device}: use attn_implementation='sdpa'.")
        if config.dtype == "float32":
            raise ValueError(f"{asked} computes in half precision, but dtype='float32': use dtype='bfloat16', or 'sdpa'.")
        if name == "flash_attention_2" and not has_flash:
            raise ValueError(f"{asked}, but flash-attn is not installed: pip install flash-attn, or use 'sdpa'.")
    return name


def check_liger(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"liger=True: liger-kernel's model kernels run on a GPU, but device is {device}; leave liger off.")
    if importlib.util.find_spec("liger_kernel") is None:
        raise ValueError("liger=True, but liger-kernel is not installed: pip install liger-kernel.")


def load_policy(config: TrainConfig, device: torch.device) -> tuple[Any, Any]:
    """(model, tokenizer) of `config.model`, with float32 parameters."""
    model = load_model(config.model, config, device)  # first: it knows what this machine cannot do
    return model, require("transformers").AutoTokenizer.from_pretrained(config.model)


def load_model(name: str, config: TrainConfig, device: torch.device) -> Any:
    transformers = require("transformers")
    attention = pick_attention(config, device)
    return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation=attention)


def prepare_policy(model: Any, config: TrainConfig) -> Any:
    if config.liger:
        from transformers.integrations.liger import apply_liger_kernel

        # The losses stay ours: liger's would replace the model's forward.
        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    if config.gradient_checkpointing:
        recompute.switch_on(model)
    return model.eval()
