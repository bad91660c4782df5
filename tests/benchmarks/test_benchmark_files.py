"""Result files of the benchmarks, which a second run completes, and the benchmarks' commands."""

from __future__ import annotations

import json
import re
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")  # of the step
pytest.importorskip("triton")

from benchmarks import __main__ as command
from benchmarks import harness, machine, results, suites
from benchmarks import measure as measuring
from benchmarks.cases import Cell
from benchmarks.cell_tables import source
from benchmarks.measure import DeviceLost, measure
from grpo_kernels.diagnosis import Finding
from grpo_kernels.vocabulary import backends
from support.benchmark_cells import BF16, FP32, OURS, QUICKLY, by_name, nothing_compiles, poisoned_memory, provider, tiny  # noqa: F401 - fixtures

# ---- result files


class Planned:
    """A suite of two cells whose measurement is replaced: `log` records the cells that were requested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.out, self.log, self.cells = out, [], [tiny("logits"), tiny("logits", BF16)]
        self.known: list[dict | None] = []
        self.failure: BaseException | None = None  # raised at the second cell
        plan = lambda device, quick: [suites.Planned(cell) for cell in self.cells]  # noqa: E731
        monkeypatch.setitem(suites.SUITES, "test", suites.Suite("test", "A test", "logits", plan))
        monkeypatch.setattr(suites, "measure", self.measure)

    def measure(self, cell: Cell, device: str, known: dict | None = None, **how: Any) -> dict:
        if self.failure is not None and cell.dtype == BF16:
            raise self.failure
        self.log.append(cell)
        self.known.append(known)
        return measuring.describe(cell) | {"limit": None, "providers": [], "number": len(self.log)}

    def run(self, **how: bool) -> dict:
        (path,), self.unmeasured = suites.run(["test"], "cpu", self.out, **how)
        assert path == self.out / machine.kind("cpu") / "test.json"
        return json.loads(path.read_text())


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Planned:
    return Planned(monkeypatch, tmp_path)


def test_the_machine_its_backend_and_a_legend_come_first(planned: Planned, capsys: pytest.CaptureFixture[str]) -> None:
    planned.run()
    first, _, *legend = capsys.readouterr().out.partition("\n#")[0].splitlines()
    assert f"backend {machine.machine('cpu')['backend']}" in first and f"{torch.get_num_threads()} threads" in first
    assert all(word in " ".join(legend) for word in ("n runs", "U:", "NHV", "limit", "error"))


def test_a_second_run_skips_what_is_there(planned: Planned) -> None:
    first = planned.run()
    assert [cell["dtype"] for cell in first["cells"]] == ["float32", "bfloat16"]
    assert first["machine"]["device"] == "cpu" and first["machine"]["versions"]["triton"] and first["suite"] == "test"
    second = planned.run()
    assert len(planned.log) == 2 and second["cells"] == first["cells"]
    planned.run(fresh=True)
    assert len(planned.log) == 4


def test_what_changed_is_measured_again(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    planned.run()
    planned.cells[1] = Cell("logits", 48, 512, BF16)
    found = planned.run()
    assert planned.log[2:] == [planned.cells[1]] and [cell["rows"] for cell in found["cells"]] == [32, 48]
    monkeypatch.setattr(results, "_code", lambda: "other code")
    planned.run()
    assert len(planned.log) == 5
    planned.run(quick=True)
    assert len(planned.log) == 7


@pytest.mark.parametrize("change", ["threads", "environment", "backend", "name", "library"])
def test_another_machine_is_measured_again_and_replaces_the_former(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    planned.run()
    other = machine.machine("cpu") | {change: "other"}
    monkeypatch.setattr(suites, "machine", lambda device: other)
    found = planned.run()
    assert len(planned.log) == 4 and found["machine"] == other
    assert [cell["number"] for cell in found["cells"]] == [3, 4]
    assert all(cell["machine"] == other and cell["date"] and cell["command"] for cell in found["cells"])


def test_the_machine_is_described_by_what_changes_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("OMP_TOOL_LIBRARIES", "/somewhere/tool.so")
    found = machine.machine("cpu")
    assert found["environment"]["MALLOC_ARENA_MAX"] == "1" and found["environment"]["OMP_TOOL_LIBRARIES"] == "tool.so"
    assert found["threads"] == torch.get_num_threads()
    assert found["backend"] == "cpu" or found["backend"].startswith("eager (")
    assert (found["library"] == "none") == ("instruction set" not in found)


AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("model", "flags", "kind"),
    [
        ("AMD EPYC", {"avx512_bf16", *AVX512}, "amd-epyc-avx512bf16"),
        ("AMD EPYC 7B13 64-Core Processor", {"avx2", "fma"}, "amd-epyc-avx2"),
        ("Intel(R) Xeon(R) Platinum 8488C", {"avx512_bf16", "amx_tile", "amx_bf16", *AVX512}, "intel-xeon-amx"),
        ("Intel(R) Xeon(R) Processor @ 2.70GHz", {"avx512_bf16", *AVX512}, "intel-xeon-avx512bf16"),
        ("13th Gen Intel(R) Core(TM) i9-13900K", {"avx2", "fma"}, "intel-core-avx2"),
        ("aarch64", set(), "aarch64"),
    ],
)
def test_a_kind_of_cpu_is_its_maker_its_family_and_its_instructions(model: str, flags: set[str], kind: str) -> None:
    assert machine.kind_of_cpu(model, frozenset(flags)) == kind


def test_committed_results_are_in_the_folder_of_their_kind() -> None:
    """For a CPU with AVX-512 the kernels' instructions name the folder, too; with AMX the products have further ones."""
    for path in harness.RESULTS.glob("*/*.json"):
        record = results.load(path)
        for m in (record["machine"], *(cell["machine"] for cell in record["cells"])):
            assert m["kind"] == path.parent.name, path
            if m["device"] == "cpu" and not m["kind"].endswith("amx"):
                assert m["kind"].endswith(m["instruction set"]), path


