"""Layer 2 from hidden states: value and gradients against float64, and against the same loss in other layouts."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels import Head, LogitTransform, Objective, TokenBatch, linear_grpo_loss, linear_logprobs
from grpo_kernels.vocabulary.products import products_for
from support import oracle
from support.cases import (
    DTYPES,
    LENGTHS,
    OBJECTIVES,
    assert_no_worse,
    contributes_alone,
    inside_lengths,
    near_a_kink,
    run,
    same_bits,
    some,
)
from support.linear_cases import (
    ROUNDING,
    LinearCase,
    assert_gradients_near,
    assert_gradients_no_worse,
    assert_near,
    build_linear,
    in_chunks,
    run_linear,
    run_logprobs,
)

Tensor = torch.Tensor
BOTH = ("dapo", "grpo, k3 and entropy", "gspo")  # token-level, everything on, sequence-level

ARITHMETICS = ("float32", "bfloat16", "bfloat16 through fp32", "float16")
#: (packed, arithmetic). Packing arranges rows ahead of any product, so the quick suite packs in one arithmetic.
LAYOUTS = [
    pytest.param(
        packed, name, id=f"{'packed' if packed else 'padded'}-{name}", marks=[pytest.mark.slow] if packed and i else []
    )
    for packed in (False, True)
    for i, name in enumerate(ARITHMETICS)
]

#: Which rows are skipped is decided ahead of any product: packed in one arithmetic, padded in that one and one of the others.
SKIPPED = [
    *(pytest.param(*case.values, False, id=f"{case.id}-padded", marks=case.marks) for case in some(ARITHMETICS)),
    *(pytest.param(name, "float32", True, id=f"{name}-float32-packed") for name in OBJECTIVES),
]


# ---- against the oracle


@pytest.mark.parametrize("packed, arithmetic", LAYOUTS, indirect=["arithmetic"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_matches_oracle(name: str, arithmetic: torch.dtype, packed: bool, backend: str) -> None:
    make, spec = OBJECTIVES[name]
    case = build_linear(arithmetic, packed=packed)
    expected, exact = case.expected(spec)
    naive, theirs = case.naive(spec)
    out, ours = run_linear(case, make(), backend)
    assert out.loss.dtype == torch.float32 and out.loss.shape == ()
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_no_worse(out.logps.reshape(-1), naive.logps, expected.logps, "logps")
    assert_no_worse(out.entropy.reshape(-1), naive.entropy, expected.entropy, "entropy")
    assert out.logps.shape == out.entropy.shape == case.tokens.targets.shape
    assert_gradients_no_worse(ours, theirs, exact)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_cases_are_not_trivial(name: str) -> None:
    """Both sides of the clip are active, no token is near a kink, and even the naive computation clips the same tokens:
    where it did not, its error would allow anything."""
    _, spec = OBJECTIVES[name]
    for dtype in DTYPES:
        case = build_linear(dtype)
        expected, exact = case.expected(spec)
        naive, _ = case.naive(spec)
        assert not near_a_kink(expected) and abs(expected.loss) > 1e-2
        assert all(g.abs().max() > 5e-3 for g in exact.values())
        for side in ("clipped_low", "clipped_high"):
            assert torch.equal(getattr(naive, side), getattr(expected, side))
            assert getattr(expected, side).sum() >= 2 or spec.surrogate != "clip"


@pytest.mark.parametrize("name", ["dapo, k3", "gspo", "grpo, k3 and entropy"])
@pytest.mark.parametrize(
    "transform",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "softcap": 6.0, "scale": 0.8},
        {"temperature": torch.linspace(0.5, 2.0, len(LENGTHS))},
        {"temperature": torch.linspace(0.5, 2.0, len(LENGTHS) * max(LENGTHS)).view(len(LENGTHS), -1), "softcap": 6.0},
    ],
    ids=["temperature", "all", "per sequence", "per token"],
)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_transform_matches_oracle(
    transform: dict[str, Any], bias: bool, name: str, arithmetic: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, spec = OBJECTIVES[name]
    case = build_linear(arithmetic, transform=transform, bias=bias)
    in_chunks(monkeypatch, 7)  # a chunk takes its own rows of the temperatures
    expected, exact = case.expected(spec)
    naive, theirs = case.naive(spec)
    out, ours = run_linear(case, make(), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_gradients_no_worse(ours, theirs, exact)


@pytest.mark.parametrize("missing", ["old_logps", "mask", "weights"])
@pytest.mark.parametrize("name", BOTH)
def test_absent_fields_match_oracle(name: str, missing: str, backend: str) -> None:
    make, spec = OBJECTIVES[name]
    case = build_linear(transform={"temperature": 1.1})
    case.tokens.fields[missing] = None
    expected, exact = case.expected(spec)
    naive, theirs = case.naive(spec)
    out, ours = run_linear(case, make(), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_gradients_no_worse(ours, theirs, exact)


@pytest.mark.parametrize("name", (*BOTH, "kl-cov"))
def test_nll_weights_match_oracle(name: str, arithmetic: torch.dtype, backend: str) -> None:
    """A term of its own, for tokens without advantage too: their gradient is not skipped."""
    make, spec = OBJECTIVES[name]
    case = build_linear(arithmetic)
    case.tokens.fields["nll_weights"] = 0.1 * torch.rand(case.tokens.targets.shape)
    expected, exact = case.expected(spec)
    naive, theirs = case.naive(spec)
    out, ours = run_linear(case, make(), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_gradients_no_worse(ours, theirs, exact)
    skipping, the_same = run_linear(case, make(), backend, skip_inactive=True)
    assert same_bits(out.loss, skipping.loss) and all(same_bits(the_same[k], ours[k]) for k in ours)


@pytest.mark.parametrize("vocab, width", [(1, 8), (2, 1), (7, 3), (1031, 33), (32001, 40)])
def test_odd_sizes(vocab: int, width: int, arithmetic: torch.dtype, backend: str) -> None:
    make, spec = OBJECTIVES["dapo, k3"]
    case = build_linear(arithmetic, vocab=vocab, width=width)
    out, ours = run_linear(case, make(), backend)
    assert (out.logps <= 0).all()
    if vocab == 1:
        assert not out.logps.any() and not any(g.any() for g in ours.values())
        return
    expected, exact = case.expected(spec)
    naive, theirs = case.naive(spec)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss", tiny=2e-5)
    assert_gradients_no_worse(ours, theirs, exact, tiny=2e-5)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    "hidden, weight",
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)],
    ids=["bf16 x fp32", "fp32 x bf16", "fp16 x fp32"],
)
def test_mixed_dtypes(hidden: torch.dtype, weight: torch.dtype, name: str, backend: str) -> None:
    """A head wider or narrower than the hidden states; each gradient comes in its own tensor's dtype. Where there are
    products in the dtype of the hidden states a wider head counts rounded to it, elsewhere nothing is rounded."""
    make, spec = OBJECTIVES[name]
    case = build_linear(hidden, weight_dtype=weight)
    computed = case
    if products_for(case.weight, None, hidden).dtype == torch.bfloat16:
        computed = replace(case, weight=case.weight.bfloat16().to(weight))
    expected, exact = computed.expected(spec)
    naive, theirs = computed.naive(spec)
    out, ours = run_linear(case, make(), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_gradients_no_worse(ours, theirs, exact)


# ---- identities


@pytest.mark.parametrize("name, arithmetic", some(ARITHMETICS), indirect=["arithmetic"])
def test_equals_the_loss_of_fp32_logits(name: str, arithmetic: torch.dtype, backend: str) -> None:
    """grpo_loss of the logits that are never made: the same rows, so the same numbers up to the order of the sums."""
    case, objective = build_linear(arithmetic, transform={"temperature": 0.9, "softcap": 8.0}), OBJECTIVES[name][0]()
    out, ours = run_linear(case, objective, backend)
    logits, leaves = case.logits(torch.float32)
    plain, d_logits = run(case.tokens.with_logits(logits.detach()), objective, backend)
    exact = dict(zip(leaves, torch.autograd.grad(logits, list(leaves.values()), d_logits), strict=True))
    tokens = case.tokens.batch()
    terms, *_ = objective.token_stage(plain.logps.view(-1), plain.entropy.view(-1), objective.token_rows(tokens), tokens)
    # Of the terms, not of the loss: it may be 200 times smaller than they are, where those of either sign nearly cancel.
    assert (out.loss - plain.loss).abs() <= 2e-6 * terms.abs().sum()
    assert_near(out.logps, plain.logps, 2e-6, "logps")
    assert_near(out.entropy, plain.entropy, 2e-6, "entropy")
    assert_gradients_near(ours, exact, ROUNDING[arithmetic])
    for key, value in plain.metrics.items():
        torch.testing.assert_close(out.metrics[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    assert out.metrics.keys() == plain.metrics.keys()


@pytest.mark.parametrize("name, arithmetic", some(ARITHMETICS), indirect=["arithmetic"])
def test_equals_layer_1_and_token_stage(name: str, arithmetic: torch.dtype, backend: str) -> None:
    """The fused loss = log-probs, then Objective.token_stage, then autograd with its slopes."""
    case, objective = build_linear(arithmetic, transform={"temperature": 0.9}), OBJECTIVES[name][0]()
    out, fused = run_linear(case, objective, backend)
    batch = case.tokens.batch()
    shape = batch.targets.shape
    losses, d_logps, d_entropy = objective.token_stage(
        out.logps.reshape(-1), out.entropy.reshape(-1), objective.token_rows(batch), batch
    )
    logps, entropy, ours = run_logprobs(
        case, d_logps.view(shape), None if d_entropy is None else d_entropy.view(shape), backend, entropy=True
    )
    assert entropy is not None
    assert_near(losses.sum(), out.loss, 1e-5, "loss")
    assert_near(logps, out.logps, 2e-6, "logps")
    assert_near(entropy, out.entropy, 2e-6, "entropy")
    assert_gradients_near(ours, fused, ROUNDING[arithmetic])


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_chunks_change_nothing(name: str, rows: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, objective = build_linear(transform={"temperature": 0.9}), OBJECTIVES[name][0]()
    whole, exact = run_linear(case, objective, backend)
    in_chunks(monkeypatch, rows)
    out, ours = run_linear(case, objective, backend)
    assert_near(out.loss, whole.loss, 1e-5, "loss")
    assert_near(out.logps, whole.logps, 2e-6, "logps")
    assert_gradients_near(ours, exact, ROUNDING[torch.float32])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_packed_equals_padded(name: str, backend: str) -> None:
    """The rows that count are the same and stand in the same order, so even the bits of a row are the same."""
    objective = OBJECTIVES[name][0]()
    padded, packed = build_linear(), build_linear(packed=True)
    inside = inside_lengths()
    assert same_bits(padded.hidden[inside], packed.hidden)
    a, ga = run_linear(padded, objective, backend)
    b, gb = run_linear(packed, objective, backend)
    torch.testing.assert_close(a.loss, b.loss, rtol=2e-6, atol=1e-7)
    assert same_bits(a.logps[inside], b.logps) and same_bits(a.entropy[inside], b.entropy)
    ga["hidden"] = ga["hidden"][inside]
    assert_gradients_near(ga, gb, 1e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo", "luspo", "grpo, k3 and entropy"])
def test_micro_batches_add_up(name: str, packed: bool, backend: str) -> None:
    """Into the same .grad of hidden states and head, with the normaliser of the whole; one of four is fully masked."""
    objective = OBJECTIVES[name][0]()
    whole = build_linear()
    whole.tokens.fields["mask"][2:4] = False
    reference, exact = run_linear(whole, objective, backend)
    total = objective.normalizer(whole.tokens.batch())
    lengths = torch.tensor(LENGTHS)
    loss, sums = torch.zeros(()), {k: torch.zeros_like(v) for k, v in exact.items()}
    for i in range(0, len(LENGTHS), 2):
        at = slice(i, i + 2)
        part = LinearCase(whole.hidden[at], whole.weight, whole.bias, copy.copy(whole.tokens))
        part.tokens.fields = {k: v[at] for k, v in whole.tokens.fields.items()}
        inside = inside_lengths()[at]
        if packed:
            part.hidden = part.hidden[inside]
            part.tokens.fields = {k: v if k == "advantages" else v[inside] for k, v in part.tokens.fields.items()}
            part.tokens.fields["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[at].cumsum(0)])
        out, ours = run_linear(part, objective, backend, normalizer=total)
        loss += out.loss.detach()
        if packed:
            sums["hidden"][at] = torch.zeros_like(sums["hidden"][at]).masked_scatter_(inside[..., None], ours["hidden"])
        else:
            sums["hidden"][at] = ours["hidden"]
        sums["weight"] += ours["weight"]
        sums["bias"] += ours["bias"]
    assert_near(loss, reference.loss, 1e-5, "loss")
    assert_gradients_near(sums, exact, ROUNDING[torch.float32])


@pytest.mark.parametrize("name, arithmetic, packed", SKIPPED, indirect=["arithmetic"])
def test_skip_inactive_is_exact(name: str, arithmetic: torch.dtype, packed: bool, backend: str) -> None:
    """Rows of zero advantage or weight may be left out of the first product too: bitwise the same loss and gradients."""
    objective, case = OBJECTIVES[name][0](), build_linear(arithmetic, packed=packed)
    case.tokens.fields["weights"].view(-1)[0] = 0.0
    sequences = oracle.sequences_of(case.tokens.targets, case.tokens.fields.get("cu_seqlens"))
    advantages = oracle.to_rows(case.tokens.fields["advantages"], sequences, torch.float32)
    idle = ((advantages == 0) | (case.tokens.fields["weights"].reshape(-1) == 0)).view(case.tokens.targets.shape)
    assert idle[case.tokens.fields["mask"]].sum() >= 5
    full, exact = run_linear(case, objective, backend)
    if contributes_alone(OBJECTIVES[name][1]):
        case.hidden[idle] = math.nan  # shows whether they are read
        assert not exact["hidden"][idle].any()
    out, ours = run_linear(case, objective, backend, skip_inactive=True)
    assert same_bits(out.loss, full.loss)
    for key, gradient in ours.items():
        assert same_bits(gradient, exact[key]), key
    trained = case.tokens.fields["mask"] & ~idle
    assert same_bits(out.logps[trained], full.logps[trained])
    for key in ("tokens", "zero_advantage"):
        assert same_bits(out.metrics[key], full.metrics[key])
    assert all(torch.isfinite(m) for m in out.metrics.values())


# ---- masks and empty batches


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e4])
@pytest.mark.parametrize("wild_id", [-100, 61, 2**31])
@pytest.mark.parametrize("name", BOTH)
def test_masked_rows_may_hold_anything(name: str, wild_id: int, poison: float, backend: str) -> None:
    objective = OBJECTIVES[name][0]()
    clean = build_linear(transform={"temperature": torch.full((len(LENGTHS), max(LENGTHS)), 0.8)})
    dirty = copy.deepcopy(clean)
    masked = ~clean.tokens.fields["mask"]
    dirty.hidden[masked] = poison
    fields = dirty.tokens.fields
    fields["targets"][masked] = wild_id
    fields["advantages"] = torch.where(masked, poison, clean.tokens.fields["advantages"][:, None])
    for field in ("old_logps", "ref_logps", "weights", "sampler_logps"):
        fields[field][masked] = poison
    dirty.tokens.transform["temperature"][masked] = poison
    out, exact = run_linear(clean, objective, backend)
    out_dirty, ours = run_linear(dirty, objective, backend)
    assert same_bits(out.loss, out_dirty.loss)
    assert same_bits(out.logps, out_dirty.logps) and same_bits(out.entropy, out_dirty.entropy)
    for key, gradient in ours.items():
        assert same_bits(gradient, exact[key]), key
    assert not out.logps[masked].any() and not out.entropy[masked].any() and not ours["hidden"][masked].any()
    for key, value in out.metrics.items():
        assert same_bits(value, out_dirty.metrics[key]) and torch.isfinite(value), key


@pytest.mark.parametrize("name, arithmetic", some(ARITHMETICS), indirect=["arithmetic"])
def test_all_masked(name: str, arithmetic: torch.dtype, backend: str) -> None:
    """A micro-batch that trains on nothing still takes part: its gradients are zeros, not None (DDP waits for them)."""
    case = build_linear(arithmetic)
    case.tokens.fields["mask"] = torch.zeros_like(case.tokens.fields["mask"])
    case.hidden[0] = math.nan
    out, ours = run_linear(case, OBJECTIVES[name][0](), backend)
    assert out.loss.item() == 0 and not out.logps.any() and not any(g.any() for g in ours.values())
    assert all(torch.isfinite(m) for m in out.metrics.values())


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_all_advantages_zero(name: str, arithmetic: torch.dtype, backend: str) -> None:
    """Groups of equal rewards: log-probs and metrics, and gradients of exactly 0."""
    case = build_linear(arithmetic)
    case.tokens.fields["advantages"] = torch.zeros(len(LENGTHS))
    out, ours = run_linear(case, OBJECTIVES[name][0](), backend)
    assert out.loss.item() == 0 and not any(g.any() for g in ours.values())
    expected, _ = build_linear(arithmetic).expected(OBJECTIVES[name][1])
    assert_near(out.logps.reshape(-1), expected.logps, 1e-5, "logps")
    assert out.metrics["zero_advantage"] == 1


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_no_rows(shape: tuple[int, ...], arithmetic: torch.dtype, backend: str) -> None:
    case = build_linear(arithmetic)
    case.hidden = torch.zeros(*shape, 24, dtype=arithmetic)
    case.tokens.fields = {"targets": torch.zeros(shape, dtype=torch.int64), "advantages": torch.zeros(shape)}
    out, ours = run_linear(case, OBJECTIVES["dapo"][0](), backend)
    assert out.loss.item() == 0 and out.logps.shape == shape and not any(g.any() for g in ours.values())
    assert all(torch.isfinite(m) for m in out.metrics.values())


def test_a_reference_head_stands_for_its_log_probs() -> None:
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(2, 5, 8, generator=g, requires_grad=True), torch.randn(31, 8, generator=g)
    other, other_weight, bias = torch.randn(2, 5, 8, generator=g), torch.randn(31, 8, generator=g), torch.randn(31, generator=g)
    targets, mask = torch.randint(0, 31, (2, 5), generator=g), torch.rand(2, 5, generator=g) > 0.3
    batch = TokenBatch(targets, torch.randn(2, generator=g), mask=mask)
    objective, transform = Objective.preset("grpo", beta=0.3), LogitTransform(0.8, softcap=4.0)
    ref = linear_logprobs(other, other_weight, targets, bias=bias, mask=mask, transform=transform)[0]
    given = linear_grpo_loss(hidden, weight, replace(batch, ref_logps=ref), objective, transform=transform)
    made = linear_grpo_loss(hidden, weight, batch, objective, transform=transform, reference=(other, other_weight, bias))
    assert float(given.metrics["kl"]) > 0.1 and torch.equal(given.loss, made.loss)
    assert torch.equal(*(torch.autograd.grad(out.loss, hidden)[0] for out in (given, made)))
    with pytest.raises(ValueError, match=r"reference and batch\.ref_logps are both given"):
        linear_grpo_loss(hidden, weight, replace(batch, ref_logps=ref), objective, reference=(other, other_weight))
    with pytest.raises(ValueError, match=r"reference is list: pass \(hidden, weight\)"):
        linear_grpo_loss(hidden, weight, batch, objective, reference=[other, other_weight])  # type: ignore[arg-type]


# ---- a head as one


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_a_head_stands_for_its_parts(name: str, backend: str) -> None:
    make, _ = OBJECTIVES[name]
    case = build_linear(transform={"temperature": 0.8, "softcap": 9.0})
    _, gradients = run_linear(case, make(), backend)
    leaves, total = case.leaves, torch.zeros(case.weight.shape)
    head = Head(leaves["weight"], leaves["bias"], case.tokens.logit_transform(), grad=total)
    linear_grpo_loss(leaves["hidden"], head, case.tokens.batch(), make(), backend=backend).loss.backward()
    for leaf in ("hidden", "bias"):
        assert same_bits(leaves[leaf].grad, gradients[leaf])
    assert leaves["weight"].grad is None
    torch.testing.assert_close(total, gradients["weight"], rtol=1e-6, atol=1e-8)
    options = {"mask": case.tokens.mask, "backend": backend}
    plain, _ = linear_logprobs(
        case.hidden, case.weight, case.tokens.targets, bias=case.bias, transform=case.tokens.logit_transform(), **options
    )
    whole = Head(case.weight, case.bias, case.tokens.logit_transform())
    assert same_bits(linear_logprobs(case.hidden, whole, case.tokens.targets, **options)[0], plain)
    with pytest.raises(ValueError, match="bias is given beside a Head: put it into the Head"):
        linear_grpo_loss(case.hidden, whole, case.tokens.batch(), make(), bias=case.bias)
