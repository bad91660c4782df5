"""Result files of the benchmarks: which of their cells are stale, what an interrupted run leaves, what machine they are of; and
that tables and pictures show what they hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")  # of the step
pytest.importorskip("triton")

from benchmarks import __main__ as command
from benchmarks import machine, report, results, suites
from benchmarks import measure as measuring
from benchmarks.cases import Cell
from benchmarks.measure import DeviceLost
from benchmarks.results import RESULTS
from grpo_kernels.diagnosis import Finding

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MEASURED = sorted(RESULTS.glob("*/*.json"))
KINDS = sorted({path.parent.name for path in MEASURED})


class Planned:
    """A suite of two cells whose measurement is replaced: `log` records the cells that were requested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.out, self.cells = out, [Cell("logits", 32, 512, dtype) for dtype in (FP32, BF16)]
        self.log: list[tuple[Cell, Any, Any]] = []
        self.failure: BaseException | None = None  # raised at the second cell
        monkeypatch.setattr(suites.Suite, "plan", lambda *_: [suites.Planned(cell) for cell in self.cells])
        monkeypatch.setattr(suites, "measure", self.measure)

    def measure(self, cell: Cell, device: str, known: Any = None, only: Any = None, **how: Any) -> dict:
        if self.failure is not None and cell.dtype == BF16:
            raise self.failure
        self.log.append((cell, known, only))
        return measuring.describe(cell) | {"limit": None, "providers": [], "number": len(self.log)}

    def __call__(self, **how: bool) -> list[int]:
        """Which measurement each cell of the file is."""
        (path,), self.unmeasured = suites.run(["logits"], suites.How("cpu", self.out, **how))
        self.record = results.load(path)
        return [cell["number"] for cell in self.record["cells"]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Planned:
    return Planned(monkeypatch, tmp_path)


def test_a_cell_is_measured_again_when_what_it_depends_on_has_changed(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned() == planned() == [1, 2] and planned(fresh=True) == [3, 4]
    planned.cells[1] = Cell("logits", 48, 512, BF16)
    assert planned() == [3, 5]
    del planned.record["cells"][1]["fingerprint"]  # it was not finished
    results.save(planned.out / machine.kind("cpu") / "logits.json", planned.record)
    assert planned() == [3, 6]
    monkeypatch.setattr(results, "_code", lambda: "other code")
    assert planned() == [7, 8] and planned(quick=True) == [9, 10]
    usual = machine.machine("cpu")
    for i, change in enumerate(("threads", "environment", "backend", "name", "library", "torch")):
        here = usual | {change: "other"}
        monkeypatch.setattr(suites, "machine", lambda device, here=here: here)
        assert planned() == [11 + 2 * i, 12 + 2 * i], change
        assert all(one["machine"] == here for one in (planned.record, *planned.record["cells"]))


def test_the_code_is_every_file_that_a_figure_depends_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counted = ["benchmarks/measure.py", "benchmarks/providers/a.py", "csrc/a.cpp", "grpo_kernels/a.py"]
    assert all(any(results.ROOT.glob(pattern)) for pattern in results.SOURCES)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    seen = {results._code.__wrapped__()}
    for i, name in enumerate(("benchmarks/tables.py", *counted)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
        seen.add(results._code.__wrapped__())
        assert len(seen) == 1 + i, name


def test_a_run_that_is_cut_off_goes_on_and_a_file_is_whole(planned: Planned) -> None:
    planned.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        planned()
    planned.failure = None
    assert planned() == [1, 2] and [cell.dtype for cell, *_ in planned.log] == [FP32, BF16]
    path = planned.out / "suite.json"
    results.save(path, {"cells": []})
    with pytest.raises(TypeError):
        results.save(path, {"cells": [object()]})
    assert results.load(path) == {"cells": []}


def test_a_cell_that_cannot_be_measured_does_not_cost_the_others(planned: Planned) -> None:
    planned.cells.append(Cell("logits", 32, 512, FP16))
    planned.failure = MemoryError("no room")
    assert planned() == [1, 2] and re.fullmatch(r"(?s).*bfloat16.*no room", *planned.unmeasured)
    planned.failure = None
    assert planned() == [1, 3, 2] and not planned.unmeasured
    assert len(planned(first=True)) == 1
    names = planned.log[-1][2]
    assert "grpo_kernels, in place" in names and "torch.compile" not in names


def test_a_provider_that_breaks_cuda_is_left_out_the_next_time(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this contract and dtype, at other shapes too, until the code changes."""
    planned.failure = DeviceLost("reckless", "illegal memory access")
    with pytest.raises(SystemExit) as stop:
        planned()
    assert stop.value.code == suites.LOST_DEVICE
    planned.failure, lost = None, {"reckless": "illegal memory access"}
    planned(fresh=True)
    planned.cells[1] = Cell("logits", 48, 512, BF16)
    planned()
    monkeypatch.setattr(results, "_code", lambda: "other code")
    planned()
    assert [known for _, known, _ in planned.log] == [{}, {}, lost, lost, {}, {}]


def test_the_command_measures_with_current_kernels_only_and_ends_with_the_promise(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    calls: list[Path] = []
    outcome: Any = [([], []), (True, "")]  # of a run, of the promise
    monkeypatch.setattr(command, "run", lambda suites, how: calls.append(how.out) or outcome[0])
    monkeypatch.setattr(command, "promise", lambda *where: outcome[1])
    for blocks, options in ((True, "--without-native"), (False, "--list"), (False, "--quick"), (False, "--quick --out here")):
        monkeypatch.setattr(
            machine, "findings", lambda needed, blocks=blocks: [Finding("it is stale", "build it", True, blocks)]
        )
        command.main(["--device", "cpu", *options.split()])
    assert calls == [RESULTS, Path("runs/benchmarks"), Path("here")]
    printed = capsys.readouterr().out
    assert all(f"{name}: " in printed for name in suites.SUITES)
    for outcome[:] in ([([], []), (False, "broken")], [([], ["hidden: no room"]), (True, "kept")]):
        with pytest.raises(SystemExit, match="1"):
            command.main(["--device", "cpu"])
        printed = capsys.readouterr().out
        assert printed.endswith(f"\n{outcome[1][1]}\n") and all(x in printed for x in outcome[0][1])
    monkeypatch.setattr(machine, "findings", lambda needed: [Finding("it is stale", "build it", True, blocks=True)])
    with pytest.raises(SystemExit, match=r"Nothing was measured\.\nit is stale\n  -> build it"):
        command.main(["--device", "cpu"])


AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}


@pytest.mark.parametrize(
    ("model", "flags", "kind"),
    [
        ("AMD EPYC 7B13 64-Core Processor", {"avx2", "fma"}, "amd-epyc-avx2"),
        ("Intel(R) Xeon(R) Platinum 8488C", AVX512 | {"amx_tile", "amx_bf16"}, "intel-xeon-amx"),
        ("Intel(R) Xeon(R) Processor @ 2.70GHz", AVX512, "intel-xeon-avx512bf16"),
        ("aarch64", set(), "aarch64"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_kind_of_cpu_is_its_maker_its_family_and_its_instructions(model: str, flags: set[str], kind: str) -> None:
    assert machine.kind_of_cpu(model, frozenset(flags)) == kind


# ---- what is made of them


EAGER, TRL, OURS = "eager PyTorch", "TRL fused head + loss", "grpo_kernels"


@pytest.mark.parametrize(
    ("times", "rows", "status", "kept"),
    [
        ({EAGER: 9.6}, 64, "ok", True), ({"torch.compile": 5.0}, 64, "ok", False), ({"torch linear_cross_entropy + loss": 5.0}, 64, "ok", False),
        ({TRL: 5.0}, 64, "ok", True),  # another project
        ({EAGER: 5.0}, 48, "ok", True), ({EAGER: 5.0}, 64, "wrong", True),
        ({EAGER: 5.0, f"{OURS}, eager backend": 4.0}, 64, "ok", False), ({EAGER: 5.0, f"{OURS}, layer 1 + loss": 5.0}, 64, "ok", True),
    ],
)  # fmt: skip
def test_a_promise_is_broken_by_what_pytorch_would_do_sooner(
    times: dict, rows: int, status: str, kept: bool, tmp_path: Path
) -> None:
    """Of a cell whose other providers take 10 ms."""
    record = results.load(next(RESULTS.glob("*/hidden.json")))
    right = {"status": "ok", "p20": 9.0, "p80": 11.0, "runs": 5, "x_limit": 1.0, "errors": {"loss": 0.0}, "reason": "off"}
    every = {OURS: 10.0, EAGER: 10.0, TRL: 10.0} | times
    providers = [{"name": name} | right | {"ms": ms, "status": status if name in times else "ok"} for name, ms in every.items()]
    cell = record["cells"][0] | {"rows": rows, "providers": providers}
    results.save(tmp_path / "a" / "hidden.json", record | {"cells": [cell]})
    found, text = report.promise(tmp_path, "a")
    assert found is kept and (rows == 64 or "none of 0 cells" in text) and ("2.00 times as long" in text) is not kept


@pytest.mark.parametrize("kind", KINDS)
def test_of_every_machine_that_was_measured_the_promise_is_kept_and_the_front_has_the_answers(kind: str) -> None:
    kept, text = report.promise(RESULTS, kind)
    assert kept and "none of 0" not in text, text
    asked, ratios = report.asked(RESULTS, kind), [x.ratio for x in report.standings(RESULTS, kind)]
    assert [len(of) for of in asked.values()] == [2, 2, 2, 2, 1, 1]
    assert [of[0].ratio for of in [*asked.values()][-2:]] == [max(ratios), min(ratios)]
    for record in map(results.load, RESULTS.glob(f"{kind}/*.json")):
        for m in (one["machine"] for one in (record, *record["cells"])):
            amx = m["kind"].endswith("amx")  # products have further instructions than the kernels
            assert m["kind"] == kind and (m["device"] != "cpu" or amx or kind.endswith(m["instruction set"])), record["suite"]


def test_pages_and_pictures_show_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure was typed or forgotten: `python -m benchmarks.report --check`. The description of a picture holds its numbers."""
    plots = pytest.importorskip("benchmarks.plots", reason="matplotlib is not installed")
    assert len(plots.pictures(RESULTS)) > 15 and report.stale() == []
    monkeypatch.setattr(report, "front", lambda folder: "")
    assert report.stale() == [report.README]
