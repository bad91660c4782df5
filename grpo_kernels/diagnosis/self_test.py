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
from dataclasses import dataclass
from typing import Any

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
from ..formulas.divergence import DIRECTIONS
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
            dtype, errors = str(inputs.weight.dtype).removeprefix("torch."), dict[str, float]()
            try:
                found = results(case, level, inputs, backend, device)
                errors |= {name: error_of(name, found[name], wanted) for name, wanted in reference.items()}
                failure = beyond_limits(errors, inputs.weight.dtype)
            except Exception as error:  # a kernel that does not compile must not end the report
                failure = first_line(error)
            for name, off in errors.items():
                kind = dtype if name.startswith("d_") else "value"
                worst[kind] = max(worst[kind], off)
            check = {"case": case.name, "level": level, "dtype": dtype, "vocab": len(inputs.weight)}
            checks.append(check | {"errors": errors, "failure": failure})
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


@dataclass(frozen=True)
class Case:
    """A clipped ratio, a KL to the reference (k3) and an entropy bonus: as `objective` says it to the package, and as the other
    fields say it to `expected`."""

    name: str
    objective: Objective
    sequences: bool = False  # a ratio of each sequence, and the mean over sequences of the mean over tokens; else of tokens
    kept: bool = False  # over kept sets
    divergence: str = ""  # in place of the estimate of the KL, the exact divergence of this direction


def _objective(**others: Any) -> Objective:
    return Objective(Clip(eps_low=0.2, eps_high=0.28), beta=BETA, entropy_coef=ENTROPY_COEF, **others)


CASES = [
    Case("clip + KL + entropy bonus", _objective()),
    Case("clip + KL + entropy bonus over kept sets", _objective(), kept=True),
    Case("sequence ratio", _objective(level="sequence", aggregate="seq-mean-token-mean"), sequences=True),
    *(Case(f"clip + divergence, {way}", _objective(kl=Exact(way)), divergence=way) for way in DIRECTIONS),
]
#: (B, T, V, H) and the cases: with an odd vocabulary, and with one of a model's size (rows of many tiles).
SHAPES = (((3, 4, 1003, 64), CASES), ((2, 2, 128_257, 8), CASES[:1]))


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
    sets = TokenSets.from_lists(lists) if kept else None
    inputs = Inputs(hidden, weight, targets, mask, advantages, noise[0], noise[1], sets)
    logps = _of_targets(_log_probs(hidden.double() @ weight.double().t(), inputs), inputs).float()
    inputs.old_logps, inputs.ref_logps = torch.where(mask, logps + 0.3 * noise, torch.nan)
    hidden[~mask] = torch.nan
    return inputs


@functools.cache
def _questions() -> list[tuple[Case, str, Inputs, dict[str, Tensor]]]:
    """(case, level, inputs, what is expected in float64): the same for every backend."""
    questions = []
    for shape, cases in SHAPES:
        for case, dtype, level in itertools.product(cases, GRADIENT_LIMIT, ("logits", "hidden")):
            if level == "logits" or not case.divergence:  # the second stream of rows is logits
                x = make_inputs(*shape, dtype, case.kept)
                questions.append((case, level, x, expected(case, level, x)))
    return questions


# ---- in float64


def expected(case: Case, level: str, x: Inputs) -> dict[str, Tensor]:
    """{"loss", "logps", "entropy", "d_...": ...}"""
    leaves = x.leaves(level, torch.float64, x.mask.device)
    logits = leaves[level]
    if level == "hidden":
        logits = torch.where(x.mask[..., None], logits, 0.0) @ leaves["weight"].t()
    log_p, advantages = _log_probs(logits, x), x.advantages[:, None]
    logps, entropy = _of_targets(log_p, x), -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)  # no 0 times infinity
    log_ratio = torch.where(x.mask, logps - x.old_logps.double(), 0.0)
    if case.sequences:
        log_ratio = (log_ratio.sum(1, keepdim=True) / x.mask.sum(1, keepdim=True)).expand_as(logps)
    ratio = log_ratio.exp()
    if case.divergence:
        kl = _divergence(case.divergence, log_p, _log_probs(x.teacher().double(), x))
    else:
        to_reference = torch.where(x.mask, x.ref_logps.double() - logps, 0.0)
        kl = to_reference.expm1() - to_reference
    policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    terms = torch.where(x.mask, policy + BETA * kl - ENTROPY_COEF * entropy, 0.0)
    loss = (terms.sum(1) / x.mask.sum(1)).mean() if case.sequences else terms.sum() / x.mask.sum()
    return _collect(loss, logps, torch.where(x.mask, entropy, 0.0), leaves)


def _log_probs(logits: Tensor, x: Inputs) -> Tensor:
    """Over the vocabulary or over the sets; no NaN of masked rows reaches the gradients."""
    scaled = torch.where(x.mask[..., None], logits, 0.0) / TEMPERATURE
    if x.kept is not None:
        scaled = scaled.masked_fill(~x.kept.mask(scaled.shape[-1]).view(scaled.shape), -torch.inf)
    return scaled.log_softmax(-1)


def _of_targets(log_p: Tensor, x: Inputs) -> Tensor:
    return torch.where(x.mask, log_p.gather(2, x.targets[..., None])[..., 0], 0.0)


def _divergence(direction: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p||q), KL(q||p), the mean of those to their mixture, or the total variation."""
    if direction == "tv":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2.0
    if direction == "jsd":
        mixture = torch.logaddexp(log_p, log_q) - math.log(2.0)
        return 0.5 * (_divergence("reverse", log_p, mixture) + _divergence("reverse", log_q, mixture))
    if direction == "forward":
        log_p, log_q = log_q, log_p
    return (log_p.exp() * (log_p - log_q)).sum(-1)


# ---- by a backend


def results(case: Case, level: str, x: Inputs, backend: str, device: torch.device) -> dict[str, Tensor]:
    """The same from a backend, in strict mode: otherwise a fallback could be tested in its place."""
    leaves = x.leaves(level, x.hidden.dtype, device)
    ref_logps = None if case.divergence else x.ref_logps
    batch = TokenBatch(x.targets, x.advantages, mask=x.mask, old_logps=x.old_logps, ref_logps=ref_logps, kept=x.kept).to(device)
    teacher = {"ref_logits": x.teacher().to(device)} if case.divergence else {}
    loss_of: Any = grpo_loss if level == "logits" else linear_grpo_loss
    with use(backend=backend, strict=True):
        out = loss_of(*leaves.values(), batch, case.objective, transform=LogitTransform(TEMPERATURE), **teacher)
        return _collect(out.loss, out.logps, out.entropy, leaves)


def _collect(loss: Tensor, logps: Tensor, entropy: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    tensors = {"loss": loss, "logps": logps, "entropy": entropy}
    tensors |= {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {name: tensor.detach().double().cpu() for name, tensor in tensors.items()}


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
