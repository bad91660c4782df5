"""OpenRLHF: its policy loss and its functions of logits, compared with a float64 transcription, and with its own code if that
is on the path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_kernels.integrations import openrlhf
from support.trainers import (
    DATA,
    MASK,
    B,
    Data,
    T,
    V,
    assert_same,
    clipped,
    double,
    log_softmax_of,
    mean_of,
    stand_in,
    their_file,
    their_file_beside,
    value_and_gradient,
)

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins")


OPENRLHF: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo, dual clip": {"clip_eps_low": 0.1, "clip_eps_high": 0.28, "dual_clip": 1.5},
    "ppo, sequence mean": {"token_level_loss": False},
    "gspo": {"policy_loss_type": "gspo", "clip_eps_low": 0.15},
    "tis": {"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": [0.8, 1.2]},
    "icepop": {
        "enable_vllm_is_correction": True, "vllm_is_truncated_threshold": [0.7, 1.4], "vllm_is_correction_type": "icepop",
    },
    "seq-mask-tis": {
        "enable_vllm_is_correction": True, "vllm_is_truncated_threshold": [0.9, 1.1], "vllm_is_correction_type": "seq-mask-tis",
    },
    "gspo, corrected": {"policy_loss_type": "gspo", "enable_vllm_is_correction": True},
}  # fmt: skip
#: With the arguments of 0.11.2.
SINCE: dict[str, dict[str, Any]] = {
    "off": {"is_correction_level": "off", "dual_clip": 1.5},
    "clip": {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": (0.8, 1.2)},
    "mask": {"is_correction_level": "token", "is_correction_threshold": (0.7, 1.4)},
    "sequences": {"is_correction_level": "seq", "is_correction_threshold": (0.9, 1.1), "token_level_loss": False},
    "gspo": {"is_correction_level": "seq", "policy_loss_type": "gspo"},
    **{
        f"{gating} of a {level}": {
            "is_correction_level": level, "is_correction_gating": gating, "is_correction_threshold": (0.0, high),
        }
        for level, gating, high in (
            ("token", "binary_kl", 0.01), ("seq", "binary_kl", 0.006), ("token", "tv", 0.05), ("seq", "tv", 0.06),
        )
    },
}  # fmt: skip
COUNTS: list[dict[str, Any]] = [{}, {"dp_size": 2, "batch_num_tokens": 61.0, "global_batch_size": 17.0}]


def openrlhf_loss(options: dict[str, Any], logps: Tensor, data: Data, counts: dict[str, Any]) -> tuple[Any, ...]:
    old, sampler, A = double(data.old, data.sampler, data.advantages)
    low, high = options.get("clip_eps_low", 0.2), options.get("clip_eps_high", 0.2)
    gspo, since = options.get("policy_loss_type") == "gspo", "is_correction_level" in options
    level, mode, gating = (options.get(f"is_correction_{name}") for name in ("level", "mode", "gating"))
    bounds = options.get("is_correction_threshold", (0.5, 5.0))
    if not since:
        kinds = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
        level, mode = kinds[options.get("vllm_is_correction_type", "tis")]
        level = level if options.get("enable_vllm_is_correction") else "off"
        bounds = options.get("vllm_is_truncated_threshold")
    n = MASK.sum(1, keepdim=True)
    if gspo:
        x = logps - (old if level == "off" else sampler)
        r = ((x * MASK).sum(1, keepdim=True) / n.clamp(min=1)).exp() * MASK
    else:
        r = (logps - old).clamp(-20, 20).exp()
    loss, bound = clipped(r, A, low, high, options.get("dual_clip"))
    kl = share = None
    if level != "off" and not gspo:
        w, (lo, hi) = (old - sampler).exp(), bounds
        p, q = sampler.exp(), old.exp()
        measured = {
            "binary_kl": p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log(), "tv": (p - q).abs(), None: old - sampler,
        }[gating]  # fmt: skip
        if level == "seq":
            measured = (measured * MASK).sum(1, keepdim=True) / n
        measured = measured.exp() if gating is None else measured
        keep = (measured >= lo) & (measured <= hi)
        share = mean_of((~keep).double()) if level == "token" else (~keep).double().mean()
        loss, kl = loss * (w.clamp(lo, hi) if mode == "clip" else torch.where(keep, w, 0.0)), mean_of(sampler - old)
    dp = counts.get("dp_size", 1)
    if options.get("token_level_loss", True) and not gspo:
        total = (loss * MASK).sum() / counts.get("batch_num_tokens", MASK.sum()) * dp
    else:
        rows = (loss * MASK).sum(1) / (n[:, 0] + 1e-8)
        total = rows.sum() / counts.get("global_batch_size", MASK.any(1).sum()) * dp
    return (total, mean_of(bound.double()), mean_of(old - logps.detach()), kl, *([share] if since else []))


def check_openrlhf(data: Data, theirs: Callable[..., Any], cases: dict[str, dict[str, Any]]) -> None:
    for options in cases.values():
        for counts in COUNTS:
            ours = openrlhf.PolicyLoss(**options)
            mine = value_and_gradient(
                lambda x, ours=ours, counts=counts: ours(x, data.old, data.advantages, MASK.float(), data.sampler, **counts),
                data.logps, torch.float32,
            )  # fmt: skip
            want = value_and_gradient(lambda x, o=options, c=counts: theirs(o, x, data, c), data.logps, torch.float64)
            assert_same(mine, want)
            for got, expected in zip(mine[0][1:], want[0][1:], strict=True):
                assert (got is None) == (expected is None), options
                if got is not None:
                    assert float(got) == pytest.approx(float(expected), rel=1e-5, abs=1e-6), options


def test_openrlhf_loss() -> None:
    check_openrlhf(DATA, openrlhf_loss, OPENRLHF)
    check_openrlhf(DATA, openrlhf_loss, SINCE)
    for cases in (OPENRLHF, SINCE):
        losses = [float(openrlhf_loss(options, DATA.logps.double(), DATA, {})[0].detach()) for options in cases.values()]
        assert len({round(x, 7) for x in losses}) == len(losses)
    empty = openrlhf.PolicyLoss()(DATA.logps.clone().requires_grad_(), DATA.old, DATA.advantages, torch.zeros(B, T))
    assert float(empty[0].detach()) == 0 and float(empty[1]) == 0 and empty[0].requires_grad
    # Nor does a count of 0, with or without a tensor around it, make the denominator 0.
    for none in (0, 0.0, torch.tensor(0)):
        for options, name in (({}, "batch_num_tokens"), ({"token_level_loss": False}, "global_batch_size")):
            loss = openrlhf.PolicyLoss(**options)
            out = loss(DATA.logps, DATA.old, DATA.advantages, torch.zeros(B, T), dp_size=2, **{name: none})
            assert float(out[0]) == 0


def test_openrlhf_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = their_file("openrlhf.models.utils", monkeypatch, deepspeed={})
    PolicyLoss = their_file_beside("openrlhf.models.loss", utils).PolicyLoss

    def theirs(options: dict[str, Any], logps: Tensor, data: Data, counts: dict[str, Any]) -> Any:
        return PolicyLoss(**options)(logps, *double(data.old, data.advantages), MASK.double(), data.sampler.double(), **counts)

    cases = SINCE if "is_correction_level" in vars(PolicyLoss()) else OPENRLHF
    check_openrlhf(DATA, theirs, cases)
    for options in cases.values():
        like, args = (
            openrlhf.PolicyLoss.like(PolicyLoss(**options)),
            (DATA.logps, DATA.old, DATA.advantages, MASK.float(), DATA.sampler),
        )
        assert [x is None or float(x) for x in like(*args)] == [
            x is None or float(x) for x in openrlhf.PolicyLoss(**options)(*args)
        ]
    labels, logits = torch.randint(V, (B, T)), torch.randn(B, T, V)
    want = utils.log_probs_from_logits(logits.clone(), labels, 0.7), utils.compute_entropy(logits)
    with openrlhf.bind(strict=True) as slots:
        got = utils.log_probs_from_logits(logits, labels, 0.7), utils.compute_entropy(logits)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert slots.counts == {"fused": 2}


def test_openrlhf_functions_of_logits() -> None:
    """A stand-in with the names; the entropy is at its own temperature, and nothing is divided in place."""

    def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
        return log_softmax_of(logits, labels, temperature)[0]

    def compute_entropy(logits: Tensor) -> Tensor:
        return log_softmax_of(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))[1]

    stand_in("openrlhf.models.utils", log_probs_from_logits=log_probs_from_logits, compute_entropy=compute_entropy)
    actor = stand_in("openrlhf.models.actor", log_probs_from_logits=log_probs_from_logits, compute_entropy=compute_entropy)
    labels, logits = torch.randint(V, (B, T)), torch.randn(B, T, V)

    def use(dtype: torch.dtype) -> tuple[Any, Tensor]:
        def loss(x: Tensor) -> Tensor:
            entropy = actor.compute_entropy(x)
            return (actor.log_probs_from_logits(x, labels, temperature=0.7) * torch.linspace(-1, 1, T)).sum() - entropy.sum()

        return value_and_gradient(loss, logits, dtype)

    want = use(torch.float64)
    with openrlhf.bind(strict=True) as slots:
        assert_same(use(torch.float32), want)
        assert slots.counts == {"fused": 2}
    assert actor.compute_entropy is compute_entropy
    with openrlhf.bind(entropy_temperature=0.5):
        warm = log_softmax_of(logits, labels, 0.5)[1].float()
        torch.testing.assert_close(actor.compute_entropy(logits), warm, rtol=1e-5, atol=1e-6)


def test_openrlhf_refuses() -> None:
    for options, message in (
        ({"policy_loss_type": "x"}, "policy_loss_type='x'"),
        ({"vllm_is_correction_type": "x"}, "vllm_is_correction_type='x'"),
        ({"dual_clip": 1.1}, r"dual_clip=1\.1: below"),
        ({"is_correction_level": "x"}, "is_correction_level='x'"),
        ({"is_correction_level": "token", "is_correction_gating": "x"}, "is_correction_gating='x'"),
        ({"is_correction_level": "seq", "is_correction_mode": "clip"}, "only the ratio of a token can be clamped"),
        ({"is_correction_level": "token", "is_correction_gating": "tv"}, "has an upper bound only"),
        ({"is_correction_level": "off", "enable_vllm_is_correction": True}, "one option of two versions"),
    ):
        with pytest.raises(ValueError, match=message):
            openrlhf.PolicyLoss(**options)
    loss, x = openrlhf.PolicyLoss(enable_vllm_is_correction=True), torch.zeros(B, T)
    with pytest.raises(ValueError, match="rollout_log_probs is None"):
        loss(x, x, x, MASK)


def test_a_policy_loss_of_another_openrlhf_is_refused_with_the_reason() -> None:
    """Of one that renames its arguments again."""
    theirs = type("PolicyLoss", (), {name: 0.2 for name in openrlhf.FIELDS})()
    with pytest.raises(ValueError, match=r"PolicyLoss has no is_correction_level.*OpenRLHF 0\.10\.4, .*0\.11\.2 are known"):
        openrlhf.PolicyLoss.like(theirs)
