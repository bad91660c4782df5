"""What would make a figure of the benchmarks wrong: a contender that computes something else, one
that is missing without a reason, times that are not those of a run, limits that are none, inputs
that hide an error; figures of other code or of another machine, and tables and pictures that show
something else. Shapes are tiny, and torch.compile runs in eager mode.
"""

from __future__ import annotations

import copy
import math
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("transformers")  # of the step
pytest.importorskip("triton")

from benchmarks import __main__ as command
from benchmarks import harness, machine, report, results, suites
from benchmarks import measure as measuring
from benchmarks.cases import CLIP, CONTRACTS, Cell, errors, make_case, policy_loss
from benchmarks.measure import DeviceLost, Run, measure, outside_gate
from benchmarks.providers import Provider, Unavailable, matmul_slowdown, providers
from benchmarks.results import RESULTS
from benchmarks.tables import details, ratio
from grpo_kernels.diagnosis import Finding

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Found = dict[str, Any]
MEASURED = sorted(RESULTS.glob("*/*.json"))
KINDS = sorted({path.parent.name for path in MEASURED})


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Switches the poisoning off: other projects may leave new tensors uninitialised."""


@pytest.fixture(autouse=True)
def nothing_compiles():
    with torch.compiler.set_stance("force_eager"):
        yield


def tiny(contract="logits", dtype=FP32, **changes):
    """32 rows, 512 columns, and a width of 128 where there are hidden states."""
    own = {"step": {"layers": 1}, "trees": {"shared": 0.5}}.get(contract, {})
    hidden = None if contract.startswith("logits") else 128
    return Cell(
        **{"contract": contract, "rows": 32, "vocab": 512, "dtype": dtype, "hidden": hidden}
        | own
        | changes
    )


def quickly(cell, candidates=None, **how):
    """{provider: its row}, and the whole cell under ""."""
    cell = measure(
        cell, "cpu", candidates=candidates, **{"seconds": 0.0, "least": 1, "memory": False} | how
    )
    return {row["name"]: row for row in cell["providers"]} | {"": cell}


def contender(name, change=lambda found: found, loss=policy_loss, **how):
    """A right contender from logits, with its loss or its result changed."""

    def call(case):
        logps = case.logits.float().log_softmax(-1).gather(1, case.batch.targets[:, None])[:, 0]
        return change(case.gradients(loss(logps, case.batch, case.cell)))

    return Provider(name, ("logits",), lambda case: Run(lambda: call(case), case.restore), **how)


def fail(failure=None):
    raise failure or RuntimeError("out of something")


# ---- the accuracy check


def one_row(factor):
    """A row of usual size scaled.

    In 8192 rows of 16 bits, four lost rows would change the norm by half of the limit only.
    """

    def change(found):
        gradient = found["d_logits"]
        gradient[int(gradient.float().norm(dim=1).sort().indices[len(gradient) // 2])] *= factor
        return found

    return change


WRONG = {
    "a row of zeros": {"change": one_row(0.0)},
    "a row of NaN": {"change": one_row(math.nan)},
    "k1 for k3": {
        "loss": lambda p, b, cell: (
            policy_loss(p, b, replace(cell, contract="hidden"))
            + cell.beta * (p - b.ref_logps).mean()
        )
    },
    "a gradient by 1 %": {"change": lambda found: found | {"d_logits": 1.01 * found["d_logits"]}},
    "a loss by 0.001": {"change": lambda found: found | {"loss": found["loss"] + 0.001}},
}


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_contender_that_computes_something_else_shows_its_error_and_is_not_timed(dtype):
    """In 16 bits a small error is rounding."""
    every = [name for name in WRONG if dtype == FP32 or " by " not in name]
    rows = quickly(
        tiny(dtype=dtype, rows=1024),
        [contender("right"), *(contender(x, **WRONG[x]) for x in every)],
    )
    assert rows["right"]["status"] == "ok" and rows["right"]["ms"] > 0
    for row in (rows[name] for name in every):
        assert row["status"] == "wrong" and "off by" in row["reason"] and "ms" not in row, row


def test_errors_by_hand():
    """Log-probs: the largest difference. The loss: by the scale. A gradient: relative, of all rows
    and of the worst, whose norm counts as a fifth of the usual one at least. Where logits nearly
    agree, a row may be off by more.
    """
    d_x, norm = torch.tensor([[3.0, 4.0], [0.0, 5.0], [0.0, 0.1]]), 50.01**0.5
    want = {"loss": torch.ones(()), "logps": torch.zeros(3), "d_x": d_x}
    found = {
        "loss": torch.tensor(1.5),
        "logps": torch.tensor([0.0, -0.25, 0.125]),
        "d_x": d_x * torch.tensor([[1.0], [1.0], [0.0]]),
    }
    off = errors(found, want, scale=2.0)
    assert (off["loss"], off["logps"]) == (0.25, 0.25) and off["d_x"] == pytest.approx(
        0.1 / norm, rel=1e-5
    )
    assert off["d_x, worst row"] == pytest.approx(0.1 / (0.2 * norm / 3**0.5), rel=1e-5)
    for contract, most in (("logits", 0.3), ("logits-divergence", 0.6)):
        gate = [
            outside_gate(tiny(contract, BF16), {"d_logits, worst row": x * most})
            for x in (0.9, 1.1, math.nan)
        ]
        assert [why is None for why in gate] == [True, False, False]


# ---- who takes part, and why not


def test_who_is_not_timed_has_a_reason():
    """A provider of another contract, as its name says, is timed and not checked."""
    expected = {
        "raises": (
            "KeyError: 'no such thing'",
            {"change": lambda _: fail(KeyError("no such thing"))},
        ),
        "absent": ("pip install it", {"change": lambda _: fail(Unavailable("pip install it"))}),
        "elsewhere": ("runs on cuda only", {"devices": ("cuda",)}),
        "narrow": ("does not take float32", {"dtypes": (BF16,)}),
        "huge": ("would need 1000000 GB", {"memory": lambda cell: 1e15}),
        "known": ("broke CUDA", {}),
        "other": (
            "",
            {
                "change": lambda found: found | {"loss": found["loss"] + 1},
                "differs_from_contract": True,
            },
        ),
    }
    rows = quickly(
        tiny(),
        [contender(name, **how) for name, (_, how) in expected.items()],
        known={"known": "broke CUDA"},
    )
    text = details(rows.pop(""), markdown=False)
    for name, row in rows.items():
        assert expected[name][0] in row.get("reason", "") and ("ms" in row) is (name == "other"), (
            row
        )
        assert name in text and row.get("reason", "") in text


def test_eager_is_not_measured_in_place_of_missing_kernels(monkeypatch):
    monkeypatch.setattr(
        machine.backends,
        "unavailable",
        lambda name: None if name == "eager" else "no compiler here",
    )
    for contract in ("logits", "hidden", "kept", "divergence"):
        rows = quickly(
            tiny(contract), [p for p in providers(contract) if p.name.startswith("grpo_kernels")]
        )
        for row in rows.pop("")["providers"]:
            eager = "eager backend" in row["name"]
            assert row["status"] == ("ok" if eager else "skipped") and (
                eager or "no compiler here" in row["reason"]
            ), row
    with pytest.raises(SystemExit, match="cuda tensors do not run: no compiler here"):
        machine.require_kernels("cuda")


@pytest.mark.parametrize(
    "contract", [pytest.param(c, marks=pytest.mark.slow) if c == "step" else c for c in CONTRACTS]
)
def test_every_provider_that_runs_here_is_right(contract, monkeypatch):
    """And so are the reference results, which are computed some rows at a time. Providers are found
    by their file, and plans name those that there are.
    """
    dtype = BF16 if contract in ("logits-forward", "hidden-frozen") else FP32
    monkeypatch.setattr(
        "benchmarks.cases.row_blocks",
        lambda cell, size, device: (slice(lo, lo + 8) for lo in range(0, 32, 8)),
    )
    cell = quickly(tiny(contract, dtype, active=0.5)).pop("")
    for row in cell["providers"]:
        skipped = row["status"] == "skipped" and row["reason"]
        own = (
            row["name"].startswith(("grpo_kernels", "eager PyTorch", "torch.compile"))
            and "16-bit" not in row["name"]
        )
        assert row["status"] == "ok" or (skipped and not own), row
    assert contract == "step" or cell["limit"]["ms"] == min(
        row["ms"] for row in cell["providers"] if row.get("limit") and "ms" in row
    )
    known = [p.name for p in providers(contract)]
    assert len({*known}) == len(known) and known[0].startswith("grpo_kernels")
    plans = [
        suite.plan(device, q)
        for suite in suites.SUITES.values()
        for device in ("cpu", "cuda")
        for q in (False, True)
    ]
    for one in (one for plan in plans for one in plan if one.cell.contract == contract):
        assert any(x.startswith("grpo_kernels") for x in {*(one.only or known)} & {*known})


def test_broken_cuda_is_told_from_a_failure(monkeypatch):
    lost = lambda *_: fail(RuntimeError("CUDA error: an illegal memory access was encountered"))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(DeviceLost, match="reckless: RuntimeError: CUDA error"):
        measuring._attempt(contender("reckless"), "cuda", lost)


# ---- the limit for one run


@pytest.fixture
def slow(clock):
    """Makes a contender whose runs take the given seconds, one after the other, by the fake clock.

    `slow.runs` counts the runs of each.
    """

    def make(name, *seconds, **fields):
        left = [*seconds]

        def change(found):
            make.runs[name] = make.runs.get(name, 0) + 1
            clock[0] += left.pop(0) if len(left) > 1 else left[0]
            return found

        return contender(name, change, **fields)

    make.runs = {}
    return make


def test_a_provider_whose_first_run_exceeds_the_limit_is_not_run_again(slow):
    """Contenders and limits alike. A first run of torch.compile also compiles, so that the second
    one counts.
    """
    expected = {"eager": 72.0, "a limit": 31.0, "torch.compile, slow": 45.0}
    candidates = [
        slow("fast", 29.0),
        slow("eager", 72.0),
        slow("a limit", 31.0, limit=True),
        slow("torch.compile, slow", 90.0, 45.0),
        slow("torch.compile, fast", 90.0, 1.0),
    ]
    rows = quickly(tiny(), candidates)
    text = details(rows.pop(""), markdown=False)
    for name, row in rows.items():
        if name not in expected:
            assert row["status"] == "ok" and "ms" in row and "run_seconds" not in row, row
            continue
        reason = f"one run takes {expected[name]:.0f} s, more than the limit of 30 s"
        assert (row["status"], row["reason"]) == ("skipped", reason) and reason in text
        assert row["run_seconds"] == expected[name] and "ms" not in row
        assert slow.runs[name] == (2 if "compile" in name else 1)


@pytest.mark.parametrize("slowdown", [9.0, 22.4])
def test_torch_matmuls_of_16_bits_are_not_run_where_they_are_slow(slowdown, monkeypatch):
    slowdowns = {torch.float32: 1.0, torch.bfloat16: slowdown}
    monkeypatch.setattr("benchmarks.providers.matmul_slowdown", slowdowns.get)
    from_hidden = Cell("hidden", 16, 151936, torch.bfloat16, 1024)
    cells = {
        "bf16": from_hidden,
        "fp32": replace(from_hidden, dtype=torch.float32),
        "small": replace(from_hidden, vocab=64),
        "logits": replace(from_hidden, contract="logits", hidden=None),
        "kept": replace(from_hidden, contract="kept"),
    }
    reasons = {
        (name, cell): Provider(name, (), fail).reason_against(cells[cell], "cpu", 1e9)
        for name in (
            "eager PyTorch",
            "grpo_kernels, in place",
            "d_weight, ours",
            "d_weight, oneDNN",
        )
        for cell in cells
    }
    for (name, cell), reason in reasons.items():
        is_slow = cell == "bf16" and name in ("eager PyTorch", "d_weight, oneDNN")
        if is_slow and slowdown > 10:
            expected = "torch's bfloat16 matmuls take 22 times as long as fp32 ones here"
            assert reason == expected
        else:
            assert reason is None, (name, cell)


def test_the_slowdown_of_a_matmul_is_1_in_fp32_and_positive_in_bf16():
    assert matmul_slowdown(torch.float32) == 1.0
    assert 0.0 < matmul_slowdown(torch.bfloat16) < 1e4


def test_a_provider_that_was_too_slow_at_fewer_rows_is_not_run_at_more(slow):
    """The time at the most rows counts, and a time in float32 only without one in 16 bits."""

    def cell(rows, dtype, seconds, **changes):
        provider, ms = {"name": "eager", "status": "ok"}, 1e3 * seconds
        measured = provider | ({"ms": ms} if seconds <= 30 else {"run_seconds": seconds})
        return measuring.describe(tiny(rows=rows, dtype=dtype, **changes)) | {
            "providers": [measured, {"name": "fast", "status": "skipped", "reason": "by itself"}]
        }

    small, large = cell(32, BF16, 17.5), cell(64, BF16, 16.0)
    for earlier, reason in (
        ([], None),
        ([small], "a run would take about 70 s (17.5 s at 32 rows)"),
        ([cell(32, BF16, 72.0)], "a run would take about 288 s (72.0 s at 32 rows)"),
        ([large, small], "a run would take about 32 s (16.0 s at 64 rows)"),
        ([cell(32, BF16, 7.4)], None),
        ([cell(32, FP32, 17.5)], "a run would take about 70 s (17.5 s at 32 rows)"),
        ([cell(32, FP32, 17.5), cell(32, BF16, 1.0)], None),
        ([cell(32, FP16, 17.5)], None),
        ([cell(32, BF16, 17.5, vocab=1024)], None),
        ([cell(32, BF16, 17.5, contract="logits-forward")], None),
    ):
        candidates = [slow("fast", 1.0), slow("eager", 1.0)]
        slow.runs.clear()
        rows = quickly(tiny(rows=128, dtype=BF16), candidates, earlier=earlier)
        assert rows["fast"]["status"] == "ok" and rows["eager"].get("reason") == reason
        assert ("eager" in slow.runs) is (reason is None)
        assert (rows["eager"]["status"] == "skipped") is (reason is not None)


def test_times_in_16_bits_say_nothing_of_float32(slow):
    earlier = measuring.describe(tiny(dtype=BF16)) | {
        "providers": [{"name": "eager", "status": "ok", "ms": 17500.0}]
    }
    rows = quickly(tiny(rows=128), [slow("eager", 1.0)], earlier=[earlier])
    assert rows["eager"]["status"] == "ok"


# ---- limits


def test_a_limit_of_parts_is_the_sum_of_the_fastest_ways(monkeypatch):
    """And the ratio to the limit is that to the fastest of them."""
    times = {
        "right": 66.0,
        "a, slow": 30.0,
        "a, fast": 10.0,
        "b, only": 20.0,
        "copy": 33.0,
        "b, broken": 1.0,
    }
    found = {name: {"ms": ms, "p20": 1.0, "p80": 9.0, "runs": 5} for name, ms in times.items()}
    monkeypatch.setattr(
        measuring, "interleaved", lambda runs, *_, **__: {name: found[name] for name in runs}
    )

    def way(name):
        made = lambda case: fail() if "broken" in name else Run(lambda: None)  # noqa: E731
        return Provider(
            name,
            ("logits",),
            made,
            limit=True,
            part=name.partition(",")[0] if "," in name else None,
        )

    rows = quickly(tiny(), [contender("right"), *map(way, [*times][1:])])
    assert rows[""]["limit"] == {"name": "products", "ms": 30.0} and rows["products"]["of"] == [
        "a, fast",
        "b, only",
    ]
    assert (
        ratio(rows[""], rows["right"]),
        rows["right"]["x_copy"],
        ratio(rows[""], rows["copy"]),
    ) == (2.2, 2.0, 1.1)


def test_a_limit_is_the_product_that_it_is_named_by():
    """Of the operand that was made for it, untimed."""
    case, seen = make_case(tiny("hidden"), "cpu"), set()
    h, w = case.hidden.detach(), case.weight.detach()
    expected = {
        "logits": lambda _: h @ w.t(),
        "d_hidden": lambda d: d @ w,
        "d_weight": lambda d: d.t() @ h,
    }
    for limit in (p for p in providers("hidden") if p.part and "chunks" not in p.name):
        run = limit.make(case)
        (run.restore or (lambda: None))()
        found = run.call()
        product, operand = found if isinstance(found, tuple) else (found, None)
        torch.testing.assert_close(product, expected[limit.part](operand), rtol=1e-3, atol=1e-3)
        seen.add(limit.part)
    assert seen == expected.keys()


# ---- inputs


def test_old_log_probs_keep_away_from_the_clip_bounds():
    """In 16 bits too, so that rounding cannot look like a wrong formula.

    As many sequences as asked for have an advantage.
    """
    case = make_case(tiny("logits", BF16, rows=1024, active=0.125), "cpu")
    off = (
        case.logits.detach().double().log_softmax(-1).gather(1, case.batch.targets[:, None])[:, 0]
        - case.batch.old_logps
    )
    assert all((off - math.log(1 + bound)).abs().min() > 0.05 for bound in (-CLIP[0], CLIP[1]))
    assert all(x.float().mean() > 0.15 for x in (off.abs() < 0.15, off > 0.15, off < -0.15))
    assert (case.batch.advantages.view(16, 64) != 0).sum(1).sort().values.tolist() == [0] * 14 + [
        64
    ] * 2


# ---- clocks, memory and counters


@pytest.fixture
def clock(monkeypatch):
    """The harness's clock, which only the test moves."""
    now = [7.0]
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_rounds_are_interleaved_rotated_and_timed_alone(clock):
    """A warm-up, then three rounds.

    What is restored before a run is not timed; a time is the median, with quantiles.
    """
    order = []
    lengths = {
        "a": [99.0, 10.0, 40.0, 20.0],
        "b": [99.0, 5.0, 5.0, 5.0],
        "c": [99.0, 7.0, 8.0, 9.0],
    }

    def spend(name, ms):
        order.append(name)
        clock[0] += ms / 1e3

    runs = {name: lambda name=name: spend(name, lengths[name].pop(0)) for name in lengths}
    found = harness.interleaved(
        runs, "cpu", lambda name: spend(name.upper(), 1e5), seconds=0.0, least=3
    )
    assert "".join(order) == "AaBbCc" + "BbCcAa" + "CcAaBb" + "AaBbCc"
    assert [one["ms"] for one in found.values()] == pytest.approx([20.0, 5.0, 8.0])
    assert (found["a"]["p20"], found["a"]["p80"], found["a"]["runs"]) == pytest.approx(
        (14.0, 32.0, 3)
    )


