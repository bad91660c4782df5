"""Check, tune and measure the package on a GPU, in calls of ten minutes.

    python3 -m benchmarks.gpu_kit --out DIR [--call 1] [--wheels DIR] [--resume results.tar.gz]
                                  [--minutes 10] [--stages NAME ...] [--rehearse]

benchmarks/README.md says what to run and which results each call gives. The script runs from the
source tree, on a machine with torch and Triton, without network. Wheels of other projects come in a
folder and are installed into a temporary one.

Each stage is a process with a time limit, a log and a JSON file, so that a crash or a hang does not
affect the others. Most of the time that later stages need is reserved for them. After each stage,
and every 20 seconds, DIR is updated with all results so far: summary.md, results.tar.gz (the JSON
files and pictures), logs.tar.gz and a few of the pictures.

`--resume` starts from the results of an earlier call. Stages that ended well are not run again
unless --stages names them, and measured cells are not measured again. `--rehearse` runs the same
script with small sizes on a CPU. To use the results in the documentation, run

    tar xzf DIR/results.tar.gz -C benchmarks results && python -m benchmarks.report --write

CALLS has the stages of each call. A new part of the package adds its tests to CASES, and its suites
to HEADLINE, COMPARED or FURTHER. This file needs the standard library only, so that no failure of a
stage can end it.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import SWITCH, parser_of

ROOT = Path(__file__).parent.parent
PICTURES = ("logits", "hidden", "active", "length")  # in addition to the three other files
PACK_EVERY = 20.0  # seconds

# ---- the stages, their order and time limits


class Stage(NamedTuple):
    """A stage and its time in a call of ten minutes. Times are scaled for longer calls.

    name    a key of gpu_stages.STAGES
    most    time limit in seconds
    kept    the seconds of `most` that are reserved: earlier stages may not use them
    """

    name: str
    most: float
    kept: float


#: The calls, the most important first. Each takes ten minutes, on a machine that keeps nothing
#: between calls.
CALLS = {
    1: (
        Stage("install", 60, 10), Stage("env", 120, 80), Stage("correctness", 300, 170), Stage("counters", 90, 60),
        Stage("headline", 240, 140), Stage("plots", 40, 25),
    ),
    2: (Stage("tune", 570, 480),),
    3: (Stage("install", 60, 10), Stage("comparison", 520, 430), Stage("plots", 40, 25)),
    4: (
        Stage("install", 60, 10), Stage("traffic", 60, 40), Stage("memcheck", 150, 60), Stage("further", 400, 340),
        Stage("plots", 40, 25),
    ),
}  # fmt: skip


class Cases(NamedTuple):
    """A group of test files.

    files       paths in tests/
    processes   most processes at a time, because float64 references take gigabytes at real sizes
    share       share of the time for all groups
    """

    files: tuple[str, ...]
    processes: int
    share: float


#: Groups of tests, in their order. Kernels come first, because the other tests depend on them.
CASES = {
    "Triton kernels": Cases(
        (
            "rows/triton_cases.py", "rows/test_row_kernels.py", "rows/test_two_row_kernels.py",
            "rows/test_slot_products.py", "rows/test_evaluate.py",
        ),
        12, 0.25,
    ),
    "real sizes": Cases(("rows/triton_call_cases.py",), 8, 0.4),
    "objectives": Cases(
        (
            "core/test_objectives.py", "core/test_combinations.py", "core/test_relations.py", "core/test_rows.py",
            "core/test_autograd.py", "core/test_listed.py",
        ),
        12, 0.35,
    ),
}  # fmt: skip
#: pytest -k for a rehearsal: a few tests of each group. A rehearsal runs in Triton's interpreter,
#: which truncates to bf16 where a GPU rounds. These tests pass with both.
REHEARSED = (
    "(test_matmuls and bf16) or (an_objective_is and gspo) or same_bits_again or offsets_beyond or"
    " (shares_near and triton) or (no_bit and not 40009)"
)

# Suites of the benchmarks, the most important first.
HEADLINE = ("logits", "hidden", "kept")  # their first cells are in call 1
COMPARED = ("logits", "hidden", "active", "kept")  # those with targets
FURTHER = (
    "logits-accumulation", "hidden-accumulation", "step", "divergence", "logits-divergence", "length", "cross-entropy", "hidden-frozen", "logits-forward", "hidden-forward",
    "hidden-sequence", "divergence-forward", "divergence-jsd", "rows", "vocab", "trees", "forms", "logits-forms",
    "draft", "small-logits", "small-hidden",
)  # fmt: skip
REHEARSED_SUITES = ("kept", "length")  # the suites that a rehearsal runs


# ---- a call


class Kit:
    """One call: its folders, and the outcome of each stage.

    out         folder for the files that come back
    work        temporary folder of the stages
    wheels      folder with the wheels of other projects. None: none are installed
    rehearse    whether this is a rehearsal on a CPU
    stages      {name: {"status", "seconds"}}, including stages of earlier calls
    """

    def __init__(
        self, out: Path, work: Path, wheels: Path | None = None, rehearse: bool = False
    ) -> None:
        """Make the folders that do not exist, and read the outcomes of earlier calls from `work`.

        With --resume, `work` has the files of an earlier call. `pack` writes the outcomes to
        json/kit.json.
        """
        self.out = out
        self.work = work
        self.wheels = wheels
        self.rehearse = rehearse
        out.mkdir(parents=True, exist_ok=True)
        for name in ("json", "logs", "site", "results"):
            (work / name).mkdir(parents=True, exist_ok=True)
        self.stages: dict[str, dict] = self.results_of("kit")

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of a stage.

        PYTHONPATH has this source tree and the folder with the unpacked wheels. A rehearsal runs
        kernels in Triton's interpreter.
        """
        paths = (str(ROOT), str(self.work / "site"), os.environ.get("PYTHONPATH", ""))
        variables = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1",
        }
        if self.rehearse:
            variables["TRITON_INTERPRET"] = "1"
        return variables

    def command(self, stage: str, seconds: float) -> list[str]:
        """Return the command line of a stage.

        stage     a key of gpu_stages.STAGES
        seconds   time limit, after which `run_stage` kills the process
        """
        command = [sys.executable, "-m", "benchmarks.gpu_stages", stage, "--work", str(self.work)]
        # The stage gets a little less, so that it can end by itself before it is killed.
        command += ["--seconds", f"{0.95 * seconds:.0f}"]
        if self.wheels is not None:
            command += ["--wheels", str(self.wheels)]
        if self.rehearse:
            command.append("--rehearse")
        return command

    def results_of(self, name: str) -> dict[str, Any]:
        """Return the content of json/NAME.json, {} if it does not exist.

        name    a stage, which writes its results there, or "kit" for the outcomes of all stages
        """
        path = self.work / "json" / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def suites(self) -> dict[str, dict]:
        """Return {suite: content of its result file}."""
        return {
            path.stem: json.loads(path.read_text())
            for path in sorted((self.work / "results").glob("*/*.json"))
        }


