"""The resources that the Triton kernels need on a GPU, without a GPU: registers, accesses, occupancy, work per logit; and
their budgets.

    python -m benchmarks.resources [--target sm_90 ...] [--quick] [--json FILE]

Compiles the kernels for each target as the library launches them, and reads the assembly and the binary. Exits with 1 when
a budget (see `broken`) is exceeded. Nothing is timed. Figures per element are counted in the instructions (PTX, AMD's
assembly) of the innermost loops. Those of `scale_` are derived, because its loop also handles the end of a row."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from grpo_kernels.backends import triton as backend
from grpo_kernels.batch import TokenBatch
from grpo_kernels.filters import EntropyFloor
from grpo_kernels.kl import ESTIMATORS, WEIGHTINGS, Kl
from grpo_kernels.objective import Objective
from grpo_kernels.presets import PRESETS
from grpo_kernels.token_stage import TokenRows, formulas
from grpo_kernels.vocabulary.rows import RowStats, RowTransform, Slopes, partials_of

Tensor = torch.Tensor

# ---- targets


@dataclass(frozen=True)
class Target:
    """A GPU by its name in Triton, and the resources of one multiprocessor (compute unit).

    NVIDIA: CUDA programming guide, technical specifications per compute capability. CDNA3: LLVM's AMDGPU usage guide."""

    gpu: GPUTarget
    shared: int  # bytes
    reserved: int = 1024  # bytes of shared memory that each program takes besides its own
    registers: int = 65536
    warps: int = 64
    programs: int = 32

    def occupancy(self, warps: int, registers: int, shared: int) -> tuple[int, str]:
        """(programs resident at a time, what limits them) of programs of so many warps and registers per thread."""
        # Four partitions, each with its share of the registers, given to a warp in eights per thread.
        warp_registers = -(-registers // 8) * 8 * self.gpu.warp_size
        held = 4 * (self.registers // 4 // warp_registers)
        limits = {
            "registers": held // warps,
            "threads": self.warps // warps,
            "programs": self.programs,
            "shared memory": self.shared // (shared + self.reserved) if shared else self.programs,
        }
        limit = min(limits, key=lambda name: limits[name])
        return limits[limit], limit


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 164 << 10),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 228 << 10),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 228 << 10),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 << 10, reserved=0, registers=131072, warps=32, programs=16),
}


