"""TRL's loss of one micro-batch: `GRPOTrainer._compute_loss` itself and the same trainer with our patch, in loss, gradients and
metrics; `grpo_loss` with the preset's numbers of TRL; and from a rollout to a batch."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trl", minversion="1.16.0")

from trl import GRPOTrainer

from grpo_kernels import Cispo, LogitTransform, Objective, TokenBatch, group_advantages, grpo_loss, linear_logprobs
from grpo_kernels.integrations.trl import patch
from grpo_kernels.rewards.advantages import NUMERICS
from grpo_kernels.rewards.corrections import importance_weights, without_truncated
from support import trl_cases
from support.pairs import label, pairs
from support.trl_cases import EOS, LENGTH, PAD
from support.trl_family import CLIPPED, LOSS_TYPES, TEMPERATURE, Case, Data, Result, assert_same, different, run

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
    ids, prompt = (torch.randint(2, VOCAB, (8, n), generator=g) for n in (LENGTH, PROMPT))
    mask = torch.arange(LENGTH) < torch.tensor([9, 4, 7, 0, 9, 12, 6, 8])[:, None]
    prompt[1, 0] = prompt[5, :2] = PAD
    with torch.no_grad():
        attention = torch.cat([prompt != PAD, mask], 1).long()
        states = trainer.model.model(input_ids=torch.cat([prompt, ids], 1), attention_mask=attention).last_hidden_state
    hidden, head = states[:, PROMPT - 1 : -1].clone(), trainer.model.lm_head.weight.detach().clone()
    logps = torch.log_softmax(hidden @ head.T / TEMPERATURE, -1).gather(2, ids[..., None])[..., 0]
    shift = torch.tensor([0.32, -0.35, -0.3, 0.1, 0.5, 0.03, 0.05, 0.02])[:, None]
    old, ref = (logps - s - w * torch.randn(8, LENGTH, generator=g) for s, w in ((shift, 0.15), (0.2, 0.5)))
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
    if name in ("token weights", "rejected tokens", "together"):
        w = torch.exp(0.3 * torch.randn(shape, generator=g)) * (0.9 if name == "rejected tokens" else 1)
        w = w.clamp(max=1.35) if case.loss_type == "vespo" and name != "rejected tokens" else torch.where(w > 1.35, 0.0, w)
        data = replace(
            data, weights=w if name == "rejected tokens" and case.loss_type != "vespo" else torch.where(data.mask, w, 1.0)
        )
    if name == "sequence weights" and case.loss_type != "vespo":  # which TRL refuses
        data = replace(data, weights=torch.tensor([0.7, 1.6, 0.0, 1.0, 2.2, 0.9, 1.1, 1.4])[:, None])
    if name == "advantages per token":
        data = replace(data, advantages=data.advantages[:, None] + 0.5 * torch.randn(shape, generator=g))
    if name == "on-policy":
        data = replace(data, old=None)
    if (
        name == "far from the old policy" and case.loss_type == "vespo"
    ):  # beyond its clamps: tokens at 20, sequences at log 1e-8 and 20
        far = torch.zeros(shape)
        far[0, :2], far[2], far[4] = torch.tensor([25.0, -20.5]), 5.0, -5.0
        data = replace(data, old=data.old + far)
    if name == "truncated completions":
        data = replace(data, mask=data.mask & ~torch.isin(torch.arange(8), torch.tensor([0, 7]))[:, None])
    changes = {"entropy quantile": {"share": 0.4}, "off-policy mask": {"off_policy": 0.25}, "entropy bonus": {"coef": 0.5}}
    every = {key: value for change in changes.values() for key, value in change.items()}
    return replace(case, **changes.get(name, every if name == "together" else {})), data


OPTIONS = ("nothing else", "on-policy", "far from the old policy", "tool mask", "truncated completions", "entropy quantile", "off-policy mask",
           "token weights", "rejected tokens", "sequence weights", "entropy bonus", "advantages per token", "together")  # fmt: skip


class Ranks:
    """An accelerator that says there are more processes; only TRL's normaliser asks."""

    def __init__(self, accelerator, num_processes):
        self._accelerator, self.num_processes = accelerator, num_processes

    def __getattr__(self, name):
        return getattr(self._accelerator, name)


