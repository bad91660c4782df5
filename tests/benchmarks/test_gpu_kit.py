"""The GPU kit without a GPU: its runner, its archives and conclusions, the lines that only run on CUDA (with stand-ins), and
rehearsals on the CPU."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support import meta_device, on_device
from support.objectives import OBJECTIVES
from support.on_device import OnDevice
from support.processes import for_its_own_pytest
from support.ptx import runs

pytest.importorskip("triton")

from triton.runtime import JITFunction

from benchmarks import (
    gpu_correctness,
    gpu_counters,
    gpu_kit,
    gpu_plan,
    gpu_running,
    gpu_stages,
    measure,
    suites,
    tune,
    tune_settings,
)
from benchmarks.gpu_kit import Kit
from benchmarks.gpu_plan import CALLS, CASES, Stage
from benchmarks.launches import compiling, token_rows
from benchmarks.providers import Provider, Unavailable, providers
from grpo_kernels import Objective, TokenBatch, TokenSets, use
from grpo_kernels.vocabulary import backends, blocks
from grpo_kernels.vocabulary.backends import triton as backend
from grpo_kernels.vocabulary.backends.triton_choices import Choice
from grpo_kernels.vocabulary.rows import RowTransform

ROOT = Path(__file__).parents[2]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# ---- the runner


@pytest.mark.parametrize(
    "code, outcome",
    [
        ("print('fine')", "ok"),
        ("print('before'); raise SystemExit(3)", "exit status 3"),
        ("raise ValueError('crashed')", "exit status 1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
    ],
)
def test_a_stage_that_ends(code: str, outcome: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert gpu_kit.run_stage(python(code), log, 30, dict(os.environ)) == outcome
    for said in ("fine", "before", "crashed"):
        assert (said in code) == (said in log.read_text())


def test_a_stage_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kit, "PACK_EVERY", 0.2)
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    packed: list[bool] = []
    log = tmp_path / "log"

    def clock() -> float:
        """The time limit is reached once the child has written its process id, however long that takes."""
        return 2.0 if len(packed) >= 3 and log.read_text().endswith("\n") else 0.0

    monkeypatch.setattr(gpu_kit, "time", SimpleNamespace(monotonic=clock, time=time.time))
    outcome = gpu_kit.run_stage(python(code), log, 2, dict(os.environ), lambda: packed.append(True))
    assert outcome == "out of time after 2 s"
    pid = int(log.read_text())
    for _ in range(600):  # whoever inherits it has to collect it
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the stage's child is still running")


def write_json(kit: Kit, name: str, **found: Any) -> str:
    return f"import pathlib; pathlib.Path({str(kit.work / 'json' / name)!r} + '.json').write_text({json.dumps(found)!r}); "


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path / "out", tmp_path / "work")


def test_stages_go_on_after_a_crash_and_a_hang(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that crashes or hangs does not affect the others, and the results that it had written are kept."""
    codes = {
        "env": write_json(kit, "env", lines=["a fine machine"]),
        "correctness": write_json(kit, "correctness", lines=["half of it"], groups={}) + "import os; os.abort()",
        "counters": write_json(kit, "counters", lines=["counted"], recompilations=0) + "import time; time.sleep(100)",
        "tune": write_json(kit, "tune", lines=["tuned"]) + "print('log of tune')",
    }
    monkeypatch.setattr(Kit, "command", lambda self, stage, seconds: python(codes[stage]))
    monkeypatch.setattr(gpu_kit, "PACK_EVERY", 0.1)
    counted = kit.work / "json" / "counters.json"
    monkeypatch.setattr(gpu_kit, "time", SimpleNamespace(monotonic=lambda: 3.5 if counted.exists() else 0.0, time=time.time))
    gpu_kit.run(kit, [Stage(name, 0.5 if name == "counters" else 100, 2) for name in codes], minutes=1)
    assert [kit.stages[name]["status"] for name in codes] == ["ok", "ended by SIGABRT", "out of time after 3 s", "ok"]
    text = (kit.out / "summary.md").read_text()
    for line in ("a fine machine", "half of it", "counted", "tuned", "ended by SIGABRT"):
        assert line in text
    with tarfile.open(kit.out / "results.tar.gz") as tar:
        names = tar.getnames()
        stages = json.load(tar.extractfile("json/kit.json"))  # type: ignore[arg-type]
    assert {f"json/{name}.json" for name in codes} <= set(names) and stages == kit.stages
    with tarfile.open(kit.out / "logs.tar.gz") as tar:
        assert b"log of tune" in tar.extractfile("logs/tune.txt").read()  # type: ignore[union-attr]


