"""Divergence of tokens from a reference that has a whole distribution, over the vocabulary or over
candidate sets, also if several tokens share a row.

For a teacher that is known at a few ids of each row see `teachers.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .candidates import candidate_divergence
from .core.sources import Reference, RowSource
from .extra_ids import give_to_tokens, mark_rows
from .formulas.divergence import Exact
from .teachers import first_ids
from .token_sets import TokenSets, rows_without_set


def reference_divergence(
    source: RowSource,
    reference: Reference,
    *,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Return the divergence of each token from a reference over the vocabulary, fp32 [num_tokens].

    reference   the reference's rows, one for each row of `source`, and which divergence
    mask        bool [num_tokens]: tokens to process; None processes all. The others give 0.
    rows        int64 [num_tokens]: the row that predicts each token, any number where mask is
                False. Several tokens may have the same row. None: row i predicts token i.
    """
    num_rows = source.num_rows
    # `statistics` takes a target for each row, whose log-prob is not used here.
    any_targets = torch.zeros(num_rows, dtype=torch.int64, device=source.device)
    if rows is None:
        statistics = source.statistics(any_targets, mask, ("divergence",), reference=reference)
        return statistics["divergence"]
    is_processed = torch.ones_like(rows, dtype=torch.bool) if mask is None else mask
    if num_rows == 0:  # all tokens are masked
        return torch.zeros(len(rows), device=source.device)
    row_ids = torch.where(is_processed, rows, 0)
    row_mask = mark_rows(row_ids, is_processed, num_rows)
    statistics = source.statistics(any_targets, row_mask, ("divergence",), reference=reference)
    row_statistics = {"divergence": statistics["divergence"]}
    return give_to_tokens(row_statistics, row_ids, is_processed, num_rows)["divergence"]


def reference_divergence_over_candidates(
    source: RowSource,
    reference: Reference,
    candidates: TokenSets,
    exact: Exact,
    *,
    targets: Tensor | None = None,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    missing: str = "include",
) -> Tensor:
    """Return the divergence of each token from a reference over its candidates, fp32 [num_tokens].

    The softmax of policy and reference are both renormalised over the candidates of a token. Tokens
    with an empty set and, with missing="full", tokens whose target is not in their set use the
    whole vocabulary. Masked tokens give 0.

    reference    the reference's rows, one for each row of `source`, and which divergence over the
                 vocabulary
    candidates   the candidates of each token
    exact        which divergence over candidates
    targets      int64 [num_tokens]. None: no target joins its set.
    mask         bool [num_tokens]: tokens to process; None processes all
    rows         int64 [num_tokens]: the row that predicts each token; None: row i predicts token i
    missing      what to do if a target is not in its set, see `candidate_logprobs`

    Raises the errors of `candidate_logprobs`.
    """
    over_candidates = candidate_divergence(
        source,
        reference.source,
        candidates,
        exact,
        targets=targets,
        mask=mask,
        rows=rows,
        missing=missing,
    )
    all_use_candidates = candidates.empty_rows == 0 and missing != "full"
    if all_use_candidates:
        return over_candidates
    if targets is None:
        targets = first_ids(candidates)  # such a target is in its set
    uses_vocabulary = rows_without_set(candidates, targets, missing)
    if mask is not None:
        uses_vocabulary = uses_vocabulary & mask
    # On a GPU the host would have to wait to learn whether any token uses the vocabulary.
    if uses_vocabulary.device.type == "cpu" and not uses_vocabulary.any():
        return over_candidates
    over_vocabulary = reference_divergence(source, reference, mask=uses_vocabulary, rows=rows)
    return torch.where(uses_vocabulary, over_vocabulary, over_candidates)
