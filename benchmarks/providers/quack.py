"""QuACK: its cross-entropy of given logits. Its linear cross-entropy returns one scalar over all tokens: no gradient per token,
as a policy's loss has, can go in."""

from __future__ import annotations

from benchmarks.cases import Case
from benchmarks.providers import Logps, Unavailable, logps_provider, peer


@logps_provider("QuACK cross-entropy", "logits", devices=("cuda",))
def cross_entropy(case: Case) -> Logps:
    nll = peer("quack.cross_entropy", "quack-kernels").cross_entropy
    return lambda logits: -nll(logits, case.batch.targets, reduction="none", inplace_backward=True)


@logps_provider("QuACK linear cross-entropy", "hidden", "hidden-frozen", suffix="")
def linear_cross_entropy(case: Case) -> Logps:
    raise Unavailable("returns one scalar over all tokens: no gradient per token, as a policy's loss has, can go in")
