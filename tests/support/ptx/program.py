"""A compiled kernel as the machine runs it: reads the PTX that Triton emits for our kernels on
sm_90 and sm_100, and nothing else.

    Program(ptx).run(arguments, programs, shared, order)

Warps run one after the other, each from barrier to barrier, in an order that is chosen;
asynchronous copies arrive when they are waited for. A faulty access (see FAULTS) raises Fault once
the kernel has ended; an instruction that machine.c does not know raises UnknownInstruction when the
kernel is read.

What this does not show: ptxas, which makes machine code of the PTX, the order of memory that the
hardware keeps within a warp, by how much it misses what it approximates, and any time.
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
#: Every operation rounds by itself, as in PTX; whole numbers wrap.
FLAGS = (
    "-O3", "-march=native", "-ffp-contract=off", "-fno-trapping-math", "-fno-strict-aliasing", "-fwrapv", "-shared", "-fPIC",
)  # fmt: skip

#: In the order of machine.c.
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
LANES, OPERANDS = 32, 12
RUNS, BRANCH, END, BARRIER = range(4)
BITS = {
    "pred": 8, "b8": 16, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32,
    "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f32x2": 64,
    "f64": 64,
}  # fmt: skip
#: Changes no result: all jumps of a warp alike or not, how a copy is cached, and that a policy has
#: a share of the lines.
NO_EFFECT = {"uni", "ca", "cg", "fractional"}


class UnknownInstruction(Exception):
    """The machine does not have this instruction, or not in this form."""


class Fault(AssertionError):
    """A kernel did what it must not do. `faults`: how often it did which of FAULTS."""

    def __init__(self, kernel: str, faults: dict[str, int], said: Sequence[str]) -> None:
        super().__init__(
            "\n".join(
                [
                    f"{kernel}: {', '.join(f'{count} x {name}' for name, count in faults.items())}",
                    *said,
                ]
            )
        )
        self.faults = faults


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("run", ctypes.c_void_p), ("offset", ctypes.c_int64), ("control", ctypes.c_int32), ("guard", ctypes.c_int32),
        ("unless", ctypes.c_int32), ("target", ctypes.c_int32), ("elements", ctypes.c_int32), ("at", ctypes.c_int32 * OPERANDS),
    )  # fmt: skip


class _Region(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_uint64), ("end", ctypes.c_uint64), ("grain", ctypes.c_uint64), ("allowed", ctypes.c_void_p),
        ("cells", ctypes.c_void_p),
    )  # fmt: skip


class _Report(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "instruction", "program", "warp", "lane", "bytes")), ("address", ctypes.c_uint64),
    )  # fmt: skip


class _Machine(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_void_p), ("regions", ctypes.c_void_p), ("n_regions", ctypes.c_int32), ("shared", ctypes.c_void_p),
        ("shared_cells", ctypes.c_void_p), ("shared_bytes", ctypes.c_uint64), ("program", ctypes.c_int32), ("epoch", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("instructions", "barriers", "loaded", "stored", "copied")),
        ("found", ctypes.c_int64 * len(FAULTS)), ("reports", ctypes.c_int32), ("report", _Report * 64),
    )  # fmt: skip


class _Layout(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("file_bytes", "constants", "thread", "program")
    )


@functools.cache
def machine() -> ctypes.CDLL:
    """machine.c, built for this processor once for all processes."""
    key = hashlib.sha256(SOURCE.read_bytes() + repr(FLAGS).encode() + _processor()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"grpo_kernels_ptx_{os.getuid()}_{key}.so"
    if not built.exists():
        part = built.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [os.environ.get("CC", "cc"), *FLAGS, "-o", str(part), str(SOURCE), "-lm"], check=True
        )
        part.replace(built)
    return ctypes.CDLL(str(built))


def _processor() -> bytes:
    info = Path("/proc/cpuinfo")
    return (
        b""
        if not info.exists()
        else next((x for x in info.read_bytes().splitlines() if x.startswith(b"flags")), b"")
    )


@dataclass(frozen=True)
class Statement:
    text: str
    place: str  # file and line of the kernel's source


@dataclass(frozen=True)
class Counts:
    """What a launch did:

    instructions of warps, barriers of programs, bytes of device memory, those of asynchronous
    copies.
    """

    instructions: int
    barriers: int
    loaded: int
    stored: int
    copied: int


class Program:
    def __init__(self, ptx: str) -> None:
        """Reads the one kernel of a module."""
        found = re.search(r"\.visible \.entry (\w+)\((.*?)\)\s*(.*?)\n\{\n(.*?)\n\}", ptx, re.S)
        assert found is not None, "no kernel"
        self.name, parameters, directives, body = found.groups()
        self.parameters = re.findall(r"(\w+),?\s*$", parameters, re.M)
        (threads,) = re.findall(r"\.reqntid (\d+)", directives)
        self.threads = int(threads)
        if "cluster" in directives:
            raise UnknownInstruction(f"{self.name}: clusters")
        self.files = dict(re.findall(r'^\s*\.file\s+(\d+) (?:"[^"]*" )?"([^"]*)"', ptx, re.M))
        self._registers: dict[str, tuple[int, int]] = {}  # name: its place in the file and its bits
        self._bytes = 0
        self._constants: dict[
            tuple[str, int], int
        ] = {}  # (name or number, bits): its place among the constants
        self._constant_bytes = 0
        self._shared_names = set(re.findall(r"\.extern \.shared .* (\w+)\[\]", ptx))
        statements, self._labels = self._split(body)
        self.statements = statements
        for kind, prefix, count in re.findall(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>", body):
            for i in range(int(count)):
                self._declare(f"%{prefix}{i}", BITS[kind])
        self._declare("_", 64)  # takes what is not wanted
        self._thread, self._program = (self._constant(name, 32) for name in ("%tid.x", "%ctaid.x"))
        self._code = (_Instruction * (len(statements) + 1))()
        for i, statement in enumerate(statements):
            try:
                self._read(self._code[i], statement.text)
            except UnknownInstruction as error:
                raise UnknownInstruction(
                    f"{self.name}: `{statement.text}` of {statement.place}: {error}"
                ) from None
        self._code[len(statements)].control, self._code[len(statements)].guard = END, -1
        for instruction in self._code:  # constants lie behind the registers
            for i, place in enumerate(instruction.at):
                if place < 0:
                    instruction.at[i] = self._bytes - place - 1

    # ---- reading

    def _split(self, body: str) -> tuple[list[Statement], dict[str, int]]:
        """Instructions, and how many of them are before each label."""
        statements: list[Statement] = []
        labels: dict[str, int] = {}
        place = ""
        for line in body.splitlines():
            line = line.split("//")[0].strip().strip("{}" if line.strip() in ("{", "}") else "")
            if line.startswith(".loc"):
                number, row = line.split()[1:3]
                place = f"{self.files.get(number, '?')}:{row}"
            if not line or line.startswith("."):
                continue
            if line.endswith(":"):
                labels[line[:-1]] = len(statements)
                continue
            statements += [
                Statement(" ".join(x.split()), place) for x in line.split(";") if x.strip()
            ]
        return statements, labels

    def _declare(self, name: str, bits: int) -> None:
        self._registers[name] = (self._bytes, bits)
        self._bytes += LANES * bits // 8

    def _constant(self, name: str, bits: int) -> int:
        """The place of a number, or of what a launch knows by that name:

        -1 for the first, and down from there.
        """
        if (name, bits) not in self._constants:
            self._constants[name, bits] = self._constant_bytes
            self._constant_bytes += LANES * bits // 8
        return -1 - self._constants[name, bits]

    def _operand(self, text: str, bits: int) -> int:
        if text in self._registers:
            place, declared = self._registers[text]
            if declared != bits and text != "_":
                raise UnknownInstruction(f"{text} has {declared} bits, not {bits}")
            return place
        if text in self._shared_names or text in ("%tid.x", "%ctaid.x", "%nctaid.x", "%ntid.x"):
            return self._constant(text, 32)
        if re.fullmatch(r"0f[0-9A-F]{8}|0d[0-9A-F]{16}", text):
            return self._constant(str(int(text[2:], 16)), bits)
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
            return self._constant(str(int(text, 0) % 2**bits), bits)
        raise UnknownInstruction(f"operand {text}")

    def _address(self, text: str, bits: int) -> tuple[int, int]:
        found = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+)\s*)?\]", text)
        if found is None:
            raise UnknownInstruction(f"address {text}")
        return self._operand(found[1], bits), int(found[2] or "0", 0)

    def _read(self, into: _Instruction, text: str) -> None:
        into.guard = -1
        guarded = re.match(r"@(!?)(%\w+) (.*)", text)
        if guarded:
            into.unless, into.guard, text = (
                bool(guarded[1]),
                self._operand(guarded[2], 8),
                guarded[3],
            )
        name, _, rest = text.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,|\s]+", rest)
        words = [x.replace("shared::cta", "shared") for x in name.split(".")]
        words = [x for x in words if "::" not in x or x == "shared::cluster"]
        words = [x for x in words if x not in NO_EFFECT and not re.fullmatch(r"[vx]\d", x)]
        match words:
            case ["bra"]:
                into.control, into.target = BRANCH, self._labels[operands[0]]
            case ["ret"]:
                into.control = END
            case ["bar", "sync"] if operands == ["0"] and into.guard < 0:
                into.control = BARRIER
            case ["bar", "warp", "sync"]:
                self._set(into, words, [self._operand(operands[0], 32)])
            case ["ld" | "st", "global" | "shared", kind]:
                pointer, values = operands[:2] if words[0] == "st" else operands[1::-1]
                elements = [x.strip() for x in values.strip("{} ").split(",")]
                place, into.offset = self._address(pointer, 64 if words[1] == "global" else 32)
                into.elements = len(elements)
                bits = re.sub("[a-z]", "", kind)  # of whole numbers, floats and bits alike
                register = self._registers.get(elements[0], (0, BITS[kind]))[1]
                if kind[0] == "s" and register != int(bits):
                    raise UnknownInstruction("it fills a wider register with the sign")
                wider = [] if register == int(bits) else ["in", f"b{register}"]
                self._set(
                    into,
                    [*words[:2], f"b{bits}", *wider],
                    [*(self._operand(x, register) for x in elements), place],
                )
            case ["ldmatrix" | "stmatrix", *_]:
                pointer, values = operands[:2] if words[0] == "stmatrix" else operands[1::-1]
                elements = [x.strip() for x in values.strip("{} ").split(",")]
                place, into.offset = self._address(pointer, 32)
                into.elements = len(elements)
                self._set(into, words, [*(self._operand(x, 32) for x in elements), place])
            case ["ld", "param", kind]:
                parameter = operands[1].strip("[] ")
                if parameter not in self.parameters:
                    raise UnknownInstruction(f"parameter {parameter}")
                bits = self._registers[operands[0]][1]
                value = self._constant(f"{parameter}.{kind}", bits)
                self._set(into, ["mov", f"b{bits}"], [self._operand(operands[0], bits), value])
            case ["cp", "async", "shared", "global"]:
                places = [
                    self._address(x, bits) for x, bits in zip(operands, (32, 64), strict=False)
                ]
                into.target = int(operands[2], 0)
                given = (
                    operands[3]
                    if len(operands) > 3 and not operands[3].startswith("%rd")
                    else operands[2]
                )
                into.elements, into.offset = (offset for _, offset in places)
                self._set(into, words, [*(place for place, _ in places), self._operand(given, 32)])
            case ["cp", "async", "commit_group"]:
                self._set(into, words, [])
            case ["cp", "async", "wait_group" | "wait_all"]:
                into.target = int(operands[0], 0) if operands else -1
                self._set(into, ["cp", "async", "wait_group"], [])
            case ["createpolicy", kind]:
                self._set(
                    into, ["mov", kind], [self._operand(operands[0], 64), self._operand("0", 64)]
                )
            case ["mov", kind] if "{" in rest:
                vector = operands[0] if operands[0].startswith("{") else operands[1]
                parts = [x.strip() for x in vector.strip("{} ").split(",")]
                half = BITS[kind] // len(parts)
                places = [self._operand(x, half) for x in parts]
                if vector is operands[0]:
                    self._set(
                        into,
                        ["mov", f"b{BITS[kind]}", f"to{len(parts)}"],
                        [*places, self._operand(operands[1], BITS[kind])],
                    )
                else:
                    self._set(
                        into,
                        ["mov", f"b{BITS[kind]}", f"of{len(parts)}"],
                        [self._operand(operands[0], BITS[kind]), *places],
                    )
            case _:
                bits = self._bits(words, operands)
                if words in (["max", "f32"], ["min", "f32"]) and len(operands) == 4:
                    words[0] += "3"  # of three
                self._set(
                    into, words, [self._operand(x, b) for x, b in zip(operands, bits, strict=True)]
                )
                takes = ctypes.c_int32.in_dll(machine(), f"operands_{'_'.join(words)}").value
                if takes != len(operands):
                    raise UnknownInstruction(f"{len(operands)} operands, not {takes}")

    @staticmethod
    def _bits(words: list[str], operands: list[str]) -> list[int]:
        """The bits of each operand of an instruction that computes."""
        if words[-1] not in BITS or (words[0] == "cvt" and words[-2] not in BITS):
            raise UnknownInstruction("no such type")
        bits = BITS[words[-1]]
        every = [bits] * len(operands)
        match words[0]:
            case "setp":
                every[: len(operands) - 2] = [8] * (len(operands) - 2)
            case "cvt":
                every[0] = BITS[words[-2]]
            case "shl" | "shr":
                every[2] = 32
            case "selp":
                every[3] = 8
            case "bfe":
                every[2:] = [32, 32]
            case "mul" | "mad" if "wide" in words:
                every = [2 * bits, bits, bits, 2 * bits][: len(operands)]
            case "redux":
                every[-1] = 32
            case "add" | "fma" if words[-2] == "f32":  # of 16 bits and fp32
                every[0] = every[-1] = 32
        return every

    @staticmethod
    def _set(into: _Instruction, words: list[str], places: list[int]) -> None:
        name = "_".join(words)
        try:
            function = getattr(machine(), f"ptx_{name}")
        except AttributeError:
            raise UnknownInstruction("it is not among those of machine.c") from None
        into.run = ctypes.cast(function, ctypes.c_void_p).value
        for i, place in enumerate(places):
            into.at[i] = place

    # ---- running

    def run(
        self,
        arguments: Sequence[int],
        tensors: Sequence[Tensor],
        programs: int,
        shared: int,
        order: int = 0,
    ) -> Counts:
        """Runs it on CPU tensors. `arguments`: the words of the parameters. `shared`: bytes of
        shared memory. `order` of warps and programs: 0 as they are, 1 reversed, others shuffled by
        that seed.
        """
        # Parameters beyond the kernel's own are Triton's, for memory that no kernel of ours asks
        # for.
        known = dict.fromkeys(self.parameters, 0) | dict(
            zip(self.parameters, arguments, strict=False)
        )
        known |= {
            "%tid.x": 0,
            "%ctaid.x": 0,
            "%nctaid.x": programs,
            "%ntid.x": self.threads,
        } | dict.fromkeys(self._shared_names, 0)
        constants = bytearray(self._constant_bytes)
        for (name, bits), place in self._constants.items():
            parameter, _, kind = name.rpartition(".")
            value = (
                _read_as(kind, known[parameter])
                if parameter in self.parameters
                else known[name]
                if name in known
                else int(name)
            )
            constants[place : place + LANES * bits // 8] = (value % 2**bits).to_bytes(
                bits // 8, "little"
            ) * LANES
        regions, alive = _regions(tensors)
        m = _Machine(
            code=ctypes.addressof(self._code),
            regions=ctypes.addressof(regions),
            n_regions=len(regions),
            shared_bytes=shared,
        )
        layout = _Layout(
            self._bytes + len(constants),
            self._bytes,
            self._bytes - self._thread - 1,
            self._bytes - self._program - 1,
        )
        machine().ptx_launch(
            ctypes.byref(m),
            ctypes.byref(layout),
            (ctypes.c_char * len(constants)).from_buffer(constants),
            programs,
            self.threads,
            order,
        )
        del alive
        faults = {name: count for name, count in zip(FAULTS, m.found, strict=True) if count}
        if faults:
            raise Fault(self.name, faults, [self._said(m.report[i]) for i in range(m.reports)])
        return Counts(m.instructions, m.barriers, m.loaded, m.stored, m.copied)

    def _said(self, report: _Report) -> str:
        statement = self.statements[report.instruction]
        return (
            f"  {FAULTS[report.kind]}: {statement.place} `{statement.text}`, {report.bytes} bytes"
            f" at {report.address:#x}, program {report.program}, warp {report.warp}, lane"
            f" {report.lane}"
        )


def _read_as(kind: str, word: int) -> int:
    """A parameter's low bits as this type has them."""
    bits = int(re.sub("[a-z]", "", kind))
    low = word % 2**bits
    return low - 2**bits if kind[0] == "s" and low >> (bits - 1) else low


