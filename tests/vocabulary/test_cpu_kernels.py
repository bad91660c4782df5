"""The C++ row kernels against float64 torch, for every instruction set that this processor runs.

The rule: an error is at most the error of plain torch in the same dtype, plus a few roundings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from grpo_kernels.vocabulary.backends import cpu
from grpo_kernels.vocabulary.rows import RowStats, RowTransform
from support.rows import EVERYTHING, LOGPS, WITH_ENTROPY, slopes_of

if cpu.available() is not None:
    pytest.skip(cpu.available() or "", allow_module_level=True)

from grpo_kernels import _cpu

Tensor = torch.Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 1.2e-7, torch.bfloat16: 7.9e-3, torch.float16: 9.8e-4}  # one unit in the last place of 1
PLAIN = RowTransform(1.0, 0.0, 1.0)
TRANSFORMS = {
    "plain": PLAIN,
    "temperature": RowTransform(1.0, 0.0, 1 / 0.7),
    "softcap": RowTransform(1.0, 5.0, 1.0),
    "all": RowTransform(-0.5, 3.0, 1 / 1.3),
}


@pytest.fixture(params=_cpu.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _cpu.use_isa(request.param)
    yield request.param
    _cpu.use_isa(_cpu.isas()[0])


class Result(NamedTuple):
    logps: Tensor
    entropy: Tensor
    gradient: Tensor


def random_rows(dtype: torch.dtype, shape: tuple[int, int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, targets and both upstream gradients."""
    g = torch.Generator().manual_seed(seed)
    n = shape[0] * shape[1]
    logits = (torch.randn(shape, generator=g) * 4).to(dtype)
    targets = torch.randint(0, shape[2], (n,), generator=g)
    return logits, targets, torch.randn(n, generator=g), torch.randn(n, generator=g)


def transformed(logits: Tensor, transform: RowTransform) -> Tensor:
    z = logits * transform.scale
    if transform.softcap:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    return z * inverse_temperature(transform, z)


def inverse_temperature(transform: RowTransform, logits: Tensor) -> Tensor | float:
    t = transform.inv_temperature
    return t.to(logits.dtype).view(*logits.shape[:2], 1) if isinstance(t, Tensor) else t


def by_torch(
    logits: Tensor, targets: Tensor, transform: RowTransform, d_logps: Tensor, d_entropy: Tensor, dtype: torch.dtype
) -> Result:
    """The same numbers by autograd, computed in `dtype`."""
    x = logits.detach().to(dtype).requires_grad_()
    everything = transformed(x, transform).flatten(0, 1).log_softmax(-1)
    p = everything.exp()
    entropy = -torch.where(p > 0, p * everything, 0.0).sum(-1)
    logps = everything.gather(1, targets[:, None])[:, 0]
    (gradient,) = torch.autograd.grad((logps * d_logps).sum() + (entropy * d_entropy).sum(), x)
    return Result(logps.detach(), entropy.detach(), gradient)


def by_kernels(
    logits: Tensor,
    targets: Tensor,
    transform: RowTransform,
    d_logps: Tensor,
    d_entropy: Tensor | None,
    out: Tensor | None = None,
    read: Tensor | None = None,
) -> Result:
    stats = cpu.stats(logits, targets, read, transform, WITH_ENTROPY)
    out = torch.full_like(logits, torch.nan) if out is None else out
    cpu.pull(logits, targets, stats, slopes_of(stats, d_logps, d_entropy), transform, out)
    return Result(stats.logps, stats.entropy, out)