def test_time_is_kept_for_what_comes_later(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 seconds in all: the first stage may not use the 8 reserved for the third, so nothing is left for the second."""
    seconds: dict[str, float] = {}
    now = [0.0]

    def command(self: Kit, stage: str, limit: float) -> list[str]:
        seconds[stage] = limit
        return python("import time; time.sleep(100)" if stage == "greedy" else "pass")

    def clock() -> float:
        """Each reading of the clock advances it by a tenth of a second, until the last stage runs."""
        now[0] += 0.1 if list(seconds) == ["greedy"] else 0.0
        return now[0]

    monkeypatch.setattr(Kit, "command", command)
    monkeypatch.setattr(gpu_kit, "time", SimpleNamespace(monotonic=clock, time=time.time))
    monkeypatch.setattr(gpu_kit, "PACK_EVERY", 0.1)
    gpu_kit.run(kit, [Stage("greedy", 600, 0), Stage("modest", 600, 0), Stage("kept", 300, 240)], minutes=1 / 6)
    assert kit.stages["greedy"]["status"].startswith("out of time") and kit.stages["modest"]["status"] == "no time left"
    assert kit.stages["kept"]["status"] == "ok" and 7 < seconds["kept"] <= 8 and 1 < seconds["greedy"] < 2


@pytest.mark.parametrize("call", CALLS)
def test_stages_of_a_call_fit_into_it(call: int) -> None:
    stages = CALLS[call]
    assert {stage.name for stage in stages} <= gpu_stages.STAGES.keys() - {"small", "peers", "long_rows"}
    assert 450 < sum(stage.kept for stage in stages) < 500  # seconds of ten minutes, so that they are what they say
    assert all(stage.kept <= stage.most for stage in stages) and gpu_plan.BRINGS[call]


def test_every_stage_is_in_a_call() -> None:
    once = [stage.name for stages in CALLS.values() for stage in stages if stage.name not in gpu_kit.AGAIN]
    every = {*once, *(stage.name for stage in gpu_kit.ASKED), "small", "peers", "long_rows"}
    assert len(once) == len(set(once)) and every == gpu_stages.STAGES.keys()


def test_a_call_goes_on_where_an_earlier_one_was(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call goes on from its folder or from its results. A stage that failed, or that is named, is run again."""
    ran: list[str] = []

    def command(self: Kit, stage: str, seconds: float) -> list[str]:
        ran.append(stage)
        return python(write_json(self, stage, lines=[f"from {stage}"]) + ("raise ValueError" if stage == "counters" else ""))

    monkeypatch.setattr(Kit, "command", command)
    call = ["--out", str(kit.out), "--minutes", "1", "--call"]
    assert gpu_kit.main([*call, "1"]) == 1 and ran == [stage.name for stage in CALLS[1]]
    home = tmp_path / "home.tar.gz"
    home.write_bytes((kit.out / "results.tar.gz").read_bytes())
    ran.clear()
    work = tmp_path / "again"
    assert gpu_kit.main([*call, "1", "--resume", str(home), "--work", str(work)]) == 1 and ran == [
        "install",
        "counters",
        "plots",
    ]
    assert "from env" in (kit.out / "summary.md").read_text() and (work / "json" / "env.json").exists()
    ran.clear()
    assert gpu_kit.main([*call, "1", "--work", str(work), "--stages", "env"]) == 0 and ran == ["env"]
    ran.clear()
    assert gpu_kit.main([*call, "2", "--work", str(work)]) == 0 and ran == ["tune"]
    assert "from counters" in (kit.out / "summary.md").read_text()
    ran.clear()
    chosen = [*call[:-1], "--work", str(work), "--suites", "logits", "sparse"]
    assert gpu_kit.main(chosen) == 0 and ran == ["install", "suites", "plots"]
    ran.clear()  # a call still has its own comparison to make
    assert gpu_kit.main([*call, "3", "--work", str(work)]) == 0 and ran == ["install", "comparison", "plots"]
    for wrong in (
        ["--resume", str(tmp_path / "none.tar.gz")],
        ["--suites", "logit"],
        ["--suites", "logits", "--stages", "env"],
    ):
        with pytest.raises(SystemExit):
            gpu_kit.main([*call, "1", *wrong])


def test_suites_that_are_asked_for(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach the stage's process, and no others are measured."""
    kit.asked = ("sparse", "logits")
    assert kit.command("suites", 60.0)[-3:] == ["--suites", "sparse", "logits"] and "--suites" not in kit.command("env", 60.0)
    measured: list[str] = []
    monkeypatch.setattr(gpu_stages, "compare", lambda kit, names, *options: measured.extend(names))
    monkeypatch.setattr(gpu_stages.torch.cuda, "is_available", lambda: True)
    assert gpu_stages.main(["suites", "--work", str(tmp_path), "--suites", "sparse", "logits"]) == 0
    assert measured == ["sparse", "logits"]


def test_results_are_few_files_with_plain_names(kit: Kit) -> None:
    plots = kit.work / "results" / "a-gpu" / "plots"
    plots.mkdir(parents=True)
    for name in suites.SUITES:
        for kind in ("png", "svg"):
            (plots / f"{name}.{kind}").write_text(name)
    (plots.parent / "hidden.json").write_text('{"cells": []}')
    (kit.work / "tables.md").write_text("a table")
    for _ in range(2):
        gpu_kit.pack(kit)
        found = {path.name for path in kit.out.iterdir()}
        assert found == {*(f"{name}.png" for name in gpu_kit.PICTURES), "logs.tar.gz", "results.tar.gz", "summary.md"}
    assert len(found) <= 8 and (kit.out / "hidden.png").read_text() == "hidden"
    assert (kit.out / "summary.md").read_text().endswith("a table") and "a table" not in gpu_kit.summary(kit)
    with tarfile.open(kit.out / "results.tar.gz") as tar:
        assert {"results/a-gpu/plots/rows.svg", "results/a-gpu/hidden.json", "tables.md"} <= set(tar.getnames())


def test_files_that_stages_write_meanwhile_do_not_stop_the_packing(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is half written, another disappears between listing and reading."""
    for name in ("whole.json", "half.part", "gone.json"):
        (kit.work / "json" / name).write_text("{}")
    read = Path.read_bytes

    def vanishing(path: Path) -> bytes:
        if path.name == "gone.json":
            path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", vanishing)
    gpu_kit.pack(kit)
    with tarfile.open(kit.out / "results.tar.gz") as tar:
        assert tar.getnames() == ["json/kit.json", "json/whole.json"]


def test_a_folder_of_wheels_that_is_none() -> None:
    with pytest.raises(SystemExit):
        gpu_kit.main(["--out", "unused", "--wheels", "/no/such/folder"])


# ---- conclusions


def row(name: str, ms: float, status: str = "ok", **more: Any) -> dict:
    return {"name": name, "status": status} | ({"ms": ms} if status == "ok" else {}) | more


def cell(rows: list[dict], limit: float, **shape: Any) -> dict:
    base = {"rows": 8192, "vocab": 151936, "dtype": "bfloat16", "hidden": None, "active": 1.0}
    return base | shape | {"limit": {"name": "limit", "ms": limit}, "providers": rows}


SUITES = {
    "logits": {
        "cells": [
            cell([], 9.0, vocab=128256),
            cell(
                [
                    row("grpo_kernels, in place", 1.1),
                    row("Liger GRPO loss", 3.3),
                    row("TRL kernel + loss", 0, "wrong"),
                    row("copy", 1.0),
                ],
                1.0,
            ),
        ]
    },
    "hidden": {
        "cells": [
            cell([row("grpo_kernels", 48.0, extra_mb=3800.0), row("TRL fused head + loss", 60.0)], 40.0, hidden=4096),
        ]
    },
    # Half of the rows are due two thirds of the products; the target is set against all three of all rows.
    "active": {
        "cells": [
            cell([row("grpo_kernels", 48.0)], 40.0, hidden=4096),
            cell([row("grpo_kernels", 28.0)], 26.7, hidden=4096, active=0.5),
        ]
    },
}


def test_targets_are_read_off_the_results() -> None:
    waits = dict.fromkeys(("linear_grpo_loss", "TokenBatch", "by a mask"), "batch.py:3 .item()") | {"grpo_loss": None}
    documented = {"by a mask": "it has to", "grpo_loss": "now and then"}
    graphs = {"grpo_loss": None, "linear_grpo_loss": "cannot be captured"}
    counters = {"recompilations": 0, "waits": waits, "documented": documented, "graphs": graphs}
    correctness = {"groups": {"real sizes": {"largest": {"test_from_hidden_states, logps": 2e-6, "d_hidden": 1e-3}}}}
    found = {t.what: (t.measured, t.met) for t in gpu_kit.targets(SUITES, counters, correctness)}
    assert list(found.values()) == [
        ("1.1", True), ("3", True), ("not measured", None),
        ("1.2", False), ("3.54", True), ("1.25", False), ("not measured", None),
        ("0.7", True),
        ("0", True), ("2", False), ("1", True), ("1", False), ("2e-06", True),
    ]  # fmt: skip
    assert all(t.met is None for t in gpu_kit.targets({}, {}, {}))
    half = SUITES | {"active": {"cells": SUITES["active"]["cells"][1:]}}
    assert [t.met for t in gpu_kit.targets(half, {}, {}) if "half" in t.what] == [None]  # its own limit does not stand in


def test_targets_speak_of_providers_that_there_are() -> None:
    """If a provider is renamed, its target must not silently become "not measured"."""
    suites: dict[str, dict] = {}
    for suite, contract in (("logits", "logits"), ("hidden", "hidden"), ("active", "hidden")):
        rows = [row(one.name, 1.0, extra_mb=1.0) for one in providers(contract)]
        shape = {"hidden": None if contract == "logits" else 4096}
        suites[suite] = {"cells": [cell(rows, 1.0, active=share, **shape) for share in (1.0, 0.5)]}
    missing = [t.what for t in gpu_kit.targets(suites, {"recompilations": 0, "waits": {}, "graphs": {}}, {}) if t.met is None]
    assert missing == ["log-probs from hidden states, error"]
    for workload in tune_settings.workloads(small=False):
        assert workload.candidate(tune_settings.Chunk(1, 2)).name == "1 MiB of logits, 2 MiB of gradients"


def test_outcomes_of_tests_are_written_at_once_and_counted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', [1.0, 3.0, 2.0])\n"
        "def test_records(x, record_property): record_property('error', x)\n"
        "def test_fails(): assert 1 == 2, 'so wrong'\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError('no disk')\n"
        "def test_errs(broken): pass\n"
        "def test_skips(): pytest.skip('not today')\n"
        "@pytest.mark.parametrize('x', range(4))\n"
        "def test_cut_off(x):\n"
        "    import os\n"
        "    if x == 3: os._exit(1)\n"  # the last of all
    )
    report = tmp_path / "report.jsonl"
    environment = for_its_own_pytest() | {"PYTHONPATH": str(ROOT / "tests"), "GRPO_KERNELS_TEST_REPORT": str(report)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "support.on_device", "test_it.py"]
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=600).returncode == 1
    found = gpu_correctness.tally(report, ["test_it.py"])
    assert (found["collected"], found["first"], found["ran"]) == (10, 10, 9)
    assert found["passed"] == 6 and found["largest"] == {"test_records, error": 3.0}
    assert [line["message"].split("\n")[0] for line in found["failed"]] == ["AssertionError: so wrong", "OSError: no disk"]
    assert len(found["skipped"]) == 1 and "not today" in found["skipped"][0]
    for other in (gpu_correctness.tally(report, ["test_other.py"]), gpu_correctness.tally(tmp_path / "none", ["test_it.py"])):
        assert other["collected"] == other["passed"] == 0 and not other["failed"]


@pytest.mark.parametrize(
    "status, ran, outcome, well",
    [
        (0, 3, "passed", True),
        (None, 3, "passed", True),
        (None, 2, "passed", False),
        (None, 3, "failed", False),
        (1, 3, "passed", False),
    ],
)
def test_no_time_for_all_combinations_is_no_failure(
    status: int | None, ran: int, outcome: str, well: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file has five cases, of which three cover all values of the parameters."""
    found = stage("correctness", tmp_path)
    limits: list[float] = []

    def python(*command: str, GRPO_KERNELS_TEST_REPORT: str, seconds: float, **more: Any) -> int | None:
        limits.append(seconds)
        files = [part for part in command if part.startswith("tests/")]
        lines: list[dict] = [{"collected": dict.fromkeys(files, 5), "first": dict.fromkeys(files, 3)}]
        lines += [
            {"test": f"{file}::test_it[{i}]", "outcome": outcome, "message": "", "properties": {}}
            for file in files
            for i in range(ran)
        ]
        Path(GRPO_KERNELS_TEST_REPORT).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return status

    monkeypatch.setattr(found, "python", python)
    gpu_correctness.correctness(found)
    said = [line for line in found.found["lines"] if " ran, " in line]
    for line, (name, cases) in zip(said, CASES.items(), strict=True):
        n = len(cases.files)
        assert line.startswith(f"{name}: ") and f"{n * ran} of {n * 5} ran, {n * 3} have" in line
    assert found.well is well and limits == sorted(limits) and 0.9 * 60 < limits[-1] < 60


def test_groups_of_cases_that_there_are() -> None:
    assert sum(cases.share for cases in CASES.values()) == pytest.approx(1)
    for cases in CASES.values():
        assert all((ROOT / "tests" / file).is_file() for file in cases.files) and cases.processes > 0
    known = {file for cases in CASES.values() for file in cases.files}
    written = {f"vocabulary/{file.name}" for file in (*runs.CASES, *runs.ONCE)}
    assert written - known == set()
    assert "-n" not in gpu_correctness.pytest_command(3, rehearse=True)


def collected(*arguments: str) -> list[str]:
    """Node ids in the order of on_device.py."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "GRPO_KERNELS_TEST_BACKENDS": "triton"}
    environment.pop("GRPO_KERNELS_TEST_REPORT", None)
    plugin = ("-p", "no:cacheprovider", "-p", "support.on_device")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *plugin, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    return [re.sub(r"^tests/\w+/", "", line) for line in done.stdout.splitlines() if "::" in line]


def test_a_run_that_is_cut_off_has_seen_every_kernel_and_objective() -> None:
    """The first wave covers all values of all parameters: kernels first, then objectives with a kernel of their own, then the
    rest."""
    found = collected(*(f"tests/vocabulary/{file}.py" for file in ("triton_cases", "test_row_kernels", "triton_recipes")))
    again = next(
        i for i in range(1, len(found)) if found[i].startswith("triton_cases") and not found[i - 1].startswith("triton_cases")
    )
    first = found[:again]
    assert again < len(found) and len(set(found)) == len(found)
    assert {test.split("[")[0] for test in first} == {test.split("[")[0] for test in found}
    formulas = [{re.sub(r"-o\w+-policy\]", "", test) for test in tests if "family" in test} for tests in (first, found)]
    assert formulas[0] == formulas[1] and len(formulas[0]) > 20
    names = [test.rpartition("[")[2].rstrip("]") for test in first if "recipes.py::test_an_objective" in test]
    assert set(names) == OBJECTIVES.keys()
    several = [not OBJECTIVES[name][0]().one_pass for name in names if "exact" not in name]
    assert several == sorted(several) and any(several)


def test_tensors_are_made_on_the_device() -> None:
    plain = torch.randn(4, generator=torch.Generator().manual_seed(3))
    with OnDevice("meta"):
        for made in (
            torch.zeros(3), torch.tensor([1, 2]), torch.arange(5), torch.full((2,), 1.0), torch.empty(2, 3), torch.linspace(0, 1, 3),
            torch.randn(4, generator=torch.Generator()), torch.randint(7, (3,)), torch.zeros_like(torch.ones(3)),
        ):  # fmt: skip
            assert made.device.type == "meta"
        leaf = torch.randn(3, requires_grad=True)
        assert leaf.is_leaf and leaf.requires_grad and leaf.device.type == "meta"
        assert torch.zeros(3, device="cpu").device.type == "cpu"
        ours: dict[str, Any] = {"__name__": "grpo_kernels.somewhere", "torch": torch}
        exec("made = torch.zeros(3), torch.empty(2)", ours)  # a device that the package forgot must show
        assert {x.device.type for x in ours["made"]} == {"cpu"}
    with OnDevice("cpu"):
        assert torch.equal(torch.randn(4, generator=torch.Generator().manual_seed(3)), plain)


def test_memory_is_given_back_after_each_test(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("back"))
    on_device.pytest_runtest_teardown()
    assert not given  # on a CPU there is nothing to give
    monkeypatch.setattr(on_device.MODE, "device", "cuda")
    on_device.pytest_runtest_teardown()
    assert given == ["back"]


# ---- tuning


def tuned_cell(**ms: float | str) -> dict:
    rows = [row(name, 0, "wrong", reason=value) if isinstance(value, str) else row(name, value) for name, value in ms.items()]
    return {"providers": [*rows, row("copy", 0.1, limit=True)]}


def test_the_ranking_takes_only_settings_that_were_right_everywhere() -> None:
    cells = [tuned_cell(a=2.0, b=1.0, c=0.5, d=4.0), tuned_cell(a=1.0, b=2.0, c="off", d=8.0)]
    found = tune.ranking(cells)
    assert [name for name, _ in found] == ["a", "b", "d"]
    assert found[0][1] == pytest.approx(2**0.5) and found[2][1] == pytest.approx(32**0.5)
    assert tune.ranking([tuned_cell(a="off")]) == [] and tune.ranking([]) == []


@pytest.mark.parametrize("kind", ["visit", "fused", "fused32"])
def test_candidates_have_registers_and_what_is_now_comes_first(kind: str) -> None:
    found = tune_settings.settings(kind, small=False)
    assert found[0] == tune_settings.Launched(kind, backend.LAUNCH[kind]) and len(set(map(str, found))) == len(found) > 15
    assert all(s.fits and s.choice.threads * s.choice.programs <= 2048 for s in found)  # type: ignore[union-attr]
    assert {s.choice.hints for s in found} == {True, False}  # type: ignore[union-attr]
    assert kind == "visit" or {s.choice.grid for s in found} == {0.0, 0.5, 1.0}  # type: ignore[union-attr]
    assert {s.choice.stages for s in found} == {1, 3, 4}  # type: ignore[union-attr]
    assert kind != "fused32" or {s.choice.kept for s in found} == {0, 1, 2, 3, 4, 5}  # type: ignore[union-attr]
    assert (
        not tune_settings.Launched(kind, Choice(1024, 8)).fits and tune_settings.Launched(kind, Choice(512, 4, stages=4)).fits
    )
    assert not tune_settings.Launched(kind, Choice(512, 8, stages=5)).fits  # 256 KiB of shared memory


def test_a_setting_reaches_the_compiler_and_is_taken_back() -> None:
    launch, chunk = dict(backend.LAUNCH), [dict(x) for x in (blocks.CHUNK_BYTES, blocks.BLOCK_BYTES)]
    objective = Objective.preset("dapo")
    rows = token_rows(2, objective)
    logits = torch.zeros(1, 2, 151936, dtype=torch.bfloat16)

    def metadata(setting: tune_settings.Launched) -> Any:
        with setting.applied(), compiling("sm_90") as launches:
            backend.fused(logits, rows, objective, RowTransform(1.0, 0.0, 1.0), logits)
        return launches[0][1].metadata

    wide, narrow = (metadata(tune_settings.Launched("fused", Choice(*x))) for x in ((512, 4), (256, 2, 2)))
    assert (wide.num_warps, wide.maxnreg) == (16, 128) and (narrow.num_warps, narrow.maxnreg) == (8, 128)
    with tune_settings.Chunk(7, 9).applied():
        assert (blocks.CHUNK_BYTES["cuda"], blocks.BLOCK_BYTES["cuda"]) == (7 << 20, 9 << 20)
    assert launch == backend.LAUNCH and chunk == [blocks.CHUNK_BYTES, blocks.BLOCK_BYTES]


def test_every_choice_of_a_launch_is_tuned() -> None:
    """Each entry of the package's tables has candidates, the one that it has first, and a workload that runs its kernel."""
    kinds = {*backend.LAUNCH, "chunk"}
    assert kinds == set(tune.KINDS) == {w.kind for w in tune_settings.workloads(small=False)}
    for kind in kinds:
        now, *others = tune_settings.settings(kind, small=False)
        assert others and all(where[key] == value for where, key, value in now.places() if key != "cpu")
        assert tune_settings.setting_of(kind, now.described()) == now
        for other in others:
            with other.applied():
                assert str(tune_settings.settings(kind, small=False)[0]) == str(other)
        assert tune_settings.settings(kind, small=False)[0] == now


class Trials:
    """For `measure`: the last candidate is the fastest, those in `broken` break CUDA, those behind `last` are not reached."""

    def __init__(self, broken: Sequence[int] = (), last: int = 99) -> None:
        self.broken, self.last, self.tried = broken, last, 0

    def __call__(
        self, cell: Any, device: str, *, candidates: list[Any], known: dict[str, str] | None, save: Any, **_: Any
    ) -> dict:
        rows: list[dict] = []
        for i, name in enumerate(c.name for c in candidates if not c.limit):
            if name in (known or {}):
                rows.append({"name": name, "status": "failed", "reason": known[name]})  # type: ignore[index]
                continue
            if i > self.last:
                raise KeyboardInterrupt
            self.tried += 1
            if i in self.broken:
                raise measure.DeviceLost(name, "illegal memory access")
            rows.append({"name": name, "status": "ok", "ms": 1000.0 - i, "x_limit": 1.0, "runs": 5})
            save({"providers": rows, "unfinished": True})
        return {"providers": rows}


def test_a_candidate_that_breaks_cuda_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "compile_all", lambda jobs, workers: None)
    file = tmp_path / "tune.json"
    command = ["--kind", "visit", "--json", str(file)]
    names = [str(s) for s in tune_settings.settings("visit", small=False)]
    for broken, status in (((3,), suites.LOST_DEVICE), ((3, 5), suites.LOST_DEVICE), ((), 0)):
        monkeypatch.setattr(tune, "measure", Trials(broken))
        assert tune.main(command) == status
    result = json.loads(file.read_text())["visit"]
    assert [row["name"] for row in result["cells"][0]["providers"] if row["status"] == "failed"] == [names[3], names[5]]
    assert result["ranking"][0][0] == names[-1] and {names[3], names[5]}.isdisjoint(dict(result["ranking"]))


def test_a_run_that_is_cut_off_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "compile_all", lambda jobs, workers: None)
    file = tmp_path / "tune.json"
    command = ["--kind", "visit", "--json", str(file)]
    names = [str(s) for s in tune_settings.settings("visit", small=False)]
    monkeypatch.setattr(tune, "measure", Trials(last=4))
    with pytest.raises(KeyboardInterrupt):
        tune.main(command)
    result = json.loads(file.read_text())["visit"]
    assert [name for name, _ in result["ranking"]] == names[4::-1] and result["best"] is not None
    first = Trials()
    monkeypatch.setattr(tune, "measure", first)
    assert tune.main(command) == 0 and first.tried == 2 * len(names)  # nothing of the first cell was whole
    again = Trials()
    monkeypatch.setattr(tune, "measure", again)
    assert tune.main(command) == 0 and again.tried == 0


def test_the_tuners_summary_has_the_table_to_paste() -> None:
    now, best = str(tune_settings.Launched("fused", backend.LAUNCH["fused"])), Choice(256, 8, programs=2, grid=1.0)
    found = {
        "fused": {"ranking": [("x", 1.0), (now, 1.1)], "best": {"choice": best._asdict()}, "now": now},
        "chunk": {"ranking": [("800 MiB", 1.0)], "best": {"mib": 800, "block": 900}, "now": "800 MiB"},
        "visit": {"ranking": [], "best": None, "now": ""},
    }
    lines = tune.summary(found)
    assert "10.0 % slower" in lines[0] and 'CHUNK_BYTES["cuda"] = 800 << 20, BLOCK_BYTES["cuda"] = 900 << 20' in lines
    assert "no setting was right" in lines[2]
    scope: dict[str, Any] = {"Choice": Choice}
    exec(lines[-1], scope)
    assert scope["LAUNCH"] == {**backend.LAUNCH, "fused": best}


def test_the_comparison_runs_with_what_was_clearly_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tuned(best: Any, by: float) -> dict[str, Any]:
        return {"ranking": [("x", 1.0), ("now", 1 + by)], "best": best, "now": "now"}

    choice = Choice(256, 8, programs=2, grid=1.0)
    found = {
        "fused": tuned({"choice": choice._asdict()}, 0.1), "visit": tuned({"choice": Choice(32, 1)._asdict()}, 0.01),
        "chunk": tuned({"mib": 7, "block": 9, "kind": "chunk"}, 0.5), "fused32": {"ranking": [], "best": None, "now": "now"},
    }  # fmt: skip
    chosen = tune.winners(found)
    assert chosen.keys() == {"fused", "chunk"}
    path = tmp_path / "choices.json"
    monkeypatch.setattr(backend, "LAUNCH", dict(backend.LAUNCH))
    for name in ("CHUNK_BYTES", "BLOCK_BYTES"):
        monkeypatch.setattr(blocks, name, dict(getattr(blocks, name)))
    before, host = dict(backend.LAUNCH), blocks.CHUNK_BYTES["cpu"]
    assert tune.apply(path) == {} and before == backend.LAUNCH
    path.write_text(json.dumps(chosen))
    assert tune.apply(path) == json.loads(json.dumps(chosen))
    assert before | {"fused": choice} == backend.LAUNCH and blocks.CHUNK_BYTES == {"cuda": 7 << 20, "cpu": host}
    assert blocks.BLOCK_BYTES == {"cuda": 9 << 20, "cpu": 0}


# ---- code that only runs on CUDA


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for the parts of torch.cuda that the stages use; the list receives the sync debug modes that were set."""
    modes: list[str] = []

    @contextlib.contextmanager
    def entered(_: Any) -> Iterator[None]:
        yield

    class Stream:
        def wait_stream(self, other: Any) -> None:
            assert isinstance(other, Stream)

    class Event:
        def query(self) -> bool:
            return self.over

        def synchronize(self) -> None:
            pass

        def __init__(self, over: bool) -> None:
            self.over = over

    for name, value in {
        "synchronize": lambda: None, "set_sync_debug_mode": modes.append, "Stream": Stream, "current_stream": Stream,
        "stream": entered, "graph": entered, "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "get_device_capability": lambda: (9, 0), "Event": Event,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return modes


def test_the_first_wait_is_found_and_the_mode_taken_back(cuda: list[str]) -> None:
    def waits() -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    assert gpu_counters.first_wait(lambda: None) is None and cuda == ["error", "default"]
    found = gpu_counters.first_wait(waits)
    assert found is not None and found.startswith("test_gpu_kit.py:") and "raise RuntimeError" in found
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu_counters.first_wait(lambda: (_ for _ in ()).throw(RuntimeError("out of memory")))
    assert cuda == ["error", "default"] * 3
    # An event that is over costs nothing, one that is not is a wait that torch's mode does not see.
    assert gpu_counters.first_wait(lambda: torch.cuda.Event(True).synchronize()) is None  # type: ignore[call-arg]
    found = gpu_counters.first_wait(lambda: torch.cuda.Event(False).synchronize())  # type: ignore[call-arg]
    assert found is not None and "a synchronizing event" in found
    torch.cuda.Event(False).synchronize()  # type: ignore[call-arg]


def test_a_replay_is_compared_with_a_plain_call(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's replay does what the test chooses. A correct one repeats the step on the memory of the first run."""
    given = torch.ones(8)
    makes: list[tuple[torch.Tensor, ...]] = []

    def step(scale: float = 2.0) -> tuple[torch.Tensor, ...]:
        makes.append((scale * given, given.sum()))
        return makes[-1]

    def replaying(scale: float) -> None:
        def replay() -> None:
            for into, value in zip(makes[1], step(scale), strict=True):  # the second is the one that was captured
                into.copy_(value)

        makes.clear()
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=replay))

    def differs(exact: bool) -> str | None:
        return gpu_counters.replay_differs(gpu_counters.Captured(given, step, exact))

    replaying(2.0)
    assert differs(True) is None
    replaying(2.001)
    assert "other bits" in str(differs(True))
    replaying(2.001)
    assert differs(False) is None
    replaying(2.5)
    assert "off by 2.5e-01" in str(differs(False))
    replaying(math.nan)
    assert "off by nan" in str(differs(False))
    makes.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    assert differs(True) is not None and differs(False) is not None

    def refuses() -> tuple[torch.Tensor, ...]:
        makes.append(())
        if len(makes) > 1:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return (given,)

    makes.clear()
    found = gpu_counters.replay_differs(gpu_counters.Captured(given, refuses, True))
    assert found == "cannot be captured: operation not permitted when stream is capturing"


