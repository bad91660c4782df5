"""What adapters share over tensors:

dtypes, groups of ranks, denominators, scores of logits, records of what a sampler kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..batch import TokenBatch
from ..checks import OF_PRODUCTS, of_a_leaf, require, require_one_of
from ..distributed import VocabShard
from ..formulas.centering import ScoreCentering
from ..formulas.divergence import Exact, divergence_at
from ..formulas.ops import bounded_exp
from ..formulas.surrogates import Cispo, Clip, Sapo, Vespo
from ..formulas.token_inputs import TokenInputs
from ..logprobs import TokenLogprobs, linear_logprobs, token_logprobs
from ..losses import LossOutput
from ..objective import Objective
from ..options import Head, Options
from ..token_sets import TokenSets, narrowed
from ..transform import LogitTransform
from ._swap import NotCovered, says

#: What a trainer's loss returns: 0-d, and numbers by name.
LossAndMetrics = tuple[Tensor, dict[str, Any]]

#: Of the losses that TRL and Liger name alike those that clip, and those that divide by the tokens
#: of all micro-batches and ranks.
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
BY_ITEMS = ("dapo", "cispo", "vespo")


def plain(*tensors: Tensor | None) -> None:
    """Raise NotCovered for tensors that our kernels cannot read."""
    for x in tensors:
        if x is not None and x.dtype not in OF_PRODUCTS:
            raise NotCovered(f"dtype {x.dtype}")
        if not all(placement.is_replicate() for placement in getattr(x, "placements", ())):
            raise NotCovered("a sharded DTensor")


# ---- groups of ranks


def even_shard(width: int, group: Any) -> VocabShard | None:
    """This rank's part of a vocabulary that is split evenly over `group`, `width` ids per rank, as
    Megatron does; None where one rank has all of it. Padding rows of the weight count as ids, as
    they do in the trainers, and a rank's gradient of the hidden states is its own share, which the
    layers in front add up.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    return (
        None
        if ranks == 1
        else VocabShard(dist.get_rank(group) * width, ranks * width, group, False)
    )


def shard_of(logits: Tensor, group: Any, megatron: bool) -> VocabShard | None:
    """This rank's part of the vocabulary: of a DTensor with Shard(-1), of `group`, or with
    `megatron` of its tensor-parallel group; None where logits are whole rows.
    """
    placements = getattr(logits, "placements", None)
    if placements is not None:
        if (
            len(placements) != 1
            or not placements[0].is_shard()
            or placements[0].dim % logits.dim() != logits.dim() - 1
        ):
            raise ValueError(
                f"logits is a DTensor with placements {placements}: it must be cut by Shard(-1),"
                " over a tensor-parallel mesh of one dimension."
            )
        return VocabShard.of(logits, dim=-1)
    if group is None and megatron:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
    return even_shard(logits.shape[-1], group)


def world() -> Any:
    """The group of all ranks, for trainers in which no group means all ranks, as in
    torch.distributed; None without one.
    """
    ready = dist.is_available() and dist.is_initialized()
    return dist.group.WORLD if ready else None


# ---- objectives


def two_sided(
    owner: str, low: float, high: float, delta: float | None, name: str, name_of_high: str
) -> Clip:
    """A trainer's clip with a bound of both sides, or None; `name` is what the trainer calls that.
    Raises ValueError for a bound within the clip range, which trainers take in ways of their own.
    """
    bound = math.inf if delta is None else delta
    require(
        bound >= 1 + high,
        name,
        delta,
        f"below 1 + {name_of_high}, {1 + high}, it is {owner}'s own.",
    )
    return Clip(low, high, bound)


def surrogate_of(options: Any) -> Any:
    """The surrogate of TRL's and Liger's `loss_type`, of an object that has their options under
    their names. As they have it, epsilon_high is CISPO's cap, an absolute ratio.
    """
    kind = options.loss_type
    require_one_of("loss_type", kind, (*CLIPPED, "cispo", "sapo", "vespo"))
    if kind in CLIPPED:
        return Clip(
            min(options.epsilon_low, 1.0),
            options.epsilon_high,
            math.inf if options.delta is None else options.delta,
        )  # below 0 there is no ratio to be clipped
    if kind == "vespo":
        rates = [max(rate, 1e-4) for rate in (options.vespo_lambda_pos, options.vespo_lambda_neg)]
        return Vespo(options.vespo_k_pos, rates[0], options.vespo_k_neg, rates[1])
    return (
        Cispo(options.epsilon_high)
        if kind == "cispo"
        else Sapo(options.sapo_temperature_pos, options.sapo_temperature_neg)
    )


# ---- batches, denominators, metrics


