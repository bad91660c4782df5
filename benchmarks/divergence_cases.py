"""The cases of the suite `divergence`: the mean divergence of a policy's rows to those of a frozen teacher, and the reference
results in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.cases import Cell, HiddenCase, LogitsCase, Result, hidden_near
from grpo_kernels import Exact, TokenBatch

Tensor = torch.Tensor

EXACT = {
    "divergence": Exact("reverse"),
    "divergence-forward": Exact("forward"),
    "divergence-jsd": Exact("jsd"),
    "logits-divergence": Exact("reverse"),
}


@dataclass
class TeacherCase(HiddenCase):
    """A case from hidden states. The teacher's tensors are the policy's plus noise of the same standard deviation."""

    ref_hidden: Tensor
    ref_weight: Tensor


@dataclass
class TwoLogitsCase(LogitsCase):
    ref_logits: Tensor


def make_divergence(cell: Cell, device: str, seed: int = 0) -> TeacherCase | TwoLogitsCase:
    g = torch.Generator(device).manual_seed(seed)
    ones = torch.ones(cell.rows, device=device)  # advantages, by which errors of a loss are scaled
    if cell.hidden is None:
        logits, ref_logits = (torch.empty(cell.rows, cell.vocab, dtype=cell.dtype, device=device) for _ in range(2))
        for row, ref in zip(logits.split(64), ref_logits.split(64), strict=True):
            x = 2 * torch.randn(row.shape, generator=g, device=device)
            x[:, : cell.vocab // 3000 + 1] += 8
            row.copy_(x)
            ref.copy_(x + torch.randn(row.shape, generator=g, device=device))
        batch = TokenBatch(ones.long(), ones)
        buffer = torch.empty_like(logits).copy_(logits)
        return TwoLogitsCase(cell, batch, logits.clone().requires_grad_(), logits, buffer, ref_logits)
    hidden, weight, targets = hidden_near(cell, device, g)
    ref_hidden, ref_weight = (
        (x + x.float().std() * torch.randn(x.shape, generator=g, device=device)).to(cell.dtype) for x in (hidden, weight)
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    return TeacherCase(cell, TokenBatch(targets, ones), hidden, weight, ref_hidden, ref_weight)


def mean_divergence(exact: Exact, z: Tensor, w: Tensor) -> Tensor:
    """The mean divergence from logits [n, V], by its definition."""
    log_p, log_q = z.log_softmax(-1), w.log_softmax(-1)
    if exact.direction == "reverse":
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    if exact.direction == "forward":
        return (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0, device=z.device))
    of_q, of_p = (log_q.exp() * (log_q - log_m)).sum(-1), (log_p.exp() * (log_p - log_m)).sum(-1)
    return 0.5 * (of_q + of_p).mean()


def divergence_reference(case: TeacherCase | TwoLogitsCase) -> Result:
    """The reference results in float64, some rows at a time. Autograd computes the gradient of the logits."""
    exact, loss = EXACT[case.cell.contract], torch.zeros((), dtype=torch.float64, device=case.batch.targets.device)
    results: dict[str, Tensor] = {}
    if isinstance(case, TwoLogitsCase):
        results["d_logits"] = torch.empty(case.pristine.shape, device=case.pristine.device)
    else:
        hidden, weight, ref_hidden, ref_weight = (
            x.detach().double() for x in (case.hidden, case.weight, case.ref_hidden, case.ref_weight)
        )
        results = {"d_hidden": torch.empty_like(hidden), "d_weight": torch.zeros_like(weight)}
    for part in _parts(case.cell):
        if isinstance(case, TwoLogitsCase):
            z, w = case.pristine[part].double(), case.ref_logits[part].double()
        else:
            z, w = hidden[part] @ weight.t(), ref_hidden[part] @ ref_weight.t()
        leaf = z.requires_grad_()
        value = mean_divergence(exact, leaf, w) * (len(z) / case.cell.rows)
        (d_logits,) = torch.autograd.grad(value, leaf)
        loss += value.detach()
        if isinstance(case, TwoLogitsCase):
            results["d_logits"][part] = d_logits
        else:
            results["d_hidden"][part] = d_logits @ weight
            results["d_weight"].addmm_(d_logits.t(), hidden[part])
    return {name: x.float() for name, x in ({"loss": loss} | results).items()}


def _parts(cell: Cell) -> Iterator[slice]:
    step = max(1, (256 << 20) // (8 * cell.vocab))
    for lo in range(0, cell.rows, step):
        yield slice(lo, min(lo + step, cell.rows))
