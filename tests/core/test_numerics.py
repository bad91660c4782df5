"""`Objective.preset(name, numerics=trainer)` against the formula and the constants of that trainer, typed from its code.

TRL, verl and Liger are also run themselves, in tests/integrations; the other trainers cannot be installed next to this package.
So each row of TRAINERS states in the trainer's terms what it computes (../shared/peers.md, sections 2 to 4 and 8, has the
places in its code), and `reference` computes that in float64 with autograd, knowing nothing of the package. Log-ratios reach
beyond every clamp, and the masked sequence and the zero advantage are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from grpo_kernels import Objective, TokenBatch
from grpo_kernels.presets import NUMERICS

Tensor = torch.Tensor

#: Share of the tokens, and band, of Clip-Cov.
COV = (2e-4, 1.0, 5.0)


@dataclass(frozen=True)
class Theirs:
    """What a trainer computes."""

    loss: str = "clip"  # clip, cispo, sapo, vespo, reinforce, ratio, truncated-ratio, gmpo, clip-cov, kl-cov, dro, none
    ratio: str = "token"  # token, gspo: gradient through the mean, gspo-token: through the token
    clamp: tuple[float, float] | None = None  # of the log-ratio
    eps: tuple[float, float] = (0.2, 0.2)
    dual: float | None = None
    region: tuple[str, float, float] | None = None  # tv, symmetric-tv, kl, ratio: what is outside counts 0
    constant: float = 0.0  # of dro, kl-cov and truncated-ratio
    share: float = 2e-4  # of tokens, in kl-cov
    #: token: over tokens. sum. sequences: mean of means, sequences without tokens counted; non-empty: not counted.
    #: sequence-sum: mean of sums. budget: sum over B times a number of tokens.
    mean: str = "token"
    budget: int = 9
    #: KL in the loss: estimator, bounds of ref - logp and of the value, what it is weighted by. None: that trainer has none.
    kl: tuple[str, float, float, str] | None = ("k3", math.inf, math.inf, "")
    kl_mean: str | None = None
    entropy_mean: str | None = None
    #: On by default, with this weight.
    beta: float = 0.0


WIDE, INF = (-20.0, 20.0), math.inf
LOW10 = (-math.inf, 10.0)
K3_CLAMPED = ("k3", 20.0, 10.0, "")

LIGER = Theirs(beta=0.04)
UNSLOTH = Theirs()
VERL = Theirs(kl=K3_CLAMPED)
OPENRLHF = Theirs(kl=("k1", INF, 10.0, ""), kl_mean="token", entropy_mean="token")
SLIME = Theirs(mean="sequences", kl=("k1", INF, INF, ""))  # every rollout a mean of its own
AREAL = Theirs(kl=None)
NEMO = Theirs(kl=("k3", 20.0, 10.0, "score"), beta=0.01)
SKYRL = Theirs(kl=K3_CLAMPED, kl_mean="sequences", entropy_mean="token", beta=0.001)
PRIME = Theirs("ratio", kl=("squared", INF, INF, ""), beta=2e-3)
TITAN = Theirs(clamp=(-10.0, 10.0), kl=None)
HIGHER = (0.2, 0.28)


def family(base: Theirs) -> dict[str, Theirs]:
    """The loss types that Liger and Unsloth have from TRL."""
    return {
        "grpo": replace(base, mean="sequences"), "dapo": base, "bnpo": base, "dr_grpo": replace(base, mean="budget"),
        "gspo": replace(base, ratio="gspo", mean="sequences"), "cispo": replace(base, loss="cispo", eps=(1.0, 4.0)),
        "sapo": replace(base, loss="sapo", mean="sequences"), "vespo": replace(base, loss="vespo"),
    }  # fmt: skip


TRAINERS: dict[str, dict[str, Theirs]] = {
    "liger": family(LIGER) | {"luspo": replace(LIGER, ratio="gspo", mean="sequence-sum")},
    "unsloth": family(UNSLOTH) | {"dr_grpo": replace(UNSLOTH, mean="budget", budget=8192)},
    "verl": {
        "grpo": replace(VERL, clamp=WIDE, dual=3.0),
        "dapo": replace(VERL, clamp=WIDE, dual=3.0, eps=HIGHER),
        "dr_grpo": replace(VERL, clamp=WIDE, dual=3.0, mean="non-empty budget"),
        "ppo": replace(VERL, clamp=WIDE, dual=3.0),
        "gspo": replace(VERL, ratio="gspo-token", clamp=LOW10, mean="non-empty"),
        "gspo_token": replace(VERL, ratio="gspo-token", clamp=LOW10, mean="non-empty"),
        "sapo": replace(VERL, loss="sapo", clamp=WIDE, mean="non-empty"),
        "gmpo": replace(VERL, loss="gmpo", mean="sequences"),
        "cispo": replace(VERL, loss="cispo", clamp=WIDE),
        "reinforce": replace(VERL, loss="reinforce"),
        "dppo_tv": replace(VERL, loss="truncated-ratio", constant=3.0, clamp=WIDE, region=("tv", 0.2, 0.2)),
        "dppo_kl": replace(VERL, loss="truncated-ratio", constant=3.0, clamp=WIDE, region=("kl", 0.2, 0.2)),
        "clip_cov": replace(VERL, loss="clip-cov"),
        "kl_cov": replace(VERL, loss="kl-cov", constant=0.1),
        "dro": replace(VERL, loss="dro", constant=1.0),
    },
    "openrlhf": {
        "grpo": replace(OPENRLHF, clamp=WIDE),
        "dapo": replace(OPENRLHF, clamp=WIDE, eps=HIGHER),
        "gspo": replace(OPENRLHF, ratio="gspo", mean="non-empty"),
    },
    "slime": {
        "grpo": SLIME,
        "dapo": replace(SLIME, eps=HIGHER, mean="token"),  # DAPO's mean: its option calculate_per_token_loss
        "gspo": replace(SLIME, ratio="gspo"),
        "cispo": replace(SLIME, loss="cispo"),
    },
    "areal": {
        "grpo": AREAL,
        "dapo": replace(AREAL, eps=HIGHER),
        "gspo": replace(AREAL, ratio="gspo"),
        "sapo": replace(AREAL, loss="sapo"),
    },
    "nemo-rl": {
        "grpo": NEMO,
        "dapo": replace(NEMO, eps=HIGHER),
        "gspo": replace(NEMO, ratio="gspo", mean="sequences"),
        "cispo": replace(NEMO, loss="cispo"),
        "reinforce": replace(NEMO, loss="reinforce"),
    },
    "skyrl": {
        "grpo": replace(SKYRL, clamp=WIDE),
        "dapo": replace(SKYRL, clamp=WIDE, eps=HIGHER),
        "ppo": replace(SKYRL, clamp=WIDE, dual=3.0),
        "gspo": replace(SKYRL, ratio="gspo-token", clamp=LOW10, mean="sequences"),
        "sapo": replace(SKYRL, loss="sapo", clamp=WIDE, mean="sequences"),
        "cispo": replace(SKYRL, loss="cispo", clamp=WIDE, eps=(1.0, 4.0)),
        "rollout_is": replace(SKYRL, loss="truncated-ratio", constant=INF, region=("ratio", 0.2, 0.2)),
        "dppo_tv": replace(SKYRL, loss="ratio", clamp=WIDE, region=("tv", 0.2, 0.2)),
        "dppo_kl": replace(SKYRL, loss="ratio", clamp=WIDE, region=("kl", 0.05, 0.05)),
        "importance_sampling": replace(SKYRL, loss="ratio", mean="sum"),
        "clip_cov": replace(SKYRL, loss="clip-cov"),
        "kl_cov": replace(SKYRL, loss="kl-cov", constant=1.0, share=0.2),
    },
    "prime-rl": {
        "dppo_tv": replace(PRIME, region=("tv", 0.2, 0.2)),
        "ipo": replace(PRIME, region=("symmetric-tv", 0.1, 0.1)),
        "sampled_distillation": replace(PRIME, loss="none", kl=("distillation", INF, INF, ""), beta=1.0),
    },
    "torchtitan": {"grpo": TITAN, "dapo": TITAN},
}


# ---- the batch

B, T = 7, 8


@dataclass(frozen=True, eq=False)
class Data:
    logps: Tensor  # fp32 [B, T], like all of these
    old: Tensor
    ref: Tensor
    entropy: Tensor
    advantages: Tensor
    mask: Tensor


@pytest.fixture(scope="module")
def near() -> Data:
    """Ratios around the clip ranges, KL within its clamps."""
    g = torch.Generator().manual_seed(21)
    logps = -0.02 - 3 * torch.rand(B, T, generator=g).square()
    shift = torch.tensor([0.3, -0.3, -0.4, 0.1, 0.45, 0.05, 0.0])[:, None]
    old = (logps - shift - 0.25 * torch.randn(B, T, generator=g)).clamp(max=-0.01)
    ref = logps + 0.5 * torch.randn(B, T, generator=g)
    mask = torch.arange(T) < torch.tensor([8, 4, 6, 0, 8, 3, 5])[:, None]
    advantages = torch.tensor([1.2, 0.8, -0.7, 0.9, -1.1, -0.6, 0.0])[:, None].expand(B, T)
    return Data(logps, old, ref, torch.rand(B, T, generator=g) + 0.5, advantages, mask)


@pytest.fixture(scope="module")
def token_advantages(near: Data) -> Data:
    """Advantages that differ within a sequence, in size and sign: through a sequence's ratio each reaches every token."""
    g = torch.Generator().manual_seed(22)
    return replace(near, advantages=near.advantages + 0.4 * torch.randn(B, T, generator=g))


