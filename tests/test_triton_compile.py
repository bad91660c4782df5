"""The Triton kernels compiled for GPUs that need not be there: accesses, registers and spills read from the binaries.

The launches are the package's own: Triton's driver is replaced by one that names a target, and its `run` stops after
compilation. So signatures, specialisation and cache keys are those of a real call."""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_kernels.backends import RowTransform
from grpo_kernels.objective import Objective, TokenRows
from grpo_kernels.surrogates import Cispo, Clip, Custom, PolicyGradient, Surrogate

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from grpo_kernels.backends import triton as backend  # noqa: E402

Tensor = torch.Tensor
PLAIN = RowTransform(1.0, 0.0, 1.0)
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
V = 151936
#: What one program per SM can have: 65 536 registers on NVIDIA, 512 for each of the lane on CDNA3.
REGISTERS = {"cuda": {"visit": 64, "fused": 128}, "hip": {"visit": 128, "fused": 256}}


class Target:
    """Stands for Triton's driver. The device's name keeps these kernels apart from those of a real GPU."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name]

    def get_current_device(self) -> str:
        return f"ahead-of-time {self.name}"

    def get_current_stream(self, device: str) -> int:
        return 0


Compiled = list[tuple[str, Any]]


@pytest.fixture
def compile_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Compiled]:
    """compile_for(target) -> a list that receives (kernel name, compiled kernel) of every launch."""
    if not isinstance(backend._row_stats_kernel, JITFunction):
        pytest.skip("TRITON_INTERPRET=1: there is nothing to compile")
    launches: Compiled = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append((self.__name__, kernel))
        return kernel

    def select(name: str) -> Compiled:
        monkeypatch.setattr(triton.runtime.driver, "_active", Target(name))
        return launches

    monkeypatch.setattr(JITFunction, "run", compile_only)
    return select


def make_rows(n: int, objective: Objective, old: bool = True, offset: int = 0) -> TokenRows:
    def vector(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(n + offset, dtype=dtype)[offset:]

    return TokenRows(
        vector(torch.int64), vector(torch.bool), vector(), vector() if old else None, vector() if objective.beta else None,
        vector(), vector(), vector(torch.bool),
    )  # fmt: skip


def launch_all(objective: Objective, transform: RowTransform, dtype: torch.dtype, columns: int = V) -> None:
    n = 2
    logits = torch.zeros(1, n, columns, dtype=dtype)
    rows = make_rows(n, objective)
    backend.fused_loss(logits, rows, objective, transform, torch.zeros_like(logits))
    stats = backend.row_stats(logits, rows.targets, rows.read, transform, objective.needs_entropy)
    slopes = torch.zeros(n) if objective.needs_entropy else None
    backend.row_grads(logits, rows.targets, stats, slopes, torch.zeros(n), slopes, transform, logits)
    backend.scale_(logits, torch.ones(()))


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
    reach: list[set[int]] = []  # blocks that each block leads to
    for start in range(len(body)):
        seen: set[int] = set()
        stack = list(successors[start])
        while stack:
            block = stack.pop()
            if block not in seen:
                seen.add(block)
                stack += successors[block]
        reach.append(seen)

    def around(header: int, tail: int) -> frozenset[int]:
        """The natural loop of the edge tail -> header: what leads to the tail without passing the header."""
        inside, stack = {header}, [tail]
        while stack:
            block = stack.pop()
            if block not in inside:
                inside.add(block)
                stack += [p for p in range(len(body)) if block in successors[p]]
        return frozenset(inside)

    # An edge closes a loop when its end dominates its start; among blocks in order of the code, backwards is enough.
    found = {around(h, t) for t in range(len(body)) for h in successors[t] if h <= t and t in reach[h] | {h}}
    inner = [a for a in found if not any(b < a for b in found)]
    return [[line for block in sorted(loop) for line in body[block]] for loop in inner]


LOAD = r"ld\.global\S*|(?:global|buffer)_load_\w+"
STORE = r"st\.global\S*|(?:global|buffer)_store_\w+"
WIDE = r"\.v4\.b32|\.v8\.b32|\.v2\.b64|_dwordx4$"


def resources(kernel: Any) -> dict[str, int]:
    """Registers per thread and bytes spilled."""
    if "amdgcn" in kernel.asm:
        # Scalar registers may spill into lanes of vector registers, which is not memory.
        found = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", kernel.asm["amdgcn"]))
        spills = int(found["vgpr_spill_count"]) + int(found["private_segment_fixed_size"])
        return {"registers": int(found["vgpr_count"]), "spills": spills}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {key: int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL")}  # type: ignore[index]
    return {"registers": found["REG"], "spills": found["STACK"] + found["LOCAL"]}


def inspect(name: str, kernel: Any, target: str) -> None:
    assembly = code(kernel)
    used = resources(kernel)
    print(f"{target} {name}: {used['registers']} registers, {used['spills']} bytes spilled, {kernel.metadata.num_warps} warps")
    assert used["spills"] == 0, (target, name, used)
    kind = "fused" if name == "_fused_loss_kernel" else "visit"
    assert used["registers"] <= REGISTERS[TARGETS[target].backend][kind], (target, name, used)
    assert not re.search(r"\.f64|_f64", assembly), (target, name)
    loads = [x for loop in loops(assembly) for line in loop for x in re.findall(LOAD, line)]
    stores = [x for loop in loops(assembly) for line in loop for x in re.findall(STORE, line)]
    if name == "_scale_kernel":  # its loop also holds the ragged end of a row, element by element
        assert any(re.search(WIDE, x) for x in loads) and any(re.search(WIDE, x) for x in stores), (target, name)
        return
    assert loads and all(re.search(WIDE, x) for x in loads), (target, name, Counter(loads))
    assert bool(stores) == (name != "_row_stats_kernel"), (target, name)
    assert all(re.search(WIDE, x) for x in stores), (target, name, Counter(stores))


REFERENCE = dict(beta=0.04, entropy_coef=0.01)
QUICK = [
    (Objective(Clip(0.2, 0.28)), PLAIN, torch.bfloat16),
    (Objective(Cispo(), **REFERENCE), RowTransform(1.0, 30.0, torch.ones(2)), torch.float32),
]
REST = [
    (Objective(surrogate, kl=kl, **options), PLAIN, dtype)
    for surrogate, kl in ((Clip(0.2, 0.28), "k3"), (Cispo(), "k2"), (PolicyGradient(), "k1"))
    for options in ({}, dict(beta=0.04), dict(entropy_coef=0.01), REFERENCE)
    for dtype in (torch.bfloat16, torch.float32)
] + [
    (Objective(Clip(0.2, 0.28), **REFERENCE), transform, dtype)
    for transform in (RowTransform(-0.5, 0.0, torch.ones(2)), RowTransform(1.0, 30.0, 1.25))
    for dtype in (torch.bfloat16, torch.float32)
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_wide_accesses_no_spills(target: str, compile_for: Callable[[str], Compiled]) -> None:
    launches = compile_for(target)
    for objective, transform, dtype in QUICK:
        launch_all(objective, transform, dtype)
    assert len(launches) == 4 * len(QUICK)
    for name, kernel in launches:
        inspect(name, kernel, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_wide_accesses_no_spills_everywhere(target: str, compile_for: Callable[[str], Compiled]) -> None:
    launches = compile_for(target)
    for objective, transform, dtype in REST:
        launch_all(objective, transform, dtype)
    for name, kernel in {id(kernel): (name, kernel) for name, kernel in launches}.values():
        inspect(name, kernel, target)


def test_the_targets_gradient_is_stored_behind_a_barrier(compile_for: Callable[[str], Compiled]) -> None:
    """One thread stores it where another has just stored a tile."""
    launches = compile_for("sm_90")
    launch_all(QUICK[0][0], PLAIN, torch.bfloat16)
    (assembly,) = (code(kernel) for name, kernel in launches if name == "_row_grads_kernel")
    barrier = assembly.index("bar.sync")
    stores = [(m.start(), m[0]) for m in re.finditer(STORE, assembly)]
    behind = [text for at, text in stores if at > barrier and not re.search(WIDE, text)]
    assert len(behind) == 1 and sum(not re.search(WIDE, text) for _, text in stores) == 1


def variants(target: str) -> dict[str, int]:
    """Compiled kernels in Triton's own cache, by kernel."""
    kernels = (backend._row_stats_kernel, backend._row_grads_kernel, backend._fused_loss_kernel, backend._scale_kernel)
    device = Target(target).get_current_device()
    return {kernel.__name__: len(kernel.device_caches[device][0]) for kernel in kernels if device in kernel.device_caches}


