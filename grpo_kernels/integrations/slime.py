"""slime: log-probs and entropy on our kernels, and our objectives through its official hook for a
custom loss.

    # my_loss.py
    from grpo_kernels.integrations import slime
    slots = slime.bind()
    loss = slime.policy_loss()  # from slime's arguments, or policy_loss(Objective(...))

    --loss-type custom_loss --custom-loss-function-path my_loss.loss

`bind` replaces `calculate_log_probs_and_entropy` (fp32 logits [T, V / tensor-parallel ranks]),
including its top-p replay. It works without a custom loss. With `bind(replay=True)` slime's record
of ids is used directly. slime would make a [T, V] mask of it and fill that into a copy of the
logits; neither is made here, and a replayed row reads only the logits of its ids. As in slime, a
token with an empty set (a tool's) has log-prob 0 and no gradient, and rows without a record are
over the whole vocabulary. The entropy is over the whole vocabulary, too, unless
`entropy_over="kept"`.

Log-probs are fp32 numbers that are summed in another order than torch's: they differ from slime's
by a few roundings (2e-6 at most, at log-probs down to -20 over 1,000 ids), where tests of slime
compare some of them within 1e-8.

`policy_loss` calls slime's own `get_log_probs_and_entropy`, which handles context parallelism and
unpacking, and runs the token stage on its results. The weight of a token is the derivative of
slime's `sum_of_sample_mean` with respect to the token's loss, so that shared denominators of
rollouts, per-token losses and custom masks have the same effect as in slime. TIS alone, OPSM and a
custom reducer are refused: for those use slime's loss with `bind` alone.

Score centering (`--use-score-centering`, of slime after 0.3.1): `bind` takes the place of
`calculate_topk_log_probs` too. slime wants its own loss with it; where `policy_loss` gets these
arguments it adds slime's corrections to the term that they correct: REINFORCE, with slime's TIS or
IcePop to the sampler.

Without logits: with `bind(head=True)` and `skip_logits` in slime's two hooks, the model returns
hidden states, and log-probs of the response rows are computed from them and the vocabulary-parallel
output weight, in training and for the old and reference log-probs. The plugin
(`grpo_kernels.plugins.slime`) has these hooks.

Written from slime 0.3.1. slime is in no package registry and needs Megatron, so it was not run: the
tests call stand-ins with its signatures and compare with a transcription of its loss.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch import TokenBatch
from ..checks import require
from ..formulas.centering import ScoreCentering
from ..formulas.filters import TrustRegion
from ..formulas.kl import Kl
from ..formulas.surrogates import Cispo, PolicyGradient
from ..losses import LossOutput, objective_loss
from ..objective import Objective
from ..token_sets import TokenSets
from . import megatron
from ._swap import Adapter, NotCovered, Slots, adapt_arguments, with_trainer_names
from ._tensors import (
    LossAndMetrics,
    bounded_clip,
    default_group,
    entropy_mode,
    even_shard,
    logps_at_ids,
    logps_in_a_column,
    ratio_terms,
    response_sets,
    scored_batch,
)

ADAPTER = Adapter(
    "slime", "slime", ("0.3.1",),
    {"calculate_log_probs_and_entropy": "slime.utils.ppo_utils.calculate_log_probs_and_entropy",
     "calculate_topk_log_probs": "slime.utils.ppo_utils.calculate_topk_log_probs",
     "keep_sets": "slime.backends.megatron_utils.loss._build_topp_keep_mask",
     "get_log_probs_and_entropy": "slime.backends.megatron_utils.loss.get_log_probs_and_entropy"},
    {"`--custom-megatron-init-path grpo_kernels.plugins.slime.init`": "log-probs and entropy, over recorded sets where top-p is on",
     "`--loss-type custom_loss --custom-loss-function-path grpo_kernels.plugins.slime.loss`": "the policy loss of slime's arguments",
     "`--custom-megatron-before-log-prob-hook-path grpo_kernels.plugins.slime.before_log_probs --custom-megatron-before-train-step-hook-path grpo_kernels.plugins.slime.before_train_step`":
     "with the path above, log-probs and entropy of response tokens from hidden states, without logits"},
)  # fmt: skip
#: Options that `policy_loss` refuses; slime's own loss has them.
REFUSED = ("use_tis", "get_mismatch_metrics", "use_opsm", "custom_pg_loss_reducer_function_path")


class Replay(NamedTuple):
    """The candidate sets that slime recorded, one for each of the T rows of its logits.

    kept    a set for each row. An empty set stands for the whole vocabulary.
    scored  bool [T], False for tokens whose recorded set is empty: their log-prob is 0."""

    kept: TokenSets
    scored: Tensor


def bind(
    *,
    replay: bool = False,
    entropy_over: str = "vocabulary",
    head: bool = False,
    strict: bool = False,
    any_version: bool = False,
) -> Slots:
    """Replace slime's functions of log-probs and entropy by ours, until `undo()` of the result.

    Replaces `slime.utils.ppo_utils.calculate_log_probs_and_entropy`, and in versions that have it
    `calculate_topk_log_probs`.

    replay        True: also replace `slime.backends.megatron_utils.loss._build_topp_keep_mask`, so
                  that recorded candidate sets are used without making a [T, V] mask
    entropy_over  with replay=True, the ids that the entropy of a token with a set runs over:
                  "vocabulary", as in slime, or "kept" (the set), which reads fewer logits
    head          True: also replace `slime.backends.megatron_utils.loss.get_log_probs_and_entropy`,
                  for models that return hidden states in place of logits (`skip_logits`)
    strict        True: a call that ours does not support raises RuntimeError. False: slime's own
                  function computes it.
    any_version   True: accept a version of slime that was not tested. False: under such a version
                  the first calls are compared with slime's own, and RuntimeError is raised if they
                  differ, or with replay=True or head=True, which cannot be compared.

    Returns `Slots`: `undo()` restores slime's functions, `counts` has the number of calls. Raises
    RuntimeError if a function of slime has other arguments or is replaced already.
    """
    slots = Slots(ADAPTER, strict, any_version)
    slots.bind(calculate_log_probs_and_entropy, entropy_over=entropy_over)
    if hasattr(sys.modules["slime.utils.ppo_utils"], "calculate_topk_log_probs"):
        slots.bind(calculate_topk_log_probs)
    if replay:
        # Results cannot be compared: ours returns candidate sets, slime's a mask.
        slots.bind(keep_sets, comparable=False)
    if head:
        # slime's own function cannot be called with hidden states.
        slots.bind(get_log_probs_and_entropy, comparable=False, entropy_over=entropy_over)
    return slots


def skip_logits(args: Any, model: Sequence[Any]) -> None:
    """Make slime's model return hidden states and head in place of logits.

    The logits [T, V] then never exist. Functions of log-probs that `bind(head=True)` has replaced
    compute log-probs from hidden states and head. Call it in slime's two hooks:

        --custom-megatron-before-log-prob-hook-path my_hooks.before_log_probs
        --custom-megatron-before-train-step-hook-path my_hooks.before_train_step

    args    slime's arguments. Ids from args.vocab_size on are padding of the output weight. They
            are not in the softmax, unlike in slime.
    model   the chunks that slime passes to its hooks. The model of a critic is not changed.

    Raises ValueError with score centering, which needs logits.
    """
    centers = getattr(args, "use_score_centering", False)
    remedy = "log-probs of the sampler's ids are computed from logits: leave this hook out."
    require(not centers, "use_score_centering", centers, remedy)
    if getattr(model[0], "role", "actor") != "critic":
        megatron.skip_logits(model, getattr(args, "vocab_size", None))


@with_trainer_names(logps="log_probs", targets="unconcat_tokens")
def get_log_probs_and_entropy(
    logits: Any,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[Any] | None = None,
    top_p_token_offsets: Sequence[Any] | None = None,
    entropy_over: str = "vocabulary",
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return an empty tensor, and log-probs and entropies of responses from hidden states.

    logits             the `UnprojectedLogits` that the model returns after `skip_logits`. slime
                       computes a call with logits.
    args               slime's arguments
    unconcat_tokens    the token ids of each sample, prompt and response
    total_lengths, response_lengths
                       the number of tokens of each sample and of its response
    with_entropy       whether the entropy is computed. It is differentiable if args.entropy_coef is
                       not 0.
    non_loss_data      not used
    top_p_token_ids, top_p_token_offsets
                       recorded candidate sets, as in `keep_sets`, or None
    entropy_over       as in `bind`

    The second result is {"log_probs": ..., "entropy": ...}, each a list of one fp32 tensor
    [response tokens of this rank] per sample. "entropy" is left out without with_entropy.

    Only the rows that predict a response token take part in matmuls. slime's own code decides which
    rows a response has under context parallelism, and moves results between ranks.

    The decorator makes errors use the names of these arguments.
    """
    from slime.backends.megatron_utils import loss as theirs

    if not isinstance(logits, megatron.UnprojectedLogits):
        raise NotCovered("logits that an output layer has computed")
    num_rows = logits.size(1)
    device = logits.device
    layout = (total_lengths, response_lengths, args.allgather_cp)
    tokens = theirs._build_shifted_tokens(num_rows, device, unconcat_tokens, *layout)
    # slime cuts the rows of each response out of a tensor. Give it row numbers to learn which rows
    # it takes.
    numbers = torch.arange(num_rows, device=device)
    rows_of_responses, _ = theirs._extract_per_sample(numbers, None, *layout)
    rows = torch.cat(rows_of_responses)
    sets: dict[str, Any] = {}
    if top_p_token_ids is not None and top_p_token_offsets is not None:
        replay = keep_sets(
            T=num_rows,
            vocab_local=0,
            device=device,
            top_p_token_ids=top_p_token_ids,
            top_p_token_offsets=top_p_token_offsets,
            total_lengths=total_lengths,
            response_lengths=response_lengths,
            allgather_cp=args.allgather_cp,
        )
        sets = {
            "kept": replay.kept.take(rows),
            "mask": replay.scored[rows],
            "entropy_over": entropy_over,
        }
    has_gradient = getattr(args, "entropy_coef", 0.0) != 0
    logps, entropy = logits.select(rows).logprobs(
        tokens[rows],
        temperature=getattr(args, "rollout_temperature", 1.0),
        entropy=entropy_mode(with_entropy, has_gradient),
        **sets,
    )
    lengths = [len(x) for x in rows_of_responses]
    results = {"log_probs": list(logps.split(lengths))}
    if entropy is not None:
        results["entropy"] = list(entropy.split(lengths))
    if args.allgather_cp:
        theirs._allgather_cp_redistribute(
            results,
            logits_local_len=num_rows,
            total_lengths=total_lengths,
            response_lengths=response_lengths,
        )
    return torch.empty(0, device=device), results


