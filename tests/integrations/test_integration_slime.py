"""slime: its custom loss and its function of logits, against its own where it is on the path and a float64 transcription always."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels import Objective
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.integrations import slime
from support.trainers import DATA, MASK, Data, V, assert_same, clipped, log_softmax_of, stand_in, value_and_gradient

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins")


def slime_args(**changes: Any) -> SimpleNamespace:
    defaults = {
        "advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "entropy_coef": 0.0,
        "use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "k1", "use_rollout_logprobs": False,
        "use_unbiased_kl": False, "use_tis": False, "use_opsm": False, "get_mismatch_metrics": False,
    }  # fmt: skip
    return SimpleNamespace(**defaults | changes)


SLIME = {
    "grpo": {},
    "dual clip": {"eps_clip_c": 1.6, "entropy_coef": 0.05},
    "gspo": {"advantage_estimator": "gspo", "eps_clip_high": None},
    "cispo": {"advantage_estimator": "cispo"},
    "k2": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k2", "entropy_coef": 0.03},
    "low_var_kl": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "low_var_kl"},
    "unbiased k3": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "rollout log-probs": {"use_rollout_logprobs": True},
}


def slime_batch(data: Data) -> dict[str, Any]:
    """Three rollouts of five samples, which share denominators; the third sample is empty."""
    lengths = [7, 3, 0, 5, 6]
    cut = {name: [row[:n] for row, n in zip(getattr(data, field), lengths, strict=True)] for name, field in (
        ("log_probs", "old"), ("rollout_log_probs", "sampler"), ("ref_log_probs", "ref"), ("advantages", "advantages"))}  # fmt: skip
    masks = [row[:n].float() for row, n in zip(MASK, lengths, strict=True)]
    return cut | {
        "loss_masks": masks, "response_lengths": lengths, "total_lengths": [n + 2 for n in lengths],
        "unconcat_tokens": [torch.zeros(n + 2, dtype=torch.int64) for n in lengths],
    }  # fmt: skip


def sum_of_sample_mean(x: Tensor) -> Tensor:
    """Samples 0, 1 and 3, 4 are of one rollout each."""
    denominators = [9.0, 9.0, 1.0, 11.0, 11.0]
    total, at = x.new_zeros(()), 0
    for n, D, row in zip([7, 3, 0, 5, 6], denominators, MASK, strict=True):
        total = total + (x[at : at + n] * row[:n]).sum() / D
        at += n
    return total


def slime_loss(args: Any, batch: dict[str, Any], logps: list[Tensor], entropy: list[Tensor]) -> dict[str, Tensor]:
    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"]
    L, O, A = (torch.cat(x).double() for x in (logps, old, batch["advantages"]))
    if args.advantage_estimator == "gspo":
        parts = [
            ((o.double() - p) * m).sum() / m.sum().clamp(min=1) for p, o, m in zip(logps, old, batch["loss_masks"], strict=True)
        ]
        kl = torch.cat([k.expand_as(p) for k, p in zip(parts, logps, strict=True)])
    else:
        kl = O - L
    r, high = (-kl).exp(), args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    if args.advantage_estimator == "cispo":
        w = r.clamp(1 - args.eps_clip, 1 + high).detach()
        pg, bound = -w * A * L, clipped(r, A, args.eps_clip, high)[1]
    else:
        pg, bound = clipped(r, A, args.eps_clip, high, args.eps_clip_c)
    named = {"pg_loss": sum_of_sample_mean(pg), "entropy_loss": sum_of_sample_mean(torch.cat(entropy).double())}
    loss = named["pg_loss"] - args.entropy_coef * named["entropy_loss"]
    if args.use_kl_loss:
        d = L - torch.cat(batch["ref_log_probs"]).double()
        value = {"k1": d, "k2": d * d / 2}.get(args.kl_loss_type, (-d).exp() - 1 + d)
        if args.use_unbiased_kl:
            value = value * (L - O).exp()
        if args.kl_loss_type == "low_var_kl":
            value = value.clamp(-10, 10)
        named["kl_loss"] = sum_of_sample_mean(value)
        loss = loss + args.kl_loss_coef * named["kl_loss"]
    difference = (O - torch.cat(batch["rollout_log_probs"]).double()).abs()
    if args.use_rollout_logprobs:
        difference = torch.zeros_like(difference)
    return {
        "loss": loss, **named, "pg_clipfrac": sum_of_sample_mean(bound.double()), "ppo_kl": sum_of_sample_mean(kl),
        "train_rollout_logprob_abs_diff": sum_of_sample_mean(difference),
    }  # fmt: skip


def scores_of(logits: Tensor, lengths: list[int]) -> dict[str, list[Tensor]]:
    """Log-probs of token 1 at each response position, and entropies, packed with a prompt of two tokens before each."""
    p, entropy, at = torch.log_softmax(logits[0], -1), [], 0
    logps: list[Tensor] = []
    for n in lengths:
        rows = slice(at + 1, at + 1 + n)
        logps.append(p[rows, 1])
        entropy.append(-(p[rows].exp() * p[rows]).sum(-1))
        at += n + 2
    return {"log_probs": logps, "entropy": entropy}


@pytest.mark.parametrize("what", SLIME)
def test_slime_loss(what: str) -> None:
    args, batch = slime_args(**SLIME[what]), slime_batch(DATA)
    lengths = batch["response_lengths"]
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(1, sum(batch["total_lengths"]), V, generator=g)
    drawn = scores_of(logits, lengths)["log_probs"]
    batch["log_probs"] = [(p + o.abs().clamp(max=0.5) * s).clamp(max=-0.1) for p, o, s in zip(
        drawn, batch["log_probs"], (-1, 1, 1, -1, 1), strict=True)]  # fmt: skip
    batch["rollout_log_probs"] = [p - 0.15 for p in batch["log_probs"]]
    batch["ref_log_probs"] = [p + 0.2 for p in drawn]
    stand_in(
        "slime.backends.megatron_utils.loss",
        get_log_probs_and_entropy=lambda logits, **_: (None, scores_of(logits, lengths)),
        get_rollout_top_p_logprob_kwargs=lambda args, batch: {},
    )

    def theirs(x: Tensor) -> Any:
        scored = scores_of(x, lengths)
        named = slime_loss(args, batch, scored["log_probs"], scored["entropy"])
        return named["loss"], named

    (loss, metrics), gradient = value_and_gradient(
        lambda x: slime.policy_loss()(args, batch, x, sum_of_sample_mean), logits, torch.float32
    )
    (want, named), expected = value_and_gradient(theirs, logits, torch.float64)
    assert_same((loss, gradient), (want, expected))
    assert set(metrics) == set(named)
    for name, value in metrics.items():
        exact = named[name]
        assert float(value) == pytest.approx(float(exact.detach()), rel=1e-4, abs=1e-5), name
        assert not value.requires_grad


def test_slime_loss_of_an_objective_and_of_nothing() -> None:
    batch, logits = slime_batch(DATA), torch.randn(1, 31, V)
    lengths = batch["response_lengths"]
    scored = {"now": lengths}
    stand_in(
        "slime.backends.megatron_utils.loss",
        get_log_probs_and_entropy=lambda logits, **_: (None, scores_of(logits, scored["now"])),
        get_rollout_top_p_logprob_kwargs=lambda args, batch: {},
    )
    mine = slime.policy_loss(Objective.preset("vespo", aggregate="token-sum"))
    (loss, _), gradient = value_and_gradient(lambda x: mine(slime_args(), batch, x, sum_of_sample_mean), logits, torch.float32)
    assert torch.isfinite(loss) and gradient.any()
    with pytest.raises(ValueError, match="aggregate='token-mean'"):
        slime.policy_loss(Objective())
    scored["now"] = [3, 3, 0, 5, 6]
    with pytest.raises(ValueError, match="context parallelism has cut them"):
        mine(slime_args(), batch, logits, sum_of_sample_mean)

    empty = {name: [torch.zeros(0)] for name in ("advantages", "log_probs", "loss_masks")} | {
        "unconcat_tokens": [], "total_lengths": [], "response_lengths": []
    }  # fmt: skip
    vars(sys.modules["slime.backends.megatron_utils.loss"])["get_log_probs_and_entropy"] = lambda logits, **_: (
        None, {"log_probs": [torch.zeros(0)], "entropy": [torch.zeros(0)]}
    )  # fmt: skip
    (loss, _), gradient = value_and_gradient(
        lambda x: slime.policy_loss()(slime_args(), empty, x, lambda v: v.sum()), logits, torch.float32
    )
    assert loss == 0 and not gradient.any()

    # No samples at all, of which slime's reducer makes a plain 0: the same metrics as on other ranks.
    args = slime_args(use_kl_loss=True, kl_loss_coef=0.1)
    nothing: dict[str, Any] = {name: [] for name in batch}
    vars(sys.modules["slime.backends.megatron_utils.loss"])["get_log_probs_and_entropy"] = lambda logits, **_: (
        None, {"log_probs": [], "entropy": []}
    )  # fmt: skip
    (loss, metrics), gradient = value_and_gradient(
        lambda x: slime.policy_loss()(args, nothing, x, lambda v: 0), logits, torch.float32
    )
    assert loss == 0 and not gradient.any()
    assert {"kl_loss", "train_rollout_logprob_abs_diff"} <= set(metrics) and not any(float(v) for v in metrics.values())


def test_slime_kl_of_the_metrics_is_that_of_the_loss() -> None:
    """With a ratio summed over the sequence it is a token's own ratio that weighs its KL; no metric overflows."""
    batch, logits = slime_batch(DATA), torch.randn(1, 31, V)
    lengths = batch["response_lengths"]
    scored = scores_of(logits, lengths)
    stand_in(
        "slime.backends.megatron_utils.loss", get_log_probs_and_entropy=lambda logits, **_: (None, scored),
        get_rollout_top_p_logprob_kwargs=lambda args, batch: {},
    )  # fmt: skip
    objective = Objective.preset("vespo", aggregate="token-sum", beta=0.3, kl=Kl("k3", weighting="ratio"))
    _, metrics = slime.policy_loss(objective)(slime_args(), batch, logits, sum_of_sample_mean)
    L, O, R = (torch.cat(x).double() for x in (scored["log_probs"], batch["log_probs"], batch["ref_log_probs"]))
    want = sum_of_sample_mean(((R - L).exp() - (R - L) - 1) * (L - O).exp())
    assert float(metrics["kl_loss"]) == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"use_tis": True}, "use_tis=True"),
        ({"use_opsm": True}, "use_opsm=True"),
        ({"custom_pg_loss_reducer_function_path": "a.b"}, "custom_pg_loss_reducer_function_path='a.b'"),
        ({"eps_clip_c": 1.1}, r"eps_clip_c=1\.1"),
        ({"use_kl_loss": True, "use_unbiased_kl": True, "kl_loss_type": "low_var_kl"}, "use_unbiased_kl"),
        ({"use_kl_loss": True, "use_unbiased_kl": True, "advantage_estimator": "gspo"}, "use_unbiased_kl"),
    ],
)
def test_slime_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slime.objective_of(slime_args(**change))


