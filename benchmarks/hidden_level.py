"""The loss from hidden states: ours against eager PyTorch, torch.compile, TRL's fused head, Liger's fused loss, and the
three matrix products that no contender can do without.

    python -m benchmarks.hidden_level [--rows 16 256 1024] [--hidden 1024] [--vocab 151936] [--rounds 5] [--save]

Contract of every contender: the DAPO loss (clip 0.2 / 0.28, no KL, old log-probs given) of N tokens, its value and its
gradients with respect to hidden [N, H] and weight [V, H]. Peers take part where they are installed (extra "bench")."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.harness import interleaved, peak_memory, save
from grpo_kernels import Objective, TokenBatch, linear_grpo_loss
from grpo_kernels.products import products_for

Tensor = torch.Tensor
SEQUENCES = 8
Result = tuple[Tensor, Tensor, Tensor]  # loss, d_hidden, d_weight


@dataclass
class Case:
    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    batch: TokenBatch

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.weight


def case(rows: int, width: int, vocab: int, dtype: torch.dtype, zero_share: float = 0.0, seed: int = 0) -> Case:
    """Hidden states near the weight of their target, as a trained head has them; `zero_share` of the advantages are 0."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, width, generator=g) / width**0.5
    targets = torch.randint(0, vocab, (rows,), generator=g)
    hidden = torch.randn(rows, width, generator=g) + 12 * torch.rand(rows, 1, generator=g) * weight[targets]
    weight, hidden = weight.to(dtype), hidden.to(dtype)
    parts = zip(hidden.float().split(64), targets.split(64), strict=True)
    now = torch.cat([(h @ weight.float().t()).log_softmax(-1).gather(1, t[:, None])[:, 0] for h, t in parts])
    advantages = torch.randn(rows, generator=g) * (torch.arange(rows) >= zero_share * rows)
    batch = TokenBatch(targets, advantages, old_logps=now + 0.2 * torch.randn(rows, generator=g))
    return Case(hidden.requires_grad_(), weight.requires_grad_(), batch)


def loss_of(logps: Tensor, batch: TokenBatch) -> Tensor:
    """What a trainer does with log-probs."""
    ratio = torch.exp(logps - batch.old_logps)
    surrogate = torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.28) * batch.advantages)
    return -surrogate.sum() / logps.numel()


def contenders(c: Case) -> dict[str, Callable[[], Result]]:
    objective = Objective.preset("dapo")

    def gradients(loss: Tensor) -> Result:
        return loss.detach(), *torch.autograd.grad(loss, c.inputs)

    def ours(backend: str = "auto") -> Result:
        return gradients(linear_grpo_loss(*c.inputs, c.batch, objective, backend=backend).loss)

    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return torch.log_softmax((hidden @ weight.t()).float(), -1).gather(1, targets[:, None])[:, 0]

    def eager() -> Result:
        return gradients(loss_of(head(*c.inputs, c.batch.targets), c.batch))

    compiled_head = torch.compile(head)

    def compiled() -> Result:
        return gradients(loss_of(compiled_head(*c.inputs, c.batch.targets), c.batch))

    runs = {"grpo_kernels": ours, "eager PyTorch": eager, "torch.compile": compiled}
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        def trl() -> Result:
            logps = ChunkedLogProbFunction.apply(
                *c.inputs, None, c.batch.targets, 1.0, 4096, None, 1.0, ("log_probs", "entropy")
            )[0]
            return gradients(loss_of(logps, c.batch))

        runs["TRL fused head + loss"] = trl
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy

        def cce() -> Result:
            nll = linear_cross_entropy(*c.inputs, c.batch.targets, reduction="none", impl="torch_compile")
            return gradients(loss_of(-nll, c.batch))

        runs["CCE (torch.compile) + loss"] = cce
    except ImportError:
        pass
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        fused = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, epsilon_low=0.2, epsilon_high=0.28, loss_type="dapo")
        shape = (SEQUENCES, c.batch.rows // SEQUENCES)

        def liger() -> Result:
            loss, _ = fused(
                c.hidden.view(*shape, -1), c.weight, c.batch.targets.view(shape), torch.ones(shape), c.batch.advantages.view(shape),
                old_per_token_logps=c.batch.old_logps.view(shape), num_items_in_batch=c.batch.rows,
            )  # fmt: skip
            return gradients(loss)

        # One advantage per sequence is all it takes: per-token ones are checked, and refused by the gate if ignored.
        runs["Liger fused linear GRPO"] = liger
    except ImportError:
        pass
    return runs


def bare_products(c: Case) -> dict[str, Callable[[], Any]]:
    """The three products and nothing else, with fresh results as a caller would have them: by torch.mm in the operands'
    dtype, and by the kernels that the engine uses for several chunks (fp32 logits and sums, gradients rounded at the end)."""
    hidden, weight = c.hidden.detach(), c.weight.detach()
    logits = hidden @ weight.t()

    def by_torch() -> tuple[Tensor, ...]:
        return hidden @ weight.t(), logits @ weight, logits.t() @ hidden

    products = products_for(weight, None, hidden.dtype)
    operand = hidden.to(products.dtype)

    def by_ours() -> tuple[Tensor, ...]:
        z = products.logits(operand)
        return products.d_hidden(z).to(hidden.dtype), products.add_d_weight(None, z, operand).to(weight.dtype)

    return {"three products, torch.mm": by_torch, "three products, ours": by_ours}


def reference(c: Case) -> Result:
    hidden, weight = (x.detach().double().requires_grad_() for x in c.inputs)
    total = torch.zeros((), dtype=torch.float64)
    n = c.batch.rows
    for lo in range(0, n, 128):
        part = slice(lo, min(lo + 128, n))
        b = TokenBatch(c.batch.targets[part], c.batch.advantages[part], old_logps=c.batch.old_logps[part])
        logps = (hidden[part] @ weight.t()).log_softmax(-1).gather(1, b.targets[:, None])[:, 0]
        loss = loss_of(logps, b) * b.rows / n
        loss.backward()
        total += loss.detach()
    return total.float(), hidden.grad.float(), weight.grad.float()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().float() - expected).norm() / expected.norm())


