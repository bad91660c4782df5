"""Read the assembly and the machine code of a compiled kernel.

`row_loops` returns its loops over a row, with the instructions of an iteration, the widths of
accesses, and the number of loads in flight. `taken` returns its registers and spills.

NVIDIA's binaries are disassembled by `cuobjdump`, which Triton ships. The encoding of each
instruction has the barrier that a load sets, and the barriers that an instruction waits for. AMD's
assembly has instructions that wait.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import triton


def code(kernel: Any) -> str:
    """Return the PTX of a kernel, or its assembly for AMD."""
    return kernel.asm["ptx"] if "ptx" in kernel.asm else kernel.asm["amdgcn"]


def loops(assembly: str) -> list[list[str]]:
    """Return the lines of every innermost loop, one list for each loop.

    assembly   PTX, AMD's assembly, or the text from `disassembled`

    A loop is found by a branch from one of its blocks back to its first block, the header. Control
    reaches all blocks of a loop only through the header.
    """
    lines_of_blocks, successors = _blocks(assembly)
    blocks = _reached(successors, 0)
    predecessors = {
        block: {other for other in blocks if block in successors[other]} for block in blocks
    }
    loops: set[frozenset[int]] = set()
    for header in blocks:
        reached_without_header = _reached(successors, 0, without=header)
        branch_back = predecessors[header] - reached_without_header
        if not branch_back:
            continue
        loop = {header}
        for block in branch_back:
            loop |= _reached(predecessors, block, without=header)
        loops.add(frozenset(loop))
    innermost = [loop for loop in loops if not any(other < loop for other in loops)]
    return [
        [line for block in sorted(loop) for line in lines_of_blocks[block]] for loop in innermost
    ]


def _blocks(assembly: str) -> tuple[list[list[str]], list[set[int]]]:
    """Split assembly into basic blocks.

    Returns the lines of each block, and for each block the indices of the blocks that may be
    executed after it. A block begins at a label or after a branch.
    """
    lines_of_blocks: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for line in map(str.strip, assembly.splitlines()):
        label = re.match(r"([$.]?L\w*BB\w+):", line)
        if label:
            lines_of_blocks.append([])
            labels[label[1]] = len(lines_of_blocks) - 1
        lines_of_blocks[-1].append(line)
        if re.search(r"\bbra\b|s_c?branch", line):
            lines_of_blocks.append([])

    successors: list[set[int]] = []
    for i, lines in enumerate(lines_of_blocks):
        last_line = lines[-1] if lines else ""
        following: set[int] = set()
        branch = re.search(r"(?:bra(?:\.uni)?|s_c?branch\w*)\s+([$.]?L\w*BB\w+)", last_line)
        if branch:
            following.add(labels[branch[1]])
        always_leaves = re.match(r"bra|s_branch|ret|s_endpgm", last_line)
        if not always_leaves and i + 1 < len(lines_of_blocks):
            following.add(i + 1)
        successors.append(following)
    return lines_of_blocks, successors


def _reached(graph: Any, start: int, without: int | None = None) -> set[int]:
    """Return the blocks that can be reached from `start`, which is one of them.

    graph     graph[block] is the set of the next blocks
    without   a block that must not be entered
    """
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
    """Return the bits per thread of a load or store, from the name of its instruction.

    access  a name in PTX, such as ld.global.v4.b32 (4 elements of 32 bits: 128), or for AMD, such
            as global_load_dwordx4 (4 words of 32 bits: 128). Without a count it is one element.
    """
    if access.startswith(("ld", "st")):  # PTX
        match = re.search(r"(?:\.v(?P<count>\d))?\.[bfus](?P<bits>\d+)$", access)
        assert match, access
        return int(match["count"] or 1) * int(match["bits"])
    # AMD. The suffixes _d16 and _hi name a half of a register, and do not change the width.
    match = re.search(r"(?P<type>byte|short|dword)(?:_d16)?(?:_hi)?(?:x(?P<count>\d))?", access)
    assert match, access
    bits_of_type = {"byte": 8, "short": 16, "dword": 32}
    return bits_of_type[match["type"]] * int(match["count"] or 1)


def cuobjdump(kernel: Any, *options: str) -> str:
    """Return what cuobjdump prints about a kernel's binary.

    kernel    a compiled Triton kernel for NVIDIA. The tool is NVIDIA's, and Triton ships it
    options   of the command line, such as "--dump-sass"
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def taken(kernel: Any) -> dict[str, int]:
    """Return the resources of a kernel: "registers", "spilled" and "stack", each per thread.

    kernel    a compiled Triton kernel. Spilled registers and stack are in bytes
    """
    if "amdgcn" in kernel.asm:
        # Scalar registers do not count: they may spill into lanes of vector registers, not memory.
        pattern = r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)"
        counts = dict(re.findall(pattern, kernel.asm["amdgcn"]))
        return {
            "registers": int(counts["vgpr_count"]),
            "spilled": 4 * int(counts["vgpr_spill_count"]),  # a register has 4 bytes
            "stack": int(counts["private_segment_fixed_size"]),
        }
    usage = cuobjdump(kernel, "--dump-resource-usage")  # has "REG:64 STACK:0 SHARED:0 LOCAL:0"

    def number(key: str) -> int:
        match = re.search(rf"{key}:(\d+)", usage)
        assert match, usage
        return int(match[1])

    return {
        "registers": number("REG"),
        "spilled": number("LOCAL"),
        "stack": number("STACK"),
    }


