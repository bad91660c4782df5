"""Replace a trainer's functions by ours, and restore them.

Adapter              what an adapter declares: its trainer, tested versions, replaced functions
Slots                the replaced functions of one trainer, with call counts and `undo()`
Trial                compares ours with the trainer's function in the first call under a version
                     that was not tested
adapt_arguments      matches the arguments of a trainer's call with those of our function
with_trainer_names   makes errors name the trainer's arguments
temporarily_replaced (experimental) replaces names of a module during one call
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

#: Logs once that a trainer's function runs in our kernels, and once for each reason why a call
#: does not.
LOG = logging.getLogger("grpo_kernels.integrations")
OVERRIDE = "GRPO_KERNELS_ANY_VERSION"
#: Stands for the former value of an attribute that an object did not have.
ABSENT = object()


class NotCovered(ValueError):
    """A call that our function does not support and the trainer's own function has to compute.

    Our functions raise it before they compute anything.
    """


# ---- calls with a trainer's arguments, errors with a trainer's names

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_REQUIRED = inspect.Parameter.empty


def parameters_of(function: Any) -> list[inspect.Parameter] | None:
    """Return the parameters of a trainer's function, or None if it does not declare them.

    An autograd function, its `apply` and the call of a module have the parameters of `forward`.
    Functions that are written in C may declare none.
    """
    # `apply` of an autograd function is a method that is bound to its class.
    autograd_function = function
    if getattr(function, "__name__", "") == "apply":
        autograd_function = getattr(function, "__self__", None)
    if isinstance(autograd_function, type) and hasattr(autograd_function, "forward"):
        parameters = inspect.signature(autograd_function.forward).parameters.values()
        return list(parameters)[1:]  # without ctx
    if isinstance(function, torch.nn.Module):
        function = function.forward
    if inspect.isbuiltin(function):
        return None
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def adapt_arguments(ours: Function, theirs: Any = None) -> Function:
    """Return a function that calls `ours` and takes the arguments of the trainer's `theirs`.

    ours     our function
    theirs   the trainer's function that it replaces. None if it replaces no function, because users
             or a registry call it.

    Arguments are matched by name. A required argument of ours that has another name in the trainer
    is matched by its position. An argument that a call leaves out has the trainer's default.

    A call may pass arguments that ours does not have. None and the trainer's default are ignored,
    and any other value raises NotCovered before ours is called. So a call of a newer trainer runs
    in the trainer's own function, or ends in an error that names the argument, but never in a
    TypeError.

    Raises RuntimeError if theirs requires an argument that ours does not have, or lacks one that
    ours requires.
    """
    our_parameters = inspect.signature(ours).parameters
    # Arguments that functools.partial has set are not replaced by the trainer's defaults.
    fixed = ours.keywords if isinstance(ours, functools.partial) else {}
    # Names of our arguments that can be passed by position, in order.
    our_positions = [name for name, p in our_parameters.items() if p.kind in _BY_POSITION]
    required = [
        name
        for name, p in our_parameters.items()
        if p.default is _REQUIRED and p.kind in (*_BY_POSITION, p.KEYWORD_ONLY)
    ]
    declared = parameters_of(theirs) if theirs is not None else None
    their_parameters = [
        p for p in declared or () if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    # The names of the positional arguments of a call.
    positions = [p.name for p in their_parameters if p.kind in _BY_POSITION]
    if declared is None or any(p.kind is p.VAR_POSITIONAL for p in declared):
        # The trainer's function does not name all of them: further ones are in our order.
        positions += our_positions[len(positions) :]
    # {name of an argument of a call: its name in ours}
    matched = {name: name for name in our_parameters}
    their_names = {p.name for p in their_parameters}
    for i, parameter in enumerate(their_parameters):
        # The position decides only if neither side has the other's name.
        renamed = our_positions[i] if i < len(our_positions) else None
        if parameter.name not in matched and renamed in required and renamed not in their_names:
            matched[parameter.name] = str(renamed)
    defaults = {p.name: p.default for p in their_parameters if p.default is not _REQUIRED}
    our_defaults = {
        matched[name]: value
        for name, value in defaults.items()
        if name in matched and matched[name] not in fixed
    }
    if declared is not None:
        _check_arguments(ours, theirs, declared, matched, required)

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        # {name of an argument of ours: its value}
        passed = dict(our_defaults)
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
    """Raise RuntimeError if the required arguments of theirs and ours cannot be matched.

    theirs     the trainer's function, which ours is to replace
    declared   the parameters of theirs
    matched    {name of a parameter of theirs: its name in ours}
    required   the names of the required parameters of ours
    """
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    unknown = [
        p.name
        for p in declared
        if p.default is _REQUIRED and p.name not in matched and p.kind not in variadic
    ]
    takes_anything = any(p.kind in variadic for p in declared)
    # Names of the arguments of ours that a call of theirs may pass.
    passed = {matched.get(p.name) for p in declared}
    lacking = [] if takes_anything else [name for name in required if name not in passed]
    if unknown or lacking:
        takes = ", ".join(p.name for p in declared)
        problem = f"requires {', '.join(unknown)}" if unknown else f"has no {', '.join(lacking)}"
        raise RuntimeError(
            f"{getattr(theirs, '__qualname__', theirs)} takes ({takes}), but ours takes"
            f" ({', '.join(inspect.signature(ours).parameters)}): it {problem}, so it is not the"
            " function that this adapter was written for."
        )


def _equal(value: Any, default: Any) -> bool:
    """Return whether an argument has its default value. Tensors are never compared."""
    return value is default or (
        type(value) is type(default) and not isinstance(value, Tensor) and bool(value == default)
    )


def _described(value: Any) -> str:
    """Return an argument as text for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {[*value.shape]}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def unknown_option(theirs: Any, known: Collection[str]) -> tuple[str, Any] | None:
    """Return (name, value) of an option that is set but not known here, or None if there is none.

    theirs   an object of a trainer, whose options are the arguments of its class
    known    the names of the options that are known

    A newer trainer may have an option that changes the result. An option that is None or has its
    default is not set.
    """
    for name, parameter in inspect.signature(type(theirs)).parameters.items():
        value = getattr(theirs, name, parameter.default)
        if name not in known and value is not None and not _equal(value, parameter.default):
            return name, value
    return None


