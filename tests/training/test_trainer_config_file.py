"""The options of the trainer: their help, a file of them, and the file that a run writes of its own."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")
pytest.importorskip("transformers")
pytest.importorskip("datasets")

import yaml

from grpo_kernels.__main__ import main as command_line
from grpo_kernels.training import config_file
from grpo_kernels.training.command_line import parse_args
from grpo_kernels.training.config import TrainConfig
from grpo_kernels.training.jsonl import read_metrics
from support.pages import ROOT
from support.runs import PROMPTS, tiny

NAMES = {"model": "m", "dataset": "d"}


def parsed(folder: Path, text: str, *arguments: str) -> TrainConfig:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return parse_args(["--config", str(folder / "run.yaml"), *arguments], TrainConfig)


def refusal(capsys: Any, *arguments: str) -> str:
    """What a command that is wrong prints, which is the message and two lines of usage."""
    with pytest.raises(SystemExit) as stopped:
        parse_args([*arguments], TrainConfig)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert len(error[: error.index("error: ")].splitlines()) <= 3
    return error.partition("error: ")[2]


# ---- the help


def test_the_help_has_groups_and_every_option_with_default_and_unit(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "4000")  # a line for each option
    with pytest.raises(SystemExit):
        parse_args(["--help"], TrainConfig)
    text = capsys.readouterr().out
    titles = re.findall(r"^(\w[\w ]+):$", text, re.MULTILINE)
    assert titles[1:] == [
        "model and data", "rewards and advantages", "objective", "sampling", "optimisation", "evaluation", "logging",
        "output and checkpoints", "computation",
    ]  # fmt: skip
    options = [" ".join(part.split()) for part in re.split(r"^  (?=--)", text, flags=re.MULTILINE)]
    for f in fields(TrainConfig):
        (line,) = (line for line in options if re.match(rf"--{f.name.replace('_', '-')}[ ,]", line))
        assert re.search(r"default: |\(required\)", line), line
        if "bool" not in str(f.type):
            assert re.match(r"--[\w-]+ \[?[A-Z]", line), line
    assert "--max-new-tokens TOKENS budget of a completion (default: 256)" in options
    assert "--betas [BETA ...] AdamW's two betas (default: 0.9 0.999)" in options


# ---- a file of options


def test_options_come_from_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    text = (
        "model: m\ndataset: 'd'\nmax-new-tokens: 64\nlr: 1e-6\ntop_p: 1\nmax_grad_norm: inf\nrewards: [exact, number]\nchat: true\n"
        "betas: [0.8, 1e-1]\nbeta: null\nreplay: null\nprompt_template: 'é: {prompt}'\ncorrections: []\n"
    )
    found = parsed(tmp_path, text, "--max-new-tokens", "32", "--no-chat", "--rewards", "number")
    assert found == TrainConfig(
        **NAMES, max_new_tokens=32, lr=1e-6, top_p=1.0, max_grad_norm=float("inf"), rewards=["number"], betas=[0.8, 0.1],
        prompt_template="é: {prompt}",
    )  # fmt: skip
    assert isinstance(found.top_p, float)
    assert parsed(tmp_path, "corrections: ['tis:high=3']\nmodel: m\ndataset: d", "--corrections") == TrainConfig(**NAMES)
    # An option that is given with its default value wins too.
    assert parsed(tmp_path, text, "--lr", "1e-6", "--max-new-tokens", "256").max_new_tokens == 256
    assert parsed(tmp_path, "", "--model", "m", "--dataset", "d") == TrainConfig(**NAMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nmax_new_token: 3", r"line 2: there is no option 'max_new_token': did you mean max_new_tokens\?"),
        ("learning-rate: 1e-5", r"line 1: there is no option 'learning-rate': did you mean lr\?"),
        ("num_generations: 8", r"there is no option 'num_generations': did you mean group_size\?"),
        ("zzz: 1", r"there is no option 'zzz': `python -m grpo_kernels train --help` lists all"),
        ("steps: many", "steps='many': it must be a whole number"),
        ("steps: 1.5", "steps=1.5: it must be a whole number"),
        ("steps: true", "steps=True: it must be a whole number"),
        ("steps: null", "steps=None: it must be a whole number"),
        ("lr: fast", "lr='fast': it must be a number"),
        ("lr: yes", "lr=True: it must be a number"),
        ("chat: 1", "chat=1: it must be true or false"),
        ("replay: maybe", "replay='maybe': it must be true or false"),
        ("model: 7", "model=7: it must be a text; put it between quotes"),
        ("rewards: exact", r"rewards='exact': it must be a list, as in \[exact\]"),
        ("betas: [0.9, x]", r"betas=\[0.9, 'x'\]: it must be a number"),
        ("steps: 1\n\nsteps: 2", "line 3: 'steps' is there twice"),
        ("top-k: 1\ntop_k: 2", "line 2: 'top_k' is there twice"),
        ("- steps", "it must be lines of `option: value`"),
        ("steps: [1", "is not YAML"),
        ("steps: !!python/name:os.system", "cannot be read"),
        ("steps: 0", "steps=0: it must be at least 1"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, capsys: Any, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    found = refusal(capsys, "--config", str(path), "--model", "m", "--dataset", "d")
    assert re.search(message, found), found
    if "at least" not in message:
        assert f"config={str(path)!r}" in found


def test_refusals_of_the_command_line(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--model and --dataset must be given." in refusal(capsys)
    (tmp_path / "a.yaml").write_text("model: m\n")
    assert "--dataset must be given, here or in" in refusal(capsys, "--config", str(tmp_path / "a.yaml"))
    assert "there is no option '--max-new-token': did you mean --max-new-tokens?" in refusal(capsys, "--max-new-token", "3")
    assert "config='none.yaml' cannot be read" in refusal(capsys, "--config", "none.yaml")
    assert "--steps: invalid int value: 'x'" in refusal(capsys, "--steps", "x")
    assert "log_to=['paper']: it must be of jsonl, tensorboard" in refusal(
        capsys, "--model", "m", "--dataset", "d", "--log-to", "paper"
    )
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "needs yaml, which is not installed: pip install" in refusal(capsys, "--config", str(tmp_path / "a.yaml"))


# ---- the file that a run writes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr": 1e-6, "max_grad_norm": float("inf"), "weight_decay": 1e-300, "reward_weights": [0.1, 1e22], "rewards": ["exact", "number"]},
        {"prompt_template": "  a: 'b' #\n\t{prompt}\u2028é\x07 ", "dataset_config": "null", "train_split": "1e3", "answer_column": "yes"},
        {"replay": False, "chat": True, "beta": 0.0, "kl": None, "eval_prompts": 3, "corrections": ["tis:high=3", "seq_mask"][:1]},
    ],
    ids=["defaults", "numbers", "texts", "switches"],
)  # fmt: skip
def test_a_written_configuration_is_read_as_it_was(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = TrainConfig(**NAMES, **changes)
    config_file.write(config, tmp_path / "config.yaml")
    assert parse_args(["--config", str(tmp_path / "config.yaml")], TrainConfig) == config
    assert set(yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))) == {f.name for f in fields(TrainConfig)}


def test_the_example_of_the_documentation_runs_and_its_folder_has_what_runs_again(
    tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The YAML of docs/training.md as it stands, but for the model, the data, how much and where."""
    (example,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("gsm8k.yaml").write_text(example)
    tiny(tok).save_pretrained("model")
    tok.save_pretrained("model")
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{row["prompt"]}", "answer": "{row["answer"]}"}}\n' for row in PROMPTS))
    small = [
        "--model", "model", "--dataset", "rows.jsonl", "--no-chat", "--dtype", "float32", "--steps", "2", "--prompts-per-step", "2",
        "--group-size", "2", "--max-new-tokens", "2", "--eval-steps", "0", "--device", "cpu", "--log-to", "jsonl",
    ]  # fmt: skip
    assert command_line(["train", "--config", "gsm8k.yaml", *small]) == 0
    (folder,) = (path.parent for path in tmp_path.glob("runs/*/config.yaml"))
    told = capsys.readouterr()
    assert "2 steps" in told.out and (folder / "summary.txt").read_text() in told.out
    assert "step 0: reward" in told.err and "2 of 2 done" in told.err
    assert command_line(["train", "--config", str(folder / "config.yaml"), "--out", "again", "--no-progress"]) == 0
    told = capsys.readouterr()
    assert told.out == "" and "step" not in told.err
    first, again = (read_metrics(path / "metrics.jsonl") for path in (folder, Path("again")))
    assert len(first) == 2 and [line["loss"] for line in first] == [line["loss"] for line in again]
    written, of_again = (yaml.safe_load((path / "config.yaml").read_text()) for path in (folder, Path("again")))
    assert {name for name in written if written[name] != of_again[name]} == {"out", "progress"}
