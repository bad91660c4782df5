"""Run PTX kernels on CPU tensors. Only the PTX that Triton emits for the kernels of this package on
sm_90 and sm_100 is understood.

    Program(ptx).run(arguments, tensors, programs, shared, order)

Warps run one after the other. Each runs until its next barrier, in an order that the caller
chooses. An asynchronous copy arrives when the kernel waits for it. A faulty access (see FAULTS)
raises Fault after the kernel has ended. An instruction that machine.c does not implement raises
UnknownInstruction when the kernel is parsed.

Not covered: ptxas, which translates PTX to machine code; the memory order of the hardware within a
warp; the error of the hardware's approximate instructions; timing.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("machine.c")
#: Every operation rounds separately, as in PTX. Integers wrap.
FLAGS = (
    "-O3", "-march=native", "-ffp-contract=off", "-fno-trapping-math", "-fno-strict-aliasing",
    "-fwrapv", "-shared", "-fPIC",
)  # fmt: skip

#: In the order of the enum of machine.c.
FAULTS = (
    "out of bounds",
    "misaligned",
    "threads that should be together are apart",
    "accesses of warps to shared memory that no barrier orders",
    "accesses of warps to device memory that no barrier orders",
    "accesses of programs to device memory, which nothing orders",
    "shared memory that nothing was written to is read",
    "memory of an asynchronous copy that is under way is used",
)
#: Threads of a warp.
LANES = 32
#: The most operands that an instruction has in machine.c.
MAX_OPERANDS = 12
#: Values of _Instruction.control: computes, jumps, ends the thread, waits at a barrier.
COMPUTE, BRANCH, END, BARRIER = range(4)
#: Bits of a register of each PTX type. 8-bit values are kept in 16-bit registers.
BITS = {
    "pred": 8, "b8": 16, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32,
    "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64,
    "f32x2": 64, "f64": 64,
}  # fmt: skip
#: Modifiers that change no result: uniform jumps, cache operators, the fraction of a cache policy.
NO_EFFECT = {"uni", "ca", "cg", "fractional"}
#: Indices and counts of threads and programs, in 32 bits each.
SPECIAL_REGISTERS = ("%tid.x", "%ctaid.x", "%nctaid.x", "%ntid.x")


class UnknownInstruction(Exception):
    """machine.c does not implement this instruction, or not this form of it."""


class Fault(AssertionError):
    """A kernel made faulty accesses.

    faults   the number of faults of each kind that occurred, by the names of FAULTS
    """

    def __init__(self, kernel: str, faults: dict[str, int], messages: Sequence[str]) -> None:
        """Make the error of a kernel. The messages describe some of the faults, a line each."""
        counts = ", ".join(f"{count} x {name}" for name, count in faults.items())
        super().__init__("\n".join([f"{kernel}: {counts}", *messages]))
        self.faults = faults


# The following structures have the fields of those in machine.c, in the same order.


class _Instruction(ctypes.Structure):
    """One instruction.

    function         its function in machine.c
    address_offset   the constant in an address such as [%rd1+16]
    control          COMPUTE, BRANCH, END or BARRIER
    guard            offset of its predicate register, or -1
    guard_negated    1 for @!%p: it runs if the predicate is false
    target           index of the next instruction after a jump; bytes of a copy
    elements         length of a vector that is loaded or stored
    operands         byte offsets of the operands in the register file
    """

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("address_offset", ctypes.c_int64),
        ("control", ctypes.c_int32),
        ("guard", ctypes.c_int32),
        ("guard_negated", ctypes.c_int32),
        ("target", ctypes.c_int32),
        ("elements", ctypes.c_int32),
        ("operands", ctypes.c_int32 * MAX_OPERANDS),
    )


class _Region(ctypes.Structure):
    """Device memory from `begin` to `end`.

    `allowed` has one byte for each `unit_bytes` bytes of it: 1 if a kernel may access them. `cells`
    is used by machine.c.
    """

    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("unit_bytes", ctypes.c_uint64),
        ("allowed", ctypes.c_void_p),
        ("cells", ctypes.c_void_p),
    )


class _Report(ctypes.Structure):
    """One fault: its kind (an index of FAULTS) and where it occurred."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("instruction", ctypes.c_int32),
        ("program", ctypes.c_int32),
        ("warp", ctypes.c_int32),
        ("lane", ctypes.c_int32),
        ("bytes", ctypes.c_int32),
        ("address", ctypes.c_uint64),
    )


