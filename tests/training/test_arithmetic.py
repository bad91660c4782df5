"""The arithmetic example: its problems, its tokenizer, and that it runs from end to end."""

from __future__ import annotations

import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from examples import arithmetic
from grpo_kernels.training.report import read_metrics
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


def test_the_policy_has_the_size_that_the_docstring_says() -> None:
    size = sum(p.numel() for p in arithmetic.policy().parameters())
    assert f"{size / 1e6:.1f} million parameters" in (arithmetic.__doc__ or "")


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


QUICK = ["--quick", "--no-side-by-side", "--seed", "3", "--out"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_example_deletes_no_folder_that_another_run_made(tmp_path: Path, capsys: Any) -> None:
    """A folder with metrics.jsonl, which any trainer may have, is refused before the warm-up."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 1.0}\n')
    (tmp_path / "thesis.tex").write_text("years of work")
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as done:
        arithmetic.main([*QUICK, str(tmp_path)])
    said = capsys.readouterr()
    assert done.value.code == 2 and "choose another folder" in said.err and "warm-up" not in said.out
    assert {name: text for name, text in contents(tmp_path).items() if name != ".lock"} == before


def test_the_example_replaces_its_own_run_and_leaves_what_others_put_there(tmp_path: Path) -> None:
    assert arithmetic.main([*QUICK, str(tmp_path)]) == 0
    (tmp_path / "notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "checkpoints" / "step-00000003", tmp_path / "checkpoints" / "step-00000003-good")
    (tmp_path / "checkpoints" / "step-00000003" / "notes.txt").write_text("mine")
    kept = {name: text for name, text in contents(tmp_path).items() if "notes" in name or "-good" in name}
    first = (tmp_path / "metrics.jsonl").read_text()
    assert arithmetic.main([*QUICK, str(tmp_path)]) == 0
    after = contents(tmp_path)
    assert len(kept) == 4
    for name, text in kept.items():  # or where the new run has its own folder of that name, beside it
        assert text in (after.get(name), after.get(name.replace("00000003/", "00000003-aside/")))
    assert (tmp_path / "metrics.jsonl").read_text() != first  # times differ
    (tmp_path / "metrics.jsonl").write_text(first)  # of another run again
    with pytest.raises(SystemExit):
        arithmetic.main([*QUICK, str(tmp_path)])
    assert (tmp_path / "metrics.jsonl").read_text() == first


def test_the_example_runs_and_runs_again(tmp_path: Path, capsys: Any, drawn: None) -> None:
    random.seed(5)
    out = tmp_path / "run"
    for _ in range(2):  # the second run replaces the first
        assert arithmetic.main([*QUICK, str(out)]) == 0
    metrics = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert (out / "curves.png").stat().st_size > 5000
    assert metrics[-1]["accuracy"] == pytest.approx(
        float(re.findall(r"-> ([\d.]+)%", capsys.readouterr().out)[-1]) / 100, abs=1e-3
    )
