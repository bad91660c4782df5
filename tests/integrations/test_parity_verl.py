"""Parity with verl 0.9.1: its policy-loss registry, aggregation, KL penalties, corrections and advantages, on a CPU.

Loss and slope (d loss / d logp) of verl's own functions and of ours are each compared with `reference`, float64 in plain
Python, written from the formulas (../shared/peers.md names their papers): a factor that verl and we share would show.

    pip install --no-deps verl==0.9.1 && pip install ray tensordict omegaconf hydra-core codetiming orjson pylatexenc
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.trainers import Data

pytest.importorskip("verl", minversion="0.9.0", exc_type=ImportError)  # before, returns were other ones

import numpy as np
import verl
from tensordict import NonTensorData, TensorDict
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from grpo_kernels import Objective, TokenBatch, group_advantages, grpo_loss
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.formulas.surrogates import Cispo, Clip, ClipCov, Dro, Gmpo, KlCov, PolicyGradient, Sapo
from grpo_kernels.rewards.advantages import NUMERICS, gpg_scale, greedy_baseline_advantages, pass_at_k_advantages
from grpo_kernels.rewards.corrections import importance_weights, rejection_mask
from grpo_kernels.rewards.returns import WHITENING, discounted_returns, gae, optimal_token_advantages, whiten

Tensor = torch.Tensor

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

#: verl's name -> our presets that have its numbers with nothing but the aggregation, which is verl's `loss_agg_mode`, passed.
ENTRIES = {
    "vanilla": ("grpo", "ppo", "dr_grpo"),
    "gspo": ("gspo", "gspo_token"),
    "gpg": ("reinforce",),
    "clip_cov": ("clip_cov",),
    "kl_cov": ("kl_cov",),
    "geo_mean": ("gmpo",),
    "cispo": ("cispo",),
    "sapo": ("sapo",),
    "dppo_tv": ("dppo_tv",),
    "dppo_kl": ("dppo_kl",),
    "dro": ("dro",),
}
#: These aggregate in their own way, whatever the mode is: that of the preset.
OWN_MODE = dict.fromkeys(("sapo", "geo_mean"), "seq-mean-token-mean")
if tuple(map(int, verl.__version__.split(".")[:3])) < (0, 9, 1):
    OWN_MODE["gspo"] = "seq-mean-token-mean"
CLAMPED = ("vanilla", "cispo", "sapo", "dppo_tv", "dppo_kl")

B, T = 8, 12


@dataclass(frozen=True)
class Constants:
    """In verl's words, with verl's defaults; DRO has none, hence the one of our preset."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 2e-4
    ppo_kl_coef: float = 0.1
    dro_beta: float = 1.0


DEFAULTS = Constants()
OTHERS = Constants(0.13, 0.28, 1.6, 0.9, 1.3, 0.1, 0.4, 2.5, 0.15, 0.7, 0.3)
POLICY_LOSS = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")


@pytest.fixture(scope="module")
def data() -> Data:
    """Sequences of unequal length, one without tokens, one with a hole, one with advantage 0, one with both signs; ratios on
    both sides of the clip range, for tokens and for whole sequences."""
    g = torch.Generator().manual_seed(7)
    mask = torch.arange(T) < torch.tensor([12, 5, 9, 7, 12, 1, 8, 10])[:, None]
    mask[3] = False
    mask[4, 3:5] = False
    logps = -0.02 - 4 * torch.rand(B, T, generator=g).square()
    shift = torch.tensor([0.3, -0.35, -0.24, 0.1, 0.5, 0.2, 0.05, 0.1])[:, None]
    old = (logps - shift - 0.25 * torch.randn(B, T, generator=g)).clamp(max=-0.01)
    ref = logps + 0.4 * torch.randn(B, T, generator=g)
    advantages = torch.tensor([1.2, 0.8, -0.7, 0.9, -1.1, 0.6, 0.0, -0.4])[:, None] * (1 + 0.2 * torch.randn(B, T, generator=g))
    advantages[7, ::3] *= -1
    weights = torch.exp(0.4 * torch.randn(B, T, generator=g)).clamp(max=1.5)
    weights[weights < 0.45] = 0.0
    return Data(logps, old, ref, advantages, mask=mask, weights=weights)


@dataclass(frozen=True, eq=False)
class Result:
    loss: float
    slopes: Tensor  # [B, T]
    metrics: dict[str, float]


# ---- verl


def config_of(c: Constants, info: dict[str, Any], **options: Any) -> Any:
    numbers = {name: getattr(c, name) for name in Constants.__dataclass_fields__}
    policy_loss = {name: numbers.pop(name) for name in POLICY_LOSS}
    for name in ("loss_mode", "rollout_correction"):
        if name in options:
            policy_loss[name] = options.pop(name)
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=4, policy_loss=PolicyLossConfig(**policy_loss),
        global_batch_info=dict(info), **numbers, **options,
    )  # fmt: skip


def verls(name: str, data: Data, mode: str, config: Any, weights: Tensor | None = None) -> Result:
    logps = data.logps.clone().requires_grad_()
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=data.old, log_prob=logps, advantages=data.advantages, response_mask=data.mask, loss_agg_mode=mode,
        config=config, rollout_is_weights=weights,
    )  # fmt: skip
    return Result(float(loss.detach()), torch.autograd.grad(loss, logps)[0], metrics)


# ---- ours


def aggregate(mode: str, loss_scale_factor: int | None = None) -> dict[str, Any]:
    if mode == "seq-mean-token-sum-norm":
        return {"aggregate": "constant", "max_tokens": loss_scale_factor or T}
    return {"aggregate": mode}


