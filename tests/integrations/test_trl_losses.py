"""TRL's loss of one micro-batch: `GRPOTrainer._compute_loss` itself and the same trainer with our
patch, in loss, gradients and metrics; and what the presets have of TRL's defaults.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("trl", minversion="1.16.0")

import transformers
from torch.testing import assert_close
from trl import GRPOTrainer
from trl.experimental.async_grpo import async_grpo_trainer, packing

from grpo_kernels import Cispo, Clip, Objective, linear_grpo_loss
from grpo_kernels.integrations.trl import FusedGRPOTrainer, objective_of, patch, tree_batch
from support import oracle, trl_cases
from support.pairs import label, pairs
from support.trainers import CLIPPED, CONSTANTS, LOSS_TYPES, assert_same, exact, value_and_gradient
from support.trl_cases import EOS, LENGTH, PAD

parametrize = pytest.mark.parametrize

PROMPT, VOCAB, TEMPERATURE = 3, trl_cases.SIZES["vocab_size"], 0.9
#: Training, accumulation steps, steps per generation, processes.
COUNTS = {
    "usual": (True, 2, 4, 2),
    "alone": (True, 1, 1, 1),
    "cut short": (True, 3, 6, 1),
    "evaluation": (False, 3, 6, 4),
}
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
    made = trl_cases.make_trainer(
        trl_cases.save_model(folder / "model", tie_word_embeddings=False), folder
    )
    made.current_gradient_accumulation_steps = 1  # which its training loop would set
    return made


@pytest.fixture(scope="module")
def leaves(trainer):
    """Hidden states, and the head."""
    states = torch.randn(
        8,
        PROMPT + LENGTH,
        trl_cases.SIZES["hidden_size"],
        generator=torch.Generator().manual_seed(3),
    )
    return [states, trainer.model.lm_head.weight.detach().clone()]


@pytest.fixture(scope="module")
def plain(leaves):
    """TRL's inputs: sequences of unequal length, one fully masked, one with advantage 0; old,
    reference and sampler away from the policy, in steps that differ from sequence to sequence so
    that mean ratios leave the clip range as well.
    """
    g = torch.Generator().manual_seed(3)
    ids, prompt = (torch.randint(2, VOCAB, (8, n), generator=g) for n in (LENGTH, PROMPT))
    mask = torch.arange(LENGTH) < torch.tensor([9, 4, 7, 0, 9, 12, 6, 8])[:, None]
    prompt[1, 0] = prompt[5, :2] = PAD
    logps = torch.log_softmax(leaves[0][:, PROMPT - 1 : -1] @ leaves[1].T / TEMPERATURE, -1).gather(
        2, ids[..., None]
    )[..., 0]
    shift = torch.tensor([0.32, -0.35, -0.3, 0.1, 0.5, 0.03, 0.05, 0.02])[:, None]
    old, ref = (
        logps - s - w * torch.randn(8, LENGTH, generator=g) for s, w in ((shift, 0.15), (0.2, 0.5))
    )
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
           "token weights", "rejected tokens", "sequence weights", "entropy bonus", "advantages per token", "advantages of both signs",
           "together")  # fmt: skip
CHANGES = {"entropy quantile": {"top_entropy_quantile": 0.4}, "off-policy mask": {"off_policy_mask_threshold": 0.25},
           "entropy bonus": {"entropy_coef": 0.5}}  # fmt: skip
CHANGES["advantages of both signs"] = {
    "off_policy_mask_threshold": -1.0
}  # which every sequence exceeds
CHANGES["together"] = (
    CHANGES["entropy quantile"] | CHANGES["off-policy mask"] | CHANGES["entropy bonus"]
)


def with_option(name, case, inputs):
    vespo, shape, g = (
        case["loss_type"] == "vespo",
        inputs["completion_ids"].shape,
        torch.Generator().manual_seed(4),
    )
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
        "advantages of both signs": {"advantages": spread},
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
    """Sets the attributes that `GRPOTrainer.__init__` would set from its arguments; a name of TRL's
    arguments goes there.
    """
    settings = case | {
        "accelerator": Ranks(trainer.accelerator, counts[3]), "_entropy_bonus_enabled": case["entropy_coef"] != 0,
        "current_gradient_accumulation_steps": counts[1], "steps_per_generation": counts[2],
    } | more  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setattr(
            trainer.args if name in ON_ARGUMENTS else trainer, name, value, raising=False
        )


def items_of(inputs):
    """Of a generation batch, of which this is one part."""
    return 11 + 8 * int((inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum())


def trls(trainer, leaves, case, inputs, counts=COUNTS["usual"], method=None, unread=None):
    """((loss, metrics), gradients) of the trainer's method, or of TRL's class, from the hidden
    states in `leaves`. `unread`: bool [B, T], of completions those whose states are NaN, as are
    those of prompts then.
    """
    states, poison = (
        leaves[0].clone().requires_grad_(),
        torch.zeros(8, PROMPT + LENGTH, 1, dtype=torch.bool),
    )
    if unread is not None:
        poison = torch.nn.functional.pad(unread, (PROMPT - 1, 1), value=True)[..., None]
    given = {
        name: x
        for name, x in inputs.items()
        if x is not None and (case["beta"] or name != "ref_per_token_logps")
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        configure(
            trainer, case, counts, monkeypatch, use_vllm="importance_sampling_ratio" in inputs
        )
        monkeypatch.setattr(
            trainer.model.model.norm, "forward", lambda _: states.masked_fill(poison, torch.nan)
        )
        trainer.model.train(counts[0])
        call = trainer.model, given | {"num_items_in_batch": torch.tensor(items_of(inputs))}
        loss = method(trainer, *call) if method else trainer._compute_loss(*call)
    gradients = [
        x.double() for x in torch.autograd.grad(loss, [states, trainer.model.lm_head.weight])
    ]
    metrics = {
        name: values[-1]
        for name, values in trainer._metrics["train" if counts[0] else "eval"].items()
    }
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
    got, want = (
        {name: x for name, x in found[0][1].items() if name not in without} for found in (got, want)
    )
    # Means of terms of either sign, up to 4: 16 roundings of these.
    assert got == pytest.approx(want, rel=1e-5, abs=16 * 4 * 2.0**-24, nan_ok=True) and [*got] == [
        *want
    ]


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
        # TRL, which warns of it, then weighs VESPO's KL by a mean ratio that its loss does not
        # have. Ours by the token's.
        with pytest.raises(RuntimeError, match="left to TRL's own code: VESPO's KL"):
            run(case, data)
        return
    theirs, fused = (run(case, data, COUNTS[row["counts"]], method) for method in (OWN, None))
    assert patched.counts == {"fused": 1}
    if row["option"] == "rejected tokens" and row["loss_type"] == "vespo":
        # Its weight is 1e-8 in TRL, which silences the other tokens of the sequence in both.
        assert (
            float(fused[1][0][(data["importance_sampling_ratio"] == 0).any(1)].abs().max()) < 1e-3
        )
    same(fused, theirs)


@parametrize("loss_type", LOSS_TYPES)
def test_presets_have_trls_defaults(trainer, monkeypatch, loss_type):
    """What nobody passed; but for CISPO's cap, an absolute ratio that TRL's default makes 0.2."""
    level = "sequence" if loss_type == "luspo" else "token"  # the one that TRL advises
    for name, value in {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": 0.3,
    }.items():
        monkeypatch.setattr(trainer, name, value)
    own, preset = objective_of(trainer), Objective.preset(loss_type, numerics="trl", beta=0.3)
    if loss_type == "cispo":
        assert own.surrogate == Cispo(0.2) and preset.surrogate == Cispo(5.0)
        own = replace(own, surrogate=preset.surrogate)
    for name in ("surrogate", "level", "kl_spec", "beta"):
        assert getattr(own, name) == getattr(preset, name), name


@parametrize("loss_type", LOSS_TYPES)
def test_nothing_to_train_on(run, plain, patched, loss_type):
    """A micro-batch of masked completions is a differentiable 0:

    a rank without a graph would leave the others waiting.
    """
    for changes in (
        {},
        CHANGES["entropy quantile"] | {"entropy_coef": 0.2},
        CHANGES["off-policy mask"],
    ):
        (loss, _), gradients = run(
            case_of(loss_type, beta=0.3, **changes),
            plain | {"completion_mask": 0 * plain["completion_mask"]},
        )
        assert loss == 0 and not any(x.any() for x in gradients), changes


def test_the_packed_trees_of_async_grpo(trainer, leaves):
    """Its own loss of a rank's rollouts, two of which begin alike, and ours of `tree_batch`.

    Another rank has more tokens.
    """
    g, ranks = torch.Generator().manual_seed(5), (packing.TreeRow(), packing.TreeRow())
    for rank, ids, advantage in (
        (0, [3, 4, 6, 7, 8, 9], 1.2),
        (0, [3, 4, 6, 7, 2], -0.7),
        (0, [3, 9, 4], 0.5),
        (1, [*range(2, 20)], 1.0),
    ):
        old = {
            "old_log_probs": torch.randn(len(ids), generator=g) - 3.0,
            "completion_mask": torch.arange(len(ids)) >= 2,
        }
        ranks[rank].add(
            old
            | {
                "input_ids": torch.tensor(ids),
                "advantage": advantage,
                "group_id": 0,
                "metrics": {},
            }
        )
    every = async_grpo_trainer.DataCollatorForRollout(PAD, num_processes=2)([[*ranks]])
    inputs, settings = (
        {name: x[:1] for name, x in every.items()},
        {"epsilon_low": 0.2, "epsilon_high": 0.27, "aux_loss_enabled": False},
    )
    its = MagicMock(
        accelerator=trainer.accelerator, current_gradient_accumulation_steps=2, **settings
    )

    def theirs(hidden, weight):
        def model(shift_labels, **_):
            logps, entropy = oracle.log_probs((hidden @ weight.T)[None], shift_labels.clamp(min=0))
            return SimpleNamespace(log_probs=logps, entropy=entropy)

        return async_grpo_trainer.AsyncGRPOTrainer.compute_loss(its, model, inputs)

    def ours(hidden, weight):
        objective = Objective.preset("dapo", surrogate=Clip(0.2, 0.27))
        return linear_grpo_loss(
            hidden, weight, batch, objective, normalizer=2 * inputs["global_n_tokens"][0]
        ).loss

    batch, rows = tree_batch(inputs), [leaves[0].flatten(0, 1)[: len(ranks[0].tokens)], leaves[1]]
    assert batch.cu_seqlens.tolist() == [0, 4, 7, 8] and batch.rows.unique().numel() == 6
    assert_same(*(value_and_gradient(f, rows) for f in (ours, theirs)))


def test_these_are_all_loss_types_of_trl():
    """A loss type that a new TRL adds is noticed here."""
    conditions = re.findall(
        r"self\.loss_type (?:==|!=|in) (\[[^\]]*\]|\"\w+\")", inspect.getsource(OWN)
    )
    assert len(conditions) > 8 and {*re.findall(r'"(\w+)"', " ".join(conditions))} == {*LOSS_TYPES}


# ---- what the patch does beside the loss


def test_rows_that_are_projected(run, plain, patched, monkeypatch):
    """States of prompts, padding and tool tokens may be NaN: nobody reads them. With skip_inactive
    nor are those of advantage 0, and nothing in TRL's log changes but the entropy, which is the
    mean of the others.
    """
    case, data = with_option("tool mask", case_of(), plain)
    mask = (data["completion_mask"] * TOOLS).bool()
    idle, theirs = ~(mask & (data["advantages"] != 0)[:, None]), run(case, data, method=OWN)
    assert_same(run(case, data, unread=~mask), theirs, 2e-4)
    monkeypatch.setattr(patched, "skip_inactive", True)
    same(run(case, data, unread=idle), theirs, "entropy")


def test_what_runs_is_logged_once(trainer, run, plain, caplog, monkeypatch):
    """And once for each reason why TRL's own code runs; on rank 0 alone."""
    left = case_of(
        "vespo", importance_sampling_level="sequence", beta=0.3, use_bias_correction_kl=True
    )
    low = case_of("vespo") | {"vllm_importance_sampling_clip_min": 1.5}
    for rank, expected in (("0", 3), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        caplog.clear()
        with patch(trainer) as fused:
            for case, options in [
                (case_of(), {}),
                (left, {}),
                (low, with_option("token weights", low, plain)[1]),
            ] * 2:
                run(case, plain | options)
        assert sorted(fused.counts.values()) == [2, 2, 2] and fused.counts["fused"] == 2
        said = [
            record.getMessage()
            for record in caplog.records
            if record.name == "grpo_kernels.integrations"
        ]
        assert len(said) == expected
        if said:
            assert said[0] == "TRL: GRPOTrainer._compute_loss runs in grpo_kernels' fused kernels."
            assert (
                "runs in TRL's own code: VESPO's KL weighted by the ratio of the sequence."
                in said[1]
            )
            assert "runs in TRL's own code: VESPO with a clip range without 1" in said[2]


def test_strict_compares_small_bonuses_and_lets_no_nan_pass(
    trainer, run, plain, patched, monkeypatch
):
    """A wrong entropy bonus is noticed even if it hardly changes the loss. A NaN in the old
    log-prob of a trained token is one in TRL's loss.
    """
    theirs = patched._theirs

    def doubled(*args):
        monkeypatch.setattr(trainer, "entropy_coef", 2 * trainer.entropy_coef)
        return theirs(*args)

    run(case_of(entropy_coef=1e-5), plain)
    monkeypatch.setattr(patched, "_theirs", doubled)
    with pytest.raises(RuntimeError, match="with respect to the entropy"):
        run(case_of(entropy_coef=1e-5), plain)
    monkeypatch.undo()
    spoiled = plain["old_per_token_logps"].index_fill(1, torch.tensor([0]), torch.nan)
    with pytest.raises(RuntimeError, match="nan apart"):
        run(case_of(), plain | {"old_per_token_logps": spoiled})


# ---- over the sets that tokens were sampled from: old policy, reference and loss, against float64

TOP_K = 4
PROMPTS = [{"prompt": p} for p in trl_cases.PROMPTS for _ in range(4)]


def sampled(prompts, trainer):
    """A rollout_func that samples from the TOP_K largest logits of the policy, and records them.

    Completions of all lengths.
    """
    ids, g = trainer._tokenizer(prompts)["input_ids"], torch.Generator().manual_seed(7)
    out = {"prompt_ids": ids, "completion_ids": [], "logprobs": [], "sampling_mask": []}
    for row, prompt in enumerate(ids):
        text, logprobs, kept = [*prompt], [], []
        while len(kept) < 2 + row % 5 and text[-1] != EOS:
            with torch.no_grad():
                top = (
                    trainer.model(input_ids=torch.tensor([text])).logits[0, -1] / TEMPERATURE
                ).topk(TOP_K)
            at = int(torch.multinomial(top.values.softmax(0), 1, generator=g))
            text.append(int(top.indices[at]))
            logprobs.append(float(top.values.log_softmax(0)[at]))
            kept.append(top.indices.tolist())
        for name, found in (
            ("completion_ids", text[len(prompt) :]),
            ("logprobs", logprobs),
            ("sampling_mask", kept),
        ):
            out[name].append(found)
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return trl_cases.save_model(tmp_path_factory.mktemp("replay") / "model")


@pytest.fixture
def make(path, tmp_path, monkeypatch):
    """Makes trainers with two steps for each generation, so that old log-probs are scored."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    cls = functools.partial(FusedGRPOTrainer, replay=True, strict=True)

    def made(rollout_func=sampled, beta=0.1, **options):
        return trl_cases.make_trainer(
            path,
            tmp_path,
            cls,
            steps_per_generation=2,
            beta=beta,
            keywords={"rollout_func": rollout_func},
            **options,
        )

    return made


def logps_of(model, inputs, kept):
    """Log-probs [B, T] of the completions over kept [B, T, K], whose padding is -1; over all where
    there are none.
    """
    ids, mask = (
        torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask")
    )
    T = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -T - 1 : -1] / TEMPERATURE
    V = logits.shape[-1]
    keep = torch.zeros(*kept.shape[:2], V + 1, dtype=torch.bool).scatter(
        2, kept.long() % (V + 1), True
    )[..., :-1]
    logits = logits.masked_fill(~(keep | ~keep.any(-1, keepdim=True)), -torch.inf)
    return logits.log_softmax(-1).gather(2, inputs["completion_ids"][..., None])[..., 0]


def test_log_probs_and_ratio(make, path):
    trainer = make()
    trainer.model.train()
    inputs = trainer._generate_and_score_completions(PROMPTS)
    mask, policy = (
        inputs["completion_mask"].bool(),
        transformers.AutoModelForCausalLM.from_pretrained(path).double(),
    )
    record, sets = sampled([p["prompt"] for p in PROMPTS], trainer), inputs["kept_ids"]
    for b, kept in enumerate(record["sampling_mask"]):
        assert inputs["completion_ids"][b, : len(kept)].tolist() == record["completion_ids"][b]
        assert sets[b, : len(kept)].tolist() == kept and (sets[b, len(kept) :] == -1).all()
    with torch.no_grad():
        over_sets = logps_of(policy, inputs, sets)[mask]
    sampler = torch.tensor([x for row in record["logprobs"] for x in row]).double()
    for name in ("old", "ref"):  # ratio 1; the reference is the same model still
        assert_close(
            inputs[f"{name}_per_token_logps"][mask].double(), over_sets, rtol=1e-5, atol=1e-5
        )
    assert_close(over_sets, sampler, rtol=1e-5, atol=1e-5)

    with torch.no_grad():  # the step that makes the samples off-policy
        for ours, theirs in zip(trainer.model.parameters(), policy.parameters(), strict=True):
            ours += 0.05 * torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
            theirs.copy_(ours)
    trainer.current_gradient_accumulation_steps, args = 1, trainer.args
    inputs["advantages"] = torch.linspace(-1, 1, 16)
    loss = trainer._compute_loss(trainer.model, inputs)
    old, ref = (inputs[f"{name}_per_token_logps"].double() for name in ("old", "ref"))
    weighting = "ratio" if args.use_bias_correction_kl else "none"
    spec = oracle.Spec(
        eps_low=args.epsilon, eps_high=args.epsilon, beta=args.beta, kl_weighting=weighting
    )
    want = exact(
        spec, logps_of(policy, inputs, sets), advantages=inputs["advantages"], mask=mask, old_logps=old, ref_logps=ref,
        normalizer=float(inputs["num_items_in_batch"]) / 2,
    ).loss  # fmt: skip
    assert args.loss_type == "dapo" and float(loss.detach()) == pytest.approx(
        float(want.detach()), rel=1e-4
    )
    assert trainer.fused_loss.counts == {
        "scored": 4,
        "fused": 1,
    }  # old policy and reference, in two batches each


def test_training_runs_and_can_be_undone(make):
    """Several micro-batches of one generation, shuffled by TRL; strict mode compares each with
    TRL's arithmetic.
    """
    trainer = make(steps=4, num_iterations=2)
    trainer.train()
    first = trainer.state.log_history[0]
    assert trainer.fused_loss.counts["fused"] == 4 and first["clip_ratio/region_mean"] == 0
    assert 0 < first["entropy"] <= torch.tensor(float(TOP_K)).log() + 1e-6
    trainer.fused_loss.undo()
    assert not {
        "_generate",
        "_generate_and_score_completions",
        "_get_per_token_logps_and_entropies",
    } & {*vars(trainer)}
    patch(trainer).undo()


def test_tokens_of_tools_have_no_sets(make):
    def fixed(prompts, trainer):
        one = {
            "prompt_ids": [2],
            "completion_ids": [5, 6, 7],
            "logprobs": [-1.0] * 3,
            "env_mask": [1, 0, 1],
            "sampling_mask": [[5, 9], [7]],
        }
        return {name: [value] * len(prompts) for name, value in one.items()}

    inputs = make(fixed, beta=0.0)._generate_and_score_completions(PROMPTS[:8])
    assert inputs["kept_ids"].tolist() == [[[5, 9], [-1, -1], [7, -1]]] * 8


def test_what_vllm_returns_in_this_process(make, monkeypatch):
    """TRL's own code around vLLM reads its outputs through `extract_logprobs`:

    stand-ins for the outputs.
    """
    from trl.generation import vllm_generation

    trainer, masks = make(beta=0.0, rollout_func=None), [[[5, 9], [6]], [[7, 3, 2]]] * 4
    monkeypatch.setattr(vllm_generation, "extract_logprobs", lambda outputs: ([], []))
    before = vllm_generation.extract_logprobs

    def generated(*_):
        outputs = [SimpleNamespace(sampling_mask=SimpleNamespace(token_ids=mask)) for mask in masks]
        vllm_generation.extract_logprobs(
            [SimpleNamespace(outputs=outputs[:4]), SimpleNamespace(outputs=outputs[4:])]
        )
        return [[5, 6], [7]] * 4, None

    monkeypatch.setattr(trainer, "_generate_single_turn", generated)
    inputs = trainer._generate_and_score_completions(PROMPTS[:8])
    assert inputs["completion_ids"].tolist() == [[5, 6], [7, PAD]] * 4
    assert inputs["kept_ids"].tolist() == [[[5, 9, -1], [6, -1, -1]], [[7, 3, 2], [-1, -1, -1]]] * 4
    assert vllm_generation.extract_logprobs is before