def assert_as_good_as_torch(
    ours: Result, logits: Tensor, targets: Tensor, transform: RowTransform, a: Tensor, b: Tensor
) -> None:
    exact = by_torch(logits, targets, transform, a, b, torch.float64)
    naive = by_torch(logits, targets, transform, a, b, torch.float32)
    tiny = 4 * ROUNDING[torch.float32]
    for name in ("logps", "entropy"):
        x, y, z = getattr(ours, name).double(), getattr(exact, name), getattr(naive, name).double()
        # Rounding of large logits falls out a little better or worse for each order of the same operations.
        assert (x - y).abs().max() <= 1.25 * (z - y).abs().max() + tiny * y.abs().max().clamp(min=1.0), name
    error, error_of_torch = (ours.gradient.double() - exact.gradient).abs(), (naive.gradient.double() - exact.gradient).abs()
    # fp16 keeps 2^-25 of absolute error below its normal range; the others 0
    rounding = ROUNDING[ours.gradient.dtype]
    stored = rounding * exact.gradient.abs() + (2**-25 if ours.gradient.dtype == torch.float16 else 0.0)
    # one unit in the last place of the largest logit, times what it is multiplied with
    z = transformed(logits.double(), transform)
    z = z.where(z > -torch.inf, 0.0).abs().amax(-1, keepdim=True).clamp(min=1.0)
    unit = ROUNDING[torch.float32] * z * (a.abs() + b.abs()).view(*logits.shape[:2], 1) * abs(transform.scale)
    excess = error - (stored + error_of_torch.amax(-1, keepdim=True) + unit * inverse_temperature(transform, logits))
    assert excess.max() <= 0, (error.max(), error_of_torch.max())


