"""Statistics for the loss of a batch with candidate sets, extra ids, shared rows, or a teacher
whose log-probs are known at some ids only.

`losses.compute_loss` calls these functions. The statistics of such a batch take several passes over
the rows (`candidates.py`, `extra_ids.py`, `teachers.py`, `trees.py`). The loss is the same function
of the statistics as for other batches.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .batch import TokenBatch
from .checks import check_row_numbers, flat, require
from .core.backends import is_strict
from .core.sources import Reference, RowSource
from .divergences import reference_divergence_over_candidates
from .extra_ids import auxiliary_loss
from .formulas.token_inputs import TokenInputs
from .logprobs import TEACHER_WITH_SETS, composed_statistics
from .objective import Objective
from .options import Options
from .teachers import check_teacher, logprobs_with_teacher, teacher_divergence
from .token_sets import TokenSets, check_ids, narrow_mask


def composed_feature(batch: TokenBatch, reference: Any) -> str | None:
    """Return why a loss needs composed statistics, as a text for error messages.

        "a teacher known at some ids"   the reference is TokenSets
        "a batch with kept, rows"       the batch has candidate sets, extra ids or shared rows
        None                            an ordinary batch: `BatchLoss.compute` chooses how to
                                        compute its loss

    reference   what the caller passed as `ref_logits` or `reference`. TokenSets are a teacher whose
                log-probs are known at some ids of each token.
    """
    if isinstance(reference, TokenSets):
        return "a teacher known at some ids"
    fields = ("kept", "logp_terms", "prob_terms", "rows")
    used = [name for name in fields if getattr(batch, name) is not None]
    if not used:
        return None
    return "a batch with " + ", ".join(used)


def check_composed_batch(batch: TokenBatch, options: Options, source: RowSource) -> None:
    """Raise ValueError for a candidate outside of the vocabulary, or a row that does not exist.

    Strict mode also refuses a target that is not in its candidate set, unless batch.missing says
    what to do with such a target.

    batch     may have candidate sets (`kept`: ids of each token) and shared rows (`rows`: the row
              of each token)
    options   says whether the call is strict
    source    the policy's rows of logits, which know V and the number of rows
    """
    if batch.kept is not None:
        check_ids("kept", batch.kept, source.vocab_size)
        if batch.missing is None and is_strict(options.strict):
            # Called only to raise. The mask that it returns is batch.mask.
            narrow_mask(batch.kept, batch.targets, batch.mask, "raise")
    if batch.rows is not None:
        check_row_numbers(batch.rows, batch.mask, source.num_rows)


def composed_loss_statistics(
    source: RowSource,
    batch: TokenBatch,
    objective: Objective,
    tokens: TokenInputs,
    *,
    reference: Reference | None,
    teacher: TokenSets | None,
    reference_name: str,
) -> dict[str, Tensor]:
    """Return the statistics that the loss of a batch needs, fp32 [num_tokens], by name.

        "logps"            log-prob of each target
        "entropy"          of the same softmax, in nats
        "divergence"       with kl=Exact(...): the divergence from `reference` or `teacher`
        "auxiliary_loss"   with extra ids: the loss of their terms

    The softmax of a token runs over its candidate set if it has one (the ids left by top-k or
    top-p), else over the vocabulary. Extra ids are ids besides the target whose log-probs the
    loss uses. Shared rows are rows of logits that predict several tokens.

    source           the policy's rows of logits
    batch            has candidate sets, extra ids or shared rows
    objective        says which statistics need a gradient, and which divergence is wanted
    tokens           targets, mask and advantages of the tokens
    reference        for kl=Exact(...): a reference whose whole distribution is known; or None
    teacher          for kl=Exact(...): log-probs of a teacher at some ids of each token; or None
    reference_name   the argument that `teacher` was passed as, for errors

    Raises ValueError for a teacher together with candidate sets, for a teacher without values or
    with an id outside of the vocabulary, and for an extra id outside of it.
    """
    flat_rows = None if batch.rows is None else flat(batch.rows).long()
    extra_ids = batch.extra_ids
    exact = objective.exact
    # The entropy is returned in any case, and needs a gradient only for an entropy bonus.
    detached = () if objective.needs_entropy else ("entropy",)
    if teacher is not None:
        assert exact is not None
        require(batch.kept is None, reference_name, "TokenSets", TEACHER_WITH_SETS)
        check_teacher(reference_name, teacher, batch.targets, exact, source.vocab_size)
        if extra_ids is None:
            # One pass computes the log-probs of targets and of the teacher's ids. If the batch has
            # extra ids, the teacher's ids take a second pass below.
            return logprobs_with_teacher(
                source,
                tokens.targets,
                teacher,
                exact,
                mask=tokens.processed,
                rows=flat_rows,
                names=("entropy",),
                detached=detached,
            )
    if extra_ids is not None:
        name = "prob_terms" if batch.logp_terms is None else "logp_terms"
        check_ids(name, extra_ids, source.vocab_size)
    # A divergence over the vocabulary is computed in the same pass. Over candidate sets, it takes
    # a second pass below.
    is_dense_reference = reference is not None and batch.kept is None
    statistics = composed_statistics(
        source,
        tokens.targets,
        tokens.processed,
        ("entropy", "divergence") if is_dense_reference else ("entropy",),
        kept=batch.kept,
        missing=missing_target_rule(batch),
        at=extra_ids,
        rows=flat_rows,
        detached=detached,
        reference=reference if is_dense_reference else None,
    )
    if extra_ids is not None:
        extra_logps = statistics.pop("at")  # log-probs of the extra ids of all tokens
        statistics["auxiliary_loss"] = auxiliary_loss(
            objective.extra_id_terms(batch), extra_logps, tokens.advantages
        )
    if teacher is not None:
        assert exact is not None
        statistics["divergence"] = teacher_divergence(
            source, teacher, exact, mask=tokens.processed, rows=flat_rows
        )
    elif reference is not None and batch.kept is not None:
        # Both distributions are renormalised over the candidate set of each token.
        assert exact is not None
        statistics["divergence"] = reference_divergence_over_candidates(
            source,
            reference,
            batch.kept,
            exact,
            targets=tokens.targets,
            mask=tokens.processed,
            rows=flat_rows,
            missing=missing_target_rule(batch),
        )
    return statistics


def composed_reference_logprobs(
    source: RowSource, batch: TokenBatch, tokens: TokenInputs
) -> Tensor:
    """Return the log-prob of each target under a reference, fp32 [num_tokens].

    source   the reference's rows of logits
    batch    gives candidate sets and shared rows, which apply to the reference as well
    tokens   targets and mask of the tokens. Tokens that are not processed give 0.
    """
    # No statistics in addition to the log-probs, and no extra ids (`at`): the KL estimate reads
    # log-probs of targets only.
    statistics = composed_statistics(
        source,
        tokens.targets,
        tokens.processed,
        (),
        kept=batch.kept,
        missing=missing_target_rule(batch),
        at=None,
        rows=None if batch.rows is None else flat(batch.rows).long(),
    )
    return statistics["logps"]


def missing_target_rule(batch: TokenBatch) -> str:
    """Return what to do with a target that is not in its candidate set.

        "full"      the token uses the softmax over the whole vocabulary
        "include"   the target is added to the set; also if batch.missing is None

    batch.missing may also be "mask" or "raise". `TokenBatch` has applied these already, so that no
    such target is left and "include" changes nothing.
    """
    return "full" if batch.missing == "full" else "include"
