"""miles: `--custom-megatron-init-path grpo_kernels.plugins.miles.init` computes log-probs and
entropy with our kernels. They are taken over the sets that rollouts have recorded, if miles'
arguments ask for that.

    --custom-megatron-before-log-prob-hook-path grpo_kernels.plugins.miles.before_log_probs
    --custom-megatron-before-train-step-hook-path grpo_kernels.plugins.miles.before_train_step

With `init` and these two hooks, logits are not computed: log-probs of the response tokens come from
hidden states and the output weight.
"""

from typing import Any

from ..integrations import miles
from . import once, require_init

HOOKS = ("custom_megatron_before_log_prob_hook_path", "custom_megatron_before_train_step_hook_path")


def init(args: Any) -> None:
    """Bind miles' functions in this process; args are miles' arguments.

    A second call does nothing.
    """
    once(
        "miles",
        lambda: miles.bind(args, head=names_a_hook(args)),
        lambda _: "log-probs and entropy of miles run on our kernels.",
    )


def names_a_hook(args: Any) -> bool:
    """Return whether miles's arguments name a hook of this module."""
    paths = [getattr(args, name, None) or "" for name in HOOKS]
    return any(path.startswith(f"{__name__}.") for path in paths)


def before_log_probs(args: Any, model: Any, store_prefix: str) -> None:
    """Make the model return hidden states in place of logits; args are miles's arguments."""
    skip_logits(args, model)


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Make the model return hidden states in place of logits; args are miles's arguments."""
    skip_logits(args, model)


def skip_logits(args: Any, model: Any) -> None:
    """Call `miles.skip_logits` if `init` has bound what needs hidden states."""
    require_init("miles", __name__)
    miles.skip_logits(args, model)
