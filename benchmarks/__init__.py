"""Benchmarks:

`python -m benchmarks` runs the suites; swaps, resources, tune, gpu_kit and report are commands of
their own.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

# For all contenders of a measurement: waiting threads that spin would slow down the next one.
# OpenMP reads it when torch is loaded. A program that only imports helpers runs as at a user's, who
# sets nothing.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

#: Of `parser_of`: an option without a value.
SWITCH = {"action": "store_true"}


def parser_of(
    module: str, about: str | None, arguments: dict[str, dict[str, Any]]
) -> argparse.ArgumentParser:
    """The parser of a command, with its module's text as help: {argument: how argparse adds it}."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, how in arguments.items():
        parser.add_argument(name, **how)
    return parser
