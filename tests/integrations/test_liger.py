"""Liger's losses by name: Liger 0.8.5 itself, ours in its place, `linear_grpo_loss` with the preset's numbers of Liger, and float64
(support/oracle.py), in loss, metrics and gradients. Its chunked loss runs here; its Triton functions in Triton's interpreter, in a
process of their own."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from support.processes import finish, start, start_ranks

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")

from liger_kernel import chunked_loss as chunked

from grpo_kernels import Objective, linear_grpo_loss
from grpo_kernels.formulas.surrogates import Cispo
from grpo_kernels.integrations import liger
from support.pairs import label, pairs
from support.trl_family import CLIPPED, LOSS_TYPES, Case, Data, assert_same, different, exact, objective_of, ours, run

parametrize = pytest.mark.parametrize

Theirs, Ours = chunked.LigerFusedLinearGRPOLoss, liger.LigerFusedLinearGRPOLoss
B, T, H, V = 5, 6, 8, 13
BY_ITEMS = ("dapo", "cispo", "vespo")


def made():
    """Sequences of unequal length, one of advantage 0, ratios beyond the clip bounds; what is masked is finite, for Liger."""
    g = torch.Generator().manual_seed(5)
    hidden, weight, bias = (
        torch.randn(B, T, H, generator=g),
        0.6 * torch.randn(V, H, generator=g),
        0.5 * torch.randn(V, generator=g),
    )
    ids = torch.randint(V, (B, T), generator=g)
    logps = torch.log_softmax((hidden @ weight.T + bias) / 0.9, -1).gather(2, ids[..., None])[..., 0]
    shift = torch.tensor([0.4, -0.35, -0.3, 0.1, 0.5])[:, None]
    weights = torch.exp(0.3 * torch.randn(B, T, generator=g))
    weights[0, 1] = 0.0
    return Data(
        hidden, weight, ids, torch.arange(T) < torch.tensor([6, 3, 5, 1, 4])[:, None], logps - shift - 0.15 * torch.randn(B, T, generator=g),
        logps + 0.2 + 0.5 * torch.randn(B, T, generator=g), torch.tensor([1.2, 0.8, -0.7, 0.0, -1.1]), bias, weights=weights,
        more={"ref_input": hidden + 0.3 * torch.randn(B, T, H, generator=g), "ref_weight": weight + 0.1 * torch.randn(V, H, generator=g),
              "ref_bias": -bias, "last": torch.randn(B, 1, V, generator=g)},
    )  # fmt: skip


@pytest.fixture
def data():
    return made()


GRID = pairs(
    loss_type=LOSS_TYPES, weights=(None, "token", "[B]", "[B, 1]"), mask=("float", "bool", "long", "full"), kl=("none", "plain", "ratio"),
    delta=(None, 1.3, 1.1), reference=("logps", "hidden", "hidden and bias"), items=(None, 37, torch.tensor(41)), level=("token", "sequence"),
    inplace=(True, False, "forward"), old=(True, False), bias=(True, False), chunk_size=(1, 3), upstream=(1.0, -2.5), temperature=(0.9, 1.3),
)  # fmt: skip


def of_row(row, data):
    """(case, data, what Liger's call has beside them)"""
    clips, beta = row["loss_type"] in CLIPPED, 0.0 if row["kl"] == "none" else 0.3
    case = Case(
        row["loss_type"],
        row["level"] if clips else "token",
        beta,
        row["kl"] == "ratio",
        row["delta"] if clips else None,
        budget=9,
    )
    mask, w = data.mask, data.weights
    if row["mask"] == "full":
        mask = torch.ones_like(mask)
    weights = {None: None, "token": w, "[B]": w[:, 0], "[B, 1]": w[:, :1]}[row["weights"]]
    call = {
        "num_items_in_batch": row["items"],
        "vllm_is_ratio": weights,
        "old_per_token_logps": data.old if row["old"] else None,
    }
    if row["reference"] == "logps":
        call["ref_per_token_logps"] = data.ref
    else:
        names = ("ref_input", "ref_weight", "ref_bias")
        given = {name: data.more[name] for name in names[: 2 + row["reference"].endswith("bias")]}
        call |= given
        logits = torch.nn.functional.linear(given["ref_input"], given["ref_weight"], given.get("ref_bias")) / row["temperature"]
        data = replace(data, ref=torch.log_softmax(logits, -1).gather(2, data.ids[..., None])[..., 0])
    if weights is not None and weights.shape != w.shape:
        weights = weights.reshape(B, 1).expand(B, T)
        if case.loss_type == "vespo":  # where the weight of a sequence counts once
            weights = torch.where((torch.arange(T) == 0), weights.clamp(min=1e-8), 1.0)
    data = replace(
        data, mask=mask, weights=weights, bias=data.bias if row["bias"] else None, old=data.old if row["old"] else None
    )
    return case, data, {name: x for name, x in call.items() if x is not None}


def options_of(case, row):
    options = {
        "loss_type": case.loss_type, "importance_sampling_level": case.level, "beta": case.beta, "delta": row["delta"],
        "use_bias_correction_kl": case.corrected, "max_completion_length": 9, "temperature": row["temperature"],
    }  # fmt: skip
    own = {
        "sapo": dict(zip(("sapo_temperature_pos", "sapo_temperature_neg"), case.sapo, strict=True)),
        "vespo": dict(zip(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), case.vespo, strict=True)),
    }
    return {name: x for name, x in (options | own.get(case.loss_type, {})).items() if x is not None and x is not False}


