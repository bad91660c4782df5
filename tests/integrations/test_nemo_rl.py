"""NeMo-RL: its whole loss and its distillation loss from logits, compared with float64 transcriptions, and its filter with its
own code if that is on the path."""

from __future__ import annotations

import enum
import math
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels import Objective
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.formulas.surrogates import Cispo, Clip, PolicyGradient
from grpo_kernels.integrations import nemo_rl
from support.pairs import label, pairs
from support.trainers import DATA, MASK, B, T, V, assert_same, clipped, log_softmax_of, stand_in, their_file, value_and_gradient

parametrize = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def nemo(stand_ins):
    stand_in(
        "nemo_rl.algorithms.loss.interfaces", LossType=enum.Enum("LossType", ["TOKEN_LEVEL", "SEQUENCE_LEVEL"]),
        LossInputType=enum.Enum("LossInputType", ["LOGIT", "LOGPROB", "DISTILLATION"]),
        MetricNormalizer=enum.Enum("MetricNormalizer", ["TOKENS", "SEQUENCES", "NONE"]),
    )  # fmt: skip


def preset(name, **changes):
    return Objective.preset(name, numerics="nemo-rl", **changes)


#: As NeMo-RL's TrainingSamplingParams; the temperature divides the logits before the loss sees them.
KEPT = SimpleNamespace(top_k=12, top_p=0.8, temperature=1.0)
#: name -> objective, options of PolicyLoss.
NEMO = {
    "tokens": (preset("dapo"), {}),
    "sequences, gspo": (preset("gspo"), {}),
    "sequences, gspo, corrected": (
        preset("gspo"),
        {"importance": {"level": "sequence", "mode": "truncate", "low": 0.5, "high": 1.1}},
    ),
    "kl, truncated weights": (
        preset("grpo", beta=0.1), {"importance": {"mode": "truncate", "low": 0.8, "high": 1.3}},
    ),
    "sequences, kl, icepop": (
        preset("grpo", beta=0.1, aggregate="seq-mean-token-mean"),
        {"importance": {"mode": "mask", "low": 0.7, "high": 1.4}},
    ),
    "seq-mask-tis": (
        preset("dapo"), {"importance": {"mode": "sequence-mask", "low": 0.9, "high": 1.1}},
    ),
    "cispo": (preset("cispo"), {}),
    "reinforce": (preset("reinforce", beta=0.0, aggregate="token-mean"), {}),
    "forced on policy": (
        preset("gspo"),
        {"force_on_policy_ratio": True, "importance": {"level": "sequence", "mode": "truncate", "low": 0.8, "high": 1.3}},
    ),
    "on-policy kl": (
        preset("grpo", beta=0.3, kl=Kl("k3", "score", clamp_log=0.6, clamp=0.1)),
        {"use_on_policy_kl_approximation": True},
    ),
    "positive examples": (
        preset("dapo", beta=0.05), {"positive_example_nll_weight": 0.4},
    ),
    "filtered": (preset("dapo", beta=0.0), {"sampling_params": KEPT}),
    "filtered, kl over the vocabulary": (
        preset("grpo", beta=0.3),
        {"sampling_params": KEPT, "importance": {"mode": "truncate", "low": 0.8, "high": 1.3}},
    ),
    "filtered, sequences, on-policy kl": (
        preset("gspo", beta=0.3, kl=Kl("k3", "score", clamp_log=0.6, clamp=10.0)),
        {"sampling_params": SimpleNamespace(top_k=6, top_p=1.0, temperature=0.6), "use_on_policy_kl_approximation": True},
    ),
    "filtered, forced on policy": (
        preset("dapo", beta=0.2),
        {"sampling_params": KEPT, "force_on_policy_ratio": True, "positive_example_nll_weight": 0.4,
         "importance": {"mode": "truncate", "low": 0.8, "high": 1.3}},
    ),
}  # fmt: skip


def k3(x, y):
    """Of KL(x || y), from tokens of x."""
    return (y - x).exp() - (y - x) - 1


def filtered(logits, top_k=None, top_p=1.0, **_):
    """Logits with -inf where NeMo-RL's filter drops them: the k largest, then of these the largest with the mass p."""
    ascending, order = logits.sort(-1)
    if top_k is not None:
        ascending = ascending.masked_fill(ascending < ascending[..., -top_k, None], -torch.inf)
    keep = ascending.softmax(-1).cumsum(-1) > 1 - top_p
    keep[..., -1] = True
    return torch.empty_like(logits).scatter(-1, order, ascending.masked_fill(~keep, -torch.inf))


