"""How many rows take part in each product with the head, by level of the objective, kind of head, and KL."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from grpo_kernels import Objective, Options, TokenBatch, linear_grpo_loss, linear_logprobs
from support.inside import count_products, in_chunks

Tensor = torch.Tensor
B, T, H, V = 6, 5, 16, 40
MASK = torch.arange(T) < torch.tensor([5, 3, 0, 4, 5, 1])[:, None]
ADVANTAGES = torch.tensor([1.3, 0.0, 2.0, -0.7, 0.0, 0.6])
N, ACTIVE = int(MASK.sum()), int(MASK[ADVANTAGES != 0].sum())

LEVELS = {"token": "dapo", "sequence": "gspo", "geometric mean": "gmpo", "sum": "vespo"}


def leaves(frozen: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    return torch.randn(B, T, H, generator=g).requires_grad_(), torch.randn(V, H, generator=g).requires_grad_(not frozen)


def batch() -> TokenBatch:
    g = torch.Generator().manual_seed(6)
    ref_logps = -4 + 0.1 * torch.randn(
        B, T, generator=g
    )  # on-policy: no ratio is clipped, which would leave a row without a slope
    return TokenBatch(torch.randint(V, (B, T), generator=g), ADVANTAGES, mask=MASK, ref_logps=ref_logps)


@pytest.mark.parametrize("beta", [0.0, 0.1], ids=["", "kl"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("level", LEVELS)
def test_rows_in_the_products_of_a_loss(
    level: str, frozen: bool, beta: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks(monkeypatch, 4)
    with_gradient = N if beta else ACTIVE
    again = with_gradient if level != "token" and not frozen else 0  # a slope waits for its sequence, and so does d_weight
    hidden, weight = leaves(frozen)
    rows = count_products(monkeypatch)
    linear_grpo_loss(
        hidden, weight, batch(), Objective.preset(LEVELS[level], beta=beta), options=Options(backend)
    ).loss.backward()
    expected = {"logits": N + again, "d_hidden": with_gradient, "d_weight": 0 if frozen else with_gradient}
    assert rows == Counter(expected)


@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
def test_rows_in_the_products_of_log_probs_of_a_frozen_head(
    entropy: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two products; the logits come again only for rows where a gradient arrives at the entropy."""
    in_chunks(monkeypatch, 4)
    few = (torch.arange(B) < 2)[:, None]
    again = int((MASK & few).sum()) if entropy else 0
    (hidden, weight), b = leaves(True), batch()
    rows = count_products(monkeypatch)
    logps, H_of = linear_logprobs(hidden, weight, b.targets, mask=MASK, entropy=entropy, options=Options(backend))
    (logps.sum() + (0.0 if H_of is None else (H_of * few).sum())).backward()
    assert rows == Counter({"logits": N + again, "d_hidden": N + again})


def test_without_products_the_weight_may_be_gone(backend: str) -> None:
    """As ZeRO-3 and FSDP leave it after the forward of the module that owns it. An entropy needs it."""

    def gone(weight: Tensor) -> None:
        weight.data = torch.empty(0)

    results: list[Any] = []
    for take_away in (lambda _: None, gone):
        (hidden, weight), b = leaves(True), batch()
        logps, _ = linear_logprobs(hidden, weight, b.targets, mask=MASK, options=Options(backend))
        loss = linear_grpo_loss(hidden, weight, b, Objective.preset("gspo"), options=Options(backend)).loss
        take_away(weight)
        (logps.sum() + loss).backward()
        results.append(hidden.grad)
    assert results[0].any() and torch.equal(*results)
    (hidden, weight), b = leaves(True), batch()
    _, entropy = linear_logprobs(hidden, weight, b.targets, entropy=True, options=Options(backend))
    assert entropy is not None
    gone(weight)
    with pytest.raises(RuntimeError, match="weight is gone before the backward"):
        entropy.sum().backward()
