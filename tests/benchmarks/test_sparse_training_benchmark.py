"""The experiment with sparse gradients in training: its problems, its statistics, its runs and its page."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from benchmarks import sparse_training, sparse_training_page, spelled
from examples import arithmetic
from grpo_kernels.vocabulary import selection
from grpo_kernels.vocabulary.backends import eager
from grpo_kernels.vocabulary.rows import RowTransform, partials_of
from support.runs import evens

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "sum": f"+{a} +{b}", "slip": "1"} for a in range(4) for b in range(4)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny untrained model, and few problems."""
    torch.manual_seed(0)
    model = spelled.policy(16, 1)
    monkeypatch.setattr(spelled, "warmed_up", lambda seed, spellings, folder: (model, ROWS, ROWS[:2]))
    settings = {"steps": 2, "prompts_per_step": 2, "group_size": 4, "lr": 3e-2, "warmup_steps": 0}
    monkeypatch.setattr(sparse_training, "SETTINGS", sparse_training.SETTINGS | settings)
    monkeypatch.setattr(sparse_training, "exact", evens)


def test_a_character_is_read_from_all_its_spellings_and_a_teacher_writes_some() -> None:
    tok, many = spelled.tokenizer(), len(arithmetic.CHARS)
    assert tok("12+3=")["input_ids"] == [arithmetic.CHARS.index(x) for x in "12+3="]
    ids = [i + many * k for k in (0, 1, 57) for i in (arithmetic.CHARS.index("4"), arithmetic.CHARS.index("-"))]
    assert tok.decode(ids) == "4-4-4-" and len(tok) == spelled.VOCABULARY > 57 * many
    teacher = spelled.Teacher(3, 0)
    written = [tuple(teacher("7")["input_ids"]) for _ in range(60)]
    assert set(written) == {(arithmetic.CHARS.index("7") + many * k,) for k in range(3)}
    assert teacher("al had 7")["input_ids"] == tok("al had 7")["input_ids"]  # prompts have one spelling


@pytest.mark.parametrize("step", (1 / 64, 1 / 4))
def test_the_number_of_columns_is_the_mean_of_what_is_drawn(step: float) -> None:
    n, vocab = 2048, 60
    logits = torch.randn(1, vocab).mul(2).expand(n, vocab).contiguous()
    targets = torch.arange(n) % 8
    transform = RowTransform(1.0, 0.0, 1.0)
    stats = eager.stats(logits[None], targets, None, transform, partials_of(()))
    drawn = eager.select(logits, targets, stats, transform, step, selection.starts(3, torch.arange(n)))
    want = sparse_training.expected_columns(logits.softmax(-1), targets, step)
    assert float((drawn.ids >= 0).sum(1).float().mean()) == pytest.approx(float(want.mean()), rel=0.01)


