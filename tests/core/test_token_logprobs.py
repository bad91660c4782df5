"""Layer 1: log-probs and entropy of the chosen tokens, value and gradient, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_kernels import LogitTransform, token_logprobs
from support.cases import DTYPES, assert_no_worse, same_bits
from support.logprob_cases import ALL, ours, random_rows, reference

Tensor = torch.Tensor
# ---- against float64


@pytest.mark.parametrize("upstream", ["logps", "entropy", "both"])
@pytest.mark.parametrize("transform", [{}, {"temperature": 0.7}, ALL], ids=["plain", "temperature", "all"])
@pytest.mark.parametrize("vocab", [1, 7, 1000, 4099])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_float64(dtype: torch.dtype, vocab: int, transform: dict[str, Any], upstream: str, backend: str) -> None:
    """With a random upstream gradient for every token."""
    logits, targets, d_logps, d_entropy = random_rows(12, vocab, dtype)
    d = (d_logps if upstream != "entropy" else None, d_entropy if upstream != "logps" else None)
    exact = reference(logits, targets, *d, torch.float64, **transform)
    naive = reference(logits, targets, *d, torch.float32, **transform)
    logps, entropy, gradient = ours(logits, targets, *d, backend, transform=transform)
    assert logps.dtype == torch.float32 and gradient.dtype == dtype
    if vocab == 1:
        assert not logps.any() and not gradient.any() and (entropy is None or not entropy.any())
        return
    assert (logps <= 0).all()
    assert_no_worse(logps, naive[0], exact[0], "logps", tiny=1e-6)
    if entropy is not None:
        assert entropy.dtype == torch.float32 and (entropy >= 0).all()
        assert_no_worse(entropy, naive[1], exact[1], "entropy", tiny=1e-6)
    assert_no_worse(gradient, naive[2], exact[2], "gradient")


@pytest.mark.parametrize("vocab", [32001, 129921])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_odd_vocabularies(dtype: torch.dtype, vocab: int, backend: str) -> None:
    logits, targets, d_logps, d_entropy = random_rows(3, vocab, dtype)
    targets[0] = vocab - 1  # the last lane of the last tile
    logits[1] = 0.0  # flat: nothing but the count of the lanes decides
    exact = reference(logits, targets, d_logps, d_entropy, torch.float64)
    naive = reference(logits, targets, d_logps, d_entropy, torch.float32)
    logps, entropy, gradient = ours(logits, targets, d_logps, d_entropy, backend)
    assert entropy is not None
    assert logps[1] == pytest.approx(-math.log(vocab), rel=2e-7) and entropy[1] == pytest.approx(math.log(vocab), rel=2e-7)
    assert_no_worse(logps, naive[0], exact[0], "logps", tiny=1e-6)
    assert_no_worse(entropy, naive[1], exact[1], "entropy", tiny=1e-6)
    assert_no_worse(gradient, naive[2], exact[2], "gradient")
    # Relative to each row's own size: a sum with a drift would show in the flat row.
    row_error = (gradient.double() - exact[2]).abs().amax(1) / exact[2].abs().amax(1)
    assert (row_error < {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]).all()


@pytest.mark.parametrize("vocab", [7, 37])
def test_probabilities_sum_to_one(vocab: int, backend: str) -> None:
    logits = (4 * torch.randn(5, 1, vocab)).expand(5, vocab, vocab)
    targets = torch.arange(vocab).expand(5, vocab)
    logps, _ = token_logprobs(logits, targets, backend=backend)
    torch.testing.assert_close(logps.double().exp().sum(1), torch.ones(5, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["number", "0-d", "[B]", "[B, 1]", "[B, T]"])
def test_temperature_kinds(kind: str, backend: str) -> None:
    logits, targets = 3 * torch.randn(4, 5, 33), torch.randint(33, (4, 5))
    per_token = 0.5 + torch.rand(4, 5)
    if kind in ("number", "0-d"):
        per_token = torch.full((4, 5), 0.75)
    elif kind != "[B, T]":
        per_token = per_token[:, :1].expand(4, 5)
    given: Any = {
        "number": 0.75, "0-d": torch.tensor(0.75), "[B]": per_token[:, 0], "[B, 1]": per_token[:, :1], "[B, T]": per_token,
    }[kind]  # fmt: skip
    d_logps, d_entropy = torch.randn(4, 5), torch.randn(4, 5)
    exact = reference(logits, targets, d_logps, d_entropy, torch.float64, temperature=per_token)
    naive = reference(logits, targets, d_logps, d_entropy, torch.float32, temperature=per_token)
    logps, entropy, gradient = ours(logits, targets, d_logps, d_entropy, backend, transform={"temperature": given})
    assert entropy is not None
    assert_no_worse(logps, naive[0], exact[0], "logps", tiny=1e-6)
    assert_no_worse(entropy, naive[1], exact[1], "entropy", tiny=1e-6)
    assert_no_worse(gradient, naive[2], exact[2], "gradient")


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_temperature_equals_dividing_the_logits(temperature: float, backend: str) -> None:
    logits, targets, _, _ = random_rows(9, 50)
    a = token_logprobs(logits, targets, transform=LogitTransform(temperature=temperature), entropy=True, backend=backend)
    b = token_logprobs(logits / temperature, targets, entropy=True, backend=backend)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("vocab", [1000, 32001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_peaked_rows(dtype: torch.dtype, vocab: int, backend: str) -> None:
    """The target's gradient is right relative to itself where p is close to 1 (a bf16 `p - 1` would be wrong by 100 %)."""
    p = torch.tensor([0.5, 0.9, 0.99, 0.999, 0.9999], dtype=torch.float64)
    logits = torch.zeros(len(p), vocab, dtype=dtype)
    logits[:, 5] = torch.log(p / (1 - p) * (vocab - 1)).to(dtype)
    targets, ones = torch.full((len(p),), 5), torch.ones(len(p))
    exact = reference(logits, targets, ones, None, torch.float64)
    naive = reference(logits, targets, ones, None, torch.float32)
    logps, _, gradient = ours(logits, targets, ones, None, backend)
    assert_no_worse(logps, naive[0], exact[0], "logps", tiny=1e-6)
    error, size = (gradient.double() - exact[2])[:, 5].abs(), exact[2][:, 5].abs()
    # 1 - p comes from an fp32 sum of about 1, so it is known to some units of 2^-24: 5 to 24 of them, by the number of partial sums
    # that an instruction set has (torch's own: 50 and 1400 with AVX-512, 100 and 2750 with AVX2).
    rounding = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype] * size
    assert (error <= rounding + 64 * 2**-24).all(), error / size
    assert_no_worse(gradient[:, 5], naive[2][:, 5], exact[2][:, 5], "gradient of the target")


