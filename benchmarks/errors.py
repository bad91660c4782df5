"""The error of a result against float64."""

from __future__ import annotations

import torch

from benchmarks.cases import Result

Tensor = torch.Tensor


@torch.no_grad()
def errors(found: Result, expected: Result, scale: float = 1.0) -> dict[str, float]:
    """The error of the loss is divided by `scale`. Of log-probs and entropies it is the largest absolute error. Of a
    gradient it is the relative error in the Euclidean norm, of all rows and of the worst row; of a model's gradients, that
    of the worst parameter."""
    if found.keys() != expected.keys():
        raise ValueError(f"it returned {sorted(found)}, but the contract asks for {sorted(expected)}")
    off: dict[str, float] = {}
    for name, x in expected.items():
        if name == "loss":
            off[name] = float((found[name].float() - x).abs()) / scale
        elif name == "gradients":
            off[name] = _largest([_relative(y, z)[0] for y, z in zip(found[name], x, strict=True)])
        elif name.startswith("d_"):
            off[name], off[f"{name}, worst row"] = _relative(found[name], x)
        else:
            off[name] = float((found[name].reshape(x.shape).float() - x).abs().max())
    return off


def _largest(values: list[float]) -> float:
    """NaN if one of them is."""
    return float(torch.tensor(values).max())


def _relative(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Relative errors of all rows together, and of the worst row. A row's norm counts as at least a fifth of the root mean
    square of all rows: if the gradient of a row nearly vanishes, its relative error is only rounding."""
    pairs = zip(found.reshape(expected.shape).split(512), expected.split(512), strict=True)  # 512: no copies of everything
    norms = [((x.float() - y).norm(dim=-1).flatten(), y.norm(dim=-1).flatten()) for x, y in pairs]
    off, size = (torch.cat(parts) for parts in zip(*norms, strict=True))
    usual = size.norm() / size.count_nonzero().clamp(min=1) ** 0.5
    return float(off.norm() / size.norm()), float((off / size.clamp(min=0.2 * usual)).max())
