"""The trainer's options of the objective: their effect on an update, not only that they are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from grpo_kernels import Sparse, group_advantages
from grpo_kernels.rewards.estimators import ADVANTAGES, CORRECTIONS, Evidence
from grpo_kernels.training.command_line import with_options
from grpo_kernels.training.fields import KNOWN, TRAINABLE
from grpo_kernels.training.sampling import completion_logits
from grpo_kernels.training.trainer import Trainer
from support.runs import config, evens, lines, parameters, tiny, trainer


def first_prompt_only(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The completions of one prompt differ in reward, those of the others do not."""
    score = evens(prompts, completions)
    return [s + 0.1 * i if p == prompts[0] else 0.7 for i, (p, s) in enumerate(zip(prompts, score, strict=True))]


def nothing_to_learn(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [0.7] * len(prompts)


@pytest.mark.parametrize("loss", ["linear", "logits"])
def test_dropping_completions_without_advantage_changes_no_update(tok: Any, tmp_path: Path, loss: str) -> None:
    updated, metrics = [], []
    for drop in (False, True):
        t = trainer(tok, tmp_path / str(drop), rewards=[first_prompt_only], drop_zero_variance=drop, loss=loss, preset="dapo")
        start = parameters(t)
        metrics.append(t.train_step())
        updated.append(parameters(t))
    assert metrics[0]["dropped"] == 0 and metrics[1]["dropped"] == pytest.approx(2 / 3)
    assert metrics[1]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=1e-4)
    assert any(not torch.equal(start[name], updated[0][name]) for name in start)
    for name in start:
        # AdamW's first step is lr * sign of the gradient, so a gradient of rounding size may flip: compare where it is not.
        torch.testing.assert_close(updated[1][name], updated[0][name], rtol=0, atol=2e-4)


def test_a_batch_without_advantages_is_an_update_with_zero_gradient(tok: Any, tmp_path: Path) -> None:
    t = trainer(tok, tmp_path, rewards=[nothing_to_learn], drop_zero_variance=True)
    start = parameters(t)
    metrics = t.train_step()
    assert metrics["grad_norm"] == 0 and metrics["dropped"] == pytest.approx(11 / 12)
    assert all(torch.equal(start[name], p) for name, p in parameters(t).items())


def test_advantages_follow_numerics_and_explicit_choices(tok: Any, tmp_path: Path) -> None:
    rewards = torch.tensor([0.1, 0.5, 0.2, 0.9, 0.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.3], dtype=torch.float64)
    for i, (changes, expected) in enumerate(
        [
            ({}, {"scale": "group"}),
            ({"numerics": "verl"}, {"eps": 1e-6}),
            ({"numerics": "torchtitan", "advantage_scale": "none"}, {"scale": "none"}),
            (
                {"advantage_baseline": "leave-one-out", "advantage_scale": "none"},
                {"baseline": "leave-one-out", "scale": "none"},
            ),
        ]
    ):
        t = trainer(tok, tmp_path / str(i), rewards=[lambda *_, **__: rewards.tolist()], **changes)
        completions = t.sample(t.train_rows[:3], 4, 1.0)
        found = t.credit.advantages(t.train_rows[:3], completions, t.score(t.train_rows[:3], completions, 4))
        assert torch.equal(found, group_advantages(rewards, group_size=4, **expected)), changes


def test_entropy_is_held_up_by_a_moving_weight(tok: Any, tmp_path: Path) -> None:
    """A target above any entropy: the weight rises by 0.005 an update once the first entropy was seen, and survives a resume."""
    t = trainer(tok, tmp_path, steps=3, entropy_target=50.0, checkpoint_steps=1, lr=0.0)
    assert t.train()
    assert [line["entropy_coef"] for line in lines(tmp_path)] == pytest.approx([0.0, 0.005, 0.01])
    again = trainer(tok, tmp_path, steps=4, entropy_target=50.0, checkpoint_steps=1, lr=0.0, resume=True)
    assert again.train()
    assert lines(tmp_path)[-1]["entropy_coef"] == pytest.approx(0.015)


def test_only_the_share_of_highest_entropy_is_trained_on(tok: Any, tmp_path: Path) -> None:
    metrics = trainer(tok, tmp_path, entropy_share=0.25, group_size=8).train_step()
    assert 0.2 < metrics["kept"] < 0.35


