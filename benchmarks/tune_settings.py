"""What `benchmarks.tune` tries: settings of launches and where the package keeps them, and the workloads that they are timed on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import torch

from benchmarks.cases import Cell
from benchmarks.providers import Provider, Run, providers
from grpo_kernels.rows import backends
from grpo_kernels.rows import products as blocks
from grpo_kernels.rows.backends import triton as backend
from grpo_kernels.rows.backends.triton.launch import FUSED, Choice

REGISTERS = 65536  # of a multiprocessor
SHARED = 224 << 10  # bytes, of those that can copy ahead
MIB = 1 << 20
#: (threads, accesses, programs per multiprocessor) to try in all combinations: of the kernels of rows, and of others.
OF_A_ROW = ((256, 512, 1024), (1, 2, 4, 8), (1, 2, 4))
SHAPES = {"select": ((128, 256, 512, 1024), (1, 2), (1, 2, 4)), "slots": ((64, 128, 256, 512), (1, 2), (2, 4))}


class Setting:
    """A choice of launches, and where the package keeps it."""

    kind: str

    def places(self) -> list[tuple[dict[Any, Any], Any, Any]]:
        """(dictionary, key, value) of all that it changes."""
        raise NotImplementedError

    def described(self) -> dict[str, Any]:
        """The arguments of the class beside the kind, for a file."""
        return {name: value for name, value in asdict(self).items() if name != "kind"}  # type: ignore[call-overload]

    def put(self, but: str = "") -> None:
        """Changes the package's, except under one key."""
        for where, key, value in self.places():
            if key != but:
                where[key] = value

    @contextmanager
    def applied(self) -> Iterator[None]:
        before = [(where, key, where[key]) for where, key, _ in self.places()]
        try:
            self.put()
            with warnings.catch_warnings():
                # A smaller tile was used, or no kernel at all: this one has failed to compile.
                warnings.filterwarnings("error", "the Triton kernel|grpo_kernels falls back", RuntimeWarning)
                yield
        finally:
            for where, key, value in before:
                where[key] = value


def copied_ahead(choice: Choice) -> int:
    """Bytes of shared memory for the tiles that are on their way while another is computed."""
    return 16 * choice.threads * choice.accesses * (choice.stages - 1) * choice.programs


