"""The records of a run: metrics of its steps, samples, trackers, progress, and what it came to."""

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


def of_update(
    parts: list[dict[str, Tensor]], objective: Objective, ranks: Ranks, *, weighted: bool
) -> dict[str, float]:
    """The metrics of an update from those of its parts on all ranks, their "loss" among them,
    without what parts do not tell.
    """
    # As numbers in one table: the host waits once.
    table = torch.stack([torch.stack([*part.values()]) for part in parts]).tolist()
    lines = [dict(zip(parts[0], values, strict=True)) for values in table]
    metrics = combine([line for of_rank in ranks.gather(lines) for line in of_rank])
    if ranks.world > 1 and objective.filter(EntropyQuantile):
        del metrics["kept"]  # which leaves out a quantile over ranks
    if weighted:
        del metrics["ess"]  # of weighted ratios, whose sum is not among the metrics
    if "clip_low" in metrics:  # losses of users may not tell
        metrics["clip_ratio"] = metrics["clip_low"] + metrics["clip_high"]
    return metrics


def combine(parts: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of micro-batches as those of the batch:

    the loss adds up, extremes stay extremes, means weigh by tokens.
    """
    loss = math.fsum(p["loss"] for p in parts)
    parts = [p for p in parts if p["tokens"] > 0] or parts[
        :1
    ]  # the extremes of nothing are not the batch's
    of = {name: torch.tensor([p[name] for p in parts], dtype=torch.float64) for name in parts[0]}
    weights = of["tokens"]
    total = of["tokens"].sum()
    metrics = {
        name: (
            x.max()
            if name.endswith("_max")
            else x.min()
            if name.endswith("_min")
            else weights @ x / total.clamp(min=1.0)
        )
        for name, x in of.items()
    }
    # (sum of ratios)^2 / (tokens * sum of their squares), of which each part has its own.
    sums = of["ratio_mean"] * weights
    squares = (sums.square() / (weights * of["ess"]).clamp(min=1e-30)).sum()
    ess = sums.sum().square() / (total * squares).clamp(min=1e-30)
    return {name: x.item() for name, x in metrics.items()} | {
        "loss": loss,
        "tokens": total.item(),
        "ess": ess.item(),
    }


class Stopwatch:
    """Seconds of the parts of a step.

    Read where the host has just waited for the device, it adds no wait.
    """

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()
        self.seconds = defaultdict[str, float](float)

    def lap(self, part: str) -> None:
        """What has passed since the last lap belongs to `part`."""
        now = time.perf_counter()
        self.seconds[f"{part}_seconds"] += now - self.last
        self.last = now

    def metrics(self, tokens: int, device: torch.device) -> dict[str, float]:
        """Of a step that ends now and sampled so many tokens, with the most memory that the device
        had, or on the CPU the process.
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


# ---- files of one JSON object per line, where a crash at any moment costs nothing that was
# complete


def append(file: IO[str], line: Line) -> None:
    """A line is whole on the disk when this returns.

    NaN and infinity, which JSON lacks, become null.
    """
    known = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()
    }
    file.write(json.dumps(known, allow_nan=False) + "\n")
    file.flush()
    os.fsync(file.fileno())


def read_metrics(path: Path) -> list[Line]:
    """All complete lines, without what a crash while writing leaves:

    a partial last line, or NUL bytes.
    """
    found = []
    for text in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            found.append(json.loads(text))
    return found


# ---- where they go


class Tracker(Protocol):
    """What the trainer asks of a tracker.

    It is called on rank 0 alone, once per step, with numbers of the host.
    """

    def log(self, step: int, metrics: Line) -> None:
        """The metrics of a step, by the names of metrics.jsonl."""

    def close(self) -> None: ...


class Dashboard:
    """A tracker of accelerate by its name, one run for each process, named like the folder.

    TensorBoard writes to out/tensorboard, where a resumed run hides the steps that it repeats.
    """

    def __init__(self, name: str, config: TrainConfig, out: Path, resume_at: int) -> None:
        own: Line = {
            "mlflow": {"run_name": out.name},
            "tensorboard": {"logging_dir": out, "purge_step": resume_at or None},
        }
        project = name if name == "tensorboard" else "grpo_kernels"
        self.tracker = require("accelerate.tracking").LOGGER_TYPE_TO_CLASS[name](
            project, **own.get(name, {"name": out.name})
        )
        self.tracker.start()
        settings = {
            k: v if isinstance(v, (bool, int, float)) else str(v) for k, v in asdict(config).items()
        }
        self.tracker.store_init_configuration(settings)

    def log(self, step: int, metrics: Line) -> None:
        """The numbers among metrics, by the names of metrics.jsonl."""
        self.tracker.log(
            {name: float(x) for name, x in metrics.items() if isinstance(x, (int, float))},
            step=step,
        )

    def close(self) -> None:
        self.tracker.finish()