def configure(trainer, case, counts, monkeypatch, **more):
    """Sets the attributes that `GRPOTrainer.__init__` would set from its arguments; a name of TRL's arguments goes there."""
    settings = {
        "accelerator": Ranks(trainer.accelerator, counts[3]), "loss_type": case.loss_type, "importance_sampling_level": case.level, "beta": case.beta,
        "epsilon_low": case.epsilons[0], "epsilon_high": case.cap if case.loss_type == "cispo" else case.epsilons[1],
        "top_entropy_quantile": case.share, "off_policy_mask_threshold": case.off_policy, "entropy_coef": case.coef,
        "_entropy_bonus_enabled": case.coef != 0, "current_gradient_accumulation_steps": counts[1], **more,
    }  # fmt: skip
    on_arguments = {
        "delta": case.delta, "use_bias_correction_kl": case.corrected, "steps_per_generation": counts[2], **case.constants,
    }  # fmt: skip
    for owner, named in ((trainer, settings), (trainer.args, on_arguments)):
        for name, value in named.items():
            monkeypatch.setattr(owner, name, value, raising=False)


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


def trls(trainer, case, data, counts=COUNTS["usual"], method=None, poison=None):
    """What the trainer's method (or TRL's class) gives. Gradients are taken at the last hidden states, below the fused head.
    `poison`: bool [B, prompt + T], the states that are NaN."""
    captured = []

    def keep(module, args, output):
        captured.append(output)
        return output if poison is None else output.masked_fill(poison[..., None], torch.nan)

    hook = trainer.model.model.norm.register_forward_hook(keep)
    with pytest.MonkeyPatch.context() as monkeypatch:
        configure(trainer, case, counts, monkeypatch, use_vllm=data.weights is not None)
        trainer.model.train(counts[0])
        given = trainer.model, inputs_of(case, data)
        loss = method(trainer, *given) if method else trainer._compute_loss(*given)
    hook.remove()
    d_hidden, d_head = torch.autograd.grad(loss, [captured[0], trainer.model.lm_head.weight])
    metrics = {name: values[-1] for name, values in trainer._metrics["train" if counts[0] else "eval"].items()}
    trainer._metrics["train"].clear(), trainer._metrics["eval"].clear()
    rows = slice(PROMPT - 1, -1)
    assert not d_hidden[:, : rows.start].any() and not d_hidden[:, -1].any()
    return Result(loss.detach(), [d_hidden[:, rows], d_head], metrics)


OWN = GRPOTrainer._compute_loss


def mine(case, data, objective, normalizer):
    """`grpo_loss` of an objective."""

    def loss(leaves):
        batch = TokenBatch(
            data.ids, data.advantages, mask=data.mask, old_logps=data.old, ref_logps=data.ref if case.beta else None
        )
        out = grpo_loss(leaves[0] @ leaves[1].T, batch, objective, transform=LogitTransform(TEMPERATURE), normalizer=normalizer)
        return out.loss, {name: float(x) for name, x in out.metrics.items()}

    return run([data.hidden, data.head], loss)


@pytest.fixture
def patched(trainer):
    fused = patch(trainer, strict=True)
    yield fused
    fused.undo()


def same_numbers(got, want, *without):
    got, want = ({name: x for name, x in found.items() if name not in without} for found in (got, want))
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6, nan_ok=True) and [*got] == [*want]


GRID = pairs(
    option=OPTIONS, loss_type=LOSS_TYPES, counts=COUNTS, level=("token", "sequence"), kl=("none", "plain", "ratio"), delta=(None, 1.4, 1.1),
)  # fmt: skip


@parametrize("row", GRID, ids=label)
def test_micro_batch(trainer, plain, patched, row):
    """TRL's method and its trainer with our patch: the same loss, gradients and metrics."""
    beta, delta = 0.0 if row["kl"] == "none" else 0.3, row["delta"] if row["loss_type"] in CLIPPED else None
    case, data = with_option(row["option"], Case(row["loss_type"], row["level"], beta, row["kl"] == "ratio", delta), plain)
    counts = COUNTS[row["counts"]]
    if case.loss_type == "vespo" and case.level == "sequence" and case.corrected:
        # TRL, which warns of it, then weighs VESPO's KL by a mean ratio that its loss does not have. Ours by the token's.
        with pytest.raises(RuntimeError, match="left to TRL's own code: VESPO's KL"):
            trls(trainer, case, data, counts)
        return
    theirs, fused = trls(trainer, case, data, counts, OWN), trls(trainer, case, data, counts)
    assert patched.counts == {"fused": 1}
    if row["option"] == "rejected tokens" and case.loss_type == "vespo":
        # Its weight is 1e-8 in TRL, which silences the other tokens of the sequence in both.
        assert float(fused.gradients[0][(data.weights == 0).any(1)].abs().max()) < 1e-3
    assert_same(fused, theirs, "patched")
    same_numbers(fused.metrics, theirs.metrics)


