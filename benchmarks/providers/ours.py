"""grpo_kernels: layer 2 (the whole loss, gradient in the forward), layer 1 (differentiable log-probs) with the loss in
torch, and the same on the eager backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.cases import Cell, HiddenCase, LogitsCase, Result, StepCase, policy_loss
from benchmarks.providers import provider
from grpo_kernels import Objective, grpo_loss, linear_grpo_loss, linear_logprobs, token_logprobs

Call = Callable[[], Result]


def objective(cell: Cell) -> Objective:
    return Objective.preset("dapo", beta=cell.beta)


def _fused(case: LogitsCase, **how: object) -> Call:
    wanted = objective(case.cell)
    return lambda: case.gradients(grpo_loss(case.logits, case.batch, wanted, **how).loss)  # type: ignore[arg-type]


@provider("grpo_kernels, in place", "logits")
def in_place(case: LogitsCase) -> Call:
    return _fused(case, inplace=True)


@provider("grpo_kernels, new gradient", "logits")
def new_gradient(case: LogitsCase) -> Call:
    return _fused(case)


@provider("grpo_kernels, layer 1 + loss", "logits")
def layer_one(case: LogitsCase) -> Call:
    return lambda: case.gradients(policy_loss(token_logprobs(case.logits, case.batch.targets)[0], case.batch, case.cell.beta))


@provider("grpo_kernels, eager backend", "logits")
def eager_backend(case: LogitsCase) -> Call:
    return _fused(case, backend="eager")


def _forward(case: LogitsCase, backend: str) -> Call:
    @torch.no_grad()
    def run() -> Result:
        logps, entropy = token_logprobs(case.logits, case.batch.targets, entropy=True, backend=backend)
        return {"logps": logps, "entropy": entropy}

    return run


@provider("grpo_kernels", "logits-forward")
def forward(case: LogitsCase) -> Call:
    return _forward(case, "auto")


@provider("grpo_kernels, eager backend", "logits-forward")
def eager_forward(case: LogitsCase) -> Call:
    return _forward(case, "eager")


def _linear(case: HiddenCase, backend: str) -> Call:
    wanted = objective(case.cell)
    return lambda: case.gradients(linear_grpo_loss(case.hidden, case.weight, case.batch, wanted, backend=backend).loss)


@provider("grpo_kernels", "hidden", "hidden-frozen")
def linear(case: HiddenCase) -> Call:
    return _linear(case, "auto")


@provider("grpo_kernels, layer 1 + loss", "hidden", "hidden-frozen")
def linear_layer_one(case: HiddenCase) -> Call:
    def run() -> Result:
        logps, _ = linear_logprobs(case.hidden, case.weight, case.batch.targets)
        return case.gradients(policy_loss(logps, case.batch, case.cell.beta))

    return run


@provider("grpo_kernels, eager backend", "hidden", "hidden-frozen")
def linear_eager_backend(case: HiddenCase) -> Call:
    return _linear(case, "eager")


def _linear_forward(case: HiddenCase, backend: str) -> Call:
    @torch.no_grad()
    def run() -> Result:
        return {"logps": linear_logprobs(case.hidden, case.weight, case.batch.targets, backend=backend)[0]}

    return run


@provider("grpo_kernels", "hidden-forward")
def linear_forward(case: HiddenCase) -> Call:
    return _linear_forward(case, "auto")


@provider("grpo_kernels, eager backend", "hidden-forward")
def linear_eager_forward(case: HiddenCase) -> Call:
    return _linear_forward(case, "eager")


@provider("grpo_kernels, linear loss", "step")
def step_linear(case: StepCase) -> Call:
    wanted, head = objective(case.cell), case.model.lm_head.weight
    return lambda: case.step(linear_grpo_loss(case.hidden(), head, case.batch, wanted).loss)


@provider("grpo_kernels, linear log-probs + loss", "step")
def step_layer_one(case: StepCase) -> Call:
    def run() -> Result:
        logps, _ = linear_logprobs(case.hidden(), case.model.lm_head.weight, case.batch.targets)
        return case.step(policy_loss(logps, case.batch, case.cell.beta))

    return run


@provider("grpo_kernels, logits loss", "step")
def step_logits(case: StepCase) -> Call:
    wanted = objective(case.cell)
    return lambda: case.step(grpo_loss(case.logits(), case.batch, wanted, inplace=True).loss)
