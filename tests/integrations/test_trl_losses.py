"""TRL's loss of one micro-batch: `GRPOTrainer._compute_loss` itself, the same trainer with our patch, `grpo_loss` with the preset's
numbers of TRL, and float64 (support/oracle.py), in loss, gradients and metrics."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trl", minversion="1.16.0")

from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.a2po import A2POTrainer
from trl.experimental.gmpo import GMPOTrainer

from grpo_kernels import LogitTransform, Objective, TokenBatch, group_advantages, grpo_loss, linear_logprobs
from grpo_kernels.formulas.surrogates import A2po, Cispo, Gmpo
from grpo_kernels.integrations.trl import patch
from grpo_kernels.rewards.advantages import NUMERICS
from grpo_kernels.rewards.corrections import importance_weights, without_truncated
from grpo_kernels.rewards.entropy import AdaptiveEntropyCoef
from support import trl_cases
from support.pairs import label, pairs
from support.trl_cases import EOS, LENGTH, PAD
from support.trl_family import (
    CLIPPED,
    LOSS_TYPES,
    TEMPERATURE,
    Case,
    Data,
    Result,
    assert_same,
    different,
    exact,
    objective_of,
    ours,
    without_tokens,
)  # fmt: skip

parametrize = pytest.mark.parametrize

PROMPT, VOCAB = 3, trl_cases.SIZES["vocab_size"]
#: Training, accumulation steps, steps per generation, processes.
COUNTS = {"usual": (True, 2, 4, 2), "alone": (True, 1, 1, 1), "cut short": (True, 3, 6, 1), "evaluation": (False, 3, 6, 4)}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    made = trl_cases.make_trainer(trl_cases.save_model(folder / "model", tie_word_embeddings=False), folder)
    made.current_gradient_accumulation_steps = 1  # which its training loop would set
    return made


@pytest.fixture(scope="module")
def plain(trainer):
    """Eight sequences of unequal length, one of them fully masked, one with advantage 0; old, reference and sampler away
    from the policy, in steps that differ from sequence to sequence so that mean ratios leave the clip range as well."""
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(2, VOCAB, (8, LENGTH), generator=g)
    mask = torch.arange(LENGTH) < torch.tensor([9, 4, 7, 0, 9, 12, 6, 8])[:, None]
    prompt = torch.randint(2, VOCAB, (8, PROMPT), generator=g)
    prompt[1, 0] = prompt[5, :2] = PAD
    with torch.no_grad():
        attention = torch.cat([prompt != PAD, mask], 1).long()
        states = trainer.model.model(input_ids=torch.cat([prompt, ids], 1), attention_mask=attention).last_hidden_state
    hidden, head = states[:, PROMPT - 1 : -1].clone(), trainer.model.lm_head.weight.detach().clone()
    logps = torch.log_softmax(hidden @ head.T / TEMPERATURE, -1).gather(2, ids[..., None])[..., 0]
    shift = torch.tensor([0.32, -0.35, -0.3, 0.1, 0.5, 0.03, 0.05, 0.02])[:, None]
    old, ref = (
        logps - shift - 0.15 * torch.randn(8, LENGTH, generator=g),
        logps - 0.2 - 0.5 * torch.randn(8, LENGTH, generator=g),
    )
    sampler = old + 0.1 * torch.randn(8, LENGTH, generator=g)
    sampler[4] += 0.4  # within the bound of the off-policy mask,
    sampler[7] += 0.9  # and beyond it
    sampler[0, 1] = sampler[2, 3] = math.nan  # not scored
    advantages = torch.tensor([1.2, 0.8, -0.7, 0.9, -1.1, 0.6, 0.0, -0.4])
    return Data(hidden, head, ids, mask, old, ref, advantages, sampler=sampler, more={"prompt": prompt})


def with_option(name, case, data):
    g, shape = torch.Generator().manual_seed(4), data.ids.shape
    if name in ("tool mask", "together"):
        tools = torch.ones(shape, dtype=torch.bool)
        tools[0, 2:5] = tools[2, 1] = tools[7, 4:] = False
        data = replace(data, mask=data.mask & tools, more=data.more | {"tools": tools, "completion": data.mask})
    if name in ("token weights", "together"):
        w = torch.exp(0.3 * torch.randn(shape, generator=g))
        w = w.clamp(max=1.35) if case.loss_type == "vespo" else torch.where(w > 1.35, 0.0, w)
        data = replace(data, weights=torch.where(data.mask, w, 1.0))
    if name == "sequence weights" and case.loss_type != "vespo":  # which TRL refuses
        data = replace(data, weights=torch.tensor([0.7, 1.6, 0.0, 1.0, 2.2, 0.9, 1.1, 1.4])[:, None])
    if name == "advantages per token":
        data = replace(data, advantages=data.advantages[:, None] + 0.5 * torch.randn(shape, generator=g))
    if name == "on-policy":
        data = replace(data, old=None)
    if name == "truncated completions":
        data = replace(data, mask=data.mask & ~torch.isin(torch.arange(8), torch.tensor([0, 7]))[:, None])
    changes = {"entropy quantile": {"share": 0.4}, "off-policy mask": {"off_policy": 0.25}, "entropy bonus": {"coef": 0.5}}
    every = {key: value for change in changes.values() for key, value in change.items()}
    return replace(case, **changes.get(name, every if name == "together" else {})), data


OPTIONS = ("nothing else", "on-policy", "tool mask", "truncated completions", "entropy quantile", "off-policy mask", "token weights",
           "sequence weights", "entropy bonus", "advantages per token", "together")  # fmt: skip


class Ranks:
    """An accelerator that says there are more processes; only TRL's normaliser asks."""

    def __init__(self, accelerator, num_processes):
        self._accelerator, self.num_processes = accelerator, num_processes

    def __getattr__(self, name):
        return getattr(self._accelerator, name)


