"""Test whether a backend computes right results on this machine.

Losses with the KL, the entropy bonus and an exact divergence are compared with plain PyTorch in
float64, whose gradients come from autograd. Candidate sets and sequence-level ratios are compared
with the eager backend. `CASES` lists all cases.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

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

#: The largest errors that rounding can cause. "value": absolute error of loss, log-probs and
#: entropy, which are fp32. The others: relative error of gradients, by the dtype of the logits or
#: hidden states; see `largest_error`. Gradients of hidden states are rounded more than once.
LIMITS = {"value": 5e-5, "float32": 2e-4, "bfloat16": 3e-2}

#: The cases that run at every shape.
BASIC_CASES = ("clip", "clip + KL + entropy bonus")
KL_AND_BONUS = {"beta": 0.04, "entropy_coef": 0.02}
#: Each case with the arguments of `Objective.preset` in addition to the clipped ratio. "kept" is
#: not one of them: it says that tokens have candidate sets.
CASES: dict[str, dict[str, Any]] = {
    BASIC_CASES[0]: {},
    BASIC_CASES[1]: KL_AND_BONUS,
    "clip + KL + entropy bonus over kept sets": KL_AND_BONUS | {"kept": True},
    "sequence ratio": KL_AND_BONUS | {"level": "sequence", "aggregate": "seq-mean-token-mean"},
    **{f"clip + divergence, {way}": KL_AND_BONUS | {"kl": Exact(way)} for way in DIRECTIONS},
}
#: Cases that are compared with the eager backend, because plain PyTorch does not compute them here.
COMPARED_WITH_EAGER = ("clip + KL + entropy bonus over kept sets", "sequence ratio")
#: (rows, hidden size, vocabulary, cases). One vocabulary is odd, the other has the size of a
#: model's, so that a row has many tiles.
SHAPES = ((12, 64, 1003, tuple(CASES)), (4, 8, 128_257, BASIC_CASES))


def self_test(backend: str, device: torch.device) -> dict[str, Any]:
    """Run all checks of one backend with data on `device`.

    backend   "eager", "cpu" or "triton"

    Returns the entry of the backend in the report of `doctor --json`, see
    grpo_kernels/diagnosis/doctor.py. A check that raises is reported as failed.
    """
    start = time.perf_counter()
    checks = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows, hidden, vocab, cases in SHAPES:
            for dtype, level in itertools.product(("float32", "bfloat16"), ("logits", "hidden")):
                step = Step(
                    level,
                    rows,
                    hidden=None if level == "logits" else hidden,
                    vocab=vocab,
                    dtype=dtype,
                )
                checks += [
                    run_check(case, step, backend, device)
                    for case in cases
                    if can_be_checked(case, level, backend)
                ]
    worst = dict.fromkeys(LIMITS, 0.0)
    for check in checks:
        for name, error in check["errors"].items():
            kind = error_kind(name, check["dtype"])
            worst[kind] = max(worst[kind], error)
    # Warnings of other packages are left out.
    own_warnings = {
        str(warning.message)
        for warning in caught
        if "grpo_kernels" in f"{warning.message} {warning.filename}"
    }
    return {
        "available": True,
        "reason": None,
        "passed": not any(check["failure"] for check in checks),
        "value_error": worst.pop("value"),
        "gradient_error": worst,
        "seconds": round(time.perf_counter() - start, 2),
        "warnings": sorted(own_warnings),
        "checks": checks,
    }


def can_be_checked(case: str, level: str, backend: str) -> bool:
    """Return whether a case can be computed at this level, and compared with something else.

    case      a key of `CASES`
    level     "logits" or "hidden": what the loss is computed from
    backend   the backend that is tested
    """
    if backend == "eager" and case in COMPARED_WITH_EAGER:  # it would be compared with itself
        return False
    # `make_case` makes logits of a reference, but no hidden states of one.
    has_exact_divergence = "kl" in CASES[case]
    return level == "logits" or not has_exact_divergence


def run_check(case: str, step: Step, backend: str, device: torch.device) -> dict[str, Any]:
    """Run one case and return its entry of "checks" in the report.

    case      a key of `CASES`
    step      the size, the dtype and the level: "logits" or "hidden"
    backend   the backend that is tested
    device    where it runs

    "failure" is None, the first error above its limit, or the exception that the case raised.
    """
    errors = dict[str, float]()
    failure = None
    try:
        errors = largest_errors(make_case(case, step), backend, device, step.dtype)
    except Exception as exception:  # a kernel that does not compile must not end the report
        failure = first_line(exception)
    for name, error in errors.items():
        limit = LIMITS[error_kind(name, step.dtype)]
        is_too_large = not error <= limit  # written so that a NaN is too large
        if is_too_large and failure is None:
            failure = f"{name} is off by {error:.1e}, more than {limit:.0e}"
    return {
        "case": case,
        "level": step.level,
        "dtype": step.dtype,
        "vocab": step.vocab,
        "errors": errors,
        "failure": failure,
    }


def error_kind(name: str, dtype: str) -> str:
    """Return the key of `LIMITS` for a result: the dtype for a gradient ("d_..."), else "value"."""
    return dtype if name.startswith("d_") else "value"


# ---- the inputs of a case


@dataclass
class CaseInputs:
    """The inputs of one case, on the CPU.

    leaves           [logits] or [hidden states, head], in the dtype of the check. Masked rows are
                     NaN.
    loss_arguments   keyword arguments of `grpo_loss` or `linear_grpo_loss`
    expects_eager    whether the case is compared with the eager backend
    """

    leaves: list[Tensor]
    batch: TokenBatch
    objective: Objective
    loss_arguments: dict[str, Any]
    expects_eager: bool


def make_case(case: str, step: Step) -> CaseInputs:
    """Make random inputs of a case. The advantage of the first token is 0.

    case   a key of `CASES`
    step   the size, the dtype and the level: "logits" or "hidden"

    In cases that are compared with the eager backend, sequences have 4 tokens, and the last one is
    masked. Candidate sets hold only the target, the target and some more ids, or nothing.
    """
    leaves, batch = make_inputs(step, CPU)
    assert batch.advantages is not None
    batch.advantages[0] = 0.0
    old_logps: Any = batch.old_logps
    preset_arguments = dict(CASES[case])
    has_candidate_sets = preset_arguments.pop("kept", False)
    temperature = 1.0 if case == BASIC_CASES[0] else 0.9
    loss_arguments = dict[str, Any](transform=LogitTransform(temperature))
    batch = replace(batch, ref_logps=old_logps - 0.2)
    if case in COMPARED_WITH_EAGER:
        masked = torch.arange(step.rows) % 4 == 3
        batch = replace(
            batch,
            mask=~masked,
            cu_seqlens=torch.arange(0, step.rows + 1, 4),
            old_logps=old_logps.masked_fill(masked, torch.nan),
        )
        leaves[0] = leaves[0].masked_fill(masked[:, None], torch.nan)
    if has_candidate_sets:
        # The old log-probs are over the whole vocabulary, not over these sets.
        batch = replace(batch, kept=make_candidate_sets(batch.targets, step.vocab), old_logps=None)
    if "kl" in preset_arguments:
        batch = replace(batch, ref_logps=None)
        loss_arguments["ref_logits"] = leaves[0].float().roll(1, -1)
    objective = Objective.preset("dapo", **preset_arguments)
    return CaseInputs(leaves, batch, objective, loss_arguments, case in COMPARED_WITH_EAGER)


def make_candidate_sets(targets: Tensor, vocab: int) -> TokenSets:
    """Return sets of 0, 1 or 20 ids in turn, one for each target.

    A set that is not empty contains its target. An empty set stands for the whole vocabulary.

    targets   int64 [rows]
    vocab     number of ids
    """
    sizes = (0, 1, 20)
    sets = []
    for row, target in enumerate(targets.tolist()):
        size = sizes[row % len(sizes)]
        sets.append(sorted((target + 7 * k) % vocab for k in range(size)))
    return TokenSets.from_lists(sets)


# ---- expected results, and those of a backend


def plain_results(inputs: CaseInputs) -> dict[str, Tensor]:
    """Compute loss, log-probs, entropy and gradients of a case in plain PyTorch in float64.

    inputs   the inputs of the case

    Returns {"loss", "logps", "entropy", "d_logits"}, or "d_hidden" and "d_weight" in place of the
    last, the gradients of the loss.

    The loss is the mean over tokens of clipped_loss + beta * kl - entropy_coef * entropy. kl is the
    exact divergence if the objective has one, else the estimator k3 = exp(d) - d - 1 for
    d = ref_logp - logp.
    """
    leaves = [x.double().requires_grad_() for x in inputs.leaves]
    batch: Any = inputs.batch
    objective = inputs.objective
    temperature = inputs.loss_arguments["transform"].temperature
    all_logps = torch.log_softmax(plain_logits(leaves) / temperature, -1)
    logps = all_logps.gather(-1, batch.targets[:, None])[:, 0]
    entropy = -(all_logps.exp() * all_logps).sum(-1)
    if objective.exact is not None:
        ref_logits = inputs.loss_arguments["ref_logits"].double()
        all_ref_logps = torch.log_softmax(ref_logits / temperature, -1)
        kl = plain_divergence(all_logps, all_ref_logps, objective.exact.direction)
    else:
        difference = batch.ref_logps - logps
        kl = difference.exp() - difference - 1.0
    losses = clipped_loss(logps, batch.old_logps, batch.advantages) + objective.beta * kl
    loss = (losses - objective.entropy_coef * entropy).mean()
    return with_gradients(leaves, loss=loss, logps=logps, entropy=entropy)


def plain_divergence(p: Tensor, q: Tensor, direction: str) -> Tensor:
    """Return the divergence of each row, float64 [rows].

    p, q        float64 [rows, vocab]: log-probs of the policy and of the reference
    direction   "reverse": KL(p || q). "forward": KL(q || p). "jsd": the mean of KL(p || m) and
                KL(q || m) for m = (p + q) / 2. "tv": half the sum of |p - q|.
    """

    def kl(a: Tensor, b: Tensor) -> Tensor:
        """Return KL(a || b) of each row from log-probs [rows, vocab]."""
        return (a.exp() * (a - b)).sum(-1)

    if direction == "reverse":
        return kl(p, q)
    if direction == "forward":
        return kl(q, p)
    if direction == "tv":
        return (p.exp() - q.exp()).abs().sum(-1) / 2
    assert direction == "jsd", direction
    mixture = p.logaddexp(q) - math.log(2.0)
    return (kl(p, mixture) + kl(q, mixture)) / 2


def backend_results(
    inputs: CaseInputs, backend: str, device: torch.device, dtype: str
) -> dict[str, Tensor]:
    """Compute loss, log-probs, entropy and gradients of a case with a backend.

    inputs    the inputs of the case, on the CPU
    backend   "eager", "cpu" or "triton"
    device    where it runs
    dtype     dtype of logits or of hidden states and head, a name of torch

    Returns {"loss", "logps", "entropy", "d_logits"}, or "d_hidden" and "d_weight" in place of the
    last, as float64 on the CPU.
    """
    leaves = [
        x.to(device, getattr(torch, dtype), copy=True).requires_grad_() for x in inputs.leaves
    ]
    arguments = {
        name: x.to(device) if isinstance(x, Tensor) else x
        for name, x in inputs.loss_arguments.items()
    }
    loss_function: Any = grpo_loss if len(leaves) == 1 else linear_grpo_loss
    # strict: a fallback to the eager backend raises. Otherwise eager would be tested instead.
    with use(backend=backend, strict=True):
        out = loss_function(*leaves, inputs.batch.to(device), inputs.objective, **arguments)
        return with_gradients(leaves, loss=out.loss, logps=out.logps, entropy=out.entropy)


def with_gradients(leaves: list[Tensor], **values: Tensor) -> dict[str, Tensor]:
    """Return the values and the gradients of values["loss"], as float64 on the CPU.

    leaves   [logits], whose gradient is named "d_logits", or [hidden states, head], whose gradients
             are named "d_hidden" and "d_weight"
    values   tensors by name
    """
    names = ("d_logits",) if len(leaves) == 1 else ("d_hidden", "d_weight")
    gradients = torch.autograd.grad(values["loss"], leaves)
    results = values | dict(zip(names, gradients, strict=True))
    return {name: x.detach().double().cpu() for name, x in results.items()}


# ---- errors


def largest_errors(
    inputs: CaseInputs, backend: str, device: torch.device, dtype: str
) -> dict[str, float]:
    """Return the largest error of each result of a backend, by name.

    inputs    the inputs of a case
    backend   the backend that is tested
    device    where it runs
    dtype     dtype of logits or of hidden states and head, a name of torch

    Expected are the results of plain PyTorch in float64, or of the eager backend in fp32 with
    torch's matmuls.
    """
    results = backend_results(inputs, backend, device, dtype)
    if inputs.expects_eager:
        with cpu_matmuls.using("torch"):
            expected = backend_results(inputs, "eager", CPU, "float32")
    else:
        expected = plain_results(inputs)
    return {name: largest_error(name, results[name], expected[name]) for name in expected}


def largest_error(name: str, result: Tensor, expected: Tensor) -> float:
    """Return the largest absolute error of a value, or the largest relative error of a gradient.

    name               "loss", "logps" or "entropy" for a value, "d_logits", "d_hidden" or
                       "d_weight" for a gradient
    result, expected   float64, of one shape; gradients are [rows, columns]
    """
    error = (result - expected).abs()
    if not name.startswith("d_"):
        return float(error.max())
    largest = expected.abs().max()
    if name == "d_weight":
        return float((error / largest).max())
    # Errors are relative to the largest entry of the same row, so that a missing row shows.
    # Rows below 1 % of the largest entry, such as rows of zeros, are compared with that entry.
    row_largest = expected.abs().amax(-1)
    scale = torch.where(row_largest > 1e-2 * largest, row_largest, largest)
    return float((error.amax(-1) / scale).max())