def keep_sets(
    T: int,
    vocab_local: int,
    device: torch.device,
    top_p_token_ids: Sequence[Any],
    top_p_token_offsets: Sequence[Any],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    allgather_cp: bool,
) -> Replay:
    """Return the recorded candidate sets on this rank's rows of logits.

    The candidate set of a token has the ids that top-p left when it was sampled. slime's function,
    which this replaces, makes a [T, V] mask of its record of these ids. Ours keeps the ids. The
    result is the log_prob_keep_mask of `calculate_log_probs_and_entropy`.

    T                 number of rows of logits on this rank
    vocab_local       not used, because the recorded ids are those of the whole vocabulary
    device            the device of the result
    top_p_token_ids, top_p_token_offsets
                      the record of each response in CSR form, lists or int32 tensors on the CPU:
                      the ids of all its tokens, and the [response length + 1] offsets at which the
                      ids of each token start
    total_lengths, response_lengths
                      number of tokens of each sample (prompt and response), and of its response
    allgather_cp      slime's layout of context parallelism, which slime's own code applies

    Raises ValueError naming the sample if a record does not have one set for each token of its
    response.
    """
    from slime.backends.megatron_utils.loss import _build_shifted_tokens

    # Number the response tokens of all samples from 1 on. Prompt tokens have number 0.
    sets_of_responses = []
    token_numbers = []
    num_numbered = 0
    samples = zip(
        top_p_token_ids, top_p_token_offsets, total_lengths, response_lengths, strict=True
    )
    for b, (ids, offsets, total_length, response_length) in enumerate(samples):
        name = f"rollout_top_p_token_ids[{b}]"
        sets_of_responses.append(response_sets(name, (ids, offsets), response_length))
        numbers = torch.zeros(total_length, dtype=torch.int64)
        first = num_numbered + 1
        numbers[total_length - response_length :] = torch.arange(first, first + response_length)
        token_numbers.append(numbers)
        num_numbered += response_length
    # slime's function lays out token ids on the rows that predict them. Laying out token numbers
    # gives the set of each row: -1 for a row that predicts no response token.
    set_of_row = _build_shifted_tokens(
        T, torch.device("cpu"), token_numbers, total_lengths, response_lengths, allgather_cp
    )
    set_of_row = set_of_row - 1
    recorded = TokenSets.cat(sets_of_responses) if sets_of_responses else TokenSets.whole(0)
    sets = recorded.take(set_of_row)
    is_scored = (set_of_row < 0) | (sets.counts > 0)
    return Replay(kept=sets.to(device), scored=is_scored.to(device))


