"""Kept sets of random cases, and softmaxes over them in float64, with how far fp32 may be from these."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from grpo_kernels import Options, TokenSets

Tensor = torch.Tensor

EPS = 2.0**-23


@dataclass(frozen=True)
class Kept:
    """Sets in words.

    over   what is taken over the vocabulary all the same: "entropy", "reference".
    at     how many further ids of a row have their log-probs asked for: "none", "few" or "many"."""

    rows: str = "none"  # that have a set: none (no sets at all), empty (sets without ids), some, all
    sizes: str = "few"  # one, few, any, whole
    target: str = "either"  # inside of its set, outside, either
    missing: str = "include"
    over: tuple[str, ...] = ()
    at: str = "none"

    def options(self, **more: Any) -> Options:
        names = {f"{name}_over": "vocabulary" for name in self.over}
        return Options(**names, **more, **({} if self.rows == "none" else {"missing": self.missing}))


@st.composite
def kept_sets(draw: st.DrawFn) -> Kept:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    missing = one_of("include", "full", "mask", "include", "raise")
    return Kept(
        rows=one_of("all", "some", "all", "some", "all", "empty", "none"),
        sizes=one_of("few", "any", "one", "few", "whole"),
        target="inside" if missing == "raise" else one_of("either", "inside", "outside"),
        missing=missing,
        over=one_of((), (), (), ("entropy",), ("reference",), ("entropy", "reference")),
        at=one_of("none", "few", "many"),
    )


def random_lists(counts: list[int], vocab: int, g: torch.Generator) -> list[list[int]]:
    return [torch.randperm(vocab, generator=g)[:count].tolist() for count in counts]


def drawn(kept: Kept, targets: Tensor, vocab: int, g: torch.Generator) -> tuple[TokenSets, Tensor, Tensor]:
    """(the sets, bool [N, V] what each row's softmax runs over, bool [N] targets that their sets lack) of flat valid `targets`."""
    n = targets.numel()
    most = {"one": 1, "few": min(5, vocab), "any": vocab, "whole": vocab}[kept.sizes]
    counts = torch.full((n,), vocab) if kept.sizes == "whole" else torch.randint(1, most + 1, (n,), generator=g)
    share = {"none": 0.0, "empty": 0.0, "some": 0.6, "all": 1.1}[kept.rows]
    counts = torch.where(torch.rand(n, generator=g) < share, counts, 0)
    lists = random_lists(counts.tolist(), vocab, g)
    for i, (ids, target) in enumerate(zip(lists, targets.tolist(), strict=True)):
        side = kept.target if kept.target != "either" else ("inside", "outside", "as it is")[i % 3]
        if side == "inside" and ids and target not in ids:
            ids[-1] = target
        elif side == "outside" and target in ids and vocab > 1:
            ids.remove(target)
            if not ids:
                ids.append((target + 1) % vocab)
    keep = torch.zeros(n, vocab, dtype=torch.bool)
    for i, ids in enumerate(lists):
        keep[i, ids or slice(None)] = True
    outside = ~keep.gather(1, targets[:, None])[:, 0]
    if kept.missing == "full":
        keep |= outside[:, None]
    keep.scatter_(1, targets[:, None], True)
    return TokenSets.from_lists(lists), keep, outside


def ids_asked_for(kept: Kept, rows: int, vocab: int, seed: int) -> TokenSets | None:
    if kept.at == "none":
        return None
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, min(vocab, 3 if kept.at == "few" else 20) + 1, (rows,), generator=g)
    return TokenSets.from_lists(random_lists(counts.tolist(), vocab, g))


class Softmax:
    """Of rows of logits [m, V], in float64, over the ids `keep` [m, V].

    ids      int64 [m, 1]: the targets.
    inverse  [m, 1]: of the temperatures.
    more     [m]: what the logits are off already."""

    def __init__(
        self, logits: Tensor, keep: Tensor, ids: Tensor, scale: float, softcap: float | None, inverse: Tensor, more: Tensor
    ) -> None:
        self.x = logits.detach().requires_grad_()
        self.keep, self.ids = keep, ids
        z, self.steep = self.x * scale, (scale * inverse).abs() * torch.ones_like(self.x.detach())
        self.cancelled: Tensor | float = 0.0
        if softcap is not None:
            self.cancelled = 4 * EPS * self.steep  # 1 - tanh^2 in fp32, which is torch's own derivative
            self.steep = self.steep * torch.cosh((z.detach() / softcap).clamp(-300, 300)) ** -2
            z = softcap * torch.tanh(z / softcap)
        self.all = torch.log_softmax((z * inverse).masked_fill(~keep, -math.inf), -1)
        self.chosen = self.all.gather(1, ids)[:, 0]
        self.log_p = torch.where(self.all == -math.inf, 0.0, self.all)
        self.p = self.all.exp()
        self.entropy = -(self.p * self.log_p).sum(1)
        # What rounding does to a row's transformed logits, and so to its log-probs.
        size = torch.where(keep & z.isfinite(), z.detach().abs(), 0.0).amax(1) * inverse[:, 0]
        self.off = EPS * (2.0 + 2.0 * size + math.log(logits.shape[1])) + more * self.steep.amax(1)

    def room(self, a: Tensor, off_a: Tensor, b: Tensor, gradient: Tensor, ids: Tensor | None = None) -> Tensor:
        """Of dz/dx (a (onehot - p) - b p (log p + H)), whose a is off by off_a. `ids`: of the log-probs, if not the targets."""
        onehot = torch.zeros_like(self.p.detach()).scatter_(1, self.ids if ids is None else ids, 1.0)
        p, H, off = self.p.detach(), self.entropy.detach()[:, None], self.off[:, None]
        a, b = a.abs()[:, None], b.abs()[:, None]
        swing = p * (self.log_p.detach().abs() + H)
        moved = a * (p + onehot * (off + EPS)) + b * (swing + p * (2 + 2 * H))
        room = off_a[:, None] * (onehot - p).abs() + 2 * off * moved + EPS * a * onehot
        room = (room + (a + b) * 1.3e-36) * self.steep  # exp(-87) counts as 0
        room = room + self.cancelled * (a * (onehot - p).abs() + b * swing) + 4 * EPS * gradient.abs()
        return torch.where(self.keep, room, 0.0)
