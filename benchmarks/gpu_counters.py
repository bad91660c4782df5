"""The measurements of the stages `counters` and `resources` of the GPU kit. For calls of every public function: what they
compile, where they make the host wait, how much host time they take, and whether a CUDA graph of them gives the same result.

A new entry point of the package registers in `calls`, and in CAPTURED if it is to be captured."""

from __future__ import annotations

import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

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

Tensor = torch.Tensor

# ---- kernels that have run


def loaded_kernels() -> list[dict]:
    """Registers, spills and shared memory of the package's kernels that this process has launched, as the driver reports them."""
    modules = [module for name, module in sys.modules.items() if name.startswith("grpo_kernels.")]
    kernels = {x.__name__: x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}
    return [
        {
            "kernel": name, "registers": compiled.n_regs, "spills": compiled.n_spills, "shared": compiled.metadata.shared,
            "warps": compiled.metadata.num_warps,
        }
        for name, kernel in kernels.items() for caches in kernel.device_caches.values()
        for compiled in caches[0].values() if compiled.module is not None
    ]  # fmt: skip


# ---- calls


def batch_of(
    shape: tuple[int, int], vocab: int, device: str, masked: bool = True, kept: int = 0, reference: bool = True
) -> TokenBatch:
    """A batch of [B, T] random tokens. Half of the sequences have advantage 0, and one token of each is masked. kept: how
    many ids the set of each token has; 0: no sets. reference: whether there are log-probs of a reference."""
    targets, mask = torch.randint(vocab, shape, device=device), torch.ones(shape, dtype=torch.bool, device=device)
    mask[:, 0] = False
    advantages = torch.randn(shape[0], device=device)
    advantages[::2] = 0.0
    old, ref = torch.randn(2, *shape, device=device) - 8
    sets = None
    if kept:
        ids = (targets.view(-1, 1) + torch.arange(kept, device=device) * (vocab // kept)) % vocab
        sets = TokenSets(ids.view(-1), torch.arange(0, ids.numel() + 1, kept, device=device))
    given = {"mask": mask if masked else None, "ref_logps": ref if reference else None, "kept": sets}
    return TokenBatch(targets, advantages, old_logps=old, **given)


#: Ids of a wide set: more than rows that are padded to one width have.
WIDE = 100


class Given:
    """What the calls take."""

    def __init__(self, device: str, shape: tuple[int, int], vocab: int, width: int, dtype: torch.dtype) -> None:
        leaves = ((*shape, vocab), (*shape, width), (vocab, width))
        self.logits, self.hidden, self.weight = (torch.randn(x, device=device).to(dtype).requires_grad_() for x in leaves)
        self.batch, self.alone = (batch_of(shape, vocab, device, reference=reference) for reference in (True, False))
        self.kept, self.wide = (batch_of(shape, vocab, device, kept=ids) for ids in (4, WIDE))
        self.head = self.hidden, self.weight
        self.second = self.hidden.detach().roll(1, 0), self.weight  # a reference with the same head


DAPO = Objective.preset("dapo", beta=0.04)
EXACT = Objective.preset("dapo", beta=0.04, kl=Exact("jsd"))
#: A call with its backward: values and gradients.
Step = Callable[[], tuple[Tensor, ...]]


def losses(device: str, rows: int, vocab: int, width: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Step]:
    """The calls; each has been made once."""
    found = calls(Given(device, (4, max(2, rows // 4)), vocab, width, dtype))
    for call in found.values():
        call()
    return found


def calls(on: Given) -> dict[str, Step]:
    """{entry point: a call of it}."""
    logits, head, batch, second = on.logits, on.head, on.batch, on.second
    frozen, device = tuple(x.detach() for x in head), logits.device
    seeded = Options(sparse=Sparse(seed=torch.zeros((), dtype=torch.int64, device=device)))

    def pulled(value: Tensor, *given: Tensor, beside: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        total = value.sum() + sum(x.sum() for x in beside)
        return value.detach(), *(x.detach() for x in beside), *torch.autograd.grad(total, given)

    def loss(over: TokenBatch, objective: Objective = DAPO, **more: Any) -> tuple[Tensor, ...]:
        return pulled(linear_grpo_loss(*head, over, objective, **more).loss, *head)

    def of_logits(**more: Any) -> tuple[Tensor, ...]:
        found = token_logprobs(logits, batch.targets, entropy=True, **more)
        return pulled(found.logps, logits, beside=(found.entropy, *found.also.values()))  # type: ignore[arg-type]

    def several() -> tuple[Tensor, ...]:
        found = linear_logprobs(*head, batch.targets, at=on.kept.kept)
        return pulled(found.logps, *head, beside=(found.also["at"],))

    shape, vocab = (batch.targets.shape[0], batch.targets.shape[1]), logits.shape[-1]
    teachers = [(second, 0.5), (second, 0.25)]
    return {
        "grpo_loss": lambda: pulled(grpo_loss(logits, batch, DAPO).loss, logits),
        "grpo_loss, in place": lambda: pulled(grpo_loss(logits * 1, batch, DAPO, inplace=True).loss, logits),
        "grpo_loss, metrics": lambda: tuple(grpo_loss(logits.detach(), batch, DAPO).metrics.values()),
        "linear_grpo_loss": lambda: loss(batch),
        "TokenBatch and linear_grpo_loss": lambda: (linear_grpo_loss(*head, batch_of(shape, vocab, str(device)), DAPO).loss,),
        "linear_grpo_loss, kept sets": lambda: loss(on.kept),
        "linear_grpo_loss, wide kept sets": lambda: loss(on.wide),
        "linear_grpo_loss, sparse": lambda: loss(batch, options=Options(sparse=Sparse())),
        "linear_grpo_loss, sparse with a seed": lambda: loss(batch, options=seeded),
        "linear_grpo_loss, divergence": lambda: loss(on.alone, EXACT, reference=second),
        "linear_grpo_loss, several teachers": lambda: loss(on.alone, EXACT, reference=teachers),
        "token_logprobs": of_logits,
        "token_logprobs, masked": lambda: of_logits(mask=batch.mask),
        "token_logprobs, masked, several ids": lambda: of_logits(mask=batch.mask, at=on.kept.kept),
        "linear_logprobs, no gradient": lambda: (linear_logprobs(*frozen, batch.targets)[0],),
        "linear_logprobs, masked": lambda: (linear_logprobs(*frozen, batch.targets, mask=batch.mask)[0],),
        "linear_logprobs, several ids": several,
        "token_divergence": lambda: pulled(token_divergence(logits, logits.detach().roll(1, 0), "forward"), logits),
        "linear_divergence": lambda: pulled(linear_divergence(*head, second, "jsd"), *head),
        "linear_divergence, masked": lambda: (linear_divergence(*frozen, second, "jsd", mask=batch.mask),),
        "linear_divergence, several teachers": lambda: (linear_divergence(*frozen, teachers[:1], "jsd"),),
    }


def recompilations(device: str, vocab: int, width: int, lengths: int = 30, schedules: int = 10, longest: int = 300) -> int:
    """Counts the kernels and graphs that random lengths and schedules compile, after one call of each entry point."""
    draw = random.Random(0)

    def step(length: int, low: float, high: float, beta: float, temperature: float) -> None:
        objective = Objective.preset("dapo", surrogate=Clip(low, high), beta=beta)
        how: dict[str, Any] = {"transform": LogitTransform(temperature=temperature)}
        on = Given(device, (2, length), vocab, width, torch.bfloat16)
        torch.autograd.grad(grpo_loss(on.logits, on.batch, objective, **how).loss * 2.0, on.logits)
        for batch in (on.batch, on.kept):
            torch.autograd.grad(linear_grpo_loss(*on.head, batch, objective, **how).loss * 2.0, on.head)
        torch.autograd.grad(token_logprobs(on.logits, on.batch.targets, **how)[0].sum(), on.logits)

    kinds = [
        (draw.random(), draw.random(), draw.random() + 1e-3, draw.choice((1.0, 0.5, draw.random() + 0.1)))
        for _ in range(schedules)
    ]
    step(min(longest, 33), *kinds[0])
    with compilations() as count:
        for i in range(lengths):
            step(min(longest, draw.choice((1, 16, draw.randint(2, 300)))), *kinds[i % schedules])
        return count()


#: The calls that are documented to make the host wait, and why.
WAITS = {
    "linear_logprobs, masked": "rows are picked by the mask",
    "linear_divergence, masked": "rows are picked by the mask",
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


#: The calls that a trainer would capture, and whether their results must be equal bit by bit; if not, products may run another
#: kernel while they are captured.
CAPTURED = {
    "grpo_loss": True, "grpo_loss, in place": True, "token_logprobs": True, "token_logprobs, masked, several ids": True,
    "linear_grpo_loss": False, "linear_grpo_loss, kept sets": False, "linear_grpo_loss, wide kept sets": False,
    "linear_grpo_loss, sparse with a seed": False, "linear_grpo_loss, divergence": False,
    "linear_grpo_loss, several teachers": False, "linear_divergence": False,
}  # fmt: skip


class Captured(NamedTuple):
    """A call for a CUDA graph: `step` reads the tensor, which is overwritten before the replay."""

    given: Tensor
    step: Step
    exact: bool


def graphed(device: str, rows: int, vocab: int, width: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Captured]:
    on = Given(device, (4, rows // 4), vocab, width, dtype)
    steps = calls(on)
    return {
        name: Captured(on.hidden if name.startswith("linear") else on.logits, steps[name], exact)
        for name, exact in CAPTURED.items()
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
