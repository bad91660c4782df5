"""Check the logits, or hidden states and head, of a call, and return them as a row source.

    LogitsInput, LinearInput   tensors as the caller passed them, the policy's or a reference's
    RowLayout                  the shape, device and mask that they must fit
    make_reference             checks `reference=` or `ref_logits=`

`LinearInput.make_source` returns `core.sources.ProjectedLogits`, `LogitsInput.make_source` returns
`core.sources.GivenLogits`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import (
    MATMUL_DTYPES,
    is_leaf_or_view_of_leaf,
    leading_shape,
    require,
    require_device,
    require_shape,
    require_tensor,
)
from .core import backends
from .core.autograd import SumGradientOverRanks, WeightGradMemory
from .core.backends import Backend
from .core.divergence import NO_DIVERGENCE, DivergenceKind
from .core.linear import Projection
from .core.softmax import TRANSFORMED, RowTransform
from .core.sources import GivenLogits, ProjectedLogits, Reference, RowSource
from .core.vocab_parallel import VocabShard, is_managed, on_shard, refuse_managed
from .formulas.divergence import Exact
from .options import Head, Options
from .overlap import overlaps_itself, refuse_overlap
from .transform import LogitTransform, as_transform

REFERENCE_FORMS = "(hidden, weight), (hidden, weight, bias), (hidden, Head(...))"
DISTRIBUTION_FORMS = f"{REFERENCE_FORMS}, or TokenSets whose values are a teacher's log-probs"


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Shape, device and mask of the rows of a call, which all its tensors must match.

    shape        the leading shape of logits or hidden states: [B, T] or [N]
    device       the device of targets
    mask         bool of that shape: rows to process, None for all
    cu_seqlens   boundaries of packed sequences, for a temperature per sequence; or None
    are_shared   True if the call has the argument `rows=`, by which several tokens may be predicted
                 by the same row
    """

    shape: torch.Size
    device: torch.device
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    are_shared: bool = False

    def row_transform(self, transform: LogitTransform | None) -> RowTransform:
        """Return what the kernels apply to the logits of each row before the softmax.

            z = softcap * tanh(x * scale / softcap) / temperature
            z = x * scale / temperature                              without a softcap

        transform   what the caller passed: scale, softcap and temperature. None: z = x.

        Raises ValueError for a temperature of an unmasked row that is not positive and finite. If
        several tokens may be predicted by one row (`are_shared`), they share its softmax, so the
        temperature must be one number and not a tensor.
        """
        if transform is None:
            return TRANSFORMED  # the identity, for logits that are transformed already
        checked = as_transform(transform)  # raises ValueError for another type
        if self.are_shared:
            is_one_number = not isinstance(checked.temperature, Tensor)
            remedy = (
                "with rows= the tokens of a row share its softmax: pass one temperature, as a"
                " number."
            )
            require(is_one_number, "temperature", checked.temperature, remedy)
        return checked.for_rows(self.shape, self.mask, self.cu_seqlens, self.device)


