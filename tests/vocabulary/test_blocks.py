"""The engine's code for a GPU, run on a CPU with stand-ins for the products: blocks of chunks, their products, their memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from grpo_kernels import Head, Objective, Options, TokenBatch, linear_grpo_loss, linear_logprobs
from grpo_kernels.distributed import VocabShard
from grpo_kernels.rows import backends
from grpo_kernels.rows import products as blocks
from grpo_kernels.rows.backends import eager
from grpo_kernels.rows.partials import LogitRows
from grpo_kernels.rows.products import Plan, Work
from support.bits import assert_no_worse, same_bits
from support.doors import in_options
from support.gpu_products import LiveBytes, NoRows, Product, of_a_gpu

Tensor = torch.Tensor
GIB = 1 << 30
V, H, CHUNK, BLOCK = 71, 16, 64, 128
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QWEN = Work(151936, 4096, apart=True, d_hidden=2, d_weight=2)


# ---- rows of a chunk and of a block


@pytest.mark.parametrize("gathered", [False, True])
def test_the_peak_is_flat_in_the_number_of_rows(gathered: bool) -> None:
    """8192 x 4096 x 151,936 in bf16: at most 3.6 GiB; of any other number of rows as much, but for d_hidden."""
    plan = QWEN.plan("cuda", 8192, gathered)
    assert QWEN.peak(plan, 8192, gathered) <= 3.6 * GIB
    assert plan == ((512, 3072) if gathered else (512, 8192))  # no fp32 sum of d_weight, where there is room without it
    beside = {}
    for rows in (1, 512, 3072, 3073, 8000, 8193, 10**5, 10**7):
        work = QWEN.plan("cuda", rows, gathered)
        assert work.chunk == 512 and work.block % 512 in (0, rows % 512)
        beside[rows] = QWEN.peak(work, rows, gathered) - 2 * 4096 * rows
    assert list(beside.values()) == sorted(beside.values()) and beside[8193] == beside[10**7] < 3.52 * GIB


@pytest.mark.parametrize(("vocab", "width"), [(32000, 2048), (128256, 8192), (151936, 1536), (262144, 2304)])
@pytest.mark.parametrize("d_weight", [0, 2, 4])
def test_one_block_takes_no_more_than_many(d_weight: int, vocab: int, width: int) -> None:
    work = Work(vocab, width, apart=True, d_hidden=2, d_weight=d_weight)
    many = work.plan("cuda", 10**8, gathered=True)
    limit = work.peak(many, 10**8) - 2 * width * 10**8
    assert many.chunk >= 512 and many.block % many.chunk == 0 and many.block >= 1024
    for rows in range(64, 40000, 777):
        plan = work.plan("cuda", rows)
        assert plan.chunk == many.chunk and plan.block >= many.block
        assert work.peak(plan, rows) - 2 * width * rows <= limit
        assert plan.block == many.block or plan.block == rows


def test_where_gradients_lie_in_the_logits_a_block_is_a_chunk() -> None:
    work = QWEN._replace(apart=False)
    for device, size in (("cpu", 160 << 20), ("cuda", 1200 << 20), ("xpu", 1200 << 20)):
        plan = work.plan(device, 10**6)
        assert plan == Plan(plan.chunk, plan.chunk) and plan == work.plan(device, 5)
        assert size - 64 * 4 * 151936 < 4 * 151936 * plan.chunk <= size


def test_sums_of_d_hidden_beside_its_result_are_counted() -> None:
    """On a CPU with AMX: in the rows of a chunk and in the peak of its product."""
    work = QWEN._replace(apart=False, d_weight=0)
    beside = work._replace(parts=3)
    plan, smaller = work.plan("cpu", 0), beside.plan("cpu", 0)
    assert plan.chunk == 256 and smaller.chunk == 192  # 160 MiB / 4 / 151,936 = 276; / (151,936 + 3 * 4096) = 255
    assert beside.peak(smaller, 192) == work.peak(smaller, 192) + 3 * 192 * 4096 * 4
    assert beside._replace(d_hidden=0).peak(smaller, 192) == work._replace(d_hidden=0).peak(smaller, 192)


# ---- memory


def head(rows: int, vocab: int = 151936, width: int = 4096, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, TokenBatch]:
    """A head of meta tensors: large ones need no memory."""
    shapes = ((1, rows, width), (vocab, width))
    hidden, weight = (torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes)
    vector = torch.empty(1, rows, device="meta")
    return hidden, weight, TokenBatch(vector.to(torch.int64), vector, ref_logps=vector)


@pytest.fixture
def no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "pick", lambda *_: NoRows())


@pytest.mark.parametrize("rows", [700, 8192, 8193, 20000])
@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.usefixtures("no_rows")
def test_bytes_that_are_alive_are_those_of_the_model(layer: int, rows: int) -> None:
    """A whole call and its backward, nothing of which waits for the device: without values it would fail."""
    hidden, weight, batch = head(rows)
    with of_a_gpu() as made, LiveBytes() as live:
        if layer == 2:
            linear_grpo_loss(hidden, weight, batch, Objective(beta=0.1)).loss.backward()
        else:
            linear_logprobs(hidden, weight, batch.targets)[0].sum().backward()
    plan = QWEN.plan("cuda", rows, gathered=False)
    blocks_made = -(-rows // plan.block)
    assert len(made) == (3 - layer) * -(-rows // 512) + 2 * blocks_made
    expected = QWEN.peak(plan, rows, gathered=False)
    assert expected <= live.peak <= expected + 100 * rows  # vectors
    assert rows > 8193 or live.peak <= 3.6 * GIB
    assert hidden.grad is not None and weight.grad is not None and weight.grad.dtype == BF16


@pytest.mark.parametrize("rows", [700, 8193])
@pytest.mark.usefixtures("no_rows")
def test_bytes_that_are_alive_in_fp16(rows: int) -> None:
    """d_weight is fp32 until the factor of the backward is known; the last part of the sum is beside it."""
    hidden, weight, batch = head(rows, dtype=FP16)
    with of_a_gpu(), LiveBytes() as live:
        linear_grpo_loss(hidden, weight, batch, Objective(beta=0.1)).loss.backward()
    work = QWEN._replace(d_hidden=4, scaled=True)
    plan = work.plan("cuda", rows, gathered=False)
    expected = work.peak(plan, rows, gathered=False)
    assert expected <= live.peak <= expected + 100 * rows + 2 * 4096 * rows  # vectors; d_hidden as it is handed over
    assert weight.grad is not None and weight.grad.dtype == FP16


@pytest.mark.parametrize("frozen", ["weight", "hidden", "weight_grad"])
@pytest.mark.usefixtures("no_rows")
def test_what_is_not_wanted_takes_no_memory(frozen: str) -> None:
    """Of 6000 rows, of which 5120 have a gradient; with a frozen head it is fp32, and made before its factors are known."""
    hidden, weight, batch = head(6000)
    total = torch.empty(151936, 4096, device="meta") if frozen == "weight_grad" else None
    (hidden if frozen == "hidden" else weight).requires_grad_(frozen == "weight_grad")
    work = QWEN._replace(**{"hidden": {"d_hidden": 0}, "weight": {"d_weight": 0, "d_hidden": 4}}.get(frozen, {"d_weight": 0}))
    index = torch.empty(5120, dtype=torch.int64, device="meta")
    with of_a_gpu() as made, LiveBytes() as live, pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_kernels.losses._split_rows", lambda *_: (index, 5120))
        linear_grpo_loss(hidden, weight, batch, Objective.preset("gspo"), options=Options(weight_grad=total)).loss.backward()
    plan = work.plan("cuda", 5120)
    kinds = {(p.m, p.k, p.n) for p in made if 151936 in (p.m, p.k)}
    assert {151936 == m for m, _, _ in kinds} == {"hidden": {True}, "weight": {False}, "weight_grad": {True, False}}[frozen]
    expected = work.peak(plan, 5120) + work.d_hidden * 4096 * 880
    assert expected <= live.peak <= expected + 100 * 6000
    assert total is None or all(p.added for p in made if p.m == 151936)


# ---- numbers


class Poisoned(eager.Kernels):
    """The eager row kernels, on the layout of a GPU's: logits are read once, and no other memory is used for them or for rows
    of gradients that products have taken."""

    writes_behind_reads = False

    def pull(self, rows: LogitRows, partials: Any, slopes: Any, out: Tensor) -> None:
        super().pull(rows, partials, slopes, out)
        self._after(rows.logits, out)

    def fused(self, rows: LogitRows, stage: Any, out: Tensor | None) -> Any:
        # Not by its own pull, which would poison what is read again.
        found = eager.Kernels().fused(rows, stage, out)
        self._after(rows.logits, out)
        return found

    def _after(self, logits: Tensor, out: Tensor | None) -> None:
        if out is logits or (out is not None and out.data_ptr() == logits.data_ptr()):
            return  # fp16, whose gradients are scaled to fit
        assert out is None or (out.dtype == BF16 and out.stride(1) * 2 % 128 == 0)
        logits.fill_(torch.nan)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 rows, in blocks of 128 where they are several."""
    monkeypatch.setitem(blocks.CHUNK_BYTES, "cpu", 4 * V * CHUNK)
    monkeypatch.setitem(blocks.BLOCK_BYTES, "cpu", 2 * V * BLOCK)
    monkeypatch.setattr(backends, "pick", lambda *_: Poisoned())


