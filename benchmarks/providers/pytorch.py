"""Plain PyTorch: eager with the softmax in fp32, as in trainers; eager in the 16 bits of the
operands; torch.compile of head, log-softmax and loss together; and torch's own linear_cross_entropy
(torch 2.13 and later) with its options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import (
    DIRECTIONS,
    HALF,
    OF_SEQUENCES,
    Case,
    Cell,
    Result,
    mean_divergence,
    policy_loss,
)
from benchmarks.providers import BETAS, Logps, Unavailable, logps_provider, provider
from grpo_kernels import TokenBatch

Call = Callable[[], Result]


def whole_logits(cell: Cell) -> float:
    """Bytes of three fp32 [N, V] tensors:

    log-probs, their gradient and that of the logits, in the backward.
    """
    return 12.0 * cell.rows * cell.vocab


def logps_of(*inputs: Tensor, targets: Tensor, upcast: bool = True, entropy: bool = False) -> Any:
    """Log-probs of logits, or of hidden states and a weight; and the entropy, if asked for."""
    logits = inputs[0] if len(inputs) == 1 else inputs[0] @ inputs[1].t()
    log_p = torch.log_softmax(logits.float() if upcast else logits, -1)
    logps = log_p.gather(-1, targets[..., None])[..., 0]
    return (logps, -(log_p.exp() * log_p).sum(-1)) if entropy else logps


def loss_of(*inputs: Tensor, batch: TokenBatch, cell: Cell) -> Tensor:
    targets = batch.targets
    return policy_loss(logps_of(*inputs, targets=targets.view(-1)).view(targets.shape), batch, cell)


def _mean(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), targets)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One compiled function for all cases, as in a real program."""
    return torch.compile(function)


def _logps(case: Case, upcast: bool = True, function: Callable[..., Any] = logps_of) -> Logps:
    entropy = case.cell.contract == "logits-forward"
    return lambda *inputs: function(
        *inputs, targets=case.batch.targets.view(-1), upcast=upcast, entropy=entropy
    )


LOSSES, FORWARD = (
    ("logits", "hidden", "hidden-frozen", *OF_SEQUENCES),
    ("logits-forward", "hidden-forward"),
)


@logps_provider("eager PyTorch", *LOSSES, *FORWARD, "step", suffix="", memory=whole_logits)
def eager(case: Case) -> Logps:
    return _logps(case)


@logps_provider(
    "eager PyTorch, 16-bit softmax", *LOSSES, *FORWARD, suffix="", dtypes=HALF, memory=whole_logits
)
def eager_half(case: Case) -> Logps:
    return _logps(case, upcast=False)


@logps_provider("torch.compile", *FORWARD, memory=whole_logits)
def compiled_forward(case: Case) -> Logps:
    return _logps(case, function=compiled(logps_of))


@provider("torch.compile", *LOSSES, "step", memory=whole_logits)
def compiled_loss(case: Case) -> Call:
    loss = compiled(loss_of)
    return lambda: case.gradients(loss(*case.inputs(), batch=case.batch, cell=case.cell))


# ---- cross-entropies

#: Arguments of LinearCrossEntropyOptions by name. None: no options, all logits at a time. Sums are
#: fp32, as with "auto".
OPTIONS: dict[str, dict[str, Any] | None] = {
    "": None,
    "auto": {},
    "accurate": {"acc_policy": "accurate"},
    "compact": {"acc_policy": "compact"},
    "chunks of 256 rows": {"batch_chunk_size": 256},
}


def _function(how: dict[str, Any] | None, case: Case) -> Callable[..., Tensor]:
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy, 2.13 has")
    if how is None:
        return function
    sums = {"acc_dtype": torch.float32} if case.cell.dtype in HALF else {}
    options = torch.nn.LinearCrossEntropyOptions(**how, **sums)
    return lambda *tensors, **kwargs: function(*tensors, options=options, **kwargs)


def _cross_entropy(case: Case, function: Callable[..., Tensor]) -> Call:
    return lambda: case.gradients(function(case.hidden, case.weight, case.batch.targets))


