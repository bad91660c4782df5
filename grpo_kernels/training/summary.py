"""What a run came to, from its metrics."""

from __future__ import annotations

import math
from typing import Any

from .output import OutputFolder, read_metrics

#: Part of a step -> how it is called.
PARTS = {
    "sampling_seconds": "sampling", "reward_seconds": "rewards", "gradient_seconds": "loss and gradient",
    "optimizer_seconds": "optimizer",
}  # fmt: skip


def write(folder: OutputFolder) -> None:
    folder.summary.write_text(summary(read_metrics(folder.metrics), folder))


def summary(lines: list[dict[str, Any]], folder: OutputFolder) -> str:
    """Evaluations before and after, the best step, where the time went, memory, files: lines of text."""
    steps = [line for line in lines if line.get("loss") is not None or "seconds" in line]
    evaluations = [line for line in lines if "accuracy" in line]
    told = [f"{len(steps)} step{'' if len(steps) == 1 else 's'}"]
    if len(evaluations) > 1:
        first, last = evaluations[0], evaluations[-1]
        best = max(evaluations, key=lambda line: line["accuracy"])  # which stands before the step of its line
        told.append(f"held-out accuracy   {first['accuracy']:.3f} -> {last['accuracy']:.3f} ({last['accuracy_counts']})")
        told.append(f"held-out reward     {first['eval_reward']:.4g} -> {last['eval_reward']:.4g}")
        told.append(f"best evaluation     {best['accuracy']:.3f} after {best['step']} steps")
    if steps:
        best = max(steps, key=lambda line: line["reward"])
        span = max(1, len(steps) // 10)
        told.append(
            f"reward              {_mean(steps[:span]):.4g} -> {_mean(steps[-span:]):.4g} (means of {span}), best {best['reward']:.4g} in "
            f"step {best['step']}"
        )
        told += _times(steps, evaluations)
    files = [folder.metrics, folder.samples, folder.picture, folder.config, folder.checkpoints, folder.model]
    told.append(f"files               {folder.path}: " + ", ".join(path.name for path in files if path.exists()))
    return "\n".join(told) + "\n"


def _mean(lines: list[dict[str, Any]]) -> float:
    return math.fsum(line["reward"] for line in lines) / len(lines)


def _times(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> list[str]:
    total = math.fsum(line["seconds"] for line in steps)
    tokens = math.fsum(line["tokens_per_second"] * line["seconds"] for line in steps)
    split = {name: math.fsum(line.get(part) or 0.0 for line in steps) for part, name in PARTS.items()}
    split["the rest"] = total - math.fsum(split.values())
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in split.items())
    evaluating = math.fsum(line.get("eval_seconds") or 0.0 for line in evaluations)
    peak = max(line.get("peak_memory_gb") or 0.0 for line in steps)
    return [
        f"time of the steps   {total:.1f} s: {shares}",
        f"evaluations         {evaluating:.1f} s",
        f"speed               {tokens / total:.0f} sampled tokens a second, of whole steps",
        f"peak memory         {peak:.2f} GB",
    ]
