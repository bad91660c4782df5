"""Parity with Liger 0.8.5: its chunked loss from hidden states, and its Triton loss from logits (interpreted, in a process of
its own), against ours with `numerics="liger"`.

Each is compared with `reference`, float64 and written from the formulas (../shared/peers.md names their papers), in loss and in
every gradient. Where Liger has a defect the test says so, and only ours is held to the reference.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("liger_kernel")

from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

from grpo_kernels import LogitTransform, Objective, TokenBatch, grpo_loss, linear_grpo_loss
from grpo_kernels.formulas.surrogates import Cispo, Clip, Sapo, Vespo

Tensor = torch.Tensor

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")

B, T, H, V = 7, 6, 10, 13
BUDGET, BETA, DELTA, NUM_ITEMS = 9, 0.3, 1.5, 61


@dataclass(frozen=True)
class Case:
    """In Liger's words, with numbers that are not its defaults."""

    loss_type: str = "grpo"
    level: str = "token"
    beta: float = 0.0
    corrected: bool = False
    delta: float | None = None
    num_items: int | None = None
    temperature: float = 0.9
    eps_low: float = 0.2
    eps_high: float = 0.27
    cap: float = 1.25
    sapo: tuple[float, float] = (0.9, 1.3)
    vespo: tuple[float, float, float, float] = (1.8, 2.6, 2.7, 2.1)
    #: None: also the padded length, as Liger's Triton loss has it where no budget is given.
    budget: int | None = BUDGET

    @property
    def eps_high_or_cap(self) -> float:
        return self.cap if self.loss_type == "cispo" else self.eps_high


@dataclass(frozen=True, eq=False)
class Data:
    hidden: Tensor  # [B, T, H]
    head: Tensor
    bias: Tensor | None
    ids: Tensor
    mask: Tensor
    old: Tensor | None
    ref: Tensor
    advantages: Tensor  # [B]
    weights: Tensor | None = None  # [B, T] or [B, 1]


@dataclass(frozen=True, eq=False)
class Result:
    loss: float
    gradients: tuple[Tensor, ...]  # hidden, head, and bias if there is one; or logits
    clipped: float
    kl: float | None
    #: The sum of the absolute values of all terms: rounding errors of the loss are relative to it.
    scale: float = 0.0


# ---- Liger


def ligers(case: Case, data: Data, *, upstream: float = 1.0, **options: Any) -> Result:
    options = {
        "beta": case.beta, "compiled": False, "use_ref_model": case.beta != 0, "epsilon_low": case.eps_low,
        "epsilon_high": case.eps_high_or_cap, "loss_type": case.loss_type, "max_completion_length": case.budget,
        "importance_sampling_level": case.level, "sapo_temperature_pos": case.sapo[0], "sapo_temperature_neg": case.sapo[1],
        "temperature": case.temperature, "delta": case.delta, "use_bias_correction_kl": case.corrected,
        **dict(zip(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), case.vespo, strict=True)),
    } | options  # fmt: skip
    parameters = [x.clone().requires_grad_() for x in (data.hidden, data.head, data.bias) if x is not None]
    loss, metrics = LigerFusedLinearGRPOLoss(**options)(
        parameters[0], parameters[1], data.ids, data.mask.float(), data.advantages, bias=parameters[2] if data.bias is not None else None,
        old_per_token_logps=data.old, ref_per_token_logps=data.ref if options["use_ref_model"] else None,
        vllm_is_ratio=data.weights, num_items_in_batch=case.num_items,
    )  # fmt: skip
    gradients = torch.autograd.grad(upstream * loss, parameters)
    return Result(float(loss.detach()), gradients, float(metrics[-1]), float(metrics[0]) if case.beta else None)


# ---- ours


