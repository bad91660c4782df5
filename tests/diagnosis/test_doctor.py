"""python -m grpo_kernels doctor: its findings, its self-test, its step, its report and exit status."""

from __future__ import annotations

import functools
import json
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels.diagnosis import Finding, doctor, environment, machine, native, self_test, step
from grpo_kernels.rows.backends import cpu
from support.processes import WITHOUT, finish, start

CPU, Tensor, ROOT = torch.device("cpu"), torch.Tensor, Path(__file__).parents[2]
backends, cpu_products = doctor.backends, doctor.cpu_products
FACTS = doctor.facts(CPU)[0]
NOTHING = {"available": True, "passed": True, "value_error": 0.0, "gradient_error": {}, "seconds": 0.0, "warnings": [], "checks": []}  # fmt: skip


class Sound:
    """A machine without problems, but for what a test says: its facts, its self-test and its step."""

    def __init__(self, monkeypatch, capsys):
        self.set, self.capsys = functools.partial(monkeypatch.setattr, doctor), capsys
        self.know()
        self.set("self_test", lambda name, device: NOTHING)
        monkeypatch.setattr(backends, "unavailable", lambda name: None)
        monkeypatch.setattr(backends, "native_backend", lambda device: ("cpu", None))

    def know(self, *findings):
        self.set("facts", lambda device: (FACTS | {"native": FACTS["native"] | {"path": "there"}}, list(findings)))

    def says(self, *options, healthy=True):
        assert doctor.main(options) == (0 if healthy else 1)
        return self.capsys.readouterr().out

    def reports(self, *options, healthy=True):
        return json.loads(self.says("--json", *options, healthy=healthy))


@pytest.fixture
def sound(monkeypatch, capsys):
    return Sound(monkeypatch, capsys)


# ---- the report


def test_the_report_is_what_is_documented(sound, monkeypatch):
    """With the self-test of the eager backend, and a backend that is gone though the module is there."""
    sound.set("self_test", self_test.self_test)
    monkeypatch.setattr(backends, "unavailable", lambda name: None if name == "eager" else f"{name} is gone")
    monkeypatch.setattr(backends, "native_backend", lambda device: ("cpu", "it is gone"))
    report = sound.reports("--quick", healthy=False)
    assert {*re.findall(r"^    ([a-z]+) ", str(doctor.__doc__), re.MULTILINE)} == report.keys()
    assert report["step"] is None and (report["device"], report["auto"]) == ("cpu", "eager")
    (gone,) = report["problems"]
    assert gone["problem"] == "the kernels for cpu tensors do not run: cpu is gone"
    assert report["backends"]["triton"] == {"available": False, "reason": "triton is gone"}
    eager = report["backends"]["eager"]
    assert eager["passed"] and len(eager["checks"]) == 24 and 0 < eager["value_error"] < 1e-5
    assert 1e-7 < eager["gradient_error"]["float32"] < 1e-4 < eager["gradient_error"]["bfloat16"] < 1e-2


def test_the_text_names_every_backend_and_setting_and_advice_is_no_failure(sound):
    sound.know(Finding("it is slow", "wait", False))
    sound.set("self_test", lambda name, device: NOTHING | {"warnings": ["a smaller tile"]})
    out = sound.says("--quick")
    for part in (
        *(f"\n  {name:8} ok: worst error" for name in backends.BACKENDS),
        *environment.SETTINGS,
        "a smaller tile\n    -> see",
    ):
        assert part in out
    assert "advice:\n  it is slow\n    -> wait\n" in out and out.endswith(
        "all is well, as far as was tested: no step was timed\n"
    )
    for wrong in ("--js", "--nonsense"):
        with pytest.raises(SystemExit) as stopped:
            doctor.main([wrong])
        assert stopped.value.code == 2


