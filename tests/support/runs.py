"""Short runs of the reference trainer on a tiny model: data, rewards, options and output."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import numpy
import transformers

from grpo_kernels.training import randomness
from grpo_kernels.training.jsonl import read_metrics
from grpo_kernels.training.trainer import TrainConfig, Trainer

#: The fields of a metrics line that differ in every run.
TIMES = {"tokens_per_second", "peak_memory_gb"}
PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(4)]


def tiny(tok: Any, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    settings = dict(
        vocab_size=len(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, initializer_range=0.1,
        eos_token_id=tok.eos_token_id, pad_token_id=tok.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(settings | changes)))


def short(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [-float(len(c)) for c in completions]


def evens(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A reward, the share of even digits: dense enough that 30 steps raise it."""
    return [sum(c in "02468" for c in text) / 4 for text in completions]


def config(out: Path, **changes: Any) -> TrainConfig:
    settings = dict(
        steps=2, prompts_per_step=3, group_size=4, max_new_tokens=4, lr=1e-3, eval_steps=0, checkpoint_steps=0, out=str(out),
        progress=False, device="cpu",
    )  # fmt: skip
    return TrainConfig(**(settings | changes))


def trainer(
    tok: Any, out: Path, *, rewards: Any = (evens,), model: Any = None, teacher: Any = None, trackers: Any = (), **changes: Any
) -> Trainer:
    return Trainer(
        config(out, **changes),
        model=model or tiny(tok),
        tokenizer=tok,
        rows=(PROMPTS[:16], PROMPTS[16:]),
        rewards=list(rewards),
        teacher=teacher,
        trackers=trackers,
    )


def parameters(t: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in t.model.named_parameters()}


def lines(out: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if k not in TIMES and not k.endswith("seconds")}
        for line in read_metrics(out / "metrics.jsonl")
    ]


RUN = dict(beta=0.1, ref_refresh_steps=2, num_updates=2, eval_steps=2, eval_prompts=4, warmup_steps=2, weight_decay=0.1)


def noisy(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Rewards that can only be reproduced with the state of all three shared random generators."""
    draws = [random.random() + float(numpy.random.rand()) + torch.rand(()).item() for _ in completions]
    return [score + 0.1 * draw for score, draw in zip(evens(prompts, completions), draws, strict=True)]


def seeded_run(tok: Any, out: Path, rewards: Any = (noisy,), **changes: Any) -> Trainer:
    randomness.seed(7)
    return trainer(tok, out, rewards=rewards, **RUN, **changes)


def gsm8k(folder: Path) -> Path:
    """The layout of openai/gsm8k: two configurations, two splits, question and answer columns in parquet."""
    import datasets

    for name in ("main", "socratic"):
        for split, count in (("train", 12), ("test", 4)):
            rows = [{"question": f"{i}+1=", "answer": f"{i} plus 1.\n#### {i + 1}"} for i in range(count)]
            (folder / name).mkdir(parents=True, exist_ok=True)
            datasets.Dataset.from_list(rows).to_parquet(str(folder / name / f"{split}-00000-of-00001.parquet"))
    entries = "".join(
        f"- config_name: {n}\n  data_files:\n" + "".join(f"  - split: {s}\n    path: {n}/{s}-*\n" for s in ("train", "test"))
        for n in ("main", "socratic")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    return folder
