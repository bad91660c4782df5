"""A backend against float64: each case is written here in plain PyTorch, differentiated by autograd, and shares no code with the
package. `CASES` is the table.

Shape suffixes: B sequences, T tokens each, V vocabulary, H hidden size.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import (
    Clip,
    Exact,
    LogitTransform,
    Objective,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_grpo_loss,
    use,
)
from . import first_line

Tensor = torch.Tensor

BETA, ENTROPY_COEF, TEMPERATURE = 0.04, 0.02, 0.7

#: The largest errors that rounding can cause. Those of loss, log-probs and entropy are absolute. Those of gradients are
#: relative to the largest entry; those of d_logits and d_hidden to the largest entry of each row, so that a missing row shows.
#: Values are fp32 for every dtype of the logits. Gradients are rounded to that dtype, those from hidden states more than
#: once.
VALUE_LIMIT = 5e-5
GRADIENT_LIMIT = {torch.float32: 2e-4, torch.bfloat16: 3e-2}


def self_test(backend: str, device: torch.device) -> dict[str, Any]:
    """All checks of one backend with data on `device`, as doctor --json prints them. Never raises: an exception is that check's
    failure."""
    begin, checks = time.perf_counter(), []
    worst = {"value": 0.0, "float32": 0.0, "bfloat16": 0.0}  # of gradients by their dtype
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for case, level, inputs, reference in _questions():
            dtype = str(inputs.weight.dtype).removeprefix("torch.")
            check: dict[str, Any] = {
                "case": case.name,
                "level": level,
                "dtype": dtype,
                "vocab": len(inputs.weight),
                "errors": {},
            }
            checks.append(check)
            try:
                found = results(case, level, inputs, backend, device)
                check["errors"] = {name: error_of(name, found[name], wanted) for name, wanted in reference.items()}
                check["failure"] = beyond_limits(check["errors"], inputs.weight.dtype)
            except Exception as error:  # a kernel that does not compile must not end the report
                check["failure"] = first_line(error)
            for name, off in check["errors"].items():
                kind = dtype if name.startswith("d_") else "value"
                worst[kind] = max(worst[kind], off)
    return {
        "available": True,
        "reason": None,
        "passed": not any(check["failure"] for check in checks),
        "value_error": worst.pop("value"),
        "gradient_error": worst,
        "seconds": round(time.perf_counter() - begin, 2),
        "warnings": sorted({str(w.message) for w in caught if "grpo_kernels" in f"{w.message} {w.filename}"}),
        "checks": checks,
    }


# ---- the cases


@dataclass
class Inputs:
    """What all cases read. Rows that are masked are NaN."""

    hidden: Tensor  # [B, T, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool
    advantages: Tensor  # [B], one of them 0
    old_logps: Tensor  # [B, T]
    ref_logps: Tensor  # [B, T]
    kept: TokenSets | None  # for the B * T rows: the target alone, some ids with it, none

    def leaves(self, level: str, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """The tensors whose gradients are compared. The logits are computed in float64 and rounded to the dtype of the inputs."""
        given = {"hidden": self.hidden, "weight": self.weight}
        if level == "logits":
            given = {level: (self.hidden.double() @ self.weight.double().t()).to(self.hidden.dtype)}
        return {name: x.to(device, dtype).requires_grad_() for name, x in given.items()}

    def teacher(self) -> Tensor:
        """The logits of a second stream of rows, fp32 [B, T, V]."""
        return (self.hidden.float() @ self.weight.float().t()).roll(1, -1)


class Values(NamedTuple):
    """What a formula reads beside the inputs: float64 [B, T], 0 where masked."""

    logps: Tensor
    entropy: Tensor
    divergence: Tensor


def clip_kl_entropy(v: Values, x: Inputs) -> Tensor:
    """Clipped ratios of tokens, KL to the reference (k3), entropy bonus; a mean over tokens."""
    policy = _clipped(_log_ratio(v, x), x.advantages[:, None])
    to_reference = torch.where(x.mask, x.ref_logps.double() - v.logps, 0.0)
    return _mean(policy + BETA * (to_reference.expm1() - to_reference) - ENTROPY_COEF * v.entropy, x)


def sequence_ratio(v: Values, x: Inputs) -> Tensor:
    """GSPO: one clipped ratio per sequence, its mean log-ratio exponentiated; a mean over sequences of the mean over tokens."""
    mean = _log_ratio(v, x).sum(1) / x.mask.sum(1)
    return (_clipped(mean, x.advantages) - ENTROPY_COEF * v.entropy.sum(1) / x.mask.sum(1)).mean()


def clip_divergence(v: Values, x: Inputs) -> Tensor:
    """With the exact divergence of whole rows in place of an estimate."""
    return _mean(_clipped(_log_ratio(v, x), x.advantages[:, None]) + BETA * v.divergence, x)


def _log_ratio(v: Values, x: Inputs) -> Tensor:
    return torch.where(x.mask, v.logps - x.old_logps.double(), 0.0)


def _clipped(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    ratio = log_ratio.exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)


def _mean(terms: Tensor, x: Inputs) -> Tensor:
    return torch.where(x.mask, terms, 0.0).sum() / x.mask.sum()


def _divergence(direction: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p||q), KL(q||p), or the mean of those to their mixture."""
    if direction == "jsd":
        mixture = torch.logaddexp(log_p, log_q) - math.log(2.0)
        return 0.5 * (_divergence("reverse", log_p, mixture) + _divergence("reverse", log_q, mixture))
    if direction == "forward":
        log_p, log_q = log_q, log_p
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass(frozen=True)
class Case:
    name: str
    formula: Callable[[Values, Inputs], Tensor]
    objective: Objective
    kept: bool = False  # over kept sets
    divergence: str = ""  # its direction


