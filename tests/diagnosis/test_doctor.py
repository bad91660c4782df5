"""Test `python -m grpo_kernels doctor`: its report and exit status, its self-test, the timing of a
step, and its findings.
"""

from __future__ import annotations

import json
import re

import pytest
import torch

from grpo_kernels.diagnosis import Finding, doctor, machine, self_test, step
from support import amx
from support.processes import WITHOUT, finish, start

CPU = torch.device("cpu")
backends = doctor.backends
cpu_matmuls = doctor.cpu_matmuls
FACTS = machine.facts(CPU)
#: The result of a self-test without any check.
PASSED = {
    "available": True,
    "passed": True,
    "value_error": 0.0,
    "gradient_error": {},
    "seconds": 0.0,
    "warnings": [],
    "checks": [],
}


class FakeMachine:
    """A machine on which doctor finds nothing wrong, unless a test replaces a part of doctor.

    The facts are those of this machine. Backends pass without running, and versions and settings
    are fine.
    """

    def __init__(self, monkeypatch, capsys):
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.set_findings()
        self.replace("self_test", lambda name, device: PASSED)
        monkeypatch.setattr(backends, "unavailable", lambda name: None)
        monkeypatch.setattr(backends, "native_backend", lambda device: ("cpu", None))

    def replace(self, name, function):
        """Replace a function that doctor calls."""
        self.monkeypatch.setattr(doctor, name, function)

    def set_findings(self, *findings):
        """Let doctor find these problems of the machine, and no others."""
        results = {
            "facts": FACTS | {"native": FACTS["native"] | {"path": "there"}},
            "advice": list(findings),
            "version_findings": [],
            "setting_findings": [],
        }
        for name, result in results.items():
            self.monkeypatch.setattr(machine, name, lambda *_, result=result: result)

    def doctor_text(self, *options, healthy=True):
        """Run doctor, check its exit code, and return what it printed."""
        assert doctor.main(options) == (0 if healthy else 1)
        return self.capsys.readouterr().out

    def doctor_report(self, *options, healthy=True):
        """Run doctor with --json, check its exit code, and return the report."""
        return json.loads(self.doctor_text("--json", *options, healthy=healthy))


@pytest.fixture
def fake_machine(monkeypatch, capsys):
    return FakeMachine(monkeypatch, capsys)


# ---- the report


def test_the_report_is_what_is_documented(fake_machine, monkeypatch):
    """Run the self-test of the eager backend only. The cpu backend is missing although the compiled
    module is there.
    """
    fake_machine.replace("self_test", self_test.self_test)
    monkeypatch.setattr(
        backends, "unavailable", lambda name: None if name == "eager" else f"{name} is gone"
    )
    monkeypatch.setattr(backends, "native_backend", lambda device: ("cpu", "it is gone"))
    report = fake_machine.doctor_report("--quick", healthy=False)
    assert {*re.findall(r"^    ([a-z]+) ", str(doctor.__doc__), re.MULTILINE)} == report.keys()
    assert report["step"] is None and (report["device"], report["auto"]) == ("cpu", "eager")
    (gone,) = report["problems"]
    assert gone["problem"] == "the kernels for cpu tensors do not run: cpu is gone"
    eager = report["backends"]["eager"]
    assert eager["passed"] and len(eager["checks"]) == 24 and 0 < eager["value_error"] < 1e-5
    assert (
        1e-7
        < eager["gradient_error"]["float32"]
        < 1e-4
        < eager["gradient_error"]["bfloat16"]
        < 1e-2
    )


def test_engines_that_cannot_run_are_named_with_their_purpose():
    """If the engine "fp32" cannot run, the text must not suggest that fp32 tensors cannot."""
    assert doctor.PURPOSES.keys() == {*cpu_matmuls.ENGINES}
    missing = dict.fromkeys(cpu_matmuls.ENGINES, "no AVX512_BF16") | {"torch": None}
    said = doctor._text_of_matmuls({"engine": "torch", "engines": missing})
    assert said.startswith("engine torch (torch.mm, also for fp32 tensors); amx (bf16 matmuls")
    assert (
        "; fp32 (our own fp32 kernels for matmuls of bf16 and fp32 tensors) cannot run here: no"
        " AVX512_BF16" in said
    )
    assert said.count("cannot run here") == 3 and "cannot run here: None" not in said
    assert "the setting is wrong" in doctor._text_of_matmuls({"engine": None, "engines": {}})


