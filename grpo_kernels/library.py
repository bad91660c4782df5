"""The four functions as operators of torch.library, which is how torch.compile and torch.func see them.

    torch.ops.grpo_kernels.token_logprobs, linear_logprobs, grpo_loss, linear_grpo_loss

Each has a schema, a fake implementation and an autograd formula, so that a graph goes through without a break and with
symbolic row counts. In eager code the autograd Functions of logprobs.py and losses.py run instead: they hand a gradient over
without a copy and work in place, which an operator may not. A second derivative raises RuntimeError: the operators of
the backward have no formula.

Operators take tensors, numbers and text. An Objective is text: the handle under which it was noted when it was made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import backends
from .batch import TokenBatch
from .layout import check_targets, flat, logit_rows
from .objective import Denominators, Objective, objective_of
from .transform import LogitTransform, as_transform

if TYPE_CHECKING:
    from .distributed import VocabShard
    from .linear import Head
    from .losses import LossCall, LossOutput

Tensor = torch.Tensor
Many = tuple[Tensor, ...]

FIELDS = (
    "targets", "advantages", "mask", "old_logps", "ref_logps", "weights", "cu_seqlens", "sampler_logps", "nll_weights", "groups",
)  # fmt: skip
BATCH = (
    "Tensor targets, Tensor advantages, Tensor? mask, Tensor? old_logps, Tensor? ref_logps, Tensor? weights, "
    "Tensor? cu_seqlens, Tensor? sampler_logps, Tensor? nll_weights, Tensor? groups, "
    "Tensor? normalizer, Tensor? kl_normalizer, Tensor? entropy_normalizer, str objective, bool skip_inactive"
)
TRANSFORM = "Tensor? row_temperature, float temperature, float softcap, float scale, str backend, bool strict"
ROWS = "Tensor targets, Tensor? mask"
STATS = "Tensor maxima, Tensor sums, Tensor chosen, Tensor entropies, Tensor d_logps, Tensor? d_entropy"
HEAD = "Tensor hidden, Tensor weight, Tensor? bias, ScalarType dtype"
WANTED = "bool d_hidden, bool d_weight, bool d_bias"

NO_SECOND = "grpo_kernels has no second derivatives: the gradient of these functions cannot be differentiated again."


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Of an autograd Function: create_graph=True raises, where it would go on with a gradient that is a constant."""

    @functools.wraps(backward)
    def checked(ctx: Any, *upstream: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{NO_SECOND} Call backward without create_graph=True.")
        return backward(ctx, *upstream)

    return checked


def is_traced() -> bool:
    """Whether torch.compile, torch.export or a transform of torch.func looks on."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


class Operator:
    """A function as an operator of torch.library, and as an autograd Function for torch.func, which does not take operators
    of Python. Without `differentiate` a derivative raises RuntimeError."""

    function: Any

    def __init__(self, function: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> None:
        name = function.__name__.removeprefix("_")
        # From hidden states the host waits for row counts, which a CUDA graph cannot hold.
        unsafe = getattr(torch.Tag, "cudagraph_unsafe", None) if name.startswith("linear") else None
        options: dict[str, Any] = {"tags": (unsafe,)} if unsafe is not None else {}
        self.op = torch.library.custom_op(f"grpo_kernels::{name}", function, mutates_args=(), schema=schema, **options)
        self.op.register_fake(fake)

        def no_formula(ctx: Any, *_: Any) -> None:
            raise RuntimeError(NO_SECOND)

        self._make(lambda ctx, inputs, output: None, no_formula)

    def _make(self, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
        members = {"forward": staticmethod(self.op), "setup_context": staticmethod(setup), "backward": staticmethod(backward)}
        self.function = type("Function", (torch.autograd.Function,), members)

    def differentiate(
        self, backward: Callable[..., Any], setup: Callable[..., None], setup_for_func: Callable[..., None] | None = None
    ) -> None:
        self.op.register_autograd(backward, setup_context=setup)
        self._make(setup_for_func or setup, backward)

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
            return self.op(*arguments)
        return self.function.apply(*arguments)


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Operator]:
    """Decorator: the function as an operator of this schema. `fake` makes empty results from the same arguments."""
    return lambda function: Operator(function, schema, fake)


def _absent(like: Tensor) -> Tensor:
    """An operator returns a tensor for everything; this one stands for None."""
    return like.new_empty(0, dtype=torch.float32)


def _vector(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=torch.float32, device=like.device)


def _like(x: Tensor | None, wanted: bool, other: Tensor) -> Tensor:
    """An empty gradient of x. Where a loss scale may still come it is fp32: fp16 would have underflowed by then."""
    if x is None or not wanted:
        return _absent(other)
    return torch.empty(x.shape, dtype=torch.float32 if x.dtype == torch.float16 else x.dtype, device=x.device)


def _transform_of(given: tuple[Any, ...], shape: torch.Size, mask: Tensor | None, cu_seqlens: Any, device: torch.device) -> Any:
    row_temperature, temperature, softcap, scale = given[:4]
    transform = LogitTransform(temperature if row_temperature is None else row_temperature, softcap or None, scale)
    return transform.for_rows(shape, mask, cu_seqlens, device), backends.pick(given[4], device, given[5])


def _head_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, targets: Tensor) -> Head:
    from .linear import check_head

    head = check_head(hidden, weight, bias, targets.shape, targets.device)
    head.dtype = dtype  # autocast is over when a graph runs
    return head


# ---- layer 1


def _fake_logprobs(targets: Tensor, entropy: str) -> Many:
    logps, H, *stats = (_vector(targets) for _ in range(5))
    return logps, _absent(targets) if entropy == "none" else H, *stats


def _results(stats: backends.RowStats, targets: Tensor, entropy: str) -> Many:
    shape = targets.shape
    H = _absent(targets) if entropy == "none" else stats.entropy.view(shape)
    # Results of an operator share no memory.
    return stats.logps.view(shape), H, *(x.clone().view(shape) for x in (stats.max, stats.sum, stats.target))


@operator(
    f"(Tensor logits, {ROWS}, str entropy, {TRANSFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda logits, targets, mask, entropy, *rest: _fake_logprobs(targets, entropy),
)
def _token_logprobs(logits: Tensor, targets: Tensor, mask: Tensor | None, entropy: str, *rest: Any) -> Many:
    shape, device = targets.shape, targets.device
    rows = logit_rows(logits, shape, device, False)
    check_targets(targets, mask, rows.shape[-1])
    transform, module = _transform_of(rest, shape, mask, None, device)
    read = None if mask is None else flat(mask)
    return _results(module.row_stats(rows, flat(targets).to(torch.int64), read, transform, entropy != "none"), targets, entropy)


@operator(
    f"(Tensor logits, {ROWS}, {STATS}, {TRANSFORM}) -> Tensor",
    lambda logits, *rest: torch.empty(logits.shape, dtype=logits.dtype, device=logits.device),
)
def _token_logprobs_backward(logits: Tensor, targets: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
    from .logprobs import upstream

    (top, total, chosen, H, d_logps, d_entropy), shape, device = rest[:6], targets.shape, targets.device
    rows = logit_rows(logits, shape, device, False)
    out = torch.empty(rows.shape, dtype=rows.dtype, device=device)
    transform, module = _transform_of(rest[6:], shape, mask, None, device)
    read = None if mask is None else flat(mask)
    module.row_grads(
        rows, flat(targets).to(torch.int64), backends.RowStats(flat(top), flat(total), None, flat(chosen)), None if d_entropy is None else flat(H),
        upstream(flat(d_logps), read), None if d_entropy is None else upstream(flat(d_entropy), read), transform, out,
    )  # fmt: skip
    return out.view(logits.shape)


@operator(
    f"({HEAD}, {ROWS}, str entropy, {TRANSFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda hidden, weight, bias, dtype, targets, mask, entropy, *rest: _fake_logprobs(targets, entropy),
)
def _linear_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, targets: Tensor, mask: Tensor | None, entropy: str,
    *rest: Any,
) -> Many:  # fmt: skip
    from .linear import Engine

    head = _head_of(hidden, weight, bias, dtype, targets)
    check_targets(targets, mask, head.vocab)
    transform, module = _transform_of(rest, targets.shape, mask, None, targets.device)
    index = torch.arange(targets.numel(), device=targets.device) if mask is None else flat(mask).nonzero()[:, 0]
    with torch.autocast(targets.device.type, enabled=False):
        stats = Engine(head, module).forward(index, flat(targets).to(torch.int64), transform, entropy != "none")
    return _results(stats, targets, entropy)


@operator(
    f"({HEAD}, {ROWS}, {STATS}, {WANTED}, {TRANSFORM}) -> (Tensor, Tensor, Tensor)",
    lambda hidden, weight, bias, *rest: tuple(
        _absent(hidden) if x is None or not w else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x, w in zip((hidden, weight, bias), rest[9:12], strict=True)
    ),
)
def _linear_logprobs_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, targets: Tensor, mask: Tensor | None, *rest: Any
) -> Many:
    from .linear import Engine
    from .logprobs import upstream

    (top, total, chosen, H, d_logps, d_entropy), wanted, device = rest[:6], rest[6:9], targets.device
    head = _head_of(hidden, weight, bias, dtype, targets)
    transform, module = _transform_of(rest[9:], targets.shape, mask, None, device)
    read = None if mask is None else flat(mask)
    d_logps = upstream(flat(d_logps), read)
    d_entropy = None if d_entropy is None else upstream(flat(d_entropy), read)
    slopes = d_logps != 0 if d_entropy is None else (d_logps != 0) | (d_entropy != 0)
    engine = Engine(head, module, wanted)
    stats = backends.RowStats(flat(top), flat(total), None, flat(chosen))
    index = slopes.nonzero()[:, 0]
    with torch.autocast(device.type, enabled=False):
        engine.backward(
            index, flat(targets).to(torch.int64), stats, None if d_entropy is None else flat(H), d_logps, d_entropy, transform
        )
    of = (hidden, weight, bias)
    return tuple(
        _absent(hidden) if g is None or x is None else g.to(x.dtype).view(x.shape)
        for g, x in zip(engine.gradients(), of, strict=True)
    )


def _of_logprobs(operands: int) -> tuple[Callable[..., Any], Callable[..., None]]:
    """backward and setup_context of the two operators above; `operands` come before targets and mask."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Many) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:], *([output[1]] if inputs[operands + 2] != "gradient" else []))
        ctx.plain = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), *output[1:])

    def backward(ctx: Any, d_logps: Tensor | None, d_entropy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        saved, count = ctx.saved_tensors, len(ctx.plain)
        if d_logps is None and d_entropy is None:
            return (None,) * count
        inputs = [plain if x is None else x for x, plain in zip(saved[:count], ctx.plain, strict=True)]
        H, *stats = saved[count:]
        if d_logps is None:
            d_logps = torch.zeros_like(d_entropy)  # type: ignore[arg-type]
        before, rest = inputs[: operands + 2], inputs[operands + 3 :]
        slopes = (*stats, H, d_logps, d_entropy)
        found: tuple[Any, ...]
        if operands == 1:
            found = (_token_logprobs_backward(*before, *slopes, *rest),)
        else:
            wanted = tuple(ctx.needs_input_grad[:3])
            parts = _linear_logprobs_backward(*before, *slopes, *wanted, *rest)
            found = tuple(x if w else None for x, w in zip(parts, wanted, strict=True))
        return *found, *(None,) * (count - len(found))

    return backward, setup


for _op, _operands in ((_token_logprobs, 1), (_linear_logprobs, 4)):
    _op.differentiate(*_of_logprobs(_operands))


# ---- layer 2


def _call_of(fields: tuple[Any, ...], transform: tuple[Any, ...], vocab: int) -> LossCall:
    from .losses import LossCall

    batch = TokenBatch(**dict(zip(FIELDS, fields, strict=False)))
    *denominators, handle, skip_inactive = fields[len(FIELDS) :]
    objective, given = objective_of(handle), denominators[0]
    check_targets(batch.targets, batch.mask, vocab)
    normalizer = given if denominators[1] is None else Denominators(*denominators)
    rows = objective.token_rows(batch, normalizer, skip_inactive)
    row_transform, module = _transform_of(transform, batch.targets.shape, batch.mask, batch.cu_seqlens, batch.targets.device)
    return LossCall(batch, objective, rows, row_transform, module)


def _loss_results(call: LossCall, rows: backends.FusedRows) -> Many:
    from .losses import total

    shape = call.batch.targets.shape
    x = _absent(rows.logps) if call.log_ratio is None else call.log_ratio
    return total(rows.losses), *(v.clone().view(shape) for v in (rows.logps, rows.entropy)), x.clone()


def _fake_loss(targets: Tensor, handle: str) -> Many:
    x = _absent(targets) if objective_of(handle).one_pass else _vector(targets).view(-1)
    return torch.empty((), dtype=torch.float32, device=targets.device), _vector(targets), _vector(targets), x


COUNT = len(FIELDS) + 5  # arguments of BATCH


@operator(
    f"(Tensor logits, bool gradient, {BATCH}, {TRANSFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda logits, gradient, *rest: (*_fake_loss(rest[0], rest[COUNT - 2]), _like(logits, gradient, logits)),
)
def _grpo_loss(logits: Tensor, gradient: bool, *rest: Any) -> Many:
    from .losses import loss_from_logits

    targets = rest[0]
    rows = logit_rows(logits, targets.shape, targets.device, False)
    call = _call_of(rest[:COUNT], rest[COUNT:], rows.shape[-1])
    out = _like(rows, gradient, logits)
    found = loss_from_logits(call, rows, out if gradient else None)
    return *_loss_results(call, found), out.view(logits.shape) if gradient else out


@operator(
    f"({HEAD}, {WANTED}, {BATCH}, {TRANSFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda hidden, weight, bias, dtype, h, w, b, *rest: (
        *_fake_loss(rest[0], rest[COUNT - 2]), _like(hidden, h, hidden), _like(weight, w, hidden), _like(bias, b, hidden),
    ),
)  # fmt: skip
def _linear_grpo_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, h: bool, w: bool, b: bool, *rest: Any
) -> Many:
    from .losses import loss_from_hidden

    head = _head_of(hidden, weight, bias, dtype, rest[0])
    call = _call_of(rest[:COUNT], rest[COUNT:], head.vocab)
    found, gradients = loss_from_hidden(call, head, (h, w, b))
    outs = [_like(x, wanted, hidden) for x, wanted in ((hidden, h), (weight, w), (bias, b))]
    for out, gradient in zip(outs, gradients or (None,) * 3, strict=True):
        if gradient is not None:
            out.copy_(gradient.view(out.shape))
    return *_loss_results(call, found), *outs