def test_on_cuda_the_cache_is_flushed_first_and_only_the_run_is_timed(clock, monkeypatch):
    log = MagicMock()
    log.cuda.Event.return_value.elapsed_time.return_value = 0.5
    monkeypatch.setattr(harness, "torch", log)
    monkeypatch.setattr(harness, "_clocks_per_ms", lambda: 2e6)
    monkeypatch.setattr(harness, "_flush_buffer", lambda: log)

    def run():
        clock[0] += 0.25
        log.run()

    found = harness.interleaved({"one": run}, "cuda", seconds=0.0, least=1)["one"]
    calls = [name.removeprefix("cuda.").removeprefix("Event().") for name, *_ in log.mock_calls]
    assert calls == 2 * [
        "zero_",
        "_sleep",
        "Event",
        "Event",
        "record",
        "run",
        "record",
        "synchronize",
        "elapsed_time",
    ]
    assert (found["ms"], found["host_ms"]) == (0.5, 250.0)


def test_memory_is_that_of_the_run():
    size = 64 << 20
    for _ in range(2):  # memory freed before does not lower the second measurement
        assert (
            0.9 * size
            < harness.peak_memory(lambda: torch.ones(size, dtype=torch.uint8), "cpu")
            < 1.5 * size
        )
    pieces = [bytearray(20000) for _ in range(2000)]
    last = bytearray(20000)  # above them on the heap: what is freed below stays with malloc
    del pieces
    found = harness.peak_memory(lambda: [bytearray(b"x" * 20000) for _ in range(2000)], "cpu")
    assert 0.8 * 40e6 < found < 1.6 * 40e6 and last


