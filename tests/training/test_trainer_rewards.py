"""Reward functions and models of the reference trainer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import transformers

from grpo_kernels.training import reward_calls
from grpo_kernels.training.reward_calls import call
from grpo_kernels.training.rewards import advantages, number, resolve, score
from grpo_kernels.training.trainer import TrainConfig, Trainer
from support.runs import PROMPTS, config, evens, tiny, trainer


def scores(functions: list[Any], *, group_size: int = 2, tokens: Any = None, weights: Any = None, **columns: Any) -> Any:
    tokens = tokens or [[1, 2, 3], [1, 2], [4, 5], [6]]
    rewards = call(functions, prompts=["p"] * 4, completions=["a", "b", "c", "d"], tokens=tokens, columns=columns)
    found = score(rewards, weights or [1.0] * len(functions), list(map(len, tokens)))
    c = TrainConfig(advantage_scale="group")
    return found, advantages(found, c.estimate, c.estimate_steps, group_size=group_size)


def test_outcome_rewards_add_with_their_weights() -> None:
    result, found = scores([lambda p, c, **_: [1, 0, 2, 2], lambda p, c, **_: [0, 1, 5, 5]], weights=[1.0, 3.0])
    assert result.totals.tolist() == [1, 3, 17, 17] and result.first.tolist() == [1, 0, 2, 2]
    half = 1 / (2**0.5 + 1e-4)
    torch.testing.assert_close(found, torch.tensor([-half, half, 0.0, 0.0]))


def test_process_rewards_are_normalised_over_the_steps_of_a_group() -> None:
    """DeepSeekMath 4.1.3 by hand: steps 1, 0 | 3 in the first group; a flat second group gives exactly 0."""
    steps = [[1.0, None, 0.0], [None, 3.0], [2.0, None], [2.0]]
    result, found = scores([lambda p, c, **_: steps])
    mean, std = 4 / 3, (((1 - 4 / 3) ** 2 + (4 / 3) ** 2 + (3 - 4 / 3) ** 2) / 2) ** 0.5 + 1e-4
    one, zero, three = ((r - mean) / std for r in (1, 0, 3))
    expected = torch.tensor([[one + zero, zero, zero], [three, three, 0], [0, 0, 0], [0, 0, 0]])
    torch.testing.assert_close(found, expected)
    assert result.totals.tolist() == [1, 3, 2, 2]


def test_process_and_outcome_rewards_train_together(tok: Any, tmp_path: Path) -> None:
    def steps(prompts: list[str], completions: list[str], *, completion_ids: list[list[int]], **_: Any) -> list[list[Any]]:
        return [[float(i % 2 == 0) if t % 2 == 0 else None for t, i in enumerate(ids)] for ids in completion_ids]

    t = trainer(tok, tmp_path, rewards=[evens, steps])
    metrics = t.train_step()
    assert metrics["grad_norm"] > 0 and metrics["reward"] > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], "returned 2 values for 4 completions: return one for each. The first without one is completion 2:"),
        ([1.0] * 5, "returned 5 values for 4 completions: return one for each.$"),
        ([1.0, 0.0, 0.0, float("inf")], r"returned a float \(inf\) for completion 3: return a finite number"),
        ([[1.0], [1.0, 2.0], [1.0, None], [3.0]], "1 entries for completion 0 of 3 tokens"),
        (
            [[1.0, None, 2.0], 1.0, [1.0, None], [3.0]],
            r"a float \(1.0\) for completion 1 of 2 tokens, and for others lists: return the",
        ),
        (
            [1.0, [1.0, 2.0], 1.0, 1.0],
            r"a list \(\[1.0, 2.0\]\) for completion 1 of 2 tokens, and for others numbers: return the",
        ),
        ([1.0, float("nan"), 0.0, 0.0], r"returned a float \(nan\) for completion 1: return a finite number"),
        ([1.0, 0.0, None, 0.0], "returned None for completion 2: return a finite number"),
        ([1.0, 0.0, "0.5", 0.0], r"returned a str \('0.5'\) for completion 2: return a finite number"),
        ([1.0, 0.0, torch.zeros(2), 0.0], r"returned a Tensor .* for completion 2: return a finite number"),
        ([[1.0, None, 2.0], [None, float("nan")], [1.0, None], [3.0]], r"a float \(nan\) at token 1 of completion 1: a step's"),
        ([[1.0, None, 2.0], [None, "1"], [1.0, None], [3.0]], r"a str \('1'\) at token 1 of completion 1"),
        ({"format": 1.0, "answer": 0.0, "a": 1, "b": 2}, "returned a dict .*: return a list, with an entry for each"),
        ("abcd", "returned a str .*: return a list"),
        (None, "returned None: return a list"),
        (0.5, r"returned a float \(0.5\): return a list"),
    ],
)
def test_wrong_rewards_raise(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        scores([lambda p, c, **_: values])
    said = str(caught.value)
    which = re.search(r"completion (\d)", said)  # the one that is shown with its prompt, if it is about one
    assert said.endswith(f"\n  prompt     'p'\n  completion {'abcd'[int(which[1])]!r}" if which else (".", "completion."))


def asked(function: Any, completions: list[str], **columns: Any) -> Any:
    prompts, tokens = [f"p{i}" for i in range(len(completions))], [[1]] * len(completions)
    return call([function], prompts=prompts, completions=completions, tokens=tokens, columns=columns)


def test_an_error_in_a_reward_function_shows_the_completion_that_caused_it() -> None:
    """The function is asked about each completion alone until it fails in the same way; a list that is made lazily too."""

    def whole(prompts: list[str], completions: list[str], *, answer: list[int], **_: Any) -> list[float]:
        if len(completions) == 1 and completions[0] == "8":
            raise KeyError("another error, of a lone completion")
        return [int(c) / a for c, a in zip(completions, answer, strict=True)]

    def lazy(prompts: list[str], completions: list[str], **columns: Any) -> Any:
        return (reward for reward in whole(prompts, completions, **columns))

    for function in (whole, lazy):
        with pytest.raises(RuntimeError) as caught:
            asked(function, ["8", "9", "x\n\x1b[2J" + "y" * 500, "z"], answer=[2, 3, 4, 5])
        said = str(caught.value)
        assert f"reward {function.__name__} raised ValueError: invalid literal for int()" in said
        tail = "y" * 120
        assert said.endswith(
            "\nWith completion 2 of 4 alone it fails alike:\n  prompt     'p2'\n"
            f"  completion {'x' + chr(10) + chr(27) + '[2J' + 'y' * 114!r} ... 266 characters ... {tail!r}"
        )
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(RuntimeError, match=r"raised ZeroDivisionError: .*\nWith completion 1 of 2 alone"):
            asked(function, ["9", "7"], answer=[1, 0])


def test_an_error_of_no_single_completion_says_so_and_is_not_looked_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def together(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        sizes.append(len(completions))
        if len(completions) > 1:
            raise OSError("too many")
        return [0.0]

    for seconds, calls in ((10.0, 3), (-1.0, 1)):
        monkeypatch.setattr(reward_calls, "SEARCH", seconds)
        with pytest.raises(
            RuntimeError, match=r"raised OSError: too many\nWith none of the 3 .* The first of them:\n  prompt     'p0'"
        ):
            asked(together, ["a", "b", "c"])
        assert sizes == [3] + [1] * calls
        sizes.clear()


def test_numbers_of_numpy_and_torch_are_rewards() -> None:
    numpy = pytest.importorskip("numpy")
    _, plain = scores([lambda p, c, **_: [1, 0, 2, 2.5]])
    for values in (numpy.array([1, 0, 2, 2.5]), torch.tensor([1, 0, 2, 2.5]), (torch.tensor(1), numpy.float32(0), 2, 2.5)):
        assert torch.equal(scores([lambda p, c, values=values, **_: values])[1], plain)


def test_reward_functions_get_the_columns_of_their_prompt(tok: Any, tmp_path: Path) -> None:
    def check(
        prompts: list[str], completions: list[str], *, answer: list[str], completion_ids: list[Any], **_: Any
    ) -> list[float]:
        for prompt, a in zip(prompts, answer, strict=True):
            assert eval(prompt.rstrip("=")) == int(a)
        assert prompts[0] == prompts[3] != prompts[4] and len(completion_ids) == 12
        return [0.0] * len(prompts)

    metrics = trainer(tok, tmp_path, rewards=[check]).train_step()
    assert metrics["zero_variance_groups"] == 1.0 and metrics["grad_norm"] == 0.0


def test_final_numbers() -> None:
    cases = {
        "so 3 + 4 = 7.\n#### 1,234": "1234",
        "first \\boxed{3}, then \\boxed{-2.50}": "-2.5",
        "5 and then 42.": "42",
        "#### $18 a day": "18",
    }
    assert number([""] * 4, list(cases), answer=list(cases.values())) == [1.0] * 4
    assert number([""] * 3, ["no number", "#### 41", "42 #### 7"], answer=["42"] * 3) == [0.0] * 3


def test_reward_names() -> None:
    assert resolve("number") is number
    assert resolve("grpo_kernels.training.rewards:number") is number
    for name, message in (
        ("nothing", "one of exact, number"),
        ("json:nothing", "cannot be imported"),
        ("json:__name__", "is a str"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve(name)


def test_reward_model(tok: Any, tmp_path: Path) -> None:
    """Its scores are the classifier's logit on prompt + completion, whatever the padding."""
    torch.manual_seed(3)
    settings = tiny(tok).config.to_dict() | {"num_labels": 1}
    classifier = transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**settings))
    classifier.save_pretrained(tmp_path / "rm")
    tok.save_pretrained(tmp_path / "rm")
    t = Trainer(
        config(tmp_path / "run", rewards=[], reward_model=str(tmp_path / "rm")),
        model=tiny(tok), tokenizer=tok, rows=(PROMPTS[:16], PROMPTS[16:]),
    )  # fmt: skip
    (rm,) = t.rewards
    got = rm(["1+2=", "3+4="], ["3", "1234"])
    for text, value in zip(("1+2=3", "3+4=1234"), got, strict=True):
        ids = torch.tensor([tok(text)["input_ids"]])
        assert value == pytest.approx(classifier.eval()(input_ids=ids).logits.item(), abs=1e-5)
    assert abs(got[0] - got[1]) > 1e-3
    assert t.train_step()["reward_std"] > 0
