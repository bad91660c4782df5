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
from .rewards import RewardArguments, RewardFunction, Scores, name_of, score

# ---- sampling


def left_pad(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (ids int64 [B, P], attention bool [B, P]) of prompts, padded on the left to width P.

    prompts   the token ids of each of B prompts
    pad_id    the id of padding, where attention is False
    device    device of the results
    """
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
    """Sample `group_size` completions of each prompt. Those of the first prompt come first.

    Each prompt runs through the model once. Its cache is then repeated for the group.

    model           a causal language model of transformers
    prompts         token ids of each prompt
    group_size      completions of each prompt; B = group_size * number of prompts
    max_new_tokens  the largest number of tokens of a completion
    ends            ids that end a completion. The first one is also the padding.
    uniform         float64 [max_new_tokens, B]: numbers in [0, 1) that choose the tokens, see
                    `draw`. None: torch's global generator draws them.
    wants_forward   called after each token with whether any completion is unfinished. Returns
                    whether to run another forward. If ranks must run the same number of forwards,
                    pass a function that returns whether any rank has unfinished completions.
    options         temperature, top_p, top_k and min_p, see `draw`
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    pad_id = ends[0]
    end_ids = torch.tensor(ends, device=device)
    ids, attention = left_pad(prompts, pad_id, device)
    prompt_width = ids.shape[1]
    num_completions = len(ids) * group_size
    cache = require("transformers").DynamicCache(config=model.config)
    unfinished = torch.ones(num_completions, 1, dtype=torch.bool, device=device)
    if uniform is None:
        uniform = torch.rand(max_new_tokens, num_completions, dtype=torch.float64, device=device)
    # Completions for each row of logits: at first a row is a prompt, later it is a completion.
    copies = group_size
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
        # Finished completions run on with the others. What they sample is replaced by padding.
        input_ids = token[:, None]
        ids = torch.cat([ids, input_ids.masked_fill(~unfinished, pad_id)], 1)
        attention = torch.cat([attention, unfinished], 1)
        position_ids = position_ids[:, -1:] + 1
        unfinished = unfinished & ~torch.isin(input_ids, end_ids)
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
    logits: Tensor, uniform: Tensor, copies: int, temperature: float = 1.0, **filters: Any
) -> tuple[Tensor, Tensor, TokenSets | None]:
    """Sample `copies` ids from each of R rows of logits, B = R * copies ids in all.

    logits        float [R, V]
    uniform       float64 [B]: numbers in [0, 1). A number chooses the first id whose cumulative
                  probability exceeds it.
    temperature   divides the logits. 0: the most likely id, with log-prob 0.
    filters       top_p, top_k and min_p, applied in vLLM's order

    Returns (ids, logps, sets). Samples of the same row are adjacent.

    ids     int64 [B]
    logps   fp32 [B]: log-probs of the ids, over the ids that the filters keep
    sets    B sets: the ids that the filters keep of the row of each sample. None if they keep all.
    """
    if temperature == 0:
        greedy = logits.argmax(-1).repeat_interleave(copies)
        return greedy, torch.zeros(len(greedy), device=logits.device), None
    sets = TokenSets.from_logits(logits, temperature=temperature, **filters)
    is_filtered = sets.empty_rows == 0  # an empty set stands for the whole vocabulary
    if is_filtered:
        # Gather the logits of the sets, [R, size of the largest set]. Padding has the id -1.
        ids = sets.padded().long()
        logits = logits.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    else:
        ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    probs = (logits.float() / temperature).softmax(-1)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]  # 1 up to rounding
    thresholds = uniform.view(-1, copies).double() * total
    chosen = torch.searchsorted(cumulative, thresholds, right=True).clamp(max=probs.shape[-1] - 1)
    # By rounding, a threshold near the total may choose a token of probability 0.
    chosen = torch.where(probs.gather(-1, chosen) > 0, chosen, probs.argmax(-1, keepdim=True))
    logps = (probs.gather(-1, chosen) / total).log().float()
    sampled_ids = ids.gather(-1, chosen).flatten()
    if not is_filtered:
        return sampled_ids, logps.flatten(), None
    if copies > 1:
        rows = torch.arange(len(logits), device=logits.device)
        sets = sets.take(rows.repeat_interleave(copies))
    return sampled_ids, logps.flatten(), sets


