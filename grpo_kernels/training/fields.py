"""The options of a run: their groups, defaults, units and what they do. `TrainConfig` checks them."""

# ruff: noqa: RUF009
# What is called for each field returns a new dataclasses.field.
from __future__ import annotations

import typing
from dataclasses import dataclass, field

from ..formulas.divergence import Exact
from ..presets import NUMERICS, PRESETS
from ..rewards.advantages import BASELINES, SCALES
from ..rewards.corrections import CORRECTIONS
from ..rewards.estimators import ADVANTAGES
from .trackers import TRACKERS

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


def _group(title: str) -> typing.Callable[..., typing.Any]:
    """Makes the fields of a group: a default, what it does, and the unit or kind of its value."""

    def option(default: typing.Any, text: str, unit: str | None = None) -> typing.Any:
        metadata = {"help": text, "unit": unit, "group": title}
        if isinstance(default, list):
            return field(default_factory=default.copy, metadata=metadata)
        return field(default=default, metadata=metadata)

    return option


_data = _group("model and data")
_reward = _group("rewards and advantages")
_objective = _group("objective")
_sampling = _group("sampling")
_optimisation = _group("optimisation")
_evaluation = _group("evaluation")
_logging = _group("logging")
_checkpoints = _group("output and checkpoints")
_computation = _group("computation")


