"""The loss step at the vocabulary of Qwen, fused against eager PyTorch: time, extra memory, error. Under a minute.

python -m benchmarks.side_by_side"""

from __future__ import annotations

import torch

from benchmarks.logits_level import measure


def main(rows: int = 256, vocab: int = 151936, rounds: int = 5) -> None:
    names = {
        "grpo_kernels, in place": "fused, in place",
        "grpo_kernels, new gradient": "fused",
        "eager PyTorch": "eager PyTorch",
    }
    skip = ("grpo_kernels, eager backend", "torch.compile", "eager PyTorch, 16-bit softmax")
    print(f"\nLoss and gradient of {rows} tokens at vocabulary {vocab:,}, medians of {rounds} interleaved runs:")
    print(f"{'':18}{'dtype':>10}{'ms':>9}{'speed-up':>10}{'extra MB':>10}{'gradient error':>16}")
    for dtype in (torch.float32, torch.bfloat16):
        table = {r["name"]: r for r in measure(rows, vocab, dtype, rounds, skip=skip)}
        slow = table["eager PyTorch"]["ms"]
        for name, label in names.items():
            r = table[name]
            print(
                f"{label:18}{r['dtype']:>10}{r['ms']:9.1f}{slow / r['ms']:9.1f}x{r['extra MB']:10.1f}{r['gradient error']:16.1e}"
            )


if __name__ == "__main__":
    main()
