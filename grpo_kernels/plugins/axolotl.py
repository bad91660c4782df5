"""axolotl: its GRPO trainers with our loss.

    plugins:
      - grpo_kernels.plugins.axolotl.FusedGRPO
    trl:
      use_liger_loss: true
    grpo_kernels_strict: false

axolotl pins its TRL (0.19: TRL 1.9), which keeps the loss of this option as an attribute: ours
takes the place of Liger's. Trainers of other methods are not changed.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from ..integrations import liger
from . import announce


class Settings(BaseModel):
    """The options of this plugin in axolotl's configuration."""

    grpo_kernels_strict: bool = False


class FusedGRPO(BasePlugin):
    """Patches each GRPO trainer that axolotl creates.

    `trainer.fused_loss` is the result of `liger.patch`.
    """

    def get_input_args(self) -> str:
        return f"{__name__}.{Settings.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        from trl import GRPOTrainer

        named = type(trainer).__name__
        if not isinstance(trainer, GRPOTrainer):
            announce(f"{named} is no GRPO trainer of TRL's, and is left as it is.")
            return
        if "fused_loss" in vars(trainer):
            return
        vars(trainer)["fused_loss"] = liger.patch(
            trainer, strict=bool(cfg.get("grpo_kernels_strict"))
        )
        announce(f"the loss of {named} is ours; trainer.fused_loss.counts says what ran.")