@pytest.mark.parametrize("preset", TRAINABLE)
def test_every_preset_trains(tok: Any, tmp_path: Path, preset: str) -> None:
    teacher = tiny(tok, seed=5) if "distillation" in preset else None
    t = trainer(tok, tmp_path, preset=preset, num_updates=2, beta=0.1, teacher=teacher)
    start = parameters(t)
    metrics = t.train_step()
    assert metrics["skipped"] == 0 and metrics["grad_norm"] > 0
    assert any(not torch.equal(start[name], p) for name, p in parameters(t).items())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"preset": "a2po"}, "preset='a2po'"),
        ({"numerics": "nobody"}, "numerics='nobody'"),
        ({"numerics": "openrlhf", "preset": "vespo"}, "openrlhf has no such objective"),
        ({"kl": "k4"}, "kl='k4'"),
        ({"entropy_share": 0.0}, "entropy_share=0.0"),
        ({"drop_zero_variance": True, "beta": 0.1}, "drop_zero_variance=True"),
        ({"drop_zero_variance": True, "entropy_target": 0.1}, "drop_zero_variance=True"),
        ({"entropy_target": 0.2, "entropy_coef": -0.1}, "entropy_coef=-0.1"),
        ({"advantage_baseline": "median"}, "advantage_baseline='median'"),
    ],
)
def test_refusals_name_the_field(tok: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(config(tmp_path, **changes), model=tiny(tok), tokenizer=tok, rows=([], []))


@pytest.mark.parametrize(
    "changes",
    [{"preset": "dro"}, {"preset": "kl_cov"}, {"preset": "clip_cov"}, {"entropy_share": 0.5}, {"numerics": "skyrl"}],
    ids=str,
)
def test_dropping_completions_that_an_objective_needs_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="drop_zero_variance=True: this objective wants those completions"):
        config(tmp_path, drop_zero_variance=True, **changes)


def test_incompatible_options_are_refused_before_loading(tmp_path: Path) -> None:
    for changes, message in (
        ({"kl": "k9"}, "kl='k9'"),
        ({"numerics": "torchtitan", "preset": "gspo"}, "torchtitan has no such objective"),
        ({"advantage_baseline": "none"}, "scale"),
        ({"numerics": "prime-rl"}, "numerics='prime-rl'"),
    ):
        with pytest.raises(ValueError, match=message):
            config(tmp_path, **changes)


def test_beta_is_the_presets_own_unless_given(tmp_path: Path) -> None:
    assert config(tmp_path).objective.beta == 0
    assert config(tmp_path, numerics="liger").objective.beta == 0.04
    assert config(tmp_path, numerics="liger", beta=0.0).objective.beta == 0


# ---- estimators and corrections by name


def test_estimators_with_options_are_those_of_the_table(tok: Any, tmp_path: Path) -> None:
    """What the trainer hands to an estimator: the rewards of greedy completions, log-probs and squares of the policy."""
    for i, spec in enumerate(("rloo", "opo", "reinforce_pp:gamma=0.9,baseline=mean", "remax", "optimal_token", "gpg:eps=0.1")):
        t = trainer(tok, tmp_path / str(i), advantages=spec, micro_batch=5, temperature=0.7)
        rows = t.train_rows[:3]
        completions = t.sample(rows, 4, 0.7, generator=torch.Generator().manual_seed(0))
        scores = t.score(rows, completions, 4)
        found = t.credit.advantages(rows, completions, scores)
        logits = completion_logits(t.model, completions).float() / 0.7
        logps = logits.log_softmax(-1)
        greedy = t.score(rows, t.sample(rows, 1, 0.0), 1).totals.repeat_interleave(4)
        name, options = with_options(spec)
        evidence = Evidence(
            scores.totals, group_size=4, mask=completions.mask, greedy_rewards=greedy,
            old_logps=logps.gather(-1, completions.targets[..., None])[..., 0], sum_squares=logps.exp().square().sum(-1),
        )  # fmt: skip
        expected = ADVANTAGES[name](evidence, **options)
        assert expected.abs().max() > 0.05, spec
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("spec", [name for name, e in ADVANTAGES.items() if set(e.needs) <= set(KNOWN)])
def test_every_estimator_trains(tok: Any, tmp_path: Path, spec: str) -> None:
    t = trainer(tok, tmp_path, advantages=spec, rewards=[evens, first_prompt_only])
    start = parameters(t)
    assert t.train_step()["grad_norm"] > 0
    assert any(not torch.equal(start[name], p) for name, p in parameters(t).items())


