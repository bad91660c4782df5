"""Replaces functions in a trainer's modules by ours, on request, and puts the trainer's own back afterwards; under a version
that was not tested the first step compares the two."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch

from ._trial import Compared, Differs, compare

OVERRIDE = "GRPO_KERNELS_ANY_VERSION"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NotCovered(ValueError):
    """Raised by one of our functions, before any work, for a call that the trainer's own function has to handle."""


def untested(package: str, tested: tuple[str, ...], any_version: bool = False) -> str | None:
    """The version of a trainer that its adapter was not tested with, in words; None for one that it was tested with, and where
    any_version or the environment setting says to go on without a comparison.

    tested   whole versions, or their beginnings: "1.16" stands for 1.16.0, 1.16.1 and so on."""
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        installed = ""
    known = any(installed == version or installed.startswith(version + ".") for version in tested)
    if known or any_version or os.environ.get(OVERRIDE, "0") == "1":
        return None
    named = f"{package} {installed}" if installed else f"{package}, whose version is not known here,"
    return f"{named} was not tested with this adapter ({', '.join(tested)} {'was' if len(tested) == 1 else 'were'})"


def unlike(theirs: Callable[..., Any], ours: Callable[..., Any]) -> str:
    """In what the arguments of theirs are not those of ours, by position and by name, in words; "" where ours takes its calls."""
    kinds = inspect.Parameter
    given, taken = ([*inspect.signature(function).parameters.values()] for function in (theirs, ours))
    anything = any(p.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD) for p in given)
    places, ours_places = ([p for p in each if p.kind == kinds.POSITIONAL_OR_KEYWORD] for each in (given, taken))
    left = ours_places[len(places) :]
    same = [p.name for p in places] == [p.name for p in ours_places[: len(places)]] and all(
        p.default is not p.empty for p in left
    )
    free = any(p.kind == kinds.VAR_KEYWORD for p in taken)
    named = {p.name for p in given if p.kind == kinds.KEYWORD_ONLY} <= {p.name for p in taken}
    if anything or (same and (free or named)):
        return ""
    return f"takes ({', '.join(p.name for p in given)}), but ours takes ({', '.join(p.name for p in taken)})"


