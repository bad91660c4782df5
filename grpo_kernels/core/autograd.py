"""The autograd functions.

    RowStatistics       log-probs, entropy, ... of rows; the backward computes the gradient
    LossWithGradients   a loss whose gradients were computed together with its value
    LossOfStatistics    a loss of log-probs and other statistics with known gradients

All of them refuse second derivatives and keep version counters of what their backward reads again.
Under torch.func, losses are `LossOfStatistics` of `RowStatistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..checks import versions_of
from .backends import Backend
from .loss_formulas import sum_losses
from .memory import converted, zeros
from .softmax import DIFFERENTIABLE, SoftmaxSums
from .vocab_parallel import VocabShard

NO_SECOND_DERIVATIVE = (
    "grpo_kernels has no second derivatives: the gradient of these functions cannot be"
    " differentiated again."
)
SECOND_BACKWARD = (
    "the gradient of this loss was already handed over by an earlier backward. It exists once, to "
    "save memory: compute the loss again, or use token_logprobs (linear_logprobs) with your own "
    "loss, for a second backward."
)
LOGITS_OVERWRITTEN = (
    "the logits' memory holds the gradient of grpo_loss(inplace=True), and was written to before "
    "the backward. Call backward first, or pass inplace=False."
)
INPUT_OVERWRITTEN = (
    "a tensor that the backward reads again was written to between forward and backward: the "
    "reference's logits, hidden states or head, targets, mask or temperatures. Call backward "
    "first, or pass a copy."
)
WEIGHT_MISSING = (
    "weight is gone before the backward, which computes the logits again: keep it gathered until "
    "after it (ZeRO-3: deepspeed.zero.GatheredParameters around both; FSDP: "
    "reshard_after_forward=False). docs/functions.md says which losses make their gradient in the "
    "forward."
)


# ---- calling autograd functions


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return function.apply(*arguments), without overhead that only torch.func needs."""
    if torch.compiler.is_compiling():
        # torch.compile knows autograd functions with gradients only.
        if not any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            return function.forward(*arguments)
        return function.apply(*arguments)
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    # `apply` of the base class skips what only torch.func needs, which takes longer than a small
    # batch.
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


