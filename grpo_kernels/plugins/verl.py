"""verl finds this module by the entry point `verl.plugins` and imports it in every process. The
policy losses of `integrations.verl` come into verl's registry when verl imports that, and only
`actor_rollout_ref.actor.policy_loss.loss_mode=fused_vanilla` has to be set.

Nothing of verl is replaced, and nothing is logged. For log-probs and entropy of its head, name the
plugin `grpo_kernels.plugins.verl_head`. VERL_USE_EXTERNAL_PLUGINS=none turns both off. verl hides
errors of plugins, so they are logged here.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..integrations import verl
from . import once

#: verl's module with its registry. It imports transformers and more, for which `import verl` alone
#: does not wait.
REGISTRY = "verl.trainer.ppo.core_algos"


def register() -> list[str]:
    """Add our losses to verl's registry, once per process, and return their names."""
    return once("verl", verl.register)


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds verl's registry where all others would, once, and registers our losses as soon as it is
    loaded.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                with contextlib.suppress(Exception):  # which is logged; verl works without ours
                    register()

            loader.exec_module = load_and_register
        return spec


if REGISTRY in sys.modules:
    register()
else:
    sys.meta_path.insert(0, AfterImport())