def test_new_graphs_and_kernels_are_counted_and_torch_compile_has_not_seen_the_shapes_of_a_cell_before():
    """It would generalise from two of them, and be timed with a graph for any number of rows."""
    knobs = pytest.importorskip("triton").knobs
    former, graph = knobs.compilation.listener, torch.compile(policy_loss, backend="eager")
    compiled = contender("compiled", loss=lambda p, b, cell: graph(p, b, cell))
    with torch.compiler.set_stance("default"):
        for rows in (32, 48, 64):
            with harness.compilations() as count:
                knobs.compilation.listener(
                    src=None, metadata={}, metadata_group={}, times=None, cache_hit=False
                )
                quickly(tiny(rows=rows), [compiled])
            assert count() == 2, rows
    assert knobs.compilation.listener is former


# ---- result files


class Planned:
    """A suite of two cells whose measurement is replaced:

    `log` records the cells that were requested.
    """

    def __init__(self, monkeypatch, out):
        self.out, self.cells = out, [Cell("logits", 32, 512, dtype) for dtype in (FP32, BF16)]
        self.log = []
        self.earlier = []  # of each measurement, the numbers of the cells that it was given
        self.failure = None  # raised at the second cell
        monkeypatch.setattr(
            suites.Suite, "plan", lambda *_: [suites.Planned(cell) for cell in self.cells]
        )
        monkeypatch.setattr(suites, "measure", self.measure)

    def measure(self, cell, device, known=None, only=None, **how):
        if self.failure is not None and cell.dtype == BF16:
            raise self.failure
        self.log.append((cell, known, only))
        self.earlier.append([one["number"] for one in how["earlier"]])
        return measuring.describe(cell) | {"limit": None, "providers": [], "number": len(self.log)}

    def __call__(self, **how):
        """Which measurement each cell of the file is."""
        (path,), self.unmeasured = suites.run(["logits"], suites.How("cpu", self.out, **how))
        self.record = results.load(path)
        return [cell["number"] for cell in self.record["cells"]]


