"""Inputs of the trainer: prompts of every form, data sets with missing values, names and devices that do not exist."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from examples.arithmetic import tokenizer as arithmetic_tokenizer
from grpo_kernels.__main__ import main as command_line
from grpo_kernels.training import data, loading, rewards
from grpo_kernels.training.data import encode, load_rows
from grpo_kernels.training.loading import pick_device
from grpo_kernels.training.rewards import exact, number
from grpo_kernels.training.trainer import TrainConfig, Trainer
from support.runs import PROMPTS, config, evens, lines, tiny, trainer

#: Writes a user's text between = and ?, an assistant's after it, and asks for an answer with "+".
TEMPLATE = (
    "{% for m in messages %}{{ {'user': '=', 'assistant': '?', 'system': '-'}[m['role']] + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}+{% endif %}"
)


@pytest.fixture(scope="module")
def chat_tok() -> Any:
    tok = arithmetic_tokenizer()
    tok.chat_template = TEMPLATE
    return tok


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def with_rows(tok: Any, out: Path, rows: Any, held_out: Any = (), **changes: Any) -> Trainer:
    return Trainer(config(out, **changes), model=tiny(tok), tokenizer=tok, rows=(rows, list(held_out)), rewards=[evens])


# ---- prompts


def test_a_conversation_is_trained_on_as_its_chat_template_and_not_as_python_text(chat_tok: Any, tmp_path: Path) -> None:
    seen: list[str] = []

    def watching(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        seen.extend(prompts)
        return evens(prompts, completions)

    rows = [{"prompt": user(f"{i}+1")} for i in range(3)]
    t = Trainer(config(tmp_path), model=tiny(chat_tok), tokenizer=chat_tok, rows=(rows, []), rewards=[watching])
    assert [row["prompt"] for row in t.train_rows] == ["=0+1+", "=1+1+", "=2+1+"]
    assert [chat_tok.decode(row["prompt_ids"]) for row in t.train_rows] == ["=0+1+", "=1+1+", "=2+1+"]
    t.train_step()
    assert set(seen) == {"=0+1+", "=1+1+", "=2+1+"}


def test_conversations_of_a_file(chat_tok: Any, tmp_path: Path) -> None:
    """TRL's format. A data set gives the keys of all messages to each of them, None where a message has none."""
    talk = [{"role": "system", "content": "1"}, *user("2"), {"role": "assistant", "content": "3", "tool_calls": "x"}]
    rows = [{"prompt": user("4"), "answer": "8"}, {"prompt": talk, "answer": "9"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    c = TrainConfig(dataset=str(tmp_path / "p.jsonl"), eval_steps=0)
    found = encode(load_rows(c)[0], chat_tok, c)
    assert [row["prompt"] for row in found] == ["=4+", "-1=2?3"]  # the assistant's last message goes on
    assert [row["answer"] for row in found] == ["8", "9"]


def test_chat_wraps_texts_of_rows_and_of_files_alike(chat_tok: Any, tmp_path: Path) -> None:
    t = with_rows(chat_tok, tmp_path / "run", PROMPTS[:3], chat=True, prompt_template="0+{prompt}")
    assert [row["prompt"] for row in t.train_rows] == [f"=0+{row['prompt']}+" for row in PROMPTS[:3]]


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        (None, {}, r"prompt=None: it must be a text"),
        ("", {}, r"prompt='': it must be a text that is not empty"),
        ("  \n", {}, r"it must be a text that is not empty"),
        ([], {}, r"prompt=\[\]: it must be"),
        (7, {}, r"prompt=7: it must be a text"),
        (["a"], {}, r"prompt=\['a'\]: it must be a text that is not empty, or a list of messages"),
        ([{"role": "user"}, {"content": "x"}], {}, "a list of messages with their roles"),
        (user("1+1"), {"prompt_template": "a {prompt}"}, "prompt_template='a {prompt}' goes around a text"),
        ([{"role": "tool", "content": "x"}], {}, "the tokenizer's chat template refuses the messages"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(
    chat_tok: Any, tmp_path: Path, prompt: Any, changes: dict[str, Any], message: str
) -> None:
    rows = [{"prompt": "1+1="}, {"prompt": prompt}]
    with pytest.raises(ValueError, match=f"row 1 of the training rows: .*{message}"):
        with_rows(chat_tok, tmp_path, rows, **changes)
    if not changes:
        with pytest.raises(ValueError, match="row 1 of the held-out rows: "):
            with_rows(chat_tok, tmp_path, rows[:1], rows, eval_steps=1)


def test_a_conversation_needs_a_chat_template(tok: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"row 0 .*: the prompt is a list of messages, but the tokenizer has no chat template"):
        with_rows(tok, tmp_path, [{"prompt": user("1+1")}])
    with pytest.raises(ValueError, match="chat=True, but the tokenizer has no chat template"):
        with_rows(tok, tmp_path, PROMPTS, chat=True)


def test_null_prompts_of_a_file_are_not_the_word_none(tok: Any, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n{"question": null, "answer": "3"}\n')
    c = TrainConfig(dataset=str(tmp_path / "p.jsonl"), eval_steps=0)
    with pytest.raises(ValueError, match="row 1 of the training rows: prompt=None"):
        encode(load_rows(c)[0], tok, c)


def test_null_answers_are_refused_by_rewards_that_compare_with_them(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": null}\n')
    train, _ = load_rows(TrainConfig(dataset=str(tmp_path / "p.jsonl"), eval_steps=0))
    assert [row["answer"] for row in train] == ["2", None]
    for reward in (exact, number):
        with pytest.raises(ValueError, match="the answer of completion 1 is None"):
            reward(["", ""], ["2", "None"], answer=["2", None])


def test_a_text_gets_its_beginning_of_text_token_once_with_a_chat_template_or_without() -> None:
    from tokenizers.processors import TemplateProcessing

    for template in (None, TEMPLATE):
        tok = arithmetic_tokenizer()
        tok.bos_token, tok.chat_template = "?", template
        tok.backend_tokenizer.post_processor = TemplateProcessing("? $A", special_tokens=[("?", tok.bos_token_id)])
        (plain, begun) = encode([{"prompt": "1+1="}, {"prompt": "?1+1="}], tok, TrainConfig())
        assert plain["prompt_ids"] == begun["prompt_ids"] == [tok.bos_token_id, *(tok.convert_tokens_to_ids(list("1+1=")))]


# ---- data sets


@pytest.mark.parametrize("where", ["rows", "file", "split"])
def test_a_data_set_without_rows_is_refused_at_the_start(tok: Any, tmp_path: Path, where: str) -> None:
    if where == "rows":
        with pytest.raises(ValueError, match="there are no training rows: name a data set"):
            with_rows(tok, tmp_path, [])
        with pytest.raises(ValueError, match="there are no held-out rows: name an eval_split"):
            with_rows(tok, tmp_path, PROMPTS, eval_steps=5)
    elif where == "file":
        (tmp_path / "p.jsonl").write_text("")
        with pytest.raises(ValueError, match=r"dataset='.*p.jsonl' is empty"):
            load_rows(TrainConfig(dataset=str(tmp_path / "p.jsonl")))
        (tmp_path / "p.jsonl").write_text('{"prompt": "1')
        with pytest.raises(ValueError, match=r"dataset='.*p.jsonl' cannot be loaded: "):
            load_rows(TrainConfig(dataset=str(tmp_path / "p.jsonl")))
    else:
        (tmp_path / "train.jsonl").write_text(json.dumps(PROMPTS[0]) + "\n")
        with pytest.raises(ValueError, match="split 'test' is not in dataset"):
            load_rows(TrainConfig(dataset=str(tmp_path)))
        train, held_out = load_rows(TrainConfig(dataset=str(tmp_path), eval_steps=0))  # which needs no such split
        assert [row["prompt"] for row in train] == [PROMPTS[0]["prompt"]] and not held_out


@pytest.mark.parametrize(("rows", "held_out"), [(24, 2), (5, 1), (2, 1), (4000, 256)])
def test_evaluation_rows_of_a_single_small_file(tmp_path: Path, rows: int, held_out: int) -> None:
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(rows)))
    train, found = load_rows(TrainConfig(dataset=str(tmp_path / "p.jsonl")))
    assert [row["prompt"] for row in found] == [str(i) for i in range(rows - held_out, rows)]
    assert [row["prompt"] for row in train] == [str(i) for i in range(rows - held_out)]


def test_one_row_cannot_be_split_for_evaluation(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1"}\n')
    with pytest.raises(ValueError, match=r"has 1 rows, and eval_prompts=1 holds out all: .*eval_steps=0"):
        load_rows(TrainConfig(dataset=str(tmp_path / "p.jsonl")))
    assert len(load_rows(TrainConfig(dataset=str(tmp_path / "p.jsonl"), eval_steps=0))[0]) == 1


def test_held_out_prompts_that_are_left_out_are_counted(tok: Any, tmp_path: Path, capsys: Any) -> None:
    with_rows(tok, tmp_path, PROMPTS, [{"prompt": "1+2="}, {"prompt": "1+2+3+4="}], eval_steps=1, max_prompt_tokens=5)
    assert "left out 1 of 2 held-out prompts" in capsys.readouterr().out


# ---- errors that are noticed before anything slow


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "gpu"}, "device='gpu': it must be auto, cpu, cuda or"),
        ({"device": "meta"}, "device='meta': it must be auto, cpu, cuda or"),
        ({"backend": "tritn"}, "backend='tritn': it must be one of auto, eager, cpu, triton"),
        ({"backend": "triton"}, 'backend="triton" cannot run: '),
        ({"model": "./modles/mine"}, "model='./modles/mine': there is no such file or folder"),
        ({"model": "/models/a/b"}, "model='/models/a/b': there is no such file or folder"),
        ({"model": "~/mine"}, "model='~/mine': there is no such"),
        ({"model": "tests/modle"}, "model='tests/modle': the folder 'tests' is here and has no 'modle'"),
        ({"dataset": "rows.jsonl"}, "dataset='rows.jsonl': there is no such"),
        ({"dataset": "data/rows.parquet"}, "dataset='data/rows.parquet': there is no such"),
        ({"reward_model": "runs/rm/final"}, "reward_model='runs/rm/final': there is no such"),
    ],
    ids=str,
)
def test_a_mistyped_name_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    """None of these asks the Hub, which without a network would take minutes: nothing that would is even imported."""

    def refuse(package: str) -> None:
        raise AssertionError(f"{package} is asked")

    for module in (loading, data, rewards):
        monkeypatch.setattr(module, "require", refuse)
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=message):
        Trainer(config(tmp_path / "run", **({"model": "org/name", "dataset": "org/data"} | changes)))
    assert not (tmp_path / "run").exists()


