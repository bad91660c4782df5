"""TRL's GRPOTrainer with a tiny model made from a configuration:

what the tests of the TRL adapter share.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else TRL calls home

import pytest
import tokenizers
import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

PAD, EOS, LENGTH = 0, 1, 12
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKL"
PROMPTS = ["ab", "bcd", "c", "dd"]

#: The first model that is saved; a test may ask for another.
SIZES: dict[str, Any] = {
    "vocab_size": 2 + len(LETTERS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.2, "eos_token_id": EOS, "pad_token_id": PAD,
    "bos_token_id": None,
}  # fmt: skip


def tokenizer() -> Any:
    vocabulary = {"<pad>": PAD, "<eos>": EOS, **{letter: i + 2 for i, letter in enumerate(LETTERS)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        model_input_names=[
            "input_ids",
            "attention_mask",
        ],  # before transformers 5 token types are among them
    )


def save_model(path: Path, kind: str = "Qwen2", **changes: Any) -> str:
    """TRL loads the reference of a run with beta from the path in the policy's config, so it has to
    be on disk.
    """
    if not path.exists():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(
            **SIZES | {"tie_word_embeddings": True} | changes
        )
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)
    return str(path)


def reward(completions: list[str], **_: Any) -> list[float]:
    """A reward for letters at the start of the alphabet and for short answers.

    It is neither zero nor equal within a group.
    """
    return [
        sum(LETTERS.index(x) < 8 for x in text) / 12 + (12 - len(text)) / 24 for text in completions
    ]


def make_trainer(
    path: str, output: Path, cls: Callable[..., Any] = GRPOTrainer, steps: int = 10, **options: Any
) -> Any:
    """`options` go to GRPOConfig; `keywords` among them to the trainer."""
    keywords, prepare = options.pop("keywords", {}), options.pop("prepare", lambda model: model)
    settings: dict[str, Any] = {
        "output_dir": str(output), "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "logging_steps": 1, "max_steps": steps, "seed": 3, "learning_rate": 5e-3, "temperature": 0.9,
        "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "num_generations": 4,
        "max_completion_length": LENGTH, "gradient_checkpointing": False, **options,
    }  # fmt: skip
    data = Dataset.from_dict({"prompt": PROMPTS * 8})
    torch.manual_seed(0)
    model = prepare(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    trainer = cls(
        model=model, args=GRPOConfig(**settings), reward_funcs=reward, train_dataset=data,
        eval_dataset=data.select(range(2)), processing_class=tokenizer(), **keywords,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


#: Logged, but not a result.
CLOCKS = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "eval_runtime",
          "eval_samples_per_second", "eval_steps_per_second")  # fmt: skip


def history(trainer: Any) -> list[dict[str, float]]:
    """What was logged at each step: loss, gradient norm and all metrics."""
    return [
        {k: v for k, v in entry.items() if k not in CLOCKS} for entry in trainer.state.log_history
    ]


def assert_same_history(
    got: list[dict[str, float]], want: list[dict[str, float]], tolerance: float
) -> None:
    """Every number of every step, by name; relative to the number, or to 1 where it is smaller."""
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        assert [*a] == [*b], step
        ours, theirs = (
            {name: math.nan if x is None else x for name, x in logged.items()} for logged in (a, b)
        )
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance, nan_ok=True), step
