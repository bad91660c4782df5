"""Whole runs of TRL's trainers with our loss and with our fused head: the same numbers at every
step, and the counts of the paths that computed them; and what is refused, undone and left alone.
"""

from __future__ import annotations

import gc
import inspect
import types
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trl", minversion="1.16.0")

from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils

from grpo_kernels.integrations.trl import (
    EVERY_OUTPUT,
    FusedGRPOTrainer,
    fused_lm_head,
    log_probs,
    patch,
)
from support import trl_cases
from support.pairs import label, pairs
from support.trainers import assert_scored
from support.trl_cases import assert_same_history, history

parametrize = pytest.mark.parametrize

SLOT, ANY_VERSION = "_ChunkedLogProbFunction", "GRPO_KERNELS_ANY_VERSION"


@pytest.fixture(scope="module", autouse=True)
def quick():
    """accelerate collects garbage before every training, which takes longer than the training while
    all that is imported takes part in it.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return trl_cases.save_model(tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture
def make(path, tmp_path):
    """Makes trainers, of TRL's class unless another is asked for."""
    return lambda cls=GRPOTrainer, model=path, **options: trl_cases.make_trainer(
        model, tmp_path, cls, **options
    )


@pytest.fixture
def train(make):
    def trained(cls=GRPOTrainer, evaluate=False, **options):
        made = make(cls, **options)
        made.train()
        if evaluate:
            made.evaluate()
        return made

    return trained


@pytest.fixture
def compare(train):
    """The trainer of TRL and ours over the same steps:

    losses, gradient norms and all metrics. (TRL's, ours)
    """

    def compared(micro_batches=None, **options):
        options = {"steps": 4, "num_iterations": 2, "epsilon": 0.1, **options}
        keywords = options.pop("keywords", {})
        theirs = train(keywords=keywords, **options)
        ours = train(FusedGRPOTrainer, keywords={"strict": True, **keywords}, **options)
        assert_same_history(history(ours), history(theirs), 2e-4)
        counts, args = ours.fused_loss.counts, ours.args
        evaluations = len(ours.get_eval_dataloader()) if options.get("evaluate") else 0
        assert counts["fused"] - evaluations == (
            micro_batches or args.max_steps * args.gradient_accumulation_steps
        )
        assert {*counts} <= {"fused", "scored"}
        norms = [entry["grad_norm"] for entry in history(ours) if "grad_norm" in entry]
        assert (
            len(norms) == ours.state.global_step
            and sum(norm > 1e-2 for norm in norms) >= len(norms) / 2
        )
        return theirs, ours

    return compared


KL, TWO = {"beta": 0.1}, {"gradient_accumulation_steps": 2}
CHECKPOINTED = {"gradient_checkpointing": True}
RUNS = {
    "entropy quantile": {**TWO, "top_entropy_quantile": 0.3},
    "truncated completions": {"loss_type": "grpo", **TWO, **KL, "mask_truncated_completions": True, "evaluate": True},
    "entropy bonus": {"loss_type": "bnpo", **TWO, "entropy_coef": 0.05},
    "gspo": {"loss_type": "grpo", **KL, "importance_sampling_level": "sequence", "epsilon": 0.02},
    "sequences": {"loss_type": "luspo", **TWO, **KL, "importance_sampling_level": "sequence", "learning_rate": 1e-3},
    "cap, quantile, bonus, KL": {"loss_type": "cispo", **KL, "epsilon_high": 1.2, "top_entropy_quantile": 0.3, "entropy_coef": 0.05},
    "gradient checkpointing": {"loss_type": "sapo", **KL, **CHECKPOINTED},
    "reentrant checkpointing": {"loss_type": "vespo", **CHECKPOINTED, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "accumulation over generations": {"loss_type": "vespo", **TWO, **KL, "steps_per_generation": 6, "num_iterations": 1},
    "adaptive entropy": {
        **TWO, "num_iterations": 1, "use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_target": 3.05, "entropy_coef_delta": 0.01,
    },
    # 128 answers in 16 micro-batches, the last of which is alone in its window
    "window cut short": {
        "gradient_accumulation_steps": 3, "steps_per_generation": 2, "steps": -1, "num_train_epochs": 1.0, "micro_batches": 16,
        "num_iterations": 1,
    },
    "off-policy mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.02, "num_iterations": 3, "steps": 6},
}  # fmt: skip


@parametrize("name", RUNS)
def test_run(compare, name):
    _, ours = compare(**RUNS[name])
    logged = history(ours)[:-1]
    if "evaluate" in RUNS[name]:
        assert "eval_loss" in history(ours)[-1] and history(ours)[-1]["eval_kl"] > 0
    if ours.beta:
        assert max(entry.get("kl", 0) for entry in logged) > 1e-3


#: Kind of the model, fields of its config, options of the run.
MODELS = {
    "untied, with a bias": ("Phi", {"tie_word_embeddings": False, "num_key_value_heads": 2}, {}),
    "softcap": ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 16}, {}),
    "scaled logits": ("Granite", {"logits_scaling": 4.0}, {}),
    "mixture of experts": ("Qwen3Moe", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16, "decoder_sparse_step": 1,
        "router_aux_loss_coef": 0.1, "norm_topk_prob": True,
    }, TWO),
}  # fmt: skip


