"""TRL's loss of one micro-batch: `GRPOTrainer._compute_loss` itself and the same trainer with our patch, in loss, gradients and
metrics; `grpo_loss` with the preset's numbers of TRL; and from a rollout to a batch."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trl", minversion="1.16.0")

from trl import GRPOTrainer

from grpo_kernels import Cispo, LogitTransform, Objective, TokenBatch, group_advantages, grpo_loss
from grpo_kernels.integrations.trl import patch
from grpo_kernels.rewards.advantages import NUMERICS
from grpo_kernels.rewards.corrections import importance_weights, without_truncated
from support import trl_cases
from support.pairs import label, pairs
from support.trainers import CLIPPED, CONSTANTS, LOSS_TYPES, assert_same, different, value_and_gradient
from support.trl_cases import EOS, LENGTH, PAD

parametrize = pytest.mark.parametrize

PROMPT, VOCAB, TEMPERATURE = 3, trl_cases.SIZES["vocab_size"], 0.9
#: Training, accumulation steps, steps per generation, processes.
COUNTS = {"usual": (True, 2, 4, 2), "alone": (True, 1, 1, 1), "cut short": (True, 3, 6, 1), "evaluation": (False, 3, 6, 4)}
OWN = GRPOTrainer._compute_loss
#: What TRL reads from its arguments; all else from the trainer.
ON_ARGUMENTS = ("delta", "use_bias_correction_kl", "steps_per_generation", *CONSTANTS)


def case_of(loss_type="dapo", **changes):
    """TRL's options under its names, with numbers that are no defaults."""
    return CONSTANTS | {
        "loss_type": loss_type, "importance_sampling_level": "token", "beta": 0.0, "use_bias_correction_kl": False, "delta": None,
        "epsilon_low": 0.2, "epsilon_high": 1.25 if loss_type == "cispo" else 0.27, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "entropy_coef": 0.0,
    } | changes  # fmt: skip


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    made = trl_cases.make_trainer(trl_cases.save_model(folder / "model", tie_word_embeddings=False), folder)
    made.current_gradient_accumulation_steps = 1  # which its training loop would set
    return made


@pytest.fixture(scope="module")
def leaves(trainer):
    """Hidden states, and the head."""
    states = torch.randn(8, PROMPT + LENGTH, trl_cases.SIZES["hidden_size"], generator=torch.Generator().manual_seed(3))
    return [states, trainer.model.lm_head.weight.detach().clone()]


@pytest.fixture(scope="module")
def plain(leaves):
    """TRL's inputs: sequences of unequal length, one fully masked, one with advantage 0; old, reference and sampler away from the
    policy, in steps that differ from sequence to sequence so that mean ratios leave the clip range as well."""
    g = torch.Generator().manual_seed(3)
    ids, prompt = (torch.randint(2, VOCAB, (8, n), generator=g) for n in (LENGTH, PROMPT))
    mask = torch.arange(LENGTH) < torch.tensor([9, 4, 7, 0, 9, 12, 6, 8])[:, None]
    prompt[1, 0] = prompt[5, :2] = PAD
    logps = torch.log_softmax(leaves[0][:, PROMPT - 1 : -1] @ leaves[1].T / TEMPERATURE, -1).gather(2, ids[..., None])[..., 0]
    shift = torch.tensor([0.32, -0.35, -0.3, 0.1, 0.5, 0.03, 0.05, 0.02])[:, None]
    old, ref = (logps - s - w * torch.randn(8, LENGTH, generator=g) for s, w in ((shift, 0.15), (0.2, 0.5)))
    sampler = old + 0.1 * torch.randn(8, LENGTH, generator=g)
    sampler[4] += 0.4  # within the bound of the off-policy mask,
    sampler[7] += 0.9  # and beyond it
    sampler[0, 1] = sampler[2, 3] = math.nan  # not scored
    return {
        "prompt_ids": prompt, "prompt_mask": (prompt != PAD).long(), "completion_ids": ids, "completion_mask": mask.long(),
        "advantages": torch.tensor([1.2, 0.8, -0.7, 0.9, -1.1, 0.6, 0.0, -0.4]), "sampling_per_token_logps": sampler, "old_per_token_logps": old,
        "ref_per_token_logps": ref,
    }  # fmt: skip


