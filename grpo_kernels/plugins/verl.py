"""verl finds this module by the entry point `verl.plugins` and imports it in every process. The policy losses of
`integrations.verl` are then in verl's registry, and only `actor_rollout_ref.actor.policy_loss.loss_mode=fused_vanilla` has to
be set.

Nothing of verl is replaced. For log-probs and entropy of its head, name the plugin `grpo_kernels.plugins.verl_head`.
VERL_USE_EXTERNAL_PLUGINS=none turns both off. verl hides errors of plugins, so they are logged here."""

from ..integrations import verl
from ._once import once

NAMES = once(
    "verl",
    verl.register,
    lambda names: f"verl has {len(names)} more policy losses, {names[0]} and so on: policy_loss.loss_mode chooses.",
)
