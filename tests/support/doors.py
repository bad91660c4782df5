"""Runs a problem through the package's public functions, and compares what they return with the
oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import (
    Denominators,
    Exact,
    Head,
    LogitTransform,
    LossOutput,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    token_divergence,
    token_logprobs,
)
from support import oracle
from support.objectives import OBJECTIVES
from support.oracle import Answer
from support.recipes import Other, Problem, Recipe, problem, sliced


@cache
def exact_of(p_recipe: Recipe) -> tuple[Answer, Answer]:
    """The oracle's answer and the room that fp32 has, once for all backends."""
    p = problem(p_recipe)
    exact = oracle.answer(p)
    return exact, oracle.rooms(p, exact)


def objective_of(r: Recipe) -> Objective:
    objective = OBJECTIVES[r.objective][0]()
    return replace(objective, kl=divergence_of(r)) if isinstance(objective.kl, Exact) else objective


def divergence_of(r: Recipe) -> Exact:
    kind, _, share = r.exact.partition(" ")
    return Exact(kind, float(share) if share else None, r.tail, r.squared)


def transform_of(p: Problem) -> LogitTransform:
    """One temperature is a number, or a tensor without dimensions."""
    as_tensor = isinstance(p.temperature, float) and p.recipe.seed % 2 and p.rows is None
    given = torch.tensor(p.temperature) if as_tensor else p.temperature
    return LogitTransform(**{**p.transform, "temperature": given})


def batch_of(p: Problem, **changes: Any) -> TokenBatch:
    sets = (
        {}
        if p.sets is None
        else {"kept": TokenSets.from_lists(p.sets), "missing": missing_of(p.recipe)}
    )
    if p.terms is not None:
        lists, c, of_p = p.terms
        ids = TokenSets.from_lists(lists)
        sets |= {"logp_terms": ids.with_values(c), "prob_terms": ids.with_values(of_p)}
    return TokenBatch(p.targets, **{**p.fields, **sets, **changes})


def missing_of(r: Recipe) -> str | None:
    """What says "include", or leaves it out."""
    return None if r.missing == "include" and r.seed % 2 else r.missing


def normalizer_of(r: Recipe) -> Any:
    return Denominators(*r.normalizer) if isinstance(r.normalizer, tuple) else r.normalizer


def other_of(p: Problem, other: Other, shared: Tensor | None) -> Any:
    """The argument for a second distribution. One that is near has the policy's own head, and one
    of the policy's own logits these: both are the caller's tensor `shared`.
    """
    if other.ids is not None:
        exact = oracle.Rows(other.rows, p.ids, p.transform, p.sequences).log_p
        values = [exact[i, j] for i, listed in enumerate(other.ids) for j in listed]
        return TokenSets.from_lists(other.ids).with_values(
            torch.stack(values).float() if values else torch.zeros(0)
        )
    own = LogitTransform(**other.transform) if other.kind in ("own", "itself") else None
    mine = None if shared is None else shared.detach()
    if "logits" in other.given:
        logits = other.given["logits"] if other.kind != "itself" or mine is None else mine
        return logits if own is None else (logits, own)
    weight = other.given["weight"] if other.kind != "near" or mine is None else mine
    return other.given["hidden"], weight if own is None else Head(weight, transform=own)


def options_of(p: Problem, **more: Any) -> Options:
    """What the options of a call say."""
    return Options(**{"skip_inactive": p.recipe.skip_inactive, **more})


def in_options(**named: Any) -> dict[str, Any]:
    """Keywords of a function, with those that are fields of `Options` put into its options."""
    own = {name: named.pop(name) for name in [*named] if name in Options.__dataclass_fields__}
    return {**named, "options": replace(named.get("options") or Options(), **own)}


def leaves_of(p: Problem) -> dict[str, Tensor]:
    """What a call differentiates, where it lies in the caller's memory."""
    copies = {
        name: x.detach().clone(memory_format=torch.preserve_format) for name, x in p.given.items()
    }
    return {name: x.requires_grad_(name != p.recipe.frozen) for name, x in copies.items()}