def objective_of(case: Case, **changes: Any) -> Objective:
    surrogate: Any = Clip(case.eps_low, case.eps_high, delta=case.delta or math.inf)
    if case.loss_type in ("cispo", "sapo", "vespo"):
        surrogate = {"cispo": Cispo(case.cap), "sapo": Sapo(*case.sapo), "vespo": Vespo(*case.vespo)}[case.loss_type]
    if case.loss_type != "vespo":
        changes["level"] = case.level
    if case.corrected:
        changes["kl"] = objective_kl()
    return Objective.preset(
        case.loss_type, numerics="liger", surrogate=surrogate, beta=case.beta, max_tokens=case.budget or T, **changes
    )


def objective_kl() -> Any:
    """Liger's `use_bias_correction_kl` is TRL's KL."""
    return Objective.preset("grpo", numerics="trl").kl


def batch_of(case: Case, data: Data) -> TokenBatch:
    return TokenBatch(
        data.ids, data.advantages, mask=data.mask, old_logps=data.old, ref_logps=data.ref if case.beta else None,
        weights=data.weights,
    )  # fmt: skip


def ours(case: Case, data: Data, objective: Objective | None = None, *, upstream: float = 1.0) -> Result:
    parameters = [x.clone().requires_grad_() for x in (data.hidden, data.head, data.bias) if x is not None]
    out = linear_grpo_loss(
        parameters[0], parameters[1], batch_of(case, data), objective or objective_of(case),
        bias=parameters[2] if data.bias is not None else None, transform=LogitTransform(temperature=case.temperature),
        normalizer=case.num_items,
    )  # fmt: skip
    return result(out, torch.autograd.grad(upstream * out.loss, parameters), case)


def result(out: Any, gradients: tuple[Tensor, ...], case: Case) -> Result:
    clipped = float(out.metrics["clip_low"] + out.metrics["clip_high"])
    return Result(float(out.loss.detach()), gradients, clipped, float(out.metrics["kl"]) if case.beta else None)


# ---- the reference, float64


def policy_term(case: Case, x: Tensor, own: Tensor, logp: Tensor, A: Tensor, w: Tensor | None) -> Tensor:
    """Of the trained tokens of a sequence, with the log-ratio x of the level."""
    r = x.exp()
    if case.loss_type in CLIPPED:
        unclipped = r if case.delta is None else r.clamp(max=case.delta)
        return -torch.minimum(unclipped * A, r.clamp(1 - case.eps_low, 1 + case.eps_high) * A)
    if case.loss_type == "cispo":
        return -r.clamp(max=case.cap).detach() * A * logp
    if case.loss_type == "sapo":
        tau = torch.where(A > 0, case.sapo[0], case.sapo[1])
        return -4 / tau * torch.sigmoid(tau * (r - 1)) * A
    assert case.loss_type == "vespo"
    log_w = own.clamp(-20, 20).sum()
    if w is not None:
        log_w = log_w + w.log()[w > 0].sum()
    log_w = log_w.clamp(math.log(1e-8), 20).detach()
    k = torch.where(A >= 0, case.vespo[0], case.vespo[2])
    rate = torch.where(A >= 0, case.vespo[1], case.vespo[3])
    phi = torch.exp(rate + k * log_w - rate * log_w.exp())
    return -phi * A * logp * (1.0 if w is None else (w > 0).double())


