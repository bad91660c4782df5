"""Computes verl's log-probs and entropy with our kernels. Set in its configuration
`actor_rollout_ref.model.external_lib=grpo_kernels.plugins.verl_head`, or
VERL_USE_EXTERNAL_MODULES=grpo_kernels.plugins.verl_head. With use_fused_kernels logits never exist.
"""

from ..integrations import verl
from . import once

SLOTS = once(
    "verl_head", verl.bind, lambda _: "log-probs and entropy of verl's head run on our kernels."
)