class _Machine(ctypes.Structure):
    """The state of a launch, with its counters and the faults that were found."""

    _fields_ = (
        ("code", ctypes.c_void_p),
        ("regions", ctypes.c_void_p),
        ("num_regions", ctypes.c_int32),
        ("shared", ctypes.c_void_p),
        ("shared_cells", ctypes.c_void_p),
        ("shared_bytes", ctypes.c_uint64),
        ("program", ctypes.c_int32),
        ("epoch", ctypes.c_int32),
        ("instructions", ctypes.c_int64),
        ("barriers", ctypes.c_int64),
        ("loaded", ctypes.c_int64),
        ("stored", ctypes.c_int64),
        ("copied", ctypes.c_int64),
        ("fault_counts", ctypes.c_int64 * len(FAULTS)),
        ("num_reports", ctypes.c_int32),
        ("reports", _Report * 64),
    )


class _Layout(ctypes.Structure):
    """The size of a register file, and byte offsets in it: of the constants, of the index of each
    thread, and of the index of the program.
    """

    _fields_ = (
        ("file_bytes", ctypes.c_int32),
        ("constants", ctypes.c_int32),
        ("thread", ctypes.c_int32),
        ("program", ctypes.c_int32),
    )


@functools.cache
def machine() -> ctypes.CDLL:
    """Return the library that is built from machine.c.

    It is built once per source, flags and processor, and then shared by all processes.
    """
    key = SOURCE.read_bytes() + repr(FLAGS).encode() + _processor_flags()
    digest = hashlib.sha256(key).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"grpo_kernels_ptx_{os.getuid()}_{digest}.so"
    if not library.exists():
        # Other processes never see a half-written library.
        unfinished = library.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, *FLAGS, "-o", str(unfinished), str(SOURCE), "-lm"], check=True)
        unfinished.replace(library)
    return ctypes.CDLL(str(library))


