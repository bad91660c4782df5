"""python -m grpo_kernels doctor [--json] [--quick] [--without-native]: what runs here and why, whether it is right, how
fast it is, and what to repair.

Exit code: 0 all is well; 1 there are problems; 2 wrong arguments. `advice` (slow settings, untested versions) does not
change it. A step that is slower than plain PyTorch by more than 5 % in three quarters of the rounds is a problem; where rounds
disagree, advice says that they do. On a CPU the matrix products of a step are timed first, by what makes them, by all others that
can, and by torch.mm. --quick skips the timing of a step, so that speed is neither, and says so. If losses run on
the CPU and the compiled module is missing or out of date, doctor reports that and stops; with --without-native it still tests
the other backends. --json prints one object instead of the report:

    healthy        bool, exit code 0
    problems       [{problem, remedy}]: kernels are missing, wrong or slower than plain PyTorch
    advice         [{problem, remedy}]: kernels run and are right, but may be slow or not tested
    versions       {grpo_kernels, torch, cuda, hip, triton, python, os, libc, numpy, transformers, trl, ...: text or null}
    package        {path, kind: "checkout" | "editable install" | "install", shadows, source}
    native         {path, reason (why it is missing), compiler, isa (in use), isas, files}: the compiled module
    products       {engine (null: the setting is wrong), engines: {name: why it cannot run here, or null}}: on the CPU
    cpu            {model, processors, affinity, cgroup_processors, usable_processors, torch_threads, interop_threads, load,
                   openmp, memory_available (bytes)}
    gpu            {available, reason (why not), other (an accelerator without kernels), driver,
                   devices: [{name, capability, multiprocessors, memory, free}]}
    distributed    {available, backends}
    device         "cpu", or the type of the accelerator that Triton's driver serves ("cuda", "xpu"): where the tests below ran
    auto           the backend that backend="auto" takes there
    backends       {eager, cpu, triton: {available, reason, passed, value_error, gradient_error: {dtype}, seconds, warnings,
                   checks: [{case, level, dtype, vocab, errors, failure}]}}; only the first two if it is not available;
                   {} if doctor stopped before
    step           [{level ("products", "logits", "hidden"), rows, hidden, vocab, dtype, reason,
                   timings: [{name, ms, extra_mb, runs, gain}]}], or null; gain: [lower quartile, median, upper quartile] of the
                   times as fast as the first, which is eager PyTorch or the products in use, null for that one
    environment    the environment variables that are set and affect the kernels
    settings       {variable: meaning}

Errors are absolute for values (loss, log-probs, entropy), relative to the largest entry for gradients. An error that is not
a number is the text "nan".
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from .._version import __version__
from ..rows import backends
from ..rows.backends import cpu_products
from . import Finding, environment, first_line, machine, native
from .self_test import Report, self_test
from .step import Step, Timing, measure

#: Part of an exception's message -> what to do about it.
REMEDIES = (
    (
        "C compiler",
        "install a C compiler (Debian, Ubuntu: apt-get install gcc) or set CC: Triton compiles its launcher with it",
    ),
    ("Python.h", "install Python's headers (Debian, Ubuntu: apt-get install python3-dev): Triton's launcher needs them"),
    ("No module named", "pip install what is missing"),
    ("Permission denied", "set TRITON_CACHE_DIR to a folder that can be written"),
    ("No space left", "free some disk space, or set TRITON_CACHE_DIR to another disk"),
    ("out of memory", "free some GPU memory: nvidia-smi shows who holds it"),
    ("out of resource", "report this GPU with the output of `python -m grpo_kernels doctor --json`"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Say what runs on this machine and why, test it against float64, time a step against eager PyTorch."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_kernels doctor",
        description=main.__doc__,
        allow_abbrev=False,
        epilog="exit code: 0 all is well, 1 there are problems, 2 wrong arguments",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; see grpo_kernels/diagnosis/doctor.py for its keys"
    )
    parser.add_argument("--quick", action="store_true", help="leave out the step and its timing")
    parser.add_argument(
        "--without-native", action="store_true", help="go on where the compiled module is missing or out of date"
    )
    arguments = parser.parse_args(argv)
    say = (lambda text: None) if arguments.json else print
    report = examine(step=not arguments.quick, say=say, without_native=arguments.without_native)
    if arguments.json:
        print(json.dumps(_finite(report), indent=1))
    return 0 if report["healthy"] else 1


def examine(step: bool = True, say: Any = print, without_native: bool = False) -> dict[str, Any]:
    """The report as --json prints it. `say` is called with each section of the text as soon as it is known."""
    device = machine.where()
    report, findings = facts(device)
    say(_text_of_facts(report))
    name, reason = backends.native_backend(device)
    report |= {"auto": name if reason is None else "eager"}
    report |= {"backends": {}, "step": None}
    if without_native or not any(f.blocks for f in findings):
        findings += tests(report, device, step, say, findings)
    else:
        say("nothing was tested; --without-native tests the backends that are there\n")
    by_kind = {
        kind: [{"problem": f.problem, "remedy": f.remedy} for f in findings if f.grave == grave]
        for kind, grave in (("problems", True), ("advice", False))
    }
    report = {"healthy": not by_kind["problems"], **by_kind, **report}
    say(_text_of_findings(report))
    return report


def tests(report: dict[str, Any], device: torch.device, step: bool, say: Any, known: list[Finding]) -> list[Finding]:
    """Tests each backend against float64 and times a step of the one that "auto" takes. Writes into `report` and returns
    the findings; `known` are those before."""
    findings: list[Finding] = []
    tested = report["backends"]
    say("backends, value and gradient against float64:")
    for name in backends.BACKENDS:
        reason = unavailable(name, device)
        if reason is None:
            result = self_test(name, torch.device("cpu") if name == "cpu" else device)
            tested[name] = _described(result)
            findings += result_findings(name, result)
        else:
            tested[name] = {"available": False, "reason": reason}
            # `facts` has already reported a missing module, with the reason.
            if name == backends.native_backend(device)[0] and (name != "cpu" or report["native"]["path"] is not None):
                problem = f"the kernels for {device.type} tensors do not run: {reason}"
                findings.append(Finding(problem, remedy_for(reason), True))
        say(_text_of_backend(name, tested[name]))
    auto = report["auto"]
    say(f'  backend="auto" takes {auto} for {device.type} tensors.\n')
    if step and tested[auto]["passed"]:  # a backend that fails the checks is not timed
        report["step"] = []
        for level in ("products", "logits", "hidden") if device.type == "cpu" else ("logits", "hidden"):
            try:
                timed = measure(level, auto, device)
            except Exception as error:  # most likely out of memory; the other findings still have to be reported
                findings.append(Finding(f"timing of {level} failed: {first_line(error)}", remedy_for(str(error)), True))
                continue
            report["step"].append(asdict(timed))
            if level == "products":
                findings += product_findings(timed)
            else:
                findings += step_findings(timed, auto, known if level == "logits" else [*known, *findings])
            say(_text_of_step(timed))
    return findings


def facts(device: torch.device) -> tuple[dict[str, Any], list[Finding]]:
    """The machine, the package and its settings, and the findings about them, before anything runs."""
    versions = {"grpo_kernels": __version__, **environment.versions()}
    package, (module, loaded) = native.package(), native.module()
    cpu, gpu = machine.cpu(), machine.gpus()
    report = {
        "versions": versions,
        "package": package,
        "native": module,
        "products": {"engine": native.engine(), "engines": cpu_products.engines()},
        "cpu": cpu,
        "gpu": gpu,
        "distributed": machine.distributed(),
        "device": device.type,
        "environment": environment.variables(),
        "settings": environment.SETTINGS,
    }
    try:
        torch_requires = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        torch_requires = []
    archs = torch.cuda.get_arch_list() if gpu["available"] and device.type == "cuda" else []
    findings = [
        *environment.version_findings(versions, torch_requires),
        *machine.gpu_findings(gpu, machine.device_present(), archs),
        *native.module_findings(module, loaded, package, machine.processor()[1], needed=device.type == "cpu"),
        *machine.thread_findings(cpu, os.environ),
        *environment.setting_findings(os.environ),
    ]
    return report, findings


def unavailable(name: str, device: torch.device) -> str | None:
    """Why a backend cannot be tested here; None if it can."""
    reason = backends.unavailable(name)
    if reason is None and name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "no GPU"
    return reason


def result_findings(name: str, result: Report) -> list[Finding]:
    findings = []
    if result.failures:
        first = result.failures[0]
        assert first.failure is not None
        where = f"{first.case}, from {first.level}, {first.dtype}, vocabulary {first.vocab}: {first.failure}"
        problem = f'backend "{name}" fails {len(result.failures)} of {len(result.checks)} checks against float64 ({where})'
        findings.append(Finding(problem, remedy_for(first.failure), True))
    return findings + [Finding(text, "see the warning; the results were right", False) for text in result.warnings]


def remedy_for(message: str) -> str:
    """What to do about a failure with this message."""
    known = next((remedy for part, remedy in REMEDIES if part.lower() in message.lower()), None)
    other = (
        'train with another backend (backend="eager" is always there), install the package again, and if that does not help '
    )
    return known or other + "report it with the output of `python -m grpo_kernels doctor --json`"


def step_findings(step: Step, auto: str, known: list[Finding]) -> list[Finding]:
    """What is slower than plain PyTorch, with the findings among `known` that may be why, and what could not be compared."""
    findings, again = [], "run again on an idle machine"
    for t in step.timings:
        if not t.steady and not t.slower:
            problem = f"{step.what}: the times of {t.name} spread too much to judge, {_spread(t)}"
            findings.append(Finding(problem, again, False))
        elif t.slower:
            causes = [f for f in known if f.slows]
            if auto == "eager":
                causes = [
                    Finding('backend="auto" takes eager here, which fuses nothing', "get the native kernels, see above", False)
                ]
            why = "; ".join(f.problem for f in causes) or "nothing that doctor knows explains it"
            way_out = "until then take log-probs of plain PyTorch and grpo_kernels.losses.objective_loss"
            remedy = "; ".join([*(f.remedy for f in causes), again, way_out])
            slow = f"{t.name} is slower than plain PyTorch: {t.ms:.0f} ms where that takes {step.timings[0].ms:.0f} ms"
            findings.append(Finding(f"{step.what}: {slow} ({_times(t)}): {why}", remedy, True))
    return findings


def product_findings(step: Step) -> list[Finding]:
    """What makes products sooner than those in use: the fastest that can be set, else torch.mm."""
    faster = sorted((t for t in step.timings if t.faster), key=lambda t: (t.name not in cpu_products.ENGINES, t.ms))
    findings = []
    for t in faster[:1]:
        used = step.timings[0]
        problem = f"matrix products: {t.name} makes them in {t.ms:.0f} ms, {used.name}, which is in use, in {used.ms:.0f} ms"
        remedy = f"set {cpu_products.SETTING}={t.name}"
        if t.name not in cpu_products.ENGINES:
            problem += "; its results are rounded to bf16, ours are fp32" if step.dtype == "bfloat16" else ""
            remedy = "report this processor with the output of `python -m grpo_kernels doctor --json`"
        findings.append(Finding(problem, remedy, False, slows=True))
    return findings


# ---- the report as text


def _text_of_facts(report: dict[str, Any]) -> str:
    versions, package, module, cpu, gpu = (report[key] for key in ("versions", "package", "native", "cpu", "gpu"))
    core = ("torch", "triton", "python", "os", "libc")
    present = [f"{name} {versions[name]}" for name in environment.OPTIONAL if versions[name]]
    absent = [name for name in environment.OPTIONAL if not versions[name]]
    build = next((f" ({kind} {versions[kind]})" for kind in ("cuda", "hip") if versions[kind]), "")
    lines = [
        f"grpo_kernels {versions['grpo_kernels']} ({package['kind']}, {package['path']})",
        "  " + ", ".join(f"{name} {versions[name] or 'not installed'}{build * (name == 'torch')}" for name in core),
        "  " + ", ".join(present) + f"; not installed: {', '.join(absent) or 'nothing'}",
    ]
    if module["path"]:
        lines.append(
            f"compiled module: {module['isa']} in use (it has {', '.join(module['isas'])}), built by {module['compiler']}"
        )
        lines.append(f"  {module['path']}")
    else:
        lines.append(f"compiled module: missing ({module['reason']})")
    unable = [
        f"{name} cannot run here ({reason})" for name, reason in report["products"]["engines"].items() if reason is not None
    ]
    lines.append(f"matrix products on the CPU: {'; '.join([report['products']['engine'] or 'none', *unable])}")
    memory = f", {cpu['memory_available'] / 1e9:.1f} GB free" if cpu["memory_available"] else ""
    lines.append(
        f"CPU: {cpu['model']}, {cpu['torch_threads']} torch threads on {cpu['usable_processors']:g} of {cpu['processors']} "
        f"processors, load {cpu['load']}{memory}"
    )
    for d in gpu["devices"]:
        sizes = f"{d['free'] / 1e9:.1f} of {d['memory'] / 1e9:.1f} GB free"
        lines.append(
            f"GPU: {d['name']}, {d['capability']}, {d['multiprocessors']} multiprocessors, {sizes}, driver {gpu['driver']}"
        )
    if not gpu["available"]:
        lines.append(f"GPU: none ({gpu['reason']})")
    lines.append(f"torch.distributed: {', '.join(report['distributed']['backends']) or 'not available'}")
    return "\n".join([*lines, ""])


def _described(result: Report) -> dict[str, Any]:
    return {
        "available": True,
        "reason": None,
        "passed": not result.failures,
        "value_error": result.worst("value"),
        "gradient_error": {dtype: result.worst("gradient", dtype) for dtype in dict.fromkeys(c.dtype for c in result.checks)},
        "seconds": round(result.seconds, 2),
        "warnings": result.warnings,
        "checks": [asdict(check) for check in result.checks],
    }


def _text_of_backend(name: str, found: dict[str, Any]) -> str:
    if not found["available"]:
        return f"  {name:8} not available: {found['reason']}"
    gradients = ", ".join(f"{error:.0e} ({dtype})" for dtype, error in found["gradient_error"].items())
    checks = f"{len(found['checks'])} checks, {found['seconds']:.1f} s"
    verdict = "ok" if found["passed"] else "WRONG"
    lines = [f"  {name:8} {verdict}: worst error {found['value_error']:.0e} of values, {gradients} of gradients; {checks}"]
    for c in found["checks"]:
        if c["failure"]:
            lines.append(f"    {c['case']}, from {c['level']}, {c['dtype']}, vocabulary {c['vocab']}: {c['failure']}")
    return "\n".join(lines)


def _text_of_step(step: Step) -> str:
    shape = " x ".join(f"{n:,}" for n in (step.rows, step.hidden, step.vocab) if n)
    if step.reason is not None:
        return f"{step.what} was not timed: {step.reason}"
    each = "all three, those in use first" if step.level == "products" else "loss and gradient"
    lines = [f"{step.what}, {shape}, {step.dtype} ({each}, median of {step.timings[0].runs} in turns):"]
    for t in step.timings:
        gain = (
            "" if t.gain is None else f"  {_times(t)}" if t.steady or t.slower else f"  too unsteady to compare: {_spread(t)}"
        )
        memory = "memory unknown" if t.extra_mb is None else f"{t.extra_mb:7,.0f} MB extra"
        rate = f"  {6e-9 * step.rows * (step.hidden or 0) * step.vocab / t.ms:5.2f} TFLOP/s" if step.level == "products" else ""
        lines.append(f"  {t.name:20} {t.ms:9,.1f} ms{rate}  {memory}{gain}")
    return "\n".join([*lines, ""])


def _times(t: Timing) -> str:
    return "" if t.gain is None else f"{t.gain[1]:.1f} times as fast"


def _spread(t: Timing) -> str:
    return "" if t.gain is None else f"{t.gain[0]:.1f} to {t.gain[2]:.1f} times as fast in {t.runs} rounds"


def _text_of_findings(report: dict[str, Any]) -> str:
    lines = ["settings (environment):"]
    for name, meaning in report["settings"].items():
        lines.append(f"  {name}={report['environment'].get(name, '')}  {meaning}")
    lines += [f"  {name}={value}" for name, value in report["environment"].items() if name not in report["settings"]]
    for kind in ("advice", "problems"):
        if report[kind]:
            lines += ["", f"{kind}:", *(f"  {f['problem']}\n    -> {f['remedy']}" for f in report[kind])]
    well = "all is well" if report["step"] else "all is well, as far as was tested: no step was timed"
    if any(not Timing(**t).steady for step in report["step"] or () if step["level"] != "products" for t in step["timings"]):
        well = "all is well, as far as could be told: some times spread too much to compare, see above"
    return "\n".join([*lines, "", well if report["healthy"] else "there are problems, see above"])


def _finite(x: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_finite(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