class LogitsInput(NamedTuple):
    """Logits [..., V] as a caller passed them, still unchecked."""

    logits: Any

    @property
    def reference_name(self) -> str:
        """The argument that holds the logits of a reference, for errors: "ref_logits"."""
        return "ref_logits"

    def check_options(self, options: Options) -> None:
        """Raise ValueError for `Options(weight_grad=)`: logits come without a head's weight."""
        if options.weight_grad is not None:
            raise ValueError(
                "weight_grad is given, but logits come without the weight of a head: leave it out"
                " of the options."
            )

    def named_rows(self) -> tuple[str, Any]:
        """Return ("logits", logits): name and value of the argument that has the rows."""
        return "logits", self.logits

    def leading_shape(self, targets: Tensor) -> torch.Size:
        """Return the shape of the logits without the vocabulary, for tokens that share rows.

        targets   its shape is returned if `logits` is not a tensor with a dimension of vocabulary.
                  A later check raises the error for such an argument.
        """
        return leading_shape(self.logits, targets)

    def make_source(
        self,
        layout: RowLayout,
        transform: LogitTransform | None,
        options: Options,
        *,
        inplace: bool = False,
        other_arguments: dict[str, Any] | None = None,
        reference_arguments: dict[str, Any] | None = None,
    ) -> GivenLogits:
        """Check the logits and return their rows, a view of the logits if their strides allow it.

        layout                leading shape, device and mask that the logits must fit
        transform             temperature, softcap and scale, as the caller passed them
        options               backend and vocabulary shard
        inplace               whether the gradient overwrites the logits
        other_arguments       other arguments of the call by name. With inplace=True they must not
                              share memory with the logits.
        reference_arguments   the reference's logits by name. With inplace=True they may be the
                              logits themselves: each element of the reference is read before the
                              logit at the same index is overwritten. Any other overlap is refused.

        Raises ValueError for shapes, dtypes or devices that do not fit, and for memory that
        inplace=True would overwrite.
        """
        logits = self.logits
        shard = options.shard
        if shard is not None:
            logits = shard.local("logits", logits, -1)
        rows = as_3d_logits(
            logits,
            layout.shape,
            layout.device,
            inplace=inplace,
            may_be_empty=shard is not None,
        )
        row_transform = layout.row_transform(transform)
        if torch.compiler.is_compiling():
            from .core.compiled import CompiledLogits

            # torch.compile traces this call into a graph, which writes nothing in place. Its
            # operators pick the backend when the graph runs, so there are no kernels yet.
            return CompiledLogits(
                rows, row_transform, NO_KERNELS, backend=options.backend, strict=options.strict
            )
        if inplace:
            refuse_overlap(
                "inplace=True, but logits",
                rows,
                "the gradient would be written over it. Pass a copy, or inplace=False.",
                other_arguments or {},
                reference_arguments or {},
            )
        return GivenLogits(
            logits=rows,
            transform=row_transform,
            kernels=pick_kernels(options, layout.device),
            shard=shard,
            inplace=inplace,
        )

    def unpack_reference(
        self, value: Any, transform: LogitTransform | None, exact: Exact | None
    ) -> tuple[LogitsInput, LogitTransform | None]:
        """Return (the reference's logits, still unchecked; their transform).

        value       what the caller passed as `ref_logits`: logits, or (logits, transform)
        transform   the policy's. It is returned unless the value contains another. (logits, None)
                    contains the identity.
        exact       the divergence from the reference, for the message of an error

        Raises ValueError if the value is something else.
        """
        logits = value
        is_pair = isinstance(value, tuple) and len(value) == 2
        if is_pair and isinstance(value[1], LogitTransform | None):
            logits = value[0]
            transform = as_transform(value[1])  # the identity for None
        if not isinstance(logits, Tensor):
            actual = "None" if logits is None else f"a {type(logits).__name__}"
            raise ValueError(
                f"ref_logits is {actual}, but {exact} needs the whole distribution of a reference"
                " or teacher: pass its logits, (logits, LogitTransform(...)), or TokenSets whose"
                " values are its log-probs."
            )
        return LogitsInput(logits), transform


