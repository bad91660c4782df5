"""Runs a problem through the package's public functions, and compares what they return with the oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from grpo_kernels import (
    Denominators,
    Exact,
    Head,
    LogitTransform,
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
from support.recipes import Other, Problem, Recipe, problem, sliced, smallest

Tensor = torch.Tensor


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
    return LogitTransform(**{**p.transform, "temperature": p.temperature})


def batch_of(p: Problem, **changes: Any) -> TokenBatch:
    sets = {} if p.sets is None else {"kept": TokenSets.from_lists(p.sets), "missing": p.recipe.missing}
    return TokenBatch(p.targets, **{**p.fields, **sets, **changes})


def normalizer_of(r: Recipe) -> Any:
    return Denominators(*r.normalizer) if isinstance(r.normalizer, tuple) else r.normalizer


def other_of(p: Problem, other: Other, leaves: dict[str, Tensor]) -> Any:
    """The argument for a second distribution; one that is near has the policy's own head."""
    if other.ids is not None:
        exact = oracle.Rows(other.rows, p.ids, p.transform, p.sequences).log_p
        values = [exact[i, j] for i, listed in enumerate(other.ids) for j in listed]
        return TokenSets.from_lists(other.ids).with_values(torch.stack(values).float() if values else torch.zeros(0))
    own = LogitTransform(**other.transform) if other.kind == "own" else None
    if "logits" in other.given:
        return other.given["logits"] if own is None else (other.given["logits"], own)
    weight = leaves["weight"].detach() if other.kind == "near" else other.given["weight"]
    return other.given["hidden"], weight if own is None else Head(weight, transform=own)


def others_of(p: Problem, leaves: dict[str, Tensor]) -> Any:
    found = [other_of(p, other, leaves) for other in p.others]
    return found[0] if len(found) == 1 else [(x, other.weight) for x, other in zip(found, p.others, strict=True)]


def options_of(p: Problem, **more: Any) -> Options:
    r = p.recipe
    over = {f"{r.over}_over": "vocabulary"} if r.over != "kept" else {}
    missing = {"missing": r.missing} if p.sets is not None else {}
    return Options(**over, **missing, **more)


def in_options(**named: Any) -> dict[str, Any]:
    """Keywords of a function, with those that are fields of `Options` put into its options."""
    own = {name: named.pop(name) for name in [*named] if name in Options.__dataclass_fields__}
    return {**named, "options": replace(named.get("options") or Options(), **own)}


def run(p: Problem, **options: Any) -> Answer:
    """What the package returns for the problem, with gradients by autograd. `options`: of `Options`, and `call`, which wraps the
    function that is called, such as torch.compile."""
    r, call = p.recipe, options.pop("call", lambda f: f)
    leaves = {name: x.detach().clone(memory_format=torch.preserve_format) for name, x in p.given.items()}
    leaves = {name: x.requires_grad_(name != r.frozen) for name, x in leaves.items()}
    into = None
    if r.weight_grad != "none":
        into = torch.zeros(
            leaves["weight"].shape, dtype=torch.float32 if r.weight_grad == "float32" else leaves["weight"].dtype
        )
    door = {"loss": _loss, "logprobs": _logprobs, "divergence": _divergence}[r.door]
    named = {name: x * 1 if r.inplace else x for name, x in leaves.items()}
    if r.inplace and r.view != "whole":  # the product is contiguous: as the view was
        memory = torch.empty_strided(leaves["logits"].shape, leaves["logits"].stride(), dtype=leaves["logits"].dtype)
        named = {"logits": Written.apply(leaves["logits"], memory)}
    found = door(p, named, options_of(p, weight_grad=into, **options), call)
    gradients = {name: x.grad for name, x in leaves.items() if name != r.frozen}
    if into is not None:
        assert gradients["weight"] is None, "beside weight_grad the weight has a gradient of its own"
        gradients["weight"] = into
    return Answer({name: x.detach() for name, x in found.items()}, {k: v for k, v in gradients.items() if v is not None})


