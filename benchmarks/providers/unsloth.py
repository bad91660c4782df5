"""Unsloth: its chunked log-probs of hidden states, with the loss in torch. Its package must be imported by
`unsloth`, which replaces parts of torch and transformers: set UNSLOTH_IS_PRESENT=1, and without a GPU
UNSLOTH_ZOO_DISABLE_GPU_INIT=1, instead."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.cases import HiddenCase, Result, policy_loss
from benchmarks.providers import peer, provider


@provider("Unsloth chunked log-probs + loss", "hidden", "hidden-frozen")
def chunked(case: HiddenCase) -> Callable[[], Result]:
    logps_of = peer("unsloth_zoo.fused_losses.chunked_logprob", "unsloth_zoo").unsloth_chunked_logprobs

    def run() -> Result:
        logps = logps_of(case.hidden, case.weight, case.batch.targets)
        return case.gradients(policy_loss(logps, case.batch, case.cell.beta))

    return run
