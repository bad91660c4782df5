"""The vocabulary stage as one autograd Function, and the two sources that rows of logits come from.

    forward    source.stats: partials of each row's softmax, from which log-probs and entropy follow
    backward   source.pull:  the gradient of the source's tensors from the slopes of log-probs and entropy

A source is `Logits` or `Hidden`, which compute at once, or one of `operators.py`, which puts the same two calls into a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..backends import Backend, FusedRows, RowStats, RowTransform
from ..distributed import VocabShard
from ..linear import Engine, Head

if TYPE_CHECKING:
    from ..objective import Objective
    from ..token_stage import TokenRows

Tensor = torch.Tensor

NO_SECOND = "grpo_kernels has no second derivatives: the gradient of these functions cannot be differentiated again."


class _NotDifferentiable(torch.autograd.Function):
    """Calls a function of tensors whose results torch.func must not differentiate."""

    @staticmethod
    def forward(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(NO_SECOND)


def gradient_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in the backward of an autograd Function. Where its result could be differentiated again, that
    raises RuntimeError: autograd would take the gradient for a constant."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function(*arguments)
    if torch._C._are_functorch_transforms_active():  # they always record the backward: only a second derivative is refused
        return _NotDifferentiable.apply(function, *arguments)
    raise RuntimeError(f"{NO_SECOND} Call backward without create_graph=True.")


class Source(Protocol):
    """Where rows of logits come from. `tensors` are those that may get a gradient; vectors have one entry a row, [n]."""

    def stats(
        self, tensors: tuple[Any, ...], targets: Tensor, read: Tensor | None, transform: RowTransform, entropy: bool
    ) -> RowStats:
        """Statistics of all rows; a row that is not read has log-prob and entropy 0."""

    def pull(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...], targets: Tensor, read: Tensor | None, stats: RowStats,
        entropy: Tensor | None, d_logps: Tensor, d_entropy: Tensor | None, transform: RowTransform,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Gradients of `tensors`, None where not wanted. Slopes of rows that are not read are 0."""


@dataclass(frozen=True, eq=False)
class Logits:
    """Rows of logits [A, T, V] that are there. `inplace`: pull writes the gradient into their memory."""

    backend: Backend
    inplace: bool = False

    def stats(
        self, tensors: tuple[Any, ...], targets: Tensor, read: Tensor | None, transform: RowTransform, entropy: bool
    ) -> RowStats:
        return self.backend.row_stats(tensors[0], targets, read, transform, entropy)

    def pull(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...], targets: Tensor, read: Tensor | None, stats: RowStats,
        entropy: Tensor | None, d_logps: Tensor, d_entropy: Tensor | None, transform: RowTransform,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        (logits,) = tensors
        out = logits.detach() if self.inplace else torch.empty_like(logits)
        self.backend.row_grads(logits, targets, stats, entropy, d_logps, d_entropy, transform, out)
        if self.inplace:
            torch.autograd.graph.increment_version(logits)
        return (out,)

    def fused(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...], rows: TokenRows, objective: Objective, transform: RowTransform
    ) -> tuple[FusedRows, tuple[Tensor | None, ...]]:
        """Losses of all rows of an objective of one pass, and the gradient of the logits, None where not wanted."""
        (logits,) = tensors
        out = None
        if wanted[0]:
            out = logits.detach() if self.inplace else torch.empty_like(logits)
        result = self.backend.fused_loss(logits, rows, objective, transform, out)
        if out is not None and self.inplace:
            torch.autograd.graph.increment_version(logits)
        return result, (out,)


