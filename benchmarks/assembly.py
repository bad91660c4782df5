"""Reads the assembly and the binary of a compiled kernel: its innermost loops, accesses and registers."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton


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

    natural_loops = {around(header) for header in reached} - {frozenset()}
    inner = [a for a in natural_loops if not any(b < a for b in natural_loops)]
    return [[line for block in sorted(loop) for line in body[block]] for loop in inner]


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


def accesses(pattern: str, lines: list[str]) -> list[int]:
    """Bits of each access in the lines that matches."""
    return [bits(x) for line in lines for x in re.findall(pattern, line)]


def cuobjdump(kernel: Any, *options: str) -> str:
    """What NVIDIA's tool, which Triton ships, prints about a kernel's binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def taken(kernel: Any) -> dict[str, int]:
    """Registers per thread, bytes spilled and bytes of stack."""
    if "amdgcn" in kernel.asm:
        # Scalar registers may spill into lanes of vector registers, which is not memory.
        counts = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", kernel.asm["amdgcn"]))
        return {
            "registers": int(counts["vgpr_count"]),
            "spilled": 4 * int(counts["vgpr_spill_count"]),
            "stack": int(counts["private_segment_fixed_size"]),
        }
    text = cuobjdump(kernel, "--dump-resource-usage")
    reg, stack, local = (int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return {"registers": reg, "spilled": local, "stack": stack}