def configure(trainer, case, counts, monkeypatch):
    """Sets the attributes that `GRPOTrainer.__init__` would set from its arguments."""
    monkeypatch.setattr(trainer, "accelerator", Ranks(trainer.accelerator, counts[3]))
    on_trainer = {
        "loss_type": case.loss_type, "importance_sampling_level": case.level, "beta": case.beta, "epsilon_low": case.epsilons[0],
        "epsilon_high": case.cap if case.loss_type == "cispo" else case.epsilons[1], "top_entropy_quantile": case.share,
        "off_policy_mask_threshold": case.off_policy, "entropy_coef": case.coef, "_entropy_bonus_enabled": case.coef != 0,
        "current_gradient_accumulation_steps": counts[1],
    }  # fmt: skip
    on_arguments = {
        "delta": case.delta, "use_bias_correction_kl": case.corrected, "steps_per_generation": counts[2],
        **dict(zip(("sapo_temperature_pos", "sapo_temperature_neg"), case.sapo, strict=True)),
        **dict(zip(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), case.vespo, strict=True)),
    }  # fmt: skip
    for owner, settings in ((trainer, on_trainer), (trainer.args, on_arguments)):
        for name, value in settings.items():
            monkeypatch.setattr(owner, name, value)


def items_of(data):
    """Of a generation batch, of which this is one part."""
    return 11 + 8 * int(data.mask.sum())


def inputs_of(case, data):
    prompt = data.more["prompt"]
    inputs = {
        "prompt_ids": prompt, "prompt_mask": (prompt != PAD).long(), "completion_ids": data.ids, "advantages": data.advantages,
        "completion_mask": data.more.get("completion", data.mask).long(), "num_items_in_batch": torch.tensor(items_of(data)),
        "sampling_per_token_logps": data.sampler, "old_per_token_logps": data.old, "importance_sampling_ratio": data.weights,
        "ref_per_token_logps": data.ref if case.beta else None, "tool_mask": data.more.get("tools"),
    }  # fmt: skip
    return {name: value for name, value in inputs.items() if value is not None}