TOOLS = torch.ones(8, LENGTH, dtype=torch.int64)
TOOLS[0, 2:5] = TOOLS[2, 1] = TOOLS[7, 4:] = 0
OPTIONS = ("nothing else", "on-policy", "far from the old policy", "tool mask", "truncated completions", "entropy quantile", "off-policy mask",
           "token weights", "rejected tokens", "sequence weights", "entropy bonus", "advantages per token", "together")  # fmt: skip
CHANGES = {"entropy quantile": {"top_entropy_quantile": 0.4}, "off-policy mask": {"off_policy_mask_threshold": 0.25},
           "entropy bonus": {"entropy_coef": 0.5}}  # fmt: skip
CHANGES["together"] = CHANGES["entropy quantile"] | CHANGES["off-policy mask"] | CHANGES["entropy bonus"]


def with_option(name, case, inputs):
    vespo, shape, g = case["loss_type"] == "vespo", inputs["completion_ids"].shape, torch.Generator().manual_seed(4)
    far = torch.zeros(shape)  # beyond VESPO's clamps: tokens at 20, sequences at log 1e-8 and 20
    far[0, :2], far[2], far[4] = torch.tensor([25.0, -20.5]), 5.0, -5.0
    w = torch.exp(0.3 * torch.randn(shape, generator=g))
    clipped = w.clamp(max=1.35) if vespo else torch.where(w > 1.35, 0.0, w)
    rejected = torch.where(0.9 * w > 1.35, 0.0, 0.9 * w)
    mask, spread = inputs["completion_mask"], 0.5 * torch.randn(shape, generator=g)
    if vespo:  # TRL's weights of masked tokens count
        rejected = torch.where(mask != 0, rejected, 1.0)
    changes = {
        "on-policy": {"old_per_token_logps": None}, "far from the old policy": {"old_per_token_logps": inputs["old_per_token_logps"] + far * vespo},
        "tool mask": {"tool_mask": TOOLS}, "token weights": {"importance_sampling_ratio": torch.where(mask != 0, clipped, 1.0)},
        "rejected tokens": {"importance_sampling_ratio": rejected}, "advantages per token": {"advantages": inputs["advantages"][:, None] + spread},
        "truncated completions": {"completion_mask": mask * ~torch.isin(torch.arange(8), torch.tensor([0, 7]))[:, None]},
        # which TRL refuses to VESPO
        "sequence weights": {} if vespo else {"importance_sampling_ratio": torch.tensor([0.7, 1.6, 0.0, 1.0, 2.2, 0.9, 1.1, 1.4])[:, None]},
    }  # fmt: skip
    both = torch.where(mask * TOOLS != 0, clipped, 1.0)
    changes["together"] = {"tool_mask": TOOLS, "importance_sampling_ratio": both}
    return case | CHANGES.get(name, {}), inputs | changes.get(name, {})


class Ranks:
    """An accelerator that says there are more processes; only TRL's normaliser asks."""

    def __init__(self, accelerator, num_processes):
        self._accelerator, self.num_processes = accelerator, num_processes

    def __getattr__(self, name):
        return getattr(self._accelerator, name)


def configure(trainer, case, counts, monkeypatch, **more):
    """Sets the attributes that `GRPOTrainer.__init__` would set from its arguments; a name of TRL's arguments goes there."""
    settings = case | {
        "accelerator": Ranks(trainer.accelerator, counts[3]), "_entropy_bonus_enabled": case["entropy_coef"] != 0,
        "current_gradient_accumulation_steps": counts[1], "steps_per_generation": counts[2],
    } | more  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setattr(trainer.args if name in ON_ARGUMENTS else trainer, name, value, raising=False)


