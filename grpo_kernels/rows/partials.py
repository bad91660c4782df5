"""What the kernels take and make of rows of logits: rows with their transform, partials of their softmax, slopes.

p is the softmax of a row's transformed logits z. Every loss of the package depends on z through statistics of p, whose
gradients have one form (`Slopes`). Partials and slopes are tensors [q, n] and [s, n] with a name for each row of the table; other
vectors have one entry a row of logits, [n].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import plain
from .divergence import OF_BOTH_SUMS, SMALL, differences, merged_sums, of_mixed, phi


class RowTransform(NamedTuple):
    """z = softcap * tanh(x * scale / softcap) * inv_temperature, row by row; softcap 0 means none."""

    scale: float
    softcap: float
    inv_temperature: float | Tensor  # a number, or fp32 [n]

    def at(self, rows: slice | Tensor) -> RowTransform:
        """The transform of these rows only."""
        t = self.inv_temperature
        return self if isinstance(t, float) else self._replace(inv_temperature=t[rows])

    def plain(self) -> RowTransform:
        """Without the wrappers of torch.func."""
        t = self.inv_temperature
        return self if isinstance(t, float) else self._replace(inv_temperature=plain(t.detach()))

    def of(self, x: Tensor, rows: Tensor) -> Tensor:
        """z of single logits x fp32 [m], of rows `rows` [m]."""
        t = self.at(rows).inv_temperature
        if self.softcap:
            return torch.tanh(x * (self.scale / self.softcap)) * (self.softcap * t)
        factor = self.scale * t
        return x if isinstance(factor, float) and factor == 1.0 else x * factor

    def of_rows(self, x: Tensor, out: Tensor) -> Tensor:
        """z fp32 of rows x [r, V], one for each temperature: x itself where nothing changes it, else in `out`, which may be x."""
        t = self.inv_temperature
        factor = t if isinstance(t, float) else t[:, None]
        plain = isinstance(factor, float) and factor * self.scale == 1.0 and not self.softcap
        if x.dtype == torch.float32 and plain:
            return x
        z = out.copy_(x)
        if self.softcap:
            return z.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap * factor)
        return z if plain else z.mul_(self.scale * factor)


#: What is left to do for transformed logits.
TRANSFORMED = RowTransform(1.0, 0.0, 1.0)


class Second(NamedTuple):
    """A second stream of rows, over the same ids: the q of a divergence. It gets no gradient."""

    logits: Tensor  # [A, T, V] like the first stream's, any strides in front; fp32, bf16 or fp16, the first's or another
    transform: RowTransform  # its own
    kind: str  # see `divergence.py`
    mixture: float  # its share in the mixture of "jsd", else 0

    def at(self, rows: slice | Tensor) -> Second:
        """The same with the transform of these rows only, for a call that takes them out of all rows of the logits."""
        return self._replace(transform=self.transform.at(rows))


class LogitRows(NamedTuple):
    """The rows of logits of one call of a kernel, n = A * T in order; vectors are [n].

    part   (lo, hi): these flat rows of the logits alone; the vectors are then [hi - lo]. None: all."""

    logits: Tensor  # [A, T, V], any strides in the first two dimensions, unit stride in the last; fp32, bf16 or fp16
    targets: Tensor  # int64
    read: Tensor | None = None  # bool: rows that are looked at; None: all
    transform: RowTransform = TRANSFORMED
    second: Second | None = None
    part: tuple[int, int] | None = None

    @property
    def n(self) -> int:
        return self.targets.numel()

    def cut(self, lo: int, hi: int) -> LogitRows:
        """Rows lo to hi alone. For small batches slicing the vectors would take longer than the rows."""
        if hi - lo == self.n:
            return self
        rows, first = slice(lo, hi), 0 if self.part is None else self.part[0]
        read, second = None if self.read is None else self.read[rows], None if self.second is None else self.second.at(rows)
        return LogitRows(self.logits, self.targets[rows], read, self.transform.at(rows), second, (first + lo, first + hi))


#: Rows of the tensor that `stats` fills, in this order, and what stands there for a row that is not read.
#:   max       max_j z_j
#:   sum       sum_j e^(z_j - max)
#:   target    z of the row's target; NaN if its id is outside [0, V)
#:   weighted  sum_j e^(z_j - max) (z_j - max), terms with e^.. = 0 counting 0: for the entropy
#:   squares   sum_j e^(2 (z_j - max)): for the sum of p^2
#:   top       the first id whose z is max, -1 where there is none (the bits of an int32)
#: and with a teacher, whose transformed logits are w, with p = e^(z - max), q = e^(w - teacher_max) and d = (z - max) - (w -
#: teacher_max), see `divergence.differences`:
#:   teacher_max, teacher_sum   as max and sum
#:   cross     sum_j p_j d_j, of "forward" with the streams swapped, -sum_j q_j d_j
#:   excess    sum_j p_j psi(-d_j), of "forward" sum_j q_j psi(d_j), psi(x) = e^x - 1 - x: see `divergence.first_terms`
#:   mixed_student, mixed_teacher   two sums over both softmaxes, which a second visit makes: see `divergence.mixed_terms`
PARTIALS = (
    "max", "sum", "target", "weighted", "squares", "top",
    "teacher_max", "teacher_sum", "cross", "excess", "mixed_student", "mixed_teacher",
)  # fmt: skip
ALWAYS = 3
OF_STUDENT = PARTIALS[:6]
OF_BOTH = PARTIALS[6:10]
MIXED = PARTIALS[-2:]
NOT_READ = {**dict.fromkeys(PARTIALS, 0.0), "sum": 1.0, "top": -1, "teacher_sum": 1.0}

#: Those that the kernels in C++ and Triton make, in the order of csrc/kernels.h. Eager makes what they lack in a visit of its own.
OF_KERNELS = PARTIALS[:10]

#: Statistics that may be asked for beside log-probs, and the partials that they need. The C++ and Triton kernels make squares
#: and weighted together.
STATISTICS: dict[str, tuple[str, ...]] = {
    "entropy": ("weighted",),
    "sum_squares": ("weighted", "squares"),
    "top_prob": (),
    "top_id": ("top",),
    "logsumexp": (),
    "divergence": OF_BOTH,
}
#: Those that the log-prob functions offer as `also=`, and all that have a gradient.
OFFERED = ("sum_squares", "top_prob", "top_id")
DIFFERENTIABLE = ("entropy", "sum_squares", "logsumexp", "divergence")


@functools.lru_cache(maxsize=256)
def partials_of(statistics: tuple[str, ...], kind: str = "") -> tuple[str, ...]:
    """The partials that these statistics need, in the order of PARTIALS. `kind`: of the divergence, if it is among them."""
    needed = {partial for name in statistics for partial in STATISTICS[name]}
    if "divergence" in statistics and kind in OF_BOTH_SUMS:
        needed.update(MIXED)
    return tuple(name for i, name in enumerate(PARTIALS) if i < ALWAYS or name in needed)


def joined(tables: list[Tensor], dim: int) -> Tensor:
    """Tables [q, r] that follow one another as one."""
    return tables[0] if len(tables) == 1 else torch.cat(tables, dim)


@dataclass(eq=False)
class Partials:
    """Partials of each row's softmax, and the statistics that follow from them. Partials of parts of a row can be merged.

    values   fp32 [q, n], a row for each of `names`.
    kind, mixture   of the divergence, as `Second` has them; "" without one.

    A row of only -inf has max -inf and sum 0; its log-prob and entropy are NaN, as torch's log_softmax has it. A NaN among the
    logits is a NaN in sum, whatever max is."""

    values: Tensor
    names: tuple[str, ...]
    kind: str = ""
    mixture: float = 0.0

    @classmethod
    def empty(cls, names: tuple[str, ...], n: int, device: torch.device, second: Any = None) -> Partials:
        """Memory for partials. `second`: anything with a kind and a mixture."""
        of = () if second is None else (second.kind, second.mixture)
        return cls(torch.empty(len(names), n, dtype=torch.float32, device=device), names, *of)

    @classmethod
    def not_read(cls, names: tuple[str, ...], n: int, device: torch.device, second: Any = None) -> Partials:
        """Those of n rows that are not read: log-prob, entropy and divergence are exactly 0."""
        stats = cls.empty(names, n, device, second)
        stats.values.zero_()
        for name in names:
            if NOT_READ[name] != 0:
                stats[name].fill_(NOT_READ[name])
        return stats

    def __getitem__(self, name: str) -> Tensor:
        """A partial [n], a view of `values`. `top` is int32."""
        row = self.values[self.names.index(name)]
        return row.view(torch.int32) if name == "top" else row

    def get(self, name: str) -> Tensor | None:
        """The same; None if it was not asked for."""
        return self[name] if name in self.names else None

    def put(self, names: tuple[str, ...], values: Tensor) -> None:
        """Set partials whose names follow one another."""
        first = self.names.index(names[0])
        self.values[first : first + len(names)] = values

    def at(self, rows: slice | Tensor) -> Partials:
        """The partials of these rows only."""
        return Partials(self.values[:, rows], self.names, self.kind, self.mixture)

    @property
    def max(self) -> Tensor:
        return self.values[0]

    @property
    def sum(self) -> Tensor:
        return self.values[1]

    @property
    def target(self) -> Tensor:
        return self.values[2]

    @property
    def logsumexp(self) -> Tensor:
        return self.max + torch.log(self.sum)

    def softmax(self, entropy: bool) -> tuple[Tensor, ...]:
        """Log-probs and, if asked for, the entropy."""
        top, total, target, *more = self._wide().unbind()
        log = torch.log(total)
        logps = ((target - top) - log).float()
        if not entropy:
            return (logps,)
        weighted = more[self.names.index("weighted") - ALWAYS]
        # Rounding may make the entropy of a one-hot row slightly negative. clamp keeps NaN.
        return logps, (log - weighted / total).clamp(min=0.0).float()

    @property
    def logps(self) -> Tensor:
        return self.softmax(False)[0]

    @property
    def entropy(self) -> Tensor:
        return self.softmax(True)[1]

    def _wide(self) -> Tensor:
        """On a CPU fp64, whose logarithm rounds to the same fp32 in torch and in the C++ kernels: log-probs of the two are
        equal."""
        return self.values.double() if self.values.device.type == "cpu" else self.values

    @property
    def sum_squares(self) -> Tensor:
        """Sum of p^2: the probability that two draws from the row agree."""
        return self["squares"] / (self.sum * self.sum)

    @property
    def top_prob(self) -> Tensor:
        """The largest probability of the row; NaN where all logits are -inf, as of the log-prob."""
        return torch.where(self.sum == 0, torch.nan, self.sum.reciprocal())

    @property
    def top_id(self) -> Tensor:
        """int64: the id of the largest probability, the lowest where several are equal; -1 for a row that is not read."""
        return self["top"].long()

    @functools.cached_property
    def _two_streams(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """From the sums of a first visit: (r, whether it is small, log(1 + r), cross, excess), all for p of sum 1. r is the other
        stream's sum over one's own, less 1: made of two sums of differences, it keeps the digits of rows that are nearly equal."""
        row = dict(zip(self.names, self._wide(), strict=True))
        own, other = row["sum"], row["teacher_sum"]
        if self.kind == "forward":
            own, other = other, own
        cross, excess = row["cross"] / own, row["excess"] / own
        r = excess - cross
        # Of large differences r has fewer digits than the sums themselves. It is NaN where both are infinite, and not near.
        near = (cross.abs() <= SMALL) & (excess <= SMALL)
        return r, near, torch.where(near, torch.log1p(r), torch.log(other) - torch.log(own)), cross, excess

    @property
    def log_sums(self) -> Tensor:
        """log(teacher_sum / sum), which is log p_j - log q_j less d_j."""
        logs = self._two_streams[2]
        return (-logs if self.kind == "forward" else logs).float()

    @property
    def divergence(self) -> Tensor:
        """That of `kind`, never negative; infinite where q is 0 and p is not ("forward": the other way round)."""
        if self.kind in OF_BOTH_SUMS:
            return of_mixed(self.kind, self["mixed_student"], self["mixed_teacher"], self.mixture)
        r, near, logs, cross, excess = self._two_streams
        return torch.where(near, excess - phi(r), cross + logs).clamp(min=0.0).float()

    @property
    def center(self) -> Tensor:
        """What `divergence.gradient` takes off the factor of p: its mean over p."""
        if self.kind in OF_BOTH_SUMS:
            return self["mixed_student"]
        return self.divergence if self.kind == "reverse" else torch.zeros_like(self.sum)

    def found(self, statistics: tuple[str, ...], read: Tensor | None) -> list[Tensor]:
        """Log-probs and these of STATISTICS; 0 for a row that is not read, an id -1."""
        logps, *entropy = self.softmax("entropy" in statistics)
        values = [logps]
        for name in statistics:
            x = entropy[0] if name == "entropy" else getattr(self, name)
            values.append(torch.where(read, x, 0.0) if name == "top_prob" and read is not None else x)
        return values


#: Rows of the tensor of slopes, in this order; the first is always there. The kernels in C++ and Triton take these, in the order of
#: csrc/kernels.h; a gradient with others is eager's.
SLOPES = ("target", "constant", "log", "prob", "divergence")
SLOPES_OF_KERNELS = SLOPES[:5]


class Slopes(NamedTuple):
    """d loss / d z_j = target (1[j = y] - p_j) + p_j (constant + log log p_j + prob p_j) + divergence G_j, y the row's target and
    G_j the gradient of the divergence, see `divergence.gradient`.

    values   fp32 [s, n], a row for each of `names`, which are some of SLOPES; no row of logits has a term of the others."""

    values: Tensor
    names: tuple[str, ...]

    @classmethod
    def of(cls, stats: dict[str, Tensor], upstream: dict[str, Tensor], read: Tensor | None = None) -> Slopes:
        """From d loss / d statistic of "logps" and those of DIFFERENTIABLE, and the values of the latter. 0 where the row was not
        read, even if NaN arrives there: the values are 0 there, too."""

        def clean(x: Tensor) -> Tensor:
            x = x.float()
            return x if read is None else torch.where(read, x, 0.0)

        given = {name: clean(x) for name, x in upstream.items()}
        slopes = {"target": given["logps"] if "logps" in given else torch.zeros_like(next(iter(given.values())))}
        constants = [given["logsumexp"]] if "logsumexp" in given else []  # d lse / dz_j = p_j
        if "entropy" in given:  # dH/dz_j = -p_j (log p_j + H)
            slopes["log"] = -given["entropy"]
            constants.append(slopes["log"] * stats["entropy"])
        if "sum_squares" in given:  # 2 p_j (p_j - sum p^2)
            slopes["prob"] = 2.0 * given["sum_squares"]
            constants.append(-slopes["prob"] * stats["sum_squares"])
        if constants:
            slopes["constant"] = sum(constants[1:], constants[0])
        if "divergence" in given:
            slopes["divergence"] = given["divergence"]
        return cls.stacked(slopes)

    @classmethod
    def stacked(cls, slopes: dict[str, Tensor]) -> Slopes:
        """From vectors [n] by name."""
        names = tuple(name for name in SLOPES if name in slopes)
        rows = [slopes[name] for name in names]
        return cls(torch.stack(rows) if len(rows) > 1 else rows[0].contiguous()[None], names)

    def get(self, name: str) -> Tensor | None:
        """A slope [n], a view of `values`; None where no row has such a term."""
        return self.values[self.names.index(name)] if name in self.names else None

    @property
    def target(self) -> Tensor:
        return self.values[0]

    def at(self, rows: slice | Tensor) -> Slopes:
        """The slopes of these rows only."""
        return self._replace(values=self.values[:, rows])

    @property
    def nonzero(self) -> Tensor:
        """bool [n]: rows that can have a gradient. The gradient of the others is exactly 0."""
        return (self.values != 0).any(0) if len(self.names) > 1 else self.target != 0


# ---- partials of parts of a row, which ranks or chunks of the vocabulary have made


def merge(
    values: Tensor, names: tuple[str, ...], read: Tensor | None, starts: Tensor | None = None, second: Any = None
) -> Partials:
    """Partials of parts of a row, `values` [parts, q, n], as those of the whole row.

    A part of only -inf, or of no column, adds nothing. The target is that of the part that has it, NaN where none has it or
    (parts that overlap) several do. `starts` int32 [parts, n]: the id of each part's first column, for `top`. `second`: anything
    with a kind and a mixture; MIXED are sums, and simply add up."""
    parts = {name: values[:, i] for i, name in enumerate(names)}
    merged = Partials.empty(names, values.shape[2], values.device, second)
    tops = parts["max"]
    top, shift, share = _shares(tops)
    here = ~parts["target"].isnan()
    found: dict[str, Any] = {
        "max": top,
        "sum": (share * parts["sum"]).sum(0),  # a NaN in any part stays one
        "target": torch.where(here.sum(0) == 1, torch.where(here, parts["target"], 0.0).sum(0), torch.nan),
    }
    if "weighted" in parts:
        weighted = share * (parts["weighted"] + parts["sum"] * shift)
        found["weighted"] = torch.where(share == 0, 0.0, weighted).sum(0)  # a part that is far below: no 0 times infinity
    if "squares" in parts:
        found["squares"] = (share * share * parts["squares"]).sum(0)
    if "top" in parts:
        assert starts is not None
        ids = parts["top"].view(torch.int32)
        last = torch.iinfo(torch.int32).max
        first = torch.where((tops == top) & (ids >= 0), ids + starts, last).amin(0)
        found["top"] = torch.where(first == last, -1, first)
    if "cross" in parts:
        teacher_tops = parts["teacher_max"]
        teacher_top, _, teacher_share = _shares(teacher_tops)
        apart = differences(tops, teacher_tops, top, teacher_top)  # d of the whole row less d of the part
        apart = torch.where((tops == -torch.inf) | (teacher_tops == -torch.inf), 0.0, apart)
        found["teacher_max"], found["teacher_sum"] = teacher_top, (teacher_share * parts["teacher_sum"]).sum(0)
        sums = (parts["sum"], parts["teacher_sum"], parts["cross"], parts["excess"])
        found["cross"], found["excess"] = merged_sums(second.kind, share, teacher_share, apart, *sums)
    for name in MIXED:
        if name in parts:
            found[name] = parts[name].sum(0)
    for name in names:
        x = found[name]
        merged[name].copy_(x if read is None else torch.where(read, x, NOT_READ[name]))
    return merged


def _shares(tops: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the largest of the parts' maxima [parts, n], each one's distance to it, e to the power of that), 0 of a part of only
    -inf."""
    top = tops.amax(0)
    empty = tops == -torch.inf
    shift = torch.where(empty, 0.0, tops - top)
    return top, shift, torch.where(empty, 0.0, shift.exp())