@pytest.fixture
def planned(monkeypatch, tmp_path):
    return Planned(monkeypatch, tmp_path)


def test_a_cell_is_measured_again_when_what_it_depends_on_has_changed(planned, monkeypatch):
    assert planned() == planned() == [1, 2] and planned(fresh=True) == [3, 4]
    assert planned.earlier == [[], [1], [], [3]]
    planned.cells[1] = Cell("logits", 48, 512, BF16)
    assert planned() == [3, 5]
    monkeypatch.setattr(results, "_code", lambda: "other code")
    assert planned() == [6, 7] and planned(quick=True) == [8, 9]
    here = machine.machine("cpu") | {"threads": "other"}
    monkeypatch.setattr(suites, "machine", lambda device: here)
    assert planned() == [10, 11] and all(
        one["machine"] == here for one in (planned.record, *planned.record["cells"])
    )


def test_files_and_cells_have_the_commit(planned, monkeypatch):
    monkeypatch.setattr(results, "commit", lambda: "abc-dirty")
    assert planned() == [1, 2]
    assert [one["commit"] for one in (planned.record, *planned.record["cells"])] == [
        "abc-dirty"
    ] * 3


def test_a_commit_says_whether_tracked_files_have_changed(tmp_path):
    """What was measured before is not a change."""
    results.commit.cache_clear()
    assert results.commit(tmp_path) is None

    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments],
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    result, code = tmp_path / "benchmarks" / "results" / "a.json", tmp_path / "code.py"
    result.parent.mkdir(parents=True)
    found = []
    git("init", "--quiet")
    for path in (result, code):
        path.write_text("1")
    git("add", ".")
    git("commit", "--quiet", "--message", "a")
    for path in (None, result, tmp_path / "new.py", code):
        if path is not None:
            path.write_text("2")
        results.commit.cache_clear()
        found.append(results.commit(tmp_path))
    results.commit.cache_clear()
    head = git("rev-parse", "HEAD").strip()
    assert len(head) == 40 and found == [head, head, head, f"{head}-dirty"]


