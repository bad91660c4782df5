"""A backend against float64. The formulas are written here in plain PyTorch and differentiated by autograd, and share no
code with the package.

Shape suffixes: B sequences, T tokens each, V vocabulary, H hidden size.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import (
    LogitTransform,
    LossOutput,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
    token_divergence,
    token_logprobs,
)
from ..formulas.surrogates import Cispo, Clip
from . import first_line

Tensor = torch.Tensor

BETA, ENTROPY_COEF, TEMPERATURE, CAP, MAX_TOKENS = 0.04, 0.02, 0.7, 1.2, 50

#: The largest errors that rounding can cause. Those of loss, log-probs and entropy are absolute. Those of gradients are
#: relative to the largest entry; those of d_logits and d_hidden to the largest entry of each row, so that a missing row shows.
#: Values are fp32 for every dtype of the logits. Gradients are rounded to that dtype, those from hidden states more than
#: once.
VALUE_LIMIT = 5e-5
GRADIENT_LIMIT = {torch.float32: 2e-4, torch.bfloat16: 3e-2}


@dataclass
class Inputs:
    """The inputs of all objectives below. Masked entries are NaN."""

    hidden: Tensor  # [B, T, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool
    advantages: Tensor  # [B], one of them 0
    old_logps: Tensor  # [B, T]
    ref_logps: Tensor  # [B, T]
    upstream: Tensor  # [2, B, T]: a gradient for log-probs and one for entropies
    kept: TokenSets | None = None  # sets of ids for the B * T rows; some are empty

    @property
    def batch(self) -> TokenBatch:
        return TokenBatch(
            self.targets, self.advantages, mask=self.mask, old_logps=self.old_logps, ref_logps=self.ref_logps, kept=self.kept,
            missing="include",
        )  # fmt: skip

    def log_p(self, logits: Tensor) -> Tensor:
        """Log-probs of trained tokens over the vocabulary, or over their sets with the target added."""
        z = logits / TEMPERATURE
        if self.kept is not None:
            keep = self.kept.mask(z.shape[-1]).view(*self.mask.shape, -1).scatter(2, self.targets[..., None], True)
            z = z.masked_fill(~keep[self.mask], -torch.inf)
        return z.log_softmax(-1)


def some_sets(rows: int, V: int, g: torch.Generator) -> TokenSets:
    """Sets of one id, sets of a few ids, and rows without a set."""
    counts = torch.tensor([7, 1, 0, 40])[torch.arange(rows) % 4]
    return TokenSets.from_lists([torch.randperm(V, generator=g)[:count].tolist() for count in counts.tolist()])


def make_inputs(B: int, T: int, V: int, H: int, dtype: torch.dtype, kept: bool = False) -> Inputs:
    g = torch.Generator().manual_seed(V)
    hidden = torch.randn(B, T, H, generator=g).to(dtype)
    weight = (3 / H**0.5 * torch.randn(V, H, generator=g)).to(dtype)
    targets = torch.randint(0, V, (B, T), generator=g)
    mask = torch.rand(B, T, generator=g) < 0.75
    mask[:, 0] = True
    advantages = torch.randn(B, generator=g)
    advantages[-1] = 0.0
    noise, upstream = torch.randn(2, B, T, generator=g), torch.randn(2, B, T, generator=g)
    sets = some_sets(B * T, V, g) if kept else None
    inputs = Inputs(hidden, weight, targets, mask, advantages, noise[0], noise[1], upstream, sets)
    log_p = inputs.log_p(hidden[mask].double() @ weight.double().t())
    logps = noise.new_full((B, T), torch.nan).masked_scatter(mask, log_p.gather(-1, targets[mask][:, None]).float())
    inputs.old_logps, inputs.ref_logps = logps + 0.3 * noise
    hidden[~mask] = torch.nan
    return inputs


# ---- objectives: (log-probs, entropies, inputs) -> loss in float64, and our names for them. Log-probs and entropies are 0
# where masked

Formula = Callable[[Tensor, Tensor, Inputs], Tensor]


def _clipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)


def _log_ratio(logps: Tensor, x: Inputs) -> Tensor:
    return torch.where(x.mask, logps - x.old_logps.double(), 0.0)


def clip_kl_entropy(logps: Tensor, entropy: Tensor, x: Inputs) -> Tensor:
    """Clipped ratios of tokens, KL to the reference (k3), entropy bonus; a mean over tokens."""
    d = torch.where(x.mask, x.ref_logps.double() - logps, 0.0)
    policy = _clipped(_log_ratio(logps, x).exp(), x.advantages.double()[:, None])
    terms = policy + BETA * (d.exp() - d - 1) - ENTROPY_COEF * entropy
    return torch.where(x.mask, terms, 0.0).sum() / x.mask.sum()


def sequence_ratio(logps: Tensor, entropy: Tensor, x: Inputs) -> Tensor:
    """GSPO: one clipped ratio per sequence, its mean log-ratio exponentiated; a mean over sequences."""
    mean = _log_ratio(logps, x).sum(1) / x.mask.sum(1)
    return _clipped(mean.exp(), x.advantages.double()).mean()


def capped_weight(logps: Tensor, entropy: Tensor, x: Inputs) -> Tensor:
    """CISPO: the capped ratio is a constant weight of the log-prob; a sum over B * MAX_TOKENS."""
    weight = _log_ratio(logps, x).exp().clamp(max=CAP).detach() * x.advantages.double()[:, None]
    return -torch.where(x.mask, weight * logps, 0.0).sum() / (x.mask.shape[0] * MAX_TOKENS)


def log_probs(logps: Tensor, entropy: Tensor, x: Inputs) -> Tensor:
    """Layer 1, with gradients such as a trainer's own loss sends back. A mean, so that its error has the size of a log-prob's
    error."""
    return (x.upstream.double() * torch.stack([logps, entropy])).mean()


def weighted_divergence(divergence: Tensor, entropy: Tensor, x: Inputs) -> Tensor:
    return (x.upstream[0].double() * divergence).mean()


def _divergence(kind: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p||q), KL(q||p), or the mean of those to their mixture."""
    if kind == "jsd":
        mixture = torch.logaddexp(log_p, log_q) - math.log(2.0)
        return 0.5 * (_divergence("reverse", log_p, mixture) + _divergence("reverse", log_q, mixture))
    if kind == "forward":
        log_p, log_q = log_q, log_p
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass(frozen=True)
class Case:
    name: str
    formula: Formula
    objective: Objective | None  # None: token_logprobs and linear_logprobs
    kept: bool = False  # over kept sets
    divergence: str = ""  # the kind of divergence from a second stream of rows; it takes the place of log-probs and entropy


