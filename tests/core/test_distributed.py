"""global_normalizer: pieces of a batch add up to the batch, over micro-batches and over ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_kernels import Objective, TokenBatch, grpo_loss
from grpo_kernels.distributed import global_normalizer
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.objective import AGGREGATES, Denominators
from support.cases import Case, build
from support.processes import finish, start_ranks

Tensor = torch.Tensor


def pieces(case: Case, rows: list[slice]) -> list[TokenBatch]:
    """Whole sequences of the case: the second is fully masked in it."""
    groups = torch.tensor([0, 0, 1, 2, 2, 3, 4, 4])  # of equal ids only within a piece
    fields = case.fields | {"groups": groups}
    return [TokenBatch(**{name: value[r] for name, value in fields.items()}) for r in rows]


OBJECTIVES = {
    **{a: Objective(aggregate=a, beta=0.2, entropy_coef=0.1, max_tokens=9) for a in AGGREGATES},
    "sequences without the empty": Objective(aggregate="seq-mean-token-mean", count_empty=False),
    "a KL and a bonus of their own": Objective(
        beta=0.2, entropy_coef=0.1, kl_aggregate="seq-mean-token-mean", entropy_aggregate="token-mean", aggregate="token-sum"
    ),
    "skyrl": Objective.preset("grpo", numerics="skyrl", beta=0.1),
    "openrlhf": Objective.preset("gspo", numerics="openrlhf", beta=0.1, entropy_coef=0.1),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_add_up(name: str, count: int) -> None:
    case, objective = build(), OBJECTIVES[name]
    cuts = {2: [slice(0, 3), slice(3, 8)], 4: [slice(0, 2), slice(2, 3), slice(3, 5), slice(5, 8)]}[count]

    def gradient(rows: list[slice]) -> tuple[Tensor, Tensor]:
        batches = pieces(case, rows)
        normalizer = global_normalizer(objective, batches)
        leaf = case.logits.clone().requires_grad_()
        losses = [grpo_loss(leaf[r], b, objective, normalizer=normalizer).loss for r, b in zip(rows, batches, strict=True)]
        torch.stack(losses).sum().backward()
        assert leaf.grad is not None
        return torch.stack(losses).sum().detach(), leaf.grad

    (loss, whole), (split_loss, split) = gradient([slice(0, 8)]), gradient(cuts)
    torch.testing.assert_close(split, whole, rtol=2e-5, atol=2e-7)
    torch.testing.assert_close(split_loss, loss, rtol=2e-5, atol=1e-6)
    assert whole.abs().max() > 1e-3


def test_a_term_that_is_off_needs_no_denominator() -> None:
    """A KL that is off (beta = 0) needs no completion budget, groups or sequences."""
    packed = TokenBatch(torch.zeros(6, dtype=torch.int64), torch.ones(6))
    for kind in ("constant", "group-mean", "seq-mean-token-mean"):
        objective = Objective(kl_aggregate=kind, entropy_aggregate=kind)
        assert float(global_normalizer(objective, [packed, packed])) == 12.0
        assert [float(x) for x in objective.denominators(packed)] == [6.0] * 3
        with pytest.raises(ValueError, match=r"max_tokens|groups|cu_seqlens"):
            global_normalizer(replace(objective, entropy_coef=0.1), packed)


def test_a_denominator_of_each_term_only_where_they_differ() -> None:
    batch = pieces(build(), [slice(0, 8)])[0]
    trained = float(batch.mask.sum())  # type: ignore[union-attr]
    assert float(global_normalizer(Objective(), batch)) == trained
    own = Objective(
        aggregate="token-sum", beta=0.1, kl_aggregate="seq-mean-token-mean", entropy_coef=0.1, entropy_aggregate="token-mean"
    )
    assert [float(x) for x in global_normalizer(own, [batch, batch])] == [1.0, 16.0, 2 * trained]
    assert [float(x) for x in global_normalizer(own, [batch, batch]) / 4] == [0.25, 4.0, trained / 2]
    assert isinstance(global_normalizer(replace(own, beta=0.0, entropy_coef=0.0), batch), Tensor)  # nobody looks at the KL's


def test_nothing_trained_is_divided_by_1() -> None:
    batch = TokenBatch(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2), mask=torch.zeros(2, 3, dtype=torch.bool))
    for aggregate in ("token-mean", "seq-mean-token-mean"):
        assert float(global_normalizer(Objective(aggregate=aggregate, count_empty=False), batch)) == 1.0


def test_refusals() -> None:
    batch = pieces(build(), [slice(0, 8)])[0]
    with pytest.raises(ValueError, match="batches=\\[\\]"):
        global_normalizer(Objective(), [])
    with pytest.raises(ValueError, match="objective='str'"):
        global_normalizer("grpo", batch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"reduce=True, but torch\.distributed is not initialised"):
        global_normalizer(Objective(), batch, reduce=True)
    with pytest.raises(ValueError, match="normalizer=-1"):
        grpo_loss(build().logits, batch, Objective(beta=0.1), normalizer=Denominators(1.0, -1.0, 1.0))


def two_ranks(rank: int, store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[:2, :3] = rank == 0
    batch = TokenBatch(torch.zeros(3, 4, dtype=torch.int64), torch.ones(3), mask=mask)
    assert float(global_normalizer(Objective(), [batch, batch])) == 12
    assert float(global_normalizer(Objective(), batch, reduce=False)) == (6, 1)[rank]
    dist.barrier()


def test_ranks_add_up(tmp_path: Path) -> None:
    """Two processes with different numbers of tokens, one of them with none."""
    finish(start_ranks(2, two_ranks, str(tmp_path / "store")))


@pytest.mark.parametrize("kl", ["k3", Kl("k3", "ratio")])
def test_the_default_dtype_of_torch_plays_no_part(kl: str | Kl, backend: str) -> None:
    from grpo_kernels import linear_grpo_loss
    from support.linear_cases import build_linear

    case = build_linear()
    objective = Objective.preset("gmpo", beta=0.1, kl=kl, entropy_coef=0.1), Objective.preset("dapo", beta=0.1, kl=kl)

    def run() -> list[Tensor]:
        found = []
        for o in objective:
            leaves = case.leaves
            out = linear_grpo_loss(
                leaves["hidden"], leaves["weight"], case.tokens.batch(), o, bias=leaves["bias"], backend=backend
            )
            found += [out.loss.detach(), *torch.autograd.grad(out.loss, list(leaves.values())), out.metrics["ess"]]
        return found

    expected = run()
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found = run()
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True)), dtype
