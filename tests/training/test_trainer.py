"""The reference trainer on a tiny model: what is sampled, scored, updated, saved and continued."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
from dataclasses import fields
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import transformers

from grpo_kernels import TokenBatch, linear_grpo_loss
from grpo_kernels.__main__ import main as command_line
from grpo_kernels.training import checkpoints, randomness
from grpo_kernels.training.data import encode, load_rows, prompts_of_step
from grpo_kernels.training.rewards import advantages, call, number, resolve, score
from grpo_kernels.training.sampling import Completions, completion_logits, draw, end_ids, sample
from grpo_kernels.training.trainer import TrainConfig, Trainer
from support.runs import PROMPTS, RUN, config, evens, lines, noisy, parameters, seeded_run, tiny, trainer

# ---- sampling and alignment


class NextId:
    """A model whose logits are known: at each position nearly all mass is on (input id + 1) mod V."""

    vocabulary = 7

    def __call__(self, input_ids: torch.Tensor, *, logits_to_keep: int, **_: Any) -> SimpleNamespace:
        hot = torch.nn.functional.one_hot((input_ids + 1) % self.vocabulary, self.vocabulary).float()
        return SimpleNamespace(logits=20 * hot[:, -logits_to_keep:])


def test_row_t_of_the_logits_predicts_completion_token_t() -> None:
    ids = torch.tensor([[0, 0, 1, 2, 3, 4], [2, 3, 4, 5, 6, 0]])  # two prompts of width 3, each id its predecessor's successor
    attention = torch.ones_like(ids, dtype=torch.bool)
    completions = Completions(ids, attention, 3)
    logits = completion_logits(NextId(), completions)
    assert torch.equal(logits.argmax(-1), completions.targets)


def test_completion_logits_equal_the_models_own(tok: Any) -> None:
    model = tiny(tok).double().eval()
    ids = torch.randint(0, len(tok), (2, 7))
    attention = torch.ones_like(ids, dtype=torch.bool)
    full = model(input_ids=ids).logits
    torch.testing.assert_close(completion_logits(model, Completions(ids, attention, 4)), full[:, 3:6])


def test_left_padding_and_the_group_change_no_logit(tok: Any) -> None:
    model = tiny(tok).double()
    alone = sample(model, [[3, 10, 4, 13]], group_size=1, max_new_tokens=5, ends=[tok.eos_token_id], temperature=0)
    both = sample(
        model, [[3, 10, 4, 13], [1, 2, 3, 4, 5, 6, 7]], group_size=2, max_new_tokens=5, ends=[tok.eos_token_id], temperature=0
    )
    assert both.tokens[0] == both.tokens[1] == alone.tokens[0]
    padded, plain = completion_logits(model, both)[0], completion_logits(model, alone)[0]
    length = len(alone.tokens[0])
    torch.testing.assert_close(padded[:length], plain[:length])


def test_cached_sampling_takes_the_argmax_of_the_full_forward(tok: Any) -> None:
    model = tiny(tok)
    out = sample(model, [[1, 10, 2, 13], [5, 6]], group_size=1, max_new_tokens=6, ends=[tok.eos_token_id], temperature=0)
    expected = completion_logits(model, out).argmax(-1)
    assert torch.equal(expected[out.mask], out.targets[out.mask])


def test_the_end_token_is_trained_on_and_padding_is_not(tok: Any) -> None:
    """Padding is the end token itself here, and still only the first one counts."""
    end = tok.eos_token_id
    assert tok.pad_token_id == end
    torch.manual_seed(1)
    out = sample(tiny(tok), [[1, 2, 3]] * 8, group_size=8, max_new_tokens=12, ends=[end])
    ended = 0
    for ids, row in zip(out.targets.tolist(), out.mask.tolist(), strict=True):
        expected = ids.index(end) + 1 if end in ids else len(ids)
        ended += end in ids[:-1]
        assert row == [t < expected for t in range(len(ids))]
    assert ended > 5


def test_several_end_tokens(tok: Any) -> None:
    model = tiny(tok)
    model.generation_config.eos_token_id = [3, 5]
    assert end_ids(model, tok) == sorted({3, 5, tok.eos_token_id})
    out = sample(model, [[1, 2]] * 4, group_size=8, max_new_tokens=10, ends=end_ids(model, tok))
    assert all(not {3, 5} & set(ids[:-1]) for ids in out.tokens)


def choose(logits: torch.Tensor, temperature: float, top_p: float, top_k: int, uniform: Any) -> torch.Tensor:
    return draw(logits, temperature, top_p, top_k, 0.0, uniform)[0]


def test_a_sampled_token_comes_with_its_log_prob_under_what_it_was_drawn_from() -> None:
    """After temperature, top-k, top-p and min-p: what is left over adds up to 1."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(400, 4)
    for options, shares in (
        ((1.0, 1.0, 0, 0.0), [0.5, 0.3, 0.15, 0.05]),
        ((1.0, 1.0, 2, 0.0), [0.625, 0.375, 0.0, 0.0]),
        ((1.0, 0.79, 0, 0.0), [0.625, 0.375, 0.0, 0.0]),
        ((1.0, 1.0, 0, 0.4), [0.625, 0.375, 0.0, 0.0]),
        ((0.5, 1.0, 3, 0.0), [0.25 / 0.3625, 0.09 / 0.3625, 0.0225 / 0.3625, 0.0]),
    ):
        tokens, logps, _ = draw(logits, *options, lambda: torch.rand(400, dtype=torch.float64))
        torch.testing.assert_close(logps, torch.tensor(shares).log()[tokens])
        assert len(set(tokens.tolist())) == sum(share > 0 for share in shares)
    assert draw(logits, 0.0, 1.0, 0, 0.0, torch.rand)[1].eq(0).all()  # greedy: it could be no other


