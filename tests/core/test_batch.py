"""TokenBatch: which shapes and dtypes mean the same, sequences, shifted targets, copies and other devices."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
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


def test_rows_and_sequences_are_counted() -> None:
    batch = batch_of(True)
    assert (batch.rows, batch.sequences) == (10, 4) and replace(batch, cu_seqlens=None).sequences is None
    assert (batch_of(False).rows, batch_of(False).sequences) == (12, 3)
    for empty in ([0], [0, 0], [0, 0, 0]):
        nothing = TokenBatch(ids(0), torch.zeros(len(empty) - 1), cu_seqlens=torch.tensor(empty))
        assert nothing.sequences == len(empty) - 1 and slopes(nothing).shape == (0,)


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


def test_specs_are_frozen_and_are_printed_without_values() -> None:
    transform = LogitTransform(torch.ones(3, 4))
    for spec, name in ((batch_of(False), "targets"), (transform, "temperature")):
        with pytest.raises(FrozenInstanceError):
            setattr(spec, name, 2.0)
    out = grpo_loss(torch.randn(3, 4, 5), batch_of(False), Objective())
    for printed in map(repr, (batch_of(True), out, out.rows, transform)):
        assert "tensor(" not in printed and "\n" not in printed and "float32 [" in printed and "=None" not in printed
    assert repr(TokenBatch(ids(3, 4), torch.ones(3))) == "TokenBatch(targets=int64 [3, 4], advantages=float32 [3])"
    assert not hasattr(out, "backward") and copy.copy(out).loss is out.loss and copy.deepcopy(out.metrics) == out.metrics
    assert type(out.metrics) is not dict and pickle.loads(pickle.dumps(out.metrics)).keys() == out.metrics.keys()


def test_any_leading_shape_of_log_probs() -> None:
    logits, targets = torch.randn(2, 3, 4, 7), torch.randint(7, (2, 3, 4))
    expected = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(token_logprobs(logits, targets)[0], expected)
    torch.testing.assert_close(token_logprobs(logits[0, 0, 0], targets[0, 0, 0])[0], expected[0, 0, 0])


# ---- other places


def full_batch(missing: str | None) -> TokenBatch:
    """Every field that needs no process group, of all dtypes that it may have."""
    halves = torch.rand(4, 1).to(torch.bfloat16)
    kept = TokenSets.from_lists([[i, 11] if i % 3 else [11] for i in range(10)]).with_values(torch.arange(17.0)[:16])
    own = {"mask": torch.arange(10) % 4 != 1, "targets": torch.arange(10, dtype=torch.int32), "missing": missing}
    given = batch_of(True, advantages=halves, weights=halves, groups=torch.tensor([0, 0, 1, 1]), kept=kept)
    return replace(given, old_logps=given.ref_logps.double(), **own)  # type: ignore[union-attr]


@pytest.mark.parametrize("missing", [None, "mask", "full"])
def test_a_batch_goes_to_another_device(missing: str | None) -> None:
    """Fields and sets; dtypes stay. The loss and the metrics of a copy are those of the batch."""
    batch, there = full_batch(missing), torch.device("meta")
    batch.count("trained")  # what is kept beside the fields goes too
    moved = batch.to(there, non_blocking=True)
    for f in fields(TokenBatch):
        value, was = getattr(moved, f.name), getattr(batch, f.name)
        if isinstance(was, Tensor):
            assert (value.device, value.dtype, value.shape) == (there, was.dtype, was.shape), f.name
    assert isinstance(moved.kept, TokenSets) and moved.kept.ids.device == moved.kept.values.device == there  # type: ignore[union-attr]
    assert all(x.device == there for x in vars(moved).values() if isinstance(x, Tensor))
    logits, objective, options = torch.randn(10, 12), Objective.preset("dapo", beta=0.1), Options("eager")
    expected = grpo_loss(logits, batch, objective, options=options)
    assert expected.loss != 0 and expected.metrics["outside_set"] > 0
    for copied in (copy.deepcopy(batch), batch.to("cpu:0")):  # which is no device of the batch's name
        found = grpo_loss(logits, copied, objective, options=options)
        assert torch.equal(found.loss, expected.loss)
        assert all(torch.equal(value, expected.metrics[name]) for name, value in found.metrics.items())


def test_a_batch_that_is_there_already_stays() -> None:
    batch = full_batch("mask")
    assert batch.to("cpu") is batch and batch.to(torch.device("cpu")) is batch.to(None) is batch


# ---- targets of shifted ids


def test_shift_never_crosses_a_sequence() -> None:
    """Of padded ids, and of packed ones whose sequences are known in three ways; a mask is that of the tokens."""
    at, cuts = torch.arange(10, 21), [0, 4, 4, 5, 11]
    positions, segments = torch.tensor([0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5]), torch.tensor([7, 7, 7, 7, 2, 5, 5, 5, 5, 5, 5])
    completion = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1]).bool()
    expected = [row for lo, hi in pairwise(cuts) for row in [*range(lo + 1, hi), None][: hi - lo]]
    known: list[dict[str, Tensor]] = [{"cu_seqlens": torch.tensor(cuts)}, {"segment_ids": segments}]
    for given in (*known, {"cu_seqlens": torch.tensor(cuts).int()}, {"segment_ids": (positions == 0).cumsum(-1)}):
        targets, mask = shift_targets(at, mask=completion, **given)
        assert mask.tolist() == [row is not None and bool(completion[row]) for row in expected]
        assert all(row is None or target == at[row] for target, row in zip(targets.tolist(), expected, strict=True))
    two = {"segment_ids": torch.stack([segments, torch.zeros_like(segments)])}
    assert shift_targets(at.repeat(2, 1), **two)[1].tolist() == [[row is not None for row in expected], [True] * 10 + [False]]
    targets, mask = shift_targets(torch.tensor([[5, 6, 7, 8], [9, 1, 2, 3]]), mask=torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]))
    assert targets.tolist() == [[6, 7, 8, 0], [1, 2, 3, 0]]
    assert mask.int().tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 0), (2, 1)])
def test_shift_of_empty_and_single_token_sequences(shape: tuple[int, ...]) -> None:
    targets, mask = shift_targets(ids(*shape))
    assert targets.shape == shape and not mask.any()


@pytest.mark.parametrize("kind, expected", [
    ("trained", [1, 1, 1, 1, 1, 1, 0, 1, 1]), ("contributing", [1, 0, 0, 0, 0, 0, 0, 1, 0]), ("sequences", [1, 1, 1, 0, 0, 0, 0, 1, 1]),
])  # fmt: skip
def test_marked_rows(kind: str, expected: list[int]) -> None:
    """Tokens of an advantage and a weight that are not 0 contribute, and those with an NLL weight; their sequences with them."""
    advantages, weights = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 0, 0]]), torch.tensor([[1.0, 1, 0]] * 3)
    nll, mask = torch.zeros(3, 3), torch.tensor([[1, 1, 1], [1, 1, 1], [0, 1, 1]])
    nll[2, 1] = 0.5
    batch = TokenBatch(ids(3, 3), advantages, weights=weights, mask=mask, nll_weights=nll)
    marked: Callable[[str], Any] = batch.marked
    assert marked(kind).int().tolist() == expected and batch.count(kind) == sum(expected)


# ---- rewards


@pytest.mark.parametrize("name", ["dapo", "gspo", "reinforce"])
def test_no_advantage_is_no_gradient(name: str, backend: str) -> None:
    """Groups of one and groups of equal rewards: not small, but zero, in the loss as in every bit of the gradient. Rewards of 1e30
    are those of 1 where the scale is their deviation."""
    logits, targets, old = torch.randn(4, 3, 9), torch.randint(9, (4, 3)), -torch.rand(4, 3)

    def run(rewards: Tensor, size: int, **options: Any) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        batch = TokenBatch.from_rewards(targets, rewards, group_size=size, old_logps=old, **options)
        out = grpo_loss(leaf, batch, Objective.preset(name), options=Options(backend=backend))
        out.loss.backward()
        assert leaf.grad is not None and (out.logps < 0).all()
        return out.loss.detach(), leaf.grad

    for size in (1, 4):
        loss, gradient = run(torch.full((4,), 0.1), size)
        assert loss == 0 and not gradient.any()
    rewards = torch.tensor([1.0, -1.0, 1.0, 1.0])
    (loss, gradient), (huge, of_huge) = (run(x, 2, eps=0.0) for x in (rewards, 1e30 * rewards))
    assert same_bits(loss, huge) and same_bits(gradient, of_huge) and gradient[:2].any() and not gradient[2:].any()