@dataclass(frozen=True, eq=False)
class Hidden:
    """Rows of logits that are computed from hidden states [n, H], weight [V, H] and bias [V] or None, some rows at a time.

    dtype    what the products run in.
    index    the rows that are read, [m] int64; None: found from `read`, for which the host waits on a GPU.
    active   how many of `index`, from its first on, can have a slope; None: all. On a CPU, where it costs no wait, rows whose
             slopes are zero are left out of the products as well.
    """

    backend: Backend
    dtype: torch.dtype
    shard: VocabShard | None = None
    index: Tensor | None = None
    active: int | None = None

    def stats(
        self, tensors: tuple[Any, ...], targets: Tensor, read: Tensor | None, transform: RowTransform, entropy: bool
    ) -> RowStats:
        head = Head(tensors[0], tensors[1], tensors[2], self.dtype, self.shard)
        with torch.autocast(targets.device.type, enabled=False):
            return Engine(head, self.backend).forward(self._rows(targets, read), targets, transform, entropy)

    def pull(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...], targets: Tensor, read: Tensor | None, stats: RowStats,
        entropy: Tensor | None, d_logps: Tensor, d_entropy: Tensor | None, transform: RowTransform,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        weight = tensors[1]
        emptied = self.shard is None if weight.numel() == 0 else weight.untyped_storage().nbytes() == 0
        if emptied:
            raise RuntimeError(
                "weight is gone before the backward, which computes the logits again: keep it gathered until after it (ZeRO-3: "
                "deepspeed.zero.GatheredParameters around both; FSDP: reshard_after_forward=False), or use linear_grpo_loss with "
                "an objective of one pass (Objective.one_pass), whose gradient is made in the forward."
            )
        index = self._rows(targets, read)[: self.active]
        if targets.device.type == "cpu":
            sloped = d_logps != 0 if d_entropy is None else (d_logps != 0) | (d_entropy != 0)
            index = index[sloped[index]]
        engine = Engine(Head(tensors[0], tensors[1], tensors[2], self.dtype, self.shard), self.backend, wanted)  # type: ignore[arg-type]
        with torch.autocast(targets.device.type, enabled=False):
            engine.backward(index, targets, stats, entropy, d_logps, d_entropy, transform)
        return tuple(None if g is None else g.to(x.dtype) for g, x in zip(engine.gradients(), tensors, strict=True))

    def fused(
        self, tensors: tuple[Any, ...], wanted: tuple[bool, ...], rows: TokenRows, objective: Objective, transform: RowTransform
    ) -> tuple[FusedRows, tuple[Tensor | None, ...]]:
        """Losses of all rows of an objective of one pass, and the gradients of `tensors`, None where not wanted."""
        index, n, device = self._rows(rows.targets, rows.read), rows.targets.numel(), rows.targets.device
        active = index.numel() if self.active is None else self.active
        result = FusedRows(*(torch.zeros(n, device=device, dtype=torch.float32) for _ in FusedRows._fields))
        engine = Engine(Head(tensors[0], tensors[1], tensors[2], self.dtype, self.shard), self.backend, wanted)  # type: ignore[arg-type]
        with torch.autocast(device.type, enabled=False):
            engine.fused(index[:active], rows, objective, transform, result, any(wanted))
            engine.fused(index[active:], rows, objective, transform, result, False)
        return result, engine.gradients() if any(wanted) else (None,) * 3

    def _rows(self, targets: Tensor, read: Tensor | None) -> Tensor:
        if self.index is not None:
            return self.index
        return torch.arange(targets.numel(), device=targets.device) if read is None else read.nonzero()[:, 0]


class VocabularyStage(torch.autograd.Function):
    """(log-probs, entropy or None, partials), each fp32 with one entry a row; the partials have no gradient."""

    @staticmethod
    def forward(
        source: Source,
        entropy: str,  # "none", "value" or "gradient"
        targets: Tensor,  # int64 [n]
        read: Tensor | None,  # bool [n]
        scale: float,
        softcap: float,
        inv_temperature: float | Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        transform = RowTransform(scale, softcap, inv_temperature)
        stats = source.stats(tensors, targets, read, transform, entropy != "none")
        return stats.logps, None if entropy == "none" else stats.entropy, torch.stack([stats.max, stats.sum, stats.target])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        source, entropy, targets, read, scale, softcap, inv_temperature, *tensors = inputs
        _, H, partials = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(partials, *([H] if entropy == "value" else []))
        per_row = isinstance(inv_temperature, Tensor)
        ctx.source, ctx.numbers = source, (scale, softcap, None if per_row else inv_temperature)
        ctx.save_for_backward(targets, read, inv_temperature if per_row else None, H, partials, *tensors)

    @staticmethod
    def backward(ctx: Any, d_logps: Tensor | None, d_entropy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if d_logps is None and d_entropy is None:
            return (None,) * (2 + len(saved))
        gradients = gradient_once(_pull, ctx.source, ctx.needs_input_grad[7:], ctx.numbers, d_logps, d_entropy, *saved)
        return *(None,) * 7, *gradients


def vocabulary_stage(
    source: Source, entropy: str, targets: Tensor, read: Tensor | None, transform: RowTransform, *tensors: Any
) -> Any:
    """`VocabularyStage` of these arguments: (log-probs, entropy or None, partials)."""
    arguments = (source, entropy, *map(_savable, (targets, read, *transform)), *tensors)
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():  # torch.compile knows such a Function with gradients only
        return VocabularyStage.forward(*arguments)
    return VocabularyStage.apply(*arguments)


def _savable(x: Any) -> Any:
    """x as autograd may save it: a tensor made in inference mode has to be copied."""
    if (
        isinstance(x, Tensor)
        and not torch.compiler.is_compiling()
        and x.is_inference()
        and not torch.is_inference_mode_enabled()
    ):
        return x.clone()
    return x


def _pull(
    source: Source, wanted: tuple[bool, ...], numbers: tuple[float, float, float | None], d_logps: Tensor | None,
    d_entropy: Tensor | None, targets: Tensor, read: Tensor | None, inv_temperatures: Tensor | None, H: Tensor | None,
    partials: Tensor, *tensors: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    scale, softcap, inv_temperature = numbers
    transform = RowTransform(scale, softcap, inv_temperature if inv_temperatures is None else inv_temperatures)  # type: ignore[arg-type]
    if d_logps is None:
        d_logps = torch.zeros_like(partials[0])
    return source.pull(
        tensors, wanted, targets, read, RowStats(partials[0], partials[1], None, partials[2]), H,
        _slopes(d_logps, read), None if d_entropy is None else _slopes(d_entropy, read), transform,
    )  # fmt: skip


def _slopes(upstream: Tensor, read: Tensor | None) -> Tensor:
    """An upstream gradient as contiguous fp32 [n], 0 where the row was not read (even if NaN arrives there)."""
    upstream = upstream.to(torch.float32)
    return (upstream if read is None else torch.where(read, upstream, 0.0)).contiguous()
