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

`loss` is a custom loss: of one sequence, an unnormalised sum. prime-rl divides by its global token count.

Written from prime-rl 0.8.0. No registry has it, so it was not run: the tests call stand-ins with its signatures.
"""

from __future__ import annotations

from typing import Any

import torch

from ..formulas.ops import bounded_exp
from ..logprobs import linear_logprobs
from ..losses import objective_loss
from ..objective import Objective
from ..presets import NUMERICS
from ..transform import LogitTransform
from ._shared import plain, scored_batch
from ._slots import Slots, check_version

Tensor = torch.Tensor

TESTED = ("0.8.0",)


def bind(*, strict: bool = False, any_version: bool = False) -> Slots:
    """Put our function in the place of `_SequenceChunkedLogProbEntropyFn`; the result undoes it, by `undo()` or as a context
    manager.

    strict   True: a call that has to be left to prime-rl raises RuntimeError instead.
    Raises RuntimeError for a version that is not known, unless any_version, and where it is bound already."""
    check_version("prime-rl", TESTED, any_version)
    slots = Slots("prime_rl", strict)
    home = "prime_rl.trainer.models.layers.lm_head"
    slots.bind(home, "_SequenceChunkedLogProbEntropyFn", chunked_logprobs, attribute="apply")
    return slots


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, inv_temperature: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) fp32 [N] of labels [N]; hidden [N, H], weight [V, H], inv_temperature [N]. chunk_size is ours."""
    plain(hidden, weight)
    transform = LogitTransform(temperature=1.0 / inv_temperature.float())
    logps, entropy = linear_logprobs(hidden, weight, labels, transform=transform, entropy="detached")
    assert entropy is not None
    return logps, entropy


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
    reference = sampler if theirs and objective != "distillation" else inputs.ref_logprobs

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