def test_noise_is_the_squared_distance_by_the_variance_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known gradients: each batch has its own, and each step of the grid adds its own error to it."""
    g = torch.Generator().manual_seed(0)
    batches, steps = 5, sparse_training.STEPS
    dense = torch.randn(2, batches, 7, generator=g, dtype=torch.float64)
    error = torch.randn(2, batches, len(steps), 7, generator=g, dtype=torch.float64)
    names = [("model.embed_tokens.weight", 2), ("model.norm.weight", 1), ("lm_head.weight", 4)]
    made = SimpleNamespace(
        config=SimpleNamespace(objective="policy", prompts_per_step=1, group_size=1, seed=0), train_rows=ROWS, step=0,
        sample=lambda *_, **__: None, score=lambda *_: None, losses=SimpleNamespace(sparse_step=0.0), objective="",
        credit=SimpleNamespace(advantages=lambda *_: torch.ones(1)),
        model=SimpleNamespace(named_parameters=lambda: [(name, torch.zeros(size)) for name, size in names]),
    )  # fmt: skip

    def update(_: Any, advantages: torch.Tensor) -> None:
        term = ("policy", "entropy").index(made.objective)
        assert bool(advantages.any()) == (term == 0)
        made.gradient = dense[term, made.step].clone()
        if made.losses.sparse_step:
            made.gradient += error[term, made.step, steps.index(made.losses.sparse_step)]

    made.update = update
    monkeypatch.setattr(sparse_training, "replace", lambda *_, **__: SimpleNamespace(objective="entropy"))
    monkeypatch.setattr(sparse_training, "rows", lambda *_: {"nats": 1.0})
    found = sparse_training.spread(made, batches)
    assert found["nats"] == 1.0
    for term, at in (("policy", 0), ("entropy", 1)):
        for group, part in (("embedding", slice(2)), ("layers", slice(2, 3)), ("head", slice(3, 7))):
            variance = dense[at, :, part].var(0).sum()
            want = error[at, :, :, part].square().sum(-1).mean(0) / variance
            assert found[term][group] == pytest.approx(want.tolist()), (term, group)


def test_a_coarser_grid_is_noisier_at_a_policy_that_stands_still(small: None) -> None:
    (found,) = sparse_training.noise(0, 8, (1,), 3)
    assert (
        found["after"] == 1 and found["nats"] > 5 and found["columns"][2] < 2.1 < 10 < found["columns"][1] < found["columns"][0]
    )
    for term in ("policy", "entropy"):
        for group, (fine, coarse, one) in found[term].items():
            assert 0 < 2 * fine < coarse < one / 2, (term, group)


def test_runs_draw_columns_and_begin_alike(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, sparse = (sparse_training.trained(0, 8, step) for step in (0.0, 1.0))
    assert len(dense["reward"]) == 2 and dense["reward"][0] == sparse["reward"][0] and dense != sparse


def test_runs_of_trl_draw_columns_and_begin_alike(small: None) -> None:
    pytest.importorskip("trl", minversion="1.16.0")
    dense, sparse = (sparse_training.trained_by_trl(0, 8, step, 2) for step in (0.0, 1.0))
    assert len(dense["reward"]) == 2 and dense["reward"][0] == sparse["reward"][0] and dense != sparse


def test_every_result_has_a_name_of_its_own() -> None:
    names = [sparse_training.experiments.key({"seed": 0} | name) for name, _ in sparse_training.tasks()]
    assert len(set(names)) == len(names) and not any("/" in name for name in names)


# ---- the page


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    steps = [0.0, *sparse_training.STEPS]
    for seed in (0, 1):
        for part, spellings in (("trainer", 1), ("trainer", 8), ("trl", 1)):
            for i, step in enumerate(steps):
                reward = [0.1] * 4 + [0.5 + 0.1 * seed - 0.02 * i * (1 + seed)] * sparse_training_page.LAST
                found = {"reward": reward, "accuracy": 0.6 + 0.1 * seed}
                runs.append({"seed": seed, "part": part, "spellings": spellings, "step": step, "found": found})
        noise = {group: [0.0005, 0.012, 0.3 + 0.2 * seed] for group in sparse_training.GROUPS}
        stop = {"nats": 2.0 + seed, "columns": [30.0, 8.0 + seed, 1.5], "policy": noise, "entropy": noise}
        runs.append({"seed": seed, "part": "noise", "spellings": 8, "found": [{"after": 1} | stop, {"after": 9} | stop]})
    return {
        "command": sparse_training_page.COMMAND,
        "date": "2026-01-01",
        "machine": {"name": "a machine", "threads": 1, "torch": "2"},
        "settings": {"steps": list(sparse_training.STEPS)},
        "runs": runs,
    }


def test_the_tables_hold_means_over_the_seeds(record: dict[str, Any]) -> None:
    lines = sparse_training_page.block(record).splitlines()
    assert "| 8 spellings, after 9 steps | 2 | 2.50 | 30.0 | 8.5 | 1.5 |" in lines
    assert "| 8 spellings, after 1 step | head | 0.05 % | 1.2 % | 40 % | 0.05 % | 1.2 % | 40 % |" in lines
    assert "| reference | 1 spelling | dense | 2 | 0.550 ± 0.071 |  | 65.0% |" in lines
    assert "| TRL | 1 spelling | step 1/16 | 2 | 0.490 ± 0.042 | -0.060 ± 0.028 | 65.0% |" in lines


def test_the_picture_holds_the_means(record: dict[str, Any], tmp_path: Path) -> None:
    shown = sparse_training_page.shown(record)
    assert shown["noise"]["8 spellings, after 1 step"] == [0.0005, 0.012, 0.4]
    assert (
        shown["trl, 1 spelling"]["step 1"][-1] == pytest.approx(0.55 - 0.09)
        and shown["trainer, 8 spellings"]["dense"][0] == 0.1
    )
    sparse_training_page.save_picture(record, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 5000 and json.loads(sparse_training_page.described(record)) == shown