@pytest.mark.parametrize(
    "failure, remedy", [("d_logits is off by 1e+00", "report it"), ("Failed to find C compiler. Please", "set CC")]
)
def test_a_wrong_backend_is_named_and_not_timed(failure, remedy, sound):
    check = {
        "case": "a case",
        "level": "logits",
        "dtype": "float32",
        "vocab": 7,
        "errors": {"d_logits": float("nan")},
        "failure": failure,
    }
    wrong = NOTHING | {"passed": False, "checks": [check]}
    sound.set("self_test", lambda name, device: wrong if name == "cpu" else NOTHING)
    report = sound.reports(healthy=False)
    (problem,) = report["problems"]
    assert f"fails 1 of 1 checks against float64 (a case, from logits, float32, vocabulary 7: {failure})" in problem["problem"]
    assert remedy in problem["remedy"] and report["step"] is None and "cpu      WRONG" in sound.says(healthy=False)
    assert report["backends"]["cpu"]["checks"][0]["errors"] == {"d_logits": "nan"}  # JSON has no NaN


def test_without_compiled_module_triton_and_optional_packages_it_says_how_to_get_them(tmp_path):
    missing = ("grpo_kernels._cpu", "triton", "transformers", "trl", "numpy")
    code = f"""{WITHOUT.format(missing=missing)}
import json
from grpo_kernels.diagnosis import doctor, self_test
self_test.SHAPES = ()
reports = [doctor.examine(step=False, say=len, without_native=go_on) for go_on in (False, True)]
open(sys.argv[1], "w").write(json.dumps(reports))
"""
    finish(start(code, str(tmp_path / "reports"), GRPO_KERNELS_BACKEND="auto"))
    stopped, went_on = json.loads((tmp_path / "reports").read_text())
    (lack,) = [p for p in stopped["problems"] if "compiled module" in p["problem"]]
    assert "fall back to eager" in lack["problem"] and "pip install" in lack["remedy"]
    assert stopped["auto"] == "eager" and stopped["native"]["path"] is None and stopped["backends"] == {}
    assert went_on["backends"]["eager"]["passed"] and not went_on["backends"]["cpu"]["available"]
    assert "No module named 'triton'" in went_on["backends"]["triton"]["reason"]


# ---- the self-test


Fault = Callable[[str, Tensor, torch.dtype], Tensor]


def scaled(by, *where):
    """Part of a tensor, times a factor."""

    def fault(name, x, dtype):
        x[where] *= by
        return x

    return fault


def rounded(name, x, dtype):
    return x.bfloat16().double()


