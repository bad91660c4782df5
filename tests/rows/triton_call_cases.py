"""Call cases run by the Triton backend against float64: every objective, and calls in which every two
values of two axes meet.

Run like triton_cases.py. On a GPU vocabularies have a real size and matmuls run on the GPU.
Elsewhere stand-ins make the same calls.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import torch

from grpo_kernels import Objective, Options, TokenBatch, grpo_loss
from grpo_kernels.core.matmuls import HalfMatmuls, HeadMatmuls, TensorCoreMatmuls
from support import oracle
from support.bits import same_bits
from support.call_cases import CallCase, covering, legal, problem
from support.inside import in_chunks, of_a_gpu
from support.objectives import OBJECTIVES
from support.public_functions import check_case, expected_and_tolerance, run_call

ON_GPU = torch.zeros(()).device.type == "cuda"
VOCABULARIES = (151_936, 129_921) if ON_GPU else (272, 131)
LENGTHS = (7, 4, 2, 0, 6, 1, 5, 3)


@pytest.fixture(autouse=True)
def sixteen_bit_matmuls():
    with contextlib.nullcontext() if ON_GPU else of_a_gpu():
        yield
    problem.cache_clear()
    expected_and_tolerance.cache_clear()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_what_its_paper_says(name):
    """From logits and from hidden states, of an aligned and an odd vocabulary."""
    layout, other = ("padded", "packed")[len(name) % 2], "near" if "exact" in name else "none"
    for i, source in enumerate(("logits", "hidden")):
        vocab, inplace = VOCABULARIES[(len(name) + i) % 2], not i
        check_case(
            CallCase(
                source=source,
                objective=name,
                lengths=LENGTHS,
                layout=layout,
                other=other,
                vocab=vocab,
                inplace=inplace,
            ),
            backend="triton",
        )


def of_triton(r):
    """Triton's interpreter truncates bf16, and no stand-in rounds as a GPU does: fp32 there."""
    return legal(
        replace(
            r,
            vocab=VOCABULARIES[r.seed % 2],
            **({} if ON_GPU else {"dtype": "float32", "head": "of hidden"}),
        )
    )


PAIRS = [
    legal(CallCase(objective="gspo, exact", source="hidden", rows="shared")),
    *dict.fromkeys(of_triton(r) for r in covering(seed=7)),
][:: 1 if ON_GPU else 5]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairs(case, monkeypatch):
    """In chunks of four rows, of which two are a block."""
    in_chunks(monkeypatch, 4, 8)
    check_case(case, backend="triton")


@pytest.mark.parametrize(
    "case",
    [
        CallCase(objective=name, vocab=VOCABULARIES[0], source=source, lengths=LENGTHS)
        for name in ("dapo, k3", "gspo")
        for source in ("logits", "hidden")
    ],
    ids=str,
)
def test_the_same_bits_again(case):
    first, again = (run_call(problem(case), backend="triton") for _ in range(2))
    assert all(same_bits(x, again.values[name]) for name, x in first.values.items())
    assert all(same_bits(x, again.gradients[name]) for name, x in first.gradients.items())


