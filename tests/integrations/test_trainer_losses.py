"""Policy losses with the arguments of OpenRLHF, SkyRL, slime and prime-rl, in value, gradient and metrics: against transcriptions
in float64, and against the trainer's own file where it is on the path (see support/trainers.py)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels import Objective
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.formulas.surrogates import Cispo, Clip, Sapo
from grpo_kernels.integrations import openrlhf, prime_rl, skyrl, slime
from support.trainers import (
    DATA,
    MASK,
    B,
    T,
    V,
    assert_same,
    clipped,
    double,
    mean_of,
    stand_in,
    their_file,
    their_file_beside,
    value_and_gradient,
)  # fmt: skip

parametrize = pytest.mark.parametrize

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins")

OLD, REF, SAMPLER, A = double(DATA.old, DATA.ref, DATA.sampler, DATA.advantages)
N = MASK.sum(1, keepdim=True)


def assert_metrics(got, want):
    assert {k: v if v is None else float(v) for k, v in got.items()} == {
        k: v if v is None else pytest.approx(float(v), rel=1e-4, abs=1e-5) for k, v in want.items()
    }


# ---- OpenRLHF

#: By the arguments of both versions, of 0.11.0, of 0.11.2.
VLLM = {"enable_vllm_is_correction": True}
OPENRLHF = {
    "ppo": {}, "dual clip": {"clip_eps_low": 0.1, "clip_eps_high": 0.28, "dual_clip": 1.5}, "sequence mean": {"token_level_loss": False},
    "gspo": {"policy_loss_type": "gspo", "clip_eps_low": 0.15}, "gspo, corrected": {"policy_loss_type": "gspo", **VLLM},
    "tis": {**VLLM, "vllm_is_truncated_threshold": [0.8, 1.2]},
    "icepop": {**VLLM, "vllm_is_truncated_threshold": [0.7, 1.4], "vllm_is_correction_type": "icepop"},
    "seq-mask-tis": {**VLLM, "vllm_is_truncated_threshold": [0.9, 1.1], "vllm_is_correction_type": "seq-mask-tis"},
}  # fmt: skip
SINCE = {
    f"{level} {mode} {gating}".strip(): {
        "is_correction_level": level, "is_correction_mode": mode, "is_correction_gating": gating, "is_correction_threshold": bounds, **more,
    }
    for level, mode, gating, bounds, more in (
        ("off", "mask", "ratio", (0.5, 5.0), {"dual_clip": 1.5}), ("token", "clip", "ratio", (0.8, 1.2), {}),
        ("token", "mask", "ratio", (0.7, 1.4), {}), ("seq", "mask", "ratio", (0.9, 1.1), {"token_level_loss": False}),
        ("seq", "mask", "ratio", (0.5, 5.0), {"policy_loss_type": "gspo"}), ("token", "mask", "binary_kl", (0.0, 0.01), {}),
        ("seq", "mask", "binary_kl", (0.0, 0.006), {}), ("token", "mask", "tv", (0.0, 0.05), {}), ("seq", "mask", "tv", (0.0, 0.06), {}),
    )
}  # fmt: skip
COUNTS = ({}, {"dp_size": 2, "batch_num_tokens": 61.0, "global_batch_size": 17.0})


def openrlhf_loss(options, logps, counts):
    low, high = options.get("clip_eps_low", 0.2), options.get("clip_eps_high", 0.2)
    gspo, since = options.get("policy_loss_type") == "gspo", "is_correction_level" in options
    level, mode, gating = (options.get(f"is_correction_{name}") for name in ("level", "mode", "gating"))
    bounds = options.get("is_correction_threshold")
    if not since:
        kinds = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
        level, mode = kinds[options.get("vllm_is_correction_type", "tis")]
        level, gating = level if options.get("enable_vllm_is_correction") else "off", "ratio"
        bounds = options.get("vllm_is_truncated_threshold")
    if gspo:
        x = logps - (OLD if level == "off" else SAMPLER)
        r = ((x * MASK).sum(1, keepdim=True) / N.clamp(min=1)).exp() * MASK
    else:
        r = (logps - OLD).clamp(-20, 20).exp()
    loss, bound = clipped(r, A, low, high, options.get("dual_clip"))
    kl = share = None
    if level != "off" and not gspo:
        w, (lo, hi), p, q = (OLD - SAMPLER).exp(), bounds, SAMPLER.exp(), OLD.exp()
        measured = {
            "binary_kl": p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log(), "tv": (p - q).abs(), "ratio": OLD - SAMPLER,
        }[gating]  # fmt: skip
        measured = (measured * MASK).sum(1, keepdim=True) / N if level == "seq" else measured
        measured = measured.exp() if gating == "ratio" else measured
        keep = (measured >= lo) & (measured <= hi)
        share = mean_of((~keep).double()) if level == "token" else (~keep).double().mean()
        loss, kl = loss * (w.clamp(lo, hi) if mode == "clip" else torch.where(keep, w, 0.0)), mean_of(SAMPLER - OLD)
    dp = counts.get("dp_size", 1)
    if options.get("token_level_loss", True) and not gspo:
        total = (loss * MASK).sum() / counts.get("batch_num_tokens", MASK.sum()) * dp
    else:
        rows = (loss * MASK).sum(1) / (N[:, 0] + 1e-8)
        total = rows.sum() / counts.get("global_batch_size", MASK.any(1).sum()) * dp
    return (total, mean_of(bound.double()), mean_of(OLD - logps.detach()), kl, *([share] if since else []))


@pytest.fixture(params=["transcription", "itself"])
def openrlhfs(request, monkeypatch):
    """Its loss of (options, log-probs, counts)."""
    if request.param == "transcription":
        return openrlhf_loss
    utils = their_file("openrlhf.models.utils", monkeypatch, deepspeed={})
    PolicyLoss = their_file_beside("openrlhf.models.loss", utils).PolicyLoss

    def theirs(options, logps, counts):
        if ("is_correction_level" in options) != hasattr(PolicyLoss(), "is_correction_level"):
            pytest.skip("this version has other arguments")
        loss = PolicyLoss(**options)
        like = openrlhf.PolicyLoss.like(loss)(DATA.logps, DATA.old, DATA.advantages, MASK.float(), DATA.sampler)
        own = openrlhf.PolicyLoss(**options)(DATA.logps, DATA.old, DATA.advantages, MASK.float(), DATA.sampler)
        assert [x if x is None else float(x) for x in like[:4]] == [x if x is None else float(x) for x in own[:4]]
        return loss(logps, OLD, A, MASK.double(), SAMPLER, **counts)

    return theirs


@parametrize("counts", COUNTS, ids=("its own counts", "of a step"))
@parametrize("what", [*OPENRLHF, *SINCE])
def test_openrlhf(openrlhfs, what, counts):
    options = (OPENRLHF | SINCE)[what]
    ours = openrlhf.PolicyLoss(**options)
    mine = value_and_gradient(
        lambda x: ours(x, DATA.old, DATA.advantages, MASK.float(), DATA.sampler, **counts), DATA.logps, torch.float32
    )
    want = value_and_gradient(lambda x: openrlhfs(options, x, counts), DATA.logps, torch.float64)
    assert_same(mine, want)
    assert_metrics(dict(enumerate(mine[0])), dict(enumerate(want[0])))


@parametrize("cases", [OPENRLHF, SINCE], ids=("before", "since"))
def test_openrlhfs_cases_differ(cases):
    losses = [float(openrlhf_loss(options, DATA.logps.double(), {})[0]) for options in cases.values()]
    assert len({round(x, 7) for x in losses}) == len(losses)


def test_openrlhf_of_nothing_is_0():
    """Nor does a count of 0, with or without a tensor around it, make the denominator 0."""
    empty = openrlhf.PolicyLoss()(DATA.logps.clone().requires_grad_(), DATA.old, DATA.advantages, torch.zeros(B, T))
    assert float(empty[0].detach()) == 0 and float(empty[1]) == 0 and empty[0].requires_grad
    for none in (0, 0.0, torch.tensor(0)):
        for tokens, name in ((True, "batch_num_tokens"), (False, "global_batch_size")):
            loss = openrlhf.PolicyLoss(token_level_loss=tokens)
            assert float(loss(DATA.logps, DATA.old, DATA.advantages, torch.zeros(B, T), dp_size=2, **{name: none})[0]) == 0


@parametrize("options, message", [
    ({"policy_loss_type": "x"}, "policy_loss_type='x'"), ({"vllm_is_correction_type": "x"}, "vllm_is_correction_type='x'"),
    ({"dual_clip": 1.1}, r"dual_clip=1\.1: below"), ({"is_correction_level": "x"}, "is_correction_level='x'"),
    ({"is_correction_level": "token", "is_correction_gating": "x"}, "is_correction_gating='x'"),
    ({"is_correction_level": "seq", "is_correction_mode": "clip"}, "only the ratio of a token can be clamped"),
    ({"is_correction_level": "token", "is_correction_gating": "tv"}, "has an upper bound only"),
    ({"is_correction_level": "off", **VLLM}, "one option of two versions"), (VLLM, "rollout_log_probs is None"),
])  # fmt: skip
def test_openrlhf_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        openrlhf.PolicyLoss(**options)(DATA.logps, DATA.old, DATA.advantages, MASK)


def test_a_policy_loss_of_another_openrlhf_is_refused_with_the_reason():
    """Of one that renames its arguments again."""
    theirs = type("PolicyLoss", (), {name: 0.2 for name in openrlhf.FIELDS})()
    with pytest.raises(ValueError, match=r"PolicyLoss has no is_correction_level.*OpenRLHF 0\.10\.4, .*0\.11\.2 are known"):
        openrlhf.PolicyLoss.like(theirs)


# ---- SkyRL

HOME = "skyrl.backends.skyrl_train.utils"


def of_skyrl(preset, **changes):
    return Objective.preset(preset, numerics="skyrl", beta=0.0, aggregate="token-sum", **changes)


#: Its function, our objective, changes of its configuration.
SKYRL = {
    "dual_clip": ("ppo_policy_loss", of_skyrl("ppo", surrogate=Clip(0.1, 0.28, 1.6)),
                  {"policy_loss_type": "dual_clip", "eps_clip_low": 0.1, "eps_clip_high": 0.28, "clip_ratio_c": 1.6}),
    "regular": ("ppo_policy_loss", "grpo", {"policy_loss_type": "regular"}),
    "gspo": ("gspo_policy_loss", "gspo", {}), "sapo": ("sapo_policy_loss", of_skyrl("sapo", surrogate=Sapo(0.9, 1.3)), {}),
    "cispo": ("compute_policy_loss_cispo", of_skyrl("cispo", surrogate=Cispo(1.3, 0.75)), {}),
    "dppo": ("dppo_policy_loss", "dppo_tv", {}), "rollout_is": ("rollout_is_policy_loss", "rollout_is", {}),
}  # fmt: skip


def skyrl_config(changes, anchor="old"):
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
    keep = (torch.arange(B) != 1).to(loss)[:, None]
    return loss * (old - rollout).exp().clamp(max=1.2), mask * keep, {"tis": 1.0}


def skyrl_loss(what, x, config, rollout, correct=corrected):
    to_rollout = what in ("dppo", "rollout_is") or (what == "cispo" and config.cispo.cispo_anchor == "rollout")
    d = (x - (rollout if to_rollout and rollout is not None else OLD)).clamp(-20, 20)
    low, high, r, more = config.eps_clip_low, config.eps_clip_high, d.exp(), {}
    moved = x.detach().exp() - (OLD if rollout is None else rollout).exp()
    if what in ("dual_clip", "regular"):
        loss, bound = clipped(r, A, low, high, config.clip_ratio_c if what == "dual_clip" else None)
    elif what == "gspo":
        own = x - x.detach() + ((d * MASK).sum(1, keepdim=True) / N.clamp(min=1)).detach()
        loss, bound = clipped(own.exp(), A, low, high)
    elif what == "sapo":
        tau = torch.where(A > 0, config.sapo.tau_pos, config.sapo.tau_neg).double()
        loss, bound = -torch.sigmoid(tau * (r - 1)) * 4 / tau * A, torch.zeros(B, T)
    elif what == "cispo":
        inner = r.clamp(1 - config.cispo.cispo_eps_clip_low, 1 + config.cispo.cispo_eps_clip_high).detach()
        loss, bound, kept = -A * inner * x, inner != r, r.detach()[MASK]
        more = {
            "ratio_mean": kept.mean(),
            "ratio_clamped_mean": inner[MASK].mean(),
            "ratio_max": kept.max(),
            "ratio_min": kept.min(),
        }
    elif what == "dppo":
        bound = ~torch.where(A > 0, moved <= 0.2, moved >= -0.2)
        loss = -r * A * ~bound
    else:
        bound = ~((r > 1 - low) & (r < 1 + high))
        loss = -(r.detach() * ~bound) * A * x
    loss, mask, metrics = correct(loss, OLD, rollout, MASK.double(), None)
    # Over the tokens that are there before the correction.
    named = {"clip_ratio": mean_of(bound.double()), **{f"cispo/{name}": value for name, value in more.items()}}
    return (loss * mask).sum(), named | metrics


@parametrize("itself", [False, True], ids=["transcription", "itself"])
@parametrize("rollout", [None, DATA.sampler], ids=["without a rollout", "rollout"])
@parametrize("what", SKYRL)
def test_skyrl(what, rollout, itself, monkeypatch):
    function, objective, changes = SKYRL[what]
    if what == "rollout_is" and rollout is None:
        pytest.skip("it has no meaning without")
    config, exact, theirs = skyrl_config(changes), None if rollout is None else rollout.double(), skyrl_loss
    if itself:
        for needed in ("loguru", "jaxtyping", "ray"):
            pytest.importorskip(needed, reason=f"{needed}, which SkyRL imports, is not installed")
        utils = their_file(f"{HOME}.torch_utils", monkeypatch, skyrl__train__config={"AlgorithmConfig": object})
        stand_in(f"{HOME}.off_policy_correction_utils", apply_off_policy_correction=corrected)
        ppo = their_file_beside(f"{HOME}.ppo_utils", utils)
        if not hasattr(ppo, function):  # before 0.3.0 it has no DPPO
            pytest.skip("this version has no such loss")

        def theirs(what, x, config, rollout):
            return getattr(ppo, function)(x, OLD, A, config, MASK.double(), rollout)

    stand_in(f"{HOME}.off_policy_correction_utils", apply_off_policy_correction=corrected)
    ours = skyrl.policy_loss(objective)
    mine = value_and_gradient(
        lambda x: ours(x, DATA.old, DATA.advantages, config, MASK.float(), rollout), DATA.logps, torch.float32
    )
    want = value_and_gradient(lambda x: theirs(what, x, config, exact), DATA.logps, torch.float64)
    assert_same(mine, want)
    assert all(isinstance(v, float) for v in mine[0][1].values()) and {*want[0][1]} <= {*mine[0][1]}
    assert all(name in want[0][1] or name.startswith("cispo/") for name in mine[0][1])  # which SkyRL 0.3.0 has not yet
    if rollout is None or what == "cispo":  # with one, ours is over the tokens that the correction leaves
        assert_metrics({name: mine[0][1][name] for name in want[0][1]}, want[0][1])


def test_skyrls_cispo_is_anchored_where_it_is_told():
    uncorrected = lambda loss, old, q, mask, _: (loss, mask, {})  # noqa: E731
    stand_in(f"{HOME}.off_policy_correction_utils", apply_off_policy_correction=uncorrected)
    config, ours = skyrl_config({}, anchor="rollout"), skyrl.policy_loss(SKYRL["cispo"][1])
    args = DATA.old, DATA.advantages, config, MASK.float()
    mine = value_and_gradient(lambda x: ours(x, *args, DATA.sampler), DATA.logps, torch.float32)
    want = value_and_gradient(lambda x: skyrl_loss("cispo", x, config, SAMPLER, uncorrected), DATA.logps, torch.float64)
    assert_same(mine, want)
    assert_metrics(mine[0][1], want[0][1])
    empty = ours(DATA.logps, *args[:3], torch.zeros(B, T), DATA.sampler)[1]
    assert empty["clip_ratio"] == 0 and empty["cispo/ratio_max"] == 1
    with pytest.raises(ValueError, match="rollout_logprobs=None"):
        ours(DATA.logps, *args)
    config.off_policy_correction.tis_ratio_type = "token"
    with pytest.raises(ValueError, match=r"tis_ratio_type='token'.*double-count"):
        ours(DATA.logps, *args, DATA.sampler)


@pytest.fixture
def registry():
    losses = {}
    stand_in(f"{HOME}.off_policy_correction_utils", apply_off_policy_correction=lambda loss, old, q, mask, _: (loss, mask, {}))
    stand_in(f"{HOME}.ppo_utils", register_policy_loss=lambda name: lambda f: losses.setdefault(name, f))
    return losses


def test_skyrls_registry(registry):
    names = skyrl.register("ours_")
    assert names == [*registry] and {"ours_dapo", "ours_gspo", "ours_vespo"} <= {*names}
    assert not {"ours_clip_cov", "ours_kl_cov", "ours_dro", "ours_a2po", "ours_distillation"} & {*names}
    for bad, message in (
        ("clip_cov", "not linear in the advantage"), (Objective(), 'aggregate="token-sum"'),
        (Objective.preset("grpo", aggregate="token-sum", beta=0.1), "adds KL and entropy itself"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            skyrl.policy_loss(bad)


@parametrize("factor", [1.0, 1.02])
def test_skyrls_own_loss_is_the_witness_of_an_untested_version(registry, factor, monkeypatch):
    """Its masked sum of a clipped surrogate, of advantages that are divided already, before the first loss of any name of ours."""
    from importlib import metadata

    monkeypatch.setattr(metadata, "version", lambda _: "99.1")
    monkeypatch.delenv("GRPO_KERNELS_ANY_VERSION", raising=False)
    calls = []

    def own(log_probs, old, advantages, config, mask=None, rollout=None):
        assert config.policy_loss_type == "regular"
        calls.append(config)
        loss = clipped((log_probs - old).exp(), advantages, config.eps_clip_low, config.eps_clip_high)[0]
        return factor * (loss * mask).sum(), {}

    stand_in(f"{HOME}.ppo_utils", ppo_policy_loss=own)
    skyrl.register()
    config = skyrl_config({"policy_loss_type": "fused_cispo", "eps_clip_low": 0.17, "eps_clip_high": 0.31})
    given = DATA.logps.clone().requires_grad_(), DATA.old, DATA.advantages, config, MASK.float()
    if factor != 1:
        with pytest.raises(RuntimeError, match=r"skyrl 99\.1.*ppo_policy_loss is not what it was: values"):
            registry["fused_cispo"](*given)
        return
    with pytest.warns(UserWarning, match=r"skyrl 99\.1.*They agree"):
        registry["fused_cispo"](*given)
    registry["fused_sapo"](*given)
    assert len(calls) == 1 and config.policy_loss_type == "fused_cispo"


# ---- slime

LENGTHS = [7, 3, 0, 5, 6]
SLIME = {
    "grpo": {}, "dual clip": {"eps_clip_c": 1.6, "entropy_coef": 0.05}, "gspo": {"advantage_estimator": "gspo", "eps_clip_high": None},
    "cispo": {"advantage_estimator": "cispo"}, "rollout log-probs": {"use_rollout_logprobs": True},
    "k2": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k2", "entropy_coef": 0.03},
    "low_var_kl": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "low_var_kl"},
    "unbiased k3": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "use_unbiased_kl": True},
}  # fmt: skip


def slime_args(**changes):
    defaults = {
        "advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "entropy_coef": 0.0,
        "use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "k1", "use_rollout_logprobs": False,
        "use_unbiased_kl": False, "use_tis": False, "use_opsm": False, "get_mismatch_metrics": False,
    }  # fmt: skip
    return SimpleNamespace(**defaults | changes)


def scores_of(logits, lengths):
    """Log-probs of token 1 at each response position, and entropies, packed with a prompt of two tokens before each."""
    p, at = torch.log_softmax(logits[0], -1), torch.tensor([0, *lengths]).cumsum(0).tolist()
    rows = [p[at[b] + 2 * b + 1 : at[b] + 2 * b + 1 + n] for b, n in enumerate(lengths)]
    return {"log_probs": [x[:, 1] for x in rows], "entropy": [-(x.exp() * x).sum(-1) for x in rows]}


@dataclass(frozen=True)
class Slime:
    """A batch of three rollouts of five samples, which share denominators; the third sample is empty."""

    logits: Tensor
    batch: dict[str, Any]
    scored: list[int]  # lengths of what is scored

    @classmethod
    def made(cls):
        logits = torch.randn(1, sum(LENGTHS) + 2 * B, V, generator=torch.Generator().manual_seed(2))
        now, masks = scores_of(logits, LENGTHS)["log_probs"], [row[:n].float() for row, n in zip(MASK, LENGTHS, strict=True)]
        old = [(p + o[:n].abs().clamp(max=0.5) * s).clamp(max=-0.1) for p, o, s, n in zip(
            now, DATA.old, (-1, 1, 1, -1, 1), LENGTHS, strict=True)]  # fmt: skip
        batch = {
            "log_probs": old, "rollout_log_probs": [p - 0.15 for p in old], "ref_log_probs": [p + 0.2 for p in now], "loss_masks": masks,
            "advantages": [row[:n] for row, n in zip(DATA.advantages, LENGTHS, strict=True)], "response_lengths": LENGTHS,
            "total_lengths": [n + 2 for n in LENGTHS], "unconcat_tokens": [torch.zeros(n + 2, dtype=torch.int64) for n in LENGTHS],
        }  # fmt: skip
        made = cls(logits, batch, [*LENGTHS])
        stand_in(
            "slime.backends.megatron_utils.loss", get_rollout_top_p_logprob_kwargs=lambda args, batch: {},
            get_log_probs_and_entropy=lambda logits, **_: (None, scores_of(logits, made.scored)),
        )  # fmt: skip
        return made


def sum_of_sample_mean(x):
    """Samples 0, 1 and 3, 4 are of one rollout each."""
    masks = torch.cat([row[:n] / D for n, D, row in zip(LENGTHS, (9.0, 9.0, 1.0, 11.0, 11.0), MASK, strict=True)])
    return (x * masks).sum()


def slime_loss(args, batch, logits):
    scored = scores_of(logits, LENGTHS)
    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"]
    L, O, advantages = (torch.cat(x).double() for x in (scored["log_probs"], old, batch["advantages"]))
    kl = O - L
    if args.advantage_estimator == "gspo":
        parts = zip(kl.split(LENGTHS), batch["loss_masks"], strict=True)
        kl = torch.cat([((x * m).sum() / m.sum().clamp(min=1)).expand_as(x) for x, m in parts])
    r, high = (-kl).exp(), args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    pg, bound = clipped(r, advantages, args.eps_clip, high, args.eps_clip_c)
    if args.advantage_estimator == "cispo":
        pg = -r.clamp(1 - args.eps_clip, 1 + high).detach() * advantages * L
    named = {"pg_loss": sum_of_sample_mean(pg), "entropy_loss": sum_of_sample_mean(torch.cat(scored["entropy"]).double())}
    loss = named["pg_loss"] - args.entropy_coef * named["entropy_loss"]
    if args.use_kl_loss:
        d = L - torch.cat(batch["ref_log_probs"]).double()
        value = {"k1": d, "k2": d * d / 2}.get(args.kl_loss_type, (-d).exp() - 1 + d)
        value = value * (L - O).exp() if args.use_unbiased_kl else value
        named["kl_loss"] = sum_of_sample_mean(value.clamp(-10, 10) if args.kl_loss_type == "low_var_kl" else value)
        loss = loss + args.kl_loss_coef * named["kl_loss"]
    if "rollout_log_probs" in batch:
        apart = (O - torch.cat(batch["rollout_log_probs"]).double()).abs() * (not args.use_rollout_logprobs)
        named["train_rollout_logprob_abs_diff"] = sum_of_sample_mean(apart)
    return loss, named | {
        "loss": loss, "pg_clipfrac": sum_of_sample_mean(bound.double()), "ppo_kl": sum_of_sample_mean(kl),
    }  # fmt: skip


@parametrize("what", SLIME)
def test_slime(what):
    args, step = slime_args(**SLIME[what]), Slime.made()
    if what == "gspo":  # a batch without what is not needed
        del step.batch["rollout_log_probs"], step.batch["ref_log_probs"]
    mine = value_and_gradient(
        lambda x: slime.policy_loss()(args, step.batch, x, sum_of_sample_mean), step.logits, torch.float32
    )
    want = value_and_gradient(lambda x: slime_loss(args, step.batch, x), step.logits, torch.float64)
    assert_same(mine, want)
    assert_metrics(mine[0][1], want[0][1])
    assert not any(value.requires_grad for value in mine[0][1].values())


def test_slimes_kl_of_the_metrics_is_that_of_the_loss():
    """With a ratio summed over the sequence it is a token's own ratio that weighs its KL."""
    step = Slime.made()
    objective = Objective.preset("vespo", aggregate="token-sum", beta=0.3, kl=Kl("k3", weighting="ratio"))
    loss, metrics = slime.policy_loss(objective)(slime_args(), step.batch, step.logits.requires_grad_(), sum_of_sample_mean)
    now, old, ref = (torch.cat(x).double() for x in (
        scores_of(step.logits, LENGTHS)["log_probs"], step.batch["log_probs"], step.batch["ref_log_probs"]))  # fmt: skip
    want = sum_of_sample_mean(((ref - now).exp() - (ref - now) - 1) * (now - old).exp())
    assert float(metrics["kl_loss"]) == pytest.approx(float(want.detach()), rel=1e-5) and loss.requires_grad
    step.scored[0] = 3
    with pytest.raises(ValueError, match="context parallelism has cut them"):
        slime.policy_loss(objective)(slime_args(), step.batch, step.logits, sum_of_sample_mean)
    with pytest.raises(ValueError, match="aggregate='token-mean'"):
        slime.policy_loss(Objective())


