"""Second distributions of random cases, and exact divergences to them in float64, with how far fp32 may be from these."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from grpo_kernels import Exact, Head, LogitTransform, TokenSets
from grpo_kernels.formulas.divergence import DIRECTIONS, TAILS
from support import oracle
from support.divergences import of_listed_ids
from support.fuzz_cases import DTYPES, STRIDES, Built, Goal, Recipe, memory_shape, recipes, seen_through
from support.fuzz_sets import EPS, Softmax, random_lists

Tensor = torch.Tensor


@dataclass(frozen=True)
class Second:
    """A reference or teacher in words.

    known   all of its distribution, or the log-probs of a few ids: "whole", "listed".
    near    whole: its logits are the policy's but for noise of this size; None: they are logits of its own.
    absent  ids of probability 0: "none", "the same" as the policy's, "others".
    own     whole: it has a transform of its own.
    weight  of several: a number, or "per token", some of which are 0."""

    known: str = "whole"
    near: float | None = None
    absent: str = "none"
    own: bool = False
    dtype: str = "float32"
    view: str = "whole"
    weight: float | str = 1.0


@dataclass(frozen=True)
class Pair:
    """A policy, and what it is compared with; more than one second distribution is a list with weights."""

    recipe: Recipe
    exact: Exact
    seconds: tuple[Second, ...]

    @property
    def several(self) -> bool:
        return len(self.seconds) > 1


@st.composite
def pairs(draw: st.DrawFn, linear: bool = False, loss: bool = False) -> Pair:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    seconds = tuple(
        Second(
            known=one_of("whole", "whole", "listed"),
            near=one_of(None, None, 1.0, 1e-3),
            absent="none" if linear else one_of("none", "the same", "others"),
            own=draw(st.booleans()),
            dtype=one_of(*DTYPES),
            view=one_of("whole", "padded vocabulary", "without the last token", "every other logit", "transposed"),
            weight=one_of(1.0, 0.3, "per token", 0.0),
        )
        for _ in range(one_of(1, 1, 1, 2))
    )
    listed = any(second.known == "listed" for second in seconds)
    direction, tail = one_of(*DIRECTIONS), one_of(*TAILS)
    mixture = one_of(None, 0.1, 0.9) if direction == "jsd" else None
    r = draw(recipes(linear=linear, sets=True))
    over = ("reference",) if listed and r.kept.rows != "none" else r.kept.over  # what is known of a few ids has no set
    if not loss:  # sets are an argument, and no target belongs to one
        kept = replace(r.kept, rows="none" if listed else r.kept.rows, missing="include", over=())
        r = replace(r, kept=kept, rewritten="no", layout="padded" if r.layout == "packed" else r.layout, skip_inactive=False)
    else:
        r = replace(r, kept=replace(r.kept, over=over))
    return Pair(
        replace(
            r, goal=Goal() if not loss else replace(r.goal, kl="no KL"),
            inplace=r.inplace and len(seconds) == 1 and not r.kept.over,
            spread=min(r.spread, 30.0),
            extreme="none" if linear else one_of("none", "none", "far", "confident"),
            narrow_head=linear and draw(st.booleans()),
        ),
        Exact(direction, mixture, tail, draw(st.booleans())), seconds,
    )  # fmt: skip


class Found(NamedTuple):
    """A divergence of each row in float64: its value, the gradient of the logits, and how far fp32 may be from these."""

    value: Tensor  # [n]
    gradient: Tensor  # [n, V]
    value_room: Tensor
    gradient_room: Tensor
    clear: Tensor  # bool [n]: finite, and not so ill-conditioned that rounding decides

    def times(self, weight: Tensor) -> Found:
        def each(x: Tensor, w: Tensor) -> Tensor:
            return torch.where(w == 0, 0.0, x * w)

        rows, size = weight[:, None], weight.abs()
        rooms = each(self.value_room, size), each(self.gradient_room, size[:, None])
        return Found(each(self.value, weight), each(self.gradient, rows), *rooms, self.clear | (weight == 0))


def total(parts: list[Found]) -> Found:
    """Of several."""
    sums = [torch.stack([part[i] for part in parts]).sum(0) for i in range(4)]
    return Found(*sums, torch.stack([part.clear for part in parts]).all(0))


def of_two(exact: Exact, policy: Softmax, second: Softmax) -> Found:
    """Of whole distributions, over the ids of `policy.keep`."""
    value = oracle.divergence(policy.all, second.all.detach(), exact.direction, exact.share)
    (gradient,) = torch.autograd.grad(value[value.isfinite()].sum(), policy.x, materialize_grads=True, retain_graph=True)
    log_p, log_q = policy.all.detach(), second.all.detach()
    p, q, off_p, off_q = log_p.exp(), log_q.exp(), policy.off.detach()[:, None], second.off.detach()[:, None]
    b, shares = exact.share, {"reverse": (1.0, 0.0), "forward": (0.0, 1.0)}
    of_p, of_q = shares.get(exact.direction, (1 - b, b))
    behind = {"reverse": log_q, "forward": log_p}
    log_m = (
        torch.logaddexp(log_p + math.log1p(-b), log_q + math.log(b)) if exact.direction == "jsd" else behind[exact.direction]
    )

    def swing(share: float, probability: Tensor, log_probability: Tensor) -> tuple[Tensor, Tensor]:
        """How much a log-ratio counts: of the sum, and of a slope, from which the mean is taken."""
        ratio = torch.where((probability > 0) & log_m.isfinite(), log_probability - log_m, 0.0)
        mean = (probability * ratio).sum(1, keepdim=True)
        return share * probability * ratio.abs(), share * probability * (ratio - mean).abs()

    (size_p, slope_p), (size_q, slope_q) = swing(of_p, p, log_p), swing(of_q, q, log_q)
    apart = (q - p).abs()
    moved = off_p * slope_p + off_q * slope_q + (off_q * apart if of_p == 1 else off_p * apart if of_q == 1 else 0.0)
    value_room = 2 * moved.sum(1) + 2 * (off_p + off_q)[:, 0] ** 2 + 8 * EPS * (size_p + size_q).sum(1) + 1e-12
    if exact.direction == "forward":  # p - q
        room = 2 * off_p * p + 2 * off_q * q
    else:
        room = 2 * off_p * slope_p + of_p * p * (2 * off_p + 2 * off_q + 8 * EPS * (1 + value.detach()[:, None]))
        room = room + p * value_room[:, None]
    room = room * policy.steep + 4 * EPS * gradient.abs() + 1e-12
    room = room + policy.cancelled * (of_p * slope_p + of_p * size_p + of_q * (p + q))
    clear = value.isfinite() & (off_p < 1e-2)[:, 0] & (off_q < 1e-2)[:, 0]
    return Found(value.detach(), gradient, value_room, torch.where(policy.keep, room, 0.0), clear)


def of_listed(exact: Exact, policy: Softmax, sets: TokenSets) -> Found:
    """To log-probs of a few ids. Room is what a log-prob does that is off: one after the other, since a slope may turn on any."""
    n = len(policy.off)
    leaf = policy.all.detach().requires_grad_()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        value = of_listed_ids(exact, x, sets)
        (slopes,) = torch.autograd.grad(value.sum(), x, materialize_grads=True)
        return value.detach(), slopes

    value, slopes = run(leaf)
    of_value, of_slopes, off = torch.zeros(n), torch.zeros_like(slopes), policy.off.detach()
    first = sets.offsets[:-1].long()
    listed = sets.mask(policy.all.shape[1])
    for k in range(-1, sets.longest):
        rows = (sets.counts > k).nonzero()[:, 0]
        x = policy.all.detach().clone()
        if k < 0:  # all other ids
            x = torch.where(listed, x, x + off[:, None])
        else:
            x[rows, sets.ids[first[rows] + k].long()] += off[rows]
        other, other_slopes = run(x.requires_grad_())
        of_value, of_slopes = of_value + (other - value).abs(), of_slopes + (other_slopes - slopes).abs()
    of_slopes = 2 * of_slopes + 4 * EPS * slopes.abs()
    p, mass = policy.p.detach(), slopes.abs().sum(1, keepdim=True)
    (gradient,) = torch.autograd.grad(policy.all, policy.x, torch.where(policy.keep, slopes, 0.0), retain_graph=True)
    room = of_slopes + p * (of_slopes.sum(1, keepdim=True) + 2 * off[:, None] * mass) + EPS * (slopes.abs() + p * mass)
    room = room * policy.steep + policy.cancelled * (slopes.abs() + p * mass) + 4 * EPS * gradient.abs() + 1e-12
    rest = torch.where(listed, 0.0, p).sum(1)
    at_the_end = (
        (exact.tail == "bin") & ((rest / 1e-7 - 1).abs() < 30 * off + 1e-5) & (sets.counts > 0)
    )  # of what counts as a mass
    clear = value.isfinite() & slopes.isfinite().all(1) & (off < 1e-2) & ~at_the_end
    return Found(value, gradient, 2 * of_value + 4 * EPS * value.abs() + 1e-10, torch.where(policy.keep, room, 0.0), clear)


# ---- the second distribution


OWN = {"scale": 1.3, "softcap": 15.0, "temperature": 0.9}


def read_rows(built: Built) -> Tensor:
    """bool [n]: all that the mask leaves."""
    return torch.ones(built.case.targets.numel(), dtype=torch.bool) if built.trained is None else built.trained.reshape(-1)


def inverse_temperature(transform: dict[str, Any], built: Built) -> Tensor:
    """[n, 1], 1 where nobody reads it."""
    sequences = oracle.sequences_of(built.case.targets, built.case.fields["cu_seqlens"])
    rows = oracle.to_rows(transform["temperature"], sequences, torch.float64)
    return torch.where(read_rows(built), 1.0 / rows, 1.0)[:, None]


def rows_of(built: Built, transform: dict[str, Any], x: Tensor, keep: Tensor, more: Tensor | float = 0.0) -> Softmax:
    """The softmaxes of logits [n, V] in float64, which are off by `more` already."""
    n, ids = len(x), built.case.targets.reshape(-1, 1).clamp(0, x.shape[1] - 1)
    off = torch.zeros(n, dtype=torch.float64) + more
    return Softmax(x, keep, ids, transform["scale"], transform["softcap"], inverse_temperature(transform, built), off)


def safe(built: Built, logits: Tensor) -> Tensor:
    """The policy's logits [n, V] in float64, with 0 where nobody may read them."""
    x = logits.detach().double().reshape(built.case.targets.numel(), built.recipe.vocab)
    x = torch.where(read_rows(built)[:, None], x, 0.0)
    return x if built.poisoned is None else torch.where(built.poisoned, 0.0, x)