def surrogate(name: str, c: Constants) -> dict[str, Any]:
    low, high = c.clip_ratio_low, c.clip_ratio_high
    trust = Objective.preset(name, numerics="verl").filters if name.startswith("dppo") else ()
    return {
        "vanilla": {"surrogate": Clip(low, high, delta=c.clip_ratio_c)},
        "gspo": {"surrogate": Clip(low, high)},
        "gpg": {"surrogate": PolicyGradient()},
        "clip_cov": {"surrogate": ClipCov(low, high, c.clip_cov_ratio, c.clip_cov_lb, c.clip_cov_ub)},
        "kl_cov": {"surrogate": KlCov(c.ppo_kl_coef, c.kl_cov_ratio)},
        "geo_mean": {"surrogate": Gmpo(low, high)},
        "cispo": {"surrogate": Cispo(cap=1 + high, low=1 - low)},
        "sapo": {"surrogate": Sapo(c.tau_pos, c.tau_neg)},
        "dppo_tv": {"surrogate": Cispo(c.clip_ratio_c), "filters": tuple(replace(f, low=low, high=high) for f in trust)},
        "dppo_kl": {"surrogate": Cispo(c.clip_ratio_c), "filters": tuple(replace(f, low=low, high=high) for f in trust)},
        "dro": {"surrogate": Dro(c.dro_beta)},
    }[name]


def objective_of(name: str, preset: str, mode: str, c: Constants, **changes: Any) -> Objective:
    changes |= aggregate(mode)
    if name in OWN_MODE:
        del changes["aggregate"]
    if c != DEFAULTS:
        changes |= surrogate(name, c)
    return Objective.preset(preset, numerics="verl", **changes)


def batch_of(data: Data, weights: Tensor | None = None, **fields: Any) -> TokenBatch:
    """What is masked is NaN: for us it does not exist."""

    def hidden(x: Tensor) -> Tensor:
        return torch.where(data.mask, x, math.nan)

    targets = fields.pop("targets", torch.zeros(data.mask.shape, dtype=torch.int64))
    weights = None if weights is None else hidden(weights)
    return TokenBatch(targets, hidden(data.advantages), mask=data.mask, old_logps=hidden(data.old), weights=weights, **fields)


def ours(
    objective: Objective, data: Data, weights: Tensor | None = None, normalizer: float | None = None, **fields: Any
) -> Result:
    batch = batch_of(data, weights, **fields)
    rows = objective.token_rows(batch, normalizer)
    logps = torch.where(data.mask, data.logps, 0.0).reshape(-1)
    losses, slopes, _ = objective.token_stage(logps, None, rows, batch)
    return Result(float(losses.sum(dtype=torch.float64)), slopes.view(data.mask.shape), {})


def as_sequence_weights(name: str, data: Data, weights: Tensor | None) -> Tensor | None:
    """verl's geo_mean takes the geometric mean of a sequence's weights + 1e-10; we are given that."""
    if weights is None or name != "geo_mean":
        return weights
    logs = torch.where(data.mask, (weights + 1e-10).log(), 0.0)
    mean = logs.sum(1, keepdim=True) / data.mask.sum(1, keepdim=True).clamp(min=1)
    return mean.exp().expand_as(weights)


# ---- the reference, float64


@dataclass(frozen=True, eq=False)
class Reference:
    loss: float
    slopes: Tensor
    scale: float  # sum of the sizes of all terms: what a rounding error of the loss is relative to
    unit: Tensor  # likewise of each slope
    inactive: float  # share of trained tokens without a slope, those of advantage 0 apart


def term(name: str, x: float, logp: float, old: float, A: float, c: Constants) -> tuple[float, float]:
    """(loss, slope) of a token with log-ratio x, before clamps."""
    limit = (-20.0, 20.0) if name in CLAMPED else (-math.inf, 10.0 if name == "gspo" else math.inf)
    inside = limit[0] <= x <= limit[1]
    r = math.exp(min(max(x, limit[0]), limit[1]))
    low, high = 1 - c.clip_ratio_low, 1 + c.clip_ratio_high
    if name == "gpg":
        return -A * logp, -A
    if name == "dro":
        return -(A * logp - c.dro_beta / 2 * x * x), -A + c.dro_beta * x
    if name == "cispo":
        w = min(max(r, low), high)
        return -w * A * logp, -w * A
    if name in ("dppo_tv", "dppo_kl"):
        p, q = math.exp(logp), math.exp(old)
        if name == "dppo_tv":
            keep = p - q <= c.clip_ratio_high if A > 0 else p - q >= -c.clip_ratio_low
        else:
            moved = q * (old - logp) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
            keep = not (A > 0 and moved > c.clip_ratio_high and p > q) and not (A < 0 and moved > c.clip_ratio_low and p < q)
        w = min(r, c.clip_ratio_c) * keep
        return -w * A * logp, -w * A
    if name == "sapo":
        tau = c.tau_pos if A > 0 else c.tau_neg
        s = 1 / (1 + math.exp(-tau * (r - 1)))
        return -4 / tau * s * A, -4 * s * (1 - s) * r * A * inside
    if name == "kl_cov":
        return -r * A, -r * A
    assert name in ("vanilla", "gspo", "clip_cov")
    loss = max(-r * A, -min(max(r, low), high) * A)
    active = inside and not (A > 0 and r > high) and not (A < 0 and r < low)
    if name == "vanilla" and A < 0 and loss > -c.clip_ratio_c * A:
        return -c.clip_ratio_c * A, 0.0
    return loss, -A * r * active


def selected(name: str, tokens: list[tuple[float, float, float]], c: Constants) -> set[int]:
    """Of (logp, old, A) tokens: those that Clip-Cov takes when lots fall in order, and those that KL-Cov takes."""
    n = len(tokens)
    mean_logp, mean_a = math.fsum(t[0] for t in tokens) / n, math.fsum(t[2] for t in tokens) / n
    cov = [(A - mean_a) * (logp - mean_logp) for logp, _, A in tokens]
    if name == "kl_cov":
        return set(sorted(range(n), key=lambda i: -cov[i])[: max(1, int(n * c.kl_cov_ratio))])
    eligible = []
    for i, (logp, old, A) in enumerate(tokens):
        r = math.exp(logp - old)
        clipped = (A > 0 and r > 1 + c.clip_ratio_high) or (A < 0 and r < 1 - c.clip_ratio_low)
        if c.clip_cov_lb < cov[i] < c.clip_cov_ub and not clipped:
            eligible.append(i)
    return set(eligible[: max(int(c.clip_cov_ratio * n), 1)])


