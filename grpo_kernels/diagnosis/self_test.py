"""Whether a backend is right here: the loss with its KL, bonus and divergence against plain PyTorch
in float64, which autograd differentiates, and all else that the kernels know against the eager
backend, their readable reference. `CASES` is the table.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch import TokenBatch
from ..core.backends import cpu_matmuls, use
from ..formulas.divergence import DIRECTIONS, Exact
from ..losses import grpo_loss, linear_grpo_loss
from ..objective import Objective
from ..token_sets import TokenSets
from ..transform import LogitTransform
from . import first_line
from .step import Step, clipped_loss, make_inputs, plain_logits

CPU = torch.device("cpu")

#: The largest errors that rounding can cause. Those of values (loss, log-probs, entropy), which are
#: fp32, are absolute. Those of gradients, by the dtype of logits or hidden states, are relative to
#: the largest entry; those of d_logits and d_hidden to the largest entry of each row, so that a
#: missing row shows. Gradients from hidden states are rounded to their dtype more than once.
LIMITS = {"value": 5e-5, "float32": 2e-4, "bfloat16": 3e-2}

#: The cases of every shape.
PLAIN = ("clip", "clip + KL + entropy bonus")
WHOLE = {"beta": 0.04, "entropy_coef": 0.02}
#: What an objective has in addition to the clipped ratio; "kept": tokens have candidate sets.
CASES: dict[str, dict[str, Any]] = {
    PLAIN[0]: {},
    PLAIN[1]: WHOLE,
    "clip + KL + entropy bonus over kept sets": WHOLE | {"kept": True},
    "sequence ratio": WHOLE | {"level": "sequence", "aggregate": "seq-mean-token-mean"},
    **{f"clip + divergence, {way}": WHOLE | {"kl": Exact(way)} for way in DIRECTIONS},
}
#: Those that are compared with the eager backend, which has all others itself.
BESIDE_EAGER = ("clip + KL + entropy bonus over kept sets", "sequence ratio")
#: Rows, hidden size, vocabulary and cases: with an odd vocabulary, and with one of a model's size
#: (rows of many tiles).
SHAPES = ((12, 64, 1003, tuple(CASES)), (4, 8, 128_257, PLAIN))


def self_test(backend: str, device: torch.device) -> dict[str, Any]:
    """All checks of one backend with data on `device`, as doctor --json prints them."""
    begin = time.perf_counter()
    checks = []
    worst = dict.fromkeys(LIMITS, 0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (rows, hidden, vocab, cases), dtype, level in itertools.product(
            SHAPES, ("float32", "bfloat16"), ("logits", "hidden")
        ):
            step = Step(level, rows, None if level == "logits" else hidden, vocab, dtype)
            for case in cases:
                if (level == "hidden" and "kl" in CASES[case]) or (
                    backend == "eager" and case in BESIDE_EAGER
                ):
                    continue  # the second stream of rows is logits
                errors = dict[str, float]()
                failure = None
                try:
                    errors = errors_of(question(case, step), case, backend, device, dtype)
                except Exception as error:  # a kernel that does not compile must not end the report
                    failure = first_line(error)
                for name, off in errors.items():
                    kind = dtype if name.startswith("d_") else "value"
                    worst[kind] = max(worst[kind], off)
                    if not off <= LIMITS[kind]:  # NaN as well
                        failure = (
                            failure or f"{name} is off by {off:.1e}, more than {LIMITS[kind]:.0e}"
                        )
                about = {"case": case, "level": level, "dtype": dtype, "vocab": vocab}
                checks.append(about | {"errors": errors, "failure": failure})
    return {
        "available": True,
        "reason": None,
        "passed": not any(check["failure"] for check in checks),
        "value_error": worst.pop("value"),
        "gradient_error": worst,
        "seconds": round(time.perf_counter() - begin, 2),
        "warnings": sorted(
            {str(w.message) for w in caught if "grpo_kernels" in f"{w.message} {w.filename}"}
        ),
        "checks": checks,
    }


class Question(NamedTuple):
    """What a backend is asked."""

    leaves: list[Tensor]  # in the dtype of the check; rows that are masked are NaN
    batch: TokenBatch
    objective: Objective
    how: dict[str, Any]


def question(case: str, step: Step) -> Question:
    """Make the inputs of a case. The first token has no advantage.

    Cases that are compared with the eager backend have sequences, whose last token is masked.
    Candidate sets are the target alone, the target and some ids, or empty.
    """
    leaves, batch = make_inputs(step, CPU)
    assert batch.advantages is not None
    batch.advantages[0] = 0.0
    old: Any = batch.old_logps
    chosen = dict(CASES[case])
    how = dict[str, Any]({"transform": LogitTransform(1.0 if case == PLAIN[0] else 0.9)})
    kept = chosen.pop("kept", False)
    batch = replace(batch, ref_logps=old - 0.2)
    if case in BESIDE_EAGER:
        masked = torch.arange(step.rows) % 4 == 3
        ends = torch.arange(0, step.rows + 1, 4)
        batch = replace(
            batch, mask=~masked, cu_seqlens=ends, old_logps=old.masked_fill(masked, torch.nan)
        )
        leaves[0] = leaves[0].masked_fill(masked[:, None], torch.nan)
    if kept:
        lists = (
            [(t + 7 * j) % step.vocab for j in range((0, 1, 20)[i % 3])]
            for i, t in enumerate(batch.targets.tolist())
        )
        batch = replace(
            batch, kept=TokenSets.from_lists([*map(sorted, lists)]), old_logps=None
        )  # which are of no set
    if "kl" in chosen:
        batch = replace(batch, ref_logps=None)
        how["ref_logits"] = leaves[0].float().roll(1, -1)
    return Question(leaves, batch, Objective.preset("dapo", **chosen), how)


def plain_results(q: Question) -> dict[str, Tensor]:
    """Compute a case in plain PyTorch in float64, unless it is compared with the eager backend."""
    leaves = [x.double().requires_grad_() for x in q.leaves]
    b: Any = q.batch
    objective = q.objective
    temperature = q.how["transform"].temperature
    log_p = torch.log_softmax(plain_logits(leaves) / temperature, -1)
    logps = log_p.gather(-1, b.targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    if objective.exact is not None:
        log_q = torch.log_softmax(q.how["ref_logits"].double() / temperature, -1)
        kl = plain_divergence(log_p, log_q)[objective.exact.direction]
    else:
        apart = b.ref_logps - logps
        kl = apart.exp() - apart - 1.0
    terms = clipped_loss(logps, b.old_logps, b.advantages) + objective.beta * kl
    return _with_gradients(
        leaves, loss=(terms - objective.entropy_coef * entropy).mean(), logps=logps, entropy=entropy
    )


def plain_divergence(p: Tensor, q: Tensor) -> dict[str, Tensor]:
    """That of each of DIRECTIONS, from the log-probs of rows."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    m = p.logaddexp(q) - math.log(2.0)
    return {
        "reverse": kl(p, q),
        "forward": kl(q, p),
        "jsd": (kl(p, m) + kl(q, m)) / 2,
        "tv": (p.exp() - q.exp()).abs().sum(-1) / 2,
    }


