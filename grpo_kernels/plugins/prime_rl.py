"""prime-rl: a custom loss. The trainer imports this module when it starts, and the import also puts
the head on our kernels.

    [trainer.loss]
    type = "custom"
    import_path = "grpo_kernels.plugins.prime_rl.loss"
    kwargs = { objective = "ipo" }

For the loss alone, name `grpo_kernels.integrations.prime_rl.loss`.
"""

from ..integrations import prime_rl
from . import once

#: fn(LossInputs, objective=, changes=) -> LossOutputs.
loss = prime_rl.loss

SLOTS = once(
    "prime_rl",
    prime_rl.bind,
    lambda _: "the head of prime-rl runs on our kernels, with a custom loss.",
)
