"""python -m grpo_kernels doctor [--json] [--quick] [--without-native]: report which kernels run on
this machine, whether they are right and fast, and what to repair.

Exit code: 0 all is well; 1 there are problems; 2 wrong arguments. `advice` (slow settings, untested
versions) does not change it. A step that is slower than plain PyTorch by more than 5 % in three
quarters of the rounds is a problem. If the rounds disagree, advice says so. On a CPU a step from
hidden states is first timed with each engine that can compute its matmuls. With --quick no step is
timed, and the report says so. If losses run on the CPU and the compiled module is missing or out of
date, doctor reports that and stops. With --without-native it still tests the other backends. With
--json it prints one object instead of the text:

    healthy        bool, exit code 0
    problems       [{problem, remedy}]: kernels are missing, wrong or slower than plain PyTorch
    advice         [{problem, remedy}]: kernels are right, but may be slow or not tested
    versions       {grpo_kernels, torch, cuda, hip, triton, python, os, numpy, transformers, trl,
                   ...: text or null}
    package        {path, kind: "checkout" | "editable install" | "install", shadows, source}
    native         the compiled module: {path, reason (why it is missing), compiler,
                   instruction_set (in use), instruction_sets (all that it can use here)}
    matmuls        matmuls on the CPU: {engine (null if the setting is wrong), engines: {name: why
                   it cannot run here, or null}}
    cpu            {model, processors, usable_processors, torch_threads, load, free_gb}
    gpu            {available, reason (why not), devices: [{name, capability, multiprocessors,
                   memory_gb, free_gb}]}
    device         where the tests below ran: "cpu", or the type of the accelerator if Triton has a
                   driver for it ("cuda", "xpu")
    auto           the backend that backend="auto" chooses on this device
    backends       {eager, cpu, triton: {available, reason, passed, value_error, gradient_error:
                   {dtype}, seconds, warnings, checks: [{case, level, dtype, vocab, errors,
                   failure}]}}. A backend that is not available has only the first two. {} if
                   doctor stopped earlier. grpo_kernels/diagnosis/self_test.py has the checks
    step           [{level ("matmuls", "logits", "hidden"), rows, hidden, vocab, dtype, timings:
                   [{name, ms, runs, gain}]}], or null. gain: the speed-up over the first timing,
                   [lower quartile, median, upper quartile]; null for the first timing. The first
                   is plain PyTorch, or at level "matmuls" the engine in use
    environment    the environment variables that are set and affect the kernels
    settings       {variable: meaning}: all environment variables that the package reads

Errors of values (loss, log-probs, entropy) are absolute. Errors of gradients are relative to the
largest entry. A NaN is the text "nan".
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..core import backends
from . import Finding, first_line, machine
from .machine import cpu_matmuls
from .self_test import LIMITS, self_test
from .step import DIVIDED, DIVIDED_WITH_GRAD_SCALE, Step, Timing, measure

#: What to do about an exception, by a part of its message. The last entry matches every message.
REMEDIES = {
    "C compiler": (
        "install a C compiler (Debian, Ubuntu: apt-get install gcc) or set CC: Triton compiles its"
        " launcher with it"
    ),
    "Python.h": (
        "install Python's headers (Debian, Ubuntu: apt-get install python3-dev): Triton's launcher"
        " needs them"
    ),
    "no kernel image": (
        "install a torch that was built for this GPU: torch.cuda.get_arch_list() lists the"
        " architectures of the one that is installed"
    ),
    "": (
        'train with another backend (backend="eager" always runs), and reinstall the package; if'
        " that does not help, report it with the output of `python -m grpo_kernels doctor --json`"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Report which kernels run on this machine and why, test them, and time a training step."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_kernels doctor",
        description=main.__doc__,
        allow_abbrev=False,
        epilog="exit code: 0 all is well, 1 there are problems, 2 wrong arguments",
    )
    flags = {
        "--json": "print one JSON object; see grpo_kernels/diagnosis/doctor.py for its keys",
        "--quick": "leave out the step and its timing",
        "--without-native": "continue if the compiled module is missing or out of date",
    }
    for flag, meaning in flags.items():
        parser.add_argument(flag, action="store_true", help=meaning)
    arguments = parser.parse_args(argv)
    write: Callable[[str], object] = (lambda text: None) if arguments.json else print
    report = examine(step=not arguments.quick, write=write, without_native=arguments.without_native)
    if arguments.json:
        # JSON has no NaN and no infinity. The second dump writes them as texts.
        without_nan = json.loads(json.dumps(report), parse_constant=str.lower)
        print(json.dumps(without_nan, indent=1))
    return 0 if report["healthy"] else 1


def examine(
    step: bool = True, write: Callable[[str], object] = print, without_native: bool = False
) -> dict[str, Any]:
    """Return the report that --json prints.

    step             whether to time a training step
    write            called with each section of the text as soon as it is known
    without_native   whether to test the other backends if the compiled module cannot be used
    """
    device = machine.device_of_losses()
    report = machine.facts(device)
    findings = [
        *machine.version_findings(),
        *machine.advice(report),
        *machine.setting_findings(os.environ),
    ]
    write(_text_of_facts(report))
    name, reason_against = backends.native_backend(device)
    report["auto"] = name if reason_against is None else "eager"
    report["backends"] = {}
    report["step"] = None
    # A finding that blocks: the compiled module, which losses on a CPU need, cannot be used.
    if without_native or not any(finding.blocks for finding in findings):
        findings += test_backends(report, device, write)
        # A backend that fails the checks is not timed.
        if step and report["backends"][report["auto"]]["passed"]:
            time_step(report, device, write, findings)
    else:
        write("nothing was tested; --without-native tests the other backends\n")
    # Grave findings make the command fail. The others are advice.
    problems = [{"problem": f.problem, "remedy": f.remedy} for f in findings if f.grave]
    advice = [{"problem": f.problem, "remedy": f.remedy} for f in findings if not f.grave]
    report = {"healthy": not problems, "problems": problems, "advice": advice, **report}
    write(_text_of_findings(report))
    return report


def test_backends(
    report: dict[str, Any], device: torch.device, write: Callable[[str], object]
) -> Iterator[Finding]:
    """Test each backend, and yield a finding for each one that is missing or wrong.

    A finding is a problem with its remedy.

    report   gets the results of each backend as report["backends"][name]
    device   where losses run
    write    called with the text of each backend
    """
    native_name, _ = backends.native_backend(device)
    write(
        "backends, values and gradients (eager: against plain PyTorch, the others against eager"
        " too):"
    )
    for name in backends.BACKENDS:
        reason = backends.unavailable(name)
        if reason is None:
            result = self_test(name, torch.device("cpu") if name == "cpu" else device)
            yield from result_findings(name, result)
        else:
            result = {"available": False, "reason": reason}
            # `machine.advice` has already reported a missing compiled module.
            is_known = name == "cpu" and report["native"]["path"] is None
            if name == native_name and not is_known:
                problem = f"the kernels for {device.type} tensors do not run: {reason}"
                yield Finding(problem, remedy_for(reason), grave=True)
        report["backends"][name] = result
        write(_text_of_backend(name, result))
    write(f'  backend="auto" chooses {report["auto"]} for {device.type} tensors.\n')


def result_findings(name: str, result: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each warning in the self-test of a backend, and one if checks failed.

    result   what `self_test` returned for the backend of this name
    """
    for warning in result["warnings"]:
        yield Finding(warning, "see the warning; the results were right")
    failed = [check for check in result["checks"] if check["failure"]]
    if failed:
        first = "{case}, from {level}, {dtype}, vocabulary {vocab}: {failure}".format(**failed[0])
        num_checks = len(result["checks"])
        problem = f'backend "{name}" fails {len(failed)} of {num_checks} checks ({first})'
        yield Finding(problem, remedy_for(failed[0]["failure"]), grave=True)


