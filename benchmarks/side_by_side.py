"""The loss step at the vocabulary of Qwen, fused against eager PyTorch: time, extra memory, error. Under a minute.

python -m benchmarks.side_by_side"""

from __future__ import annotations

import torch

from benchmarks.cases import Cell
from benchmarks.machine import require_kernels
from benchmarks.measure import measure

NAMES = {
    "grpo_kernels, in place": "fused, in place",
    "grpo_kernels, new gradient": "fused",
    "eager PyTorch": "eager PyTorch",
}


def main(rows: int = 256, vocab: int = 151936, rounds: int = 5) -> None:
    print(f"\nLoss and gradient of {rows} tokens at vocabulary {vocab:,}, medians of {rounds} interleaved runs:")
    print(f"{'':18}{'dtype':>10}{'ms':>9}{'speed-up':>10}{'extra MB':>10}{'gradient error':>16}")
    for dtype in (torch.float32, torch.bfloat16):
        cell = Cell("logits", rows, vocab, dtype)
        table = measure(cell, "cpu", only=tuple(NAMES), seconds=60.0, most=rounds, counters=False)
        found = {r["name"]: r for r in table["providers"]}
        slow = found["eager PyTorch"]["ms"]
        for name, label in NAMES.items():
            r = found[name]
            if r["status"] != "ok":
                print(f"{label:18}{table['dtype']:>10}  {r['status']}: {r['reason']}")
                continue
            print(
                f"{label:18}{table['dtype']:>10}{r['ms']:9.1f}{slow / r['ms']:9.1f}x{r['extra_mb']:10.1f}{r['errors']['d_logits']:16.1e}"
            )


if __name__ == "__main__":
    require_kernels("cpu")
    main()