_CLIP = Clip(eps_low=0.2, eps_high=0.28)
CASES = (
    Case("clip + KL + entropy bonus", clip_kl_entropy, Objective(_CLIP, beta=BETA, entropy_coef=ENTROPY_COEF)),
    Case("sequence ratio", sequence_ratio, Objective(_CLIP, level="sequence", aggregate="seq-mean-token-mean")),
    Case("capped weight", capped_weight, Objective(Cispo(cap=CAP), aggregate="constant", max_tokens=MAX_TOKENS)),
    Case("log-probs and entropy", log_probs, None),
)
KEPT = tuple(replace(case, name=f"{case.name} over kept sets", kept=True) for case in (CASES[0], CASES[3]))
DIVERGENCES = tuple(
    Case(f"divergence, {kind}", weighted_divergence, None, divergence=kind) for kind in ("reverse", "forward", "jsd")
)
#: (B, T, V, H) and the cases: with an odd vocabulary, and with one of a model's size (rows of many tiles).
SHAPES: tuple[tuple[tuple[int, int, int, int], tuple[Case, ...]], ...] = (
    ((3, 4, 1003, 64), CASES + KEPT + DIVERGENCES),
    ((2, 2, 128_257, 8), CASES[:1]),
)
LEVELS = ("logits", "hidden")


@dataclass
class Check:
    """One case at one level in one dtype. `errors` are {loss, logps, entropy, d_...}; `failure` is None if all is well."""

    case: str
    level: str
    dtype: str
    vocab: int
    errors: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


@dataclass
class Report:
    """The result of the self-test of one backend."""

    checks: list[Check]
    seconds: float
    warnings: list[str]

    @property
    def failures(self) -> list[Check]:
        return [c for c in self.checks if c.failure is not None]

    def worst(self, kind: str, dtype: str | None = None) -> float:
        """The largest error of "value" or "gradient"; NaN if there is one."""
        values = [
            error
            for check in self.checks
            if dtype in (None, check.dtype)
            for name, error in check.errors.items()
            if name.startswith("d_") == (kind == "gradient")
        ]
        return max(values, key=lambda e: (e != e, e), default=0.0)