def time_step(
    report: dict[str, Any],
    device: torch.device,
    write: Callable[[str], object],
    findings: list[Finding],
) -> None:
    """Time a training step of the backend that backend="auto" chooses.

    report     gets the times as report["step"]
    device     where the step runs
    write      called with the text of each timed step
    findings   gets a finding for each result that is slow, and for each step that was not timed
    """
    report["step"] = []
    # "logits" and "hidden" are what the loss is computed from. "matmuls" compares the engines
    # (implementations) of matmuls, which only the CPU has.
    levels = ("logits", "matmuls", "hidden") if device.type == "cpu" else ("logits", "hidden")
    for level in levels:
        try:
            step = measure(level, report["auto"], device)
        except Exception as error:  # most likely too little memory: report what else was found
            problem = f"a step from {level} was not timed: {first_line(error)}"
            is_grave = not isinstance(error, MemoryError)
            findings.append(Finding(problem, remedy_for(str(error)), grave=is_grave))
            continue
        report["step"].append(asdict(step))
        write(_text_of_step(step))
        if level == "matmuls":
            findings += matmul_findings(step)
        else:
            findings += step_findings(step, report["auto"], findings)


def remedy_for(message: str) -> str:
    """Return what to do about an exception with this message."""
    # The last part is "", which every message contains.
    return next(remedy for part, remedy in REMEDIES.items() if part.lower() in message.lower())