class LinearInput(NamedTuple):
    """Hidden states [..., H] and an output head as a caller passed them, still unchecked."""

    hidden: Any
    weight: Any
    bias: Any = None

    @classmethod
    def from_arguments(
        cls, hidden: Any, weight: Any, transform: LogitTransform | None
    ) -> tuple[LinearInput, LogitTransform | None]:
        """Return (hidden states and head, still unchecked; their transform).

        The transform is scale, softcap and temperature, which are applied to the logits.

        hidden      hidden states as the caller passed them
        weight      the weight of the head, or a `Head` with weight, bias and transform
        transform   what the caller passed as `transform`. None: the Head's, if it has one.

        Raises ValueError if there are two transforms, one passed and one in the Head.
        """
        if not isinstance(weight, Head):
            return cls(hidden, weight), transform
        if transform is not None and weight.transform is not None:
            raise ValueError("transform is given, and the Head has one: pass one of them.")
        if transform is None:
            transform = weight.transform
        return cls(hidden, weight.weight, weight.bias), transform

    @property
    def reference_name(self) -> str:
        """The argument with hidden states and head of a reference, for errors: "reference"."""
        return "reference"

    def check_options(self, options: Options) -> None:
        """Accept the options: unlike for given logits, all of them apply to hidden states."""

    def named_rows(self) -> tuple[str, Any]:
        """Return ("hidden", hidden): name and value of the argument that has the rows."""
        return "hidden", self.hidden

    def leading_shape(self, targets: Tensor) -> torch.Size:
        """Return the shape of hidden without its last dimension, for tokens that share rows.

        targets   its shape is returned if `hidden` is not a tensor with a last dimension. A later
                  check raises the error for such an argument.
        """
        return leading_shape(self.hidden, targets)

    def make_source(
        self,
        layout: RowLayout,
        transform: LogitTransform | None,
        options: Options,
        *,
        inplace: bool = False,
        other_arguments: dict[str, Any] | None = None,
        reference_arguments: dict[str, Any] | None = None,
    ) -> ProjectedLogits:
        """Check hidden states and head, and return a source that computes their logits later.

        layout                leading shape, device and mask that the hidden states must fit
        transform             temperature, softcap and scale, as the caller passed them
        options               backend, vocabulary shard and memory for the gradient of the weight
        inplace               not used: there are no logits to overwrite
        other_arguments       other arguments of the call by name. The call reads them, so they must
                              not share memory with `Options(weight_grad=)`.
        reference_arguments   the reference's tensors by name, likewise

        Raises ValueError for shapes, dtypes or devices that do not fit, and for such an overlap.
        """
        shard = options.shard
        hidden, weight, bias = check_linear_tensors(self, layout, shard)
        weight_memory = None
        if options.weight_grad is not None:
            # The tensors that the call reads, so that the gradient must not overwrite them.
            read = {"hidden": hidden, "weight": weight, "bias": bias}
            read |= {**(other_arguments or {}), **(reference_arguments or {})}
            weight_memory = check_weight_grad(options.weight_grad, weight, read)
        dtype = matmul_dtype(hidden)
        hidden = with_unit_stride(hidden.reshape(-1, hidden.shape[-1]))
        if shard is not None and shard.reduce_hidden and hidden.requires_grad:
            # Each rank computes the part of the gradient that comes from its ids of the vocabulary.
            # This identity adds up the parts of all ranks in the backward.
            hidden = SumGradientOverRanks.apply(hidden, shard)
        projection = Projection(
            hidden=hidden,
            weight=with_unit_stride(weight),
            bias=None if bias is None else bias.contiguous(),
            transform=layout.row_transform(transform),
            matmul_dtype=dtype,
        )
        if torch.compiler.is_compiling():
            from .core.compiled import CompiledProjection

            # torch.compile traces this call into a graph, whose operators pick the backend when the
            # graph runs, so there are no kernels yet.
            return CompiledProjection(
                projection, NO_KERNELS, backend=options.backend, strict=options.strict
            )
        return ProjectedLogits(
            projection=projection,
            kernels=pick_kernels(options, layout.device),
            shard=shard,
            weight_memory=weight_memory,
        )

    def unpack_reference(
        self, value: Any, transform: LogitTransform | None, exact: Exact | None
    ) -> tuple[LinearInput, LogitTransform | None]:
        """Return (the reference's hidden states and head, still unchecked; their transform).

        value       what the caller passed as `reference`: (hidden, weight), (hidden, weight, bias)
                    or (hidden, Head(...))
        transform   the policy's. It is returned unless the Head of the reference has another.
        exact       the divergence from the reference; None: only its log-probs are needed

        Raises ValueError if the value is something else.
        """
        if exact is not None:
            remedy = (
                f"{exact} needs the whole distribution of a reference or teacher: pass"
                f" {DISTRIBUTION_FORMS}."
            )
            require(value is not None, "reference", value, remedy)
        if not isinstance(value, tuple) or len(value) not in (2, 3):
            raise ValueError(f"reference is {type(value).__name__}: pass {REFERENCE_FORMS}.")
        hidden, weight, *bias = value
        if isinstance(weight, Head) and bias:
            raise ValueError(
                "reference has a Head and a third element, a bias: put it into the Head."
            )
        reference, own_transform = LinearInput.from_arguments(hidden, weight, None)
        if bias:
            reference = reference._replace(bias=bias[0])
        return reference, transform if own_transform is None else own_transform