Gradients = dict[str, Tensor]


@dataclass
class Rows:
    """Rows of a head: the loss is the mean over trained rows of -advantage * log-prob."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    advantages: Tensor
    mask: Tensor

    def leaves(self, dtype: torch.dtype | None = None) -> Gradients:
        given = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {k: x.detach().clone().to(dtype or x.dtype).requires_grad_() for k, x in given.items() if x is not None}

    def gradients(self, exact: bool) -> Gradients:
        """By autograd: of float64, or of logits in the dtype of the hidden states and a loss in fp32."""
        leaves = self.leaves(torch.float64 if exact else None)
        logits = torch.nn.functional.linear(leaves["hidden"], leaves["weight"], leaves.get("bias"))
        logps = logits.to(torch.float64 if exact else torch.float32).log_softmax(1).gather(1, self.targets[:, None])[:, 0]
        loss = -(logps * self.advantages.to(logps.dtype))[self.mask].sum() / self.mask.sum()
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def rows_of(n: int, bias: bool = False, dtype: torch.dtype = BF16) -> Rows:
    g = torch.Generator().manual_seed(n)
    hidden, weight = torch.randn(n, H, generator=g), 2.0 * H**-0.5 * torch.randn(V, H, generator=g)
    offset = torch.randn(V, generator=g).to(dtype) if bias else None
    targets, advantages = torch.randint(V, (n,), generator=g), torch.randn(n, generator=g)
    return Rows(hidden.to(dtype), weight.to(dtype), offset, targets, advantages, torch.ones(n, dtype=torch.bool))


def run(case: Rows, layer: int = 2, frozen: str = "", factor: float = 1.0, **options: Any) -> Gradients:
    """Leaves with the gradients of the loss times `factor`, from its own function or through log-probs."""
    leaves = case.leaves()
    if frozen:
        leaves[frozen].requires_grad_(False)
    front, options = (leaves["hidden"], Head(leaves["weight"], leaves.get("bias"))), in_options(**options)
    if layer == 2:
        batch = TokenBatch(case.targets, case.advantages, mask=case.mask)
        loss = linear_grpo_loss(*front, batch, Objective.preset("reinforce"), **options).loss
    else:
        logps, _ = linear_logprobs(*front, case.targets, mask=case.mask, **options)
        loss = -(logps * case.advantages * case.mask).sum() / case.mask.sum()
    (loss * factor).backward()
    return {name: leaf for name, leaf in leaves.items() if name != frozen}


def gradients_of(leaves: Gradients) -> Gradients:
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert found.keys() == leaves.keys() and all(x.dtype == leaves[name].dtype for name, x in found.items())
    return found


def assert_gradients_no_worse(ours: Gradients, naive: Gradients, exact: Gradients, tiny: float = 4e-6) -> None:
    """The rule of `assert_no_worse`. Where both round the gradient of the logits to bf16, which of the two has the larger
    error is chance, so those get a margin."""
    assert ours.keys() == exact.keys()
    for name, gradient in ours.items():
        if ours["hidden"].dtype == torch.float32:
            assert_no_worse(gradient, naive[name], exact[name], f"gradient of {name}", tiny)
            continue
        assert torch.isfinite(gradient).all(), name
        scale = float(exact[name].abs().max())
        assert scale > 0, f"gradient of {name}: the case is trivial"
        mine, theirs = ((x[name].double() - exact[name]).abs() for x in (ours, naive))
        for kind, a, b, factor in (
            ("largest", mine.max(), theirs.max(), 2.0),
            ("rms", mine.square().mean().sqrt(), theirs.square().mean().sqrt(), 1.1),
        ):
            assert float(a) <= factor * float(b) + tiny * scale, (
                f"gradient of {name}: {kind} error {float(a):.3e}, naive {float(b):.3e}, scale {scale:.3e}"
            )


def expected_products(n: int, block: int, gradients: tuple[str, ...] = ("hidden", "weight")) -> list[Product]:
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


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("n", "block"), [(150, 150), (300, 128)], ids=["one block", "three blocks"])
@pytest.mark.usefixtures("small")
def test_products_and_gradients(n: int, block: int, bias: bool) -> None:
    case = rows_of(n, bias)
    exact, naive = case.gradients(exact=True), case.gradients(exact=False)
    with of_a_gpu() as made:
        found = gradients_of(run(case))
    assert made == expected_products(n, block)
    assert_gradients_no_worse(found, naive, exact)
    with of_a_gpu() as made:
        again = gradients_of(run(case, layer=1))
    assert made == [p for p in expected_products(n, n) if p.n == V] + expected_products(n, block)
    assert_gradients_no_worse(again, naive, exact)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("n", [150, 300], ids=["one block", "three blocks"])
@pytest.mark.parametrize("size", [1e-11, 1.0, 1e7])
@pytest.mark.usefixtures("small")
def test_gradients_that_fp16_has_no_room_for(size: float, n: int, bias: bool) -> None:
    """Too small or too large for it before the factor of the backward; rows of very different slopes, and of none. In the same
    products as bf16, but that d_weight is fp32, in parts."""
    case = rows_of(n, bias, FP16)
    advantages = case.advantages
    advantages *= size * n
    advantages[::7] *= 2.0**-30
    advantages[3] = 0.0
    exact = case.gradients(exact=True)
    for layer in (1, 2):
        with of_a_gpu() as made, pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "WEIGHT_BLOCK_BYTES", 4 * H * 40)
            found = gradients_of(run(case, layer, factor=1 / size))
        assert {p.dtype for p in made} == {FP32} and not any(p.added for p in made)
        kept = n - 1  # rows that have a gradient
        assert [p.m for p in made if p.n == H and p.k != V] == [40, 31] * -(-kept // (n if n < 200 else BLOCK))
        for name, gradient in found.items():
            assert (gradient.double() * size - exact[name]).norm() < 5e-4 * exact[name].norm(), (name, layer)
        rows = (found["hidden"].double() * size - exact["hidden"]).norm(dim=1) / exact["hidden"].norm(dim=1)
        assert rows[advantages != 0].median() < 5e-4 and not found["hidden"][3].any()


@pytest.mark.usefixtures("small")
def test_a_gradient_of_fp16_that_is_not_finite_stays_so() -> None:
    case = rows_of(150, dtype=FP16)
    case.advantages[5] = torch.inf
    with of_a_gpu():
        found = gradients_of(run(case))
    assert not found["weight"].isfinite().any() and not found["hidden"][5].isfinite().any()
    assert found["hidden"][:5].isfinite().all() and found["hidden"][6:].isfinite().all()


@pytest.mark.usefixtures("small")
def test_a_torch_whose_addmm_takes_no_fp32_sum() -> None:
    """torch 2.9: the same numbers, a few rows of the weight at a time."""
    case, found = rows_of(300), {}
    for adds in (True, False):
        with of_a_gpu(adds) as made, pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "WEIGHT_BLOCK_BYTES", 4 * H * 30)
            found[adds] = gradients_of(run(case))
        assert any(p.added for p in made) == adds
    assert [p.m for p in made if p.k == 128 and p.n == H] == [V, 30, 30, 11]
    assert all(same_bits(found[True][name], found[False][name]) for name in ("hidden", "weight"))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.usefixtures("small")
def test_a_frozen_part_takes_no_product(frozen: str) -> None:
    case = rows_of(300)
    with of_a_gpu():
        both = gradients_of(run(case))
    with of_a_gpu() as made:
        found = gradients_of(run(case, frozen=frozen))
    (other,) = found
    assert made == expected_products(300, 128, (other,))
    assert same_bits(found[other], both[other])


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.usefixtures("small")
def test_memory_of_the_callers_is_added_to(layer: int) -> None:
    """By every product where the factor of the backward is known; else by what they have made, in fp32."""
    case = rows_of(300)
    with of_a_gpu():
        expected = gradients_of(run(case, layer))["weight"]
    memory = torch.randn(V, H + 8)
    total, start = memory[:, :H], memory.clone()
    with of_a_gpu() as made:
        leaves = run(case, layer, weight_grad=total)
    of_weight = [p for p in made if p.m == V]
    assert [p.added for p in of_weight] == [layer == 1, True, True] and all(p.dtype == FP32 for p in of_weight)
    assert leaves["weight"].grad is None and same_bits(memory[:, H:], start[:, H:])
    torch.testing.assert_close((total - start[:, :H]).to(BF16), expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.usefixtures("small")
def test_rows_without_a_gradient_are_in_no_product_of_it(layer: int) -> None:
    """Masked rows in none at all; rows of no advantage in that of the logits."""
    case = rows_of(300)
    case.mask = torch.arange(300) % 5 != 0
    case.advantages[torch.arange(300) % 3 == 0] = 0.0
    exact, naive = case.gradients(exact=True), case.gradients(exact=False)
    with of_a_gpu() as made:
        found = gradients_of(run(case, layer))
    assert_gradients_no_worse(found, naive, exact)
    logits, of_hidden, of_weight = ([p for p in made if V == x(p)] for x in (lambda p: p.n, lambda p: p.k, lambda p: p.m))
    assert sum(p.m for p in logits) == (240 if layer == 2 else 400)
    assert sum(p.m for p in of_hidden) == sum(p.k for p in of_weight) == 160
    assert not found["hidden"][~case.mask].any()


@pytest.mark.usefixtures("small")
def test_fp32_parameters_under_autocast_get_a_sum_that_is_not_rounded() -> None:
    case = rows_of(150, dtype=FP32)
    exact = case.gradients(exact=True)
    with of_a_gpu() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_kernels.streams.compute_dtype", lambda hidden: BF16)
        found = gradients_of(run(case))
    assert {p.dtype for p in made} == {FP32} and [p.m for p in made] == [64, 64, 22, 150, V]
    for name, gradient in found.items():
        assert (gradient - exact[name]).norm() < 6e-3 * exact[name].norm()


@pytest.mark.usefixtures("small")
def test_a_part_of_the_vocabulary_whose_last_columns_are_padding() -> None:
    """Chunks are those of the whole vocabulary; padding is no id, and its gradient is 0."""
    case = rows_of(300)
    case.targets %= V - 7
    whole = replace(case, weight=case.weight[:-7])
    exact, naive = whole.gradients(exact=True), whole.gradients(exact=False)
    with of_a_gpu() as made:
        found = gradients_of(run(case, shard=VocabShard(0, V - 7)))
    assert {p.m for p in made if p.k == H} == {CHUNK, 300 % CHUNK}
    assert not found["weight"][-7:].any()
    found["weight"] = found["weight"][:-7]
    assert_gradients_no_worse(found, naive, exact)
