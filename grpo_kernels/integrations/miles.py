"""miles: log-probs and entropy over the sets that its rollouts recorded, from the logits of their ids alone.

    from grpo_kernels.integrations import miles
    slots = miles.bind(args)        # --custom-megatron-init-path: fn(args), in every worker

`bind` replaces `calculate_log_probs_and_entropy` (logits [R, V / tensor-parallel ranks]) and `build_local_sampling_mask`, which
makes a [R, V] mask of a `RolloutSamplingMask`: the record goes to the rows as it is. Without replay the first is replaced
alike.

What miles refuses is refused here: a token without ids (unless the record is a `PartialSamplingMask`: then its row runs over the
vocabulary), records that have not a set for each token, a target outside of its set, and replay with a KL or distillation from a
teacher, whose log-probs run over the vocabulary: `reference_over="kept"` says that they run over the same sets. The entropy is over
the vocabulary unless `entropy_over="kept"`. True on-policy mode is left to miles, and refused with replay.

For a loss of your own, `kept_sets` makes the sets of a packed batch of such records.

Written from miles 0.1.0 and its branches of August 2026, and from later files of it. No registry has it and it needs Megatron: the
tests run stand-ins with its signatures.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch

from ..logprobs import token_logprobs
from ..specs import LogitTransform, Options
from ..token_sets import TokenSets
from ._records import first_empty, on_rows, predicting, response_sets
from ._shared import default_group, even_shard, plain
from ._slots import NotCovered, Ragged, untested

Tensor = torch.Tensor

TESTED = ("0.1.0",)
HOME = "miles.backends.training_utils"
#: Where miles has its two functions, by version.
MASKS = (f"{HOME}.sampling_mask", f"{HOME}.data.sampling_mask")
MATHS = (f"{HOME}.loss_hub.math_utils", f"{HOME}.loss.hub.math_utils")
#: Arguments of miles that compare with log-probs of another network.
COMPARED = ("use_kl_loss", "kl_coef", "use_opd")


def bind(
    args: Any,
    *,
    reference_over: str | None = None,
    entropy_over: str = "vocabulary",
    missing: str = "raise",
    strict: bool = False,
    any_version: bool = False,
) -> Ragged:
    """Put our functions in the place of miles'; the result undoes it, by `undo()` or as a context manager.

    args            miles' arguments: rollout_top_p and rollout_top_k say whether there is replay.
    reference_over  "kept" declares that the log-probs of a reference or teacher run over the same sets.
    entropy_over, missing   of replayed rows, as in `Options`. missing="raise" waits for the device.
    strict          True: a call that has to be left to miles raises RuntimeError instead.
    any_version     True: no comparison under a version that was not tested, see `_slots.Trial`; replay cannot be compared.
    Raises ValueError for replay with a KL or a teacher and no declaration, RuntimeError where it is bound already, and in the first
    step where such a comparison fails."""
    version = untested("miles", TESTED, any_version)
    replays = getattr(args, "rollout_top_p", 1.0) < 1.0 or getattr(args, "rollout_top_k", -1) > 0
    compared = next((name for name in COMPARED if getattr(args, name, None)), None)
    if reference_over not in (None, "kept"):
        raise ValueError(
            f"reference_over={reference_over!r}: log-probs over the vocabulary and over sets make no KL: pass 'kept'."
        )
    if replays and compared is not None and reference_over is None:
        raise ValueError(
            f"{compared}={getattr(args, compared)!r} with replay: miles refuses it, the other network's log-probs being over the "
            "vocabulary. Switch one off, or pass reference_over='kept' if they run over the same sets."
        )
    slots = Ragged("miles", strict, version=version)
    ours = functools.wraps(calculate_log_probs_and_entropy)(
        functools.partial(calculate_log_probs_and_entropy, options=Options(missing=missing, entropy_over=entropy_over))
    )
    slots.bind(_there(MATHS), "calculate_log_probs_and_entropy", ours)
    if replays:
        slots.bind(_there(MASKS), "build_local_sampling_mask", local_sets, comparable=False)
    return slots


def _there(names: Sequence[str]) -> str:
    """The first of these modules that exists."""
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):  # the module is there, and wants another
                raise
            continue
        return name
    raise RuntimeError(f"this miles has none of {', '.join(names)}: the adapter was written from others.")


def _sets(name: str, record: Any, tokens: int) -> TokenSets:
    parts = record._as_tensors() if hasattr(record, "_as_tensors") else (record.ids, record.offsets)
    sets = response_sets(name, parts, tokens)
    empty = None if getattr(record, "allows_empty_rows", False) else first_empty(sets)
    if empty is not None:
        raise ValueError(
            f"{name} has no ids for response token {empty}: miles records a set for each, of one id where the token was not "
            "sampled. A PartialSamplingMask may leave tokens out."
        )
    return sets


def kept_sets(masks: Sequence[Any], total_lengths: Sequence[int], response_lengths: Sequence[int]) -> TokenSets:
    """The sets of the rows of a packed batch, [sum of total_lengths], on the CPU: row i has the set of token i + 1.

    masks   a `RolloutSamplingMask` for each sample; a response is the end of its text. Rows that predict no response token, and in
            a `PartialSamplingMask` those without ids, stand for the whole vocabulary.

    Raises ValueError, with the sample and the token, where a record has not a set for each token of its response, or an empty
    one."""
    parts = [_sets(f"masks[{b}]", mask, n) for b, (mask, n) in enumerate(zip(masks, response_lengths, strict=True))]
    rows, cuts = predicting(total_lengths, response_lengths)
    return on_rows("masks", parts, rows, cuts)


def local_sets(logits: Tensor, sampling_mask: Any, response_indices: Sequence[int] | Tensor, **options: Any) -> TokenSets:
    """The sets of the rows of logits [R, V / ranks], which score the response tokens response_indices [R]; in the place of miles'
    mask. Ids are those of the whole vocabulary."""
    index = torch.as_tensor(
        response_indices if isinstance(response_indices, Tensor) else [*response_indices], dtype=torch.int64
    )  # fmt: skip
    tokens = options.get("response_length", len(sampling_mask))
    sets = _sets("sampling_mask", sampling_mask, tokens)
    if len(index) != len(logits):
        raise ValueError(f"response_indices has {len(index)} tokens, but logits has {len(logits)} rows: there is one for each.")
    return sets[index].to(logits.device)


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
    options: Options | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(log-probs [R, 1], entropy [R] or None), fp32; logits [R, V / ranks], tokens [R]; both [0] of no tokens.

    sampling_mask   what `local_sets` makes, or None. options: what becomes of a token outside of its set, and what the entropy runs
                    over; None: refused, and the vocabulary. chunk_size and the debug switch change nothing here."""
    if true_on_policy:
        if sampling_mask is not None:
            raise ValueError("true_on_policy=True with replay is miles' own: undo() this binding for it.")
        raise NotCovered("true on-policy mode")
    plain(logits)
    shard = even_shard(logits.shape[-1], default_group(tp_group))
    entropy = (True if entropy_requires_grad else "detached") if with_entropy else False
    over = options or Options(missing="raise", entropy_over="vocabulary")
    if not with_entropy:  # nothing runs over the vocabulary
        over = Options(missing=over.missing)
    logps, H = token_logprobs(
        logits, tokens, transform=LogitTransform(temperature), entropy=entropy, kept=sampling_mask, shard=shard, options=over
    )
    return logps[:, None] if len(logps) else logps, H