def test_a_device_beyond_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device='cuda:2': torch sees 2 CUDA devices here, of which the last is cuda:1"):
        pick_device("cuda:2")


@pytest.mark.parametrize("package", ["matplotlib", "tqdm"])
def test_a_missing_package_is_noticed_before_training(
    tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"the trainer needs {package}, which is not installed: pip install"):
        trainer(tok, tmp_path / "run")


def test_a_picture_that_fails_hides_no_error_of_a_reward(
    tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def failing(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        raise RuntimeError("the grader is gone")

    monkeypatch.setattr("grpo_kernels.training.report.plot", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="the grader is gone"):
        trainer(tok, tmp_path / "a", rewards=[failing]).train()
    assert "curves.png is not drawn: ZeroDivisionError" in capsys.readouterr().err
    assert trainer(tok, tmp_path / "b").train()


# ---- what the metrics say


def test_accuracy_says_what_it_counts(tok: Any, tmp_path: Path) -> None:
    """The share of held-out prompts with a first reward of at least 1, and beside it the mean of all rewards."""

    def three(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [3.0 if p.startswith("5") else 0.5 for p in prompts]

    t = trainer(tok, tmp_path, rewards=[three], eval_steps=2, eval_prompts=8, steps=1)
    assert t.train()
    evaluations = [line for line in lines(tmp_path) if "accuracy" in line]
    share = sum(row["prompt"].startswith("5") for row in PROMPTS[16:]) / 8
    assert len(evaluations) == 2 and share == 0.5
    for line in evaluations:
        assert (line["accuracy"], line["accuracy_counts"]) == (share, "three >= 1, 8 prompts")
        assert line["eval_reward"] == pytest.approx(3.0 * share + 0.5 * (1 - share))


def test_metrics_are_json_whatever_is_in_them(tok: Any, tmp_path: Path, drawn: None) -> None:
    """A gradient that is not finite: its norm is null, and the picture is drawn from the rest."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    t = trainer(tok, tmp_path, steps=2)
    t.model.lm_head.weight.register_hook(lambda g: g * float("nan"))
    assert t.train()
    texts = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(text, parse_constant=refuse) for text in texts]
    assert [line["grad_norm"] for line in found] == [None, None] and found[0]["skipped"] == 1.0
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_a_run_from_the_command_line_says_how_it_ended(
    tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """0: done. 2: an argument is wrong. 128 + signal: interrupted, to be resumed."""
    tiny(tok).save_pretrained(tmp_path / "model")
    tok.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "stopping_reward.py").write_text(
        "import os, signal\nwhich = []\ndef stop(prompts, completions, **_):\n"
        "    [os.kill(os.getpid(), n) for n in which]\n    return [0.0] * len(prompts)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    argv = [
        "train", "--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows.jsonl"), "--steps", "3",
        "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "2", "--eval-steps", "0", "--no-progress",
        "--device", "cpu", "--rewards", "stopping_reward:stop", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    import stopping_reward

    for received, steps in ((signal.SIGTERM, 1), (signal.SIGINT, 2)):
        stopping_reward.which[:] = [received]
        assert command_line([*argv, "--resume"]) == 128 + received
        assert len(lines(tmp_path / "run")) == steps
    stopping_reward.which.clear()
    assert command_line(argv) == 2 and "holds a run: continue it with resume" in capsys.readouterr().err
    assert command_line([*argv, "--resume"]) == 0
