"""OpenRLHF, AReaL, slime, prime-rl, NeMo-RL, SkyRL and Unsloth: each adapter against the trainer's own function where its
package is on the path (loaded from its file alone, without its dependencies), and against a float64 transcription of what
that function is documented to do, always.

    pip download --no-deps openrlhf==0.11.0 areal==1.0.4 skyrl==0.3.0 unsloth_zoo==2026.8.13       # unpacked, on PYTHONPATH
"""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels import Objective
from grpo_kernels.integrations import areal, nemo_rl, openrlhf, prime_rl, skyrl, slime, unsloth
from grpo_kernels.integrations._slots import Slots
from grpo_kernels.kl import Kl
from grpo_kernels.surrogates import Cispo, Clip, Sapo

Tensor = torch.Tensor

B, T, V, H = 5, 7, 23, 16
MASK = torch.arange(T) < torch.tensor([7, 3, 0, 5, 6])[:, None]
MASK[0, 2] = False


@dataclass(frozen=True, eq=False)
class Data:
    logps: Tensor
    old: Tensor
    sampler: Tensor
    ref: Tensor
    advantages: Tensor


@pytest.fixture(scope="module")
def data() -> Data:
    g = torch.Generator().manual_seed(5)
    logps = -0.02 - 4 * torch.rand(B, T, generator=g).square()
    shift = torch.tensor([0.3, -0.35, 0.1, 0.6, -0.3])[:, None]
    old = (logps - shift - 0.3 * torch.randn(B, T, generator=g)).clamp(max=-0.01)
    sampler = (old + 0.3 * torch.randn(B, T, generator=g)).clamp(max=-0.01)
    advantages = torch.tensor([1.2, 0.8, 0.5, -1.1, -0.7])[:, None] * (1 + 0.2 * torch.randn(B, T, generator=g))
    return Data(logps, old, sampler, logps + 0.4 * torch.randn(B, T, generator=g), advantages)


@pytest.fixture(autouse=True)
def any_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that a test puts into sys.modules go away with it; versions are as the adapters know them."""
    before = set(sys.modules)
    monkeypatch.setattr(metadata, "version", lambda name: VERSIONS[name])
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ROOTS:
            del sys.modules[name]


VERSIONS = {
    "openrlhf": "0.11.0", "areal": "1.0.4", "slime": "0.3.1", "prime-rl": "0.8.0", "skyrl": "0.3.0", "unsloth_zoo": "2026.8.13",
}  # fmt: skip
ROOTS = ("openrlhf", "areal", "slime", "prime_rl", "nemo_rl", "skyrl", "unsloth_made", "unsloth_zoo", "deepspeed")


def stand_in(name: str, **contents: Any) -> ModuleType:
    """A module of this name in sys.modules, under as many packages as the name has."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path not in sys.modules:
            module = ModuleType(path)
            module.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=i < len(parts))
            module.__path__ = []
            sys.modules[path] = module
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
    vars(sys.modules[name]).update(contents)
    return sys.modules[name]


def their_file(name: str, monkeypatch: pytest.MonkeyPatch, **stubs: dict[str, Any]) -> ModuleType:
    """One file of an installed trainer as a module of its name, its packages' __init__ not run; skips where it is not there."""
    root = name.split(".")[0]
    spec = importlib.util.find_spec(root) if root not in sys.modules else None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{root} is not installed")
    path = Path(spec.submodule_search_locations[0]).joinpath(*name.split(".")[1:]).with_suffix(".py")
    if not path.exists():
        pytest.skip(f"this {root} has no {path.name}")
    for stub, contents in stubs.items():
        stand_in(stub.replace("__", "."), **contents)
    module = stand_in(name)
    module.__file__, module.__package__ = str(path), name.rpartition(".")[0]
    monkeypatch.setattr(torch, "compile", lambda f=None, **_: f if f is not None else lambda g: g)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


# ---- transcriptions, float64


def mean_of(x: Tensor, mask: Tensor = MASK) -> Tensor:
    return (x * mask).sum() / mask.sum()


def clipped(r: Tensor, A: Tensor, low: float, high: float, c: float | None = None) -> tuple[Tensor, Tensor]:
    """PPO's clip, with dual clip; and where the bound holds."""
    bounded = r.clamp(1 - low, 1 + high)
    loss = torch.maximum(-r * A, -bounded * A)
    if c is not None:
        loss = torch.where(A < 0, torch.minimum(loss, -c * A), loss)
    return loss, -bounded * A > -r * A


