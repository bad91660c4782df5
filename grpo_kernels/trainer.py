"""A reference trainer for GRPO, thin enough to read in one sitting.

    python -m grpo_kernels train --model Qwen/Qwen3-0.6B --dataset openai/gsm8k --dataset-config main --rewards number

Each step: take prompts, sample G completions of each, score them, turn rewards into group-normalised advantages, and
make `num_updates` optimizer steps on the objective. Its simplifications: no tools or turns, and the model that samples is
the model that trains, so log-probs at sampling need no correction.

    torchrun --nproc-per-node 8 -m grpo_kernels train --parallel fsdp2 ...

On several processes each takes some of the prompts, with all completions of each. The steps are those of one process, to
rounding; only what looks at a whole batch of its own choice stays with its process: the selections of Clip-Cov and KL-Cov,
and reward functions, which are called with the completions of one process.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .batch import TokenBatch
from .distributed import global_normalizer
from .entropy import AdaptiveEntropyCoef
from .filters import EntropyQuantile
from .logprobs import linear_logprobs, token_logprobs
from .losses import grpo_loss, linear_grpo_loss
from .objective import Denominators, Objective
from .training import checkpoints, randomness, require
from .training.config import TrainConfig, parse_args
from .training.data import EVAL_PROMPTS, Row, encode, load_rows, prompts_of_step
from .training.head import check_projection, completion_hidden, head_parameters, logit_transform
from .training.loading import check_backend, check_liger, check_names, load_policy, pick_device, prepare_policy
from .training.output import OutputFolder
from .training.parallel import ParallelModel, same_on_all_ranks
from .training.ranks import Ranks
from .training.recompute import check_recomputing, recomputing
from .training.report import MetricsLog, combine, damaged_from, numbers, plot
from .training.rewards import RewardFunction, RewardModel, Rewards, Scores, call, name_of, resolve, score
from .training.sampling import Completions, autocast, completion_logits, end_ids, sample
from .training.stopping import stop_after_step
from .transform import LogitTransform

__all__ = ["TrainConfig", "Trainer", "main"]

Tensor = torch.Tensor

#: What may differ between a run and its continuation without changing the steps.
FREE_TO_CHANGE = {
    "steps", "out", "resume", "progress", "checkpoint_steps", "keep_checkpoints", "eval_steps", "eval_prompts", "parallel"
}  # fmt: skip


class LossParts(NamedTuple):
    """Of `LossOutput`, the tensors: wrappers of a model look for them in what a forward returns."""

    loss: Tensor
    logps: Tensor
    metrics: dict[str, Tensor]


class Trainer:
    """A run. `model`, `tokenizer`, `rows` (training rows, held-out rows) and `rewards` replace what the config names;
    a row is a dict with "prompt" and the columns that the reward functions take.

    Of several processes (see `training.ranks`) each makes a Trainer with the same arguments, and calls the same methods; rank
    0 alone writes. What can be wrong with the output folder, the device or the options is found here, before anything slow."""

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
        self.folder, self.stopped_by = OutputFolder(self.out), 0
        try:
            self.set_up(model, tokenizer, rows, rewards)
        except BaseException:
            self.folder.release()
            raise

    def set_up(
        self, model: Any, tokenizer: Any, rows: tuple[list[Row], list[Row]] | None, rewards: list[RewardFunction] | None
    ) -> None:
        config = self.config
        self.device = pick_device(config.device)
        self.backend = "eager" if config.loss == "eager" else config.backend
        check_backend(self.backend, self.device)
        if model is None:
            check_names(config)
        for package in ("matplotlib", "tqdm"):
            require(package)
        self.ranks = Ranks(self.device)
        self.ranks.on_main(lambda: self.folder.take(config.resume))
        if config.prompts_per_step < self.ranks.world:
            raise ValueError(
                f"prompts_per_step={config.prompts_per_step}: the {self.ranks.world} processes of this run take a prompt each at "
                "least, with all its completions; raise it, or start fewer."
            )
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
        if config.reward_model is not None:
            self.rewards.append(RewardModel(config.reward_model, self.device))
        self.reward_weights = config.reward_weights or [1.0] * len(self.rewards)
        train_rows, eval_rows = rows or load_rows(config)
        self.train_rows = self.encoded(train_rows, "training")
        self.eval_rows = self.encoded(eval_rows[: config.eval_prompts or EVAL_PROMPTS], "held-out") if config.eval_steps else []
        self.ends = end_ids(model, tokenizer)
        model = prepare_policy(model, config)
        if self.ranks.world == 1 or config.parallel != "fsdp2":  # which moves a layer at a time, and keeps a shard of it
            model.to(self.device)
        same_on_all_ranks(model, self.ranks)
        self.reference: ParallelModel | None = None
        if self.objective.beta:
            self.reference = ParallelModel(copy.deepcopy(model), self.ranks, config.parallel, frozen=True)
        self.model, self.policy = model, ParallelModel(model, self.ranks, config.parallel)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=(config.betas[0], config.betas[1]), weight_decay=config.weight_decay
        )
        if self.ranks.world > 1:
            self.objective = of_all_ranks(self.objective)
        self.entropy_coef: AdaptiveEntropyCoef | None = None
        if config.entropy_target:
            self.entropy_coef = AdaptiveEntropyCoef(target=config.entropy_target, initial=config.entropy_coef)
        self.ranks.on_main(self.check_space)
        self.step = 0  # steps done
        self.rng = randomness.state(self.device)
        self.mid_update = False
        self.transform = LogitTransform(config.temperature)
        if config.loss == "linear":
            self.policy.without_gradients(check_projection)
            self.transform = logit_transform(self.model, config.temperature)
        if config.gradient_checkpointing:
            self.policy.without_gradients(check_recomputing)
        # A model that softcaps its logits needs their values in its own backward.
        self.inplace = config.loss == "logits" and getattr(self.model.config, "final_logit_softcapping", None) is None

    def encoded(self, rows: list[Row], which: str) -> list[Row]:
        kept = encode(rows, self.tokenizer, self.config, which)
        if len(kept) < len(rows) and self.ranks.main:
            limit = self.config.max_prompt_tokens
            print(f"left out {len(rows) - len(kept)} of {len(rows)} {which} prompts: longer than max_prompt_tokens={limit}")
        return kept

    # ---- the run

    def train(self) -> bool:
        """Run up to `config.steps`. True when done; False when stopped by SIGINT or SIGTERM, with everything saved."""
        config, main = self.config, self.ranks.main
        if config.resume:
            self.restore()
        log = MetricsLog(self.folder.metrics, resume_at=self.step + (self.step >= config.steps)) if main else None
        bar = require("tqdm").tqdm(total=config.steps, initial=self.step, disable=not (config.progress and main), desc="grpo")
        try:
            with stop_after_step() as signals:
                stop = False
                while self.step < config.steps and not stop:
                    line: dict[str, Any] = {"step": self.step}
                    if config.eval_steps and self.step % config.eval_steps == 0:
                        line |= self.evaluate()
                    line |= self.train_step()
                    self.write(log, line)
                    bar.update()
                    bar.set_postfix({k: f"{line[k]:.3g}" for k in ("reward", "kl", "entropy") if k in line})
                    if self.step == config.steps and config.eval_steps:
                        self.write(log, {"step": self.step, **self.evaluate()})
                    if stop := self.ranks.any(bool(signals)):
                        self.stopped_by = max(self.ranks.gather(signals[0] if signals else 0))
                    due = config.checkpoint_steps > 0 and self.step % config.checkpoint_steps == 0
                    if due or stop or self.step == config.steps:
                        self.save()
        except BaseException as error:
            # Between updates the parameters are those of the last whole step, and worth keeping; of several processes all
            # have to come here to save.
            together = self.ranks.world == 1 or error is self.ranks.shared_error
            if self.step and not self.mid_update and together:
                self.save()
            raise
        finally:
            bar.close()
            if log is not None:
                log.close()
                self.draw()
            self.folder.release()
        if self.step < config.steps:
            if main:
                print(f"stopped after step {self.step} of {config.steps}; continue with resume", file=sys.stderr)
            return False
        self.save_model(self.folder.model)
        return True

    def draw(self) -> None:
        """The picture of the curves, without which a run is one all the same."""
        try:
            plot(self.folder.metrics, self.folder.picture)
        except Exception as error:
            print(f"{self.folder.picture} is not drawn: {type(error).__name__}: {error}", file=sys.stderr)

    def write(self, log: MetricsLog | None, line: dict[str, Any]) -> None:
        """A line of metrics, on rank 0, which alone has the file."""
        self.ranks.on_main(lambda: log.write(line))  # type: ignore[union-attr]

    def train_step(self) -> dict[str, float]:
        """One batch: sample, score, update. Returns its metrics."""
        config, started = self.config, time.perf_counter()
        rows = prompts_of_step(self.train_rows, self.step, config.prompts_per_step, config.seed)
        # Every step has a seed of its own, so that a resumed run samples the same.
        generator = torch.Generator(self.device).manual_seed(config.seed * 1_000_003 + self.step)
        completions = self.sample(rows, config.group_size, config.temperature, config.top_p, config.top_k, generator)
        sampled = time.perf_counter()
        scores = self.score(rows, completions, config.group_size)
        metrics = self.update(completions, self.own(scores.advantages, completions))
        self.step += 1
        if self.reference is not None and config.ref_refresh_steps and self.step % config.ref_refresh_steps == 0:
            self.reference.model.load_state_dict(self.model.state_dict())  # in shards of the same cut
        self.rng = randomness.state(self.device)

        grouped, lengths = scores.totals.view(-1, config.group_size), scores.lengths
        done = time.perf_counter()
        return {
            "reward": scores.totals.mean().item(),
            "reward_std": scores.totals.std(unbiased=False).item(),
            "zero_variance_groups": (grouped.amax(1) == grouped.amin(1)).float().mean().item(),
            "completion_length": sum(lengths) / len(lengths),
            **metrics,
            "seconds": done - started,
            "sampling_seconds": sampled - started,
            "tokens_per_second": sum(lengths) / (done - started),
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
        """Completions of this rank's share of the rows. The generator, the same on all ranks, draws for all rows, so that what
        is sampled does not depend on how many processes sample."""
        share, total = self.ranks.share(len(rows)), len(rows) * group_size
        prompts = [row["prompt_ids"] for row in rows[share]]
        first, count = share.start * group_size, len(prompts) * group_size

        def uniform() -> Tensor:
            draws = torch.rand(total, dtype=torch.float64, device=self.device, generator=generator)
            return draws[first : first + count] if prompts else draws[:group_size]

        with autocast(self.device, self.dtype, cache=not self.policy.sharded):
            found = self.policy.without_gradients(
                partial(
                    sample, group_size=group_size, max_new_tokens=self.config.max_new_tokens, ends=self.ends,
                    temperature=temperature, top_p=top_p, top_k=top_k, uniform=uniform,
                    wanted=self.ranks.any if self.policy.sharded else bool,
                ),
                prompts or [rows[0]["prompt_ids"]],
            )  # fmt: skip
        return found[:count]

    def score(self, rows: list[Row], completions: Completions, group_size: int) -> Scores:
        """The scores of the completions of all rows, those of other ranks too."""
        repeated = [row for row in rows[self.ranks.share(len(rows))] for _ in range(group_size)]
        tokens = completions.tokens

        def own() -> tuple[list[Rewards], list[int]]:
            rewards = call(
                self.rewards,
                prompts=[row["prompt"] for row in repeated],
                completions=[self.tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens],
                tokens=tokens,
                columns={name: [row[name] for row in repeated] for name in rows[0] if name not in ("prompt", "prompt_ids")},
            )
            return rewards, list(map(len, tokens))

        found = self.ranks.together(own)
        lengths = [n for _, part in found for n in part]
        functions = zip(*(rewards for rewards, _ in found), strict=True)
        whole = [Rewards(parts[0].name, [v for part in parts for v in part.values]) for parts in functions]
        options = self.config.advantage_options
        return score(whole, self.reward_weights, lengths=lengths, group_size=group_size, options=options)

    def own(self, advantages: Tensor, completions: Completions) -> Tensor:
        """This rank's rows of the advantages of all, as wide as its completions."""
        rows, prompts = self.config.group_size, self.ranks.share(self.config.prompts_per_step)
        part = advantages[prompts.start * rows : prompts.stop * rows]
        return (part if part.dim() == 1 else part[:, : completions.targets.shape[1]]).to(self.device)

    def update(self, completions: Completions, advantages: Tensor) -> dict[str, float]:
        """`num_updates` optimizer steps on one batch. The first is on-policy, and its log-probs are the old ones of the
        others: they were computed before any step, by the same code. Of several ranks each brings its part of the batch."""
        config, world = self.config, self.ranks.world
        # One denominator for the whole batch, however it is cut and whatever is left out.
        whole = TokenBatch(completions.targets, advantages, mask=completions.mask)
        total, nothing = len(completions.ids), (blank(completions[:1]), 0 * advantages[:1])
        if config.drop_zero_variance:
            wanted = (advantages.reshape(total, -1) != 0).any(1)
            if not self.ranks.any(bool(wanted.any())):
                wanted[0] = self.ranks.main  # an update of nothing is still one: the optimizer's averages decay
            completions, advantages = completions[wanted], advantages[wanted]
        count = len(completions.ids)
        counts, totals = zip(*self.ranks.gather((count, total)), strict=True)
        size = config.micro_batch or max(counts)
        parts = [(completions[at : at + size], advantages[at : at + size]) for at in range(0, count, size)]
        # Every rank makes as many passes as the one with the most completions: without any, over masked tokens.
        parts += [nothing] * (-(-max(counts) // size) - len(parts))
        ref_logps = [None if self.reference is None else self.reference_logps(part) for part, _ in parts]
        old_logps: list[Tensor | None] = [None] * len(parts)
        metrics: dict[str, float] = {}
        self.mid_update = True
        for k in range(config.num_updates):
            outs: list[LossParts] = []
            if self.entropy_coef is not None:
                self.objective = dataclasses.replace(self.objective, entropy_coef=self.entropy_coef.coef)
            # Over the world: gradients are averaged over the ranks where they should be added.
            normalizer = global_normalizer(self.objective, whole) / world
            for i, (part, advantage) in enumerate(parts):
                batch = TokenBatch(
                    part.targets, advantage, mask=part.mask, old_logps=old_logps[i], ref_logps=ref_logps[i]
                )  # fmt: skip
                with self.policy.reduction(i == len(parts) - 1), recomputing(self.model):
                    out: LossParts = self.policy(self.loss, part, batch, normalizer)
                    out.loss.backward()
                outs.append(LossParts(out.loss.detach(), out.logps, out.metrics))
            if k == 0:
                old_logps = [out.logps for out in outs]
            norm = self.policy.clip_gradients(config.max_grad_norm)
            lr = config.lr_at(self.step * config.num_updates + k)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            if finite := math.isfinite(norm):  # else the step is left out: one bad batch must not end in NaN parameters
                self.optimizer.step()
            self.optimizer.zero_grad()
            lines = numbers([out.metrics | {"loss": out.loss / world} for out in outs])
            metrics = combine([line for part in self.ranks.gather(lines) for line in part]) | {
                "grad_norm": norm.item(),
                "lr": lr,
                "skipped": float(not finite),
            }
            if world > 1 and self.objective.filter(EntropyQuantile):
                del metrics["kept"]  # which leaves out a quantile over ranks
            if self.entropy_coef is not None:
                metrics["entropy_coef"] = self.entropy_coef.coef
                self.entropy_coef.update(metrics["entropy"])
        self.mid_update = False
        return metrics | {"dropped": 1 - sum(counts) / sum(totals)}

    def loss(self, model: Any, completions: Completions, batch: TokenBatch, normalizer: Tensor | Denominators) -> LossParts:
        """The objective of one micro-batch: from hidden states, so that logits never exist, or from the model's logits."""
        with autocast(self.device, self.dtype, cache=not self.policy.sharded):
            if self.config.loss == "linear":
                hidden, (weight, bias) = completion_hidden(model, completions), head_parameters(model)
                out = linear_grpo_loss(
                    hidden, weight, batch, self.objective,
                    bias=bias, transform=self.transform, normalizer=normalizer, backend=self.backend,
                )  # fmt: skip
                return LossParts(out.loss, out.logps, out.metrics)
            logits = completion_logits(model, completions)
        out = grpo_loss(
            logits, batch, self.objective,
            transform=self.transform, normalizer=normalizer, inplace=self.inplace, backend=self.backend,
        )  # fmt: skip
        return LossParts(out.loss, out.logps, out.metrics)

    def reference_logps(self, completions: Completions) -> Tensor:
        assert self.reference is not None
        targets = completions.targets
        options: dict[str, Any] = {"mask": completions.mask, "transform": self.transform, "backend": self.backend}

        def logps(model: Any) -> Tensor:
            with autocast(self.device, self.dtype, cache=not self.policy.sharded):
                if self.config.loss == "linear":
                    hidden, (weight, bias) = completion_hidden(model, completions), head_parameters(model)
                    return linear_logprobs(hidden, weight, targets, bias=bias, **options)[0]
                logits = completion_logits(model, completions)
            return token_logprobs(logits, targets, **options)[0]

        return self.reference.without_gradients(logps)

    def evaluate(self) -> dict[str, Any]:
        """Held-out prompts, one completion each. "accuracy": the share to which the first reward function gives at least 1, and
        in words what that counts; "eval_reward": the mean of all rewards."""
        size = self.config.prompts_per_step * self.config.group_size
        solved, total, count = 0, 0.0, len(self.eval_rows)
        for at in range(0, count, size):
            rows = self.eval_rows[at : at + size]
            generator = torch.Generator(self.device).manual_seed(self.config.seed + at)
            scores = self.score(rows, self.sample(rows, 1, self.config.eval_temperature, generator=generator), 1)
            solved += int((scores.first >= 1).sum())
            total += float(scores.totals.sum())
        counts = f"{name_of(self.rewards[0])} >= 1, {count} prompts"
        return {"accuracy": solved / count, "accuracy_counts": counts, "eval_reward": total / count}

    # ---- saving

    def save(self) -> None:
        """A checkpoint that runs of any number of processes and either layout continue from."""
        state = {
            "step": self.step,
            "model": self.policy.state(),
            "optimizer": self.policy.optimizer_state(self.optimizer),
            "reference": None if self.reference is None else self.reference.state(),
            "entropy_coef": None if self.entropy_coef is None else self.entropy_coef.state_dict(),
            "rng": self.ranks.gather(self.rng),
            "config": dataclasses.asdict(self.config),
        }
        self.ranks.on_main(lambda: checkpoints.save(self.folder.checkpoints, self.step, state, self.config.keep_checkpoints))

    def check_space(self) -> None:
        """Room for one checkpoint more than are kept (a new one is whole before an old one goes) and for the model."""
        model = sum(p.numel() * p.element_size() for p in self.model.parameters())  # of shards: the whole
        trained = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        each = model * (1 + (self.reference is not None)) + 2 * trained
        there = len(checkpoints.listed(self.folder.checkpoints))
        self.folder.check_space(model + each * max(self.config.keep_checkpoints + 1 - there, 1))

    def save_model(self, folder: Path) -> None:
        state = self.policy.state() if self.policy.sharded else None

        def write() -> None:
            self.model.save_pretrained(folder, state_dict=state)
            self.tokenizer.save_pretrained(folder)

        self.ranks.on_main(write)

    def restore(self) -> None:
        """Continue from the newest intact checkpoint: model, optimizer, reference, random states and place in the data."""
        state: dict[str, Any] = {}  # whole on rank 0, which alone reads
        own = ("model", "optimizer", "reference")

        def read() -> dict[str, Any]:
            if self.ranks.main:
                state.update(self.read_checkpoint())
            return {name: value for name, value in state.items() if name not in own} | {
                "reference": state.get("reference") is not None
            }

        small = self.ranks.together(read)[0]
        if "step" not in small:
            return
        self.policy.load_state(state.get("model", {}))
        self.policy.load_optimizer_state(self.optimizer, state.get("optimizer", {}))
        if self.reference is not None and small["reference"]:
            self.reference.load_state(state.get("reference", {}))
        if self.entropy_coef is not None and small.get("entropy_coef") is not None:
            self.entropy_coef.load_state_dict(small["entropy_coef"])
        self.step = small["step"]
        if self.ranks.rank < len(small["rng"]):  # a rank that the run did not have keeps its own
            self.rng = small["rng"][self.ranks.rank]
            randomness.set_state(self.rng, self.device)

    def read_checkpoint(self) -> dict[str, Any]:
        """{} where there is none."""
        damaged = damaged_from(self.folder.metrics)
        state, problems = checkpoints.load_newest(self.folder.checkpoints, until=damaged)
        for problem in problems:
            print(f"checkpoint passed over: {problem}", file=sys.stderr)
        if state is None:
            if problems:  # to start afresh here would drop the metrics and the damaged checkpoints
                raise ValueError(
                    f"out={str(self.out)!r} holds damaged checkpoints only: mend or remove them, or choose another folder."
                )
            return {}
        if damaged is not None and state["step"] > damaged:
            print(f"{self.folder.metrics} is damaged: lines from step {damaged} on are lost", file=sys.stderr)
        now = dataclasses.asdict(self.config)
        free = FREE_TO_CHANGE if self.config.lr_schedule == "constant" else FREE_TO_CHANGE - {"steps"}
        changed = [k for k in now if k not in free and state["config"].get(k) != now[k]]
        if changed:
            print(f"resuming with other values of {', '.join(changed)}: not the run that was interrupted", file=sys.stderr)
        return state

    def close(self) -> None:
        """Leave the process group that the run made, if it did; all ranks together, after the last call of the others."""
        self.ranks.close()


def blank(completions: Completions) -> Completions:
    """The same without completion tokens."""
    attention = completions.attention.clone()
    attention[:, completions.prompt_width :] = False
    return Completions(completions.ids, attention, completions.prompt_width)


def of_all_ranks(objective: Objective) -> Objective:
    """The quantile of entropy over the tokens of all ranks, as that of one process is over its whole batch."""
    quantile = objective.filter(EntropyQuantile)
    if quantile is None:
        return objective
    whole = dataclasses.replace(quantile, process_group=torch.distributed.group.WORLD)
    return dataclasses.replace(objective, filters=tuple(whole if f is quantile else f for f in objective.filters))


def main(argv: list[str]) -> int:
    """`python -m grpo_kernels train`. Exit status 0: done; 128 + the signal's number (130, 143): stopped by it after a step, with a
    checkpoint to resume from; 2: something in the arguments is wrong."""
    config = parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        randomness.seed(config.seed * 1_000_003 + int(os.environ.get("RANK", "0")))
        trainer = Trainer(config)
    except (ValueError, ModuleNotFoundError, OSError) as error:  # OSError: a name or path that transformers cannot load
        print(f"error: {error}", file=sys.stderr)
        return 2
    status = 0 if trainer.train() else 128 + trainer.stopped_by
    trainer.close()
    if trainer.ranks.world > 1:
        # DDP still holds the process group, whose destructor may wait for ever for a thread of gloo that waits for Python.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