@with_trainer_names(targets="tokens")
def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | Replay | None = None,
    with_entropy_grad: bool = True,
    *,
    entropy_over: str = "vocabulary",
) -> tuple[Tensor, Tensor | None]:
    """Return (log-probs [T, 1], entropy [T] or None), fp32. Without tokens both have shape [0].

    logits               [T, V], or this rank's [T, V / ranks]
    tokens               int64 [T]
    tp_group             the tensor-parallel group; None for all ranks, as in slime
    with_entropy         whether the entropy is computed
    chunk_size           not used
    log_prob_keep_mask   the ids that the softmax of the log-prob runs over: bool, the shape of
                         logits, in addition to the target, or the result of `keep_sets`. None: all
                         ids.
    with_entropy_grad    whether the entropy is differentiable
    entropy_over         with a result of `keep_sets`, the ids that the entropy runs over:
                         "vocabulary" or "kept" (the sets). Otherwise it runs over the vocabulary.

    The decorator makes errors use the names of these arguments.
    """
    entropy = entropy_mode(with_entropy, with_entropy_grad)
    if log_prob_keep_mask is None:
        return logps_in_a_column(logits, tokens, tp_group, entropy=entropy)
    if isinstance(log_prob_keep_mask, Replay):
        # From `keep_sets`: the candidate set of each row, and which rows have a log-prob.
        return logps_in_a_column(
            logits,
            tokens,
            tp_group,
            entropy=entropy,
            mask=log_prob_keep_mask.scored,
            kept=log_prob_keep_mask.kept,
            entropy_over=entropy_over,
        )
    # slime's own mask: remove the logits of all other ids, except the target's.
    shard = even_shard(logits.shape[-1], tp_group or default_group())
    first_id = 0 if shard is None else shard.start
    ids = torch.arange(logits.shape[-1], device=tokens.device) + first_id
    is_removed = (ids != tokens[:, None]) & ~log_prob_keep_mask
    masked_logits = logits.masked_fill(is_removed, -math.inf)
    logps, _ = logps_in_a_column(masked_logits, tokens, tp_group, entropy=False)
    entropies = None
    if entropy:
        # In slime the mask does not change the entropy.
        _, entropies = logps_in_a_column(logits, tokens, tp_group, entropy=entropy)
    return logps, entropies