def test_top_k_top_p_and_temperature() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, 4)

    def draws() -> torch.Tensor:
        return torch.rand(4000, dtype=torch.float64)

    def shares(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> torch.Tensor:
        return torch.bincount(choose(logits, temperature, top_p, top_k, draws), minlength=4) / 4000

    tolerance = dict(atol=0.03, rtol=0.0)
    torch.testing.assert_close(shares(), torch.tensor([0.5, 0.3, 0.15, 0.05]), **tolerance)
    torch.testing.assert_close(shares(top_k=2), torch.tensor([0.625, 0.375, 0.0, 0.0]), **tolerance)
    torch.testing.assert_close(shares(top_p=0.79), torch.tensor([0.625, 0.375, 0.0, 0.0]), **tolerance)
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    torch.testing.assert_close(shares(temperature=0.5), squared / squared.sum(), **tolerance)
    assert choose(logits, 1.0, 1e-6, 0, draws).eq(0).all()
    assert choose(logits, 0.0, 1.0, 0, draws).eq(0).all()


def test_a_number_chooses_its_token_and_never_one_that_cannot_come() -> None:
    """The cumulative probabilities are 0, 1/4, 1/4, 3/4, 1, 1: the first, third and last token have none."""
    logits = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]]).log().expand(6, 6)
    last = 1 - 2**-53
    at = torch.tensor([0.0, 0.25, 0.2499999, 0.75, 0.7499999, last], dtype=torch.float64)
    assert choose(logits, 1.0, 1.0, 0, lambda: at).tolist() == [1, 3, 1, 4, 3, 4]
    many = torch.rand(1, 5000).log_softmax(-1).expand(2, -1).masked_fill(torch.arange(5000) > 4990, -torch.inf)
    assert (choose(many, 1.0, 1.0, 0, lambda: at[[0, 5]]) <= 4990).all()
    assert choose(many, 1.0, 1.0, 0, lambda: torch.ones(2)).tolist() == 2 * [int(many[0].argmax())]


# ---- the update