def test_slime_functions_of_logits() -> None:
    """With and without the tokens that top-p sampling kept: those bound the log-prob's softmax, not the entropy's."""

    def theirs(logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False, chunk_size: int = -1,
               log_prob_keep_mask: Any = None, with_entropy_grad: bool = True) -> Any:  # fmt: skip
        kept = logits if log_prob_keep_mask is None else logits.masked_fill(~log_prob_keep_mask, -math.inf)
        logps, entropy = log_softmax_of(kept, tokens)[0], log_softmax_of(logits, tokens)[1]
        entropy = entropy if with_entropy_grad else entropy.detach()
        return logps[:, None], entropy if with_entropy else None

    home = stand_in("slime.utils.ppo_utils", calculate_log_probs_and_entropy=theirs)
    loss_module = stand_in("slime.backends.megatron_utils.loss", calculate_log_probs_and_entropy=theirs)
    logits, tokens, up = torch.randn(9, V), torch.randint(V, (9,)), torch.linspace(-1, 1, 9)
    keep = (torch.rand(9, V) < 0.4).scatter(1, tokens[:, None], True)
    for options in ({}, {"with_entropy": True}, {"with_entropy": True, "with_entropy_grad": False, "chunk_size": 4},
                    {"log_prob_keep_mask": keep, "with_entropy": True}, {"log_prob_keep_mask": keep}):  # fmt: skip

        def use(x: Tensor, options: Any = options) -> Tensor:
            logps, entropy = loss_module.calculate_log_probs_and_entropy(x, tokens, None, **options)
            assert logps.shape == (9, 1) and (entropy is None) == ("with_entropy" not in options)
            return (logps[:, 0] * up).sum() + (0.0 if entropy is None else entropy.square().sum())

        want = value_and_gradient(use, logits, torch.float64)
        with slime.bind(strict=True) as slots:
            assert_same(value_and_gradient(use, logits, torch.float32), want)
            assert slots.counts == {"fused": 1}
    # The target is kept, whether top-p recorded it or not.
    dropped = keep.scatter(1, tokens[:, None], False)
    torch.testing.assert_close(
        slime.calculate_log_probs_and_entropy(logits, tokens, None, log_prob_keep_mask=dropped)[0],
        theirs(logits, tokens, None, log_prob_keep_mask=keep)[0].float(), rtol=1e-5, atol=1e-6,
    )  # fmt: skip
    with slime.bind():  # slime makes a new tensor of no tokens, without the last dimension
        for options in ({}, {"with_entropy": True}, {"with_entropy": True, "log_prob_keep_mask": keep[:0]}):
            logps, entropy = loss_module.calculate_log_probs_and_entropy(logits[:0], tokens[:0], None, **options)
            assert logps.shape == (0,) and (entropy is None if not options else entropy.shape == (0,))
    assert home.calculate_log_probs_and_entropy is theirs
