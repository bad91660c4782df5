"""The losses that TRL and Liger name alike, and numbers for them that are no defaults."""

from __future__ import annotations

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
#: Of SAPO and VESPO, under the names that both have.
CONSTANTS = {
    "sapo_temperature_pos": 0.9, "sapo_temperature_neg": 1.3, "vespo_k_pos": 1.8, "vespo_lambda_pos": 2.6, "vespo_k_neg": 2.7,
    "vespo_lambda_neg": 2.1,
}  # fmt: skip
