"""Tensor helpers of the adapters.

Supported dtypes, vocabulary shards, objectives and batches of a trainer's arguments, log-probs of
logits, log-probs at several ids of a position, and records of the ids that a sampler could draw.
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
    """Raise NotCovered for a tensor whose dtype the kernels lack, or a sharded DTensor."""
    for x in tensors:
        if x is not None and x.dtype not in MATMUL_DTYPES:
            raise NotCovered(f"dtype {x.dtype}")
        if not all(placement.is_replicate() for placement in getattr(x, "placements", ())):
            raise NotCovered("a sharded DTensor")


# ---- groups of ranks


def even_shard(width: int, group: Any) -> VocabShard | None:
    """Return this rank's shard of a vocabulary that Megatron splits evenly over `group`.

    width   ids per rank
    group   the tensor-parallel group; None for one rank

    Returns None if one rank has the whole vocabulary. Padding rows of the weight count as ids, as
    in the trainers. The gradient of the hidden states stays a partial sum of this rank
    (reduce_hidden=False), which the trainer's layers before the head add up.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    return (
        None
        if ranks == 1
        else VocabShard(dist.get_rank(group) * width, ranks * width, group, False)
    )


def vocab_shard(logits: Tensor, group: Any, megatron: bool) -> VocabShard | None:
    """Return this rank's shard of the vocabulary, or None if logits have the whole vocabulary.

    logits    [..., V] or this rank's [..., V / ranks]; a DTensor must have the placement Shard(-1)
    group     the tensor-parallel group of plain tensors; None for one rank
    megatron  whether Megatron's tensor-parallel group is used if group is None
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
    kind = options.loss_type
    require_one_of("loss_type", kind, (*CLIPPED, "cispo", "sapo", "vespo"))
    if kind in CLIPPED:
        return Clip(
            min(options.epsilon_low, 1.0),  # a ratio is not below 0
            options.epsilon_high,
            math.inf if options.delta is None else options.delta,
        )
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
    """Return a count as a denominator: 1 for a step without tokens."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def zero_ids(like: Tensor) -> Tensor:
    """Return int64 zeros in the shape of `like`: targets for results that do not depend on them.

    Such are a loss of given log-probs, and an entropy.
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

    The log-ratio is at the objective's importance sampling level. The KL term is None without
    reference log-probs.
    """
    logps = logps.flatten()
    x = objective.log_ratio(logps, rows, batch)
    clipped = torch.logical_or(*objective.surrogate.clipped(bounded_exp(x), rows.advantages))
    return x, clipped, None if rows.ref_logps is None else objective.kl_terms(logps, rows, x).value


def excluded_share(out: LossOutput, objective: Objective) -> Tensor:
    """Return the share of tokens that a filter drops, or without filters that the clip bounds."""
    return (
        1 - out.metrics["kept"]
        if objective.filters
        else out.metrics["clip_low"] + out.metrics["clip_high"]
    )


def to_floats(named: Mapping[str, Tensor]) -> dict[str, float]:
    """Return 0-d tensors as Python floats, with one copy to the host."""
    values = [value.detach().float() for value in named.values()]
    return dict(zip(named, torch.stack(values).tolist(), strict=True)) if values else {}


def divergence_of(beta: float) -> Exact:
    """Return the divergence of TRL's and Liger's beta.

    0 is the forward KL, 1 the reverse KL, a value between them the JSD with this mixture weight.
    """
    if beta in (0.0, 1.0):
        return Exact("forward" if beta == 0.0 else "reverse")
    return Exact("jsd", mixture=float(beta))


# ---- log-probs and entropies


def entropy_mode(wanted: bool, gradient: bool = True) -> bool | str:
    """Return the argument entropy= of our functions: False, True or "detached"."""
    return (True if gradient else "detached") if wanted else False


def log_probs_of(
    source: Tensor, targets: Tensor, *, head: Tensor | Head | None = None, temperature: float | Tensor | None = None,
    group: Any = None, options: Options | None = None, entropy_over: str = "kept", **others: Any,
) -> TokenLogprobs:  # fmt: skip
    """Call `token_logprobs` on a trainer's logits, or `linear_logprobs` on its hidden states.

    source        logits [..., V / ranks], or with head hidden states [..., H]
    targets       int64 [...]
    head          the weight [V / ranks, H], or a Head with one
    temperature   a number, or a tensor as in LogitTransform; None leaves transform= to `others`
    group         tensor-parallel group; None for one rank
    entropy_over  "kept": the entropy of a token with a candidate set (kept=) is over the set.
                  "vocabulary": over all ids, by a second call.
    others        more arguments of the function called, such as kept=, mask=, entropy=

    Raises NotCovered for tensors that the kernels do not support.
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
    require_supported(source, weight, bias)
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
    """Return log-probs over candidate sets, and entropies over the whole vocabulary."""
    found = log_probs_of(source, targets, kept=kept, missing=missing, mask=mask, at=at, **others)
    mask = narrow_mask(kept, targets, mask, "mask") if missing == "mask" else mask
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy is True):
        over_vocabulary = log_probs_of(
            source, targets, entropy=entropy, mask=mask, **others
        ).entropy
    return replace(found, entropy=over_vocabulary)


def can_be_overwritten(logits: Tensor) -> bool:
    """Return whether backward may write the gradient of logits into their memory."""
    return logits.requires_grad and not is_leaf_or_view_of_leaf(logits) and logits.is_contiguous()


@with_trainer_names(targets="labels")
def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Return the log-probs of labels, fp32 [...]. verl and SkyRL have a function of this name.

    logits             [..., V]
    labels             int64, as many elements as logits has rows, in any shape
    inplace_backward   whether the gradient overwrites the logits, unless they are a leaf. Autograd
                       raises if another operation still needs them.
    """
    # Another number of labels fails in the call below, with an error that names both shapes.
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
    """Return the entropy of logits [..., V] in nats, fp32 [...]; 0 where mask is False.

    gradient   whether the entropy is differentiable
    """
    kind = True if gradient else "detached"
    return log_probs_of(
        logits, zero_ids(logits[..., 0]), temperature=temperature, mask=mask, entropy=kind
    ).entropy