def at_least_one(count: float | Tensor) -> float | Tensor:
    """A trainer's count as a denominator, which is 1 for a step without tokens."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def no_ids(like: Tensor) -> Tensor:
    """Targets of the shape of `like`, all 0, for calls whose result does not depend on them: a loss
    over log-probs, or an entropy.
    """
    return torch.zeros(like.shape, dtype=torch.int64, device=like.device)


def scored_batch(mask: Tensor, advantages: Tensor, **fields: Any) -> TokenBatch:
    """A batch for `objective_loss`, which takes log-probs and does not read ids.

    `fields` are as in TokenBatch.
    """
    return TokenBatch(no_ids(mask), advantages, mask=mask != 0, **fields)


def teaching(mask: Tensor | None, like: Tensor) -> TokenBatch:
    """A batch for a distillation loss, which reads neither ids nor advantages."""
    return TokenBatch(no_ids(like), torch.zeros(like.shape, device=like.device), mask=mask)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean of x where the mask is True; 0 where it is nowhere."""
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


def terms_of(
    objective: Objective, logps: Tensor, rows: TokenInputs, batch: TokenBatch
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(log-ratio at the objective's level, bool: where the ratio is clipped, the KL term or None
    without one), [n] of the flat rows of a batch.
    """
    logps = logps.flatten()
    x = objective.log_ratio(logps, rows, batch)
    clipped = torch.logical_or(*objective.surrogate.clipped(bounded_exp(x), rows.advantages))
    return x, clipped, None if rows.ref_logps is None else objective.kl_terms(logps, rows, x)[0]


def left_out(out: LossOutput, objective: Objective) -> Tensor:
    """The share of tokens that a filter dropped or a clip bounded."""
    return (
        1 - out.metrics["kept"]
        if objective.filters
        else out.metrics["clip_low"] + out.metrics["clip_high"]
    )


def numbers(named: Mapping[str, Tensor]) -> dict[str, float]:
    """0-d tensors as Python numbers, in one trip to the host."""
    values = [value.detach().float() for value in named.values()]
    return dict(zip(named, torch.stack(values).tolist(), strict=True)) if values else {}


def divergence_of(beta: float) -> Exact:
    """TRL's and Liger's beta as a divergence:

    0 is the forward KL, 1 the reverse, in between the jsd with that mixture.
    """
    if beta in (0.0, 1.0):
        return Exact("forward" if beta == 0.0 else "reverse")
    return Exact("jsd", mixture=float(beta))


# ---- scores of logits


def entropy_kind(wanted: bool, gradient: bool = True) -> bool | str:
    """What our functions call entropy=: not at all, with a gradient, or without."""
    return (True if gradient else "detached") if wanted else False


def log_probs_of(
    source: Tensor, targets: Tensor, *, head: Tensor | Head | None = None, temperature: float | Tensor | None = None,
    group: Any = None, options: Options | None = None, entropy_over: str = "kept", **others: Any,
) -> TokenLogprobs:  # fmt: skip
    """`token_logprobs` of a trainer's logits [..., V / ranks of the group], or `linear_logprobs` of
    hidden states and a head, whose weight is [V / ranks, H]; no group is one rank. `options` and
    `others` are arguments of theirs. Raises NotCovered for tensors that our kernels cannot read.

    entropy_over   "kept": of rows with a kept set the entropy is over the set. "vocabulary": it is
                   over all ids, which takes a second call.
    """
    require_one_of("entropy_over", entropy_over, ("kept", "vocabulary"))
    if entropy_over == "vocabulary" and others.get("kept") is not None and others.get("entropy"):
        return _with_entropy_over_vocabulary(
            source,
            targets,
            head=head,
            temperature=temperature,
            group=group,
            options=options,
            **others,
        )
    weight, bias = (head.weight, head.bias) if isinstance(head, Head) else (head, None)
    plain(source, weight, bias)
    shard = even_shard(source.shape[-1] if weight is None else len(weight), group)
    if shard is not None:
        options = replace(options or Options(), shard=shard)
    if temperature is not None:
        others["transform"] = LogitTransform(temperature)
    if head is None:
        return token_logprobs(source, targets, options=options, **others)
    return linear_logprobs(source, head, targets, options=options, **others)


def _with_entropy_over_vocabulary(
    source: Tensor, targets: Tensor, *, kept: TokenSets, entropy: bool | str, missing: str | None = None, mask: Tensor | None = None,
    at: TokenSets | None = None, **others: Any,
) -> TokenLogprobs:  # fmt: skip
    """Log-probs over kept sets, and the entropy of all rows over the vocabulary."""
    found = log_probs_of(source, targets, kept=kept, missing=missing, mask=mask, at=at, **others)
    mask = narrowed(kept, targets, mask, "mask") if missing == "mask" else mask
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy is True):
        over_vocabulary = log_probs_of(
            source, targets, entropy=entropy, mask=mask, **others
        ).entropy
    return replace(found, entropy=over_vocabulary)


def can_be_overwritten(logits: Tensor) -> bool:
    """Whether the gradient of logits can be written into their memory."""
    return logits.requires_grad and not of_a_leaf(logits) and logits.is_contiguous()


@says(targets="labels")
def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """verl's and SkyRL's function of this name: log-probs of labels, fp32 [...]; logits [..., V],
    labels of any shape with as many elements as there are rows.

    inplace_backward   True: the gradient overwrites the logits, unless they are a leaf. Autograd
                       raises where another operation still needs them.
    """
    if (
        labels.numel() == logits.shape[:-1].numel()
    ):  # any other number is refused below, in an error that names both shapes
        labels = labels.reshape(logits.shape[:-1])
    return log_probs_of(
        logits, labels, inplace=inplace_backward and can_be_overwritten(logits)
    ).logps


def entropy_from_logits(
    logits: Tensor,
    *,
    temperature: float | None = None,
    mask: Tensor | None = None,
    gradient: bool = True,
) -> Any:
    """Entropy in nats, fp32 [...], of logits [..., V]; 0 where the mask is False."""
    kind = True if gradient else "detached"
    return log_probs_of(
        logits, no_ids(logits[..., 0]), temperature=temperature, mask=mask, entropy=kind
    ).entropy


def in_a_column(
    logits: Tensor, tokens: Tensor, group: Any, wanted: bool, gradient: bool = True, **others: Any
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """slime's and miles' form: (log-probs [R, 1], or [0] of no tokens; entropy [R], with a gradient
    or without, or None) of logits [R, V / ranks of the group], no group being all ranks; `others`
    are those of `log_probs_of`.
    """
    kind = entropy_kind(wanted, gradient)
    logps, entropy = log_probs_of(logits, tokens, group=group or world(), entropy=kind, **others)
    return logps[:, None] if len(logps) else logps, entropy


# ---- ids of each row


def at_ids(logits: Tensor, ids: Tensor, **others: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    """(log-probs at the ids [.., K] of each row of logits [.., V], entropies if asked for, [..]:
    how many different ids a row has), in one pass over each row, for trainers that take an id
    several times. An id of -1 is padding, with log-prob 0. `others` are as in `log_probs_of`.
    """
    listed = ids.flatten(0, -2).contiguous()
    in_order = listed.sort(-1).values
    first = in_order >= 0
    first[:, 1:] &= in_order[:, 1:] != in_order[:, :-1]
    sets = TokenSets.from_counts(in_order[first], first.sum(-1))
    found = log_probs_of(
        logits, ids[..., 0].clamp(min=0).long(), at=sets, **others
    )  # a kept set has the first
    of_first = torch.zeros_like(first, dtype=torch.float32).masked_scatter(first, found.also["at"])
    logps = of_first.gather(
        -1, torch.searchsorted(in_order, listed)
    )  # where each id stands first in its row
    return logps.view(ids.shape), found.entropy, first.sum(-1).view(ids.shape[:-1])


#: A log-prob that has no mass.
NO_MASS = -1e4


def centered(
    centering: ScoreCentering, logps: Tensor, sampler: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | float
) -> Tensor:  # fmt: skip
    """The term of score centering, weighted and summed over rows [..], from log-probs [.., K] of
    the same ids under the policy, with gradient, and under the sampler, -inf for padding; 0 of rows
    that are masked, whatever stands there.
    """
    given = (sampler > -math.inf) & mask[..., None]
    advantages = torch.where(mask, advantages, 0.0)
    ours, theirs = (torch.where(given, x, NO_MASS) for x in (logps, sampler))

    def sums(x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)

    with torch.no_grad():
        _, slopes = centering(ours.double(), theirs.double(), advantages[..., None], sums)
        slopes = slopes.to(ours.dtype)
    return torch.where(
        mask, weights * torch.where(slopes != 0, slopes * ours, 0.0).sum(-1), 0.0
    ).sum()


def divergence_over(exact: Exact, logps: Tensor, teacher: Tensor) -> Tensor:
    """[..]: the divergence of log-probs [.., K] at the same ids, over these ids alone."""
    shape = logps.shape[:-1]
    offsets = torch.arange(shape.numel() + 1, device=logps.device) * logps.shape[-1]
    return divergence_at(exact, logps.flatten(), teacher.flatten(), offsets).view(shape)


def response_sets(name: str, record: tuple[Any, Any], tokens: int) -> TokenSets:
    """The sets of one response of so many tokens, of (ids, offsets), each a list or a tensor of
    integers. `name` is what the record is called in errors. Raises ValueError where the offsets are
    not those of so many tokens, and as TokenSets does.
    """
    ids, offsets = (
        x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64) for x in record
    )
    try:
        sets = TokenSets(ids, offsets)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if sets.rows != tokens:
        raise ValueError(
            f"{name} has sets for {sets.rows} tokens, but the response has {tokens}: cut both"
            " alike, and record every token."
        )
    return sets


def on_rows(sets: TokenSets, generated: Tensor) -> TokenSets:
    """One set after another on the True rows of `generated`, bool of any shape; all other rows get
    none.
    """
    flat = generated.flatten()
    return sets.take(torch.where(flat, flat.cumsum(0) - 1, -1))
