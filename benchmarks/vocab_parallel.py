"""The cost of a vocabulary that is cut over two ranks, measured on a CPU: two gloo processes of one thread each.

    python -m benchmarks.vocab_parallel [--write]

Values are checked against float64 first. --write: benchmarks/results/vocab_parallel.json, and the last section of
docs/beyond_one_gpu.md."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import results
from benchmarks.cases import Case, Cell, Result, errors, make_case, policy_loss, reference
from benchmarks.experiments import Experiment
from benchmarks.harness import interleaved, peak_memory
from benchmarks.machine import machine
from benchmarks.measure import outside_gate
from benchmarks.providers.ours import native, objective
from benchmarks.results import ROOT
from benchmarks.tables import DTYPES, Record, Table, figure, size, times, worst
from grpo_kernels import Options, grpo_loss, linear_grpo_loss, token_logprobs
from grpo_kernels.distributed import VocabShard

RANKS = 2


#: Rows of a call, hidden size, whole vocabulary; runs of each contender.
ROWS, HIDDEN, VOCABULARY, TIMES = 256, 1024, 151936, 11


# ---- calls: (case, shard) -> log-probs and the results of the contract

Call = Callable[[Any, VocabShard | None], tuple[torch.Tensor, Result]]


def head(case: Case, shard: VocabShard | None) -> tuple[torch.Tensor, Result]:
    batch, spec = replace(case.batch), objective(case)
    out = linear_grpo_loss(case.hidden, case.weight, batch, spec, options=Options(shard=shard, backend=native(case)))
    return out.logps, case.gradients(out.loss)


def in_place(case: Case, shard: VocabShard | None) -> tuple[torch.Tensor, Result]:
    batch, spec = replace(case.batch), objective(case)
    out = grpo_loss(case.output(), batch, spec, inplace=True, options=Options(shard=shard, backend=native(case)))
    return out.logps, case.gradients(out.loss)


def layer_one(case: Case, shard: VocabShard | None) -> tuple[torch.Tensor, Result]:
    logps, _ = token_logprobs(case.logits, case.batch.targets, options=Options(shard=shard, backend=native(case)))
    return logps.detach(), case.gradients(policy_loss(logps, case.batch, case.cell.beta))


CALLS: dict[str, tuple[str, Call]] = {
    "linear_grpo_loss": ("hidden", head),
    "grpo_loss, in place": ("logits", in_place),
    "token_logprobs, loss in torch": ("logits", layer_one),
}


# ---- on a rank


def columns(case: Any, part: slice) -> Any:
    """The case with only these columns of the vocabulary. Its batch is that of the whole vocabulary."""
    if case.logits is None:
        return replace(case, weight=case.weight.detach()[part].clone().requires_grad_())
    own = case.pristine[:, part].clone()
    return replace(case, logits=own.clone().requires_grad_(), pristine=own, buffer=own)


def as_whole(case: Any, logps: torch.Tensor, call: Call) -> Any:
    """The case with this rank's columns as its whole vocabulary. Targets are moved into that. `logps` are those over the whole
    vocabulary; the log-probs of other policies keep their distance to them."""
    width = case.weight.shape[0] if case.logits is None else case.logits.shape[1]
    batch = replace(case.batch, targets=case.batch.targets % width)
    shift = call(replace(case, batch=batch), None)[0] - logps
    ref_logps = None if batch.ref_logps is None else batch.ref_logps + shift
    return replace(case, batch=replace(batch, old_logps=batch.old_logps + shift, ref_logps=ref_logps))


def measure_call(name: str, dtype: torch.dtype, rank: int) -> Record:
    contract, call = CALLS[name]
    hidden = HIDDEN if contract == "hidden" else None
    case: Any = make_case(Cell(contract, ROWS, VOCABULARY, dtype, hidden), "cpu")
    width = VOCABULARY // RANKS
    part = slice(rank * width, (rank + 1) * width)
    own, shard = columns(case, part), VocabShard(rank * width, VOCABULARY)

    logps, results = call(own, shard)
    expected = reference(case)
    expected |= {
        key: x[part] if key == "d_weight" else x[:, part] for key, x in expected.items() if key in ("d_weight", "d_logits")
    }
    off = errors(results, expected, float(case.batch.advantages.abs().mean()))
    if (reason := outside_gate(case.cell, off)) is not None:
        raise ValueError(f"{name}, {dtype}: {reason}, so it is not timed.")
    del results, expected
    own.restore()
    contenders = {"shard": (own, shard), "no exchange": (as_whole(own, logps, call), None), "whole head": (case, None)}
    runs = {x: partial(call, *contender) for x, contender in contenders.items()}

    def prepare(x: str) -> None:
        contenders[x][0].restore()
        dist.barrier()

    # No limit in seconds: all ranks have to make the same number of runs.
    timed = {x: runs[x] for x in ("shard", "no exchange")}
    taken = slower(interleaved(timed, "cpu", prepare, seconds=math.inf, most=TIMES))
    memory = {}
    for x in ("shard", "whole head"):
        for run in (runs[x], lambda x=x: memory.update({x: peak_memory(runs[x], "cpu") / 1e6})):  # warm, then measured
            prepare(x)
            run()
    shape = {"rows": ROWS, "hidden": hidden, "vocab": VOCABULARY, "dtype": str(dtype).removeprefix("torch.")}
    return {"call": name} | shape | {"errors": off, "times": taken, "extra_mb": memory}


def slower(timed: dict[str, dict]) -> dict[str, dict]:
    """The times of each contender on its slower rank, the one with the larger median."""
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, timed)
    return {name: max((x[name] for x in every), key=lambda x: x["ms"]) for name in timed}


def on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    calls = [measure_call(name, dtype, rank) for name in CALLS for dtype in (torch.float32, torch.bfloat16)]
    if rank == 0:
        results.save(Path(folder) / "found.json", {"machine": machine("cpu"), "calls": calls})
    dist.barrier()
    os._exit(0)  # threads of gloo may abort an orderly exit


def measure() -> Record:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (folder,), nprocs=RANKS)
        return results.load(Path(folder) / "found.json")


# ---- the page


def tables(record: Record) -> Iterator[Table]:
    head = ["call, N x H x V", "shard, ms", "no exchange, ms", "shard / no exchange", "shard, extra MB", "whole head, extra MB"]
    calls = [[*head, "worst error"]]
    for call in record["calls"]:
        shard, alone = (call["times"][x]["ms"] for x in ("shard", "no exchange"))
        held = [f"{call['extra_mb'][x]:,.0f}" for x in ("shard", "whole head")]
        name = f"{call['call']}, {size(call)}, {DTYPES[call['dtype']]}"
        calls.append([name, figure(shard), figure(alone), times(shard / alone), *held, worst(call)])
    yield calls


EXPERIMENT = Experiment("vocab_parallel", ROOT / "docs" / "beyond_one_gpu.md", tables, measure)

if __name__ == "__main__":
    EXPERIMENT.main()