@parametrize("name", MODELS)
def test_model(compare, tmp_path, name):
    """Of a mixture of experts the load-balancing loss is added with its gradient, as TRL does."""
    kind, changes, options = MODELS[name]
    options = {"model": trl_cases.save_model(tmp_path / "model", kind, **changes), **KL, **options}
    theirs, ours = compare(**options)
    assert (theirs.model.get_output_embeddings().bias is not None) == name.endswith("bias")
    assert kind != "Qwen3Moe" or history(ours)[0]["aux_loss"] > 0.1


@parametrize("trained_head", [False, True])
def test_lora(compare, path, tmp_path, trained_head):
    """Adapters in the body, where the reference is the model without them; and a copy of the head
    that is trained whole.
    """
    peft = pytest.importorskip("peft")
    modules = ["lm_head"] if trained_head else None
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=modules,
        init_lora_weights="gaussian",
    )
    model = (
        trl_cases.save_model(tmp_path / "model", tie_word_embeddings=False)
        if trained_head
        else path
    )
    _, ours = compare(model=model, **KL, keywords={"peft_config": config}, learning_rate=5e-2)
    weight = ours.model.get_base_model().get_output_embeddings().weight
    assert weight.requires_grad == trained_head and history(ours)[-2]["kl"] > 1e-4


def test_images(make, monkeypatch):
    """Other inputs of a model than tokens reach the backbone:

    loss and gradients of a model with images.
    """
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    sizes, g = (
        {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        torch.Generator().manual_seed(1),
    )
    vision, text = (
        CLIPVisionConfig(image_size=8, patch_size=4, **sizes),
        LlamaConfig(vocab_size=40, **sizes),
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=39, vision_feature_layer=-1
        )
    )
    utils.add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
    trainer, ids, results = make(), torch.randint(2, 38, (4, 6), generator=g), []
    trainer.current_gradient_accumulation_steps = 1
    monkeypatch.setattr(trainer, "model", model)
    prompt = torch.full((4, 5), 39).index_fill(1, torch.tensor([4]), 3)
    inputs = {
        "prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "completion_ids": ids, "completion_mask": torch.ones_like(ids),
        "num_images": [1] * 4, "advantages": torch.tensor([1.0, -0.5, 0.3, -0.8]), "num_items_in_batch": torch.tensor(24),
        "old_per_token_logps": -3.7 + 0.2 * torch.randn(ids.shape, generator=g), "pixel_values": torch.randn(4, 3, 8, 8, generator=g),
    }  # fmt: skip
    for prepare in (lambda trainer: None, patch):
        fused = prepare(trainer)
        model.zero_grad()
        trainer._compute_loss(model, dict(inputs)).backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert (
        fused.counts == {"fused": 1}
        and model.model.vision_tower.embeddings.patch_embedding.weight.grad.abs().sum() > 0
    )
    assert_close(*results, rtol=1e-4, atol=1e-6)


# ---- what is refused


def adapted(model):
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["lm_head"]), model)


def unfused(model):
    model.forward = types.MethodType(
        type(model).forward, model
    )  # as another package's patch has it


