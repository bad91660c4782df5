"""Score centering (arXiv 2609.20807) through the losses of SkyRL, prime-rl and slime, against the
paper's in float64. That of miles is its own: what is ours of it is in test_bound_functions.
"""

from __future__ import annotations

import math
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels import Objective
from grpo_kernels.integrations import prime_rl, skyrl, slime
from support.trainers import assert_same, refused, same_metrics, stand_in, value_and_gradient

parametrize = pytest.mark.parametrize

pytestmark = pytest.mark.usefixtures("stand_ins")

B, T, V, K = 3, 5, 13, 4
G = torch.Generator().manual_seed(5)
LOGITS = 1.5 * torch.randn(B, T, V, generator=G)
SAMPLER = (LOGITS + 0.5 * torch.randn(B, T, V, generator=G)).log_softmax(-1)
TOKENS = SAMPLER.exp().view(-1, V).multinomial(1, generator=G).view(B, T, 1)
HEAD = SAMPLER.topk(K).indices
HEAD[1, ::2, 2:], HEAD[2, 3] = -1, -1  # some shorter, one empty
SETS = (TOKENS + torch.arange(K)) % V
MASK = torch.ones(B, T, dtype=torch.bool)
MASK[0, 3:], MASK[2, 0] = False, False
A = torch.where(MASK, torch.randn(B, T, generator=G), math.nan)
#: The weight of an id with the probabilities p and q.
WEIGHTS = {
    "none": lambda p, q: torch.ones_like(p), "tis": lambda p, q: (p / q).clamp(0.7, 1.2),
    "mis": lambda p, q: torch.where((p / q >= 0.8) & (p / q <= 1.2), p / q, 0.0), "cap": lambda p, q: (p / q).clamp(max=5.0),
    "near": lambda p, q: torch.where((p - q).abs() <= 0.1, p / q, 0.0),
}  # fmt: skip


def at(x, ids):
    """Of [.., V], -inf at padding."""
    return x.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -math.inf)


def over_sets(x):
    return at(x, SETS) - at(x, SETS).logsumexp(-1, keepdim=True)


def correction(log_p, log_q, weight, tail=True):
    """What the paper subtracts from the weighted log-prob of a token, of log-probs [.., K]."""
    log_q = log_q.to(log_p)
    p, q = log_p.detach().exp(), log_q.exp()
    coefficient = torch.where(q > 0, q * weight(p, q), 0.0)
    if tail:
        rest = (1 - q.sum(-1, keepdim=True)).clamp(min=1e-6) / (1 - p.sum(-1, keepdim=True)).clamp(
            min=1e-6
        )
        coefficient = coefficient - rest * weight(torch.ones_like(rest), rest) * p
    return (coefficient * log_p.masked_fill(q == 0, 0.0)).sum(-1)


def exact(logits, mode, each=1.0, sets=False, by_ratio=False):
    """The loss in float64, `each` token with a factor; p and q over the vocabulary or the sets, of
    which one sequence has none.
    """
    log_p, log_q = (
        over_sets(x) if sets else x.log_softmax(-1) for x in (logits.double(), SAMPLER.double())
    )
    y, of_sampler = (x[..., 0] if sets else at(x, TOKENS)[..., 0] for x in (log_p, log_q))
    w = WEIGHTS[mode](y.detach().exp(), of_sampler.exp())
    ids = (log_p, log_q) if sets else (at(log_p, HEAD), at(log_q, HEAD))
    recorded = (torch.arange(B) != 1)[:, None] if sets else 1.0
    inner = w * (1 + y - y.detach() if by_ratio else y) - recorded * correction(
        *ids, WEIGHTS[mode], tail=not sets
    )
    return -(A.nan_to_num() * each * torch.where(MASK, inner, 0.0)).sum()


def compare(ours, *args, **named):
    found = value_and_gradient(ours, LOGITS)
    assert_same(
        found, value_and_gradient(lambda x: exact(x, *args, **named), LOGITS, torch.float64)
    )
    return found[0]


@parametrize(("name", "mode"), [("reinforce", "none"), ("rollout_is", "mis")])
def test_skyrl(name, mode, monkeypatch):
    """Keywords of its losses, under an untested version too. A correction weighs sequences."""
    each = torch.tensor([0.5, 1.5, 1.0])[:, None]
    stand_in(
        "skyrl.backends.skyrl_train.utils.off_policy_correction_utils",
        apply_off_policy_correction=lambda loss, old, rollout, mask, config: (
            loss * each,
            mask,
            {},
        ),
    )
    config = SimpleNamespace(
        score_centering=SimpleNamespace(enabled=True),
        off_policy_correction=None,
        eps_clip_low=0.2,
        eps_clip_high=0.2,
    )

    def loss(x, which=name, **more):
        log_p, rollout = x.log_softmax(-1), at(SAMPLER, TOKENS)[..., 0]
        heads = {
            "rollout_topk_logprobs": at(SAMPLER, HEAD),
            "topk_log_probs": at(log_p, HEAD),
        } | more
        y = at(log_p, TOKENS)[..., 0]
        called = which if callable(which) else skyrl.policy_loss(which)
        return called(y, y.detach(), A, config, MASK.float(), rollout, **heads)

    compare(loss, mode, each)

    def clipped(
        log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None
    ):
        return (
            -((log_probs - old_log_probs).exp() * advantages.nan_to_num() * each * loss_mask).sum(),
            {},
        )

    registry = {}
    stand_in(
        "skyrl.backends.skyrl_train.utils.ppo_utils", ppo_policy_loss=clipped,
        register_policy_loss=lambda name: lambda f: registry.setdefault(name, f),
    )  # fmt: skip
    monkeypatch.setattr(metadata, "version", lambda _: "0.4.0")
    skyrl.register()
    with pytest.warns(UserWarning, match="They agree"):
        assert torch.equal(
            loss(LOGITS.clone().requires_grad_(), registry[f"fused_{name}"])[0], loss(LOGITS)[0]
        )
    refused(
        (lambda: loss(LOGITS, "dapo"), "score_centering='dapo': it compares with old_log_probs"),
        (lambda: loss(LOGITS, topk_log_probs=None), "record the sampler's head"),
    )


