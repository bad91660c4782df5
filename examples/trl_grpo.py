"""TRL's GRPOTrainer with our fused loss: the same results at each step, in less time and memory.

    python -m examples.trl_grpo

TRL 1.16 trains a tiny Qwen2 with a vocabulary of 32768 for six steps, with a KL to a reference and
two iterations over the same completions: first with its own loss, then with ours, which changes one
line. Loss and gradient norm of each step must agree up to rounding. Each run has its own process,
so that its memory can be measured. This takes less than a minute, and needs no network and no GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in liger_swap.py

VOCABULARY, STEPS = 32768, 6


def tokenizer() -> Any:
    """Return a tokenizer with one token for each of 32766 characters."""
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<eos>": 1, **{chr(0x4E00 + i): i + 2 for i in range(VOCABULARY - 2)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def save_model(path: Path) -> None:
    """Write a random Qwen2 to disk, because TRL loads the reference from the path of the policy."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.1, eos_token_id=1,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(path)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return for each completion the share of characters in the first quarter of the alphabet."""
    return [
        sum(ord(x) - 0x4E00 < VOCABULARY // 4 for x in text) / max(len(text), 1)
        for text in completions
    ]


def train(name: str, folder: Path) -> None:
    """Train with TRL's loss ("stock") or ours ("fused"), and write the results to a JSON file."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from grpo_kernels.integrations.trl import FusedGRPOTrainer

    transformers.utils.logging.disable_progress_bar()
    trainer_class = GRPOTrainer if name == "stock" else FusedGRPOTrainer  # the one line
    arguments = GRPOConfig(
        output_dir=str(folder / name), use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
        logging_steps=1, max_steps=STEPS, seed=1, learning_rate=1e-3, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=48, num_iterations=2, beta=0.04,
    )  # fmt: skip
    trainer = trainer_class(
        model=str(folder / "model"), args=arguments, reward_funcs=reward, processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": [chr(0x4E00 + i) * (20 + i) for i in range(8)]}),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)

    seconds: list[float] = []
    loss_and_backward = trainer.training_step

    def timed(model: Any, inputs: Any, items: Any) -> Any:
        inputs = trainer._prepare_inputs(
            inputs
        )  # sampling and scoring, which is not what is compared
        prepare, trainer._prepare_inputs = trainer._prepare_inputs, lambda x: x
        start = time.perf_counter()
        result = loss_and_backward(model, inputs, items)
        seconds.append(time.perf_counter() - start)
        trainer._prepare_inputs = prepare
        return result

    trainer.training_step = timed
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    result = {
        "loss": [entry["loss"] for entry in steps],
        "grad_norm": [entry["grad_norm"] for entry in steps],
        "kl": [entry["kl"] for entry in steps],
        "seconds": statistics.median(seconds[1:]),
        "megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "paths": dict(trainer.fused_loss.counts) if name == "fused" else {},
    }
    (folder / f"{name}.json").write_text(json.dumps(result))


def main() -> list[dict[str, Any]]:
    """Run the comparison, check that results agree. Return milliseconds and megabytes of both."""
    if importlib.util.find_spec("trl") is None:
        raise SystemExit("this example compares with TRL: pip install '.[trl]'")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        runs = {}
        for run in ("stock", "fused"):
            subprocess.run(
                [sys.executable, "-m", "examples.trl_grpo", run, str(folder)], check=True
            )
            runs[run] = json.loads((folder / f"{run}.json").read_text())
    stock, fused = runs["stock"], runs["fused"]
    print(f"{'step':>4} {'loss, TRL':>11} {'fused':>11} {'grad norm, TRL':>15} {'fused':>11}")
    for i in range(STEPS):
        a, b, x, y = (
            stock["loss"][i],
            fused["loss"][i],
            stock["grad_norm"][i],
            fused["grad_norm"][i],
        )
        print(f"{i + 1:4} {a:11.6f} {b:11.6f} {x:15.6f} {y:11.6f}")
        assert abs(a - b) <= 1e-4 * max(abs(a), 1.0), "the losses differ"
        assert abs(x - y) <= 1e-4 * x, "the gradient norms differ"
    assert fused["paths"]["fused"] == STEPS and not any(
        path.startswith("TRL") for path in fused["paths"]
    ), fused["paths"]
    assert min(stock["grad_norm"]) > 0 and max(stock["kl"]) > 0, "there is nothing to compare"
    print(f"paths: {fused['paths']}")
    for run, result in runs.items():
        print(
            f"{run}: {1000 * result['seconds']:.0f} ms a forward and backward, peak memory"
            f" +{result['megabytes']:.0f} MB"
        )
    return [
        {
            "what": "GRPOTrainer, forward and backward of a step", "ms": [1000 * r["seconds"] for r in (stock, fused)],
            "mb": [r["megabytes"] for r in (stock, fused)], "memory": "growth of the peak over the run",
        }
    ]  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
