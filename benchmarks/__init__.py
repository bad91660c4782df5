"""Benchmarks: `python -m benchmarks` runs the suites; the experiments, resources, tune, gpu_kit and report are commands of
their own."""

import os
import sys

# For all contenders of a measurement: waiting threads that spin would slow down the next one. OpenMP reads it when torch is
# loaded. A program that only imports helpers runs as at a user's, who sets nothing.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