@parametrize("loss_type", LOSS_TYPES)
def test_the_grid_is_not_trivial(trainer, plain, loss_type):
    """Each option changes TRL's gradient, and a good share of the tokens is clipped."""

    def of(case, data=plain):
        return trls(trainer, case, data, method=OWN)

    base = of(Case(loss_type))
    for option in OPTIONS[1:]:
        case, data = with_option(option, Case(loss_type), plain)
        same = (loss_type == "vespo") == (option == "sequence weights") and option in (
            "sequence weights",
            "far from the old policy",
        )
        assert different(of(case, data), base) != same, option
    kl = of(Case(loss_type, beta=0.3))
    assert different(kl, base) and different(kl, of(Case(loss_type, beta=0.3, corrected=True)))
    if loss_type in CLIPPED:
        assert all(0.04 < base.metrics[f"clip_ratio/{name}"] < 0.4 for name in ("low_mean", "high_mean"))
        assert different(of(Case(loss_type, delta=1.4)), base)


def normalizer_of(case, data, accumulation=2, per_generation=4, processes=2):
    """TRL's denominators as `normalizer=`."""
    if case.loss_type in ("dapo", "cispo", "vespo"):
        return items_of(data) / processes * accumulation / per_generation
    if case.loss_type == "bnpo":
        return max(float(data.mask.sum()), 1.0) * accumulation
    return 8 * accumulation * (LENGTH if case.loss_type == "dr_grpo" else 1)


@parametrize("loss_type", [*LOSS_TYPES, "gspo"])
def test_presets_have_trls_defaults(trainer, plain, loss_type):
    """Nothing passed but beta, whose KL TRL corrects by default, and an entropy bonus; metrics of the same meaning. CISPO's cap
    is apart, see below."""
    args, level = trainer.args, "sequence" if loss_type in ("luspo", "gspo") else "token"  # the one that TRL advises
    vespo = args.vespo_k_pos, args.vespo_lambda_pos, args.vespo_k_neg, args.vespo_lambda_neg
    case = Case(
        "grpo" if loss_type == "gspo" else loss_type, level, 0.3, args.use_bias_correction_kl, args.delta,
        (trainer.epsilon_low, trainer.epsilon_high), 5.0, (args.sapo_temperature_pos, args.sapo_temperature_neg), vespo, coef=0.2,
    )  # fmt: skip
    got = mine(case, plain, Objective.preset(loss_type, numerics="trl", beta=0.3, entropy_coef=0.1), normalizer_of(case, plain))
    want = trls(trainer, case, plain)
    assert_same(got, want, loss_type)
    names = {"entropy": "entropy", "kl": "kl"}
    if level == "token" and loss_type in CLIPPED:
        names |= {"clip_low": "clip_ratio/low_mean", "clip_high": "clip_ratio/high_mean"}
    if loss_type == "cispo":
        names["clip_high"] = "cispo_clip_ratio"
    same_numbers({name: got.metrics[name] for name in names}, {name: want.metrics[theirs] for name, theirs in names.items()})


@parametrize("loss_type", LOSS_TYPES)
def test_nothing_to_train_on(trainer, plain, patched, loss_type):
    """A micro-batch of masked completions is a differentiable 0: a rank without a graph would leave the others waiting."""
    for changes in ({}, {"share": 0.4, "coef": 0.2}, {"off_policy": 0.25}):
        got = trls(trainer, Case(loss_type, beta=0.3, **changes), replace(plain, mask=plain.mask & False))
        assert got.loss == 0 and not any(x.any() for x in got.gradients), changes