def skip_what_it_lacks(options, call):
    """An older Liger has not all loss types, options and arguments (tests/repository/trainer_versions.py)."""
    if metadata.version("liger-kernel") != liger.LIGER_VERSION:
        known = {*inspect.signature(Theirs.__init__).parameters, *inspect.signature(Theirs.forward).parameters}
        if {*options, *call} - known or f'"{options["loss_type"]}"' not in inspect.getsource(sys.modules[Theirs.__module__]):
            pytest.skip("this Liger has not all of it")


def high_of(case):
    return case.cap if case.loss_type == "cispo" else case.epsilons[1]


def module_run(kind, options, data, call, mask, upstream=1.0):
    def loss(leaves):
        bias = {"bias": leaves[2]} if data.bias is not None else {}
        value, metrics = kind(**options)(*leaves[:2], data.ids, mask, data.advantages, **bias, **call)
        assert type(metrics) is tuple and value.shape == () and value.dtype == torch.float32
        assert all(x.dtype == torch.float32 and not x.requires_grad for x in metrics)
        return value, [float(x) for x in metrics]

    return run(data, loss, upstream)


def scaled(result, factor):
    return replace(result, gradients=[factor * x for x in result.gradients])


def metrics_of(case, result):
    """Liger's, of float64 or of `linear_grpo_loss`."""
    kl = [result.metrics["kl"]] if case.beta else []
    return [*kl, result.metrics["clip_low"] + result.metrics["clip_high"]]


def triton(function, case, row, data, logits, call, **more):
    """A call of Liger's function of logits, or of ours."""
    options = options_of(case, row) | {"delta": case.delta, "eps_low": case.epsilons[0], "eps_high": high_of(case)} | more
    given = {name: call.get(name) for name in ("vllm_is_ratio", "num_items_in_batch")}
    return function(
        logits, data.old, data.ref if case.beta else None, data.ids, data.advantages, data.mask.long(), **options, **given
    )