@pytest.fixture(scope="module")
def far(near: Data) -> Data:
    """Log-ratios beyond 10 and 20, of tokens and of whole sequences."""
    old = near.old.clone()
    old[0, :3] = near.logps[0, :3] - torch.tensor([9.0, -21.0, -9.5])
    old[1], old[2, :2] = near.logps[1] - 11.0, near.logps[2, :2] - torch.tensor([12.0, 9.5])
    old[4, 0], old[5] = near.logps[4, 0] - 21.0, near.logps[5] - 11.0
    return replace(near, old=old)


@pytest.fixture(scope="module")
def far_reference(near: Data) -> Data:
    """A KL whose value, or difference of log-probs, is beyond its clamp."""
    ref = near.ref.clone()
    ref[0, 0], ref[2, 3], ref[5, 1] = near.logps[0, 0] + 2.7, near.logps[2, 3] - 12.0, near.logps[5, 1] + 4.0
    ref[0, 1] = near.logps[0, 1] - 25.0
    return replace(near, ref=ref)


# ---- the reference, float64


@dataclass(frozen=True, eq=False)
class Result:
    loss: float
    slopes: Tensor  # [B, T]
    scale: float
    unit: Tensor  # what a rounding error of a slope is relative to, besides the slope


def policy(t: Theirs, x: Tensor, own: Tensor, logp: Tensor, old: Tensor, A: Tensor, chosen: Tensor) -> Tensor:
    """Per-token losses of a sequence; x: log-ratios at the trainer's level."""
    r = (x if t.clamp is None else x.clamp(*t.clamp)).exp()
    low, high = 1 - t.eps[0], 1 + t.eps[1]
    if t.loss in ("clip", "clip-cov"):
        loss = -torch.minimum(r * A, r.clamp(low, high) * A)
        if t.dual is not None:
            loss = torch.where(A < 0, torch.minimum(loss, -t.dual * A), loss)
        return torch.where(chosen, 0.0, loss) if t.loss == "clip-cov" else loss
    if t.loss == "cispo":
        return -r.clamp(low, high).detach() * A * logp
    if t.loss == "sapo":
        tau = torch.where(A > 0, 1.0, 1.05)
        return -4 / tau * torch.sigmoid(tau * (r - 1)) * A
    if t.loss == "vespo":
        log_w = own.clamp(-20, 20).sum().clamp(math.log(1e-8), 20)
        k, rate = torch.where(A >= 0, 2.0, 3.0), torch.where(A >= 0, 3.0, 2.0)
        return -torch.exp(rate + k * log_w - rate * log_w.exp()).detach() * A * logp
    if t.loss == "reinforce":
        return -A * logp
    if t.loss == "gmpo":
        bounded = own.clamp(-t.eps[0], t.eps[1])
        c = A.sign() * torch.minimum(A.sign() * own, A.sign() * bounded)
        return (-A.mean() * c.mean().exp()).expand(len(own))
    if t.loss == "dro":
        return -(A * logp - t.constant / 2 * own**2)
    if t.loss == "kl-cov":
        return -r * A + torch.where(chosen, t.constant * own.abs(), 0.0)
    if t.loss == "none":
        return 0.0 * logp
    keep = torch.ones_like(A)
    if t.region is not None:
        kind, down, up = t.region
        p, q = logp.detach().exp(), old.exp()
        if kind == "kl":
            moved = q * (old - logp.detach()) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
            keep = ~(((A > 0) & (moved > up) & (p > q)) | ((A < 0) & (moved > down) & (p < q)))
        elif kind == "ratio":
            keep = (p / q > 1 - down) & (p / q < 1 + up)
        else:
            above, below = p - q <= up, p - q >= -down
            keep = above & below if kind == "symmetric-tv" else torch.where(A > 0, above, below)
    if t.loss == "ratio":
        return torch.where(keep != 0, -r * A, 0.0)
    assert t.loss == "truncated-ratio"
    return -(r.clamp(max=t.constant) * keep).detach() * A * logp