# ---- extreme logits


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_shifted_logits(shift: float, backend: str) -> None:
    """Multiples of 2^-8 survive a shift of 10^4 in fp32, so nothing at all may change but rounding."""
    logits, targets, d_logps, d_entropy = random_rows(6, 1031)
    logits = (logits * 256).round() / 256
    plain = ours(logits, targets, d_logps, d_entropy, backend)
    shifted = ours(logits + shift, targets, d_logps, d_entropy, backend)
    for x, y, what in zip(plain, shifted, ("logps", "entropy", "gradient"), strict=True):
        assert x is not None and y is not None
        torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6, msg=lambda m, what=what: f"{what}: {m}")
    exact = reference(logits, targets, d_logps, d_entropy, torch.float64)
    torch.testing.assert_close(shifted[0].double(), exact[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", [-1e4, -6e4, 6e4])
def test_very_large_logits(level: float, dtype: torch.dtype, backend: str) -> None:
    """Rows far from 0 in every dtype, and rows with a spread of 10^4."""
    logits, targets, d_logps, d_entropy = random_rows(6, 300, dtype)
    logits[:3] += level
    logits[3:] *= 3e3
    targets[3:] = logits[3:].float().argmax(1)
    exact = reference(logits, targets, d_logps, d_entropy, torch.float64)
    naive = reference(logits, targets, d_logps, d_entropy, torch.float32)
    logps, entropy, gradient = ours(logits, targets, d_logps, d_entropy, backend)
    assert entropy is not None
    assert_no_worse(logps, naive[0], exact[0], "logps", tiny=1e-6)
    assert_no_worse(entropy, naive[1], exact[1], "entropy", tiny=1e-6)
    assert_no_worse(gradient, naive[2], exact[2], "gradient")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [7, 1031, 9000])
def test_scattered_minus_infinity(vocab: int, dtype: torch.dtype, backend: str) -> None:
    """As constrained decoding and top-k masks leave them: log-prob, entropy and gradient stay finite."""
    logits, targets, d_logps, d_entropy = random_rows(8, vocab, dtype)
    hidden = torch.rand(logits.shape) < 0.5
    hidden[1] = torch.arange(vocab) < vocab - 1  # a single survivor, in the last lane
    hidden[2] = torch.arange(vocab) > 0  # a single survivor, in the first lane
    targets[1], targets[2] = vocab - 1, 0
    hidden[torch.arange(8), targets] = False
    logits[hidden] = -math.inf
    exact = reference(logits, targets, d_logps, d_entropy, torch.float64)
    naive = reference(logits, targets, d_logps, d_entropy, torch.float32)
    logps, entropy, gradient = ours(logits, targets, d_logps, d_entropy, backend)
    assert entropy is not None
    assert_no_worse(logps, naive[0], exact[0], "logps", tiny=1e-6)
    assert_no_worse(entropy, naive[1], exact[1], "entropy", tiny=1e-6)
    assert_no_worse(gradient, naive[2], exact[2], "gradient")
    assert not gradient[hidden].any() and logps[1] == 0 == entropy[1]


def test_impossible_target(backend: str) -> None:
    """The target itself is at -inf: its log-prob is -inf, as in torch; the other rows and the entropy do not suffer."""
    logits, targets, _, _ = random_rows(3, 40)
    logits[1, targets[1]] = -math.inf
    logps, entropy = token_logprobs(logits, targets, entropy=True, backend=backend)
    exact = reference(logits, targets, None, torch.zeros(3), torch.float64)
    assert entropy is not None and logps[1] == -math.inf
    torch.testing.assert_close(logps.double(), exact[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), exact[1], rtol=1e-6, atol=1e-6)


def test_row_of_only_minus_infinity_is_nan(backend: str) -> None:
    """Documented, as torch.log_softmax has it; masked, it is 0; the rows around it are untouched."""
    logits, targets, _, _ = random_rows(3, 40)
    clean, _ = token_logprobs(logits, targets, entropy=True, backend=backend)
    logits[1] = -math.inf
    logps, entropy = token_logprobs(logits, targets, entropy=True, backend=backend)
    assert entropy is not None and logps[1].isnan() and entropy[1].isnan()
    assert same_bits(logps[::2].contiguous(), clean[::2].contiguous())
    logps, entropy = token_logprobs(logits, targets, mask=torch.tensor([True, False, True]), entropy=True, backend=backend)
    assert entropy is not None and logps[1] == 0 == entropy[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 20, 39])
