"""Exact divergences through the public functions: losses, per-token values, teachers known at some ids. The oracle is float64."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from grpo_kernels import (
    Exact,
    Head,
    Kl,
    LogitTransform,
    NoPolicyTerm,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    token_divergence,
    token_logprobs,
)
from grpo_kernels.losses import objective_loss
from support.divergences import of_listed_ids

Tensor = torch.Tensor

B, T, V, H = 3, 4, 53, 12
KINDS = [Exact("reverse"), Exact("forward"), Exact("jsd"), Exact("jsd", mixture=0.2)]
KIND_IDS = ["reverse", "forward", "jsd", "jsd 0.2"]
TAILED = [Exact(d, tail=t) for d in ("reverse", "forward", "jsd") for t in ("bin", "renormalise", "ignore", "generalised")]


def divergence(exact: Exact, log_p: Tensor, log_q: Tensor) -> Tensor:
    """By definition, of log-probs [.., V] in float64; terms of probability 0 count 0."""

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return torch.where(log_a == -torch.inf, 0.0, log_a.exp() * (log_a - log_b)).sum(-1)

    if exact.direction == "reverse":
        return kl(log_p, log_q)
    if exact.direction == "forward":
        return kl(log_q, log_p)
    b = 0.5 if exact.mixture is None else exact.mixture
    log_m = torch.logaddexp(log_q + math.log(b), log_p + math.log1p(-b))
    return b * kl(log_q, log_m) + (1 - b) * kl(log_p, log_m)


def transformed(x: Tensor, transform: LogitTransform | None) -> Tensor:
    if transform is None:
        return x
    x = x * transform.scale
    x = x if transform.softcap is None else transform.softcap * torch.tanh(x / transform.softcap)
    t = transform.temperature
    return x / (t.double()[:, None, None] if isinstance(t, Tensor) else t)


class Data:
    """A policy and a reference near it, as hidden states, weights and logits (float32 leaves)."""

    def __init__(self, seed: int = 0, ref_width: int = 7) -> None:
        g = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(B, T, H, generator=g)
        self.weight = torch.randn(V, H, generator=g)
        self.bias = torch.randn(V, generator=g)
        self.ref_hidden = torch.randn(B, T, ref_width, generator=g)
        self.ref_weight = torch.randn(V, ref_width, generator=g)
        self.logits = self.hidden @ self.weight.T + self.bias
        self.ref_logits = self.ref_hidden @ self.ref_weight.T
        self.mask = torch.rand(B, T, generator=g) < 0.8
        self.mask[0, 0] = True
        self.targets = torch.randint(V, (B, T), generator=g)
        self.advantages = torch.randn(B, generator=g)
        self.old = torch.log_softmax(self.logits, -1).gather(-1, self.targets[..., None])[..., 0] + 0.1

    def batch(self, **fields: Any) -> TokenBatch:
        return TokenBatch(self.targets, self.advantages, mask=self.mask, old_logps=self.old, **fields)


def log_probs(x: Tensor, transform: LogitTransform | None = None) -> Tensor:
    return torch.log_softmax(transformed(x.double(), transform), -1)


def assert_near(ours: Tensor, exact: Tensor, what: str, bound: float = 2e-6) -> None:
    error = (ours.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-3)
    assert error < bound, f"{what}: {float(error):.2e}"


# ---- losses: the divergence is a term of its own, so that the loss is the loss without it plus its weighted sum

SCHEMES: dict[str, tuple[Objective, dict[str, Any]]] = {
    "dapo": (Objective.preset("dapo", beta=0.3), {}),
    "grpo": (Objective.preset("grpo", beta=0.3, entropy_coef=0.1), {}),
    "gspo, own mean": (Objective.preset("gspo", beta=0.3, kl_aggregate="token-mean"), {}),
    "distillation": (Objective.preset("distillation"), {}),
}


def weights_of(objective: Objective, mask: Tensor) -> Tensor:
    """Of each token's KL, from the definition of the aggregates used here."""
    if objective.aggregates[1] == "token-mean":
        return objective.beta * mask.double() / mask.sum()
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    return objective.beta * mask.double() / lengths / B


