"""Log-probs at any ids against plain torch in float64, and losses that depend on them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels import Cispo, Objective, TokenBatch, TokenSets
from grpo_kernels.extra_ids import auxiliary_loss, logprobs_at, logprobs_with_extra_ids
from grpo_kernels.formulas.centering import ScoreCentering
from grpo_kernels.formulas.extra_id_terms import ExtraIdTerms, logp_term
from grpo_kernels.trees import shared_row_logprobs
from support.composition_cases import (
    NUM_ROWS,
    SOURCES,
    VOCAB_SIZE,
    Case,
    assert_matches_float64,
    masked,
    random_mask,
    random_sets,
)
from support.row_sources import Float64Source

ROW_STATISTICS = ("entropy", "sum_squares", "top_prob", "top_id")


def plain_statistics(logits: Tensor) -> dict[str, Tensor]:
    """Statistics of rows of logits in plain torch."""
    logps = logits.log_softmax(1)
    probs = logps.exp()
    return {
        "entropy": -(probs * logps).sum(1),
        "sum_squares": probs.square().sum(1),
        "top_prob": probs.amax(1),
        "top_id": probs.argmax(1),
    }


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("num_pairs", [0, 1, 60])
def test_pairs_in_any_order_may_repeat(kind, num_pairs):
    g = torch.Generator().manual_seed(num_pairs)
    rows = torch.randint(NUM_ROWS - 1, (num_pairs,), generator=g)  # the last row has no pair
    ids = torch.randint(VOCAB_SIZE, (num_pairs,), generator=g)
    is_unused = torch.rand(num_pairs, generator=g) < 0.2
    mask = random_mask(NUM_ROWS, g)
    has_pair = torch.zeros(NUM_ROWS, dtype=torch.bool).index_fill(0, rows[~is_unused], True)

    def composed(source):
        token_ids = torch.where(is_unused, -1, ids)
        result = logprobs_at(source, rows, token_ids, mask=mask, names=ROW_STATISTICS)
        return {"pairs": result.logps, **result.statistics}

    def plain(logits):
        logps = logits.log_softmax(1)[rows, ids]
        logps = torch.where(is_unused, -torch.inf, logps)
        logps = torch.where(mask[rows], logps, 0.0)
        return {"pairs": logps, **masked(plain_statistics(logits), mask & has_pair)}

    assert_matches_float64(Case.from_kind(kind), composed, plain)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("sizes", [(0,), (1,), (VOCAB_SIZE,), (0, 1, 3, 10, VOCAB_SIZE)])
@pytest.mark.parametrize("with_mask", [False, True])
def test_tokens_with_extra_ids(kind, sizes, with_mask):
    g = torch.Generator().manual_seed(len(sizes))
    targets = torch.randint(VOCAB_SIZE, (NUM_ROWS,), generator=g)
    extra = random_sets(NUM_ROWS, g, sizes)
    mask = random_mask(NUM_ROWS, g)
    given_mask = mask if with_mask else None
    mask = mask if with_mask else torch.ones_like(mask)
    rows = torch.arange(NUM_ROWS)

    def composed(source):
        result = logprobs_with_extra_ids(
            source,
            targets,
            extra,
            mask=given_mask,
            names=ROW_STATISTICS,
        )
        return {"extra": result.extra_logps, **result.statistics}

    def plain(logits):
        logps = logits.log_softmax(1)
        extra_logps = logps[extra.row_of, extra.ids.long()]
        statistics = {"logps": logps[rows, targets], **plain_statistics(logits)}
        return {
            "extra": torch.where(mask[extra.row_of], extra_logps, 0.0),
            **masked(statistics, mask),
        }

    assert_matches_float64(Case.from_kind(kind), composed, plain)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("with_extra", [False, True])
def test_tokens_that_share_rows(kind, num_tokens, with_mask, with_extra):
    """The entropy of a row counts once for each of its tokens. Masked tokens may have any row."""
    g = torch.Generator().manual_seed(num_tokens)
    targets = torch.randint(VOCAB_SIZE, (num_tokens,), generator=g)
    rows = torch.randint(NUM_ROWS - 1, (num_tokens,), generator=g)
    extra = random_sets(num_tokens, g, (0, 1, 5) if with_extra else (0,))
    mask = random_mask(num_tokens, g) if with_mask else torch.ones(num_tokens, dtype=torch.bool)
    given_rows = torch.where(mask, rows, 10**9)
    given_targets = torch.where(mask, targets, -7)
    given_mask = mask if with_mask else None

    def composed(source):
        if not with_extra:
            return shared_row_logprobs(
                source,
                given_targets,
                given_rows,
                mask=given_mask,
                names=ROW_STATISTICS,
            )
        result = logprobs_with_extra_ids(
            source,
            given_targets,
            extra,
            rows=given_rows,
            mask=given_mask,
            names=ROW_STATISTICS,
        )
        return {"extra": result.extra_logps, **result.statistics}

    def plain(logits):
        logps = logits.log_softmax(1)
        statistics = {name: x[rows] for name, x in plain_statistics(logits).items()}
        results = masked({"logps": logps[rows, targets], **statistics}, mask)
        if with_extra:
            extra_logps = logps[rows[extra.row_of], extra.ids.long()]
            results["extra"] = torch.where(mask[extra.row_of], extra_logps, 0.0)
        return results

    assert_matches_float64(Case.from_kind(kind), composed, plain)


def test_no_rows():
    logits = torch.zeros(0, VOCAB_SIZE).double()
    source = Case.with_values("exact", logits).source(logits)
    nothing = torch.zeros(0, dtype=torch.int64)
    for rows in (None, nothing):
        result = logprobs_with_extra_ids(
            source,
            nothing,
            TokenSets.whole(0),
            rows=rows,
            names=ROW_STATISTICS,
        )
        assert all(len(values) == 0 for values in result.statistics.values())
        assert len(result.extra_logps) == 0


# ---- digits, and rows that have none


@pytest.mark.parametrize("gap", [8.0, 25.0])
def test_a_likely_id_keeps_its_digits(gap):
    """log p and 1 - p of an id with p near 1, beside an id that is asked for too."""
    logits = torch.zeros(2, VOCAB_SIZE, dtype=torch.float64)
    logits[:, 7] = gap
    leaf = logits.clone().requires_grad_()
    targets = []

    class Recording(Float64Source):
        def statistics_of_rest(self, ids, *arguments, **names):
            targets.append(ids.tolist())
            return super().statistics_of_rest(ids, *arguments, **names)

    rows = torch.tensor([0, 1, 0, 1])
    ids = torch.tensor([3, 3, 7, 7])
    logps = logprobs_at(Recording(leaf), rows, ids).logps
    assert targets == [[7, 7]]
    others = (VOCAB_SIZE - 1) * torch.tensor(-gap, dtype=torch.float64).exp()
    expected = -torch.log1p(others)
    torch.testing.assert_close(logps[2:].double(), expected.expand(2), rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(logps[2:].sum(), leaf)
    expected = others / (1.0 + others)
    torch.testing.assert_close(grad[:, 7], expected.expand(2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["logits float32", "linear float32"])
def test_no_log_prob_is_above_0(kind):
    """Whichever rounding the logits of pairs have: here, they are 1e-4 apart from those of rows."""
    case = Case.from_kind(kind)
    source = case.source(*(200.0 * x.detach() for x in case.tensors))
    given = source.logits_at
    source.logits_at = lambda rows, ids: given(rows, ids) * (1.0 + 1e-4)
    rows = torch.arange(NUM_ROWS).repeat_interleave(VOCAB_SIZE)
    ids = torch.arange(VOCAB_SIZE).repeat(NUM_ROWS)
    logps = logprobs_at(source, rows, ids).logps
    assert (logps <= 0).all()
    assert (logps > -1e-3).any()


def test_rows_that_are_not_finite():
    """NaN shows in the values of its row, and in its gradient if a gradient arrives there."""
    case = Case.from_kind("logits float32")
    logits = case.tensors[0].detach().clone()
    logits[0, 3] = torch.nan
    logits[1] = -torch.inf
    logits[2, 4] = -torch.inf
    logits[4, 6] = -torch.inf
    leaf = logits.requires_grad_()
    rows = torch.tensor([0, 0, 1, 1, 2, 2, 4])
    ids = torch.tensor([3, 4, 3, 4, 4, 5, 6])
    logps = logprobs_at(case.source(leaf), rows, ids).logps
    assert logps[:4].isnan().all()
    assert logps[4] == logps[6] == -torch.inf
    expected = logits.detach()[2].double().log_softmax(0)[5]
    torch.testing.assert_close(logps[5].double(), expected, rtol=1e-5, atol=0)

    nothing = torch.zeros(7)
    nothing[5:] = 1.0
    (grad,) = torch.autograd.grad(logps, leaf, nothing, retain_graph=True)
    assert not grad.isnan().any()
    assert (grad[:2] == 0).all()
    opposite = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # which cancel in the kernel
    (grad,) = torch.autograd.grad(logps, leaf, opposite)
    assert grad[0, ids[:2]].isnan().all()
    assert (grad[1:] == 0).all()


def test_an_id_of_probability_0_leaves_the_entropy_of_the_others():
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).double()
    logits[0, 3] = -torch.inf
    source = Float64Source(logits)
    result = logprobs_at(source, torch.tensor([0]), torch.tensor([3]), names=("entropy",))
    assert result.logps.item() == -torch.inf
    probs = logits[0].softmax(0)
    expected = torch.special.entr(probs).sum().float()
    torch.testing.assert_close(result.statistics["entropy"][0], expected)


def test_an_unused_pair_has_no_gradient():
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).double()
    leaf = logits.requires_grad_()
    logps = logprobs_at(Float64Source(leaf), torch.tensor([0, 0]), torch.tensor([3, -1])).logps
    gradients = [
        torch.autograd.grad(logps, leaf, torch.tensor([1.0, upstream]), retain_graph=True)[0]
        for upstream in (0.0, 5.0)
    ]
    assert torch.equal(*gradients)


def test_ids_outside_of_the_vocabulary():
    """A target gives NaN, since a GPU does not check it. Extra ids are checked everywhere."""
    case = Case.from_kind("exact float64")
    source = case.source(*case.tensors)
    targets = torch.tensor([0, VOCAB_SIZE, -1] + [0] * (NUM_ROWS - 3))
    result = logprobs_with_extra_ids(source, targets, TokenSets.whole(NUM_ROWS))
    assert result.statistics["logps"].isnan().tolist() == [False, True, True] + [False] * 6
    extra = TokenSets.from_lists([[], [VOCAB_SIZE]] + [[]] * (NUM_ROWS - 2))
    with pytest.raises(ValueError, match=rf"extra holds id {VOCAB_SIZE} in row 1"):
        logprobs_with_extra_ids(source, targets, extra)
    with pytest.raises(ValueError, match="extra have 2 rows"):
        logprobs_with_extra_ids(source, targets, TokenSets.whole(2))
    with pytest.raises(ValueError, match=rf"rows\[1\]={NUM_ROWS} is none of the {NUM_ROWS} rows"):
        shared_row_logprobs(source, torch.tensor([0, 1]), torch.tensor([0, NUM_ROWS]))


@pytest.mark.parametrize("kind", ["logits float32", "linear float32"])
def test_the_same_bits_again(kind):
    """Sums have a fixed order, also of more pairs than one thread takes."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(NUM_ROWS, (100_000,), generator=g)
    ids = torch.randint(VOCAB_SIZE, (100_000,), generator=g)
    upstream = torch.randn(100_000, generator=g)
    case = Case.from_kind(kind)
    found = []
    for _ in range(3):
        source = case.source(*(x.detach().clone() for x in case.tensors))
        logits = source.logits_at(rows.sort().values, ids).requires_grad_()
        # An unused pair, of the id -1, has the logit -inf.
        source.logits_at = lambda rows, ids, x=logits: torch.where(ids < 0, -torch.inf, x)
        logps = logprobs_at(source, rows, ids).logps
        found.append((logps, *torch.autograd.grad(logps, logits, upstream)))
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, found[0], strict=True))


