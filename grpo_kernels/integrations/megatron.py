"""Megatron-core: log-probs, entropy or a whole loss from hidden states, without logits.

`GPTModel` of megatron-core 0.18 and later calls an output processor in place of its output layer:

    from grpo_kernels.integrations import megatron

    out = model(
        input_ids, position_ids, attention_mask, labels=labels, loss_mask=loss_mask,
        output_processor=megatron.logprobs_processor,
        output_processor_context=megatron.LogprobsContext(temperature=0.7, vocab_size=151_669),
    )
    out.log_probs, out.entropy  # [B, S], on the last pipeline stage

    logprobs_processor   log-probs and entropy, in the fields of verl's fused_output_processor
    loss_processor       the loss of an Objective, with its gradient in the same pass
    head_processor       hidden states and head, for log-probs that are computed later

`run_with_processor` and `install_processor` also work with models that do not have this hook, such
as HybridModel and the GPTModel of older versions. `add_hook` gives them the hook.

What each rank passes and gets back:

    weight           [V / ranks, H] of its tensor-parallel rank: the output layer's, or the shared
                     embedding if the model ties them. With `vocab_size` the ids that pad the
                     vocabulary are not in the softmax, and their gradient is exactly 0.
    hidden states    [S, B, H], or [S / ranks, B, H] with sequence parallelism. Their gradient is
                     summed over the tensor-parallel ranks exactly once: by one all-reduce, or by
                     the reduce-scatter in the backward of the gather.
    labels           [B, S], shifted by the trainer. Position t predicts labels[t].
    loss_mask        [B, S]: positions where it is 0 take part in no matmul and get 0.
    context ranks    a rank passes the positions that it has. Log-probs are per token. A loss at a
                     sequence level needs `TokenBatch(context_group=)`.

The muP scale of the model (`scale_logits`) and the temperature are applied in the kernels. With
`config.gradient_accumulation_fusion` the gradient of the weight is added to `weight.main_grad`,
and the flags that Megatron's DistributedDataParallel reads are set.

megatron-core is not imported, except to find the tensor-parallel group of an output layer that has
none. Tested with stand-ins that have the arguments of the hook, on 1, 2 and 4 gloo ranks. GPTModel
and HybridModel of Megatron-LM d98e8a6 (0.20) were run on 1 and 2 CPU ranks; nothing was run on a
GPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..batch import TokenBatch
from ..checks import require
from ..distributed import VocabShard
from ..logprobs import TokenLogprobs
from ..losses import LossOutput, linear_grpo_loss
from ..objective import Denominators, Objective
from ..options import Head, Options
from ..transform import LogitTransform
from ._swap import Adapter, with_trainer_names
from ._tensors import log_probs_of

__all__ = [
    "FusedOutput",
    "InstalledProcessor",
    "LogprobsContext",
    "LossContext",
    "UnprojectedLogits",
    "add_hook",
    "head_processor",
    "install_processor",
    "logprobs_processor",
    "loss_processor",
    "packed_offsets",
    "run_with_processor",
    "skip_logits",
]

T = TypeVar("T")

ADAPTER = Adapter("Megatron", "megatron-core")


# ---- what a trainer passes as output_processor_context, and what it gets


@dataclass(frozen=True)
class LogprobsContext:
    """The context of `logprobs_processor`.

    temperature   a number, 0-d, per sequence [B] or per token [B, S]
    vocab_size    number of real ids; the rows of the weight beyond it pad the vocabulary. None: all
                  rows are ids.
    mask          bool [B, S]: positions to compute. None: where the model's loss_mask is not 0, or
                  all without a loss_mask.
    entropy       whether to compute the entropy; "detached": without a gradient
    options       backend and strict mode; the shard and the memory for the gradient of the weight
                  are those of the model
    """

    temperature: float | Tensor = 1.0
    vocab_size: int | None = None
    mask: Tensor | None = None
    entropy: bool | str = True
    options: Options | None = None


@dataclass(frozen=True)
class LossContext:
    """The context of `loss_processor`.

        batch = TokenBatch(labels, advantages, mask=loss_mask != 0, old_logps=old_logps)
        context = LossContext(batch, Objective.preset("dapo"), normalizer=normalizer)

    batch         targets [B, S], or packed [S] with cu_seqlens, for hidden states [S, 1, H]. They
                  are the model's labels, whose own labels and loss_mask are not read. See
                  `packed_offsets` for cu_seqlens and context parallelism.
    objective     what is minimised
    temperature   as in `LogprobsContext`, or per sequence of a packed batch
    vocab_size    as in `LogprobsContext`
    normalizer    the denominator over all micro-batches and data-parallel ranks, see
                  `linear_grpo_loss`. Tensor-parallel ranks have the same rows and count once.
    options       as in `LogprobsContext`, and skip_inactive
    """

    batch: TokenBatch
    objective: Objective
    temperature: float | Tensor = 1.0
    vocab_size: int | None = None
    normalizer: float | Tensor | Denominators | None = None
    options: Options | None = None


@dataclass
class FusedOutput:
    """What the model returns with `logprobs_processor`: the fields of verl's output.

    log_probs       fp32 [B, S], 0 where the mask is False
    entropy         fp32 [B, S] in nats, or None if it was not asked for
    hidden_states   as the processor got them
    logits          None: they never exist

    The other fields are None.
    """

    log_probs: Tensor
    entropy: Tensor | None
    hidden_states: Tensor
    logits: None = None
    loss: None = None
    past_key_values: None = None
    attentions: None = None


@dataclass(frozen=True, eq=False)
class UnprojectedLogits:
    """Hidden states and the output head, which stand for logits [B, S, V] that do not exist.

    hidden    [B, S, H], those of all tensor-parallel ranks
    head      this rank's part of the weight, its bias, and the scale of the logits
    options   the vocabulary shard, and the memory for the gradient of the weight
    """

    hidden: Tensor
    head: Head
    options: Options

    @property
    def device(self) -> torch.device:
        """The device of the hidden states."""
        return self.hidden.device

    def size(self, dim: int) -> int:
        """Return B or S for dim 0 or 1."""
        return self.hidden.shape[:2][dim]

    def sum(self) -> Tensor:
        """Return the sum of the hidden states, for trainers that add 0 * logits.sum() to a loss
        without tokens.
        """
        return self.hidden.sum()

    def logprobs(
        self,
        targets: Tensor,
        *,
        mask: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        entropy: bool | str = False,
        **others: Any,
    ) -> TokenLogprobs:
        """Return the log-probs of targets, and their entropies if asked for, fp32 [B, S] each.

        targets       int64 [B, S], or [N] after `select`
        mask          bool, the shape of targets: tokens to compute; None for all
        temperature   divides the logits
        entropy       False, True (differentiable) or "detached"
        others        more keyword arguments of `linear_logprobs`, such as kept=
        """
        head = self.at_temperature(temperature)
        return log_probs_of(
            self.hidden,
            targets,
            head=head,
            mask=mask,
            entropy=entropy,
            options=self.options,
            **others,
        )

    def select(self, rows: Tensor) -> UnprojectedLogits:
        """Return the logits of N of the B * S positions. Their hidden states are [N, H].

        rows   int64 [N], flat positions
        """
        flat_hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        return replace(self, hidden=flat_hidden.index_select(0, rows))

    def row_numbers(self) -> Tensor:
        """Return the flat position of each row, fp32 [B, S, 1].

        Pass it in place of logits to code of a trainer that slices logits. The result shows which
        rows the trainer takes. fp32 holds positions up to 2^24.
        """
        shape = self.hidden.shape[:2]
        numbers = torch.arange(shape.numel(), dtype=torch.float32, device=self.device)
        return numbers.view(*shape, 1)

    def at_temperature(self, temperature: float | Tensor) -> Head:
        """Return the head with its scale and a temperature."""
        assert self.head.transform is not None  # `OutputLayer.unprojected` has set it
        return replace(self.head, transform=replace(self.head.transform, temperature=temperature))


# ---- output processors


@with_trainer_names(targets="labels", hidden="hidden_states")
def logprobs_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor | None,
    context: Any,
    config: Any,
    loss_mask: Tensor | None = None,
    scale_logits: Callable[[Tensor], Tensor] | None = None,
    **_unused: Any,
) -> FusedOutput:
    """Return the log-prob and entropy of each label, in place of the model's output layer.

    Pass it as `output_processor=` to the forward of a model of megatron-core. The model then calls
    it with hidden states, and returns its result in place of logits.

    hidden_states   [S, B, H], or [S / ranks, B, H] with sequence parallelism
    output_layer    the output layer, a ColumnParallelLinear
    output_weight   the shared embedding [V / ranks, H], or None for the layer's own weight
    labels          int64 [B, S], the target of each position
    context         a `LogprobsContext`, or an object with a temperature alone, as verl passes it
    config          the TransformerConfig of the model
    loss_mask       [B, S], 0 for positions that are not computed. context.mask has precedence.
    scale_logits    what the model does to its logits (muP), or None

    Megatron passes more arguments, which are not used. Raises ValueError naming the argument that
    is wrong.
    """
    if not isinstance(context, LogprobsContext):
        context = LogprobsContext(temperature=context.temperature)
    if labels is None:
        raise ValueError(
            "labels is None: pass the target of each position to the model, [B, S], shifted."
        )
    mask = context.mask
    if mask is None and loss_mask is not None:
        mask = loss_mask != 0

    def compute(logits: UnprojectedLogits) -> TokenLogprobs:
        return logits.logprobs(
            labels, mask=mask, temperature=context.temperature, entropy=context.entropy
        )

    output = OutputLayer(output_layer, output_weight, config, scale_logits)
    log_probs, entropy = output.run(compute, hidden_states, context.vocab_size, context.options)
    return FusedOutput(log_probs, entropy, hidden_states)


def loss_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: LossContext,
    config: Any,
    scale_logits: Callable[[Tensor], Tensor] | None = None,
    **_unused: Any,
) -> LossOutput:
    """Return the loss of `context.objective` over `context.batch`, in place of the output layer.

    Pass it as `output_processor=` to the forward of a model of megatron-core. The model then calls
    it with hidden states, and returns its result in place of logits. The gradient is computed in
    the same pass.

    hidden_states   [S, B, H], or [S / ranks, B, H] with sequence parallelism
    output_layer    the output layer, a ColumnParallelLinear
    output_weight   the shared embedding [V / ranks, H], or None for the layer's own weight
    context         a `LossContext`: batch, objective, temperature, ...
    config          the TransformerConfig of the model
    scale_logits    what the model does to its logits (muP), or None

    Megatron passes more arguments, which are not used. Raises ValueError naming the argument that
    is wrong.
    """
    if not isinstance(context, LossContext):
        raise ValueError(
            f"output_processor_context is a {type(context).__name__}: pass a LossContext."
        )
    batch = context.batch
    is_packed = batch.targets.dim() == 1
    remedy = "a batch with packed targets [S] has hidden states [S, 1, H]."
    shape = list(hidden_states.shape)
    require(not is_packed or shape[1] == 1, "hidden_states.shape", shape, remedy)

    def compute(logits: UnprojectedLogits) -> LossOutput:
        return linear_grpo_loss(
            logits.hidden[0] if is_packed else logits.hidden,
            logits.at_temperature(context.temperature),
            batch,
            context.objective,
            normalizer=context.normalizer,
            options=logits.options,
        )

    output = OutputLayer(output_layer, output_weight, config, scale_logits)
    return output.run(compute, hidden_states, context.vocab_size, context.options)


def head_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    config: Any,
    context: LogprobsContext | None = None,
    scale_logits: Callable[[Tensor], Tensor] | None = None,
    **_unused: Any,
) -> UnprojectedLogits:
    """Return hidden states and head in place of logits, for a loss that computes log-probs itself.

    A model of megatron-core calls it in place of its output layer, if it is passed as
    `output_processor=` to the forward of the model.

    hidden_states   [S, B, H], or [S / ranks, B, H] with sequence parallelism
    output_layer    the output layer, a ColumnParallelLinear
    output_weight   the shared embedding [V / ranks, H], or None for the layer's own weight
    context         its vocab_size and options are used. None: all rows of the weight are real ids.
    config          the TransformerConfig of the model
    scale_logits    what the model does to its logits (muP), or None
    """
    context = context or LogprobsContext()
    output = OutputLayer(output_layer, output_weight, config, scale_logits)

    def return_unprojected(logits: UnprojectedLogits) -> UnprojectedLogits:
        return logits

    return output.run(return_unprojected, hidden_states, context.vocab_size, context.options)


# ---- from Megatron's arguments to ours


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """The output layer of a model, as Megatron's hook passes it.

    module          a ColumnParallelLinear
    shared_weight   the embedding [V / ranks, H] if the model ties them; None: the module's weight
    config          the TransformerConfig of the model
    scale_logits    what the model does to its logits (muP), or None
    """

    module: Any
    shared_weight: Tensor | None
    config: Any
    scale_logits: Callable[[Tensor], Tensor] | None

    def run(
        self,
        compute: Callable[[UnprojectedLogits], T],
        hidden_states: Tensor,
        vocab_size: int | None,
        options: Options | None,
    ) -> T:
        """Call a function with hidden states and head, and return its result.

        The function runs as the forward of the output layer's module, so that hooks of the module
        run too. With overlap_param_gather, Megatron's DistributedDataParallel waits in such a hook
        until the parameters of the module have arrived.

        compute         the function. Its argument is an `UnprojectedLogits`: hidden states and
                        head, from which logits can be computed.
        hidden_states   [S, B, H], or [S / ranks, B, H] with sequence parallelism
        vocab_size      number of real ids; None if the vocabulary has no padding
        options         options of the kernels, or None
        """

        def forward(hidden: Tensor) -> T:
            return compute(self.unprojected(hidden, vocab_size, options))

        if not isinstance(self.module, nn.Module):  # it has no hooks
            return forward(hidden_states)
        restore_forward = replace_forward(self.module, forward)
        try:
            return self.module(hidden_states)
        finally:
            restore_forward()

    def unprojected(
        self, hidden: Tensor, vocab_size: int | None, options: Options | None
    ) -> UnprojectedLogits:
        """Return the hidden states of all ranks, and this rank's part of the head.

        hidden       [S, B, H], or [S / ranks, B, H] with sequence parallelism
        vocab_size   number of real ids; None if the vocabulary has no padding
        options      options of the kernels, or None

        Raises ValueError for an output layer whose logits are more than a matmul, a bias and a
        scale.
        """
        weight = self.weight
        group = tensor_parallel_group(self.module)
        ranks = 1 if group is None else dist.get_world_size(group)
        is_gathered = ranks > 1 and bool(
            getattr(self.module, "sequence_parallel", self.config.sequence_parallel)
        )
        if is_gathered:  # each rank has a part of the sequence
            hidden = GatherSequence.apply(hidden, group)
        # Each rank has its share of the gradient of the hidden states. The shares are summed by the
        # backward of the gather, or with disable_grad_reduce by the layers in front of the module.
        # Otherwise our kernels have to sum them.
        is_summed_elsewhere = is_gathered or getattr(self.module, "disable_grad_reduce", False)
        options = replace(
            options or Options(),
            shard=even_part(weight, group, vocab_size, reduce_hidden=not is_summed_elsewhere),
            weight_grad=main_grad_of(weight, self.config),
        )
        transform = LogitTransform(scale=constant_scale(self.scale_logits))
        # With skip_bias_add the layer returns its bias with the logits, and the model drops it.
        has_bias = not getattr(self.module, "skip_bias_add", False)
        bias = getattr(self.module, "bias", None) if has_bias else None
        head = Head(weight, bias, transform)
        return UnprojectedLogits(hidden.transpose(0, 1), head, options)

    @property
    def weight(self) -> Tensor:
        """This rank's part of the output weight, [V / ranks, H].

        It is the shared embedding if the model ties them, else the weight of the output layer.
        Raises ValueError if the layer has an adapter, or if its weight is sharded a second time.
        """
        weight = self.shared_weight
        if weight is None:
            weight = getattr(self.module, "weight", None)
        is_wrapped = isinstance(self.module, nn.Module) and any(self.module.children())
        if is_wrapped or not isinstance(weight, Tensor):
            raise ValueError(
                f"output_layer is a {type(self.module).__name__}, not a single linear layer: an"
                " adapter around it (LoRA) is not supported. Merge it, or leave the output layer"
                " out of its targets."
            )
        gtp_ranks = getattr(self.module, "gtp_remat_size", 1)
        remedy = "the weight of the output layer must not be sharded a second time."
        require(gtp_ranks == 1, "gtp_remat_size", gtp_ranks, remedy)
        return weight


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give a module another forward, and return a function without arguments that undoes it."""
    # A forward on the instance, which another library has set. Usually there is none, and the
    # class has the forward.
    instance_forward = vars(module).get("forward")

    def restore() -> None:
        if instance_forward is None:
            del module.forward
        else:
            module.forward = instance_forward

    module.forward = forward
    return restore