def trls(
    trainer,
    case,
    data,
    counts=COUNTS["usual"],
    method=None,
    inputs=None,
    poison=None,
):
    """What the method of TRL's class gives. Gradients are taken at the last hidden states, below the fused head. `poison`: bool
    [B, prompt + T], the states that are NaN."""
    captured = []

    def keep(module, args, output):
        captured.append(output)
        return output if poison is None else output.masked_fill(poison[..., None], torch.nan)

    hook = trainer.model.model.norm.register_forward_hook(keep)
    with pytest.MonkeyPatch.context() as monkeypatch:
        configure(trainer, case, counts, monkeypatch)
        monkeypatch.setattr(trainer, "use_vllm", data.weights is not None)
        trainer.model.train(counts[0])
        method = method or (lambda trainer, *args: trainer._compute_loss(*args))
        loss = method(trainer, trainer.model, inputs or inputs_of(case, data))
    hook.remove()
    d_hidden, d_head = torch.autograd.grad(loss, [captured[0], trainer.model.lm_head.weight])
    metrics = {name: values[-1] for name, values in trainer._metrics["train" if counts[0] else "eval"].items()}
    trainer._metrics["train"].clear(), trainer._metrics["eval"].clear()
    rows = slice(PROMPT - 1, -1)
    assert not d_hidden[:, : rows.start].any() and not d_hidden[:, -1].any()
    return Result(loss.detach(), [d_hidden[:, rows], d_head], metrics)


def normalizer_of(case, data, counts=COUNTS["usual"]):
    """TRL's denominators as `normalizer=`."""
    training, accumulation, per_generation, processes = counts
    accumulation = accumulation if training else 1
    if case.loss_type in ("dapo", "cispo", "vespo"):
        return items_of(data) / processes * (accumulation / per_generation if training else 1)
    if case.loss_type == "bnpo":
        return max(float(data.mask.sum()), 1.0) * accumulation
    return 8 * accumulation * (LENGTH if case.loss_type == "dr_grpo" else 1)


def mine_and_exact(case, data, counts=COUNTS["usual"]):
    """`grpo_loss`, and float64."""
    case = replace(case, coef=case.coef / (counts[1] if counts[0] else 1))
    D = normalizer_of(case, data, counts)
    return ours(case, data, grpo_loss, objective_of(case, "trl"), D), exact(case, data, D)


@pytest.fixture
def patched(trainer):
    fused = patch(trainer, strict=True)
    yield fused
    fused.undo()


GRID = pairs(
    option=OPTIONS, loss_type=LOSS_TYPES, counts=COUNTS, level=("token", "sequence"), kl=("none", "plain", "ratio"), delta=(None, 1.4, 1.1),
)  # fmt: skip


@parametrize("row", GRID, ids=label)
def test_micro_batch(trainer, plain, patched, row):
    """TRL's method and its trainer with our patch: the same loss, gradients and metrics. Float64 and `grpo_loss`: the same loss and
    gradients, and those metrics that have the same meaning."""
    beta, delta = 0.0 if row["kl"] == "none" else 0.3, row["delta"] if row["loss_type"] in CLIPPED else None
    case, data = with_option(row["option"], Case(row["loss_type"], row["level"], beta, row["kl"] == "ratio", delta), plain)
    counts = COUNTS[row["counts"]]
    mine, want = mine_and_exact(case, data, counts)
    assert_same(mine, want, "grpo_loss")
    if case.loss_type == "vespo" and case.level == "sequence" and case.corrected:
        # TRL, which warns of it, then weighs VESPO's KL by a mean ratio that its loss does not have. Ours by the token's.
        with pytest.raises(RuntimeError, match="left to TRL's own code: VESPO's KL"):
            trls(trainer, case, data, counts)
        return
    theirs = trls(trainer, case, data, counts, GRPOTrainer._compute_loss)
    assert_same(theirs, want, "TRL")
    fused = trls(trainer, case, data, counts)
    assert patched.counts == {"fused": 1}
    assert_same(fused, theirs, "patched")
    assert fused.metrics == pytest.approx(theirs.metrics, rel=1e-5, abs=1e-6, nan_ok=True) and [*fused.metrics] == [
        *theirs.metrics
    ]
    names = {"entropy": "entropy"} | ({"kl": "kl"} if case.beta else {})
    if case.level == "token" and case.loss_type == "cispo":  # per sequence TRL has means of sequences
        names["clip_high"] = "cispo_clip_ratio"
    if case.level == "token" and case.loss_type in CLIPPED and case.delta != 1.1:  # TRL counts after that bound
        names |= {"clip_low": "clip_ratio/low_mean", "clip_high": "clip_ratio/high_mean"}
    for name, theirs_name in names.items():
        for got in (mine.metrics[name], theirs.metrics[theirs_name]):
            assert got == pytest.approx(want.metrics[name], rel=1e-5, abs=1e-6), name