@pytest.mark.parametrize("exact", KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("level", ["logits", "hidden"])
def test_the_loss_is_the_loss_without_it_plus_its_weighted_sum(level: str, name: str, exact: Exact, backend: str) -> None:
    data, objective = Data(), replace(SCHEMES[name][0], kl=exact)
    transform = LogitTransform(temperature=torch.tensor([0.7, 1.0, 1.9]), softcap=9.0)

    def run(objective: Objective, leaves: list[Tensor]) -> Any:
        if level == "logits":
            ref = None if objective.beta == 0 else data.ref_logits
            return grpo_loss(leaves[0], data.batch(), objective, transform=transform, ref_logits=ref, backend=backend)
        ref = None if objective.beta == 0 else (data.ref_hidden, data.ref_weight)
        given = {"bias": leaves[2], "transform": transform, "reference": ref, "backend": backend}
        return linear_grpo_loss(leaves[0], leaves[1], data.batch(), objective, **given)

    def leaves(dtype: torch.dtype) -> list[Tensor]:
        given = [data.logits] if level == "logits" else [data.hidden, data.weight, data.bias]
        return [x.to(dtype, copy=True).requires_grad_() for x in given]

    wide = leaves(torch.float64)
    logits = wide[0] if level == "logits" else wide[0] @ wide[1].T + wide[2]
    per_token = divergence(exact, log_probs(logits, transform), log_probs(data.ref_logits, transform))
    term = (weights_of(objective, data.mask) * per_token).sum()
    expected = torch.autograd.grad(term, wide)

    ours, without = leaves(torch.float32), leaves(torch.float32)
    out, plain = run(objective, ours), run(replace(objective, beta=0.0), without)
    out.loss.backward()
    plain.loss.backward()
    assert_near(out.loss - plain.loss, term, "loss", 1e-5)
    assert_near(out.divergence, torch.where(data.mask, per_token, 0.0), "values")
    assert_near(out.metrics["kl"], per_token[data.mask].mean(), "metric")
    assert_near(out.logps, plain.logps.double(), "log-probs", 1e-6)
    for mine, theirs, exactly in zip(ours, without, expected, strict=True):
        rest = 0.0 if theirs.grad is None else theirs.grad
        assert_near(mine.grad - rest, exactly, "gradient", 1e-5)


def test_the_head_of_a_reference_has_its_own_transform_and_a_shared_weight_is_one() -> None:
    data, objective = Data(), Objective.preset("distillation")
    transform, own = LogitTransform(temperature=0.8), LogitTransform(temperature=1.3, softcap=5.0)
    reference = (data.ref_hidden, Head(data.ref_weight, transform=own))
    out = linear_grpo_loss(data.hidden, data.weight, data.batch(), objective, transform=transform, reference=reference)
    expected = divergence(Exact(), log_probs(data.hidden @ data.weight.T, transform), log_probs(data.ref_logits, own))
    assert_near(out.divergence, torch.where(data.mask, expected, 0.0), "own transform")
    ref_hidden = data.hidden + 0.1
    shared = linear_grpo_loss(data.hidden, data.weight, data.batch(), objective, reference=(ref_hidden, data.weight))
    copied = linear_grpo_loss(data.hidden, data.weight, data.batch(), objective, reference=(ref_hidden, data.weight.clone()))
    assert_near(shared.loss, copied.loss.double(), "shared head", 1e-6)
    logits = (data.logits, own)
    pair = grpo_loss(data.logits.clone(), data.batch(), objective, transform=transform, ref_logits=logits)
    expected = divergence(Exact(), log_probs(data.logits, transform), log_probs(data.logits, own))
    assert_near(pair.divergence, torch.where(data.mask, expected, 0.0), "logits with a transform")


def test_an_estimator_takes_the_transform_of_the_references_head() -> None:
    data, own = Data(), LogitTransform(temperature=1.3, softcap=5.0)
    objective = Objective.preset("dapo", beta=0.1)
    reference = (data.ref_hidden, Head(data.ref_weight, transform=own))
    out = linear_grpo_loss(data.hidden, data.weight, data.batch(), objective, reference=reference)
    ref, _ = token_logprobs(data.ref_logits, data.targets, transform=own)
    given = linear_grpo_loss(data.hidden, data.weight, data.batch(ref_logps=ref), objective)
    assert_near(out.loss, given.loss.double(), "loss", 1e-6)


def test_the_square_of_the_temperature() -> None:
    data = Data()
    t = torch.tensor([0.5, 2.0, 3.0])
    transform, exact = LogitTransform(temperature=t), Exact("forward", temperature_squared=True)
    plain = token_divergence(data.logits, data.ref_logits, "forward", transform=transform)
    squared = token_divergence(data.logits, data.ref_logits, exact, transform=transform)
    assert_near(squared, (plain * t.square()[:, None]).double(), "values")
    objective = Objective.preset("distillation", kl=exact)
    out = grpo_loss(data.logits.clone(), data.batch(), objective, transform=transform, ref_logits=data.ref_logits)
    assert_near(out.loss, (squared.double() * data.mask).sum() / data.mask.sum(), "loss")


@pytest.mark.parametrize("exact", KINDS, ids=KIND_IDS)
def test_values_of_each_token_and_their_gradient(exact: Exact, backend: str) -> None:
    data, upstream = Data(), torch.randn(B, T, generator=torch.Generator().manual_seed(9))
    wide = [x.double().requires_grad_() for x in (data.hidden, data.weight)]
    per_token = divergence(exact, log_probs(wide[0] @ wide[1].T), log_probs(data.ref_logits))
    per_token = torch.where(data.mask, per_token, 0.0)
    expected = torch.autograd.grad((per_token * upstream).sum(), wide)
    ours = [x.clone().requires_grad_() for x in (data.hidden, data.weight)]
    reference = (data.ref_hidden, data.ref_weight)
    values = linear_divergence(*ours, reference, exact, mask=data.mask, options=Options(backend=backend))
    assert_near(values, per_token, "values")
    for mine, exactly in zip(torch.autograd.grad((values * upstream).sum(), ours), expected, strict=True):
        assert_near(mine, exactly, "gradient", 1e-5)
    logits = (data.hidden @ data.weight.T).requires_grad_()
    of_logits = token_divergence(logits, data.ref_logits, exact, mask=data.mask, options=Options(backend=backend))
    assert_near(of_logits, per_token, "values of logits")
    wide_logits = (wide[0] @ wide[1].T).detach().requires_grad_()
    again = torch.where(data.mask, divergence(exact, log_probs(wide_logits), log_probs(data.ref_logits)), 0.0)
    (exactly,) = torch.autograd.grad((again * upstream).sum(), wide_logits)
    (mine,) = torch.autograd.grad((of_logits * upstream).sum(), logits)
    assert_near(mine, exactly, "gradient of logits", 1e-5)
    assert (mine[~data.mask] == 0).all()


def test_the_token_stage_takes_values_that_were_computed_elsewhere() -> None:
    data, objective = Data(), Objective.preset("dapo", beta=0.3, kl=Exact("jsd"))
    logits, again = data.logits.clone().requires_grad_(), data.logits.clone().requires_grad_()
    out = grpo_loss(logits, data.batch(), objective, ref_logits=data.ref_logits)
    out.loss.backward()
    logps, _ = token_logprobs(again, data.targets, mask=data.mask)
    values = token_divergence(again, data.ref_logits, Exact("jsd"), mask=data.mask)
    apart = objective_loss(logps, data.batch(), objective, divergence=values)
    apart.loss.backward()
    assert_near(apart.loss, out.loss.double(), "loss")
    assert_near(again.grad, logits.grad.double(), "gradient", 1e-5)


def test_masked_rows_may_have_any_temperature() -> None:
    """Also where the divergence is asked for times its square."""
    data, exact = Data(), Exact(temperature_squared=True)
    t = torch.linspace(0.5, 2.0, B * T).view(B, T)
    rubbish = torch.where(data.mask, t, torch.tensor([math.nan, 0.0, -1.0, math.inf]))
    objective, found = Objective.preset("distillation", kl=exact), []
    for temperature in (t, rubbish):
        transform = LogitTransform(temperature)
        values = token_divergence(data.logits, data.ref_logits, exact, mask=data.mask, transform=transform)
        out = grpo_loss(data.logits, data.batch(), objective, ref_logits=data.ref_logits, transform=transform)
        found.append((values, out.loss, out.divergence))
    assert not data.mask.all() and found[0][1] > 1e-3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- kept sets


def sets_of(data: Data) -> TokenSets:
    """Sets with the target in them; row 1 has none, row 2 a single id."""
    ids = [sorted({int(y), *range(3, 3 + 2 * (i % 5))}) for i, y in enumerate(data.targets.reshape(-1))]
    ids[1], ids[2] = [], [int(data.targets.reshape(-1)[2])]
    counts = torch.tensor([len(x) for x in ids])
    return TokenSets.from_counts(torch.tensor([i for x in ids for i in x]), counts)


def restricted(x: Tensor, sets: TokenSets) -> Tensor:
    keep = sets.mask(V).view(B, T, V)
    keep = keep | ~keep.any(-1, keepdim=True)
    return torch.where(keep, x, -1e3)  # finite, so that autograd gives no NaN, and of probability 0 in float64


@pytest.mark.parametrize("over", ["kept", "vocabulary"])
@pytest.mark.parametrize("exact", KINDS, ids=KIND_IDS)
def test_over_kept_sets_both_sides_are_renormalised(exact: Exact, over: str, backend: str) -> None:
    data = Data()
    sets, objective = sets_of(data), Objective.preset("distillation", kl=exact)
    wide = data.logits.double().requires_grad_()
    ref = data.ref_logits
    if over == "kept":
        per_token = divergence(exact, log_probs(restricted(wide, sets)), log_probs(restricted(ref, sets)))
    else:
        per_token = divergence(exact, log_probs(wide), log_probs(ref))
    (expected,) = torch.autograd.grad((per_token * data.mask).sum() / data.mask.sum(), wide)
    options = Options(reference_over=over)
    logits = data.logits.clone().requires_grad_()
    out = grpo_loss(logits, data.batch(kept=sets), objective, ref_logits=ref, options=options, backend=backend)
    out.loss.backward()
    assert_near(out.divergence, torch.where(data.mask, per_token, 0.0), "values", 5e-6)
    assert_near(logits.grad, expected, "gradient", 1e-5)
    hidden = data.hidden.clone().requires_grad_()
    reference = (data.ref_hidden, data.ref_weight)
    given = {"bias": data.bias, "reference": reference, "options": options, "backend": backend}
    linear_grpo_loss(hidden, data.weight, data.batch(kept=sets), objective, **given).loss.backward()
    assert_near(hidden.grad, expected @ data.weight.double(), "gradient of hidden states", 1e-5)
    if over == "kept":
        values = token_divergence(data.logits, ref, exact, mask=data.mask, kept=sets, options=Options(backend=backend))
        assert_near(values, torch.where(data.mask, per_token, 0.0), "values of each token", 5e-6)


# ---- teachers that are known at some ids


def top_k(data: Data, k: int = 5) -> TokenSets:
    """The k largest log-probs of the reference; no id in row 3."""
    values, ids = log_probs(data.ref_logits).float().reshape(-1, V).topk(k)
    ids[3] = -1
    return TokenSets.from_padded(ids, values=values)


@pytest.mark.parametrize("exact", TAILED, ids=lambda e: f"{e.direction}-{e.tail}")
def test_a_teacher_known_at_some_ids(exact: Exact, backend: str) -> None:
    data = Data()
    sets = top_k(data)
    wide = data.logits.double().requires_grad_()
    per_token = torch.where(data.mask, of_listed_ids(exact, log_probs(wide).reshape(-1, V), sets).view(B, T), 0.0)
    (expected,) = torch.autograd.grad(per_token.sum() / data.mask.sum(), wide)
    objective = Objective.preset("distillation", kl=exact)
    logits = data.logits.clone().requires_grad_()
    out = grpo_loss(logits, data.batch(), objective, ref_logits=sets, backend=backend)
    out.loss.backward()
    assert_near(out.divergence, per_token, "values", 5e-6)
    assert_near(logits.grad, expected, "gradient", 1e-5)
    hidden = data.hidden.clone().requires_grad_()
    values = linear_divergence(
        hidden, data.weight, sets, exact, bias=data.bias, mask=data.mask, options=Options(backend=backend)
    )
    assert_near(values, per_token, "values of each token", 5e-6)
    (values.sum() / data.mask.sum()).backward()
    assert_near(hidden.grad, expected @ data.weight.double(), "gradient of hidden states", 1e-5)


def confident(vocab: int = 1000, n: int = 8, up: float = 20.0) -> tuple[Tensor, Tensor]:
    """Logits of a policy that is sure of an id, and of a teacher that is sure of about 20."""
    logits, of_teacher = torch.randn(2, n, vocab)
    ids = torch.randint(vocab, (n,))
    logits[torch.arange(n), ids] += up
    of_teacher += 12.0 * (torch.rand(n, vocab) < 20 / vocab)
    of_teacher[torch.arange(n), ids] += 12.0
    of_teacher[-1, ids[-1]] = -4.0  # and of one id that the policy has and the teacher does not list
    return logits, of_teacher


@pytest.mark.parametrize(
    "direction, up", [*product(["reverse", "forward", "jsd"], [8.0, 16.0, 20.0]), ("forward", 24.0), ("forward", 40.0)]
)
def test_the_mass_outside_of_the_ids_keeps_its_digits(direction: str, up: float, backend: str) -> None:
    """A confident policy has a small probability outside of the ids, which 1 minus that inside would be the rounding of."""
    logits, of_teacher = confident(up=up)
    values, ids = of_teacher.log_softmax(-1).topk(20)
    sets = TokenSets.from_padded(ids, values=values)
    exact, transform = Exact(direction), LogitTransform(temperature=0.9, softcap=50.0)
    wide = logits.double().requires_grad_()
    expected = of_listed_ids(exact, log_probs(wide, transform), sets)
    (gradient,) = torch.autograd.grad(expected.sum(), wide)
    leaf = logits.clone().requires_grad_()
    found = token_divergence(leaf, sets, exact, transform=transform, options=Options(backend=backend))
    found.sum().backward()
    torch.testing.assert_close(found.double(), expected.detach(), rtol=2e-6, atol=1e-9)
    error = (leaf.grad.double() - gradient).norm(dim=-1) / gradient.norm(dim=-1)  # type: ignore[union-attr]
    assert error.max() <= 1e-5, error
    hidden, head = torch.eye(len(logits)).requires_grad_(), logits.T.contiguous()
    found = linear_divergence(hidden, head, sets, exact, transform=transform, options=Options(backend=backend))
    torch.testing.assert_close(found.double(), expected.detach(), rtol=2e-6, atol=1e-9)
    found.sum().backward()
    near = (gradient @ head.double()).diagonal()
    assert ((hidden.grad.diagonal() - near).abs() <= 1e-5 * (gradient.abs() @ head.double().abs()).diagonal()).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("tail", ["bin", "renormalise", "generalised"])
def test_a_teacher_that_agrees_is_at_no_negative_distance(tail: str, backend: str) -> None:
    logits = 3.0 * torch.randn(600, 40)
    for direction in ("reverse", "forward", "jsd"):
        values, ids = logits.log_softmax(-1).topk(7)
        sets = TokenSets.from_padded(ids, values=values)
        leaf = logits.clone().requires_grad_()
        found = token_divergence(leaf, sets, Exact(direction, tail=tail), options=Options(backend=backend))
        assert (found >= 0).all() and found.max() < 1e-8
        found.sum().backward()
        assert leaf.grad.abs().max() < 1e-6  # type: ignore[union-attr]


def test_a_vocabulary_of_one_id_has_no_gradient(backend: str) -> None:
    values = torch.tensor([[-0.01], [-1e-6]])
    sets = TokenSets.from_padded(torch.zeros(2, 1, dtype=torch.int64), values=values)
    for direction in ("reverse", "forward", "jsd"):
        leaf = torch.randn(2, 1, requires_grad=True)
        token_divergence(leaf, sets, direction, options=Options(backend=backend)).sum().backward()
        assert (leaf.grad == 0).all()


def test_soft_targets_are_a_forward_divergence_that_ignores_the_tail() -> None:
    data, generator = Data(), torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(V, generator=generator)[:4] for _ in range(B * T)])
    weights = 3.0 * torch.rand(B * T, 4, generator=generator)  # they add up to more than 1
    sets = TokenSets.from_padded(ids, values=weights.log())
    wide = data.logits.double().requires_grad_()
    cross = -(weights.double() * log_probs(wide).reshape(-1, V).gather(1, ids)).sum()
    (expected,) = torch.autograd.grad(cross, wide)
    logits = data.logits.clone().requires_grad_()
    token_divergence(logits, sets, Exact("forward", tail="ignore")).sum().backward()
    assert_near(logits.grad, expected, "gradient", 1e-5)


