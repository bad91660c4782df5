"""The demo: both losses make the same steps, only one of them is ours, and the report states the results. The arithmetic."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from examples import arithmetic, demo, demo_report

TINY = demo.Size(vocab=101, top_k=7, width=32, layers=1, warm_up=2, steps=3, prompts=4, group=4, held_out=4)


# ---- the arithmetic


def solve(prompt: str) -> tuple[str, list[int]]:
    """The kind of a problem and the terms that its answer adds up, read from the prompt alone."""
    story = re.fullmatch(r"[a-z]{2} had (\d+) (got|lost) (\d+)\?", prompt)
    if story:
        first, verb, second = story.groups()
        return "story", [int(first), int(second) * (1 if verb == "got" else -1)]
    plain = re.fullmatch(r"(\d+)([+-]\d+)=", prompt)
    assert plain, prompt
    return "plain", [int(plain[1]), int(plain[2])]


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_right_and_no_held_out_sum_occurs_in_training(seed: int) -> None:
    """In any order or text; slips are in stories alone."""
    parts = arithmetic.problems(4000, seed)
    solved = [[solve(row["prompt"]) for row in rows] for rows in parts]
    for rows, found in zip(parts, solved, strict=True):
        for row, (kind, terms) in zip(rows, found, strict=True):
            assert int(row["answer"]) == sum(terms) >= 0 and int(row["slip"]) == sum(terms) + (kind == "story")
    training, held_out = ({tuple(sorted(terms)) for _, terms in found} for found in solved)
    assert not training & held_out and len(held_out) >= 100 and len(parts[1]) >= 250 and sum(map(len, parts)) == 4000
    assert parts == arithmetic.problems(4000, seed) != arithmetic.problems(4000, seed + 1)


def test_the_tokenizer_spells_every_character_and_reads_back() -> None:
    tok = arithmetic.tokenizer()
    assert tok.decode(tok(arithmetic.CHARS)["input_ids"]) == arithmetic.CHARS and tok.tokenize("12+3=") == list("12+3=")
    assert len(tok) == len(set(arithmetic.CHARS)) and tok.decode([tok.eos_token_id], skip_special_tokens=True) == ""


# ---- the demo


def digits(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Share of digits, which a policy that knows nothing gets some of."""
    return [sum(c.isdigit() for c in text) / 3 for text in completions]


@pytest.fixture(scope="module", autouse=True)
def easy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "exact", digits)
        yield


@pytest.fixture(scope="module")
def measured(easy: None) -> dict[str, Any]:
    """One seed's record of a tiny run in this process."""
    return demo.run(0, TINY, demo.side, progress=False)


@pytest.fixture
def record(measured: dict[str, Any]) -> dict[str, Any]:
    """Of two seeds, the second of which is the first with other numbers."""
    first, other = copy.deepcopy(measured), copy.deepcopy(measured) | {"seed": 1}
    other["sides"]["plain PyTorch"]["reward"][1] += 0.25
    for run in (first, other):
        for name, seconds, peak in (("fused", 0.5, 20.0), ("plain PyTorch", 1.5, 700.0)):
            run["sides"][name] |= {
                "seconds": [seconds] * 3, "sampling_seconds": [0.25] * 3, "loss_seconds": [seconds - 0.3] * 3,
                "optimizer_seconds": [0.05] * 3, "peak_mib": [peak], "accuracy": [0.25, 0.75],
            }  # fmt: skip
    machine = {"name": "a machine", "threads": 1, "torch": "2"}
    size = {"vocab": 101, "top_k": 7, "prompts": 4, "group": 4, "steps": 3}
    return {"command": demo_report.COMMAND, "date": "2026-01-01", "machine": machine, "size": size, "runs": [first, other]}