# ---- the runner


def run_stage(
    command: Sequence[str],
    log: Path,
    seconds: float,
    environment: dict[str, str],
    meanwhile: Callable[[], None] = lambda: None,
) -> str:
    """Run a command in its own process group, and end the group afterwards.

    Returns "ok", how the command failed, or that its time ran out, in words.

    log         file for the output
    seconds     time limit
    environment environment variables of the command
    meanwhile   called every PACK_EVERY seconds while the command runs
    """
    deadline = time.monotonic() + seconds
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            process_group=0,
        )
        try:
            while True:
                wait = max(0.0, min(PACK_EVERY, deadline - time.monotonic()))
                try:
                    status = process.wait(timeout=wait)
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() >= deadline:
                        return f"out of time after {seconds:.0f} s"
                    meanwhile()
        finally:
            end_group(process)
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return "ok" if status == 0 else f"exit status {status}"


def end_group(process: subprocess.Popen) -> None:
    """Kill the process and all processes of its group, and wait for the process."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of them have ended
        pass
    process.wait()


def run(kit: Kit, stages: Sequence[Stage], minutes: float) -> None:
    """Run the stages one after the other, and pack all results after each.

    A stage gets its time limit, but not the seconds that are reserved for later stages. It is left
    out if less than 1 % of the call remains for it. Times are scaled so that the reserved seconds
    sum to 80 % of the call.

    minutes     duration of the call, for everything
    """
    scale = 0.8 * 60 * minutes / max(1.0, sum(stage.kept for stage in stages))
    deadline = time.monotonic() + 57 * minutes  # the rest is for packing and for starting the call
    for i, stage in enumerate(stages):
        kept = scale * sum(later.kept for later in stages[i + 1 :])
        seconds = min(scale * stage.most, deadline - time.monotonic() - kept)
        begin = time.monotonic()
        log = kit.work / "logs" / f"{stage.name}.txt"
        status = "no time left"
        if seconds > 0.5 * minutes:  # about 1 % of the call: 60 * minutes seconds
            kit.stages[stage.name] = {"status": "running", "seconds": 0.0}
            status = run_stage(
                kit.command(stage.name, seconds), log, seconds, kit.environment, lambda: pack(kit)
            )
        kit.stages[stage.name] = {"status": status, "seconds": round(time.monotonic() - begin, 1)}
        print(f"{stage.name}: {status}, {kit.stages[stage.name]['seconds']} s", flush=True)
        if status != "ok" and log.exists():
            print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), flush=True)
        pack(kit)


# ---- the files that come back


def pack(kit: Kit) -> None:
    """Write all results so far to `kit.out`.

    These are summary.md, results.tar.gz, logs.tar.gz, and the pictures of PICTURES.
    """
    (kit.work / "json" / "kit.json").write_text(json.dumps(kit.stages, indent=1))
    tables = kit.work / "tables.md"
    text = summary(kit) + (f"\n{tables.read_text()}" if tables.exists() else "")
    replace(kit.out / "summary.md", lambda path: path.write_text(text))
    replace(
        kit.out / "results.tar.gz",
        lambda path: write_archive(path, kit.work, ("json", "results", "tables.md")),
    )
    replace(kit.out / "logs.tar.gz", lambda path: write_archive(path, kit.work, ("logs",)))
    for picture in (kit.work / "results").glob("*/plots/*.png"):
        if picture.stem in PICTURES:
            # The default argument binds the picture of this iteration.
            replace(
                kit.out / picture.name, lambda path, picture=picture: shutil.copyfile(picture, path)
            )


def replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file and let it replace `path` in one step, so that `path` is never incomplete.

    write   writes the whole file to the path that it is called with
    """
    part = path.with_name(path.name + ".part")
    write(part)
    part.replace(path)


