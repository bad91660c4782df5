"""python -m grpo_kernels doctor: its findings, its self-test, its step, its report and exit status."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels.diagnosis import Finding, doctor, environment, machine, native, self_test, step
from grpo_kernels.rows.backends import cpu
from support.processes import WITHOUT

CPU, Tensor, ROOT = torch.device("cpu"), torch.Tensor, Path(__file__).parents[2]
backends, cpu_products = doctor.backends, doctor.cpu_products
FACTS = doctor.facts(CPU)[0]


def problems(findings: list[Finding]) -> str:
    return "\n".join(f"{'grave' if f.grave else 'slight'}: {f.problem} -> {f.remedy}" for f in findings)


def expect(findings: list[Finding], expected: str | None) -> None:
    """One finding in these words, or none."""
    text = problems(findings)
    assert (text == "") if expected is None else re.search(expected, text) and text.count("->") == 1, text


class Sound:
    """A machine without problems, but for what a test says: its facts, its self-test and its step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.set, self.capsys = functools.partial(monkeypatch.setattr, doctor), capsys
        self.know()
        self.set("self_test", lambda name, device: self_test.Report([], 0.0, []))

    def know(self, *findings: Finding) -> None:
        self.set("facts", lambda device: (FACTS | {"native": FACTS["native"] | {"path": "there"}}, list(findings)))

    def says(self, *options: str, healthy: bool = True) -> str:
        assert doctor.main(options) == (0 if healthy else 1)
        return self.capsys.readouterr().out

    def reports(self, *options: str, healthy: bool = True) -> dict[str, Any]:
        return json.loads(self.says("--json", *options, healthy=healthy))


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sound:
    return Sound(monkeypatch, capsys)


# ---- the report


