"""The GPU kit without a GPU: what would lose its minutes or its figures. Its runner and plan, what it continues from, its
conclusions, the tuner, the lines that only run on CUDA (with stand-ins), and a rehearsal on the CPU."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support import meta_device, on_device
from support.processes import for_its_own_pytest

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
from benchmarks.launches import compiling
from benchmarks.providers import Provider, Unavailable, providers
from grpo_kernels import TokenBatch, TokenSets, use

ROOT = Path(__file__).parents[2]
backend, blocks, Choice = tune_settings.backend, tune_settings.blocks, tune_settings.Choice


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def in_archive(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        return {m.name: tar.extractfile(m).read().decode(errors="replace") for m in tar if m.isfile()}  # type: ignore[union-attr]


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path / "out", tmp_path / "work")


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., gpu_running.Kit]:
    """Makes a running stage of 60 seconds."""
    (tmp_path / "json").mkdir()
    return lambda name, **options: gpu_running.Kit(name, tmp_path, 60, **options)


# ---- the runner


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print('said')", "ok"),
        ("print('said'); raise SystemExit(3)", "exit status 3"),
        ("raise ValueError('said')", "exit status 1"),
        ("import os, signal; print('said', flush=True); os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
    ],
)
def test_a_stage_that_ends(code: str, outcome: str, tmp_path: Path) -> None:
    assert gpu_kit.run_stage(python(code), tmp_path / "log", 30, dict(os.environ)) == outcome
    assert "said" in (tmp_path / "log").read_text()


def test_a_stage_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is reached once the child has written its process id, however long that takes."""
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    log = tmp_path / "log"
    monkeypatch.setattr(gpu_kit, "PACK_EVERY", 0.1)
    monkeypatch.setattr(
        gpu_kit, "time", SimpleNamespace(monotonic=lambda: 2.0 * log.read_text().endswith("\n") if log.exists() else 0.0)
    )
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert gpu_kit.run_stage(python(code), log, 2, dict(os.environ)) == "out of time after 2 s"
    status = Path(f"/proc/{int(log.read_text())}/stat")
    for _ in range(300):  # whoever inherits it has to collect it
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the stage's child is still running")


def write_json(work: Path, name: str, **found: Any) -> str:
    return f"import pathlib; pathlib.Path({str(work / 'json' / name)!r} + '.json').write_text({json.dumps(found)!r}); "


