"""Bad input is refused before any work: a ValueError that names the argument, the value and the remedy."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import grpo_kernels
from grpo_kernels import (
    Exact,
    Head,
    LogitTransform,
    Objective,
    Options,
    Sparse,
    TokenBatch,
    group_advantages,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
    token_logprobs,
)  # fmt: skip
from grpo_kernels.formulas.covariance import ClipCov
from grpo_kernels.formulas.filters import TrustRegion
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.formulas.surrogates import Cispo, Clip, Gmpo
from grpo_kernels.head import FusedLMHead
from grpo_kernels.losses import objective_loss
from grpo_kernels.rewards.estimators import ADVANTAGES, CORRECTIONS, Evidence
from support.cases import snapshot

B, T, V = 3, 4, 11
IDS = torch.arange(B * T).view(B, T) % V
ONES = torch.ones(B)
PER_TOKEN = torch.ones(B, T)
LOGITS = torch.randn(B, T, V, generator=torch.Generator().manual_seed(0))
META = torch.device("meta")


def batch(**changes: Any) -> TokenBatch:
    return TokenBatch(**{"targets": IDS, "advantages": ONES, **changes})


def packed(offsets: Any, **changes: Any) -> TokenBatch:
    fields = {"targets": IDS.reshape(-1), "advantages": torch.ones(B * T), "cu_seqlens": torch.as_tensor(offsets), **changes}
    return TokenBatch(**fields)


def loss(
    the_batch: TokenBatch | None = None, objective: Any = None, *, logits: Any = LOGITS, backend: str = "eager", **options: Any
) -> Any:
    return grpo_loss(logits, the_batch or batch(), objective or Objective(), backend=backend, **options)


def logps(logits: Any = LOGITS, targets: Any = IDS, *, backend: str = "eager", **options: Any) -> Any:
    return token_logprobs(logits, targets, backend=backend, **options)


def wild(value: int) -> torch.Tensor:
    ids = IDS.clone()
    ids[1, 2] = value
    return ids


#: (name of the case, the call, the parts that its message must have: argument, value, remedy)
CASES: list[tuple[str, Callable[[], Any], list[str]]] = [
    # shapes
    ("logits one row short", lambda: loss(logits=LOGITS[:, :-1]), ["logits", "[3, 3, 11]", "[3, 4]", "logits[:, :-1]"]),
    ("logits flat", lambda: loss(logits=LOGITS.view(-1, V)), ["logits", "[12, 11]", "[3, 4]", "must be"]),
    ("logits without vocabulary", lambda: loss(logits=LOGITS[..., 0]), ["logits", "[3, 4]", "vocabulary"]),
    ("vocabulary of 0", lambda: loss(logits=LOGITS[..., :0]), ["logits", "[3, 4, 0]", "vocabulary is empty"]),
    (
        "hidden states as targets",
        lambda: batch(targets=torch.zeros(B, T, 8, dtype=torch.int64)),
        ["targets", "[3, 4, 8]", "[B, T]"],
    ),
    ("targets of no dimension", lambda: batch(targets=torch.tensor(3)), ["targets", "[]", "[B, T]"]),
    ("advantages per time step", lambda: batch(advantages=torch.ones(T)), ["advantages", "[4]", "[3, 4], [3] or [3, 1]"]),
    ("advantages as a row", lambda: batch(advantages=torch.ones(1, T)), ["advantages", "[1, 4]", "[3, 4]"]),
    ("advantages transposed", lambda: batch(advantages=torch.ones(T, B)), ["advantages", "[4, 3]", "[3, 4]"]),
    ("weights", lambda: batch(weights=torch.ones(B + 1)), ["weights", "[4]", "[3, 4], [3] or [3, 1]"]),
    ("mask", lambda: batch(mask=torch.ones(B, T + 1).bool()), ["mask", "[3, 5]", "[3, 4]", "the same"]),
    ("old_logps", lambda: batch(old_logps=torch.ones(B)), ["old_logps", "[3]", "[3, 4]", "the same"]),
    ("ref_logps", lambda: batch(ref_logps=torch.ones(B, T - 1)), ["ref_logps", "[3, 3]", "[3, 4]", "the same"]),
    ("sampler_logps", lambda: batch(sampler_logps=ONES), ["sampler_logps", "[3]", "[3, 4]", "the same"]),
    ("nll_weights", lambda: batch(nll_weights=torch.ones(T)), ["nll_weights", "[4]", "[3, 4], [3] or [3, 1]"]),
    ("groups per token", lambda: batch(groups=IDS), ["groups", "[3, 4]", "one integer id per sequence", "[3]"]),
    ("groups of a packed batch", lambda: packed([0, 5, 12], groups=IDS[:, 0]), ["groups", "[3]", "[2]"]),
    (
        "groups without sequences",
        lambda: TokenBatch(IDS.view(-1), torch.ones(B * T), groups=IDS[:, 0]),
        ["groups", "[3]", "cu_seqlens"],
    ),
    ("packed advantages per sequence", lambda: batch(targets=IDS.view(-1)), ["advantages", "[3]", "[12]", "cu_seqlens"]),
    ("packed advantages", lambda: packed([0, 5, 12], advantages=ONES), ["advantages", "[3]", "[12]", "[2]"]),
    ("temperature", lambda: loss(transform=LogitTransform(torch.ones(T))), ["temperature", "[4]", "[3, 4]"]),
    ("targets of layer 1", lambda: logps(targets=IDS.view(-1)), ["logits", "[3, 4, 11]", "[12]", "must be"]),
    ("mask of layer 1", lambda: logps(mask=torch.ones(B).bool()), ["mask", "[3]", "[3, 4]", "the same"]),
    ("normalizer", lambda: loss(normalizer=torch.ones(2)), ["normalizer", "[2]", "0-d"]),
    # dtypes and types
    ("integer logits", lambda: loss(logits=LOGITS.long()), ["logits", "torch.int64", "float32, bfloat16 or float16"]),
    ("double logits", lambda: loss(logits=LOGITS.double()), ["logits", "torch.float64", "float32, bfloat16 or float16"]),
    ("double logits, layer 1", lambda: logps(LOGITS.double()), ["logits", "torch.float64", "float32, bfloat16 or float16"]),
    ("logits as a list", lambda: loss(logits=LOGITS.tolist()), ["logits", "list", "tensor"]),
    ("float targets", lambda: batch(targets=IDS.float()), ["targets", "torch.float32", "int64"]),
    ("float targets, layer 1", lambda: logps(targets=IDS.float()), ["targets", "torch.float32", "int64"]),
    ("targets as a list", lambda: batch(targets=IDS.tolist()), ["targets", "list", "int64 tensor"]),
    ("advantages of truth values", lambda: batch(advantages=ONES > 0), ["advantages", "torch.bool", "floating-point"]),
    ("advantages as a list", lambda: batch(advantages=[1.0] * B), ["advantages", "list", "tensor"]),
    ("no advantages", lambda: batch(advantages=None), ["advantages", "None", "group_advantages"]),
    ("integer old_logps", lambda: batch(old_logps=IDS), ["old_logps", "torch.int64", "floating-point"]),
    ("integer sampler_logps", lambda: batch(sampler_logps=IDS), ["sampler_logps", "torch.int64", "floating-point"]),
    ("integer nll_weights", lambda: batch(nll_weights=IDS), ["nll_weights", "torch.int64", "floating-point"]),
    ("groups of floats, batch", lambda: batch(groups=ONES), ["groups", "torch.float32", "integer"]),
    ("groups as a list", lambda: batch(groups=[0, 0, 1]), ["groups", "list", "tensor"]),
    ("float mask", lambda: batch(mask=PER_TOKEN), ["mask", "torch.float32", ".bool()"]),
    ("float mask, layer 1", lambda: logps(mask=PER_TOKEN), ["mask", "torch.float32", ".bool()"]),
    ("a dict as batch", lambda: loss({"targets": IDS}), ["batch", "dict", "TokenBatch"]),  # type: ignore[arg-type]
    ("a name as objective", lambda: loss(objective="grpo"), ["objective", "str", "Objective.preset"]),
    ("entropy", lambda: logps(entropy="yes"), ["entropy", "'yes'", '"detached"']),
    (
        "integer temperature tensor",
        lambda: loss(transform=LogitTransform(torch.ones(B).long())),
        ["temperature", "torch.int64", "float"],
    ),
    (
        "temperature with gradient",
        lambda: LogitTransform(ONES.clone().requires_grad_()),
        ["temperature", "requires grad", ".detach()"],
    ),
    # devices
    ("logits elsewhere", lambda: loss(logits=LOGITS.to(META)), ["logits", "meta", "cpu", "move"]),
    ("advantages elsewhere", lambda: batch(advantages=ONES.to(META)), ["advantages", "meta", "cpu", "move"]),
    ("mask elsewhere", lambda: batch(mask=torch.ones(B, T, device=META).bool()), ["mask", "meta", "cpu", "move"]),
    ("old_logps elsewhere", lambda: batch(old_logps=PER_TOKEN.to(META)), ["old_logps", "meta", "cpu", "move"]),
    ("ref_logps elsewhere", lambda: batch(ref_logps=PER_TOKEN.to(META)), ["ref_logps", "meta", "cpu", "move"]),
    ("weights elsewhere", lambda: batch(weights=PER_TOKEN.to(META)), ["weights", "meta", "cpu", "move"]),
    ("sampler_logps elsewhere", lambda: batch(sampler_logps=PER_TOKEN.to(META)), ["sampler_logps", "meta", "cpu", "move"]),
    ("nll_weights elsewhere", lambda: batch(nll_weights=ONES.to(META)), ["nll_weights", "meta", "cpu", "move"]),
    ("groups elsewhere", lambda: batch(groups=IDS[:, 0].to(META)), ["groups", "meta", "cpu", "move"]),
    ("temperature elsewhere", lambda: loss(transform=LogitTransform(ONES.to(META))), ["temperature", "meta", "cpu", "move"]),
    ("mask elsewhere, layer 1", lambda: logps(mask=torch.ones(B, T, device=META).bool()), ["mask", "meta", "cpu", "move"]),
    ("logits elsewhere, layer 1", lambda: logps(LOGITS.to(META)), ["logits", "meta", "cpu", "move"]),
    # values
    ("id past the vocabulary", lambda: loss(batch(targets=wild(V))), ["targets[1, 2]", "11", "[0, 11)", "mask"]),
    ("id -100", lambda: loss(batch(targets=wild(-100))), ["targets[1, 2]", "-100", "[0, 11)", "mask"]),
    ("id 2**40", lambda: loss(batch(targets=wild(2**40))), ["targets[1, 2]", str(2**40), "[0, 11)", "mask"]),
    ("id of layer 1", lambda: logps(targets=wild(-1)), ["targets[1, 2]", "-1", "[0, 11)", "mask"]),
    (
        "id beside a mask",
        lambda: loss(batch(targets=wild(V), mask=torch.arange(B)[:, None].expand(B, T) > 0)),
        ["targets[1, 2]", "11", "[0, 11)"],
    ),
    ("temperature 0", lambda: LogitTransform(temperature=0.0), ["temperature", "0.0", "above 0"]),
    ("temperature -1", lambda: LogitTransform(temperature=-1), ["temperature", "-1", "above 0"]),
    ("temperature nan", lambda: LogitTransform(temperature=math.nan), ["temperature", "nan", "above 0"]),
    ("temperature inf", lambda: LogitTransform(temperature=math.inf), ["temperature", "inf", "finite"]),
    (
        "temperature 0 in a tensor",
        lambda: loss(transform=LogitTransform(torch.tensor([1.0, 0.0, 1.0]))),
        ["temperature", "0.0", "above 0"],
    ),
    ("temperature -2, 0-d", lambda: logps(transform=LogitTransform(torch.tensor(-2.0))), ["temperature", "-2.0", "above 0"]),
    (
        "temperature nan in a tensor",
        lambda: logps(transform=LogitTransform(PER_TOKEN * math.nan)),
        ["temperature", "nan", "above 0"],
    ),
    ("softcap 0", lambda: LogitTransform(softcap=0.0), ["softcap", "0.0", "None"]),
    ("softcap -30", lambda: LogitTransform(softcap=-30.0), ["softcap", "-30.0", "above 0"]),
    ("scale 0", lambda: LogitTransform(scale=0.0), ["scale", "0.0", "not 0"]),
    ("scale nan", lambda: LogitTransform(scale=math.nan), ["scale", "nan", "finite"]),
    ("normalizer 0", lambda: loss(normalizer=0), ["normalizer", "0", "above 0"]),
    ("normalizer -1", lambda: loss(normalizer=-1.0), ["normalizer", "-1.0", "above 0"]),
    ("normalizer nan", lambda: loss(normalizer=math.nan), ["normalizer", "nan", "finite"]),
    ("cu_seqlens not from 0", lambda: packed([1, 12]), ["cu_seqlens", "[1, 12]", "from 0"]),
    ("cu_seqlens short", lambda: packed([0, 5, 11]), ["cu_seqlens", "[0, 5, 11]", "12"]),
    ("cu_seqlens long", lambda: packed([0, 5, 13]), ["cu_seqlens", "[0, 5, 13]", "12"]),
    ("cu_seqlens falling", lambda: packed([0, 7, 5, 12]), ["cu_seqlens", "[0, 7, 5, 12]", "rise"]),
    ("cu_seqlens of floats", lambda: packed([0.0, 12.0]), ["cu_seqlens", "torch.float32", "int32"]),
    ("cu_seqlens of two dimensions", lambda: packed([[0, 12]]), ["cu_seqlens", "[1, 2]", "[B + 1]"]),
    ("cu_seqlens with padding", lambda: batch(cu_seqlens=torch.tensor([0, 12])), ["cu_seqlens", "[3, 4]", "packed"]),
    # objectives
    ("preset", lambda: Objective.preset("grop"), ["preset", "'grop'", "grpo, dapo"]),
    ("aggregate", lambda: Objective(aggregate="mean"), ["aggregate", "'mean'", "token-mean, seq-mean-token-mean"]),
    ("level", lambda: Objective(level="seq"), ["level", "'seq'", "token, sequence"]),
    ("kl", lambda: Objective(kl="k4"), ["kl", "'k4'", "k1, k2, k3"]),
    ("beta < 0", lambda: Objective(beta=-0.1), ["beta", "-0.1", ">= 0"]),
    ("beta nan", lambda: Objective(beta=math.nan), ["beta", "nan", "finite"]),
    ("entropy_coef inf", lambda: Objective(entropy_coef=math.inf), ["entropy_coef", "inf", "finite"]),
    ("max_tokens 0", lambda: Objective(max_tokens=0), ["max_tokens", "0", "at least 1"]),
    ("surrogate by name", lambda: Objective(surrogate="clip"), ["surrogate", "'clip'", "Clip()"]),  # type: ignore[arg-type]
    ("a preset's change", lambda: Objective.preset("dapo", beta=-1), ["beta", "-1", ">= 0"]),
    ("eps_low", lambda: Clip(eps_low=1.5), ["eps_low", "1.5", "[0, 1]"]),
    ("eps_low < 0", lambda: Clip(eps_low=-0.1), ["eps_low", "-0.1", "[0, 1]"]),
    ("eps_high", lambda: Clip(eps_high=-0.2), ["eps_high", "-0.2", ">= 0"]),
    ("delta", lambda: Clip(delta=0.9), ["delta", "0.9", "above 1"]),
    ("delta nan", lambda: Clip(delta=math.nan), ["delta", "nan", "above 1"]),
    ("cap", lambda: Cispo(cap=0.0), ["cap", "0.0", "above 0"]),
    ("low above cap", lambda: Cispo(cap=2.0, low=3.0), ["low", "3.0", "[0, cap]"]),
    ("no reference", lambda: loss(objective=Objective(beta=0.1)), ["ref_logps", "None", "beta=0.1", "beta=0"]),
    ("no budget", lambda: loss(objective=Objective.preset("dr_grpo")), ["max_tokens", "None", "constant", "normalizer="]),
    (
        "sequence mean of packed rows",
        lambda: loss(packed([0, 12], cu_seqlens=None), Objective.preset("grpo"), logits=LOGITS.view(-1, V)),
        ["cu_seqlens", "None", "seq-mean-token-mean", "pass"],
    ),
    (
        "sequence ratio of packed rows",
        lambda: loss(packed([0, 12], cu_seqlens=None), Objective(level="sequence"), logits=LOGITS.view(-1, V)),
        ["cu_seqlens", "None", "sequence", "pass"],
    ),
    # backends and in-place
    ("backend", lambda: loss(backend="cuda-fast"), ["backend", "'cuda-fast'", "eager, cpu, triton"]),
    ("backend of layer 1", lambda: logps(backend=""), ["backend", "''", "eager, cpu, triton"]),
    (
        "in place, expanded",
        lambda: loss(logits=LOGITS[:1].expand(B, T, V), inplace=True),
        ["inplace=True", "[3, 4, 11]", "[0, 11, 1]", "inplace=False"],
    ),
    (
        "in place, rows that overlap",
        lambda: loss(logits=torch.randn(B * T + V).as_strided((B, T, V), (T, 1, 1)), inplace=True),
        ["inplace=True", "[4, 1, 1]", "share memory", "inplace=False"],
    ),
    (
        "in place, strided vocabulary",
        lambda: logps(torch.randn(B, T, 2 * V)[..., ::2], inplace=True),
        ["inplace=True", "[88, 22, 2]", "inplace=False"],
    ),
    # rewards
    ("group_size does not divide", lambda: group_advantages(torch.zeros(10), group_size=4), ["group_size", "4", "10"]),
    ("group_size 0", lambda: group_advantages(torch.zeros(10), group_size=0), ["group_size", "0"]),
    (
        "group_size and groups",
        lambda: group_advantages(ONES, group_size=3, groups=IDS[:, 0]),
        ["group_size=3", "groups", "exactly one"],
    ),
    ("neither", lambda: group_advantages(ONES), ["group_size", "groups", "exactly one"]),
    ("groups too short", lambda: group_advantages(ONES, groups=torch.zeros(2).long()), ["groups", "[2]", "[3]"]),
    ("groups of floats", lambda: group_advantages(ONES, groups=ONES), ["groups", "torch.float32", "integer"]),
    ("rewards per token", lambda: group_advantages(PER_TOKEN, group_size=1), ["rewards", "[3, 4]", "[B]"]),
    ("reward nan", lambda: group_advantages(torch.tensor([0.0, math.nan]), group_size=2), ["rewards[1]", "nan", "finite"]),
    ("reward inf", lambda: group_advantages(torch.tensor([-math.inf, 0.0]), group_size=2), ["rewards[0]", "-inf", "finite"]),
    ("advantage scale", lambda: group_advantages(ONES, group_size=3, scale="std"), ["scale", "'std'", "group, batch, none"]),
    ("eps", lambda: group_advantages(ONES, group_size=3, eps=-1.0), ["eps", "-1.0", ">= 0"]),
    ("from_rewards", lambda: TokenBatch.from_rewards(IDS, ONES, group_size=2), ["group_size", "2", "3"]),
]


@pytest.mark.parametrize("what, call, parts", CASES, ids=[c[0] for c in CASES])
def test_value_error(what: str, call: Callable[[], Any], parts: list[str]) -> None:
    check = snapshot(ids=IDS, ones=ONES, per_token=PER_TOKEN, logits=LOGITS)
    with pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    assert len(message) > 30
    check()


def head_call(**options: Any) -> Any:
    return FusedLMHead(torch.nn.Linear(V, V))(LOGITS, batch(), Objective(), **options)


#: A call with a keyword that it does not know, and the keyword that is meant. "": none is near.
UNKNOWN: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (TokenBatch, {"old_logprobs": PER_TOKEN}, "old_logps"),
    (TokenBatch, {"completion_mask": PER_TOKEN}, ""),
    (TokenBatch.from_rewards, {"masks": PER_TOKEN}, "mask"),
    (TokenBatch.from_rewards, {"unknown": 1}, ""),
    (TokenBatch.from_rewards, {"unbiassed": True}, "unbiased"),
    (Objective, {"agregate": "token-mean"}, "aggregate"),
    (Objective, {"epsilon": 0.2}, ""),
    (functools.partial(Objective.preset, "grpo"), {"betta": 1.0}, "beta"),
    (functools.partial(Objective.preset, "grpo"), {"epsilon": 0.2}, ""),
    *((kind, {"epsilon": 0.2}, "eps_low") for kind in (Clip, Gmpo, ClipCov)),
    (LogitTransform, {"temprature": 0.7}, "temperature"),
    (Exact, {"directon": "reverse"}, "direction"),
    (LogitTransform, {"bias": 1.0}, ""),
    (Options, {"stict": True}, "strict"),
    (Options, {"sparce": None}, "sparse"),
    (Sparse, {"seeds": 3}, "seed"),
    (Kl, {"estimater": "k1"}, "estimator"),
    (TrustRegion, {"hihg": 0.2}, "high"),
    (functools.partial(Head, LOGITS[0]), {"biass": None}, "bias"),
    (functools.partial(ADVANTAGES["group"], Evidence(ONES, group_size=3)), {"scales": "none"}, "scale"),
    (lambda **options: CORRECTIONS["tis"](batch(), **options), {"hihg": 2.0}, "high"),
    # those without **options of their own: Python's error has the name
    (loss, {"reduction": "mean"}, ""),
    (logps, {"temperature": 0.7}, ""),
    (head_call, {"normaliser": 3.0}, ""),
    (functools.partial(group_advantages, ONES, group_size=3), {"normalize": True}, ""),
]


@pytest.mark.parametrize("call, keywords, meant", UNKNOWN, ids=[f"{i} {next(iter(x[1]))}" for i, x in enumerate(UNKNOWN)])
def test_unknown_keywords(call: Callable[..., Any], keywords: dict[str, Any], meant: str) -> None:
    """They are refused, and the message has the name that was meant."""
    fields = {"targets": IDS, "advantages": ONES} if call is TokenBatch else {}
    fields = {"targets": IDS, "rewards": ONES, "group_size": 3} if call == TokenBatch.from_rewards else fields
    with pytest.raises(TypeError, match=f"'{next(iter(keywords))}'.*" + (f"Did you mean {meant}\\?" if meant else "")):
        call(**fields, **keywords)


@pytest.mark.parametrize(
    "call",
    [
        lambda: TokenBatch(IDS, ONES, torch.ones(B, T).bool()),  # type: ignore[call-arg]
        lambda: grpo_loss(LOGITS, batch(), Objective(), LogitTransform()),  # type: ignore[call-arg]
        lambda: token_logprobs(LOGITS, IDS, torch.ones(B, T).bool()),  # type: ignore[call-arg]
        lambda: group_advantages(ONES, 3),  # type: ignore[call-arg]
    ],
)
def test_options_are_keywords(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        call()


def test_a_wild_id_in_a_masked_row_is_fine() -> None:
    """The remedy that the message names works."""
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, 2] = False
    assert torch.isfinite(loss(batch(targets=wild(-100), mask=mask)).loss)


def test_a_bad_temperature_in_a_masked_row_is_fine() -> None:
    temperature = torch.ones(B, T)
    temperature[1, 2] = 0.0
    mask = temperature > 0
    assert torch.isfinite(loss(batch(mask=mask), transform=LogitTransform(temperature)).loss)


def test_nothing_is_computed_before_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, a refusal after the work would have destroyed the logits."""
    from grpo_kernels.vocabulary.backends import eager

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a kernel ran")

    for name in ("stats", "pull", "fused"):
        monkeypatch.setattr(eager, name, forbidden)
    for _, call, _ in CASES:
        with pytest.raises(ValueError):
            call()