def log_softmax_of(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    p = torch.log_softmax(logits.double() / temperature, -1)
    return p.gather(-1, labels[..., None])[..., 0], -(p.exp() * p).sum(-1)


def value_and_gradient(f: Callable[[Tensor], Any], x: Tensor, dtype: torch.dtype) -> tuple[Any, Tensor]:
    x = x.detach().to(dtype, copy=True).requires_grad_()
    result = f(x)
    loss = result if isinstance(result, Tensor) else result[0]
    return result, torch.autograd.grad(loss, x)[0].double()


def assert_same(got: Any, want: Any) -> None:
    """(loss, ...) and gradient, ours and theirs."""
    (ours, gradient), (theirs, expected) = got, want
    ours, theirs = (x if isinstance(x, tuple) else (x,) for x in (ours, theirs))
    torch.testing.assert_close(ours[0].detach().double(), theirs[0].detach().double(), rtol=1e-5, atol=1e-6)
    scale = float(expected.abs().max())
    assert scale > 0
    torch.testing.assert_close(gradient, expected, rtol=2e-5, atol=2e-6 * scale)


def double(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.double() for x in tensors)


# ---- OpenRLHF


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
COUNTS: list[dict[str, Any]] = [{}, {"dp_size": 2, "batch_num_tokens": 61.0, "global_batch_size": 17.0}]


def openrlhf_loss(options: dict[str, Any], logps: Tensor, data: Data, counts: dict[str, Any]) -> tuple[Tensor, ...]:
    old, sampler, A = double(data.old, data.sampler, data.advantages)
    low, high = options.get("clip_eps_low", 0.2), options.get("clip_eps_high", 0.2)
    gspo, corrected = options.get("policy_loss_type") == "gspo", options.get("enable_vllm_is_correction", False)
    n = MASK.sum(1, keepdim=True)
    if gspo:
        x = logps - (sampler if corrected else old)
        r = ((x * MASK).sum(1, keepdim=True) / n.clamp(min=1)).exp() * MASK
    else:
        r = (logps - old).clamp(-20, 20).exp()
    loss, bound = clipped(r, A, low, high, options.get("dual_clip"))
    kl = None
    if corrected and not gspo:
        w, (lo, hi) = (old - sampler).exp(), options["vllm_is_truncated_threshold"]
        kind = options.get("vllm_is_correction_type", "tis")
        if kind == "tis":
            w = w.clamp(lo, hi)
        elif kind == "icepop":
            w = w * ((w >= lo) & (w <= hi))
        else:
            G = (((old - sampler) * MASK).sum(1, keepdim=True) / n).exp()
            w = w * ((G >= lo) & (G <= hi))
        loss, kl = loss * w, mean_of(sampler - old)
    dp = counts.get("dp_size", 1)
    if options.get("token_level_loss", True) and not gspo:
        total = (loss * MASK).sum() / counts.get("batch_num_tokens", MASK.sum()) * dp
    else:
        rows = (loss * MASK).sum(1) / (n[:, 0] + 1e-8)
        total = rows.sum() / counts.get("global_batch_size", MASK.any(1).sum()) * dp
    return total, mean_of(bound.double()), mean_of(old - logps.detach()), kl


def check_openrlhf(data: Data, theirs: Callable[..., Any]) -> None:
    for options in OPENRLHF.values():
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


def test_openrlhf_loss(data: Data) -> None:
    check_openrlhf(data, openrlhf_loss)
    losses = [float(openrlhf_loss(options, data.logps.double(), data, {})[0].detach()) for options in OPENRLHF.values()]
    assert len({round(x, 7) for x in losses}) == len(losses)
    empty = openrlhf.PolicyLoss()(data.logps.clone().requires_grad_(), data.old, data.advantages, torch.zeros(B, T))
    assert float(empty[0].detach()) == 0 and float(empty[1]) == 0 and empty[0].requires_grad
    # Nor does a count of 0, with or without a tensor around it, make the denominator 0.
    for none in (0, 0.0, torch.tensor(0)):
        for options, name in (({}, "batch_num_tokens"), ({"token_level_loss": False}, "global_batch_size")):
            loss = openrlhf.PolicyLoss(**options)
            out = loss(data.logps, data.old, data.advantages, torch.zeros(B, T), dp_size=2, **{name: none})
            assert float(out[0]) == 0


def test_openrlhf_itself(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = their_file("openrlhf.models.utils", monkeypatch, deepspeed={})
    PolicyLoss = their_file_beside("openrlhf.models.loss", utils).PolicyLoss

    def theirs(options: dict[str, Any], logps: Tensor, data: Data, counts: dict[str, Any]) -> Any:
        loss = PolicyLoss(**options)
        assert vars(openrlhf.PolicyLoss.like(loss))["clip_eps_low"] == loss.clip_eps_low
        return loss(logps, *double(data.old, data.advantages), MASK.double(), data.sampler.double(), **counts)

    check_openrlhf(data, theirs)
    labels, logits = torch.randint(V, (B, T)), torch.randn(B, T, V)
    want = utils.log_probs_from_logits(logits.clone(), labels, 0.7), utils.compute_entropy(logits)
    with openrlhf.bind(strict=True) as slots:
        got = utils.log_probs_from_logits(logits, labels, 0.7), utils.compute_entropy(logits)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert slots.counts == {"fused": 2}


def their_file_beside(name: str, loaded: ModuleType) -> ModuleType:
    """Another file of the same folder."""
    module = stand_in(name)
    path = Path(str(loaded.__file__)).with_name(name.rpartition(".")[2] + ".py")
    module.__file__, module.__package__ = str(path), name.rpartition(".")[0]
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


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
    ):
        with pytest.raises(ValueError, match=message):
            openrlhf.PolicyLoss(**options)
    loss, x = openrlhf.PolicyLoss(enable_vllm_is_correction=True), torch.zeros(B, T)
    with pytest.raises(ValueError, match="rollout_log_probs is None"):
        loss(x, x, x, MASK)


# ---- AReaL


def test_areal_functions() -> None:
    def gather_logprobs(logits: Any, labels: Any, temperature: float = 1.0, tp_group: Any = None, chunk_size: int = 1) -> Any:
        return log_softmax_of(logits, labels, temperature)[0]

    def gather_logprobs_entropy(logits: Any, labels: Any, temperature: float = 1.0, tp_group: Any = None) -> Any:
        return log_softmax_of(logits, labels, temperature)

    names = {"gather_logprobs": gather_logprobs, "gather_logprobs_entropy": gather_logprobs_entropy}
    stand_in("areal.utils.functional.vocab_parallel", **names)
    check_areal(stand_in("areal.engine.fsdp_engine", **names))


def check_areal(engine: ModuleType) -> None:
    labels, logits, up = torch.randint(V, (11,)), torch.randn(11, V), torch.linspace(-1, 1, 11)

    def both(x: Tensor) -> Tensor:
        logps, entropy = engine.gather_logprobs_entropy(x, labels, temperature=0.8, tp_group=None)
        return (logps * up).sum() + 0.1 * entropy.sum() + engine.gather_logprobs(x, labels, temperature=1.3).square().sum()

    want = value_and_gradient(both, logits, torch.float64)
    theirs = engine.gather_logprobs
    with areal.bind(strict=True) as slots:
        assert_same(value_and_gradient(both, logits, torch.float32), want)
        assert slots.counts == {"fused": 2}
    assert engine.gather_logprobs is theirs
    with areal.bind() as slots:
        assert engine.gather_logprobs(logits.double(), labels).dtype.is_floating_point
        assert slots.counts == {"areal: dtype torch.float64": 1}


def test_areal_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    check_areal(
        their_file("areal.utils.functional.vocab_parallel", monkeypatch, areal__infra__platforms={"is_npu_available": False})
    )


# ---- slime


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
def test_slime_loss(data: Data, what: str) -> None:
    args, batch = slime_args(**SLIME[what]), slime_batch(data)
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


def test_slime_loss_of_an_objective_and_of_nothing(data: Data) -> None:
    batch, logits = slime_batch(data), torch.randn(1, 31, V)
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


def test_slime_kl_of_the_metrics_is_that_of_the_loss(data: Data) -> None:
    """With a ratio summed over the sequence it is a token's own ratio that weighs its KL; no metric overflows."""
    batch, logits = slime_batch(data), torch.randn(1, 31, V)
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
    with slime.bind():
        assert loss_module.calculate_log_probs_and_entropy(logits[:0], tokens[:0], None)[0].shape == (0, 1)
    assert home.calculate_log_probs_and_entropy is theirs


# ---- prime-rl


def test_prime_rl_head() -> None:
    """A stand-in for the head module: one temperature per token; no gradient through the entropy."""

    class _SequenceChunkedLogProbEntropyFn:
        @staticmethod
        def apply(hidden: Tensor, weight: Tensor, labels: Tensor, inv_temperature: Tensor, chunk_size: int) -> Any:
            logits = hidden.double() @ weight.double().T * inv_temperature.double()[:, None]
            logps, entropy = log_softmax_of(logits, labels)
            return logps, entropy.detach()

    home = "prime_rl.trainer.models.layers.lm_head"
    head = stand_in(home, _SequenceChunkedLogProbEntropyFn=_SequenceChunkedLogProbEntropyFn)
    hidden, weight, labels = torch.randn(12, H), torch.randn(V, H), torch.randint(V, (12,))
    inverse, up = 1 / (0.5 + torch.rand(12)), torch.linspace(-1, 1, 12)

    def use(dtype: torch.dtype) -> tuple[Tensor, ...]:
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        logps, entropy = head._SequenceChunkedLogProbEntropyFn.apply(h, w, labels, inverse, 8)
        assert not entropy.requires_grad
        return tuple(x.double() for x in (logps.detach(), entropy, *torch.autograd.grad((logps * up).sum(), (h, w))))

    want = use(torch.float64)
    with prime_rl.bind(strict=True) as slots:
        for got, expected in zip(use(torch.float32), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert slots.counts == {"fused": 1}
        with pytest.raises(RuntimeError, match="ours already"):
            prime_rl.bind()
    assert head._SequenceChunkedLogProbEntropyFn is _SequenceChunkedLogProbEntropyFn


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    loss: Tensor
    metrics: dict[str, Tensor]


def prime_inputs(data: Data, row: int, logps: Tensor, weights: Tensor | None = None) -> LossInputs:
    return LossInputs(logps[row], data.sampler[row], data.ref[row], data.advantages[row], MASK[row], weights)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["dppo_tv", "ipo", "cispo", "k3 to the reference"])
def test_prime_rl_loss(data: Data, name: str, weighted: bool) -> None:
    stand_in("prime_rl.trainer.rl.loss", LossOutputs=LossOutputs)
    w = 0.5 + torch.rand(B, T) if weighted else torch.ones(B, T)
    options: dict[str, Any] = {"objective": name}
    if name == "k3 to the reference":
        options = {"objective": "grpo", "changes": {"beta": 0.2, "surrogate": Clip(0.1, 0.3)}}
    elif name == "cispo":
        options["changes"] = {"surrogate": Cispo(1.2)}

    def ours(x: Tensor) -> Any:
        outs = [prime_rl.loss(prime_inputs(data, b, x, w[b] if weighted else None), **options) for b in range(B)]
        assert all(set(out.metrics) == {"mismatch_kl", "is_masked"} for out in outs)
        return sum(out.loss for out in outs), outs

    def theirs(x: Tensor) -> Tensor:
        q, ref, A = double(data.sampler, data.ref, data.advantages)
        d = x - q
        moved = x.detach().exp() - q.exp()
        if name == "dppo_tv":
            keep = torch.where(A > 0, moved <= 0.2, moved >= -0.2)
            loss = -A * d.exp() * keep + 1e-3 * d * d
        elif name == "ipo":
            loss = -A * d.exp() * (moved.abs() <= 0.1) + 1e-3 * d * d
        elif name == "cispo":
            loss = -d.exp().clamp(max=1.2).detach() * A * x
        else:
            loss = clipped(d.exp(), A, 0.1, 0.3)[0] + 0.2 * ((ref - x).exp() - (ref - x) - 1)
        return (w * loss * MASK).sum()

    (loss, outs), gradient = value_and_gradient(ours, data.logps, torch.float32)
    assert_same((loss, gradient), value_and_gradient(theirs, data.logps, torch.float64))
    x = (data.logps - data.sampler)[0][MASK[0]].double()
    assert float(outs[0].metrics["mismatch_kl"]) == pytest.approx(float((x.exp() - x - 1).mean()), rel=1e-4)
    assert 0 < sum(float(out.metrics["is_masked"]) for out in outs) < B


# ---- NeMo-RL


NEMO = {
    "tokens": (Objective.preset("dapo", numerics="nemo-rl"), None),
    "sequences, gspo": (Objective.preset("gspo", numerics="nemo-rl"), None),
    "kl, truncated weights": (
        Objective.preset("grpo", numerics="nemo-rl", beta=0.1), {"mode": "truncate", "low": 0.8, "high": 1.3},
    ),
    "sequences, kl, icepop": (
        Objective.preset("grpo", numerics="nemo-rl", beta=0.1, aggregate="seq-mean-token-mean"),
        {"mode": "mask", "low": 0.7, "high": 1.4},
    ),
    "cispo": (Objective.preset("cispo", numerics="nemo-rl"), None),
}  # fmt: skip


@pytest.fixture
def nemo() -> Iterator[None]:
    types = enum.Enum("LossType", ["TOKEN_LEVEL", "SEQUENCE_LEVEL"])
    stand_in(
        "nemo_rl.algorithms.loss.interfaces", LossType=types, LossInputType=enum.Enum("LossInputType", ["LOGIT", "LOGPROB"])
    )
    yield


@pytest.mark.parametrize("what", NEMO)
def test_nemo_rl_loss(data: Data, what: str, nemo: None) -> None:
    objective, importance = NEMO[what]
    g = torch.Generator().manual_seed(4)
    logits, ids = torch.randn(B, T + 1, V, generator=g), torch.randint(V, (B, T + 1), generator=g)
    logps = log_softmax_of(logits[:, :-1], ids[:, 1:])[0].float()

    def column(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (1, 0))

    sample_mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
    fields = {
        "input_ids": ids, "token_mask": column(MASK.float()), "sample_mask": sample_mask, "advantages": column(data.advantages),
        "prev_logprobs": column(logps + data.old - data.logps), "reference_policy_logprobs": column(logps + data.ref - data.logps),
        "generation_logprobs": column(logps + data.sampler - data.logps),
    }  # fmt: skip
    toks, seqs = torch.tensor(47.0), torch.tensor(9.0)
    loss_fn = nemo_rl.PolicyLoss(objective, importance=importance)
    assert loss_fn.input_type.name == "LOGIT" and loss_fn.loss_type.name.startswith("TOK" if "seq" not in what else "SEQ")
    (loss, metrics), gradient = value_and_gradient(
        lambda x: loss_fn(logits=x, data=fields, global_valid_seqs=seqs, global_valid_toks=toks), logits, torch.float32
    )

    m = MASK * sample_mask[:, None]
    old, ref, gen, A = (fields[n][:, 1:].double() for n in (
        "prev_logprobs", "reference_policy_logprobs", "generation_logprobs", "advantages"))  # fmt: skip

    def theirs(x: Tensor) -> Any:
        curr = log_softmax_of(x[:, :-1], ids[:, 1:])[0]
        d = curr - old
        if "gspo" in what:
            d = ((d * MASK).sum(1, keepdim=True) / (MASK.sum(1, keepdim=True) + 1e-8)).expand(B, T)
        r, (low, high) = d.exp(), objective.surrogate.ratio_bounds
        value = -r.clamp(low, high).detach() * A * curr if what == "cispo" else clipped(r, A, 1 - low, high - 1)[0]
        if importance is not None:
            w, lo, hi = (old - gen).exp(), importance["low"], importance["high"]
            value = value * (w.clamp(lo, hi) if importance["mode"] == "truncate" else w * ((w >= lo) & (w <= hi)))
        e = ref - curr
        kl = (e.clamp(-20, 20).exp() - e.clamp(-20, 20) - 1).clamp(max=10) * (curr - curr.detach()).exp()

        def reduce(v: Tensor) -> Tensor:
            if "seq" not in what:
                return (v * m).sum() / toks
            return ((v * MASK).sum(1) / (MASK.sum(1) + 1e-8) * sample_mask).sum() / seqs

        penalty = reduce(kl)
        return reduce(value) + objective.beta * penalty, (curr.detach(), r.detach(), penalty.detach())

    (want, (curr, r, penalty)), expected = value_and_gradient(theirs, logits, torch.float64)
    assert_same((loss, gradient), (want, expected))
    assert not gradient[:, -1].any() and not gradient[3].any()
    low, high = objective.surrogate.ratio_bounds
    inside = m != 0
    named = {
        "loss": want, "probs_ratio": (r * m).sum() / toks, "probs_ratio_clamped": (r.clamp(low, high) * m).sum() / toks,
        "token_mult_prob_error": ((gen - old).abs().exp() * m).sum() / toks,
        "sampling_importance_ratio": ((old - gen).exp() * m).sum() / toks,
        "approx_entropy": -((curr - gen).exp() * curr * m).sum() / toks, "num_valid_samples": sample_mask.sum(),
        "kl_penalty": penalty if objective.beta else torch.zeros(()), "probs_ratio_min": r[inside].min(),
        "probs_ratio_max": r[inside].max(), "probs_ratio_clamped_min": r[inside].clamp(low, high).min(),
        "probs_ratio_clamped_max": r[inside].clamp(low, high).max(),
    }  # fmt: skip
    assert metrics == pytest.approx({k: float(v.detach()) for k, v in named.items()}, rel=1e-4, abs=1e-6)


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
    sharded = SimpleNamespace(placements=())
    with pytest.raises(ValueError, match="logits is a DTensor"):
        nemo_rl.PolicyLoss(Objective())(sharded, {}, torch.ones(()), torch.ones(()))


# ---- SkyRL


HOME = "skyrl.backends.skyrl_train"
SKYRL: dict[str, tuple[str | Objective, dict[str, Any]]] = {
    "dual_clip": (
        Objective.preset("ppo", numerics="skyrl", beta=0.0, surrogate=Clip(0.1, 0.28, 1.6), aggregate="token-sum"),
        {"policy_loss_type": "dual_clip", "eps_clip_low": 0.1, "eps_clip_high": 0.28, "clip_ratio_c": 1.6},
    ),
    "regular": ("grpo", {"policy_loss_type": "regular"}),
    "gspo": ("gspo", {}),
    "sapo": (Objective.preset("sapo", numerics="skyrl", beta=0.0, surrogate=Sapo(0.9, 1.3), aggregate="token-sum"), {}),
    "cispo": (
        Objective.preset("cispo", numerics="skyrl", beta=0.0, surrogate=Cispo(1.3, 0.75), aggregate="token-sum"), {},
    ),
    "dppo": ("dppo_tv", {}),
    "rollout_is": ("rollout_is", {}),
}  # fmt: skip
THEIRS = {
    "dual_clip": "ppo_policy_loss", "regular": "ppo_policy_loss", "gspo": "gspo_policy_loss", "sapo": "sapo_policy_loss",
    "cispo": "compute_policy_loss_cispo", "dppo": "dppo_policy_loss", "rollout_is": "rollout_is_policy_loss",
}  # fmt: skip


def skyrl_config(changes: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        **{"eps_clip_low": 0.2, "eps_clip_high": 0.2, "clip_ratio_c": 3.0, "loss_reduction": "sequence_mean"} | changes,
        sapo=SimpleNamespace(tau_pos=0.9, tau_neg=1.3),
        cispo=SimpleNamespace(cispo_eps_clip_low=0.25, cispo_eps_clip_high=0.3),
        dppo=SimpleNamespace(dppo_type="binary_tv", delta_low=0.2, delta_high=0.2),
        off_policy_correction=None,
    )


def corrected(loss: Tensor, old: Tensor, rollout: Tensor | None, mask: Tensor, config: Any) -> Any:
    """Stands in for SkyRL's: a weight for each token, and a sequence that is dropped."""
    if rollout is None:
        return loss, mask, {}
    keep = torch.ones(B, 1, dtype=loss.dtype)
    keep[1] = 0
    return loss * (old - rollout).exp().clamp(max=1.2), mask * keep, {"tis": 1.0}


def skyrl_loss(what: str, x: Tensor, data: Data, config: Any, rollout: Tensor | None) -> Any:
    old, A = double(data.old, data.advantages)
    d = (x - (rollout if what in ("dppo", "rollout_is") and rollout is not None else old)).clamp(-20, 20)
    low, high = config.eps_clip_low, config.eps_clip_high
    n = MASK.sum(1, keepdim=True).clamp(min=1)
    moved = x.detach().exp() - (old if rollout is None else rollout).exp()
    if what in ("dual_clip", "regular"):
        loss, bound = clipped(d.exp(), A, low, high, config.clip_ratio_c if what == "dual_clip" else None)
    elif what == "gspo":
        own = x - x.detach() + ((d * MASK).sum(1, keepdim=True) / n).detach()
        loss, bound = clipped(own.exp(), A, low, high)
    elif what == "sapo":
        tau = torch.where(A > 0, config.sapo.tau_pos, config.sapo.tau_neg).double()
        loss, bound = -torch.sigmoid(tau * (d.exp() - 1)) * 4 / tau * A, torch.zeros(B, T)
    elif what == "cispo":
        r = d.exp()
        inner = r.clamp(1 - config.cispo.cispo_eps_clip_low, 1 + config.cispo.cispo_eps_clip_high)
        loss, bound = -A * inner.detach() * x, inner != r
    elif what == "dppo":
        bound = ~torch.where(A > 0, moved <= 0.2, moved >= -0.2)
        loss = -d.exp() * A * ~bound
    else:
        r = d.exp().detach()
        bound = ~((r > 1 - low) & (r < 1 + high))
        loss = -(r * ~bound) * A * x
    loss, mask, metrics = corrected(loss, old, rollout, MASK.double(), None)
    # Over the tokens that are there before the correction.
    return (loss * mask).sum(), {"clip_ratio": float(mean_of(bound.double())), **metrics}


def check_skyrl(data: Data, theirs: Callable[..., Any]) -> None:
    for what, (objective, changes) in SKYRL.items():
        config = skyrl_config(changes)
        for rollout in (None, data.sampler):
            if rollout is None and what == "rollout_is":
                continue
            ours = skyrl.policy_loss(objective)
            (loss, metrics), gradient = value_and_gradient(
                lambda x, f=ours, c=config, q=rollout: f(x, data.old, data.advantages, c, MASK.float(), q),
                data.logps,
                torch.float32,
            )
            exact = None if rollout is None else rollout.double()
            (want, named), expected = value_and_gradient(
                lambda x, w=what, c=config, q=exact: theirs(w, x, data, c, q), data.logps, torch.float64
            )
            assert_same((loss, gradient), (want, expected))
            assert set(metrics) == set(named) and all(isinstance(v, float) for v in metrics.values()), what
            if rollout is None:  # with one, ours is over the tokens that the correction leaves
                assert metrics["clip_ratio"] == pytest.approx(named["clip_ratio"], abs=1e-6), what


def test_skyrl_losses(data: Data) -> None:
    stand_in(f"{HOME}.utils.off_policy_correction_utils", apply_off_policy_correction=corrected)
    check_skyrl(data, skyrl_loss)


def test_skyrl_itself(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("loguru", reason="loguru, which SkyRL imports, is not installed")
    pytest.importorskip("jaxtyping", reason="jaxtyping, which SkyRL imports, is not installed")
    pytest.importorskip("ray", reason="ray, which SkyRL imports, is not installed")
    utils = their_file(f"{HOME}.utils.torch_utils", monkeypatch, skyrl__train__config={"AlgorithmConfig": object})
    stand_in(f"{HOME}.utils.off_policy_correction_utils", apply_off_policy_correction=corrected)
    ppo = their_file_beside(f"{HOME}.utils.ppo_utils", utils)

    def theirs(what: str, x: Tensor, data: Data, config: Any, rollout: Tensor | None) -> Any:
        return getattr(ppo, THEIRS[what])(x, *double(data.old, data.advantages), config, MASK.double(), rollout)

    check_skyrl(data, theirs)
    names = skyrl.register()
    assert "fused_dapo" in names and callable(ppo.PolicyLossRegistry.get("fused_dapo"))

    logits, labels = torch.randn(B, T, V), torch.randint(V, (B, T))
    want = utils.logprobs_from_logits(logits, labels), utils.chunked_entropy_from_logits(logits, True, MASK, 3)
    with skyrl.bind(strict=True):
        got = utils.logprobs_from_logits(logits, labels), utils.chunked_entropy_from_logits(logits, True, MASK, 3)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_skyrl_registry() -> None:
    registered: dict[str, Any] = {}

    def register_policy_loss(name: str) -> Any:
        return lambda f: registered.setdefault(name, f)

    stand_in(f"{HOME}.utils.ppo_utils", register_policy_loss=register_policy_loss)
    names = skyrl.register("ours_")
    assert names == list(registered) and {"ours_dapo", "ours_gspo", "ours_vespo"} <= set(names)
    assert not {"ours_clip_cov", "ours_kl_cov", "ours_dro", "ours_a2po", "ours_distillation"} & set(names)
    for bad, message in (
        ("clip_cov", "not linear in the advantage"),
        (Objective.preset("grpo", aggregate="token-sum", beta=0.1), "adds KL and entropy itself"),
        (Objective(), 'aggregate="token-sum"'),
    ):
        with pytest.raises(ValueError, match=message):
            skyrl.policy_loss(bad)


def test_skyrl_functions() -> None:
    """Stand-ins with the signatures of the two functions of logits and of the Megatron dispatcher."""

    def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
        return log_softmax_of(logits, labels)[0]

    def chunked_entropy_from_logits(
        logits: Any, requires_grad: bool = False, attention_mask: Any = None, chunk_size: int = 1
    ) -> Any:
        entropy = log_softmax_of(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))[1]
        entropy = entropy if attention_mask is None else entropy * attention_mask
        return entropy if requires_grad else entropy.detach()

    def _fused_lm_head_logprob_apply(backend: str, hidden: Tensor, weight: Tensor, target: Tensor, *_: Any) -> Tensor:
        return log_softmax_of(hidden.double() @ weight.double().T, target)[0]

    names = {"logprobs_from_logits": logprobs_from_logits, "chunked_entropy_from_logits": chunked_entropy_from_logits}
    stand_in(f"{HOME}.utils.torch_utils", **names)
    wrapper = stand_in(f"{HOME}.workers.model_wrapper", **names)
    home = f"{HOME}.distributed.megatron.model_utils"
    megatron = stand_in(home, _fused_lm_head_logprob_apply=_fused_lm_head_logprob_apply)
    labels, logits, weight = torch.randint(V, (B, T)), torch.randn(B, T, V), torch.randn(V, H)
    up = torch.linspace(-1, 1, T)

    def from_logits(x: Tensor) -> Tensor:
        x = x * 1.0  # a model's output
        entropy = wrapper.chunked_entropy_from_logits(x, requires_grad=True, attention_mask=MASK.long(), chunk_size=3)
        return (wrapper.logprobs_from_logits(x, labels, inplace_backward=False) * up).sum() - entropy.sum()

    def from_hidden(x: Tensor) -> Tensor:
        w = weight.to(x.dtype)
        return (megatron._fused_lm_head_logprob_apply("torch", x, w, labels, 0, V, 4, None, False) * up).sum()

    hidden = torch.randn(B, T, H)
    want = value_and_gradient(from_logits, logits, torch.float64), value_and_gradient(from_hidden, hidden, torch.float64)
    with skyrl.bind(megatron=True, strict=True) as slots:
        assert_same(value_and_gradient(from_logits, logits, torch.float32), want[0])
        assert_same(value_and_gradient(from_hidden, hidden, torch.float32), want[1])
        assert slots.counts == {"fused": 3}
        leaf = hidden.clone().requires_grad_()
        assert not megatron._fused_lm_head_logprob_apply("torch", leaf, weight, labels, 0, V, 4, None, True).requires_grad
        assert not wrapper.chunked_entropy_from_logits(logits.requires_grad_()).requires_grad
    assert wrapper.logprobs_from_logits is logprobs_from_logits


# ---- Unsloth


def test_unsloth() -> None:
    """A stand-in for the module that Unsloth generates."""

    def theirs(hidden_states: Tensor, lm_head: Tensor, index: Tensor, chunks: int = 4, logit_scale_multiply: float = 0.0,
               logit_scale_divide: float = 0.0, logit_softcapping: float = 0.0, temperature: float = 1.0) -> Tensor:  # fmt: skip
        z = hidden_states.double() @ lm_head.double().T * (logit_scale_multiply or 1.0) / (logit_scale_divide or 1.0)
        z = logit_softcapping * torch.tanh(z / logit_softcapping) if logit_softcapping else z
        return log_softmax_of(z, index, temperature)[0]

    made = stand_in("unsloth_made", chunked_hidden_states_selective_log_softmax=theirs)
    trainer = type("UnslothGRPOTrainer", (), {"__module__": "unsloth_made"})
    hidden, weight, index = torch.randn(B, T, H), torch.randn(V, H), torch.randint(V, (B, T))
    for options in ({}, {"temperature": 0.7}, {"logit_scale_multiply": 0.5, "logit_softcapping": 2.0, "temperature": 1.3},
                    {"logit_scale_divide": 3.0, "chunks": 2}):  # fmt: skip

        def use(x: Tensor, options: Any = options) -> Tensor:
            return (made.chunked_hidden_states_selective_log_softmax(x, weight.to(x.dtype), index, **options) * MASK).sum()

        want = value_and_gradient(use, hidden, torch.float64)
        with unsloth.bind(trainer, strict=True) as slots:
            assert_same(value_and_gradient(use, hidden, torch.float32), want)
            assert slots.counts == {"fused": 1}
    assert made.chunked_hidden_states_selective_log_softmax is theirs
    with pytest.raises(AttributeError):
        unsloth.bind(type("Other", (), {"__module__": __name__}))


def test_unsloth_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper of unsloth_zoo, in fp32, as an oracle."""
    theirs = their_file(
        "unsloth_zoo.rl_replacements", monkeypatch, unsloth_zoo__device_type={"DEVICE_TYPE": "cpu", "device_synchronize": None},
        unsloth_zoo__temporary_patches__common={"torch_compile_options": {}, "_maybe_compile": lambda **_: lambda f: f},
        unsloth_zoo__dataset_utils={"sft_prepare_dataset": None},
    ).chunked_hidden_states_selective_log_softmax  # fmt: skip
    hidden, weight, index = torch.randn(B, T, H), torch.randn(V, H), torch.randint(V, (B, T))
    for options in ({}, {"temperature": 0.7}, {"logit_scale_multiply": 0.5, "logit_softcapping": 2.0, "temperature": 1.3},
                    {"logit_scale_divide": 3.0, "chunks": 2}):  # fmt: skip
        mine, want = (
            value_and_gradient(lambda x, f=f, o=options: (f(x, weight, index, **o) * MASK).sum(), hidden, torch.float32)
            for f in (unsloth.selective_log_softmax, theirs)
        )
        assert_same(mine, want)


# ---- what they share


BINDERS: dict[str, Callable[..., Slots]] = {
    "openrlhf": openrlhf.bind, "areal": areal.bind, "slime": slime.bind, "prime-rl": prime_rl.bind, "skyrl": skyrl.bind,
    "unsloth_zoo": lambda **options: unsloth.bind(type("T", (), {"__module__": "unsloth_made"}), **options),
}  # fmt: skip


@pytest.mark.parametrize("name", BINDERS)
def test_unknown_versions_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for root in ROOTS:
        stand_in(root)  # hides the trainer, if it is here
    for found in ("0.0.1", None):

        def version(package: str, found: str | None = found) -> str:
            assert package == name
            if found is None:
                raise metadata.PackageNotFoundError(package)
            return found

        monkeypatch.setattr(metadata, "version", version)
        with pytest.raises(RuntimeError, match=f"{name} is (0.0.1|not installed here.*), but this adapter was tested with"):
            BINDERS[name]()
        # Told to go on, it looks for the trainer's modules.
        with pytest.raises((ImportError, AttributeError)):
            BINDERS[name](any_version=True)


def test_what_is_left_to_the_trainer_is_counted_or_an_error() -> None:
    calls: list[Any] = []
    stand_in("slime.utils.ppo_utils", calculate_log_probs_and_entropy=lambda *args, **_: calls.append(args))
    home = sys.modules["slime.utils.ppo_utils"]
    logits, tokens = torch.randn(3, V, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    with slime.bind() as slots:
        home.calculate_log_probs_and_entropy(logits, tokens, None)
    assert len(calls) == 1 and slots.counts == {"slime: dtype torch.float64": 1}
    with slime.bind(strict=True), pytest.raises(RuntimeError, match=r"strict=True.*dtype torch\.float64"):
        home.calculate_log_probs_and_entropy(logits, tokens, None)
    assert len(calls) == 1


def test_nothing_stays_bound_after_an_error() -> None:
    names = {"logprobs_from_logits": len, "chunked_entropy_from_logits": sum}
    home = stand_in(f"{HOME}.utils.torch_utils", **names)
    with pytest.raises(ImportError):
        skyrl.bind(megatron=True)  # there is no such module here
    assert home.logprobs_from_logits is len


def late_import(code: str) -> ModuleType:
    module = stand_in(f"areal.late_{len(sys.modules)}")
    exec(code, vars(module))
    return module


def test_modules_that_were_imported_late_are_given_back() -> None:
    home = stand_in("areal.home", f=len, g=len)
    alias = late_import("from areal.home import f as other")
    slots = Slots("areal")
    slots.bind("areal.home", "f", lambda x: "ours")
    assert home.f("x") == home.g("x") == alias.other("x") == "ours"  # whatever its name is
    late, renamed = late_import("from areal.home import f"), late_import("from areal.home import f as h")
    assert late.f("x") == renamed.h("x") == "ours"
    slots.undo()
    slots.undo()
    assert home.f is home.g is alias.other is late.f is renamed.h is len
    with Slots("areal") as again:
        again.bind("areal.home", "f", lambda x: "again")
        assert {m("x") for m in (home.f, alias.other, late.f, renamed.h)} == {"again"}
        again.undo()  # leaving the block then finds nothing to do


def test_what_went_wrong_inside_comes_first() -> None:
    """Someone else has the name at the end: an error, unless there is one already."""
    home = stand_in("areal.home", f=len)
    slots = Slots("areal")
    slots.bind("areal.home", "f", lambda x: "ours")
    ours, home.f = home.f, sum
    with pytest.raises(RuntimeError, match="not ours any more"), slots:
        pass
    with pytest.warns(UserWarning, match="not ours any more"), pytest.raises(KeyError), slots:
        raise KeyError
    home.f = ours
    slots.undo()
    assert home.f is len


def test_the_swap_in_the_readme() -> None:
    """The two snippets, as they stand there, with the float mask that most trainers have."""
    before, after = re.findall(
        r"```python\n(# (?:before|after): .*?)```", Path(__file__).parents[1].joinpath("README.md").read_text(), re.S
    )
    g = torch.Generator().manual_seed(0)
    targets, logits = torch.randint(V, (B, T), generator=g), torch.randn(B, T, V, generator=g)
    given = {
        "torch": torch, "targets": targets, "mask": MASK.float(), "total_tokens": MASK.sum(),
        **{name: torch.randn(B, T, generator=g) - 3 for name in ("old_logps", "ref_logps", "advantages")},
    }  # fmt: skip
    gradients = []
    for code in (before, after):
        leaf = logits.clone().requires_grad_()
        exec(code, given | {"logits": leaf * 1.0})
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_the_core_does_not_know_them() -> None:
    package = Path(str(importlib.util.find_spec("grpo_kernels").origin)).parent
    for path in package.rglob("*.py"):
        if "integrations" not in path.parts:
            assert not re.search(r"(from|import) (grpo_kernels)?\.integrations", path.read_text()), path