@dataclass(frozen=True)
class Launched(Setting):
    """The launch of a kernel, an entry of backend.launch.LAUNCH."""

    kind: str
    choice: Choice

    def __str__(self) -> str:
        c = self.choice
        words = [f"{c.threads} threads x {c.accesses} accesses, {c.programs} per SM"]
        words += [f"{c.stages} stages"] * (c.stages > 1)
        if self.kind in ("visit", *FUSED):
            words += [f"ends {c.ends}, kept {c.kept}"]
            words += ["hints" if c.hints else "no hints", f"grid {c.grid:g}" if c.grid else "a program a row"]
        return ", ".join(words)

    @property
    def fits(self) -> bool:
        """Whether the registers suffice for the tile (8 numbers for each access in flight) and a few other values, and
        shared memory for the tiles that are copied ahead."""
        if copied_ahead(self.choice) > SHARED:
            return False
        streams = 2 if self.kind in ("two", "mixed") else 1
        most = min(255, REGISTERS // (self.choice.threads * self.choice.programs))
        return most >= 8 * streams * self.choice.accesses + 16

    def places(self) -> list[tuple[dict[Any, Any], Any, Any]]:
        return [(backend.launch.LAUNCH, self.kind, self.choice)]

    def described(self) -> dict[str, Any]:
        return {"choice": self.choice._asdict()}


@dataclass(frozen=True)
class Chunk(Setting):
    """From hidden states: bytes of a chunk of fp32 logits, and of a block of gradients beside a sum of d_weight."""

    mib: int
    block: int
    kind: str = "chunk"

    def __str__(self) -> str:
        return f"{self.mib} MiB of logits, {self.block} MiB of gradients"

    def places(self) -> list[tuple[dict[Any, Any], Any, Any]]:
        sizes = ((blocks.CHUNK_BYTES, self.mib), (blocks.BLOCK_BYTES, self.block))
        return [(where, device, size * MIB) for where, size in sizes for device in where]


def setting_of(kind: str, described: dict[str, Any]) -> Setting:
    """The setting that `described` has told."""
    return Chunk(**described) if kind == "chunk" else Launched(kind, Choice(**described["choice"]))


@contextmanager
def on_triton() -> Iterator[None]:
    """Every backend is Triton, for tensors on a CPU too (in its interpreter), whether or not the C++ module is there."""
    with (
        mock.patch.object(backends, "_made", lambda name, strict: backend.Kernels(strict)),
        mock.patch.object(backends, "unavailable", lambda name: None),
    ):
        yield


@dataclass(frozen=True)
class Workload:
    """A provider of the benchmarks whose time depends on this kind of setting."""

    kind: str
    provider: str
    cell: Cell

    def __str__(self) -> str:
        c = self.cell
        shape = " x ".join(str(x) for x in (c.rows, c.hidden, c.vocab) if x is not None)
        return f"{c.contract}, {self.provider}: {shape} {str(c.dtype).removeprefix('torch.')}"

    def candidate(self, setting: Setting) -> Provider:
        ours = next(p for p in providers(self.cell.contract) if p.name == self.provider)

        def make(case: Any) -> Run:
            with on_triton():
                run = ours.make(case)

            def call() -> dict[str, Any]:
                with setting.applied(), on_triton():
                    return run.call()

            return Run(call, run.restore)

        return replace(ours, name=str(setting), make=make)


def workloads(small: bool) -> list[Workload]:
    # The interpreter truncates to bf16, while a GPU rounds.
    rows, few, vocab, width, dtype = (16, 16, 272, 8, torch.float32) if small else (8192, 2048, 151936, 4096, torch.bfloat16)
    narrow = 4 if small else 1024  # so that 8192 rows are several blocks, and d_weight is a sum over them
    beside = (rows if small else 4096, vocab, dtype)  # two streams take twice the memory
    return [
        Workload("fused", "grpo_kernels, in place", Cell("logits", rows, vocab, dtype)),
        Workload("fused32", "grpo_kernels, in place", Cell("logits", few, vocab, torch.float32)),
        Workload("visit", "grpo_kernels", Cell("logits-forward", rows, vocab, dtype)),
        Workload("visit", "grpo_kernels, layer 1 + loss", Cell("logits", rows, vocab, dtype)),
        Workload("chunk", "grpo_kernels", Cell("hidden", rows, vocab, dtype, width)),
        Workload("chunk", "grpo_kernels", Cell("hidden", rows, vocab, dtype, narrow)),
        Workload("two", "grpo_kernels, in place", Cell("logits-divergence", *beside)),
        Workload("mixed", "grpo_kernels", Cell("divergence-jsd", *beside, narrow)),
        Workload("select", "grpo_kernels, sparse 1/256", Cell("sparse", few, vocab, dtype, narrow, entropy=0.6)),
        Workload("slots", "grpo_kernels", Cell("kept", rows, vocab, dtype, narrow)),
    ]


def settings(kind: str, small: bool) -> list[Setting]:
    """The current setting of the package first, then the others."""
    if kind == "chunk":
        now = Chunk(blocks.CHUNK_BYTES["cuda"] // MIB, blocks.BLOCK_BYTES["cuda"] // MIB)
        # Rows of a large vocabulary: (512, 3072) now. Of one sum of bytes: (768, 2304), (1024, 2048); of more: the others.
        large = [Chunk(*x) for x in ((450, 700), (600, 600), (300, 1800), (600, 1200), (1200, 1200), (1200, 2400))]
        return list(dict.fromkeys((now, *([Chunk(1, 1)] if small else large))))
    now = backend.launch.LAUNCH[kind]
    shapes = [
        now._replace(threads=threads, accesses=accesses, programs=programs)
        for threads, accesses, programs in product(*SHAPES.get(kind, OF_A_ROW))
    ]
    around = [now]
    if kind in ("visit", *FUSED):
        around.append(now._replace(hints=not now.hints))
        around += [now._replace(stages=stages) for stages in (1, 3, 4)]
        shapes = [c if copied_ahead(c) <= SHARED else c._replace(stages=1) for c in shapes]
    if kind in FUSED:
        around += [now._replace(grid=grid) for grid in (0.5, 1.0)] + [now._replace(kept=kept) for kept in range(now.ends)]
        around += [now._replace(ends=now.ends + more, kept=now.ends + more) for more in (1, 2)]
    candidates = [Launched(kind, choice) for choice in dict.fromkeys([*around, *shapes])]
    candidates = [candidates[0], *(s for s in candidates[1:] if s.fits)]
    return list(candidates[:2]) if small else list(candidates)
