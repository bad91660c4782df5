"""python -m grpo_kernels train | doctor"""

from __future__ import annotations

import sys

USAGE = """usage: python -m grpo_kernels {train,doctor} ...

  train    train a causal language model with GRPO (train --help lists every option)
  doctor   say which kernels run on this machine and why, test them, time them, and what to repair (--quick, --json)
"""


def main(argv: list[str]) -> int:
    command, *rest = argv or ["--help"]
    if command == "train":
        from .training.trainer import main as train

        return train(rest)
    if command == "doctor":
        from .diagnosis.doctor import main as doctor

        return doctor(rest)
    asked = command in ("-h", "--help")
    if not asked:
        print(f"{command!r} is no command.", file=sys.stderr)
    print(USAGE, end="", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
