"""TRL: its log-prob kernel on logits, the chunked head that its trainers use, and its chunked divergence."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.cases import OF_SEQUENCES, Case, Result
from benchmarks.providers import BETAS, Logps, logps_provider, peer, provider


@logps_provider("TRL kernel", "logits", "logits-forward", devices=("cuda",))
def kernel(case: Case) -> Logps:
    function = peer("trl.kernels.logprob_entropy", "trl").selective_log_softmax_and_entropy
    return lambda logits: function(logits, case.batch.targets)


@logps_provider("TRL fused head", "hidden", "hidden-frozen", *OF_SEQUENCES, "hidden-forward", "step")
def head(case: Case) -> Logps:
    chunk = peer("trl.trainer.utils", "trl")._CHUNKED_LOGPROB_CHUNK_SIZE  # the backward imports this module as well
    function = peer("trl.kernels.chunked_logprob", "trl").ChunkedLogProbFunction
    arguments = (None, case.batch.targets.view(-1), 1.0, min(chunk, case.cell.vocab), None, 1.0, ("log_probs",))
    return lambda hidden, weight: function.apply(hidden, weight, *arguments)[0]


@provider("TRL chunked divergence + mean", *BETAS)
def divergence(case: Case) -> Callable[[], Result]:
    """Six products, eight for the jsd."""
    function = peer("trl.kernels.chunked_divergence", "trl").ChunkedDivergenceFunction
    teacher, beta = (case.ref_hidden, case.ref_weight, None), BETAS[case.cell.contract]
    return lambda: case.gradients(function.apply(case.hidden, case.weight, None, *teacher, beta)[0].mean())
