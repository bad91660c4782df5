"""A reference trainer for GRPO, thin enough to read in one sitting.

    python -m grpo_kernels train --model Qwen/Qwen3-0.6B --dataset openai/gsm8k --dataset-config main --rewards number

Each step: take prompts, sample G completions of each, score them, turn rewards into group-normalised advantages, and
make `num_updates` optimizer steps on the objective. Its simplifications: one process and one device, no tools or turns,
and the model that samples is the model that trains, so log-probs at sampling need no correction.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .batch import LogitTransform, TokenBatch
from .distributed import global_normalizer
from .entropy import AdaptiveEntropyCoef
from .logprobs import linear_logprobs, token_logprobs
from .losses import LossOutput, grpo_loss, linear_grpo_loss
from .objective import Denominators
from .training import checkpoints, require
from .training.config import TrainConfig, parse_args
from .training.data import Row, encode, load_rows, prompts_of_step
from .training.head import check_head, completion_hidden, head_parameters, logit_transform
from .training.loading import check_liger, load_policy, pick_device, prepare_policy
from .training.report import MetricsLog, plot
from .training.rewards import RewardFunction, RewardModel, Scores, resolve, score
from .training.sampling import Completions, autocast, completion_logits, end_ids, sample

__all__ = ["TrainConfig", "Trainer", "main"]

Tensor = torch.Tensor

#: What may differ between a run and its continuation without changing the steps.
FREE_TO_CHANGE = {"steps", "out", "resume", "progress", "checkpoint_steps", "keep_checkpoints", "eval_steps", "eval_prompts"}


class Trainer:
    """A run. `model`, `tokenizer`, `rows` (training rows, held-out rows) and `rewards` replace what the config names;
    a row is a dict with "prompt" and the columns that the reward functions take.

    What can be wrong with the output folder, the device or the options is found here, before anything slow."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: Any = None,
        tokenizer: Any = None,
        rows: tuple[list[Row], list[Row]] | None = None,
        rewards: list[RewardFunction] | None = None,
    ) -> None:
        self.config, self.objective, self.out = config, config.objective, Path(config.out)
        prepare_output(self.out, config.resume)
        self.device = pick_device(config.device)
        self.dtype = getattr(torch, config.dtype)
        if config.liger:
            check_liger(self.device)
        self.rewards = rewards or [resolve(name) for name in config.rewards]
        if (model is None) != (tokenizer is None):
            raise ValueError("model and tokenizer go together: pass both, or neither and name them in the config.")
        for name, value in (("model", model or config.model), ("dataset", rows or config.dataset)):
            if not value:
                raise ValueError(f"{name}='': name one in the config, or pass it to Trainer.")
        if model is None:
            model, tokenizer = load_policy(config, self.device)
        self.tokenizer = tokenizer
        self.model = prepare_policy(model, config, self.device).train()
        if config.reward_model is not None:
            self.rewards.append(RewardModel(config.reward_model, self.device))
        self.reward_weights = config.reward_weights or [1.0] * len(self.rewards)
        train_rows, eval_rows = rows or load_rows(config, tokenizer)
        self.train_rows, skipped = encode(train_rows, tokenizer, config.max_prompt_tokens)
        self.eval_rows = (
            encode(eval_rows[: config.eval_prompts], tokenizer, config.max_prompt_tokens)[0] if config.eval_steps else []
        )
        if skipped:
            print(f"left out {skipped} of {len(train_rows)} prompts: longer than max_prompt_tokens={config.max_prompt_tokens}")
        self.ends = end_ids(self.model, tokenizer)
        self.reference = copy.deepcopy(self.model).eval().requires_grad_(False) if self.objective.beta else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=(config.betas[0], config.betas[1]), weight_decay=config.weight_decay
        )
        self.entropy_coef: AdaptiveEntropyCoef | None = None
        if config.entropy_target:
            self.entropy_coef = AdaptiveEntropyCoef(target=config.entropy_target, initial=config.entropy_coef)
        self.step = 0  # steps done
        self.rng = checkpoints.rng_state()
        self.mid_update = False
        self.backend = "eager" if config.loss == "eager" else config.backend
        self.transform = LogitTransform(config.temperature)
        if config.loss == "linear":
            check_head(self.model)
            self.transform = logit_transform(self.model.config, config.temperature)
        # A model that softcaps its logits needs their values in its own backward.
        self.inplace = config.loss == "logits" and getattr(self.model.config, "final_logit_softcapping", None) is None

    # ---- the run

    def train(self) -> bool:
        """Run up to `config.steps`. True when done; False when stopped by SIGINT or SIGTERM, with everything saved."""
        config = self.config
        if config.resume:
            self.restore()
        log = MetricsLog(self.out / "metrics.jsonl", resume_at=self.step)
        bar = require("tqdm").tqdm(total=config.steps, initial=self.step, disable=not config.progress, desc="grpo")
        try:
            with stop_after_step() as stop:
                while self.step < config.steps and not stop:
                    line: dict[str, Any] = {"step": self.step}
                    if config.eval_steps and self.step % config.eval_steps == 0:
                        line["accuracy"] = self.evaluate()
                    line |= self.train_step()
                    log.write(line)
                    bar.update()
                    bar.set_postfix({k: f"{line[k]:.3g}" for k in ("reward", "kl", "entropy") if k in line})
                    if self.step == config.steps and config.eval_steps:
                        log.write({"step": self.step, "accuracy": self.evaluate()})
                    due = config.checkpoint_steps > 0 and self.step % config.checkpoint_steps == 0
                    if due or stop or self.step == config.steps:
                        self.save()
        except BaseException:
            # Between updates the parameters are those of the last whole step, and worth keeping.
            if self.step and not self.mid_update:
                self.save()
            raise
        finally:
            log.close()
            bar.close()
            plot(self.out / "metrics.jsonl", self.out / "curves.png")
        if self.step < config.steps:
            print(f"stopped after step {self.step} of {config.steps}; continue with resume", file=sys.stderr)
            return False
        self.model.save_pretrained(self.out / "model")
        self.tokenizer.save_pretrained(self.out / "model")
        return True

    def train_step(self) -> dict[str, float]:
        """One batch: sample, score, update. Returns its metrics."""
        config, started = self.config, time.perf_counter()
        rows = prompts_of_step(self.train_rows, self.step, config.prompts_per_step, config.seed)
        # Every step has a seed of its own, so that a resumed run samples the same.
        generator = torch.Generator(self.device).manual_seed(config.seed * 1_000_003 + self.step)
        completions = self.sample(rows, config.group_size, config.temperature, config.top_p, config.top_k, generator)
        sampled = time.perf_counter()
        scores = self.score(rows, completions, config.group_size)
        metrics = self.update(completions, scores.advantages.to(self.device))
        self.step += 1
        if self.reference is not None and config.ref_refresh_steps and self.step % config.ref_refresh_steps == 0:
            self.reference.load_state_dict(self.model.state_dict())
        self.rng = checkpoints.rng_state()

        grouped = scores.totals.view(-1, config.group_size)
        lengths = completions.mask.sum(1).float()
        done = time.perf_counter()
        return {
            "reward": scores.totals.mean().item(),
            "reward_std": scores.totals.std(unbiased=False).item(),
            "zero_variance_groups": (grouped.amax(1) == grouped.amin(1)).float().mean().item(),
            "completion_length": lengths.mean().item(),
            **metrics,
            "seconds": done - started,
            "sampling_seconds": sampled - started,
            "tokens_per_second": lengths.sum().item() / (done - started),
        }

    # ---- its parts

    def sample(
        self,
        rows: list[Row],
        group_size: int,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        generator: torch.Generator | None = None,
    ) -> Completions:
        with autocast(self.device, self.dtype):
            return sample(
                self.model, [row["prompt_ids"] for row in rows],
                group_size=group_size, max_new_tokens=self.config.max_new_tokens, ends=self.ends,
                temperature=temperature, top_p=top_p, top_k=top_k, generator=generator,
            )  # fmt: skip

    def score(self, rows: list[Row], completions: Completions, group_size: int) -> Scores:
        repeated = [row for row in rows for _ in range(group_size)]
        tokens = completions.tokens
        return score(
            self.rewards,
            self.reward_weights,
            prompts=[row["prompt"] for row in repeated],
            completions=self.tokenizer.batch_decode(tokens, skip_special_tokens=True),
            tokens=tokens,
            columns={name: [row[name] for row in repeated] for name in rows[0] if name not in ("prompt", "prompt_ids")},
            group_size=group_size,
            width=completions.targets.shape[1],
            options=self.config.advantage_options,
        )

    def update(self, completions: Completions, advantages: Tensor) -> dict[str, float]:
        """`num_updates` optimizer steps on one batch. The first is on-policy, and its log-probs are the old ones of the
        others: they were computed before any step, by the same code."""
        config = self.config
        # One denominator for the whole batch, however it is cut and whatever is left out.
        whole = TokenBatch(completions.targets, advantages, mask=completions.mask)
        total = len(completions.ids)
        if config.drop_zero_variance:
            wanted = (advantages.reshape(total, -1) != 0).any(1)
            wanted[0] |= ~wanted.any()  # an update of nothing is still one: the optimizer's averages decay
            completions, advantages = completions[wanted], advantages[wanted]
        count = len(completions.ids)
        size = config.micro_batch or count
        pieces = [slice(at, min(at + size, count)) for at in range(0, count, size)]
        ref_logps = None if self.reference is None else torch.cat([self.reference_logps(completions[p]) for p in pieces])
        old_logps: Tensor | None = None
        metrics: dict[str, float] = {}
        self.mid_update = True
        for k in range(config.num_updates):
            logps, parts = [], []
            if self.entropy_coef is not None:
                self.objective = dataclasses.replace(self.objective, entropy_coef=self.entropy_coef.coef)
            normalizer = global_normalizer(self.objective, whole)
            for piece in pieces:
                part = completions[piece]
                batch = TokenBatch(
                    part.targets,
                    advantages[piece],
                    mask=part.mask,
                    old_logps=None if old_logps is None else old_logps[piece],
                    ref_logps=None if ref_logps is None else ref_logps[piece],
                )
                out = self.loss(part, batch, normalizer)
                out.loss.backward()
                logps.append(out.logps)
                parts.append(out.metrics | {"loss": out.loss.detach()})
            old_logps = torch.cat(logps) if old_logps is None else old_logps
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
            lr = config.lr_at(self.step * config.num_updates + k)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            if finite := math.isfinite(norm):  # else the step is left out: one bad batch must not end in NaN parameters
                self.optimizer.step()
            self.optimizer.zero_grad()
            metrics = combine(parts) | {"grad_norm": norm.item(), "lr": lr, "skipped": float(not finite)}
            if self.entropy_coef is not None:
                metrics["entropy_coef"] = self.entropy_coef.coef
                self.entropy_coef.update(metrics["entropy"])
        self.mid_update = False
        return metrics | {"dropped": 1 - count / total}

    def loss(self, completions: Completions, batch: TokenBatch, normalizer: Tensor | Denominators) -> LossOutput:
        """The objective of one micro-batch: from hidden states, so that logits never exist, or from the model's logits."""
        with autocast(self.device, self.dtype):
            if self.config.loss == "linear":
                weight, bias = head_parameters(self.model)
                return linear_grpo_loss(
                    completion_hidden(self.model, completions), weight, batch, self.objective,
                    bias=bias, transform=self.transform, normalizer=normalizer, backend=self.backend,
                )  # fmt: skip
            logits = completion_logits(self.model, completions)
        return grpo_loss(
            logits, batch, self.objective,
            transform=self.transform, normalizer=normalizer, inplace=self.inplace, backend=self.backend,
        )  # fmt: skip

    @torch.no_grad()
    def reference_logps(self, completions: Completions) -> Tensor:
        model, targets, mask = self.reference, completions.targets, completions.mask
        options: dict[str, Any] = {"mask": mask, "transform": self.transform, "backend": self.backend}
        with autocast(self.device, self.dtype):
            if self.config.loss == "linear":
                weight, bias = head_parameters(model)
                return linear_logprobs(completion_hidden(model, completions), weight, targets, bias=bias, **options)[0]
            logits = completion_logits(model, completions)
        return token_logprobs(logits, targets, **options)[0]

    def evaluate(self) -> float:
        """Share of held-out prompts solved: the first reward function gives at least 1."""
        size = self.config.prompts_per_step * self.config.group_size
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        solved = 0
        for at in range(0, len(self.eval_rows), size):
            rows = self.eval_rows[at : at + size]
            completions = self.sample(rows, 1, self.config.eval_temperature, generator=generator)
            solved += int((self.score(rows, completions, 1).first >= 1).sum())
        return solved / len(self.eval_rows)

    # ---- saving

    def save(self) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "reference": None if self.reference is None else self.reference.state_dict(),
            "entropy_coef": None if self.entropy_coef is None else self.entropy_coef.state_dict(),
            "rng": self.rng,
            "config": dataclasses.asdict(self.config),
        }
        checkpoints.save(self.out / "checkpoints", self.step, state, self.config.keep_checkpoints)

    def restore(self) -> None:
        """Continue from the newest intact checkpoint: model, optimizer, reference, random states and place in the data."""
        state, problems = checkpoints.load_newest(self.out / "checkpoints")
        for problem in problems:
            print(f"checkpoint passed over: {problem}", file=sys.stderr)
        if state is None:
            if problems:  # to start afresh here would drop the metrics and the damaged checkpoints
                raise ValueError(
                    f"out={str(self.out)!r} holds damaged checkpoints only: mend or remove them, or choose another folder."
                )
            return
        now = dataclasses.asdict(self.config)
        free = FREE_TO_CHANGE if self.config.lr_schedule == "constant" else FREE_TO_CHANGE - {"steps"}
        changed = [k for k in now if k not in free and state["config"].get(k) != now[k]]
        if changed:
            print(f"resuming with other values of {', '.join(changed)}: not the run that was interrupted", file=sys.stderr)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.reference is not None and state["reference"] is not None:
            self.reference.load_state_dict(state["reference"])
        if self.entropy_coef is not None and state.get("entropy_coef") is not None:
            self.entropy_coef.load_state_dict(state["entropy_coef"])
        self.step, self.rng = state["step"], state["rng"]
        checkpoints.set_rng_state(state["rng"])


