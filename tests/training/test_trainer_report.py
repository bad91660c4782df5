"""The reports of a run: metrics, trackers, samples of completions, the parts of its time, and a summary."""

from __future__ import annotations

import importlib.machinery
import json
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from support.advantage_oracle import group_advantages, process_advantages
from support.plain_trainer import Watch
from support.runs import lines, read, tiny, trainer, varied

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
        if self.fail_at == -2:
            raise ConnectionError("no route")


def test_a_tracker_gets_what_the_file_gets_and_one_that_fails_ends_no_run(tok: Any, tmp_path: Path, capsys: Any) -> None:
    good, bad, late = Recorder(), Recorder(fail_at=1), Recorder(fail_at=-2)
    settings: dict[str, Any] = {"steps": 3, "eval_steps": 2, "eval_prompts": 4}
    assert trainer(tok, tmp_path / "a", trackers=[bad, late, good], **settings).train() and good.closed == 1
    assert good.found == late.found == read(tmp_path / "a" / "metrics.jsonl") and len(good.found) == 4
    assert [line["step"] for line in bad.found] == [0] and bad.closed == 0
    told = capsys.readouterr().err
    assert (
        told.count("Recorder gets no more metrics: ConnectionError: no route")
        == told.count("Recorder is not closed: Conn")
        == 1
    )
    assert trainer(tok, tmp_path / "b", **settings).train() and lines(tmp_path / "b") == lines(tmp_path / "a")