def arguments_of(
    p: Problem, shared: Tensor | None = None, objective: Objective | None = None, **options: Any
) -> tuple[Any, ...]:
    """(the function that is called, its arguments behind those that it differentiates, its
    keywords). `shared`: see `other_of`. An objective may stand in for the recipe's; the rest are
    options.
    """
    r, of_logits = p.recipe, p.recipe.source == "logits"
    given: dict[str, Any] = {"transform": transform_of(p), "options": options_of(p, **options)}
    if of_logits:
        given["inplace"] = r.inplace
    if r.door == "loss":
        given["normalizer"] = normalizer_of(r)
        if p.other is not None:
            given["ref_logits" if of_logits else "reference"] = other_of(p, p.other, shared)
        return (
            grpo_loss if of_logits else linear_grpo_loss,
            [batch_of(p), objective or objective_of(r)],
            given,
        )
    given["mask"] = p.fields["mask"]
    given["kept"] = None if p.sets is None else TokenSets.from_lists(p.sets)
    if r.door == "divergence":
        assert p.other is not None
        return (
            token_divergence if of_logits else linear_divergence,
            [other_of(p, p.other, shared), divergence_of(r)],
            given,
        )
    if p.sets is not None:
        given["missing"] = missing_of(r)
    given["rows"] = p.fields.get("rows")
    given["at"] = None if p.at is None else TokenSets.from_lists(p.at)
    given["entropy"] = {"nothing": False, "detached": "detached"}.get(r.also, True)
    given["also"] = tuple(
        name for name in ("sum_squares", "log_kept_mass") if r.also in (name, "all")
    )
    return token_logprobs if of_logits else linear_logprobs, [p.targets], given


def call_of(p: Problem, shared: Tensor | None = None, **options: Any) -> Callable[..., Any]:
    """The call of a problem, as a function of logits, or of hidden states, weight and bias."""
    return called(*arguments_of(p, shared, **options))


def called(f: Any, after: list[Any], given: dict[str, Any]) -> Callable[..., Any]:
    def call(*front: Tensor) -> Any:
        first = [front[0], Head(*front[1:])] if len(front) == 3 else [*front]
        return f(*first, *after, **given)

    return call


def named(out: Any) -> dict[str, Tensor]:
    """The tensors of what a call returns."""
    if isinstance(out, Tensor):
        return {"divergence": out}
    if isinstance(out, LossOutput):
        found = {name: getattr(out, name) for name in ("loss", "logps", "entropy", "divergence")}
    else:
        found = {"logps": out.logps, "entropy": out.entropy, **out.also}
    return {name: x for name, x in found.items() if x is not None}


def pull(p: Problem, found: dict[str, Tensor], scale: float = 1.0, **how: Any) -> None:
    """Backward from a loss, or from all that has a gradient; what arrives there has strides."""
    asked = found if "loss" not in found else ["loss"]
    pulled = [(found[name], p.upstream[name]) for name in asked if found[name].requires_grad]
    apart = [torch.stack([scale * d.to(x.dtype).view(x.shape)] * 2, -1)[..., 0] for x, d in pulled]
    torch.autograd.backward([x for x, _ in pulled], apart, **how)


class Call:
    """A call with its leaves, ready for a backward, for tests that are not about its values."""

    def __init__(self, recipe: Recipe, **options: Any) -> None:
        self.p: Problem = problem(recipe)
        self.leaves = [*leaves_of(self.p).values()]
        self.call = call_of(self.p, self.leaves[-1], **options)
        for x in self.leaves:  # masked rows may be anything, but here they are used otherwise too
            x.detach().nan_to_num_(0.0, 0.0, 0.0)

    def values(self, *front: Tensor) -> dict[str, Tensor]:
        return named(self.call(*(front or self.leaves)))

    def gradients(
        self, values: dict[str, Tensor] | None = None, scale: float = 1.0, **how: Any
    ) -> list[Tensor]:
        for x in self.leaves:
            x.grad = None
        pull(self.p, self.values() if values is None else values, scale, **how)
        return [x.grad.clone() for x in self.leaves if x.grad is not None]


def run(p: Problem, **options: Any) -> Answer:
    """What the package returns for the problem, with gradients by autograd. `options`: of
    `Options`, and `call`, which wraps the function that is called, such as torch.compile.
    """
    r, wrap = p.recipe, options.pop("call", lambda f: f)
    leaves, memory = leaves_of(p), None
    if r.weight_grad != "none":  # in rows that are apart
        shape, dtype = (
            leaves["weight"].shape,
            torch.float32 if r.weight_grad == "float32" else leaves["weight"].dtype,
        )
        memory = torch.cat(
            [torch.zeros(shape, dtype=dtype), torch.full((shape[0], 8), math.nan, dtype=dtype)], 1
        )
        options["weight_grad"] = memory[:, : shape[1]]
    front = [*leaves.values()]
    if r.inplace and r.view == "whole":
        front = [leaves["logits"] * 1]
    elif r.inplace:  # the product is contiguous: as the view was
        apart = torch.empty_strided(
            leaves["logits"].shape, leaves["logits"].stride(), dtype=leaves["logits"].dtype
        )
        front = [Written.apply(leaves["logits"], apart)]
    call = call_of(p, leaves.get("weight", front[0]), **options)
    found = wrap(lambda *x: named(call(*x)))(*front)
    assert r.also != "detached" or not found["entropy"].requires_grad
    pull(p, found)
    gradients = {name: x.grad for name, x in leaves.items() if name != r.frozen}
    if memory is not None:
        assert gradients["weight"] is None, (
            "beside weight_grad the weight has a gradient of its own"
        )
        pull(p, named(call(*leaves_of(p).values())))  # again, to what is there
        assert memory[:, shape[1] :].isnan().all(), "memory beside the gradient was written to"
        gradients["weight"] = options["weight_grad"] / 2
    return Answer(
        {name: x.detach() for name, x in found.items()},
        {k: v for k, v in gradients.items() if v is not None},
    )