#: What results of these names have -> the vocabularies or dtypes whose checks find it, and no others.
FAULTS = {
    "a lost row of logits": ("d_logits", scaled(0.0, 0, 0), {1003, 128_257}),
    "a lost row of hidden states": ("d_hidden", scaled(0.0, 0, 0), {1003, 128_257}),
    "a lost row of the weight": ("d_weight", scaled(0.0, slice(None, None, 2)), {1003, 128_257}),
    "the end of a long row": ("d_logits", scaled(0.0, ..., slice(65536, None)), {128_257}),
    "a scaled gradient": ("d_", scaled(1.01), {"float32"}),
    "a scaled gradient in 16 bits": ("d_", lambda name, x, dtype: x * (1.1 if dtype == torch.bfloat16 else 1.0), {"bfloat16"}),
    "the sign of a gradient": ("d_", scaled(-1.0), {1003, 128_257}),
    "rounded log-probs": ("logps", rounded, {1003, 128_257}),
    "a wrong entropy": ("entropy", scaled(1.001), {1003, 128_257}),
    "a rounded loss": ("loss", rounded, {1003, 128_257}),
    "NaN where it is masked": ("", lambda name, x, dtype: torch.where(x == 0, torch.nan, x), {1003}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_self_test_detects_a_fault(fault, monkeypatch):
    ours, (prefix, change, where) = self_test.results, FAULTS[fault]

    def results(case, level, x, *_):
        found = ours(case, level, x, "eager", CPU)
        return {n: change(n, tensor, x.weight.dtype) if n.startswith(prefix) else tensor for n, tensor in found.items()}

    monkeypatch.setattr(self_test, "results", results)
    failed = [check for check in self_test.self_test("eager", CPU)["checks"] if check["failure"]]
    assert all(check["failure"].startswith(prefix) for check in failed)
    assert {check["dtype" if where & {"float32", "bfloat16"} else "vocab"] for check in failed} == where


@pytest.mark.parametrize(
    ("case", "changes"),
    [(0, {"beta": 0.0}), (0, {"entropy_coef": 0.0}), (2, {"level": "token"}), (3, {"beta": 0.08})],
    ids=str,
)
def test_the_self_test_knows_the_formulas(case, changes, monkeypatch):
    """They stand in it in plain PyTorch: an objective of ours that computes something else fails its case alone."""
    ours, asked = self_test.results, self_test.CASES[case]
    other = replace(asked, objective=replace(asked.objective, **changes))
    monkeypatch.setattr(self_test, "results", lambda one, *given: ours(other if one == asked else one, *given))
    assert {check["case"] for check in self_test.self_test("eager", CPU)["checks"] if check["failure"]} == {asked.name}


def test_a_check_that_raises_costs_itself_only_and_errors_that_are_not_numbers_fail(monkeypatch):
    def broken(case, *_):
        raise RuntimeError("Failed to find C compiler\nmore")

    assert {"cannot run" in str(check["failure"]) for check in self_test.self_test("triton", CPU)["checks"]} == {True}
    monkeypatch.setattr(self_test, "results", broken)
    report = self_test.self_test("eager", CPU)
    assert not report["passed"] and len(report["checks"]) == 24
    assert {check["failure"] for check in report["checks"]} == {"RuntimeError: Failed to find C compiler"}
    assert self_test.beyond_limits({"loss": 0.0, "d_logits": float("nan")}, torch.float32) is not None
    assert self_test.beyond_limits({"loss": 0.0, "d_logits": 1e-2}, torch.bfloat16) is None


def test_errors_of_a_small_row_are_relative_to_that_row():
    wanted = torch.tensor([[1.0, -1.0], [0.05, -0.05], [0.0, 0.0]])
    lost, written = wanted * torch.tensor([[1.0], [0.0], [1.0]]), wanted + torch.tensor([[0.0], [0.0], [0.1]])
    for name, found, error in (
        ("d_logits", lost, 1.0),
        ("d_weight", lost, 0.05),
        ("logps", lost, 0.05),
        ("d_logits", written, 0.1),
    ):
        assert self_test.error_of(name, found, wanted) == pytest.approx(error)


# ---- the step


@pytest.mark.parametrize("level", ["logits", "hidden", "products"])
def test_contenders_compute_the_same(level, backend):
    shape = step.Step("hidden" if level == "products" else level, 64, None if level == "logits" else 32, 5_021, "float32")
    eager, *others = step.contenders(shape, backend, CPU)
    if level == "products":
        able = {name for name, reason in cpu_products.engines().items() if reason is None}
        for name in able:
            with cpu_products.using(name):
                others = step.contenders(replace(shape, level=level), backend, CPU)
                assert others[0].name == name and {c.name for c in others} == able
    wanted = eager.run()
    assert all(g.abs().max() > 1e-4 for g in wanted)
    for contender in others * 2:  # what is overwritten is restored
        contender.restore()
        torch.testing.assert_close(contender.run(), wanted, rtol=1e-3, atol=1e-6, msg=contender.name)


@pytest.mark.parametrize(
    ("free", "fast", "shape"),
    [(64e9, True, (256, 151_936, 896, "bfloat16")), (64e9, False, (256, 151_936, 896, "float32")), (3e9, True, (256, 32_000, 512, "bfloat16"))],
)  # fmt: skip
def test_shapes(free, fast, shape, monkeypatch):
    """From hidden states on a CPU in bf16, where plain PyTorch may be faster, but not where its products of bf16 take minutes; of a
    model's size, smaller where there is less memory."""
    monkeypatch.setattr(step, "memory_available", lambda: free)
    monkeypatch.setattr(step, "torch_has_bf16", lambda: fast)
    found = step._shape("hidden", CPU)
    assert (found.rows, found.vocab, found.hidden, found.dtype) == shape == (*shape[:3], step._shape("products", CPU).dtype)
    assert step._shape("logits", CPU).dtype == "float32"


def test_without_memory_nothing_is_timed(monkeypatch):
    assert step.torch_has_bf16() == ("avx512f" in machine.processor()[1])
    monkeypatch.setattr(step, "memory_available", lambda: 5e7)
    none = step.measure("logits", "eager", CPU)
    assert none.timings == [] and doctor.step_findings(none, "eager", []) == []
    assert doctor._text_of_step(none) == "a step from logits was not timed: only 0.1 GB of memory are free"


def test_a_step_is_measured(monkeypatch):
    monkeypatch.setattr(step, "SIZES", {"cpu": ((128, 50_021, 32),)})
    monkeypatch.setattr(step, "MOST", step.LEAST)
    found = step.measure("logits", "eager", CPU)
    assert [t.name for t in found.timings] == ["eager PyTorch", "grpo_loss", "grpo_loss, in place"]
    assert all(t.ms > 0 and t.runs == step.LEAST for t in found.timings) and 64 <= found.rows <= 128


@pytest.mark.parametrize(
    ("eager", "ours"),
    [([], []), ([10.0, 30_000.0], []), ([], [5.0, 5.0, 20_000.0]), ([10.0 * 1.5**i for i in range(20)], [5.0 * 1.5**i for i in range(20)])],
    ids=["none", "in eager PyTorch", "in ours", "a machine that becomes slower"],
)  # fmt: skip
def test_a_stall_is_no_speed_up(eager, ours, monkeypatch):
    """What the process waits for in one run changes neither the number of rounds nor what they say together."""
    now, order = [0.0], []
    monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def run(name, left):
        order.append(name)
        now[0] += next(left) / 1e3

    chosen = {"eager": iter(eager + [10.0] * 20), "ours": iter(ours + [5.0] * 20)}
    times = step.interleaved([step.Contender(name, functools.partial(run, name, left)) for name, left in chosen.items()], CPU)
    found = step.Timing("ours", 5.0, len(times["ours"]), step.gain(times["eager"], times["ours"]))
    assert found.runs >= step.LEAST and found.gain and found.gain[1] == pytest.approx(2.0) and found.verdict == "faster"
    assert {*zip(order[2::2], order[3::2], strict=True)} == {("eager", "ours"), ("ours", "eager")}  # after a first run of each


@pytest.mark.parametrize(
    ("gain", "runs", "verdict"),
    [
        ((0.68, 0.7, 0.72), 9, "slower"), ((0.68, 0.7, 0.72), step.LEAST - 1, "unsteady"), ((0.9, 0.94, 0.96), 9, "alike"), ((0.3, 0.5, 0.7), 9, "slower"),
        ((0.3, 0.9, 1.4), 9, "unsteady"), ((1.0, 3.0, 69.7), 9, "unsteady"), ((1.04, 1.1, 1.2), 9, "alike"), ((1.9, 2.0, 2.1), 9, "faster"), (None, 9, "alike"),
    ],
)  # fmt: skip
def test_when_a_step_is_slower_and_when_nobody_can_tell(gain, runs, verdict):
    assert step.Timing("ours", 5.0, runs, gain).verdict == verdict


def timed_as(**gains):
    """A step whose second contender has this gain at a level, and at others one of 2."""

    def measure(level, backend, device):
        gain = gains.get(level, (1.9, 2.0, 2.1))
        names = ("avx512bf16", "fp32") if level == "products" else ("eager PyTorch", "ours")
        timings = [step.Timing(names[0], 10.0, 9), step.Timing(names[1], 10.0 / gain[1], 9, gain)]
        return step.Step(level, 64, None, 1000, "float32", timings)

    return measure


SLOW, SAME = (0.69, 0.7, 0.71), (1.0, 1.0, 1.0)
THREADS = Finding("8 threads on 1", "set 1", False, slows=True)


@pytest.mark.parametrize(
    ("known", "auto", "level", "products", "why", "remedy"),
    [
        ([THREADS], "cpu", "logits", SAME, "8 threads on 1", "set 1; run again"),
        ([Finding("old trl", "x", False)], "cpu", "logits", SLOW, "nothing that doctor knows explains it", "run again on an idle machine"),
        ([], "eager", "logits", SLOW, 'backend="auto" takes eager here', "native kernels"),
        ([], "cpu", "hidden", (1.9, 2.0, 2.1), "a step by fp32 takes 5 ms, by avx512bf16, which is in use, 10 ms", "set GRPO_KERNELS_PRODUCTS=fp32"),
    ],
    ids=["threads", "unknown", "eager", "products"],
)  # fmt: skip
def test_slower_than_plain_pytorch_is_a_problem_with_reason_and_way_out(
    known,
    auto,
    level,
    products,
    why,
    remedy,
    sound,
    monkeypatch,
):
    sound.know(*known)
    sound.set("measure", timed_as(products=products, **{level: SLOW}))
    monkeypatch.setattr(backends, "native_backend", lambda device: ("cpu", None if auto == "cpu" else "not built"))
    (slow,) = sound.reports(healthy=False)["problems"]
    said = "ours is slower than plain PyTorch: 14 ms where that takes 10 ms (0.7 times as fast)"
    assert slow["problem"].startswith(f"a step from {level}: {said}") and why in slow["problem"]
    assert remedy in slow["remedy"] and "objective_loss" in slow["remedy"]
    out = sound.says(healthy=False)
    assert "all is well" not in out and out.endswith("there are problems, see above\n") and "14.3 ms  0.7 times as fast" in out


def test_times_that_spread_are_not_judged_and_a_step_that_fails_is_reported(sound):
    sound.set("measure", timed_as(logits=(0.7, 2.0, 69.7)))
    out = sound.says()
    assert out.count("too unsteady to compare: 0.7 to 69.7 times as fast in 9 rounds") == 2 and "idle machine" in out
    assert "all is well, as far as could be told: some times spread too much" in out
    sound.set("measure", timed_as())
    assert sound.says().endswith("\nall is well\n") and sound.reports()["step"][0]["timings"][1]["gain"] == [1.9, 2.0, 2.1]

    def measure(level, backend, device):
        raise RuntimeError("CUDA out of memory. Tried")

    sound.set("measure", measure)
    found = sound.reports(healthy=False)["problems"]
    expected = [
        f"timing of {level} failed: RuntimeError: CUDA out of memory. Tried" for level in ("logits", "products", "hidden")
    ]
    assert [p["problem"] for p in found] == expected and "nvidia-smi" in found[0]["remedy"]


# ---- findings: what is asked -> the one finding in these words, or none


def compiled(**changes):
    """About the compiled module. `file`: None, where it is missing."""
    origin = {"kind": "install", "shadows": None, "source": None} | changes.pop("origin", {})
    given = {"isa": None, "flags": frozenset(), "needed": True, "file": None, "reason": "it was not built"} | changes
    module = None if given["file"] is None else SimpleNamespace(__file__=given["file"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "built_from", lambda path: given.get("built", native.sources(native.PACKAGE.parent)))
        return native.module_findings(given, module, origin, given["flags"], given["needed"])


def machine_of(**changes):
    known = {"torch_threads": 8, "usable_processors": 8, "processors": 8, "load": 1.0}
    return machine.thread_findings(known | changes, {k: v for k, v in changes.items() if k.isupper()})


def gpu_of(capability, present=True):
    """ "": there is none."""
    devices = [{"name": "H200", "capability": capability}] if capability else []
    return machine.gpu_findings({"available": bool(capability), "reason": "built without", "devices": devices}, present)


def settings_of(gpu=False, **environ):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: gpu)
        patch.setattr(cpu_products, "engines", lambda: {"amx": "no tiles", "torch": None})
        return environment.setting_findings(environ)


def versions_of(**installed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "version", installed.get)
        return environment.version_findings()


BF16 = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})
HERE = {"file": str(native.PACKAGE / "_cpu.so"), "isa": "avx512bf16", "flags": BF16}
FINDINGS = [
    (compiled, {}, "grave: the compiled module is missing.*was not built.*force-reinstall grpo_kernels.*C\\+\\+17 compiler"),
    (compiled, {"needed": False}, "slight: the compiled module is missing"),  # a GPU has kernels of its own
    (compiled, {"origin": {"kind": "checkout"}}, f"-e {native.PACKAGE.parent}"),
    (compiled, HERE, None),
    (compiled, HERE | {"isa": "avx2"}, "slight: the compiled module runs avx2 code, but this processor has avx512bf16"),
    (compiled, HERE | {"isa": "avx2", "flags": BF16 - {"avx512_bf16"}}, "this processor has avx512 "),
    (compiled, HERE | {"isa": "avx2", "flags": frozenset("x")}, None),
    (compiled, HERE | {"isa": ""}, "slight: CPU tensors run in eager PyTorch: the C\\+\\+ kernels need AVX2"),
    (compiled, HERE | {"built": "other"}, "grave: the compiled module is out of date: .*other C\\+\\+ sources.*pip install"),
    (compiled, HERE | {"origin": {"shadows": "/site"}}, "hides the installed package at /site.*another directory"),
    (machine_of, {}, None),
    (machine_of, {"torch_threads": 64}, "64 threads on 8 processors.*OMP_NUM_THREADS=8"),
    (machine_of, {"torch_threads": 4, "usable_processors": 1.5}, "4 threads on 1.5 processors.*OMP_NUM_THREADS=1"),
    (machine_of, {"torch_threads": 1, "OMP_NUM_THREADS": "1"}, "1 of 8 processors; torchrun sets"),
    (machine_of, {"torch_threads": 1, "usable_processors": 1, "processors": 1}, None),
    (machine_of, {"load": 20.0}, "busy \\(load 20\\).*OMP_WAIT_POLICY=PASSIVE"),
    (machine_of, {"load": 20.0, "OMP_WAIT_POLICY": "passive"}, None),
    (machine_of, {"load": None}, None),
    (gpu_of, {"capability": "9.0"}, None),
    (gpu_of, {"capability": "12.0"}, None),
    (gpu_of, {"capability": "7.5"}, "slight: untested: .*H200 \\(7.5\\)"),
    (gpu_of, {"capability": "gfx942:sramecc+"}, "slight: untested: .*gfx942.*go by the test below"),
    (gpu_of, {"capability": ""}, "grave: there is a GPU, but.*built without"),
    (gpu_of, {"capability": "", "present": False}, None),
    (versions_of, {"trl": "1.16.2", "verl": "0.9.1"}, None),
    (versions_of, {"trl": "1.160.0"}, "trl is 1.160.0, but"),
    (versions_of, {"trl": "0.19.1"}, "slight: trl is 0.19.1, but its adapter was tested with 1.15, 1.16"),
    (settings_of, {"GRPO_KERNELS_STRICT": "1", "GRPO_KERNELS_CHECK": "0", "TRITON_INTERPRET": "", "OMP_NUM_THREADS": "3"}, None),
    (settings_of, {"GRPO_KERNELS_BACKEND": "eager", "GRPO_KERNELS_PRODUCTS": "torch"}, None),
    (settings_of, {"GRPO_KERNELS_BACKEND": "egaer"}, "grave: GRPO_KERNELS_BACKEND=egaer: .*auto, eager, cpu, triton"),
    (settings_of, {"GRPO_KERNELS_PRODUCTS": ""}, None),
    (settings_of, {"GRPO_KERNELS_PRODUCTS": "amx"}, "grave: GRPO_KERNELS_PRODUCTS=amx: no tiles, and calls raise -> set it to one of auto, torch,"),
    (settings_of, {"GRPO_KERNELS_PRODUCTS": "mkl"}, "grave: GRPO_KERNELS_PRODUCTS=mkl: there is no such value"),
    (settings_of, {"GRPO_KERNELS_STRICT": "true"}, "slight: GRPO_KERNELS_STRICT=true: it has no effect -> set it to one of 0, 1"),
    (settings_of, {"GRPO_KERNELS_STRICKT": "1"}, "slight: GRPO_KERNELS_STRICKT is not a setting.*GRPO_KERNELS_STRICT, GRPO_KERNELS_CHECK"),
    (settings_of, {"NVIDIA_TF32_OVERRIDE": "1", "TRITON_INTERPRET": "1"}, None),
    (settings_of, {"NVIDIA_TF32_OVERRIDE": "1", "gpu": True}, "slight: fp32 matrix products are rounded to TF32"),
    (settings_of, {"TRITON_INTERPRET": "1", "gpu": True}, "grave: TRITON_INTERPRET=1"),
]  # fmt: skip