@parametrize("loss_type", LOSS_TYPES)
def test_the_grid_is_not_trivial(plain, loss_type):
    """Each option changes the gradient, clipping acts on a good share of the tokens."""
    base = exact(Case(loss_type), plain)
    for option in OPTIONS[1:]:
        case, data = with_option(option, Case(loss_type), plain)
        assert different(exact(case, data), base) or (loss_type, option) == ("vespo", "sequence weights"), option
    kl = exact(Case(loss_type, beta=0.3), plain)
    assert different(kl, base) and different(kl, exact(Case(loss_type, beta=0.3, corrected=True), plain))
    if loss_type in CLIPPED:
        assert 0.04 < base.metrics["clip_low"] < 0.4 and 0.06 < base.metrics["clip_high"] < 0.4
        assert different(exact(Case(loss_type, delta=1.4), plain), base)


@parametrize("loss_type", [*LOSS_TYPES, "gspo"])
def test_presets_have_trls_defaults(trainer, plain, loss_type):
    """Nothing passed but beta, whose KL TRL corrects by default, and an entropy bonus. CISPO's cap is apart, see below."""
    args, level = trainer.args, "sequence" if loss_type in ("luspo", "gspo") else "token"  # the one that TRL advises
    case = Case(
        "grpo" if loss_type == "gspo" else loss_type, level, 0.3, args.use_bias_correction_kl, args.delta,
        (trainer.epsilon_low, trainer.epsilon_high), 5.0, (args.sapo_temperature_pos, args.sapo_temperature_neg),
        (args.vespo_k_pos, args.vespo_lambda_pos, args.vespo_k_neg, args.vespo_lambda_neg), coef=0.2,
    )  # fmt: skip
    objective = Objective.preset(loss_type, numerics="trl", beta=0.3, entropy_coef=0.1)
    assert_same(ours(case, plain, grpo_loss, objective, normalizer_of(case, plain)), trls(trainer, case, plain), loss_type)


@parametrize("loss_type", LOSS_TYPES)
def test_nothing_to_train_on(trainer, plain, patched, loss_type):
    """A micro-batch of masked completions is a differentiable 0: a rank without a graph would leave the others waiting."""
    data = without_tokens(plain)
    for changes in ({}, {"share": 0.4, "coef": 0.2}, {"off_policy": 0.25}):
        case = Case(loss_type, beta=0.3, **changes)
        for got in (
            trls(trainer, case, data, method=GRPOTrainer._compute_loss),
            trls(trainer, case, data),
            mine_and_exact(case, data)[0],
        ):
            assert got.loss == 0 and not any(x.any() for x in got.gradients), changes


def test_these_are_all_loss_types_of_trl():
    """A loss type that a new TRL adds is noticed here."""
    conditions = re.findall(r"self\.loss_type (?:==|!=|in) (\[[^\]]*\]|\"\w+\")", inspect.getsource(GRPOTrainer._compute_loss))
    assert len(conditions) > 8 and {*re.findall(r'"(\w+)"', " ".join(conditions))} == {*LOSS_TYPES}


@parametrize("name, value", [("loss_type", "ppo2"), ("importance_sampling_level", "group")])
def test_an_unknown_option_is_trls_error(trainer, plain, patched, name, value):
    """Which a patch that is not strict leaves to TRL, with a warning."""
    patched.strict = False
    with pytest.raises(ValueError, match="Unknown"), pytest.warns(UserWarning, match=value):
        trls(trainer, replace(Case(), **{{"importance_sampling_level": "level"}.get(name, name): value}), plain)


def test_weights_of_sequences_are_none_of_vespos(plain):
    with pytest.raises(ValueError, match="weights"):
        ours(Case("vespo"), replace(plain, weights=torch.ones(8, 1)), grpo_loss, Objective.preset("vespo", numerics="trl"))


# ---- TRL's defects


def test_cispo_without_epsilon_high(trainer, plain):
    """`epsilon_high` is CISPO's cap, an absolute ratio, and defaults to `epsilon`. So all ratios are 0.2."""
    assert trainer.epsilon_high == 0.2 and Objective.preset("cispo", numerics="trl").surrogate == Cispo(5.0)
    low = trls(trainer, Case("cispo", cap=trainer.epsilon_high), plain)
    assert_same(low, mine_and_exact(Case("cispo", cap=0.2), plain)[1], "TRL")
    assert different(low, mine_and_exact(Case("cispo", cap=5.0), plain)[1], 0.5)