@parametrize("change, error, message", [
    (adapted, ValueError, r"carries an adapter.*target_modules"), (unfused, RuntimeError, "not TRL's fused LM head"),
], ids=("LoRA on the head", "another package's forward"))  # fmt: skip
def test_refused_head(make, change, error, message):
    """An adapter when the trainer is patched, and both at a call."""
    trainer, later = make(), make()
    change(trainer.model)
    if change is adapted:
        with pytest.raises(error, match=message):
            patch(trainer)
        assert not {"fused_loss", "_compute_loss"} & {*vars(trainer)}
    patch(later)
    change(later.model)
    with pytest.raises(error, match=message):
        later.train()


def test_refused_trainers(make):
    trainer = make()
    fused = patch(trainer)
    for other, error, message in (
        (trainer, RuntimeError, "patched already"), (trainer.model, TypeError, "GRPOTrainer"),
        (make(GMPOTrainer), RuntimeError, "its own _compute_loss"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            patch(other)
    fused.undo()
    fused.undo()  # nothing happens
    with (
        pytest.raises(RuntimeError, match="no call was fused in this block"),
        patch(trainer, strict=True),
    ):
        pass
    assert "fused_loss" not in vars(trainer)


# ---- patching, undoing, and what a patch does not touch


def test_undo(make, train):
    """Nothing is left; the trainer then goes on as TRL's own."""
    options = {"num_iterations": 2, "epsilon": 0.1, "steps": 4, **KL}
    theirs, undone = train(**options), make(**options)
    before = dict(vars(undone))
    fused = patch(undone)
    assert undone.fused_loss is fused
    fused.undo()
    assert vars(undone) == before
    undone.train()
    assert history(undone)[:-1] == history(theirs)[:-1] and not fused.counts


def test_scored_log_probs(make):
    """One call of the model a sequence, without gradients; with them, outside of a loss, TRL's
    own.
    """
    trainer, ids = make(**KL), torch.tensor([[0, 3, 4, 5, 6], [2, 3, 9, 5, 0]])
    for model, entropy in ((trainer.model, True), (trainer.ref_model, False)):
        given = model, ids, (ids != 0).long(), 3, 1, entropy
        with torch.no_grad():
            want, fused = trainer._get_per_token_logps_and_entropies(*given), patch(trainer)
            got = trainer._get_per_token_logps_and_entropies(*given)
        trainer._get_per_token_logps_and_entropies(*given)
        assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert (got[1] is not None) == entropy and fused.counts == {"scored": 2}
        fused.undo()


# ---- versions of TRL that were not tested


@pytest.fixture
def untested(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda package: "1.99.0")
    monkeypatch.delenv(ANY_VERSION, raising=False)


def test_the_first_step_of_an_untested_version_is_compared(make, train, untested, monkeypatch):
    """The same arithmetic: one message, and the run is TRL's, dropout included. TRL's own head is
    called in the first step alone, for the reference and the loss.
    """
    want, own, calls = train(steps=3, beta=0.05), getattr(utils, SLOT), []
    counting = type(
        "Counting",
        (own,),
        {
            "apply": staticmethod(
                lambda *a, **k: calls.append(torch.is_grad_enabled()) or own.apply(*a, **k)
            )
        },
    )
    monkeypatch.setattr(utils, SLOT, counting)
    one = make(steps=3, beta=0.05)
    patch(one)
    with pytest.warns(
        UserWarning, match=r"trl 1\.99\.0 was not tested.*_compute_loss.*They agree"
    ) as said:
        one.train()
    assert len([w for w in said if "They agree" in str(w.message)]) == 1 and calls == [False, False]
    assert_same_history(history(one), history(want), 2e-4)


# ---- the slot of the fused LM head


G = torch.Generator().manual_seed(1)
LEAVES = HIDDEN, WEIGHT, BIAS = [
    torch.randn(*shape, generator=G) for shape in ((9, 16), (33, 16), (33,))
]
TARGETS = torch.randint(0, 33, (9,), generator=G)
TARGETS[:5] = torch.nn.functional.linear(*LEAVES)[:5].argmax(-1)


def applied(function, *more):
    """A call of TRL's function of its head, or of ours."""

    def call(hidden, weight, bias=None):
        logps, entropy, *others = function.apply(hidden, weight, bias, TARGETS, 0.8, 7, *more)
        assert not any(x is not None and x.requires_grad for x in others)
        return logps, entropy, *others

    return call


@parametrize("row", pairs(
    outputs=((), ("entropy",), ("entropy", "log_sum_sq_probs"), ("entropy", "is_top1")), softcap=(None, 1.5), scale=(1.0, 0.3), leaves=(2, 3),
), ids=label)  # fmt: skip
def test_slot_is_trls_function(row):
    """Values and gradients, for each selection of outputs; `is_top1` feeds SFT's
    mean_token_accuracy, `log_sum_sq_probs` the weights of WPO.
    """
    more = row["softcap"], row["scale"], ("log_probs", *row["outputs"])
    with fused_lm_head(strict=True) as slot:
        ours, theirs = (
            applied(function, *more) for function in (getattr(utils, SLOT), ChunkedLogProbFunction)
        )
        assert_scored(ours, theirs, *LEAVES[: row["leaves"]], dtype=torch.float32)
        with pytest.raises(RuntimeError, match="by grpo_kernels already"):
            fused_lm_head()
    assert slot.counts == {"fused": 1} and getattr(utils, SLOT) is ChunkedLogProbFunction


def next_head(chunk_size=True, outputs=True, sampling_mask=True):
    """TRL's function of its head as later versions have it: over the ids of a row that
    sampling_mask has, or without an argument for the size of chunks, which gives four results.
    """

    def forward(
        ctx,
        hidden,
        weight,
        bias,
        targets,
        temperature,
        chunk_size,
        softcap=None,
        scale=1.0,
        outputs=EVERY_OUTPUT,
        sets=None,
    ):
        raise NotImplementedError

    def apply(hidden, weight, bias, targets, temperature, *more):
        more = [*more] if chunk_size else [None, *more]
        _, softcap, scale, asked, sets = [
            *more,
            *(None, None, 1.0, EVERY_OUTPUT, None)[len(more) :],
        ]
        z = torch.nn.functional.linear(hidden, weight, bias) * scale
        z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
        log_p = z.log_softmax(-1)
        logps = log_p.gather(-1, targets[:, None])[:, 0]
        if sets is not None:
            kept = torch.zeros_like(z).scatter_add(-1, sets.clamp(min=0), (sets >= 0).to(z))
            logps = logps - log_p.masked_fill(kept == 0, -torch.inf).logsumexp(-1)
        entropy, squares, top = (
            -(log_p.exp() * log_p).sum(-1),
            (2 * log_p).logsumexp(-1).detach(),
            targets == z.argmax(-1),
        )
        if not outputs:
            return logps, entropy, squares, top
        return logps, *(
            x if name in asked else None
            for x, name in zip((entropy, squares, None, top), EVERY_OUTPUT, strict=True)
        )

    names = ["ctx", "hidden", "weight", "bias", "targets", "temperature", *["chunk_size"] * chunk_size, "final_logit_softcapping",
             "logit_scale", *["outputs"] * outputs, *["sampling_mask"] * sampling_mask]  # fmt: skip
    defaults = {
        "final_logit_softcapping": None,
        "logit_scale": 1.0,
        "outputs": EVERY_OUTPUT,
        "sampling_mask": None,
    }
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=defaults.get(name, inspect.Parameter.empty),
        )
        for name in names
    ]
    forward.__signature__ = inspect.Signature(parameters)
    return type("Next", (), {"forward": staticmethod(forward), "apply": staticmethod(apply)})


