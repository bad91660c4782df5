"""Memory: the peak from hidden states, copies that are not made, and what a call writes while it reads other tensors."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_kernels import (
    Exact,
    Head,
    LogitTransform,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    token_divergence,
    token_logprobs,
)
from support.allocations import Allocations
from support.bits import same_bits
from support.inside import blocks_of_a_row, overlap

Tensor = torch.Tensor
MIB = 1 << 20

# ---- the peak, in a process of its own: no [N, V] at any N, and no [V, H] unless its gradient is wanted

VOCAB, WIDTH, CHUNK, SMALL, LARGE = 32001, 128, 64, 192, 640
CHUNK_BYTES, HEAD_BYTES = 4 * VOCAB * CHUNK, 4 * VOCAB * WIDTH
MEASURE = f"""
import ctypes, json, torch
from benchmarks.harness import peak_memory
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: no page is larger than what was touched
from grpo_kernels import Objective, Options, Sparse, TokenBatch, linear_grpo_loss, linear_logprobs
from support.inside import blocks
torch.manual_seed(0)
blocks.CHUNK_BYTES["cpu"] = blocks.WEIGHT_BLOCK_BYTES = {CHUNK_BYTES}

def measure(layer, dtype, n, frozen=False, grad=True, backend="auto", sparse=False):
    options = Options(backend, sparse=Sparse() if sparse else None)
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
def peaks() -> dict[str, float]:
    """Bytes above what was there before, by `call`."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("measures as Linux does")
    kinds = [(layer, dtype) for layer in (1, 2) for dtype in ("float32", "bfloat16", "float16")]
    calls = [call(layer, dtype, n) for layer, dtype in kinds for n in (SMALL, LARGE)]
    calls += [call(layer, dtype, LARGE, **more) for layer, dtype in kinds for more in ({"grad": False}, {"sparse": True})]
    calls += [call(layer, "float32", SMALL, frozen=True) for layer in (1, 2)]
    calls += [call(2, "float32", n, backend="eager") for n in (SMALL, LARGE)]
    # Freed memory goes back at once, so that a second run shows its peak again.
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2]), *sys.path])
    env = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    asked = f"[{','.join(calls)}]"
    done = subprocess.run([sys.executable, "-c", MEASURE], input=asked, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(calls, json.loads(done.stdout), strict=True))


def call(layer: int, dtype: str, n: int, **more: Any) -> str:
    return json.dumps({"layer": layer, "dtype": dtype, "n": n, **more})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layer", [1, 2])
def test_the_peak_is_flat_in_the_number_of_rows(layer: int, dtype: str) -> None:
    """Beyond the gradients one chunk of logits; for a 16-bit head also the block of it that is in fp32, and the next."""
    held = CHUNK_BYTES if dtype == "float32" else 3 * CHUNK_BYTES
    of_hidden = {n: 2 * 4 * n * WIDTH for n in (SMALL, LARGE)}  # its sum in fp32, then in the dtype of hidden
    beyond = {n: peaks()[call(layer, dtype, n)] - of_hidden[n] for n in (SMALL, LARGE)}
    assert abs(beyond[LARGE] - beyond[SMALL]) < 4 * MIB < 4 * VOCAB * (LARGE - SMALL) / 10
    assert HEAD_BYTES < beyond[LARGE] < HEAD_BYTES + held + 4 * MIB
    assert peaks()[call(layer, dtype, LARGE, grad=False)] < held + 4 * MIB
    assert peaks()[call(layer, dtype, LARGE, sparse=True)] <= peaks()[call(layer, dtype, LARGE)]  # of the flattest rows
    if dtype == "float32":
        assert peaks()[call(layer, dtype, SMALL, frozen=True)] < CHUNK_BYTES + 4 * MIB < HEAD_BYTES
        small, large = (peaks()[call(2, dtype, n, backend="eager")] for n in (SMALL, LARGE))
        assert large - small < 4 * MIB


# ---- copies


@pytest.mark.parametrize("entropy", [False, "detached", True], ids=str)
def test_a_temperature_on_a_view_makes_no_copy(entropy: bool | str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only new tensors of many logits are the gradient of the view and, by autograd, that of what it is a view of; with
    entropy no more than without, and in place none."""
    blocks_of_a_row(monkeypatch)
    leaf, targets = torch.randn(4, 9, 601).requires_grad_(), torch.randint(601, (4, 8))
    transform = LogitTransform(temperature=torch.rand(4) + 0.5, softcap=20.0)

    def large(f: Callable[[], Any]) -> tuple[Any, list[tuple[int, ...]]]:
        with Allocations() as made:
            result = f()
        return result, sorted(shape for shape in made.shapes if math.prod(shape) > 8 * 601)

    given: dict[str, Any] = {"transform": transform, "options": Options(backend)}
    (logps, _), forward = large(lambda: token_logprobs(leaf[:, :-1], targets, entropy=entropy, **given))
    assert forward == [] and large(lambda: logps.sum().backward())[1] == [(4, 8, 601), (4, 9, 601)]
    batch, objective, source = (
        TokenBatch(targets, torch.randn(4)),
        Objective.preset("dapo", entropy_coef=0.1),
        (leaf * 1.0)[:, :-1],
    )
    assert large(lambda: grpo_loss(leaf[:, :-1], batch, objective, **given))[1] == [(4, 8, 601)]
    assert large(lambda: grpo_loss(source, batch, objective, inplace=True, **given))[1] == []


