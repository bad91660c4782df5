"""What a call costs: the rows that enter each product, and the memory that is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_kernels import (
    Exact,
    Head,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
)
from support.allocations import Allocations
from support.doors import in_options
from support.inside import count_products, in_chunks

Tensor = torch.Tensor
B, T, V, H = 8, 7, 811, 96
MASK = torch.arange(T) < torch.tensor([7, 4, 2, 1, 6, 3, 5, 7])[:, None]
N = int(MASK.sum())
ADVANTAGES = torch.tensor([1.3, -0.8, 2.0, 0.7, -1.1, 0.6, 0.0, -1.7])
ACTIVE = int(MASK[ADVANTAGES != 0].sum())


def leaves(*frozen: str) -> dict[str, Tensor]:
    made = {"hidden": torch.randn(B, T, H), "weight": torch.randn(V, H) / 10, "bias": torch.randn(V)}
    return {name: x.requires_grad_(name not in frozen) for name, x in made.items()}


def batch(**fields: Any) -> TokenBatch:
    targets = torch.randint(V, (B, T))
    given = {"mask": MASK, "old_logps": -6 + 0.1 * torch.randn(B, T), "ref_logps": -6 + 0.1 * torch.randn(B, T)}
    return TokenBatch(targets, ADVANTAGES, **{**given, **fields})


def loss(x: dict[str, Tensor], objective: Objective, of: TokenBatch | None = None, **options: Any) -> Tensor:
    return linear_grpo_loss(x["hidden"], Head(x["weight"], x["bias"]), of or batch(), objective, **in_options(**options)).loss


#: (objective, fields of its batch or options) -> rows in (logits, d_hidden, d_weight): those that count, and those with a gradient
LOSSES: dict[str, tuple[Callable[[], Objective], dict[str, Any], tuple[int, int]]] = {
    "token level": (lambda: Objective.preset("reinforce"), {}, (N, ACTIVE)),
    "token level, inactive rows skipped": (lambda: Objective.preset("reinforce"), {"skip_inactive": True}, (ACTIVE, ACTIVE)),
    "with a KL every row is active": (lambda: Objective.preset("reinforce", beta=0.1), {}, (N, N)),
    "with a bonus every row is active": (lambda: Objective.preset("reinforce", entropy_coef=0.1), {}, (N, N)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_rows_in_the_products_of_a_loss(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options, (projected, with_gradient) = LOSSES[name]
    rows = count_products(monkeypatch)
    loss(leaves(), make(), backend=backend, **options).backward()
    assert rows == {"logits": projected, "d_hidden": with_gradient, "d_weight": with_gradient}


def test_rows_in_the_products_of_log_probs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product of the rows that count, then three of those whose upstream gradient is not 0; entropy costs none."""
    for entropy in (False, True):
        x, of = leaves(), batch()
        with monkeypatch.context() as patch:
            rows = count_products(patch)
            found = linear_logprobs(
                x["hidden"], x["weight"], of.targets, mask=MASK, entropy=entropy, options=Options(backend=backend)
            )
            (found[0] * (torch.arange(B) < 3)[:, None]).sum().backward()
        some = int(MASK[:3].sum())
        assert rows == {"logits": N + some, "d_hidden": some, "d_weight": some}
        assert x["hidden"].grad is not None and not x["hidden"].grad[3:].any()