def name_of(x):
    return x.__name__ if callable(x) else str(x)[:60] if isinstance(x, dict) else "" if isinstance(x, str) else None


@pytest.mark.parametrize(("function", "given", "expected"), FINDINGS, ids=name_of)
def test_findings(function, given, expected):
    found = [f"{'grave' if f.grave else 'slight'}: {f.problem} -> {f.remedy}" for f in function(**given)]
    assert found == [] if expected is None else len(found) == 1 and re.search(expected, found[0]), found


def test_a_module_that_is_out_of_date_does_not_end_the_report(monkeypatch):
    """Nor does a setting that names no products; no function of it is called that it may lack."""

    def wrong():
        raise AttributeError("module 'grpo_kernels._cpu' has no attribute 'processor'")

    monkeypatch.setattr(native, "load", lambda: SimpleNamespace(__file__="_cpu.so", isa=lambda: "avx2"))
    assert native.module()[0] == {"path": "_cpu.so", "reason": None, "compiler": None, "isa": "avx2", "isas": []}
    monkeypatch.setattr(cpu_products, "engine", wrong)
    assert native.engine() is None
    facts = FACTS | {"products": {"engine": None, "engines": {"amx": "no tiles", "torch": None}}}
    assert "\nproducts: amx cannot run here (no tiles)\n" in doctor._text_of_facts(facts)


