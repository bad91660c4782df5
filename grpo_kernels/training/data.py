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


def load_rows(config: TrainConfig, tokenizer: Any) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows). Raises ValueError where the data set lacks a split or a column."""
    datasets = require("datasets")
    path = Path(config.dataset)
    if path.is_file():
        if path.suffix not in FILE_LOADERS:
            raise ValueError(f"dataset={config.dataset!r}: a file must end in one of {', '.join(FILE_LOADERS)}.")
        rows = list(datasets.load_dataset(FILE_LOADERS[path.suffix], data_files=str(path), split="train"))
        if len(rows) <= config.eval_prompts:
            raise ValueError(
                f"dataset={config.dataset!r} has {len(rows)} rows, and eval_prompts={config.eval_prompts} holds out all: lower it."
            )
        train, held_out = rows[: -config.eval_prompts], rows[-config.eval_prompts :]
    else:
        configuration = config.dataset_config
        if configuration is None and "main" in datasets.get_dataset_config_names(config.dataset):
            configuration = "main"
        splits = datasets.load_dataset(config.dataset, configuration)
        for name in (config.train_split, config.eval_split):
            if name not in splits:
                raise ValueError(f"split {name!r} is not in dataset={config.dataset!r}: it has {', '.join(splits)}.")
        train, held_out = list(splits[config.train_split]), list(splits[config.eval_split])
    return [prepare(row, config, tokenizer) for row in train], [prepare(row, config, tokenizer) for row in held_out]


def prepare(row: Row, config: TrainConfig, tokenizer: Any) -> Row:
    """Add "prompt" and "answer" to a raw row. Of a worked solution "... #### 42" (gsm8k) the answer is "42"."""
    prompt = str(row[_column(row, config.prompt_column, ("prompt", "question", "problem"), "prompt_column")])
    prompt = config.prompt_template.replace("{prompt}", prompt)
    if config.chat:
        if not tokenizer.chat_template:
            raise ValueError("chat=True, but the tokenizer has no chat template: use a chat model, or chat=False.")
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    prepared = {**row, "prompt": prompt}
    if config.answer_column is not None or "answer" in row or "solution" in row:
        answer = str(row[_column(row, config.answer_column, ("answer", "solution"), "answer_column")])
        prepared["answer"] = answer.rsplit("####", 1)[-1].strip()
    return prepared


def _column(row: Row, wanted: str | None, usual: tuple[str, ...], argument: str) -> str:
    for name in (wanted,) if wanted else usual:
        if name in row:
            return name
    raise ValueError(f"{argument}={wanted!r}: the data set has the columns {', '.join(row)}; name one of them.")


def encode(rows: list[Row], tokenizer: Any, max_tokens: int) -> tuple[list[Row], int]:
    """Rows with their "prompt_ids", and how many were left out as longer than `max_tokens` (or empty)."""
    # A chat template writes the special tokens itself, so a beginning-of-text token must not come twice.
    special = not tokenizer.chat_template
    kept = []
    for row in rows:
        ids = tokenizer(row["prompt"], add_special_tokens=special)["input_ids"]
        if 0 < len(ids) <= max_tokens:
            kept.append({**row, "prompt_ids": ids})
    if not kept:
        raise ValueError(f"max_prompt_tokens={max_tokens}: all {len(rows)} prompts are longer (or there are none); raise it.")
    return kept, len(rows) - len(kept)


def prompts_of_step(rows: list[Row], step: int, count: int, seed: int) -> list[Row]:
    """The prompts of a step: consecutive pieces of a new permutation each epoch. A pure function of the step, so that a
    resumed run sees the same data."""
    order: dict[int, list[int]] = {}
    chosen = []
    for position in range(step * count, (step + 1) * count):
        epoch, at = divmod(position, len(rows))
        if epoch not in order:
            order[epoch] = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        chosen.append(rows[order[epoch][at]])
    return chosen