def nemo_loss(x, fields, toks, seqs, objective, options):
    """ClippedPGLossFn in float64, of logits [B, T + 1, V]."""
    curr = whole = log_softmax_of(x[:, :-1], fields["input_ids"][:, 1:])[0]
    more = {}
    if "sampling_params" in options:
        curr = log_softmax_of(filtered(x[:, :-1], **vars(options["sampling_params"])), fields["input_ids"][:, 1:])[0]
        dropped = curr.isinf() & (MASK * fields["sample_mask"][:, None] != 0)
        curr, more["outside_sampling_set"] = torch.where(curr.isinf(), 0.0, curr), dropped.sum() / toks
    old, ref, gen, A = (fields[n][:, 1:].double() for n in (
        "prev_logprobs", "reference_policy_logprobs", "generation_logprobs", "advantages"))  # fmt: skip
    samples, forced = fields["sample_mask"], options.get("force_on_policy_ratio", False)
    m, n = MASK * samples[:, None], MASK.sum(1, keepdim=True)
    sequences, (low, high) = objective.level == "sequence", objective.surrogate.ratio_bounds

    def mean(v):
        return (v * m).sum() / toks

    def reduce(v):
        if objective.aggregate == "token-mean":
            return mean(v)
        return ((v * MASK).sum(1) / (n[:, 0] + 1e-8) * samples).sum() / seqs

    old = curr.detach() if forced else old
    d = curr - old
    if sequences and not forced:
        d = ((d * MASK).sum(1, keepdim=True) / (n + 1e-8)).expand(B, T)
    r = d.exp()
    clamped = r if forced else r.clamp(low, high)
    value = clipped(r, A, 1 - low, high - 1)[0] if not isinstance(objective.surrogate, Cispo) else -clamped.detach() * A * curr
    if isinstance(objective.surrogate, PolicyGradient):
        r = clamped = curr
        value = -A * curr
    w = (((old - gen) * m).sum(1, keepdim=True) if sequences else old - gen).exp()
    importance = options.get("importance")
    if importance is not None:
        lo, hi = importance["low"], importance["high"]
        if importance["mode"] == "sequence-mask":
            G = (((old - gen) * MASK).sum(1) / (n[:, 0] + 1e-8)).exp()
            keep = (G >= lo) & (G <= hi)
            more["is_oob_ratio"], w = (~keep * samples).sum() / seqs, w * keep[:, None]
        else:
            outside = (w > hi) | (w < lo)
            more["is_oob_ratio"] = mean(outside.expand(B, T).double())
            w = w.clamp(lo, hi) if importance["mode"] == "truncate" else w * ~outside
        value = value * w
    kl_weight, spec = (whole - whole.detach()).exp(), objective.kl_spec
    e = (ref - whole).clamp(-spec.clamp_log, spec.clamp_log)
    if options.get("use_on_policy_kl_approximation"):
        kl_weight = (whole - gen).exp()
        kl_weight = torch.where(e == ref - whole, kl_weight, kl_weight.detach())
    penalty = reduce((kl_weight * (e.exp() - e - 1)).clamp(-spec.clamp, spec.clamp)) if objective.beta else torch.zeros(())
    correct = m * (fields["rewards"] > 0)[:, None]
    nll = -(curr * correct).sum() / correct.sum() * bool(options.get("positive_example_nll_weight"))
    loss = reduce(value) + objective.beta * penalty + options.get("positive_example_nll_weight", 0.0) * nll
    mixed, inside = (old.exp() / 2 + gen.exp() / 2).log(), m != 0
    js = sum(k3(mixed, p) for p in (old, gen)) / 2
    return loss, more | {
        "loss": loss, "kl_penalty": penalty, "positive_nll_loss": nll, "num_valid_samples": samples.sum(),
        "probs_ratio": mean(r), "probs_ratio_clamped": mean(clamped), "probs_ratio_min": r[inside].min(),
        "probs_ratio_max": r[inside].max(), "probs_ratio_clamped_min": clamped[inside].min(),
        "probs_ratio_clamped_max": clamped[inside].max(), "token_mult_prob_error": mean((gen - old).abs().exp()),
        "gen_kl_error": mean(k3(gen, old)), "policy_kl_error": mean(k3(old, gen)), "js_divergence_error": mean(js),
        "sampling_importance_ratio": (w[:, 0] * samples).sum() / seqs if sequences else mean(w),
        "approx_entropy": -mean((curr - gen).exp() * curr),
    }  # fmt: skip