@dataclass(frozen=True)
class Fields:
    """What can be set, in the order of `--help`."""

    model: str = _data(
        "", "path or Hub name of a causal language model (its tokenizer beside it); its dropout stays off", "NAME"
    )
    dataset: str = _data(
        "", "Hub name (openai/gsm8k), a folder laid out like a Hub data set, or a .jsonl / .json / .parquet / .csv file", "NAME"
    )
    dataset_config: str | None = _data(
        None, "configuration of the data set; default: main, where there is one (gsm8k has main and socratic)", "NAME"
    )
    train_split: str = _data("train", "split to train on", "NAME")
    eval_split: str = _data("test", "split to evaluate on; a lone file gives up its last rows instead", "NAME")
    prompt_column: str | None = _data(
        None,
        "column of the prompt, a text or a list of messages, which goes through the tokenizer's chat template; "
        "default: the first of prompt, question, problem",
        "NAME",
    )
    answer_column: str | None = _data(None, "column of the reference answer; default: the first of answer, solution", "NAME")
    prompt_template: str = _data("{prompt}", "text around a prompt that is a text; {prompt} stands for it", "TEXT")
    chat: bool = _data(False, "send a prompt that is a text as a user message through the tokenizer's chat template")
    max_prompt_tokens: int = _data(1024, "longer prompts are left out, with a count", "TOKENS")

    rewards: list[str] = _reward(["exact"], "reward functions: exact, number, or module:function", "NAME")
    reward_weights: list[float] | None = _reward(
        None, "one weight per reward function (then the reward model's); default: all 1", "WEIGHT"
    )
    reward_model: str | None = _reward(
        None, "path or Hub name of a sequence classifier with one output, added to the rewards; default: none", "NAME"
    )
    advantages: str = _reward(
        "group",
        "estimator of advantages, with options if any (reinforce_pp:gamma=0.99,baseline=mean): "
        + ", ".join(name for name, e in ADVANTAGES.items() if set(e.needs) <= set(KNOWN)),
        "NAME",
    )
    advantage_baseline: str | None = _reward(
        None, f"subtract from rewards: {', '.join(BASELINES)} (of the group); default: mean, or what `numerics` says", "NAME"
    )
    advantage_scale: str | None = _reward(
        None,
        f"divide centred rewards by: {', '.join(SCALES)} (see group_advantages); default: group, or what `numerics` says",
        "NAME",
    )
    drop_zero_variance: bool = _reward(
        False, "leave out completions whose advantages are all 0, the model's passes included; the denominator keeps them"
    )

    preset: str = _objective("grpo", f"objective: {', '.join(TRAINABLE)}", "NAME")
    numerics: str | None = _objective(
        None, f"compute the preset as this trainer does: {', '.join(TRAINERS)}; default: the paper", "NAME"
    )
    beta: float | None = _objective(
        None,
        "weight of the KL to the reference model, which 0 does not load; default: the preset's, 0 in the papers'",
        "WEIGHT",
    )
    kl: str | None = _objective(
        None,
        f"KL estimator: k1, k2, k3, abs, or with + its straight-through form; or {', '.join(EXACT)}: of all probabilities of policy and "
        "reference, at the cost of a product with the reference's head; default: the preset's",
        "NAME",
    )
    teacher: str | None = _objective(
        None,
        "path or Hub name of a model of the same tokenizer that takes the place of the reference, to distil from; default: none",
        "NAME",
    )
    ref_refresh_steps: int = _objective(
        0, "copy the policy into the reference every so many steps (iterative GRPO); 0 = never", "STEPS"
    )
    entropy_coef: float = _objective(0.0, "weight of the entropy bonus", "WEIGHT")
    entropy_target: float = _objective(
        0.0, "hold the entropy per token above this by moving the bonus's weight, which starts at entropy_coef; 0 = off", "NATS"
    )
    entropy_share: float = _objective(
        1.0, "train on this share of the tokens, those of the highest entropy (0.2: the 80/20 rule)", "SHARE"
    )
    ratio_to: str = _objective(
        "policy",
        "what the ratio is to: policy, the log-probs of the trainer before the first step on a batch; sampler, those that tokens "
        "were sampled with",
        "NAME",
    )
    corrections: list[str] = _objective(
        [],
        "weights and masks for what the sampler does otherwise than the policy that is trained (rounding; without replay "
        "also top-p, top-k, min-p), in this order, with options if any (tis:high=3): " + ", ".join(CORRECTIONS),
        "NAME",
    )

    prompts_per_step: int = _sampling(16, "prompts in a batch, over all processes", "PROMPTS")
    group_size: int = _sampling(8, "completions per prompt, G", "COMPLETIONS")
    max_new_tokens: int = _sampling(256, "budget of a completion", "TOKENS")
    temperature: float = _sampling(1.0, "sampling temperature; the loss uses the same", "X")
    top_p: float = _sampling(1.0, "sample from the smallest set of tokens with this probability; 1 = all", "SHARE")
    top_k: int = _sampling(0, "sample from the k most likely tokens; 0 = all", "TOKENS")
    min_p: float = _sampling(0.0, "sample from tokens with at least this share of the largest probability; 0 = all", "SHARE")
    replay: bool | None = _sampling(
        None,
        "train over the sets of tokens that top_p, top_k and min_p left, as they were sampled from, and not over the whole "
        "vocabulary; default: where one of them cuts tokens off",
    )
    entropy_over: str = _sampling(
        "kept",
        "with replay the entropy is over the sets (kept), or over the vocabulary, which costs a product with the whole head "
        "and can be compared over runs that sample otherwise",
        "NAME",
    )

    steps: int = _optimisation(200, "training steps: one batch of completions each", "STEPS")
    num_updates: int = _optimisation(1, "optimizer steps on each batch; see ratio_to", "UPDATES")
    micro_batch: int = _optimisation(
        0,
        "completions per forward and backward pass of a process; 0 = all of its batch. Does not change the gradient",
        "COMPLETIONS",
    )
    lr: float = _optimisation(1e-6, "learning rate of AdamW", "RATE")
    lr_schedule: str = _optimisation("constant", f"after the warm-up: {', '.join(SCHEDULES)} (the last two end at 0)", "NAME")
    warmup_steps: int = _optimisation(0, "optimizer steps of linear warm-up", "UPDATES")
    weight_decay: float = _optimisation(0.0, "decoupled weight decay", "RATE")
    betas: list[float] = _optimisation([0.9, 0.999], "AdamW's two betas", "BETA")
    max_grad_norm: float = _optimisation(1.0, "gradient norm clip; inf switches it off", "NORM")

    eval_steps: int = _evaluation(
        50,
        "evaluate every so many steps, before the first and after the last; 0 = never. accuracy is the share of held-out prompts "
        "whose completion gets at least 1 from the first reward, eval_reward the mean of all rewards",
        "STEPS",
    )
    eval_prompts: int | None = _evaluation(
        None, "held-out prompts per evaluation; default: at most 256, and of a lone file at most a tenth", "PROMPTS"
    )
    eval_temperature: float = _evaluation(0.0, "0 = greedy", "X")

    progress: bool = _logging(
        True, "show a progress bar (without a terminal: a line for each step), samples and what the run came to"
    )
    log_to: list[str] = _logging(
        ["jsonl"],
        f"where metrics go: jsonl, out/metrics.jsonl, which is always written, for a resumed run reads it; {', '.join(TRACKERS)}, "
        "each of which has to be installed",
        "NAME",
    )
    sample_every: int = _logging(
        10,
        "show some completions with reward and advantage every so many steps, and add them to out/samples.jsonl; 0 = never",
        "STEPS",
    )
    sample_count: int = _logging(2, "how many completions that shows, the first of the batch", "COMPLETIONS")

    out: str = _checkpoints(
        "runs/grpo",
        "folder of the run: config.yaml, metrics.jsonl, samples.jsonl, curves.png, summary.txt, "
        "checkpoints and the final model",
        "FOLDER",
    )
    checkpoint_steps: int = _checkpoints(
        50, "write a checkpoint every so many steps and after the last; 0 = only after the last", "STEPS"
    )
    keep_checkpoints: int = _checkpoints(
        2, "checkpoints to keep, at least 2, so that a damaged one has a predecessor", "CHECKPOINTS"
    )
    resume: bool = _checkpoints(False, "continue from the newest intact checkpoint in out; start afresh if there is none")

    loss: str = _computation(
        "linear",
        "linear: fused from hidden states, logits never exist; logits: fused on the model's logits; eager: plain PyTorch",
        "NAME",
    )
    backend: str = _computation("auto", "backend of the fused kernels, see `python -m grpo_kernels doctor`", "NAME")
    sparse_step: float = _computation(
        0.0,
        "gradient of the head from columns drawn on a grid of this probability, 1/256 for example, unbiased; 0 = all columns",
        "SHARE",
    )
    attn_implementation: str = _computation(
        "auto", "auto, sdpa, eager, flash_attention_2, ...; auto: flash-attn where installed, else sdpa", "NAME"
    )
    liger: bool = _computation(False, "replace the model's norms, rotary embedding and MLP by liger-kernel's (GPU)")
    parallel: str = _computation(
        "ddp", "model on several processes: ddp, a copy on each; fsdp2, parameters, gradients and optimizer in shards", "NAME"
    )
    gradient_checkpointing: bool = _computation(False, "recompute activations in the backward pass")
    dtype: str = _computation(
        "float32", f"arithmetic of the model: {', '.join(DTYPES)}; parameters stay float32 (autocast)", "NAME"
    )
    device: str = _computation("auto", "auto, cpu, cuda, cuda:1, ...; of several processes each takes its own", "NAME")
    seed: int = _computation(0, "seed of the data order and of sampling", "N")
