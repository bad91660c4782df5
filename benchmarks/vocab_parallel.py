"""The cost of a vocabulary that is cut over two ranks, measured on a CPU: two gloo processes of one thread each.

    python -m benchmarks.vocab_parallel [--write]

Values are checked against float64 first. --write: benchmarks/results/vocab_parallel.json, and the last section of SCALING.md."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from grpo_kernels.rows.merging import merge

from benchmarks import results
from benchmarks.cases import Cell, HiddenCase, LogitsCase, Result, make_case, policy_loss, reference
from benchmarks.cell_tables import DTYPES, Record, figure, size, times, worst
from benchmarks.errors import errors
from benchmarks.harness import RESULTS, interleaved, peak_memory
from benchmarks.machine import machine, require_kernels
from benchmarks.measure import outside_gate
from benchmarks.providers.ours import native, objective
from benchmarks.roofline import Table, render
from benchmarks.scaling import PAGE
from benchmarks.tables import replace_block
from grpo_kernels import grpo_loss, linear_grpo_loss, token_logprobs
from grpo_kernels.distributed import VocabShard
from grpo_kernels.rows.parallel import all_gather
from grpo_kernels.rows.partials import partials_of

FILE = RESULTS / "vocab_parallel.json"
COMMAND = "python -m benchmarks.vocab_parallel --write"
RANKS = 2
QUIET = 0.5  # load average up to which the machine counts as idle
BURST = 20  # exchanges in a run: a single one is too short to be timed


@dataclass(frozen=True)
class Effort:
    """Rows of a call, hidden size, whole vocabulary; rows of the exchanges that are timed alone; runs of each contender."""

    rows: int = 256
    hidden: int = 1024
    vocab: int = 151936
    exchanges: tuple[int, ...] = (256, 2048, 16384)
    runs: int = 11


# ---- calls: (case, shard) -> log-probs and the results of the contract

Call = Callable[[Any, VocabShard | None], tuple[torch.Tensor, Result]]


def head(case: HiddenCase, shard: VocabShard | None) -> tuple[torch.Tensor, Result]:
    batch, spec = replace(case.batch), objective(case.cell)
    out = linear_grpo_loss(case.hidden, case.weight, batch, spec, shard=shard, backend=native(case))
    return out.logps, case.gradients(out.loss)


def in_place(case: LogitsCase, shard: VocabShard | None) -> tuple[torch.Tensor, Result]:
    batch, spec = replace(case.batch), objective(case.cell)
    out = grpo_loss(case.output(), batch, spec, inplace=True, shard=shard, backend=native(case))
    return out.logps, case.gradients(out.loss)


def layer_one(case: LogitsCase, shard: VocabShard | None) -> tuple[torch.Tensor, Result]:
    logps, _ = token_logprobs(case.logits, case.batch.targets, shard=shard, backend=native(case))
    return logps.detach(), case.gradients(policy_loss(logps, case.batch, case.cell.beta))


CALLS: dict[str, tuple[str, Call]] = {
    "linear_grpo_loss": ("hidden", head),
    "grpo_loss, in place": ("logits", in_place),
    "token_logprobs, loss in torch": ("logits", layer_one),
}


# ---- on a rank


def columns(case: Any, part: slice) -> Any:
    """The case with only these columns of the vocabulary. Its batch is that of the whole vocabulary."""
    if isinstance(case, HiddenCase):
        return replace(case, weight=case.weight.detach()[part].clone().requires_grad_())
    own = case.pristine[:, part].clone()
    return replace(case, logits=own.clone().requires_grad_(), pristine=own, buffer=own)


def as_whole(case: Any, logps: torch.Tensor, call: Call) -> Any:
    """The case with this rank's columns as its whole vocabulary. Targets are moved into that. `logps` are those over the whole
    vocabulary; the log-probs of other policies keep their distance to them."""
    width = case.weight.shape[0] if isinstance(case, HiddenCase) else case.logits.shape[1]
    batch = replace(case.batch, targets=case.batch.targets % width)
    shift = call(replace(case, batch=batch), None)[0] - logps
    ref_logps = None if batch.ref_logps is None else batch.ref_logps + shift
    return replace(case, batch=replace(batch, old_logps=batch.old_logps + shift, ref_logps=ref_logps))


def check(case: Any, found: Result, expected: Result) -> dict[str, float]:
    off = errors(found, expected, float(case.batch.advantages.abs().mean()))
    reason = outside_gate(case.cell, off)
    if reason is not None:
        raise ValueError(f"{case.cell.contract}, {case.cell.dtype}: {reason}, so it is not timed.")
    return off


def measure_call(name: str, dtype: torch.dtype, effort: Effort, rank: int) -> Record:
    contract, call = CALLS[name]
    hidden = effort.hidden if contract == "hidden" else None
    case: Any = make_case(Cell(contract, effort.rows, effort.vocab, dtype, hidden), "cpu")
    width = effort.vocab // RANKS
    part = slice(rank * width, (rank + 1) * width)
    own, shard = columns(case, part), VocabShard(rank * width, effort.vocab)

    logps, results = call(own, shard)
    expected = reference(case)
    parts = {"d_weight": lambda x: x[part], "d_logits": lambda x: x[:, part]}
    off = check(own, results, {key: parts.get(key, lambda x: x)(x) for key, x in expected.items()})
    del results, expected
    restore(own)
    contenders = {"shard": (own, shard), "no exchange": (as_whole(own, logps, call), None), "whole head": (case, None)}
    timed, held = ("shard", "no exchange"), ("shard", "whole head")
    runs: dict[str, Callable[[], Any]] = {x: partial(call, *contender) for x, contender in contenders.items()}

    def prepare(x: str) -> None:
        restore(contenders[x][0])
        dist.barrier()

    # No limit in seconds: all ranks have to make the same number of runs.
    taken = slower(interleaved({x: runs[x] for x in timed}, "cpu", prepare, seconds=math.inf, most=effort.runs))
    memory = {}
    for x in held:
        prepare(x)
        runs[x]()  # warm
        prepare(x)
        memory[x] = peak_memory(runs[x], "cpu") / 1e6
    shape = {"rows": effort.rows, "hidden": hidden, "vocab": effort.vocab, "dtype": str(dtype).removeprefix("torch.")}
    return {"call": name} | shape | {"errors": off, "times": taken, "extra_mb": memory}


def restore(case: Any) -> None:
    if isinstance(case, LogitsCase):
        case.restore()


def measure_exchange(rows: int, runs: int) -> Record:
    """Microseconds of one all-gather of four partials a row, and of their merge."""
    partials, everyone = torch.rand(4, rows), torch.empty(RANKS, 4, rows)
    steps = {
        "all-gather": lambda: all_gather(everyone, partials[None], None),
        "merge": lambda: merge(everyone, partials_of(("entropy",)), None),
    }
    bursts: dict[str, Callable[[], Any]] = {name: partial(burst, step) for name, step in steps.items()}
    timed = interleaved(bursts, "cpu", lambda _: dist.barrier(), seconds=math.inf, most=2 * runs)
    return {"rows": rows, "bytes": 16 * rows, "us": {name: 1e3 * x["ms"] / BURST for name, x in slower(timed).items()}}


def burst(step: Callable[[], Any]) -> None:
    for _ in range(BURST):
        step()


def slower(timed: dict[str, dict]) -> dict[str, dict]:
    """The times of each contender on its slower rank, the one with the larger median."""
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, timed)
    return {name: max((x[name] for x in every), key=lambda x: x["ms"]) for name in timed}


def on_rank(rank: int, folder: str, effort: Effort) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    measurements = {
        "machine": machine("cpu"),
        "calls": [measure_call(name, dtype, effort, rank) for name in CALLS for dtype in (torch.float32, torch.bfloat16)],
        "exchanges": [measure_exchange(rows, effort.runs) for rows in effort.exchanges],
    }
    if rank == 0:
        results.save(Path(folder) / "found.json", measurements)
    dist.barrier()
    os._exit(0)  # threads of gloo may abort an orderly exit


def measure(effort: Effort) -> Record:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (folder, effort), nprocs=RANKS)
        return {"command": COMMAND, "date": time.strftime("%Y-%m-%d"), "load": load} | results.load(Path(folder) / "found.json")


# ---- the page


def block(record: Record) -> str:
    if not record:
        return f"Not measured yet: `{COMMAND}`."
    m = record["machine"]
    kind = m.get("instruction set", "no kernels")
    source = f"{m['name']}, {RANKS} processes of {m['threads']} thread, {kind}, torch {m['torch']}; {record['date']}; "
    busy = f"**Load average {record['load']:.0f} before: other programs ran, so times are theirs too, ratios are rough, and those of "
    busy = "\n\n" + busy + "the exchange say next to nothing; memory and errors hold.**" if record["load"] > QUIET else ""
    head = ["call, N x H x V", "shard, ms", "no exchange, ms", "shard / no exchange"]
    calls: Table = [[*head, "shard, extra MB", "whole head, extra MB", "worst error"]]
    for call in record["calls"]:
        shard, alone = (call["times"][x]["ms"] for x in ("shard", "no exchange"))
        held = [f"{call['extra_mb'][x]:,.0f}" for x in ("shard", "whole head")]
        name = f"{call['call']}, {size(call)}, {DTYPES[call['dtype']]}"
        calls.append([name, figure(shard), figure(alone), times(shard / alone), *held, worst(call)])
    alone = [["one exchange, rows", "bytes a rank sends", "all-gather, us", "merge, us"]]
    for x in record["exchanges"]:
        alone.append([f"{x['rows']:,}", f"{x['bytes']:,}", figure(x["us"]["all-gather"]), figure(x["us"]["merge"])])
    return f"{source}`{record['command']}`.{busy}\n\n{render(calls, markdown=True)}\n\n{render(alone, markdown=True)}"


def insert(text: str, record: Record) -> str:
    return replace_block(text, PAGE.name, "vocab_parallel", block(record), COMMAND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the figures")
    write = parser.parse_args().write
    require_kernels("cpu")
    record = measure(Effort())
    print(block(record))
    if write:
        results.save(FILE, record)
        PAGE.write_text(insert(PAGE.read_text(), record))


if __name__ == "__main__":
    main()