@parametrize("weight", [None, 1.7])
@parametrize(("objective", "mode"), [("ipo", "near"), ("cispo", "cap")])
def test_prime_rl(objective, mode, weight):
    """A sequence at a time, over the ids that were recorded; padding is 0 to the trainer and -inf
    to the sampler.
    """
    stand_in("prime_rl.trainer.rl.loss", LossOutputs=SimpleNamespace)

    def loss(x):
        p, q = over_sets(x), over_sets(SAMPLER)
        records = [
            torch.cat([z, torch.full_like(z[..., :1], pad)], -1)
            for z, pad in ((p, 0.0), (q, -math.inf))
        ]
        found = [
            prime_rl.loss(SimpleNamespace(
                trainer_logprobs=p[b, :, 0], inference_logprobs=q[b, :, 0], ref_logprobs=None, advantages=A[b], loss_mask=MASK[b],
                trainer_mask_logprobs=records[0][b], inference_mask_logprobs=None if b == 1 else records[1][b],
                loss_weights=None if weight is None else torch.full((T,), weight),
            ), objective, {"beta": 0.0}, score_centering=True) for b in range(B)
        ]  # fmt: skip
        assert [float(one.metrics["is_centered"]) for one in found] == [1.0, 0.0, 1.0]
        return sum(one.loss for one in found)

    compare(loss, mode, weight or 1.0, sets=True, by_ratio=objective == "ipo")


@parametrize("mode", ["none", "tis", "mis"])
def test_slime(mode):
    """Its corrections, of log-probs of the head that our function gives, beside its REINFORCE term
    with its weights.
    """
    bounds = {"none": {}, "tis": {"low": 0.7, "high": 1.2}, "mis": {"low": 0.8, "high": 1.2}}[mode]
    utils = stand_in(
        "slime.utils.ppo_utils", calculate_log_probs_and_entropy=len, calculate_topk_log_probs=sum
    )
    stand_in(
        "slime.utils.score_centering",
        get_score_centering_is_config=lambda args: {"mode": mode, **bounds},
    )

    def terms(args, batch, logits):
        log_p = utils.calculate_topk_log_probs(
            logits[0], HEAD.view(-1, K), None, chunk_size=2, temperature=1.0
        )
        q = at(SAMPLER, HEAD).view(-1, K)
        return {
            "sc_correction": correction(
                log_p.masked_fill(q == -math.inf, -math.inf), q, WEIGHTS[mode]
            ),
            "sc_sampler_head_mass": q.exp().sum(-1),
        }

    def scores(logits, **_):
        log_p = logits[0].log_softmax(-1)
        parts = {
            "log_probs": at(log_p, TOKENS.view(-1, 1))[:, 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
        }
        return None, {name: [*x.split(T)] for name, x in parts.items()}

    stand_in(
        "slime.backends.megatron_utils.loss", get_score_centering_terms=terms, get_log_probs_and_entropy=scores,
        get_rollout_top_p_logprob_kwargs=lambda args, batch: {},
    )  # fmt: skip
    args = SimpleNamespace(
        use_score_centering=True, use_tis=mode != "none", use_rollout_logprobs=False, use_kl_loss=False, advantage_estimator="grpo",
        eps_clip=0.2, eps_clip_high=None, kl_loss_type="k1", entropy_coef=0.0,
    )  # fmt: skip
    rollout = at(SAMPLER, TOKENS)[..., 0]
    batch = {
        name: [*x]
        for name, x in {
            "advantages": A,
            "loss_masks": MASK.float(),
            "rollout_log_probs": rollout,
            "log_probs": rollout - 0.1,
        }.items()
    }
    batch |= dict.fromkeys(("unconcat_tokens", "total_lengths", "response_lengths"), None)

    def reduce(x):
        return (x * MASK.view(-1)).sum()

    def loss(x):
        return slime.policy_loss()(args, batch, x.view(1, -1, V), reduce)

    with slime.bind(any_version=True) as slots:
        value, metrics = compare(loss, mode)
        assert {*slots.counts} == {"fused"}
    y = at(LOGITS.double().log_softmax(-1), TOKENS)[..., 0]
    of_tokens = {
        "sc_importance_weight": WEIGHTS[mode](y.exp(), rollout.double().exp()), "sc_sampler_head_mass": at(SAMPLER, HEAD).exp().sum(-1),
        "train_rollout_logprob_abs_diff": (y - rollout).abs(), "ppo_kl": rollout - 0.1 - y,
    }  # fmt: skip
    expected = {name: reduce(x.view(-1)) for name, x in of_tokens.items()} | {
        "loss": value,
        "pg_loss": value,
        "pg_clipfrac": 0.0,
    }
    same_metrics(metrics, expected)
    refused(
        (
            lambda: slime.policy_loss(Objective(aggregate="token-sum"))(
                args, batch, LOGITS.view(1, -1, V), reduce
            ),
            "pass no objective",
        ),
        (
            lambda: slime.objective_of(
                SimpleNamespace(**vars(args) | {"advantage_estimator": "gspo"})
            ),
            "score centering corrects another term: use grpo",
        ),
    )
