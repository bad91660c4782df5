"""Losses over kept sets, from hidden states: ours, and those of trainers today. The gradient of the weight is returned by
autograd, or added to existing memory ("into weight_grad"), as trainers do that sum it over micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.cases import Result, policy_loss
from benchmarks.kept_cases import KeptCase
from benchmarks.providers import provider
from benchmarks.providers.ours import native, objective
from grpo_kernels import linear_grpo_loss

Tensor = torch.Tensor
Call = Callable[[], Result]


def _loss(case: KeptCase, backend: str, weight_grad: Tensor | None = None) -> Tensor:
    spec = objective(case.cell)
    return linear_grpo_loss(case.hidden, case.weight, replace(case.batch), spec, backend=backend, weight_grad=weight_grad).loss


@provider("grpo_kernels, into weight_grad", "kept")
def into(case: KeptCase) -> Call:
    backend = native(case)
    return lambda: case.added(_loss(case, backend, case.weight_grad))


@provider("grpo_kernels", "kept")
def ours(case: KeptCase) -> Call:
    backend = native(case)
    return lambda: case.gradients(_loss(case, backend))


@provider("grpo_kernels, eager backend, into weight_grad", "kept")
def eager_backend(case: KeptCase) -> Call:
    return lambda: case.added(_loss(case, "eager", case.weight_grad))


@provider("whole vocabulary, loss without sets", "kept", limit=True)
def whole_vocabulary(case: KeptCase) -> Call:
    """Another loss, over the whole vocabulary: the cost for a trainer that does not use the sets."""
    spec, backend = objective(case.cell), native(case)

    def run() -> Tensor:
        loss = linear_grpo_loss(case.hidden, case.weight, replace(case.plain_batch), spec, backend=backend).loss
        torch.autograd.grad(loss, (case.hidden, case.weight))
        return loss

    return run


@provider("eager PyTorch, masked logits", "kept", memory=lambda cell: 13.0 * cell.rows * cell.vocab)
def masked(case: KeptCase) -> Call:
    """The whole product, with -inf outside the sets, as in trainers that replay them."""
    outside = ~case.sets.mask(case.cell.vocab)

    def run() -> Result:
        logits = (case.hidden @ case.weight.t()).float().masked_fill(outside, -torch.inf)
        chosen = logits.gather(1, case.batch.targets[:, None])[:, 0]
        return case.gradients(policy_loss(chosen - logits.logsumexp(1), case.plain_batch, case.cell.beta))

    return run


@provider("pairs in PyTorch, autograd", "kept")
def pairs(case: KeptCase) -> Call:
    """Gathered and padded pairs of a row and an id, as in SkyRL's replay head: dot products in the dtype of the operands, and the
    gradient of the weight by index_add into new memory."""
    padded = case.sets.padded(0).long()
    used = torch.arange(padded.shape[1], device=padded.device) < case.sets.counts[:, None]
    target = ((padded == case.batch.targets[:, None]) & used).to(torch.int64).argmax(1)
    single = case.sets.counts == 1

    def run() -> Result:
        several = (~single).nonzero()[:, 0]
        ids, inside = padded[several], used[several]
        row, _ = inside.nonzero(as_tuple=True)
        dots = (case.hidden[several][row] * case.weight[ids[inside]]).sum(1).float()
        z = torch.full(ids.shape, -torch.inf, device=dots.device).masked_scatter(inside, dots)
        log_probs = z.gather(1, target[several, None])[:, 0] - z.logsumexp(1)
        logps = torch.zeros(case.cell.rows, device=dots.device).index_put((several,), log_probs)
        return case.gradients(policy_loss(logps, case.plain_batch, case.cell.beta))

    return run


@provider("one gather, rows of the weight", "kept", limit=True)
def gathered(case: KeptCase) -> Call:
    """A limit: each row of the weight in a set of more than one id is read once, in random order, and written to contiguous
    memory."""
    ids = case.sets.ids[(case.sets.counts > 1)[case.sets.row_of]].long()
    out = torch.empty(ids.numel(), case.weight.shape[1], dtype=case.weight.dtype, device=case.weight.device)
    weight = case.weight.detach()
    return lambda: torch.index_select(weight, 0, ids, out=out)
