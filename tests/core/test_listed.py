"""Terms in the log-probs of listed ids, against float64 and autograd."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_kernels import (
    Cispo,
    Clip,
    ClipCov,
    Exact,
    ImportanceSampling,
    LogitTransform,
    Objective,
    Options,
    Sparse,
    TokenBatch,
    TokenSets,
    TrustRegion,
    grpo_loss,
    linear_grpo_loss,
    token_logprobs,
)
from grpo_kernels.distributed import VocabShard
from grpo_kernels.formulas.centering import ScoreCentering
from grpo_kernels.formulas.surrogates import NoPolicyTerm, PolicyGradient
from grpo_kernels.losses import objective_loss
from grpo_kernels.rows import stream
from support import pages
from support.inside import count_products, in_chunks

Tensor = torch.Tensor
B, T, V, H = 4, 5, 61, 8
MODULE = "test_listed"
MASK = torch.arange(T) < torch.tensor([5, 3, 0, 4])[:, None]


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, TokenBatch]:
    """Hidden states, a weight, and a batch in which some rows list no id, some their target, and one sequence has no advantage."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = 2 * torch.randn(B, T, H, generator=g), torch.randn(V, H, generator=g)
    targets = torch.randint(V, (B, T), generator=g)
    lists = [torch.randperm(V, generator=g)[: i % 7 * (i != 16)].tolist() for i in range(B * T)]
    for i in (1, 3, 10, 17):
        lists[i] = [int(targets.view(-1)[i]), *(x for x in lists[i] if x != int(targets.view(-1)[i]))][: i % 7]
    sets = TokenSets.from_lists(lists)
    c, r = torch.randn(2, sets.ids.numel(), generator=g)
    old = (hidden @ weight.t()).log_softmax(-1).gather(-1, targets[..., None])[..., 0] - 0.1 * torch.randn(B, T, generator=g)
    batch = TokenBatch(
        targets, torch.tensor([1.0, -0.7, 0.4, 0.0]), mask=MASK, old_logps=old, weights=torch.rand(B, T, generator=g),
        logp_terms=sets.with_values(c), prob_terms=sets.with_values(r),
    )  # fmt: skip
    return hidden.to(dtype), weight.to(dtype), batch


def terms_of(batch: TokenBatch, log_p: Tensor, advantages: Tensor, function: Any = None) -> Tensor:
    """[n], of log-probs [n, V]: both forms, by their definition."""
    total = torch.zeros(len(log_p), dtype=torch.float64)
    for name, form in (("logp_terms", function or (lambda x, v, a: v * x)), ("prob_terms", lambda x, v, a: v * x.exp())):
        sets = getattr(batch, name)
        for i in range(len(log_p) if sets is not None else 0):
            span = slice(int(sets.offsets[i]), int(sets.offsets[i + 1]))
            total[i] = total[i] + form(log_p[i, sets.ids[span].long()], sets.values[span].double(), advantages[i]).sum()
    return total


def exact(logits: Tensor, batch: TokenBatch, level: str, bonus: float = 0.0, function: Any = None) -> Tensor:
    """The loss in float64."""
    log_p = logits.reshape(B * T, V).log_softmax(-1)
    mask, A = MASK.reshape(-1), batch.advantages[:, None].expand(B, T).reshape(-1).double()
    w = batch.weights.reshape(-1).double()  # type: ignore[union-attr]
    logp = log_p.gather(1, batch.targets.reshape(-1, 1))[:, 0]
    old = logp.detach() if batch.old_logps is None else batch.old_logps.reshape(-1).double()
    x = torch.where(mask, logp - old, 0.0)
    if level == "sequence":
        lengths = MASK.sum(1).clamp(min=1)
        x = (x.view(B, T).sum(1) / lengths)[:, None].expand(B, T).reshape(-1)
    policy = -torch.min(x.exp() * A, x.exp().clamp(0.8, 1.2) * A)
    entropy = -(log_p.exp() * log_p).sum(1)
    loss = w * (policy + terms_of(batch, log_p, A, function)) - bonus * entropy
    return torch.where(mask, loss, 0.0).sum() / mask.sum()


