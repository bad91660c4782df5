"""The arithmetic of the demo: its problems, its tokenizer, its warm-up."""

from __future__ import annotations

import math
import re

import pytest
import torch

pytest.importorskip("transformers")

from examples import arithmetic
from grpo_kernels.training.rewards import exact


def solve(prompt: str) -> tuple[str, list[int]]:
    """The kind of a problem and the terms that its answer adds up, read from the prompt alone."""
    story = re.fullmatch(r"[a-z]{2} had (\d+) (got|lost) (\d+)\?", prompt)
    if story:
        first, verb, second = story.groups()
        return "story", [int(first), int(second) * (1 if verb == "got" else -1)]
    plain = re.fullmatch(r"(\d+)([+-]\d+)=", prompt)
    assert plain, prompt
    return "plain", [int(plain[1]), int(plain[2])]


def test_answers_are_right_and_slips_are_where_they_should_be() -> None:
    kinds = []
    for rows in arithmetic.problems(2000, seed=0):
        for row in rows:
            kind, terms = solve(row["prompt"])
            assert int(row["answer"]) == sum(terms) >= 0
            assert int(row["slip"]) == sum(terms) + (kind == "story")
            kinds.append(kind)
    assert 1300 < kinds.count("story") < 1500 and len(kinds) == 2000


@pytest.mark.parametrize("seed", range(3))
def test_no_held_out_sum_occurs_in_training_in_any_order_or_text(seed: int) -> None:
    training, held_out = arithmetic.problems(8000, seed)

    def sums(rows: list[dict[str, str]]) -> set[tuple[int, ...]]:
        return {tuple(sorted(solve(row["prompt"])[1])) for row in rows}

    assert not sums(training) & sums(held_out)
    assert not {row["prompt"] for row in training} & {row["prompt"] for row in held_out}
    assert len(held_out) >= 500 and len(training) >= 6000 and len(sums(held_out)) >= 100
    assert (training, held_out) == arithmetic.problems(8000, seed) != arithmetic.problems(8000, seed + 1)


def test_the_tokenizer_spells_every_character_and_reads_back() -> None:
    tok = arithmetic.tokenizer()
    assert len(tok) == len(set(arithmetic.CHARS)) == len(arithmetic.CHARS)
    for row in arithmetic.problems(500, seed=3)[0]:
        for text in (row["prompt"], row["answer"], row["slip"]):
            assert tok.tokenize(text) == list(text)
            assert tok.decode(tok(text)["input_ids"]) == text  # nothing falls out of the vocabulary
    assert tok.decode([tok.eos_token_id], skip_special_tokens=True) == ""


def test_warm_up_teaches() -> None:
    """From plain problems, whose answers are never slips, it learns which digits come first, and that an answer ends."""
    torch.manual_seed(0)
    tok, model = arithmetic.tokenizer(), arithmetic.policy(width=32, layers=1)
    rows = [row for row in arithmetic.problems(600, seed=0)[0] if row["prompt"].endswith("=")]
    longest = [row["prompt"] + row["answer"] + "." for row in rows if len(row["prompt"] + row["answer"]) == 8]
    ids = torch.tensor([tok(text)["input_ids"] for text in longest])

    def losses() -> list[float]:
        """Of the first digit, the second and the end."""
        logits = model(input_ids=ids).logits[:, 5:-1]
        return torch.nn.functional.cross_entropy(logits.mT, ids[:, 6:], reduction="none").mean(0).tolist()

    before = losses()
    arithmetic.warm_up(model, tok, rows, seed=0, steps=150, progress=False)
    after = losses()
    guess = math.log(10)
    assert min(before) > guess and after[0] < guess / 2 and after[1] < guess and after[2] < guess / 4


def test_reward_is_the_exact_answer_and_nothing_less() -> None:
    answers = ["12"] * 6
    assert exact([""] * 6, ["12", "2", "112", "12 13", "1 2", ""], answer=answers) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