TOKENS, SEQUENCES = torch.tensor(47.0), torch.tensor(9.0)


def step():
    """Logits [B, T + 1, V], and a micro-batch beside them."""
    g = torch.Generator().manual_seed(4)
    logits, ids = torch.randn(B, T + 1, V, generator=g), torch.randint(V, (B, T + 1), generator=g)
    logps = log_softmax_of(logits[:, :-1], ids[:, 1:])[0].float()
    columns = {
        "token_mask": MASK.float(), "advantages": DATA.advantages, "prev_logprobs": logps + DATA.old - DATA.logps,
        "reference_policy_logprobs": logps + DATA.ref - DATA.logps, "generation_logprobs": logps + DATA.sampler - DATA.logps,
    }  # fmt: skip
    return logits, {name: torch.nn.functional.pad(x, (1, 0)) for name, x in columns.items()} | {
        "input_ids": ids, "sample_mask": torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]), "rewards": torch.tensor([1.0, -1.0, 0.5, 2.0, 0.0]),
    }  # fmt: skip


@parametrize("inplace", [False, True])
@parametrize("what", NEMO)
def test_whole_loss(what, inplace):
    """Value, gradient and metrics, and what its workers rescale those by that were divided by 1. In place there is no second
    [B, S, V]."""
    (objective, options), (logits, fields) = NEMO[what], step()
    loss_fn = nemo_rl.PolicyLoss(objective, **options, inplace=inplace)
    given = {name: x for name, x in fields.items() if name != "prev_logprobs" or "forced on policy" not in what}
    assert loss_fn.input_type.name == "LOGIT"
    (loss, metrics), gradient = value_and_gradient(
        lambda x: loss_fn(logits=x * 1.0, data=given, global_valid_seqs=SEQUENCES, global_valid_toks=TOKENS),
        logits,
        torch.float32,
    )
    (want, named), expected = value_and_gradient(
        lambda x: nemo_loss(x, fields, TOKENS, SEQUENCES, objective, options), logits, torch.float64
    )
    assert_same((loss, gradient), (want, expected))
    if "sampling_params" in options:
        assert 0.1 < metrics["outside_sampling_set"] < 0.9
    assert not gradient[:, -1].any() and not gradient[3].any()
    assert metrics == pytest.approx({k: float(v.detach()) for k, v in named.items()}, rel=1e-4, abs=1e-6)
    doubled = nemo_loss(logits.double(), fields, 2 * TOKENS, 4 * SEQUENCES, objective, options)[1]
    for name, kind in loss_fn.metric_normalizations.items():
        factor = {"TOKENS": 2, "SEQUENCES": 4, "NONE": 1}[kind.name]
        if name not in ("loss", "kl_penalty"):
            assert float(doubled[name].detach()) * factor == pytest.approx(float(named[name].detach()), rel=1e-6), name
    assert {*loss_fn.metric_normalizations} == {*named}
    of_loss = {"token-mean": "TOKENS", "seq-mean-token-mean": "SEQUENCES"}[objective.aggregate]
    assert {loss_fn.metric_normalizations[name].name for name in ("loss", "kl_penalty")} == {of_loss}


def test_the_gradient_may_overwrite_the_logits():
    logits, fields = step()
    made = logits.requires_grad_() * 1.0
    loss = nemo_rl.PolicyLoss(preset("dapo"), inplace=True)(made, fields, SEQUENCES, TOKENS)[0]
    assert torch.autograd.grad(loss, made)[0].data_ptr() == made.data_ptr()


def clipped_pg(**changes):
    """The fields of a ClippedPGLossFn, with its defaults."""
    none = ("ratio_clip_c", "truncated_importance_sampling_type", "truncated_importance_sampling_ratio",
            "truncated_importance_sampling_ratio_min")  # fmt: skip
    off = ("disable_ppo_ratio", "use_cispo", "sequence_level_importance_ratios", "use_importance_sampling_correction",
           "use_on_policy_kl_approximation", "force_on_policy_ratio")  # fmt: skip
    defaults = {
        **dict.fromkeys(none), **dict.fromkeys(off, False), "ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "reference_policy_kl_penalty": 0.01,
        "reference_policy_kl_type": "k3", "kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0, "positive_example_nll_weight": 0.0,
        "loss_type": SimpleNamespace(name="TOKEN_LEVEL"),
    }  # fmt: skip
    return SimpleNamespace(**defaults | changes)


