"""Rows whose numbers must keep their digits or be what torch has, kept sets, further ids, second distributions, and gradients of a
head from few columns of each row: what their float64 answers in test_combinations.py do not ask."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from grpo_kernels import (
    Exact,
    Head,
    LogitTransform,
    Objective,
    Options,
    Sparse,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_grpo_loss,
    token_divergence,
    token_logprobs,
)
from grpo_kernels.batch import shift_targets
from grpo_kernels.formulas.surrogates import PolicyGradient
from grpo_kernels.losses import objective_loss
from support.bits import same_bits
from support.doors import batch_of, by_func, call_of, compare, leaves_of, named, objective_of, pull, run
from support.inside import drawn_columns, in_chunks
from support.oracle import listed_divergence
from support.recipes import DTYPES, Recipe, legal, problem


@pytest.mark.slow
def test_more_than_2_to_the_31_logits(backend):
    """Rows behind the offsets that 32 bits hold."""
    logits = torch.zeros(1, 1, dtype=torch.bfloat16).expand(2**16 + 2, 2**15).clone()
    logits[-1, -1] = 9.0
    ids = torch.full((len(logits),), 2**15 - 1)
    with torch.no_grad():
        found = token_logprobs(logits, ids, options=Options(backend=backend))[0]
    exact = logits[-2:].double().log_softmax(-1)[:, -1]
    torch.testing.assert_close(found[-2:].double(), exact, rtol=1e-6, atol=1e-6)


# ---- sets


def test_metrics_of_sets():
    """Targets that missing="mask" takes out are counted; the kept mass is that of rows that have a set."""
    logits, mask = torch.randn(4, 6), torch.tensor([True, True, True, False])
    sets = TokenSets.from_lists([[1, 3], [3], [], [3]])
    batch = TokenBatch(
        torch.tensor([1, 2, 4, 5]), torch.ones(4), mask=mask, ref_logps=torch.randn(4), kept=sets, missing="mask"
    )
    options = Options(entropy_over="vocabulary", reference_over="vocabulary")
    out = grpo_loss(logits, batch, Objective.preset("dapo", beta=0.1, kl="k1"), options=options)
    assert float(out.metrics["outside_set"]) == pytest.approx(1 / 3) and int(out.metrics["tokens"]) == 2
    assert float(out.metrics["kept_mass"]) == pytest.approx(float(logits[0].softmax(0)[[1, 3]].sum()), rel=1e-5)
    kl = logits.log_softmax(1)[[0, 2], [1, 4]] - batch.ref_logps[[0, 2]]
    assert float(out.metrics["kl"]) == pytest.approx(float(kl.mean()), rel=1e-5)


def test_sets_that_were_not_shifted_are_warned_of_once(monkeypatch):
    """From the second reading of metrics on; never of few targets, or where a few are outside."""
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    monkeypatch.setattr("grpo_kernels.set_alignment._earlier", None)
    ids, completion = torch.randint(3, 40, (4, 60)), torch.arange(60).expand(4, 60) >= 10
    records = [[[int(i), (int(i) + 7) % 40] for i in row[10:]] for row in ids]
    targets, generated = shift_targets(ids, mask=completion)

    def metrics(marked, rows=slice(None), changed=0):
        lists = [[*row] for row in records]
        for row in lists[:changed]:
            row[4] = [1]
        kept = TokenSets.from_lists(lists[rows], generated=marked[rows])
        batch = TokenBatch(targets[rows], torch.ones(4)[rows], mask=generated[rows], kept=kept)
        return grpo_loss(torch.randn(4, 60, 40)[rows], batch, Objective.preset("dapo")).metrics

    with warnings.catch_warnings(action="error"):
        for _ in range(2):
            assert metrics(generated)["outside_set"] == 0
            assert metrics(generated, changed=4)["outside_set"] == 4 / 200
            assert metrics(completion, slice(0, 1))["outside_set"] > 0.5  # of 50 targets
        assert metrics(completion)["outside_set"] > 0.5
    with pytest.warns(RuntimeWarning, match=r"\d\d% of the targets.*shift_targets.*generated=generated"):
        metrics(generated)
    with warnings.catch_warnings(action="error"):
        metrics(completion), metrics(completion)


# ---- further ids


REINFORCE = Objective(PolicyGradient(), aggregate="token-sum")
LISTS = TokenSets.from_lists([[7], [7, 9]], values=[[0.999], [1.0, -2.0]])
TEACHER = LISTS.with_values(torch.full((3,), -1.5))
#: The logit of the likely id 7 and its dtype, how near the gradient has to be, a call, and what it is of float64 log-probs.
CERTAIN = {
    "further ids": (
        13.0, torch.bfloat16, 2**-8,
        lambda z, o: token_logprobs(z, torch.tensor([3, 3]), at=LISTS, options=o).also["at"] @ torch.tensor([1.0, 1.0, -1.0]),
        lambda log_p: log_p[0, 7] + log_p[1, 7] - log_p[1, 9],
    ),
    "terms beside the targets": (
        10.6, torch.bfloat16, 2**-8,
        lambda z, o: grpo_loss(z, TokenBatch(torch.tensor([7, 7]), torch.ones(2), logp_terms=LISTS), REINFORCE, options=o).loss,
        lambda log_p: (0.999 - 1.0) * log_p[0, 7] - 2 * log_p[1, 9],
    ),
    "a listed teacher": (
        16.0, torch.float32, 1e-5, lambda z, o: token_divergence(z, TEACHER, Exact(tail="bin"), options=o).sum(),
        lambda log_p: listed_divergence(log_p, torch.full((2, 40), -1.5).double(), [[7], [7, 9]], "reverse", 0.0, "bin").sum(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CERTAIN)
def test_slopes_at_ids_of_a_certain_row_keep_their_digits(name, backend):
    """1 - p of an id is the probability of all others, of which fp32 has more digits than of a sum near 1; and what cancels in a
    sum of slopes does so before they are rounded."""
    likely, dtype, rtol, ours, exact = CERTAIN[name]
    leaf = torch.zeros(2, 40).index_fill(1, torch.tensor(7), likely).to(dtype).requires_grad_()
    z = leaf.detach().double().requires_grad_()
    ours(leaf, Options(backend)).backward()
    exact(z.log_softmax(1)).backward()
    torch.testing.assert_close(leaf.grad.double(), z.grad, rtol=rtol, atol=1e-12)


def test_the_largest_probability_and_its_id(backend):
    """Of ties the first; of a row of only -inf NaN; over a set the set's; of a masked row none."""
    logits = torch.randn(5, 50)
    logits[1, [7, 30]] = logits[1].max() + 1
    logits[3] = -torch.inf
    asked = {
        "kept": TokenSets.from_lists([[], [], [4, 9, 2], [], []]),
        "mask": torch.arange(5) < 4,
        "also": ("top_prob", "top_id"),
    }
    more = token_logprobs(logits, torch.tensor([0, 1, 4, 3, 4]), options=Options(backend=backend), **asked).also
    p, in_set = logits.double().softmax(1), logits[2, [4, 9, 2]].double().softmax(0)
    assert more["top_id"].tolist() == [int(p[0].argmax()), 7, [4, 9, 2][int(in_set.argmax())], 0, -1]
    wanted = torch.stack([p[0].max(), p[1].max(), in_set.max()])
    torch.testing.assert_close(more["top_prob"][:3].double(), wanted, rtol=2e-6, atol=0)
    assert more["top_prob"][3].isnan() and more["top_prob"][4] == 0


