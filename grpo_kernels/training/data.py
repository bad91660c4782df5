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
    """The models, rows and reward functions that a run starts with. `load` replaces None.

    model       the policy, a causal language model of transformers
    tokenizer   its tokenizer
    rows        (training rows, held-out rows)
    rewards     list of reward functions
    reference   frozen model for the KL term: the caller's teacher, the model that `config.teacher`
                names, or a copy of the policy. It stays None if the objective has no KL term.
    """

    model: Any
    tokenizer: Any
    rows: Any
    rewards: Any
    reference: Any


def check(config: TrainConfig, passed: Start) -> torch.device:
    """Return the device of this process, after all checks that need neither models nor data.

    config   the options of the run
    passed   the objects that the caller passed to Trainer, None for each that is to be loaded

    Raises ValueError for options that do not fit each other, the caller's objects or the machine.
    """
    device = pick_device(config.device)
    try:
        backends.pick("eager" if config.loss == "eager" else config.backend, device)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if (passed.model is None) != (passed.tokenizer is None):
        raise ValueError(
            "model and tokenizer go together: pass both, or neither and name them in the config."
        )
    if passed.model is None:
        check_name("model", config.model)
    if passed.rows is None:
        check_name("dataset", config.dataset)
    check_name("reward_model", config.reward_model)
    check_name("teacher", config.teacher)
    _check_teacher(config, passed)
    _check_hardware(config, device)
    for tracker in config.log_to:
        if tracker not in TRACKERS:
            continue
        for needed in (tracker, "accelerate"):
            remedy = f"{needed} is not installed: pip install {needed}, or leave it out."
            require(importlib.util.find_spec(needed) is not None, "log_to", tracker, remedy)
    package("yaml")
    return device


def _check_teacher(config: TrainConfig, passed: Start) -> None:
    """Raise ValueError unless the teacher fits the policy and the objective.

    A teacher is a frozen model from which the policy learns.

    config   the options of the run, one of which may name a teacher
    passed   the caller's objects; `passed.reference` is the teacher or None
    """
    teacher = passed.reference
    if teacher is not None and passed.model is not None:
        policy_parameters = {id(parameter) for parameter in passed.model.parameters()}
        if any(id(parameter) in policy_parameters for parameter in teacher.parameters()):
            raise ValueError(
                "teacher shares parameters with model, and is frozen: pass a copy of it,"
                " copy.deepcopy(model)."
            )
    objective = config.objective
    remedy = "a model is passed as well: leave one of them out."
    require(config.teacher is None or teacher is None, "teacher", config.teacher, remedy)
    has_teacher = config.teacher is not None or teacher is not None
    remedy = (
        "set it above 0, and ref_refresh_steps to 0: at 0 nothing looks at the teacher, and a"
        " refresh copies the policy over it."
    )
    uses_teacher = objective.beta > 0 and config.ref_refresh_steps == 0
    require(not has_teacher or uses_teacher, "beta", config.beta, remedy)
    remedy = "it learns from a teacher: name one, or pass it to Trainer."
    require(has_teacher or "distillation" not in config.preset, "preset", config.preset, remedy)
    remedy = (
        "the head of a reference in shards is gathered in its own forward only: use parallel='ddp',"
        " or an estimator such as k3."
    )
    require(objective.exact is None or config.parallel != "fsdp2", "kl", config.kl, remedy)


def _check_hardware(config: TrainConfig, device: torch.device) -> None:
    """Raise ValueError for an option that does not work on the device.

    config   its options attn_implementation, dtype and liger are checked
    """
    on_gpu = device.type == "cuda"
    uses_flash = config.attn_implementation.startswith("flash_attention")
    # The kernels of flash-attn have no fp32.
    can_use_flash = on_gpu and config.dtype != "float32"
    remedy = (
        f"it runs on a GPU with dtype='bfloat16', but device is {device} and"
        f" dtype={config.dtype!r}: use 'sdpa'."
    )
    require(
        not uses_flash or can_use_flash, "attn_implementation", config.attn_implementation, remedy
    )
    remedy = f"liger-kernel's model kernels run on a GPU, but device is {device}; leave liger off."
    require(on_gpu or not config.liger, "liger", config.liger, remedy)


