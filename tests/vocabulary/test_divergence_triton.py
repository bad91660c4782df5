"""The Triton kernels over two streams: in the interpreter, and what they compile to for GPUs that need not be there."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("numpy")  # Triton's interpreter imports it

from triton.runtime.jit import JITFunction

from benchmarks.assembly import code, taken
from benchmarks.launches import TARGETS, compiling, device_name
from benchmarks.sass import row_loops
from grpo_kernels.vocabulary.backends import triton as backend
from grpo_kernels.vocabulary.backends.triton_divergence import _mixed_kernel, _two_pull_kernel, _two_stats_kernel
from grpo_kernels.vocabulary.rows import RowStats, RowTransform, Slopes, Teacher, partials_of
from support.divergences import PLAIN
from support.processes import interpreted

CAPPED = RowTransform(1.0, 30.0, 1.25)
SINGLE, HALF = torch.float32, torch.bfloat16

compiled = pytest.mark.skipif(
    not isinstance(_two_stats_kernel, JITFunction), reason="TRITON_INTERPRET=1: there is nothing to compile"
)


def test_the_kernels_agree_with_float64_in_the_interpreter() -> None:
    interpreted(Path(__file__).with_name("divergence_triton_cases.py"))


def launch(
    kind: str, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], vocab: int, transform: RowTransform = PLAIN, n: int = 2
) -> None:
    """All kernels of a kind for logits, a teacher and a gradient of these dtypes."""
    logits, of_teacher, out = (torch.zeros(1, n, vocab, dtype=dtype) for dtype in dtypes)
    teacher, targets = Teacher(of_teacher, transform, kind, 0.5), torch.zeros(n, dtype=torch.int64)
    names = partials_of(("entropy", "divergence"), kind)
    backend.stats(logits, targets, None, transform, names, teacher=teacher)
    stats, ones = RowStats.not_read(names, n, logits.device, teacher), torch.ones(n)
    if kind == "jsd":
        backend.mixed(logits, stats, transform, teacher, None)
    backend.pull(logits, targets, stats, Slopes(ones, ones, ones, None, ones), transform, out, teacher=teacher)


def check_budgets(target: str, kind: str, dtypes: tuple[torch.dtype, ...], vocab: int, transform: RowTransform) -> None:
    """No spills, no fp64, at most 128 registers for 512 threads; of aligned rows accesses of 128 bits (of a narrower dtype, those of
    as many elements), those of both streams before the first wait."""
    logits, of_teacher, out = dtypes
    with compiling(target) as launches:
        launch(kind, (logits, of_teacher, out), vocab, transform)
    kernels = ["_two_stats_kernel", "_mixed_kernel", "_two_pull_kernel"]
    assert [name for name, _ in launches] == [name for name in kernels if kind == "jsd" or name != "_mixed_kernel"]
    for name, kernel in launches:
        used, said = taken(kernel), (target, kind, name, dtypes, vocab, transform)
        assert used["spilled"] == used["stack"] == 0 and used["registers"] <= 128, (*said, used)
        assert not re.search(r"\.f64|_f64", code(kernel)), said
        if vocab % 16:
            continue
        widths = {min(128, 128 * x.itemsize // logits.itemsize) for x in (logits, of_teacher)}
        for loop in row_loops(kernel, "special"):
            assert set(loop.loads) == widths, (*said, loop.loads)
            assert loop.in_flight >= 2, (*said, loop.in_flight, len(loop.loads))
            if name == "_two_pull_kernel":
                assert set(loop.stores) == {min(128, 128 * out.itemsize // logits.itemsize)}, (*said, loop.stores)


@compiled
def test_budgets() -> None:
    check_budgets("sm_90", "reverse", (HALF, HALF, HALF), 151936, PLAIN)
    check_budgets("sm_90", "jsd", (SINGLE, HALF, SINGLE), 151936, PLAIN)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("kind", ("reverse", "forward", "jsd"))
@pytest.mark.parametrize("target", TARGETS)
def test_budgets_of_every_kernel(target: str, kind: str) -> None:
    for dtypes in ((SINGLE, SINGLE, SINGLE), (HALF, HALF, HALF), (SINGLE, HALF, HALF), (torch.float16, SINGLE, torch.float16)):
        for vocab, transform in ((151936, PLAIN), (151936, CAPPED), (50257, PLAIN), (1024, PLAIN)):
            check_budgets(target, kind, dtypes, vocab, transform)


@compiled
def test_no_length_and_no_mixture_compiles_again() -> None:
    device, draw, counts = device_name("sm_90"), random.Random(0), []
    kernels = (_two_stats_kernel, _mixed_kernel, _two_pull_kernel)
    with compiling("sm_90"):
        for n in (1, 16, *(draw.randint(2, 70) for _ in range(5))):
            transform = RowTransform(draw.choice((1.0, 16.0, draw.random())), draw.choice((1.0, 30.0)), draw.choice((1.0, 0.5)))
            launch("jsd", (HALF, HALF, HALF), 1040, transform, n)
            counts.append([len(kernel.device_caches[device][0]) for kernel in kernels])
    assert all(count == counts[0] for count in counts[1:]), counts