# ---- what shares memory


def elements(x: Tensor) -> set[int]:
    """The addresses of all bytes of all elements."""
    at = torch.tensor([x.data_ptr()])
    for size, stride in zip(x.shape, x.stride(), strict=True):
        at = (at[:, None] + x.element_size() * stride * torch.arange(size)).reshape(-1)
    return {byte for first in at.tolist() for byte in range(first, first + x.element_size())}


def view_of(memory: Tensor, draw: random.Random) -> Tensor:
    memory = draw.choice([memory, memory.view(torch.int16), memory.view(torch.uint8)])
    shape = [draw.choice([0, 1, 2, 2, 3, 4, 5]) for _ in range(draw.choice([1, 2, 2, 3]))]
    strides = [draw.choice([0, 1, 1, 2, 3, 4, 6, 8, 12, 24]) for _ in shape]
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    return memory.as_strided(shape, strides, draw.randrange(min(24, memory.numel() - extent)))


def test_overlap_is_exact() -> None:
    """Against the sets of bytes: strided, interleaved and expanded views of two dtypes and more; and views that are often taken."""
    draw, memory, found = random.Random(0), torch.zeros(400), {True: 0, False: 0}
    for _ in range(1500):
        x, y = view_of(memory, draw), view_of(memory, draw)
        found[overlap(x, y)] += 1
        assert overlap(x, y) == bool(elements(x) & elements(y)), (x.shape, x.stride(), y.shape, y.stride(), y.dtype)
    assert min(found.values()) > 150, found
    z = torch.zeros(64, 100, 130)
    apart = [(z[..., :128], z[..., 128:]), (z[::2], z[1::2]), (z[:, ::2], z[:, 1::2]), (z[..., ::2], z[..., 1::2])]
    apart += [(z, z.clone()), (z, torch.empty(0)), (z.to("meta"), z.to("meta"))]
    for x, y in apart:
        assert not overlap(x, y) and not overlap(y, x)
    for x, y in ((z[:, :-1], z[:, 1:]), (z.transpose(0, 1), z[3, 4:5])):
        assert overlap(x, y) and overlap(y, x)


# ---- logits with `inplace=`

B, T, V, H = 3, 5, 40, 6
IDS = torch.arange(B * T).view(B, T) % V
DISTILLATION = Objective.preset("grpo", beta=0.5, kl=Exact("reverse"))


def gradients(divergence: str, dtype: torch.dtype, how: str, backend: str, own: bool) -> Tensor:
    """In place beside a teacher that is the same tensor under another transform, or a copy of it (`own`)."""
    leaf = torch.randn(B, T, V, generator=torch.Generator().manual_seed(3)).mul(2).to(dtype).requires_grad_()
    logits = leaf * 1.0
    teacher = (logits.detach().clone() if own else logits.detach(), LogitTransform(2.0))
    exact, options = Exact(divergence), {"inplace": True, "options": Options(backend=backend)}
    if how == "divergence":
        token_divergence(logits, teacher, exact, **options).sum().backward()
    else:
        kept = TokenSets.from_lists([[k, k + 3, 39] if k % 2 else [] for k in range(B * T)]) if how == "kept" else None
        batch = TokenBatch(IDS, torch.tensor([1.0, -0.5, 2.0]), kept=kept)
        objective = replace(Objective.preset("gspo" if how == "gspo" else "grpo"), beta=0.5, kl=exact)
        teachers = [(teacher, 0.3), (teacher, 0.7)] if how == "several" else teacher
        grpo_loss(logits, batch, objective, ref_logits=teachers, **options).loss.backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("how", ["one visit", "gspo", "kept", "several", "divergence"])
