"""Completions to look at: the first of a batch every so many steps, with their rewards and advantages."""

from __future__ import annotations

from typing import Any

import torch

from .config import TrainConfig
from .data import Row
from .ranks import Ranks
from .rewards import Scores
from .shown import pair

Tensor = torch.Tensor


class Samples:
    """Takes what has come to the host anyway: texts, rewards and advantages of rank 0's share."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.config, self.main = config, ranks.main
        self.taken: list[dict[str, Any]] = []

    def take(self, step: int, rows: list[Row], scores: Scores, advantages: Tensor) -> None:
        """Of the completions of a step: advantages [B] or [B, T] on the CPU, of which a completion's is the mean."""
        config, self.taken = self.config, []
        if not self.main or not config.sample_every or step % config.sample_every:
            return
        for i, text in enumerate(scores.texts[: config.sample_count]):  # rank 0 has the first ones of all
            length = scores.lengths[i]
            self.taken.append(
                {
                    "prompt": rows[i // config.group_size]["prompt"],
                    "completion": text,
                    "tokens": length,
                    "reward": scores.totals[i].item(),
                    "rewards": {name: values[i].item() for name, values in scores.each.items()},
                    "advantage": advantages[i, ..., :length].mean().item() if advantages.dim() > 1 else advantages[i].item(),
                }
            )


def as_text(step: int, sample: dict[str, Any]) -> str:
    """A sample for the log: prompt and completion on a line each, shortened."""
    parts = ", ".join(f"{name} {value:.3g}" for name, value in sample["rewards"].items()) if len(sample["rewards"]) > 1 else ""
    numbers = f"reward {sample['reward']:.3g}{f' ({parts})' if parts else ''}, advantage {sample['advantage']:+.3g}"
    return f"step {step}: {numbers}, {sample['tokens']} tokens" + pair(sample["prompt"], sample["completion"])
