"""The records of a run: metrics of each step, samples, trackers, progress and the summary."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from ..formulas.filters import EntropyQuantile
from ..objective import Objective
from . import Ranks, require
from .config import TRACKERS, TrainConfig, write
from .data import Row
from .rewards import Scores, pair

Line = dict[str, Any]


# ---- metrics


def update_metrics(
    parts: list[dict[str, Tensor]], objective: Objective, ranks: Ranks, *, weighted: bool
) -> dict[str, float]:
    """Return the metrics of an update from the metrics of its micro-batches on all ranks.

    parts      metrics and "loss" of each micro-batch of this rank, 0-d tensors
    weighted   whether the tokens have weights. The effective sample size "ess" is then left out,
               because the sum of weighted ratios is not known.
    """
    # One transfer for all metrics: the host waits once.
    table = torch.stack([torch.stack([*part.values()]) for part in parts]).tolist()
    own_parts = [dict(zip(parts[0], values, strict=True)) for values in table]
    metrics = combine_metrics([part for rank in ranks.gather(own_parts) for part in rank])
    if ranks.world > 1 and objective.filter(EntropyQuantile):
        del metrics["kept"]  # a quantile over ranks is not counted in it
    if weighted:
        del metrics["ess"]
    if "clip_low" in metrics:  # a custom loss may not have it
        metrics["clip_ratio"] = metrics["clip_low"] + metrics["clip_high"]
    return metrics


def combine_metrics(parts: list[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of a batch from those of its micro-batches.

    "loss" and "tokens" are summed, names with "_max" and "_min" are extremes, "ess" is computed
    anew, and all others are means over the tokens.
    """
    loss = math.fsum(part["loss"] for part in parts)
    # A micro-batch without tokens has no extremes.
    parts = [part for part in parts if part["tokens"] > 0] or parts[:1]
    columns = {
        name: torch.tensor([part[name] for part in parts], dtype=torch.float64) for name in parts[0]
    }
    num_tokens = columns["tokens"]
    total = num_tokens.sum()
    metrics = dict[str, float]()
    for name, column in columns.items():
        if name.endswith("_max"):
            metrics[name] = column.max().item()
        elif name.endswith("_min"):
            metrics[name] = column.min().item()
        else:
            metrics[name] = (num_tokens @ column / total.clamp(min=1.0)).item()
    # ess = (sum of ratios)^2 / (tokens * sum of squares). Solve it for the squares of each part.
    sums = columns["ratio_mean"] * num_tokens
    squares = (sums.square() / (num_tokens * columns["ess"]).clamp(min=1e-30)).sum()
    ess = sums.sum().square() / (total * squares).clamp(min=1e-30)
    return metrics | {"loss": loss, "tokens": total.item(), "ess": ess.item()}


class Stopwatch:
    """Measures the seconds of each part of a step.

    It does not synchronise. Call `lap` when the host has just waited for the device.
    """

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()
        self.seconds = defaultdict[str, float](float)

    def lap(self, part: str) -> None:
        """Add the time since the last lap to `part`."""
        now = time.perf_counter()
        self.seconds[f"{part}_seconds"] += now - self.last
        self.last = now

    def metrics(self, tokens: int, device: torch.device) -> dict[str, float]:
        """Return the metrics of a step that ends now.

        tokens   number of sampled tokens

        "peak_memory_gb" is the peak of the GPU since the start, on a CPU of the process.
        """
        seconds = time.perf_counter() - self.began
        process = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process
        return {
            "seconds": seconds,
            **self.seconds,
            "tokens_per_second": tokens / seconds,
            "peak_memory_gb": peak / 1e9,
        }


# ---- files with one JSON object a line. A crash at any time loses no complete line.


def append(file: IO[str], line: Line) -> None:
    """Append a line to a file, and wait until it is on the disk.

    NaN and infinity become null, because JSON does not have them.
    """
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in line.items()
    }
    file.write(json.dumps(values, allow_nan=False) + "\n")
    file.flush()
    os.fsync(file.fileno())