@pytest.mark.parametrize("inplace", [False, True])
def test_offsets_beyond_32_bits(inplace, record_property):
    """More than 2^31 logits, every row of their gradient compared."""
    n, vocab = (14_400, 151_936) if ON_GPU else (48, 1040)
    source = torch.empty(n, vocab, dtype=torch.bfloat16).normal_(std=2.0)
    targets = torch.randint(vocab, (n,))
    fields = {"advantages": torch.randn(n), "ref_logps": torch.randn(n) - math.log(vocab) - 2.0}
    leaf = source.clone().requires_grad_()
    out = grpo_loss(
        leaf * 1.0,
        TokenBatch(targets, **fields),
        Objective.preset("dapo", beta=0.04),
        inplace=inplace,
        options=Options(backend="triton"),
    )
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    assert (source.numel() > 2**31) == ON_GPU
    total, worst, spec = 0.0, 0.0, oracle.Spec(eps_high=0.28, beta=0.04)
    for lo in range(0, n, 240):
        part = slice(lo, lo + 240)
        own = {name: value[part] for name, value in fields.items()}
        x, ids = source[part].double().requires_grad_(), targets[part]
        exact = oracle.objective(
            spec, *oracle.log_probs(x, ids), oracle.sequences_of(ids, None), normalizer=n, **own
        )
        (steep,) = torch.autograd.grad(exact.loss, x)
        total += float(exact.loss.detach())
        worst = max(worst, relative(gradient[part], steep))
        torch.testing.assert_close(
            out.logps[part].double(), exact.logps.detach(), rtol=1e-6, atol=5e-6
        )
    record_property("gradient error", worst)
    assert worst < 6e-3 and abs(out.loss.item() - total) < 1e-5 * (1 + abs(total))


def relative(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm())


MATMULS = {
    "bf16": (TensorCoreMatmuls, torch.bfloat16),
    "fp16": (HalfMatmuls, torch.float16),
    "fp32": (HeadMatmuls, torch.float32),
    "bf16 operands converted to fp32": (HeadMatmuls, torch.bfloat16),
}


@pytest.mark.parametrize(
    "shape", [(192, 151936, 1024) if ON_GPU else (12, 96, 8), (5, 1031, 33), (1, 7, 3)], ids=str
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", MATMULS)
def test_matmuls(name, has_bias, shape, record_property):
    """The sum of two blocks is fp32. The weight has a row stride, or one in both dimensions."""
    matmuls_type, weight_dtype = MATMULS[name]
    rows, vocab, width = shape
    plain = (torch.randn(vocab, width) / width**0.5).to(weight_dtype)
    if has_bias:
        weight = plain.t().contiguous().t()
        bias = torch.randn(vocab).to(weight_dtype)
        bias_in_float64 = bias.double()
    else:
        weight = torch.cat([plain, plain], 1)[:, :width]
        bias = None
        bias_in_float64 = 0.0
    matmuls = matmuls_type(weight, bias)
    hidden = torch.randn(rows, width).to(matmuls.dtype)
    buffer = matmuls.make_grad_buffer(rows, sums_bias=False)
    logits = matmuls.logits(hidden)
    logits_before = logits.clone()  # their gradient may go into their memory
    memory = buffer.memory_for(logits)
    expected_grad_logits = memory.copy_(1e-9 * torch.randn(rows, vocab)).double()
    buffer.store(memory)
    grad_logits = buffer.all_rows()
    grad_hidden = matmuls.grad_hidden(grad_logits)
    single = matmuls.add_grad_weight(None, grad_logits, hidden, may_round=True)
    total = matmuls.add_grad_weight(None, grad_logits, hidden, may_round=False)
    total = matmuls.add_grad_weight(total, grad_logits, hidden, may_round=True)

    expected_grad_weight = expected_grad_logits.t() @ hidden.double()
    # The rows of fp16 gradients are rounded to fp16 before their matmuls.
    tolerance = 5e-4 if matmuls_type is HalfMatmuls else 5e-5
    single_tolerance = 4e-3 if matmuls_type is TensorCoreMatmuls else tolerance
    results = {
        "logits": (logits_before, hidden.double() @ weight.double().t() + bias_in_float64, 1e-5),
        "grad_hidden": (grad_hidden, expected_grad_logits @ weight.double(), tolerance),
        "grad_weight": (single, expected_grad_weight, single_tolerance),
        "sum of grad_weight": (total, 2 * expected_grad_weight, tolerance),
    }
    for what, (result, expected, limit) in results.items():
        error = relative(result, expected)
        record_property(what, error)
        assert error < limit, what
    assert logits.dtype == total.dtype == torch.float32
