"""What all plugins share: they act once in a process, and say so."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

LOG = logging.getLogger("grpo_kernels.plugins")
#: What each plugin's action returned in this process: `Slots` whose undo() takes it off again, or names.
DONE: dict[str, Any] = {}


def announce(text: str) -> None:
    """One line of the log, as a warning, since trainers hide what is less, and on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        LOG.warning("grpo_kernels: %s", text)


def once(plugin: str, act: Callable[[], Any], says: Callable[[Any], str]) -> Any:
    """The result of `act`, which runs if this plugin has not acted in this process yet.

    says   what is logged then, from the result.
    An error is logged in every process before it goes on to the trainer, some of which would hide it."""
    if plugin not in DONE:
        try:
            DONE[plugin] = act()
        except Exception as error:
            LOG.error("grpo_kernels is not used: its plugin %s failed: %s", plugin, error)
            raise
        announce(says(DONE[plugin]))
    return DONE[plugin]
