"""Unsloth: log-probs from hidden states on our kernels, in the place of its chunked helpers.

    import unsloth                                     # generates and patches the trainer first
    from trl import GRPOTrainer
    from grpo_kernels.integrations import unsloth as fused
    fused.bind(GRPOTrainer)

Unsloth generates a trainer module as text. Until 2026.8 its loss calls
`chunked_hidden_states_selective_log_softmax`, of which that module has a copy; this copy is
replaced. In later versions loss and scoring import `grpo_chunked_hidden_states_logprobs` from
unsloth_zoo.rl_replacements on each call, and
`chunked_hidden_states_selective_log_softmax_recompute` if they need the entropy or are told to
recompute; both are replaced there. Packing, offloading and the loss remain Unsloth's; its loss
ignores an upstream gradient. Unsloth compiles its accumulated loss as one graph, and our call
breaks that graph. If it requires a single graph it fails: set UNSLOTH_COMPILE_DISABLE=1.

Written from the interfaces of unsloth_zoo 2026.8.13 and 2026.10.9. These are under the AGPL, and
none of their code is here. The tests run its helpers on a CPU, from their files alone, to compare
ours with them. Unsloth itself needs a GPU and was not run: the tests bind into stand-ins for the
modules that it generates and imports.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..options import Head
from ..transform import LogitTransform
from ._swap import Adapter, NotCovered, Slots, with_trainer_names
from ._tensors import entropy_mode, log_probs_of, require_supported

#: The versions are those of unsloth_zoo from whose interface this was written. Before 2026.9 the
#: first function is replaced in the module that Unsloth generates, under the name of the second
#: with no `_recompute`.
ADAPTER = Adapter(
    "Unsloth", "unsloth_zoo", ("2026.8.13", "2026.9.1", "2026.10.8", "2026.10.9"),
    {"selective_log_softmax": "unsloth_zoo.rl_replacements.grpo_chunked_hidden_states_logprobs",
     "log_softmax_and_entropy": "unsloth_zoo.rl_replacements.chunked_hidden_states_selective_log_softmax_recompute"},
)  # fmt: skip


def bind(trainer: type, *, strict: bool = False, any_version: bool = False) -> Slots:
    """Replace Unsloth's functions of log-probs by ours, until `undo()` of the result.

    trainer       the trainer class that Unsloth generated. Up to Unsloth 2026.8 its module has a
                  copy of the function, which is replaced there.
    strict        True: a call that ours does not support raises RuntimeError. False: Unsloth's own
                  function computes it.
    any_version   False: under a version of Unsloth that was not tested, the first calls are
                  compared with Unsloth's own functions, and RuntimeError is raised if they differ.
                  True: they are not compared.

    Returns `Slots`: `undo()` restores Unsloth's functions, and `counts` has the number of calls.
    Raises RuntimeError if a function is replaced already or has other arguments, and AttributeError
    if the module of the trainer does not have the function.
    """
    if hasattr(
        sys.modules.get("unsloth_zoo.rl_replacements"), "grpo_chunked_hidden_states_logprobs"
    ):
        return ADAPTER.bind(
            selective_log_softmax, log_softmax_and_entropy, strict=strict, any_version=any_version
        )
    # Up to Unsloth 2026.8: replace the copy in the generated module.
    slots = Slots(ADAPTER, strict, any_version)
    slots.bind(
        selective_log_softmax, f"{trainer.__module__}.chunked_hidden_states_selective_log_softmax"
    )
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
    max_rows_per_chunk: int | None = None,
    lm_head_bias: Tensor | None = None,
    support_top_k: int = 0,
    support_top_p: float = 1.0,
    support_min_p: float = 0.0,
    support_triton_sampler: bool = False,
    support_excluded_ids: Tensor | None = None,
    fp32_lm_head: bool | None = None,
    fused_linear: bool | None = None,
) -> Tensor:
    """Return the log-probs of index, fp32 [B, T], on the device of hidden_states.

    hidden_states   [B, T, H]
    lm_head         [V, H], the weight of the head
    index           int64 [B, T], the targets
    logit_scale_multiply, logit_scale_divide, logit_softcapping
                    applied to the logits in this order; 0 for none
    temperature     divides the logits after that
    lm_head_bias    [V], or None
    fp32_lm_head    True: matmuls in fp32, even under autocast. None: the setting of the environment
                    variable UNSLOTH_VLLM_FP32_LM_HEAD
    support_top_k, support_top_p, support_min_p, support_excluded_ids
                    a softmax over candidate sets. If one is set, Unsloth computes the call.
    support_triton_sampler
                    not used: it breaks ties in candidate sets
    chunks, max_rows_per_chunk, fused_linear
                    not used: they choose among Unsloth's own implementations
    """
    if (
        support_top_k > 0
        or support_top_p < 1
        or support_min_p > 0
        or support_excluded_ids is not None
    ):
        raise NotCovered("a softmax over a kept set of tokens (support_top_k, ...)")
    logps = log_softmax_and_entropy(
        hidden_states,
        lm_head,
        index,
        logit_scale_multiply=logit_scale_multiply,
        logit_scale_divide=logit_scale_divide,
        logit_softcapping=logit_softcapping,
        temperature=temperature,
        lm_head_bias=lm_head_bias,
        fp32_lm_head=fp32_lm_head,
    )
    assert isinstance(logps, Tensor)  # a tuple only with return_entropy
    return logps


@with_trainer_names(targets="index", hidden="hidden_states", weight="lm_head", bias="lm_head_bias")
def log_softmax_and_entropy(
    hidden_states: Tensor,
    lm_head: Tensor,
    index: Tensor,
    chunks: int = 4,
    logit_scale_multiply: float = 0.0,
    logit_scale_divide: float = 0.0,
    logit_softcapping: float = 0.0,
    temperature: float = 1.0,
    max_rows_per_chunk: int | None = None,
    lm_head_bias: Tensor | None = None,
    return_entropy: bool = False,
    fp32_lm_head: bool | None = None,
    fused_linear: bool | None = None,
    entropy_requires_grad: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-probs of index, or with return_entropy (log-probs, entropy), fp32 [B, T] each.

    hidden_states           [B, T, H]
    lm_head, lm_head_bias   [V, H], [V] or None
    index                   int64 [B, T], the targets
    return_entropy          whether the entropy is returned, in nats
    entropy_requires_grad   whether the entropy is differentiable

    The other arguments are those of `selective_log_softmax`. The softmax is over the vocabulary.

    The decorator makes errors use the names of these arguments.
    """
    require_supported(hidden_states, lm_head)
    if fp32_lm_head is None:
        fp32_lm_head = os.environ.get("UNSLOTH_VLLM_FP32_LM_HEAD", "0").strip().lower() in (
            "1",
            "true",
            "on",
            "yes",
        )
    # 0 stands for no scale.
    scale = (logit_scale_multiply or 1.0) / (logit_scale_divide or 1.0)
    # A model spread over several devices has its head on the last one.
    hidden = hidden_states.to(lm_head.device)
    ids = index.to(lm_head.device)
    device_type = lm_head.device.type
    matmul_context: Any = nullcontext()  # whether the matmuls below run under autocast
    if fp32_lm_head or lm_head.dtype == torch.float32:
        hidden = hidden.float()
        if fp32_lm_head:
            matmul_context = torch.autocast(device_type, enabled=False)
    elif not torch.is_autocast_enabled(device_type):
        # Unsloth's matmul has the dtype of the head. Converting hidden states here would round
        # their gradient to it, which fp16 cannot hold above 65,504. Under autocast the kernels
        # convert them.
        matmul_context = torch.autocast(device_type, lm_head.dtype)
    with matmul_context:
        logps, entropy = log_probs_of(
            hidden,
            ids,
            head=Head(lm_head, lm_head_bias),
            transform=LogitTransform(temperature, softcap=logit_softcapping or None, scale=scale),
            entropy=entropy_mode(return_entropy, entropy_requires_grad),
        )
    logps = logps.to(hidden_states.device)
    return logps if entropy is None else (logps, entropy.to(hidden_states.device))
