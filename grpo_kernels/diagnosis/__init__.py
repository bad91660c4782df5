"""The parts of `python -m grpo_kernels doctor`.

machine.py has facts and settings of the machine, self_test.py the tests of the backends, step.py
the timing of a training step, and doctor.py the report.
"""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """A problem of this machine, and its remedy.

    grave    kernels are missing, wrong or slower than plain PyTorch. If False, they are right, but
             may be slow or less accurate.
    blocks   tests and timings mean nothing before this is repaired
    slows    this may explain a slow step
    """

    problem: str
    remedy: str
    grave: bool = False
    blocks: bool = False
    slows: bool = False


def first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
