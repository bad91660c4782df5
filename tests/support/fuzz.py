"""How many random cases a test draws."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

MANY = int(os.environ.get("GRPO_KERNELS_FUZZ", "3000"))


def few(examples: int) -> Callable[[Any], Any]:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, derandomize=examples < MANY, suppress_health_check=quiet)
