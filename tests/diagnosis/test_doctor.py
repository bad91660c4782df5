"""python -m grpo_kernels doctor: its findings, its report, its exit status."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import grpo_kernels
from grpo_kernels.diagnosis import Finding, doctor, environment, machine, native, self_test, step
from grpo_kernels.formulas import kl
from grpo_kernels.vocabulary import backends
from grpo_kernels.vocabulary.backends import FusedRows, cpu_products
from grpo_kernels.vocabulary.rows import RowStats, Slopes
from support.processes import WITHOUT

CPU = torch.device("cpu")


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this machine look like one without problems, so that only the tests of the backends can have findings."""
    monkeypatch.setattr(doctor, "facts", lambda device: (FACTS(device)[0], []))


FACTS = doctor.facts


def run(*arguments: str, missing: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, where `missing` cannot be imported."""
    code = f"""{WITHOUT.format(missing=missing)}
import runpy
sys.argv = ["grpo_kernels", "doctor", *{arguments!r}]
runpy.run_module("grpo_kernels", run_name="__main__")
"""
    paths = os.pathsep.join([str(Path(grpo_kernels.__file__).parents[1]), *filter(None, sys.path)])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("GRPO_KERNELS_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"PYTHONPATH": paths} | variables,
        capture_output=True,
        text=True,
        timeout=900,
    )


def problems(findings: list[Finding]) -> str:
    return "\n".join(f"{'grave' if f.grave else 'slight'}: {f.problem} -> {f.remedy}" for f in findings)


# ---- the report


def test_the_documented_keys_are_those_of_the_json_report(sound: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json", "--quick"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert doctor.__doc__ is not None
    documented = re.findall(r"^    ([a-z]+) ", doctor.__doc__, re.MULTILINE)
    assert documented == sorted(report, key=documented.index) and len(documented) == len(report)
    for name in ("package", "native", "products", "cpu", "gpu", "distributed"):
        (described,) = re.findall(rf"^    {name} +\{{(.*?)\n    [a-z]", doctor.__doc__, re.MULTILINE | re.DOTALL)
        assert set(report[name]) <= set(re.findall(r"\w+", described)), name
    assert report["healthy"] is True and report["step"] is None and report["device"] == "cpu"
    eager = report["backends"]["eager"]
    assert eager["passed"] and len(eager["checks"]) == 34 and 0 < eager["value_error"] < 1e-5
    assert 1e-7 < eager["gradient_error"]["float32"] < 1e-4 < eager["gradient_error"]["bfloat16"] < 1e-2
    (triton,) = [found for name, found in report["backends"].items() if name == "triton"]
    assert set(triton) == {"available", "reason"} and not triton["available"]


def test_json_has_no_nan() -> None:
    found = doctor._finite({"a": [1.0, float("nan")], "b": {"c": float("inf"), "d": 2}})
    assert found == {"a": [1.0, "nan"], "b": {"c": "inf", "d": 2}}


def test_the_text_names_every_backend_and_every_setting(sound: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--quick"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in backends.BACKENDS)
    assert all(name in out for name in environment.SETTINGS)
    assert "  eager    ok: worst error" in out and "all is well" in out and "a step from" not in out


def test_advice_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "facts", lambda device: (FACTS(device)[0], [Finding("it is slow", "wait", False)]))
    assert doctor.main(["--quick"]) == 0
    assert re.search(r"advice:\n  it is slow\n    -> wait\n\nall is well", capsys.readouterr().out)


def test_wrong_arguments_exit_with_2() -> None:
    done = run("--nonsense")
    assert done.returncode == 2 and "--nonsense" in done.stderr
    with pytest.raises(SystemExit) as stopped:
        doctor.main(["--js"])
    assert stopped.value.code == 2


def test_a_wrong_backend_is_named_and_not_timed(
    sound: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.backends, "unavailable", lambda name: None if name == "eager" else "taken out")
    monkeypatch.setattr(backends, "native", lambda device: ("eager", None))
    lost_row(monkeypatch, backends.load("eager"))
    assert doctor.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (problem,) = report["problems"]
    assert 'backend "eager" fails' in problem["problem"] and "off by" in problem["problem"] and "report it" in problem["remedy"]
    assert report["backends"]["eager"]["passed"] is False and report["step"] is None


def test_without_compiled_module_triton_and_optional_packages_it_says_how_to_get_them() -> None:
    missing = ("grpo_kernels._cpu", "triton", "transformers", "trl", "numpy")
    for options in ((), ("--without-native",)):
        done = run("--quick", "--json", *options, missing=missing)
        assert done.returncode == 1, done.stderr[-2000:]
        report = json.loads(done.stdout)
        (lack,) = [p for p in report["problems"] if "compiled module" in p["problem"]]
        assert "fall back to eager" in lack["problem"] and "pip install" in lack["remedy"]
        assert report["auto"] == "eager" and report["native"]["path"] is None
        if not options:
            assert report["backends"] == {} and report["step"] is None
    assert report["backends"]["eager"]["passed"] and not report["backends"]["cpu"]["available"]
    assert "No module named 'triton'" in report["backends"]["triton"]["reason"]


def test_a_native_backend_that_does_not_run_is_a_problem_though_its_module_is_there(
    sound: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, _ = FACTS(CPU)
    report["native"]["path"] = "there"
    monkeypatch.setattr(doctor, "facts", lambda device: (report, []))
    monkeypatch.setattr(doctor.backends, "unavailable", lambda name: None if name == "eager" else "GLIBC_9.9 not found")
    found = doctor.examine(step=False, say=lambda text: None)
    assert not found["healthy"] and "GLIBC_9.9" in found["problems"][0]["problem"]


# ---- the self-test


def wrong_kl_sign(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    def k3(logp: Any, old: Any, ref: Any) -> tuple[Any, Any]:
        value, slope = kl.k3(logp, old, ref)
        return value, -slope

    monkeypatch.setitem(kl.ESTIMATORS, "k3", k3)
    for objective in {case.objective for case in self_test.CASES} - {None}:
        for kept in ("_formulas", "_programs"):  # since it was used
            monkeypatch.delitem(vars(objective), kept, raising=False)


def change_gradient(monkeypatch: pytest.MonkeyPatch, module: Any, change: Callable[[torch.Tensor], object]) -> None:
    right = module.pull

    def wrong(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        rows = kwargs.get("rows")
        out = args[5].view(-1, args[5].shape[-1])
        change(out if rows is None else out[slice(*rows)])

    monkeypatch.setattr(module, "pull", wrong)
    if hasattr(module, "_by_program"):  # in one visit, without `pull`
        one_visit = module._by_program

        def wrong_too(*args: Any) -> FusedRows:
            found, out = one_visit(*args), args[4]
            if out is not None:
                change(out.view(-1, out.shape[-1]))
            return found

        monkeypatch.setattr(module, "_by_program", wrong_too)


def lost_row(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    change_gradient(monkeypatch, module, lambda out: out[0].zero_())


def lost_row_of_bf16_gradients(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    change_gradient(monkeypatch, module, lambda out: out[0].zero_() if out.dtype == torch.bfloat16 else None)


def lost_end_of_long_rows(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    change_gradient(monkeypatch, module, lambda out: out[:, 65536:].zero_())


def scaled_gradient(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    change_gradient(monkeypatch, module, lambda out: out.mul_(1.002))


def no_entropy_gradient(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    right = module.pull

    def wrong(*args: Any, **kwargs: Any) -> None:
        logits, targets, stats, slopes, *rest = args
        right(logits, targets, stats, Slopes(slopes.target, teacher=slopes.teacher), *rest, **kwargs)

    monkeypatch.setattr(module, "pull", wrong)


def change_stats(monkeypatch: pytest.MonkeyPatch, module: Any, change: Callable[[RowStats], None]) -> None:
    right = module.stats

    def wrong(*args: Any, **kwargs: Any) -> RowStats:
        stats = right(*args, **kwargs)
        change(stats)
        return stats

    monkeypatch.setattr(module, "stats", wrong)


def rounded_logps(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    change_stats(monkeypatch, module, lambda s: s.target.copy_(s.target.bfloat16()))


def wrong_entropy(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    change_stats(monkeypatch, module, lambda s: s.get("weighted") is not None and s.get("weighted").mul_(1.001))


def read_masked_rows(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    right = module.stats
    monkeypatch.setattr(module, "stats", lambda x, t, read, *args, **kwargs: right(x, t, None, *args, **kwargs))


def lost_hidden_row(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """A fault: the last slot is left out of the gradient of the weight."""
    right = module.add_hidden_rows
    monkeypatch.setattr(module, "add_hidden_rows", lambda values, *args: right(last_is_zero(values), *args))


def lost_weight_row(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """The same fault in the gradient of the hidden states."""
    right = module.add_weight_rows
    monkeypatch.setattr(module, "add_weight_rows", lambda values, *args: right(last_is_zero(values), *args))


def last_is_zero(values: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(len(values)) < values.nonzero()[-1], values, 0.0)


def rounded_logits_of_sets(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    right = module.slot_logits
    monkeypatch.setattr(module, "slot_logits", lambda *args: right(*args).bfloat16().float())


FAULTS = {
    wrong_kl_sign: ("clip + KL + entropy bonus", "d_"),
    lost_row: ("", "d_"),
    lost_row_of_bf16_gradients: ("", "d_"),
    lost_end_of_long_rows: ("clip + KL + entropy bonus", "d_"),
    scaled_gradient: ("", "d_"),
    no_entropy_gradient: ("entropy", "d_"),
    rounded_logps: ("", "logps"),
    wrong_entropy: ("", "entropy"),
    read_masked_rows: ("", ""),
    lost_hidden_row: ("over kept sets", "d_weight"),
    lost_weight_row: ("over kept sets", "d_hidden"),
    rounded_logits_of_sets: ("over kept sets", "loss"),
}


@functools.cache
def failures_without_a_fault(backend: str) -> list[self_test.Check]:
    return self_test.self_test(backend, CPU).failures


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_the_self_test_detects_a_fault(fault: Callable[..., None], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not failures_without_a_fault(backend)
    fault(monkeypatch, backends.load(backend))
    result = self_test.self_test(backend, CPU)
    case, quantity = FAULTS[fault]
    assert result.failures and all(case in c.case for c in result.failures)
    assert any((c.failure or "").startswith(quantity) for c in result.failures)
    if fault is lost_end_of_long_rows:
        assert {c.vocab for c in result.failures} == {128_257}


def test_a_backend_that_raises_costs_its_own_checks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC\nmore")

    monkeypatch.setattr(backends.load("eager"), "stats", broken)
    result = self_test.self_test("eager", CPU)
    assert len(result.failures) == len(result.checks) == 34
    (finding,) = doctor.result_findings("eager", result)
    assert finding.grave and "Failed to find C compiler" in finding.problem and "set CC" in finding.remedy
    assert "more" not in finding.problem


def test_errors_that_are_not_numbers_fail() -> None:
    assert self_test.beyond_limits({"loss": 0.0, "d_logits": float("nan")}, torch.float32) is not None
    assert self_test.beyond_limits({"loss": 0.0, "d_logits": 1e-2}, torch.bfloat16) is None
    report = self_test.Report(
        [self_test.Check("a", "logits", "float32", 3, {"d_x": 1.0, "loss": 2.0, "d_y": float("nan")})], 0.0, []
    )
    assert report.worst("value") == 2.0 and report.worst("gradient") != report.worst("gradient")


def test_errors_of_a_small_row_are_relative_to_that_row() -> None:
    wanted = torch.tensor([[1.0, -1.0], [0.05, -0.05], [0.0, 0.0]])
    lost = wanted * torch.tensor([[1.0], [0.0], [1.0]])
    assert self_test.errors({"d_logits": lost}, {"d_logits": wanted}) == {"d_logits": 1.0}
    assert self_test.errors({"d_weight": lost}, {"d_weight": wanted})["d_weight"] == pytest.approx(0.05)
    assert self_test.errors({"logps": lost}, {"logps": wanted})["logps"] == pytest.approx(0.05)
    written = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.1]])
    assert self_test.errors({"d_logits": wanted + written}, {"d_logits": wanted})["d_logits"] == pytest.approx(0.1)


def test_the_expectation_holds_masks_and_is_not_trivial() -> None:
    for case, level, inputs, wanted in self_test._tests():
        assert inputs.advantages[-1] == 0 and bool(inputs.hidden[~inputs.mask].isnan().all())
        assert all(torch.isfinite(x).all() and x.abs().max() > 1e-4 for x in wanted.values()), (case.name, level)
        assert (wanted["divergence" if case.divergence else "logps"][~inputs.mask] == 0).all()
    assert any(bool((~inputs.mask).any()) for _, _, inputs, _ in self_test._tests())


# ---- the step


def test_contenders_compute_the_same(backend: str) -> None:
    for level in ("logits", "hidden"):
        shape = step.Step(level, 64, 32, 5_021, "float32")
        head = step._head(shape, CPU) if level == "hidden" else None
        eager, *others = step.contenders(shape, backend, CPU, head)
        wanted: Any = eager.run()
        assert all(g.abs().max() > 1e-4 for g in wanted)
        for contender in others:
            for run in range(2):  # what is overwritten is restored
                contender.restore()
                for found, expected in zip(contender.run(), wanted, strict=True):  # type: ignore[call-overload]
                    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6, msg=f"{contender.name}, run {run}")


def test_all_that_can_make_products_make_the_same() -> None:
    shape = step.Step("products", 64, 32, 5_021, "bfloat16")
    head = step._head(shape, CPU).detach()
    makers = step.makers_of_products(shape, head)
    able = [name for name, reason in cpu_products.engines().items() if reason is None]
    assert makers[0].name == cpu_products.engine() and sorted(m.name for m in makers) == sorted([*able, "torch.mm"])
    *ours, wanted = (maker.run() for maker in makers)
    for name, found in zip(makers, ours, strict=False):
        for one, other in zip(found, wanted, strict=True):  # type: ignore[call-overload]
            error = (one.float() - other.float()).norm() / other.float().norm()
            assert other.abs().max() > 0 and error < 4e-3, name  # torch.mm rounds its results
    assert cpu_products.engine() == makers[0].name
    for name in able:
        with cpu_products.using(name):
            assert step.makers_of_products(shape, head)[0].name == name


def test_a_step_from_hidden_states_on_a_cpu_is_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes ours, since plain PyTorch may be faster there; but not where its products of bf16 take minutes."""
    monkeypatch.setattr(cpu_products, "available", lambda: "no AVX512_BF16")
    for fast, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(step, "torch_has_bf16", lambda fast=fast: fast)
        assert [step._shape(level, CPU).dtype for level in ("products", "hidden", "logits")] == [dtype, dtype, "float32"]
    monkeypatch.undo()
    assert step.torch_has_bf16() == ("avx512f" in machine.processor()[1])


def test_products_are_shown_with_their_rates_and_what_is_faster_is_the_remedy(
    sound: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(level: str, backend: str, device: torch.device) -> step.Step:
        gains = {"avx512bf16": None, "fp32": (1.9, 2.0, 2.1), "torch": (0.4, 0.5, 0.6), "torch.mm": (2.9, 3.0, 3.1)}
        if level != "products":
            gains = {"eager PyTorch": None, "ours": (0.68, 0.7, 0.72) if level == "hidden" else (2.9, 3.0, 3.1)}
        timings = [step.Timing(name, 100.0 / (gain[1] if gain else 1), None, 9, gain) for name, gain in gains.items()]
        return step.Step(level, 64, 1000, 10_000, "bfloat16", timings)

    monkeypatch.setattr(doctor, "self_test", lambda name, device: self_test.Report([], 0.0, []))
    monkeypatch.setattr(doctor, "measure", measured)
    monkeypatch.setattr(cpu_products, "engine", lambda: "avx512bf16")
    monkeypatch.setattr(cpu_products, "engines", lambda: {"amx": "no tiles", "avx512bf16": None, "fp32": None, "torch": None})
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "matrix products on the CPU: avx512bf16; amx cannot run here (no tiles)" in out
    assert re.search(r"^  avx512bf16 +100\.0 ms +0\.04 TFLOP/s", out, re.MULTILINE)  # 6 x 64 x 1,000 x 10,000 in 0.1 s
    assert re.search(r"^  fp32 +50\.0 ms +0\.08 TFLOP/s +memory unknown +2\.0 times as fast", out, re.MULTILINE)
    advice, problems_ = out.partition("advice:")[2].split("problems:")
    assert "fp32 makes them in 50 ms, avx512bf16, which is in use, in 100 ms" in advice
    assert "-> set GRPO_KERNELS_PRODUCTS=fp32\n" in advice and "torch.mm" not in advice
    assert problems_.count("slower than plain PyTorch") == 1 and "a step from hidden: ours is slower" in problems_
    assert "fp32 makes them in 50 ms" in problems_ and "-> set GRPO_KERNELS_PRODUCTS=fp32; " in problems_
    assert "there are problems" in out and "all is well" not in out


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


def test_torchs_products_are_no_remedy_where_they_round() -> None:
    timings = [step.Timing("fp32", 100.0, None, 9), step.Timing("torch.mm", 40.0, None, 9, (2.4, 2.5, 2.6))]
    (found,) = doctor.product_findings(step.Step("products", 64, 1000, 10_000, "bfloat16", timings))
    assert found.slows and not found.grave and "its results are rounded to bf16" in found.problem
    assert "PRODUCTS" not in found.remedy and "report this processor" in found.remedy


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is Linux's")
def test_time_and_memory_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpo_kernels._cpu")
    monkeypatch.setattr(step, "SIZES", {"cpu": (50_021, 32)})
    monkeypatch.setattr(step, "MOST", step.LEAST)
    found = step.measure("logits", "cpu", CPU)
    eager, fresh, in_place = found.timings
    assert all(t.ms > 0 and t.runs == step.LEAST for t in found.timings) and found.rows >= step.PROBE_ROWS
    assert eager.extra_mb is not None and fresh.extra_mb is not None and in_place.extra_mb is not None
    logits = found.rows * found.vocab * 4 / 1e6
    assert eager.extra_mb > 2.5 * logits > 1.5 * logits > fresh.extra_mb > 0.9 * logits and in_place.extra_mb < 0.2 * logits


def test_a_step_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "memory_free", lambda device: 50 << 20)
    found = step.measure("logits", "eager", CPU)
    assert found.timings == [] and found.reason == "only 0.1 GB of memory are free" and found.vocab == step.SMALL_VOCAB
    assert "not timed: only" in doctor._text_of_step(found) and doctor.step_findings(found, "eager", []) == []


def test_less_memory_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for free in (64 << 30, 3 << 30):
        monkeypatch.setattr(step, "memory_free", lambda device, free=free: free)
        shape = step._shape("hidden", CPU)
        assert shape.hidden is not None
        peak = step.LOGIT_BYTES * shape.rows * shape.vocab + step.HEAD_BYTES * shape.vocab * shape.hidden
        assert peak <= free / 2
        rows.append((shape.rows, shape.vocab))
    assert rows[0] == (256, 151_936) and rows[1][1] == step.SMALL_VOCAB


def timed_by(clock: list[float], name: str, ms: list[float], order: list[str]) -> step.Contender:
    """A contender whose runs take these milliseconds on the clock, one after the other."""
    left = iter(ms)

    def run() -> None:
        order.append(name)
        clock[0] += next(left) / 1e3

    return step.Contender(name, run)


STEADY_EAGER, STEADY_OURS = [10.0] * 20, [5.0] * 20
STALLS: dict[str, tuple[list[float], list[float]]] = {
    "none": (STEADY_EAGER, STEADY_OURS),
    "one of eager PyTorch's runs": ([10.0, 349.0, *STEADY_EAGER], STEADY_OURS),
    "its first run, for half a minute": ([10.0, 30_000.0, *STEADY_EAGER], STEADY_OURS),
    "one of ours": (STEADY_EAGER, [5.0, 5.0, 20_000.0, *STEADY_OURS]),
    "a machine that becomes slower": ([10.0 * 1.5**i for i in range(20)], [5.0 * 1.5**i for i in range(20)]),
}


@pytest.mark.parametrize("stall", STALLS)
def test_a_stall_is_no_speed_up(stall: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process waits for in one run changes neither the number of rounds nor what they say together."""
    clock, order = [0.0], []
    monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    chosen = [timed_by(clock, name, ms, order) for name, ms in zip(("eager", "ours"), STALLS[stall], strict=True)]
    times = step.interleaved(chosen, CPU)
    assert len(times["eager"]) == len(times["ours"]) >= step.LEAST
    found = step.Timing("ours", 5.0, None, len(times["ours"]), step.gain(times["eager"], times["ours"]))
    assert found.gain is not None and found.gain[1] == pytest.approx(2.0) and found.steady and not found.slower
    rounds = [order[i : i + 2] for i in range(2, len(order), 2)]  # after a first run of each
    assert {tuple(x) for x in rounds} == {("eager", "ours"), ("ours", "eager")}


@pytest.mark.parametrize(
    ("gain", "runs", "steady", "slower"),
    [
        ((0.68, 0.7, 0.72), 9, True, True),
        ((0.68, 0.7, 0.72), step.LEAST - 1, False, False),
        ((0.9, 0.94, 0.96), 9, True, False),
        ((0.3, 0.5, 0.7), 9, False, True),
        ((0.3, 0.9, 1.4), 9, False, False),
        ((1.0, 3.0, 69.7), 9, False, False),
        ((1.9, 2.0, 2.1), 9, True, False),
        (None, 9, True, False),
    ],
)
def test_when_a_step_is_slower_and_when_nobody_can_tell(gain: Any, runs: int, steady: bool, slower: bool) -> None:
    timing = step.Timing("ours", 5.0, None, runs, gain)
    assert (timing.steady, timing.slower) == (steady, slower)


def timed_as(gain: tuple[float, float, float], ms: float) -> Callable[..., step.Step]:
    timings = [step.Timing("eager PyTorch", 10.0, 1.0, 9), step.Timing("grpo_loss", ms, None, 9, gain)]
    return lambda level, backend, device: step.Step(level, 64, None, 1000, "float32", timings)


def test_a_step_that_fails_is_reported(sound: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda name, device: self_test.Report([], 0.0, []))

    def measure(level: str, backend: str, device: torch.device) -> step.Step:
        raise RuntimeError("CUDA out of memory. Tried")

    monkeypatch.setattr(doctor, "measure", measure)
    report = doctor.examine(say=lambda text: None)
    assert [p["problem"] for p in report["problems"]] == [
        f"timing of {level} failed: RuntimeError: CUDA out of memory. Tried" for level in ("products", "logits", "hidden")
    ]
    assert "nvidia-smi" in report["problems"][0]["remedy"]


SLOW = "grpo_loss is slower than plain PyTorch: 14 ms where that takes 10 ms (0.7 times as fast)"


@pytest.mark.parametrize(
    ("known", "auto", "why", "remedy"),
    [
        (
            [Finding("8 threads on 1", "set 1", False, slows=True), Finding("old trl", "x", False)],
            "cpu",
            "8 threads on 1",
            "set 1",
        ),
        ([Finding("old trl", "x", False)], "cpu", "nothing that doctor knows explains it", "idle machine"),
        ([], "eager", 'backend="auto" takes eager here', "native kernels"),
    ],
    ids=["threads", "unknown", "eager"],
)
def test_slower_than_plain_pytorch_is_a_fault_with_reason_and_remedy(
    known: list[Finding], auto: str, why: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "facts", lambda device: (FACTS(device)[0], known))
    monkeypatch.setattr(doctor, "self_test", lambda name, device: self_test.Report([], 0.0, []))
    monkeypatch.setattr(backends, "native", lambda device: ("cpu", None if auto == "cpu" else "not built"))
    monkeypatch.setattr(doctor.backends, "unavailable", lambda name: None)
    monkeypatch.setattr(doctor, "measure", timed_as((0.69, 0.7, 0.71), 14.0))
    assert doctor.main(["--json"]) == 1
    slow = [p for p in json.loads(capsys.readouterr().out)["problems"] if "slower" in p["problem"]]
    assert len(slow) == 2 and slow[0]["problem"].startswith(f"a step from logits: {SLOW}") and why in slow[0]["problem"]
    assert remedy in slow[0]["remedy"] and "objective_loss" in slow[0]["remedy"]
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "all is well" not in out and "there are problems" in out and "memory unknown  0.7 times as fast" in out


def test_times_that_spread_are_not_judged(
    sound: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda name, device: self_test.Report([], 0.0, []))
    monkeypatch.setattr(doctor, "measure", timed_as((0.7, 2.0, 69.7), 5.0))
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "too unsteady to compare: 0.7 to 69.7 times as fast" in out and "2.0 times" not in out
    assert "a step from logits: the times of grpo_loss spread too much to judge" in out and "idle machine" in out
    assert "all is well, as far as could be told: some times spread too much" in out


def test_without_a_step_it_says_that_nothing_was_timed(sound: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--quick"]) == 0
    assert "all is well, as far as was tested: no step was timed" in capsys.readouterr().out


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
    for file, expected in (
        ("_cpu.cpython-27-x86_64-linux-gnu.so", "_cpu.cpython-27-x86_64-linux-gnu.so was built for another Python"),
        ("_cpu" + EXTENSION_SUFFIXES[0], "its file is there but does not load (no)"),
    ):
        (tmp_path / file).write_text("")
        monkeypatch.setattr(grpo_kernels.vocabulary.native, "PACKAGE", tmp_path)
        assert expected in grpo_kernels.vocabulary.native.why_missing("no")
        (tmp_path / file).unlink()
    assert "was not built" in grpo_kernels.vocabulary.native.why_missing("no")


def test_a_checkout_that_hides_an_installed_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    direct = {"url": "file:///elsewhere", "dir_info": {}}
    distribution = SimpleNamespace(read_text=lambda name: json.dumps(direct), locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)
    package = native.package()
    assert (package["kind"], package["shadows"], package["source"]) == (
        "checkout",
        str(tmp_path / "grpo_kernels"),
        "/elsewhere",
    )
    text = module_findings(origin=package)
    assert "hides the installed package" in text and "in another directory" in text
    direct["dir_info"] = {"editable": True}
    assert native.package()["kind"] == "checkout" and native.package()["shadows"] == "/elsewhere/grpo_kernels"
    direct["url"] = f"file://{native.PACKAGE.parent}"
    assert native.package()["kind"] == "editable install" and native.package()["shadows"] is None
    direct["dir_info"] = {}
    distribution.locate_file = lambda name: native.PACKAGE
    assert native.package()["kind"] == "install"


def test_a_stale_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, sources = tmp_path / "grpo_kernels", tmp_path / "csrc"
    package.mkdir()
    sources.mkdir()
    (tmp_path / "CMakeLists.txt").write_text("")
    (package / "_cpu.pyi").write_text("def isa() -> str: ...\ndef scale(data: int, dtype: int, /) -> None: ...\n")
    (sources / "kernels.cpp").write_text("")
    built = package / "_cpu.so"
    built.write_text(f"... grpo_kernels built from sha256:{native.sources(tmp_path)} ...")
    monkeypatch.setattr(native, "PACKAGE", package)

    def compiled(signature: str) -> Any:
        function = type("Function", (), {"__nb_signature__": ((signature, None, None),), "__call__": lambda self: None})
        return function()

    module = SimpleNamespace(
        __file__=str(built), isa=lambda: "avx2", scale=compiled("def scale(arg0: int, arg1: int, /) -> None")
    )
    os.utime(sources / "kernels.cpp", (time.time() + 60,) * 2)  # a checkout of git makes every file new
    assert native.stale(module) == []  # type: ignore[arg-type]
    (sources / "kernels.cpp").write_text("// changed")
    changed = f"{built} was built from other C++ sources than those in {tmp_path}"
    assert native.stale(module) == [changed]  # type: ignore[arg-type]
    (sources / "kernels.cpp").unlink()
    (sources / "kernel.cpp").write_text("")
    assert native.stale(module) == [changed]  # type: ignore[arg-type]
    module.scale = compiled("def scale(arg0: int, /) -> None")
    assert native.stale(module) == ["scale() takes 1 arguments, not 2"]  # type: ignore[arg-type]
    del module.scale
    assert native.stale(module) == ["it has no scale()"]  # type: ignore[arg-type]
    text = module_findings(native=module, found={"isa": "avx2"})
    assert "grave: the compiled module is out of date: it has no scale() -> pip install" in text


def test_the_module_that_is_here_agrees_with_its_types() -> None:
    _cpu = pytest.importorskip("grpo_kernels._cpu")
    assert not [reason for reason in native.stale(_cpu) if "was built from" not in reason]
    assert native.parameters(_cpu.use_isa) == 1 and native.parameters(_cpu.isa) == 0
    flags = machine.processor()[1]
    if flags:
        assert native.best_isa(flags) in (_cpu.isas()[0], None)


def test_an_instruction_set_below_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(__file__=None)
    monkeypatch.setattr(native, "stale", lambda module: [])
    avx2 = frozenset({"avx2", "fma"})
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    for flags, best in ((avx2, "avx2"), (avx512, "avx512"), (avx512 | {"avx512_bf16"}, "avx512bf16"), (frozenset("x"), None)):
        assert native.best_isa(flags) == best
        assert module_findings(native=module, flags=flags, found={"isa": best}) == ""
    text = module_findings(native=module, flags=avx512, found={"isa": "baseline"})
    assert text.startswith("slight: the compiled module runs baseline code, but this processor has avx512")


# ---- the machine


def test_limits_of_control_groups(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert machine.cgroup_limits(tmp_path, "0::/a/b\n") == (None, None)
    write("two/a/cpu.max", "150000 100000\n")
    write("two/a/b/cpu.max", "max 100000\n")
    write("two/a/b/memory.max", "1000\n")
    write("two/a/b/memory.current", "700\n")
    write("two/a/b/memory.stat", "anon 400\ninactive_file 200\n")
    assert machine.cgroup_limits(tmp_path / "two", "0::/a/b\n") == (1.5, 500)
    write("one/cpu/cpu.cfs_quota_us", "-1\n")
    write("one/cpu/cpu.cfs_period_us", "100000\n")
    write("one/memory/x/memory.limit_in_bytes", "900\n")
    write("one/memory/x/memory.usage_in_bytes", "600\n")
    membership = "4:memory:/x\n1:cpu,cpuacct:/\n0::/\n"
    assert machine.cgroup_limits(tmp_path / "one", membership) == (None, 300)
    write("one/cpu/cpu.cfs_quota_us", "400000\n")
    assert machine.cgroup_limits(tmp_path / "one", membership) == (4.0, 300)


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
    text = problems(machine.thread_findings(THREADS | changes, environ))
    assert (text == "") if expected is None else re.search(expected, text) and text.count("->") == 1
    assert "grave" not in text


def test_this_processor_is_described() -> None:
    found = machine.cpu()
    assert found["torch_threads"] == torch.get_num_threads() and 0 < found["usable_processors"] <= found["processors"]
    if sys.platform == "linux":
        assert found["memory_available"] > 1 << 20 and any("gomp" in name or "omp" in name for name in found["openmp"])


def gpu(**changes: Any) -> dict[str, Any]:
    device = {"name": "H200", "capability": "9.0"} | changes
    return {"available": True, "reason": None, "other": None, "devices": [device]}


@pytest.mark.parametrize(
    ("found", "present", "archs", "expected"),
    [
        (gpu(), True, ["sm_80", "sm_90"], None),
        (gpu(capability="10.3"), True, ["sm_90", "sm_100", "compute_120"], None),
        (
            gpu(capability="12.0"),
            True,
            ["sm_80", "sm_90"],
            "grave: torch has no kernels for H200 \\(compute capability 12.0\\)",
        ),
        (gpu(capability="7.5"), True, ["sm_75"], "slight: .*older than the kernels"),
        (gpu(capability="gfx942:sramecc+"), True, ["gfx942"], "slight: untested: .*gfx942.* have budgets .* not run there"),
        (gpu(capability="gfx1100"), True, ["gfx1100"], "slight: untested: .*gfx1100.* not even been compiled"),
        (gpu(capability="xpu"), True, [], "slight: untested: .*xpu.* not even been compiled"),
        ({"available": False, "reason": "x", "other": None}, False, [], None),
        (
            {"available": False, "reason": "torch was built without", "other": None},
            True,
            [],
            "grave: there is a GPU, but.*built without",
        ),
        ({"available": False, "reason": None, "other": "mps"}, False, [], "slight: there are no kernels for mps tensors"),
    ],
)
def test_gpus(found: dict[str, Any], present: bool, archs: list[str], expected: str | None) -> None:
    text = problems(machine.gpu_findings(found, present, archs))
    assert (text == "") if expected is None else re.match(expected, text)


@pytest.mark.parametrize("served", [True, False])
def test_an_accelerator_counts_where_tritons_driver_serves_it(served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver, not by the name."""
    monkeypatch.setattr(machine, "_accelerator", lambda: "xpu")
    monkeypatch.setattr(backends, "native", lambda device: ("triton", None if served and device.type == "xpu" else "no driver"))
    properties = SimpleNamespace(name="Max 1550", max_compute_units=448)
    module = {"device_count": lambda: 1, "get_device_properties": lambda i: properties, "mem_get_info": lambda i: (3, 4)}
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(**module))
    found = machine.gpus()
    assert machine.where() == torch.device("xpu" if served else "cpu")
    assert (found["available"], found["other"]) == (served, None if served else "xpu")
    if served:
        device = {"name": "Max 1550", "capability": "xpu", "multiprocessors": 448, "memory": 4, "free": 3}
        assert found["devices"] == [device] and "untested: Max 1550" in problems(machine.gpu_findings(found, True, []))
    else:
        assert "no kernels for xpu tensors" in problems(machine.gpu_findings(found, False, []))


def test_a_gpu_that_triton_cannot_use_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "native", lambda device: ("triton", "no compiler"))
    for kind, expected in (("cuda", "cuda"), ("mps", "cpu"), (None, "cpu")):
        monkeypatch.setattr(machine, "_accelerator", lambda kind=kind: kind)
        assert machine.where().type == expected


