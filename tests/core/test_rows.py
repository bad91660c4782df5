"""Rows whose numbers must keep their digits or be what torch has, kept sets, further ids, and second distributions: what their
float64 answers in test_combinations.py do not ask."""

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
    linear_grpo_loss,
    token_divergence,
    token_logprobs,
)
from support import oracle
from support.bits import same_bits

Tensor = torch.Tensor
#: Half a unit in the last place.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
each_dtype = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


@pytest.mark.slow
def test_more_than_2_to_the_31_logits(backend: str) -> None:
    """Rows behind the offsets that 32 bits hold."""
    logits = torch.zeros(1, 1, dtype=torch.bfloat16).expand(2**16 + 2, 2**15).clone()
    logits[-1, -1] = 9.0
    ids = torch.full((len(logits),), 2**15 - 1)
    with torch.no_grad():
        found = token_logprobs(logits, ids, options=Options(backend=backend))[0]
    exact = logits[-2:].double().log_softmax(-1)[:, -1]
    torch.testing.assert_close(found[-2:].double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [False, True], ids=["log-probs", "loss"])
@pytest.mark.parametrize("vocab", [1000, 32_001])
@each_dtype
def test_a_confident_target_keeps_the_digits_of_its_gradient(dtype: torch.dtype, vocab: int, loss: bool, backend: str) -> None:
    """1 - p is right relative to itself where p is near 1; p - 1 in bf16 would be wrong by 100 %."""
    p = torch.tensor([0.5, 0.9, 0.99, 0.999, 0.9999], dtype=torch.float64)
    logits = torch.zeros(len(p), vocab, dtype=dtype)
    logits[:, 17] = torch.log(p / (1 - p) * (vocab - 1)).to(dtype)
    targets, leaf, options = torch.full((len(p),), 17), logits.clone().requires_grad_(), Options(backend=backend)
    if loss:
        batch = TokenBatch(targets, -torch.ones(len(p)))
        grpo_loss(leaf, batch, Objective.preset("reinforce"), normalizer=1.0, options=options).loss.backward()
    else:
        token_logprobs(leaf, targets, options=options).logps.sum().backward()
    exact = (torch.nn.functional.one_hot(targets, vocab) - logits.double().softmax(-1))[:, 17]
    assert leaf.grad is not None
    error = (leaf.grad[:, 17].double() - exact).abs()
    # From an fp32 sum of about 1: known to some units of 2^-24, by the number of partial sums that an instruction set has.
    assert (error <= ROUNDING[dtype] * exact.abs() + 64 * 2.0**-24).all(), error / exact


def test_what_cannot_be_chosen_or_computed(backend: str) -> None:
    """A target at -inf has log-prob -inf; a row of only -inf, or with NaN or +inf, is NaN as in torch; rows beside them are
    untouched; masked, it is 0."""

    def found(**options: Any) -> list[Tensor]:
        leaf = logits.clone().requires_grad_()
        out = token_logprobs(leaf, torch.arange(7), entropy=True, options=Options(backend=backend), **options)
        assert out.entropy is not None
        (out.logps.sum() + out.entropy.sum()).backward()
        return [out.logps.detach(), out.entropy.detach(), leaf.grad]  # type: ignore[list-item]

    logits = torch.randn(7, 40)
    clean = found()
    logits[1, 1], logits[3] = -math.inf, -math.inf
    logits[4, 39], logits[5, 0] = math.nan, math.inf
    logps, entropy, _ = found()
    assert logps[1] == -math.inf and entropy[1].isfinite()
    assert logps[3:6].isnan().all() and entropy[3:6].isnan().all()
    whole = torch.tensor([0, 2, 6])
    assert all(same_bits(x[whole], y[whole]) for x, y in zip((logps, entropy), clean, strict=False))
    mask = torch.ones(7, dtype=torch.bool).index_fill(0, torch.tensor([1, 3, 4, 5]), False)
    for x, y in zip(found(mask=mask), clean, strict=True):
        assert not x[~mask].any() and same_bits(x[mask], y[mask])


# ---- sets


def test_metrics_of_sets() -> None:
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
    kl = logits.log_softmax(1)[[0, 2], [1, 4]] - batch.ref_logps[[0, 2]]  # type: ignore[index]
    assert float(out.metrics["kl"]) == pytest.approx(float(kl.mean()), rel=1e-5)


# ---- further ids


