"""NeMo-RL: its whole loss and its distillation loss from logits, compared with float64 (the
oracle's formulas, NeMo-RL's metrics written down), and its filter with its own code if that is on
the path.
"""

from __future__ import annotations

import enum
import math
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels import Clip, Kl, Objective, PolicyGradient, TokenBatch
from grpo_kernels.integrations import nemo_rl
from support.oracle import Spec
from support.pairs import label, pairs
from support.trainers import (
    DATA,
    MASK,
    B,
    T,
    V,
    assert_same,
    exact,
    log_softmax_of,
    refused,
    same_metrics,
    stand_in,
    value_and_gradient,
)

parametrize = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def nemo(stand_ins):
    names = {
        "LossType": "TOKEN_LEVEL SEQUENCE_LEVEL",
        "LossInputType": "LOGIT LOGPROB",
        "MetricNormalizer": "TOKENS SEQUENCES NONE",
    }
    stand_in(
        "nemo_rl.algorithms.loss.interfaces",
        **{name: enum.Enum(name, values) for name, values in names.items()},
    )


def preset(name, **changes):
    return Objective.preset(name, numerics="nemo-rl", **changes)


def truncated(low, high, mode="truncate", **more):
    return {"importance": {"mode": mode, "low": low, "high": high, **more}}


#: As NeMo-RL's TrainingSamplingParams; the temperature divides the logits before the loss sees
#: them.
KEPT, SIX = (
    SimpleNamespace(top_k=12, top_p=0.8, temperature=1.0),
    SimpleNamespace(top_k=6, top_p=1.0, temperature=0.6),
)
MEAN, SEQUENCE, FORCED = (
    "seq-mean-token-mean",
    {"level": "sequence"},
    {"force_on_policy_ratio": True},
)
#: name -> objective, what it is, options of PolicyLoss.
NEMO = {
    "sequences, gspo, corrected": (preset("gspo", beta=0.0), Spec(level="sequence", aggregate=MEAN), truncated(0.5, 1.1, **SEQUENCE)),
    "kl, truncated weights": (preset("grpo", beta=0.1), Spec(beta=0.1), truncated(0.0, 1.3)),
    "sequences, kl, icepop": (preset("grpo", beta=0.1, aggregate=MEAN), Spec(beta=0.1, aggregate=MEAN), truncated(0.7, 1.4, "mask")),
    "seq-mask-tis": (preset("dapo"), Spec(eps_high=0.28, beta=0.01), truncated(0.9, 1.1, "sequence-mask")),
    "cispo": (preset("cispo", beta=0.0), Spec("cispo", cap=1.2, low=0.8), {}),
    "reinforce": (preset("reinforce", beta=0.0, aggregate="token-mean"), Spec("policy-gradient"), {}),
    "forced on policy": (preset("gspo", beta=0.0), Spec(aggregate=MEAN), FORCED | truncated(0.8, 1.3, **SEQUENCE)),
    "on-policy kl": (preset("grpo", beta=0.3, kl=Kl("k3", "score", clamp_log=0.6, clamp=0.1)), Spec(), {"use_on_policy_kl_approximation": True}),
    "positive examples": (preset("dapo", beta=0.05), Spec(eps_high=0.28, beta=0.05), {"positive_example_nll_weight": 0.4}),
    "filtered, kl over the vocabulary": (preset("grpo", beta=0.3), Spec(beta=0.3), {"sampling_params": KEPT, **truncated(0.8, 1.3)}),
    "filtered, a small kl": (preset("grpo", beta=1e-6), Spec(beta=1e-6), {"sampling_params": KEPT}),
    "filtered, sequences, on-policy kl": (preset("gspo", beta=0.3, kl=Kl("k3", "score", clamp_log=0.6, clamp=10.0)), Spec(level="sequence", aggregate=MEAN),
                                          {"sampling_params": SIX, "use_on_policy_kl_approximation": True}),
    "filtered, forced on policy": (preset("dapo", beta=0.2), Spec(eps_high=0.28, beta=0.2),
                                   {"sampling_params": KEPT, "positive_example_nll_weight": 0.4, **FORCED, **truncated(0.8, 1.3)}),
}  # fmt: skip
ERRORS = FORCED | {"seq_logprob_error_threshold": 1.3}
#: Samples whose ratio is 1.
MARKED = torch.tensor([True, False, True, False, True, False, False, True])
NEMO |= {
    "large errors, forced on policy": (preset("dapo", beta=0.1), Spec(eps_high=0.28, beta=0.1), ERRORS | truncated(0.8, 1.3)),
    "large errors, seq-mask-tis, forced on policy": (preset("grpo", beta=0.0), Spec(), ERRORS | truncated(0.9, 1.1, "sequence-mask")),
    "large errors, on-policy kl, forced on policy": (preset("grpo", beta=0.3), Spec(), ERRORS | {"use_on_policy_kl_approximation": True}),
    "marked samples": (preset("dapo", beta=0.1), Spec(eps_high=0.28, beta=0.1), truncated(0.8, 1.3)),
    "marked samples, sequences": (preset("gspo", beta=0.0), Spec(level="sequence", aggregate=MEAN), truncated(0.5, 1.1, **SEQUENCE)),
    "marked samples, no correction": (preset("cispo", beta=0.0), Spec("cispo", cap=1.2, low=0.8), {}),
}  # fmt: skip
#: With ratios beyond those of fp32.
NEMO |= {
    f"far, {name}": NEMO[name]
    for name in (
        "sequences, gspo, corrected",
        "kl, truncated weights",
        "sequences, kl, icepop",
        "cispo",
        "on-policy kl",
        "large errors, forced on policy",
        "marked samples",
    )
}