def test_vespo_weights_of_rejected_and_masked_tokens(trainer, plain):
    """TRL: a token that the sampler's mask took out counts log 1e-8 in the log-ratio of its sequence, which silences the others;
    and so do the log-weights of positions that are not trained. Ours leaves both out."""
    case, w = Case("vespo"), torch.exp(0.3 * torch.randn(plain.ids.shape, generator=torch.Generator().manual_seed(4)))
    data = replace(plain, weights=torch.where(plain.mask, torch.where(w > 1.35, 0.0, w), 1.0))
    rejected = (data.weights == 0).any(1)
    (mine, want), theirs = mine_and_exact(case, data), trls(trainer, case, data)
    assert_same(mine, want, "rejected")
    assert 2 <= int(rejected.sum()) <= 7
    assert float(theirs.gradients[0][rejected].abs().max()) < 1e-3 * float(want.gradients[0][rejected].abs().max())
    data = replace(plain, weights=torch.full(plain.ids.shape, 0.9))
    (mine, want), theirs = mine_and_exact(case, data), trls(trainer, case, data)
    assert_same(mine, want, "masked")
    full, off = plain.mask.all(1), (theirs.gradients[0] - want.gradients[0]).abs()
    assert different(theirs, want, 0.1) and float(off[full].max()) < 1e-5 * float(want.gradients[0].abs().max())


def test_vespo_far_from_the_old_policy(trainer, plain, patched):
    """Log-ratios beyond the clamps: per token at 20, per sequence at log 1e-8 and at 20."""
    old = plain.old.clone()
    old[0] += 0.32
    old[0, :2] += torch.tensor([25.0, -20.5])  # clamped, they cancel
    old[2], old[4] = old[2] + 5.0, old[4] - 5.0
    mine, want = mine_and_exact(Case("vespo"), replace(plain, old=old))
    for got in (mine, trls(trainer, Case("vespo"), replace(plain, old=old))):
        assert_same(got, want, "clamps")
    assert want.gradients[0][0].abs().max() > 1e-4


# ---- what the patch does beside the loss


def test_rows_that_are_projected(trainer, plain, patched, monkeypatch):
    """States of prompts, padding and tool tokens may be NaN: nobody reads them. With skip_inactive nor are those of advantage 0,
    and nothing in TRL's log changes but the entropy, which is the mean of the others."""
    case, data = with_option("tool mask", Case(), plain)
    unread = torch.nn.functional.pad(~data.mask, (PROMPT - 1, 1), value=True)
    theirs = trls(trainer, case, data, method=GRPOTrainer._compute_loss)
    assert_same(trls(trainer, case, data, poison=unread), theirs, "poisoned")
    idle = torch.nn.functional.pad(~(data.mask & (data.advantages != 0)[:, None]), (PROMPT - 1, 1), value=True)
    assert int(idle.sum()) > int(unread.sum())
    monkeypatch.setattr(patched, "skip_inactive", True)
    skipped = trls(trainer, case, data, poison=idle)
    assert_same(skipped, theirs, "skipped")
    assert {n: v for n, v in skipped.metrics.items() if n != "entropy"} == pytest.approx(
        {n: v for n, v in theirs.metrics.items() if n != "entropy"}, rel=1e-5, abs=1e-6
    )
    assert math.isfinite(skipped.metrics["entropy"]) and abs(skipped.metrics["entropy"] - theirs.metrics["entropy"]) > 1e-5
    case = replace(case, share=0.4)  # two visits: nothing can be skipped
    assert trls(trainer, case, data).metrics == pytest.approx(
        trls(trainer, case, data, method=GRPOTrainer._compute_loss).metrics, rel=1e-5, abs=1e-6
    )


def test_columns_of_the_head_are_drawn(trainer, plain, patched, monkeypatch):
    """Values are those of all columns; the gradient has other columns in each micro-batch."""
    dense = trls(trainer, Case(), plain)
    monkeypatch.setattr(patched, "sparse_step", 1 / 16)
    one, other = (trls(trainer, Case(), plain) for _ in range(2))
    assert one.loss == other.loss == pytest.approx(float(dense.loss), rel=1e-5)
    apart = [float((one.gradients[1] - x.gradients[1]).norm() / dense.gradients[1].norm()) for x in (dense, other)]
    assert min(apart) > 0.01 and apart[0] < 1


