"""NeMo-RL: its whole loss from logits, compared with a float64 transcription, and with its own code if that is on the path."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels import Objective
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.formulas.surrogates import Cispo, Clip, PolicyGradient
from grpo_kernels.integrations import nemo_rl
from grpo_kernels.integrations._records import refiltered
from support.trainers import (
    DATA,
    MASK,
    B,
    T,
    V,
    assert_same,
    clipped,
    log_softmax_of,
    mean_of,
    stand_in,
    their_file,
    value_and_gradient,
)

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins")


#: As NeMo-RL's TrainingSamplingParams; the temperature divides the logits before the loss sees them.
KEPT = SimpleNamespace(top_k=12, top_p=0.8, temperature=1.0)
#: name -> objective, options of PolicyLoss.
NEMO: dict[str, tuple[Objective, dict[str, Any]]] = {
    "tokens": (Objective.preset("dapo", numerics="nemo-rl"), {}),
    "sequences, gspo": (Objective.preset("gspo", numerics="nemo-rl"), {}),
    "sequences, gspo, corrected": (
        Objective.preset("gspo", numerics="nemo-rl"),
        {"importance": {"level": "sequence", "mode": "truncate", "low": 0.5, "high": 1.1}},
    ),
    "kl, truncated weights": (
        Objective.preset("grpo", numerics="nemo-rl", beta=0.1), {"importance": {"mode": "truncate", "low": 0.8, "high": 1.3}},
    ),
    "sequences, kl, icepop": (
        Objective.preset("grpo", numerics="nemo-rl", beta=0.1, aggregate="seq-mean-token-mean"),
        {"importance": {"mode": "mask", "low": 0.7, "high": 1.4}},
    ),
    "seq-mask-tis": (
        Objective.preset("dapo", numerics="nemo-rl"), {"importance": {"mode": "sequence-mask", "low": 0.9, "high": 1.1}},
    ),
    "cispo": (Objective.preset("cispo", numerics="nemo-rl"), {}),
    "reinforce": (Objective.preset("reinforce", numerics="nemo-rl", beta=0.0, aggregate="token-mean"), {}),
    "forced on policy": (
        Objective.preset("gspo", numerics="nemo-rl"),
        {"force_on_policy_ratio": True, "importance": {"level": "sequence", "mode": "truncate", "low": 0.8, "high": 1.3}},
    ),
    "on-policy kl": (
        Objective.preset("grpo", numerics="nemo-rl", beta=0.3, kl=Kl("k3", "score", clamp_log=0.6, clamp=0.1)),
        {"use_on_policy_kl_approximation": True},
    ),
    "positive examples": (
        Objective.preset("dapo", numerics="nemo-rl", beta=0.05), {"positive_example_nll_weight": 0.4},
    ),
    "filtered": (Objective.preset("dapo", numerics="nemo-rl", beta=0.0), {"sampling_params": KEPT}),
    "filtered, kl over the vocabulary": (
        Objective.preset("grpo", numerics="nemo-rl", beta=0.3),
        {"sampling_params": KEPT, "importance": {"mode": "truncate", "low": 0.8, "high": 1.3}},
    ),
    "filtered, sequences, on-policy kl": (
        Objective.preset("gspo", numerics="nemo-rl", beta=0.3, kl=Kl("k3", "score", clamp_log=0.6, clamp=0.1)),
        {"sampling_params": SimpleNamespace(top_k=6, top_p=1.0, temperature=0.6), "use_on_policy_kl_approximation": True},
    ),
    "filtered, forced on policy": (
        Objective.preset("dapo", numerics="nemo-rl", beta=0.2),
        {"sampling_params": KEPT, "force_on_policy_ratio": True, "positive_example_nll_weight": 0.4,
         "importance": {"mode": "truncate", "low": 0.8, "high": 1.3}},
    ),
}  # fmt: skip


@pytest.fixture
def nemo() -> Iterator[None]:
    stand_in(
        "nemo_rl.algorithms.loss.interfaces",
        LossType=enum.Enum("LossType", ["TOKEN_LEVEL", "SEQUENCE_LEVEL"]),
        LossInputType=enum.Enum("LossInputType", ["LOGIT", "LOGPROB"]),
        MetricNormalizer=enum.Enum("MetricNormalizer", ["TOKENS", "SEQUENCES", "NONE"]),
    )
    yield


def kl_of(x: Tensor, y: Tensor) -> Tensor:
    """k3 of KL(x || y), from tokens of x."""
    return (y - x).exp() - (y - x) - 1


def filtered(logits: Tensor, top_k: int | None = None, top_p: float = 1.0, **_: Any) -> Tensor:
    """Logits with -inf where NeMo-RL's filter drops them: the k largest, then of these the largest with the mass p."""
    ascending, order = logits.sort(-1)
    if top_k is not None:
        ascending = ascending.masked_fill(ascending < ascending[..., -top_k, None], -torch.inf)
    keep = ascending.softmax(-1).cumsum(-1) > 1 - top_p
    keep[..., -1] = True
    return torch.empty_like(logits).scatter(-1, order, ascending.masked_fill(~keep, -torch.inf))


