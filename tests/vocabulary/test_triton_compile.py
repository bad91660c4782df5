"""The compiled Triton kernels, and how often they are compiled: no GPU is needed. Budgets: test_resources.py."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_kernels.formulas.surrogates import Cispo, Clip, Custom, PolicyGradient, Surrogate
from grpo_kernels.objective import Objective
from grpo_kernels.vocabulary.rows import RowTransform
from support.rows import WITH_ENTROPY, slopes_of

pytest.importorskip("triton")

import triton
from triton.runtime.jit import JITFunction

from benchmarks.assembly import STORE, accesses, bits, blocks, code, loops
from benchmarks.launches import Case, compiling, device_name, token_rows
from benchmarks.other_launches import Beside
from grpo_kernels.diagnosis import numbers
from grpo_kernels.vocabulary.backends import triton as backend
from grpo_kernels.vocabulary.backends.triton_choices import Choice

pytestmark = pytest.mark.skipif(
    not isinstance(backend._stats_kernel, JITFunction), reason="TRITON_INTERPRET=1: there is nothing to compile"
)

PLAIN = RowTransform(1.0, 0.0, 1.0)


def stores_in_flight(assembly: str) -> list[int]:
    """Bits of the stores whose code can be followed by the store of the target's gradient, the only one of 16 bits, without a
    barrier in between."""
    body, successors = blocks(assembly)

    def reaches(block: int, line: int) -> bool:
        """Whether control comes from this line to that store before it comes to a barrier."""
        seen, ahead = set(), [(block, line)]
        while ahead:
            block, line = ahead.pop()
            for text in body[block][line:]:
                if re.search(r"\bbar\.sync|s_barrier", text):
                    break
                if 16 in accesses(STORE, [text]):
                    return True
            else:
                ahead += [(after, 0) for after in successors[block] - seen]
                seen |= successors[block]
        return False

    found = [(i, j, width) for i, lines in enumerate(body) for j, x in enumerate(lines) for width in accesses(STORE, [x])]
    widths = [width for *_, width in found]
    assert widths.count(16) == 1 and 128 in widths
    return [width for i, j, width in found if reaches(i, j + 1)]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("case", [Case("pull"), Case("fused"), Beside("two_pull")], ids=lambda case: case.kernel)
def test_the_targets_gradient_is_stored_behind_a_barrier(case: Case, target: str) -> None:
    """One thread stores it where another has just stored a tile."""
    with compiling(target) as launches:
        case.launch()
    ((_, kernel),) = launches
    assembly = code(kernel)
    assert 128 not in stores_in_flight(assembly)
    without = re.sub(r"bar\.sync|s_barrier", "nop", assembly)  # the walk finds what there is to find
    assert 128 in stores_in_flight(without)


def test_minimum_and_maximum_of_a_formula_keep_nan() -> None:
    """The hardware's default drops it, as no test on a CPU would show: a row of NaN would get a finite loss."""
    with compiling("sm_90") as launches:
        logits = torch.zeros(1, 2, 64)
        backend.fused(logits, token_rows(2, Objective()), Objective(), PLAIN, logits)
    ((_, kernel),) = launches
    assembly = code(kernel)
    # exp(min(x, 60)), min(r, delta) A, clip(r): the lane reductions of the row's maximum use the plain form.
    assert assembly.count("min.NaN.f32") >= 4 and assembly.count("max.NaN.f32") >= 1 and "min.f32" not in assembly


def test_multiprocessors_that_share_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet at the end of a row, not in its loops; and no thread of one stores the target's gradient where a thread of another
    has stored a tile, since no barrier is between them."""
    monkeypatch.setitem(backend.LAUNCH, "fused32", Choice(64, 1, ends=2, kept=1, cluster=2))
    for target, vocab, shared in (("sm_90", 2048, True), ("sm_80", 2048, False), ("sm_90", 2047, False)):
        with compiling(target) as launches:
            Case("fused", torch.float32, vocab=vocab, stride=vocab).launch()
        ((_, kernel),) = launches
        shared = shared and numbers(triton.__version__) >= (3, 9)
        assembly = code(kernel)
        assert kernel.metadata.num_ctas == 1 + shared and ("barrier.cluster" in assembly) == shared
        assert not any("barrier.cluster" in line for loop in loops(assembly) for line in loop)
        widths = {bits(m[0]) for m in re.finditer(STORE, assembly)}
        assert (16 in widths) != shared, widths  # 64: tiles of bf16; 32: log-prob, entropy, loss


def test_a_softcapped_fp32_gradient_leaves_fewer_tiles_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tile of a gradient is as wide as that of the logits, and tanh takes registers too."""
    kept = []
    monkeypatch.setattr(backend, "run", lambda kernel, tile, *_: kept.append(tile(0).flags["KEPT"]))
    single, half = torch.float32, torch.bfloat16
    with compiling("sm_90"):
        for logits, gradient, transform in (
            (single, single, "softcap"), (single, single, "linear"), (single, half, "softcap"), (half, half, "softcap"),
        ):  # fmt: skip
            Case("fused", logits, gradient, transform=transform).launch()
    assert kept == [2, 3, 3, 1]


