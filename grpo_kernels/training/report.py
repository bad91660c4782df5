"""The records of a run: one JSON line per step and a picture of the curves."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ..formulas.filters import EntropyQuantile
from ..objective import Objective
from . import require
from .config import TrainConfig
from .losses import LossParts
from .output import OutputFolder
from .ranks import Ranks
from .rewards import Scores

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


def _dump(line: dict[str, Any]) -> str:
    """A line of JSON; NaN and infinity, which JSON lacks, become null."""
    known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    return json.dumps(known, allow_nan=False) + "\n"


class MetricsLog:
    """metrics.jsonl, one object per line, on disk when `write` returns."""

    def __init__(self, path: Path, resume_at: int) -> None:
        """Lines of steps from `resume_at` on, which a resumed run writes again, are dropped."""
        if path.exists():
            draft = path.with_suffix(".draft")
            kept = [line for line in read_metrics(path) if line["step"] < resume_at]
            draft.write_text("".join(_dump(line) for line in kept))
            draft.replace(path)
        self.file = open(path, "a")

    def write(self, line: dict[str, Any]) -> None:
        self.file.write(_dump(line))
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class RunLog:
    """What rank 0, which alone has the files, keeps of a run: its metrics, a progress bar, and at the end the picture."""

    def __init__(self, config: TrainConfig, folder: OutputFolder, ranks: Ranks, step: int) -> None:
        self.folder, self.ranks = folder, ranks
        shown = config.progress and ranks.main
        self.bar = require("tqdm").tqdm(total=config.steps, initial=step, disable=not shown, desc="grpo")
        # A run that is complete keeps the evaluation after its last step.
        self.metrics = MetricsLog(folder.metrics, resume_at=step + (step >= config.steps)) if ranks.main else None

    def write(self, line: dict[str, Any]) -> None:
        def on_main() -> None:
            assert self.metrics is not None
            self.metrics.write(line)

        self.ranks.on_main(on_main)
        if "loss" in line:  # of a step, and not of the last evaluation alone
            self.bar.update()
            self.bar.set_postfix({k: f"{line[k]:.3g}" for k in ("reward", "kl", "entropy") if k in line})

    def close(self) -> None:
        self.bar.close()
        if self.metrics is None:
            return
        self.metrics.close()
        try:
            plot(self.folder.metrics, self.folder.picture)
        except Exception as error:  # without a picture a run is one all the same
            print(f"{self.folder.picture} is not drawn: {type(error).__name__}: {error}", file=sys.stderr)


def timing(scores: Scores, started: float, sampled: float) -> dict[str, float]:
    """Of a step that began at `started`, had its completions at `sampled`, and ends now."""
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "sampling_seconds": sampled - started,
        "tokens_per_second": sum(scores.lengths) / seconds,
    }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines, without what a crash while writing leaves: a partial last line, or NUL bytes."""
    return [line for line in map(_parsed, _texts(path)) if line is not None]


def damaged_from(path: Path) -> int | None:
    """The first step whose line a crash has damaged; None where all lines are whole, or there is no file."""
    step = 0
    for text in _texts(path) if path.exists() else ():
        line = _parsed(text)
        if line is None:
            return step
        step = line["step"] + 1
    return None


def _texts(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines(keepends=True)


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text) if text.endswith("\n") else None
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


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
