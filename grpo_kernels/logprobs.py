"""Log-probs, entropies and divergences of tokens, differentiable, from logits or hidden states.

    token_logprobs, linear_logprobs        log-prob of each target, and further statistics
    token_divergence, linear_divergence    divergence of each row from a reference or teacher

Functions whose name begins with `token_` take logits. Those that begin with `linear_` take hidden
states and the weight of the output head, and never hold [num_tokens, V] logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from .candidates import candidate_logprobs_with_extra_ids
from .checks import (
    DTYPES,
    INTEGERS,
    check_mask,
    check_missing,
    check_row_numbers,
    check_rows,
    check_targets,
    describe,
    flat,
    require,
    require_tensor,
)
from .core.backends import is_strict
from .core.softmax import RowTransform
from .core.sources import Reference, RowSource
from .divergences import reference_divergence, reference_divergence_over_candidates
from .extra_ids import logprobs_with_extra_ids
from .formulas.divergence import Exact, as_exact
from .inputs import (
    LinearInput,
    LogitsInput,
    RowInput,
    RowLayout,
    make_reference,
)
from .options import (
    Head,
    Options,
    as_options,
    is_traced,
    must_break_graph,
    refuse_keywords,
    run_outside_graph,
)
from .teachers import check_teacher, teacher_divergence
from .token_sets import TokenSets, check_sets, narrow_mask
from .transform import LogitTransform

#: What `also=` may ask for.
FURTHER_STATISTICS = ("sum_squares", "top_prob", "top_id", "log_kept_mass")


@dataclass(eq=False, repr=False)
class TokenLogprobs:
    """Log-probs of tokens: `logps, entropy = token_logprobs(...)`, or by name.

    logps     fp32, the shape of targets, in nats; 0 in masked tokens
    entropy   the same; None if it was not asked for
    also      the further statistics by name, each the shape of targets, and "at", fp32 [num_ids]

    It is registered as a pytree of all three, so that torch.func and DDP find its tensors.
    """

    logps: Tensor
    entropy: Tensor | None
    also: dict[str, Tensor] = field(default_factory=dict)
    __repr__ = describe

    def __iter__(self) -> Iterator[Any]:
        """Iterate over logps and entropy, so that `logps, entropy = token_logprobs(...)` works.

        `also` is not among them: read it by name.
        """
        return iter((self.logps, self.entropy))

    def __getitem__(self, i: int) -> Any:
        """Return logps for i = 0, entropy for i = 1, as a tuple (logps, entropy) does."""
        return (self.logps, self.entropy)[i]

    def __len__(self) -> int:
        """Return 2, the length of (logps, entropy)."""
        return 2


register_pytree_node(
    TokenLogprobs, lambda x: ([*x, x.also], None), lambda values, _: TokenLogprobs(*values)
)


# ---- log-probs


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    also: tuple[str, ...] = (),
    inplace: bool = False,
    kept: TokenSets | None = None,
    missing: str | None = None,
    at: TokenSets | None = None,
    rows: Tensor | None = None,
    options: Options | None = None,
    **unknown: NoReturn,
) -> TokenLogprobs:
    """Compute the log-prob of each target and, if asked for, the entropy of its distribution.

        logps, entropy = token_logprobs(logits, targets, entropy=True)

    logits      [B, T, V] or [N, V], fp32, bf16 or fp16, any strides. Row i predicts targets[i];
                nothing is shifted.
    targets     int64, the leading shape of logits
    mask        bool, the shape of targets: tokens to process. The others give exactly 0, in value
                and gradient. None processes all tokens.
    transform   temperature, softcap and scale of the logits, see `LogitTransform`
    entropy     False, True (differentiable) or "detached" (value only)
    also        further statistics of the distribution p of each token:
                "sum_squares"     sum of p^2 (differentiable)
                "top_prob"        largest p
                "top_id"          its id, int64, the lowest if several are equal, -1 if masked
                "log_kept_mass"   log of the probability that the whole row gives to its candidate
                                  set (differentiable)
    inplace     whether the backward writes the gradient over the logits, see `grpo_loss`
    kept        candidate set of each token (`TokenSets`), such as the ids left by top-k or top-p.
                The softmax runs over the set, and only the logits of its ids are read. An empty set
                stands for the vocabulary.
    missing     what to do if a target is not in its set: "include" (it joins the set), "full" (the
                token uses the vocabulary), "mask" (the token is masked) or "raise" (ValueError,
                waits for a GPU). None is "include", and "raise" in strict mode.
    at          extra ids of each token (`TokenSets`) whose log-probs are wanted: `also["at"]`,
                differentiable, in the order of at.ids. An id outside of a candidate set gives -inf,
                one of a masked token 0.
    rows        integers, the shape of targets: the flat row of logits that predicts each token.
                Several tokens may have the same row. The logits then have any leading shape.
    options     backend, strict mode, vocabulary shard, see `Options`

    Returns `TokenLogprobs`. The softmax is fp32; only the gradient is rounded to the dtype of the
    logits. A row of -inf gives NaN, as in torch.log_softmax.

    Raises ValueError for shapes, dtypes, devices or (on a CPU) ids that do not fit. On a GPU an id
    outside of the vocabulary gives NaN.
    """
    if unknown:
        refuse_keywords(token_logprobs, unknown)
    return compute_logprobs(
        LogitsInput(logits),
        targets,
        mask=mask,
        transform=transform,
        entropy=entropy,
        also=also,
        inplace=inplace,
        kept=kept,
        missing=missing,
        at=at,
        rows=rows,
        options=options,
    )


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor | Head,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool | str = False,
    also: tuple[str, ...] = (),
    kept: TokenSets | None = None,
    missing: str | None = None,
    at: TokenSets | None = None,
    rows: Tensor | None = None,
    options: Options | None = None,
    **unknown: NoReturn,
) -> TokenLogprobs:
    """Compute the log-prob of each target from hidden states and the weight of the output head.

        with torch.no_grad():
            old_logps, _ = linear_logprobs(
                hidden[:, :-1], model.lm_head.weight, ids[:, 1:],
                transform=LogitTransform.of(model),
            )

    hidden      [B, T, H] or [N, H], fp32, bf16 or fp16, any strides. Row i predicts targets[i].
    weight      [V, H], or `Head(weight, bias, transform)`. Matmuls run in the autocast dtype if
                autocast is on, else in the dtype of hidden.
    transform   softcap and scale that the model applies after its head, and the temperature, see
                `LogitTransform.of`

    The other arguments, the result and the errors are those of `token_logprobs`.

    Masked tokens take part in no matmul. The forward is one matmul of the other tokens. The
    backward computes the logits again: three matmuls (two with a frozen head) of the rows whose
    upstream gradient is not 0, on a GPU of all unmasked rows. With a frozen head and a gradient of
    log-probs only, the forward takes two matmuls and keeps [N, H] in fp32, and the backward takes
    none. Logits are fp32, and the gradient of the weight is summed in fp32. With candidate sets, a
    token costs one dot product for each candidate and no matmul.

    On a GPU the host waits for the rows of a mask. Pass only the rows that count (hidden[mask],
    targets[mask]) to avoid it.
    """
    if unknown:
        refuse_keywords(linear_logprobs, unknown)
    inputs, transform = LinearInput.from_arguments(hidden, weight, transform)
    return compute_logprobs(
        inputs,
        targets,
        mask=mask,
        transform=transform,
        entropy=entropy,
        also=also,
        inplace=False,
        kept=kept,
        missing=missing,
        at=at,
        rows=rows,
        options=options,
    )


def compute_logprobs(
    inputs: RowInput,
    targets: Tensor,
    *,
    mask: Tensor | None,
    transform: LogitTransform | None,
    entropy: bool | str,
    also: tuple[str, ...],
    inplace: bool,
    kept: TokenSets | None,
    missing: str | None,
    at: TokenSets | None,
    rows: Tensor | None,
    options: Options | None,
) -> TokenLogprobs:
    """Compute `token_logprobs` or `linear_logprobs`: check the arguments, then compute statistics.

    inputs   the logits, or hidden states and head, as the caller passed them

    The other arguments are those of the public functions.
    """
    options = as_options(options)
    inputs.check_options(options)
    if is_traced() and must_break_graph(options, None, kept, at, rows):
        # The operators of a compiled graph do not support one of these arguments.
        return run_outside_graph(
            compute_logprobs,
            inputs,
            targets,
            mask=mask,
            transform=transform,
            entropy=entropy,
            also=also,
            inplace=inplace,
            kept=kept,
            missing=missing,
            at=at,
            rows=rows,
            options=options,
        )

    remedy = "an int64 tensor of token ids, the leading shape of the logits or hidden states"
    require_tensor("targets", targets, INTEGERS, remedy)
    check_requested(entropy, also)
    # These arguments need several passes over the rows, see `composed_statistics`.
    is_composed = kept is not None or at is not None or rows is not None
    refuse_inplace(inplace and is_composed, "kept=, at= or rows=")
    shape = targets.shape
    mask = check_mask(mask, shape, targets.device)
    if kept is not None:
        check_sets("kept", kept, targets)
        missing = missing or ("raise" if is_strict(options.strict) else "include")
        check_missing(missing)
        mask = narrow_mask(kept, targets, mask, missing)
    if rows is None:
        layout = RowLayout(shape, targets.device, mask)
    else:
        check_rows(rows, targets)
        layout = RowLayout(inputs.leading_shape(targets), targets.device, are_shared=True)
    source = inputs.make_source(
        layout,
        transform,
        options,
        inplace=inplace,
        other_arguments={"targets": targets, "mask": mask, "transform": transform},
    )
    check_targets(targets, mask, source.vocab_size, isinstance(inputs, LogitsInput))
    if rows is not None:
        check_row_numbers(rows, mask, source.num_rows)
    for name, sets in (("kept", kept), ("at", at)):
        if sets is not None:
            check_sets(name, sets, targets, source.vocab_size)

    # "log_kept_mass" is the log-prob of a token's candidate set. Without sets it is 0 and need not
    # be computed: `shape_statistics` adds the zeros.
    names = tuple(name for name in also if name != "log_kept_mass" or kept is not None)
    if entropy:
        names = ("entropy", *names)
    detached = ("entropy",) if entropy == "detached" else ()
    flat_targets = flat(targets).long()
    flat_mask = None if mask is None else flat(mask)
    if is_composed:
        statistics = composed_statistics(
            source,
            flat_targets,
            flat_mask,
            names,
            kept=kept,
            # "mask" has masked the targets that are not in their set, and "raise" has found none.
            missing="full" if missing == "full" else "include",
            at=at,
            rows=None if rows is None else flat(rows).long(),
            detached=detached,
        )
    else:
        statistics = source.statistics(flat_targets, flat_mask, names, detached=detached)
    return shape_statistics(statistics, shape, also)


def composed_statistics(
    source: RowSource,
    targets: Tensor,
    mask: Tensor | None,
    names: tuple[str, ...],
    *,
    kept: TokenSets | None,
    missing: str,
    at: TokenSets | None,
    rows: Tensor | None,
    detached: tuple[str, ...] = (),
    reference: Reference | None = None,
) -> dict[str, Tensor]:
    """Compute statistics of tokens with candidate sets, extra ids or shared rows.

    A candidate set is the ids that top-k or top-p left for a token. Extra ids are ids besides the
    target whose log-probs are wanted. A shared row is a row of logits that predicts several tokens.

    Returns "logps" (log-prob of each target) and the named statistics, [num_tokens] each. With `at`
    it also returns "at", [num_ids].

    source      the rows of logits
    targets     int64 [num_tokens]
    mask        bool [num_tokens]: tokens to process; None processes all
    names       the statistics in addition to "logps"
    kept        the ids that the softmax of each token runs over (top-k, top-p). None: all tokens
                use the whole vocabulary.
    missing     what to do with a target that is not in its set: "include" adds it to the set,
                "full" uses the whole vocabulary for this token
    at          ids besides the target, whose log-probs become the statistic "at", in the order of
                at.ids; or None
    rows        int64 [num_tokens]: the row of each token; None: token i has row i
    detached    names of statistics that need no gradient
    reference   a frozen model, for the statistic "divergence"; None without it. It must be None
                with candidate sets.
    """
    # A TokenSets without ids stands for "no extra ids".
    extra_ids = TokenSets.whole(len(targets), device=targets.device) if at is None else at
    if kept is not None:
        result = candidate_logprobs_with_extra_ids(
            source,
            targets,
            kept,
            extra_ids,
            missing=missing,
            mask=mask,
            rows=rows,
            names=names,
            detached=detached,
        )
    else:
        result = logprobs_with_extra_ids(
            source,
            targets,
            extra_ids,
            reference=reference,
            mask=mask,
            rows=rows,
            names=names,
            detached=detached,
        )
    statistics = {
        name: x.detach() if name in detached else x for name, x in result.statistics.items()
    }
    if at is not None:
        statistics["at"] = result.extra_logps
    return statistics


def shape_statistics(
    statistics: dict[str, Tensor], shape: torch.Size, also: tuple[str, ...]
) -> TokenLogprobs:
    """Return flat statistics as `TokenLogprobs`, each in the shape of targets but "at".

    "at" stays flat, and becomes fp32. "log_kept_mass" is added as zeros if the caller asked for it
    and there are no candidate sets: the log of the whole probability, 1, is 0.

    statistics   "logps" and the requested statistics by name, [num_tokens] each; "at" [num_ids]:
                 the log-probs of the extra ids of all tokens
    shape        the shape of targets
    also         the names that the caller passed as `also=`
    """
    shaped = {name: x.float() if name == "at" else x.view(shape) for name, x in statistics.items()}
    logps = shaped.pop("logps")
    entropy = shaped.pop("entropy", None)
    if "log_kept_mass" in also and "log_kept_mass" not in shaped:
        shaped["log_kept_mass"] = torch.zeros_like(logps)  # no token has a candidate set
    return TokenLogprobs(logps=logps, entropy=entropy, also=shaped)


def check_requested(entropy: bool | str, also: tuple[str, ...]) -> None:
    """Raise ValueError for a wrong `entropy` or `also`.

    entropy   must be False, True or "detached"
    also      must be a tuple of distinct names of FURTHER_STATISTICS
    """
    if entropy not in (False, True, "detached"):
        raise ValueError(f'entropy={entropy!r}: it must be False, True or "detached".')
    if also != ():
        is_known = isinstance(also, tuple) and all(name in FURTHER_STATISTICS for name in also)
        is_valid = is_known and len(set(also)) == len(also)
        known = ", ".join(map(repr, FURTHER_STATISTICS))
        require(is_valid, "also", also, f"pass a tuple of {known}, each once at most.")


#: Why a teacher that is known at some ids is refused with candidate sets.
TEACHER_WITH_SETS = (
    "a teacher known at some ids has no distribution over a kept set: leave one of them out, or "
    "compute log-probs and divergence in two calls and pass both to objective_loss."
)


def refuse_inplace(is_refused: bool, feature: str) -> None:
    """Raise ValueError if inplace=True would overwrite logits that a second gradient reads again.

    inplace=True writes the gradient of the logits over the logits. Some calls compute two gradients
    from the logits and add them, so the first must not overwrite what the second reads.

    is_refused   whether the call has inplace=True and such a feature
    feature      the arguments that need two gradients of the logits, for the message, for example
                 "kept= or at="
    """
    if is_refused:
        raise ValueError(
            f"inplace=True, but {feature} needs the logits for two gradients: pass inplace=False."
        )


# ---- divergences from a reference or teacher


def token_divergence(
    logits: Tensor,
    ref_logits: Tensor | tuple[Tensor, LogitTransform] | TokenSets,
    divergence: str | Exact = "reverse",
    *,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    inplace: bool = False,
    kept: TokenSets | None = None,
    options: Options | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Compute the exact divergence between the softmax of each row and that of a reference.

        kl = token_divergence(logits[:, :-1], teacher_logits[:, :-1], Exact("jsd"), mask=mask)
        loss = kl.sum() / mask.sum()

    logits       [B, T, V] or [N, V], fp32, bf16 or fp16, any strides: the policy or student, which
                 gets the gradient
    ref_logits   the same shape, any of these dtypes: the reference or teacher, under the same
                 transform. (logits, LogitTransform) has its own transform. `TokenSets` whose values
                 are log-probs stand for a teacher that is known at these ids only.
    divergence   "reverse" (KL(policy || reference)), "forward" (KL(reference || policy)), "jsd",
                 "tv" (total variation), or an `Exact`
    mask         bool [B, T] or [N]: rows to process. The others give exactly 0.
    transform    temperature, softcap and scale of the logits, see `LogitTransform`
    inplace      whether the backward writes the gradient over the logits, see `grpo_loss`
    kept         candidate set of each row, such as the ids left by top-k or top-p: both sides are
                 renormalised over it. An empty set stands for the vocabulary.
    options      backend, strict mode, vocabulary shard, see `Options`. A shard holds the same
                 columns of both sides.

    Returns fp32, the leading shape of logits, in nats ("tv": a probability). The value is at least
    0, also for two nearly equal rows, whose KL of 1e-10 keeps its digits. A KL is infinite if its
    second argument gives an id the probability 0 and its first does not.

    The forward and the backward read both rows twice each, the forward of "jsd" and "tv" three
    times. Raises ValueError naming the argument that is wrong.
    """
    if unknown:
        refuse_keywords(token_divergence, unknown)
    return compute_divergence(
        LogitsInput(logits),
        ref_logits,
        as_exact(divergence),
        mask=mask,
        transform=transform,
        inplace=inplace,
        kept=kept,
        options=options,
    )


