"""The measurements of the stages `counters` and `resources` of the GPU kit. For calls of every public function: what they compile,
where they make the host wait, how much host time they take, and whether a CUDA graph of them gives the same result.

A new entry point of the package registers in `losses`, and in `graphed` if it is to be captured."""

from __future__ import annotations

import random
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.harness import compilations
from grpo_kernels import (
    Exact,
    LogitTransform,
    Objective,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
    token_divergence,
    token_logprobs,
)
from grpo_kernels.formulas.surrogates import Clip
from grpo_kernels.vocabulary.backends import triton as backend
from grpo_kernels.vocabulary.backends import triton_divergence_kernels as beside
from grpo_kernels.vocabulary.backends import triton_sparse_kernels as sparse

Tensor = torch.Tensor

# ---- kernels that have run


KERNELS = (
    backend._stats_kernel, backend._pull_kernel, backend._fused_kernel, backend._scale_kernel,
    sparse._slot_logits_kernel, sparse._add_weight_rows_kernel, sparse._add_hidden_rows_kernel,
    beside._two_stats_kernel, beside._mixed_kernel, beside._two_pull_kernel,
)  # fmt: skip


def loaded_kernels() -> list[dict]:
    """Registers, spills and shared memory of the kernels that this process has launched, as the driver reports them."""
    kernels = []
    for kernel in KERNELS:
        for caches in kernel.device_caches.values():
            kernels += [
                {
                    "kernel": kernel.__name__, "registers": compiled.n_regs, "spills": compiled.n_spills,
                    "shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps,
                }
                for compiled in caches[0].values() if compiled.module is not None
            ]  # fmt: skip
    return kernels


# ---- calls


def batch_of(
    lengths: tuple[int, int], vocab: int, device: str, masked: bool = True, kept: bool = False, reference: bool = True
) -> TokenBatch:
    """A batch of [B, T] random tokens. Half of the sequences have advantage 0, and one token of each is masked. kept: each
    token has a set of four ids. reference: whether there are log-probs of a reference."""
    targets = torch.randint(vocab, lengths, device=device)
    mask = torch.ones(lengths, dtype=torch.bool, device=device)
    mask[:, 0] = False
    advantages = torch.randn(lengths[0], device=device)
    advantages[::2] = 0.0
    old, ref = torch.randn(2, *lengths, device=device)
    sets = None
    if kept:
        ids = (targets.view(-1, 1) + torch.tensor([0, 1, 5, 7], device=device)) % vocab
        sets = TokenSets(ids.view(-1), torch.arange(0, ids.numel() + 1, 4, device=device))
    ref_logps = ref - 8 if reference else None
    return TokenBatch(targets, advantages, mask=mask if masked else None, old_logps=old - 8, ref_logps=ref_logps, kept=sets)