@parametrize("samples", [0, 1])
def test_slime_without_tokens_has_a_graph_and_all_metrics(samples):
    """A sample of none, and no samples at all, of which slime's reducer makes a plain 0: the same metrics as on other ranks."""
    step = Slime.made()
    home, nothing = sys.modules["slime.backends.megatron_utils.loss"], [torch.zeros(0)] * samples
    home.get_log_probs_and_entropy = lambda logits, **_: (None, {"log_probs": nothing, "entropy": nothing})
    batch = {name: nothing if isinstance(x[0], Tensor) else [] for name, x in step.batch.items()}
    args, reduce = slime_args(use_kl_loss=True, kl_loss_coef=0.1), (lambda v: v.sum()) if samples else (lambda v: 0)
    (loss, metrics), gradient = value_and_gradient(
        lambda x: slime.policy_loss()(args, batch, x, reduce), step.logits, torch.float32
    )
    assert loss == 0 and not gradient.any() and not any(float(v) for v in metrics.values())
    assert {"kl_loss", "train_rollout_logprob_abs_diff"} <= {*metrics}


@parametrize("change, message", [
    ({"use_tis": True}, "use_tis=True"), ({"use_opsm": True}, "use_opsm=True"), ({"eps_clip_c": 1.1}, r"eps_clip_c=1\.1"),
    ({"custom_pg_loss_reducer_function_path": "a.b"}, "custom_pg_loss_reducer_function_path='a.b'"),
    ({"use_kl_loss": True, "use_unbiased_kl": True, "kl_loss_type": "low_var_kl"}, "use_unbiased_kl"),
    ({"use_kl_loss": True, "use_unbiased_kl": True, "advantage_estimator": "gspo"}, "use_unbiased_kl"),
])  # fmt: skip
def test_slime_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        slime.objective_of(slime_args(**change))