def test_a_wrong_backend_is_named_and_not_timed(fake_machine):
    check = {
        "case": "a case",
        "level": "logits",
        "dtype": "float32",
        "vocab": 7,
        "errors": {"d_logits": float("nan")},
    }
    wrong = PASSED | {"passed": False, "checks": [check | {"failure": "d_logits is off by 1e+00"}]}
    fake_machine.replace("self_test", lambda name, device: wrong if name == "cpu" else PASSED)
    report = fake_machine.doctor_report(healthy=False)
    (problem,) = report["problems"]
    assert (
        "fails 1 of 1 checks (a case, from logits, float32, vocabulary 7: d_logits"
        in problem["problem"]
    )
    assert report["step"] is None and "cpu      WRONG" in fake_machine.doctor_text(healthy=False)
    assert report["backends"]["cpu"]["checks"][0]["errors"] == {
        "d_logits": "nan"
    }  # JSON has no NaN


def test_without_compiled_module_triton_and_optional_packages_it_says_how_to_get_them(tmp_path):
    missing = ("grpo_kernels._cpu", "triton", "transformers", "trl", "numpy")
    code = f"""{WITHOUT.format(missing=missing)}
import json
from grpo_kernels.diagnosis import doctor, self_test
self_test.SHAPES = ()
reports = [doctor.examine(step=False, write=len, without_native=go_on) for go_on in (False, True)]
open(sys.argv[1], "w").write(json.dumps(reports))
"""
    finish(start(code, str(tmp_path / "reports"), GRPO_KERNELS_BACKEND="auto"))
    stopped, went_on = json.loads((tmp_path / "reports").read_text())
    (lack,) = [p for p in stopped["problems"] if "compiled module" in p["problem"]]
    assert "fall back to eager" in lack["problem"] and "pip install" in lack["remedy"]
    assert (
        stopped["auto"] == "eager"
        and stopped["native"]["path"] is None
        and stopped["backends"] == {}
    )
    assert went_on["backends"]["eager"]["passed"] and not went_on["backends"]["cpu"]["available"]
    assert "No module named 'triton'" in went_on["backends"]["triton"]["reason"]


# ---- the self-test


def scaled(factor, *index):
    """Return a fault that multiplies result[index], or the whole result, by a factor."""

    def fault(name, x, dtype):
        x[index] *= factor
        return x

    return fault


def without_small_rows(name, x, dtype):
    """Set rows to 0 whose largest entry is below 2.9 % of the largest of all, in bf16."""
    if dtype != "bfloat16":
        return x
    row_largest = x.abs().amax(-1, True)
    return x.where(row_largest > 0.029 * row_largest.max(), 0.0)