def loss_of(case: Case, data: Data, logps: Tensor) -> tuple[Tensor, float, float | None, float]:
    """(loss, share clipped, mean KL, scale) of log-probs [B, T]."""
    terms, clipped, kls = [], [], []
    tokens = max(int(data.mask.sum()), 1)
    for b in range(B):
        at = data.mask[b].nonzero()[:, 0]
        n = at.numel()
        if n == 0:
            continue  # it adds nothing, but counts in B
        logp = logps[b, at]
        own = logp - (logp.detach() if data.old is None else data.old.double()[b, at])
        x = own if case.level == "token" else own.mean().expand(n)
        A = data.advantages.double()[b].expand(n)
        w = None if data.weights is None else data.weights.double()[b].expand(T)[at]
        loss = policy_term(case, x, own, logp, A, w)
        if w is not None and case.loss_type != "vespo":
            loss = loss * w
        if case.beta:
            d = data.ref.double()[b, at] - logp
            kl = d.exp() - d - 1
            if case.corrected:
                kl = kl * x.exp()
            kls += kl.tolist()
            loss = loss + case.beta * kl
        terms.append(loss / (n if case.loss_type in ("grpo", "sapo") else 1))
        if case.loss_type not in ("sapo", "vespo"):
            low, high = (0.0, case.cap) if case.loss_type == "cispo" else (1 - case.eps_low, 1 + case.eps_high)
            clipped += (((x.exp() < low) & (A < 0)) | ((x.exp() > high) & (A > 0))).tolist()
    if case.loss_type in ("grpo", "sapo", "luspo"):
        D = B
    elif case.loss_type == "dr_grpo":
        D = B * (case.budget or T)
    else:
        D = tokens if case.num_items is None or case.loss_type == "bnpo" else case.num_items
    whole = torch.cat(terms) / D
    return whole.sum(), sum(clipped) / tokens, sum(kls) / tokens if case.beta else None, float(whole.detach().abs().sum())


def exact_logps(case: Case, logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits / case.temperature, -1).gather(2, ids[..., None])[..., 0]


def reference(case: Case, data: Data) -> Result:
    parameters = [x.double().requires_grad_() for x in (data.hidden, data.head, data.bias) if x is not None]
    logits = parameters[0] @ parameters[1].T + (parameters[2] if data.bias is not None else 0.0)
    loss, clipped, kl, scale = loss_of(case, data, exact_logps(case, logits, data.ids))
    return Result(float(loss.detach()), torch.autograd.grad(loss, parameters), clipped, kl, scale)


def assert_same(got: Result, want: Result, what: object, tolerance: float = 1e-5) -> None:
    assert abs(got.loss - want.loss) <= tolerance * want.scale, f"{what}: loss {got.loss}, not {want.loss}"
    for a, b in zip(got.gradients, want.gradients, strict=True):
        error, size = float((a.double() - b).abs().max()), float(b.abs().max())
        assert error <= tolerance * size, f"{what}: a gradient {list(b.shape)} is off by {error} of {size}"
    assert got.clipped == pytest.approx(want.clipped, abs=1e-6), what
    if want.kl is not None:
        assert got.kl == pytest.approx(want.kl, rel=1e-5, abs=1e-7), what


def different(a: Result, b: Result, share: float = 0.01) -> bool:
    return float((a.gradients[0].double() - b.gradients[0]).abs().max()) > share * float(b.gradients[0].abs().max())


# ---- the batch


@pytest.fixture(scope="module")
def plain() -> Data:
    """Sequences of unequal length, one without tokens, one of advantage 0; what is masked is finite, as Liger needs it."""
    g = torch.Generator().manual_seed(3)
    lengths = torch.tensor([6, 3, 5, 0, 6, 2, 4])
    hidden = torch.randn(B, T, H, generator=g)
    head, bias = 0.6 * torch.randn(V, H, generator=g), 0.5 * torch.randn(V, generator=g)
    ids = torch.randint(V, (B, T), generator=g)
    logps = exact_logps(Case(), hidden @ head.T + bias, ids)
    shift = torch.tensor([0.35, -0.35, -0.3, 0.1, 0.45, 0.1, 0.05])[:, None]
    old = logps - shift - 0.15 * torch.randn(B, T, generator=g)
    ref = logps + 0.2 + 0.5 * torch.randn(B, T, generator=g)
    advantages = torch.tensor([1.2, 0.8, -0.7, 0.9, -1.1, 0.6, 0.0])
    return Data(hidden, head, bias, ids, torch.arange(T) < lengths[:, None], old, ref, advantages)


@pytest.fixture(scope="module")
def token_weights() -> Tensor:
    g = torch.Generator().manual_seed(4)
    return torch.exp(0.3 * torch.randn(B, T, generator=g)).clamp(max=1.35)


