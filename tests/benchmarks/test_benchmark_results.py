"""Result files of the benchmarks: which of their cells are stale, what an interrupted run leaves, what machine they are of; and
that tables and pictures show what they hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")  # of the step
pytest.importorskip("triton")

from benchmarks import __main__ as command
from benchmarks import cell_tables, front, harness, machine, pictures, results, suites, tables
from benchmarks import measure as measuring
from benchmarks.cases import Cell
from benchmarks.measure import DeviceLost
from grpo_kernels.diagnosis import Finding

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Planned:
    """A suite of two cells whose measurement is replaced: `log` records the cells that were requested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.out, self.cells = out, [Cell("logits", 32, 512, dtype) for dtype in (FP32, BF16)]
        self.log: list[tuple[Cell, Any, Any]] = []
        self.failure: BaseException | None = None  # raised at the second cell
        self.beside: list[str] = []  # a busy neighbour
        plan = lambda device, quick: [suites.Planned(cell) for cell in self.cells]  # noqa: E731
        monkeypatch.setitem(suites.SUITES, "test", suites.Suite("test", "A test", "logits", plan))
        monkeypatch.setattr(suites, "measure", self.measure)
        monkeypatch.setattr(suites, "busy_neighbour", self.neighbour)

    def measure(self, cell: Cell, device: str, known: Any = None, only: Any = None, **how: Any) -> dict:
        if self.failure is not None and cell.dtype == BF16:
            raise self.failure
        self.log.append((cell, known, only))
        return measuring.describe(cell) | {"limit": None, "providers": [], "number": len(self.log), "beside": len(self.beside)}

    @contextmanager
    def neighbour(self) -> Iterator[None]:
        self.beside.append("busy")
        yield
        self.beside.pop()

    def run(self, **how: bool) -> dict[str, Any]:
        (path,), self.unmeasured = suites.run(["test"], "cpu", self.out, **how)
        assert path == self.out / machine.kind("cpu") / "test.json"
        return results.load(path)

    def numbers(self, **how: bool) -> list[int]:
        """Which measurement each cell of the file is."""
        return [cell["number"] for cell in self.run(**how)["cells"]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Planned:
    return Planned(monkeypatch, tmp_path)


def test_a_cell_is_measured_again_when_what_it_depends_on_has_changed(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned.numbers() == planned.numbers() == [1, 2] and planned.numbers(fresh=True) == [3, 4]
    planned.cells[1] = Cell("logits", 48, 512, BF16)
    assert planned.numbers() == [3, 5]
    path = next(planned.out.rglob("test.json"))
    record = results.load(path)
    del record["cells"][1]["fingerprint"]  # it was not finished
    results.save(path, record)
    assert planned.numbers() == [3, 6]
    monkeypatch.setattr(results, "_code", lambda: "other code")
    assert planned.numbers() == [7, 8] and planned.numbers(quick=True) == [9, 10]
    usual, last = machine.machine("cpu"), 10
    for change in ("threads", "environment", "backend", "name", "library", "torch"):
        here = usual | {change: "other"}
        monkeypatch.setattr(suites, "machine", lambda device, here=here: here)
        found = planned.run()
        assert [cell["number"] for cell in found["cells"]] == [last + 1, last + 2], change
        assert found["machine"] == here and all(c["machine"] == here and c["date"] and c["command"] for c in found["cells"])
        last += 2


def test_the_code_is_every_file_that_a_figure_depends_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "grpo_kernels/a.py",
        "csrc/a.cpp",
        "benchmarks/measure.py",
        "benchmarks/providers/a.py",
        "benchmarks/tables.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    code, seen = results._code.__wrapped__, []
    for path in sorted(tmp_path.rglob("*.*")):
        before = code()
        path.write_text("changed")
        seen += [path.name] if code() != before else []
    assert seen == ["measure.py", "a.py", "a.cpp", "a.py"]  # not the tables
    assert all(any(results.Path(machine.__file__).parents[1].glob(pattern)) for pattern in results.SOURCES)


def test_a_run_that_is_cut_off_goes_on_and_a_file_is_whole(planned: Planned) -> None:
    planned.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        planned.run()
    planned.failure = None
    assert planned.numbers() == [1, 2] and [cell.dtype for cell, *_ in planned.log] == [FP32, BF16]
    path = planned.out / "new" / "suite.json"
    assert results.load(path) == {}
    results.save(path, {"cells": []})
    with pytest.raises(TypeError):
        results.save(path, {"cells": [object()]})
    assert results.load(path) == {"cells": []}


def test_a_cell_that_cannot_be_measured_does_not_cost_the_others(planned: Planned) -> None:
    planned.cells.append(Cell("logits", 32, 512, FP16))
    planned.failure = MemoryError("no room")
    planned.run()
    assert len(planned.unmeasured) == 1 and re.search(r"bfloat16.*no room", planned.unmeasured[0])
    assert [cell.dtype for cell, *_ in planned.log] == [FP32, FP16]
    planned.failure = None
    assert planned.numbers() == [1, 3, 2] and not planned.unmeasured


def test_a_provider_that_breaks_cuda_is_left_out_the_next_time(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this contract and dtype, at other shapes too, until the code changes."""
    planned.failure = DeviceLost("reckless", "illegal memory access")
    with pytest.raises(SystemExit) as stop:
        planned.run()
    assert stop.value.code == suites.LOST_DEVICE
    planned.failure, lost = None, {"reckless": "illegal memory access"}
    planned.run(fresh=True)
    planned.cells[1] = Cell("logits", 48, 512, BF16)
    planned.run()
    monkeypatch.setattr(results, "_code", lambda: "other code")
    planned.run()
    assert [known for _, known, _ in planned.log] == [{}, {}, lost, lost, {}, {}]


def test_first_cells_alone_and_figures_of_a_busy_machine(planned: Planned) -> None:
    assert len(planned.run(first=True)["cells"]) == 1
    ((_, _, names),) = planned.log
    assert "grpo_kernels, in place" in names and "torch.compile" not in names
    found = planned.run(busy=True)
    assert [cell["beside"] for cell in found["cells"]] == [1, 1] and "one core busy" in cell_tables.source(found)
    found = planned.run()
    assert [cell["beside"] for cell in found["cells"]] == [0, 0] and "neighbour" not in found["machine"]


def test_a_busy_neighbour_keeps_a_core_busy_and_leaves_with_the_block() -> None:
    with harness.busy_neighbour() as pid:
        while int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]) < 5:  # ticks in user mode
            pass
    assert not Path(f"/proc/{pid}").exists()


def test_the_machine_is_described_by_what_changes_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("OMP_TOOL_LIBRARIES", "/somewhere/tool.so")
    found = machine.machine("cpu")
    assert {"MALLOC_ARENA_MAX": "1", "OMP_TOOL_LIBRARIES": "tool.so"}.items() <= found["environment"].items()
    assert found["threads"] == torch.get_num_threads() and (found["library"] == "none") == ("instruction set" not in found)
    head = suites.heading(found)
    assert f"backend {found['backend']}" in head and f"{found['threads']} threads" in head and "NHV" in head


@pytest.mark.parametrize(
    ("module", "option", "policy"),
    [("benchmarks", "--quick", "PASSIVE"), ("benchmarks", "--busy", "None"), ("examples.demo", "", "None")],
)
def test_openmp_waits_asleep_in_measurements_only(module: str, option: str, policy: str) -> None:
    """Beside a busy process the environment is a user's, as it is in the demo, which imports helpers of the benchmarks."""
    code = f"import {module}, os; print(os.environ.get('OMP_WAIT_POLICY'))"
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    assert subprocess.check_output([sys.executable, "-c", code, option], env=env, cwd=results.ROOT, text=True).strip() == policy


def test_without_current_kernels_nothing_is_measured_unless_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls: list[tuple[Path, bool]] = []
    monkeypatch.setattr(command, "run", lambda suites, device, out, *, busy, **_: calls.append((out, busy)) or ([], []))
    monkeypatch.setattr(command.front, "promise", lambda *where: (True, ""))
    monkeypatch.setattr(machine, "findings", lambda needed: [Finding("it is stale", "build it", True, blocks=True)])
    with pytest.raises(SystemExit, match=r"Nothing was measured\.\nit is stale\n  -> build it"):
        command.main(["--device", "cpu"])
    assert calls == []
    command.main(["--device", "cpu", "--without-native"])
    monkeypatch.setattr(machine, "findings", lambda needed: [Finding("threads spin", "wait", False)])
    for options in ([], ["--busy"], ["--busy", "--quick", "--out", "here"]):
        command.main(["--device", "cpu", *options])
    elsewhere = [(Path("runs/busy"), True), (Path("here"), True)]
    assert calls == [(harness.RESULTS, False)] * 2 + elsewhere  # not among the results that pages show
    command.main(["--list", "--device", "cpu"])
    printed = capsys.readouterr().out
    assert all(f"{name}: " in printed for name in suites.SUITES) and len(calls) == 4
    with pytest.raises(SystemExit):
        command.main(["--suite", "nonsense"])


AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})


@pytest.mark.parametrize(
    ("model", "flags", "kind"),
    [
        ("AMD EPYC 7B13 64-Core Processor", frozenset({"avx2", "fma"}), "amd-epyc-avx2"),
        ("Intel(R) Xeon(R) Platinum 8488C", AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}, "intel-xeon-amx"),
        ("Intel(R) Xeon(R) Processor @ 2.70GHz", AVX512 | {"avx512_bf16"}, "intel-xeon-avx512bf16"),
        ("13th Gen Intel(R) Core(TM) i9-13900K", frozenset({"avx2", "fma"}), "intel-core-avx2"),
        ("aarch64", frozenset(), "aarch64"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_kind_of_cpu_is_its_maker_its_family_and_its_instructions(model: str, flags: frozenset[str], kind: str) -> None:
    assert machine.kind_of_cpu(model, flags) == kind


def test_committed_results_are_in_the_folder_of_their_kind() -> None:
    """For a CPU with AVX-512 the kernels' instructions name the folder, too; with AMX the products have further ones."""
    for path in MEASURED:
        record = results.load(path)
        for m in (record["machine"], *(cell["machine"] for cell in record["cells"])):
            assert m["kind"] == path.parent.name, path
            if m["device"] == "cpu" and not m["kind"].endswith("amx"):
                assert m["kind"].endswith(m["instruction set"]), path


# ---- the promise: nothing is slower than what a user of PyTorch has already


@pytest.mark.parametrize(
    ("changes", "rows", "wrong", "kept"),
    [
        ({"eager PyTorch": 0.96}, 64, {}, True),
        ({"eager PyTorch": 0.5}, 64, {}, False),
        ({"torch.compile": 0.5}, 64, {}, False),
        ({"torch linear_cross_entropy + loss": 0.5}, 64, {}, False),
        ({"TRL fused head + loss": 0.5}, 64, {}, True),  # another project
        ({"eager PyTorch": 0.5}, 48, {}, True),
        ({"eager PyTorch": 0.5}, 64, {"status": "wrong", "reason": "off"}, True),
        ({"eager PyTorch": 0.5, "grpo_kernels, eager backend": 0.4}, 64, {}, False),
        ({"eager PyTorch": 0.5, "grpo_kernels, layer 1 + loss": 0.5}, 64, {}, True),
    ],
)
def test_a_promise_is_broken_by_what_pytorch_would_do_sooner(
    changes: dict, rows: int, wrong: dict, kept: bool, tmp_path: Path
) -> None:
    """Of a cell whose providers take 10 ms, or so many times as long."""
    record = results.load(next(harness.RESULTS.glob("*/hidden.json")))
    names = {"grpo_kernels", "eager PyTorch", "TRL fused head + loss", *changes}
    right = {"status": "ok", "ms": 10.0, "p20": 9.0, "p80": 11.0, "runs": 5, "x_limit": 1.0, "errors": {"loss": 0.0}}
    providers = [{"name": name} | right | ({"ms": 10 * changes[name]} | wrong if name in changes else {}) for name in names]
    results.save(
        tmp_path / "a" / "hidden.json", record | {"cells": [record["cells"][0] | {"rows": rows, "providers": providers}]}
    )
    found, text = front.promise(tmp_path, "a")
    assert found is kept and (rows == 64 or "none of 0 cells" in text)
    assert kept or ("2.00 times as long" in text and "GRPO_KERNELS_PRODUCTS" in text)


@pytest.mark.parametrize("kind", sorted({path.parent.name for path in harness.RESULTS.glob("*/*.json")}))
def test_the_promise_is_kept_on_every_machine_that_was_measured(kind: str) -> None:
    kept, text = front.promise(harness.RESULTS, kind)
    assert kept and "none of 0" not in text, text


@pytest.mark.parametrize(("kept", "unmeasured", "status"), [(True, [], 0), (False, [], 1), (True, ["hidden: no room"], 1)])
def test_the_command_ends_with_the_promise(
    kept: bool, unmeasured: list, status: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(command, "require_kernels", lambda device: None)
    monkeypatch.setattr(command, "run", lambda *_, **__: ([], unmeasured))
    monkeypatch.setattr(command.front, "promise", lambda *where: (kept, f"of {where[1]}"))
    try:
        command.main(["--device", "cpu"])
        ended = 0
    except SystemExit as stop:
        ended = stop.code  # type: ignore[assignment]
    out = capsys.readouterr().out
    assert ended == status and out.endswith(f"\nof {machine.kind('cpu')}\n") and all(cell in out for cell in unmeasured)
    command.main(
        ["--device", "cpu", "--without-native"] if not unmeasured else ["--list"]
    )  # a rehearsal, where ours is not there


# ---- what tables and pictures show of them

MEASURED = sorted(path for path in harness.RESULTS.glob("*/*.json"))


def generated() -> Iterator[tuple[Path, Callable[[], str]]]:
    """(page, what its generator makes of it and of the result files)."""
    from benchmarks import crossover, exact_kl_page, kernel_bounds, replay, scaling, sparse_training_page, swaps, vocab_parallel

    for page in tables.blocks():
        yield page, lambda page=page: tables.updated(page)
    yield tables.REPORT, tables.report
    for one in (swaps, crossover, replay, exact_kl_page, sparse_training_page, vocab_parallel):
        yield one.PAGE, lambda one=one: one.insert(one.PAGE.read_text(), results.load(one.FILE))
    for one in (scaling, kernel_bounds):
        yield one.PAGE, lambda one=one: one.insert(one.PAGE.read_text())


def test_pages_show_what_was_measured() -> None:
    """No figure was typed or forgotten: `python -m benchmarks.tables --write`, or the command that stands in the page's block."""
    pages = [*generated()]
    assert len(pages) > 10 and [page.name for page, made in pages if made() != page.read_text()] == []


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_pictures_show_what_was_measured(path: Path) -> None:
    """Their description holds the numbers of their curves and bars."""
    plots = pytest.importorskip("benchmarks.plots", reason="matplotlib is not installed")
    drawn = path.parent / "plots" / f"{path.stem}.svg"
    assert plots.described(pictures.picture(results.load(path))) in plots_text(drawn), "run `python -m benchmarks.plots`"


def plots_text(path: Path) -> str:
    return path.read_text().replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def spoiled(name: str, **change: Any) -> dict[str, Any]:
    """A committed record where a contender has another outcome."""
    record = results.load(next(harness.RESULTS.glob("*/hidden.json")))
    for row in (row for cell in record["cells"] for row in cell["providers"] if row["name"] == name):
        for key in ("ms", "p20", "p80"):
            row.pop(key)
        row |= change
    return record


@pytest.mark.parametrize("name", ["grpo_kernels", "eager PyTorch"])
def test_a_contender_without_a_time_has_its_reason_in_table_and_picture(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    record = spoiled(name, status="wrong", reason="d_logits is off by 2e-01")
    results.save(tmp_path / record["machine"]["kind"] / "hidden.json", record)
    text, shown = tables.figures(tmp_path, "hidden"), pictures.picture(record)
    assert f"- wrong, d_logits is off by 2e-01: {name}" in text and not any(
        line.startswith(f"| {name} |") for line in text.splitlines()
    )
    assert all(name in panel.wrong and name not in {bar.name for bar in panel.bars} for panel in shown.panels)
    svg, png = plots.save(shown, tmp_path / "picture")
    assert plots.described(shown) in plots_text(svg) and png.stat().st_size > 5000
    assert "No GPU has run this package yet" in tables.blocks(tmp_path)[tables.FIGURES]["gpus"]
    assert tables.blocks(tmp_path)[tables.FIGURES]["logits_cpu"] == "Not measured yet: `python -m benchmarks --suite logits`."
