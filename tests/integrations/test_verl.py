"""verl: policy losses for its registry against float64, of a transcription and of verl 0.9.1 itself where that is installed; there
also its corrections, advantages, actor loss and fused forward, on a CPU.

    pip install --no-deps verl==0.9.1 && pip install ray tensordict omegaconf hydra-core codetiming orjson pylatexenc"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from grpo_kernels import Objective, TokenBatch, group_advantages, grpo_loss
from grpo_kernels.formulas.surrogates import Cispo
from grpo_kernels.integrations import verl as ours
from grpo_kernels.rewards.advantages import NUMERICS, gpg_scale, greedy_baseline_advantages, pass_at_k_advantages
from grpo_kernels.rewards.corrections import importance_weights, rejection_mask
from grpo_kernels.rewards.returns import WHITENING, discounted_returns, gae, optimal_token_advantages, whiten
from support.pairs import label, pairs
from support.trainers import Data, clipped, stand_in, value_and_gradient, without_trainers

parametrize = pytest.mark.parametrize


B, T = 8, 12
#: These aggregate in their own way, whatever the mode is.
OWN_MODE = dict.fromkeys(("sapo", "geo_mean"), "seq-mean-token-mean")
CLAMPED = ("vanilla", "cispo", "sapo", "dppo_tv", "dppo_kl")
#: verl's defaults, and others; DRO has none, hence the one of our preset.
CONSTANTS = {
    "defaults": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05, "clip_cov_ratio": 2e-4,
                 "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 2e-4, "ppo_kl_coef": 0.1, "dro_beta": 1.0},
    "others": {"clip_ratio_low": 0.13, "clip_ratio_high": 0.28, "clip_ratio_c": 1.6, "tau_pos": 0.9, "tau_neg": 1.3, "clip_cov_ratio": 0.1,
               "clip_cov_lb": 0.4, "clip_cov_ub": 2.5, "kl_cov_ratio": 0.15, "ppo_kl_coef": 0.7, "dro_beta": 0.3},
}  # fmt: skip
POLICY_LOSS = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
#: Of a whole step of which this is a micro-batch on one of two ranks.
STEP = {"dp_size": 2, "batch_num_tokens": 173, "global_batch_size": 19, "loss_scale_factor": 20}


def drawn(far=False):
    """Sequences of unequal length, one without tokens, one with a hole, one with advantage 0, one with both signs; ratios on
    both sides of the clip range, for tokens and for whole sequences, or beyond verl's clamps."""
    g = torch.Generator().manual_seed(7)
    mask = torch.arange(T) < torch.tensor([12, 5, 9, 0, 12, 1, 8, 10])[:, None]
    mask[4, 3:5] = False
    logps = -0.02 - 4 * torch.rand((B, T), generator=g).square()
    shift = torch.tensor([0.3, -0.35, -0.24, 0.1, 0.5, 0.2, 0.05, 0.1])[:, None]
    old = (logps - shift - 0.25 * torch.randn(B, T, generator=g)).clamp(max=-0.01)
    if far:
        old[0, :6] = logps[0, :6] - torch.tensor([21.0, -21.0, 19.0, -19.0, 40.0, -60.0])
        old[1], old[2] = logps[1] - 11.0, logps[2] - 30.0
    advantages = torch.tensor([1.2, 0.8, -0.7, 0.9, -1.1, 0.6, 0.0, -0.4])[:, None] * (1 + 0.2 * torch.randn(B, T, generator=g))
    advantages[7, ::3] *= -1
    weights = torch.exp(0.4 * torch.randn(B, T, generator=g)).clamp(max=1.5)
    weights[weights < 0.45] = 0.0
    return Data(logps, old, logps + 0.4 * torch.randn(B, T, generator=g), advantages, mask=mask, weights=weights)


@pytest.fixture
def data():
    return drawn()


# ---- a transcription of verl's losses, in the dtype of the log-probs


def aggregated(loss, mask, mode, info):
    dp, sequences = info.get("dp_size", 1), info.get("global_batch_size") or mask.any(1).sum()
    if mode == "token-mean":
        return (loss * mask).sum() / (info.get("batch_num_tokens") or mask.sum()) * dp
    if mode == "token-sum":
        return (loss * mask).sum() * dp
    rows = (loss * mask).sum(1)
    if mode == "seq-mean-token-mean":
        rows = rows / mask.sum(1).clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        rows = rows / (info.get("loss_scale_factor") or mask.shape[1])
    return rows.sum() / sequences * dp