def cases(loss_type: str) -> Iterator[Case]:
    levels = ("token",) if loss_type in ("cispo", "sapo", "vespo") else ("token", "sequence")
    deltas = (None, DELTA) if loss_type in CLIPPED else (None,)
    counts = (None, NUM_ITEMS) if loss_type in ("dapo", "cispo", "vespo") else (None,)
    kls = ((0.0, False), (BETA, False), (BETA, True))
    for level, (beta, corrected), delta, num_items in itertools.product(levels, kls, deltas, counts):
        yield Case(loss_type, level, beta, corrected, delta, num_items)


def whole(data: Data) -> Data:
    """Without padding."""
    return replace(data, mask=torch.ones_like(data.mask))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_combination(plain: Data, token_weights: Tensor, loss_type: str) -> None:
    """loss_type x level x (no KL, KL, corrected KL) x delta x denominator x weights x bias, old log-probs and chunks."""
    masked_weights = torch.where(plain.mask, token_weights, 1.0)  # see test_vespo_weights
    for case in cases(loss_type):
        for data in (
            plain, replace(plain, weights=masked_weights), replace(plain, weights=token_weights[:, :1], bias=None),
            replace(plain, old=None),
        ):  # fmt: skip
            if loss_type == "vespo" and data.weights is not None and data.weights.shape[1] == 1:
                continue  # one per sequence is refused by us, whose VESPO multiplies the tokens' weights
            what = (case, data.weights is not None, data.bias is not None, data.old is not None)
            want = reference(case, data)
            assert float(want.gradients[0].abs().max()) > 1e-4, what
            assert_same(ours(case, data), want, ("ours", *what))
            if loss_type == "luspo":  # see test_luspo
                data = whole(data)
                want = reference(case, data)
                assert_same(ours(case, data), want, ("ours, no padding", *what))
            assert_same(ligers(case, data), want, ("Liger", *what))
            assert_same(ligers(case, data, chunk_size=3), want, ("Liger, chunks of 3", *what))


def test_the_grid_is_not_trivial(plain: Data, token_weights: Tensor) -> None:
    for level in ("token", "sequence"):
        base = reference(Case("dapo", level), plain)
        assert 0.15 < base.clipped < 0.6
        assert different(reference(Case("dapo", level, delta=DELTA), plain), base)
    assert reference(Case("cispo"), plain).clipped > 0.1
    for loss_type in LOSS_TYPES:
        base, kl = reference(Case(loss_type), plain), reference(Case(loss_type, beta=BETA), plain)
        assert different(kl, base) and different(reference(Case(loss_type, beta=BETA, corrected=True), plain), kl)
        assert different(reference(Case(loss_type), replace(plain, weights=token_weights)), base)
        assert different(reference(Case(loss_type), replace(plain, bias=None)), base)
        assert different(reference(Case(loss_type), replace(plain, old=None)), base)


def test_presets_have_ligers_defaults(plain: Data) -> None:
    """Nothing passed: clip widths, beta = 0.04 and temperature 1 are Liger's own. CISPO's cap is apart, see below."""
    defaults = Case(
        beta=0.04, temperature=1.0, eps_low=0.2, eps_high=0.2, cap=5.0, sapo=(1.0, 1.05), vespo=(2.0, 3.0, 3.0, 2.0)
    )
    for loss_type in LOSS_TYPES:
        level = "sequence" if loss_type == "luspo" else "token"
        case = replace(defaults, loss_type=loss_type, level=level)
        want = reference(case, plain)
        changes = {"max_tokens": BUDGET} if loss_type == "dr_grpo" else {}
        assert_same(ours(case, plain, Objective.preset(loss_type, numerics="liger", **changes)), want, loss_type)
        if loss_type not in ("luspo", "cispo"):
            loss = LigerFusedLinearGRPOLoss(loss_type=loss_type, max_completion_length=BUDGET, compiled=False)
            parameters = [x.clone().requires_grad_() for x in (plain.hidden, plain.head, plain.bias)]
            value, metrics = loss(*parameters[:2], plain.ids, plain.mask, plain.advantages, parameters[2], plain.ref, plain.old)
            got = Result(float(value.detach()), torch.autograd.grad(value, parameters), float(metrics[1]), float(metrics[0]))
            assert_same(got, want, f"Liger, {loss_type}")
    case = replace(defaults, loss_type="dapo", level="sequence")
    aggregate = {"aggregate": "token-mean"}
    assert_same(ours(case, plain, Objective.preset("gspo", numerics="liger", **aggregate)), reference(case, plain), "gspo")