_CLIP = Clip(eps_low=0.2, eps_high=0.28)
_WHOLE = Objective(_CLIP, beta=BETA, entropy_coef=ENTROPY_COEF)
CASES = [
    Case("clip + KL + entropy bonus", clip_kl_entropy, _WHOLE),
    Case("clip + KL + entropy bonus over kept sets", clip_kl_entropy, _WHOLE, kept=True),
    Case(
        "sequence ratio + entropy bonus",
        sequence_ratio,
        Objective(_CLIP, level="sequence", aggregate="seq-mean-token-mean", entropy_coef=ENTROPY_COEF),
    ),
]
for _direction in ("reverse", "forward", "jsd"):
    _exact = Objective(_CLIP, beta=BETA, kl=Exact(_direction))
    CASES.append(Case(f"clip + divergence, {_direction}", clip_divergence, _exact, divergence=_direction))
#: (B, T, V, H) and the cases: with an odd vocabulary, and with one of a model's size (rows of many tiles).
SHAPES = (((3, 4, 1003, 64), CASES), ((2, 2, 128_257, 8), CASES[:1]))
LEVELS = ("logits", "hidden")


@functools.cache
def make_inputs(B: int, T: int, V: int, H: int, dtype: torch.dtype, kept: bool) -> Inputs:
    g = torch.Generator().manual_seed(V)
    hidden = torch.randn(B, T, H, generator=g).to(dtype)
    weight = (3 / H**0.5 * torch.randn(V, H, generator=g)).to(dtype)
    targets = torch.randint(0, V, (B, T), generator=g)
    mask = torch.rand(B, T, generator=g) < 0.75
    mask[:, 0] = True
    advantages = torch.randn(B, generator=g)
    advantages[-1] = 0.0
    noise = torch.randn(2, B, T, generator=g)
    lists = [sorted((t + 7 * j) % V for j in range((0, 1, 20)[i % 3])) for i, t in enumerate(targets.flatten().tolist())]
    inputs = Inputs(
        hidden, weight, targets, mask, advantages, noise[0], noise[1], TokenSets.from_lists(lists) if kept else None
    )
    logps = values(hidden.double() @ weight.double().t(), inputs, "").logps.float()
    inputs.old_logps, inputs.ref_logps = torch.where(mask, logps + 0.3 * noise, torch.nan)
    hidden[~mask] = torch.nan
    return inputs


