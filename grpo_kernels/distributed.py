"""Train on several ranks: a vocabulary that is sharded over them, and the common denominator of an
optimizer step.
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
    """Return the denominator of a whole optimizer step, fp32 0-d, at least 1.

    It counts all micro-batches. If torch.distributed is initialised, it counts all ranks of
    `process_group` too.

        normalizer = global_normalizer(objective, micro_batches)
        for batch in micro_batches:
            linear_grpo_loss(..., batch, objective, normalizer=normalizer).loss.backward()

    The gradients of the micro-batches then add up to the gradient of the whole batch, also if some
    are fully masked. Gradients must be summed over the ranks. DDP and FSDP average them instead: to
    correct for that, divide the normalizer by the number of ranks that they average over. If the KL
    or the entropy bonus of the objective has its own aggregation, the result is a `Denominators`
    with three numbers. ClipCov, KlCov and EntropyQuantile select tokens within each micro-batch,
    not within the whole batch.

    Do not split sequences or groups: a micro-batch has all tokens of a sequence, and for
    "group-mean" all sequences of a group.

    objective       decides what the denominators are: tokens, sequences or groups
    batches         the micro-batches of this rank, at least one
    process_group   the ranks that have different rows. None: the default group. Ranks with the same
                    rows and different parts of the vocabulary (`VocabShard`) must count once, so
                    pass the data-parallel group. All ranks that share sequences
                    (`TokenBatch.context_group`) belong to it.
    reduce          True: all-reduce over the ranks, without a host sync; raises an error if
                    torch.distributed is not initialised. False: count this rank only. None: reduce
                    if torch.distributed is initialised.
    """
    is_objective = isinstance(objective, Objective)
    require(is_objective, "objective", type(objective).__name__, "pass an Objective.")
    batches = [batches] if isinstance(batches, TokenBatch) else list(batches)
    remedy = "pass the micro-batches of the step, at least one on every rank."
    require(bool(batches), "batches", batches, remedy)
    device = batches[0].targets.device

    def as_fp64(x: float | Tensor | None) -> Tensor:
        """Return a number as a 0-d fp64 tensor on the device of the batches."""
        assert x is not None
        if isinstance(x, Tensor):
            return x.double()
        return torch.full((), x, dtype=torch.float64, device=device)

    # [micro-batches, 3]: the denominators of surrogate, KL and entropy bonus.
    per_batch = [
        torch.stack([as_fp64(x) for x in objective.denominators(batch)]) for batch in batches
    ]
    total = torch.stack(per_batch).sum(0)
    is_distributed = dist.is_available() and dist.is_initialized()
    if reduce and not is_distributed:
        raise ValueError(
            "reduce=True, but torch.distributed is not initialised: call init_process_group, or"
            " leave it out."
        )
    if is_distributed and reduce is not False:
        dist.all_reduce(total, group=process_group)
    denominators = []
    for sum_over_batches, aggregate in zip(total, objective.aggregates, strict=True):
        if aggregate == "token-sum":
            # A plain sum is divided by 1, not by the number of micro-batches and ranks.
            denominator = torch.ones_like(sum_over_batches)
        else:
            denominator = sum_over_batches.clamp(min=1.0)
        denominators.append(denominator.float())
    kl_differs = objective.beta != 0 and objective.kl_aggregate
    entropy_differs = objective.entropy_coef != 0 and objective.entropy_aggregate
    if kl_differs or entropy_differs:
        return Denominators(*denominators)
    return denominators[0]
