"""The specs of a call: shapes that are accepted, flat rows, sequences, transforms."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from grpo_kernels import LogitTransform, Objective, TokenBatch, TokenSets, grpo_loss

SHAPE = (3, 4)
OFFSETS = [0, 2, 2, 7, 10]  # four sequences, the second empty


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 4)], ids=str)
@pytest.mark.parametrize("field", ["advantages", "weights"])
def test_values_per_sequence_or_token_padded(field: str, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    batch = TokenBatch(ids(*SHAPE), **{"advantages": torch.zeros(3), field: value})
    column = value if len(shape) == 2 else value[:, None]
    flat = batch.flat(field)
    assert flat is not None and flat.dtype == torch.float32
    assert flat.tolist() == [float(column[b, t if column.shape[1] > 1 else 0]) for b in range(3) for t in range(4)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(4,), (4, 1), (10,)], ids=str)
def test_values_per_sequence_or_token_packed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.randn(shape)
    batch = TokenBatch(ids(10), value, cu_seqlens=torch.tensor(OFFSETS, dtype=dtype))
    flat = batch.flat("advantages")
    assert flat is not None
    owner = [b for b in range(4) for _ in range(OFFSETS[b], OFFSETS[b + 1])]
    assert flat.tolist() == [float(value.reshape(-1)[i if shape == (10,) else owner[i]]) for i in range(10)]


def test_one_number_for_all() -> None:
    batch = TokenBatch(ids(*SHAPE), torch.tensor(2.5))
    flat = batch.flat("advantages")
    assert flat is not None and flat.tolist() == [2.5] * 12


def test_square_batches_are_not_transposed() -> None:
    """B == T: [B] still means one value per sequence."""
    batch = TokenBatch(ids(3, 3), torch.tensor([1.0, 2.0, 3.0]))
    flat = batch.flat("advantages")
    assert flat is not None and flat.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_fields_become_fp32(dtype: torch.dtype) -> None:
    value = torch.randn(SHAPE).to(dtype)
    batch = TokenBatch(ids(*SHAPE), value, old_logps=value)
    for name in ("advantages", "old_logps"):
        flat = batch.flat(name)
        assert flat is not None and flat.dtype == torch.float32 and torch.equal(flat, value.float().reshape(-1))


def test_masked_values_read_as_zero() -> None:
    mask = torch.tensor([[1, 0, 1, 0]] * 3)
    poisoned = torch.where(mask.bool(), 1.5, torch.nan)
    for given in (mask.bool(), mask, mask.to(torch.int32), mask.to(torch.uint8)):
        names = ("old_logps", "ref_logps", "weights", "sampler_logps", "nll_weights")
        batch = TokenBatch(ids(*SHAPE), poisoned, mask=given, **dict.fromkeys(names, poisoned))
        assert batch.mask is not None and batch.mask.dtype == torch.bool
        for name in ("advantages", *names):
            flat = batch.flat(name)
            assert flat is not None and flat.tolist() == [1.5, 0, 1.5, 0] * 3
    assert batch.flat("weights") is not None and TokenBatch(ids(*SHAPE), poisoned[:, 0]).flat("weights") is None


def test_marked_rows() -> None:
    """Tokens of a nonzero advantage and weight contribute, and those with an NLL weight; their sequences with them."""
    advantages = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    weights, nll = torch.tensor([[1.0, 1.0, 0.0]] * 3), torch.zeros(3, 3)
    nll[2, 1] = 0.5
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 1, 1]])
    plain = TokenBatch(ids(3, 3), advantages, weights=weights, mask=mask)
    with_nll = TokenBatch(ids(3, 3), advantages, weights=weights, mask=mask, nll_weights=nll)
    for batch, kind, expected in (
        (plain, "trained", [1, 1, 1, 1, 1, 1, 0, 1, 1]),
        (plain, "contributing", [1, 0, 0, 0, 0, 0, 0, 0, 0]),
        (plain, "sequences", [1, 1, 1, 0, 0, 0, 0, 0, 0]),
        (with_nll, "contributing", [1, 0, 0, 0, 0, 0, 0, 1, 0]),
        (with_nll, "sequences", [1, 1, 1, 0, 0, 0, 0, 1, 1]),
    ):
        marked = batch.marked(kind)
        assert marked is not None and marked.int().tolist() == expected and batch.count(kind) == sum(expected)


def test_groups() -> None:
    batch = TokenBatch(ids(3, 2), torch.zeros(3), groups=torch.tensor([4, -1, 4]))
    assert batch.same_group().tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    with pytest.raises(ValueError, match="groups is None"):
        TokenBatch(ids(3, 2), torch.zeros(3)).same_group()


def test_as_many_rows_as_packed_sequences() -> None:
    """A tensor of that length is one per token; [B, 1] says that it is one per sequence."""
    offsets, values = torch.tensor([0, 2, 2, 3]), torch.tensor([1.0, 2.0, 3.0])
    for advantages, expected in ((values, [1, 2, 3]), (values[:, None], [1, 1, 3])):
        flat = TokenBatch(ids(3), advantages, cu_seqlens=offsets).flat("advantages")
        assert flat is not None and flat.tolist() == expected


def test_sequence_sum_and_spread_padded() -> None:
    batch = TokenBatch(ids(*SHAPE), torch.zeros(3))
    values = torch.arange(12.0)
    assert batch.sequence_sum(values).tolist() == [6, 22, 38]
    assert batch.spread(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1] * 4 + [2] * 4 + [3] * 4
    assert batch.rows == 12 and batch.sequences == 3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sequence_sum_and_spread_packed(dtype: torch.dtype) -> None:
    batch = TokenBatch(ids(10), torch.zeros(4), cu_seqlens=torch.tensor(OFFSETS, dtype=dtype))
    assert batch.sequence_sum(torch.arange(10.0)).tolist() == [1, 0, 20, 24]
    assert batch.spread(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [1, 1, 3, 3, 3, 3, 3, 4, 4, 4]
    assert batch.rows == 10 and batch.sequences == 4


def test_sequence_sum_is_exact_enough() -> None:
    """A sum of log-ratios in fp32 would be too inexact for GSPO's bounds of 3e-4."""
    values = torch.full((1, 50_000), 1e-4) + torch.randn(1, 50_000) * 1e-6
    for batch in (
        TokenBatch(ids(1, 50_000), torch.zeros(1)),
        TokenBatch(ids(50_000), torch.zeros(1), cu_seqlens=torch.tensor([0, 50_000])),
    ):
        assert float(batch.sequence_sum(values.reshape(-1))) == pytest.approx(float(values.double().sum()), rel=1e-12)