def pick_device(name: str) -> torch.device:
    """Return the device of this process. Processes on one machine get different GPUs.

    name   "auto" (a GPU if there is one, else the CPU), "cpu", "cuda", or a certain GPU as "cuda:1"

    Raises ValueError if there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:  # torch knows no device of this name, and the check below refuses it
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    remedy = "it must be auto, cpu, cuda or one of several as in cuda:1."
    require(device.type == "cuda", "device", name, remedy)
    remedy = "torch sees no CUDA device here; use device='cpu' or 'auto'."
    require(torch.cuda.is_available(), "device", name, remedy)
    if device.index is not None:
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        remedy = "each process needs its own device; use device='cuda' or 'auto'."
        require(num_processes == 1, "device", name, remedy)
        return device
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None:
        return torch.device("cuda", torch.cuda.current_device())
    # Some launchers show each process all GPUs of the machine. Others show it only one, whose index
    # is then 0 for every rank.
    return torch.device("cuda", int(local_rank) % torch.cuda.device_count())


def check_name(option: str, name: str | None) -> None:
    """Raise ValueError if a name is neither an existing path nor a possible name on the Hub.

    A path that does not exist must not be looked up on the Hub: without a network this takes
    minutes.

    option   the option that has this name as its value, for the error
    name     path or Hub name; None: the option is not used
    """
    remedy = f"name one with --{option}, in the config or its file, or pass it to Trainer."
    require(name != "", option, name, remedy)
    if name is None or os.path.exists(name):
        return
    # "name" or "owner/name", but not the name of a data file that does not exist.
    has_hub_form = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is not None
    is_file_name = os.path.splitext(name)[1] in FILE_LOADERS
    remedy = "there is no such file or folder, and the Hub has no such names."
    require(has_hub_form and not is_file_name, option, name, remedy)


def load(config: TrainConfig, start: Start, ranks: Ranks) -> None:
    """Load what the caller did not pass into `start`, and move the models to the device.

    Models are loaded in float32. The reference is the teacher if `config` names one. Otherwise it
    is a copy of the policy if the objective has a KL term (beta is not 0) and the caller passed no
    reference.

    config   the options of the run, which name what to load
    start    the caller's objects. What the caller left out is loaded, and rows are tokenized.
    ranks    the ranks of the run; all of them must call this

    Raises ValueError if something cannot be loaded, or if the teacher has another vocabulary.
    """
    transformers = package("transformers")
    if not start.rewards:
        start.rewards = [resolve(name) for name in config.rewards]
    start.rewards = list(start.rewards)
    if start.model is None:
        start.model = _load_model(config.model, config, ranks.device)
        start.tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    if config.reward_model is not None:
        start.rewards.append(RewardModel(config.reward_model, ranks.device))
    train_rows, held_out_rows = start.rows or load_rows(config)
    train_rows = encode(train_rows, start.tokenizer, config, "training", ranks.main)
    if config.eval_steps:
        held_out_rows = held_out_rows[: config.most_held_out]
        held_out_rows = encode(held_out_rows, start.tokenizer, config, "held-out", ranks.main)
    else:  # without evaluations nothing reads these rows
        held_out_rows = []
    start.rows = [train_rows, held_out_rows]

    if config.teacher is not None:
        start.reference = _load_model(config.teacher, config, ranks.device)
    model = start.model
    _prepare_policy(model, config)
    for loaded in (model, start.reference):
        # FSDP2 moves one layer after another to the device, and keeps only this rank's shard there.
        if loaded is not None and (ranks.world == 1 or config.parallel != "fsdp2"):
            loaded.to(ranks.device)
    ranks.make_same(model)
    if start.reference is not None:
        _check_same_vocabulary(start.reference, model)
    elif config.objective.beta:
        start.reference = copy.deepcopy(model)


def _load_model(name: str, config: TrainConfig, device: torch.device) -> Any:
    """Return a causal language model of transformers with float32 parameters, on the CPU.

    name     path or Hub name
    config   has attn_implementation and dtype
    device   where the model will run, which decides what attn_implementation="auto" means
    """
    attention = config.attn_implementation
    if attention == "auto":
        has_flash = importlib.util.find_spec("flash_attn") is not None
        can_use_flash = device.type == "cuda" and config.dtype != "float32"
        attention = "flash_attention_2" if has_flash and can_use_flash else "sdpa"
    return package("transformers").AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, attn_implementation=attention
    )


def _prepare_policy(model: Any, config: TrainConfig) -> None:
    """Switch on liger kernels and gradient checkpointing as the config says. Set eval mode.

    model   the policy, a causal language model of transformers
    """
    if config.liger:
        # liger's fused losses would replace the model's forward, which the losses here need.
        without_losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
        liger = package("transformers.integrations.liger")
        liger.apply_liger_kernel(model, without_losses)
    if config.gradient_checkpointing:
        # transformers 5 renamed this method.
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable()
        else:
            model.gradient_checkpointing_enable()
    model.eval()


def _check_same_vocabulary(teacher: Any, model: Any) -> None:
    """Raise ValueError unless the teacher's vocabulary has the size of the model's."""
    teacher_size = teacher.config.get_text_config().vocab_size
    model_size = model.config.get_text_config().vocab_size
    if teacher_size != model_size:
        raise ValueError(
            f"teacher: the teacher has a vocabulary of {teacher_size}, the model of {model_size}:"
            " they must have the same tokenizer."
        )


# ---- rows


def load_rows(config: TrainConfig) -> tuple[list[Row], list[Row]]:
    """Return (training rows, held-out rows) of the data set, with "prompt" and "answer".

    config   names the data set, its splits and its columns

    Without evaluations no rows are held out. Raises ValueError if the data set cannot be read, or
    lacks a split or a column.
    """
    if Path(config.dataset).is_file():
        train_rows, held_out_rows = _rows_of_file(config)
    else:
        train_rows, held_out_rows = _rows_of_splits(config)
    return (
        [prepare(row, config) for row in train_rows],
        [prepare(row, config) for row in held_out_rows],
    )


def _rows_of_file(config: TrainConfig) -> tuple[list[Row], list[Row]]:
    """Return (training rows, held-out rows) of a single file: its last rows are held out.

    config   its `dataset` is the path of the file

    Raises ValueError if the file has another format, or too few rows.
    """
    suffix = Path(config.dataset).suffix
    if suffix not in FILE_LOADERS:
        raise ValueError(
            f"dataset={config.dataset!r}: a file must end in one of {', '.join(FILE_LOADERS)}."
        )
    load_dataset = package("datasets").load_dataset
    loader = FILE_LOADERS[suffix]
    rows = list(_load(load_dataset, config, loader, data_files=config.dataset, split="train"))
    if not config.eval_steps:
        return rows, []
    # By default a tenth of the rows, at least 1 and at most `most_held_out`.
    tenth = max(len(rows) // 10, 1)
    count = config.eval_prompts or min(config.most_held_out, tenth)
    if len(rows) <= count:
        raise ValueError(
            f"dataset={config.dataset!r} has {len(rows)} rows, and eval_prompts={count} holds out"
            " all: lower it, or switch evaluation off with eval_steps=0."
        )
    return rows[:-count], rows[-count:]


def _rows_of_splits(config: TrainConfig) -> tuple[list[Row], list[Row]]:
    """Return (training rows, held-out rows): two splits of a data set of the Hub or a folder.

    config   names the data set, its configuration and the two splits

    Raises ValueError if a split is missing.
    """
    datasets = package("datasets")
    configuration = config.dataset_config
    if configuration is None:
        names = _load(datasets.get_dataset_config_names, config, config.dataset)
        # A data set with several configurations, such as gsm8k, loads none of them by default.
        configuration = "main" if "main" in names else None
    splits = _load(datasets.load_dataset, config, config.dataset, configuration)
    needed = [config.train_split]
    if config.eval_steps:
        needed.append(config.eval_split)
    for name in needed:
        if name not in splits:
            raise ValueError(
                f"split {name!r} is not in dataset={config.dataset!r}: it has {', '.join(splits)}."
            )
    held_out_rows = list(splits[config.eval_split]) if config.eval_steps else []
    return list(splits[config.train_split]), held_out_rows


def _load(function: Any, config: TrainConfig, *arguments: Any, **options: Any) -> Any:
    """Return function(*arguments, **options), for a function of the package datasets.

    config   names the data set, for the error

    Raises ValueError with the reason if it fails.
    """
    try:
        return function(*arguments, **options)
    except Exception as error:  # datasets has exceptions of many kinds, and the reason in a cause
        reason = error.__cause__ or error
        raise ValueError(
            f"dataset={config.dataset!r} cannot be loaded: {type(reason).__name__}: {reason}"
        ) from error


def prepare(row: Row, config: TrainConfig) -> Row:
    """Return a row of the data set with "prompt", and with "answer" if it has one.

    The answer of a worked solution "... #### 42" (gsm8k) is "42".

    Raises ValueError if the row lacks the column that the config names.
    """
    prompt_column = _find_column(
        row,
        "prompt_column",
        chosen=config.prompt_column,
        defaults=("prompt", "question", "problem"),
    )
    prepared = {**row, "prompt": row[prompt_column]}
    if config.answer_column is not None or "answer" in row or "solution" in row:
        answer_column = _find_column(
            row, "answer_column", chosen=config.answer_column, defaults=("answer", "solution")
        )
        answer = row[answer_column]
        if answer is not None:
            answer = str(answer).rsplit("####", 1)[-1].strip()
        prepared["answer"] = answer
    return prepared


def _find_column(row: Row, option: str, *, chosen: str | None, defaults: tuple[str, ...]) -> str:
    """Return the name of the column that an option chooses.

    option     "prompt_column" or "answer_column", for the error
    chosen     the value of the option; None or "": the first of `defaults` that the row has
    defaults   usual names of this column

    Raises ValueError if the row does not have the column.
    """
    for name in (chosen,) if chosen else defaults:
        if name in row:
            return name
    raise ValueError(
        f"{option}={chosen!r}: the data set has the columns {', '.join(row)}; name one of them."
    )


def encode(
    rows: list[Row], tokenizer: Any, config: TrainConfig, which: str, tell: bool
) -> list[Row]:
    """Return rows with "prompt", the text that the model sees, and its token ids "prompt_ids".

    Prompts of more than max_prompt_tokens tokens are left out.

    rows        rows with "prompt", a text or a conversation, see `render`
    tokenizer   a tokenizer of transformers
    config      has max_prompt_tokens, and the template that texts are put into
    which       "training" or "held-out", for messages
    tell        whether to print how many rows are left out

    Raises ValueError, which names the row, for a prompt that is neither a text nor a conversation,
    and if no row is left.
    """
    if not rows:
        remedy = (
            "name a data set and a split that have some, or, of held-out rows, switch evaluation"
            " off with eval_steps=0"
        )
        raise ValueError(f"dataset={config.dataset!r}: there are no {which} rows: {remedy}.")
    limit = config.max_prompt_tokens
    encoded = []
    for i, row in enumerate(rows):
        try:
            text, ids = render(row.get("prompt"), tokenizer, config)
        except ValueError as error:
            raise ValueError(f"row {i} of the {which} rows: {error}") from error
        if len(ids) <= limit:
            encoded.append({**row, "prompt": text, "prompt_ids": ids})
    if not encoded:
        raise ValueError(
            f"max_prompt_tokens={limit}: all {len(rows)} {which} prompts are longer; raise it."
        )
    num_left_out = len(rows) - len(encoded)
    if num_left_out > 0 and tell:
        print(
            f"left out {num_left_out} of {len(rows)} {which} prompts: longer than"
            f" max_prompt_tokens={limit}"
        )
    return encoded


def render(prompt: Any, tokenizer: Any, config: TrainConfig) -> tuple[str, list[int]]:
    """Return (the text of a prompt as the model sees it, its token ids).

    prompt      a text, or a conversation: a list of messages {"role": ..., "content": ...}. If the
                last message is the assistant's, the completion continues it.
    tokenizer   a tokenizer of transformers, with a chat template for conversations
    config      has prompt_template, into which a text is put, and chat: whether a text is a message
                of the user

    Raises ValueError for another prompt, and for one without tokens.
    """
    is_text = isinstance(prompt, str) and bool(prompt.strip())
    if not is_text and config.prompt_template != "{prompt}":
        raise ValueError(
            f"prompt_template={config.prompt_template!r} goes around a text, but this prompt is"
            f" {prompt!r:.80}: write it into the messages."
        )
    # A chat template writes the special tokens into the text.
    add_special_tokens = False
    if not is_text:
        text = conversation(prompt, tokenizer)
    else:
        text = config.prompt_template.replace("{prompt}", prompt)
        if config.chat:
            text = conversation([{"role": "user", "content": text}], tokenizer)
        else:
            # If the text begins with the beginning-of-text token, it must not get a second one.
            bos_token = tokenizer.bos_token
            add_special_tokens = not (bos_token and text.startswith(bos_token))
    ids = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    if not ids:
        raise ValueError(f"prompt={text!r:.80} has no tokens: leave the row out.")
    return text, ids


def conversation(messages: Any, tokenizer: Any) -> str:
    """Return the text of a list of messages in the tokenizer's chat template.

    If the last message is the assistant's, the text ends with it, and a completion continues it.
    Otherwise the text ends where the assistant's answer begins.

    messages   dictionaries with "role" and "content". Other types of objects raise ValueError.

    Raises ValueError if there is no template, or if it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"prompt={messages!r:.80} goes through the tokenizer's chat template, and it has none:"
            " use a chat model, or texts without chat."
        )
    try:
        # A data set gives each message the keys of all messages. Those it lacks are None.
        without_none = [
            {"role": message["role"]}
            | {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        continues_answer = without_none[-1]["role"] == "assistant"
        return tokenizer.apply_chat_template(
            without_none,
            tokenize=False,
            add_generation_prompt=not continues_answer,
            continue_final_message=continues_answer,
        )
    except Exception as error:  # a template, too, may raise exceptions of any type
        raise ValueError(
            f"prompt={messages!r:.80}: it must be a text that is not empty, or a list of messages"
            f" with their roles that the chat template takes ({type(error).__name__}: {error})."
        ) from error


def prompts_of_step(rows: list[Row], step: int, count: int, seed: int) -> list[Row]:
    """Return the `count` rows that a step trains on.

    Each epoch has its own permutation of the rows, and the permutations of all epochs follow each
    other. Each step takes the next `count` rows. The result depends only on the arguments, so a
    resumed run sees the same data.

    step    number of the step, from 0
    seed    seed of the run; epoch e is permuted with seed + e
    """
    # If an epoch ends within the step, the step goes on with rows of the next epoch.
    epoch, start = divmod(step * count, len(rows))
    order: list[int] = []
    while len(order) < start + count:
        generator = torch.Generator().manual_seed(seed + epoch)
        order += torch.randperm(len(rows), generator=generator).tolist()
        epoch += 1
    return [rows[i] for i in order[start : start + count]]
