"""TokenBatch: which shapes and dtypes mean the same, sequences, shifted targets, copies and other devices."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from grpo_kernels import LogitTransform, Objective, Options, TokenBatch, TokenSets, grpo_loss, token_logprobs
from grpo_kernels.batch import shift_targets
from grpo_kernels.losses import objective_loss
from support.bits import same_bits

Tensor = torch.Tensor
OFFSETS = [0, 2, 2, 7, 10]  # four sequences, the second empty
#: All terms; sums of sequences and of tokens.
OBJECTIVE = Objective.preset("gspo", beta=0.1, kl_aggregate="token-mean")


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def slopes(batch: TokenBatch, objective: Objective | None = None) -> Tensor:
    """Of a loss, by the log-probs of all tokens: whatever a batch says shows in them."""
    objective = objective or (OBJECTIVE if batch.ref_logps is not None else Objective())
    logps = torch.linspace(-3.0, -0.5, batch.targets.numel()).view(batch.targets.shape).requires_grad_()
    return torch.autograd.grad(objective_loss(logps, batch, objective).loss, logps)[0]


def batch_of(packed: bool, **changes: Any) -> TokenBatch:
    """Every field given, one number a token."""
    shape = (10,) if packed else (3, 4)
    g = torch.Generator().manual_seed(4)
    given = {name: torch.rand(shape, generator=g) for name in ("advantages", "weights", "nll_weights")}
    given |= {name: -1 - torch.rand(shape, generator=g) for name in ("old_logps", "ref_logps", "sampler_logps")}
    cuts = {"cu_seqlens": torch.tensor(OFFSETS)} if packed else {}
    return TokenBatch(ids(*shape), **{**given, **cuts, **changes})


def test_as_many_rows_as_packed_sequences() -> None:
    """A tensor of that length is one number a token; [B, 1] says that it is one a sequence. Square batches are not transposed."""
    square, values = ids(3, 3), torch.tensor([1.0, 2.0, 3.0])
    assert same_bits(slopes(TokenBatch(square, values)), slopes(TokenBatch(square, values[:, None].expand(3, 3))))
    reinforce, offsets = Objective.preset("reinforce"), torch.tensor([0, 2, 2, 3])
    for given, expected in ((values, [1, 2, 3]), (values[:, None], [1, 1, 3])):
        found = slopes(TokenBatch(ids(3), given, cu_seqlens=offsets), reinforce)
        torch.testing.assert_close(-3 * found, torch.tensor(expected).float())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float16, torch.bfloat16], ids=str)
def test_advantages_of_any_dtype_are_numbers(dtype: torch.dtype) -> None:
    whole = torch.tensor([0, 1, 2], dtype=dtype)
    batch = TokenBatch(ids(3, 4), whole)
    assert batch.advantages.is_floating_point() and same_bits(slopes(batch), slopes(TokenBatch(ids(3, 4), whole.float())))
    assert replace(batch, mask=None).advantages is batch.advantages


def test_sums_of_sequences_are_exact_enough() -> None:
    """A sum of log-ratios in fp32, one after another, would be wrong in the fifth digit."""
    n = 50_000
    moved = torch.full((1, n), 1e-4) + torch.randn(1, n) * 1e-6
    ratio = float(moved.double().sum().exp())
    for shape, cuts in (((1, n), {}), ((n,), {"cu_seqlens": torch.tensor([0, n])})):
        batch = TokenBatch(ids(*shape), -torch.ones(1), old_logps=-moved.view(shape), **cuts)
        out = objective_loss(torch.zeros(shape).requires_grad_(), batch, Objective.preset("rloo"))
        assert float(out.metrics["ratio_mean"]) == pytest.approx(ratio, rel=1e-6)
        assert float(out.loss.detach()) == pytest.approx(ratio, rel=1e-6)


def test_any_leading_shape_of_log_probs() -> None:
    logits, targets = torch.randn(2, 3, 4, 7), torch.randint(7, (2, 3, 4))
    expected = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(token_logprobs(logits, targets)[0], expected)
    torch.testing.assert_close(token_logprobs(logits[0, 0, 0], targets[0, 0, 0])[0], expected[0, 0, 0])


# ---- copies, and other places


def test_specs_are_frozen_and_are_printed_without_values() -> None:
    batch, transform = batch_of(True), LogitTransform(torch.ones(3, 4))
    with pytest.raises(FrozenInstanceError):
        batch.targets = batch.targets  # type: ignore[misc]
    out = grpo_loss(torch.randn(10, 5), batch, Objective())
    for printed in map(repr, (batch, out, out.rows, transform)):
        assert "tensor(" not in printed and "\n" not in printed and "float32 [" in printed and "=None" not in printed
    assert copy.copy(out).loss is out.loss and pickle.loads(pickle.dumps(out.metrics)).keys() == out.metrics.keys()


@pytest.mark.parametrize("missing", [None, "mask", "full"])
def test_a_batch_goes_to_another_device(missing: str | None) -> None:
    """Fields and sets; dtypes stay. The loss and the metrics of a copy are those of the batch."""
    kept = TokenSets.from_lists([[i, 11] if i % 3 else [11] for i in range(10)]).with_values(torch.arange(17.0)[:16])
    own = {"mask": torch.arange(10) % 4 != 1, "targets": torch.arange(10, dtype=torch.int32), "kept": kept}
    batch, there = replace(batch_of(True), **own, missing=missing), torch.device("meta")
    batch.count("trained")  # what is kept beside the fields goes too
    moved = batch.to(there)
    assert isinstance(moved.kept, TokenSets) and moved.kept.values is not None and moved.kept.values.device == there
    assert all(x.device == there for x in vars(moved).values() if isinstance(x, Tensor)) and moved.targets.dtype == torch.int32
    logits, objective, options = torch.randn(10, 12), Objective.preset("dapo", beta=0.1), Options("eager")
    expected = grpo_loss(logits, batch, objective, options=options)
    assert expected.loss != 0 and expected.metrics["outside_set"] > 0 and batch.to("cpu") is batch
    for copied in (copy.deepcopy(batch), batch.to("cpu:0")):  # which is no device of the batch's name
        found = grpo_loss(logits, copied, objective, options=options)
        assert torch.equal(found.loss, expected.loss)
        assert all(torch.equal(value, expected.metrics[name]) for name, value in found.metrics.items())


# ---- targets of shifted ids


def test_shift_never_crosses_a_sequence() -> None:
    """Of padded ids, and of packed ones whose sequences are known in two ways; a mask is that of the tokens."""
    at, cuts, segments = torch.arange(10, 21), [0, 4, 4, 5, 11], torch.tensor([7, 7, 7, 7, 2, 5, 5, 5, 5, 5, 5])
    completion = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1]).bool()
    expected = [row for lo, hi in pairwise(cuts) for row in [*range(lo + 1, hi), None][: hi - lo]]
    known: list[dict[str, Tensor]] = [{"cu_seqlens": torch.tensor(cuts).int()}, {"segment_ids": segments}]
    for given in known:
        targets, mask = shift_targets(at, mask=completion, **given)
        assert mask.tolist() == [row is not None and bool(completion[row]) for row in expected]
        assert all(row is None or target == at[row] for target, row in zip(targets.tolist(), expected, strict=True))
    two = {"segment_ids": torch.stack([segments, torch.zeros_like(segments)])}
    assert shift_targets(at.repeat(2, 1), **two)[1].tolist() == [[row is not None for row in expected], [True] * 10 + [False]]
    targets, mask = shift_targets(torch.tensor([[5, 6, 7], [9, 1, 2]]), mask=torch.tensor([[0, 1, 1], [0, 1, 0]]))
    assert targets.tolist() == [[6, 7, 0], [1, 2, 0]] and mask.int().tolist() == [[1, 1, 0], [1, 0, 0]]