class Written(torch.autograd.Function):
    """x, in memory of other strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Tensor) -> Tensor:
        return memory.copy_(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.clone(), None


def _source(p: Problem, leaves: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """(what a function differentiates, keywords of the source)."""
    if p.recipe.source == "logits":
        return [leaves["logits"]], {"inplace": p.recipe.inplace}
    return [leaves[name] for name in ("hidden", "weight", "bias") if name in leaves], {}


def _front(front: tuple[Tensor, ...]) -> list[Any]:
    """The first arguments of a function: logits, or hidden states with the weight or head."""
    return [front[0], Head(*front[1:])] if len(front) == 3 else [*front]


def _loss(p: Problem, leaves: dict[str, Tensor], options: Options, call: Any) -> dict[str, Tensor]:
    r = p.recipe
    f, reference = (grpo_loss, "ref_logits") if r.source == "logits" else (linear_grpo_loss, "reference")
    front, given = _source(p, leaves)
    given |= {reference: others_of(p, leaves)} if p.others else {}
    batch, objective = batch_of(p), objective_of(r)
    transform, normalizer = transform_of(p), normalizer_of(r)
    options = replace(options, skip_inactive=r.skip_inactive)

    def compute(*front: Tensor) -> tuple[Tensor, ...]:
        out = f(*_front(front), batch, objective, transform=transform, normalizer=normalizer, options=options, **given)
        more = () if out.divergence is None else (out.divergence,)
        return out.loss, out.logps, out.entropy, *more

    found = call(compute)(*front)
    (found[0] * r.upstream).backward()
    return dict(zip(("loss", "logps", "entropy", "divergence"), found, strict=False))


def _logprobs(p: Problem, leaves: dict[str, Tensor], options: Options, call: Any) -> dict[str, Tensor]:
    r = p.recipe
    front, given = _source(p, leaves)
    if p.sets is not None:
        given["kept"] = TokenSets.from_lists(p.sets)
    if p.at is not None:
        given["at"] = TokenSets.from_lists(p.at)
    also = tuple(name for name in ("sum_squares", "log_kept_mass") if r.also in (name, "all"))
    f = token_logprobs if r.source == "logits" else linear_logprobs
    entropy = {"nothing": False, "detached": "detached"}.get(r.also, True)
    mask, transform = p.fields["mask"], transform_of(p)

    def compute(*front: Tensor) -> tuple[Tensor, ...]:
        how = {"mask": mask, "transform": transform, "options": options}
        out = f(*_front(front), p.targets, entropy=entropy, also=also, **how, **given)
        named = {"logps": out.logps, **({} if out.entropy is None else {"entropy": out.entropy}), **out.also}
        return tuple(named.values()), tuple(named)

    values, names = call(compute)(*front)
    found = dict(zip(names, values, strict=True))
    assert r.also != "detached" or not found["entropy"].requires_grad
    pulled = [(x, p.upstream[name]) for name, x in found.items() if x.requires_grad]
    torch.autograd.backward([x for x, _ in pulled], [d.to(x.dtype).view(x.shape) for x, d in pulled])
    return found


def _divergence(p: Problem, leaves: dict[str, Tensor], options: Options, call: Any) -> dict[str, Tensor]:
    r = p.recipe
    front, given = _source(p, leaves)
    if p.sets is not None:
        given["kept"] = TokenSets.from_lists(p.sets)
    f = token_divergence if r.source == "logits" else linear_divergence
    others, exact, mask, transform = others_of(p, leaves), divergence_of(r), p.fields["mask"], transform_of(p)

    def compute(*front: Tensor) -> Tensor:
        return f(*_front(front), others, exact, mask=mask, transform=transform, options=options, **given)

    value = call(compute)(*front)
    value.backward(p.upstream["divergence"].to(value.dtype).view(value.shape))
    return {"divergence": value}


# ---- what must hold


def check(recipe: Recipe, **options: Any) -> None:
    """The call of a recipe is as near to float64 as fp32 allows. A failure names the smallest recipe that fails alike."""
    try:
        compare(problem(recipe), run(problem(recipe), **options))
    except AssertionError:

        def fails(other: Recipe) -> bool:
            try:
                compare(problem(other), run(problem(other), **options))
            except AssertionError:
                return True
            except ValueError:
                return False
            return False

        small = smallest(recipe, fails)
        if small == recipe:
            raise
        compare(problem(small), run(problem(small), **options))


def compare(p: Problem, found: Answer) -> None:
    r, (exact, room) = p.recipe, exact_of(p.recipe)
    dead = ~p.trained.view(p.shape)
    for name, value in found.values.items():
        if name in ("logps", "entropy") and (r.skip_inactive or r.door == "divergence"):
            continue
        if name != "loss" or exact.clear:
            near(value, exact.values[name], room.values[name], f"{r}: {name}")
        if value.shape == dead.shape:
            assert (value[dead] == 0).all(), f"{r}: {name} of rows that are not trained"
    assert found.gradients.keys() == exact.gradients.keys(), r
    gradients, rooms = (sliced(x.gradients, p.columns) for x in (exact, room))
    for name, gradient in found.gradients.items():
        assert torch.isfinite(gradient).all() or gradient.dtype == torch.float16, f"{r}: the gradient of {name} is not finite"
        if exact.clear:
            near(gradient, gradients[name], rooms[name], f"{r}: gradient of {name}")
        if name in ("logits", "hidden"):
            assert (gradient[dead] == 0).all(), f"{r}: the gradient of {name} in rows that are not trained"
    if "logits" in found.gradients and p.keep is not None and r.over == "kept" and r.also not in ("log_kept_mass", "all"):
        outside = ~p.keep[:, p.columns].view(found.gradients["logits"].shape)
        assert (found.gradients["logits"][outside] == 0).all(), f"{r}: logits outside of their set have a gradient"


def near(found: Tensor, exact: Tensor, room: Tensor, what: str) -> None:
    """No further off than `room`; what a dtype cannot hold is compared at its end."""
    assert found.numel() == exact.numel(), f"{what} has shape {list(found.shape)}, not {list(exact.shape)}"
    end = torch.finfo(found.dtype).max
    got, want = found.double().reshape(-1), exact.reshape(-1)
    infinite = want.isinf()
    assert torch.equal(got[infinite], want[infinite]), f"{what}: infinite elsewhere"
    got, want, room = got[~infinite].clamp(-end, end), want[~infinite].clamp(-end, end), room.reshape(-1)[~infinite]
    bad = ~((got - want).abs() <= room)
    assert not bad.any(), (
        f"{what}: {got[bad][:4].tolist()}, not {want[bad][:4].tolist()}, room {room[bad][:4].tolist()}, at {bad.nonzero()[:4, 0].tolist()}"
    )
