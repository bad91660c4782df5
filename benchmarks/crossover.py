"""The size from which on TRL's trainer is faster with our loss than with its own: small vocabularies and micro-batches.

    python -m benchmarks.crossover [--write]

Times forward and backward of one micro-batch with TRL's `_compute_loss`, its own and that of `FusedGRPOTrainer`, in turns on
the same tiny model, after a check that losses and gradients are equal. A fused call has a fixed cost in Python and small
tensors; this measures from which size on it is worth that cost. --write: benchmarks/results/crossover.json, and the table in
grpo_kernels/integrations/README.md."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.experiments import Experiment
from benchmarks.harness import interleaved
from benchmarks.swaps import PAGE
from benchmarks.tables import Record, Table

VOCABULARIES = (104, 512, 2048, 8192, 32768)
#: Tokens of each of the eight completions of a micro-batch.
LENGTHS = (4, 8, 16, 32, 128)
SEQUENCES, PROMPT, WIDTH = 8, 8, 64


def make_trainer(cls: Any, vocabulary: int, folder: Path) -> Any:
    """A trainer with one layer of Qwen2; the same parameters each time."""
    import tokenizers
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.1, eos_token_id=1,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    trainer = cls(
        model=transformers.Qwen2ForCausalLM(config), reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=SEQUENCES,
                        num_generations=SEQUENCES, gradient_checkpointing=False),
        train_dataset=Dataset.from_dict({"prompt": ["<eos>"] * SEQUENCES}),
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>"),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1  # which train() sets
    trainer.model.train()
    return trainer


def micro_batch(vocabulary: int, length: int) -> dict[str, torch.Tensor]:
    """A micro-batch in which half of the completions have half of the length."""
    g = torch.Generator().manual_seed(length)
    mask = torch.ones(SEQUENCES, length, dtype=torch.int64)
    mask[::2, length // 2 :] = 0
    return {
        "prompt_ids": torch.randint(2, vocabulary, (SEQUENCES, PROMPT), generator=g),
        "prompt_mask": torch.ones(SEQUENCES, PROMPT, dtype=torch.int64),
        "completion_ids": torch.randint(2, vocabulary, (SEQUENCES, length), generator=g),
        "completion_mask": mask, "advantages": torch.randn(SEQUENCES, generator=g), "num_items_in_batch": mask.sum(),
    }  # fmt: skip


def step(trainer: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient of the head); the gradients are then reset."""
    loss = trainer._compute_loss(trainer.model, dict(inputs))
    loss.backward()
    gradient = trainer.model.get_output_embeddings().weight.grad
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    return loss.detach(), gradient


def measure() -> Record:
    from trl import GRPOTrainer

    from grpo_kernels.integrations.trl import FusedGRPOTrainer

    rows, kinds = [], {"stock": GRPOTrainer, "fused": FusedGRPOTrainer}
    with tempfile.TemporaryDirectory() as name:
        for vocabulary in VOCABULARIES:
            trainers = {key: make_trainer(kind, vocabulary, Path(name)) for key, kind in kinds.items()}
            for length in LENGTHS:
                inputs = micro_batch(vocabulary, length)
                runs = {key: partial(step, trainer, inputs) for key, trainer in trainers.items()}
                for a, b in zip(runs["stock"](), runs["fused"](), strict=True):
                    torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4 * float(a.abs().max()))
                times = interleaved(runs, "cpu", seconds=2.0, most=1000)
                tokens = int(inputs["completion_mask"].sum())
                rows.append({"vocabulary": vocabulary, "tokens": tokens} | {key: t["ms"] for key, t in times.items()})
                print(f"{vocabulary:6} ids, {tokens:5} tokens: {rows[-1]['stock']:8.2f} ms, fused {rows[-1]['fused']:8.2f} ms")
    return {"rows": rows}


def tables(record: Record) -> Iterator[Table]:
    rows = {
        (r["vocabulary"], r["tokens"]): "{:.1f} -> {:.1f} ({:.2f})".format(r["stock"], r["fused"], r["fused"] / r["stock"])
        for r in record["rows"]
    }
    vocabularies, tokens = (sorted({key[i] for key in rows}) for i in range(2))
    yield [["vocabulary", *(f"{n} tokens" for n in tokens)], *([str(v), *(rows[v, n] for n in tokens)] for v in vocabularies)]


EXPERIMENT = Experiment("crossover", PAGE, tables, measure)

if __name__ == "__main__":
    EXPERIMENT.main()