def test_packed_without_offsets() -> None:
    batch = TokenBatch(ids(5), torch.randn(5))
    assert batch.rows == 5 and batch.sequences is None


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 0]])
def test_packed_and_empty(offsets: list[int]) -> None:
    batch = TokenBatch(ids(0), torch.zeros(len(offsets) - 1), cu_seqlens=torch.tensor(offsets))
    assert batch.sequences == len(offsets) - 1
    assert batch.sequence_sum(torch.zeros(0)).tolist() == [0.0] * (len(offsets) - 1)


def test_gradients_stay_out() -> None:
    values = torch.randn(3, requires_grad=True)
    flat = TokenBatch(ids(*SHAPE), values).flat("advantages")
    assert flat is not None and not flat.requires_grad


def test_specs_are_frozen() -> None:
    batch = TokenBatch(ids(*SHAPE), torch.zeros(3))
    with pytest.raises(FrozenInstanceError):
        batch.targets = ids(2, 2)  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        LogitTransform().temperature = 2.0  # type: ignore[misc]


def test_temperature_of_rows() -> None:
    """One inverse per row, in the order of the rows; a number stays a number."""
    device = torch.device("cpu")
    shape = torch.Size(SHAPE)
    assert LogitTransform(temperature=0.5).for_rows(shape, None, None, device).inv_temperature == 2.0
    per_sequence = LogitTransform(temperature=torch.tensor([0.5, 1.0, 2.0])).for_rows(shape, None, None, device).inv_temperature
    assert isinstance(per_sequence, torch.Tensor) and per_sequence.tolist() == [2.0] * 4 + [1.0] * 4 + [0.5] * 4
    packed = LogitTransform(temperature=torch.tensor([0.5, 1.0, 2.0, 4.0])).for_rows(
        torch.Size([10]), None, torch.tensor(OFFSETS), device
    )
    assert isinstance(packed.inv_temperature, torch.Tensor)
    assert packed.inv_temperature.tolist() == [2.0] * 2 + [0.5] * 5 + [0.25] * 3
    assert packed.at(slice(1, 4)).inv_temperature.tolist() == [2.0, 0.5, 0.5]  # type: ignore[union-attr]


