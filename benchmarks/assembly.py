"""The assembly and the machine code of a compiled kernel: its loops over a row, the instructions of
an iteration, accesses, the loads in flight, registers.

NVIDIA's binaries are disassembled by `cuobjdump`, which Triton ships; each instruction carries in
its encoding the barrier that a load sets and the barriers that an instruction waits for. AMD's
assembly states its waits.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import triton


def code(kernel: Any) -> str:
    return kernel.asm["ptx"] if "ptx" in kernel.asm else kernel.asm["amdgcn"]


def loops(assembly: str) -> list[list[str]]:
    """The instructions of every innermost loop."""
    body, successors = _blocks(assembly)
    every = _reached(successors, 0)
    predecessors = {block: {p for p in every if block in successors[p]} for block in every}
    found = set()
    for header in every:
        # A branch back to it comes from a block that control reaches through it alone.
        back = predecessors[header] - _reached(successors, 0, without=header)
        if back:
            found.add(
                frozenset(
                    {header}.union(*(_reached(predecessors, tail, without=header) for tail in back))
                )
            )
    inner = [a for a in found if not any(b < a for b in found)]
    return [[line for block in sorted(loop) for line in body[block]] for loop in inner]


def _blocks(assembly: str) -> tuple[list[list[str]], list[set[int]]]:
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
        successors.append(
            ({labels[branch[1]]} if branch else set()) | ({i + 1} if follows else set())
        )
    return body, successors


def _reached(graph: Any, start: int, without: int | None = None) -> set[int]:
    """The blocks to which edges lead from `start`, with it, and not through the block `without`."""
    seen: set[int] = {start} - {without}
    stack = [*seen]
    while stack:
        new = graph[stack.pop()] - seen - {without}
        seen |= new
        stack += new
    return seen


LOAD = r"\bld\.global\S*|(?:global|buffer)_load_\w+"
STORE = r"\bst\.global\S*|(?:global|buffer)_store_\w+"
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


def cuobjdump(kernel: Any, *options: str) -> str:
    """What NVIDIA's tool, which Triton ships, prints about a kernel's binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run(
            [tool, *options, file.name], capture_output=True, text=True, check=True
        ).stdout


def taken(kernel: Any) -> dict[str, int]:
    """Registers per thread, bytes spilled and bytes of stack."""
    if "amdgcn" in kernel.asm:
        # Scalar registers may spill into lanes of vector registers, which is not memory.
        counts = dict(
            re.findall(
                r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)",
                kernel.asm["amdgcn"],
            )
        )
        return {
            "registers": int(counts["vgpr_count"]),
            "spilled": 4 * int(counts["vgpr_spill_count"]),
            "stack": int(counts["private_segment_fixed_size"]),
        }
    text = cuobjdump(kernel, "--dump-resource-usage")
    reg, stack, local = (
        int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL")
    )  # type: ignore[index]
    return {"registers": reg, "spilled": local, "stack": stack}


# ---- machine code


class Instruction(NamedTuple):
    """An instruction of a loop. loads and stores: bits that a thread accesses in device memory.
    local: it accesses a spilled register.
    """

    pipe: str  # one of PIPES
    loads: int
    stores: int
    sets: int | None  # NVIDIA: the barrier that its result sets
    waits: int  # NVIDIA: a bit for each barrier that it waits for. AMD: see `at_most`
    at_most: int | None = None  # AMD: accesses that may be outstanding when it goes on
    copies: bool = False  # NVIDIA: into shared memory, which sets no barrier
    closes: bool = False  # NVIDIA: the copies since the last one that does are a group
    groups: int | None = None  # NVIDIA: of copies, which may be outstanding when it goes on
    local: bool = False


#: The unit that executes an instruction, and limits it besides the four instructions that a
#: multiprocessor issues in a clock cycle: exponentials and reciprocals, fp32 adders and
#: multipliers, device memory, AMD's scalar unit, and all else (integers, maxima, conversions,
#: shared memory).
PIPES = ("special", "fp32", "memory", "scalar", "other")
_SPECIAL = r"MUFU|v_(?:exp|log|rcp|rsq|sqrt)_"
_FP32 = r"F(?:FMA|ADD|MUL)|v_(?:pk_)?(?:fma|fmac|add|sub|subrev|mul|mac)_f32"


def _pipe(name: str) -> str:
    if re.match(_SPECIAL, name):
        return "special"
    if re.match(_FP32, name):
        return "fp32"
    if name.startswith("s_"):  # one for a wave, in addition to the instructions of its threads
        return "scalar"
    return (
        "memory"
        if re.match(r"LDG(?!DEPBAR)|STG|(?:global|buffer)_(?:load|store)", name)
        else "other"
    )


_LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/\s*\n\s*/\* 0x([0-9a-f]{16}) \*/"
)


