"""Checks of the arguments of a loss, and in strict mode of the values of their tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .batch import TokenBatch
from .checks import FLOATING, require, require_shape, require_tensor, values_are_checked
from .core.backends import is_strict
from .formulas.token_inputs import TokenInputs
from .loss_output import LossOutput
from .objective import Objective
from .options import Options
from .token_sets import TokenSets


def check_batch_and_objective(batch: Any, objective: Any) -> None:
    """Raise ValueError unless batch is a TokenBatch and objective an Objective.

    The message says so if the two were passed in the wrong order.
    """
    if isinstance(batch, Objective) and isinstance(objective, TokenBatch):
        raise ValueError(
            "batch is an Objective and objective a TokenBatch: they changed places, pass them as"
            " batch, objective."
        )
    if not isinstance(batch, TokenBatch):
        raise ValueError(f"batch is a {type(batch).__name__}: pass a TokenBatch.")
    if not isinstance(objective, Objective):
        raise ValueError(
            f"objective is a {type(objective).__name__}: pass an Objective, for example"
            " Objective.preset('grpo')."
        )


def check_reference(value: Any, name: str, batch: TokenBatch, objective: Objective) -> None:
    """Raise ValueError unless a reference fits the KL of the objective.

        kl=Exact(...)    compares whole distributions: batch.ref_logps, log-probs of single tokens,
                         must be None. `value` is checked later, where it is unpacked.
        any other kl     is estimated from the log-prob of each target: `value` must be hidden
                         states and head of a reference, or None with batch.ref_logps
        no KL (beta=0)   `value` must be None

    value   what the caller passed as the argument `name`
    name    "reference" (from hidden states) or "ref_logits" (from logits)
    """
    if objective.exact is not None:
        if batch.ref_logps is not None:
            raise ValueError(
                f"ref_logps are log-probs of the sampled tokens, but kl={objective.kl} compares "
                f"whole distributions: leave them out, and pass {name}=."
            )
        return
    if value is None:
        return
    remedy = "with beta=0 nothing looks at it: leave it out."
    require(objective.beta != 0, name, type(value).__name__, remedy)
    if name == "ref_logits" or isinstance(value, TokenSets):
        raise ValueError(
            f"{name} is a whole distribution, but kl={objective.kl!r} is an estimate from the "
            "sampled token: pass kl=Exact(...), or the reference's log-probs as ref_logps of the "
            "batch."
        )
    if batch.ref_logps is not None:
        raise ValueError("reference and batch.ref_logps are both given: pass one of them.")


def check_grad_scale(value: Any, device: torch.device) -> Tensor | None:
    """Return `grad_scale`, which the loss will be multiplied by, as a 0-d fp32 tensor on `device`.

    Returns None for the number 1, which needs no scaling. A scale of 0 is treated as 1, because the
    value of the loss is divided by the scale.

    value    what the caller passed: a finite number, or a 0-d floating tensor on any device
    device   the device of targets

    Raises ValueError for anything else.
    """
    remedy = "a finite number or a 0-d float tensor: what the loss is multiplied by"
    if isinstance(value, Tensor):
        require_tensor("grad_scale", value, FLOATING, remedy)
        require_shape("grad_scale", value, torch.Size(), "a 0-d tensor")
        scale = value.detach().to(device, torch.float32, non_blocking=True)
        return torch.where(scale == 0, 1.0, scale)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ValueError(f"grad_scale={value!r}: pass {remedy}.")
    return None if value in (0, 1) else torch.full((), value, device=device)


# ---- strict mode


def refuses_values(options: Options) -> bool:
    """Return whether a call refuses NaN and infinite values.

    It does if `options.strict` is True or strict mode is switched on for the process. torch.compile
    cannot trace the switch, so in a compiled graph only `options.strict` counts.
    """
    return options.strict if torch.compiler.is_compiling() else is_strict(options.strict)


def refuse_nan(rows: TokenInputs, batch: TokenBatch, options: Options) -> None:
    """Raise ValueError in strict mode if an input of a processed token is NaN.

    The inputs are advantages, old and reference log-probs, and weights. The message names the first
    such argument and its tokens.

    rows   the inputs as flat tensors [num_tokens]
    """
    if not refuses_values(options):
        return
    remedy = (
        "the loss would be NaN, which strict mode refuses. Mask these tokens, or find out where the"
        " NaN comes from."
    )
    for name in ("advantages", "old_logps", "ref_logps", "weights", "nll_weight"):
        value = getattr(rows, name)
        if value is not None:
            argument = "nll_weights" if name == "nll_weight" else name
            refuse_tokens(value.isnan(), f"{argument} is NaN", remedy, rows, batch)


def refuse_infinite_kl(out: LossOutput, options: Options) -> None:
    """Raise ValueError in strict mode if a KL estimate reads a log-prob of -inf.

    It does if the policy or the reference gives a target the probability 0. Without strict mode the
    KL uses -1e4 instead. Nothing is raised if the loss has no KL estimate.

    out       the loss that was computed, with the log-probs of the policy
    options   says whether the call is strict
    """
    rows = out.rows
    if rows.kl_weight is None or rows.ref_logps is None or not refuses_values(options):
        return
    remedy = (
        "the KL would be made of a log-prob of -1e4 in its place, which strict mode refuses. Mask "
        "these tokens, or leave the KL out, beta=0."
    )
    log_probs = {"the log-prob of the target": out.logps, "ref_logps": rows.ref_logps}
    for name, x in log_probs.items():
        refuse_tokens(x.flatten() == -math.inf, f"{name} is -inf", remedy, rows, out._batch)


def refuse_infinite_terms(
    batch: TokenBatch, objective: Objective, rows: TokenInputs, options: Options
) -> None:
    """Raise ValueError in strict mode if a term of extra ids would be infinite or NaN.

    Extra ids are ids besides the target: `logp_terms` adds value * log-prob to the loss for each,
    `prob_terms` adds value * probability. Such a term is not finite if the value is infinite. A
    term of `logp_terms` is also not finite if the id is outside of the token's candidate set, where
    the log-prob is -inf, and the value is not 0.

    batch     has the terms and the candidate sets
    rows      the inputs of the loss as flat tensors [num_tokens]
    options   says whether the call is strict
    """
    if not refuses_values(options):
        return
    if batch.prob_terms is not None:
        _refuse_infinite_values("prob_terms", batch.prob_terms, rows, batch)
    # `Objective(listed=)` is a function of the user, which may give any value a meaning.
    if batch.logp_terms is not None and objective.listed is None:
        _refuse_infinite_values("logp_terms", batch.logp_terms, rows, batch)
        if batch.kept is not None:
            _refuse_ids_outside(batch.logp_terms, batch.kept, rows, batch)


def _refuse_infinite_values(
    name: str, terms: TokenSets, rows: TokenInputs, batch: TokenBatch
) -> None:
    """Raise ValueError if a processed token has an id with an infinite value.

    name    "logp_terms" or "prob_terms", for the message
    terms   the ids of each token and their values
    rows    has the masks of the tokens
    """
    if terms.values is None:
        return
    remedy = (
        "the loss would be infinite or NaN, which strict mode refuses. Pass finite values, and"
        " 0 for an id without one."
    )
    has_infinity = any_of_token(terms.values.isinf(), terms, batch.tokens)
    refuse_tokens(has_infinity, f"{name} has an infinite value", remedy, rows, batch)


def _refuse_ids_outside(
    terms: TokenSets, candidates: TokenSets, rows: TokenInputs, batch: TokenBatch
) -> None:
    """Raise ValueError if a processed token has an id outside of its candidate set.

    An id with the value 0 may be outside. All tokens without a candidate set use the whole
    vocabulary.

    terms        `batch.logp_terms`: the ids of each token and their values
    candidates   `batch.kept`: the candidate set of each token
    rows         has the targets and the masks of the tokens
    """
    if terms.values is None:
        return
    token_of_id = terms.row_of  # int64 [num_ids]: the token that lists each id
    is_outside = ~candidates.holds(token_of_id, terms.ids)
    is_outside &= terms.ids != rows.targets[token_of_id]  # the target is added to its set
    is_outside &= ~batch.without_set[token_of_id]
    remedy = (
        "its log-prob is -inf there, and the loss would be infinite, which strict mode "
        "refuses. List ids of the set, or give the others the value 0."
    )
    lists_outside = any_of_token(is_outside & (terms.values != 0), terms, batch.tokens)
    what = "logp_terms lists an id that the kept set lacks"
    refuse_tokens(lists_outside, what, remedy, rows, batch)


def any_of_token(is_marked: Tensor, sets: TokenSets, num_tokens: int) -> Tensor:
    """Return whether any id of each token is marked, bool [num_tokens].

    is_marked    bool [num_ids], one for each id of all tokens
    sets         the ids of each token: id i belongs to token sets.row_of[i]
    num_tokens   number of tokens
    """
    result = torch.zeros(num_tokens, dtype=torch.bool, device=is_marked.device)
    return result.index_put((sets.row_of,), is_marked, accumulate=True)


def refuse_tokens(
    is_bad: Tensor, what: str, remedy: str, rows: TokenInputs, batch: TokenBatch
) -> None:
    """Raise ValueError if a processed token is bad, with the positions of the first five.

    On a GPU the host would have to wait for the values. An assertion on the device stops the
    program instead, unless GRPO_KERNELS_CHECK=1 requests the check (`values_are_checked`).

    is_bad   bool [num_tokens]
    what     what is bad, the beginning of the message, for example "advantages is NaN"
    remedy   what to do, the end of the message
    rows     has the masks of the tokens: processed and trained
    batch    has the shape of targets, for the positions
    """
    if rows.processed is not None:
        is_bad = is_bad & rows.processed
    if not values_are_checked(is_bad):
        torch._assert_async(~is_bad.any(), f"{what} at a trained token, which strict mode refuses")
        return
    if not is_bad.any():
        return
    positions = is_bad.view(batch.targets.shape).nonzero().tolist()
    shown = ", ".join(map(str, positions[:5]))
    if len(positions) > 5:
        shown += ", ..."
    num_trained = is_bad.numel() if rows.loss_mask is None else int(rows.loss_mask.sum())
    raise ValueError(
        f"{what} at {len(positions)} of {num_trained} trained tokens, {shown}: {remedy}"
    )
