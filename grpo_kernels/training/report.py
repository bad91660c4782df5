"""The records of a run: metrics of each step, samples, trackers, progress and the summary."""

from __future__ import annotations

import itertools
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
from .rewards import Scores, show_pair

Line = dict[str, Any]


# ---- metrics


def update_metrics(
    parts: list[dict[str, Tensor]], objective: Objective, ranks: Ranks, *, weighted: bool
) -> dict[str, float]:
    """Return the metrics of an update from the metrics of its micro-batches on all ranks.

    parts       for each micro-batch of this rank, "loss" and the metrics of `LossOutput`, 0-d
    objective   the objective of the update
    ranks       the ranks of the run; all of them must call this
    weighted    whether the tokens have weights. The effective sample size "ess" is then left out,
                because the sum of weighted ratios is not known.
    """
    # One transfer for all metrics: the host waits once.
    table = torch.stack([torch.stack([*part.values()]) for part in parts]).tolist()
    parts_of_rank = [dict(zip(parts[0], values, strict=True)) for values in table]
    parts_of_all_ranks = itertools.chain(*ranks.gather(parts_of_rank))
    metrics = combine_metrics(list(parts_of_all_ranks))
    if ranks.world > 1 and objective.filter(EntropyQuantile):
        # "kept" does not count a filter that communicates with other ranks.
        del metrics["kept"]
    if weighted:
        del metrics["ess"]
    if "clip_low" in metrics:  # a custom loss may not have it
        metrics["clip_ratio"] = metrics["clip_low"] + metrics["clip_high"]
    return metrics


