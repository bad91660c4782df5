"""What a run is told:

options on the command line and in files, prompts of every form, data sets; and what is refused.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("yaml")
pytest.importorskip("transformers")
pytest.importorskip("datasets")

import yaml

from examples.arithmetic import tokenizer
from grpo_kernels.__main__ import main as command_line
from grpo_kernels.training.config import parse, write
from grpo_kernels.training.data import encode, load_rows, pick_device
from grpo_kernels.training.trainer import TrainConfig, Trainer
from support.runs import PROMPTS, config, flags, lines, on_disk, tiny, trainer

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
SMALL = flags(steps=2, prompts_per_step=2, group_size=2, max_new_tokens=2, eval_steps=0)


def refusal(capsys, *arguments):
    """What a command that is wrong prints."""
    assert command_line(["train", *arguments]) == 2
    return capsys.readouterr().err


# ---- the command line, and files of options


def test_options_are_written_and_read_again(tmp_path):
    """Every text and number comes back; what the command line says wins, default values and empty
    lists too.
    """
    strange = ["--prompt-template", "  a: 'b' #\n\t{prompt}\u2028é\x07 "]
    numbers = (
        "--lr 1e-6 --max-grad-norm inf --weight-decay 1e-300 --rewards exact number"
        " --reward-weights 0.1 1e22"
    )
    others = (
        "--dataset_config null --train-split 1e3 --no-replay --corrections tis:high=3"
        " --sample-every 0 --no-progress --chat"
    )
    first = parse([*strange, *numbers.split(), *others.split()])
    assert (
        first.replay is False
        and first.chat
        and not first.progress
        and first.max_grad_norm == float("inf")
    )
    write(first, tmp_path / "config.yaml")
    again = ["--config", f"{tmp_path}/config.yaml"]
    assert parse(again) == first
    changed = parse([*again, *"--lr 1e-5 --weight_decay 0.0 --corrections --progress true".split()])
    assert changed == replace(first, lr=1e-5, weight_decay=0.0, corrections=[], progress=True)


def test_the_example_of_the_documentation_runs(tok, tmp_path, monkeypatch, capsys):
    """The YAML of docs/training.md as it stands, but for the model, the data, how much and where;
    names with dashes, numbers as 1e-6 and null are options too. It tells how it goes, and what it
    came to.
    """
    (example,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(
        example + "min-p: 1e-1\nbeta: null\nbetas: [0.8, 1e-1]\nmax_grad_norm: 7\n"
    )
    small = [
        *on_disk(tok, tmp_path),
        *SMALL,
        *"--chat false --dtype float32 --log-to jsonl --out run".split(),
    ]
    assert command_line(["train", "--config", "a.yaml", *small]) == 0
    told, written = capsys.readouterr(), yaml.safe_load(Path("run/config.yaml").read_text())
    wanted = {
        "preset": "dapo",
        "lr": 1e-6,
        "chat": False,
        "min_p": 0.1,
        "beta": None,
        "betas": [0.8, 0.1],
        "max_grad_norm": 7.0,
    }
    assert wanted.items() <= written.items() and isinstance(written["max_grad_norm"], float)
    assert (
        Path("run/summary.txt").read_text() in told.out
        and "step 0: reward" in told.err
        and "2 of 2 done" in told.err
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: m\nmax_new_token: 3",
            "there is no option 'max_new_token': did you mean max_new_tokens?",
        ),
        ("steps: 1.5", "argument --steps: invalid int value: '1.5'"),
        ("- steps", "it must be lines of `option: value`"),
        ("steps: !!python/name:os.system", "cannot be read: could not determine a constructor"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, capsys, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    found = refusal(capsys, "--config", str(path))
    assert found.startswith(f"error: config={str(path)!r}") and message in found


#: What a command line adds to a run, and what is said of it.
REFUSED = [
    ("--max-new-token 3", "there is no option 'max_new_token': did you mean max_new_tokens?"),
    # single values
    ("--steps 0", "steps=0: it must be at least 1"),
    ("--top-p 0", "top_p=0.0: it is a share in (0, 1]"),
    (
        "--temperature 0",
        (
            "temperature=0.0: it divides the logits and must be above 0; for greedy use"
            " eval_temperature=0"
        ),
    ),
    ("--lr inf", "lr=inf: it must be a finite number >= 0"),
    # what does not go together
    ("--kl exact", "its weight is 0 in preset='grpo': set beta as well"),
    ("--rewards", "rewards=[]: name a reward function"),
    (
        "--reward-weights 1 2",
        "reward_weights=[1.0, 2.0]: give one weight for each of the 1 rewards",
    ),
    ("--ref-refresh-steps 5", "there is no reference to refresh at beta=0: set beta above 0"),
    (
        "--entropy-coef -0.1 --entropy-target 0.2",
        "entropy_coef=-0.1: with entropy_target it is where the weight starts",
    ),
    ("--replay", "replay=True: nothing is cut off at top_p=1, top_k=0, min_p=0"),
    ("--top-k 1", "top_k=1: it leaves one token to sample from"),
    (
        "--ratio-to sampler --corrections tis",
        "ratio_to='sampler': the ratio to the sampler holds what corrections=['tis'] weigh",
    ),
    (
        "--drop-zero-variance --beta 0.1",
        "drop_zero_variance=True: this objective wants those completions",
    ),
    # estimators and corrections
    ("--advantages gae", "advantages='gae': it takes values, of which this trainer has none"),
    ("--advantages remax:scale=none", "'scale' is no argument of the advantages 'remax'"),
    # what cannot run here
    ("--device cuda", "device='cuda': torch sees no CUDA device"),
    ("--log-to jsonl wandb", "log_to='wandb': wandb is not installed: pip install wandb"),
    ("--teacher runs/teacher/final --beta 0.1", "teacher='runs/teacher/final': there is no such"),
    ("--preset distillation", "preset='distillation': it learns from a teacher: name one"),
    (
        "--teacher org/name",
        "beta=None: set it above 0, and ref_refresh_steps to 0: at 0 nothing looks at the teacher",
    ),
    (
        "--beta 0.1 --kl exact --parallel fsdp2",
        "kl='exact': the head of a reference in shards .*use parallel='ddp'",
    ),
    ("--out file/run", "out='file/run' cannot be written"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize(
    ("arguments", "message"), REFUSED, ids=[arguments for arguments, _ in REFUSED]
)
def test_what_is_wrong_is_refused_at_once(tmp_path, monkeypatch, capsys, arguments, message):
    """With option, value and remedy, before anything is loaded:

    there are no such model and data.
    """
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    said = refusal(
        capsys,
        "--model",
        "org/name",
        "--dataset",
        "org/data",
        "--device",
        "cpu",
        *shlex.split(arguments),
    )
    assert all(part in said for part in message.split(" .*")), said
    assert not Path("runs").exists()


#: Signals that `stop` sends to its process.
SENT = []


def stop(prompts, completions, **_):
    for number in SENT:
        os.kill(os.getpid(), number)
    return [0.0] * len(prompts)


def test_a_run_from_the_command_line_says_how_it_ended(tok, tmp_path, monkeypatch, capsys):
    """0: done. 2: an argument is wrong. 128 + signal: interrupted, to be resumed."""
    options = flags(steps=3, rewards=f"{__name__}:stop", out=tmp_path / "run", dtype="bfloat16")
    argv = [*on_disk(tok, tmp_path), *SMALL, *options, "--no-progress", "--gradient-checkpointing"]
    for received, steps in ((signal.SIGTERM, 1), (signal.SIGINT, 2)):
        monkeypatch.setattr(sys.modules[__name__], "SENT", [received])
        assert command_line(["train", *argv, "--resume"]) == 128 + received
        assert len(lines(tmp_path / "run")) == steps
    monkeypatch.undo()
    assert "holds a run: continue it with resume" in refusal(capsys, *argv)
    assert command_line(["train", *argv, "--resume"]) == 0 and capsys.readouterr().out == ""


# ---- what is passed from Python

MODEL = tiny(tokenizer())
PASSED = [
    ({"rows": ([], [])}, "there are no training rows: name a data set"),
    ({"rows": (PROMPTS, []), "eval_steps": 5}, "there are no held-out rows: .*eval_steps=0"),
    ({"rewards": ["nothing"]}, "it must be one of exact, number, or module:function"),
    ({"teacher": MODEL, "beta": 0.1}, "teacher.*pass a copy of it, copy.deepcopy"),
    (
        {"teacher": tiny(tokenizer(), vocab_size=31), "beta": 0.1},
        "teacher.*a vocabulary of 31, the model of 30",
    ),
]


@pytest.mark.parametrize(("given", "message"), PASSED, ids=[message for _, message in PASSED])
def test_what_is_passed_and_does_not_go_together_is_refused(tok, tmp_path, given, message):
    passed = {"tokenizer": tok, "rows": (PROMPTS, []), **given}
    options = {name: passed.pop(name) for name in given.keys() - {"tokenizer", "rows", "teacher"}}
    with pytest.raises(ValueError, match=message):
        Trainer(config(tmp_path, **options), model=MODEL, **passed)
    assert all(p.requires_grad for p in MODEL.parameters())


def test_a_missing_package_is_noticed_before_training(tok, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(
        ModuleNotFoundError, match="the trainer needs yaml, which is not installed: pip install"
    ):
        trainer(tok, tmp_path / "run")


def test_beta_and_its_defaults():
    """0 in the papers, and where a trainer's numerics have one, that; a top-k that leaves one token
    may go without replay.
    """
    assert (
        TrainConfig().objective.beta == 0 == TrainConfig(numerics="liger", beta=0.0).objective.beta
    )
    assert (
        TrainConfig(numerics="liger").objective.beta > 0
        and TrainConfig(kl="k3", beta=0.0).objective.beta == 0
    )
    assert not TrainConfig(top_k=1, replay=False).replays and TrainConfig(top_k=2).replays


@pytest.mark.parametrize(
    ("name", "environment", "count", "device"),
    [
        ("auto", {}, 4, "cuda:3"), ("cuda:1", {}, 4, "cuda:1"),
        # a launcher that hides the others
        ("cuda", {"LOCAL_RANK": "2"}, 4, "cuda:2"), ("cuda", {"LOCAL_RANK": "2"}, 1, "cuda:0"),
        ("cuda:1", {"WORLD_SIZE": "8"}, 4, "device='cuda:1': each process needs its own device"),
    ],
)  # fmt: skip
def test_each_process_of_a_machine_has_a_device_of_its_own(
    monkeypatch, name, environment, count, device
):
    for of_torch, value in (("is_available", True), ("device_count", count), ("current_device", 3)):
        monkeypatch.setattr(torch.cuda, of_torch, lambda value=value: value)
    for variable, text in environment.items():
        monkeypatch.setenv(variable, text)
    if device.startswith("device"):
        with pytest.raises(ValueError, match=device):
            pick_device(name)
    else:
        assert str(pick_device(name)) == device


def test_a_model_whose_logits_are_not_known_is_refused(tok, tmp_path):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    doubled, hooked, whole = (tiny(tok) for _ in range(3))
    doubled.lm_head = Doubled(32, len(tok), bias=False)
    hooked.lm_head.register_forward_hook(lambda module, args, out: 2 * out)
    for model, message in (
        (doubled, "the head is a Doubled"),
        (hooked, "log-probs differ by up to"),
    ):
        with pytest.raises(
            ValueError, match=f"loss='linear' does not know .*{message}.*use loss='logits'"
        ):
            trainer(tok, tmp_path / "a", model=model)
    forward = whole.forward
    whole.forward = lambda *args, logits_to_keep=0, **options: forward(*args, **options)
    with pytest.raises(
        ValueError, match=r"Qwen3ForCausalLM gives \d+ logits for logits_to_keep=1: it ignores that"
    ):
        trainer(tok, tmp_path / "b", model=whole, loss="logits", max_new_tokens=1).train_step()


# ---- prompts and data sets

#: Writes a user's text between = and ?, an assistant's after it, and asks for an answer with "+".
TEMPLATE = (
    "{% for m in messages %}{{ {'user': '=', 'assistant': '?', 'system': '-'}[m['role']] +"
    " m['content'] }}{% endfor %}{% if add_generation_prompt %}+{% endif %}"
)
Seen = list[tuple[str, str | None]]


def seen(tok, rows=None, **changes):
    """(prompt, answer) of training rows and of held-out ones, as a run has them; the ids are those
    of the prompt.
    """
    settings = TrainConfig(**{"dataset": "d", **changes})
    found = []
    for part, which in zip(rows or load_rows(settings), ("training", "held-out"), strict=True):
        encoded = (
            encode(part, tok, settings, which, tell=True) if part or which == "training" else []
        )
        assert all(tok.decode(row["prompt_ids"]) == row["prompt"] for row in encoded)
        found.append([(row["prompt"], row.get("answer")) for row in encoded])
    return found[0], found[1]


def chat_tokenizer(template=TEMPLATE):
    tok = tokenizer()
    tok.chat_template = template
    return tok


def in_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_conversations_go_through_the_chat_template(tmp_path):
    """Rows that are passed, and a file in TRL's format, which gives the keys of all messages to
    each, None where it lacks one.
    """
    user, answer = (
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "3", "tool_calls": "x"},
    )
    talk = [{"role": "system", "content": "1"}, user, answer]
    rows, tok = (
        [{"prompt": [user], "answer": "8"}, {"prompt": talk, "answer": "9"}],
        chat_tokenizer(),
    )
    expected = [("=2+", "8"), ("-1=2?3", "9")]  # the assistant's last message goes on
    assert (
        seen(tok, (rows, []))[0]
        == seen(tok, dataset=in_lines(tmp_path / "p.jsonl", rows), eval_steps=0)[0]
        == expected
    )
    texts = [{"prompt": "1"}, {"prompt": "2"}]
    assert seen(tok, (texts, []), chat=True, prompt_template="0+{prompt}")[0] == [
        ("=0+1+", None),
        ("=0+2+", None),
    ]


USER = [{"role": "user", "content": "x"}]
NO_PROMPTS = [
    (None, {}, "prompt=None: it must be a text"),
    (USER, {"prompt_template": "a {prompt}"}, r"prompt_template='a \{prompt\}' goes around a text"),
    (
        USER,
        {"tok": tokenizer()},
        "prompt=.*'x'.*goes through the tokenizer's chat template, and it has none",
    ),
]


@pytest.mark.parametrize(
    ("prompt", "changes", "message"), NO_PROMPTS, ids=[message for *_, message in NO_PROMPTS]
)
def test_a_row_that_is_no_prompt_is_named(prompt, changes, message):
    with pytest.raises(ValueError, match=f"row 1 of the training rows: .*{message}"):
        seen(
            **{
                "tok": chat_tokenizer(),
                "rows": ([{"prompt": "1+1="}, {"prompt": prompt}], []),
                **changes,
            }
        )


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["without a template", "with one"])
def test_a_text_gets_its_beginning_of_text_token_once(template):
    from tokenizers.processors import TemplateProcessing

    tok = chat_tokenizer(template)
    tok.bos_token = "?"
    tok.backend_tokenizer.post_processor = TemplateProcessing(
        "? $A", special_tokens=[("?", tok.bos_token_id)]
    )
    settings = TrainConfig()
    found = encode([{"prompt": "1+1="}, {"prompt": "?1+1="}], tok, settings, "training", tell=False)
    assert [row["prompt_ids"] for row in found] == [tok.convert_tokens_to_ids(list("?1+1="))] * 2


def test_data_in_a_folder_with_splits(tok, tmp_path):
    """Question and answer columns, of which the answer ends in a number."""
    for split, count in (("train", 5), ("test", 3)):
        rows = [
            {"question": f"{i}+1=", "answer": f"{i} and 1.\n#### {i + 1}"} for i in range(count)
        ]
        in_lines(tmp_path / f"{split}.jsonl", rows)
    train, held_out = seen(tok, dataset=str(tmp_path), prompt_template="-{prompt}")
    assert train == [(f"-{i}+1=", str(i + 1)) for i in range(5)] and held_out == train[:3]
    with pytest.raises(ValueError, match=r"split 'dev' is not in dataset=.*: it has "):
        seen(tok, dataset=str(tmp_path), eval_split="dev")


@pytest.mark.parametrize(("rows", "held_out"), [(24, 2), (5, 1), (12, 5)])
def test_data_in_one_file_holds_out_its_end(tok, tmp_path, rows, held_out):
    """A tenth, and at least one; or as many as is said."""
    path = in_lines(tmp_path / "p.jsonl", PROMPTS[:rows])
    train, found = seen(tok, dataset=path, eval_prompts=5 if held_out == 5 else None)
    assert [*train, *found] == [(row["prompt"], row["answer"]) for row in PROMPTS[:rows]] and len(
        found
    ) == held_out


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ('{"prompt": "1"}\n', {}, "has 1 rows, and eval_prompts=1 holds out all: .*eval_steps=0"),
        (
            '{"prompt": "1"}\n' * 3,
            {"prompt_column": "text"},
            "prompt_column='text': the data set has the columns prompt",
        ),
        (
            '{"question": "1+1="}\n{"question": null}\n',
            {"eval_steps": 0},
            "row 1 of the training rows: prompt=None",
        ),
        ('{"prompt": "1"}\n', {"dataset": "p.txt"}, "a file must end in one of"),
    ],
)
def test_a_file_that_is_no_data_set_is_refused(tok, tmp_path, monkeypatch, text, changes, message):
    monkeypatch.chdir(tmp_path)
    for name in ("p.jsonl", "p.txt"):
        Path(name).write_text(text)
    with pytest.raises(ValueError, match=message):
        seen(tok, **{"dataset": str(tmp_path / "p.jsonl"), **changes})


def test_rows_splits_and_answers_that_are_not_needed(tok, tmp_path, capsys):
    """Without evaluations no row is held out, and no split for them has to be there; a row may lack
    its answer. Long prompts are left out with a count.
    """
    rows = [
        {"prompt": "1+1=", "answer": "2"},
        {"prompt": "1+2=", "answer": None},
        {"prompt": "1+2+3+4=", "answer": "10"},
    ]
    path = in_lines(tmp_path / "train.jsonl", rows)
    for name in (path, str(tmp_path)):
        assert seen(tok, dataset=name, eval_steps=0, max_prompt_tokens=5) == (
            [("1+1=", "2"), ("1+2=", None)],
            [],
        )
    assert (
        capsys.readouterr().out.count(
            "left out 1 of 3 training prompts: longer than max_prompt_tokens=5"
        )
        == 2
    )
    with pytest.raises(ValueError, match="all 1 training prompts are longer"):
        seen(tok, (rows[2:], []), max_prompt_tokens=5)
