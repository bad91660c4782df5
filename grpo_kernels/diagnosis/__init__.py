"""The parts of `python -m grpo_kernels doctor`, one question per file;
`grpo_kernels/diagnosis/doctor.py` puts them together.
"""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """A problem, and what to do about it."""

    problem: str
    remedy: str
    # kernels are missing, wrong or slower than plain PyTorch; else they may be slow or less
    # accurate
    grave: bool = False
    blocks: bool = False  # tests and timings mean nothing before this is repaired
    slows: bool = False  # it may be why a step is slow


def first_line(error: BaseException) -> str:
    """The type of an exception and the first line of its message that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