def write_archive(path: Path, folder: Path, names: Sequence[str]) -> None:
    """Write the files and folders `names` of `folder` to `path`, a gzipped tar archive.

    Stages may be writing meanwhile. Files that are incomplete or have gone are left out.
    """
    files = {folder / name for name in names}
    for name in names:
        files |= {*(folder / name).rglob("*")}
    with tarfile.open(path, "w:gz") as tar:
        for file in sorted(files):
            if file.suffix == ".part" or not file.is_file():  # .part: being written
                continue
            try:
                data = file.read_bytes()
            except FileNotFoundError:  # a stage has removed it in the meantime
                continue
            member = tarfile.TarInfo(file.relative_to(folder).as_posix())
            member.size = len(data)
            member.mtime = int(time.time())
            tar.addfile(member, io.BytesIO(data))


# ---- the summary


class Target(NamedTuple):
    """A figure that the project wants to reach on a GPU.

    what        the figure, in words
    sign        "<=" or ">=": whether `limit` is the largest or the smallest value that is wanted
    measured    None: not measured
    """

    what: str
    sign: str
    limit: float
    measured: float | None

    @property
    def met(self) -> bool | None:
        """Whether `measured` is within the limit. None: not measured."""
        if self.measured is None:
            return None
        return self.measured <= self.limit if self.sign == "<=" else self.measured >= self.limit


