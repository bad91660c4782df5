"""python -m grpo_kernels doctor:

its findings, its self-test, its step, its report and exit status.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
import torch

from grpo_kernels.diagnosis import Finding, doctor, machine, self_test, step
from support import amx
from support.processes import WITHOUT, finish, start

CPU, Tensor, ROOT = torch.device("cpu"), torch.Tensor, Path(__file__).parents[2]
backends, cpu_matmuls = doctor.backends, doctor.cpu_matmuls
FACTS = machine.facts(CPU)
NOTHING = {
    "available": True,
    "passed": True,
    "value_error": 0.0,
    "gradient_error": {},
    "seconds": 0.0,
    "warnings": [],
    "checks": [],
}


class Sound:
    """A machine without problems, but for what a test says:

    its facts, its self-test and its step.
    """

    def __init__(self, monkeypatch, capsys):
        self.monkeypatch, self.set, self.capsys = (
            monkeypatch,
            functools.partial(monkeypatch.setattr, doctor),
            capsys,
        )
        self.know()
        self.set("self_test", lambda name, device: NOTHING)
        monkeypatch.setattr(backends, "unavailable", lambda name: None)
        monkeypatch.setattr(backends, "native_backend", lambda device: ("cpu", None))

    def know(self, *findings):
        found = {
            "facts": FACTS | {"native": FACTS["native"] | {"path": "there"}},
            "advice": list(findings),
        }
        found |= {"version_findings": [], "setting_findings": []}
        for name, known in found.items():
            self.monkeypatch.setattr(machine, name, lambda *_, known=known: known)

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
    """With the self-test of the eager backend, and a backend that is gone though the module is
    there.
    """
    sound.set("self_test", self_test.self_test)
    monkeypatch.setattr(
        backends, "unavailable", lambda name: None if name == "eager" else f"{name} is gone"
    )
    monkeypatch.setattr(backends, "native_backend", lambda device: ("cpu", "it is gone"))
    report = sound.reports("--quick", healthy=False)
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
    """That the engine "fp32" cannot run does not mean that fp32 tensors cannot."""
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


def test_a_wrong_backend_is_named_and_not_timed(sound):
    check = {
        "case": "a case",
        "level": "logits",
        "dtype": "float32",
        "vocab": 7,
        "errors": {"d_logits": float("nan")},
    }
    wrong = NOTHING | {"passed": False, "checks": [check | {"failure": "d_logits is off by 1e+00"}]}
    sound.set("self_test", lambda name, device: wrong if name == "cpu" else NOTHING)
    report = sound.reports(healthy=False)
    (problem,) = report["problems"]
    assert (
        "fails 1 of 1 checks (a case, from logits, float32, vocabulary 7: d_logits"
        in problem["problem"]
    )
    assert report["step"] is None and "cpu      WRONG" in sound.says(healthy=False)
    assert report["backends"]["cpu"]["checks"][0]["errors"] == {
        "d_logits": "nan"
    }  # JSON has no NaN


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
    assert (
        stopped["auto"] == "eager"
        and stopped["native"]["path"] is None
        and stopped["backends"] == {}
    )
    assert went_on["backends"]["eager"]["passed"] and not went_on["backends"]["cpu"]["available"]
    assert "No module named 'triton'" in went_on["backends"]["triton"]["reason"]


# ---- the self-test


def scaled(by, *where):
    """Part of a tensor, times a factor."""

    def fault(name, x, dtype):
        x[where] *= by
        return x

    return fault


def without_small_rows(name, x, dtype):
    sizes = x.abs().amax(-1, True)
    return x.where(sizes > 0.029 * sizes.max(), 0.0) if dtype == "bfloat16" else x


#: What results of these names have -> the vocabularies or dtypes whose checks find it, and no
#: others.
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
    "NaN where it is masked, or nothing pulls": (
        "",
        lambda name, x, dtype: torch.where(x == 0, torch.nan, x),
        {1003, 128_257},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_self_test_detects_a_fault(fault, monkeypatch):
    ours, (prefix, change, where) = self_test.results, FAULTS[fault]

    def results(q, name, device, dtype):
        found = ours(q, "eager", CPU, dtype)
        return {
            n: change(n, x, dtype) if name != "eager" and n.startswith(prefix) else x
            for n, x in found.items()
        }

    monkeypatch.setattr(self_test, "results", results)
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
    assert {check["case"] in self_test.BESIDE_EAGER for check in checks if check["failure"]} == {
        backend != "eager"
    }


def test_a_check_that_raises_costs_itself_only(monkeypatch):
    def broken(*_):
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr(self_test, "results", broken)
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
def test_when_a_step_is_slower_and_when_nobody_can_tell(gain, verdict):
    assert step.Timing("ours", 5.0, 5, gain).verdict == verdict


def timed_as(**gains):
    """A step whose second contender has this gain at a level, and at others one of 2."""

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
        ([Finding("old trl", "x", False)], "cpu", "nothing that doctor knows explains it"), ([], "eager", 'backend="auto" takes eager here'),
    ],
)  # fmt: skip
def test_slower_than_plain_pytorch_is_a_problem_with_reason_and_way_out(
    known, auto, why, sound, monkeypatch
):
    sound.know(*known)
    sound.set("measure", timed_as(matmuls=(1.0, 1.0, 1.0), logits=(0.69, 0.7, 0.71)))
    monkeypatch.setattr(
        backends, "native_backend", lambda device: ("cpu", None if auto == "cpu" else "not built")
    )
    (slow,) = sound.reports(healthy=False)["problems"]
    assert (
        "a step from logits: ours is slower than plain PyTorch: 14 ms where that takes 10 ms"
        in slow["problem"]
        and why in slow["problem"]
    )
    assert "objective_loss" in slow["remedy"] and sound.says(healthy=False).endswith(
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


def test_times_that_spread_are_not_judged(sound):
    sound.set("measure", timed_as(logits=(0.7, 2.0, 69.7)))
    assert "all is well, as far as could be told: some times spread too much" in sound.says()
    sound.set("measure", timed_as())
    assert sound.says().endswith("    -> set GRPO_KERNELS_PRODUCTS=fp32\n\nall is well\n")


# ---- findings: what is asked -> the one finding in these words, or none


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
    """About a machine that is sound but for these changes of its report."""
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


def about_amx(difference, refusal=0):
    """Findings about an Intel processor with AMX whose products were compared."""
    if cpu_matmuls._cpu is None:
        pytest.skip("without the compiled module nothing is compared")
    with amx.processor(amx.INTEL, refusal, difference):
        return advice()


def settings_of(**environ):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_matmuls, "engines", lambda: {"amx": "no tiles", "torch": None})
        return [*machine.setting_findings(environ)]


MISSING = {"native": {"path": None, "reason": "it was not built"}}
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
    (about_amx, {"difference": None}, None),
    (about_amx, {"difference": "3 elements differ", "refusal": 95}, None),
    (about_amx, {"difference": "3 elements differ"}, "grave: the AMX products are wrong on this machine: 3 elements differ; losses.* are right, but use another engine.*report.*GRPO_KERNELS_PRODUCTS=fp32 or avx512bf16"),
    (settings_of, {"GRPO_KERNELS_STRICT": "1", "GRPO_KERNELS_CHECK": "0", "TRITON_INTERPRET": "", "OMP_NUM_THREADS": "3"}, None),
    (settings_of, {"GRPO_KERNELS_BACKEND": "egaer"}, "grave: GRPO_KERNELS_BACKEND=egaer: .*auto, eager, cpu, triton"),
    (settings_of, {"GRPO_KERNELS_PRODUCTS": "amx"}, "grave: GRPO_KERNELS_PRODUCTS=amx: no tiles, and calls raise -> set it to one of auto, torch,"),
    (settings_of, {"GRPO_KERNELS_ISA": "avx512"}, None),
    (settings_of, {"GRPO_KERNELS_ISA": "avx3"}, "grave: GRPO_KERNELS_ISA=avx3: .*does not load -> set it to one of avx2, avx512, avx512bf16, or"),
    (settings_of, {"GRPO_KERNELS_STRICT": "true"}, "slight: GRPO_KERNELS_STRICT=true: it has no effect -> set it to one of 0, 1"),
    (settings_of, {"GRPO_KERNELS_STRICKT": "1"}, "slight: GRPO_KERNELS_STRICKT is not a setting.*GRPO_KERNELS_STRICT, GRPO_KERNELS_CHECK"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "given", "expected"), FINDINGS)
def test_findings(function, given, expected):
    found = [
        f"{'grave' if f.grave else 'slight'}: {f.problem} -> {f.remedy}" for f in function(**given)
    ]
    assert found == [] if expected is None else len(found) == 1 and re.search(expected, found[0]), (
        found
    )


def test_an_old_module_keeps_nothing_from_being_tested_beside_a_gpu():
    assert [
        f.blocks for device in ("cpu", "cuda") for f in advice(built="other", device=device)
    ] == [True, False]


@pytest.mark.skipif(
    cpu_matmuls._cpu is None, reason="without the compiled module nothing is compared"
)
@pytest.mark.filterwarnings("ignore:the AMX products are wrong")
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
            and "amx (bf16 matmuls in AMX tiles) cannot run here: the AMX products are wrong"
            in text
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
