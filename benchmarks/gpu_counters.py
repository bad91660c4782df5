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
    Options,
    Sparse,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    token_divergence,
    token_logprobs,
)
from grpo_kernels.formulas.surrogates import Clip
from grpo_kernels.rows.backends import triton as backend

Tensor = torch.Tensor

# ---- kernels that have run


KERNELS = (
    backend._stats_kernel, backend._pull_kernel, backend._fused_kernel, backend._scale_kernel,
    backend._slot_logits_kernel, backend._add_weight_rows_kernel, backend._add_hidden_rows_kernel, backend._add_pieces_kernel,
    backend._two_stats_kernel, backend._mixed_kernel, backend._two_pull_kernel, backend._select_kernel,
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
    lengths: tuple[int, int], vocab: int, device: str, masked: bool = True, kept: int = 0, reference: bool = True
) -> TokenBatch:
    """A batch of [B, T] random tokens. Half of the sequences have advantage 0, and one token of each is masked. kept: how
    many ids the set of each token has; 0: no sets. reference: whether there are log-probs of a reference."""
    targets = torch.randint(vocab, lengths, device=device)
    mask = torch.ones(lengths, dtype=torch.bool, device=device)
    mask[:, 0] = False
    advantages = torch.randn(lengths[0], device=device)
    advantages[::2] = 0.0
    old, ref = torch.randn(2, *lengths, device=device)
    sets = None
    if kept:
        ids = (targets.view(-1, 1) + torch.arange(kept, device=device) * (vocab // kept)) % vocab
        sets = TokenSets(ids.view(-1), torch.arange(0, ids.numel() + 1, kept, device=device))
    ref_logps = ref - 8 if reference else None
    return TokenBatch(targets, advantages, mask=mask if masked else None, old_logps=old - 8, ref_logps=ref_logps, kept=sets)


#: Ids of a wide set: more than rows that are padded to one width have.
WIDE = 100


class Given(NamedTuple):
    """What the calls take."""

    logits: Tensor
    hidden: Tensor
    weight: Tensor
    batch: TokenBatch
    alone: TokenBatch  # without log-probs of a reference
    kept: TokenBatch
    wide: TokenBatch

    @classmethod
    def of(cls, device: str, shape: tuple[int, int], vocab: int, width: int, dtype: torch.dtype) -> Given:
        logits, hidden = (torch.randn(*shape, size, device=device).to(dtype).requires_grad_() for size in (vocab, width))
        weight = torch.randn(vocab, width, device=device).to(dtype).requires_grad_()
        batch, alone = batch_of(shape, vocab, device), batch_of(shape, vocab, device, reference=False)
        kept, wide = (batch_of(shape, vocab, device, kept=ids) for ids in (4, WIDE))
        return cls(logits, hidden, weight, batch, alone, kept, wide)

    @property
    def head(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.weight

    @property
    def second(self) -> tuple[Tensor, Tensor]:
        """A reference with the same head."""
        return self.hidden.detach().roll(1, 0), self.weight

    @property
    def ids(self) -> TokenSets:
        assert self.kept.kept is not None
        return self.kept.kept


DAPO = Objective.preset("dapo", beta=0.04)
EXACT = Objective.preset("dapo", beta=0.04, kl=Exact("jsd"))
SPARSE = Options(sparse=Sparse())


def losses(device: str, rows: int, vocab: int, width: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Callable[[], Any]]:
    """{entry point: a call of it with its backward}; each has been called once."""
    found = calls(device, rows, vocab, width, dtype)
    for call in found.values():
        call()
    return found


def calls(device: str, rows: int, vocab: int, width: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """{entry point: a call of it with its backward}."""
    shape = 4, max(2, rows // 4)
    on = Given.of(device, shape, vocab, width, dtype)
    logits, head, batch, objective, second = on.logits, on.head, on.batch, DAPO, on.second
    frozen = on.hidden.detach(), on.weight.detach()

    def loss(over: TokenBatch, objective: Objective = DAPO, **more: Any) -> Any:
        return torch.autograd.grad(linear_grpo_loss(*head, over, objective, **more).loss, head)

    def of_logits(logps: Tensor, *_: Any) -> Any:
        return torch.autograd.grad(logps.sum(), logits)

    def of_head(value: Tensor, *_: Any) -> Any:
        return torch.autograd.grad(value.sum(), head)

    def several(logps: Tensor, _: Any, more: dict[str, Tensor]) -> Tensor:
        return logps.sum() + more["at"].sum()

    return {
        "grpo_loss": lambda: of_logits(grpo_loss(logits, batch, objective).loss),
        "grpo_loss, in place": lambda: of_logits(grpo_loss(logits * 1, batch, objective, inplace=True).loss),
        "grpo_loss, metrics": lambda: grpo_loss(logits.detach(), batch, objective).metrics,
        "linear_grpo_loss": lambda: loss(batch),
        "TokenBatch and linear_grpo_loss": lambda: linear_grpo_loss(*head, batch_of(shape, vocab, device), objective).loss,
        "linear_grpo_loss, kept sets": lambda: loss(on.kept),
        "linear_grpo_loss, wide kept sets": lambda: loss(on.wide),
        "linear_grpo_loss, sparse": lambda: loss(batch, options=SPARSE),
        "linear_grpo_loss, divergence": lambda: loss(on.alone, EXACT, reference=second),
        "linear_grpo_loss, several teachers": lambda: loss(on.alone, EXACT, reference=[(second, 0.5), (second, 0.25)]),
        "token_logprobs": lambda: of_logits(*token_logprobs(logits, batch.targets)),
        "token_logprobs, masked": lambda: of_logits(*token_logprobs(logits, batch.targets, mask=batch.mask)),
        "token_logprobs, several ids": lambda: of_logits(several(*token_logprobs(logits, batch.targets, at=on.ids))),
        "linear_logprobs, no gradient": lambda: linear_logprobs(*frozen, batch.targets),
        "linear_logprobs, masked": lambda: linear_logprobs(*frozen, batch.targets, mask=batch.mask),
        "linear_logprobs, several ids": lambda: of_head(several(*linear_logprobs(*head, batch.targets, at=on.ids))),
        "token_divergence": lambda: of_logits(token_divergence(logits, logits.detach().roll(1, 0), "forward")),
        "linear_divergence": lambda: of_head(linear_divergence(*head, second, "jsd")),
        "linear_divergence, masked": lambda: linear_divergence(*frozen, second, "jsd", mask=batch.mask),
        "linear_divergence, several teachers": lambda: linear_divergence(*frozen, [(second, 0.5)], "jsd"),
    }


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
        kept = batch_of((2, length), vocab, device, kept=4)
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
    "linear_divergence, masked": "rows are picked by the mask",
    "linear_divergence, several teachers": "rows of each teacher are picked by its weights",
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
    on = Given.of(device, (4, rows // 4), vocab, width, dtype)

    def from_logits(inplace: bool) -> tuple[Tensor, ...]:
        loss = grpo_loss(on.logits * 1 if inplace else on.logits, on.batch, DAPO, inplace=inplace).loss
        return loss.detach(), *torch.autograd.grad(loss, on.logits)

    def logprobs(**more: Any) -> tuple[Tensor, ...]:
        logps, entropy, *others = token_logprobs(on.logits, on.batch.targets, entropy=True, **more)
        assert entropy is not None
        of_ids = [x["at"] for x in others]
        loss = logps.sum() - entropy.sum() + sum(x.sum() for x in of_ids)
        found = (x.detach() for x in (logps, entropy, *of_ids))
        return *found, *torch.autograd.grad(loss, on.logits)

    def from_hidden(over: TokenBatch, objective: Objective = DAPO, **more: Any) -> Captured:
        def step() -> tuple[Tensor, ...]:
            loss = linear_grpo_loss(*on.head, over, objective, **more).loss
            return loss.detach(), *torch.autograd.grad(loss, on.head)

        return Captured(on.hidden, step, False)

    second, seed = on.second, torch.zeros((), dtype=torch.int64, device=device)

    def divergence() -> tuple[Tensor, ...]:
        value = linear_divergence(*on.head, second, "jsd")
        return value.detach(), *torch.autograd.grad(value.sum(), on.head)

    return {
        "grpo_loss": Captured(on.logits, lambda: from_logits(False), True),
        "grpo_loss, in place": Captured(on.logits, lambda: from_logits(True), True),
        "token_logprobs": Captured(on.logits, logprobs, True),
        "token_logprobs, masked, several ids": Captured(on.logits, lambda: logprobs(mask=on.batch.mask, at=on.ids), True),
        "linear_grpo_loss": from_hidden(on.batch),
        "linear_grpo_loss, kept sets": from_hidden(on.kept),
        "linear_grpo_loss, wide kept sets": from_hidden(on.wide),
        "linear_grpo_loss, sparse": from_hidden(on.batch, options=Options(sparse=Sparse(seed=seed))),
        "linear_grpo_loss, divergence": from_hidden(on.alone, EXACT, reference=second),
        "linear_grpo_loss, several teachers": from_hidden(on.alone, EXACT, reference=[(second, 0.5), (second, 0.25)]),
        "linear_divergence": Captured(on.hidden, divergence, False),
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
