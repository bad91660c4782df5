"""The engine's code for a GPU, run on a CPU with stand-ins for the products:

blocks of chunks, their products, their memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_kernels import (
    Objective,
    Options,
    TokenBatch,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
)
from grpo_kernels.core import backends, matmuls, memory
from grpo_kernels.core import linear_memory as blocks
from grpo_kernels.core.backends import eager
from grpo_kernels.core.linear_memory import LinearMemory
from support import oracle
from support.bits import same_bits
from support.call_cases import CallCase, problem
from support.inside import LiveBytes, NoRows, Product, of_a_gpu
from support.public_functions import assert_matches_oracle, expected_and_tolerance, run_call

GIB = 1 << 30
V, H, CHUNK, BLOCK = 71, 16, 64, 128
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QWEN = LinearMemory(151936, 4096, has_grad_buffer=True, grad_hidden_bytes=2, grad_weight_bytes=2)


# ---- rows of a chunk and of a block


@pytest.mark.parametrize("gathered", [False, True])
def test_the_peak_is_flat_in_the_number_of_rows(gathered):
    """8192 x 4096 x 151,936 in bf16:

    at most 3.6 GiB; of any other number of rows as much, but for d_hidden.
    """
    plan = QWEN.plan("cuda", 8192, gathered)
    assert QWEN.peak(plan, 8192, gathered) <= 3.6 * GIB
    assert plan == (
        (512, 3072) if gathered else (512, 8192)
    )  # no fp32 sum of d_weight, where there is room without it
    beside = {}
    for rows in (1, 512, 3072, 3073, 8000, 8193, 10**5, 10**7):
        work = QWEN.plan("cuda", rows, gathered)
        assert work.chunk == 512 and work.block % 512 in (0, rows % 512)
        beside[rows] = QWEN.peak(work, rows, gathered) - 2 * 4096 * rows
    assert (
        list(beside.values()) == sorted(beside.values())
        and beside[8193] == beside[10**7] < 3.52 * GIB
    )


# ---- memory


def head(rows, dtype=BF16):
    """A head of meta tensors: large ones need no memory."""
    shapes = ((1, rows, 4096), (151936, 4096))
    hidden, weight = (
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes
    )
    vector = torch.empty(1, rows, device="meta")
    return hidden, weight, TokenBatch(vector.to(torch.int64), vector, ref_logps=vector)


@pytest.fixture
def no_rows(monkeypatch):
    monkeypatch.setattr(backends, "pick", lambda *_: NoRows())


SIZES = [(layer, BF16, rows) for layer in (1, 2) for rows in (700, 8192, 8193, 20000)] + [
    (2, FP16, 700),
    (2, FP16, 8193),
]


@pytest.mark.parametrize("layer, dtype, rows", SIZES, ids=str)
@pytest.mark.usefixtures("no_rows")
def test_bytes_that_are_alive_are_those_of_the_model(layer, dtype, rows):
    """A whole call and its backward, nothing of which waits for the device: without values it would
    fail. In fp16 d_weight is fp32 until the factor of the backward is known; the last part of the
    sum is beside it, and d_hidden as it is handed over.
    """
    hidden, weight, batch = head(rows, dtype)
    with of_a_gpu() as made, LiveBytes() as live:
        if layer == 2:
            linear_grpo_loss(hidden, weight, batch, Objective(beta=0.1)).loss.backward()
        else:
            linear_logprobs(hidden, weight, batch.targets)[0].sum().backward()
    half = dtype == FP16
    work = replace(QWEN, grad_hidden_bytes=4, scales_rows=True) if half else QWEN
    plan = work.plan("cuda", rows, gathers_rows=False)
    expected = work.peak(plan, rows, gathers_rows=False)
    assert expected <= live.peak <= expected + (100 + 2 * 4096 * half) * rows  # vectors
    assert half or len(made) == (3 - layer) * -(-rows // 512) + 2 * -(-rows // plan.block)
    assert half or rows > 8193 or live.peak <= 3.6 * GIB
    assert hidden.grad is not None and weight.grad is not None and weight.grad.dtype == dtype


# ---- numbers


class Poisoned(eager.Kernels):
    """The eager row kernels, which overwrite the logits of a chunk with NaN after their last use.

    A kernel that writes the gradient of a chunk is the last that reads its logits. So a result is
    right only if nothing reads them afterwards, and no gradient lies in their memory. fp16 gradients
    do lie there, until they are scaled to fit: these logits are left as they are.
    """

    def run_gradient_kernel(self, rows, sums, coefficients, out):
        super().run_gradient_kernel(rows, sums, coefficients, out)
        self._poison(rows.logits, out)

    def fused_loss(self, rows, loss_formula, out):
        # By other kernels, because the gradient kernel of this class would poison the logits of a
        # block of rows before the next block is read.
        values = eager.Kernels().fused_loss(rows, loss_formula, out)
        self._poison(rows.logits, out)
        return values

    def _poison(self, logits, out):
        if out is not None and out.data_ptr() == logits.data_ptr():
            return
        assert out is None or (out.dtype == BF16 and out.stride(1) * 2 % 128 == 0)
        logits.fill_(torch.nan)


@pytest.fixture
def small(monkeypatch):
    """Chunks of 64 rows, in blocks of 128 where they are several."""
    monkeypatch.setitem(blocks.CHUNK_BYTES, "cpu", 4 * V * CHUNK)
    monkeypatch.setitem(blocks.BLOCK_BYTES, "cpu", 2 * V * BLOCK)
    monkeypatch.setattr(backends, "pick", lambda *_: Poisoned())


#: Every row has a gradient.
ROWS = CallCase(
    source="hidden", objective="reinforce", given="on-policy", lengths=(300,), vocab=V, width=H, dtype="bfloat16", mask="none",
    spread=2.0, seed=1,
)  # fmt: skip
LAYERS = [ROWS, replace(ROWS, function="logprobs", also="nothing")]
layers = pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.function)


def made_by(case, adds=True, **options):
    """The products of a call that is right, and its gradients."""
    p, _ = problem(case), expected_and_tolerance(case)
    with of_a_gpu(adds) as made:
        found = run_call(p, **options)
    assert_matches_oracle(p, found)
    return made, found.gradients


def with_advantages(p, advantages):
    """The problem with others, and its answer."""
    changed = replace(
        p,
        fields={**p.fields, "advantages": advantages},
        seen={**p.seen, "advantages": advantages.double()},
    )
    return changed, oracle.answer(changed)


def expected_products(n, block, gradients=("hidden", "weight")):
    """In order: the logits of each chunk of a block, then the block's two products."""
    found, several = [], n > block
    for lo in range(0, n, block):
        rows = min(block, n - lo)
        found += [Product(min(CHUNK, rows - i), H, V, FP32) for i in range(0, rows, CHUNK)]
        if "hidden" in gradients:
            found.append(Product(rows, V, H, FP32))
        if "weight" in gradients:
            found.append(Product(V, rows, H, FP32 if several else BF16, added=lo > 0))
    return found


