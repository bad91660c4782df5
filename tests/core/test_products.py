"""How many rows take part in each product with the head, by what is asked for, level of the
objective, kind of head, and KL.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    EntropyQuantile,
    Exact,
    Head,
    Objective,
    OffPolicySequences,
    Options,
    TokenBatch,
    TokenSets,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
)
from grpo_kernels.formulas.filters import Filter
from support.inside import Allocations, count_products, in_chunks

B, T, H, V = 6, 5, 16, 40
MASK = torch.arange(T) < torch.tensor([5, 3, 0, 4, 5, 1])[:, None]
ADVANTAGES = torch.tensor([1.3, 0.0, 2.0, -0.7, 0.0, 0.6])
N, ACTIVE = int(MASK.sum()), int(MASK[ADVANTAGES != 0].sum())

#: The longest of a row's groups is the sequence, but where something is chosen from the whole
#: batch.
LEVELS = {
    "token": Objective.preset("dapo"),
    "sequence": Objective.preset("gspo"),
    "sequence and token": Objective.preset("gspo", level="sequence-token"),
    "geometric mean": Objective.preset("gmpo"),
    "sum": Objective.preset("vespo"),
    "mask of a sequence": Objective.preset("dapo", filters=(OffPolicySequences(),)),
    "future of a token": Objective.preset("fipo"),
    "choice of a batch": Objective.preset("dapo", filters=(EntropyQuantile(1.0),)),
}


def leaves(frozen):
    g = torch.Generator().manual_seed(5)
    return torch.randn(B, T, H, generator=g).requires_grad_(), torch.randn(
        V, H, generator=g
    ).requires_grad_(not frozen)


def batch(**fields):
    g = torch.Generator().manual_seed(6)
    ref_logps = -4 + 0.1 * torch.randn(
        B, T, generator=g
    )  # on-policy: no ratio is clipped, which would leave a row without a slope
    return TokenBatch(
        torch.randint(V, (B, T), generator=g),
        ADVANTAGES,
        **{"mask": MASK, "ref_logps": ref_logps, **fields},
    )


TARGETS = batch().targets

# ---- how many rows


class Case(NamedTuple):
    """A function of hidden states, head and options, rows of a chunk (0:

    all are one), and how many rows it should take.
    """

    call: Callable[..., Tensor]
    chunk: int
    forward: int  # projected without gradients
    live: int  # that have a gradient
    trained: tuple[int, int]  # in the products of logits and of hidden states
    frozen: tuple[int, int] | None = None  # the same with a frozen head, where it differs


def of_loss(objective, of, **given):
    return lambda hidden, weight, options: (
        linear_grpo_loss(hidden, weight, of, objective, options=options, **given).loss
    )


def of_logps(upstream=1.0, targets=TARGETS, mask=MASK, **given):
    def call(hidden, weight, options):
        return (
            linear_logprobs(hidden, weight, targets, mask=mask, options=options, **given).logps
            * upstream
        ).sum()

    return call


def of_divergence(teacher):
    return lambda hidden, weight, options: linear_divergence(
        hidden, weight, teacher, mask=MASK, options=options
    ).sum()


FEW = torch.arange(B)[:, None] < 2
SOME, FIRST = int(MASK[:2].sum()), torch.arange(B * T).view(B, T) == 0
SECOND, EXACT = (
    (torch.randn(B, T, 24), torch.randn(V, 24) / 5),
    Objective.preset("distillation", kl=Exact()),
)
SETS = TokenSets.from_lists([[1, 2]] + [[]] * (B * T - 1))
TEACHER = TokenSets.from_lists([[3, 4]] * (B * T)).with_values(torch.full((2 * B * T,), -1.0))
#: Ids at a row that has an advantage, at one of three that have none, and at one that is masked.
LISTED = TokenSets.from_lists([[1, 2] if i in (0, 6, 9) else [] for i in range(B * T)]).with_values(
    torch.ones(6)
)
TERMS = batch(logp_terms=LISTED, prob_terms=LISTED)
#: Two prompts of two rollouts each: rows 0 to 2 and 6 to 8 are shared, nobody names row 5. The
#: first two tokens of a prompt's rollouts are the same, the third differs.
ROWS = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4], [6, 7, 8, 9], [6, 7, 8, 10]])
IDS = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 8], [1, 2, 3, 4], [1, 2, 4, 4]])
TREES = TokenBatch(IDS, torch.tensor([1.0, -0.5, 0.3, 0.6]), rows=ROWS)
DAPO, GSPO = (Objective.preset(name) for name in ("dapo", "gspo"))


def of_levels():
    """The coefficient of a row is known with its sequence. If that is longer than a block, or the
    coefficient depends on the whole batch, logits are computed again in the backward.
    """
    for name, chunk, beta in itertools.product(LEVELS, (0, 4), (0.0, 0.1)):
        live = N if beta else ACTIVE
        again = live if name == "choice of a batch" or (name != "token" and chunk) else 0
        call = of_loss(replace(LEVELS[name], beta=beta), batch())
        yield (
            f"{name}, chunk {chunk}, beta {beta}",
            Case(call, chunk, N, live, (N + again, live), (N, live)),
        )


CASES = {
    **dict(of_levels()),
    # Entropy costs no product. Rows without an upstream gradient are not projected back. A frozen
    # head's are, ahead of it, but not what has a gradient beside log-probs, or is not what the loss
    # reads.
    "log-probs of some": Case(of_logps(FEW), 0, N, SOME, (N + SOME, SOME), (N, N)),
    "log-probs of some, and entropy": Case(of_logps(FEW, entropy=True), 0, N, SOME, (N + SOME, SOME)),
    "log-probs": Case(of_logps(), 4, N, N, (2 * N, N), (N, N)),
    "entropy without a gradient": Case(of_logps(entropy="detached", also=("top_prob",)), 4, N, N, (2 * N, N), (N, N)),
    "entropy": Case(of_logps(entropy=True), 4, N, N, (2 * N, N)),
    "sum of squares": Case(of_logps(also=("sum_squares",)), 4, N, N, (2 * N, N)),
    "log_kept_mass": Case(of_logps(FIRST, also=("log_kept_mass",), kept=SETS), 4, N, 1, (N, 0), (N, N)),
    # A second stream has a product of its own, twice where gradients wait.
    "teacher": Case(of_loss(EXACT, batch(ref_logps=None), reference=SECOND), 4, 2 * N, N, (2 * N, N)),
    "divergence": Case(of_divergence(SECOND), 4, 2 * N, N, (4 * N, N)),
    "teacher at some ids": Case(of_divergence(TEACHER), 0, N, N, (2 * N, N), (N, N)),
    # A row with a candidate set is in no matmul.
    **{
        f"beside a set, chunk {chunk}": Case(
            of_loss(GSPO, batch(kept=SETS, missing="include")), chunk, N - 1, ACTIVE,
            (N - 1 + ACTIVE - 1, ACTIVE - 1), (N - 1, N - 1),
        )
        for chunk in (0, 4)
    },
    # Rows without an advantage have a gradient if they list ids. Compositions compute logits again
    # in the backward.
    "listed": Case(of_loss(DAPO, TERMS), 4, N, ACTIVE + 1, (N + ACTIVE + 1, ACTIVE + 1), (N, ACTIVE + 1)),
    "listed, sequence": Case(of_loss(GSPO, TERMS), 5, N, ACTIVE + 1, (N + ACTIVE + 1, ACTIVE + 1), (N, ACTIVE + 3)),
    # The divergence is over whole rows, and the pass of the log-probs over what is not listed.
    "listed beside a divergence": Case(of_loss(EXACT, replace(TERMS, ref_logps=None), reference=SECOND), 4, 3 * N, N, (5 * N + 2, N + 2), (5 * N, 2 * N)),
    "listed beside a set": Case(of_loss(DAPO, replace(TERMS, kept=SETS, missing="include")), 4, N - 1, ACTIVE + 1, (N - 1 + ACTIVE, ACTIVE), (N - 1, N - 1)),
    # A row of several tokens is in each matmul once; in none if their gradients cancel.
    "trees": Case(of_loss(DAPO, TREES), 4, 10, 10, (20, 10), (10, 10)),
    "trees, sequence": Case(of_loss(GSPO, TREES), 5, 10, 10, (20, 10), (10, 10)),
    "slopes cancel": Case(of_logps(torch.tensor([[1], [-1], [1], [0]]), IDS, None, rows=ROWS), 0, 10, 7, (16, 6), (10, 10)),
}  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("name", CASES)
def test_rows_in_products(name, frozen, backend, monkeypatch):
    """Of no more than a chunk there are logits at a time."""
    call, chunk, forward, live, trained, of_frozen = CASES[name]
    if chunk:
        in_chunks(monkeypatch, chunk)
    (hidden, weight), rows = leaves(frozen), count_products(monkeypatch)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            call(hidden, weight, Options(backend))
        assert rows == {"logits": forward}
        rows.clear()
    with Allocations() as seen:
        call(hidden, weight, Options(backend)).backward()
    projected, back = (frozen and of_frozen) or trained
    assert +rows == +Counter(
        {"logits": projected, "d_hidden": back, "d_weight": 0 if frozen else back}
    )
    assert hidden.grad is not None and hidden.grad.any(-1).sum() == live
    assert not chunk or not any({N, V} <= {*shape} for shape in seen.shapes)


# ---- what rows hold


def test_a_row_without_a_slope_may_hold_anything(backend):
    (hidden, weight), b = leaves(True), batch()
    with torch.no_grad():
        hidden[1, 4] = torch.inf
    logps, _ = linear_logprobs(hidden, weight, b.targets, options=Options(backend))
    torch.where(MASK, logps, 0.0).sum().backward()
    assert (
        not MASK[1, 4]
        and hidden.grad is not None
        and (hidden.grad[1, 4] == 0).all()
        and hidden.grad[1, 0].any()
    )


class AllButTheFirst(Filter):
    """A filter of a user, which may look at the whole batch."""

    def keep(self, logps, *_):
        return torch.arange(len(logps)) > 0


def test_a_row_that_is_not_chosen_may_hold_anything(backend):
    """Of a trained head too, whose products are made before it is known which rows have a slope."""
    call, found = of_loss(Objective.preset("reinforce", filters=(AllButTheFirst(),)), batch()), []
    for held in (0.0, torch.inf):
        hidden, weight = leaves(False)
        with torch.no_grad():
            hidden[0, 0] = held
        call(hidden, weight, Options(backend)).backward()
        found.append((hidden.grad, weight.grad))
    for x, y in zip(*found, strict=True):
        assert x is not None and x.any() and torch.equal(x, y)
    with torch.no_grad():
        hidden[0, 1], hidden.grad = torch.inf, None  # one that is chosen
    call(hidden, weight, Options(backend)).backward()
    assert (
        hidden.grad is not None
        and hidden.grad[0, 1].isnan().all()
        and not hidden.grad[1:].isnan().any()
    )


def test_without_products_the_weight_may_be_gone(backend):
    """As ZeRO-3 and FSDP leave it after the forward of the module that owns it.

    An entropy needs it.
    """

    def gone(weight):
        weight.data = torch.empty(0)

    results = []
    for take_away in (lambda _: None, gone):
        (hidden, weight), (_, trained), b = leaves(True), leaves(False), batch()
        logps, _ = linear_logprobs(hidden, weight, b.targets, mask=MASK, options=Options(backend))
        gathered, loss = trained * 1.0, torch.zeros(())
        for head in (weight, gathered):
            loss = (
                loss
                + linear_grpo_loss(
                    hidden, head, b, Objective.preset("gspo"), options=Options(backend)
                ).loss
            )
            take_away(head)
        (logps.sum() + loss).backward()
        results.append((hidden.grad, trained.grad))
    for x, y in zip(*results, strict=True):
        assert x.any() and torch.equal(x, y)
    (hidden, weight), b = leaves(True), batch()
    _, entropy = linear_logprobs(hidden, weight, b.targets, entropy=True, options=Options(backend))
    assert entropy is not None
    gone(weight)
    with pytest.raises(RuntimeError, match="weight is gone before the backward"):
        entropy.sum().backward()


@pytest.mark.parametrize("mask", [MASK, None], ids=["some rows", "all rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slopes_of_a_kept_block_are_those_of_logits_that_are_made_again(
    dtype, mask, backend, monkeypatch
):
    """All rows in one block, and sequences of which some fit in one, two of them in the same, and
    some do not.
    """
    found, options = [], Options(backend)
    for chunks in (False, True):
        if chunks:
            in_chunks(monkeypatch, 4)
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in leaves(False))
        before = hidden.detach().clone()
        with torch.no_grad():
            logps, _ = linear_logprobs(hidden, weight, batch().targets, mask=mask, options=options)
        advantages = ADVANTAGES if mask is not None else ADVANTAGES + 0.1  # none is 0
        old = logps - 1e-4 * torch.arange(B * T).view(B, T)
        of = replace(batch(), advantages=advantages, mask=mask, old_logps=old)
        out = linear_grpo_loss(hidden, weight, of, Objective.preset("gspo"), options=options)
        out.loss.backward()
        # A library may choose another matmul kernel for another number of rows.
        torch.testing.assert_close(out.logps, logps, rtol=0, atol=H * 2.0**-22)
        assert torch.equal(hidden.detach(), before)
        found.append((hidden.grad, weight.grad))
    # Sums of H and of B * T terms in two orders, each with a rounding a term; bf16 rounds the
    # result.
    tolerance = {torch.float32: 2 * (H + B * T) * 2.0**-24, torch.bfloat16: 2.0**-6}[dtype]
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and other.any()
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * float(other.abs().max()))


def test_a_reference_with_the_weight_of_the_policy_and_a_bias_of_its_own(backend):
    (hidden, weight), options = leaves(True), Options(backend)
    biases = torch.randn(2, V)
    heads = [Head(weight, bias) for bias in biases]
    found = linear_divergence(
        hidden, heads[0], (0.5 * hidden.detach(), heads[1]), mask=MASK, options=options
    )
    log_p, log_q = (
        (scale * hidden @ weight.t() + bias).log_softmax(-1)
        for scale, bias in zip((1.0, 0.5), biases, strict=True)
    )
    expected = torch.where(MASK, (log_p.exp() * (log_p - log_q)).sum(-1), 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
