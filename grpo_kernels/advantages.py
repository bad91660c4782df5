"""Rewards to advantages: normalisation within groups of completions of the same prompt."""

from __future__ import annotations

import math

import torch

from .checks import require

Tensor = torch.Tensor

SCALES = ("group", "batch", "none")


def group_advantages(
    rewards: Tensor,
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    scale: str = "group",
    unbiased: bool = True,
    eps: float = 1e-4,
) -> Tensor:
    """A = (reward - mean of its group) / (std + eps), computed in fp64, returned as fp32 [B].

    rewards      float or integer [B], finite.
    group_size   G: consecutive runs of G rewards share a prompt; must divide B. Or
    groups       integer [B]: rewards with equal ids share a prompt (any sizes, any order).
    scale        "group": std of the group (GRPO, arXiv 2402.03300). "batch": std of all rewards (arXiv 2508.08221).
                 "none": no division (Dr. GRPO, arXiv 2503.20783).
    unbiased     True: std divides by n - 1 (TRL, verl, slime); False: by n. A group of one has std 0.
    eps          added to the std: 1e-4 in TRL, 1e-6 in verl.

    Equal rewards in a group give exactly 0, tested by max == min: in fp32 their mean need not equal them, and the
    residue over eps is an advantage of up to 1e-3 (0.1 at eps 1e-6) that means nothing. Exact zeros are also what
    lets the kernels skip such rows.

    Raises ValueError, naming the index, for NaN or infinite rewards, and for group sizes that do not divide B.
    """
    if not isinstance(rewards, Tensor) or rewards.is_complex():
        got = rewards.dtype if isinstance(rewards, Tensor) else type(rewards).__name__
        raise ValueError(f"rewards is {got}: pass a float tensor, one number per completion, [B].")
    if rewards.dim() != 1:
        raise ValueError(f"rewards has shape {list(rewards.shape)}: pass one number per completion, [B].")
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r}: it must be one of {', '.join(SCALES)}.")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps={eps}: it is added to a standard deviation and must be finite and >= 0.")
    n = rewards.numel()
    ids = _group_ids(n, rewards.device, group_size, groups)
    bad = ~torch.isfinite(rewards)
    if bad.any():
        at = int(bad.nonzero()[0])
        raise ValueError(f"rewards[{at}]={float(rewards[at])} is not finite: give every completion a number, or leave it out.")
    r = rewards.detach().to(torch.float64)
    if n == 0:
        return r.to(torch.float32)

    order = torch.argsort(ids, stable=True)
    sizes = torch.bincount(ids)

    def reduce(how: str, values: Tensor) -> Tensor:  # [B] -> [groups], in a fixed order, no atomics
        return torch.segment_reduce(values[order], how, lengths=sizes, unsafe=True)

    centred = r - (reduce("sum", r) / sizes)[ids]
    flat = (reduce("max", r) == reduce("min", r))[ids]
    centred = torch.where(flat, 0.0, centred)
    if scale == "none":
        return centred.to(torch.float32)
    if scale == "group":
        std = (reduce("sum", centred * centred) / (sizes - int(unbiased)).clamp(min=1.0)).sqrt()[ids]
    else:
        whole = r - r.mean()
        std = ((whole * whole).sum() / max(n - unbiased, 1)).sqrt()
    return torch.where(flat, 0.0, centred / (std + eps)).to(torch.float32)


def _group_ids(n: int, device: torch.device, group_size: int | None, groups: Tensor | None) -> Tensor:
    """[B] int64 ids in [0, number of groups)."""
    if (group_size is None) == (groups is None):
        raise ValueError(
            f"group_size={group_size} and groups={'None' if groups is None else 'given'}: pass exactly one of them."
        )
    if groups is not None:
        if not isinstance(groups, Tensor):
            raise ValueError(f"groups is a {type(groups).__name__}: pass an integer tensor, one id per reward, [{n}].")
        if groups.shape != (n,) or groups.is_floating_point() or groups.dtype == torch.bool:
            raise ValueError(
                f"groups has shape {list(groups.shape)} and dtype {groups.dtype}: pass one integer id per reward, [{n}]."
            )
        return torch.unique(groups.to(device), return_inverse=True)[1]
    whole = isinstance(group_size, int) and not isinstance(group_size, bool) and group_size >= 1
    require(whole, "group_size", group_size, "it must be a whole number of at least 1.")
    assert group_size is not None
    if n % group_size:
        raise ValueError(f"group_size={group_size} does not divide the {n} rewards: every prompt needs group_size completions.")
    return torch.arange(n, device=device) // group_size
