"""The autograd functions of rows and losses.

    RowStatistics          log-probs, entropy, ... of rows; the backward computes the gradient
    LossWithGradients      a loss whose gradients were computed together with its value
    LossOfStatistics       a loss of log-probs and other statistics with known gradients
    SumGradientOverRanks   the identity, whose backward sums the gradient over ranks

The first three refuse second derivatives. `RowStatistics` and `LossWithGradients` check by version
counters that what they kept for the backward was not written to. Under torch.func, losses are
`LossOfStatistics` of `RowStatistics`. The functions of single logits are in `pair_logits.py`.
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
    """Return function.apply(*arguments), without the overhead that only torch.func needs.

    function    computes the result in its `forward`, and gradients in its `backward`
    arguments   of `forward`
    """
    if torch.compiler.is_compiling():
        # torch.compile cannot trace an autograd function none of whose inputs needs a gradient.
        if not any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            return function.forward(*arguments)
        return function.apply(*arguments)
    if torch._C._are_functorch_transforms_active():  # a transform of torch.func, such as vmap
        return function.apply(*arguments)
    # `Function.apply` adds what torch.func needs to the C++ `apply` of its base class. That takes
    # longer than the kernels of a small batch, so it is skipped.
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


class ConstantForAutograd(torch.autograd.Function):
    """Call a function that computes gradients, and refuse to differentiate its results.

    torch.func records every operation of a backward. If a backward computes its gradients by this
    operation, torch.func records it, and a second derivative raises RuntimeError. Inputs are the
    function, the number of tensors of each of its arguments, which are lists, and the tensors.
    """

    @staticmethod
    def forward(
        function: Callable[..., Any], group_sizes: Sequence[int], *tensors: Tensor | None
    ) -> Any:
        """Split the tensors into groups, and return function(*groups).

        function      takes one list of tensors for each group
        group_sizes   number of tensors of each group
        tensors       of all groups, one group after the other
        """
        remaining = iter(tensors)
        groups = [[next(remaining) for _ in range(size)] for size in group_sizes]
        return function(*groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save nothing: the backward always raises."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Raise RuntimeError: the results of `forward` are gradients."""
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def without_second_derivative(
    function: Callable[..., Any], *groups: Sequence[Tensor | None]
) -> Any:
    """Return function(*groups), the gradients of an autograd function, from its backward.

    The gradients cannot be differentiated again. Autograd would take them for constants, and the
    second derivative would be wrong. So this raises RuntimeError if autograd records the backward
    (create_graph=True). torch.func always records it, and gets a result whose derivative raises.

    function   computes the gradients
    groups     its arguments: lists of tensors or None. All tensors that the result depends on must
               be among them, so that torch.func sees them.
    """
    if torch.compiler.is_compiling():
        return function(*groups)
    # torch.func puts wrappers around tensors. torch.func.vjp calls the backward when they are dead
    # and have no memory any more, so the tensors inside are taken.
    live_groups = [
        [torch._C._functorch.unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in group]
        for group in groups
    ]
    if not torch.is_grad_enabled():  # the usual case: autograd does not record the backward
        return function(*live_groups)
    # Whether a dead wrapper of torch.func was removed, so that torch.func has called this backward.
    was_wrapped = any(
        x is not y
        for live_group, group in zip(live_groups, groups, strict=True)
        for x, y in zip(live_group, group, strict=True)
    )
    if was_wrapped or torch._C._are_functorch_transforms_active():
        # Only a derivative of the result is an error. ConstantForAutograd raises it.
        group_sizes = [len(group) for group in live_groups]
        tensors = [x for group in live_groups for x in group]
        return ConstantForAutograd.apply(function, group_sizes, *tensors)
    raise RuntimeError(f"{NO_SECOND_DERIVATIVE} Call backward without create_graph=True.")


# ---- statistics of rows