@pytest.mark.parametrize("vocab", (1, 7, 1000, 32001))
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(dtype: torch.dtype, transform: RowTransform, vocab: int) -> None:
    logits, targets, a, b = random_rows(dtype, (2, 3, vocab) if vocab <= 1000 else (1, 2, vocab))
    assert_as_good_as_torch(by_kernels(logits, targets, transform, a, b), logits, targets, transform, a, b)
    if vocab <= 1000:
        without = by_kernels(logits, targets, transform, a, None)
        assert_as_good_as_torch(without, logits, targets, transform, a, torch.zeros(6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_real_vocabulary(dtype: torch.dtype) -> None:
    logits, targets, a, b = random_rows(dtype, (1, 2, 151936))
    assert_as_good_as_torch(by_kernels(logits, targets, PLAIN, a, b), logits, targets, PLAIN, a, b)


def test_sums_stay_accurate_over_a_million_terms() -> None:
    logits = torch.rand(1, 1, 1 << 20) * 2
    stats = cpu.stats(logits, torch.zeros(1, dtype=torch.int64), None, PLAIN, WITH_ENTROPY)
    d = logits.double() - logits.double().max()
    assert stats.max == logits.max()
    assert stats.get("weighted") is not None
    assert abs(stats.sum / d.exp().sum() - 1) < 5e-7
    assert abs(stats.get("weighted") / (d * d.exp()).sum() - 1) < 5e-7


def test_exp() -> None:
    """Rows of one element at 0 and one at d: the sum and the entropy term show exp(d), wherever between powers of 2 it lies."""
    d = torch.cat(
        [torch.tensor([0.0, -0.3, -1.0, -17.3, -60.0, -86.99, -87.01, -1e4, -torch.inf]), torch.linspace(-86.9, 0, 5000)]
    )
    logits = torch.stack([torch.zeros_like(d), d], dim=-1)[None]
    stats = cpu.stats(logits, torch.zeros(d.numel(), dtype=torch.int64), None, PLAIN, WITH_ENTROPY)
    exact = torch.where(d < -87, 0.0, d.double().exp())
    assert stats.get("weighted") is not None and ((stats.sum - 1 - exact).abs() <= 2e-7).all()
    d = d.double().clamp(min=-1e9)
    assert ((stats.get("weighted") - d * exact).abs() <= (2.2e-7 + 8e-8 * d.abs()) * (d * exact).abs()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", ("all but the last token", "every second row", "a column of sequences", "padded vocabulary"))
def test_strides(dtype: torch.dtype, view: str) -> None:
    whole = random_rows(dtype, (4, 6, 1003))[0]
    logits = {
        "all but the last token": whole[:, :-1],
        "every second row": whole[:, ::2],
        "a column of sequences": whole.transpose(0, 1),
        "padded vocabulary": whole[..., 1:1000],
    }[view]
    _, targets, a, b = random_rows(dtype, tuple(logits.shape))
    dense = logits.contiguous()
    expected = by_kernels(dense, targets, PLAIN, a, b)
    assert_as_good_as_torch(expected, dense, targets, PLAIN, a, b)
    kept = whole.clone()
    got = by_kernels(logits, targets, PLAIN, a, b, out=torch.empty_like(dense))
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert torch.equal(whole, kept)
    # in place through the view: the view changes, and nothing beside it does
    by_kernels(logits, targets, PLAIN, a, b, out=logits)
    assert torch.equal(logits, expected.gradient)
    logits.zero_()
    {"all but the last token": kept[:, :-1], "every second row": kept[:, ::2]}.get(
        view, kept.transpose(0, 1) if view == "a column of sequences" else kept[..., 1:1000]
    ).zero_()
    assert torch.equal(whole, kept)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_equals_out_of_place(dtype: torch.dtype, transform: RowTransform) -> None:
    logits, targets, a, b = random_rows(dtype, (2, 5, 5003))
    expected = by_kernels(logits, targets, transform, a, b).gradient
    assert torch.equal(by_kernels(logits, targets, transform, a, b, out=logits).gradient, expected)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_in_another_dtype(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    logits, targets, a, b = random_rows(dtype, (1, 4, 1009))
    ours = by_kernels(logits, targets, PLAIN, a, b, out=torch.full(logits.shape, torch.nan, dtype=out_dtype))
    assert_as_good_as_torch(ours, logits, targets, PLAIN, a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_temperature_per_row(dtype: torch.dtype) -> None:
    logits, targets, a, b = random_rows(dtype, (2, 3, 1000))
    transform = RowTransform(1.0, 0.0, torch.tensor([0.5, 1.0, 2.0, 0.1, 1.0, 3.0]))
    assert_as_good_as_torch(by_kernels(logits, targets, transform, a, b), logits, targets, transform, a, b)


@pytest.mark.parametrize("shift", (-1e4, 0.0, 1e4))
@pytest.mark.parametrize("transform", (PLAIN, TRANSFORMS["temperature"]), ids=("plain", "temperature"))
def test_peaked_and_shifted_rows(transform: RowTransform, shift: float) -> None:
    """The gradient at a target with p close to 1 is 1 - p, which no subtraction from a rounded p survives."""
    logits, targets, a, b = random_rows(torch.float32, (1, 4, 5000))
    logits[0, torch.arange(4), targets] = torch.tensor([18.0, 22.0, 30.0, 300.0])
    logits = logits + shift
    ours = by_kernels(logits, targets, transform, a, b)
    assert_as_good_as_torch(ours, logits, targets, transform, a, b)
    assert (ours.logps <= 0).all()
    assert (ours.entropy >= 0).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_target_of_a_peaked_row_keeps_its_digits(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 1, 1000, dtype=dtype)
    logits[..., 5] = 16.0
    target = torch.tensor([5])
    exact = by_torch(logits, target, PLAIN, torch.ones(1), torch.zeros(1), torch.float64).gradient[0, 0, 5]
    ours = by_kernels(logits, target, PLAIN, torch.ones(1), None).gradient[0, 0, 5]
    # the sum of the row is fp32, 1 + exact: it holds 1 - p to a few units of 1.2e-7; a bf16 p would be 1
    assert 0 < exact < 2e-4 and abs(ours.double() - exact) <= 3e-7 + ROUNDING[dtype] * exact


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ("scattered", "the first blocks", "all but one"))
def test_minus_infinity(dtype: torch.dtype, where: str) -> None:
    logits, targets, a, b = random_rows(dtype, (1, 4, 9001))
    targets.fill_(9000)
    hidden = {"scattered": slice(0, 9000, 3), "the first blocks": slice(0, 8500), "all but one": slice(0, 9000)}[where]
    logits[..., hidden] = -torch.inf
    ours = by_kernels(logits, targets, PLAIN, a, b)
    finite = torch.ones(9001, dtype=torch.bool)
    finite[hidden] = False
    left = logits[..., finite]
    last = torch.full_like(targets, left.shape[-1] - 1)
    assert (ours.gradient[..., hidden] == 0).all()
    assert_as_good_as_torch(Result(ours.logps, ours.entropy, ours.gradient[..., finite]), left, last, PLAIN, a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", (torch.nan, torch.inf))
@pytest.mark.parametrize("at", (0, 4500, 9002))
def test_nan_and_infinity_show(dtype: torch.dtype, poison: float, at: int) -> None:
    logits, targets, a, b = random_rows(dtype, (1, 3, 9003))
    logits[0, 1, at] = poison
    ours = by_kernels(logits, targets, PLAIN, a, b)
    assert ours.logps[1].isnan() and ours.entropy[1].isnan() and ours.gradient[0, 1].isnan().all()
    alone = [0, 2]
    assert ours.logps[alone].isfinite().all() and ours.gradient[0, alone].isfinite().all()


def test_every_nan_pattern_shows() -> None:
    payloads = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, 0x7FC001FF], dtype=torch.int32).view(torch.float32)
    logits = torch.zeros(1, 5, 40)
    logits[0, torch.arange(5), 17] = payloads
    assert cpu.stats(logits, torch.zeros(5, dtype=torch.int64), None, PLAIN, LOGPS).logps.isnan().all()


def test_a_row_of_minus_infinity_is_nan() -> None:
    logits = torch.full((1, 1, 5000), -torch.inf)
    stats = cpu.stats(logits, torch.zeros(1, dtype=torch.int64), None, PLAIN, WITH_ENTROPY)
    assert stats.max == -torch.inf and stats.logps.isnan() and stats.entropy.isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unread_rows_are_not_looked_at(dtype: torch.dtype) -> None:
    logits, targets, a, b = random_rows(dtype, (2, 3, 1000))
    read = torch.tensor([True, False, True, True, False, True])
    expected = by_kernels(logits, targets, PLAIN, a * read, b * read)
    logits.view(6, 1000)[~read] = torch.nan
    targets[~read] = 1 << 40
    stats = cpu.stats(logits, targets, read, PLAIN, WITH_ENTROPY)
    for vector, value in zip(stats.values, (0.0, 1.0, 0.0, 0.0), strict=True):
        assert (vector[~read] == value).all()
    ours = by_kernels(logits, targets, PLAIN, a * read, b * read, read=read)
    assert torch.equal(ours.gradient, expected.gradient)
    assert (ours.gradient.view(6, 1000)[~read] == 0).all()
    assert torch.equal(ours.logps[read], expected.logps[read])


@pytest.mark.parametrize("target", (-1, -100, 1000, 1 << 60, -(1 << 60)))
def test_target_out_of_range(target: int) -> None:
    logits, targets, _, _ = random_rows(torch.float32, (1, 2, 1000))
    targets[0] = target
    stats = cpu.stats(logits, targets, None, PLAIN, LOGPS)
    assert stats.target[0].isnan() and stats.logps[1].isfinite()
    around = torch.full((3, 2, 1000), 7.0)
    cpu.pull(logits, targets, stats, slopes_of(stats, torch.ones(2)), PLAIN, around[1:2])
    assert (around[[0, 2]] == 7.0).all()


def same_bits(x: RowStats | Result, y: RowStats | Result) -> bool:
    return all(torch.equal(a, b) for a, b in zip(x, y, strict=True) if isinstance(a, Tensor))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_depends_on_nothing_but_itself(dtype: torch.dtype) -> None:
    """Bitwise: not on the number of threads, nor on the range of rows, nor on the rows beside it."""
    logits, targets, a, b = random_rows(dtype, (3, 4, 20011))
    expected = by_kernels(logits, targets, PLAIN, a, b)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert same_bits(by_kernels(logits, targets, PLAIN, a, b), expected)
    out = torch.full_like(logits, torch.nan)
    for lo, hi in ((0, 1), (1, 6), (6, 11), (11, 12)):
        cut = slice(lo, hi)
        stats = cpu.stats(logits, targets[cut], None, PLAIN, WITH_ENTROPY, rows=(lo, hi))
        assert torch.equal(stats.logps, expected.logps[cut]) and torch.equal(stats.entropy, expected.entropy[cut])
        cpu.pull(logits, targets[cut], stats, slopes_of(stats, a[cut], b[cut]), PLAIN, out, rows=(lo, hi))
    assert torch.equal(out, expected.gradient)
    alone = by_kernels(logits[1:2, 2:3], targets[6:7], PLAIN, a[6:7], b[6:7])
    assert torch.equal(alone.gradient[0, 0], expected.gradient[1, 2]) and alone.logps[0] == expected.logps[6]


def test_partials_are_the_same_with_and_without_entropy() -> None:
    logits, targets, _, _ = random_rows(torch.float32, (1, 3, 20011))
    x, y = (cpu.stats(logits, targets, None, PLAIN, names) for names in (WITH_ENTROPY, LOGPS))
    assert (
        y.get("weighted") is None
        and torch.equal(x.max, y.max)
        and torch.equal(x.sum, y.sum)
        and torch.equal(x.target, y.target)
    )


@pytest.mark.parametrize("vocab", (1, 7, 130, 5003))
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_squares_and_largest_probability(dtype: torch.dtype, transform: RowTransform, vocab: int) -> None:
    """Values, and the gradient of all statistics at once, against float64."""
    logits, targets, a, b = random_rows(dtype, (2, 3, vocab))
    c = torch.randn(6, generator=torch.Generator().manual_seed(1))
    stats = cpu.stats(logits, targets, None, transform, EVERYTHING)
    x = logits.double().requires_grad_()
    everything = transformed(x, transform).flatten(0, 1).log_softmax(-1)
    p = everything.exp()
    squares, entropy = p.square().sum(-1), -(p * everything).sum(-1)
    torch.testing.assert_close(stats.sum_squares.double(), squares.detach(), rtol=2e-6, atol=0)
    torch.testing.assert_close(stats.top_prob.double(), p.detach().amax(-1), rtol=2e-6, atol=0)
    ids = stats.top_id
    assert ((0 <= ids) & (ids < vocab)).all()
    best = transformed(logits.double(), transform).flatten(0, 1)
    torch.testing.assert_close(best.gather(1, ids[:, None])[:, 0], best.amax(-1), rtol=1e-6, atol=1e-6)
    logp = everything.gather(1, targets[:, None])[:, 0]
    ((logp * a).sum() + (entropy * b).sum() + (squares * c).sum()).backward()
    out = torch.full(logits.shape, torch.nan)
    cpu.pull(logits, targets, stats, slopes_of(stats, a, b, c), transform, out)
    assert x.grad is not None
    torch.testing.assert_close(out.double(), x.grad, rtol=1e-5, atol=2e-6)


def test_the_largest_probability_of_ties_is_the_first() -> None:
    logits = torch.zeros(1, 3, 300)
    logits[0, 0, [17, 40, 299]] = 3.0
    logits[0, 1] = -torch.inf
    stats = cpu.stats(logits, torch.zeros(3, dtype=torch.int64), None, PLAIN, EVERYTHING)
    assert stats.top_id.tolist() == [17, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 37, 200_003))
def test_scale(dtype: torch.dtype, n: int) -> None:
    x = torch.randn(n).to(dtype)
    x[0] = torch.nan
    expected = (x.float() * 0.3).to(dtype)
    cpu.scale_(x, torch.tensor(0.3))
    assert torch.equal(x.isnan(), expected.isnan()) and torch.equal(x.nan_to_num(), expected.nan_to_num())
    columns = torch.randn(8, 6).to(dtype)
    halved = (columns[:, ::2].float() * 0.5).to(dtype)
    cpu.scale_(columns[:, ::2], torch.tensor(0.5))
    assert torch.equal(columns[:, ::2], halved)


def test_scale_by_one_writes_nothing() -> None:
    x = torch.zeros(1).expand(1 << 40)  # more than the machine has: any pass over it would show
    cpu.scale_(x, torch.tensor(1.0))


def test_no_rows() -> None:
    empty = torch.zeros(0, 3, 10)
    ours = by_kernels(empty, torch.zeros(0, dtype=torch.int64), PLAIN, torch.zeros(0), torch.zeros(0))
    assert ours.logps.shape == (0,) and ours.gradient.shape == (0, 3, 10)