class _Driver:
    """Takes the place of Triton's driver. The name of the device separates these kernels from those of a real GPU."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.target].gpu

    def get_current_device(self) -> str:
        return device_name(self.target)

    def get_current_stream(self, device: str) -> int:
        return 0


def device_name(target: str) -> str:
    return f"ahead-of-time {target}"


@contextlib.contextmanager
def compiling(target: str) -> Iterator[list[tuple[str, Any]]]:
    """Inside, a launch compiles for `target` and does not run; (kernel name, compiled kernel) is appended to the list.
    Signatures, specialisation and cache keys are therefore those of a real call."""
    launches: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append((self.__name__, kernel))
        return kernel

    with (
        mock.patch.object(triton.runtime.driver, "_active", _Driver(target)),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        yield launches


# ---- what the library launches


@dataclass(frozen=True)
class Case:
    """One launch: the choices of a caller that select a compiled kernel."""

    kernel: str
    logits: torch.dtype = torch.bfloat16
    gradient: torch.dtype | None = torch.bfloat16  # None: the fused loss without one
    vocab: int = 151936
    stride: int = 151936
    transform: str = "linear"
    entropy: bool = False  # of stats and pull; the bonus of the fused loss
    squares: bool = False  # of stats and pull: sum of squares and largest probability
    objective: str = "grpo"  # a key of OBJECTIVES
    without: str | None = None  # a tensor that the batch lacks: "mask", "old_logps"

    @property
    def partials(self) -> tuple[str, ...]:
        return partials_of(("entropy",) * self.entropy + ("sum_squares", "top_id") * self.squares)

    @property
    def aligned(self) -> bool:
        return self.stride % 16 == 0

    def __str__(self) -> str:
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", None: "no gradient"}
        words = [names[self.logits]]
        if self.kernel in ("pull", "fused") and self.gradient != self.logits:
            words.append(f"-> {names[self.gradient]}")
        words += [f"V {self.vocab}", "aligned" if self.aligned else "unaligned"]
        words += ["padded"] * (self.stride > self.vocab)
        if self.kernel != "scale_":
            words += [self.transform] + ["entropy"] * self.entropy + ["squares"] * self.squares
        if self.kernel == "fused":
            words.append(self.objective)
        words += [f"no {self.without}"] * (self.without is not None)
        return ", ".join(words).replace(", ->", " ->")

    def launch(self) -> None:
        n = 2
        logits = torch.zeros(1, n, self.stride, dtype=self.logits)[..., : self.vocab]
        out = None if self.gradient is None else torch.zeros(1, n, self.stride, dtype=self.gradient)[..., : self.vocab]
        transform = TRANSFORMS[self.transform](n)
        objective = replace(OBJECTIVES[self.objective], entropy_coef=0.01 if self.entropy else 0.0)
        rows = token_rows(n, objective, self.without)
        if self.kernel == "fused":
            backend.fused(logits, rows, objective, transform, out)
        elif self.kernel == "stats":
            backend.stats(logits, rows.targets, rows.read, transform, self.partials)
        elif self.kernel == "pull":
            assert out is not None
            stats = RowStats.not_read(self.partials, n, logits.device)
            zeros = [torch.zeros(n) for _ in range(4)]
            slopes = Slopes(*zeros) if self.squares else Slopes(*zeros[:3]) if self.entropy else Slopes(zeros[0])
            backend.pull(logits, rows.targets, stats, slopes, transform, out)
        else:
            backend.scale_(logits, torch.ones(()))


def token_rows(n: int, objective: Objective, without: str | None = None, offset: int = 0) -> TokenRows:
    """Vectors [n] that start at `offset` in their memory."""
    targets, zeros = torch.zeros(1, n + offset, dtype=torch.int64), torch.zeros(1, n + offset)
    optional: dict[str, Tensor] = {"mask": targets == 0, "old_logps": zeros, "ref_logps": zeros}
    batch = TokenBatch(targets, zeros, **{name: x for name, x in optional.items() if name != without})
    return objective.token_rows(batch, normalizer=1.0)[offset:]


def _objectives() -> dict[str, Objective]:
    """The formulas of all presets that take one pass, and of the other terms that a preset may have."""
    presets = {name: replace(preset, aggregate="token-mean") for name, preset in PRESETS.items() if preset.one_pass}
    grpo = presets["grpo"]
    kls = [*ESTIMATORS, "k3+", *(Kl("k3", weighting) for weighting in WEIGHTINGS), Kl("k3", clamp_log=20.0, clamp=10.0)]
    every = presets | {f"grpo + {kl if isinstance(kl, str) else _kl_name(kl)}": replace(grpo, beta=0.04, kl=kl) for kl in kls}
    every["grpo, entropy floor"] = replace(grpo, filters=(EntropyFloor(1.0),))
    every["grpo, bounded ratio"] = replace(grpo, log_ratio_bounds=(-20.0, 20.0))
    # Presets with the same formula differ in parameters only, which compile nothing new: the first name is kept.
    distinct = {
        (*formulas(o).values(), o.beta != 0, o.kl_spec.clamps is None, o.filters == (), o.log_ratio_bounds): name
        for name, o in reversed(every.items())
    }
    return {name: every[name] for name in reversed(distinct.values())}


def _kl_name(kl: Kl) -> str:
    return f"{kl.estimator}, {'clamped' if kl.clamps else f'{kl.weighting} weighting'}"


OBJECTIVES = _objectives()
TRANSFORMS = {
    "linear": lambda n: RowTransform(1.0, 0.0, 1.0),
    "temperature per row": lambda n: RowTransform(1.0, 0.0, torch.ones(n)),
    "mirrored": lambda n: RowTransform(-0.5, 0.0, 1.0),
    "softcap": lambda n: RowTransform(1.0, 30.0, 1.25),
}
#: (vocabulary, stride of a row): long and short rows; aligned, not aligned, and an odd vocabulary in padded rows.
SHORT = 8192
LAYOUTS = ((151936, 151936), (50257, 50257), (50257, 50272), (1024, 1024), (1001, 1001))
#: Logits and gradient at logits level; the last is a chunk of logits at hidden level. The gradient of fp16 logits has to
#: wait for the loss scale, so the fused kernel makes none for them.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
)


def cases() -> list[Case]:
    """The launches of the library. Layouts, transforms and objectives are varied one at a time: the first two change the
    loops over a row, an objective changes only arithmetic on a few scalars."""
    found: dict[Case, None] = {}  # in order, once
    for (logits, gradient), entropy in product(DTYPES, (False, True)):
        base = Case("stats", logits, gradient, entropy=entropy)
        around = [replace(base, vocab=vocab, stride=stride) for vocab, stride in LAYOUTS]
        around += [replace(base, transform=transform) for transform in TRANSFORMS]
        for case in around:
            if logits == gradient:
                found[case] = None
            found[replace(case, kernel="pull")] = None
            found[replace(case, kernel="fused", gradient=None if logits == torch.float16 else gradient)] = None
    for name in OBJECTIVES:
        found[Case("fused", objective=name)] = None
        found[Case("fused", torch.float32, torch.bfloat16, objective=name, entropy=True)] = None
    found[Case("fused", without="mask")] = None
    found[Case("fused", without="old_logps")] = None
    found[Case("fused", gradient=None)] = None
    found[Case("stats", torch.float32, without="mask")] = None  # as from hidden states
    for logits, gradient in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)):
        found[Case("stats", logits, gradient, squares=True)] = None
        found[Case("pull", logits, gradient, squares=True)] = None
    for dtype, padding in product((torch.float32, torch.bfloat16, torch.float16), (0, 16, 1)):
        found[Case("scale_", dtype, dtype, stride=151936 + padding)] = None
    return list(found)


#: A few of each kernel, to compile in seconds.
QUICK = [
    Case("stats"),
    Case("stats", torch.float32, torch.float32, entropy=True),
    Case("stats", torch.float16, torch.float16, vocab=50257, stride=50257),
    Case("pull", entropy=True),
    Case("pull", torch.float32, torch.float32, transform="softcap"),
    Case("pull", torch.float32, torch.bfloat16),
    Case("fused"),
    Case("fused", torch.float32, torch.bfloat16, entropy=True, objective="grpo + k3"),
    Case("fused", torch.float32, torch.float32, transform="softcap", entropy=True),
    Case("fused", vocab=50257, stride=50257),
    Case("fused", vocab=1024, stride=1024),
    Case("scale_"),
]

# ---- assembly


def code(kernel: Any) -> str:
    return kernel.asm["ptx"] if "ptx" in kernel.asm else kernel.asm["amdgcn"]


def blocks(assembly: str) -> tuple[list[list[str]], list[set[int]]]:
    """Basic blocks of the kernel's code and, for each, where control goes next."""
    body: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for line in map(str.strip, assembly.splitlines()):
        if m := re.match(r"([$.]?L\w*BB\w+):", line):
            body.append([])
            labels[m[1]] = len(body) - 1
        body[-1].append(line)
        if re.search(r"\bbra\b|s_c?branch", line):
            body.append([])
    successors: list[set[int]] = []
    for i, block in enumerate(body):
        last = block[-1] if block else ""
        branch = re.search(r"(?:bra(?:\.uni)?|s_c?branch\w*)\s+([$.]?L\w*BB\w+)", last)
        follows = not re.match(r"bra|s_branch|ret|s_endpgm", last) and i + 1 < len(body)
        successors.append(({labels[branch[1]]} if branch else set()) | ({i + 1} if follows else set()))
    return body, successors


