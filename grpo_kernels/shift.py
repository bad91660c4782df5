"""The one place that shifts: what is recorded for each token of a text goes to the row of a model that predicts it."""

from __future__ import annotations

import torch

from .layout import as_mask, check_offsets, sequence_ids
from .token_sets import TokenSets, check_sets

Tensor = torch.Tensor


def shift_targets(
    ids: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(targets, mask), both of the shape of ids: row i of a model's output predicts targets[i] = ids[i + 1], where mask is set.

        targets, mask = shift_targets(ids, mask=completion_mask, cu_seqlens=cu_seqlens)
        logps, _ = linear_logprobs(hidden, lm_head.weight, targets, mask=mask)

    ids          int64 [B, T], or packed [N].
    mask         bool (or 0/1 integer), the shape of ids: tokens that may be a target, completion tokens say; None = all.
    cu_seqlens   int32 or int64 [B + 1] of packed ids: sequence b is ids[cu_seqlens[b] : cu_seqlens[b + 1]].
    segment_ids  integer, the shape of ids: equal for neighbours of one sequence, in place of cu_seqlens; of position_ids that
                 start at 0 in each sequence, (position_ids == 0).cumsum(-1).

    The last token of a row or segment predicts nothing: its mask is False, its target 0. Hidden states keep their length, so
    that nothing has to be cut or rolled afterwards. Ranks that share sequences (context parallelism) call this before they
    take their part: the target of a part's last token is on another rank.
    Raises ValueError on shapes and dtypes that disagree.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or ids.dim() not in (1, 2):
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"ids is {got}: pass an int64 tensor of token ids, [B, T] or packed [N].")
    if cu_seqlens is not None:
        if segment_ids is not None:
            raise ValueError("cu_seqlens and segment_ids are both given: pass one of them.")
        check_offsets("ids", ids, cu_seqlens)
        segment_ids = sequence_ids(cu_seqlens, ids.numel())
    elif segment_ids is not None and not isinstance(segment_ids, Tensor):
        raise ValueError(f"segment_ids is a {type(segment_ids).__name__}: pass an integer tensor of the shape of ids.")
    elif segment_ids is not None and (segment_ids.shape != ids.shape or segment_ids.is_floating_point()):
        raise ValueError(
            f"segment_ids has dtype {segment_ids.dtype} and shape {list(segment_ids.shape)}: pass integers of the shape of ids, "
            f"{list(ids.shape)}."
        )
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else as_mask("mask", mask, ids.shape)
    if segment_ids is not None:
        follows = segment_ids[..., 1:] == segment_ids[..., :-1]
        valid = torch.cat([valid[..., :1], valid[..., 1:] & follows], -1)
    targets, shifted = torch.zeros_like(ids), torch.zeros_like(valid)
    shifted[..., :-1] = valid[..., 1:]
    targets[..., :-1] = ids[..., 1:]
    return targets, shifted


def shift_sets(
    sets: TokenSets, ids: Tensor, *, cu_seqlens: Tensor | None = None, segment_ids: Tensor | None = None
) -> TokenSets:
    """Sets that were recorded for each token of ids, as sets of the rows that predict them: row i takes the set of token i + 1.

        targets, mask = shift_targets(ids, mask=completion_mask, cu_seqlens=cu_seqlens)
        kept = shift_sets(TokenSets.from_counts(kept_ids, counts), ids, cu_seqlens=cu_seqlens)

    sets         one row for each token of ids, row-major.
    ids          int64 [B, T], or packed [N], as `shift_targets` takes it; only its shape is used.
    cu_seqlens, segment_ids  as in `shift_targets`; the host reads them, which waits if they are on a device.

    The last token of a row or segment predicts nothing: its set is empty, and that of a first token is dropped.
    prime-rl records sets so, with a count of 0 for tokens of prompts and tools. Records of generated tokens alone need no shift:
    see `TokenSets.from_lists`. Raises ValueError on shapes that disagree."""
    check_sets("sets", sets, ids)
    known = cu_seqlens if cu_seqlens is not None else segment_ids
    numbers = torch.arange(ids.numel(), device=known.device if isinstance(known, Tensor) else "cpu").view(ids.shape)
    source, follows = shift_targets(numbers, cu_seqlens=cu_seqlens, segment_ids=segment_ids)
    return sets.take(torch.where(follows, source, -1).flatten())
