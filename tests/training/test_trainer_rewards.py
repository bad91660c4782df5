"""Reward functions of the reference trainer: what they are given, what they must not return, and how their errors are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import transformers

from grpo_kernels.training.rewards import exact, number
from support.plain_trainer import Watch
from support.runs import tiny, trainer, varied

Lists = list[list[int]]


class Graded:
    """Steps of one run, whose four completions are the same each time, with rewards that are made from their ids."""

    def __init__(self, tok: Any, out: Path) -> None:
        self.calls: list[tuple[list[str], list[str]]] = []
        changes: dict[str, Any] = {"prompts_per_step": 2, "group_size": 2, "lr": 0.0, "sample_every": 0}
        self.trainer = trainer(tok, out, rewards=[self.grade], **changes)

    def grade(self, prompts: list[str], completions: list[str], *, completion_ids: Lists, **columns: Any) -> Any:
        self.calls.append((prompts, completions))
        return self.function(completion_ids)

    grade.__name__ = "graded"

    def step(self, function: Callable[[Lists], Any]) -> dict[str, float]:
        self.calls.clear()
        self.trainer.step, self.function = 0, function
        return self.trainer.train_step()

    def shown(self, i: int) -> str:
        prompts, completions = self.calls[0]
        return f"\n  prompt     {prompts[i]!r}\n  completion {completions[i]!r}"


@pytest.fixture(scope="module")
def graded(tok: Any, tmp_path_factory: pytest.TempPathFactory) -> Graded:
    return Graded(tok, tmp_path_factory.mktemp("graded") / "run")


def at(i: int, value: Any, other: Any = 1.0) -> Callable[[Lists], Any]:
    """`value` for completion i, `other` for the others."""
    return lambda ids: [value if k == i else other for k in range(len(ids))]


def steps_but(i: int, wrong: Callable[[list[int]], Any]) -> Callable[[Lists], Any]:
    """Process rewards, but for completion i."""
    return lambda ids: [wrong(each) if k == i else [1.0, *[None] * (len(each) - 1)] for k, each in enumerate(ids)]


@pytest.mark.parametrize(
    ("values", "which", "message"),
    [
        (lambda ids: [1.0, 2.0], 2, "reward graded returned 2 values for 4 completions: return one for each. The first without one is"),
        (lambda ids: [1.0] * 5, None, "reward graded returned 5 values for 4 completions: return one for each."),
        (at(3, float("inf")), 3, "returned a float (inf) for completion 3: return a finite number"),
        (at(1, float("nan")), 1, "returned a float (nan) for completion 1: return a finite number"),
        (at(2, None), 2, "returned None for completion 2: return a finite number"),
        (at(2, "0.5"), 2, "returned a str ('0.5') for completion 2: return a finite number"),
        (at(2, torch.zeros(2)), 2, "returned a Tensor (tensor([0., 0.])) for completion 2: return a finite number"),
        (steps_but(0, lambda ids: [1.0] * (len(ids) + 1)), 0, "entries for completion 0 of"),
        (steps_but(1, lambda ids: 1.0), 1, "and for others lists: return the same for all"),
        (lambda ids: [1.0, [1.0] * len(ids[1]), 1.0, 1.0], 1, "and for others numbers: return the same for all"),
        (steps_but(1, lambda ids: [float("nan")] * len(ids)), 1, "a float (nan) at token 0 of completion 1: a step's"),
        (steps_but(1, lambda ids: ["1"] * len(ids)), 1, "a str ('1') at token 0 of completion 1"),
        (lambda ids: dict.fromkeys("abcd", 1.0), None, "reward graded returned a dict ({'a': 1.0, "),
        (lambda ids: "abcd", None, "returned a str ('abcd'): return a list, with an entry for each"),
        (lambda ids: None, None, "returned None: return a list"),
        (lambda ids: 0.5, None, "returned a float (0.5): return a list"),
    ],
    ids=lambda value: "" if callable(value) or value is None else str(value),
)  # fmt: skip
def test_wrong_rewards_raise(graded: Graded, values: Any, which: int | None, message: str) -> None:
    """One of a single completion shows it with its prompt."""
    with pytest.raises(ValueError) as caught:
        graded.step(values)
    said = str(caught.value)
    assert message in said and (which is None or said.endswith(graded.shown(which)))


def test_numbers_of_numpy_and_torch_are_rewards(graded: Graded) -> None:
    numpy = pytest.importorskip("numpy")
    found = []
    for values in (
        [1, 0, 2, 2.5],
        numpy.array([1, 0, 2, 2.5]),
        torch.tensor([1, 0, 2, 2.5]),
        (torch.tensor(1), numpy.float32(0), 2, 2.5),
    ):
        for lazy in (False, True):
            metrics = graded.step(lambda ids, values=values, lazy=lazy: (v for v in values) if lazy else values)
            found.append([metrics[name] for name in ("reward", "reward_std", "zero_variance_groups", "loss", "grad_norm")])
    assert found[0][:3] == [1.375, pytest.approx(0.9601, abs=1e-4), 0.0] and all(each == found[0] for each in found)


@pytest.mark.parametrize("lazy", [False, True])
def test_an_error_in_a_reward_function_shows_the_completion_that_caused_it(graded: Graded, lazy: bool) -> None:
    """The function is asked about each completion alone until it fails in the same way."""

    def whole(ids: Lists) -> list[float]:
        if len(ids) == 1 and ids[0] == first[0]:
            raise KeyError("another error, of a lone completion")
        return [1 / (each != first[2]) for each in ids]

    first: Lists = []
    graded.step(lambda ids: first.extend(ids) or [0.0] * 4)
    with pytest.raises(RuntimeError) as caught:
        graded.step(lambda ids: (r for r in whole(ids)) if lazy else whole(ids))
    assert str(caught.value) == (
        f"reward graded raised ZeroDivisionError: division by zero\nWith completion 2 of 4 alone it fails alike:{graded.shown(2)}"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError) and [len(c) for _, c in graded.calls] == [4, 1, 1, 1]


@pytest.mark.parametrize(("seconds", "calls"), [(0.0, 4), (11.0, 1)])
def test_an_error_of_no_single_completion_says_so_and_is_not_looked_for_long(
    graded: Graded, monkeypatch: pytest.MonkeyPatch, seconds: float, calls: int
) -> None:
    def together(ids: Lists) -> list[float]:
        now[0] += seconds
        if len(ids) > 1:
            raise OSError("too many")
        return [0.0]

    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with pytest.raises(RuntimeError) as caught:
        graded.step(together)
    said = "reward graded raised OSError: too many\nWith none of the 4 completions alone it was seen to fail alike. The first of them:"
    assert str(caught.value) == said + graded.shown(0) and [len(c) for _, c in graded.calls] == [4] + [1] * calls


def test_reward_functions_get_the_columns_of_their_prompt(tok: Any, tmp_path: Path) -> None:
    """And the sampled ids, of which the completion is the text without the end."""

    def check(
        prompts: list[str], completions: list[str], *, answer: list[str], completion_ids: Lists, **others: Any
    ) -> list[float]:
        assert all(eval(prompt.rstrip("=")) == int(a) for prompt, a in zip(prompts, answer, strict=True))
        assert prompts[0] == prompts[3] != prompts[4] and len(prompts) == 12 and not others
        assert completions == [tok.decode(ids).rstrip(".") for ids in completion_ids]
        return [0.5] * 12

    metrics = trainer(tok, tmp_path, rewards=[check]).train_step()
    assert metrics["zero_variance_groups"] == 1.0 and metrics["grad_norm"] == 0.0 and metrics["reward"] == 0.5


def test_final_numbers_and_exact_answers() -> None:
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
def test_texts_are_shown_on_a_line_without_their_middle(tok: Any, tmp_path: Path, prompt: str) -> None:
    rows = ([{"prompt": prompt}], [])
    t = trainer(tok, tmp_path, rewards=[lambda prompts, _, **__: [None] * len(prompts)], rows=rows, max_prompt_tokens=2000)
    with pytest.raises(ValueError) as caught:
        t.train_step()
    assert f"\n  prompt     {SHOWN[prompt] or repr(prompt)}\n" in str(caught.value)


def test_reward_model(tok: Any, tmp_path: Path) -> None:
    """Its scores are the classifier's logit on prompt + completion, whatever the padding."""
    torch.manual_seed(3)
    settings = transformers.Qwen3Config(**(tiny(tok).config.to_dict() | {"num_labels": 1}))
    classifier = transformers.Qwen3ForSequenceClassification(settings).eval()
    for part in (classifier, tok):
        part.save_pretrained(tmp_path / "rm")
    watch = Watch(None)
    options: dict[str, Any] = {"reward_model": str(tmp_path / "rm"), "reward_weights": [0.0, 2.0]}
    metrics = trainer(tok, tmp_path / "run", rewards=[watch.told(varied)], **options).train_step()
    texts = [p + c for p, c in zip(watch.calls[0].prompts, watch.calls[0].completions, strict=True)]
    scores = torch.cat([classifier(input_ids=torch.tensor([tok(text)["input_ids"]])).logits[0] for text in texts]).detach()
    assert metrics["reward"] == pytest.approx(2 * scores.mean().item(), abs=1e-5)
    assert metrics["reward_std"] == pytest.approx(2 * scores.std(unbiased=False).item(), abs=1e-5) and scores.std() > 1e-3