# ---- losses of extra ids


def test_the_gradient_of_a_loss_is_the_slope_that_its_function_returns():
    """Not the derivative of the term; and 0 where no gradient arrives, whatever the slope is."""
    sets = TokenSets.from_lists([[1, 2], [], [3]], values=[[1.0, 2.0], [], [3.0]])

    def function(logp, values, advantage, sums):
        return values * logp * advantage, torch.where(values == 3.0, torch.inf, sums(values))

    terms = ExtraIdTerms(((function, sets.values), (logp_term, sets.values)), sets.offsets)
    logps = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    losses = auxiliary_loss(terms, logps, torch.tensor([2.0, 1.0, 0.5]))
    torch.testing.assert_close(losses, torch.tensor([-15.0, 0.0, -13.5]))
    (grad,) = torch.autograd.grad(losses, logps, torch.tensor([0.5, 1.0, 0.0]))
    torch.testing.assert_close(grad, torch.tensor([0.5 * (3.0 + 1.0), 0.5 * (3.0 + 2.0), 0.0]))


@pytest.mark.parametrize("kind", SOURCES)
def test_terms_of_a_batch(kind):
    """sum c log p + sum r p, as `TokenBatch(logp_terms=, prob_terms=)` has them."""
    g = torch.Generator().manual_seed(3)
    targets = torch.randint(VOCAB_SIZE, (NUM_ROWS,), generator=g)
    sets = random_sets(NUM_ROWS, g, (0, 1, 4, VOCAB_SIZE))
    c, r = (torch.randn(len(sets.ids), generator=g) for _ in range(2))
    batch = TokenBatch(
        targets,
        torch.ones(NUM_ROWS),
        logp_terms=sets.with_values(c),
        prob_terms=sets.with_values(r),
    )
    terms = Objective().extra_id_terms(batch)

    def composed(source):
        result = logprobs_with_extra_ids(source, targets, sets)
        return {"loss": auxiliary_loss(terms, result.extra_logps, torch.ones(NUM_ROWS))}

    def plain(logits):
        logps = logits.log_softmax(1)[sets.row_of, sets.ids.long()]
        values = c * logps + r * logps.exp()
        return {"loss": torch.zeros(NUM_ROWS).double().index_add(0, sets.row_of, values)}

    assert_matches_float64(Case.from_kind(kind), composed, plain, num_terms=10.0)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("tail", [False, True])