@pytest.mark.parametrize("bias", ["none", "plain"])
@pytest.mark.parametrize(
    ("n", "block"), [(150, 150), (300, 128)], ids=["one block", "three blocks"]
)
@layers
@pytest.mark.usefixtures("small")
def test_products_and_gradients(case, n, block, bias):
    """Log-probs are there before anything arrives at them: logits are computed again."""
    made, _ = made_by(replace(case, lengths=(n,), bias=bias))
    first = [] if case.function == "loss" else [p for p in expected_products(n, n) if p.n == V]
    assert made == first + expected_products(n, block)


@pytest.mark.usefixtures("small")
def test_a_torch_whose_addmm_takes_no_fp32_sum(monkeypatch):
    """torch 2.9: the same numbers, a few rows of the weight at a time."""
    monkeypatch.setattr(matmuls, "WEIGHT_SLICE_BYTES", 4 * H * 30)
    (made, right), (parts, found) = made_by(ROWS), made_by(ROWS, adds=False)
    assert any(p.added for p in made) and not any(p.added for p in parts)
    assert [p.m for p in parts if p.k == 128 and p.n == H] == [V, 30, 30, 11]
    assert all(same_bits(right[name], found[name]) for name in ("hidden", "weight"))


@pytest.mark.parametrize(
    ("lengths", "width", "widened", "blocks"),
    [
        ((60,) * 5, H, False, (120, 120, 60)), ((60,) * 5, H, True, (120, 120, 60)), ((64, 64), H, False, (128,)),
        ((84, 84), 64, True, (84, 84)),  # which would be one block, if nothing were copied
    ],
)  # fmt: skip
@pytest.mark.usefixtures("small")
def test_sequences_whose_slopes_wait_are_blocks(lengths, width, widened, blocks, monkeypatch):
    """As many of them as fit; under autocast too, where all rows are copied into another dtype."""
    case = replace(
        ROWS,
        objective="gspo",
        lengths=lengths,
        width=width,
        dtype="float32" if widened else "bfloat16",
    )
    p, exact = with_advantages(problem(case), torch.randn(len(lengths), max(lengths)).abs() + 0.1)
    if widened:
        monkeypatch.setattr("grpo_kernels.inputs.matmul_dtype", lambda hidden: BF16)
    with of_a_gpu() as made:
        found = run_call(p).gradients
    assert [x.k for x in made if x.m == V] == list(blocks) and sum(
        x.m for x in made if x.n == V
    ) == sum(lengths)
    for name, gradient in found.items():
        assert (gradient - exact.gradients[name]).norm() < 8e-3 * exact.gradients[name].norm(), name


