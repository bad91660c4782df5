"""Tensor helpers of the adapters.

Supported dtypes, vocabulary shards, objectives and batches of a trainer's arguments, log-probs of
logits, log-probs at several ids of a position, and records of the ids that a sampler could draw.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..batch import TokenBatch
from ..checks import MATMUL_DTYPES, is_leaf_or_view_of_leaf, require, require_one_of
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
from ..token_sets import TokenSets, narrow_mask
from ..transform import LogitTransform
from ._swap import NotCovered, with_trainer_names

#: What a trainer's loss returns: (loss, a 0-d tensor; {name of a metric: number}).
LossAndMetrics = tuple[Tensor, dict[str, Any]]

#: Loss types of TRL and Liger (same names) that clip the ratio, and loss types whose denominator is
#: the number of tokens of all micro-batches and ranks.
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
BY_ITEMS = ("dapo", "cispo", "vespo")


def require_supported(*tensors: Tensor | None) -> None:
    """Raise NotCovered for a tensor whose dtype the kernels lack, or a sharded DTensor.

    The trainer's own function then computes the call.
    """
    for x in tensors:
        if x is not None and x.dtype not in MATMUL_DTYPES:
            raise NotCovered(f"dtype {x.dtype}")
        # Only a DTensor has placements. A replicated one is whole on each rank.
        if not all(placement.is_replicate() for placement in getattr(x, "placements", ())):
            raise NotCovered("a sharded DTensor")


# ---- groups of ranks


def even_shard(width: int, group: Any) -> VocabShard | None:
    """Return this rank's shard of a vocabulary that Megatron splits evenly over `group`.

    width   ids per rank
    group   the tensor-parallel group; None for one rank

    Returns None if one rank has the whole vocabulary. Padding rows of the weight count as ids, as
    in the trainers.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1:
        return None
    # The gradient of the hidden states stays a partial sum of this rank. The trainer's layers
    # before the head add up the partial sums.
    return VocabShard(
        start=dist.get_rank(group) * width, vocab=ranks * width, group=group, reduce_hidden=False
    )


def vocab_shard(logits: Tensor, group: Any, megatron: bool) -> VocabShard | None:
    """Return this rank's shard of the vocabulary, or None if logits have the whole vocabulary.

    logits    [..., V] or this rank's [..., V / ranks]; a DTensor must have the placement Shard(-1)
    group     the tensor-parallel group of plain tensors; None for one rank
    megatron  whether Megatron's tensor-parallel group is used if group is None
    """
    # A DTensor knows its group. A plain tensor does not tell whether it is a part.
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


def default_group() -> Any:
    """Return the group of all ranks, or None if torch.distributed is not initialised.

    For trainers that pass None for the group of all ranks, as torch.distributed does.
    """
    ready = dist.is_available() and dist.is_initialized()
    return dist.group.WORLD if ready else None


# ---- objectives


def bounded_clip(
    owner: str, low: float, high: float, delta: float | None, name: str, name_of_high: str
) -> Clip:
    """Return Clip(low, high, delta) of a trainer's options.

    owner         the trainer's name, for errors
    low, high     clip range of the ratio, [1 - low, 1 + high]
    delta         upper bound of the ratio for negative advantages (dual clip); None for none
    name          the trainer's name of delta
    name_of_high  the trainer's name of high

    Raises ValueError if delta < 1 + high: trainers define that case differently.
    """
    bound = math.inf if delta is None else delta
    require(
        bound >= 1 + high,
        name,
        delta,
        f"a value below 1 + {name_of_high} = {1 + high} is not supported: keep {owner}'s own loss.",
    )
    return Clip(low, high, bound)


def surrogate_of(options: Any) -> Any:
    """Return the surrogate of TRL's and Liger's `loss_type`.

    options   an object with their options as attributes: loss_type, epsilon_low, epsilon_high,
              delta, ... For CISPO epsilon_high is the largest ratio, not its distance from 1.
    """
    loss_type = options.loss_type
    require_one_of("loss_type", loss_type, (*CLIPPED, "cispo", "sapo", "vespo"))
    if loss_type == "cispo":
        return Cispo(options.epsilon_high)
    if loss_type == "sapo":
        return Sapo(options.sapo_temperature_pos, options.sapo_temperature_neg)
    if loss_type == "vespo":
        return Vespo(
            k_pos=options.vespo_k_pos,
            lambda_pos=max(options.vespo_lambda_pos, 1e-4),  # the trainers' own lower bound
            k_neg=options.vespo_k_neg,
            lambda_neg=max(options.vespo_lambda_neg, 1e-4),
        )
    return Clip(
        min(options.epsilon_low, 1.0),  # a ratio is not below 0
        options.epsilon_high,
        math.inf if options.delta is None else options.delta,
    )


