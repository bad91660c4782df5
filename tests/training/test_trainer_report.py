"""The reports of a run: metrics for trackers, samples of completions, the parts of its time, and a summary."""

from __future__ import annotations

import json
import math
import statistics
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from grpo_kernels.training import report, trackers
from grpo_kernels.training.jsonl import read_metrics
from grpo_kernels.training.output import OutputFolder
from grpo_kernels.training.sampling import Completions
from grpo_kernels.training.shown import shown
from grpo_kernels.training.summary import summary
from support.runs import evens, lines, parameters, short, trainer

# ---- metrics


class Recorder:
    def __init__(self, fail_at: int = -1) -> None:
        self.fail_at, self.found, self.closed = fail_at, list[Any](), 0

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        if step == self.fail_at:
            raise ConnectionError("no route")
        self.found.append({"step": step, **metrics})

    def close(self) -> None:
        self.closed += 1


def test_a_tracker_gets_what_the_file_gets_and_one_that_fails_ends_no_run(tok: Any, tmp_path: Path, capsys: Any) -> None:
    good, bad = Recorder(), Recorder(fail_at=1)
    settings: dict[str, Any] = {"steps": 3, "eval_steps": 2, "eval_prompts": 4}
    t = trainer(tok, tmp_path / "a", trackers=[bad, good], **settings)
    assert t.train() and good.closed == 1
    assert good.found == read_metrics(tmp_path / "a" / "metrics.jsonl") and len(good.found) == 4
    assert [line["step"] for line in bad.found] == [0] and bad.closed == 0
    assert capsys.readouterr().err.count("Recorder gets no more metrics: ConnectionError: no route") == 1
    plain = trainer(tok, tmp_path / "b", **settings)
    assert plain.train() and lines(tmp_path / "b") == lines(tmp_path / "a")
    assert all(torch.equal(p, parameters(plain)[name]) for name, p in parameters(t).items())


def test_the_names_of_metrics_are_those_of_the_field(tok: Any, tmp_path: Path) -> None:
    t = trainer(tok, tmp_path, beta=0.1, num_updates=3, lr=0.05, rewards=[evens, short, evens])
    metrics = t.train_step()
    assert {
        "reward", "reward_std", "reward/evens", "reward/short", "reward/evens#2", "completion_length", "loss", "kl", "entropy",
        "clip_ratio", "grad_norm", "lr", "tokens_per_second", "peak_memory_gb",
    } <= set(metrics)  # fmt: skip
    assert metrics["clip_ratio"] == metrics["clip_low"] + metrics["clip_high"] > 0
    assert metrics["reward/evens"] == metrics["reward/evens#2"] > 0 > metrics["reward/short"]
    assert metrics["reward"] == pytest.approx(2 * metrics["reward/evens"] + metrics["reward/short"])
    assert 0.05 < metrics["peak_memory_gb"] < 1000  # of this process: torch alone is more, and it is no machine's whole memory


def test_dashboards_get_numbers_in_groups() -> None:
    line = {"reward": 1, "reward/exact": 0.5, "accuracy": 0.25, "accuracy_counts": "x", "eval_reward": 2.0, "seconds": 3.0,
            "eval_seconds": 4.0, "sampling_seconds": 5.0, "tokens_per_second": 6.0}  # fmt: skip
    assert trackers.named(line) == {
        "train/reward": 1.0, "train/reward/exact": 0.5, "eval/accuracy": 0.25, "eval/reward": 2.0, "time/step": 3.0,
        "time/eval": 4.0, "time/sampling": 5.0, "train/tokens_per_second": 6.0,
    }  # fmt: skip


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_tracker_that_is_not_installed_is_refused_at_the_start(
    tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"log_to='{name}', but {name} is not installed: pip install {name}"):
        trainer(tok, tmp_path / "run", log_to=["jsonl", name])
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_the_curves_of_the_run(tok: Any, tmp_path: Path) -> None:
    """Read back with its own reader; after a resumed run too, whose steps come once."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options: dict[str, Any] = {"log_to": ["tensorboard"], "eval_steps": 2, "eval_prompts": 4, "checkpoint_steps": 2}
    assert trainer(tok, tmp_path, steps=2, **options).train()
    assert trainer(tok, tmp_path, steps=4, resume=True, **options).train()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert {"train/reward", "train/clip_ratio", "eval/accuracy", "time/sampling"} <= set(found.Tags()["scalars"])
    written = read_metrics(tmp_path / "metrics.jsonl")
    for tag, name in (("train/reward", "reward"), ("train/entropy", "entropy"), ("eval/accuracy", "accuracy")):
        points = [(point.step, point.value) for point in found.Scalars(tag)]
        assert points == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in written if name in line]


class StandIn(types.ModuleType):
    """A tracker's module, which writes down how it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: self.calls.append((name, args, options))


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_other_trackers_are_called_as_they_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = StandIn(name)
    monkeypatch.setitem(sys.modules, name, module)
    tracker = trackers.TRACKERS[name](tmp_path / "my-run", {"lr": 1e-6}, 0)
    tracker.log(3, {"reward": 0.5})
    tracker.close()
    if name == "mlflow":
        assert module.calls == [
            ("set_experiment", ("grpo_kernels",), {}), ("start_run", (), {"run_name": "my-run"}), ("log_params", ({"lr": 1e-6},), {}),
            ("log_metrics", ({"train/reward": 0.5},), {"step": 3}), ("end_run", (), {}),
        ]  # fmt: skip
    else:
        assert module.calls == [
            ("init", (), {"project": "grpo_kernels", "name": "my-run", "config": {"lr": 1e-6}}),
            ("log", ({"train/reward": 0.5},), {"step": 3}), ("finish", (), {}),
        ]  # fmt: skip


