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
    """Name of each module -> what its adapter declares: trainer, package, tested versions, what it
    replaces, what a configuration names. Imports the adapters, and no trainer.
    """
    names = [
        module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
    ]
    return {name: importlib.import_module(f"{__name__}.{name}").ADAPTER for name in names}
