"""FusedLMHead: the same layer as before, with log-probs and losses in its forward, also with hooks
that remove the weight. Tests on several ranks are in test_head_ranks.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from grpo_kernels import Head, LogitTransform, linear_grpo_loss, linear_logprobs
from grpo_kernels.model import FusedLMHead
from support.heads import OBJECTIVE, Case, H, Model, V, fused, gradients, make_batch, value_of


def rows(seed):
    """(hidden states, their batch)"""
    batch = make_batch(seed, [5, 2, 4])
    return (
        torch.randn(*batch.targets.shape, H, generator=torch.Generator().manual_seed(seed)),
        batch,
    )


def assert_same_gradients(model, plain):
    for name, gradient in gradients(plain).items():
        assert (gradients(model)[name] - gradient).norm() < 1e-5 * gradient.norm(), name


# ---- one process


@pytest.mark.parametrize("bias", [False, True])
def test_three_ways_to_call(bias):
    linear = nn.Linear(H, V, bias=bias)
    head = FusedLMHead(linear, transform=LogitTransform(softcap=3.0, scale=1.5))
    hidden, batch = rows(1)
    wanted = [hidden.requires_grad_(), *linear.parameters()]
    given = hidden, Head(linear.weight, linear.bias)
    whole = LogitTransform(0.7, softcap=3.0, scale=1.5)
    assert torch.equal(head(hidden), linear(hidden))
    found = head(hidden, batch.targets, mask=batch.mask, entropy="detached", temperature=0.7)
    logps, entropy = linear_logprobs(
        *given, batch.targets, mask=batch.mask, transform=whole, entropy=True
    )
    assert torch.equal(found.entropy, entropy) and not found.entropy.requires_grad
    loss = head(hidden, batch, OBJECTIVE, temperature=0.7, normalizer=9.0, metrics=True)
    out = linear_grpo_loss(*given, batch, OBJECTIVE, transform=whole, normalizer=9.0)
    assert loss.metrics.keys() == out.metrics.keys() and torch.equal(
        loss.metrics["kl"], out.metrics["kl"]
    )
    assert (
        torch.equal(loss.logps, out.logps)
        and head(hidden, batch, OBJECTIVE, normalizer=9.0).metrics is None
        and head(hidden, batch, OBJECTIVE, normalizer=9.0, metrics=False).metrics is None
    )
    for mine, theirs in ((found.logps.sum(), logps.sum()), (loss.loss, out.loss)):
        assert torch.equal(mine, theirs)
        for a, b in zip(
            torch.autograd.grad(mine, wanted), torch.autograd.grad(theirs, wanted), strict=True
        ):
            assert torch.equal(a, b) and float(b.norm()) > 0


def test_tied_and_frozen():
    model, plain, batch = (
        fused(Case("log-probs", tied=True)),
        Model(Case("logits", tied=True)),
        make_batch(3, [5, 2, 4]),
    )
    assert (
        len(list(model.parameters())) == len(list(plain.parameters()))
        and model.lm_head.weight is model.embedding.weight
    )
    assert model.state_dict().keys() == plain.state_dict().keys()
    for each in (model, plain):
        value_of(each(batch), batch).backward()
    assert_same_gradients(model, plain)
    model.zero_grad()
    model.lm_head.weight.requires_grad_(False)
    value_of(model(batch), batch).backward()
    assert (
        model.lm_head.weight.grad is None
        and model.lm_head.bias.grad is not None
        and model.norm.weight.grad is not None
    )


class Quantised(nn.Linear):
    def forward(self, x):
        return super().forward(x.round())


def test_heads_that_are_refused():
    def linear():
        return nn.Linear(H, V)

    hooked, saved, patched, sharded, viewed, normed = (linear() for _ in range(6))
    hooked.register_forward_hook(lambda *_: None)
    saved.register_state_dict_post_hook(lambda *_: None)
    del viewed.weight
    viewed.weight = torch.ones(V, H)
    patched.forward = lambda x: x
    sharded.weight.data = torch.empty(0)
    for head, message in (
        (Quantised(H, V), "whose forward is not torch.nn.Linear.forward"),
        (nn.Embedding(V, H), "whose forward is not torch.nn.Linear.forward"), (FusedLMHead(linear()), "installed already"),
        (hooked, "with hooks"), (saved, "with hooks"),
        (patched, "whose forward is not torch.nn.Linear.forward"), (sharded, "ZeRO-3"), (viewed, "FSDP"),
        (nn.utils.parametrizations.weight_norm(normed), "weight and bias"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            FusedLMHead(head)


@pytest.mark.parametrize(
    "targets", [r".*(q_proj|lm_head)", "lm_head", ["q_proj", "lm_head"]], ids=str
)
@pytest.mark.parametrize("kind", ["LoraConfig", "OFTConfig"])
def test_an_adapter_on_the_head_is_refused_however_it_was_named(kind, targets):
    """By looking at the module, not at the names of a configuration."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    options = {"r": 2} if kind == "LoraConfig" else {"oft_block_size": 0, "r": 2}
    model = peft.get_peft_model(
        tiny_model(tie_word_embeddings=False),
        getattr(peft, kind)(target_modules=targets, **options),
    )
    with pytest.raises(ValueError, match="carries an adapter"):
        FusedLMHead.install(model)