def measure(rows: int, width: int, vocab: int, dtype: torch.dtype, rounds: int, skip: tuple[str, ...] = ()) -> list[dict]:
    c = case(rows, width, vocab, dtype)
    expected = reference(c)
    # Rounding logits to bf16, as peers do, moves ratios across the clip bounds: a large error, but not a wrong formula.
    limit = 1e-4 if dtype == torch.float32 else 0.3
    top = {"rows": rows, "hidden": width, "vocab": vocab, "dtype": str(dtype).removeprefix("torch.")}
    table, valid = [], {}
    for name, run in contenders(c).items():
        if name in skip:
            continue
        row = top | {"name": name}
        table.append(row)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = run()
            except (RuntimeError, TypeError, ValueError) as failure:
                row["failed"] = str(failure).splitlines()[0][:100]
                continue
        row["loss error"] = abs(float(result[0]) - float(expected[0]))
        row["d_hidden error"], row["d_weight error"] = error(result[1], expected[1]), error(result[2], expected[2])
        del result
        if max(row["d_hidden error"], row["d_weight error"]) <= limit:
            valid[name] = run
            if rows <= 256:
                row["extra MB"] = peak_memory(run, warm=True) / 1e6
    del expected
    half = replace(c, batch=replace(c.batch, advantages=c.batch.advantages * (torch.arange(rows) % 2)))
    valid["grpo_kernels, half the rows zero"] = contenders(half)["grpo_kernels"]
    table.append(top | {"name": "grpo_kernels, half the rows zero"})
    bare = bare_products(c)
    times = interleaved(valid | bare, rounds)
    for row in table:
        row |= times.get(row["name"], {})
    table += [top | {"name": name} | times[name] for name in bare]
    unit = min(times[name]["ms"] for name in bare)
    for row in table:
        if "ms" in row:
            row["x products"] = row["ms"] / unit
    return table


def memory(rows: int, width: int, vocab: int, dtype: torch.dtype) -> list[dict]:
    """Extra memory of ours and of eager PyTorch where the batch is large; no times."""
    c = case(rows, width, vocab, dtype)
    top = {"rows": rows, "hidden": width, "vocab": vocab, "dtype": str(dtype).removeprefix("torch.")}
    runs = contenders(c)
    return [
        top | {"name": name, "extra MB": peak_memory(runs[name], warm=True) / 1e6} for name in ("grpo_kernels", "eager PyTorch")
    ]


def show(table: list[dict]) -> None:
    print(f"\n{table[0]['rows']} x {table[0]['hidden']} x {table[0]['vocab']} {table[0]['dtype']}")
    print(f"{'':34}{'ms':>9}{'p20':>9}{'p80':>9}{'x products':>12}{'extra MB':>10}{'d_hidden':>10}{'d_weight':>10}")
    for r in table:
        if "ms" not in r and "extra MB" in r and "d_weight error" not in r:
            print(f"{r['name']:34}{'':9}{'':9}{'':9}{'':12}{r['extra MB']:10.0f}")
            continue
        if "ms" not in r:
            reason = r.get("failed") or f"its gradients are off by {max(r['d_hidden error'], r['d_weight error']):.1e}"
            print(f"{r['name']:34} no time: {reason}")
            continue
        memory = f"{r['extra MB']:10.0f}" if "extra MB" in r else " " * 10
        errors = f"{r['d_hidden error']:10.1e}{r['d_weight error']:10.1e}" if "d_weight error" in r else ""
        print(f"{r['name']:34}{r['ms']:9.0f}{r['p20']:9.0f}{r['p80']:9.0f}{r['x products']:12.2f}{memory}{errors}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--memory-rows", type=int, default=4096, help="rows of the comparison of memory alone; 0 = none")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/hidden_level_cpu.json")
    args = parser.parse_args()
    rows = []
    for n in args.rows:
        for dtype in (torch.float32, torch.bfloat16):
            # Large batches take seconds a run: fewer of them, and only of those nearest to ours.
            large = n > 256
            skip = ("torch.compile", "CCE (torch.compile) + loss") if large else ()
            table = measure(n, args.hidden, args.vocab, dtype, 2 if large else args.rounds, skip)
            show(table)
            rows += table
    if args.memory_rows:
        table = memory(args.memory_rows, args.hidden, args.vocab, torch.float32)
        show(table)
        rows += table
    if args.save:
        print("\nwritten:", save("hidden_level_cpu", rows))


if __name__ == "__main__":
    main()