@with_trainer_names(at="token_ids")
def calculate_topk_log_probs(
    logits: Tensor, token_ids: Tensor, tp_group: Any, chunk_size: int = -1, temperature: float = 1.0
) -> Tensor:  # fmt: skip
    """Return the log-probs of K given ids of each row, fp32 [R, K].

    It replaces slime's function of this name, which gets the sampler's top K ids. Log-probs are
    over the whole vocabulary. They are computed in one pass over the logits.

    logits        [R, V / ranks]: each rank has the logits of some of the ids
    token_ids     int64 [R, K], ids of the whole vocabulary. An id may repeat. -1 is padding, whose
                  log-prob is 0.
    tp_group      the group of the ranks that have parts of the logits
    chunk_size    not used
    temperature   divides the logits

    The decorator makes errors use the name token_ids, where functions that are called here say
    `at`.
    """
    # slime passes None for the group of all ranks. Here None would mean a single rank.
    group = tp_group or default_group()
    logps, _, _ = logps_at_ids(logits, token_ids, temperature=temperature, group=group)
    return logps


def _centered_term(args: Any) -> dict[str, Any]:
    """Return surrogate= and filters= of the policy term that slime's score centering corrects.

    Score centering removes the drift that a sampler other than the policy causes in the gradient of
    a policy term.

    args   slime's arguments

    The ratio of this term is the policy's probability over the sampler's. slime's correction of
    this ratio decides the surrogate: none is REINFORCE, TIS clamps the ratio, and IcePop drops the
    tokens whose ratio is outside of [low, high].
    """
    from slime.utils.score_centering import get_score_centering_is_config

    remedy = "score centering corrects another term: use grpo."
    require(
        args.advantage_estimator not in ("gspo", "cispo"),
        "advantage_estimator",
        args.advantage_estimator,
        remedy,
    )
    correction = get_score_centering_is_config(args)
    if correction["mode"] == "none":
        return {"surrogate": PolicyGradient()}
    low = correction["low"]
    high = correction["high"]
    if correction["mode"] == "tis":
        return {"surrogate": Cispo(cap=high, low=low)}
    # IcePop: a filter drops tokens, and the ratio is not clamped. A trust region is defined by the
    # distances of its bounds from 1.
    region = TrustRegion("ratio", 1.0 - low, high - 1.0)
    return {"surrogate": Cispo(math.inf), "filters": (region,)}