def items_of(inputs):
    """Of a generation batch, of which this is one part."""
    return 11 + 8 * int((inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum())


def trls(trainer, leaves, case, inputs, counts=COUNTS["usual"], method=None, unread=None):
    """((loss, metrics), gradients) of the trainer's method, or of TRL's class, from the hidden states in `leaves`. `unread`: bool
    [B, T], of completions those whose states are NaN, as are those of prompts then."""
    states, poison = leaves[0].clone().requires_grad_(), torch.zeros(8, PROMPT + LENGTH, 1, dtype=torch.bool)
    if unread is not None:
        poison = torch.nn.functional.pad(unread, (PROMPT - 1, 1), value=True)[..., None]
    given = {name: x for name, x in inputs.items() if x is not None and (case["beta"] or name != "ref_per_token_logps")}
    with pytest.MonkeyPatch.context() as monkeypatch:
        configure(trainer, case, counts, monkeypatch, use_vllm="importance_sampling_ratio" in inputs)
        monkeypatch.setattr(trainer.model.model.norm, "forward", lambda _: states.masked_fill(poison, torch.nan))
        trainer.model.train(counts[0])
        call = trainer.model, given | {"num_items_in_batch": torch.tensor(items_of(inputs))}
        loss = method(trainer, *call) if method else trainer._compute_loss(*call)
    gradients = [x.double() for x in torch.autograd.grad(loss, [states, trainer.model.lm_head.weight])]
    metrics = {name: values[-1] for name, values in trainer._metrics["train" if counts[0] else "eval"].items()}
    trainer._metrics["train"].clear(), trainer._metrics["eval"].clear()
    return (loss.detach(), metrics), gradients


@pytest.fixture
def run(trainer, leaves):
    return lambda *given, **options: trls(trainer, leaves, *given, **options)


@pytest.fixture
def patched(trainer):
    fused = patch(trainer, strict=True)
    yield fused
    fused.undo()


def same(got, want, *without):
    """But for metrics that are named."""
    assert_same(got, want, 2e-4)
    same_metrics(got, want, *without)


def same_metrics(got, want, *without):
    got, want = ({name: x for name, x in found[0][1].items() if name not in without} for found in (got, want))
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6, nan_ok=True) and [*got] == [*want]


GRID = pairs(
    option=OPTIONS, loss_type=LOSS_TYPES, counts=COUNTS, level=("token", "sequence"), kl=("none", "plain", "ratio"), delta=(None, 1.4, 1.1),
)  # fmt: skip


@parametrize("row", GRID, ids=label)
def test_micro_batch(run, plain, patched, row):
    """TRL's method and its trainer with our patch: the same loss, gradients and metrics."""
    case = case_of(
        row["loss_type"], importance_sampling_level=row["level"], beta=0.0 if row["kl"] == "none" else 0.3,
        use_bias_correction_kl=row["kl"] == "ratio", delta=row["delta"] if row["loss_type"] in CLIPPED else None,
    )  # fmt: skip
    case, data = with_option(row["option"], case, plain)
    if row["loss_type"] == "vespo" and row["level"] == "sequence" and row["kl"] == "ratio":
        # TRL, which warns of it, then weighs VESPO's KL by a mean ratio that its loss does not have. Ours by the token's.
        with pytest.raises(RuntimeError, match="left to TRL's own code: VESPO's KL"):
            run(case, data)
        return
    theirs, fused = (run(case, data, COUNTS[row["counts"]], method) for method in (OWN, None))
    assert patched.counts == {"fused": 1}
    if row["option"] == "rejected tokens" and row["loss_type"] == "vespo":
        # Its weight is 1e-8 in TRL, which silences the other tokens of the sequence in both.
        assert float(fused[1][0][(data["importance_sampling_ratio"] == 0).any(1)].abs().max()) < 1e-3
    same(fused, theirs)