def read_metrics(path: Path) -> list[Line]:
    """Return all complete lines of a file.

    A crash during a write may leave a partial last line or NUL bytes, which are skipped.
    """
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(text))
    return lines


# ---- trackers and files


class Tracker(Protocol):
    """The interface of a tracker of metrics. It is called on rank 0 only."""

    def log(self, step: int, metrics: Line) -> None:
        """Record the metrics of a step, Python numbers by the names of metrics.jsonl."""

    def close(self) -> None:
        """Finish the run."""


class Dashboard:
    """A tracker of accelerate ("wandb", ...), whose run has the name of the output folder.

    name        its name in accelerate
    resume_at   first step of this run. TensorBoard, which writes to out/tensorboard, hides later
                steps of the run that is resumed.
    """

    def __init__(self, name: str, config: TrainConfig, out: Path, resume_at: int) -> None:
        if name == "tensorboard":
            project = "tensorboard"
            options: Line = {"logging_dir": out, "purge_step": resume_at or None}
        else:
            project = "grpo_kernels"
            options = {"run_name" if name == "mlflow" else "name": out.name}
        tracker_class = require("accelerate.tracking").LOGGER_TYPE_TO_CLASS[name]
        self.tracker = tracker_class(project, **options)
        self.tracker.start()
        settings = {
            key: value if isinstance(value, (bool, int, float)) else str(value)
            for key, value in asdict(config).items()
        }
        self.tracker.store_init_configuration(settings)

    def log(self, step: int, metrics: Line) -> None:
        """Record the metrics that are numbers."""
        numbers = {name: float(x) for name, x in metrics.items() if isinstance(x, (int, float))}
        self.tracker.log(numbers, step=step)

    def close(self) -> None:
        """Finish the run."""
        self.tracker.finish()


