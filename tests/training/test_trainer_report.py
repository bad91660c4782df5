"""What a run is told by its reward functions, and tells:

metrics, trackers, samples of completions; and the demo's two losses.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import transformers

from examples import demo
from grpo_kernels.training import Ranks
from grpo_kernels.training.rewards import RewardArguments, call, exact, number, score
from support.advantage_oracle import group_advantages
from support.plain_trainer import Watch
from support.runs import lines, read, tiny, trainer, varied

# ---- metrics


class Recorder:
    """A tracker that fails in a step, or (9) at its end."""

    def __init__(self, fail_at=-1):
        self.fail_at, self.found = fail_at, list[Any]()

    def log(self, step, metrics):
        if step == self.fail_at:
            raise ConnectionError("no route")
        self.found.append({"step": step, **metrics})

    def close(self):
        self.log(9, {})


def test_a_tracker_gets_what_the_file_gets_and_one_that_fails_ends_no_run(tok, tmp_path, capsys):
    trackers = [Recorder(fail_at=1), Recorder(fail_at=9), Recorder()]
    assert trainer(tok, tmp_path, trackers=trackers, steps=3, eval_steps=2, eval_prompts=4).train()
    written, (bad, late, good) = read(tmp_path / "metrics.jsonl"), trackers
    assert (
        len(written) == 4
        and late.found == written
        and good.found == [*written, {"step": 9}]
        and bad.found == written[:1]
    )
    told = capsys.readouterr().err
    for what in ("gets no more metrics", "is not closed"):
        assert told.count(f"Recorder {what}: ConnectionError: no route") == 1


def test_rewards_are_reported_by_the_names_of_their_functions(tok, tmp_path):
    def short(prompts, completions, **_):
        return [-float(len(c)) for c in completions]

    watch = Watch(None)
    options = {"rewards": [watch.recorded(varied), short, varied], "reward_weights": [1, 2, 3]}
    found = trainer(tok, tmp_path, **options).train_step()
    (call,) = watch.calls
    totals = [4 * r - 2 * len(c) for r, c in zip(call.rewards, call.completions, strict=True)]
    assert (
        found["reward/varied"]
        == found["reward/varied#2"]
        == pytest.approx(statistics.mean(call.rewards))
    )
    assert [found["reward"], found["reward_std"]] == pytest.approx(
        [statistics.mean(totals), statistics.pstdev(totals)]
    )
    assert found["completion_length"] == pytest.approx(statistics.mean(map(len, call.ids)))


def test_accuracy_says_what_it_counts(tok, tmp_path):
    """The share of held-out prompts with a first reward of at least 1, and beside it the mean of
    all rewards.
    """

    def three(prompts, completions, **_):
        return [3.0 if p.startswith("5") else 1.0 if p == "4+0=" else 0.5 for p in prompts]

    assert trainer(tok, tmp_path, rewards=[three], eval_steps=2, eval_prompts=8, steps=1).train()
    names = ("step", "accuracy", "accuracy_counts", "eval_reward")
    found = [[line.get(name) for name in names] for line in lines(tmp_path)]
    assert found == [
        [step, 5 / 8, "three >= 1, 8 prompts", pytest.approx((4 * 3.0 + 1.0 + 3 * 0.5) / 8)]
        for step in (0, 1)
    ]


def test_metrics_are_json_whatever_is_in_them(tok, tmp_path):
    """A gradient that is not finite: its norm is null."""
    model = tiny(tok)
    model.lm_head.weight.register_hook(lambda g: g * float("nan"))
    assert trainer(tok, tmp_path, model=model, steps=2).train()
    texts = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        for text in texts
    ]
    assert [line["grad_norm"] for line in found] == [None, None] and found[0]["skipped"] == 1.0


# ---- samples


def test_samples_are_the_first_completions_with_rewards_and_advantage(tok, tmp_path):
    """Those of a resumed run come once."""
    watch, samples = Watch(None), tmp_path / "run" / "samples.jsonl"
    options = {"rewards": [watch.recorded(varied)], "sample_count": 6, "sample_every": 2}
    assert trainer(tok, tmp_path / "run", steps=2, **options).train()
    samples.write_text(samples.read_text() + '{"step": 2, "prompt": "of a step that was lost"}\n')
    first, advantages = (
        watch.calls[0],
        group_advantages(watch.calls[0].rewards, [k // 4 for k in range(12)]),
    )
    assert trainer(tok, tmp_path / "run", steps=3, resume=True, **options).train()
    found = read(samples)
    for i, sample in enumerate(found[:6]):
        assert sample == {
            "step": 0, "prompt": first.prompts[i], "completion": first.completions[i], "tokens": len(first.ids[i]),
            "reward": first.rewards[i], "rewards": {"varied": first.rewards[i]}, "advantage": pytest.approx(advantages[i], abs=1e-5),
        }  # fmt: skip
    assert [(x["step"], x["prompt"]) for x in found[6:]] == [
        (2, prompt) for prompt in watch.calls[-1].prompts[:6]
    ]


# ---- reward functions: what they are given, what they must not return, and how their errors are
# told

ASKED = RewardArguments(list("abcd"), ["x", "y\n", "z", "w"], [[1], [2, 3], [4, 5, 6], [7]], {})


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
        ([1.0, 1.0, 1.0, float("inf")], 3, "completion 3: got a float (inf): return a finite number"),
        ([1.0, 1.0, None, 1.0], 2, "completion 2: got None: return a finite number"),
        ([[1.0, 1.0]] * 4, 0, "completion 0: got 2 process rewards for 1 tokens: one entry per token."),
        ([[1.0], [None, float("nan")], [None] * 3, [1]], 1, "a float (nan): a process reward is a finite number"),
        (1.5, None, "returned a float (1.5): return a list, with an entry for each"), ("abcd", 0, "completion 0: got a str ('a')"),
        (None, None, "returned None"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_rewards_raise(values, which, message):
    """One of a single completion shows it with its prompt."""
    with pytest.raises(ValueError) as caught:
        graded(values)
    said = str(caught.value)
    assert message in said and (which is None or said.endswith(shown(which)))


def test_numbers_and_lists_do_not_mix():
    with pytest.raises(
        ValueError,
        match="reward <lambda> returned numbers for some completions and lists for others",
    ):
        score([lambda *_, **__: [[1.0], 1, 1, 1]], [1.0], ASKED, Ranks(torch.device("cpu")))


def test_numbers_of_torch_and_process_rewards_are_rewards():
    for values in (torch.tensor([1, 0, 2, 2.5]), (torch.tensor(1), 0, 2, 2.5)):
        assert graded(values) == [1.0, 0.0, 2.0, 2.5]
    assert str(graded([(torch.tensor(1),), [None, 1], [0] * 3, [2]])[1]) == "[nan, 1.0]"


def test_an_error_in_a_reward_function_names_it():
    with pytest.raises(
        RuntimeError, match=r"^reward graded raised ZeroDivisionError: division by zero$"
    ):
        graded(lambda ids: 1 / 0)


def test_reward_functions_get_the_columns_of_their_prompt(tok, tmp_path):
    """And the sampled ids, of which the completion is the text without the end."""

    def check(prompts, completions, *, answer, completion_ids, **others):
        assert all(
            eval(prompt.rstrip("=")) == int(a) for prompt, a in zip(prompts, answer, strict=True)
        )
        assert prompts[0] == prompts[3] != prompts[4] and len(prompts) == 12 and not others
        assert completions == [tok.decode(ids).rstrip(".") for ids in completion_ids]
        return [0.5] * 12

    metrics = trainer(tok, tmp_path, rewards=[check]).train_step()
    assert (
        metrics["zero_variance_groups"] == 1.0
        and metrics["grad_norm"] == 0.0
        and metrics["reward"] == 0.5
    )


def test_final_numbers_and_exact_answers():
    right = {
        "so 3 + 4 = 7.\n#### 1,234": "1234", "first \\boxed{3}, then \\boxed{-2.50}": "-2.5", "5 and then 42.": "42",
        "#### $18 a day": "18",
    }  # fmt: skip
    assert number([""] * 4, list(right), answer=list(right.values())) == [1.0] * 4
    assert (
        number([""] * 4, ["no number", "#### 41", "42 #### 7", "\\boxed{41} 42"], answer=["42"] * 4)
        == [0.0] * 4
    )
    assert (
        exact([""] * 7, [" 12\n", "2", "112", "12 13", "1 2", "", "12."], answer=["12"] * 7)
        == [1.0] + [0.0] * 6
    )
    for reward in (exact, number):
        with pytest.raises(ValueError, match="the answer of completion 1 is None"):
            reward(["", ""], ["2", "None"], answer=["2", None])


def test_reward_model(tok, tmp_path):
    """Its scores are the classifier's logit on prompt + completion, whatever the padding."""
    torch.manual_seed(3)
    settings = transformers.Qwen3Config(**(tiny(tok).config.to_dict() | {"num_labels": 1}))
    classifier, watch = transformers.Qwen3ForSequenceClassification(settings).eval(), Watch(None)
    for part in (classifier, tok):
        part.save_pretrained(tmp_path / "rm")
    options = {"reward_model": str(tmp_path / "rm"), "reward_weights": [0.0, 2.0]}
    metrics = trainer(
        tok, tmp_path / "run", rewards=[watch.recorded(varied)], **options
    ).train_step()
    texts = map(str.__add__, watch.calls[0].prompts, watch.calls[0].completions)
    scores = [
        classifier(input_ids=torch.tensor([tok(text)["input_ids"]])).logits.item() for text in texts
    ]
    assert (
        metrics["reward"] == pytest.approx(2 * statistics.mean(scores), abs=1e-5)
        and statistics.pstdev(scores) > 1e-3
    )