def linear_divergence(
    hidden: Tensor,
    weight: Tensor | Head,
    reference: tuple[Any, ...] | TokenSets,
    divergence: str | Exact = "reverse",
    *,
    mask: Tensor | None = None,
    transform: LogitTransform | None = None,
    kept: TokenSets | None = None,
    options: Options | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Compute the divergence of each token from hidden states, without storing logits.

        reference = (teacher_hidden, teacher.lm_head.weight)
        kl = linear_divergence(hidden, lm_head.weight, reference, "forward", mask=mask)

    Returns fp32, the leading shape of hidden, in nats, 0 in masked rows. The gradient goes to
    hidden, weight and bias. `token_divergence` defines the divergences.

    hidden      [B, T, H] or [N, H]
    weight      [V, H] or a `Head`, as in `linear_logprobs`
    reference   (hidden, weight), (hidden, weight, bias) or (hidden, Head(...)) of the reference or
                teacher, whose hidden size and dtype may differ. `TokenSets` whose values are
                log-probs stand for a teacher that is known at these ids only.

    The other arguments are those of `token_divergence`.

    Masked rows take part in no matmul. The forward computes the logits of both sides, a chunk of
    rows at a time: two matmuls. The backward computes them again, and takes one matmul each for the
    gradients of hidden and weight. That is six in all, five with a frozen head. If you only need a
    distillation loss, `linear_grpo_loss` with Objective.preset("distillation") takes four, three
    with a frozen head.

    Raises ValueError naming the argument that is wrong.
    """
    if unknown:
        refuse_keywords(linear_divergence, unknown)
    exact = as_exact(divergence)
    inputs, transform = LinearInput.from_arguments(hidden, weight, transform)
    return compute_divergence(
        inputs,
        reference,
        exact,
        mask=mask,
        transform=transform,
        inplace=False,
        kept=kept,
        options=options,
    )


def compute_divergence(
    inputs: RowInput,
    reference: Any,
    exact: Exact,
    *,
    mask: Tensor | None,
    transform: LogitTransform | None,
    inplace: bool,
    kept: TokenSets | None,
    options: Options | None,
) -> Tensor:
    """Compute `token_divergence` or `linear_divergence`: check the arguments, then compute it.

    inputs      the policy's logits, or hidden states and head, as the caller passed them
    reference   what the caller passed as `ref_logits` (with logits) or `reference`
    exact       which divergence to compute

    The other arguments are those of the public functions.
    """
    options = as_options(options)
    inputs.check_options(options)
    if is_traced() and must_break_graph(options, None, exact):
        return run_outside_graph(
            compute_divergence,
            inputs,
            reference,
            exact,
            mask=mask,
            transform=transform,
            inplace=inplace,
            kept=kept,
            options=options,
        )
    name, x = inputs.named_rows()
    remedy = "a tensor [B, T, ..] or [N, ..], one row for each token"
    require_tensor(name, x, DTYPES, remedy)
    require(x.dim() > 1, f"{name}.shape", list(x.shape), f"pass {remedy}.")
    refuse_inplace(
        inplace and (kept is not None or isinstance(reference, TokenSets)),
        "kept= or a teacher known at some ids",
    )
    shape = x.shape[:-1]
    layout = RowLayout(shape, x.device, check_mask(mask, shape, x.device))
    source = inputs.make_source(
        layout,
        transform,
        options,
        inplace=inplace,
        other_arguments={"mask": mask, "transform": transform, "kept": kept},
        reference_arguments={inputs.reference_name: reference},
    )
    flat_mask = None if layout.mask is None else flat(layout.mask)
    # A divergence has no targets. The checks below read only their shape and device.
    no_targets = torch.zeros(shape, dtype=torch.int64, device=source.device)
    if isinstance(reference, TokenSets):
        require(kept is None, inputs.reference_name, "TokenSets", TEACHER_WITH_SETS)
        check_teacher(inputs.reference_name, reference, no_targets, exact, source.vocab_size)
        value = teacher_divergence(source, reference, exact, mask=flat_mask)
    else:
        checked = make_reference(reference, inputs, source, layout, transform, options, exact)
        if kept is None:
            value = reference_divergence(source, checked, mask=flat_mask)
        else:
            check_sets("kept", kept, no_targets, source.vocab_size)
            value = reference_divergence_over_candidates(
                source, checked, kept, exact, mask=flat_mask
            )
    if exact.temperature_squared:
        value = value / squared_inverse_temperature(source.transform, flat_mask)
    return value.view(shape)


def squared_inverse_temperature(transform: RowTransform, mask: Tensor | None) -> float | Tensor:
    """Return 1 / temperature^2, by which a divergence is divided: a number, or fp32 [num_rows].

    It is 1 in masked rows, where the temperature may be any number, so that their 0 stays 0.

    transform   has 1 / temperature: a number, or fp32 [num_rows]
    mask        bool [num_rows]: rows that are processed; None: all
    """
    inverse = transform.inverse_temperature
    if isinstance(inverse, Tensor) and mask is not None:
        # The divergence of a masked row is 0, and 0 / 0 or 0 / NaN would be NaN.
        inverse = torch.where(mask, inverse, 1.0)
    return inverse * inverse
