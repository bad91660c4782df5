"""Short runs of TRL's GRPOTrainer with a tiny random model, for tests of the TRL adapter."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# TRL would otherwise send requests to the Hugging Face Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import tokenizers
import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

#: Ids of the two special tokens. The letters have the ids from 2 on.
PAD = 0
EOS = 1
#: The most tokens of a completion.
LENGTH = 12
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKL"
PROMPTS = ["ab", "bcd", "c", "dd"]

#: Fields of the configuration of the tiny model.
SIZES: dict[str, Any] = {
    "vocab_size": 2 + len(LETTERS), "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "initializer_range": 0.2, "eos_token_id": EOS,
    "pad_token_id": PAD, "bos_token_id": None,
}  # fmt: skip


def tokenizer() -> Any:
    """Return a transformers tokenizer with one token for each letter of LETTERS, PAD and EOS."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS, **{letter: i + 2 for i, letter in enumerate(LETTERS)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        # The default also has token types before transformers 5.
        model_input_names=["input_ids", "attention_mask"],
    )


def save_model(path: Path, kind: str = "Qwen2", **changes: Any) -> str:
    """Save a tiny model unless the path exists, and return the path.

    It must be on disk, because TRL loads the reference model from the path in the policy's
    configuration.

    path      a folder
    kind      start of the names of the classes in transformers
    changes   fields of the configuration that differ from SIZES
    """
    if not path.exists():
        torch.manual_seed(0)
        config_class = getattr(transformers, f"{kind}Config")
        model_class = getattr(transformers, f"{kind}ForCausalLM")
        config = config_class(**{**SIZES, "tie_word_embeddings": True, **changes})
        model_class(config).save_pretrained(path)
    return str(path)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a reward in [0, 1] for each completion, higher for letters a to h and for few letters.

    Rewards of a group are rarely equal, so that there is a gradient.

    completions   texts of at most LENGTH letters
    _             TRL also passes prompts and other columns, which are ignored
    """
    rewards = []
    for text in completions:
        num_early_letters = sum(LETTERS.index(letter) < 8 for letter in text)
        rewards.append(num_early_letters / LENGTH + (LENGTH - len(text)) / (2 * LENGTH))
    return rewards


def make_trainer(
    path: str, output: Path, cls: Callable[..., Any] = GRPOTrainer, steps: int = 10, **options: Any
) -> Any:
    """Return a trainer of the model that is saved at `path`, which trains on 32 prompts.

    path      see `save_model`
    output    the folder in which the trainer may write
    cls       GRPOTrainer or a subclass
    steps     optimizer steps of its run
    options   fields of GRPOConfig. Two names are special: `keywords` are keywords of the trainer,
              and `prepare` is a function that replaces the model by another
    """
    keywords = options.pop("keywords", {})
    prepare = options.pop("prepare", lambda model: model)
    settings: dict[str, Any] = {
        "output_dir": str(output), "use_cpu": True, "bf16": False, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "max_steps": steps,
        "seed": 3, "learning_rate": 5e-3, "temperature": 0.9, "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8, "num_generations": 4, "max_completion_length": LENGTH,
        "gradient_checkpointing": False, **options,
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


#: Logged numbers that differ from run to run.
CLOCKS = (
    "step_time",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "total_flos",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
)


def history(trainer: Any) -> list[dict[str, float]]:
    """Return what was logged at each step: loss, gradient norm and all metrics, without CLOCKS."""
    return [
        {name: value for name, value in entry.items() if name not in CLOCKS}
        for entry in trainer.state.log_history
    ]


def assert_same_history(
    got: list[dict[str, float]], want: list[dict[str, float]], tolerance: float
) -> None:
    """Assert that two runs have logged the same names with nearly equal numbers at each step.

    got, want   what `history` returns for the two runs
    tolerance   relative for numbers above 1, and absolute below
    """

    def numbers(logged: dict[str, float]) -> dict[str, float]:
        """Return the logged numbers, with NaN for None."""
        return {name: math.nan if x is None else x for name, x in logged.items()}

    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert list(ours) == list(theirs), step
        expected = pytest.approx(numbers(theirs), rel=tolerance, abs=tolerance, nan_ok=True)
        assert numbers(ours) == expected, step
