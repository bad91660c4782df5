"""Apple's Cut Cross-Entropy: negative log-probs from hidden states, with the loss in torch. Its kernel skips blocks whose
gradients are small. A random head has more such blocks than a trained one, so the filtered time here is a lower bound. It
is measured with and without that filter. On a CPU its torch.compile version is measured."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.cases import HALF, HiddenCase, Result, policy_loss
from benchmarks.providers import peer, provider

Call = Callable[[], Result]


def _logps(case: HiddenCase, **how: object) -> Callable[[], torch.Tensor]:
    cross_entropy = peer("cut_cross_entropy", "cut-cross-entropy").linear_cross_entropy
    return lambda: -cross_entropy(case.hidden, case.weight, case.batch.targets, reduction="none", **how)


def _loss(case: HiddenCase, **how: object) -> Call:
    logps = _logps(case, **how)
    return lambda: case.gradients(policy_loss(logps(), case.batch, case.cell.beta))


@provider("CCE, filtered (flat states) + loss", "hidden", "hidden-frozen", "sparse", devices=("cuda",), dtypes=HALF)
def filtered(case: HiddenCase) -> Call:
    return _loss(case)


@provider("CCE, unfiltered + loss", "hidden", "hidden-frozen", devices=("cuda",), dtypes=HALF)
def unfiltered(case: HiddenCase) -> Call:
    return _loss(case, filter_eps=None)


@provider("CCE (torch.compile) + loss", "hidden", "hidden-frozen", "sparse")
def compiled(case: HiddenCase) -> Call:
    return _loss(case, impl="torch_compile")


@provider("CCE (torch.compile)", "cross-entropy")
def compiled_cross_entropy(case: HiddenCase) -> Call:
    logps = _logps(case, impl="torch_compile")
    return lambda: case.gradients(-logps().mean())


@provider("CCE, unfiltered", "cross-entropy", devices=("cuda",), dtypes=HALF)
def unfiltered_cross_entropy(case: HiddenCase) -> Call:
    logps = _logps(case, filter_eps=None)
    return lambda: case.gradients(-logps().mean())


@provider("CCE", "hidden-forward", devices=("cuda",), dtypes=HALF)
def forward(case: HiddenCase) -> Call:
    logps = _logps(case)
    return torch.no_grad()(lambda: {"logps": logps()})


@provider("CCE (torch.compile)", "hidden-forward")
def compiled_forward(case: HiddenCase) -> Call:
    logps = _logps(case, impl="torch_compile")
    return torch.no_grad()(lambda: {"logps": logps()})