def _processor_flags() -> bytes:
    """Return the line of /proc/cpuinfo with the processor's features, or b"" if there is none."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return b""
    for line in info.read_bytes().splitlines():
        if line.startswith(b"flags"):
            return line
    return b""


@dataclass(frozen=True)
class Statement:
    """An instruction of a kernel.

    text     its PTX
    source   file and line of the Triton kernel that it was compiled from
    """

    text: str
    source: str


@dataclass(frozen=True)
class Counts:
    """What a launch did.

    instructions   instructions that warps executed
    barriers       barriers that programs passed
    loaded         bytes loaded from device memory, except by asynchronous copies
    stored         bytes stored to device memory
    copied         bytes that asynchronous copies loaded from device memory
    """

    instructions: int
    barriers: int
    loaded: int
    stored: int
    copied: int


class Program:
    """A kernel, parsed from PTX and encoded for machine.c.

    Each warp has a register file. It holds 32 values of each register, one per lane, and behind
    the registers 32 copies of each constant. While instructions are encoded, a constant has a
    negative offset (see `_constant`), because the size of the registers is not known yet.
    """

    def __init__(self, ptx: str) -> None:
        """Parse the only kernel of a PTX module."""
        entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)\s*(.*?)\n\{\n(.*?)\n\}", ptx, re.S)
        assert entry is not None, "no kernel"
        self.name, parameters, directives, body = entry.groups()
        if "cluster" in directives:
            raise UnknownInstruction(f"{self.name}: clusters")
        self.parameters = re.findall(r"(\w+),?\s*$", parameters, re.M)
        (threads,) = re.findall(r"\.reqntid (\d+)", directives)
        self.threads = int(threads)
        self.files = dict(re.findall(r'^\s*\.file\s+(\d+) (?:"[^"]*" )?"([^"]*)"', ptx, re.M))
        self._shared_names = set(re.findall(r"\.extern \.shared .* (\w+)\[\]", ptx))
        self.statements, self._labels = self._split(body)

        # Each register's byte offset and number of bits.
        self._registers: dict[str, tuple[int, int]] = {}
        self._register_bytes = 0
        # Byte offsets from the first constant, by (name or number, bits).
        self._constants: dict[tuple[str, int], int] = {}
        self._constant_bytes = 0
        # ".reg .b32 %r<7>;" declares %r0 to %r6.
        for ptx_type, prefix, count in re.findall(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>", body):
            for i in range(int(count)):
                self._declare(f"%{prefix}{i}", BITS[ptx_type])
        self._declare("_", 64)  # takes results that are not used
        self._thread = self._constant("%tid.x", 32)
        self._program = self._constant("%ctaid.x", 32)
        self._code = self._encode_statements()

    # ---- parsing

    def _split(self, body: str) -> tuple[list[Statement], dict[str, int]]:
        """Return the instructions of a kernel, and {label: index of the instruction after it}.

        body   the PTX between the braces of the kernel. Declarations of registers are left out.
        """
        statements: list[Statement] = []
        labels: dict[str, int] = {}
        source = ""
        for line in body.splitlines():
            line = line.split("//")[0].strip()
            if line in ("{", "}"):
                continue
            if line.startswith(".loc"):
                file_number, line_number = line.split()[1:3]
                source = f"{self.files.get(file_number, '?')}:{line_number}"
            if not line or line.startswith("."):
                continue
            if line.endswith(":"):
                labels[line[:-1]] = len(statements)
                continue
            for text in line.split(";"):
                if text.strip():
                    statements.append(Statement(" ".join(text.split()), source))
        return statements, labels

    def _declare(self, name: str, bits: int) -> None:
        """Allocate a register behind the last one, with `bits` bits for each of the 32 lanes."""
        self._registers[name] = (self._register_bytes, bits)
        self._register_bytes += LANES * bits // 8

    def _constant(self, name: str, bits: int) -> int:
        """Return the offset of a constant, allocated at its first use.

        name   a number, or a name whose value is known at the launch
        Returns -1 minus the byte offset from the first constant.
        """
        if (name, bits) not in self._constants:
            self._constants[name, bits] = self._constant_bytes
            self._constant_bytes += LANES * bits // 8
        return -1 - self._constants[name, bits]

    def _operand(self, text: str, bits: int) -> int:
        """Return the offset of an operand in the register file, see `_Instruction.operands`.

        text   a register, a special register, the name of shared memory, or a number
        bits   its size. A register of another size raises UnknownInstruction.

        Constants have negative offsets, see `_constant`.
        """
        if text in self._registers:
            offset, declared = self._registers[text]
            if declared != bits and text != "_":
                raise UnknownInstruction(f"{text} has {declared} bits, not {bits}")
            return offset
        if text in self._shared_names or text in SPECIAL_REGISTERS:
            return self._constant(text, 32)
        if re.fullmatch(r"0f[0-9A-F]{8}|0d[0-9A-F]{16}", text):  # the bits of a float
            return self._constant(str(int(text[2:], 16)), bits)
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
            return self._constant(str(int(text, 0) % 2**bits), bits)
        raise UnknownInstruction(f"operand {text}")

    def _address(self, text: str, bits: int) -> tuple[int, int]:
        """Parse an address "[register + number]". Return the register's offset, and the number.

        bits   of the register: 64 for device memory, 32 for shared memory
        """
        match = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+)\s*)?\]", text)
        if match is None:
            raise UnknownInstruction(f"address {text}")
        return self._operand(match[1], bits), int(match[2] or "0", 0)

    # ---- encoding

    def _encode_statements(self) -> Any:
        """Return a ctypes array of _Instruction: all statements, and one that ends the thread.

        Raises UnknownInstruction, with the place in the Triton source, if one is not implemented.
        """
        code = (_Instruction * (len(self.statements) + 1))()
        for instruction, statement in zip(code, self.statements, strict=False):
            try:
                self._encode(instruction, statement.text)
            except UnknownInstruction as error:
                place = f"`{statement.text}` of {statement.source}"
                raise UnknownInstruction(f"{self.name}: {place}: {error}") from None
        code[-1].control = END
        code[-1].guard = -1
        # The constants begin behind the registers, all of which are known now.
        for instruction in code:
            for i, offset in enumerate(instruction.operands):
                if offset < 0:
                    instruction.operands[i] = self._register_bytes - offset - 1
        return code

    def _encode(self, instruction: _Instruction, text: str) -> None:
        """Set the fields of an instruction from its PTX.

        text   such as "@%p1 add.s32 %r1, %r2, 4", where @%p1 is the predicate that guards it

        Raises UnknownInstruction if machine.c does not implement it.
        """
        instruction.guard = -1
        guarded = re.match(r"@(!?)(%\w+) (.*)", text)
        if guarded:
            instruction.guard_negated = bool(guarded[1])
            instruction.guard = self._operand(guarded[2], 8)
            text = guarded[3]
        name, _, rest = text.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,|\s]+", rest)
        words = _significant_words(name)
        match words:
            case ["bra"]:
                instruction.control = BRANCH
                instruction.target = self._labels[operands[0]]
            case ["ret"]:
                instruction.control = END
            case ["bar", "sync"] if operands == ["0"] and instruction.guard < 0:
                instruction.control = BARRIER
            case ["bar", "warp", "sync"]:
                self._set(instruction, words, [self._operand(operands[0], 32)])
            case ["ld" | "st", "global" | "shared", _]:
                self._encode_load_or_store(instruction, words, operands)
            case ["ldmatrix" | "stmatrix", *_]:
                self._encode_matrix(instruction, words, operands)
            case ["ld", "param", ptx_type]:
                self._encode_parameter(instruction, ptx_type, operands)
            case ["cp", "async", "shared", "global"]:
                self._encode_copy(instruction, words, operands)
            case ["cp", "async", "commit_group"]:
                self._set(instruction, words, [])
            case ["cp", "async", "wait_group" | "wait_all"]:
                # The number of groups that may still be under way; -1: not even ungrouped copies.
                instruction.target = int(operands[0], 0) if operands else -1
                self._set(instruction, ["cp", "async", "wait_group"], [])
            case ["createpolicy", ptx_type]:
                # A cache policy changes no result: it is a move of 0.
                offsets = [self._operand(operands[0], 64), self._operand("0", 64)]
                self._set(instruction, ["mov", ptx_type], offsets)
            case ["mov", ptx_type] if "{" in rest:
                self._encode_pack_or_unpack(instruction, ptx_type, operands)
            case _:
                self._encode_arithmetic(instruction, words, operands)

    def _encode_load_or_store(
        self, instruction: _Instruction, words: list[str], operands: list[str]
    ) -> None:
        """Encode ld or st of device or shared memory, of a value or a vector.

        words      [ld or st, global or shared, type], see `_significant_words`
        operands   an address [register + number], and a register or a vector {%r1, %r2}. st has the
                   address first, ld has it last.
        """
        operation, space, memory_type = words
        if operation == "st":
            pointer, values = operands[:2]
        else:
            values, pointer = operands[:2]
        elements = _vector_elements(values)
        pointer_bits = 64 if space == "global" else 32
        address, instruction.address_offset = self._address(pointer, pointer_bits)
        instruction.elements = len(elements)
        # machine.c moves bits, for integers and floats alike.
        memory_bits = re.sub("[a-z]", "", memory_type)
        if elements[0] in self._registers:
            _, register_bits = self._registers[elements[0]]
        else:  # a number that is stored
            register_bits = BITS[memory_type]
        name = [operation, space, f"b{memory_bits}"]
        if register_bits != int(memory_bits):
            if memory_type[0] == "s":
                raise UnknownInstruction("it fills a wider register with the sign")
            name += ["in", f"b{register_bits}"]
        offsets = [self._operand(element, register_bits) for element in elements]
        self._set(instruction, name, [*offsets, address])

    def _encode_matrix(
        self, instruction: _Instruction, words: list[str], operands: list[str]
    ) -> None:
        """Encode ldmatrix or stmatrix, which move 8x8 matrices from or to shared memory.

        operands   an address [register + number], and a vector of 32-bit registers. stmatrix has
                   the address first, ldmatrix has it last.
        """
        if words[0] == "stmatrix":
            pointer, values = operands[:2]
        else:
            values, pointer = operands[:2]
        elements = _vector_elements(values)
        address, instruction.address_offset = self._address(pointer, 32)
        instruction.elements = len(elements)
        offsets = [self._operand(element, 32) for element in elements]
        self._set(instruction, words, [*offsets, address])

    def _encode_parameter(
        self, instruction: _Instruction, ptx_type: str, operands: list[str]
    ) -> None:
        """Encode ld.param, which loads an argument of the kernel, as a move of a constant.

        The constant is named "parameter.type". `_constant_values` gives it its value at a launch.

        ptx_type   the PTX type, such as "u64"
        operands   a register, and the parameter in brackets
        """
        parameter = operands[1].strip("[] ")
        if parameter not in self.parameters:
            raise UnknownInstruction(f"parameter {parameter}")
        bits = self._registers[operands[0]][1]
        value = self._constant(f"{parameter}.{ptx_type}", bits)
        self._set(instruction, ["mov", f"b{bits}"], [self._operand(operands[0], bits), value])

    def _encode_copy(
        self, instruction: _Instruction, words: list[str], operands: list[str]
    ) -> None:
        """Encode an asynchronous copy from device memory to shared memory.

        Its operands: destination, source, bytes to write, optionally bytes to read (the rest is
        filled with zeros), optionally a cache policy in a 64-bit register.
        """
        destination, instruction.elements = self._address(operands[0], 32)
        source, instruction.address_offset = self._address(operands[1], 64)
        instruction.target = int(operands[2], 0)
        bytes_to_read = operands[2]
        if len(operands) > 3 and not operands[3].startswith("%rd"):
            bytes_to_read = operands[3]
        offsets = [destination, source, self._operand(bytes_to_read, 32)]
        self._set(instruction, words, offsets)

    def _encode_pack_or_unpack(
        self, instruction: _Instruction, ptx_type: str, operands: list[str]
    ) -> None:
        """Encode a mov that splits a register into a vector of registers, or joins them.

        ptx_type   the PTX type of the whole register, such as "b32"
        operands   the destination and the source. One of them is a vector {%r1, %r2}.
        """
        unpacks = operands[0].startswith("{")
        parts = _vector_elements(operands[0] if unpacks else operands[1])
        bits = BITS[ptx_type]
        offsets = [self._operand(part, bits // len(parts)) for part in parts]
        if unpacks:
            name = ["mov", f"b{bits}", f"to{len(parts)}"]
            offsets = [*offsets, self._operand(operands[1], bits)]
        else:
            name = ["mov", f"b{bits}", f"of{len(parts)}"]
            offsets = [self._operand(operands[0], bits), *offsets]
        self._set(instruction, name, offsets)

    def _encode_arithmetic(
        self, instruction: _Instruction, words: list[str], operands: list[str]
    ) -> None:
        """Encode an instruction that computes registers from registers and numbers.

        words      see `_significant_words`. `machine.c` has a function of this name.
        operands   registers and numbers, results first
        """
        bits = _operand_bits(words, len(operands))
        if words in (["max", "f32"], ["min", "f32"]) and len(operands) == 4:
            words[0] += "3"  # the largest or smallest of three values
        offsets = [self._operand(text, n) for text, n in zip(operands, bits, strict=True)]
        self._set(instruction, words, offsets)
        expected = ctypes.c_int32.in_dll(machine(), f"operands_{'_'.join(words)}").value
        if expected != len(operands):
            raise UnknownInstruction(f"{len(operands)} operands, not {expected}")

    @staticmethod
    def _set(instruction: _Instruction, words: list[str], offsets: list[int]) -> None:
        """Set the function and operands of an instruction.

        words     the parts of its name: ["add", "f32"] is the function ptx_add_f32 of machine.c
        offsets   byte offsets of the operands in the register file, as the function expects them
        """
        try:
            function = getattr(machine(), f"ptx_{'_'.join(words)}")
        except AttributeError:
            raise UnknownInstruction("it is not among those of machine.c") from None
        instruction.function = ctypes.cast(function, ctypes.c_void_p).value
        for i, offset in enumerate(offsets):
            instruction.operands[i] = offset

    # ---- running

    def run(
        self,
        arguments: Sequence[int],
        tensors: Sequence[Tensor],
        programs: int,
        shared: int,
        order: int = 0,
    ) -> Counts:
        """Run the kernel on CPU tensors and return what it did.

        arguments   one integer per parameter: its bits, or a tensor's address
        tensors     the tensors whose elements the kernel may access
        programs    number of programs of the launch
        shared      bytes of shared memory of a program
        order       of warps and programs. 0: by index. 1: reversed. Others: shuffled by that seed.

        Raises Fault if an access was faulty.
        """
        constants = self._constant_values(arguments, programs)
        regions, allowed = _regions(tensors)
        launch = _Machine(
            code=ctypes.addressof(self._code),
            regions=ctypes.addressof(regions),
            num_regions=len(regions),
            shared_bytes=shared,
        )
        layout = _Layout(
            file_bytes=self._register_bytes + len(constants),
            constants=self._register_bytes,
            thread=self._register_bytes - self._thread - 1,
            program=self._register_bytes - self._program - 1,
        )
        machine().ptx_launch(
            ctypes.byref(launch),
            ctypes.byref(layout),
            (ctypes.c_char * len(constants)).from_buffer(constants),
            programs,
            self.threads,
            order,
        )
        del allowed  # machine.c has read them until here
        counts = zip(FAULTS, launch.fault_counts, strict=True)
        faults = {name: count for name, count in counts if count}
        if faults:
            reports = launch.reports[: launch.num_reports]
            raise Fault(self.name, faults, [self._describe(report) for report in reports])
        return Counts(
            instructions=launch.instructions,
            barriers=launch.barriers,
            loaded=launch.loaded,
            stored=launch.stored,
            copied=launch.copied,
        )

    def _constant_values(self, arguments: Sequence[int], programs: int) -> bytearray:
        """Return the constants of a launch, in the layout of the end of a register file.

        These are all constants for which the kernel was encoded. Each is at the byte offset that
        `self._constants` has for it, as a little-endian integer, repeated for each of the 32 lanes.

        arguments   one integer for each of the first parameters: its bits, or a tensor's address
        programs    number of programs of the launch
        """
        # Triton adds parameters for scratch memory at the end of the list. These kernels do not use
        # them, so that they have no argument and are 0.
        values = dict.fromkeys(self.parameters, 0)
        values.update(zip(self.parameters, arguments, strict=False))
        values["%nctaid.x"] = programs
        values["%ntid.x"] = self.threads
        # machine.c overwrites the indices of threads and programs.
        values["%tid.x"] = 0
        values["%ctaid.x"] = 0
        for name in self._shared_names:
            values[name] = 0  # shared memory begins at address 0

        constants = bytearray(self._constant_bytes)
        for (name, bits), offset in self._constants.items():
            # A constant is named "parameter.type" (see _encode_parameter), or like a key of
            # `values`, or it is a number in decimal digits.
            parameter, _, ptx_type = name.rpartition(".")
            if parameter in self.parameters:
                value = _to_type(ptx_type, values[parameter])
            elif name in values:
                value = values[name]
            else:
                value = int(name)
            one_lane = (value % 2**bits).to_bytes(bits // 8, "little")
            constants[offset : offset + LANES * bits // 8] = one_lane * LANES
        return constants

    def _describe(self, report: _Report) -> str:
        """Return a line of text about a fault, with its instruction, address and thread."""
        statement = self.statements[report.instruction]
        return (
            f"  {FAULTS[report.kind]}: {statement.source} `{statement.text}`, {report.bytes} bytes"
            f" at {report.address:#x}, program {report.program}, warp {report.warp}, lane"
            f" {report.lane}"
        )


def _significant_words(name: str) -> list[str]:
    """Return the parts of an instruction's name, without modifiers that change no result.

    "ld.global.L1::evict_last.v4.b32" gives ["ld", "global", "b32"]: cache hints contain "::", and
    the lengths of vectors (v4) and the numbers of matrices (x4) are known from the operands.
    """
    words = [word.replace("shared::cta", "shared") for word in name.split(".")]
    words = [word for word in words if "::" not in word or word == "shared::cluster"]
    return [word for word in words if word not in NO_EFFECT and not re.fullmatch(r"[vx]\d", word)]


def _vector_elements(text: str) -> list[str]:
    """Return the registers of a vector such as "{%r1, %r2}", or the only one of "%r1"."""
    return [element.strip() for element in text.strip("{} ").split(",")]


def _operand_bits(words: list[str], num_operands: int) -> list[int]:
    """Return the number of bits of each operand of an arithmetic instruction, results first.

    words          see `_significant_words`. The last one is the type of most operands.
    num_operands   how many operands the instruction has

    Raises UnknownInstruction if a type is unknown.
    """
    if words[-1] not in BITS or (words[0] == "cvt" and words[-2] not in BITS):
        raise UnknownInstruction("no such type")
    type_bits = BITS[words[-1]]
    bits = [type_bits] * num_operands
    match words[0]:
        case "setp":  # one or two predicates from two values
            bits[: num_operands - 2] = [8] * (num_operands - 2)
        case "cvt":
            bits[0] = BITS[words[-2]]
        case "shl" | "shr":
            bits[2] = 32
        case "selp":
            bits[3] = 8
        case "bfe":
            bits[2:] = [32, 32]
        case "mul" | "mad" if "wide" in words:
            bits = [2 * type_bits, type_bits, type_bits, 2 * type_bits][:num_operands]
        case "redux":
            bits[-1] = 32
        case "add" | "fma" if words[-2] == "f32":  # 16-bit operands, fp32 sum
            bits[0] = 32
            bits[-1] = 32
    return bits


def _to_type(ptx_type: str, word: int) -> int:
    """Return the low bits of a parameter as an integer of a PTX type.

    ptx_type   such as "u64". Types that begin with "s" are signed (two's complement).
    word       the bits of the parameter, as an integer of either sign
    """
    bits = int(re.sub("[a-z]", "", ptx_type))
    low = word % 2**bits
    is_negative = ptx_type[0] == "s" and low >> (bits - 1)
    return low - 2**bits if is_negative else low


def _regions(tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """Return the device memory of CPU tensors, for `_Machine.regions`.

    Returns a ctypes array with one _Region per storage, and the uint8 tensors of allowed elements
    that the regions point to. The caller must keep these tensors alive.

    tensors   may share storages, of which a kernel may access only the elements of the tensors
    """
    by_storage: dict[int, list[Tensor]] = {}
    for x in tensors:
        assert x.device.type == "cpu", x.device
        if x.numel():
            by_storage.setdefault(x.untyped_storage().data_ptr(), []).append(x)
    regions = (_Region * len(by_storage))()
    keep_alive = []
    for region, views in zip(regions, by_storage.values(), strict=True):
        unit_bytes = min(x.element_size() for x in views)
        begin = min(x.data_ptr() for x in views)
        end = max(x.data_ptr() + _span(x) * x.element_size() for x in views)
        allowed = torch.zeros((end - begin) // unit_bytes, dtype=torch.uint8)
        for x in views:
            _allow(allowed, x, begin, unit_bytes)
        region.begin = begin
        region.end = end
        region.unit_bytes = unit_bytes
        region.allowed = allowed.data_ptr()
        keep_alive.append(allowed)
    return regions, keep_alive


def _span(x: Tensor) -> int:
    """Return the number of elements from the first to the last of x, with the gaps between rows.

    x   not empty
    """
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _allow(allowed: Tensor, x: Tensor, begin: int, unit_bytes: int) -> None:
    """Mark the elements of x in `allowed`, but not the gaps between its rows.

    allowed   uint8 [units], one for each `unit_bytes` bytes from the address `begin` on
    """
    span = _span(x)
    elements = torch.zeros(span, dtype=torch.uint8)
    elements.as_strided(x.shape, x.stride()).fill_(1)
    units_per_element = x.element_size() // unit_bytes
    first = (x.data_ptr() - begin) // unit_bytes
    units = allowed[first : first + span * units_per_element]
    units.view(span, units_per_element).bitwise_or_(elements[:, None])