def nemo_loss(
    x: Tensor, fields: dict[str, Tensor], toks: Tensor, seqs: Tensor, objective: Objective, options: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """ClippedPGLossFn in float64, of logits [B, T + 1, V]."""
    curr = whole = log_softmax_of(x[:, :-1], fields["input_ids"][:, 1:])[0]
    more: dict[str, Tensor] = {}
    if "sampling_params" in options:
        curr = log_softmax_of(filtered(x[:, :-1], **vars(options["sampling_params"])), fields["input_ids"][:, 1:])[0]
        dropped = curr.isinf() & (MASK * fields["sample_mask"][:, None] != 0)
        curr, more["outside_sampling_set"] = torch.where(curr.isinf(), 0.0, curr), dropped.sum() / toks
    old, ref, gen, A = (fields[n][:, 1:].double() for n in (
        "prev_logprobs", "reference_policy_logprobs", "generation_logprobs", "advantages"))  # fmt: skip
    samples, forced = fields["sample_mask"], options.get("force_on_policy_ratio", False)
    m, n = MASK * samples[:, None], MASK.sum(1, keepdim=True)
    sequences, (low, high) = objective.level == "sequence", objective.surrogate.ratio_bounds

    def mean(v: Tensor) -> Tensor:
        return (v * m).sum() / toks

    def reduce(v: Tensor) -> Tensor:
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
    js = sum((p - mixed).exp() - (p - mixed) - 1 for p in (old, gen)) / 2
    return loss, more | {
        "loss": loss, "kl_penalty": penalty, "positive_nll_loss": nll, "num_valid_samples": samples.sum(),
        "probs_ratio": mean(r), "probs_ratio_clamped": mean(clamped), "probs_ratio_min": r[inside].min(),
        "probs_ratio_max": r[inside].max(), "probs_ratio_clamped_min": clamped[inside].min(),
        "probs_ratio_clamped_max": clamped[inside].max(), "token_mult_prob_error": mean((gen - old).abs().exp()),
        "gen_kl_error": mean(kl_of(gen, old)), "policy_kl_error": mean(kl_of(old, gen)), "js_divergence_error": mean(js),
        "sampling_importance_ratio": (w[:, 0] * samples).sum() / seqs if sequences else mean(w),
        "approx_entropy": -mean((curr - gen).exp() * curr),
    }  # fmt: skip


@pytest.mark.parametrize("what", NEMO)
def test_nemo_rl_loss(what: str, nemo: None) -> None:
    objective, options = NEMO[what]
    g = torch.Generator().manual_seed(4)
    logits, ids = torch.randn(B, T + 1, V, generator=g), torch.randint(V, (B, T + 1), generator=g)
    logps = log_softmax_of(logits[:, :-1], ids[:, 1:])[0].float()

    def column(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (1, 0))

    fields = {
        "input_ids": ids, "token_mask": column(MASK.float()), "sample_mask": torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]),
        "advantages": column(DATA.advantages), "rewards": torch.tensor([1.0, -1.0, 0.5, 2.0, 0.0]),
        "prev_logprobs": column(logps + DATA.old - DATA.logps), "reference_policy_logprobs": column(logps + DATA.ref - DATA.logps),
        "generation_logprobs": column(logps + DATA.sampler - DATA.logps),
    }  # fmt: skip
    toks, seqs = torch.tensor(47.0), torch.tensor(9.0)
    loss_fn = nemo_rl.PolicyLoss(objective, **options)
    given = {name: x for name, x in fields.items() if name != "prev_logprobs" or "forced on policy" not in what}
    assert loss_fn.input_type.name == "LOGIT"
    (loss, metrics), gradient = value_and_gradient(
        lambda x: loss_fn(logits=x, data=given, global_valid_seqs=seqs, global_valid_toks=toks), logits, torch.float32
    )
    (want, named), expected = value_and_gradient(
        lambda x: nemo_loss(x, fields, toks, seqs, objective, options), logits, torch.float64
    )
    assert_same((loss, gradient), (want, expected))
    if "sampling_params" in options:
        assert 0.1 < metrics["outside_sampling_set"] < 0.9
    assert not gradient[:, -1].any() and not gradient[3].any()
    assert metrics == pytest.approx({k: float(v.detach()) for k, v in named.items()}, rel=1e-4, abs=1e-6)
    # Its workers rescale by these what was divided by 1.
    doubled = nemo_loss(logits.double(), fields, 2 * toks, 4 * seqs, objective, options)[1]
    for name, kind in loss_fn.metric_normalizations.items():
        factor = {"TOKENS": 2, "SEQUENCES": 4, "NONE": 1}[kind.name]
        if name not in ("loss", "kl_penalty"):
            assert float(doubled[name].detach()) * factor == pytest.approx(float(named[name].detach()), rel=1e-6), name
    assert set(loss_fn.metric_normalizations) == set(named)
    of_loss = {"token-mean": "TOKENS", "seq-mean-token-mean": "SEQUENCES"}[objective.aggregate]
    assert {loss_fn.metric_normalizations[name].name for name in ("loss", "kl_penalty")} == {of_loss}