def _regions(tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """The memory of these tensors, and what keeps the map of their elements alive:

    gaps between the rows of one are not its own.
    """
    storages: dict[int, list[Tensor]] = {}
    for x in tensors:
        assert x.device.type == "cpu", x.device
        if x.numel():
            storages.setdefault(x.untyped_storage().data_ptr(), []).append(x)
    regions, alive = (_Region * len(storages))(), []
    for region, some in zip(regions, storages.values(), strict=True):
        spans = [
            (x.data_ptr(), 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)))
            for x in some
        ]
        grain = min(x.element_size() for x in some)
        begin = min(at for at, _ in spans)
        end = max(at + n * x.element_size() for (at, n), x in zip(spans, some, strict=True))
        allowed = torch.zeros((end - begin) // grain, dtype=torch.uint8)
        for (at, n), x in zip(spans, some, strict=True):
            each = x.element_size() // grain
            elements = torch.zeros(n, dtype=torch.uint8)
            elements.as_strided(x.shape, x.stride()).fill_(1)
            first = (at - begin) // grain
            allowed[first : first + n * each].view(n, each).bitwise_or_(elements[:, None])
        region.begin, region.end, region.grain, region.allowed = (
            begin,
            end,
            grain,
            allowed.data_ptr(),
        )
        alive.append(allowed)
    return regions, alive