def denominator(mode: str, mask: Tensor, info: dict[str, Any]) -> float:
    """Of a sum over tokens (of means over sequences, for seq-mean-token-mean)."""
    dp = info.get("dp_size", 1)
    if mode == "token-sum":
        return 1 / dp
    if mode == "token-mean":
        return float(info.get("batch_num_tokens") or mask.sum()) / dp
    sequences = float(info.get("global_batch_size") or mask.any(1).sum()) / dp
    return sequences * (info.get("loss_scale_factor") or mask.shape[1]) if mode.endswith("norm") else sequences


def reference(
    name: str, data: Data, mode: str, c: Constants = DEFAULTS, weights: Tensor | None = None, info: dict[str, Any] | None = None
) -> Reference:
    mode = OWN_MODE.get(name, mode)
    D = float(B) if name == "geo_mean" else denominator(mode, data.mask, info or {})
    logps, olds, advantages = (x.double().tolist() for x in (data.logps, data.old, data.advantages))
    w = torch.ones(B, T).tolist() if weights is None else weights.double().tolist()
    at = [[t for t in range(T) if data.mask[b, t]] for b in range(B)]
    place = {token: i for i, token in enumerate((b, t) for b in range(B) for t in at[b])}
    taken: set[int] = set()
    if name in ("clip_cov", "kl_cov"):
        taken = selected(name, [(logps[b][t], olds[b][t], advantages[b][t]) for b, t in place], c)
    losses, slopes, unit = [], torch.zeros(B, T, dtype=torch.float64), torch.zeros(B, T, dtype=torch.float64)
    for b in range(B):
        n = len(at[b])
        if n == 0:
            continue
        own = {t: logps[b][t] - olds[b][t] for t in at[b]}
        if name == "geo_mean":
            bounded, free = {}, {}
            for t, x in own.items():
                A, low, high = advantages[b][t], -c.clip_ratio_low, c.clip_ratio_high
                free[t] = not (A > 0 and x > high) and not (A < 0 and x < low)
                bounded[t] = 0.0 if A == 0 else x if free[t] else high if A > 0 else low
            R = math.exp(math.fsum(bounded.values()) / n)
            A = math.fsum(advantages[b][t] for t in at[b]) / n
            losses.append(-A * R * w[b][at[b][0]] / D)
            for t in at[b]:
                slopes[b, t] = -A * R * w[b][t] * free[t] / n / D
                unit[b, t] = R * w[b][t] / n / D
            continue
        mean = math.fsum(own.values()) / n
        share = 1 / D / (n if mode == "seq-mean-token-mean" else 1)
        for t in at[b]:
            A = advantages[b][t]
            loss, slope = term(name, mean if name == "gspo" else own[t], logps[b][t], olds[b][t], A, c)
            if place[b, t] in taken:
                if name == "clip_cov":
                    loss, slope = 0.0, 0.0
                else:
                    loss, slope = loss + c.ppo_kl_coef * abs(own[t]), slope + math.copysign(c.ppo_kl_coef, own[t])
            losses.append(loss * w[b][t] * share)
            slopes[b, t] = slope * w[b][t] * share
            unit[b, t] = (1 + abs(A)) * share
    live = data.mask & (data.advantages != 0) & (torch.tensor(w) != 0)
    inactive = float((slopes[live] == 0).float().mean())
    return Reference(math.fsum(losses), slopes, math.fsum(map(abs, losses)), unit, inactive)


def assert_same(got: Result, want: Reference, what: object, rtol: float = 1e-5) -> None:
    assert abs(got.loss - want.loss) <= rtol * want.scale, f"{what}: loss {got.loss}, not {want.loss}"
    error = (got.slopes.double() - want.slopes).abs()
    beyond = error - rtol * want.slopes.abs() - 1e-6 * want.unit
    assert float(beyond.max()) <= 0, f"{what}: a slope is off by {float(error.max())} of {float(want.slopes.abs().max())}"


def different(a: Reference, b: Reference, share: float = 0.01) -> bool:
    return float((a.slopes - b.slopes).abs().max()) > share * float(b.slopes.abs().max())


# ---- policy losses


def test_these_are_all_policy_losses_of_verl() -> None:
    """One that a new verl adds is noticed here. Ours are there too where this package is installed, by its entry point."""
    theirs = {name for name in core_algos.POLICY_LOSS_REGISTRY if not name.startswith("fused_")}
    assert theirs == {*ENTRIES, "bypass_mode"}
    defaults = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=4)
    for name in Constants.__dataclass_fields__:
        theirs = getattr(defaults.policy_loss if name in POLICY_LOSS else defaults, name)
        assert theirs == (None if name == "dro_beta" else getattr(DEFAULTS, name)), name


#: Of a whole step of which this is a micro-batch on one of two ranks.
STEP = {"dp_size": 2, "batch_num_tokens": 173, "global_batch_size": 19, "loss_scale_factor": 20}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_policy_loss(data: Data, name: str, lots_in_order: None) -> None:
    """x aggregation x with and without importance weights x verl's constants and others x alone and as a part of a step."""
    for mode in MODES:
        for weights in (None, data.weights):
            for c in (DEFAULTS, OTHERS):
                for info in ({}, STEP):
                    what = (name, mode, weights is not None, c, info)
                    mine = as_sequence_weights(name, data, weights)
                    want = reference(name, data, mode, c, mine, info)
                    assert_same(verls(name, data, mode, config_of(c, info), weights), want, ("verl", *what))
                    D = denominator(OWN_MODE.get(name, mode), data.mask, info) if info else None
                    if name == "geo_mean":
                        D = None  # verl's takes no part in a step's denominators
                    for preset in ENTRIES[name]:
                        objective = objective_of(name, preset, mode, c)
                        assert_same(ours(objective, data, mine, D), want, ("ours", preset, *what))


