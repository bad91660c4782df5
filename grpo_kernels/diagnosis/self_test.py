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
from typing import Any, NamedTuple

import torch

from ..batch import TokenBatch
from ..formulas.divergence import DIRECTIONS, Exact
from ..formulas.surrogates import Clip
from ..losses import grpo_loss, linear_grpo_loss
from ..objective import Objective
from ..rows.backends import use
from ..specs import LogitTransform
from ..token_sets import TokenSets
from . import first_line

Tensor = torch.Tensor

BETA, ENTROPY_COEF, TEMPERATURE = 0.04, 0.02, 0.7

#: The largest errors that rounding can cause. Those of loss, log-probs and entropy are absolute. Those of gradients are
#: relative to the largest entry; those of d_logits and d_hidden to the largest entry of each row, so that a missing row shows.
#: Values are fp32 for every dtype of the logits. Gradients are rounded to that dtype, those from hidden states more than
#: once.
VALUE_LIMIT = 5e-5
GRADIENT_LIMIT = {torch.float32: 2e-4, torch.bfloat16: 3e-2}

#: A clipped ratio, a KL to the reference (k3) and an entropy bonus: name -> what else its objective says, and "kept".
CASES: dict[str, dict[str, Any]] = {
    "clip + KL + entropy bonus": {},
    "clip + KL + entropy bonus over kept sets": {"kept": True},
    "sequence ratio": {"level": "sequence", "aggregate": "seq-mean-token-mean"},
    **{f"clip + divergence, {way}": {"kl": Exact(way)} for way in DIRECTIONS},
}
#: (B, T, V, H) and the cases: with an odd vocabulary, and with one of a model's size (rows of many tiles).
SHAPES = (((3, 4, 1003, 64), [*CASES]), ((2, 2, 128_257, 8), [*CASES][:1]))


def self_test(backend: str, device: torch.device) -> dict[str, Any]:
    """All checks of one backend with data on `device`, as doctor --json prints them. Never raises: an exception is that check's
    failure."""
    begin, checks = time.perf_counter(), []
    worst = {"value": 0.0, "float32": 0.0, "bfloat16": 0.0}  # of gradients by their dtype
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for q in questions():
            errors = dict[str, float]()
            try:
                found = results(q, backend, device)
                errors |= {name: error_of(name, found[name], wanted) for name, wanted in q.expected.items()}
                failure = beyond_limits(errors, q.dtype)
            except Exception as error:  # a kernel that does not compile must not end the report
                failure = first_line(error)
            for name, off in errors.items():
                kind = q.about["dtype"] if name.startswith("d_") else "value"
                worst[kind] = max(worst[kind], off)
            checks.append(q.about | {"errors": errors, "failure": failure})
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


# ---- the questions, and what is expected in float64


class Question(NamedTuple):
    """What a backend is asked. Rows that are masked are NaN."""

    about: dict[str, Any]  # case, level (logits, hidden), dtype, vocab
    dtype: torch.dtype
    objective: Objective
    leaves: dict[str, Tensor]  # logits [B, T, V], or hidden [B, T, H] and weight [V, H]
    batch: TokenBatch
    teacher: Tensor | None  # of an exact divergence: the logits of a second stream of rows, fp32 [B, T, V]
    expected: dict[str, Tensor]  # loss, logps, entropy, d_logits, ...


@functools.cache
def questions() -> list[Question]:
    """The same for every backend."""
    found = []
    for (shape, cases), dtype, level in itertools.product(SHAPES, GRADIENT_LIMIT, ("logits", "hidden")):
        # The second stream of rows is logits.
        found += [question(case, level, dtype, *shape) for case in cases if level == "logits" or "kl" not in CASES[case]]
    return found


