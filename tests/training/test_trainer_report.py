"""The reports of a run: metrics, trackers, samples of completions, the parts of its time, and a summary."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

pytest.importorskip("transformers")
pytest.importorskip("datasets")


from grpo_kernels.training.report import write_summary
from support.advantage_oracle import group_advantages, process_advantages
from support.plain_trainer import Watch
from support.runs import lines, read, tiny, trainer, varied

# ---- metrics


class Recorder:
    """A tracker that fails in a step, or (9) at its end."""

    def __init__(self, fail_at=-1):
        self.fail_at, self.found = fail_at, list[Any]()

    def log(self, step, metrics):
        if step == self.fail_at:
            raise ConnectionError("no route")
        self.found.append({"step": step, **metrics})

    def close(self):
        self.log(9, {})


def test_a_tracker_gets_what_the_file_gets_and_one_that_fails_ends_no_run(tok, tmp_path, capsys):
    trackers = [Recorder(fail_at=1), Recorder(fail_at=9), Recorder()]
    assert trainer(tok, tmp_path, trackers=trackers, steps=3, eval_steps=2, eval_prompts=4).train()
    written, (bad, late, good) = read(tmp_path / "metrics.jsonl"), trackers
    assert len(written) == 4 and late.found == written and good.found == [*written, {"step": 9}] and bad.found == written[:1]
    told = capsys.readouterr().err
    for what in ("gets no more metrics", "is not closed"):
        assert told.count(f"Recorder {what}: ConnectionError: no route") == 1


def test_the_names_of_metrics_are_those_of_the_field(tok, tmp_path):
    def short(prompts, completions, **_):
        return [-float(len(c)) for c in completions]

    watch = Watch(None)
    options = {"rewards": [watch.told(varied), short, varied], "reward_weights": [1, 2, 3]}
    found = trainer(tok, tmp_path, beta=0.1, num_updates=3, lr=0.05, **options).train_step()
    (call,) = watch.calls
    sizes, own = [len(c) for c in call.completions], statistics.mean(call.rewards)
    totals = [4 * r - 2 * size for r, size in zip(call.rewards, sizes, strict=True)]
    expected = {
        "reward/varied": own, "reward/varied#2": own, "reward/short": -statistics.mean(sizes), "reward": statistics.mean(totals),
        "reward_std": statistics.pstdev(totals), "completion_length": statistics.mean(map(len, call.ids)),
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["clip_ratio"] == found["clip_low"] + found["clip_high"] > 0
    assert {"loss", "kl", "entropy", "grad_norm", "lr", "tokens_per_second"} <= found.keys()
    assert 0.05 < found["peak_memory_gb"] < 1000  # of this process: torch alone is more, and it is no machine's whole memory


def test_accuracy_says_what_it_counts(tok, tmp_path):
    """The share of held-out prompts with a first reward of at least 1, and beside it the mean of all rewards."""

    def three(prompts, completions, **_):
        return [3.0 if p.startswith("5") else 1.0 if p == "4+0=" else 0.5 for p in prompts]

    assert trainer(tok, tmp_path, rewards=[three], eval_steps=2, eval_prompts=8, steps=1).train()
    names = ("step", "accuracy", "accuracy_counts", "eval_reward")
    found = [[line.get(name) for name in names] for line in lines(tmp_path)]
    assert found == [[step, 5 / 8, "three >= 1, 8 prompts", pytest.approx((4 * 3.0 + 1.0 + 3 * 0.5) / 8)] for step in (0, 1)]


def test_metrics_are_json_whatever_is_in_them(tok, tmp_path, drawn):
    """A gradient that is not finite: its norm is null, and the picture is drawn from the rest."""
    model = tiny(tok)
    model.lm_head.weight.register_hook(lambda g: g * float("nan"))
    assert trainer(tok, tmp_path, model=model, steps=2).train()
    texts = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for text in texts]
    assert [line["grad_norm"] for line in found] == [None, None] and found[0]["skipped"] == 1.0
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_a_picture_that_fails_ends_no_run(tok, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("matplotlib.figure.Figure", lambda **_: [][0])
    assert trainer(tok, tmp_path).train() and "curves.png is not drawn: IndexError" in capsys.readouterr().err


# ---- trackers by name


def test_tensorboard_has_the_curves_of_the_run(tok, tmp_path):
    """Read back with its own reader; after a resumed run too, whose steps come once."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("accelerate")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"log_to": ["tensorboard"], "eval_steps": 2, "eval_prompts": 4, "checkpoint_steps": 2}
    assert trainer(tok, tmp_path, steps=2, **options).train()
    assert trainer(tok, tmp_path, steps=4, resume=True, **options).train()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert {"train/reward", "train/clip_ratio", "eval/accuracy", "time/sampling"} <= set(found.Tags()["scalars"])
    written = read(tmp_path / "metrics.jsonl")
    for tag, name in (("train/reward", "reward"), ("train/entropy", "entropy"), ("eval/accuracy", "accuracy")):
        points = [(point.step, point.value) for point in found.Scalars(tag)]
        assert points == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in written if name in line]