def test_nan_is_not_hidden(bad: float, at: int, backend: str) -> None:
    """A NaN or +inf logit at a row that counts shows in its results, instead of a plausible number."""
    logits, targets, _, _ = random_rows(3, 40)
    targets[1] = 7
    logits[1, at] = bad
    logps, entropy, gradient = ours(logits, targets, torch.ones(3), torch.ones(3), backend)
    assert entropy is not None and logps[1].isnan() and entropy[1].isnan() and gradient[1].isnan().any()
    assert torch.isfinite(logps[::2]).all() and torch.isfinite(gradient[::2]).all()


# ---- masks


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e4])
@pytest.mark.parametrize("wild_id", [-100, 50, 2**31, -(2**62)])
def test_masked_rows_may_hold_anything(wild_id: int, poison: float, backend: str) -> None:
    logits, targets, d_logps, d_entropy = random_rows(20, 50)
    mask = torch.rand(20) < 0.6
    temperature = torch.full((20,), 0.9)
    clean = ours(logits, targets, d_logps, d_entropy, backend, mask=mask, transform={"temperature": temperature})
    logits[~mask], targets[~mask], temperature[~mask] = poison, wild_id, poison
    d_logps[~mask], d_entropy[~mask] = poison, poison
    dirty = ours(logits, targets, d_logps, d_entropy, backend, mask=mask, transform={"temperature": temperature})
    for x, y in zip(clean, dirty, strict=True):
        assert x is not None and y is not None and same_bits(x, y)
        assert x[mask].all(dim=-1).all() and not x[~mask].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows_and_all_masked(dtype: torch.dtype, backend: str) -> None:
    for shape in ((0,), (0, 4), (4, 0)):
        logits, targets = torch.randn(*shape, 9, dtype=dtype), torch.zeros(shape, dtype=torch.int64)
        logps, entropy, gradient = ours(logits, targets, torch.ones(shape), torch.ones(shape), backend)
        assert entropy is not None and logps.shape == entropy.shape == shape and gradient.shape == logits.shape
    logits = torch.full((2, 3, 9), math.nan, dtype=dtype)
    targets = torch.full((2, 3), -100)
    ones = torch.ones(2, 3)
    logps, entropy, gradient = ours(logits, targets, ones, ones, backend, mask=torch.zeros(2, 3, dtype=torch.bool))
    assert entropy is not None and not logps.any() and not entropy.any() and not gradient.any()


