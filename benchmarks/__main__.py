"""Our loss and those of other projects side by side: checked against float64, then timed in one
interleaved run.

python -m benchmarks                     all suites; a second run measures only what is missing or
                                         changed
python -m benchmarks --quick             the smallest meaningful cells, a few minutes; with --suite
                                         logits hidden one
python -m benchmarks --suite hidden rows

Ends with the cells of this kind of machine in which ours is slower than plain PyTorch by more than
5 %, or with the line that none is. Exit code: 0; 1 if there is such a cell, or one that could not
be measured.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from benchmarks import SWITCH, parser_of
from benchmarks.machine import kind, load_warning, require_kernels
from benchmarks.measure import describe
from benchmarks.report import promise
from benchmarks.results import RESULTS
from benchmarks.suites import SUITES, How, run
from benchmarks.tune import apply


def main(argv: list[str] | None = None) -> None:
    available = "cuda" if torch.cuda.is_available() else "cpu"
    parser = parser_of("benchmarks", __doc__, {
        "--suite": {"nargs": "+", "choices": SUITES, "default": list(SUITES), "metavar": "NAME", "help": "see --list"},
        "--quick": SWITCH | {"help": "small cells, few runs"},
        "--device": {"choices": ("cpu", "cuda"), "default": available},
        "--without-native": SWITCH | {"help": "measure what runs where our kernels are missing or stale"},
        "--fresh": SWITCH | {"help": "measure again what is there already"},
        "--first": SWITCH | {"help": "the first cell of each suite, without providers that compile for long"},
        "--choices": {"type": Path, "help": "settings of our launches: a file that benchmarks.tune has written"},
        "--out": {"type": Path, "help": "folder (default: benchmarks/results; with --quick runs/benchmarks)"},
        "--list": SWITCH | {"help": "print the suites and their cells, and do nothing"},
    })  # fmt: skip
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no GPU: use --device cpu.")
    if args.list:
        for name in args.suite:
            print(f"{name}: {SUITES[name].title}")
            for cell, _ in SUITES[name].plan(args.device, args.quick):
                print(
                    "  "
                    + ", ".join(
                        f"{key} {value}"
                        for key, value in describe(cell).items()
                        if value is not None
                    )
                )
        return
    if not args.without_native:
        require_kernels(args.device)
    busy = load_warning(os.getloadavg()[0], os.cpu_count() or 1)
    if busy is not None:
        print(busy, file=sys.stderr)
    out = args.out or (Path("runs/benchmarks") if args.quick else RESULTS)
    choices = apply(args.choices) if args.choices else None
    paths, unmeasured = run(
        args.suite, How(args.device, out, args.quick, args.first, args.fresh, choices)
    )
    print("\nwritten:", *paths)
    if unmeasured:
        print("\nCells without figures:", *unmeasured, sep="\n")
    kept, said = (
        True,
        "Not compared with plain PyTorch: without our kernels there is nothing to compare.",
    )
    if not args.without_native:
        kept, said = promise(out, kind(args.device))
    print(f"\n{said}")
    if unmeasured or not kept:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