def test_no_fallback_for_a_backend_that_was_asked_for() -> None:
    """RuntimeError, because the input is right and the machine is not; with the reason and the way out."""
    from grpo_kernels.vocabulary import backends

    reason = backends.unavailable("triton")
    with pytest.raises(RuntimeError, match='backend="triton" cannot run') as error:
        loss(backend="triton")
    assert 'backend="auto"' in str(error.value) and (reason is None or reason in str(error.value))


def test_fallback_warns_once_and_strict_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_kernels.vocabulary import backends

    monkeypatch.setattr(backends, "unavailable", lambda name: None if name == "eager" else "a made-up reason")
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    monkeypatch.delenv("GRPO_KERNELS_STRICT", raising=False)
    with pytest.warns(RuntimeWarning, match="a made-up reason") as caught:
        first = loss(backend="auto")
        loss(backend="auto")
    assert len(caught) == 1 and caught[0].filename == __file__
    assert torch.equal(first.loss, loss().loss)
    with pytest.raises(RuntimeError, match="a made-up reason"):
        loss(backend="auto", strict=True)
    monkeypatch.setenv("GRPO_KERNELS_STRICT", "1")
    with pytest.raises(RuntimeError, match="strict"):
        logps(backend="auto")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_advantages("ab", group_size=2), "rewards is str: pass numbers, a tensor or a list"),
        (lambda: group_advantages(torch.ones(2), groups=[0, 0]), "groups is a list: pass an integer tensor"),
        (lambda: group_advantages(torch.ones(2), group_size=2.0), "group_size=2.0: it must be a whole number"),
        (lambda: group_advantages(torch.ones(2), group_size=True), "group_size=True: it must be a whole number"),
        (lambda: token_logprobs(torch.ones(2, 3), torch.tensor([0, 1]), mask=[1, 1]), "mask is a list: pass a bool tensor"),
        (
            lambda: token_logprobs(torch.ones(2, 3), torch.tensor([0, 1]), transform=0.7),
            "transform is 0.7: pass a LogitTransform, for example LogitTransform(temperature=0.7)",
        ),
        (lambda: Objective.preset("grpo", eps_high=0.28), "pass surrogate=Clip(eps_low=0.2, eps_high=0.28, delta=inf)"),
        (
            lambda: Objective.preset("cispo", cap=4.0),
            "cap is a number of the surrogate, not of the Objective: pass surrogate=Cispo(cap=4.0",
        ),
        (
            lambda: token_logprobs(torch.ones(2, 3, 8), torch.full((2, 3), 50)),
            "If the logits are hidden states: those go to linear_grpo_loss or linear_logprobs.",
        ),
        (lambda: loss(batch(targets=IDS + 40)), "If the logits are hidden states: those go to linear_grpo_loss"),
        (
            lambda: TokenBatch(IDS.reshape(1, -1), torch.ones(1, B * T), cu_seqlens=torch.tensor([0, 12])),
            "targets has shape [1, 12]. Pass targets[0], and the same of what goes with it.",
        ),
        (
            lambda: linear_logprobs(torch.ones(2, 8), torch.nn.Linear(8, 5), torch.tensor([0, 1])),
            "weight is the module Linear: pass its tensor, weight=lm_head.weight",
        ),
        (lambda: LogitTransform(temperature="1"), "temperature='1': it divides the logits"),
        (lambda: LogitTransform(scale=float("nan")), "scale=nan: it multiplies the logits"),
        (lambda: Objective(beta="0.1"), "beta='0.1': the KL weight"),
        (lambda: Objective(max_tokens=10.5), "max_tokens=10.5: the completion budget is a whole number"),
        (lambda: Clip(delta=None), "delta=None: the two-sided bound"),
        (lambda: Clip(delta=1.0), "delta=1.0: the two-sided bound is above 1"),
        (
            lambda: grpo_loss(torch.ones(1, 3), TokenBatch(torch.tensor([0]), torch.ones(1)), Objective(), normalizer="3"),
            "normalizer='3': the denominator",
        ),
        (
            lambda: grpo_loss(
                torch.ones(1, 3), TokenBatch(torch.tensor([0]), torch.ones(1)), Objective(), normalizer=torch.tensor(0.0)
            ),
            "normalizer=0.0: the denominator",
        ),
    ],
)
def test_values_of_the_wrong_kind_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_an_unknown_field_of_a_preset_is_named() -> None:
    with pytest.raises(TypeError, match=r"'betta' is no argument of .*Did you mean beta\? It has surrogate, .*beta"):
        Objective.preset("grpo", betta=1.0)


