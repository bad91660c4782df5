"""Whole cases at random against float64: layouts, strides, dtypes, masks, transforms, objectives, extreme values.

A few in the default run; thousands with `-m nightly`, as many as GRPO_KERNELS_FUZZ says."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_kernels import (
    LogitTransform,
    Objective,
    Sparse,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
    loss_from_model,
    token_logprobs,
)
from grpo_kernels.batch import shift_targets
from grpo_kernels.vocabulary.backends import cpu
from support.cases import same_bits
from support.fuzz import MANY, few
from support.fuzz_cases import Built, Exact, Recipe, build, exact_logprobs, exact_loss, recipes, seen_through
from support.fuzz_checks import check_leaves, check_masked, leaf_is_refused, projected, spoiled, stored, within
from support.fuzz_sets import EPS, ids_asked_for
from support.processes import finish, start

Tensor = torch.Tensor

BACKENDS = os.environ.get("GRPO_KERNELS_TEST_BACKENDS", "eager" if cpu.available() else "eager cpu").split()


def check_loss(recipe: Recipe, backend: str) -> None:
    built = build(recipe)
    exact = exact_loss(built, built.case.logits)
    memory = built.leaf.detach().clone().requires_grad_()
    logits = seen_through(recipe, memory.clone())
    inplace = recipe.inplace and logits.stride(-1) == 1
    if inplace:
        leaf_is_refused(
            recipe, memory, lambda x: grpo_loss(x, built.case.batch(), built.objective, inplace=True, backend=backend)
        )
    out = grpo_loss(
        logits, built.batch(), built.objective, transform=built.case.logit_transform(), normalizer=recipe.denominators,
        inplace=inplace, skip_inactive=recipe.skip_inactive, backend=backend, options=recipe.kept.options(),
    )  # fmt: skip
    (out.loss * recipe.upstream).backward()
    assert memory.grad is not None
    gradient = seen_through(recipe, memory.grad)
    beside = memory.grad.clone()
    seen_through(recipe, beside).zero_()
    assert not beside.any(), "a gradient beside the logits"
    check_values(built, exact, out.loss, out.logps, out.entropy, recipe.skip_inactive)
    if exact.clear:
        want, room = [part * recipe.upstream for part in exact.parts], exact.room["gradient"] * recipe.upstream
        within(gradient, torch.stack(want).sum(0), room + stored(want, gradient.dtype), "gradient")
    check_masked(built, gradient)


def check_values(built: Built, exact: Exact, loss: Tensor, logps: Tensor, entropy: Tensor, skipped: bool) -> None:
    if not skipped:
        within(logps, exact.logps, exact.room["logps"] + EPS * exact.logps.abs(), "logps")
        within(entropy, exact.entropy, exact.room["entropy"] + EPS * exact.entropy.abs(), "entropy")
    assert torch.isfinite(logps).all() and (entropy >= 0).all()
    if exact.clear:
        within(loss, exact.loss, exact.room["loss"], "loss")


def check_logprobs(recipe: Recipe, backend: str) -> None:
    """Layer 1 with upstream gradients of its own, and targets of probability 0 where there are any."""
    built = build(recipe)
    case = built.case
    d_logps, d_entropy, at, d_at = upstream_of(built)
    entropy: Any = (True, "detached", False)[recipe.seed % 3]
    memory = built.leaf.detach().clone().requires_grad_()
    logits = seen_through(recipe, memory.clone())
    inplace = recipe.inplace and logits.stride(-1) == 1
    if inplace:
        leaf_is_refused(
            recipe, memory, lambda x: token_logprobs(x, case.targets, mask=case.mask, inplace=True, backend=backend)
        )
    logps, H, *more = token_logprobs(
        logits,
        case.targets,
        mask=case.mask,
        transform=case.logit_transform(),
        entropy=entropy,
        inplace=inplace,
        backend=backend,
        kept=case.fields.get("kept"),
        at=at,
        options=recipe.kept.options(),
    )
    exact = exact_logprobs(built, case.logits, d_logps, d_entropy if entropy is True else None, at=at, d_at=d_at)
    pull(logps, H, more, d_logps, d_entropy if entropy is True else None, d_at)
    assert memory.grad is not None
    gradient = seen_through(recipe, memory.grad)
    check_log_probs(exact, logps, H, more)
    if exact.clear:
        within(gradient, exact.gradient, exact.room["gradient"] + stored(exact.parts, gradient.dtype), "gradient")
    check_masked(built, gradient)


def upstream_of(built: Built) -> tuple[Tensor, Tensor, TokenSets | None, Tensor | None]:
    """What arrives at log-probs and entropies; further ids of rows, and what arrives at their log-probs."""
    recipe, shape = built.recipe, built.case.targets.shape
    g = torch.Generator().manual_seed(recipe.seed + 1)
    d_logps, d_entropy = (torch.randn(shape, generator=g) for _ in range(2))
    at = ids_asked_for(recipe.kept, shape.numel(), recipe.vocab, recipe.seed + 3)
    return d_logps, d_entropy, at, None if at is None else torch.randn(at.ids.shape, generator=g)


def pull(
    logps: Tensor, H: Tensor | None, more: list[Any], d_logps: Tensor, d_entropy: Tensor | None, d_at: Tensor | None
) -> None:  # fmt: skip
    """The backward of log-probs. Those of -inf get something too."""
    found = [(logps, d_logps), (H, d_entropy), (more[0]["at"] if d_at is not None else None, d_at)]
    torch.autograd.backward(*zip(*((x, d) for x, d in found if x is not None and d is not None), strict=True))


def check_log_probs(exact: Exact, logps: Tensor, H: Tensor | None, more: list[Any]) -> None:
    within(logps, exact.logps, exact.room["logps"] + EPS * exact.logps.abs(), "logps")
    if H is not None:
        within(H, exact.entropy, exact.room["entropy"] + EPS * exact.entropy.abs(), "entropy")
    if exact.at is not None:
        at, finite = more[0]["at"], exact.at.isfinite()
        assert (at[~finite] == -torch.inf).all(), "an id outside of its set has a log-prob"
        within(at[finite], exact.at[finite], exact.room["at"][finite] + 2 * EPS * exact.at[finite].abs(), "at")


# ---- from hidden states


def check_linear(recipe: Recipe, backend: str, layer: int) -> None:
    plain, logits, off = projected(recipe)
    built = build(recipe, logits)
    leaves = {k: v.requires_grad_() for k, v in spoiled(built, plain).items()}
    bias, transform = leaves.get("bias"), built.case.logit_transform()
    if bias is not None and recipe.bias == "a column":
        bias = torch.stack([bias.float(), bias.float()], 1)[:, 0]  # in fp32, whatever the hidden states are
    upstream, into = 1.0, None
    if layer == 2:
        if recipe.weight_grad != "none":
            into = torch.zeros_like(plain["weight"], dtype=torch.float32 if recipe.weight_grad == "float32" else None)
        exact, upstream = exact_loss(built, logits, off), recipe.upstream
        out = linear_grpo_loss(
            leaves["hidden"], leaves["weight"], built.batch(), built.objective, bias=bias, transform=transform,
            normalizer=recipe.denominators, skip_inactive=recipe.skip_inactive, backend=backend, weight_grad=into,
            options=recipe.kept.options(),
        )  # fmt: skip
        (out.loss * upstream).backward()
        check_values(built, exact, out.loss, out.logps, out.entropy, recipe.skip_inactive)
    else:
        d_logps, d_entropy, at, d_at = upstream_of(built)
        exact = exact_logprobs(built, logits, d_logps, d_entropy, off, at, d_at)
        logps, H, *more = linear_logprobs(
            leaves["hidden"], leaves["weight"], built.case.targets, bias=bias, mask=built.case.mask, transform=transform,
            entropy=True, backend=backend, kept=built.case.fields.get("kept"), at=at, options=recipe.kept.options(),
        )  # fmt: skip
        pull(logps, H, more, d_logps, d_entropy, d_at)
        check_log_probs(exact, logps, H, more)
    if exact.clear:
        parts, room = [part * upstream for part in exact.parts], exact.room["gradient"] * upstream
        check_leaves(recipe, plain, leaves, parts, room, into)


def check_sparse(recipe: Recipe, backend: str) -> None:
    """Drawn columns: the same ones and the same bits whatever the strides of the head."""
    plain, logits, _ = projected(recipe)
    built, found = build(recipe, logits), []
    for strides in ("in one piece", recipe.strides):
        leaves = {
            k: v.requires_grad_() for k, v in spoiled(replace(built, recipe=replace(recipe, strides=strides)), plain).items()
        }
        out = linear_grpo_loss(
            leaves["hidden"], leaves["weight"], built.batch(), built.objective, bias=leaves.get("bias"),
            transform=built.case.logit_transform(), normalizer=recipe.denominators, backend=backend,
            options=recipe.kept.options(sparse=Sparse(0.03, recipe.seed)),
        )  # fmt: skip
        out.loss.backward()
        found.append([out.loss.detach(), *(x.grad for x in leaves.values() if x.grad is not None)])
    assert len(found[0]) == 1 + len(plain) and all(map(same_bits, *found))


# ---- the tests


@pytest.mark.parametrize("backend", BACKENDS)
@few(40)
@given(recipes())
def test_losses(backend: str, recipe: Recipe) -> None:
    check_loss(recipe, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@few(25)
@given(recipes())
def test_log_probs(backend: str, recipe: Recipe) -> None:
    check_logprobs(recipe, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@few(25)
@given(recipes(linear=True), st.sampled_from([2, 1]))
def test_from_hidden_states(backend: str, recipe: Recipe, layer: int) -> None:
    check_linear(recipe, backend, layer)


@pytest.mark.parametrize("backend", BACKENDS)
@few(40)
@given(recipes(sets=True))
def test_losses_over_sets(backend: str, recipe: Recipe) -> None:
    check_loss(recipe, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@few(25)
@given(recipes(sets=True))
def test_log_probs_over_sets(backend: str, recipe: Recipe) -> None:
    check_logprobs(recipe, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@few(40)
@given(recipes(linear=True, sets=True), st.sampled_from([2, 1]))
def test_from_hidden_states_over_sets(backend: str, recipe: Recipe, layer: int) -> None:
    check_linear(recipe, backend, layer)


@pytest.mark.parametrize("backend", BACKENDS)
@few(15)
@given(recipes(linear=True, sets=True))
def test_sparse_gradients_of_any_strides(backend: str, recipe: Recipe) -> None:
    check_sparse(recipe, backend)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sets", [False, True], ids=["whole", "sets"])
@pytest.mark.parametrize("what", ["losses", "log-probs", "from hidden states", "sparse"])
def test_many(what: str, sets: bool, backend: str) -> None:
    @few(MANY)
    @given(recipes(linear=what in ("from hidden states", "sparse"), sets=sets), st.sampled_from([1, 2]))
    def run(recipe: Recipe, layer: int) -> None:
        if what == "from hidden states":
            check_linear(recipe, backend, layer)
        elif what == "sparse":
            check_sparse(recipe, backend)
        else:
            (check_loss if what == "losses" else check_logprobs)(recipe, backend)

    run()


@pytest.mark.nightly
def test_models_with_softcap_and_scale_end_to_end() -> None:
    """loss_from_model against grpo_loss on the logits of the model's own forward."""
    pytest.importorskip("transformers")
    from support.models import SLOW, SPECIAL, VOCAB
    from support.models import build as build_model

    models = {name: build_model(name) for name in sorted(SPECIAL) if name not in SLOW}

    @few(MANY // 5)
    @given(
        st.sampled_from(sorted(models)),
        st.integers(0, 10**6), st.integers(1, 3), st.integers(2, 9), st.sampled_from([1.0, 0.6, 3.0]),
        st.sampled_from(["dapo", "gspo", "cispo", "reinforce"]), st.booleans(),
    )  # fmt: skip
    def run(name: str, seed: int, rows: int, length: int, temperature: float, preset: str, whole: bool) -> None:
        model, g = models[name], torch.Generator().manual_seed(seed)
        ids = torch.randint(3, VOCAB, (rows, length), generator=g)
        targets, mask = shift_targets(ids, mask=torch.rand(ids.shape, generator=g) < 0.7)
        if not whole:
            targets, mask = ids[:, 1:], mask[:, :-1]
        old = -4.0 + 0.5 * torch.randn(targets.shape, generator=g)
        batch = TokenBatch(targets, torch.randn(rows, 1, generator=g), mask=mask, old_logps=old)
        objective, found = Objective.preset(preset, entropy_coef=0.01), []
        logits = model(input_ids=ids, use_cache=False).logits[:, : targets.shape[1]]
        for out in (
            loss_from_model(model, ids, batch, objective, temperature=temperature),
            grpo_loss(logits, batch, objective, transform=LogitTransform(temperature)),
        ):
            out.loss.backward()
            gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            model.zero_grad(set_to_none=True)
            found.append((out.loss.detach(), out.logps, gradient))
        for mine, theirs, room in zip(*found, (1e-4, 1e-4, 1e-3), strict=True):
            assert (mine - theirs).norm() <= room * theirs.norm().clamp(min=1e-2)

    run()


@pytest.mark.slow
def test_the_fused_kernel_in_the_interpreter() -> None:
    """The losses with Triton, which chooses its interpreter when its kernels are imported."""
    code = "import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1] + '::test_losses']))"
    finish(start(code, __file__, TRITON_INTERPRET="1", GRPO_KERNELS_TEST_BACKENDS="triton"))