#: The rows of a call as the caller passed them.
RowInput = LogitsInput | LinearInput


#: The kernels of a row source in a graph, whose operators pick the backend when the graph runs.
NO_KERNELS: Any = None


def pick_kernels(options: Options, device: torch.device) -> Backend:
    """Return the kernels of a call, from `options.backend` and the device of its tensors.

    With a vocabulary shard they also merge the softmax sums of all ranks.
    """
    kernels = backends.pick(options.backend, device, options.strict)
    return kernels if options.shard is None else on_shard(kernels, options.shard)


def matmul_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype that matmuls may use: autocast's if autocast is on, else hidden.dtype.

    hidden   [..., H], on the device whose autocast setting counts
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return hidden.dtype


# ---- hidden states and head


def with_unit_stride(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy of x if the stride of its last dimension is not 1.

    Kernels read the last dimension with stride 1.
    """
    # The stride of a dimension of length 1 is never used.
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    # contiguous() would return an empty tensor with its strides unchanged.
    return x.clone(memory_format=torch.contiguous_format)


def as_3d_logits(
    logits: Tensor,
    shape: torch.Size,
    device: torch.device,
    *,
    inplace: bool = False,
    may_be_empty: bool = False,
) -> Tensor:
    """Return logits [*shape, V] as [A, T, V] with unit stride in V.

    The result is a view if the strides allow it, else a copy. Kernels take A groups of T rows.
    Logits [N, V] become [1, N, V].

    logits         what the caller passed
    shape          the shape of targets, or the leading shape of rows that tokens share
    device         the device of targets
    inplace        whether the gradient will be written over the logits, which must be writable then
    may_be_empty   accept V = 0, which a rank's shard of the vocabulary may have

    Raises ValueError on a dtype, shape or device that does not fit, and on logits that inplace=True
    cannot write.
    """
    require_tensor("logits", logits, MATMUL_DTYPES, "a float32, bfloat16 or float16 tensor")
    if logits.shape[:-1] != shape:
        raise ValueError(
            f"logits has shape {list(logits.shape)}, but targets has {list(shape)}: logits must be"
            " targets' shape plus the vocabulary, row i predicting targets[i] (for a model's"
            " output usually logits[:, :-1] against ids[:, 1:])."
        )
    if logits.shape[-1] == 0 and not may_be_empty:
        raise ValueError(f"logits has shape {list(logits.shape)}: the vocabulary is empty.")
    require_device("logits", logits, device, "targets")
    if inplace:
        _check_writable(logits)
    logits = with_unit_stride(logits)
    if logits.dim() == 3:
        return logits
    if logits.dim() < 3:
        return logits.reshape(1, shape.numel(), logits.shape[-1])
    rows = logits.flatten(0, -3)  # [..., T, V] to [A, T, V]
    if inplace and rows.data_ptr() != logits.data_ptr():
        # flatten made a copy, because no strides of a view fit. The gradient must not be written
        # over a copy.
        raise ValueError(
            f"inplace=True, but logits of shape {list(logits.shape)} has strides that no [.., T, V]"
            " view has."
        )
    return rows


def _check_writable(logits: Tensor) -> None:
    """Raise ValueError if inplace=True cannot write the gradient over these logits.

    It cannot if the logits are a leaf of autograd that requires grad (such as a parameter, whose
    values would be lost), have no unit stride in the vocabulary, or have several elements in one
    place of memory.
    """
    if is_leaf_or_view_of_leaf(logits):
        raise ValueError(
            f"inplace=True, but logits of shape {list(logits.shape)} is a leaf that requires grad,"
            " or a view of one: its values would be overwritten. Pass the output of a computation"
            " (a model's logits), or inplace=False."
        )
    if logits.stride(-1) != 1 or overlaps_itself(logits):
        raise ValueError(
            f"inplace=True, but logits of shape {list(logits.shape)} has strides"
            f" {list(logits.stride())}: it must have unit stride in the vocabulary and no rows that"
            " share memory, as in an expanded dimension. Pass logits.contiguous() or"
            " inplace=False."
        )


def check_linear_tensors(
    inputs: LinearInput, layout: RowLayout, shard: VocabShard | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (hidden [..., H], weight [V, H], bias [V] or None) as plain tensors of this rank.

    inputs   what the caller passed. DTensors become their local tensors.
    layout   leading shape and device that the hidden states must have
    shard    this rank's part of the vocabulary; None: V is the whole vocabulary

    Raises ValueError naming the tensor that does not fit the layout or the others.
    """
    hidden = check_operand("hidden", inputs.hidden, layout, shard)
    weight = check_operand("weight", inputs.weight, layout, shard)
    bias = inputs.bias
    if bias is not None:
        bias = check_operand("bias", bias, layout, shard)
    shape = layout.shape  # the shape of targets
    if weight.shape[:-1] == shape and hidden.shape[:-1] != shape:
        raise ValueError(
            f"weight has shape {list(weight.shape)} and hidden {list(hidden.shape)}: they changed"
            " places."
        )
    # A rank's part of the vocabulary may be empty, [0, H]. A parameter that ZeRO-3 or FSDP has
    # sharded is 1-d or empty outside of its module.
    is_empty = weight.numel() == 0 and (shard is None or weight.shape[-1] == 0)
    if weight.dim() != 2 or is_empty:
        raise ValueError(
            f"weight has shape {list(weight.shape)}, not [V, H]: it looks sharded. DeepSpeed "
            "ZeRO-3: call inside deepspeed.zero.GatheredParameters([lm_head.weight]), and keep it "
            "gathered until after the backward. FSDP: call inside the forward of the module that "
            "owns the head, or pass weight.full_tensor()."
        )
    if hidden.dim() != len(shape) + 1 or hidden.shape[:-1] != shape:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)}, but targets has {list(shape)}: hidden must "
            "be targets' shape plus the hidden size, row i predicting targets[i] (for a model's "
            "output usually hidden[:, :-1] against ids[:, 1:])."
        )
    vocab_size, width = weight.shape
    if hidden.shape[-1] != width:
        hint = ""
        if hidden.shape[-1] == vocab_size:
            hint = (
                " hidden looks like logits (for those use grpo_loss or token_logprobs), or weight "
                "is transposed (pass weight.T)."
            )
        raise ValueError(
            f"hidden has shape {list(hidden.shape)} and weight {list(weight.shape)}: the last "
            f"dimensions must agree, [..., H] and [V, H].{hint}"
        )
    if bias is not None and bias.shape != (vocab_size,):
        raise ValueError(
            f"bias has shape {list(bias.shape)}, but weight has {list(weight.shape)}: it must be"
            f" [{vocab_size}]."
        )
    return hidden, weight, bias


