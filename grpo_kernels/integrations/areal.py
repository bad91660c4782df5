"""AReaL: log-probs and entropy of packed logits on our kernels.

    from grpo_kernels.integrations import areal
    areal.bind()                    # in the worker, once areal.engine.fsdp_engine is imported or before

`bind` replaces `gather_logprobs` and `gather_logprobs_entropy` of areal.utils.functional, in every module of AReaL that
imported them (the FSDP, Megatron and Archon engines). AReaL keeps a softmax of all logits in fp32 for its backward; ours
keeps three numbers a row. The loss (`ppo_actor_loss_fn`, on [T]), its statistics and weights stay AReaL's.

Logits of several tensor-parallel ranks are parts of one width, as AReaL itself takes them to be: one exchange of 12 or 16
bytes a row and rank, where AReaL reduces three or four times a chunk.

Tested with AReaL 1.0.4 on a CPU: its two functions, from their file alone, on one rank and on two. Its engines were not run.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import LogitTransform, Options, token_logprobs
from ._swap import Adapter, Slots
from ._tensors import even_shard, plain

Tensor = torch.Tensor

HOME = "areal.utils.functional.vocab_parallel"
ADAPTER = Adapter(
    "AReaL", "areal", ("1.0.4",),
    {"gather_logprobs": f"{HOME}.gather_logprobs", "gather_logprobs_entropy": f"{HOME}.gather_logprobs_entropy"},
)  # fmt: skip


def bind(*, strict: bool = False, any_version: bool = False) -> Slots:
    """Replace AReaL's two functions by ours; the result restores them, see `Slots`, which has the errors too.

    strict   True: a call that AReaL's own function has to handle raises RuntimeError.
    any_version   True: no comparison under a version that was not tested."""
    return ADAPTER.bind(gather_logprobs, gather_logprobs_entropy, strict=strict, any_version=any_version)


def gather_logprobs(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, tp_group: Any = None, chunk_size: int = 1024
) -> Tensor:
    """Log-probs of labels, fp32 in their shape; logits [..., V], divided by temperature. With a tp_group of several ranks
    logits are [..., V / ranks], this rank's part. chunk_size has no effect."""
    return _scored(logits, labels, temperature, tp_group, False)[0]


def gather_logprobs_entropy(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, tp_group: Any = None, chunk_size: int = 1024
) -> tuple[Tensor, Tensor]:
    """(log-probs of labels, entropy in nats) with the arguments of `gather_logprobs`; both differentiable."""
    logps, entropy = _scored(logits, labels, temperature, tp_group, True)
    assert entropy is not None
    return logps, entropy


def _scored(logits: Tensor, labels: Tensor, temperature: float, group: Any, entropy: bool) -> tuple[Tensor, Tensor | None]:
    plain(logits)
    shard = even_shard(logits.shape[-1], group)
    transform, options = LogitTransform(temperature), Options(shard=shard)
    found = token_logprobs(logits, labels, transform=transform, entropy=entropy, options=options)
    return found.logps, found.entropy