def test_a_sampler_that_cuts_the_tail_off_is_corrected(tok: Any, tmp_path: Path) -> None:
    """The weight is the full softmax's probability over that of the tokens that top-p leaves; without top-p it is 1."""
    for top_p in (0.6, 1.0):
        t = trainer(
            tok, tmp_path / str(top_p), top_p=top_p, corrections=["importance_weights:high=inf"], micro_batch=5, replay=False
        )
        completions = t.sample(t.train_rows[:3], 4, 1.0, top_p, generator=torch.Generator().manual_seed(0))
        batch = t.credit.batch(completions, torch.linspace(-1, 1, 12))
        full = completion_logits(t.model, completions).log_softmax(-1).gather(-1, completions.targets[..., None])[..., 0]
        assert batch.old_logps is None and batch.weights is not None
        expected = (full - completions.logps).exp() * completions.mask
        torch.testing.assert_close(batch.weights, expected.detach())
        weights = batch.weights[completions.mask]
        assert (weights.min() < 0.9 and weights.max() <= 1.0 + 1e-5) if top_p < 1 else torch.allclose(weights, torch.ones(()))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_trains(tok: Any, tmp_path: Path, name: str) -> None:
    """With a sampler so sharp that weights differ; in micro-batches the gradient is that of the whole batch."""
    spec = {"rejection_mask": "rejection_mask:low=0.5", "geometric_mask": "geometric_mask:low=0.8"}.get(name, name)
    norms = []
    for size in (0, 5):
        t = trainer(tok, tmp_path / str(size), corrections=[spec], top_p=0.9, micro_batch=size, max_new_tokens=8, replay=False)
        norms.append(t.train_step()["grad_norm"])
    assert norms[0] > 0 and norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_truncated_completions_leave_the_denominator(tok: Any, tmp_path: Path) -> None:
    t = trainer(tok, tmp_path, corrections=["without_truncated"], group_size=8, preset="dapo")
    completions = t.sample(t.train_rows[:3], 8, 1.0, generator=torch.Generator().manual_seed(0))
    ended = torch.tensor([tok.eos_token_id in ids for ids in completions.tokens])
    batch = t.credit.batch(completions, torch.linspace(-1, 1, 24))
    assert 0 < ended.sum() < 24 and torch.equal(batch.mask, completions.mask & ended[:, None])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": "grpo"}, "advantages='grpo': it must be one of group, rloo"),
        ({"advantages": "gae"}, "advantages='gae': it takes values, of which this trainer has none"),
        ({"advantages": "process"}, "advantages='process': it takes steps"),
        ({"advantages": "remax:scale=none"}, "'scale' is no argument of the advantages 'remax'. It has none"),
        ({"advantages": "remax", "advantage_baseline": "mean"}, "'baseline' is no argument of the advantages 'remax'"),
        ({"advantages": "group:scale"}, "'group:scale': options are written as name:key=value"),
        ({"advantages": "group:eps=-1"}, "eps=-1"),
        ({"corrections": ["ti"]}, "corrections='ti': it must be one of importance_weights, tis"),
        ({"corrections": ["tis:low=3"]}, "high=2.0: the upper bound"),
        ({"corrections": ["rejection_mask"]}, "pass low=, high= or both"),
    ],
    ids=str,
)
def test_estimators_and_corrections_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)


def test_options_as_text() -> None:
    assert with_options("tis") == ("tis", {})
    assert with_options("rejection_mask:metric=k1, low=-0.5,high=inf") == (
        "rejection_mask", {"metric": "k1", "low": -0.5, "high": float("inf")},
    )  # fmt: skip
    assert with_options("tis:normalize=True,high=3")[1] == {"normalize": True, "high": 3}


def test_columns_of_the_head_are_drawn_anew_in_each_piece_and_step(
    tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are those of all columns; seeds differ, and are those of a run that does the same."""
    seeds, seen, losses = [], [], []

    class Seen(Sparse):
        def __post_init__(self) -> None:
            seeds.append(self.seed)
            super().__post_init__()

    monkeypatch.setattr("grpo_kernels.training.losses.Sparse", Seen)
    for name, options in {"dense": {}, "sparse": {"sparse_step": 1 / 16}, "again": {"sparse_step": 1 / 16}}.items():
        t = trainer(tok, tmp_path / name, micro_batch=5, num_updates=2, **options)
        losses.append(t.train_step()["loss"])
        t.train_step()
        seen.append(seeds[:])
        seeds.clear()
    assert seen[0] == [] and seen[1] == seen[2] and len(set(seen[1])) == len(seen[1]) == 2 * 2 * 3
    assert losses[1] == losses[2] != losses[0]  # of the second update, which begins from other weights


def test_columns_are_drawn_for_a_loss_from_hidden_states() -> None:
    for options in ({"loss": "logits"}, {"kl": "exact", "beta": 0.1}, {}):
        step = {"sparse_step": 1 / 64} if options else {"sparse_step": 1e-6}
        with pytest.raises(ValueError, match="sparse_step"):
            config(Path("nowhere"), **options, **step)