@operator(
    "(Tensor gradient, Tensor factor, ScalarType dtype) -> Tensor",
    lambda gradient, factor, dtype: torch.empty(gradient.shape, dtype=dtype, device=gradient.device),
)
def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return (gradient * factor).to(dtype, copy=True)


def _of_losses(operands: tuple[int, ...], arguments: int) -> tuple[Callable[..., Any], ...]:
    """backward and setup_context of the two losses: the gradients, which are results, times the upstream scalar. For
    torch.func they are results with a derivative, so that who asks for it is refused instead of given 0."""

    def setup_for_func(ctx: Any, inputs: tuple[Any, ...], output: Many) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:4])
        ctx.dtypes = [getattr(inputs[i], "dtype", None) for i in operands]
        ctx.save_for_backward(*output[4:])

    def backward(ctx: Any, d_loss: Tensor | None, *others: Any) -> tuple[Any, ...]:
        if any(x is not None for x in others[3:]):
            raise RuntimeError(NO_SECOND)
        found: list[Any] = [None] * arguments
        for i, gradient, dtype in zip(operands, ctx.saved_tensors, ctx.dtypes, strict=True):
            if d_loss is not None and ctx.needs_input_grad[i]:
                found[i] = _scaled(gradient, d_loss, dtype)
        return tuple(found)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Many) -> None:
        setup_for_func(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[1:])

    return backward, setup, setup_for_func