def test_any_leading_shape() -> None:
    logits, targets = torch.randn(2, 3, 4, 7), torch.randint(7, (2, 3, 4))
    expected = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(token_logprobs(logits, targets)[0], expected)
    torch.testing.assert_close(token_logprobs(logits[0, 0, 0], targets[0, 0, 0])[0], expected[0, 0, 0])


def test_numbers_of_numpy_are_numbers() -> None:
    """A normalizer out of a NumPy sum, a schedule out of np.linspace: the same loss as with Python's own."""
    np = pytest.importorskip("numpy")
    found = []
    for real, whole in ((float, int), (np.float64, np.int64), (np.float32, np.int32)):
        objective = Objective(
            Clip(real(0.25), real(0.5), real(3.0)), beta=real(0.5), entropy_coef=real(0.125), max_tokens=whole(8),
            aggregate="constant", log_ratio_bounds=(real(-20.0), real(20.0)),
        )  # fmt: skip
        transform = LogitTransform(real(0.5), softcap=real(8.0), scale=real(2.0))
        advantages = group_advantages(torch.tensor([1.0, 0.0, 2.0]), group_size=whole(3))
        the_batch = batch(advantages=advantages, ref_logps=-PER_TOKEN, old_logps=-2 * PER_TOKEN)
        found += [loss(the_batch, objective, transform=transform, normalizer=x).loss for x in (real(7.0), whole(7))]
        assert type(objective.beta) is float and type(transform.scale) is float
    assert all(torch.equal(x, found[0]) for x in found) and found[0] != 0
    for wrong in (np.float64("nan"), np.bool_(True), np.array([1.0]), np.datetime64("2026-01-01")):
        with pytest.raises(ValueError, match="normalizer"):
            loss(normalizer=wrong)


