"""A vocabulary that is sharded over ranks: which rank has which ids, and a backend that merges the ranks' statistics of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import as_number, require, require_whole
from .backends import Backend
from .partials import MIXED, TRANSFORMED, LogitRows, Partials, Slopes, merge


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of a vocabulary that the ranks of a group share: `Options(shard=)`.

        shard = VocabShard.of(lm_head.weight, group)  # once; all ranks of the group call
        out = linear_grpo_loss(hidden, lm_head.weight, batch, objective, options=Options(shard=shard))

    start   the id of this rank's first row of the head (column of the logits).
    vocab   number of ids in the whole vocabulary. Rows beyond it are padding: they take no part in the softmax and get a
            gradient of exactly 0.
    group   the process group; None: the default group. Without torch.distributed there is one rank.
    reduce_hidden   True: the gradient of the hidden states is summed over the group here, one all-reduce per call. False: each
            rank gets its own share of it, for a model whose preceding layer sums the shares (Megatron's
            copy_to_tensor_model_parallel_region, or the reduce-scatter of sequence parallelism).

    Every id in [0, vocab) belongs to exactly one rank; parts may be uneven, and a rank may have none. All ranks of the group
    pass the same rows (hidden states, targets, batch) and their own weight or logits, and get the same loss, log-probs and
    entropies, bitwise. A loss is that of the rows, not of a rank: denominators are over the data-parallel ranks only.

    Per call from logits, and per chunk of rows from hidden states, there is one all-gather of the rows' softmax partials:
    16 bytes a row and rank (12 without entropy). The backward of log-probs has none but the sum of d_hidden. Kept sets are given
    whole to all ranks, and each takes the ids of its part: such an all-gather for each block of rows whose sets have like sizes.
    `at=` sums 4 bytes an id.
    Source: the split softmax of Megatron-LM (arXiv 1909.08053, section 3), with the statistics merged in one exchange as
    online softmax merges tiles (arXiv 1805.02867).

    Raises ValueError naming the field that is wrong.
    """

    start: int
    vocab: int
    group: Any = None
    reduce_hidden: bool = True

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("vocab", 1)):
            require_whole(name, getattr(self, name), f"it is a whole number of ids, at least {least}.", least)
            object.__setattr__(self, name, as_number(getattr(self, name)))
        require(isinstance(self.reduce_hidden, bool), "reduce_hidden", self.reduce_hidden, "pass True or False.")
        require(
            _rank(self.group) >= 0, "group", self.group, "this rank is not in it: pass the group that it shares the head with."
        )

    @classmethod
    def of(
        cls, weight: Tensor, group: Any = None, *, vocab: int | None = None, dim: int = 0, reduce_hidden: bool = True
    ) -> VocabShard:
        """The shard that `weight` [V / ranks, H] is: the ranks' parts in the order of the ranks, of any sizes.

        weight  this rank's rows of the head as a plain tensor: the ranks exchange their sizes, once, for which the host waits.
                Or a DTensor with Shard(dim) of a one-dimensional tensor-parallel mesh, for example from parallelize_module:
                the sizes are known then, so there is no exchange, and `group` is that of the mesh. A parameter sharded by FSDP
                looks the same but is not one, since FSDP's ranks have different rows: make the shard in the forward of a module
                that FSDP gathers.
        vocab   number of real ids, if the head is padded; None: all are.
        dim     of `weight` that the vocabulary is cut along; -1 for logits.

        Raises ValueError on a DTensor that is cut in another way."""
        placements = getattr(weight, "placements", None)
        if placements is None:
            widths = gathered(torch.tensor(weight.shape[dim], device=weight.device), group)
            start, whole = int(widths[: _rank(group)].sum()), int(widths.sum())
        else:
            mesh, whole = weight.device_mesh, weight.shape[dim]  # type: ignore[attr-defined]
            refuse_managed("weight", weight)
            if not _cut_along(weight, dim) or group is not None:
                raise ValueError(
                    f"weight is a DTensor with placements {placements}: it must be cut by Shard({dim}) over a mesh of one "
                    "dimension, which is the group then (leave group out)."
                )
            group = mesh.get_group()
            start = min(mesh.get_local_rank() * -(-whole // mesh.size()), whole)  # as torch.chunk cuts
        if vocab is not None:
            require(isinstance(vocab, int) and 1 <= vocab <= whole, "vocab", vocab, f"the ranks hold {whole} rows in all.")
        return cls(start, whole if vocab is None else vocab, group, reduce_hidden)

    @property
    def ranks(self) -> int:
        """How many share the vocabulary."""
        return _ranks(self.group)

    def local(self, name: str, x: Tensor, dim: int) -> Tensor:
        """The local tensor of x, a DTensor that is cut along `dim`; a plain tensor as it is. `name`: what an error calls it."""
        placements = getattr(x, "placements", None)
        if placements is None:
            return x
        refuse_managed(name, x)
        if not _cut_along(x, dim):
            raise ValueError(
                f"{name} is a DTensor with placements {placements}: with shard= it must be cut by Shard({dim}) over a mesh of one "
                "dimension, or be the plain tensor of this rank."
            )
        return x.to_local()  # type: ignore[attr-defined]

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, in place."""
        if _ranks(self.group) > 1:
            dist.all_reduce(x, group=self.group)
        return x


def check_shard(shard: object) -> None:
    if not isinstance(shard, VocabShard):
        raise ValueError(
            f"shard={shard!r}: pass a VocabShard, for example VocabShard.of(lm_head.weight, group), or leave it out."
        )


def _of_part(name: str) -> Any:
    """A method of the backend that runs on this rank's part."""
    return lambda self, *arguments: getattr(self.backend, name)(*arguments)


class VocabParallel(Backend):
    """A backend for rows that are sharded over ranks: it runs another backend on this rank's part, with one exchange."""

    makes_all = True

    def __init__(self, backend: Backend, shard: VocabShard) -> None:
        self.backend, self.shard = backend, shard
        self.writes_behind_reads = backend.writes_behind_reads

    def stats(self, rows: LogitRows, names: tuple[str, ...]) -> Partials:
        """Statistics of whole rows from this rank's part of them, the same on all ranks: one all-gather. MIXED are left alone: that
        visit has an exchange of its own."""
        part, first = self.backend.first_visit(self._own(rows), names), tuple(x for x in names if x not in MIXED)
        sent = own = part.values[: len(first)]
        if "top" in names:  # an id counts from the rank's first column, so that is sent too
            start = torch.full((1, rows.n), self.shard.start, dtype=torch.int32, device=own.device)
            sent = torch.cat([own, start.view(torch.float32)])
        everyone = gathered(sent, self.shard.group)
        starts = everyone[:, -1].view(torch.int32) if "top" in names else None
        own.copy_(merge(everyone[:, : len(first)], first, rows.read, starts, part).values)
        return part

    def mixed(self, rows: LogitRows, partials: Partials) -> Tensor:
        """Sums over whole rows from this rank's part of them."""
        return self.shard.sum_over_ranks(self.backend.mixed(self._own(rows), partials))

    def pull(self, rows: LogitRows, partials: Partials, slopes: Slopes, out: Tensor) -> None:
        """This rank's columns of the gradient, from statistics of whole rows."""
        columns = self._columns(rows)
        if columns:
            self.backend.gradient(self._own(rows), partials, slopes, out[..., :columns])
        padding = out[..., columns:]
        if padding.numel():
            at = torch.arange(*(rows.part or (0, out.shape[0] * out.shape[1])), device=out.device)
            padding[at // out.shape[1], at % out.shape[1]] = 0

    evaluate, scale_, slot_logits, add_weight_rows, add_hidden_rows = map(
        _of_part, ("evaluate", "scale_", "slot_logits", "add_weight_rows", "add_hidden_rows")
    )

    def _columns(self, rows: LogitRows) -> int:
        """How many columns of this rank's rows are ids; the others are padding."""
        return min(rows.logits.shape[-1], max(0, self.shard.vocab - self.shard.start))

    def _own(self, rows: LogitRows) -> LogitRows:
        """The rows as this rank has them: the columns that are ids, and targets counted in them. Where it has none, one of -inf,
        which is no target and adds nothing. The second stream is sharded like the first."""
        columns, second = self._columns(rows), rows.second
        if columns:
            second = None if second is None else second._replace(logits=second.logits[..., :columns])
            return rows._replace(logits=rows.logits[..., :columns], targets=rows.targets - self.shard.start, second=second)
        none: dict[str, Any] = {
            "logits": rows.logits.new_full((*rows.logits.shape[:-1], 1), -torch.inf),
            "transform": TRANSFORMED,
        }
        second = None if second is None else second._replace(**none)
        return rows._replace(targets=torch.full_like(rows.targets, -1), second=second, **none)


def on_shard(backend: Backend, shard: VocabShard | None) -> Backend:
    """The backend for this rank's part `shard` of the rows; None: whole rows."""
    return backend if shard is None else VocabParallel(backend, shard)


def is_managed(x: Any) -> bool:
    """Whether this tensor is a parameter that FSDP2 or replicate() manages, in shards or gathered. Placements do not show it: a
    shard of FSDP looks like one of tensor parallelism, but FSDP's ranks have different rows, and only its hooks reduce the
    gradient."""
    try:
        from torch.distributed._composable_state import _module_state_mapping

        states = {state for state in (ref() for ref in _module_state_mapping.values()) if state is not None}
        for state in states:
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for group in filter(None, groups):
                if any(_is_parameter(x, p) for p in group.fsdp_params):
                    return True
    except (ImportError, AttributeError):  # private to torch: if it has changed, assume not managed
        pass
    return False


def refuse_managed(name: str, x: Any) -> None:
    if is_managed(x):
        raise ValueError(
            f"{name} is a DTensor, a parameter of FSDP or replicate() outside its module's forward, where it is not gathered and no "
            "hook reduces its gradient: call FusedLMHead, or do this in the forward of the module that owns the parameter."
        )


def _is_parameter(x: Any, p: Any) -> bool:
    """Whether x is the parameter `p` of FSDP."""
    if not hasattr(x, "placements"):  # it is gathered
        return x is getattr(p, "_unsharded_param", None)
    own, other = x._local_tensor, p.sharded_param._local_tensor
    return x is p.sharded_param or (own.numel() > 0 and own.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _cut_along(x: Any, dim: int) -> bool:
    """Whether a DTensor is cut into consecutive parts along `dim` and in no other way."""
    return len(x.placements) == 1 and x.placements[0].is_shard() and x.placements[0].dim % x.dim() == dim % x.dim()


def gathered(x: Tensor, group: Any) -> Tensor:
    """[ranks, ...]: x of each rank."""
    if _ranks(group) == 1:
        return x[None]
    everyone = x.new_empty(_ranks(group), *x.shape)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13
    gather(everyone, x[None], group=group)
    return everyone


def _ranks(group: Any) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _rank(group: Any) -> int:
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0
