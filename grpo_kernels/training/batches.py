"""Splits the batch of a step into the micro-batches that pass through the model one at a time."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from ..batch import TokenBatch
from .config import TrainConfig
from .ranks import Ranks
from .sampling import Completions

Tensor = torch.Tensor


class Part(NamedTuple):
    """Some completions, with the inputs of their loss."""

    completions: Completions
    batch: TokenBatch


def micro_batches(completions: Completions, batch: TokenBatch, config: TrainConfig, ranks: Ranks) -> tuple[list[Part], float]:
    """Parts of `config.micro_batch` completions, as many on every rank as on the one that has the most; and the share of
    completions that was left out because nothing pulls at them."""
    total, nothing = len(completions.ids), _nothing(completions, batch)
    kept = torch.arange(total, device=completions.ids.device)
    if config.drop_zero_variance:
        has_gradient = (batch.advantages.reshape(total, -1) != 0).any(1)
        if not ranks.any(bool(has_gradient.any())):
            has_gradient[0] = ranks.main  # an update of nothing is still one: the optimizer's averages decay
        kept = kept[has_gradient]
    counts, totals = zip(*ranks.gather((len(kept), total)), strict=True)
    size = config.micro_batch or max(counts)
    parts = [_part(completions, batch, kept[at : at + size]) for at in range(0, len(kept), size)]
    parts += [nothing] * (-(-max(counts) // size) - len(parts))
    return parts, 1 - sum(counts) / sum(totals)


def _part(completions: Completions, batch: TokenBatch, rows: Tensor) -> Part:
    weights = None if batch.weights is None else batch.weights[rows]
    mask = None if batch.mask is None else batch.mask[rows]
    some = completions[rows]
    return Part(some, TokenBatch(some.targets, batch.advantages[rows], mask=mask, weights=weights, kept=some.kept))


def _nothing(completions: Completions, batch: TokenBatch) -> Part:
    """A completion without tokens, for a rank that has no completions left in this pass."""
    one = _part(completions, batch, torch.zeros(1, dtype=torch.int64, device=completions.ids.device))
    attention = one.completions.attention.clone()
    attention[:, completions.prompt_width :] = False
    blank = dataclasses.replace(one.completions, attention=attention)
    return Part(blank, dataclasses.replace(one.batch, advantages=0 * one.batch.advantages, mask=blank.mask))