# ---- machine code


class Instruction(NamedTuple):
    """An instruction of a loop.

    pipe              one of PIPES
    load_bits         bits that a thread loads from device memory
    store_bits        bits that a thread stores to device memory
    is_local          whether it accesses a spilled register

    On NVIDIA:

    barrier           the barrier that is set when its result is there, or None
    wait_mask         bit i: it waits for the barrier i
    is_copy           whether it copies into shared memory without waiting. A copy sets no barrier
    closes_group      whether the copies since the previous group form a group
    most_groups       it waits until at most this number of groups of copies is outstanding

    On AMD:

    most_accesses     it waits until at most this number of accesses is outstanding
    """

    pipe: str
    load_bits: int
    store_bits: int
    is_local: bool = False
    barrier: int | None = None
    wait_mask: int = 0
    is_copy: bool = False
    closes_group: bool = False
    most_groups: int | None = None
    most_accesses: int | None = None


#: The units that execute instructions. "special" computes exponentials and reciprocals, "fp32" adds
#: and multiplies, "memory" accesses device memory, "scalar" is AMD's scalar unit, and "other" does
#: the rest (integers, maxima, conversions, shared memory). A multiprocessor issues at most four
#: instructions in a clock cycle, and each unit has a limit too.
PIPES = ("special", "fp32", "memory", "scalar", "other")
_SPECIAL = r"MUFU|v_(?:exp|log|rcp|rsq|sqrt)_"
_FP32 = r"F(?:FMA|ADD|MUL)|v_(?:pk_)?(?:fma|fmac|add|sub|subrev|mul|mac)_f32"


def _pipe(name: str) -> str:
    """Return the unit that executes an instruction, from its name."""
    if re.match(_SPECIAL, name):
        return "special"
    if re.match(_FP32, name):
        return "fp32"
    if name.startswith("s_"):  # AMD: executed once for all threads of a wave
        return "scalar"
    if re.match(r"LDG(?!DEPBAR)|STG|(?:global|buffer)_(?:load|store)", name):
        return "memory"
    return "other"


#: An instruction as cuobjdump prints it, in two lines. The second line has the upper half of the
#: encoding.
_LINE = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/\s*\n"
    r"\s*/\* 0x(?P<upper_half>[0-9a-f]{16}) \*/"
)
_BRANCH = re.compile(r"\bBRA(?:\.\w+)*\s+(?P<predicate>!?U?P\w+,\s*)?0x(?P<target>[0-9a-f]+)")
#: In place of the number of a barrier: an instruction sets none.
_NO_BARRIER = 7


def disassembled(kernel: Any) -> str:
    """Return NVIDIA's machine code in a form that `loops` and `_nvidia` read.

    Targets of branches get labels, branches are in lower case, and each instruction is followed by
    "@@ BARRIER WAITS", see `Instruction.barrier` and `Instruction.wait_mask`.
    """
    matches = list(_LINE.finditer(cuobjdump(kernel, "--dump-sass")))
    branches = [_BRANCH.search(match["text"]) for match in matches]
    targets = {int(branch["target"], 16) for branch in branches if branch}
    lines = []
    for match, branch in zip(matches, branches, strict=True):
        address = int(match["address"], 16)
        if address in targets:
            lines.append(f"L_BB{address:x}:")
        text = match["text"]
        if branch:
            # A predicate comes before or after BRA. Such a branch may not be taken.
            is_conditional = branch["predicate"] or branch.start() > 0
            target = int(branch["target"], 16)
            text = f"{'@' if is_conditional else ''}bra L_BB{target:x}"
        control = int(match["upper_half"], 16)
        barrier = control >> 46 & 7  # 3 bits: the number of a barrier, or _NO_BARRIER
        wait_mask = control >> 52 & 63  # 6 bits, one for each barrier
        lines.append(f"{text} @@ {barrier} {wait_mask}")
    return "\n".join(lines)


def _width(name: str) -> int:
    """Return the bits of an access, from the name of NVIDIA's instruction, such as LDG.E.128."""
    match = re.search(r"\.(?:U|S)?(8|16|64|128|256)\b", name)
    return int(match[1]) if match else 32