def transcribed(name):
    def loss(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
    ):
        L, A, m, w, options = log_prob, advantages, response_mask.bool(), rollout_is_weights, config.policy_loss
        low, high, n = config.clip_ratio_low, config.clip_ratio_high, m.sum(1, keepdim=True).clamp(min=1)
        x = torch.where(m, L - old_log_prob, 0.0)
        x = x.clamp(-20, 20) if name in CLAMPED else x

        def mean(v):
            return torch.where(m, v, 0.0).sum() / (m.sum() + 1e-8)

        r, p, q = x.exp(), L.detach().exp(), old_log_prob.exp()
        cov = torch.where(m, (A - A[m].mean()) * (L - L[m].mean()).detach(), -math.inf)
        bounds = {"actor/pg_clipfrac": 0 * x, "actor/pg_clipfrac_lower": 0 * x, "actor/ppo_kl": -x}
        if name == "vanilla":
            value, above = clipped(r, A, low, high)
            dual = (value > -A * config.clip_ratio_c) & (A < 0)
            value = torch.where(dual, -A * config.clip_ratio_c, value)
            bounds |= {"actor/pg_clipfrac": above, "actor/pg_clipfrac_lower": dual}
        elif name == "gspo":
            mean_x = (x * m).sum(1, keepdim=True) / n
            value, bounds["actor/pg_clipfrac"] = clipped((L - L.detach() + mean_x.detach()).clamp(max=10).exp(), A, low, high)
        elif name == "gpg":
            value, bounds = -A * L, {}
        elif name == "clip_cov":
            value, above = clipped(r, A, low, high)
            band = ((cov > options.clip_cov_lb) & (cov < options.clip_cov_ub) & ~above).nonzero()
            taken = torch.zeros_like(m)
            taken[tuple(band[torch.randperm(len(band))[: max(int(options.clip_cov_ratio * int(m.sum())), 1)]].T)] = True
            value, bounds = torch.where(taken, 0.0, value), {"actor/pg_clipfrac": taken, "actor/ppo_kl": -x}
        elif name == "kl_cov":
            top = cov.flatten().topk(max(1, int(int(m.sum()) * options.kl_cov_ratio)))[1]
            value = -A * r + options.ppo_kl_coef * x.abs() * torch.zeros(B * T).scatter(0, top, 1.0).view(B, T)
            bounds = {"actor/ppo_kl": x.abs()}
        elif name == "geo_mean":
            bounded = torch.where(A > 0, x.clamp(max=high), torch.where(A < 0, x.clamp(min=-low), 0 * x))
            beyond = (x < -low) | (x > high)
            bounds |= {"actor/pg_clipfrac": beyond & (A > 0), "actor/pg_clipfrac_lower": beyond & (A < 0)}
            rows = -((bounded * m).sum(1) / n[:, 0]).exp() * (A * m).sum(1) / n[:, 0]
            if w is not None:
                rows = rows * (torch.where(m, (w + 1e-10).log(), 0.0).sum(1) / n[:, 0]).exp()
            return rows.mean(), {key: float(mean(v.to(L))) for key, v in bounds.items()}
        elif name == "cispo":
            inner = r.clamp(1 - low, 1 + high).detach()
            value, bounds["actor/pg_clipfrac"] = -inner * A * L, inner != r
        elif name == "sapo":
            tau = torch.where(A > 0, config.tau_pos, config.tau_neg)
            value = -4 / tau * torch.sigmoid(tau * (r - 1)) * A
        elif name == "dro":
            value, bounds = -(A * L - options.dro_beta / 2 * x**2), {"actor/ppo_kl": -x}
        else:
            moved = q * (old_log_prob - L.detach()) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
            out = {"dppo_tv": torch.where(A > 0, p - q > high, p - q < -low),
                   "dppo_kl": torch.where(A > 0, (moved > high) & (p > q), (moved > low) & (p < q))}[name]  # fmt: skip
            value = -r.clamp(max=config.clip_ratio_c).detach() * ~out * A * L
            bounds |= {"actor/pg_clipfrac": out, "actor/pg_clipfrac_lower": (r > config.clip_ratio_c) & ~out}
        value = value if w is None else value * w
        total = aggregated(value, m, OWN_MODE.get(name, loss_agg_mode), config.global_batch_info or {})
        return total, {key: float(mean(v.to(L))) for key, v in bounds.items()}

    return loss


def made_config(c, info, **options):
    numbers, policy = dict(c), {name: c[name] for name in POLICY_LOSS}
    for name in POLICY_LOSS:
        del numbers[name]
    policy |= {name: options.pop(name) for name in ("loss_mode", "rollout_correction") if name in options}
    if importlib.util.find_spec("verl"):
        from verl.workers.config import ActorConfig
        from verl.workers.config.actor import PolicyLossConfig

        return ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=4, policy_loss=PolicyLossConfig(**policy),
            global_batch_info=dict(info), **numbers, **options,
        )  # fmt: skip
    return SimpleNamespace(
        **numbers, clip_ratio=0.2, policy_loss=SimpleNamespace(**policy), global_batch_info=dict(info), **options
    )


def core():
    pytest.importorskip("verl", minversion="0.9.0", exc_type=ImportError)
    return importlib.import_module("verl.trainer.ppo.core_algos")


@pytest.fixture(params=["transcription", "itself"])
def theirs(request, monkeypatch):
    """verl's loss of a name. The registry that ours ask has them all."""
    if request.param == "itself":
        yield core().get_policy_loss_fn
        return
    with without_trainers("verl"):
        stand_in("verl.trainer.ppo.core_algos", POLICY_LOSS_REGISTRY={name: transcribed(name) for name in ours.LOSSES})
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        yield transcribed


def evaluated(loss, data, mode, config, weights, dtype):
    fields = {"old_log_prob": data.old, "advantages": data.advantages, "rollout_is_weights": weights}
    fields = {name: x if x is None else x.to(dtype) for name, x in fields.items()}
    return value_and_gradient(
        lambda x: loss(log_prob=x, response_mask=data.mask, loss_agg_mode=mode, config=config, **fields), data.logps, dtype
    )


