"""Where the metrics of a run go beside metrics.jsonl: TensorBoard, Weights & Biases, Trackio, MLflow, or one of the caller's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from . import require


class Tracker(Protocol):
    """What the trainer asks of a tracker. It is called on rank 0 alone, once per step, with numbers of the host."""

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """The metrics of a step, by the names of metrics.jsonl."""

    def close(self) -> None: ...


def named(metrics: dict[str, Any]) -> dict[str, float]:
    """The numbers among metrics, in the groups of a dashboard: train/..., eval/..., time/..."""
    grouped = {}
    for name, value in metrics.items():
        if not isinstance(value, (int, float)):
            continue
        if name.endswith("seconds"):
            name = f"time/{name.removesuffix('_seconds').replace('seconds', 'step')}"
        elif name == "accuracy" or name.startswith("eval_"):
            name = f"eval/{name.removeprefix('eval_')}"
        else:
            name = f"train/{name}"
        grouped[name] = float(value)
    return grouped


class TensorBoard:
    """Event files in out/tensorboard; of a resumed run, those of steps that come again are hidden."""

    def __init__(self, out: Path, settings: dict[str, Any], resume_at: int) -> None:
        writer = require("torch.utils.tensorboard").SummaryWriter
        self.writer = writer(str(out / "tensorboard"), purge_step=resume_at or None)
        self.writer.add_text("config", "\n".join(f"    {name}: {value}" for name, value in settings.items()), resume_at)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        for name, value in named(metrics).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of its own for each process, with the name of the folder. Trackio has the same functions."""

    module = "wandb"

    def __init__(self, out: Path, settings: dict[str, Any], resume_at: int) -> None:
        self.api = require(self.module)
        self.api.init(project="grpo_kernels", name=out.name, config=settings)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self.api.log(named(metrics), step=step)

    def close(self) -> None:
        self.api.finish()


class Trackio(WeightsAndBiases):
    module = "trackio"


class MLflow:
    """A run of its own for each process, with the name of the folder, where MLFLOW_TRACKING_URI says."""

    def __init__(self, out: Path, settings: dict[str, Any], resume_at: int) -> None:
        self.api = require("mlflow")
        self.api.set_experiment("grpo_kernels")
        self.api.start_run(run_name=out.name)
        self.api.log_params(settings)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self.api.log_metrics(named(metrics), step=step)

    def close(self) -> None:
        self.api.end_run()


#: Name, which is also that of the package -> its tracker.
TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio, "mlflow": MLflow}


def check(names: Sequence[str]) -> None:
    """Raise ValueError for a tracker whose package is not there."""
    for name in names:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise ValueError(f"log_to={name!r}, but {name} is not installed: pip install {name}, or leave it out.")


class Dashboards:
    """The trackers of a run. One that fails is left out from then on, with a message: the run is worth more."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        for tracker in [*self.trackers]:
            try:
                tracker.log(step, metrics)
            except Exception as error:  # of anybody's code
                self.trackers.remove(tracker)
                print(f"{type(tracker).__name__} gets no more metrics: {type(error).__name__}: {error}", file=sys.stderr)

    def close(self) -> None:
        for tracker in self.trackers:
            try:
                tracker.close()
            except Exception as error:
                print(f"{type(tracker).__name__} is not closed: {type(error).__name__}: {error}", file=sys.stderr)
