"""Benchmarks: `python -m benchmarks` runs the suites; roofline, resources, tables, plots are commands of their own."""

import os
import sys

# For all contenders of a measurement: waiting threads that spin would slow down the next one. OpenMP reads it when torch is loaded.
# Beside a busy process (--busy) contenders run as at a user's, who sets nothing, and so does a program that only imports helpers.
if "--busy" not in sys.argv and "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
