"""GRPO at the vocabulary of a real model, by the fused loss and by plain PyTorch side by side:
`python -m examples.demo`.

A small Qwen3 learns the arithmetic of `examples.arithmetic` from its careless teacher, with the 41
ids that the texts use. Its table then gets the 151,936 rows that Qwen's models have, and GRPO goes
on from there twice, step by step in turns, each in its own process: with the loss of this
package, and with the loss as it is written in plain PyTorch. Both sample with top-k and train over
the sets of ids that it kept; both see the same problems and draw the same random numbers. So there
should be one curve, and what differs is the time and the memory of a step.

    python -m examples.demo --seed 0 1 2 --write  # the figures and the plot of docs/training.md
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.harness import peak_memory
from benchmarks.machine import machine
from examples import arithmetic, demo_report
from grpo_kernels import TokenBatch
from grpo_kernels.training import require
from grpo_kernels.training.policy import Completions, Losses, LossParts, completion_logits
from grpo_kernels.training.rewards import exact
from grpo_kernels.training.trainer import TrainConfig, Trainer

Line = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The size of the model and of the run."""

    vocab: int = 151_936
    top_k: int = 20
    width: int = 64
    layers: int = 2
    warm_up: int = 1000
    steps: int = 48
    prompts: int = 16
    group: int = 8
    lr: float = 1e-4
    held_out: int = 300


# ---- training with one of the losses


class PlainLosses(Losses):
    """The on-policy loss of GRPO in plain PyTorch, with all logits in memory.

    It is the mean over completions of the mean over their tokens.
    """

    def loss(
        self,
        model: Any,
        completions: Completions,
        batch: TokenBatch,
        objective: Any,
        normalizer: Any,
        seed: int = 0,
    ) -> LossParts:
        logits, kept = completion_logits(model, completions).float(), completions.kept
        assert kept is not None and batch.old_logps is None and batch.advantages is not None
        logits = logits.masked_fill(~kept.mask(logits.shape[-1]).view(logits.shape), -torch.inf)
        logps = logits.log_softmax(-1).gather(-1, completions.targets[..., None])[..., 0]
        mask, ratio = completions.mask, torch.exp(logps - logps.detach())
        gain = batch.advantages.view(len(mask), -1)
        surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        loss = -(surrogate.where(mask, 0.0).sum(1) / mask.sum(1)).mean()
        told = {"tokens": mask.sum().float(), "ratio_mean": torch.ones(()), "ess": torch.ones(())}
        return LossParts(loss, logps.detach(), told)


LOSSES: dict[str, type[Losses]] = {"fused": Losses, "plain PyTorch": PlainLosses}


class Watched(Trainer):
    """A Trainer with more metrics: seconds of the loss and of the optimizer, and set sizes.

    "kept_min" and "kept_max" are the smallest and largest set of ids that a token was sampled from.
    """

    def update(self, completions: Completions, advantages: Tensor) -> dict[str, float]:
        assert completions.kept is not None
        counts = completions.kept.counts[completions.mask.flatten()]
        # Ids with equal logits are kept or left out together: with equal rows of the table a set
        # would be the whole vocabulary.
        if counts.min() < self.config.top_k or counts.max() >= 2 * self.config.top_k:
            raise RuntimeError(
                f"top_k={self.config.top_k} kept between {counts.min()} and {counts.max()} ids:"
                " rows of the table are equal; give each id that no text uses a random row."
            )
        began = time.perf_counter()
        metrics = super().update(completions, advantages)
        spent = time.perf_counter() - began - metrics["optimizer_seconds"]
        return metrics | {
            "loss_seconds": spent,
            "kept_min": int(counts.min()),
            "kept_max": int(counts.max()),
        }

    def move(self, lr: float) -> dict[str, float]:
        began = time.perf_counter()
        return super().move(lr) | {"optimizer_seconds": time.perf_counter() - began}


def side(name: str, start: Path, seed: int, size: Size) -> Iterator[Line]:
    """Train with one loss. Yield the held-out accuracy, the metrics of each step, the accuracy.

    name    the loss, a key of `LOSSES`
    start   file with the weights of the policy after the warm-up
    """
    tok = arithmetic.tokenizer()
    model = arithmetic.policy(size.width, size.layers)
    model.load_state_dict(torch.load(start, weights_only=True))
    torch.manual_seed(seed)
    # New rows are small, random and different.
    model.resize_token_embeddings(size.vocab, mean_resizing=False)
    training, held_out = arithmetic.problems(8000, seed)
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            steps=size.steps, prompts_per_step=size.prompts, group_size=size.group, max_new_tokens=3, top_k=size.top_k, lr=size.lr,
            warmup_steps=3, eval_steps=0, out=folder, seed=seed, progress=False, device="cpu",
        )  # fmt: skip
        trainer = Watched(config, model=model, tokenizer=tok, rows=(training, []), rewards=[exact])
        trainer.losses = LOSSES[name](config, trainer.policy, trainer.reference)
        yield {"accuracy": arithmetic.accuracy(model, tok, held_out[: size.held_out])}
        for step in range(size.steps):
            lines: list[Line] = []
            # Only in some steps, because it slows a step: freed memory must be allocated again.
            if step % 10 == min(5, size.steps - 1):
                peak = peak_memory(lambda lines=lines: lines.append(trainer.train_step()), "cpu")
                yield lines[0] | {"peak_mib": peak / 2**20}
            else:
                yield trainer.train_step()
        yield {"accuracy": arithmetic.accuracy(model, tok, held_out[: size.held_out])}
        trainer.folder.release()


