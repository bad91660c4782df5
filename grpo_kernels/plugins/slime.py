"""slime: two paths for its command line.

    --custom-megatron-init-path grpo_kernels.plugins.slime.init
    --loss-type custom_loss --custom-loss-function-path grpo_kernels.plugins.slime.loss

`init` computes log-probs and entropy with our kernels, over replayed sets if slime's arguments ask
for that. `loss` is the policy loss that slime's arguments describe, computed by our token stage.
Without `loss`, slime's own loss is used.

    --custom-megatron-before-log-prob-hook-path grpo_kernels.plugins.slime.before_log_probs
    --custom-megatron-before-train-step-hook-path grpo_kernels.plugins.slime.before_train_step

With `init` and these two hooks, logits are not computed: log-probs of the response tokens come from
hidden states and the output weight.
"""

from typing import Any

from ..integrations import slime
from . import once, require_init

HOOKS = ("custom_megatron_before_log_prob_hook_path", "custom_megatron_before_train_step_hook_path")

#: (args, batch, logits, sum_of_sample_mean) -> (loss, metrics) for the objective that args
#: describe.
loss = slime.policy_loss()


def init(args: Any) -> None:
    """Bind slime's functions in this process; args are slime's arguments.

    A second call does nothing.
    """
    replay = getattr(args, "rollout_top_p", 1.0) < 1.0
    once(
        "slime",
        lambda: slime.bind(replay=replay, head=names_a_hook(args)),
        lambda _: "log-probs and entropy of slime run on our kernels.",
    )


def names_a_hook(args: Any) -> bool:
    """Return whether slime's arguments name a hook of this module."""
    paths = [getattr(args, name, None) or "" for name in HOOKS]
    return any(path.startswith(f"{__name__}.") for path in paths)


def before_log_probs(args: Any, model: Any, store_prefix: str) -> None:
    """Make the model return hidden states in place of logits; args are slime's arguments."""
    skip_logits(args, model)


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Make the model return hidden states in place of logits; args are slime's arguments."""
    skip_logits(args, model)


def skip_logits(args: Any, model: Any) -> None:
    """Call `slime.skip_logits` if `init` has bound what needs hidden states."""
    require_init("slime", __name__)
    slime.skip_logits(args, model)
