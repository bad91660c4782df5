"""Which results are bitwise reproducible, and which are not.

From logits, on a CPU (eager, C++) and in the Triton kernels: a row's log-prob, entropy and gradient depend on neither the rows
beside it, nor their order and number, nor on the number of threads or multiprocessors; the loss not on the threads. On a GPU:
tests/core/gpu_cases.py, test_runs_are_bitwise_repeatable.

From hidden states: the same call gives the same bits again. With the C++ products (AVX512_BF16, AMX; operands in bf16, or weight in
fp32) log-probs, entropies, the loss and all gradients do not depend on the number of threads, nor those of a row on the other rows
and on how many are taken at a time. All other products are a library's, which may choose another kernel for another number of rows
or threads. These results are compared as numbers, and are not promised to be bitwise equal.

Also not promised: metrics, which are means; a sequence padded to another length, whose sum is divided differently; in Triton,
rows at other strides, where 128-bit accesses become single ones (a slice of the vocabulary)."""

from __future__ import annotations

import math

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
from support.bits import same_bits
from support.inside import in_chunks, our_products
from support.processes import finish, start

Tensor = torch.Tensor
Fields = dict[str, Tensor]
THREADS = (1, 2, 7)
OBJECTIVES = {
    "one pass": Objective.preset("dapo", beta=0.1, entropy_coef=0.01),
    "two passes": Objective.preset("gspo", aggregate="token-mean", beta=0.1),
}


def make_rows(n: int, vocab: int, dtype: torch.dtype = torch.float32, width: int | None = None) -> Fields:
    """Rows of logits or, with `width`, of hidden states, and what a batch says about them."""
    return {
        "rows": torch.randn(n, width or vocab).mul(1.0 if width else 3.0).to(dtype),
        "targets": torch.randint(vocab, (n,)),
        "advantages": torch.randn(n),
        "mask": torch.ones(n, dtype=torch.bool),
        "old": torch.randn(n) - math.log(vocab),
        "ref": torch.randn(n) - math.log(vocab),
    }


def make_batch(fields: Fields, objective: Objective) -> TokenBatch:
    """The rows as one sequence each where the objective looks at sequences."""
    offsets = None if objective.level == "token" else torch.arange(len(fields["targets"]) + 1)
    return TokenBatch(
        fields["targets"], fields["advantages"], mask=fields["mask"], old_logps=fields["old"], ref_logps=fields["ref"],
        cu_seqlens=offsets,
    )  # fmt: skip


def from_logits(fields: Fields, name: str, backend: str) -> dict[str, Tensor]:
    """The loss, and per row: log-prob, entropy and gradient, of the loss and of layer 1."""
    logits = fields["rows"].clone().requires_grad_()
    transform = LogitTransform(temperature=0.7)
    out = grpo_loss(
        logits,
        make_batch(fields, OBJECTIVES[name]),
        OBJECTIVES[name],
        transform=transform,
        normalizer=7.0,
        options=Options(backend=backend),
    )
    (gradient,) = torch.autograd.grad(out.loss, logits)
    logps, entropy = token_logprobs(
        logits, fields["targets"], mask=fields["mask"], transform=transform, entropy=True, options=Options(backend=backend)
    )
    assert entropy is not None
    (other,) = torch.autograd.grad([logps, entropy], logits, [fields["advantages"], fields["old"]])
    rows = {"logps": out.logps, "entropy": out.entropy, "gradient": gradient, "other gradient": other}
    return {"loss": out.loss.detach(), **rows, "logps of layer 1": logps.detach(), "entropy of layer 1": entropy.detach()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: object) -> None:
    for name, value in found.items():
        assert same_bits(value, expected[name]), (name, what)


def rows_of(results: dict[str, Tensor], index: Tensor | slice) -> dict[str, Tensor]:
    return {name: value[index] for name, value in results.items() if value.dim()}


# ---- from logits


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    ("n", "vocab", "dtype"),
    [(13, 61, torch.float32), (13, 5003, torch.bfloat16), (3, 40009, torch.float32), (1, 40009, torch.bfloat16), (40_009, 3, torch.float32)],
    ids=str,
)  # fmt: skip
def test_threads_change_no_bit(n: int, vocab: int, dtype: torch.dtype, name: str, backend: str) -> None:
    """The number of threads changes no bit of a row or of the loss: few long rows and many short ones, which torch divides
    differently."""
    fields = make_rows(n, vocab, dtype)
    torch.set_num_threads(1)
    expected = from_logits(fields, name, backend)
    assert all(x.isfinite().all() and x.any() for x in expected.values())
    for threads in THREADS[1:]:
        torch.set_num_threads(threads)
        assert_same(from_logits(fields, name, backend), expected, threads)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [61, 5003, 40009])
