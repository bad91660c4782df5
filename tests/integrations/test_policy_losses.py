"""Policy losses with the arguments of OpenRLHF, SkyRL, verl, slime and prime-rl, in value, gradient
and metrics: a table of what each trainer computes, in the words of the float64 oracle
(support/oracle.py), and the trainer's own loss where it is on the path.

    pip install --no-deps verl==0.9.1 && pip install ray tensordict omegaconf hydra-core codetiming
    orjson pylatexenc
"""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from grpo_kernels import Cispo, Clip, Objective, Sapo
from grpo_kernels.integrations import openrlhf, prime_rl, skyrl, slime, verl
from support.oracle import Spec
from support.pairs import label, pairs
from support.trainers import (
    DATA,
    MASK,
    B,
    T,
    V,
    assert_same,
    drawn,
    exact,
    refused,
    same_metrics,
    stand_in,
    their_file,
    value_and_gradient,
    without_trainers,
)  # fmt: skip

parametrize = pytest.mark.parametrize

pytestmark = pytest.mark.usefixtures("stand_ins")

N = MASK.sum(1, keepdim=True)
OLD, SAMPLER, A = (x.double() for x in (DATA.old, DATA.sampler, DATA.advantages))
FAR = (-20.0, 20.0)


class Case(NamedTuple):
    """`ours`: a leaf -> (loss, metrics). What it is: a sum of the oracle's losses of `spec`, each
    of (log-probs, its fields), which `parts` makes of the leaf in float64, and metrics of the
    results and the leaf. `itself`: a leaf -> what the trainer's own loss gives.
    """

    ours: Any
    spec: Spec
    parts: Any
    metrics: Any
    itself: Any = None
    leaf: torch.Tensor = DATA.logps


def one(data=DATA, **fields):
    """The whole batch at once."""
    return lambda x: [
        (x, {"advantages": data.advantages, "mask": data.mask, "old_logps": data.old} | fields)
    ]


def mean(x, mask=MASK):
    return (x * mask).sum() / mask.sum()


def clipped(result, logps):
    """bool [B, T]: where the clip holds."""
    return torch.zeros(logps.shape, dtype=torch.bool).masked_scatter(
        MASK, result.clipped_low | result.clipped_high
    )


def check(case):
    mine, results = value_and_gradient(case.ours, case.leaf), []

    def expected(x):
        results[:] = [exact(case.spec, logps, **fields) for logps, fields in case.parts(x)]
        return sum(result.loss for result in results)

    want = value_and_gradient(expected, case.leaf, torch.float64)
    assert_same(mine, want)
    expected_metrics = case.metrics(results, case.leaf.double())
    same_metrics(mine[0][1], expected_metrics)
    return mine


def check_itself(case):
    """The trainer's own loss of float64, and its metrics by name."""
    want, mine = (
        value_and_gradient(case.itself, case.leaf, torch.float64),
        value_and_gradient(case.ours, case.leaf),
    )
    assert_same(mine, want)
    same_metrics(mine[0][1], want[0][1])


# ---- OpenRLHF

#: By the arguments of both versions, of 0.11.0, of 0.11.2.
VLLM = {"enable_vllm_is_correction": True}
BEFORE = {
    "ppo": {}, "dual clip": {"clip_eps_low": 0.1, "clip_eps_high": 0.28, "dual_clip": 1.5}, "sequence mean": {"token_level_loss": False},
    "gspo": {"policy_loss_type": "gspo", "clip_eps_low": 0.15}, "gspo, corrected": {"policy_loss_type": "gspo", **VLLM},
    "tis": {**VLLM, "vllm_is_truncated_threshold": [0.8, 1.2]},
    "icepop": {**VLLM, "vllm_is_truncated_threshold": [0.7, 1.4], "vllm_is_correction_type": "icepop"},
    "seq-mask-tis": {**VLLM, "vllm_is_truncated_threshold": [0.9, 1.1], "vllm_is_correction_type": "seq-mask-tis"},
}  # fmt: skip
SINCE = {
    f"{level} {mode} {gating}{' gspo' * ('policy_loss_type' in more)}": {
        "is_correction_level": level, "is_correction_mode": mode, "is_correction_gating": gating, "is_correction_threshold": bounds, **more,
    }
    for level, mode, gating, bounds, more in (
        ("off", "mask", "ratio", (0.5, 5.0), {"dual_clip": 1.5}), ("token", "clip", "ratio", (0.8, 1.2), {}),
        ("token", "mask", "ratio", (0.7, 1.4), {}), ("seq", "mask", "ratio", (0.9, 1.1), {"token_level_loss": False}),
        ("seq", "mask", "ratio", (0.5, 5.0), {"policy_loss_type": "gspo"}), ("token", "mask", "binary_kl", (0.0, 0.01), {}),
        ("seq", "mask", "binary_kl", (0.0, 0.03), {}), ("token", "mask", "tv", (0.0, 0.05), {}), ("seq", "mask", "tv", (0.0, 0.092), {}),
    )
}  # fmt: skip
TYPES = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}


