"""The start of a run: what is known to be wrong is found first, then model, data and rewards are loaded."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..rows import backends
from . import require
from .config import TRACKERS, TrainConfig
from .data import FILE_LOADERS, Row, encode, load_rows
from .ranks import Ranks
from .rewards import RewardFunction, RewardModel, resolve

RowLists = tuple[list[Row], list[Row]]


class Loaded(NamedTuple):
    model: Any
    tokenizer: Any
    rewards: list[RewardFunction]
    train_rows: list[Row]
    eval_rows: list[Row]
    reference: Any  # a frozen model, or None


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
    for wrong, message in _conflicts(config, device, teacher is not None):
        if wrong:
            raise ValueError(message)
    for package in ("matplotlib", "yaml"):
        require(package)
    return device


def pick_device(name: str) -> torch.device:
    """The device of this process; of several on a machine, each has its own."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device={name!r}: it must be auto, cpu, cuda or one of several as in cuda:1.")
    if not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: torch sees no CUDA device here; use device='cpu' or 'auto'.")
    count, local = torch.cuda.device_count(), os.environ.get("LOCAL_RANK")
    if device.index is None:
        # A launcher may show each process all devices of the machine, or its own alone.
        return torch.device("cuda", torch.cuda.current_device() if local is None else int(local) % count)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"device={name!r}: of several processes each has a device of its own; use device='cuda' or 'auto'.")
    if device.index >= count:
        raise ValueError(f"device={name!r}: torch sees {count} CUDA devices here, of which the last is cuda:{count - 1}.")
    return device


def check_name(field: str, name: str | None) -> None:
    """Raise ValueError for a path that is not there. What looks like a path is never asked of the Hub, which without a network
    would take minutes to say no."""
    if name == "":
        raise ValueError(f"{field}='': name one with --{field}, in the config or its file, or pass it to Trainer.")
    if name is None or os.path.exists(name):
        return
    owner, slash, _ = name.partition("/")
    hub = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) and os.path.splitext(name)[1] not in FILE_LOADERS
    if not hub:
        raise ValueError(f"{field}={name!r}: there is no such file or folder, and the Hub has no such names.")
    if slash and os.path.isdir(owner):
        raise ValueError(
            f"{field}={name!r}: the folder {owner!r} is here and has no {name.rpartition('/')[2]!r}. If the Hub's is meant, "
            f"start the run where there is no folder {owner!r}."
        )


def _conflicts(config: TrainConfig, device: torch.device, teacher: bool) -> Iterator[tuple[bool, str]]:
    """Whether something does not go together, and what to say then."""
    named, asked = config.teacher is not None, config.attn_implementation
    yield named and teacher, f"teacher={config.teacher!r}, but a model is passed as well: leave one of them out."
    unseen = config.objective.beta == 0 or config.ref_refresh_steps > 0
    yield (
        (named or teacher) and unseen,
        "teacher is given, but at beta=0 nothing looks at it, and with ref_refresh_steps the policy would be copied over it: set beta "
        "above 0 and ref_refresh_steps to 0.",
    )
    missing = "distillation" in config.preset and not (named or teacher)
    yield missing, f"preset={config.preset!r}: it learns from a teacher: name one, or pass it to Trainer."
    yield (
        config.objective.exact is not None and config.parallel == "fsdp2",
        f"kl={config.kl!r}: the head of a reference in shards is gathered in its own forward only: use parallel='ddp', or an "
        "estimator such as k3.",
    )
    remedy = f"they run on a GPU with dtype='bfloat16', but device is {device} and dtype={config.dtype!r}: use 'sdpa'."
    flash = asked.startswith("flash_attention") and (device.type != "cuda" or config.dtype == "float32")
    yield flash, f"attn_implementation={asked!r}: {remedy}"
    remedy = f"liger-kernel's model kernels run on a GPU, but device is {device}; leave liger off."
    yield config.liger and device.type != "cuda", f"liger=True: {remedy}"
    wanted = [("attn_implementation", "flash_attention_2", "flash_attn")] if asked == "flash_attention_2" else []
    wanted += [("liger", "True", "liger_kernel")] if config.liger else []
    trackers = [name for name in config.log_to if name in TRACKERS]
    wanted += [("log_to", name, package) for name in trackers for package in (name, "accelerate")]
    for field, value, package in wanted:
        absent = importlib.util.find_spec(package) is None
        yield absent, f"{field}={value!r}, but {package} is not installed: pip install {package}, or leave it out."


def load(
    config: TrainConfig,
    ranks: Ranks,
    model: Any,
    tokenizer: Any,
    rows: RowLists | None,
    rewards: list[RewardFunction] | None,
    teacher: Any,
) -> Loaded:
    """Load what the caller did not pass, from the sources that the config names; models with float32 parameters."""
    transformers = require("transformers")
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
        require("transformers.integrations.liger").apply_liger_kernel(model, own)
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
    return Loaded(model, tokenizer, rewards, train_rows, eval_rows, reference)
