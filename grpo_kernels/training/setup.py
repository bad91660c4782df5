"""The start of a run: what is known to be wrong is found first, then model, data and rewards are loaded."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
from typing import Any

import torch

from ..checks import require
from ..rows import backends
from . import require as package
from .config import TRACKERS, TrainConfig
from .data import FILE_LOADERS, Row, encode, load_rows
from .ranks import Ranks
from .rewards import RewardFunction, RewardModel, resolve

RowLists = tuple[list[Row], list[Row]]


def check(config: TrainConfig, model: Any, tokenizer: Any, rows: RowLists | None, teacher: Any) -> torch.device:
    """Refuse what is known to be wrong before anything is made or loaded. Returns the device of this process."""
    device = pick_device(config.device)
    try:
        backends.pick("eager" if config.loss == "eager" else config.backend, device)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if (model is None) != (tokenizer is None):
        raise ValueError("model and tokenizer go together: pass both, or neither and name them in the config.")
    for name, passed in (("model", model), ("dataset", rows), ("reward_model", None), ("teacher", None)):
        if passed is None:
            check_name(name, getattr(config, name))
    own = set() if model is None else set(map(id, model.parameters()))
    if teacher is not None and any(id(p) in own for p in teacher.parameters()):
        raise ValueError("teacher shares parameters with model, and is frozen: pass a copy of it, copy.deepcopy(model).")
    objective, on_gpu, attention = config.objective, device.type == "cuda", config.attn_implementation
    remedy = "a model is passed as well: leave one of them out."
    require(config.teacher is None or teacher is None, "teacher", config.teacher, remedy)
    taught = config.teacher is not None or teacher is not None
    remedy = "set it above 0, and ref_refresh_steps to 0: at 0 nothing looks at the teacher, and a refresh copies the policy over it."
    require(not taught or (objective.beta > 0 and config.ref_refresh_steps == 0), "beta", config.beta, remedy)
    remedy = "it learns from a teacher: name one, or pass it to Trainer."
    require(taught or "distillation" not in config.preset, "preset", config.preset, remedy)
    remedy = (
        "the head of a reference in shards is gathered in its own forward only: use parallel='ddp', or an estimator such as k3."
    )
    require(objective.exact is None or config.parallel != "fsdp2", "kl", config.kl, remedy)
    remedy = f"it runs on a GPU with dtype='bfloat16', but device is {device} and dtype={config.dtype!r}: use 'sdpa'."
    flash = attention.startswith("flash_attention")
    require(not flash or (on_gpu and config.dtype != "float32"), "attn_implementation", attention, remedy)
    remedy = f"liger-kernel's model kernels run on a GPU, but device is {device}; leave liger off."
    require(on_gpu or not config.liger, "liger", config.liger, remedy)
    for name in filter(TRACKERS.__contains__, config.log_to):
        for needed in (name, "accelerate"):
            remedy = f"{needed} is not installed: pip install {needed}, or leave it out."
            require(importlib.util.find_spec(needed) is not None, "log_to", name, remedy)
    package("yaml")
    return device


def pick_device(name: str) -> torch.device:
    """The device of this process; of several on a machine, each has its own."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    require(device.type == "cuda", "device", name, "it must be auto, cpu, cuda or one of several as in cuda:1.")
    require(torch.cuda.is_available(), "device", name, "torch sees no CUDA device here; use device='cpu' or 'auto'.")
    count, local = torch.cuda.device_count(), os.environ.get("LOCAL_RANK")
    if device.index is None:
        # A launcher may show each process all devices of the machine, or its own alone.
        return torch.device("cuda", torch.cuda.current_device() if local is None else int(local) % count)
    remedy = "of several processes each has a device of its own; use device='cuda' or 'auto'."
    require(int(os.environ.get("WORLD_SIZE", "1")) == 1, "device", name, remedy)
    return device


def check_name(field: str, name: str | None) -> None:
    """Raise ValueError for a path that is not there. What looks like a path is never asked of the Hub, which without a network
    would take minutes to say no."""
    require(name != "", field, name, f"name one with --{field}, in the config or its file, or pass it to Trainer.")
    if name is None or os.path.exists(name):
        return
    hub = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) and os.path.splitext(name)[1] not in FILE_LOADERS
    require(bool(hub), field, name, "there is no such file or folder, and the Hub has no such names.")


def load(
    config: TrainConfig,
    ranks: Ranks,
    model: Any,
    tokenizer: Any,
    rows: RowLists | None,
    rewards: list[RewardFunction] | None,
    teacher: Any,
) -> tuple[Any, Any, list[RewardFunction], list[Row], list[Row], Any]:
    """(model, tokenizer, rewards, training rows, held-out rows, reference): what the caller did not pass is loaded from the sources
    that the config names, models with float32 parameters. The reference is a frozen model, or None."""
    transformers = package("transformers")
    attention = config.attn_implementation
    if attention == "auto":
        flash = importlib.util.find_spec("flash_attn") and ranks.device.type == "cuda" and config.dtype != "float32"
        attention = "flash_attention_2" if flash else "sdpa"

    def loaded(name: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation=attention)

    rewards = list(rewards or map(resolve, config.rewards))
    if model is None:
        model, tokenizer = loaded(config.model), transformers.AutoTokenizer.from_pretrained(config.model)
    if config.reward_model is not None:
        rewards.append(RewardModel(config.reward_model, ranks.device))
    train_rows, eval_rows = rows or load_rows(config)
    train_rows = encode(train_rows, tokenizer, config, "training", ranks.main)
    eval_rows = (
        encode(eval_rows[: config.most_held_out], tokenizer, config, "held-out", ranks.main) if config.eval_steps else []
    )
    if teacher is None and config.teacher is not None:
        teacher = loaded(config.teacher)
    if config.liger:
        # The losses stay ours: liger's would replace the model's forward.
        own = {"cross_entropy": False, "fused_linear_cross_entropy": False}
        package("transformers.integrations.liger").apply_liger_kernel(model, own)
    if config.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)  # its name since transformers 5
        (enable or model.gradient_checkpointing_enable)()
    model.eval()
    for each in (model, teacher):
        # fsdp2 moves a layer at a time, and keeps a shard of it.
        if each is not None and (ranks.world == 1 or config.parallel != "fsdp2"):
            each.to(ranks.device)
    ranks.make_same(model)
    if teacher is not None:
        of_teacher, own_size = (each.config.get_text_config().vocab_size for each in (teacher, model))
        if of_teacher != own_size:
            sizes = f"the teacher has a vocabulary of {of_teacher}, the model of {own_size}"
            raise ValueError(f"teacher: {sizes}: they must have the same tokenizer.")
    reference = teacher or (copy.deepcopy(model) if config.objective.beta else None)
    return model, tokenizer, rewards, train_rows, eval_rows, reference