def test_a_teacher_that_covers_everything_has_no_tail() -> None:
    data = Data()
    log_q = log_probs(data.ref_logits).float().reshape(-1, V)
    sets = TokenSets.from_padded(torch.arange(V).expand(B * T, V).contiguous(), values=log_q)
    for direction in ("reverse", "forward", "jsd"):
        whole = token_divergence(data.logits, data.ref_logits, direction)
        listed = token_divergence(data.logits, sets, Exact(direction))
        assert_near(listed, whole.double(), direction, 1e-5)


@pytest.mark.parametrize("exact", TAILED, ids=lambda e: f"{e.direction}-{e.tail}")
def test_an_id_that_neither_side_can_choose_changes_nothing(exact: Exact) -> None:
    """In value and gradient: the policy's logit and the teacher's log-prob are -inf there."""
    logits = torch.tensor([[0.3, 1.0, -0.4, -math.inf, 0.5]]).requires_grad_()
    ids, values = torch.tensor([[0, 1, 3]]), torch.tensor([[-1.0, -2.0, -math.inf]])
    value, without = (token_divergence(logits, TokenSets.from_padded(ids[:, :k], values=values[:, :k]), exact) for k in (3, 2))
    gradient, expected = (torch.autograd.grad(x.sum(), logits)[0] for x in (value, without))
    assert torch.isfinite(expected).all() and expected.abs().max() > 1e-3
    torch.testing.assert_close(value, without)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd"])
