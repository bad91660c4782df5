"""Apple's Cut Cross-Entropy: negative log-probs from hidden states. Its kernel skips blocks whose gradients are small. A random
head has more such blocks than a trained one, so the filtered time here is a lower bound. It is measured with and without that
filter. On a CPU its torch.compile version is measured."""

from __future__ import annotations

from benchmarks.cases import HALF, Case
from benchmarks.providers import Logps, logps_provider, peer


def _logps(case: Case, **how: object) -> Logps:
    cross_entropy = peer("cut_cross_entropy", "cut-cross-entropy").linear_cross_entropy
    targets = case.batch.targets
    return lambda hidden, weight: -cross_entropy(hidden, weight, targets, reduction="none", **how)


@logps_provider("CCE, filtered (flat states)", "hidden", "hidden-frozen", "sparse", devices=("cuda",), dtypes=HALF)
@logps_provider("CCE", "hidden-forward", devices=("cuda",), dtypes=HALF)
def filtered(case: Case) -> Logps:
    return _logps(case)


@logps_provider("CCE, unfiltered", "hidden", "hidden-frozen", "cross-entropy", devices=("cuda",), dtypes=HALF)
def unfiltered(case: Case) -> Logps:
    return _logps(case, filter_eps=None)


@logps_provider("CCE (torch.compile)", "hidden", "hidden-frozen", "sparse", "cross-entropy", "hidden-forward")
def compiled(case: Case) -> Logps:
    return _logps(case, impl="torch_compile")