def test_stages_go_on_after_a_crash_and_a_hang_and_time_is_kept_for_them(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stage had written before is kept. Of 10 seconds the first two may not use the 8 that are the last one's, so that
    nothing is left for the third."""
    codes = {
        "crashes": "import os; os.abort()",
        "hangs": "import time; time.sleep(100)",
        "late": "",
        "kept": "print('log of kept')",
    }
    seconds, now = {}, [0.0]

    def command(self: Kit, stage: str, limit: float) -> list[str]:
        seconds[stage] = limit
        return python(write_json(kit.work, stage, lines=[f"found by {stage}"]) + codes[stage])

    def clock() -> float:
        """Moves on while the second stage, which has written its results, hangs."""
        now[0] += 0.1 if (kit.work / "json" / "hangs.json").exists() and "kept" not in seconds else 0.0
        return now[0]

    monkeypatch.setattr(Kit, "command", command)
    monkeypatch.setattr(gpu_kit, "time", SimpleNamespace(monotonic=clock, time=time.time))
    monkeypatch.setattr(gpu_kit, "PACK_EVERY", 0.1)
    gpu_kit.run(kit, [*(Stage(name, 600, 0) for name in ("crashes", "hangs", "late")), Stage("kept", 300, 240)], minutes=1 / 6)
    crashed, hung, *rest = (kit.stages[name]["status"] for name in codes)
    assert crashed == "ended by SIGABRT" and hung.startswith("out of time") and rest == ["no time left", "ok"]
    assert 1 < seconds["crashes"] < 2 and 7 < seconds["kept"] <= 8
    text, results = (kit.out / "summary.md").read_text(), in_archive(kit.out / "results.tar.gz")
    assert all(f"found by {name}" in text and f"json/{name}.json" in results for name in ("crashes", "hangs", "kept"))
    assert json.loads(results["json/kit.json"]) == kit.stages
    assert "log of kept" in in_archive(kit.out / "logs.tar.gz")["logs/kept.txt"]


def test_the_plan_fits_its_calls_and_names_what_there_is() -> None:
    names = [stage.name for stages in CALLS.values() for stage in stages if stage.name not in gpu_kit.AGAIN]
    parts = {"small", "peers", "long_rows"}  # of other stages
    assert len(names) == len(set(names)) and {*names, *(x.name for x in gpu_kit.ASKED)} | parts == gpu_stages.STAGES.keys()
    for stages in CALLS.values():
        assert 400 < sum(stage.kept for stage in stages) < 500  # seconds of ten minutes
        assert all(stage.kept <= stage.most for stage in stages)
    assert sorted((*gpu_plan.COMPARED, *gpu_plan.FURTHER)) == sorted(suites.SUITES)
    assert {*gpu_plan.HEADLINE, *gpu_plan.REHEARSED_SUITES} <= {*suites.SUITES}
    assert sum(cases.share for cases in CASES.values()) == pytest.approx(1)
    files, folder = {file for cases in CASES.values() for file in cases.files}, ROOT / "tests"
    assert all((folder / file).is_file() for file in files)
    assert {str(file.relative_to(folder)) for file in folder.glob("*/*triton_cases.py")} <= files


def test_a_call_goes_on_where_an_earlier_one_was(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its folder or from its results. A stage that failed, or that is named, is run again; so is what each machine needs."""
    ran: list[str] = []

    def command(self: Kit, stage: str, seconds: float) -> list[str]:
        ran.append(stage)
        return python(
            write_json(self.work, stage, lines=[f"from {stage}"]) + ("raise ValueError" if stage == "counters" else "")
        )

    def call(*options: str) -> list[str]:
        ran.clear()
        assert gpu_kit.main(["--out", str(kit.out), "--minutes", "1", *options]) == ("counters" in ran)
        return [*ran]

    monkeypatch.setattr(Kit, "command", command)
    assert call("--call", "1") == [stage.name for stage in CALLS[1]]
    home, work = tmp_path / "home.tar.gz", ("--work", str(tmp_path / "again"))
    (kit.out / "results.tar.gz").rename(home)
    assert call("--call", "1", "--resume", str(home), *work) == ["install", "counters", "plots"]
    assert "from env" in (kit.out / "summary.md").read_text() and (tmp_path / "again" / "json" / "env.json").exists()
    assert call("--call", "1", *work, "--stages", "env") == ["env"]
    assert call("--call", "2", *work) == [stage.name for stage in CALLS[2]]
    assert call(*work, "--suites", "logits", "sparse") == ["install", "suites", "plots"]
    assert "comparison" in call("--call", "3", *work)  # a call still has its own to make
    for wrong in ("--resume none.tar.gz", "--wheels /no/such", "--suites logit", "--suites logits --stages env"):
        with pytest.raises(SystemExit):
            call("--call", "1", *wrong.split())


def test_results_are_few_files_with_plain_names(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages may be writing meanwhile: of two files one is half written, another disappears between listing and reading."""
    (kit.work / "results" / "a-gpu" / "plots").mkdir(parents=True)
    inside = [*(f"results/a-gpu/plots/{name}.png" for name in suites.SUITES), "json/kit.json", "json/whole.json", "tables.md"]
    for name in (*inside, "json/half.part", "json/gone.json"):
        (kit.work / name).write_text("{}")
    read = Path.read_bytes

    def vanishing(path: Path) -> bytes:
        if path.name == "gone.json":
            path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", vanishing)
    gpu_kit.pack(kit)
    found = {path.name for path in kit.out.iterdir()}
    assert (
        found == {*(f"{name}.png" for name in gpu_kit.PICTURES), "logs.tar.gz", "results.tar.gz", "summary.md"}
        and len(found) <= 8
    )
    assert (kit.out / "summary.md").read_text().endswith("{}") and in_archive(kit.out / "results.tar.gz").keys() == {*inside}


# ---- conclusions


def row(name: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "status": "ok", "ms": ms} | more


def cell(limit: float, *rows: dict, **shape: Any) -> dict[str, Any]:
    base = {"rows": 8192, "vocab": 151936, "dtype": "bfloat16", "hidden": 4096, "active": 1.0}
    return base | shape | {"limit": {"name": "limit", "ms": limit}, "providers": list(rows)}


def test_targets_are_read_off_the_results_and_what_is_missing_is_not_met() -> None:
    logits = [
        row("grpo_kernels, in place", 1.0),
        row("Liger GRPO loss", 3.3),
        row("TRL kernel + loss", 9.0, status="wrong"),
        row("copy", 1.0),
    ]
    found = {
        "logits": {"cells": [cell(9.0, vocab=128256), cell(1.0, *logits)]},
        "hidden": {"cells": [cell(40.0, row("grpo_kernels", 60.0, extra_mb=3500.0))]},
        # Half of the rows are due two thirds of the products; the target is set against all three of all rows.
        "active": {"cells": [cell(40.0), cell(26.7, row("grpo_kernels", 28.0), active=0.5)]},
    }
    waits = {"a": None, "b": "batch.py:3", "c": "batch.py:3"}
    counters = {"recompilations": 0, "waits": waits, "documented": {"c": "it has to"}, "graphs": {"a": None, "b": "refused"}}
    seen = {
        t.what: t.met
        for t in gpu_kit.targets(found, counters, {"groups": {"x": {"largest": {"logps": 2e-6, "d_hidden": 1e-3}}}})
    }
    for words, met in (
        ("in place / copy", True), ("same, Liger GRPO", True), ("TRL kernel", None), ("/ three products", False), ("extra memory", True),
        ("half of the rows", True), ("recompilations", True), ("make the host wait", False), ("documented", True), ("CUDA graph", False),
        ("log-probs from hidden states", True),
    ):  # fmt: skip
        assert [value for what, value in seen.items() if words in what] == [met], words
    assert all(t.met is None for t in gpu_kit.targets({}, {}, {}))


def test_targets_speak_of_providers_that_there_are() -> None:
    """If a provider is renamed, its target must not silently become "not measured"."""
    found: dict[str, dict] = {}
    for suite, contract in (("logits", "logits"), ("hidden", "hidden"), ("active", "hidden")):
        rows = [row(one.name, 1.0, extra_mb=1.0) for one in providers(contract)]
        hidden = 4096 if contract == "hidden" else None
        found[suite] = {"cells": [cell(1.0, *rows, active=share, hidden=hidden) for share in (1.0, 0.5)]}
    counters = {"recompilations": 0, "waits": {}, "graphs": {}}
    missing = [t.what for t in gpu_kit.targets(found, counters, {}) if t.met is None]
    assert missing == ["log-probs from hidden states, error"]
    for workload in tune_settings.workloads(small=False):
        assert workload.candidate(tune_settings.settings(workload.kind, True)[0]).contracts


@pytest.mark.parametrize(
    ("status", "ran", "outcome", "well"),
    [
        (0, 3, "passed", True),
        (None, 3, "passed", True),
        (None, 2, "passed", False),
        (None, 3, "failed", False),
        (1, 3, "passed", False),
    ],
)
def test_no_time_for_all_combinations_is_no_failure(
    status: int | None, ran: int, outcome: str, well: bool, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file has five cases, of which three cover all values of the parameters. The largest error of each test is kept."""
    found, limits = stage("correctness"), []

    def run(*command: str, GRPO_KERNELS_TEST_REPORT: str, seconds: float, **_: Any) -> int | None:
        limits.append(seconds)
        files = [part for part in command if part.startswith("tests/")]
        lines: list[dict] = [{"collected": dict.fromkeys(files, 5), "first": dict.fromkeys(files, 3)}]
        for i in range(ran):
            lines += [
                {"test": f"{x}::test_it[{i}]", "outcome": outcome, "message": "so wrong", "properties": {"off": i}}
                for x in files
            ]
        Path(GRPO_KERNELS_TEST_REPORT).write_text("\n".join(map(json.dumps, lines)))
        return status

    monkeypatch.setattr(found, "python", run)
    gpu_correctness.correctness(found)
    assert found.well is well and limits == sorted(limits) and 0.9 * 60 < limits[-1] < 60
    for (name, cases), line in zip(CASES.items(), (x for x in found.found["lines"] if " ran, " in x), strict=True):
        n, group = len(cases.files), found.found["groups"][name]
        assert line.startswith(f"{name}: ") and f"{n * ran} of {n * 5} ran, {n * 3} have" in line
        assert group["largest"] == {"test_it, off": ran - 1} and len(group["failed"]) == n * ran * (outcome == "failed")


def test_a_run_that_is_cut_off_has_seen_every_value_of_every_parameter() -> None:
    """Objectives of one pass, each of which has a kernel of its own, come before the others."""
    Item = type("Item", (), {})

    def item(test: str, **params: Any) -> Any:
        one = Item()
        vars(one).update(nodeid=f"{test}{[*params.values()]}", path=test, callspec=SimpleNamespace(params=params))
        return one

    letters, numbers = ["a", "b", "c"], [1, 2, 3, 4]
    items = [item("product", x=x, n=n) for x in letters for n in numbers] + [
        item("losses", name=x) for x in ("gspo", "dapo", "cispo")
    ]
    found = on_device.in_waves(items)
    assert {*found} == {*items}
    first = [one.callspec.params for one in found[:7]]
    assert [{p[key] for p in first[:4]} for key in "xn"] == [{*letters}, {*numbers}]
    assert [p["name"] for p in first[4:]] == ["dapo", "cispo", "gspo"]
    assert on_device.FIRST.issuperset(one.nodeid for one in found[:7]) and on_device.FIRST.isdisjoint(
        one.nodeid for one in found[7:]
    )


# ---- tuning


def test_every_choice_of_a_launch_is_tuned_and_put_back() -> None:
    """Each entry of the package's tables has candidates that fit, its own first, and a workload that runs its kernel."""
    kinds = {*backend.launch.LAUNCH, "chunk"}
    assert kinds == {*tune.KINDS} == {w.kind for w in tune_settings.workloads(small=False)}
    for kind in kinds:
        now, *others = every = tune_settings.settings(kind, small=False)
        assert others and len({*map(str, every)}) == len(every) and tune_settings.setting_of(kind, now.described()) == now
        for other in others:
            with other.applied():
                assert str(tune_settings.settings(kind, small=False)[0]) == str(other)
            assert kind == "chunk" or other.fits  # type: ignore[attr-defined]
        assert tune_settings.settings(kind, small=False)[0] == now
    for fits, choice in ((False, Choice(1024, 8)), (True, Choice(512, 4, stages=4)), (False, Choice(512, 8, stages=5))):
        assert tune_settings.Launched("fused", choice).fits is fits  # registers; 256 KiB of shared memory


def test_tuning_goes_on_after_a_candidate_that_breaks_cuda_and_after_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only settings that were right everywhere are ranked. The last candidate of this measurement is the fastest."""
    names, tried = [str(s) for s in tune_settings.settings("visit", small=False)], []
    monkeypatch.setattr(tune, "compile_all", lambda jobs, workers: None)

    def tuned(file: str, failure: type[Exception] | None = None, at: int = 99) -> dict[str, Any]:
        tried.clear()

        def measured(cell: Any, device: str, *, candidates: list[Any], known: dict | None, save: Any, **_: Any) -> dict:
            rows: list[dict] = []
            for i, name in enumerate(c.name for c in candidates if not c.limit):
                wrong = name in (known or {})
                if i == at and failure is not None and not wrong:
                    raise failure(name, "broke CUDA")
                tried.append(name)
                rows.append(
                    row(name, 1000.0 - i, x_limit=1.0, runs=5) | ({"status": "failed", "reason": "it did"} if wrong else {})
                )
                save({"providers": rows, "unfinished": True})
            return {"providers": rows}

        monkeypatch.setattr(tune, "measure", measured)
        assert tune.main(["--kind", "visit", "--json", str(tmp_path / file)]) == (suites.LOST_DEVICE if failure else 0)
        return json.loads((tmp_path / file).read_text())["visit"]

    for at in (3, 5):
        tuned("a", measure.DeviceLost, at)
    ranked = [name for name, _ in tuned("a")["ranking"]]
    assert ranked == [name for name in reversed(names) if name not in (names[3], names[5])]
    with pytest.raises(KeyboardInterrupt):
        tuned("b", KeyboardInterrupt, 5)  # type: ignore[arg-type]
    cut = json.loads((tmp_path / "b").read_text())["visit"]
    assert [name for name, _ in cut["ranking"]] == names[4::-1] and cut["best"] is not None
    assert tuned("b") and len(tried) == 2 * len(names)  # nothing of the first cell was whole
    assert tuned("b") and not tried


def test_later_stages_run_with_what_was_clearly_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice, before = Choice(256, 8, programs=2, grid=1.0), dict(backend.launch.LAUNCH)
    best = {
        "fused": {"choice": choice._asdict()},
        "visit": {"choice": Choice(32, 1)._asdict()},
        "chunk": {"mib": 7, "block": 9},
    }
    by = {"fused": 0.1, "visit": 0.01, "chunk": 0.5}
    found = {kind: {"ranking": [("x", 1.0), ("now", 1 + by[kind])], "best": one, "now": "now"} for kind, one in best.items()}
    *lines, table = tune.summary(found | {"fused32": {"ranking": [], "best": None, "now": "now"}})
    assert "10.0 % slower" in lines[0] and "no setting was right" in lines[3]
    assert eval(table.removeprefix("LAUNCH = "), {"Choice": Choice}) == before | {"fused": choice, "visit": Choice(32, 1)}
    for module, name in ((backend, "LAUNCH"), (blocks, "CHUNK_BYTES"), (blocks, "BLOCK_BYTES")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    host, path = blocks.CHUNK_BYTES["cpu"], tmp_path / "choices.json"
    path.write_text(json.dumps(tune.winners(found)))
    assert tune.apply(path).keys() == {"fused", "chunk"} and before | {"fused": choice} == backend.launch.LAUNCH
    assert blocks.CHUNK_BYTES == {"cuda": 7 << 20, "cpu": host} and blocks.BLOCK_BYTES["cuda"] == 9 << 20


# ---- code that only runs on CUDA


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for the parts of torch.cuda that the stages use; the list receives the sync debug modes that were set."""
    modes: list[str] = []

    class Event:
        def __init__(self, over: bool) -> None:
            self.query = lambda: over

        def synchronize(self) -> None:
            pass

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "synchronize": lambda: None, "set_sync_debug_mode": modes.append, "Stream": lambda: stream, "current_stream": lambda: stream,
        "stream": contextlib.nullcontext, "graph": contextlib.nullcontext, "Event": Event,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None), "get_device_capability": lambda: (9, 0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return modes


def test_the_first_wait_is_found_and_the_mode_taken_back(cuda: list[str]) -> None:
    """An event that is over costs nothing, one that is not is a wait that torch's mode does not see."""

    def raises(text: str) -> None:
        raise RuntimeError(text)

    event: Any = torch.cuda.Event
    assert gpu_counters.first_wait(lambda: None) is None and gpu_counters.first_wait(event(True).synchronize) is None
    found = str(gpu_counters.first_wait(lambda: raises("called a synchronizing CUDA operation")))
    assert found.startswith("test_gpu_kit.py:") and "raise RuntimeError" in found
    assert "a synchronizing event" in str(gpu_counters.first_wait(lambda: event(False).synchronize()))
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu_counters.first_wait(lambda: raises("out of memory"))
    assert cuda == ["error", "default"] * 5
    event(False).synchronize()


@pytest.mark.parametrize(
    ("scale", "exact", "said"),
    [
        (2.0, True, "None"), (2.001, True, "other bits"), (2.001, False, "None"), (2.5, False, "off by 2.5e-01"),
        (float("nan"), False, "off by nan"), (None, True, "other bits"), (None, False, "off by"),
    ],
)  # fmt: skip
def test_a_replay_is_compared_with_a_plain_call(
    scale: float | None, exact: bool, said: str, cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in's replay repeats the step with another factor on the memory of the captured run, or does nothing."""
    given, makes = torch.ones(8), []

    def step(factor: float = 2.0) -> tuple[torch.Tensor, ...]:
        makes.append((factor * given, given.sum()))
        return makes[-1]

    def replay() -> None:
        for into, value in zip(makes[1], step(scale), strict=True) if scale is not None else ():  # the second was captured
            into.copy_(value)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=replay))
    assert said in str(gpu_counters.replay_differs(gpu_counters.Captured(given, step, exact)))


@pytest.mark.parametrize(
    ("name", "wait", "differs", "well"),
    [
        ("grpo_loss", False, None, True), ("grpo_loss", False, "a replay is off by 1.0e+00", False), ("grpo_loss", True, None, False),
        ("linear_logprobs, masked", True, None, True),  # documented
    ],
)  # fmt: skip
def test_counters_on_a_gpu(
    name: str, wait: bool, differs: str | None, well: bool, cuda: list[str], stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole stage except CUDA itself, with the CPU's backend."""
    found, event = stage("counters"), torch.cuda.Event(not wait)  # type: ignore[call-arg]
    found.device = "cpu"
    stand_ins = {
        "recompilations": 0,
        "losses": {name: lambda: event.synchronize()},
        "graphed": {name: None},
        "replay_differs": differs,
    }
    for function, value in stand_ins.items():
        monkeypatch.setattr(gpu_stages, function, lambda *_, value=value: value)
    gpu_stages.counters(found)
    assert found.found["graphs"] == {name: differs} and found.well is well
    assert {x: bool(at) for x, at in found.found["waits"].items()} == {
        name: wait,
        "TokenBatch, masked": False,
        "TokenBatch": False,
    }
    assert any(name in line and "documented" in line for line in found.found["lines"]) is (name in gpu_counters.WAITS)


def test_what_is_documented_to_wait_waits_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose tensors have no values. Row counts, whatever they are, are on its host."""
    module = torch.get_device_module
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: SimpleNamespace() if torch.device(kind).type == "meta" else module(kind)
    )

    def sets_of(ids: torch.Tensor, offsets: torch.Tensor) -> TokenSets:
        rows = offsets.numel() - 1
        size = ids.numel() // rows
        return meta_device.on_meta(TokenSets.from_counts(torch.arange(size).repeat(rows), torch.full((rows,), size)))

    monkeypatch.setattr(gpu_counters, "TokenSets", sets_of)
    monkeypatch.setattr(TokenBatch, "count", lambda batch, kind, marked=None: batch.rows // 2)
    calls = gpu_counters.calls("meta", 8, 131, 8, torch.float32)
    meta_device.make_device(monkeypatch)
    waiting = gpu_counters.WAITS.keys() - {"TokenBatch and linear_grpo_loss"}  # which waits for those counts
    assert waiting < calls.keys()
    for name, call in calls.items():
        with use(backend="eager"), pytest.raises(meta_device.WAITS) if name in waiting else contextlib.nullcontext():
            call()


def test_all_kernels_are_looked_at() -> None:
    """Those that Triton compiles by themselves, of every module of the backend."""
    folder = Path(backend.__file__).parent
    modules = [importlib.import_module(f"{backend.__package__}.{path.stem}") for path in folder.glob("triton*.py")]
    kernels = {x.__name__ for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}
    assert {name for name in kernels if name.endswith("_kernel")} == {x.__name__ for x in gpu_counters.KERNELS}


def test_what_is_captured_gives_gradients() -> None:
    for name, one in gpu_counters.graphed("cpu", 8, 131, 8, torch.float32).items():
        found = one.step()
        assert len(found) > 1 and all(x.isfinite().all() and x.any() for x in found) and one.given.is_leaf, name


# ---- suites, peers, processes


def test_a_suite_that_breaks_costs_only_itself(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each suite is a process. If a provider breaks it, it is run again without that provider; if it hangs, the others keep
    their time. The headline takes first cells only."""
    found, commands, limits = stage("comparison"), [], []
    lost = {"logits": [gpu_stages.LOST_DEVICE, gpu_stages.LOST_DEVICE, 0], "hidden": [1], "active": [None]}

    def run(kit: gpu_running.Kit, *command: str, seconds: float, **_: Any) -> int | None:
        commands.append(command)
        limits.append(seconds)
        return lost.get(command[command.index("--suite") + 1], [0]).pop(0) if kit is found else 0

    def asked() -> list[str]:
        return [command[command.index("--suite") + 1] for command in commands]

    monkeypatch.setattr(gpu_running.Kit, "python", run)
    gpu_stages.comparison(found)
    assert asked() == ["logits", "logits", *gpu_plan.COMPARED] and not found.well
    assert all(limit < 0.41 * 60 for limit in limits[:-2]) and limits[-1] > 50
    assert all(command[command.index("--choices") + 1].endswith("choices.json") for command in commands)
    outcomes = {line.split(":")[0]: line.rsplit(", ", 1)[1] for line in found.found["lines"]}
    assert outcomes == dict.fromkeys(gpu_plan.COMPARED, "ok") | {"hidden": "exit status 1", "active": "took too long"}
    commands.clear()
    gpu_stages.headline(stage("headline"))
    assert asked() == [*gpu_plan.HEADLINE] and all("--first" in command for command in commands)


def test_a_contender_or_a_wheel_that_does_not_install_costs_only_itself(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(case: Any) -> Any:
        raise Unavailable("not installed: pip install that")

    fine: Any = lambda case: None  # noqa: E731
    found = [
        Provider("here", ("logits",), fine),
        Provider("gone", ("logits",), missing),
        Provider("far", ("logits",), fine, ("cuda",)),
    ]
    monkeypatch.setattr(gpu_stages, "providers", lambda contract: found)
    kit = stage("peers", rehearse=True)
    gpu_stages.peers(kit)
    assert (
        kit.found["reasons"] == {"here": None, "gone": "not installed: pip install that", "far": "runs on cuda only"}
        and kit.well
    )
    for name in ("bad.whl", "good.whl"):
        (tmp_path / name).touch()
    kit = stage("install", wheels=tmp_path)
    monkeypatch.setattr(kit, "python", lambda *command: int(any("bad.whl" in part for part in command)))
    gpu_stages.install(kit)
    assert kit.found["wheels"] == {"bad.whl": "exit status 1", "good.whl": "ok"} and not kit.well


def test_children_time_out_and_inherit(stage: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNWANTED", "1")
    found = stage("env")
    assert found.python("-c", "import time; time.sleep(60)", seconds=0.2) is None
    code = "import os; print('variables', os.environ.get('UNWANTED'), os.environ['WANTED'])"
    assert found.python("-c", code, UNWANTED="", WANTED="2") == 0 and "variables None 2" in capfd.readouterr().out


TABLE = """==PROF== Disconnected from process 9
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","byte","byte"
"0","_fused_kernel","311164928","622329856"
"1","_fused_kernel","933494784","622329856"
"""


@pytest.mark.parametrize("counts", [True, False])
def test_ncu_counts_the_bytes_of_the_fused_kernel(
    counts: bool, stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it may, and of that kernel alone."""
    found = stage("traffic")
    monkeypatch.setattr(gpu_stages.shutil, "which", lambda *_, **__: "ncu")

    def child(*command: str) -> int:
        assert command[0] == "ncu" and command[-4:-2] == ("benchmarks.gpu_stages", "long_rows")
        Path(command[command.index("--log-file") + 1]).write_text(TABLE if counts else "==ERROR== ERR_NVGPUCTRPERM\n")
        return 0

    monkeypatch.setattr(found, "child", child)
    gpu_stages.traffic(found)
    said = (
        ["1.00 x of them read, 2.00 x written", "1.50 x of them read, 1.00 x written"]
        if counts
        else ["ncu: ok, 0 of 2 kernels counted"]
    )
    assert [line.split(": ", 1 if counts else 2)[-1] for line in found.found["lines"]] == said and found.well
    monkeypatch.setattr(gpu_stages, "ROWS", {torch.bfloat16: 2, torch.float32: 2})
    with tune_settings.on_triton(), compiling("sm_90") as launches:
        gpu_stages.long_rows(stage("long_rows", rehearse=True))
    assert [name for name, _ in launches] == ["_fused_kernel"] * 2


# ---- a rehearsal

#: What cannot run without a GPU.
WITHOUT_A_GPU = {
    "waits of the host", "host time of a call", "CUDA graphs", "registers of the kernels as loaded",
    "compute-sanitizer, which is not installed", "bytes of device memory, which ncu counts on a GPU", *(f"suite {name}" for name in suites.SUITES if name not in gpu_plan.REHEARSED_SUITES),
}  # fmt: skip


@pytest.mark.slow
def test_rehearsal_of_everything(tmp_path: Path) -> None:
    """The calls of docs/gpu.md in turn, each from the results of the one before and with an empty work folder, as on a machine that
    keeps nothing. With the versions of such a machine: in an environment that has them."""
    home: list[str] = []
    for call, stages in CALLS.items():
        out = tmp_path / str(call)
        command = [sys.executable, "-m", "benchmarks.gpu_kit", "--out", str(out), "--rehearse", "--call", str(call), *home]
        done = subprocess.run(command, cwd=ROOT, env=for_its_own_pytest(), capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-6000:]
        home = ["--resume", str(out / "results.tar.gz")]
        summary, results = (out / "summary.md").read_text(), in_archive(out / "results.tar.gz")
        assert all(f"| {stage.name} | ok |" in summary for stage in stages) and "0 failed" in summary
        left = [name for stage in stages for name in json.loads(results[f"json/{stage.name}.json"]).get("left_out", [])]
        assert {*left} <= WITHOUT_A_GPU and len([*out.iterdir()]) <= 8
    assert "LAUNCH = {" in summary and "recompilations over random lengths and schedules: 0" in summary