def check_operand(name: str, x: Any, layout: RowLayout, shard: VocabShard | None) -> Tensor:
    """Return one of hidden states, weight and bias as a plain tensor of this rank.

    A plain tensor is returned as it is. A DTensor must be replicated, or, for weight and bias with
    a shard, split along the vocabulary. Its local tensor is returned.

    name     "hidden", "weight" or "bias"
    x        what the caller passed
    layout   has the device of targets, where x must be
    shard    this rank's part of the vocabulary, along which weight and bias may be split; or None

    Raises ValueError for a module, another dtype or device, and for another kind of DTensor.
    """
    if isinstance(x, torch.nn.Module):
        remedy = "the hidden states that the head gets"
        if name != "hidden":
            has_bias = getattr(x, "bias", None) is not None
            tensor = "Head(lm_head.weight, lm_head.bias)" if has_bias else "lm_head.weight"
            remedy = f"its tensor, {tensor}"
        raise ValueError(f"{name} is the module {type(x).__name__}: pass {remedy}.")
    if not isinstance(x, Tensor) or x.dtype not in MATMUL_DTYPES:
        actual = x.dtype if isinstance(x, Tensor) else type(x).__name__
        field = f", its {name}.last_hidden_state" if hasattr(x, "last_hidden_state") else ""
        raise ValueError(f"{name} is {actual}: pass a float32, bfloat16 or float16 tensor{field}.")
    require_same_device(name, x, layout.device)
    if shard is not None and name != "hidden":
        return shard.local(name, x, 0)
    if getattr(x, "placements", None) is not None:
        # If no one sums the gradient of hidden over the ranks here, each rank has the part of the
        # gradient that comes from its own ids.
        has_partial_gradient = shard is not None and not shard.reduce_hidden
        return local_tensor(name, x, has_partial_gradient)
    return x


