"""Exact divergences at random against float64: references and teachers of every form, layouts, masks, sets, -inf, transforms.

A few in the default run; many with `-m nightly`, as many as GRPO_KERNELS_FUZZ says."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_kernels import Options, grpo_loss, linear_divergence, linear_grpo_loss, token_divergence
from grpo_kernels.vocabulary.backends import cpu
from support import oracle
from support.fuzz import MANY, few
from support.fuzz_cases import Built, Recipe, build, exact_loss, seen_through
from support.fuzz_checks import check_leaves, check_masked, leaf_is_refused, projected, spoiled, stored, within
from support.fuzz_divergences import Case, Found, Pair, pairs, total
from support.fuzz_sets import EPS

Tensor = torch.Tensor

BACKENDS = os.environ.get("GRPO_KERNELS_TEST_BACKENDS", "eager" if cpu.available() else "eager cpu").split()
BETA = 0.3


def check_values(case: Case, found: Found, values: Tensor) -> None:
    """Those that are infinite too; 0 where nothing is read."""
    flat, clear, infinite = values.detach().reshape(-1), found.clear, found.value.isinf()
    within(flat[clear], found.value[clear], (found.value_room + 2 * EPS * found.value)[clear], "divergence")
    if case.built.trained is not None:
        assert (values[~case.built.trained] == 0).all(), "a masked row has a divergence"
    assert not flat[infinite].isfinite().any() or not heavy(case)[infinite].any(), "an infinite divergence is finite"


def heavy(case: Case) -> Tensor:
    """bool [n]: no probability of the policy is so small that fp32 may take it for 0, but for those that are 0."""
    log_p = case.policy.all.detach()
    return ((log_p == -torch.inf) | (log_p > -80)).all(1)


def check_per_token(pair: Pair, backend: str) -> None:
    """token_divergence."""
    recipe = pair.recipe
    built = build(recipe)
    kept = built.case.fields.get("kept")
    case = made(pair, built, built.case.logits, of_argument(built))
    found = total(case.parts)
    upstream = torch.randn(built.case.targets.shape, generator=torch.Generator().manual_seed(recipe.seed + 1))
    memory = built.leaf.detach().clone().requires_grad_()
    logits = seen_through(recipe, memory.clone())
    inplace = recipe.inplace and logits.stride(-1) == 1
    given: dict[str, Any] = {"mask": built.case.mask, "transform": built.case.logit_transform(), "kept": kept}
    given["options"] = Options(backend=backend)
    if inplace:
        leaf_is_refused(recipe, memory, lambda x: token_divergence(x, case.argument, pair.exact, inplace=True, **given))
    values = token_divergence(logits, case.argument, pair.exact, inplace=inplace, **given)
    values.backward(upstream)
    assert memory.grad is not None
    check_values(case, found, values)
    check_gradient(case, [part.times(upstream.double().reshape(-1)) for part in case.parts], seen_through(recipe, memory.grad))


def made(pair: Pair, built: Built, logits: Tensor, keep: Tensor, more: Tensor | float = 0.0, **head: Any) -> Case:
    case = Case(pair, built, logits, keep, more)
    for i in range(len(pair.seconds)):
        case.add(i, **head)
    return case


def of_argument(built: Built) -> Tensor:
    """bool [n, V]: the ids of `kept`, all of a row without any."""
    kept, n = built.case.fields.get("kept"), built.case.targets.numel()
    keep = torch.ones(n, built.recipe.vocab, dtype=torch.bool)
    return keep if kept is None else torch.where((kept.counts > 0)[:, None], kept.mask(built.recipe.vocab), keep)


def of_loss(pair: Pair, built: Built) -> Tensor:
    """The same of a loss, whose sets have their targets."""
    everything = torch.ones(built.case.targets.numel(), built.recipe.vocab, dtype=torch.bool)
    return everything if built.case.keep is None or "reference" in pair.recipe.kept.over else built.case.keep


def check_gradient(case: Case, parts: list[Found], gradient: Tensor) -> None:
    """Of logits, row by row."""
    found, wants = total(parts), [part.gradient for part in parts]
    rows = found.clear
    room = found.gradient_room + stored(wants, gradient.dtype)
    within(gradient.reshape(found.gradient.shape)[rows], found.gradient[rows], room[rows], "gradient")
    if case.built.trained is not None:
        assert (gradient[~case.built.trained] == 0).all(), "a masked row has a gradient"


# ---- the term of a loss


def weights_of(pair: Pair, built: Built, values: Tensor) -> Tensor:
    """d loss / d divergence [n]: that of an estimator whose value it is, k1 of a reference of 0."""
    spec = replace(built.spec, surrogate="policy-gradient", level="token", beta=BETA, kl="k1", entropy_coef=0.0)
    spec = replace(spec, trust=None, entropy_floor=None, entropy_share=None, off_policy=None, bounds=None)
    fields = {k: v for k, v in built.seen.items() if k in ("mask", "groups", "weights")}
    leaf = values.detach().clone().requires_grad_()
    nothing = torch.zeros_like(leaf)
    result = oracle.objective(
        spec, leaf, nothing, oracle.sequences_of(built.case.targets, built.case.fields["cu_seqlens"]), ref_logps=nothing,
        advantages=torch.zeros_like(built.seen["advantages"]), normalizer=pair.recipe.normalizer, **fields,
    )  # fmt: skip
    return torch.autograd.grad(result.loss, leaf, materialize_grads=True)[0]


class Loss:
    """A loss with a divergence: its objective, and in float64 the rest of it and the weights of the divergence."""

    def __init__(self, pair: Pair, logits: Tensor | None, more: Tensor | None = None, **head: Any) -> None:
        self.pair = pair
        self.built = build(pair.recipe, logits)
        self.objective = replace(self.built.objective, beta=BETA, kl=pair.exact)
        for fields in (self.built.case.fields, self.built.seen):
            fields.pop("ref_logps", None)  # whole distributions stand for them
            if "group-mean" in self.objective.aggregates:
                sequences = oracle.sequences_of(self.built.case.targets, self.built.case.fields["cu_seqlens"])
                fields["groups"] = torch.arange(len(sequences)) // 2
        logits = self.built.case.logits if logits is None else logits
        self.rest = exact_loss(self.built, logits, more)
        off: Tensor | float = 0.0 if more is None else more.reshape(-1)
        self.case = made(pair, self.built, logits, of_loss(pair, self.built), off, **head)
        self.found = total(self.case.parts)
        self.weights = weights_of(pair, self.built, torch.where(self.found.clear, self.found.value, 0.0))

    @property
    def clear(self) -> bool:
        return self.rest.clear and bool(self.found.clear.all())

    def check(self, out: Any) -> None:
        recipe = self.pair.recipe
        if not recipe.skip_inactive:
            # The square of the temperature is in the weights of a loss, not in its values.
            check_values(self.case, self.found.times(1 / self.case.squared), out.divergence)
        if self.clear:
            terms = self.weights * self.found.value
            room = self.rest.room["loss"] + (self.weights.abs() * self.found.value_room).sum() + 32 * EPS * terms.abs().sum()
            within(out.loss, self.rest.loss + terms.sum(), room + EPS * self.rest.loss.abs(), "loss")

    def parts(self) -> tuple[list[Tensor], Tensor]:
        """Of the gradient of the logits [n, V], times what comes from above; and their room."""
        upstream = self.pair.recipe.upstream
        terms = [part.times(self.weights * upstream) for part in self.case.parts]
        wants = [part * upstream for part in self.rest.parts] + [part.gradient for part in terms]
        return wants, self.rest.room["gradient"] * upstream + total(terms).gradient_room

    def given(self, backend: str) -> dict[str, Any]:
        r = self.pair.recipe
        return {
            "transform": self.built.case.logit_transform(), "normalizer": r.denominators, "skip_inactive": r.skip_inactive,
            "backend": backend, "options": r.kept.options(),
        }  # fmt: skip


def check_loss(pair: Pair, backend: str) -> None:
    """grpo_loss with ref_logits."""
    recipe = pair.recipe
    loss = Loss(pair, None)
    memory = loss.built.leaf.detach().clone().requires_grad_()
    logits = seen_through(recipe, memory.clone())
    inplace = recipe.inplace and logits.stride(-1) == 1
    out = grpo_loss(
        logits, loss.built.batch(), loss.objective, ref_logits=loss.case.argument, inplace=inplace, **loss.given(backend)
    )  # fmt: skip
    (out.loss * recipe.upstream).backward()
    assert memory.grad is not None
    gradient = seen_through(recipe, memory.grad)
    loss.check(out)
    if loss.clear:
        wants, room = loss.parts()
        want = torch.stack(wants).sum(0)
        within(gradient.reshape(want.shape), want, room + stored(wants, gradient.dtype), "gradient")
        check_masked(loss.built, gradient)


# ---- from hidden states


def leaves_of(recipe: Recipe, built: Built, plain: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.requires_grad_() for k, v in spoiled(built, plain).items()}


def check_linear_per_token(pair: Pair, backend: str) -> None:
    """linear_divergence."""
    recipe = pair.recipe
    plain, logits, off = projected(recipe)
    built = build(recipe, logits)
    leaves = leaves_of(recipe, built, plain)
    case = made(pair, built, logits, of_argument(built), off.reshape(-1), head=plain)
    found = total(case.parts)
    upstream = torch.randn(built.case.targets.shape, generator=torch.Generator().manual_seed(recipe.seed + 1))
    into = memory_for(recipe, plain)
    values = linear_divergence(
        leaves["hidden"], leaves["weight"], case.argument, pair.exact, bias=leaves.get("bias"), mask=built.case.mask,
        transform=built.case.logit_transform(), kept=built.case.fields.get("kept"), weight_grad=into,
        options=Options(backend=backend),
    )  # fmt: skip
    values.backward(upstream)
    check_values(case, found, values)
    if found.clear.all():
        terms = [part.times(upstream.double().reshape(-1)) for part in case.parts]
        room = total(terms).gradient_room
        check_leaves(recipe, plain, leaves, [part.gradient for part in terms], room, into)


def memory_for(recipe: Recipe, plain: dict[str, Tensor]) -> Tensor | None:
    if recipe.weight_grad == "none":
        return None
    return torch.zeros_like(plain["weight"], dtype=torch.float32 if recipe.weight_grad == "float32" else None)


def check_linear_loss(pair: Pair, backend: str) -> None:
    """linear_grpo_loss with reference."""
    recipe = pair.recipe
    plain, logits, off = projected(recipe)
    loss = Loss(pair, logits, off, head=plain)
    leaves, into = leaves_of(recipe, loss.built, plain), memory_for(recipe, plain)
    out = linear_grpo_loss(
        leaves["hidden"], leaves["weight"], loss.built.batch(), loss.objective, bias=leaves.get("bias"),
        reference=loss.case.argument, weight_grad=into, **loss.given(backend),
    )  # fmt: skip
    (out.loss * recipe.upstream).backward()
    loss.check(out)
    if loss.clear:
        check_leaves(recipe, plain, leaves, *loss.parts(), into)


# ---- the tests


@pytest.mark.parametrize("backend", BACKENDS)
@few(25)
@given(pairs())
def test_values_of_tokens(backend: str, pair: Pair) -> None:
    check_per_token(pair, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@few(20)
@given(pairs(loss=True))
def test_terms_of_losses(backend: str, pair: Pair) -> None:
    check_loss(pair, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@few(20)
@given(pairs(linear=True))
def test_values_from_hidden_states(backend: str, pair: Pair) -> None:
    check_linear_per_token(pair, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@few(20)
@given(pairs(linear=True, loss=True))
def test_losses_from_hidden_states(backend: str, pair: Pair) -> None:
    check_linear_loss(pair, backend)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden states"])
def test_many(linear: bool, backend: str) -> None:
    checks = (check_linear_per_token, check_linear_loss) if linear else (check_per_token, check_loss)

    @few(MANY)
    @given(st.one_of(*(st.tuples(st.just(check), pairs(linear, check in (check_loss, check_linear_loss))) for check in checks)))
    def run(drawn: Any) -> None:
        check, pair = drawn
        check(pair, backend)

    run()