def assert_same(got, want):
    ((loss, metrics), slopes), ((their_loss, their_metrics), their_slopes) = got, want
    scale = float(their_slopes.abs().max())
    assert_close(loss.double(), their_loss.double(), rtol=2e-5, atol=2e-5 * scale)
    assert_close(slopes, their_slopes, rtol=2e-5, atol=2e-6 * scale)
    assert scale > 0 and metrics == pytest.approx(their_metrics, rel=1e-5, abs=1e-6)
    assert all(type(x) is float for x in metrics.values())


GRID = pairs(
    name=ours.LOSSES,
    mode=ours.AGGREGATES,
    weights=(False, True),
    constants=CONSTANTS,
    step=(False, True),
    far=(False, True, None),
)


@parametrize("row", GRID, ids=label)
def test_policy_loss(theirs, lots_in_order, row):
    """Value, slopes and metrics of verl's loss of the same name; what is masked may be NaN."""
    name, data = row["name"], drawn(row["far"] is True)
    if row["far"] is None:
        data = replace(data, advantages=-data.advantages)
    config = made_config(CONSTANTS[row["constants"]], STEP if row["step"] else {})
    weights = data.weights if row["weights"] else None
    want = evaluated(theirs(name), data, row["mode"], config, weights, torch.float64)
    hidden = {n: torch.where(data.mask, x, math.nan) for n, x in (("old", data.old), ("advantages", data.advantages))}
    weights = None if weights is None else torch.where(data.mask, weights, math.nan)
    assert_same(evaluated(ours.policy_loss(name), replace(data, **hidden), row["mode"], config, weights, torch.float32), want)


#: Our preset -> verl's loss that has its numbers with nothing but the aggregation passed, and the mode that is the preset's own.
PRESETS = {
    "grpo": ("vanilla", "token-mean"), "ppo": ("vanilla", "token-mean"), "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
    "gspo": ("gspo", "seq-mean-token-mean"), "gspo_token": ("gspo", "seq-mean-token-mean"), "reinforce": ("gpg", "token-mean"),
    "clip_cov": ("clip_cov", "token-mean"), "kl_cov": ("kl_cov", "token-mean"), "gmpo": ("geo_mean", ""), "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", ""), "dppo_tv": ("dppo_tv", "token-mean"), "dppo_kl": ("dppo_kl", "token-mean"), "dro": ("dro", "token-mean"),
    "dapo": ("vanilla", "token-mean"),
}  # fmt: skip


@parametrize("preset", PRESETS)
@parametrize("info", [{}, STEP], ids=("alone", "step"))
def test_presets_have_verls_defaults(theirs, data, lots_in_order, preset, info):
    name, mode = PRESETS[preset]
    config = made_config(CONSTANTS["defaults"] | ({"clip_ratio_high": 0.28} if preset == "dapo" else {}), info)
    (want, _), slopes = evaluated(theirs(name), data, mode or "token-mean", config, None, torch.float64)
    objective = Objective.preset(preset, numerics="verl")
    (got, _), mine = evaluated(ours.policy_loss(objective), data, "token-sum", config, None, torch.float32)
    factor = (
        STEP["global_batch_size"] / 2 / B if preset == "gmpo" and info else 1
    )  # verl's takes no part in a step's denominators
    assert_close((factor * got.double(), factor * mine), (want, slopes), rtol=2e-5, atol=1e-6)


def test_drawn_tokens_of_clip_cov(theirs, data):
    """The lots fall as they may: as many tokens as in verl, all from the band, none of them clipped."""
    config, taken = made_config(CONSTANTS["others"] | {"clip_cov_ratio": 0.06}, {}), []
    every = evaluated(
        theirs("clip_cov"),
        data,
        "token-sum",
        made_config(CONSTANTS["others"] | {"clip_cov_ratio": 1.0}, {}),
        None,
        torch.float64,
    )
    plain = evaluated(
        theirs("vanilla"), data, "token-sum", made_config(CONSTANTS["others"] | {"clip_ratio_c": 1e9}, {}), None, torch.float64
    )
    for seed in range(4):
        torch.manual_seed(seed)
        found = [
            evaluated(f("clip_cov"), data, "token-sum", config, None, torch.float32)[1] for f in (theirs, ours.policy_loss)
        ]
        chosen = [(x == 0) & (plain[1] != 0) for x in found]
        assert [int(x.sum()) for x in chosen] == [int(0.06 * int(data.mask.sum()))] * 2
        assert not (chosen[1] & (every[1] != 0)).any()
        taken.append(tuple(chosen[1].nonzero().flatten().tolist()))
    assert len({*taken}) > 1


def test_nothing_to_train(data):
    """A micro-batch without tokens: verl alone gives 0/0, ours a differentiable 0; in a step both give 0."""
    nothing = replace(data, mask=torch.zeros_like(data.mask))
    for info in ({}, STEP, STEP | {"batch_num_tokens": 0}):
        config = made_config(CONSTANTS["defaults"], info)
        (loss, metrics), slopes = evaluated(ours.policy_loss("vanilla"), nothing, "token-mean", config, None, torch.float32)
        assert loss == 0 and not slopes.any() and not any(metrics.values())


