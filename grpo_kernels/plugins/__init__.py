"""Plugins that a trainer's configuration names, so that none of its code has to change; see
grpo_kernels/integrations/README.md.

Importing other modules of this package changes nothing in a trainer. Importing a plugin does, or
the trainer calls the plugin's function when it starts: naming it in the configuration asks for
that. Each plugin acts once per process, even if it is imported several times or under several
names, and logs one line about what it did.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

LOG = logging.getLogger("grpo_kernels.plugins")
#: The result of each plugin that has acted in this process: `Slots`, whose undo() removes the
#: change again, or names.
DONE: dict[str, Any] = {}


def announce(text: str) -> None:
    """Logs one line on rank 0 only. It is a warning, because trainers hide lower levels."""
    if os.environ.get("RANK", "0") == "0":
        LOG.warning("grpo_kernels: %s", text)


def once(plugin: str, act: Callable[[], Any], says: Callable[[Any], str] | None = None) -> Any:
    """The result of `act`, which runs if this plugin has not acted in this process yet.

    says   makes the line of the log from the result; None: no line.
    An error is logged in every process and then raised, because some trainers hide it."""
    if plugin not in DONE:
        try:
            DONE[plugin] = act()
        except Exception as error:
            LOG.error("grpo_kernels is not used: its plugin %s failed: %s", plugin, error)
            raise
        if says is not None:
            announce(says(DONE[plugin]))
    return DONE[plugin]


def require_init(plugin: str, module: str) -> None:
    """Raise RuntimeError in a hook of Megatron if the `init` of its plugin has not run.

    module   the name of the module that has both
    """
    if plugin not in DONE:
        raise RuntimeError(
            f"a hook of {module} was called, but not its init: pass"
            f" --custom-megatron-init-path {module}.init too."
        )