def test_the_report_is_what_is_documented(sound: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the self-test of the eager backend."""
    sound.set("self_test", self_test.self_test)
    monkeypatch.setattr(backends, "unavailable", lambda name: None if name == "eager" else "taken out")
    monkeypatch.setattr(backends, "native", lambda device: ("eager", None))
    report = sound.reports("--quick")
    assert {*re.findall(r"^    ([a-z]+) ", str(doctor.__doc__), re.MULTILINE)} == report.keys()
    assert report["healthy"] is True and report["step"] is None and (report["device"], report["auto"]) == ("cpu", "eager")
    eager = report["backends"]["eager"]
    assert eager["passed"] and len(eager["checks"]) == 34 and 0 < eager["value_error"] < 1e-5
    assert 1e-7 < eager["gradient_error"]["float32"] < 1e-4 < eager["gradient_error"]["bfloat16"] < 1e-2
    assert report["backends"]["triton"] == {"available": False, "reason": "taken out"}
    assert doctor._finite({"a": [1.0, float("nan")], "b": {"c": float("inf")}}) == {"a": [1.0, "nan"], "b": {"c": "inf"}}


def test_the_text_names_every_backend_and_setting_and_advice_is_no_failure(sound: Sound) -> None:
    sound.know(Finding("it is slow", "wait", False))
    out = sound.says("--quick")
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in backends.BACKENDS)
    assert (
        all(name in out for name in environment.SETTINGS) and "  eager    ok: worst error" in out and "a step from" not in out
    )
    assert "advice:\n  it is slow\n    -> wait\n\nall is well, as far as was tested: no step was timed" in out
    for wrong in ("--js", "--nonsense"):
        with pytest.raises(SystemExit) as stopped:
            doctor.main([wrong])
        assert stopped.value.code == 2


def test_a_wrong_backend_is_named_and_not_timed(sound: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "native", lambda device: ("eager", None))
    for failure, remedy in (("d_logits is off by 1e+00", "report it"), ("Failed to find C compiler. Please", "set CC")):
        check = self_test.Check("a case", "logits", "float32", 7, {"d_logits": 1.0}, failure)
        sound.set("self_test", lambda name, device, check=check: self_test.Report([check] * (name == "eager"), 0.0, []))
        report = sound.reports(healthy=False)
        (problem,) = report["problems"]
        assert (
            'backend "eager" fails 1 of 1' in problem["problem"]
            and failure in problem["problem"]
            and remedy in problem["remedy"]
        )
        assert (
            report["backends"]["eager"]["passed"] is False and report["step"] is None and "WRONG" in sound.says(healthy=False)
        )


def test_a_native_backend_that_does_not_run_is_a_problem_though_its_module_is_there(
    sound: Sound, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "unavailable", lambda name: None if name == "eager" else "GLIBC_9.9 not found")
    assert "GLIBC_9.9" in sound.reports("--quick", healthy=False)["problems"][0]["problem"]


@pytest.mark.parametrize("option", ["--quick", "--without-native"])
def test_without_compiled_module_triton_and_optional_packages_it_says_how_to_get_them(option: str) -> None:
    missing = ("grpo_kernels._cpu", "triton", "transformers", "trl", "numpy")
    code = f"{WITHOUT.format(missing=missing)}\nfrom grpo_kernels.diagnosis import doctor, self_test\nself_test.SHAPES = ()\n"
    code += f"raise SystemExit(doctor.main(['--quick', '--json', {option!r}]))"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("GRPO_KERNELS_")}
    environment = inherited | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, done.stderr[-2000:]
    report = json.loads(done.stdout)
    (lack,) = [p for p in report["problems"] if "compiled module" in p["problem"]]
    assert "fall back to eager" in lack["problem"] and "pip install" in lack["remedy"]
    assert report["auto"] == "eager" and report["native"]["path"] is None
    if option == "--quick":
        assert report["backends"] == {} and report["step"] is None
    else:
        assert report["backends"]["eager"]["passed"] and not report["backends"]["cpu"]["available"]
        assert "No module named 'triton'" in report["backends"]["triton"]["reason"]


# ---- the self-test


@functools.cache
def right(backend: str) -> dict[int, dict[str, Tensor]]:
    """What each check of a backend finds."""
    found: dict[int, dict[str, Tensor]] = {}
    original = self_test.results
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_test, "results", lambda *args: found.setdefault(len(found), original(*args)))
        assert not self_test.self_test(backend, CPU).failures
    return found


@pytest.fixture
def with_fault(backend: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[self_test.Check]]:
    """The failures of a backend whose results have a fault: (dtype of the inputs, name, tensor) -> tensor."""

    def failures(fault: Callable[[torch.dtype, str, Tensor], Tensor]) -> list[self_test.Check]:
        left = iter(right(backend).values())

        def results(case: Any, level: str, x: Any, *_: Any) -> dict[str, Tensor]:
            return {name: fault(x.weight.dtype, name, tensor.clone()) for name, tensor in next(left).items()}

        monkeypatch.setattr(self_test, "results", results)
        return self_test.self_test(backend, CPU).failures

    return failures


def scaled(name: str, by: float, *where: Any) -> Callable[[torch.dtype, str, Tensor], Tensor]:
    """A fault: parts of tensors of this name times a factor."""

    def fault(dtype: torch.dtype, found: str, x: Tensor) -> Tensor:
        if found.startswith(name):
            x[where] *= by
        return x

    return fault


def rounded(name: str) -> Callable[[torch.dtype, str, Tensor], Tensor]:
    return lambda dtype, found, x: x.bfloat16().double() if found == name else x


FAULTS: dict[str, tuple[Callable, str]] = {
    "a lost row of logits": (scaled("d_logits", 0.0, 0, 0), "d_logits"),
    "a lost row of hidden states": (scaled("d_hidden", 0.0, 0, 0), "d_hidden"),
    "a lost row of the weight": (scaled("d_weight", 0.0, slice(None, None, 2)), "d_weight"),
    "a scaled gradient": (scaled("d_", 1.01), "d_"),
    "the sign of a gradient": (scaled("d_", -1.0), "d_"),
    "rounded log-probs": (rounded("logps"), "logps"),
    "a wrong entropy": (scaled("entropy", 1.001), "entropy"),
    "a rounded loss": (rounded("loss"), "loss"),
    "a wrong divergence": (scaled("divergence", 1.001), "divergence"),
    "NaN where it is masked": (lambda dtype, name, x: torch.where(x == 0, torch.nan, x), ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_self_test_detects_a_fault(fault: str, with_fault: Callable[..., list[self_test.Check]]) -> None:
    change, quantity = FAULTS[fault]
    failures = with_fault(change)
    assert failures and all(str(check.failure).startswith(quantity) for check in failures)


def test_the_self_test_has_long_rows_and_16_bits(with_fault: Callable[..., list[self_test.Check]]) -> None:
    failures = with_fault(lambda dtype, name, x: scaled("d_logits", 0.0, ..., slice(65536, None))(dtype, name, x))
    assert {check.vocab for check in failures} == {128_257}
    failures = with_fault(lambda dtype, name, x: scaled("d_", 1.1)(dtype, name, x) if dtype == torch.bfloat16 else x)
    assert {check.dtype for check in failures} == {"bfloat16"}


@pytest.mark.parametrize(
    ("changes", "case"), [({"beta": -0.04}, 0), ({"entropy_coef": 0.0}, 0), ({"level": "token"}, 1), ({"max_tokens": 51}, 2)]
)
def test_the_self_test_knows_the_formulas(changes: dict, case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand in it in plain PyTorch: an objective of ours that computes something else fails its case alone."""
    ours = self_test.results

    def results(one: self_test.Case, *args: Any) -> dict[str, Tensor]:
        return ours(replace(one, objective=replace(one.objective, **changes)) if one == self_test.CASES[case] else one, *args)

    monkeypatch.setattr(self_test, "results", results)
    monkeypatch.setattr(self_test, "LEVELS", ("logits",))
    assert {check.case for check in self_test.self_test("eager", CPU).failures} == {self_test.CASES[case].name}


def test_a_check_that_raises_costs_itself_only_and_errors_that_are_not_numbers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: Any, *_: Any) -> None:
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr(self_test, "results", broken)
    result = self_test.self_test("eager", CPU)
    assert len(result.failures) == len(result.checks) == 34
    assert {check.failure for check in result.checks} == {"RuntimeError: Failed to find C compiler"}
    assert self_test.beyond_limits({"loss": 0.0, "d_logits": float("nan")}, torch.float32) is not None
    assert self_test.beyond_limits({"loss": 0.0, "d_logits": 1e-2}, torch.bfloat16) is None
    check = self_test.Check("a", "logits", "float32", 3, {"d_x": 1.0, "loss": 2.0, "d_y": float("nan")})
    report = self_test.Report([check], 0.0, [])
    assert report.worst("value") == 2.0 and report.worst("gradient") != report.worst("gradient")