def filtered(logits, top_k=None, top_p=1.0, **_):
    """Logits with -inf where NeMo-RL's filter drops them:

    the k largest, then of these the largest with the mass p.
    """
    ascending, order = logits.sort(-1)
    if top_k is not None:
        ascending = ascending.masked_fill(ascending < ascending[..., -top_k, None], -torch.inf)
    keep = ascending.softmax(-1).cumsum(-1) > 1 - top_p
    keep[..., -1] = True
    return torch.empty_like(logits).scatter(-1, order, ascending.masked_fill(~keep, -torch.inf))


TOKENS, SEQUENCES = torch.tensor(47.0), torch.tensor(9.0)
SAMPLES = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
TRAINED = MASK & (SAMPLES != 0)[:, None]


def step(far=False):
    """Logits [B, T + 1, V], and a micro-batch beside them; far:

    ratios of a token, and of its sequence, beyond those of fp32.
    """
    g = torch.Generator().manual_seed(4)
    logits, ids = torch.randn(B, T + 1, V, generator=g), torch.randint(V, (B, T + 1), generator=g)
    logps = log_softmax_of(logits[:, :-1], ids[:, 1:])[0].float()
    columns = {
        "token_mask": MASK.float(), "advantages": DATA.advantages, "prev_logprobs": logps + DATA.old - DATA.logps,
        "reference_policy_logprobs": logps + DATA.ref - DATA.logps, "generation_logprobs": logps + DATA.sampler - DATA.logps,
    }  # fmt: skip
    if far:  # to the old policy, of that to the sampler, and of a token of its own
        columns["prev_logprobs"][0, 2] -= 100.0
        columns["generation_logprobs"][0, 2] -= 200.0
        columns["generation_logprobs"][5, 0] -= 95.0
    rewards = torch.tensor([1.0, -1.0, 0.5, 2.0, 3.0, 0.0, 1.0, -2.0])
    return logits, {name: torch.nn.functional.pad(x, (1, 0)) for name, x in columns.items()} | {
        "input_ids": ids, "sample_mask": SAMPLES, "rewards": rewards,
    }  # fmt: skip


def ratios(x):
    """e^x of fp32, which may be infinite."""
    return x.float().exp().double()


def importance_of(options, old, gen, sequences, trained, samples):
    """(weights, how many are outside of the bounds, in tokens or sequences):

    between the old policy and the sampler.
    """
    d, n = old - gen, MASK.sum(1, keepdim=True).clamp(min=1)
    w = (
        ratios((d * MASK).sum(1, keepdim=True) if sequences else d)
        .nan_to_num(posinf=0.0)
        .expand(B, T)
    )
    importance = options.get("importance")
    if importance is None:
        return w, None, {}
    low, high = importance["low"], importance["high"]
    if importance["mode"] == "sequence-mask":
        G = ((d * MASK).sum(1, keepdim=True) / n).exp()
        keep = (G >= low) & (G <= high)
        return (
            w * keep,
            w * keep,
            {"is_oob_ratio": ((~keep)[:, 0] * MASK.any(1) * samples).sum() / SEQUENCES},
        )
    outside = (w > high) | (w < low)
    w = w.clamp(low, high) if importance["mode"] == "truncate" else w * ~outside
    return w, w, {"is_oob_ratio": (outside * trained).sum() / TOKENS}


