"""Launches Triton kernels: a kernel that does not compile, or needs more than the GPU has, is retried with smaller tiles.

A kernel is retried only if it failed before it started, since its output may overwrite its input. If a smaller tile works
there is one warning; if none does, `KernelFailure` is raised. Both outcomes are remembered, so later calls compile nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton

from ...checks import warn_once

Tensor = torch.Tensor

#: The search for a tile that fits stops at this many accesses. Each try compiles once.
FEWEST = 128

PACKAGE = __name__.partition(".")[0]


class Launch(NamedTuple):
    """Settings of a launch. They depend on vocabulary, dtypes and strides, never on the number of rows."""

    flags: dict[str, Any]  # compile-time arguments: LANES, ACCESSES and COLS of the tile, and others
    options: dict[str, Any]
    programs_per_sm: int

    def programs(self, multiprocessors: int) -> int:
        """Number of full-size programs that are resident on so many."""
        return max(1, self.programs_per_sm * multiprocessors)

    @property
    def accesses(self) -> int:
        """Number of accesses to load a tile, over all threads."""
        return int(self.flags["LANES"] * self.flags["ACCESSES"])

    @property
    def size(self) -> int:
        """Number of logits in a tile."""
        return self.accesses * int(self.flags["COLS"])

    @property
    def tile(self) -> str:
        return f"{self.accesses} x {self.flags['COLS']}"


class KernelFailure(RuntimeError):
    """No tile of a kernel runs here, and nothing was written. `reason` says in one line which kernel, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f'{reason}. Only backend="auto" without strict mode falls back to eager PyTorch; '
            "`python -m grpo_kernels doctor` says more."
        )
        self.reason = reason


#: For kernels that failed once: how often to halve the full tile, or the reason why no tile runs.
_remembered: dict[Hashable, int | str] = {}


def run(
    kernel: Any,
    tile: Callable[[int], Launch],
    programs: Callable[[Launch], int],
    arguments: Sequence[Any],
    flags: Mapping[str, Any],
) -> None:
    """Launch `programs` of the kernel with the first of tile(0), tile(1) .., each half the size of the one before, that runs.

    Raises KernelFailure if none does. Errors of the device, such as running out of memory, pass through: the kernel may have
    run in part, or would fail with a smaller tile as well."""
    halvings = 0
    if _remembered:  # usually empty, so that calls need not compute a key
        known = _remembered.get(_signature(kernel, tile(0), arguments, flags), 0)
        if isinstance(known, str):
            raise KernelFailure(known)
        halvings = known
    launch = first = tile(halvings)
    said = ""  # only the text: the exception would keep the arguments alive
    while True:
        try:
            kernel[(programs(launch),)](*arguments, **flags, **launch.flags, **launch.options)
            break
        except Exception as error:
            if not _before_it_ran(error, kernel, arguments, {**flags, **launch.flags, **launch.options}):
                raise
            said = said or _line(error)
            halvings += 1
            smaller = tile(halvings)
            if smaller.accesses < FEWEST:
                tried = first.tile if launch == first else f"{first.tile} down to {launch.tile}"
                reason = f"the Triton kernel {_name(kernel, flags)} does not run with tiles of {tried} logits: {said}"
                _remembered[_signature(kernel, tile(0), arguments, flags)] = reason
                raise KernelFailure(reason) from error
            launch = smaller
    if said:
        _remembered[_signature(kernel, tile(0), arguments, flags)] = halvings
        warn_once(
            f"the Triton kernel {_name(kernel, flags)} does not run with a tile of {first.tile} logits: {said}. It "
            f"runs with {launch.tile}, which may be slower. `python -m grpo_kernels doctor` says more."
        )


def _before_it_ran(error: Exception, kernel: Any, arguments: Sequence[Any], compiled_for: Mapping[str, Any]) -> bool:
    """Whether the kernel failed in the compiler or at the launch, before it wrote anything."""
    if isinstance(error, triton.TritonError):  # OutOfResources, PTXASError, CompilationError
        return not isinstance(error, triton.InterpreterError)  # the interpreter does not compile, so the kernel was running
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)) or "Triton Error [" in str(error):
        return "too many resources requested for launch" in str(error)  # the only driver error that comes before the start
    # Compiler passes fail with the same RuntimeError as launches. Compiled alone, only the former fail again.
    try:
        kernel.warmup(*arguments, grid=(1,), **compiled_for)
    except Exception:
        return True
    return False


def _signature(kernel: Any, full: Launch, arguments: Sequence[Any], flags: Mapping[str, Any]) -> Hashable:
    """A key for what Triton compiles: kernel, dtypes, devices and compile-time arguments."""

    def kind(x: Any) -> Any:
        return (x.dtype, x.device) if isinstance(x, Tensor) else len(x) if isinstance(x, tuple) else type(x)

    return kernel, tuple(map(kind, arguments)), frozenset({**flags, **full.flags, **full.options}.items())


def _name(kernel: Any, flags: Mapping[str, Any]) -> str:
    """The kernel's name, with the user's own formulas that are compiled into it."""
    name = kernel.__name__.removeprefix("_").removesuffix("_kernel")
    functions = [x.fn for x in flags.values() if isinstance(x, triton.KernelInterface)]
    theirs = [f"{f.__module__}.{f.__qualname__}" for f in functions if f.__module__.partition(".")[0] != PACKAGE]
    return f"{name} with {', '.join(theirs)}" if theirs else name


def _line(error: BaseException) -> str:
    """The message of an error in one line."""
    while isinstance(error.__cause__, triton.CompilationError):  # every function on the way up wraps the error
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join([lines[0], *(line for line in lines[1:] if line.startswith("ptxas"))][:2])
    if (
        isinstance(error, triton.CompilationError) and error.error_message
    ):  # the message comes after the location and its source
        definition = (error.src or "unknown source").strip().splitlines()[0]
        text = f"{error.error_message.strip().splitlines()[0]} ({lines[0].rstrip(':')} of `{definition}`)"
    return f"{type(error).__name__}: {text.rstrip('.')}"