def test_a_row_depends_on_no_other(vocab: int, dtype: torch.dtype, name: str, backend: str) -> None:
    fields = make_rows(9, vocab, dtype)
    torch.set_num_threads(THREADS[2])
    whole = from_logits(fields, name, backend)

    def check(index: Tensor | slice, what: str, **changes: Tensor) -> None:
        found = from_logits({k: v[index] for k, v in (fields | changes).items()}, name, backend)
        assert_same(rows_of(found, slice(None)), rows_of(whole, index), what)

    check(slice(None), "again")
    check(torch.randperm(9), "in another order")
    for index in (slice(0, 1), slice(8, 9), slice(2, 7)):
        check(index, f"in a smaller batch, {index}")
    more = {k: torch.cat([v, v, v]) for k, v in fields.items()}
    assert_same(rows_of(from_logits(more, name, backend), slice(9, 18)), rows_of(whole, slice(None)), "in a larger batch")
    kept = torch.arange(9) % 3 != 1
    poisoned = fields["rows"].clone()
    poisoned[~kept] = math.nan
    found = from_logits(fields | {"mask": kept, "rows": poisoned}, name, backend)
    assert_same(rows_of(found, kept), rows_of(whole, kept), "beside masked rows of NaN")


def test_triton_rows_depend_on_no_other() -> None:
    """The kernels in the interpreter, their fused one on several numbers of multiprocessors."""
    pytest.importorskip("triton")
    finish(start("import interpreted_rows; interpreted_rows.main()", TRITON_INTERPRET="1"))


# ---- from hidden states


def from_hidden(fields: Fields, weight: Tensor, bias: Tensor | None, name: str, backend: str) -> dict[str, Tensor]:
    """What `from_logits` finds, and the gradients of the head."""
    leaves = [x.clone().requires_grad_() for x in (fields["rows"], weight, bias) if x is not None]
    head, options = Head(*leaves[1:]), Options(backend=backend)
    out = linear_grpo_loss(
        leaves[0], head, make_batch(fields, OBJECTIVES[name]), OBJECTIVES[name], normalizer=7.0, options=options
    )
    gradients = torch.autograd.grad(out.loss, leaves)
    logps, entropy = linear_logprobs(leaves[0], head, fields["targets"], mask=fields["mask"], entropy=True, options=options)
    assert entropy is not None
    others = torch.autograd.grad([logps, entropy], leaves, [fields["advantages"], fields["old"]])
    found = {"loss": out.loss.detach(), "logps": out.logps, "entropy": out.entropy, "logps of layer 1": logps.detach()}
    for layer, all_of in (("", gradients), (" of layer 1", others)):
        found |= {f"gradient of {what}{layer}": g for what, g in zip(("hidden", "weight", "bias"), all_of, strict=False)}
    return found


PER_ROW = ("logps", "entropy", "logps of layer 1", "gradient of hidden", "gradient of hidden of layer 1")
SIZES = [(45, 24, 61), (37, 96, 1031)]


def make_head(vocab: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (torch.randn(vocab, width) * 2 * width**-0.5).to(dtype), torch.randn(vocab).to(dtype)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_threads_from_hidden_states(name: str, arithmetic: torch.dtype, backend: str) -> None:
    """Bits where the C++ products make them, and with a library's the same numbers to rounding."""
    with_bias = name == "one pass"
    ours = our_products(arithmetic)
    for n, width, vocab in SIZES:
        fields, (weight, bias) = make_rows(n, vocab, arithmetic, width), make_head(vocab, width, arithmetic)
        torch.set_num_threads(1)
        expected = from_hidden(fields, weight, bias if with_bias else None, name, backend)
        for threads in THREADS[1:]:
            torch.set_num_threads(threads)
            found = from_hidden(fields, weight, bias if with_bias else None, name, backend)
            if ours:
                assert_same({k: v for k, v in found.items() if "bias" not in k}, expected, (n, threads))
            for what, value in found.items():
                tolerance = 1e-5 if value.dtype == torch.float32 else 2 * torch.finfo(value.dtype).eps
                scale = expected[what].abs().max()
                assert scale > 0 and (value - expected[what]).abs().max() <= tolerance * scale, f"{what}, {threads} threads"


@pytest.mark.skipif(not our_products(torch.bfloat16), reason="this processor has no products of ours")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_with_our_products_a_row_depends_on_no_other(
    name: str, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, width, vocab in SIZES:
        fields, head = make_rows(n, vocab, dtype, width), make_head(vocab, width, dtype)
        whole = {k: v for k, v in from_hidden(fields, *head, name, backend).items() if k in PER_ROW}
        for index in (torch.randperm(n), slice(0, 1), slice(n - 1, n), slice(3, 20)):
            found = from_hidden({k: v[index] for k, v in fields.items()}, *head, name, backend)
            assert_same({k: found[k] for k in PER_ROW}, rows_of(whole, index), (n, index))
        kept = torch.arange(n) % 3 != 1
        poisoned = fields["rows"].clone()
        poisoned[~kept] = math.nan
        found = from_hidden(fields | {"mask": kept, "rows": poisoned}, *head, name, backend)
        assert_same({k: found[k][kept] for k in PER_ROW}, rows_of(whole, kept), (n, "beside masked rows of NaN"))
        for rows in (1, 7, 16):
            with monkeypatch.context() as patch:
                in_chunks(patch, rows)
                found = from_hidden(fields, *head, name, backend)
            assert_same({k: found[k] for k in PER_ROW}, whole, (n, f"{rows} rows at a time"))