@contextlib.contextmanager
def trainer_names(**names: str) -> Iterator[None]:
    """Replace our argument names by the trainer's in the messages of ValueErrors of a `with` block.

    Within trainer_names(targets="labels"), the error "targets has shape ..." becomes "labels has
    shape ...".

    names   {our name: the trainer's name}
    """
    try:
        yield
    except NotCovered:  # a ValueError too, but not one that users see
        raise
    except ValueError as error:
        # Whole words, but neither attributes (x.mask) nor quoted values ("mask").
        pattern = rf"(?<![\w.'\"])(?:{'|'.join(map(re.escape, names))})(?!\w)"
        message = re.sub(pattern, lambda match: names[match[0]], str(error))
        raise ValueError(message).with_traceback(error.__traceback__) from None


def with_trainer_names(**names: str) -> Callable[[Function], Function]:
    """Return a decorator that makes the errors of a function use a trainer's argument names.

    A function that replaces a trainer's function calls others of this package, whose errors name
    their own arguments. Users know the trainer's names: with targets="labels", "targets has shape"
    becomes "labels has shape".

    names   {our name: the trainer's name}
    """

    def decorated(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with trainer_names(**names):
                return function(*args, **kwargs)

        return call

    return decorated


@dataclass(frozen=True)
class Adapter:
    """The declaration of an adapter. `bind`, the diagnostics, the pages and the tests read it.

    trainer    name of the trainer
    package    its distribution name, for the installed version
    tested     versions that the tests ran with, or prefixes of them: "1.16" stands for 1.16.0,
               1.16.1 and so on
    replaces   {name of our function: dotted path of the trainer's function that it replaces, or
               several paths of which one exists}
    configured {setting in a configuration of the trainer: what it does}
    """

    trainer: str
    package: str
    tested: tuple[str, ...] = ()
    replaces: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    configured: Mapping[str, str] = field(default_factory=dict)

    def installed(self) -> str:
        """Return the installed version, or "of an unknown version"."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return "of an unknown version"

    def untested(self, any_version: bool = False) -> str | None:
        """Return None if the installed version was tested, otherwise a sentence that says so.

        any_version   accept every version: return None. The environment variable
                      GRPO_KERNELS_ANY_VERSION=1 does the same.
        """
        if (
            matches_version(self.installed(), self.tested)
            or any_version
            or os.environ.get(OVERRIDE, "0") == "1"
        ):
            return None
        tested = ", ".join(self.tested) or "none"
        return (
            f"{self.package} {self.installed()} was not tested with this adapter (tested: {tested})"
        )

    def bind(self, *ours: Function, strict: bool = False, any_version: bool = False) -> Slots:
        """Replace functions of the trainer by functions of this package.

        ours          our functions. `self.replaces` has, under the name of each, the dotted path of
                      the trainer's function that it replaces.
        strict        True: a call that our function does not support raises RuntimeError. False:
                      the trainer's own function computes it.
        any_version   False: if the installed version of the trainer was not tested, the first call
                      of each function runs in both, and RuntimeError is raised if the results
                      differ. True: the results are not compared.

        Returns `Slots`, the record of what is replaced: `undo()` restores the trainer's functions,
        and `counts` has the number of calls. Raises RuntimeError if a function is replaced already
        or has other arguments than ours.
        """
        slots = Slots(self, strict, any_version)
        for function in ours:
            slots.bind(function)
        return slots


def matches_version(version: str, known: Sequence[str]) -> bool:
    """Return whether a version is one of `known`, or a release of one: "1.16.2" of "1.16"."""
    return any(f"{version}.".startswith(f"{beginning}.") for beginning in known)


# ---- comparison of the first calls under a version that was not tested

#: Tolerances (relative to the sum of absolute values, absolute per element) of fp32 functions, and
#: of functions of 16-bit tensors, which may accumulate in 16 bits.
FINE = (1e-3, 1e-5)
COARSE = (3e-2, 2e-2)


def run_on_copies(
    function: Function, call: Any, part: Function
) -> tuple[list[Tensor], list[Tensor]]:
    """Call a function on copies of its tensors, because it may overwrite them.

    call   (args, kwargs) of the call
    part   takes the result of the function, and returns the part of it that is wanted

    Returns (float tensors of the selected result, leaves). The leaves are new tensors, one for each
    argument that requires a gradient; gradients of the results flow to them. Warnings are
    suppressed, because the real call repeats them.
    """
    leaves: list[Tensor] = []

    def copy(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x.detach().clone()
        leaf = x.detach().requires_grad_()  # shares the caller's memory, but is not written
        leaves.append(leaf)
        return leaf.clone()  # the function may overwrite this, but not a leaf

    args, kwargs = tree_map_only(Tensor, copy, call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = part(function(*args, **kwargs))
    tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    return [x for x in tensors if x.is_floating_point()], leaves


def gradients_of(results: Sequence[Tensor], leaves: list[Tensor]) -> Sequence[Tensor]:
    """Return the gradient of a weighted sum of the results with respect to each leaf.

    results   float tensors of any shape
    leaves    the tensors that they were computed from

    The weights are different for each element and the same in each call, so that the gradients of
    two functions can be compared. Without results, returns ().
    """
    if not results:
        return ()
    weights = [1.5 + torch.arange(x.numel(), device=x.device).cos() for x in results]
    upstream = [w.to(x.dtype).view(x.shape) for w, x in zip(weights, results, strict=True)]
    return torch.autograd.grad(results, leaves, upstream, allow_unused=True, materialize_grads=True)


@dataclass(eq=False)
class Trial:
    """The comparison of our functions with the trainer's under a version that was not tested.

    Both functions run until the values and gradients of one call were compared. If they agree, one
    warning says so, and only ours runs from then on. If they differ, the trainer's functions are
    restored, and RuntimeError names the difference.

    version   the sentence of `Adapter.untested`; None (no comparison) if the version was tested
    remove    restores the trainer's functions; None if the user installed ours
    done      names of the functions whose values and gradients were compared
    """

    version: str | None
    remove: Callable[[], None] | None = None
    done: set[str] = field(default_factory=set)

    def pending(self, name: str) -> bool:
        """Return whether a function still has to be compared."""
        return self.version is not None and name not in self.done

    def compare_first_calls(
        self, ours: Function, theirs: Function, part: Function = lambda result: result
    ) -> Function:
        """Return a function that calls ours, and compares its first calls with the trainer's.

        ours     our function
        theirs   the trainer's function, with the same arguments and results
        part     takes a result and returns the part of it that is compared

        If the version of the trainer was tested, this is `ours` itself.
        """

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
        """Run both functions on copies of a call and compare values and gradients, if pending.

        name     the name of the function. A comparison is pending until values and gradients of one
                 of its calls agreed.
        ours     our function
        theirs   the trainer's function
        call     (args, kwargs) of the call
        part     takes a result and returns the part of it that is compared

        Raises RuntimeError if they differ, and restores the trainer's functions (`refuse`). A call
        under no_grad has no gradients to compare, so the comparison remains pending.
        """
        if not self.pending(name):
            return
        results, leaves = run_on_copies(ours, call, part)
        try:
            expected, expected_leaves = run_on_copies(theirs, call, part)
        except Exception as error:
            self.refuse(name, f"its own function raised {type(error).__name__}: {error}")
        has_16_bits = any(
            isinstance(x, Tensor) and x.is_floating_point() and x.element_size() < 4
            for x in tree_leaves(call)
        )
        tolerance, floor = COARSE if has_16_bits else FINE
        self.require_close(name, "values", results, expected, tolerance, floor)
        # The trainer does not use the gradient of a result that has none in its own function.
        differentiable = [
            (a, b)
            for a, b in zip(results, expected, strict=True)
            if a.requires_grad and b.requires_grad
        ]
        gradients = gradients_of([a for a, _ in differentiable], leaves)
        wanted = gradients_of([b for _, b in differentiable], expected_leaves)
        # Gradients may be small everywhere, so they get no absolute tolerance.
        self.require_close(name, "gradients", gradients, wanted, tolerance)
        # Gradients of 0, as without advantages, prove nothing.
        if any(x.any() for x in wanted):
            self.mark_compared(name)

    def require_close(
        self,
        name: str,
        what: str,
        ours: Sequence[Tensor],
        theirs: Sequence[Tensor],
        tolerance: float,
        floor: Any = 0.0,
    ) -> None:
        """Call `refuse` unless the tensors are equal up to rounding.

        The sum of absolute differences of a tensor may be `tolerance` times the sum of its absolute
        values, plus `floor` per element.

        name             the compared function
        what             what the tensors are, for the error
        ours, theirs     tensors of our function and of the trainer's
        """
        our_shapes = [[*x.shape] for x in ours]
        their_shapes = [[*x.shape] for x in theirs]
        if our_shapes != their_shapes:
            self.refuse(name, f"{what} have shapes {our_shapes}, and its own {their_shapes}")
        for number, (our_tensor, their_tensor) in enumerate(zip(ours, theirs, strict=True)):
            actual = our_tensor.detach().double()
            expected = their_tensor.detach().double()
            difference = (actual - expected).abs().sum()
            size = expected.abs().sum()
            if not difference <= tolerance * size + floor * expected.numel():  # NaN differs too
                self.refuse(
                    name,
                    f"{what}, tensor {number} of {len(ours)}: {difference:.3g} apart of"
                    f" {size:.3g} in absolute terms",
                )

    def refuse(self, name: str, difference: str) -> NoReturn:
        """Restore the trainer's functions and raise RuntimeError with the difference.

        name         the compared function
        difference   what differs, for the error

        Under a tested version only strict=True compares, and nothing is restored.
        """
        if self.version is None:
            raise RuntimeError(
                f"strict=True, but {difference}: this is a bug of the adapter, or {name} is not the"
                " function that it was written for."
            )
        if self.remove is not None:
            self.remove()
        raise RuntimeError(
            f"{self.version}, and {name} computes something else than in a tested version:"
            f" {difference}. The trainer's own function is restored, and nothing was trained with"
            " ours. Install a tested version, or pass any_version=True (or set"
            f" {OVERRIDE}=1) to use ours nevertheless."
        )

    def mark_compared(self, name: str) -> None:
        """Record that the function `name` was compared. The first one gives a warning."""
        self.done.add(name)
        if len(self.done) == 1:
            warnings.warn(
                f"{self.version}: the first call of {name} was computed by the trainer and by"
                " grpo_kernels. They agree in values and gradients: grpo_kernels is used from now on.",
                stacklevel=3,
            )


# ---- replacing functions


class Slots:
    """The functions of a trainer that are replaced by ours. `undo()` or the end of a `with` block
    restores all of them.

    counts        Counter of calls: "fused", or "<trainer>: <reason>" for a call that the trainer's
                  own function computed
    strict        whether such a call raises RuntimeError instead, and also the end of a `with`
                  block in which none of our functions was called
    any_version   whether a version that was not tested is accepted without a comparison
    trial         the comparison under a version that was not tested
    """

    def __init__(self, adapter: Adapter, strict: bool = False, any_version: bool = False) -> None:
        """Start with no replaced function.

        adapter       declares the trainer, its package and the tested versions
        strict        whether a call that our function does not support raises RuntimeError. If not,
                      the trainer's own function computes it.
        any_version   whether a version that was not tested is accepted without a comparison
        """
        self.adapter = adapter
        self.strict = strict
        # Compares first calls under a version that was not tested. If they differ, it calls `undo`.
        self.trial = Trial(adapter.untested(any_version), self.undo)
        self.counts: Counter[str] = Counter()
        # (module or object, name of its attribute, our value, former value) of each replacement
        self._bound: list[tuple[Any, str, Any, Any]] = []
        # Dotted paths of the replaced functions, for an error.
        self._paths: list[str] = []

    def bind(
        self, ours: Function, path: str = "", *, attribute: str = "", method: bool = False, comparable: bool = True, **fixed: Any
    ) -> None:  # fmt: skip
        """Replace the trainer's function by `ours`, wherever the trainer has imported it.

        These are its own module, and every imported module of the package that has it under any
        name. Modules that are imported later get ours from its own module.

        ours        our function
        path        dotted path of the trainer's function; "" for the declared one
        attribute   the attribute that the trainer calls, such as `apply` of an autograd function;
                    "" for the function itself
        method      whether the attribute is a method, which is replaced in its class. Our function
                    takes the instance first.
        comparable  whether calls of both functions can be compared. If not, because ours returns
                    something else, an untested version raises RuntimeError, and so do positional
                    arguments with other names.
        fixed       arguments of ours that the trainer does not pass

        Raises RuntimeError if the function is replaced already, or if its arguments cannot be
        matched with ours (`adapt_arguments`). After any error all functions are restored.
        """
        try:
            home, name = import_first(path or self.adapter.replaces[ours.__name__])
            if fixed:
                # With the name of our function, which counts and comparisons use.
                ours = functools.wraps(ours)(functools.partial(ours, **fixed))
            if not comparable and self.trial.version is not None:
                raise RuntimeError(
                    f"{self.trial.version}, and {home}.{name} cannot be compared with ours in the"
                    " first step: install a tested version, or pass any_version=True (or set"
                    f" {OVERRIDE}=1) and compare your first steps with and without it."
                )
            theirs = getattr(sys.modules[home], name)  # a function, or a class with the attribute
            if not comparable and not attribute:
                require_same_arguments(f"{home}.{name}", theirs, ours)
            their_function = getattr(theirs, attribute) if attribute else theirs
            adapted = adapt_arguments(ours, their_function)
            compared = self.trial.compare_first_calls(adapted, their_function)
            replacement = self.counted(compared, their_function)
            if method:
                self.replace_attribute(theirs, attribute, replacement)
                self._paths.append(f"{home}.{name}.{attribute}")
                return
            if attribute:
                # A class that has ours as this attribute takes the place of the trainer's class.
                members = {
                    attribute: staticmethod(replacement),
                    "grpo_kernels": True,
                    "theirs": theirs,
                }
                replacement = type(name, (), members)
            # In every module that has it, under any name.
            for module, key in list(references_to(theirs, home)):
                self.replace_attribute(module, key, replacement)
            self._paths.append(f"{home}.{name}")
        except BaseException:
            self.undo()
            raise

    def replace_attribute(self, module: Any, key: str, value: Any) -> None:
        """Set `module.key` to `value` until `undo()`, in this module or object only.

        module   a module, or an object such as a trainer
        key      the name of the attribute
        value    what replaces it

        Calls are not counted. Raises RuntimeError if the attribute is one of our functions already.
        """
        # Our functions have an attribute `grpo_kernels`, see `counted`.
        if getattr(getattr(module, key, None), "grpo_kernels", False):
            raise RuntimeError(
                f"{owner_name(module)}.{key} is replaced by grpo_kernels already: call undo() of the"
                " object that replaced it."
            )
        self._bound.append((module, key, value, vars(module).get(key, ABSENT)))
        setattr(module, key, value)

    def counted(self, ours: Function, theirs: Function) -> Any:
        """Return a function that calls ours, or theirs if ours raises NotCovered, and counts.

        ours     our function. It raises NotCovered, before it computes anything, for a call that it
                 does not support.
        theirs   the trainer's function, with the same arguments and results

        `self.counts` has the number of calls of each kind. In strict mode NotCovered becomes a
        RuntimeError.
        """

        @functools.wraps(ours)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = ours(*args, **kwargs)
            except NotCovered as reason:
                self.leave_to_trainer(reason, ours.__name__, theirs)
                return theirs(*args, **kwargs)
            self.count("fused", theirs)
            return result

        # Marks the function as ours, and remembers the trainer's.
        vars(call).update(grpo_kernels=True, theirs=theirs)
        return torch.compiler.disable(call)  # a trainer may call torch.compile on the function

    def count(self, key: str, function: Function) -> None:
        """Count a call, and log the first call of each key on rank 0.

        key        "fused", or "<trainer>: <reason>" if the trainer's own code computed the call
        function   the trainer's function

        The level of the log is WARNING, because trainers hide lower levels.
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

    def leave_to_trainer(self, reason: NotCovered, name: str, theirs: Function) -> None:
        """Count a call that the trainer's own function computes in place of ours.

        reason   why ours does not support the call
        name     the name of our function, for the error
        theirs   the trainer's function, for the log

        Raises RuntimeError in strict mode.
        """
        if self.strict:
            raise RuntimeError(
                f"strict=True, but {name} is left to {self.adapter.trainer}'s own code: {reason}."
            ) from None
        self.count(f"{self.adapter.trainer}: {reason}", theirs)

    def undo(self) -> None:
        """Restore the trainer's functions, also in modules that were imported since.

        A second call does nothing. Raises RuntimeError, before anything is restored, if another
        package has replaced one of our functions.
        """
        # Each entry: a module or object, the name of its attribute, our value, its former value.
        for module, name, value, _ in self._bound:
            if module.__dict__.get(name) is not value:
                raise RuntimeError(
                    f"{owner_name(module)}.{name} was replaced again after grpo_kernels replaced it:"
                    " undo the later replacement first."
                )
        for module, name, value, theirs in self._bound:
            if theirs is ABSENT:
                delattr(module, name)
                continue
            setattr(module, name, theirs)
            # Modules that were imported since have ours from this module.
            for late_module, key in references_to(value, owner_name(module)):
                setattr(late_module, key, theirs)
        self._bound.clear()

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Restore the trainer's functions at the end of a `with` block.

        kind, error, trace   the exception inside the block, or None

        In strict mode, raises RuntimeError if none of our functions was called in the block.
        """
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


def owner_name(module: Any) -> str:
    """Return the name of a module, or of the type of any other object."""
    return getattr(module, "__name__", type(module).__name__)


def import_first(paths: str | tuple[str, ...]) -> tuple[str, str]:
    """Import the module of the first path whose module exists, and return (module, name).

    paths   a dotted path "package.module.name", or several: versions of a trainer have a function
            in different modules

    Raises the error of the first path if no module exists.
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


def references_to(value: Any, home: str) -> Iterator[tuple[Any, str]]:
    """Yield (module, name) for every module-level name that refers to `value`.

    A module that has imported a function has a reference of its own, also under another name. To
    replace the function, each reference must be replaced.

    value   the function or class
    home    the name of a module. All imported modules of its top-level package are searched.
    """
    package = home.partition(".")[0]
    # Lists, because the caller may change the modules meanwhile.
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] != package:
            continue
        for name, current in list(getattr(module, "__dict__", {}).items()):
            if current is value:
                yield module, name


def require_same_arguments(path: str, theirs: Function, ours: Function) -> None:
    """Raise RuntimeError unless ours begins with the positional arguments of theirs.

    path     dotted path of theirs, for the error
    theirs   the trainer's function
    ours     our function, which is to replace it. Its keyword-only arguments are not compared.
    """

    def positional_arguments(function: Function) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    given = positional_arguments(theirs)
    taken = positional_arguments(ours)
    if given != taken[: len(given)]:
        raise RuntimeError(
            f"{path} takes ({', '.join(given)}), but ours takes ({', '.join(taken)}): it is not the"
            " function that this adapter was written for."
        )


# ---- experimental: this depends on internals of a trainer, which may change in any release


@contextlib.contextmanager
def temporarily_replaced(home: Any, **ours: Any) -> Iterator[None]:
    """Replace names of a module within a `with` block. The end of the block restores them, also
    after an error.

    home   the module
    ours   {name: replacement}. Names that the module does not have are ignored.

    Experimental: other threads of the process see the replacements too.
    """
    theirs = {name: vars(home)[name] for name in ours if name in vars(home)}
    vars(home).update({name: ours[name] for name in theirs})
    try:
        yield
    finally:
        vars(home).update(theirs)
