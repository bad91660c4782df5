"""Prompts: where the rows come from, which text the model sees, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from . import require
from .config import TrainConfig

#: A row is the data set's own columns plus "prompt" (the text given to the model) and, where known, "answer".
Row = dict[str, Any]

FILE_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_rows(config: TrainConfig) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows) with "prompt" and "answer"; without evaluations no rows are held out. Raises ValueError
    where the data set cannot be read or lacks a split or a column."""
    datasets = require("datasets")
    path = Path(config.dataset)
    if path.is_file():
        if path.suffix not in FILE_LOADERS:
            raise ValueError(f"dataset={config.dataset!r}: a file must end in one of {', '.join(FILE_LOADERS)}.")
        rows = list(_load(datasets.load_dataset, config, FILE_LOADERS[path.suffix], data_files=str(path), split="train"))
        train, held_out = _cut(rows, config)
    else:
        configuration = config.dataset_config
        if configuration is None and "main" in _load(datasets.get_dataset_config_names, config, config.dataset):
            configuration = "main"
        splits = _load(datasets.load_dataset, config, config.dataset, configuration)
        wanted = (config.train_split, config.eval_split) if config.eval_steps else (config.train_split,)
        for name in wanted:
            if name not in splits:
                raise ValueError(f"split {name!r} is not in dataset={config.dataset!r}: it has {', '.join(splits)}.")
        train, *rest = (list(splits[name]) for name in wanted)
        held_out = rest[0] if rest else []
    return [prepare(row, config) for row in train], [prepare(row, config) for row in held_out]


def _load(function: Any, config: TrainConfig, *arguments: Any, **options: Any) -> Any:
    try:
        return function(*arguments, **options)
    except Exception as error:  # datasets has exceptions of many kinds, and the reason in a cause
        reason = error.__cause__ or error
        raise ValueError(f"dataset={config.dataset!r} cannot be loaded: {type(reason).__name__}: {reason}") from error


def _cut(rows: list[Row], config: TrainConfig) -> tuple[list[Row], list[Row]]:
    """If there is only one file, its last rows are held out for evaluation."""
    if not config.eval_steps:
        return rows, []
    count = config.eval_prompts or min(config.most_held_out, max(len(rows) // 10, 1))
    if len(rows) <= count:
        raise ValueError(
            f"dataset={config.dataset!r} has {len(rows)} rows, and eval_prompts={count} holds out all: lower it, or switch "
            "evaluation off with eval_steps=0."
        )
    return rows[:-count], rows[-count:]


def prepare(row: Row, config: TrainConfig) -> Row:
    """Name the columns of a raw row "prompt" and "answer". Of a worked solution "... #### 42" (gsm8k) the answer is "42"."""
    prepared = {**row, "prompt": row[_column(row, config.prompt_column, ("prompt", "question", "problem"), "prompt_column")]}
    if config.answer_column is not None or "answer" in row or "solution" in row:
        answer = row[_column(row, config.answer_column, ("answer", "solution"), "answer_column")]
        prepared["answer"] = None if answer is None else str(answer).rsplit("####", 1)[-1].strip()
    return prepared


def _column(row: Row, wanted: str | None, usual: tuple[str, ...], argument: str) -> str:
    for name in (wanted,) if wanted else usual:
        if name in row:
            return name
    raise ValueError(f"{argument}={wanted!r}: the data set has the columns {', '.join(row)}; name one of them.")


def encode(rows: list[Row], tokenizer: Any, config: TrainConfig, which: str, tell: bool) -> list[Row]:
    """Rows with "prompt" as the text that the model sees and its "prompt_ids", without those longer than max_prompt_tokens, whose
    number is told. Raises ValueError, which names the row, for a prompt that is neither text nor a conversation, and where no row
    is left."""
    if not rows:
        remedy = "name a data set and a split that have some, or, of held-out rows, switch evaluation off with eval_steps=0"
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
        raise ValueError(f"max_prompt_tokens={config.max_prompt_tokens}: all {len(rows)} {which} prompts are longer; raise it.")
    if len(kept) < len(rows) and tell:
        limit = config.max_prompt_tokens
        print(f"left out {len(rows) - len(kept)} of {len(rows)} {which} prompts: longer than max_prompt_tokens={limit}")
    return kept


def render(prompt: Any, tokenizer: Any, config: TrainConfig) -> tuple[str, list[int]]:
    """(text, ids) of a prompt that is a text, or a conversation: messages {"role": ..., "content": ...}, of which an assistant's
    last one is continued."""
    plain = isinstance(prompt, str) and bool(prompt.strip())
    text, special = "", False  # tokens, which a template writes itself
    if plain:
        text = config.prompt_template.replace("{prompt}", prompt)
        # A text may come with its special tokens, and a beginning-of-text token must not come twice.
        special = not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
    elif config.prompt_template != "{prompt}":
        raise ValueError(
            f"prompt_template={config.prompt_template!r} goes around a text, but this prompt is {prompt!r:.80}: write it into the "
            "messages."
        )
    if not plain or config.chat:
        text, special = conversation([{"role": "user", "content": text}] if plain else prompt, tokenizer), False
    ids = tokenizer(text, add_special_tokens=special)["input_ids"]
    if not ids:
        raise ValueError(f"prompt={text!r:.80} has no tokens: leave the row out.")
    return text, ids


def conversation(prompt: Any, tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"prompt={prompt!r:.80} goes through the tokenizer's chat template, and it has none: use a chat model, or texts without chat."
        )
    try:
        # A data set fills the keys that other messages have with None.
        messages = [{"role": m["role"]} | {key: value for key, value in m.items() if value is not None} for m in prompt]
        goes_on = messages[-1]["role"] == "assistant"
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on
        )
    except Exception as error:  # of the template's own language, too
        raise ValueError(
            f"prompt={prompt!r:.80}: it must be a text that is not empty, or a list of messages with their roles that the chat template "
            f"takes ({type(error).__name__}: {error})."
        ) from error


def prompts_of_step(rows: list[Row], step: int, count: int, seed: int) -> list[Row]:
    """The prompts of a step: consecutive pieces of a new permutation each epoch. A pure function of the step, so that a
    resumed run sees the same data."""
    epoch, start = divmod(step * count, len(rows))
    order: list[int] = []
    while len(order) < start + count:
        order += torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        epoch += 1
    return [rows[i] for i in order[start : start + count]]
