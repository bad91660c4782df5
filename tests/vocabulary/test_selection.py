"""Which columns the sparse gradient is made of: every backend and instruction set against whole numbers of Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from grpo_kernels.rows.backends import Backend
from grpo_kernels.rows.partials import LogitRows, Partials, RowTransform, Slopes
from grpo_kernels.rows.selection import BITS, Drawn, capacity, per_unit, starts
from support.kernel_rows import DTYPES, KERNELS, TRITON, kernels

Tensor = torch.Tensor

NAMES = ("max", "sum", "target")
STEP = 1 / 16


@pytest.fixture(params=KERNELS)
def module(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with kernels(request.param) as module:
        yield module


def rows_of(vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """(logits of peaked and flat rows, targets of which one is outside, where the running sums begin)."""
    g = torch.Generator().manual_seed(vocab)
    n = 9
    logits = (torch.randn(n, vocab, generator=g) * torch.tensor([0.1, 1.0, 3.0, 8.0, 1.0, 2.0, 4.0, 0.5, 1.5])[:, None]).to(
        dtype
    )
    logits[4, vocab // 2] = -torch.inf
    targets = torch.randint(0, vocab, (n,), generator=g)
    targets[1], targets[2], targets[3] = -3, vocab, logits[3].argmax()
    return logits, targets, starts(7, torch.arange(n))


def probabilities(module: Backend, logits: Tensor) -> tuple[Partials, Tensor]:
    """As the row kernels of a backend have them: the gradient of the log-sum-exp."""
    n = len(logits)
    nowhere = torch.full((n,), -1)
    rows = LogitRows(logits[None], nowhere)
    stats, p = module.stats(rows, NAMES), torch.empty(logits.shape)
    module.pull(rows, stats, Slopes.stacked({"target": torch.zeros(n), "constant": torch.ones(n)}), p[None])
    return stats, p


def expected(p: Tensor, targets: Tensor, first: Tensor, step: float) -> tuple[list[list[int]], list[int]]:
    """(ids, mass of the columns that are sampled) of each row, one column after the other."""
    found, masses = [], []
    units = (p * per_unit(step)).double()  # the product is one of fp32
    for row, target, at in zip(units.tolist(), targets.tolist(), first.tolist(), strict=True):
        ids, begin = [], at
        for j, u in enumerate(row):
            if j == target or u >= 2**BITS:
                ids.append(j)
                continue
            if (at + int(u)) // 2**BITS > at // 2**BITS:
                ids.append(j)
            at += int(u)
        found.append(ids)
        masses.append(at - begin)
    return found, masses


def ids_of(drawn: Drawn) -> list[list[int]]:
    """Of each row; unused places are behind the used ones."""
    counts = (drawn.ids >= 0).sum(1).tolist()
    assert all((row[count:] == -1).all() for row, count in zip(drawn.ids, counts, strict=True))
    return [row[:count].tolist() for row, count in zip(drawn.ids, counts, strict=True)]


@pytest.mark.parametrize(
    "vocab, dtype",
    [(1, DTYPES[0]), (5, DTYPES[1]), (61, DTYPES[1]), (256, DTYPES[2]), (1000, DTYPES[0]), (1003, DTYPES[1])],
    ids=str,
)
def test_columns_are_those_of_whole_numbers(module: Backend, vocab: int, dtype: torch.dtype) -> None:
    logits, targets, first = rows_of(vocab, dtype)
    stats, p = probabilities(module, logits)
    for step in (STEP, 1 / 100, 1.0):
        rows = LogitRows(logits[None], targets)
        drawn = module.select(rows, stats, step, first)
        ids, masses = expected(p, targets, first, step)
        assert ids_of(drawn) == ids
        assert module.masses(rows, stats, step).tolist() == masses
        assert drawn.ids.shape == drawn.logits.shape == (len(logits), capacity(step))
        for row, own, values in zip(ids, logits, drawn.logits, strict=True):
            assert torch.equal(values[: len(row)], own[row].float())


def test_transforms(module: Backend) -> None:
    logits, targets, first = rows_of(300)
    factors = torch.linspace(0.5, 1.5, len(logits))
    for transform in (RowTransform(2.0, 0.0, 0.4), RowTransform(1.0, 3.0, 1.3), RowTransform(1.0, 3.0, factors)):
        rows = torch.arange(len(logits))[:, None]
        given = LogitRows(logits[None], targets, transform=transform)
        drawn = module.select(given, module.stats(given, NAMES), STEP, first)
        z = transform.of(logits.double(), rows)
        assert ids_of(drawn) == expected(z.softmax(-1).float(), targets, first, STEP)[0]


def test_parts_of_a_row_draw_what_the_row_does(module: Backend) -> None:
    """The running sum of a part goes on from the mass of the parts before."""
    logits, targets, first = rows_of(1000)
    stats, _ = probabilities(module, logits)
    whole = ids_of(module.select(LogitRows(logits[None], targets), stats, STEP, first))
    found: list[list[int]] = [[] for _ in whole]
    for lo, hi in ((0, 300), (300, 301), (301, 1000)):
        part = LogitRows(logits[None, :, lo:hi], targets - lo)
        for row, ids in zip(found, ids_of(module.select(part, stats, STEP, first)), strict=True):
            row += [lo + j for j in ids]
        first = first + module.masses(part, stats, STEP)
    assert found == whole


def test_how_often_a_column_is_drawn(module: Backend) -> None:
    """Of offsets at equal distances a column gets its share, to one."""
    logits = rows_of(40)[0]
    stats, p = probabilities(module, logits)
    often, counts, nowhere = 16 if TRITON else 512, torch.zeros_like(p), torch.full((len(p),), -1)
    for k in range(often):
        drawn = module.select(LogitRows(logits[None], nowhere), stats, STEP, torch.full((len(p),), k * (2**BITS // often)))
        for row, ids in enumerate(ids_of(drawn)):
            counts[row, ids] += 1
    assert ((counts - often * (p / STEP).clamp(max=1)).abs() <= 1.001).all()
    assert counts.max() == often and counts[0].max() < often and (TRITON or counts[0].min() > 0)


def test_rows_without_probabilities(module: Backend) -> None:
    logits = torch.zeros(4, 70)
    logits[0, 3], logits[1, 4], logits[2] = torch.nan, torch.inf, -torch.inf
    rows = LogitRows(logits[None], torch.tensor([9, 10, 11, -1]))
    drawn = module.select(rows, module.stats(rows, NAMES), 1.0, torch.zeros(4, dtype=torch.int64))
    assert ids_of(drawn)[:3] == [[9], [10], [11]]


def test_threads_change_no_bit(module: Backend) -> None:
    logits, targets, first = rows_of(1000)
    stats, _ = probabilities(module, logits)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(module.select(LogitRows(logits[None], targets), stats, STEP, first))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_no_rows_and_strided_rows(module: Backend) -> None:
    logits, targets, first = rows_of(61)
    stats, _ = probabilities(module, logits)
    wide = torch.full((len(logits), 100), torch.nan)[:, 7:68].copy_(logits)
    both = [module.select(LogitRows(x[None], targets), stats, STEP, first) for x in (logits, wide)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    drawn = module.select(LogitRows(logits[None, :0], targets[:0]), stats.at(slice(0, 0)), STEP, first[:0])
    assert drawn.ids.shape == (0, capacity(STEP))


def test_starts_are_those_of_splitmix() -> None:
    def mixed(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    assert mixed(golden) == 0xE220A8397B1DCDAF  # the first number that SplitMix64 gives from the seed 0
    for seed in (0, 1, 2**63 - 1):
        state = mixed((seed + golden) % 2**64)
        rows = [0, 1, 2, 10**9]
        found = starts(seed, torch.tensor(rows))
        assert found.tolist() == [mixed((state + (row + 1) * golden) % 2**64) >> 33 for row in rows]
    many = starts(3, torch.arange(100_000)).double() / 2**BITS
    assert abs(many.mean() - 0.5) < 0.005 and abs((many[1:] - 0.5) @ (many[:-1] - 0.5) / len(many)) < 0.002
