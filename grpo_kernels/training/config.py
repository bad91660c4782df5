"""The options of a training run: `TrainConfig`, which checks them, and one dataclass for each group
of `--help`. They are read from the command line and from YAML, and written as YAML.
"""

# ruff: noqa: RUF009
# `option` returns a new dataclasses.field.
from __future__ import annotations

import argparse
import ast
import math
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..batch import TokenBatch
from ..checks import LARGEST, SMALLEST, Checked, near_name, require, require_one_of
from ..formulas.divergence import Exact
from ..formulas.filters import EntropyQuantile
from ..objective import NUMERICS, PRESETS, Objective
from ..rewards.advantages import BASELINES, SCALES
from ..rewards.advantages import NUMERICS as CONSTANTS
from ..rewards.corrections import CORRECTIONS
from ..rewards.estimators import ADVANTAGES, Evidence, lookup
from . import require as package

#: Fields of `Evidence` that the trainer can give to estimators of advantages.
KNOWN = (
    "rewards",
    "columns",
    "reward_weights",
    "mask",
    "greedy_rewards",
    "old_logps",
    "sum_squares",
)
#: a2po needs values of the reference, which the trainer does not have.
TRAINABLE = tuple(name for name in PRESETS if name != "a2po")
#: prime-rl's KL is to the sampler, which here is the policy itself.
TRAINERS = tuple(name for name in NUMERICS if name != "prime-rl")
#: Values of the option `kl` that are exact divergences and not estimators.
EXACT = {
    "exact": Exact("reverse"),
    "exact-forward": Exact("forward"),
    "exact-jsd": Exact("jsd"),
    "exact-tv": Exact("tv"),
}
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


# ---- what can be set, in the order of `--help`


def option(default: Any, text: str, unit: str | None = None, **arguments: Any) -> Any:
    """Return a dataclass field for an option of the command line.

    default     its default, which --help shows unless it is None; "": a value is required
    text        what --help says about the option
    unit        the unit or kind of its value, which --help shows in place of the value
    arguments   other arguments of argparse's add_argument, such as choices
    """
    if default == "":
        shown_default = " (required)"
    elif default is None:  # the text says what None means
        shown_default = ""
    else:
        shown_default = f" (default: {default})"
    metadata = {"help": text + shown_default, **arguments}
    if unit:
        metadata["metavar"] = unit
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelAndData:
    _argument_group_name = "model and data"

    model: str = option(
        "",
        "path or Hub name of a causal language model with its tokenizer; its dropout stays off",
        "NAME",
    )
    dataset: str = option(
        "",
        "Hub name (openai/gsm8k), a folder laid out like a Hub data set, or a .jsonl / .json /"
        " .parquet / .csv file",
        "NAME",
    )
    dataset_config: str | None = option(
        None,
        "configuration of the data set; default: main, where there is one (gsm8k has main and"
        " socratic)",
        "NAME",
    )
    train_split: str = option("train", "split to train on", "NAME")
    eval_split: str = option(
        "test", "split to evaluate on; a lone file gives up its last rows instead", "NAME"
    )
    prompt_column: str | None = option(
        None,
        "column of the prompt, a text or a list of messages, which goes through the tokenizer's"
        " chat template; default: the first of prompt, question, problem",
        "NAME",
    )
    answer_column: str | None = option(
        None, "column of the reference answer; default: the first of answer, solution", "NAME"
    )
    prompt_template: str = option(
        "{prompt}", "text around a prompt that is a text; {prompt} stands for it", "TEXT"
    )
    chat: bool = option(
        False,
        "send a prompt that is a text as a user message through the tokenizer's chat template",
    )
    max_prompt_tokens: int = option(1024, "longer prompts are left out, with a count", "TOKENS")