#: Each fault: the prefix of the results that have it, a function that makes it, and the
#: vocabularies or dtypes whose checks must find it. No other check may fail.
FAULTS = {
    "lost rows of small gradients": ("d_logits", without_small_rows, {"bfloat16"}),
    "a lost row of hidden states": ("d_hidden", scaled(0.0, 0), {1003, 128_257}),
    "a lost row of the weight": ("d_weight", scaled(0.0, slice(None, None, 2)), {1003, 128_257}),
    "the end of a long row": ("d_logits", scaled(0.0, ..., slice(65536, None)), {128_257}),
    "a scaled gradient": ("d_", scaled(1.01), {"float32"}),
    "a scaled gradient in 16 bits": (
        "d_",
        lambda name, x, dtype: x * (1.1 if dtype == "bfloat16" else 1.0),
        {"bfloat16"},
    ),
    "rounded log-probs": ("logps", lambda name, x, dtype: x.bfloat16().double(), {1003, 128_257}),
    "a wrong entropy": ("entropy", scaled(1.001), {1003, 128_257}),
    "NaN in place of 0": (
        "",
        lambda name, x, dtype: torch.where(x == 0, torch.nan, x),
        {1003, 128_257},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_self_test_detects_a_fault(fault, monkeypatch):
    prefix, change, where = FAULTS[fault]
    right_results = self_test.backend_results

    def backend_results(inputs, backend, device, dtype):
        results = right_results(inputs, "eager", CPU, dtype)
        if backend == "eager":  # the expected results
            return results
        return {
            name: change(name, x, dtype) if name.startswith(prefix) else x
            for name, x in results.items()
        }

    monkeypatch.setattr(self_test, "backend_results", backend_results)
    failed = [check for check in self_test.self_test("wrong", CPU)["checks"] if check["failure"]]
    assert all(check["failure"].startswith(prefix) for check in failed)
    assert {
        check["dtype" if where & {"float32", "bfloat16"} else "vocab"] for check in failed
    } == where


def test_a_wrong_eager_backend_is_found_by_itself_and_beside_the_kernels(backend, monkeypatch):
    kernels = backends.load("eager").Kernels
    gradient = kernels.run_gradient_kernel
    monkeypatch.setattr(
        kernels, "run_gradient_kernel", lambda *given: (gradient(*given), given[-1].neg_())
    )
    checks = self_test.self_test(backend, CPU)["checks"]
    assert {
        check["case"] in self_test.COMPARED_WITH_EAGER for check in checks if check["failure"]
    } == {backend != "eager"}


def test_a_check_that_raises_costs_itself_only(monkeypatch):
    def broken(*_):
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr(self_test, "backend_results", broken)
    report = self_test.self_test("eager", CPU)
    assert not report["passed"] and len(report["checks"]) == 24
    assert {check["failure"] for check in report["checks"]} == {
        "RuntimeError: Failed to find C compiler"
    }


# ---- the step


@pytest.mark.parametrize("level", ["logits", "hidden"])
def test_contenders_compute_the_same(level, backend):
    hidden = None if level == "logits" else 32
    size = step.Step(level, 64, hidden, 5_021, "float32")
    eager, *others = step.make_contenders(size, backend, CPU)
    expected = eager.run()
    assert all(gradient.abs().max() > 1e-4 for gradient in expected)
    for contender in others * 2:  # the second time shows that overwritten inputs are restored
        contender.restore()
        gradients = [gradient / contender.loss_scale for gradient in contender.run()]
        torch.testing.assert_close(
            gradients, list(expected), rtol=1e-3, atol=1e-6, msg=contender.name
        )


def test_a_step_is_measured(monkeypatch):
    monkeypatch.setattr(step, "SIZES", {"cpu": ((128, 50_021, 32),)})
    found = step.measure("logits", "eager", CPU)
    assert [t.name for t in found.timings] == [
        "eager PyTorch",
        "grpo_loss",
        "grpo_loss, in place",
        "grpo_loss, loss / 4",
        "the same with grad_scale",
    ]
    assert all(t.ms > 0 and t.runs == step.ROUNDS for t in found.timings) and found.rows == 128


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [
        ((0.68, 0.7, 0.72), "slower"), ((0.9, 0.94, 0.96), "alike"), ((0.3, 0.9, 1.4), "unsteady"), ((1.2, 2.0, 9.1), "faster"),
        (None, "alike"),
    ],
)  # fmt: skip
def test_when_a_step_is_slower_and_when_times_are_too_unsteady(gain, verdict):
    assert step.Timing("ours", 5.0, 5, gain).verdict == verdict


def fake_measure(**gains):
    """Return a replacement of `measure` in which the second contender has the gain of its level.

    At levels without a gain it is twice as fast as the first contender.
    """

    def measure(level, backend, device):
        gain = gains.get(level, (1.9, 2.0, 2.1))
        names = ("avx512bf16", "fp32") if level == "matmuls" else ("eager PyTorch", "ours")
        timings = [step.Timing(names[0], 10.0, 9), step.Timing(names[1], 10.0 / gain[1], 9, gain)]
        return step.Step(level, 64, None, 1000, "float32", timings)

    return measure


@pytest.mark.parametrize(
    ("known", "auto", "why"),
    [
        ([Finding("8 threads on 1", "set 1", False, slows=True)], "cpu", "8 threads on 1"),
        ([Finding("old trl", "x", False)], "cpu", "nothing that doctor knows explains it"), ([], "eager", 'backend="auto" chooses eager here'),
    ],
)  # fmt: skip
def test_slower_than_plain_pytorch_is_a_problem_with_reason_and_remedy(
    known, auto, why, fake_machine, monkeypatch
):
    fake_machine.set_findings(*known)
    fake_machine.replace("measure", fake_measure(matmuls=(1.0, 1.0, 1.0), logits=(0.69, 0.7, 0.71)))
    monkeypatch.setattr(
        backends, "native_backend", lambda device: ("cpu", None if auto == "cpu" else "not built")
    )
    (slow,) = fake_machine.doctor_report(healthy=False)["problems"]
    assert (
        "a step from logits: ours is slower than plain PyTorch: 14 ms instead of 10 ms"
        in slow["problem"]
        and why in slow["problem"]
    )
    assert "objective_loss" in slow["remedy"] and fake_machine.doctor_text(healthy=False).endswith(
        "there are problems, see above\n"
    )


def test_a_loss_that_is_divided_is_told_what_grad_scale_saves():
    names = ("eager PyTorch", "grpo_loss, loss / 4", "the same with grad_scale")
    times = (90.0, 12.0, 8.0)
    timings = [step.Timing(name, ms, 5) for name, ms in zip(names, times, strict=True)]
    text = doctor._text_of_step(step.Step("logits", 64, None, 1000, "float32", timings))
    assert "grad_scale=1 / 4" in text and "8.0 ms in place of 12.0 ms" in text
    without = step.Step("hidden", 64, 8, 1000, "float32", timings[:1])
    assert "grad_scale" not in doctor._text_of_step(without)


def test_times_that_spread_are_not_judged(fake_machine):
    fake_machine.replace("measure", fake_measure(logits=(0.7, 2.0, 69.7)))
    assert "all is well, except that some times spread too much" in fake_machine.doctor_text()
    fake_machine.replace("measure", fake_measure())
    assert fake_machine.doctor_text().endswith(
        "    -> set GRPO_KERNELS_PRODUCTS=fp32\n\nall is well\n"
    )


# ---- findings


BF16 = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})
#: A report in which nothing is wrong.
SOUND = {
    "device": "cpu",
    "package": {"kind": "install", "shadows": None, "source": None},
    "native": {"path": "_cpu.so", "reason": None, "instruction_set": "avx512bf16"},
    "cpu": {"torch_threads": 8, "usable_processors": 8, "processors": 8, "load": 1.0},
    "gpu": {"reason": "built without"},
}