TIS = {"use_importance_sampling_correction": True}
LIKE = [
    ({}, preset("grpo", beta=0.01), None),
    ({"ratio_clip_max": 0.28, "ratio_clip_c": 3.0}, preset("grpo", surrogate=Clip(0.2, 0.28, 3.0)), None),
    ({"sequence_level_importance_ratios": True, "loss_type": SimpleNamespace(name="SEQUENCE_LEVEL")}, preset("gspo"), None),
    ({"use_cispo": True}, preset("cispo", aggregate="token-mean"), None),
    ({"disable_ppo_ratio": True}, preset("reinforce", aggregate="token-mean"), None),
    (TIS | {"truncated_importance_sampling_ratio": 1.3}, preset("grpo"), {"mode": "truncate", "low": 0.0, "high": 1.3}),
    (TIS | {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio_min": 0.9},
     preset("grpo"), {"mode": "sequence-mask", "low": 0.9, "high": math.inf}),
    (TIS, preset("grpo"), {"mode": "truncate", "low": 0.0, "high": math.inf}),
]  # fmt: skip


@parametrize("changes, objective, importance", LIKE, ids=[", ".join(changes) or "defaults" for changes, _, _ in LIKE])
def test_constants_are_taken_over(changes, objective, importance):
    like = nemo_rl.PolicyLoss.like(
        clipped_pg(**changes, force_on_policy_ratio=False, positive_example_nll_weight=0.2), inplace=True
    )
    assert like.objective == objective and like.importance == (importance and {"level": "token"} | importance)
    assert like.inplace and not like.force_on_policy_ratio and like.positive_example_nll_weight == 0.2


def test_kl_of_the_metrics_is_that_of_the_loss():
    """Of a token's own ratio; and a log-prob that is far off is a large number in the metrics, not inf."""
    logits, fields = step()
    objective = Objective.preset("vespo", aggregate="token-mean", beta=0.3, kl=Kl("k3", weighting="ratio"))
    _, metrics = nemo_rl.PolicyLoss(objective)(logits, fields, SEQUENCES, TOKENS)
    L = log_softmax_of(logits[:, :-1], fields["input_ids"][:, 1:])[0]
    e, x = fields["reference_policy_logprobs"][:, 1:] - L, L - fields["prev_logprobs"][:, 1:]
    want = ((e.exp() - e - 1) * x.exp() * MASK * fields["sample_mask"][:, None]).sum() / TOKENS
    assert metrics["kl_penalty"] == pytest.approx(float(want), rel=1e-4)
    fields["prev_logprobs"][0, 1] = -400.0
    _, metrics = nemo_rl.PolicyLoss(Objective.preset("dapo"))(logits, fields, SEQUENCES, TOKENS)
    assert all(math.isfinite(value) for value in metrics.values())


def test_refused():
    weighted = Objective.preset("grpo", beta=0.1, kl=Kl("k3", weighting="ratio"))
    for call, message in (
        (lambda: nemo_rl.PolicyLoss(Objective.preset("dr_grpo")), "aggregate='constant'"),
        (lambda: nemo_rl.PolicyLoss(weighted, sampling_params=KEPT), "the KL runs over the vocabulary, its weight over the sets"),
        (lambda: nemo_rl.PolicyLoss(Objective())(SimpleNamespace(placements=()), {}, TOKENS, TOKENS), "logits is a DTensor"),
        (lambda: nemo_rl.PolicyLoss.like(clipped_pg(ratio_clip_c=1.1)), r"ratio_clip_c=1\.1: below 1 \+ ratio_clip_max"),
        (lambda: nemo_rl.PolicyLoss.like(clipped_pg(ratio_clip_c=3.0, disable_ppo_ratio=True)), "bounds no ratio"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    assert nemo_rl.PolicyLoss(weighted, sampling_params=SimpleNamespace(top_k=-1, top_p=1.0)).rules is None


@parametrize("itself", [False, True], ids=["transcription", "itself"])
@parametrize("top_k, top_p", [(5, 1.0), (None, 0.7), (9, 0.6), (-1, 0.9)])
def test_what_a_filter_keeps(monkeypatch, top_k, top_p, itself):
    """The ids over which REINFORCE has a gradient, and the targets that are dropped."""
    logits, fields = step()
    want = filtered(logits, None if top_k == -1 else top_k, top_p)
    if itself:
        want = their_file("nemo_rl.algorithms.logits_sampling_utils", monkeypatch).apply_top_k_top_p(logits, top_k, top_p)[0]
    kept = want[:, :-1] > -torch.inf
    mask = (MASK & (fields["sample_mask"] != 0)[:, None]) & (fields["advantages"][:, 1:] != 0)
    reinforce = nemo_rl.PolicyLoss(
        preset("reinforce", beta=0.0, aggregate="token-mean"), sampling_params=SimpleNamespace(top_k=top_k, top_p=top_p)
    )
    (_, metrics), gradient = value_and_gradient(lambda x: reinforce(x, fields, SEQUENCES, TOKENS), logits, torch.float32)
    lacking = ~kept.gather(-1, fields["input_ids"][:, 1:, None])[..., 0]
    assert torch.equal((gradient[:, :-1] != 0)[mask], (kept & ~lacking[..., None])[mask]) and lacking[mask].any()
    assert metrics["outside_sampling_set"] == pytest.approx(float((lacking & mask).sum() / TOKENS))


# ---- distillation

K = 5


def distilled(logits, data, kl_type, weight, outside, tokens):
    """NeMo-RL's lines, in the dtype of the logits; an id counts as often as it is listed."""
    ids, whole = data["teacher_topk_indices"], torch.log_softmax(logits, -1)
    q = torch.log_softmax(data["teacher_topk_logits"].to(logits), -1)[:, :-1]
    p = (whole.gather(-1, ids) if outside else torch.log_softmax(logits.gather(-1, ids), -1))[:, :-1]
    forward, reverse = (q.exp() * (q - p)).sum(-1), (p.exp() * (p - q)).sum(-1)
    if outside:
        rest = (whole.exp() * whole).sum(-1)[:, :-1] - (p.exp() * p).sum(-1)
        reverse = reverse + rest + 100 * (1 - p.exp().sum(-1))
    share = {"forward": 1.0, "reverse": 0.0}.get(kl_type, weight)
    value = share * forward + (1 - share) * reverse
    if "token_mask" not in data:
        return value.mean()
    return (value * data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum() / (tokens + 1e-8)


@parametrize(
    "row",
    pairs(kl_type=("forward", "reverse", "mixed"), outside=(False, True), repeated=(False, True), masked=(False, True)),
    ids=label,
)
def test_distillation(row):
    """Value and gradient; rows that do not count may hold anything."""
    from grpo_kernels.integrations.nemo_rl import DistillationLoss

    logits, fields = step()
    g = torch.Generator().manual_seed(2)
    top, ids = (2 * torch.randn(B, T + 1, V, generator=g)).topk(K)
    if row["repeated"]:
        ids[..., 3] = ids[..., 1]
        ids[0, 1], top = 7, 2 * torch.randn(top.shape, generator=g)
    data = {"teacher_topk_logits": top, "teacher_topk_indices": ids, "input_ids": fields["input_ids"]}
    data |= {name: fields[name] for name in ("token_mask", "sample_mask") if row["masked"]}
    settings = row["kl_type"], 0.3, row["outside"]
    loss_fn = DistillationLoss.like(SimpleNamespace(kl_type=settings[0], mixed_kl_weight=0.3, zero_outside_topk=settings[2]))
    assert loss_fn.input_type.name == "LOGIT"
    want = value_and_gradient(lambda x: distilled(x, data, *settings, TOKENS), logits, torch.float64)
    found = [logits.clone()]
    if row["masked"]:
        found.append(
            torch.where(
                (torch.nn.functional.pad(data["token_mask"][:, 1:] * data["sample_mask"][:, None], (0, 1)) != 0)[..., None],
                logits,
                torch.nan,
            )
        )
    for given in found:
        (loss, metrics), gradient = value_and_gradient(lambda x: loss_fn(x, data, SEQUENCES, TOKENS), given, torch.float32)
        assert_same((loss, gradient), want)
        assert metrics == {"loss": float(loss.detach()), "num_valid_samples": B}


def test_refused_settings_of_distillation():
    from grpo_kernels.integrations.nemo_rl import DistillationLoss

    logits, _ = step()
    nothing = {"teacher_topk_indices": torch.zeros(B, T + 1, 0, dtype=torch.int64)}
    for call, message in (
        (lambda: DistillationLoss("jsd"), r"kl_type='jsd': it must be one of forward"), (lambda: DistillationLoss("mixed", 1.5), r"mixed_kl_weight=1\.5"),
        (lambda: DistillationLoss()(logits, nothing, TOKENS, TOKENS), "topk must be positive"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
