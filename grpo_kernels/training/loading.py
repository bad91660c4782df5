"""The policy and its tokenizer from disk or the Hub, on the device and with the kernels that the config asks for."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from . import recompute, require
from .config import TrainConfig


def pick_device(name: str) -> torch.device:
    """The device of this process; of several on a machine, each has its own."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
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
    return device


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
    transformers = require("transformers")
    attention = pick_attention(config, device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32, attn_implementation=attention)
    return model, tokenizer


def prepare_policy(model: Any, config: TrainConfig) -> Any:
    if config.liger:
        from transformers.integrations.liger import apply_liger_kernel

        # The losses stay ours: liger's would replace the model's forward.
        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    if config.gradient_checkpointing:
        recompute.switch_on(model)
    return model.eval()
