"""Layer 2: arguments that must not change a result, uses by autograd, and extreme inputs."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from grpo_kernels import Objective, TokenBatch, grpo_loss, token_logprobs
from support import oracle
from support.cases import DTYPES, LENGTHS, OBJECTIVES, Case, assert_no_worse, build, run, same_bits, snapshot, some

Tensor = torch.Tensor
BOTH = ("dapo", "grpo, k3 and entropy", "gspo")  # token-level, everything on, sequence-level
#: Those that look at more than that: weights in the ratio, means and quantiles of the whole batch, the sampler.
NEEDING = (
    "vespo",
    "kl-cov",
    "clip-cov",
    "dppo-kl to the sampler, k3",
    "entropy quantile, bonus of its own",
    "off-policy sequences",
)


# ---- arguments that must not change a result


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e4])
@pytest.mark.parametrize("wild_id", [-100, 61, 2**31])
@pytest.mark.parametrize("name", (*BOTH, *NEEDING))
def test_masked_rows_may_hold_anything(name: str, wild_id: int, poison: float, backend: str) -> None:
    objective = OBJECTIVES[name][0]()
    clean = build(transform={"temperature": torch.full((len(LENGTHS), max(LENGTHS)), 0.8)})
    dirty = Case(clean.logits.clone(), copy.deepcopy(clean.fields), copy.deepcopy(clean.transform))
    masked = ~clean.fields["mask"]
    dirty.logits[masked] = poison
    dirty.fields["targets"][masked] = wild_id
    dirty.fields["advantages"] = torch.where(masked, poison, clean.fields["advantages"][:, None])
    for field in ("old_logps", "ref_logps", "weights", "sampler_logps"):
        dirty.fields[field][masked] = poison
    dirty.transform["temperature"][masked] = poison
    out, gradient = run(clean, objective, backend)
    out_dirty, gradient_dirty = run(dirty, objective, backend)
    assert same_bits(out.loss, out_dirty.loss) and same_bits(gradient, gradient_dirty)
    assert same_bits(out.logps, out_dirty.logps) and same_bits(out.entropy, out_dirty.entropy)
    assert not out.logps[masked].any() and not out.entropy[masked].any() and not gradient[masked].any()
    for key, value in out.metrics.items():
        assert same_bits(value, out_dirty.metrics[key]) and torch.isfinite(value), key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BOTH)
def test_inputs_are_not_modified(name: str, dtype: torch.dtype, backend: str) -> None:
    case = build(dtype, transform={"temperature": torch.full((len(LENGTHS),), 0.8)})
    leaf = case.logits.requires_grad_()
    check = snapshot(logits=leaf, **case.fields, **case.transform)
    versions = {k: v._version for k, v in case.fields.items()}
    out = grpo_loss(leaf, case.batch(), OBJECTIVES[name][0](), transform=case.logit_transform(), backend=backend)
    (3.5 * out.loss).backward()
    assert out.metrics
    check()
    assert leaf._version == 0 and versions == {k: v._version for k, v in case.fields.items()}


@pytest.mark.parametrize(
    "layout", ["[:, :-1]", "transposed", "every second row", "vocabulary stride 2", "targets int32", "mask int"]
)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ["dapo, k3", "gspo"])
def test_strided_inputs(layout: str, inplace: bool, name: str, backend: str) -> None:
    objective = OBJECTIVES[name][0]()
    case = build()
    _, expected = run(case, objective, backend)
    b, t, v = case.logits.shape
    batch = case.batch()
    if layout == "[:, :-1]":
        base = torch.full((b, t + 1, v), math.nan)
        view = base[:, :-1]
    elif layout == "transposed":
        base = torch.full((t, b, v), math.nan)
        view = base.transpose(0, 1)
    elif layout == "every second row":
        base = torch.full((b, 2 * t, v), math.nan)
        view = base[:, ::2]
    elif layout == "vocabulary stride 2":
        if inplace:
            pytest.skip("refused, see test_bad_input")
        base = torch.full((b, t, 2 * v), math.nan)
        view = base[..., ::2]
    else:
        base = view = torch.empty(b, t, v)
        batch = (
            case.batch(targets=case.targets.int()) if layout == "targets int32" else case.batch(mask=case.fields["mask"].int())
        )
    view.copy_(case.logits)
    leaf = base.requires_grad_()
    source = leaf * 1.0  # in-place wants memory that autograd does not own as a leaf
    logits = {
        "[:, :-1]": lambda: source[:, :-1],
        "transposed": lambda: source.transpose(0, 1),
        "every second row": lambda: source[:, ::2],
        "vocabulary stride 2": lambda: source[..., ::2],
    }.get(layout, lambda: source)()
    grpo_loss(logits, batch, objective, inplace=inplace, backend=backend).loss.backward()
    assert leaf.grad is not None
    got = {
        "[:, :-1]": lambda g: g[:, :-1],
        "transposed": lambda g: g.transpose(0, 1),
        "every second row": lambda g: g[:, ::2],
        "vocabulary stride 2": lambda g: g[..., ::2],
    }.get(layout, lambda g: g)(leaf.grad)
    assert same_bits(got.contiguous(), expected)
    assert leaf.grad.count_nonzero() == expected.count_nonzero()


def test_expanded_logits(backend: str) -> None:
    """One row of logits shared by all sequences: its gradient is the sum over them."""
    case = build()
    objective = Objective.preset("dapo")
    one = case.logits[:1].clone()
    _, per_row = run(case.with_logits(one.expand_as(case.logits)), objective, backend)
    leaf = one.clone().requires_grad_()
    grpo_loss(leaf.expand_as(case.logits), case.batch(), objective, backend=backend).loss.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, per_row.sum(0, keepdim=True), rtol=1e-5, atol=1e-7)


# ---- autograd


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BOTH)
def test_upstream_scalar(name: str, dtype: torch.dtype, backend: str) -> None:
    make, spec = OBJECTIVES[name]
    case = build(dtype)
    _, gradient = case.expected(spec)
    _, naive = case.naive(spec)
    leaf = case.logits.clone().requires_grad_()
    (3.5 * grpo_loss(leaf, case.batch(), make(), backend=backend).loss).backward()
    assert leaf.grad is not None
    # Rounded before the factor or after it: not the same rounding.
    tiny = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert_no_worse(leaf.grad, 3.5 * naive.float(), 3.5 * gradient, "gradient", tiny)


@pytest.mark.parametrize("name", BOTH)
def test_fp16_with_a_loss_scale(name: str, backend: str) -> None:
    """What GradScaler does: gradients far below fp16's smallest number survive once the scale is in them."""
    make, spec = OBJECTIVES[name]
    case = build(torch.float16)
    normalizer = 3e5
    _, gradient = case.expected(spec, normalizer)
    leaf = case.logits.clone().requires_grad_()
    out = grpo_loss(leaf, case.batch(), make(), normalizer=normalizer, backend=backend)
    (out.loss * 2.0**16).backward()
    assert leaf.grad is not None and torch.isfinite(leaf.grad).all()
    scaled = gradient * 2.0**16
    assert_no_worse(leaf.grad, scaled.half(), scaled, "scaled gradient", tiny=1e-5)
    relevant = scaled.abs() > 1e-4
    assert relevant.sum() > 50 and gradient[relevant].abs().min() < 2**-24
    torch.testing.assert_close(leaf.grad.double()[relevant], scaled[relevant], rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_second_backward_is_right_or_refused(dtype: torch.dtype, backend: str) -> None:
    case = build(dtype)
    leaf = case.logits.clone().requires_grad_()
    out = grpo_loss(leaf, case.batch(), Objective.preset("dapo"), backend=backend)
    (first,) = torch.autograd.grad(out.loss, leaf, retain_graph=True)
    first = first.clone()
    if dtype == torch.float16:
        (second,) = torch.autograd.grad(out.loss, leaf)
        assert same_bits(first, second)
    else:
        with pytest.raises(RuntimeError, match="token_logprobs"):
            torch.autograd.grad(out.loss, leaf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BOTH)
def test_inplace_is_the_same_gradient_in_the_logits_memory(name: str, dtype: torch.dtype, backend: str) -> None:
    objective = OBJECTIVES[name][0]()
    case = build(dtype)
    out, expected = run(case, objective, backend)
    leaf = case.logits.clone().requires_grad_()
    logits = leaf * 1.0
    address, version = logits.data_ptr(), logits._version
    seen: list[int] = []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    mine = grpo_loss(logits, case.batch(), objective, inplace=True, backend=backend)
    mine.loss.backward()
    assert leaf.grad is not None
    assert same_bits(leaf.grad, expected) and same_bits(mine.loss, out.loss) and same_bits(mine.logps, out.logps)
    assert seen == [address] and logits._version > version


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_overwritten_logits_cannot_be_trained_on(dtype: torch.dtype, backend: str) -> None:
    """Another head on the same logits is right out of place. In place it raises, because its input was overwritten."""
    case, objective = build(dtype), Objective.preset("dapo")
    for inplace in (False, True):
        leaf = case.logits.clone().requires_grad_()
        logits = leaf * 1.0
        other = logits.square().sum()
        out = grpo_loss(logits, case.batch(), objective, inplace=inplace, backend=backend)
        torch.autograd.grad(out.loss, leaf, retain_graph=True)
        if inplace:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                other.backward()
        else:
            other.backward()
            assert leaf.grad is not None and same_bits(leaf.grad, 2 * case.logits)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("layer", [1, 2])
def test_a_leaf_is_not_overwritten_by_its_gradient(layer: int, view: bool, backend: str) -> None:
    """A parameter given in place would lose its values, and its .grad would be its own memory. A view of it is no better."""
    case = build()
    leaf = case.logits.clone().requires_grad_()
    logits, before = leaf[:] if view else leaf, case.logits.clone()
    with pytest.raises(ValueError, match=r"inplace=True.*leaf that requires grad"):
        if layer == 1:
            token_logprobs(logits, case.targets, mask=case.mask, inplace=True, backend=backend)
        else:
            grpo_loss(logits, case.batch(), Objective.preset("dapo"), inplace=True, backend=backend)
    assert torch.equal(leaf, before)
    # The output of a computation is what it is for.
    grpo_loss(leaf * 1.0, case.batch(), Objective.preset("dapo"), inplace=True, backend=backend).loss.backward()
    assert torch.equal(leaf, before) and leaf.grad is not None and leaf.grad.any()


def test_frozen_no_grad_and_inference_mode(backend: str) -> None:
    case = build()
    objective = Objective.preset("dapo")
    out, _ = run(case, objective, backend)
    frozen = grpo_loss(case.logits, case.batch(), objective, backend=backend)
    assert not frozen.loss.requires_grad and same_bits(frozen.loss, out.loss.detach())
    leaf = case.logits.clone().requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            quiet = grpo_loss(leaf, case.batch(), objective, backend=backend)
            assert not quiet.loss.requires_grad and same_bits(quiet.loss, out.loss.detach())
            assert same_bits(quiet.logps, out.logps) and quiet.metrics["clip_low"] > 0
    with torch.inference_mode():
        made_inside = build()
        assert same_bits(grpo_loss(made_inside.logits, made_inside.batch(), objective, backend=backend).logps, out.logps)


def test_outputs_beside_the_loss_are_detached(backend: str) -> None:
    case = build()
    leaf = case.logits.clone().requires_grad_()
    out = grpo_loss(leaf, case.batch(), Objective.preset("dapo", beta=0.1), backend=backend)
    assert out.loss.requires_grad and not out.logps.requires_grad and not out.entropy.requires_grad
    assert not any(m.requires_grad for m in out.metrics.values())


def test_fields_that_require_grad_get_none(backend: str) -> None:
    """Gradients never flow into the batch: old log-probs that someone forgot to detach change nothing."""
    case = build()
    _, expected = run(case, Objective.preset("dapo", beta=0.1), backend)
    for name in ("old_logps", "ref_logps", "weights", "advantages"):
        case.fields[name].requires_grad_()
    _, gradient = run(case, Objective.preset("dapo", beta=0.1), backend)
    assert same_bits(gradient, expected)
    assert all(case.fields[name].grad is None for name in ("old_logps", "ref_logps", "weights", "advantages"))


# ---- empty, masked, huge


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows(shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    leaf = torch.randn(*shape, 11, dtype=dtype, requires_grad=True)
    batch = TokenBatch(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape))
    out = grpo_loss(leaf, batch, Objective.preset("dapo"), backend=backend)
    out.loss.backward()
    assert out.loss.item() == 0 and leaf.grad is not None and leaf.grad.shape == leaf.shape
    assert all(torch.isfinite(m) for m in out.metrics.values())


@pytest.mark.parametrize("given", [False, True], ids=["own normalizer", "given normalizer"])
@pytest.mark.parametrize("name, dtype", some(DTYPES))
def test_all_masked(name: str, dtype: torch.dtype, given: bool, backend: str) -> None:
    """A micro-batch without a trained token; where the whole batch is like that, its token count is 0."""
    case, objective = build(dtype), OBJECTIVES[name][0]()
    case.fields["mask"] = torch.zeros_like(case.fields["mask"])
    case.logits[0] = math.nan
    out, gradient = run(case, objective, backend, normalizer=objective.normalizer(case.batch()) if given else None)
    assert out.loss.item() == 0 and not gradient.any() and not out.logps.any()
    assert all(torch.isfinite(m) for m in out.metrics.values())


def test_many_rows(backend: str) -> None:
    """65,537 rows: past the 16-bit limits of grids and of careless indices."""
    n, v = 65_537, 3
    logits = torch.randn(n, v)
    targets = torch.randint(v, (n,))
    case = Case(logits, {"targets": targets, "advantages": torch.randn(n), "old_logps": logits.log_softmax(-1)[:, 0] * 0.9})
    make, spec = OBJECTIVES["dapo"]
    expected, gradient = case.expected(spec)
    naive, naive_gradient = case.naive(spec)
    out, ours = run(case, make(), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss", tiny=2e-5)
    assert_no_worse(ours, naive_gradient, gradient, "gradient")


@pytest.mark.parametrize("name, dtype", some(DTYPES))
def test_huge_log_ratios_stay_finite(name: str, dtype: torch.dtype, backend: str) -> None:
    case = build(dtype)
    huge = torch.tensor([1000.0, -1000.0, 100.0, -100.0, 0.0, 80.0, -80.0])
    for field in ("old_logps", "ref_logps"):
        case.fields[field] = case.fields[field] - huge[: case.targets.shape[1]]
    out, gradient = run(case, OBJECTIVES[name][0](), backend)
    assert torch.isfinite(out.loss)
    # These two clip every one of them.
    assert gradient.any() or name in ("delta below 1 + eps_high", "bounded log-ratio, sequence")
    assert torch.isfinite(gradient).all() or dtype == torch.float16  # e^60 is beyond fp16, in any implementation


@pytest.mark.parametrize("name", ["dapo, k3", "gspo"])
def test_metrics_of_huge_log_ratios_are_finite(name: str, backend: str) -> None:
    """A single token with a huge ratio must not make every metric of the run infinite."""
    case = build()
    for field in ("old_logps", "ref_logps"):
        case.fields[field][0, 0] -= 1000.0
    out, _ = run(case, OBJECTIVES[name][0](), backend)
    for key, value in out.metrics.items():
        assert torch.isfinite(value), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_confident_tokens_keep_their_gradient(dtype: torch.dtype, backend: str) -> None:
    """p = 0.9 ... 0.99999: the target's gradient is right relative to itself, not to the largest of the row."""
    v = 1000
    p = torch.tensor([0.9, 0.99, 0.999, 0.9999, 0.99999], dtype=torch.float64)
    logits = torch.zeros(len(p), v, dtype=dtype)
    logits[:, 17] = torch.log(p / (1 - p) * (v - 1)).to(dtype)
    case = Case(logits, {"targets": torch.full((len(p),), 17), "advantages": torch.ones(len(p))})
    _, gradient = case.expected(oracle.Spec("policy-gradient"))
    _, ours = run(case, Objective.preset("reinforce"), backend)
    _, naive = case.naive(oracle.Spec("policy-gradient"))
    others = torch.arange(v) != 17
    torch.testing.assert_close(
        ours.double()[:, others], gradient[:, others], rtol={torch.float32: 2e-6, torch.bfloat16: 2**-8}[dtype], atol=0
    )
    error, exact = (ours.double() - gradient)[:, 17].abs(), gradient[:, 17].abs()
    # 1 - p comes from a sum of about 1 in fp32, so it is known to some units of 2^-24: up to 24 with the fewest partial sums.
    rounding = {torch.float32: 2**-24, torch.bfloat16: 2**-8}[dtype] * exact
    assert (error <= rounding + 64 * 2**-24 / len(p)).all(), error / exact
    assert_no_worse(ours[:, 17], naive[:, 17], gradient[:, 17], "gradient of the target")


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_inplace_without_gradients_leaves_the_logits_alone(backend: str, off: Any) -> None:
    logits = torch.randn(4, 11, requires_grad=True)
    before = logits.detach().clone()
    batch = TokenBatch(torch.tensor([1, 2, 3, 4]), torch.randn(4))
    with off():
        grpo_loss(logits, batch, Objective.preset("dapo"), inplace=True, backend=backend)
    assert torch.equal(logits, before)


def test_one_token_completions_and_strided_ids(backend: str) -> None:
    """A slice of the ids has strides, which kernels that take addresses must respect."""
    g = torch.Generator().manual_seed(0)
    ids, logits = torch.randint(0, 11, (4, 6), generator=g), torch.randn(4, 1, 11, generator=g)
    mask = torch.rand(4, 6, generator=g) > 0.3
    advantages = torch.randn(4, generator=g)
    strided = grpo_loss(
        logits, TokenBatch(ids[:, -1:], advantages, mask=mask[:, -1:]), Objective.preset("dapo"), backend=backend
    )
    batch = TokenBatch(ids[:, -1:].clone(), advantages, mask=mask[:, -1:].clone())
    dense = grpo_loss(logits, batch, Objective.preset("dapo"), backend=backend)
    assert torch.equal(strided.loss, dense.loss) and torch.equal(strided.logps, dense.logps)


def test_logits_written_between_an_inplace_loss_and_its_backward_raise(backend: str) -> None:
    logits = torch.randn(4, 11, requires_grad=True) * 1.0
    batch = TokenBatch(torch.tensor([1, 2, 3, 4]), torch.randn(4))
    first = grpo_loss(logits, batch, Objective.preset("dapo"), inplace=True, backend=backend)
    second = grpo_loss(logits, batch, Objective.preset("dapo"), inplace=True, backend=backend)
    second.loss.backward()
    with pytest.raises(RuntimeError, match="was written to before the backward"):
        first.loss.backward()


@pytest.mark.parametrize("preset", ["dapo", "gspo", "cispo", "reinforce"])
def test_a_token_of_no_weight_adds_nothing_whatever_it_holds(preset: str, backend: str) -> None:
    """A sampler that rejected a token may have no log-prob for it, and a grammar may forbid it."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 5, 11, generator=g)
    targets, advantages = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[1.0, -1.0, 0.0, 0.5, 2.0]])
    logits[0, 2, 3] = -torch.inf  # no advantage, no probability
    old = torch.randn(1, 5, generator=g) - 2
    weights = torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0]])
    if preset not in ("gspo",):  # a sequence's ratio needs all of its tokens
        old[0, 3] = torch.nan
    else:
        logits[0, 2, 3] = 0.0
    x = logits.clone().requires_grad_()
    out = grpo_loss(
        x, TokenBatch(targets, advantages, old_logps=old, weights=weights), Objective.preset(preset), backend=backend
    )
    out.loss.backward()
    assert torch.isfinite(out.loss) and torch.isfinite(x.grad).all()
    if preset != "gspo":
        assert not x.grad[0, 2:4].any() and x.grad[0, 0].any()