@pytest.mark.parametrize(("name", "named"), [("wandb", "name"), ("trackio", "name"), ("mlflow", "run_name")])
def test_trackers_of_accelerate_get_the_numbers_in_groups(tok, tmp_path, monkeypatch, name, named):
    tracking, made = pytest.importorskip("accelerate.tracking"), MagicMock()
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, made)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package)
    assert trainer(tok, tmp_path / "my-run", log_to=[name], steps=1, eval_steps=1, eval_prompts=2).train()
    made.assert_called_once_with("grpo_kernels", **{named: "my-run"})
    settings = made().store_init_configuration.call_args.args[0]
    assert settings["lr"] == 1e-3 and settings["rewards"] == "['exact']"
    names = {"accuracy": "eval/accuracy", "eval_reward": "eval/reward", "eval_seconds": "time/eval", "seconds": "time/step"}
    names |= {f"{part}_seconds": f"time/{part}" for part in ("sampling", "reward", "gradient", "optimizer")}
    for line, called in zip(read(tmp_path / "my-run" / "metrics.jsonl"), made().log.call_args_list, strict=True):
        step = {"step": line.pop("step")}
        assert called == call({names.get(k, f"train/{k}"): v for k, v in line.items() if k != "accuracy_counts"}, **step)
    made().finish.assert_called_once_with()


# ---- samples


def test_samples_are_the_first_completions_with_rewards_and_advantage(tok, tmp_path, capsys):
    """An advantage of tokens is told by its mean: of rewards at the first and at the last token. Those of a resumed run come once,
    and looking changes no step."""

    def ends(prompts, completions, *, completion_ids, **_):
        return [[1.0, *[None] * (len(ids) - 2), 3.0][: len(ids)] for ids in completion_ids]

    watch, samples = Watch(None), tmp_path / "run" / "samples.jsonl"
    options = {"rewards": [watch.told(varied), watch.told(ends)], "sample_count": 6, "progress": True}
    assert trainer(tok, tmp_path / "run", steps=2, sample_every=2, **options).train()
    samples.write_text(samples.read_text() + '{"step": 2, "prompt": "of a step that was lost"}\n')
    first, second = watch.calls[:2]
    assert trainer(tok, tmp_path / "run", steps=3, sample_every=2, resume=True, **options).train()
    found, told, groups = read(samples), capsys.readouterr().err, [k // 4 for k in range(12)]
    steps, outcome = process_advantages(second.rewards, groups), group_advantages(first.rewards, groups)
    for i, sample in enumerate(found[:6]):
        own, other = first.rewards[i], sum(r for r in second.rewards[i] if r is not None)
        assert sample == {
            "step": 0, "prompt": first.prompts[i], "completion": first.completions[i], "tokens": len(first.ids[i]),
            "reward": own + other, "rewards": {"varied": own, "ends": other},
            "advantage": pytest.approx(outcome[i] + statistics.mean(steps[i]), abs=1e-5),
        }  # fmt: skip
        numbers = f"reward {own + other:.3g} (varied {own:.3g}, ends {other:.3g}), advantage {sample['advantage']:+.3g}"
        said = f"step 0: {numbers}, {sample['tokens']} tokens\n  prompt     {first.prompts[i]!r}\n"
        assert said + f"  completion {first.completions[i]!r}\n" in told
    assert [(x["step"], x["prompt"]) for x in found[6:]] == [(2, prompt) for prompt in watch.calls[-2].prompts[:6]]
    assert trainer(tok, tmp_path / "without", steps=3, sample_every=0, **options).train()
    assert not read(tmp_path / "without" / "samples.jsonl") and lines(tmp_path / "without") == lines(tmp_path / "run")


# ---- time, and what a run came to


def test_the_parts_of_a_step_are_measured_where_they_end(tok, tmp_path, monkeypatch):
    """By a clock that only the parts move: each forward of the sampler, the rewards, each backward, each optimizer step."""
    model, watch, now = tiny(tok), Watch(None), [100.0]

    def passes(seconds):
        return lambda *_: now.__setitem__(0, now[0] + seconds)

    def graded(prompts, completions, **_):
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
    parts = [metrics[f"{part}_seconds"] for part in ("sampling", "reward", "gradient", "optimizer")]
    assert parts == [2.0 * max(lengths), 0.5, 6.0, 0.5] and metrics["seconds"] == sum(parts)
    assert metrics["tokens_per_second"] == pytest.approx(sum(lengths) / sum(parts))


def test_the_summary_of_a_run(tmp_path):
    """Of figures by hand: 20 steps of 2 s with 30 tokens a second, rewards 0.0, 0.1, ... 1.5, then 0.2."""
    step = {"sampling_seconds": 1.0, "reward_seconds": 0.2, "gradient_seconds": 0.5, "optimizer_seconds": 0.2, "seconds": 2.0}
    step |= {"tokens_per_second": 30.0, "peak_memory_gb": 1.5}
    told = [{"step": i, "reward": i / 10 if i < 16 else 0.2} | step for i in range(20)] + [{"step": 20}]
    for i, accuracy in ((0, 0.25), (20, 0.5)):
        told[i] |= {"accuracy": accuracy, "accuracy_counts": "exact >= 1", "eval_reward": 2 * accuracy, "eval_seconds": 1.5}
    told[7]["peak_memory_gb"] = 2.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    write_summary(tmp_path)
    assert (tmp_path / "summary.txt").read_text().splitlines() == [
        "steps               20",
        "held-out accuracy   0.250 -> 0.500 (exact >= 1)",
        "held-out reward     0.5 -> 1",
        "reward              0.05 -> 0.2 (means of 2)",
        "time of the steps   40.0 s: sampling 50%, reward 10%, gradient 25%, optimizer 10%",
        "evaluations         3.0 s",
        "speed               30 sampled tokens a second, of whole steps",
        "peak memory         2.00 GB",
        f"files               {tmp_path}: metrics.jsonl",
    ]
