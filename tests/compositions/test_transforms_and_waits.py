"""Compositions under torch.func, and on a device whose values the host cannot read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grpo_kernels import Exact, TokenSets
from grpo_kernels.candidates import candidate_divergence, candidate_logprobs_with_extra_ids
from grpo_kernels.extra_ids import auxiliary_loss, logprobs_at, logprobs_with_extra_ids
from grpo_kernels.formulas.extra_id_terms import ExtraIdTerms, prob_term
from grpo_kernels.teachers import logprobs_with_teacher, teacher_divergence
from grpo_kernels.trees import shared_row_logprobs
from support.composition_cases import (
    NUM_ROWS,
    SOURCES,
    VOCAB_SIZE,
    Case,
    Source,
    random_mask,
    random_sets,
    weighted_sum,
)
from support.row_sources import Float64Source

STATISTICS = ("entropy", "sum_squares", "top_prob", "top_id")

Inputs = dict[str, Tensor | TokenSets]
Composition = Callable[[Source, Inputs], dict[str, Tensor]]


def make_inputs() -> Inputs:
    g = torch.Generator().manual_seed(1)
    sets = random_sets(NUM_ROWS, g, (1, 2, 5))
    return {
        "targets": torch.randint(VOCAB_SIZE, (NUM_ROWS,), generator=g),
        "rows": torch.randint(NUM_ROWS, (NUM_ROWS,), generator=g),
        "mask": random_mask(NUM_ROWS, g),
        "sets": sets,
        "some sets": random_sets(NUM_ROWS, g, (0, 1, 2, 5)),
        "teacher": sets.with_values(torch.full((len(sets.ids),), -2.0)),
        "reference": torch.randn(NUM_ROWS, VOCAB_SIZE, generator=g, dtype=torch.float64),
    }


def pairs(source: Source, inputs: Inputs) -> dict[str, Tensor]:
    result = logprobs_at(source, inputs["rows"], inputs["targets"], mask=inputs["mask"])
    return {"logps": result.logps, **result.statistics}


def extra_ids(source: Source, inputs: Inputs) -> dict[str, Tensor]:
    sets = inputs["some sets"]
    result = logprobs_with_extra_ids(
        source,
        inputs["targets"],
        sets,
        mask=inputs["mask"],
        names=STATISTICS,
    )
    terms = ExtraIdTerms(((prob_term, torch.ones_like(result.extra_logps)),), sets.offsets)
    advantages = torch.ones(NUM_ROWS, device=sets.ids.device)
    loss = auxiliary_loss(terms, result.extra_logps, advantages)
    return {"loss": loss, "extra": result.extra_logps, **result.statistics}


def shared_rows(source: Source, inputs: Inputs) -> dict[str, Tensor]:
    return shared_row_logprobs(
        source,
        inputs["targets"],
        inputs["rows"],
        mask=inputs["mask"],
        names=STATISTICS,
    )


def candidates(
    source: Source,
    inputs: Inputs,
    *,
    missing: str = "include",
    rows: str = "no rows",
) -> dict[str, Tensor]:
    result = candidate_logprobs_with_extra_ids(
        source,
        inputs["targets"],
        inputs["some sets"],
        inputs["sets"],
        mask=inputs["mask"],
        rows=inputs.get(rows),
        missing=missing,
        names=(*STATISTICS, "log_kept_mass"),
    )
    return {"extra": result.extra_logps, **result.statistics}


def candidates_or_vocabulary(source: Source, inputs: Inputs) -> dict[str, Tensor]:
    return candidates(source, inputs, missing="full")


def candidates_or_nothing(source: Source, inputs: Inputs) -> dict[str, Tensor]:
    return candidates(source, inputs, missing="mask", rows="rows")


def divergence_over_candidates(source: Source, inputs: Inputs) -> dict[str, Tensor]:
    reference = Float64Source(inputs["reference"])
    divergence = candidate_divergence(
        source,
        reference,
        inputs["sets"],
        Exact("jsd"),
        mask=inputs["mask"],
    )
    return {"divergence": divergence}


def teacher(source: Source, inputs: Inputs) -> dict[str, Tensor]:
    exact = Exact("reverse")
    result = logprobs_with_teacher(
        source,
        inputs["targets"],
        inputs["teacher"],
        exact,
        mask=inputs["mask"],
    )
    alone = teacher_divergence(source, inputs["teacher"], exact, mask=inputs["mask"])
    return {"alone": alone, **result}


COMPOSITIONS = [
    pairs,
    extra_ids,
    shared_rows,
    candidates,
    candidates_or_vocabulary,
    candidates_or_nothing,
    divergence_over_candidates,
    teacher,
]


@pytest.mark.parametrize("kind", [kind for kind in SOURCES if "bfloat16" not in kind])
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_torch_func(composition: Composition, kind: str):
    """grad and vjp give the bits of autograd."""
    case = Case.from_kind(kind)
    inputs = make_inputs()

    def loss(tensors: tuple[Tensor, ...]) -> Tensor:
        return weighted_sum(composition(case.source(*tensors), inputs), 1)

    expected = torch.autograd.grad(loss(case.tensors), case.tensors)
    tensors = tuple(x.detach() for x in case.tensors)
    for grads in (
        torch.func.grad(loss)(tensors),
        torch.func.vjp(loss, tensors)[1](torch.ones(()).double())[0],
    ):
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
        assert any(grad.any() for grad in grads)


def to_meta(x: Tensor | TokenSets) -> Tensor | TokenSets:
    if isinstance(x, TokenSets):
        return x._apply(to_meta)
    return torch.empty_like(x, device="meta")


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_no_composition_waits_for_a_device(composition: Composition):
    """Meta tensors have no values. Reading one raises, in the forward and in the backward."""
    inputs = {name: to_meta(x) for name, x in make_inputs().items()}
    leaf = torch.empty(NUM_ROWS, VOCAB_SIZE, dtype=torch.float64, device="meta").requires_grad_()
    results = composition(Float64Source(leaf), inputs)
    losses = [x.double().sum() for name, x in results.items() if x.requires_grad]
    assert losses
    torch.stack(losses).sum().backward()
    assert leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("kind", ["logits float32", "linear float32"])
@pytest.mark.parametrize(
    "composition",
    [pairs, extra_ids, candidates, candidates_or_vocabulary, divergence_over_candidates, teacher],
)
def test_what_is_masked_is_not_read(composition: Composition, kind: str):
    """NaN in a masked row is in no value and no gradient, nor are ids that do not exist."""
    case = Case.from_kind(kind)
    found = []
    for garbage in (False, True):
        inputs = make_inputs()
        rows = case.tensors[0].detach().clone()
        inputs["rows"] = torch.arange(NUM_ROWS)
        if garbage:
            rows[~inputs["mask"]] = torch.nan
            if composition is not pairs:
                inputs["targets"] = torch.where(inputs["mask"], inputs["targets"], 10**12)
        leaves = tuple(x.detach().requires_grad_() for x in (rows, *case.tensors[1:]))
        results = composition(case.source(*leaves), inputs)
        grads = torch.autograd.grad(weighted_sum(results, 1), leaves)
        found.append((*results.values(), *grads))
        assert (grads[0][~inputs["mask"]] == 0).all() and grads[0].any()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
