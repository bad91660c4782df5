"""Logits at single ids of rows and log-probs from them: ids that are listed beside a row's target, and several targets of a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..formulas.ops import times
from ..formulas.token_stage import TokenStage
from .backends import WITH_ENTROPY, Backend
from .partials import LogitRows, Partials, RowTransform, Slopes
from .ragged import Ragged, Tokens, at_or, write_at


@dataclass(eq=False)
class LogitsAt:
    """Logits at further ids of rows, one fp32 number a slot, [k], before the transform: one log-sum-exp serves all ids of a row.

    used   bool [k]: ids that the row's softmax has. The log-prob of the others is -inf, without gradient. That of all ids of a row
           that is not read is 0.
    one    int64 [n]: the slot of the likeliest id of each row, which is the row's target; None: the target may be any other. Its
           log-prob is that of the kernels; the others are less likely by a difference of logits, so that none is above 0, and
           no digits of 1 - p are lost where logits at ids are sums of other order than those of rows."""

    slots: Ragged
    logits: Tensor
    used: Tensor
    one: Tensor | None = None

    def log_probs(self, partials: Partials, read: Tensor | None, transform: RowTransform) -> Tensor:
        """fp32 [k]."""
        rows, z = self.slots.rows, self._z(transform)
        if self.one is None:
            logps = (z - partials.max[rows]) - torch.log(partials.sum)[rows]
        else:
            of_one = at_or(z, self.one)[rows]
            logps = partials.logps[rows] + torch.where(z == -torch.inf, z, z - of_one)
        return logps if read is None else torch.where(read[rows], logps, 0.0)

    def _z(self, transform: RowTransform) -> Tensor:
        return torch.where(self.used, transform.of(self.logits, self.slots.rows), -torch.inf)

    # ---- where the target of a row is the likeliest of its ids

    def with_likeliest(self, transform: RowTransform) -> LogitsAt:
        """The same with `one`: the first of equal ones, and the number of slots where a row has none."""
        rows, z, k = self.slots.rows, self._z(transform), self.used.numel()
        top = torch.segment_reduce(z, "max", offsets=self.slots.offsets, initial=-torch.inf, unsafe=True)
        slot = torch.where(self.used & (z == top[rows]), torch.arange(k, device=z.device), k)
        return replace(self, one=torch.full_like(top, k, dtype=torch.int64).scatter_reduce_(0, rows, slot, "amin"))

    @property
    def targets(self) -> Tensor:
        """int64 [n]: the ids at `one`, 0 of a row without any."""
        assert self.one is not None
        return at_or(self.slots.ids, self.one)

    def gradients(
        self, upstream: Tensor, outside: Tensor | None, targets: Tensor, read: Tensor | None, partials: Partials, slopes: Slopes,
        transform: RowTransform, others: OfOthers | None = None,
    ) -> tuple[Tensor, Slopes]:  # fmt: skip
        """(d loss / d logits [k], of all that the loss depends on but divergences, which the kernels add: where two rows are nearly
        equal, the sign of a difference is that of the logits whose sums the partials have; the slopes of the other columns of the
        rows), from d loss / d log-probs [k], and from d loss / d log of the probability outside of the ids [n], or None. `others`:
        what arrives at the probabilities outside of the ids of each token.

        Where p is close to 1, the 1 - p of one's own logit is that of expm1, as in the row kernels, or the sum of all else where
        that is known. Sums over the ids are fp64, since what arrives at one of them may be far more than at all others."""
        rows = self.slots.rows
        counted = self.used if read is None else self.used & read[rows]
        upstream = torch.where(counted, upstream, 0.0).double()
        total = self._sums(upstream)
        constant = -total  # the gradient of the other columns, in units of their probability
        logps = torch.where(counted, self.log_probs(partials, read, transform), -torch.inf)
        p, rest = logps.exp(), -torch.expm1(logps)
        # A row of NaN is NaN at all of its columns if anything arrives at one of its ids, and 0 if nothing does, as in the kernels.
        arrives = self._sums(torch.where(upstream != 0, 1.0 + 0.0 * p, 0.0).double())
        constant = torch.where(arrives.isnan(), arrives, constant)
        if outside is not None:  # d log P / d z_j, P the probability outside, is p_j (1 / P - 1), of the ids -p_j
            outside, mass = outside if read is None else torch.where(read, outside, 0.0), torch.exp(partials.outside)
            inside = torch.where(mass > 0.5, self._sums(p), 1.0 - mass)
            constant = constant + torch.where(outside == 0, 0.0, outside * (inside / mass))
            arrives = torch.where(outside == 0, arrives, 1.0)
            total = total + outside
            rest = torch.where(p > 0.5, (mass + self._sums(torch.where(p > 0.5, 0.0, p)))[rows], rest)
        g = rest * upstream - p * (total[rows] - upstream)
        if others is not None:
            constant = constant + (others.per_p - others.outside)
            g = g + p * ((others.per_p[rows] - others.listed) - others.outside[rows])
            arrives = torch.where(others.outside == 0, arrives, 1.0)
        g = g.float()
        g = g + slopes.target[rows] * torch.where(self.slots.ids == targets[rows], rest, -p)
        for term in slopes.at_columns(rows, p, p, logps):
            g = g + term
        active = ((arrives != 0) | slopes.nonzero)[rows]
        g = torch.where(counted & active, g * transform.slope(self.logits, rows), 0.0)
        return g, slopes.plus("constant", constant.float())

    def _sums(self, x: Tensor) -> Tensor:
        """[n], of x [k], in a fixed order: no atomics."""
        return torch.segment_reduce(x, "sum", offsets=self.slots.offsets, initial=0, unsafe=True)


class OfOthers(NamedTuple):
    """What arrives at the log of the probabilities of all ids that a token does not list, see `TermsOfRows`; fp64.

    outside, per_p  [n], sums over the tokens of each row.
    listed          [k], of each slot the sum of per_p over the tokens that list it."""

    outside: Tensor
    per_p: Tensor
    listed: Tensor

    @classmethod
    def of(cls, tokens: Tokens, rows: Tensor, outside: Tensor, per_p: Tensor) -> OfOthers:
        """From those of the tokens, fp32 [m]. `rows` int64 [k]: the token of each listed id."""
        outside, per_p = (torch.where(tokens.used, x, 0.0).double() for x in (outside, per_p))
        nothing = outside.new_zeros(rows.numel())
        pairs = tokens.pairs
        outside_of_rows = pairs.row_sums(torch.cat([outside, nothing]))
        per_p_of_rows = pairs.row_sums(torch.cat([per_p, nothing]))
        per_p_of_ids = pairs.sums(torch.cat([torch.zeros_like(per_p), per_p[rows]]))
        return cls(outside_of_rows, per_p_of_rows, per_p_of_ids)


def fused_tokens(
    backend: Backend, rows: LogitRows, tokens: Tokens, stage: TokenStage, logits: Tensor, out: Tensor | None, here: Ragged
) -> Tensor:
    """`Backend.fused_tokens` with the stage in torch: statistics of the rows, token stage, gradient. `logits` fp32 [k]: those at
    the slots of `tokens.pairs`; `here`: these slots as this process's columns in `out`."""
    listed, m = stage.listed, tokens.rows.numel()
    # Where the host knows that each row has one token, the kernels do all of it in one visit.
    if listed is None and tokens.read is None and m == rows.n and tokens.rows.unique().numel() == tokens.n:
        order = tokens.rows.argsort()
        return backend.fused(rows._replace(targets=tokens.targets[order]), stage.at(order), out)[:, tokens.rows]
    slots = tokens.pairs.slots
    ids = LogitsAt(slots, logits, slots.ids >= 0).with_likeliest(rows.transform)
    rows = rows._replace(targets=ids.targets)
    partials = backend.visit(rows, WITH_ENTROPY)
    logps, of_ids = tokens.of_pairs(ids.log_probs(partials, None, rows.transform)).tensor_split([m])
    entropy = tokens.of_rows(partials.entropy)
    made = None if listed is None else listed.of(of_ids, stage.rows.advantages)
    terms = stage.terms(logps, entropy, None if made is None else made.term)
    others = None
    if out is not None:
        upstream = torch.where(tokens.used, terms.d_logps, 0.0)
        if listed is not None and made is not None:
            upstream = torch.cat([upstream, times(terms.d_listed[listed.rows], made.slopes)])
            if made.outside is not None and made.per_p is not None:
                of_others = (times(terms.d_listed, x) for x in (made.outside, made.per_p))
                others = OfOthers.of(tokens, listed.rows, *of_others)
        of_entropy = None if terms.d_entropy is None else tokens.to_rows(torch.where(tokens.used, terms.d_entropy, 0.0))
        given = {"logps": torch.zeros_like(partials.max)} | ({} if of_entropy is None else {"entropy": of_entropy})
        slopes = Slopes.of({"entropy": partials.entropy}, given, rows.read)
        of_rows = (rows.targets, rows.read, partials, slopes, rows.transform)
        at_ids, slopes = ids.gradients(tokens.to_pairs(upstream), None, *of_rows, others)
        backend.gradient(rows, partials, slopes, out)
        write_at(out, here, at_ids)
    return torch.stack([logps, entropy, torch.where(tokens.used, terms.losses, 0.0)])
