"""miles: log-probs and entropy over the sets that its rollouts recorded, from the logits of their
ids alone.

    from grpo_kernels.integrations import miles
    slots = miles.bind(args)        # --custom-megatron-init-path: fn(args), in every worker

`bind` replaces `calculate_log_probs_and_entropy` (logits [R, V / tensor-parallel ranks]) and
`build_local_sampling_mask`, which makes a [R, V] mask of a `RolloutSamplingMask`: the record goes
to the rows as it is. Without replay the first is replaced alike.

What miles refuses is refused here: a token without ids (unless the record is a
`PartialSamplingMask`: then its row runs over the vocabulary), records that have not a set for each
token, a target outside of its set, and replay with a KL or distillation from a teacher, whose
log-probs run over the vocabulary: `reference_over="kept"` says that they run over the same sets.
The entropy is over the vocabulary unless `entropy_over="kept"`. True on-policy mode is left to
miles, and refused with replay.

With `--loss-type score_centering` it also replaces `selected_log_probs_and_entropy`: one pass
over a row gives the entropy and the log-probs of its token and of the sampler's ids. The loss is
miles' own.

Without logits: with `bind(args, head=True)` and `skip_logits` in miles' two hooks, the model
returns hidden states, and log-probs of the response rows are computed from them and the
vocabulary-parallel output weight. The plugin (`grpo_kernels.plugins.miles`) has these hooks. Replay
and score centering are computed from logits.

For a loss of your own, `kept_sets` makes the sets of a packed batch of such records.

Written from miles 0.1.0 and its branches of August 2026, and from later files of it. No registry
has it and it needs Megatron: the tests run stand-ins with its signatures.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..checks import require
from ..options import Options
from ..token_sets import TokenSets
from . import megatron
from ._swap import Adapter, NotCovered, Slots, import_first, with_trainer_names
from ._tensors import (
    entropy_mode,
    even_shard,
    logps_at_ids,
    logps_in_a_column,
    response_sets,
    sets_on_rows,
)

ADAPTER = Adapter(
    "miles", "miles", ("0.1.0",),
    {"calculate_log_probs_and_entropy":
     ("miles.backends.training_utils.loss_hub.math_utils.calculate_log_probs_and_entropy",
      "miles.backends.training_utils.loss.hub.math_utils.calculate_log_probs_and_entropy"),
     "selected_log_probs_and_entropy":
     ("miles.backends.training_utils.loss_hub.score_centering.selected_log_probs_and_entropy",
      "miles.backends.training_utils.loss.hub.score_centering.selected_log_probs_and_entropy"),
     "get_log_probs_and_entropy":
     ("miles.backends.training_utils.loss_hub.logit_processors.get_log_probs_and_entropy",
      "miles.backends.training_utils.loss.hub.logit_processors.get_log_probs_and_entropy"),
     "local_sets":
     ("miles.backends.training_utils.sampling_mask.build_local_sampling_mask",
      "miles.backends.training_utils.data.sampling_mask.build_local_sampling_mask")},
    {"`--custom-megatron-init-path grpo_kernels.plugins.miles.init`": "log-probs and entropy, over recorded sets",
     "`--custom-megatron-before-log-prob-hook-path grpo_kernels.plugins.miles.before_log_probs --custom-megatron-before-train-step-hook-path grpo_kernels.plugins.miles.before_train_step`":
     "with the path above, log-probs and entropy of response tokens from hidden states, without logits"},
)  # fmt: skip
#: Arguments of miles that compare with log-probs of another network.
COMPARED = ("use_kl_loss", "kl_coef", "use_opd")


def bind(
    args: Any,
    *,
    reference_over: str | None = None,
    entropy_over: str = "vocabulary",
    missing: str = "raise",
    head: bool = False,
    strict: bool = False,
    any_version: bool = False,
) -> Slots:
    """Replace miles' functions of log-probs and entropy by ours, until `undo()` of the result.

    args            miles' arguments. If rollout_top_p is below 1 or rollout_top_k above 0, the
                    log-probs are over the candidate sets that the rollouts recorded ("replay").
    reference_over  "kept" declares that the log-probs of a reference or teacher are over the same
                    candidate sets. None: they are over the vocabulary.
    entropy_over    the ids that the entropy of a token with a set runs over: "vocabulary", or
                    "kept" (the set), which saves a second pass
    missing         what to do with a target outside of its set, as in `token_logprobs`. "raise"
                    waits for the device.
    head            True: also replace `get_log_probs_and_entropy`, for models that return hidden
                    states in place of logits (`skip_logits`). Not with replay.
    strict          True: a call that ours does not support raises RuntimeError. False: miles' own
                    function computes it.
    any_version     False: under a version of miles that was not tested, the first calls are
                    compared with miles' own functions, and RuntimeError is raised if they differ.
                    True: they are not compared.

    Returns `Slots`: `undo()` restores miles' functions, and `counts` has the number of calls.

    Raises ValueError for replay with a KL or a teacher but without reference_over. Raises
    RuntimeError if a function is replaced already or has other arguments, and with replay or head
    under a version of miles that was not tested, unless any_version=True.
    """
    remedy = "log-probs over all ids and sets make no KL: pass 'kept'."
    require(reference_over in (None, "kept"), "reference_over", reference_over, remedy)
    replays = getattr(args, "rollout_top_p", 1.0) < 1.0 or getattr(args, "rollout_top_k", -1) > 0
    # The loss of score centering keeps log-probs over sets and over the vocabulary apart.
    centers = getattr(args, "loss_type", None) == "score_centering"
    if replays and reference_over is None and not centers:
        remedy = (
            "with replay miles refuses it, the other network's log-probs being over the vocabulary."
            " Switch one off, or pass reference_over='kept' if they run over the same sets."
        )
        for name in COMPARED:
            value = getattr(args, name, None)
            require(not value, name, value, remedy)
    remedy = "log-probs over recorded sets are computed from logits: pass head=False."
    require(not (head and (replays or centers)), "head", head, remedy)
    slots = Slots(ADAPTER, strict, any_version)
    if head:
        # miles' own function cannot be called with hidden states.
        slots.bind(get_log_probs_and_entropy, comparable=False)
    slots.bind(calculate_log_probs_and_entropy, missing=missing, entropy_over=entropy_over)
    if replays:
        # Results cannot be compared: ours returns candidate sets, miles' a mask.
        slots.bind(local_sets, comparable=False)
    if centers:
        slots.bind(selected_log_probs_and_entropy, missing=missing)
    return slots


def skip_logits(args: Any, model: Sequence[Any]) -> None:
    """Make miles' model return hidden states and head in place of logits.

    The logits [T, V] then never exist. Functions of log-probs that `bind(args, head=True)` has
    replaced compute log-probs from hidden states and head. Call it in miles' two hooks:

        --custom-megatron-before-log-prob-hook-path my_hooks.before_log_probs
        --custom-megatron-before-train-step-hook-path my_hooks.before_train_step

    args    miles' arguments. Ids from args.vocab_size on are padding of the output weight. They are
            not in the softmax, unlike in miles.
    model   the chunks that miles passes to its hooks. The model of a critic is not changed.
    """
    if getattr(model[0], "role", "actor") != "critic":
        megatron.skip_logits(model, getattr(args, "vocab_size", None))


@with_trainer_names(targets="unconcat_tokens")
def get_log_probs_and_entropy(
    logits: Any,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
    non_loss_data: bool = True,
    max_seq_lens: Sequence[int] | None = None,
) -> dict[str, list[Tensor]]:
    """Return the log-probs and entropies of responses, computed from hidden states.

    logits             the `UnprojectedLogits` that the model returns after `skip_logits`. miles
                       computes a call with logits.
    args               miles' arguments
    unconcat_tokens    the token ids of each sample, prompt and response
    total_lengths, response_lengths
                       the number of tokens of each sample and of its response
    with_entropy       whether the entropy is computed
    entropy_requires_grad
                       whether the entropy is differentiable
    non_loss_data      not used
    max_seq_lens       the padded length of each sample, for miles' own code

    Returns {"log_probs": ..., "entropy": ...}, each a list of one fp32 tensor
    [response tokens of this rank] per sample. "entropy" is left out without with_entropy.

    Only the rows that predict a response token take part in matmuls. miles' own code decides which
    rows a response has under context parallelism, and moves results between ranks.

    The decorator makes errors use the names of these arguments.
    """
    if not isinstance(logits, megatron.UnprojectedLogits):
        raise NotCovered("logits that an output layer has computed")
    remedy = "it is computed from logits: do not use skip_logits with it."
    require(not args.true_on_policy_mode, "true_on_policy_mode", True, remedy)
    home, _ = import_first(ADAPTER.replaces["get_log_probs_and_entropy"])
    theirs = sys.modules[home]
    # miles cuts the rows of each response out of the logits. Give it row numbers in place of logits
    # to learn which rows it takes. With a single column miles does not divide by the temperature.
    numbers = logits.row_numbers()
    layout = {"total_lengths": total_lengths, "response_lengths": response_lengths}
    responses = theirs.get_responses(
        numbers, args=args, unconcat_tokens=unconcat_tokens, max_seq_lens=max_seq_lens, **layout
    )
    rows = []
    tokens = []
    for chunk, chunk_tokens in responses:
        rows.append(chunk[:, 0].long())
        # For a response without tokens, miles returns no rows, but all tokens of the text.
        tokens.append(chunk_tokens[: len(chunk)])
    temperature = args.rollout_temperature if args.rollout_temperature > 0 else 1.0
    logps, entropy = logits.select(torch.cat(rows)).logprobs(
        torch.cat(tokens),
        temperature=temperature,
        entropy=entropy_mode(with_entropy, entropy_requires_grad),
    )
    lengths = [len(x) for x in rows]
    results = {"log_probs": list(logps.split(lengths))}
    if entropy is not None:
        results["entropy"] = list(entropy.split(lengths))
    if args.allgather_cp:
        theirs.allgather_cp_redistribute(
            results, logits=numbers, args=args, max_seq_lens=max_seq_lens, **layout
        )
    return results


def _sets_of_response(name: str, record: Any, num_tokens: int) -> TokenSets:
    """Return the candidate sets of a response from miles' record of it.

    name         the name of the record, for errors
    record       a `RolloutSamplingMask` or `PartialSamplingMask`
    num_tokens   the number of tokens of the response

    Raises ValueError if there is not one set for each token, or if a set is empty that may not be.
    """
    if hasattr(record, "_as_tensors"):  # in some versions of miles
        ids, offsets = record._as_tensors()
    else:
        ids, offsets = record.ids, record.offsets
    sets = response_sets(name, (ids, offsets), num_tokens)
    empty_rows = (sets.counts == 0).nonzero()
    if len(empty_rows) > 0 and not getattr(record, "allows_empty_rows", False):
        raise ValueError(
            f"{name} has no ids for response token {int(empty_rows[0])}: miles records a set for"
            " each, of one id where the token was not sampled. A PartialSamplingMask may leave"
            " tokens out."
        )
    return sets


def kept_sets(
    masks: Sequence[Any], total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> TokenSets:
    """Return the candidate sets of the rows of a packed batch, on the CPU.

    The candidate set of a token has the ids that top-k or top-p left when it was sampled. miles
    records one for each response token. Row i has the set of token i + 1, which it predicts. There
    are sum(total_lengths) rows.

    masks              miles' record of each sample, a `RolloutSamplingMask`
    total_lengths      number of tokens of each sample, prompt and response
    response_lengths   number of tokens at its end that are the response

    A row that predicts no response token has an empty set, which stands for the whole vocabulary.
    So has a row without ids in a `PartialSamplingMask`, which may leave tokens out. Raises
    ValueError naming sample and token if another record has an empty set, or if the number of sets
    is not the number of response tokens.
    """
    records = []
    predicts_response = torch.zeros(sum(total_lengths), dtype=torch.bool)
    end = 0
    samples = zip(masks, total_lengths, response_lengths, strict=True)
    for b, (mask, total_length, response_length) in enumerate(samples):
        records.append(_sets_of_response(f"masks[{b}]", mask, response_length))
        end += total_length
        # The last row of a sample predicts nothing.
        predicts_response[end - 1 - response_length : end - 1] = True
    if not records:
        return TokenSets.whole(0)
    return sets_on_rows(TokenSets.cat(records), predicts_response)


def local_sets(
    logits: Tensor,
    sampling_mask: Any,
    response_indices: Sequence[int] | Tensor,
    *,
    tp_rank: int = 0,
    response_length: int | None = None,
) -> TokenSets:
    """Return the candidate sets of rows of logits, in place of the mask that miles makes.

    The candidate set of a token has the ids that top-k or top-p left when it was sampled. miles
    makes a [R, V] mask of its record of these ids. Ours keeps the ids.

    logits             [R, V / ranks]; only the device is used
    sampling_mask      miles' record of the response
    response_indices   [R]: the response token that each row predicts
    tp_rank            not used: ids are those of the whole vocabulary on every rank
    response_length    the number of tokens of the response. None: the length of the record.
    """
    if not isinstance(response_indices, Tensor):
        response_indices = [*response_indices]
    index = torch.as_tensor(response_indices, dtype=torch.int64)
    num_tokens = len(sampling_mask) if response_length is None else response_length
    sets = _sets_of_response("sampling_mask", sampling_mask, num_tokens)
    return sets[index].to(logits.device)


@with_trainer_names(targets="tokens")
def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
    chunk_size: int = -1,
    true_on_policy: bool = False,
    vocab_size: int | None = None,
    sampling_mask: TokenSets | None = None,
    temperature: float = 1.0,
    debug_unified_grad_fused_logprob: bool = False,
    *,
    missing: str = "raise",
    entropy_over: str = "vocabulary",
) -> tuple[Tensor, Tensor | None]:
    """Return (log-probs [R, 1], entropy [R] or None), fp32. Without tokens both have shape [0].

    logits          [R, V / ranks]
    tokens          int64 [R]
    tp_group        the ranks that the vocabulary is sharded over. None: all.
    with_entropy    False: the entropy is None
    entropy_requires_grad   whether the entropy has a gradient
    temperature     divides the logits
    sampling_mask   candidate sets from `local_sets`, or None
    missing, entropy_over   as in `bind`

    A call with true_on_policy is left to miles. chunk_size, vocab_size and
    debug_unified_grad_fused_logprob are not used.

    The decorator makes errors use the names of these arguments.
    """
    if true_on_policy:
        # miles' own function has no candidate sets in this mode, so it cannot compute the call.
        remedy = "with replay it is miles' own: undo() this binding for it."
        require(sampling_mask is None, "true_on_policy", True, remedy)
        raise NotCovered("true on-policy mode")
    return logps_in_a_column(
        logits,
        tokens,
        tp_group,
        entropy=entropy_mode(with_entropy, entropy_requires_grad),
        temperature=temperature,
        kept=sampling_mask,
        missing=missing,
        entropy_over=entropy_over,
    )


@with_trainer_names(at="token_ids", targets="token_ids")
def selected_log_probs_and_entropy(
    logits: Tensor,
    token_ids: Tensor,
    *,
    group: Any = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk_size: int = -1,
    with_entropy: bool = False,
    sampling_support: bool = False,
    missing: str = "raise",
) -> tuple[Tensor, Tensor]:
    """Return (log-probs of token_ids [R, 1 + K], entropy [R]), fp32, both differentiable.

    logits             [R, V / ranks]
    token_ids          int64 [R, 1 + K]: the target of each row, then K extra ids, which may repeat.
                       -1 is padding, with log-prob 0.
    group              the ranks that the vocabulary is sharded over. None: one rank.
    vocab_size         the number of real ids. Larger ids pad the head and are not in the softmax.
                       None: all ids are real.
    temperature        divides the logits
    chunk_size         not used
    with_entropy       False: the entropy is 0
    sampling_support   True: the softmax is over the K extra ids. A row without extra ids has zeros.
    missing            with sampling_support: what to do with a target that is not among the extra
                       ids, as in `token_logprobs`

    If the last rank has no real id, miles computes the call.

    The decorator makes errors use the names of these arguments.
    """
    local_vocab = logits.shape[-1]
    shard = even_shard(local_vocab, group)
    shard_start = 0 if shard is None else shard.start
    padded_vocab = local_vocab if shard is None else shard.vocab
    vocab = padded_vocab if vocab_size is None else vocab_size
    # Every rank decides the same, from the first id of the last rank.
    if vocab <= padded_vocab - local_vocab:
        raise NotCovered("a rank that has padding of the head alone")
    if shard is not None:
        shard = replace(shard, vocab=vocab)
    kept = None
    mask = None
    if sampling_support:
        extra_ids = token_ids[:, 1:]
        kept = TokenSets.from_padded(extra_ids)
        mask = (extra_ids >= 0).any(-1)
    logps, entropy, _ = logps_at_ids(
        logits[:, : vocab - shard_start],
        token_ids,
        temperature=temperature,
        entropy=with_entropy,
        kept=kept,
        missing=missing,
        mask=mask,
        options=Options(shard=shard),
    )
    if entropy is None:
        entropy = logits.new_zeros(len(logits), dtype=torch.float32)
    return logps, entropy
