"""Reward functions of the reference trainer: what they are given, what they must not return, and how their errors are told."""

from __future__ import annotations

import time

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import transformers

from grpo_kernels.training.rewards import Asked, call, exact, number
from support.plain_trainer import Watch
from support.runs import tiny, trainer, varied

Lists = list[list[int]]

ASKED = Asked(list("abcd"), ["x", "y\n", "z", "w"], [[1], [2, 3], [4, 5, 6], [7]], {})


def shown(i):
    return f"\n  prompt     {ASKED.prompts[i]!r}\n  completion {ASKED.completions[i]!r}"


def graded(values):
    """What comes of a function that returns these for `ASKED`, or what they are of the ids."""

    def graded(prompts, completions, *, completion_ids):
        return values(completion_ids) if callable(values) else values

    return call(graded, ASKED)


@pytest.mark.parametrize(
    ("values", "which", "message"),
    [
        ([1.0, 2.0], None, "reward graded returned 2 values for 4 completions: return one for each."),
        ([1.0] * 5, None, "reward graded returned 5 values for 4 completions: return one for each."),
        ([1.0, 1.0, 1.0, float("inf")], 3, "for completion 3 a float (inf): return a finite number"),
        ([1.0, float("nan"), 1.0, 1.0], 1, "for completion 1 a float (nan): return a finite number"),
        ([1.0, 1.0, None, 1.0], 2, "for completion 2 None: return a finite number"),
        ([1.0, 1.0, "0.5", 1.0], 2, "for completion 2 a str ('0.5'): return a finite number"),
        ([1.0, 1.0, torch.zeros(2), 1.0], 2, "a Tensor (tensor([0., 0.])): return a finite number"),
        ([[1.0, 1.0]] * 4, 0, "for completion 0 2 process rewards for 1 tokens: one entry per token."),
        ([[1.0], 1.0, 1.0, 1.0], 1, "a float (1.0), and not so for others: return numbers for all completions, or lists"),
        ([1.0, [1.0, 1.0], 1.0, 1.0], 1, "a list ([1.0, 1.0]), and not so for others"),
        ([[1.0], [float("nan"), None]], None, "returned 2 values for 4"),
        ([[1.0], [None, float("nan")], [None] * 3, [1]], 1, "a float (nan): a process reward is a finite number"),
        ([[1.0], [None, "1"], [None] * 3, [1]], 1, "a str ('1'): a process reward is a finite number"),
        (dict.fromkeys("abcd", 1.0), None, "reward graded returned a dict ({'a': 1.0, "),
        ("abcd", None, "returned a str ('abcd'): return a list, with an entry for each"),
        (None, None, "returned None: return a list"),
        (0.5, None, "returned a float (0.5): return a list"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_rewards_raise(values, which, message):
    """One of a single completion shows it with its prompt."""
    with pytest.raises(ValueError) as caught:
        graded(values)
    said = str(caught.value)
    assert message in said and (which is None or said.endswith(shown(which)))


def test_numbers_of_numpy_and_torch_are_rewards():
    numpy = pytest.importorskip("numpy")
    numbers = [1, 0, 2, 2.5]
    for values in (numbers, numpy.array(numbers), torch.tensor(numbers), (torch.tensor(1), numpy.float32(0), 2, 2.5)):
        assert graded(values) == graded(lambda ids, values=values: (v for v in values)) == [1.0, 0.0, 2.0, 2.5]
    assert call(exact, Asked([], [], [], {"answer": []})) == [] != graded([(torch.tensor(1),), [None, 1], [0] * 3, [2]])


def dividing(ids):
    if ids == [[1]]:
        raise KeyError("another error, of a lone completion")
    return [1 / (len(each) != 3) for each in ids]


def together(ids):
    if len(ids) > 1:
        raise OSError("too many")
    return [0.0]


NONE = "OSError: too many\nWith none of the 4 completions alone it was seen to fail alike. The first of them:"


@pytest.mark.parametrize(
    ("function", "seconds", "calls", "said", "which"),
    [
        (dividing, 0.0, 4, "ZeroDivisionError: division by zero\nWith completion 2 of 4 alone it fails alike:", 2),
        (together, 0.0, 5, NONE, 0), (together, 11.0, 2, NONE, 0),
    ],
    ids=["of one", "of none", "slow"],
)  # fmt: skip
def test_an_error_in_a_reward_function_shows_the_completion_that_caused_it(monkeypatch, function, seconds, calls, said, which):
    """The function is asked about each completion alone until it fails in the same way, or for ten seconds."""
    found = []

    def timed(ids):
        found.append(ids)
        yield from function(ids)  # when it is read

    monkeypatch.setattr(time, "monotonic", lambda: seconds * len(found))
    with pytest.raises(RuntimeError) as caught:
        graded(timed)
    assert str(caught.value) == f"reward graded raised {said}{shown(which)}" and len(found) == calls


def test_reward_functions_get_the_columns_of_their_prompt(tok, tmp_path):
    """And the sampled ids, of which the completion is the text without the end."""

    def check(prompts, completions, *, answer, completion_ids, **others):
        assert all(eval(prompt.rstrip("=")) == int(a) for prompt, a in zip(prompts, answer, strict=True))
        assert prompts[0] == prompts[3] != prompts[4] and len(prompts) == 12 and not others
        assert completions == [tok.decode(ids).rstrip(".") for ids in completion_ids]
        return [0.5] * 12

    metrics = trainer(tok, tmp_path, rewards=[check]).train_step()
    assert metrics["zero_variance_groups"] == 1.0 and metrics["grad_norm"] == 0.0 and metrics["reward"] == 0.5


def test_final_numbers_and_exact_answers():
    right = {
        "so 3 + 4 = 7.\n#### 1,234": "1234", "first \\boxed{3}, then \\boxed{-2.50}": "-2.5", "5 and then 42.": "42",
        "#### $18 a day": "18",
    }  # fmt: skip
    assert number([""] * 4, list(right), answer=list(right.values())) == [1.0] * 4
    assert number([""] * 4, ["no number", "#### 41", "42 #### 7", "\\boxed{41} 42"], answer=["42"] * 4) == [0.0] * 4
    assert exact([""] * 7, [" 12\n", "2", "112", "12 13", "1 2", "", "12."], answer=["12"] * 7) == [1.0] + [0.0] * 6
    for reward in (exact, number):
        with pytest.raises(ValueError, match="the answer of completion 1 is None"):
            reward(["", ""], ["2", "None"], answer=["2", None])


LONG = "\n" + "1" * 119 + "+" * 1000 + "2" * 119 + "="
SHOWN = {"1\n+\x1b[2J\u202e" + "2" * 232: None, LONG: "'\\n" + "1" * 119 + "' ... 1000 characters ... '" + "2" * 119 + "='"}


@pytest.mark.parametrize("prompt", SHOWN, ids=["escapes", "long"])
def test_texts_are_shown_on_a_line_without_their_middle(prompt):
    with pytest.raises(ValueError) as caught:
        call(lambda *_, **__: [None], Asked([prompt], ["x"], [[1]], {}))
    assert f"\n  prompt     {SHOWN[prompt] or repr(prompt)}\n" in str(caught.value)


def test_reward_model(tok, tmp_path):
    """Its scores are the classifier's logit on prompt + completion, whatever the padding."""
    torch.manual_seed(3)
    settings = transformers.Qwen3Config(**(tiny(tok).config.to_dict() | {"num_labels": 1}))
    classifier = transformers.Qwen3ForSequenceClassification(settings).eval()
    for part in (classifier, tok):
        part.save_pretrained(tmp_path / "rm")
    watch = Watch(None)
    options = {"reward_model": str(tmp_path / "rm"), "reward_weights": [0.0, 2.0]}
    metrics = trainer(tok, tmp_path / "run", rewards=[watch.told(varied)], **options).train_step()
    texts = [p + c for p, c in zip(watch.calls[0].prompts, watch.calls[0].completions, strict=True)]
    scores = torch.cat([classifier(input_ids=torch.tensor([tok(text)["input_ids"]])).logits[0] for text in texts]).detach()
    assert metrics["reward"] == pytest.approx(2 * scores.mean().item(), abs=1e-5)
    assert metrics["reward_std"] == pytest.approx(2 * scores.std(unbiased=False).item(), abs=1e-5) and scores.std() > 1e-3