@dataclass
class Case:
    """A pair as tensors: what the calls take, and what float64 makes of the divergences.

    keep   bool [n, V]: the ids that are compared.
    more   [n]: what the policy's logits are off already, from hidden states."""

    pair: Pair
    built: Built
    logits: Tensor
    keep: Tensor
    more: Tensor | float = 0.0

    def __post_init__(self) -> None:
        self.x = safe(self.built, self.logits)
        self.policy = rows_of(self.built, self.built.case.transform, self.x, self.keep, self.more)
        self.arguments: list[Any] = []
        self.parts: list[Found] = []

    def add(self, i: int, head: dict[str, Tensor] | None = None) -> None:
        """The second distribution number `i`; from hidden states beside `head`, the policy's leaves."""
        built, second, g = self.built, self.pair.seconds[i], torch.Generator().manual_seed(self.pair.recipe.seed + 17 * i + 5)
        own = second.own and second.known == "whole"
        transform = OWN if own else built.case.transform
        argument, x, more = self.from_logits(second, transform, g) if head is None else self.from_hidden(second, head, g)
        rows = rows_of(built, transform, x, self.keep, more)
        if second.known == "listed":
            n, V = self.x.shape
            sets = TokenSets.from_lists(random_lists(torch.randint(0, min(V, 6) + 1, (n,), generator=g).tolist(), V, g))
            argument = sets.with_values(rows.all.detach()[sets.row_of.long(), sets.ids.long()].float())
            found = of_listed(self.pair.exact, self.policy, argument)
        else:
            found = of_two(self.pair.exact, self.policy, rows)
            if own:
                hidden, *rest = argument if head is not None else (argument,)
                argument = (hidden, Head(*rest, transform=LogitTransform(**OWN)) if rest else LogitTransform(**OWN))
        if self.pair.several:
            weight, of_rows = self.weight(second, g)
            argument, found = (argument, weight), found.times(of_rows)
        self.arguments.append(argument)
        self.parts.append(found.times(torch.where(read_rows(built), self.squared, 0.0)))

    @property
    def squared(self) -> Tensor:
        """[n]: the square of the temperature where a divergence is asked for times that, else 1."""
        inverse = inverse_temperature(self.built.case.transform, self.built)[:, 0]
        return inverse**-2 if self.pair.exact.temperature_squared else torch.ones_like(inverse)

    def weight(self, second: Second, g: torch.Generator) -> tuple[float | Tensor, Tensor]:
        """As an argument, and of the flat rows."""
        shape = self.built.case.targets.shape
        if isinstance(second.weight, float):
            return second.weight, torch.full((shape.numel(),), second.weight, dtype=torch.float64)
        weight = torch.where(torch.rand(shape, generator=g) < 0.4, 0.0, torch.rand(shape, generator=g))
        return weight, weight.reshape(-1).double()

    def from_logits(self, second: Second, transform: dict[str, Any], g: torch.Generator) -> tuple[Any, Tensor, float]:
        """(the argument, logits [n, V] in float64, what these are off)."""
        r, shape, (n, V) = replace(self.pair.recipe, view=second.view), self.built.case.targets.shape, self.x.shape
        noise = torch.randn(n, V, generator=g, dtype=torch.float64)
        x = r.spread * noise if second.near is None else torch.where(self.x.isinf(), 0.0, self.x) + second.near * noise
        gone = self.x.isinf() if second.absent == "the same" else torch.rand(n, V, generator=g) < 0.3
        gone = (gone & (second.absent != "none")).scatter(1, x.argmax(1, keepdim=True), False)
        x = x.clamp(-6e4, 6e4).masked_fill(gone, math.copysign(math.inf, -transform["scale"]))
        memory = torch.zeros(memory_shape(r, tuple(shape)), dtype=DTYPES[second.dtype])
        argument = seen_through(r, memory)
        argument.copy_(x.view(argument.shape))
        x = argument.double().reshape(n, V)
        argument[~read_rows(self.built).view(shape)] = math.nan
        return argument, x, 0.0

    def from_hidden(self, second: Second, head: dict[str, Tensor], g: torch.Generator) -> tuple[Any, Tensor, Tensor]:
        """The same. Near the policy it is the same head, read from other hidden states."""
        hidden, weight, bias = head["hidden"], head["weight"], head.get("bias")
        read = read_rows(self.built).view(hidden.shape[:-1])
        if second.near is None:
            hidden, bias = torch.randn(*hidden.shape[:-1], 3, generator=g).to(DTYPES[second.dtype]), None
            weight = torch.randn(len(weight), 3, generator=g).to(hidden.dtype)
        else:
            hidden = (hidden.float() + second.near * torch.randn(hidden.shape, generator=g)).to(hidden.dtype)
        wide = [x.detach().double() for x in (hidden, weight)]
        x, size = wide[0] @ wide[1].T, wide[0].abs() @ wide[1].abs().T
        if bias is not None:
            x, size = x + bias.double(), size + bias.double().abs()
        hidden, weight = (
            STRIDES[self.pair.recipe.strides](x) for x in (torch.where(read[..., None], hidden, math.nan), weight)
        )
        n, V = self.x.shape
        given = (hidden, weight) if bias is None else (hidden, weight, bias)
        return given, x.reshape(n, V), 4 * EPS * size.amax(-1).reshape(n)

    @property
    def argument(self) -> Any:
        return self.arguments if self.pair.several else self.arguments[0]