def test_default_aggregations(data: Data) -> None:
    """Presets by themselves: verl's default mode, token-mean, and for Dr. GRPO and GSPO the one that verl's recipes name."""
    for name, presets in ENTRIES.items():
        for preset in presets:
            named = {"dr_grpo": "seq-mean-token-sum-norm", "gspo": "seq-mean-token-mean", "gspo_token": "seq-mean-token-mean"}
            if name in ("clip_cov", "kl_cov"):
                continue  # see test_covariances
            changes = {"max_tokens": T} if preset == "dr_grpo" else {}
            objective = Objective.preset(preset, numerics="verl", **changes)
            assert_same(ours(objective, data), reference(name, data, named.get(preset, "token-mean")), preset)
    higher = replace(DEFAULTS, clip_ratio_high=0.28)
    assert_same(ours(Objective.preset("dapo", numerics="verl"), data), reference("vanilla", data, "token-mean", higher), "dapo")


def test_the_grid_is_not_trivial(data: Data) -> None:
    """Clipping and masks act on a good share of the tokens; entries, modes, weights and constants all make a difference."""
    for name in ("vanilla", "gspo", "geo_mean"):
        assert 0.15 < reference(name, data, "token-mean").inactive < 0.6, name
    for name in ("dppo_tv", "dppo_kl"):
        assert 0.04 < reference(name, data, "token-mean").inactive < 0.6, name
    assert different(reference("clip_cov", data, "token-mean"), reference("clip_cov", data, "token-mean", OTHERS))
    x, A = (data.logps - data.old)[data.mask], data.advantages[data.mask]
    assert ((x > math.log(1.6)) & (A < 0)).any() and ((x > math.log(1.2)) & (A > 0)).sum() > 5
    assert ((x < math.log(0.8)) & (A < 0)).sum() >= 4
    for name in ENTRIES:
        base = reference(name, data, "token-mean")
        assert base.scale > 0.1 and different(reference(name, data, "token-mean", weights=data.weights), base), name
        if name != "gpg":
            assert different(reference(name, data, "token-mean", OTHERS), base), name
        for mode in MODES:
            if mode != "token-mean" and name not in OWN_MODE:
                assert different(reference(name, data, mode), base), (name, mode)
    results = [reference(name, data, "seq-mean-token-mean") for name in ENTRIES]
    assert all(different(a, b, 1e-3) for i, a in enumerate(results) for b in results[:i])


@pytest.mark.parametrize("name", [*CLAMPED, "gspo"])
def test_beyond_the_clamps(data: Data, name: str) -> None:
    """Log-ratios beyond +-20 (GSPO: means beyond 10) have the value at the bound, and no slope through it."""
    old = data.old.clone()
    old[0, :6] = data.logps[0, :6] - torch.tensor([21.0, -21.0, 19.0, -19.0, 40.0, -60.0])
    old[4, :3] = data.logps[4, :3] - torch.tensor([25.0, 19.5, -30.0])
    old[1], old[2] = data.logps[1] - 11.0, data.logps[2] - 30.0
    far = replace(data, old=old.clamp(max=-1e-3))
    c = replace(DEFAULTS, clip_ratio_c=1e9)  # else A < 0 hides them
    for case in (far, replace(far, advantages=-far.advantages)):
        want = reference(name, case, "token-mean", c)
        assert torch.isfinite(want.slopes).all() and want.scale > 0.1
        assert_same(verls(name, case, "token-mean", config_of(c, {})), want, "verl")
        objective = objective_of(name, ENTRIES[name][0], "token-mean", c)
        assert_same(ours(objective, case), want, "ours")
        unbounded = replace(objective, log_ratio_bounds=None)
        if name in ("vanilla", "gspo") and case is not far:
            assert abs(ours(unbounded, case).loss - want.loss) > 0.1 * want.scale  # the clamp is what made it so


def test_covariances(data: Data) -> None:
    """Clip-Cov's lots fall as they may: as many tokens as in verl, all from the band, none of them clipped."""
    c = replace(OTHERS, clip_cov_ratio=0.06)
    objective = objective_of("clip_cov", "clip_cov", "token-sum", c)
    plain = reference("vanilla", data, "token-sum", replace(c, clip_ratio_c=1e9))
    tokens = int(data.mask.sum())
    candidates = selected("clip_cov", list(zip(*(x[data.mask].tolist() for x in (data.logps, data.old, data.advantages)), strict=True)),
                          replace(c, clip_cov_ratio=1.0))  # fmt: skip
    places = data.mask.nonzero().tolist()
    seen = set()
    for seed in range(8):
        for side in ("verl", "ours"):
            torch.manual_seed(seed)
            got = verls("clip_cov", data, "token-sum", config_of(c, {})) if side == "verl" else ours(objective, data)
            taken = ((got.slopes == 0) & (plain.slopes != 0)).nonzero().tolist()
            assert len(taken) == int(c.clip_cov_ratio * tokens) < len(candidates), side
            assert all(places.index(at) in candidates for at in taken), side
            if side == "ours":
                seen.add(tuple(map(tuple, taken)))
    assert len(seen) > 1
    few = reference("kl_cov", data, "token-mean")
    assert_same(ours(Objective.preset("kl_cov", numerics="verl"), data), few, "one token is the least")
    assert different(few, reference("kl_cov", data, "token-mean", replace(DEFAULTS, ppo_kl_coef=0.0)), 1e-3)


def test_all_masked(data: Data) -> None:
    """verl's defect: a token mean over nothing is 0/0. Ours is 0, as verl is when told the step's tokens."""
    nothing = replace(data, mask=torch.zeros_like(data.mask))
    assert math.isnan(verls("vanilla", nothing, "token-mean", config_of(DEFAULTS, {})).loss)
    objective = Objective.preset("grpo", numerics="verl")
    for got in (ours(objective, nothing), verls("vanilla", nothing, "token-mean", config_of(DEFAULTS, STEP))):
        assert got.loss == 0 and not got.slopes.any()