def test_what_liger_refuses(plain: Data) -> None:
    for loss_type in ("cispo", "sapo", "vespo"):
        with pytest.raises(ValueError, match="not supported"):
            ligers(Case(loss_type, "sequence"), plain)
    with pytest.raises(ValueError, match="level"):
        objective_of(Case("vespo"), level="sequence")
    with pytest.raises((ValueError, AssertionError), match="max_completion_length"):
        ligers(Case("dr_grpo", budget=None), plain)
    with pytest.raises(ValueError, match="max_tokens"):
        ours(Case(), plain, Objective.preset("dr_grpo", numerics="liger", beta=0.0))


def test_upstream_gradient(plain: Data) -> None:
    case = Case("dapo", beta=BETA)
    want = reference(case, plain)
    scaled = replace(want, gradients=tuple(-2.5 * g for g in want.gradients))
    for run in (ligers, ours):
        assert_same(run(case, plain, upstream=-2.5), scaled, run.__name__)


def test_frozen_head(plain: Data) -> None:
    hidden = plain.hidden.clone().requires_grad_()
    case = Case("dapo")
    out = linear_grpo_loss(
        hidden,
        plain.head,
        batch_of(case, plain),
        objective_of(case),
        bias=plain.bias,
        transform=LogitTransform(temperature=0.9),
    )
    got, want = torch.autograd.grad(out.loss, hidden)[0], reference(case, plain).gradients[0]
    assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())


# ---- Liger's defects


def test_luspo(plain: Data, token_weights: Tensor) -> None:
    """The chunked loss weighs every position of the padded sequence, masked ones too, and divides by the padded length; right
    only where nothing is padded or each sequence has one number."""
    for case in cases("luspo"):
        one_number = case.level == "sequence" and case.beta == 0
        want, theirs = reference(case, plain), ligers(case, plain)
        if one_number:
            assert_same(theirs, want, case)
        else:
            assert different(theirs, want, 0.05), case
        assert_same(ours(case, plain), want, case)


def test_vespo_weights(plain: Data, token_weights: Tensor) -> None:
    """Liger counts the log-weights of masked positions, and a token of weight 0 as log 1e-8, which silences its sequence. Ours
    leaves both out."""
    case = Case("vespo")
    data = replace(plain, weights=token_weights)
    want = reference(case, data)
    assert different(ligers(case, data), want, 0.05)
    assert_same(ours(case, data), want, "masked positions")
    rejected = torch.where(plain.mask, token_weights, 1.0)
    rejected[0, 1] = rejected[4, 2] = 0.0
    data = replace(plain, weights=rejected)
    theirs, mine, want = ligers(case, data), ours(case, data), reference(case, data)
    assert_same(mine, want, "rejected tokens")
    hidden = want.gradients[0][[0, 4]].abs().amax((1, 2))
    assert float(theirs.gradients[0][[0, 4]].abs().amax((1, 2)).max()) < 1e-3 * float(hidden.max())


def test_beta_without_a_reference(plain: Data) -> None:
    """Liger's KL is then silently 0, although its default beta is 0.04. We refuse."""
    theirs = ligers(Case("dapo"), plain, beta=0.04, use_ref_model=False)
    assert_same(theirs, reference(Case("dapo"), plain), "no KL")
    with pytest.raises(ValueError, match="ref_logps"):
        ours(Case("dapo"), plain, Objective.preset("dapo", numerics="liger"))


