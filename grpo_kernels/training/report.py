"""The records of a run: metrics of its steps, samples, progress, and a picture of the curves."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..formulas.filters import EntropyQuantile
from ..objective import Objective
from . import require
from .config import TrainConfig, write
from .losses import LossParts
from .output import JsonLines, OutputFolder, read_metrics
from .ranks import Ranks
from .samples import Samples, as_text
from .trackers import TRACKERS, Dashboards, Tracker

Tensor = torch.Tensor

#: (title, field of a metrics line); panels whose field never appears are left out.
PANELS = (
    ("reward", "reward"),
    ("held-out accuracy", "accuracy"),
    ("KL to the reference", "kl"),
    ("entropy (nats per token)", "entropy"),
)


def of_update(outs: list[LossParts], objective: Objective, ranks: Ranks, *, weighted: bool) -> dict[str, float]:
    """The metrics of an update from those of its parts on all ranks, without what parts do not tell."""
    lines = numbers([out.metrics | {"loss": out.loss / ranks.world} for out in outs])
    metrics = combine([line for part in ranks.gather(lines) for line in part])
    if ranks.world > 1 and objective.filter(EntropyQuantile):
        del metrics["kept"]  # which leaves out a quantile over ranks
    if weighted:
        del metrics["ess"]  # of weighted ratios, whose sum is not among the metrics
    if "clip_low" in metrics:  # losses of users may not tell
        metrics["clip_ratio"] = metrics["clip_low"] + metrics["clip_high"]
    return metrics


def numbers(lines: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """The metrics of micro-batches as numbers: the host waits once."""
    table = torch.stack([torch.stack(list(line.values())) for line in lines]).tolist()
    return [dict(zip(line, values, strict=True)) for line, values in zip(lines, table, strict=True)]


def combine(parts: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of micro-batches as those of the batch: the loss adds up, extremes stay extremes, means weigh by tokens."""
    loss = math.fsum(p["loss"] for p in parts)
    parts = [p for p in parts if p["tokens"] > 0] or parts[:1]  # the extremes of nothing are not the batch's
    tokens = math.fsum(p["tokens"] for p in parts)
    metrics = {"loss": loss, "tokens": tokens}
    for name in parts[0]:
        if name in metrics:
            continue
        values = [p[name] for p in parts]
        if name.endswith("_max") or name.endswith("_min"):
            metrics[name] = max(values) if name.endswith("_max") else min(values)
        else:
            metrics[name] = math.fsum(v * p["tokens"] for v, p in zip(values, parts, strict=True)) / max(tokens, 1.0)
    # (sum of ratios)^2 / (tokens * sum of their squares), of which each part has its own.
    sums = [p["ratio_mean"] * p["tokens"] for p in parts]
    squares = math.fsum(s * s / max(p["tokens"] * p["ess"], 1e-30) for s, p in zip(sums, parts, strict=True))
    metrics["ess"] = math.fsum(sums) ** 2 / max(tokens * squares, 1e-30)
    return metrics


class RunLog:
    """What rank 0, which alone has the files, keeps of a run: options, metrics and samples, and at the end a picture.
    With `config.progress` it shows how the run goes: a bar, or without a terminal a line for each step."""

    def __init__(
        self, config: TrainConfig, folder: OutputFolder, ranks: Ranks, step: int, samples: Samples, trackers: Sequence[Tracker]
    ) -> None:
        self.config, self.folder, self.ranks, self.samples = config, folder, ranks, samples
        self.shown = config.progress and ranks.main
        self.bar = require("tqdm").tqdm(
            total=config.steps, initial=step, disable=not self.shown or not sys.stderr.isatty(), desc="grpo", unit="step"
        )
        # A run that is complete keeps the evaluation after its last step.
        ranks.on_main(lambda: self._open(step + (step >= config.steps), trackers))

    def _open(self, at: int, trackers: Sequence[Tracker]) -> None:
        config, folder = self.config, self.folder
        write(config, folder.config)
        self.metrics, self.sampled = JsonLines(folder.metrics, at), JsonLines(folder.samples, at)
        own = [TRACKERS[name](folder.path, asdict(config), at) for name in config.log_to if name in TRACKERS]
        self.dashboards = Dashboards([*own, *trackers])

    def write(self, line: dict[str, Any]) -> None:
        """The metrics of a step, with the samples that were taken in it."""
        self.ranks.on_main(lambda: self._write(**line))

    def _write(self, step: int, **metrics: Any) -> None:
        self.metrics.log(step, metrics)
        self.dashboards.log(step, metrics)
        for sample in self.samples.taken:
            self.sampled.log(step, sample)
            self.show(as_text(step, sample))
        self.samples.taken = []
        if "accuracy" in metrics:
            self.show(f"step {step}: held-out accuracy {metrics['accuracy']:.3f} ({metrics['accuracy_counts']})")
        if "loss" not in metrics:  # the last evaluation alone
            return
        main = {k: f"{metrics[k]:.3g}" for k in ("reward", "kl", "entropy", "completion_length") if k in metrics}
        self.bar.set_postfix(main, refresh=False)
        self.bar.update()
        if self.bar.disable:
            told = ", ".join(f"{name} {value}" for name, value in main.items())
            self.show(f"step {step}: {told}, {metrics['seconds']:.1f} s, {step + 1} of {self.config.steps} done")

    def show(self, text: str) -> None:
        if self.shown:
            self.bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()
        if not self.ranks.main:
            return
        for file in (self.metrics, self.sampled, self.dashboards):
            file.close()
        try:
            plot(self.folder.metrics, self.folder.picture)
        except Exception as error:  # without a picture a run is one all the same
            print(f"{self.folder.picture} is not drawn: {type(error).__name__}: {error}", file=sys.stderr)


class Stopwatch:
    """Seconds of the parts of a step. Read where the host has just waited for the device, it adds no wait."""

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """What has passed since the last lap belongs to `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now

    def metrics(self, tokens: int, device: torch.device) -> dict[str, float]:
        """Of a step that ends now and sampled so many tokens, with the most memory that the device had, or on the CPU the
        process."""
        seconds = time.perf_counter() - self.began
        process = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process
        parts = {f"{part}_seconds": value for part, value in self.seconds.items()}
        return {"seconds": seconds, **parts, "tokens_per_second": tokens / seconds, "peak_memory_gb": peak / 1e9}


def plot(metrics: Path, picture: Path) -> None:
    """Reward, accuracy, KL and entropy over the steps, on a transparent ground with greys that read on light and dark."""
    require("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(metrics)
    panels = [(title, name) for title, name in PANELS if any(line.get(name) is not None for line in lines)]
    if not panels:
        return
    grey, colour = "#808080", "#3987e5"
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 2.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for spare in grid[len(panels) :]:
        spare.set_visible(False)
    for axes, (title, name) in zip(grid, panels, strict=False):
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        steps, values = zip(*points, strict=True)
        marker = "o" if len(points) < 30 else ""
        axes.plot(steps, values, color=colour, marker=marker, markersize=4, linewidth=1.5)
        counts = next((line["accuracy_counts"] for line in lines if "accuracy_counts" in line), "")
        axes.set_title(f"{title}: {counts}" if name == "accuracy" and counts else title, color=grey, fontsize=11)
        axes.set_xlabel("step", color=grey)
        axes.tick_params(colors=grey)
        axes.grid(color=grey, alpha=0.25, linewidth=0.5)
        axes.patch.set_alpha(0)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(grey)
    draft = picture.with_suffix(".draft.png")
    figure.savefig(draft, dpi=150, transparent=True)
    draft.replace(picture)
