"""The TRL adapters under other versions of TRL: `python tests/repository/trl_versions.py FOLDER ...`, one table row each.

A FOLDER holds one TRL as `pip install --no-deps --target FOLDER trl==VERSION` makes it; what TRL needs is that of this environment.
Two steps of GRPO with a KL run with TRL's own loss and with ours, in a process of their own: "loss" is the whole loss inside
the model's forward (`integrations.trl`), "slot" the loss in Liger's place (`integrations.liger_slot`) beside Liger's. A row
says whether the first step's comparison passed and how far the logged losses and gradient norms are apart."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]

RUN = """
import sys, tempfile, warnings
from pathlib import Path
import trl
from support import trl_cases
from trl.trainer import utils
from grpo_kernels.integrations import liger_slot
from grpo_kernels.integrations.trl import patch

whole = hasattr(utils, "add_fused_lm_head")
names = {f.name for f in __import__("dataclasses").fields(trl.GRPOConfig)}
options = {"beta": 0.05, "loss_type": "dapo"}
if not whole:
    options["use_liger_kernel" if "use_liger_kernel" in names else "use_liger_loss"] = True
    if "liger_kernel_config" in names:
        options["liger_kernel_config"] = dict.fromkeys(("rope", "swiglu", "rms_norm", "cross_entropy", "fused_linear_cross_entropy"), False)
work = Path(tempfile.mkdtemp())
path = trl_cases.save_model(work / "model")
histories, said = [], []
for ours in (False, True):
    trainer = trl_cases.make_trainer(path, work / str(ours), steps=2, **options)
    if not whole:
        (getattr(trainer, "liger_loss", None) or trainer.liger_grpo_loss).compiled = False
    if ours:
        made = patch(trainer) if whole else liger_slot.patch(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said += [str(w.message) for w in caught if "They agree" in str(w.message)]
    histories.append([h for h in trl_cases.history(trainer) if "grad_norm" in h])
assert made.counts["fused"] == 2, made.counts
apart = max(abs(a[k] - b[k]) / max(1.0, abs(b[k])) for a, b in zip(*histories) for k in ("loss", "grad_norm"))
print("RESULT", trl.__version__, "loss" if whole else "slot", "compared" if said else "known", f"{apart:.1e}")
"""


def row(folder: Path) -> str:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder.resolve()), str(ROOT), str(ROOT / "tests")]), "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1",  # TRL 1.15 has its head as Triton kernels alone
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RUN], cwd=elsewhere, env=environment, capture_output=True, text=True
        )
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if done.returncode == 0 and found:
        version, adapter, first, apart = found[0]
        return f"| {version} | {adapter} | {first} | {apart} |"
    last = ([line for line in done.stderr.splitlines() if line.strip()] or ["no output"])[-1]
    return f"| {folder.name} | - | failed: {last[:160]} | |"


def main(folders: Sequence[str]) -> int:
    """Print the table; 1 if a version failed."""
    print("| TRL | adapter | first step | apart |\n| --- | --- | --- | --- |")
    rows = []
    for folder in folders:
        rows.append(row(Path(folder)))
        print(rows[-1], flush=True)
    return int(any("failed" in text for text in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
