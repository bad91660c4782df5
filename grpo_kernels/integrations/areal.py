"""AReaL: log-probs and entropy of packed logits on our kernels.

    from grpo_kernels.integrations import areal
    areal.bind()  # in the worker, before or after areal.engine.fsdp_engine is imported

`bind` replaces `gather_logprobs` and `gather_logprobs_entropy` of areal.utils.functional, in every
module of AReaL that imported them (the FSDP, Megatron and Archon engines). AReaL keeps a softmax of
all logits in fp32 for its backward; ours keeps three numbers a row. The loss (`ppo_actor_loss_fn`,
on [T]), its statistics and weights stay AReaL's.

`bind(trees=True)` replaces `mapped_logprobs_entropy` too, of versions after 1.0.4: tokens of
rollouts that share the rows of a packed tree, where AReaL keeps a softmax and the logits of each
row that is named.

Logits of several tensor-parallel ranks are parts of one width, as AReaL itself takes them to be:
one exchange of 12 or 16 bytes a row and rank, where AReaL reduces three or four times a chunk.

Tested with AReaL 1.0.4 on a CPU: its two functions, from their file alone, on one rank and on two;
that of trees, which no release has yet, on one. Its engines were not run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._swap import Adapter, Slots, with_trainer_names
from ._tensors import can_be_overwritten, log_probs_of

ADAPTER = Adapter(
    "AReaL", "areal", ("1.0.4",),
    {"gather_logprobs": "areal.utils.functional.vocab_parallel.gather_logprobs",
     "gather_logprobs_entropy": "areal.utils.functional.vocab_parallel.gather_logprobs_entropy",
     "mapped_logprobs_entropy": "areal.models.tree_attn.mapped_logprobs.mapped_logprobs_entropy"},
)  # fmt: skip


def bind(*, trees: bool = False, strict: bool = False, any_version: bool = False) -> Slots:
    """Replace AReaL's functions of log-probs and entropy by ours, until `undo()` of the result.

    trees         whether `mapped_logprobs_entropy` is also replaced, AReaL's function for packed
                  trees: rollouts that share the rows of their common prefix. Versions up to 1.0.4
                  do not have it.
    strict        True: a call that ours does not support raises RuntimeError. False: AReaL's own
                  function computes it.
    any_version   False: under a version of AReaL that was not tested, the first calls are compared
                  with AReaL's own functions, and RuntimeError is raised if they differ. True: they
                  are not compared.

    Returns `Slots`: `undo()` restores AReaL's functions, and `counts` has the number of calls.
    Raises RuntimeError if a function is replaced already or has other arguments.
    """
    slots = ADAPTER.bind(
        gather_logprobs, gather_logprobs_entropy, strict=strict, any_version=any_version
    )
    if trees:
        slots.bind(mapped_logprobs_entropy)
    return slots


@with_trainer_names(targets="labels")
def gather_logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    tp_group: Any = None,
    chunk_size: int = 1024,
) -> Tensor:
    """Return the log-probs of labels, fp32 [...], in place of AReaL's function of this name.

    logits        [..., V], or this rank's part [..., V / ranks]
    labels        int64 [...]
    temperature   divides the logits
    tp_group      the tensor-parallel group; None for one rank
    chunk_size    not used

    The decorator makes errors use the names of these arguments.
    """
    return log_probs_of(logits, labels, temperature=temperature, group=tp_group).logps


@with_trainer_names(targets="labels")
def gather_logprobs_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    tp_group: Any = None,
    chunk_size: int = 1024,
    reuse_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (log-probs of labels, entropy in nats), fp32 [...] each, both differentiable.

    logits         [..., V], or this rank's part [..., V / ranks]
    labels         int64 [...]
    temperature    divides the logits
    tp_group       the tensor-parallel group; None for one rank
    chunk_size     not used
    reuse_logits   whether the backward writes the gradient into the memory of the logits. Logits
                   that are a leaf or not contiguous are never overwritten. AReaL passes True if
                   nothing else reads the logits.

    The decorator makes errors use the names of these arguments.
    """
    inplace = reuse_logits and can_be_overwritten(logits)
    logps, entropies = log_probs_of(
        logits, labels, temperature=temperature, group=tp_group, entropy=True, inplace=inplace
    )
    return logps, entropies


@with_trainer_names(targets="labels")
def mapped_logprobs_entropy(
    logits: Tensor, rows: Tensor, labels: Tensor, temperature: float = 1.0, tp_group: Any = None
) -> tuple[Tensor, Tensor]:
    """Return (log-probs, entropies), fp32 [M] each, of M labels that share N rows of logits.

    logits        [N, V], or this rank's part [N, V / ranks]
    rows          int64 [M], the row of logits that predicts each label
    labels        int64 [M]
    temperature   divides the logits
    tp_group      the tensor-parallel group; None for one rank

    In a packed tree, rollouts with a common prefix share the rows of the prefix.

    The decorator makes errors use the names of these arguments.
    """
    logps, entropies = log_probs_of(
        logits, labels, temperature=temperature, group=tp_group, entropy=True, rows=rows
    )
    return logps, entropies
