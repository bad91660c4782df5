"""The experiments behind pages of docs/: their statistics by hand, their runs at a tiny size, and what they go on from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from benchmarks import exact_kl, experiments, replay, results, sparse_training
from examples import arithmetic
from support.runs import evens

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "sum": f"+{a} +{b}", "slip": "1"} for a in range(4) for b in range(4)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny untrained model, and few problems."""
    start = (arithmetic.policy(16, 1), ROWS, ROWS[:2])
    monkeypatch.setattr(experiments, "exact", evens)
    monkeypatch.setattr(experiments, "warmed_up", lambda *_: start)
    exact_kl.warmed_up.cache_clear()
    changes = {"steps": 2, "group_size": 4, "lr": 3e-2, "prompts_per_step": 4, "warmup_steps": 0}
    for module in (exact_kl, replay):
        monkeypatch.setattr(module, "SETTINGS", module.SETTINGS | changes)


def test_moments_are_those_of_the_vectors_without_bias() -> None:
    """The means over all pairs of three vectors are the squared length and the variance of the three."""
    three = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]], dtype=torch.float64)
    found = torch.tensor([experiments.moments(three[[i, j]]) for i in range(3) for j in range(3)], dtype=torch.float64)
    mean = three.mean(0)
    torch.testing.assert_close(found.mean(0), torch.stack([mean @ mean, ((three - mean) ** 2).sum(1).mean()]))


def test_noise_is_the_squared_distance_by_the_variance_over_batches() -> None:
    """Of each group of parameters, in order."""
    sizes = {"model.embed_tokens.weight": 2, "model.norm.weight": 1, "lm_head.weight": 4}
    dense, error = torch.randn(5, 7).double(), torch.randn(2, 5, 7).double()
    found = sparse_training.noise_shares(dense, [*(dense + error)], sizes)
    for group, part in (("embedding", slice(2)), ("layers", slice(2, 3)), ("head", slice(3, 7))):
        want = error[:, :, part].square().sum(-1).mean(1) / dense[:, part].var(0).sum()
        assert found[group] == pytest.approx(want.tolist()), group


def test_a_policy_that_stands_still_has_the_divergences_and_gradients_of_its_arms() -> None:
    (found,) = exact_kl.gradients(0, (2,), 8)
    exact = found["exact"]
    assert found["step"] == 2 and exact["bias"] == exact["bias_noise"] == 0
    assert exact["deviation"] < 0.7 * min(found["k1+"]["deviation"], found["k3"]["deviation"])
    assert exact["value_sd"] < 0.5 * found["k1+"]["value_sd"]
    for arm in ("k1+", "k3"):  # whose values estimate the same number
        assert abs(found[arm]["value"] - exact["value"]) < 4 * found[arm]["value_sd"] / math.sqrt(8), arm
    assert found["exact-forward"]["bias"] > 5 * found["exact-forward"]["bias_noise"] > 0


def test_ratios_are_1_over_the_sets_and_below_it_over_the_vocabulary() -> None:
    over_sets, to_sampler, to_own = replay.measure((0,), eval_steps=2)["runs"]
    assert [made["arm"] for made in (over_sets, to_sampler, to_own)] == list(replay.ARMS)
    for exact in (over_sets, to_own):
        assert exact["ratio"] == [1.0, 1.0] and exact["outside"] == [0.0, 0.0]
    assert max(to_sampler["ratio"]) < 0.9 and min(to_sampler["outside"]) > 0.2
    assert over_sets["reward"][0] == to_sampler["reward"][0] == to_own["reward"][0]  # the same first batch


def test_what_is_there_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what the result file has, if it has the same settings."""
    calls: list[int] = []
    task = ({"arm": "k3"}, lambda seed: calls.append(seed) or [seed + 0.123456])
    some: dict[str, Any] = {"tasks": lambda: [task], "tables": list, "seeds": (0,), "settings": {"steps": 2}}
    one, unfinished = experiments.Experiment("some", tmp_path, **some), tmp_path / "runs.json"
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    for seeds in ((1, 0), (2, 1)):
        record = one.runs(seeds, unfinished)
    assert calls == [1, 0, 2] and record == results.load(unfinished)
    assert record["runs"] == [{"seed": i, "arm": "k3", "found": [x]} for i, x in enumerate((0.1235, 1.123, 2.123))]
    for settings, again in (({"steps": 2}, []), ({"steps": 3}, [0])):
        results.save(one.file, record | {"settings": settings})
        calls.clear()
        assert one.runs((0,), tmp_path / f"new-{settings}.json")["runs"][0] == record["runs"][0] and calls == again
