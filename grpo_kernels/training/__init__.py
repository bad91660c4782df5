"""The parts of the reference trainer, one concern per file; `grpo_kernels/training/trainer.py` puts them together."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str) -> ModuleType:
    """Import an optional dependency of the trainer, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the trainer needs {module}, which is not installed: pip install '.[train]' in a checkout of grpo_kernels"
        ) from error
