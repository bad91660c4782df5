"""Benchmarks: each module is a command, `python -m benchmarks.NAME`."""

import os

# Before torch loads OpenMP, and the same for all contenders: threads that spin take the core from whoever runs next.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
