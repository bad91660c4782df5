"""Losses and log-probs over kept sets, against the float64 oracle that masks all other logits to -inf."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels import (
    LogitTransform,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
    token_logprobs,
    use,
)
from grpo_kernels.formulas.kl import ESTIMATORS, Kl
from grpo_kernels.formulas.ops import ops
from grpo_kernels.vocabulary.kept import _groups
from support import oracle
from support.cases import DTYPES, OBJECTIVES, Case, assert_no_worse, build, near_a_kink, run, same_bits
from support.linear_cases import ROUNDING, assert_gradients_no_worse, build_linear, gradients_of, in_chunks, run_linear

Tensor = torch.Tensor

EVERYTHING = {"temperature": 1.3, "softcap": 15.0, "scale": -0.8}
SOME = ("dapo", "grpo, k3 and entropy", "gspo", "vespo", "entropy floor and bonus", "dppo-kl to the sampler, k3")


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_logits_match_oracle(name: str, packed: bool, backend: str) -> None:
    make, spec = OBJECTIVES[name]
    case = build(packed=packed, kept=True)
    expected, gradient = case.expected(spec)
    naive, naive_gradient = case.naive(spec)
    out, ours = run(case, make(), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_no_worse(out.logps.reshape(-1), naive.logps, expected.logps, "logps")
    assert_no_worse(out.entropy.reshape(-1), naive.entropy, expected.entropy, "entropy")
    assert_no_worse(ours, naive_gradient, gradient, "gradient")
    assert (ours[~case.keep] == 0).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_hidden_states_match_oracle(name: str, backend: str) -> None:
    make, spec = OBJECTIVES[name]
    case = build_linear(kept=True)
    expected, exact = case.expected(spec)
    naive, naive_gradients = case.naive(spec)
    out, ours = run_linear(case, make(), backend, upstream=1.0)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss", tiny=1e-5)  # losses of both signs nearly cancel
    assert_no_worse(out.logps.reshape(-1), naive.logps, expected.logps, "logps")
    assert_no_worse(out.entropy.reshape(-1), naive.entropy, expected.entropy, "entropy")
    assert_gradients_no_worse(ours, naive_gradients, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "transform", [{}, EVERYTHING, {"temperature": torch.linspace(0.5, 2.0, 8)}], ids=["plain", "all", "rows"]
)
@pytest.mark.parametrize("name", SOME)
def test_dtypes_and_transforms_match_oracle(
    name: str, transform: dict[str, Any], dtype: torch.dtype, backend: str
) -> None:  # fmt: skip
    make, spec = OBJECTIVES[name]
    case, linear = build(dtype, transform=transform, kept=True), build_linear(dtype, transform=transform, kept=True)
    expected, gradient = case.expected(spec)
    naive, naive_gradient = case.naive(spec)
    out, ours = run(case, make(), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_no_worse(ours, naive_gradient, gradient, "gradient")
    expected, exact = linear.expected(spec)
    naive, naive_gradients = linear.naive(spec)
    out, gradients = run_linear(linear, make(), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_gradients_no_worse(gradients, naive_gradients, exact)


@pytest.mark.parametrize("name", SOME)
def test_cases_are_not_trivial(name: str) -> None:
    _, spec = OBJECTIVES[name]
    case = build(kept=True)
    expected, gradient = case.expected(spec)
    sizes = case.keep[case.mask].sum(-1)
    assert not near_a_kink(expected) and gradient.abs().max() > 5e-3
    assert (sizes == 1).any() and (sizes == case.logits.shape[-1]).any() and ((sizes > 1) & (sizes < 10)).sum() > 5


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_gradient_is_scaled_by_what_arrives(name: str, backend: str) -> None:
    """Also that of the weight, which is made in the backward."""
    make, _ = OBJECTIVES[name]
    case = build_linear(kept=True)
    _, once = run_linear(case, make(), backend)
    _, twice = run_linear(case, make(), backend, upstream=2.0)
    for leaf, gradient in once.items():
        torch.testing.assert_close(2.0 * gradient, twice[leaf], rtol=1e-6, atol=0)


# ---- a set is a vocabulary of its own


def test_all_ids_are_the_whole_vocabulary(backend: str) -> None:
    case = build(transform={"temperature": 0.8})
    vocab, rows = case.logits.shape[-1], case.targets.numel()
    every = TokenSets.from_counts(torch.arange(vocab).repeat(rows), torch.full((rows,), vocab))
    for name in SOME:
        objective = OBJECTIVES[name][0]()
        plain, d_plain = run(case, objective, backend)
        case_kept = replace(case, fields={**case.fields, "kept": every})
        out, gradient = run(case_kept, objective, backend)
        torch.testing.assert_close(out.loss, plain.loss, rtol=4e-6, atol=1e-7)
        torch.testing.assert_close(gradient, d_plain, rtol=1e-5, atol=1e-8)


def test_empty_sets_are_the_whole_vocabulary_bitwise(backend: str) -> None:
    case = build()
    nothing = replace(case, fields={**case.fields, "kept": TokenSets.whole(case.targets.numel())})
    objective = Objective.preset("dapo")
    for a, b in zip(run(case, objective, backend), run(nothing, objective, backend), strict=True):
        if isinstance(a, Tensor):
            assert same_bits(a, b)
        else:
            assert same_bits(a.logps, b.logps) and same_bits(a.loss.detach(), b.loss.detach())


def test_one_id_has_log_prob_zero_and_no_gradient(backend: str) -> None:
    """Whatever its logit is: it is not read."""
    hidden, weight = torch.full((2, 4), torch.nan, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    batch = TokenBatch(torch.tensor([3, 5]), torch.tensor([1.0, -2.0]), kept=TokenSets.from_lists([[3], [5]]))
    out = linear_grpo_loss(hidden, weight, batch, Objective.preset("dapo"), backend=backend)
    out.loss.backward()
    assert out.logps.tolist() == [0.0, 0.0] and out.entropy.tolist() == [0.0, 0.0]
    assert float(out.loss.detach()) == pytest.approx(0.5)  # ratios of 1: -(1 - 2) / 2
    assert (hidden.grad == 0).all() and (weight.grad == 0).all()


def test_order_of_ids_and_neighbours_change_nothing(backend: str) -> None:
    case = build_linear(kept=True)
    objective = Objective.preset("dapo", beta=0.1, entropy_coef=0.02)
    out, gradients = run_linear(case, objective, backend)
    rows = torch.randperm(case.tokens.targets.numel(), generator=torch.Generator().manual_seed(3))
    flat = {k: v.reshape(-1) for k, v in case.tokens.fields.items() if isinstance(v, Tensor) and k != "advantages"}
    advantages = case.tokens.fields["advantages"][:, None].expand(case.tokens.targets.shape).reshape(-1)
    fields = {k: v[rows] for k, v in flat.items()} | {"advantages": advantages[rows], "kept": case.tokens.fields["kept"][rows]}
    hidden = case.hidden.reshape(-1, case.hidden.shape[-1])[rows].requires_grad_()
    moved = linear_grpo_loss(hidden, case.weight, TokenBatch(**fields), objective, bias=case.bias, backend=backend)
    moved.loss.backward()
    has_set = (case.tokens.fields["kept"].counts > 0)[rows]  # rows without one go through whole products
    assert same_bits(moved.logps[has_set], out.logps.reshape(-1)[rows][has_set])
    d_hidden = gradients["hidden"].reshape(hidden.shape)[rows]
    torch.testing.assert_close(hidden.grad, d_hidden, rtol=1e-5, atol=1e-7)


# ---- layer 1


@pytest.mark.parametrize("also", [(), ("sum_squares", "top_prob", "top_id")], ids=["", "also"])
@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
def test_log_probs_match_oracle(linear: bool, also: tuple[str, ...], backend: str) -> None:
    case = build_linear(transform=EVERYTHING, kept=True)
    tokens, leaves = case.tokens, case.leaves
    options: dict[str, Any] = {"mask": tokens.mask, "kept": tokens.fields["kept"], "transform": tokens.logit_transform()}
    options |= {"entropy": True, "backend": backend}
    if linear:
        found = linear_logprobs(leaves["hidden"], leaves["weight"], tokens.targets, bias=leaves["bias"], also=also, **options)
    else:
        logits = torch.nn.functional.linear(leaves["hidden"], leaves["weight"], leaves["bias"])
        found = token_logprobs(logits, tokens.targets, also=also, **options)
    logps, entropy = found[:2]
    exact = {k: v.detach().double().requires_grad_() for k, v in leaves.items()}
    z = torch.nn.functional.linear(exact["hidden"], exact["weight"], exact["bias"])
    log_p, chosen, h = oracle.log_probs(z, tokens.targets, oracle.Transform(**EVERYTHING), keep=tokens.keep)
    mask = tokens.mask.reshape(-1)
    d_logps, d_entropy = torch.randn(2, mask.numel())
    torch.testing.assert_close(logps.reshape(-1).double()[mask], chosen[mask], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(entropy.reshape(-1).double()[mask], h[mask], rtol=2e-6, atol=2e-6)
    assert (logps.reshape(-1)[~mask] == 0).all() and (entropy.reshape(-1)[~mask] == 0).all()
    total = (logps.reshape(-1) * d_logps + entropy.reshape(-1) * d_entropy).sum()
    expected = (torch.where(mask, chosen * d_logps + h * d_entropy, 0.0)).sum()
    if also:
        p = log_p.exp()
        squares, top = p.square().sum(1), p.max(1)
        torch.testing.assert_close(found[2]["sum_squares"].reshape(-1).double()[mask], squares[mask], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(found[2]["top_prob"].reshape(-1).double()[mask], top.values[mask], rtol=2e-6, atol=2e-6)
        assert torch.equal(found[2]["top_id"].reshape(-1)[mask], top.indices[mask])
        total = total + (found[2]["sum_squares"].reshape(-1) * d_logps).sum()
        expected = expected + torch.where(mask, squares * d_logps, 0.0).sum()
    total.backward()
    expected.backward()
    for name, gradient in gradients_of(leaves).items():
        torch.testing.assert_close(gradient.double(), exact[name].grad, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
def test_kept_mass_matches_oracle(linear: bool, backend: str) -> None:
    """log m(S) with its gradient q - p, beside log-probs over the set."""
    case = build_linear(transform=EVERYTHING, kept=True)
    tokens, leaves = case.tokens, case.leaves
    options: dict[str, Any] = {"mask": tokens.mask, "kept": tokens.fields["kept"], "transform": tokens.logit_transform()}
    options |= {"also": ("log_kept_mass",), "backend": backend}
    if linear:
        _, _, more = linear_logprobs(leaves["hidden"], leaves["weight"], tokens.targets, bias=leaves["bias"], **options)
    else:
        logits = torch.nn.functional.linear(leaves["hidden"], leaves["weight"], leaves["bias"])
        _, _, more = token_logprobs(logits, tokens.targets, **options)
    exact = {k: v.detach().double().requires_grad_() for k, v in leaves.items()}
    z = torch.nn.functional.linear(exact["hidden"], exact["weight"], exact["bias"])
    log_p, *_ = oracle.log_probs(z, tokens.targets, oracle.Transform(**EVERYTHING))
    mass = log_p.masked_fill(~tokens.keep.reshape(log_p.shape), -torch.inf).logsumexp(1)
    mask, upstream = tokens.mask.reshape(-1), torch.randn(tokens.mask.numel())
    ours = more["log_kept_mass"].reshape(-1)
    torch.testing.assert_close(ours.double()[mask], mass[mask], rtol=2e-6, atol=4e-6)
    (ours * upstream).sum().backward()
    torch.where(mask, mass * upstream, 0.0).sum().backward()
    for name, gradient in gradients_of(leaves).items():
        torch.testing.assert_close(gradient.double(), exact[name].grad, rtol=2e-5, atol=2e-5)


def test_the_mass_of_a_set_does_not_depend_on_the_target(backend: str) -> None:
    """One that has no probability, beside one that has, in a set that lacks it, alone, and without a set."""
    inf = torch.inf
    logits = torch.tensor([[0.5, -inf, 1.0, 2.0, -1.0]]).repeat(5, 1).requires_grad_()
    sets, targets = TokenSets.from_lists([[0, 1, 2], [0, 1, 2], [0, 2], [1], []]), torch.tensor([1, 0, 1, 1, 1])
    logps, _, more = token_logprobs(logits, targets, kept=sets, also=("log_kept_mass",), backend=backend)
    exact = logits.detach().double().requires_grad_()
    log_p = exact.log_softmax(1)
    mass = log_p[:, [0, 2]].logsumexp(1)
    assert logps.isneginf().tolist() == [True, False, True, False, True]
    got = more["log_kept_mass"]
    assert got[3] == -inf and got[4] == 0
    torch.testing.assert_close(got[:3].double(), mass[:3], rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(got[:3].sum(), logits)
    (expected,) = torch.autograd.grad(mass[:3].sum(), exact)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=1e-6)


def test_without_a_mask_all_rows_count(backend: str) -> None:
    """Rows without a set are found in another way then."""
    case = build_linear(kept=True)
    kept, targets = case.tokens.fields["kept"], case.tokens.targets
    found = []
    for mask in (None, torch.ones(targets.shape, dtype=torch.bool)):
        leaves = case.leaves
        logps, _ = linear_logprobs(
            leaves["hidden"], leaves["weight"], targets, bias=leaves["bias"], mask=mask, kept=kept, backend=backend
        )  # fmt: skip
        logps.backward(torch.linspace(-1.0, 1.0, targets.numel()).view(targets.shape))
        found.append((logps.detach(), leaves["hidden"].grad, leaves["weight"].grad))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
    logp = case.logits(torch.float64)[0].masked_fill(~case.tokens.keep, -torch.inf).log_softmax(-1)
    torch.testing.assert_close(logp.gather(-1, targets[..., None])[..., 0].float(), found[0][0], rtol=2e-6, atol=2e-6)


# ---- values over the whole vocabulary


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("over", ["entropy", "reference", "both"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_entropy_and_reference_over_the_vocabulary(over: str, level: str, linear: bool, backend: str) -> None:
    case = build_linear(transform={"temperature": 1.2}, kept=True)
    tokens = case.tokens
    objective = Objective(level=level, beta=0.2, entropy_coef=0.1)
    options = Options(
        entropy_over="vocabulary" if over != "reference" else "kept",
        reference_over="vocabulary" if over != "entropy" else "kept",
    )
    exact = {k: v.detach().double().requires_grad_() for k, v in case.leaves.items()}
    z = torch.nn.functional.linear(exact["hidden"], exact["weight"], exact["bias"])
    by_hand = []
    for keep in (tokens.keep, None):
        _, logps, h = oracle.log_probs(z, tokens.targets, oracle.Transform(1.0, None, 1.2), keep=keep)
        by_hand.append((torch.where(tokens.mask.reshape(-1), logps, 0.0), torch.where(tokens.mask.reshape(-1), h, 0.0)))
    (sets, entropy_of_sets), (whole, entropy_of_whole) = by_hand
    entropy = entropy_of_whole if options.entropy_over == "vocabulary" else entropy_of_sets
    fields = {k: v for k, v in tokens.fields.items() if k not in ("targets", "kept")}
    sequences = oracle.sequences_of(tokens.targets, None)
    spec = oracle.Spec(level=level, entropy_coef=0.1)
    kl_of = whole if options.reference_over == "vocabulary" else sets
    kl_alone = oracle.objective(oracle.Spec("policy-gradient", beta=0.2), kl_of, entropy * 0, sequences, **fields)
    nothing = oracle.objective(oracle.Spec("policy-gradient"), kl_of, entropy * 0, sequences, **fields)
    expected = oracle.objective(spec, sets, entropy, sequences, **fields).loss + kl_alone.loss - nothing.loss
    expected.backward()
    leaves = case.leaves
    batch = tokens.batch()
    if linear:
        out = linear_grpo_loss(
            leaves["hidden"], leaves["weight"], batch, objective, bias=leaves["bias"],
            transform=LogitTransform(1.2), backend=backend, options=options,
        )  # fmt: skip
    else:
        logits = torch.nn.functional.linear(leaves["hidden"], leaves["weight"], leaves["bias"])
        out = grpo_loss(logits, batch, objective, transform=LogitTransform(1.2), backend=backend, options=options)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach().double(), expected.detach(), rtol=2e-6, atol=0)
    for name, gradient in gradients_of(leaves).items():
        torch.testing.assert_close(gradient.double(), exact[name].grad, rtol=2e-5, atol=2e-6)
    mask = tokens.mask.reshape(-1)
    torch.testing.assert_close(out.metrics["kl"].double(), kl_alone.kl[mask].mean().detach(), rtol=2e-6, atol=0)
    mass = (whole - sets).exp()[mask & (tokens.fields["kept"].counts > 0)].mean().detach()
    torch.testing.assert_close(out.metrics["kept_mass"].double(), mass, rtol=2e-6, atol=0)


# ---- a target outside of its set


def run_missing(case: Case, missing: str, keep: Tensor, backend: str) -> None:
    make, spec = OBJECTIVES["dapo"]
    case = replace(case, keep=keep)
    expected, gradient = case.expected(spec)
    naive, naive_gradient = case.naive(spec)
    leaf = case.logits.clone().requires_grad_()
    out = grpo_loss(leaf, case.batch(missing=missing), make(), backend=backend)
    out.loss.backward()
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_no_worse(leaf.grad, naive_gradient, gradient, "gradient")
    again = grpo_loss(case.logits, case.batch(), make(), backend=backend, options=Options(missing=missing))
    assert same_bits(again.loss, out.loss.detach())


def test_missing_targets(backend: str) -> None:
    case = build(kept=True)
    outside = ~case.fields["kept"].contains(case.targets).view(case.targets.shape)
    assert 2 < int((outside & case.mask).sum()) < int(case.mask.sum())
    run_missing(case, "include", case.keep, backend)
    run_missing(case, "full", case.keep | outside[..., None], backend)
    without = {**case.fields, "mask": case.mask & ~outside}
    make, spec = OBJECTIVES["dapo"]
    expected, _ = replace(case, fields=without).expected(spec)
    out = grpo_loss(case.logits, case.batch(missing="mask"), make(), backend=backend)
    torch.testing.assert_close(out.loss.double(), expected.loss, rtol=2e-6, atol=0)
    assert int(out.metrics["tokens"]) == int((case.mask & ~outside).sum())
    share = float((outside & case.mask).sum() / case.mask.sum())
    out = grpo_loss(case.logits, case.batch(), make(), backend=backend)
    assert float(out.metrics["outside_set"]) == pytest.approx(share)


def test_missing_targets_of_log_probs(backend: str) -> None:
    case = build(kept=True)
    outside = ~case.fields["kept"].contains(case.targets).view(case.targets.shape)
    z, mask = case.logits.double(), case.mask.reshape(-1)
    for missing, keep in (("include", case.keep), ("full", case.keep | outside[..., None])):
        _, logps, _ = oracle.log_probs(z, case.targets, keep=keep)
        options = Options(missing=missing)
        ours, _ = token_logprobs(
            case.logits, case.targets, mask=case.mask, kept=case.fields["kept"], options=options, backend=backend
        )  # fmt: skip
        torch.testing.assert_close(ours.reshape(-1).double()[mask], logps[mask], rtol=2e-6, atol=2e-6)
    options = Options(missing="mask")
    ours, _ = token_logprobs(case.logits, case.targets, kept=case.fields["kept"], options=options, backend=backend)
    assert (ours[outside] == 0).all() and (ours[~outside] != 0).any()


# ---- refusals


def refused(match: str, **fields: Any) -> None:
    given: dict[str, Any] = {"targets": torch.tensor([1, 2]), "advantages": torch.ones(2)} | fields
    logits = torch.randn(2, 6)
    before = logits.clone()
    with pytest.raises(ValueError, match=match):
        grpo_loss(logits, TokenBatch(**given), Objective.preset("dapo"), inplace=True)
    assert same_bits(before, logits)


def k1_where_old(logp: Tensor, old_logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Any]:
    """k1, nearly everywhere."""
    return ops.where(logp - old_logp > -2.5, logp - ref_logp, 0.0), ops.where(logp - old_logp > -2.5, 1.0, 0.0)


def k1_of_mine(logp: Tensor, old_logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Any]:
    return logp - ref_logp, 1.0


def test_which_estimators_read_old_logps() -> None:
    reading = {name for name in ESTIMATORS if Kl(name).reads_old_logps}
    assert reading == {"distillation"} and Kl(k1_where_old).reads_old_logps and not Kl(k1_of_mine).reads_old_logps


def test_wrong_sets_are_refused() -> None:
    refused("kept is a list: pass", kept=[[1], [2]])
    refused("has 2 tokens, but kept have 3 rows", kept=TokenSets.from_lists([[1], [2], [3]]))
    refused(r"kept holds id 6 in row 1: it is outside of the vocabulary \[0, 6\)", kept=TokenSets.from_lists([[1], [2, 6]]))
    refused("missing='drop': it must be one of", missing="drop")
    refused(r"targets\[1\]=2 is not in its kept set", kept=TokenSets.from_lists([[1], [3]]), missing="raise")
    fine = TokenBatch(torch.tensor([1, 2]), torch.ones(2), kept=TokenSets.from_lists([[1, 2], []]), missing="full")
    with pytest.raises(ValueError, match="the batch says missing='full'"):
        grpo_loss(torch.randn(2, 6), fine, Objective.preset("dapo"), options=Options(missing="mask"))
    with pytest.raises(ValueError, match="two gradients"):
        grpo_loss(
            torch.randn(2, 6), fine, Objective.preset("dapo"), inplace=True, options=Options(entropy_over="vocabulary")
        )  # fmt: skip
    by_ratio = Objective.preset("grpo", numerics="trl", beta=0.1, aggregate="token-mean")
    batch = replace(fine, ref_logps=torch.zeros(2))
    for weighed in (by_ratio, *(Objective.preset("dapo", beta=0.1, kl=kl) for kl in ("distillation", k1_where_old))):
        with pytest.raises(ValueError, match="weighs the KL by a ratio"):
            grpo_loss(torch.randn(2, 6), batch, weighed, options=Options(reference_over="vocabulary"))


# ---- memory that the gradient of the weight is added into


@pytest.mark.parametrize("name", ["dapo", "gspo"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_grad_is_added_to(dtype: torch.dtype, kept: bool, name: str, backend: str) -> None:
    make, _ = OBJECTIVES[name]
    case = build_linear(dtype, kept=kept)
    _, gradients = run_linear(case, make(), backend, upstream=1.5)
    leaves, total = case.leaves, torch.randn(case.weight.shape)
    start = total.clone()
    out = linear_grpo_loss(
        leaves["hidden"], leaves["weight"], case.tokens.batch(), make(), bias=leaves["bias"], backend=backend, weight_grad=total
    )
    assert same_bits(total, start)
    (1.5 * out.loss).backward()
    assert leaves["weight"].grad is None
    torch.testing.assert_close(leaves["hidden"].grad, gradients["hidden"], rtol=1e-5, atol=1e-7)
    rounding = 1e-5 if dtype == torch.float32 else 2**-8
    scale = float(gradients["weight"].abs().max())
    torch.testing.assert_close(total - start, gradients["weight"].float(), rtol=rounding, atol=rounding * scale + 1e-6)


@pytest.mark.parametrize("rows", [64, 8], ids=["one chunk", "several chunks"])
def test_sums_in_an_fp32_weight_grad_are_not_rounded(rows: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, total = build_linear(torch.bfloat16), torch.zeros(61, 24)
    in_chunks(monkeypatch, rows)
    leaves, objective = case.leaves, Objective.preset("dapo")
    linear_grpo_loss(
        leaves["hidden"], leaves["weight"], case.tokens.batch(), objective, backend=backend, weight_grad=total
    ).loss.backward()
    assert (total != total.bfloat16().float()).float().mean() > 0.9


def test_wrong_weight_grads_are_refused() -> None:
    weight, hidden = torch.randn(6, 4, requires_grad=True), torch.randn(2, 4)
    batch = TokenBatch(torch.tensor([1, 2]), torch.ones(2))
    for wrong, match in (
        (torch.zeros(6, 5), r"weight_grad is \[6, 5\] on cpu: pass a tensor like weight, \[6, 4\]"),
        (torch.zeros(6, 4, dtype=torch.bfloat16), "weight_grad has dtype torch.bfloat16: pass float32"),
        (torch.zeros(6, 4, requires_grad=True), "must not require grad"),
        ("main", "weight_grad is str"),
    ):
        with pytest.raises(ValueError, match=match):
            linear_grpo_loss(hidden, weight, batch, Objective.preset("dapo"), weight_grad=wrong)
    with pytest.raises(ValueError, match="does not require grad: leave it out for a frozen head"):
        linear_grpo_loss(hidden, weight.detach(), batch, Objective.preset("dapo"), weight_grad=torch.zeros(6, 4))


# ---- log-probs of several ids of a row


def some_ids(case: Case, g: torch.Generator) -> TokenSets:
    """Up to six ids of each row, some with the target and some with none."""
    vocab, lists = case.logits.shape[-1], []
    for row, target in enumerate(case.targets.reshape(-1).tolist()):
        ids = [i for i in torch.randperm(vocab, generator=g).tolist() if i != target][: row % 6]
        lists.append([*ids, target] if row % 4 == 1 else ids)
    return TokenSets.from_lists(lists)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["whole", "kept"])
@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
def test_log_probs_of_several_ids_match_oracle(
    linear: bool, kept: bool, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Beside log-probs of the targets, entropy and sum of squares, whose gradients meet in the same columns."""
    in_chunks(monkeypatch, 5)
    case = build_linear(dtype, transform=EVERYTHING, kept=kept)
    tokens, leaves, g = case.tokens, case.leaves, torch.Generator().manual_seed(5)
    at = some_ids(tokens, g)
    options: dict[str, Any] = {"mask": tokens.mask, "kept": tokens.fields.get("kept"), "transform": tokens.logit_transform()}
    options |= {"entropy": True, "backend": backend, "at": at, "also": ("sum_squares",)}
    leaf = tokens.logits.to(dtype).detach().requires_grad_()
    if linear:
        logps, entropy, more = linear_logprobs(
            leaves["hidden"], leaves["weight"], tokens.targets, bias=leaves["bias"], **options
        )
    else:
        logps, entropy, more = token_logprobs(leaf, tokens.targets, **options)
    exact = {k: v.detach().double().requires_grad_() for k, v in leaves.items()}
    z = torch.nn.functional.linear(exact["hidden"], exact["weight"], exact["bias"])
    exact_leaf = leaf.detach().double().requires_grad_()
    z = z if linear else exact_leaf
    log_p, chosen, h = oracle.log_probs(z, tokens.targets, oracle.Transform(**EVERYTHING), keep=tokens.keep)
    mask = tokens.mask.reshape(-1)
    d_logps, d_entropy, d_squares, d_at = (torch.randn(n, generator=g) for n in (*[mask.numel()] * 3, at.ids.numel()))
    wanted = log_p[at.row_of, at.ids.long()]
    read = mask[at.row_of]
    assert more["at"].shape == at.ids.shape and (more["at"][~read] == 0).all()
    finite = read & wanted.isfinite()
    assert finite.any() and (not kept or (read & ~finite).any())
    assert (more["at"][read & ~finite] == -torch.inf).all()
    torch.testing.assert_close(more["at"].double()[finite], wanted[finite], rtol=2e-6, atol=4e-6)
    ours = [
        (logps.reshape(-1), d_logps), (entropy.reshape(-1), d_entropy), (more["sum_squares"].reshape(-1), d_squares),
        (more["at"], torch.where(finite, d_at, 0.0)),
    ]  # fmt: skip
    torch.autograd.backward([x for x, _ in ours], [d for _, d in ours])
    squares = log_p.exp().square().sum(1)
    expected = torch.where(mask, chosen * d_logps + h * d_entropy + squares * d_squares, 0.0).sum()
    (expected + (wanted[finite] * d_at[finite]).sum()).backward()
    if not linear:
        leaves, exact = {"logits": leaf}, {"logits": exact_leaf}
    for name, gradient in gradients_of(leaves).items():
        scale = float(exact[name].grad.abs().max())
        rounding = ROUNDING[dtype] if linear else {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
        torch.testing.assert_close(
            gradient.double(), exact[name].grad, rtol=rounding, atol=rounding * scale * (0.5 if linear else 0.05)
        )


def test_several_ids_of_a_certain_row_have_exact_slopes(backend: str) -> None:
    """bf16 logits of a row with p = 0.9999 at one id: 1 - p there, and the slopes of two ids may cancel in their sum."""
    logits = torch.zeros(2, 40)
    logits[:, 7] = 13.0
    leaf = logits.bfloat16().requires_grad_()
    at = TokenSets.from_lists([[7], [7, 9]])
    _, _, more = token_logprobs(leaf, torch.tensor([3, 3]), at=at, backend=backend)
    more["at"].backward(torch.tensor([1.0, 1.0, -1.0]))
    exact = leaf.detach().double().requires_grad_()
    log_p = exact.log_softmax(1)
    (log_p[0, 7] + log_p[1, 7] - log_p[1, 9]).backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2**-8, atol=1e-12)