@pytest.mark.parametrize(
    ("url", "editable", "seen"),
    [
        ("/elsewhere", False, ("checkout", "/site/grpo_kernels")),
        ("/elsewhere", True, ("checkout", "/elsewhere/grpo_kernels")),
        (str(ROOT), True, ("editable install", None)),
    ],
)
def test_a_checkout_that_hides_an_installed_package_is_named(url, editable, seen, monkeypatch):  # fmt: skip
    direct = json.dumps({"url": f"file://{url}", "dir_info": {"editable": editable}})
    distribution = SimpleNamespace(read_text=lambda name: direct, locate_file=lambda name: f"/site/{name}")
    monkeypatch.setattr(metadata, "distribution", lambda name: distribution)
    found = native.package()
    assert (found["kind"], found["shadows"], found["source"]) == (*seen, url)


def test_a_processor_that_the_kernels_do_not_serve(monkeypatch):
    """It runs in eager PyTorch: nothing to build would help."""
    monkeypatch.setattr(cpu._cpu, "isa", lambda: "")
    assert "AVX2" in str(cpu.available())
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(cpu, "_cpu", None)
    assert "aarch64" in compiled()[0].problem and "aarch64" in str(cpu.available())


# ---- facts


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, (torch.inf, torch.inf)),
        ({"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000", "a/b/memory.max": "max", "a/memory.max": "1000",
          "a/memory.current": "700", "a/memory.stat": "anon 400\ninactive_file 200\n"}, (1.5, 500)),
    ],
    ids=["none", "of groups above"],
)  # fmt: skip
def test_limits_of_control_groups(files, limits, tmp_path):
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert machine.cgroup_limits(tmp_path, "4:memory:/x\n0::/a/b\n") == limits