def test_code_for_a_gpu() -> None:
    assert (
        machine.runs_on((8, 9), ["sm_80"]) and machine.runs_on((12, 0), ["compute_90"]) and machine.runs_on((9, 0), ["sm_90a"])
    )
    assert not machine.runs_on((8, 0), ["sm_86"]) and not machine.runs_on((9, 0), ["sm_80", "sm_100", "compute_100"])


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "built without" in machine.why_no_gpu(None, None, {}, True)
    assert machine.why_no_gpu("12.8", None, {"CUDA_VISIBLE_DEVICES": ""}, True) == "CUDA_VISIBLE_DEVICES='' hides it"
    assert machine.why_no_gpu("12.8", None, {"CUDA_VISIBLE_DEVICES": "0"}, False) == "the system shows none to this process"

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nplease update")

    monkeypatch.setattr(torch.cuda, "init", init)
    assert machine.why_no_gpu("12.8", None, {}, True) == "The NVIDIA driver on your system is too old"


# ---- versions and settings


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"trl": "0.19.1", "verl": "0.9.1"}
    monkeypatch.setattr(environment, "version", installed.get)
    found = {"torch": "2.13.0+cu130", "triton": "3.9.0"}
    text = problems(environment.version_findings(found, ["sympy", 'triton==3.6.0; platform_system == "Linux"']))
    assert "slight: triton is 3.9.0, but this torch was built for 3.6.0" in text
    assert "slight: trl is 0.19.1, but its adapter was tested with 1.15, 1.16" in text and "verl" not in text
    installed["trl"] = "1.16.2"
    assert environment.version_findings(found, ["triton==3.9.1"]) == []
    (old,) = environment.version_findings({"torch": "2.7.1", "triton": None}, ["triton==3.3.1"])
    assert old.grave and "2.7.1" in old.problem and "2.9" in old.remedy


