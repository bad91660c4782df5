"""The experiment with exact and estimated KLs: its statistics, its runs and their continuation, its page and pictures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from benchmarks import exact_kl, exact_kl_page
from examples import arithmetic
from support.runs import evens

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "sum": f"+{a} +{b}", "slip": "1"} for a in range(4) for b in range(4)]


@pytest.fixture(scope="module", autouse=True)
def small() -> Any:
    """A tiny untrained model, and few problems."""
    torch.manual_seed(0)
    model = arithmetic.policy(16, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_kl, "warmed_up", lambda seed: (model, ROWS, ROWS[:2]))
        patch.setattr(exact_kl, "pair", lambda seed, steps: (arithmetic.policy(24, 1), model, ROWS, ROWS[:2]))
        patch.setattr(
            exact_kl, "SETTINGS", exact_kl.SETTINGS | {"steps": 2, "prompts_per_step": 4, "group_size": 4, "lr": 3e-2}
        )
        patch.setattr(exact_kl, "EVERY", 1)
        patch.setattr(exact_kl, "exact", evens)
        yield model


def test_moments_are_those_of_the_vectors_without_bias() -> None:
    """The means over all pairs of three vectors are the squared length and the variance of the three."""
    three = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]], dtype=torch.float64)
    found = []
    for i in range(3):
        for j in range(3):
            two = three[[i, j]]
            total, squares = two.sum(0), (two * two).sum()
            mean = two.mean(0)
            length, variance = exact_kl.moments(total, squares, 2)
            assert variance == pytest.approx(float(((two - mean) ** 2).sum()))
            found.append((length, variance))
    center = three.mean(0)
    assert sum(x for x, _ in found) / 9 == pytest.approx(float(center @ center))
    assert sum(x for _, x in found) / 9 == pytest.approx(float(((three - center) ** 2).sum(1).mean()))


def test_a_policy_that_stands_still_has_the_divergences_and_gradients_of_its_arms(small: Any) -> None:
    (found,) = exact_kl.gradients(0, (2,), 8)
    assert found["step"] == 2 and found["exact"]["bias"] == found["exact"]["bias_noise"] == 0
    assert found["exact"]["deviation"] < 0.7 * min(found["k1+"]["deviation"], found["k3"]["deviation"])
    assert found["exact"]["value_sd"] < 0.5 * found["k1+"]["value_sd"]
    for arm in ("k1+", "k3"):  # whose values estimate the same number
        apart = abs(found[arm]["value"] - found["exact"]["value"])
        assert apart < 4 * found[arm]["value_sd"] / math.sqrt(8), arm
    assert found["exact-forward"]["bias"] > 5 * found["exact-forward"]["bias_noise"] > 0


def test_a_run_is_looked_at_before_and_after(small: Any) -> None:
    before = {name: p.clone() for name, p in small.state_dict().items()}
    made = exact_kl.rewarded(0, kl="exact", beta=0.5)
    assert [len(made[name]) for name in ("reward", "held_out_reward", "kl")] == [2, 3, 3]
    assert made["kl"][0] == 0 and made["kl"][2] > made["kl"][1] > 1e-3
    assert all(torch.equal(p, before[name]) for name, p in small.state_dict().items())  # every run starts with the same model


@pytest.mark.parametrize("way", exact_kl.WAYS)
def test_a_student_is_taught_by_its_teacher_and_not_by_the_reward(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = exact_kl.distilled(0, way, 1e-2, steps=20, prompts_per_step=2)
    assert made["steps"] == list(range(21)) and len(made["accuracy"]) == 21
    seen = []
    update = exact_kl.Trainer.update
    monkeypatch.setattr(
        exact_kl.Trainer, "update", lambda t, x, advantages: seen.append(advantages) or update(t, x, advantages)
    )
    exact_kl.distilled(0, way, 1e-2, steps=20, prompts_per_step=2)
    assert len(seen) == 20 and not torch.stack(seen).any()


def test_what_is_there_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def task(seed: int) -> list[float]:
        calls.append(seed)
        return [seed + 0.123456]

    monkeypatch.setattr(exact_kl, "tasks", lambda: iter([({"part": "rewards", "arm": "k3"}, task)]))
    monkeypatch.setattr(exact_kl_page, "FILE", tmp_path / "kept" / "exact_kl.json")
    made = [
        {"seed": seed, "part": "rewards", "arm": "k3", "found": [found]}
        for seed, found in ((0, 0.1235), (1, 1.123), (2, 2.123))
    ]
    exact_kl.measure((1, 0), tmp_path)
    assert exact_kl.known(tmp_path) == made[:2] and calls == [1, 0]
    exact_kl.measure((4,), tmp_path, ("gradients",))
    exact_kl.measure((2, 1), tmp_path)
    assert exact_kl.known(tmp_path) == made and calls == [1, 0, 2]
    # Nor what the result file has, if it has the same settings.
    exact_kl.results.save(exact_kl_page.FILE, {"settings": exact_kl.setup(), "runs": made})
    exact_kl.measure((0, 1, 2), tmp_path / "new")
    assert exact_kl.known(tmp_path / "new") == made and calls == [1, 0, 2]
    exact_kl.results.save(exact_kl_page.FILE, {"settings": exact_kl.setup() | {"batches": 1}, "runs": made})
    assert exact_kl.known(tmp_path / "new") == []


# ---- the page


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    for seed in (0, 1):
        of_arm = {
            arm: {
                "value": 0.2,
                "value_sd": 0.01 * (i + 1),
                "deviation": 0.1 * (i + 1 + seed),
                "bias": 0.05 * i,
                "bias_noise": 0.0,
            }
            for i, arm in enumerate(exact_kl.ARMS)
        }
        runs.append({"seed": seed, "part": "gradients", "found": [{"step": 1} | of_arm, {"step": 9} | of_arm]})
        for setting, arm in ((setting, arm) for setting in exact_kl_page.SHOWN for arm in exact_kl.ARMS):
            end = 0.5 + 0.1 * seed + 0.02 * len(arm)
            found = {"reward": [0.5] * 2, "held_out_reward": [0.4, end - 0.1, end, end + 0.1], "kl": [0.0, 0.1, 0.2, 0.3]}
            runs.append({"seed": seed, "part": "rewards", "setting": setting, "arm": arm, "found": found})
        for way in exact_kl.WAYS:
            for lr in (0.001, 0.003):
                found = {"teacher": 0.9, "steps": [0, 5, 10], "accuracy": [0.3, 0.5, 0.6 + 50 * lr + 0.02 * seed]}
                runs.append({"seed": seed, "part": "distillation", "arm": way, "lr": lr, "found": found})
    machine = {"name": "a machine", "threads": 1, "torch": "2"}
    return {
        "command": exact_kl_page.COMMAND,
        "date": "2026-01-01",
        "machine": machine,
        "settings": {"run": {"steps": 120}},
        "runs": runs,
    }


def test_the_tables_hold_means_and_spreads_over_the_seeds(record: dict[str, Any]) -> None:
    lines = exact_kl_page.block(record).splitlines()
    # Deviations of k3 are 0.4 and 0.5, of the exact forward KL 0.2 and 0.3: 4 and 2.8 times the completions.
    assert "| 9 steps | k3 | 2 | 0.200 ± 20.0 % | 0.45 | 0.15 | 3 x |" in lines
    assert "| 1 step | exact, reverse | 2 | 0.200 ± 5.0 % | 0.15 | 0 |  |" in lines
    assert "| beta=1 | k3 | 2 | 0.590 ± 0.071 | -0.060 ± 0.000 | 0.200 ± 0.000 |" in lines
    assert "| sampled token | 0.003 | 2 | 90.0% ± 0.0% | 30.0% ± 0.0% | 50.0% ± 0.0% | 76.0% ± 1.4% |" in lines


@pytest.mark.parametrize("picture", exact_kl_page.PICTURES)
def test_the_pictures_hold_the_means(record: dict[str, Any], picture: str, tmp_path: Path) -> None:
    shown = exact_kl_page.shown(record, picture)
    if picture == "kl":
        assert shown["deviation"]["k1+"] == [0.35, 0.35] and shown["beta=1"]["k3"] == [0.4, 0.49, 0.59, 0.69]
    else:
        assert shown["accuracy"]["exact"] == [0.3, 0.5, 0.76]  # at the better learning rate
    exact_kl_page.save_picture(record, picture, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 5000 and json.loads(exact_kl_page.described(record, picture)) == shown
