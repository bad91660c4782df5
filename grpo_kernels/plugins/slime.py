"""slime: two paths for its command line.

    --custom-megatron-init-path grpo_kernels.plugins.slime.init
    --loss-type custom_loss --custom-loss-function-path grpo_kernels.plugins.slime.loss

`init` computes log-probs and entropy with our kernels, over replayed sets if slime's arguments ask
for that. `loss` is the policy loss that slime's arguments describe, computed by our token stage.
Without `loss`, slime's own loss is used.
"""

from typing import Any

from ..integrations import slime
from . import once

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
        lambda: slime.bind(replay=replay),
        lambda _: "log-probs and entropy of slime run on our kernels.",
    )
