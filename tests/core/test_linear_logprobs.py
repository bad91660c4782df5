"""Layer 1 from hidden states: log-probs, entropy and their gradients against float64, with an upstream gradient per token."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels import linear_logprobs, token_logprobs
from support import oracle
from support.cases import DTYPES, LENGTHS, assert_no_worse, inside_lengths, same_bits
from support.linear_cases import (
    ROUNDING,
    Gradients,
    LinearCase,
    assert_gradients_near,
    assert_gradients_no_worse,
    assert_near,
    build_linear,
    count_products,
    gradients_of,
    in_chunks,
    run_logprobs,
)

Tensor = torch.Tensor
SHAPE = (len(LENGTHS), max(LENGTHS))
ALL = {"temperature": 0.7, "softcap": 6.0, "scale": 1.7}
PER_TOKEN = {"temperature": torch.linspace(0.5, 2.0, SHAPE[0] * SHAPE[1]).view(SHAPE)}


def upstream(which: str) -> tuple[Tensor | None, Tensor | None]:
    """Random gradients of log-probs and entropy; "detached" wants the entropy and gives it none."""
    d_logps, d_entropy = torch.randn(SHAPE), torch.randn(SHAPE)
    return (None if which == "entropy" else d_logps), (d_entropy if which in ("entropy", "both") else None)


def reference(
    case: LinearCase, d_logps: Tensor | None, d_entropy: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Gradients]:
    """Log-probs, entropy (both flat) and gradients by autograd: all of it in float64, or the logits in `dtype` and the rest
    in fp32. Masked rows are left out by indexing."""
    logits, leaves = case.logits(dtype)
    targets, mask = case.tokens.targets, case.tokens.mask
    rows = torch.arange(targets.numel()) if mask is None else mask.reshape(-1).nonzero()[:, 0]
    fp = torch.float64 if dtype == torch.float64 else torch.float32
    picked = dict(case.tokens.transform)
    sequences = oracle.sequences_of(targets, case.tokens.fields.get("cu_seqlens"))
    picked["temperature"] = oracle.to_rows(picked.get("temperature", 1.0), sequences, fp)[rows]
    flat = logits.reshape(-1, logits.shape[-1])[rows].to(fp)
    _, logps, entropy = oracle.log_probs(flat, targets.reshape(-1)[rows], oracle.Transform(**picked))
    total = flat.sum() * 0.0
    for value, d in ((logps, d_logps), (entropy, d_entropy)):
        if d is not None:
            total = total + (value * d.reshape(-1)[rows].to(fp)).sum()
    total.backward()
    whole = [torch.zeros(targets.numel(), dtype=fp).index_put((rows,), x.detach()) for x in (logps, entropy)]
    return whole[0], whole[1], gradients_of(leaves)


# ---- against float64


@pytest.mark.parametrize("which", ["logps", "entropy", "both", "detached"])
@pytest.mark.parametrize("transform", [{}, ALL, PER_TOKEN], ids=["plain", "all", "temperature per token"])
@pytest.mark.parametrize("masked", [False, True], ids=["all rows", "masked"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_matches_float64(
    arithmetic: torch.dtype,
    bias: bool,
    masked: bool,
    transform: dict[str, Any],
    which: str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = build_linear(arithmetic, transform=transform, bias=bias)
    if not masked:
        case.tokens.fields["mask"] = None
    in_chunks(monkeypatch, 9)
    d_logps, d_entropy = upstream(which)
    exact = reference(case, d_logps, d_entropy, torch.float64)
    naive = reference(case, d_logps, d_entropy, arithmetic)
    logps, entropy, ours = run_logprobs(
        case, d_logps, d_entropy, backend, entropy="detached" if which == "detached" else d_entropy is not None
    )
    assert logps.dtype == torch.float32 and (logps <= 0).all() and logps.shape == SHAPE
    assert_no_worse(logps.reshape(-1), naive[0], exact[0], "logps", tiny=1e-6)
    assert (entropy is None) == (which == "logps")
    if entropy is not None:
        assert entropy.dtype == torch.float32 and (entropy >= 0).all() and entropy.shape == SHAPE
        assert_no_worse(entropy.reshape(-1), naive[1], exact[1], "entropy", tiny=1e-6)
    assert_gradients_no_worse(ours, naive[2], exact[2])


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_layouts_agree(packed: bool, arithmetic: torch.dtype, backend: str) -> None:
    """[B, T, H], [N, H] and rows picked by the caller: the same rows in the same order, the same bits."""
    case = build_linear(arithmetic)
    d_logps, d_entropy = upstream("both")
    logps, entropy, exact = run_logprobs(case, d_logps, d_entropy, backend)
    keep = inside_lengths() if packed else case.tokens.fields["mask"]
    part = build_linear(arithmetic, packed=True)
    if not packed:
        part.hidden = case.hidden[keep]
        part.tokens.fields = {"targets": case.tokens.targets[keep]}
    assert d_entropy is not None and d_logps is not None and entropy is not None
    a, b, ours = run_logprobs(part, d_logps[keep], d_entropy[keep], backend)
    assert b is not None and same_bits(a, logps[keep]) and same_bits(b, entropy[keep])
    exact["hidden"] = exact["hidden"][keep]
    for name in ours:
        assert same_bits(ours[name], exact[name]), name


@pytest.mark.parametrize("which", ["logps", "entropy", "both"])
def test_equals_token_logprobs_of_fp32_logits(which: str, arithmetic: torch.dtype, backend: str) -> None:
    case = build_linear(arithmetic, transform=ALL)
    d_logps, d_entropy = upstream(which)
    logps, entropy, ours = run_logprobs(case, d_logps, d_entropy, backend)
    logits, leaves = case.logits(torch.float32)
    plain, plain_entropy = token_logprobs(
        logits,
        case.tokens.targets,
        mask=case.tokens.mask,
        transform=case.tokens.logit_transform(),
        entropy=True,
        backend=backend,
    )
    assert plain_entropy is not None
    outputs = [(x, d) for x, d in ((plain, d_logps), (plain_entropy, d_entropy)) if d is not None]
    torch.autograd.backward([x for x, _ in outputs], [d for _, d in outputs])
    assert_near(logps, plain, 2e-6, "logps")
    if entropy is not None:
        assert_near(entropy, plain_entropy, 2e-6, "entropy")
    assert_gradients_near(ours, gradients_of(leaves), ROUNDING[arithmetic])


def test_confident_tokens_keep_their_gradient(arithmetic: torch.dtype, backend: str) -> None:
    """p = 0.9 ... 0.9999 by a bias: the gradient of the bias at the target is right relative to itself."""
    v, rounding = 1000, {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-10}[arithmetic]
    for p in (0.9, 0.99, 0.999, 0.9999):
        bias = torch.zeros(v)
        bias[17] = math.log(p / (1 - p) * (v - 1))
        bias = bias.to(arithmetic)
        case = LinearCase(torch.zeros(1, 4, dtype=arithmetic), torch.ones(v, 4, dtype=arithmetic), bias, build_linear().tokens)
        case.tokens.fields, ones = {"targets": torch.tensor([17])}, torch.ones(1)
        _, _, exact = reference(case, ones, None, torch.float64)
        _, _, ours = run_logprobs(case, ones, None, backend)
        error = float((ours["bias"].double() - exact["bias"])[17].abs() / exact["bias"][17])
        # 1 - p comes from an fp32 sum of about 1, so it is known to some units of 2^-24: up to 24 with the fewest partial sums.
        assert error <= rounding + 64 * 2**-24 / (1 - p), p


# ---- which rows are touched


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e4])
@pytest.mark.parametrize("wild_id", [-100, 61, -(2**62)])
def test_masked_rows_may_hold_anything(wild_id: int, poison: float, arithmetic: torch.dtype, backend: str) -> None:
    clean = build_linear(arithmetic, transform=copy.deepcopy(PER_TOKEN))
    dirty = copy.deepcopy(clean)
    masked = ~clean.tokens.fields["mask"]
    dirty.hidden[masked], dirty.tokens.fields["targets"][masked] = poison, wild_id
    dirty.tokens.transform["temperature"][masked] = poison
    d_logps, d_entropy = upstream("both")
    assert d_logps is not None and d_entropy is not None
    a = run_logprobs(clean, d_logps, d_entropy, backend)
    b = run_logprobs(dirty, d_logps.masked_fill(masked, poison), d_entropy.masked_fill(masked, poison), backend)
    assert a[1] is not None and b[1] is not None
    assert same_bits(a[0], b[0]) and same_bits(a[1], b[1]) and not b[0][masked].any() and not b[1][masked].any()
    for name, gradient in b[2].items():
        assert same_bits(gradient, a[2][name]), name
    assert not b[2]["hidden"][masked].any()


@pytest.mark.parametrize("which", ["logps", "entropy", "both"])
def test_rows_without_upstream_gradient_are_left_out(
    which: str, arithmetic: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the one product of the forward and in none of the backward, and the others do not notice: the gradients
    are what a mask in their place gives."""
    case = build_linear(arithmetic)
    d_logps, d_entropy = upstream(which)
    idle = torch.rand(SHAPE) < 0.5
    for d in (d_logps, d_entropy):
        if d is not None:
            d[idle] = 0.0
    rows = count_products(monkeypatch)
    _, _, ours = run_logprobs(case, d_logps, d_entropy, backend)
    mask = case.tokens.fields["mask"]
    read, wanted = int(mask.sum()), int((mask & ~idle).sum())
    assert 0 < wanted < read < mask.numel()
    assert rows == {"logits": read + wanted, "d_hidden": wanted, "d_weight": wanted}
    assert not ours["hidden"][idle | ~mask].any() and ours["hidden"][mask & ~idle].any(-1).all()
    _, _, exact = run_logprobs(case, d_logps, d_entropy, backend, mask=mask & ~idle)
    assert_gradients_near(ours, exact, ROUNDING[arithmetic])