# ---- bypass mode: the ratio is against the sampler, which verl hands over as old_log_prob


CORRECTIONS: dict[str, dict[str, Any]] = {
    "clip": {"rollout_is": None},
    "clip, weights for metrics only": {"rollout_is": "token"},
    "clip, rejection": {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4"},
    "reinforce": {"loss_type": "reinforce", "rollout_is": None},
    "reinforce, token": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.2},
    "reinforce, icepop": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": "0.8_1.3"},
    "reinforce, sequence": {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "reinforce, normalised": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True},
    "reinforce, normalised sequences": {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "reinforce, rejection": {
        "loss_type": "reinforce", "rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.7_1.4",
    },
}  # fmt: skip


def our_weights(batch: TokenBatch, options: dict[str, Any]) -> Tensor | None:
    level, threshold = options["rollout_is"], options.get("rollout_is_threshold", 2.0)
    if level is None:
        return None
    low, high = (float(x) for x in threshold.split("_")) if isinstance(threshold, str) else (0.0, threshold)
    mode = "mask" if isinstance(threshold, str) else "truncate"
    return importance_weights(
        batch, level=level, mode=mode, low=low, high=high, normalize=options.get("rollout_is_batch_normalize", False)
    )


def our_rejection(batch: TokenBatch, options: dict[str, Any]) -> Tensor:
    kept = batch.mask
    for option, bound in zip(
        (options.get("rollout_rs") or "").split(","), str(options.get("rollout_rs_threshold")).split(","), strict=True
    ):
        if option:
            over, metric = option.removeprefix("seq_").split("_")
            bounds = [float(x) for x in bound.split("_")]
            if metric == "k1":
                low, high = math.log(bounds[0]), math.log(bounds[1])
            else:
                low, high = -math.inf, bounds[0]
            kept = kept & (rejection_mask(batch, metric=metric, over=over, low=low, high=high) != 0)
    return kept


@pytest.mark.parametrize("what", CORRECTIONS)
def test_bypass_mode(data: Data, what: str) -> None:
    options = CORRECTIONS[what]
    clip = options.get("loss_type") is None
    config = config_of(DEFAULTS, {}, rollout_correction=RolloutCorrectionConfig(bypass_mode=True, **options))
    # verl's weights are of the policy against the sampler, taken anew in each micro-batch.
    batch = replace(batch_of(data), old_logps=data.logps, sampler_logps=data.old)
    kept = our_rejection(batch, options)
    left = replace(data, mask=kept)
    weights = None if clip else our_weights(batch, options)
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        want = reference("vanilla" if clip else "gpg", left, mode, weights=weights)
        # What it is given as importance weights is ignored.
        assert_same(verls("bypass_mode", data, mode, config, data.weights), want, "verl")
        preset = "grpo" if clip else "reinforce"
        assert_same(ours(Objective.preset(preset, numerics="verl", aggregate=mode), left, weights), want, "ours")
        if what in ("reinforce, token", "reinforce, sequence"):  # in one visit of the logits, without weights
            cap, level = options["rollout_is_threshold"], "token" if what.endswith("token") else "sequence-sum"
            capped = Objective.preset("reinforce", numerics="verl", surrogate=Cispo(cap), level=level, aggregate=mode)
            assert_same(ours(capped, data), want, "as CISPO")
        assert ("rejection" in what) == (int(kept.sum()) < int(data.mask.sum()))
        if weights is not None:
            assert different(want, reference("gpg", left, mode))


REJECTIONS = {
    "token_k1": "0.85_1.2", "token_k2": "0.02", "token_k3": "0.02", "seq_sum_k1": "0.3_3", "seq_sum_k2": "0.2",
    "seq_sum_k3": "0.2", "seq_mean_k1": "0.85_1.2", "seq_mean_k2": "0.03", "seq_mean_k3": "0.03", "seq_max_k2": "0.07",
    "seq_max_k3": "0.07", "token_k1,seq_mean_k3": "0.85_1.2,0.03",
}  # fmt: skip


@pytest.mark.parametrize("rejection", REJECTIONS)
def test_rollout_correction(data: Data, rejection: str) -> None:
    """Decoupled mode: weights and rejection of the old policy against the sampler, before the step."""
    shift = torch.tensor([0.0, 0.08, -0.09, 0.0, 0.35, -0.02, 0.15, -0.3])[:, None]
    sampler = data.old + shift + 0.25 * (data.logps - data.ref)
    batch = replace(batch_of(data), sampler_logps=sampler)
    for level in ("token", "sequence"):
        for threshold in (1.15, "0.8_1.2"):
            for normalised in (False, True):
                options = {
                    "rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalised,
                    "rollout_rs": rejection, "rollout_rs_threshold": REJECTIONS[rejection],
                }  # fmt: skip
                proto, kept, _ = compute_rollout_correction_and_rejection_mask(
                    old_log_prob=data.old, rollout_log_prob=sampler, response_mask=data.mask.float(), **options
                )
                ours_kept = our_rejection(batch, options)
                assert (kept.bool() == ours_kept).all() and 0 < int(ours_kept.sum()) < int(data.mask.sum())
                weights = our_weights(batch, options)
                torch.testing.assert_close(proto.batch["rollout_is_weights"], weights, rtol=1e-5, atol=1e-6)
                assert (weights[data.mask] != 1).any()


# ---- KL


VERL_KL = Objective.preset("grpo", numerics="verl").kl
PENALTIES = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": VERL_KL, "k3": VERL_KL,
    "kl+": "k1+", "k1+": "k1+", "abs+": "abs+", "k2+": "k2+", "mse+": "k2",
    "low_var_kl+": replace(VERL_KL, straight_through=True), "k3+": replace(VERL_KL, straight_through=True),
}  # fmt: skip