def test_errors_of_a_small_row_are_relative_to_that_row() -> None:
    wanted = torch.tensor([[1.0, -1.0], [0.05, -0.05], [0.0, 0.0]])
    lost, written = wanted * torch.tensor([[1.0], [0.0], [1.0]]), wanted + torch.tensor([[0.0], [0.0], [0.1]])
    for name, found, error in (
        ("d_logits", lost, 1.0),
        ("d_weight", lost, 0.05),
        ("logps", lost, 0.05),
        ("d_logits", written, 0.1),
    ):
        assert self_test.errors({name: found}, {name: wanted})[name] == pytest.approx(error)


# ---- the step


def test_contenders_compute_the_same(backend: str) -> None:
    for level in ("logits", "hidden"):
        shape = step.Step(level, 64, 32, 5_021, "float32")
        eager, *others = step.contenders(shape, backend, CPU, step._head(shape, CPU) if level == "hidden" else None)
        wanted: Any = eager.run()
        assert all(g.abs().max() > 1e-4 for g in wanted)
        for contender in others * 2:  # what is overwritten is restored
            contender.restore()
            torch.testing.assert_close(contender.run(), wanted, rtol=1e-3, atol=1e-6, msg=contender.name)


def test_all_that_can_make_products_make_the_same() -> None:
    shape = step.Step("products", 64, 32, 5_021, "bfloat16")
    head = step._head(shape, CPU).detach()
    able = [name for name, reason in cpu_products.engines().items() if reason is None]
    makers = step.makers_of_products(shape, head)
    assert makers[0].name == cpu_products.engine() and sorted(m.name for m in makers) == sorted([*able, "torch.mm"])
    *ours, wanted = (maker.run() for maker in makers)
    for found in ours:
        for one, other in zip(found, wanted, strict=True):  # type: ignore[call-overload]
            assert (one.float() - other.float()).norm() < 4e-3 * other.float().norm()  # torch.mm rounds its results
    for name in able:
        with cpu_products.using(name):
            assert step.makers_of_products(shape, head)[0].name == name