def question(case: str, level: str, dtype: torch.dtype, B: int, T: int, V: int, H: int) -> Question:
    """One sequence has no advantage; sets are the target alone, some ids with it, none."""
    how = dict(CASES[case])
    kept = how.pop("kept", False)
    objective = Objective(Clip(eps_low=0.2, eps_high=0.28), beta=BETA, entropy_coef=ENTROPY_COEF, **how)
    g = torch.Generator().manual_seed(V)
    hidden, weight = torch.randn(B, T, H, generator=g), 3 / H**0.5 * torch.randn(V, H, generator=g)
    targets = torch.randint(0, V, (B, T), generator=g)
    mask = torch.rand(B, T, generator=g) < 0.75
    mask[:, 0] = True
    advantages, noise = torch.randn(B, generator=g), 0.3 * torch.randn(2, B, T, generator=g)
    advantages[-1] = 0.0
    lists = [sorted((t + 7 * j) % V for j in range((0, 1, 20)[i % 3])) for i, t in enumerate(targets.flatten().tolist())]
    sets = TokenSets.from_lists(lists) if kept else None
    given = {"logits": hidden @ weight.t()} if level == "logits" else {"hidden": hidden, "weight": weight}
    leaves = {name: x.to(dtype) for name, x in given.items()}

    exact = {name: x.double().requires_grad_() for name, x in leaves.items()}
    logits = exact[level] if level == "logits" else exact["hidden"] @ exact["weight"].t()
    teacher = logits.detach().float().roll(1, -1) if "kl" in how else None
    inside = None if sets is None else sets.mask(V).view(logits.shape)
    log_p = _log_probs(logits, inside)
    logps, entropy = (
        log_p.gather(2, targets[..., None])[..., 0],
        -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1),
    )  # no 0 times infinity
    old, ref = (logps.detach() + noise).float()
    log_ratio, A = torch.where(mask, logps - old.double(), 0.0), advantages[:, None]
    if objective.level == "sequence":
        log_ratio = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).expand_as(logps)
    ratio, to_ref = log_ratio.exp(), ref.double() - logps
    kl = (
        to_ref.expm1() - to_ref
        if teacher is None
        else _divergence(how["kl"].direction, log_p, _log_probs(teacher.double(), inside))
    )
    policy = -torch.min(ratio * A, ratio.clamp(0.8, 1.28) * A)
    terms = torch.where(mask, policy + BETA * kl - ENTROPY_COEF * entropy, 0.0)
    loss = terms.sum() / mask.sum() if objective.level == "token" else (terms.sum(1) / mask.sum(1)).mean()
    expected = _collect(loss, torch.where(mask, logps, 0.0), torch.where(mask, entropy, 0.0), exact)

    leaves[level] = leaves[level].masked_fill(~mask[..., None], torch.nan)
    old, ref = (x.masked_fill(~mask, torch.nan) for x in (old, ref))
    batch = TokenBatch(targets, advantages, mask=mask, old_logps=old, ref_logps=ref if teacher is None else None, kept=sets)
    about = {"case": case, "level": level, "dtype": str(dtype).removeprefix("torch."), "vocab": V}
    return Question(about, dtype, objective, leaves, batch, teacher, expected)


def _log_probs(logits: Tensor, inside: Tensor | None) -> Tensor:
    """Over the vocabulary or over the sets."""
    scaled = logits / TEMPERATURE
    return (scaled if inside is None else scaled.masked_fill(~inside, -torch.inf)).log_softmax(-1)


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


def results(q: Question, backend: str, device: torch.device) -> dict[str, Tensor]:
    """The same from a backend, in strict mode: otherwise a fallback could be tested in its place."""
    leaves = {name: x.to(device, copy=True).requires_grad_() for name, x in q.leaves.items()}
    teacher = {} if q.teacher is None else {"ref_logits": q.teacher.to(device)}
    loss_of: Any = grpo_loss if "logits" in leaves else linear_grpo_loss
    with use(backend=backend, strict=True):
        out = loss_of(*leaves.values(), q.batch.to(device), q.objective, transform=LogitTransform(TEMPERATURE), **teacher)
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