def losses(device: str, rows: int, vocab: int, width: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Callable[[], Any]]:
    """{entry point: a call of it with its backward}; each has been called once."""
    shape, objective = (4, max(2, rows // 4)), Objective.preset("dapo", beta=0.04)
    batch, kept = batch_of(shape, vocab, device), batch_of(shape, vocab, device, kept=True)
    logits = torch.randn(*batch.targets.shape, vocab, device=device).to(dtype).requires_grad_()
    hidden = torch.randn(*batch.targets.shape, width, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, device=device).to(dtype).requires_grad_()
    head, exact = (hidden, weight), Objective.preset("dapo", beta=0.04, kl=Exact("jsd"))
    second = {"reference": (hidden.detach().roll(1, 0), weight)}  # with one head for both
    alone = batch_of(shape, vocab, device, reference=False)
    calls: dict[str, Callable[[], Any]] = {
        "grpo_loss": lambda: torch.autograd.grad(grpo_loss(logits, batch, objective).loss, logits),
        "grpo_loss, in place": lambda: torch.autograd.grad(grpo_loss(logits * 1, batch, objective, inplace=True).loss, logits),
        "grpo_loss, metrics": lambda: grpo_loss(logits.detach(), batch, objective).metrics,
        "linear_grpo_loss": lambda: torch.autograd.grad(linear_grpo_loss(*head, batch, objective).loss, head),
        "TokenBatch and linear_grpo_loss": lambda: linear_grpo_loss(*head, batch_of(shape, vocab, device), objective).loss,
        "linear_grpo_loss, kept sets": lambda: torch.autograd.grad(linear_grpo_loss(*head, kept, objective).loss, head),
        "token_logprobs": lambda: torch.autograd.grad(token_logprobs(logits, batch.targets)[0].sum(), logits),
        "linear_logprobs, no gradient": lambda: linear_logprobs(hidden.detach(), weight.detach(), batch.targets),
        "linear_logprobs, masked": lambda: linear_logprobs(hidden.detach(), weight.detach(), batch.targets, mask=batch.mask),
        "linear_grpo_loss, divergence": lambda: torch.autograd.grad(linear_grpo_loss(*head, alone, exact, **second).loss, head),
        "token_divergence": lambda: torch.autograd.grad(
            token_divergence(logits, logits.detach().roll(1, 0), "forward").sum(), logits
        ),
    }
    for call in calls.values():
        call()
    return calls


def recompilations(
    device: str, vocab: int, width: int, lengths: int = 30, schedules: int = 10, longest: int = 300
) -> int:  # fmt: skip
    """Counts the kernels and graphs that random lengths and schedules compile, after one call of each entry point."""
    draw = random.Random(0)

    def step(length: int, schedule: tuple[float, ...]) -> None:
        low, high, beta, temperature = schedule
        objective = Objective.preset("dapo", surrogate=Clip(low, high), beta=beta)
        transform = LogitTransform(temperature=temperature)
        batch = batch_of((2, length), vocab, device)
        logits = torch.randn(2, length, vocab, device=device, dtype=torch.bfloat16, requires_grad=True)
        hidden = torch.randn(2, length, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocab, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        torch.autograd.grad(grpo_loss(logits, batch, objective, transform=transform).loss * 2.0, logits)
        head = hidden, weight
        torch.autograd.grad(linear_grpo_loss(*head, batch, objective, transform=transform).loss * 2.0, head)
        kept = batch_of((2, length), vocab, device, kept=True)
        torch.autograd.grad(linear_grpo_loss(*head, kept, objective, transform=transform).loss * 2.0, head)
        logps, _ = token_logprobs(logits, batch.targets, transform=transform)
        torch.autograd.grad(logps.sum(), logits)

    kinds = [
        (draw.random(), draw.random(), draw.random() + 1e-3, draw.choice((1.0, 0.5, draw.random() + 0.1)))
        for _ in range(schedules)
    ]
    step(min(longest, 33), kinds[0])
    with compilations() as count:
        for i in range(lengths):
            step(min(longest, draw.choice((1, 16, draw.randint(2, 300)))), kinds[i % schedules])
        return count()


#: The calls that are documented to make the host wait, and why.
WAITS = {
    "linear_logprobs, masked": "rows are picked by the mask",
    "TokenBatch and linear_grpo_loss": "row counts, sent to the host when the batch is made, are needed right after",
}


def first_wait(step: Callable[[], Any]) -> str | None:
    """Where `step` first makes the host wait for CUDA; None if nowhere. The debug mode of torch does not report waits for
    an event, so these are counted here, except for events that are over. Everything before `step` is over."""

    def wait(event: torch.cuda.Event) -> None:
        if not event.query():
            raise RuntimeError("a synchronizing event")

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with mock.patch.object(torch.cuda.Event, "synchronize", wait):
            step()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return " < ".join(
            f"{Path(f.filename).name}:{f.lineno} {f.line}" for f in reversed(traceback.extract_tb(error.__traceback__))
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def host_ms(call: Callable[[], Any], runs: int = 30) -> float:
    """The median host time of a call, whose work the device does later. The device is idle when a run starts."""
    taken = []
    for _ in range(runs):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return statistics.median(taken)


# ---- CUDA graphs


class Captured(NamedTuple):
    """A whole loss for a CUDA graph: `step` reads the tensor, which is overwritten before the replay."""

    given: Tensor
    step: Callable[[], tuple[Tensor, ...]]
    exact: bool  # results must be equal bit by bit; if not, products may run another kernel while they are captured


def graphed(device: str, rows: int, vocab: int, width: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Captured]:
    """The losses that a trainer would capture, each with its backward, on one batch."""
    shape, objective = (4, rows // 4), Objective.preset("dapo", beta=0.04)
    batch, kept = batch_of(shape, vocab, device), batch_of(shape, vocab, device, kept=True)
    logits = torch.randn(*shape, vocab, device=device).to(dtype).requires_grad_()
    hidden = torch.randn(*shape, width, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, device=device).to(dtype).requires_grad_()
    exact, of_teacher = Objective.preset("dapo", beta=0.04, kl=Exact("jsd")), hidden.detach().roll(1, 0)
    alone = batch_of(shape, vocab, device, reference=False)

    def from_logits(inplace: bool) -> tuple[Tensor, ...]:
        loss = grpo_loss(logits * 1 if inplace else logits, batch, objective, inplace=inplace).loss
        return loss.detach(), *torch.autograd.grad(loss, logits)

    def logprobs() -> tuple[Tensor, ...]:
        logps, entropy = token_logprobs(logits, batch.targets, entropy=True)
        assert entropy is not None
        return logps.detach(), entropy.detach(), *torch.autograd.grad(logps.sum() - entropy.sum(), logits)

    def from_hidden(over: TokenBatch) -> tuple[Tensor, ...]:
        loss = linear_grpo_loss(hidden, weight, over, objective).loss
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    def divergence() -> tuple[Tensor, ...]:
        loss = linear_grpo_loss(hidden, weight, alone, exact, reference=(of_teacher, weight)).loss
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    return {
        "grpo_loss": Captured(logits, lambda: from_logits(False), True),
        "grpo_loss, in place": Captured(logits, lambda: from_logits(True), True),
        "token_logprobs": Captured(logits, logprobs, True),
        "linear_grpo_loss": Captured(hidden, lambda: from_hidden(batch), False),
        "linear_grpo_loss, kept sets": Captured(hidden, lambda: from_hidden(kept), False),
        "linear_grpo_loss, divergence": Captured(hidden, divergence, False),
    }


#: The largest difference of a replay from a plain call, if products run another kernel: gradients are bf16.
REPLAYED = 1e-2


def replay_differs(what: Captured) -> str | None:
    """Captures a step, replays it on another input and compares with a plain call; None, or what is wrong, in words."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a first call, so that nothing created at first use is captured
        what.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            captured = what.step()
    except RuntimeError as refused:
        return f"cannot be captured: {str(refused).splitlines()[0]}"
    before = [x.clone() for x in captured]
    with torch.no_grad():
        what.given.copy_(torch.randn_like(what.given))
    graph.replay()
    torch.cuda.synchronize()
    plain = what.step()
    if what.exact and not all(torch.equal(a, b) for a, b in zip(captured, plain, strict=True)):
        return "a replay gives other bits than a plain call"
    off = max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(captured, plain, strict=True))
    if not off <= REPLAYED:
        return f"a replay is off by {off:.1e}"
    if all(torch.equal(a, b) for a, b in zip(before, captured, strict=True)):
        return "the replay wrote nothing"
    return None
