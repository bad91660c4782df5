"""Layer 2: value and gradient of the fused loss, against the float64 oracle and against the same loss in other layouts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_kernels import LogitTransform, Objective, grpo_loss, token_logprobs
from grpo_kernels.formulas.surrogates import Clip, Custom, ops
from support import oracle
from support.cases import (
    ADVANTAGES,
    DTYPES,
    LENGTHS,
    OBJECTIVES,
    Case,
    assert_no_worse,
    build,
    contributes_alone,
    filtered,
    near_a_kink,
    pack,
    run,
    same_bits,
    some,
)

Tensor = torch.Tensor
BOTH = ("dapo", "grpo, k3 and entropy", "gspo")  # token-level, everything on, sequence-level
#: Objectives whose terms depend on the whole batch, or which have their own denominator.
WHOLE = ("clip-cov", "kl-cov", "entropy quantile, bonus of its own", "dapo, k3+ of its own")

#: Packing arranges rows, whatever they hold, so the quick suite packs in one dtype.
LAYOUTS = [
    pytest.param(
        dtype, packed, id=f"{dtype}-{'packed' if packed else 'padded'}", marks=[pytest.mark.slow] if packed and i else []
    )
    for i, dtype in enumerate(DTYPES)
    for packed in (False, True)
]

#: Objectives whose micro-batches add up: padded and packed in turn, those of BOTH as either.
PARTED = [
    pytest.param(
        name, packed, id=f"{name}-{'packed' if packed else 'padded'}",
        marks=[] if name in BOTH or i % 2 == packed else [pytest.mark.slow],
    )
    for i, name in enumerate(name for name in OBJECTIVES if name not in WHOLE)
    for packed in (False, True)
]  # fmt: skip


# ---- against the oracle


@pytest.mark.parametrize("dtype, packed", LAYOUTS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_matches_oracle(name: str, dtype: torch.dtype, packed: bool, backend: str) -> None:
    make, spec = OBJECTIVES[name]
    case = build(dtype, packed=packed)
    expected, gradient = case.expected(spec)
    naive, naive_gradient = case.naive(spec)
    out, ours = run(case, make(), backend)
    assert out.loss.dtype == torch.float32 and out.loss.shape == ()
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_no_worse(out.logps.reshape(-1), naive.logps, expected.logps, "logps")
    assert_no_worse(out.entropy.reshape(-1), naive.entropy, expected.entropy, "entropy")
    assert out.logps.shape == out.entropy.shape == case.targets.shape
    assert ours.dtype == dtype
    assert_no_worse(ours, naive_gradient, gradient, "gradient")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_cases_are_not_trivial(name: str) -> None:
    """Both sides of the clip are active, no token sits on a kink, and the gradient is not small."""
    _, spec = OBJECTIVES[name]
    for dtype in DTYPES:
        case = build(dtype)
        expected, gradient = case.expected(spec)
        assert not near_a_kink(expected)
        assert gradient.abs().max() > 5e-3 and abs(expected.loss) > 1e-2
        ratio = expected.log_ratio.exp()
        if spec.surrogate == "clip":
            assert expected.clipped_low.sum() >= 2 and expected.clipped_high.sum() >= 2
            assert ((ratio < 1 - spec.eps_low) | (ratio > 1 + spec.eps_high)).sum() < ratio.numel() or spec.eps_low < 1e-3
        if spec.delta is not None:
            advantage = case.fields["advantages"][:, None].expand(case.targets.shape)[case.fields["mask"]]
            assert ((ratio > spec.delta) & (advantage < 0)).any()
        if spec.surrogate == "cispo":
            assert expected.clipped_high.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["dapo, k3", "gspo", "grpo, k3 and entropy"])
@pytest.mark.parametrize(
    "transform",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "softcap": 15.0, "scale": 0.8},
        {"temperature": torch.linspace(0.5, 2.0, len(LENGTHS))},
    ],
    ids=["temperature", "all", "per sequence"],
)
def test_transform_matches_oracle(transform: dict[str, Any], name: str, dtype: torch.dtype, backend: str) -> None:
    make, spec = OBJECTIVES[name]
    case = build(dtype, transform=transform)
    expected, gradient = case.expected(spec)
    naive, naive_gradient = case.naive(spec)
    out, ours = run(case, make(), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_no_worse(ours, naive_gradient, gradient, "gradient")


@pytest.mark.parametrize("missing", ["old_logps", "mask", "weights"])
@pytest.mark.parametrize("name", BOTH)
def test_absent_fields_match_oracle(name: str, missing: str, backend: str) -> None:
    """Without old_logps the ratio is 1 and keeps its gradient."""
    make, spec = OBJECTIVES[name]
    case = build(transform={"temperature": 1.1})
    case.fields[missing] = None
    expected, gradient = case.expected(spec)
    naive, naive_gradient = case.naive(spec)
    out, ours = run(case, make(), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_no_worse(ours, naive_gradient, gradient, "gradient")


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", (*BOTH, "kl-cov", "dppo-tv"))
def test_nll_weights_match_oracle(name: str, dtype: torch.dtype, packed: bool, backend: str) -> None:
    """A separate term, also for tokens without advantage: these may not be skipped."""
    make, spec = OBJECTIVES[name]
    case = build(dtype, packed=packed)
    case.fields["nll_weights"] = 0.1 * torch.rand(case.targets.shape)
    expected, gradient = case.expected(spec)
    naive, naive_gradient = case.naive(spec)
    out, ours = run(case, make(), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_no_worse(ours, naive_gradient, gradient, "gradient")
    skipping, the_same = run(case, make(), backend, skip_inactive=True)
    assert same_bits(out.loss, skipping.loss) and same_bits(ours, the_same)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("count_empty", [True, False])
def test_group_mean_matches_oracle(count_empty: bool, packed: bool, backend: str) -> None:
    case = build(packed=packed)
    case.fields["groups"] = torch.tensor([1, 1, 9, 9, 4, 4, 4, 0])
    kinds = {"aggregate": "group-mean", "beta": 0.1, "entropy_coef": 0.05, "count_empty": count_empty}
    spec = oracle.Spec(**kinds)
    expected, gradient = case.expected(spec)
    naive, naive_gradient = case.naive(spec)
    out, ours = run(case, Objective(**kinds), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_no_worse(ours, naive_gradient, gradient, "gradient")


@pytest.mark.parametrize("vocab", [1000, 32001, 129921])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_vocabularies(vocab: int, dtype: torch.dtype, backend: str) -> None:
    make, spec = OBJECTIVES["dapo, k3"]
    case = build(dtype, vocab=vocab)
    if vocab > 10_000:  # fewer rows, enough for both signs of the advantage
        keep = {k: v[:2] for k, v in case.fields.items()}
        case = Case(case.logits[:2], keep)
    expected, gradient = case.expected(spec)
    naive, naive_gradient = case.naive(spec)
    out, ours = run(case, make(), backend)
    assert (out.logps <= 0).all()
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_no_worse(ours, naive_gradient, gradient, "gradient")


def test_per_token_and_column_shapes(backend: str) -> None:
    """Advantages and weights as [B], [B, 1] or [B, T] say the same."""
    case = build()
    objective = Objective.preset("dapo")
    per_sequence = torch.linspace(0.5, 1.5, len(LENGTHS))
    results = []
    for a, w in (((-1,), (-1, 1)), ((-1, 1), (-1,)), (None, None)):
        shape = case.targets.shape
        column = torch.tensor(ADVANTAGES)[:, None], per_sequence[:, None]
        case.fields["advantages"] = column[0].reshape(a) if a else column[0].expand(shape)
        case.fields["weights"] = column[1].reshape(w) if w else column[1].expand(shape)
        out, gradient = run(case, objective, backend)
        results.append((out.loss, gradient))
    for loss, gradient in results[1:]:
        assert same_bits(loss, results[0][0]) and same_bits(gradient, results[0][1])


def test_weights_do_not_touch_the_kl(backend: str) -> None:
    case = build()
    case.fields["weights"] = torch.zeros(case.targets.shape)
    expected, gradient = case.expected(oracle.Spec(beta=0.5))
    out, ours = run(case, Objective(beta=0.5), backend)
    trained = case.fields["mask"].reshape(-1)
    torch.testing.assert_close(out.loss.double(), 0.5 * expected.kl[trained].mean(), rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.double(), gradient, rtol=1e-4, atol=1e-7)


# ---- identities


@pytest.mark.parametrize("name, dtype", some(DTYPES))
def test_equals_layer_1_and_token_stage(name: str, dtype: torch.dtype, backend: str) -> None:
    """The fused loss = log-probs, then Objective.token_stage, then autograd with its slopes."""
    objective = OBJECTIVES[name][0]()
    case = build(dtype, transform={"temperature": 0.9})
    out, fused = run(case, objective, backend)
    leaf = case.logits.detach().clone().requires_grad_()
    logps, entropy = token_logprobs(
        leaf, case.targets, mask=case.mask, transform=case.logit_transform(), entropy=True, backend=backend
    )
    assert entropy is not None
    batch = case.batch()
    losses, d_logps, d_entropy = objective.token_stage(
        logps.detach().reshape(-1), entropy.detach().reshape(-1), objective.token_rows(batch), batch
    )
    outputs, slopes = [logps], [d_logps.view_as(logps)]
    if d_entropy is not None:
        outputs, slopes = [logps, entropy], [*slopes, d_entropy.view_as(entropy)]
    torch.autograd.backward(outputs, slopes)
    assert leaf.grad is not None
    torch.testing.assert_close(losses.sum(), out.loss, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(logps.detach(), out.logps, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.detach(), out.entropy, rtol=1e-6, atol=1e-6)
    # Both round the same fp32 gradient to the logits' dtype; it may fall on either side of a tie.
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(leaf.grad, fused, rtol=rounding, atol=2e-7)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_packed_equals_padded(name: str, backend: str) -> None:
    objective = OBJECTIVES[name][0]()
    padded = build()
    packed = pack(padded)
    a, ga = run(padded, objective, backend)
    b, gb = run(packed, objective, backend)
    inside = torch.arange(padded.targets.shape[1]) < torch.tensor(LENGTHS)[:, None]
    torch.testing.assert_close(a.loss, b.loss, rtol=2e-6, atol=1e-7)
    assert same_bits(a.logps[inside], b.logps)
    torch.testing.assert_close(ga[inside], gb, rtol=2e-6, atol=1e-8)
    assert not ga[~inside].any()


@pytest.mark.parametrize("name, packed", PARTED)
def test_micro_batches_add_up(name: str, packed: bool, backend: str) -> None:
    """1, 2 and 4 micro-batches of unequal lengths, one of them fully masked, with the normaliser of the whole."""
    objective = OBJECTIVES[name][0]()
    whole = build()
    whole.fields["mask"][2:4] = False  # the second of four micro-batches trains on nothing
    total = objective.normalizer(whole.batch())
    reference, gradient = run(whole, objective, backend)
    for parts in (1, 2, 4):
        size = len(LENGTHS) // parts
        losses, gradients = [], []
        summed = 0.0
        for i in range(0, len(LENGTHS), size):
            part = Case(whole.logits[i : i + size], {k: v[i : i + size] for k, v in whole.fields.items()})
            summed += float(objective.normalizer(part.batch()))
            if packed:
                lengths = torch.tensor(LENGTHS[i : i + size])
                inside = torch.arange(part.targets.shape[1]) < lengths[:, None]
                fields = {k: v if k == "advantages" else v[inside] for k, v in part.fields.items()}
                fields["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
                out, g = run(Case(part.logits[inside], fields), objective, backend, normalizer=total)
                g = torch.zeros_like(part.logits).masked_scatter_(inside[..., None], g)
            else:
                out, g = run(part, objective, backend, normalizer=total)
            losses.append(out.loss.detach())
            gradients.append(g)
        assert summed == float(total) or objective.aggregate == "token-sum"
        torch.testing.assert_close(torch.stack(losses).sum(), reference.loss.detach(), rtol=3e-6, atol=1e-6)
        torch.testing.assert_close(torch.cat(gradients), gradient, rtol=2e-6, atol=1e-9)
    assert gradient.abs().max() > 1e-2 and not gradient[2:4].any()


@pytest.mark.parametrize("kind", ["number", "0-d", "float64", "[1]"])
def test_normalizer_kinds(kind: str, backend: str) -> None:
    case = build()
    make, spec = OBJECTIVES["grpo"]
    kinds = {
        "number": 37,
        "0-d": torch.tensor(37.0),
        "float64": torch.tensor(37, dtype=torch.float64),
        "[1]": torch.tensor([37]),
    }
    normalizer: Any = kinds[kind]
    expected, gradient = case.expected(spec, normalizer=37.0)
    out, ours = run(case, make(), backend, normalizer=normalizer)
    torch.testing.assert_close(out.loss.double(), expected.loss, rtol=2e-6, atol=0)
    torch.testing.assert_close(ours.double(), gradient, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [61, 1031])
def test_row_alone_is_bitwise_the_row_in_a_batch(dtype: torch.dtype, vocab: int, backend: str) -> None:
    objective = Objective.preset("dapo", beta=0.1, entropy_coef=0.01)
    case = build(dtype, packed=True, vocab=vocab)
    case.fields["advantages"] = oracle.to_rows(
        case.fields["advantages"], oracle.sequences_of(case.targets, case.fields["cu_seqlens"]), torch.float32
    )
    del case.fields["cu_seqlens"]
    out, gradient = run(case, objective, backend, normalizer=1.0)
    again, gradient_again = run(case, objective, backend, normalizer=1.0)
    assert same_bits(out.loss, again.loss) and same_bits(gradient, gradient_again)
    for i in (0, 5, 11, case.targets.numel() - 1):
        row = Case(case.logits[i : i + 1], {k: v[i : i + 1] for k, v in case.fields.items()})
        alone, g = run(row, objective, backend, normalizer=1.0)
        assert same_bits(alone.logps, out.logps[i : i + 1]) and same_bits(alone.entropy, out.entropy[i : i + 1])
        assert same_bits(g, gradient[i : i + 1])


# ---- metrics, options


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_metrics_match_a_direct_computation(name: str, packed: bool, backend: str) -> None:
    make, spec = OBJECTIVES[name]
    case = build(packed=packed)
    expected, _ = case.expected(spec)
    out, _ = run(case, make(), backend)
    trained = case.fields["mask"].reshape(-1)
    ratio = expected.log_ratio.exp()
    sequences = oracle.sequences_of(case.targets, case.fields.get("cu_seqlens"))
    # VESPO's weights are in its ratio.
    w = ratio if spec.surrogate == "vespo" else ratio * case.fields["weights"].reshape(-1)[trained]
    direct = {
        "tokens": trained.sum().double(),
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "clip_low": expected.clipped_low.double().mean(),
        "clip_high": expected.clipped_high.double().mean(),
        "entropy": expected.entropy[trained].mean(),
        "ess": w.sum() ** 2 / (len(w) * w.square().sum()),
        "zero_advantage": (oracle.to_rows(case.fields["advantages"], sequences, torch.float64)[trained] == 0).double().mean(),
    }
    if spec.beta != 0:
        direct["kl"] = expected.kl[trained].mean()
    if filtered(spec):
        assert 0.3 < expected.kept.double().mean() < 0.9
        direct["kept"] = expected.kept.double().mean()
    for key, value in direct.items():
        assert out.metrics[key].shape == (), key
        torch.testing.assert_close(out.metrics[key].double(), value, rtol=2e-5, atol=1e-7, msg=lambda m, key=key: f"{key}: {m}")
    assert out.metrics.keys() == direct.keys()


def squared(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
    """A surrogate of a user: -A logp, pulled back to the old policy."""
    x = logp - old_logp
    return -advantage * logp + 0.5 * params[0] * x * x, -advantage + params[0] * x


def test_custom_surrogate(backend: str) -> None:
    case = build()
    out, gradient = run(case, Objective(Custom(squared, (0.3,)), beta=0.1), backend)
    leaf = case.logits.double().requires_grad_()
    mask = case.fields["mask"]
    logps = leaf.log_softmax(-1).gather(-1, case.targets[..., None])[..., 0][mask]
    f = {k: v[mask].double() for k, v in case.fields.items() if k != "advantages"}
    a = case.fields["advantages"].double()[:, None].expand(mask.shape)[mask]
    x, d = logps - f["old_logps"], f["ref_logps"] - logps
    loss = (f["weights"] * (-a * logps + 0.15 * x * x) + 0.1 * (d.exp() - d - 1)).sum() / mask.sum()
    loss.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(out.loss.double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), leaf.grad, rtol=1e-4, atol=1e-7)


def absolute(logp: Any, old_logp: Any, ref_logp: Any) -> Any:
    """|logp - ref_logp|: a KL estimator of a user."""
    d = logp - ref_logp
    return ops.abs(d), ops.where(d > 0.0, 1.0, -1.0)


def test_custom_kl(backend: str) -> None:
    case = build()
    case.fields["advantages"] = torch.zeros(len(LENGTHS))
    out, _ = run(case, Objective(Clip(), beta=0.5, kl=absolute), backend)
    expected, _ = case.expected(oracle.Spec())
    mask = case.fields["mask"].reshape(-1)
    d = expected.logps - case.fields["ref_logps"].reshape(-1).double()
    torch.testing.assert_close(out.loss.double(), 0.5 * d[mask].abs().mean(), rtol=1e-5, atol=0)


def test_zero_advantage_rows_have_no_gradient(backend: str) -> None:
    case = build()
    out, gradient = run(case, Objective.preset("dapo"), backend)
    assert ADVANTAGES[6] == 0 and not gradient[6].any()
    assert out.logps[6, : LENGTHS[6]].all()
    _, with_kl = run(case, Objective.preset("dapo", beta=0.1), backend)
    assert with_kl[6, : LENGTHS[6]].any()


@pytest.mark.parametrize("dtype, packed", LAYOUTS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_skip_inactive_changes_nothing_but_the_reading(name: str, dtype: torch.dtype, packed: bool, backend: str) -> None:
    """If rows of zero advantage or weight are not read, loss and gradient are bitwise the same."""
    make, spec = OBJECTIVES[name]
    objective, case = make(), build(dtype, packed=packed)
    case.fields["weights"].view(-1)[0] = 0.0
    sequences = oracle.sequences_of(case.targets, case.fields.get("cu_seqlens"))
    advantages = oracle.to_rows(case.fields["advantages"], sequences, torch.float32)
    idle = ((advantages == 0) | (case.fields["weights"].reshape(-1) == 0)).view(case.targets.shape)
    full, gradient = run(case, objective, backend)
    if contributes_alone(spec):
        case.logits[idle] = math.nan  # shows whether they are read
    out, skipped = run(case, objective, backend, skip_inactive=True)
    assert same_bits(out.loss, full.loss) and same_bits(skipped, gradient)
    trained = case.fields["mask"] & ~idle
    assert idle[case.fields["mask"]].sum() >= 5 and same_bits(out.logps[trained], full.logps[trained])
    for key in ("tokens", "zero_advantage"):
        assert same_bits(out.metrics[key], full.metrics[key])
    assert all(torch.isfinite(m) for m in out.metrics.values())


def test_a_step_down_the_gradient_lowers_the_loss(backend: str) -> None:
    case = build()
    objective = Objective.preset("grpo", beta=0.1, entropy_coef=0.01)
    out, gradient = run(case, objective, backend)
    after, _ = run(case.with_logits(case.logits - 0.01 * gradient / gradient.norm()), objective, backend)
    predicted = 0.01 * float(gradient.norm())
    assert (out.loss - after.loss).item() == pytest.approx(predicted, rel=0.05)


def test_auto_backend_is_a_known_one() -> None:
    case = build()
    objective = Objective.preset("dapo")
    torch.testing.assert_close(
        grpo_loss(case.logits, case.batch(), objective).loss,
        grpo_loss(case.logits, case.batch(), objective, backend="eager", transform=LogitTransform()).loss,
        rtol=1e-5,
        atol=1e-6,
    )
