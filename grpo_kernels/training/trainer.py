"""A reference trainer for GRPO, thin enough to read in one sitting.

    python -m grpo_kernels train --model Qwen/Qwen3-0.6B --dataset openai/gsm8k --dataset-config
    main --rewards number

Each step: take prompts, sample G completions of each, score them, turn rewards into
group-normalised advantages, and make `num_updates` optimizer steps on the objective. Its
simplifications: no tools or turns, no critic, and the model that samples is the model that trains.
Where top-k, top-p or min-p cut tokens off, it trains over the sets that they left (`replay`).

    torchrun --nproc-per-node 8 -m grpo_kernels train --parallel fsdp2 ...

On several processes each takes some of the prompts, with all completions of each. The steps are
those of one process, up to rounding. Clip-Cov, KL-Cov and M2PO select among the completions of one
process, and reward functions are called with them.
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
from ..rewards.entropy import AdaptiveEntropyCoef
from . import Ranks, data, require
from .config import TrainConfig, parse
from .data import Row, prompts_of_step
from .draft import DraftTrainer
from .policy import Completions, Losses, LossParts, ParallelModel, check_recomputing, recomputing
from .report import RunLog, Stopwatch, Tracker, update_metrics, write_summary
from .rewards import RewardFunction, Scores
from .rollouts import Rollouts, micro_batches, pieces
from .saving import OutputFolder, Saved, random_state, stop_after_step

__all__ = ["LossParts", "TrainConfig", "Trainer"]


class Trainer:
    """A run. `model`, `tokenizer`, `rows` (training rows, held-out rows), `rewards` and `teacher`
    replace what the config names; a row is a dict with "prompt" and the columns that the reward
    functions take. `trackers` get the metrics too.

    Of several processes (see `training.policy`) each makes a Trainer with the same arguments, and
    calls the same methods; rank 0 alone writes. What can be wrong with the output folder, the
    device or the options is found here, before anything slow.
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
        self.config = config
        self.out = Path(config.out)
        start = data.Start(model, tokenizer, rows, rewards, teacher)
        self.device = data.check(config, start)
        self.ranks = Ranks(self.device)
        self.objective = config.objective  # which from now on knows of the ranks
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
        self.step = 0  # steps done
        self.stopped_by = 0  # the signal that stopped the run, if one did
        self.mid_update = False
        self.rng = random_state(self.device)

    def start(self, given: data.Start) -> None:
        config = self.config
        ranks = self.ranks
        self.model = given.model
        self.tokenizer = given.tokenizer
        self.train_rows, self.eval_rows = given.rows
        self.reference = (
            None
            if given.reference is None
            else ParallelModel(given.reference, ranks, config.parallel, frozen=True)
        )
        self.policy = ParallelModel(self.model, ranks, config.parallel)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
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
        self.rollouts = Rollouts(config, self.policy, self.tokenizer, given.rewards, ranks)
        self.draft: DraftTrainer | None = None
        if config.draft_lr > 0:
            self.draft = DraftTrainer(config, self.policy, ranks)
        self.saved = Saved(
            config,
            self.folder,
            ranks,
            self.policy,
            self.reference,
            self.optimizer,
            self.entropy_coef,
            self.draft,
        )
        ranks.on_main(self.saved.check_space)

    # ---- the run

    def train(self) -> bool:
        """Run up to `config.steps`.

        True when done; False when stopped by SIGINT or SIGTERM, with everything saved.
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
        config = self.config
        with self.log.opened(self.step), stop_after_step() as signals:
            try:
                while self.step < config.steps and not self.stopped_by:
                    line = {"step": self.step}
                    if config.eval_steps and self.step % config.eval_steps == 0:
                        line |= self.rollouts.evaluate(self.eval_rows)
                    self.log.write(line | self.train_step())
                    self.stopped_by = max(self.ranks.gather(signals[0] if signals else 0))
                    due = config.checkpoint_steps > 0 and self.step % config.checkpoint_steps == 0
                    if due or self.stopped_by or self.step == config.steps:
                        self.saved.save(self.step, self.rng, self.log.sizes)
                if self.step == config.steps and config.eval_steps:
                    self.log.write({"step": self.step, **self.rollouts.evaluate(self.eval_rows)})
            except BaseException as error:
                # Between updates the parameters are those of the last whole step, and worth
                # keeping; of several processes all have to come here to save.
                together = self.ranks.world == 1 or error is self.ranks.shared_error
                if self.step > self.saved.newest and not self.mid_update and together:
                    self.saved.save(self.step, self.rng, self.log.sizes)
                raise

    def close(self) -> None:
        """Leave the process group that the run made, if it did; all ranks together, after the last
        call of the others.
        """
        self.ranks.close()

    # ---- a step, from rollouts to the optimizer

    def train_step(self) -> dict[str, float]:
        """One batch: sample, score, update. Returns its metrics."""
        config = self.config
        self.watch = Stopwatch()
        rows = prompts_of_step(self.train_rows, self.step, config.prompts_per_step, config.seed)
        # A seed for each step, so that a resumed run samples the same.
        generator = torch.Generator(self.device).manual_seed(config.seed * 1_000_003 + self.step)
        cuts = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        completions = self.rollouts.sample(rows, config.group_size, generator, **cuts)
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
            self.reference.model.load_state_dict(
                self.model.state_dict()
            )  # in shards of the same cut
        self.rng = random_state(self.device)
        return (
            scores.summary(config.group_size)
            | metrics
            | self.watch.metrics(sum(scores.lengths), self.device)
        )

    def update(self, completions: Completions, advantages: Tensor) -> dict[str, float]:
        """`num_updates` optimizer steps on one batch. The first is on-policy, and its log-probs are
        the old ones of the others: they were computed before any step, by the same code; unless the
        ratio is to the sampler (`config.ratio_to`). Of several ranks each brings its part of the
        batch.
        """
        config = self.config
        whole = self.corrected(completions, advantages)
        parts, dropped = micro_batches(completions, whole, config, self.ranks)
        if config.ratio_to == "sampler":
            parts = [(some, replace(batch, old_logps=some.logps)) for some, batch in parts]
        if self.reference is not None and self.objective.exact is None:
            parts = [
                (
                    some,
                    replace(
                        batch, ref_logps=self.reference.without_gradients(self.losses.logps, some)
                    ),
                )
                for some, batch in parts
            ]
        # One denominator for the whole batch, however it is cut and whatever is left out; over the
        # world: gradients are averaged over the ranks where they should be added.
        normalizer = global_normalizer(self.objective, whole) / self.ranks.world
        metrics = {}
        self.mid_update = True
        for k in range(config.num_updates):
            logps = list[Tensor]()
            told = list[dict[str, Tensor]]()
            if self.entropy_coef is not None:
                self.objective = replace(self.objective, entropy_coef=self.entropy_coef.coef)
            for i, part in enumerate(parts):
                with self.policy.reduction(i == len(parts) - 1), recomputing(self.model):
                    out = self.policy(self.losses.loss, *part, self.objective, normalizer)
                    out.loss.backward()
                logps.append(out.logps)
                told.append({"loss": out.loss.detach() / self.ranks.world, **out.metrics})
            if k == 0 and config.ratio_to == "policy":
                parts = [
                    (some, replace(batch, old_logps=own))
                    for (some, batch), own in zip(parts, logps, strict=True)
                ]
            moved = self.move(config.lr_at(self.step * config.num_updates + k))
            metrics = (
                update_metrics(told, self.objective, self.ranks, weighted=bool(config.corrections))
                | moved
            )
            if self.entropy_coef is not None:
                metrics["entropy_coef"] = self.entropy_coef.coef
                self.entropy_coef.update(metrics["entropy"])
            self.watch.lap("optimizer")
        self.mid_update = False
        return metrics | {"dropped": dropped}

    def move(self, lr: float) -> dict[str, float]:
        """The optimizer step."""
        norm = self.policy.clip_gradients(self.config.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        finite = math.isfinite(norm)
        self.watch.lap("gradient")
        if finite:  # else the step is left out: one bad batch must not end in NaN parameters
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": norm.item(), "lr": lr, "skipped": float(not finite)}

    # ---- what a step needs

    def advantages(self, rows: list[Row], completions: Completions, scores: Scores) -> Tensor:
        """Advantages of this rank's completions on the CPU, [B] or [B, T], estimated from the
        scores of all ranks.
        """
        config = self.config
        known = dict[str, Tensor]()
        estimate = config.estimator(config.advantages)
        if "greedy_rewards" in estimate.func.needs:
            known["greedy_rewards"] = self.rollouts.greedy_rewards(rows)
        for name, function in (
            ("old_logps", self.losses.logps),
            ("sum_squares", self.losses.sum_squares),
        ):
            if name in estimate.func.needs:
                part = self.of_policy(function, completions).cpu()
                padded = torch.nn.functional.pad(part, (0, max(scores.lengths) - part.shape[1]))
                known[name] = torch.cat(self.ranks.gather(padded))
        of_all = scores.advantages(
            estimate, config.estimator("process"), group_size=config.group_size, **known
        )
        own = self.ranks.share(config.prompts_per_step)
        part = of_all[own.start * config.group_size : own.stop * config.group_size]
        return part if part.dim() == 1 else part[:, : completions.targets.shape[1]]

    def corrected(self, completions: Completions, advantages: Tensor) -> TokenBatch:
        """Completions and their advantages, with the weights and masks that the config names for
        what the sampler did otherwise than the policy that is trained. Without old log-probs, which
        the update knows.
        """
        batch = TokenBatch(
            completions.targets,
            advantages.to(self.device),
            mask=completions.mask,
            kept=completions.kept,
        )
        if not self.config.corrections:
            return batch
        batch = replace(
            batch,
            old_logps=self.of_policy(self.losses.logps, completions),
            sampler_logps=completions.logps,
        )
        group = torch.distributed.group.WORLD if self.ranks.world > 1 else None
        batch = self.config.corrected(batch, finished=completions.finished, process_group=group)
        return replace(batch, old_logps=None, sampler_logps=None)

    def of_policy(self, function: Any, completions: Completions) -> Tensor:
        """Numbers per token [B, T] under the current policy, 0 at padding."""
        every = torch.arange(len(completions.ids), device=self.device)
        parts = [
            completions[rows if len(rows) else every[:1]]
            for rows in pieces(every, self.config.micro_batch, self.ranks)
        ]
        return torch.cat([self.policy.without_gradients(function, part) for part in parts])[
            : len(every)
        ]


def main(argv: list[str]) -> int:
    """`python -m grpo_kernels train`. Exit status 0: done; 128 + the signal's number (130, 143):
    stopped by it after a step, with a checkpoint to resume from; 2: something in the arguments is
    wrong.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        config = parse(argv)
        require("transformers").set_seed(
            (config.seed * 1_000_003 + int(os.environ.get("RANK", "0"))) % 2**32
        )
        trainer = Trainer(config)
    except (
        ValueError,
        ImportError,
        OSError,
    ) as error:  # OSError: a name or path that transformers cannot load
        print(f"error: {error}", file=sys.stderr)
        return 2
    done = trainer.train()
    if config.progress and trainer.ranks.main:
        print((trainer.out / "summary.txt").read_text(), end="")
    trainer.close()
    return trainer.ranks.leave(0 if done else 128 + trainer.stopped_by)