def test_the_oldest_torch_is_that_of_the_package() -> None:
    project = Path(grpo_kernels.__file__).parents[1] / "pyproject.toml"
    if not project.exists():
        pytest.skip("not a checkout")
    oldest = ".".join(map(str, environment.OLDEST_TORCH))
    assert f'"torch>={oldest}"' in project.read_text()


def test_adapters_are_compared_with_the_versions_that_they_accept() -> None:
    from grpo_kernels.integrations import trl_head, verl

    tested = environment.tested_trainers()
    assert tested["verl"] == verl.TESTED and tested["trl"] == trl_head.TESTED
    assert {"openrlhf", "prime-rl", "skyrl", "unsloth_zoo"} <= set(tested)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"GRPO_KERNELS_STRICT": "1", "GRPO_KERNELS_CHECK": "0", "TRITON_INTERPRET": "", "OMP_NUM_THREADS": "3"}, None),
        ({"GRPO_KERNELS_BACKEND": "eager"}, None),
        ({"GRPO_KERNELS_BACKEND": "egaer"}, "grave: GRPO_KERNELS_BACKEND=egaer names no backend.*auto, eager, cpu, triton"),
        ({"GRPO_KERNELS_PRODUCTS": "torch"}, None),
        ({"GRPO_KERNELS_PRODUCTS": ""}, None),
        (
            {"GRPO_KERNELS_PRODUCTS": "amx"},
            "grave: GRPO_KERNELS_PRODUCTS=amx: no tiles, and every.* -> set it to one of auto, torch,",
        ),
        ({"GRPO_KERNELS_PRODUCTS": "mkl"}, "grave: GRPO_KERNELS_PRODUCTS=mkl: there are no such products"),
        ({"GRPO_KERNELS_STRICT": "true"}, "GRPO_KERNELS_STRICT=true has no effect -> set GRPO_KERNELS_STRICT=1"),
        ({"GRPO_KERNELS_STRICKT": "1"}, "GRPO_KERNELS_STRICKT is not a setting.*GRPO_KERNELS_STRICT, GRPO_KERNELS_CHECK"),
    ],
)
def test_settings(environ: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "engines", lambda: {"amx": "no tiles", "torch": None})
    text = problems(environment.setting_findings(environ))
    assert (text == "") if expected is None else re.search(expected, text)


def test_every_setting_that_the_package_reads_is_described() -> None:
    package = Path(grpo_kernels.__file__).parent
    read = {name for path in package.rglob("*.py") for name in re.findall(r"\bGRPO_KERNELS_[A-Z_]+[A-Z]\b", path.read_text())}
    assert read - {"GRPO_KERNELS_TEST"} == {name for name in environment.SETTINGS if name.startswith("GRPO_KERNELS_")}


def test_tf32_and_the_interpreter_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"NVIDIA_TF32_OVERRIDE": "1", "TRITON_INTERPRET": "1"}
    assert environment.setting_findings(environ) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    text = problems(environment.setting_findings(environ))
    assert "slight: fp32 matrix products are rounded to TF32" in text and "grave: TRITON_INTERPRET=1" in text