def test_a_step_from_hidden_states_on_a_cpu_is_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes ours, since plain PyTorch may be faster there; but not where its products of bf16 take minutes."""
    assert step.torch_has_bf16() == ("avx512f" in machine.processor()[1])
    monkeypatch.setattr(cpu_products, "available", lambda: "no AVX512_BF16")
    for fast, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(step, "torch_has_bf16", lambda fast=fast: fast)
        assert [step._shape(level, CPU).dtype for level in ("products", "hidden", "logits")] == [dtype, dtype, "float32"]


def test_products_are_shown_with_their_rates_and_what_is_faster_is_the_remedy(
    sound: Sound, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(level: str, backend: str, device: torch.device) -> step.Step:
        gains: dict[str, Any] = {"eager PyTorch": None, "ours": (0.68, 0.7, 0.72) if level == "hidden" else (2.9, 3.0, 3.1)}
        if level == "products":
            gains = {"avx512bf16": None, "fp32": (1.9, 2.0, 2.1), "torch": (0.4, 0.5, 0.6), "torch.mm": (2.9, 3.0, 3.1)}
        timings = [step.Timing(name, 100.0 / (gain[1] if gain else 1), None, 9, gain) for name, gain in gains.items()]
        return step.Step(level, 64, 1000, 10_000, "bfloat16", timings)

    sound.set("measure", measured)
    out = sound.says(healthy=False)
    assert re.search(r"^  avx512bf16 +100\.0 ms +0\.04 TFLOP/s", out, re.MULTILINE)  # 6 x 64 x 1,000 x 10,000 in 0.1 s
    assert re.search(r"^  fp32 +50\.0 ms +0\.08 TFLOP/s +memory unknown +2\.0 times as fast", out, re.MULTILINE)
    advice, slow = out.partition("advice:")[2].split("problems:")
    assert "fp32 makes them in 50 ms, avx512bf16, which is in use, in 100 ms" in advice
    assert "-> set GRPO_KERNELS_PRODUCTS=fp32\n" in advice and "torch.mm" not in advice
    assert slow.count("slower than plain PyTorch") == 1 and "a step from hidden: ours is slower" in slow
    assert "fp32 makes them in 50 ms" in slow and "-> set GRPO_KERNELS_PRODUCTS=fp32; " in slow


def test_torchs_products_are_no_remedy_where_they_round() -> None:
    timings = [step.Timing("fp32", 100.0, None, 9), step.Timing("torch.mm", 40.0, None, 9, (2.4, 2.5, 2.6))]
    (found,) = doctor.product_findings(step.Step("products", 64, 1000, 10_000, "bfloat16", timings))
    assert found.slows and not found.grave and "its results are rounded to bf16" in found.problem
    assert "PRODUCTS" not in found.remedy and "report this processor" in found.remedy


def test_a_setting_of_products_that_cannot_be_is_reported_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> str:
        raise ValueError("GRPO_KERNELS_PRODUCTS=amx: no tiles")

    monkeypatch.setattr(cpu_products, "engine", wrong)
    monkeypatch.setattr(cpu_products, "engines", lambda: {"amx": "no tiles", "torch": None})
    monkeypatch.setenv(cpu_products.SETTING, "amx")
    report, findings = doctor.facts(CPU)
    assert report["products"] == {"engine": None, "engines": {"amx": "no tiles", "torch": None}}
    assert "matrix products on the CPU: none; amx cannot run here (no tiles)" in doctor._text_of_facts(report)
    assert any(f.grave and "GRPO_KERNELS_PRODUCTS=amx: no tiles, and every loss" in f.problem for f in findings)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is Linux's")
def test_time_and_memory_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpo_kernels._cpu")
    monkeypatch.setattr(step, "SIZES", {"cpu": (50_021, 32)})
    monkeypatch.setattr(step, "MOST", step.LEAST)
    found = step.measure("logits", "cpu", CPU)
    assert all(t.ms > 0 and t.runs == step.LEAST for t in found.timings) and found.rows >= step.PROBE_ROWS
    eager, fresh, in_place = (t.extra_mb / (found.rows * found.vocab * 4e-6) for t in found.timings)  # in units of the logits
    assert eager > 2.5 and 0.9 < fresh < 1.5 and in_place < 0.2


def test_less_memory_fewer_rows_until_there_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []
    for free in (64 << 30, 3 << 30, 50 << 20):
        monkeypatch.setattr(step, "memory_free", lambda device, free=free: free)
        shapes.append(step.measure("logits", "eager", CPU) if free < 1 << 30 else step._shape("hidden", CPU))
    many, few, none = shapes
    assert (many.rows, many.vocab) == (256, 151_936) and few.vocab == step.SMALL_VOCAB
    assert step.LOGIT_BYTES * few.rows * few.vocab + step.HEAD_BYTES * few.vocab * few.hidden <= 1.5 * (1 << 30)
    assert (
        none.timings == [] and none.reason == "only 0.1 GB of memory are free" and doctor.step_findings(none, "eager", []) == []
    )
    assert "not timed: only" in doctor._text_of_step(none)


STALLS: dict[str, tuple[list[float], list[float]]] = {
    "none": ([], []),
    "one of eager PyTorch's runs": ([10.0, 349.0], []),
    "its first run, for half a minute": ([10.0, 30_000.0], []),
    "one of ours": ([], [5.0, 5.0, 20_000.0]),
    "a machine that becomes slower": ([10.0 * 1.5**i for i in range(20)], [5.0 * 1.5**i for i in range(20)]),
}


@pytest.mark.parametrize("stall", STALLS)
def test_a_stall_is_no_speed_up(stall: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process waits for in one run changes neither the number of rounds nor what they say together."""
    clock, order = [0.0], []
    monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def contender(name: str, ms: list[float], usual: float) -> step.Contender:
        left = iter(ms + [usual] * 20)
        return step.Contender(name, lambda: (order.append(name), clock.append(clock.pop() + next(left) / 1e3)))

    eager, ours = STALLS[stall]
    times = step.interleaved([contender("eager", eager, 10.0), contender("ours", ours, 5.0)], CPU)
    assert len(times["eager"]) == len(times["ours"]) >= step.LEAST
    found = step.Timing("ours", 5.0, None, len(times["ours"]), step.gain(times["eager"], times["ours"]))
    assert found.gain is not None and found.gain[1] == pytest.approx(2.0) and found.steady and not found.slower
    assert {*zip(order[2::2], order[3::2], strict=True)} == {("eager", "ours"), ("ours", "eager")}  # after a first run of each