def test_renormalised_over_ids_that_are_hardly_ever_chosen(direction: str) -> None:
    """Whose probabilities are 0 in float64 too, on one side, the other and both."""
    exact = Exact(direction, tail="renormalise")
    logits = torch.tensor(
        [[0.0, -1000.0, -1001.5, -1003.0], [0.0, -1.0, 0.5, 0.2], [0.0, -900.0, -901.0, -902.0]]
    ).requires_grad_()
    values = torch.tensor([[-1.0, -1.5, -2.5], [-800.0, -801.0, -803.0], [-900.0, -902.0, -901.0]])
    sets = TokenSets.from_padded(torch.tensor([[1, 2, 3]]).repeat(3, 1), values=values)
    wide = logits.detach().double().requires_grad_()
    expected = of_listed_ids(exact, log_probs(wide), sets)
    found = token_divergence(logits, sets, exact)
    assert expected.min() > 1e-3
    assert_near(found, expected, "values")
    (gradient,), (exactly,) = (torch.autograd.grad(x.sum(), leaf) for x, leaf in ((found, logits), (expected, wide)))
    assert_near(gradient, exactly, "gradient", 1e-5)


# ---- the objective


def test_without_a_policy_term_advantages_do_not_matter() -> None:
    data, objective = Data(), Objective.preset("distillation")
    assert objective.surrogate == NoPolicyTerm() and objective.exact == Exact("reverse")
    assert objective.one_pass
    loss = grpo_loss(data.logits.clone(), data.batch(), objective, ref_logits=data.ref_logits).loss
    other = TokenBatch(data.targets, 7 * data.advantages, mask=data.mask)
    assert torch.equal(loss, grpo_loss(data.logits.clone(), other, objective, ref_logits=data.ref_logits).loss)
    sampled = Objective.preset("sampled_distillation")
    assert sampled.kl_spec == Kl("distillation") and sampled.exact is None