def mine(leaves, case, data, objective):
    """`grpo_loss` of an objective, by TRL's denominators as normalizer=."""
    mask = data["completion_mask"].bool()
    by_items = items_of(data) / 2 * 2 / 4
    D = {"dapo": by_items, "cispo": by_items, "vespo": by_items, "bnpo": float(mask.sum()) * 2, "dr_grpo": 8 * 2 * LENGTH}.get(
        case["loss_type"], 8 * 2
    )

    def loss(states, head):
        batch = TokenBatch(
            data["completion_ids"], data["advantages"], mask=mask, old_logps=data["old_per_token_logps"],
            ref_logps=data["ref_per_token_logps"] if case["beta"] else None,
        )  # fmt: skip
        logits = states[:, PROMPT - 1 : -1] @ head.T
        out = grpo_loss(logits, batch, objective, transform=LogitTransform(TEMPERATURE), normalizer=D)
        return out.loss, out.metrics

    return value_and_gradient(loss, leaves)


@parametrize("loss_type", [*LOSS_TYPES, "gspo"])
def test_presets_have_trls_defaults(trainer, leaves, run, plain, loss_type):
    """Nothing passed but beta, whose KL TRL corrects by default, and an entropy bonus; metrics of the same meaning. CISPO's cap
    is apart, see below."""
    level = "sequence" if loss_type in ("luspo", "gspo") else "token"  # the one that TRL advises
    names = ("use_bias_correction_kl", "delta", "epsilon_low", "epsilon_high", *CONSTANTS)
    own = {name: getattr(trainer.args if name in ON_ARGUMENTS else trainer, name) for name in names}
    case = case_of("grpo" if loss_type == "gspo" else loss_type) | own | {"beta": 0.3, "entropy_coef": 0.2}
    case |= {"importance_sampling_level": level} | ({"epsilon_high": 5.0} if loss_type == "cispo" else {})
    objective = Objective.preset(loss_type, numerics="trl", beta=0.3, entropy_coef=0.1)
    got, want = mine(leaves, case, plain, objective), run(case, plain)
    assert_same(got, want, 2e-4)
    names = {"entropy": "entropy", "kl": "kl"}
    if level == "token" and loss_type in CLIPPED:
        names |= {"clip_low": "clip_ratio/low_mean", "clip_high": "clip_ratio/high_mean"}
    if loss_type == "cispo":
        names["clip_high"] = "cispo_clip_ratio"
    for name, theirs in names.items():
        assert float(got[0][1][name]) == pytest.approx(want[0][1][theirs], rel=1e-5, abs=1e-6)


@parametrize("loss_type", LOSS_TYPES)
def test_nothing_to_train_on(run, plain, patched, loss_type):
    """A micro-batch of masked completions is a differentiable 0: a rank without a graph would leave the others waiting."""
    for changes in ({}, CHANGES["entropy quantile"] | {"entropy_coef": 0.2}, CHANGES["off-policy mask"]):
        (loss, _), gradients = run(
            case_of(loss_type, beta=0.3, **changes), plain | {"completion_mask": 0 * plain["completion_mask"]}
        )
        assert loss == 0 and not any(x.any() for x in gradients), changes


def test_these_are_all_loss_types_of_trl():
    """A loss type that a new TRL adds is noticed here."""
    conditions = re.findall(r"self\.loss_type (?:==|!=|in) (\[[^\]]*\]|\"\w+\")", inspect.getsource(OWN))
    assert len(conditions) > 8 and {*re.findall(r'"(\w+)"', " ".join(conditions))} == {*LOSS_TYPES}


@parametrize("name, value", [("loss_type", "ppo2"), ("importance_sampling_level", "group")])
def test_an_unknown_option_is_trls_error(run, plain, patched, name, value):
    """Which a patch that is not strict leaves to TRL, with a warning."""
    patched.strict = False
    with pytest.raises(ValueError, match="Unknown"), pytest.warns(UserWarning, match=value):
        run(case_of() | {name: value}, plain)


def test_cispo_without_epsilon_high(trainer, leaves, run, plain):
    """TRL's defect: `epsilon_high` is CISPO's cap, an absolute ratio, and defaults to `epsilon`. So all ratios are 0.2."""
    assert trainer.epsilon_high == 0.2 and Objective.preset("cispo", numerics="trl").surrogate == Cispo(5.0)
    low, capped = run(case_of("cispo", epsilon_high=trainer.epsilon_high), plain), {}
    for c in (0.2, 5.0):
        capped[c] = mine(leaves, case_of(), plain, Objective.preset("cispo", numerics="trl", surrogate=Cispo(c)))
    assert_same(low, capped[0.2], 2e-4)
    assert different(low, capped[5.0], 0.5)