def targets(suites: dict[str, dict], counters: dict, correctness: dict) -> list[Target]:
    """Return the project's targets on a GPU with what this call measured.

    suites      {suite: content of its result file}
    counters, correctness   results of these stages, {} if they did not run
    """
    # Each is a function: name of a provider -> its row.
    logits = row_finder(suites, "logits")
    hidden = row_finder(suites, "hidden", hidden=4096)
    half = row_finder(suites, "active", hidden=4096, active=0.5)
    dense = row_finder(suites, "active", hidden=4096, active=1.0)
    ours = hidden("grpo_kernels")
    inplace = logits("grpo_kernels, in place")
    documented = counters.get("documented", {}).keys()  # calls whose waits are documented
    waiting = None  # the calls that make the host wait
    if "waits" in counters:
        waiting = {name for name, wait in counters["waits"].items() if wait}
    refused = None  # number of losses that a CUDA graph does not replay
    if "graphs" in counters:
        refused = sum(bool(reason) for reason in counters["graphs"].values())
    errors = []  # the largest error of log-probs in each test
    for group in correctness.get("groups", {}).values():
        errors += [value for what, value in group["largest"].items() if "logps" in what]
    return [
        Target("logits 8192 x 151936 bf16, in place / copy", "<=", 1.15, ratio(inplace, logits("copy"))),
        Target("same, Liger GRPO loss / ours", ">=", 1.4, ratio(logits("Liger GRPO loss"), inplace)),
        Target("same, TRL kernel + loss / ours", ">=", 1.4, ratio(logits("TRL kernel + loss"), inplace)),
        Target("hidden 8192 x 4096 x 151936 bf16 / three products", "<=", 1.12, ratio(ours, hidden("limit"))),
        Target("same, extra memory in GiB", "<=", 3.6, ours["extra_mb"] * 1e6 / 2**30 if "extra_mb" in ours else None),
        Target("same, TRL fused head + loss / ours", ">=", 1.5, ratio(hidden("TRL fused head + loss"), ours)),
        Target("same, Liger fused linear GRPO / ours", ">=", 5, ratio(hidden("Liger fused linear GRPO"), ours)),
        # The limit of a cell counts its active rows only; this target is relative to all rows.
        Target("same with half of the rows at zero advantage / three dense products", "<=", 0.75, ratio(half("grpo_kernels"), dense("limit"))),
        Target("recompilations, 30 lengths x 10 schedules", "<=", 0, counters.get("recompilations")),
        Target("calls that make the host wait", "<=", 0, None if waiting is None else len(waiting - documented)),
        Target("same, of those documented to", "<=", len(documented), None if waiting is None else len(waiting & documented)),
        Target("losses that a CUDA graph does not replay", "<=", 0, refused),
        Target("log-probs from hidden states, error", "<=", 1e-5, max(errors, default=None)),
    ]  # fmt: skip


def row_finder(suites: dict[str, dict], suite: str, **shape: Any) -> Callable[[str], dict]:
    """Return a function that takes the name of a provider and returns its row in one cell.

    The row is {} if the provider was not timed. The name "limit" gives the limit of the cell. The
    cell is the one of the suite with 8192 rows, Qwen's vocabulary, bf16, and the fields of `shape`.

    suites  {suite: content of its result file}
    suite   the suite with the cell
    shape   {field of the cell: its value}, in addition to these
    """
    wanted = {"rows": 8192, "vocab": 151936, "dtype": "bfloat16", **shape}
    cell: dict = {}
    for candidate in suites.get(suite, {}).get("cells", []):
        if all(candidate[key] == value for key, value in wanted.items()):
            cell = candidate
            break
    rows = {row["name"]: row for row in cell.get("providers", []) if row["status"] == "ok"}

    def find(name: str) -> dict:
        return (cell.get("limit") if name == "limit" else rows.get(name)) or {}

    return find