def of_openrlhf(options, counts):
    level, mode, gating, bounds = (
        options.get(f"is_correction_{name}") for name in ("level", "mode", "gating", "threshold")
    )
    if level is None:
        level, mode = (
            TYPES[options.get("vllm_is_correction_type", "tis")]
            if VLLM.keys() <= options.keys()
            else ("off", None)
        )
        gating, bounds = "ratio", options.get("vllm_is_truncated_threshold")
    gspo, low, high = (
        options.get("policy_loss_type") == "gspo",
        options.get("clip_eps_low", 0.2),
        options.get("clip_eps_high", 0.2),
    )
    tokens = options.get("token_level_loss", True) and not gspo
    spec = Spec(
        "clip", low, high, options.get("dual_clip"), level="sequence" if gspo else "token", bounds=None if gspo else FAR,
        aggregate="token-mean" if tokens else "seq-mean-token-mean", count_empty=False,
    )  # fmt: skip
    fields = {"old_logps": SAMPLER if gspo and level != "off" else OLD}
    if counts:
        fields["normalizer"] = (
            counts["batch_num_tokens" if tokens else "global_batch_size"] / counts["dp_size"]
        )
    kl = share = None
    if level != "off" and not gspo:
        p, q = SAMPLER.exp(), OLD.exp()
        measured = {
            "binary_kl": p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log(),
            "tv": (p - q).abs(),
        }.get(gating, OLD - SAMPLER)
        measured = (measured * MASK).sum(1, keepdim=True) / N if level == "seq" else measured
        measured = measured.exp() if gating == "ratio" else measured
        keep, w = (measured >= bounds[0]) & (measured <= bounds[1]), (OLD - SAMPLER).exp()
        fields["weights"] = w.clamp(*bounds) if mode == "clip" else torch.where(keep, w, 0.0)
        share, kl = (
            mean((~keep).double()) if level == "token" else (~keep).double().mean(),
            mean(SAMPLER - OLD),
        )

    def metrics(results, logps):
        found = [mean(clipped(results[0], logps)), mean(OLD - logps), kl]
        return dict(enumerate([*found, share] if "is_correction_level" in options else found))

    given = DATA.old, DATA.advantages, MASK.float(), DATA.sampler
    loss = openrlhf.PolicyLoss(**options)

    def ours(x):
        found, *metrics = loss(x, *given, **counts)
        return found, dict(enumerate(metrics))

    def itself(x):
        theirs = sys.modules["openrlhf.models.loss"].PolicyLoss
        if ("is_correction_level" in options) != hasattr(theirs(), "is_correction_level"):
            pytest.skip("this version has other arguments")
        own, like = theirs(**options), openrlhf.PolicyLoss.like(theirs(**options))
        assert float(like(DATA.logps, *given)[0]) == float(loss(DATA.logps, *given)[0])
        found, *metrics = own(x, OLD, A, MASK.double(), SAMPLER, **counts)
        return found, dict(enumerate(metrics))

    return Case(ours, spec, one(**fields), metrics, itself)


OPENRLHF = {
    f"{name}{', of a step' * bool(counts)}": of_openrlhf(options, counts)
    for name, options in (BEFORE | SINCE).items()
    for counts in ({}, {"dp_size": 2, "batch_num_tokens": 61.0, "global_batch_size": 17.0})
}


@parametrize("what", OPENRLHF)
def test_openrlhf(what):
    check(OPENRLHF[what])


@parametrize("what", OPENRLHF)
def test_openrlhf_itself(what, monkeypatch):
    utils = their_file("openrlhf.models.utils", monkeypatch, deepspeed={})
    their_file("openrlhf.models.loss", monkeypatch, utils)
    check_itself(OPENRLHF[what])


# ---- SkyRL

HOME = "skyrl.backends.skyrl_train.utils"


def config_of_skyrl(anchor="old", **changes):
    return SimpleNamespace(
        **{"eps_clip_low": 0.2, "eps_clip_high": 0.2, "clip_ratio_c": 3.0, "loss_reduction": "sequence_mean"} | changes,
        sapo=SimpleNamespace(tau_pos=0.9, tau_neg=1.3), off_policy_correction=SimpleNamespace(tis_ratio_type=None),
        cispo=SimpleNamespace(cispo_eps_clip_low=0.25, cispo_eps_clip_high=0.3, cispo_anchor=anchor),
        dppo=SimpleNamespace(dppo_type="binary_tv", delta_low=0.2, delta_high=0.2),
    )  # fmt: skip


def corrected(loss, old, rollout, mask, config):
    """Stands in for SkyRL's: a weight for each token, and a sequence that is dropped."""
    if rollout is None:
        return loss, mask, {}
    return (
        loss * (old - rollout).exp().clamp(max=1.2),
        mask * (torch.arange(B) != 1).to(loss)[:, None],
        {"tis": 1.0},
    )