def test_an_exact_kl_of_weight_zero_is_none() -> None:
    data, objective = Data(), Objective.preset("dapo", kl=Exact())
    assert objective.exact is None
    out = grpo_loss(data.logits.clone(), data.batch(), objective)
    assert out.divergence is None and "kl" not in out.metrics


def test_under_torch_compile_the_loss_leaves_the_graph() -> None:
    data, objective = Data(), Objective.preset("dapo", beta=0.3, kl=Exact())

    def loss(logits: Tensor) -> Tensor:
        return grpo_loss(logits, data.batch(), objective, ref_logits=data.ref_logits).loss * 2.0

    logits, again = data.logits.clone().requires_grad_(), data.logits.clone().requires_grad_()
    loss(logits).backward()
    torch.compile(loss, backend="eager")(again).backward()
    assert torch.equal(logits.grad, again.grad)


# ---- bad input

DATA = Data()
OBJECTIVE = Objective.preset("dapo", beta=0.3, kl=Exact())


def linear(objective: Objective = OBJECTIVE, **given: Any) -> Any:
    fields = {name: given.pop(name) for name in ("kept", "ref_logps") if name in given}
    return linear_grpo_loss(DATA.hidden, DATA.weight, DATA.batch(**fields), objective, **given)


def from_logits(objective: Objective = OBJECTIVE, **given: Any) -> Any:
    fields = {name: given.pop(name) for name in ("kept", "ref_logps") if name in given}
    return grpo_loss(DATA.logits.clone(), DATA.batch(**fields), objective, **given)