def tensor_parallel_group(output_layer: Any) -> Any:
    """Return the group that the output layer is sharded over; None without torch.distributed.

    output_layer   Megatron's output layer. Older versions of Megatron do not give it its group.
    """
    group = getattr(output_layer, "tp_group", None)
    if group is not None or not (dist.is_available() and dist.is_initialized()):
        return group
    # Without a group of its own the layer uses Megatron's global one.
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def even_part(
    weight: Tensor, group: Any, vocab_size: int | None, reduce_hidden: bool
) -> VocabShard | None:
    """Return this rank's part of a vocabulary that Megatron has padded and split evenly.

    weight          [V / ranks, H]
    group           the tensor-parallel group; None for one rank
    vocab_size      number of real ids; None if the vocabulary has no padding
    reduce_hidden   whether our kernels sum the gradient of the hidden states over the ranks

    Returns None if one rank has the whole vocabulary, without padding.
    """
    width = len(weight)
    ranks = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    total = ranks * width
    if vocab_size is None:
        vocab_size = total
    remedy = f"the {ranks} tensor-parallel ranks have {total} rows of the output weight together."
    require(1 <= vocab_size <= total, "vocab_size", vocab_size, remedy)
    if ranks == 1 and vocab_size == total:
        return None
    return VocabShard(rank * width, vocab_size, group, reduce_hidden)


