"""The loss in the place of Liger's, in trainers that keep it as an attribute: TRL 0.17 to 1.13, with use_liger_kernel=True
(use_liger_loss before 0.25), and ms-swift.

    from grpo_kernels.integrations import liger_slot

    slots = liger_slot.patch(trainer)     # one trainer that exists
    slots = liger_slot.bind()             # or every trainer of this process that will be made

The constants are those that the trainer gave to its own object. The first call is compared with it where the version of
Liger-Kernel (or of a TRL with a copy of it) is not one of `KNOWN`. What Liger's slot has not, ours has not there: the entropy
bonus, the entropy quantile, off-policy masks. From 1.15 on TRL has a place for the whole loss: `integrations.trl`.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from ._liger_specs import TESTED
from ._slots import Ragged, untested
from .liger import LigerFusedLinearGRPOLoss

#: By package, the versions whose object was compared with ours.
KNOWN = {"liger-kernel": TESTED, "trl": ("1.13",)}
HOME, NAME = "liger_kernel.chunked_loss", "LigerFusedLinearGRPOLoss"
#: What trainers call the attribute, the newest first.
ATTRIBUTES = ("liger_loss", "liger_grpo_loss")


def patch(trainer: Any, *, strict: bool = False, any_version: bool = False) -> Ragged:
    """Replace the loss object of this trainer, and of no other; the result undoes it, by `undo()` or as a context manager.

    strict        True: a call that Liger has to handle raises RuntimeError.
    any_version   True: no comparison under a version that was not tested.
    Raises RuntimeError for a trainer without such an object, or with ours, and in the first step where the comparison fails."""
    name = next((name for name in ATTRIBUTES if callable(getattr(trainer, name, None))), None)
    if name is None:
        raise RuntimeError(
            f"{type(trainer).__name__} has no loss of Liger's ({' or '.join(ATTRIBUTES)}): make it with use_liger_kernel=True (TRL 0.17 to "
            "0.24, and in axolotl: use_liger_loss=True). Other versions of TRL have no such place: before 0.17 install a newer one, in 1.14 take "
            "integrations.trl_head.fused_lm_head(), from 1.15 on integrations.trl.patch(trainer)."
        )
    theirs = getattr(trainer, name)
    if getattr(theirs, "grpo_kernels", False):
        raise RuntimeError(f"the {name} of this trainer is ours already: call undo() on what patch() returned.")
    slots = _slots(theirs, strict, any_version)
    slots.put(trainer, name, _in_place_of(theirs, slots))
    return slots


def bind(*, strict: bool = False, any_version: bool = False) -> Ragged:
    """Make `liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss` ours for what imports it from now on; `undo()` puts it back,
    but for trainers that are made already. Options and errors are those of `patch`."""
    home = importlib.import_module(HOME)
    theirs = getattr(home, NAME)
    if getattr(theirs, "grpo_kernels", False):
        raise RuntimeError(f"{HOME}.{NAME} is ours already: call undo() on what bound it.")
    slots = _slots(theirs(), strict, any_version)

    def make(*args: Any, **kwargs: Any) -> Any:
        return _in_place_of(theirs(*args, **kwargs), slots)

    make.grpo_kernels = True  # type: ignore[attr-defined]
    slots.put(home, NAME, make)
    return slots


def _slots(theirs: Any, strict: bool, any_version: bool) -> Ragged:
    package = type(theirs).__module__.partition(".")[0].replace("_", "-")
    return Ragged("liger_kernel", strict, "Liger", untested(package, KNOWN.get(package, ()), any_version))


def _in_place_of(theirs: Any, slots: Ragged) -> Any:
    """Our loss with the constants of their object, which is also called while the two are being compared."""
    names = [name for name in inspect.signature(LigerFusedLinearGRPOLoss.__init__).parameters if hasattr(theirs, name)]
    missing = {"beta", "epsilon_low", "epsilon_high", "loss_type", "temperature"} - {*names}
    if missing:
        raise RuntimeError(f"{type(theirs).__name__} has no {', '.join(sorted(missing))}: it is not Liger's GRPO loss.")
    module = LigerFusedLinearGRPOLoss(
        **{name: getattr(theirs, name) for name in names}, any_version=True
    )  # compared by `slots`

    def loss(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return module(*args, **kwargs)

    return slots.counted(loss, theirs)