#: Sets of the rows, with the target and with padding.
SETS = torch.cat([TARGETS[:, None], (TARGETS[:, None] + torch.tensor([3, 11, 20])) % 33], 1)
SETS[::2, 2:] = -1


@parametrize("sets", [(), (None,), (SETS,)], ids=("not passed", "None", "sets"))
def test_slot_of_a_trl_with_sampling_masks(sets, monkeypatch):
    theirs = next_head()
    monkeypatch.setattr(utils, SLOT, theirs)
    more = (1.5, 0.3, ("log_probs", "entropy", "log_sum_sq_probs", "is_top1"), *sets)
    with fused_lm_head(strict=True, any_version=True) as slot:
        assert_scored(
            applied(getattr(utils, SLOT), *more),
            applied(theirs, *more),
            *LEAVES,
            dtype=torch.float64,
        )
    assert slot.counts == {"fused": 1} and getattr(utils, SLOT) is theirs
    if sets == (SETS,):
        assert_scored(
            applied(SimpleNamespace(apply=log_probs), *more),
            applied(theirs, *more),
            *LEAVES[:2],
            dtype=torch.float64,
        )


def test_slot_of_a_trl_without_chunk_size(monkeypatch):
    """Four results, of which two have a gradient."""
    theirs = next_head(chunk_size=False, outputs=False, sampling_mask=False)
    monkeypatch.setattr(utils, SLOT, theirs)

    def call(function):
        return lambda hidden, weight, bias=None: function.apply(
            hidden, weight, bias, TARGETS, 0.8, 1.5, 0.3
        )

    with fused_lm_head(strict=True, any_version=True) as slot:
        ours = getattr(utils, SLOT)
        assert len(call(ours)(*LEAVES)) == 4
        assert_scored(call(ours), call(theirs), *LEAVES, dtype=torch.float64)
    assert slot.counts == {"fused": 2}


