"""Completions of the policy and their rewards: this process samples and scores its share of the prompts."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import Any

import torch

from .config import TrainConfig
from .data import Row
from .ranks import ParallelModel, Ranks
from .reward_calls import RewardFunction, Rewards, call, name_of
from .rewards import Scores, score
from .sampling import Completions, autocast, end_ids, sample

Tensor = torch.Tensor


class Rollouts:
    def __init__(
        self, config: TrainConfig, policy: ParallelModel, tokenizer: Any, rewards: list[RewardFunction], ranks: Ranks
    ) -> None:
        self.config, self.policy, self.tokenizer, self.rewards, self.ranks = config, policy, tokenizer, rewards, ranks
        self.weights = config.reward_weights or [1.0] * len(rewards)
        self.ends = end_ids(policy.model, tokenizer)
        self.dtype = getattr(torch, config.dtype)

    def sample(
        self,
        rows: list[Row],
        group_size: int,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Completions:
        """Completions of this rank's share of the rows. The generator, the same on all ranks, draws for all rows, so that what
        is sampled does not depend on how many processes sample. Without replay the sets are not recorded."""
        share, total, device = self.ranks.share(len(rows)), len(rows) * group_size, self.ranks.device
        prompts = [row["prompt_ids"] for row in rows[share]]
        first, count = share.start * group_size, len(prompts) * group_size

        def uniform() -> Tensor:
            draws = torch.rand(total, dtype=torch.float64, device=device, generator=generator)
            return draws[first : first + count] if prompts else draws[:group_size]

        with autocast(device, self.dtype, cache=not self.policy.sharded):
            completions = self.policy.without_gradients(
                partial(
                    sample, group_size=group_size, max_new_tokens=self.config.max_new_tokens, ends=self.ends,
                    temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, uniform=uniform,
                    wanted=self.ranks.any if self.policy.sharded else bool,
                ),
                prompts or [rows[0]["prompt_ids"]],
            )  # fmt: skip
        completions = completions[:count]
        return completions if self.config.replays else dataclasses.replace(completions, kept=None)

    def score(self, rows: list[Row], completions: Completions, group_size: int) -> Scores:
        """The scores of the completions of all rows, those of other ranks too."""
        repeated = [row for row in rows[self.ranks.share(len(rows))] for _ in range(group_size)]
        tokens = completions.tokens
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]

        def own() -> tuple[list[Rewards], list[int]]:
            rewards = call(
                self.rewards,
                prompts=[row["prompt"] for row in repeated],
                completions=texts,
                tokens=tokens,
                columns={name: [row[name] for row in repeated] for name in rows[0] if name not in ("prompt", "prompt_ids")},
            )
            return rewards, list(map(len, tokens))

        of_ranks = self.ranks.together(own)
        lengths = [n for _, part in of_ranks for n in part]
        functions = zip(*(rewards for rewards, _ in of_ranks), strict=True)
        whole = [Rewards(parts[0].name, [v for part in parts for v in part.values]) for parts in functions]
        return score(whole, self.weights, lengths, texts)

    def greedy_rewards(self, rows: list[Row]) -> Tensor:
        """[B]: for each completion, the reward of the greedy completion of its prompt."""
        totals = self.score(rows, self.sample(rows, 1, temperature=0.0), 1).totals
        return totals.repeat_interleave(self.config.group_size)

    def evaluate(self, rows: list[Row]) -> dict[str, Any]:
        """Held-out prompts, one completion each. "accuracy": the share to which the first reward function gives at least 1, and
        in words what that counts; "eval_reward": the mean of all rewards."""
        size, config = self.config.prompts_per_step * self.config.group_size, self.config
        solved, total, began = 0, 0.0, time.perf_counter()
        for at in range(0, len(rows), size):
            some = rows[at : at + size]
            generator = torch.Generator(self.ranks.device).manual_seed(config.seed + at)
            scores = self.score(some, self.sample(some, 1, config.eval_temperature, generator=generator), 1)
            solved += int((scores.first >= 1).sum())
            total += float(scores.totals.sum())
        counts = f"{name_of(self.rewards[0])} >= 1, {len(rows)} prompts"
        means = {"accuracy": solved / len(rows), "accuracy_counts": counts, "eval_reward": total / len(rows)}
        return means | {"eval_seconds": time.perf_counter() - began}