def test_a_run_that_is_cut_off_goes_on(planned: Planned) -> None:
    planned.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        planned.run()
    left = results.load(planned.out / machine.kind("cpu") / "test.json")
    assert [cell["dtype"] for cell in left["cells"]] == ["float32"]
    planned.failure = None
    found = planned.run()
    assert [cell.dtype for cell in planned.log] == [FP32, BF16]
    assert [cell["number"] for cell in found["cells"]] == [1, 2]


def test_a_provider_that_breaks_cuda_is_left_out_the_next_time(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    planned.failure = DeviceLost("reckless", "illegal memory access")
    with pytest.raises(SystemExit) as stop:
        planned.run()
    assert stop.value.code == suites.LOST_DEVICE
    planned.failure = None
    planned.run()
    assert planned.known == [{}, {"reckless": "illegal memory access"}]  # fp32 does not pay for it
    planned.run(fresh=True)
    assert planned.known[2:] == [{}, {"reckless": "illegal memory access"}]
    planned.cells[1] = Cell("logits", 48, 512, BF16)
    planned.run()
    assert planned.known[4:] == [{"reckless": "illegal memory access"}]  # nor is it tried at another shape
    monkeypatch.setattr(results, "_code", lambda: "other code")
    planned.run()
    assert planned.known[5:] == [{}, {}]


def test_contenders_that_break_cuda_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    monkeypatch.setattr(measuring, "_compiles", lambda p, cell, device: counted.append(p.name))
    candidates = [provider("reckless", lambda found: found), provider("right", lambda found: found)]
    how = QUICKLY | {"counters": True}
    rows = by_name(measure(tiny("logits"), "cpu", candidates=candidates, known={"reckless": "broke CUDA"}, **how))
    assert counted == ["right"] and rows["reckless"]["status"] == "failed"


def test_what_compiles_for_long_comes_last_and_each_is_saved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted call loses only the rest of its cell. The table keeps the usual order."""
    order: list[str] = []
    monkeypatch.setattr(measuring, "_compiles", lambda p, cell, device: order.append(p.name) or 3)

    def fails_later(found: dict) -> dict:
        order.append("again")
        if order.count("again") > 1:
            raise RuntimeError("out of something")
        return found

    names = {"torch.compile": lambda found: found, "fails later": fails_later, "right": lambda found: found}
    candidates = [provider(name, change) for name, change in names.items()]
    saved: list[dict] = []
    cell = measure(tiny("logits"), "cpu", candidates=candidates, save=saved.append, **QUICKLY | {"counters": True})
    assert [name for name in order if name in names] == ["fails later", "right", "torch.compile"]
    assert [[row["name"] for row in part["providers"]] for part in saved] == [
        ["fails later"], ["fails later", "right"], ["torch.compile", "fails later", "right"]
    ]  # fmt: skip
    assert all(part["unfinished"] and part["vocab"] == 512 for part in saved) and "unfinished" not in cell
    assert [row["name"] for row in cell["providers"]] == list(names)
    rows = by_name(saved[-1])
    assert (
        1 < rows["right"]["runs"] <= 5
        and rows["right"]["ms"] > 0
        and rows["right"]["errors"]
        and rows["right"]["compiles"] == 3
    )
    assert (
        rows["fails later"]["status"] == by_name(cell)["fails later"]["status"] == "failed" and "ms" not in rows["fails later"]
    )
    assert by_name(cell)["right"]["runs"] == 1


def test_an_unfinished_cell_is_measured_again(planned: Planned) -> None:
    planned.run()
    path = planned.out / machine.kind("cpu") / "test.json"
    record = json.loads(path.read_text())
    del record["cells"][1]["fingerprint"]
    path.write_text(json.dumps(record))
    assert len(planned.run()["cells"]) == 2 and len(planned.log) == 3


def test_the_first_cells_alone_without_those_who_compile_for_long(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measured(cell: Cell, device: str, only: Any = None, **how: Any) -> dict:
        asked.append(only)
        return measuring.describe(cell) | {"limit": None, "providers": []}

    monkeypatch.setattr(suites, "measure", measured)
    assert [cell["dtype"] for cell in planned.run(first=True)["cells"]] == ["float32"]
    ((*names,),) = asked
    assert "grpo_kernels, in place" in names and "torch.compile" not in names and "TRL kernel + loss" in names


def test_a_cell_that_cannot_be_measured_does_not_cost_the_others(planned: Planned) -> None:
    planned.cells.append(tiny("logits", torch.float16))
    planned.failure = MemoryError("no room")
    planned.run()
    assert re.search(r"bfloat16.*no room", "".join(planned.unmeasured)) and len(planned.unmeasured) == 1
    assert [cell.dtype for cell in planned.log] == [FP32, torch.float16]
    planned.failure = None
    assert len(planned.run()["cells"]) == 3 and len(planned.log) == 3 and not planned.unmeasured


def test_a_contender_that_raises_while_timed_is_dropped() -> None:
    calls = {"late": 0, "right": 0}

    def change(name: str) -> Callable[[dict], dict]:
        def called(found: dict) -> dict:
            calls[name] += 1
            if name == "late" and calls[name] > 2:
                raise RuntimeError("out of something")
            return found

        return called

    candidates = [provider(name, change(name)) for name in calls]
    rows = by_name(measure(tiny("logits"), "cpu", candidates=candidates, **QUICKLY | {"seconds": 60.0, "most": 5}))
    assert rows["late"]["status"] == "failed" and "timed, RuntimeError: out of something" in rows["late"]["reason"]
    assert "ms" not in rows["late"] and calls["late"] == 3
    assert rows["right"]["status"] == "ok" and rows["right"]["runs"] == 5


def test_broken_cuda_is_told_from_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    case = types.SimpleNamespace(name="reckless")
    with pytest.raises(DeviceLost, match="reckless: RuntimeError: CUDA error"):
        measuring._attempt(case, "cuda", broken)  # type: ignore[arg-type]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "suite.json"
    assert results.load(path) == {}
    results.save(path, {"cells": []})
    with pytest.raises(TypeError):
        results.save(path, {"cells": [object()]})
    assert results.load(path) == {"cells": []}


# ---- commands


def test_the_command_lists_all_suites(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--list", "--device", "cpu"])
    printed = capsys.readouterr().out
    assert all(f"{name}: " in printed for name in suites.SUITES) and "one sequence" in printed
    with pytest.raises(SystemExit):
        command.main(["--suite", "nonsense"])


def test_without_current_kernels_nothing_is_measured_unless_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    monkeypatch.setattr(command, "run", lambda *args, **options: calls.append(args) or ([], []))
    monkeypatch.setattr(machine, "findings", lambda needed: [Finding("it is stale", "build it", True, blocks=True)])
    options = ["--quick", "--device", "cpu", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"Nothing was measured\.\nit is stale\n  -> build it"):
        command.main(options)
    assert calls == []
    command.main([*options, "--without-native"])
    monkeypatch.setattr(machine, "findings", lambda needed: [Finding("threads spin", "wait", False)])
    command.main(options)
    assert len(calls) == 2
    monkeypatch.setattr(backends, "unavailable", lambda name: "no GPU")
    with pytest.raises(SystemExit, match="cuda tensors do not run: no GPU"):
        machine.require_kernels("cuda")


def test_a_busy_neighbour_keeps_a_core_busy_and_leaves_with_the_block() -> None:
    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11])  # of the processor, in user mode

    with harness.busy_neighbour() as pid:
        for _ in range(2000):
            if ticks(pid) > 5:
                break
            time.sleep(0.05)
        assert ticks(pid) > 5
    assert not Path(f"/proc/{pid}").exists()


def test_figures_of_a_busy_machine_are_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Path, bool]] = []
    monkeypatch.setattr(command, "require_kernels", lambda device: None)
    monkeypatch.setattr(command, "run", lambda suites, device, out, *, busy, **rest: calls.append((out, busy)) or ([], []))
    command.main(["--device", "cpu"])
    command.main(["--device", "cpu", "--busy"])
    command.main(["--device", "cpu", "--busy", "--quick", "--out", str(tmp_path)])
    assert calls == [(harness.RESULTS, False), (Path("runs/busy"), True), (tmp_path, True)]
    beside: list[bool] = []
    inside: list[int] = []

    @contextmanager
    def neighbour() -> Iterator[None]:
        inside.append(1)
        yield
        inside.pop()

    def measured(cell: Cell, device: str, **options: Any) -> dict[str, Any]:
        beside.append(bool(inside))
        return {"providers": [], "limit": None}

    monkeypatch.setattr(suites, "busy_neighbour", neighbour)
    monkeypatch.setattr(suites, "measure", measured)
    monkeypatch.setattr(suites, "table", lambda cell: "")
    for busy in (False, True):
        (path,), _ = suites.run(["logits-forward"], "cpu", tmp_path, quick=True, busy=busy)
        record = results.load(path)
        assert ("neighbour" in record["machine"]) is busy and ("one core busy" in source(record)) is busy
    assert beside == [False, False, True, True]


def test_the_command_ends_with_the_promise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Path, str]] = []
    answer: list[Any] = [(True, "none is slower"), ([], [])]
    monkeypatch.setattr(command, "require_kernels", lambda device: None)
    monkeypatch.setattr(command, "run", lambda *args, **how: answer[1])
    monkeypatch.setattr(command.front, "promise", lambda *where: asked.append(where) or answer[0])
    command.main(["--device", "cpu", "--out", str(tmp_path)])
    assert capsys.readouterr().out.endswith("\nnone is slower\n") and asked == [(tmp_path, machine.kind("cpu"))]
    for answer[:] in ([(False, "this is"), ([], [])], [(True, "none is slower"), ([], ["hidden: no room"])]):
        with pytest.raises(SystemExit) as stop:
            command.main(["--device", "cpu"])
        out = capsys.readouterr().out
        assert stop.value.code == 1 and out.endswith(f"\n{answer[0][1]}\n") and all(cell in out for cell in answer[1][1])
    answer[:] = [(False, "this is"), ([], [])]
    command.main(["--device", "cpu", "--without-native"])  # a rehearsal, where ours is not there
    assert "this is" not in capsys.readouterr().out


def test_the_crossover_compares_equal_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own loss and ours take turns on one micro-batch, and are not timed if they differ."""
    pytest.importorskip("trl", minversion="1.16.0")
    from benchmarks import crossover
    from grpo_kernels.integrations import _trl_specs as specs

    rows = crossover.measure((40, 70), (4,), seconds=0.01)
    assert [(r["vocabulary"], r["tokens"]) for r in rows] == [(40, 24), (70, 24)]
    assert all(r["stock"] > 0 and r["fused"] > 0 for r in rows)
    shown = [r | {"stock": 2.0, "fused": 1.5} for r in rows]
    machine = {"name": "Sample CPU", "threads": 1, "torch": "2.0"}
    table = crossover.block({"machine": machine, "date": "2000-01-01", "command": crossover.COMMAND, "rows": shown})
    assert table.splitlines()[2:] == [
        "| vocabulary | 24 tokens |",
        "|---|---|",
        "| 40 | 2.0 -> 1.5 (0.75) |",
        "| 70 | 2.0 -> 1.5 (0.75) |",
    ]
    denominator = specs.denominator
    monkeypatch.setattr(specs, "denominator", lambda *args: 2 * denominator(*args))
    with pytest.raises(AssertionError, match="not close"):
        crossover.measure((40,), (4,), seconds=0.01)