def clipped_pg(**changes: Any) -> SimpleNamespace:
    """The fields of a ClippedPGLossFn, with its defaults."""
    defaults = {
        "disable_ppo_ratio": False, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "ratio_clip_c": None, "use_cispo": False,
        "sequence_level_importance_ratios": False, "reference_policy_kl_penalty": 0.01, "reference_policy_kl_type": "k3",
        "kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0, "use_importance_sampling_correction": False,
        "truncated_importance_sampling_type": None, "truncated_importance_sampling_ratio": None,
        "truncated_importance_sampling_ratio_min": None, "use_on_policy_kl_approximation": False,
        "force_on_policy_ratio": False, "positive_example_nll_weight": 0.0, "loss_type": SimpleNamespace(name="TOKEN_LEVEL"),
    }  # fmt: skip
    return SimpleNamespace(**defaults | changes)


def test_nemo_rl_constants_are_taken_over(nemo: None) -> None:
    sequences = SimpleNamespace(name="SEQUENCE_LEVEL")
    tis = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.3}
    kl = {"beta": 0.01}
    for changes, objective, importance in (
        ({}, Objective.preset("grpo", numerics="nemo-rl", **kl), None),
        ({"ratio_clip_max": 0.28, "ratio_clip_c": 3.0}, Objective.preset("grpo", numerics="nemo-rl", surrogate=Clip(0.2, 0.28, 3.0)), None),
        ({"sequence_level_importance_ratios": True, "loss_type": sequences}, Objective.preset("gspo", numerics="nemo-rl"), None),
        ({"use_cispo": True}, Objective.preset("cispo", numerics="nemo-rl", aggregate="token-mean"), None),
        ({"disable_ppo_ratio": True}, Objective.preset("reinforce", numerics="nemo-rl", aggregate="token-mean"), None),
        (tis, Objective.preset("grpo", numerics="nemo-rl"), {"mode": "truncate", "low": 0.0, "high": 1.3}),
        (
            tis | {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio_min": 0.9},
            Objective.preset("grpo", numerics="nemo-rl"), {"mode": "sequence-mask", "low": 0.9, "high": 1.3},
        ),
        ({"use_importance_sampling_correction": True}, Objective.preset("grpo", numerics="nemo-rl"),
         {"mode": "truncate", "low": 0.0, "high": math.inf}),
    ):  # fmt: skip
        like = nemo_rl.PolicyLoss.like(clipped_pg(**changes), inplace=True)
        assert like.objective == objective, changes
        assert like.importance == (None if importance is None else {"level": "token"} | importance) and like.inplace
    like = nemo_rl.PolicyLoss.like(clipped_pg(force_on_policy_ratio=True, positive_example_nll_weight=0.2))
    assert like.force_on_policy_ratio and like.positive_example_nll_weight == 0.2
    for changes, message in (
        ({"ratio_clip_c": 1.1}, r"ratio_clip_c=1\.1: below 1 \+ ratio_clip_max"),
        ({"ratio_clip_c": 3.0, "disable_ppo_ratio": True}, "bounds no ratio"),
    ):
        with pytest.raises(ValueError, match=message):
            nemo_rl.PolicyLoss.like(clipped_pg(**changes))


def nemo_fields(g: torch.Generator) -> dict[str, Tensor]:
    def column(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (1, 0))

    return {
        "input_ids": torch.randint(V, (B, T + 1), generator=g), "token_mask": column(MASK.float()), "sample_mask": torch.ones(B),
        "advantages": torch.randn(B, T + 1, generator=g),
        **{n: column(-3 + 0.3 * torch.randn(B, T, generator=g)) for n in (
            "prev_logprobs", "reference_policy_logprobs", "generation_logprobs")},
    }  # fmt: skip


def test_nemo_rl_gradient_over_the_logits(nemo: None) -> None:
    """inplace=True: there is no second [B, S, V]."""
    g = torch.Generator().manual_seed(4)
    logits, fields = torch.randn(B, T + 1, V, generator=g), nemo_fields(g)
    gradients = []
    for inplace in (False, True):
        made = logits.clone().requires_grad_() * 1.0
        loss = nemo_rl.PolicyLoss(Objective.preset("dapo"), inplace=inplace)(made, fields, torch.tensor(5.0), MASK.sum())[0]
        gradients.append(torch.autograd.grad(loss, made)[0])
    assert gradients[1].data_ptr() == made.data_ptr()
    torch.testing.assert_close(*gradients)
    assert gradients[0].any() and not gradients[0][:, -1].any()


def test_nemo_rl_kl_of_the_metrics_is_that_of_the_loss(nemo: None) -> None:
    g = torch.Generator().manual_seed(4)
    logits, fields = torch.randn(B, T + 1, V, generator=g), nemo_fields(g)
    objective = Objective.preset("vespo", aggregate="token-mean", beta=0.3, kl=Kl("k3", weighting="ratio"))
    _, metrics = nemo_rl.PolicyLoss(objective)(logits, fields, torch.tensor(5.0), MASK.sum())
    L = log_softmax_of(logits[:, :-1], fields["input_ids"][:, 1:])[0]
    e, x = (fields["reference_policy_logprobs"][:, 1:] - L), L - fields["prev_logprobs"][:, 1:]
    assert metrics["kl_penalty"] == pytest.approx(float(mean_of((e.exp() - e - 1) * x.exp())), rel=1e-4)
    # A log-prob that is far off is a large number, not inf.
    fields["prev_logprobs"][0, 1] = -400.0
    _, metrics = nemo_rl.PolicyLoss(Objective.preset("dapo"))(logits, fields, torch.tensor(5.0), MASK.sum())
    assert all(math.isfinite(value) for value in metrics.values())


def test_nemo_rl_refuses(nemo: None) -> None:
    with pytest.raises(ValueError, match="aggregate='constant'"):
        nemo_rl.PolicyLoss(Objective.preset("dr_grpo"))
    weighted = Objective.preset("grpo", beta=0.1, kl=Kl("k3", weighting="ratio"))
    with pytest.raises(ValueError, match="the KL runs over the vocabulary, its weight over the sets"):
        nemo_rl.PolicyLoss(weighted, sampling_params=KEPT)
    assert nemo_rl.PolicyLoss(weighted, sampling_params=SimpleNamespace(top_k=-1, top_p=1.0)).rules is None
    sharded = SimpleNamespace(placements=())
    with pytest.raises(ValueError, match="logits is a DTensor"):
        nemo_rl.PolicyLoss(Objective())(sharded, {}, torch.ones(()), torch.ones(()))


def test_nemo_rl_filter_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL's own function keeps the ids that ours keeps."""
    theirs = their_file("nemo_rl.algorithms.logits_sampling_utils", monkeypatch)
    logits, targets = 2 * torch.randn(B, T, V, generator=torch.Generator().manual_seed(6)), torch.randint(V, (B, T))
    for top_k, top_p in ((5, 1.0), (None, 0.7), (9, 0.6), (-1, 0.9)):
        want = theirs.apply_top_k_top_p(logits, top_k, top_p)[0] > -torch.inf
        kept, dropped = refiltered(logits, targets, top_k=top_k, top_p=top_p)
        assert torch.equal(dropped, ~want.gather(-1, targets[..., None])[..., 0]) and dropped.any()
        assert torch.equal(kept.mask(V).view(B, T, V)[~dropped], want[~dropped])
        assert (kept.counts.view(B, T)[dropped] == 1).all() and kept.contains(targets).all()
