"""A small reference trainer for GRPO.

    python -m grpo_kernels train --model Qwen/Qwen3-0.6B --dataset openai/gsm8k --dataset-config
    main --rewards number

Each step samples G completions of some prompts, scores them, computes group-normalised advantages
from the rewards, and makes `num_updates` optimizer steps on the objective. It has no tools, no
turns and no critic, and the model that samples is the model that is trained. If top-k, top-p or
min-p leave tokens out, it trains over the sets of tokens that they left (`replay`).

    torchrun --nproc-per-node 8 -m grpo_kernels train --parallel fsdp2 ...

With several processes, each takes some of the prompts and all completions of them. The steps are
those of one process, up to rounding. Clip-Cov, KL-Cov and M2PO select among the completions of one
process, and reward functions get the completions of one process.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..batch import TokenBatch
from ..checks import require as check
from ..distributed import global_normalizer
from ..objective import Denominators
from ..rewards.entropy import AdaptiveEntropyCoef
from . import Ranks, data, require
from .config import TrainConfig, parse
from .data import Row, prompts_of_step
from .draft import DraftTrainer
from .policy import Completions, Losses, LossParts, ParallelModel, check_recomputing, recomputing
from .report import RunLog, Stopwatch, Tracker, update_metrics, write_summary
from .rewards import RewardFunction, Scores
from .rollouts import Part, Rollouts, micro_batches, pieces
from .saving import OutputFolder, Saved, random_state, stop_after_step

__all__ = ["LossParts", "TrainConfig", "Trainer"]


class Trainer:
    """A training run.

    config      the options
    model, tokenizer, rewards, teacher   replace what the config names
    rows        (training rows, held-out rows), in place of the data set that the config names. A
                row is a dict with "prompt" and the columns that the reward functions take.
    trackers    get the metrics of each step, in addition to those that the config names

    Each process of a run makes a Trainer with the same arguments and calls the same methods; rank 0
    alone writes files. Raises ValueError for a wrong output folder, device or option, before
    anything slow is done.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: Any = None,
        tokenizer: Any = None,
        rows: tuple[list[Row], list[Row]] | None = None,
        rewards: list[RewardFunction] | None = None,
        teacher: Any = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """Check all options, load models and data, and prepare the run.

        config     the options
        model, tokenizer, rewards, teacher
                   objects of the caller, in place of what the config names: the policy and its
                   tokenizer, reward functions, and a frozen model to learn from
        rows       (training rows, held-out rows), in place of a data set
        trackers   get the metrics of each step, in addition to those that the config names

        The output folder is locked until `train` ends.
        """
        self.config = config
        self.out = Path(config.out)
        start = data.Start(model, tokenizer, rows, rewards, teacher)
        self.device = data.check(config, start)
        self.ranks = Ranks(self.device)
        # After `Ranks`, because some objectives use the process group.
        self.objective = config.objective
        world = self.ranks.world
        remedy = (
            f"the {world} processes of this run take a prompt each at least, with all its"
            " completions; raise it, or start fewer."
        )
        check(config.prompts_per_step >= world, "prompts_per_step", config.prompts_per_step, remedy)
        self.folder = OutputFolder(self.out)
        self.ranks.on_main(lambda: self.folder.take(config.resume))
        try:
            data.load(config, start, self.ranks)
            self.start(start)
        except BaseException:
            self.folder.release()
            raise
        self.log = RunLog(config, self.out, self.ranks, trackers)
        self.watch = Stopwatch()
        self.step = 0  # number of steps done
        self.stopped_by = 0  # number of the signal that stopped the run, else 0
        self.mid_update = False  # whether parameters may be between two steps
        self.rng = random_state(self.device)

    def start(self, parts: data.Start) -> None:
        """Make the parts of the run: models on all ranks, optimizer, losses, sampling, checkpoints.

        parts   the models, rows and reward functions, after `data.load`
        """
        config = self.config
        ranks = self.ranks
        self.model = parts.model
        self.tokenizer = parts.tokenizer
        self.train_rows, self.eval_rows = parts.rows
        self.reference: ParallelModel | None = None
        if parts.reference is not None:
            self.reference = ParallelModel(parts.reference, ranks, config.parallel, frozen=True)
        self.policy = ParallelModel(self.model, ranks, config.parallel)
        beta1, beta2 = config.betas
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.lr,
            betas=(beta1, beta2),
            weight_decay=config.weight_decay,
        )
        self.entropy_coef: AdaptiveEntropyCoef | None = None
        if config.entropy_target:
            self.entropy_coef = AdaptiveEntropyCoef(
                target=config.entropy_target, initial=config.entropy_coef
            )
        self.losses = Losses(config, self.policy, self.reference)
        if config.gradient_checkpointing:
            self.policy.without_gradients(check_recomputing)
        self.rollouts = Rollouts(config, self.policy, self.tokenizer, parts.rewards, ranks)
        self.draft: DraftTrainer | None = None
        if config.draft_lr > 0:
            self.draft = DraftTrainer(config, self.policy, ranks)
        self.saved = Saved(
            config=config,
            folder=self.folder,
            ranks=ranks,
            policy=self.policy,
            reference=self.reference,
            optimizer=self.optimizer,
            entropy_coef=self.entropy_coef,
            draft=self.draft,
        )
        ranks.on_main(self.saved.check_space)

    # ---- the run

    def train(self) -> bool:
        """Train up to `config.steps`.

        Returns True if all steps are done, False if SIGINT or SIGTERM stopped the run after a
        checkpoint.
        """
        self.ranks.on_main(self.folder.hold)
        self.stopped_by = 0
        try:
            if self.config.resume:
                self.step, self.rng, self.log.sizes = self.saved.restore()
            self.take_steps()
            if self.step == self.config.steps:
                self.saved.save_model(self.tokenizer)
                self.saved.save_draft()
            self.ranks.on_main(lambda: write_summary(self.out))
        finally:
            self.folder.release()
        if self.step < self.config.steps and self.ranks.main:
            print(
                f"stopped after step {self.step} of {self.config.steps}; continue with resume",
                file=sys.stderr,
            )
        return self.step == self.config.steps

    def take_steps(self) -> None:
        """Make the remaining steps, with evaluations and checkpoints.

        If an exception occurs between two steps, a checkpoint is written before it is raised again.
        """
        config = self.config
        with self.log.opened(self.step), stop_after_step() as signals:
            try:
                while self.step < config.steps and not self.stopped_by:
                    line = {"step": self.step}
                    if config.eval_steps and self.step % config.eval_steps == 0:
                        line |= self.rollouts.evaluate(self.eval_rows)
                    self.log.write(line | self.train_step())
                    # Only some ranks may have got the signal, but all must stop at the same step.
                    signal_of_rank = signals[0] if signals else 0
                    self.stopped_by = max(self.ranks.gather(signal_of_rank))
                    is_last = self.step == config.steps
                    is_due = (
                        config.checkpoint_steps > 0 and self.step % config.checkpoint_steps == 0
                    )
                    if is_due or is_last or self.stopped_by:
                        self.saved.save(self.step, self.rng, self.log.sizes)
                if self.step == config.steps and config.eval_steps:
                    self.log.write({"step": self.step, **self.rollouts.evaluate(self.eval_rows)})
            except BaseException as error:
                # Saving communicates, so it would hang unless all ranks have raised.
                all_raised = self.ranks.world == 1 or error is self.ranks.shared_error
                has_new_steps = self.step > self.saved.newest
                if has_new_steps and all_raised and not self.mid_update:
                    self.saved.save(self.step, self.rng, self.log.sizes)
                raise

    def close(self) -> None:
        """Destroy the process group if the run created it.

        All ranks must call this, after all other calls.
        """
        self.ranks.close()

    # ---- a step, from rollouts to the optimizer

    def train_step(self) -> dict[str, float]:
        """Sample one batch, score it, and update the policy. Return the metrics of the step."""
        config = self.config
        self.watch = Stopwatch()
        rows = prompts_of_step(self.train_rows, self.step, config.prompts_per_step, config.seed)
        # Each step has its own seed, so that a resumed run samples the same completions.
        generator = torch.Generator(self.device).manual_seed(config.seed * 1_000_003 + self.step)
        names = ("temperature", "top_p", "top_k", "min_p")
        sampling_options = {name: getattr(config, name) for name in names}
        completions = self.rollouts.sample(rows, config.group_size, generator, **sampling_options)
        self.watch.lap("sampling")
        scores = self.rollouts.score(rows, completions, config.group_size)
        self.watch.lap("reward")
        advantages = self.advantages(rows, completions, scores)
        self.log.keep_samples(self.step, rows, scores, advantages)
        metrics = self.update(completions, advantages)
        if self.draft is not None:
            metrics |= self.draft.update(completions)
            self.watch.lap("draft")
        self.step += 1
        if (
            self.reference is not None
            and config.ref_refresh_steps
            and self.step % config.ref_refresh_steps == 0
        ):
            # Policy and reference are sharded in the same way.
            self.reference.model.load_state_dict(self.model.state_dict())
        self.rng = random_state(self.device)
        return (
            scores.summary(config.group_size)
            | metrics
            | self.watch.metrics(sum(scores.lengths), self.device)
        )

    def update(self, completions: Completions, advantages: Tensor) -> dict[str, float]:
        """Make `num_updates` optimizer steps on one batch, and return the metrics of the last one.

        completions   the completions of this rank
        advantages    their advantages, fp32 [B] or of tokens [B, T]

        The first step is on-policy: its ratios are 1. Its log-probs are the old log-probs of the
        next steps, unless the ratio is to the sampler (`config.ratio_to`).
        """
        config = self.config
        whole_batch = self.corrected(completions, advantages)
        # (completions, inputs of their loss) of each micro-batch, and the share of completions that
        # was left out because they have no gradient
        parts, dropped = micro_batches(completions, whole_batch, config, self.ranks)
        parts = [(part, self.with_given_logps(part, batch)) for part, batch in parts]
        # One denominator for the whole batch of all ranks, with the completions that were dropped.
        # Gradients are averaged over the ranks instead of summed, so it is divided by their number.
        normalizer = global_normalizer(self.objective, whole_batch) / self.ranks.world
        metrics = {}
        self.mid_update = True  # no checkpoint until all steps are done
        for k in range(config.num_updates):
            if self.entropy_coef is not None:
                self.objective = replace(self.objective, entropy_coef=self.entropy_coef.coef)
            logps, part_metrics = self.accumulate_gradients(parts, normalizer)
            if k == 0 and config.ratio_to == "policy":
                # The first step had no old log-probs: its ratios are 1.
                parts = [
                    (part, replace(batch, old_logps=old_logps))
                    for (part, batch), old_logps in zip(parts, logps, strict=True)
                ]
            optimizer_metrics = self.move(config.lr_at(self.step * config.num_updates + k))
            metrics = update_metrics(
                part_metrics, self.objective, self.ranks, weighted=bool(config.corrections)
            )
            metrics |= optimizer_metrics
            if self.entropy_coef is not None:  # it adapts to the entropy of each step
                metrics["entropy_coef"] = self.entropy_coef.coef
                self.entropy_coef.update(metrics["entropy"])
            self.watch.lap("optimizer")
        self.mid_update = False
        return metrics | {"dropped": dropped}

    def with_given_logps(self, part: Completions, batch: TokenBatch) -> TokenBatch:
        """Return the batch of a micro-batch with the log-probs that are known before its forward.

        These are the sampler's as old log-probs, if the ratio is to the sampler, and the
        reference's, if the objective estimates a KL from them.

        part    the completions of the micro-batch
        batch   their targets and advantages
        """
        if self.config.ratio_to == "sampler":
            batch = replace(batch, old_logps=part.logps)
        # An exact divergence needs all log-probs of the reference. The loss computes these itself.
        if self.reference is not None and self.objective.exact is None:
            ref_logps = self.reference.without_gradients(self.losses.logps, part)
            batch = replace(batch, ref_logps=ref_logps)
        return batch

    def accumulate_gradients(
        self, parts: list[Part], normalizer: Tensor | Denominators
    ) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Run forward and backward of each micro-batch, and add up the gradients in `.grad`.

        parts        the micro-batches of this rank
        normalizer   the denominator of the loss, see `global_normalizer`

        Returns, with one entry for each micro-batch, the log-probs of the policy [B, T], and the
        metrics, 0-d tensors.
        """
        logps = list[Tensor]()
        metrics = list[dict[str, Tensor]]()
        for i, (part, batch) in enumerate(parts):
            is_last = i == len(parts) - 1
            # Gradients are reduced over the ranks once, in the backward of the last micro-batch.
            with self.policy.reduction(is_last), recomputing(self.model):
                out = self.policy(self.losses.loss, part, batch, self.objective, normalizer)
                out.loss.backward()
            logps.append(out.logps)
            metrics.append({"loss": out.loss.detach() / self.ranks.world, **out.metrics})
        return logps, metrics

    def move(self, lr: float) -> dict[str, float]:
        """Make an optimizer step with clipped gradients.

        The step is skipped if the gradient is not finite: one bad batch must not end in NaN
        parameters.

        lr   the learning rate of this step

        Returns the metrics "grad_norm" (before clipping), "lr" and "skipped" (0 or 1).
        """
        grad_norm = self.policy.clip_gradients(self.config.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # This waits for the device, so the time of the lap below includes the backward.
        finite = math.isfinite(grad_norm)
        self.watch.lap("gradient")
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": grad_norm.item(), "lr": lr, "skipped": float(not finite)}

    # ---- what a step needs

    def advantages(self, rows: list[Row], completions: Completions, scores: Scores) -> Tensor:
        """Return the advantages of this rank's completions on the CPU, [B] or of tokens [B, T].

        rows          the rows of all ranks
        completions   the completions of this rank
        scores        the scores of all ranks, over which groups and whitening are computed
        """
        config = self.config
        group_size = config.group_size
        estimator = config.estimator(config.advantages)
        needs = estimator.func.needs  # names of the data that this estimator uses
        evidence = dict[str, Tensor]()  # these data, for the completions of all ranks
        if "greedy_rewards" in needs:
            evidence["greedy_rewards"] = self.rollouts.greedy_rewards(rows)
        functions = {"old_logps": self.losses.logps, "sum_squares": self.losses.sum_squares}
        longest = max(scores.lengths)
        for name, function in functions.items():
            if name in needs:
                values = self.per_token_values(function, completions).cpu()
                # The completions of other ranks may be longer.
                padding = longest - values.shape[1]
                padded = torch.nn.functional.pad(values, (0, padding))
                evidence[name] = torch.cat(self.ranks.gather(padded))
        all_advantages = scores.advantages(
            estimator, config.estimator("process"), group_size=group_size, **evidence
        )
        prompts = self.ranks.share(config.prompts_per_step)
        advantages = all_advantages[prompts.start * group_size : prompts.stop * group_size]
        if advantages.dim() == 1:
            return advantages
        width = completions.targets.shape[1]
        return advantages[:, :width]

    def corrected(self, completions: Completions, advantages: Tensor) -> TokenBatch:
        """Return the batch of these completions, with the corrections that the config names.

        Corrections are weights and masks for the mismatch between sampler and policy. The batch has
        no old log-probs; `update` adds them.

        completions   the completions of this rank
        advantages    their advantages, [B] or of tokens [B, T]
        """
        batch = TokenBatch(
            completions.targets,
            advantages.to(self.device),
            mask=completions.mask,
            kept=completions.kept,
        )
        if not self.config.corrections:
            return batch
        # Corrections compare the log-probs of the policy with the sampler's.
        batch = replace(
            batch,
            old_logps=self.per_token_values(self.losses.logps, completions),
            sampler_logps=completions.logps,
        )
        group = torch.distributed.group.WORLD if self.ranks.world > 1 else None
        batch = self.config.corrected(batch, finished=completions.finished, process_group=group)
        # They are not part of the loss, whose first step takes the ratio 1.
        return replace(batch, old_logps=None, sampler_logps=None)

    def per_token_values(self, function: Any, completions: Completions) -> Tensor:
        """Return the results of a method of `Losses` for all completions of this rank, [B, T].

        Runs micro-batches of `config.micro_batch` completions, without gradients.

        function   `Losses.logps` or `Losses.sum_squares`
        """
        row_ids = torch.arange(len(completions.ids), device=self.device)
        results = []
        for rows in pieces(row_ids, self.config.micro_batch, self.ranks):
            # All ranks must make the same number of forwards. A rank without rows left takes its
            # first row again. The last line drops such results.
            part = completions[rows if len(rows) > 0 else row_ids[:1]]
            results.append(self.policy.without_gradients(function, part))
        return torch.cat(results)[: len(row_ids)]


def main(argv: list[str]) -> int:
    """Run `python -m grpo_kernels train`, and return its exit status.

    argv   the arguments after "train"

    0: done. 128 + the number of a signal (130, 143): stopped by it after a step, with a checkpoint
    to resume from. 2: an argument is wrong.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        config = parse(argv)
        require("transformers").set_seed(
            (config.seed * 1_000_003 + int(os.environ.get("RANK", "0"))) % 2**32
        )
        trainer = Trainer(config)
    except (ValueError, ImportError, OSError) as error:
        # transformers raises OSError for a name or path that it cannot load.
        print(f"error: {error}", file=sys.stderr)
        return 2
    done = trainer.train()
    if config.progress and trainer.ranks.main:
        print((trainer.out / "summary.txt").read_text(), end="")
    trainer.close()
    return trainer.ranks.leave(0 if done else 128 + trainer.stopped_by)
