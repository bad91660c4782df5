"""grpo_kernels inside existing trainers, one module per trainer: `from grpo_kernels.integrations
import trl`.

Nothing is imported or patched here, and the core imports none of these modules.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._swap import Adapter


def adapters() -> dict[str, Adapter]:
    """Return {name of each adapter module: its declaration}, without importing a trainer.

    A declaration has the trainer's name and package, the tested versions, the functions that the
    adapter replaces, and the settings of the trainer's configuration that name it.
    """
    modules = pkgutil.iter_modules(__path__)
    names = [module.name for module in modules if not module.name.startswith("_")]
    return {name: importlib.import_module(f"{__name__}.{name}").ADAPTER for name in names}