def test_a_second_stream_costs_a_product_of_its_own(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a loss four in all, each teacher only in the rows where it has a weight; six where gradients wait for the backward. No
    more than a chunk of logits of either exists."""
    in_chunks(monkeypatch, 4)
    second = (torch.randn(B, T, 24), torch.randn(V, 24) / 5)
    few = torch.arange(B) < 3
    exact = Objective.preset("distillation", kl=Exact())
    for reference, teachers in ((second, N), ([(second, 1.0), (second, few.float())], N + int(MASK[few].sum()))):
        x = leaves()
        with monkeypatch.context() as patch, Allocations() as seen:
            rows = count_products(patch)
            loss(x, exact, batch(ref_logps=None), reference=reference, backend=backend).backward()
        assert rows == {"logits": N + teachers, "d_hidden": N, "d_weight": N}
        assert not any(V in shape and max(shape) <= V and N in shape for shape in seen.shapes)
    rows = count_products(monkeypatch)
    x = leaves()
    linear_divergence(x["hidden"], x["weight"], second, mask=MASK, options=Options(backend=backend)).sum().backward()
    assert rows == {"logits": 4 * N, "d_hidden": N, "d_weight": N}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient_there_is_one_product(
    mode: Callable[[], Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, rows = leaves(), count_products(monkeypatch)
    for objective in (Objective.preset("dapo"), Objective.preset("gspo")):
        rows.clear()
        with mode():
            loss(x, objective, backend=backend)
        assert rows == {"logits": N}


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("frozen", [("weight",), ("hidden",), ("bias",), ("weight", "bias"), ("hidden", "bias")], ids=str)
def test_what_is_frozen_costs_no_product_and_no_memory(
    frozen: tuple[str, ...], layer: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, of = leaves(*frozen), batch(mask=None)
    rows = count_products(monkeypatch)
    with Allocations() as seen:
        if layer == 2:
            loss(x, Objective.preset("dapo"), of, backend=backend).backward()
        else:
            linear_logprobs(x["hidden"], Head(x["weight"], x["bias"]), of.targets, options=Options(backend=backend))[
                0
            ].sum().backward()
    assert {name for name, leaf in x.items() if leaf.grad is None} == set(frozen)
    assert ("hidden" in frozen) == (not rows["d_hidden"]) and ("weight" in frozen) == (not rows["d_weight"])
    shapes = {tuple(sorted(shape)) for shape in seen.shapes}
    assert ((H, V) in shapes) == ("weight" not in frozen) and ((V,) in shapes) == ("bias" not in frozen)
    assert ((B * T, H) in seen.shapes) == ("hidden" not in frozen), "all rows take part: the hidden states are not copied"


def test_kept_sets_cost_no_product_and_no_gradient_of_the_weights_size(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory to add to, only the rows of their ids are touched; an only id has log-prob 0, and no gradient."""
    sets = TokenSets.from_lists([[3, 200], [70], [5, 299, 9], [200, 8]])
    of = TokenBatch(torch.tensor([3, 70, 9, 8]), torch.tensor([1.0, 2.0, -1.0, 0.5]), kept=sets)
    ids, rows = [3, 5, 8, 9, 200, 299], count_products(monkeypatch)
    for name in ("dapo", "log-probs"):
        hidden, weight = torch.randn(4, H, requires_grad=True), torch.randn(300, H, requires_grad=True)
        total = torch.full((300, H), torch.nan)
        total[ids] = 0.0
        with Allocations() as seen:
            if name == "log-probs":
                out, _ = linear_logprobs(
                    hidden, weight, of.targets, kept=sets, options=Options(weight_grad=total, backend=backend)
                )
            else:
                out = linear_grpo_loss(
                    hidden, weight, of, Objective.preset(name), options=Options(weight_grad=total, backend=backend)
                ).loss
            out.sum().backward()
        assert not rows and not [shape for shape in seen.shapes if 300 in shape] and weight.grad is None
        others = torch.ones(300, dtype=torch.bool).index_fill(0, torch.tensor(ids), False)
        assert total[others].isnan().all() and total[ids].isfinite().all() and total[ids].any(1).all()


@pytest.mark.parametrize("name", ["gspo", "log-probs"])
def test_where_the_factor_is_known_products_add_straight_into_the_given_memory(name: str, backend: str) -> None:
    x, of, total = leaves(), batch(), torch.zeros(V, H)
    if name == "gspo":
        out = loss(x, Objective.preset("gspo"), of, weight_grad=total, backend=backend)
    else:
        out = linear_logprobs(x["hidden"], x["weight"], of.targets, options=Options(weight_grad=total, backend=backend))[
            0
        ].sum()
    with Allocations() as seen:
        out.backward()
    assert total.any() and (V, H) not in seen.shapes


def test_sixteen_bit_gradients_are_summed_in_fp32(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many chunks the error of the weight's gradient does not grow, and fp32 memory is not rounded."""
    x = {name: leaf.detach().bfloat16() for name, leaf in leaves().items()}
    of, found = batch(), {}
    for rows in (64, 2):
        in_chunks(monkeypatch, rows)
        total = torch.zeros(V, H)
        mine = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
        loss(mine, Objective.preset("reinforce"), of, weight_grad=total, backend=backend).backward()
        found[rows] = total
    assert (found[2] != found[2].bfloat16().float()).float().mean() > 0.9
    assert (found[2] - found[64]).abs().max() <= 2.0**-8 * found[64].abs().max()