def sets_of_completions(steps: list[TokenSets], mask: Tensor, padding: int) -> TokenSets | None:
    """Return the sets of the B * T tokens of completions, from the sets of B rows at T steps.

    The set of a token has the ids that top-k, top-p and min-p left when it was sampled.

    steps     the sets of the B tokens that were sampled at each step; [] if nothing was left out
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
    """Samples completions of the policy of a run, and scores them.

    rewards   the reward functions
    ranks     the ranks of the run; all of them must call each method

    Raises ValueError if neither tokenizer nor generation config has an id that ends a completion.
    """

    config: TrainConfig
    policy: ParallelModel
    tokenizer: Any
    rewards: list[RewardFunction]
    ranks: Ranks

    def __post_init__(self) -> None:
        """Find the weight of each reward function, and the ids that end a completion."""
        self.weights = self.config.reward_weights or [1.0] * len(self.rewards)
        # A chat model has several end ids in its generation config: of a turn, and of the text.
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
                    depend on the number of ranks. None: torch's global generator.
        options     temperature, top_p, top_k and min_p

        With top_p, top_k or min_p each token has a candidate set, the ids that they left. The
        result has these sets if `config.replays`, that is if the loss is over them.
        """
        share = self.ranks.share(len(rows))
        num_prompts = len(rows[share])
        # A rank without prompts samples the first one, because all ranks must make the same
        # forwards. Its completions are dropped.
        sampled = share if num_prompts > 0 else slice(1)
        size = (self.config.max_new_tokens, len(rows), group_size)
        uniform = torch.rand(
            size, dtype=torch.float64, device=self.ranks.device, generator=generator
        )
        run = partial(
            sample,
            **options,
            group_size=group_size,
            max_new_tokens=self.config.max_new_tokens,
            ends=self.ends,
            uniform=uniform[:, sampled].flatten(1),
            # Each forward of a sharded model needs all ranks, so sampling goes on until the
            # completions of all ranks are finished.
            wants_forward=self.ranks.any if self.policy.sharded else bool,
        )
        prompts = [row["prompt_ids"] for row in rows[sampled]]
        with self.policy.autocast(self.config.dtype):
            completions = self.policy.without_gradients(run, prompts)
            completions = completions[: num_prompts * group_size]
        if not self.config.replays:
            completions = replace(completions, kept=None)
        return completions

    def score(self, rows: list[Row], completions: Completions, group_size: int) -> Scores:
        """Return the scores of all completions of all ranks.

        rows          the rows of all ranks
        completions   the completions of this rank, `group_size` for each of its rows
        """
        share = self.ranks.share(len(rows))
        row_of_completion = [row for row in rows[share] for _ in range(group_size)]
        tokens = completions.tokens
        # A reward function gets the prompts as an argument of their own.
        names = [name for name in rows[0] if name not in ("prompt", "prompt_ids")]
        arguments = RewardArguments(
            prompts=[row["prompt"] for row in row_of_completion],
            completions=[self.tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens],
            tokens=tokens,
            columns={name: [row[name] for row in row_of_completion] for name in names},
        )
        return score(self.rewards, self.weights, arguments, self.ranks)

    def greedy_rewards(self, rows: list[Row]) -> Tensor:
        """Return [B]: for each completion, the reward of the greedy completion of its prompt.

        rows   the rows of all ranks; B counts `config.group_size` completions for each
        """
        completions = self.sample(rows, group_size=1, temperature=0.0)
        totals = self.score(rows, completions, group_size=1).totals
        return totals.repeat_interleave(self.config.group_size)

    def evaluate(self, rows: list[Row]) -> dict[str, Any]:
        """Sample one completion of each held-out prompt, and return metrics.

        "accuracy" is the share of completions to which the first reward function gives at least 1;
        "accuracy_counts" says so in words. "eval_reward" is the mean of the weighted rewards.

        rows   the held-out rows, the same on all ranks
        """
        start_time = time.perf_counter()
        config = self.config
        batch_size = config.prompts_per_step * config.group_size
        is_right = list[Tensor]()
        rewards = list[Tensor]()
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            generator = torch.Generator(self.ranks.device).manual_seed(config.seed + start)
            completions = self.sample(batch, 1, generator, temperature=config.eval_temperature)
            scores = self.score(batch, completions, group_size=1)
            is_right.append((scores.each[0] >= 1).double())
            rewards.append(scores.totals)
        return {
            "accuracy": torch.cat(is_right).mean().item(),
            "accuracy_counts": f"{name_of(self.rewards[0])} >= 1, {len(rows)} prompts",
            "eval_reward": torch.cat(rewards).mean().item(),
            "eval_seconds": time.perf_counter() - start_time,
        }


# ---- micro-batches


def pieces(rows: Tensor, size: int, ranks: Ranks) -> list[Tensor]:
    """Split `rows` into pieces of `size` elements, the last one shorter.

    All ranks get the same number of pieces. A rank with fewer rows gets empty ones at the end.

    rows   int64 [number of rows of this rank]: numbers of rows
    size   0: one piece
    """
    longest = max(ranks.gather(len(rows)))
    size = size or longest
    return [rows[start : start + size] for start in range(0, longest, size)]


#: The completions of a micro-batch, and the inputs of their loss.
Part = tuple[Completions, TokenBatch]


def micro_batches(
    completions: Completions, batch: TokenBatch, config: TrainConfig, ranks: Ranks
) -> tuple[list[Part], float]:
    """Split a batch into micro-batches of `config.micro_batch` completions.

    Returns (the micro-batches, the share of completions of all ranks that was dropped). With
    `config.drop_zero_variance`, completions whose advantages are all 0 are dropped, because they
    have no gradient. All ranks get the same number of micro-batches.

    completions   the B completions of this rank
    batch         their advantages, mask and weights, in the same order
    """
    assert batch.mask is not None and batch.advantages is not None
    num_completions = len(completions.ids)
    row_ids = torch.arange(num_completions, device=completions.ids.device)
    if config.drop_zero_variance:
        # Advantages are [B], or [B, T] of tokens.
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
        if len(rows) == 0:
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
