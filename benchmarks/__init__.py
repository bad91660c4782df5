"""Benchmarks: `python -m benchmarks` runs the suites; side_by_side, roofline, resources, tables, plots are commands of their own."""

import os

# Before torch loads OpenMP, and the same for all contenders: threads that spin take the core from whoever runs next.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
