"""Unsloth: its chunked log-probs of hidden states. Its package must be imported by `unsloth`, which replaces parts of torch and
transformers: set UNSLOTH_IS_PRESENT=1, and without a GPU UNSLOTH_ZOO_DISABLE_GPU_INIT=1, instead."""

from __future__ import annotations

from benchmarks.cases import Case
from benchmarks.providers import Logps, logps_provider, peer


@logps_provider("Unsloth chunked log-probs", "hidden", "hidden-frozen")
def chunked(case: Case) -> Logps:
    logps_of = peer("unsloth_zoo.fused_losses.chunked_logprob", "unsloth_zoo").unsloth_chunked_logprobs
    return lambda hidden, weight: logps_of(hidden, weight, case.batch.targets)