@parametrize("bad, message", [
    (Objective.preset("grpo", beta=0.1), "adds KL and entropy itself"), (Objective.preset("grpo", entropy_coef=0.1), "adds KL and entropy itself"),
    (Objective.preset("grpo", aggregate="group-mean"), "is not told which prompt"), ("nonesuch", "preset='nonesuch': it must be one of"),
])  # fmt: skip
def test_refused_objectives(bad, message):
    with pytest.raises(ValueError, match=message):
        ours.policy_loss(bad)


@parametrize("changes, info, mode, message", [
    (None, {}, "token-mean", "config=None"), ({}, {}, "nonesuch", "loss_agg_mode='nonesuch'"),
    ({}, {"dp_size": 2}, "token-mean", "batch_num_tokens=None: with dp_size=2"), ({"clip_ratio_c": 1.1}, {}, "token-mean", "clip_ratio_c=1.1: below"),
    ({}, {"dp_size": 2}, "seq-mean-token-sum", "global_batch_size=None: with dp_size=2"),
])  # fmt: skip
def test_refused_configurations(data, changes, info, mode, message):
    config = None if changes is None else made_config(CONSTANTS["defaults"] | changes, info)
    with pytest.raises(ValueError, match=message):
        evaluated(ours.policy_loss("vanilla"), data, mode, config, None, torch.float32)
    with pytest.raises(ValueError, match="dro_beta=None"):
        ours.objective_of("dro", made_config(CONSTANTS["defaults"] | {"dro_beta": None}, {}))


# ---- its registry


@pytest.fixture
def registry(monkeypatch):
    """A stand-in for verl, of a version that was not tested."""
    losses = {name: transcribed(name) for name in ours.LOSSES if name != "dro"}  # which an older verl has not
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(metadata, "version", lambda _: "99.1")
    monkeypatch.delenv("GRPO_KERNELS_ANY_VERSION", raising=False)
    with without_trainers("verl"):
        register = lambda name: lambda f: losses.setdefault(name, f)  # noqa: E731
        stand_in("verl.trainer.ppo.core_algos", POLICY_LOSS_REGISTRY=losses, register_policy_loss=register)
        yield losses


def test_registered_names(registry, data, monkeypatch):
    """One for every name of verl's, every preset with verl's numbers, and some that verl has not; verl's own and ours stay."""
    monkeypatch.setattr(metadata, "version", lambda _: "0.9.1")
    before = dict(registry)
    names = ours.register()
    assert {f"fused_{name}" for name in (*before, "dapo", "grpo", "vespo", "luspo")} <= {*names} == {*registry} - {*before}
    assert not {"fused_dro", "fused_a2po", "fused_distillation"} & {*names} and all(
        registry[name] is loss for name, loss in before.items()
    )
    mine = dict(registry)
    assert ours.register() == names and registry == mine
    config = made_config(CONSTANTS["defaults"], STEP)
    for name in names:
        (loss, _), slopes = evaluated(registry[name], data, "token-mean", config, None, torch.float32)
        assert torch.isfinite(loss) and torch.isfinite(slopes).all() and slopes.any(), name


@parametrize("factor", [1.0, 1.02])
def test_losses_of_an_untested_version_are_compared_with_verls(registry, data, factor):
    own, calls = registry["vanilla"], []
    registry["vanilla"] = lambda *args, **kwargs: (lambda loss, metrics: calls.append(1) or (factor * loss, metrics))(
        *own(*args, **kwargs)
    )
    ours.register()
    given = (
        data.old,
        data.logps.requires_grad_(),
        data.advantages,
        data.mask,
        "token-mean",
        made_config(CONSTANTS["defaults"], STEP),
    )
    if factor != 1:
        with pytest.raises(RuntimeError, match=r"verl 99\.1.*fused_vanilla is not what it was: values"):
            registry["fused_vanilla"](*given)
        return
    with pytest.warns(UserWarning, match=r"verl 99\.1.*They agree"):
        registry["fused_vanilla"](*given)
    registry["fused_vanilla"](*given)
    assert len(calls) == 1


@parametrize("by_sequence", [False, True])
def test_gspo_aggregates_as_this_verl_does(registry, by_sequence):
    """Before 0.9.1 its mode has no effect. The step of the config has no part in the question."""

    def gspo(old, logps, advantages, mask, mode, config):
        assert not config.global_batch_info and config.clip_ratio_low == 0.17
        sums = (advantages * mask).sum(1)
        return -(sums / mask.sum(1) if by_sequence or mode == "seq-mean-token-mean" else sums).mean(), {}

    registry["gspo"] = gspo
    config = made_config(CONSTANTS["defaults"] | {"clip_ratio_low": 0.17}, {"dp_size": 3})
    for mode in ("token-mean", "seq-mean-token-sum"):
        assert ours.objective_of("gspo", config, mode).aggregate == ("seq-mean-token-mean" if by_sequence else mode)
    assert config.global_batch_info == {"dp_size": 3}


def test_these_are_all_losses_and_estimators_of_verl():
    """One that a new verl adds is noticed here."""
    own = {name for name in core().POLICY_LOSS_REGISTRY if not name.startswith("fused_")}
    assert own == {*ours.LOSSES, "bypass_mode"}
    tested = {name.partition(",")[0] for name in (*OUTCOMES, *RETURNS)}
    assert {str(getattr(name, "value", name)) for name in core().ADV_ESTIMATOR_REGISTRY} == tested | {"gae"}