def test_an_argument_of_a_later_trl_is_left_to_it(monkeypatch):
    calls = []

    class Later(ChunkedLogProbFunction):
        @staticmethod
        def forward(
            ctx,
            hidden,
            weight,
            bias,
            targets,
            temperature,
            chunk_size,
            softcap=None,
            scale=1.0,
            outputs=EVERY_OUTPUT,
            tilt=0.0,
        ):
            raise NotImplementedError

        @classmethod
        def apply(cls, *given):
            calls.append(given)
            return ChunkedLogProbFunction.apply(*given[:9])

    monkeypatch.setattr(utils, SLOT, Later)
    with fused_lm_head(any_version=True) as slot:
        for tilt in (0.0, None, 0.5):
            getattr(utils, SLOT).apply(*LEAVES, TARGETS, 0.8, 7, None, 1.0, ("log_probs",), tilt)
    assert (
        slot.counts == {"fused": 2, "TRL: argument tilt=0.5, which grpo_kernels does not know": 1}
        and len(calls) == 1
    )


def test_a_run_of_a_trl_with_an_unknown_argument_is_left_to_it(make, train):
    """Losses and scores, each counted; the run is TRL's."""
    want = train(steps=2, beta=0.05, num_iterations=2)
    one = make(steps=2, beta=0.05, num_iterations=2)
    fused = patch(one)
    own = fused._head.apply
    fused._head.apply = staticmethod(lambda *given: own(*given, 0.5))
    one.train()
    assert {*fused.counts} == {"TRL: argument number 10, 0.5, which grpo_kernels does not know"}
    assert_same_history(history(one), history(want), 1e-6)


@parametrize("sets", [None, "all", "some"])
def test_a_run_of_a_trl_that_passes_its_own_sets(make, train, sets, monkeypatch):
    """As its tenth argument to the head: of all ids, which changes nothing, and of some, where the
    entropy stays that over the vocabulary.
    """
    want = train(steps=3, beta=0.05, num_iterations=2)
    monkeypatch.setattr(
        utils, SLOT, type("Next", (ChunkedLogProbFunction,), {"forward": next_head().forward})
    )
    one = make(steps=3, beta=0.05, num_iterations=2)
    fused = patch(one, strict=True)
    own, seen = fused._head.apply, []

    def apply(*given):
        hidden, weight, _, targets = given[:4]
        ids = torch.arange(len(weight)).expand(len(targets), -1)
        if sets == "some":
            ids = torch.cat(
                [targets[:, None], (targets[:, None] + torch.tensor([1, 2, 3])) % len(weight)], 1
            )
        seen.append(own(*given, None if sets is None else ids))
        if sets == "some" and seen[-1][0].numel():
            z = hidden.detach() @ weight.detach().T / given[4]
            exact = z.gather(1, targets[:, None])[:, 0] - z.gather(1, ids).logsumexp(1)
            assert_close(seen[-1][0].detach(), exact, rtol=1e-4, atol=1e-4)
        return seen[-1]

    fused._head.apply = staticmethod(apply)
    one.train()
    assert fused.counts["fused"] == 3 and seen
    if sets != "some":
        assert_same_history(history(one), history(want), 2e-4)


def test_labels_that_are_ignored():
    targets = TARGETS.index_fill(0, torch.tensor([3]), -100)
    logps, entropy, *_ = log_probs(
        HIDDEN, WEIGHT, None, targets, 1.0, 7, outputs=("log_probs", "entropy")
    )
    assert (logps == 0).tolist() == (entropy == 0).tolist() == (targets < 0).tolist()