for _op, _where, _arguments in ((_grpo_loss, (0,), 2 + COUNT + 6), (_linear_grpo_loss, (0, 1, 2), 7 + COUNT + 6)):
    _op.differentiate(*_of_losses(_where, _arguments))


# ---- what the public functions call when they are traced


def _transform_arguments(transform: LogitTransform | None, backend: str, strict: bool) -> tuple[Any, ...]:
    given = as_transform(transform)
    t, softcap = given.temperature, given.softcap or 0.0
    return (*((t, 1.0) if isinstance(t, Tensor) else (None, t)), softcap, given.scale, backend, strict)


def _outside(function: str, *arguments: Any, **options: Any) -> Any:
    """A public function in eager code, at a break of the graph; fullgraph=True names this."""
    from . import logprobs, losses

    eager = getattr(logprobs if function.endswith("logprobs") else losses, function)
    return torch.compiler.disable(eager)(*arguments, **options)


# What torch.compiler.disable notes; as a decorator it would import the whole compiler with this package.
_outside._torchdynamo_disable = True  # type: ignore[attr-defined]


def _over_ranks(shard: VocabShard | None, context_group: Any = None) -> bool:
    """Whether the call has to leave the graph, since operators know no process groups. torch.func has no way out."""
    for name, value in (("shard", shard), ("context_group", context_group)):
        if value is not None and not torch.compiler.is_compiling():
            raise ValueError(f"{name} is given under torch.func, whose operators know no process groups: use torch.autograd.")
    return shard is not None or context_group is not None