def loops(assembly: str) -> list[list[str]]:
    """The instructions of every innermost loop."""
    body, successors = blocks(assembly)
    reached, stack = {0}, [0]
    while stack:
        stack += (new := successors[stack.pop()] - reached)
        reached |= new
    predecessors = {block: {p for p in reached if block in successors[p]} for block in reached}
    dominators = {block: reached for block in reached} | {0: {0}}  # the blocks on every path from the entry to a block
    changed = True
    while changed:
        changed = False
        for block in sorted(reached - {0}):
            new = {block} | set.intersection(*(dominators[p] for p in predecessors[block]))
            changed |= new != dominators[block]
            dominators[block] = new

    def around(header: int) -> frozenset[int]:
        """The natural loop of a header: the blocks that lead to its back edges without passing through it."""
        inside, stack = {header}, [tail for tail in predecessors[header] if header in dominators[tail]]
        if not stack:
            return frozenset()
        while stack:
            block = stack.pop()
            if block not in inside:
                inside.add(block)
                stack += predecessors[block]
        return frozenset(inside)

    found = {around(header) for header in reached} - {frozenset()}
    inner = [a for a in found if not any(b < a for b in found)]
    return [[line for block in sorted(loop) for line in body[block]] for loop in inner]


LOAD = r"\bld\.global\S*|(?:global|buffer)_load_\w+"
STORE = r"\bst\.global\S*|(?:global|buffer)_store_\w+"
#: Instruction without predicate and suffixes -> floating-point operations; twice as many where it is packed.
FLOPS = {"fma": 2, "fmac": 2, "div_fmas": 2, "max3": 2, "min3": 2} | dict.fromkeys(
    ("add", "sub", "mul", "max", "min", "div"), 1
)
ARITHMETIC = (
    r"(?:@!?%p\d+ )?(?:v_)?(pk_)?(fmac?|div_fmas|max3|min3|add|sub|mul|max|min|div)(?:_f32|[.\w]*\.f32(x2)?(?:\.\w+)?\s)"
)
SPECIAL = r"(?:@!?%p\d+ )?(?:(?:ex2|lg2|rcp|rsq|sqrt|div\.full|div\.approx)\.|v_(?:exp|log|rcp|rsq|sqrt)_f32)"
#: Lines that are not instructions: directives, labels, comments.
NO_INSTRUCTION = r"$|[.;$/{})]|\w+:"


