"""Compare our losses with those of other projects.

Each implementation is checked against float64. Then all of them are timed in turns in one process.

python -m benchmarks                     all suites; a second run only measures cells that are
                                         missing or changed
python -m benchmarks --quick             small cells, a few minutes
python -m benchmarks --suite hidden rows

At the end, the command lists the cells of this kind of machine in which ours is slower than plain
PyTorch by more than 5 %. The exit code is 1 if there is such a cell, or if a cell could not be
measured.
"""

from __future__ import annotations

import argparse
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


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    available = "cuda" if torch.cuda.is_available() else "cpu"
    return parser_of("benchmarks", __doc__, {
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


def _print_cells(names: list[str], device: str, quick: bool) -> None:
    """Print the titles and the cells of suites."""
    for name in names:
        print(f"{name}: {SUITES[name].title}")
        for cell, _ in SUITES[name].plan(device, quick):
            fields = describe(cell).items()
            words = [f"{field} {value}" for field, value in fields if value is not None]
            print("  " + ", ".join(words))


def main(argv: list[str] | None = None) -> None:
    """Run the command with these arguments; None: those of the process."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no GPU: use --device cpu.")
    if args.list:
        _print_cells(args.suite, args.device, args.quick)
        return
    if not args.without_native:
        require_kernels(args.device)
    warning = load_warning(os.getloadavg()[0], os.cpu_count() or 1)
    if warning is not None:
        print(warning, file=sys.stderr)
    out = args.out or (Path("runs/benchmarks") if args.quick else RESULTS)
    how = How(
        device=args.device,
        out=out,
        quick=args.quick,
        first=args.first,
        fresh=args.fresh,
        choices=apply(args.choices) if args.choices else None,
    )
    paths, unmeasured = run(args.suite, how)
    print("\nwritten:", *paths)
    if unmeasured:
        print("\nCells without figures:", *unmeasured, sep="\n")

    if args.without_native:
        kept = True
        comparison = (
            "Not compared with plain PyTorch: without our kernels there is nothing to compare."
        )
    else:
        kept, comparison = promise(out, kind(args.device))
    print(f"\n{comparison}")
    if unmeasured or not kept:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
