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
    **how: bool,
) -> Slots:
    """Put our functions in the place of miles'; the result undoes it, see `Slots`, which has the
    errors too.

    args            miles' arguments: rollout_top_p and rollout_top_k say whether there is replay.
    reference_over  "kept" declares that the log-probs of a reference or teacher run over the same
                    sets.
    entropy_over    of replayed rows: "vocabulary", or "kept", the entropy over the set, which saves
                    a second pass.
    missing         of replayed rows, as in `token_logprobs`. "raise" waits for the device.
    head            True: also replace `get_log_probs_and_entropy`, for models that return hidden
                    states in place of logits (`skip_logits`). Not with replay.
    how             strict and any_version of `Slots`; replay cannot be compared.
    Raises ValueError for replay with a KL or a teacher and no declaration.
    """
    require(
        reference_over in (None, "kept"),
        "reference_over",
        reference_over,
        "log-probs over all ids and sets make no KL: pass 'kept'.",
    )
    replays = getattr(args, "rollout_top_p", 1.0) < 1.0 or getattr(args, "rollout_top_k", -1) > 0
    centers = (
        getattr(args, "loss_type", None) == "score_centering"
    )  # a loss that keeps the two apart
    for name in COMPARED if replays and reference_over is None and not centers else ():
        remedy = (
            "with replay miles refuses it, the other network's log-probs being over the vocabulary."
            " Switch one off, or pass reference_over='kept' if they run over the same sets."
        )
        require(not getattr(args, name, None), name, getattr(args, name, None), remedy)
    remedy = "log-probs over recorded sets are computed from logits: pass head=False."
    require(not (head and (replays or centers)), "head", head, remedy)
    slots = Slots(ADAPTER, **how)
    if head:
        slots.bind(get_log_probs_and_entropy, comparable=False)
    slots.bind(calculate_log_probs_and_entropy, missing=missing, entropy_over=entropy_over)
    if replays:
        slots.bind(local_sets, comparable=False)
    if centers:
        slots.bind(selected_log_probs_and_entropy, missing=missing)
    return slots