def errors_of(logps, gen):
    """The mean of exp |difference| of each sequence's trained tokens, [B]."""
    error = torch.where(TRAINED, (logps - gen).abs().exp(), 0.0).sum(1)
    return error / TRAINED.sum(1).clamp(min=1)


def nemo_loss(x, fields, spec, objective, options):
    """(loss, metrics) of logits [B, T + 1, V], in float64."""
    ids, named, positive = (
        fields["input_ids"][:, 1:],
        {},
        TRAINED & (fields["rewards"] > 0)[:, None],
    )
    trained, samples = TRAINED, SAMPLES
    curr = whole = log_softmax_of(x[:, :-1], ids)[0]
    if "sampling_params" in options:
        curr = log_softmax_of(
            filtered(x[:, :-1].double(), **vars(options["sampling_params"])), ids
        )[0]
        named["outside_sampling_set"] = (curr.isinf() & TRAINED).sum() / TOKENS
        curr = torch.where(curr.isinf(), 0.0, curr)
    names = ("prev_logprobs", "reference_policy_logprobs", "generation_logprobs", "advantages")
    old, ref, gen, A = (fields[name][:, 1:].double() for name in names)
    forced, sequences, detached = (
        "force_on_policy_ratio" in options,
        objective.level == "sequence",
        curr.detach(),
    )
    old = detached if forced else old
    if "on_policy" in fields:
        old = torch.where(MARKED[:, None], detached, old)
    if "seq_logprob_error_threshold" in options:
        kept = errors_of(detached, gen) <= options["seq_logprob_error_threshold"]
        trained, samples = TRAINED & kept[:, None], SAMPLES * kept
        named |= {
            "num_masked_seqs_by_logprob_error": SAMPLES.sum() - samples.sum(),
            "seq_logprob_error_valid_seqs": samples.sum(),
            "seq_logprob_error_valid_tokens": trained.sum(),
        }
    w, weights, more = importance_of(options, old, gen, sequences, trained, samples)
    nll = options.get("positive_example_nll_weight", 0.0) / positive.sum()
    D, limits = TOKENS if spec.aggregate == "token-mean" else SEQUENCES, objective.kl_spec
    clamps = {"clamp_log": limits.clamp_log, "clamp": limits.clamp, "kl_weighting": "score"}
    found = exact(
        Spec(**vars(spec) | clamps), curr, mask=trained, advantages=A, old_logps=old, ref_logps=ref if spec.beta else None, kl_logps=whole.reshape(-1),
        weights=None if weights is None else weights.reshape(-1), nll_weights=positive * nll, normalizer=float(D),
    )  # fmt: skip
    share = (
        1 / D if spec.aggregate == "token-mean" else 1 / D / MASK.sum(1, keepdim=True).clamp(min=1)
    )

    def total(v, share=1 / TOKENS):
        return (torch.where(trained, v, 0.0) * share).sum()

    loss, penalty = found.loss, total(found.kl.view(B, T), share) if spec.beta else torch.zeros(())
    if (
        "use_on_policy_kl_approximation" in options
    ):  # weighted by the ratio to the sampler, and bounded then
        e = (ref - whole).clamp(-limits.clamp_log, limits.clamp_log)
        r = (whole - gen).masked_fill(ratios(whole - gen).isinf(), -torch.inf).exp()
        r = torch.where(e == ref - whole, r, r.detach())
        penalty = total((r * (e.exp() - e - 1)).clamp(-limits.clamp, limits.clamp), share)
        loss = loss + objective.beta * penalty
    r = ratios(torch.zeros(B, T).double().masked_scatter(trained, found.log_ratio))
    clamped = r.clamp(*objective.surrogate.ratio_bounds)
    if isinstance(objective.surrogate, PolicyGradient):
        r = clamped = detached
    for name, ratio in (("probs_ratio", r), ("probs_ratio_clamped", clamped)):
        named |= {
            name: total(ratio),
            f"{name}_min": ratio[trained].min(),
            f"{name}_max": ratio[trained].max(),
        }
    return loss, named | more | {
        "loss": loss.detach(), "kl_penalty": penalty.detach(), "num_valid_samples": samples.sum(),
        "positive_nll_loss": -(detached * positive).sum() / positive.sum() * bool(nll),
        "gen_kl_error": total((old - gen).clamp(max=60).exp() - (old - gen) - 1), "approx_entropy": -total(ratios(detached - gen) * detached),
        "token_mult_prob_error": total(ratios((old - gen).abs())),
        "sampling_importance_ratio": (torch.where(MASK.any(1), w[:, 0], 1.0) * SAMPLES).sum() / SEQUENCES if sequences else total(w),
    }  # fmt: skip