@pytest.mark.parametrize("divergence", ["reverse", "forward", "jsd"])
def test_the_same_element_may_be_read_where_it_is_written(divergence: str, how: str, backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        shared, own = (gradients(divergence, dtype, how, backend, x) for x in (False, True))
        assert own.any() and same_bits(shared, own), (shared - own).abs().max()


def loss(logits: Tensor, teacher: Any = None, transform: Any = None, normalizer: Any = None, **fields: Any) -> Any:
    batch = TokenBatch(IDS[:, : logits.shape[1]], **{"advantages": torch.ones(B), **fields})
    teacher = torch.zeros(logits.shape) if teacher is None else teacher
    given = {"transform": transform, "normalizer": normalizer, "inplace": True}
    return grpo_loss(logits, batch, DISTILLATION, ref_logits=teacher, **given)


#: What a call in place would overwrite -> the call, on memory [B, T, V + 8] in fp32.
IN_PLACE: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("ref_logits", lambda x: loss(x[:, 1:, :V], x[:, :-1, :V])),
    ("ref_logits[0]", lambda x: loss(x[..., :V], (x[..., 8:], LogitTransform(2.0)))),
    ("ref_logits", lambda x: loss(x.view(torch.bfloat16)[..., :V], x.view(torch.bfloat16)[..., 20 : 20 + V])),
    ("ref_logits[1][0]", lambda x: loss(x[:, 1:, :V], [(x[:, 1:, :V].clone(), 1.0), (x[:, :-1, :V], 1.0)])),
    ("ref_logits[0][1]", lambda x: loss(x[..., :V], [(torch.zeros(B, T, V), x[..., 3])])),
    ("batch.advantages", lambda x: loss(x[..., :V], advantages=x[..., 0])),
    ("batch.old_logps", lambda x: loss(x[..., :V], old_logps=x[..., V - 1])),
    ("transform.temperature", lambda x: loss(x[..., :V], transform=LogitTransform(x[..., 0]))),
    ("normalizer", lambda x: loss(x[..., :V], normalizer=x[0, 0, 0])),
    ("ref_logits", lambda x: token_divergence(x[:, 1:, :V], x[:, :-1, :V], inplace=True)),
    ("mask", lambda x: token_logprobs(x[..., :V], IDS, mask=x.view(torch.bool)[..., 3], inplace=True)),
    ("targets", lambda x: token_logprobs(x.view(torch.bfloat16)[..., 4:V], x.view(torch.int64)[..., 1], inplace=True)),
]  # fmt: skip


@pytest.mark.parametrize("name, make", IN_PLACE, ids=lambda x: x if isinstance(x, str) else "")
def test_in_place_over_what_is_read_is_refused(name: str, make: Callable[[Tensor], Any]) -> None:
    memory = torch.rand(B, T, V + 8) + 0.5
    before = memory.clone()
    with pytest.raises(ValueError, match=f"inplace=True, but logits shares memory with {re.escape(name)}: "):
        make(memory)
    assert same_bits(memory, before)


def test_columns_beside_the_logits_are_free() -> None:
    """As those of a head with one more output, which are never written."""
    x = torch.rand(B, T, V + 8)
    want = loss(x[..., :V].clone(), old_logps=-x[..., V], advantages=x[..., V + 1].clone()).loss
    assert torch.equal(loss(x[..., :V], old_logps=x[..., V].neg_(), advantages=x[..., V + 1]).loss, want)


# ---- `weight_grad=`

#: The call, the memory that it reads and its gradient would be added to, and the name in the message.
WEIGHT_GRAD: list[tuple[str, str, str]] = [
    *((each, name, name) for each in ("loss", "log-probs", "divergence") for name in ("hidden", "weight", "bias")),
    ("loss", "other weight", "reference[1].weight"),
    ("divergence", "other weight", "reference[1].weight"),
    ("divergence", "other hidden", "reference[0]"),
    ("loss", "old", "batch.old_logps"),
]


@pytest.mark.parametrize("each, memory, name", WEIGHT_GRAD)
def test_a_gradient_is_not_added_to_what_is_read(each: str, memory: str, name: str) -> None:
    m = {key: torch.randn(V * H) for key in ("hidden", "weight", "bias", "other hidden", "other weight", "old")}
    before, n = {key: x.clone() for key, x in m.items()}, B * T
    hidden, other_hidden = (m[key][: n * H].view(B, T, H) for key in ("hidden", "other hidden"))
    weight, other = m["weight"].view(V, H).requires_grad_(), (other_hidden, Head(m["other weight"].view(V, H)))
    head, options = Head(weight, m["bias"][:V]), Options(weight_grad=m[memory].view(V, H).detach())
    batch = TokenBatch(IDS, torch.ones(B), old_logps=m["old"][:n].view(B, T))
    with pytest.raises(ValueError, match=f"weight_grad shares memory with {re.escape(name)}: "):
        if each == "loss":
            linear_grpo_loss(hidden, head, batch, DISTILLATION, reference=other, options=options)
        elif each == "log-probs":
            linear_logprobs(hidden, head, IDS, options=options)
        else:
            linear_divergence(hidden, head, other, options=options)
    assert all(same_bits(x.detach(), before[key]) for key, x in m.items())


def test_a_gradient_beside_the_weight_in_one_buffer(backend: str) -> None:
    """As allocators that hold parameters and gradients in one block have them."""
    block, hidden = torch.randn(2, V, H), torch.randn(B * T, H)
    weight, total, expected = block[0].requires_grad_(), block[1].detach(), block[1].detach().clone()
    logps, _ = linear_logprobs(hidden, weight, IDS.view(-1), options=Options(backend=backend))
    (gradient,) = torch.autograd.grad(logps.sum(), weight)
    linear_logprobs(hidden, weight, IDS.view(-1), options=Options(weight_grad=total, backend=backend))[0].sum().backward()
    torch.testing.assert_close(total, expected + gradient)