def test_these_are_all_loss_types_of_trl():
    """A loss type that a new TRL adds is noticed here."""
    conditions = re.findall(r"self\.loss_type (?:==|!=|in) (\[[^\]]*\]|\"\w+\")", inspect.getsource(OWN))
    assert len(conditions) > 8 and {*re.findall(r'"(\w+)"', " ".join(conditions))} == {*LOSS_TYPES}


@parametrize("name, value", [("loss_type", "ppo2"), ("level", "group")])
def test_an_unknown_option_is_trls_error(trainer, plain, patched, name, value):
    """Which a patch that is not strict leaves to TRL, with a warning."""
    patched.strict = False
    with pytest.raises(ValueError, match="Unknown"), pytest.warns(UserWarning, match=value):
        trls(trainer, replace(Case(), **{name: value}), plain)


def test_cispo_without_epsilon_high(trainer, plain):
    """TRL's defect: `epsilon_high` is CISPO's cap, an absolute ratio, and defaults to `epsilon`. So all ratios are 0.2."""
    assert trainer.epsilon_high == 0.2 and Objective.preset("cispo", numerics="trl").surrogate == Cispo(5.0)
    low = trls(trainer, Case("cispo", cap=trainer.epsilon_high), plain)
    of_cap = {
        c: mine(Case(), plain, Objective.preset("cispo", numerics="trl", surrogate=Cispo(c)), normalizer_of(Case(), plain))
        for c in (0.2, 5.0)
    }
    assert_same(low, of_cap[0.2], "TRL")
    assert different(low, of_cap[5.0], 0.5)


# ---- what the patch does beside the loss


def test_rows_that_are_projected(trainer, plain, patched, monkeypatch):
    """States of prompts, padding and tool tokens may be NaN: nobody reads them. With skip_inactive nor are those of advantage 0,
    and nothing in TRL's log changes but the entropy, which is the mean of the others."""
    case, data = with_option("tool mask", Case(), plain)
    unread, idle = (
        torch.nn.functional.pad(~x, (PROMPT - 1, 1), value=True)
        for x in (data.mask, data.mask & (data.advantages != 0)[:, None])
    )
    theirs = trls(trainer, case, data, method=OWN)
    assert_same(trls(trainer, case, data, poison=unread), theirs, "poisoned")
    assert int(idle.sum()) > int(unread.sum())
    monkeypatch.setattr(patched, "skip_inactive", True)
    skipped = trls(trainer, case, data, poison=idle)
    assert_same(skipped, theirs, "skipped")
    same_numbers(skipped.metrics, theirs.metrics, "entropy")
    assert math.isfinite(skipped.metrics["entropy"]) and abs(skipped.metrics["entropy"] - theirs.metrics["entropy"]) > 1e-5
    easy = replace(
        data, advantages=torch.zeros(8)
    )  # where no answer has an advantage, as of a prompt that is too easy, none is skipped
    for counts in (COUNTS["usual"], COUNTS["alone"]):
        got, want = (trls(trainer, case, easy, counts, method) for method in (None, OWN))
        same_numbers(got.metrics, want.metrics)
        assert got.loss == 0 and want.metrics["entropy"] > 1
    case = replace(case, share=0.4)  # two visits: nothing can be skipped
    same_numbers(trls(trainer, case, data).metrics, trls(trainer, case, data, method=OWN).metrics)


def test_columns_of_the_head_are_drawn(trainer, plain, patched, monkeypatch):
    """Values are those of all columns; the gradient has other columns in each micro-batch."""
    dense = trls(trainer, Case(), plain)
    monkeypatch.setattr(patched, "sparse_step", 1 / 16)
    one, other = (trls(trainer, Case(), plain) for _ in range(2))
    assert one.loss == other.loss == pytest.approx(float(dense.loss), rel=1e-5)
    apart = [float((one.gradients[1] - x.gradients[1]).norm() / dense.gradients[1].norm()) for x in (dense, other)]
    assert min(apart) > 0.01 and apart[0] < 1


ARITHMETIC = {
    "loss": (lambda loss: loss + 0.01, "fused loss, "), "denominator": (lambda loss: 2 * loss, "fused loss"),
    "slopes": (lambda loss: loss + 0.02 * (loss - loss.detach()), "gradient of the fused loss with respect to the log-probs"),
    "nothing": (lambda loss: loss, None),
}  # fmt: skip