# ---- what the patch does beside the loss


def test_rows_that_are_projected(run, plain, patched, monkeypatch):
    """States of prompts, padding and tool tokens may be NaN: nobody reads them. With skip_inactive nor are those of advantage 0,
    and nothing in TRL's log changes but the entropy, which is the mean of the others."""
    case, data = with_option("tool mask", case_of(), plain)
    mask = (data["completion_mask"] * TOOLS).bool()
    idle, theirs = ~(mask & (data["advantages"] != 0)[:, None]), run(case, data, method=OWN)
    assert_same(run(case, data, unread=~mask), theirs, 2e-4)
    assert int(idle.sum()) > int((~mask).sum())
    monkeypatch.setattr(patched, "skip_inactive", True)
    skipped = run(case, data, unread=idle)
    same(skipped, theirs, "entropy")
    assert math.isfinite(skipped[0][1]["entropy"]) and abs(skipped[0][1]["entropy"] - theirs[0][1]["entropy"]) > 1e-5
    # Where no answer has an advantage, as of a prompt that is too easy, none is skipped; nor where there are two visits.
    for given in ((case, data | {"advantages": torch.zeros(8)}), (case | CHANGES["entropy quantile"], data)):
        got, want = (run(*given, COUNTS["alone"], method) for method in (None, OWN))
        same_metrics(got, want)
        assert want[0][1]["entropy"] > 1


def test_columns_of_the_head_are_drawn(run, plain, patched, monkeypatch):
    """Values are those of all columns; the gradient has other columns in each micro-batch."""
    dense = run(case_of(), plain)
    monkeypatch.setattr(patched, "sparse_step", 1 / 16)
    one, other = (run(case_of(), plain) for _ in range(2))
    assert one[0][0] == other[0][0] == pytest.approx(float(dense[0][0]), rel=1e-5)
    apart = [float((one[1][1] - x[1][1]).norm() / dense[1][1].norm()) for x in (dense, other)]
    assert min(apart) > 0.01 and apart[0] < 1


ARITHMETIC = {
    "loss": (lambda loss: loss + 0.01, "fused loss, "), "denominator": (lambda loss: 2 * loss, "fused loss"),
    "slopes": (lambda loss: loss + 0.02 * (loss - loss.detach()), "gradient of the fused loss with respect to the log-probs"),
    "nothing": (lambda loss: loss, None),
}  # fmt: skip


@parametrize("loss_type", LOSS_TYPES)
@parametrize("what", ARITHMETIC)
def test_strict_compares_with_trls_arithmetic(trainer, run, plain, monkeypatch, what, loss_type):
    """After a change in TRL, at the first step: of a factor too, on-policy with advantages that add up to 0, where the loss is 0
    whatever it is divided by."""
    change, message = ARITHMETIC[what]
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda *args: change(OWN(*args)))
    on_policy = {"advantages": torch.ones(8) - 2 * (torch.arange(8) % 2), "old_per_token_logps": None}
    data, fused = (
        plain | on_policy | {"completion_mask": plain["completion_mask"][:1].expand(8, -1)},
        patch(trainer, strict=True),
    )
    try:
        if message is None:
            run(case_of(loss_type), data)
        else:
            with pytest.raises(RuntimeError, match=f"strict=True, but the ({message}|gradient)"):
                run(case_of(loss_type), data)
    finally:
        fused.undo()