def test_cispo_without_epsilon_high(plain: Data) -> None:
    """`epsilon_high` is CISPO's cap, an absolute ratio, and 0.2 by default: all ratios are 0.2. Ours is 5."""
    assert_same(ligers(Case("cispo", cap=0.2), plain), reference(Case("cispo", cap=0.2), plain), "0.2")
    loss = LigerFusedLinearGRPOLoss(loss_type="cispo", compiled=False)
    assert loss.epsilon_high == 0.2
    assert Objective.preset("cispo", numerics="liger").surrogate == Cispo(5.0)
    assert different(reference(Case("cispo", cap=0.2), plain), reference(Case("cispo", cap=5.0), plain), 0.5)


def test_delta_that_is_ignored(plain: Data) -> None:
    """delta means nothing to CISPO, SAPO and VESPO: the chunked loss ignores it, our surrogates do not take it."""
    for loss_type in ("cispo", "sapo", "vespo"):
        assert_same(ligers(Case(loss_type, delta=DELTA), plain), reference(Case(loss_type), plain), loss_type)
    with pytest.raises(TypeError):
        Cispo(5.0, delta=DELTA)


def test_weight_gradient_in_bfloat16() -> None:
    """Liger adds the head's gradient up in bf16, sequence by sequence; ours is summed in fp32."""
    g = torch.Generator().manual_seed(9)
    n, width, vocab = 96, 16, 24
    hidden = torch.randn(n, 2, width, generator=g).bfloat16()
    head = (0.5 * torch.randn(vocab, width, generator=g)).bfloat16()
    ids, mask = torch.randint(vocab, (n, 2), generator=g), torch.ones(n, 2, dtype=torch.bool)
    advantages = torch.rand(n, generator=g) + 0.5
    weight = head.clone().requires_grad_()
    loss, _ = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=False)(
        hidden, weight, ids, mask.float(), advantages
    )
    (theirs,) = torch.autograd.grad(loss, weight)
    weight = head.clone().requires_grad_()
    out = linear_grpo_loss(hidden, weight, TokenBatch(ids, advantages), Objective.preset("dapo", numerics="liger", beta=0.0))
    (mine,) = torch.autograd.grad(out.loss, weight)
    exact = head.double().requires_grad_()
    logps = torch.log_softmax(hidden.double() @ exact.T, -1).gather(2, ids[..., None])[..., 0]
    (want,) = torch.autograd.grad(-(advantages.double()[:, None] * logps).sum() / mask.sum(), exact)

    def error(x: Tensor) -> float:
        return float((x.double() - want).norm() / want.norm())

    assert error(mine) < 0.004 and error(theirs) > 1.5 * error(mine), (error(mine), error(theirs))


# ---- Liger's Triton loss, from logits