def gradients(tok: Any, out: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    t = trainer(tok, out, max_grad_norm=float("inf"), **changes)
    t.optimizer.step = lambda: None
    t.optimizer.zero_grad = lambda: None
    metrics = t.train_step()
    return {name: p.grad.clone() for name, p in t.model.named_parameters()}, metrics


@pytest.mark.parametrize("preset", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_micro_batches_give_the_gradient_of_the_batch(tok: Any, tmp_path: Path, preset: str) -> None:
    whole, m1 = gradients(tok, tmp_path / "1", preset=preset)
    cut, m4 = gradients(tok, tmp_path / "4", preset=preset, micro_batch=5)  # 5 + 5 + 2
    assert max(g.abs().max().item() for g in whole.values()) > 1e-4
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-6)
    for name in ("loss", "entropy", "grad_norm", "tokens", "ratio_max"):
        assert m4[name] == pytest.approx(m1[name], rel=1e-4, abs=1e-6)


def test_gradient_equals_policy_gradient_in_float64(tok: Any, tmp_path: Path) -> None:
    """On-policy GRPO is the plain policy gradient, written out here with the model's own log-softmax."""
    temperature = 0.7
    t = trainer(tok, tmp_path, temperature=temperature, max_grad_norm=float("inf"))
    exact = copy.deepcopy(t.model).double()
    rows = prompts_of_step(t.train_rows, 0, 3, 0)
    completions = t.sample(rows, 4, temperature, generator=torch.Generator().manual_seed(0))
    of_each = t.credit.advantages(rows, completions, t.score(rows, completions, 4))
    width, loss = completions.prompt_width, 0.0
    for i, ids in enumerate(completions.tokens):
        real = completions.attention[i]
        prompt = completions.ids[i, :width][real[:width]]
        whole = torch.cat([prompt, torch.tensor(ids)])[None]
        logps = (exact(input_ids=whole).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        loss = loss - of_each[i].double() * logps[torch.arange(len(ids)), ids].mean() / 12
    expected = torch.autograd.grad(loss, list(exact.parameters()))
    t.optimizer.step = t.optimizer.zero_grad = lambda: None
    t.update(completions, of_each)
    for p, gradient in zip(t.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.double(), gradient, rtol=1e-4, atol=1e-6)


def test_the_three_losses_give_the_same_step(tok: Any, tmp_path: Path) -> None:
    linear, _ = gradients(tok, tmp_path / "a", beta=0.1)
    for loss in ("logits", "eager"):
        other, _ = gradients(tok, tmp_path / loss, loss=loss, beta=0.1)
        for name in linear:
            torch.testing.assert_close(other[name], linear[name], rtol=1e-4, atol=1e-6)


def test_the_three_losses_give_the_same_curve(tok: Any, tmp_path: Path) -> None:
    curves = {}
    for loss in ("linear", "logits", "eager"):
        run = trainer(tok, tmp_path / loss, loss=loss, steps=20, lr=1e-3, num_updates=2, beta=0.05, eval_steps=10)
        assert run.train()
        curves[loss] = lines(tmp_path / loss)
    assert len({line["loss"] for line in curves["linear"] if "loss" in line}) > 10
    for loss in ("logits", "eager"):
        for expected, found in zip(curves["linear"], curves[loss], strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_linear_loss_refuses_a_head_it_does_not_know(tok: Any, tmp_path: Path) -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = tiny(tok)
    head = Doubled(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    with pytest.raises(ValueError, match=r"loss='linear' does not know .*Doubled.*use loss='logits'"):
        trainer(tok, tmp_path / "a", model=model)
    model.lm_head = torch.nn.Linear(head.in_features, head.out_features, bias=False)
    model.lm_head.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(ValueError, match=r"its logits differ by up to .*use loss='logits'"):
        trainer(tok, tmp_path / "b", model=model)


def test_old_log_probs_are_those_before_the_first_update(tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(tok, tmp_path / "one", lr=1e-2)
    assert one.train_step()["ratio_max"] == 1.0

    old: list[Any] = []
    new: list[Any] = []

    def watched(hidden: torch.Tensor, weight: torch.Tensor, batch: TokenBatch, *args: Any, **kwargs: Any) -> Any:
        out = linear_grpo_loss(hidden, weight, batch, *args, **kwargs)
        old.append(batch.old_logps)
        new.append(out.logps)
        return out

    monkeypatch.setattr("grpo_kernels.training.losses.linear_grpo_loss", watched)
    three = trainer(tok, tmp_path / "three", lr=1e-2, num_updates=3)
    metrics = three.train_step()
    assert old[0] is None and torch.equal(old[1], new[0]) and torch.equal(old[2], new[0])
    assert (new[1] - new[0]).abs().max() > 1e-3 < (new[2] - new[1]).abs().max()
    assert metrics["ratio_max"] == pytest.approx((new[2] - new[0])[new[0] != 0].exp().max().item(), rel=1e-5)


def test_reference_is_kept_refreshed_and_pulled_to(tok: Any, tmp_path: Path) -> None:
    t = trainer(tok, tmp_path, beta=0.5, ref_refresh_steps=2, lr=1e-2, steps=3)
    start = {k: v.clone() for k, v in t.reference.model.state_dict().items()}
    first = t.train_step()
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert all(torch.equal(v, start[k]) for k, v in t.reference.model.state_dict().items())
    second = t.train_step()
    assert second["kl"] > 1e-5
    assert all(torch.equal(v, t.model.state_dict()[k]) for k, v in t.reference.model.state_dict().items())
    assert t.train_step()["kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_gradient_that_is_not_finite_leaves_the_parameters(tok: Any, tmp_path: Path) -> None:
    t = trainer(tok, tmp_path)
    before = parameters(t)
    t.model.lm_head.weight.register_hook(lambda g: g * float("nan"))
    assert t.train_step()["skipped"] == 1.0
    assert all(torch.equal(p, before[n]) for n, p in parameters(t).items())


def test_learning_rate_schedules() -> None:
    c = TrainConfig(steps=10, lr=1.0, warmup_steps=4)
    assert [c.lr_at(i) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    c = TrainConfig(steps=10, lr=1.0, lr_schedule="linear", num_updates=2)
    assert c.lr_at(0) == 1.0 and c.lr_at(10) == 0.5 and c.lr_at(20) == 0.0
    assert TrainConfig(steps=10, lr=1.0, lr_schedule="cosine").lr_at(5) == pytest.approx(0.5)


def test_thirty_steps_raise_the_reward(tok: Any, tmp_path: Path) -> None:
    t = trainer(tok, tmp_path, steps=30, lr=1e-2, prompts_per_step=4, group_size=8)
    assert t.train()
    rewards = [line["reward"] for line in lines(tmp_path)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
    assert (tmp_path / "curves.png").stat().st_size > 5000
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(p, parameters(t)[n]) for n, p in again.named_parameters())


# ---- rewards


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
        ([1.0, 2.0], "returned 2 values for 4 completions"),
        ([[1.0], [1.0, 2.0], [1.0, None], [3.0]], "1 entries for completion 0 of 3 tokens"),
        ([[1.0, None, 2.0], 1.0, [1.0, None], [3.0]], "returned a float for completion 1 of 2 tokens"),
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
    with pytest.raises(ValueError, match=message):
        scores([lambda p, c, **_: values])


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


# ---- data


def gsm8k(folder: Path) -> Path:
    """The layout of openai/gsm8k: two configurations, two splits, question and answer columns in parquet."""
    import datasets

    for name in ("main", "socratic"):
        for split, count in (("train", 12), ("test", 4)):
            rows = [{"question": f"{i}+1=", "answer": f"{i} plus 1.\n#### {i + 1}"} for i in range(count)]
            (folder / name).mkdir(parents=True, exist_ok=True)
            datasets.Dataset.from_list(rows).to_parquet(str(folder / name / f"{split}-00000-of-00001.parquet"))
    entries = "".join(
        f"- config_name: {n}\n  data_files:\n" + "".join(f"  - split: {s}\n    path: {n}/{s}-*\n" for s in ("train", "test"))
        for n in ("main", "socratic")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    return folder


@pytest.mark.parametrize("configuration", ["main", None])
def test_data_laid_out_as_gsm8k(tok: Any, tmp_path: Path, configuration: str | None) -> None:
    folder = str(gsm8k(tmp_path / "gsm8k"))
    c = TrainConfig(dataset=folder, dataset_config=configuration, prompt_template="Q: {prompt}")
    train, held_out = load_rows(c)
    assert (len(train), len(held_out)) == (12, 4)
    assert encode(train, tok, c)[3]["prompt"] == "Q: 3+1=" and train[3]["answer"] == "4" and train[3]["question"] == "3+1="


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_data_in_one_file_holds_out_its_end(tmp_path: Path, name: str) -> None:
    import datasets

    data = datasets.Dataset.from_list(PROMPTS)
    data.to_parquet(str(tmp_path / name)) if name.endswith("parquet") else data.to_json(str(tmp_path / name))
    train, held_out = load_rows(TrainConfig(dataset=str(tmp_path / name), eval_prompts=5))
    assert [r["prompt"] for r in train + held_out] == [r["prompt"] for r in PROMPTS] and len(held_out) == 5
    with pytest.raises(ValueError, match="eval_prompts=24"):
        load_rows(TrainConfig(dataset=str(tmp_path / name), eval_prompts=24))
    with pytest.raises(ValueError, match=r"prompt_column='text'.*prompt, answer"):
        load_rows(TrainConfig(dataset=str(tmp_path / name), eval_prompts=5, prompt_column="text"))


def test_every_epoch_visits_every_prompt_once() -> None:
    rows = [{"prompt": str(i)} for i in range(10)]
    visited = [row["prompt"] for step in range(5) for row in prompts_of_step(rows, step, 4, seed=1)]
    assert len(set(visited[:10])) == len(set(visited[10:])) == 10
    assert visited[:10] != visited[10:] != [row["prompt"] for row in rows]


def test_long_prompts_are_left_out_with_a_count(tok: Any, tmp_path: Path, capsys: Any) -> None:
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "1+2+3+4=", "answer": "10"}]
    t = Trainer(config(tmp_path, max_prompt_tokens=5), model=tiny(tok), tokenizer=tok, rows=(rows, rows), rewards=[evens])
    assert [r["prompt"] for r in t.train_rows] == ["1+2="] and "left out 1 of 2" in capsys.readouterr().out


# ---- runs that stop, fail and go on


@pytest.fixture(scope="module")
def straight(tok: Any, tmp_path_factory: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("straight")
    t = seeded_run(tok, out, steps=6)
    assert t.train()
    return parameters(t), lines(out)


def assert_same(t: Trainer, expected: tuple[dict[str, torch.Tensor], list[dict[str, Any]]]) -> None:
    assert all(torch.equal(p, expected[0][name]) for name, p in parameters(t).items())
    assert lines(t.out) == expected[1]


def resumed(tok: Any, out: Path) -> Trainer:
    """A trainer around another model, which must not matter, with the random state of another life."""
    randomness.seed(99)
    t = trainer(tok, out, model=tiny(tok, seed=5), rewards=[noisy], steps=6, resume=True, **RUN)
    assert t.train()
    return t


def test_three_steps_and_three_more_are_six(tok: Any, tmp_path: Path, straight: Any) -> None:
    assert seeded_run(tok, tmp_path, steps=3).train()
    t = resumed(tok, tmp_path)
    assert_same(t, straight)
    assert len(straight[1]) == 7 and "accuracy" in straight[1][-1]


def test_a_damaged_checkpoint_gives_way_to_its_predecessor(tok: Any, tmp_path: Path, straight: Any, capsys: Any) -> None:
    assert seeded_run(tok, tmp_path, steps=4, checkpoint_steps=1).train()
    _, newest = checkpoints.listed(tmp_path / "checkpoints")
    data = bytearray((newest / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "state.pt").write_bytes(data)
    t = resumed(tok, tmp_path)
    assert "passed over" in capsys.readouterr().err
    assert_same(t, straight)


def test_damaged_checkpoints_only_are_not_a_fresh_start(tok: Any, tmp_path: Path) -> None:
    assert trainer(tok, tmp_path, steps=2).train()
    before = (tmp_path / "metrics.jsonl").read_text()
    for folder in checkpoints.listed(tmp_path / "checkpoints"):
        os.truncate(folder / "state.pt", 100)
    with pytest.raises(ValueError, match="holds damaged checkpoints only"):
        trainer(tok, tmp_path, steps=4, resume=True).train()
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("harm", ["truncated", "no manifest", "draft"])
def test_other_damage(tmp_path: Path, harm: str) -> None:
    checkpoints.save(tmp_path, 1, {"step": 1}, keep=2)
    newest = checkpoints.save(tmp_path, 2, {"step": 2}, keep=2)
    if harm == "truncated":
        os.truncate(newest / "state.pt", 100)
    elif harm == "no manifest":
        (newest / "manifest.json").unlink()
    else:  # the program ended while writing
        newest.rename(tmp_path / "draft-00000002")
    state, problems = checkpoints.load_newest(tmp_path)
    assert state == {"step": 1} and len(problems) == (harm != "draft")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_and_saves(tok: Any, tmp_path: Path, straight: Any, number: int) -> None:
    calls: list[int] = []

    @wraps(noisy)
    def interrupting(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        calls.append(len(completions))
        if calls.count(12) == 3 and len(completions) == 12:
            os.kill(os.getpid(), number)
        return noisy(prompts, completions)

    before = signal.getsignal(number)
    t = seeded_run(tok, tmp_path, steps=6, rewards=[interrupting])
    assert not t.train() and t.step == 3 and t.stopped_by == number
    assert signal.getsignal(number) is before
    assert len(lines(tmp_path)) == 3 and (tmp_path / "curves.png").exists()
    again = resumed(tok, tmp_path)
    assert_same(again, straight)
    assert again.stopped_by == 0


def test_a_stopped_trainer_goes_on_when_it_is_asked_to(tok: Any, tmp_path: Path, straight: Any) -> None:
    signals = [signal.SIGTERM]

    @wraps(noisy)
    def interrupting(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        while signals:
            os.kill(os.getpid(), signals.pop())
        return noisy(prompts, completions)

    t = seeded_run(tok, tmp_path, steps=6, rewards=[interrupting])
    assert not t.train() and t.step == 1
    assert t.train() and t.stopped_by == 0
    assert_same(t, straight)


def test_a_run_that_fails_keeps_its_steps(tok: Any, tmp_path: Path, straight: Any) -> None:
    calls: list[int] = []

    @wraps(noisy)
    def failing(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        calls.append(len(completions))
        if calls.count(12) == 4:
            raise RuntimeError("the grader is gone")
        return noisy(prompts, completions)

    t = seeded_run(tok, tmp_path, steps=6, rewards=[failing])
    with pytest.raises(RuntimeError, match="grader"):
        t.train()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]
    assert_same(resumed(tok, tmp_path), straight)


def test_a_torn_last_metrics_line_is_dropped(tok: Any, tmp_path: Path) -> None:
    assert trainer(tok, tmp_path).train()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "rew')
    assert trainer(tok, tmp_path, resume=True, steps=3).train()
    assert [json.loads(text)["step"] for text in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_a_run_is_not_overwritten(tok: Any, tmp_path: Path) -> None:
    assert trainer(tok, tmp_path).train()
    with pytest.raises(ValueError, match="holds a run: continue it with resume"):
        trainer(tok, tmp_path)


def test_unwritable_output_is_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"out=.*cannot be written"):
        Trainer(config(tmp_path / "file" / "run", model="no/such-model", dataset="no/such-data"))


def test_a_full_disk_is_reported_before_training(tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    with pytest.raises(ValueError, match=r"out=.* has 0 MB free, and the run writes up to \d+ MB: make room"):
        trainer(tok, tmp_path)


@pytest.mark.parametrize(
    ("there", "step", "left"), [((50, 100), 75, [50, 75]), ((50, 100, 150), 60, [50, 60]), ((1, 2), 3, [2, 3])]
)
def test_what_a_checkpoint_replaces(there: tuple[int, ...], step: int, left: list[int], tmp_path: Path) -> None:
    """Older ones beyond `keep`; newer ones, which a run that writes this one has found damaged; drafts of failed writes."""
    for at in there:
        checkpoints.save(tmp_path, at, {"step": at}, keep=9)
        if at > step:
            os.truncate(tmp_path / f"step-{at:08d}" / "state.pt", 10)
    (tmp_path / "draft-00000007").mkdir()
    checkpoints.save(tmp_path, step, {"step": step}, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step-{at:08d}" for at in left]
    assert checkpoints.load_newest(tmp_path)[0] == {"step": step}


# ---- the command line


def test_help_lists_every_field(capsys: Any) -> None:
    with pytest.raises(SystemExit) as done:
        command_line(["train", "--help"])
    text = capsys.readouterr().out
    assert done.value.code == 0
    for f in fields(TrainConfig):
        assert f"--{f.name.replace('_', '-')}" in text
        assert f.metadata["help"]


def test_a_run_from_the_command_line(tok: Any, tmp_path: Path) -> None:
    tiny(tok).save_pretrained(tmp_path / "model")
    tok.save_pretrained(tmp_path / "model")
    data = gsm8k(tmp_path / "gsm8k")
    argv = (
        f"train --model {tmp_path}/model --dataset {data} --dataset-config main --rewards number exact --reward-weights 1 0.5"
    )
    argv += (
        f" --steps 2 --prompts-per-step 2 --group-size 2 --max-new-tokens 3 --eval-steps 1 --out {tmp_path}/run --no-progress"
    )
    argv += " --device cpu --dtype bfloat16 --betas 0.9 0.95 --gradient-checkpointing"
    assert command_line(argv.split()) == 0
    assert [line["step"] for line in lines(tmp_path / "run")] == [0, 1, 2]
    assert command_line(argv.split()) == 2  # the folder holds a run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0: it must be at least 1"),
        ({"preset": "pppo"}, "preset='pppo': it must be one of grpo"),
        ({"loss": "fused"}, "loss='fused': it must be one of linear, logits, eager"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"top_p": 0.0}, "top_p=0.0: it must be in"),
        ({"temperature": 0.0}, "temperature=0.0: .*eval_temperature=0"),
        ({"beta": -1.0}, "beta=-1.0"),
        ({"rewards": []}, "rewards=.*name a reward function"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights=.*each of the 1 rewards"),
        ({"ref_refresh_steps": 5}, "ref_refresh_steps=5: .*set beta above 0"),
        ({"prompt_template": "x"}, "prompt_template='x'"),
        ({"keep_checkpoints": 1}, "keep_checkpoints=1: keep at least 2"),
        ({"lr_schedule": "step"}, "lr_schedule='step'"),
        ({"parallel": "fsdp"}, "parallel='fsdp': it must be one of ddp, fsdp2"),
    ],
)
def test_bad_values_name_the_field_and_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"liger": True}, "liger=True: .*GPU"),
        ({"attn_implementation": "flash_attention_2", "model": "m", "dataset": "d"}, "flash_attention_2.*needs a CUDA device"),
        ({"device": "cuda"}, "device='cuda': torch sees no CUDA device"),
        ({"dataset": "d"}, "model='': name one"),
    ],
)
def test_what_this_machine_cannot_do(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(config(tmp_path, **({"device": "cpu"} | changes)))
