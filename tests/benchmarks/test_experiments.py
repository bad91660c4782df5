"""The experiments behind pages of docs/: their statistics by hand, their runs at a tiny size, and what they go on from."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("matplotlib")

from benchmarks import exact_kl, experiments, replay, results, sparse_training
from examples import arithmetic
from support.runs import evens

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "sum": f"+{a} +{b}", "slip": "1"} for a in range(4) for b in range(4)]
SETTINGS = {"steps": 2, "group_size": 4, "lr": 3e-2}


@pytest.fixture(scope="module", autouse=True)
def small() -> Any:
    """Tiny untrained models, and few problems."""
    torch.manual_seed(0)
    model, spells = arithmetic.policy(16, 1), sparse_training.policy(16, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_kl, "warmed_up", lambda seed: (model, ROWS, ROWS[:2]))
        patch.setattr(exact_kl, "pair", lambda seed, steps: (arithmetic.policy(24, 1), model, ROWS, ROWS[:2]))
        patch.setattr(sparse_training, "warmed_up", lambda seed, spellings: (spells, ROWS, ROWS[:2]))
        patch.setattr(exact_kl, "EVERY", 1)
        for module, prompts in ((exact_kl, 4), (sparse_training, 2)):
            patch.setattr(module, "SETTINGS", module.SETTINGS | SETTINGS | {"prompts_per_step": prompts, "warmup_steps": 0})
            patch.setattr(module, "exact", evens)
        yield model


# ---- exact and estimated KLs


def test_moments_are_those_of_the_vectors_without_bias() -> None:
    """The means over all pairs of three vectors are the squared length and the variance of the three."""
    three = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]], dtype=torch.float64)
    pairs = [three[[i, j]] for i in range(3) for j in range(3)]
    found = torch.tensor([experiments.moments(two) for two in pairs], dtype=torch.float64)
    mean = three.mean(0)
    expected = torch.stack([mean @ mean, ((three - mean) ** 2).sum(1).mean()])
    torch.testing.assert_close(found.mean(0), expected)
    torch.testing.assert_close(found[1, 1], ((three[:2] - three[:2].mean(0)) ** 2).sum())


def test_a_policy_that_stands_still_has_the_divergences_and_gradients_of_its_arms() -> None:
    (found,) = exact_kl.gradients(0, (2,), 8)
    exact = found["exact"]
    assert found["step"] == 2 and exact["bias"] == exact["bias_noise"] == 0
    assert exact["deviation"] < 0.7 * min(found["k1+"]["deviation"], found["k3"]["deviation"])
    assert exact["value_sd"] < 0.5 * found["k1+"]["value_sd"]
    for arm in ("k1+", "k3"):  # whose values estimate the same number
        assert abs(found[arm]["value"] - exact["value"]) < 4 * found[arm]["value_sd"] / math.sqrt(8), arm
    assert found["exact-forward"]["bias"] > 5 * found["exact-forward"]["bias_noise"] > 0


def test_what_is_there_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what the result file has, if it has the same settings."""
    calls: list[int] = []
    name = {"part": "rewards", "arm": "k3"}
    task = (name, lambda seed: calls.append(seed) or [seed + 0.123456])
    one = experiments.Runs("some", tmp_path, tables=lambda record: (), tasks=lambda: iter([task]), settings={"steps": 2})
    monkeypatch.setattr(experiments, "RESULTS", tmp_path / "kept")
    made = [{"seed": seed, **name, "found": [found]} for seed, found in ((0, 0.1235), (1, 1.123), (2, 2.123))]
    for seeds, *parts in (((1, 0),), ((4,), ("gradients",)), ((2, 1),)):
        one.run(seeds, *parts, folder=tmp_path / "runs")
    assert one.known(tmp_path / "runs") == made and calls == [1, 0, 2]
    for changes, known in (({}, made), ({"steps": 3}, [])):
        results.save(one.file, {"settings": one.settings | changes, "runs": made})
        assert one.known(tmp_path / "new") == known
    one.run((0,), folder=tmp_path / "new")
    assert calls == [1, 0, 2, 0]


# ---- sets and replay


def test_ratios_are_1_over_the_sets_and_below_it_over_the_vocabulary() -> None:
    over_sets, to_sampler, to_own = replay.measure((0,), 2, steps=2, eval_steps=2, prompts_per_step=4)["runs"]
    assert [made["arm"] for made in (over_sets, to_sampler, to_own)] == list(replay.ARMS)
    for exact in (over_sets, to_own):
        assert exact["ratio"] == [1.0, 1.0] and exact["outside"] == [0.0, 0.0]
    assert max(to_sampler["ratio"]) < 0.9 and min(to_sampler["outside"]) > 0.2
    assert over_sets["reward"][0] == to_sampler["reward"][0] == to_own["reward"][0]  # the same first batch
    assert over_sets["entropy"][0] == to_own["entropy"][0]


# ---- sparse gradients


def test_noise_is_the_squared_distance_by_the_variance_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known gradients: each batch has its own, and each step of the grid adds its own error to it."""
    steps, batches = sparse_training.STEPS, 5
    dense, error = torch.randn(2, batches, 7).double(), torch.randn(2, batches, len(steps), 7).double()
    names = {"model.embed_tokens.weight": 2, "model.norm.weight": 1, "lm_head.weight": 4}
    made = SimpleNamespace(
        config=SimpleNamespace(objective="policy", prompts_per_step=1, group_size=1, seed=0), train_rows=ROWS, step=0,
        rollouts=SimpleNamespace(sample=lambda *_: None, score=lambda *_: None), losses=SimpleNamespace(config=None), objective="",
        advantages=lambda *_: torch.ones(1),
        model=SimpleNamespace(named_parameters=lambda: [(name, torch.zeros(size)) for name, size in names.items()]),
    )  # fmt: skip

    def update(_: Any, advantages: torch.Tensor) -> None:
        term, step = ("policy", "entropy").index(made.objective), made.losses.config.sparse_step
        assert bool(advantages.any()) == (term == 0)
        made.gradient = dense[term, made.step] + (error[term, made.step, steps.index(step)] if step else 0)

    made.update = update
    monkeypatch.setattr(sparse_training, "replace", lambda _, **changes: SimpleNamespace(objective="entropy", **changes))
    monkeypatch.setattr(sparse_training, "rows", lambda *_: {"nats": 1.0})
    found = sparse_training.spread(made, batches)
    for at, term in enumerate(("policy", "entropy")):
        for group, part in (("embedding", slice(2)), ("layers", slice(2, 3)), ("head", slice(3, 7))):
            want = error[at, :, :, part].square().sum(-1).mean(0) / dense[at, :, part].var(0).sum()
            assert found[term][group] == pytest.approx(want.tolist()), (term, group)