# ---- KL, corrections and the actor's loss

KL = Objective.preset("grpo", numerics="verl").kl
PENALTIES = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": KL, "k3": KL, "kl+": "k1+", "k1+": "k1+", "abs+": "abs+",
    "k2+": "k2+", "mse+": "k2", "low_var_kl+": replace(KL, straight_through=True), "k3+": replace(KL, straight_through=True),
}  # fmt: skip


@parametrize("name", PENALTIES)
def test_kl_penalty(name):
    """Value and slope of each estimator, on both sides of its clamps, at 0, and at their bounds; verl's own where it is here."""
    d = torch.cat(
        [torch.linspace(-3, 3, 41), torch.tensor([0.0, 2.6, 2.62, -10.9, -11.1, 19.9, 20.1, -19.9, -20.1, 30.0, -70.0])]
    )
    kind = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name.rstrip("+"), name.rstrip("+"))
    logps = torch.full_like(d, -5.0)
    x = (logps + d - logps).double()
    bounded = x.clamp(-20, 20)
    k3 = bounded.exp() - bounded - 1
    value, slope = {
        "k1": (-x, torch.ones_like(x)), "abs": (x.abs(), -x.sign()), "k2": (x * x / 2, -x),
        "k3": (k3.clamp(max=10), torch.where((x.abs() <= 20) & (k3 <= 10), 1 - bounded.exp(), 0.0)),
    }[kind]  # fmt: skip
    want = value, -x if name.endswith("+") else slope
    batch = TokenBatch(torch.zeros(len(d), dtype=torch.int64), torch.zeros(len(d)), old_logps=logps + 0.1, ref_logps=logps + d)
    objective = Objective.preset("grpo", numerics="verl", beta=0.5, kl=PENALTIES[name], aggregate="token-sum")
    losses, slopes, _ = objective.token_stage(logps, None, objective.token_rows(batch), batch)
    assert_close((losses.double() / 0.5, slopes.double() / 0.5), want, rtol=1e-5, atol=1e-5)
    if importlib.util.find_spec("verl"):
        leaf = logps.clone().requires_grad_()
        theirs = core().kl_penalty(leaf, logps + d, name)
        assert_close(
            (theirs.detach().double(), torch.autograd.grad(theirs.sum(), leaf)[0].double()), want, rtol=1e-5, atol=1e-5
        )


def our_weights(batch, level, threshold, normalize):
    low, high = (float(x) for x in threshold.split("_")) if isinstance(threshold, str) else (0.0, threshold)
    mode = "mask" if isinstance(threshold, str) else "truncate"
    return None if level is None else importance_weights(batch, level=level, mode=mode, low=low, high=high, normalize=normalize)


def our_rejection(batch, options, bounds):
    kept = batch.mask
    for option, bound in zip((options or "").split(","), (bounds or "").split(","), strict=True):
        if option:
            over, metric = option.removeprefix("seq_").split("_")
            low, high = (math.log(float(x)) for x in bound.split("_")) if metric == "k1" else (-math.inf, float(bound))
            kept = kept & (rejection_mask(batch, metric=metric, over=over, low=low, high=high) != 0)
    return kept


REJECTIONS = {
    "token_k1": "0.85_1.2", "token_k2": "0.02", "token_k3": "0.02", "seq_sum_k1": "0.3_3", "seq_sum_k2": "0.2", "seq_sum_k3": "0.2",
    "seq_mean_k1": "0.85_1.2", "seq_mean_k2": "0.03", "seq_mean_k3": "0.03", "seq_max_k2": "0.07", "seq_max_k3": "0.07",
    "token_k1,seq_mean_k3": "0.85_1.2,0.03",
}  # fmt: skip


@parametrize(
    "row",
    pairs(rejection=REJECTIONS, level=("token", "sequence"), threshold=(1.15, "0.8_1.2"), normalize=(False, True)),
    ids=label,
)
def test_rollout_correction(data, row):
    """Decoupled mode: weights and rejection of the old policy against the sampler, before the step."""
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", exc_type=ImportError)
    shift = torch.tensor([0.0, 0.08, -0.09, 0.0, 0.35, -0.02, 0.15, -0.3])[:, None]
    sampler = data.old + shift + 0.25 * (data.logps - data.ref)
    batch = TokenBatch(data.mask.long(), data.advantages, mask=data.mask, old_logps=data.old, sampler_logps=sampler)
    proto, kept, _ = helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=data.old, rollout_log_prob=sampler, response_mask=data.mask.float(), rollout_is=row["level"],
        rollout_is_threshold=row["threshold"], rollout_is_batch_normalize=row["normalize"], rollout_rs=row["rejection"],
        rollout_rs_threshold=REJECTIONS[row["rejection"]],
    )  # fmt: skip
    mine = our_rejection(batch, row["rejection"], REJECTIONS[row["rejection"]])
    weights = our_weights(batch, row["level"], row["threshold"], row["normalize"])
    assert torch.equal(kept.bool(), mine) and 0 < int(mine.sum()) < int(data.mask.sum()) and (weights[data.mask] != 1).any()
    assert_close(proto.batch["rollout_is_weights"], weights, rtol=1e-5, atol=1e-6)


