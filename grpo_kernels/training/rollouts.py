"""Sample completions of the policy, score them, and split them into micro-batches. Each rank does
this for its share of the prompts.

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
    """Return (ids [B, P], attention bool [B, P]) of prompts, padded on the left to width P."""
    ids = [torch.tensor(prompt, device=device) for prompt in prompts]
    is_prompt = [torch.ones_like(x, dtype=torch.bool) for x in ids]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    return pad(ids, padding_value=pad_id), pad(is_prompt)


@torch.no_grad()
def sample(
    model: Any,
    prompts: list[list[int]],
    *,
    group_size: int,
    max_new_tokens: int,
    ends: list[int],
    uniform: Tensor | None = None,
    wants_forward: Callable[[bool], bool] = bool,
    **options: Any,
) -> Completions:
    """Sample `group_size` completions of each prompt, one prompt after the other.

    prompts         ids of each prompt
    ends            ids that end a completion. The first one is also the padding.
    uniform         [max_new_tokens, B]: numbers in [0, 1) that choose the tokens. None: torch's own
                    generator draws them.
    wants_forward   called after each token with whether any completion is unfinished. Returns
                    whether to make another forward. Ranks that must make the same number of
                    forwards ask each other here.
    options         temperature, top_p, top_k and min_p, see `draw`

    Each prompt runs through the model once. Its cache is then repeated for the group.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    pad_id = ends[0]
    ids, attention = left_pad(prompts, pad_id, device)
    prompt_width = ids.shape[1]
    num_completions = len(ids) * group_size
    cache = require("transformers").DynamicCache(config=model.config)
    unfinished = torch.ones(num_completions, 1, dtype=torch.bool, device=device)
    if uniform is None:
        uniform = torch.rand(max_new_tokens, num_completions, dtype=torch.float64, device=device)
    copies = group_size  # completions for each row of logits: the group at first, then one
    input_ids = ids
    position_ids = positions(attention)
    logps = list[Tensor]()
    sets = list[TokenSets]()
    while True:
        logits = model(
            input_ids=input_ids,
            attention_mask=attention.long(),
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        token, logp, step_sets = draw(logits, uniform[len(logps)], copies, **options)
        if copies > 1:
            cache.batch_repeat_interleave(copies)
            ids = ids.repeat_interleave(copies, 0)
            attention = attention.repeat_interleave(copies, 0)
            position_ids = position_ids.repeat_interleave(copies, 0)
            copies = 1
        logps.append(logp[:, None])
        if step_sets is not None:
            sets.append(step_sets)
        input_ids = token[:, None]
        ids = torch.cat([ids, input_ids.masked_fill(~unfinished, pad_id)], 1)
        attention = torch.cat([attention, unfinished], 1)
        position_ids = position_ids[:, -1:] + 1
        unfinished = unfinished & ~torch.isin(input_ids, torch.tensor(ends, device=device))
        if len(logps) == max_new_tokens or not wants_forward(bool(unfinished.any())):
            break
    model.train(was_training)
    return Completions(
        ids,
        attention,
        prompt_width,
        logps=torch.cat(logps, 1),
        finished=~unfinished[:, 0],
        kept=sets_of_completions(sets, attention[:, prompt_width:], pad_id),
    )


def draw(
    logits: Tensor, uniform: Tensor, copies: int, temperature: float = 1.0, **cuts: Any
) -> tuple[Tensor, Tensor, TokenSets | None]:
    """Sample `copies` ids from each row of logits. Return (ids, log-probs, sets), each of B rows.

    logits        [R, V]; B = R * copies, and the copies of a row are adjacent
    uniform       [B]: numbers in [0, 1). A number chooses the first id whose cumulative probability
                  exceeds it.
    temperature   0: the most likely id, with log-prob 0
    cuts          top_p, top_k and min_p, in vLLM's order

    The sets are the ids that the cuts left, None if they left all. Log-probs are over these ids.
    """
    if temperature == 0:
        greedy = logits.argmax(-1).repeat_interleave(copies)
        return greedy, torch.zeros(len(greedy), device=logits.device), None
    sets = TokenSets.from_logits(logits, temperature=temperature, **cuts)
    is_cut = sets.empty_rows == 0  # an empty set stands for the whole vocabulary
    if is_cut:
        ids = sets.padded().long()
        logits = logits.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    else:
        ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    probs = (logits.float() / temperature).softmax(-1)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    thresholds = uniform.view(-1, copies).double() * total
    chosen = torch.searchsorted(cumulative, thresholds, right=True).clamp(max=probs.shape[-1] - 1)
    # By rounding, a threshold near the total may choose a token of probability 0.
    chosen = torch.where(probs.gather(-1, chosen) > 0, chosen, probs.argmax(-1, keepdim=True))
    logps = (probs.gather(-1, chosen) / total).log().float()
    if is_cut and copies > 1:
        rows = torch.arange(len(logits), device=logits.device)
        sets = sets.take(rows.repeat_interleave(copies))
    return ids.gather(-1, chosen).flatten(), logps.flatten(), sets if is_cut else None


def sets_of_completions(steps: list[TokenSets], mask: Tensor, padding: int) -> TokenSets | None:
    """Return the sets of the B * T tokens of completions, from the sets of B rows at T steps.

    mask      bool [B, T]: sampled tokens
    padding   the id after the end of a completion. It is the only id of its set there, because an
              empty set would stand for the whole vocabulary.

    Returns None if there are no sets.
    """
    if not steps:
        return None
    num_completions, width = mask.shape
    num_tokens = num_completions * width
    # Token (b, t) has the row t * B + b in the sets of all steps; the row behind them is padding.
    token_rows = torch.arange(num_tokens, device=mask.device).view(width, num_completions).T
    padding_set = TokenSets.from_lists([[padding]], device=mask.device)
    rows = torch.where(mask, token_rows, num_tokens)
    return TokenSets.cat([*steps, padding_set]).take(rows.flatten())


# ---- the rollouts of a run


@dataclass
class Rollouts:
    """Samples completions of the policy of a run, and scores them."""

    config: TrainConfig
    policy: ParallelModel
    tokenizer: Any
    rewards: list[RewardFunction]
    ranks: Ranks

    def __post_init__(self) -> None:
        self.weights = self.config.reward_weights or [1.0] * len(self.rewards)
        # The ids that end a completion: the tokenizer's, and those of the generation config, of
        # which a chat model has several.
        generation_config = getattr(self.policy.model, "generation_config", None)
        configured = getattr(generation_config, "eos_token_id", None)
        if not isinstance(configured, list):
            configured = [configured]
        ids = {*configured, self.tokenizer.eos_token_id} - {None}
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
        """Sample `group_size` completions of each of this rank's prompts.

        rows        the rows of all ranks. Each rank takes its share.
        generator   the same on all ranks. It draws numbers for all rows, so that the samples do not
                    depend on the number of ranks.
        options     temperature, top_p, top_k and min_p

        The sets that tokens were sampled from are dropped unless `config.replays`.
        """
        share = self.ranks.share(len(rows))
        num_own = len(rows[share])
        size = (self.config.max_new_tokens, len(rows), group_size)
        draws = torch.rand(size, dtype=torch.float64, device=self.ranks.device, generator=generator)
        # A rank without prompts samples the first one, because all ranks must make the same
        # forwards. Its completions are dropped.
        sampled = share if num_own else slice(1)
        run = partial(
            sample,
            **options,
            group_size=group_size,
            max_new_tokens=self.config.max_new_tokens,
            ends=self.ends,
            uniform=draws[:, sampled].flatten(1),
            wants_forward=self.ranks.any if self.policy.sharded else bool,
        )
        with self.policy.autocast(self.config.dtype):
            prompts = [row["prompt_ids"] for row in rows[sampled]]
            completions = self.policy.without_gradients(run, prompts)
            completions = completions[: num_own * group_size]
        return completions if self.config.replays else replace(completions, kept=None)

    def score(self, rows: list[Row], completions: Completions, group_size: int) -> Scores:
        """Return the scores of all completions of all ranks.

        rows          the rows of all ranks
        completions   those of this rank
        """
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
        """Return [B]: for each completion, the reward of the greedy completion of its prompt."""
        completions = self.sample(rows, group_size=1, temperature=0.0)
        totals = self.score(rows, completions, group_size=1).totals
        return totals.repeat_interleave(self.config.group_size)

    def evaluate(self, rows: list[Row]) -> dict[str, Any]:
        """Sample one completion of each held-out prompt, and return metrics.

        "accuracy" is the share of completions to which the first reward function gives at least 1;
        "accuracy_counts" says so in words. "eval_reward" is the mean of the weighted rewards.
        """
        start_time = time.perf_counter()
        config = self.config
        batch_size = config.prompts_per_step * config.group_size
        results = list[Tensor]()  # [2, prompts] each
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            generator = torch.Generator(self.ranks.device).manual_seed(config.seed + start)
            completions = self.sample(batch, 1, generator, temperature=config.eval_temperature)
            scores = self.score(batch, completions, group_size=1)
            results.append(torch.stack([(scores.each[0] >= 1).double(), scores.totals]))
        accuracy, reward = torch.cat(results, 1).mean(1).tolist()
        return {
            "accuracy": accuracy,
            "accuracy_counts": f"{name_of(self.rewards[0])} >= 1, {len(rows)} prompts",
            "eval_reward": reward,
            "eval_seconds": time.perf_counter() - start_time,
        }


# ---- micro-batches


def pieces(rows: Tensor, size: int, ranks: Ranks) -> list[Tensor]:
    """Split `rows` into pieces of `size` rows, 0 for one piece.

    All ranks get the same number of pieces. A rank with fewer rows gets empty ones at the end.
    """
    most = max(ranks.gather(len(rows)))
    size = size or most
    return [rows[start : start + size] for start in range(0, most, size)]


#: The completions of a micro-batch, and the inputs of their loss.
Part = tuple[Completions, TokenBatch]


def micro_batches(
    completions: Completions, batch: TokenBatch, config: TrainConfig, ranks: Ranks
) -> tuple[list[Part], float]:
    """Split a batch into micro-batches of `config.micro_batch` completions.

    Returns (the micro-batches, the share of completions of all ranks that was dropped). With
    `config.drop_zero_variance`, completions whose advantages are all 0 are dropped, because they
    have no gradient. All ranks get the same number of micro-batches.

    completions   the completions of this rank
    batch         their advantages, mask and weights, in the same order
    """
    assert batch.mask is not None and batch.advantages is not None
    num_completions = len(completions.ids)
    row_ids = torch.arange(num_completions, device=completions.ids.device)
    if config.drop_zero_variance:
        has_gradient = (batch.advantages.reshape(num_completions, -1) != 0).any(1)
        if not ranks.any(bool(has_gradient.any())):
            # Without gradients the optimizer would skip the parameters. With gradients of 0 it
            # decays its moving averages, as it does without this option. So the main rank keeps
            # one completion.
            has_gradient[0] = ranks.main
        row_ids = row_ids[has_gradient]
    parts = []
    for rows in pieces(row_ids, config.micro_batch, ranks):
        mask = batch.mask[rows]
        if not len(rows):
            # Other ranks have more micro-batches, and a pass of a sharded model needs all ranks.
            # Take part with a completion without trained tokens.
            rows = row_ids.new_zeros(1)
            mask = torch.zeros_like(batch.mask[:1])
        part = completions[rows]
        weights = None if batch.weights is None else batch.weights[rows]
        part_batch = TokenBatch(
            part.targets, batch.advantages[rows], mask=mask, weights=weights, kept=part.kept
        )
        parts.append((part, part_batch))
    num_used, num_total = zip(*ranks.gather((len(row_ids), num_completions)), strict=True)
    return parts, 1 - sum(num_used) / sum(num_total)
