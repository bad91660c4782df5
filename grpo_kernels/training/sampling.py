"""Completions of the policy, and the logits that the loss needs of them.

Shape suffixes: B completions, P prompt width, T completion width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..token_sets import TokenSets
from . import require

Tensor = torch.Tensor


@dataclass(frozen=True)
class Completions:
    """Left-padded prompts, each followed by its completion."""

    ids: Tensor  # [B, P + T] int64
    attention: Tensor  # [B, P + T] bool: prompt tokens and completion tokens up to and including the first end token
    prompt_width: int  # P
    logps: Tensor | None = None  # [B, T] fp32: of each token under what it was drawn from: temperature, top-k, top-p, min-p
    finished: Tensor | None = None  # [B] bool: an end token was sampled, and not only the budget used up
    kept: TokenSets | None = None  # the set that each token was drawn from, B * T rows; None: all from the whole vocabulary

    @property
    def targets(self) -> Tensor:
        """[B, T]"""
        return self.ids[:, self.prompt_width :]

    @property
    def mask(self) -> Tensor:
        """[B, T]: the tokens that were sampled, known from when sampling stopped and not from the padding id."""
        return self.attention[:, self.prompt_width :]

    @property
    def tokens(self) -> list[list[int]]:
        """The sampled ids of each completion, the end token included."""
        rows = zip(self.targets.tolist(), self.mask.sum(1).tolist(), strict=True)
        return [ids[:length] for ids, length in rows]

    def __getitem__(self, rows: slice | Tensor) -> Completions:
        logps, finished = (None if x is None else x[rows] for x in (self.logps, self.finished))
        kept = self.kept
        if kept is not None:
            numbers = torch.arange(kept.rows, device=self.ids.device).view(self.targets.shape)
            kept = kept.take(numbers[rows].flatten())
        return Completions(self.ids[rows], self.attention[rows], self.prompt_width, logps, finished, kept)


def autocast(device: torch.device, dtype: torch.dtype, cache: bool = True) -> AbstractContextManager:
    """cache: keep the weights' copies in `dtype` until it ends; of gathered shards they would become the whole model."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype, cache_enabled=cache)


def completion_logits(model: Any, completions: Completions) -> Tensor:
    """Logits [B, T, V] whose row t predicts completion token t.

    The last token predicts nothing and is not fed; of what is fed, only the last T positions go through the head."""
    ids, attention = completions.ids[:, :-1], completions.attention[:, :-1]
    width = completions.targets.shape[1]
    out = model(
        input_ids=ids, attention_mask=attention.long(), position_ids=positions(attention), logits_to_keep=width, use_cache=False
    )
    if out.logits.shape[1] != width:
        raise ValueError(
            f"{type(model).__name__} gives {out.logits.shape[1]} logits for logits_to_keep={width}: it ignores that."
        )
    return out.logits


def positions(attention: Tensor) -> Tensor:
    """Positions count real tokens, so that left padding moves nothing."""
    return (attention.long().cumsum(1) - 1).clamp(min=0)


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: the tokenizer's, and those of the generation config (a chat model has several)."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    all_ids = sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})
    if not all_ids:
        raise ValueError("eos_token_id is None in the tokenizer and the generation config: set one, or completions never end.")
    return all_ids