@pytest.mark.parametrize(
    ("gain", "runs", "steady", "slower"),
    [
        ((0.68, 0.7, 0.72), 9, True, True), ((0.68, 0.7, 0.72), step.LEAST - 1, False, False), ((0.9, 0.94, 0.96), 9, True, False),
        ((0.3, 0.5, 0.7), 9, False, True), ((0.3, 0.9, 1.4), 9, False, False), ((1.0, 3.0, 69.7), 9, False, False), ((1.9, 2.0, 2.1), 9, True, False), (None, 9, True, False),
    ],
)  # fmt: skip
def test_when_a_step_is_slower_and_when_nobody_can_tell(gain: Any, runs: int, steady: bool, slower: bool) -> None:
    timing = step.Timing("ours", 5.0, None, runs, gain)
    assert (timing.steady, timing.slower) == (steady, slower)


def timed_as(gain: tuple[float, float, float], ms: float) -> Callable[..., step.Step]:
    timings = [step.Timing("eager PyTorch", 10.0, 1.0, 9), step.Timing("grpo_loss", ms, None, 9, gain)]
    return lambda level, backend, device: step.Step(level, 64, None, 1000, "float32", timings)


SLOW = "grpo_loss is slower than plain PyTorch: 14 ms where that takes 10 ms (0.7 times as fast)"
KNOWN = (Finding("8 threads on 1", "set 1", False, slows=True), Finding("old trl", "x", False))


@pytest.mark.parametrize(
    ("known", "auto", "why", "remedy"),
    [
        (KNOWN, "cpu", "8 threads on 1", "set 1"),
        (KNOWN[1:], "cpu", "nothing that doctor knows explains it", "idle machine"),
        ((), "eager", 'backend="auto" takes eager here', "native kernels"),
    ],
    ids=["threads", "unknown", "eager"],
)
def test_slower_than_plain_pytorch_is_a_fault_with_reason_and_remedy(
    known: tuple[Finding, ...], auto: str, why: str, remedy: str, sound: Sound, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound.know(*known)
    sound.set("measure", timed_as((0.69, 0.7, 0.71), 14.0))
    monkeypatch.setattr(backends, "native", lambda device: ("cpu", None if auto == "cpu" else "not built"))
    monkeypatch.setattr(backends, "unavailable", lambda name: None)
    slow = [p for p in sound.reports(healthy=False)["problems"] if "slower" in p["problem"]]
    assert len(slow) == 2 and slow[0]["problem"].startswith(f"a step from logits: {SLOW}") and why in slow[0]["problem"]
    assert remedy in slow[0]["remedy"] and "objective_loss" in slow[0]["remedy"]
    out = sound.says(healthy=False)
    assert "all is well" not in out and "there are problems" in out and "memory unknown  0.7 times as fast" in out


def test_times_that_spread_are_not_judged_and_a_step_that_fails_is_reported(sound: Sound) -> None:
    sound.set("measure", timed_as((0.7, 2.0, 69.7), 5.0))
    out = sound.says()
    assert "too unsteady to compare: 0.7 to 69.7 times as fast" in out and "2.0 times" not in out
    assert "a step from logits: the times of grpo_loss spread too much to judge" in out and "idle machine" in out
    assert "all is well, as far as could be told: some times spread too much" in out

    def measure(level: str, backend: str, device: torch.device) -> step.Step:
        raise RuntimeError("CUDA out of memory. Tried")

    sound.set("measure", measure)
    found = sound.reports(healthy=False)["problems"]
    levels = ("products", "logits", "hidden")
    expected = [f"timing of {level} failed: RuntimeError: CUDA out of memory. Tried" for level in levels]
    assert [p["problem"] for p in found] == expected and "nvidia-smi" in found[0]["remedy"]


# ---- the compiled module


def module_findings(**changes: Any) -> str:
    found = {"path": None, "reason": "it was not built", "isa": None, "files": [], **changes.pop("found", {})}
    origin = {"kind": "install", "shadows": None, "source": None, **changes.pop("origin", {})}
    options = {"native": None, "flags": frozenset(), "needed": True} | changes
    return problems(native.module_findings(found, options["native"], origin, options["flags"], options["needed"]))


def test_why_the_module_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "compiler", lambda: None)
    text = module_findings()
    assert text.startswith("grave") and "was not built" in text and "install a C++17 compiler" in text
    assert "pip install -v --no-deps --no-cache-dir --force-reinstall grpo_kernels" in text
    monkeypatch.setattr(native, "compiler", lambda: "/usr/bin/c++")
    assert "install a C++17 compiler" not in module_findings()
    assert module_findings(needed=False).startswith("slight")  # a GPU has kernels of its own
    assert f"-e {native.PACKAGE.parent}" in module_findings(origin={"kind": "checkout"})
    where: Any = sys.modules[native.load.__module__]
    monkeypatch.setattr(where, "PACKAGE", tmp_path)
    for file, expected in (
        ("_cpu.cpython-27-x86_64.so", "was built for another Python"),
        ("_cpu" + EXTENSION_SUFFIXES[0], "does not load (no)"),
    ):
        (tmp_path / file).touch()
        assert expected in where.why_missing("no")
        (tmp_path / file).unlink()