ARITHMETIC = {
    "loss": (lambda loss, own: loss + 0.01, "fused loss, tensor 0 of 1: ours sum"),
    "denominator": (lambda loss, own: 2 * loss, "fused loss"),
    "slopes": (
        lambda loss, own: loss + 0.02 * (loss - loss.detach()),
        "gradient of the fused loss with respect to the log-probs",
    ),
    "nothing": (lambda loss, own: loss, None),
}


@parametrize("loss_type", LOSS_TYPES)
@parametrize("what", ARITHMETIC)
def test_strict_compares_with_trls_arithmetic(trainer, plain, monkeypatch, what, loss_type):
    """After a change in TRL, at the first step: of a factor too, on-policy with advantages that add up to 0, where the loss is 0
    whatever it is divided by."""
    change, message = ARITHMETIC[what]
    theirs = GRPOTrainer._compute_loss
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda own, *args: change(theirs(own, *args), own))
    advantages = torch.ones(8) - 2 * (torch.arange(8) % 2)
    data = replace(plain, advantages=advantages, old=None, mask=plain.mask[:1].expand(8, -1))
    fused = patch(trainer, strict=True)
    try:
        if message is None:
            trls(trainer, Case(loss_type), data)
        else:
            with pytest.raises(RuntimeError, match=f"strict=True, but the .*{message}|strict=True, but the gradient"):
                trls(trainer, Case(loss_type), data)
    finally:
        fused.undo()


def test_strict_compares_small_bonuses_and_lets_no_nan_pass(trainer, plain, patched, monkeypatch):
    """A wrong entropy bonus is noticed even if it hardly changes the loss. A NaN in the old log-prob of a trained token is one in
    TRL's loss."""
    theirs = patched._theirs

    def doubled(*args):
        monkeypatch.setattr(trainer, "entropy_coef", 2 * trainer.entropy_coef)
        return theirs(*args)

    trls(trainer, Case(coef=1e-5), plain)
    monkeypatch.setattr(patched, "_theirs", doubled)
    with pytest.raises(RuntimeError, match="with respect to the entropies"):
        trls(trainer, Case(coef=1e-5), plain)
    monkeypatch.undo()
    old = plain.old.clone()
    old[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="its own to nan"):
        trls(trainer, Case(), replace(plain, old=old))


def test_what_is_left_to_trl_is_counted_and_warns_once(trainer, plain, recwarn):
    fused, case = patch(trainer), Case("vespo", "sequence", 0.3, corrected=True)
    got = [trls(trainer, case, plain) for _ in range(2)]
    assert_same(got[0], trls(trainer, case, plain, method=GRPOTrainer._compute_loss), "left to TRL", 0.0)
    assert got[0].loss == got[1].loss and fused.counts == {"TRL: VESPO's KL weighted by the ratio of the sequence": 2}
    assert len([w for w in recwarn if "left to TRL's own code: VESPO's KL" in str(w.message)]) == 1
    fused.undo()


def test_adaptive_entropy_coefficient(trainer, plain, patched):
    """TRL's controller over four optimiser steps of two micro-batches each, with `AdaptiveEntropyCoef` beside it, and our patch."""
    entropy = exact(Case(), plain).metrics["entropy"]
    mine = AdaptiveEntropyCoef(target=entropy + 1e-3, step=0.03, low=0.01, high=0.1, initial=0.05)
    coefs, sync = [], trainer.accelerator.gradient_state
    with pytest.MonkeyPatch.context() as monkeypatch:
        configure(trainer, Case(), (True, 2, 4, 1), monkeypatch)
        for owner, settings in (
            (trainer.args, {"entropy_target": entropy + 1e-3, "entropy_coef_delta": 0.03, "entropy_coef_min": 0.01, "entropy_coef_max": 0.1}),
            (trainer, {"use_adaptive_entropy": True, "_entropy_bonus_enabled": True, "entropy_coef": 0.05, "_last_world_entropy": math.inf,
                       "_entropy_window_stats": None}),
        ):  # fmt: skip
            for name, value in settings.items():
                monkeypatch.setattr(owner, name, value)
        for step in range(4):
            if step == 2:  # entropy is now above the target
                trainer.args.entropy_target = mine.target = entropy - 1e-3
            coefs.append(mine.coef)
            case = Case(coef=mine.coef / 2)
            for micro in range(2):
                monkeypatch.setattr(sync, "sync_gradients", micro == 1)
                loss = trainer._compute_loss(trainer.model, inputs_of(case, plain))
                want = exact(case, plain, normalizer_of(case, plain, (True, 2, 4, 1)))
                assert float(loss.detach()) == pytest.approx(float(want.loss), rel=1e-4)
            mine.update(entropy)
            assert mine.state_dict()["coef"] == pytest.approx(trainer.entropy_coef)
    trainer._metrics["train"].clear()
    assert coefs == [0, pytest.approx(0.08), 0, 0]


