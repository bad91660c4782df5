"""verl finds this by the entry point `verl.plugins` and imports it in every process: the policy losses of `integrations.verl` are
then in its registry, and `actor_rollout_ref.actor.policy_loss.loss_mode=fused_vanilla` is all there is to set.

Nothing of verl is replaced. Log-probs and entropy of its head are another plugin's, `grpo_kernels.plugins.verl_head`, which you
name. VERL_USE_EXTERNAL_PLUGINS=none leaves both out. verl hides the errors of plugins, so they are logged here."""

from ..integrations import verl
from ._once import once

NAMES = once(
    "verl",
    verl.register,
    lambda names: f"verl has {len(names)} more policy losses, {names[0]} and so on: policy_loss.loss_mode chooses.",
)
