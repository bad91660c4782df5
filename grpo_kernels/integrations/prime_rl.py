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
    *, entropy_over: str = "vocabulary", missing: str = "full", **how: bool
) -> Slots:  # fmt: skip
    """Replace `_SequenceChunkedLogProbEntropyFn` by our function; the result restores it, see
    `Slots`, which has the errors too.

    entropy_over  of replayed rows: "vocabulary", as in prime-rl, or "kept", the entropy over the
                  set.
    missing       of replayed rows, as in `linear_logprobs`: how a label outside its set is treated.
                  "full" is prime-rl's.
    how      strict and any_version of `Slots`.
    """
    slots = Slots(ADAPTER, **how)
    own = (missing, entropy_over) == ("full", "vocabulary")
    slots.bind(
        chunked_logprobs,
        attribute="apply",
        comparable=own,
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
    """Return (log-probs, entropy) of labels [N], fp32.

    hidden, weight, inv_temperature   [N, H], [V, H], [N]
    sampling_mask   int32 [N, K]: the set of each row, padded with -1. None: no replay.
    return_mask_logprobs  True: the third result has the log-probs of all ids of the sets, fp32 [N,
                          K], with a gradient. They are 0 for padding and in rows that are not
                          replayed. False: the third result is None. None: there is no third result.
    entropy_over, missing   for replayed rows, see `bind`

    chunk_size has no effect.
    """
    sets = None if sampling_mask is None else TokenSets.from_padded(sampling_mask)
    found = log_probs_of(
        hidden, labels, head=weight, temperature=1.0 / inv_temperature.float(), entropy="detached", kept=sets,
        at=sets if return_mask_logprobs else None, missing=missing, entropy_over=entropy_over,
    )  # fmt: skip
    if sampling_mask is None or not return_mask_logprobs:
        return (*found,) if return_mask_logprobs is None else (*found, None)
    listed = torch.zeros(sampling_mask.shape, device=hidden.device).masked_scatter(
        sampling_mask >= 0, found.also["at"]
    )
    if missing == "full":
        listed = torch.where((sampling_mask == labels[:, None]).any(-1, keepdim=True), listed, 0.0)
    return (*found, listed)


def kept_sets(record: Any, ids: Tensor, *, cu_seqlens: Tensor | None = None) -> TokenSets:
    """Return the sets of a record of prime-rl's orchestrator, for the rows that predict `ids`.

    record       a `SamplingMask` with bytes of int32: `ids`, and `counts`, one for each token (0
                 for tokens of the prompt and of tools). Its `logprobs`, bytes of float32, become
                 the values. For several texts concatenate the bytes of the records.
    ids          int64 [B, T], or packed [N] with cu_seqlens: the texts, as `shift_targets` takes
                 them.

    A row without ids stands for the whole vocabulary, as in prime-rl. Raises ValueError if there is
    not one count for each token, or if the number of ids is not the sum of the counts.
    """

    def numbers(data: bytes, dtype: torch.dtype = torch.int32) -> Tensor:
        return (
            torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        )

    logprobs = getattr(record, "logprobs", None)
    values = None if logprobs is None else numbers(logprobs, torch.float32)
    sets = TokenSets.from_counts(numbers(record.ids), numbers(record.counts), values)
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
    """Return prime-rl's LossOutputs for the LossInputs of one sequence [T], a sum over tokens.

    objective, changes   `Objective.preset(objective, **changes)`, with prime-rl's constants if it
                         has that objective. The aggregate is always the sum. old_logps are those of
                         the sampler. ref_logps are `inputs.ref_logprobs`, except for "dppo_tv" and
                         "ipo", whose KL is to the sampler.
    score_centering      True: center the score over the ids that the sampler has recorded, at every
                         trained token. Without a record nothing is centered, as in prime-rl.
    on_policy   True: the ratio of every token is 1 and keeps its gradient, see
                `TokenBatch.on_policy`. An attribute of `inputs` with this name, a bool or a bool
                tensor [T], takes precedence. The KL and mismatch_kl still compare with the sampler.

    Metrics, 0-d: mismatch_kl (k3 to the sampler), is_masked (the share of tokens that are clipped
    or filtered out), and with score centering is_centered (1 with a record, else 0).
    """
    from prime_rl.trainer.rl.loss import LossOutputs

    numerics = "prime-rl" if objective in NUMERICS["prime-rl"] else None
    settings = {**(changes or {}), "aggregate": "token-sum"}
    spec = Objective.preset(objective, numerics=numerics, **settings)

    def row(name: str) -> Any:
        """Return a tensor of the inputs as [1, T], None for None."""
        x = getattr(inputs, name)
        return None if x is None else x[None]

    sampler_logps = row("inference_logprobs")
    mask = row("loss_mask")
    ref_logps = row("ref_logprobs")
    if numerics is not None and objective != "sampled_distillation":
        ref_logps = sampler_logps
    advantages = row("advantages").float()
    marks = getattr(inputs, "on_policy", None)
    marks = torch.as_tensor(on_policy if marks is None else marks, device=mask.device)
    if score_centering and marks.any():
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
        on_policy=marks.expand(mask.shape),
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
