"""An arithmetic task for a policy that is small enough for a CPU: the problems, the tokenizer, the
model and its warm-up.

A small Qwen3 reads and writes single characters. In the warm-up it learns from a teacher that is
right in plain problems, but adds one to most answers of stories. It then knows sums, and makes the
same mistakes. GRPO, with reward 1 for the right number and else 0, can correct them. A sum of the
evaluation, such as 12+3, is nowhere in training, also not as 3+12 or in a story, so that memorised
answers do not count.

`make demo` (examples/demo.py) trains it.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from grpo_kernels.training import require
from grpo_kernels.training.policy import Completions, completion_logits
from grpo_kernels.training.rollouts import left_pad, sample

NAMES = ("al", "bo", "cy", "di", "jo", "mo")
CHARS = "0123456789+-=?. " + "".join(sorted(set("".join((*NAMES, "had", "got", "lost")))))
LARGEST = 29  # largest number in a problem; with fewer sums the policy memorises them
CARELESS = 0.6  # share of the teacher's answers to stories that are wrong

Problem = dict[str, str]


def problem(rng: random.Random) -> Problem:
    """Return a sum or difference that is not negative, plain or as a story.

    prompt   the problem
    answer   the right answer
    slip     the answer of the careless teacher: one more in stories, right in plain problems
    sum      the terms in a fixed order, equal for all problems with the same terms
    """
    first = rng.randint(0, LARGEST)
    second = rng.randint(0, LARGEST)
    sign = rng.choice((1, -1))
    answer = first + sign * second
    story = rng.random() < 0.7
    if answer < 0:
        return problem(rng)
    if story:
        prompt = f"{rng.choice(NAMES)} had {first} {'got' if sign > 0 else 'lost'} {second}?"
    else:
        prompt = f"{first}{'+' if sign > 0 else '-'}{second}="
    terms = " ".join(sorted((f"{first:+}", f"{sign * second:+}")))
    return {"prompt": prompt, "answer": str(answer), "slip": str(answer + story), "sum": terms}


def problems(count: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return (training problems, held-out problems), which have no sum in common.

    Each list may contain a problem several times.
    """
    rng = random.Random(seed)
    rows = [problem(rng) for _ in range(count)]
    sums = sorted({row["sum"] for row in rows})
    held_out = set(rng.sample(sums, len(sums) * 15 // 100))
    training_rows = [row for row in rows if row["sum"] not in held_out]
    held_out_rows = [row for row in rows if row["sum"] in held_out]
    return training_rows, held_out_rows


def tokenizer() -> Any:
    """Return a tokenizer with one token for each character. "." ends an answer."""
    tokenizers, transformers = require("tokenizers"), require("transformers")
    chars = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({char: i for i, char in enumerate(CHARS)}, unk_token="?")
    )
    chars.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    chars.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=chars, eos_token=".", pad_token="."
    )


def policy(width: int = 256, layers: int = 3) -> Any:
    """Return a Qwen3 with random weights and the vocabulary of `tokenizer`."""
    transformers = require("transformers")
    config = transformers.Qwen3Config(
        vocab_size=len(CHARS), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=width // 4, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.05, eos_token_id=CHARS.index("."), pad_token_id=CHARS.index("."), bos_token_id=None,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def encoded(rows: list[Problem], tok: Any) -> list[list[int]]:
    """Return the ids of the prompts."""
    return tok([row["prompt"] for row in rows])["input_ids"]


def accuracy(model: Any, tok: Any, rows: list[Problem]) -> float:
    """Return the share of problems that the model answers right, sampled greedily."""
    out = sample(
        model,
        encoded(rows, tok),
        group_size=1,
        max_new_tokens=4,
        ends=[tok.eos_token_id],
        temperature=0,
    )
    texts = tok.batch_decode(out.tokens, skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def warm_up(
    model: Any, tok: Any, rows: list[Problem], seed: int, steps: int, progress: bool
) -> None:
    """Train the model on the teacher's answers, with cross-entropy.

    steps      number of optimizer steps, of 64 problems each
    progress   whether to show a progress bar
    """
    end = tok.eos_token_id
    peak_lr = 1.5e-3
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.0
    )
    for step in require("tqdm").trange(steps, desc="warm-up", disable=not progress):
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(1.0, (step + 1) / 20, 2 * (steps - step) / steps)
        batch = rng.sample(rows, 64)
        prompts, prompt_attention = left_pad(encoded(batch, tok), end, torch.device("cpu"))
        # Wrong answers are drawn anew each time: the policy learns how often, not where.
        texts = [row["slip" if rng.random() < CARELESS else "answer"] for row in batch]
        answers = [[*ids, end] for ids in tok(texts)["input_ids"]]
        width = max(map(len, answers))
        targets = torch.tensor([a + [end] * (width - len(a)) for a in answers])
        mask = torch.arange(width) < torch.tensor([[len(a)] for a in answers])
        examples = Completions(
            torch.cat([prompts, targets], 1),
            torch.cat([prompt_attention, mask], 1),
            prompts.shape[1],
        )
        torch.nn.functional.cross_entropy(
            completion_logits(model, examples)[mask], targets[mask]
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
