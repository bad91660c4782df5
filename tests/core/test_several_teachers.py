"""Several teachers with weights: losses and per-token values against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_kernels import (
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
    token_divergence,
)
from support import oracle
from support.allocations import Allocations
from support.divergences import of_listed_ids
from support.linear_cases import count_products, in_chunks
from support.sets import build

Tensor = torch.Tensor

B, T, V, H = 3, 4, 41, 9
N = B * T
MASK = torch.tensor([[True] * 4, [True, True, False, True], [True] * 4])
OWN = LogitTransform(temperature=1.4, softcap=6.0)
STUDENT = LogitTransform(temperature=torch.tensor([0.7, 1.0, 1.6]))
KINDS = [Exact("reverse"), Exact("forward"), Exact("jsd", mixture=0.3)]


class Data:
    """A policy and three teachers; the second has weights of sequences and a transform of its own, the third weights of tokens."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        g = torch.Generator().manual_seed(4)
        self.hidden, self.weight = torch.randn(B, T, H, generator=g).to(dtype), torch.randn(V, H, generator=g).to(dtype)
        self.teachers = [(torch.randn(B, T, w, generator=g), torch.randn(V, w, generator=g)) for w in (5, 7, H)]
        self.targets, self.advantages = torch.randint(V, (B, T), generator=g), torch.randn(B, generator=g)
        self.weights = [0.4, torch.tensor([2.0, 0.0, 0.5]), torch.rand(B, T, generator=g)]
        self.weights[2][0] = 0.0
        self.teachers[1][0][1] = torch.nan  # a sequence of weight 0 is another teacher's
        self.ref_logits = [h @ w.T for h, w in self.teachers]
        self.old = -torch.rand(B, T, generator=g)

    def batch(self, **fields: Any) -> TokenBatch:
        return TokenBatch(self.targets, self.advantages, mask=MASK, old_logps=self.old, **fields)

    def reference(self) -> list[Any]:
        (h0, w0), (h1, w1), (h2, w2) = self.teachers
        seconds = [(h0, w0), (h1, Head(w1, transform=OWN)), (h2, w2)]
        return list(zip(seconds, self.weights, strict=True))

    def of_logits(self) -> list[Any]:
        x0, x1, x2 = self.ref_logits
        return list(zip([x0, (x1, OWN), x2], self.weights, strict=True))

    def expected(self, exact: Exact, logits: Tensor, sets: TokenSets | None = None) -> Tensor:
        """The weighted sum of the divergences [B, T], of fp64 logits; 0 where masked."""
        log_p, total = log_probs(logits, STUDENT, sets), torch.zeros(B, T, dtype=torch.float64)
        for x, w, transform in zip(self.ref_logits, self.weights, (STUDENT, OWN, STUDENT), strict=True):
            w = torch.as_tensor(w, dtype=torch.float64)
            w = (w[:, None] if w.dim() == 1 else w).expand(B, T)
            value = oracle.divergence(log_p, log_probs(x.nan_to_num(), transform, sets), exact.direction, exact.share)
            total = total + w * value
        return torch.where(MASK, total, 0.0)


def log_probs(x: Tensor, transform: LogitTransform, sets: TokenSets | None) -> Tensor:
    x, t = x.double(), transform.temperature
    x = x if transform.softcap is None else transform.softcap * torch.tanh(x / transform.softcap)
    x = x / (t.double()[:, None, None] if isinstance(t, Tensor) else t)
    if sets is not None:
        keep = sets.mask(V).view(B, T, V)
        x = torch.where(keep, x, -1e3)
    return torch.log_softmax(x, -1)


def near(ours: Tensor, exact: Tensor, relative: float = 2e-5) -> None:
    assert float(exact.abs().max()) > 1e-3
    assert float((ours.double() - exact).abs().max()) <= relative * float(exact.abs().max())


def leaves(data: Data, level: str, dtype: torch.dtype) -> list[Tensor]:
    given = [data.hidden, data.weight] if level == "hidden" else [data.hidden.float() @ data.weight.float().T]
    return [x.to(dtype, copy=True).requires_grad_() for x in given]


def loss(data: Data, level: str, own: list[Tensor], objective: Objective, teachers: bool, **given: Any) -> Any:
    batch = data.batch(**({"kept": given.pop("kept")} if "kept" in given else {}))
    if level == "hidden":
        reference = data.reference() if teachers else None
        return linear_grpo_loss(*own, batch, objective, transform=STUDENT, reference=reference, **given)
    return grpo_loss(own[0], batch, objective, transform=STUDENT, ref_logits=data.of_logits() if teachers else None, **given)


#: name -> (preset, options): at once in one visit, of a sequence in two, over kept sets
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "one visit": ("dapo", {}),
    "distillation": ("distillation", {}),
    "sequences": ("gspo", {"kl_aggregate": "token-mean"}),
    "sets": ("dapo", {}),
    "sets, reference over all": ("dapo", {}),
}


