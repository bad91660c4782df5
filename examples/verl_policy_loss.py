"""Replace verl's policy loss and head by ours: the same results, without logits in memory.

    python -m examples.verl_policy_loss

Ours are compared with the functions of verl 0.9.1 if it is installed, else with the same formulas
in plain PyTorch. This takes seconds on a CPU, and needs no network.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.integrations import verl as fused

SEQUENCES, LENGTH = 64, 512
ROWS, WIDTH, VOCAB = 512, 128, 32_000

HOW = """verl is not here: comparing with a transcription of its functions. To use it in verl:

    # my_losses.py
    from grpo_kernels.integrations import verl
    verl.register()     # loss_mode=fused_vanilla, fused_gspo, fused_vespo, ...
    verl.bind()         # log-probs and entropy from hidden states or logits

    VERL_USE_EXTERNAL_MODULES=my_losses python -m verl.trainer.main_ppo \\
        actor_rollout_ref.actor.policy_loss.loss_mode=fused_vanilla \\
        actor_rollout_ref.model.use_fused_kernels=True
"""


def measured(run: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], float, float]:
    """Return (results, best time of three runs in ms, MB that autograd saves for the backward)."""
    kept = dict[int, int]()

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        results = run()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        run()
        best = min(best, 1e3 * (time.perf_counter() - start))
    return results, best, sum(kept.values()) / 1e6


def compare(
    what: str, theirs: Callable[[], tuple[Tensor, ...]], ours: Callable[[], tuple[Tensor, ...]]
) -> dict[str, Any]:
    """Run both functions, check that their results agree, and return times and memory of both."""
    expected, their_ms, their_mb = measured(theirs)
    results, ms, mb = measured(ours)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True))
    print(
        f"{what}: {their_ms:7.1f} -> {ms:7.1f} ms, {their_mb:6.1f} -> {mb:6.1f} MB kept for the"
        f" backward, difference {error:.0e}"
    )
    assert error < 1e-4 and mb <= 1.01 * their_mb
    return {
        "what": what,
        "ms": [their_ms, ms],
        "mb": [their_mb, mb],
        "memory": "kept for the backward",
    }


# ---- the policy loss


def vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    **_: Any,
) -> tuple[Tensor, dict[str, float]]:
    """Return (loss, {}) of PPO with verl's dual clip, the mean over tokens.

    loss = max(-r A, -clamp(r) A) for r = exp(log_prob - old_log_prob); for A < 0 it is at most
    -clip_ratio_c A.
    """
    r = (log_prob - old_log_prob).clamp(-20, 20).exp()
    loss = torch.maximum(
        -r * advantages,
        -r.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high) * advantages,
    )
    loss = torch.where(advantages < 0, torch.minimum(loss, -config.clip_ratio_c * advantages), loss)
    return (loss * response_mask).sum() / response_mask.sum(), {}


def head(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return (log-probs of labels, entropy) from hidden states, with all logits in memory."""
    log_p = torch.log_softmax(hidden.float() @ weight.float().T / temperature, -1)
    return log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def main() -> list[dict[str, Any]]:
    """Compare both functions. Return milliseconds and megabytes of verl's and ours."""
    torch.manual_seed(0)
    loss, config, their_head = (
        vanilla,
        SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28),
        head,
    )
    config.clip_ratio_c, config.policy_loss, config.global_batch_info = 3.0, None, {}
    mine: Callable[..., tuple[Tensor, dict[str, float]]] = fused.policy_loss("vanilla")
    slots = None
    try:
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        from verl.utils.experimental.torch_functional import FusedLinearForPPO
        from verl.workers.config import ActorConfig
    except ImportError:
        print(HOW)
        our_head = fused.linear_cross_entropy
    else:
        their_head = FusedLinearForPPO().forward  # before it is replaced too
        fused.register()
        slots = fused.bind(strict=True)
        loss, mine = get_policy_loss_fn("vanilla"), get_policy_loss_fn("fused_vanilla")
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=4, clip_ratio_high=0.28
        )
        our_head = FusedLinearForPPO().forward
        print("verl's registry and functions:")

    log_prob = (-3 * torch.rand(SEQUENCES, LENGTH)).requires_grad_()
    old_log_prob = log_prob.detach() + 0.3 * torch.randn(SEQUENCES, LENGTH)
    mask = torch.arange(LENGTH) < torch.randint(LENGTH // 4, LENGTH, (SEQUENCES, 1))
    advantages = torch.randn(SEQUENCES, 1).expand(SEQUENCES, LENGTH)

    def policy(f: Callable[..., Any]) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            value, _ = f(
                old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=mask,
                loss_agg_mode="token-mean", config=config,
            )  # fmt: skip
            return value.detach(), *torch.autograd.grad(value, log_prob)

        return run

    rows = [compare("policy loss", policy(loss), policy(mine))]

    hidden = torch.randn(1, ROWS, WIDTH, requires_grad=True)
    weight = (torch.randn(VOCAB, WIDTH) / WIDTH**0.5).requires_grad_()
    labels, upstream = torch.randint(VOCAB, (1, ROWS)), torch.randn(1, ROWS)

    def scored(f: Callable[..., Any]) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            logps, entropy = f(hidden, weight, labels, 0.7)
            gradients = torch.autograd.grad(
                (logps * upstream).sum() - 0.01 * entropy.sum(), (hidden, weight)
            )
            return logps.detach(), entropy.detach(), *gradients

        return run

    rows.append(compare("head       ", scored(their_head), scored(our_head)))
    if slots is not None:
        print(f"calls: {dict(slots.counts)}")
        slots.undo()
    by = (
        "verl's registry and functions"
        if slots is not None
        else "the same in plain torch, verl not being installed"
    )
    return [row | {"what": f"{row['what'].strip()}, {by}"} for row in rows]


if __name__ == "__main__":
    main()