# ---- from sampled completions to a batch


#: TRL's names of what becomes of the sampler's weights, and bounds; the last are its defaults.
CORRECTIONS = {
    "token_truncate": {"low": 0.7, "high": 1.4}, "token_mask": {"low": 0.7, "high": 1.4},
    "sequence_truncate": {"low": 0.7, "high": 1.4}, "sequence_mask": {"high": 3.0},
}  # fmt: skip


@parametrize("mode, mask_truncated", [(mode, i % 2 == 1) for i, mode in enumerate(CORRECTIONS)])
def test_from_a_rollout_to_a_batch(trainer, monkeypatch, mode, mask_truncated):
    """Nothing of TRL is replaced but the sampler, by its own hook for that: advantages, old log-probs, sampler weights, masks and
    denominator are its own. Ours makes them from the same rollout."""
    bounds, g = CORRECTIONS[mode], torch.Generator().manual_seed(6)
    level, kind = mode.split("_")
    completions = [torch.randint(2, VOCAB, (n,), generator=g).tolist() for n in (12, 4, 7, 12, 2, 6, 8, 5)]
    for i in (1, 2, 4, 5, 6, 7):
        completions[i][-1] = EOS  # the others were cut off
    tools = [[int(i % 3 > 0 or not 1 < t < 4) for t in range(len(c))] for i, c in enumerate(completions)]
    rewards = [1.0, 0.2, 0.0, 0.5, 0.3, math.nan, 0.9, 0.1]

    def padded(rows, fill):
        return torch.tensor([row + [fill] * (LENGTH - len(row)) for row in rows])

    ids, prompt = padded(completions, PAD), torch.full((8, 2), 5)
    completion = padded([[1] * len(row) for row in completions], 0)
    if mask_truncated:
        completion = without_truncated(completion, torch.tensor([row[-1] == EOS for row in completions])).long()
    mask = (completion * padded(tools, 1)).bool()
    attention = torch.cat([torch.ones_like(prompt), completion], 1)
    with torch.no_grad():
        states = trainer.model.model(input_ids=torch.cat([prompt, ids], 1), attention_mask=attention).last_hidden_state[:, 1:-1]
        old, _ = linear_logprobs(states, trainer.model.lm_head.weight, ids, mask=mask, transform=LogitTransform(TEMPERATURE))
    sampler = old + 0.15 * torch.randn(old.shape, generator=g)
    sampler[7] -= 0.4  # a product of weights beyond 3
    sampler[0, 5] = sampler[6, 0] = math.nan
    scored = [[None if x != x else x for x in row[: len(c)].tolist()] for row, c in zip(sampler, completions, strict=True)]
    returned = {"prompt_ids": prompt.tolist(), "completion_ids": completions, "logprobs": scored, "env_mask": tools}
    configure(trainer, Case(), COUNTS["alone"], monkeypatch)
    monkeypatch.setattr(trainer, "_last_loaded_step", trainer.state.global_step, raising=False)  # vLLM has the weights
    for name, value in {
        "rollout_func": lambda prompts, trainer: returned, "use_vllm": True, "mask_truncated_completions": mask_truncated,
        "reward_funcs": [lambda completions, **_: [None if r != r else r for r in rewards]], "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": bounds.get("low"), "vllm_importance_sampling_clip_max": bounds["high"],
    }.items():  # fmt: skip
        monkeypatch.setattr(trainer, name, value)
    inputs = trainer._generate_and_score_completions([{"prompt": "ab"}] * 8)
    trainer._metrics["train"].clear()
    advantages = group_advantages(torch.tensor(rewards), group_size=4, **NUMERICS["trl"])
    batch = TokenBatch(ids, advantages, mask=mask, old_logps=old, sampler_logps=sampler)
    assert int(inputs["num_items_in_batch"]) == int(mask.sum())
    wanted = inputs["importance_sampling_ratio"].expand(ids.shape) * mask
    assert_close(advantages, inputs["advantages"])
    assert_close(old, inputs["old_per_token_logps"] * mask, rtol=1e-5, atol=1e-5)
    assert_close(importance_weights(batch, level=level, mode=kind, **bounds), wanted, rtol=1e-5, atol=1e-5)
    edges = torch.tensor([0.0, bounds["high"], bounds.get("low", 0.0)])
    assert 0.05 < torch.isin(wanted[mask], edges).float().mean() < 0.95