def self_test(backend: str, device: torch.device) -> Report:
    """All checks of one backend with data on `device`. Never raises: an exception is that check's failure."""
    begin, checks = time.perf_counter(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for case, level, inputs, reference in _tests():
            dtype = inputs.weight.dtype
            check = Check(case.name, level, str(dtype).removeprefix("torch."), inputs.weight.shape[0])
            checks.append(check)
            try:
                check.errors = errors(results(case, level, inputs, backend, device), reference)
            except Exception as error:  # a kernel that does not compile must not end the report
                check.failure = first_line(error)
                continue
            check.failure = beyond_limits(check.errors, dtype)
    ours = [str(w.message) for w in caught if "grpo_kernels" in str(w.message) or "grpo_kernels" in w.filename]
    return Report(checks, time.perf_counter() - begin, sorted(set(ours)))


@functools.cache
def _tests() -> list[tuple[Case, str, Inputs, dict[str, Tensor]]]:
    """(case, level, inputs, what is expected in float64): the same for every backend."""
    tests = []
    for shape, cases in SHAPES:
        for dtype in GRADIENT_LIMIT:
            inputs = {kept: make_inputs(*shape, dtype, kept) for kept in {case.kept for case in cases}}
            # The kernels of two streams take logits only.
            every = [(case, level) for case in cases for level in LEVELS if level == "logits" or not case.divergence]
            tests += [(case, level, inputs[case.kept], expected(case, level, inputs[case.kept])) for case, level in every]
    return tests


def leaves_of(level: str, x: Inputs) -> dict[str, Tensor]:
    """The tensors whose gradients are compared, in the dtype of the inputs. The logits are computed in float64 and rounded."""
    if level == "hidden":
        return {"hidden": x.hidden, "weight": x.weight}
    return {"logits": (x.hidden.double() @ x.weight.double().t()).to(x.hidden.dtype)}


def teacher_logits(x: Inputs) -> Tensor:
    """The logits of the second stream, fp32 [B, T, V]: of the same head, with other ids."""
    return (x.hidden.double() @ x.weight.double().t()).roll(1, -1).float()


def expected(case: Case, level: str, x: Inputs) -> dict[str, Tensor]:
    """{"loss", "logps", "entropy", "d_...": ...} in float64."""
    leaves = {name: leaf.double().requires_grad_() for name, leaf in leaves_of(level, x).items()}
    # Trained tokens only, so that no NaN reaches the gradients.
    logits = leaves["hidden"][x.mask] @ leaves["weight"].t() if level == "hidden" else leaves["logits"][x.mask]
    log_p = x.log_p(logits)
    if case.divergence:
        found = _divergence(case.divergence, log_p, x.log_p(teacher_logits(x)[x.mask].double()))
        divergence = torch.zeros(x.mask.shape, dtype=torch.float64).masked_scatter(x.mask, found)
        return _collect(case.formula(divergence, divergence, x), {"divergence": divergence}, leaves)
    nothing = torch.zeros(x.mask.shape, dtype=torch.float64)
    logps = nothing.masked_scatter(x.mask, log_p.gather(-1, x.targets[x.mask][:, None])[:, 0])
    entropy = nothing.masked_scatter(x.mask, -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1))  # no 0 times infinity
    return _collect(case.formula(logps, entropy, x), {"logps": logps, "entropy": entropy}, leaves)


def results(case: Case, level: str, x: Inputs, backend: str, device: torch.device) -> dict[str, Tensor]:
    """The same from a backend, with strict=True: otherwise a fallback could be tested in its place."""
    leaves = {name: leaf.to(device).requires_grad_() for name, leaf in leaves_of(level, x).items()}
    given: dict[str, Any] = {name: value for name, value in vars(x).items() if value is not None}
    x = Inputs(**{name: value.to(device) for name, value in given.items()})
    if case.divergence:
        divergence = token_divergence(
            leaves["logits"], teacher_logits(x), case.divergence, mask=x.mask, transform=LogitTransform(TEMPERATURE),
            options=Options(backend=backend, strict=True),
        )  # fmt: skip
        return _collect((x.upstream[0] * divergence).mean(), {"divergence": divergence}, leaves)
    options: dict[str, Any] = {"transform": LogitTransform(TEMPERATURE), "backend": backend, "strict": True}
    if case.objective is not None:
        loss_of: Callable[..., LossOutput] = grpo_loss if level == "logits" else linear_grpo_loss
        out = loss_of(*leaves.values(), x.batch, case.objective, **options)
        return _collect(out.loss, {"logps": out.logps, "entropy": out.entropy}, leaves)
    log_probs_of: Callable[..., tuple[Tensor, Tensor | None]] = token_logprobs if level == "logits" else linear_logprobs
    logps, entropy = log_probs_of(
        *leaves.values(), x.targets, mask=x.mask, entropy=True, kept=x.kept, options=Options(missing="include"), **options
    )
    assert entropy is not None
    loss = (x.upstream * torch.stack([logps, entropy])).mean()
    return _collect(loss, {"logps": logps, "entropy": entropy}, leaves)


def _collect(loss: Tensor, values: dict[str, Tensor | None], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    tensors = {"loss": loss} | values | {f"d_{k}": g for k, g in zip(leaves, gradients, strict=True)}
    return {name: tensor.detach().double().cpu() for name, tensor in tensors.items() if tensor is not None}


def errors(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    return {name: _error(name, ours[name], reference[name]) for name in reference}


def _error(name: str, ours: Tensor, reference: Tensor) -> float:
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
