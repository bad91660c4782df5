"""Run the reference trainer as a Ray Train job, by default on two CPU workers.

    python -m examples.ray_train

Ray starts the workers and creates their process group, which the trainer uses. The trainer does not
depend on Ray. On a cluster pass `--workers`, `--gpu`, and an `--out` that all nodes share. The task
is a toy: answer the problems of examples/arithmetic.py with any digits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from examples import arithmetic
from grpo_kernels.training import require
from grpo_kernels.training.report import read_metrics
from grpo_kernels.training.trainer import TrainConfig, Trainer


def digits(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return for each completion the share of its four characters that are digits."""
    return [sum(c.isdigit() for c in text) / 4 for text in completions]


def make_trainer(settings: dict[str, Any]) -> Trainer:
    """Return a trainer of a small random model. `settings` are fields of TrainConfig."""
    torch.manual_seed(0)
    tok, model = arithmetic.tokenizer(), arithmetic.policy(width=64, layers=1)
    return Trainer(
        TrainConfig(**settings),
        model=model,
        tokenizer=tok,
        rows=arithmetic.problems(1000, seed=0),
        rewards=[digits],
    )


def train(settings: dict[str, Any]) -> None:
    """Train on one worker. `settings` are fields of TrainConfig."""
    trainer = make_trainer(settings)
    trainer.train()
    require("ray.train").report({"step": trainer.step, "workers": trainer.ranks.world})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.ray_train", description="The reference trainer on Ray workers."
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--parallel", default="ddp", help="ddp or fsdp2")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/ray"),
        help="folder of the run, continued if there is one",
    )
    args = parser.parse_args(argv)
    torch_trainer, ray_train = require("ray.train.torch"), require("ray.train")
    settings = {
        "steps": args.steps, "prompts_per_step": 4 * args.workers, "group_size": 4, "max_new_tokens": 4, "lr": 3e-3,
        "eval_steps": 0, "parallel": args.parallel, "out": str(args.out.absolute()), "resume": True, "progress": False,
    }  # fmt: skip
    torch_trainer.TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ray_train.ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=ray_train.RunConfig(storage_path=str(args.out.absolute() / "ray")),
    ).fit()
    rewards = [line["reward"] for line in read_metrics(args.out / "metrics.jsonl")]
    print(
        f"{args.workers} workers, {len(rewards)} steps: reward from {rewards[0]:.3f} to"
        f" {rewards[-1]:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
