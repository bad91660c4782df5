"""Functions that several adapters use: denominators, batches without ids, groups of ranks, entropy from logits,
the beta of a divergence."""

from __future__ import annotations

from typing import Any

import torch

from ..batch import TokenBatch
from ..distributed import VocabShard
from ..formulas.divergence import Exact
from ..layout import of_a_leaf
from ..logprobs import token_logprobs
from ..specs import LogitTransform
from ..token_sets import TokenSets
from ._slots import DTYPES, NotCovered

Tensor = torch.Tensor


def plain(*tensors: Tensor | None) -> None:
    """Raise NotCovered for tensors that our kernels cannot read."""
    for x in tensors:
        if x is None:
            continue
        if x.dtype not in DTYPES:
            raise NotCovered(f"dtype {x.dtype}")
        if hasattr(x, "placements") and not all(p.is_replicate() for p in x.placements):
            raise NotCovered("a sharded DTensor")


def even_shard(width: int, group: Any, *, reduce_hidden: bool = True) -> VocabShard | None:
    """This rank's part of a vocabulary that is split evenly over `group`, `width` ids per rank, as Megatron does; None where
    one rank has all of it. Padding rows of the weight count as ids, as they do in the trainers."""
    if group is None:
        return None
    ranks = torch.distributed.get_world_size(group)
    if ranks == 1:
        return None
    return VocabShard(torch.distributed.get_rank(group) * width, ranks * width, group, reduce_hidden)


def shard_of(logits: Tensor, group: Any, megatron: bool) -> VocabShard | None:
    """This rank's part of the vocabulary: of a DTensor with Shard(-1), of `group`, or with `megatron` of its tensor-parallel
    group; None where logits are whole rows."""
    placements = getattr(logits, "placements", None)
    if placements is not None:
        if len(placements) != 1 or not placements[0].is_shard() or placements[0].dim % logits.dim() != logits.dim() - 1:
            raise ValueError(
                f"logits is a DTensor with placements {placements}: it must be cut by Shard(-1), over a tensor-parallel mesh of one "
                "dimension."
            )
        return VocabShard.of(logits, dim=-1)
    if group is None and megatron:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
    return even_shard(logits.shape[-1], group)


def default_group(group: Any) -> Any:
    """The group of all ranks in place of None, for trainers in which None means all ranks, as in torch.distributed."""
    if group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.group.WORLD
    return group


def at_least_one(count: float | Tensor) -> float | Tensor:
    """A trainer's count as a denominator, which is 1 for a step without tokens."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def no_ids(like: Tensor) -> Tensor:
    """Targets of the shape of `like`, all 0, for calls whose result does not depend on them: a loss over log-probs, or an
    entropy."""
    return torch.zeros(like.shape, dtype=torch.int64, device=like.device)


def distinct(ids: Tensor) -> tuple[TokenSets, Tensor]:
    """(sets of the ids [rows, K] of each row, each id once; int64 [rows, K]: where in the sets' ids each listed one is), for
    trainers that take an id several times."""
    in_order, order = ids.sort(-1)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    sets = TokenSets.from_counts(in_order[first], first.sum(-1))
    place = first.reshape(-1).cumsum(0).view(ids.shape) - 1
    return sets, place.gather(-1, order.argsort(-1))


def scored_batch(mask: Tensor, advantages: Tensor, **fields: Any) -> TokenBatch:
    """A batch for `objective_loss`, which takes log-probs and does not read ids. `fields` are those of TokenBatch."""
    return TokenBatch(no_ids(mask), advantages, mask=mask != 0, **fields)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """verl's and SkyRL's function of this name: log-probs of labels, fp32 [...]; logits [..., V], labels of any shape with as
    many elements as there are rows.

    inplace_backward   True: the gradient overwrites the logits, unless they are a leaf. Autograd raises where another operation
                       still needs them."""
    plain(logits)
    if labels.numel() == logits.shape[:-1].numel():  # any other number is refused below, in an error that names both shapes
        labels = labels.reshape(logits.shape[:-1])
    inplace = inplace_backward and logits.requires_grad and not of_a_leaf(logits) and logits.is_contiguous()
    return token_logprobs(logits, labels, inplace=inplace)[0]


def entropy_from_logits(
    logits: Tensor, *, transform: LogitTransform | None = None, mask: Tensor | None = None, gradient: bool = True
) -> Tensor:
    """Entropy in nats, fp32 [...], of logits [..., V] after `transform`; 0 where the mask is False."""
    plain(logits)
    kind = True if gradient else "detached"
    entropy = token_logprobs(logits, no_ids(logits[..., 0]), transform=transform, mask=mask, entropy=kind)[1]
    assert entropy is not None
    return entropy


def divergence_of(beta: float) -> Exact:
    """TRL's and Liger's beta as a divergence: 0 is the forward KL, 1 the reverse, in between the jsd with that mixture."""
    if beta in (0.0, 1.0):
        return Exact("forward" if beta == 0.0 else "reverse")
    return Exact("jsd", mixture=float(beta))