def test_strict_compares_small_bonuses_and_lets_no_nan_pass(trainer, run, plain, patched, monkeypatch):
    """A wrong entropy bonus is noticed even if it hardly changes the loss. A NaN in the old log-prob of a trained token is one in
    TRL's loss."""
    theirs = patched._theirs

    def doubled(*args):
        monkeypatch.setattr(trainer, "entropy_coef", 2 * trainer.entropy_coef)
        return theirs(*args)

    run(case_of(entropy_coef=1e-5), plain)
    monkeypatch.setattr(patched, "_theirs", doubled)
    with pytest.raises(RuntimeError, match="with respect to the entropies"):
        run(case_of(entropy_coef=1e-5), plain)
    monkeypatch.undo()
    spoiled = plain["old_per_token_logps"].index_fill(1, torch.tensor([0]), torch.nan)
    with pytest.raises(RuntimeError, match="its own to nan"):
        run(case_of(), plain | {"old_per_token_logps": spoiled})


def test_what_is_left_to_trl_is_counted_and_warns_once(trainer, run, plain, recwarn):
    case = case_of("vespo", importance_sampling_level="sequence", beta=0.3, use_bias_correction_kl=True)
    fused = patch(trainer)
    got = [run(case, plain) for _ in range(2)]
    assert got[0][0][0] == got[1][0][0] == run(case, plain, method=OWN)[0][0]
    assert fused.counts == {"TRL: VESPO's KL weighted by the ratio of the sequence": 2}
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
    """Nothing of TRL is replaced but the sampler, by its own hook for that: advantages, sampler weights, masks and denominator are
    its own. Ours makes them from the same rollout."""
    bounds, g, lengths = CORRECTIONS[mode], torch.Generator().manual_seed(6), [12, 4, 7, 12, 2, 6, 8, 5]
    completions, (level, kind) = [torch.randint(2, VOCAB, (n,), generator=g).tolist() for n in lengths], mode.split("_")
    finished = torch.tensor([n < 12 for n in lengths])
    for row in completions:
        row[-1] = EOS if len(row) < 12 else row[-1]  # the others were cut off
    mask, rewards = torch.arange(LENGTH) < torch.tensor(lengths)[:, None], [1.0, 0.2, 0.0, 0.5, 0.3, math.nan, 0.9, 0.1]
    returned = {"prompt_ids": [[5, 5]] * 8, "completion_ids": completions, "logprobs": [[-3.0] * n for n in lengths]}
    configure(
        trainer, case_of(), COUNTS["alone"], monkeypatch, _last_loaded_step=trainer.state.global_step, use_vllm=True,
        rollout_func=lambda prompts, trainer: returned, mask_truncated_completions=mask_truncated, vllm_importance_sampling_mode=mode,
        reward_funcs=[lambda completions, **_: [None if r != r else r for r in rewards]],
        vllm_importance_sampling_clip_min=bounds.get("low"), vllm_importance_sampling_clip_max=bounds["high"],
    )  # fmt: skip
    old = trainer._generate_and_score_completions([{"prompt": "ab"}] * 8)["old_per_token_logps"]
    sampler = old + 0.15 * torch.randn(old.shape, generator=g)
    sampler[7] -= 0.4  # a product of weights beyond 3
    sampler[0, 5] = sampler[6, 0] = math.nan
    returned["logprobs"] = [[None if x != x else x for x in row[:n].tolist()] for row, n in zip(sampler, lengths, strict=True)]
    inputs = trainer._generate_and_score_completions([{"prompt": "ab"}] * 8)
    trainer._metrics["train"].clear()
    mask = without_truncated(mask, finished) if mask_truncated else mask
    advantages = group_advantages(torch.tensor(rewards), group_size=4, **NUMERICS["trl"])
    batch = TokenBatch(inputs["completion_ids"], advantages, mask=mask, old_logps=old, sampler_logps=sampler)
    wanted = inputs["importance_sampling_ratio"].expand(mask.shape) * mask
    assert int(inputs["num_items_in_batch"]) == int(mask.sum()) and torch.equal(inputs["completion_mask"].bool(), mask)
    assert_close(advantages, inputs["advantages"])
    assert_close(importance_weights(batch, level=level, mode=kind, **bounds), wanted, rtol=1e-5, atol=1e-5)
    edges = torch.tensor([0.0, bounds["high"], bounds.get("low", 0.0)])
    assert 0.05 < torch.isin(wanted[mask], edges).float().mean() < 0.95
