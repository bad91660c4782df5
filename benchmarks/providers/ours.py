"""grpo_kernels: the whole loss (layer 2, whose forward computes the gradient), differentiable
log-probs and divergences (layer 1) with the loss in PyTorch, and both on the eager backend.
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

#: A function without arguments that is timed. It computes the results of a case.
Call = Callable[[], Result]
OURS = "grpo_kernels"


def native(case: Case) -> str:
    """Return the name of the backend with kernels for the device of a case.

    Raises Unavailable if it cannot run. The backend "auto" is not used, because it would fall back
    to eager PyTorch, whose time would then count as that of the kernels.
    """
    name = NATIVE[case.batch.targets.device.type]
    reason = backends.unavailable(name)
    if reason is not None:
        raise Unavailable(f'backend="{name}" cannot run: {reason}')
    return name


def objective(case: Case) -> Objective:
    """Return the objective of this package that computes the contract of a case.

    For contracts of candidate sets, trees and extra ids this is DAPO's: the batch has the rest.
    """
    contract = case.cell.contract
    if contract in DIRECTIONS:
        return Objective.preset("distillation", kl=Exact(DIRECTIONS[contract]))
    if contract == "vespo":
        return Objective.preset("vespo", aggregate="token-mean")
    if contract in OF_SEQUENCES:
        return Objective.preset("dapo", aggregate="token-mean", level="sequence")
    if contract == "cross-entropy":
        # With advantages of 1 this is the cross-entropy.
        return Objective.preset("reinforce", beta=case.cell.beta)
    return Objective.preset("dapo", beta=case.cell.beta)


def new_batch(case: Case) -> TokenBatch:
    """Return a new TokenBatch with the tensors of the case, made within the timed run.

    A trainer makes a batch in each training step, and the loss counts its rows. A batch caches
    these counts, so a batch that is used again would leave their time out of the measurement.

    For the contract "cross-entropy" the advantages are 1, because the policy gradient loss with
    advantages of 1 is the cross-entropy.
    """
    if case.cell.contract == "cross-entropy":
        return TokenBatch(case.batch.targets, torch.ones_like(case.batch.advantages))
    return replace(case.batch)  # a copy of the same tensors, without the cached counts


def loss_of(
    case: Case,
    inputs: tuple[Tensor, ...],
    spec: Objective,
    batch: TokenBatch,
    **arguments: Any,
) -> Tensor:
    """Return the loss that grpo_loss or linear_grpo_loss computes, a scalar.

    case        gives the teacher's logits, or hidden states and weight, if the contract has one
    inputs      (logits [N, V],) for grpo_loss, or (hidden [N, H], weight [V, H]) for
                linear_grpo_loss
    spec        the objective
    arguments   further arguments of the function that is called
    """
    if len(inputs) == 1:
        if case.ref_logits is not None:
            arguments["ref_logits"] = case.ref_logits
        (logits,) = inputs
        return grpo_loss(logits, batch, spec, **arguments).loss
    if case.ref_hidden is not None:
        arguments["reference"] = (case.ref_hidden, case.ref_weight)
    hidden, weight = inputs
    if batch.rows is None:  # else tokens share rows, and the hidden states stay [rows, H]
        hidden = hidden.view(*batch.targets.shape, -1)
    return linear_grpo_loss(hidden, weight, batch, spec, **arguments).loss


def loss(
    name: str,
    *contracts: str,
    upstream: float = 1.0,
    inplace: bool = False,
    into: bool = False,
    backend: str | None = None,
    spec: Objective | None = None,
    one_by_one: bool = False,
    without_terms: bool = False,
    says_scale: bool = False,
    **fields: Any,
) -> None:
    """Register a provider that calls the whole loss, with these options.

    name            is added to "grpo_kernels"
    upstream        the upstream gradient of the loss. If it is not 1, the gradient is scaled, which
                    takes time. The normalizer is multiplied by it too, so that the results are the
                    same.
    inplace         whether the gradient overwrites the logits
    into            whether the gradient of the weight is added to existing memory, as in trainers
                    that sum it over micro-batches
    backend         None: the backend with kernels
    spec            another objective than that of the contract
    one_by_one      whether each token has its own row, although the tokens of a case share rows
    without_terms   whether terms at extra ids are left out
    says_scale      whether the division by the number of micro-batches is passed as `grad_scale`
    fields          further fields of Provider
    """

    def make(case: Case) -> Call:
        """Return the timed function for a case. The options are the arguments of `loss`."""
        chosen_objective = spec or objective(case)
        chosen_backend = backend or native(case)
        arguments: dict[str, Any] = {}
        if inplace:
            arguments["inplace"] = True
        if upstream != 1:
            arguments["normalizer"] = upstream * case.cell.rows
        if says_scale:
            arguments["grad_scale"] = 1 / case.cell.accumulation

        def call() -> Result:
            """Compute the loss and the gradients of the inputs, see `Case.gradients`."""
            options = Options(
                backend=chosen_backend, weight_grad=case.weight_grad if into else None
            )
            inputs = (case.output(),) if inplace else case.inputs()
            if without_terms:
                batch = case.plain_batch
            elif spec is None:
                batch = new_batch(case)
            else:
                batch = replace(case.batch)
            if one_by_one:
                row_of_token, batch = unpacked(batch)
                hidden, weight = inputs
                inputs = (hidden[row_of_token], weight)
            value = loss_of(case, inputs, chosen_objective, batch, options=options, **arguments)
            return case.gradients(value if upstream == 1 else upstream * value, into)

        return call

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
loss(", without terms", "forms", without_terms=True, differs_from_contract=True)
loss(
    ", in place, without terms",
    "logits-forms",
    inplace=True,
    without_terms=True,
    differs_from_contract=True,
)
loss(", rollouts one by one", "trees", one_by_one=True)
loss(", upstream 0.5", "hidden", "hidden-frozen", upstream=0.5)


def _logps(case: Case, backend: str) -> Logps:
    """Return a function of the inputs of a case that computes log-probs with this package.

    It takes (logits [N, V]) or (hidden [N, H], weight [V, H]). It returns the log-probs [N] of the
    targets, or for the contract "logits-forward" the tuple (log-probs [N], entropy [N]).
    """
    targets = case.batch.targets.view(-1)
    options = Options(backend=backend)
    from_logits = case.hidden is None and case.model is None
    function = token_logprobs if from_logits else linear_logprobs
    if case.cell.contract == "logits-forward":
        return lambda logits: tuple(function(logits, targets, entropy=True, options=options))
    return lambda *inputs: function(*inputs, targets, options=options).logps


@logps_provider(f"{OURS}, layer 1", "logits", "hidden", "hidden-frozen", "cross-entropy")
@logps_provider(OURS, "logits-forward", "hidden-forward")
@logps_provider(f"{OURS}, linear log-probs", "step")
def layer_one(case: Case) -> Logps:
    """Return the log-prob function (see `_logps`) of the backend with kernels for this device."""
    return _logps(case, native(case))


@provider(f"{OURS}, layer 1 + mean", *BETAS)
def layer_one_divergence(case: Case) -> Call:
    """Return a function that computes the mean divergence of a case, and its gradients.

    The package computes the divergence of each row, torch their mean.
    """
    options = Options(backend=native(case))
    divergence = Exact(DIRECTIONS[case.cell.contract])
    reference = (case.ref_hidden, case.ref_weight)

    def call() -> Result:
        divergence_of_rows = linear_divergence(
            case.hidden, case.weight, reference, divergence, options=options
        )
        return case.gradients(divergence_of_rows.mean())

    return call


def _draft_head(metrics: bool) -> Callable[[Case], Call]:
    """Return the function of a provider that computes draft_head_loss, with metrics or without."""

    def make(case: Case) -> Call:
        """Return the timed function for a case. Its results are the loss and "d_hidden" [N, H]."""
        options = Options(backend=native(case))
        shape = (case.cell.sequences, case.cell.length, -1)

        def call() -> Result:
            draft = case.hidden.view(shape)
            policy = case.ref_hidden.view(shape)
            result = draft_head_loss(draft, policy, case.weight, metrics=metrics, options=options)
            return case.gradients(result.loss)

        return call

    return make


provider(OURS, "draft")(_draft_head(metrics=True))
provider(f"{OURS}, without metrics", "draft")(_draft_head(metrics=False))
loss(", eager backend", "logits", "hidden", "hidden-frozen", backend="eager")
logps_provider(f"{OURS}, eager backend", "logits-forward", "hidden-forward")(
    lambda case: _logps(case, "eager")
)
loss(", eager backend, into weight_grad", "kept", into=True, backend="eager")
loss(
    ", the whole DAPO loss",
    "cross-entropy",
    spec=Objective.preset("dapo"),
    differs_from_contract=True,
)
loss(", linear loss", "step")
loss(", logits loss", "step", inplace=True)
