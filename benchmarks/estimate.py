"""What the loss must cost on a GPU, on paper: counted bytes and flops over a bandwidth and a rate. Not a measurement.

    python -m benchmarks.estimate [--rows 8192 --hidden 4096 --vocab 151936] [--bandwidth 4.8 --flops 989 --efficiency 0.75]

`bandwidth` in TB/s and `flops` in dense bf16 TFLOP/s are the data sheet's (the defaults are an H200's); `efficiency` is the
share of both that large kernels reach."""

from __future__ import annotations

import argparse

from grpo_kernels.linear import CHUNK_BYTES


def estimate(rows: int, hidden: int, vocab: int, bandwidth: float, flops: float, active: float) -> dict[str, float]:
    """Milliseconds of each part, with `bandwidth` in bytes/s and `flops` in flop/s as reached; `active` is the share of
    rows that get a gradient. bf16 logits at logits level; bf16 operands and fp32 logits at hidden level."""
    chunk = max(64, CHUNK_BYTES["cuda"] // (4 * vocab) // 64 * 64)
    chunks = -(-int(rows * active) // chunk)
    product = 2 * rows * hidden * vocab / flops
    # fp32 logits written and read, bf16 gradient written, then read by two products.
    tiles = rows * vocab * (4 + 4 + active * (2 + 2 + 2)) / bandwidth
    sums = (8 * max(chunks - 1, 0) + 4) * vocab * hidden / bandwidth  # fp32 d_weight, written once, then read and written
    unit = rows * vocab * 2 / bandwidth
    parts = {
        "logits level: read and write (2U)": 2 * unit,
        "logits level, a kernel of three passes (3U)": 3 * unit,
        "hidden level: three dense products": 3 * product,
        "hidden level: our products (1 + 2a)": (1 + 2 * active) * product,
        "hidden level: passes over chunks of logits": tiles,
        "hidden level: sums of d_weight": sums,
    }
    parts["hidden level: our total"] = (1 + 2 * active) * product + tiles + sums
    parts["hidden level, four products (recompute)"] = (1 + 3 * active) * product + tiles + sums
    return {name: 1e3 * seconds for name, seconds in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--bandwidth", type=float, default=4.8)
    parser.add_argument("--flops", type=float, default=989)
    parser.add_argument("--efficiency", type=float, default=0.75)
    args = parser.parse_args()
    shares = (1.0, 0.5, 0.2)
    columns = [
        estimate(
            args.rows, args.hidden, args.vocab, args.bandwidth * 1e12 * args.efficiency, args.flops * 1e12 * args.efficiency, a
        )
        for a in shares
    ]
    print(f"ESTIMATE, not measured: {args.rows} x {args.hidden} x {args.vocab}, bf16, ms by share of rows with a gradient")
    print(f"{'':48}" + "".join(f"{f'a = {a:g}':>10}" for a in shares))
    for name in columns[0]:
        print(f"{name:48}" + "".join(f"{column[name]:10.1f}" for column in columns))


if __name__ == "__main__":
    main()