def disassembled(kernel: Any) -> str:
    """NVIDIA's code as lines that `assembly.loops` reads:

    labels, lower-case branches, and `@@ sets waits` behind each.
    """
    matches = _LINE.findall(cuobjdump(kernel, "--dump-sass"))
    branch = re.compile(r"\bBRA(?:\.\w+)*\s+(!?U?P\w+,\s*)?0x([0-9a-f]+)")
    targets = {int(m[2], 16) for _, text, _, _ in matches if (m := branch.search(text))}
    lines = []
    for address, text, _, encoding in matches:
        if int(address, 16) in targets:
            lines.append(f"L_BB{int(address, 16):x}:")
        control = int(encoding, 16)
        if m := branch.search(text):
            text = f"{'@' if m[1] or m.start() else ''}bra L_BB{int(m[2], 16):x}"
        lines.append(f"{text} @@ {control >> 46 & 7} {control >> 52 & 63}")
    return "\n".join(lines)


def _width(name: str) -> int:
    m = re.search(r"\.(?:U|S)?(8|16|64|128|256)\b", name)
    return int(m[1]) if m else 32


def _nvidia(lines: list[str]) -> Iterator[Instruction]:
    for line in lines:
        if "@@" not in line:
            continue
        text, _, control = line.rpartition("@@")
        name = re.sub(r"^@!?U?P\w+\s+", "", text).split(" ")[0]
        sets, waits = map(int, control.split())
        copies, closes = name.startswith("LDGSTS"), name == "LDGDEPBAR"
        load = _width(name) if name.startswith("LDG") and not closes else 0
        store, local = (
            _width(name) if name.startswith("STG") else 0,
            name.startswith(("LDL", "STL")),
        )
        left = re.search(
            r"DEPBAR\.LE SB0, 0x([0-9a-f]+)", text
        )  # groups of copies count on the first barrier
        groups = int(left[1], 16) if left else None
        yield Instruction(
            _pipe(name),
            load,
            store,
            None if sets == 7 else sets,
            waits,
            None,
            copies,
            closes,
            groups,
            local,
        )


def _amd(lines: list[str]) -> Iterator[Instruction]:
    for line in lines:
        if re.match(NO_INSTRUCTION, line):
            continue
        load, store = (sum(map(bits, re.findall(pattern, line))) for pattern in (LOAD, STORE))
        wait = re.search(r"vmcnt\((\d+)\)", line)
        local = line.startswith("scratch_")
        yield Instruction(
            _pipe(line), load, store, None, 0, int(wait[1]) if wait else None, local=local
        )


@dataclass(frozen=True)
class Loop:
    """The instructions of one iteration of an innermost loop that loads from device memory."""

    body: tuple[Instruction, ...]

    @property
    def loads(self) -> list[int]:
        return [x.loads for x in self.body if x.loads]

    @property
    def stores(self) -> list[int]:
        return [x.stores for x in self.body if x.stores]

    @property
    def local(self) -> int:
        """Accesses to spilled registers."""
        return sum(x.local for x in self.body)

    @property
    def issued(self) -> Counter[str]:
        """Instructions of an iteration by PIPES."""
        return Counter(x.pipe for x in self.body)

    @property
    def in_flight(self) -> int:
        """The most loads of a thread that are outstanding at a time, in the steady state: load,
        wait, load, wait gives 1. Copies into shared memory are loads, and outstanding until their
        group is waited for.
        """
        queue: list[Instruction] = []
        groups = [0]  # of copies, the last one open
        most = 0
        for x in self.body * 3:
            if x.groups is not None:
                groups = groups[max(0, len(groups) - 1 - x.groups) :]
            if x.closes:
                groups.append(0)
            groups[-1] += x.copies
            if x.at_most is not None:
                queue = queue[max(0, len(queue) - x.at_most) :]  # in order, loads and stores alike
            queue = [y for y in queue if y.sets is None or not x.waits >> y.sets & 1]
            if (x.loads and not x.copies) or (x.stores and x.sets is None and self._in_order):
                queue.append(x)
            most = max(most, sum(groups) + sum(y.loads > 0 for y in queue))
        return most

    @property
    def _in_order(self) -> bool:
        return any(x.at_most is not None for x in self.body)


def row_loops(kernel: Any, needs: str = "special") -> list[Loop]:
    """The loops over a row: of those that read it and of those that also write, the one that loads
    most in an iteration. (The assembler may unroll a loop and keep a smaller copy for the rest.)
    Only loops that issue to the pipe `needs`.
    """
    text, read = _text(kernel)
    loops_of_row: dict[bool, Loop] = {}
    for lines in loops(text):
        loop = Loop(tuple(read(lines)))
        writes = bool(loop.stores)
        if (
            loop.loads
            and loop.issued[needs]
            and (writes not in loops_of_row or sum(loop.loads) > sum(loops_of_row[writes].loads))
        ):
            loops_of_row[writes] = loop
    return [loops_of_row[writes] for writes in sorted(loops_of_row)]


def _text(kernel: Any) -> tuple[str, Callable[[list[str]], Iterator[Instruction]]]:
    """The machine code, and the function that reads its lines."""
    return (disassembled(kernel), _nvidia) if "cubin" in kernel.asm else (code(kernel), _amd)