#: Level and threshold of the weights, whether they are normalised, rejection, its bounds; without a level the clipped loss.
BYPASSES = {
    "clip": (None, 2.0, False, None, None), "clip, rejection": (None, 2.0, False, "token_k1", "0.7_1.4"),
    "token": ("token", 1.2, False, None, None), "icepop": ("token", "0.8_1.3", False, None, None), "sequence": ("sequence", 2.0, False, None, None),
    "normalised": ("token", 2.0, True, None, None), "normalised sequences": ("sequence", 2.0, True, None, None),
    "rejection": ("sequence", 2.0, False, "seq_mean_k1", "0.7_1.4"),
}  # fmt: skip


@parametrize(
    "what, mode",
    [(what, ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")[i % 3]) for i, what in enumerate(BYPASSES)],
)
def test_bypass_mode(data, what, mode):
    """The ratio is against the sampler, which verl hands over as old_log_prob; what it is given as weights is ignored."""
    core()
    from verl.trainer.config import RolloutCorrectionConfig

    level, threshold, normalize, rejection, bounds = BYPASSES[what]
    options = (
        {}
        if level is None
        else {"loss_type": "reinforce", "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalize}
    )
    rejected = {"rollout_rs": rejection, "rollout_rs_threshold": bounds} if rejection else {}
    correction = RolloutCorrectionConfig(bypass_mode=True, rollout_is=level, **options, **rejected)
    config = made_config(CONSTANTS["defaults"], {}, rollout_correction=correction)
    want = evaluated(core().get_policy_loss_fn("bypass_mode"), data, mode, config, data.weights, torch.float64)
    batch = TokenBatch(data.mask.long(), data.advantages, mask=data.mask, old_logps=data.logps, sampler_logps=data.old)
    left = replace(data, mask=our_rejection(batch, rejection, bounds))
    loss, weights = ours.policy_loss("vanilla" if level is None else "gpg"), our_weights(batch, level, threshold, normalize)
    found = [evaluated(loss, left, mode, config, weights, torch.float32)]
    if what in ("token", "sequence"):  # in one visit of the logits, without weights
        capped = Objective.preset(
            "reinforce",
            numerics="verl",
            surrogate=Cispo(threshold),
            aggregate=mode,
            level={"token": "token"}.get(what, "sequence-sum"),
        )
        found.append(evaluated(ours.policy_loss(capped), data, mode, config, None, torch.float32))
    for (value, _), slopes in found:
        assert_close((value.double(), slopes), (want[0][0], want[1]), rtol=2e-5, atol=1e-6)


@parametrize("i, name", [*enumerate(ours.LOSSES)])
def test_the_actor_loss_from_logits(data, lots_in_order, i, name):
    """verl's `ppo_loss`, which adds entropy and KL to the tensor that it is given, in place: with its loss, with ours from its
    registry, and as one objective of `grpo_loss`."""
    algorithms, vocabulary, prompt, weights = core(), 11, 3, data.weights if i % 2 else None
    from tensordict import NonTensorData, TensorDict
    from verl.workers.utils.losses import ppo_loss

    g, mode = torch.Generator().manual_seed(11), [*ours.AGGREGATES][i % 5] if name not in OWN_MODE else "seq-mean-token-mean"
    base, ids = 1.2 * torch.randn(B, T, vocabulary, generator=g), torch.randint(vocabulary, (B, T), generator=g)
    logps = torch.log_softmax(base, -1).gather(2, ids[..., None])[..., 0]
    old, ref = (logps + data.old - data.logps).clamp(max=-0.005), logps + data.ref - data.logps
    fields = {
        "prompts": torch.ones(B, prompt, dtype=torch.int64), "responses": ids, "attention_mask": torch.ones(B, prompt + T, dtype=torch.int64),
        "response_mask": data.mask.long(), "old_log_probs": old, "advantages": data.advantages, "ref_log_prob": ref,
    } | ({} if weights is None else {"rollout_is_weights": weights})  # fmt: skip

    def actor(loss_mode):
        def loss(x):
            log_p = torch.log_softmax(x, -1)
            out = {"log_probs": log_p.gather(2, ids[..., None])[..., 0], "entropy": -(log_p.exp() * log_p).sum(-1)}
            packed = {n: torch.cat([torch.nn.functional.pad(row, (prompt - 1, 1)) for row in v]) for n, v in out.items()}
            whole = TensorDict(fields, batch_size=[B])
            whole.set_non_tensor("dp_size", 1)
            for key in ("batch_num_tokens", "global_batch_size"):
                whole.set(key, NonTensorData(None, batch_size=[B]))
            how = {
                "loss_mode": loss_mode,
                "loss_agg_mode": mode,
                "entropy_coeff": 0.03,
                "use_kl_loss": True,
                "kl_loss_coef": 0.2,
            }
            return ppo_loss(made_config(CONSTANTS["defaults"], {}, **how), packed, whole)

        return loss

    before = dict(algorithms.POLICY_LOSS_REGISTRY)
    ours.register("mine_")
    try:
        want, mine = (value_and_gradient(actor(n), base, torch.float32) for n in (name, f"mine_{name}"))
    finally:
        algorithms.POLICY_LOSS_REGISTRY.clear()
        algorithms.POLICY_LOSS_REGISTRY.update(before)
    numbers = [
        {k: float(v.aggregate() if hasattr(v, "aggregate") else v) for k, v in found[0][1].items()} for found in (mine, want)
    ]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5, abs=1e-6) and numbers[0]["kl_loss"] != 0
    changes = {"aggregate": ours.AGGREGATES[mode]} | ({"max_tokens": T} if mode.endswith("norm") else {})
    if name == "geo_mean":  # a plain mean over sequences, and of KL and bonus the mode of the actor
        changes = {"count_empty": False, "kl_aggregate": mode, "entropy_aggregate": mode}
        if weights is not None:
            logs = torch.where(data.mask, (weights + 1e-10).log(), 0.0)
            weights = (logs.sum(1, keepdim=True) / data.mask.sum(1, keepdim=True).clamp(min=1)).exp().expand(B, T)
    objective = Objective.preset(ours.LOSSES[name], numerics="verl", beta=0.2, entropy_coef=0.03, **changes)
    batch = TokenBatch(ids, data.advantages, mask=data.mask, old_logps=old, ref_logps=ref, weights=weights)
    whole = value_and_gradient(
        lambda x: grpo_loss(x, batch, objective, normalizer=float(B) if name == "geo_mean" else None).loss, base, torch.float32
    )
    for loss, gradient in ((mine[0][0], mine[1]), (whole[0], whole[1])):
        assert_close((loss, gradient), (want[0][0], want[1]), rtol=1e-4, atol=1e-5 * float(want[1].abs().max()))


def test_the_fused_forward():
    """verl's own patched forward, impl_backend=triton, against its torch backend: packed rows, rolled labels, temperature."""
    core()
    transformers = pytest.importorskip("transformers")
    from verl.models.transformers.dense_common import forward_with_torch_backend, forward_with_triton_backend

    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=211, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=True, attn_implementation="eager",
    ))  # fmt: skip
    ids, positions, results = torch.randint(211, (1, 14)), torch.cat([torch.arange(8), torch.arange(6)])[None], []
    with ours.bind(strict=True) as slots:
        for forward in (forward_with_torch_backend, forward_with_triton_backend):
            model.zero_grad()
            out = forward(
                model, input_ids=ids, position_ids=positions, temperature=0.7, shift_labels=torch.roll(ids, -1, 1), return_dict=True,
                use_cache=False,
            )  # fmt: skip
            ((out.log_probs * torch.linspace(-1, 1, 14)).sum() + 0.3 * out.entropy.square().sum()).backward()
            gradient = model.lm_head.weight.grad.clone()
            results.append((*(x.detach().float().view(14) for x in (out.log_probs, out.entropy)), gradient))
    assert slots.counts == {"fused": 1}
    for got, want in zip(*results, strict=True):
        assert_close(got, want, rtol=2e-5, atol=1e-5 * float(want.abs().max()))