def step_findings(step: Step, auto: str, earlier: list[Finding]) -> Iterator[Finding]:
    """Yield a finding for each loss that is slower than plain PyTorch, or too unsteady to compare.

    A finding is a problem or an advice, with a remedy.

    step      the times of a training step, plain PyTorch first
    auto      the backend that was timed
    earlier   all findings so far. Those that may explain a slow step are named as its reason.
    """
    rerun = "run again on an idle machine"
    causes = [finding for finding in earlier if finding.slows]  # it may slow down our kernels
    if auto == "eager":
        causes = [
            Finding(
                'backend="auto" chooses eager here, which fuses nothing',
                "get the native kernels, see above",
            )
        ]
    reason = "; ".join(cause.problem for cause in causes) or "nothing that doctor knows explains it"
    workaround = (
        "until then compute log-probs in plain PyTorch, and the loss with"
        " grpo_kernels.losses.objective_loss"
    )
    remedy = "; ".join([*(cause.remedy for cause in causes), rerun, workaround])
    plain, *others = step.timings
    for timing in others:
        if timing.verdict == "slower":
            times = f"{timing.ms:.0f} ms instead of {plain.ms:.0f} ms, {_speed_up(timing)}"
            problem = f"{step.title}: {timing.name} is slower than plain PyTorch: {times}: {reason}"
            yield Finding(problem, remedy, grave=True)
        elif timing.verdict == "unsteady":
            yield Finding(f"{step.title}: {timing.name} is {_speed_up(timing)}", rerun)


def matmul_findings(step: Step) -> Iterator[Finding]:
    """Yield a finding if another engine of matmuls is faster than the one in use.

    An engine is an implementation of matmuls on the CPU. An environment variable chooses it.

    step   the timings of a training step with each engine, the one in use first
    """
    used, *others = step.timings
    faster = [timing for timing in others if timing.verdict == "faster"]
    if faster:
        best = min(faster, key=lambda timing: timing.ms)
        problem = (
            f"matmuls: a step with the engine {best.name} takes {best.ms:.0f} ms, with"
            f" {used.name}, which is in use, {used.ms:.0f} ms"
        )
        yield Finding(problem, f"set {cpu_matmuls.SETTING}={best.name}", slows=True)


# ---- the report as text


def _text_of_facts(report: dict[str, Any]) -> str:
    """Return the text of the facts: one line for each section, and for each GPU.

    report   what `machine.facts` returned
    """
    gpus = [_text_of_items(gpu) for gpu in report["gpu"]["devices"]]
    if not gpus:
        gpus = [f"none ({report['gpu']['reason']})"]
    lines = [
        f"versions: {_text_of_items(report['versions'])}",
        f"package: {_text_of_items(report['package'])}",
        f"native: {_text_of_items(report['native'])}",
        f"matmuls: {_text_of_matmuls(report['matmuls'])}",
        f"cpu: {_text_of_items(report['cpu'])}",
        f"environment: {_text_of_items(report['environment']) or 'nothing set'}",
        *(f"gpu: {gpu}" for gpu in gpus),
        "",
    ]
    return "\n".join(lines)


#: What each engine of `cpu_matmuls.ENGINES` does.
PURPOSES = {
    "amx": "bf16 matmuls in AMX tiles",
    "avx512bf16": "bf16 matmuls in AVX512_BF16 instructions",
    "fp32": "our own fp32 kernels for matmuls of bf16 and fp32 tensors",
    "torch": "torch.mm, also for fp32 tensors",
}