def uncorrected(loss, old, rollout, mask, config):
    return loss, mask, {}


def preset(name, **changes):
    return Objective.preset(name, numerics="skyrl", beta=0.0, aggregate="token-sum", **changes)


#: Our objective, SkyRL's function, changes of its configuration, and what it is.
OF_SKYRL = {
    "dual_clip": (preset("ppo", surrogate=Clip(0.1, 0.28, 1.6)), "ppo_policy_loss",
                  {"policy_loss_type": "dual_clip", "eps_clip_low": 0.1, "eps_clip_high": 0.28, "clip_ratio_c": 1.6},
                  Spec("clip", 0.1, 0.28, 1.6, bounds=FAR)),
    "regular": ("grpo", "ppo_policy_loss", {"policy_loss_type": "regular"}, Spec(bounds=FAR)),
    "gspo": ("gspo", "gspo_policy_loss", {}, Spec(level="sequence-token", bounds=(-math.inf, 10.0))),
    "sapo": (preset("sapo", surrogate=Sapo(0.9, 1.3)), "sapo_policy_loss", {}, Spec("sapo", tau=(0.9, 1.3), bounds=FAR)),
    "cispo": (preset("cispo", surrogate=Cispo(1.3, 0.75)), "compute_policy_loss_cispo", {}, Spec("cispo", cap=1.3, low=0.75, bounds=FAR)),
    "dppo": ("dppo_tv", "dppo_policy_loss", {}, Spec("importance-sampling", trust=("tv", 0.2, 0.2, "old"), bounds=FAR)),
    "rollout_is": ("rollout_is", "rollout_is_policy_loss", {}, Spec("cispo", cap=math.inf, trust=("ratio", 0.2, 0.2, "old"))),
}  # fmt: skip


def of_skyrl(what, rollout, anchor="old", correct=corrected):
    objective, function, changes, spec = OF_SKYRL[what]
    config, sampler = config_of_skyrl(anchor, **changes), DATA.sampler if rollout else None
    anchored = rollout and (what in ("dppo", "rollout_is") or anchor == "rollout")
    weights, mask, told = correct(
        torch.ones(B, T).double(), OLD, None if sampler is None else SAMPLER, MASK.double(), None
    )
    old = SAMPLER if anchored else OLD

    def metrics(results, logps):
        if what == "cispo":  # over the tokens before the correction, with any advantage
            r = (logps - old).clamp(*FAR).exp()[MASK]
            inner = r.clamp(0.75, 1.3)
            return {"clip_ratio": (inner != r).double().mean(), "cispo/ratio_mean": r.mean(), "cispo/ratio_clamped_mean": inner.mean(),
                    "cispo/ratio_max": r.max(), "cispo/ratio_min": r.min(), **told}  # fmt: skip
        left = ~results[0].kept if spec.trust else results[0].clipped_low | results[0].clipped_high
        return {"clip_ratio": left.double().mean(), **told}

    def ours(x):
        stand_in(f"{HOME}.off_policy_correction_utils", apply_off_policy_correction=correct)
        return skyrl.policy_loss(objective)(
            x, DATA.old, DATA.advantages, config, MASK.float(), sampler
        )

    def itself(x):
        loss, named = getattr(sys.modules[f"{HOME}.ppo_utils"], function)(
            x, OLD, A, config, MASK.double(), SAMPLER if rollout else None
        )
        return (
            loss,
            {} if rollout and what != "cispo" else named,
        )  # ours is over the tokens that the correction leaves

    parts = one(old_logps=old, weights=weights, mask=mask != 0)
    return Case(ours, replace(spec, aggregate="token-sum"), parts, metrics, itself)


SKYRL = {
    f"{what}{', rollout' * rollout}": of_skyrl(what, rollout)
    for what in OF_SKYRL for rollout in (False, True) if rollout or what != "rollout_is"
} | {"cispo, to the rollout": of_skyrl("cispo", True, "rollout", uncorrected)}  # fmt: skip


@parametrize("what", SKYRL)
def test_skyrl(what):
    (_, metrics), _ = check(SKYRL[what])
    assert all(isinstance(value, float) for value in metrics.values())


@parametrize("what", SKYRL)
def test_skyrl_itself(what, monkeypatch):
    for needed in ("loguru", "jaxtyping", "ray"):
        pytest.importorskip(needed, reason=f"{needed}, which SkyRL imports, is not installed")
    utils = their_file(
        f"{HOME}.torch_utils", monkeypatch, skyrl__train__config={"AlgorithmConfig": object}
    )
    stand_in(f"{HOME}.off_policy_correction_utils", apply_off_policy_correction=corrected)
    ppo = their_file(f"{HOME}.ppo_utils", monkeypatch, utils)
    if not hasattr(ppo, OF_SKYRL[what.partition(",")[0]][1]) or "to the" in what:
        pytest.skip("this version has no such loss")  # before 0.3.0 no DPPO
    check_itself(SKYRL[what])