def combine_metrics(parts: list[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of a batch from those of its micro-batches.

    "loss" and "tokens" are summed. Names that end in "_max" and "_min" are the largest and the
    smallest value. "ess" is computed from the sums of the ratios and of their squares. All others
    are means over the tokens.

    parts   for each micro-batch, "loss", "tokens", "ratio_mean", "ess" and any other metrics
    """
    loss = math.fsum(part["loss"] for part in parts)
    # A micro-batch without tokens has no extremes. If none has tokens, the first one is used.
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
        self.start_time = time.perf_counter()
        self.last_time = self.start_time
        self.seconds = defaultdict[str, float](float)

    def lap(self, part: str) -> None:
        """Add the time since the last lap to the seconds of a part, such as "sampling"."""
        now = time.perf_counter()
        self.seconds[f"{part}_seconds"] += now - self.last_time
        self.last_time = now

    def metrics(self, tokens: int, device: torch.device) -> dict[str, float]:
        """Return the metrics of a step that ends now.

        tokens   number of sampled tokens
        device   where the model is

        "peak_memory_gb" is the largest memory since the start: of torch on a GPU, of the whole
        process on a CPU.
        """
        seconds = time.perf_counter() - self.start_time
        if device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(device)
        else:
            peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "seconds": seconds,
            **self.seconds,
            "tokens_per_second": tokens / seconds,
            "peak_memory_gb": peak_bytes / 1e9,
        }


# ---- files with one JSON object a line. A crash at any time loses no complete line.


def append(file: IO[str], line: Line) -> None:
    """Write a line to the end of a file as JSON, and wait until it is on the disk.

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
    """Return all complete lines of a file, one dictionary for each.

    path   a file with one JSON object a line, such as metrics.jsonl

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

    name        the tracker: "tensorboard", "wandb", "trackio" or "mlflow"
    config      the options of the run, which the tracker shows
    out         the output folder. TensorBoard writes to out/tensorboard.
    resume_at   first step of this run. TensorBoard hides the steps of an interrupted run from this
                one on, because they are repeated.
    """

    def __init__(self, name: str, config: TrainConfig, out: Path, resume_at: int) -> None:
        """Start a run of a tracker of accelerate, and give it the options of the run.

        name        "tensorboard", "wandb", "trackio" or "mlflow"
        config      the options, which the tracker shows
        out         the output folder, whose name the run of the tracker gets
        resume_at   first step of this run. A resumed run repeats the steps after its checkpoint, so
                    TensorBoard hides the old ones.
        """
        project = "grpo_kernels"
        options: Line
        if name == "tensorboard":
            project = "tensorboard"
            options = {"logging_dir": out, "purge_step": resume_at or None}
        elif name == "mlflow":
            options = {"run_name": out.name}
        else:
            options = {"name": out.name}
        tracker_class = require("accelerate.tracking").LOGGER_TYPE_TO_CLASS[name]
        self.tracker = tracker_class(project, **options)
        self.tracker.start()
        # Trackers store numbers and texts, but no lists and no None.
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

    out              folder of the files
    custom_trackers  trackers of the caller, in addition to `config.log_to`
    files            the open files, by name: "metrics" and "samples"
    sizes            size of each file in bytes when the last step was written
    trackers         all trackers that have not failed
    samples          the samples of the current step
    """

    config: TrainConfig
    out: Path
    ranks: Ranks
    custom_trackers: Sequence[Tracker]
    files: dict[str, IO[str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    trackers: list[Tracker] = field(default_factory=list)
    samples: list[Line] = field(default_factory=list)

    @contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Return a context in which files and trackers are open.

        A resumed run repeats the steps after its checkpoint, so `_open` cuts off the lines that
        these steps had written.

        step   the first step that will be written
        """
        # Other ranks open nothing, so they have nothing to close.
        self.ranks.on_main(lambda: self._open(step))
        try:
            yield
        finally:
            for file in self.files.values():
                file.close()
            self.files = {}
            self.call_trackers(lambda tracker: tracker.close(), problem="is not closed")

    def _open(self, step: int) -> None:
        """Write config.yaml, and open files and trackers, on rank 0.

        step   the first step that will be written. A resumed run repeats the steps after its
               checkpoint, so their lines are cut off.
        """
        # A run that is started from this file must not continue the present run.
        write(replace(self.config, resume=False), self.out / "config.yaml")
        self.files = {
            name: open(self.out / f"{name}.jsonl", "a") for name in ("metrics", "samples")
        }
        for name, file in self.files.items():
            file.truncate(min(self.sizes.get(name, 0), file.tell()))
        # "jsonl" is not a tracker: metrics.jsonl is always written.
        names = [name for name in self.config.log_to if name in TRACKERS]
        dashboards = [Dashboard(name, self.config, self.out, step) for name in names]
        self.trackers = [*dashboards, *self.custom_trackers]

    def call_trackers(self, function: Callable[[Tracker], None], problem: str) -> None:
        """Call a function with each tracker. If it raises, print a message and drop the tracker.

        The run goes on, because it is worth more than its tracker.

        problem   what the message says about the tracker, such as "gets no more metrics"
        """
        for tracker in [*self.trackers]:
            try:
                function(tracker)
            except Exception as error:  # a tracker may raise exceptions of any type
                self.trackers.remove(tracker)
                print(
                    f"{type(tracker).__name__} {problem}: {type(error).__name__}: {error}",
                    file=sys.stderr,
                )

    def keep_samples(self, step: int, rows: list[Row], scores: Scores, advantages: Tensor) -> None:
        """Store the first `config.sample_count` completions of a batch, for `write`.

        This happens every `config.sample_every` steps, on rank 0, which has the first completions.
        On other steps and ranks nothing is stored.

        step         number of the step
        rows         the rows of the prompts, of all ranks
        scores       the scores of the completions, of all ranks
        advantages   [B], or [B, T] of tokens. A sample has the mean over its tokens.
        """
        config = self.config
        totals = scores.totals
        self.samples = []
        is_due = config.sample_every > 0 and step % config.sample_every == 0
        if not is_due or not self.ranks.main:
            return
        for i, text in enumerate(scores.texts[: config.sample_count]):
            length = scores.lengths[i]
            is_per_token = advantages.dim() > 1
            advantage = advantages[i, :length].mean() if is_per_token else advantages[i]
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
        """Write the metrics of a step to files, trackers and the terminal, on rank 0.

        step      number of the step
        metrics   the metrics. Those of an evaluation alone have no "loss".

        The samples of a training step, which `keep_samples` has stored, are written too.
        """
        is_training_step = "loss" in metrics
        if is_training_step:
            for sample in self.samples:
                append(self.files["samples"], {"step": step, **sample})
                summary = _text_of({**sample["rewards"], "advantage": sample["advantage"]})
                self.show(
                    f"step {step}: {summary}{show_pair(sample['prompt'], sample['completion'])}"
                )
        append(self.files["metrics"], {"step": step, **metrics})
        self.call_trackers(
            lambda tracker: tracker.log(step, metrics), problem="gets no more metrics"
        )
        if "accuracy" in metrics:
            self.show(
                f"step {step}: held-out accuracy {metrics['accuracy']:.3f}"
                f" ({metrics['accuracy_counts']})"
            )
        # A resumed run repeats the evaluation after the last step, so its line must not count.
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
    """Return numbers with their names as a text, "reward 0.5, kl 0.012"."""
    return ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())


# ---- the summary


def write_summary(out: Path) -> None:
    """Write summary.txt: accuracy and reward at the start and at the end, time and speed.

    out   the output folder, which has metrics.jsonl
    """
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
        # The rewards of single steps vary, so means over the first and last tenth are compared.
        tenth = max(1, len(steps) // 10)
        first_reward = fmean(line["reward"] for line in steps[:tenth])
        last_reward = fmean(line["reward"] for line in steps[-tenth:])
        texts.append(f"reward {first_reward:.4g} -> {last_reward:.4g} (means of {tenth})")
        seconds = math.fsum(line["seconds"] for line in steps)
        tokens = math.fsum(line["tokens_per_second"] * line["seconds"] for line in steps)
        texts.append(f"{seconds:.1f} s, {tokens / seconds:.0f} sampled tokens a second")
    (out / "summary.txt").write_text("".join(f"{text}\n" for text in texts))