def test_both_losses_make_the_same_steps_over_sets_of_k_ids(measured: dict[str, Any]) -> None:
    fused, plain = (measured["sides"][name] for name in demo.LOSSES)
    assert fused["reward"] == plain["reward"] and len({*fused["reward"]}) > 1
    assert fused["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4) and min(plain["grad_norm"]) > 0.01
    assert fused["accuracy"] == plain["accuracy"] and fused["kept"] == plain["kept"] == [TINY.top_k, TINY.top_k]


def started(tmp_path: Path, name: str = "fused") -> Iterator[demo.Line]:
    demo.warm_up(0, TINY, tmp_path / "warm.pt", progress=False)
    lines = demo.side(name, tmp_path / "warm.pt", 0, TINY)
    next(lines)
    return lines


def test_equal_rows_of_the_table_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k then keeps the whole vocabulary, and nothing is learned."""
    accuracy = arithmetic.accuracy

    def with_equal_rows(model: Any, *rest: Any) -> float:
        with torch.no_grad():
            model.get_input_embeddings().weight.fill_(0.1)
        return accuracy(model, *rest)

    monkeypatch.setattr(arithmetic, "accuracy", with_equal_rows)
    with pytest.raises(RuntimeError, match=r"top_k=7 kept between \d+ and \d+ ids.*random row"):
        next(started(tmp_path))


@pytest.mark.parametrize("name", demo.LOSSES)
def test_the_plain_loss_runs_no_kernel(tmp_path: Path, name: str) -> None:
    """Otherwise both sides could be ours: no loss and no log-prob of the package is computed."""
    called: set[str] = set()
    lines = started(tmp_path, name)
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_name) if event == "call" else None)
    try:
        line = next(lines)
    finally:
        sys.setprofile(None)
    ours = called & {"linear_grpo_loss", "grpo_loss", "linear_logprobs", "token_logprobs"}
    assert ours == ({"linear_grpo_loss"} if name == "fused" else set()) and line["grad_norm"] > 0


def test_the_table_and_the_sentences_are_of_the_record(record: dict[str, Any]) -> None:
    said = demo_report.text(record)
    head, *rows = demo_report.table(record)
    assert len(head) == len(rows[0]) and [row[:2] for row in rows] == [[x, name] for x in "01" for name in demo.LOSSES]
    assert rows[3] == ["1", "plain PyTorch", "1.50", "0.25", "1200", "50", "700", "25.0%", "75.0%"]
    for sentence in (
        "in 5 of 6 steps", "at most 0.250 apart in the others", "+50.0, +50.0 points", "200 ms instead of 1200",
        "0.50 s instead of 1.50", "20 MiB instead of 700", "50% of the fused step", "the 7 of 101 ids",
    ):  # fmt: skip
        assert sentence in said
    first, _ = demo_report.sentences(record | {"runs": record["runs"][:1]})
    assert "One curve: the rewards of all 3 steps are the same" in first


def test_the_page_and_the_picture_hold_the_record(record: dict[str, Any], tmp_path: Path, drawn: None) -> None:
    start, end = f"<!-- demo: generated by `{demo_report.COMMAND}` -->", "<!-- end of demo -->"
    page = demo_report.insert(f"before\n{start}\nold\n{end}\nafter", record)
    assert "| 1 | plain PyTorch | 1.50 |" in page and "old" not in page and page.endswith(f"{end}\nafter")
    demo_report.save_picture(record, tmp_path / "a.svg")
    held = json.loads(demo_report.described(record))
    assert held["fused"] == [run["sides"]["fused"]["reward"] for run in record["runs"]] and held["seconds"] == [0.5, 1.5]
    assert (tmp_path / "a.svg").stat().st_size > 5000


def test_docs_show_the_committed_record() -> None:
    record = json.loads(demo_report.FILE.read_text())
    assert demo_report.insert(demo_report.PAGE.read_text(), record) == demo_report.PAGE.read_text()
    for run in record["runs"]:
        for made in run["sides"].values():
            assert made["accuracy"][1] - made["accuracy"][0] >= 0.3
            assert record["size"]["top_k"] <= made["kept"][0] and made["kept"][1] < 2 * record["size"]["top_k"]


@pytest.mark.slow
def test_the_command_runs_each_loss_in_a_process_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--seed", "3", "--out", str(tmp_path)], size=TINY) == 0
    record = json.loads((tmp_path / "demo.json").read_text())
    assert (tmp_path / "demo.svg").exists() and f"{tmp_path}/demo.svg" in capsys.readouterr().out
    (made,) = record["runs"]
    assert made["seed"] == 3 and [len(x["reward"]) for x in made["sides"].values()] == [3, 3]
