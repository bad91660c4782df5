"""What a run starts with: what can be wrong is found out first, then model, data and rewards are loaded."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from ..formulas.filters import EntropyQuantile
from ..objective import Objective
from . import require
from .config import TrainConfig
from .data import EVAL_PROMPTS, Row, encode, load_rows
from .loading import check_backend, check_liger, check_names, load_policy, pick_device, prepare_policy
from .parallel import same_on_all_ranks
from .ranks import Ranks
from .rewards import RewardFunction, RewardModel, resolve

RowLists = tuple[list[Row], list[Row]]


class Loaded(NamedTuple):
    model: Any
    tokenizer: Any
    rewards: list[RewardFunction]
    train_rows: list[Row]
    eval_rows: list[Row]


def check(config: TrainConfig, model: Any, tokenizer: Any, rows: RowLists | None) -> torch.device:
    """Refuse what is known to be wrong before anything is made or loaded. Returns the device of this process."""
    device = pick_device(config.device)
    check_backend("eager" if config.loss == "eager" else config.backend, device)
    if config.liger:
        check_liger(device)
    if (model is None) != (tokenizer is None):
        raise ValueError("model and tokenizer go together: pass both, or neither and name them in the config.")
    for name, value in (("model", model or config.model), ("dataset", rows or config.dataset)):
        if not value:
            raise ValueError(f"{name}='': name one in the config, or pass it to Trainer.")
    if model is None:
        check_names(config)
    for package in ("matplotlib", "tqdm"):
        require(package)
    return device


def check_prompts(config: TrainConfig, ranks: Ranks) -> None:
    if config.prompts_per_step < ranks.world:
        raise ValueError(
            f"prompts_per_step={config.prompts_per_step}: the {ranks.world} processes of this run take a prompt each at "
            "least, with all its completions; raise it, or start fewer."
        )


def load(
    config: TrainConfig, ranks: Ranks, model: Any, tokenizer: Any, rows: RowLists | None, rewards: list[RewardFunction] | None
) -> Loaded:
    """What was not given comes from where the config says."""
    rewards = list(rewards or map(resolve, config.rewards))
    if model is None:
        model, tokenizer = load_policy(config, ranks.device)
    if config.reward_model is not None:
        rewards.append(RewardModel(config.reward_model, ranks.device))
    train_rows, eval_rows = rows or load_rows(config)

    def encoded(rows: list[Row], which: str) -> list[Row]:
        kept = encode(rows, tokenizer, config, which)
        if len(kept) < len(rows) and ranks.main:
            limit = config.max_prompt_tokens
            print(f"left out {len(rows) - len(kept)} of {len(rows)} {which} prompts: longer than max_prompt_tokens={limit}")
        return kept

    train_rows = encoded(train_rows, "training")
    eval_rows = encoded(eval_rows[: config.eval_prompts or EVAL_PROMPTS], "held-out") if config.eval_steps else []
    model = prepare_policy(model, config)
    if ranks.world == 1 or config.parallel != "fsdp2":  # which moves a layer at a time, and keeps a shard of it
        model.to(ranks.device)
    same_on_all_ranks(model, ranks)
    return Loaded(model, tokenizer, rewards, train_rows, eval_rows)


def of_all_ranks(objective: Objective) -> Objective:
    """The quantile of entropy over the tokens of all ranks, as that of one process is over its whole batch."""
    quantile = objective.filter(EntropyQuantile)
    if quantile is None:
        return objective
    whole = dataclasses.replace(quantile, process_group=torch.distributed.group.WORLD)
    return dataclasses.replace(objective, filters=tuple(whole if f is quantile else f for f in objective.filters))
