"""How often the Triton kernels over two streams are compiled. Budgets: test_resources.py. Values: divergence_triton_cases.py."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from benchmarks.launches import compiling, device_name
from grpo_kernels.vocabulary.backends import triton as backend
from grpo_kernels.vocabulary.backends.triton_divergence import _mixed_kernel, _two_pull_kernel, _two_stats_kernel
from grpo_kernels.vocabulary.rows import RowStats, RowTransform, Slopes, Teacher, partials_of


def launch(vocab: int, transform: RowTransform, n: int) -> None:
    """All kernels of a mixture."""
    logits, of_teacher, out = torch.zeros(3, 1, n, vocab, dtype=torch.bfloat16).unbind()
    teacher, targets = Teacher(of_teacher, transform, "jsd", 0.5), torch.zeros(n, dtype=torch.int64)
    names = partials_of(("entropy", "divergence"), "jsd")
    backend.stats(logits, targets, None, transform, names, teacher=teacher)
    stats, ones = RowStats.not_read(names, n, logits.device, teacher), torch.ones(n)
    backend.mixed(logits, stats, transform, teacher, None)
    backend.pull(logits, targets, stats, Slopes(ones, ones, ones, None, ones), transform, out, teacher=teacher)


@pytest.mark.skipif(not isinstance(_two_stats_kernel, JITFunction), reason="TRITON_INTERPRET=1: there is nothing to compile")
def test_no_length_and_no_mixture_compiles_again() -> None:
    device, draw, counts = device_name("sm_90"), random.Random(0), []
    kernels = (_two_stats_kernel, _mixed_kernel, _two_pull_kernel)
    with compiling("sm_90"):
        for n in (1, 16, *(draw.randint(2, 70) for _ in range(5))):
            transform = RowTransform(draw.choice((1.0, 16.0, draw.random())), draw.choice((1.0, 30.0)), draw.choice((1.0, 0.5)))
            launch(1040, transform, n)
            counts.append([len(kernel.device_caches[device][0]) for kernel in kernels])
    assert all(count == counts[0] for count in counts[1:]), counts