def tiny_model(**options):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        vocab_size=V, final_logit_softcapping=2.0, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_model(tied):
    """install and undo; the softcap comes from the config; the model's own forward, state and ties
    are as before.
    """
    pytest.importorskip("transformers")
    model = tiny_model(tie_word_embeddings=tied)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # so that the cap bends
    ids = torch.randint(V, (2, 6))
    with torch.no_grad():
        before = model(ids).logits
    keys = list(model.state_dict())
    head = FusedLMHead.install(model)
    assert (
        model.lm_head is head and head.transform.softcap == 2.0 and list(model.state_dict()) == keys
    )
    model.tie_weights()
    assert (head.weight is model.get_input_embeddings().weight) == tied
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
        hidden = model.get_decoder()(ids).last_hidden_state
        logps, _ = head(hidden[:, :-1], ids[:, 1:], temperature=0.7)
    want = torch.log_softmax(before[:, :-1] / 0.7, -1).gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(logps, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="installed already"):
        FusedLMHead.install(model)
    assert FusedLMHead.undo(model) is model.lm_head and type(model.lm_head) is nn.Linear
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    with pytest.raises(ValueError, match="nothing to undo"):
        FusedLMHead.undo(model)


# ---- hooks that remove the weight


@dataclass
class Offload:
    """What ZeRO-3 does to a module's parameters:

    there around its forward, and around the backward of what came out.
    """

    module: nn.Module

    def __post_init__(self):
        self.held = {p: p.data for p in self.module.parameters(recurse=False)}
        self.fetched = 0
        self.release()
        self.module.register_forward_pre_hook(lambda *_: self.fetch())
        self.module.register_forward_hook(self.after)

    def fetch(self):
        self.fetched += 1
        for p, data in self.held.items():
            p.data = data

    def release(self):
        for p in self.held:
            p.data = torch.empty(0)

    def after(self, module, inputs, out):
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(lambda _: self.fetch())
        self.release()


@pytest.mark.parametrize("kind", ["loss", "log-probs", "logits"])
def test_a_weight_that_is_only_there_in_between(kind):
    plain, model, batch = fused(Case(kind)), fused(Case(kind)), make_batch(7, [5, 2, 4])
    value_of(plain(batch), batch).backward()
    offload = Offload(model.lm_head)
    out = model(batch)
    assert model.lm_head.weight.numel() == 0 and offload.fetched == 1
    value_of(out, batch).backward()
    assert offload.fetched > 1
    assert_same_gradients(model, plain)


def test_accelerate_offloading():
    """Weights on the meta device but in a forward."""
    accelerate = pytest.importorskip("accelerate")
    model, batch = fused(Case("log-probs")), make_batch(8, [5, 2, 4])
    with torch.no_grad():
        want = model(batch).logps
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert model.lm_head.weight.device.type == "meta" and torch.equal(model(batch).logps, want)
