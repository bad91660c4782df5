"""Matrix products of bf16 tensors with fp32 results, for processors with AVX512_BF16 (csrc/products.cpp).

torch.mm rounds such results to bf16; going through fp32 operands instead takes 2 to 4 times as long."""

from __future__ import annotations

import torch

from . import cpu
from .cpu import _cpu

Tensor = torch.Tensor


def available() -> str | None:
    """None if these products can run, else the reason in words."""
    reason = cpu.available()
    if reason is None and not _cpu.has_products():
        return "this processor has no AVX512_BF16 instructions"
    return reason


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [N, V] fp32 = hidden [N, H] bf16 @ weight [V, H]^T bf16 + bias [V] fp32."""
    (n, h), v = hidden.shape, weight.shape[0]
    _check(hidden, (n, h), torch.bfloat16)
    _check(weight, (v, h), torch.bfloat16)
    _check(out, (n, v), torch.float32)
    if bias is not None:
        assert bias.shape == (v,) and bias.dtype == torch.float32 and bias.is_contiguous(), (bias.shape, bias.dtype)
    _cpu.logits_product(
        hidden.data_ptr(), hidden.stride(0), weight.data_ptr(), weight.stride(0), 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), out.stride(0), n, h, v, torch.get_num_threads(),
    )  # fmt: skip


def d_hidden(gradient: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [N, H] fp32 = gradient [N, V] @ weight [V, H] bf16. A gradient in fp32 is rounded to bf16 on the way."""
    (n, v), h = gradient.shape, weight.shape[1]
    _check(gradient, (n, v), torch.float32, torch.bfloat16)
    _check(weight, (v, h), torch.bfloat16)
    _check(out, (n, h), torch.float32)
    _cpu.d_hidden(
        gradient.data_ptr(), gradient.dtype == torch.bfloat16, gradient.stride(0), weight.data_ptr(), weight.stride(0),
        out.data_ptr(), out.stride(0), n, h, v, torch.get_num_threads(),
    )  # fmt: skip


def add_d_weight(gradient: Tensor, hidden: Tensor, sum: Tensor, *, first: bool) -> None:
    """sum [V, H] fp32 += gradient [N, V]^T @ hidden [N, H] bf16; with `first` it is overwritten, whatever it holds."""
    (n, v), h = gradient.shape, hidden.shape[1]
    _check(gradient, (n, v), torch.float32, torch.bfloat16)
    _check(hidden, (n, h), torch.bfloat16)
    _check(sum, (v, h), torch.float32)
    _cpu.add_d_weight(
        gradient.data_ptr(), gradient.dtype == torch.bfloat16, gradient.stride(0), hidden.data_ptr(), hidden.stride(0),
        sum.data_ptr(), sum.stride(0), first, n, h, v, torch.get_num_threads(),
    )  # fmt: skip


def _check(matrix: Tensor, shape: tuple[int, int], *dtypes: torch.dtype) -> None:
    assert matrix.shape == shape and matrix.dtype in dtypes, (matrix.shape, shape, matrix.dtype)
    assert matrix.stride(1) == 1 or shape[1] == 1, matrix.stride()
    assert matrix.device.type == "cpu", matrix.device
