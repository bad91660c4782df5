"""The first call of our classes with Liger's names beside Liger's own, under a Liger-Kernel that they were not tested with."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ._liger_specs import TESTED
from ._slots import Trial, untested


def compare_first_call(module: torch.nn.Module, home: str, any_version: bool) -> None:
    """Let `module`, of a class of ours that has an option `as_liger`, also call the class of its name in `home` until values and
    slopes were compared; see `Trial`. Under a tested version, and where there is no Liger, this does nothing.

    Differences that are ours on purpose are no reason to refuse: it is `as_liger=True` that is compared."""
    version = untested("liger-kernel", TESTED, any_version) if importlib.util.find_spec("liger_kernel") else None
    if version is None:
        return
    trial, name = Trial(version), type(module).__name__

    @torch.compiler.disable
    def before(module: Any, args: Any, kwargs: Any) -> None:
        if not trial.pending(name):
            return
        try:
            released = getattr(importlib.import_module(home), name)
        except ImportError:  # a Liger that cannot be imported is not what ours has replaced
            trial.version = None
            return
        ours = copy.copy(module)
        ours.as_liger = True
        trial.compare(name, _silent(ours.forward), _silent(lambda *a, **k: _like(module, released)(*a, **k)), args, kwargs)

    module.register_forward_pre_hook(before, with_kwargs=True)


def _like(module: Any, released: Callable[..., Any]) -> Any:
    """Liger's object with the options of ours. An option that it lacks is left out where ours has the default, and an error where
    it has another value."""
    known, options = inspect.signature(released).parameters, {}
    for name, parameter in inspect.signature(type(module)).parameters.items():
        value = getattr(module, name, None)
        if parameter.kind is not parameter.KEYWORD_ONLY and (name in known or value != parameter.default):
            options[name] = value
    # Without a KL Liger asks for a reference all the same, unless use_ref_model says that there is none.
    return released(**options | {"compiled": False, "use_ref_model": module.use_ref_model and module.beta != 0})


def _silent(function: Callable[..., Any]) -> Callable[..., Any]:
    """What there is to be warned of is said by the call itself."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)

    return call
