"""python -m grpo_kernels doctor [--json] [--quick] [--without-native]: report what runs here and
why, whether it is right, how fast it is, and what to repair.

Exit code: 0 all is well; 1 there are problems; 2 wrong arguments. `advice` (slow settings, untested
versions) does not change it. A step that is slower than plain PyTorch by more than 5 % in three
quarters of the rounds is a problem. If the rounds disagree, advice says so. On a CPU a step from
hidden states is first timed with each engine that can compute its matmuls. With --quick no step is
timed, and the report says so. If losses run on the CPU and the compiled module is missing or out of
date, doctor reports that and stops; with --without-native it still tests the other backends. With
--json it prints one object instead of the report:

    healthy        bool, exit code 0
    problems       [{problem, remedy}]: kernels are missing, wrong or slower than plain PyTorch
    advice         [{problem, remedy}]: kernels run and are right, but may be slow or not tested
    versions       {grpo_kernels, torch, cuda, hip, triton, python, os, numpy, transformers, trl,
                   ...: text or null}
    package        {path, kind: "checkout" | "editable install" | "install", shadows, source}
    native         {path, reason (why it is missing), compiler, instruction_set (in use),
                   instruction_sets (that it can use here)}: the compiled module
    matmuls        {engine (null: the setting is wrong), engines: {name: why it cannot run here, or
                   null}}: on the CPU
    cpu            {model, processors, usable_processors, torch_threads, load, free_gb}
    gpu            {available, reason (why not), devices: [{name, capability, multiprocessors,
                   memory_gb, free_gb}]}
    device         "cpu", or the type of the accelerator that Triton's driver serves ("cuda",
                   "xpu"): where the tests below ran
    auto           the backend that backend="auto" takes there
    backends       {eager, cpu, triton: {available, reason, passed, value_error, gradient_error:
                   {dtype}, seconds, warnings, checks: [{case, level, dtype, vocab, errors,
                   failure}]}}; only the first two if it is not available; {} if doctor stopped
                   before. Against what: see grpo_kernels/diagnosis/self_test.py
    step           [{level ("matmuls", "logits", "hidden"), rows, hidden, vocab, dtype, timings:
                   [{name, ms, runs, gain}]}], or null; gain: [lower quartile, median, upper
                   quartile] of the times as fast as the first, which is plain PyTorch or the engine
                   of matmuls in use, null for that one
    environment    the environment variables that are set and affect the kernels
    settings       {variable: meaning}

Errors are absolute for values (loss, log-probs, entropy), relative to the largest entry for
gradients. An error that is not a number is the text "nan".
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..core import backends
from . import Finding, first_line, machine
from .machine import cpu_matmuls
from .self_test import LIMITS, self_test
from .step import DIVIDED, DIVIDED_WITH_GRAD_SCALE, Step, Timing, measure

#: Part of an exception's message -> what to do about it.
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
        "install a torch that was built for this GPU: torch.cuda.get_arch_list() says for which"
    ),
    "": (
        'train with another backend (backend="eager" is always there), install the package again,'
        " and if that does not help report it with the output of `python -m grpo_kernels doctor"
        " --json`"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Say what runs on this machine and why, test it, time a step against plain PyTorch."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_kernels doctor",
        description=main.__doc__,
        allow_abbrev=False,
        epilog="exit code: 0 all is well, 1 there are problems, 2 wrong arguments",
    )
    flags = {
        "--json": "print one JSON object; see grpo_kernels/diagnosis/doctor.py for its keys",
        "--quick": "leave out the step and its timing",
        "--without-native": "go on where the compiled module is missing or out of date",
    }
    for flag, meaning in flags.items():
        parser.add_argument(flag, action="store_true", help=meaning)
    arguments = parser.parse_args(argv)
    say = (lambda text: None) if arguments.json else print
    report = examine(step=not arguments.quick, say=say, without_native=arguments.without_native)
    if arguments.json:  # which has no NaN and no infinity: they become text
        print(json.dumps(json.loads(json.dumps(report), parse_constant=str.lower), indent=1))
    return 0 if report["healthy"] else 1


def examine(step: bool = True, say: Any = print, without_native: bool = False) -> dict[str, Any]:
    """The report as --json prints it.

    `say` is called with each section of the text as soon as it is known.
    """
    device = machine.where()
    report = machine.facts(device)
    findings = [
        *machine.version_findings(),
        *machine.advice(report),
        *machine.setting_findings(os.environ),
    ]
    say(_text_of_facts(report))
    name, reason = backends.native_backend(device)
    report |= {"auto": name if reason is None else "eager", "backends": {}, "step": None}
    if without_native or not any(f.blocks for f in findings):
        findings += tests(report, device, say)
        if (
            step and report["backends"][report["auto"]]["passed"]
        ):  # a backend that fails the checks is not timed
            timings(report, device, say, findings)
    else:
        say("nothing was tested; --without-native tests the backends that are there\n")
    problems = [{"problem": f.problem, "remedy": f.remedy} for f in findings if f.grave]
    advice = [{"problem": f.problem, "remedy": f.remedy} for f in findings if not f.grave]
    report = {"healthy": not problems, "problems": problems, "advice": advice, **report}
    say(_text_of_findings(report))
    return report


def tests(report: dict[str, Any], device: torch.device, say: Any) -> Iterator[Finding]:
    """Tests each backend, and writes into `report`."""
    native_name = backends.native_backend(device)[0]
    say(
        "backends, values and gradients (eager: against plain PyTorch, the others against eager"
        " too):"
    )
    for name in backends.BACKENDS:
        reason = backends.unavailable(name)
        if reason is None:
            tested = self_test(name, torch.device("cpu") if name == "cpu" else device)
            yield from result_findings(name, tested)
        else:
            tested = {"available": False, "reason": reason}
            # `facts` has already reported a missing module, with the reason.
            if name == native_name and (name != "cpu" or report["native"]["path"] is not None):
                yield Finding(
                    f"the kernels for {device.type} tensors do not run: {reason}",
                    remedy_for(reason),
                    grave=True,
                )
        report["backends"][name] = tested
        say(_text_of_backend(name, tested))
    say(f'  backend="auto" takes {report["auto"]} for {device.type} tensors.\n')


def result_findings(name: str, tested: dict[str, Any]) -> Iterator[Finding]:
    for text in tested["warnings"]:
        yield Finding(text, "see the warning; the results were right")
    failed = [check for check in tested["checks"] if check["failure"]]
    if failed:
        first = "{case}, from {level}, {dtype}, vocabulary {vocab}: {failure}".format(**failed[0])
        problem = (
            f'backend "{name}" fails {len(failed)} of {len(tested["checks"])} checks ({first})'
        )
        yield Finding(problem, remedy_for(failed[0]["failure"]), grave=True)


def timings(
    report: dict[str, Any], device: torch.device, say: Any, findings: list[Finding]
) -> None:
    """Times a step of the backend that "auto" takes.

    Writes into `report` and adds to `findings`.
    """
    report["step"] = []
    for level in ("logits", "matmuls", "hidden") if device.type == "cpu" else ("logits", "hidden"):
        try:
            timed = measure(level, report["auto"], device)
        except Exception as error:  # most likely there is too little memory; the other findings still have to be reported
            problem = f"a step from {level} was not timed: {first_line(error)}"
            findings.append(
                Finding(problem, remedy_for(str(error)), grave=not isinstance(error, MemoryError))
            )
            continue
        report["step"].append(asdict(timed))
        say(_text_of_step(timed))
        findings += (
            matmul_findings(timed)
            if level == "matmuls"
            else step_findings(timed, report["auto"], findings)
        )


def remedy_for(message: str) -> str:
    """What to do about a failure with this message."""
    return next(remedy for part, remedy in REMEDIES.items() if part.lower() in message.lower())


def step_findings(step: Step, auto: str, known: list[Finding]) -> Iterator[Finding]:
    """What is slower than plain PyTorch, with the findings among `known` that may be why, and what
    could not be compared.
    """
    again = "run again on an idle machine"
    causes = [f for f in known if f.slows]
    if auto == "eager":
        causes = [
            Finding(
                'backend="auto" takes eager here, which fuses nothing',
                "get the native kernels, see above",
            )
        ]
    why = "; ".join(f.problem for f in causes) or "nothing that doctor knows explains it"
    way_out = "until then take log-probs of plain PyTorch and grpo_kernels.losses.objective_loss"
    remedy = "; ".join([*(f.remedy for f in causes), again, way_out])
    for t in step.timings:
        if t.verdict == "slower":
            slow = (
                f"{t.name} is slower than plain PyTorch: {t.ms:.0f} ms where that takes"
                f" {step.timings[0].ms:.0f} ms"
            )
            yield Finding(f"{step.title}: {slow} ({_times(t)}): {why}", remedy, grave=True)
        elif t.verdict == "unsteady":
            yield Finding(f"{step.title}: {t.name} is {_times(t)}", again)


def matmul_findings(step: Step) -> Iterator[Finding]:
    """Advise the fastest engine of matmuls if another one is in use."""
    used, *others = step.timings
    faster = [t for t in others if t.verdict == "faster"]
    if faster:
        best = min(faster, key=lambda t: t.ms)
        problem = (
            f"a step by {best.name} takes {best.ms:.0f} ms, by {used.name}, which is in use,"
            f" {used.ms:.0f} ms"
        )
        yield Finding(f"matmuls: {problem}", f"set {cpu_matmuls.SETTING}={best.name}", slows=True)


# ---- the report as text


def _text_of_facts(report: dict[str, Any]) -> str:
    """Print one line for each section and for each GPU."""
    lines = [f"{name}: {_listed(report[name])}" for name in ("versions", "package", "native")]
    lines += [
        f"matmuls: {_text_of_matmuls(report['matmuls'])}",
        f"cpu: {_listed(report['cpu'])}",
    ]
    lines.append(f"environment: {_listed(report['environment']) or 'nothing set'}")
    gpus = [_listed(gpu) for gpu in report["gpu"]["devices"]] or [
        f"none ({report['gpu']['reason']})"
    ]
    return "\n".join([*lines, *(f"gpu: {gpu}" for gpu in gpus), ""])


#: What each engine of `cpu_matmuls.ENGINES` does.
PURPOSES = {
    "amx": "bf16 matmuls in AMX tiles",
    "avx512bf16": "bf16 matmuls in AVX512_BF16 instructions",
    "fp32": "our own fp32 kernels for matmuls of bf16 and fp32 tensors",
    "torch": "torch.mm, also for fp32 tensors",
}


def _text_of_matmuls(matmuls: dict[str, Any]) -> str:
    """The engine in use, and the engines that cannot run, each with its purpose."""
    engine = matmuls["engine"]
    words = [
        f"engine {engine} ({PURPOSES[engine]})" if engine else "no engine, the setting is wrong"
    ]
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


def _listed(known: dict[str, Any]) -> str:
    """What is there."""
    words = []
    for name, value in known.items():
        if value:
            text = " ".join(value) if isinstance(value, list) else value
            words.append(f"{LABELS.get(name, name)} {text}")
    return ", ".join(words)


def _text_of_backend(name: str, found: dict[str, Any]) -> str:
    if not found["available"]:
        return f"  {name:8} not available: {found['reason']}"
    errors = {"value": found["value_error"], **found["gradient_error"]}
    told = _listed({kind: f"{error:.0e} of {LIMITS[kind]:.0e}" for kind, error in errors.items()})
    checks = f"{len(found['checks'])} checks, {found['seconds']:.1f} s"
    return f"  {name:8} {'ok' if found['passed'] else 'WRONG'}: {checks}; largest errors: {told}"


def _text_of_step(step: Step) -> str:
    shape = " x ".join(f"{n:,}" for n in (step.rows, step.hidden, step.vocab) if n)
    lines = [
        f"{step.title}, {shape}, {step.dtype} (loss and gradient, median of {step.timings[0].runs}"
        " in turns):"
    ]
    lines += (f"  {t.name:24} {t.ms:9,.1f} ms  {_times(t)}".rstrip() for t in step.timings)
    divided = step.timing(DIVIDED)
    with_grad_scale = step.timing(DIVIDED_WITH_GRAD_SCALE)
    if divided is not None and with_grad_scale is not None:
        lines.append(
            "  If you multiply a loss before backward (gradient accumulation), pass the factor as"
            f" grad_scale=1 / 4: {with_grad_scale.ms:,.1f} ms in place of {divided.ms:,.1f} ms."
        )
    return "\n".join([*lines, ""])


def _times(t: Timing) -> str:
    if t.gain is None:
        return ""
    if t.verdict == "unsteady":
        return (
            f"too unsteady to compare: {t.gain[0]:.1f} to {t.gain[2]:.1f} times as fast in {t.runs}"
            " rounds"
        )
    return f"{t.gain[1]:.1f} times as fast (median over the rounds)"


def _text_of_findings(report: dict[str, Any]) -> str:
    lines = []
    for kind in ("advice", "problems"):
        if report[kind]:
            lines += [
                f"{kind}:",
                *(f"  {f['problem']}\n    -> {f['remedy']}" for f in report[kind]),
                "",
            ]
    if report["problems"]:
        verdict = "there are problems, see above"
    elif any("too unsteady" in f["problem"] for f in report["advice"]):
        verdict = (
            "all is well, as far as could be told: some times spread too much to compare, see above"
        )
    else:
        verdict = (
            "all is well"
            if report["step"]
            else "all is well, as far as was tested: no step was timed"
        )
    return "\n".join([*lines, verdict])
