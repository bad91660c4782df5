"""Instructions per logit on a GPU, counted in the machine code of our kernels and of other projects'. No GPU is needed.

    python -m benchmarks.instructions [--target sm_90 ...] [--write]

Kernels are compiled with the arguments of real launches: ours as the library launches them, others by a call of their provider
whose launches compile but do not run. `--write` puts the counts of this version of Triton into results/instructions.json, from
which `python -m benchmarks.roofline --kernels` computes what limits each kernel on each GPU. Counts are the instructions that a
thread issues in the steady state of a row. A kernel without a loop over its row is counted as a whole."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from benchmarks import results
from benchmarks.assembly import taken
from benchmarks.cases import Cell
from benchmarks.inputs import make_case
from benchmarks.kernel_bounds import PATH
from benchmarks.launches import TARGETS, Case, compiling
from benchmarks.machine import versions
from benchmarks.other_launches import Selecting, of_two
from benchmarks.providers import providers
from benchmarks.sass import PIPES, Loop, row_loops, whole
from grpo_kernels.rows.backends import triton as backend

QWEN = 151936


@dataclass(frozen=True)
class Work:
    """The work of one visit of a row."""

    kernel: str
    writes: bool  # it stores the gradient
    issued: dict[str, float]  # instructions that a thread issues for each logit, by PIPES
    together: int  # loads of a thread before it waits for the first, in one round of its loop
    loads: int  # all of them
    registers: int
    spilled: int  # bytes, of registers and stack
    threads: int  # of a program


@dataclass(frozen=True)
class Way:
    """One way to compute the gradient of logits."""

    name: str
    bytes: float  # of device memory, read and written for each logit
    launch: Callable[[], Any]
    size: int = 2  # bytes of a logit, of a pair of them where a visit reads two rows


def _ours(*cases: Case) -> None:
    for case in cases:
        case.launch()


def _theirs(name: str) -> None:
    """A call of another project's provider, which is the one that is timed."""
    provider = next(p for p in providers("logits") if p.name == name)
    provider.make(make_case(Cell("logits", 4, QWEN, torch.bfloat16, sequences=2), "cpu")).call()


WAYS = (
    Way("grpo_kernels, in place", 4, partial(_ours, Case("fused"))),
    Way("grpo_kernels, in place, odd vocabulary", 4, partial(_ours, Case("fused", vocab=128257, stride=128257))),
    Way("grpo_kernels, in place, softcap", 4, partial(_ours, Case("fused", transform="softcap"))),
    Way("grpo_kernels, layer 1 + loss", 6, partial(_ours, Case("stats"), Case("pull"))),
    Way("grpo_kernels, fp32 logits of a chunk -> bf16", 6, partial(_ours, Case("fused", torch.float32)), size=4),
    Way("grpo_kernels, KL of two logits", 10, partial(_ours, *of_two("reverse")), size=4),
    Way("grpo_kernels, JSD of two logits", 14, partial(_ours, *of_two("jsd")), size=4),
    Way("grpo_kernels, KL of two logits, softcap", 10, partial(_ours, *of_two("reverse", "softcap")), size=4),
    Way("grpo_kernels, JSD of two logits, softcap", 14, partial(_ours, *of_two("jsd", "softcap")), size=4),
    Way("grpo_kernels, columns of a sparse gradient", 4, partial(_ours, Selecting("select", torch.float32)), size=4),
    Way("Liger GRPO loss", 6, partial(_theirs, "Liger GRPO loss")),
    Way("TRL kernel + loss", 6, partial(_theirs, "TRL kernel + loss")),
)


def elements(kernel: Any, loop: Loop, size: int) -> float:
    """Logits that a thread processes in one iteration of the loop. Without a loop: its share of the program's block."""
    if row_loops(kernel):
        return sum(loop.loads) / 8 / size
    names, constants = kernel.src.fn.arg_names, kernel.src.constants
    block = next(value for (i,), value in constants.items() if names[i].startswith("BLOCK"))
    return float(block) / threads(kernel)


def threads(kernel: Any) -> int:
    """Of a program."""
    return int(kernel.metadata.num_warps * kernel.metadata.target.warp_size)


def count(target: str, way: Way) -> list[Work]:
    """Each visit of a row by each kernel, in the order of their launches."""
    with compiling(target) as launches:
        way.launch()
    return [_work(name, kernel, loop, way.size) for name, kernel in launches for loop in row_loops(kernel) or [whole(kernel)]]


def _work(name: str, kernel: Any, loop: Loop, size: int) -> Work:
    n, used = elements(kernel, loop, size), taken(kernel)
    issued = {pipe: round(loop.issued[pipe] / n, 3) for pipe in PIPES}
    spilled = used["spilled"] + used["stack"]
    name = name.strip("_").removesuffix("_kernel")
    return Work(name, bool(loop.stores), issued, loop.in_flight, len(loop.loads), used["registers"], spilled, threads(kernel))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--write", action="store_true", help=f"into {PATH.name}, in place of this version's")
    args = parser.parse_args(argv)
    if not isinstance(backend._stats_kernel, JITFunction):
        parser.error("TRITON_INTERPRET=1 is set: there is nothing to compile. Unset it.")
    counts: dict[str, dict[str, Any]] = {}
    for target in args.target:
        print(f"\n{target}, Triton {triton.__version__}: instructions of a thread for each logit")
        for way in WAYS:
            works = count(target, way)
            counts.setdefault(target, {})[way.name] = {"bytes": way.bytes, "visits": [asdict(work) for work in works]}
            for work in works:
                parts = ", ".join(f"{pipe} {n:.2f}" for pipe, n in work.issued.items() if n)
                print(
                    f"  {way.name:48} {work.kernel:18} {'read, write' if work.writes else 'read':12}"
                    f"{sum(work.issued.values()):6.2f} ({parts}), {work.together} of {work.loads} loads before the first wait, "
                    f"{work.registers} registers x {work.threads}" + f", {work.spilled} bytes spilled" * bool(work.spilled),
                    flush=True,
                )  # fmt: skip
    if args.write:
        record = results.load(PATH)
        here = {"versions": versions() | {"torch": torch.__version__}, "targets": counts}
        results.save(PATH, {**record, triton.__version__: here})


if __name__ == "__main__":
    main()
