"""axolotl: its GRPO trainers with our loss.

    plugins:
      - grpo_kernels.plugins.axolotl.FusedGRPO
    grpo_kernels_strict: false

With TRL from 1.15 on the whole loss is patched into the trainer; with the TRL before 1.14 that axolotl may pin, the loss in Liger's
place, which wants `trl: {use_liger_loss: true}`. Trainers of other methods are left as they are."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from ..integrations import liger_slot, trl
from ._once import announce


class Settings(BaseModel):
    """What axolotl's configuration may hold for this plugin."""

    grpo_kernels_strict: bool = False


class FusedGRPO(BasePlugin):
    """Patches each GRPO trainer that axolotl makes; `trainer.fused_loss` counts what ran, or the result of `liger_slot.patch`."""

    def get_input_args(self) -> str:
        return f"{__name__}.{Settings.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        from trl import GRPOTrainer
        from trl.trainer import utils

        named = type(trainer).__name__
        if not isinstance(trainer, GRPOTrainer):
            announce(f"{named} is no GRPO trainer of TRL's, and is left as it is.")
            return
        if "fused_loss" in vars(trainer):
            return
        strict = bool(cfg.get("grpo_kernels_strict"))
        if hasattr(utils, "add_fused_lm_head"):
            trl.patch(trainer, strict=strict)
        else:
            vars(trainer)["fused_loss"] = liger_slot.patch(trainer, strict=strict)
        announce(f"the loss of {named} is ours; trainer.fused_loss.counts says what ran.")