def penalty(t: Theirs, logp: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    assert t.kl is not None
    name, bound, limit, weight = t.kl
    d = (ref - logp).clamp(-bound, bound)
    if name == "squared":  # kappa (log r)^2, of which beta is the double
        return 0.5 * (logp - old) ** 2
    if name == "distillation":
        keep = logp.detach().exp() - old.exp() >= -0.2
        return -torch.where(keep, (ref - logp).detach() * (logp - old).exp(), 0.0) + 1e-3 * (logp - old) ** 2
    value = {"k1": -d, "k3": d.exp() - d - 1}[name]
    if weight == "score":  # before the clamp of the value; a constant where the difference was clamped
        carried = torch.where((ref - logp).detach().abs() <= bound, logp, logp.detach())
        value = value * (carried - logp.detach()).exp()
    return value.clamp(-limit, limit)


def chosen_tokens(t: Theirs, data: Data) -> Tensor:
    """Of Clip-Cov (the first candidate) and KL-Cov (the largest covariances): bool [B, T]."""
    at = data.mask.nonzero().tolist()
    chosen = torch.zeros_like(data.mask)
    logps, advantages = data.logps.double(), data.advantages.double()
    mean_logp = sum(float(logps[b, i]) for b, i in at) / len(at)
    mean_a = sum(float(advantages[b, i]) for b, i in at) / len(at)
    cov = {(b, i): (float(advantages[b, i]) - mean_a) * (float(logps[b, i]) - mean_logp) for b, i in at}
    if t.loss == "kl-cov":
        for b, i in sorted(cov, key=lambda token: -cov[token])[: max(1, int(t.share * len(at)))]:
            chosen[b, i] = True
    if t.loss == "clip-cov":
        share, low, high = COV
        assert int(share * len(at)) == 0  # so one is taken
        for b, i in at:
            A, r = float(data.advantages[b, i]), math.exp(float(logps[b, i]) - float(data.old[b, i]))
            clipped = (A > 0 and r > 1 + t.eps[1]) or (A < 0 and r < 1 - t.eps[0])
            if low < cov[b, i] < high and not clipped:
                chosen[b, i] = True
                break
    return chosen


def reference(t: Theirs, data: Data, beta: float, coef: float) -> Result:
    logps = data.logps.double().requires_grad_()
    chosen = chosen_tokens(t, data)
    counts = data.mask.sum(1)
    parts: dict[str, list[Tensor]] = {"policy": [], "kl": [], "entropy": []}
    unit = torch.zeros(B, T, dtype=torch.float64)

    def share(mean: str, n: int) -> float:
        """What one token of a sequence of n counts."""
        sequences = float((counts > 0).sum()) if "non-empty" in mean else float(B)
        D = {"token": float(counts.sum()), "sum": 1.0}.get(mean, sequences)
        return 1 / D / (n if mean in ("sequences", "non-empty") else t.budget if "budget" in mean else 1)

    for b in range(B):
        at = data.mask[b].nonzero()[:, 0]
        n = len(at)
        if n == 0:
            continue
        logp, old, ref = logps[b, at], data.old.double()[b, at], data.ref.double()[b, at]
        own, A = logp - old, data.advantages.double()[b, at]
        x = own
        if t.ratio == "gspo":
            x = own.mean().expand(n)
        elif t.ratio == "gspo-token":
            x = own.mean().detach() + logp - logp.detach()
        parts["policy"].append(policy(t, x, own, logp, old, A, chosen[b, at]) * share(t.mean, n))
        if beta:
            parts["kl"].append(beta * penalty(t, logp, old, ref) * share(t.kl_mean or t.mean, n))
        parts["entropy"].append(-coef * data.entropy.double()[b, at] * share(t.entropy_mean or t.mean, n))
        unit[b, at] = (A.abs().clamp(min=0.1) + beta) * share(t.mean, n)
    terms = torch.cat([torch.cat(p) for p in parts.values() if p])
    loss = terms.sum()
    (slopes,) = torch.autograd.grad(loss, logps, allow_unused=True)
    return Result(float(loss.detach()), slopes, float(terms.detach().abs().sum()), unit)


def ours(objective: Objective, data: Data) -> tuple[float, Tensor, Tensor | None]:
    def hidden(x: Tensor) -> Tensor:
        return torch.where(data.mask, x, math.nan)

    batch = TokenBatch(
        torch.zeros(B, T, dtype=torch.int64), hidden(data.advantages), mask=data.mask, old_logps=hidden(data.old),
        ref_logps=hidden(data.ref),
    )  # fmt: skip
    flat = [torch.where(data.mask, x, 0.0).reshape(-1) for x in (data.logps, data.entropy)]
    with pytest.MonkeyPatch.context() as patch:  # Clip-Cov draws from its candidates: here the first one
        patch.setattr(torch, "rand", lambda shape, **_: torch.arange(math.prod(shape)).view(shape) / 1e3)
        losses, slopes, d_entropy = objective.token_stage(*flat, objective.token_rows(batch), batch)
    return float(losses.sum(dtype=torch.float64)), slopes.view(B, T), d_entropy


EVERY = [(trainer, name) for trainer in TRAINERS for name in TRAINERS[trainer]]


def test_every_preset_of_every_trainer_is_here() -> None:
    """TRL's are in test_trl_losses.py."""
    assert {t: set(p) for t, p in NUMERICS.items() if t != "trl"} == {t: set(p) for t, p in TRAINERS.items()}


@pytest.mark.parametrize("which", ["near", "far", "far_reference", "token_advantages"])
@pytest.mark.parametrize("trainer, name", EVERY)
def test_numbers(trainer: str, name: str, which: str, request: pytest.FixtureRequest) -> None:
    """With the KL weight that the trainer has by default, with one of ours where it has a KL, and with an entropy bonus."""
    t, data = TRAINERS[trainer][name], request.getfixturevalue(which)
    if which == "token_advantages" and (trainer in ("liger", "unsloth") or (trainer, name) == ("areal", "gspo")):
        return  # one per sequence there; AReaL's GSPO takes their mean
    budget = {"max_tokens": t.budget} if "budget" in t.mean and t.budget != 8192 else {}
    default = Objective.preset(name, numerics=trainer, **budget)
    assert default.beta == t.beta
    betas = [t.beta] if t.kl is None or trainer == "prime-rl" else [t.beta, 0.3]
    if t.clamp is None and t.loss in ("clip", "clip-cov", "kl-cov", "ratio", "gmpo", "none"):
        data = replace(data, old=torch.maximum(data.old, data.logps - 9.5))  # e^21 would hide everything else
    if trainer == "prime-rl":
        # Its pull (log r)^2 goes to the sampler. Distillation has no rewards.
        data = replace(data, advantages=0 * data.advantages) if name == "sampled_distillation" else replace(data, ref=data.old)
    for beta in dict.fromkeys(betas):
        for coef in (0.0, 0.02):
            changes = budget | ({"entropy_coef": coef} if coef else {}) | ({"beta": beta} if beta != t.beta else {})
            want = reference(t, data, beta, coef)
            loss, slopes, d_entropy = ours(Objective.preset(name, numerics=trainer, **changes), data)
            what = (trainer, name, beta, coef)
            assert abs(loss - want.loss) <= 1e-5 * want.scale, f"{what}: loss {loss}, not {want.loss}"
            error = (slopes.double() - want.slopes).abs()
            beyond = error - 1e-5 * want.slopes.abs() - 2e-6 * want.unit
            assert float(beyond.max()) <= 0, f"{what}: a slope is off by {float(error.max())}"
            assert (d_entropy is not None) == (coef != 0)
            assert want.scale > 1e-4 or which == "far"


def test_every_constant_changes_loss_or_slopes(near: Data, far: Data, far_reference: Data) -> None:
    """Every constant of a row changes the loss or the slopes, so that a wrong one would be noticed."""

    def shows(t: Theirs, other: Theirs, data: Data) -> bool:
        a, b = (reference(row, data, 0.3 if t.kl else 0.0, 0.02) for row in (t, other))
        slopes = float((a.slopes - b.slopes).abs().max()) > 1e-4 * float(a.slopes.abs().max())
        return slopes or abs(a.loss - b.loss) > 1e-4 * a.scale

    for trainer, rows in TRAINERS.items():
        for name, t in rows.items():
            others = {}
            if t.loss in ("clip", "gmpo", "clip-cov"):
                others["eps_low"] = replace(t, eps=(t.eps[0] - 0.05, t.eps[1]))
                others["eps_high"] = replace(t, eps=(t.eps[0], t.eps[1] + 0.05))
            if t.loss == "cispo" and t.eps == (0.2, 0.2):
                others["eps"] = replace(t, eps=(0.15, 0.25))
            if t.clamp is not None and t.loss == "clip" and t.dual is None:  # elsewhere another bound comes before it
                others["clamp"] = replace(t, clamp=(t.clamp[0], t.clamp[1] - 0.9))
            if t.dual is not None:
                others["dual"] = replace(t, dual=t.dual + 0.1)
            if t.region is not None:
                others["region"] = replace(t, region=(t.region[0], t.region[1] * 0.4, t.region[2] * 0.4))
            if t.mean != "sum":
                others["mean"] = replace(t, mean="sum")
            if t.mean in ("sequences", "non-empty") and trainer != "prime-rl":
                others["empty"] = replace(t, mean="non-empty" if t.mean == "sequences" else "sequences")
            if t.kl is not None and t.kl[2] < INF:
                others["kl clamp"] = replace(t, kl=(*t.kl[:2], INF, t.kl[3]))
            if t.kl is not None and t.kl[3]:
                others["kl weight"] = replace(t, kl=(*t.kl[:3], ""))
            for what, other in others.items():
                assert any(shows(t, other, data) for data in (near, far, far_reference)), (trainer, name, what)
