"""Benchmarks. `python -m benchmarks` runs the suites.

Further commands are benchmarks.swaps, .resources, .tune, .gpu_kit and .report.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

# OpenMP threads that spin while they wait would slow down the implementation that is timed next.
# OpenMP reads the variable when torch is loaded. If torch is loaded already, this program only
# imports helpers, and runs with the settings of its user.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

#: An option without a value, for `parser_of`.
SWITCH = {"action": "store_true"}


def parser_of(
    module: str, about: str | None, arguments: dict[str, dict[str, Any]]
) -> argparse.ArgumentParser:
    """Return the parser of a command.

    module      its module, as in `python -m MODULE`
    about       the help, as a rule the docstring of the module
    arguments   {option: keywords of ArgumentParser.add_argument}
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option, keywords in arguments.items():
        parser.add_argument(option, **keywords)
    return parser