def require_same_device(name: str, x: Tensor, device: torch.device) -> None:
    """Raise ValueError unless x is on the device of targets."""
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, but targets is on {device}: move one of them.")


def local_tensor(name: str, x: Any, has_partial_gradient: bool) -> Tensor:
    """Return the local tensor of a replicated DTensor, through which autograd passes the gradient.

    name                   the argument that an error names
    has_partial_gradient   whether the gradient is the sum over ranks of what each rank computes
                           (DTensor's Partial). Otherwise each rank computes the whole gradient.

    Raises ValueError for a DTensor that is not replicated.
    """
    refuse_managed(name, x)
    placements = x.placements
    if not all(p.is_replicate() for p in placements):
        remedy = "pass the rows of this rank as a plain tensor, hidden.to_local()."
        if name != "hidden":
            remedy = (
                f"pass {name}.full_tensor(grad_placements=[Partial()]) and divide its gradient by "
                "the number of ranks. If it is the vocabulary-sharded head of a tensor-parallel "
                "group, whose ranks have the same rows, pass Options(shard=VocabShard.of(weight))."
            )
        raise ValueError(
            f"{name} is a DTensor with placements {placements}, not replicated: {remedy}"
        )
    from torch.distributed.tensor import Partial

    grad_placements = [Partial()] * len(placements) if has_partial_gradient else None
    return x.to_local(grad_placements=grad_placements)


