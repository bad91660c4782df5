"""Matrix products of bf16 or fp32 tensors with fp32 results, for processors with AVX512_BF16 (csrc/products.cpp).

torch.mm rounds results of bf16 operands to bf16; going through fp32 operands instead takes 2 to 4 times as long. Of fp32 operands
torch.mm (MKL) takes twice as long on AMD, and oneDNN's results are new memory each time."""

from __future__ import annotations

import torch

from . import cpu
from .cpu import _cpu

Tensor = torch.Tensor

OPERANDS = (torch.bfloat16, torch.float32)


def available() -> str | None:
    """None if these products can run, else the reason in words."""
    reason = cpu.available()
    if reason is None and not _cpu.has_products():
        return "this processor has no AVX512_BF16 instructions"
    return reason


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [N, V] fp32 = hidden [N, H] @ weight [V, H]^T + bias [V] fp32. Hidden states and weight are bf16 or fp32, both."""
    (n, h), v = hidden.shape, weight.shape[0]
    _check(hidden, (n, h), weight.dtype)
    _check(weight, (v, h), *OPERANDS)
    _check(out, (n, v), torch.float32)
    if bias is not None:
        assert bias.shape == (v,) and bias.dtype == torch.float32 and bias.is_contiguous(), (bias.shape, bias.dtype)
    _cpu.logits_product(
        _is_bf16(weight), hidden.data_ptr(), hidden.stride(0), weight.data_ptr(), weight.stride(0),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0), n, h, v, torch.get_num_threads(),
    )  # fmt: skip


def d_hidden(gradient: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [N, H] fp32 = gradient [N, V] @ weight [V, H], bf16 or fp32. With a bf16 weight a gradient in fp32 is rounded to bf16
    on the way; with one in fp32 the gradient is fp32."""
    (n, v), h = gradient.shape, weight.shape[1]
    _check(weight, (v, h), *OPERANDS)
    _check(gradient, (n, v), torch.float32, weight.dtype)
    _check(out, (n, h), torch.float32)
    _cpu.d_hidden(
        gradient.data_ptr(), _is_bf16(gradient), gradient.stride(0), weight.data_ptr(), _is_bf16(weight), weight.stride(0),
        out.data_ptr(), out.stride(0), n, h, v, torch.get_num_threads(),
    )  # fmt: skip


def d_weight(gradient: Tensor, hidden: Tensor, start: Tensor | None, out: Tensor) -> None:
    """out [V, H] = start [V, H] fp32 + gradient [N, V]^T @ hidden [N, H], bf16 or fp32, summed in fp32. out is fp32, and may be
    `start`, or bf16, rounded once. Without `start` the sum begins at 0, whatever out holds. The gradient is as in `d_hidden`."""
    (n, v), h = gradient.shape, hidden.shape[1]
    _check(hidden, (n, h), *OPERANDS)
    _check(gradient, (n, v), torch.float32, hidden.dtype)
    _check(out, (v, h), *OPERANDS)
    if start is not None:
        _check(start, (v, h), torch.float32)
    _cpu.d_weight(
        gradient.data_ptr(), _is_bf16(gradient), gradient.stride(0), hidden.data_ptr(), _is_bf16(hidden), hidden.stride(0),
        0 if start is None else start.data_ptr(), 0 if start is None else start.stride(0),
        out.data_ptr(), _is_bf16(out), out.stride(0), n, h, v, torch.get_num_threads(),
    )  # fmt: skip


def _is_bf16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _check(matrix: Tensor, shape: tuple[int, int], *dtypes: torch.dtype) -> None:
    assert matrix.shape == shape and matrix.dtype in dtypes, (matrix.shape, shape, matrix.dtype)
    assert matrix.stride(1) == 1 or shape[1] == 1, matrix.stride()
    assert matrix.device.type == "cpu", matrix.device
