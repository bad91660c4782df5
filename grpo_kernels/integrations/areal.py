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

from ..logprobs import token_logprobs
from ..specs import LogitTransform
from ._shared import even_shard, plain
from ._slots import Ragged, untested

Tensor = torch.Tensor

TESTED = ("1.0.4",)


def bind(*, strict: bool = False, any_version: bool = False) -> Ragged:
    """Replace AReaL's two functions by ours. The returned `Ragged` restores them, by `undo()` or as a context manager.

    strict   True: a call that AReaL's own function has to handle raises RuntimeError.
    any_version   True: no comparison under a version that was not tested, see `_slots.Trial`.
    Raises RuntimeError where a function is replaced already, and in the first step where such a comparison fails."""
    version = untested("areal", TESTED, any_version)
    slots = Ragged("areal", strict, version=version)
    slots.bind("areal.utils.functional.vocab_parallel", "gather_logprobs", gather_logprobs)
    slots.bind("areal.utils.functional.vocab_parallel", "gather_logprobs_entropy", gather_logprobs_entropy)
    return slots


def gather_logprobs(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, tp_group: Any = None, chunk_size: int = 1024
) -> Tensor:
    """Log-probs of labels, fp32 in their shape; logits [..., V], divided by temperature. With a tp_group of several ranks
    logits are [..., V / ranks], this rank's part. chunk_size has no effect."""
    plain(logits)
    transform, shard = LogitTransform(temperature=temperature), even_shard(logits.shape[-1], tp_group)
    return token_logprobs(logits, labels, transform=transform, shard=shard)[0]


def gather_logprobs_entropy(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, tp_group: Any = None, chunk_size: int = 1024
) -> tuple[Tensor, Tensor]:
    """(log-probs of labels, entropy in nats) with the arguments of `gather_logprobs`; both differentiable."""
    plain(logits)
    transform, shard = LogitTransform(temperature=temperature), even_shard(logits.shape[-1], tp_group)
    logps, entropy = token_logprobs(logits, labels, transform=transform, entropy=True, shard=shard)
    assert entropy is not None
    return logps, entropy
