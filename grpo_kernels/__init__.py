"""grpo_kernels: the GRPO loss at the speed of the hardware, in any trainer."""

__version__ = "0.2.0.dev0"  # before the imports, one of which compares it

from .advantages import group_advantages
from .batch import TokenBatch
from .logprobs import linear_logprobs, token_logprobs
from .losses import LossOutput, grpo_loss, linear_grpo_loss
from .model import loss_from_model
from .objective import Objective
from .transform import LogitTransform

__all__ = [
    "LogitTransform",
    "LossOutput",
    "Objective",
    "TokenBatch",
    "group_advantages",
    "grpo_loss",
    "linear_grpo_loss",
    "linear_logprobs",
    "loss_from_model",
    "token_logprobs",
]
