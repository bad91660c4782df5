"""The problems of examples/arithmetic.py over a vocabulary of thousands: each character has many ids, its spellings.

The number of spellings that a teacher uses sets the entropy of the policy that learns from it. It does not change the answers."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import torch

from benchmarks import replay
from examples import arithmetic
from grpo_kernels.training import require

VOCABULARY, WARM_UP = 4096, 300
#: Separates a character from the number of its spelling.
MARK = "·"


@functools.cache
def tokenizer() -> Any:
    """A tokenizer that encodes each character as its first spelling and decodes all spellings."""
    tokenizers, transformers = require("tokenizers"), require("transformers")
    chars, many = arithmetic.CHARS, len(arithmetic.CHARS)
    names = [chars[i % many] + (f"{MARK}{i // many}" if i >= many else "") for i in range(VOCABULARY)]
    ids = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))
    ids.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    ids.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace(tokenizers.Regex(f"{MARK}[0-9]+"), ""), tokenizers.decoders.Fuse()]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=ids, eos_token=".", pad_token=".", padding_side="left")


class Teacher:
    """The tokenizer of a teacher that draws each digit of an answer from its first `spellings`."""

    def __init__(self, spellings: int, seed: int) -> None:
        self.spellings, self.random, self.eos_token_id = spellings, random.Random(seed), tokenizer().eos_token_id

    def __call__(self, text: str) -> dict[str, list[int]]:
        ids = tokenizer()(text)["input_ids"]
        if text.isdigit():
            ids = [i + len(arithmetic.CHARS) * self.random.randrange(self.spellings) for i in ids]
        return {"input_ids": ids}


def policy(width: int = replay.WIDTH_OF_MODEL, layers: int = replay.LAYERS) -> Any:
    """The example's policy with these ids and an untied head."""
    transformers = require("transformers")
    config = arithmetic.policy(width, layers).config.to_dict() | {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config.from_dict(config))


@functools.cache
def warmed_up(seed: int, spellings: int, folder: Path | None = None) -> tuple[Any, list[Any], list[Any]]:
    """The model after supervised steps on the teacher's answers, training problems, held-out problems. A folder keeps the model."""
    training, held_out = replay.problems(seed)
    torch.manual_seed(seed)
    model = policy()
    kept = None if folder is None else folder / f"warm-up-{seed}-{spellings}-{WARM_UP}.pt"
    if kept is not None and kept.exists():
        model.load_state_dict(torch.load(kept))
        return model, training, held_out
    arithmetic.warm_up(model, Teacher(spellings, seed), training, seed, WARM_UP, progress=False)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), kept)
    return model, training, held_out
