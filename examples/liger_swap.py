"""Train with Liger's loss and then with ours: one import changes.

    python -m examples.liger_swap

A small model is trained for a few steps of dapo with a KL, twice from the same weights. Losses,
metrics and gradient norms of each step agree up to rounding. Time and memory of the loss differ.
This takes seconds on a CPU.
"""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import dataclass, field
from typing import Any

# Before torch is loaded. Threads that spin while they wait slow down the other process of the
# comparison.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor, nn

from benchmarks.harness import peak_memory
from grpo_kernels.integrations.liger import triton_grpo_loss

#: The modules that LigerFusedLinearGRPOLoss is imported from, before and after the swap.
BEFORE = "liger_kernel.chunked_loss"
AFTER = "grpo_kernels.integrations.liger"

SEQUENCES, TOKENS, WIDTH, VOCAB, STEPS = 8, 32, 512, 32768, 3


@dataclass
class Log:
    """Results of a run: loss, metrics, gradient norm and milliseconds of each step, and the peak
    memory of the loss in megabytes.
    """

    losses: list[float] = field(default_factory=list)
    metrics: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    megabytes: float = 0.0


def make_batch(step: int) -> dict[str, Tensor]:
    """Return random completions of different lengths, with ratios other than 1."""
    g = torch.Generator().manual_seed(step)
    lengths = torch.randint(TOKENS // 4, TOKENS + 1, (SEQUENCES, 1), generator=g)
    logps = -10.4 + 0.3 * torch.randn(2, SEQUENCES, TOKENS, generator=g)
    return {
        "ids": torch.randint(VOCAB, (SEQUENCES, TOKENS), generator=g),
        "mask": (torch.arange(TOKENS) < lengths).float(),
        "advantages": torch.randn(SEQUENCES, generator=g),
        "old": logps[0],
        "ref": logps[1],
    }


def train(place: str) -> tuple[Log, nn.Module]:
    """Train a small model. Only the import of the loss differs between the runs.

    place   the module that the loss is imported from
    """
    LigerFusedLinearGRPOLoss: Any = importlib.import_module(place).LigerFusedLinearGRPOLoss
    torch.manual_seed(0)
    embedding, body = nn.Embedding(VOCAB, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
    lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
    model = nn.ModuleList([embedding, body, lm_head])
    loss_function = LigerFusedLinearGRPOLoss(
        beta=0.04, loss_type="dapo", epsilon_high=0.28, temperature=0.9, compiled=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = Log()
    for step in range(STEPS + 1):
        batch = make_batch(step)
        hidden = body(embedding(batch["ids"].roll(1, 1)))[0]
        if step == STEPS:  # one more step for the memory, of the loss alone
            hidden = hidden.detach().requires_grad_()

        def loss_and_gradient(
            hidden: Tensor = hidden, batch: dict[str, Tensor] = batch
        ) -> tuple[Tensor, Any]:
            loss, metrics = loss_function(
                hidden,
                lm_head.weight,
                batch["ids"],
                batch["mask"],
                batch["advantages"],
                old_per_token_logps=batch["old"],
                ref_per_token_logps=batch["ref"],
                num_items_in_batch=int(batch["mask"].sum()),
            )
            loss.backward()
            return loss.detach(), metrics

        if step == STEPS:
            log.megabytes = peak_memory(loss_and_gradient, "cpu") / 1e6
            break
        start = time.perf_counter()
        loss, metrics = loss_and_gradient()
        log.ms.append(1e3 * (time.perf_counter() - start))
        log.losses.append(loss.item())
        log.metrics.append([m.item() for m in metrics])
        log.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return log, model


def per_token_loss() -> None:
    """Compare our `triton_grpo_loss` with autograd. Liger's function needs a GPU, ours does not."""
    batch, g = make_batch(0), torch.Generator().manual_seed(1)
    logits = torch.randn(SEQUENCES, TOKENS + 1, 1000, generator=g)
    ids, mask = batch["ids"] % 1000, batch["mask"]
    old = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[..., None])[..., 0] - 0.1
    leaf = logits.clone().requires_grad_()
    losses, _kl, _clipped = triton_grpo_loss(
        leaf, old, None, ids, batch["advantages"], mask, beta=0.0, temperature=1.0, inplace=False
    )
    (losses.sum() / mask.sum()).backward()

    plain = logits.clone().requires_grad_()
    logps = torch.log_softmax(plain[:, :-1], -1).gather(2, ids[..., None])[..., 0]
    ratio, A = (logps - old).exp(), batch["advantages"][:, None]
    expected = -torch.minimum(ratio * A, ratio.clamp(1 - 0.2, 1 + 0.4) * A) * mask
    (expected.sum() / mask.sum()).backward()
    assert leaf.grad is not None and plain.grad is not None
    error = float((leaf.grad - plain.grad).norm() / plain.grad.norm())
    print(
        f"triton_grpo_loss on a CPU: loss of {int(mask.sum())} tokens, gradient differs from"
        f" autograd's by {error:.1e}"
    )
    assert error < 1e-5 and torch.allclose(losses, expected, atol=1e-5)


def main() -> list[dict[str, Any]]:
    """Run the comparison, check that results agree. Return milliseconds and megabytes of both."""
    try:
        importlib.import_module(BEFORE)
    except ImportError as error:
        raise SystemExit(
            f"this example compares with Liger: pip install liger-kernel ({error})"
        ) from error
    logs, models = zip(*(train(place) for place in (BEFORE, AFTER)), strict=True)
    before, after = logs
    print("step       loss           kl      clipped    gradient norm      (Liger, then ours)")
    for step in range(STEPS):
        for log in logs:
            kl, clipped = log.metrics[step]
            print(
                f"{step:4} {log.losses[step]:12.7f} {kl:12.7f} {clipped:9.5f}"
                f" {log.norms[step]:14.7f}"
            )

    def same(a: float, b: float) -> bool:
        return abs(a - b) <= 1e-4 * abs(b) + 1e-6

    for step in range(STEPS):
        assert same(after.losses[step], before.losses[step]) and same(
            after.norms[step], before.norms[step]
        )
        assert all(
            same(a, b) for a, b in zip(after.metrics[step], before.metrics[step], strict=True)
        )
    with torch.no_grad():
        moved = max(
            float((a - b).norm() / b.norm())
            for a, b in zip(*(m.parameters() for m in models), strict=True)
        )
    print(f"parameters after {STEPS} steps differ by {moved:.1e} at most (relative norm)")
    assert moved < 1e-3
    for name, log in (("Liger", before), ("ours", after)):
        print(
            f"{name:6} {min(log.ms):8.1f} ms for loss and backward of a step, {log.megabytes:7.1f}"
            " MB for the loss alone, gradients included"
        )
    per_token_loss()
    return [
        {
            "what": "LigerFusedLinearGRPOLoss, loss and backward of a step", "ms": [min(log.ms) for log in logs],
            "mb": [log.megabytes for log in logs], "memory": "the loss alone, gradients included",
        }
    ]  # fmt: skip


if __name__ == "__main__":
    main()
