"""The start of a run: the configuration is checked first, then model, data and rewards are loaded."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import torch

from ..formulas.filters import EntropyQuantile
from ..objective import Objective
from . import require, trackers
from .config import TrainConfig
from .data import EVAL_PROMPTS, Row, encode, load_rows
from .loading import check_backend, check_liger, check_names, load_model, load_policy, pick_device, prepare_policy
from .ranks import Ranks
from .reward_calls import RewardFunction
from .rewards import RewardModel, resolve

RowLists = tuple[list[Row], list[Row]]


class Loaded(NamedTuple):
    model: Any
    tokenizer: Any
    rewards: list[RewardFunction]
    train_rows: list[Row]
    eval_rows: list[Row]
    reference: Any  # a frozen model, or None


def check(config: TrainConfig, model: Any, tokenizer: Any, rows: RowLists | None, teacher: Any) -> torch.device:
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
    check_names(config, ("dataset", "reward_model", "teacher") if rows is None else ("reward_model", "teacher"))
    if model is None:
        check_names(config, ("model",))
    check_teacher(config, model, teacher)
    trackers.check(config.log_to)
    for package in ("matplotlib", "tqdm", "yaml"):
        require(package)
    return device


def check_teacher(config: TrainConfig, model: Any, teacher: Any) -> None:
    named = config.teacher is not None
    if model is not None and teacher is not None:
        own = set(map(id, model.parameters()))
        if any(id(p) in own for p in teacher.parameters()):
            raise ValueError("teacher shares parameters with model, and is frozen: pass a copy of it, copy.deepcopy(model).")
    if named and teacher is not None:
        raise ValueError(f"teacher={config.teacher!r}, but a model is passed as well: leave one of them out.")
    if (named or teacher is not None) and (config.objective.beta == 0 or config.ref_refresh_steps):
        raise ValueError(
            "teacher is given, but at beta=0 nothing looks at it, and with ref_refresh_steps the policy would be copied over it: set beta "
            "above 0 and ref_refresh_steps to 0."
        )
    if "distillation" in config.preset and not named and teacher is None:
        raise ValueError(f"preset={config.preset!r}: it learns from a teacher: name one, or pass it to Trainer.")
    if config.objective.exact is not None and config.parallel == "fsdp2":
        raise ValueError(
            f"kl={config.kl!r}: the head of a reference in shards is gathered in its own forward only: use parallel='ddp', or an "
            "estimator such as k3."
        )


def check_prompts(config: TrainConfig, ranks: Ranks) -> None:
    if config.prompts_per_step < ranks.world:
        raise ValueError(
            f"prompts_per_step={config.prompts_per_step}: the {ranks.world} processes of this run take a prompt each at "
            "least, with all its completions; raise it, or start fewer."
        )


def load(
    config: TrainConfig,
    ranks: Ranks,
    model: Any,
    tokenizer: Any,
    rows: RowLists | None,
    rewards: list[RewardFunction] | None,
    teacher: Any,
) -> Loaded:
    """Load what the caller did not pass, from the sources that the config names."""
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
    if teacher is None and config.teacher is not None:
        teacher = load_model(config.teacher, config, ranks.device)
    model = prepare_policy(model, config)
    for each in (model, teacher):
        # fsdp2 moves a layer at a time, and keeps a shard of it.
        if each is not None and (ranks.world == 1 or config.parallel != "fsdp2"):
            each.to(ranks.device)
    ranks.make_same(model)
    reference = None
    if config.objective.beta:
        reference = copy.deepcopy(model) if teacher is None else teacher
    if teacher is not None:
        of_teacher, own = (each.config.get_text_config().vocab_size for each in (teacher, model))
        if of_teacher != own:
            sizes = f"the teacher has a vocabulary of {of_teacher}, the model of {own}"
            raise ValueError(f"teacher: {sizes}: they must have the same tokenizer.")
    return Loaded(model, tokenizer, rewards, train_rows, eval_rows, reference)


def of_all_ranks(objective: Objective) -> Objective:
    """The quantile of entropy over the tokens of all ranks, as that of one process is over its whole batch."""
    quantile = objective.filter(EntropyQuantile)
    if quantile is None:
        return objective
    whole = dataclasses.replace(quantile, process_group=torch.distributed.group.WORLD)
    return dataclasses.replace(objective, filters=tuple(whole if f is quantile else f for f in objective.filters))
