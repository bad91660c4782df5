"""The Triton kernels against float64. Run by test_triton_compiled.py, which has the code that is compiled for a GPU executed, and
on a GPU by benchmarks/gpu_kit.py.

The reference is written here with torch autograd, from the papers' formulas, and shares nothing with the package."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels import TokenBatch, linear_grpo_loss
from grpo_kernels.formulas.filters import TRUST_REGIONS, EntropyFloor, TrustRegion
from grpo_kernels.formulas.kl import ESTIMATORS, WEIGHTINGS, Kl
from grpo_kernels.formulas.ops import ops
from grpo_kernels.formulas.surrogates import Cispo, Clip, Custom, PolicyGradient
from grpo_kernels.formulas.token_stage import TokenRows
from grpo_kernels.objective import Objective
from grpo_kernels.presets import PRESETS
from grpo_kernels.vocabulary.backends import eager, two_visits
from grpo_kernels.vocabulary.backends import triton as backend
from grpo_kernels.vocabulary.backends.triton_choices import INTERPRETED, LAUNCH, Choice, choose
from grpo_kernels.vocabulary.rows import RowTransform
from support.largest import note
from support.rows import EVERYTHING, LOGPS, WITH_ENTROPY, slopes_of

Tensor = torch.Tensor
PLAIN = RowTransform(1.0, 0.0, 1.0)
WIDTH = 0.5


def bend(x: Tensor) -> Tensor:
    return x * ops.sigmoid(x)


def tilted(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> Any:
    """A surrogate with a helper, a module-level number, annotations and one parameter."""
    x = (logp - old_logp) / WIDTH
    s = ops.sigmoid(x)
    return -advantage * logp + params[0] * bend(x), -advantage + params[0] * (s + x * s * (1.0 - s)) / WIDTH


SURROGATES = {
    "clip": Clip(0.2, 0.28, 1.5),
    "cispo": Cispo(1.2, 0.6),
    "reinforce": PolicyGradient(),
    "custom": Custom(tilted, (0.3,)),
}


def reference_surrogate(name: str, logp: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    r = (logp - old).exp()
    if name == "clip":
        return -torch.min(r.clamp(max=1.5) * advantage, r.clamp(1 - 0.2, 1 + 0.28) * advantage)
    if name == "cispo":
        return -r.clamp(0.6, 1.2).detach() * advantage * logp
    if name == "reinforce":
        return -advantage * logp
    return -advantage * logp + 0.3 * torch.nn.functional.silu((logp - old) / 0.5)


KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - d - 1,
}


def reference(name: str, logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform) -> SimpleNamespace:
    """Losses, log-probs, entropies and d sum(losses) / d logits in float64; rows not read are left out."""
    n, V = rows.targets.numel(), logits.shape[-1]
    live = torch.ones(n, dtype=torch.bool) if rows.read is None else rows.read
    x = logits.reshape(n, V)[live].double().requires_grad_()
    inv = transform.inv_temperature
    inv = inv[live].double()[:, None] if isinstance(inv, Tensor) else inv
    z = x * transform.scale
    if transform.softcap:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    z = z * inv
    lse = z.logsumexp(1)
    logps = z.gather(1, rows.targets[live][:, None])[:, 0] - lse
    p = (z - lse[:, None]).exp()
    entropy = lse - (p * torch.where(z.isfinite(), z, 0.0)).sum(1)

    def vector(v: Tensor | None) -> Tensor | None:
        return None if v is None else v[live].double()

    old, ref, advantage = vector(rows.old_logps), vector(rows.ref_logps), vector(rows.advantages)
    losses = vector(rows.policy_weight) * reference_surrogate(name, logps, logps.detach() if old is None else old, advantage)
    if objective.beta:
        losses = losses + vector(rows.kl_weight) * KL[objective.kl](ref - logps)
    if objective.entropy_coef:
        losses = losses - vector(rows.entropy_weight) * entropy
    d_logps, d_entropy = torch.autograd.grad(losses.sum(), (logps, entropy), retain_graph=True, allow_unused=True)
    (gradient,) = torch.autograd.grad(losses.sum(), x)
    slope = torch.zeros_like(d_logps) if d_entropy is None else d_entropy.abs() * (1 + entropy)
    steepness = abs(transform.scale) * (inv[:, 0] if isinstance(inv, Tensor) else inv)

    def spread(v: Tensor) -> Tensor:
        full = torch.zeros(n, *v.shape[1:], dtype=torch.float64)
        full[live] = v.detach()
        return full

    return SimpleNamespace(
        losses=spread(losses), logps=spread(logps), entropy=spread(entropy), gradient=spread(gradient),
        size=spread((d_logps.abs() + slope + 0.1) * steepness), live=live,
    )  # fmt: skip


def rounding(dtype: torch.dtype) -> float:
    """Relative error of a store: half a unit in the last place, but the interpreter truncates bf16."""
    return torch.finfo(dtype).eps * (1.0 if dtype == torch.bfloat16 and INTERPRETED else 0.51)


def close(got: Tensor, want: Tensor, tolerance: Tensor | float, what: str) -> None:
    error = (got.double() - want).abs()
    bad = ~(error <= tolerance)
    assert not bad.any(), f"{what}: off by {error[bad].max():.3g} at {bad.nonzero()[0].tolist()}"


def check(name: str, logits: Tensor, rows: TokenRows, objective: Objective, transform: RowTransform, out_dtype=None) -> Tensor:
    """fused against the reference and against stats + token_stage + pull; returns the gradient."""
    n, V = rows.targets.numel(), logits.shape[-1]
    before = logits.clone()
    want = reference(name, logits, rows, objective, transform)
    dtype = out_dtype or logits.dtype
    outs = [torch.full(logits.shape, math.nan, dtype=dtype) for _ in range(2)]
    fused = backend.fused(logits, rows, objective, transform, outs[0])
    visits = two_visits(backend, logits, rows, objective, transform, outs[1], 4)
    assert torch.equal(logits, before) or logits.isnan().any()
    # The rounding of the store, and fp32 arithmetic relative to the row's slopes.
    tiny = 2.0**-24 if dtype == torch.float16 else 0.0
    size = want.size[:, None]
    for got, out in ((fused, outs[0]), (visits, outs[1])):
        close(got.logps, want.logps, 4e-6 + 2e-7 * want.logps.abs(), "logps")
        close(got.entropy, want.entropy, 4e-6, "entropy")
        close(got.losses, want.losses, 4e-6 * (1 + want.losses.abs() + want.size), "losses")
        stored = rounding(dtype) * want.gradient.abs() + tiny
        close(out.reshape(n, V), want.gradient, stored + 6e-6 * size, "gradient")
        note("log-probs", (got.logps - want.logps).abs() / (1 + want.logps.abs()))
        note("entropies", (got.entropy - want.entropy).abs())
        beyond = (out.reshape(n, V).double() - want.gradient).abs() - stored
        note("gradients", beyond[want.live] / size[want.live])
    assert want.gradient[want.live].abs().amax(1).gt(1e-3).any()  # the comparison is not 0 against 0
    return outs[0]


FULL = Objective(SURROGATES["clip"], beta=0.04, entropy_coef=0.05)


def make_rows(
    n: int, V: int, seed: int, objective: Objective = FULL, old: bool = True, read: Tensor | None = None, extra: bool = False
) -> TokenRows:
    """Rows as `objective` weighs them; `extra`: with log-probs of a sampler and weights of an NLL."""
    g = torch.Generator().manual_seed(seed)
    keep = torch.ones(n) if read is None else read.float()

    def normal() -> Tensor:
        return torch.randn(n, generator=g)

    def weight(coef: float) -> Tensor | None:
        return coef * torch.rand(n, generator=g) * keep if coef else None

    base = -math.log(V) + 0.3 * normal()  # random logits give log-probs around -log V, so ratios fall on both sides of a clip
    return TokenRows(
        targets=torch.randint(0, V, (n,), generator=g), read=read, advantages=normal() * keep,
        policy_weight=torch.rand(n, generator=g) * keep,
        old_logps=base * keep if old else None, ref_logps=(base + 0.3 * normal()) * keep,
        kl_weight=weight(objective.beta), entropy_weight=weight(objective.entropy_coef), trained=read,
        sampler_logps=(base + 0.1 * normal()) * keep if extra else None,
        nll_weight=normal().relu() * keep if extra else None,
    )  # fmt: skip


def make_logits(n: int, V: int, dtype: torch.dtype, seed: int = 0, std: float = 0.5) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(1, n, V, generator=g) * std).to(dtype)


VOCABULARIES = (7, 1000, 1031, 4099)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Each case in one dtype; in the other with -m slow.
IN_BOTH_DTYPES = pytest.mark.parametrize("swapped", (False, pytest.param(True, marks=pytest.mark.slow)))

#: Every objective has one of the dtypes; the whole product is for -m slow.
PRODUCT = [
    pytest.param(
        i, *objective, dtype, id="-".join(str(x).removeprefix("torch.") for x in (*objective, dtype)),
        marks=[] if i % 3 == j else [pytest.mark.slow],
    )
    for i, objective in enumerate(itertools.product(SURROGATES, (None, "k1", "k2", "k3"), (0.0, 0.05)))
    for j, dtype in enumerate(DTYPES)
]  # fmt: skip


@pytest.mark.parametrize("case, name, kl, coefficient, dtype", PRODUCT)
def test_every_objective(case: int, name: str, kl: str | None, coefficient: float, dtype: torch.dtype) -> None:
    V = VOCABULARIES[(case + case // 4) % 4]
    read = None if case % 5 else torch.tensor([True, False, True, True, False, True])
    objective = Objective(SURROGATES[name], beta=0.04 if kl else 0.0, kl=kl or "k3", entropy_coef=coefficient)
    rows = make_rows(6, V, case, objective, read=read)
    logits = torch.full((2, 4, V), math.nan, dtype=dtype)
    logits[:, :-1] = make_logits(6, V, dtype, case).view(2, 3, V)
    check(name, logits[:, :-1], rows, objective, PLAIN)


FAMILY = {
    **{name: objective for name, objective in PRESETS.items() if objective.one_pass and objective.exact is None},
    **{f"{e}, {w}": Objective(beta=0.3, kl=Kl(e, w)) for e in ESTIMATORS for w in WEIGHTINGS if e != "distillation"},
    **{f"{kind} from the sampler": Objective(filters=(TrustRegion(kind, 0.02, 0.01, "sampler"),)) for kind in TRUST_REGIONS},
    "k3+": Objective(beta=0.3, kl="k3+"),
    "clamped k3": Objective(beta=0.3, kl=Kl("k3", "ratio", clamp_log=0.4, clamp=0.05)),
    "bounded ratio": Objective(log_ratio_bounds=(-0.2, 0.3)),
    "bounded ratio, detached": Objective(Cispo(), log_ratio_bounds=(-0.2, 0.3)),
    "entropy floor and bonus": Objective(entropy_coef=0.1, filters=(EntropyFloor(6.8),)),
}


@pytest.mark.parametrize("name", FAMILY)
def test_the_family_compiles_to_what_torch_runs(name: str) -> None:
    """The formulas are tested against the oracle under torch; here the fused kernel, compiled from the same source."""
    objective, V = FAMILY[name], 1031
    rows = make_rows(6, V, 12, objective, extra=True)
    logits = make_logits(6, V, torch.float32, seed=3)
    outs = [torch.full_like(logits, math.nan) for _ in range(2)]
    fused = backend.fused(logits, rows, objective, PLAIN, outs[0])
    visits = two_visits(backend, logits, rows, objective, PLAIN, outs[1], 8)
    for got, want in ((fused.losses, visits.losses), (outs[0], outs[1])):
        scale = want.abs().max()
        assert scale > 1e-3 and (got - want).abs().max() <= 3e-6 * scale


@IN_BOTH_DTYPES
@pytest.mark.parametrize("V", (7, 1031, 20000))
@pytest.mark.parametrize("transform", [(0.7, 0.0, 1.4), (-1.3, 0.0, 0.8), (2.0, 3.0, 1.0), (-1.5, 2.0, 1.7)], ids=str)
def test_transforms(transform: tuple[float, float, float], V: int, swapped: bool) -> None:
    scale, softcap, inverse = transform
    rows = make_rows(3, V, 1)
    dtype = torch.bfloat16 if ((V > 7) == (inverse > 1.0)) != swapped else torch.float32
    logits = make_logits(3, V, dtype)
    check("clip", logits, rows, FULL, RowTransform(scale, softcap, inverse))
    check("clip", logits, rows, FULL, RowTransform(scale, softcap, inverse * torch.tensor([0.3, 1.0, 1.7])))


CHOICES = {
    "one access": Choice(32, 1),
    "an end of two tiles, one kept": Choice(32, 2, ends=2, kept=1, hints=True),
    "an end of three, all kept": Choice(64, 4, ends=3, kept=3),
    "rows in turn": Choice(32, 2, ends=2, kept=2, grid=0.5),
    "copied ahead": Choice(64, 2, ends=2, kept=1, stages=3),
}


#: Each choice in two of the dtypes; in the third with -m slow.
CHOICES_AND_DTYPES = [
    pytest.param(choice, dtype, id=f"{choice}-{dtype}", marks=[pytest.mark.slow] if (i + j) % 3 == 0 else [])
    for i, choice in enumerate(CHOICES)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize("tiles, columns", [(5, -117), (2, 0), (0, 7), (0, 257), (0, 1031)])
@pytest.mark.parametrize("choice, dtype", CHOICES_AND_DTYPES)
def test_every_choice_gives_the_same_rows(
    choice: str, dtype: torch.dtype, tiles: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of many tiles, of as many as are loaded at once, and of one; whatever lies before the first 16-byte boundary."""
    for kind in LAUNCH:
        monkeypatch.setitem(LAUNCH, kind, CHOICES[choice])
    V = tiles * CHOICES[choice].threads * CHOICES[choice].accesses * (16 // dtype.itemsize) + columns
    n = 5 if CHOICES[choice].grid else 3
    logits, rows = make_logits(n, V, dtype, V), make_rows(n, V, V)
    peeled = check("clip", logits, rows, FULL, RowTransform(1.3, 0.0, 0.7))
    wider = torch.full((1, n, V + 3), 3.0, dtype=dtype)  # no boundary is where the logits' is
    backend.fused(logits, rows, FULL, RowTransform(1.3, 0.0, 0.7), wider[..., :V])
    assert (wider[..., V:] == 3.0).all()
    if V % 16:  # else threads take other columns, and sums have another order
        assert torch.equal(wider[..., :V], peeled)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies nothing ahead")
@pytest.mark.parametrize("V", (8192, 8191))
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_that_are_copied_ahead_change_no_bit(dtype: torch.dtype, V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows, found = make_logits(2, V, dtype, 4), make_rows(2, V, 3), []
    for stages in (1, 3):
        for kind in LAUNCH:
            monkeypatch.setitem(LAUNCH, kind, Choice(64, 2, ends=2, kept=1, stages=stages))
        assert choose("fused", V, (logits, logits), 0).flags["STAGES"] == stages
        own, out = logits.clone(), logits.clone()
        fused = backend.fused(own, rows, FULL, PLAIN, own)
        stats = backend.stats(logits, rows.targets, None, PLAIN, WITH_ENTROPY)
        backend.pull(out, rows.targets, stats, slopes_of(stats, rows.advantages, rows.advantages), PLAIN, out)
        found.append((own, out, stats.values, *fused[:3]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_which_unaligned_gradients_go_by_16_bytes() -> None:
    """Where each row of them lies as far behind a 16-byte boundary as its logits; values: the test above, and other lengths."""
    V, columns = 1031, 4
    logits, rows = torch.empty(3, 4, V), make_rows(2, V, 1)
    beside = torch.empty(3, 4, V + 4 * columns)[..., 3 * columns : 3 * columns + V]
    for of, out, peeled in (
        (logits, logits, True),
        (logits, beside, True),  # rows further apart by whole accesses
        (logits[:1, :2], torch.empty(1, 2, V), True),  # the stride over one sequence is none
        (logits[:, :1], torch.empty(3, 8, V)[:, :1], True),  # sequences of one token, 4 rows apart and 8
        (logits[:, :2], torch.empty(3, 2, V), False),  # the second sequence begins elsewhere
        (logits, torch.empty(3, 4, V + 1)[..., 1:], False),
        (logits, torch.empty(3, 4, V + 1)[..., :V], False),
    ):
        assert choose("visit", V, (of, out), 0).flags["PEELED"] is peeled, (of.stride(), out.stride())
    logits = make_logits(2, V, torch.float32)
    backend.fused(logits, rows, FULL, PLAIN, beside[:1, :2])
    assert torch.equal(beside[:1, :2], check("clip", logits, rows, FULL, PLAIN))


@pytest.mark.parametrize("into", DTYPES, ids=str)
@pytest.mark.parametrize("of", DTYPES, ids=str)
@pytest.mark.parametrize("V", (1031, 1027, 1024))
def test_what_is_promised_of_addresses_holds(V: int, of: torch.dtype, into: torch.dtype) -> None:
    """By `multiple_of`. Where it does not hold, an access is made that no GPU allows, as the executor reports."""
    check("clip", make_logits(4, V, of), make_rows(4, V, 1), FULL, PLAIN, into)


@pytest.mark.parametrize("V", (1031, 20003))
def test_a_row_has_the_same_bits_wherever_it_lies(V: int) -> None:
    """Unaligned rows start at every distance from a 16-byte boundary."""
    rows, logits = make_rows(1, V, 3), make_logits(1, V, torch.bfloat16, 4)
    results = []
    for at in range(9):
        memory = torch.full((V + 16,), 2.0, dtype=torch.bfloat16)
        place = memory[at : at + V].view(1, 1, V)
        place.copy_(logits)
        found = backend.fused(place, rows, FULL, PLAIN, place)
        assert (memory[:at] == 2.0).all() and (memory[at + V :] == 2.0).all()
        results.append((*found[:3], place))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("transform", (PLAIN, RowTransform(-2.0, 0.0, 0.7)), ids=str)
def test_rows_far_from_zero(transform: RowTransform, dtype: torch.dtype) -> None:
    """Neighbouring numbers are then further apart than any exponent reaches. Rows filled with the smallest number are common:
    a mask of the vocabulary, or a row of padding."""
    V, top = 1031, 1.0 if transform.scale > 0 else -1.0
    logits = make_logits(7, V, dtype)
    lowest = torch.finfo(dtype).min
    logits[0, 0] = lowest
    logits[0, 1] = -lowest
    logits[0, 2, ::2] = lowest
    logits[0, 3, :1000] = lowest * top  # the first tiles; the rest is ordinary
    logits[0, 4] = -3e12 * top
    logits[0, 4, 5:9] = 4e12 * top
    logits[0, 5] = -(2.0**29) * 1.25
    logits[0, 6] += 2.0**20
    rows = replace(
        make_rows(7, V, 4, Objective()), advantages=-torch.ones(7), policy_weight=torch.ones(7), old_logps=torch.zeros(7)
    )  # fmt: skip
    rows.targets.copy_(torch.tensor([3, 5, 8 if top < 0 else 7, 1030, 6, 2, 9]))
    z = logits[0].double() * (transform.scale * transform.inv_temperature)
    want = (z - z.amax(1, keepdim=True)).log_softmax(1)  # else float64 itself has no digits left
    out = torch.full_like(logits, math.nan)
    found = backend.fused(logits, rows, Objective(PolicyGradient()), transform, out)
    close(found.logps, want.gather(1, rows.targets[:, None])[:, 0], 4e-6, "logps")
    close(found.entropy, -(want.exp() * want).sum(1), 4e-6, "entropy")
    chosen = torch.nn.functional.one_hot(rows.targets, V).double()
    slope = (chosen - want.exp()) * (transform.scale * transform.inv_temperature)
    close(out[0], slope, rounding(dtype) * slope.abs() + 4e-6, "gradient")


@pytest.mark.parametrize("shift", (-1e4, 1e4))
def test_shifted_logits(shift: float) -> None:
    check("clip", make_logits(4, 1031, torch.float32) + shift, make_rows(4, 1031, 2), FULL, PLAIN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", (0.99, 0.9999))
def test_the_targets_gradient_is_right_where_p_is_near_1(dtype: torch.dtype, p: float) -> None:
    n, V = 3, 1031
    rows = replace(
        make_rows(n, V, 3, Objective()),
        advantages=torch.full((n,), -1.0),
        old_logps=torch.zeros(n),
        policy_weight=torch.ones(n),
    )
    logits = make_logits(n, V, dtype, std=0.01)
    logits[0, torch.arange(n), rows.targets] = math.log(p / (1 - p) * V)
    objective = Objective(PolicyGradient())
    want = reference("reinforce", logits, rows, objective, PLAIN).gradient.gather(1, rows.targets[:, None])
    assert (want < 2 * (1 - p)).all() and (want > (1 - p) / 2).all()
    out = torch.empty_like(logits)
    backend.fused(logits, rows, objective, PLAIN, out)
    got = out[0].double().gather(1, rows.targets[:, None])
    # The sum, 1 / p, is fp32: a few roundings of 1, of 6e-8 each.
    close(got, want, rounding(dtype) * want + 1e-6, "target gradient")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("transform", (PLAIN, RowTransform(1.5, 0.0, 0.7)), ids=str)
def test_logits_of_minus_infinity(transform: RowTransform, dtype: torch.dtype) -> None:
    rows = make_rows(5, 4099, 4)
    logits = make_logits(5, 4099, dtype)
    logits[0, :, :2048] = -math.inf
    logits[0, 1::2, ::3] = -math.inf
    logits[0, 3, 1:] = -math.inf  # one survivor
    rows.targets.copy_(torch.tensor([4098, 3001, 2050, 0, 2053]))
    logits[0, torch.arange(5), rows.targets] = 0.25
    check("clip", logits, rows, FULL, transform)

    logits[0, 2] = -math.inf
    stats = backend.stats(logits, rows.targets, None, transform, WITH_ENTROPY)
    assert stats.max[2] == -math.inf and stats.logps[2].isnan() and stats.entropy[2].isnan()
    fused = backend.fused(logits, rows, FULL, transform, None)
    assert fused.logps[2].isnan() and fused.entropy[2].isnan()
    assert fused.logps[[0, 1, 3, 4]].isfinite().all()


def test_nan_and_wild_targets_are_seen_in_rows_that_are_read() -> None:
    V = 1031
    logits = make_logits(5, V, torch.float32)
    logits[0, 0, 17] = math.nan
    logits[0, 4, 5] = math.inf
    rows = make_rows(5, V, 5)
    rows.targets[1], rows.targets[2] = V, -1
    fused = backend.fused(logits, rows, FULL, PLAIN, None)
    assert fused.logps[[0, 1, 2, 4]].isnan().all() and fused.logps[3].isfinite()
    assert fused.entropy[[0, 4]].isnan().all() and fused.losses[[0, 1, 2, 4]].isnan().all()
    stats = backend.stats(logits, rows.targets, None, PLAIN, WITH_ENTROPY)
    assert torch.equal(stats.logps.isnan(), fused.logps.isnan())


@pytest.mark.parametrize("inplace", (False, True))
def test_rows_that_are_not_read_are_zero_whatever_they_hold(inplace: bool) -> None:
    V = 1031
    read = torch.tensor([True, False, False, True, False, False])
    rows = make_rows(6, V, 6, read=read)
    clean = make_logits(6, V, torch.bfloat16)
    transform = RowTransform(1.0, 0.0, torch.tensor([0.8, math.nan, 0.0, 1.2, math.inf, 1.0]))
    bad = clean.clone()
    bad[0, 1], bad[0, 2], bad[0, 4] = math.nan, math.inf, -math.inf
    names = ("advantages", "old_logps", "ref_logps", "policy_weight", "kl_weight", "entropy_weight")
    poison = {name: getattr(rows, name).clone() for name in names}
    for value in poison.values():
        value[~read] = math.nan
    targets = rows.targets.clone()
    targets[~read] = torch.tensor([-100, V, 2**31, 2**62])
    out = [torch.full_like(clean, math.nan), bad if inplace else torch.full_like(clean, math.nan)]
    want = backend.fused(clean, rows, FULL, transform, out[0])
    got = backend.fused(bad, replace(rows, targets=targets, **poison), FULL, transform, out[1])
    for a, b in zip((*want[:3], out[0][0]), (*got[:3], out[1][0]), strict=True):
        assert torch.equal(a, b) and (b[~read] == 0).all() and (b[read] != 0).any()
    stats = backend.stats(bad, targets, read, transform, WITH_ENTROPY)
    assert (stats.logps[~read] == 0).all() and (stats.entropy[~read] == 0).all() and (stats.sum[~read] == 1).all()


def test_rows_without_a_slope_are_not_read_again() -> None:
    n, V = 4, 1031
    rows = make_rows(n, V, 7)
    logits = make_logits(n, V, torch.float32)
    stats = backend.stats(logits, rows.targets, None, PLAIN, WITH_ENTROPY)
    logits[0, 1], logits[0, 2] = math.nan, math.nan
    d_logps, d_entropy = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 1.0])
    for slopes, zero in ((d_entropy, [1, 2]), (None, [1, 2, 3])):
        out = torch.full_like(logits, math.nan)
        backend.pull(logits, rows.targets, stats, slopes_of(stats, d_logps, slopes), PLAIN, out)
        assert (out[0, zero] == 0).all() and out.isfinite().all() and out[0, 0].abs().sum() > 0.5
    out = torch.full_like(logits, math.nan)
    plain = replace(make_rows(n, V, 7, Objective()), advantages=d_logps)
    backend.fused(make_logits(n, V, torch.float32), plain, Objective(), PLAIN, out)
    assert (out[0, 1:] == 0).all() and (out[0, 0] != 0).all()


@pytest.mark.parametrize("name", ("clip", "cispo", "custom"))
def test_on_policy_is_a_ratio_of_1_with_its_gradient(name: str) -> None:
    rows = make_rows(4, 1000, 8, old=False)
    logits = make_logits(4, 1000, torch.float32)
    check(name, logits, rows, Objective(SURROGATES[name], beta=0.1, entropy_coef=0.05), PLAIN)


@pytest.mark.parametrize("V", (1000, 1031))
def test_where_the_gradient_goes(V: int) -> None:
    rows = make_rows(4, V, 9)
    logits = make_logits(4, V, torch.bfloat16)
    out = torch.full_like(logits, math.nan)
    want = backend.fused(logits, rows, FULL, PLAIN, out)
    without = backend.fused(logits, rows, FULL, PLAIN, None)
    own = logits.clone()
    inplace = backend.fused(own, rows, FULL, PLAIN, own)
    assert torch.equal(own, out)
    for a, b, c in zip(want[:3], without[:3], inplace[:3], strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    check("clip", logits.float(), rows, FULL, PLAIN, torch.bfloat16)

    padded = torch.full((1, 4, V + 24), 3.0, dtype=torch.bfloat16)  # a wider buffer: what is beside the rows stays
    backend.fused(logits, rows, FULL, PLAIN, padded[..., :V])
    assert torch.equal(padded[..., :V], out) and (padded[..., V:] == 3.0).all()

    stats = backend.stats(own.copy_(logits), rows.targets, None, PLAIN, WITH_ENTROPY)
    _, d_logps, d_entropy = FULL.token_stage(stats.logps, stats.entropy, rows)
    apart = torch.full_like(out, math.nan)
    backend.pull(own, rows.targets, stats, slopes_of(stats, d_logps, d_entropy), PLAIN, apart)
    backend.pull(own, rows.targets, stats, slopes_of(stats, d_logps, d_entropy), PLAIN, own)
    assert torch.equal(own, apart)


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows = make_rows(6, 1031, 10)
    logits = make_logits(6, 1031, torch.float32)
    out = torch.empty_like(logits)
    whole = backend.fused(logits, rows, FULL, PLAIN, out)
    alone = torch.empty_like(logits[:, :1])
    for i in (0, 3, 5):
        part = backend.fused(logits[:, i : i + 1], rows[i : i + 1], FULL, PLAIN, alone)
        assert torch.equal(alone[0, 0], out[0, i]) and all(
            torch.equal(a[i], b[0]) for a, b in zip(whole[:3], part[:3], strict=True)
        )


def test_a_range_of_rows() -> None:
    logits = make_logits(6, 1000, torch.float32).view(2, 3, 1000)
    rows, lo, hi = make_rows(6, 1000, 11), 1, 5
    whole = backend.stats(logits, rows.targets, None, PLAIN, WITH_ENTROPY)
    part = backend.stats(logits, rows.targets[lo:hi], None, PLAIN, WITH_ENTROPY, rows=(lo, hi))
    assert torch.equal(whole.at(slice(lo, hi)).values, part.values)
    assert backend.stats(logits, rows.targets, None, PLAIN, LOGPS).get("weighted") is None
    outs = [torch.full_like(logits, math.nan) for _ in range(2)]
    backend.pull(logits, rows.targets, whole, slopes_of(whole, rows.advantages), PLAIN, outs[0])
    backend.pull(logits, rows.targets[lo:hi], part, slopes_of(part, rows.advantages[lo:hi]), PLAIN, outs[1], rows=(lo, hi))
    flat = [out.view(6, -1) for out in outs]
    assert torch.equal(flat[0][lo:hi], flat[1][lo:hi]) and flat[1][[0, 5]].isnan().all() and flat[0].isfinite().all()


def test_no_rows() -> None:
    logits = torch.empty(2, 0, 1000)
    rows = make_rows(0, 1000, 0)
    found = backend.fused(logits, rows, FULL, PLAIN, torch.empty_like(logits))
    assert all(x.shape == (0,) for x in found[:3]) and found.divergence is None
    stats = backend.stats(logits, rows.targets, None, PLAIN, WITH_ENTROPY)
    backend.pull(logits, rows.targets, stats, slopes_of(stats, rows.advantages), PLAIN, torch.empty_like(logits))
    backend.scale_(logits, torch.tensor(2.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(dtype: torch.dtype) -> None:
    for shape in ((1000,), (3, 1031), (2, 3, 40000)):
        x = make_logits(1, math.prod(shape), dtype).view(shape)
        for factor in (1.0, 0.3, -2.0, 0.0):
            got = x.clone()
            backend.scale_(got, torch.tensor(factor))
            want = x.double() * factor
            close(got, want, 0.0 if factor == 1.0 else rounding(dtype) * want.abs() + 2.0**-24, "scaled")
    base = make_logits(8, 1031, dtype).view(2, 4, 1031)
    got = base.clone()
    backend.scale_(got[:, :-1], torch.tensor(0.5))
    assert torch.equal(got[:, :-1], base[:, :-1] * 0.5) and torch.equal(got[:, -1], base[:, -1])


def test_formulas_that_cannot_be_compiled_are_refused() -> None:
    width = 0.5

    def closure(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> Any:
        return -advantage * logp * width, -advantage * width

    def module(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> Any:
        return -advantage * torch.exp(logp), -advantage * torch.exp(logp)

    class Callable_:
        def __call__(self, logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> Any:
            return -advantage * logp, -advantage

    scope: dict[str, Any] = {}
    exec("def typed(logp, old_logp, advantage, params):\n    return -advantage * logp, -advantage", scope)
    for function, word in (
        (closure, "width"),
        (module, "torch"),
        (lambda logp, old_logp, advantage, params: (logp, 1.0), "lambda"),
        (Callable_(), "Callable_"),
        (scope["typed"], "source"),
    ):
        with pytest.raises(ValueError, match=word):
            backend.fused(
                make_logits(1, 7, torch.float32), make_rows(1, 7, 0, Objective()), Objective(Custom(function)), PLAIN, None
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_hidden_states_rows_of_several_blocks(dtype: torch.dtype) -> None:
    """Rows longer than a tile: a gradient that overtook its logits in shared memory would show."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 16, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(9000, 16, generator=g).to(dtype).requires_grad_()
    batch = TokenBatch(torch.randint(9000, (6,), generator=g), torch.randn(6, generator=g))

    def gradients(name: str) -> tuple[Tensor, ...]:
        loss = linear_grpo_loss(hidden, weight, batch, Objective.preset("dapo"), backend=name).loss
        return torch.autograd.grad(loss, (hidden, weight))

    for ours, plain in zip(gradients("triton"), gradients("eager"), strict=True):
        assert (ours.float() - plain.float()).norm() <= (1e-6 if dtype == torch.float32 else 4e-3) * plain.float().norm()


@pytest.mark.parametrize("transform", (PLAIN, RowTransform(-0.5, 3.0, 0.7), RowTransform(-1.0, 0.0, 1.3)), ids=str)
@IN_BOTH_DTYPES
@pytest.mark.parametrize("V", (5, 257, 1031))
def test_sum_of_squares_and_largest_probability(V: int, transform: RowTransform, swapped: bool) -> None:
    """All statistics, and the gradient of all slopes at once, beside eager PyTorch's; a row is not read."""
    dtype = torch.bfloat16 if ((V > 257) == (transform.softcap == 0.0)) != swapped else torch.float32
    logits, n = make_logits(4, V, dtype), 4
    targets = torch.tensor([0, V - 1, V // 2, 1])
    read = torch.tensor([True, True, False, True])
    ours = backend.stats(logits, targets, read, transform, EVERYTHING)
    theirs = eager.stats(logits, targets, read, transform, EVERYTHING)
    assert torch.equal(ours.top_id, theirs.top_id) and ours.top_id[2] == -1
    torch.testing.assert_close(ours.values[:5], theirs.values[:5], rtol=3e-6, atol=2e-6)
    slopes = slopes_of(theirs, *(torch.randn(3, n, generator=torch.Generator().manual_seed(V)) * read))
    outs = [torch.full(logits.shape, torch.nan) for _ in range(2)]
    for module, stats, out in ((backend, ours, outs[0]), (eager, theirs, outs[1])):
        module.pull(logits, targets, stats, slopes, transform, out)
    torch.testing.assert_close(outs[0], outs[1], rtol=2e-5, atol=2e-6)
    assert not outs[0].view(n, V)[2].any() and outs[0].abs().max() > 1e-2
