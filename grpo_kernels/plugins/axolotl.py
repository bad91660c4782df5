"""axolotl: its GRPO trainers with our loss.

    plugins:
      - grpo_kernels.plugins.axolotl.FusedGRPO
    grpo_kernels_strict: false

With TRL 1.15 and later the whole loss is patched into the trainer. axolotl may pin a TRL before 1.14; then our loss takes the
place of Liger's, which needs `trl: {use_liger_loss: true}`. Trainers of other methods are not changed."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from ..integrations import liger_slot, trl
from ._once import announce


class Settings(BaseModel):
    """The options of this plugin in axolotl's configuration."""

    grpo_kernels_strict: bool = False


class FusedGRPO(BasePlugin):
    """Patches each GRPO trainer that axolotl creates. `trainer.fused_loss` is the result of `trl.patch` or of
    `liger_slot.patch`."""

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