def triton_cases() -> list[Case]:
    """Of the loss types that share a path one has all options."""
    out = [Case("dapo", level, beta, corrected, delta)
           for level in ("token", "sequence") for beta, corrected, delta in
           ((0.0, False, None), (BETA, False, None), (BETA, True, DELTA))]  # fmt: skip
    out += [Case(name, beta=BETA) for name in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo")]
    return [
        *out,
        Case("grpo", "sequence"),
        Case("dapo", num_items=NUM_ITEMS),
        Case("dr_grpo", budget=None),
        Case("luspo", "sequence"),
    ]


def interpreted(source: str, target: str) -> None:
    """Runs in a process of its own, where the kernels are interpreted: Liger's losses and gradients of the cases of a file."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    given = torch.load(source, weights_only=False)
    results = []
    for case, weights in zip(given["cases"], given["weights"], strict=True):
        logits = given["logits"].clone().requires_grad_()
        options = dict(zip(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), case.vespo, strict=True))
        loss, metrics = triton_grpo_loss(
            logits, given["old"], given["ref"] if case.beta else None, given["ids"], given["advantages"], given["mask"].long(),
            temperature=case.temperature, beta=case.beta, eps_low=case.eps_low, eps_high=case.eps_high_or_cap, inplace=False,
            loss_type=case.loss_type, max_completion_length=case.budget, importance_sampling_level=case.level, reduce=True,
            sapo_temperature_pos=case.sapo[0], sapo_temperature_neg=case.sapo[1], vllm_is_ratio=weights, delta=case.delta,
            use_bias_correction_kl=case.corrected, num_items_in_batch=case.num_items, **options,
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(loss, logits)
        results.append((float(loss.detach()), gradient, [float(m) for m in metrics]))

    # Its defaults, and its gradient in place of the logits.
    leaf = given["logits"].clone().requires_grad_()
    logits = leaf * 1.0
    version, before = logits._version, logits.detach().clone()
    loss, _ = triton_grpo_loss(
        logits, given["old"], given["ref"], given["ids"], given["advantages"], given["mask"].long(), reduce=True
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    unnoticed = logits._version == version and not torch.equal(logits.detach(), before)
    torch.save({"results": results, "defaults": (float(loss.detach()), gradient), "unnoticed": unnoticed}, target)


def test_triton_loss(plain: Data, token_weights: Tensor, tmp_path: Path) -> None:
    """The interpreter's results against the reference, and ours; then two defects: LUSPO multiplies by the length twice, and
    the gradient that overwrites the logits leaves their version counter as it was.

    A third one, LUSPO's gradient at token level, reads beyond the end of a tensor: it is not run. See test_luspo for ours."""
    pytest.importorskip("triton")
    g = torch.Generator().manual_seed(12)
    logits = torch.cat([plain.hidden @ plain.head.T + plain.bias, torch.randn(B, 1, V, generator=g)], 1).contiguous()
    masked_weights = torch.where(plain.mask, token_weights, 1.0)
    runs = triton_cases()
    given = {
        "cases": runs, "weights": [masked_weights if i % 2 else None for i in range(len(runs))], "logits": logits,
        "old": plain.old, "ref": plain.ref, "ids": plain.ids, "advantages": plain.advantages, "mask": plain.mask,
    }  # fmt: skip
    torch.save(given, tmp_path / "given.pt")
    program = "import sys; from test_parity_liger import interpreted; interpreted(*sys.argv[1:])"
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "given.pt"), str(tmp_path / "results.pt")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    made = torch.load(tmp_path / "results.pt")

    def want_of(case: Case, data: Data) -> Result:
        exact = logits.double().requires_grad_()
        loss, clipped, kl, scale = loss_of(case, data, exact_logps(case, exact[:, :-1], data.ids))
        return Result(float(loss.detach()), torch.autograd.grad(loss, exact), clipped, kl, scale)

    def mine_of(case: Case, data: Data, objective: Objective) -> Result:
        leaf = logits.clone().requires_grad_()
        out = grpo_loss(
            leaf[:, :-1], batch_of(case, data), objective, transform=LogitTransform(temperature=case.temperature),
            normalizer=case.num_items,
        )  # fmt: skip
        return result(out, torch.autograd.grad(out.loss, leaf), case)

    for case, weights, (loss, gradient, metrics) in zip(runs, given["weights"], made["results"], strict=True):
        data = replace(plain, weights=weights)
        want = want_of(case, data)
        assert_same(mine_of(case, data, objective_of(case)), want, ("ours", case))
        if case.loss_type == "luspo":
            one = want_of(replace(case, loss_type="dapo"), data)  # the sum over tokens, over their number
            assert different(Result(loss, (gradient,), 0, None), want, 0.05) and abs(loss - want.loss) > 0.05 * abs(want.loss)
            assert abs(one.loss) > 1e-3
            continue
        theirs = Result(loss, (gradient,), metrics[-1], metrics[0] if case.beta else None)
        assert_same(theirs, want, ("Liger", case))

    case = Case("dapo", beta=0.04, eps_high=0.4)  # its defaults: not those of the chunked loss
    want = want_of(case, plain)
    loss, gradient = made["defaults"]
    assert_same(Result(loss, (gradient,), want.clipped, want.kl), want, "Liger's defaults")
    assert_same(mine_of(case, plain, Objective.preset("dapo", numerics="liger", surrogate=Clip(0.2, 0.4))), want, "ours")
    assert made["unnoticed"]