def kl_reference(name: str, d: float) -> tuple[float, float]:
    """(value, slope), d = ref - logp."""
    base = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name.rstrip("+"), name.rstrip("+"))
    if base == "k3":
        bounded = min(max(d, -20.0), 20.0)
        value = math.exp(bounded) - bounded - 1
        slope = 1 - math.exp(bounded) if abs(d) <= 20 and value <= 10 else 0.0
        value = min(value, 10.0)
    else:
        value = {"k1": -d, "abs": abs(d), "k2": d * d / 2}[base]
        slope = {"k1": 1.0, "abs": -float(np.sign(d)), "k2": -d}[base]
    return value, -d if name.endswith("+") else slope


@pytest.mark.parametrize("name", PENALTIES)
def test_kl_penalty(name: str) -> None:
    """Value and gradient of each estimator, on both sides of its clamps and at 0, and at their bounds."""
    d = torch.cat(
        [torch.linspace(-3, 3, 41), torch.tensor([0.0, 2.6, 2.62, -10.9, -11.1, 19.9, 20.1, -19.9, -20.1, 30.0, -70.0])]
    )
    logps = torch.full_like(d, -5.0).requires_grad_()
    ref = -5.0 + d
    theirs = core_algos.kl_penalty(logps, ref, name)
    (their_slopes,) = torch.autograd.grad(theirs.sum(), logps)
    n = len(d)
    batch = TokenBatch(torch.zeros(n, dtype=torch.int64), torch.zeros(n), old_logps=logps.detach() + 0.1, ref_logps=ref)
    objective = Objective.preset("grpo", numerics="verl", beta=0.5, kl=PENALTIES[name], aggregate="token-sum")
    losses, slopes, _ = objective.token_stage(logps.detach(), None, objective.token_rows(batch), batch)
    want = torch.tensor([kl_reference(name, x) for x in (ref - logps).double().tolist()], dtype=torch.float64)
    for got, at in ((theirs.detach(), 0), (their_slopes, 1), (losses / 0.5, 0), (slopes / 0.5, 1)):
        torch.testing.assert_close(got.double(), want[:, at], rtol=1e-5, atol=1e-6)


def test_kl_defaults() -> None:
    """What verl's actor has by default, when its KL loss is on."""
    assert ActorConfig.__dataclass_fields__["kl_loss_type"].default == "low_var_kl"
    assert VERL_KL == Kl("k3", clamp_log=20.0, clamp=10.0) and Objective.preset("grpo", numerics="verl").beta == 0


# ---- the whole actor loss, from logits


VOCAB, PROMPT = 11, 3


def actor_loss(name: str, mode: str, logits: Tensor, ids: Tensor, data: Data, weights: Tensor | None, **options: Any) -> Any:
    """verl's `ppo_loss`, which hands policy loss, entropy bonus and KL their inputs as the trainer does."""
    log_p = torch.log_softmax(logits, -1)

    def packed(x: Tensor) -> Tensor:  # of prompt and response, the value of a token at the one before it
        return torch.cat([torch.nn.functional.pad(row, (PROMPT - 1, 1)) for row in x])

    output = {"log_probs": packed(log_p.gather(2, ids[..., None])[..., 0]), "entropy": packed(-(log_p.exp() * log_p).sum(-1))}
    fields = {
        "prompts": torch.ones(B, PROMPT, dtype=torch.int64), "responses": ids,
        "attention_mask": torch.ones(B, PROMPT + T, dtype=torch.int64), "response_mask": data.mask.long(),
        "old_log_probs": data.old, "advantages": data.advantages, "ref_log_prob": data.ref,
    }  # fmt: skip
    if weights is not None:
        fields["rollout_is_weights"] = weights
    whole = TensorDict(fields, batch_size=[B])
    for key, value in {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}.items():
        whole.set_non_tensor(key, value) if value is not None else whole.set(key, NonTensorData(None, batch_size=[B]))
    return ppo_loss(config_of(DEFAULTS, {}, loss_mode=name, loss_agg_mode=mode, **options), output, whole)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_actor_loss_from_logits(data: Data, name: str, lots_in_order: None) -> None:
    """Policy term, entropy bonus and KL together through `grpo_loss`, in gradient with respect to the logits; and verl's clip
    fractions. The reference's gradient is its slopes pushed through a float64 log-softmax."""
    g = torch.Generator().manual_seed(11)
    base = 1.2 * torch.randn(B, T, VOCAB, generator=g)
    ids = torch.randint(VOCAB, (B, T), generator=g)
    logps = torch.log_softmax(base, -1).gather(2, ids[..., None])[..., 0]
    moved = data.old - data.logps
    case = replace(data, logps=logps, old=(logps + moved).clamp(max=-0.005), ref=logps + (data.ref - data.logps))
    modes = (OWN_MODE.get(name), "seq-mean-token-mean") if name in OWN_MODE else MODES
    for i, mode in enumerate(dict.fromkeys(modes)):
        coef, beta = 0.03, 0.2
        weights = data.weights if i % 2 else None
        mine = as_sequence_weights(name, case, weights)

        logits = base.clone().requires_grad_()
        theirs, metrics = actor_loss(
            name, mode, logits, ids, case, weights, entropy_coeff=coef, use_kl_loss=True, kl_loss_coef=beta
        )
        (their_gradient,) = torch.autograd.grad(theirs, logits)

        logits = base.clone().requires_grad_()
        # verl's GMPO has a plain mean over sequences, and its KL and bonus the mode of the actor.
        count = {"count_empty": False, "kl_aggregate": mode, "entropy_aggregate": mode} if name == "geo_mean" else {}
        objective = objective_of(name, ENTRIES[name][0], mode, DEFAULTS, beta=beta, entropy_coef=coef, **count)
        fields = {"targets": ids, "ref_logps": torch.where(case.mask, case.ref, math.nan)}
        out = grpo_loss(logits, batch_of(case, mine, **fields), objective, normalizer=float(B) if name == "geo_mean" else None)
        (gradient,) = torch.autograd.grad(out.loss, logits)

        exact = base.double().requires_grad_()
        log_p = torch.log_softmax(exact, -1)
        exact_logps = log_p.gather(2, ids[..., None])[..., 0]
        policy = reference(name, case, mode, weights=mine)
        d = (case.ref.double() - exact_logps)[case.mask]
        H = -(log_p.exp() * log_p).sum(-1)
        D = denominator(mode, case.mask, {})
        share = case.mask.double() / D / (case.mask.sum(1, keepdim=True).clamp(min=1) if mode == "seq-mean-token-mean" else 1)
        rest = (beta * (d.exp() - d - 1) * share[case.mask]).sum() - coef * (share * H).sum()
        (want,) = torch.autograd.grad((policy.slopes * exact_logps).sum() + rest, exact)
        want_loss = policy.loss + float(rest.detach())
        for side, loss, got in (("verl", theirs, their_gradient), ("ours", out.loss, gradient)):
            assert abs(float(loss.detach()) - want_loss) <= 1e-5 * (policy.scale + abs(float(rest.detach()))), (side, mode)
            assert float((got.double() - want).abs().max()) <= 1e-5 * float(want.abs().max()), (side, mode)
        if name in ("vanilla", "gspo"):
            clipped = float(out.metrics["clip_low"] + out.metrics["clip_high"])
            assert clipped == pytest.approx(metrics["actor/pg_clipfrac"].aggregate(), abs=1e-6) and clipped > 0.1
        assert float(out.metrics["entropy"]) == pytest.approx(float(H[case.mask].mean().detach()), rel=1e-5)
        assert float(out.metrics["kl"]) == pytest.approx(float((d.exp() - d - 1).mean().detach()), rel=1e-5)