def apart(name: str, start: Path, seed: int, size: Size) -> Iterator[Line]:
    """Return an iterator over the lines of `side`, which runs in another process.

    The process starts now. It makes a step only when the next line is requested.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, name, start, seed, size), daemon=True)
    process.start()
    there.close()

    def lines() -> Iterator[Line]:
        try:
            for _ in range(size.steps + 2):
                here.send(True)
                try:
                    line = here.recv()
                except EOFError:
                    raise RuntimeError(
                        f"the process of the loss {name!r} ended early; what it said stands above"
                    ) from None
                yield line
        finally:
            here.close()
            process.join()

    return lines()


def _serve(pipe: Connection, name: str, start: Path, seed: int, size: Size) -> None:
    """Send the next line of `side` for each message, until the other process closes the pipe."""
    lines = side(name, start, seed, size)
    while True:
        try:
            pipe.recv()
        except EOFError:  # the parent has ended
            return
        pipe.send(next(lines))


# ---- both


def run(
    seed: int, size: Size, sides: Callable[..., Iterator[Line]] = apart, progress: bool = True
) -> dict[str, Any]:
    """Run the warm-up, then steps with both losses in turns. Return the record of a seed.

    sides   makes the iterator of a loss, see `apart`
    """
    with tempfile.TemporaryDirectory() as folder:
        began, start = time.perf_counter(), Path(folder) / "warm.pt"
        both = {name: sides(name, start, seed, size) for name in LOSSES}
        warm_up(seed, size, start, progress)
        warm = time.perf_counter()
        found: dict[str, list[Line]] = {name: [next(lines)] for name, lines in both.items()}
        bar = require("tqdm").trange(
            size.steps, desc=f"seed {seed}, GRPO with both losses", disable=not progress
        )
        for _ in bar:
            for name, lines in both.items():
                found[name].append(next(lines))
            bar.set_postfix(
                {name: f"reward {lines[-1]['reward']:.2f}" for name, lines in found.items()}
            )
        for name, lines in both.items():
            found[name] += lines
        seconds = {"warm_up": warm - began, "all": time.perf_counter() - began}
    return {
        "seed": seed,
        "seconds": seconds,
        "sides": {name: of_side(lines) for name, lines in found.items()},
    }


def warm_up(seed: int, size: Size, start: Path, progress: bool) -> None:
    """Train the policy on the teacher's answers, and save its weights to `start`.

    The vocabulary has only the characters of the texts, because others would make it slow. It uses
    one thread, because the other processes start at the same time.
    """
    torch.manual_seed(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = arithmetic.policy(size.width, size.layers)
    rows = arithmetic.problems(8000, seed)[0]
    arithmetic.warm_up(model, arithmetic.tokenizer(), rows, seed, size.warm_up, progress)
    torch.set_num_threads(threads)
    torch.save(model.state_dict(), start)


def load_of_machine() -> str:
    """Return a line with the processors and the load, which explain slow times."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    line = f"{usable} processors, {torch.get_num_threads()} torch threads, load {load:.1f}"
    if load > 0.5 * (usable or 1):
        line += (
            ": other programs are running, so the times below are longer than on an idle machine"
        )
    return line


def of_side(lines: list[Line]) -> dict[str, Any]:
    """Return the results of one loss from the lines of `side`.

    accuracy   before and after
    kept       smallest and largest set of ids that a token was sampled from
    peak_mib   peak memory of some steps, above the memory in use before
    Others, such as reward, grad_norm and seconds, have an entry for each step.
    """
    before, *steps, after = lines
    names = (
        "reward",
        "grad_norm",
        "seconds",
        "sampling_seconds",
        "loss_seconds",
        "optimizer_seconds",
    )
    return {
        "accuracy": [before["accuracy"], after["accuracy"]],
        "kept": [min(line["kept_min"] for line in steps), max(line["kept_max"] for line in steps)],
        "peak_mib": [round(line["peak_mib"], 1) for line in steps if "peak_mib" in line],
    } | {name: [float(f"{line[name]:.6g}") for line in steps] for name in names}


def main(argv: list[str] | None = None, size: Size = Size()) -> int:
    """Run the demo for each seed, print its table, and save its figures and picture."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description="GRPO with the fused and with the plain loss."
    )
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[0], help="one run for each (default: 0)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        help="folder of demo.json and demo.svg (default: runs/demo)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep the figures and the picture of docs/training.md instead",
    )
    args = parser.parse_args(argv)
    print(load_of_machine())
    runs = [run(seed, size) for seed in args.seed]
    record = {
        "command": demo_report.COMMAND, "date": time.strftime("%Y-%m-%d"), "commit": results.commit(), "machine": machine("cpu"), "size": asdict(size), "runs": runs
    }  # fmt: skip
    print(f"\n{demo_report.text(record)}")
    file, picture = (
        (demo_report.FILE, demo_report.PICTURE)
        if args.write
        else (args.out / "demo.json", args.out / "demo.svg")
    )
    results.save(file, record)
    demo_report.save_picture(record, picture)
    if args.write:
        demo_report.PAGE.write_text(demo_report.insert(demo_report.PAGE.read_text(), record))
    print(f"\nThe curves: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