def check_weight_grad(
    weight_grad: Tensor, weight: Tensor, other_arguments: dict[str, Any]
) -> WeightGradMemory:
    """Check that the gradient of `weight` can be added to `weight_grad`, and return this memory.

    weight_grad       what the caller passed: [V, H], fp32 or the dtype of weight
    weight            [V, H], the weight of the output head
    other_arguments   what the call reads, by name: the gradient must not overwrite it

    Raises ValueError for a shape, dtype, device or layout that does not fit, for memory that the
    call reads, for a frozen weight, and for a weight that ZeRO-3 or FSDP gathers.
    """
    dtypes = (torch.float32, weight.dtype)
    remedy = f"float32, or {weight.dtype}, that of weight"
    require_tensor("weight_grad", weight_grad, dtypes, remedy)
    require_shape("weight_grad", weight_grad, weight.shape, "weight")
    require_device("weight_grad", weight_grad, weight.device, "weight")
    has_bad_layout = weight_grad.stride(-1) != 1 or overlaps_itself(weight_grad)
    if weight_grad.requires_grad or has_bad_layout:
        raise ValueError(
            "weight_grad must not require grad, have unit stride in its last dimension, and no two"
            " rows in one memory."
        )
    remedy = "the gradient would be added to it. Pass memory of its own."
    refuse_overlap("weight_grad", weight_grad, remedy, other_arguments, {})
    if not weight.requires_grad:
        raise ValueError(
            "weight_grad is given, but weight does not require grad: leave it out for a frozen"
            " head."
        )
    if hasattr(weight, "ds_id") or is_managed(weight):
        owner = "ZeRO-3" if hasattr(weight, "ds_id") else "FSDP"
        raise ValueError(
            f"weight_grad is given, but {owner} gathers this weight for a moment, reduces the "
            "gradient that autograd gives it, and ignores weight_grad: leave it out, or exclude the "
            "head from sharding."
        )
    # Megatron's weights have these attributes, see `WeightGradMemory`.
    is_main_grad = getattr(weight, "main_grad", None) is weight_grad
    has_flag = hasattr(weight, "grad_added_to_main_grad")
    return WeightGradMemory(
        total=weight_grad, flagged_weight=weight if is_main_grad and has_flag else None
    )


# ---- a reference or teacher: `reference=` for hidden states, `ref_logits=` for logits


def make_reference(
    value: Any,
    inputs: RowInput,
    policy: RowSource,
    layout: RowLayout,
    transform: LogitTransform | None,
    options: Options,
    exact: Exact | None,
) -> Reference:
    """Check the reference that the caller passed, and return its rows of logits without gradient.

    value       what the caller passed as `reference` (with hidden states) or `ref_logits`
    inputs      the policy's rows as the caller passed them
    policy      the same rows, checked
    layout      leading shape, device and mask of the rows, which the reference must fit as well
    transform   the policy's transform, which the reference has unless its value contains another
    options     the options of the call. Memory for the gradient of the weight is the policy's only.
    exact       the divergence from the reference; None: only its log-probs are used

    Raises ValueError naming the argument, also if its vocabulary is not the policy's.
    """
    name = inputs.reference_name
    refuse_several_references(value, name)
    reference_inputs, reference_transform = inputs.unpack_reference(value, transform, exact)
    source: RowSource
    try:
        source = reference_inputs.make_source(
            layout, reference_transform, replace(options, weight_grad=None)
        )
    except ValueError as error:
        # The message names "hidden" or "logits". The policy has arguments with these names too, so
        # say that the reference is meant.
        raise ValueError(f"{name}: {error}") from error
    if (source.vocab_size, source.num_columns) != (policy.vocab_size, policy.num_columns):
        columns = ""
        if options.shard is not None:
            columns = f" ({source.num_columns} and {policy.num_columns} of them on this rank)"
        raise ValueError(
            f"{name} has a vocabulary of {source.vocab_size}, but the policy has "
            f"{policy.vocab_size}{columns}: they must be the same ids. Cut off the padding of the "
            "longer one, weight[:vocab] or logits[..., :vocab]."
        )
    kind = NO_DIVERGENCE if exact is None else DivergenceKind(exact.direction, exact.share)
    return Reference(source.without_gradient(), kind)


def refuse_several_references(value: Any, name: str) -> None:
    """Raise ValueError if the caller passed a list of references: only one is accepted.

    value   what the caller passed as the argument `name`
    name    "reference" or "ref_logits"
    """
    function = "token_divergence" if name == "ref_logits" else "linear_divergence"
    remedy = (
        f"one teacher is taken. For several, add up weight * {function}(...) of each, and pass the "
        "sum as divergence= of objective_loss."
    )
    require(not isinstance(value, list), name, "list", remedy)
