"""prime-rl: its chunked head on our kernels, and our objectives through its official hook for a custom loss.

    from grpo_kernels.integrations import prime_rl
    prime_rl.bind()                 # before the first forward

    [trainer.loss]
    type = "custom"
    import_path = "grpo_kernels.integrations.prime_rl.loss"
    kwargs = { objective = "ipo", changes = { beta = 0.002 } }

`bind` replaces the autograd function that `FusedOutputLinear.forward` calls, [N, H] hidden states and a temperature for
each token. It is called in the head module's own forward, so hooks of FSDP and offloading fire as before. The entropy has
no gradient, as in prime-rl, whose function asserts that none comes. Softcapped heads (Gemma) are another function, and kept.

Sampling-mask replay goes through the same function: the sets that prime-rl's trainer hands to its head, padded with -1, are
the kept sets of the rows. A row without ids is not replayed, nor is one whose label is not in its set, as in prime-rl. Its entropy
is over the vocabulary, which costs the forward product with the whole weight: `bind(entropy_over="kept")` saves it, and logs the
entropy of the set instead. Score centring (`return_mask_logprobs`) is left to prime-rl. `kept_sets` reads what its
orchestrator sends, for losses of your own.

`loss` is a custom loss: of one sequence, an unnormalised sum. prime-rl divides by its global token count.

Written from prime-rl 0.8.0, and its replay from the heads that came later with 6, then 7 arguments. No registry has it: the tests
run both heads' own function where a file of theirs is on the path, and stand-ins with its signatures always.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..batch import shift_sets
from ..formulas.ops import bounded_exp
from ..logprobs import linear_logprobs
from ..losses import objective_loss
from ..objective import Objective
from ..options import Options
from ..presets import NUMERICS
from ..token_sets import TokenSets
from ..transform import LogitTransform
from ._shared import plain, scored_batch
from ._slots import NotCovered, Slots, untested

Tensor = torch.Tensor

TESTED = ("0.8.0",)


def bind(
    *, entropy_over: str = "vocabulary", missing: str = "full", strict: bool = False, any_version: bool = False
) -> Slots:  # fmt: skip
    """Put our function in the place of `_SequenceChunkedLogProbEntropyFn`; the result undoes it, by `undo()` or as a context
    manager.

    entropy_over, missing   of replayed rows, as in `Options`: what the entropy runs over, and what becomes of a label that its
                            set lacks. The defaults are prime-rl's.
    strict   True: a call that prime-rl's own function has to handle raises RuntimeError.
    any_version   True: no comparison under a version that was not tested, see `_slots.Trial`.
    Raises RuntimeError where a function is replaced already, and in the first step where such a comparison fails."""
    version = untested("prime-rl", TESTED, any_version)
    slots = Slots("prime_rl", strict, version=version)
    comparable = (missing, entropy_over) == ("full", "vocabulary")
    home = "prime_rl.trainer.models.layers.lm_head"
    options = Options(missing=missing, entropy_over=entropy_over)
    apply = functools.wraps(chunked_logprobs)(functools.partial(chunked_logprobs, options=options))
    slots.bind(home, "_SequenceChunkedLogProbEntropyFn", apply, attribute="apply", comparable=comparable)
    return slots


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    inv_temperature: Tensor,
    chunk_size: int,
    sampling_mask: Tensor | None = None,
    return_mask_logprobs: bool | None = None,
    *,
    options: Options | None = None,
) -> tuple[Tensor | None, ...]:
    """(log-probs, entropy) fp32 [N] of labels [N]; hidden [N, H], weight [V, H], inv_temperature [N]. chunk_size is ours.

    sampling_mask   int32 [N, K], -1 where there is no id: the set of each row; None: no replay.
    return_mask_logprobs  False: heads that ask for the log-probs of the sets get a third result, None. True is left to prime-rl.
    options         None: prime-rl's meaning of a label outside of its set, and of the entropy; see `bind`."""
    plain(hidden, weight)
    if return_mask_logprobs:
        raise NotCovered("score centring")
    transform = LogitTransform(temperature=1.0 / inv_temperature.float())
    kept = None if sampling_mask is None else TokenSets.from_padded(sampling_mask)
    logps, entropy = linear_logprobs(
        hidden, weight, labels, transform=transform, entropy="detached", kept=kept,
        options=options or Options(missing="full", entropy_over="vocabulary"),
    )  # fmt: skip
    return (logps, entropy) if return_mask_logprobs is None else (logps, entropy, None)


def kept_sets(record: Any, ids: Tensor, *, cu_seqlens: Tensor | None = None) -> TokenSets:
    """What prime-rl's orchestrator sends, as the sets of the rows that predict ids.

    record       a `SamplingMask`: bytes of int32, `ids` and `counts`, one count for each token, the prompt's and tools' being 0;
                 its `logprobs`, bytes of float32, become the values. Several texts: the records' bytes one after another.
    ids          int64 [B, T], or packed [N] with cu_seqlens: the texts, as `shift_targets` takes them.

    A row without ids stands for the whole vocabulary, as to prime-rl. Raises ValueError where there is not a count for each
    token, or not as many ids as the counts say."""

    def numbers(data: bytes, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)

    logprobs = getattr(record, "logprobs", None)
    values = None if logprobs is None else numbers(logprobs, torch.float32)
    sets = TokenSets.from_counts(numbers(record.ids, torch.int32), numbers(record.counts, torch.int32), values)
    return shift_sets(sets.to(ids.device), ids, cu_seqlens=cu_seqlens)


def loss(inputs: Any, objective: str = "dppo_tv", changes: dict[str, Any] | None = None) -> Any:
    """`fn(LossInputs, **kwargs) -> LossOutputs` of one sequence [T], unnormalised.

    objective, changes   `Objective.preset(objective, **changes)`, with prime-rl's numbers where it has that objective. Its
                         aggregate is the sum, whatever the preset has. old_logps are the sampler's; so are the ref_logps of
                         "dppo_tv" and "ipo", where the KL is to the sampler; else they are `inputs.ref_logprobs`.

    Metrics, 0-d: mismatch_kl (k3 to the sampler), is_masked (the share of tokens that are clipped or filtered out).
    """
    from prime_rl.trainer.rl.loss import LossOutputs

    theirs = "prime-rl" if objective in NUMERICS["prime-rl"] else None
    wanted = Objective.preset(objective, numerics=theirs, **{**(changes or {}), "aggregate": "token-sum"})
    sampler = inputs.inference_logprobs
    reference = sampler if theirs and objective != "sampled_distillation" else inputs.ref_logprobs

    def row(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[None]

    mask = inputs.loss_mask[None]
    batch = scored_batch(
        mask, inputs.advantages[None].float(), old_logps=row(sampler), sampler_logps=row(sampler), ref_logps=row(reference)
    )
    out = objective_loss(inputs.trainer_logprobs[None], batch, wanted, token_weights=row(inputs.loss_weights))
    x = torch.where(mask, out.logps - sampler[None], 0.0)
    left_out = 1 - out.metrics["kept"] if wanted.filters else out.metrics["clip_low"] + out.metrics["clip_high"]
    metrics = {"mismatch_kl": (bounded_exp(x) - x - 1).sum() / mask.sum().clamp(min=1), "is_masked": left_out}
    return LossOutputs(loss=out.loss, metrics=metrics)