def values(logits: Tensor, x: Inputs, divergence: str) -> Values:
    """Of trained tokens, over the vocabulary or over their sets. No NaN reaches the gradients."""
    read, target = x.mask[..., None], x.targets[..., None]
    log_p = torch.where(read, logits, 0.0) / TEMPERATURE
    if x.kept is not None:
        log_p = log_p.masked_fill(~x.kept.mask(log_p.shape[-1]).view(log_p.shape), -torch.inf)
    log_p = log_p.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)  # no 0 times infinity
    apart = torch.zeros_like(entropy)
    if divergence:
        apart = _divergence(divergence, log_p, (torch.where(read, x.teacher(), 0.0).double() / TEMPERATURE).log_softmax(-1))
    return Values(*(torch.where(x.mask, v, 0.0) for v in (log_p.gather(2, target)[..., 0], entropy, apart)))


def expected(case: Case, level: str, x: Inputs) -> dict[str, Tensor]:
    """{"loss", "logps", "entropy", "d_...": ...} in float64."""
    leaves = x.leaves(level, torch.float64, x.mask.device)
    if level == "hidden":
        logits = torch.where(x.mask[..., None], leaves["hidden"], 0.0) @ leaves["weight"].t()
    else:
        logits = leaves["logits"]
    found = values(logits, x, case.divergence)
    return _collect(case.formula(found, x), found.logps, found.entropy, leaves)


def results(case: Case, level: str, x: Inputs, backend: str, device: torch.device) -> dict[str, Tensor]:
    """The same from a backend, in strict mode: otherwise a fallback could be tested in its place."""
    leaves = x.leaves(level, x.hidden.dtype, device)
    fields: dict[str, Any] = {"mask": x.mask, "old_logps": x.old_logps, "ref_logps": x.ref_logps, "kept": x.kept}
    options: dict[str, Any] = {"transform": LogitTransform(TEMPERATURE)}
    if case.divergence:
        options["ref_logits"], fields["ref_logps"] = x.teacher().to(device), None
    fields = {name: value.to(device) for name, value in fields.items() if value is not None}
    batch = TokenBatch(x.targets.to(device), x.advantages.to(device), **fields)
    loss_of: Any = grpo_loss if level == "logits" else linear_grpo_loss
    with use(backend=backend, strict=True):
        out = loss_of(*leaves.values(), batch, case.objective, **options)
        return _collect(out.loss, out.logps, out.entropy, leaves)


def _collect(loss: Tensor, logps: Tensor, entropy: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    tensors = {"loss": loss, "logps": logps, "entropy": entropy}
    tensors |= {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {name: tensor.detach().double().cpu() for name, tensor in tensors.items()}


@functools.cache
def _questions() -> list[tuple[Case, str, Inputs, dict[str, Tensor]]]:
    """(case, level, inputs, what is expected in float64): the same for every backend."""
    questions = []
    for shape, cases in SHAPES:
        for case, dtype, level in itertools.product(cases, GRADIENT_LIMIT, LEVELS):
            if level == "logits" or not case.divergence:  # the second stream of rows is logits
                x = make_inputs(*shape, dtype, case.kept)
                questions.append((case, level, x, expected(case, level, x)))
    return questions


# ---- what is off


def error_of(name: str, ours: Tensor, reference: Tensor) -> float:
    off = (ours - reference).abs()
    if not name.startswith("d_"):
        return float(off.max())
    largest = reference.abs().max()
    if name == "d_weight":
        return float(off.max() / largest)
    # Rows that are 0, or nearly, are compared with the largest row.
    rows = reference.abs().amax(-1)
    return float((off.amax(-1) / torch.where(rows > 1e-2 * largest, rows, largest)).max())


def beyond_limits(found: dict[str, float], dtype: torch.dtype) -> str | None:
    """The first error that is larger than rounding can cause, in words; None if there is none."""
    for name, error in found.items():
        limit = GRADIENT_LIMIT[dtype] if name.startswith("d_") else VALUE_LIMIT
        if not error <= limit:  # NaN as well
            return f"{name} is off by {error:.1e}, more than {limit:.0e}"
    return None
