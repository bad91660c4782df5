"""How many random cases a test draws."""

from __future__ import annotations

import os

MANY = int(os.environ.get("GRPO_KERNELS_FUZZ", "3000"))
