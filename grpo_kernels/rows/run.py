"""Every loss and every log-prob: statistics of rows as one autograd Function, and losses whose gradient is made in the forward.

    statistics   forward: each visit makes partials of each row's softmax, from which log-probs and the others follow
                 backward: the gradient of the stream's tensors from the slopes of these
    fused_loss   both in one visit, with a token stage between them

torch.compile sees the same Function with the operators of compile.py in place of the visits."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import versions_of
from ..formulas.token_stage import JointStage, TokenStage
from .hidden import Engine
from .memory import converted
from .partials import Partials, RowTransform, Slopes
from .ragged import Tokens
from .sets import OverSets
from .stream import Found, Gradients, Parts, Stream, Visit
from .tokens import LogitsAt

Tensors = tuple[Any, ...]

NO_SECOND = "grpo_kernels has no second derivatives: the gradient of these functions cannot be differentiated again."

HANDED_OVER = (
    "the gradient of this loss was already handed over by an earlier backward. It exists once, to save memory: compute the "
    "loss again, or use token_logprobs (linear_logprobs) with your own loss, for a second backward."
)


# ---- visits of one stream


class Names(NamedTuple):
    """The values of a visit, those of them that have a gradient, and what else its backward needs."""

    values: tuple[str, ...]
    differentiable: tuple[str, ...]
    saved: tuple[str, ...]

    @classmethod
    def of(cls, visit: Visit) -> Names:
        """Log-probs in front, and those at further ids behind the statistics."""
        at, of_at = ((), ()) if visit.at is None else (("at",), ("at logits", "at used"))
        ahead = ("ahead",) if visit.ahead else ()
        values, differentiable = ("logps", *visit.statistics, *at), ("logps", *visit.with_gradient, *at)
        return cls(values, differentiable, ("partials", *of_at, *ahead))


Named = list[dict[str, Tensor]]  # of each visit


def by_visit(names: list[tuple[str, ...]], tensors: Iterator[Any]) -> Named:
    """The next tensors by their names, of each visit."""
    return [{name: next(tensors) for name in of_visit} for of_visit in names]


@dataclass(eq=False)
class Rows:
    """What `statistics` computes: visits of one stream."""

    visits: tuple[Visit, ...]
    stream: Stream

    def versions(self) -> list[int]:
        """How often what the backward reads beside the tensors of the stream was written to."""
        temperature = self.stream.transform.inv_temperature
        tensors: list[Any] = [temperature] if isinstance(temperature, Tensor) else []
        for visit in self.visits:
            tensors += visit.targets, visit.read
            if visit.other is not None:
                tensors += visit.other.stream.tensors
        return versions_of(tensors)

    def without_tensors(self) -> Rows:
        """The same as the backward keeps it: autograd keeps the tensors."""
        return Rows(self.visits, self.stream.of((), self.stream.transform))

    def stats(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """The values, then what is saved, from the tensors of the stream."""
        same = all(map(operator.is_, tensors, self.stream.tensors))  # unless torch.func takes wrappers off
        base = self.stream if same else self.stream.of(tensors, self.stream.transform)
        values: list[Tensor] = []
        saved: list[Tensor] = []
        for visit in self.visits:
            _, found, at = Made.of(base, visit)
            values += found.partials.found(visit.statistics, visit.read)
            saved.append(found.values)
            if at is not None:
                values.append(at.log_probs(found.partials, visit.read, base.transform))
                saved += [at.logits, at.used]
            if found.ahead is not None:
                saved.append(found.ahead)
        return *values, *saved

    def pull(self, tensors: Tensors, known: Named, upstream: Named, wanted: tuple[bool, ...]) -> Tensors:
        """Gradients of the tensors. known: what was saved, and the values that have a gradient."""
        base = self.stream.of(tensors, self.stream.transform)
        gradients = base.gradients(wanted, self._parts())
        for visit, of_visit, given in zip(self.visits, known, upstream, strict=True):
            if not given:
                continue
            found, at = visit.found(of_visit["partials"], of_visit.get("ahead")), None
            if visit.at is not None:
                at = LogitsAt(visit.at, of_visit["at logits"], of_visit["at used"])
                at = at if visit.tokens is None or visit.kept is not None else at.with_likeliest(base.transform)
            Made(visit, found, at).pull(base, of_visit, given, gradients)
        pairs = zip(gradients.tensors(), tensors, strict=True)
        return tuple(None if g is None else converted(g, x.dtype) for g, x in pairs)

    def _parts(self) -> Parts:
        whole, twice, slots, wholes = None, False, False, 0
        for visit in self.visits:  # those of sets come first: they read logits that may be written over
            if visit.kept is not None:
                slots = True
                continue
            twice = twice or whole is not None or (slots and visit.all_rows)
            slots = slots or (visit.ahead and visit.at is not None)
            whole, wholes = whole or visit, wholes + 1
        return Parts(whole, twice, slots, wholes)


def over(stream: Stream, visit: Visit) -> Stream | OverSets:
    """What a visit of a stream runs over: the vocabulary, or sets."""
    return stream if visit.kept is None else OverSets(stream, visit)


class Made(NamedTuple):
    """A visit that was made, and logits at its further ids, if there are any."""

    visit: Visit
    found: Found
    at: LogitsAt | None

    @classmethod
    def of(cls, base: Stream, visit: Visit) -> Made:
        stream = over(base, visit)
        at = None if visit.at is None else stream.logits_at(visit)
        return cls(visit, stream.stats(visit if at is None or at.one is None else visit._replace(targets=at.targets)), at)

    def joined(
        self, logps: Tensor, entropy: Tensor, of_ids: Tensor | None, transform: RowTransform
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs, entropies and log-probs at further ids of all rows: these over sets, the given ones over the vocabulary."""
        assert self.visit.kept is not None
        has, given = self.visit.kept.has, (logps, entropy)
        logps, entropy = (torch.where(has, x, y) for x, y in zip(self.found.partials.softmax(True), given, strict=True))
        if self.at is not None and of_ids is not None:
            own = self.at.log_probs(self.found.partials, self.visit.read, transform)
            of_ids = torch.where(has[self.at.slots.rows], own, of_ids)
        return logps, entropy, of_ids

    def pull(self, base: Stream, of_values: dict[str, Tensor], upstream: dict[str, Tensor], gradients: Gradients) -> None:
        """Add the gradient from d loss / d statistic, by name, and the values of those of DIFFERENTIABLE."""
        (visit, found, at), d_ids = self, {name: x for name in ("at", "outside") if (x := upstream.pop(name, None)) is not None}
        slopes = Slopes.of(of_values, upstream or {"logps": torch.zeros_like(found.partials.max)}, visit.read)
        at_ids = None
        if at is not None and d_ids:
            d_at = d_ids["at"].float() if "at" in d_ids else torch.zeros_like(at.logits)
            rows = (visit.targets, visit.read, found.partials, slopes, base.transform)
            of_ids, slopes = at.gradients(d_at, d_ids.get("outside"), *rows)
            at_ids = at.slots, of_ids
            if visit.ahead:
                gradients.add(base.own(at.slots), of_ids)
        over(base, visit).pull(visit, found, slopes, gradients, at_ids)


