"""TRL: its log-prob kernel on logits, and the chunked head that its trainers use, each with the loss in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.cases import HiddenCase, LogitsCase, Result, StepCase, policy_loss
from benchmarks.providers import peer, provider

Call = Callable[[], Result]


def _kernel() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return peer("trl.kernels.logprob_entropy", "trl").selective_log_softmax_and_entropy


@provider("TRL kernel + loss", "logits", devices=("cuda",))
def kernel(case: LogitsCase) -> Call:
    logprobs = _kernel()
    return lambda: case.gradients(policy_loss(logprobs(case.logits, case.batch.targets)[0], case.batch, case.cell.beta))


@provider("TRL kernel", "logits-forward", devices=("cuda",))
def kernel_forward(case: LogitsCase) -> Call:
    logprobs = _kernel()

    @torch.no_grad()
    def run() -> Result:
        logps, entropy = logprobs(case.logits, case.batch.targets)
        return {"logps": logps, "entropy": entropy}

    return run


def _head(case: HiddenCase | StepCase) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Log-probs [N] of hidden states [N, H] under a weight [V, H]."""
    chunk = peer("trl.trainer.utils", "trl")._CHUNKED_LOGPROB_CHUNK_SIZE  # the backward imports this module as well
    function = peer("trl.kernels.chunked_logprob", "trl").ChunkedLogProbFunction
    arguments = (None, case.batch.targets.view(-1), 1.0, min(chunk, case.cell.vocab), None, 1.0, ("log_probs",))
    return lambda hidden, weight: function.apply(hidden, weight, *arguments)[0]


@provider("TRL fused head + loss", "hidden", "hidden-frozen")
def head(case: HiddenCase) -> Call:
    logps = _head(case)
    return lambda: case.gradients(policy_loss(logps(case.hidden, case.weight), case.batch, case.cell.beta))


@provider("TRL fused head", "hidden-forward")
def head_forward(case: HiddenCase) -> Call:
    logps = _head(case)
    return torch.no_grad()(lambda: {"logps": logps(case.hidden, case.weight)})


@provider("TRL fused head + loss", "step")
def step(case: StepCase) -> Call:
    logps, shape = _head(case), case.batch.targets.shape

    def run() -> Result:
        log_probs = logps(case.hidden().flatten(0, 1), case.model.lm_head.weight).view(shape)
        return case.step(policy_loss(log_probs, case.batch, case.cell.beta))

    return run