@parametrize("what", NEMO)
def test_whole_loss(what):
    """Value, gradient and metrics, and what its workers rescale those by that were divided by
    something.
    """
    (objective, spec, options), (logits, fields) = NEMO[what], step("far" in what)
    loss_fn = nemo_rl.PolicyLoss(objective, **options, inplace=len(what) % 2 == 0)
    given = {
        name: x
        for name, x in fields.items()
        if name != "prev_logprobs" or "forced on policy" not in what
    }
    if "marked" in what:
        fields["on_policy"] = given["on_policy"] = MARKED.float()
        given["prev_logprobs"] = given["prev_logprobs"].masked_fill(MARKED[:, None], math.nan)
    assert loss_fn.input_type.name == "LOGIT"
    mine = value_and_gradient(
        lambda x: loss_fn(
            logits=x * 1.0, data=given, global_valid_seqs=SEQUENCES, global_valid_toks=TOKENS
        ),
        logits,
    )
    want = value_and_gradient(
        lambda x: nemo_loss(x, fields, spec, objective, options), logits, torch.float64
    )
    assert_same(mine, want)
    same_metrics(mine[0][1], want[0][1])
    kinds = {name: kind.name for name, kind in loss_fn.metric_normalizations.items()}
    assert kinds.keys() == mine[0][1].keys() and kinds["loss"] == (
        "SEQUENCES" if objective.aggregate == MEAN else "TOKENS"
    )


def test_a_geometric_mean_has_a_weight_where_its_sequence_has_none():
    old = torch.zeros(1, 1000)
    batch = TokenBatch(
        old.long(), torch.ones(1), mask=old == 0, old_logps=old, sampler_logps=old - 0.1
    )
    weights, outside = nemo_rl.PolicyLoss(
        preset("grpo"), **truncated(0.0, 2.0, level="geometric")
    )._weights(batch)
    torch.testing.assert_close(weights.expand(1, 1000), old + math.exp(0.1))
    assert not outside.any()


def test_a_token_with_an_infinite_ratio_does_not_drop_its_sequence():
    old = torch.zeros(1, 4)
    sampler = torch.tensor([[0.0, -torch.inf, 0.0, 0.0]])
    batch = TokenBatch(
        old.long(), torch.ones(1), mask=old == 0, old_logps=old, sampler_logps=sampler
    )
    weights, outside = nemo_rl.PolicyLoss(
        preset("grpo"), **truncated(0.9, 1.1, "sequence-mask")
    )._weights(batch)
    assert weights.tolist() == [[1.0, 0.0, 1.0, 1.0]] and not outside.any()