def _register(name: str, how: dict[str, Any] | None) -> None:
    label, memory = (
        f"torch linear_cross_entropy{name and ', ' + name}",
        whole_logits if how is None else None,
    )
    provider(label, "cross-entropy", memory=memory)(
        lambda case: _cross_entropy(case, _function(how, case))
    )

    def logps(case: Case) -> Logps:
        function = _function(how, case)
        return lambda *inputs: -function(*inputs, case.batch.targets, reduction="none")

    if name in ("", "auto"):
        # In chunks it takes minutes on a CPU with reduction="none" and 16 bits.
        logps_provider(
            label,
            "hidden",
            *OF_SEQUENCES,
            memory=memory,
            devices=("cpu", "cuda") if how is None else ("cuda",),
        )(logps)


provider("eager PyTorch", "cross-entropy", memory=whole_logits)(
    lambda case: _cross_entropy(case, _mean)
)
provider("torch.compile", "cross-entropy", memory=whole_logits)(
    lambda case: _cross_entropy(case, compiled(_mean))
)
for _name, _how in OPTIONS.items():
    _register(_name, _how)


# ---- divergences


def _teacher(case: Case, function: Callable[..., Tensor]) -> Call:
    direction = DIRECTIONS[case.cell.contract]

    def run() -> Result:
        if case.hidden is None:
            return case.gradients(function(direction, case.logits.float(), case.ref_logits.float()))
        with torch.no_grad():
            w = (case.ref_hidden @ case.ref_weight.t()).float()
        return case.gradients(function(direction, (case.hidden @ case.weight.t()).float(), w))

    return run


_two = {"memory": lambda cell: 30.0 * cell.rows * cell.vocab}
provider("eager PyTorch", *BETAS, "logits-divergence", **_two)(
    lambda case: _teacher(case, mean_divergence)
)
provider("torch.compile", *BETAS, "logits-divergence", **_two)(
    lambda case: _teacher(case, torch.compile(mean_divergence))
)


# ---- draft heads


def soft_cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean cross-entropy of fp32 logits [n, V] with the teacher's distribution at these rows."""
    return -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1).mean()


def _draft(case: Case, function: Callable[..., Tensor]) -> Call:
    """With logits of all positions on both sides, in the form of trainers: the head in the dtype of
    the operands, the teacher one position later.
    """
    shape = (case.cell.sequences, case.cell.length, -1)

    def run() -> Result:
        student = (case.hidden @ case.weight.t()).view(shape)[:, :-1]
        with torch.no_grad():
            teacher = (case.ref_hidden @ case.weight.t()).view(shape)[:, 1:]
        return case.gradients(function(student.float(), teacher.float()))

    return run


provider("eager PyTorch", "draft", **_two)(lambda case: _draft(case, soft_cross_entropy))
provider("torch.compile", "draft", **_two)(lambda case: _draft(case, compiled(soft_cross_entropy)))


# ---- kept sets


@provider("eager PyTorch, masked logits", "kept", memory=lambda cell: 13.0 * cell.rows * cell.vocab)
def masked(case: Case) -> Call:
    """The whole product, with -inf outside the sets, as in trainers that replay them."""
    outside = ~case.batch.kept.mask(case.cell.vocab)

    def run() -> Result:
        logits = (case.hidden @ case.weight.t()).float().masked_fill(outside, -torch.inf)
        chosen = logits.gather(1, case.batch.targets[:, None])[:, 0]
        return case.gradients(
            policy_loss(chosen - logits.logsumexp(1), case.plain_batch, case.cell)
        )

    return run


@provider("pairs in PyTorch, autograd", "kept")
def pairs(case: Case) -> Call:
    """Gathered and padded pairs of a row and an id, as in SkyRL's replay head: dot products in the
    dtype of the operands, and the gradient of the weight by index_add into new memory.
    """
    padded = case.batch.kept.padded(0).long()
    used = torch.arange(padded.shape[1], device=padded.device) < case.batch.kept.counts[:, None]
    target = ((padded == case.batch.targets[:, None]) & used).to(torch.int64).argmax(1)
    single = case.batch.kept.counts == 1

    def run() -> Result:
        several = (~single).nonzero()[:, 0]
        ids, inside = padded[several], used[several]
        row, _ = inside.nonzero(as_tuple=True)
        dots = (case.hidden[several][row] * case.weight[ids[inside]]).sum(1).float()
        z = torch.full(ids.shape, -torch.inf, device=dots.device).masked_scatter(inside, dots)
        log_probs = z.gather(1, target[several, None])[:, 0] - z.logsumexp(1)
        logps = torch.zeros(case.cell.rows, device=dots.device).index_put((several,), log_probs)
        return case.gradients(policy_loss(logps, case.plain_batch, case.cell))

    return run
