"""Peak memory from hidden states, measured in a separate process: no [N, V] tensor at any N, and no [V, H] unless requested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

V, H, CHUNK = 32001, 128, 64
MIB = 1 << 20
LOGITS = 4 * V * CHUNK  # of one chunk
HEAD = 4 * V * H

MEASURE = f"""
import ctypes
import json
import torch
from benchmarks.harness import peak_memory
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: no page is larger than what was touched
from grpo_kernels import Objective, Options, Sparse, TokenBatch, linear_grpo_loss, linear_logprobs
from grpo_kernels.vocabulary import blocks

torch.manual_seed(0)
blocks.CHUNK_BYTES["cpu"] = {LOGITS}
blocks.WEIGHT_BLOCK_BYTES = {LOGITS}
dtypes = {{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}}

def measure(layer, dtype, n, frozen=False, grad=True, backend="auto", sparse=False):
    options = Options(sparse=Sparse() if sparse else None)
    hidden = torch.randn(n, {H}).to(dtypes[dtype]).requires_grad_()
    weight = (torch.randn({V}, {H}) / 16).to(dtypes[dtype]).requires_grad_(not frozen)
    targets, advantages = torch.randint({V}, (n,)), torch.randn(n)
    batch = TokenBatch(targets, advantages)

    def run():
        hidden.grad = weight.grad = None
        with torch.set_grad_enabled(grad):
            if layer == 2:
                loss = linear_grpo_loss(hidden, weight, batch, Objective.preset("dapo"), backend=backend, options=options).loss
            else:
                logps, entropy = linear_logprobs(hidden, weight, targets, entropy=True, backend=backend, options=options)
                loss = (logps * advantages).sum() + entropy.sum()
        if grad:
            loss.backward()
            hidden.grad = weight.grad = None

    run()
    return peak_memory(run, "cpu")

print(json.dumps({{json.dumps(call): measure(**call) for call in json.loads(input())}}))
"""

Call = dict[str, object]
SMALL, LARGE = 192, 640
DTYPES = ("fp32", "bf16", "fp16")
DENSE = [{"layer": layer, "dtype": dtype, "n": n} for layer in (1, 2) for dtype in DTYPES for n in (SMALL, LARGE)]
FROZEN = [{"layer": layer, "dtype": "fp32", "n": SMALL, "frozen": True} for layer in (1, 2)]
FORWARD = [{"layer": layer, "dtype": dtype, "n": LARGE, "grad": False} for layer in (1, 2) for dtype in DTYPES]
EAGER = [{"layer": 2, "dtype": "fp32", "n": n, "backend": "eager"} for n in (SMALL, LARGE)]
SPARSE = [{"layer": layer, "dtype": dtype, "n": LARGE, "sparse": True} for layer in (1, 2) for dtype in DTYPES]


@pytest.fixture(scope="module")
def peaks() -> dict[str, float]:
    """{call as JSON: bytes above what was there before}."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("measures as Linux does")
    # Freed memory goes back at once, so that a second run shows its peak again.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=json.dumps(DENSE + FROZEN + FORWARD + EAGER + SPARSE),
        env=env,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def held(dtype: str) -> int:
    """One chunk of logits; for a 16-bit head also the block of it that is in fp32, and the next."""
    return LOGITS if dtype == "fp32" else 3 * LOGITS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [1, 2])
def test_flat_in_the_number_of_rows(layer: int, dtype: str, peaks: dict[str, float]) -> None:
    """Beyond the gradients: one chunk of logits, whatever the number of rows."""
    beyond = {}
    for n in (SMALL, LARGE):
        d_hidden = 2 * 4 * n * H  # its sum in fp32, then in the dtype of hidden
        beyond[n] = peaks[json.dumps({"layer": layer, "dtype": dtype, "n": n})] - d_hidden
    assert abs(beyond[LARGE] - beyond[SMALL]) < 4 * MIB < 4 * V * (LARGE - SMALL) / 10
    assert HEAD < beyond[LARGE] < HEAD + held(dtype) + 4 * MIB


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [1, 2])
def test_sparse_gradients_take_no_more_than_dense_ones(layer: int, dtype: str, peaks: dict[str, float]) -> None:
    """Of rows as flat as they get, which draw the most columns."""
    call = {"layer": layer, "dtype": dtype, "n": LARGE}
    assert peaks[json.dumps(call | {"sparse": True})] <= peaks[json.dumps(call)]


def test_flat_with_the_eager_backend(peaks: dict[str, float]) -> None:
    small, large = (peaks[json.dumps(call)] for call in EAGER)
    assert large - small < 4 * MIB


@pytest.mark.parametrize("layer", [1, 2])
def test_frozen_head_has_no_buffer(layer: int, peaks: dict[str, float]) -> None:
    peak = peaks[json.dumps({"layer": layer, "dtype": "fp32", "n": SMALL, "frozen": True})]
    assert peak < LOGITS + 4 * MIB < HEAD


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [1, 2])
def test_no_gradient_wanted(layer: int, dtype: str, peaks: dict[str, float]) -> None:
    peak = peaks[json.dumps({"layer": layer, "dtype": dtype, "n": LARGE, "grad": False})]
    assert peak < held(dtype) + 4 * MIB