def constant_scale(scale_logits: Callable[[Tensor], Tensor] | None) -> float:
    """Return the factor that `scale_logits` multiplies logits by (muP), 1 for None.

    Raises ValueError if the function is not a multiplication.
    """
    if scale_logits is None:
        return 1.0
    # A softcap, for example, is not proportional to its argument at these three points.
    samples = torch.tensor([1.0, -3.0, 50.0], dtype=torch.float64)
    scaled = scale_logits(samples.clone()).double()
    scale = float(scaled[0])
    if not torch.allclose(scaled, scale * samples, rtol=1e-6, atol=0.0):
        raise ValueError(
            "scale_logits does more than multiply by a number: only a constant scale (muP) is"
            " supported."
        )
    return scale


def main_grad_of(weight: Tensor, config: Any) -> Tensor | None:
    """Return the buffer in which Megatron accumulates the gradient of a weight, or None.

    weight   [V / ranks, H]
    config   the TransformerConfig of the model. Without gradient_accumulation_fusion autograd
             returns the gradient, and there is no buffer.
    """
    is_fused = getattr(config, "gradient_accumulation_fusion", False)
    if not is_fused or not weight.requires_grad or not torch.is_grad_enabled():
        return None
    return getattr(weight, "main_grad", None)


class GatherSequence(torch.autograd.Function):
    """Gather the parts [S / ranks, B, H] of a sequence from the ranks of a group.

    The backward sums the gradients of all ranks and gives each rank its part: a reduce-scatter.
    This is Megatron-LM's gather_from_sequence_parallel_region (arXiv 2205.05198, section 4.2.2),
    for any device.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        """Return the whole sequence [S, B, H] from this rank's part [S / ranks, B, H]."""
        ctx.group = group
        part = part.contiguous()
        ranks = dist.get_world_size(group)
        whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad_whole: Tensor) -> tuple[Tensor, None]:
        """Return this rank's part of the gradient, summed over the ranks."""
        grad_whole = grad_whole.contiguous()
        ranks = dist.get_world_size(ctx.group)
        part = grad_whole.new_empty((grad_whole.shape[0] // ranks, *grad_whole.shape[1:]))
        dist.reduce_scatter_tensor(part, grad_whole, group=ctx.group)
        return part, None


def packed_offsets(packed_seq_params: Any, context_ranks: int = 1) -> Tensor:
    """Return the boundaries of this rank's part of packed sequences, int32 [num_sequences + 1].

    They are the `cu_seqlens` of a `TokenBatch` with a `context_group`. Context parallelism gives
    each rank the same number of positions of every sequence, so the boundaries are those of the
    whole sequences divided by the number of ranks.

    packed_seq_params   Megatron's PackedSeqParams of the whole sequences. If they are padded, the
                        padded boundaries count.
    context_ranks       number of context-parallel ranks

    Raises ValueError if a sequence cannot be split evenly. Megatron gives each rank two parts of a
    sequence, one from its first and one from its last half, so that causal attention is balanced.
    That is why it pads to multiples of 2 * context_ranks.
    """
    offsets = packed_seq_params.cu_seqlens_q_padded
    if offsets is None:
        offsets = packed_seq_params.cu_seqlens_q
    is_even = bool((offsets % context_ranks == 0).all())
    remedy = f"pad each sequence to a multiple of 2 * {context_ranks} positions."
    require(is_even, "cu_seqlens_q_padded", offsets, remedy)
    return offsets // context_ranks


# ---- models without the hook, and trainers that call the model themselves


def run_with_processor(
    model: nn.Module, processor: Callable[..., T], context: Any = None, **inputs: Any
) -> T | Tensor:
    """Call a model with an output processor, whether or not its forward has the hook for it.

    An output processor is a function that the model calls in place of its output layer, with hidden
    states. The hook is the pair of arguments output_processor= and output_processor_context= of
    the forward, which models of older versions of megatron-core lack.

        out = run_with_processor(
            model, logprobs_processor, LogprobsContext(temperature=0.7),
            input_ids=ids, position_ids=positions, attention_mask=None, labels=labels,
        )

    model       a language model of megatron-core, also inside of DistributedDataParallel,
                Float16Module or a multimodal model with a `language_model`
    processor   such as `logprobs_processor` or `loss_processor`
    context     what the processor gets as `context`
    inputs      the arguments of the model's forward

    Returns the result of the processor on the last pipeline stage, and hidden states on the others.
    """
    if has_hook(innermost(model)):
        return model(**inputs, output_processor=processor, output_processor_context=context)
    with install_processor(model, processor, context):
        return model(**inputs)


def install_processor(
    model: nn.Module, processor: Callable[..., Any], context: Any = None
) -> InstalledProcessor:
    """Make a model call an output processor in every forward.

    This is for trainers that call the model themselves and do not pass output_processor=.

    model       a language model of megatron-core, also inside of wrappers
    processor   a function that the model calls in place of its output layer, such as
                `loss_processor`. Its result is the result of the model.
    context     what the processor gets as `context`

    Returns an object whose `remove()` undoes it. It can be used in a `with` block, and its
    `context` may be changed between calls. Calls of `build_schedule_plan` are not affected. Raises
    ValueError for a model without an output layer, and RuntimeError if a processor is installed
    already.
    """
    return InstalledProcessor(language_model(model), processor, context)


def skip_logits(chunks: Sequence[nn.Module], vocab_size: int | None = None) -> None:
    """Make the chunks of a pipeline return `UnprojectedLogits` in place of logits.

    These are hidden states and the output head. Adapters of trainers compute log-probs from them.

    chunks       the parts of the model on this pipeline stage
    vocab_size   number of real ids; the rows of the output weight beyond it pad the vocabulary.
                 None: all rows are ids.

    Chunks that do so already are left alone.
    """
    for chunk in chunks:
        model = language_model(chunk)
        # `InstalledProcessor` replaces the forward and marks it by this attribute.
        if not getattr(model.forward, "is_processed", False):
            InstalledProcessor(model, head_processor, LogprobsContext(vocab_size=vocab_size))


class InstalledProcessor:
    """A language model whose forward calls an output processor, until `remove()`.

    context   what the processor gets as `context`
    """

    def __init__(self, model: nn.Module, processor: Callable[..., Any], context: Any) -> None:
        """Replace the forward of a model by one that calls the processor.

        model       a language model of megatron-core, without wrappers
        processor   a function that takes hidden states and output layer. Its result is the result
                    of the model.
        context     what the processor gets as `context`

        Raises RuntimeError if the model has a processor already.
        """
        if getattr(model.forward, "is_processed", False):
            raise RuntimeError(
                f"{type(model).__name__} has a processor already: call remove() on what"
                " install_processor returned."
            )
        self.model = model
        self.context = context
        own_forward = model.forward
        # If the model cannot call a processor itself, `run_trunk` calls it after the forward.
        run = run_hook if has_hook(model) else run_trunk

        @functools.wraps(own_forward)
        def forward(*args: Any, **inputs: Any) -> Any:
            return run(model, own_forward, processor, self.context, args, inputs)

        vars(forward)["is_processed"] = True  # for `remove`, and against a second installation
        self.restore = replace_forward(model, forward)

    def remove(self) -> None:
        """Give the model its own forward back. A second call does nothing."""
        if getattr(self.model.forward, "is_processed", False):
            self.restore()

    def __enter__(self) -> InstalledProcessor:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def add_hook(model: nn.Module) -> Callable[[], None]:
    """Make the forward of a model take output_processor= and output_processor_context=.

    The output processor is a function that is called with hidden states in place of the output
    layer. Newer versions of megatron-core have these two arguments, and some trainers pass them to
    every model. A model that has them is left alone.

    Returns a function that gives the model its own forward back.
    """
    model = language_model(model)
    if has_hook(model):
        return lambda: None
    own_forward = model.forward

    def forward(
        *args: Any,
        output_processor: Callable[..., Any] | None = None,
        output_processor_context: Any = None,
        **inputs: Any,
    ) -> Any:
        if output_processor is None:
            return own_forward(*args, **inputs)
        return run_trunk(
            model, own_forward, output_processor, output_processor_context, args, inputs
        )

    return replace_forward(model, forward)


def run_hook(
    model: nn.Module,
    forward: Callable[..., Any],
    processor: Callable[..., Any],
    context: Any,
    args: tuple[Any, ...],
    inputs: dict[str, Any],
) -> Any:
    """Call a forward of megatron-core that calls an output processor itself.

    model          not used: `run_trunk`, which has the same arguments, needs it
    forward        the forward of a model
    processor      a function that the forward calls with hidden states and output layer
    context        what the processor gets as `context`
    args, inputs   the arguments of the forward
    """
    return forward(*args, **inputs, output_processor=processor, output_processor_context=context)


def run_trunk(
    model: Any,
    forward: Callable[..., Any],
    processor: Callable[..., Any],
    context: Any,
    args: tuple[Any, ...],
    inputs: dict[str, Any],
) -> Any:
    """Call a model without its output layer, and an output processor with its hidden states.

    This is for models of older versions of megatron-core, whose forward cannot call a processor.

    model          a language model of megatron-core
    forward        the forward of this model
    processor      a function that takes hidden states and output layer, such as
                   `logprobs_processor`
    context        what the processor gets as `context`
    args, inputs   the arguments of the forward

    Returns the result of the processor on the last pipeline stage. Other stages have no output
    layer. They return what their forward returns.
    """
    if not model.post_process:  # not the last stage
        return forward(*args, **inputs)
    # {name: value} of the arguments of this call
    arguments = inspect.signature(forward).bind(*args, **inputs).arguments
    refuse_mtp_loss(model, arguments)
    # With post_process=False the forward returns hidden states and skips the output layer.
    model.post_process = False
    try:
        hidden = forward(*args, **inputs)
    finally:
        model.post_process = True
    weight = None
    if model.share_embeddings_and_output_weights:
        weight = model.shared_embedding_or_output_weight()
    return processor(
        hidden_states=hidden,
        output_layer=model.output_layer,
        output_weight=weight,
        **{name: arguments.get(name) for name in INPUTS_OF_A_PROCESSOR},
        context=context,
        compute_language_model_loss=model.compute_language_model_loss,
        scale_logits=getattr(model, "_scale_logits", None),
        config=model.config,
    )


#: Arguments of a model's forward that the hook passes on.
INPUTS_OF_A_PROCESSOR = (
    "labels",
    "loss_mask",
    "input_ids",
    "position_ids",
    "attention_mask",
    "decoder_input",
    "inference_context",
    "packed_seq_params",
    "runtime_gather_output",
)


def refuse_mtp_loss(model: Any, inputs: dict[str, Any]) -> None:
    """Raise ValueError if the forward of a model adds a loss of multi-token prediction.

    inputs   {name: value} of the arguments of the forward

    The caller runs the forward up to the hidden states only, and such a forward adds this loss
    later. It would silently be left out.
    """
    predicts_more = getattr(model, "mtp_process", False) and getattr(
        model.config, "mtp_num_layers", None
    )
    if predicts_more and inputs.get("compute_mtp_loss", True):
        raise ValueError(
            f"mtp_num_layers={model.config.mtp_num_layers}: {type(model).__name__} has no"
            " output_processor hook, and its loss of multi-token prediction would be left out."
            " Pass compute_mtp_loss=False if that is intended."
        )


def has_hook(model: nn.Module) -> bool:
    """Return whether the forward of a model takes an output processor.

    This is a function that the forward calls in place of the output layer. Newer versions of
    megatron-core have it.
    """
    parameters = inspect.signature(model.forward).parameters
    return {"output_processor", "output_processor_context"} <= parameters.keys()


def innermost(model: nn.Module) -> nn.Module:
    """Return a model without its wrappers, which have it as `module`."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


def language_model(model: nn.Module) -> nn.Module:
    """Return the language model inside of wrappers and of a multimodal model.

    model   the model of a trainer, such as DistributedDataParallel(Float16Module(GPTModel))

    Raises ValueError for a model that is none of megatron-core's.
    """
    inner = innermost(model)
    if isinstance(getattr(inner, "language_model", None), nn.Module):
        inner = innermost(inner.language_model)  # type: ignore[arg-type]
    remedy = "pass a GPTModel, HybridModel or another model with a post_process stage."
    require(hasattr(inner, "post_process"), "model", type(model).__name__, remedy)
    return inner
