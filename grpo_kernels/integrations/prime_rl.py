"""prime-rl: its chunked head on our kernels, and our objectives through its official hook for a
custom loss.

    from grpo_kernels.integrations import prime_rl
    prime_rl.bind()                 # before the first forward

    [trainer.loss]
    type = "custom"
    import_path = "grpo_kernels.integrations.prime_rl.loss"
    kwargs = { objective = "ipo", changes = { beta = 0.002 } }

`bind` replaces the autograd function that `FusedOutputLinear.forward` calls with [N, H] hidden
states and a temperature for each token. The call is in the head module's own forward, so hooks of
FSDP and offloading still run. The entropy has no gradient, as in prime-rl. Softcapped heads (Gemma)
use another function of prime-rl, which is not replaced.

Sampling-mask replay uses the same function: the sets that prime-rl's trainer passes to its head,
padded with -1, become the kept sets of the rows. As in prime-rl, a row is not replayed if it has no
ids or if its label is not in its set. The entropy is taken over the whole vocabulary, as in
prime-rl, which costs a matmul with the whole weight in the forward. `bind(entropy_over="kept")`
saves this matmul and logs the entropy of the set instead. For score centering the log-probs of all
ids of the sets come along (`return_mask_logprobs`). `kept_sets` reads the records of its
orchestrator, for losses of your own.

`loss` is a custom loss: the unnormalised sum over one sequence. prime-rl divides by its global
token count. With `score_centering = true` among its kwargs it takes the drift out of any objective
of the token level, as prime-rl's `ipo` does with the option of that name.

Written from prime-rl 0.8.0; its replay from later heads, which take 6 or 7 arguments. prime-rl is
in no package registry. The tests run stand-ins with its signatures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..batch import shift_sets
from ..formulas.centering import ScoreCentering
from ..losses import objective_loss
from ..objective import NUMERICS, Objective
from ..token_sets import TokenSets
from ._swap import Adapter, Slots, adapt_arguments, with_trainer_names
from ._tensors import excluded_share, log_probs_of, masked_mean, score_centering_term, scored_batch

ADAPTER = Adapter(
    "prime-rl", "prime-rl", ("0.8.0",),
    {"chunked_logprobs": "prime_rl.trainer.models.layers.lm_head._SequenceChunkedLogProbEntropyFn"},
    {'`[trainer.loss] type = "custom"`, `import_path = "grpo_kernels.plugins.prime_rl.loss"`':
     'any objective (`kwargs = { objective = "ipo" }`), and its chunked head'},
)  # fmt: skip


def bind(
    *,
    entropy_over: str = "vocabulary",
    missing: str = "full",
    strict: bool = False,
    any_version: bool = False,
) -> Slots:
    """Replace prime-rl's function of log-probs and entropy by ours, until `undo()` of the result.

    It is `apply` of the autograd function `_SequenceChunkedLogProbEntropyFn`, which the LM head
    calls.

    entropy_over  for rows with a candidate set, the ids that the entropy runs over: "vocabulary",
                  as in prime-rl, or "kept" (the set)
    missing       what to do with a label outside of its set, as in `linear_logprobs`. prime-rl has
                  "full": the row uses the vocabulary.
    strict        True: a call that ours does not support raises RuntimeError. False: prime-rl's
                  own function computes it.
    any_version   False: under a version of prime-rl that was not tested, the first calls are
                  compared with prime-rl's own functions, and RuntimeError is raised if they
                  differ. True: they are not compared.

    Other values of entropy_over and missing than the defaults give other results than prime-rl's. A
    version of prime-rl that was not tested then needs any_version=True.

    Returns `Slots`: `undo()` restores prime-rl's functions, and `counts` has the number of calls.
    Raises RuntimeError if a function is replaced already or has other arguments.
    """
    slots = Slots(ADAPTER, strict, any_version)
    is_as_in_prime_rl = missing == "full" and entropy_over == "vocabulary"
    slots.bind(
        chunked_logprobs,
        attribute="apply",
        comparable=is_as_in_prime_rl,
        entropy_over=entropy_over,
        missing=missing,
    )
    return slots


@with_trainer_names(targets="labels")
def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    inv_temperature: Tensor,
    chunk_size: int,
    sampling_mask: Tensor | None = None,
    return_mask_logprobs: bool | None = None,
    *,
    entropy_over: str = "vocabulary",
    missing: str = "full",
) -> tuple[Tensor | None, ...]:
    """Return (log-probs [N], entropy [N]), and with return_mask_logprobs a third result, fp32 each.

    hidden           [N, H]
    weight           [V, H]
    labels           int64 [N]
    inv_temperature  fp32 [N], multiplies the logits of each row
    chunk_size       not used
    sampling_mask    int32 [N, K], the candidate set of each row, padded with -1; None if the
                     softmax runs over the vocabulary
    return_mask_logprobs
                     None: there are two results, as in versions of prime-rl without this argument.
                     False: the third result is None. True: it has the log-probs of the ids of each
                     set, fp32 [N, K], differentiable; 0 for padding, and in rows that use the
                     vocabulary because their label is not in their set.
    entropy_over, missing
                     as in `bind`

    The entropy has no gradient, as in prime-rl.

    The decorator makes errors use the names of these arguments.
    """
    # With sets, log-probs are over them, and with return_mask_logprobs of all their ids too.
    sets = None if sampling_mask is None else TokenSets.from_padded(sampling_mask)
    result = log_probs_of(
        hidden,
        labels,
        head=weight,
        temperature=1.0 / inv_temperature.float(),
        entropy="detached",
        kept=sets,
        at=sets if return_mask_logprobs else None,
        missing=missing,
        entropy_over=entropy_over,
    )
    if return_mask_logprobs is None:
        return result.logps, result.entropy
    if sampling_mask is None or not return_mask_logprobs:
        return result.logps, result.entropy, None
    # also["at"] has one log-prob for each id that is not padding, row by row.
    mask_logprobs = torch.zeros(sampling_mask.shape, device=hidden.device)
    mask_logprobs = mask_logprobs.masked_scatter(sampling_mask >= 0, result.also["at"])
    if missing == "full":
        has_label = (sampling_mask == labels[:, None]).any(-1, keepdim=True)
        mask_logprobs = torch.where(has_label, mask_logprobs, 0.0)
    return result.logps, result.entropy, mask_logprobs


def kept_sets(record: Any, ids: Tensor, *, cu_seqlens: Tensor | None = None) -> TokenSets:
    """Return the candidate sets that prime-rl recorded, one for each row that predicts a token.

    The candidate set of a token has the ids that the sampler could draw.

    record       prime-rl's `SamplingMask`, whose fields are bytes: `ids` (int32) of all tokens,
                 `counts` (int32), the number of ids of each token (0 for tokens of the prompt and
                 of tools), and optionally `logprobs` (float32) of the ids, which become the values
                 of the sets. To combine several texts, concatenate the bytes of their records.
    ids          int64 [B, T], the tokens of the texts, or packed [N] with cu_seqlens
    cu_seqlens   [num_texts + 1], the offsets of packed texts; None for ids [B, T]

    The result fits targets from `shift_targets(ids)`. A row without ids has an empty set, which
    stands for the whole vocabulary. Raises ValueError if there is not one count for each token, or
    if the number of ids is not the sum of the counts.
    """

    def from_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
        if not data:  # torch.frombuffer refuses an empty buffer
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype)

    logprobs = getattr(record, "logprobs", None)
    values = None if logprobs is None else from_bytes(logprobs, torch.float32)
    sets = TokenSets.from_counts(
        from_bytes(record.ids, torch.int32), from_bytes(record.counts, torch.int32), values
    )
    return shift_sets(sets.to(ids.device), ids, cu_seqlens=cu_seqlens)


@adapt_arguments
@with_trainer_names(logps="trainer_logprobs", old_logps="inference_logprobs", sampler_logps="inference_logprobs", ref_logps="ref_logprobs",
      mask="loss_mask", targets="loss_mask", token_weights="loss_weights")  # fmt: skip
def loss(
    inputs: Any,
    objective: str = "dppo_tv",
    changes: dict[str, Any] | None = None,
    score_centering: bool = False,
    on_policy: bool = False,
) -> Any:
    """Return prime-rl's LossOutputs (loss and metrics) of one sequence, a sum over its tokens.

    inputs            prime-rl's LossInputs, with tensors [T]
    objective         the name of one of our presets. It has prime-rl's constants if prime-rl has
                      that objective.
    changes           fields of the preset to change, such as {"beta": 0.002}
    score_centering   whether the score-centering term is added: it removes the drift that a sampler
                      other than the policy causes, over the ids that the sampler recorded. A
                      sequence without a record gets no such term, as in prime-rl.
    on_policy         whether the ratio of every token is 1 and keeps its gradient, see
                      `TokenBatch.on_policy`. An attribute of `inputs` with this name, a bool or a
                      bool tensor [T], takes precedence.

    The ratio is to the sampler. The KL is to `inputs.ref_logprobs`, but for "dppo_tv" and "ipo" to
    the sampler.

    The metrics are 0-d tensors: mismatch_kl (k3 between policy and sampler), is_masked (the share
    of tokens that are clipped or filtered out), and with score centering is_centered (1 with a
    record, else 0).
    """
    from prime_rl.trainer.rl.loss import LossOutputs

    numerics = "prime-rl" if objective in NUMERICS["prime-rl"] else None
    settings = {**(changes or {}), "aggregate": "token-sum"}
    spec = Objective.preset(objective, numerics=numerics, **settings)

    def row(name: str) -> Any:
        """Return a tensor of the inputs as a batch of one sequence, [1, T]; None for None."""
        x = getattr(inputs, name)
        return None if x is None else x[None]

    sampler_logps = row("inference_logprobs")
    mask = row("loss_mask")
    ref_logps = row("ref_logprobs")
    if numerics is not None and objective != "sampled_distillation":
        # In prime-rl's own RL objectives the KL is to the sampler.
        ref_logps = sampler_logps
    advantages = row("advantages").float()
    is_on_policy = getattr(inputs, "on_policy", None)
    if is_on_policy is None:
        is_on_policy = on_policy
    is_on_policy = torch.as_tensor(is_on_policy, device=mask.device)
    if score_centering and is_on_policy.any():
        raise ValueError(
            "score_centering is True, but tokens are marked as on_policy: the weights of the"
            " centering are ratios to the sampler. Use one of them only."
        )
    batch = scored_batch(
        mask,
        advantages,
        old_logps=sampler_logps,
        sampler_logps=sampler_logps,
        ref_logps=ref_logps,
        on_policy=is_on_policy.expand(mask.shape),
    )
    out = objective_loss(row("trainer_logprobs"), batch, spec, token_weights=row("loss_weights"))
    value = out.loss
    log_ratio = torch.where(mask, out.logps - sampler_logps, 0.0)
    metrics = {
        "mismatch_kl": masked_mean(log_ratio.exp() - log_ratio - 1, mask),
        "is_masked": excluded_share(out, spec),
    }
    if score_centering:
        recorded_policy_logps = row("trainer_mask_logprobs")
        recorded_sampler_logps = row("inference_mask_logprobs")
        has_record = recorded_policy_logps is not None and recorded_sampler_logps is not None
        if has_record:
            value = value + score_centering_term(
                ScoreCentering.of(spec, tail=False),
                recorded_policy_logps,
                recorded_sampler_logps,
                advantages,
                mask,
                1.0 if inputs.loss_weights is None else row("loss_weights"),
            )
        metrics["is_centered"] = value.new_tensor(float(has_record))
    return LossOutputs(loss=value, metrics=metrics)