# ---- verl

#: Numbers of verl's configuration, none of which is the default, and those of its policy loss.
ACTOR = {
    "clip_ratio_low": 0.13,
    "clip_ratio_high": 0.28,
    "clip_ratio_c": 1.6,
    "tau_pos": 0.9,
    "tau_neg": 1.3,
}
POLICY = {
    "clip_cov_ratio": 0.1,
    "clip_cov_lb": 0.4,
    "clip_cov_ub": 2.5,
    "kl_cov_ratio": 0.15,
    "ppo_kl_coef": 0.7,
    "dro_beta": 0.3,
}
CONSTANTS = ACTOR | POLICY
#: Of a whole step of which this is a micro-batch on one of two ranks.
STEP = {"dp_size": 2, "batch_num_tokens": 173, "global_batch_size": 19, "loss_scale_factor": 20}


def config_of_verl(info):
    if not importlib.util.find_spec("verl"):
        return SimpleNamespace(
            **ACTOR,
            clip_ratio=0.2,
            policy_loss=SimpleNamespace(**POLICY),
            global_batch_info=dict(info),
        )
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    settings = {
        "strategy": "fsdp",
        "rollout_n": 1,
        "ppo_micro_batch_size_per_gpu": 4,
        "policy_loss": PolicyLossConfig(**POLICY),
    }
    return ActorConfig(**settings, global_batch_info=dict(info), **ACTOR)


def spec_of_verl(name, mode, c, info):
    """(what verl's loss is, its denominator)"""
    low, high = c["clip_ratio_low"], c["clip_ratio_high"]
    spec = {
        "vanilla": Spec("clip", low, high, c["clip_ratio_c"], bounds=FAR), "gspo": Spec("clip", low, high, level="sequence-token", bounds=(-math.inf, 10.0)),
        "gpg": Spec("policy-gradient"), "cispo": Spec("cispo", cap=1 + high, low=1 - low, bounds=FAR), "dro": Spec("dro", coefficient=c["dro_beta"]),
        "clip_cov": Spec("clip-cov", low, high, share=c["clip_cov_ratio"], band=(c["clip_cov_lb"], c["clip_cov_ub"])),
        "kl_cov": Spec("kl-cov", coefficient=c["ppo_kl_coef"], share=c["kl_cov_ratio"]), "geo_mean": Spec("gmpo", low, high, level="sequence"),
        "sapo": Spec("sapo", tau=(c["tau_pos"], c["tau_neg"]), bounds=FAR),
        "dppo_tv": Spec("cispo", cap=c["clip_ratio_c"], trust=("tv", low, high, "old"), bounds=FAR),
        "dppo_kl": Spec("cispo", cap=c["clip_ratio_c"], trust=("kl", low, high, "old"), bounds=FAR),
    }[name]  # fmt: skip
    own = "seq-mean-token-mean" if name in ("sapo", "geo_mean") else mode  # whatever the mode is
    budget = info.get("loss_scale_factor", T) if own.endswith("norm") else None
    D = info.get("batch_num_tokens" if own == "token-mean" else "global_batch_size")
    D = (
        None
        if D is None or name == "geo_mean"
        else (1 if own == "token-sum" else D * (budget or 1)) / info["dp_size"]
    )
    return (
        replace(
            spec,
            aggregate="constant" if budget else own,
            max_tokens=budget,
            count_empty=name == "geo_mean",
        ),
        D,
    )


def metrics_of_verl(name, data, c, result):
    """Of the tokens of the mask; those of a loss alone only where verl itself is there."""
    r = result.log_ratio.clamp(*FAR).exp()
    if "dppo" in name:
        marked = ~result.kept, (r > c["clip_ratio_c"]) & result.kept
    elif name == "vanilla":
        marked = (
            result.clipped_low | result.clipped_high,
            (r > c["clip_ratio_c"]) & (data.advantages[data.mask] < 0),
        )
    else:
        return {}
    return dict(
        zip(
            ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"),
            (m.double().mean() for m in marked),
            strict=True,
        )
    )