def ratio(above: dict, below: dict) -> float | None:
    """Return the ratio of the times of two rows, or None if one was not timed."""
    return above["ms"] / below["ms"] if above and below else None


def summary(kit: Kit) -> str:
    """Return the text of summary.md: the stages, the targets, and the lines of each stage."""
    title = "Rehearsal on a CPU: no figure means anything" if kit.rehearse else "Results"
    lines = [f"# {title}", "", "| stage | outcome | s |", "|---|---|---|"]
    lines += [
        f"| {name} | {stage['status']} | {stage['seconds']:.0f} |"
        for name, stage in kit.stages.items()
    ]
    lines += ["", "| target | wanted | measured | met |", "|---|---|---|---|"]
    for target in targets(kit.suites(), kit.results_of("counters"), kit.results_of("correctness")):
        measured = "not measured" if target.measured is None else f"{target.measured:.3g}"
        met = {None: "", True: "yes", False: "**no**"}[target.met]
        lines.append(f"| {target.what} | {target.sign} {target.limit:g} | {measured} | {met} |")
    for name in kit.stages:
        stage_lines = kit.results_of(name).get("lines", [])
        if stage_lines:
            lines += ["", f"## {name}", "", "```", *stage_lines, "```"]
    return "\n".join(lines) + "\n"


#: Stages that run in every call, because each call has a new machine and adds results.
AGAIN = ("install", "plots")


def chosen(kit: Kit, call: int, names: Sequence[str] | None) -> list[Stage]:
    """Return the stages to run.

    These are the stages of a call that have not ended well before, or, with `names`, the stages of
    these names from all calls.
    """
    if names is None:
        ended_well = {name for name, stage in kit.stages.items() if stage["status"] == "ok"}
        return [
            stage for stage in CALLS[call] if stage.name in AGAIN or stage.name not in ended_well
        ]
    stage_by_name = {stage.name: stage for stages in CALLS.values() for stage in stages}
    return [stage for name, stage in stage_by_name.items() if name in names]


def absolute_path(text: str) -> Path:
    """Return an argument of the command line as an absolute path."""
    return Path(text).resolve()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a call. Returns 0 if all stages ended well."""
    names = list(dict.fromkeys(stage.name for stages in CALLS.values() for stage in stages))
    parser = parser_of("benchmarks.gpu_kit", __doc__, {
        "--out": {"type": absolute_path, "required": True, "help": "folder for what comes back: at most 8 files"},
        "--call": {"type": int, "choices": CALLS, "default": 1, "help": "see benchmarks/README.md (default 1)"},
        "--wheels": {"type": absolute_path, "help": "folder with the peers' wheels"},
        "--resume": {"type": absolute_path, "metavar": "ARCHIVE", "help": "results.tar.gz of an earlier call"},
        "--minutes": {"type": float, "default": 10.0, "help": "for everything"},
        "--stages": {"nargs": "+", "choices": names, "metavar": "STAGE", "help": f"in place of a call's: {', '.join(names)}"},
        "--rehearse": SWITCH | {"help": "on a CPU, small, with Triton's interpreter"},
    })  # fmt: skip
    args = parser.parse_args(argv)
    for path in (args.wheels, args.resume):
        if path is not None and not path.exists():
            parser.error(f"{path} does not exist: name what there is, or leave it out.")
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as work:
        if args.resume is not None:
            with tarfile.open(args.resume) as tar:
                tar.extractall(work, filter="data")
        kit = Kit(args.out, Path(work), args.wheels, args.rehearse)
        stages = chosen(kit, args.call, args.stages)
        run(kit, stages, args.minutes)
        print("\n" + summary(kit))  # last: a caller may see the end of the output only
    return 0 if all(kit.stages[stage.name]["status"] == "ok" for stage in stages) else 1


if __name__ == "__main__":
    sys.exit(main())
