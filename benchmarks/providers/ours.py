"""grpo_kernels: layer 2 (the whole loss, gradient in the forward), layer 1 (differentiable
log-probs and divergences) with the loss in torch, and the same on the eager backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases import DIRECTIONS, OF_SEQUENCES, Case, Result, Tensor
from benchmarks.machine import NATIVE
from benchmarks.providers import BETAS, Logps, Unavailable, logps_provider, provider
from grpo_kernels import (
    Exact,
    Objective,
    Options,
    TokenBatch,
    draft_head_loss,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    token_logprobs,
)
from grpo_kernels.core import backends
from grpo_kernels.trees import unpacked

Call = Callable[[], Result]
OURS = "grpo_kernels"


def native(case: Case) -> str:
    """The backend of the kernels, by name: with "auto" a fallback to eager PyTorch would be timed
    as if it were the kernels.
    """
    name = NATIVE[case.batch.targets.device.type]
    reason = backends.unavailable(name)
    if reason is not None:
        raise Unavailable(f'backend="{name}" cannot run: {reason}')
    return name


def objective(case: Case) -> Objective:
    if case.cell.contract in DIRECTIONS:
        return Objective.preset("distillation", kl=Exact(DIRECTIONS[case.cell.contract]))
    if case.cell.contract in OF_SEQUENCES:
        level = (
            {"preset": "vespo"}
            if case.cell.contract == "vespo"
            else {"preset": "dapo", "level": "sequence"}
        )
        return Objective.preset(level.pop("preset"), aggregate="token-mean", **level)
    return Objective.preset(
        "reinforce" if case.cell.contract == "cross-entropy" else "dapo", beta=case.cell.beta
    )


def batch_of(case: Case) -> TokenBatch:
    """A batch is made in the timed run, as a trainer makes one per step, so that counting its rows
    is timed as well. With advantages of 1 and no ratio a policy's loss is the cross-entropy.
    """
    if case.cell.contract == "cross-entropy":
        return TokenBatch(case.batch.targets, torch.ones_like(case.batch.advantages))
    return replace(case.batch)


def loss_of(
    case: Case, inputs: tuple[Tensor, ...], spec: Objective, batch: TokenBatch, **how: Any
) -> Tensor:
    if len(inputs) == 1:
        ref = {"ref_logits": case.ref_logits} if case.ref_logits is not None else {}
        return grpo_loss(*inputs, batch, spec, **ref, **how).loss
    reference = (
        {"reference": (case.ref_hidden, case.ref_weight)} if case.ref_hidden is not None else {}
    )
    hidden, weight = inputs
    hidden = hidden if batch.rows is not None else hidden.view(*batch.targets.shape, -1)
    return linear_grpo_loss(hidden, weight, batch, spec, **reference, **how).loss


def loss(
    name: str, *contracts: str, upstream: float = 1.0, inplace: bool = False, into: bool = False, backend: str | None = None,
    spec: Objective | None = None, one_by_one: bool = False, without_terms: bool = False, says_scale: bool = False,
    **fields: Any,
) -> None:  # fmt: skip
    """Registers a way to call the whole loss. An `upstream` gradient other than 1 costs a scaling
    of the gradient; the normalizer is multiplied by it too, so that the result is the same. into:
    the gradient of the weight is added to existing memory, as trainers do that sum it over
    micro-batches. one_by_one: with a row for each token, where tokens share them. without_terms:
    without those at listed ids. says_scale: with what the loss is multiplied by, as grad_scale.
    """

    def make(case: Case) -> Call:
        of, kernels = spec or objective(case), backend or native(case)
        how = {"inplace": True} if inplace else {}
        how |= {"normalizer": upstream * case.cell.rows} if upstream != 1 else {}
        how |= {"grad_scale": 1 / case.cell.accumulation} if says_scale else {}

        def run() -> Result:
            options = Options(backend=kernels, weight_grad=case.weight_grad if into else None)
            inputs = (case.output(),) if inplace else case.inputs()
            batch = (
                case.plain_batch
                if without_terms
                else batch_of(case)
                if spec is None
                else replace(case.batch)
            )
            if one_by_one:
                index, batch = unpacked(batch)
                inputs = (inputs[0][index], *inputs[1:])
            value = loss_of(case, inputs, of, batch, options=options, **how)
            return case.gradients(value if upstream == 1 else upstream * value, into)

        return run

    provider(f"{OURS}{name}", *contracts, needs_accumulation=says_scale, **fields)(make)


loss(", in place", "logits", "logits-divergence", inplace=True)
loss("", "logits-forms")
loss(", new gradient", "logits")
loss(", in place, upstream 0.5", "logits", inplace=True, upstream=0.5)
loss(", new gradient, upstream 0.5", "logits", upstream=0.5)
loss(", in place, grad_scale", "logits", inplace=True, says_scale=True)
loss(", new gradient, grad_scale", "logits", says_scale=True)
loss(", grad_scale", "hidden", says_scale=True)
loss(", into weight_grad", "kept", into=True)
loss(
    "", "hidden", "hidden-frozen", *OF_SEQUENCES, "kept", "cross-entropy", "trees", "forms", *BETAS
)
loss(", without terms", "forms", without_terms=True, beside=True)
loss(", in place, without terms", "logits-forms", inplace=True, without_terms=True, beside=True)
loss(", rollouts one by one", "trees", one_by_one=True)
loss(", upstream 0.5", "hidden", "hidden-frozen", upstream=0.5)


def _logps(case: Case, backend: str) -> Logps:
    function, targets = (
        (token_logprobs if case.hidden is None and case.model is None else linear_logprobs),
        case.batch.targets.view(-1),
    )
    if case.cell.contract == "logits-forward":
        return lambda logits: tuple(
            function(logits, targets, entropy=True, options=Options(backend=backend))
        )
    return lambda *inputs: function(*inputs, targets, options=Options(backend=backend)).logps


@logps_provider(f"{OURS}, layer 1", "logits", "hidden", "hidden-frozen", "cross-entropy")
@logps_provider(OURS, "logits-forward", "hidden-forward")
@logps_provider(f"{OURS}, linear log-probs", "step")
def layer_one(case: Case) -> Logps:
    return _logps(case, native(case))


@provider(f"{OURS}, layer 1 + mean", *BETAS)
def layer_one_divergence(case: Case) -> Call:
    options, exact = Options(backend=native(case)), Exact(DIRECTIONS[case.cell.contract])
    reference = (case.ref_hidden, case.ref_weight)
    return lambda: case.gradients(
        linear_divergence(case.hidden, case.weight, reference, exact, options=options).mean()
    )


def _draft_head(metrics: bool) -> Callable[[Case], Call]:
    def make(case: Case) -> Call:
        options, shape = Options(backend=native(case)), (case.cell.sequences, case.cell.length, -1)

        def run() -> Result:
            draft, policy = case.hidden.view(shape), case.ref_hidden.view(shape)
            out = draft_head_loss(draft, policy, case.weight, metrics=metrics, options=options)
            return case.gradients(out.loss)

        return run

    return make


provider(OURS, "draft")(_draft_head(metrics=True))
provider(f"{OURS}, without metrics", "draft")(_draft_head(metrics=False))
loss(", eager backend", "logits", "hidden", "hidden-frozen", backend="eager")
logps_provider(f"{OURS}, eager backend", "logits-forward", "hidden-forward")(
    lambda case: _logps(case, "eager")
)
loss(", eager backend, into weight_grad", "kept", into=True, backend="eager")
loss(", the whole DAPO loss", "cross-entropy", spec=Objective.preset("dapo"), beside=True)
loss(", linear loss", "step")
loss(", logits loss", "step", inplace=True)
