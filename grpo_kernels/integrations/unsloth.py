"""Unsloth: log-probs from hidden states on our kernels, in the place of its chunked helper.

    import unsloth                                     # generates and patches the trainer first
    from trl import GRPOTrainer
    from grpo_kernels.integrations import unsloth as fused
    fused.bind(GRPOTrainer)

Unsloth writes a trainer module as text, with a copy of `chunked_hidden_states_selective_log_softmax` in it: the name is
replaced there, not in unsloth_zoo. Its packing, offloading and loss stay Unsloth's, and so does what its loss does to an
upstream gradient (it ignores it). It compiles its accumulated loss as one graph, which this call breaks; if it insists on
one graph, it fails: say UNSLOTH_COMPILE_DISABLE=1.

Written from the interface of unsloth_zoo 2026.8.13, which is under the AGPL: nothing of it is here. Its helper was run on a
CPU, from its file alone, as what ours is compared with. Unsloth itself needs a GPU and was not run: the tests bind into a
stand-in for the module that it generates.
"""

from __future__ import annotations

from typing import Any

import torch

from ..logprobs import linear_logprobs
from ..transform import LogitTransform
from ._slots import Slots, check_version, plain

Tensor = torch.Tensor

#: Of unsloth_zoo: the versions whose interface this was written from.
TESTED = ("2026.8.13",)


def bind(trainer: type, *, strict: bool = False, any_version: bool = False) -> Slots:
    """Put our function into the module of `trainer`, the class that Unsloth made; the result undoes it, by `undo()` or as a
    context manager.

    strict   True: a call that has to be left to Unsloth raises RuntimeError instead.
    Raises RuntimeError for a version that is not known, unless any_version, and where it is bound already; AttributeError
    where the module has no such name."""
    check_version("unsloth_zoo", TESTED, any_version)
    slots = Slots(trainer.__module__.split(".")[0], strict)
    slots.bind(trainer.__module__, "chunked_hidden_states_selective_log_softmax", selective_log_softmax)
    return slots


def selective_log_softmax(
    hidden_states: Tensor,
    lm_head: Tensor,
    index: Tensor,
    chunks: int = 4,
    logit_scale_multiply: float = 0.0,
    logit_scale_divide: float = 0.0,
    logit_softcapping: float = 0.0,
    temperature: float = 1.0,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Log-probs fp32 [B, T] of index; hidden_states [B, T, H], lm_head [V, H].

    logit_scale_multiply, logit_scale_divide, logit_softcapping   of the logits, in this order, before temperature; 0: without.
    The number of chunks is ours."""
    plain(hidden_states, lm_head)
    scale = (logit_scale_multiply or 1.0) / (logit_scale_divide or 1.0)
    transform = LogitTransform(temperature=temperature, softcap=logit_softcapping or None, scale=scale)
    return linear_logprobs(hidden_states, lm_head, index, transform=transform)[0]