def combine(parts: list[dict[str, Tensor]]) -> dict[str, float]:
    """Metrics of micro-batches as those of the batch: the loss adds up, extremes stay extremes, means weigh by tokens."""
    parts = [p for p in parts if p["tokens"] > 0] or parts[:1]  # the extremes of nothing are not the batch's
    tokens = torch.stack([p["tokens"] for p in parts])
    metrics = {}
    for name in parts[0]:
        values = torch.stack([p[name] for p in parts])
        if name in ("loss", "tokens"):
            value = values.sum()
        elif name.endswith("_max") or name.endswith("_min"):
            value = values.max() if name.endswith("_max") else values.min()
        else:
            value = (values * tokens).sum() / tokens.sum().clamp(min=1)
        metrics[name] = value.item()
    return metrics


def prepare_output(out: Path, resume: bool) -> None:
    """Make the folder, and find out now rather than at the first checkpoint that it cannot be written."""
    try:
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = out / "checkpoints" / ".probe"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"out={str(out)!r} cannot be written ({error}): choose another folder.") from error
    if not resume and (checkpoints.listed(out / "checkpoints") or (out / "metrics.jsonl").exists()):
        raise ValueError(f"out={str(out)!r} holds a run: continue it with resume, or choose another folder.")


@contextmanager
def stop_after_step() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that the step at hand ends whole; a second signal acts at once."""
    received: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def note(number: int, frame: Any) -> None:
        received.append(number)
        print("stopping after this step; once more to stop now", file=sys.stderr)
        for known, handler in before.items():
            signal.signal(known, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread, where Python allows no handlers
        before.clear()
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: list[str]) -> int:
    """`python -m grpo_kernels train`. Exit status 0: done or stopped cleanly, 2: something in the arguments is wrong."""
    config = parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        trainer = Trainer(config)
    except (ValueError, ModuleNotFoundError, OSError) as error:  # OSError: a name or path that transformers cannot load
        print(f"error: {error}", file=sys.stderr)
        return 2
    trainer.train()
    return 0
