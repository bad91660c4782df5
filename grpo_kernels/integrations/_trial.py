"""Compares a trainer's own function with ours on one call's arguments: values, and slopes with respect to every tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

#: Of sums of absolute values: what rounding may do to fp32, and to 16-bit tensors in functions that do not sum in fp32.
TOLERANCE = {False: 1e-3, True: 3e-2}
#: The same for one value near 0, such as the log-prob of a certain token.
FLOOR = {False: 1e-5, True: 2e-2}


class Differs(Exception):
    """Our results differ from the trainer's; the message says by how much."""


class Compared(NamedTuple):
    """Which comparisons a call allowed: False if there were only zeros, or nothing that requires a gradient."""

    values: bool
    slopes: bool


def compare(
    ours: Callable[..., Any], theirs: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], part: Any = None
) -> Compared:
    """Run both, one after the other, on copies of the tensors: the caller's tensors and their graph are left alone.

    part   of each result what is compared, `part(result)`; None: all of its floating-point tensors.
    Raises Differs for values or slopes that are further apart than rounding, ours' own errors as they are, and Differs for an
    error of theirs, which leaves nothing to compare with."""
    coarse = any(x.is_floating_point() and x.element_size() < 4 for x in _tensors((args, kwargs)))
    own = _run(ours, args, kwargs, part)
    try:
        expected = _run(theirs, args, kwargs, part, own.differentiable)
    except Exception as error:
        raise Differs(f"its own function raised {type(error).__name__}: {error}") from error
    values = alike("values", own.values, expected.values, coarse)
    if expected.differentiable != own.differentiable:  # what has no slope there is used without one
        own = _run(ours, args, kwargs, part, expected.differentiable)
    return Compared(values, alike("slopes", own.slopes, expected.slopes, coarse, near_zero=False))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from _tensors(x)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])


def _copied(value: Any, leaves: list[Tensor]) -> Any:
    """The same with tensors that may be overwritten; those that want a gradient hang on `leaves`, which share their memory with the
    caller's and are not written."""
    if isinstance(value, Tensor):
        if not value.requires_grad:
            return value.detach().clone()
        leaves.append(value.detach().requires_grad_())
        return leaves[-1].clone()
    if isinstance(value, (list, tuple)):
        parts = [_copied(x, leaves) for x in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _copied(x, leaves) for key, x in value.items()}
    return value


class _Results(NamedTuple):
    values: list[Tensor]
    slopes: list[Tensor]
    differentiable: set[int]  # which of the values


def _run(function: Callable[..., Any], args: Any, kwargs: Any, part: Any, among: set[int] | None = None) -> _Results:
    """Results, and slopes of a fixed mixture of them with respect to what wants a gradient, detached.

    among   the results that are mixed, of those that have a gradient; None: all."""
    leaves: list[Tensor] = []
    args, kwargs = _copied((args, kwargs), leaves)
    result = function(*args, **kwargs)
    results = [x for x in _tensors(result if part is None else part(result)) if x.is_floating_point()]
    chosen = {i for i, x in enumerate(results) if x.requires_grad and (among is None or i in among)}
    mixed = [results[i] for i in sorted(chosen)]
    values = [x.detach().clone() for x in results]
    if not mixed or not leaves:
        return _Results(values, [], chosen)
    upstream = [(1.5 + torch.arange(x.numel(), device=x.device).cos()).to(x.dtype).view(x.shape) for x in mixed]
    slopes = torch.autograd.grad(mixed, leaves, upstream, allow_unused=True, materialize_grads=True)
    return _Results(values, [*slopes], chosen)


def alike(what: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], coarse: bool, *, near_zero: bool = True) -> bool:
    """Raise Differs unless these are equal up to rounding; True if anything was not 0.

    coarse     16-bit tensors had a part in them.
    near_zero  False: they may be small everywhere, as slopes are."""
    shapes = [[[*x.shape] for x in found] for found in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise Differs(f"{what} have shapes {shapes[0]}, and its own {shapes[1]}")
    tolerance, floor = TOLERANCE[coarse], FLOOR[coarse] * near_zero
    told = False
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = a.double(), b.double()
        apart, size = (a - b).abs().sum(), b.abs().sum()
        if not apart <= tolerance * size + floor * b.numel():  # NaN differs too
            worst = (a - b).abs().max()
            raise Differs(
                f"{what}, tensor {number} of {len(ours)}: ours sum to {float(a.sum()):.6g} and its own to {float(b.sum()):.6g}; "
                f"they are {float(apart):.3g} apart of {float(size):.3g} in absolute terms, at most {float(worst):.3g} in one place"
            )
        told = told or bool(size > 0)
    return told