def test_a_checkout_that_hides_an_installed_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    direct: dict[str, Any] = {"url": "file:///elsewhere", "dir_info": {}}
    distribution = SimpleNamespace(read_text=lambda name: json.dumps(direct), locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr(metadata, "distribution", lambda name: distribution)

    def seen() -> tuple[str, str | None]:
        return native.package()["kind"], native.package()["shadows"]

    assert seen() == ("checkout", str(tmp_path / "grpo_kernels")) and native.package()["source"] == "/elsewhere"
    text = module_findings(origin=native.package())
    assert "hides the installed package" in text and "in another directory" in text
    direct["dir_info"] = {"editable": True}
    assert seen() == ("checkout", "/elsewhere/grpo_kernels")
    direct["url"] = f"file://{native.PACKAGE.parent}"
    assert seen() == ("editable install", None)
    direct["dir_info"], distribution.locate_file = {}, lambda name: native.PACKAGE
    assert seen()[0] == "install"


def test_a_stale_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of other sources, whatever their times say: a checkout of git makes every file new; or of other functions than its types."""
    package, kernels = tmp_path / "grpo_kernels", tmp_path / "csrc" / "kernels.cpp"
    for path in (package, kernels.parent):
        path.mkdir()
    for path in (kernels, tmp_path / "CMakeLists.txt"):
        path.touch()
    (package / "_cpu.pyi").write_text("def isa() -> str: ...\ndef scale(data: int, dtype: int, /) -> None: ...\n")
    built = package / "_cpu.so"
    built.write_text(f"... grpo_kernels built from sha256:{native.sources(tmp_path)} ...")
    monkeypatch.setattr(native, "PACKAGE", package)

    def compiled(signature: str) -> Any:
        return type("Function", (), {"__nb_signature__": ((signature, None, None),), "__call__": lambda self: None})()

    module: Any = SimpleNamespace(
        __file__=str(built), isa=lambda: "avx2", scale=compiled("def scale(arg0: int, arg1: int, /) -> None")
    )
    os.utime(kernels, (time.time() + 60,) * 2)
    assert native.stale(module) == []
    changed = [f"{built} was built from other C++ sources than those in {tmp_path}"]
    kernels.write_text("// changed")
    assert native.stale(module) == changed
    kernels.write_text("")
    kernels.rename(kernels.with_name("kernel.cpp"))
    assert native.stale(module) == changed
    module.scale = compiled("def scale(arg0: int, /) -> None")
    assert native.stale(module) == ["scale() takes 1 arguments, not 2"]
    del module.scale
    assert native.stale(module) == ["it has no scale()"]
    text = module_findings(native=module, found={"isa": "avx2"})
    assert "grave: the compiled module is out of date: it has no scale() -> pip install" in text


def test_the_module_that_is_here_agrees_with_its_types() -> None:
    _cpu = pytest.importorskip("grpo_kernels._cpu")
    assert not [reason for reason in native.stale(_cpu) if "was built from" not in reason]
    assert native.parameters(_cpu.use_isa) == 1 and native.parameters(_cpu.isa) == 0
    flags = machine.processor()[1]
    assert not flags or native.best_isa(flags) in (_cpu.isas()[0], None)


AVX512 = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        (frozenset({"avx2", "fma"}), "avx2"),
        (AVX512, "avx512"),
        (AVX512 | {"avx512_bf16"}, "avx512bf16"),
        (frozenset("x"), None),
    ],
    ids=lambda x: str(x) if x is None or isinstance(x, str) else "",
)
def test_an_instruction_set_below_the_processors(
    flags: frozenset[str], best: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(__file__=None)
    monkeypatch.setattr(native, "stale", lambda module: [])
    assert native.best_isa(flags) == best and module_findings(native=module, flags=flags, found={"isa": best}) == ""
    text = module_findings(native=module, flags=flags, found={"isa": "older"})
    said = f"slight: the compiled module runs older code, but this processor has {best}"
    assert text.startswith(said) if best else text == ""


def test_a_processor_that_the_kernels_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in eager PyTorch: nothing to build would help."""
    without = module_findings(native=SimpleNamespace(__file__=None), found={"isa": ""})
    assert without.startswith("slight: CPU tensors run in eager PyTorch: the C++ kernels need AVX2")
    monkeypatch.setattr(cpu._cpu, "isa", lambda: "")
    assert "AVX2" in str(cpu.available())
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(cpu, "_cpu", None)
    assert "aarch64" in module_findings() and "aarch64" in str(cpu.available())


# ---- the machine


@pytest.mark.parametrize(
    ("files", "membership", "limits"),
    [
        ({}, "0::/a/b\n", (None, None)),
        ({"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000", "a/b/memory.max": "1000", "a/b/memory.current": "700",
          "a/b/memory.stat": "anon 400\ninactive_file 200\n"}, "0::/a/b\n", (1.5, 500)),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000", "memory/x/memory.limit_in_bytes": "900",
          "memory/x/memory.usage_in_bytes": "600"}, "4:memory:/x\n1:cpu,cpuacct:/\n0::/\n", (None, 300)),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, "4:memory:/x\n1:cpu,cpuacct:/\n0::/\n", (4.0, None)),
    ],
    ids=["none", "version 2", "version 1", "version 1, a quota"],
)  # fmt: skip
def test_limits_of_control_groups(files: dict[str, str], membership: str, limits: tuple[Any, Any], tmp_path: Path) -> None:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert machine.cgroup_limits(tmp_path, membership) == limits