def token_logprobs(
    logits: Tensor, targets: Tensor, mask: Tensor | None, transform: LogitTransform | None, entropy: bool | str,
    shard: VocabShard | None, backend: str, strict: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if _over_ranks(shard):
        options: dict[str, Any] = {"mask": mask, "transform": transform, "entropy": entropy, "shard": shard}
        return _outside("token_logprobs", logits, targets, backend=backend, strict=strict, **options)
    kind = "none" if not entropy else "gradient" if entropy is True else "value"
    found = _token_logprobs(logits, targets, mask, kind, *_transform_arguments(transform, backend, strict))
    return found[0], found[1] if entropy else None


def linear_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, mask: Tensor | None, transform: LogitTransform | None,
    entropy: bool | str, shard: VocabShard | None, backend: str, strict: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if _over_ranks(shard):
        options: dict[str, Any] = {"bias": bias, "mask": mask, "transform": transform, "entropy": entropy, "shard": shard}
        return _outside("linear_logprobs", hidden, weight, targets, backend=backend, strict=strict, **options)
    from .linear import compute_dtype

    kind = "none" if not entropy else "gradient" if entropy is True else "value"
    found = _linear_logprobs(
        hidden, weight, bias, compute_dtype(hidden), targets, mask, kind, *_transform_arguments(transform, backend, strict)
    )
    return found[0], found[1] if entropy else None


def _batch_arguments(batch: TokenBatch, objective: Objective, normalizer: Any, skip_inactive: bool) -> tuple[Any, ...]:
    def number(x: Any) -> Tensor | None:
        if x is None or isinstance(x, Tensor):
            return x
        return torch.full((), x, dtype=torch.float32, device=batch.targets.device)

    given = tuple(normalizer) if isinstance(normalizer, Denominators) else (normalizer, None, None)
    # Named one by one: a graph sees these attributes, and no reflection.
    return (
        batch.targets, batch.advantages, batch.mask, batch.old_logps, batch.ref_logps, batch.weights, batch.cu_seqlens,
        batch.sampler_logps, batch.nll_weights, batch.groups, *(number(x) for x in given), objective.handle, skip_inactive,
    )  # fmt: skip


def _output(found: Many, batch: TokenBatch, objective: Objective, normalizer: Any, skip_inactive: bool) -> LossOutput:
    from .losses import LossOutput

    def rows() -> Any:
        return objective.token_rows(batch, normalizer, skip_inactive)

    return LossOutput(found[0], found[1], found[2], objective, batch, rows, None if objective.one_pass else found[3])


def grpo_loss(
    logits: Tensor, batch: TokenBatch, objective: Objective, transform: LogitTransform | None, normalizer: Any,
    skip_inactive: bool, shard: VocabShard | None, backend: str, strict: bool,
) -> LossOutput:  # fmt: skip
    if _over_ranks(shard, batch.context_group):
        options: dict[str, Any] = {"transform": transform, "normalizer": normalizer, "skip_inactive": skip_inactive}
        return _outside("grpo_loss", logits, batch, objective, shard=shard, backend=backend, strict=strict, **options)
    found = _grpo_loss(
        logits, torch.is_grad_enabled() and logits.requires_grad,
        *_batch_arguments(batch, objective, normalizer, skip_inactive), *_transform_arguments(transform, backend, strict),
    )  # fmt: skip
    return _output(found, batch, objective, normalizer, skip_inactive)


def linear_grpo_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, batch: TokenBatch, objective: Objective,
    reference: tuple[Tensor, ...] | None, transform: LogitTransform | None, normalizer: Any, skip_inactive: bool,
    shard: VocabShard | None, backend: str, strict: bool,
) -> LossOutput:  # fmt: skip
    if _over_ranks(shard, batch.context_group):
        options: dict[str, Any] = {"transform": transform, "normalizer": normalizer, "skip_inactive": skip_inactive}
        options |= {"bias": bias, "reference": reference, "shard": shard, "backend": backend, "strict": strict}
        return _outside("linear_grpo_loss", hidden, weight, batch, objective, **options)
    from .linear import compute_dtype

    if reference is not None:
        with torch.no_grad():
            ref_bias = reference[2] if len(reference) == 3 else None
            ref_logps, _ = linear_logprobs(
                reference[0], reference[1], ref_bias, batch.targets, batch.mask, transform, False, None, backend, strict
            )
        batch = TokenBatch(**{name: getattr(batch, name) for name in FIELDS} | {"ref_logps": ref_logps})
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    found = _linear_grpo_loss(
        hidden, weight, bias, compute_dtype(hidden), *wanted,
        *_batch_arguments(batch, objective, normalizer, skip_inactive), *_transform_arguments(transform, backend, strict),
    )  # fmt: skip
    return _output(found, batch, objective, normalizer, skip_inactive)
