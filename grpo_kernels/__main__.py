"""python -m grpo_kernels train | doctor | plugin"""

from __future__ import annotations

import sys
from pathlib import Path

from .checks import nearest

USAGE = """usage: python -m grpo_kernels {train,doctor,plugin} ...

  train    train a causal language model with GRPO (train --help lists every option)
  doctor   say which kernels run on this machine and why, test them, time them, and what to repair (--quick, --json)
  plugin   print the path of a plugin's file, for a trainer that takes a file (plugin ms_swift)
"""


def main(argv: list[str]) -> int:
    command, *rest = argv or ["--help"]
    if command == "train":
        from .training.trainer import main as train

        return train(rest)
    if command == "doctor":
        from .diagnosis.doctor import main as doctor

        return doctor(rest)
    if command == "plugin":
        # One folder for each, because the trainer may put it on sys.path.
        files = {
            file.parent.name: file
            for file in sorted(Path(__file__).parent.glob("plugins/*/__init__.py"))
        }
        if len(rest) == 1 and rest[0] in files:
            print(files[rest[0]])
            return 0
        print(f"plugin takes one of {', '.join(files)}.", file=sys.stderr)
        return 2
    asked = command in ("-h", "--help")
    if not asked:
        print(
            f"{command!r} is no command.{nearest(command, ('train', 'doctor', 'plugin'))}",
            file=sys.stderr,
        )
    print(USAGE, end="", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
