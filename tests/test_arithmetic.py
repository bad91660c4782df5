"""The arithmetic example: its problems, its tokenizer, and that it runs from end to end."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from examples import arithmetic
from grpo_kernels.training.report import read_metrics
from grpo_kernels.training.rewards import exact


def solve(prompt: str) -> int:
    """The answer, read from the prompt alone."""
    story = re.fullmatch(r"\w+ had (\d+) \w+ (got|lost) (\d+)\?", prompt)
    if story:
        a, verb, b = story.groups()
        return int(a) + int(b) if verb == "got" else int(a) - int(b)
    return sum(int(term) for term in re.findall(r"[+-]?\d+", prompt))


def test_answers_are_right_and_slips_are_where_they_should_be() -> None:
    rows = arithmetic.problems(2000, seed=0)
    for row in rows:
        assert int(row["answer"]) == solve(row["prompt"]) >= 0
        plain = re.fullmatch(r"\d+[+-]\d+=", row["prompt"]) is not None
        assert int(row["slip"]) == int(row["answer"]) + (not plain)
    stories = sum("had" in row["prompt"] for row in rows)
    assert 800 < stories < 1500


def test_problems_are_distinct_so_that_any_split_is_disjoint() -> None:
    rows = arithmetic.problems(4000, seed=1)
    assert len({row["prompt"] for row in rows}) == 4000
    assert rows == arithmetic.problems(4000, seed=1) != arithmetic.problems(4000, seed=2)


def test_the_tokenizer_spells_digits_and_reads_back() -> None:
    tok = arithmetic.tokenizer()
    assert tok.tokenize("eve had 13 nuts lost 1?") == ["eve", "had", "1", "3", "nuts", "lost", "1", "?"]
    assert tok.tokenize("12-3+4=") == list("12-3+4=")
    assert tok.decode(tok("1907")["input_ids"]) == "1907"
    for row in arithmetic.problems(500, seed=3):  # nothing falls out of the vocabulary
        assert tok.decode(tok(row["prompt"])["input_ids"]) == row["prompt"].replace(" ", "")


def test_warm_up_teaches(capsys: Any) -> None:
    """The loss of the teacher's answers falls well below that of a guess among the ids."""
    torch.manual_seed(0)
    tok, model = arithmetic.tokenizer(), arithmetic.policy(width=32, layers=1)
    rows = arithmetic.problems(300, seed=0)

    def end_token_loss() -> float:
        ids = torch.tensor([tok(row["prompt"] + row["answer"])["input_ids"] for row in rows if len(row["prompt"]) == 6][:1])
        return -model(input_ids=ids).logits[0, -1].log_softmax(-1)[tok.eos_token_id].item()

    before = end_token_loss()
    arithmetic.warm_up(model, tok, rows, seed=0, steps=60, progress=False)
    assert end_token_loss() < min(before, 1.0)


def test_reward_is_the_exact_answer_and_nothing_less() -> None:
    answers = ["12"] * 6
    assert exact([""] * 6, ["12", "2", "112", "12 13", "1 2", ""], answer=answers) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_example_runs_and_runs_again(tmp_path: Path, capsys: Any) -> None:
    random.seed(5)
    out = tmp_path / "run"
    for _ in range(2):  # the second run replaces the first
        assert arithmetic.main(["--quick", "--out", str(out), "--no-side-by-side", "--seed", "3"]) == 0
    metrics = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert (out / "curves.png").exists()
    assert metrics[-1]["accuracy"] == pytest.approx(
        float(re.findall(r"-> ([\d.]+)%", capsys.readouterr().out)[-1]) / 100, abs=1e-3
    )
