"""Credit assignment: the advantages of a batch by the configured estimator, and the corrections for the sampler's mismatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..batch import TokenBatch
from .config import TrainConfig
from .data import Row
from .losses import Losses
from .ranks import ParallelModel, Ranks
from .rewards import Scores, advantages
from .rollouts import Rollouts
from .sampling import Completions

Tensor = torch.Tensor


class Credit:
    def __init__(self, config: TrainConfig, policy: ParallelModel, losses: Losses, rollouts: Rollouts, ranks: Ranks) -> None:
        self.config, self.policy, self.losses, self.rollouts, self.ranks = config, policy, losses, rollouts, ranks

    def advantages(self, rows: list[Row], completions: Completions, scores: Scores) -> Tensor:
        """Advantages of this rank's completions on the CPU, [B] or [B, T], estimated from the scores of all ranks."""
        needs, size, known = (
            self.config.estimator(self.config.advantages).func.needs,
            self.config.group_size,
            dict[str, Tensor](),
        )
        if "greedy_rewards" in needs:
            known["greedy_rewards"] = self.rollouts.greedy_rewards(rows)
        for name, function in (("old_logps", self.losses.logps), ("sum_squares", self.losses.sum_squares)):
            if name in needs:
                part = self._of_policy(function, completions).cpu()
                padded = torch.nn.functional.pad(part, (0, max(scores.lengths) - part.shape[1]))
                known[name] = torch.cat(self.ranks.gather(padded))
        of_all = advantages(
            scores, self.config.estimator(self.config.advantages), self.config.estimator("process"), group_size=size, **known
        )
        prompts = self.ranks.share(self.config.prompts_per_step)
        own = of_all[prompts.start * size : prompts.stop * size]
        return own if own.dim() == 1 else own[:, : completions.targets.shape[1]]

    def batch(self, completions: Completions, of_each: Tensor) -> TokenBatch:
        """Completions and their advantages, with the weights and masks that the config names for what the sampler did otherwise
        than the policy that is trained. Without old log-probs, which the update knows."""
        batch = TokenBatch(completions.targets, of_each.to(self.ranks.device), mask=completions.mask, kept=completions.kept)
        if not self.config.corrections:
            return batch
        old = self._of_policy(self.losses.logps, completions)
        batch = dataclasses.replace(batch, old_logps=old, sampler_logps=completions.logps)
        group = torch.distributed.group.WORLD if self.ranks.world > 1 else None
        batch = self.config.corrected(batch, finished=completions.finished, process_group=group)
        return dataclasses.replace(batch, old_logps=None, sampler_logps=None)

    def _of_policy(self, function: Any, completions: Completions) -> Tensor:
        """Numbers per token [B, T] under the current policy, 0 at padding."""
        count = len(completions.ids)
        size = self.config.micro_batch or count
        parts = [completions[at : at + size] for at in range(0, count, size)]
        parts += [completions[:1]] * (max(self.ranks.gather(len(parts))) - len(parts))  # every rank makes as many passes
        passes = [self.policy.without_gradients(function, part) for part in parts]
        return torch.cat(passes)[:count] * completions.mask