@pytest.mark.parametrize("exact", KINDS, ids=lambda e: e.direction)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", ["hidden", "logits"])
def test_the_loss_has_the_weighted_sum_of_the_divergences(level: str, way: str, exact: Exact, backend: str) -> None:
    data, (preset, changes) = Data(), WAYS[way]
    objective = Objective.preset(preset, **{"beta": 0.3, **changes}, kl=exact)
    given: dict[str, Any] = {"options": Options(backend=backend)}
    if way.startswith("sets"):
        given["kept"] = build([sorted({int(y), 2, 5, 8 + i}) for i, y in enumerate(data.targets.reshape(-1))])
        over = "kept" if way == "sets" else "vocabulary"
        given["options"] = Options(backend=backend, reference_over=over)
    wide = leaves(data, level, torch.float64)
    logits = wide[0] @ wide[1].T if level == "hidden" else wide[0]
    per_token = data.expected(exact, logits, given.get("kept") if way == "sets" else None)
    term = objective.beta * per_token.sum() / MASK.sum()
    expected = torch.autograd.grad(term, wide)
    ours, without = leaves(data, level, torch.float32), leaves(data, level, torch.float32)
    out = loss(data, level, ours, objective, True, **given)
    out.loss.backward()
    assert out.divergence is not None
    near(out.divergence, per_token.detach())
    near(out.metrics["kl"], per_token[MASK].mean().detach())
    if preset == "distillation":
        near(out.loss.detach(), term.detach())
        plain = [0.0] * len(ours)
    else:
        alone = loss(data, level, without, Objective.preset(preset), False, **given)
        alone.loss.backward()
        near((out.loss - alone.loss).detach(), term.detach(), 1e-4)
        plain = [x.grad for x in without]  # type: ignore[misc]
    for mine, theirs, exactly in zip(ours, plain, expected, strict=True):
        near(mine.grad - theirs, exactly, 5e-5)  # type: ignore[operator]


@pytest.mark.parametrize("level", ["hidden", "logits"])
@pytest.mark.parametrize("exact", KINDS, ids=lambda e: e.direction)
def test_values_of_each_token(exact: Exact, level: str, backend: str) -> None:
    data, upstream = Data(), torch.rand(B, T)
    wide, ours = leaves(data, level, torch.float64), leaves(data, level, torch.float32)
    per_token = data.expected(exact, wide[0] @ wide[1].T if level == "hidden" else wide[0])
    given: dict[str, Any] = {"mask": MASK, "transform": STUDENT, "options": Options(backend=backend)}
    if level == "hidden":
        values = linear_divergence(*ours, data.reference(), exact, **given)
    else:
        values = token_divergence(*ours, data.of_logits(), exact, **given)
    near(values.detach(), per_token.detach())
    expected = torch.autograd.grad((per_token * upstream).sum(), wide)
    for mine, exactly in zip(torch.autograd.grad((values * upstream).sum(), ours), expected, strict=True):
        near(mine, exactly)


