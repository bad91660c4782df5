"""The configuration of a run: a dataclass whose fields are also the options of `python -m grpo_kernels train`."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..batch import TokenBatch
from ..formulas.divergence import Exact
from ..formulas.filters import EntropyQuantile
from ..objective import Objective
from ..options import OVER
from ..presets import NUMERICS, PRESETS
from ..rewards.advantages import BASELINES, SCALES
from ..rewards.advantages import NUMERICS as CONSTANTS
from ..rewards.estimators import ADVANTAGES, CORRECTIONS, Estimator, Evidence, lookup
from ..sparsity import FINEST
from .command_line import with_options
from .parallel import LAYOUTS

#: What the trainer knows beside the rewards, for estimators of advantages; it has no critic.
KNOWN = ("rewards", "columns", "reward_weights", "mask", "greedy_rewards", "old_logps", "sum_squares")
#: a2po regresses on the reference's log-probs and values of its own: other inputs than here.
TRAINABLE = tuple(name for name in PRESETS if name != "a2po")
#: Values of `kl` that are no estimators.
EXACT = {"exact": Exact("reverse"), "exact-forward": Exact("forward"), "exact-jsd": Exact("jsd")}
#: prime-rl's KL is to the sampler, which here is the policy itself.
TRAINERS = tuple(name for name in NUMERICS if name != "prime-rl")
LOSSES = ("linear", "logits", "eager")
RATIOS = ("policy", "sampler")
SCHEDULES = ("constant", "linear", "cosine")
DTYPES = ("float32", "bfloat16")  # float16 would need a loss scaler


def _field(default: typing.Any, text: str) -> typing.Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Raises ValueError naming the field, its value and what would be right."""

    model: str = _field("", "path or Hub name of a causal language model (its tokenizer beside it); its dropout stays off")
    dataset: str = _field(
        "", "Hub name (openai/gsm8k), a folder laid out like a Hub data set, or a .jsonl / .json / .parquet file"
    )
    dataset_config: str | None = _field(
        None, "configuration of the data set; default: main, where there is one (gsm8k has main and socratic)"
    )
    train_split: str = _field("train", "split to train on")
    eval_split: str = _field("test", "split to evaluate on; a lone file gives up its last rows instead")
    prompt_column: str | None = _field(
        None,
        "column of the prompt, a text or a list of messages, which goes through the tokenizer's chat template; "
        "default: the first of prompt, question, problem",
    )
    answer_column: str | None = _field(None, "column of the reference answer; default: the first of answer, solution")
    prompt_template: str = _field("{prompt}", "text around a prompt that is a text; {prompt} stands for it")
    chat: bool = _field(False, "send a prompt that is a text as a user message through the tokenizer's chat template")
    rewards: list[str] = field(
        default_factory=lambda: ["exact"], metadata={"help": "reward functions: exact, number, or module:function"}
    )
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "one weight per reward function (then the reward model's); default: all 1"}
    )
    reward_model: str | None = _field(None, "path or Hub name of a sequence classifier with one output, added to the rewards")

    preset: str = _field("grpo", f"objective: {', '.join(TRAINABLE)}")
    numerics: str | None = _field(None, f"compute the preset as this trainer does: {', '.join(TRAINERS)}; default: the paper")
    beta: float | None = _field(
        None, "weight of the KL to the reference model, which 0 does not load; default: the preset's, 0 in the papers'"
    )
    kl: str | None = _field(
        None,
        f"KL estimator: k1, k2, k3, abs, or with + its straight-through form; or {', '.join(EXACT)}: of all probabilities of policy and "
        "reference, at the cost of a product with the reference's head; default: the preset's",
    )
    teacher: str | None = _field(
        None, "path or Hub name of a model of the same tokenizer that takes the place of the reference, to distil from"
    )
    entropy_coef: float = _field(0.0, "weight of the entropy bonus")
    entropy_target: float = _field(
        0.0, "hold the entropy (nats per token) above this by moving the bonus's weight, which starts at entropy_coef; 0 = off"
    )
    entropy_share: float = _field(1.0, "train on this share of the tokens, those of the highest entropy (0.2: the 80/20 rule)")
    advantages: str = _field(
        "group",
        "estimator of advantages, with options if any (reinforce_pp:gamma=0.99,baseline=mean): "
        + ", ".join(name for name, e in ADVANTAGES.items() if set(e.needs) <= set(KNOWN)),
    )
    corrections: list[str] = field(
        default_factory=list,
        metadata={
            "help": "weights and masks for what the sampler does otherwise than the policy that is trained (rounding; without replay "
            "also top-p, top-k, min-p), in this order, with options if any (tis:high=3): " + ", ".join(CORRECTIONS)
        },
    )
    advantage_baseline: str | None = _field(
        None, f"subtract from rewards: {', '.join(BASELINES)} (of the group); default: mean, or what `numerics` says"
    )
    advantage_scale: str | None = _field(
        None, f"divide centred rewards by: {', '.join(SCALES)} (see group_advantages); default: group, or what `numerics` says"
    )
    drop_zero_variance: bool = _field(
        False, "leave out completions whose advantages are all 0, the model's passes included; the denominator keeps them"
    )
    ref_refresh_steps: int = _field(0, "copy the policy into the reference every so many steps (iterative GRPO); 0 = never")

    steps: int = _field(200, "training steps: one batch of completions each")
    prompts_per_step: int = _field(16, "prompts in a batch, over all processes")
    group_size: int = _field(8, "completions per prompt, G")
    num_updates: int = _field(1, "optimizer steps on each batch; see ratio_to")
    ratio_to: str = _field(
        "policy",
        "what the ratio is to: policy, the log-probs of the trainer before the first step on a batch; sampler, those that tokens "
        "were sampled with",
    )
    micro_batch: int = _field(
        0, "completions per forward and backward pass of a process; 0 = all of its batch. Does not change the gradient"
    )
    max_prompt_tokens: int = _field(1024, "longer prompts are left out, with a count")
    max_new_tokens: int = _field(256, "completion budget in tokens")
    temperature: float = _field(1.0, "sampling temperature; the loss uses the same")
    top_p: float = _field(1.0, "sample from the smallest set of tokens with this probability; 1 = all")
    top_k: int = _field(0, "sample from the k most likely tokens; 0 = all")
    min_p: float = _field(0.0, "sample from tokens with at least this share of the largest probability; 0 = all")
    replay: bool | None = _field(
        None,
        "train over the sets of tokens that top_p, top_k and min_p left, as they were sampled from, and not over the whole "
        "vocabulary; default: where one of them cuts tokens off",
    )
    entropy_over: str = _field(
        "kept",
        "with replay the entropy is over the sets (kept), or over the vocabulary, which costs a product with the whole head "
        "and can be compared over runs that sample otherwise",
    )

    lr: float = _field(1e-6, "learning rate of AdamW")
    lr_schedule: str = _field("constant", f"after the warm-up: {', '.join(SCHEDULES)} (the last two end at 0)")
    warmup_steps: int = _field(0, "optimizer steps of linear warm-up")
    weight_decay: float = _field(0.0, "decoupled weight decay")
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999], metadata={"help": "AdamW's two betas"})
    max_grad_norm: float = _field(1.0, "gradient norm clip; inf switches it off")

    eval_steps: int = _field(
        50,
        "evaluate every so many steps, before the first and after the last; 0 = never. accuracy is the share of held-out prompts "
        "whose completion gets at least 1 from the first reward, eval_reward the mean of all rewards",
    )
    eval_prompts: int | None = _field(
        None, "held-out prompts per evaluation; default: at most 256, and of a lone file at most a tenth"
    )
    eval_temperature: float = _field(0.0, "0 = greedy")

    out: str = _field("runs/grpo", "folder of metrics.jsonl, curves.png, checkpoints and the final model")
    checkpoint_steps: int = _field(50, "write a checkpoint every so many steps and after the last; 0 = only after the last")
    keep_checkpoints: int = _field(2, "checkpoints to keep, at least 2, so that a damaged one has a predecessor")
    resume: bool = _field(False, "continue from the newest intact checkpoint in out; start afresh if there is none")

    loss: str = _field(
        "linear",
        "linear: fused from hidden states, logits never exist; logits: fused on the model's logits; eager: plain PyTorch",
    )
    backend: str = _field("auto", "backend of the fused kernels, see `python -m grpo_kernels doctor`")
    sparse_step: float = _field(
        0.0,
        "gradient of the head from columns drawn on a grid of this probability, 1/256 for example, unbiased; 0 = all columns",
    )
    attn_implementation: str = _field(
        "auto", "auto, sdpa, eager, flash_attention_2, ...; auto: flash-attn where installed, else sdpa"
    )
    liger: bool = _field(False, "replace the model's norms, rotary embedding and MLP by liger-kernel's (GPU)")
    parallel: str = _field(
        "ddp", "model on several processes: ddp, a copy on each; fsdp2, parameters, gradients and optimizer in shards"
    )
    gradient_checkpointing: bool = _field(False, "recompute activations in the backward pass")
    dtype: str = _field("float32", f"arithmetic of the model: {', '.join(DTYPES)}; parameters stay float32 (autocast)")
    device: str = _field("auto", "auto, cpu, cuda, cuda:1, ...; of several processes each takes its own")
    seed: int = _field(0, "seed of the data order and of sampling")
    progress: bool = _field(True, "show a progress bar")

    def __post_init__(self) -> None:
        check = self._check
        for name in ("steps", "prompts_per_step", "group_size", "num_updates", "max_prompt_tokens", "max_new_tokens"):
            check(name, getattr(self, name) >= 1, "it must be at least 1.")
        for name in (
            "ref_refresh_steps", "micro_batch", "top_k", "warmup_steps", "weight_decay", "eval_steps", "checkpoint_steps"
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
