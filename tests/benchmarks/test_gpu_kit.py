"""The GPU kit without a GPU: what would lose its minutes or its figures. Its runner and plan, what
it continues from, its conclusions, the tuner, the lines that only run on CUDA (with stand-ins), and
a rehearsal on the CPU.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from support.processes import checked_output, for_its_own_pytest

pytest.importorskip("triton")


from benchmarks import gpu_counters, gpu_kit, gpu_stages, suites, tune
from benchmarks.gpu_kit import CALLS, CASES, Stage
from benchmarks.measure import DeviceLost
from benchmarks.providers import providers

ROOT = Path(__file__).parents[2]
Choice = tune.Choice


@pytest.fixture
def stage(tmp_path):
    """Makes a running stage of 60 seconds."""
    (tmp_path / "json").mkdir()
    return lambda name, **options: gpu_stages.Kit(name, tmp_path, 60, **options)


# ---- the runner


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ("", "ok"), ("raise SystemExit(3)", "exit status 3"), ("os.abort()", "ended by SIGABRT"),
        ("subprocess.run([sys.executable, '-c', child])", "out of time after 2 s"),
    ],
)  # fmt: skip
def test_how_a_stage_ends(end, outcome, tmp_path, monkeypatch):
    """One that hangs with its child.

    Its time is over once the child has written its process id, however long that takes.
    """
    log, seconds = tmp_path / "log", 30
    if "child" in end:
        monkeypatch.setattr(gpu_kit, "PACK_EVERY", 0.1)
        monkeypatch.setattr(
            gpu_kit,
            "time",
            SimpleNamespace(
                monotonic=lambda: 2.0 * (log.exists() and log.read_text().endswith("\n"))
            ),
        )
        seconds = 2
    child = "child = 'import os, time; print(os.getpid(), flush=True); time.sleep(100)'"
    command = [sys.executable, "-c", f"import os, subprocess, sys; {child}; {end}"]
    assert gpu_kit.run_stage(command, log, seconds, {**os.environ}) == outcome
    status = Path(f"/proc/{log.read_text().strip() or 0}/stat")
    for _ in range(300):  # whoever inherits it has to collect it
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the stage's child is still running")


class Runs:
    """In place of stages:

    each writes its results, takes `spends` and ends as `ends` say. `seconds`: their limits, in
    order.
    """

    def __init__(self, patch):
        self.now, self.seconds, self.ends, self.spends = 0.0, {}, {}, {}
        patch.setattr(gpu_kit, "time", SimpleNamespace(monotonic=lambda: self.now, time=time.time))
        patch.setattr(gpu_kit, "run_stage", self.run)
        patch.setattr(gpu_kit.Kit, "command", lambda kit, stage, seconds: [stage, str(kit.work)])

    def run(self, command, log, seconds, *_):
        name, work = command
        self.seconds[name] = seconds
        self.now += min(seconds, self.spends.get(name, 0.1))
        (Path(work) / "json" / f"{name}.json").write_text(
            json.dumps({"lines": [f"found by {name}"]})
        )
        log.write_text(f"log of {name}")
        return self.ends.get(name, "ok")

    def __call__(self, out, options):
        self.seconds.clear()
        status = gpu_kit.main(["--out", str(out), "--minutes", "10", *options.split()])
        assert status == any(name in self.ends for name in self.seconds)
        return [*self.seconds]


@pytest.fixture
def runs(monkeypatch):
    return Runs(monkeypatch)


def test_time_is_kept_for_later_stages_and_what_was_found_is_packed(runs, tmp_path):
    """Of 10 seconds the first two may not use the 8 that are the last one's, so that nothing is
    left for the third.
    """
    kit, runs.ends, runs.spends = (
        gpu_kit.Kit(tmp_path / "out", tmp_path / "work"),
        {"crashes": "ended"},
        {"hangs": 100.0},
    )
    gpu_kit.run(
        kit,
        [*(Stage(name, 600, 0) for name in ("crashes", "hangs", "late")), Stage("kept", 300, 240)],
        minutes=1 / 6,
    )
    assert [one["status"] for one in kit.stages.values()] == ["ended", "ok", "no time left", "ok"]
    assert 1 < runs.seconds["crashes"] < 2 and 7 < runs.seconds["kept"] <= 8
    with tarfile.open(kit.out / "results.tar.gz") as tar:
        packed = {*tar.getnames()}
    text = (kit.out / "summary.md").read_text()
    assert "json/kit.json" in packed and all(
        f"found by {x}" in text and f"json/{x}.json" in packed for x in runs.seconds
    )


def test_a_call_goes_on_where_an_earlier_one_was(runs, tmp_path):
    """From its results.

    A stage that failed, or that is named, is run again; so is what each machine needs.
    """
    out, home, runs.ends = tmp_path / "out", tmp_path / "home.tar.gz", {"counters": "exit status 1"}
    assert runs(out, "--call 1") == [stage.name for stage in CALLS[1]]
    (out / "results.tar.gz").rename(home)
    assert runs(out, f"--call 1 --resume {home}") == ["install", "counters", "plots"]
    assert runs(out, f"--resume {home} --stages env") == ["env"]
    for wrong in ("--resume none.tar.gz", "--wheels /no/such", "--stages nothing"):
        with pytest.raises(SystemExit):
            runs(out, wrong)


def test_a_rehearsal_selects_tests_that_exist():
    """An alternative of -k that names a renamed test selects nothing, without an error."""
    names: set[str] = set()
    for cases in CASES.values():
        for file in cases.files:
            names |= {*re.findall(r"def (test_\w+)", (ROOT / "tests" / file).read_text())}
    for alternative in gpu_kit.REHEARSED.split(" or "):
        word = alternative.strip("()").split(" and ")[0]
        assert any(word in name for name in names), word


def test_the_plan_fits_its_calls_and_names_what_there_is():
    assert {stage.name for stages in CALLS.values() for stage in stages} | {
        "small",
        "large",
    } == gpu_stages.STAGES.keys()
    assert all(
        400 < sum(stage.kept for stage in stages) < 500 for stages in CALLS.values()
    )  # seconds of ten minutes
    assert sorted((*gpu_kit.COMPARED, *gpu_kit.FURTHER)) == sorted(suites.SUITES)
    assert {*gpu_kit.HEADLINE, *gpu_kit.REHEARSED_SUITES} <= {*suites.SUITES}
    assert sum(cases.share for cases in CASES.values()) == pytest.approx(1)
    assert all(
        (ROOT / "tests" / file).is_file() for cases in CASES.values() for file in cases.files
    )


# ---- conclusions


def row(name, ms, **more):
    return {"name": name, "status": "ok", "ms": ms} | more


def cell(limit, *rows, **shape):
    base = {"rows": 8192, "vocab": 151936, "dtype": "bfloat16", "hidden": 4096, "active": 1.0}
    return base | shape | {"limit": {"name": "limit", "ms": limit}, "providers": list(rows)}


def test_targets_are_read_off_the_results_and_what_is_missing_is_not_met():
    """Of the providers that there are: if one is renamed, its target must not silently become "not
    measured". Half of the rows are due two thirds of the products; the target is set against all
    three of all rows.
    """
    times = {"copy": 1.0, "grpo_kernels, in place": 1.0, "Liger GRPO loss": 1.3}
    every = {
        x: [row(p.name, times.get(p.name, 60.0), extra_mb=3500.0) for p in providers(x)]
        for x in ("logits", "hidden")
    }
    found = {
        x: {"cells": [cell(9.0, vocab=128256), cell(40.0, *rows)]} for x, rows in every.items()
    }
    found["active"] = {"cells": [cell(40.0), cell(26.7, row("grpo_kernels", 28.0), active=0.5)]}
    counters = {
        "recompilations": 0, "waits": {"a": None, "b": "batch.py:3", "c": "batch.py:3"}, "documented": {"c": "it has to"},
        "graphs": {"a": None, "b": "refused"},
    }  # fmt: skip
    tests = {"groups": {"x": {"largest": {"logps": 2e-6, "d_hidden": 1e-3}}}}
    met = [target.met for target in gpu_kit.targets(found, counters, tests)]
    assert met == [
        True,
        False,
        True,
        False,
        True,
        False,
        False,
        True,
        True,
        False,
        True,
        False,
        True,
    ]
    assert all(target.met is None for target in gpu_kit.targets({}, {}, {}))


@pytest.mark.parametrize(("ran", "failed", "well"), [(3, 0, True), (2, 0, False), (3, 1, False)])
def test_no_time_for_all_combinations_is_no_failure(ran, failed, well, stage, monkeypatch):
    """Each group has five cases, of which three cover all values of the parameters.

    The largest error of each test is kept.
    """
    found = stage("correctness")

    def out_of_time(*command, GRPO_KERNELS_TEST_REPORT, **_):
        lines = [{"collected": {"a": 5}, "first": {"a": 3}}]
        each = {"message": "so wrong", "properties": {"off": 0.5}}
        lines += [
            each | {"test": f"a::test_it[{i}]", "outcome": "failed" if i < failed else "passed"}
            for i in range(ran)
        ]
        Path(GRPO_KERNELS_TEST_REPORT).write_text("\n".join(map(json.dumps, lines)))

    monkeypatch.setattr(found, "python", out_of_time)
    gpu_stages.correctness(found)
    assert found.well is well
    for group in found.found["groups"].values():
        assert (group["ran"], len(group["failed"]), group["largest"]) == (
            ran,
            failed,
            {"test_it, off": 0.5},
        )


# ---- tuning


def test_the_tuner_can_run_triton_on_a_cpu():
    with tune.on_triton():
        backend = tune.backends.pick("auto", torch.device("cpu"))
    assert isinstance(backend, tune.backend.Kernels)


def test_every_choice_of_a_launch_is_tuned_and_put_back():
    """Each entry of the package's tables has candidates that fit, its own first, and a workload
    that runs its kernel.
    """
    kinds, workloads = {*tune.backend.launch.LAUNCH, "chunk"}, tune.workloads(small=False)
    assert kinds == {*tune.KINDS} == {w.kind for w in workloads}
    assert all(w.candidate(tune.settings(w.kind, True)[0]).contracts for w in workloads)
    for kind in kinds:
        now, *others = every = tune.settings(kind, small=False)
        assert (
            others
            and len({*map(str, every)}) == len(every)
            and tune.setting_of(kind, now.choice._asdict()) == now
        )
        for other in others:
            with other.applied():
                assert other.fits and tune.settings(kind, small=False)[0] == other
        assert tune.settings(kind, small=False)[0] == now
    for fits, choice in (
        (False, Choice(1024, 8)),
        (True, Choice(512, 4, stages=4)),
        (False, Choice(512, 8, stages=5)),
    ):
        assert tune.Setting("fused", choice).fits is fits  # registers; 256 KiB of shared memory


def test_tuning_goes_on_after_a_candidate_that_breaks_cuda(tmp_path, monkeypatch):
    """Without it.

    Only settings that were right in every workload are ranked; the last one of this measurement is
    the fastest.
    """
    names, broken = (
        [str(s) for s in tune.settings("one_pass", small=False)],
        {"logits-forward": 3, "logits": 5},
    )

    def measured(cell, device, *, candidates, known, **_):
        if names[broken[cell.contract]] not in (known or {}):
            raise DeviceLost(names[broken[cell.contract]], "broke CUDA")
        return {
            "providers": [
                row(x, 999.0 - i, status="failed" if x in known else "ok")
                for i, x in enumerate(names)
            ]
        }

    for function, value in (
        ("compile_all", lambda *_: None),
        ("details", lambda *_, **__: ""),
        ("measure", measured),
    ):
        monkeypatch.setattr(tune, function, value)
    command = ["--kind", "one_pass", "--json", str(tmp_path / "found")]
    assert [tune.main(command) for _ in range(3)] == [suites.LOST_DEVICE, suites.LOST_DEVICE, 0]
    ranking = json.loads((tmp_path / "found").read_text())["one_pass"]["ranking"]
    assert [name for name, _ in ranking] == [
        x for x in reversed(names) if x not in (names[3], names[5])
    ]


def test_later_stages_run_with_what_was_clearly_faster(tmp_path, monkeypatch):
    fused, visit = (Choice(256, 8, programs=2), Choice(32, 1))
    best = {
        "fused": (fused._asdict(), 1.1),
        "one_pass": (visit._asdict(), 1.01),
        "chunk": ({"mib": 7, "block": 9}, 1.5),
    }
    found = {
        kind: {"ranking": [("x", 1.0), ("now", now)], "best": one, "now": "now"}
        for kind, (one, now) in best.items()
    }
    (tmp_path / "choices.json").write_text(json.dumps(tune.winners(found)))
    assert f'"fused": {fused}' in tune.summary(found)[-1]  # the table to paste
    tables = [tune.backend.launch.LAUNCH, tune.blocks.CHUNK_BYTES, tune.blocks.BLOCK_BYTES]
    changes = [{"fused": fused}, {"cuda": 7 << 20}, {"cuda": 9 << 20}]
    expected = [table | change for table, change in zip(tables, changes, strict=True)]
    for table in tables:
        monkeypatch.setitem(table, "cuda" if "cuda" in table else "fused", None)
    tune.apply(tmp_path / "choices.json")
    assert tables == expected


# ---- code that only runs on CUDA


@pytest.fixture
def cuda(monkeypatch):
    """In place of torch.cuda; an event is over or not."""
    over = {
        "synchronize": lambda self: None,
        "__init__": lambda self, over: setattr(self, "query", lambda: over),
    }
    monkeypatch.setattr(torch, "cuda", MagicMock(Event=type("Event", (), over)))
    return torch.cuda


def test_the_first_wait_is_found_and_the_mode_taken_back(cuda):
    """An event that is over costs nothing, one that is not is a wait that torch's mode does not
    see.
    """

    def raises(text):
        raise RuntimeError(text)

    event = torch.cuda.Event
    assert (
        gpu_counters.first_wait(lambda: None) is None
        and gpu_counters.first_wait(event(True).synchronize) is None
    )
    found = str(gpu_counters.first_wait(lambda: raises("called a synchronizing CUDA operation")))
    assert found.startswith("test_gpu_kit.py:") and "raise RuntimeError" in found
    assert "a synchronizing event" in str(
        gpu_counters.first_wait(lambda: event(False).synchronize())
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu_counters.first_wait(lambda: raises("out of memory"))
    assert [call.args for call in cuda.set_sync_debug_mode.call_args_list] == [
        ("error",),
        ("default",),
    ] * 5
    event(False).synchronize()


@pytest.mark.parametrize(
    ("scale", "exact", "said"),
    [
        (2.0, True, "None"), (2.001, True, "other bits"), (2.001, False, "None"), (float("nan"), False, "off by nan"),
        (None, False, "off by"),
    ],
)  # fmt: skip
def test_a_replay_is_compared_with_a_plain_call(scale, exact, said, cuda, monkeypatch):
    """The stand-in's replay repeats the step with another factor on the memory of the captured run,
    or does nothing.
    """
    given, makes = torch.ones(8), []

    def step(factor=2.0):
        makes.append((factor * given, given.sum()))
        return makes[-1]

    def replay():
        for into, value in (
            zip(makes[1], step(scale), strict=True) if scale is not None else ()
        ):  # the second was captured
            into.copy_(value)

    cuda.CUDAGraph.return_value.replay = replay
    call = gpu_counters.StepOfCall(given, step, exact)
    assert said in str(gpu_counters.replay_differs(call))


@pytest.mark.parametrize(
    ("waiting", "well"), [("linear_logprobs, masked", True), ("grpo_loss", False)]
)
def test_counters_on_a_gpu(waiting, well, cuda, stage, monkeypatch):
    """A wait is a failure unless it is documented."""
    found, event = stage("counters"), torch.cuda.Event(False)
    found.device = "cpu"
    steps = {"token_logprobs": lambda: None, waiting: lambda: event.synchronize()}
    made = {name: SimpleNamespace(step=step) for name, step in steps.items()}
    for function, value in {
        "recompilations": 0,
        "calls": made,
        "batches": {},
        "replay_differs": None,
    }.items():
        monkeypatch.setattr(gpu_counters, function, lambda *_, value=value: value)
    monkeypatch.setattr(gpu_counters, "CAPTURED", (waiting,))
    gpu_stages.counters(found)
    assert found.well is well and {name for name, wait in found.found["waits"].items() if wait} == {
        waiting
    }
    assert found.found["host_ms"].keys() == made.keys() and found.found["graphs"] == {waiting: None}


def test_a_suite_that_breaks_costs_only_itself(stage, monkeypatch):
    """Each suite is a process. If a provider breaks it, it is run again without that provider; if
    it hangs, the others keep their time.
    """
    asked = []
    ends = {
        "logits": [gpu_stages.LOST_DEVICE, gpu_stages.LOST_DEVICE, 0],
        "hidden": [1],
        "active": [None],
    }

    def run(kit, *command, seconds, **_):
        asked.append((command[command.index("--suite") + 1], seconds))
        return ends.get(asked[-1][0], [0]).pop(0)

    monkeypatch.setattr(gpu_stages.Kit, "python", run)
    kit = stage("comparison")
    gpu_stages.compare(kit)
    assert [line.rsplit(", ", 1)[1] for line in kit.found["lines"]] == [
        "ok",
        "exit status 1",
        "took too long",
        "ok",
    ]
    assert [name for name, _ in asked] == ["logits", "logits", *gpu_kit.COMPARED] and not kit.well
    assert all(seconds < 0.41 * 60 for _, seconds in asked[:-2]) and asked[-1][1] > 50


# ---- a rehearsal

#: What cannot run without a GPU.
WITHOUT_A_GPU = {
    "waits of the host", "host time of a call", "CUDA graphs", "registers of the kernels as loaded",
    "compute-sanitizer, which is not installed", "bytes of device memory, which Nsight Compute counts",
    *(f"suite {name}" for name in suites.SUITES if name not in gpu_kit.REHEARSED_SUITES),
}  # fmt: skip


@pytest.mark.slow
def test_rehearsal_of_everything(tmp_path):
    """The calls of benchmarks/README.md in turn, each from the results of the one before and with an empty
    work folder, as on a machine that keeps nothing. With the versions of such a machine: in an
    environment that has them.
    """
    home = []
    for call, stages in CALLS.items():
        out = tmp_path / str(call)
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu_kit",
            "--out",
            str(out),
            "--rehearse",
            "--call",
            str(call),
            *home,
        ]
        command += ["--minutes", "60"]  # of a CPU, which may have other work
        checked_output(command, cwd=ROOT, env=for_its_own_pytest(), timeout=3600)
        home = ["--resume", str(out / "results.tar.gz")]
        summary = (out / "summary.md").read_text()
        assert (
            all(f"| {stage.name} | ok |" in summary for stage in stages) and "0 failed" in summary
        )
        assert {*re.findall("^left out: (.*)", summary, re.M)} <= WITHOUT_A_GPU and len(
            [*out.iterdir()]
        ) <= 8
    assert (
        "LAUNCH = {" in summary and "recompilations over random lengths and schedules: 0" in summary
    )