# ---- autograd


class _NotDifferentiable(torch.autograd.Function):
    """Calls a function of tensors whose results torch.func must treat as constants."""

    @staticmethod
    def forward(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(NO_SECOND)


def gradient_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in the backward of an autograd Function. Where its result could be differentiated again, that
    raises RuntimeError: autograd would take the gradient for a constant."""
    if torch.compiler.is_compiling():
        return function(*arguments)
    # torch.func.vjp calls the backward after its level has ended. Wrappers of that level are then without memory.
    live = [torch._C._functorch.unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in arguments]
    if not torch.is_grad_enabled():
        return function(*live)
    by_func = torch._C._are_functorch_transforms_active() or any(x is not y for x, y in zip(live, arguments, strict=True))
    if by_func:  # which always records the backward: only a second derivative is refused
        return _NotDifferentiable.apply(function, *live)
    raise RuntimeError(f"{NO_SECOND} Call backward without create_graph=True.")


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)`; in eager code without what `apply` does for torch.func and for arguments by name, which takes
    longer than a small batch."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


class _Statistics(torch.autograd.Function):
    """The values of all visits, then what is saved, which has no gradient."""

    @staticmethod
    def forward(rows: Rows, names: list[Names], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return rows.stats(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        rows, names, *tensors = inputs
        each = iter(output)
        known: list[Tensor] = []
        constant: list[Tensor] = []
        for of, made in zip(names, by_visit([of.values for of in names], each), strict=True):
            known += [made.pop(name) for name in of.differentiable]
            constant += made.values()
        saved = tuple(each)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*saved, *constant)
        ctx.rows, ctx.names, ctx.versions = rows.without_tensors(), names, rows.versions()
        ctx.save_for_backward(*saved, *known, *tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Tensors:
        rows, names, wanted = ctx.rows, ctx.names, ctx.needs_input_grad[2:]
        arrived = by_visit([of.values for of in names], iter(upstream))
        given = [tuple(name for name in of.differentiable if x[name] is not None) for of, x in zip(names, arrived, strict=True)]
        slopes = [x[name] for of, x in zip(given, arrived, strict=True) for name in of]
        if not slopes:
            return (None,) * len(ctx.needs_input_grad)
        if rows.versions() != ctx.versions:
            raise RuntimeError(
                "what the backward reads again was written to between forward and backward, the second stream of rows (its logits, hidden "
                "states or head), targets, mask or temperatures: call backward first, or pass a copy."
            )

        def pull(*x: Any) -> Tensors:
            each = iter(x)
            of_upstream = by_visit(given, each)
            saved = by_visit([of.saved for of in names], each)
            values = by_visit([of.differentiable for of in names], each)
            known = [a | b for a, b in zip(saved, values, strict=True)]
            return rows.pull(tuple(each), known, of_upstream, wanted)

        return None, None, *gradient_once(pull, *slopes, *ctx.saved_tensors)


def statistics(rows: Rows, tensors: Tensors) -> list[dict[str, Tensor]]:
    """The values of each visit by name, each [n] (those at further ids [k]), with the gradient of the stream's tensors."""
    names = [Names.of(visit) for visit in rows.visits]
    needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if torch.compiler.is_compiling():
        # torch.compile knows such a Function with gradients only.
        made = (_Statistics.apply if needed else _Statistics.forward)(rows, names, *tensors)
    elif needed or torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        made = applied(_Statistics, rows, names, *tensors)
    else:  # for a small batch the overhead of a Function would dominate
        with torch.no_grad():
            made = rows.stats(tensors)
    return by_visit([of.values for of in names], iter(made))


class _OfTokens(torch.autograd.Function):
    """Statistics of rows as those of tokens: of each token's row, or at its ids. The backward is a sum over tokens, in order."""

    @staticmethod
    def forward(tokens: Tokens, at_ids: bool, x: Tensor) -> Tensor:
        return tokens.of_pairs(x) if at_ids else tokens.of_rows(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.tokens, ctx.at_ids, _ = inputs

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None, Tensor]:
        return None, None, gradient_once(ctx.tokens.to_pairs if ctx.at_ids else ctx.tokens.to_rows, upstream)


def of_tokens(values: dict[str, Tensor], tokens: Tokens) -> dict[str, Tensor]:
    """The values of a visit of rows, with log-probs "at" the slots of `tokens.pairs`, as those of the tokens: "at" has their listed
    ids."""
    found = {name: applied(_OfTokens, tokens, name == "at", x) for name, x in values.items() if name != "logps"}
    logps, *listed = found.pop("at").tensor_split([tokens.rows.numel()])
    return {"logps": logps, **found} | ({} if tokens.listed is None else {"at": listed[0]})


# ---- a loss in one visit


def total(losses: Tensor) -> Tensor:
    """The sum of the losses in fp64, rounded to fp32, so that it does not depend on how torch splits it among threads."""
    return losses.sum(dtype=torch.float64).float()


class OneVisit(NamedTuple):
    """Rows of a stream and the token stage of their loss, whose results have `shape`. Inside forward, grad mode is off: `gradients`
    records that of the caller."""

    shape: torch.Size
    stream: Stream
    whole: Visit | None  # rows over the vocabulary; None: there are none
    sets: Visit | None
    stage: TokenStage | JointStage
    gradients: bool

    def of_rows(self, gradients: Gradients) -> Tensor:
        """The losses of all rows; their gradients are collected."""
        if isinstance(self.stage, JointStage):
            assert self.whole is not None, "rows that are visited over sets alone have no products that wait"
            return self._jointly(self.whole, self.stage, gradients)
        of_sets = None
        if self.sets is not None:  # first: the others may write over logits that they read
            of_sets = over(self.stream, self.sets).fused(self.sets, self.stage, gradients)
        if self.whole is None:
            assert of_sets is not None
            return of_sets
        of_others = self.stream.fused(self.whole, self.stage, gradients)
        if of_sets is None:
            return of_others
        assert self.sets is not None and self.sets.kept is not None
        return torch.where(self.sets.kept.has, of_sets, of_others)

    def _jointly(self, whole: Visit, stage: JointStage, gradients: Gradients) -> Tensor:
        """The same of rows that wait for each other: log-probs over sets are there first. The gradients over these and at further
        ids are made last."""
        assert isinstance(gradients, Engine), "logits that are there cost no product to read again"
        sets, tokens, transform = self.sets, whole.tokens, self.stream.transform
        of_sets = None if sets is None else Made.of(self.stream, sets)
        at = None if whole.at is None else self.stream.logits_at(whole)
        whole = whole if at is None else whole._replace(targets=at.targets)
        result, values, upstream = torch.empty(0), torch.empty(0), dict[str, Tensor]()

        def factors(partials: Partials) -> Tensor:
            nonlocal result, values, upstream
            logps, entropy = partials.softmax(True)
            of_ids = None
            if tokens is not None and at is not None:
                of_pairs = tokens.of_pairs(at.log_probs(partials, None, transform))
                (logps, of_ids), entropy = of_pairs.tensor_split([tokens.rows.numel()]), tokens.of_rows(entropy)
            if of_sets is not None:
                logps, entropy, of_ids = of_sets.joined(logps, entropy, of_ids, transform)
            losses, d_logps, d_ids = stage.terms(logps, entropy, of_ids)
            result = torch.stack([logps, entropy, losses])
            upstream = {"logps": d_logps} | ({} if d_ids is None else {"at": d_ids})
            if tokens is None or at is None:
                return whole.factors(partials, Slopes.stacked({"target": d_logps}))
            nothing = Slopes.stacked({"target": torch.zeros_like(partials.max)})
            of_rows = (whole.targets, None, partials, nothing, transform)
            values, slopes = at.gradients(tokens.to_pairs(torch.cat([*upstream.values()])), None, *of_rows)
            return whole.factors(partials, slopes)

        gradients.fused_jointly(whole, factors, stage.groups)
        if True in gradients.wanted:
            if at is not None:
                gradients.add(self.stream.own(at.slots), values)
            if of_sets is not None:
                of_sets.pull(self.stream, {}, upstream, gradients)
        return result


class _FusedLoss(torch.autograd.Function):
    """Loss, log-probs, entropy and divergence. The gradient is computed in the forward; the backward only scales it."""

    @staticmethod
    def forward(ctx: Any, visit: OneVisit, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        stream = visit.stream  # whose tensors these are
        wanted = ctx.needs_input_grad[1:] if visit.gradients else (False,) * len(tensors)
        shared = visit.whole is not None and visit.whole.tokens is not None and isinstance(visit.stage, JointStage)
        gradients = stream.gradients(wanted, Parts(visit.whole, shared, shared or visit.sets is not None))
        values = visit.of_rows(gradients)
        logps, entropy, losses, *divergence = values.view(values.shape[0], *visit.shape).unbind()
        ctx.gradients = gradients.made()
        ctx.versions = [g._version if isinstance(g, Tensor) else None for g in ctx.gradients]
        ctx.dtypes, ctx.backend = [None if x is None else x.dtype for x in tensors], stream.backend
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(logps, entropy, *divergence)
        return total(losses), logps, entropy, *divergence

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_loss is None:
            return (None,) * (1 + len(ctx.dtypes))
        if torch.is_grad_enabled():  # torch.func does not get here
            raise RuntimeError(f"{NO_SECOND} Call backward without create_graph=True.")
        if ctx.gradients is None:
            raise RuntimeError(HANDED_OVER)
        gradients, ctx.gradients = list(ctx.gradients), None
        for i, (gradient, version) in enumerate(zip(gradients, ctx.versions, strict=True)):
            if gradient is None:
                continue
            if not isinstance(gradient, Tensor):  # a LateGradient
                gradients[i] = gradient(d_loss)
                continue
            if gradient._version != version:  # in place, that of the logits
                raise RuntimeError(
                    "the logits' memory holds the gradient of grpo_loss(inplace=True), and was written to before the backward. "
                    "Call backward first, or pass inplace=False."
                )
            ctx.backend.scale_(gradient, d_loss)
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return None, *(None if g is None else converted(g, dtype) for g, dtype in pairs)


def fused_loss(visit: OneVisit, tensors: Tensors) -> tuple[Tensor, ...]:
    """(loss, log-probs, entropies), beside second streams also divergences; the loss with the gradient of the stream's tensors."""
    return applied(_FusedLoss, visit, *tensors)