class ConstantForAutograd(torch.autograd.Function):
    """Call function(*arguments), and refuse to differentiate its results.

    torch.func records every operation of a backward. It records this one, whose own backward raises
    RuntimeError.
    """

    @staticmethod
    def forward(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def differentiate_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments) in the backward of an autograd function.

    Raises RuntimeError if the result could be differentiated again, because autograd would take
    the gradient for a constant.
    """
    if torch.compiler.is_compiling():
        return function(*arguments)
    # torch.func.vjp calls the backward after its level has ended. Wrappers of that level have no
    # memory then.
    live = [
        torch._C._functorch.unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in arguments
    ]
    if not torch.is_grad_enabled():
        return function(*live)
    was_wrapped = any(x is not y for x, y in zip(live, arguments, strict=True))
    if was_wrapped or torch._C._are_functorch_transforms_active():
        # torch.func always records the backward. Only a second derivative is refused.
        return ConstantForAutograd.apply(function, *live)
    raise RuntimeError(f"{NO_SECOND_DERIVATIVE} Call backward without create_graph=True.")


# ---- statistics of rows


class StatisticsPass(Protocol):
    """Computes the softmax sums of rows from the tensors of their source, and the gradients.

    mask   bool [num_rows]: rows to process, None for all
    """

    mask: Tensor | None

    def compute(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the values of the softmax sums, fp32 [num_sums, num_rows], and what else the
        backward needs."""

    def as_sums(self, values: Tensor) -> SoftmaxSums:
        """Return the values of the softmax sums with their names."""

    def gradients(
        self,
        tensors: Sequence[Tensor | None],
        computed: Sequence[Tensor],
        grads: dict[str, Tensor],
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors from d loss / d statistic, fp32 [num_rows]."""

    def tensors_read_again(self) -> list[Tensor | None]:
        """Return the tensors beside those of the source that the backward reads."""


@dataclass(frozen=True)
class RequestedStatistics:
    """Statistics by name, in addition to the log-probs.

    names      some of `softmax.STATISTICS`
    detached   those of them that get no gradient, in addition to those that have none
    """

    names: tuple[str, ...] = ()
    detached: tuple[str, ...] = ()

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all results."""
        return ("logps", *self.names)

    def has_gradient(self, name: str) -> bool:
        """Return whether a statistic is differentiable."""
        return name == "logps" or (name in DIFFERENTIABLE and name not in self.detached)


class RowStatistics(torch.autograd.Function):
    """Statistics of rows, differentiable in the tensors of their source.

    Inputs are the pass over the rows, the requested statistics and the tensors. Outputs are the
    log-probs, the requested statistics, and the softmax sums and other tensors that the backward
    needs.
    """

    @staticmethod
    def forward(
        row_pass: StatisticsPass, requested: RequestedStatistics, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        computed = row_pass.compute(tensors)
        sums = row_pass.as_sums(computed[0])
        return (*sums.statistics(requested.names, row_pass.mask), *computed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save the pass, what it computed and the tensors, and mark results without gradient."""
        row_pass, requested, *tensors = inputs
        num_results = len(requested.all_names)
        results = dict(zip(requested.all_names, output[:num_results], strict=True))
        computed = output[num_results:]
        constants = [x for name, x in results.items() if not requested.has_gradient(name)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*computed, *constants)
        ctx.row_pass = row_pass
        ctx.requested = requested
        ctx.num_computed = len(computed)
        ctx.versions = versions_of(row_pass.tensors_read_again())
        ctx.save_for_backward(*computed, *tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs of `forward`: None, None, and those of the tensors.

        upstream   d loss / d output [num_rows] of each output of `forward`, None if there is none

        Raises RuntimeError if a tensor that the backward reads again was written to.
        """
        row_pass = ctx.row_pass
        names = ctx.requested.all_names
        grads = {
            name: grad
            for name, grad in zip(names, upstream, strict=False)
            if grad is not None and ctx.requested.has_gradient(name)
        }
        if not grads:
            return (None,) * len(ctx.needs_input_grad)
        if versions_of(row_pass.tensors_read_again()) != ctx.versions:
            raise RuntimeError(INPUT_OVERWRITTEN)
        num_computed = ctx.num_computed
        wanted = ctx.needs_input_grad[2:]

        def compute_gradients(*arguments: Tensor) -> tuple[Tensor | None, ...]:
            """Return the gradients of the tensors from (*upstream gradients, *saved tensors)."""
            grads_by_name = dict(zip(grads, arguments, strict=False))
            saved = arguments[len(grads) :]
            computed = saved[:num_computed]
            tensors = saved[num_computed:]
            return row_pass.gradients(tensors, computed, grads_by_name, wanted)

        gradients = differentiate_once(compute_gradients, *grads.values(), *ctx.saved_tensors)
        return None, None, *gradients


def row_statistics(
    row_pass: StatisticsPass, requested: RequestedStatistics, tensors: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """Return log-probs and the requested statistics by name, fp32 [num_rows] each.

    They are differentiable in the tensors. Without autograd they are computed without a node.

    row_pass   computes the softmax sums of the rows, and the gradients
    tensors    those of the source of the rows: logits, or hidden states, weight and bias
    """
    needs_graph = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in tensors
    )
    is_transformed = torch._C._are_functorch_transforms_active()
    has_forward_mode = torch.autograd.forward_ad._current_level >= 0
    if needs_graph or is_transformed or (has_forward_mode and not torch.compiler.is_compiling()):
        results = apply_function(RowStatistics, row_pass, requested, *tensors)
    else:
        with torch.no_grad():
            results = RowStatistics.forward(row_pass, requested, *tensors)
    return dict(zip(requested.all_names, results, strict=False))


# ---- the gradient of a weight in memory of the caller


@dataclass(frozen=True, eq=False)
class WeightGradMemory:
    """Memory of the caller that the gradient of the weight is added to (`Options.weight_grad`).

    total            [V, H], fp32 or the dtype of the weight
    flagged_weight   the weight whose `grad_added_to_main_grad` is set, as Megatron's own layers do
                     if `total` is its main_grad; else None
    """

    total: Tensor
    flagged_weight: Tensor | None

    @property
    def fp32_total(self) -> Tensor | None:
        """`total` if blocks may be added to it one by one, None if each sum would be rounded."""
        return self.total if self.total.dtype == torch.float32 else None

    def add(self, gradient: Tensor | None) -> Tensor | None:
        """Add a gradient, unless it is the total itself, and return what autograd gets.

        Megatron's hook expects a gradient, which it drops, or with `zero_out_wgrad` (an embedding
        shares the weight) adds to main_grad.
        """
        if gradient is not None and gradient is not self.total:
            self.total.add_(gradient)
        weight: Any = self.flagged_weight
        if weight is None:
            return None
        weight.grad_added_to_main_grad = True
        if getattr(weight, "zero_out_wgrad", False):
            return zeros(weight.shape, weight.dtype, weight.device)
        return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


def check_weight_is_present(weight: Tensor, shard: VocabShard | None) -> None:
    """Raise RuntimeError if the weight was freed after the forward."""
    is_empty = weight.untyped_storage().nbytes() == 0
    if weight.numel() == 0:
        is_empty = shard is None  # a rank of a shard may have no part of the vocabulary
    if is_empty:
        raise RuntimeError(WEIGHT_MISSING)


class SumGradientOverRanks(torch.autograd.Function):
    """Identity in the forward; sums the gradient over the ranks of a shard in the backward.

    This is Megatron-LM's copy_to_tensor_model_parallel_region (arXiv 1909.08053, section 3).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad_hidden: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.sum_over_ranks(grad_hidden.contiguous()), None


# ---- losses whose gradient is computed in the forward


class PrecomputedGradients:
    """Gradients of a loss that were computed in its forward, handed over once by its backward.

    kernels         scale the gradients in place
    gradients       one for each input, None where it is not needed
    dtypes          the dtype in which each gradient is handed over
    weight_memory   memory that gradients[1], that of the weight, is added to, or None
    """

    def __init__(
        self,
        kernels: Backend,
        gradients: Sequence[Tensor | None],
        dtypes: Sequence[torch.dtype],
        weight_memory: WeightGradMemory | None = None,
    ) -> None:
        self.kernels = kernels
        self.gradients: list[Tensor | None] | None = list(gradients)
        self.dtypes = dtypes
        self.weight_memory = weight_memory
        self.versions: list[int | None] = []
        self.record_versions()

    def record_versions(self) -> None:
        """Record the state of the gradients, which must not be written to from now on."""
        assert self.gradients is not None
        self.versions = [None if x is None else x._version for x in self.gradients]

    def take(self, grad_loss: Tensor) -> list[Tensor | None]:
        """Return the gradients times grad_loss (0-d).

        Raises RuntimeError at the second call, or if the gradients were overwritten.
        """
        if torch.is_grad_enabled():  # torch.func does not get here
            raise RuntimeError(f"{NO_SECOND_DERIVATIVE} Call backward without create_graph=True.")
        if self.gradients is None:
            raise RuntimeError(SECOND_BACKWARD)
        gradients = self.gradients
        self.gradients = None
        results: list[Tensor | None] = []
        for gradient, version, dtype in zip(gradients, self.versions, self.dtypes, strict=True):
            if gradient is None:
                results.append(None)
                continue
            if gradient._version != version:
                raise RuntimeError(LOGITS_OVERWRITTEN)
            self.kernels.scale_(gradient, grad_loss)
            results.append(converted(gradient, dtype))
        if self.weight_memory is not None:
            results[1] = self.weight_memory.add(results[1])
        return results


class LossWithGradients(torch.autograd.Function):
    """Attach gradients that were computed in the forward to a loss, so that backward returns them.

    The loss is 0-d. The tensors are those that the gradients belong to, in the order of
    `PrecomputedGradients`.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: PrecomputedGradients, *tensors: Tensor | None
    ) -> Tensor:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(loss)  # the same tensor, which now has a gradient
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> tuple[Any, ...]:
        if grad_loss is None:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, *ctx.gradients.take(grad_loss)


# ---- a loss of statistics


class LossOfStatistics(torch.autograd.Function):
    """The sum of losses [num_rows], differentiable in statistics whose gradients are known.

    losses                 fp32 [num_rows]
    values_and_gradients   the statistics, then as many gradients d loss / d statistic; None where
                           the loss does not depend on a statistic
    """

    @staticmethod
    def forward(losses: Tensor, *values_and_gradients: Tensor | None) -> Tensor:
        return sum_losses(losses)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        num_values = (len(inputs) - 1) // 2  # inputs: losses, values, as many gradients
        ctx.save_for_backward(*inputs[1 + num_values :])

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors

        def scale_gradients(
            grad_loss: Tensor, *gradients: Tensor | None
        ) -> tuple[Tensor | None, ...]:
            return tuple(None if x is None else x * grad_loss for x in gradients)

        scaled = differentiate_once(scale_gradients, grad_loss, *gradients)
        return None, *scaled, *(None for _ in gradients)