# ---- long sets, unread rows and metrics


def test_one_long_set_does_not_make_all_rows_long(backend: str) -> None:
    """Sets of 1 to 3000 ids in one call, against float64."""
    g = torch.Generator().manual_seed(8)
    logits, targets = 3.0 * torch.randn(9, 4000, generator=g), torch.randint(4000, (9,), generator=g)
    lists = [torch.randperm(4000, generator=g)[:size].tolist() for size in (3, 3000, 70, 1, 500, 2, 64, 63, 0)]
    keep = torch.zeros(9, 4000, dtype=torch.bool)
    for row, ids in enumerate(lists):
        keep[row, [*ids, int(targets[row])]] = True
        if not ids:
            keep[row] = True
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logps, entropy = token_logprobs(leaf, targets, kept=TokenSets.from_lists(lists), entropy=True, backend=backend)
    _, chosen, h = oracle.log_probs(exact, targets, keep=keep)
    torch.testing.assert_close(logps.double(), chosen, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(entropy.double(), h, rtol=2e-6, atol=2e-6)
    (logps + 0.3 * entropy).sum().backward()
    (chosen + 0.3 * h).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2e-5, atol=2e-6)
    batch = TokenBatch(
        targets, torch.linspace(-1, 1, 9), kept=TokenSets.from_lists(lists), old_logps=chosen.float().detach() + 0.05
    )
    leaf.grad = None
    out = grpo_loss(leaf, batch, Objective.preset("dapo", entropy_coef=0.1), backend=backend)
    out.loss.backward()
    at_once, alone = leaf.grad.clone(), []
    for row in range(9):
        one = replace(batch, targets=targets[row : row + 1], advantages=batch.advantages[row : row + 1],
                      old_logps=batch.old_logps[row : row + 1], kept=batch.kept[row : row + 1])  # fmt: skip
        leaf.grad = None
        objective = Objective.preset("dapo", entropy_coef=0.1)
        grpo_loss(leaf[row : row + 1], one, objective, normalizer=9.0, backend=backend).loss.backward()
        alone.append(leaf.grad[row].clone())
    torch.testing.assert_close(at_once, torch.stack(alone), rtol=1e-6, atol=1e-9)