def of_verl(objective, row):
    """Our loss of verl's name, or of an objective; what is masked may be NaN."""
    name, mode, c, info = row["name"], row["mode"], CONSTANTS, STEP if row["step"] else {}
    config, data = config_of_verl(info), drawn(row["far"] is True)
    if row["far"] is None:
        data = replace(data, advantages=-data.advantages)
    spec, D = spec_of_verl(name, mode, c, info)
    fields: dict[str, Any] = {"normalizer": D}
    weights = data.weights if row["weights"] else None
    if row["weights"]:
        logs = torch.where(data.mask, (data.weights.double() + 1e-10).log(), 0.0).sum(
            1
        ) / data.mask.sum(1).clamp(min=1)
        fields["weights"] = logs.exp() if name == "geo_mean" else data.weights

    def hidden(x):
        return x if x is None else torch.where(data.mask, x, math.nan)

    def ours(x):
        loss, metrics = verl.policy_loss(objective)(
            hidden(data.old), x, hidden(data.advantages), data.mask, mode, config, hidden(weights)
        )
        loss += 0.0  # verl adds the KL and the entropy where the loss is
        return loss, metrics

    def itself(x):
        given = [None if x is None else x.double() for x in (data.old, data.advantages, weights)]
        return core().get_policy_loss_fn(name)(
            given[0], x, given[1], data.mask, mode, config, given[2]
        )

    def metrics(results, logps):
        return metrics_of_verl(name, data, c, results[0])

    return Case(ours, spec, one(data, **fields), metrics, itself, data.logps)


def core():
    pytest.importorskip("verl", minversion="0.9.0", exc_type=ImportError)
    return importlib.import_module("verl.trainer.ppo.core_algos")


VERL = pairs(
    name=verl.LOSSES, mode=verl.AGGREGATES, weights=(False, True), step=(False, True), far=(False, True, None),
)  # fmt: skip


@parametrize("backend", ["torch", "liger", "triton"])
def test_verl_fused_forward(backend):
    """verl's forward of a Qwen2 calls our head with each impl_backend: log-probs, entropies and all
    gradients are those of the model's logits in float64.
    """
    pytest.importorskip("verl", minversion="0.9.1", exc_type=ImportError)
    transformers = pytest.importorskip("transformers")
    dense_common = importlib.import_module("verl.models.transformers.dense_common")
    name = "triton" if backend == "triton" else "torch"
    forward = getattr(dense_common, f"forward_with_{name}_backend")
    config = transformers.Qwen2Config(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.Qwen2ForCausalLM(config)
    exact_model = transformers.Qwen2ForCausalLM(config).double()
    exact_model.load_state_dict(model.state_dict())
    model._verl_fused_kernels_backend = backend
    ids = torch.randint(V, (1, 30))
    labels = ids.roll(-1, -1)
    weights = torch.linspace(-1, 2, 30, dtype=torch.float64)

    with verl.bind(strict=True) as slots:
        out = forward(model, input_ids=ids, temperature=0.7, shift_labels=labels, return_dict=True)
        logps, entropy = out.log_probs.view(-1), out.entropy.view(-1)
        loss = (logps * weights).sum() + (entropy * weights.flip(0)).sum()
        loss.backward()
    assert slots.counts == {"fused": 1}

    log_p = (exact_model(input_ids=ids).logits[0] / 0.7).log_softmax(-1)
    exact_logps = log_p.gather(-1, labels[0, :, None])[:, 0]
    exact_entropy = -(log_p.exp() * log_p).sum(-1)
    exact_loss = (exact_logps * weights).sum() + (exact_entropy * weights.flip(0)).sum()
    exact_loss.backward()
    torch.testing.assert_close(logps.double(), exact_logps, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=2e-5, atol=2e-5)
    for (name, x), y in zip(model.named_parameters(), exact_model.parameters(), strict=True):
        tolerance = 2e-5 * float(y.grad.abs().max())
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=2e-5, atol=tolerance, msg=name)


@pytest.fixture
def registry(monkeypatch):
    """A stand-in for verl, which has all its losses but one, as an older verl."""
    losses = dict.fromkeys([name for name in verl.LOSSES if name != "dro"], len)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with without_trainers("verl"):
        register = lambda name: lambda f: losses.setdefault(name, f)  # noqa: E731
        stand_in(
            "verl.trainer.ppo.core_algos",
            POLICY_LOSS_REGISTRY=losses,
            register_policy_loss=register,
        )
        yield losses


@parametrize("row", VERL, ids=label)
def test_verl(registry, lots_in_order, row):
    case = of_verl(row["name"], row)
    (_, metrics), _ = check(case)
    assert all(type(value) is float for value in metrics.values())


@parametrize("row", VERL, ids=label)
def test_verl_itself(lots_in_order, row):
    core()
    check_itself(of_verl(row["name"], row))


def test_verls_registry(registry, monkeypatch):
    """One for every name of verl's, every preset with verl's numbers, and some that verl has not;
    verl's own and ours stay.
    """
    before = dict(registry)
    names = verl.register()
    assert (
        {f"fused_{name}" for name in (*before, "dapo", "grpo", "vespo", "luspo")}
        <= {*names}
        == {*registry} - {*before}
    )
    assert all(registry[name] is f for name, f in before.items())
    for name in names:
        given = DATA.advantages, MASK, "token-mean", config_of_verl(STEP)
        slopes = value_and_gradient(
            lambda x, n=name, given=given: registry[n](DATA.old, x, *given), DATA.logps
        )[1]
        assert torch.isfinite(slopes).all() and slopes.any(), name