def clipped_pg(**changes):
    """The fields of a ClippedPGLossFn, with its defaults."""
    none = ("ratio_clip_c", "truncated_importance_sampling_type", "truncated_importance_sampling_ratio",
            "truncated_importance_sampling_ratio_min")  # fmt: skip
    off = ("disable_ppo_ratio", "use_cispo", "sequence_level_importance_ratios", "use_importance_sampling_correction",
           "use_on_policy_kl_approximation", "force_on_policy_ratio")  # fmt: skip
    defaults = {
        **dict.fromkeys(none), **dict.fromkeys(off, False), "ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "reference_policy_kl_penalty": 0.01,
        "reference_policy_kl_type": "k3", "kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0, "positive_example_nll_weight": 0.2,
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
    ({"disable_ppo_ratio": True, "sequence_level_importance_ratios": True}, preset("reinforce", level="sequence", aggregate="token-mean"), None),
    ({"disable_ppo_ratio": True, "ratio_clip_c": 3.0} | FORCED, preset("grpo", surrogate=Clip(0.2, 0.2, 3.0)), None),
    (TIS | {"truncated_importance_sampling_ratio": 1.3}, preset("grpo"), {"mode": "truncate", "low": 0.0, "high": 1.3}),
    (TIS | {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio_min": 0.9},
     preset("grpo"), {"mode": "sequence-mask", "low": 0.9, "high": math.inf}),
    (TIS, preset("grpo"), {"mode": "truncate", "low": 0.0, "high": math.inf}),
    (FORCED | {"seq_logprob_error_in_loss": True, "seq_logprob_error_threshold": 2.0, "positive_example_nll_weight": 0.0}, preset("grpo"), None),
]  # fmt: skip


@parametrize(
    "changes, objective, importance",
    LIKE,
    ids=[", ".join(changes) or "defaults" for changes, _, _ in LIKE],
)
def test_constants_are_taken_over(changes, objective, importance):
    like = nemo_rl.PolicyLoss.like(clipped_pg(**changes))
    assert like.objective == objective and like.importance == (
        importance and {"level": "token"} | importance
    )
    assert like.force_on_policy_ratio == (
        "force_on_policy_ratio" in changes
    ) and like.positive_example_nll_weight == changes.get("positive_example_nll_weight", 0.2)
    assert like.seq_logprob_error_threshold == changes.get("seq_logprob_error_threshold")
    assert like.requires_survivor_normalization == ("seq_logprob_error_in_loss" in changes)


def test_refused():
    weighted = Objective.preset("grpo", beta=0.1, kl=Kl("k3", weighting="ratio"))
    refused(
        (lambda: nemo_rl.PolicyLoss(Objective.preset("dr_grpo")), "aggregate='constant'"),
        (
            lambda: nemo_rl.PolicyLoss(weighted, sampling_params=KEPT),
            "the KL runs over the vocabulary, its weight over the sets",
        ),
        (
            lambda: nemo_rl.PolicyLoss.like(clipped_pg(ratio_clip_c=1.1)),
            r"ratio_clip_c=1\.1: a value below 1 \+ ratio_clip_max",
        ),
        (
            lambda: nemo_rl.PolicyLoss.like(clipped_pg(ratio_clip_c=3.0, disable_ppo_ratio=True)),
            "bounds no ratio",
        ),
        *(
            (
                lambda more=more: nemo_rl.PolicyLoss(preset("dapo"), **ERRORS | more),
                f"^seq_logprob_error_threshold={value}: {remedy}",
            )
            for more, value, remedy in (
                ({"seq_logprob_error_threshold": 0.5}, "0.5", "the mean of exp"),
                ({"force_on_policy_ratio": False}, "1.3", "it needs force_on_policy_ratio"),
                ({"positive_example_nll_weight": 0.1}, "1.3", "the counts of tokens"),
                ({"sampling_params": KEPT}, "1.3", "with sampling_params"),
            )
        ),
        (
            lambda: nemo_rl.PolicyLoss(preset("gspo"), **ERRORS),
            "^seq_logprob_error_threshold=1.3: it needs",
        ),
        (lambda: nemo_rl.DistillationLoss("jsd"), r"kl_type='jsd': it must be one of forward"),
        (
            lambda: nemo_rl.DistillationLoss("forward", topk_logits_k=0),
            r"^topk_logits_k=0: topk must be positive: set distillation\.topk_logits_k",
        ),
    )


@parametrize(
    "name, value",
    [
        ("opd_full", SimpleNamespace(enabled=True)),
        ("use_fused_linear_logprobs", True),
        ("newer", 0.5),
    ],
)
def test_every_other_option_that_is_set_is_refused(name, value):
    """And none that is not set, as in a newer NeMo-RL; attributes that follow from others are no
    options.
    """
    unset = {
        "seq_logprob_error_in_loss": False,
        "opd_full": None,
        "use_fused_linear_logprobs": False,
        "newer": 0.0,
    }
    derived = {
        "metric_normalizations": {"loss": 1},
        "input_type": 1,
        "seq_logprob_error_threshold": 2.0,
        "_cached": 3,
    }
    nemo_rl.PolicyLoss.like(clipped_pg(**unset, **derived))
    distillation = {
        "kl_type": "forward",
        "mixed_kl_weight": 0.5,
        "zero_outside_topk": False,
        "log_infinitesimal": -100,
    }
    nemo_rl.DistillationLoss.like(SimpleNamespace(**distillation, **unset))
    refused(
        (
            lambda: nemo_rl.PolicyLoss.like(clipped_pg(**unset | {name: value}, **derived)),
            f"^{name}=",
        ),
        (
            lambda: nemo_rl.DistillationLoss.like(
                SimpleNamespace(**distillation, **unset | {name: value})
            ),
            f"^{name}=",
        ),
    )


def test_errors_have_the_names_of_the_columns():
    logits, data = step()
    loss = nemo_rl.PolicyLoss(preset("grpo", beta=0.1))
    for ours, column in (
        ("old_logps", "prev_logprobs"),
        ("ref_logps", "reference_policy_logprobs"),
        ("advantages", "advantages"),
    ):
        with pytest.raises(ValueError, match=f"^{column} has shape .*input_ids") as raised:
            loss(logits, data | {column: data[column][:, 1:]}, SEQUENCES, TOKENS)
        assert ours == column or ours not in str(raised.value)  # fmt: skip


# ---- distillation

K = 5


def distilled(logits, data, kl_type, weight, outside):
    """NeMo-RL's lines, in the dtype of the logits; an id counts as often as it is listed."""
    ids, whole = data["teacher_topk_indices"], torch.log_softmax(logits, -1)
    q = torch.log_softmax(data["teacher_topk_logits"].to(logits), -1)[:, :-1]
    p = (whole.gather(-1, ids) if outside else torch.log_softmax(logits.gather(-1, ids), -1))[
        :, :-1
    ]
    forward, reverse = (q.exp() * (q - p)).sum(-1), (p.exp() * (p - q)).sum(-1)
    if outside:
        reverse = (
            reverse
            + (whole.exp() * whole).sum(-1)[:, :-1]
            - (p.exp() * p).sum(-1)
            + 100 * (1 - p.exp().sum(-1))
        )
    share = {"forward": 1.0, "reverse": 0.0}.get(kl_type, weight)
    value = share * forward + (1 - share) * reverse
    return (value * TRAINED).sum() / (TOKENS + 1e-8) if "token_mask" in data else value.mean()


@parametrize(
    "row", pairs(kl_type=("forward", "reverse", "mixed"), outside=(False, True), repeated=(False, True), masked=(False, True)), ids=label
)  # fmt: skip
def test_distillation(row):
    """Value and gradient; rows that do not count may hold anything."""
    (logits, fields), g, settings = (
        step(),
        torch.Generator().manual_seed(2),
        (row["kl_type"], 0.3, row["outside"]),
    )
    top, ids = (2 * torch.randn(B, T + 1, V, generator=g)).topk(K)
    if row["repeated"]:
        ids[..., 3] = ids[..., 1]
        ids[0, 1], top = 7, 2 * torch.randn(top.shape, generator=g)
    data = {
        "teacher_topk_logits": top,
        "teacher_topk_indices": ids,
        "input_ids": fields["input_ids"],
    }
    data |= {name: fields[name] for name in ("token_mask", "sample_mask") if row["masked"]}
    theirs = dict(zip(("kl_type", "mixed_kl_weight", "zero_outside_topk"), settings, strict=True))
    loss_fn = nemo_rl.DistillationLoss.like(SimpleNamespace(**theirs))
    assert loss_fn.input_type.name == "LOGIT"
    want = value_and_gradient(lambda x: distilled(x, data, *settings), logits, torch.float64)
    counted = torch.nn.functional.pad(TRAINED, (0, 1))[..., None]
    given = torch.where(counted, logits, torch.nan) if row["masked"] else logits
    (loss, metrics), gradient = value_and_gradient(
        lambda x: loss_fn(x, data, SEQUENCES, TOKENS), given
    )
    assert_same((loss, gradient), want)
    assert metrics == {"loss": float(loss), "num_valid_samples": B}


def test_distillation_without_ids_is_refused_in_the_words_of_nemo_rl():
    logits, fields = step()
    nothing = torch.zeros(*logits.shape[:2], 0)
    data = fields | {"teacher_topk_logits": nothing, "teacher_topk_indices": nothing.long()}
    with pytest.raises(ValueError, match=r"^teacher_topk_indices .* topk must be positive"):
        nemo_rl.DistillationLoss("forward")(logits, data, SEQUENCES, TOKENS)