# ---- batch invariance, layouts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [61, 5003])
def test_row_alone_is_bitwise_the_row_in_a_batch(dtype: torch.dtype, vocab: int, backend: str) -> None:
    logits, targets, d_logps, d_entropy = random_rows(23, vocab, dtype)
    batch = ours(logits, targets, d_logps, d_entropy, backend)
    again = ours(logits, targets, d_logps, d_entropy, backend)
    order = torch.randperm(23)
    permuted = ours(logits[order], targets[order], d_logps[order], d_entropy[order], backend)
    for x, y, z in zip(batch, again, permuted, strict=True):
        assert x is not None and y is not None and z is not None and same_bits(x, y) and same_bits(x[order], z)
    for i in (0, 7, 22):
        at = slice(i, i + 1)
        alone = ours(logits[at], targets[at], d_logps[at], d_entropy[at], backend)
        for x, y in zip(batch, alone, strict=True):
            assert x is not None and y is not None and same_bits(x[at], y)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", ["[:, :-1]", "[:, 1:]", "transposed", "every second row", "odd offset", "vocabulary slice"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_logits(dtype: torch.dtype, layout: str, inplace: bool, backend: str) -> None:
    b, t, v = 3, 5, 37
    shape, take = {
        "[:, :-1]": ((b, t + 1, v), lambda x: x[:, :-1]),
        "[:, 1:]": ((b, t + 1, v), lambda x: x[:, 1:]),
        "transposed": ((t, b, v), lambda x: x.transpose(0, 1)),
        "every second row": ((b, 2 * t, v), lambda x: x[:, ::2]),
        "odd offset": ((b * t * v + 1,), lambda x: x[1:].view(b, t, v)),
        "vocabulary slice": ((b, t, v + 6), lambda x: x[..., 3:-3]),
    }[layout]
    leaf = torch.full(shape, math.nan, dtype=dtype)
    take(leaf).copy_(3 * torch.randn(b, t, v))
    targets, d_logps, d_entropy = torch.randint(v, (b, t)), torch.randn(b, t), torch.randn(b, t)
    expected = ours(take(leaf).contiguous(), targets, d_logps, d_entropy, backend)
    leaf.requires_grad_()
    logps, entropy = token_logprobs(take(leaf * 1.0), targets, entropy=True, inplace=inplace, backend=backend)
    torch.autograd.backward([logps, entropy], [d_logps, d_entropy])
    assert leaf.grad is not None and entropy is not None and expected[1] is not None
    assert same_bits(logps.detach(), expected[0]) and same_bits(entropy.detach(), expected[1])
    assert same_bits(take(leaf.grad).contiguous(), expected[2])
    assert leaf.grad.count_nonzero() == expected[2].count_nonzero()


def test_vocabulary_with_a_stride(backend: str) -> None:
    base = torch.randn(4, 3, 20)
    targets = torch.randint(10, (4, 3))
    ones = torch.ones(4, 3)
    expected = ours(base[..., ::2].contiguous(), targets, ones, None, backend)
    leaf = base.clone().requires_grad_()
    token_logprobs(leaf[..., ::2], targets, backend=backend)[0].sum().backward()
    assert leaf.grad is not None and same_bits(leaf.grad[..., ::2].contiguous(), expected[2]) and not leaf.grad[..., 1::2].any()


@pytest.mark.parametrize("what", ["targets int32", "targets strided", "mask int", "upstream strided", "upstream expanded"])
def test_other_layouts_of_small_tensors(what: str, backend: str) -> None:
    logits, targets = torch.randn(4, 6, 21), torch.randint(21, (4, 6))
    mask, d = torch.rand(4, 6) < 0.7, torch.randn(4, 6)
    if what == "upstream expanded":
        d = torch.full((4, 6), 0.37)
    expected = ours(logits, targets, d, None, backend, mask=mask)
    if what == "targets int32":
        targets = targets.int()
    elif what == "targets strided":
        targets, mask = targets.t().contiguous().t(), mask.t().contiguous().t()
    elif what == "mask int":
        mask = mask.long()
    elif what == "upstream strided":
        d = torch.stack([d, torch.full_like(d, math.nan)], -1)[..., 0]
    else:
        d = torch.tensor(0.37).expand(4, 6)
    got = ours(logits, targets, d, None, backend, mask=mask)
    assert same_bits(got[0], expected[0]) and same_bits(got[2], expected[2])


def test_many_rows(backend: str) -> None:
    n, v = 65_537, 3
    logits, targets, d_logps, d_entropy = random_rows(n, v)
    exact = reference(logits, targets, d_logps, d_entropy, torch.float64)
    logps, entropy, gradient = ours(logits, targets, d_logps, d_entropy, backend)
    assert entropy is not None
    torch.testing.assert_close(logps.double(), exact[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), exact[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact[2], rtol=1e-5, atol=2e-6)
