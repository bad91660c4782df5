"""Completions of the policy, sampled, scored and cut into micro-batches: each process does so with
its share of the prompts.

Shape suffixes: B completions, P prompt width, T completion width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..batch import TokenBatch
from ..token_sets import TokenSets
from . import Ranks, require
from .config import TrainConfig
from .data import Row
from .policy import Completions, ParallelModel, positions
from .rewards import Asked, RewardFunction, Scores, name_of, score

# ---- sampling


def left_pad(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids [B, P], attention [B, P] bool)"""
    ids = [torch.tensor(prompt, device=device) for prompt in prompts]
    padded = partial(pad_sequence, batch_first=True, padding_side="left")
    return padded(ids, padding_value=pad_id), padded(
        [torch.ones_like(x, dtype=torch.bool) for x in ids]
    )


@torch.no_grad()
def sample(
    model: Any,
    prompts: list[list[int]],
    *,
    group_size: int,
    max_new_tokens: int,
    ends: list[int],
    uniform: Tensor | None = None,
    wanted: Callable[[bool], bool] = bool,
    **how: Any,
) -> Completions:
    """`group_size` completions of each prompt, one prompt after the other, with the
    temperature and cuts of `draw`, and its sets.

    uniform   [max_new_tokens, B]: numbers in [0, 1) that choose the tokens. None: torch's own
              generator.
    wanted    called after each token with whether a completion goes on: whether to make another
              forward. Ranks that have to make the same number of forwards ask each other here.

    Each prompt runs through the model once; its cache is then repeated for the group.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    ids, attention = left_pad(prompts, ends[0], device)
    cache = require("transformers").DynamicCache(config=model.config)
    copies = group_size  # a group draws its first tokens from one row
    alive = torch.ones(len(ids) * group_size, 1, dtype=torch.bool, device=device)
    if uniform is None:
        uniform = torch.rand(max_new_tokens, len(alive), dtype=torch.float64, device=device)
    prompt_width = ids.shape[1]
    fed = ids
    at = positions(attention)
    logps = list[Tensor]()
    kept = list[TokenSets]()
    while True:
        logits = model(
            input_ids=fed, attention_mask=attention.long(), position_ids=at, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]  # fmt: skip
        token, logp, sets = draw(logits, uniform[len(logps)], copies, **how)
        if copies > 1:
            cache.batch_repeat_interleave(copies)
            ids, attention, at = (x.repeat_interleave(copies, 0) for x in (ids, attention, at))
            copies = 1
        logps.append(logp[:, None])
        kept += [] if sets is None else [sets]
        fed = token[:, None]
        ids = torch.cat([ids, fed.masked_fill(~alive, ends[0])], 1)
        attention = torch.cat([attention, alive], 1)
        at = at[:, -1:] + 1
        alive = alive & ~torch.isin(fed, torch.tensor(ends, device=device))
        if len(logps) == max_new_tokens or not wanted(bool(alive.any())):
            break
    model.train(training)
    sets = by_completion(kept, attention[:, prompt_width:], ends[0])
    return Completions(ids, attention, prompt_width, torch.cat(logps, 1), ~alive[:, 0], sets)


def draw(
    logits: Tensor, uniform: Tensor, copies: int, temperature: float = 1.0, **cuts: Any
) -> tuple[Tensor, Tensor, TokenSets | None]:
    """`copies` ids per row of logits [R, V], side by side: B = R * copies ids, each where the
    cumulative probability passes its number of `uniform`, temperature 0 is greedy; their log-probs;
    and the sets of ids that top_p, top_k and min_p among `cuts` left, in the order of vLLM, None if
    nothing is cut off.
    """
    if temperature == 0:
        greedy = logits.argmax(-1).repeat_interleave(copies)
        return greedy, torch.zeros(len(greedy), device=logits.device), None
    sets = TokenSets.from_logits(logits, temperature=temperature, **cuts)
    cut = sets.empty_rows == 0
    ids = (
        sets.padded().long()
        if cut
        else torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    )
    if cut:
        logits = logits.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    probs = (logits.float() / temperature).softmax(-1)
    below = probs.cumsum(-1, dtype=torch.float64)
    at = uniform.view(-1, copies).double() * below[:, -1:]
    chosen = torch.searchsorted(below, at, right=True).clamp(max=probs.shape[-1] - 1)
    # At the very end of the range rounding can point at a token that cannot come.
    chosen = torch.where(probs.gather(-1, chosen) > 0, chosen, probs.argmax(-1, keepdim=True))
    logps = (probs.gather(-1, chosen) / below[:, -1:]).log().float()
    if cut and copies > 1:
        sets = sets.take(torch.arange(len(logits), device=logits.device).repeat_interleave(copies))
    return ids.gather(-1, chosen).flatten(), logps.flatten(), sets if cut else None


def by_completion(steps: list[TokenSets], mask: Tensor, padding: int) -> TokenSets | None:
    """Sets of B rows for each of T steps, as those of the B * T tokens of a batch. Behind its end a
    completion has nothing but padding, which is then the only id of its set: no row stands for the
    whole vocabulary. None if there are no sets.
    """
    if not steps:
        return None
    count, width = mask.shape
    numbers = torch.arange(count * width, device=mask.device).view(width, count).T
    only = TokenSets.from_lists([[padding]], device=mask.device)
    return TokenSets.cat([*steps, only]).take(torch.where(mask, numbers, count * width).flatten())


# ---- the rollouts of a run


@dataclass
class Rollouts:
    """Samples completions of a run's policy, and scores them."""

    config: TrainConfig
    policy: ParallelModel
    tokenizer: Any
    rewards: list[RewardFunction]
    ranks: Ranks

    def __post_init__(self) -> None:
        self.weights = self.config.reward_weights or [1.0] * len(self.rewards)
        # Every id that ends a completion: the tokenizer's, and those of the generation config (a
        # chat model has several).
        configured = getattr(
            getattr(self.policy.model, "generation_config", None), "eos_token_id", None
        )
        ids = {
            *(configured if isinstance(configured, list) else [configured]),
            self.tokenizer.eos_token_id,
        } - {None}
        if not ids:
            raise ValueError(
                "eos_token_id is None in the tokenizer and the generation config: set one, or"
                " completions never end."
            )
        self.ends = sorted(ids)

    def sample(
        self,
        rows: list[Row],
        group_size: int,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Completions:
        """Completions of this rank's share of the rows, sampled with `options` of `sample`. The
        generator, the same on all ranks, draws for all rows, so that what is sampled does not
        depend on how many processes sample. Without replay the sets are not recorded.
        """
        share = self.ranks.share(len(rows))
        size = (self.config.max_new_tokens, len(rows), group_size)
        draws = torch.rand(size, dtype=torch.float64, device=self.ranks.device, generator=generator)
        # A rank without prompts makes the forwards of the others all the same.
        some, count = (share, len(rows[share])) if rows[share] else (slice(1), 0)
        how = dict(
            options,
            group_size=group_size,
            max_new_tokens=size[0],
            ends=self.ends,
            uniform=draws[:, some].flatten(1),
        )
        how["wanted"] = self.ranks.any if self.policy.sharded else bool
        with self.policy.autocast(self.config.dtype):
            drawn = self.policy.without_gradients(
                partial(sample, **how), [row["prompt_ids"] for row in rows[some]]
            )
            drawn = drawn[: count * group_size]
        return drawn if self.config.replays else replace(drawn, kept=None)

    def score(self, rows: list[Row], completions: Completions, group_size: int) -> Scores:
        """The scores of the completions of all rows, those of other ranks too."""
        repeated = [row for row in rows[self.ranks.share(len(rows))] for _ in range(group_size)]
        tokens = completions.tokens
        columns = {
            name: [row[name] for row in repeated]
            for name in rows[0]
            if name not in ("prompt", "prompt_ids")
        }
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]
        asked = Asked([row["prompt"] for row in repeated], texts, tokens, columns)
        return score(self.rewards, self.weights, asked, self.ranks)

    def greedy_rewards(self, rows: list[Row]) -> Tensor:
        """[B]: for each completion, the reward of the greedy completion of its prompt."""
        totals = self.score(rows, self.sample(rows, 1, temperature=0.0), 1).totals
        return totals.repeat_interleave(self.config.group_size)

    def evaluate(self, rows: list[Row]) -> dict[str, Any]:
        """Held-out prompts, one completion each. "accuracy": the share to which the first reward
        function gives at least 1, and in words what that counts; "eval_reward": the mean of all
        rewards.
        """
        began, size, config, found = (
            time.perf_counter(),
            self.config.prompts_per_step * self.config.group_size,
            self.config,
            [],
        )
        for at in range(0, len(rows), size):
            some = rows[at : at + size]
            generator = torch.Generator(self.ranks.device).manual_seed(config.seed + at)
            scores = self.score(
                some, self.sample(some, 1, generator, temperature=config.eval_temperature), 1
            )
            found.append(torch.stack([(scores.each[0] >= 1).double(), scores.totals]))
        accuracy, reward = torch.cat(found, 1).mean(1).tolist()
        counts = f"{name_of(self.rewards[0])} >= 1, {len(rows)} prompts"
        told = {"accuracy": accuracy, "accuracy_counts": counts, "eval_reward": reward}
        return told | {"eval_seconds": time.perf_counter() - began}