@parametrize("order", [[0, 1, 2], [2, 0]])
def test_sets_from_the_non_tensor_batch(order):
    """They are cut and reordered with the batch, by verl's own DataProto if it is here, and go to the tokens that were sampled."""
    np = pytest.importorskip("numpy")
    responses, mask = torch.tensor([[4, 9, 7], [3, 5, 0], [6, 0, 0]]), torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 0]])
    record, rows = np.empty(3, dtype=object), [[[4, 1], [], [7]], [[], [], []], [[2, 6, 8], [], []]]
    record[:] = [[[4, 1], [7]], None, [[2, 6, 8]]]
    if importlib.util.find_spec("verl"):
        from verl import DataProto

        data = DataProto.from_dict({"responses": responses, "response_mask": mask}, {"sampling_mask": record})[np.array(order)]
    else:
        data = SimpleNamespace(batch={"response_mask": mask[order]}, non_tensor_batch={"sampling_mask": record[order]})
    kept = ours.kept_sets(data)
    assert [[i for i in row if i >= 0] for row in kept.padded().tolist()] == [x for b in order for x in rows[b]]
    assert ours.kept_sets(data, "other") is None
    data.non_tensor_batch["sampling_mask"][0] = [[2]] * 4
    with pytest.raises(ValueError, match=r"lists\[0\] has 4 records, but generated marks"):
        ours.kept_sets(data)


# ---- advantages

OPTIONS = NUMERICS["verl"]
INDEX = torch.tensor([0, 0, 1, 0, 1, 2, 1, 3, 0, 3])  # one of them alone
MASK = torch.arange(6) < torch.tensor([6, 3, 5, 2, 6, 4, 1, 6, 4, 3])[:, None]
#: With a tool's tokens in the middle.
HOLED = MASK.clone()
HOLED[0, 2:4] = HOLED[4, 1] = False
REWARDS = torch.tensor([1.0, 0.2, 0.7, -0.4, 0.1, 0.9, 0.5, 0.0, 0.3, 0.8])
OTHER = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 1.0, 0.0])


def groups(**changes):
    return torch.where(MASK, group_advantages(REWARDS, groups=INDEX, **OPTIONS | changes)[:, None], 0.0)


def whitened(x, mask=MASK):
    return whiten(x, mask, **WHITENING["verl"])


