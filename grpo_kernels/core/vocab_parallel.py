"""A vocabulary that is sharded over ranks: which rank has which ids, and kernels over such rows.

Each rank computes the softmax sums of its columns. One all-gather merges them into the sums of
whole rows, as online softmax merges tiles (arXiv 1805.02867).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import as_number, require, require_whole
from .backends import Backend, BackendWrapper
from .softmax import (
    MIXTURE_SUMS,
    TRANSFORMED,
    GradientCoefficients,
    LogitRows,
    SoftmaxSums,
    merge_shards,
)


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of a vocabulary that the ranks of a group share: `Options(shard=)`.

        shard = VocabShard.of(lm_head.weight, group)  # once; all ranks of the group call
        options = Options(shard=shard)
        out = linear_grpo_loss(hidden, lm_head.weight, batch, objective, options=options)

    start           the id of this rank's first row of the head (column of the logits)
    vocab           number of ids in the whole vocabulary. Rows beyond it are padding: they take no
                    part in the softmax and get a gradient of exactly 0.
    group           the process group; None: the default group. Without torch.distributed there is
                    one rank.
    reduce_hidden   True: the gradient of the hidden states is summed over the group here, one
                    all-reduce per call. False: each rank gets its own share of it, for a model
                    whose preceding layer sums the shares (Megatron's
                    copy_to_tensor_model_parallel_region, or the reduce-scatter of sequence
                    parallelism).

    Every id in [0, vocab) belongs to exactly one rank. Parts may be uneven, and a rank may have
    none. All ranks of the group pass the same rows (hidden states, targets, batch) and their own
    weight or logits. They get the same loss, log-probs and entropies, bitwise. A loss is over the
    rows, not over the ranks: denominators are summed over the data-parallel ranks only.

    Each call from logits, and each chunk of rows from hidden states, takes one all-gather of the
    softmax sums of its rows: 16 bytes a row and rank (12 without entropy). The backward of
    log-probs takes only the all-reduce of the gradient of the hidden states. Candidate sets are
    given whole to all ranks, and each rank takes the ids of its part. Single logits (`logits_at`)
    are summed over the ranks, 4 bytes an id.

    Source: the split softmax of Megatron-LM (arXiv 1909.08053, section 3), with the sums merged in
    one exchange.

    Raises ValueError naming the field that is wrong.
    """

    start: int
    vocab: int
    group: Any = None
    reduce_hidden: bool = True

    def __post_init__(self) -> None:
        """Check the fields. Raise ValueError naming the one that is wrong."""
        for name, minimum in (("start", 0), ("vocab", 1)):
            value = getattr(self, name)
            remedy = f"it is a whole number of ids, at least {minimum}."
            require_whole(name, value, remedy, minimum)
            object.__setattr__(self, name, as_number(value))
        is_bool = isinstance(self.reduce_hidden, bool)
        require(is_bool, "reduce_hidden", self.reduce_hidden, "pass True or False.")
        remedy = "this rank is not in it: pass the group that it shares the head with."
        require(rank_in(self.group) >= 0, "group", self.group, remedy)

    @classmethod
    def of(
        cls,
        weight: Tensor,
        group: Any = None,
        *,
        vocab: int | None = None,
        dim: int = 0,
        reduce_hidden: bool = True,
    ) -> VocabShard:
        """Return this rank's shard of a head whose rows are split over ranks, in their order.

        All ranks of the group must call this.

        weight   a plain tensor [num_columns, H]: this rank's rows of the head, any number of them.
                 The ranks tell each other their numbers of rows, for which the host waits.
                 Or a DTensor with Shard(dim) of a one-dimensional tensor-parallel mesh, for example
                 from parallelize_module. It knows the numbers, so there is no exchange, and the
                 group is that of the mesh.
                 A parameter sharded by FSDP looks the same, but FSDP's ranks have different
                 batches: make the shard in the forward of a module that FSDP gathers.
        group    the process group; None: the default group, or the group of the mesh
        vocab    number of real ids, if the head is padded; None: all are
        dim      of `weight` that the vocabulary is sharded along; -1 for logits

        Raises ValueError for a DTensor that is sharded in another way.
        """
        placements = getattr(weight, "placements", None)
        if placements is None:
            width = torch.tensor(weight.shape[dim], device=weight.device)
            widths = gather_from_ranks(width, group)
            start = int(widths[: rank_in(group)].sum())
            total = int(widths.sum())
        else:
            mesh = weight.device_mesh  # type: ignore[attr-defined]
            total = weight.shape[dim]
            refuse_managed("weight", weight)
            if not is_sharded_along(weight, dim) or group is not None:
                raise ValueError(
                    f"weight is a DTensor with placements {placements}: it must be cut by "
                    f"Shard({dim}) over a mesh of one dimension, which is the group then (leave "
                    "group out)."
                )
            group = mesh.get_group()
            rows_per_rank = -(-total // mesh.size())  # as torch.chunk splits
            start = min(mesh.get_local_rank() * rows_per_rank, total)
        if vocab is not None:
            is_valid = isinstance(vocab, int) and 1 <= vocab <= total
            require(is_valid, "vocab", vocab, f"the ranks hold {total} rows in all.")
        return cls(start, total if vocab is None else vocab, group, reduce_hidden)

    @property
    def ranks(self) -> int:
        """Number of ranks that share the vocabulary, 1 without torch.distributed."""
        return num_ranks(self.group)

    def num_ids(self, num_columns: int) -> int:
        """Return how many of this rank's columns stand for token ids. The others are padding.

        num_columns   number of rows of the head, or columns of the logits, on this rank
        """
        return min(num_columns, max(0, self.vocab - self.start))

    def local(self, name: str, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a DTensor that is sharded along `dim`; x if it is no DTensor.

        name   the argument that an error names
        x      weight or bias of a head, or logits
        dim    the dimension of the vocabulary

        Raises ValueError for a DTensor that is sharded in another way.
        """
        placements = getattr(x, "placements", None)
        if placements is None:
            return x
        refuse_managed(name, x)
        if not is_sharded_along(x, dim):
            raise ValueError(
                f"{name} is a DTensor with placements {placements}: with shard= it must be cut by "
                f"Shard({dim}) over a mesh of one dimension, or be the plain tensor of this rank."
            )
        return x.to_local()  # type: ignore[attr-defined]

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Replace x by its sum over the ranks of the group, in place, and return it.

        All ranks of the group must call this, with x of the same shape.
        """
        if num_ranks(self.group) > 1:
            dist.all_reduce(x, group=self.group)
        return x


def check_shard(shard: object) -> None:
    """Raise ValueError unless `shard` is a VocabShard."""
    if not isinstance(shard, VocabShard):
        raise ValueError(
            f"shard={shard!r}: pass a VocabShard, for example VocabShard.of(lm_head.weight, group),"
            " or leave it out."
        )


class VocabParallel(BackendWrapper):
    """Kernels over rows that are sharded over ranks.

    kernels   run on this rank's columns
    shard     which columns these are
    """

    def __init__(self, kernels: Backend, shard: VocabShard) -> None:
        """Wrap kernels that run on this rank's columns.

        kernels   the kernels
        shard     which columns of the vocabulary these are
        """
        super().__init__(kernels)
        self.shard = shard

    def run_sums_kernel(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return softmax sums over the columns of all ranks, the same on each rank.

        Each rank computes the sums of its columns and sends them to the others (one all-gather).
        `merge_shards` merges them. MIXTURE_SUMS need the merged sums of a first pass. They have
        memory in the result but no values yet, and `run_mixture_kernel` computes them later.

        rows    the rows of the call, with this rank's columns and targets of the whole vocabulary
        names   of the sums to compute, some of `softmax.SUMS`
        """
        sums = self.kernels.first_pass_sums(self.local_rows(rows), names)
        first_pass = tuple(name for name in names if name not in MIXTURE_SUMS)
        local_values = sums.values[: len(first_pass)]  # MIXTURE_SUMS are the last rows
        sent = local_values
        if "argmax" in names:
            # A rank's argmax is a column number, so the rank also sends the id of its first column:
            # the bits of an int32 in an fp32 row, to send one tensor.
            first_id = torch.full(
                (1, rows.num_rows), self.shard.start, dtype=torch.int32, device=sent.device
            )
            sent = torch.cat([local_values, first_id.view(torch.float32)])
        received = gather_from_ranks(sent, self.shard.group)
        shards = [
            SoftmaxSums(values[: len(first_pass)], first_pass, sums.kind) for values in received
        ]
        first_ids = received[:, -1].view(torch.int32) if "argmax" in names else None
        local_values.copy_(merge_shards(shards, rows.mask, first_ids).values)
        return sums

    def run_mixture_kernel(self, rows: LogitRows, sums: SoftmaxSums) -> Tensor:
        """Return MIXTURE_SUMS, fp32 [2, num_rows], over the columns of all ranks.

        Each rank sums over its columns, and one all-reduce adds these sums up. They need no common
        maximum, because their terms are made of probabilities.

        rows   the rows of the call, with this rank's columns
        sums   softmax sums of the first pass, over the columns of all ranks
        """
        local_sums = self.kernels.run_mixture_kernel(self.local_rows(rows), sums)
        return self.shard.sum_over_ranks(local_sums)

    def run_gradient_kernel(
        self, rows: LogitRows, sums: SoftmaxSums, coefficients: GradientCoefficients, out: Tensor
    ) -> None:
        """Write d loss / d logits of this rank's columns into `out`, and 0 into padding columns.

        There is no exchange between ranks: `sums` has what they know of the other columns.

        rows           the rows of the call, with this rank's columns
        sums           softmax sums over the columns of all ranks
        coefficients   numbers of each row, from which its gradient follows
        out            [A, T, num_columns], A groups of T rows
        """
        num_ids = self.shard.num_ids(rows.logits.shape[-1])
        if num_ids:
            local_rows = self.local_rows(rows)
            self.kernels.softmax_gradient(local_rows, sums, coefficients, out[..., :num_ids])
        padding = out[..., num_ids:]
        if padding.numel():
            rows_per_group = out.shape[1]
            first = rows.first_row
            row_ids = torch.arange(first, first + rows.num_rows, device=out.device)
            # Row number a * T + t is out[a, t]. Other rows of `out` belong to other calls.
            padding[row_ids // rows_per_group, row_ids % rows_per_group] = 0

    def local_rows(self, rows: LogitRows) -> LogitRows:
        """Return the rows as the kernels of one rank take them: no padding, targets as columns.

        Logits [A, T, num_columns] may end with columns that stand for no token id. They are left
        out. A target becomes a column number of this rank. The targets of other ranks are then
        below 0 or too large, and the kernels return NaN as their logit. The reference is sharded
        like the policy.

        rows   the rows of a call, with this rank's columns and targets of the whole vocabulary
        """
        num_ids = self.shard.num_ids(rows.logits.shape[-1])
        if num_ids == 0:
            return self.padding_rows(rows)
        reference = rows.reference
        if reference is not None:
            reference = reference._replace(logits=reference.logits[..., :num_ids])
        return rows._replace(
            logits=rows.logits[..., :num_ids],
            targets=rows.targets - self.shard.start,
            reference=reference,
        )

    def padding_rows(self, rows: LogitRows) -> LogitRows:
        """Return the rows of a rank that has no token id: one column of -inf, which adds nothing.

        The rank still computes sums, because the other ranks wait for it in the all-gather.
        """
        logits = rows.logits.new_full((*rows.logits.shape[:-1], 1), -torch.inf)
        reference = rows.reference
        if reference is not None:
            reference = reference._replace(logits=logits, transform=TRANSFORMED)
        return rows._replace(
            logits=logits,
            targets=torch.full_like(rows.targets, -1),
            transform=TRANSFORMED,
            reference=reference,
        )


def on_shard(kernels: Backend, shard: VocabShard | None) -> Backend:
    """Return kernels over rows whose columns are split over ranks; `kernels` itself for None.

    kernels   run on this rank's columns
    shard     which columns these are; None: all of them are on this rank
    """
    return kernels if shard is None else VocabParallel(kernels, shard)


# ---- DTensors


def is_managed(x: Any) -> bool:
    """Return whether x is a parameter that FSDP2 or replicate() manages, sharded or gathered.

    The placements of a DTensor do not show this: a shard of FSDP looks like one of tensor
    parallelism. But FSDP's ranks have different batches, and only its hooks reduce the gradient. So
    this looks for x among the parameters of all modules that FSDP2 manages.
    """
    # These names are private to torch. If they have changed, assume that x is not managed.
    try:
        from torch.distributed._composable_state import _module_state_mapping

        references = list(_module_state_mapping.values())
        states = {state for state in (ref() for ref in references) if state is not None}
        return any(is_parameter_of_state(x, state) for state in states)
    except (ImportError, AttributeError):
        return False


def is_parameter_of_state(x: Any, state: Any) -> bool:
    """Return whether x is one of the parameters of a module that FSDP2 manages.

    x       a tensor that the caller passed, such as the weight of a head
    state   FSDP2's private state of the module
    """
    groups = getattr(state, "_fsdp_param_groups", None)
    if not groups:  # older versions of torch have one group
        groups = [getattr(state, "_fsdp_param_group", None)]
    parameters = [parameter for group in groups if group for parameter in group.fsdp_params]
    return any(is_parameter(x, parameter) for parameter in parameters)


def is_parameter(x: Any, parameter: Any) -> bool:
    """Return whether x is the sharded or the gathered tensor of a parameter of FSDP2.

    parameter   FSDP2's private record of the parameter
    """
    if not hasattr(x, "placements"):  # a gathered parameter is a plain tensor
        return x is getattr(parameter, "_unsharded_param", None)
    if x is parameter.sharded_param:
        return True
    # x may also be another DTensor over the memory of the sharded parameter. Tensors without
    # elements share no memory.
    storage = x._local_tensor.untyped_storage()
    parameter_storage = parameter.sharded_param._local_tensor.untyped_storage()
    return x._local_tensor.numel() > 0 and storage._cdata == parameter_storage._cdata


def refuse_managed(name: str, x: Any) -> None:
    """Raise ValueError if x is a parameter that FSDP2 or replicate() manages.

    name   the argument that the error names
    """
    if is_managed(x):
        raise ValueError(
            f"{name} is a DTensor, a parameter of FSDP or replicate() outside its module's "
            "forward, where it is not gathered and no hook reduces its gradient: call FusedLMHead, "
            "or do this in the forward of the module that owns the parameter."
        )


def is_sharded_along(x: Any, dim: int) -> bool:
    """Return whether a DTensor is split into consecutive parts along `dim`, and in no other way.

    x     a DTensor
    dim   may be negative, as may the dimension of its placement
    """
    # A mesh of several dimensions has as many placements.
    if len(x.placements) != 1 or not x.placements[0].is_shard():
        return False
    return x.placements[0].dim % x.dim() == dim % x.dim()  # -1 and x.dim() - 1 are the same


# ---- ranks of a group


def gather_from_ranks(x: Tensor, group: Any) -> Tensor:
    """Return x of each rank of a group, [num_ranks, *x.shape]. All ranks must call this."""
    if num_ranks(group) == 1:
        return x[None]
    received = x.new_empty(num_ranks(group), *x.shape)
    # The function has a new name since torch 2.13.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(received, x[None], group=group)
    return received


def num_ranks(group: Any) -> int:
    """Return the number of ranks of a group, 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank_in(group: Any) -> int:
    """Return this rank's number in a group, 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0
