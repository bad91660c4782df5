"""Which columns the sparse gradient is made of: every backend and instruction set against whole numbers of Python."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from grpo_kernels.rows.backends import Backend
from grpo_kernels.rows.partials import LogitRows, Partials, RowTransform, Slopes
from grpo_kernels.rows.selection import BITS, Drawn, capacity, per_unit, starts
from support.kernel_rows import DTYPES, KERNELS, kernels

Tensor = torch.Tensor

STEP = 1 / 16


@pytest.fixture(params=KERNELS)
def module(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with kernels(request.param) as module:
        yield module


def rows_of(vocab: int, dtype: torch.dtype = torch.float32) -> tuple[LogitRows, Tensor]:
    """(peaked and flat rows with a target that is none, where their running sums begin)."""
    g = torch.Generator().manual_seed(vocab)
    spread = torch.tensor([0.1, 1.0, 3.0, 8.0, 1.0, 2.0, 4.0, 0.5, 1.5])
    logits = (torch.randn(9, vocab, generator=g) * spread[:, None]).to(dtype)
    logits[4, vocab // 2] = -torch.inf
    targets = torch.randint(0, vocab, (9,), generator=g)
    targets[1], targets[2], targets[3] = -3, vocab, logits[3].argmax()
    return LogitRows(logits[None], targets), starts(7, torch.arange(9))


def partials_of(module: Backend, rows: LogitRows) -> Partials:
    return module.stats(rows, ("max", "sum", "target"))


def probabilities(module: Backend, rows: LogitRows) -> Tensor:
    """As the row kernels of a backend have them: the gradient of the log-sum-exp."""
    nowhere, p = rows._replace(targets=torch.full((rows.n,), -1)), torch.empty(rows.logits.shape)
    slopes = Slopes.stacked({"target": torch.zeros(rows.n), "constant": torch.ones(rows.n)})
    module.pull(nowhere, partials_of(module, nowhere), slopes, p)
    return p.view(-1, p.shape[-1])


def expected(p: Tensor, targets: Tensor, first: Tensor, step: float) -> tuple[list[list[int]], list[int]]:
    """(ids, mass of the columns that are sampled) of each row, one column after the other."""
    found, masses = [], []
    units = (p * per_unit(step)).double()  # the product is one of fp32
    for row, target, at in zip(units.tolist(), targets.tolist(), first.tolist(), strict=True):
        ids, begin = [], at
        if not sum(row) < math.inf:  # no probabilities: nothing is drawn
            row = [0.0 for _ in row]
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


SIZES = [(1, DTYPES[0]), (5, DTYPES[1]), (61, DTYPES[1]), (256, DTYPES[2]), (1000, DTYPES[0]), (1003, DTYPES[1])]


@pytest.mark.parametrize("vocab, dtype", SIZES, ids=str)
def test_columns_are_those_of_whole_numbers(module: Backend, vocab: int, dtype: torch.dtype) -> None:
    """Whatever the number of threads."""
    rows, first = rows_of(vocab, dtype)
    partials, p = partials_of(module, rows), probabilities(module, rows)
    for step, threads in ((STEP, 1), (1 / 100, 3), (1.0, 2)):
        torch.set_num_threads(threads)
        drawn, (ids, masses) = module.select(rows, partials, step, first), expected(p, rows.targets, first, step)
        assert ids_of(drawn) == ids and module.masses(rows, partials, step).tolist() == masses
        assert drawn.ids.shape == drawn.logits.shape == (rows.n, capacity(step))
        for found, own, values in zip(ids, rows.logits[0], drawn.logits, strict=True):
            assert torch.equal(values[: len(found)], own[found].float())


def test_transforms(module: Backend) -> None:
    plain, first = rows_of(300)
    for scale, cap, inverse in ((2.0, 0.0, 0.4), (1.0, 3.0, 1.3), (1.0, 3.0, torch.linspace(0.5, 1.5, 9))):
        rows = plain._replace(transform=RowTransform(scale, cap, inverse))
        p = rows.transform.of(rows.logits[0].double(), torch.arange(9)[:, None]).softmax(-1).float()
        found = ids_of(module.select(rows, partials_of(module, rows), STEP, first))
        assert found == expected(p, rows.targets, first, STEP)[0]


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