# ---- TRL's other trainers of the family


def assert_whole_sequences(theirs, mine, empty):
    """TRL's defect, in value only: a fully masked sequence, whose ratio is 1, adds `empty`. Ours is without it."""
    assert abs(empty) > 1e-2
    assert_same(mine, replace(theirs, loss=theirs.loss - empty), "ours")


@parametrize("beta", [0.0, 0.3])
def test_gmpo(trainer, plain, beta):
    """Geometric means, clipped per token in log space. (TRL's `top_entropy_quantile` narrows the mean itself; ours, a filter,
    takes tokens out of the loss. That combination is not compared.)"""
    objective = Objective.preset("gmpo", numerics="trl", beta=beta, surrogate=Gmpo(0.2, 0.27))
    for option in ("nothing else", "tool mask"):
        case, data = with_option(option, Case("grpo", beta=beta), plain)
        theirs = trls(trainer, case, data, COUNTS["alone"], GMPOTrainer._compute_loss)
        mine = ours(case, data, grpo_loss, objective, 8.0)
        assert_whole_sequences(theirs, mine, -0.9 / 8)
        assert mine.metrics["entropy"] == pytest.approx(theirs.metrics["entropy"], rel=1e-5)
    assert Objective.preset("gmpo", numerics="trl").surrogate == Gmpo(0.4, 0.4)


def test_rloo(trainer, plain):
    """The ratio of the whole completion, clipped."""
    logps = torch.log_softmax(plain.hidden @ plain.head.T / TEMPERATURE, -1).gather(2, plain.ids[..., None])[..., 0]
    data = replace(plain, old=logps - (logps - plain.old) / 4)  # a product leaves the range sooner
    case = Case(epsilons=(0.2, 0.2))
    inputs = inputs_of(case, data) | {"old_logps": (data.old * data.mask).sum(1)}
    theirs = trls(trainer, case, data, method=RLOOTrainer._compute_loss, inputs=inputs)
    assert_whole_sequences(theirs, ours(case, data, grpo_loss, Objective.preset("rloo", numerics="trl"), 8.0), -0.9 / 8)
    silent = ~theirs.gradients[0].any(2).any(1) & data.mask.any(1) & (data.advantages != 0)
    assert 1 <= int(silent.sum()) <= 4  # clipped


def test_a2po(trainer, plain, monkeypatch):
    """The regression of A*-PO, at temperature 1. Its anchor is the reference, in ours the batch's old_logps."""
    data, prompt = replace(plain, old=plain.ref), plain.more["prompt"]
    inputs = {
        "input_ids": torch.cat([prompt, data.ids], 1), "attention_mask": torch.cat([prompt != PAD, data.mask], 1).long(),
        "logits_to_keep": LENGTH, "ref_logps": (data.ref * data.mask).sum(1), "rewards": data.advantages + 0.25,
        "v_star": torch.full((8,), 0.25),
    }  # fmt: skip
    inputs |= {"prompt_mask": inputs["attention_mask"][:, :PROMPT], "completion_mask": data.mask.long()}
    monkeypatch.setattr(trainer.args, "beta2", 0.4, raising=False)
    monkeypatch.setattr(trainer, "model_kwarg_keys", {"logits_to_keep"}, raising=False)
    monkeypatch.setattr(trainer, "_get_sequence_logps", A2POTrainer._get_sequence_logps.__get__(trainer), raising=False)
    theirs = trls(trainer, Case(), data, method=A2POTrainer.compute_loss, inputs=inputs)
    objective = Objective.preset("a2po", numerics="trl", surrogate=A2po(0.4))
    assert_whole_sequences(theirs, ours(Case(), data, grpo_loss, objective, temperature=1.0), 0.9**2 / 8)