def test_transform_fields() -> None:
    rows = LogitTransform(temperature=2.0, softcap=30.0, scale=0.5).for_rows(torch.Size([1]), None, None, torch.device("cpu"))
    assert (rows.scale, rows.softcap, rows.inv_temperature) == (0.5, 30.0, 0.5)
    assert LogitTransform().for_rows(torch.Size([1]), None, None, torch.device("cpu")).softcap == 0.0


# ---- other places


def full_batch(missing: str | None) -> TokenBatch:
    """A batch with all fields that need no process group, of all dtypes that a field may have."""
    g = torch.Generator().manual_seed(0)
    logps, halves = torch.randn(10, generator=g), torch.rand(4, generator=g).to(torch.bfloat16)
    return TokenBatch(
        torch.arange(10, dtype=torch.int32), halves[:, None], mask=torch.arange(10) % 4 != 1, old_logps=logps.double(),
        ref_logps=logps, weights=halves[:, None], cu_seqlens=torch.tensor(OFFSETS), sampler_logps=logps.half(),
        nll_weights=logps, groups=torch.tensor([0, 0, 1, 1]), missing=missing,
        kept=TokenSets.from_lists([[i, 11] if i % 3 else [11] for i in range(10)]).with_values(torch.arange(17.0)[:16]),
    )  # fmt: skip


@pytest.mark.parametrize("missing", [None, "mask", "full"])
def test_a_batch_goes_to_another_device(missing: str | None) -> None:
    """Fields, sets and what is kept beside them; dtypes stay. Loss and metrics of a copy are those of the batch."""
    batch, there = full_batch(missing), torch.device("meta")
    counts = [batch.count(kind) for kind in ("trained", "contributing")]
    moved = batch.to(there, non_blocking=True)
    for f in fields(TokenBatch):
        value, was = getattr(moved, f.name), getattr(batch, f.name)
        if isinstance(was, torch.Tensor):
            assert (value.device, value.dtype, value.shape) == (there, was.dtype, was.shape), f.name
    assert isinstance(moved.kept, TokenSets) and moved.kept.ids.device == moved.kept.values.device == there  # type: ignore[union-attr]
    tensors = [x for x in vars(moved).values() if isinstance(x, torch.Tensor)]
    assert len(tensors) >= 9 and all(x.device == there for x in tensors)

    copied = batch._apply(torch.clone)
    assert [copied.count(kind) for kind in ("trained", "contributing")] == counts
    logits = torch.randn(10, 12, generator=torch.Generator().manual_seed(1))
    ours, theirs = (grpo_loss(logits, x, Objective.preset("dapo", beta=0.1), backend="eager") for x in (copied, batch))
    assert torch.equal(ours.loss, theirs.loss) and ours.loss != 0
    assert all(torch.equal(x, theirs.metrics[name]) for name, x in ours.metrics.items()) and theirs.metrics["outside_set"] > 0
    batch.mask.zero_()  # type: ignore[union-attr]
    assert torch.equal(copied.mask, full_batch(missing).mask)  # type: ignore[arg-type]


def test_a_batch_that_is_there_already_stays() -> None:
    batch = full_batch("mask")
    assert batch.to("cpu") is batch and batch.to(torch.device("cpu")) is batch.to(None) is batch
    for wrong in (torch.bfloat16, "nowhere"):
        with pytest.raises(ValueError, match=r"device=.*pass a device"):
            batch.to(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_integer_advantages_are_numbers(dtype: torch.dtype) -> None:
    whole = torch.tensor([0, 1, 2], dtype=dtype)
    batch, same = TokenBatch(ids(*SHAPE), whole), TokenBatch(ids(*SHAPE), whole.float())
    assert batch.advantages.dtype == torch.float32
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))
    ours, theirs = (grpo_loss(logits, x, Objective()).loss for x in (batch, same))
    assert torch.equal(ours, theirs) and ours != 0
    assert replace(batch, mask=None).advantages is batch.advantages