@dataclass(frozen=True)
class RewardsAndAdvantages:
    _argument_group_name = "rewards and advantages"

    rewards: list[str] = option(
        ["exact"], "reward functions: exact, number, or module:function", "NAME"
    )
    reward_weights: list[float] | None = option(
        None, "one weight per reward function (then the reward model's); default: all 1", "WEIGHT"
    )
    reward_model: str | None = option(
        None,
        "path or Hub name of a sequence classifier with one output, added to the rewards; default:"
        " none",
        "NAME",
    )
    advantages: str = option(
        "group",
        "estimator of advantages, with options if any (reinforce_pp:gamma=0.99,baseline=mean): "
        + ", ".join(name for name, e in ADVANTAGES.items() if set(e.needs) <= set(KNOWN)),
        "NAME",
    )
    advantage_baseline: str | None = option(
        None,
        "what of the group to subtract from rewards; default: mean, or what `numerics` says",
        choices=BASELINES,
    )
    advantage_scale: str | None = option(
        None,
        "what to divide centred rewards by, see group_advantages; default: group, or what"
        " `numerics` says",
        choices=SCALES,
    )
    drop_zero_variance: bool = option(
        False,
        "leave out completions whose advantages are all 0, the model's passes included; the"
        " denominator keeps them",
    )


@dataclass(frozen=True)
class ObjectiveOptions:
    _argument_group_name = "objective"

    preset: str = option("grpo", "objective", choices=TRAINABLE)
    numerics: str | None = option(
        None, "compute the preset as this trainer does; default: the paper", choices=TRAINERS
    )
    beta: float | None = option(
        None,
        "weight of the KL to the reference model, which 0 does not load; default: the preset's, 0"
        " in the papers'",
        "WEIGHT",
    )
    kl: str | None = option(
        None,
        "KL estimator: k1, k2, k3, abs, or with + its straight-through form; or"
        f" {', '.join(EXACT)}: of all probabilities of policy and reference, at the cost of a"
        " product with the reference's head; default: the preset's",
        "NAME",
    )
    teacher: str | None = option(
        None,
        "path or Hub name of a model of the same tokenizer that takes the place of the reference,"
        " to distil from; default: none",
        "NAME",
    )
    ref_refresh_steps: int = option(
        0,
        "copy the policy into the reference every so many steps (iterative GRPO); 0 = never",
        "STEPS",
    )
    entropy_coef: float = option(0.0, "weight of the entropy bonus", "WEIGHT")
    entropy_target: float = option(
        0.0,
        "hold the entropy per token above this by moving the bonus's weight, which starts at"
        " entropy_coef; 0 = off",
        "NATS",
    )
    entropy_share: float = option(
        1.0,
        "train on this share of the tokens, those of the highest entropy (0.2: the 80/20 rule)",
        "SHARE",
    )
    ratio_to: str = option(
        "policy",
        "what the ratio is to: policy, the log-probs of the trainer before the first step on a"
        " batch; sampler, those that tokens were sampled with",
        choices=("policy", "sampler"),
    )
    corrections: list[str] = option(
        [],
        "weights and masks for what the sampler does otherwise than the policy that is trained"
        " (rounding; without replay also top-p, top-k, min-p), in this order, with options if any"
        " (tis:high=3): " + ", ".join(CORRECTIONS),
        "NAME",
    )


@dataclass(frozen=True)
class Sampling:
    _argument_group_name = "sampling"

    prompts_per_step: int = option(16, "prompts in a batch, over all processes", "PROMPTS")
    group_size: int = option(8, "completions per prompt, G", "COMPLETIONS")
    max_new_tokens: int = option(256, "budget of a completion", "TOKENS")
    temperature: float = option(1.0, "sampling temperature; the loss uses the same", "X")
    top_p: float = option(
        1.0, "sample from the smallest set of tokens with this probability; 1 = all", "SHARE"
    )
    top_k: int = option(0, "sample from the k most likely tokens; 0 = all", "TOKENS")
    min_p: float = option(
        0.0,
        "sample from tokens with at least this share of the largest probability; 0 = all",
        "SHARE",
    )
    replay: bool | None = option(
        None,
        "train over the sets of tokens that top_p, top_k and min_p left, as they were sampled from,"
        " and not over the whole vocabulary; default: where one of them cuts tokens off",
        nargs="?",
        const=True,
    )