# ---- advantages


def per_token(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x[:, None], 0.0)


Estimator = Callable[[Tensor, Tensor], Tensor]
OPTIONS = NUMERICS["verl"]
INDEX = torch.tensor([0, 0, 1, 0, 1, 2, 1, 3, 0, 3])  # one of them alone
MASK = torch.arange(6) < torch.tensor([6, 3, 5, 2, 6, 4, 1, 6, 4, 3])[:, None]

#: Of rewards [B] and the group ids: verl's name, options and our way to write it. In the mask's sequences of MASK.
OUTCOMES: dict[str, tuple[str, dict[str, Any], Estimator]] = {
    "grpo": ("grpo", {}, lambda r, i: per_token(group_advantages(r, groups=i, **OPTIONS), MASK)),
    "grpo, not scaled": ("grpo", {"norm_adv_by_std_in_grpo": False}, lambda r, i: per_token(
        group_advantages(r, groups=i, **OPTIONS | {"scale": "none"}), MASK)),
    "grpo_vectorized": ("grpo_vectorized", {}, lambda r, i: per_token(group_advantages(r, groups=i, **OPTIONS), MASK)),
    "grpo_vectorized, not scaled": ("grpo_vectorized", {"norm_adv_by_std_in_grpo": False}, lambda r, i: per_token(
        group_advantages(r, groups=i, **OPTIONS | {"scale": "none"}), MASK)),
    "rloo": ("rloo", {}, lambda r, i: per_token(
        group_advantages(r, groups=i, **OPTIONS | {"baseline": "leave-one-out", "scale": "none"}), MASK)),
    "rloo_vectorized": ("rloo_vectorized", {}, lambda r, i: per_token(
        group_advantages(r, groups=i, baseline="leave-one-out", scale="none"), MASK)),
    "opo": ("opo", {}, lambda r, i: per_token(group_advantages(
        r, groups=i, **OPTIONS | {"baseline": "length", "scale": "none", "lengths": MASK.sum(1)}), MASK)),
    "gpg": ("gpg", {}, lambda r, i: per_token(
        gpg_scale(r) * group_advantages(r, groups=i, **OPTIONS | {"scale": "none"}), MASK)),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}, lambda r, i: whiten(
        per_token(group_advantages(r, groups=i, **OPTIONS | {"scale": "none"}), MASK), MASK, **WHITENING["verl"])),
    "gdpo of one reward": ("gdpo", {}, lambda r, i: whiten(
        per_token(group_advantages(r, groups=i, **OPTIONS), MASK), MASK, **WHITENING["verl"])),
}  # fmt: skip


def theirs_of(name: str, rewards: Tensor, index: Tensor, mask: Tensor = MASK, **options: Any) -> Tensor:
    """verl's estimator; rewards [B] lie on the last token of a completion, as its reward managers put them."""
    if rewards.dim() == 1:
        last = mask.sum(1) - 1
        rewards = torch.zeros(mask.shape).scatter(1, last[:, None], rewards[:, None])
    estimator = core_algos.get_adv_estimator_fn(name)
    return estimator(token_level_rewards=rewards, response_mask=mask.float(), index=np.array(index.tolist()), **options)[0]


@pytest.fixture(scope="module")
def rewards() -> Tensor:
    return torch.tensor([1.0, 0.2, 0.7, -0.4, 0.1, 0.9, 0.5, 0.0, 0.3, 0.8])


@pytest.mark.parametrize("what", OUTCOMES)
def test_outcome_advantages(rewards: Tensor, what: str) -> None:
    name, options, mine = OUTCOMES[what]
    got, want = mine(rewards, INDEX), theirs_of(name, rewards, INDEX, **options)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6)
    assert len(want.unique()) > 6


def test_known_advantages() -> None:
    """Absolute numbers, so that a shared mistake would show: rewards 1, 0, 0 of a group; mean 1/3, std sqrt(1/3)."""
    r, i, mask = torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.int64), torch.ones(3, 2, dtype=torch.bool)
    scale = math.sqrt(1 / 3) + 1e-6
    for got in (group_advantages(r, groups=i, **OPTIONS), theirs_of("grpo", r, i, mask)[:, 0]):
        assert got.tolist() == pytest.approx([2 / 3 / scale, -1 / 3 / scale, -1 / 3 / scale], rel=1e-6)
    loo = group_advantages(r, groups=i, **OPTIONS | {"baseline": "leave-one-out", "scale": "none"})
    for got in (loo, theirs_of("rloo", r, i, mask)[:, 0]):
        assert got.tolist() == pytest.approx([1.0, -0.5, -0.5], rel=1e-6)