@pytest.mark.parametrize("load, said", [(0.9, False), (1.0, True), (7.3, True)])
def test_a_loaded_machine_is_warned_of(load, said, monkeypatch, capsys, tmp_path):
    """Before anything is measured, and measured it is."""
    monkeypatch.setattr(command.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(command.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(command, "run", lambda *given: ([], []))
    command.main(["--device", "cpu", "--without-native", "--out", str(tmp_path)])
    warned = capsys.readouterr().err
    assert (warned == "") != said and (f"load {load:.1f} on 2 processors" in warned) == said


def test_the_code_is_every_file_that_a_figure_depends_on():
    counted = {
        path.relative_to(results.ROOT).as_posix()
        for pattern in results.SOURCES
        for path in results.ROOT.glob(pattern)
    }
    assert {
        "benchmarks/measure.py",
        "benchmarks/providers/ours.py",
        "grpo_kernels/batch.py",
    } <= counted
    assert "benchmarks/tables.py" not in counted and any(name.endswith(".cpp") for name in counted)


def test_a_cell_that_is_cut_off_or_cannot_be_measured_does_not_cost_the_others(planned):
    planned.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        planned()
    planned.cells.append(Cell("logits", 32, 512, FP16))
    planned.failure = MemoryError("no room")
    assert planned() == [1, 2] and re.fullmatch(r"(?s).*bfloat16.*no room", *planned.unmeasured)
    planned.failure = None
    assert planned() == [1, 3, 2] and not planned.unmeasured
    assert len(planned(first=True)) == 1
    names = planned.log[-1][2]
    assert "grpo_kernels, in place" in names and "torch.compile" not in names


def test_a_provider_that_breaks_cuda_is_left_out_the_next_time(planned, monkeypatch):
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
    monkeypatch, capsys
):
    stale = []
    monkeypatch.setattr(machine, "advice", lambda facts: stale)
    for unmeasured, promise in (([], (False, "broken")), (["hidden: no room"], (True, "kept"))):
        monkeypatch.setattr(command, "run", lambda *_, unmeasured=unmeasured: ([], unmeasured))
        monkeypatch.setattr(command, "promise", lambda *_, promise=promise: promise)
        with pytest.raises(SystemExit, match="1"):
            command.main(["--device", "cpu"])
        assert capsys.readouterr().out.endswith(f"\n{promise[1]}\n")
    stale.append(Finding("it is stale", "build it", True, blocks=True))
    with pytest.raises(SystemExit, match=r"Nothing was measured\.\nit is stale\n  -> build it"):
        command.main(["--device", "cpu"])


AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}