def test_score_centering(kind, tail):
    """A sum_v q_v w_v log p_v with constant coefficients, written out for w = min(p / q, cap)."""
    g = torch.Generator().manual_seed(4)
    targets = torch.randint(VOCAB_SIZE, (NUM_ROWS,), generator=g)
    sets = random_sets(NUM_ROWS, g, (1, 4, 9))
    sampler = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=g).log_softmax(1)
    log_q = sampler[sets.row_of, sets.ids.long()]
    advantages = torch.randn(NUM_ROWS, generator=g)
    policy = Cispo(1.5)
    batch = TokenBatch(targets, advantages, logp_terms=sets.with_values(log_q))
    objective = Objective(policy, listed=ScoreCentering(policy, tail=tail))
    terms = objective.extra_id_terms(batch)

    def composed(source):
        result = logprobs_with_extra_ids(source, targets, sets)
        return {"loss": auxiliary_loss(terms, result.extra_logps, advantages)}

    def plain(logits):
        logps = logits.log_softmax(1)[sets.row_of, sets.ids.long()]
        p, q = logps.detach().exp(), log_q.double().exp()
        coefficients = q * (p / q).clamp(max=1.5)
        if tail:
            sums = [torch.zeros(NUM_ROWS).double().index_add(0, sets.row_of, x) for x in (p, q)]
            rest = ((1 - sums[1]) / (1 - sums[0]))[sets.row_of]
            coefficients = coefficients - rest * p * (1 / rest).clamp(max=1.5)
        values = advantages[sets.row_of] * coefficients * logps
        return {"loss": torch.zeros(NUM_ROWS).double().index_add(0, sets.row_of, values)}

    assert_matches_float64(Case.from_kind(kind), composed, plain)