@dataclass
class RunLog:
    """What rank 0, which alone has the files, keeps of a run: options, metrics and samples. With
    `config.progress` it shows how the run goes, a line for each step.
    """

    config: TrainConfig
    out: Path
    ranks: Ranks
    given: Sequence[Tracker]
    files: dict[str, IO[str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(
        default_factory=dict
    )  # of the files when the last step was written
    trackers: list[Tracker] = field(default_factory=list)
    samples: list[Line] = field(default_factory=list)  # of the step at hand

    @contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Around the steps of a run from `step` on.

        What files hold beyond `sizes` is of steps that come again, and is cut off.
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
        write(
            replace(self.config, resume=False), self.out / "config.yaml"
        )  # another run like it begins anew
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
        self.trackers = [*named, *self.given]

    def ask_trackers(self, failed: str, act: Callable[[Tracker], None]) -> None:
        """One that fails is left out from then on, with a message: the run is worth more."""
        for tracker in [*self.trackers]:
            try:
                act(tracker)
            except Exception as error:  # of anybody's code
                self.trackers.remove(tracker)
                print(
                    f"{type(tracker).__name__} {failed}: {type(error).__name__}: {error}",
                    file=sys.stderr,
                )

    def keep_samples(self, step: int, rows: list[Row], scores: Scores, advantages: Tensor) -> None:
        """The first completions of a batch every so many steps, to look at, from what has come to
        rank 0 anyway, which has the first ones of all; `write` writes them. Of advantages [B, T] a
        completion's is the mean.
        """
        config = self.config
        totals = scores.totals
        self.samples = []
        if not self.ranks.main or not config.sample_every or step % config.sample_every:
            return
        for i, text in enumerate(scores.texts[: config.sample_count]):
            length = scores.lengths[i]
            rewards = dict(zip(scores.names, scores.each[:, i].tolist(), strict=True))
            advantage = (
                advantages[i, ..., :length].mean().item()
                if advantages.dim() > 1
                else advantages[i].item()
            )
            numbers = {
                "tokens": length,
                "reward": totals[i].item(),
                "rewards": rewards,
                "advantage": advantage,
            }
            self.samples.append(
                {"prompt": rows[i // config.group_size]["prompt"], "completion": text, **numbers}
            )

    def write(self, line: Line) -> None:
        """The metrics of a step, and its samples."""
        self.ranks.on_main(lambda: self._write(**line))

    def _write(self, step: int, **metrics: Any) -> None:
        for sample in self.samples if "loss" in metrics else ():
            append(self.files["samples"], {"step": step, **sample})
            told = _told({**sample["rewards"], "advantage": sample["advantage"]})
            self.show(f"step {step}: {told}{pair(sample['prompt'], sample['completion'])}")
        append(self.files["metrics"], {"step": step, **metrics})
        self.ask_trackers("gets no more metrics", lambda tracker: tracker.log(step, metrics))
        if "accuracy" in metrics:
            self.show(
                f"step {step}: held-out accuracy {metrics['accuracy']:.3f}"
                f" ({metrics['accuracy_counts']})"
            )
        if (
            "loss" in metrics
        ):  # and not the last evaluation alone, which comes again when the run is resumed
            self.sizes = {name: os.path.getsize(file.fileno()) for name, file in self.files.items()}
            names = ("reward", "kl", "entropy", "completion_length")
            told = _told({name: metrics[name] for name in names if name in metrics})
            self.show(
                f"step {step}: {told}, {metrics['seconds']:.1f} s, {step + 1} of"
                f" {self.config.steps} done"
            )

    def show(self, text: str) -> None:
        if self.config.progress:
            print(text, file=sys.stderr)


def _told(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())


# ---- what a run came to


def write_summary(out: Path) -> None:
    """Evaluations and rewards before and after, time and speed: lines of text."""
    lines = read_metrics(out / "metrics.jsonl")
    steps = [line for line in lines if "seconds" in line]
    evaluations = [line for line in lines if "accuracy" in line]
    told = [f"{len(steps)} steps in {out}"]
    if evaluations:
        first = evaluations[0]
        last = evaluations[-1]
        told.append(
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
        told.append(f"reward {begin:.4g} -> {end:.4g} (means of {tenth})")
        told.append(f"{seconds:.1f} s, {tokens / seconds:.0f} sampled tokens a second")
    (out / "summary.txt").write_text("".join(f"{text}\n" for text in told))
