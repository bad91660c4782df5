"""GRPO on arithmetic from nothing, on a CPU, in minutes: `python -m examples.arithmetic`.

A character-level Qwen3 of about two million parameters first learns from worked examples until it answers about a third
of new problems; then GRPO trains it on answers alone: 1 for the exact number, 0 for anything else. The problems of the
warm-up, of GRPO and of the evaluation are disjoint. It ends with the loss step at a real vocabulary, side by side.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.trainer import TrainConfig, Trainer
from grpo_kernels.training import require
from grpo_kernels.training.report import read_metrics
from grpo_kernels.training.sampling import Completions, completion_logits, left_pad, sample

WORDS = (*"0123456789+-=?.", "ann", "bob", "eve", "had", "got", "lost", "pens", "nuts")
CARELESS = 2 / 3  # share of the teacher's examples that hold the slip

Problem = dict[str, str]


def problem(rng: random.Random) -> Problem:
    """A sum or difference of two or three small numbers, or a story with one; never negative. "slip" is what the teacher
    of the warm-up may write instead: plain problems it always gets right, elsewhere it counts one too many."""
    kind = rng.choices(("plain", "three", "story"), (4, 2, 4))[0]
    numbers = [rng.randrange(10) for _ in range(3)] if kind == "three" else [rng.randrange(20), rng.randrange(20)]
    signs = [rng.choice((1, -1)) for _ in numbers[1:]]
    answer = numbers[0] + sum(s * n for s, n in zip(signs, numbers[1:], strict=True))
    if answer < 0:
        return problem(rng)
    if kind == "story":
        who, what = rng.choice(("ann", "bob", "eve")), rng.choice(("pens", "nuts"))
        prompt = f"{who} had {numbers[0]} {what} {'got' if signs[0] > 0 else 'lost'} {numbers[1]}?"
    else:
        prompt = str(numbers[0]) + "".join(f"{'+' if s > 0 else '-'}{n}" for s, n in zip(signs, numbers[1:], strict=True)) + "="
    return {"prompt": prompt, "answer": str(answer), "slip": str(answer + (kind != "plain"))}


def problems(count: int, seed: int) -> list[Problem]:
    """Distinct problems in random order."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        new = problem(rng)
        found[new["prompt"]] = new
    return list(found.values())


def tokenizer() -> Any:
    """One token per digit, sign and word; "." ends an answer."""
    tokenizers, transformers = require("tokenizers"), require("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    split = tokenizers.pre_tokenizers
    words.pre_tokenizer = split.Sequence([split.WhitespaceSplit(), split.Split(tokenizers.Regex("[a-z]+|[^a-z]"), "isolated")])
    words.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=".", pad_token=".")


def policy(width: int = 192, layers: int = 3) -> Any:
    transformers = require("transformers")
    config = transformers.Qwen3Config(
        vocab_size=len(WORDS), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=width // 4, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.05, eos_token_id=WORDS.index("."), pad_token_id=WORDS.index("."), bos_token_id=None,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def encoded(rows: list[Problem], tok: Any) -> list[list[int]]:
    return [tok(row["prompt"])["input_ids"] for row in rows]


def accuracy(model: Any, tok: Any, rows: list[Problem]) -> float:
    out = sample(model, encoded(rows, tok), group_size=1, max_new_tokens=5, ends=[tok.eos_token_id], temperature=0)
    texts = tok.batch_decode(out.tokens, skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def warm_up(model: Any, tok: Any, rows: list[Problem], seed: int, steps: int) -> None:
    """Supervised steps on the teacher's examples."""
    end, device = tok.eos_token_id, torch.device("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    rng = random.Random(seed)
    for step in require("tqdm").trange(steps, desc="warm-up"):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        batch = rng.sample(rows, 128)
        prompts, prompt_attention = left_pad(encoded(batch, tok), end, device)
        answers = [tok(row["slip" if rng.random() < CARELESS else "answer"])["input_ids"] + [end] for row in batch]
        width = max(map(len, answers))
        targets = torch.tensor([a + [end] * (width - len(a)) for a in answers])
        mask = torch.arange(width) < torch.tensor([[len(a)] for a in answers])
        examples = Completions(torch.cat([prompts, targets], 1), torch.cat([prompt_attention, mask], 1), prompts.shape[1])
        loss = torch.nn.functional.cross_entropy(completion_logits(model, examples)[mask], targets[mask])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