def test_rows_are_grouped_by_the_length_of_their_sets() -> None:
    """Each row once, in a width that its ids and one more place fit in, and that is less than eight times too wide."""
    lengths = [0, 62, 63, 64, 511, 512, 4095, 3, 63, 511]
    sets = TokenSets.from_counts(torch.cat([torch.arange(n) for n in lengths]), torch.tensor(lengths))
    assert [(rows.tolist(), width) for rows, width in _groups(sets) if rows is not None] == [
        ([0, 1, 2, 7, 8], 64), ([3, 4, 9], 512), ([5, 6], 4096)
    ]  # fmt: skip
    assert [(rows.tolist(), width) for rows, width in _groups(sets[3:5]) if rows is not None] == [([0, 1], 512)]
    assert _groups(sets[7:9]) == ((None, 64),) and _groups(sets[7:8]) == ((None, 16),)


def test_unread_rows_need_no_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is masked: no row kernel runs over the vocabulary for it."""
    from grpo_kernels.vocabulary.backends import cpu

    seen = []
    stats = cpu.stats
    monkeypatch.setattr(cpu, "stats", lambda logits, *a, **k: seen.append(logits.shape[-1]) or stats(logits, *a, **k))
    logits = torch.randn(3, 5000, requires_grad=True)
    kept = TokenSets.from_lists([[], [3, 4], [5]])
    mask = torch.tensor([False, True, True])
    logps, _ = token_logprobs(logits, torch.tensor([1, 3, 5]), mask=mask, kept=kept, backend="cpu")
    logps.sum().backward()
    assert seen and max(seen) < 100
    assert (logits.grad[0] == 0).all() and (logits.grad[1, 3:5] != 0).all() and int((logits.grad != 0).sum()) == 2


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
def test_torch_func_differentiates_over_sets(linear: bool, backend: str) -> None:
    case = build_linear(kept=True)
    tokens = case.tokens
    at = some_ids(tokens, torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"mask": tokens.mask, "kept": tokens.fields["kept"], "backend": backend, "at": at}

    def total(x: Tensor) -> Tensor:
        if linear:
            logps, _, more = linear_logprobs(x, case.weight, tokens.targets, bias=case.bias, **options)
        else:
            logps, _, more = token_logprobs(x, tokens.targets, **options)
        return logps.sum() + torch.where(more["at"].isfinite(), more["at"], 0.0).sum()

    x = case.hidden if linear else tokens.logits.float()
    leaf = x.clone().requires_grad_()
    total(leaf).backward()
    assert float(leaf.grad.abs().max()) > 0
    torch.testing.assert_close(torch.func.grad(total)(x), leaf.grad, rtol=1e-6, atol=1e-8)


def test_strict_mode_refuses_a_target_outside_of_its_set() -> None:
    sets, targets, logits = TokenSets.from_lists([[1], [3]]), torch.tensor([1, 2]), torch.randn(2, 6)
    batch = TokenBatch(targets, torch.ones(2), kept=sets)
    with pytest.raises(ValueError, match=r"targets\[1\]=2 is not in its kept set"):
        grpo_loss(logits, batch, Objective.preset("dapo"), strict=True)
    with use(strict=True), pytest.raises(ValueError, match=r"targets\[1\]=2 is not in its kept set"):
        token_logprobs(logits, targets, kept=sets)
    grpo_loss(logits, replace(batch, missing="full"), Objective.preset("dapo"), strict=True)


def test_metrics_of_sets() -> None:
    """Targets that missing="mask" takes out are counted; the kept mass is that of rows that have a set."""
    logits, targets = torch.randn(3, 6), torch.tensor([1, 2, 4])
    batch = TokenBatch(targets, torch.ones(3), kept=TokenSets.from_lists([[1, 3], [3], []]), missing="mask")
    out = grpo_loss(logits, batch, Objective.preset("dapo"), options=Options(entropy_over="vocabulary"))
    assert float(out.metrics["outside_set"]) == pytest.approx(1 / 3)
    p = logits[0].softmax(0)
    assert float(out.metrics["kept_mass"]) == pytest.approx(float(p[1] + p[3]), rel=1e-5)