@pytest.mark.parametrize("make", [batch, loss, lambda: loss().rows, lambda: LogitTransform(PER_TOKEN)])
def test_a_repr_tells_shapes_and_prints_no_tensor(make: Callable[[], Any]) -> None:
    text = repr(make())
    assert "tensor(" not in text and "\n" not in text and "float32 [" in text and "=None" not in text
    assert repr(batch()) == "TokenBatch(targets=int64 [3, 4], advantages=float32 [3])"


def test_metrics_do_not_follow_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        objective = Objective(filters=(TrustRegion("tv"),), beta=0.1)
        metrics = loss(batch(ref_logps=-PER_TOKEN, advantages=torch.tensor([0.0, 1.0, -1.0]).float()), objective).metrics
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name for name, x in metrics.items() if x.dtype != torch.float32} == set() and len(metrics) == 11
    assert metrics["zero_advantage"] == torch.tensor(1 / 3)


# ---- what strict mode refuses, and messages where Python's own say nothing of the remedy

HIDDEN, WEIGHT = torch.randn(B, T, 6, generator=torch.Generator().manual_seed(1)), torch.eye(V, 6)
BEFORE_HEAD = torch.randn(B, T, V, generator=torch.Generator().manual_seed(2))

#: Every function that makes a loss of a batch and an objective.
LOSSES: dict[str, Callable[..., Any]] = {
    "grpo_loss": lambda *given, **options: grpo_loss(LOGITS, *given, **options),
    "linear_grpo_loss": lambda *given, **options: linear_grpo_loss(HIDDEN, WEIGHT, *given, **options),
    "head": lambda *given, **options: FusedLMHead(torch.nn.Linear(V, V))(BEFORE_HEAD, *given, **options),
    "objective_loss": lambda *given, strict=False, backend="": objective_loss(-PER_TOKEN, *given),
}


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("field", ["advantages", "old_logps", "ref_logps", "weights", "nll_weights"])
def test_strict_mode_refuses_nan_at_trained_tokens(field: str, name: str, backend: str) -> None:
    if backend == "cpu":
        pytest.importorskip("grpo_kernels._cpu")
    value, mask = -PER_TOKEN.clone(), PER_TOKEN > 0
    value[1, 2] = value[2, 0] = value[2, 3] = math.nan
    mask[2, 0] = False
    given = batch(**{"ref_logps": -PER_TOKEN, "mask": mask, field: value}), Objective(beta=0.1)
    assert LOSSES[name](*given, backend=backend).loss.isnan()
    message = rf"{field} is NaN at 2 of 11 trained tokens, \[1, 2\], \[2, 3\].*strict.*Mask"
    with grpo_kernels.use(strict=True), pytest.raises(ValueError, match=message):
        LOSSES[name](*given, backend=backend)
    if name != "objective_loss":
        with pytest.raises(ValueError, match=message):
            LOSSES[name](*given, backend=backend, strict=True)
    with grpo_kernels.use(strict=True):  # what no loss reads may be anything
        value[1, 2] = value[2, 3] = 0.5
        assert LOSSES[name](*given, backend=backend).loss.isfinite()


