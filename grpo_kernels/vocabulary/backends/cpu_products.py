"""Matrix products of bf16 or fp32 tensors with fp32 results, for processors with AVX512_BF16 (csrc/products.cpp).

torch.mm rounds results of bf16 operands to bf16; going through fp32 operands instead takes 2 to 4 times as long. Of fp32 operands
torch.mm (MKL) takes twice as long on AMD, and oneDNN's results are new memory each time."""

from __future__ import annotations

import torch

from . import cpu
from .cpu_module import _cpu, matrix, vector

Tensor = torch.Tensor

OPERANDS, SINGLE = (torch.bfloat16, torch.float32), (torch.float32,)


def available() -> str | None:
    """None if these products can run, else the reason in words."""
    reason = cpu.available()
    if reason is None and not _cpu.has_products():
        return "this processor has no AVX512_BF16 instructions"
    return reason


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [N, V] fp32 = hidden [N, H] @ weight [V, H]^T + bias [V] fp32. Hidden states and weight are bf16 or fp32, both."""
    (n, h), v = hidden.shape, weight.shape[0]
    of_weight, is_bf16, weight_stride = _operand("weight", weight, (v, h), OPERANDS)
    of_hidden, _, hidden_stride = _operand("hidden", hidden, (n, h), (weight.dtype,))
    of_out, _, out_stride = _operand("out", out, (n, v), SINGLE)
    _cpu.logits_product(
        is_bf16, of_hidden, hidden_stride, of_weight, weight_stride, vector("bias", bias, torch.float32, v), of_out, out_stride,
        n, h, v, torch.get_num_threads(),
    )  # fmt: skip


def d_hidden(gradient: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [N, H] fp32 = gradient [N, V] @ weight [V, H], bf16 or fp32. With a bf16 weight a gradient in fp32 is rounded to bf16
    on the way; with one in fp32 the gradient is fp32."""
    (n, v), h = gradient.shape, weight.shape[1]
    of_weight = _operand("weight", weight, (v, h), OPERANDS)
    of_gradient = _operand("gradient", gradient, (n, v), (torch.float32, weight.dtype))
    of_out, _, out_stride = _operand("out", out, (n, h), SINGLE)
    _cpu.d_hidden(*of_gradient, *of_weight, of_out, out_stride, n, h, v, torch.get_num_threads())


def d_weight(gradient: Tensor, hidden: Tensor, start: Tensor | None, out: Tensor) -> None:
    """out [V, H] = start [V, H] fp32 + gradient [N, V]^T @ hidden [N, H], bf16 or fp32, summed in fp32. out is fp32, and may be
    `start`, or bf16, rounded once. Without `start` the sum begins at 0, whatever out holds. The gradient is as in `d_hidden`."""
    (n, v), h = gradient.shape, hidden.shape[1]
    of_hidden = _operand("hidden", hidden, (n, h), OPERANDS)
    of_gradient = _operand("gradient", gradient, (n, v), (torch.float32, hidden.dtype))
    of_out = _operand("out", out, (v, h), OPERANDS)
    of_start, _, start_stride = (0, False, 0) if start is None else _operand("start", start, (v, h), SINGLE)
    _cpu.d_weight(*of_gradient, *of_hidden, of_start, start_stride, *of_out, n, h, v, torch.get_num_threads())


def _operand(name: str, x: Tensor, shape: tuple[int, int], dtypes: tuple[torch.dtype, ...]) -> tuple[int, bool, int]:
    """Address, whether it is bf16, and stride of rows."""
    address, _, stride = matrix(name, x, shape, dtypes)
    return address, x.dtype == torch.bfloat16, stride
