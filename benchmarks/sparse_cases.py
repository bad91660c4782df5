"""The case of the suite `sparse`: rows with a given mean entropy. Random hidden states are scaled until their rows have it.
Targets are sampled from these rows, like those of a policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases import Cell, HiddenCase, row_blocks, tokens

Tensor = torch.Tensor

#: The number of rows from which the scale is chosen.
LOOKED_AT = 64


@dataclass
class SparseCase(HiddenCase):
    scale: float  # standard deviation of the hidden states; that of the weight is 1 / sqrt(H)
    entropy: float  # the mean that was reached, in nats


def entropies(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def scale_for(logits: Tensor, wanted: float) -> float:
    """The factor by which these logits have to be multiplied for this mean entropy, in nats. The entropy falls as the factor
    grows."""
    low, high = 0.0, 1024.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if float(entropies(middle * logits).mean()) > wanted else (low, middle)
    return (low + high) / 2


@torch.no_grad()
def make_sparse(cell: Cell, device: str, seed: int = 0) -> SparseCase:
    assert cell.hidden is not None and cell.entropy is not None
    g = torch.Generator(device).manual_seed(seed)
    weight = (torch.randn(cell.vocab, cell.hidden, generator=g, device=device) / cell.hidden**0.5).to(cell.dtype)
    hidden = torch.randn(cell.rows, cell.hidden, generator=g, device=device)
    scale = scale_for((hidden[:LOOKED_AT].to(cell.dtype) @ weight.t()).float(), cell.entropy)
    hidden = (scale * hidden).to(cell.dtype)
    targets, now, reached = [], [], 0.0
    for part in row_blocks(cell, 4, device):
        log_p = (hidden[part] @ weight.t()).float().log_softmax(-1)
        targets.append(torch.multinomial(log_p.exp(), 1, generator=g))
        now.append(log_p.gather(1, targets[-1])[:, 0])
        reached += float(entropies(log_p).sum()) / cell.rows
    batch = tokens(cell, torch.cat(targets)[:, 0], torch.cat(now), g)
    return SparseCase(cell, batch, hidden.requires_grad_(), weight.requires_grad_(), scale, reached)