def errors_of(
    q: Question, case: str, backend: str, device: torch.device, dtype: str
) -> dict[str, float]:
    """Return the largest errors of values and gradients.

    The comparison is plain PyTorch in float64, or the eager backend in fp32 with torch's matmuls.
    The error of a gradient is relative to its largest entry; for logits and hidden states, to the
    largest entry of the same row.
    """
    found = results(q, backend, device, dtype)
    errors = dict[str, float]()
    if case not in BESIDE_EAGER:
        expected = plain_results(q)
    else:
        with cpu_matmuls.using("torch"):
            expected = results(q, "eager", CPU, "float32")
    for name, wanted in expected.items():
        off = (found[name] - wanted).abs()
        size = wanted.abs()
        largest = size.max() if name.startswith("d_") else 1.0
        if name in (
            "d_logits",
            "d_hidden",
        ):  # rows that are 0, or nearly, are compared with the largest row
            off = off.amax(-1)
            rows = size.amax(-1)
            largest = torch.where(rows > 1e-2 * largest, rows, largest)
        errors[name] = float((off / largest).max())
    return errors


def results(q: Question, backend: str, device: torch.device, dtype: str) -> dict[str, Tensor]:
    """By a backend, in strict mode: otherwise a fallback could be tested in its place."""
    leaves = [x.to(device, getattr(torch, dtype), copy=True).requires_grad_() for x in q.leaves]
    how = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in q.how.items()}
    loss_of: Any = grpo_loss if len(leaves) == 1 else linear_grpo_loss
    with use(backend=backend, strict=True):
        out = loss_of(*leaves, q.batch.to(device), q.objective, **how)
        return _with_gradients(leaves, loss=out.loss, logps=out.logps, entropy=out.entropy)


def _with_gradients(leaves: list[Tensor], **values: Tensor) -> dict[str, Tensor]:
    names = ("d_logits",) if len(leaves) == 1 else ("d_hidden", "d_weight")
    values |= dict(zip(names, torch.autograd.grad(values["loss"], leaves), strict=True))
    return {name: tensor.detach().double().cpu() for name, tensor in values.items()}