def logps_in_a_column(
    logits: Tensor, tokens: Tensor, group: Any, wanted: bool, gradient: bool = True, **others: Any
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return (log-probs, entropy) in the shapes that slime and miles return.

    logits     [R, V / ranks]
    tokens     int64 [R]
    group      tensor-parallel group; None for all ranks
    wanted     whether the entropy is computed
    gradient   whether the entropy is differentiable
    others     more arguments of `log_probs_of`

    log-probs are [R, 1], or [0] for R = 0. The entropy is [R] or None.
    """
    kind = entropy_mode(wanted, gradient)
    logps, entropy = log_probs_of(
        logits, tokens, group=group or default_group(), entropy=kind, **others
    )
    return logps[:, None] if len(logps) else logps, entropy


# ---- ids of each row


def logps_at_ids(
    logits: Tensor, ids: Tensor, **others: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return log-probs at K ids of each position, entropies, and the number of distinct ids.

    logits   [..., V]
    ids      [..., K]; may repeat. -1 is padding, with log-prob 0.
    others   more arguments of `log_probs_of`

    The shapes are [..., K], [...] (or None if the entropy is not asked for) and [...].
    """
    # The kernels take each id of a row once: sort the ids, keep the first of equal ones, and copy
    # its log-prob to the others.
    listed = ids.flatten(0, -2).contiguous()
    in_order = listed.sort(-1).values
    first = in_order >= 0
    first[:, 1:] &= in_order[:, 1:] != in_order[:, :-1]
    sets = TokenSets.from_counts(in_order[first], first.sum(-1))
    # If there are candidate sets (kept=), the first id is in them.
    found = log_probs_of(logits, ids[..., 0].clamp(min=0).long(), at=sets, **others)
    of_first = torch.zeros_like(first, dtype=torch.float32).masked_scatter(first, found.also["at"])
    logps = of_first.gather(-1, torch.searchsorted(in_order, listed))
    return logps.view(ids.shape), found.entropy, first.sum(-1).view(ids.shape[:-1])


#: A finite log-prob whose probability is 0.
NO_MASS = -1e4


def score_centering_term(
    centering: ScoreCentering, logps: Tensor, sampler: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | float
) -> Tensor:  # fmt: skip
    """Return the weighted sum of the score-centering term over all tokens, 0-d.

    logps        [..., K], the policy's log-probs of the recorded ids, differentiable
    sampler      [..., K], the sampler's log-probs of the same ids, -inf for padding
    advantages   [...]
    mask         bool [...]; a masked token contributes 0 whatever its values are
    weights      [...] or a number
    """
    is_recorded = (sampler > -math.inf) & mask[..., None]
    advantages = torch.where(mask, advantages, 0.0)
    policy_logps, sampler_logps = (torch.where(is_recorded, x, NO_MASS) for x in (logps, sampler))

    def sum_ids(x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)

    with torch.no_grad():
        _, coefficients = centering(
            policy_logps.double(), sampler_logps.double(), advantages[..., None], sum_ids
        )
        coefficients = coefficients.to(policy_logps.dtype)
    terms = torch.where(coefficients != 0, coefficients * policy_logps, 0.0).sum(-1)
    return torch.where(mask, weights * terms, 0.0).sum()


def divergence_over_ids(exact: Exact, logps: Tensor, teacher: Tensor) -> Tensor:
    """Return the divergence [...] of two sets of log-probs [..., K] at the same ids.

    The sum runs over these ids alone.
    """
    shape = logps.shape[:-1]
    offsets = torch.arange(shape.numel() + 1, device=logps.device) * logps.shape[-1]
    return divergence_at(exact, logps.flatten(), teacher.flatten(), offsets).view(shape)


def response_sets(name: str, record: tuple[Any, Any], tokens: int) -> TokenSets:
    """Return the candidate sets of one response.

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
    """Return sets for all tokens: the given ones, in order, for generated tokens, none for others.

    generated   bool of any shape, with as many True entries as there are sets
    """
    flat = generated.flatten()
    return sets.take(torch.where(flat, flat.cumsum(0) - 1, -1))
