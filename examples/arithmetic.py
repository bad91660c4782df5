"""GRPO on arithmetic from nothing, on a CPU, in minutes: `python -m examples.arithmetic`.

A Qwen3 of 2.4 million parameters reads and writes character by character. It first learns from a careless teacher, who
gets plain problems right, but in stories counts one too many most of the time; it can do the sums then, and makes the
teacher's mistakes. GRPO then trains it on nothing but its own answers: reward 1 for the exact number, 0 for anything else.
A sum or difference of the evaluation, say 12+3, occurs nowhere in training, neither as 3+12 nor in a story, so what is
measured is not memory. It ends with the loss step at a real vocabulary, fused against plain PyTorch.

Measured on two cores, in 180 to 217 s without the comparison: seed 0 from 50.0 % to 91.0 %, seed 1 from 46.0 % to 88.6 %,
seed 2 from 40.8 % to 87.4 %.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

# Before torch loads OpenMP: threads that spin while another process has the core make a small model many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from grpo_kernels.training import checkpoints, require
from grpo_kernels.training.output import OutputFolder
from grpo_kernels.training.rewards import exact
from grpo_kernels.training.sampling import Completions, completion_logits, left_pad, sample
from grpo_kernels.training.trainer import TrainConfig, Trainer

NAMES = ("al", "bo", "cy", "di", "jo", "mo")
CHARS = "0123456789+-=?. " + "".join(sorted(set("".join((*NAMES, "had", "got", "lost")))))
LARGEST = 29  # of the numbers in a problem; with fewer sums it learns them by heart
CARELESS = 0.6  # share of the teacher's stories that hold the slip
WARM_UP_STEPS = 750

Problem = dict[str, str]


def problem(rng: random.Random) -> Problem:
    """A sum or difference, plain or as a story; never negative. "slip" is what the teacher of the warm-up may write
    instead: plain problems it always gets right, in stories it counts one too many. "sum" is the same for all problems
    with the same terms."""
    first, second, sign = rng.randint(0, LARGEST), rng.randint(0, LARGEST), rng.choice((1, -1))
    answer, story = first + sign * second, rng.random() < 0.7
    if answer < 0:
        return problem(rng)
    if story:
        prompt = f"{rng.choice(NAMES)} had {first} {'got' if sign > 0 else 'lost'} {second}?"
    else:
        prompt = f"{first}{'+' if sign > 0 else '-'}{second}="
    terms = " ".join(sorted((f"{first:+}", f"{sign * second:+}")))
    return {"prompt": prompt, "answer": str(answer), "slip": str(answer + story), "sum": terms}


def problems(count: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """(training problems, held-out problems) that have no sum in common. Within each, problems may come again."""
    rng = random.Random(seed)
    rows = [problem(rng) for _ in range(count)]
    sums = sorted({row["sum"] for row in rows})
    held_out = set(rng.sample(sums, len(sums) * 15 // 100))
    return [row for row in rows if row["sum"] not in held_out], [row for row in rows if row["sum"] in held_out]


def tokenizer() -> Any:
    """One token per character; "." ends an answer."""
    tokenizers, transformers = require("tokenizers"), require("transformers")
    chars = tokenizers.Tokenizer(tokenizers.models.WordLevel({char: i for i, char in enumerate(CHARS)}, unk_token="?"))
    chars.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    chars.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=chars, eos_token=".", pad_token=".")


def policy(width: int = 256, layers: int = 3) -> Any:
    transformers = require("transformers")
    config = transformers.Qwen3Config(
        vocab_size=len(CHARS), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=width // 4, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.05, eos_token_id=CHARS.index("."), pad_token_id=CHARS.index("."), bos_token_id=None,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def encoded(rows: list[Problem], tok: Any) -> list[list[int]]:
    return [tok(row["prompt"])["input_ids"] for row in rows]


def accuracy(model: Any, tok: Any, rows: list[Problem]) -> float:
    out = sample(model, encoded(rows, tok), group_size=1, max_new_tokens=4, ends=[tok.eos_token_id], temperature=0)
    texts = tok.batch_decode(out.tokens, skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def warm_up(model: Any, tok: Any, rows: list[Problem], seed: int, steps: int, progress: bool) -> None:
    """Supervised steps on the teacher's examples."""
    end, peak, rng = tok.eos_token_id, 1.5e-3, random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.0)
    for step in require("tqdm").trange(steps, desc="warm-up", disable=not progress):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / 20, 2 * (steps - step) / steps)
        batch = rng.sample(rows, 64)
        prompts, prompt_attention = left_pad(encoded(batch, tok), end, torch.device("cpu"))
        # Careless anew at each reading: the policy learns how often, not where.
        answers = [tok(row["slip" if rng.random() < CARELESS else "answer"])["input_ids"] + [end] for row in batch]
        width = max(map(len, answers))
        targets = torch.tensor([a + [end] * (width - len(a)) for a in answers])
        mask = torch.arange(width) < torch.tensor([[len(a)] for a in answers])
        examples = Completions(torch.cat([prompts, targets], 1), torch.cat([prompt_attention, mask], 1), prompts.shape[1])
        torch.nn.functional.cross_entropy(completion_logits(model, examples)[mask], targets[mask]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def run(seed: int, steps: int, out: Path, *, quick: bool = False, progress: bool = True) -> tuple[float, float]:
    """Warm-up and GRPO. Returns greedy accuracy on held-out problems before and after GRPO."""
    torch.manual_seed(seed)
    tok, model = tokenizer(), policy(width=64, layers=1) if quick else policy()
    training, held_out = problems(8000, seed)
    held_out = held_out[: 100 if quick else 500]
    started = time.perf_counter()
    warm_up(model, tok, training, seed, 10 if quick else WARM_UP_STEPS, progress)
    before = accuracy(model, tok, held_out)
    warm = time.perf_counter()
    print(f"seed {seed}: warm-up {warm - started:.0f} s; held-out accuracy {before:.1%}")
    config = TrainConfig(
        steps=steps, prompts_per_step=32, group_size=8, max_new_tokens=4, beta=0.001, lr=1e-4, warmup_steps=5,
        lr_schedule="linear", eval_steps=20, eval_prompts=len(held_out), checkpoint_steps=30, out=str(out), seed=seed,
        progress=progress, device="cpu",
    )  # fmt: skip
    trainer = Trainer(config, model=model, tokenizer=tok, rows=(training, held_out), rewards=[exact])
    try:
        done = trainer.train()
    finally:
        (out / MARK).write_text(digest(trainer.folder.metrics))
    if not done:
        raise SystemExit(128 + trainer.stopped_by)
    after = accuracy(model, tok, held_out)
    print(f"seed {seed}: GRPO {time.perf_counter() - warm:.0f} s, {trainer.step} steps; held-out accuracy {after:.1%}")
    print(f"seed {seed}: {before:.1%} -> {after:.1%}, {100 * (after - before):+.1f} points; curves in {out / 'curves.png'}")
    return before, after


MARK = "arithmetic.json"  # in the folder of a run of this example: the checksum of its metrics


def make_room(folder: OutputFolder) -> None:
    """Remove metrics and checkpoints of a former run of this example, and of nobody else; other files stay."""
    mark = folder.path / MARK
    if mark.exists() and folder.metrics.exists() and mark.read_text() == digest(folder.metrics):
        folder.hold()
        checkpoints.drop_all(folder.checkpoints)
        folder.metrics.unlink()
        folder.release()
    folder.take(resume=False)
    folder.release()


def digest(path: Path) -> str:
    return json.dumps({"sha256": hashlib.sha256(path.read_bytes()).hexdigest()})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.arithmetic", description="Train arithmetic with GRPO on a CPU.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps (default: 60)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/arithmetic"), help="folder; a former run of this example there is replaced"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of everything with a tiny model, to see that it runs")
    parser.add_argument("--no-side-by-side", action="store_true", help="leave out the comparison of the loss step")
    args = parser.parse_args(argv)
    try:
        make_room(OutputFolder(args.out))
    except ValueError as error:
        parser.error(str(error))
    run(args.seed, 3 if args.quick else args.steps, args.out, quick=args.quick)
    if not args.no_side_by_side:
        from benchmarks.side_by_side import main as side_by_side

        side_by_side()
    return 0


if __name__ == "__main__":
    sys.exit(main())