@dataclass
class RunLog:
    """Writes the options, metrics and samples of a run, on rank 0 only.

    With `config.progress` it also prints a line for each step.

    out            folder of the files
    own_trackers   trackers of the caller, in addition to `config.log_to`
    files          the open files, by name: "metrics" and "samples"
    sizes          size of each file when the last step was written
    trackers       all trackers that have not failed
    samples        the samples of the current step
    """

    config: TrainConfig
    out: Path
    ranks: Ranks
    own_trackers: Sequence[Tracker]
    files: dict[str, IO[str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    trackers: list[Tracker] = field(default_factory=list)
    samples: list[Line] = field(default_factory=list)

    @contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Open the files and trackers for the steps of a run from `step` on, and close them after.

        A resumed run repeats the steps after its checkpoint. Their lines, beyond `sizes`, are cut
        off.
        """
        self.ranks.on_main(lambda: self._open(step))
        try:
            yield
        finally:
            for file in self.files.values():
                file.close()
            self.files = {}
            self.ask_trackers("is not closed", lambda tracker: tracker.close())

    def _open(self, step: int) -> None:
        """Write config.yaml, and open files and trackers; see `opened`."""
        # A run that is started from this file must not continue the present run.
        write(replace(self.config, resume=False), self.out / "config.yaml")
        self.files = {
            name: open(self.out / f"{name}.jsonl", "a") for name in ("metrics", "samples")
        }
        for name, file in self.files.items():
            file.truncate(min(self.sizes.get(name, 0), file.tell()))
        named = [
            Dashboard(name, self.config, self.out, step)
            for name in self.config.log_to
            if name in TRACKERS
        ]
        self.trackers = [*named, *self.own_trackers]

    def ask_trackers(self, failed: str, act: Callable[[Tracker], None]) -> None:
        """Call `act` with each tracker. A tracker that raises is removed with a message.

        failed   what the message says of the tracker

        The run goes on, because it is worth more than its tracker.
        """
        for tracker in [*self.trackers]:
            try:
                act(tracker)
            except Exception as error:  # trackers are foreign code
                self.trackers.remove(tracker)
                print(
                    f"{type(tracker).__name__} {failed}: {type(error).__name__}: {error}",
                    file=sys.stderr,
                )

    def keep_samples(self, step: int, rows: list[Row], scores: Scores, advantages: Tensor) -> None:
        """Keep the first `config.sample_count` completions of a batch; `write` writes them.

        This happens every `config.sample_every` steps, on rank 0, which has the first completions.

        rows         the rows of the prompts
        advantages   [B], or [B, T] of tokens, of which the sample has the mean
        """
        config = self.config
        totals = scores.totals
        self.samples = []
        if not self.ranks.main or not config.sample_every or step % config.sample_every:
            return
        for i, text in enumerate(scores.texts[: config.sample_count]):
            length = scores.lengths[i]
            per_token = advantages.dim() > 1
            advantage = advantages[i, :length].mean() if per_token else advantages[i]
            sample = {
                "prompt": rows[i // config.group_size]["prompt"],
                "completion": text,
                "tokens": length,
                "reward": totals[i].item(),
                "rewards": dict(zip(scores.names, scores.each[:, i].tolist(), strict=True)),
                "advantage": advantage.item(),
            }
            self.samples.append(sample)

    def write(self, line: Line) -> None:
        """Write the metrics of a step and its samples to files, trackers and the terminal.

        line   "step" and the metrics. Metrics of an evaluation alone have no "loss".
        """
        self.ranks.on_main(lambda: self._write(**line))

    def _write(self, step: int, **metrics: Any) -> None:
        """Do the work of `write` on rank 0."""
        is_training_step = "loss" in metrics
        for sample in self.samples if is_training_step else ():
            append(self.files["samples"], {"step": step, **sample})
            summary = _text_of({**sample["rewards"], "advantage": sample["advantage"]})
            self.show(f"step {step}: {summary}{pair(sample['prompt'], sample['completion'])}")
        append(self.files["metrics"], {"step": step, **metrics})
        self.ask_trackers("gets no more metrics", lambda tracker: tracker.log(step, metrics))
        if "accuracy" in metrics:
            self.show(
                f"step {step}: held-out accuracy {metrics['accuracy']:.3f}"
                f" ({metrics['accuracy_counts']})"
            )
        # A resumed run repeats the last evaluation, so its line must not count.
        if is_training_step:
            self.sizes = {name: os.path.getsize(file.fileno()) for name, file in self.files.items()}
            names = ("reward", "kl", "entropy", "completion_length")
            summary = _text_of({name: metrics[name] for name in names if name in metrics})
            self.show(
                f"step {step}: {summary}, {metrics['seconds']:.1f} s, {step + 1} of"
                f" {self.config.steps} done"
            )

    def show(self, text: str) -> None:
        """Print a line of progress, unless it is switched off."""
        if self.config.progress:
            print(text, file=sys.stderr)


def _text_of(numbers: dict[str, float]) -> str:
    """Return "name value, name value"."""
    return ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())


# ---- the summary


def write_summary(out: Path) -> None:
    """Write summary.txt: accuracy and reward at the start and at the end, time and speed."""
    lines = read_metrics(out / "metrics.jsonl")
    steps = [line for line in lines if "seconds" in line]
    evaluations = [line for line in lines if "accuracy" in line]
    texts = [f"{len(steps)} steps in {out}"]
    if evaluations:
        first = evaluations[0]
        last = evaluations[-1]
        texts.append(
            f"held-out accuracy {first['accuracy']:.3f} -> {last['accuracy']:.3f}"
            f" ({last['accuracy_counts']})"
        )
    if steps:
        tenth = max(1, len(steps) // 10)
        seconds = math.fsum(line["seconds"] for line in steps)
        begin, end = (
            fmean(line["reward"] for line in some) for some in (steps[:tenth], steps[-tenth:])
        )
        tokens = math.fsum(line["tokens_per_second"] * line["seconds"] for line in steps)
        texts.append(f"reward {begin:.4g} -> {end:.4g} (means of {tenth})")
        texts.append(f"{seconds:.1f} s, {tokens / seconds:.0f} sampled tokens a second")
    (out / "summary.txt").write_text("".join(f"{text}\n" for text in texts))