class StatisticsPass(Protocol):
    """Computes the softmax sums of rows from the tensors of their source, and the gradients.

    The tensors are (logits,), or (hidden, weight, bias).

    mask   bool [num_rows]: rows to process, None for all
    """

    mask: Tensor | None

    def compute(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return (values of the softmax sums, *what else the backward needs).

        The values are fp32 [num_sums, num_rows].

        tensors   (logits,) or (hidden, weight, bias)
        """

    def as_sums(self, values: Tensor) -> SoftmaxSums:
        """Return the values of the softmax sums, fp32 [num_sums, num_rows], with their names."""

    def gradients(
        self,
        tensors: Sequence[Tensor | None],
        computed: Sequence[Tensor],
        grads: dict[str, Tensor],
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient of each tensor, None if it is not wanted.

        tensors    (logits,) or (hidden, weight, bias), as `compute` got them
        computed   what `compute` returned: softmax sums, and perhaps more
        grads      upstream gradients d loss / d statistic by name, fp32 [num_rows] each
        wanted     whether each tensor needs a gradient
        """

    def tensors_read_again(self) -> list[Tensor | None]:
        """Return the tensors that the backward reads in addition to those of the source."""


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
        """The names of all results: "logps", and then the requested names."""
        return ("logps", *self.names)

    def has_gradient(self, name: str) -> bool:
        """Return whether a result is differentiable. "logps" always is; `detached` ones are not."""
        return name == "logps" or (name in DIFFERENTIABLE and name not in self.detached)


class RowStatistics(torch.autograd.Function):
    """Statistics of rows, differentiable in the tensors of their source.

    Inputs are the pass over the rows, the requested statistics and the tensors. Outputs are the
    log-probs and the requested statistics, [num_rows] each, and then what `StatisticsPass.compute`
    returned. The latter are outputs because torch.func can save only inputs and outputs.
    """

    @staticmethod
    def forward(
        row_pass: StatisticsPass, requested: RequestedStatistics, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return ("logps" and the requested statistics, *what `StatisticsPass.compute` returned).

        row_pass    computes the softmax sums of the rows from the tensors
        requested   the statistics to return
        tensors     (logits,) or (hidden, weight, bias)
        """
        computed = row_pass.compute(tensors)
        sums = row_pass.as_sums(computed[0])  # the softmax sums, from which statistics follow
        return (*sums.statistics(requested.names, row_pass.mask), *computed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save what the backward needs: the pass, what it computed, and the tensors.

        Outputs without a gradient are marked, so that autograd does not ask for it.
        """
        row_pass, requested, *tensors = inputs
        num_results = len(requested.all_names)
        results = dict(zip(requested.all_names, output[:num_results], strict=True))
        computed = output[num_results:]
        constants = [x for name, x in results.items() if not requested.has_gradient(name)]
        ctx.set_materialize_grads(False)  # an output without upstream gradient gets None, not zeros
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
        # After the statistics, `upstream` has an entry for each tensor that `compute` returned.
        # These have no gradient.
        grads = {
            name: grad
            for name, grad in zip(names, upstream, strict=False)
            if grad is not None and ctx.requested.has_gradient(name)
        }
        if not grads:
            return (None,) * len(ctx.needs_input_grad)
        if versions_of(row_pass.tensors_read_again()) != ctx.versions:
            raise RuntimeError(INPUT_OVERWRITTEN)
        saved = ctx.saved_tensors
        computed = saved[: ctx.num_computed]
        tensors = saved[ctx.num_computed :]
        _, _, *wanted = ctx.needs_input_grad  # of the tensors

        def compute_gradients(
            tensors: Sequence[Tensor | None], computed: Sequence[Tensor], upstream: Sequence[Tensor]
        ) -> tuple[Tensor | None, ...]:
            """Return the gradient of each tensor, None if it is not wanted.

            tensors    (logits,) or (hidden, weight, bias)
            computed   what the forward computed: softmax sums, and perhaps more
            upstream   d loss / d statistic for each name in `grads`, in this order
            """
            return row_pass.gradients(
                tensors, computed, dict(zip(grads, upstream, strict=True)), wanted
            )

        gradients = without_second_derivative(
            compute_gradients, tensors, computed, list(grads.values())
        )
        return None, None, *gradients


def row_statistics(
    row_pass: StatisticsPass, requested: RequestedStatistics, tensors: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """Return log-probs and the requested statistics by name, [num_rows] each.

    They are fp32, but "top_id" is int64. They are differentiable in the tensors. If nothing needs a
    gradient, no autograd function is called, because the call alone takes longer than the kernels
    of a small batch.

    row_pass    computes the softmax sums of the rows, and the gradients
    requested   the statistics to return in addition to "logps"
    tensors     (logits,) or (hidden, weight, bias)
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
    # The results go on after the statistics, with what the backward needs.
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
        """`total` if it is fp32, so that blocks can be added to it one by one; else None.

        In 16 bits each addition would round.
        """
        return self.total if self.total.dtype == torch.float32 else None

    def add(self, gradient: Tensor | None) -> Tensor | None:
        """Add a gradient of the weight to `total`, and return what autograd gets for the weight.

        Autograd gets None: `total` has the gradient. But a hook of Megatron (`flagged_weight`)
        wants a tensor of the weight's shape. It adds this tensor to main_grad if the weight has
        `zero_out_wgrad` (an embedding shares the weight), so it must be zeros then. Otherwise the
        hook does not read the values, which are not set.

        gradient   [V, H]. Nothing is added if it is None, or if it is `total` itself, to which the
                   blocks were added already.
        """
        if gradient is not None and gradient is not self.total:
            self.total.add_(gradient)
        weight: Any = self.flagged_weight
        if weight is None:
            return None
        weight.grad_added_to_main_grad = True  # Megatron's hook reads this
        if getattr(weight, "zero_out_wgrad", False):
            return zeros(weight.shape, weight.dtype, weight.device)
        return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


def check_weight_is_present(weight: Tensor, shard: VocabShard | None) -> None:
    """Raise RuntimeError if the weight was freed after the forward, as by ZeRO-3 or FSDP.

    weight   [V, H]: its storage is empty if it was freed
    shard    this rank's part of the vocabulary, which may have no ids; None: the whole vocabulary
    """
    is_empty = weight.untyped_storage().nbytes() == 0
    if weight.numel() == 0:
        # Without elements the storage says nothing. Only a rank of a shard may have V = 0.
        is_empty = shard is None
    if is_empty:
        raise RuntimeError(WEIGHT_MISSING)


class SumGradientOverRanks(torch.autograd.Function):
    """Identity in the forward; sums the gradient over the ranks of a shard in the backward.

    This is Megatron-LM's copy_to_tensor_model_parallel_region (arXiv 1909.08053, section 3).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shard: VocabShard) -> Tensor:
        """Return a view of hidden: autograd wants an output that is not the input object."""
        ctx.shard = shard
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad_hidden: Tensor) -> tuple[Tensor, None]:
        """Return the sum of grad_hidden over the ranks, and None for the shard."""
        return ctx.shard.sum_over_ranks(grad_hidden.contiguous()), None


# ---- losses whose gradient is computed in the forward


@dataclass(frozen=True, eq=False)
class InputGradient:
    """The gradient of an input of a loss that was computed in the forward.

    value    for an upstream gradient of 1; None if the input needs none
    dtype    the dtype in which the backward returns it
    memory   memory of the caller that the backward adds it to, for a weight; or None
    """

    value: Tensor | None
    dtype: torch.dtype
    memory: WeightGradMemory | None = None


class PrecomputedGradients:
    """The gradients of a loss that were computed in its forward, for one call of its backward.

    The backward scales them in place by the upstream gradient and gives them away to autograd. So
    they exist once, and a second backward raises RuntimeError.

    kernels     scale the gradients in place
    gradients   one for each input of the loss
    """

    def __init__(self, kernels: Backend, gradients: Sequence[InputGradient]) -> None:
        """Keep the gradients for the backward, and record their versions."""
        self.kernels = kernels
        self.gradients: Sequence[InputGradient] | None = gradients
        self.versions: list[int | None] = []
        self.record_versions()

    def record_versions(self) -> None:
        """Record torch's version counter of each gradient, so that `hand_over` notices a write."""
        assert self.gradients is not None
        values = [gradient.value for gradient in self.gradients]
        self.versions = [None if x is None else x._version for x in values]

    def hand_over(self, grad_loss: Tensor) -> list[Tensor | None]:
        """Return each gradient times the upstream gradient, or None for an input without gradient.

        grad_loss   0-d: the upstream gradient

        A gradient that the forward rounded to 16 bits is rounded again, unless grad_loss is a power
        of two. `grad_scale` of a loss avoids this: grad_loss is then 1.

        Raises RuntimeError at the second call, if the gradients were written to since
        `record_versions` (with inplace=True they are in the memory of the logits), or if autograd
        would differentiate the result again (create_graph=True).
        """
        if torch.is_grad_enabled():
            # In a backward, gradients are enabled only with create_graph=True. (Under torch.func
            # they always are, but its losses are `LossOfStatistics`.)
            raise RuntimeError(f"{NO_SECOND_DERIVATIVE} Call backward without create_graph=True.")
        if self.gradients is None:
            raise RuntimeError(SECOND_BACKWARD)
        gradients = self.gradients
        for gradient, version in zip(gradients, self.versions, strict=True):
            if gradient.value is not None and gradient.value._version != version:
                raise RuntimeError(LOGITS_OVERWRITTEN)
        # They are given away, so a second call raises.
        self.gradients = None
        results: list[Tensor | None] = []
        for gradient in gradients:
            result = gradient.value
            if result is not None:
                self.kernels.scale_(result, grad_loss)
                result = converted(result, gradient.dtype)
            if gradient.memory is not None:
                result = gradient.memory.add(result)
            results.append(result)
        return results


class LossWithGradients(torch.autograd.Function):
    """Attach gradients that were computed in the forward to a loss, so that backward returns them.

    Inputs are the loss (0-d), its gradients, and the tensors that they are the gradients of, in the
    same order. The output is the loss. `PrecomputedGradients` says why backward can run once.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: PrecomputedGradients, *tensors: Tensor | None
    ) -> Tensor:
        """Return the loss, and keep the gradients of `tensors` for the backward.

        loss        0-d, computed already
        gradients   of the loss, one for each of `tensors`
        tensors     not read: autograd learns from them what the loss depends on
        """
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(loss)  # The output is the input itself, which autograd must be told.
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> tuple[Any, ...]:
        """Return (None, None, *gradients of `tensors`), which are multiplied by grad_loss, 0-d."""
        if grad_loss is None:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, *ctx.gradients.hand_over(grad_loss)


# ---- a loss of statistics


class LossOfStatistics(torch.autograd.Function):
    """The sum of losses [num_rows], differentiable in three statistics whose gradients are known.

    losses                              fp32 [num_rows]
    logps, entropy, auxiliary_loss      the statistics, fp32 [num_rows]; None for one that the loss
                                        does not have. Only autograd uses them.
    grad_logps, grad_entropy, grad_auxiliary_loss
                                        d loss / d statistic of each row, fp32 [num_rows]; None for
                                        one that the loss does not depend on
    """

    @staticmethod
    def forward(
        losses: Tensor,
        logps: Tensor,
        entropy: Tensor | None,
        auxiliary_loss: Tensor | None,
        grad_logps: Tensor,
        grad_entropy: Tensor | None,
        grad_auxiliary_loss: Tensor | None,
    ) -> Tensor:
        """Return the sum of the losses, 0-d fp32.

        losses                                       fp32 [num_rows]
        logps, entropy, auxiliary_loss               fp32 [num_rows], not read: autograd learns from
                                                     them what the losses depend on
        grad_logps, grad_entropy, grad_auxiliary_loss
                                                     d loss / d statistic, fp32 [num_rows], for the
                                                     backward
        """
        return sum_losses(losses)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the three known gradients, the last inputs of `forward`."""
        _, _, _, _, *gradients = inputs
        ctx.save_for_backward(*gradients)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each input of `forward`.

        Those of the three statistics are the known gradients times the upstream gradient grad_loss,
        0-d. The other inputs have None.
        """

        def scale_gradients(
            upstream: Sequence[Tensor], gradients: Sequence[Tensor | None]
        ) -> tuple[Tensor | None, ...]:
            """Return the gradients times upstream = [grad_loss]; None for None."""
            (grad_loss,) = upstream
            return tuple(None if x is None else x * grad_loss for x in gradients)

        grad_statistics = without_second_derivative(scale_gradients, [grad_loss], ctx.saved_tensors)
        return None, *grad_statistics, None, None, None
