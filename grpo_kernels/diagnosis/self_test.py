"""Whether a backend is right here: the clipped loss against plain PyTorch in float64, which autograd differentiates, and all else
that the kernels know against the eager backend, their readable reference. `CASES` is the table.

Shape suffixes: B sequences, T tokens each, V vocabulary, H hidden size.
"""

from __future__ import annotations

import itertools
import time
import warnings
from typing import Any, NamedTuple

import torch

from .. import (
    Exact,
    LogitTransform,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_grpo_loss,
    token_logprobs,
    use,
)
from ..formulas.divergence import DIRECTIONS
from ..rows.backends import cpu_products
from . import first_line
from .step import plain_loss

Tensor = torch.Tensor

#: The largest errors that rounding can cause. Those of values (loss, log-probs, entropy), which are fp32, are absolute. Those of
#: gradients, by the dtype of logits or hidden states, are relative to the largest entry; those of d_logits and d_hidden to the
#: largest entry of each row, so that a missing row shows. Gradients from hidden states are rounded to their dtype more than once.
LIMITS = {"value": 5e-5, "float32": 2e-4, "bfloat16": 3e-2}

#: The case that is compared with plain PyTorch, and the only one of the eager backend.
PLAIN = "clip"
WHOLE = {"beta": 0.04, "entropy_coef": 0.02}
#: What an objective has beside the clipped ratio; "kept": the tokens were drawn from sets.
CASES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "clip + KL + entropy bonus": WHOLE,
    "clip + KL + entropy bonus over kept sets": WHOLE | {"kept": True},
    "sequence ratio": WHOLE | {"level": "sequence", "aggregate": "seq-mean-token-mean"},
    **{f"clip + divergence, {way}": WHOLE | {"kl": Exact(way)} for way in DIRECTIONS},
}
#: (B, T, V, H) and the cases: with an odd vocabulary, and with one of a model's size (rows of many tiles).
SHAPES = (((3, 4, 1003, 64), [*CASES]), ((2, 2, 128_257, 8), [*CASES][:2]))


def self_test(backend: str, device: torch.device) -> dict[str, Any]:
    """All checks of one backend with data on `device`, as doctor --json prints them."""
    begin, checks, worst = time.perf_counter(), [], dict.fromkeys(LIMITS, 0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (shape, cases), dtype, level in itertools.product(SHAPES, ("float32", "bfloat16"), ("logits", "hidden")):
            for case in cases[:1] if backend == "eager" else cases:
                if level == "hidden" and "kl" in CASES[case]:
                    continue  # the second stream of rows is logits
                errors, failure = dict[str, float](), None
                try:
                    errors = errors_of(question(case, level, dtype, *shape), case == PLAIN, backend, device, dtype)
                except Exception as error:  # a kernel that does not compile must not end the report
                    failure = first_line(error)
                for name, off in errors.items():
                    kind = dtype if name.startswith("d_") else "value"
                    worst[kind] = max(worst[kind], off)
                    if not off <= LIMITS[kind]:  # NaN as well
                        failure = failure or f"{name} is off by {off:.1e}, more than {LIMITS[kind]:.0e}"
                about = {"case": case, "level": level, "dtype": dtype, "vocab": shape[2]}
                checks.append(about | {"errors": errors, "failure": failure})
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


class Question(NamedTuple):
    """What a backend is asked. Rows that are masked are NaN."""

    leaves: dict[
        str, Tensor
    ]  # logits [B, T, V], or hidden [B, T, H] and weight [V, H]: fp32, as rounded to the dtype of the check
    batch: TokenBatch
    objective: Objective
    transform: LogitTransform
    second: dict[str, Tensor]  # of an exact divergence: the logits of a second stream of rows, fp32 [B, T, V]


def question(case: str, level: str, dtype: str, B: int, T: int, V: int, H: int) -> Question:
    """One sequence has no advantage, the last token is masked, but not for plain PyTorch. Sets hold half of the probability."""
    g, chosen, plain = torch.Generator().manual_seed(V), dict(CASES[case]), case == PLAIN
    hidden, weight = torch.randn(B, T, H, generator=g), 3 / H**0.5 * torch.randn(V, H, generator=g)
    logits, transform = hidden @ weight.t(), LogitTransform(1.0 if plain else 0.7)
    targets, advantages = torch.randint(0, V, (B, T), generator=g), torch.randn(B, 1, generator=g).repeat(1, T)
    advantages[-1] = 0.0
    mask = torch.arange(T).repeat(B, 1) < T - (not plain)
    kept = None
    if chosen.pop("kept", False):
        kept, targets = TokenSets.from_logits(logits, top_p=0.5), logits.argmax(-1)
    logps = token_logprobs(logits, targets, transform=transform, kept=kept, options=Options(backend="eager")).logps
    old, ref = (logps + 0.3 * torch.randn(2, B, T, generator=g)).masked_fill(~mask, torch.nan)
    second = {"ref_logits": logits.roll(1, -1)} if "kl" in chosen else {}
    batch = TokenBatch(targets, advantages, mask=mask, old_logps=old, ref_logps=None if second else ref, kept=kept)
    leaves = {"logits": logits} if level == "logits" else {"hidden": hidden, "weight": weight}
    leaves = {name: x.to(getattr(torch, dtype)).float() for name, x in leaves.items()}
    leaves[level] = leaves[level].masked_fill(~mask[..., None], torch.nan)
    return Question(leaves, batch, Objective.preset("dapo", **chosen), transform, second)


def errors_of(q: Question, plain: bool, backend: str, device: torch.device, dtype: str) -> dict[str, float]:
    """The largest errors of values and gradients beside plain PyTorch in float64, or eager in fp32 with torch's own products; of a
    gradient as a share of the largest entry, of logits or hidden states of the same row."""
    found, errors = results(q, backend, device, dtype), dict[str, float]()
    if plain:
        leaves = {name: x.double().requires_grad_() for name, x in q.leaves.items()}
        loss, logps = plain_loss([*leaves.values()], q.batch, torch.float64)
        expected = _with_gradients(leaves, loss=loss, logps=logps)
    else:
        with cpu_products.using("torch"):
            expected = results(q, "eager", torch.device("cpu"), "float32")
    for name, wanted in expected.items():
        off, size = (found[name] - wanted).abs(), wanted.abs()
        largest = size.max() if name.startswith("d_") else 1.0
        if name in ("d_logits", "d_hidden"):  # rows that are 0, or nearly, are compared with the largest row
            off, rows = off.amax(-1), size.amax(-1)
            largest = torch.where(rows > 1e-2 * largest, rows, largest)
        errors[name] = float((off / largest).max())
    return errors


def results(q: Question, backend: str, device: torch.device, dtype: str) -> dict[str, Tensor]:
    """By a backend, in strict mode: otherwise a fallback could be tested in its place."""
    leaves = {name: x.to(device, getattr(torch, dtype), copy=True).requires_grad_() for name, x in q.leaves.items()}
    second = {name: x.to(device) for name, x in q.second.items()}
    loss_of: Any = grpo_loss if "logits" in leaves else linear_grpo_loss
    with use(backend=backend, strict=True):
        out = loss_of(*leaves.values(), q.batch.to(device), q.objective, transform=q.transform, **second)
        return _with_gradients(leaves, loss=out.loss, logps=out.logps, entropy=out.entropy)


def _with_gradients(leaves: dict[str, Tensor], **values: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(values["loss"], [*leaves.values()])
    values |= {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {name: tensor.detach().double().cpu() for name, tensor in values.items()}
