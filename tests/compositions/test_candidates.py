"""Log-probs and divergences over candidate sets against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels import Exact, LogitTransform, Options, TokenSets
from grpo_kernels.candidates import (
    STATISTICS,
    candidate_divergence,
    candidate_logprobs,
    candidate_logprobs_with_extra_ids,
)
from grpo_kernels.inputs import LinearInput, LogitsInput, RowLayout
from support.composition_cases import (
    NUM_ROWS,
    SOURCES,
    VOCAB_SIZE,
    Case,
    assert_matches_float64,
    masked,
    plain_terms,
    random_mask,
    random_sets,
)
from support.row_sources import Float64Source

SIZES = [(1,), (VOCAB_SIZE,), (2, 3), (0, 1, 2, 7, VOCAB_SIZE)]


def plain_candidates(
    logits: Tensor,
    targets: Tensor,
    sets: TokenSets,
    mask: Tensor,
    missing: str,
) -> dict[str, Tensor]:
    """The statistics of `candidate_logprobs` in plain torch, from one row of logits a token."""
    tokens = torch.arange(len(targets))
    is_candidate = sets.mask(VOCAB_SIZE)
    lacks_target = ~is_candidate[tokens, targets]
    has_set = sets.counts > 0
    if missing == "full":
        has_set = has_set & ~lacks_target
    if missing == "mask":
        mask = mask & ~lacks_target
    is_candidate[tokens, targets] = True
    is_candidate = is_candidate | ~has_set[:, None]

    masked_logits = logits.masked_fill(~is_candidate, -torch.inf)
    logps = masked_logits.log_softmax(1)
    probs = logps.exp()
    finite_logps = torch.where(is_candidate, logps, 0.0)
    log_mass = masked_logits.logsumexp(1) - logits.logsumexp(1)
    statistics = {
        "logps": logps[tokens, targets],
        "entropy": -(probs * finite_logps).sum(1),
        "sum_squares": probs.square().sum(1),
        "top_prob": probs.amax(1),
        "top_id": probs.argmax(1),
        "log_kept_mass": torch.where(has_set, log_mass, 0.0),
    }
    return masked(statistics, mask)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("missing", ["include", "full", "mask"])
@pytest.mark.parametrize("shared", [False, True])
def test_statistics(kind, sizes, missing, shared):
    g = torch.Generator().manual_seed(len(sizes) + 7 * len(missing))
    num_tokens = 30 if shared else NUM_ROWS
    targets = torch.randint(VOCAB_SIZE, (num_tokens,), generator=g)
    sets = random_sets(num_tokens, g, sizes)
    mask = random_mask(num_tokens, g)
    given_mask = None if len(sizes) == 2 else mask
    mask = torch.ones_like(mask) if given_mask is None else mask
    rows = torch.randint(NUM_ROWS, (num_tokens,), generator=g) if shared else None
    given_rows = None if rows is None else torch.where(mask, rows, -9)

    def composed(source):
        return candidate_logprobs(
            source,
            torch.where(mask, targets, -9),
            sets,
            mask=given_mask,
            rows=given_rows,
            missing=missing,
            names=STATISTICS,
        )

    def plain(logits):
        rows_of_logits = logits if rows is None else logits[rows]
        return plain_candidates(rows_of_logits, targets, sets, mask, missing)

    assert_matches_float64(Case.from_kind(kind), composed, plain)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("shared", [False, True])
def test_extra_ids_over_candidates(kind, shared):
    """-inf outside of the set; over the vocabulary for tokens without a set."""
    g = torch.Generator().manual_seed(11)
    num_tokens = 30 if shared else NUM_ROWS
    targets = torch.randint(VOCAB_SIZE, (num_tokens,), generator=g)
    sets = random_sets(num_tokens, g, (0, 1, 5, 20))
    extra = random_sets(num_tokens, g, (0, 1, 9))
    mask = random_mask(num_tokens, g)
    rows = torch.randint(NUM_ROWS, (num_tokens,), generator=g) if shared else None

    def composed(source):
        result = candidate_logprobs_with_extra_ids(
            source,
            targets,
            sets,
            extra,
            mask=mask,
            rows=rows,
            names=("log_kept_mass",),
        )
        return {"extra": result.extra_logps, **result.statistics}

    def plain(logits):
        logits = logits if rows is None else logits[rows]
        statistics = plain_candidates(logits, targets, sets, mask, "include")
        is_candidate = sets.mask(VOCAB_SIZE)
        is_candidate[torch.arange(num_tokens), targets] = True
        logps = logits.masked_fill(~is_candidate, -torch.inf).log_softmax(1)
        extra_logps = logps[extra.row_of, extra.ids.long()]
        return {
            "extra": torch.where(mask[extra.row_of], extra_logps, 0.0),
            "logps": statistics["logps"],
            "log_kept_mass": statistics["log_kept_mass"],
        }

    assert_matches_float64(Case.from_kind(kind), composed, plain)


KINDS = [Exact("reverse"), Exact("forward"), Exact("jsd"), Exact("jsd", 0.2), Exact("tv")]


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("exact", KINDS, ids=str)
@pytest.mark.parametrize("with_targets", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_divergence(kind, exact, with_targets, shared):
    g = torch.Generator().manual_seed(5)
    num_tokens = 30 if shared else NUM_ROWS
    sets = random_sets(num_tokens, g, (0, 1, 2, 7, VOCAB_SIZE))
    targets = torch.randint(VOCAB_SIZE, (num_tokens,), generator=g)
    mask = random_mask(num_tokens, g)
    rows = torch.randint(NUM_ROWS, (num_tokens,), generator=g) if shared else None
    reference = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=g, dtype=torch.float64)

    def composed(source):
        divergence = candidate_divergence(
            source,
            Float64Source(reference),
            sets,
            exact,
            targets=targets if with_targets else None,
            mask=mask,
            rows=rows,
        )
        return {"divergence": divergence}

    def plain(logits):
        is_candidate = sets.mask(VOCAB_SIZE)
        if with_targets:
            is_candidate[torch.arange(num_tokens), targets] = True
        divergences = []
        for token in range(num_tokens):
            row = token if rows is None else rows[token]
            ids = is_candidate[token].nonzero()[:, 0]
            logp, logq = (x[row, ids].log_softmax(0) for x in (logits, reference))
            divergences.append(plain_terms(exact, logp, logq).sum())
        divergence = torch.stack(divergences)
        return {"divergence": torch.where(mask & (sets.counts > 0), divergence, 0.0)}

    assert_matches_float64(Case.from_kind(kind), composed, plain)


def test_a_divergence_of_nearly_equal_rows_keeps_its_digits():
    g = torch.Generator().manual_seed(6)
    logits = torch.randn(1, VOCAB_SIZE, generator=g, dtype=torch.float64)
    step = 1e-5 * torch.randn(1, VOCAB_SIZE, generator=g, dtype=torch.float64)
    sets = TokenSets.from_lists([list(range(VOCAB_SIZE))])
    source, reference = Float64Source(logits), Float64Source(logits + step)
    found = candidate_divergence(source, reference, sets, Exact("reverse"))
    p = logits.softmax(1)
    # KL = variance / 2 + O(step^3)
    variance = (p * step.square()).sum() - (p * step).sum().square()
    assert 0 < float(variance) < 1e-9
    torch.testing.assert_close(found[0].double(), variance / 2, rtol=1e-4, atol=0)


# ---- digits, and sets without a finite softmax


@pytest.mark.parametrize("gap", [12.0, 30.0])
def test_a_likely_candidate_keeps_its_digits(gap):
    """The fp32 softmax of a row has no digit of 1 - p for p > 1 - 6e-8; here all are kept."""
    logits = torch.full((2, VOCAB_SIZE), -64.0)
    logits[:, 7] = gap - 64.0
    leaf = logits.requires_grad_()
    source = Case.with_values("logits", logits.detach()).source(leaf)
    sets = TokenSets.from_lists([[3, 7, 9]] * 2)
    targets = torch.tensor([7, 3])
    found = candidate_logprobs(source, targets, sets, names=("entropy", "sum_squares"))
    z = logits.detach().double()[:, [3, 7, 9]]
    rest = 2.0 * torch.tensor(-gap, dtype=torch.float64).exp()
    torch.testing.assert_close(found["logps"][0].double(), -torch.log1p(rest), rtol=1e-6, atol=0)
    p = z.softmax(1)[0]
    entropy = torch.log1p(rest) + 2 * p[0] * gap
    torch.testing.assert_close(found["entropy"].double(), entropy.expand(2), rtol=1e-6, atol=0)

    (grad,) = torch.autograd.grad(found["logps"][0], leaf, retain_graph=True)
    torch.testing.assert_close(grad[0, 7].double(), rest / (1 + rest), rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(found["entropy"][0], leaf, retain_graph=True)
    expected = -2 * p[0] * p[1] * gap  # p (log p + H) of the likely id, without what cancels
    torch.testing.assert_close(grad[0, 7].double(), expected, rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(found["sum_squares"][0], leaf)
    expected = 4 * p[0] * p[1] * (p[1] - p[0])
    torch.testing.assert_close(grad[0, 7].double(), expected, rtol=1e-6, atol=0)


def test_a_set_with_nearly_all_of_the_probability_keeps_the_digits_of_its_mass():
    logits = torch.zeros(1, VOCAB_SIZE, dtype=torch.float64)
    logits[0, 7] = 20.0
    sets = TokenSets.from_lists([[3, 7]])
    found = candidate_logprobs(
        Float64Source(logits),
        torch.tensor([3]),
        sets,
        names=("log_kept_mass",),
    )
    outside = (VOCAB_SIZE - 2) / logits.exp().sum()
    expected = torch.log1p(-outside)
    torch.testing.assert_close(found["log_kept_mass"][0].double(), expected, rtol=1e-6, atol=0)


def test_sets_that_are_not_finite():
    """NaN, +inf, and -inf alone give NaN. Gradients are NaN if one arrives, and 0 if none does."""
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = torch.nan
    logits[1, 3] = torch.inf
    logits[2, 3:6] = -torch.inf
    logits[3, 4] = -torch.inf
    leaf = logits.requires_grad_()
    source = Case.with_values("logits", logits.detach()).source(leaf)
    sets = TokenSets.from_lists([[3, 4, 5]] * 5 + [[3]])
    targets = torch.tensor([4, 4, 4, 4, 5, 3])
    extra = TokenSets.from_lists([[4]] * 6)
    names = ("entropy", "sum_squares", "top_prob", "top_id", "log_kept_mass")
    result = candidate_logprobs_with_extra_ids(source, targets, sets, extra, names=names)
    found = result.statistics
    for values in (*(found[name] for name in names if name != "top_id"), result.extra_logps):
        assert values[:3].isnan().all()
        assert not values[3:].isnan().any()
    assert found["logps"][:3].isnan().all()
    assert found["logps"][3] == -torch.inf
    assert found["top_id"][:3].tolist() == [-1, -1, -1]
    assert result.extra_logps[3] == result.extra_logps[5] == -torch.inf

    upstream = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    for name in ("logps", "entropy", "sum_squares"):
        (grad,) = torch.autograd.grad(found[name], leaf, upstream, retain_graph=True)
        assert (grad[:4] == 0).all() and (grad[5] == 0).all()
        assert (grad[4, 3:6] != 0).all() and (grad[4, 6:] == 0).all()
        (grad,) = torch.autograd.grad(found[name], leaf, 1.0 - upstream, retain_graph=True)
        assert grad[:3, 3:6].isnan().all()
        assert not grad[3:].isnan().any()


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_an_infinite_divergence_gives_no_nan_where_no_gradient_arrives(direction):
    logits = torch.zeros(2, VOCAB_SIZE, dtype=torch.float64)
    reference = logits.clone()
    (reference if direction == "reverse" else logits)[0, 3] = -torch.inf
    leaf = logits.requires_grad_()
    sets = TokenSets.from_lists([[3, 4], [3, 4]])
    divergence = candidate_divergence(
        Float64Source(leaf),
        Float64Source(reference),
        sets,
        Exact(direction),
    )
    assert divergence.tolist() == [torch.inf, 0.0]
    for upstream, is_nan in (([0.0, 1.0], False), ([1.0, 0.0], True)):
        (grad,) = torch.autograd.grad(divergence, leaf, torch.tensor(upstream), retain_graph=True)
        assert bool(grad[0, 3:5].isnan().all()) == is_nan
        assert not grad[1].isnan().any()


def test_a_reference_gets_no_gradient_and_shows_its_nan():
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).double()
    reference = (2.0 * logits).detach()
    reference[0, 3] = torch.nan
    leaf, reference_leaf = logits.requires_grad_(), reference.requires_grad_()
    sets = TokenSets.from_lists([[3, 4], [3, 4]])
    divergence = candidate_divergence(
        Float64Source(leaf),
        Float64Source(reference_leaf),
        sets,
        Exact("reverse"),
    )
    assert divergence.isnan().tolist() == [True, False]
    divergence[1].backward()
    assert reference_leaf.grad is None
    assert (leaf.grad[0] == 0).all() and (leaf.grad[1, 3:5] != 0).all()


def test_top_id_is_the_lowest_of_equal_ids():
    """Whatever their order in the set; an id that is less likely by one rounding is not equal."""
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[1, 3] = -1e-30
    sets = TokenSets.from_lists([[9, 3, 5], [9, 3, 5]])
    source = Case.with_values("logits", logits).source(logits)
    for target in (9, 3, 5):
        targets = torch.tensor([target, target])
        found = candidate_logprobs(source, targets, sets, names=("top_id",))
        assert found["top_id"].tolist() == [3, 5]


@pytest.mark.parametrize("is_projected", [False, True])
def test_tokens_of_one_row_round_its_gradient_once(is_projected):
    """Also if the rows of the tokens do not ascend."""
    g = torch.Generator().manual_seed(0)
    num_tokens = 300
    rows = torch.randint(2, (num_tokens,), generator=g)
    targets = torch.randint(3, 5, (num_tokens,), generator=g)
    sets = TokenSets.from_lists([[3, 4, 7]] * num_tokens)
    weights = torch.rand(num_tokens, generator=g)
    x = torch.randn(2, 8, generator=g).bfloat16()
    # From hidden states, the head is the identity, so that the logits are the hidden states.
    head = torch.eye(8)

    def gradient(dtype):
        leaf = x.to(dtype).requires_grad_()
        layout = RowLayout(torch.Size([2]), leaf.device, are_shared=True)
        if is_projected:
            rows_input = LinearInput(leaf, head.to(dtype))
        else:
            rows_input = LogitsInput(leaf)
        source = rows_input.make_source(layout, LogitTransform(), Options())
        logps = candidate_logprobs(source, targets, sets, rows=rows)["logps"]
        return torch.autograd.grad(logps, leaf, weights)[0]

    log_p = x.double()[:, [3, 4, 7]].log_softmax(1)
    expected = torch.zeros(2, 8, dtype=torch.float64)
    for row, target, weight in zip(rows, targets, weights.double(), strict=True):
        expected[row, [3, 4, 7]] -= weight * log_p[row].exp()
        expected[row, target] += weight
    torch.testing.assert_close(gradient(torch.float32).double(), expected, rtol=1e-6, atol=1e-6)
    rounded = expected.bfloat16()
    torch.testing.assert_close(gradient(torch.bfloat16), rounded, rtol=2**-8, atol=1e-6)


# ---- what is read


def test_a_single_candidate_and_rows_with_candidates_cost_nothing():
    """No logit of a set of one id, no statistics of rows with a set."""

    class Refusing(Float64Source):
        def statistics(self, targets, mask, names=(), **_):
            raise AssertionError("no row needs the vocabulary")

        def logits_at(self, row_ids, token_ids):
            assert (token_ids[row_ids == 0] == -1).all()
            assert token_ids[row_ids == 1].sort().values.tolist() == [-1, 3, 4]
            assert token_ids[row_ids == 2].sort().values.tolist() == [3, 5]
            assert (token_ids[row_ids == 3] == -1).all()
            return super().logits_at(row_ids, token_ids)

    source = Refusing(torch.randn(4, VOCAB_SIZE, dtype=torch.float64))
    sets = TokenSets.from_lists([[7], [3, 4], [3], []])
    found = candidate_logprobs(
        source,
        torch.tensor([7, 3, 5, 2]),
        sets,
        mask=torch.tensor([True, True, True, False]),
        names=("entropy", "sum_squares", "top_prob", "top_id"),
    )
    assert [float(x[0]) for x in found.values()] == [0.0, 0.0, 1.0, 1.0, 7.0]
    assert [float(x[3]) for x in found.values()] == [0.0, 0.0, 0.0, 0.0, -1.0]


def test_refusals():
    case = Case.from_kind("exact float64")
    source = case.source(*case.tensors)
    targets = torch.zeros(NUM_ROWS, dtype=torch.int64)
    sets = TokenSets.from_lists([[0, 1]] * NUM_ROWS)
    outside = TokenSets.from_lists([[0, VOCAB_SIZE]] * NUM_ROWS)
    with pytest.raises(ValueError, match=rf"candidates holds id {VOCAB_SIZE} in row 0"):
        candidate_logprobs(source, targets, outside)
    with pytest.raises(ValueError, match=rf"extra holds id {VOCAB_SIZE} in row 0"):
        candidate_logprobs_with_extra_ids(source, targets, sets, outside)
    with pytest.raises(ValueError, match="candidates have 1 rows"):
        candidate_logprobs(source, targets, sets[:1])
    with pytest.raises(ValueError, match="missing='ignore'"):
        candidate_logprobs(source, targets, sets, missing="ignore")
    with pytest.raises(ValueError, match=r"names=\('logsumexp',\): pass some of 'entropy'"):
        candidate_logprobs(source, targets, sets, names=("logsumexp",))
    with pytest.raises(ValueError, match=r"targets\[0\]=2 is not in its kept set"):
        candidate_logprobs(source, targets + 2, sets, missing="raise")
    with pytest.raises(ValueError, match=r"rows\[0\]=99 is none of"):
        candidate_logprobs(source, targets, sets, rows=targets + 99)


def test_a_target_outside_of_the_vocabulary_gives_nan():
    case = Case.from_kind("logits float32")
    targets = torch.tensor([VOCAB_SIZE, -1] + [0] * (NUM_ROWS - 2))
    sets = TokenSets.from_lists([[0, 1], [2]] + [[0]] * (NUM_ROWS - 2))
    logps = candidate_logprobs(case.source(*case.tensors), targets, sets)["logps"]
    assert logps.isnan().tolist() == [True, True] + [False] * (NUM_ROWS - 2)