def objective_of(args: Any) -> Objective:
    """Return the objective that slime's arguments describe, as a sum over tokens.

    args   slime's arguments: clip range, KL, entropy coefficient, advantage estimator

    Raises ValueError naming an argument that is not supported (`REFUSED`).
    """
    centers = getattr(args, "use_score_centering", False)
    remedy = "this loss has no such term: keep slime's own, and use bind() alone."
    for name in REFUSED:  # options of terms that only slime's own loss has
        if name == "use_tis" and centers:
            continue  # `_centered_term` includes TIS
        value = getattr(args, name, None)
        require(not value, name, value, remedy)

    low = args.eps_clip
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    delta = getattr(args, "eps_clip_c", None)
    clip = bounded_clip("slime", low, high, delta, "eps_clip_c", "eps_clip_high")
    if centers:
        policy_term = _centered_term(args)
    elif args.advantage_estimator == "cispo":
        policy_term = {"surrogate": Cispo(cap=1 + high, low=1 - low)}
    else:
        policy_term = {"surrogate": clip}

    kl_name = args.kl_loss_type  # the estimator
    is_gspo = args.advantage_estimator == "gspo"
    is_low_var = kl_name == "low_var_kl"  # k3, clamped
    # slime's "unbiased" KL is weighted by the ratio.
    is_unbiased = args.use_kl_loss and getattr(args, "use_unbiased_kl", False)
    remedy = (
        f"with gspo, score centering or kl_loss_type={kl_name!r} it is slime's own: use k1, k2 or"
        " k3 without these."
    )
    can_be_unbiased = not (is_gspo or is_low_var or centers)
    require(can_be_unbiased or not is_unbiased, "use_unbiased_kl", is_unbiased, remedy)
    kl = Kl(
        "k3" if is_low_var else kl_name,
        weighting="ratio" if is_unbiased else "none",
        clamp=10.0 if is_low_var else math.inf,
    )
    return Objective(
        **policy_term,
        level="sequence" if is_gspo else "token",
        aggregate="token-sum",
        kl=kl,
        beta=float(args.kl_loss_coef) if args.use_kl_loss else 0.0,
        entropy_coef=float(args.entropy_coef),
    )