@parametrize("version, want", [("0.9.0", "seq-mean-token-mean"), ("0.9.1", "token-mean")])
def test_gspo_aggregates_as_this_verl_does(registry, monkeypatch, version, want):
    """Before 0.9.1 its mode has no effect."""
    monkeypatch.setattr(metadata, "version", lambda _: version)
    verl._gspo_by_sequence.cache_clear()
    assert verl.objective_of("gspo", config_of_verl({}), "token-mean").aggregate == want
    verl._gspo_by_sequence.cache_clear()


def test_these_are_all_losses_of_verl():
    """One that a new verl adds is noticed here."""
    assert {name for name in core().POLICY_LOSS_REGISTRY if not name.startswith("fused_")} == {
        *verl.LOSSES,
        "bypass_mode",
    }


def test_sets_from_the_non_tensor_batch():
    """They are cut and reordered with the batch, and go to the tokens that were sampled."""
    np = pytest.importorskip("numpy")
    mask, record = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 0]]), np.empty(3, dtype=object)
    record[:] = [[[4, 1], [7]], None, [[2, 6, 8]]]
    data = SimpleNamespace(
        batch={"response_mask": mask}, non_tensor_batch={"sampling_mask": record}
    )
    kept = [[i for i in row if i >= 0] for row in verl.kept_sets(data).padded().tolist()]
    assert (
        kept == [[4, 1], [], [7], [], [], [], [2, 6, 8], [], []]
        and verl.kept_sets(data, "other") is None
    )
    record[0] = [[2]] * 4
    refused((lambda: verl.kept_sets(data), r"lists\[0\] has 4 records, but generated marks"))


# ---- slime

