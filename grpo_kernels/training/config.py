"""The configuration of a run, whose fields are also the options of `python -m grpo_kernels train`: checked once, and what follows
from it."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..batch import TokenBatch
from ..formulas.filters import EntropyQuantile
from ..objective import Objective
from ..presets import PRESETS
from ..rewards.advantages import BASELINES, SCALES
from ..rewards.advantages import NUMERICS as CONSTANTS
from ..rewards.corrections import CORRECTIONS
from ..rewards.estimators import ADVANTAGES, Estimator, Evidence, lookup
from ..rows.selection import FINEST
from ..specs import OVER
from .command_line import with_options
from .fields import DTYPES, EXACT, KNOWN, LOSSES, RATIOS, SCHEDULES, TRAINABLE, TRAINERS, Fields
from .parallel import LAYOUTS
from .trackers import TRACKERS


@dataclass(frozen=True)
class TrainConfig(Fields):
    """One training run. Raises ValueError naming the field, its value and what would be right."""

    def __post_init__(self) -> None:
        check = self._check
        for name in ("steps", "prompts_per_step", "group_size", "num_updates", "max_prompt_tokens", "max_new_tokens"):
            check(name, getattr(self, name) >= 1, "it must be at least 1.")
        for name in (
            "ref_refresh_steps", "micro_batch", "top_k", "warmup_steps", "weight_decay", "eval_steps", "checkpoint_steps",
            "sample_every", "sample_count",
        ):  # fmt: skip
            check(name, getattr(self, name) >= 0, "it must be 0 or more.")
        for name, choices in (
            ("preset", TRAINABLE),
            ("numerics", (None, *TRAINERS)),
            ("advantage_baseline", (None, *BASELINES)),
            ("advantage_scale", (None, *SCALES)),
            ("lr_schedule", SCHEDULES),
            ("loss", LOSSES),
            ("dtype", DTYPES),
            ("parallel", LAYOUTS),
            ("ratio_to", RATIOS),
            ("entropy_over", OVER),
        ):
            check(name, getattr(self, name) in choices, f"it must be one of {', '.join(c for c in choices if c)}.")
        known = ("jsonl", *TRACKERS)
        check("log_to", set(self.log_to) <= set(known), f"it must be of {', '.join(known)}.")
        check("prompt_template", "{prompt}" in self.prompt_template, "it must contain {prompt}.")
        check("rewards", bool(self.rewards) or self.reward_model is not None, "name a reward function, or set reward_model.")
        scorers = len(self.rewards) + (self.reward_model is not None)
        weights = self.reward_weights
        remedy = f"give one weight for each of the {scorers} rewards."
        check("reward_weights", weights is None or len(weights) == scorers, remedy)
        check("beta", self.beta is None or 0 <= self.beta < math.inf, "the KL weight is a finite number >= 0.")
        check("entropy_coef", math.isfinite(self.entropy_coef), "it must be finite.")
        check("entropy_target", 0 <= self.entropy_target < math.inf, "it is an entropy in nats; 0 switches it off.")
        adaptive = self.entropy_target == 0 or 0 <= self.entropy_coef <= 1
        check("entropy_coef", adaptive, "with entropy_target it is where the weight starts, in [0, 1].")
        check("entropy_share", 0 < self.entropy_share <= 1, "it is a share in (0, 1]; 1 keeps all tokens.")
        check("lr", 0 <= self.lr < math.inf, "it must be a finite number >= 0.")
        check("betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "give two numbers in [0, 1).")
        check("max_grad_norm", self.max_grad_norm > 0, "it must be above 0; inf switches clipping off.")
        remedy = "it must be at least 1; eval_steps=0 switches evaluation off."
        check("eval_prompts", self.eval_prompts is None or self.eval_prompts >= 1, remedy)
        check("keep_checkpoints", self.keep_checkpoints >= 2, "keep at least 2, so that a damaged one has a predecessor.")
        self.check_sampling()
        objective = self.objective  # what does not go together is refused now
        weighted = self.kl is None or self.beta is not None or objective.beta > 0
        check("kl", weighted, f"its weight is 0 in preset={self.preset!r}: set beta as well, or leave kl out.")
        remedy = "it is in [1/4096, 1], and goes with loss=linear and a KL, if any, of the sampled tokens."
        drawn = self.loss == "linear" and objective.exact is None and FINEST <= self.sparse_step <= 1
        check("sparse_step", self.sparse_step == 0 or drawn, remedy)
        self.check_advantages()
        surrogate, bonus = objective.surrogate, self.entropy_coef != 0 or self.entropy_target != 0
        alone = surrogate.zero_at_zero_advantage and not surrogate.selects and self.entropy_share == 1
        remedy = "this objective wants those completions too, for a KL, an entropy bonus or quantile, or its surrogate."
        check("drop_zero_variance", not self.drop_zero_variance or (alone and objective.beta == 0 and not bonus), remedy)
        remedy = "there is no reference to refresh at beta=0: set beta above 0."
        check("ref_refresh_steps", self.ref_refresh_steps == 0 or objective.beta > 0, remedy)

    def _check(self, name: str, ok: bool, remedy: str) -> None:
        if not ok:
            raise ValueError(f"{name}={getattr(self, name)!r}: {remedy}")

    def check_sampling(self) -> None:
        check = self._check
        remedy = "it divides the logits and must be above 0; for greedy use eval_temperature=0."
        check("temperature", 0 < self.temperature < math.inf, remedy)
        check("eval_temperature", 0 <= self.eval_temperature < math.inf, "it must be 0 (greedy) or above.")
        check("top_p", 0 < self.top_p <= 1, "it must be in (0, 1]; 1 switches it off.")
        check("min_p", 0 <= self.min_p <= 1, "it must be in [0, 1]; 0 switches it off.")
        check(
            "replay",
            not self.replay or self.truncates,
            "nothing is cut off at top_p=1, top_k=0, min_p=0: there are no sets to train over. Set one of them, or leave it out.",
        )
        for name in ("top_k", "min_p"):
            check(
                name,
                getattr(self, name) != 1 or not self.replays,
                "it leaves one token to sample from, whose probability cannot change: there is nothing to train over the sets. "
                "Sample from more, or set replay=False.",
            )
        check(
            "ratio_to",
            self.ratio_to == "policy" or not self.corrections,
            f"the ratio to the sampler holds what corrections={self.corrections} weigh a second time: leave one of them out.",
        )

    @property
    def truncates(self) -> bool:
        """Whether sampling leaves tokens out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def replays(self) -> bool:
        """Whether the loss is over the sets that were sampled from."""
        return self.truncates if self.replay is None else self.replay

    def check_advantages(self) -> None:
        """Refuse unknown names, options and values, by using them on a batch of zeros."""
        two, tokens = torch.zeros(2), torch.zeros(2, 1)
        mask = tokens == 0
        evidence = Evidence(
            two, group_size=2, columns=tokens, reward_weights=[1.0], mask=mask, greedy_rewards=two, old_logps=tokens,
            sum_squares=tokens + 1.0,
        )  # fmt: skip
        batch = TokenBatch(mask.long(), two, mask=mask, old_logps=tokens, sampler_logps=tokens)
        try:
            self.estimate(evidence)
            for correct in self.corrected_by:
                batch = correct(batch, finished=mask[:, 0])
        except TypeError as error:  # an option that they do not have
            raise ValueError(str(error)) from error

    @property
    def estimate(self) -> Callable[[Evidence], torch.Tensor]:
        """The estimator of advantages with its options."""
        name, options = with_options(self.advantages)
        estimator = lookup(ADVANTAGES, name, "advantages")
        lacking = [field for field in estimator.needs if field not in KNOWN]
        if lacking:
            raise ValueError(f"advantages={name!r}: it takes {', '.join(lacking)}, of which this trainer has none.")
        return partial(estimator, **{**self._for_groups(estimator), **options})

    @property
    def estimate_steps(self) -> Callable[[Evidence], torch.Tensor]:
        """The estimator for process rewards."""
        return partial(ADVANTAGES["process"], **self._for_groups(ADVANTAGES["process"]))

    @property
    def needs(self) -> tuple[str, ...]:
        """What the estimator of advantages takes."""
        return ADVANTAGES[with_options(self.advantages)[0]].needs

    @property
    def corrected_by(self) -> list[Callable[..., TokenBatch]]:
        """The corrections with their options."""
        named = [with_options(text) for text in self.corrections]
        return [partial(lookup(CORRECTIONS, name, "corrections"), **options) for name, options in named]

    @property
    def objective(self) -> Objective:
        changes: dict[str, typing.Any] = {"entropy_coef": self.entropy_coef}
        kl = EXACT.get(self.kl or "", self.kl)
        changes |= {name: value for name, value in (("beta", self.beta), ("kl", kl)) if value is not None}
        if PRESETS[self.preset].aggregate == "constant":
            changes["max_tokens"] = self.max_new_tokens
        objective = Objective.preset(self.preset, numerics=self.numerics, **changes)
        if self.entropy_share < 1:
            objective = replace(objective, filters=(*objective.filters, EntropyQuantile(self.entropy_share)))
        return objective

    def _for_groups(self, estimator: Estimator) -> dict[str, typing.Any]:
        """Baseline and scale as chosen, and the constants of `numerics` where the estimator has such options and says nothing."""
        constants = CONSTANTS.get(self.numerics or "", {})
        own = {n: value for n, value in constants.items() if n in estimator.option_names - estimator.options.keys()}
        chosen = {"baseline": self.advantage_baseline, "scale": self.advantage_scale}
        return own | {name: value for name, value in chosen.items() if value is not None}

    def lr_at(self, update: int) -> float:
        """The learning rate of an optimizer step; a plain function of its number, so there is nothing to save."""
        if update < self.warmup_steps:
            return self.lr * (update + 1) / self.warmup_steps
        done = (update - self.warmup_steps) / max(self.steps * self.num_updates - self.warmup_steps, 1)
        if self.lr_schedule == "linear":
            return self.lr * max(1.0 - done, 0.0)
        if self.lr_schedule == "cosine":
            return self.lr * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
        return self.lr