def policy_loss(objective: Objective | None = None) -> Callable[..., LossAndMetrics]:
    """Return a custom loss for slime: (args, batch, logits, sum_of_sample_mean) -> (loss, metrics).

    objective   None for `objective_of(args)`, the objective of slime's arguments. Another Objective
                must have aggregate="token-sum", because slime's reducer divides. It cannot be
                combined with score centering.

    The arguments of the result are slime's:

    args                 slime's arguments
    batch                its micro-batch: token ids, lengths, masks, advantages, other log-probs
    logits               [1, T, V / ranks], or `UnprojectedLogits` after `skip_logits`
    sum_of_sample_mean   slime's reducer, which sums a value of each token with slime's denominators

    The loss is 0-d, and the metrics are 0-d tensors under slime's names.
    """
    if objective is not None:
        remedy = 'slime\'s reducer holds the denominators: make it "token-sum".'
        require(objective.aggregate == "token-sum", "aggregate", objective.aggregate, remedy)

    @adapt_arguments
    @with_trainer_names(
        logps="log_probs",
        old_logps="log_probs",
        ref_logps="ref_log_probs",
        mask="loss_masks",
        targets="loss_masks",
    )
    def loss(
        args: Any,
        batch: dict[str, Any],
        logits: Tensor,
        sum_of_sample_mean: Callable[[Tensor], Tensor],
    ) -> LossAndMetrics:
        from slime.backends.megatron_utils import loss as theirs

        centers = getattr(args, "use_score_centering", False)
        remedy = "it corrects its own policy term: pass no objective."
        require(objective is None or not centers, "use_score_centering", True, remedy)
        spec = objective_of(args) if objective is None else objective
        _, scored = theirs.get_log_probs_and_entropy(
            logits,
            args=args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            with_entropy=True,
            **theirs.get_rollout_top_p_logprob_kwargs(args, batch),
        )

        def concatenate(parts: list[Tensor] | None) -> Any:
            """Return the tensors of all samples as one, None for None."""
            if parts is None:
                return None
            return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float32)

        lengths = [x.numel() for x in scored["log_probs"]]
        logps = concatenate(scored["log_probs"])
        if spec.level != "token" and lengths != [x.numel() for x in batch["loss_masks"]]:
            raise ValueError(
                f"level={spec.level!r} needs whole sequences, but context parallelism has cut them."
            )
        # The reducer is linear, so its result for a single token is the derivative with respect to
        # that token. It applies its own masks.
        weights = torch.zeros_like(logps, dtype=torch.float32)
        if lengths:  # without samples the reducer may return a plain number
            probe = weights.requires_grad_()
            with torch.enable_grad():
                (weights,) = torch.autograd.grad(
                    sum_of_sample_mean(probe), probe, materialize_grads=True
                )

        def reduce(values: Tensor) -> Tensor:
            return torch.where(weights != 0, weights * values, 0.0).sum()

        needs_rollout = args.use_rollout_logprobs or centers
        rollout_logps = concatenate(
            batch["rollout_log_probs"] if needs_rollout else batch.get("rollout_log_probs")
        )
        old_logps = concatenate(batch.get("log_probs"))
        if args.use_rollout_logprobs:
            old_logps = rollout_logps
        advantages = concatenate(batch.get("advantages"))
        offsets = torch.tensor([0, *(lengths or [0])], device=logps.device).cumsum(0)
        rows = scored_batch(
            weights,
            advantages,
            old_logps=rollout_logps if centers else old_logps,
            ref_logps=concatenate(batch.get("ref_log_probs")),
            cu_seqlens=offsets,
        )
        entropy = concatenate(scored["entropy"])
        out = objective_loss(logps, rows, spec, entropy=entropy, token_weights=weights)
        value = out.loss
        if logps.numel() == 0:
            value = value + 0 * logits.sum()  # the loss of every rank needs a graph

        token_metrics = _metrics(spec, out, rows)
        if old_logps is None:
            old_logps = out.logps
        if rollout_logps is not None:
            compared = out.logps if centers else old_logps
            token_metrics["train_rollout_logprob_abs_diff"] = (compared - rollout_logps).abs()
        if centers:
            # With an advantage of 1, this is the importance weight alone.
            importance_weights = ScoreCentering.of(spec).advantage_times_weight(
                out.logps, rollout_logps, torch.ones_like(rollout_logps)
            )
            terms = theirs.get_score_centering_terms(args, batch, logits)
            used_advantages = torch.where(weights != 0, advantages, 0.0)
            value = value + reduce(used_advantages * terms["sc_correction"])
            token_metrics["ppo_kl"] = old_logps - out.logps
            token_metrics["pg_clipfrac"] = torch.zeros_like(importance_weights)
            token_metrics |= terms
            token_metrics["sc_importance_weight"] = importance_weights
        metrics = {name: reduce(x.detach()) for name, x in token_metrics.items()}
        metrics["loss"] = value.detach()
        # loss = pg_loss - entropy_coef * entropy + beta * kl
        entropy_term = spec.entropy_coef * metrics["entropy_loss"]
        kl_term = spec.beta * metrics.get("kl_loss", 0.0)
        metrics["pg_loss"] = metrics["loss"] + entropy_term - kl_term
        return value, metrics

    return loss


def _metrics(objective: Objective, out: LossOutput, batch: TokenBatch) -> dict[str, Tensor]:
    """Return slime's metrics of each token under slime's names, fp32 [N] each.

    objective   defines the ratio, its clip range and the KL
    out         the result of the loss
    batch       the batch of N tokens
    """
    log_ratio, is_clipped, kl = ratio_terms(objective, out.logps, out.rows, batch)
    metrics = {
        "entropy_loss": out.entropy,
        "pg_clipfrac": is_clipped.float(),
        "ppo_kl": -log_ratio,
    }
    if kl is not None:
        metrics["kl_loss"] = kl
    return metrics
