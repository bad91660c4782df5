"""QuACK: its cross-entropy of given logits, with the loss in torch."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.cases import HiddenCase, LogitsCase, Result, policy_loss
from benchmarks.providers import Unavailable, peer, provider


@provider("QuACK cross-entropy + loss", "logits", devices=("cuda",))
def cross_entropy(case: LogitsCase) -> Callable[[], Result]:
    nll = peer("quack.cross_entropy", "quack-kernels").cross_entropy

    def run() -> Result:
        logps = -nll(case.logits, case.batch.targets, reduction="none", inplace_backward=True)
        return case.gradients(policy_loss(logps, case.batch, case.cell.beta))

    return run


@provider("QuACK linear cross-entropy", "hidden", "hidden-frozen")
def linear_cross_entropy(case: HiddenCase) -> Callable[[], Result]:
    raise Unavailable("returns one scalar over all tokens: no gradient per token, as a policy's loss has, can go in")