LENGTHS = [12, 5, 0, 9, 7]
#: Samples 0, 1 and 3, 4 are of one rollout each.
SHARED = (9.0, 9.0, 1.0, 11.0, 11.0)
SLIME = {
    "grpo": ({}, Spec("clip", 0.2, 0.28)), "dual clip": ({"eps_clip_c": 1.6, "entropy_coef": 0.05}, Spec("clip", 0.2, 0.28, 1.6, entropy_coef=0.05)),
    "gspo": ({"advantage_estimator": "gspo", "eps_clip_high": None}, Spec(level="sequence")),
    "cispo": ({"advantage_estimator": "cispo"}, Spec("cispo", cap=1.28, low=0.8)),
    "rollout log-probs": ({"use_rollout_logprobs": True}, Spec("clip", 0.2, 0.28)),
    "k2": ({"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k2", "entropy_coef": 0.03}, Spec("clip", 0.2, 0.28, beta=0.2, kl="k2", entropy_coef=0.03)),
    "low_var_kl": ({"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "low_var_kl"}, Spec("clip", 0.2, 0.28, beta=0.2, clamp=10.0)),
    "unbiased k3": ({"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "use_unbiased_kl": True},
                    Spec("clip", 0.2, 0.28, beta=0.3, kl_weighting="ratio")),
}  # fmt: skip


def slime_args(**changes):
    off = (
        "use_kl_loss",
        "use_rollout_logprobs",
        "use_unbiased_kl",
        "use_tis",
        "use_opsm",
        "get_mismatch_metrics",
    )
    defaults = {"advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "entropy_coef": 0.0,
                "kl_loss_coef": 0.0, "kl_loss_type": "k1"}  # fmt: skip
    return SimpleNamespace(**dict.fromkeys(off, False) | defaults | changes)


def scores_of(logits):
    """Log-probs of token 1 at each response position, and entropies, packed with a prompt of two
    tokens before each.
    """
    p, at = torch.log_softmax(logits[0], -1), torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    rows = [p[at[b] + 2 * b + 1 : at[b] + 2 * b + 1 + n] for b, n in enumerate(LENGTHS)]
    return {"log_probs": [x[:, 1] for x in rows], "entropy": [-(x.exp() * x).sum(-1) for x in rows]}


def slime_step(scores=scores_of):
    """(logits, a batch of three rollouts of five samples, the third empty)"""
    logits = torch.randn(
        1, sum(LENGTHS) + 2 * len(LENGTHS), V, generator=torch.Generator().manual_seed(2)
    )
    now, row = scores_of(logits)["log_probs"], [*zip(LENGTHS, range(5), strict=True)]
    old = [
        (p + DATA.old[b, :n].abs().clamp(max=0.5) * (-1) ** b).clamp(max=-0.1)
        for p, (n, b) in zip(now, row, strict=True)
    ]
    batch = {
        "log_probs": old, "rollout_log_probs": [p - 0.15 for p in old], "ref_log_probs": [p + 0.2 for p in now], "response_lengths": LENGTHS,
        "loss_masks": [MASK[(0, 1, 2, 4, 6)[b], :n].float() for n, b in row], "advantages": [DATA.advantages[b, :n] for n, b in row],
        "total_lengths": [n + 2 for n in LENGTHS], "unconcat_tokens": [torch.zeros(n + 2, dtype=torch.int64) for n in LENGTHS],
    }  # fmt: skip
    stand_in(
        "slime.backends.megatron_utils.loss", get_rollout_top_p_logprob_kwargs=lambda args, batch: {},
        get_log_probs_and_entropy=lambda logits, **_: (None, scores(logits)),
    )  # fmt: skip
    return logits, batch


def sum_of_sample_mean(x, batch):
    return (x * torch.cat([m / D for m, D in zip(batch["loss_masks"], SHARED, strict=True)])).sum()


def of_slime(what):
    """Each sample has a denominator of its own, which rollouts share."""
    (changes, spec), (logits, batch) = SLIME[what], slime_step()
    args, old = (
        slime_args(**changes),
        batch["rollout_log_probs" if what == "rollout log-probs" else "log_probs"],
    )
    rollout = batch["rollout_log_probs"]
    if what == "gspo":  # a batch without what is not needed
        del batch["rollout_log_probs"], batch["ref_log_probs"]

    def parts(x):
        scored = scores_of(x)
        for b, D in enumerate(SHARED):
            fields = {
                "advantages": batch["advantages"][b],
                "mask": batch["loss_masks"][b] != 0,
                "old_logps": old[b],
                "entropy": scored["entropy"][b],
            }
            fields |= {"ref_logps": batch["ref_log_probs"][b]} if spec.beta else {}
            yield (
                scored["log_probs"][b][None],
                {name: v[None] for name, v in fields.items()} | {"normalizer": D},
            )

    def metrics(found, logits):
        def total(of):
            return sum(
                of(result).double().sum() / D for result, D in zip(found, SHARED, strict=True)
            )

        loss, kl = sum(r.loss for r in found).detach(), total(lambda r: r.kl)
        bonus = sum_of_sample_mean(torch.cat(scores_of(logits)["entropy"]), batch)
        named = {
            "loss": loss, "entropy_loss": bonus, "pg_loss": loss - spec.beta * kl + spec.entropy_coef * bonus, "ppo_kl": total(lambda r: -r.log_ratio),
            "pg_clipfrac": total(lambda r: r.clipped_low | r.clipped_high),
        } | ({"kl_loss": kl} if spec.beta else {})  # fmt: skip
        if "rollout_log_probs" in batch:
            apart = torch.cat([(o - q).abs() for o, q in zip(old, rollout, strict=True)])
            named["train_rollout_logprob_abs_diff"] = sum_of_sample_mean(apart, batch)
        return named

    def ours(x):
        return slime.policy_loss()(args, batch, x, lambda v: sum_of_sample_mean(v, batch))

    return Case(ours, replace(spec, aggregate="token-sum"), parts, metrics, leaf=logits)


@parametrize("what", SLIME)
def test_slime(what):
    (_, metrics), _ = check(of_slime(what))
    assert not any(value.requires_grad for value in metrics.values())


# ---- prime-rl: changes of the preset, and what it is; the KL of the first two is to the sampler

PRIME_RL = {
    "dppo_tv": ({}, Spec("importance-sampling", trust=("tv", 0.2, 0.2, "old"), beta=2e-3, kl="k2")),
    "ipo": ({}, Spec("importance-sampling", trust=("symmetric-tv", 0.1, 0.1, "old"), beta=2e-3, kl="k2")),
    "cispo": ({"surrogate": Cispo(1.2)}, Spec("cispo", cap=1.2)), "grpo": ({"beta": 0.2, "surrogate": Clip(0.1, 0.3)}, Spec("clip", 0.1, 0.3, beta=0.2)),
}  # fmt: skip


@parametrize("name, b", [(name, b) for name in PRIME_RL for b in (0, 1, 2, 4, 5, 7)])
def test_prime_rl(name, b):
    """A sequence at a time, weighted or not; a weight of a token is one of all its terms."""
    stand_in("prime_rl.trainer.rl.loss", LossOutputs=SimpleNamespace)
    (changes, spec), w = PRIME_RL[name], 1.7 if b % 2 else None
    reference = DATA.ref if name in ("cispo", "grpo") else DATA.sampler

    def ours(x):
        out = prime_rl.loss(SimpleNamespace(
            trainer_logprobs=x[0], inference_logprobs=DATA.sampler[b], ref_logprobs=DATA.ref[b], advantages=DATA.advantages[b],
            loss_mask=MASK[b], loss_weights=None if w is None else torch.full((T,), w),
        ), objective=name, changes=changes)  # fmt: skip
        return out.loss, out.metrics

    def parts(x):
        fields = {"advantages": A, "mask": MASK, "old_logps": SAMPLER} | (
            {"ref_logps": reference} if spec.beta else {}
        )
        return [
            (x, {name: v[b : b + 1] for name, v in fields.items()} | {"normalizer": 1 / (w or 1.0)})
        ]

    def metrics(results, logps):
        d, (found,) = (logps - SAMPLER[b])[0][MASK[b]], results
        left = ~found.kept if spec.trust else found.clipped_low | found.clipped_high
        return {"mismatch_kl": (d.exp() - d - 1).mean(), "is_masked": left.double().mean()}

    check(
        Case(ours, replace(spec, aggregate="token-sum"), parts, metrics, leaf=DATA.logps[b : b + 1])
    )


@parametrize("how", ["all", "sequence", "tokens"])
@parametrize("name", PRIME_RL)
def test_prime_rl_on_policy(name, how):
    """Marked tokens have a ratio of 1 with its gradient; the KL still compares with the sampler."""
    stand_in("prime_rl.trainer.rl.loss", LossOutputs=SimpleNamespace)
    (changes, spec), b = PRIME_RL[name], 2
    marks = torch.arange(T) % 2 == 0 if how == "tokens" else torch.ones(T, dtype=torch.bool)
    own = {} if how == "all" else {"on_policy": marks if how == "tokens" else True}
    reference = DATA.ref if name in ("cispo", "grpo") else DATA.sampler

    def ours(x):
        out = prime_rl.loss(SimpleNamespace(
            trainer_logprobs=x[0], inference_logprobs=DATA.sampler[b], ref_logprobs=DATA.ref[b], advantages=DATA.advantages[b],
            loss_mask=MASK[b], loss_weights=None, **own,
        ), objective=name, changes=changes, on_policy=how == "all")  # fmt: skip
        return out.loss

    fields = {"advantages": A, "mask": MASK, "old_logps": SAMPLER}
    fields |= {"ref_logps": reference} if spec.beta else {}
    of_sequence = {field: x[b : b + 1] for field, x in fields.items()}
    of_sequence["on_policy"] = marks[None]

    def exact_loss(x):
        return exact(replace(spec, aggregate="token-sum"), x, **of_sequence, normalizer=1.0).loss

    leaf = DATA.logps[b : b + 1]
    assert_same(value_and_gradient(ours, leaf), value_and_gradient(exact_loss, leaf, torch.float64))


# ---- nothing to train on, and what is refused


def of_verls_config(info, mode):
    return lambda: verl.policy_loss("vanilla")(
        DATA.old, DATA.logps, DATA.advantages, MASK, mode, config_of_verl(info)
    )


def of_openrlhfs_options(**options):
    return lambda: openrlhf.PolicyLoss(**options)(DATA.logps, DATA.old, DATA.advantages, MASK)


def test_prime_rl_centers_no_marked_tokens():
    stand_in("prime_rl.trainer.rl.loss", LossOutputs=SimpleNamespace)
    inputs = SimpleNamespace(
        trainer_logprobs=DATA.logps[0],
        inference_logprobs=DATA.sampler[0],
        ref_logprobs=None,
        advantages=DATA.advantages[0],
        loss_mask=MASK[0],
        loss_weights=None,
        on_policy=True,
    )
    refused((lambda: prime_rl.loss(inputs, score_centering=True), "score_centering is True"))


def test_refused(registry):
    """Options that would be read as something else than the trainer does, or that nobody has
    defined.
    """
    theirs = type(
        "PolicyLoss", (), {name: 0.2 for name in openrlhf.FIELDS}
    )()  # which renames its arguments again
    adding, level = (
        Objective.preset("grpo", aggregate="token-sum", beta=0.1),
        {"is_correction_level": "token"},
    )
    refused(
        (lambda: openrlhf.PolicyLoss.like(theirs), "PolicyLoss has no is_correction_level"),
        (of_openrlhfs_options(dual_clip=1.1), r"dual_clip=1\.1: a value below"),
        (of_openrlhfs_options(is_correction_level="seq", is_correction_mode="clip"), "only the ratio of a token can be clamped"),
        (of_openrlhfs_options(**level | {"is_correction_gating": "tv"}), "has an upper bound only"),
        (of_openrlhfs_options(is_correction_level="off", **VLLM), "one option of two versions"),
        (lambda: skyrl.policy_loss("clip_cov"), "not linear in the advantage"), (lambda: skyrl.policy_loss(adding), "adds KL and entropy itself"),
        (lambda: verl.policy_loss(adding), "adds KL and entropy itself"), (of_verls_config({}, "x"), "loss_agg_mode='x'"),
        (of_verls_config({"dp_size": 2}, "token-mean"), "batch_num_tokens=None: with dp_size=2"),
        *((lambda change=change: slime.objective_of(slime_args(**change)), message) for change, message in (
            ({"use_tis": True}, "use_tis=True"), ({"use_opsm": True}, "use_opsm=True"),
            ({"use_kl_loss": True, "use_unbiased_kl": True, "advantage_estimator": "gspo"}, "use_unbiased_kl"),
        )),
    )  # fmt: skip