@pytest.mark.usefixtures("small")
def test_a_small_factor_of_a_sequence_does_not_underflow_in_fp16():
    """Rows of fp16 gradients are scaled when they are written, so their factor must be known
    then.
    """
    case = replace(
        ROWS, objective="gspo", lengths=(60,) * 3, dtype="float16", normalizer=3e6, upstream=2.0**20
    )
    p, exact = with_advantages(problem(case), torch.randn(3, 60).abs() + 0.1)
    with of_a_gpu():
        found = run_call(p).gradients
    for name, gradient in found.items():
        assert (gradient - exact.gradients[name]).norm() < 4e-3 * exact.gradients[name].norm(), name


# ---- large results on a CPU: which memory is reused

MIB = 1 << 20


@pytest.fixture
def nothing_is_kept():
    memory.release()
    yield
    memory.release()


def new(count=16 * MIB):
    return memory.empty((count,), torch.float32, torch.device("cpu"))


@pytest.mark.usefixtures("nothing_is_kept")
def test_memory_is_reused_once_no_tensor_holds_it():
    first = new()
    start, view = first.data_ptr(), first[5:].view(-1)
    other = new()
    assert other.data_ptr() != start
    del first
    assert new().data_ptr() != start  # a view lies in it
    del view
    again = new(10 * MIB)
    assert again.data_ptr() == start and again.shape == (10 * MIB,)
    del again
    assert new(17 * MIB).data_ptr() != start  # too small


@pytest.mark.usefixtures("nothing_is_kept")
def test_memory_of_a_live_gradient_is_not_reused(backend):
    """Held by a tensor's .grad, by numpy, or by a detached view, while further gradients are
    made.
    """
    batch = TokenBatch(torch.randint(300_000, (40,)), torch.randn(40))
    leaf, held = torch.randn(40, 300_000).requires_grad_(), []  # 48 MB
    for i in range(memory.MAX_BLOCKS + 2):
        scaled = (i + 1.0) * grpo_loss(
            leaf, batch, Objective.preset("dapo"), options=Options(backend=backend)
        ).loss
        (gradient,) = torch.autograd.grad(scaled, leaf)
        held.append((gradient.detach()[1:], gradient[1:].clone()))
        del gradient
    assert len({view.data_ptr() for view, _ in held}) == len(held)
    assert all(same_bits(view, values) and view.any() for view, values in held)