def objective(level: str, **more: Any) -> Objective:
    return replace(Objective.preset("grpo"), level=level, aggregate="token-mean", **more)


WAYS = [("logits", "token"), ("hidden", "token"), ("logits", "sequence"), ("hidden", "sequence")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bonus", [0.0, 0.1], ids=["", "bonus"])
@pytest.mark.parametrize(("source", "level"), WAYS)
def test_value_and_gradient(
    source: str, level: str, bonus: float, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks(monkeypatch, 4)
    hidden, weight, batch = case(dtype)
    transform = LogitTransform(temperature=0.8, softcap=20.0)
    spec, options = objective(level, entropy_coef=bonus), Options(backend)
    given = (hidden, weight) if source == "hidden" else ((hidden @ weight.t()),)
    ours = [x.clone().requires_grad_() for x in given]
    call = linear_grpo_loss if source == "hidden" else grpo_loss
    out = call(*ours, batch, spec, transform=transform, options=options)  # type: ignore[operator]
    (2.0 * out.loss).backward()
    theirs = [x.double().requires_grad_() for x in given]
    z = theirs[0] @ theirs[1].t() if source == "hidden" else theirs[0]
    loss = exact(20.0 * torch.tanh(z / 20.0) / 0.8, batch, level, bonus)
    (2.0 * loss).backward()
    room = 2e-6 if dtype == torch.float32 else 2.0**-7
    assert abs(float(out.loss) - float(loss)) < 2e-5
    for x, y in zip(ours, theirs, strict=True):
        assert x.grad is not None and y.grad is not None and not x.grad[~MASK].any() if x is ours[0] else True
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=0, atol=room * float(y.grad.abs().max()))  # type: ignore[union-attr]


@pytest.mark.parametrize("teachers", ["whole", "several", "known", "kept", "kept, over all", "shared", "kept, shared"])
@pytest.mark.parametrize(("source", "level"), WAYS)
def test_beside_a_divergence(source: str, level: str, teachers: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone, added up."""
    in_chunks(monkeypatch, 4)
    (hidden, weight, batch), from_hidden = case(), source == "hidden"
    sets, noise = batch.logp_terms, torch.randn(2, B, T, H, generator=torch.Generator().manual_seed(4))
    assert sets is not None
    leaves = (hidden, weight) if from_hidden else (hidden @ weight.t(),)
    near, far = ((hidden + x, weight) if from_hidden else (hidden + x) @ weight.t() for x in noise)
    known = TokenSets((sets.ids + 5) % V, sets.offsets, torch.full(sets.ids.shape, -2.5))
    given: Any = {"several": [(near, 0.5), (known, 0.7), (far, torch.rand(B, T))], "known": known}.get(teachers, near)
    options = Options(backend, reference_over="vocabulary" if "all" in teachers else "kept")
    if "kept" in teachers:
        of_rows = zip(batch.targets.view(-1).tolist(), sets.ids.split(sets.counts.tolist()), strict=True)
        lists = [[*{t, *ids.tolist()}] * (i % 5 != 2) for i, (t, ids) in enumerate(of_rows)]
        batch = replace(batch, kept=TokenSets.from_lists(lists))
    if "shared" in teachers:
        batch = replace(batch, rows=torch.arange(B * T).view(B, T) // 3, old_logps=None)

    def gradients(batch: TokenBatch, spec: Objective) -> tuple[Tensor, ...]:
        ours, second = [x.clone().requires_grad_() for x in leaves], {"reference" if from_hidden else "ref_logits": given}
        call: Any = linear_grpo_loss if from_hidden else grpo_loss
        return torch.autograd.grad(call(*ours, batch, spec, options=options, **(second if spec.exact else {})).loss, ours)

    plain, without = objective(level), replace(batch, logp_terms=None, prob_terms=None)
    for kl in (Exact("jsd"), Exact("reverse")) if teachers in ("whole", "kept") else (Exact("forward"),):
        alone = Objective(NoPolicyTerm(), kl=kl, beta=0.3, aggregate="token-mean")
        parts = zip(gradients(batch, plain), gradients(without, alone), strict=True)
        for x, (y, z) in zip(gradients(batch, replace(plain, kl=kl, beta=0.3)), parts, strict=True):
            torch.testing.assert_close(x, y + z, rtol=0, atol=2e-6 * float((y + z).abs().max()))


@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_where_the_host_does_not_know_counts_the_numbers_are_the_same(
    source: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose rows are not cut out."""
    in_chunks(monkeypatch, 4)
    monkeypatch.setitem(stream.BLOCK_BYTES, "cpu", 4 * 3 * V)
    found = []
    for known in (("cpu",), ()):
        monkeypatch.setattr(stream, "READ_AT_ONCE", known)
        hidden, weight, batch = case()
        given = (hidden, weight) if source == "hidden" else (hidden @ weight.t(),)
        leaves = [x.requires_grad_() for x in given]
        call = linear_grpo_loss if source == "hidden" else grpo_loss
        out = call(*leaves, batch, objective("token", entropy_coef=0.1), options=Options(backend))  # type: ignore[operator]
        out.loss.backward()
        found.append([out.loss, out.logps, *(x.grad for x in leaves)])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_rows_in_products(frozen: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products, two with a frozen head. Of the sequence without an advantage those rows have a gradient that list ids."""
    in_chunks(monkeypatch, 4)
    hidden, weight, batch = case()
    assert batch.logp_terms is not None
    lists = (batch.logp_terms.counts > 0).view(B, T) & MASK
    active = int(((batch.advantages != 0)[:, None] & MASK | lists).sum())
    assert int(((batch.advantages != 0)[:, None] & MASK).sum()) < active < int(MASK.sum())
    rows = count_products(monkeypatch)
    leaves = hidden.requires_grad_(), weight.requires_grad_(not frozen)
    linear_grpo_loss(*leaves, batch, objective("token"), options=Options(backend)).loss.backward()
    assert +rows == +Counter({"logits": int(MASK.sum()), "d_hidden": active, "d_weight": 0 if frozen else active})


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_over_kept_sets(source: str, level: str, backend: str) -> None:
    """A row without a set runs over the vocabulary."""
    hidden, weight, batch = case()
    logits, lists = hidden @ weight.t(), batch.logp_terms
    assert lists is not None
    every = [[*lists.ids[lists.row_of == i].tolist(), *range(i % 5)] for i in range(B * T)]
    kept = TokenSets.from_lists(
        [sorted({int(t), *ids}) if ids else [] for t, ids in zip(batch.targets.view(-1), every, strict=True)]
    )
    batch = replace(batch, kept=kept, old_logps=None)
    given = (hidden, weight) if source == "hidden" else (logits,)
    ours, theirs = ([x.to(d, copy=True).requires_grad_() for x in given] for d in (torch.float32, torch.float64))
    call = linear_grpo_loss if source == "hidden" else grpo_loss
    out = call(*ours, batch, objective(level), options=Options(backend))  # type: ignore[operator]
    out.loss.backward()
    z = theirs[0] @ theirs[1].t() if source == "hidden" else theirs[0]
    inside = kept.mask(V) | (kept.counts == 0)[:, None]
    loss = exact(torch.where(inside.view(B, T, V), z, -1e4), batch, level)
    loss.backward()
    assert abs(float(out.loss) - float(loss)) < 1e-5
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=0, atol=2e-6 * float(y.grad.abs().max()))  # type: ignore[union-attr]


def test_values_are_combined_before_they_are_rounded(backend: str) -> None:
    """A target of probability .999 that is listed, in bf16: 1 - p keeps its digits, and so does a sum of two slopes that cancel."""
    logits = torch.zeros(2, 40)
    logits[:, 7] = 10.6
    sets = TokenSets.from_lists([[7], [7, 9]], values=[[0.999], [1.0, -2.0]])
    batch = TokenBatch(torch.tensor([7, 7]), torch.ones(2), logp_terms=sets)
    leaf = logits.bfloat16().requires_grad_()
    grpo_loss(leaf, batch, Objective(PolicyGradient(), aggregate="token-sum"), options=Options(backend)).loss.backward()
    z = leaf.detach().double().requires_grad_()
    log_p = z.log_softmax(1)
    (-log_p[0, 7] - log_p[1, 7] + 0.999 * log_p[0, 7] + log_p[1, 7] - 2 * log_p[1, 9]).backward()
    torch.testing.assert_close(leaf.grad.double(), z.grad, rtol=2**-8, atol=1e-9)  # type: ignore[union-attr]


def test_a_function_of_ones_own(backend: str) -> None:
    """In place of c log p: KL to what is listed, over the ids alone, times the advantage; and over given memory the same."""

    def kl(logp: Tensor, values: Tensor, advantage: Tensor, sums: Any) -> tuple[Tensor, Tensor]:
        p = logp.exp()
        return advantage * p * (logp - values), advantage * p * (logp - values + 1.0)

    hidden, weight, batch = case()
    spec = objective("token", listed=kl)
    z = (hidden @ weight.t()).double().requires_grad_()
    exact(z, batch, "token", function=lambda x, v, a: a * x.exp() * (x - v)).backward()
    found = []
    for inplace in (False, True):
        leaf = (hidden @ weight.t()).requires_grad_()
        grpo_loss(leaf * 1.0, batch, spec, inplace=inplace, options=Options(backend)).loss.backward()
        found.append(leaf.grad)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), z.grad, rtol=0, atol=2e-6 * float(z.grad.abs().max()))  # type: ignore[union-attr]


#: A surrogate and a trust region of which either takes some ids of the sampler below and leaves others.
CENTERED: dict[str, tuple[Any, ...]] = {
    "reinforce": (PolicyGradient(),), "tis": (Cispo(1.1),), "both bounds": (Cispo(1.1, 0.9),),
    "icepop": (Cispo(math.inf), TrustRegion("ratio", 0.15, 0.1)), "ipo": (ImportanceSampling(), TrustRegion("symmetric-tv", 0.02, 0.02)),
    "ppo": (Clip(0.1, 0.1),),
}  # fmt: skip


@pytest.mark.parametrize("A", [1.7, -0.6])
@pytest.mark.parametrize("what", CENTERED)
@pytest.mark.parametrize("tail", [False, True], ids=["over all ids", "with a tail"])
def test_score_centering_has_no_drift(tail: bool, what: str, A: float) -> None:
    """The mean of the loss' gradient over the sampler's tokens is 0, though the sampler is not the policy: over all of its ids, or
    over its head where p / q of the tail is one number. Of a token that the trust region drops the centering stays."""
    head, (surrogate, *trust) = 4 if tail else V, CENTERED[what]
    g = torch.Generator().manual_seed(1)
    z = torch.randn(V, generator=g, dtype=torch.float64)
    z[:4] += 4.0
    p, q = z.softmax(0), (z + 0.5 * torch.randn(V, generator=g, dtype=torch.float64)).softmax(0)
    if tail:
        q = torch.cat([q[:head], p[head:] * (1 - q[:head].sum()) / p[head:].sum()])
    sets = TokenSets.from_lists([list(range(head))] * V, values=[q[:head].log().tolist()] * V)
    batch = TokenBatch(torch.arange(V), torch.full((V,), A), old_logps=q.log().float(), logp_terms=sets)
    drift = []
    for listed in (None, ScoreCentering(surrogate, *trust, tail=tail)):
        leaf = z.float().repeat(V, 1).requires_grad_()
        spec = Objective(surrogate, filters=tuple(trust), aggregate="token-sum", listed=listed)
        grpo_loss(leaf, batch if listed else replace(batch, logp_terms=None), spec).loss.backward()
        assert leaf.grad is not None
        drift.append((q[:, None] * leaf.grad).sum(0).abs().max())
    assert drift[1] < 1e-6 < 1e-3 < drift[0]


def test_what_the_page_shows() -> None:
    """docs/listed_ids.md as it stands, in float64: soft targets, a KL that is unbiased whatever the head, a total variation."""
    names, out = pages.given(), {}
    for example in pages.examples(pages.ROOT / "docs" / "listed_ids.md"):
        exec(compile(example.code, example.name, "exec"), names)
        out[len(out)] = names["out"]
    mask, ids, log_q = names["mask"], names["teacher_ids"], names["teacher_logps"].double()
    log_p = (names["hidden"].double() @ names["weight"].double().T).log_softmax(-1).detach()
    of_teacher = log_p.flatten(0, 1).gather(1, ids)
    soft = -(log_q.exp() * of_teacher).sum(1).view(mask.shape)[mask].mean()
    torch.testing.assert_close(out[0].loss.double(), soft, rtol=1e-5, atol=0)
    p, q = of_teacher.exp(), log_q.exp()
    whole = [torch.cat([x, 1 - x.sum(1, keepdim=True)], 1)[mask.view(-1)] for x in (p, q)]
    of_page = [names[name].double()[mask.view(-1)] for name in ("apart", "kl")]
    apart = 0.5 * (whole[0] - whole[1]).abs().sum(1), (whole[1] * (whole[1] / whole[0]).log()).sum(1)
    torch.testing.assert_close(of_page, [*apart], rtol=1e-4, atol=1e-6)

    z, q = torch.randn(2, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64).log_softmax(1)
    exact = z.clone().requires_grad_()
    log_p = exact.log_softmax(0)
    (kl := (log_p.exp() * (log_p - q)).sum()).backward()
    for k in (0, 3, 12):
        top = z.topk(k).indices.tolist()
        lists = [[*top, *[y] * (y not in top)] for y in range(12)]
        values = [[float(q[i]) if i in top else -float(q[i]) for i in row] for row in lists]
        leaf = z.float().repeat(12, 1).requires_grad_()
        batch = TokenBatch(
            torch.arange(12), torch.zeros(12), logp_terms=TokenSets.from_lists(lists, values=values), weights=z.exp().float()
        )
        found = grpo_loss(leaf, batch, Objective(NoPolicyTerm(), aggregate="token-sum", listed=names["top_k_kl"]))
        found.loss.backward()
        torch.testing.assert_close(found.loss.double(), 0.05 * kl.detach(), rtol=1e-5, atol=0)
        torch.testing.assert_close(leaf.grad.double().sum(0), 0.05 * exact.grad, rtol=0, atol=1e-7)  # type: ignore[union-attr]


def check_a_shard_of_the_vocabulary(rank: int, ranks: int) -> None:
    """From logits and hidden states, as one rank has it; also of tokens that share rows, with and without listed ids."""
    hidden, weight, listed = case()
    columns = (slice(0, 44), slice(44, V))[rank]
    shared = replace(listed, rows=torch.arange(B * T).view(B, T) // 3)
    plain = replace(shared, logp_terms=None, prob_terms=None)
    for level, bonus, batch in product(("token", "sequence"), (0.0, 0.1), (listed, shared, plain)):
        spec, found = objective(level, entropy_coef=bonus), []
        for shard in (None, VocabShard(columns.start, V)):
            x, w = hidden.clone().requires_grad_(), (weight if shard is None else weight[columns]).clone().requires_grad_()
            z = (hidden @ weight.t()) if shard is None else (hidden @ weight.t())[..., columns].contiguous()
            z.requires_grad_()
            for out in (
                linear_grpo_loss(x, w, batch, spec, options=Options(shard=shard)),
                grpo_loss(z, batch, spec, options=Options(shard=shard)),
            ):
                out.loss.backward()
            assert w.grad is not None and z.grad is not None
            found.append((out.loss, x.grad, w.grad if shard else w.grad[columns], z.grad if shard else z.grad[..., columns]))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    dist.barrier()


@pytest.mark.parametrize("check", [name for name in list(globals()) if name.startswith("check_")])
def test_on_ranks(on_ranks: Callable[..., dict[str, str]], check: str) -> None:
    assert on_ranks(MODULE, 2)[check] == "ok", on_ranks(MODULE, 2)[check]


def test_refusals() -> None:
    hidden, weight, batch = case()
    sets = batch.logp_terms
    assert sets is not None
    with pytest.raises(ValueError, match=r"logp_terms.*give each id its coefficient"):
        replace(batch, logp_terms=sets.with_values(None))
    with pytest.raises(ValueError, match=r"prob_terms.*list the ids of both in both"):
        replace(batch, prob_terms=TokenSets.from_lists([[1]] * (B * T), values=[[1.0]] * (B * T)))
    with pytest.raises(ValueError, match=r"logp_terms.*19 rows"):
        replace(batch, logp_terms=sets[:-1])
    for call, given in ((grpo_loss, (hidden @ weight.t(),)), (linear_grpo_loss, (hidden, weight))):
        beyond = sets.with_values(sets.values)
        wide = TokenSets(beyond.ids + 30, beyond.offsets, beyond.values)
        with pytest.raises(ValueError, match="logp_terms"):
            call(*given, replace(batch, logp_terms=wide, prob_terms=None), objective("token"))  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"sparse.*logp_terms and prob_terms"):
        linear_grpo_loss(hidden, weight, batch, objective("token"), options=Options(sparse=Sparse(1 / 16)))
    logps, _ = token_logprobs(hidden @ weight.t(), batch.targets)
    with pytest.raises(ValueError, match="objective_loss does not have"):
        objective_loss(logps, batch, objective("token"))
    for wrong in ({"surrogate": "min"}, {"surrogate": ClipCov()}, {"trust": "ratio"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ScoreCentering(**wrong)  # type: ignore[arg-type]
    known = {"ref_logits": sets.with_values(torch.full(sets.ids.shape, -3.0)), "inplace": True}
    with pytest.raises(ValueError, match="inplace=True, but each teacher"):
        grpo_loss(hidden @ weight.t(), batch, Objective.preset("distillation", kl=Exact()), **known)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"listed=.*pass a function"):
        objective("token", listed=ScoreCentering)
    with pytest.raises(ValueError, match="logp_terms is None, but listed"):
        grpo_loss(hidden @ weight.t(), replace(batch, logp_terms=None), objective("token", listed=ScoreCentering()))
    with pytest.raises(ValueError, match="no pair of tensors"):
        grpo_loss(hidden @ weight.t(), batch, objective("token", listed=lambda logp, *_: logp))


def test_a_compiled_call_leaves_the_graph(backend: str) -> None:
    hidden, weight, batch = case()
    spec, options = objective("token"), Options(backend)

    def run(x: Tensor, w: Tensor) -> Tensor:
        return linear_grpo_loss(x, w, batch, spec, options=options).loss

    found = []
    for f in (run, torch.compile(run, backend="eager")):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        f(*leaves).backward()
        found.append([x.grad for x in leaves])
    for x, y in zip(*found, strict=True):
        assert x is not None and y is not None and torch.equal(x, y)


def test_a_batch_moves_with_one_list_of_ids() -> None:
    _, _, batch = case()
    moved = batch._apply(torch.clone)
    assert moved.logp_terms is not None and moved.prob_terms is not None
    assert moved.logp_terms.ids is moved.prob_terms.ids and moved.logp_terms.ids is not batch.logp_terms.ids  # type: ignore[union-attr]
    assert torch.equal(moved.prob_terms.values, batch.prob_terms.values)  # type: ignore[union-attr, arg-type]
