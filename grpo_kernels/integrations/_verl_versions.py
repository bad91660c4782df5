"""In what verl's releases differ: the verl that is here is asked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

_by_sequence: dict[Callable[..., Any], bool] = {}


def gspo_by_sequence(config: Any) -> bool:
    """Whether verl's GSPO takes the mean of its sequences' means whatever loss_agg_mode is, as it does before 0.9.1.

    config   of verl's actor, which its losses ask for. Its step has no part in the answer, which is kept."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    theirs = POLICY_LOSS_REGISTRY["gspo"]
    if theirs not in _by_sequence:
        plain = copy.copy(config)
        vars(plain)["global_batch_info"] = {}  # the config refuses an assignment
        # Sequences of 2 tokens and of 1, whose sums are not their means.
        logps, advantages = torch.zeros(2, 2), torch.tensor([[1.0, 1.0], [3.0, 3.0]])
        given = logps, logps, advantages, torch.tensor([[1.0, 1.0], [1.0, 0.0]])
        sums, means = (float(theirs(*given, f"seq-mean-token-{kind}", plain)[0]) for kind in ("sum", "mean"))
        _by_sequence[theirs] = sums == means
    return _by_sequence[theirs]