def test_the_host_is_timed_without_the_device(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [7.0, 0.125, 0.25, 0.5]
    monkeypatch.setattr(gpu_counters, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def call() -> None:
        clock[0] += clock.pop()

    assert gpu_counters.host_ms(call, runs=3) == 250.0


def test_loaded_kernels_are_read_from_tritons_cache() -> None:
    with compiling("sm_90") as launches:
        backend.scale_(torch.zeros(3, 1040), torch.ones(()))
    assert gpu_counters.loaded_kernels() == []  # compiled, but not loaded
    ((_, kernel),) = launches
    kernel.module, kernel.n_regs, kernel.n_spills = object(), 40, 0
    found = {"kernel": "_scale_kernel", "registers": 40, "spills": 0}
    found |= {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
    assert gpu_counters.loaded_kernels() == [found]
    kernel.module = None


def stage(name: str, tmp_path: Path, **options: Any) -> gpu_running.Kit:
    (tmp_path / "json").mkdir(exist_ok=True)
    return gpu_running.Kit(name, tmp_path, 60, **options)


@pytest.mark.parametrize("differs", [None, "a replay is off by 1.0e+00"])
def test_counters_on_a_gpu(differs: str | None, cuda: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole stage except CUDA itself, with the CPU's backend."""
    found = stage("counters", tmp_path)
    found.device = "cpu"
    monkeypatch.setattr(gpu_stages, "recompilations", lambda *args: 0)
    monkeypatch.setattr(gpu_stages, "losses", lambda *args: {"grpo_loss": lambda: None})
    monkeypatch.setattr(gpu_stages, "graphed", lambda *args: {"grpo_loss": None})
    monkeypatch.setattr(gpu_stages, "replay_differs", lambda one: differs)
    gpu_stages.counters(found)
    written = json.loads((tmp_path / "json" / "counters.json").read_text())
    assert written["recompilations"] == 0 and written["graphs"] == {"grpo_loss": differs} and found.well is (differs is None)
    assert written["waits"] == {"grpo_loss": None, "TokenBatch, masked": None, "TokenBatch": None}
    assert written["host_ms"].keys() == written["waits"].keys()


@pytest.mark.parametrize("name, well", [("grpo_loss", False), ("linear_logprobs, masked", True)])
def test_a_documented_wait_is_reported_but_no_failure(
    name: str, well: bool, cuda: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stage("counters", tmp_path)
    found.device = "cpu"
    monkeypatch.setattr(gpu_stages, "recompilations", lambda *args: 0)
    monkeypatch.setattr(gpu_stages, "losses", lambda *args: {name: lambda: torch.cuda.Event(False).synchronize()})  # type: ignore[call-arg]
    monkeypatch.setattr(gpu_stages, "graphed", lambda *args: {})
    gpu_stages.counters(found)
    assert found.found["waits"][name] is not None and found.well is well
    assert any(name in line and ("documented" in line) is well for line in found.found["lines"])


def test_what_is_documented_to_wait_waits_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose tensors have no values. Row counts, whatever they are, are on its host."""

    def sets_of(ids: torch.Tensor, offsets: torch.Tensor) -> TokenSets:
        rows = offsets.numel() - 1
        size = ids.numel() // rows
        return meta_device.on_meta(TokenSets.from_counts(torch.arange(size).repeat(rows), torch.full((rows,), size)))

    monkeypatch.setattr(gpu_counters, "TokenSets", sets_of)
    monkeypatch.setattr(TokenBatch, "count", lambda batch, kind, marked=None: batch.rows // 2)
    calls = gpu_counters.calls("meta", 8, 131, 8, torch.float32)
    meta_device.make_device(monkeypatch)
    counts = "TokenBatch and linear_grpo_loss"  # waits for these
    assert {counts} <= gpu_counters.WAITS.keys() <= calls.keys()
    for name, call in calls.items():
        waits = name in gpu_counters.WAITS and name != counts
        with use(backend="eager"), pytest.raises(meta_device.WAITS) if waits else contextlib.nullcontext():
            call()


def test_all_kernels_are_looked_at() -> None:
    """Those that Triton compiles by themselves, of every module of the backend."""
    modules = [
        importlib.import_module(f"{backends.__name__}.{path.stem}") for path in Path(backends.__path__[0]).glob("triton*.py")
    ]
    found = {x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}
    kernels = {x.__name__ for x in found if x.__name__.endswith("_kernel")}
    assert "_select_kernel" in kernels and kernels == {x.__name__ for x in gpu_counters.KERNELS}


def test_what_is_captured_gives_gradients() -> None:
    for name, one in gpu_counters.graphed("cpu", 8, 131, 8, torch.float32).items():
        found = one.step()
        assert len(found) > 1 and all(x.isfinite().all() and x.any() for x in found), name
        assert one.given.is_leaf


def test_resources_on_a_gpu(cuda: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the loaded kernels only: compiling all others takes minutes, and needs no GPU."""
    found = stage("resources", tmp_path)
    monkeypatch.setattr(gpu_stages, "losses", lambda *args: {})
    monkeypatch.setattr(found, "child", lambda *command, **_: pytest.fail("a process was started"))
    kernel = {"kernel": "k", "registers": 40, "spills": 0, "shared": 64, "warps": 16}
    monkeypatch.setattr(gpu_stages, "loaded_kernels", lambda: [kernel])
    gpu_stages.resources(found)
    written = json.loads((tmp_path / "json" / "resources.json").read_text())
    assert written["loaded"] == [kernel] and "40 registers" in written["lines"][0] and found.well


def test_a_suite_that_breaks_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each suite is a process. If a provider breaks it, it is run again without that provider; if it hangs, the others keep
    their time."""
    found, ran, limits = stage("comparison", tmp_path), [], []
    lost = {"logits": [gpu_stages.LOST_DEVICE, gpu_stages.LOST_DEVICE, 0], "hidden": [1], "active": [None]}

    def python(*command: str, seconds: float, **_: Any) -> int | None:
        assert command[command.index("--choices") + 1] == str(tmp_path / "json" / "choices.json")
        ran.append(command[command.index("--suite") + 1])
        limits.append(seconds)
        return lost.get(ran[-1], [0]).pop(0)

    monkeypatch.setattr(found, "python", python)
    gpu_stages.comparison(found)
    assert ran == ["logits", "logits", *gpu_plan.COMPARED]
    assert all(limit < 0.41 * 60 for limit in limits[:-2]) and limits[-1] > 50
    outcomes = {line.split(":")[0]: line.rsplit(", ", 1)[1] for line in found.found["lines"]}
    assert outcomes == dict.fromkeys(gpu_plan.COMPARED, "ok") | {"hidden": "exit status 1", "active": "took too long"}
    assert not found.well


def test_the_headline_takes_first_cells_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stage("headline", tmp_path)
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(found, "python", lambda *command, **_: commands.append(command) or 0)
    gpu_stages.headline(found)
    assert [command[command.index("--suite") + 1] for command in commands] == list(gpu_plan.HEADLINE)
    assert all("--first" in command for command in commands) and found.well


def test_suites_are_those_of_the_benchmarks_in_another_order() -> None:
    assert sorted((*gpu_plan.COMPARED, *gpu_plan.FURTHER)) == sorted(suites.SUITES)
    assert set(gpu_plan.HEADLINE) <= set(gpu_plan.COMPARED) and set(gpu_plan.REHEARSED_SUITES) <= set(suites.SUITES)


def test_result_files_name_a_command_that_a_reader_can_run(tmp_path: Path) -> None:
    path = tmp_path / "a-gpu" / "hidden.json"
    path.parent.mkdir()
    made = {"command": "python -m benchmarks --out /tmp/gpu-kit-x/results", "date": "a day"}
    path.write_text(json.dumps({**made, "cells": [{**made, "rows": 1}, {"rows": 2}]}))
    gpu_stages.name_the_command(tmp_path)
    here = {"command": "python -m benchmarks.gpu_kit", "date": "a day"}
    assert json.loads(path.read_text()) == {**here, "cells": [{**here, "rows": 1}, {"rows": 2}]}


# ---- peers


def test_an_import_error_of_a_contender_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(case: Any) -> Any:
        raise Unavailable("not installed: pip install that")

    found = [
        Provider("here", ("logits",), lambda case: None),  # type: ignore[arg-type, return-value]
        Provider("gone", ("logits",), missing),
        Provider("elsewhere", ("logits",), missing, devices=("cuda",)),
        Provider("a limit", ("logits",), missing, limit=True),
    ]
    monkeypatch.setattr(gpu_stages, "providers", lambda contract: found)
    kit = stage("peers", tmp_path, rehearse=True)
    gpu_stages.peers(kit)
    assert kit.found["reasons"] == {"here": None, "gone": "not installed: pip install that", "elsewhere": "runs on cuda only"}
    assert "not measured: gone: not installed: pip install that" in kit.found["lines"] and kit.well


def test_a_bad_wheel_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for names, calls, outcomes in (
        (("bad.whl", "good.whl"), 3, {"good.whl": "ok", "bad.whl": "exit status 1"}),
        (("good.whl",), 1, {"good.whl": "ok"}),
        ((), 0, {}),
    ):
        folder = tmp_path / f"of {len(names)}"
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        kit, commands = stage("install", tmp_path, wheels=folder), []

        def python(*command: str, commands: list = commands) -> int:
            commands.append(command)
            return int(any("bad.whl" in part for part in command))

        monkeypatch.setattr(kit, "python", python)
        gpu_stages.install(kit)
        assert kit.found["wheels"] == outcomes and len(commands) == calls and kit.well is ("bad.whl" not in names)


def test_the_sanitizer_runs_small_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "$@"\nshift 4\nexec "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = stage("memcheck", tmp_path, rehearse=True)
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(found, "child", lambda *command, **_: commands.append(command) or 9 * (len(commands) - 1))
    gpu_stages.memcheck(found)
    assert found.found["lines"] == ["memcheck: ok", "racecheck: exit status 9", "synccheck: exit status 18"] and not found.well
    assert commands[0][:6] == (str(tool), "--tool", "memcheck", "--error-exitcode", "9", sys.executable)


TABLE = """==PROF== Disconnected from process 9
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","byte","byte"
"0","_fused_kernel","311164928","622329856"
"1","_fused_kernel","933494784","622329856"
"""


def test_ncu_counts_the_bytes_of_the_fused_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "ncu"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = stage("traffic", tmp_path)
    for text, lines in (
        (TABLE, ["1.00 x of them read, 2.00 x written", "1.50 x of them read, 1.00 x written"]),
        ("==ERROR== ERR_NVGPUCTRPERM\n", ["left out: bytes of device memory: ncu: ok, 0 of 2 kernels counted"]),
    ):
        found.found["lines"] = []

        def child(*command: str, text: str = text) -> int:
            assert command[0] == str(tool) and command[-4:-2] == ("benchmarks.gpu_stages", "long_rows")
            Path(command[command.index("--log-file") + 1]).write_text(text)
            return 0

        monkeypatch.setattr(found, "child", child)
        gpu_stages.traffic(found)
        assert [line.split(": ", 1)[1] if text is TABLE else line for line in found.found["lines"]] == lines
    assert found.well


def test_what_ncu_counts_is_the_fused_kernel_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_stages, "ROWS", {torch.bfloat16: 2, torch.float32: 2})
    with tune_settings.on_triton(), compiling("sm_90") as launches:
        gpu_stages.long_rows(stage("long_rows", tmp_path, rehearse=True))
    assert [name for name, _ in launches] == ["_fused_kernel"] * 2


def test_children_time_out_and_inherit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNWANTED", "1")
    found = stage("env", tmp_path)
    assert found.python("-c", "import time; time.sleep(60)", seconds=0.5) is None
    code = "import os; print('variables', os.environ.get('UNWANTED'), os.environ['WANTED'])"
    assert found.python("-c", code, UNWANTED="", WANTED="2") == 0
    assert "variables None 2" in capfd.readouterr().out


# ---- rehearsals


def rehearse(out: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "benchmarks.gpu_kit", "--out", str(out), "--rehearse", *options]
    done = subprocess.run(command, cwd=ROOT, env=for_its_own_pytest(), capture_output=True, text=True, timeout=590)
    logs = "" if not (out / "logs.tar.gz").exists() else read_all(out / "logs.tar.gz")
    return done.returncode, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}\n{logs[-4000:]}"


def read_all(archive: Path) -> str:
    with tarfile.open(archive) as tar:
        return "\n".join(tar.extractfile(m).read().decode() for m in tar.getmembers() if m.isfile())  # type: ignore[union-attr]


def test_rehearsal_of_two_stages(tmp_path: Path) -> None:
    status, text = rehearse(tmp_path, "--stages", "counters", "memcheck")
    assert status == 0, text
    assert "recompilations over random lengths and schedules: 0" in text
    assert "left out: waits of the host" in text and "run without a graph; not finite: none" in text


def test_the_rehearsal_knows_the_pages_wheels_and_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("rehearsal", ROOT / "tests" / "repository" / "rehearsal.py")
    assert spec is not None and spec.loader is not None
    rehearsal = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(rehearsal)
    words = rehearsal.wheels_of_the_page()
    assert {"--no-deps", "trl==1.16.0", "liger-kernel==0.8.5"} <= set(words) and "WHEELS" not in words and "\\" not in words
    source = (ROOT / "benchmarks" / "gpu_stages.py").read_text()
    named = {name for call in re.findall(r"leave_out\(([^)]*)\)", source) for name in re.findall(r'"([^"{]+)"', call)}
    assert named - {"suite "} <= rehearsal.LEFT_OUT and {f"suite {name}" for name in suites.SUITES} > rehearsal.LEFT_OUT - named
    home = tmp_path / "home.tar.gz"
    for stage, found in (("env", {}), ("counters", {"left_out": ["CUDA graphs"]})):
        (tmp_path / "json").mkdir(exist_ok=True)
        (tmp_path / "json" / f"{stage}.json").write_text(json.dumps(found))
    gpu_kit.archive(home, tmp_path, ("json",))
    reasons = {
        "TRL": "not installed: it needs accelerate",
        "Liger": None,
        "verl": "runs on cuda only",
        "CCE": "import of it fails",
    }
    reasons |= dict.fromkeys(rehearsal.WITHOUT_WHEELS, "not installed")
    (tmp_path / "json" / "peers.json").write_text(json.dumps({"reasons": reasons}))
    gpu_kit.archive(home, tmp_path, ("json",))
    assert rehearsal.missing(home).keys() == {"TRL", "CCE"}
    assert rehearsal.left_out(home, ["env", "counters"]) == {"CUDA graphs"} and rehearsal.left_out(home, ["env"]) == set()


@pytest.mark.slow
def test_rehearsal_of_everything(tmp_path: Path) -> None:
    """The four calls, each starting from the results of the one before."""
    home: list[str] = []
    for call, stages in CALLS.items():
        out = tmp_path / str(call)
        status, text = rehearse(out, "--call", str(call), *home)
        assert status == 0, text
        home = ["--resume", str(out / "results.tar.gz")]
        summary = (out / "summary.md").read_text()
        assert all(f"| {stage.name} | ok |" in summary for stage in stages) and "0 failed" in summary
        assert len(list(out.iterdir())) <= 8
    assert "LAUNCH = {" in summary and "left out: CUDA graphs" in summary


@pytest.mark.slow
def test_rehearsal_of_the_sanitizers_calls(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    command = [sys.executable, "-m", "benchmarks.gpu_stages", "small", "--work", str(tmp_path), "--rehearse"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "small calls: done" in done.stdout, done.stderr[-2000:]
