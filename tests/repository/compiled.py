"""Runs the cases of the Triton kernels as they are compiled for a GPU, in the executor of
tests/support/ptx:

    python tests/repository/compiled.py [--triton36 FOLDER] [--targets sm_90 sm_100] [--orders 0 1
    7] [--page]

By the Triton that is installed, and by 3.6 from a folder (`pip install --no-deps --target FOLDER
triton==3.6.0`), for each target, with warps in their order, reversed, and shuffled by a seed. Each
run goes into benchmarks/results/compiled.json as soon as it has passed, and takes the place of
those of other kernels: the file has runs of one source. The table of benchmarks/README.md is made of it;
`--page`: without a run.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.results import load, save  # noqa: E402
from benchmarks.tables import render, replace_block  # noqa: E402
from support.ptx.runs import ORDERS, TARGETS, run_all_cases  # noqa: E402

FILE, PAGE = ROOT / "benchmarks" / "results" / "compiled.json", ROOT / "benchmarks" / "README.md"
KERNELS = ROOT / "grpo_kernels" / "core" / "backends" / "triton"
COMMAND = "python tests/repository/compiled.py"


def source() -> str:
    """A digest of what is compiled."""
    return hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted(KERNELS.glob("*.py")))
    ).hexdigest()[:16]


def with_run(record: dict[str, Any], key: str, found: dict[str, Any]) -> dict[str, Any]:
    """The record with a run more, without those of another source."""
    return {k: v for k, v in record.items() if v["source"] == found["source"]} | {key: found}


def said(order: int) -> str:
    return {0: "in order", 1: "reversed"}.get(order, "shuffled")


def largest(name: str, some: list[dict[str, Any]]) -> str:
    errors = [found["largest"][name] for found in some if name in found["largest"]]
    return f"{max(errors):.1e}" if errors else "-"


def block(record: dict[str, Any]) -> str:
    """One line for each version and target: all orders together."""
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, found in record.items():
        version, target, _ = key.split()
        lines.setdefault((version, target), []).append(found | {"order": int(key.split()[2])})
    names = list(dict.fromkeys(name for found in record.values() for name in found["largest"]))
    table = [
        [
            "Triton",
            "target",
            "warps",
            "cases",
            "kernels",
            "launches",
            "instructions of warps",
            *names,
        ]
    ]
    for (version, target), some in sorted(lines.items()):
        some.sort(key=lambda found: found["order"])
        table.append(
            [
                version, target, ", ".join(said(found["order"]) for found in some),
                " + ".join(str(found["outcomes"]["passed"]) for found in some), str(max(found["kernels"] for found in some)),
                f"{sum(sum(found['launches'].values()) for found in some):,}",
                f"{sum(found['done']['instructions'] for found in some) / 1e6:.0f} M",
                *(largest(name, some) for name in names),
            ]
        )  # fmt: skip
    return "\n\n".join([render(table, markdown=True), *missing(record)])


def missing(record: dict[str, Any]) -> list[str]:
    """A line on the runs that the file lacks of both versions, targets and all orders."""
    versions = sorted({"3.6.0", *(key.split()[0] for key in record)})
    lack = {
        f"{version} {target}": [
            said(order) for order in ORDERS if f"{version} {target} {order}" not in record
        ]
        for version in versions
        for target in TARGETS
    }
    named = [f"{name} ({', '.join(orders)})" for name, orders in lack.items() if orders]
    return [f"Of these kernels not run yet: {', '.join(named)}."] if named else []


def write(record: dict[str, Any]) -> None:
    PAGE.write_text(replace_block(PAGE.read_text(), PAGE.name, "compiled", block(record), COMMAND))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--triton36", default="", help="a folder with Triton 3.6")
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS)
    parser.add_argument("--orders", nargs="+", type=int, default=ORDERS)
    parser.add_argument("--page", action="store_true", help="make the table from what is there")
    args = parser.parse_args()
    if not args.page:
        for triton in ("", *filter(None, [args.triton36])):
            for order in args.orders:
                for target in args.targets:
                    found = {"source": source()} | run_all_cases(target, order, triton)
                    save(FILE, with_run(load(FILE), f"{found['triton']} {target} {order}", found))
                    print(
                        found["triton"],
                        target,
                        order,
                        found["outcomes"],
                        f"{found['seconds']} s",
                        flush=True,
                    )
    write(load(FILE))


if __name__ == "__main__":
    main()