# ---- batches, denominators, metrics


def at_least_one(count: float | Tensor) -> float | Tensor:
    """Return a count as a denominator: 1 for a step without tokens."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def zero_ids(like: Tensor) -> Tensor:
    """Return int64 zeros in the shape of `like`, for a function that requires target ids.

    Use them only if the result does not depend on the ids, as the entropy of logits does not.
    """
    return torch.zeros(like.shape, dtype=torch.int64, device=like.device)


def scored_batch(mask: Tensor, advantages: Tensor, **fields: Any) -> TokenBatch:
    """Return a batch for `objective_loss`, which takes log-probs and reads no target ids.

    mask, advantages   [B, T]; mask in any dtype, nonzero for trained tokens
    fields             more fields of TokenBatch
    """
    return TokenBatch(zero_ids(mask), advantages, mask=mask != 0, **fields)


def distillation_batch(mask: Tensor | None, like: Tensor) -> TokenBatch:
    """Return a batch in the shape of `like` for a loss that reads neither ids nor advantages."""
    return TokenBatch(zero_ids(like), torch.zeros(like.shape, device=like.device), mask=mask)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x over the True entries of mask, 0 if there are none."""
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


def ratio_terms(
    objective: Objective, logps: Tensor, rows: TokenInputs, batch: TokenBatch
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return (log-ratio, is_clipped, KL term) of each token of a batch, each [N].

    objective   defines the ratio (of a token or of its sequence), the clip range and the KL
    logps       fp32, N elements in any shape: the policy's log-probs
    rows        the inputs of the loss for each token of the batch, such as `LossOutput.rows`
    batch       the batch of N tokens

    log-ratio and KL term are fp32, is_clipped is bool. The KL term is None without reference
    log-probs.
    """
    logps = logps.flatten()
    log_ratio = objective.log_ratio(logps, rows, batch)
    clipped_low, clipped_high = objective.surrogate.clipped(bounded_exp(log_ratio), rows.advantages)
    kl = None
    if rows.ref_logps is not None:
        kl = objective.kl_terms(logps, rows, log_ratio).value
    return log_ratio, clipped_low | clipped_high, kl


def excluded_share(out: LossOutput, objective: Objective) -> Tensor:
    """Return the share of tokens that lose their gradient, 0-d.

    out         the result of a loss, with its metrics
    objective   the objective of the loss. If it has filters, these are the tokens that a filter
                drops, else the tokens whose ratio is clipped.
    """
    if objective.filters:
        # "kept" is the share of tokens that all filters keep.
        return 1 - out.metrics["kept"]
    return out.metrics["clip_low"] + out.metrics["clip_high"]


def to_floats(named: Mapping[str, Tensor]) -> dict[str, float]:
    """Return 0-d tensors as Python floats, with one copy to the host."""
    values = [value.detach().float() for value in named.values()]
    return dict(zip(named, torch.stack(values).tolist(), strict=True)) if values else {}


def divergence_of(beta: float) -> Exact:
    """Return the divergence that TRL and Liger choose by a number.

    beta   0: the forward KL, KL(teacher || student). 1: the reverse KL. Between 0 and 1: the JSD
           whose mixture has the teacher with weight beta.
    """
    if beta in (0.0, 1.0):
        return Exact("forward" if beta == 0.0 else "reverse")
    return Exact("jsd", mixture=float(beta))


# ---- log-probs and entropies


def entropy_mode(wanted: bool, gradient: bool = True) -> bool | str:
    """Return the argument entropy= of `token_logprobs`: False, True or "detached".

    wanted     whether the entropy is computed
    gradient   whether it is differentiable
    """
    if not wanted:
        return False
    return True if gradient else "detached"


def log_probs_of(
    source: Tensor,
    targets: Tensor,
    *,
    head: Tensor | Head | None = None,
    temperature: float | Tensor | None = None,
    transform: LogitTransform | None = None,
    group: Any = None,
    options: Options | None = None,
    mask: Tensor | None = None,
    kept: TokenSets | None = None,
    missing: str | None = None,
    at: TokenSets | None = None,
    entropy: bool | str = False,
    entropy_over: str = "kept",
    **more: Any,
) -> TokenLogprobs:
    """Return log-probs of targets, from a trainer's logits or from its hidden states and head.

    source        without head: logits [..., V], or the logits of this rank's ids [..., V / ranks].
                  With head: hidden states [..., H].
    targets       int64 [...], ids of the whole vocabulary
    head          the weight [V, H] or [V / ranks, H], or a `Head` with a weight and a bias
    temperature   divides the logits: a number, or a tensor as in `LogitTransform`
    transform     temperature, softcap and scale of the logits. Pass it or temperature, not both.
    group         the tensor-parallel group over which logits or head are sharded evenly; None if
                  they are not sharded, or if options.shard describes the shard
    mask, kept, missing, at, entropy
                  as in `token_logprobs`: the mask of tokens, their candidate sets, what to do with
                  a target outside of its set, extra ids, and whether the entropy is computed
    entropy_over  the ids that the entropy of a token with a candidate set runs over: "kept" (the
                  set) or "vocabulary" (all ids, which takes a second pass)
    more          also=, rows= and (for logits) inplace= of `token_logprobs`

    Raises NotCovered for tensors that the kernels do not support.
    """
    require_one_of("entropy_over", entropy_over, ("kept", "vocabulary"))
    if temperature is not None:
        remedy = "pass either temperature or transform."
        require(transform is None, "transform", transform, remedy)
        transform = LogitTransform(temperature)
    weight, bias = (head.weight, head.bias) if isinstance(head, Head) else (head, None)
    require_supported(source, weight, bias)
    width = source.shape[-1] if weight is None else len(weight)
    shard = even_shard(width, group)
    if shard is not None:
        options = replace(options or Options(), shard=shard)

    if head is None:
        compute = functools.partial(
            token_logprobs, source, targets, transform=transform, options=options, **more
        )
    else:
        compute = functools.partial(
            linear_logprobs, source, head, targets, transform=transform, options=options, **more
        )
    if entropy_over == "kept" or kept is None or not entropy:
        return compute(kept=kept, missing=missing, mask=mask, at=at, entropy=entropy)

    # One pass has one set of ids for log-probs and entropy: compute the entropy in a second pass.
    log_probs = compute(kept=kept, missing=missing, mask=mask, at=at)
    # In the first pass, missing="mask" has also masked each token outside of its set.
    entropy_mask = narrow_mask(kept, targets, mask, "mask") if missing == "mask" else mask
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy is True):
        entropies = compute(mask=entropy_mask, entropy=entropy).entropy
    return replace(log_probs, entropy=entropies)


def can_be_overwritten(logits: Tensor) -> bool:
    """Return whether backward may write the gradient of logits into their memory."""
    return logits.requires_grad and not is_leaf_or_view_of_leaf(logits) and logits.is_contiguous()


@with_trainer_names(targets="labels")
def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Return the log-probs of labels, fp32 in the shape of the leading dimensions of logits.

    logits             [..., V]
    labels             int64, one element for each row of logits, in any shape
    inplace_backward   whether the gradient overwrites the logits. Logits that are a leaf or not
                       contiguous are never overwritten. Autograd raises if another operation still
                       needs the logits.

    Name and arguments are those of a function in verl and of one in SkyRL.

    The decorator makes errors use the names of these arguments.
    """
    # If the number of labels is wrong, the call below raises an error that names both shapes.
    if labels.numel() == logits.shape[:-1].numel():
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
    """Return the entropy of each row of logits in nats, fp32 [...].

    logits        [..., V]
    temperature   divides the logits; None for 1
    mask          bool [...]: the entropy is 0 where it is False
    gradient      whether the entropy is differentiable
    """
    return log_probs_of(
        logits,
        zero_ids(logits[..., 0]),
        temperature=temperature,
        mask=mask,
        entropy=entropy_mode(True, gradient),
    ).entropy


def logps_in_a_column(
    logits: Tensor, tokens: Tensor, group: Any, *, entropy: bool | str, **options: Any
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return (log-probs [R, 1], entropy [R] or None), fp32: the shapes that slime and miles return.

    logits     [R, V / ranks]
    tokens     int64 [R]
    group      tensor-parallel group; None for all ranks
    entropy    False, True (differentiable) or "detached" (value only)
    options    more keyword arguments of `log_probs_of`
    """
    # Both trainers pass None for the group of all ranks. `log_probs_of` takes None for one rank.
    group = group or default_group()
    logps, entropies = log_probs_of(logits, tokens, group=group, entropy=entropy, **options)
    # Both trainers return log-probs of shape [0] if there are no tokens.
    return logps[:, None] if len(logps) > 0 else logps, entropies


# ---- ids of each row


def logps_at_ids(
    logits: Tensor, ids: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (log-probs, entropy, number of distinct ids) for K ids of each row of logits.

    logits    [..., V]
    ids       int32 or int64 [..., K]. An id may repeat in a row. -1 is padding.
    options   more keyword arguments of `log_probs_of`, such as entropy=, kept= and mask=

    log-probs       fp32 [..., K], differentiable; 0 for padding
    entropy         fp32 [...], or None without entropy=
    distinct ids    int64 [...], the number of different ids of each row, without padding
    """
    # The kernels accept an id only once per row. Sort the ids of each row, compute the log-prob of
    # the first of equal ids, and copy it to the others.
    row_ids = ids.flatten(0, -2).contiguous()
    sorted_ids = row_ids.sort(-1).values
    is_first = sorted_ids >= 0
    is_first[:, 1:] &= sorted_ids[:, 1:] != sorted_ids[:, :-1]
    num_distinct = is_first.sum(-1)
    distinct_ids = TokenSets.from_counts(sorted_ids[is_first], num_distinct)
    # `log_probs_of` also needs one target per row, whose log-prob is not used here. Take the first
    # id (0 for padding). With candidate sets it is the sampled token, to which missing= applies.
    targets = ids[..., 0].clamp(min=0).long()
    result = log_probs_of(logits, targets, at=distinct_ids, **options)
    # also["at"] has one log-prob for each True of is_first, row by row.
    sorted_logps = torch.zeros_like(is_first, dtype=torch.float32)
    sorted_logps = sorted_logps.masked_scatter(is_first, result.also["at"])
    # searchsorted returns the leftmost position of an id: that of the first of equal ids.
    position = torch.searchsorted(sorted_ids, row_ids)
    logps = sorted_logps.gather(-1, position)
    return logps.view(ids.shape), result.entropy, num_distinct.view(ids.shape[:-1])


#: A finite log-prob whose probability is 0.
NO_MASS = -1e4


def score_centering_term(
    centering: ScoreCentering, logps: Tensor, sampler: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | float
) -> Tensor:  # fmt: skip
    """Return the weighted sum of the score-centering term over all tokens, 0-d.

    Score centering removes the drift that a sampler other than the policy causes in the gradient
    (arXiv 2609.20807). The sampler has recorded the log-probs of its likeliest ids at each token.
    The term of a token is sum over these ids v of c_v log p_v, where p is the policy and the
    coefficients c_v of `ScoreCentering` count as constants.

    centering    computes the coefficients
    logps        fp32 [..., K], the policy's log-probs of the recorded ids, differentiable
    sampler      fp32 [..., K], the sampler's log-probs of the same ids, -inf for padding
    advantages   fp32 [...]
    mask         bool [...]; a masked token contributes 0 whatever its values are
    weights      fp32 [...] or a number, multiplies the term of each token
    """
    # Padding gets a log-prob whose probability is 0.
    is_recorded = (sampler > -math.inf) & mask[..., None]
    advantages = torch.where(mask, advantages, 0.0)
    policy_logps = torch.where(is_recorded, logps, NO_MASS)
    sampler_logps = torch.where(is_recorded, sampler, NO_MASS)

    def sum_ids(x: Tensor) -> Tensor:
        """Return the sum over the K ids of each token."""
        return x.sum(-1, keepdim=True)

    with torch.no_grad():
        # fp64, because the coefficients are small differences of large numbers
        _, coefficients = centering(
            policy_logps.double(), sampler_logps.double(), advantages[..., None], sum_ids
        )
        coefficients = coefficients.to(policy_logps.dtype)
    # 0 times an infinite log-prob is NaN.
    terms = torch.where(coefficients != 0, coefficients * policy_logps, 0.0).sum(-1)
    return torch.where(mask, weights * terms, 0.0).sum()


def divergence_over_ids(exact: Exact, logps: Tensor, teacher: Tensor) -> Tensor:
    """Return the divergence of student and teacher, fp32 [...], summed over K ids alone.

    exact     the divergence: forward or reverse KL, JSD, ...
    logps     fp32 [..., K], the student's log-probs of the K ids of each token
    teacher   fp32 [..., K], the teacher's log-probs of the same ids
    """
    shape = logps.shape[:-1]
    # `divergence_at` takes flat log-probs and the offset at which each token's ids start.
    offsets = torch.arange(shape.numel() + 1, device=logps.device) * logps.shape[-1]
    return divergence_at(exact, logps.flatten(), teacher.flatten(), offsets).view(shape)


def response_sets(name: str, record: tuple[Any, Any], tokens: int) -> TokenSets:
    """Return the candidate sets of one response: for each token the ids that it was sampled from.

    name     the record's name in errors
    record   (ids, offsets) in CSR form, lists or integer tensors
    tokens   number of tokens of the response

    Raises ValueError if the record has not one set for each token, or is no valid CSR record.
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


def sets_on_rows(sets: TokenSets, generated: Tensor) -> TokenSets:
    """Return candidate sets for all tokens of a batch, from those of its generated tokens.

    sets        one set for each generated token, in order
    generated   bool of any shape, with as many True entries as there are sets

    Other tokens get an empty set, which stands for the whole vocabulary.
    """
    is_generated = generated.flatten()
    number_of_set = is_generated.cumsum(0) - 1
    # The number -1 stands for an empty set.
    return sets.take(torch.where(is_generated, number_of_set, -1))