# ---- second distributions


def test_logits_with_None_as_their_transform_have_none():
    """And not that of the policy, also as one of a list."""
    logits, other, divergence = torch.randn(3, 5), torch.randn(3, 5), Exact("reverse")
    for wrap in (lambda x: x, lambda x: [(x, 0.5)]):
        found, wanted = (
            token_divergence(logits, wrap((other, own)), divergence, transform=LogitTransform(2.0))
            for own in (None, LogitTransform())
        )
        assert same_bits(found, wanted) and not same_bits(found, torch.zeros(3))


@pytest.mark.parametrize(
    "over, rows", [("kept", None), ("vocabulary", None), ("kept", torch.arange(10).view(2, 5) // 2)], ids=str
)
def test_a_head_of_the_reference_stands_for_its_log_probs(over, rows, backend):
    """For an estimate of the KL: a forward product in place of batch.ref_logps, under a transform of its own, over sets or not, of
    rows that tokens share or not."""
    hidden, weight, other = torch.randn(2, 5, 8), torch.randn(30, 8), torch.randn(30, 8)
    of_tokens = hidden if rows is None else hidden.flatten(0, 1)[rows]
    targets, advantages = torch.randint(30, (2, 5)), torch.tensor([1.0, -1.0])
    objective = Objective.preset("dapo", beta=0.3)
    sets = TokenSets.from_lists([[int(t), (int(t) + 3) % 30] if i % 2 else [] for i, t in enumerate(targets.flatten())])
    own, options = LogitTransform(0.6), Options(reference_over=over, backend=backend)
    ref = token_logprobs(of_tokens @ other.T, targets, kept=sets if over == "kept" else None, transform=own)[0]
    found, wanted = (hidden.clone().requires_grad_() for _ in range(2))
    of_head, given = (TokenBatch(targets, advantages, ref_logps=x, kept=sets, rows=rows) for x in (None, ref))
    a = linear_grpo_loss(found, weight, of_head, objective, reference=(hidden, Head(other, transform=own)), options=options)
    b = linear_grpo_loss(wanted, weight, given, objective, options=options)
    (a.loss + b.loss).backward()
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)


def test_a_reference_that_was_made_in_inference_mode_or_written_to(backend):
    with torch.inference_mode():
        w = torch.randn(2, 3, 9)
    leaf = torch.randn(2, 3, 9, requires_grad=True)
    token_divergence(leaf, w, options=Options(backend=backend)).sum().backward()
    assert leaf.grad is not None and leaf.grad.any()
    second = torch.randn(2, 3, 9)
    value = token_divergence(leaf, second, options=Options(backend=backend)).sum()
    second.zero_()
    with pytest.raises(RuntimeError, match="was written to between forward and backward"):
        value.backward()


# ---- gradients of a head from few columns of each row


STEP, SEED = 0.02, 5
ROWS = Recipe(door="logprobs", source="hidden", lengths=(24,), bias="plain", width=16, vocab=300, spread=2.0, seed=34)


def drawn(recipe, backend, step=STEP, seed=SEED, first_row=0, **how):
    """The gradients from few columns."""
    p = problem(recipe) if isinstance(recipe, Recipe) else recipe
    return run(p, backend=backend, sparse=Sparse(step, seed, first_row), **how).gradients


def assert_near(ours, exact, tolerance, sizes=None):
    """Within `tolerance` of the largest element, or of the largest sum of absolute terms where these are given."""
    assert ours.keys() == exact.keys()
    for name, x in exact.items():
        size = (sizes or exact)[name].abs().max()
        assert (ours[name].double() - x.double()).abs().max() <= tolerance * size, name


def assert_same(ours, others):
    assert ours.keys() == others.keys() and all(same_bits(x, others[name]) for name, x in ours.items())


@pytest.mark.parametrize("first_row", [0, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_that_is_drawn_counts_with_the_larger_of_its_probability_and_the_step(dtype, first_row, backend):
    """In float64, from the columns that the backend draws; the target's with its own probability."""
    p = problem(replace(ROWS, dtype=dtype))
    (hidden, weight, bias), live = (x.double() for x in p.clean.values()), p.trained
    hidden = hidden.flatten(0, -2)
    logits = hidden @ weight.T + bias
    logp, taken = logits.log_softmax(-1), drawn_columns(logits.float(), p.ids, backend, STEP, SEED, first_row)
    assert 0.02 < taken[live].double().mean() < 0.6
    own = torch.nn.functional.one_hot(p.ids, 300).bool()
    w = torch.where(own, logp.exp(), logp.exp().clamp(min=STEP)) * taken
    entropy = -(logp.exp() * logp).sum(-1, keepdim=True)
    d_logps, d_entropy = (p.upstream[name].reshape(-1, 1) for name in ("logps", "entropy"))
    g = d_logps * (own.double() - w) - d_entropy * w * (logp + entropy)
    g = torch.where(live[:, None], g, 0.0)
    exact = {"hidden": (g @ weight).view(p.clean["hidden"].shape), "weight": g.T @ hidden, "bias": g.sum(0)}
    # A dtype of 16 bits rounds g and the result; fp32 rounds logits, probabilities and sums.
    sizes = {"hidden": g.abs() @ weight.abs(), "weight": g.abs().T @ hidden.abs(), "bias": g.abs().sum(0)}
    tolerance = {"float32": 16 * 2.0**-24, "bfloat16": 2 * 2.0**-9, "float16": 2 * 2.0**-12}[dtype]
    assert_near(drawn(p, backend, first_row=first_row), exact, tolerance, sizes)


def test_a_seed_draws_the_same_columns_whatever_else_changes(backend, monkeypatch):
    """Again, from a tensor that is read at the time, under checkpointing, by torch.func, in other memory, masked rows of NaN all
    the while; another seed draws others."""
    seed, found = torch.tensor(SEED), drawn(ROWS, backend)
    assert_same(drawn(ROWS, backend), found)
    assert_same(drawn(ROWS, backend, seed=seed), found)
    seed.fill_(SEED + 1)
    other = drawn(ROWS, backend, seed=seed)
    assert_same(other, drawn(ROWS, backend, seed=SEED + 1))
    assert not any(same_bits(found[name], other[name]) for name in found)
    assert_same(drawn(ROWS, backend, call=by_func), found)
    assert_same(drawn(ROWS, backend, call=lambda f: lambda *x: checkpoint(f, *x, use_reentrant=False)), found)
    for view in ("transposed", "rows apart"):
        assert_same(drawn(replace(ROWS, view=view), backend), found)
    in_chunks(monkeypatch, 5)
    torch.set_num_threads(3)
    assert_near(drawn(ROWS, backend), found, 1e-5)


@pytest.mark.parametrize("objective", ["grpo, k3 and entropy", "gspo", "reinforce"])
def test_a_loss_has_the_values_of_the_dense_one_and_the_gradient_of_its_log_probs(objective, backend):
    """Of reinforce rows without an advantage have no gradient, and come behind the others."""
    p = problem(
        replace(ROWS, door="loss", also="nothing", objective=objective, lengths=(2,) * 12, layout="packed", given="column")
    )
    assert not p.seen["advantages"].all()
    options = {"backend": backend, "sparse": Sparse(STEP, SEED)}
    found, leaves = run(p, **options), leaves_of(p)
    compare(p, replace(found, gradients=run(p, backend=backend).gradients))
    alone = named(call_of(replace(p, recipe=replace(p.recipe, door="logprobs", also="entropy")), **options)(*leaves.values()))
    pull(p, {"loss": objective_loss(alone["logps"], batch_of(p), objective_of(p.recipe), entropy=alone["entropy"]).loss})
    assert_same({name: x.grad for name, x in leaves.items() if x.grad is not None}, found.gradients)


def test_rows_with_sets_go_their_own_way(backend):
    p = problem(legal(replace(ROWS, kept="some")))
    has, parts = torch.tensor([bool(ids) for ids in p.sets or []]).view(p.shape), []
    for rows, how in ((has, {}), (~has, {"sparse": Sparse(STEP, SEED)})):
        some = {name: torch.where(rows, p.upstream[name], 0.0) for name in ("logps", "entropy")}
        parts.append(run(replace(p, upstream=some), backend=backend, **how).gradients)
    assert_near(drawn(p, backend), {name: x + parts[1][name] for name, x in parts[0].items()}, 1e-6)