@dataclass(frozen=True)
class Optimisation:
    _argument_group_name = "optimisation"

    steps: int = option(200, "training steps: one batch of completions each", "STEPS")
    num_updates: int = option(1, "optimizer steps on each batch; see ratio_to", "UPDATES")
    micro_batch: int = option(
        0,
        "completions per forward and backward pass of a process; 0 = all of its batch. Does not"
        " change the gradient",
        "COMPLETIONS",
    )
    lr: float = option(1e-6, "learning rate of AdamW", "RATE")
    lr_schedule: str = option(
        "constant",
        "after the warm-up; the last two end at 0",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = option(0, "optimizer steps of linear warm-up", "UPDATES")
    weight_decay: float = option(0.0, "decoupled weight decay", "RATE")
    betas: list[float] = option([0.9, 0.999], "AdamW's two betas", "BETA")
    max_grad_norm: float = option(1.0, "gradient norm clip; inf switches it off", "NORM")


@dataclass(frozen=True)
class DraftOptions:
    _argument_group_name = "draft head"

    draft_lr: float = option(
        0.0,
        "learning rate of a draft head for speculative decoding (multi-token prediction), which"
        " learns the policy's distributions and does not change the policy; 0 = none",
        "RATE",
    )


@dataclass(frozen=True)
class Evaluation:
    _argument_group_name = "evaluation"

    eval_steps: int = option(
        50,
        "evaluate every so many steps, before the first and after the last; 0 = never. accuracy is"
        " the share of held-out prompts whose completion gets at least 1 from the first reward,"
        " eval_reward the mean of all rewards",
        "STEPS",
    )
    eval_prompts: int | None = option(
        None,
        "held-out prompts per evaluation; default: at most 256, and of a lone file at most a tenth",
        "PROMPTS",
    )
    eval_temperature: float = option(0.0, "0 = greedy", "X")


@dataclass(frozen=True)
class Logging:
    _argument_group_name = "logging"

    progress: bool = option(True, "show a line for each step, samples and what the run came to")
    log_to: list[str] = option(
        ["jsonl"],
        "where metrics go: out/metrics.jsonl, which is always written, for a resumed run reads it;"
        " the others have to be installed, and accelerate with them",
        choices=("jsonl", *TRACKERS),
    )
    sample_every: int = option(
        10,
        "show some completions with reward and advantage every so many steps, and add them to"
        " out/samples.jsonl; 0 = never",
        "STEPS",
    )
    sample_count: int = option(
        2, "how many completions that shows, the first of the batch", "COMPLETIONS"
    )


@dataclass(frozen=True)
class OutputAndCheckpoints:
    _argument_group_name = "output and checkpoints"

    out: str = option(
        "runs/grpo",
        "folder of the run: config.yaml, metrics.jsonl, samples.jsonl, summary.txt, checkpoints and"
        " the final model",
        "FOLDER",
    )
    checkpoint_steps: int = option(
        50,
        "write a checkpoint every so many steps and after the last; 0 = only after the last",
        "STEPS",
    )
    keep_checkpoints: int = option(
        2, "checkpoints to keep, at least 2, so that a damaged one has a predecessor", "CHECKPOINTS"
    )
    resume: bool = option(
        False, "continue from the newest intact checkpoint in out; start afresh if there is none"
    )


@dataclass(frozen=True)
class Computation:
    _argument_group_name = "computation"

    loss: str = option(
        "linear",
        "linear: fused from hidden states, logits never exist; logits: fused on the model's logits;"
        " eager: plain PyTorch",
        choices=("linear", "logits", "eager"),
    )
    backend: str = option(
        "auto", "backend of the fused kernels, see `python -m grpo_kernels doctor`", "NAME"
    )
    attn_implementation: str = option(
        "auto",
        "auto, sdpa, eager, flash_attention_2, ...; auto: flash-attn where installed, else sdpa",
        "NAME",
    )
    liger: bool = option(
        False, "replace the model's norms, rotary embedding and MLP by liger-kernel's (GPU)"
    )
    parallel: str = option(
        "ddp",
        "model on several processes: ddp, a copy on each; fsdp2, parameters, gradients and"
        " optimizer in shards",
        choices=("ddp", "fsdp2"),
    )
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass")
    dtype: str = option(  # float16 would need a loss scaler
        "float32",
        "arithmetic of the model; parameters stay float32 (autocast)",
        choices=("float32", "bfloat16"),
    )
    device: str = option(
        "auto", "auto, cpu, cuda, cuda:1, ...; of several processes each takes its own", "NAME"
    )
    seed: int = option(0, "seed of the data order and of sampling", "N")


# ---- all options


@dataclass(frozen=True)
class TrainConfig(
    ModelAndData,
    RewardsAndAdvantages,
    ObjectiveOptions,
    Sampling,
    Optimisation,
    DraftOptions,
    Evaluation,
    Logging,
    OutputAndCheckpoints,
    Computation,
    Checked,
):
    """One training run. Raises ValueError naming the field, its value and what would be right."""

    ranges = (
        ("steps prompts_per_step group_size num_updates max_prompt_tokens max_new_tokens", "it must be at least 1.", 1, LARGEST),
        (
            "ref_refresh_steps micro_batch top_k warmup_steps weight_decay eval_steps checkpoint_steps sample_every sample_count",
            "it must be 0 or more.", 0, LARGEST,
        ),
        ("beta lr draft_lr", "it must be a finite number >= 0.", 0, LARGEST),
        ("temperature", "it divides the logits and must be above 0; for greedy use eval_temperature=0.", SMALLEST, LARGEST),
        ("eval_temperature", "it must be 0 (greedy) or above.", 0, LARGEST),
        ("top_p entropy_share", "it is a share in (0, 1]; 1 switches it off.", SMALLEST, 1),
        ("min_p", "it must be in [0, 1]; 0 switches it off.", 0, 1),
        ("entropy_coef", "it must be finite.", -LARGEST, LARGEST),
        ("entropy_target", "it is an entropy in nats; 0 switches it off.", 0, LARGEST),
        ("max_grad_norm", "it must be above 0; inf switches clipping off.", SMALLEST, math.inf),
        ("eval_prompts", "it must be at least 1; eval_steps=0 switches evaluation off.", 1, LARGEST),
        ("keep_checkpoints", "keep at least 2, so that a damaged one has a predecessor.", 2, LARGEST),
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check all options. Raise ValueError, which names an option, if one is wrong."""
        super().__post_init__()
        for f in fields(self):
            choices = f.metadata.get("choices", ())
            if not choices:
                continue
            value = getattr(self, f.name)
            values = value if isinstance(value, list) else [value]
            for one_value in values:
                if one_value is not None:
                    require_one_of(f.name, one_value, choices)
        are_betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        self._require(are_betas, "betas", "give two numbers in [0, 1).")
        has_place = "{prompt}" in self.prompt_template
        self._require(has_place, "prompt_template", "it must contain {prompt}.")
        self._check_rewards()
        self._check_sampling()
        self._check_objective()
        self._try_estimators()

    def _require(self, is_right: bool, name: str, remedy: str) -> None:
        """Raise ValueError with the value of the option `name` and the remedy, unless is_right."""
        require(is_right, name, getattr(self, name), remedy)

    def _check_rewards(self) -> None:
        """Raise ValueError unless there is a reward function, and one weight for each."""
        num_functions = len(self.rewards) + (self.reward_model is not None)
        remedy = "name a reward function, or set reward_model."
        self._require(num_functions > 0, "rewards", remedy)
        remedy = f"give one weight for each of the {num_functions} rewards."
        has_weights = self.reward_weights is None or len(self.reward_weights) == num_functions
        self._require(has_weights, "reward_weights", remedy)

    def _check_sampling(self) -> None:
        """Raise ValueError unless the options of sampling fit the sets that are trained over.

        They also must fit `ratio_to` and `corrections`.
        """
        remedy = (
            "nothing is cut off at top_p=1, top_k=0, min_p=0: there are no sets to train over. Set"
            " one of them, or leave it out."
        )
        self._require(not self.replay or self.truncates, "replay", remedy)
        # top_k=1 and min_p=1 both leave only the likeliest token.
        remedy = (
            "it leaves one token to sample from, whose probability cannot change: there is"
            " nothing to train over the sets. Sample from more, or set replay=False."
        )
        for name in ("top_k", "min_p"):
            self._require(getattr(self, name) != 1 or not self.replays, name, remedy)
        remedy = (
            f"the ratio to the sampler holds what corrections={self.corrections} weigh a second"
            " time: leave one of them out."
        )
        self._require(self.ratio_to == "policy" or not self.corrections, "ratio_to", remedy)

    def _check_objective(self) -> None:
        """Raise ValueError unless the options that change the objective fit each other."""
        if self.entropy_target != 0:
            remedy = "with entropy_target it is where the weight starts, in [0, 1]."
            self._require(0 <= self.entropy_coef <= 1, "entropy_coef", remedy)
        objective = self.objective  # raises ValueError for options that the objective refuses
        has_kl = objective.beta > 0
        remedy = f"its weight is 0 in preset={self.preset!r}: set beta as well, or leave kl out."
        self._require(self.kl is None or self.beta is not None or has_kl, "kl", remedy)
        if self.drop_zero_variance:
            # Completions without advantage are dropped, so they must not contribute to the loss.
            surrogate = objective.surrogate
            has_bonus = self.entropy_coef != 0 or self.entropy_target != 0
            uses_all_tokens = surrogate.selects or self.entropy_share != 1
            only_advantages_count = (
                surrogate.zero_at_zero_advantage and not uses_all_tokens and not has_bonus
            )
            remedy = (
                "this objective wants those completions too, for a KL, an entropy bonus or quantile,"
                " or its surrogate."
            )
            is_free_to_drop = only_advantages_count and objective.beta == 0
            self._require(is_free_to_drop, "drop_zero_variance", remedy)
        remedy = "there is no reference to refresh at beta=0: set beta above 0."
        self._require(self.ref_refresh_steps == 0 or has_kl, "ref_refresh_steps", remedy)

    def _try_estimators(self) -> None:
        """Call the estimator of advantages and the corrections on 2 completions of 1 token each.

        Raises ValueError for unknown names and options, for values that are out of range, and for
        an estimator that needs something that this trainer does not have.
        """
        per_completion = torch.zeros(2)
        per_token = torch.zeros(2, 1)
        mask = torch.ones(2, 1, dtype=torch.bool)
        estimate = self.estimator(self.advantages)
        missing = [name for name in estimate.func.needs if name not in KNOWN]
        remedy = f"it takes {', '.join(missing)}, of which this trainer has none."
        self._require(not missing, "advantages", remedy)
        evidence = Evidence(
            per_completion,
            group_size=2,
            columns=torch.zeros(2, 1),  # one reward function
            reward_weights=[1.0],
            mask=mask,
            greedy_rewards=per_completion,
            old_logps=per_token,
            sum_squares=per_token + 1.0,
        )
        batch = TokenBatch(
            torch.zeros(2, 1, dtype=torch.int64),
            per_completion,
            mask=mask,
            old_logps=per_token,
            sampler_logps=per_token,
        )
        try:
            estimate(evidence)
            self.corrected(batch, finished=torch.ones(2, dtype=torch.bool))
        except TypeError as error:  # an unknown option; a config raises ValueError for all errors
            raise ValueError(str(error)) from error

    # ---- values that follow from the options

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p leave ids out when tokens are sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def replays(self) -> bool:
        """Whether log-probs of the loss are normalised over the ids that sampling left.

        Otherwise they are over the vocabulary. The option `replay` decides. If it is None, they are
        if sampling leaves ids out.
        """
        return self.truncates if self.replay is None else self.replay

    @property
    def most_held_out(self) -> int:
        """How many held-out prompts an evaluation takes at most."""
        return self.eval_prompts or 256

    @property
    def objective(self) -> Objective:
        """Return the objective: the preset with the options that change it."""
        changes = {
            "entropy_coef": self.entropy_coef,
            "beta": self.beta,
            "kl": EXACT.get(self.kl or "", self.kl),
        }
        if PRESETS[self.preset].aggregate == "constant":
            changes["max_tokens"] = self.max_new_tokens
        # None: the value of the preset.
        changes = {name: value for name, value in changes.items() if value is not None}
        objective = Objective.preset(self.preset, numerics=self.numerics, **changes)
        if self.entropy_share == 1:
            return objective
        # The quantile is over the tokens of all ranks, so that a run with several ranks trains on
        # the same tokens as a run with one.
        is_distributed = torch.distributed.is_initialized()
        group = torch.distributed.group.WORLD if is_distributed else None
        quantile = EntropyQuantile(self.entropy_share, process_group=group)
        return replace(objective, filters=(*objective.filters, quantile))

    def estimator(self, text: str) -> Any:
        """Return a function from `Evidence` to advantages: an `Estimator` with its options set.

        If an option is set several times, the text has priority, then advantage_baseline and
        advantage_scale, then the constants of the trainer `numerics`.

        text   name and options of the estimator, such as "rloo" or "group:scale=none"

        Raises ValueError for an unknown name.
        """
        name, options_in_text = with_options(text)
        estimator = lookup(ADVANTAGES, name, "advantages")
        # The options of an estimator, such as the baseline of "rloo", define it. Constants of a
        # trainer must not change them.
        free_options = estimator.option_names - estimator.options.keys()
        # {option: value} as the trainer has it whose numerics are used; none by default.
        constants = CONSTANTS.get(self.numerics or "", {})
        options = {option: value for option, value in constants.items() if option in free_options}
        if self.advantage_baseline is not None:
            options["baseline"] = self.advantage_baseline
        if self.advantage_scale is not None:
            options["scale"] = self.advantage_scale
        options |= options_in_text
        return partial(estimator, **options)

    def corrected(self, batch: TokenBatch, **arguments: Any) -> TokenBatch:
        """Return a batch with all `corrections` applied in their order.

        arguments   `finished` and `process_group`, which each `Correction` gets
        """
        for text in self.corrections:
            name, options = with_options(text)
            correction = lookup(CORRECTIONS, name, "corrections")
            batch = correction(batch, **arguments, **options)
        return batch

    def lr_at(self, update: int) -> float:
        """Return the learning rate of an optimizer step, which depends only on its number.

        It rises linearly over `warmup_steps`, then follows `lr_schedule` until the end of the run.

        update   number of the optimizer step, from 0; a training step makes `num_updates` of them
        """
        if update < self.warmup_steps:
            return self.lr * (update + 1) / self.warmup_steps
        num_after_warmup = max(self.steps * self.num_updates - self.warmup_steps, 1)
        progress = (update - self.warmup_steps) / num_after_warmup
        if self.lr_schedule == "constant":
            return self.lr
        if self.lr_schedule == "linear":
            return self.lr * max(1.0 - progress, 0.0)
        assert self.lr_schedule == "cosine", self.lr_schedule
        return self.lr * max(0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0))), 0.0)


#: Dataclasses of options, in the order of `--help`.
GROUPS = TrainConfig.__bases__[:-1]


def with_options(text: str) -> tuple[str, dict[str, Any]]:
    """Return (name, options) of a text such as "name:key=value,key=value".

    Values become Python literals: numbers, bools, None. "inf" becomes infinity. Anything else
    remains a text. Raises ValueError for a pair without "=".
    """
    name, _, pairs = text.partition(":")
    options = {}
    for pair in pairs.split(","):
        if not pair:  # "name" and "name:" have no options
            continue
        if "=" not in pair:
            raise ValueError(f"{text!r}: options are written as name:key=value,key=value.")
        key, value = map(str.strip, pair.split("=", 1))
        try:
            options[key] = math.inf if value == "inf" else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return name.strip(), options


# ---- as text

#: Our options by their names in other trainers, which an error suggests.
ELSEWHERE = {
    "model_name_or_path": "model", "dataset_name": "dataset", "reward_funcs": "rewards", "loss_type": "preset",
    "num_generations": "group_size", "max_completion_length": "max_new_tokens", "max_prompt_length": "max_prompt_tokens",
    "learning_rate": "lr", "lr_scheduler_type": "lr_schedule", "max_steps": "steps", "num_iterations": "num_updates",
    "scale_rewards": "advantage_scale", "per_device_train_batch_size": "micro_batch", "output_dir": "out", "report_to": "log_to",
    "save_steps": "checkpoint_steps", "save_total_limit": "keep_checkpoints", "resume_from_checkpoint": "resume",
    "log_completions": "sample_every", "sync_ref_model": "ref_refresh_steps",
}  # fmt: skip


def parse(argv: list[str]) -> TrainConfig:
    """Return the config of a command line.

    argv   the arguments after "python -m grpo_kernels train"

    Options come from the YAML file of --config, which options on the command line override. Raises
    ValueError for a wrong option.
    """
    parser = _make_parser()
    # The first pass only finds --config.
    path = _read(parser, argv, argparse.Namespace()).config
    options = argparse.Namespace()
    if path:
        _read(parser, _arguments_of_file(path), options, f"config={path!r}: ")
    # Options of the command line are read last, so they replace those of the file.
    _read(parser, argv, options)
    return TrainConfig(**{f.name: getattr(options, f.name) for f in fields(TrainConfig)})


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with a group of options for each of `GROUPS`."""
    parser = package("transformers").HfArgumentParser(
        GROUPS,
        formatter_class=argparse.HelpFormatter,
        prog="python -m grpo_kernels train",
        usage=(
            "%(prog)s --model NAME --dataset NAME [option ...]\n       %(prog)s --config FILE"
            " [option ...]"
        ),
        description="Train a causal language model with GRPO.",
        epilog=(
            "Exit status: 0 done; 128 + the signal's number (130, 143) stopped by it after a step,"
            " with a checkpoint that --resume goes on from; 2 an argument is wrong."
        ),
        allow_abbrev=False,
        exit_on_error=False,
    )
    text = (
        "YAML file of options by their names here; what the command line says wins. A run writes"
        " its own into out/config.yaml"
    )
    parser.add_argument("--config", metavar="FILE", help=text)
    parser.add_argument(
        "--no-replay", dest="replay", action="store_false", help="the same as --replay false"
    )
    for action in parser._actions:
        if action.nargs == "+":  # HfArgumentParser's choice for lists, which may be empty here
            action.nargs = "*"
    return parser


def _read(
    parser: argparse.ArgumentParser, argv: list[str], namespace: argparse.Namespace, where: str = ""
) -> argparse.Namespace:
    """Parse arguments into a namespace, and return it. Options that it has are overridden.

    parser      the parser of the command line
    argv        arguments, such as ["--lr=1e-6"]
    namespace   the options that were parsed before
    where       the beginning of errors: the file that the arguments come from; "": the command line

    Raises ValueError for a wrong value or an unknown option.
    """
    try:
        _, unknown = parser.parse_known_args(argv, namespace)
    except argparse.ArgumentError as error:
        raise ValueError(f"{where}{error}.") from error
    if not unknown:
        return namespace
    # "--learning-rate=1" -> "learning_rate"
    name = unknown[0].partition("=")[0].lstrip("-").replace("-", "_")
    meant = ELSEWHERE.get(name) or near_name(name, [f.name for f in fields(TrainConfig)])
    if meant:
        remedy = f"did you mean {meant}?"
    else:
        remedy = "`python -m grpo_kernels train --help` lists all."
    raise ValueError(f"{where}there is no option {name!r}: {remedy}")


def _arguments_of_file(path: str) -> list[str]:
    """Return the options of a YAML file as arguments of the command line, ["--lr=1e-6", ...].

    path   the file, whose lines are `option: value`

    An option that is null in the file is left out, and so gets its default.

    Raises ValueError if the file cannot be read, or has no options.
    """
    yaml = package("yaml")
    try:
        options = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"config={path!r} cannot be read: {error}.") from error
    if not isinstance(options, dict):
        raise ValueError(f"config={path!r}: it must be lines of `option: value`.")
    arguments = []
    for name, value in options.items():
        if isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        elif value is not None:
            arguments.append(f"--{name}={value}")
    return arguments


def write(config: TrainConfig, path: Path) -> None:
    """Write all options of a run to a YAML file, group by group.

    config   the options
    path     the file, which `--config` can read
    """
    text = (
        "# All options of this run. Another one like it: python -m grpo_kernels train --config"
        " THIS_FILE --out FOLDER\n"
    )
    values = {f.name: getattr(config, f.name) for group in GROUPS for f in fields(group)}
    text += package("yaml").safe_dump(
        values, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120
    )
    path.write_text(text, encoding="utf-8")
