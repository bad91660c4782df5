"""Stops a run on request: SIGINT or SIGTERM, from a keyboard, a launcher or a batch system."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Seconds within which a launcher and its batch system may pass on one and the same signal.
ECHO = 3.0


@contextmanager
def stop_after_step() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that the step at hand ends whole; a second signal, `ECHO` seconds later, acts at once."""
    received: list[int] = []
    before: dict[signal.Signals, Any] = {}
    first = 0.0

    def note(number: int, frame: Any) -> None:
        nonlocal first
        if not received:
            first = time.monotonic()
            received.append(number)
            print(f"stopping after this step; once more after {ECHO:.0f} s to stop now", file=sys.stderr)
        elif time.monotonic() - first > ECHO:
            for known, handler in before.items():
                signal.signal(known, handler)
            signal.raise_signal(number)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread, where Python allows no handlers
        before.clear()
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