TWO_REWARDS = {
    "config": {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [0.7, 0.4]}, "non_tensor_batch": {"a": REWARDS.numpy(), "b": OTHER.numpy()},
    "batch": {"prompts": torch.ones(10, 2), "attention_mask": (torch.arange(8) < (2 + MASK.sum(1))[:, None]).long()},
}  # fmt: skip
UNSCALED = {"norm_adv_by_std_in_grpo": False}
PAIRED = torch.where(INDEX == 2, 1, INDEX)  # verl refuses a group of one
#: verl's name -> its options, and our way to write it. A completion alone in its group has its raw reward.
OUTCOMES = {
    "grpo": ({}, groups), "grpo, not scaled": (UNSCALED, lambda: groups(scale="none")),
    "grpo_vectorized": ({}, groups), "grpo_vectorized, not scaled": (UNSCALED, lambda: groups(scale="none")),
    "rloo": ({}, lambda: groups(baseline="leave-one-out", scale="none")),
    "rloo_vectorized": ({}, lambda: torch.where(MASK, group_advantages(REWARDS, groups=INDEX, baseline="leave-one-out", scale="none")[:, None], 0.0)),
    "opo": ({}, lambda: groups(baseline="length", scale="none", lengths=MASK.sum(1))),
    "gpg": ({}, lambda: gpg_scale(REWARDS) * groups(scale="none")),
    "reinforce_plus_plus_baseline": ({}, lambda: whitened(groups(scale="none"))), "gdpo": ({}, lambda: whitened(groups())),
    "gdpo, two rewards": (TWO_REWARDS, lambda: whitened(torch.where(MASK, sum(
        w * group_advantages(r, groups=INDEX, **OPTIONS) for w, r in ((0.7, REWARDS), (0.4, OTHER)))[:, None], 0.0))),
    "remax": ({"reward_baselines": REWARDS.flip(0)}, lambda: torch.where(MASK, greedy_baseline_advantages(REWARDS, REWARDS.flip(0))[:, None], 0.0)),
    **{f"grpo_passk, {scale}": ({"config": {"norm_adv_by_std_in_grpo": scale == "group"}, "index": PAIRED}, lambda scale=scale: torch.where(
        MASK, pass_at_k_advantages(REWARDS, groups=PAIRED, scale=scale)[:, None], 0.0)) for scale in ("group", "none")},
}  # fmt: skip


def theirs_of(name, rewards, mask, index=INDEX, **options):
    """verl's estimator; rewards [B] lie on the last token of a completion, as its reward managers put them."""
    if rewards.dim() == 1:
        rewards = torch.zeros(mask.shape).scatter(1, mask.sum(1, keepdim=True) - 1, rewards[:, None])
    estimator = core().get_adv_estimator_fn(name.partition(",")[0])
    return estimator(token_level_rewards=rewards, response_mask=mask.float(), index=index.numpy(), **options)[0]


@parametrize("what", OUTCOMES)
def test_outcome_advantages(what):
    options, mine = OUTCOMES[what]
    want = theirs_of(what, REWARDS, MASK, **options)
    assert_close(mine(), want, rtol=2e-5, atol=1e-6)
    assert len(want.unique()) > 3


G = torch.Generator().manual_seed(8)
TOKENS = torch.where(HOLED, torch.randn(HOLED.shape, generator=G), 0.0)
LOGPS = -2 * torch.rand(HOLED.shape, generator=G)
SQUARES, WEIGHTS = LOGPS.exp() ** 2 + 0.1 * torch.rand(HOLED.shape, generator=G), torch.rand(HOLED.shape, generator=G) + 0.5
SCORED = {"old_log_probs": LOGPS, "sum_pi_squared": SQUARES}
RETURNS = {
    **{f"reinforce_plus_plus, {gamma}": (HOLED, {"config": SimpleNamespace(gamma=gamma)}, lambda gamma=gamma: whitened(
        discounted_returns(TOKENS, gamma=gamma, mask=HOLED), HOLED)) for gamma in (1.0, 0.9)},
    **{f"{name}, {w is not None}": (mask, SCORED | {"rollout_is_weights": w}, lambda mask=mask, w=w: optimal_token_advantages(
        TOKENS, LOGPS, SQUARES, groups=INDEX, weights=w, mask=mask)) for w in (None, WEIGHTS) for name, mask in (
        ("optimal_token_baseline", MASK), ("tir_optimal_token_baseline", HOLED))},
}  # fmt: skip


@parametrize("what", RETURNS)
def test_token_advantages(what):
    mask, options, mine = RETURNS[what]
    assert_close(mine(), theirs_of(what, TOKENS, mask, **options), rtol=1e-5, atol=1e-5)


@parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0)])
def test_gae(gamma, lam):
    values = torch.randn(HOLED.shape, generator=torch.Generator().manual_seed(6))
    want = core().compute_gae_advantage_return(TOKENS, values, HOLED.float(), gamma, lam)
    advantages, returns = gae(TOKENS, values, gamma=gamma, lam=lam, mask=HOLED)
    for a, b in zip((whitened(advantages, HOLED), returns), want, strict=True):
        assert_close(a[HOLED], b[HOLED], rtol=1e-5, atol=1e-5)


def test_equal_rewards():
    """verl's defect: the mean of ten times 0.7 is not 0.7 in fp32, and the rest is divided by 1e-6. Ours is 0."""
    r, i = torch.full((10,), 0.7), torch.zeros(10, dtype=torch.int64)
    assert not group_advantages(r, groups=i, **OPTIONS).any()
    assert float(theirs_of("grpo", r, torch.ones(10, 2, dtype=torch.bool), i).abs().max()) > 0.01