# ---- samples


def samples(out: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (out / "samples.jsonl").read_text().splitlines()]


def test_samples_are_the_first_completions_with_reward_and_advantage(tok: Any, tmp_path: Path, capsys: Any) -> None:
    seen: list[Any] = []

    def watched(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        seen.append((prompts, completions, evens(prompts, completions)))
        return seen[-1][2]

    t = trainer(tok, tmp_path, rewards=[watched], steps=3, sample_every=2, sample_count=6, progress=True)
    assert t.train()
    found, told = samples(tmp_path), capsys.readouterr().err
    assert [s["step"] for s in found] == [0] * 6 + [2] * 6
    for at, step in ((0, 0), (6, 2)):
        prompts, completions, rewards = seen[step]
        for i, sample in enumerate(found[at : at + 6]):
            group = rewards[i // 4 * 4 : i // 4 * 4 + 4]
            advantage = (rewards[i] - statistics.mean(group)) / (statistics.stdev(group) + 1e-4)
            assert (sample["prompt"], sample["completion"], sample["reward"]) == (prompts[i], completions[i], rewards[i])
            assert sample["rewards"] == {"watched": rewards[i]} and 1 <= sample["tokens"] <= 4
            assert sample["advantage"] == pytest.approx(advantage, abs=1e-5)
            assert (
                f"step {step}: reward {rewards[i]:.3g}, advantage {sample['advantage']:+.3g}, {sample['tokens']} tokens\n"
                in told
            )
            assert f"  prompt     {prompts[i]!r}\n  completion {completions[i]!r}\n" in told
    assert any(s["advantage"] != 0 for s in found)


def test_the_advantage_of_a_sample_is_the_mean_over_its_tokens(tok: Any, tmp_path: Path) -> None:
    def steps(prompts: list[str], completions: list[str], *, completion_ids: list[list[int]], **_: Any) -> list[list[Any]]:
        return [[float(i % 3) for i in ids] for ids in completion_ids]

    t = trainer(tok, tmp_path, rewards=[steps], sample_count=12, preset="dapo")
    rows = t.train_rows[:3]
    completions = t.sample(rows, 4, 1.0)
    scores = t.score(rows, completions, 4)
    advantages = t.credit.advantages(rows, completions, scores)
    t.samples.take(0, rows, scores, advantages)
    means = [(advantages[i] * completions.mask[i]).sum() / completions.mask[i].sum() for i in range(12)]
    assert [s["advantage"] for s in t.samples.taken] == pytest.approx([float(x) for x in means], abs=1e-6)
    assert len({s["advantage"] for s in t.samples.taken}) > 3
    t.samples.take(1, rows, scores, advantages)
    assert t.samples.taken == []


def test_samples_of_a_resumed_run_come_once(tok: Any, tmp_path: Path) -> None:
    for out, stops in (("straight", (4,)), ("resumed", (2, 4))):
        for steps in stops:
            t = trainer(tok, tmp_path / out, steps=steps, sample_every=1, checkpoint_steps=1, resume=steps != stops[0])
            assert t.train()
            if steps == 2:  # a line of a step that comes again
                with open(tmp_path / out / "samples.jsonl", "a") as file:
                    file.write('{"step": 2, "prompt": "of a step that was lost"}\n')
    assert samples(tmp_path / "resumed") == samples(tmp_path / "straight")
    assert [s["step"] for s in samples(tmp_path / "resumed")] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_samples_ask_nothing_more_of_the_device(tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled ids are read once a step, by the reward functions; samples take the texts from there, and change no step."""
    reads: list[int] = []
    tokens = Completions.tokens.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Completions, "tokens", property(lambda self: reads.append(1) or tokens(self)))
    found = []
    for every in (0, 1):
        t = trainer(tok, tmp_path / str(every), sample_every=every)
        t.train_step()
        found.append((parameters(t), len(reads)))
        reads.clear()
    assert found[0][1] == found[1][1] == 1
    assert all(torch.equal(p, found[1][0][name]) for name, p in found[0][0].items())


def test_texts_are_shown_on_a_line_without_their_middle() -> None:
    assert shown("a\nb\x1b[31m\u202e\\boxed") == r"'a\nb\x1b[31m\u202e\\boxed'"
    assert shown("x" * 240) == repr("x" * 240)
    long = "\n" + "a" * 119 + "b" * 1000 + "c" * 119 + "\t"
    assert shown(long) == "'\\n" + "a" * 119 + "' ... 1000 characters ... '" + "c" * 119 + "\\t'"


# ---- time, and what a run came to


def test_the_parts_of_a_step_are_measured_where_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 12.5, 15.5, 16.5, 19.5, 20.0, 21.0])
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(clock))
    watch = report.Stopwatch()
    for part in ("sampling", "reward", "gradient", "optimizer", "gradient", "optimizer"):
        watch.lap(part)
    found = watch.metrics(44, torch.device("cpu"))
    del found["peak_memory_gb"]
    assert found == {
        "seconds": 11.0, "sampling_seconds": 2.0, "reward_seconds": 0.5, "gradient_seconds": 6.0, "optimizer_seconds": 1.5,
        "tokens_per_second": 4.0,
    }  # fmt: skip


def test_the_parts_of_a_real_step_add_up(tok: Any, tmp_path: Path) -> None:
    metrics = trainer(tok, tmp_path, num_updates=2, beta=0.1).train_step()
    parts = [metrics[f"{part}_seconds"] for part in ("sampling", "reward", "gradient", "optimizer")]
    assert min(parts) > 0 and math.fsum(parts) <= metrics["seconds"] * (1 + 1e-9)


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    """Figures by hand: 20 steps of 2 s with 30 tokens a second, rewards 0.0, 0.1, ... 1.5, then 0.2."""
    (tmp_path / "samples.jsonl").write_text("")
    lines = [
        {"step": i, "loss": 0.1, "reward": i / 10 if i < 16 else 0.2, "seconds": 2.0, "sampling_seconds": 1.0, "reward_seconds": 0.2,
         "gradient_seconds": 0.5, "optimizer_seconds": 0.2, "tokens_per_second": 30.0, "peak_memory_gb": 1.0 + (i == 7)}
        for i in range(20)
    ] + [{"step": 20}]  # fmt: skip
    for at, accuracy in ((0, 0.25), (10, 0.75), (20, 0.5)):
        lines[at] |= {
            "accuracy": accuracy,
            "accuracy_counts": "exact >= 1, 4 prompts",
            "eval_reward": 2 * accuracy,
            "eval_seconds": 1.5,
        }
    assert summary(lines, OutputFolder(tmp_path)).splitlines() == [
        "20 steps",
        "held-out accuracy   0.250 -> 0.500 (exact >= 1, 4 prompts)",
        "held-out reward     0.5 -> 1",
        "best evaluation     0.750 after 10 steps",
        "reward              0.05 -> 0.2 (means of 2), best 1.5 in step 15",
        "time of the steps   40.0 s: sampling 50%, rewards 10%, loss and gradient 25%, optimizer 10%, the rest 5%",
        "evaluations         4.5 s",
        "speed               30 sampled tokens a second, of whole steps",
        "peak memory         2.00 GB",
        f"files               {tmp_path}: samples.jsonl",
    ]


def test_a_run_without_steps_or_evaluations_has_a_summary_too(tok: Any, tmp_path: Path) -> None:
    assert summary([], OutputFolder(tmp_path)).splitlines()[0] == "0 steps"
    assert trainer(tok, tmp_path, steps=1).train()
    found = (tmp_path / "summary.txt").read_text()
    assert "accuracy" not in found and found.splitlines()[0] == "1 step"
    assert found.splitlines()[-1].endswith("metrics.jsonl, samples.jsonl, curves.png, config.yaml, checkpoints, model")