# ---- the demo: both losses make the same steps, and only one of them is ours

TINY = demo.Size(
    vocab=101, top_k=7, width=32, layers=1, warm_up=2, steps=3, prompts=4, group=4, held_out=4
)


@pytest.fixture
def easy(monkeypatch):
    """The share of digits is rewarded, which a policy that knows nothing gets some of."""
    monkeypatch.setattr(
        demo,
        "exact",
        lambda prompts, texts, **_: [sum(c.isdigit() for c in text) / 3 for text in texts],
    )


def test_both_losses_make_the_same_steps_over_sets_of_k_ids(easy):
    record = demo.run(0, TINY, demo.side, progress=False)
    fused, plain = (record["sides"][name] for name in demo.LOSSES)
    assert fused["reward"] == plain["reward"] and len({*fused["reward"]}) > 1
    assert (
        fused["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
        and min(plain["grad_norm"]) > 0.01
    )
    assert fused["accuracy"] == plain["accuracy"] and fused["kept"] == plain["kept"] == [
        TINY.top_k,
        TINY.top_k,
    ]


def started(tmp_path, name="fused"):
    demo.warm_up(0, TINY, tmp_path / "warm.pt", progress=False)
    lines = demo.side(name, tmp_path / "warm.pt", 0, TINY)
    next(lines)
    return lines


@pytest.mark.parametrize("name", demo.LOSSES)
def test_the_plain_loss_runs_no_kernel(easy, tmp_path, name):
    """Otherwise both sides could be ours: no loss and no log-prob of the package is computed."""
    called = set()
    lines = started(tmp_path, name)
    sys.setprofile(
        lambda frame, event, _: called.add(frame.f_code.co_name) if event == "call" else None
    )
    try:
        line = next(lines)
    finally:
        sys.setprofile(None)
    ours = called & {"linear_grpo_loss", "grpo_loss", "linear_logprobs", "token_logprobs"}
    assert ours == ({"linear_grpo_loss"} if name == "fused" else set()) and line["grad_norm"] > 0