THREADS = {"torch_threads": 8, "usable_processors": 8, "processors": 8, "load": 1.0, "openmp": ["libgomp.so.1"]}


@pytest.mark.parametrize(
    ("changes", "environ", "expected"),
    [
        ({}, {}, None),
        ({"torch_threads": 64}, {}, "64 threads on 8 processors.*OMP_NUM_THREADS=8"),
        ({"torch_threads": 4, "usable_processors": 1.5}, {}, "4 threads on 1.5 processors.*OMP_NUM_THREADS=1"),
        ({"torch_threads": 1}, {"OMP_NUM_THREADS": "1"}, "1 of 8 processors; torchrun sets"),
        ({"torch_threads": 1, "usable_processors": 1, "processors": 1}, {}, None),
        ({}, {"OMP_WAIT_POLICY": "ACTIVE"}, "never sleep.*OMP_WAIT_POLICY=PASSIVE"),
        ({}, {"KMP_BLOCKTIME": "infinite"}, "never sleep"),
        ({"load": 20.0}, {}, "busy \\(load 20\\).*OMP_WAIT_POLICY=PASSIVE"),
        ({"load": 20.0}, {"OMP_WAIT_POLICY": "passive"}, None),
        ({"load": None}, {}, None),
        ({"openmp": ["libgomp.so.1", "libiomp5.so"]}, {}, "several OpenMP runtimes.*libgomp.so.1, libiomp5.so"),
    ],
)
def test_threads(changes: dict[str, Any], environ: dict[str, str], expected: str | None) -> None:
    expect(machine.thread_findings(THREADS | changes, environ), expected)


@pytest.mark.parametrize(
    ("capability", "archs", "expected"),
    [
        ("9.0", ["sm_80", "sm_90"], None),
        ("10.3", ["sm_90", "sm_100", "compute_120"], None),
        ("12.0", ["sm_80", "sm_90"], "grave: torch has no kernels for H200 \\(compute capability 12.0\\)"),
        ("8.0", ["sm_86"], "grave: torch has no kernels"),
        ("9.0", ["sm_80", "sm_100", "compute_100"], "grave: torch has no kernels"),
        ("9.0", ["sm_90a"], None),
        ("8.9", ["sm_80"], None),
        ("12.0", ["compute_90"], None),
        ("7.5", ["sm_75"], "slight: .*older than the kernels"),
        ("gfx942:sramecc+", ["gfx942"], "slight: untested: .*gfx942.* have budgets .* not run there"),
        ("gfx1100", ["gfx1100"], "slight: untested: .*gfx1100.* not even been compiled"),
        ("xpu", [], "slight: untested: .*xpu.* not even been compiled"),
    ],
)
def test_gpus(capability: str, archs: list[str], expected: str | None) -> None:
    devices = [{"name": "H200", "capability": capability}]
    expect(machine.gpu_findings({"available": True, "reason": None, "other": None, "devices": devices}, True, archs), expected)


@pytest.mark.parametrize(
    ("reason", "other", "present", "expected"),
    [
        ("x", None, False, None),
        ("torch was built without", None, True, "grave: there is a GPU, but.*built without"),
        (None, "mps", False, "slight: there are no kernels for mps tensors"),
    ],
)
def test_no_gpu(reason: str | None, other: str | None, present: bool, expected: str | None) -> None:
    expect(machine.gpu_findings({"available": False, "reason": reason, "other": other}, present, []), expected)