def test_without_a_look_at_values_the_device_notices_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nobody waits for the comparison; the device stops the program."""
    monkeypatch.setattr("grpo_kernels.losses.values_are_checked", lambda tensor: False)
    assert loss(batch(old_logps=-PER_TOKEN), strict=True).loss != 0
    with pytest.raises(RuntimeError, match="old_logps is NaN at a trained token"):
        loss(batch(old_logps=-PER_TOKEN / math.nan), strict=True)


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_and_an_objective_that_changed_places(name: str) -> None:
    with pytest.raises(ValueError, match=r"(batch|targets) is an? Objective and objective a TokenBatch: .*batch, objective"):
        LOSSES[name](Objective(), batch())


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda out: out.metrics["approx_kl"], KeyError, r"no metric 'approx_kl'. Did you mean kl\? .*tokens, .*entropy"),
        (lambda out: out.metrics["entropi"], KeyError, r"Did you mean entropy\?"),
        (lambda out: out.backward(), AttributeError, r"'backward'.*out\.loss\.backward"),
        (lambda out: out.item(), AttributeError, r"'item'.*out\.loss\.item"),
        (lambda out: out.log_probs, AttributeError, r"'log_probs'. Did you mean logps\?"),
        (lambda out: out.metric, AttributeError, r"'metric'. Did you mean metrics\?"),
        (lambda out: [*out], TypeError, r"no tuple.*out\.loss, out\.metrics"),
    ],
    ids=str,
)
def test_what_a_loss_is_not_is_said_with_the_remedy(call: Any, kind: type[Exception], message: str) -> None:
    out = loss(batch(ref_logps=-PER_TOKEN), Objective(beta=0.1))
    with pytest.raises(kind, match=message):
        call(out)
    assert not hasattr(out, "backward") and copy.copy(out).loss is out.loss and copy.deepcopy(out.metrics) == out.metrics
    assert type(out.metrics) is not dict and pickle.loads(pickle.dumps(out.metrics)).keys() == out.metrics.keys()
