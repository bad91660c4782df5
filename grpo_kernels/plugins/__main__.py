"""`python -m grpo_kernels.plugins ms_swift` prints the path of a plugin's file, for trainers that take a file. Each of them has a
folder of its own, because the trainer may put that on sys.path."""

from __future__ import annotations

import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Print the path of a plugin's file, or the names of the plugins that are taken by a file."""
    files = {file.parent.name: file for file in sorted(Path(__file__).parent.glob("*/__init__.py"))}
    if len(arguments) != 1 or arguments[0] not in files:
        print(f"one of: {', '.join(files)}", file=sys.stderr)
        return 2
    print(files[arguments[0]])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
