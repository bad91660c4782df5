"""What the trainer samples and what it makes of it:

completions, advantages, loss and gradient, against plain float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import transformers

from grpo_kernels.training.config import TrainConfig
from grpo_kernels.training.data import prompts_of_step
from grpo_kernels.training.rollouts import draw
from support import advantage_oracle as estimators
from support.oracle import Spec
from support.plain_trainer import GRPO, Plain, Watch, kept_ids
from support.runs import PROMPTS, lines, of_steps, tiny, trainer, varied

DAPO = Spec(eps_high=0.28)
CUT = {"top_k": 9, "top_p": 0.8}
HOT = {"num_updates": 2, "lr": 3e-3}


# ---- models and rewards


def causal(name, tok, **changes):
    """A small model of another architecture."""
    torch.manual_seed(5)
    settings = getattr(transformers, f"{name}Config")(
        vocab_size=len(tok),
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.eos_token_id,
        bos_token_id=None,
        **changes,
    )
    return getattr(transformers, f"{name}ForCausalLM")(settings)


def opt(tok):
    """Its layers draw their dropout themselves, by their own training flag."""
    sizes = {
        "hidden_size": 32,
        "ffn_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 32,
    }
    return causal("OPT", tok, dropout=0.3, init_std=0.1, max_position_embeddings=64, **sizes)


def softcapped(tok):
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    return causal(
        "Gemma2",
        tok,
        num_key_value_heads=1,
        initializer_range=0.5,
        final_logit_softcapping=1.5,
        **sizes,
    )


def another(tok):
    return tiny(tok, seed=5, hidden_size=48)


def with_three_ends(tok):
    model = tiny(tok)
    model.generation_config.eos_token_id = [3, 5]
    return model


def some_alike(prompts, completions, **_):
    """The completions of one prompt differ in reward, those of the others do not."""
    score = varied(prompts, completions)
    return [
        s + 0.1 * i if p == prompts[0] else 0.7
        for i, (p, s) in enumerate(zip(prompts, score, strict=True))
    ]


def alike(prompts, completions, **_):
    return [0.7] * len(prompts)


# ---- advantages by another way, from the rewards [K][B] of a step


def beside_steps(plain, rewards):
    """An outcome of weight 1, and steps of weight 0.5."""
    outcome = plain.of_groups([rewards[0], [0.0] * len(plain.ids)])
    steps = estimators.process_advantages(rewards[1], plain.groups)
    return [[a + 0.5 * s for s in row] for a, row in zip(outcome, steps, strict=True)]


def over_greedy(plain, rewards):
    ends = [plain.tokenizer.eos_token_id]
    firsts = range(0, len(plain.ids), plain.config.group_size)
    texts = [
        plain.tokenizer.decode(plain.greedy(plain.prompts[i], ends), skip_special_tokens=True)
        for i in firsts
    ]
    base = varied(texts, texts)
    return [r - base[group] for r, group in zip(rewards[0], plain.groups, strict=True)]


def optimal_token(plain, rewards):
    at_end = [[0.0] * (len(ids) - 1) + [r] for r, ids in zip(rewards[0], plain.ids, strict=True)]
    logps, squares = (
        [x[at].tolist() for at in plain.sequences] for x in (plain.old, plain.squares)
    )
    return estimators.optimal_token_advantages(at_end, logps, squares, plain.groups)


def no_reward(plain, rewards):
    return [0.0] * len(plain.ids)


# ---- the table


@dataclass(frozen=True)
class Case:
    changes: dict[str, Any]
    spec: Spec = GRPO
    advantages: Any = None
    weigh: Callable[[Tensor, bool], Tensor] | None = None
    rewards: tuple[Any, ...] = (varied,)
    model: Callable[[Any], Any] = tiny
    teacher: Callable[[Any], Any] | None = None
    steps: int = 1
    tolerance: float = 1e-4
    metrics: dict[str, float] = field(default_factory=dict)


def of_kl(kl, **changes):
    """Surrogate and exact divergence to a teacher, at weight 0.5."""
    settings = {"preset": "dapo", "beta": 0.5, "kl": kl, "micro_batch": 5, **HOT, **changes}
    return Case(settings, Spec(eps_high=0.28, beta=0.5), teacher=another)


def truncated(weight):
    return lambda gap, ended: gap.exp().clamp(max=weight)


KL = Spec(aggregate="seq-mean-token-mean", beta=0.1)
CASES = {
    # updates, passes, prompts and the reference over steps
    "one update": Case({"temperature": 0.7}, steps=2, metrics={"ratio_max": 1.0, "ratio_min": 1.0, "dropped": 0.0}),
    "updates": Case({"num_updates": 3, "lr": 1e-2, "micro_batch": 5, "temperature": 1.3}),
    "reference refreshed": Case({"beta": 0.1, "ref_refresh_steps": 1, "loss": "logits", "micro_batch": 5, **HOT}, KL, steps=3),
    # denominators
    "dapo": Case({"preset": "dapo", "micro_batch": 5, **HOT}, DAPO),
    "dr_grpo": Case({"preset": "dr_grpo", "micro_batch": 5, **HOT}, Spec(aggregate="constant", max_tokens=4)),
    "gspo": Case(
        {"preset": "gspo", "micro_batch": 5, "num_updates": 2, "lr": 1e-5},
        Spec(eps_low=3e-4, eps_high=4e-4, level="sequence", aggregate="seq-mean-token-mean"),
    ),
    "dropped": Case({"preset": "dapo", "drop_zero_variance": True, **HOT}, DAPO, rewards=(some_alike,), metrics={"dropped": 2 / 3}),
    "entropy share": Case({"preset": "dapo", "entropy_share": 0.3}, Spec(eps_high=0.28, entropy_share=0.3), metrics={"kept": 0.3}),
    # sets
    "sets": Case({"beta": 0.1, "micro_batch": 5, **CUT, **HOT}, KL, steps=2),
    "no replay": Case({"replay": False, "ratio_to": "sampler", "top_p": 0.6, "micro_batch": 5, **HOT}),
    # divergences, teachers
    "reverse": of_kl("exact", temperature=0.7),
    "reverse, logits, sets": of_kl("exact", loss="logits", top_p=0.8, temperature=1.3),
    "tv": of_kl("exact-tv"),
    "distillation": Case({"preset": "distillation", "temperature": 0.7, **HOT}, Spec(beta=1.0), no_reward, teacher=softcapped),
    # advantages
    "steps": Case({"reward_weights": [1.0, 0.5], **HOT}, GRPO, beside_steps, rewards=(varied, of_steps)),
    "remax": Case({"advantages": "remax", "micro_batch": 5}, GRPO, over_greedy),
    "optimal token, sets": Case({"advantages": "optimal_token", "micro_batch": 5, "loss": "logits", **CUT}, GRPO, optimal_token),
    # corrections
    "tis": Case({"corrections": ["tis:high=0.9"], "replay": False, "top_p": 0.85, "micro_batch": 5}, GRPO, None, truncated(0.9)),
    "masks": Case(
        {"corrections": ["icepop:low=0.815", "without_truncated"], "preset": "dapo", "replay": False, "top_p": 0.8, "group_size": 8},
        DAPO, None, lambda gap, ended: torch.where(gap.exp() >= 0.815, gap.exp(), 0.0) if ended else gap * math.nan,
    ),
    # models
    "several ends": Case(HOT, model=with_three_ends),
    "softcap": Case({"beta": 0.1, **HOT}, KL, model=softcapped),
    "dropout, layers": Case(HOT, model=lambda tok: opt(tok).train()),
    "bfloat16": Case({"dtype": "bfloat16", "micro_batch": 5}, tolerance=0.05),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_plain_one(tok, tmp_path, name):
    """Of each optimizer step:

    the gradients of all parameters, and what the metrics say of the last.
    """
    case = CASES[name]
    model, teacher = case.model(tok), case.teacher and case.teacher(tok)
    watch = Watch(model)
    rewards = [watch.recorded(function) for function in case.rewards]
    t = trainer(
        tok,
        tmp_path,
        model=model,
        teacher=teacher,
        rewards=rewards,
        max_grad_norm=math.inf,
        **case.changes,
    )
    c = t.config
    plain = Plain(c, tok, model, teacher, case.spec, case.advantages, case.weigh)
    ends = {tok.eos_token_id, *([3, 5] if case.model is with_three_ends else [])}
    for step in range(case.steps):
        with watch:
            metrics = t.train_step()
        expected = plain.step(watch.calls, watch.updates, ends)
        assert len(expected) == c.num_updates
        for update, (gradients, told) in zip(watch.updates, expected, strict=True):
            assert told["grad_norm"] > 1e-3 and update.gradients.keys() == gradients.keys()
            for key, gradient in gradients.items():
                error = (update.gradients[key] - gradient).norm()
                assert error <= case.tolerance * (gradient.norm() + 0.01 * told["grad_norm"]), (
                    step,
                    key,
                    float(error),
                )
        if not c.kl and not c.beta and "distillation" not in c.preset:
            del told["kl"]
        assert c.num_updates == 1 or told["ratio_max"] > 1 + 1e-4
        for key, value in told.items():
            assert metrics[key] == pytest.approx(
                value, rel=3 * case.tolerance, abs=case.tolerance / 10
            ), (step, key)
        for key, value in case.metrics.items():
            assert metrics[key] == pytest.approx(value, abs=0.05 if key == "kept" else 1e-6), key
        if c.ref_refresh_steps:
            plain.load({key: p.detach() for key, p in model.named_parameters()})
            plain.reference.load_state_dict(plain.model.state_dict())


# ---- relations


def gradients_of(tok, out, **options):
    model = options.pop("model", None) or tiny(tok)
    watch = Watch(model)
    options = {"rewards": (varied,)} | options
    with watch:
        metrics = trainer(tok, out, model=model, max_grad_norm=math.inf, **options).train_step()
    return [update.gradients for update in watch.updates], metrics


def test_entropy_is_held_up_by_a_moving_weight(tok, tmp_path):
    """A target above any entropy:

    the weight rises by 0.005 an update once the first entropy was seen, and survives a resume.
    """
    options = {
        "entropy_target": 50.0,
        "checkpoint_steps": 1,
        "lr": 0.0,
        "rewards": [alike],
        "num_updates": 2,
    }
    assert (
        trainer(tok, tmp_path / "a", steps=2, **options).train()
        and trainer(tok, tmp_path / "a", resume=True, steps=3, **options).train()
    )
    assert [line["entropy_coef"] for line in lines(tmp_path / "a")] == pytest.approx(
        [0.005, 0.015, 0.025]
    )
    (none, once), _ = gradients_of(tok, tmp_path / "b", **options)
    assert not any(g.any() for g in none.values()) and all(g.any() for g in once.values())


# ---- sampling


LOGITS = torch.full((30,), -200.0).double()
LOGITS[2:8] = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.03, 0.02]).log()


@pytest.mark.parametrize(
    "options",
    [
        {}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.79}, {"min_p": 0.15}, {"top_p": 1e-6},
        {"temperature": 1.6, "min_p": 0.05, "top_k": 4, "top_p": 0.9},
    ],
    ids=str,
)  # fmt: skip
def test_tokens_come_as_often_as_they_should(options):
    """By 4,800 numbers that fill the unit interval evenly; what is cut off never comes, and nothing
    else is missing.
    """
    even, settings = (torch.arange(4800, dtype=torch.float64) + 0.5) / 4800, TrainConfig(**options)
    ids, logps, sets = draw(LOGITS[None].float(), even, copies=4800, **options)
    kept = kept_ids(LOGITS, settings)
    expected = torch.zeros(30).double()
    expected[kept] = (LOGITS[kept] / settings.temperature).softmax(0)
    torch.testing.assert_close(logps.double().exp(), expected[ids], rtol=1e-5, atol=0)
    assert ((torch.bincount(ids, minlength=30) / 4800 - expected).abs() <= 1 / 4800).all()
    assert sets is None or sorted(sets[:1].ids.tolist()) == sorted(kept)
    assert (sets is None) == ({*options} <= {"temperature"})


@pytest.mark.parametrize(
    ("number", "token"),
    [(0.0, 3), (0.2499999, 3), (0.25, 5), (0.7499999, 5), (0.75, 6), (1 - 2**-53, 6), (1.0, 5)],
)
def test_a_number_chooses_its_token_and_never_one_that_cannot_come(number, token):
    """The cumulative probabilities are 0 up to token 3, then 1/4, 1/4, 3/4, 1, and 1 to the last,
    at which rounding could point.
    """
    logits = torch.full((1, 30), -200.0)
    logits[0, 3:7] = torch.tensor([1.0, 1e-9, 2.0, 1.0]).log() - torch.tensor(
        [0.0, 200.0, 0.0, 0.0]
    )
    for options in ({}, {"min_p": 0.1}):
        ids, _, _ = draw(logits, torch.tensor([number], dtype=torch.float64), copies=1, **options)
        assert ids.tolist() == [6 if options and number == 1 else token]


def test_evaluations_are_greedy_and_without_cuts(tok, tmp_path):
    """One completion of each held-out prompt, before the step and after it: token by token that of
    the model without cache, padding or batch.
    """
    model, watch, prompts = tiny(tok), Watch(None), [row["prompt"] for row in PROMPTS[16:23]]
    options = {
        "eval_steps": 1,
        "eval_prompts": 7,
        "steps": 1,
        "lr": 0.0,
        "max_new_tokens": 6,
        "top_k": 2,
    }
    t = trainer(tok, tmp_path, model=model, rewards=[watch.recorded(varied)], **options)
    assert t.train()
    before, _, after = (dict(zip(call.prompts, call.ids, strict=True)) for call in watch.calls)
    plain = Plain(t.config, tok, model)
    assert (
        before
        == after
        == {
            prompt: plain.greedy(tok(prompt)["input_ids"], [tok.eos_token_id]) for prompt in prompts
        }
    )


def test_an_epoch_visits_every_prompt():
    rows = [{"prompt": str(i)} for i in range(10)]
    visited = [row["prompt"] for step in range(5) for row in prompts_of_step(rows, step, 4, seed=0)]
    assert (
        sorted(visited[:10]) == sorted(visited[10:]) == [row["prompt"] for row in rows]
        and visited[:10] != visited[10:]
    )


def test_seed_and_step_decide_what_is_sampled(tok, tmp_path):
    def sampled(name, **options):
        watch = Watch(None)
        t = trainer(
            tok,
            tmp_path / name,
            rewards=[watch.recorded(varied)],
            rows=(PROMPTS[:1], []),
            lr=0.0,
            **options,
        )
        for _ in range(3):
            t.train_step()
        return [call.ids for call in watch.calls]

    first = sampled("a")
    assert (
        sampled("b", micro_batch=5) == first != sampled("c", seed=1)
        and len({*map(str, first)}) == 3
    )


# ---- the optimizer, and a run that learns


def test_the_optimizer_is_adamw_with_clipping_and_the_schedule(tok, tmp_path):
    """Three steps of two updates, compared with torch's own over the gradients of the run."""
    model, settings = tiny(tok), {"betas": [0.8, 0.95], "weight_decay": 0.1, "lr": 1e-2}
    watch, own = Watch(model), [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(own, **settings)
    run = {
        "steps": 3,
        "num_updates": 2,
        "max_grad_norm": 0.05,
        "warmup_steps": 2,
        "lr_schedule": "linear",
        **settings,
    }
    t = trainer(tok, tmp_path, model=model, rewards=[varied], **run)
    with watch:
        metrics = [t.train_step() for _ in range(3)]
    assert [u.lr for u in watch.updates] == pytest.approx(
        [0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025]
    )
    assert min(m["grad_norm"] for m in metrics) > 0.05
    for update in watch.updates:
        assert torch.stack([g.norm() for g in update.gradients.values()]).norm() == pytest.approx(
            0.05, rel=1e-4
        )
        optimizer.param_groups[0]["lr"] = update.lr
        for p, gradient in zip(own, update.gradients.values(), strict=True):
            p.grad = gradient
        optimizer.step()
    torch.testing.assert_close([*model.parameters()], own, rtol=1e-6, atol=1e-7)


def test_the_cosine_of_the_learning_rate():
    settings = TrainConfig(steps=2, num_updates=3, lr=2.0, lr_schedule="cosine")
    expected = [1 + math.cos(math.pi * i / 6) for i in range(7)]
    assert [settings.lr_at(i) for i in range(7)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("reward", "drop"),
    [(alike, False), (alike, True), (varied, False)],
    ids=["alike", "dropped", "nan"],
)
def test_nothing_moves_without_advantages_or_with_a_gradient_that_is_not_finite(
    tok, tmp_path, reward, drop
):
    """The first is an update of zero gradient, also where nothing is left of the batch; the second
    is skipped.
    """
    model, broken = tiny(tok), reward is varied
    before = [p.detach().clone() for p in model.parameters()]
    if broken:
        model.lm_head.weight.register_hook(lambda g: g * math.nan)
    metrics = trainer(
        tok, tmp_path, model=model, rewards=[reward], drop_zero_variance=drop
    ).train_step()
    assert metrics["skipped"] == broken and metrics["dropped"] == pytest.approx(
        11 / 12 if drop else 0
    )
    assert all(map(torch.equal, model.parameters(), before))


def test_a_layer_whose_dropout_recomputing_switches_on_is_refused(tok, tmp_path):
    with pytest.raises(
        ValueError, match="gradient_checkpointing=True switches on the dropout of OPTForCausalLM"
    ):
        trainer(tok, tmp_path, model=opt(tok), gradient_checkpointing=True)


def test_a_teacher_by_its_path_is_the_one_that_is_passed(tok, tmp_path):
    another(tok).save_pretrained(tmp_path / "teacher")
    teachers = (another(tok), str(tmp_path / "teacher"), tiny(tok, seed=3))
    kl = [
        trainer(tok, tmp_path / str(i), teacher=t, preset="distillation").train_step()["kl"]
        for i, t in enumerate(teachers)
    ]
    assert kl[0] == kl[1] != kl[2] and kl[0] > 0.01