def skip_logits(args: Any, model: Sequence[Any]) -> None:
    """Make miles' model return hidden states and head in place of logits, from then on. Requires
    `bind(args, head=True)`.

        --custom-megatron-before-log-prob-hook-path my_hooks.before_log_probs
        --custom-megatron-before-train-step-hook-path my_hooks.before_train_step

    args    miles' arguments. Ids from args.vocab_size on pad the output weight: they are not in the
            softmax, unlike in miles.
    model   the chunks that miles passes to its hooks; those of a critic are left alone
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
    """Compute the log-probs and entropies of responses from hidden states. Only the rows that
    predict a response token take part in matmuls.

    logits   what the model returns after `skip_logits`. Logits are left to miles.

    The other arguments are miles'. Returns a list of one fp32 tensor per sample for "log_probs",
    and for "entropy" if it is asked for. miles' own code decides which rows a response has in each
    layout of context parallelism, and moves them between ranks.
    """
    if not isinstance(logits, megatron.UnprojectedLogits):
        raise NotCovered("logits that an output layer has computed")
    remedy = "it is computed from logits: do not use skip_logits with it."
    require(not args.true_on_policy_mode, "true_on_policy_mode", True, remedy)
    home, _ = import_first(ADAPTER.replaces["get_log_probs_and_entropy"])
    theirs = sys.modules[home]
    numbers = logits.row_numbers()
    layout = {"total_lengths": total_lengths, "response_lengths": response_lengths}
    # A temperature would divide the numbers if they had more than one column.
    responses = theirs.get_responses(
        numbers, args=args, unconcat_tokens=unconcat_tokens, max_seq_lens=max_seq_lens, **layout
    )
    rows = []
    tokens = []
    for chunk, chunk_tokens in responses:
        rows.append(chunk[:, 0].long())
        tokens.append(chunk_tokens[: len(chunk)])  # without a response, miles has all tokens here
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


def _sets(name: str, record: Any, tokens: int) -> TokenSets:
    sets = response_sets(
        name,
        record._as_tensors() if hasattr(record, "_as_tensors") else (record.ids, record.offsets),
        tokens,
    )
    empty = (sets.counts == 0).nonzero()
    if len(empty) and not getattr(record, "allows_empty_rows", False):
        raise ValueError(
            f"{name} has no ids for response token {int(empty[0])}: miles records a set for each,"
            " of one id where the token was not sampled. A PartialSamplingMask may leave tokens"
            " out."
        )
    return sets


def kept_sets(
    masks: Sequence[Any], total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> TokenSets:
    """Return the sets of the rows of a packed batch, [sum of total_lengths], on the CPU: row i has
    the set of token i + 1.

    masks   a `RolloutSamplingMask` for each sample; a response, of response_lengths, is the end of
            its text, of total_lengths. Rows that predict no response token, and in a
            `PartialSamplingMask` those without ids, stand for the whole vocabulary.

    Raises ValueError, with the sample and the token, where a record has not a set for each token of
    its response, or an empty one.
    """
    records = []
    rows = torch.zeros(sum(total_lengths), dtype=torch.bool)
    end = 0
    for b, (mask, total, tokens) in enumerate(
        zip(masks, total_lengths, response_lengths, strict=True)
    ):
        records.append(_sets(f"masks[{b}]", mask, tokens))
        end += total
        rows[end - 1 - tokens : end - 1] = True
    return sets_on_rows(TokenSets.cat(records), rows) if records else TokenSets.whole(0)


def local_sets(
    logits: Tensor,
    sampling_mask: Any,
    response_indices: Sequence[int] | Tensor,
    *,
    tp_rank: int = 0,
    response_length: int | None = None,
) -> TokenSets:
    """The sets of the rows of logits [R, V / ranks], which score the response tokens
    response_indices [R]; in the place of the mask that miles makes of a sampling_mask. Ids are
    those of the whole vocabulary on every rank, so tp_rank is not needed.

    response_length   the number of tokens of the response; None: the length of the record.
    """
    index = torch.as_tensor(
        response_indices if isinstance(response_indices, Tensor) else [*response_indices],
        dtype=torch.int64,
    )
    sets = _sets(
        "sampling_mask",
        sampling_mask,
        len(sampling_mask) if response_length is None else response_length,
    )
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
    """Return (log-probs [R, 1], entropy [R] or None), fp32; logits [R, V / ranks], tokens [R]; both
    [0] of no tokens.

    tp_group        the ranks that the vocabulary is cut over; None: all.
    with_entropy, entropy_requires_grad   whether to compute the entropy, and whether it has a
                                          gradient. temperature divides the
    logits. sampling_mask   what `local_sets` makes, or None.
    missing, entropy_over   as in `bind`.
    true_on_policy  left to miles. chunk_size, vocab_size and debug_unified_grad_fused_logprob
                    change nothing here.
    """
    if true_on_policy:
        require(
            sampling_mask is None,
            "true_on_policy",
            True,
            "with replay it is miles' own: undo() this binding for it.",
        )
        raise NotCovered("true on-policy mode")
    return logps_in_a_column(
        logits, tokens, tp_group, with_entropy, entropy_requires_grad, temperature=temperature, kept=sampling_mask, missing=missing,
        entropy_over=entropy_over,
    )  # fmt: skip


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
    """Return (log-probs of token_ids [R, 1 + K], entropy [R], 0 unless with_entropy), fp32, both
    with gradient; logits [R, V / ranks]. An id of -1 is padding, with log-prob 0, and an id may
    stand in a row twice.

    group            the ranks that the vocabulary is cut over; None: one rank.
    vocab_size       ids from this on are padding of the head, and in no softmax.
    temperature      divides the logits. chunk_size is not needed.
    sampling_support   True: the softmax is over the ids after the first, which is the token; a row
                       without them has zeros.
    missing          what becomes of a token that is not among them, as in `token_logprobs`.
    """
    width = logits.shape[-1]
    shard = even_shard(logits.shape[-1], group)
    start, whole = (0, width) if shard is None else (shard.start, shard.vocab)
    vocab = whole if vocab_size is None else vocab_size
    if vocab <= whole - width:
        raise NotCovered("a rank that has padding of the head alone")
    options = Options(shard=None if shard is None else replace(shard, vocab=vocab))
    kept = None
    mask = None
    if sampling_support:
        sets = token_ids[:, 1:]
        kept = TokenSets.from_padded(sets)
        mask = (sets >= 0).any(-1)
    at, entropy, _ = logps_at_ids(
        logits[:, : vocab - start],
        token_ids,
        temperature=temperature,
        entropy=with_entropy,
        kept=kept,
        missing=missing,
        mask=mask,
        options=options,
    )
    return at, logits.new_zeros(len(logits), dtype=torch.float32) if entropy is None else entropy