@pytest.mark.parametrize(
    ("kind", "unserved", "capability"),
    [("xpu", None, "xpu"), ("xpu", "no driver", None), ("cuda", "no compiler", "9.0"), ("mps", "no driver", None)],
)
def test_an_accelerator_counts_where_tritons_driver_serves_it(kind, unserved, capability, monkeypatch):  # fmt: skip
    """By the driver, not by the name; but a GPU of CUDA that Triton cannot use is not passed over."""
    monkeypatch.setattr(machine, "_accelerator", lambda: kind)
    monkeypatch.setattr(backends, "native_backend", lambda device: ("triton", unserved))
    properties = SimpleNamespace(name="one", max_compute_units=448, major=9, minor=0)
    module = SimpleNamespace(
        device_count=lambda: 1, get_device_properties=lambda i: properties, mem_get_info=lambda i: (3e9, 4e9)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    gpu = machine.gpus()
    assert machine.where().type == (kind if capability else "cpu") and gpu["available"] == bool(capability)
    known = f"name one, capability {capability}, multiprocessors 448, memory_gb 4.0, free_gb 3.0"
    assert f"\ngpu: {known if capability else f'none no kernels for {kind} tensors'}\n" in doctor._text_of_facts(
        FACTS | {"gpu": gpu}
    )


def test_every_setting_that_the_package_reads_is_described():
    package = native.PACKAGE.rglob("*.py")
    read = {name for path in package for name in re.findall(r"\bGRPO_KERNELS_[A-Z_]+[A-Z]\b", path.read_text())}
    assert read - {"GRPO_KERNELS_TEST"} == {name for name in environment.SETTINGS if name.startswith("GRPO_KERNELS_")}
