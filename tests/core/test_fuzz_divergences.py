"""Exact divergences at random against float64: references and teachers of every form, layouts, masks, sets, -inf, transforms.

A few in the default run; many with `-m nightly`, as many as GRPO_KERNELS_FUZZ says."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_kernels import LogitTransform, Options, grpo_loss, linear_divergence, linear_grpo_loss, token_divergence
from grpo_kernels.vocabulary.backends import cpu, load
from grpo_kernels.vocabulary.merging import merge
from grpo_kernels.vocabulary.rows import TRANSFORMED, RowStats, Teacher, partials_of
from support import oracle
from support.cases import same_bits
from support.divergences import KINDS
from support.fuzz import MANY, few
from support.fuzz_cases import Built, Recipe, build, exact_loss, seen_through
from support.fuzz_checks import check_leaves, check_masked, leaf_is_refused, projected, spoiled, stored, within
from support.fuzz_divergences import Case, Found, Pair, Second, pairs, total
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


# ---- parts of a vocabulary

FLOORS = (0.0, -60.0, -2e4, -1e30, torch.finfo(torch.float32).min, -torch.inf)
HUGE = (0.0, 1e4, 1e30, -1e30)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Any, ...]:
    """(seed, kind of a divergence, widths of parts, what masks each part in each stream, what each stream is shifted by)."""
    widths = draw(st.lists(st.sampled_from([1, 2, 17, 40, 1100]), min_size=1, max_size=4))
    floors = tuple(tuple(draw(st.sampled_from(FLOORS)) for _ in widths) for _ in range(2))
    shifts = tuple(draw(st.sampled_from(HUGE)) for _ in range(2))
    return draw(st.integers(0, 10**6)), draw(st.sampled_from(KINDS)), widths, floors, shifts


def check_parts(drawn: tuple[Any, ...], backend: str) -> None:
    """Statistics that ranks make of parts of a row, merged, are those of the row."""
    seed, (kind, mixture), widths, floors, shifts = drawn
    g, module, ends = torch.Generator().manual_seed(seed), load(backend), list(accumulate(widths, initial=0))
    streams = [3.0 * torch.randn(3, ends[-1], generator=g) for _ in range(2)]
    for x, masks, shift in zip(streams, floors, shifts, strict=True):
        for floor, lo, hi in zip(masks, ends, ends[1:], strict=False):
            x[:, lo:hi] = x[:, lo:hi] * (floor > -100.0) + floor if floor > -torch.inf else floor
        x += shift * (1.0 + 1e-3 * (torch.arange(ends[-1]) % 7 == 3)) if seed % 2 else shift
    z, w = streams
    names = tuple(name for name in partials_of(("entropy", "sum_squares", "divergence"), kind) if not name.startswith("mixed"))
    targets, teacher = torch.randint(ends[-1], (3,), generator=g), Teacher(w[None], TRANSFORMED, kind, mixture)

    def stats_of(lo: int, hi: int) -> RowStats:
        part = teacher._replace(logits=w[None, :, lo:hi])
        return module.stats(z[None, :, lo:hi], targets - lo, None, TRANSFORMED, names, teacher=part)

    found = merge(torch.stack([stats_of(*ends_).values for ends_ in pairwise(ends)]), names, None, None, teacher)
    log_p, log_q = (x.double().log_softmax(-1) for x in streams)
    p, empty = log_p.exp(), (z == -torch.inf).all(1) | (w == -torch.inf).all(1)
    exact = {
        "logps": log_p.gather(1, targets[:, None])[:, 0],
        "entropy": -torch.where(p > 0, p * log_p, 0.0).sum(1),
        "sum_squares": p.square().sum(1),
    }
    if kind != "jsd":
        exact["divergence"] = oracle.divergence(log_p, log_q, kind, 0.0)
    for name, want in exact.items():
        got, clear = getattr(found, name).double(), want.isfinite() & (want.abs() < 1e4) & ~empty
        within(got[clear], want[clear], 1e-5 * want[clear].abs() + 2e-5, name)


# ---- memory that is written and read


def addresses(x: Tensor) -> set[int]:
    """Of all elements."""
    at = torch.tensor([x.data_ptr()])
    for size, step in zip(x.shape, x.stride(), strict=True):
        at = (at[:, None] + x.element_size() * step * torch.arange(size)).reshape(-1)
    return set(at.tolist())


def check_shared(pair: Pair, shift: int, backend: str) -> None:
    """In place beside a teacher that lies `shift` elements behind the policy's logits in memory: as beside a copy where both are
    the same or apart, else refused."""
    loss = Loss(replace(pair, seconds=(Second(),)), None)
    memory, r = loss.built.leaf, pair.recipe
    own = LogitTransform(scale=1.3, temperature=0.9)
    block = torch.cat(
        [memory.reshape(-1), torch.randn(shift, generator=torch.Generator().manual_seed(r.seed)).to(memory.dtype)]
    )

    def run(copied: bool) -> tuple[Tensor, Tensor]:
        leaf = block.clone().requires_grad_()
        written = leaf * 1.0
        logits = seen_through(r, written[: memory.numel()].view(memory.shape))
        teacher = written.detach().as_strided(logits.shape, logits.stride(), logits.storage_offset() + shift)
        teacher, before = teacher.clone() if copied else teacher, written.detach().clone()
        if not copied and shift and addresses(logits) & addresses(teacher):
            with pytest.raises(ValueError, match="inplace=True, but logits shares memory with ref_logits"):
                call(logits, teacher)
            assert same_bits(written.detach(), before)
            return run(True)
        out = call(logits, teacher)
        (out.loss * r.upstream).backward()
        assert leaf.grad is not None
        return out.loss.detach(), leaf.grad

    def call(logits: Tensor, teacher: Tensor) -> Any:
        return grpo_loss(
            logits, loss.built.batch(), loss.objective, ref_logits=(teacher, own), inplace=True, **loss.given(backend)
        )

    assert all(map(same_bits, run(False), run(True)))


def check_memory_of_the_gradient(pair: Pair, shift: int, backend: str) -> None:
    """A gradient of the weight that is added `shift` elements behind the weight of a reference, with which it shares a block."""
    recipe = replace(pair.recipe, strides="in one piece")
    plain, logits, off = projected(recipe)
    loss = Loss(replace(pair, recipe=recipe, seconds=(Second(),)), logits, off, head=plain)
    weight, (hidden, of_reference, *_) = plain["weight"], loss.case.argument[:2]
    size, block = weight.numel(), torch.zeros(2 * weight.numel() + shift + of_reference.numel(), dtype=weight.dtype)

    def run(apart: bool) -> list[Tensor]:
        leaves, memory = leaves_of(recipe, loss.built, plain), block.clone()
        other = memory[: of_reference.numel()].view(of_reference.shape).copy_(of_reference)
        first = len(memory) - size if apart else min(shift, len(memory) - size)
        # Views of one tensor count writes together: in several passes a write to one of them is refused as one to the other.
        into, before = memory.data[first : first + size].view(weight.shape), memory.clone()

        def call() -> Any:
            return linear_grpo_loss(
                leaves["hidden"], leaves["weight"], loss.built.batch(), loss.objective, bias=leaves.get("bias"),
                reference=(hidden, other), weight_grad=into, **loss.given(backend),
            )  # fmt: skip

        if addresses(into) & addresses(other):
            with pytest.raises(ValueError, match="weight_grad shares memory with reference"):
                call()
            assert same_bits(memory, before)
            return run(True)
        out = call()
        out.loss.backward()
        assert same_bits(other, before[: other.numel()].view(other.shape))
        return [out.loss.detach(), into - before[first : first + size].view(weight.shape)]

    assert all(map(same_bits, run(False), run(True)))


IN_PLACE = pairs(loss=True).filter(lambda pair: pair.recipe.view != "every other logit" and not pair.recipe.kept.over)
SHIFTS = st.sampled_from([0, 0, 1, 2, 3, 5, 17, 64, 67, 131, 1000])


# ---- the tests


@pytest.mark.parametrize("backend", BACKENDS)
@few(40)
@given(cuts())
def test_parts_of_a_vocabulary(backend: str, drawn: tuple[Any, ...]) -> None:
    check_parts(drawn, backend)


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


@pytest.mark.parametrize("backend", BACKENDS)
@few(30)
@given(IN_PLACE, SHIFTS)
def test_a_teacher_in_the_memory_of_the_logits(backend: str, pair: Pair, shift: int) -> None:
    check_shared(pair, shift, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@few(15)
@given(pairs(linear=True, loss=True), SHIFTS)
def test_a_gradient_in_the_memory_of_a_reference(backend: str, pair: Pair, shift: int) -> None:
    check_memory_of_the_gradient(pair, shift, backend)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", [check_shared, check_memory_of_the_gradient])
def test_many_that_share_memory(check: Callable[[Pair, int, str], None], backend: str) -> None:
    few(MANY)(
        given(IN_PLACE if check is check_shared else pairs(linear=True, loss=True), SHIFTS)(lambda x, y: check(x, y, backend))
    )()


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden states"])
def test_many(linear: bool, backend: str) -> None:
    checks = (check_linear_per_token, check_linear_loss) if linear else (check_per_token, check_loss)
    drawn_by = {check: pairs(linear, check in (check_loss, check_linear_loss)) for check in checks}
    drawn_by |= {} if linear else {check_parts: cuts()}

    @few(MANY)
    @given(st.one_of(*(st.tuples(st.just(check), drawn) for check, drawn in drawn_by.items())))
    def run(drawn: Any) -> None:
        check, pair = drawn
        check(pair, backend)

    run()