def test_no_upstream_gradient_at_all(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build_linear()
    rows = count_products(monkeypatch)
    _, _, ours = run_logprobs(case, torch.zeros(SHAPE), torch.zeros(SHAPE), backend)
    assert not any(g.any() for g in ours.values()) and rows["d_hidden"] == rows["d_weight"] == 0
    assert rows["logits"] == case.tokens.fields["mask"].sum()


def test_unused_entropy_costs_nothing_and_changes_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build_linear()
    d_logps, _ = upstream("logps")
    _, _, plain = run_logprobs(case, d_logps, None, backend)
    rows = count_products(monkeypatch)
    _, _, unused = run_logprobs(case, d_logps, None, backend, entropy=True)
    read = int(case.tokens.fields["mask"].sum())
    assert rows == {"logits": 2 * read, "d_hidden": read, "d_weight": read}
    for name in plain:
        assert same_bits(plain[name], unused[name]), name


def test_no_rows_and_all_masked(arithmetic: torch.dtype, backend: str) -> None:
    case = build_linear(arithmetic)
    case.hidden[0] = math.nan
    none = torch.zeros(SHAPE, dtype=torch.bool)
    d = torch.full(SHAPE, math.nan)
    logps, entropy, ours = run_logprobs(case, d, d, backend, mask=none)
    assert entropy is not None and not logps.any() and not entropy.any() and not any(g.any() for g in ours.values())
    for shape in ((0,), (0, 4), (4, 0)):
        empty = replace(case, hidden=torch.zeros(*shape, 24, dtype=arithmetic), tokens=copy.copy(case.tokens))
        empty.tokens.fields = {"targets": torch.zeros(shape, dtype=torch.int64)}
        logps, entropy, ours = run_logprobs(empty, torch.ones(shape), torch.ones(shape), backend)
        assert entropy is not None and logps.shape == entropy.shape == shape and not any(g.any() for g in ours.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_alone_is_nearly_the_row_in_a_batch(dtype: torch.dtype, backend: str) -> None:
    """Matrix products choose their order of summation by shape, so here, unlike from logits, it is not the same bits; but
    no row sees another. A repetition is the same bits."""
    case = build_linear(dtype)
    case.tokens.fields["mask"] = None
    d_logps, d_entropy = upstream("both")
    assert d_logps is not None and d_entropy is not None
    logps, entropy, exact = run_logprobs(case, d_logps, d_entropy, backend)
    again = run_logprobs(case, d_logps, d_entropy, backend)
    assert entropy is not None and again[1] is not None
    assert same_bits(logps, again[0]) and same_bits(entropy, again[1])
    assert all(same_bits(exact[k], again[2][k]) for k in exact)
    for i, j in ((0, 0), (3, 5), (7, 6)):
        at = (slice(i, i + 1), slice(j, j + 1))
        row = replace(case, hidden=case.hidden[at], tokens=copy.copy(case.tokens))
        row.tokens.fields = {"targets": case.tokens.targets[at]}
        a, b, ours = run_logprobs(row, d_logps[at], d_entropy[at], backend)
        assert b is not None
        torch.testing.assert_close(a, logps[at], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(b, entropy[at], rtol=2e-6, atol=2e-6)
        assert_near(ours["hidden"], exact["hidden"][at], ROUNDING[dtype], "gradient of hidden")


def test_old_and_reference_log_probs_are_those_of_the_loss(backend: str) -> None:
    """Made under no_grad from the same rows: the ratio of an on-policy step is 1, exactly."""
    from grpo_kernels import Objective, TokenBatch, linear_grpo_loss

    case = build_linear()
    leaves = case.leaves
    mask = case.tokens.fields["mask"]
    with torch.no_grad():
        old, _ = linear_logprobs(leaves["hidden"], leaves["weight"], case.tokens.targets, mask=mask, backend=backend)
    assert not old.requires_grad
    batch = TokenBatch(case.tokens.targets, case.tokens.fields["advantages"], mask=mask, old_logps=old)
    for objective in (Objective.preset("reinforce", entropy_coef=0.1), Objective.preset("gspo")):
        out = linear_grpo_loss(leaves["hidden"], leaves["weight"], batch, objective, backend=backend)
        assert same_bits(out.logps, old) and out.metrics["ratio_min"] == 1 == out.metrics["ratio_max"]
