"""What a call costs: the products and the memory of what is frozen, what is allocated, and the
peak from hidden states.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch

from grpo_kernels import (
    Head,
    LogitTransform,
    Objective,
    Options,
    TokenBatch,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
    token_logprobs,
)
from support.inside import Allocations, blocks_of_a_row, count_products, in_chunks
from support.processes import checked_output
from support.public_functions import with_options

B, T, V, H = 8, 7, 811, 96
MASK = torch.arange(T) < torch.tensor([7, 4, 2, 1, 6, 3, 5, 7])[:, None]
N = int(MASK.sum())
ADVANTAGES = torch.tensor([1.3, -0.8, 2.0, 0.7, -1.1, 0.6, 0.0, -1.7])


def leaves(*frozen):
    made = {
        "hidden": torch.randn(B, T, H),
        "weight": torch.randn(V, H) / 10,
        "bias": torch.randn(V),
    }
    return {name: x.requires_grad_(name not in frozen) for name, x in made.items()}


def batch(**fields):
    targets = torch.randint(V, (B, T))
    given = {
        "mask": MASK,
        "old_logps": -6 + 0.1 * torch.randn(B, T),
        "ref_logps": -6 + 0.1 * torch.randn(B, T),
    }
    return TokenBatch(targets, ADVANTAGES, **{**given, **fields})


def loss(x, objective, of=None, **options):
    return linear_grpo_loss(
        x["hidden"],
        Head(x["weight"], x["bias"]),
        of or batch(),
        objective,
        **with_options(**options),
    ).loss


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize(
    "frozen", [("weight",), ("hidden",), ("bias",), ("weight", "bias"), ("hidden", "bias")], ids=str
)
def test_what_is_frozen_costs_no_product_and_no_memory(frozen, layer, backend, monkeypatch):
    x, of = leaves(*frozen), batch(mask=None)
    rows = count_products(monkeypatch)
    with Allocations() as seen:
        if layer == 2:
            loss(x, Objective.preset("dapo"), of, backend=backend).backward()
        else:
            linear_logprobs(
                x["hidden"],
                Head(x["weight"], x["bias"]),
                of.targets,
                options=Options(backend=backend),
            )[0].sum().backward()
    assert {name for name, leaf in x.items() if leaf.grad is None} == set(frozen)
    assert ("hidden" in frozen) == (not rows["d_hidden"]) and ("weight" in frozen) == (
        not rows["d_weight"]
    )
    shapes = {tuple(sorted(shape)) for shape in seen.shapes}
    assert ((H, V) in shapes) == ("weight" not in frozen) and ((V,) in shapes) == (
        "bias" not in frozen
    )
    assert ((B * T, H) in seen.shapes) == ("hidden" not in frozen), (
        "all rows take part: the hidden states are not copied"
    )


@pytest.mark.parametrize("layer", [1, 2])
def test_sixteen_bit_gradients_are_summed_in_fp32(layer, backend, monkeypatch):
    """Over many chunks the error of the weight's gradient does not grow, fp32 memory is not
    rounded, and that of 16 bits once.
    """
    x, of, found = {name: leaf.detach().bfloat16() for name, leaf in leaves().items()}, batch(), []
    for rows, dtype in ((64, torch.float32), (2, torch.float32), (2, torch.bfloat16)):
        in_chunks(monkeypatch, rows)
        total = torch.zeros(V, H, dtype=dtype)
        mine = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
        options = Options(backend, weight_grad=total)
        if layer == 2:
            loss(mine, Objective.preset("reinforce"), of, options=options).backward()
        else:
            linear_logprobs(
                mine["hidden"],
                Head(mine["weight"], mine["bias"]),
                of.targets,
                mask=MASK,
                options=options,
            ).logps.sum().backward()
        found.append(total.float())
    whole, chunks, rounded = found
    once = chunks.bfloat16().float()
    assert (chunks - whole).abs().max() <= 2.0**-8 * whole.abs().max() and (
        chunks != once
    ).float().mean() > 0.9
    assert (rounded - chunks).norm() <= 1.2 * (once - chunks).norm()


@pytest.mark.parametrize("entropy", [False, "detached", True], ids=str)
def test_a_temperature_on_a_view_makes_no_copy(entropy, backend, monkeypatch):
    """The only new tensors of many logits are the gradient of the view and, by autograd, that of what it is a view of; with
    entropy no more than without, and in place none."""
    blocks_of_a_row(monkeypatch)
    leaf, targets = torch.randn(4, 9, 601).requires_grad_(), torch.randint(601, (4, 8))
    transform = LogitTransform(temperature=torch.rand(4) + 0.5, softcap=20.0)

    def large(f):
        with Allocations() as made:
            result = f()
        return result, sorted(shape for shape in made.shapes if math.prod(shape) > 8 * 601)

    given = {"transform": transform, "options": Options(backend)}
    (logps, _), forward = large(
        lambda: token_logprobs(leaf[:, :-1], targets, entropy=entropy, **given)
    )
    assert forward == [] and large(lambda: logps.sum().backward())[1] == [(4, 8, 601), (4, 9, 601)]
    batch, objective, source = (
        TokenBatch(targets, torch.randn(4)),
        Objective.preset("dapo", entropy_coef=0.1),
        (leaf * 1.0)[:, :-1],
    )
    assert large(lambda: grpo_loss(leaf[:, :-1], batch, objective, **given))[1] == [(4, 8, 601)]
    assert large(lambda: grpo_loss(source, batch, objective, inplace=True, **given))[1] == []


# ---- the peak, in a process of its own: no [N, V] at any N, and no [V, H] unless its gradient is wanted

MIB = 1 << 20
VOCAB, WIDTH, CHUNK, SMALL, LARGE = 32001, 128, 64, 512, 1024
CHUNK_BYTES, HEAD_BYTES = 4 * VOCAB * CHUNK, 4 * VOCAB * WIDTH
MEASURE = f"""
import ctypes, json, torch
from benchmarks.harness import peak_memory
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: no page is larger than what was touched
from grpo_kernels import Objective, Options, TokenBatch, linear_grpo_loss, linear_logprobs
from support.inside import blocks
torch.manual_seed(0)
for table in (blocks.CHUNK_BYTES, blocks.IN_PLACE_CHUNK_BYTES, blocks.BLOCK_BYTES):
    table["cpu"] = {CHUNK_BYTES}