def test_equal_rewards() -> None:
    """verl's defect: the mean of ten times 0.7 is not 0.7 in fp32, and the rest is divided by 1e-6. Ours is 0."""
    r, i, mask = torch.full((10,), 0.7), torch.zeros(10, dtype=torch.int64), torch.ones(10, 2, dtype=torch.bool)
    assert not group_advantages(r, groups=i, **OPTIONS).any()
    assert float(theirs_of("grpo", r, i, mask).abs().max()) > 0.01


def test_a_completion_alone_in_its_group(rewards: Tensor) -> None:
    """verl: the raw reward over 1 + eps (scaled by nothing in RLOO, but 0 in its vectorised form). See OUTCOMES for ours."""
    alone = int((INDEX == 2).nonzero())
    assert float(theirs_of("grpo", rewards, INDEX)[alone, 0]) == pytest.approx(0.9 / (1 + 1e-6))
    assert float(theirs_of("rloo", rewards, INDEX)[alone, 0]) == pytest.approx(0.9)
    assert float(theirs_of("rloo_vectorized", rewards, INDEX)[alone, 0]) == 0


def test_pass_at_k(rewards: Tensor) -> None:
    index = torch.where(INDEX == 2, 1, INDEX)  # verl refuses a group of one
    for scaled in (True, False):
        config = {"norm_adv_by_std_in_grpo": scaled}
        want = theirs_of("grpo_passk", rewards, index, config=config)
        got = pass_at_k_advantages(rewards, groups=index, scale="group" if scaled else "none")
        torch.testing.assert_close(per_token(got, MASK), want, rtol=1e-5, atol=1e-7)
        assert int((want[:, 0] != 0).sum()) == 3
    with pytest.raises(ValueError, match="at least 2"):
        theirs_of("grpo_passk", rewards, INDEX, config=config)


def test_gdpo(rewards: Tensor) -> None:
    """Two reward functions. verl's whitening over tokens weighs completions by their length; our `combine="gdpo"` (the
    paper's, TRL's) does not, so its parts are put together here."""
    other = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 1.0, 0.0])
    config = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [0.7, 0.4]}
    lengths = MASK.sum(1)
    batch = {"prompts": torch.ones(10, 2), "attention_mask": (torch.arange(8) < (2 + lengths)[:, None]).long()}
    want = theirs_of(
        "gdpo", rewards, INDEX, config=config, batch=batch, non_tensor_batch={"a": rewards.numpy(), "b": other.numpy()}
    )
    parts = [w * group_advantages(r, groups=INDEX, **OPTIONS) for w, r in ((0.7, rewards), (0.4, other))]
    torch.testing.assert_close(whiten(per_token(sum(parts), MASK), MASK, **WHITENING["verl"]), want, rtol=1e-5, atol=1e-6)


#: With a tool's tokens in the middle.
HOLED = MASK.clone()
HOLED[0, 2:4] = HOLED[4, 1] = False


@pytest.fixture(scope="module")
def token_rewards() -> Tensor:
    g = torch.Generator().manual_seed(5)
    return torch.where(HOLED, torch.randn(HOLED.shape, generator=g), 0.0)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(token_rewards: Tensor, gamma: float) -> None:
    want = theirs_of("reinforce_plus_plus", token_rewards, INDEX, HOLED, config=SimpleNamespace(gamma=gamma))
    got = whiten(discounted_returns(token_rewards, gamma=gamma, mask=HOLED), HOLED, **WHITENING["verl"])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_gae(token_rewards: Tensor) -> None:
    g = torch.Generator().manual_seed(6)
    values = torch.randn(HOLED.shape, generator=g)
    for gamma, lam in ((1.0, 0.95), (0.9, 0.8), (1.0, 1.0)):
        want, want_returns = core_algos.compute_gae_advantage_return(token_rewards, values, HOLED.float(), gamma, lam)
        advantages, returns = gae(token_rewards, values, gamma=gamma, lam=lam, mask=HOLED)
        torch.testing.assert_close(returns[HOLED], want_returns[HOLED], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(whiten(advantages, HOLED, **WHITENING["verl"])[HOLED], want[HOLED], rtol=1e-5, atol=1e-5)


def test_remax(rewards: Tensor) -> None:
    greedy = rewards.flip(0)
    want = theirs_of("remax", rewards, INDEX, reward_baselines=greedy)
    torch.testing.assert_close(per_token(greedy_baseline_advantages(rewards, greedy), MASK), want)


@pytest.mark.parametrize("name, mask", [("optimal_token_baseline", MASK), ("tir_optimal_token_baseline", HOLED)])
def test_optimal_token_baseline(token_rewards: Tensor, name: str, mask: Tensor) -> None:
    g = torch.Generator().manual_seed(8)
    logps = -2 * torch.rand(mask.shape, generator=g)
    squares = logps.exp() ** 2 + 0.1 * torch.rand(mask.shape, generator=g)
    for weights in (None, torch.rand(mask.shape, generator=g) + 0.5):
        want = theirs_of(
            name, token_rewards, INDEX, mask, old_log_probs=logps, sum_pi_squared=squares, rollout_is_weights=weights
        )
        got = optimal_token_advantages(token_rewards, logps, squares, groups=INDEX, weights=weights, mask=mask)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_these_are_all_estimators_of_verl() -> None:
    tested = {name for name, _, _ in OUTCOMES.values()}
    tested |= {"gae", "grpo_passk", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"}
    assert {str(getattr(name, "value", name)) for name in core_algos.ADV_ESTIMATOR_REGISTRY} == tested
