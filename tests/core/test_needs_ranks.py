"""One optimizer step, cut into micro-batches and ranks in every way, has one gradient. See tests/README.md."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from grpo_kernels import Objective, TokenBatch
from grpo_kernels.distributed import global_normalizer
from grpo_kernels.head import FusedLMHead, HeadLoss
from support.gradients import gradients
from support.processes import finish, start_ranks

Tensor = torch.Tensor
Piece = tuple[Tensor, TokenBatch]
B, T, H, V = 8, 6, 10, 23
OBJECTIVES = {
    "token-mean, KL and bonus": Objective.preset("dapo", beta=0.1, entropy_coef=0.02),
    "sequence means": Objective.preset("grpo", beta=0.1),
    "sequence ratios": Objective.preset("gspo", entropy_coef=0.02, entropy_aggregate="token-mean"),
    "a constant": Objective.preset("dr_grpo", max_tokens=9),
}


class Model(nn.Module):
    """The head is called in the model's own forward, where DDP sees what becomes of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.lm_head = nn.Linear(H, H), FusedLMHead(nn.Linear(H, V))

    def forward(self, inputs: Tensor, batch: TokenBatch, objective: Objective, normalizer: Tensor) -> HeadLoss:
        return self.lm_head(torch.tanh(self.body(inputs)), batch, objective, normalizer=normalizer)


def sequences(lo: int, hi: int) -> Piece:
    """Sequences lo to hi of the step: unequal lengths, the second quarter fully masked."""
    g = torch.Generator().manual_seed(2)
    inputs, targets = torch.randn(B, T, H, generator=g), torch.randint(V, (B, T), generator=g)
    mask = torch.arange(T) < torch.tensor([6, 1, 0, 0, 3, 5, 2, 6])[:, None]
    old, ref = torch.randn(2, B, T, generator=g) * 0.3 - 3.1
    advantages, cut = torch.randn(B, generator=g), slice(lo, hi)
    return inputs[cut], TokenBatch(targets[cut], advantages[cut], mask=mask[cut], old_logps=old[cut], ref_logps=ref[cut])


def pieces(lo: int, hi: int, count: int) -> list[Piece]:
    size = (hi - lo) // count
    return [sequences(i, i + size) for i in range(lo, hi, size)]


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], what: object) -> None:
    assert found.keys() == expected.keys() == dict(Model().named_parameters()).keys(), what
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        assert scale > 1e-3 and (found[name] - gradient).abs().max() < 2e-6 * scale, (what, name)


def one_rank(objective: Objective, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    model, parts = Model(), pieces(0, B, count)
    normalizer = global_normalizer(objective, [batch for _, batch in parts], reduce=False)
    losses = []
    for inputs, batch in parts:
        out = model(inputs, batch, objective, normalizer)
        out.loss.backward()
        losses.append(out.loss.detach())
    return torch.stack(losses).sum(), gradients(model)


def test_micro_batches_of_one_rank() -> None:
    for name, objective in OBJECTIVES.items():
        loss, expected = one_rank(objective, 1)
        for count in (2, 4):
            total, found = one_rank(objective, count)
            assert abs(total - loss) < 2e-6 * (1 + abs(loss)), (name, count)
            assert_near(found, expected, (name, count))


def two_ranks(rank: int, store: str) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, objective in OBJECTIVES.items():
        loss, expected = one_rank(objective, 1)
        for count in (1, 2, 4):  # the whole second micro-batch of rank 0 is masked, or half of its only one
            model, parts = DistributedDataParallel(Model()), pieces(4 * rank, 4 * rank + 4, count)
            # DDP takes the mean over the ranks, so each divides by its share of what the whole step is divided by.
            whole = global_normalizer(objective, [batch for _, batch in parts])
            normalizer = type(whole)(*(x / 2 for x in whole)) if isinstance(whole, tuple) else whole / 2
            total = torch.zeros(())
            for i, (inputs, batch) in enumerate(parts):
                model.require_backward_grad_sync = i == len(parts) - 1
                out = model(inputs, batch, objective, normalizer)
                out.loss.backward()
                assert torch.isfinite(out.loss)
                total += out.loss.detach() / 2
            assert_near(gradients(model), expected, (name, count, rank))
            dist.all_reduce(total)
            assert abs(total - loss) < 2e-6 * (1 + abs(loss)), (name, count, rank)
    dist.barrier()


def test_micro_batches_of_two_ranks(tmp_path: Path) -> None:
    finish(start_ranks(2, two_ranks, str(tmp_path / "store")))
