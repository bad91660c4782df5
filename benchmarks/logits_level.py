"""The loss from given logits: ours against eager PyTorch and torch.compile, and against a copy of the logits.

    python -m benchmarks.logits_level [--rows 256] [--vocab 151936] [--rounds 15] [--save]

Contract of every contender: the DAPO loss with KL (clip, k3) of [N, V] logits, its value and its gradient with respect
to the logits. "copy" writes a copy of the logits into warm memory: the time of one read and one write."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness import interleaved, peak_memory, save
from grpo_kernels import Objective, TokenBatch, grpo_loss, token_logprobs

Tensor = torch.Tensor
BETA = 0.04


@dataclass
class Case:
    logits: Tensor  # [N, V], what a contender reads (and may overwrite)
    pristine: Tensor  # [N, V], to restore it
    buffer: Tensor  # [N, V], warm memory for a gradient or a copy
    batch: TokenBatch

    def restore(self) -> None:
        with torch.no_grad():
            self.logits.copy_(self.pristine)


def case(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> Case:
    """Logits as a policy has them: a few likely tokens over a flat tail; sampled targets, a stale old policy."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=g)
    logits[:, :50] += 8
    logits = logits[:, torch.randperm(vocab, generator=g)].to(dtype)
    logps = torch.log_softmax(logits.float(), -1)
    targets = torch.multinomial(logps.exp(), 1, generator=g)[:, 0]
    now = logps.gather(1, targets[:, None])[:, 0]
    del logps
    noise = torch.randn(2, rows, generator=g)
    batch = TokenBatch(
        targets, torch.randn(rows, generator=g), mask=torch.rand(rows, generator=g) > 0.0,
        old_logps=now + 0.2 * noise[0], ref_logps=now + 0.3 * noise[1],
    )  # fmt: skip
    return Case(logits.clone().requires_grad_(), logits, torch.empty_like(logits).copy_(logits), batch)


def naive_loss(logits: Tensor, batch: TokenBatch) -> Tensor:
    """What a trainer without kernels runs, in the dtype of `logits`."""
    logps = torch.log_softmax(logits, -1).gather(1, batch.targets[:, None])[:, 0]
    ratio = torch.exp(logps - batch.old_logps)
    surrogate = torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.28) * batch.advantages)
    d = batch.ref_logps - logps
    return (-surrogate + BETA * (torch.exp(d) - d - 1)).sum() / logps.numel()


def contenders(c: Case) -> dict[str, Callable[[], Any]]:
    objective = Objective.preset("dapo", beta=BETA)

    def eager(upcast: bool) -> tuple[Tensor, ...]:
        loss = naive_loss(c.logits.float() if upcast else c.logits, c.batch)
        return loss.detach(), *torch.autograd.grad(loss, c.logits)

    compiled_loss = torch.compile(lambda x, batch: naive_loss(x.float(), batch))

    def compiled() -> tuple[Tensor, ...]:
        loss = compiled_loss(c.logits, c.batch)
        return loss.detach(), *torch.autograd.grad(loss, c.logits)

    def ours(inplace: bool, backend: str = "auto") -> tuple[Tensor, ...]:
        out = grpo_loss(c.logits, c.batch, objective, inplace=inplace, backend=backend)
        return out.loss.detach(), *torch.autograd.grad(out.loss, c.logits)

    runs = {
        "grpo_kernels, in place": lambda: ours(True),
        "grpo_kernels, new gradient": lambda: ours(False),
        "grpo_kernels, eager backend": lambda: ours(False, "eager"),
        "eager PyTorch": lambda: eager(c.logits.dtype != torch.float32),
        "torch.compile": compiled,
    }
    if c.logits.dtype != torch.float32:
        runs["eager PyTorch, 16-bit softmax"] = lambda: eager(False)
    return runs


def reference(c: Case) -> tuple[Tensor, Tensor]:
    """Loss and gradient in float64, in blocks of rows."""
    total, grads = 0.0, torch.empty(c.pristine.shape)
    n = c.pristine.shape[0]
    for lo in range(0, n, 32):
        x = c.pristine[lo : lo + 32].double().requires_grad_()
        part = slice(lo, lo + 32)
        b = TokenBatch(
            c.batch.targets[part],
            c.batch.advantages[part],
            old_logps=c.batch.old_logps[part],
            ref_logps=c.batch.ref_logps[part],
        )
        loss = naive_loss(x, b) * x.shape[0] / n
        total += float(loss.detach())
        grads[part] = torch.autograd.grad(loss, x)[0]
    return torch.tensor(total), grads


def gate(run: Callable[[], Any], c: Case, expected: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """(error of the loss, relative error of the gradient) against float64."""
    c.restore()
    loss, grad = run()
    error = abs(float(loss) - float(expected[0]))
    return error, float((grad.float() - expected[1]).norm() / expected[1].norm())


def measure(
    rows: int, vocab: int, dtype: torch.dtype, rounds: int, memory: bool = True, skip: tuple[str, ...] = ()
) -> list[dict]:
    c = case(rows, vocab, dtype)
    expected = reference(c)
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    head = {"rows": rows, "vocab": vocab, "dtype": str(dtype).removeprefix("torch.")}
    table, valid = [], {}
    for name, run in contenders(c).items():
        if name in skip:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_error, error = gate(run, c, expected)
        row = head | {"name": name, "loss error": loss_error, "gradient error": error}
        if error <= limit:
            valid[name] = run
            if memory:
                c.restore()
                row["extra MB"] = peak_memory(lambda run=run: (c.restore(), run())) / 1e6
        table.append(row)
    del expected
    times = interleaved(valid | {"copy": lambda: c.buffer.copy_(c.pristine)}, rounds, c.restore)
    forward = {
        "read (sum in the logits' dtype)": lambda: c.pristine.sum(),
        "log-probs, entropy": lambda: token_logprobs(c.pristine, c.batch.targets, entropy=True),
        "log-probs": lambda: token_logprobs(c.pristine, c.batch.targets),
    }
    times |= interleaved(forward, rounds)
    for row in table:
        row |= times.get(row["name"], {})
    table += [head | {"name": name} | times[name] for name in ("copy", *forward)]
    for row in table:
        if "ms" in row:
            row["x copy"] = row["ms"] / times["copy"]["ms"]
    return table


def show(table: list[dict]) -> None:
    print(f"\n{table[0]['rows']} x {table[0]['vocab']} {table[0]['dtype']}")
    print(f"{'':34}{'ms':>9}{'p20':>9}{'p80':>9}{'x copy':>8}{'extra MB':>10}{'grad error':>12}")
    for r in table:
        if "ms" not in r:
            print(f"{r['name']:34} no time: its gradient is off by {r['gradient error']:.1e}")
            continue
        memory = f"{r['extra MB']:10.1f}" if "extra MB" in r else " " * 10
        error = f"{r['gradient error']:12.1e}" if "gradient error" in r else ""
        print(f"{r['name']:34}{r['ms']:9.2f}{r['p20']:9.2f}{r['p80']:9.2f}{r['x copy']:8.2f}{memory}{error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/logits_level_cpu.json")
    args = parser.parse_args()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        table = measure(args.rows, args.vocab, dtype, args.rounds)
        show(table)
        rows += table
    if args.save:
        print("\nwritten:", save("logits_level_cpu", rows))


if __name__ == "__main__":
    main()
