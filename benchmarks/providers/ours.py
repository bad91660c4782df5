"""grpo_kernels: layer 2 (the whole loss, gradient in the forward), layer 1 (differentiable log-probs) with the loss in
torch, and the same on the eager backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.cases import Case, Cell, HiddenCase, LogitsCase, Result, StepCase, policy_loss
from benchmarks.kept_cases import KeptCase
from benchmarks.machine import NATIVE
from benchmarks.providers import Unavailable, provider
from grpo_kernels import Objective, TokenBatch, grpo_loss, linear_grpo_loss, linear_logprobs, token_logprobs
from grpo_kernels.rows import backends

Call = Callable[[], Result]


def native(case: Case | KeptCase) -> str:
    """The backend of the kernels, by name: with "auto" a fallback to eager PyTorch would be timed as if it were the
    kernels."""
    name = NATIVE[case.batch.targets.device.type]
    reason = backends.unavailable(name)
    if reason is not None:
        raise Unavailable(f'backend="{name}" cannot run: {reason}')
    return name


def objective(cell: Cell) -> Objective:
    return Objective.preset("dapo", beta=cell.beta)


def _fused(case: LogitsCase, backend: str, inplace: bool = False, upstream: float = 1.0) -> Call:
    """The batch is made in the timed run, as a trainer makes one per step, so that counting its rows is timed as well. An
    `upstream` gradient other than 1 costs a scaling of the gradient; the normalizer is multiplied by it too, so that the
    result is the same."""
    spec = objective(case.cell)
    normalizer = None if upstream == 1 else upstream * case.cell.rows

    def run() -> Result:
        batch = replace(case.batch)
        logits = case.output() if inplace else case.logits
        loss = grpo_loss(logits, batch, spec, normalizer=normalizer, inplace=inplace, backend=backend).loss
        return case.gradients(loss if upstream == 1 else upstream * loss)

    return run


@provider("grpo_kernels, in place", "logits")
def in_place(case: LogitsCase) -> Call:
    return _fused(case, native(case), inplace=True)


@provider("grpo_kernels, new gradient", "logits")
def new_gradient(case: LogitsCase) -> Call:
    return _fused(case, native(case))


@provider("grpo_kernels, in place, upstream 0.5", "logits")
def in_place_scaled(case: LogitsCase) -> Call:
    return _fused(case, native(case), inplace=True, upstream=0.5)


@provider("grpo_kernels, new gradient, upstream 0.5", "logits")
def new_gradient_scaled(case: LogitsCase) -> Call:
    return _fused(case, native(case), upstream=0.5)


@provider("grpo_kernels, layer 1 + loss", "logits")
def layer_one(case: LogitsCase) -> Call:
    backend = native(case)

    def run() -> Result:
        logps, _ = token_logprobs(case.logits, case.batch.targets, backend=backend)
        return case.gradients(policy_loss(logps, case.batch, case.cell.beta))

    return run


@provider("grpo_kernels, eager backend", "logits")
def eager_backend(case: LogitsCase) -> Call:
    return _fused(case, "eager")


def _forward(case: LogitsCase, backend: str) -> Call:
    @torch.no_grad()
    def run() -> Result:
        logps, entropy = token_logprobs(case.logits, case.batch.targets, entropy=True, backend=backend)
        return {"logps": logps, "entropy": entropy}

    return run


@provider("grpo_kernels", "logits-forward")
def forward(case: LogitsCase) -> Call:
    return _forward(case, native(case))


@provider("grpo_kernels, eager backend", "logits-forward")
def eager_forward(case: LogitsCase) -> Call:
    return _forward(case, "eager")


def _linear(case: HiddenCase, backend: str, upstream: float = 1.0) -> Call:
    spec = objective(case.cell)
    normalizer = None if upstream == 1 else upstream * case.cell.rows

    def run() -> Result:
        batch = replace(case.batch)
        loss = linear_grpo_loss(case.hidden, case.weight, batch, spec, normalizer=normalizer, backend=backend).loss
        return case.gradients(loss if upstream == 1 else upstream * loss)

    return run


@provider("grpo_kernels", "hidden", "hidden-frozen", "sparse")
def linear(case: HiddenCase) -> Call:
    return _linear(case, native(case))


@provider("grpo_kernels, upstream 0.5", "hidden", "hidden-frozen")
def linear_scaled(case: HiddenCase) -> Call:
    return _linear(case, native(case), upstream=0.5)


@provider("grpo_kernels, layer 1 + loss", "hidden", "hidden-frozen")
def linear_layer_one(case: HiddenCase) -> Call:
    backend = native(case)

    def run() -> Result:
        logps, _ = linear_logprobs(case.hidden, case.weight, case.batch.targets, backend=backend)
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
    return _linear_forward(case, native(case))


@provider("grpo_kernels, eager backend", "hidden-forward")
def linear_eager_forward(case: HiddenCase) -> Call:
    return _linear_forward(case, "eager")


@provider("grpo_kernels", "cross-entropy")
def cross_entropy(case: HiddenCase) -> Call:
    """The gradient is made in the forward: with advantages of 1 and no ratio a policy's loss is the cross-entropy."""
    spec, backend = Objective.preset("reinforce"), native(case)

    def run() -> Result:
        batch = TokenBatch(case.batch.targets, torch.ones_like(case.batch.advantages))
        return case.gradients(linear_grpo_loss(case.hidden, case.weight, batch, spec, backend=backend).loss)

    return run


@provider("grpo_kernels, layer 1", "cross-entropy")
def cross_entropy_of_logps(case: HiddenCase) -> Call:
    backend = native(case)
    return lambda: case.gradients(-linear_logprobs(case.hidden, case.weight, case.batch.targets, backend=backend)[0].mean())


@provider("grpo_kernels, the whole DAPO loss", "cross-entropy", beside=True)
def whole_loss(case: HiddenCase) -> Call:
    return _linear(case, native(case))


@provider("grpo_kernels, linear loss", "step")
def step_linear(case: StepCase) -> Call:
    spec, head, backend = objective(case.cell), case.model.lm_head.weight, native(case)
    return lambda: case.step(linear_grpo_loss(case.hidden(), head, replace(case.batch), spec, backend=backend).loss)


@provider("grpo_kernels, linear log-probs + loss", "step")
def step_layer_one(case: StepCase) -> Call:
    backend = native(case)

    def run() -> Result:
        logps, _ = linear_logprobs(case.hidden(), case.model.lm_head.weight, case.batch.targets, backend=backend)
        return case.step(policy_loss(logps, case.batch, case.cell.beta))

    return run


@provider("grpo_kernels, logits loss", "step")
def step_logits(case: StepCase) -> Call:
    spec, backend = objective(case.cell), native(case)
    return lambda: case.step(grpo_loss(case.logits(), replace(case.batch), spec, inplace=True, backend=backend).loss)
