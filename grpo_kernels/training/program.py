"""`python -m grpo_kernels train`: a run from the command line."""

from __future__ import annotations

import os
import sys

from . import require
from .config import parse
from .trainer import Trainer


def main(argv: list[str]) -> int:
    """Exit status 0: done; 128 + the signal's number (130, 143): stopped by it after a step, with a checkpoint to resume from; 2:
    something in the arguments is wrong."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        config = parse(argv)
        require("transformers").set_seed((config.seed * 1_000_003 + int(os.environ.get("RANK", "0"))) % 2**32)
        trainer = Trainer(config)
    except (ValueError, ModuleNotFoundError, OSError) as error:  # OSError: a name or path that transformers cannot load
        print(f"error: {error}", file=sys.stderr)
        return 2
    done = trainer.train()
    if config.progress and trainer.ranks.main and trainer.folder.summary.exists():
        print(trainer.folder.summary.read_text(), end="")
    trainer.close()
    return trainer.ranks.leave(0 if done else 128 + trainer.stopped_by)