def _text_of_matmuls(matmuls: dict[str, Any]) -> str:
    """Return the engine in use and the engines that cannot run, each with its purpose.

    matmuls   the entry "matmuls" of the report
    """
    engine = matmuls["engine"]
    in_use = (
        f"engine {engine} ({PURPOSES[engine]})" if engine else "no engine, the setting is wrong"
    )
    words = [in_use]
    for name, reason in matmuls["engines"].items():
        if reason:
            words.append(f"{name} ({PURPOSES[name]}) cannot run here: {reason}")
    return "; ".join(words)


#: Names of facts in the text, if they differ from the keys of the report.
LABELS = {
    "instruction_set": "instruction set",
    "instruction_sets": "supported instruction sets",
    "usable_processors": "usable processors",
    "torch_threads": "torch threads",
    "free_gb": "free GB",
    "memory_gb": "memory GB",
}


def _text_of_items(items: dict[str, Any]) -> str:
    """Return "name value, name value", without items that are empty, None or 0."""
    words = []
    for name, value in items.items():
        if value:
            text = " ".join(value) if isinstance(value, list) else value
            words.append(f"{LABELS.get(name, name)} {text}")
    return ", ".join(words)


def _text_of_backend(name: str, result: dict[str, Any]) -> str:
    """Return one line about a backend: its checks, and its largest errors next to their limits.

    name     the backend
    result   the entry of the backend in report["backends"]
    """
    if not result["available"]:
        return f"  {name:8} not available: {result['reason']}"
    errors = {"value": result["value_error"], **result["gradient_error"]}
    with_limits = {kind: f"{error:.0e} of {LIMITS[kind]:.0e}" for kind, error in errors.items()}
    verdict = "ok" if result["passed"] else "WRONG"
    checks = f"{len(result['checks'])} checks, {result['seconds']:.1f} s"
    return f"  {name:8} {verdict}: {checks}; largest errors: {_text_of_items(with_limits)}"


def _text_of_step(step: Step) -> str:
    """Return a line with the size of a step, a line for each timing, and advice on grad_scale."""
    shape = " x ".join(f"{n:,}" for n in (step.rows, step.hidden, step.vocab) if n)
    lines = [
        f"{step.title}, {shape}, {step.dtype} (loss and gradient, median of {step.timings[0].runs}"
        " rounds):"
    ]
    for timing in step.timings:
        line = f"  {timing.name:24} {timing.ms:9,.1f} ms  {_speed_up(timing)}"
        lines.append(line.rstrip())
    divided = step.timing(DIVIDED)
    with_grad_scale = step.timing(DIVIDED_WITH_GRAD_SCALE)
    if divided is not None and with_grad_scale is not None:
        lines.append(
            "  If you multiply a loss before backward (gradient accumulation), pass the factor as"
            f" grad_scale=1 / 4: {with_grad_scale.ms:,.1f} ms in place of {divided.ms:,.1f} ms."
        )
    return "\n".join([*lines, ""])


def _speed_up(timing: Timing) -> str:
    """Return how many times as fast as the first timing this one is, "" for the first."""
    if timing.gain is None:
        return ""
    lower, median, upper = timing.gain
    if timing.verdict == "unsteady":
        return (
            f"too unsteady to compare: {lower:.1f} to {upper:.1f} times as fast in {timing.runs}"
            " rounds"
        )
    return f"{median:.1f} times as fast (median over the rounds)"


def _text_of_findings(report: dict[str, Any]) -> str:
    """Return the advice and the problems with their remedies, then the verdict in one line.

    report   the whole report, as `examine` returns it
    """
    lines = []
    for kind in ("advice", "problems"):
        if report[kind]:
            lines.append(f"{kind}:")
            lines += (f"  {f['problem']}\n    -> {f['remedy']}" for f in report[kind])
            lines.append("")
    if report["problems"]:
        verdict = "there are problems, see above"
    elif any("too unsteady" in f["problem"] for f in report["advice"]):
        verdict = "all is well, except that some times spread too much to compare, see above"
    elif report["step"]:
        verdict = "all is well"
    else:
        verdict = "all is well, as far as it was tested: no step was timed"
    return "\n".join([*lines, verdict])