def _nvidia(lines: list[str]) -> Iterator[Instruction]:
    """Yield the instructions of a loop from lines of `disassembled`. Labels are skipped."""
    for line in lines:
        if "@@" not in line:  # a label
            continue
        text, _, control = line.rpartition("@@")
        barrier, wait_mask = map(int, control.split())
        name = re.sub(r"^@!?U?P\w+\s+", "", text).split(" ")[0]  # without a predicate
        closes_group = name == "LDGDEPBAR"
        is_load = name.startswith("LDG") and not closes_group
        # Groups of copies are counted by the first barrier, SB0.
        wait_for_groups = re.search(r"DEPBAR\.LE SB0, 0x([0-9a-f]+)", text)
        yield Instruction(
            pipe=_pipe(name),
            load_bits=_width(name) if is_load else 0,
            store_bits=_width(name) if name.startswith("STG") else 0,
            is_local=name.startswith(("LDL", "STL")),
            barrier=None if barrier == _NO_BARRIER else barrier,
            wait_mask=wait_mask,
            is_copy=name.startswith("LDGSTS"),
            closes_group=closes_group,
            most_groups=int(wait_for_groups[1], 16) if wait_for_groups else None,
        )


def _amd(lines: list[str]) -> Iterator[Instruction]:
    """Yield the instructions of a loop from lines of AMD's assembly.

    Directives, labels and comments are skipped.
    """
    for line in lines:
        if re.match(NO_INSTRUCTION, line):
            continue
        wait = re.search(r"vmcnt\((\d+)\)", line)
        yield Instruction(
            pipe=_pipe(line),
            load_bits=sum(bits(access) for access in re.findall(LOAD, line)),
            store_bits=sum(bits(access) for access in re.findall(STORE, line)),
            is_local=line.startswith("scratch_"),
            most_accesses=int(wait[1]) if wait else None,
        )


@dataclass(frozen=True)
class Loop:
    """The instructions of one iteration of an innermost loop that loads from device memory."""

    body: tuple[Instruction, ...]

    @property
    def loads(self) -> list[int]:
        """The bits of each load of a thread."""
        return [instruction.load_bits for instruction in self.body if instruction.load_bits]

    @property
    def stores(self) -> list[int]:
        """The bits of each store of a thread."""
        return [instruction.store_bits for instruction in self.body if instruction.store_bits]

    @property
    def local(self) -> int:
        """The number of accesses to spilled registers."""
        return sum(instruction.is_local for instruction in self.body)

    @property
    def issued(self) -> Counter[str]:
        """The number of instructions of an iteration for each of PIPES."""
        return Counter(instruction.pipe for instruction in self.body)

    @property
    def in_flight(self) -> int:
        """The largest number of loads of a thread that are outstanding at a time.

        Load, wait, load, wait gives 1. A copy into shared memory is a load too. It is outstanding
        until an instruction waits for its group.
        """
        # On AMD, accesses finish in order, and a wait counts loads and stores alike. On NVIDIA only
        # loads matter, each of which sets a barrier.
        counts_accesses = any(instruction.most_accesses is not None for instruction in self.body)
        outstanding: list[Instruction] = []  # loads, and on AMD stores, the oldest first
        # Copies of each outstanding group, the oldest first. The last group is not closed yet.
        copies_of_groups = [0]
        most = 0
        # The loop is simulated for three iterations. The later ones are in the steady state.
        for instruction in self.body * 3:
            # What the instruction waits for is finished when it runs.
            if instruction.most_groups is not None:
                finished = len(copies_of_groups) - 1 - instruction.most_groups
                copies_of_groups = copies_of_groups[max(0, finished) :]
            if instruction.most_accesses is not None:
                finished = len(outstanding) - instruction.most_accesses
                outstanding = outstanding[max(0, finished) :]
            outstanding = [
                access
                for access in outstanding
                if access.barrier is None or not instruction.wait_mask >> access.barrier & 1
            ]
            # What it starts is outstanding from now on.
            if instruction.closes_group:
                copies_of_groups.append(0)
            if instruction.is_copy:
                copies_of_groups[-1] += 1
            elif instruction.load_bits or (instruction.store_bits and counts_accesses):
                outstanding.append(instruction)
            num_loads = sum(access.load_bits > 0 for access in outstanding)
            most = max(most, sum(copies_of_groups) + num_loads)
        return most


def row_loops(kernel: Any, needs: str = "special") -> list[Loop]:
    """Return the loops over a row: at most one that only reads it, then one that also writes.

    The assembler may unroll a loop and keep a smaller copy for the rest of the row. The one that
    loads the most in an iteration is returned.

    needs   a pipe: loops without an instruction for it are ignored
    """
    loops_of_row: dict[bool, Loop] = {}
    for loop in _all_loops(kernel):
        if not loop.loads or not loop.issued[needs]:
            continue
        writes = bool(loop.stores)
        if writes not in loops_of_row or sum(loop.loads) > sum(loops_of_row[writes].loads):
            loops_of_row[writes] = loop
    return [loops_of_row[writes] for writes in sorted(loops_of_row)]


def _all_loops(kernel: Any) -> list[Loop]:
    """Return all innermost loops in the machine code of a kernel."""
    if "cubin" in kernel.asm:
        return [Loop(tuple(_nvidia(lines))) for lines in loops(disassembled(kernel))]
    return [Loop(tuple(_amd(lines))) for lines in loops(code(kernel))]
