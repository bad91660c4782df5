"""What all adapters share: their declaration, the replacement of a trainer's functions by ours
until it is undone, the comparison of first calls under a version that was not tested, and a way
into a trainer's inside that is experimental.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Function = Callable[..., Any]

#: Says once which functions of a trainer run in our kernels, and once for each reason why one does
#: not.
LOG = logging.getLogger("grpo_kernels.integrations")
OVERRIDE = "GRPO_KERNELS_ANY_VERSION"
#: What was there before an object got an attribute of its own.
ABSENT = object()


class NotCovered(ValueError):
    """Raised by one of our functions, before any work, for a call that the trainer's own function
    has to handle.
    """


# ---- calls with a trainer's arguments, errors with a trainer's names

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_REQUIRED = inspect.Parameter.empty


def parameters_of(function: Any) -> list[inspect.Parameter] | None:
    """Return the parameters of a trainer's function, or None if it does not declare them.

    An autograd function, its `apply` and the call of a module have the parameters of `forward`."""
    owner = (
        getattr(function, "__self__", None)
        if getattr(function, "__name__", "") == "apply"
        else function
    )
    if isinstance(owner, type) and hasattr(owner, "forward"):
        return list(inspect.signature(owner.forward).parameters.values())[1:]  # without ctx
    if isinstance(function, torch.nn.Module):
        function = function.forward
    if inspect.isbuiltin(function):
        return None
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def fitted(ours: Function, theirs: Any = None) -> Function:
    """Return `ours` as a function that takes the calls of `theirs`, the function of a trainer that
    it replaces.

    Arguments are matched by name, and an argument that a call leaves out has the trainer's default.
    A required argument of ours that has another name in the trainer is matched by its position. A
    call may pass arguments that ours does not have: None and the trainer's default are ignored, and
    any other value raises NotCovered before ours is called. So a newer trainer gets its own result
    or an error that names the argument, but never a TypeError.

    theirs   None: a function that users or a registry call, which replaces nothing.

    Raises RuntimeError if theirs requires an argument that ours does not have, or lacks one that
    ours requires.
    """
    taken = inspect.signature(ours).parameters
    fixed = ours.keywords if isinstance(ours, functools.partial) else {}
    by_position = [name for name, p in taken.items() if p.kind in _BY_POSITION]
    required = [
        name
        for name, p in taken.items()
        if p.default is _REQUIRED and p.kind in (*_BY_POSITION, p.KEYWORD_ONLY)
    ]
    declared = parameters_of(theirs) if theirs is not None else None
    given = [p for p in declared or () if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positions = [p.name for p in given if p.kind in _BY_POSITION]
    if declared is None or any(p.kind is p.VAR_POSITIONAL for p in declared):
        positions += by_position[len(positions) :]
    known = {p.name for p in given}
    matched = {name: name for name in taken}
    for i, parameter in enumerate(given):
        # The position decides only if neither side has the other's name.
        renamed = by_position[i] if i < len(by_position) else None
        if parameter.name not in matched and renamed in required and renamed not in known:
            matched[parameter.name] = str(renamed)
    defaults = {p.name: p.default for p in given if p.default is not _REQUIRED}
    filled = {
        matched[name]: value
        for name, value in defaults.items()
        if name in matched and matched[name] not in fixed
    }
    if declared is not None:
        _check_arguments(ours, theirs, declared, matched, required)

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        passed = dict(filled)
        for name, value in [*zip(positions, args, strict=False), *kwargs.items()]:
            if name in matched:
                passed[matched[name]] = value
            elif value is not None and not _equal(value, defaults.get(name, _REQUIRED)):
                raise NotCovered(
                    f"argument {name}={_described(value)}, which grpo_kernels does not know"
                )
        for number, value in enumerate(args[len(positions) :], len(positions) + 1):
            if value is not None:
                raise NotCovered(
                    f"argument number {number}, {_described(value)}, which grpo_kernels does not"
                    " know"
                )
        for name in required:
            if name not in passed:
                raise NotCovered(f"a call without {name}")
        return ours(**passed)

    return call


def _check_arguments(
    ours: Function,
    theirs: Any,
    declared: Sequence[inspect.Parameter],
    matched: Mapping[str, str],
    required: Sequence[str],
) -> None:
    """Raise RuntimeError if no call of theirs can be a call of ours."""
    unknown = [p.name for p in declared if p.default is _REQUIRED and p.name not in matched]
    unknown = [
        p.name
        for p in declared
        if p.name in unknown and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    free = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in declared)
    lacking = (
        []
        if free
        else [name for name in required if name not in {matched.get(p.name) for p in declared}]
    )
    if unknown or lacking:
        takes = ", ".join(p.name for p in declared)
        problem = f"requires {', '.join(unknown)}" if unknown else f"has no {', '.join(lacking)}"
        raise RuntimeError(
            f"{getattr(theirs, '__qualname__', theirs)} takes ({takes}), but ours takes"
            f" ({', '.join(inspect.signature(ours).parameters)}): it {problem}, so it is not the"
            " function that this adapter was written for."
        )


def _equal(value: Any, default: Any) -> bool:
    """Whether an argument has its default, without a comparison of tensors."""
    return value is default or (
        type(value) is type(default) and not isinstance(value, Tensor) and bool(value == default)
    )


def _described(value: Any) -> str:
    """An argument in an error."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {[*value.shape]}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def unknown_option(theirs: Any, known: Collection[str]) -> tuple[str, Any] | None:
    """Return (name, value) of an option of a trainer's object that is set and not in `known`, or
    None.

    The options are the arguments of the object's class. An option that is None or has its default
    is not set.
    """
    for name, parameter in inspect.signature(type(theirs)).parameters.items():
        value = getattr(theirs, name, parameter.default)
        if name not in known and value is not None and not _equal(value, parameter.default):
            return name, value
    return None