@pytest.mark.filterwarnings("ignore:as_liger=True")
@parametrize("row", GRID, ids=label)
def test_every_way_to_the_loss(data, row):
    """Liger and ours with as_liger, number by number under masks too; ours, `linear_grpo_loss` and ours of logits, reduced or
    summed up from the losses of tokens: float64."""
    case, data, call = of_row(row, data)
    mask = data.mask.to({"float": torch.float32, "long": torch.int64}.get(row["mask"], torch.bool))
    options = options_of(case, row) | {
        "epsilon_low": case.epsilons[0], "epsilon_high": high_of(case), "chunk_size": row["chunk_size"], "use_ref_model": case.beta != 0,
        "compiled": False,
    }  # fmt: skip
    skip_what_it_lacks(options, call)
    D = float(row["items"]) if row["items"] is not None and case.loss_type in BY_ITEMS else None
    want = exact(case, data, D, row["temperature"])
    wanted = pytest.approx(metrics_of(case, want), rel=1e-4, abs=1e-6)
    theirs = module_run(Theirs, options, data, call, mask, row["upstream"])
    mine = module_run(Ours, options, data, call, mask, row["upstream"])
    as_liger = module_run(Ours, options | {"as_liger": True}, data, call, mask, row["upstream"])
    assert float(want.gradients[0].abs().max()) > 1e-4
    assert_same(as_liger, theirs, "as Liger", 3e-5)
    assert as_liger.metrics == pytest.approx(theirs.metrics, rel=1e-4, abs=1e-6)
    assert_same(mine, scaled(want, row["upstream"]), "ours")
    assert mine.metrics == wanted
    linear = ours(case, data, linear_grpo_loss, objective_of(case, "liger"), D, row["temperature"])
    assert_same(linear, want, "linear_grpo_loss")
    assert metrics_of(case, linear) == wanted

    lengths = data.mask.sum(1, keepdim=True)
    share = {"grpo": 1 / lengths / B, "sapo": 1 / lengths / B, "luspo": 1 / B, "dr_grpo": 1 / B / 9}.get(
        case.loss_type, 1 / (D or float(lengths.sum()))
    )
    for reduce in (True, False):

        def of_logits(leaves, reduce=reduce):
            logits = torch.cat([data.logits(*leaves), data.more["last"]], 1) * 1.0
            before = logits.detach().clone()
            out = triton(liger.triton_grpo_loss, case, row, data, logits, call, reduce=reduce, inplace=row["inplace"])
            in_one_visit = reduce and case.level == "token" and case.loss_type != "vespo"
            assert torch.equal(logits, before) == (row["inplace"] != "forward" or not in_one_visit)
            if reduce:
                return out[0], [float(x) for x in out[1]]
            return (out[0] * share).sum(), [float(x.sum() / lengths.sum()) for x in out[1:] if x is not None]

        got = run(data, of_logits)
        assert_same(got, want, f"of logits, reduce={reduce}")
        assert got.metrics == wanted