def advice(environ=(), present=False, gpu=False, built=None, **changes):
    """Return the findings about a machine whose facts are `SOUND` with changes.

    environ   environment variables
    present   whether the system has a GPU
    gpu       whether torch can use it
    built     the digest of the sources that the compiled module was built from; None: the present
              ones
    changes   entries of the facts
    """
    report = {
        name: value | changes.get(name, {}) if isinstance(value, dict) else value
        for name, value in SOUND.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "built_from", lambda path: built or machine.source_digest())
        patch.setattr(machine, "processor", lambda: ("", BF16))
        patch.setattr(machine, "device_present", lambda: present)
        patch.setattr(torch.cuda, "is_available", lambda: gpu)
        return machine.advice(report | {"device": changes.get("device", "cpu")}, dict(environ))


def amx_advice(difference, refusal=0):
    """Return the findings about an Intel processor whose AMX matmuls were compared.

    difference   what the comparison found, None if they are right
    refusal      errno of the system call that asks for AMX, 0 if it succeeds
    """
    if cpu_matmuls._cpu is None:
        pytest.skip("without the compiled module nothing is compared")
    with amx.processor(amx.INTEL, refusal, difference):
        return advice()


def setting_findings(**environ):
    """Return the findings about environment variables, if no engine but "torch" can run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_matmuls, "engines", lambda: {"amx": "no tiles", "torch": None})
        return [*machine.setting_findings(environ)]


MISSING = {"native": {"path": None, "reason": "it was not built"}}
#: A function, its arguments, and a pattern of the one finding that it returns; None: no finding.
FINDINGS = [
    (advice, {}, None),
    (advice, MISSING, "grave: the compiled module is missing.*was not built.*force-reinstall grpo_kernels.*C\\+\\+17 compiler"),
    (advice, MISSING | {"device": "cuda"}, None),
    (advice, {"native": {"instruction_set": "avx2"}}, "slight: the compiled module runs avx2 code, but this processor has avx512bf16"),
    (advice, {"native": {"instruction_set": "avx2"}, "environ": {"GRPO_KERNELS_ISA": "avx2"}}, "slight: .*avx2 code, but.*-> unset GRPO_KERNELS_ISA$"),
    (advice, {"native": {"instruction_set": ""}}, "slight: CPU tensors run in eager PyTorch: the C\\+\\+ kernels need AVX2"),
    (advice, {"built": "other"}, "grave: the compiled module is out of date: .*other C\\+\\+ sources.*pip install"),
    (advice, {"package": {"shadows": "/site"}}, "hides the installed package at /site.*another directory"),
    (advice, {"cpu": {"torch_threads": 64}}, "64 threads on 8 processors.*OMP_NUM_THREADS=8"),
    (advice, {"cpu": {"torch_threads": 1}}, "1 of 8 processors .torchrun sets"),
    (advice, {"cpu": {"load": 20.0}}, "busy \\(load 20\\).*OMP_WAIT_POLICY=PASSIVE"),
    (advice, {"cpu": {"load": 20.0}, "environ": {"OMP_WAIT_POLICY": "passive"}}, None),
    (advice, {"present": True}, "grave: there is a GPU, but.*built without"),
    (advice, {"environ": {"NVIDIA_TF32_OVERRIDE": "1"}, "gpu": True}, "slight: fp32 matmuls are rounded to TF32"),
    (advice, {"environ": {"TRITON_INTERPRET": "1"}, "gpu": True}, "grave: TRITON_INTERPRET=1"),
    (amx_advice, {"difference": None}, None),
    (amx_advice, {"difference": "3 elements differ", "refusal": 95}, None),
    (amx_advice, {"difference": "3 elements differ"}, "grave: the AMX matmuls are wrong on this machine: 3 elements differ; losses.* are right, but use another engine.*report.*GRPO_KERNELS_PRODUCTS=fp32 or avx512bf16"),
    (setting_findings, {"GRPO_KERNELS_STRICT": "1", "GRPO_KERNELS_CHECK": "0", "TRITON_INTERPRET": "", "OMP_NUM_THREADS": "3"}, None),
    (setting_findings, {"GRPO_KERNELS_BACKEND": "egaer"}, "grave: GRPO_KERNELS_BACKEND=egaer: .*auto, eager, cpu, triton"),
    (setting_findings, {"GRPO_KERNELS_PRODUCTS": "amx"}, "grave: GRPO_KERNELS_PRODUCTS=amx: no tiles, and calls raise -> set it to one of auto, torch,"),
    (setting_findings, {"GRPO_KERNELS_ISA": "avx512"}, None),
    (setting_findings, {"GRPO_KERNELS_ISA": "avx3"}, "grave: GRPO_KERNELS_ISA=avx3: .*does not load -> set it to one of avx2, avx512, avx512bf16, or"),
    (setting_findings, {"GRPO_KERNELS_STRICT": "true"}, "slight: GRPO_KERNELS_STRICT=true: it has no effect -> set it to one of 0, 1"),
    (setting_findings, {"GRPO_KERNELS_STRICKT": "1"}, "slight: GRPO_KERNELS_STRICKT is not a setting.*GRPO_KERNELS_STRICT, GRPO_KERNELS_CHECK"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "expected"), FINDINGS)
def test_findings(function, arguments, expected):
    findings = [
        f"{'grave' if f.grave else 'slight'}: {f.problem} -> {f.remedy}"
        for f in function(**arguments)
    ]
    if expected is None:
        assert findings == []
    else:
        (finding,) = findings
        assert re.search(expected, finding), finding


def test_an_outdated_module_blocks_the_tests_only_without_a_gpu():
    (on_cpu,) = advice(built="other", device="cpu")
    (on_gpu,) = advice(built="other", device="cuda")
    assert on_cpu.blocks and not on_gpu.blocks


@pytest.mark.skipif(
    cpu_matmuls._cpu is None, reason="without the compiled module nothing is compared"
)
@pytest.mark.filterwarnings("ignore:the AMX matmuls are wrong")
def test_amx_is_in_the_report_with_the_reason_why_it_is_not_used():
    with amx.processor(amx.INTEL, difference="3 elements differ"):
        facts = machine.facts(CPU)
        assert (
            facts["matmuls"]["engine"] == "fp32"
            and "3 elements differ" in facts["matmuls"]["engines"]["amx"]
        )
        text = doctor._text_of_facts(facts)
        assert (
            "engine fp32 (" in text
            and "amx (bf16 matmuls in AMX tiles) cannot run here: the AMX matmuls are wrong" in text
        )
    with amx.processor(amx.INTEL, difference=None):
        assert machine.facts(CPU)["matmuls"] == {
            "engine": "amx",
            "engines": dict.fromkeys(cpu_matmuls.ENGINES),
        }


# ---- facts


def test_every_setting_that_the_package_reads_is_described():
    package = machine.PACKAGE.rglob("*.py")
    read = {
        name
        for path in package
        for name in re.findall(r"\bGRPO_KERNELS_[A-Z_]+[A-Z]\b", path.read_text())
    }
    assert read - {"GRPO_KERNELS_TEST"} == {
        name for name in machine.SETTINGS if name.startswith("GRPO_KERNELS_")
    }