def bits(access: str) -> int:
    """Width of a load or store per thread."""
    if access.startswith(("ld", "st")):
        m = re.search(r"(?:\.v(\d))?\.[bfus](\d+)$", access)
        assert m, access
        return int(m[1] or 1) * int(m[2])
    m = re.search(r"(?:byte|short|dword)(?:_d16)?(?:_hi)?(?:x(\d))?", access)
    assert m, access
    return {"b": 8, "s": 16, "d": 32}[m[0][0]] * int(m[1] or 1)


def accesses(pattern: str, lines: list[str]) -> list[int]:
    return [bits(x) for line in lines for x in re.findall(pattern, line)]


def flops(line: str) -> int:
    m = re.match(ARITHMETIC, line)
    return FLOPS[m[2]] * (2 if m[1] or m[3] else 1) if m else 0


def taken(kernel: Any) -> dict[str, int]:
    """Registers per thread, bytes spilled and bytes of stack."""
    if "amdgcn" in kernel.asm:
        # Scalar registers may spill into lanes of vector registers, which is not memory.
        found = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", kernel.asm["amdgcn"]))
        return {
            "registers": int(found["vgpr_count"]),
            "spilled": 4 * int(found["vgpr_spill_count"]),
            "stack": int(found["private_segment_fixed_size"]),
        }
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    reg, stack, local = (int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return {"registers": reg, "spilled": local, "stack": stack}


# ---- the report


@dataclass(frozen=True)
class Report:
    target: str
    kernel: str
    case: str
    registers: int  # per thread
    spilled: int  # bytes per thread
    stack: int  # bytes per thread
    shared: int  # bytes per program
    warps: int  # per program
    programs: int  # resident per multiprocessor
    limit: str  # what keeps it from being more
    loads: list[int]  # widths in bits of the loops' accesses, per thread
    stores: list[int]
    in_flight: float  # KiB that the resident programs of a multiprocessor load at once
    read: float  # bytes per logit, of a row that gets a gradient
    written: float
    flops: float
    special: float  # exponentials, reciprocals
    instructions: float  # of a thread
    counted: bool  # or derived, per-logit figures
    fp64: bool


def report(target: str, case: Case) -> Report:
    with compiling(target) as launches:
        case.launch()
    ((_, kernel),) = launches
    assembly = code(kernel)
    used = taken(kernel)
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    programs, limit = TARGETS[target].occupancy(warps, used["registers"], shared)
    inner = loops(assembly)
    loads = sorted({width for loop in inner for width in accesses(LOAD, loop)})
    stores = sorted({width for loop in inner for width in accesses(STORE, loop)})
    size = case.logits.itemsize
    threads = programs * warps * TARGETS[target].gpu.warp_size
    work: dict[str, Any]
    if case.kernel == "scale_":
        work = {"in_flight": 0.0, "read": size, "written": size, "flops": 1, "special": 0, "instructions": 0, "counted": False}
    else:
        work = dict.fromkeys(("in_flight", "read", "written", "flops", "special", "instructions"), 0.0) | {"counted": True}
        for loop in inner:
            loaded = sum(accesses(LOAD, loop)) / 8
            if not loaded:  # zeros for a row without a gradient
                continue
            elements = loaded / size
            work["in_flight"] = max(work["in_flight"], loaded * threads / 1024)
            work["read"] += loaded / elements
            work["written"] += sum(accesses(STORE, loop)) / 8 / elements
            work["flops"] += sum(map(flops, loop)) / elements
            work["special"] += sum(bool(re.match(SPECIAL, line)) for line in loop) / elements
            work["instructions"] += sum(not re.match(NO_INSTRUCTION, line) for line in loop) / elements
    fp64 = bool(re.search(r"\.f64|_f64", assembly))
    return Report(
        target, case.kernel, str(case), **used, shared=shared, warps=warps, programs=programs, limit=limit,
        loads=loads, stores=stores, **work, fp64=fp64,
    )  # fmt: skip


#: Bytes per thread that the kernels named may spill where rows are not aligned: a tile in single elements takes ptxas more
#: registers than there are (sm_90, sm_100), mostly outside the loops.
UNALIGNED_SPILL = {"fused": 128, "scale_": 32}


def broken(case: Case, found: Report) -> list[str]:
    """The budgets that a kernel exceeds, in words; empty if it meets all."""
    fused = case.kernel == "fused"
    threads, in_flight = backend.LAUNCH["fused" if fused else "visit"]
    stores = case.kernel != "stats" and case.gradient is not None
    # `LAUNCH` is made for one program of so many threads per multiprocessor, or as many threads in programs of short rows.
    at_most = {
        "registers": (found.registers, TARGETS[found.target].registers // threads),
        "bytes spilled": (found.spilled + found.stack, 0 if case.aligned else UNALIGNED_SPILL.get(case.kernel, 0)),
        "fp64": (int(found.fp64), 0),
        "kinds of store": (len(found.stores), 2 if case.kernel == "scale_" else int(stores)),
    }
    at_least = {"resident threads": (found.programs * found.warps * TARGETS[found.target].gpu.warp_size, threads)}
    if case.aligned:
        widest = max if case.kernel == "scale_" else min  # the loop of `scale_` also handles the end of a row
        at_least["bits per load"] = (widest(found.loads, default=0), 128)
        if case.gradient is not None and stores:
            # A tile is as wide as an access to the logits: 16-bit gradients of fp32 logits are stored by 64 bits.
            at_least["bits per store"] = (
                widest(found.stores, default=0),
                128 * case.gradient.itemsize // max(case.logits.itemsize, case.gradient.itemsize),
            )
    if case.kernel != "scale_" and case.vocab > SHORT:
        at_least["KiB in flight"] = (round(found.in_flight), threads * in_flight * 16 // 1024)
    return [f"{name} {value}, at most {limit}" for name, (value, limit) in at_most.items() if value > limit] + [
        f"{name} {value}, at least {limit}" for name, (value, limit) in at_least.items() if value < limit
    ]


def measure(job: tuple[str, Case]) -> tuple[Report, list[str]]:
    found = report(*job)
    return found, broken(job[1], found)


def measure_all(targets: Sequence[str], cases: Sequence[Case]) -> Iterator[tuple[Report, list[str]]]:
    """Each case for each target, compiled by as many processes as there are processors."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(measure, product(targets, cases), chunksize=4)


def line(found: Report) -> str:
    def widths(x: list[int]) -> str:
        return "/".join(map(str, x)) or "-"

    name = f"{found.kernel:10} {found.case}"
    work = f"{found.read:4g} {found.written:5g} {found.flops:6.1f} {found.special:5.1f} {found.instructions:6.1f}"
    return (
        f"{name:76} {found.registers:4} {found.spilled:5} {found.stack:5} {found.shared:6} {widths(found.loads):>7} "
        f"{widths(found.stores):>7} {found.warps:5} {found.programs:4} {found.programs * found.warps:5} {found.limit:13} "
        f"{found.in_flight:9.0f} {work}{'' if found.counted else '  derived'}"
    )


HEAD = (
    f"{'kernel':76} {'regs':>4} {'spill':>5} {'stack':>5} {'shared':>6} {'load':>7} {'store':>7} {'warps':>5} {'/SM':>4} {'warps':>5} "
    f"{'limit':13} {'in flight':>9} {'read':>4} {'write':>5} {'flops':>6} {'exp':>5} {'instr':>6}\n"
    f"{'':76} {'':>4} {'B':>5} {'B':>5} {'B':>6} {'bit':>7} {'bit':>7} {'':>5} {'':>4} {'/SM':>5} "
    f"{'':13} {'KiB / SM':>9} {'per logit: B, B, operations, exponentials, instructions'}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--quick", action="store_true", help="a few kernels of each kind")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    if not isinstance(backend._stats_kernel, JITFunction):
        parser.error("TRITON_INTERPRET=1 is set: there is nothing to compile. Unset it.")
    results = []
    for found, failures in measure_all(args.target, QUICK if args.quick else cases()):
        if not results or found.target != results[-1][0].target:
            print(f"\n{found.target}, Triton {triton.__version__}\n{HEAD}")
        print(line(found), flush=True)
        results.append((found, failures))
    failed = [(found, failures) for found, failures in results if failures]
    print(f"\n{len(results)} kernels, {len(failed)} beyond their budgets")
    for found, failures in failed:
        print(f"{found.target} {found.kernel} {found.case}: {'; '.join(failures)}")
    if args.json:
        record = [asdict(found) | {"beyond budget": failures} for found, failures in results]
        args.json.write_text(json.dumps({"triton": triton.__version__, "kernels": record}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