@parametrize("loss_type, kl", [("luspo", 0.3), ("vespo", 0.0)])
def test_ligers_defects_of_padding(data, loss_type, kl):
    """LUSPO weighs padding and divides by the padded length; VESPO counts the weights of masked positions, and a weight of 0
    silences its sequence. as_liger=True says so, for these two alone."""
    call = {"old_per_token_logps": data.old, "ref_per_token_logps": data.ref, "vllm_is_ratio": data.weights}
    options = {"loss_type": loss_type, "beta": kl, "compiled": False, "use_ref_model": kl != 0}
    theirs, mine = (module_run(kind, options, data, call, data.mask) for kind in (Theirs, Ours))
    assert different(theirs, mine, 0.02)
    with pytest.warns(UserWarning, match=f"as_liger=True: loss_type='{loss_type}' counts masked positions"):
        module_run(Ours, options | {"as_liger": True}, data, call, data.mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module_run(Ours, options | {"as_liger": True, "loss_type": "sapo"}, data, call, data.mask)


@parametrize("loss_type", LOSS_TYPES)
def test_presets_have_ligers_defaults(data, loss_type):
    """Nothing passed: clip widths, beta = 0.04 and temperature 1 are Liger's own. CISPO's cap, of which Liger makes an absolute
    ratio of 0.2, is the paper's. LUSPO's sequences are not padded."""
    data = replace(data, mask=torch.ones_like(data.mask), weights=None)
    options = {"loss_type": loss_type, "max_completion_length": 9, "compiled": False}
    objective = Objective.preset(loss_type, numerics="liger", **{"max_tokens": 9} if loss_type == "dr_grpo" else {})
    if loss_type == "luspo":
        options["importance_sampling_level"] = "sequence"
    if loss_type == "cispo":
        assert Theirs().epsilon_high == 0.2 and objective.surrogate == Cispo(5.0)
        options["epsilon_high"] = 5.0
    skip_what_it_lacks(options, {})
    theirs = module_run(Theirs, options, data, {"old_per_token_logps": data.old, "ref_per_token_logps": data.ref}, data.mask)
    assert_same(ours(Case(beta=0.04), data, linear_grpo_loss, objective, temperature=1.0), theirs, loss_type)


def test_signatures():
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax as selective
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss as theirs

    def of(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    own = [(name, inspect.Parameter.KEYWORD_ONLY, False) for name in ("as_liger", "any_version")]
    assert of(Ours.__init__) == [*of(Theirs.__init__), *own] and of(Ours.forward) == of(Theirs.forward)
    assert of(liger.triton_grpo_loss) == of(theirs) and of(liger.fused_selective_log_softmax) == of(selective)
    mine, yours = vars(Ours(beta=0.1, chunk_size=3)), vars(Theirs(beta=0.1, chunk_size=3))
    assert {n: v for n, v in yours.items() if n[0] != "_"} == {n: v for n, v in mine.items() if n[0] != "_" and n != "as_liger"}


def test_the_version_is_the_installed_one():
    assert metadata.version("liger-kernel") == liger.LIGER_VERSION, "a new Liger: run these tests, then name it"


@parametrize("autocast", [False, True])
def test_strides_and_types(data, autocast):
    """A slice of hidden states as TRL passes it: in bf16 with an fp32 head; fp32 under autocast."""
    wide = torch.zeros(B, T + 2, H)
    wide[:, 1:-1] = data.hidden
    hidden = (wide if autocast else wide.bfloat16()).requires_grad_()
    weight, results = data.head.clone().requires_grad_(), []
    for kind in (Ours, Theirs):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, metrics = kind(beta=0.0, use_ref_model=False, compiled=False)(
                hidden[:, 1:-1], weight, data.ids, data.mask, data.advantages, old_per_token_logps=data.old
            )
        results.append((loss.detach(), metrics[0], *torch.autograd.grad(loss, (hidden, weight))))
    for a, b in zip(*results, strict=True):
        assert_close(a, b, rtol=0, atol=0.02 * float(b.abs().max()))  # dtypes too


def test_masked_rows_and_frozen_heads(data):
    """Masked positions may hold anything, which Liger does not allow; a head without gradient, as of LoRA in the body."""
    hidden, old, ref = (x.clone() for x in (data.hidden, data.old, data.ref))
    for x in (hidden, old, ref):
        x[~data.mask] = math.nan
    call = {"old_per_token_logps": data.old, "ref_per_token_logps": data.ref}
    want = module_run(Theirs, {"compiled": False}, data, call, data.mask)
    leaf = hidden.requires_grad_()
    ids = data.ids.masked_fill(~data.mask, -100)
    loss = Ours()(
        leaf, data.head, ids, data.mask, data.advantages, data.bias, ref_per_token_logps=ref, old_per_token_logps=old
    )[0]
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert_close(loss.detach(), want.loss)
    assert_close(gradient, want.gradients[0], rtol=1e-4, atol=1e-6)


@parametrize("rows, columns, mask", [(B, T, 0.0), (0, T, 1.0), (B, 0, 1.0)])
def test_nothing_to_train_on_is_a_differentiable_0(rows, columns, mask):
    hidden, weight = torch.zeros(rows, columns, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    ids = torch.zeros(rows, columns, dtype=torch.int64)
    loss, metrics = Ours(beta=0.0)(hidden, weight, ids, torch.full(ids.shape, mask), torch.zeros(rows))
    loss.backward()
    assert loss == 0 and metrics[0] == 0 and weight.grad is not None and not weight.grad.any()


def test_options_are_read_on_every_call(data):
    module, found = Ours(beta=0.0, temperature=0.9), []
    for width in (0.2, 0.01):
        module.epsilon_low = module.epsilon_high = width
        found.append(
            module(*data.parameters[:2], data.ids, data.mask, data.advantages, data.bias, old_per_token_logps=data.old)[0]
        )
        fresh = Ours(beta=0.0, temperature=0.9, epsilon_low=width, epsilon_high=width)
        assert (
            found[-1]
            == fresh(*data.parameters[:2], data.ids, data.mask, data.advantages, data.bias, old_per_token_logps=data.old)[0]
        )
    assert abs(float(found[0] - found[1])) > 1e-2


WARNED = {
    "a KL without a reference model": ({"use_ref_model": False}, {}, "use_ref_model=False"),  # Liger's is silently 0
    "CISPO's default cap": ({"loss_type": "cispo"}, {}, "epsilon_high=0.2 is CISPO's cap"),
    "a reference twice": (
        {},
        {"ref_input", "ref_weight"},
        "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.",
    ),
}


@parametrize("what", WARNED)
def test_liger_s_result_with_a_warning(data, what):
    options, more, message = WARNED[what]
    call = {"old_per_token_logps": data.old, "ref_per_token_logps": data.ref} | {name: data.more[name] for name in more}
    with pytest.warns(UserWarning, match=message):
        mine = module_run(Ours, options, data, call, data.mask)
    with pytest.warns(UserWarning, match=message) if more else warnings.catch_warnings():  # in Liger's words
        theirs = module_run(Theirs, options | {"compiled": False}, data, call, data.mask)
    assert_same(mine, theirs, what)
    assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-4)


#: Options and arguments of the chunked loss; Liger asserts or goes on.
REFUSED = {
    "loss_type='ppo'": ({"loss_type": "ppo"}, None), "max_completion_length": ({"loss_type": "dr_grpo"}, None),
    "importance_sampling_level='batch'": ({"importance_sampling_level": "batch"}, None),
    "ref_per_token_logps and ref_input are None": ({"beta": 0.04}, lambda d: {"ref_per_token_logps": None}),
    "delta": ({"delta": -1.0}, None), "sapo_temperature_neg": ({"sapo_temperature_neg": 0.0}, None),
    "old_per_token_logps": ({}, lambda d: {"old_per_token_logps": d.old[:, 1:]}), "vllm_is_ratio": ({}, lambda d: {"vllm_is_ratio": d.weights[:, :2]}),
    "attention_mask has shape": ({}, lambda d: {"mask": d.mask[:, 1:]}), "attention_mask holds": ({}, lambda d: {"mask": 0.5 * d.mask}),
}  # fmt: skip


@parametrize("message", REFUSED)
def test_refused(data, message):
    options, changes = REFUSED[message]
    call = {"mask": data.mask, "ref_per_token_logps": data.ref} | (changes(data) if changes else {})
    with pytest.raises(ValueError, match=message):
        module_run(Ours, {"beta": 0.0, **options}, data, call, call.pop("mask"))


@parametrize("message, options", [
    ("delta", {"loss_type": "sapo", "delta": 2.0}), ("inplace", {"inplace": "backward"}), ("delta", {"delta": 0.9}),
    ("Sequence-level importance sampling is not supported", {"loss_type": "vespo", "importance_sampling_level": "sequence"}),
    ("ref_logp is None", {"beta": 0.1}), (r"must be \[5, 6, V\]", {}),
])  # fmt: skip
def test_refused_from_logits(data, message, options):
    logits = data.logits(*data.parameters) if "5, 6" not in message else data.logits(*data.parameters)[:, 1:]
    with pytest.raises(ValueError, match=message):
        liger.triton_grpo_loss(logits, None, None, data.ids[:, 1:], data.advantages, **{"beta": 0.0, **options})


@parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_a_level_that_a_loss_does_not_support_in_ligers_words(data, loss_type):
    options, texts = {"loss_type": loss_type, "importance_sampling_level": "sequence", "beta": 0.0, "use_ref_model": False}, []
    for kind in (Theirs, Ours):
        with pytest.raises(ValueError, match="Sequence-level") as error:
            module_run(kind, options, data, {}, data.mask)
        texts.append(str(error.value))
    assert texts[0] in texts[1] and "importance_sampling_level='sequence'" in texts[1]


# ---- the loss from logits


@pytest.fixture
def logits(data):
    return torch.cat([data.logits(*data.parameters), data.more["last"]], 1)


def of_logits(data, logits, mask=None, **options):
    return liger.triton_grpo_loss(logits, data.old, data.ref, data.ids, data.advantages, mask, **options)


def test_other_logits(data, logits):
    """No mask, 16 bits, a leaf in place, strides, no gradient wanted; NaN may come from upstream where masked."""
    leaf, whole = logits.clone().requires_grad_(), torch.ones_like(data.mask)
    losses = of_logits(data, leaf)[0]
    (want,) = torch.autograd.grad(losses.sum(), leaf)
    assert_close(losses, of_logits(data, logits.clone(), whole)[0])
    wide = torch.zeros(B, T + 3, V)
    wide[:, 1:-1] = logits
    assert_close(of_logits(data, wide[:, 1:-1])[0], losses.detach())
    for dtype in (torch.bfloat16, torch.float16):
        leaf = logits.to(dtype).requires_grad_()
        of_logits(data, leaf, inplace=False)[0].sum().backward()
        assert leaf.grad.dtype == dtype and not leaf.grad[:, -1].any()
        assert_close(leaf.grad.float(), want, rtol=0, atol=0.03 * float(want.abs().max()))
    with torch.no_grad():
        given = logits.clone()
        assert not of_logits(data, given, reduce=True, inplace="forward")[0].requires_grad and torch.equal(given, logits)
    leaf = logits.clone().requires_grad_()
    of_logits(data, leaf, data.mask)[0].backward(torch.where(data.mask, 1.0, math.nan))
    assert_close(leaf.grad[:, :-1], want[:, :-1] * data.mask[..., None])


def test_overwritten_logits_are_noticed(data, logits):
    """Liger's version counter stays: autograd then uses a gradient for logits."""
    given = logits.clone().requires_grad_() * 1.0
    other = (given * given).sum()  # needs the logits in its backward
    of_logits(data, given)[0].sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_a_second_backward(data, logits):
    """Per-token losses allow any number of backwards. A reduced loss allows one, and says so."""
    leaf = logits.clone().requires_grad_()
    losses = of_logits(data, leaf, inplace=False)[0]
    assert torch.equal(*(torch.autograd.grad(losses.sum(), leaf, retain_graph=True)[0] for _ in range(2)))
    loss = of_logits(data, leaf, inplace=False, reduce=True)[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already handed over"):
        loss.backward()


def test_selective_log_softmax(data, logits):
    """The last L of longer ids and masks, as in Liger's example."""
    longer, mask = (torch.cat([x[:, :3], x], 1) for x in (data.ids, data.mask.float()))
    found = liger.fused_selective_log_softmax(logits.requires_grad_(), longer, 0.7, mask)
    want = torch.log_softmax(logits.detach().double()[:, :-1] / 0.7, -1).gather(2, data.ids[..., None])[..., 0]
    assert found.dtype == torch.float32 and not found.requires_grad
    assert_close(found.double(), want * data.mask, rtol=1e-5, atol=1e-6)
    plain = liger.fused_selective_log_softmax(logits, data.ids)
    assert torch.equal(plain, liger.fused_selective_log_softmax(logits, longer, 0.9)) and (plain != 0).all()


# ---- Liger's Triton functions, interpreted


INTERPRETED = pairs(
    loss_type=[name for name in LOSS_TYPES if name != "bnpo"], weights=(None, "token"), kl=("none", "ratio"), delta=(None, 1.1),
    items=(None, 37), level=("token", "sequence"), reduce=(True, False), old=(True, False),
)  # fmt: skip
FIXED = {"mask": "bool", "reference": "logps", "bias": True, "temperature": 0.9}


def interpreted_results(function):
    """(results, gradient) of every case. LUSPO's reduced gradient reads beyond the end of a tensor in Liger: it is not taken."""
    made_ones = []
    for row in INTERPRETED:
        case, data, call = of_row(row | FIXED, made())
        logits = torch.cat([data.logits(*data.parameters), data.more["last"]], 1).requires_grad_()
        out = triton(function, case, row | FIXED, data, logits, call, reduce=row["reduce"], inplace=False)
        up = None if row["reduce"] else torch.linspace(-1, 1, B * T).view(B, T)
        gradient = None if row["reduce"] and case.loss_type == "luspo" else torch.autograd.grad(out[0], logits, up)[0]
        parts = (out[0], *out[1]) if row["reduce"] else out
        made_ones.append(([None if x is None else x.detach() for x in parts], gradient))
    return made_ones


def interpreted(target):
    """In a process of its own: Liger's results for the cases of this file, and what it leaves of the logits that it overwrites."""
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax as selective
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss as theirs

    data = made()
    logits = torch.cat([data.logits(*data.parameters), data.more["last"]], 1)
    logps = selective(logits, data.ids, 0.7, data.mask.long())
    given = logits.clone().requires_grad_() * 1.0
    version = given._version
    loss, _ = theirs(given, data.old, data.ref, data.ids, data.advantages, data.mask.long(), reduce=True)
    (gradient,) = torch.autograd.grad(loss, given)
    unnoticed = given._version == version and not torch.equal(given.detach(), logits)
    torch.save((interpreted_results(theirs), logps, (loss.detach(), gradient), unnoticed), target)


def test_the_same_results_as_interpreted_triton(data, logits, tmp_path):
    """Per token and reduced, in value, metrics and gradient, and by its defaults. But for defects of Liger's: LUSPO reduced
    multiplies by the length twice at sequence level; a delta below 1 + eps_high drops the gradient of tokens with A < 0 and a ratio
    between the two; the version counter of overwritten logits stays."""
    pytest.importorskip("triton")
    target = tmp_path / "made.pt"
    finish(start("import sys; from test_liger import interpreted; interpreted(sys.argv[1])", str(target), TRITON_INTERPRET="1"))
    results, logps, (loss, gradient), unnoticed = torch.load(target)
    assert_close(liger.fused_selective_log_softmax(logits, data.ids, 0.7, data.mask), logps, rtol=1e-5, atol=1e-6)
    leaf = logits.clone().requires_grad_()
    mine = of_logits(data, leaf, data.mask, reduce=True)[0]
    assert_close((mine, torch.autograd.grad(mine, leaf)[0]), (loss, gradient), rtol=1e-4, atol=1e-6)
    assert unnoticed
    for row, (want, theirs), (got, own) in zip(INTERPRETED, results, interpreted_results(liger.triton_grpo_loss), strict=True):
        what = label(row)
        assert [x is None for x in got] == [x is None for x in want], what
        if theirs is None:
            continue
        vespo_zero = row["loss_type"] == "vespo" and row["weights"] == "token"  # a weight of 0, as in the chunked loss
        if not vespo_zero:
            assert_close(got, want, rtol=1e-4, atol=1e-6, msg=lambda m, what=what: f"{what}: {m}")
        off = float((own - theirs).abs().max() / own.abs().max())
        if not vespo_zero and (row["delta"] is None or row["loss_type"] not in CLIPPED):
            assert off < 1e-4, what


def test_the_example(monkeypatch, capsys):
    """examples/liger_swap.py, smaller: it asserts what it claims."""
    swap = pytest.importorskip("examples.liger_swap")
    monkeypatch.setattr(swap, "VOCAB", 300)
    monkeypatch.setattr(swap, "WIDTH", 16)
    monkeypatch.setattr(swap, "peak_memory", lambda run, device: (run(), 0)[1])
    swap.main()
    assert "gradient differs from autograd's by" in capsys.readouterr().out


def two_ranks(rank, store):
    """Without num_items_in_batch both average their token counts over the ranks, of which one has none."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    data = made()
    for count in (None, 33):
        for mask in (data.mask if rank else ~data.mask, data.mask * rank):
            call = {"old_per_token_logps": data.old, "ref_per_token_logps": data.ref, "num_items_in_batch": count}
            mine, theirs = (module_run(kind, {"compiled": False, "chunk_size": B}, data, call, mask) for kind in (Ours, Theirs))
            assert_close(mine.loss, theirs.loss, rtol=1e-5, atol=1e-6)  # chunks of all: its ranks call once a chunk
    dist.barrier()


def test_two_ranks(tmp_path):
    finish(start_ranks(2, two_ranks, str(tmp_path / "store")))


# ---- the loss in Liger's place, and versions of Liger that were not tested


def short_call():
    g = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(*shape, generator=g).requires_grad_() for shape in ((2, 5, H), (V, H)))
    mask = torch.arange(5) < torch.tensor([[2], [4]])
    return hidden, weight, torch.randint(V, (2, 5), generator=g), mask.float(), torch.tensor([1.0, -0.2])


SHORT = {"beta": 0.0, "temperature": 0.7, "loss_type": "bnpo", "use_ref_model": False}


@pytest.fixture
def newer(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "99.1")
    monkeypatch.delenv("GRPO_KERNELS_ANY_VERSION", raising=False)


class Counting(Theirs):
    """Liger's class with a count of its calls, and another factor."""

    changed, calls = 1.0, 0

    def forward(self, *args, **kwargs):
        Counting.calls += 1
        loss, metrics = super().forward(*args, **kwargs)
        return self.changed * loss, metrics


Counting.__module__ = chunked.__name__


@pytest.fixture(params=[1.0, 1.02])
def changed(request, monkeypatch):
    monkeypatch.setattr(chunked, "LigerFusedLinearGRPOLoss", Counting)
    monkeypatch.setattr(Counting, "changed", request.param)
    monkeypatch.setattr(Counting, "calls", 0)
    return request.param


@parametrize("attribute", liger.ATTRIBUTES)
def test_the_slot_of_one_trainer(newer, changed, attribute):
    theirs, given = Counting(compiled=False, **SHORT), short_call()
    trainer = SimpleNamespace(**{attribute: theirs})
    slots = liger.patch(trainer)
    with pytest.raises(RuntimeError, match=f"{attribute} of this trainer is ours already"):
        liger.patch(trainer)
    if changed != 1:
        with pytest.raises(RuntimeError, match=r"liger-kernel 99\.1.*loss is not what it was: values"):
            getattr(trainer, attribute)(*given)
        assert getattr(trainer, attribute) is theirs and given[0].grad is None
        return
    with pytest.warns(UserWarning, match=r"liger-kernel 99\.1.*They agree"):
        got = getattr(trainer, attribute)(*given)[0]
    getattr(trainer, attribute)(*given)
    assert slots.counts == {"fused": 2} and Counting.calls == 1
    slots.undo()
    assert_close(got, getattr(trainer, attribute)(*given)[0])
    assert getattr(trainer, attribute) is theirs


def test_trainers_without_a_slot():
    with pytest.raises(
        RuntimeError,
        match=r"SimpleNamespace has no loss of Liger's.*use_liger_kernel=True.*before 0\.17 install.*fused_lm_head",
    ):
        liger.patch(SimpleNamespace())
    with pytest.raises(RuntimeError, match=r"has no beta, epsilon_high.*not Liger's"):
        liger.patch(SimpleNamespace(liger_loss=len), any_version=True)


@parametrize("loss_type", ["bnpo", "luspo"])
def test_the_class_of_an_untested_liger_is_compared_once(newer, changed, loss_type, monkeypatch, recwarn):
    """On the arguments of the first call. LUSPO counts padding in the comparison, and not after it."""
    options, given = SHORT | {"loss_type": loss_type}, short_call()
    want = Ours(**options, any_version=True)(*given)[0]
    with monkeypatch.context() as known:
        known.setattr(metadata, "version", lambda _: liger.LIGER_VERSION)
        assert torch.equal(Ours(**options)(*given)[0], want) and not Counting.calls
    module = Ours(**options)
    if changed != 1:
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"liger-kernel 99\.1.*LigerFusedLinearGRPOLoss is not what it was: values.*any_version=True"
            ):
                module(*given)
        assert given[0].grad is None and Counting.calls == 2
        return
    assert all(torch.equal(module(*given)[0], want) for _ in range(2))
    assert Counting.calls == 1 and len([w for w in recwarn if "99.1" in str(w.message) and "They agree" in str(w.message)]) == 1


def test_an_older_liger_without_an_option(newer, monkeypatch, recwarn):
    """What it lacks is left out where ours has the default, and named where not; a Liger that cannot be imported is none."""

    def older(beta=0.04, compiled=True, use_ref_model=True, loss_type="bnpo"):
        return Theirs(beta, compiled, use_ref_model, loss_type=loss_type)

    monkeypatch.setattr(chunked, "LigerFusedLinearGRPOLoss", older)
    given = short_call()
    with pytest.warns(UserWarning, match="They agree"):
        Ours(beta=0.0)(*given)
    module = Ours(beta=0.0, delta=1.5)
    with pytest.raises(RuntimeError, match=r"its own function raised TypeError: .*'delta'"):
        module(*given)
    monkeypatch.setitem(sys.modules, "liger_kernel.chunked_loss", None)
    module(*given)