def left_pad(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids [B, P], attention [B, P] bool)"""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(p)) + p for p in prompts], device=device)
    lengths = torch.tensor([[len(p)] for p in prompts], device=device)
    return ids, torch.arange(width, device=device) >= width - lengths


@torch.no_grad()
def sample(
    model: Any,
    prompts: list[list[int]],
    *,
    group_size: int,
    max_new_tokens: int,
    ends: list[int],
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    uniform: Callable[[], Tensor] | None = None,
    wanted: Callable[[bool], bool] = bool,
) -> Completions:
    """`group_size` completions of each prompt, those of one prompt side by side. temperature 0 is greedy. Where top_p, top_k or
    min_p cut tokens off, in the order of vLLM, the sets of what they left come along.

    uniform   called once per token of a completion: B numbers in [0, 1) that choose it. None: torch's own generator.
    wanted    called after each token with whether a completion goes on: whether to make another forward. Ranks that have
              to make the same number of forwards ask each other here.

    Each prompt runs through the model once; its cache is then repeated for the group."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    ids, attention = left_pad(prompts, ends[0], device)
    cache = require("transformers").DynamicCache(config=model.config)
    out = model(
        input_ids=ids, attention_mask=attention.long(), position_ids=positions(attention), past_key_values=cache,
        use_cache=True, logits_to_keep=1,
    )  # fmt: skip
    cache.batch_repeat_interleave(group_size)
    ids, attention = ids.repeat_interleave(group_size, 0), attention.repeat_interleave(group_size, 0)
    logits, copies = out.logits[:, -1], group_size  # a group draws its first tokens from one row
    prompt_width, lengths = ids.shape[1], attention.long().sum(1, keepdim=True)
    end_tensor = torch.tensor(ends, device=device)
    alive = torch.ones(len(ids), 1, dtype=torch.bool, device=device)
    if uniform is None:
        uniform = partial(torch.rand, len(ids), dtype=torch.float64, device=device)
    logps, kept = [], []
    for t in range(max_new_tokens):
        token, logp, sets = draw(logits, temperature, top_p, top_k, min_p, uniform, copies)
        copies = 1
        logps.append(logp[:, None])
        kept.append(sets)
        token = token[:, None]
        ids = torch.cat([ids, token.masked_fill(~alive, ends[0])], 1)
        attention = torch.cat([attention, alive], 1)
        alive = alive & ~torch.isin(token, end_tensor)
        if t + 1 == max_new_tokens or not wanted(bool(alive.any())):
            break
        logits = model(
            input_ids=ids[:, -1:],
            attention_mask=attention.long(),
            position_ids=lengths + t,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
    model.train(training)
    recorded = by_completion([x for x in kept if x is not None], attention[:, prompt_width:], ends[0])
    return Completions(ids, attention, prompt_width, torch.cat(logps, 1), ~alive[:, 0], recorded)


def draw(
    logits: Tensor, temperature: float, top_p: float, top_k: int, min_p: float, uniform: Callable[[], Tensor], copies: int = 1
) -> tuple[Tensor, Tensor, TokenSets | None]:  # fmt: skip
    """`copies` ids per row of logits [R, V], side by side: B = R * copies ids, each where the cumulative probability passes its
    number of `uniform`; their log-probs; and the sets of ids that might have come, None if nothing is cut off."""
    if temperature == 0:
        greedy = logits.argmax(-1).repeat_interleave(copies)
        return greedy, torch.zeros(len(greedy), device=logits.device), None
    sets = TokenSets.from_logits(logits, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    cut = sets.empty_rows == 0
    ids = sets.padded().long() if cut else torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    if cut:
        logits = logits.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    probs = (logits.float() / temperature).softmax(-1)
    below = probs.cumsum(-1, dtype=torch.float64)
    at = uniform().view(-1, copies).to(torch.float64) * below[:, -1:]
    chosen = torch.searchsorted(below, at, right=True).clamp(max=probs.shape[-1] - 1)
    # At the very end of the range rounding can point at a token that cannot come.
    chosen = torch.where(probs.gather(-1, chosen) > 0, chosen, probs.argmax(-1, keepdim=True))
    logps = (probs.gather(-1, chosen) / below[:, -1:]).log().to(torch.float32)
    if cut and copies > 1:
        sets = sets.take(torch.arange(len(logits), device=logits.device).repeat_interleave(copies))
    return ids.gather(-1, chosen).flatten(), logps.flatten(), sets if cut else None


def by_completion(steps: list[TokenSets], mask: Tensor, padding: int) -> TokenSets | None:
    """Sets of B rows for each of T steps, as those of the B * T tokens of a batch. Behind its end a completion has nothing but
    padding, which is then the only id of its set: no row stands for the whole vocabulary. None if there are no sets."""
    if not steps:
        return None
    count, width = mask.shape
    numbers = torch.arange(count * width, device=mask.device).view(width, count).T
    only = TokenSets.from_lists([[padding]], device=mask.device)
    return TokenSets.cat([*steps, only]).take(torch.where(mask, numbers, count * width).flatten())
