"""Check the options of a run, load its models, data and reward functions, and render prompts."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checks import require
from ..core import backends
from . import Ranks
from . import require as package
from .config import TRACKERS, TrainConfig
from .rewards import RewardModel, resolve

#: A row is the data set's own columns plus "prompt" (the text given to the model) and, where known,
#: "answer".
Row = dict[str, Any]

FILE_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class Start:
    """The models, rows and reward functions of a run. `load` fills in what is None.

    rows        (training rows, held-out rows)
    rewards     reward functions
    reference   a frozen model: the teacher of the caller, or what the config names
    """

    model: Any
    tokenizer: Any
    rows: Any
    rewards: Any
    reference: Any


def check(config: TrainConfig, given: Start) -> torch.device:
    """Check the options before anything is loaded, and return the device of this process.

    given   what the caller passes in place of what the config names

    Raises ValueError for options that do not fit each other, the caller's objects or the machine.
    """
    device = pick_device(config.device)
    model = given.model
    teacher = given.reference
    try:
        backends.pick("eager" if config.loss == "eager" else config.backend, device)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if (model is None) != (given.tokenizer is None):
        raise ValueError(
            "model and tokenizer go together: pass both, or neither and name them in the config."
        )
    for name, passed in (
        ("model", model),
        ("dataset", given.rows),
        ("reward_model", None),
        ("teacher", None),
    ):
        if passed is None:
            check_name(name, getattr(config, name))
    own = set() if model is None else set(map(id, model.parameters()))
    if teacher is not None and any(id(p) in own for p in teacher.parameters()):
        raise ValueError(
            "teacher shares parameters with model, and is frozen: pass a copy of it,"
            " copy.deepcopy(model)."
        )
    objective = config.objective
    on_gpu = device.type == "cuda"
    attention = config.attn_implementation
    remedy = "a model is passed as well: leave one of them out."
    require(config.teacher is None or teacher is None, "teacher", config.teacher, remedy)
    taught = config.teacher is not None or teacher is not None
    remedy = (
        "set it above 0, and ref_refresh_steps to 0: at 0 nothing looks at the teacher, and a"
        " refresh copies the policy over it."
    )
    require(
        not taught or (objective.beta > 0 and config.ref_refresh_steps == 0),
        "beta",
        config.beta,
        remedy,
    )
    remedy = "it learns from a teacher: name one, or pass it to Trainer."
    require(taught or "distillation" not in config.preset, "preset", config.preset, remedy)
    remedy = (
        "the head of a reference in shards is gathered in its own forward only: use parallel='ddp',"
        " or an estimator such as k3."
    )
    require(objective.exact is None or config.parallel != "fsdp2", "kl", config.kl, remedy)
    remedy = (
        f"it runs on a GPU with dtype='bfloat16', but device is {device} and"
        f" dtype={config.dtype!r}: use 'sdpa'."
    )
    flash = attention.startswith("flash_attention")
    require(
        not flash or (on_gpu and config.dtype != "float32"),
        "attn_implementation",
        attention,
        remedy,
    )
    remedy = f"liger-kernel's model kernels run on a GPU, but device is {device}; leave liger off."
    require(on_gpu or not config.liger, "liger", config.liger, remedy)
    for name in filter(TRACKERS.__contains__, config.log_to):
        for needed in (name, "accelerate"):
            remedy = f"{needed} is not installed: pip install {needed}, or leave it out."
            require(importlib.util.find_spec(needed) is not None, "log_to", name, remedy)
    package("yaml")
    return device


def pick_device(name: str) -> torch.device:
    """Return the device of this process. Processes on one machine get different GPUs.

    name   "auto", "cpu", "cuda" or "cuda:1"

    Raises ValueError if there is no such device.
    """
    try:
        device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        )
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    require(
        device.type == "cuda",
        "device",
        name,
        "it must be auto, cpu, cuda or one of several as in cuda:1.",
    )
    require(
        torch.cuda.is_available(),
        "device",
        name,
        "torch sees no CUDA device here; use device='cpu' or 'auto'.",
    )
    count = torch.cuda.device_count()
    local = os.environ.get("LOCAL_RANK")
    if device.index is None:
        # A launcher may show each process all devices of the machine, or its own alone.
        return torch.device(
            "cuda", torch.cuda.current_device() if local is None else int(local) % count
        )
    remedy = "each process needs its own device; use device='cuda' or 'auto'."
    require(int(os.environ.get("WORLD_SIZE", "1")) == 1, "device", name, remedy)
    return device


def check_name(field: str, name: str | None) -> None:
    """Raise ValueError if a name is neither an existing path nor a possible name on the Hub.

    field   the option, for the error

    A path that does not exist must not be looked up on the Hub: without a network this takes
    minutes.
    """
    require(
        name != "",
        field,
        name,
        f"name one with --{field}, in the config or its file, or pass it to Trainer.",
    )
    if name is None or os.path.exists(name):
        return
    hub = (
        re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
        and os.path.splitext(name)[1] not in FILE_LOADERS
    )
    require(
        bool(hub), field, name, "there is no such file or folder, and the Hub has no such names."
    )


def load(config: TrainConfig, given: Start, ranks: Ranks) -> None:
    """Load what the caller did not pass, and move the models to the device.

    Parameters are float32. A reference is loaded or copied if the objective has a KL.
    """
    transformers = package("transformers")
    attention = config.attn_implementation
    if attention == "auto":
        flash = (
            importlib.util.find_spec("flash_attn")
            and ranks.device.type == "cuda"
            and config.dtype != "float32"
        )
        attention = "flash_attention_2" if flash else "sdpa"

    def loaded(name: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, attn_implementation=attention
        )

    given.rewards = list(given.rewards or map(resolve, config.rewards))
    if given.model is None:
        given.model = loaded(config.model)
        given.tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    if config.reward_model is not None:
        given.rewards.append(RewardModel(config.reward_model, ranks.device))
    train, held_out = given.rows or load_rows(config)
    held_out = held_out[: config.most_held_out] if config.eval_steps else None
    both = ((train, "training"), (held_out, "held-out"))
    given.rows = [
        [] if rows is None else encode(rows, given.tokenizer, config, which, ranks.main)
        for rows, which in both
    ]
    if config.teacher is not None:
        given.reference = loaded(config.teacher)
    model = given.model
    teacher = given.reference
    if config.liger:
        # The losses stay ours: liger's would replace the model's forward.
        own = {"cross_entropy": False, "fused_linear_cross_entropy": False}
        package("transformers.integrations.liger").apply_liger_kernel(model, own)
    if config.gradient_checkpointing:
        enable = getattr(
            model, "activation_checkpointing_enable", None
        )  # its name since transformers 5
        (enable or model.gradient_checkpointing_enable)()
    model.eval()
    for each in (model, teacher):
        # fsdp2 moves a layer at a time, and keeps a shard of it.
        if each is not None and (ranks.world == 1 or config.parallel != "fsdp2"):
            each.to(ranks.device)
    ranks.make_same(model)
    if teacher is not None:
        of_teacher, own_size = (
            each.config.get_text_config().vocab_size for each in (teacher, model)
        )
        if of_teacher != own_size:
            sizes = f"the teacher has a vocabulary of {of_teacher}, the model of {own_size}"
            raise ValueError(f"teacher: {sizes}: they must have the same tokenizer.")
    given.reference = teacher or (copy.deepcopy(model) if config.objective.beta else None)


# ---- rows


def load_rows(config: TrainConfig) -> tuple[list[Row], list[Row]]:
    """Return (training rows, held-out rows) of the data set, with "prompt" and "answer".

    Without evaluations no rows are held out. Raises ValueError if the data set cannot be read, or
    lacks a split or a column.
    """
    datasets = package("datasets")
    path = Path(config.dataset)
    if path.is_file():
        if path.suffix not in FILE_LOADERS:
            raise ValueError(
                f"dataset={config.dataset!r}: a file must end in one of {', '.join(FILE_LOADERS)}."
            )
        rows = list(
            _load(
                datasets.load_dataset,
                config,
                FILE_LOADERS[path.suffix],
                data_files=str(path),
                split="train",
            )
        )
        train, held_out = _cut(rows, config)
    else:
        configuration = config.dataset_config
        if configuration is None and "main" in _load(
            datasets.get_dataset_config_names, config, config.dataset
        ):
            configuration = "main"
        splits = _load(datasets.load_dataset, config, config.dataset, configuration)
        wanted = (
            (config.train_split, config.eval_split) if config.eval_steps else (config.train_split,)
        )
        for name in wanted:
            if name not in splits:
                raise ValueError(
                    f"split {name!r} is not in dataset={config.dataset!r}: it has"
                    f" {', '.join(splits)}."
                )
        train, *rest = (list(splits[name]) for name in wanted)
        held_out = rest[0] if rest else []
    return [prepare(row, config) for row in train], [prepare(row, config) for row in held_out]


def _load(function: Any, config: TrainConfig, *arguments: Any, **options: Any) -> Any:
    """Call a function of the package datasets. Raises ValueError with the reason if it fails."""
    try:
        return function(*arguments, **options)
    except Exception as error:  # datasets has exceptions of many kinds, and the reason in a cause
        reason = error.__cause__ or error
        raise ValueError(
            f"dataset={config.dataset!r} cannot be loaded: {type(reason).__name__}: {reason}"
        ) from error


def _cut(rows: list[Row], config: TrainConfig) -> tuple[list[Row], list[Row]]:
    """Return (training rows, held-out rows) of a single file: its last rows are held out."""
    if not config.eval_steps:
        return rows, []
    count = config.eval_prompts or min(config.most_held_out, max(len(rows) // 10, 1))
    if len(rows) <= count:
        raise ValueError(
            f"dataset={config.dataset!r} has {len(rows)} rows, and eval_prompts={count} holds out"
            " all: lower it, or switch evaluation off with eval_steps=0."
        )
    return rows[:-count], rows[-count:]


def prepare(row: Row, config: TrainConfig) -> Row:
    """Return a row of the data set with "prompt", and with "answer" if it has one.

    The answer of a worked solution "... #### 42" (gsm8k) is "42".
    """
    prepared = {
        **row,
        "prompt": row[
            _column(row, config.prompt_column, ("prompt", "question", "problem"), "prompt_column")
        ],
    }
    if config.answer_column is not None or "answer" in row or "solution" in row:
        answer = row[_column(row, config.answer_column, ("answer", "solution"), "answer_column")]
        prepared["answer"] = None if answer is None else str(answer).rsplit("####", 1)[-1].strip()
    return prepared


def _column(row: Row, wanted: str | None, usual: tuple[str, ...], argument: str) -> str:
    """Return the column `wanted`, or if it is None the first of `usual` that the row has.

    Raises ValueError, which names the argument, if the row does not have it.
    """
    for name in (wanted,) if wanted else usual:
        if name in row:
            return name
    raise ValueError(
        f"{argument}={wanted!r}: the data set has the columns {', '.join(row)}; name one of them."
    )


def encode(
    rows: list[Row], tokenizer: Any, config: TrainConfig, which: str, tell: bool
) -> list[Row]:
    """Return rows with "prompt", the text that the model sees, and its ids "prompt_ids".

    Rows longer than max_prompt_tokens are left out.

    which   "training" or "held-out", for messages
    tell    whether to print how many rows are left out

    Raises ValueError, which names the row, for a prompt that is neither a text nor a conversation,
    and if no row is left.
    """
    if not rows:
        remedy = (
            "name a data set and a split that have some, or, of held-out rows, switch evaluation"
            " off with eval_steps=0"
        )
        raise ValueError(f"dataset={config.dataset!r}: there are no {which} rows: {remedy}.")
    kept = []
    for i, row in enumerate(rows):
        try:
            text, ids = render(row.get("prompt"), tokenizer, config)
        except ValueError as error:
            raise ValueError(f"row {i} of the {which} rows: {error}") from error
        if len(ids) <= config.max_prompt_tokens:
            kept.append({**row, "prompt": text, "prompt_ids": ids})
    if not kept:
        raise ValueError(
            f"max_prompt_tokens={config.max_prompt_tokens}: all {len(rows)} {which} prompts are"
            " longer; raise it."
        )
    if len(kept) < len(rows) and tell:
        limit = config.max_prompt_tokens
        print(
            f"left out {len(rows) - len(kept)} of {len(rows)} {which} prompts: longer than"
            f" max_prompt_tokens={limit}"
        )
    return kept


def render(prompt: Any, tokenizer: Any, config: TrainConfig) -> tuple[str, list[int]]:
    """Return (text, ids) of a prompt.

    prompt   a text, or a conversation: a list of messages {"role": ..., "content": ...}. If the
             last message is the assistant's, the completion continues it.

    Raises ValueError for another prompt, and for one without tokens.
    """
    plain = isinstance(prompt, str) and bool(prompt.strip())
    text = ""
    special = False  # whether to add special tokens: a chat template writes them itself
    if plain:
        text = config.prompt_template.replace("{prompt}", prompt)
        # A text may come with its special tokens, and a beginning-of-text token must not come
        # twice.
        special = not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
    elif config.prompt_template != "{prompt}":
        raise ValueError(
            f"prompt_template={config.prompt_template!r} goes around a text, but this prompt is"
            f" {prompt!r:.80}: write it into the messages."
        )
    if not plain or config.chat:
        text = conversation([{"role": "user", "content": text}] if plain else prompt, tokenizer)
        special = False
    ids = tokenizer(text, add_special_tokens=special)["input_ids"]
    if not ids:
        raise ValueError(f"prompt={text!r:.80} has no tokens: leave the row out.")
    return text, ids


def conversation(prompt: Any, tokenizer: Any) -> str:
    """Return the text of a list of messages in the tokenizer's chat template.

    Raises ValueError if there is no template, or if it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"prompt={prompt!r:.80} goes through the tokenizer's chat template, and it has none:"
            " use a chat model, or texts without chat."
        )
    try:
        # A data set fills the keys that other messages have with None.
        messages = [
            {"role": m["role"]} | {key: value for key, value in m.items() if value is not None}
            for m in prompt
        ]
        goes_on = messages[-1]["role"] == "assistant"
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
        )
    except Exception as error:  # of the template's own language, too
        raise ValueError(
            f"prompt={prompt!r:.80}: it must be a text that is not empty, or a list of messages"
            f" with their roles that the chat template takes ({type(error).__name__}: {error})."
        ) from error


def prompts_of_step(rows: list[Row], step: int, count: int, seed: int) -> list[Row]:
    """Return the `count` rows of a step.

    Each epoch has a new permutation of the rows, of which steps take consecutive pieces. The result
    depends only on the arguments, so a resumed run sees the same data.
    """
    epoch, start = divmod(step * count, len(rows))
    order: list[int] = []
    while len(order) < start + count:
        order += torch.randperm(
            len(rows), generator=torch.Generator().manual_seed(seed + epoch)
        ).tolist()
        epoch += 1
    return [rows[i] for i in order[start : start + count]]