def test_the_names_of_metrics_are_those_of_the_field(tok: Any, tmp_path: Path) -> None:
    def short(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [-float(len(c)) for c in completions]

    watch = Watch(None)
    rewards = [watch.told(varied), short, varied]
    metrics = trainer(tok, tmp_path, beta=0.1, num_updates=3, lr=0.05, rewards=rewards, reward_weights=[1, 2, 3]).train_step()
    (call,) = watch.calls
    assert metrics["clip_ratio"] == metrics["clip_low"] + metrics["clip_high"] > 0
    assert metrics["reward/varied"] == metrics["reward/varied#2"] == pytest.approx(statistics.mean(call.rewards))
    totals = [4 * r - 2 * len(c) for r, c in zip(call.rewards, call.completions, strict=True)]
    assert metrics["reward"] == pytest.approx(statistics.mean(totals)) and metrics["reward_std"] == pytest.approx(
        statistics.pstdev(totals)
    )
    assert metrics["reward/short"] == -statistics.mean(map(len, call.completions))
    assert metrics["completion_length"] == statistics.mean(map(len, call.ids))
    assert {"loss", "kl", "entropy", "grad_norm", "lr", "tokens_per_second"} <= metrics.keys()
    assert 0.05 < metrics["peak_memory_gb"] < 1000  # of this process: torch alone is more, and it is no machine's whole memory


def test_accuracy_says_what_it_counts(tok: Any, tmp_path: Path) -> None:
    """The share of held-out prompts with a first reward of at least 1, and beside it the mean of all rewards."""

    def three(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [3.0 if p.startswith("5") else 1.0 if p == "4+0=" else 0.5 for p in prompts]

    assert trainer(tok, tmp_path, rewards=[three], eval_steps=2, eval_prompts=8, steps=1).train()
    evaluations = [line for line in lines(tmp_path) if "accuracy" in line]
    assert len(evaluations) == 2 and [line["step"] for line in evaluations] == [0, 1]
    for line in evaluations:
        assert (line["accuracy"], line["accuracy_counts"]) == (5 / 8, "three >= 1, 8 prompts")
        assert line["eval_reward"] == pytest.approx((4 * 3.0 + 1.0 + 3 * 0.5) / 8)


def test_metrics_are_json_whatever_is_in_them(tok: Any, tmp_path: Path, drawn: None) -> None:
    """A gradient that is not finite: its norm is null, and the picture is drawn from the rest."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    model = tiny(tok)
    model.lm_head.weight.register_hook(lambda g: g * float("nan"))
    assert trainer(tok, tmp_path, model=model, steps=2).train()
    found = [json.loads(text, parse_constant=refuse) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["grad_norm"] for line in found] == [None, None] and found[0]["skipped"] == 1.0
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_a_picture_that_fails_hides_no_error_of_a_reward(
    tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def failing(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        return [0.0] * len(prompts) if len(calls) == 1 else 1 / 0  # type: ignore[return-value]

    calls: list[int] = []
    monkeypatch.setattr("matplotlib.figure.Figure", lambda **_: [][0])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        trainer(tok, tmp_path / "a", rewards=[failing]).train()
    assert "curves.png is not drawn: IndexError" in capsys.readouterr().err
    assert trainer(tok, tmp_path / "b").train()


# ---- trackers by name


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
    written = read(tmp_path / "metrics.jsonl")
    for tag, name in (("train/reward", "reward"), ("train/entropy", "entropy"), ("eval/accuracy", "accuracy")):
        points = [(point.step, point.value) for point in found.Scalars(tag)]
        assert points == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in written if name in line]


class StandIn(types.ModuleType):
    """A tracker's module, which writes down how it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[Any] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: self.calls.append((name, args, options))


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_other_trackers_are_called_as_they_document(
    tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the numbers alone, in groups."""
    module = StandIn(name)
    monkeypatch.setitem(sys.modules, name, module)
    t = trainer(tok, tmp_path / "my-run", log_to=[name], steps=1, eval_steps=1, eval_prompts=2)
    assert t.train()
    names = {"accuracy": "eval/accuracy", "eval_reward": "eval/reward", "eval_seconds": "time/eval", "seconds": "time/step"}
    names |= {f"{part}_seconds": f"time/{part}" for part in ("sampling", "reward", "gradient", "optimizer")}
    calls: list[Any] = [("init", (), {"project": "grpo_kernels", "name": "my-run", "config": vars(t.config)})]
    log, end = "log", "finish"
    if name == "mlflow":
        calls = [
            ("set_experiment", ("grpo_kernels",), {}),
            ("start_run", (), {"run_name": "my-run"}),
            ("log_params", (vars(t.config),), {}),
        ]
        log, end = "log_metrics", "end_run"
    for line in read(tmp_path / "my-run" / "metrics.jsonl"):
        step = line.pop("step")
        calls.append(
            (log, ({names.get(k, f"train/{k}"): v for k, v in line.items() if k != "accuracy_counts"},), {"step": step})
        )
    assert module.calls == [*calls, (end, (), {})]


# ---- samples


def test_samples_are_the_first_completions_with_rewards_and_advantage(tok: Any, tmp_path: Path, capsys: Any) -> None:
    """An advantage of tokens is told by its mean: of rewards at the first and at the last token."""

    def ends(prompts: list[str], completions: list[str], *, completion_ids: list[list[int]], **_: Any) -> list[list[Any]]:
        return [[1.0, *[None] * (len(ids) - 2), 3.0][: len(ids)] for ids in completion_ids]

    watch = Watch(None)
    rewards, changes = (
        [watch.told(varied), watch.told(ends)],
        {"steps": 3, "sample_every": 2, "sample_count": 6, "progress": True},
    )
    assert trainer(tok, tmp_path, rewards=rewards, **changes).train()
    found, told = read(tmp_path / "samples.jsonl"), capsys.readouterr().err
    assert [s["step"] for s in found] == [0] * 6 + [2] * 6
    for sample, i in zip(found, [*range(6)] * 2, strict=True):
        first, second = watch.calls[2 * sample["step"] : 2 * sample["step"] + 2]
        groups = [k // 4 for k in range(12)]
        steps = process_advantages(second.rewards, groups)
        advantage = group_advantages(first.rewards, groups)[i] + statistics.mean(steps[i])
        own, other = first.rewards[i], sum(r for r in second.rewards[i] if r is not None)
        assert sample == {
            "step": sample["step"], "prompt": first.prompts[i], "completion": first.completions[i], "tokens": len(first.ids[i]),
            "reward": own + other, "rewards": {"varied": own, "ends": other}, "advantage": pytest.approx(advantage, abs=1e-5),
        }  # fmt: skip
        numbers = f"reward {own + other:.3g} (varied {own:.3g}, ends {other:.3g}), advantage {sample['advantage']:+.3g}"
        texts = f"  prompt     {first.prompts[i]!r}\n  completion {first.completions[i]!r}\n"
        assert f"step {sample['step']}: {numbers}, {sample['tokens']} tokens\n{texts}" in told


def test_samples_of_a_resumed_run_come_once_and_change_no_step(tok: Any, tmp_path: Path) -> None:
    out, samples = tmp_path / "resumed", tmp_path / "resumed" / "samples.jsonl"
    assert trainer(tok, tmp_path / "without", steps=4, sample_every=0).train() and not read(
        tmp_path / "without" / "samples.jsonl"
    )
    assert trainer(tok, out, steps=2, sample_every=1).train()
    samples.write_text(samples.read_text() + '{"step": 2, "prompt": "of a step that was lost"}\n')
    assert trainer(tok, out, steps=4, sample_every=1, resume=True).train()
    assert [s["step"] for s in read(samples)] == [0, 0, 1, 1, 2, 2, 3, 3] and all("tokens" in s for s in read(samples))
    assert lines(out) == lines(tmp_path / "without")


# ---- time, and what a run came to


def test_the_parts_of_a_step_are_measured_where_they_end(tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the parts move: each forward of the sampler, the rewards, each backward, each optimizer step."""
    model, watch, now = tiny(tok), Watch(None), [100.0]

    def passes(seconds: float) -> Any:
        return lambda *_: now.__setitem__(0, now[0] + seconds)

    def graded(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        passes(0.5)()
        return varied(prompts, completions)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    t = trainer(tok, tmp_path, model=model, rewards=[watch.told(graded)], num_updates=2)
    model.lm_head.register_forward_hook(passes(2.0))
    model.lm_head.weight.register_hook(passes(3.0))
    handle = register_optimizer_step_pre_hook(passes(0.25))
    metrics = t.train_step()
    handle.remove()
    lengths = [len(ids) for ids in watch.calls[0].ids]
    assert [metrics[f"{part}_seconds"] for part in ("sampling", "reward", "gradient", "optimizer")] == [
        2.0 * max(lengths),
        0.5,
        6.0,
        0.5,
    ]
    assert metrics["seconds"] == now[0] - 100 and metrics["tokens_per_second"] == pytest.approx(
        sum(lengths) / metrics["seconds"]
    )


def test_the_summary_of_a_run(tok: Any, tmp_path: Path) -> None:
    """Of figures by hand: 20 steps of 2 s with 30 tokens a second, rewards 0.0, 0.1, ... 1.5, then 0.2."""
    options: dict[str, Any] = {"steps": 1, "checkpoint_steps": 1}
    assert trainer(tok, tmp_path, **options).train()
    one = (tmp_path / "summary.txt").read_text()
    assert "accuracy" not in one and one.splitlines()[0] == "1 step"
    told = [
        {"step": i, "loss": 0.1, "reward": i / 10 if i < 16 else 0.2, "seconds": 2.0, "sampling_seconds": 1.0, "reward_seconds": 0.2,
         "gradient_seconds": 0.5, "optimizer_seconds": 0.2, "tokens_per_second": 30.0, "peak_memory_gb": 1.0 + (i == 7)}
        for i in range(20)
    ] + [{"step": 20}]  # fmt: skip
    for i, accuracy in ((0, 0.25), (10, 0.75), (20, 0.5)):
        counts = {
            "accuracy": accuracy,
            "accuracy_counts": "exact >= 1, 4 prompts",
            "eval_reward": 2 * accuracy,
            "eval_seconds": 1.5,
        }
        told[i] |= counts
    assert trainer(tok, tmp_path / "b", steps=20, eval_prompts=2, eval_steps=1, lr=0.0).train()
    (tmp_path / "b" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    assert trainer(tok, tmp_path / "b", steps=20, eval_prompts=2, eval_steps=1, lr=0.0, resume=True).train()
    assert (tmp_path / "b" / "summary.txt").read_text().splitlines() == [
        "20 steps",
        "held-out accuracy   0.250 -> 0.500 (exact >= 1, 4 prompts)",
        "held-out reward     0.5 -> 1",
        "best evaluation     0.750 after 10 steps",
        "reward              0.05 -> 0.2 (means of 2), best 1.5 in step 15",
        "time of the steps   40.0 s: sampling 50%, rewards 10%, loss and gradient 25%, optimizer 10%, the rest 5%",
        "evaluations         4.5 s",
        "speed               30 sampled tokens a second, of whole steps",
        "peak memory         2.00 GB",
        f"files               {tmp_path / 'b'}: metrics.jsonl, samples.jsonl, curves.png, config.yaml, checkpoints, model",
    ]