@contextlib.contextmanager
def trainer_names(**names: str) -> Iterator[None]:
    """Put the trainer's names of arguments in the place of ours (ours="theirs") in the message of a
    ValueError.
    """
    try:
        yield
    except NotCovered:
        raise
    except ValueError as error:
        pattern = rf"(?<![\w.'\"])(?:{'|'.join(map(re.escape, names))})(?!\w)"
        message = re.sub(pattern, lambda match: names[match[0]], str(error))
        raise ValueError(message).with_traceback(error.__traceback__) from None


def says(**names: str) -> Callable[[Function], Function]:
    """Make the errors of a function use a trainer's names of arguments (ours="theirs")."""

    def decorated(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with trainer_names(**names):
                return function(*args, **kwargs)

        return call

    return decorated


@dataclass(frozen=True)
class Adapter:
    """What an adapter is, said once: binding, the doctor, pages and tests read it.

    trainer    its name.
    package    its distribution, which is asked for its version.
    tested     versions that the tests ran with, or their beginnings: "1.16" stands for 1.16.0,
               1.16.1 and so on.
    replaces   the name of a function of ours -> the dotted path of the trainer's that it replaces,
               or paths of which one exists.
    configured what a configuration of the trainer names -> what that does.
    """

    trainer: str
    package: str
    tested: tuple[str, ...] = ()
    replaces: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    configured: Mapping[str, str] = field(default_factory=dict)

    def installed(self) -> str:
        """The version that is installed, in words where that is not known."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return "of an unknown version"

    def untested(self, any_version: bool = False) -> str | None:
        """What says that the adapter was not tested with the installed version; None if it was, and
        where any_version or the environment setting says to go on without a comparison.
        """
        if (
            one_of(self.installed(), self.tested)
            or any_version
            or os.environ.get(OVERRIDE, "0") == "1"
        ):
            return None
        tested = ", ".join(self.tested) or "none"
        return (
            f"{self.package} {self.installed()} was not tested with this adapter (tested: {tested})"
        )

    def bind(self, *ours: Function, **how: bool) -> Slots:
        """Replace what the declaration says that these functions of ours replace.

        how: of `Slots`.
        """
        slots = Slots(self, **how)
        for function in ours:
            slots.bind(function)
        return slots


def one_of(version: str, known: Sequence[str]) -> bool:
    """Whether this is one of the known versions, or begins as one."""
    return any(f"{version}.".startswith(f"{beginning}.") for beginning in known)


# ---- the first calls under a version that was not tested

#: Of a sum of absolute values, and for each number: fp32, and functions of 16-bit tensors, which
#: may sum in 16 bits.
FINE = (1e-3, 1e-5)
COARSE = (3e-2, 2e-2)


def ran(function: Function, call: Any, part: Function) -> tuple[list[Tensor], list[Tensor]]:
    """(results of a call on copies of its tensors, which may be overwritten; what wants a gradient
    of them). What it warns of, the call itself says.
    """
    leaves: list[Tensor] = []

    def copied(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x.detach().clone()
        leaves.append(x.detach().requires_grad_())  # the caller's memory, which is not written
        return leaves[-1].clone()

    args, kwargs = tree_map_only(Tensor, copied, call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = tree_leaves(part(function(*args, **kwargs)))
    return [x for x in found if isinstance(x, Tensor) and x.is_floating_point()], leaves


def slopes_of(results: Sequence[Tensor], leaves: list[Tensor]) -> Sequence[Tensor]:
    """The gradients of a fixed mixture of the results."""
    upstream = [
        (1.5 + torch.arange(x.numel(), device=x.device).cos()).to(x.dtype).view(x.shape)
        for x in results
    ]
    return (
        torch.autograd.grad(results, leaves, upstream, allow_unused=True, materialize_grads=True)
        if results
        else ()
    )


@dataclass(eq=False)
class Trial:
    """Compare our functions with the trainer's under a version that was not tested.

    Both run until values and gradients were compared once. If they agree, one warning says so and
    ours continues alone. If they differ, ours is removed and RuntimeError names the difference.

    version   the version of `Adapter.untested`; None: there is nothing to compare.
    remove    removes our function; None: the user put it in.
    """

    version: str | None
    remove: Callable[[], None] | None = None
    done: set[str] = field(
        default_factory=set
    )  # functions of which values and slopes were compared

    def pending(self, name: str) -> bool:
        return self.version is not None and name not in self.done

    def compared(
        self, ours: Function, theirs: Function, part: Function = lambda result: result
    ) -> Function:
        """Return `ours`; under an untested version its first calls are compared with `theirs`."""

        @functools.wraps(ours)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.compare(ours.__name__, ours, theirs, (args, kwargs), part)
            return ours(*args, **kwargs)

        return ours if self.version is None else call

    def compare(
        self,
        name: str,
        ours: Function,
        theirs: Function,
        call: Any,
        part: Function = lambda result: result,
    ) -> None:
        """Run both on copies of the call's (args, kwargs), of whose results `part` is compared,
        where that is pending. A call under no_grad shows values.
        """
        if not self.pending(name):
            return
        mine, leaves = ran(ours, call, part)
        try:
            own, own_leaves = ran(theirs, call, part)
        except Exception as error:
            self.refuse(name, f"its own function raised {type(error).__name__}: {error}")
        coarse = any(
            isinstance(x, Tensor) and x.is_floating_point() and x.element_size() < 4
            for x in tree_leaves(call)
        )
        tolerance, floor = COARSE if coarse else FINE
        self.alike(name, "values", mine, own, tolerance, floor)
        # What has no slope there is used without one.
        both = [
            (a, b) for a, b in zip(mine, own, strict=True) if a.requires_grad and b.requires_grad
        ]
        slopes = slopes_of([a for a, _ in both], leaves)
        wanted = slopes_of([b for _, b in both], own_leaves)
        self.alike(name, "slopes", slopes, wanted, tolerance)  # which may be small everywhere
        if any(x.any() for x in wanted):
            self.passed(name)

    def alike(
        self, name: str, what: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float, floor: Any = 0.0
    ) -> None:  # fmt: skip
        """Refuse `name` unless these are equal up to rounding: a share of the sum of absolute
        values, and `floor` for each number.
        """
        shapes = [[[*x.shape] for x in found] for found in (ours, theirs)]
        if shapes[0] != shapes[1]:
            self.refuse(name, f"{what} have shapes {shapes[0]}, and its own {shapes[1]}")
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            a, b = (x.detach().double() for x in pair)
            apart = (a - b).abs().sum()
            size = b.abs().sum()
            if not apart <= tolerance * size + floor * b.numel():  # NaN differs too
                self.refuse(
                    name,
                    f"{what}, tensor {number} of {len(ours)}: {apart:.3g} apart of {size:.3g} in"
                    " absolute terms",
                )

    def refuse(self, name: str, difference: str) -> NoReturn:
        """Take ours off and raise the error that the user gets, under a tested version because of
        strict=True.
        """
        if self.version is None:
            raise RuntimeError(
                f"strict=True, but {difference}: this is a bug of the adapter, or {name} is not"
                " what it knows."
            )
        if self.remove is not None:
            self.remove()
        raise RuntimeError(
            f"{self.version}, and {name} is not what it was: {difference}. Ours is not used, and"
            " nothing was trained with it: install a tested version, or pass any_version=True (or"
            f" set {OVERRIDE}=1) to continue without the comparison."
        )

    def passed(self, name: str) -> None:
        """Note that `name` was compared; a warning says so for the first."""
        self.done.add(name)
        if len(self.done) == 1:
            warnings.warn(
                f"{self.version}: values and gradients of its own {name} and ours were compared on"
                " the first step. They agree, and ours is used from now on.",
                stacklevel=3,
            )


# ---- replacing functions


class Slots:
    """The replaced functions of one trainer. `undo()`, or leaving a `with` block, restores all of
    them.

    counts   Counter of calls: "fused", or the trainer's name and why its own function was called.
    strict   True: a call that is left to the trainer raises RuntimeError instead, and so does the
             end of a `with` block in which none of our functions was called.
    any_version   True: no comparison under a version that was not tested.
    trial    the comparison under a version that was not tested.
    """

    def __init__(self, adapter: Adapter, strict: bool = False, any_version: bool = False) -> None:
        self.adapter = adapter
        self.strict = strict
        self.trial = Trial(adapter.untested(any_version), self.undo)
        self.counts: Counter[str] = Counter()
        self._bound: list[tuple[Any, str, Any, Any]] = []
        self._paths: list[str] = []

    def bind(
        self, ours: Function, path: str = "", *, attribute: str = "", method: bool = False, comparable: bool = True, **fixed: Any
    ) -> None:  # fmt: skip
        """Replace the trainer's function by `ours`, in its module and in every module of the
        package that imported it, under any name. Modules that are imported later get ours from that
        module.

        path        where it is; "": where the declaration of the adapter says.
        attribute   the attribute that the trainer calls, such as `apply` of an autograd function;
                    "": the function itself.
        method      True: the attribute is a method of a class, which is replaced in that class.
                    Ours takes the instance first.
        comparable  False: ours returns something else than theirs does, so that it is refused under
                    an untested version, and where its arguments have other names.
        fixed       arguments of ours that the trainer does not pass.
        Raises RuntimeError where it is replaced already, and if its arguments are not those of
        ours, see `fitted`. After this or any other error everything is restored.
        """
        try:
            home, name = found(path or self.adapter.replaces[ours.__name__])
            ours = functools.wraps(ours)(functools.partial(ours, **fixed)) if fixed else ours
            if not comparable and self.trial.version is not None:
                raise RuntimeError(
                    f"{self.trial.version}, and {home}.{name} cannot be compared with ours in the"
                    " first step: install a tested version, or pass any_version=True (or set"
                    f" {OVERRIDE}=1) and compare your first steps with and without it."
                )
            theirs = getattr(sys.modules[home], name)
            if not comparable and not attribute:
                same_arguments(f"{home}.{name}", theirs, ours)
            own = getattr(theirs, attribute) if attribute else theirs
            value = self.counted(self.trial.compared(fitted(ours, own), own), own)
            if method:
                self.put(theirs, attribute, value)
                self._paths.append(f"{home}.{name}.{attribute}")
                return
            if attribute:
                value = type(
                    name,
                    (),
                    {attribute: staticmethod(value), "grpo_kernels": True, "theirs": theirs},
                )
            for module, key in list(names_of(theirs, home)):
                self.put(module, key, value)
            self._paths.append(f"{home}.{name}")
        except BaseException:
            self.undo()
            raise

    def put(self, module: Any, key: str, value: Any) -> None:
        """Set `module.key` to `value` until `undo()`, in this module (or object) only and without
        counting calls. Raises RuntimeError where it is ours.
        """
        if getattr(getattr(module, key, None), "grpo_kernels", False):
            raise RuntimeError(
                f"{name_of(module)}.{key} is ours already: call undo() on what bound it."
            )
        self._bound.append((module, key, value, vars(module).get(key, ABSENT)))
        setattr(module, key, value)

    def counted(self, ours: Function, theirs: Function) -> Any:
        """Our function, or theirs if ours raises NotCovered, with a count of the calls of each."""

        @functools.wraps(ours)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = ours(*args, **kwargs)
            except NotCovered as reason:
                self.left(reason, ours.__name__, theirs)
                return theirs(*args, **kwargs)
            self.count("fused", theirs)
            return result

        vars(call).update(grpo_kernels=True, theirs=theirs)
        return torch.compiler.disable(call)  # a trainer may call torch.compile on the function

    def count(self, key: str, function: Function) -> None:
        """Count a call of the trainer's `function` under "fused" or the reason why it ran in the
        trainer's own code, and log the first call of each key on rank 0. The level is WARNING,
        because trainers hide lower levels.
        """
        self.counts[key] += 1
        if self.counts[key] > 1 or os.environ.get("RANK", "0") != "0":
            return
        name = getattr(function, "__qualname__", repr(function))
        trainer = self.adapter.trainer
        if key == "fused":
            LOG.warning("%s: %s runs in grpo_kernels' fused kernels.", trainer, name)
        else:
            LOG.warning(
                "%s: %s runs in %s's own code: %s.", trainer, name, trainer, key.partition(": ")[2]
            )

    def left(self, reason: NotCovered, name: str, theirs: Function) -> None:
        """Count a call of ours, `name`, that is left to the trainer's function.

        Raises RuntimeError in strict mode.
        """
        if self.strict:
            raise RuntimeError(
                f"strict=True, but {name} is left to {self.adapter.trainer}'s own code: {reason}."
            ) from None
        self.count(f"{self.adapter.trainer}: {reason}", theirs)

    def undo(self) -> None:
        """Restore the trainer's functions, also in modules that were imported since. A second call
        does nothing. Raises RuntimeError, before anything is restored, where another package has
        replaced one of ours.
        """
        for module, name, value, _ in self._bound:
            if module.__dict__.get(name) is not value:
                raise RuntimeError(
                    f"{name_of(module)}.{name} is not ours any more: undo in the reverse order of"
                    " binding."
                )
        for module, name, value, theirs in self._bound:
            if theirs is ABSENT:
                delattr(module, name)
                continue
            setattr(module, name, theirs)
            for late, key in names_of(value, name_of(module)):
                setattr(late, key, theirs)
        self._bound.clear()

    def __enter__(self) -> Slots:
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
                f"strict=True, but no call was fused in this block: {self.adapter.trainer} did not"
                f" call {' or '.join(self._paths)}. Either it did not get as far as the loss, or"
                " this version or configuration of it calls something else."
            )


def name_of(module: Any) -> str:
    """That of a module, or of an object's type."""
    return getattr(module, "__name__", type(module).__name__)


def found(paths: str | tuple[str, ...]) -> tuple[str, str]:
    """(module, name) of the first of these paths whose module can be imported; it is imported.

    Raises the first error.
    """
    problems = []
    for path in (paths,) if isinstance(paths, str) else paths:
        home, _, name = path.rpartition(".")
        try:
            importlib.import_module(home)
        except ModuleNotFoundError as error:
            problems.append(error)
        else:
            return home, name
    raise problems[0]


def names_of(value: Any, home: str) -> Iterator[tuple[Any, str]]:
    """(module, name) of every name that refers to `value`, in the modules of the package that
    `home` is of.
    """
    root = home.partition(".")[0]
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] == root:
            yield from (
                (module, key)
                for key, held in list(getattr(module, "__dict__", {}).items())
                if held is value
            )


def same_arguments(path: str, theirs: Function, ours: Function) -> None:
    """Raise RuntimeError unless ours begins with the arguments of theirs; what theirs takes by name
    alone its call shows.
    """
    given, taken = (
        [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        for function in (theirs, ours)
    )
    if given != taken[: len(given)]:
        raise RuntimeError(
            f"{path} takes ({', '.join(given)}), but ours takes ({', '.join(taken)}): it is not the"
            " function that this adapter was written for."
        )


# ---- experimental: this depends on a trainer's inside, which may change in any release


@contextlib.contextmanager
def replaced_inside(home: Any, **ours: Any) -> Iterator[None]:
    """Put these in the place of what a module has under their names for the time of one call, and
    its own back at its end, whatever happens; a name that it has not is left out. Experimental:
    other threads of the process see it too.
    """
    theirs = {name: vars(home)[name] for name in ours if name in vars(home)}
    vars(home).update({name: ours[name] for name in theirs})
    try:
        yield
    finally:
        vars(home).update(theirs)
