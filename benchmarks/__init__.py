"""Benchmarks: `python -m benchmarks` runs the suites; side_by_side, roofline, resources, tables, plots are commands of their
own."""

import os
import sys

# Set before torch loads OpenMP, so that it holds for all contenders: waiting threads that spin would slow down the next run.
# Beside a busy process (--busy) contenders run as at a user's, who sets nothing.
if "--busy" not in sys.argv:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