BAD: dict[str, tuple[Any, str]] = {
    "no stream": (lambda: linear(), r"reference=None.*needs the whole distribution"),
    "no logits": (lambda: from_logits(), r"ref_logits is None.*needs the whole distribution"),
    "no stream for values": (lambda: linear_divergence(DATA.hidden, DATA.weight, None), r"reference=None.*needs the whole"),
    "no logits for values": (lambda: token_divergence(DATA.logits, None), r"ref_logits is None.*needs the whole"),
    "ids outside, logits": (
        lambda: from_logits(ref_logits=TokenSets.from_padded(torch.full((B * T, 1), V), values=torch.zeros(B * T, 1))),
        r"ref_logits holds id 53 in row 0",
    ),
    "a bias that does not fit": (
        lambda: linear(reference=(DATA.ref_hidden, DATA.ref_weight, torch.zeros(V - 1))),
        r"reference: bias has shape \[52\]",
    ),
    "an estimator": (
        lambda: from_logits(Objective.preset("dapo", beta=0.1), ref_logits=DATA.ref_logits),
        r"ref_logits is a whole distribution.*kl='k3' is an estimate",
    ),
    "an estimator with a top-k teacher": (
        lambda: linear(Objective.preset("dapo", beta=0.1), reference=top_k(DATA)),
        r"reference is a whole distribution",
    ),
    "sampled log-probs": (
        lambda: linear(reference=(DATA.ref_hidden, DATA.ref_weight), ref_logps=DATA.old),
        r"ref_logps are log-probs of the sampled tokens",
    ),
    "no weight": (lambda: from_logits(Objective(), ref_logits=DATA.ref_logits), r"ref_logits='Tensor': with beta=0"),
    "another vocabulary": (
        lambda: linear(reference=(DATA.ref_hidden, DATA.ref_weight[:-2])),
        r"reference has a vocabulary of 51, but the policy has 53",
    ),
    "another vocabulary, logits": (
        lambda: from_logits(ref_logits=DATA.ref_logits[..., :-1]),
        r"ref_logits has a vocabulary of 52, but the policy has 53",
    ),
    "a weight that does not fit": (
        lambda: linear(reference=(DATA.ref_hidden, DATA.weight)),
        r"reference: hidden has shape \[3, 4, 7\] and weight \[53, 12\]",
    ),
    "rows that do not fit": (lambda: from_logits(ref_logits=DATA.ref_logits[:, 1:]), r"ref_logits: logits has shape"),
    "a gradient": (
        lambda: linear(reference=(DATA.ref_hidden, Head(DATA.ref_weight, grad=torch.zeros(V, 7)))),
        r"grad is given in the Head of a reference",
    ),
    "ids outside": (
        lambda: linear(reference=TokenSets.from_padded(torch.full((B * T, 1), V), values=torch.zeros(B * T, 1))),
        r"reference holds id 53 in row 0",
    ),
    "no values": (lambda: linear(reference=top_k(DATA).with_values(None)), r"reference is TokenSets without values"),
    "too much mass": (
        lambda: linear(reference=TokenSets.from_padded(torch.tensor([[0, 1]] * B * T), values=torch.zeros(B * T, 2))),
        r"the values of row 0 are log-probs of 2 in all",
    ),
    "top-k over kept sets": (
        lambda: from_logits(ref_logits=top_k(DATA), kept=sets_of(DATA)),
        r"reference_over='kept'.*reference_over=\"vocabulary\"",
    ),
    "a mixture of a KL": (lambda: Exact("reverse", mixture=0.5), r"mixture=0.5: \"reverse\" has none"),
    "a mixture of one": (lambda: Exact("jsd", mixture=1.0), r"mixture=1.0"),
    "a direction": (lambda: Exact("backward"), r"direction='backward'"),
    "a tail": (lambda: Exact(tail="drop"), r"tail='drop'"),
    "a square": (lambda: Exact(temperature_squared=2), r"temperature_squared=2"),
    "a divergence that is missing": (
        lambda: objective_loss(DATA.old, DATA.batch(), OBJECTIVE),
        r"divergence is None, but kl=Exact",
    ),
    "a divergence too many": (
        lambda: objective_loss(DATA.old, DATA.batch(), Objective(), divergence=DATA.old),
        r"divergence is given, but kl='k3'",
    ),
    "an unknown name": (lambda: token_divergence(DATA.logits, DATA.ref_logits, "k3"), r"divergence='k3'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument_and_the_remedy(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_nothing_is_modified_by_a_refusal() -> None:
    logits = DATA.logits.clone()
    with pytest.raises(ValueError, match="ref_logits"):
        grpo_loss(logits, DATA.batch(), OBJECTIVE, ref_logits=DATA.ref_logits[..., :-1], inplace=True)
    assert torch.equal(logits, DATA.logits) and math.isfinite(float(logits.sum()))


def test_a_reference_that_was_made_in_inference_mode() -> None:
    data, objective = Data(), Objective.preset("distillation")
    with torch.inference_mode():
        hidden, logits = data.ref_hidden * 1.0, data.ref_logits * 1.0
    leaf = data.hidden.clone().requires_grad_()
    linear_grpo_loss(leaf, data.weight, data.batch(), objective, reference=(hidden, data.ref_weight)).loss.backward()
    again = data.hidden.clone().requires_grad_()
    values = linear_divergence(again, data.weight, (hidden, data.ref_weight), mask=data.mask)
    (values.sum() / data.mask.sum()).backward()
    assert_near(again.grad, leaf.grad.double(), "gradient", 1e-5)
    of_logits = (data.hidden @ data.weight.T).requires_grad_()
    token_divergence(of_logits, logits, mask=data.mask).sum().backward()
    assert torch.isfinite(of_logits.grad).all() and of_logits.grad.abs().sum() > 0
