"""For several ranks:

a vocabulary that is sharded over them, and the common denominator of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .batch import TokenBatch
from .checks import require
from .core.vocab_parallel import VocabShard
from .objective import Denominators, Objective

__all__ = ["VocabShard", "global_normalizer"]


def global_normalizer(
    objective: Objective,
    batches: TokenBatch | Iterable[TokenBatch],
    process_group: Any = None,
    *,
    reduce: bool | None = None,
) -> Tensor | Denominators:
    """Return the denominator D of a whole optimizer step, fp32 0-d: over all micro-batches and,
    with torch.distributed initialised, over the ranks of `process_group` (None: the default group).
    1 where nothing is trained.

        normalizer = global_normalizer(objective, micro_batches)
        for batch in micro_batches:
            linear_grpo_loss(..., batch, objective, normalizer=normalizer).loss.backward()

    The gradients of micro-batches then add up to the gradient of the whole batch, fully masked ones
    included; over ranks they have to be summed. DDP and FSDP average instead: pass normalizer /
    (number of ranks that they average over). An objective whose KL or bonus has an aggregation of
    its own gets a Denominators of three. ClipCov, KlCov and EntropyQuantile select tokens within
    each micro-batch, not within the whole batch.

    Sequences and groups stay whole: a micro-batch holds all tokens of a sequence, and for
    "group-mean" all of a group.

    process_group   the ranks that have different rows. Ranks with the same rows and a part of the
                    vocabulary each (`VocabShard`) must count once: pass the data-parallel group.
                    Ranks that share sequences (`TokenBatch.context_group`) all belong to it.
    reduce   False: this rank alone; True: torch.distributed must be initialised. One all-reduce, no
             host sync.
    """
    require(
        isinstance(objective, Objective),
        "objective",
        type(objective).__name__,
        "pass an Objective.",
    )
    batches = [batches] if isinstance(batches, TokenBatch) else list(batches)
    require(
        bool(batches),
        "batches",
        batches,
        "pass the micro-batches of the step, at least one on every rank.",
    )
    device = batches[0].targets.device

    def number(x: float | Tensor | None) -> Tensor:
        assert x is not None
        return (
            x.double()
            if isinstance(x, Tensor)
            else torch.full((), x, dtype=torch.float64, device=device)
        )

    total = torch.stack(
        [torch.stack([number(x) for x in objective.denominators(b)]) for b in batches]
    ).sum(0)
    ready = dist.is_available() and dist.is_initialized()
    if reduce and not ready:
        raise ValueError(
            "reduce=True, but torch.distributed is not initialised: call init_process_group, or"
            " leave it out."
        )
    if ready and reduce is not False:
        dist.all_reduce(total, group=process_group)
    # A plain sum has no denominator, however many micro-batches there are.
    denominators = [
        (torch.ones_like(x) if kind == "token-sum" else x.clamp(min=1.0)).float()
        for x, kind in zip(total, objective.aggregates, strict=True)
    ]
    own = (objective.beta != 0 and objective.kl_aggregate) or (
        objective.entropy_coef != 0 and objective.entropy_aggregate
    )
    return Denominators(*denominators) if own else denominators[0]
