"""The demo: both losses make the same steps, only one of them is ours, and the report states the results. The arithmetic."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch

pytest.importorskip("transformers")

from examples import arithmetic, demo, demo_report

TINY = demo.Size(vocab=101, top_k=7, width=32, layers=1, warm_up=2, steps=3, prompts=4, group=4, held_out=4)


# ---- the arithmetic


def terms(prompt):
    """What the answer of a problem adds up, read from the prompt alone."""
    story = re.fullmatch(r"[a-z]{2} had (\d+) (got|lost) (\d+)\?", prompt)
    if story:
        return [int(story[1]), int(story[3]) * (1 if story[2] == "got" else -1)]
    plain = re.fullmatch(r"(\d+)([+-]\d+)=", prompt)
    assert plain, prompt
    return [int(plain[1]), int(plain[2])]


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_right_and_no_held_out_sum_occurs_in_training(seed):
    """In any order or text; slips are in stories alone."""
    parts = arithmetic.problems(4000, seed)
    training, held_out = ({tuple(sorted(terms(row["prompt"]))) for row in rows} for rows in parts)
    for row in [*parts[0], *parts[1]]:
        right = sum(terms(row["prompt"]))
        assert int(row["answer"]) == right >= 0 and int(row["slip"]) == right + row["prompt"].endswith("?")
    assert not training & held_out and len(held_out) >= 100 and len(parts[1]) >= 250 and sum(map(len, parts)) == 4000
    assert parts == arithmetic.problems(4000, seed) != arithmetic.problems(4000, seed + 1)


def test_the_tokenizer_spells_every_character_and_reads_back():
    tok = arithmetic.tokenizer()
    assert tok.decode(tok(arithmetic.CHARS)["input_ids"]) == arithmetic.CHARS and tok.tokenize("12+3=") == list("12+3=")
    assert len(tok) == len(set(arithmetic.CHARS)) and tok.decode([tok.eos_token_id], skip_special_tokens=True) == ""


# ---- the demo


@pytest.fixture(autouse=True)
def easy(monkeypatch):
    """The share of digits is rewarded, which a policy that knows nothing gets some of."""
    monkeypatch.setattr(demo, "exact", lambda prompts, texts, **_: [sum(c.isdigit() for c in text) / 3 for text in texts])


def test_both_losses_make_the_same_steps_over_sets_of_k_ids():
    record = demo.run(0, TINY, demo.side, progress=False)
    fused, plain = (record["sides"][name] for name in demo.LOSSES)
    assert fused["reward"] == plain["reward"] and len({*fused["reward"]}) > 1
    assert fused["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4) and min(plain["grad_norm"]) > 0.01
    assert fused["accuracy"] == plain["accuracy"] and fused["kept"] == plain["kept"] == [TINY.top_k, TINY.top_k]


def started(tmp_path, name="fused"):
    demo.warm_up(0, TINY, tmp_path / "warm.pt", progress=False)
    lines = demo.side(name, tmp_path / "warm.pt", 0, TINY)
    next(lines)
    return lines


def test_equal_rows_of_the_table_are_refused(tmp_path, monkeypatch):
    """Top-k then keeps the whole vocabulary, and nothing is learned."""

    def with_equal_rows(model, *_):
        torch.nn.init.constant_(model.get_input_embeddings().weight, 0.1)
        return 0.0

    monkeypatch.setattr(arithmetic, "accuracy", with_equal_rows)
    with pytest.raises(RuntimeError, match=r"top_k=7 kept between \d+ and \d+ ids.*random row"):
        next(started(tmp_path))


@pytest.mark.parametrize("name", demo.LOSSES)
def test_the_plain_loss_runs_no_kernel(tmp_path, name):
    """Otherwise both sides could be ours: no loss and no log-prob of the package is computed."""
    called = set()
    lines = started(tmp_path, name)
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_name) if event == "call" else None)
    try:
        line = next(lines)
    finally:
        sys.setprofile(None)
    ours = called & {"linear_grpo_loss", "grpo_loss", "linear_logprobs", "token_logprobs"}
    assert ours == ({"linear_grpo_loss"} if name == "fused" else set()) and line["grad_norm"] > 0


def test_docs_show_the_committed_record_and_what_it_says_is_so(tmp_path, drawn):
    """Table, sentences and picture; a record in which the two curves part says so."""
    record = json.loads(demo_report.FILE.read_text())
    assert demo_report.insert(demo_report.PAGE.read_text(), record) == demo_report.PAGE.read_text()
    sides = [side for run in record["runs"] for side in run["sides"].values()]
    for made in sides:
        assert made["accuracy"][1] - made["accuracy"][0] >= 0.3
        assert record["size"]["top_k"] <= made["kept"][0] and made["kept"][1] < 2 * record["size"]["top_k"]
    demo_report.save_picture(record, tmp_path / "a.svg")
    held = json.loads(demo_report.described(record))
    assert held["fused"] == [run["sides"]["fused"]["reward"] for run in record["runs"]]
    assert (tmp_path / "a.svg").stat().st_size > 5000
    assert "the rewards of all 144 steps are the same" in demo_report.text(record)
    sides[-1]["reward"][1] += 0.25
    for sentence in ("in 143 of 144 steps", "at most 0.250 apart in the others", "of 151,936 ids"):
        assert sentence in demo_report.text(record)


@pytest.mark.slow
def test_the_command_runs_each_loss_in_a_process_of_its_own(tmp_path, capsys):
    assert demo.main(["--seed", "3", "--out", str(tmp_path)], size=TINY) == 0
    record = json.loads((tmp_path / "demo.json").read_text())
    assert (tmp_path / "demo.svg").exists() and f"{tmp_path}/demo.svg" in capsys.readouterr().out
    (made,) = record["runs"]
    assert made["seed"] == 3 and [len(x["reward"]) for x in made["sides"].values()] == [3, 3]