def test_each_teacher_costs_a_product_of_the_rows_that_it_has_a_weight_in(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is made in the forward, and of neither stream more than a chunk of logits exists."""
    in_chunks(monkeypatch, 4)
    data, counts = Data(), count_products(monkeypatch)
    ours = leaves(data, "hidden", torch.float32)
    with Allocations() as seen:
        loss(data, "hidden", ours, Objective.preset("distillation"), True, backend=backend).loss.backward()
    read, of_teachers = int(MASK.sum()), int(MASK.sum() + MASK[[0, 2]].sum() + MASK[1:].sum())
    assert counts == {"logits": read + of_teachers, "d_hidden": read, "d_weight": read}
    assert max(math.prod(shape) for shape in seen.shapes) <= max(4 * V, V * H)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_16_bits(dtype: torch.dtype, backend: str) -> None:
    data, objective = Data(), Objective.preset("distillation")
    logits = (data.hidden @ data.weight.T).to(dtype)
    wide, ours = logits.double().requires_grad_(), logits.clone().requires_grad_()
    per_token = data.expected(Exact(), wide)
    (expected,) = torch.autograd.grad(per_token.sum() / MASK.sum(), wide)
    out = loss(data, "logits", [ours], objective, True, backend=backend)
    out.loss.backward()
    near(out.divergence, per_token.detach())
    near(ours.grad, expected, 1e-2)  # type: ignore[arg-type]
    if dtype == torch.bfloat16:
        again = logits.clone().requires_grad_() * 1.0
        again.retain_grad()
        inplace = loss(data, "logits", [again], objective, True, backend=backend, inplace=True)
        inplace.loss.backward()
        assert torch.equal(again.grad, ours.grad)  # type: ignore[arg-type]


def test_a_teacher_known_at_some_ids_among_others(backend: str) -> None:
    data = Data()
    values, ids = torch.log_softmax(data.ref_logits[0], -1).reshape(N, V).topk(4)
    sets = TokenSets.from_padded(ids, values=values)
    ours = (data.hidden @ data.weight.T).requires_grad_()
    objective = Objective.preset("distillation")
    batch = TokenBatch(data.targets, data.advantages, mask=MASK)
    out = grpo_loss(ours, batch, objective, ref_logits=[(sets, 0.5), (data.ref_logits[2], 2.0)], backend=backend)
    out.loss.backward()
    wide = ours.detach().double().requires_grad_()
    log_p = torch.log_softmax(wide, -1)
    of_sets = of_listed_ids(Exact(), log_p.reshape(N, V), sets)
    whole = oracle.divergence(log_p, torch.log_softmax(data.ref_logits[2].double(), -1), "reverse", 0.0)
    per_token = torch.where(MASK, 0.5 * of_sets.view(B, T) + 2.0 * whole, 0.0)
    near(out.divergence, per_token.detach())
    near(ours.grad, torch.autograd.grad(per_token.sum() / MASK.sum(), wide)[0])  # type: ignore[arg-type]


def test_the_gradient_of_the_weight_goes_where_it_is_asked_to(backend: str) -> None:
    data = Data()
    for objective in (Objective.preset("distillation"), Objective.preset("gspo", beta=0.3, kl=Exact())):
        ours, others = leaves(data, "hidden", torch.float32), leaves(data, "hidden", torch.float32)
        memory = torch.ones(V, H)
        loss(data, "hidden", ours, objective, True, backend=backend).loss.backward()
        loss(data, "hidden", others, objective, True, backend=backend, weight_grad=memory).loss.backward()
        assert others[1].grad is None
        near(memory - 1.0, ours[1].grad.double(), 1e-5)  # type: ignore[union-attr]


def test_one_teacher_of_weight_one_is_that_teacher(backend: str) -> None:
    data, given = Data(), {"mask": MASK, "options": Options(backend=backend)}
    logits = data.hidden @ data.weight.T
    one = token_divergence(logits, data.ref_logits[0], **given)
    assert torch.equal(token_divergence(logits, [(data.ref_logits[0], 1.0)], **given), one)
    # A transform of torch.func takes the way of autograd.
    by_func = torch.func.grad(lambda x: token_divergence(x, [(data.ref_logits[0], 2.0)], **given).sum())(logits)
    leaf = logits.clone().requires_grad_()
    token_divergence(leaf, [(data.ref_logits[0], 2.0)], **given).sum().backward()
    assert torch.equal(by_func, leaf.grad)


DATA = Data()
ONE = DATA.teachers[0]
BAD: dict[str, tuple[Any, str]] = {
    "no teacher": ([], r"reference=\[\]: a list of teachers holds at least one pair"),
    "no weight": ([ONE[0]], r"reference\[0\] is Tensor: a list of teachers holds pairs \(teacher, weight\)"),
    "a list in a list": ([([(ONE, 1.0)], 1.0)], r"reference\[0\] is tuple: a list of teachers holds pairs"),
    "a negative weight": ([(ONE, 1.0), (ONE, -0.5)], r"reference\[1\]\[1\]=-0\.5: the weight of a teacher is a finite number >= 0"),
    "a weight without a number": ([(ONE, "half")], r"reference\[0\]\[1\]='half'"),
    "a weight that is NaN": ([(ONE, torch.tensor([1.0, math.nan, 1.0]))], r"reference\[0\]\[1\]=nan: weights of teachers are finite"),
    "weights of other rows": ([(ONE, torch.ones(B, T + 1))], r"reference\[0\]\[1\] has shape \[3, 5\]"),
    "another vocabulary": ([(ONE, 1.0), ((ONE[0], ONE[1][:-1]), 1.0)], r"reference has a vocabulary of 40, but the policy has 41"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_lists_of_teachers_are_refused(name: str) -> None:
    reference, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        linear_grpo_loss(DATA.hidden, DATA.weight, DATA.batch(), Objective.preset("distillation"), reference=reference)


def test_logits_that_are_needed_again_are_not_written_over() -> None:
    logits, gspo = (DATA.hidden @ DATA.weight.T), Objective.preset("gspo", beta=0.3, kl=Exact())
    with pytest.raises(ValueError, match=r"inplace=True, but beside several teachers"):
        grpo_loss(logits, DATA.batch(), gspo, ref_logits=[(DATA.ref_logits[0], 1.0)], inplace=True)
    with pytest.raises(ValueError, match=r"inplace=True, but each of several teachers"):
        token_divergence(logits, [(DATA.ref_logits[0], 1.0)], inplace=True)
    with pytest.raises(ValueError, match=r"reference is list: pass \(hidden, weight\)"):
        linear_grpo_loss(DATA.hidden, DATA.weight, DATA.batch(), Objective.preset("dapo", beta=0.1), reference=[(ONE, 1.0)])
