"""Log-probs and entropy of every trainer by its own functions, and by ours in their place: in
float64 where a stand-in has their names and arguments, in fp32 where the trainer's file is on the
path (see support/trainers.py).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels.integrations import (
    areal,
    liger,
    miles,
    nemo_rl,
    openrlhf,
    prime_rl,
    skyrl,
    slime,
    unsloth,
    verl,
)
from grpo_kernels.integrations._swap import NotCovered, adapt_arguments
from support.processes import finish, start
from support.trainers import (
    MASK,
    B,
    H,
    T,
    V,
    assert_scored,
    entropy_of,
    log_softmax_of,
    stand_in,
    their_file,
    values_and_gradients,
    without_trainers,
)

parametrize = pytest.mark.parametrize

ANY_VERSION, MADE = (
    "GRPO_KERNELS_ANY_VERSION",
    type("UnslothGRPOTrainer", (), {"__module__": "unsloth_made"}),
)

pytestmark = pytest.mark.usefixtures("stand_ins", "clean")

G = torch.Generator().manual_seed(1)
LOGITS, HIDDEN, WEIGHT, BIAS = (
    torch.randn(*shape, generator=G) for shape in ((B, T, V), (B, T, H), (V, H), (V,))
)
IDS, INVERSE = torch.randint(20, (B, T), generator=G), 1 / (0.5 + torch.rand(B * T, generator=G))
KEEP = (torch.rand(B * T, V, generator=G) < 0.4).scatter(1, IDS.view(-1, 1), True)
FLAT, ROWS = LOGITS.view(-1, V), IDS.view(-1)
#: A token and a sampler's head, with the token in it but for one row without any; some have
#: padding.
HEADS = torch.cat(
    [
        ROWS[:, None],
        torch.rand(B * T, 20, generator=G).scatter(1, ROWS[:, None], 0.0).topk(5).indices,
    ],
    1,
)
HEADS[:, 2], HEADS[1::4, 3:], HEADS[7, 1:] = ROWS, -1, -1
#: The row of each token of a tree: of three or of none, and some have the same label twice.
SHARED = torch.arange(B * T) // 3 * 2


@pytest.fixture
def newer(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "99.1")


@pytest.fixture
def clean(monkeypatch):
    monkeypatch.delenv(ANY_VERSION, raising=False)
    with without_trainers("verl"):
        yield


# ---- what stands in for the trainers' functions: their names and arguments, in the precision of
# what they are given


def counted(factor, function, dtype=None):
    """The function with what it gives first times a factor, in the precision of `dtype`, as a
    trainer returns it; counts its calls. It takes an argument that its signature does not show.
    """

    @functools.wraps(function)
    def call(*args, newer=None, **kwargs):
        call.calls += 1
        out = function(*args, **kwargs)
        found = [
            x if x is None else x.to(dtype or x.dtype)
            for x in (out if isinstance(out, tuple) else (out,))
        ]
        found[0] = factor * found[0]
        return tuple(found) if isinstance(out, tuple) else found[0]

    call.calls = 0
    return call


def both(logits, labels, temperature=1.0, **_):
    return log_softmax_of(logits, labels, temperature)


def log_probs(*args, **kwargs):
    return both(*args, **kwargs)[0]


def of_rows(logits, rows, labels, temperature=1.0, tp_group=None):
    return both(logits[rows], labels, temperature)


def in_a_column(
    logits,
    tokens,
    tp_group,
    with_entropy=False,
    log_prob_keep_mask=None,
    temperature=1.0,
    **gradients,
):
    """slime's and miles'."""
    kept = (
        logits
        if log_prob_keep_mask is None
        else logits.masked_fill(~log_prob_keep_mask, -torch.inf)
    )
    entropy = entropy_of(logits / temperature)
    entropy = (
        entropy.detach()
        if False in (gradients.get("with_entropy_grad"), gradients.get("entropy_requires_grad"))
        else entropy
    )
    return log_probs(kept, tokens, temperature)[:, None], entropy if with_entropy else None


def listed(
    logits,
    ids,
    group=None,
    vocab_size=None,
    temperature=1.0,
    with_entropy=None,
    sampling_support=False,
    **_,
):
    """slime's, and with an entropy miles': over the vocabulary, or over the ids after the first."""
    z = logits[:, :vocab_size] / temperature
    z = (
        z.to(logits.dtype).gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
        if sampling_support
        else z
    )
    scored = (ids[:, 1:] >= 0).any(1, keepdim=True) & (ids >= 0) if sampling_support else ids >= 0
    lse = (
        torch.where(scored.any(1, keepdim=True), z[:, 1:], 0.0) if sampling_support else z
    ).logsumexp(1, keepdim=True)
    logps = torch.where(
        scored, (z if sampling_support else z.gather(1, ids.clamp(min=0))) - lse, 0.0
    )
    if with_entropy is None:
        return logps
    p = torch.where(scored, z - lse, -torch.inf)[:, 1:] if sampling_support else z - lse
    return logps, (
        -torch.where(p > -torch.inf, p.exp() * p, 0.0).sum(1)
        if with_entropy
        else logits.new_zeros(len(logits))
    )


def chunked_entropy(logits, requires_grad=False, attention_mask=None, chunk_size=1):
    entropy = entropy_of(logits) if attention_mask is None else entropy_of(logits) * attention_mask
    return entropy if requires_grad else entropy.detach()


def of_megatron(backend, hidden, weight, target, *_):
    return log_probs(hidden @ weight.to(hidden).T, target)


def linear_cross_entropy(hidden, weight, labels, temperature=1.0):
    return both((hidden @ weight.to(hidden).T).flatten(0, -2), labels.reshape(-1), temperature)


def fused_linear_for_ppo(module, hidden_states, vocab_weights, input_ids, temperature=1.0):
    return both(hidden_states @ vocab_weights.to(hidden_states).T, input_ids, temperature)


def of_prime_rl(hidden, weight, labels, inv_temperature, chunk_size):
    logps, entropy = both(
        hidden @ weight.to(hidden).T * inv_temperature[:, None].to(hidden), labels
    )
    return logps, entropy.detach()


def of_unsloth(
    h, head, index, chunks=4, logit_scale_multiply=0.0, logit_scale_divide=0.0, logit_softcapping=0.0, temperature=1.0, lm_head_bias=None,
    return_entropy=False, **_,
):  # fmt: skip
    bias, softcap = None if lm_head_bias is None else lm_head_bias.to(h), logit_softcapping
    z = (
        torch.nn.functional.linear(h, head.to(h), bias)
        * (logit_scale_multiply or 1)
        / (logit_scale_divide or 1)
    )
    found = both(softcap * torch.tanh(z / softcap) if softcap else z, index, temperature)
    return found if return_entropy else found[0]


# ---- the table: who calls what, and how


@dataclass(frozen=True)
class Trainer:
    """An adapter with the options of its `bind`, stand-ins under the names of our functions (by its
    declaration they are put where the trainer has them, or in `home`), and calls of a module on
    leaves. `needs`: what the trainer's own file imports.
    """

    adapter: Any
    theirs: dict[str, Callable[..., Any]]
    logits: list[Callable[..., Any]] = field(default_factory=list)
    hidden: list[Callable[..., Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    attribute: str = ""
    method: str = ""
    home: str = ""
    needs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def bind(self, **options):
        return self.adapter.bind(**self.options, **options)

    @property
    def paths(self):
        """(home, name) of each of their functions."""
        declared = [self.adapter.ADAPTER.replaces[ours] for ours in self.theirs]
        every = [(path if isinstance(path, str) else path[0]).rpartition(".") for path in declared]
        return [
            (
                self.home or home,
                "chunked_hidden_states_selective_log_softmax" if self.home else name,
            )
            for home, _, name in every
        ]


def columns(*options, **more):
    return [
        lambda m, x, o=each: m.calculate_log_probs_and_entropy(
            x.view(-1, V), ROWS, None, **o, **more
        )
        for each in options
    ]


ENTROPY = {"with_entropy": True}
TRAINERS = {
    "openrlhf": Trainer(
        openrlhf, {"log_probs_from_logits": log_probs, "compute_entropy": entropy_of},
        [lambda m, x: (m.log_probs_from_logits(x * 1.0, IDS, temperature=0.7), m.compute_entropy(x))],
        needs={"deepspeed": {}},
    ),
    "areal": Trainer(
        areal, {"gather_logprobs": log_probs, "gather_logprobs_entropy": both},
        [lambda m, x: m.gather_logprobs(x, IDS, temperature=1.3), lambda m, x: m.gather_logprobs_entropy(x, IDS, temperature=0.8)], needs={"areal__infra__platforms": {"is_npu_available": False}},
    ),
    "areal, trees": Trainer(
        areal, {"mapped_logprobs_entropy": of_rows}, [lambda m, x: m.mapped_logprobs_entropy(x.view(-1, V), SHARED, ROWS, 0.8)],
        options={"trees": True}, needs={"areal__utils__functional__vocab_parallel": {"gather_logprobs": log_probs, "gather_logprobs_entropy": both}},
    ),
    "slime": Trainer(
        slime, {"calculate_log_probs_and_entropy": in_a_column, "calculate_topk_log_probs": listed},
        [*columns({}, ENTROPY, ENTROPY | {"with_entropy_grad": False, "chunk_size": 4}, ENTROPY | {"log_prob_keep_mask": KEEP}, {"log_prob_keep_mask": KEEP}),
         lambda m, x: m.calculate_topk_log_probs(x.view(-1, V), HEADS, None, chunk_size=4, temperature=0.7)],
    ),
    "miles": Trainer(
        miles, {"calculate_log_probs_and_entropy": in_a_column},
        columns({}, ENTROPY, ENTROPY | {"entropy_requires_grad": False}, temperature=0.7), options={"args": SimpleNamespace()},
    ),
    "miles, centering": Trainer(
        miles, {"selected_log_probs_and_entropy": listed}, options={"args": SimpleNamespace(loss_type="score_centering")}, logits=[
            lambda m, x, o=each: m.selected_log_probs_and_entropy(x.view(-1, V), HEADS, chunk_size=4, **o)
            for each in ({"with_entropy": False}, {"temperature": 0.7, **ENTROPY}, {"vocab_size": 20, **ENTROPY}, {"sampling_support": True, **ENTROPY})],
    ),
    "skyrl": Trainer(
        skyrl, {"logprobs_from_logits": log_probs, "chunked_entropy_from_logits": chunked_entropy},
        [lambda m, x: m.logprobs_from_logits(x * 1.0, IDS), lambda m, x: (
            m.logprobs_from_logits(x, IDS, inplace_backward=False),
            m.chunked_entropy_from_logits(x, requires_grad=True, attention_mask=MASK.long(), chunk_size=3)),
         lambda m, x: (m.logprobs_from_logits(x, IDS, inplace_backward=False), m.chunked_entropy_from_logits(x))], needs={"skyrl__train__config": {"AlgorithmConfig": object}},
    ),
    "skyrl, megatron": Trainer(
        skyrl, {"fused_lm_head_logprobs": of_megatron}, options={"megatron": True},
        hidden=[lambda m, h, w: m._fused_lm_head_logprob_apply("torch", h, w, IDS, 0, V, 4, None, False)],
    ),
    "verl": Trainer(
        verl, {"logprobs_from_logits": log_probs, "entropy_from_logits": entropy_of},
        [lambda m, x: (m.logprobs_from_logits(x * 1.0, IDS), m.entropy_from_logits(x)),
         lambda m, x: m.logprobs_from_logits(x.view(-1, V), ROWS, inplace_backward=False)], options={"hidden": False},
    ),
    "verl, fused": Trainer(
        verl, {"linear_cross_entropy": linear_cross_entropy}, options={"logits": False},
        hidden=[lambda m, h, w: m.linear_cross_entropy(h, w, IDS, 0.7), lambda m, h, w: m.linear_cross_entropy(h, w, ROWS[None])],
    ),
    # The head of impl_backend=torch and liger: a method, called with and without a batch dimension.
    "verl, torch": Trainer(
        verl, {"fused_linear_for_ppo": fused_linear_for_ppo}, options={"logits": False}, method="forward",
        hidden=[lambda m, h, w: m.FusedLinearForPPO().forward(h, w, IDS, 0.7),
                lambda m, h, w: m.FusedLinearForPPO().forward(hidden_states=h.view(-1, H), vocab_weights=w, input_ids=ROWS, temperature=1.3)],
        needs={"verl__utils__kernel__linear_cross_entropy": {"linear_cross_entropy": linear_cross_entropy}},
    ),
    "prime-rl": Trainer(
        prime_rl, {"chunked_logprobs": of_prime_rl}, attribute="apply",
        hidden=[lambda m, h, w: m._SequenceChunkedLogProbEntropyFn.apply(h.view(-1, H), w, ROWS, INVERSE, 8)],
    ),
    "unsloth_zoo": Trainer(
        unsloth, {"selective_log_softmax": of_unsloth}, options={"trainer": MADE}, home="unsloth_made",
        hidden=[lambda m, h, w, o=options: m.chunked_hidden_states_selective_log_softmax(h, w, IDS, **o) for options in (
            {}, {"temperature": 0.7}, {"logit_scale_divide": 3.0, "chunks": 2},
            {"logit_scale_multiply": 0.5, "logit_softcapping": 2.0, "temperature": 1.3})],
    ),
    "unsloth_zoo, new": Trainer(
        unsloth, {"selective_log_softmax": of_unsloth, "log_softmax_and_entropy": of_unsloth}, options={"trainer": MADE},
        hidden=[lambda m, h, w: m.grpo_chunked_hidden_states_logprobs(h, w, IDS, 4, 0.5, 0.0, 2.0, 0.7, lm_head_bias=BIAS, max_rows_per_chunk=3),
                *(lambda m, h, w, o=options: m.chunked_hidden_states_selective_log_softmax_recompute(
                    h, w, IDS, 4, 0.0, 3.0, 0.0, 0.7, lm_head_bias=BIAS, **o) for options in ({}, {"return_entropy": True}))],
        needs={"unsloth_zoo__device_type": {"DEVICE_TYPE": "cpu", "device_synchronize": None}, "unsloth_zoo__log": {"logger": None},
               "unsloth_zoo__temporary_patches__common": {"torch_compile_options": {}, "_maybe_compile": lambda **_: lambda f: f},
               "unsloth_zoo__dataset_utils": {"sft_prepare_dataset": None},
               "unsloth_zoo__fused_losses__chunked_logprob": {"_FUSED_LINEAR": False}},
    ),
}  # fmt: skip
#: Names that all of a trainer's modules must have before it is bound.
BESIDE = {
    "areal, trees": "areal", "skyrl, megatron": "skyrl", "miles, centering": "miles", "verl, torch": "verl, fused",
    "verl, fused": "verl, torch",
}  # fmt: skip


def put(name, factor=1.0, cast=False):
    """(the trainer's module, its functions):

    stand-ins, where `cast` in fp32 as a trainer returns them.
    """
    if name in BESIDE:
        put_alone(BESIDE[name])
    return put_alone(name, factor, cast)


def put_alone(name, factor=1.0, cast=False):
    trainer = TRAINERS[name]
    functions = [
        counted(factor, f, torch.float32 if cast else None) for f in trainer.theirs.values()
    ]
    for (home, theirs), function in zip(trainer.paths, functions, strict=True):
        made = (
            type(theirs, (), {trainer.attribute: staticmethod(function)})
            if trainer.attribute
            else function
        )
        made = type(theirs, (), {trainer.method: function}) if trainer.method else made
        module = stand_in(home, **{theirs: made})
    return module, functions


def calls_of(name, module):
    """(a call of leaves, leaves)"""
    trainer = TRAINERS[name]
    every = [(call, [LOGITS]) for call in trainer.logits] + [
        (call, [HIDDEN, WEIGHT]) for call in trainer.hidden
    ]
    return [(functools.partial(call, module), leaves) for call, leaves in every]


def assert_bound(name, module, **options):
    """Every call by the trainer's functions, which are kept aside, and by ours."""
    before = {**vars(module)}
    own = SimpleNamespace(**before)
    method = TRAINERS[name].method
    kind = TRAINERS[name].paths[0][1]
    if method:  # which is replaced in the class
        setattr(own, kind, type(kind, (before[kind],), {method: vars(before[kind])[method]}))
    with TRAINERS[name].bind(strict=True) as slots:
        for (ours, leaves), (theirs, _) in zip(
            calls_of(name, module), calls_of(name, own), strict=True
        ):
            assert_scored(ours, theirs, *leaves, **options)
        assert {*slots.counts} == {"fused"}
        with pytest.raises(RuntimeError, match="by grpo_kernels already"):
            TRAINERS[name].bind()
    assert vars(module) == before
    if method:
        assert vars(before[kind])[method] is vars(vars(own)[kind])[method]


@parametrize("name", TRAINERS)
def test_values_and_gradients_are_those_of_the_trainer(name):
    """And its own again afterwards; a second binding is refused."""
    assert_bound(name, put(name)[0])


@parametrize("name", [name for name, trainer in TRAINERS.items() if trainer.needs])
def test_the_trainers_own_file(name, monkeypatch):
    """Its function in fp32, on the same calls."""
    module = their_file(TRAINERS[name].paths[0][0], monkeypatch, **TRAINERS[name].needs)
    if any(not hasattr(module, theirs) for _, theirs in TRAINERS[name].paths):
        pytest.skip("this version has other names")
    assert_bound(name, module, dtype=torch.float32, rtol=1e-4)


@parametrize("name", TRAINERS)
@parametrize("factor", [1.0, 1.02])
def test_the_first_call_of_an_untested_version_is_compared(name, factor, newer):
    """The same arithmetic goes on; other arithmetic is refused with the difference."""
    module, _ = put(name, factor, cast=True)
    (call, leaves), *_ = calls_of(name, module)
    expected = pytest.raises(
        RuntimeError, match=rf"{name.partition(',')[0]} 99\.1.*computes something else .*: values"
    )
    with (
        TRAINERS[name].bind(),
        expected if factor != 1 else pytest.warns(UserWarning, match="They agree"),
    ):
        values_and_gradients(call, *leaves)


@parametrize("name", TRAINERS)
def test_what_is_left_to_the_trainer_is_counted_or_an_error(name):
    """float64, for example."""
    module, functions = put(name)
    (call, leaves), *_ = calls_of(name, module)
    with TRAINERS[name].bind() as slots:
        values_and_gradients(call, *leaves, dtype=torch.float64)
    assert {*slots.counts} == {f"{slots.adapter.trainer}: dtype torch.float64"}
    with (
        pytest.raises(RuntimeError, match=r"strict=True.*dtype torch\.float64"),
        TRAINERS[name].bind(strict=True),
    ):
        values_and_gradients(call, *leaves, dtype=torch.float64)
    assert max(f.calls for f in functions) == 1


def pass_an_argument(name, module, value):
    """Have all that the trainer's module holds called with newer=value."""
    trainer = TRAINERS[name]
    for _, theirs in trainer.paths:
        bound = getattr(module, theirs)
        if trainer.method:
            method = getattr(bound, trainer.method)
            made = type(theirs, (), {trainer.method: functools.partialmethod(method, newer=value)})
        elif trainer.attribute:
            made = SimpleNamespace(
                **{
                    trainer.attribute: functools.partial(
                        getattr(bound, trainer.attribute), newer=value
                    )
                }
            )
        else:
            made = functools.partial(bound, newer=value)
        setattr(module, theirs, made)


@parametrize("name", TRAINERS)
@parametrize("value", [None, 7])
def test_an_argument_of_a_newer_trainer(name, value):
    """None changes nothing. With any other value the call is the trainer's own, and counted with
    the reason: an unsloth_zoo that passed the head's bias once got log-probs without it.
    """
    for strict in (False, True):
        module, functions = put(name)
        (call, leaves), *_ = calls_of(name, module)
        slots = TRAINERS[name].bind(strict=strict)
        want = values_and_gradients(call, *leaves)
        slots.counts.clear()
        before = {theirs: getattr(module, theirs) for _, theirs in TRAINERS[name].paths}
        pass_an_argument(name, module, value)
        if strict and value is not None:
            with pytest.raises(
                RuntimeError,
                match=r"strict=True.*argument newer=7, which grpo_kernels does not know",
            ):
                values_and_gradients(calls_of(name, module)[0][0], *leaves)
        else:
            got = values_and_gradients(calls_of(name, module)[0][0], *leaves)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            reason = f"{slots.adapter.trainer}: argument newer=7, which grpo_kernels does not know"
            assert {*slots.counts} == {"fused" if value is None else reason}
            assert max(f.calls for f in functions) == (value is not None)
        vars(module).update(before)
        slots.undo()


#: What users put in, or what a registry calls.
CALLED = [
    liger.triton_grpo_loss, liger.fused_selective_log_softmax, liger.LigerFusedLinearGRPOLoss().forward, liger.LigerFusedLinearJSD().forward,
    openrlhf.PolicyLoss().forward, functools.partial(nemo_rl.PolicyLoss.__call__, None), prime_rl.loss,
    functools.partial(nemo_rl.DistillationLoss.__call__, None), skyrl.policy_loss("dapo"), slime.policy_loss(), verl.policy_loss("vanilla"),
]  # fmt: skip


@parametrize("number", range(len(CALLED)))
def test_what_replaces_nothing_refuses_unknown_arguments(number):
    """With an error that names the argument, no TypeError; nothing is swallowed."""
    with pytest.raises(ValueError, match="argument newer=7, which grpo_kernels does not know"):
        CALLED[number](newer=7)
    with pytest.raises(ValueError, match="a call without"):
        CALLED[number](newer=None)


def ours(a, b, c=1.0, *, d=None):
    return a, b, c, d


def test_arguments_go_by_name():
    """In another order, under another name, left out, and None or the trainer's default for what
    ours does not have.
    """
    reordered = adapt_arguments(ours, lambda b, a, c=2.0, e=5, **more: None)
    assert reordered(1, 2) == (2, 1, 2.0, None)  # the trainer's order and its default
    assert reordered(1, a=2, c=3.0, e=5, f=None, d=4) == (2, 1, 3.0, 4)
    for call, reason in (
        (lambda: reordered(1, 2, e=6), "argument e=6, which"),
        (
            lambda: reordered(1, 2, e=torch.ones(2, 3)),
            r"argument e=a tensor of shape \[2, 3\], which",
        ),
        (lambda: reordered(1, 2, f="x" * 99), "argument f=a str, which"),
        (lambda: reordered(1, 2, 3.0, 5, 6), "argument number 5, 6, which"),
        (lambda: reordered(1), "a call without a"),
    ):
        with pytest.raises(NotCovered, match=reason):
            call()
    assert reordered(1, 2, 3.0, 5, None) == (2, 1, 3.0, None)
    renamed = adapt_arguments(ours, lambda a, beta, c=1.0: None)
    assert renamed(1, 2) == renamed(1, beta=2) == (1, 2, 1.0, None)
    assert adapt_arguments(functools.partial(ours, c=4.0), lambda a, b, c=1.0: None)(1, 2) == (
        1,
        2,
        4.0,
        None,
    )


# ---- options of newer trainers


def newer_openrlhf(**options):
    def init(
        self, clip_eps_low=0.2, clip_eps_high=0.2, dual_clip=None, token_level_loss=True, policy_loss_type="ppo", is_correction_level="off",
        is_correction_mode="mask", is_correction_gating="ratio", is_correction_threshold=(0.5, 5.0), tilt=0.0,
    ):  # fmt: skip
        vars(self).update({name: value for name, value in locals().items() if name != "self"})

    return type("PolicyLoss", (), {"__init__": init})(**options)


def test_an_option_of_a_newer_trainer_is_not_ignored():
    openrlhf.PolicyLoss.like(newer_openrlhf(clip_eps_low=0.1))
    with pytest.raises(ValueError, match=r"tilt=0\.3: this option is not known here"):
        openrlhf.PolicyLoss.like(newer_openrlhf(tilt=0.3))
    put("verl, torch")
    home = sys.modules["verl.utils.experimental.torch_functional"]

    class FusedLinearForPPO:
        def __init__(self, chunk_size=512, impl_backend="torch", lm_head_dtype=None):
            vars(self).update(
                chunk_size=chunk_size, impl_backend=impl_backend, lm_head_dtype=lm_head_dtype
            )

        forward = home.FusedLinearForPPO.forward

    home.FusedLinearForPPO = FusedLinearForPPO
    with verl.bind(logits=False) as slots:
        for options in ({"chunk_size": 4, "impl_backend": "liger"}, {"lm_head_dtype": "float32"}):
            FusedLinearForPPO(**options).forward(HIDDEN, WEIGHT, IDS)
    assert slots.counts == {
        "fused": 1,
        "verl: option lm_head_dtype='float32', which grpo_kernels does not know": 1,
    }


# ---- verl's heads with a temperature of each token


@parametrize("head", ["linear_cross_entropy", "fused_linear_for_ppo"])
@parametrize("shape", [(), (1,), (1, 1), (B * T,), (B, T)])
def test_verl_passes_a_temperature_as_a_tensor(head, shape):
    """One for all tokens, or one for each token of the flat row."""
    put("verl, torch")
    temperature = torch.linspace(0.6, 1.7, B * T)[: torch.Size(shape).numel()].view(shape)
    per_token = temperature.flatten().expand(B * T).view(B, T, 1).double()
    module = sys.modules["verl.utils.experimental.torch_functional"]
    other = sys.modules["verl.utils.kernel.linear_cross_entropy"]

    def ours(hidden, weight):
        if head == "linear_cross_entropy":
            return other.linear_cross_entropy(hidden, weight, IDS, temperature)
        rows = IDS.view(1, -1)
        return module.FusedLinearForPPO().forward(
            hidden.view(1, B * T, H), weight, rows, temperature
        )

    def theirs(hidden, weight):
        logits = hidden @ weight.T / per_token
        shape = (B * T,) if head == "linear_cross_entropy" else (1, B * T)
        return tuple(x.view(shape) for x in both(logits, IDS))

    with verl.bind(logits=False, strict=True) as slots:
        assert_scored(ours, theirs, HIDDEN, WEIGHT)
    assert {*slots.counts} == {"fused"}


# ---- errors with the trainer's names


def test_errors_have_the_names_of_the_trainer():
    short, zeros = MASK[:, :-1], torch.zeros(B, T)
    loss = skyrl.policy_loss("dapo")
    correction = {
        "apply_off_policy_correction": lambda weights, old, rollout, mask, config: (
            weights,
            mask,
            {},
        )
    }
    stand_in("skyrl.backends.skyrl_train.utils.off_policy_correction_utils", **correction)
    config = SimpleNamespace(off_policy_correction=None)
    actor = SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=None,
        clip_ratio_high=-0.1,
        policy_loss=SimpleNamespace(dro_beta=None),
        clip_ratio_c=3.0,
    )
    for call, message in (
        (
            lambda: skyrl.chunked_entropy_from_logits(LOGITS, attention_mask=short),
            r"^attention_mask has shape .*, but logits has",
        ),
        (
            lambda: loss(zeros, zeros[:, 1:], zeros, config, MASK),
            "^old_log_probs has shape .*, but loss_mask has",
        ),
        (
            lambda: areal.gather_logprobs(LOGITS, IDS[:, 1:]),
            "^logits has shape .*, but labels has .*predicting labels",
        ),
        (lambda: verl.objective_of("dro", actor), "^policy_loss.dro_beta=None: "),
        (lambda: verl.objective_of("gspo", actor), r"^clip_ratio_high=-0\.1: "),
        (
            lambda: verl.linear_cross_entropy(HIDDEN, WEIGHT, IDS[:, 1:]),
            "^hidden has shape .*, but labels has",
        ),
        (
            lambda: verl.fused_linear_for_ppo(Plain(), HIDDEN, WEIGHT, IDS[:, 1:]),
            "^hidden_states has shape .*, but input_ids has",
        ),
        (
            lambda: openrlhf.PolicyLoss()(zeros, zeros, zeros[:, 1:], MASK),
            "^advantages has shape .*, but action_mask of shape",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


class Plain:
    """A module without options."""


# ---- AReaL's logits that nothing else reads


@parametrize("reuse", [False, True])
def test_areal_reuses_logits(reuse):
    """The gradient is written into the logits, except into those of a leaf."""
    leaf = FLAT.clone().requires_grad_()
    logits = leaf * 1.0
    logps, entropy = areal.gather_logprobs_entropy(
        logits, ROWS, temperature=0.7, reuse_logits=reuse
    )
    exact = FLAT.double().requires_grad_()
    a, b = log_softmax_of(exact, ROWS, 0.7)
    torch.testing.assert_close([logps.double(), entropy.double()], [a, b], rtol=1e-5, atol=1e-5)
    (logps.cos() - 0.3 * entropy).sum().backward()
    (a.cos() - 0.3 * b).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits.detach(), FLAT) != reuse
    areal.gather_logprobs_entropy(leaf, ROWS, reuse_logits=True)[0].sum().backward()
    assert torch.equal(leaf.detach(), FLAT)


# ---- how functions are replaced, restored, and compared under a version that was not tested: by
# AReaL's adapter, as by all others

HOME = "areal.utils.functional.vocab_parallel"


def gather_logprobs(logits, labels, temperature=1.0, tp_group=None, chunk_size=1024):
    return log_softmax_of(logits, labels, temperature)[0].float()


def gather_logprobs_entropy(logits, labels, temperature=1.0, tp_group=None, chunk_size=1024):
    logps, entropy = log_softmax_of(logits, labels, temperature)
    return logps.float(), entropy.detach().float()


@pytest.fixture
def home():
    return stand_in(
        HOME, gather_logprobs=gather_logprobs, gather_logprobs_entropy=gather_logprobs_entropy
    )


def test_a_function_with_other_required_arguments_is_refused_when_it_is_bound(home):
    for theirs, problem in (
        (lambda logits, labels, sharding: None, "it requires sharding"),
        (lambda logits: None, "it has no labels"),
    ):
        home.gather_logprobs = theirs
        with pytest.raises(
            RuntimeError, match=rf"but ours takes \(logits, labels, .*\): {problem}"
        ):
            areal.bind()
        assert (
            home.gather_logprobs is theirs
            and home.gather_logprobs_entropy is gather_logprobs_entropy
        )


def late_import(code):
    module = stand_in(f"areal.late_{len(sys.modules)}")
    exec(code, vars(module))
    return module


def test_modules_that_were_imported_late_are_given_back(home):
    """Under whatever name, before the binding or after it; also by a second binding."""
    early = late_import(f"from {HOME} import gather_logprobs as name")
    for _ in range(2):
        slots = areal.bind()
        late = late_import(f"from {HOME} import gather_logprobs as name")
        assert home.gather_logprobs is early.name is late.name is not gather_logprobs
        slots.undo()
        slots.undo()
        assert home.gather_logprobs is early.name is late.name is gather_logprobs


def test_what_went_wrong_inside_comes_first(home):
    """If other code has replaced the name by the end of the block, that is an error, unless the
    block has raised one already.
    """
    slots = areal.bind()
    ours, home.gather_logprobs = home.gather_logprobs, len
    with (
        pytest.raises(RuntimeError, match=r"was replaced again .*: undo the later replacement"),
        slots,
    ):
        pass
    with pytest.warns(UserWarning, match="was replaced again"), pytest.raises(KeyError), slots:
        raise KeyError
    home.gather_logprobs = ours
    slots.undo()
    assert home.gather_logprobs is gather_logprobs
    with (
        pytest.raises(
            RuntimeError, match=r"no call was fused in this block: AReaL did not call areal\."
        ),
        areal.bind(strict=True),
    ):
        pass


def test_nothing_stays_bound_after_an_error():
    names = {"logprobs_from_logits": len, "chunked_entropy_from_logits": sum}
    home = stand_in("skyrl.backends.skyrl_train.utils.torch_utils", **names)
    with pytest.raises(ImportError):
        skyrl.bind(megatron=True)  # there is no such module here
    assert home.logprobs_from_logits is len


# ---- what the comparison of an untested version sees


def needs_a_gpu(*args, **kwargs):
    raise AssertionError("needs a GPU")


def changed(what):
    return lambda logits, labels, temperature=1.0, tp_group=None, chunk_size=1024: what(
        *gather_logprobs_entropy(logits, labels, temperature)
    )


DIFFERENT = {
    "values, tensor 0 of 2": changed(lambda logps, entropy: (1.02 * logps, entropy)),
    "gradients, tensor 0 of 1": changed(
        lambda logps, entropy: (logps + 0.02 * (logps - logps.detach()), entropy)
    ),
    r"shapes \[\[96\], \[96\]\], and its own \[\[96\]\]": changed(lambda logps, entropy: logps),
    "nan apart": changed(lambda logps, entropy: (logps, entropy * torch.nan)),
    "its own function raised AssertionError: needs a GPU": needs_a_gpu,
}


@parametrize("message", DIFFERENT)
def test_other_results_are_refused_with_the_difference(home, newer, message):
    """Ours is taken off, and nothing of the caller is touched."""
    home.gather_logprobs_entropy, leaf = DIFFERENT[message], FLAT.clone().requires_grad_()
    slots = areal.bind()
    with pytest.raises(
        RuntimeError,
        match=(
            r"areal 99\.1.*gather_logprobs_entropy computes something else .*:"
            rf" .*{message}.*any_version=True"
        ),
    ):
        home.gather_logprobs_entropy(leaf, ROWS)
    assert (
        home.gather_logprobs_entropy is DIFFERENT[message]
        and home.gather_logprobs is gather_logprobs
    )
    assert not slots.counts and leaf.grad is None


@parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_function_is_compared_once_with_one_message(home, newer, dtype, recwarn):
    """Slopes in the first call that has them:

    old log-probs come first, without any; rows without tokens show nothing.
    """
    calls, leaf = [], FLAT.to(dtype).requires_grad_()
    home.gather_logprobs = lambda *args, **kwargs: (
        calls.append(torch.is_grad_enabled()) or gather_logprobs(*args, **kwargs)
    )
    with areal.bind(strict=True) as slots:
        with torch.no_grad():
            first = home.gather_logprobs(leaf, ROWS, 0.7)
        home.gather_logprobs(leaf[:0], ROWS[:0])
        assert not [w for w in recwarn if "They agree" in str(w.message)]
        for _ in range(2):
            assert torch.equal(home.gather_logprobs(leaf, ROWS, 0.7), first)
            home.gather_logprobs_entropy(leaf, ROWS)
    said = [str(w.message) for w in recwarn if "They agree" in str(w.message)]
    assert (
        len(said) == 1 and "areal 99.1 was not tested with this adapter (tested: 1.0.4)" in said[0]
    )
    assert len(calls) == 3 and slots.counts == {"fused": 6}


def test_what_cannot_be_compared_is_refused_when_it_is_bound(newer):
    """Its result is another than the trainer's, or options were chosen that give another."""
    stand_in("slime.utils.ppo_utils", calculate_log_probs_and_entropy=len)
    stand_in("slime.backends.megatron_utils.loss", _build_topp_keep_mask=lambda *_, **__: None)
    stand_in(
        "openrlhf.models.utils", log_probs_from_logits=len, compute_entropy=lambda logits: None
    )
    stand_in(
        "prime_rl.trainer.models.layers.lm_head",
        _SequenceChunkedLogProbEntropyFn=type("F", (), {"apply": len}),
    )
    for bind, options in (
        (slime.bind, {"replay": True}),
        (openrlhf.bind, {"entropy_temperature": 0.5}),
        (prime_rl.bind, {"entropy_over": "kept"}),
    ):
        with pytest.raises(RuntimeError, match="cannot be compared with ours in the first step"):
            bind(**options)
        bind(**options, any_version=True).undo()
    assert sys.modules["slime.utils.ppo_utils"].calculate_log_probs_and_entropy is len


# ---- nothing happens at import


def test_importing_adapters_imports_no_trainer():
    finish(start(
        "import sys, grpo_kernels, grpo_kernels.losses, grpo_kernels.distributed\n"
        "assert not any('integrations' in name for name in sys.modules)\n"
        "from grpo_kernels.integrations import adapters, trl\n"
        "assert [*adapters()] == 'areal liger megatron miles nemo_rl openrlhf prime_rl skyrl slime trl unsloth verl'.split()\n"
        "assert not {'trl', 'transformers', 'triton', 'liger_kernel', 'verl'} & {*sys.modules}\n"
        "try: trl.Trainer2\n"
        "except AttributeError as error: assert 'Trainer2' in str(error)\n"
    ))  # fmt: skip