class Trial:
    """The first calls under a version that was not tested: the trainer's own function runs beside ours until values and slopes
    were compared once. Then one warning says so, and ours goes on alone; or ours is taken off, and RuntimeError names the
    difference.

    version   of `untested`; None: there is nothing to compare.
    remove    takes ours off again; None: ours was put in by the user."""

    def __init__(self, version: str | None, remove: Callable[[], None] | None = None) -> None:
        self.version, self.remove, self.said = version, remove, False
        self._seen: dict[str, Compared] = {}

    def pending(self, name: str) -> bool:
        return self.version is not None and not all(self._seen.get(name, (False, False)))

    def compare(
        self, name: str, ours: Callable[..., Any], theirs: Callable[..., Any], args: Any, kwargs: Any, part: Any = None
    ) -> None:
        """Run both on copies of these arguments; see `_trial.compare`. A call under no_grad compares values only."""
        with self.refusing(name):
            found = compare(ours, theirs, args, kwargs, part)
        before = self._seen.get(name, Compared(False, False))
        self._seen[name] = Compared(before.values or found.values, before.slopes or found.slopes)
        if not self.pending(name):
            self.passed(name)

    def beside(self, ours: Callable[..., Any], theirs: Callable[..., Any], part: Any = None) -> Callable[..., Any]:
        """Our function, compared with theirs for the first calls; our function alone under a tested version."""
        if self.version is None:
            return ours

        @functools.wraps(ours)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.pending(ours.__name__):
                self.compare(ours.__name__, ours, theirs, args, kwargs, part)
            return ours(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def refusing(self, name: str) -> Iterator[None]:
        """Turns `Differs` into the error that the user gets."""
        try:
            yield
        except Differs as difference:
            done = "Nothing was trained with ours: keep its own,"
            if self.remove is not None:
                self.remove()
                done = "Ours was taken off, nothing was trained with it:"
            raise RuntimeError(
                f"{self.version}, and {name} is not what it was: {difference}. {done} install a tested version, or pass "
                f"any_version=True (or set {OVERRIDE}=1) to go on all the same."
            ) from difference

    def passed(self, name: str) -> None:
        """Ends the comparison of `name`, with a warning the first time."""
        self._seen[name] = Compared(True, True)
        if not self.said:
            self.said = True
            warnings.warn(
                f"{self.version}: its own arithmetic and ours were compared on the first step, loss and slopes ({name}). They agree, "
                "ours goes on.",
                stacklevel=3,
            )


class Ragged:
    """The replaced functions of one trainer. `undo()`, or leaving a `with` block, restores all of them.

    counts   Counter of calls: "fused", or the trainer's name and why its own function was called.
    strict   True: a call that is left to the trainer raises RuntimeError instead, and so does the end of a `with` block in
             which none of our functions was called.
    trainer  the name in counts and errors; None: that of the package.
    version  of `untested`: each function's first call runs the trainer's own beside it, see `Trial`.
    """

    def __init__(self, package: str, strict: bool = False, trainer: str | None = None, version: str | None = None) -> None:
        self.package, self.strict, self.trainer = package, strict, trainer or package
        self.trial = Trial(version, self.undo)
        self.counts: Counter[str] = Counter()
        self._bound: list[tuple[Any, str, Any, Any]] = []
        self._slots: list[str] = []

    def bind(
        self, home: str, name: str, ours: Callable[..., Any], *, attribute: str | None = None, comparable: bool = True
    ) -> None:
        """Replace `home`.`name` by `ours`, there and in every module of the package that imported it, under any name. Modules
        that are imported later get ours from `home`.

        attribute   the attribute that the trainer calls, such as `apply` of an autograd function; None: the function itself.
        comparable  False: ours returns something else than theirs does, so that it is refused under an untested version, and
                    where its arguments have other names.
        Raises RuntimeError where it is replaced already. After this or any other error everything is restored."""
        try:
            if not comparable and self.trial.version is not None:
                raise RuntimeError(
                    f"{self.trial.version}, and {home}.{name} cannot be compared with ours in the first step: install a tested "
                    f"version, or pass any_version=True (or set {OVERRIDE}=1) and compare your first steps with and without it."
                )
            theirs = getattr(importlib.import_module(home), name)
            if getattr(theirs, "grpo_kernels", False):
                raise RuntimeError(f"{home}.{name} is ours already: call undo() on what bound it.")
            other = "" if comparable or attribute else unlike(theirs, ours)
            if other:
                raise RuntimeError(f"{home}.{name} {other}: it is not the function that this adapter was written for.")
            call = self.counted(ours, getattr(theirs, attribute) if attribute else theirs)
            value = (
                type(name, (), {attribute: staticmethod(call), "grpo_kernels": True, "theirs": theirs}) if attribute else call
            )
            for module, key in list(self._names_of(theirs)):
                self.put(module, key, value)
            self._slots.append(f"{home}.{name}")
        except BaseException:
            self.undo()
            raise

    def put(self, module: Any, key: str, value: Any) -> None:
        """Set `module.key` to `value` until `undo()`, in this module only and without counting calls."""
        theirs = getattr(module, key)
        setattr(module, key, value)
        self._bound.append((module, key, value, theirs))

    def counted(self, ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
        """Our function, or theirs if ours raises NotCovered, with a count of the calls of each."""

        compared = self.trial.beside(ours, theirs)

        @functools.wraps(ours)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = compared(*args, **kwargs)
            except NotCovered as reason:
                if self.strict:
                    raise RuntimeError(f"strict=True, but {ours.__name__} is left to {self.trainer}: {reason}.") from None
                self.counts[f"{self.trainer}: {reason}"] += 1
                return theirs(*args, **kwargs)
            self.counts["fused"] += 1
            return result

        call.grpo_kernels, call.theirs = True, theirs  # type: ignore[attr-defined]
        return torch.compiler.disable(call)  # a trainer may call torch.compile on the function

    def _names_of(self, value: Any) -> Iterator[tuple[Any, str]]:
        """(module, name) of every name in the package's modules that refers to `value`."""
        for path, module in list(sys.modules.items()):
            if path.split(".")[0] == self.package:
                for key, found in list(getattr(module, "__dict__", {}).items()):
                    if found is value:
                        yield module, key

    def undo(self) -> None:
        """Restore the trainer's functions, also in modules that were imported since. A second call does nothing. Raises
        RuntimeError, before anything is restored, where another package has replaced one of ours."""
        for module, name, value, _ in self._bound:
            if module.__dict__.get(name) is not value:
                home = getattr(module, "__name__", type(module).__name__)
                raise RuntimeError(f"{home}.{name} is not ours any more: undo in the reverse order of binding.")
        for module, name, value, theirs in self._bound:
            setattr(module, name, theirs)
            for late, key in self._names_of(value):
                setattr(late, key, theirs)
        self._bound.clear()

    def __enter__(self) -> Ragged:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.undo()
        except RuntimeError as reason:
            if kind is None:
                raise
            warnings.warn(str(reason), stacklevel=2)  # the error inside the block matters more
        if kind is None and self.strict and not self.counts["fused"]:
            raise RuntimeError(
                f"strict=True, but no call was fused in this block: {self.trainer} did not call {' or '.join(self._slots)}. Either "
                "it did not get as far as the loss, or this version or configuration of it calls something else."
            )