def test_slopes_at_ids_of_a_certain_row_keep_their_digits(backend: str) -> None:
    """bf16 logits of a row with p = 0.9999 at one id: 1 - p there, and the slopes of two ids may cancel in their sum."""
    logits = torch.zeros(2, 40)
    logits[:, 7] = 13.0
    leaf = logits.bfloat16().requires_grad_()
    more = token_logprobs(
        leaf, torch.tensor([3, 3]), at=TokenSets.from_lists([[7], [7, 9]]), options=Options(backend=backend)
    ).also
    more["at"].backward(torch.tensor([1.0, 1.0, -1.0]))
    exact = leaf.detach().double().requires_grad_()
    log_p = exact.log_softmax(1)
    (log_p[0, 7] + log_p[1, 7] - log_p[1, 9]).backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2**-8, atol=1e-12)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_largest_probability_and_its_id(dtype: torch.dtype, backend: str) -> None:
    """Of ties the first; of a row of only -inf NaN; over a set the set's; of a masked row none."""
    logits = torch.randn(5, 50).to(dtype)
    logits[1, [7, 30]] = logits[1].max() + 1
    logits[3] = -torch.inf
    sets, mask = TokenSets.from_lists([[], [], [4, 9, 2], [], []]), torch.arange(5) < 4
    asked = {"kept": sets, "mask": mask, "also": ("top_prob", "top_id")}
    more = token_logprobs(logits, torch.tensor([0, 1, 4, 3, 4]), options=Options(backend=backend), **asked).also
    p = logits.double().softmax(1)
    in_set = logits[2, [4, 9, 2]].double().softmax(0)
    assert more["top_id"].tolist() == [int(p[0].argmax()), 7, [4, 9, 2][int(in_set.argmax())], 0, -1]
    wanted = torch.stack([p[0].max(), p[1].max(), in_set.max()])
    torch.testing.assert_close(more["top_prob"][:3].double(), wanted, rtol=2e-6, atol=0)
    assert more["top_prob"][3].isnan() and more["top_prob"][4] == 0


# ---- second distributions


@pytest.mark.parametrize("rows, vocab, apart, rtol", [(5, 3001, 1e-5, 1e-4), (30, 7, 0.2, 2e-5)])
@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_nearly_equal_rows_keep_the_digits_of_a_tiny_divergence(
    kind: str, rows: int, vocab: int, apart: float, rtol: float, backend: str
) -> None:
    """A divergence of 1e-10 is right to its digits, never negative, and 0 between equal rows."""
    z = 4 * torch.randn(rows, vocab)
    w = z + apart * torch.randn(rows, vocab)
    w[0], w[1] = z[0], z[1] + 3.0
    found = token_divergence(z, w, kind, options=Options(backend=backend))
    exact = oracle.divergence(z.double().log_softmax(1), w.double().log_softmax(1), kind, 0.5)
    assert (found >= 0).all() and found[0] == 0 and found[1] < 1e-12
    torch.testing.assert_close(found[2:].double(), exact[2:], rtol=rtol, atol=0)


@pytest.mark.parametrize("over", ["kept", "vocabulary"])
def test_a_head_of_the_reference_stands_for_its_log_probs(over: str, backend: str) -> None:
    """For an estimate of the KL: a forward product in place of batch.ref_logps, under a transform of its own, over sets or not."""
    hidden, weight, other = torch.randn(2, 5, 8), torch.randn(30, 8), torch.randn(30, 8)
    targets, advantages = torch.randint(30, (2, 5)), torch.tensor([1.0, -1.0])
    objective = Objective.preset("dapo", beta=0.3)
    sets = TokenSets.from_lists([[int(t), (int(t) + 3) % 30] if i % 2 else [] for i, t in enumerate(targets.flatten())])
    own, options = LogitTransform(0.6), Options(reference_over=over, backend=backend)
    ref = token_logprobs(hidden @ other.T, targets, kept=sets if over == "kept" else None, transform=own)[0]
    found, wanted = (hidden.clone().requires_grad_() for _ in range(2))
    of_head, given = (TokenBatch(targets, advantages, ref_logps=x, kept=sets) for x in (None, ref))
    a = linear_grpo_loss(found, weight, of_head, objective, reference=(hidden, Head(other, transform=own)), options=options)
    b = linear_grpo_loss(wanted, weight, given, objective, options=options)
    (a.loss + b.loss).backward()
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("up", [8.0, 20.0])
@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd"])
def test_the_mass_outside_of_a_teachers_ids_keeps_its_digits(direction: str, up: float, backend: str) -> None:
    """A confident policy has a small probability outside, which 1 minus that inside would be the rounding of. The teacher is sure
    of about 20 ids, and of one row does not list the policy's."""
    z, w, rows, sure = torch.randn(8, 1000), torch.randn(8, 1000), torch.arange(8), torch.randint(1000, (8,))
    w += 12.0 * (torch.rand(8, 1000) < 0.02)
    z[rows, sure] += up
    w[rows, sure] += 12.0
    w[-1, sure[-1]] = -4.0
    values, ids = w.log_softmax(-1).topk(20)
    sets, exact = TokenSets.from_padded(ids, values=values), Exact(direction)
    leaf, wide = z.clone().requires_grad_(), z.double().requires_grad_()
    found = token_divergence(leaf, sets, exact, options=Options(backend=backend))
    log_q = torch.zeros(8, 1000, dtype=torch.float64).scatter(1, ids, values.double())
    wanted = oracle.listed_divergence(wide.log_softmax(-1), log_q, ids.tolist(), direction, exact.share, "bin")
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=2e-6, atol=1e-9)
    (gradient,), (expected,) = (torch.autograd.grad(x.sum(), y) for x, y in ((found, leaf), (wanted, wide)))
    assert ((gradient - expected).norm(dim=-1) <= 1e-5 * expected.norm(dim=-1)).all()


def test_a_reference_that_was_made_in_inference_mode_or_written_to(backend: str) -> None:
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