def measure(layer, dtype, n, frozen=False, grad=True, backend="auto"):
    options = Options(backend)
    hidden = torch.randn(n, {WIDTH}).to(getattr(torch, dtype)).requires_grad_()
    weight = (torch.randn({VOCAB}, {WIDTH}) / 16).to(hidden.dtype).requires_grad_(not frozen)
    targets, advantages = torch.randint({VOCAB}, (n,)), torch.randn(n)
    batch = TokenBatch(targets, advantages)

    def run():
        hidden.grad = weight.grad = None
        with torch.set_grad_enabled(grad):
            if layer == 2:
                loss = linear_grpo_loss(hidden, weight, batch, Objective.preset("dapo"), options=options).loss
            else:
                logps, entropy = linear_logprobs(hidden, weight, targets, entropy=True, options=options)
                loss = (logps * advantages).sum() + entropy.sum()
        if grad:
            loss.backward()
            hidden.grad = weight.grad = None

    run()
    return peak_memory(run, "cpu")

print(json.dumps([measure(**call) for call in json.loads(input())]))
"""


@functools.cache
def peaks():
    """Bytes above what was there before, by `call`."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("measures as Linux does")
    kinds = [(layer, dtype) for layer in (1, 2) for dtype in ("float32", "bfloat16")]
    calls = [call(layer, dtype, n) for layer, dtype in kinds for n in (SMALL, LARGE)]
    calls += [call(layer, dtype, LARGE, grad=False) for layer, dtype in kinds]
    calls += [call(layer, "float32", SMALL, frozen=True) for layer in (1, 2)]
    calls += [call(2, "float32", n, backend="eager") for n in (SMALL, LARGE)]
    # Freed memory goes back at once, so that a second run shows its peak again.
    paths = os.pathsep.join(
        [str(Path(__file__).parents[1]), str(Path(__file__).parents[2]), *sys.path]
    )
    env = {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
    }
    asked = f"[{','.join(calls)}]"
    found = checked_output([sys.executable, "-c", MEASURE], input=asked, env=os.environ | env)
    return dict(zip(calls, json.loads(found), strict=True))


def call(layer, dtype, n, **more):
    return json.dumps({"layer": layer, "dtype": dtype, "n": n, **more})


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", [1, 2])
def test_the_peak_is_flat_in_the_number_of_rows(layer, dtype):
    """Beyond the gradients one chunk of logits; for a 16-bit head also the block of it that is in
    fp32, and the next.
    """
    held = CHUNK_BYTES if dtype == "float32" else 3 * CHUNK_BYTES
    of_hidden = {
        n: 2 * 4 * n * WIDTH for n in (SMALL, LARGE)
    }  # its sum in fp32, then in the dtype of hidden
    beyond = {n: peaks()[call(layer, dtype, n)] - of_hidden[n] for n in (SMALL, LARGE)}
    assert abs(beyond[LARGE] - beyond[SMALL]) < 4 * MIB < 4 * VOCAB * (LARGE - SMALL) / 10
    assert HEAD_BYTES < beyond[LARGE] < HEAD_BYTES + held + 4 * MIB
    assert peaks()[call(layer, dtype, LARGE, grad=False)] < held + 4 * MIB
    if dtype == "float32":
        assert peaks()[call(layer, dtype, SMALL, frozen=True)] < CHUNK_BYTES + 4 * MIB < HEAD_BYTES
        small, large = (peaks()[call(2, dtype, n, backend="eager")] for n in (SMALL, LARGE))
        assert large - small < 4 * MIB
