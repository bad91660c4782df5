"""Plain PyTorch: eager with the softmax in fp32, as in trainers; eager in the 16 bits of the operands; and torch.compile of head,
log-softmax and loss together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cases import HALF, Cell, HiddenCase, LogitsCase, Result, StepCase, policy_loss
from benchmarks.providers import provider
from grpo_kernels import TokenBatch

Tensor = torch.Tensor
Call = Callable[[], Result]


def logps_of(logits: Tensor, targets: Tensor, upcast: bool = True) -> Tensor:
    log_p = torch.log_softmax(logits.float() if upcast else logits, -1)
    return log_p.gather(-1, targets[..., None])[..., 0]


def logps_and_entropy(logits: Tensor, targets: Tensor, upcast: bool = True) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.float() if upcast else logits, -1)
    return log_p.gather(-1, targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def loss_of_logits(logits: Tensor, batch: TokenBatch, beta: float, upcast: bool = True) -> Tensor:
    return policy_loss(logps_of(logits, batch.targets, upcast), batch, beta)


def loss_of_hidden(hidden: Tensor, weight: Tensor, batch: TokenBatch, beta: float, upcast: bool = True) -> Tensor:
    return loss_of_logits(hidden @ weight.t(), batch, beta, upcast)


def logps_of_hidden(hidden: Tensor, weight: Tensor, targets: Tensor, upcast: bool = True) -> Tensor:
    return logps_of(hidden @ weight.t(), targets, upcast)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One compiled function for all cases, as in a real program."""
    return torch.compile(function)


def whole_logits(cell: Cell) -> float:
    """Bytes of three fp32 [N, V] tensors: log-probs, their gradient and that of the logits, in the backward."""
    return 12.0 * cell.rows * cell.vocab


@provider("eager PyTorch", "logits")
def eager(case: LogitsCase) -> Call:
    return lambda: case.gradients(loss_of_logits(case.logits, case.batch, case.cell.beta))


@provider("eager PyTorch, 16-bit softmax", "logits", dtypes=HALF)
def eager_half(case: LogitsCase) -> Call:
    return lambda: case.gradients(loss_of_logits(case.logits, case.batch, case.cell.beta, upcast=False))


@provider("torch.compile", "logits")
def compiled_loss(case: LogitsCase) -> Call:
    loss = compiled(loss_of_logits)
    return lambda: case.gradients(loss(case.logits, case.batch, case.cell.beta))


def _forward(case: LogitsCase, function: Callable[..., tuple[Tensor, Tensor]]) -> Call:
    @torch.no_grad()
    def run() -> Result:
        logps, entropy = function(case.logits, case.batch.targets)
        return {"logps": logps, "entropy": entropy}

    return run


@provider("eager PyTorch", "logits-forward")
def forward(case: LogitsCase) -> Call:
    return _forward(case, logps_and_entropy)


@provider("eager PyTorch, 16-bit softmax", "logits-forward", dtypes=HALF)
def forward_half(case: LogitsCase) -> Call:
    return _forward(case, functools.partial(logps_and_entropy, upcast=False))


@provider("torch.compile", "logits-forward")
def compiled_forward(case: LogitsCase) -> Call:
    return _forward(case, compiled(logps_and_entropy))


@provider("eager PyTorch", "hidden", "hidden-frozen", memory=whole_logits)
def head(case: HiddenCase) -> Call:
    return lambda: case.gradients(loss_of_hidden(case.hidden, case.weight, case.batch, case.cell.beta))


@provider("eager PyTorch, 16-bit softmax", "hidden", "hidden-frozen", dtypes=HALF, memory=whole_logits)
def head_half(case: HiddenCase) -> Call:
    return lambda: case.gradients(loss_of_hidden(case.hidden, case.weight, case.batch, case.cell.beta, upcast=False))


@provider("torch.compile", "hidden", "hidden-frozen", memory=whole_logits)
def compiled_head(case: HiddenCase) -> Call:
    loss = compiled(loss_of_hidden)
    return lambda: case.gradients(loss(case.hidden, case.weight, case.batch, case.cell.beta))


def _head_forward(case: HiddenCase, function: Callable[..., Tensor]) -> Call:
    @torch.no_grad()
    def run() -> Result:
        return {"logps": function(case.hidden, case.weight, case.batch.targets)}

    return run


@provider("eager PyTorch", "hidden-forward", memory=whole_logits)
def head_forward(case: HiddenCase) -> Call:
    return _head_forward(case, logps_of_hidden)


@provider("eager PyTorch, 16-bit softmax", "hidden-forward", dtypes=HALF, memory=whole_logits)
def head_forward_half(case: HiddenCase) -> Call:
    return _head_forward(case, functools.partial(logps_of_hidden, upcast=False))


@provider("torch.compile", "hidden-forward", memory=whole_logits)
def compiled_head_forward(case: HiddenCase) -> Call:
    return _head_forward(case, compiled(logps_of_hidden))


@provider("eager PyTorch", "step", memory=whole_logits)
def step(case: StepCase) -> Call:
    return lambda: case.step(loss_of_logits(case.logits(), case.batch, case.cell.beta))


@provider("torch.compile", "step", memory=whole_logits)
def compiled_step(case: StepCase) -> Call:
    """Only the loss is compiled: the model's body is the same for all."""
    loss = compiled(loss_of_logits)
    return lambda: case.step(loss(case.logits(), case.batch, case.cell.beta))