@pytest.mark.parametrize("columns", (1031, 1040))
def test_no_length_and_no_schedule_compiles_again(columns: int, compile_for: Callable[[str], Compiled]) -> None:
    compile_for("sm_90")
    before = variants("sm_90")
    draw = random.Random(0)
    for call in range(30):
        A, T = (1, 1) if call == 1 else (1, 16) if call == 2 else (draw.randint(1, 5), draw.randint(1, 70))
        n = A * T
        extra = call % 2  # [:, :-1] of a longer tensor, and vectors that start anywhere
        logits = torch.zeros(A, T + extra, columns, dtype=torch.bfloat16)[:, :T]
        objective = Objective(
            Clip(draw.random(), draw.random(), 1.001 + draw.random()),
            beta=draw.random() + 1e-3,
            entropy_coef=draw.choice((1.0, draw.random())),
        )
        transform = RowTransform(draw.choice((1.0, 16.0, draw.random())), draw.choice((1.0, 30.0)), draw.choice((1.0, 0.5)))
        rows = make_rows(n, objective, offset=draw.randint(0, 3))
        backend.fused_loss(logits, rows, objective, transform, logits)
        stats = backend.row_stats(logits, rows.targets, rows.read, transform, True)
        lo, hi = (0, n) if call % 3 else (n // 3, n - n // 4)
        part = type(stats)(*(x[lo:hi] for x in stats))
        vector = torch.zeros(n)[lo:hi]
        backend.row_grads(logits, rows.targets[lo:hi], part, vector, vector, vector, transform, logits, rows=(lo, hi))
        backend.scale_(torch.zeros(n, columns, dtype=torch.bfloat16), torch.ones(()))
        if call == 0:
            first = variants("sm_90")
    assert all(count == before.get(name, 0) + 1 or name == "_scale_kernel" for name, count in first.items()), (before, first)
    assert variants("sm_90") == first


SOURCE = """
from grpo_kernels.surrogates import ops

def bent(logp, old_logp, advantage, params):
    r = ops.exp(logp - old_logp)
    return -advantage * r{extra}, -advantage * r{extra}
"""


def imported(path: Path, source: str) -> Callable[..., Any]:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("custom_surrogate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.bent


def test_each_formula_has_its_own_kernel(tmp_path: Path, compile_for: Callable[[str], Compiled]) -> None:
    one = imported(tmp_path / "one.py", SOURCE.format(extra=""))
    two = imported(tmp_path / "two.py", SOURCE.format(extra=" * 3.0"))
    # Same module name, function name and line: only the source tells them apart, also in the cache on disk.
    assert backend.compiled_formula(one).cache_key != backend.compiled_formula(two).cache_key
    launches = compile_for("sm_90")
    surrogates: list[Surrogate] = [Clip(), Cispo(), PolicyGradient(), Custom(one), Custom(two), Custom(one, (1.0,))]
    for objective in (*map(Objective, surrogates), *(Objective(beta=0.1, kl=kl) for kl in ("k1", "k2", "k3"))):
        logits = torch.zeros(1, 2, 64)
        backend.fused_loss(logits, make_rows(2, objective), objective, PLAIN, logits)
    assert len({id(kernel) for _, kernel in launches}) == len(launches) == 9
    binaries = [kernel.asm["cubin"] for _, kernel in launches]
    assert len(set(binaries[:5])) == 5 and len(set(binaries[6:])) == 3
    backend.fused_loss(logits, make_rows(2, Objective()), Objective(Clip(0.1, 0.4, 3.0)), PLAIN, logits)
    assert launches[-1][1] is launches[0][1]