class Written(torch.autograd.Function):
    """x, in memory of other strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Tensor) -> Tensor:
        return memory.copy_(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.clone(), None


class ByFunc(torch.autograd.Function):
    """A function whose values and gradients torch.func.vjp makes."""

    @staticmethod
    def forward(ctx: Any, f: Any, *front: Tensor) -> Any:
        values, ctx.vjp = torch.func.vjp(f, *(x.detach() for x in front))
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.vjp(gradients)


def by_func(f: Callable[..., Any]) -> Callable[..., Any]:
    """A `call` of `run`, whose gradients are those of torch.func."""

    def call(*front: Tensor) -> dict[str, Tensor]:
        names: dict[str, Tensor] = {}

        def values(*x: Tensor) -> tuple[Tensor, ...]:
            names.update(out := f(*x))
            return tuple(out.values())

        return dict(zip(names, ByFunc.apply(values, *front), strict=True))

    return call


# ---- what must hold


def check(recipe: Recipe, **options: Any) -> None:
    """The call of a recipe is as near to float64 as fp32 allows."""
    compare(problem(recipe), run(problem(recipe), **options))


def compare(p: Problem, found: Answer) -> None:
    r, (exact, room) = p.recipe, exact_of(p.recipe)
    dead, dead_rows = ~p.trained.view(p.shape), ~p.by_row(p.trained).view(p.leading)
    for name, value in found.values.items():
        if name in ("logps", "entropy") and (r.skip_inactive or r.door == "divergence"):
            continue
        assert name != "logps" or not (value > 0).any(), f"{r}: a probability above 1"
        if name != "loss" or exact.clear:
            near(value, exact.values[name], room.values[name], f"{r}: {name}")
        if name != "at" and value.shape == dead.shape:
            assert (value[dead] == 0).all(), f"{r}: {name} of rows that are not trained"
    assert found.gradients.keys() == exact.gradients.keys(), r
    gradients, rooms = (sliced(x.gradients, p.columns) for x in (exact, room))
    for name, gradient in found.gradients.items():
        assert torch.isfinite(gradient).all() or gradient.dtype == torch.float16, (
            f"{r}: the gradient of {name} is not finite"
        )
        if exact.clear:
            near(gradient, gradients[name], rooms[name], f"{r}: gradient of {name}")
        if name in ("logits", "hidden"):
            assert (gradient[dead_rows] == 0).all(), (
                f"{r}: the gradient of {name} in rows that are not trained"
            )
    if (
        "logits" in found.gradients
        and p.keep is not None
        and r.also not in ("log_kept_mass", "all")
    ):
        outside = ~p.by_row(p.keep)[:, p.columns].view(found.gradients["logits"].shape)
        assert (found.gradients["logits"][outside] == 0).all(), (
            f"{r}: logits outside of their set have a gradient"
        )


def near(found: Tensor, exact: Tensor, room: Tensor, what: str) -> None:
    """No further off than `room`; what a dtype cannot hold is compared at its end."""
    assert found.numel() == exact.numel(), (
        f"{what} has shape {list(found.shape)}, not {list(exact.shape)}"
    )
    end = torch.finfo(found.dtype).max
    got, want = found.double().reshape(-1), exact.reshape(-1)
    infinite = want.isinf()
    assert torch.equal(got[infinite], want[infinite]), f"{what}: infinite elsewhere"
    got, want, room = (
        got[~infinite].clamp(-end, end),
        want[~infinite].clamp(-end, end),
        room.reshape(-1)[~infinite],
    )
    bad = ~((got - want).abs() <= room)
    assert not bad.any(), (
        f"{what}: {got[bad][:4].tolist()}, not {want[bad][:4].tolist()}, room"
        f" {room[bad][:4].tolist()}, at {bad.nonzero()[:4, 0].tolist()}"
    )