# ---- micro-batches


def pieces(rows: Tensor, size: int, ranks: Ranks) -> list[Tensor]:
    """`rows` cut into pieces of `size` (0:

    all), as many on every rank as on the one that has the most; those beyond are empty.
    """
    counts = ranks.gather(len(rows))
    size = size or max(counts)
    return [rows[at : at + size] for at in range(0, max(counts), size)]


#: Some completions, and the inputs of their loss.
Part = tuple[Completions, TokenBatch]


def micro_batches(
    completions: Completions, batch: TokenBatch, config: TrainConfig, ranks: Ranks
) -> tuple[list[Part], float]:
    """Return parts of `config.micro_batch` completions, as many on every rank, and the share of
    completions that was left out because they have no gradient.
    """
    assert batch.mask is not None and batch.advantages is not None
    total = len(completions.ids)
    kept = torch.arange(total, device=completions.ids.device)
    if config.drop_zero_variance:
        has_gradient = (batch.advantages.reshape(total, -1) != 0).any(1)
        if not ranks.any(bool(has_gradient.any())):
            has_gradient[0] = (
                ranks.main
            )  # an update of nothing is still one: the optimizer's averages decay
        kept = kept[has_gradient]
    parts = []
    for rows in pieces(kept, config.micro_batch, ranks):
        mask = batch.mask[rows]
        if not len(rows):  # a pass for the others
            rows = kept.new_zeros(1)
            mask = torch.zeros_like(batch.mask[:1])
        weights = None if batch.weights is None else batch.weights[rows]
        some = completions[rows]
        of_loss = TokenBatch(
            some.targets, batch.advantages[rows], mask=mask, weights=weights, kept=some.kept
        )
        parts.append((some, of_loss))
    counts, totals = zip(*ranks.gather((len(kept), total)), strict=True)
    return parts, 1 - sum(counts) / sum(totals)
