"""Checks on a GPU at real sizes, against float64: large vocabularies, offsets beyond 2^31, 16-bit products.

    GRPO_KERNELS_TEST_DEVICE=cuda GRPO_KERNELS_TEST_BACKENDS=triton python -m pytest -p support.on_device tests/core/gpu_cases.py

On a CPU the same cases run small, with a stand-in for the products: as compiled for a GPU by test_triton_compiled.py, and in
Triton's interpreter as a rehearsal, so that time on a GPU is not spent on typos. Run by benchmarks/gpu_kit.py."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_kernels import LossOutput, Objective, TokenBatch, grpo_loss, token_logprobs
from grpo_kernels.distributed import VocabShard
from grpo_kernels.vocabulary.products import HalfProducts, Products, TensorCoreProducts
from support import oracle
from support.cases import OBJECTIVES, Case, around, assert_no_worse, build, run, same_bits
from support.gpu_products import of_a_gpu
from support.linear_cases import build_linear, in_chunks, run_linear

Tensor = torch.Tensor
ON_GPU = torch.zeros(()).device.type == "cuda"
VOCABULARIES = (151936, 262144, 129921) if ON_GPU else (1040, 1031)
# The interpreter truncates where a GPU rounds to bf16.
DTYPES = (torch.float32, torch.bfloat16) if ON_GPU else (torch.float32,)
WIDTH = 1024 if ON_GPU else 24


def run_inplace(case: Case, objective: Objective, backend: str) -> tuple[LossOutput, Tensor]:
    leaf = case.logits.detach().clone().requires_grad_()
    logits = leaf * 1.0
    out = grpo_loss(
        logits, case.batch(), objective, transform=case.logit_transform(), inplace=True, backend=backend
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    return out, gradient


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


# ---- from logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives(name: str, vocab: int, dtype: torch.dtype, backend: str) -> None:
    """Masked rows, rows of zero advantage, an aligned and an odd vocabulary, a new gradient and one in place."""
    make, spec = OBJECTIVES[name]
    case = build(dtype, vocab=vocab)
    expected, gradient = case.expected(spec)
    naive, naive_gradient = case.naive(spec)
    out, ours = run(case, make(), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_no_worse(out.logps.reshape(-1), naive.logps, expected.logps, "logps")
    assert_no_worse(out.entropy.reshape(-1), naive.entropy, expected.entropy, "entropy")
    assert_no_worse(ours, naive_gradient, gradient, "gradient")
    inplace, overwritten = run_inplace(case, make(), backend)
    assert same_bits(inplace.loss, out.loss) and same_bits(overwritten, ours)


def hide_half(logits: Tensor, targets: Tensor) -> None:
    kept = logits.gather(-1, targets[..., None])
    logits[..., ::2] = -math.inf
    logits.scatter_(-1, targets[..., None], kept)


EXTREMES: dict[str, tuple[Callable[[Tensor, Tensor], Any], dict[str, Any]]] = {
    "shifted up": (lambda x, _: x.add_(1e4), {}),
    "shifted down": (lambda x, _: x.sub_(1e4), {}),
    "half of them -inf": (hide_half, {}),
    "confident": (lambda x, targets: x.scatter_(-1, targets[..., None], 40.0), {}),
    "flat": (lambda x, _: x.fill_(1.5), {}),
    "softcapped": (lambda x, _: x.mul_(10), {"temperature": 0.7, "softcap": 15.0, "scale": 0.8}),
    "mirrored": (lambda x, _: x, {"temperature": 1.3, "scale": -1.1}),
}


@pytest.mark.parametrize("vocab", VOCABULARIES[:1])
@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_logits(kind: str, vocab: int, backend: str) -> None:
    bend, transform = EXTREMES[kind]
    g = torch.Generator().manual_seed(3)
    case = around(3.0 * torch.randn(8, 7, vocab, generator=g), g, transform)

    def logps() -> Tensor:
        return oracle.log_probs(case.logits.double(), case.targets, oracle.Transform(**transform))[1].view(case.targets.shape)

    before = logps()
    bend(case.logits, case.targets)
    for field in ("old_logps", "ref_logps"):  # the ratios stay those of the case
        case.fields[field] = (case.fields[field] + logps() - before).float()
    for name in ("dapo, k3", "grpo, k3 and entropy", "gspo"):
        make, spec = OBJECTIVES[name]
        expected, gradient = case.expected(spec)
        naive, naive_gradient = case.naive(spec)
        out, ours = run(case, make(), backend)
        assert_no_worse(out.loss, naive.loss, expected.loss, f"{name}: loss", tiny=2e-5)
        assert_no_worse(ours, naive_gradient, gradient, f"{name}: gradient", tiny=2e-5)


@pytest.mark.parametrize("inplace", [False, True])
def test_offsets_beyond_32_bits(inplace: bool, backend: str, record_property: Callable[[str, object], None]) -> None:
    """More than 2^31 logits, every row of their gradient compared."""
    n, vocab = (14_400, 151_936) if ON_GPU else (48, 1040)
    source = torch.empty(n, vocab, dtype=torch.bfloat16).normal_(std=2.0)
    targets = torch.randint(vocab, (n,))
    fields = {"advantages": torch.randn(n), "ref_logps": torch.randn(n) - math.log(vocab) - 2.0}
    leaf = source.clone().requires_grad_()
    batch = TokenBatch(targets, **fields)
    out = grpo_loss(leaf * 1.0, batch, Objective.preset("dapo", beta=0.04), inplace=inplace, backend=backend)
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    assert (source.numel() > 2**31) == ON_GPU
    total, worst = 0.0, 0.0
    for lo in range(0, n, 240):
        part = slice(lo, lo + 240)
        exact, d_logits = oracle.loss(
            oracle.Spec(eps_high=0.28, beta=0.04), source[part], targets[part], normalizer=n,
            **{name: value[part] for name, value in fields.items()},
        )  # fmt: skip
        total += float(exact.loss)
        worst = max(worst, relative(gradient[part], d_logits))
        torch.testing.assert_close(out.logps[part].double(), exact.logps, rtol=1e-6, atol=5e-6)
    record_property("gradient error", worst)
    assert worst < 6e-3 and abs(out.loss.item() - total) < 1e-5 * (1 + abs(total))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_log_probs(vocab: int, dtype: torch.dtype, backend: str) -> None:
    """Layer 1, an upstream gradient for every log-prob and entropy."""
    logits, targets = (3.0 * torch.randn(32, vocab)).to(dtype), torch.randint(vocab, (32,))
    slopes = torch.randn(32), torch.randn(32)

    def outputs(leaf: Tensor) -> tuple[Tensor, Tensor]:
        return oracle.log_probs(leaf, targets)[1:]

    found = []
    for kind in (torch.float64, torch.float32):
        leaf = (logits.double() if kind == torch.float64 else logits.clone()).requires_grad_()
        logps, entropy = outputs(leaf.to(kind))
        (gradient,) = torch.autograd.grad((logps, entropy), leaf, tuple(s.to(kind) for s in slopes))
        found.append((logps, entropy, gradient))
    leaf = logits.clone().requires_grad_()
    logps, entropy = token_logprobs(leaf, targets, entropy=True, backend=backend)
    assert entropy is not None
    (gradient,) = torch.autograd.grad((logps, entropy), leaf, slopes)
    names = ("logps", "entropy", "gradient")
    for ours, naive, exact, what in zip((logps, entropy, gradient), found[1], found[0], names, strict=True):
        assert_no_worse(ours, naive, exact, what)


# ---- from hidden states


@pytest.fixture
def sixteen_bit_products() -> Iterator[None]:
    with contextlib.nullcontext() if ON_GPU else of_a_gpu():
        yield


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda w: w,
    "transposed": lambda w: w.t().contiguous().t(),
    "columns of a wider one": lambda w: torch.cat([w, w[:, :3]], 1)[:, : w.shape[1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(192, 151936, 1024) if ON_GPU else (12, 96, 8), (5, 1031, 33), (1, 7, 3)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "kind, dtype",
    [
        (TensorCoreProducts, torch.bfloat16),
        (HalfProducts, torch.float16),
        (Products, torch.float32),
        (Products, torch.bfloat16),
    ],
    ids=["bf16", "fp16", "fp32", "bf16 through fp32"],
)
@pytest.mark.usefixtures("sixteen_bit_products")
def test_products(
    kind: type[Products], dtype: torch.dtype, bias: bool, shape: tuple[int, int, int], layout: str,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    rows, vocab, width = shape
    weight = LAYOUTS[layout]((torch.randn(vocab, width) / width**0.5).to(dtype))
    offset = torch.randn(vocab).to(dtype) if bias else None
    products = kind(weight, offset)
    hidden = torch.randn(rows, width).to(products.dtype)
    exact = hidden.double() @ weight.double().t() + (0 if offset is None else offset.double())
    logits = products.logits(hidden)
    assert logits.dtype == torch.float32 and logits.shape == (rows, vocab)
    found = {"logits": relative(logits, exact)}
    block = products.gradient_rows(rows)
    d_logits = products.gradient_buffer(logits, True) if block is None or kind is HalfProducts else block
    given = d_logits.copy_(1e-9 * torch.randn(rows, vocab)).double()
    d_logits = d_logits if block is None else products.keep(d_logits, block, 0)
    found["d_hidden"] = relative(products.d_hidden(d_logits), given @ weight.double())
    d_weight = given.t() @ hidden.double()
    found["d_weight"] = relative(products.add_d_weight(None, d_logits, hidden, last=True), d_weight)
    total = products.add_d_weight(None, d_logits, hidden, last=False)
    total = products.add_d_weight(total, d_logits, hidden, last=True)
    assert total.dtype == torch.float32
    found["sum of d_weight"] = relative(total, 2 * d_weight)
    for name, error in found.items():
        record_property(name, error)
    summed = 5e-5  # fp32, one number after the other
    stored = 4e-3 if kind is TensorCoreProducts else summed  # d_weight of one block is bf16 there
    limits = {"logits": 1e-5, "d_hidden": summed, "d_weight": stored, "sum of d_weight": summed}
    if kind is HalfProducts:  # the gradients of rows are rounded on their way into the products
        limits |= dict.fromkeys(("d_hidden", "d_weight", "sum of d_weight"), 5e-4)
    assert all(error < limits[name] for name, error in found.items()), found


@pytest.mark.parametrize("rows", [16, 64], ids=["two blocks of two chunks", "one chunk"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dapo", "dapo, k3", "grpo, k3 and entropy", "gspo", "cispo"])
def test_from_hidden_states(
    name: str, dtype: torch.dtype, rows: int, backend: str, monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    """Log-probs as exact as fp32 is, whatever the operands; gradients within the rounding of their dtype."""
    make, spec = OBJECTIVES[name]
    case = build_linear(dtype, vocab=VOCABULARIES[0], width=WIDTH)
    in_chunks(monkeypatch, rows, max(32, rows))
    expected, exact = case.expected(spec)
    out, ours = run_linear(case, make(), backend)
    error = float((out.logps.reshape(-1).double() - expected.logps).abs().max())
    gradients = {key: relative(gradient, exact[key]) for key, gradient in ours.items()}
    for key, value in {"logps": error, **gradients}.items():
        record_property(key, value)
    limit = {torch.float32: 5e-5, torch.bfloat16: 6e-3, torch.float16: 2e-3}[dtype]
    assert error < 1e-5 and all(value < limit for value in gradients.values()), (error, gradients)
    assert abs(out.loss.item() - expected.loss.item()) < 1e-5 * (1 + abs(expected.loss.item()))


# ---- over kept sets


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["dapo, k3", "grpo, k3 and entropy", "gspo"])
def test_logits_over_sets(name: str, dtype: torch.dtype, backend: str) -> None:
    """Rows with one id, with a few, with all, and rows without a set, of which one call has all."""
    make, spec = OBJECTIVES[name]
    case = build(dtype, vocab=VOCABULARIES[0], kept=True)
    expected, gradient = case.expected(spec)
    naive, naive_gradient = case.naive(spec)
    out, ours = run(case, make(), backend)
    assert_no_worse(out.loss, naive.loss, expected.loss, "loss")
    assert_no_worse(out.logps.reshape(-1), naive.logps, expected.logps, "logps")
    assert_no_worse(ours, naive_gradient, gradient, "gradient")
    assert case.keep is not None and (ours[~case.keep] == 0).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dapo, k3", "grpo, k3 and entropy", "gspo"])
def test_hidden_states_over_sets(
    name: str, dtype: torch.dtype, backend: str, record_property: Callable[[str, object], None]
) -> None:  # fmt: skip
    """The sparse products beside those of rows that run over the whole vocabulary; the same bits again."""
    make, spec = OBJECTIVES[name]
    case = build_linear(dtype, vocab=VOCABULARIES[0], width=WIDTH, kept=True)
    expected, exact = case.expected(spec)
    out, ours = run_linear(case, make(), backend)
    error = float((out.logps.reshape(-1).double() - expected.logps).abs().max())
    gradients = {key: relative(gradient, exact[key]) for key, gradient in ours.items()}
    for key, value in {"logps": error, **gradients}.items():
        record_property(key, value)
    limit = {torch.float32: 5e-5, torch.bfloat16: 6e-3, torch.float16: 2e-3}[dtype]
    assert error < 1e-5 and all(value < limit for value in gradients.values()), (error, gradients)
    again, more = run_linear(case, make(), backend)
    assert same_bits(again.loss, out.loss) and all(same_bits(more[key], ours[key]) for key in ours)


# ---- the same bits again


@pytest.mark.parametrize("name", ["dapo, k3", "gspo"])
def test_runs_are_bitwise_repeatable(name: str, backend: str) -> None:
    make, case = OBJECTIVES[name][0], build(DTYPES[-1], vocab=VOCABULARIES[0])
    times = 9 if ON_GPU else 1  # several rows for each program
    wide = Case(case.logits.repeat(1, times, 1), {k: v.repeat(1, times) if v.dim() == 2 else v for k, v in case.fields.items()})
    runs = [run_inplace(wide, make(), backend) for _ in range(3)]
    alone, gradient = run(
        replace(wide, logits=wide.logits[:1], fields={k: v[:1] for k, v in wide.fields.items()}), make(), backend
    )
    for out, again in runs[1:]:
        assert same_bits(out.loss, runs[0][0].loss) and same_bits(again, runs[0][1])
    assert same_bits(alone.logps, runs[0][0].logps[:1]) and gradient.isfinite().all()
    linear = build_linear(DTYPES[-1], vocab=VOCABULARIES[0], width=WIDTH)
    first, second = (run_linear(linear, make(), backend) for _ in range(2))
    assert same_bits(first[0].loss, second[0].loss) and all(same_bits(first[1][k], second[1][k]) for k in first[1])


# ---- what else runs the same kernels


@pytest.mark.parametrize("name", ["dapo, k3", "gspo"])
def test_compiled(name: str, backend: str) -> None:
    """The operators in a graph of torch.compile, their backward included."""
    case, objective = build(vocab=VOCABULARIES[0]), OBJECTIVES[name][0]()

    def loss(logits: Tensor, batch: TokenBatch) -> Tensor:
        return 0.5 * grpo_loss(2.0 * logits, batch, objective, backend=backend).loss

    results = []
    for run_it in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf, batch = case.logits.clone().requires_grad_(), case.batch()
        with contextlib.ExitStack() as stack:
            if torch.overrides._get_current_function_mode() is not None:  # of the plugin: no part of what is compiled
                stack.enter_context(torch.overrides._pop_mode_temporarily())
            value = run_it(leaf, batch)
            (gradient,) = torch.autograd.grad(value, leaf)
        results.append((value.detach(), gradient))
    # A graph visits a row twice where the other kernel does so once: its log-probs are rounded in other places.
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-9)


def test_one_rank_of_a_group(backend: str) -> None:
    """A shard that is the whole vocabulary, and sequences that one rank shares with nobody, over NCCL on a GPU."""
    import torch.distributed as dist

    dist.init_process_group("nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        case, objective = build(vocab=VOCABULARIES[1]), Objective.preset("gspo", beta=0.1)
        shard = VocabShard.of(case.logits, vocab=VOCABULARIES[1], dim=-1)
        results = []
        for batch, options in ((case.batch(), {}), (case.batch(context_group=dist.group.WORLD), {"shard": shard})):
            leaf = case.logits.clone().requires_grad_()
            out = grpo_loss(leaf, batch, objective, backend=backend, **options)
            (gradient,) = torch.autograd.grad(out.loss, leaf)
            results.append((out.loss.detach(), gradient))
        torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-9)
    finally:
        dist.destroy_process_group()