# ---- prime-rl

PRIME_RL = {
    "dppo_tv": {}, "ipo": {}, "cispo": {"changes": {"surrogate": Cispo(1.2)}},
    "grpo": {"changes": {"beta": 0.2, "surrogate": Clip(0.1, 0.3)}},  # whose KL is to the reference
}  # fmt: skip


@parametrize("weighted", [False, True])
@parametrize("name", PRIME_RL)
def test_prime_rl(name, weighted):
    stand_in("prime_rl.trainer.rl.loss", LossOutputs=SimpleNamespace)
    w = 0.5 + torch.rand(B, T) if weighted else torch.ones(B, T)

    def inputs(x, b):
        return SimpleNamespace(
            trainer_logprobs=x[b], inference_logprobs=DATA.sampler[b], ref_logprobs=DATA.ref[b], advantages=DATA.advantages[b],
            loss_mask=MASK[b], loss_weights=w[b] if weighted else None,
        )  # fmt: skip

    def ours(x):
        outs = [prime_rl.loss(inputs(x, b), objective=name, **PRIME_RL[name]) for b in range(B)]
        return sum(out.loss for out in outs), [out.metrics for out in outs]

    def theirs(x):
        d, moved, old = x - SAMPLER, x.detach().exp() - SAMPLER.exp(), REF - x
        keep = {"dppo_tv": torch.where(A > 0, moved <= 0.2, moved >= -0.2), "ipo": moved.abs() <= 0.1}.get(name)
        if keep is not None:
            loss = -A * d.exp() * keep + 1e-3 * d * d
        elif name == "cispo":
            loss, keep = -d.exp().clamp(max=1.2).detach() * A * x, ~((d.exp() > 1.2) & (A > 0))
        else:
            loss, bound = clipped(d.exp(), A, 0.1, 0.3)
            loss, keep = loss + 0.2 * (old.exp() - old - 1), ~bound
        named = [{"mismatch_kl": (d.exp() - d - 1)[b][MASK[b]].sum() / N[b, 0].clamp(min=1),
                  "is_masked": (~keep)[b][MASK[b]].sum() / N[b, 0].clamp(min=1)} for b in range(B)]  # fmt: skip
        return (w * loss * MASK).sum(), named

    mine, want = value_and_gradient(ours, DATA.logps, torch.float32), value_and_gradient(theirs, DATA.logps, torch.float64)
    assert_same(mine, want)
    for b in range(B):
        if MASK[b].any():
            assert_metrics(mine[0][1][b], want[0][1][b])
