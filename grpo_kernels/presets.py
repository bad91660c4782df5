"""The presets: published objectives as objects, and the constants of trainers (both are written down in published.py)."""

from .objective import Objective
from .published import NUMERICS, PUBLISHED

__all__ = ["NUMERICS", "PRESETS"]

PRESETS = {name: Objective(**fields) for name, fields in PUBLISHED.items()}