@pytest.mark.parametrize("served", [True, False])
def test_an_accelerator_counts_where_tritons_driver_serves_it(served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver, not by the name."""
    monkeypatch.setattr(machine, "_accelerator", lambda: "xpu")
    monkeypatch.setattr(backends, "native", lambda device: ("triton", None if served and device.type == "xpu" else "no driver"))
    properties = SimpleNamespace(name="Max 1550", max_compute_units=448)
    module = SimpleNamespace(device_count=lambda: 1, get_device_properties=lambda i: properties, mem_get_info=lambda i: (3, 4))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    found = machine.gpus()
    assert machine.where() == torch.device("xpu" if served else "cpu")
    assert (found["available"], found["other"]) == (served, None if served else "xpu")
    expect(machine.gpu_findings(found, served, []), "untested: Max 1550" if served else "no kernels for xpu tensors")
    device = {"name": "Max 1550", "capability": "xpu", "multiprocessors": 448, "memory": 4, "free": 3}
    assert found["devices"] == [device] * served


def test_a_gpu_that_triton_cannot_use_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "native", lambda device: ("triton", "no compiler"))
    for kind, expected in (("cuda", "cuda"), ("mps", "cpu"), (None, "cpu")):
        monkeypatch.setattr(machine, "_accelerator", lambda kind=kind: kind)
        assert machine.where().type == expected


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nplease update")

    monkeypatch.setattr(torch.cuda, "init", init)
    for cuda, environ, present, said in (
        (None, {}, True, "built without"),
        ("12.8", {"CUDA_VISIBLE_DEVICES": ""}, True, "CUDA_VISIBLE_DEVICES='' hides it"),
        ("12.8", {"CUDA_VISIBLE_DEVICES": "0"}, False, "the system shows none to this process"),
        ("12.8", {}, True, "The NVIDIA driver on your system is too old"),
    ):
        assert said in machine.why_no_gpu(cuda, None, environ, present)


# ---- versions and settings


@pytest.mark.parametrize(
    ("found", "pinned", "installed", "expected"),
    [
        ({"torch": "2.13.0+cu130", "triton": "3.9.0"}, "triton==3.9.1", {"trl": "1.16.2", "verl": "0.9.1"}, None),
        ({"torch": "2.13.0", "triton": "3.9.0"}, 'triton==3.6.0; platform_system == "Linux"', {}, "slight: triton is 3.9.0.* built for 3.6.0"),
        ({"torch": "2.13.0", "triton": "3.9.0"}, "sympy", {"trl": "0.19.1"}, "slight: trl is 0.19.1, but its adapter was tested with 1.15, 1.16"),
        ({"torch": "2.7.1", "triton": None}, "triton==3.3.1", {}, r"grave: torch is 2.7.1 -> .*2\.9"),
    ],
)  # fmt: skip
def test_versions(found: dict, pinned: str, installed: dict, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "version", installed.get)
    expect(environment.version_findings(found, [pinned]), expected)


def test_adapters_are_compared_with_the_versions_that_they_accept() -> None:
    from grpo_kernels.integrations import trl_head, verl

    tested = environment.tested_trainers()
    assert tested["verl"] == verl.TESTED and tested["trl"] == trl_head.TESTED
    assert {"openrlhf", "prime-rl", "skyrl", "unsloth_zoo"} <= set(tested)
    assert f'"torch>={".".join(map(str, environment.OLDEST_TORCH))}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("environ", "gpu", "expected"),
    [
        ({"GRPO_KERNELS_STRICT": "1", "GRPO_KERNELS_CHECK": "0", "TRITON_INTERPRET": "", "OMP_NUM_THREADS": "3"}, False, None),
        ({"GRPO_KERNELS_BACKEND": "eager"}, False, None),
        (
            {"GRPO_KERNELS_BACKEND": "egaer"},
            False,
            "grave: GRPO_KERNELS_BACKEND=egaer names no backend.*auto, eager, cpu, triton",
        ),
        ({"GRPO_KERNELS_PRODUCTS": "torch"}, False, None),
        ({"GRPO_KERNELS_PRODUCTS": ""}, False, None),
        (
            {"GRPO_KERNELS_PRODUCTS": "amx"},
            False,
            "grave: GRPO_KERNELS_PRODUCTS=amx: no tiles, and every.* -> set it to one of auto, torch,",
        ),
        ({"GRPO_KERNELS_PRODUCTS": "mkl"}, False, "grave: GRPO_KERNELS_PRODUCTS=mkl: there are no such products"),
        ({"GRPO_KERNELS_STRICT": "true"}, False, "GRPO_KERNELS_STRICT=true has no effect -> set GRPO_KERNELS_STRICT=1"),
        (
            {"GRPO_KERNELS_STRICKT": "1"},
            False,
            "GRPO_KERNELS_STRICKT is not a setting.*GRPO_KERNELS_STRICT, GRPO_KERNELS_CHECK",
        ),
        ({"NVIDIA_TF32_OVERRIDE": "1", "TRITON_INTERPRET": "1"}, False, None),
        ({"NVIDIA_TF32_OVERRIDE": "1"}, True, "slight: fp32 matrix products are rounded to TF32"),
        ({"TRITON_INTERPRET": "1"}, True, "grave: TRITON_INTERPRET=1"),
    ],
)
def test_settings(environ: dict[str, str], gpu: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(cpu_products, "engines", lambda: {"amx": "no tiles", "torch": None})
    expect(environment.setting_findings(environ), expected)


def test_every_setting_that_the_package_reads_is_described() -> None:
    package = native.PACKAGE.rglob("*.py")
    read = {name for path in package for name in re.findall(r"\bGRPO_KERNELS_[A-Z_]+[A-Z]\b", path.read_text())}
    assert read - {"GRPO_KERNELS_TEST"} == {name for name in environment.SETTINGS if name.startswith("GRPO_KERNELS_")}
