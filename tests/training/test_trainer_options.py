"""What a run is told: options on the command line and in files, prompts of every form, data sets; and what is refused."""

from __future__ import annotations

import json
import re
import signal
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("yaml")
pytest.importorskip("transformers")
pytest.importorskip("datasets")

import datasets
import yaml

from examples.arithmetic import tokenizer
from grpo_kernels.__main__ import main as command_line
from grpo_kernels.training.trainer import TrainConfig, Trainer
from support.runs import PROMPTS, config, flags, lines, on_disk, tiny, trainer

ROOT = Path(__file__).parents[2]
NAMES = ["--model", "m", "--dataset", "d"]


def refusal(capsys: Any, *arguments: str) -> str:
    """What a command that is wrong prints, which is the message and two lines of usage."""
    try:
        status = command_line(["train", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    error = capsys.readouterr().err
    assert status == 2 and len(error[: error.index("error: ")].splitlines()) <= 3
    return error.partition("error: ")[2]


# ---- the command line, and files of options


def test_the_help_has_every_option_with_default_and_unit(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "4000")  # a line for each option
    with pytest.raises(SystemExit, match="0"):
        command_line(["train", "--help"])
    text = re.sub(" +", " ", re.sub(r"\n {20,}", " ", capsys.readouterr().out))
    for f in fields(TrainConfig):
        assert re.search(rf"[ \n]--{f.name.replace('_', '-')} [A-Z{{[][^\n]*(default: |\(required\))", text), f.name
    assert " --max-new-tokens TOKENS budget of a completion (default: 256)\n" in text


SMALL: dict[str, Any] = {
    "steps": 2,
    "prompts_per_step": 2,
    "group_size": 2,
    "max_new_tokens": 2,
    "eval_steps": 0,
    "device": "cpu",
}
STRANGE: dict[str, Any] = dict(
    SMALL, prompt_template="  a: 'b' #\n\t{prompt}\u2028é\x07 ", dataset_config="null", train_split="1e3", answer_column="answer", lr=1e-6,
    max_grad_norm=float("inf"), weight_decay=1e-300, rewards=["exact", "number"], reward_weights=[0.1, 1e22], replay=False,
    corrections=["tis:high=3"], sample_every=0, eval_prompts=3, progress=False,
)  # fmt: skip


def test_a_run_writes_its_options_and_runs_again_from_them(tok: Any, tmp_path: Path) -> None:
    """Every text and number comes back; what the command line says wins, default values too."""
    named = dict(zip(("model", "dataset"), on_disk(tok, tmp_path)[1:4:2], strict=True))
    settings = TrainConfig(**named, **STRANGE, out=str(tmp_path / "first"))
    assert Trainer(settings).train()
    written = tmp_path / "first" / "config.yaml"
    assert yaml.safe_load(written.read_text(encoding="utf-8")) == asdict(settings)
    again = ["--out", f"{tmp_path}/again", "--lr", "1e-5", "--weight-decay", "0.0", "--corrections", "--progress"]
    assert command_line(["train", "--config", str(written), *again]) == 0
    changed = {"out": f"{tmp_path}/again", "lr": 1e-5, "weight_decay": 0.0, "corrections": [], "progress": True}
    assert yaml.safe_load((tmp_path / "again" / "config.yaml").read_text(encoding="utf-8")) == asdict(settings) | changed
    assert len(lines(tmp_path / "again")) == 2


def test_the_example_of_the_documentation_runs(tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The YAML of docs/training.md as it stands, but for the model, the data, how much and where; names with dashes, numbers as
    1e-6 and null are options too. It tells how it goes, and what it came to."""
    (example,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(example + "min-p: 1e-1\nbeta: null\nbetas: [0.8, 1e-1]\nmax_grad_norm: 7\n")
    small = [
        *on_disk(tok, tmp_path),
        *flags(**SMALL),
        "--chat",
        "false",
        "--dtype",
        "float32",
        "--log-to",
        "jsonl",
        "--out",
        "run",
    ]
    assert command_line(["train", "--config", "a.yaml", *small]) == 0
    told, written = capsys.readouterr(), yaml.safe_load(Path("run/config.yaml").read_text())
    expected = {
        "preset": "dapo",
        "lr": 1e-6,
        "chat": False,
        "min_p": 0.1,
        "beta": None,
        "betas": [0.8, 0.1],
        "max_grad_norm": 7.0,
    }
    assert {name: written[name] for name in expected} == expected and isinstance(written["max_grad_norm"], float)
    assert Path("run/summary.txt").read_text() in told.out and "step 0: reward" in told.err and "2 of 2 done" in told.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nmax_new_token: 3", r"line 2: there is no option 'max_new_token': did you mean max_new_tokens\?"),
        ("learning-rate: 1e-5", r"line 1: there is no option 'learning_rate': did you mean lr\?"),
        ("zzz: 1", r"there is no option 'zzz': `python -m grpo_kernels train --help` lists all"),
        ("steps: many", "line 1: argument --steps: invalid int value: 'many'"),
        ("steps: 1.5", "line 1: argument --steps: invalid int value: '1.5'"),
        ("steps: true", "line 1: argument --steps: invalid int value: 'True'"),
        ("lr: fast", "line 1: argument --lr: invalid float value: 'fast'"),
        ("lr: yes", "line 1: argument --lr: invalid float value: 'True'"),
        ("betas: [0.9, x]", "line 1: argument --betas: invalid float value: 'x'"),
        ("chat: 2", "line 1: argument --chat: Truthy value expected"),
        ("steps: 1\n\nsteps: 2", "line 3: 'steps' is there twice"),
        ("top_k: 1\ntop-k: 2", "line 2: 'top-k' is there twice"),
        ("- steps", "is no YAML of lines `option: value`"),
        ("steps: [1", "is no YAML of lines"),
        ("steps: !!python/name:os.system", "could not determine a constructor"),
        ("steps: 0", "steps=0: it must be at least 1"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, capsys: Any, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    found = refusal(capsys, "--config", str(path), *NAMES)
    assert re.search(message, found) and ("at least" in message or f"config={str(path)!r}" in found), found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "model='': name one"),
        ("--config a.yaml", "dataset='': name one"),
        ("--config empty.yaml", "model='': name one"),
        ("--max-new-token 3", "there is no option 'max-new-token': did you mean max_new_tokens?"),
        ("--num_generations 3", "there is no option 'num_generations': did you mean group_size?"),
        ("--config none.yaml", "config='none.yaml' cannot be read"),
        ("--steps x", "--steps: invalid int value: 'x'"),
        ("--model m --dataset d --log-to paper", "argument --log_to/--log-to: invalid choice: 'paper' (choose from 'jsonl'"),
        ("--model m --dataset d --replay", "replay=True: nothing is cut off"),
        ("--model ./m --dataset d", "model='./m': there is no such file or folder"),
    ],
)
def test_refusals_of_the_command_line(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("model: m\n")
    Path("empty.yaml").touch()
    assert message in refusal(capsys, *arguments.split())


def test_a_run_from_the_command_line_says_how_it_ended(
    tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """0: done. 2: an argument is wrong. 128 + signal: interrupted, to be resumed."""
    (tmp_path / "stopping_reward.py").write_text(
        "import os, signal\nwhich = []\ndef stop(prompts, completions, **_):\n"
        "    [os.kill(os.getpid(), n) for n in which]\n    return [0.0] * len(prompts)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = flags(**SMALL | {"steps": 3}, rewards="stopping_reward:stop", out=tmp_path / "run", dtype="bfloat16")
    argv = ["train", *on_disk(tok, tmp_path), *options, "--no-progress", "--gradient-checkpointing"]
    import stopping_reward

    for received, steps in ((signal.SIGTERM, 1), (signal.SIGINT, 2)):
        stopping_reward.which[:] = [received]
        assert command_line([*argv, "--resume"]) == 128 + received
        assert len(lines(tmp_path / "run")) == steps
    stopping_reward.which.clear()
    capsys.readouterr()
    assert "holds a run: continue it with resume" in refusal(capsys, *argv[1:])
    assert command_line([*argv, "--resume"]) == 0 and capsys.readouterr().out == ""


# ---- values that are refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "it must be at least 1"),
        ({"micro_batch": -1}, "it must be 0 or more"),
        ({"preset": "pppo"}, "it must be one of grpo"),
        ({"preset": "a2po"}, "it must be one of grpo"),
        ({"numerics": "nobody"}, "it must be one of"),
        ({"numerics": "prime-rl"}, "it must be one of"),
        ({"loss": "fused"}, "it must be one of linear, logits, eager"),
        ({"dtype": "int8"}, "it must be one of float32, bfloat16"),
        ({"lr_schedule": "step"}, "it must be one of constant, linear, cosine"),
        ({"parallel": "fsdp"}, "it must be one of ddp, fsdp2"),
        ({"ratio_to": "engine"}, "it must be one of policy, sampler"),
        ({"entropy_over": "set"}, "it must be one of kept, vocabulary"),
        ({"advantage_baseline": "median"}, "it must be one of"),
        ({"advantage_scale": "max"}, "it must be one of"),
        ({"top_p": 0.0}, r"a share in \(0, 1\]"),
        ({"min_p": 1.5}, r"it must be in \[0, 1\]"),
        ({"temperature": 0.0}, "eval_temperature=0"),
        ({"eval_temperature": -1.0}, "it must be 0 .greedy. or above"),
        ({"beta": -1.0}, "a finite number >= 0"),
        ({"kl": "k4", "beta": 0.1}, "kl='k4'"),
        ({"kl": "exact"}, "its weight is 0 in preset='grpo': set beta as well"),
        ({"kl": "k3"}, "its weight is 0 in preset='grpo': set beta as well"),
        ({"rewards": []}, "name a reward function"),
        ({"reward_weights": [1.0, 2.0]}, "each of the 1 rewards"),
        ({"ref_refresh_steps": 5}, "set beta above 0"),
        ({"prompt_template": "x"}, "it must contain {prompt}"),
        ({"keep_checkpoints": 1}, "keep at least 2"),
        ({"betas": [0.9]}, "give two numbers"),
        ({"lr": float("inf")}, "a finite number >= 0"),
        ({"max_grad_norm": 0.0}, "above 0; inf switches clipping off"),
        ({"eval_prompts": 0}, "eval_steps=0 switches evaluation off"),
        ({"entropy_share": 0.0}, r"a share in \(0, 1\]"),
        ({"entropy_coef": float("nan")}, "it must be finite"),
        ({"entropy_target": -1.0}, "0 switches it off"),
        ({"entropy_coef": -0.1, "entropy_target": 0.2}, r"in \[0, 1\]"),
        ({"replay": True}, "nothing is cut off at top_p=1, top_k=0, min_p=0"),
        ({"top_k": 1}, "it leaves one token to sample from.*replay=False"),
        ({"min_p": 1.0}, "it leaves one token"),
        ({"ratio_to": "sampler", "corrections": ["tis"]}, "corrections=.'tis'. weigh a second time"),
        ({"drop_zero_variance": True, "beta": 0.1}, "this objective wants those completions"),
        ({"drop_zero_variance": True, "entropy_target": 0.1}, "this objective wants those completions"),
        ({"drop_zero_variance": True, "entropy_share": 0.5}, "this objective wants those completions"),
        ({"drop_zero_variance": True, "preset": "dro"}, "this objective wants those completions"),
        ({"drop_zero_variance": True, "preset": "kl_cov"}, "this objective wants those completions"),
        ({"drop_zero_variance": True, "numerics": "skyrl"}, "this objective wants those completions"),
        ({"numerics": "torchtitan", "preset": "gspo"}, "torchtitan has no such objective"),
        ({"advantage_baseline": "none"}, "scale"),
        ({"advantages": "grpo"}, "it must be one of group, rloo"),
        ({"advantages": "gae"}, "it takes values, of which this trainer has none"),
        ({"advantages": "process"}, "it takes steps"),
        ({"advantages": "remax:scale=none"}, "'scale' is no argument of the advantages 'remax'"),
        ({"advantages": "remax", "advantage_baseline": "mean"}, "'baseline' is no argument of the advantages 'remax'"),
        ({"advantages": "group:scale"}, "options are written as name:key=value"),
        ({"advantages": "group:eps=-1"}, "eps=-1"),
        ({"corrections": ["ti"]}, "it must be one of importance_weights, tis"),
        ({"corrections": ["tis:low=3"]}, "high=2.0: the upper bound"),
        ({"corrections": ["rejection_mask"]}, "pass low=, high= or both"),
        ({"sparse_step": 1e-6}, r"it is in \[1/4096, 1\]"),
        ({"sparse_step": 0.1, "loss": "logits"}, "goes with loss=linear"),
        ({"sparse_step": 0.1, "kl": "exact", "beta": 0.1}, "goes with loss=linear"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_value_names_the_field_and_the_remedy(changes: dict[str, Any], message: str) -> None:
    field = next(iter(changes))
    with pytest.raises(ValueError, match=message) as caught:
        TrainConfig(**changes)
    assert field in str(caught.value) or "numerics" in changes or field.startswith("advantage") or "corrections" in changes


def test_beta_and_its_defaults(tok: Any, tmp_path: Path) -> None:
    """0 in the papers, and where a trainer's numerics have one, that; a top-k that leaves one token may go without replay."""
    runs = [
        ({}, False),
        ({"numerics": "liger"}, True),
        ({"numerics": "liger", "beta": 0.0}, False),
        ({"kl": "k3", "beta": 0.0}, False),
    ]
    for i, (changes, wanted) in enumerate([*runs, ({"top_k": 1, "replay": False}, False)]):
        assert ("kl" in trainer(tok, tmp_path / str(i), **changes).train_step()) == wanted, changes


# ---- what cannot run here, before anything slow


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "gpu"}, "device='gpu': it must be auto, cpu, cuda or"),
        ({"device": "meta"}, "device='meta': it must be auto, cpu, cuda or"),
        ({"backend": "tritn"}, "backend='tritn': it must be one of auto, eager, cpu, triton"),
        ({"model": ""}, "model='': name one"),
        ({"dataset": ""}, "dataset='': name one"),
        ({"model": "./modles/mine"}, "model='./modles/mine': there is no such file or folder"),
        ({"model": "/models/a/b"}, "model='/models/a/b': there is no such file or folder"),
        ({"model": "~/mine"}, "model='~/mine': there is no such"),
        ({"model": "here/modle"}, "model='here/modle': the folder 'here' is here and has no 'modle'"),
        ({"dataset": "rows.jsonl"}, "dataset='rows.jsonl': there is no such"),
        ({"dataset": "data/rows.parquet"}, "dataset='data/rows.parquet': there is no such"),
        ({"reward_model": "runs/rm/final"}, "reward_model='runs/rm/final': there is no such"),
        ({"teacher": "runs/teacher/final", "beta": 0.1}, "teacher='runs/teacher/final': there is no such"),
        ({"preset": "distillation"}, "preset='distillation': it learns from a teacher: name one"),
        ({"preset": "sampled_distillation"}, "preset='sampled_distillation': it learns from a teacher: name one"),
        ({"beta": 0.1, "kl": "exact", "parallel": "fsdp2"}, "use parallel='ddp'"),
        ({"liger": True}, "liger=True: .*GPU"),
        ({"device": "cuda"}, "device='cuda': torch sees no CUDA device"),
        *(({"log_to": ["jsonl", name]}, f"log_to='{name}', but {name} is not installed: pip install {name}")
          for name in ("tensorboard", "wandb", "trackio", "mlflow")),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_what_cannot_run_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    """None of these asks the Hub, which without a network would take minutes; nothing is made or loaded."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the Hub is asked")

    for owner in ("transformers.AutoModelForCausalLM", "transformers.AutoTokenizer"):
        monkeypatch.setattr(f"{owner}.from_pretrained", refuse)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    for name in changes.get("log_to", ())[1:]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    with pytest.raises(ValueError, match=message):
        Trainer(config(tmp_path / "run", **({"model": "org/name", "dataset": "org/data"} | changes)))
    assert not Path("run").exists()


def of_other_vocabulary(tok: Any) -> Any:
    return tiny(tok, vocab_size=len(tok) + 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teacher": tiny, "beta": 0.0}, "at beta=0 nothing looks at it"),
        ({"teacher": tiny, "beta": 0.1, "ref_refresh_steps": 3}, "set beta above 0 and ref_refresh_steps to 0"),
        ({"teacher": of_other_vocabulary, "beta": 0.1}, "the teacher has a vocabulary of 31, the model of 30"),
        ({"teacher": "itself", "beta": 0.1}, r"teacher shares parameters with model.*copy.deepcopy"),
        ({"rows": ([], [])}, "there are no training rows: name a data set"),
        ({"rows": (PROMPTS, []), "eval_steps": 5}, "there are no held-out rows: name an eval_split"),
        ({"rows": (PROMPTS, []), "chat": True}, "chat=True, but the tokenizer has no chat template"),
        ({"rows": ([{"prompt": [{"role": "user", "content": "1"}]}], [])}, "row 0 .*: the prompt is a list of messages, but the tok"),
        ({"rewards": ["nothing"]}, "it must be one of exact, number, or module:function"),
        ({"rewards": ["json:nothing"]}, "rewards='json:nothing' cannot be imported"),
        ({"rewards": ["json:__name__"]}, "rewards='json:__name__' is a str: name a function"),
        ({"tokenizer": None}, "model and tokenizer go together"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_does_not_go_together_is_refused(tok: Any, tmp_path: Path, given: dict[str, Any], message: str) -> None:
    model, passed = tiny(tok), {"tokenizer": tok, "rows": (PROMPTS, []), **given}
    teacher = passed.pop("teacher", None)
    passed["teacher"] = model if teacher == "itself" else teacher and teacher(tok)
    changes = {name: passed.pop(name) for name in [*passed] if name not in ("tokenizer", "rows", "teacher")}
    with pytest.raises(ValueError, match=message):
        Trainer(config(tmp_path, **changes), model=model, **passed)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("package", ["matplotlib", "tqdm", "yaml"])
def test_a_missing_package_is_noticed_before_training(
    tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"the trainer needs {package}, which is not installed: pip install"):
        trainer(tok, tmp_path / "run")


def test_unwritable_output_is_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"out=.*cannot be written"):
        Trainer(config(tmp_path / "file" / "run", model="no/such-model", dataset="no/such-data"))


def test_each_process_of_a_machine_has_a_device_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen from what it makes the current one."""

    class Picked(Exception):
        pass

    def picked(device: torch.device) -> None:
        raise Picked(str(device))

    def device(name: str, **environment: str) -> str:
        for key in ("LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(key, raising=False)
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        with pytest.raises((Picked, ValueError)) as caught:
            Trainer(config(tmp_path, model="no/such", dataset="no/such", device=name))
        return str(caught.value)

    for name, value in (("is_available", True), ("device_count", 4), ("current_device", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", picked)
    assert device("auto") == device("cuda") == "cuda:3" and device("cuda:1") == "cuda:1"
    ranks = {"LOCAL_RANK": "2", "WORLD_SIZE": "8"}
    assert device("auto", **ranks) == device("cuda", **ranks) == "cuda:2"
    assert "device='cuda:1': of several processes each has a device of its own" in device("cuda:1", **ranks)
    assert "device='cuda:4': torch sees 4 CUDA devices here, of which the last is cuda:3" in device("cuda:4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # a launcher that hides the devices of the others
    assert device("cuda", **ranks) == "cuda:0"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_attention_that_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"flash_attention_2.*needs a CUDA device"):
        Trainer(config(tmp_path, model="org/name", dataset="org/data", attn_implementation="flash_attention_2"))


def test_linear_loss_refuses_a_head_it_does_not_know(tok: Any, tmp_path: Path) -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = tiny(tok)
    model.lm_head = Doubled(32, len(tok), bias=False)
    with pytest.raises(ValueError, match=r"loss='linear' does not know .*Doubled.*use loss='logits'"):
        trainer(tok, tmp_path / "a", model=model)
    model.lm_head = torch.nn.Linear(32, len(tok), bias=False)
    model.lm_head.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(ValueError, match=r"its logits differ by up to .*use loss='logits'"):
        trainer(tok, tmp_path / "b", model=model)


def test_a_model_that_ignores_logits_to_keep_is_refused(tok: Any, tmp_path: Path) -> None:
    model = tiny(tok)
    forward = model.forward
    model.forward = lambda *args, logits_to_keep=0, **options: forward(*args, **options)
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM gives \d+ logits for logits_to_keep=4: it ignores that"):
        trainer(tok, tmp_path, model=model, loss="logits").train_step()


# ---- prompts and data sets

#: Writes a user's text between = and ?, an assistant's after it, and asks for an answer with "+".
TEMPLATE = (
    "{% for m in messages %}{{ {'user': '=', 'assistant': '?', 'system': '-'}[m['role']] + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}+{% endif %}"
)


@pytest.fixture(scope="module")
def chat_tok() -> Any:
    tok = tokenizer()
    tok.chat_template = TEMPLATE
    return tok


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def seen(tok: Any, out: Path, count: int, rows: Any = None, **changes: Any) -> tuple[list[Any], list[Any], list[list[int]]]:
    """Of a run with as many prompts a step as there are rows: (prompt, answer) of training rows and of held-out ones, sorted,
    and the ids that the model is given of each training row."""
    calls: list[Any] = []
    ids: list[list[int]] = []

    def told(prompts: list[str], completions: list[str], *, answer: Any = None, **_: Any) -> list[float]:
        calls.append(sorted(zip(prompts, answer or prompts, strict=True), key=str))
        return [0.0] * len(prompts)

    def look(module: Any, args: Any, options: dict[str, Any]) -> None:
        mask = options["attention_mask"]
        if not ids and len(mask) == count:
            ids.extend(row[keep.bool()].tolist() for row, keep in zip(options["input_ids"], mask, strict=True))

    model = tiny(tok)
    settings = {
        "prompts_per_step": count,
        "group_size": 1,
        "steps": 1,
        "max_new_tokens": 2,
        "loss": "logits",
        "eval_steps": 1,
        **changes,
    }
    t = Trainer(config(out, **settings), model=model, tokenizer=tok, rows=rows, rewards=[told])
    model.register_forward_pre_hook(look, with_kwargs=True)
    assert t.train()
    return (calls[1], calls[0], ids) if settings["eval_steps"] else (calls[0], [], ids)


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_conversations_go_through_the_chat_template(chat_tok: Any, tmp_path: Path) -> None:
    """Rows that are passed, and a file in TRL's format, which gives the keys of all messages to each, None where it lacks one."""
    talk = [{"role": "system", "content": "1"}, *user("2"), {"role": "assistant", "content": "3", "tool_calls": "x"}]
    rows = [{"prompt": user("4"), "answer": "8"}, {"prompt": talk, "answer": "9"}]
    path = write(tmp_path / "p.jsonl", rows)
    for i, options in enumerate(({"rows": (rows, [])}, {"dataset": path})):
        found, _, ids = seen(chat_tok, tmp_path / str(i), 2, eval_steps=0, **options)
        assert found == [("-1=2?3", "9"), ("=4+", "8")]  # the assistant's last message goes on
        assert sorted(map(chat_tok.decode, ids)) == ["-1=2?3", "=4+"]
    texts = [{"prompt": "1"}, {"prompt": "2"}]
    found, *_ = seen(chat_tok, tmp_path / "chat", 2, rows=(texts, []), eval_steps=0, chat=True, prompt_template="0+{prompt}")
    assert [prompt for prompt, _ in found] == ["=0+1+", "=0+2+"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, r"prompt=None: it must be a text"),
        ("", r"prompt='': it must be a text that is not empty"),
        ("  \n", r"it must be a text that is not empty"),
        ([], r"prompt=\[\]: it must be"),
        (7, r"prompt=7: it must be a text"),
        (["a"], r"prompt=\['a'\]: it must be a text that is not empty, or a list of messages"),
        ([{"role": "user"}, {"content": "x"}], "a list of messages with their roles"),
        ([{"role": "tool", "content": "x"}], "the tokenizer's chat template refuses the messages"),
        ([{"role": "user", "content": "1+1"}], "prompt_template='a {prompt}' goes around a text"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(chat_tok: Any, tmp_path: Path, prompt: Any, message: str) -> None:
    rows, changes = (
        [{"prompt": "1+1="}, {"prompt": prompt}],
        {"prompt_template": "a {prompt}"} if "template=" in message else {},
    )
    for which, given in (("training", (rows, rows[:1])), ("held-out", (rows[:1], rows))):
        with pytest.raises(ValueError, match=f"row 1 of the {which} rows: .*{message}"):
            seen(chat_tok, tmp_path, 2, rows=given, **changes)


def test_a_text_gets_its_beginning_of_text_token_once_with_a_chat_template_or_without(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    for i, template in enumerate((None, TEMPLATE)):
        tok = tokenizer()
        tok.bos_token, tok.chat_template = "?", template
        tok.backend_tokenizer.post_processor = TemplateProcessing("? $A", special_tokens=[("?", tok.bos_token_id)])
        _, _, ids = seen(tok, tmp_path / str(i), 2, rows=([{"prompt": "1+1="}, {"prompt": "?1+1="}], []), eval_steps=0)
        assert ids == [[tok.bos_token_id, *tok.convert_tokens_to_ids(list("1+1="))]] * 2


@pytest.mark.parametrize("configuration", ["main", None, "socratic"])
def test_data_laid_out_as_gsm8k(tok: Any, tmp_path: Path, configuration: str | None) -> None:
    """Two configurations, two splits, question and answer columns."""
    card = "---\nconfigs:\n"
    for name, first in (("main", 0), ("socratic", 5)):
        card += f"- config_name: {name}\n  data_files:\n"
        for split, count in (("train", 5), ("test", 3)):
            path = f"{name}-{split}.jsonl"
            write(
                tmp_path / path,
                [{"question": f"{i}+1=", "answer": f"{i} and 1.\n#### {i + 1}"} for i in range(first, first + count)],
            )
            card += f"  - split: {split}\n    path: {path}\n"
    (tmp_path / "README.md").write_text(card + "---\n")
    options = {"dataset": str(tmp_path), "dataset_config": configuration, "prompt_template": "-{prompt}"}
    train, held_out, _ = seen(tok, tmp_path / "run", 5, **options)
    first = 5 if configuration == "socratic" else 0
    assert train == [(f"-{i}+1=", str(i + 1)) for i in range(first, first + 5)] and held_out == train[:3]
    with pytest.raises(ValueError, match=r"split 'dev' is not in dataset=.*: it has train, test"):
        seen(tok, tmp_path / "dev", 5, **options, eval_split="dev")


@pytest.mark.parametrize(("name", "rows", "held_out"), [("p.parquet", 24, 2), ("p.json", 5, 1), ("p.jsonl", 12, 5)])
def test_data_in_one_file_holds_out_its_end(tok: Any, tmp_path: Path, name: str, rows: int, held_out: int) -> None:
    """A tenth, and at least one; or as many as is said."""
    data, path = datasets.Dataset.from_list(PROMPTS[:rows]), str(tmp_path / name)
    data.to_parquet(path) if name == "p.parquet" else data.to_json(path)
    train, found, _ = seen(
        tok, tmp_path / "run", rows - held_out, dataset=path, **({"eval_prompts": 5} if held_out == 5 else {})
    )
    expected = [(row["prompt"], row["answer"]) for row in PROMPTS[:rows]]
    assert train == sorted(expected[: rows - held_out]) and found == sorted(expected[rows - held_out :])


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("", {}, "dataset=.*p.jsonl' is empty"),
        ('{"prompt": "1', {}, "dataset=.*p.jsonl' cannot be loaded: "),
        ('{"prompt": "1"}\n', {}, "has 1 rows, and eval_prompts=1 holds out all: .*eval_steps=0"),
        ('{"prompt": "1"}\n' * 3, {"eval_prompts": 3}, "eval_prompts=3"),
        ('{"prompt": "1"}\n' * 3, {"prompt_column": "text"}, "prompt_column='text': the data set has the columns prompt"),
        ('{"question": "1+1="}\n{"question": null}\n', {"eval_steps": 0}, "row 1 of the training rows: prompt=None"),
        ('{"prompt": "1"}\n', {"dataset": "p.txt"}, "a file must end in one of"),
        ('{"prompt": "1"}\n', {"eval_steps": 0, "max_prompt_tokens": 0}, "max_prompt_tokens=0: it must be at least 1"),
    ],
)
def test_a_file_that_is_no_data_set_is_refused(
    tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("p.jsonl", "p.txt"):
        Path(name).write_text(text)
    with pytest.raises(ValueError, match=message):
        seen(tok, tmp_path / "run", 1, **{"dataset": str(tmp_path / "p.jsonl"), **changes})


def test_splits_and_answers_that_are_not_needed(tok: Any, tmp_path: Path) -> None:
    """Without evaluations no row is held out, and no split for them has to be there; a row may lack its answer."""
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": None}]
    path = write(tmp_path / "train.jsonl", rows)
    for i, name in enumerate((path, str(tmp_path))):
        assert seen(tok, tmp_path / f"out{i}" / "run", 2, dataset=name, eval_steps=0)[0] == [("1+1=", "2"), ("1+2=", None)]


def test_long_prompts_are_left_out_with_a_count(tok: Any, tmp_path: Path, capsys: Any) -> None:
    rows = [{"prompt": "1+2="}, {"prompt": "1+2+3+4="}]
    train, held_out, _ = seen(tok, tmp_path, 1, rows=(rows, rows), max_prompt_tokens=5)
    assert [p for p, _ in train] == [p for p, _ in held_out] == ["1+2="]
    told = capsys.readouterr().out
    assert "left out 1 of 2 training prompts" in told and "left out 1 of 2 held-out prompts" in told