def variants(target: str) -> dict[str, int]:
    """Compiled kernels in Triton's own cache, by kernel."""
    kernels = (backend._stats_kernel, backend._pull_kernel, backend._fused_kernel, backend._scale_kernel)
    device = device_name(target)
    return {kernel.__name__: len(kernel.device_caches[device][0]) for kernel in kernels if device in kernel.device_caches}


@pytest.mark.parametrize("columns", (1031, 1040))
def test_no_length_and_no_schedule_compiles_again(columns: int) -> None:
    before = variants("sm_90")
    draw = random.Random(0)
    with compiling("sm_90"):
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
            rows = token_rows(n, objective, offset=draw.randint(0, 3))
            backend.fused(logits, rows, objective, transform, logits)
            stats = backend.stats(logits, rows.targets, rows.read, transform, WITH_ENTROPY)
            lo, hi = (0, n) if call % 3 else (n // 3, n - n // 4)
            part = stats.at(slice(lo, hi))
            vector = torch.zeros(n)[lo:hi]
            backend.pull(logits, rows.targets[lo:hi], part, slopes_of(part, vector, vector), transform, logits, rows=(lo, hi))
            backend.scale_(torch.zeros(n, columns, dtype=torch.bfloat16), torch.ones(()))
            if call == 0:
                first = variants("sm_90")
    assert all(count == before.get(name, 0) + 1 or name == "_scale_kernel" for name, count in first.items()), (before, first)
    assert variants("sm_90") == first


SOURCE = """
from grpo_kernels.formulas.surrogates import ops

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


def test_each_formula_has_its_own_kernel(tmp_path: Path) -> None:
    one = imported(tmp_path / "one.py", SOURCE.format(extra=""))
    two = imported(tmp_path / "two.py", SOURCE.format(extra=" * 3.0"))
    # Same module name, function name and line: only the source tells them apart, also in the cache on disk.
    assert backend.compiled_formula(one).cache_key != backend.compiled_formula(two).cache_key
    surrogates: list[Surrogate] = [Clip(), Cispo(), PolicyGradient(), Custom(one), Custom(two), Custom(one, (1.0,))]
    with compiling("sm_90") as launches:
        for objective in (*map(Objective, surrogates), *(Objective(beta=0.1, kl=kl) for kl in ("k1", "k2", "k3"))):
            logits = torch.zeros(1, 2, 64)
            backend.fused(logits, token_rows(2, objective), objective, PLAIN, logits)
        assert len({id(kernel) for _, kernel in launches}) == len(launches) == 9
        binaries = [kernel.asm["cubin"] for _, kernel in launches]
        assert len(set(binaries[:5])) == 5 and len(set(binaries[6:])) == 3
        backend.fused(logits, token_rows(2, Objective()), Objective(Clip(0.1, 0.4, 3.0)), PLAIN, logits)
        assert launches[-1][1] is launches[0][1]


ANNOTATED = """
import torch
from torch import Tensor
from grpo_kernels.formulas.surrogates import ops


def scaled(x: Tensor, by: float) -> "torch.Tensor":
    return x * by


def bent(logp: Tensor, old_logp: Tensor, advantage: torch.Tensor, params: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    x = scaled(logp - old_logp, 0.5)
    return -advantage * logp + x * x, -advantage + x
"""


def test_annotations_are_not_compiled(tmp_path: Path) -> None:
    """Names that only annotations use are none of a kernel's."""
    objective = Objective(Custom(imported(tmp_path / "annotated.py", ANNOTATED)))
    with compiling("sm_90") as launches:
        logits = torch.zeros(1, 2, 64)
        backend.fused(logits, token_rows(2, objective), objective, PLAIN, logits)
        assert len(launches) == 1 and launches[0][1].asm["cubin"]