@parametrize("loss_type", LOSS_TYPES)
@parametrize("what", ARITHMETIC)
def test_strict_compares_with_trls_arithmetic(trainer, plain, monkeypatch, what, loss_type):
    """After a change in TRL, at the first step: of a factor too, on-policy with advantages that add up to 0, where the loss is 0
    whatever it is divided by."""
    change, message = ARITHMETIC[what]
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda *args: change(OWN(*args)))
    data = replace(plain, advantages=torch.ones(8) - 2 * (torch.arange(8) % 2), old=None, mask=plain.mask[:1].expand(8, -1))
    fused = patch(trainer, strict=True)
    try:
        if message is None:
            trls(trainer, Case(loss_type), data)
        else:
            with pytest.raises(RuntimeError, match=f"strict=True, but the ({message}|gradient)"):
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
    with pytest.raises(RuntimeError, match="its own to nan"):
        trls(trainer, Case(), replace(plain, old=plain.old.index_fill(1, torch.tensor([0]), torch.nan)))


def test_what_is_left_to_trl_is_counted_and_warns_once(trainer, plain, recwarn):
    fused, case = patch(trainer), Case("vespo", "sequence", 0.3, corrected=True)
    got = [trls(trainer, case, plain) for _ in range(2)]
    assert_same(got[0], trls(trainer, case, plain, method=OWN), "left to TRL", 0.0)
    assert got[0].loss == got[1].loss and fused.counts == {"TRL: VESPO's KL weighted by the ratio of the sequence": 2}
    assert len([w for w in recwarn if "left to TRL's own code: VESPO's KL" in str(w.message)]) == 1
    fused.undo()


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

    ids, prompt, completion = (
        padded(completions, PAD),
        torch.full((8, 2), 5),
        padded([[1] * len(row) for row in completions], 0),
    )
    if mask_truncated:
        completion = without_truncated(completion, torch.tensor([row[-1] == EOS for row in completions])).long()
    mask = (completion * padded(tools, 1)).bool()
    with torch.no_grad():
        attention = torch.cat([torch.ones_like(prompt), completion], 1)
        states = trainer.model.model(input_ids=torch.cat([prompt, ids], 1), attention_mask=attention).last_hidden_state[:, 1:-1]
        old, _ = linear_logprobs(states, trainer.model.lm_head.weight, ids, mask=mask, transform=LogitTransform(TEMPERATURE))
    sampler = old + 0.15 * torch.randn(old.shape, generator=g)
    sampler[7] -= 0.4  # a product of weights beyond 3
    sampler[0, 5] = sampler[6, 0] = math.nan
    scored = [[None if x != x else x for x in row[: len(c)].tolist()] for row, c in zip(sampler, completions, strict=True)]
    returned = {"prompt_ids": prompt.tolist(), "completion_ids": completions, "logprobs": scored, "env_mask": tools}
    configure(
        trainer, Case(), COUNTS["alone"], monkeypatch, _last_loaded_step=trainer.state.global_step, use_vllm=True,
        rollout_func=lambda prompts, trainer: returned, mask_truncated_completions=mask_truncated, vllm_importance_sampling_mode=mode,
        reward_funcs=[lambda completions, **_: [None if r != r else r for r in rewards]],
        vllm_importance_sampling_clip_min=bounds.get("low"), vllm_importance_sampling_clip_max=bounds["high"],
    )  # fmt: skip
    inputs = trainer._generate_and_score_completions([{"prompt": "ab"}] * 8)
    trainer._metrics["train"].clear()
    advantages = group_advantages(torch.tensor(rewards), group_size=4, **NUMERICS["trl"])
    batch = TokenBatch(ids, advantages, mask=mask, old_logps=old, sampler_logps=sampler)
    wanted = inputs["importance_sampling_ratio"].expand(ids.shape) * mask
    assert int(inputs["num_items_in_batch"]) == int(mask.sum())
    assert_close(advantages, inputs["advantages"])
    assert_close(old, inputs["old_per_token_logps"] * mask, rtol=1e-5, atol=1e-5)
    assert_close(importance_weights(batch, level=level, mode=kind, **bounds), wanted, rtol=1e-5, atol=1e-5)
    edges = torch.tensor([0.0, bounds["high"], bounds.get("low", 0.0)])
    assert 0.05 < torch.isin(wanted[mask], edges).float().mean() < 0.95
