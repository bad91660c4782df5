"""The case of the suite `kept`: rows whose tokens were sampled from sets, and the reference results in float64.

The sizes of the sets follow figures that prime-rl published for top-k and top-p sampling: 46 % of the rows have a single id,
the median is 2, the mean about 8, the 99th percentile about 82. For rows with more than one id, sizes are drawn from a
log-normal distribution whose parameters reproduce these quantiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases import Cell, Result, hidden_near, loss_and_slope, tokens
from grpo_kernels import TokenBatch, TokenSets

Tensor = torch.Tensor

SINGLE, MU, SIGMA, LARGEST = 0.46, 1.936, 1.185, 512


@dataclass
class KeptCase:
    cell: Cell
    batch: TokenBatch  # with the sets
    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    weight_grad: Tensor  # fp32 [V, H]: the caller's memory, to which a gradient is added

    @property
    def sets(self) -> TokenSets:
        assert self.batch.kept is not None
        return self.batch.kept

    @property
    def plain_batch(self) -> TokenBatch:
        """The batch without its sets, for implementations that do not support them."""
        return TokenBatch(self.batch.targets, self.batch.advantages, old_logps=self.batch.old_logps)

    def restore(self) -> None:
        self.weight_grad[self.sets.ids.long()] = 0

    def gradients(self, loss: Tensor) -> Result:
        d_hidden, d_weight = torch.autograd.grad(loss, (self.hidden, self.weight))
        return {"loss": loss.detach(), "d_hidden": d_hidden, "d_weight": d_weight}

    def added(self, loss: Tensor) -> Result:
        """The results of a loss whose backward adds the gradient of the weight to `weight_grad`."""
        (d_hidden,) = torch.autograd.grad(loss, (self.hidden,))
        return {"loss": loss.detach(), "d_hidden": d_hidden, "d_weight": self.weight_grad}


def sizes(rows: int, vocab: int, g: torch.Generator) -> Tensor:
    """int64 [rows]: the number of ids in each set."""
    draw = torch.randn(rows, generator=g, device=g.device)
    several = (SIGMA * draw + MU).exp().round().clamp(2, min(LARGEST, vocab)).long()
    return torch.where(torch.rand(rows, generator=g, device=g.device) < SINGLE, 1, several)


def sets_of(targets: Tensor, vocab: int, g: torch.Generator) -> TokenSets:
    """Sets of such sizes with the targets among them."""
    counts = sizes(targets.numel(), vocab, g)
    row = torch.repeat_interleave(counts)
    first = torch.zeros_like(row).index_fill(0, counts.cumsum(0) - counts, 1).bool()
    # The ids of a row are consecutive numbers from a random one on, times a factor that scatters them over the vocabulary.
    start = torch.randint(0, vocab, targets.shape, generator=g, device=targets.device)[row]
    inside = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
    factor = next(p for p in (7919, 104729) if vocab % p)  # a prime that does not divide V: different ids stay different
    ids = (start + inside) * factor % vocab
    at = torch.where(first, targets[row], ids)
    at = torch.where(~first & (at == targets[row]), (start + counts[row]) * factor % vocab, at)
    return TokenSets.from_counts(at.int(), counts)


def make_kept(cell: Cell, device: str, seed: int = 0) -> KeptCase:
    g = torch.Generator(device).manual_seed(seed)
    hidden, weight, targets = hidden_near(cell, device, g)
    sets = sets_of(targets, cell.vocab, g)
    case = KeptCase(
        cell, TokenBatch(targets, torch.zeros(cell.rows, device=device), kept=sets), hidden, weight,
        torch.zeros(weight.shape, device=device),
    )  # fmt: skip
    batch = tokens(cell, targets, log_probs(case)[0].float(), g)
    case.batch = TokenBatch(targets, batch.advantages, old_logps=batch.old_logps, kept=sets)
    hidden.requires_grad_()
    weight.requires_grad_()
    return case


@torch.no_grad()
def log_probs(case: KeptCase) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs of targets [N], log-probs [nnz] of all ids, whether each id is its row's target [nnz]) in float64."""
    sets, rows = case.sets, case.sets.row_of
    pairs = zip(rows.split(4096), sets.ids.long().split(4096), strict=True)
    z = torch.cat([(case.hidden[r].double() * case.weight[i].double()).sum(1) for r, i in pairs])
    top = torch.full((case.cell.rows,), -torch.inf, dtype=torch.float64, device=z.device).scatter_reduce_(0, rows, z, "amax")
    total = torch.zeros_like(top).index_add_(0, rows, (z - top[rows]).exp())
    log_q = z - top[rows] - total.log()[rows]
    is_target = sets.ids == case.batch.targets[rows]
    return torch.zeros_like(top).index_add_(0, rows[is_target], log_q[is_target]), log_q, is_target


@torch.no_grad()
def kept_reference(case: KeptCase) -> Result:
    """Loss and gradients in float64, computed only for the pairs of a row and an id."""
    sets, rows = case.sets, case.sets.row_of
    logps, log_q, is_target = log_probs(case)
    loss, slope = loss_and_slope(logps, case.plain_batch, slice(None), case.cell)
    d_z = slope[rows] * (is_target.double() - log_q.exp())
    d_hidden = torch.zeros(case.hidden.shape, dtype=torch.float64, device=d_z.device)
    d_weight = torch.zeros(case.weight.shape, dtype=torch.float64, device=d_z.device)
    for at in torch.arange(rows.numel(), device=rows.device).split(4096):
        row, ids, g = rows[at], sets.ids[at].long(), d_z[at, None]
        d_hidden.index_add_(0, row, g * case.weight[ids].double())
        d_weight.index_add_(0, ids, g * case.hidden[row].double())
    return {"loss": loss.float(), "d_hidden": d_hidden.float(), "d_weight": d_weight.float()}