@pytest.mark.parametrize(
    ("model", "flags", "kind"),
    [
        ("AMD EPYC 7B13 64-Core Processor", {"avx2", "fma"}, "amd-epyc-avx2"),
        ("AMD EPYC, family 26", AVX512, "amd-epyc-family-26-avx512bf16"),
        ("Intel(R) Xeon(R) Platinum 8488C", AVX512 | {"amx_tile", "amx_bf16"}, "intel-xeon-amx"),
        ("Intel(R) Xeon(R) Processor @ 2.70GHz", AVX512, "intel-xeon-avx512bf16"),
        (
            "12th Gen Intel(R) Core(TM) i7-12700K, family 6",
            {"avx2", "fma"},
            "intel-core-family-6-avx2",
        ),
        ("aarch64", set(), "aarch64"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_kind_of_cpu_is_its_maker_its_family_and_its_instructions(model, flags, kind):
    assert machine.kind_of_cpu(model, frozenset(flags)) == kind


# ---- what is made of them

EAGER, TRL, OURS = "eager PyTorch", "TRL fused head + loss", "grpo_kernels"


@pytest.mark.parametrize(
    ("name", "ms", "rows", "kept"),
    [
        (EAGER, 9.6, 64, True), ("torch.compile", 5.0, 64, False), (TRL, 5.0, 64, True), (EAGER, 5.0, 48, True),
        (f"{OURS}, eager backend", 4.0, 64, False),
    ],
)  # fmt: skip
def test_a_promise_is_broken_by_what_pytorch_would_do_sooner(name, ms, rows, kept, tmp_path):
    """Of a cell in which the others take 10 ms, and eager PyTorch 5 where our own eager backend is
    beside it.
    """
    record = results.load(next(RESULTS.glob("*/hidden.json")))
    right = {"status": "ok", "p20": 9.0, "p80": 11.0, "runs": 5, "errors": {"loss": 0.0}}
    times = {OURS: 10.0, EAGER: 5.0 if "backend" in name else 10.0, TRL: 10.0} | {name: ms}
    cell = record["cells"][0] | {
        "rows": rows,
        "providers": [right | {"name": x, "ms": ms} for x, ms in times.items()],
    }
    results.save(tmp_path / "a" / "hidden.json", record | {"cells": [cell]})
    found, text = report.promise(tmp_path, "a")
    assert (
        found is kept
        and (rows == 64 or "none of 0 cells" in text)
        and ("2.00 times as long" in text) is not kept
    )


def test_small_calls_are_shown_but_break_no_promise(tmp_path):
    """The table has the sizes that both suites have; a slow call at 128 ids is no broken promise."""
    row = {"status": "ok", "p20": 1.0, "p80": 9.0, "runs": 5, "errors": {"loss": 0.0}}
    for suite, ours in (("small-logits", 2.0), ("small-hidden", 7.0)):
        record = results.load(next(RESULTS.glob(f"*/{suite}.json")))
        times = {OURS: ours, EAGER: 3.0, "torch.compile": 4.0}
        rows = [row | {"name": name, "ms": ms} for name, ms in times.items()]
        cells = [cell | {"providers": rows} for cell in record["cells"][:2]]
        measured = cells if suite == "small-logits" else cells[:1]
        results.save(tmp_path / "a" / f"{suite}.json", record | {"cells": measured})
    *_, last = report.small_calls(tmp_path).splitlines()
    assert last == "| 128 | 2.00 | 3.00 | 4.00 | 7.00 | 3.00 | 4.00 |"
    kept, text = report.promise(tmp_path, "a")
    assert kept and "none of 0 cells" in text


@pytest.mark.parametrize("kind", KINDS)
def test_of_every_machine_that_was_measured_the_promise_is_kept_and_the_front_has_the_answers(kind):
    kept, text = report.promise(RESULTS, kind)
    assert kept and "none of 0" not in text, text
    *asked, strongest, weakest = report.asked(RESULTS, kind).values()
    ratios = [x.ratio for x in report.standings(RESULTS, kind)]
    # How many lines there are depends on the suites that were measured. Eager PyTorch takes minutes
    # in bf16 on a CPU with AVX2 only.
    answers = {"nvidia-h100-80gb-hbm3": 3, "amd-epyc-avx512bf16": 0, "amd-epyc-family-25-avx2": 3}
    answers = answers.get(kind, 4)
    assert sum(map(len, asked)) == answers and [strongest[0].ratio, weakest[0].ratio] == [
        max(ratios),
        min(ratios),
    ]
    assert {
        results.load(path)["machine"]["kind"] for path in MEASURED if path.parent.name == kind
    } == {kind}


def test_pages_and_pictures_show_what_was_measured(monkeypatch):
    """No figure was typed or forgotten:

    `python -m benchmarks.report --check`. The description of a picture holds its numbers.
    """
    plots = pytest.importorskip("benchmarks.plots", reason="matplotlib is not installed")
    assert len(plots.pictures(RESULTS)) > 15 and report.stale() == []
    monkeypatch.setattr(report, "front", lambda folder: "")
    assert report.stale() == [report.FIGURES]


def test_the_readme_shows_the_result_files(monkeypatch):
    """Its figure has every correct contender of both cells and no variant of ours, and changes with
    the numbers.
    """
    plots = pytest.importorskip("benchmarks.plots", reason="matplotlib is not installed")
    hidden_time, hidden_memory, logits_time, _ = plots.of_readme(RESULTS)["panels"]
    names = [name for name, _, _ in hidden_time["bars"]]
    assert names == [name for name, _, _ in hidden_memory["bars"]] and len(names) > 8
    assert {"eager PyTorch", "Fast-LLM kernel", "TRL fused head", OURS} <= {*names}
    assert not [x for x in names if "backend" in x or "upstream" in x]
    record = results.load(RESULTS / report.README_MACHINE / "hidden.json")
    times = {row["name"]: row["ms"] for row in record["cells"][0]["providers"] if "ms" in row}
    shown = {name: value for name, value, _ in hidden_time["bars"]}
    assert shown[OURS] == pytest.approx(times[OURS], rel=1e-3)
    assert all("log scale" in panel["x"] for panel in (hidden_time, logits_time))
    assert "GB" in hidden_memory["x"]

    slower = copy.deepcopy(report.readme_cells(RESULTS))
    for row in slower["hidden"][2]:
        row["ms"] *= 2
    for module in (report, plots):
        monkeypatch.setattr(module, "readme_cells", lambda folder: slower)
    changed = report.stale()
    assert report.README in changed and any(path.name == "readme.svg" for path in changed)
