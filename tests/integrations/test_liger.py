"""Liger's losses by name: Liger 0.8.5 itself, ours in its place, `linear_grpo_loss` of the same options and ours of logits, in
loss, metrics and gradients. Its chunked loss runs here; its Triton functions in Triton's interpreter, in a process of their
own."""

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

from grpo_kernels import Cispo, Head, LogitTransform, Objective, TokenBatch, linear_grpo_loss
from grpo_kernels.integrations import liger
from support.pairs import label, pairs
from support.trl_family import CLIPPED, LOSS_TYPES, Case, Data, assert_same, different, run

parametrize = pytest.mark.parametrize

Theirs, Ours = chunked.LigerFusedLinearGRPOLoss, liger.LigerFusedLinearGRPOLoss
B, T, H, V = 5, 6, 8, 13


def made():
    """Sequences of unequal length, one of advantage 0, ratios beyond the clip bounds; what is masked is finite, for Liger."""
    g = torch.Generator().manual_seed(5)
    shapes = ((B, T, H), 1.0), ((V, H), 0.6), ((V,), 0.5)
    hidden, weight, bias = (size * torch.randn(*shape, generator=g) for shape, size in shapes)
    ids = torch.randint(V, (B, T), generator=g)
    logps = torch.log_softmax((hidden @ weight.T + bias) / 0.9, -1).gather(2, ids[..., None])[..., 0]
    weights = torch.exp(0.3 * torch.randn(B, T, generator=g))
    weights[0, 1] = 0.0
    old, ref = (logps + x * torch.randn(B, T, generator=g) + y for x, y in (
        (0.15, torch.tensor([-0.4, 0.35, 0.3, -0.1, -0.5])[:, None]), (0.5, 0.2)))  # fmt: skip
    more = {"ref_input": hidden + 0.3 * torch.randn(B, T, H, generator=g), "ref_weight": weight + 0.1 * torch.randn(V, H, generator=g),
            "ref_bias": -bias, "last": torch.randn(B, 1, V, generator=g)}  # fmt: skip
    mask = torch.arange(T) < torch.tensor([6, 3, 5, 1, 4])[:, None]
    return Data(
        hidden, weight, ids, mask, old, ref, torch.tensor([1.2, 0.8, -0.7, 0.0, -1.1]), bias, weights=weights, more=more
    )


@pytest.fixture
def data():
    return made()


def leaves_of(data):
    return [x for x in (data.hidden, data.head, data.bias) if x is not None]


GRID = pairs(
    loss_type=LOSS_TYPES, weights=(None, "token", "[B]", "[B, 1]"), mask=("float", "bool", "long", "full"), kl=("none", "plain", "ratio"),
    delta=(None, 1.3, 1.1), reference=("logps", "hidden", "hidden and bias"), items=(None, 37, torch.tensor(41)), level=("token", "sequence"),
    inplace=(True, False, "forward"), old=(True, False), bias=(True, False), chunk_size=(1, 3), upstream=(1.0, -2.5), temperature=(0.9, 1.3),
)  # fmt: skip


def of_row(row, data):
    """(case, data, what Liger's call has beside them)"""
    clips = row["loss_type"] in CLIPPED
    case = Case(
        row["loss_type"], row["level"] if clips else "token", 0.0 if row["kl"] == "none" else 0.3, row["kl"] == "ratio", row["delta"] if clips else None,
    )  # fmt: skip
    w, names = data.weights, ("ref_input", "ref_weight", "ref_bias")
    weights = {None: None, "token": w, "[B]": w[:, 0], "[B, 1]": w[:, :1]}[row["weights"]]
    data = replace(
        data, mask=data.mask | (row["mask"] == "full"), bias=data.bias if row["bias"] else None, old=data.old if row["old"] else None,
    )  # fmt: skip
    call = {"num_items_in_batch": row["items"], "vllm_is_ratio": weights, "old_per_token_logps": data.old}
    if row["reference"] == "logps":
        call["ref_per_token_logps"] = data.ref
    else:
        given = {name: data.more[name] for name in names[: 2 + row["reference"].endswith("bias")]}
        logits = torch.nn.functional.linear(*given.values()) / row["temperature"]
        call, data = call | given, replace(data, ref=torch.log_softmax(logits, -1).gather(2, data.ids[..., None])[..., 0])
    return case, data, {name: x for name, x in call.items() if x is not None}


def options_of(case, row):
    options = {
        "loss_type": case.loss_type, "importance_sampling_level": case.level, "beta": case.beta, "delta": row["delta"],
        "use_bias_correction_kl": case.corrected, "max_completion_length": 9, "temperature": row["temperature"],
    }  # fmt: skip
    own = {name: x for name, x in case.constants.items() if name.startswith(case.loss_type)}
    return {name: x for name, x in (options | own).items() if x is not None and x is not False}


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

    return run(leaves_of(data), loss, upstream)


def same(got, want, what, upstream=1.0, tolerance=2e-5):
    assert_same(got, replace(want, gradients=[upstream * x for x in want.gradients]), what, tolerance)
    assert got.metrics == pytest.approx(want.metrics, rel=1e-4, abs=1e-6), what


def core_run(data, objective, weights=None, D=None, temperature=1.0):
    """`linear_grpo_loss`, with Liger's metrics of it."""

    def loss(leaves):
        batch = TokenBatch(
            data.ids,
            data.advantages,
            mask=data.mask,
            old_logps=data.old,
            ref_logps=data.ref if objective.beta else None,
            weights=weights,
        )
        bias = leaves[2] if data.bias is not None else None
        out = linear_grpo_loss(
            leaves[0], Head(leaves[1], bias), batch, objective, transform=LogitTransform(temperature), normalizer=D
        )
        found = {name: float(x) for name, x in out.metrics.items()}
        return out.loss, [*([found["kl"]] if objective.beta else []), found["clip_low"] + found["clip_high"]]

    return run(leaves_of(data), loss)


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
    """Liger and ours with as_liger, number by number under masks too. Ours, `linear_grpo_loss` of its objective, and ours of
    logits, reduced or summed up from the losses of tokens, are one number, and Liger's where it counts no padding."""
    case, data, call = of_row(row, data)
    mask = data.mask.to({"float": torch.float32, "long": torch.int64}.get(row["mask"], torch.bool))
    options = options_of(case, row) | {
        "epsilon_low": case.epsilons[0], "epsilon_high": high_of(case), "chunk_size": row["chunk_size"], "use_ref_model": case.beta != 0,
        "compiled": False,
    }  # fmt: skip
    skip_what_it_lacks(options, call)
    theirs, want, as_liger = (
        module_run(kind, options | more, data, call, mask, row["upstream"]) for kind, more in ((Theirs, {}), (Ours, {}), (Ours, {"as_liger": True}))
    )  # fmt: skip
    assert float(theirs.gradients[0].abs().max()) > 1e-4
    same(as_liger, theirs, "as Liger", tolerance=3e-5)
    if case.loss_type not in ("luspo", "vespo"):
        same(want, theirs, "Liger", tolerance=3e-5)
    D = float(row["items"]) if row["items"] is not None and case.loss_type in ("dapo", "cispo", "vespo") else None
    weights = call.get("vllm_is_ratio")
    if weights is not None:
        weights = weights.reshape(B, -1).expand(B, T)
        if row["weights"] != "token" and case.loss_type == "vespo":  # where the weight of a sequence counts once
            weights = torch.where(torch.arange(T) == 0, weights.clamp(min=1e-8), 1.0)
    core = core_run(data, Ours(**options).objective(), weights, D, row["temperature"])
    same(want, core, "linear_grpo_loss", row["upstream"])

    lengths = data.mask.sum(1, keepdim=True)
    share = {"grpo": 1 / lengths / B, "sapo": 1 / lengths / B, "luspo": 1 / B, "dr_grpo": 1 / B / 9}.get(
        case.loss_type, 1 / (D or float(lengths.sum()))
    )
    for reduce in (True, False):

        def of_logits(leaves, reduce=reduce):
            logits = torch.cat([torch.nn.functional.linear(*leaves), data.more["last"]], 1) * 1.0
            before = logits.detach().clone()
            out = triton(liger.triton_grpo_loss, case, row, data, logits, call, reduce=reduce, inplace=row["inplace"])
            in_one_visit = reduce and case.level == "token" and case.loss_type != "vespo"
            assert torch.equal(logits, before) == (row["inplace"] != "forward" or not in_one_visit)
            if reduce:
                return out[0], [float(x) for x in out[1]]
            return (out[0] * share).sum(), [float(x.sum() / lengths.sum()) for x in out[1:] if x is not None]

        same(run(leaves_of(data), of_logits), core, f"of logits, reduce={reduce}")


@parametrize("loss_type, kl", [("luspo", 0.3), ("vespo", 0.0)])
def test_ligers_defects_of_padding(data, loss_type, kl):
    """LUSPO weighs padding and divides by the padded length; VESPO counts the weights of masked positions, and a weight of 0
    silences its sequence. as_liger=True says so, for these two alone."""
    call = {"old_per_token_logps": data.old, "ref_per_token_logps": data.ref, "vllm_is_ratio": data.weights}
    options = {"loss_type": loss_type, "beta": kl, "compiled": False, "use_ref_model": kl != 0}
    assert different(*(module_run(kind, options, data, call, data.mask) for kind in (Theirs, Ours)), 0.02)
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
    assert_same(core_run(data, objective), theirs, loss_type)


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
    assert metadata.version("liger-kernel") == liger.LIGER_VERSION, "a new Liger: run these tests, then name it"


@parametrize("rows, columns, mask", [(B, T, 0.0), (0, T, 1.0), (B, 0, 1.0)])
def test_nothing_to_train_on_is_a_differentiable_0(rows, columns, mask):
    hidden, weight = torch.zeros(rows, columns, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    ids = torch.zeros(rows, columns, dtype=torch.int64)
    loss, metrics = Ours(beta=0.0)(hidden, weight, ids, torch.full(ids.shape, mask), torch.zeros(rows))
    loss.backward()
    assert loss == 0 and metrics[0] == 0 and weight.grad is not None and not weight.grad.any()


def test_options_are_read_on_every_call(data):
    module, found = Ours(beta=0.0, temperature=0.9), []
    given = *leaves_of(data)[:2], data.ids, data.mask, data.advantages, data.bias
    for width in (0.2, 0.01):
        module.epsilon_low = module.epsilon_high = width
        fresh = Ours(beta=0.0, temperature=0.9, epsilon_low=width, epsilon_high=width)
        losses = [one(*given, old_per_token_logps=data.old)[0] for one in (module, fresh)]
        assert losses[0] == losses[1]
        found.append(losses[0])
    assert abs(float(found[0] - found[1])) > 1e-2


WARNED = {
    "a KL without a reference model": ({"use_ref_model": False}, {}, "use_ref_model=False"),  # Liger's is silently 0
    "CISPO's default cap": ({"loss_type": "cispo"}, {}, "epsilon_high=0.2 is CISPO's cap"),
    "a reference twice": (
        {}, {"ref_input", "ref_weight"}, "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.",
    ),
}  # fmt: skip


@parametrize("what", WARNED)
def test_liger_s_result_with_a_warning(data, what):
    options, more, message = WARNED[what]
    call = {"old_per_token_logps": data.old, "ref_per_token_logps": data.ref} | {name: data.more[name] for name in more}
    with pytest.warns(UserWarning, match=message):
        mine = module_run(Ours, options, data, call, data.mask)
    with pytest.warns(UserWarning, match=message) if more else warnings.catch_warnings():  # in Liger's words
        same(mine, module_run(Theirs, options | {"compiled": False}, data, call, data.mask), what)


#: Options and changed arguments of the chunked loss; Liger asserts or goes on.
REFUSED = {
    "loss_type='ppo'": ({"loss_type": "ppo"}, {}), "max_completion_length": ({"loss_type": "dr_grpo"}, {}),
    "importance_sampling_level='batch'": ({"importance_sampling_level": "batch"}, {}), "delta": ({"delta": -1.0}, {}),
    "ref_per_token_logps and ref_input are None": ({"beta": 0.04}, {"ref_per_token_logps": lambda d: None}),
    "sapo_temperature_neg": ({"sapo_temperature_neg": 0.0}, {}), "old_per_token_logps": ({}, {"old_per_token_logps": lambda d: d.old[:, 1:]}),
    "vllm_is_ratio": ({}, {"vllm_is_ratio": lambda d: d.weights[:, :2]}), "attention_mask has shape": ({}, {"mask": lambda d: d.mask[:, 1:]}),
    "attention_mask holds": ({}, {"mask": lambda d: 0.5 * d.mask}),
    "Sequence-level importance sampling is not supported": ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, {}),
}  # fmt: skip


@parametrize("message", REFUSED)
def test_refused(data, message):
    options, changes = REFUSED[message]
    call = {"mask": data.mask, "ref_per_token_logps": data.ref} | {name: change(data) for name, change in changes.items()}
    mask, kinds = call.pop("mask"), [Ours, Theirs] if message.startswith("Sequence") else [Ours]  # in Liger's words
    for kind in kinds:
        with pytest.raises(ValueError, match=message):
            module_run(kind, {"beta": 0.0, "use_ref_model": kind is Ours, **options}, data, call, mask)


@parametrize("message, options", [
    ("delta", {"loss_type": "sapo", "delta": 2.0}), ("inplace", {"inplace": "backward"}), ("delta", {"delta": 0.9}),
    ("ref_logp is None", {"beta": 0.1}), (r"\[5, 5, 13\], but .*must be \[5, 6, V\]", {}),
])  # fmt: skip
def test_refused_from_logits(data, message, options):
    logits = torch.nn.functional.linear(*leaves_of(data))[:, "5, 5" in message :]
    with pytest.raises(ValueError, match=message):
        liger.triton_grpo_loss(logits, None, None, data.ids[:, 1:], data.advantages, **{"beta": 0.0, **options})


# ---- the loss from logits


@pytest.fixture
def logits(data):
    return torch.cat([torch.nn.functional.linear(*leaves_of(data)), data.more["last"]], 1)


def of_logits(data, logits, mask=None, **options):
    return liger.triton_grpo_loss(logits, data.old, data.ref, data.ids, data.advantages, mask, **options)


def test_a_leaf_is_not_overwritten_and_masked_slopes_are_0(data, logits):
    """Whatever comes from upstream where masked; without a mask all count; the position after the completion never does."""
    leaf, other = (logits.clone().requires_grad_() for _ in range(2))
    losses = of_logits(data, leaf)[0]
    losses.sum().backward()
    assert_close(losses, of_logits(data, logits.clone(), torch.ones_like(data.mask))[0])
    of_logits(data, other, data.mask)[0].backward(torch.where(data.mask, 1.0, math.nan))
    assert torch.equal(leaf, logits) and not leaf.grad[:, -1].any()
    assert_close(other.grad[:, :-1], leaf.grad[:, :-1] * data.mask[..., None])


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

INTERPRETED = [row | {"mask": "bool", "reference": "logps", "bias": True, "temperature": 0.9} for row in pairs(
    loss_type=[name for name in LOSS_TYPES if name != "bnpo"], weights=(None, "token"), kl=("none", "ratio"), delta=(None, 1.1),
    items=(None, 37), level=("token", "sequence"), reduce=(True, False), old=(True, False),
)]  # fmt: skip


def interpreted_results(function):
    """(results, gradient) of every case. LUSPO's reduced gradient reads beyond the end of a tensor in Liger: it is not taken."""
    found = []
    for row in INTERPRETED:
        case, data, call = of_row(row, made())
        logits = torch.cat([torch.nn.functional.linear(*leaves_of(data)), data.more["last"]], 1).requires_grad_()
        out = triton(function, case, row, data, logits, call, reduce=row["reduce"], inplace=False)
        up = None if row["reduce"] else torch.linspace(-1, 1, B * T).view(B, T)
        gradient = None if row["reduce"] and case.loss_type == "luspo" else torch.autograd.grad(out[0], logits, up)[0]
        found.append(([None if x is None else x.detach() for x in ((out[0], *out[1]) if row["reduce"] else out)], gradient))
    return found


def interpreted(target):
    """In a process of its own: Liger's results for the cases of this file, and what it leaves of the logits that it overwrites."""
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax as selective
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss as theirs

    data = made()
    given = torch.cat([torch.nn.functional.linear(*leaves_of(data)), data.more["last"]], 1).requires_grad_() * 1.0
    logps, version, before = selective(given, data.ids, 0.7, data.mask.long()), given._version, given.detach().clone()
    loss, _ = theirs(given, data.old, data.ref, data.ids, data.advantages, data.mask.long(), reduce=True)
    (gradient,) = torch.autograd.grad(loss, given)
    unnoticed = given._version == version and not torch.equal(given.detach(), before)
    torch.save((interpreted_results(theirs), logps, (loss.detach(), gradient), unnoticed), target)


def test_the_same_results_as_interpreted_triton(data, logits, tmp_path):
    """Per token and reduced, in value, metrics and gradient, and by its defaults. But for defects of Liger's: LUSPO reduced
    multiplies by the length twice at sequence level; a delta below 1 + eps_high drops the gradient of tokens with A < 0 and a ratio
    between the two; the version counter of overwritten logits stays."""
    pytest.importorskip("triton")
    target = tmp_path / "made.pt"
    finish(start("import sys; from test_liger import interpreted; interpreted(sys.argv[1])", str(target), TRITON_INTERPRET="1"))
    results, logps, want, unnoticed = torch.load(target)
    assert_close(liger.fused_selective_log_softmax(logits, data.ids, 0.7, data.mask), logps, rtol=1e-5, atol=1e-6)
    leaf = logits.clone().requires_grad_()
    mine = of_logits(data, leaf, data.mask, reduce=True)[0]
    assert_close((mine, torch.autograd.grad(mine, leaf)[0]), want, rtol=1e-4, atol=1e-6)
    assert unnoticed
    for row, (want, theirs), (got, own) in zip(INTERPRETED, results, interpreted_results(liger.triton_grpo_loss), strict=True):
        what = label(row)
        assert [x is None for x in got] == [x is None for x in want], what
        if theirs is None or (
            row["loss_type"] == "vespo" and row["weights"] == "token"
        ):  # a weight of 0, as in the chunked loss
            continue
        assert_close(got, want, rtol=1e-4, atol=1e-6, msg=lambda m, what=what: f"{what}: {m}")
        if row["delta"] is None or row["loss_type"] not in CLIPPED:
            assert float((own - theirs).abs().max() / own.abs().max()) < 1e-4, what


def test_the_example(monkeypatch, capsys):
    """examples/liger_swap.py, smaller: it asserts what it claims."""
    swap = pytest.importorskip("examples.liger_swap")
    for name, value in (("VOCAB", 300), ("WIDTH", 16), ("peak_memory", lambda run, device: (run(), 0)[1])):
        monkeypatch.setattr(swap, name, value)
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

SHORT = {"beta": 0.0, "temperature": 0.7, "loss_type": "bnpo", "use_ref_model": False}


@pytest.fixture
def given():
    g = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(*shape, generator=g).requires_grad_() for shape in ((2, 5, H), (V, H)))
    mask = torch.arange(5) < torch.tensor([[2], [4]])
    return hidden, weight, torch.randint(V, (2, 5), generator=g), mask.float(), torch.tensor([1.0, -0.2])


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
    """A version that was not tested, as it was or with another factor."""
    monkeypatch.setattr(metadata, "version", lambda _: "99.1")
    monkeypatch.delenv("GRPO_KERNELS_ANY_VERSION", raising=False)
    monkeypatch.setattr(chunked, "LigerFusedLinearGRPOLoss", Counting)
    monkeypatch.setattr(Counting, "changed", request.param)
    monkeypatch.setattr(Counting, "calls", 0)
    return request.param


@parametrize("attribute", liger.ATTRIBUTES)
def test_the_slot_of_one_trainer(changed, given, attribute):
    theirs = Counting(compiled=False, **SHORT)
    trainer = SimpleNamespace(**{attribute: theirs})
    slots = liger.patch(trainer)
    with pytest.raises(RuntimeError, match=f"{attribute} of this trainer is ours already"):
        liger.patch(trainer)
    if changed != 1:
        with pytest.raises(RuntimeError, match=r"liger-kernel 99\.1.*loss is not what it was: values"):
            getattr(trainer, attribute)(*given)
    else:
        with pytest.warns(UserWarning, match=r"liger-kernel 99\.1.*They agree"):
            got = [getattr(trainer, attribute)(*given)[0] for _ in range(2)]
        assert slots.counts == {"fused": 2} and Counting.calls == 1
        slots.undo()
        assert_close(got[1], theirs(*given)[0])
    assert getattr(trainer, attribute) is theirs and given[0].grad is None


def test_trainers_without_a_slot():
    for trainer, message in (
        (
            SimpleNamespace(),
            r"SimpleNamespace has no loss of Liger's.*use_liger_kernel=True.*before 0\.17 install.*fused_lm_head",
        ),
        (SimpleNamespace(liger_loss=len), r"has no beta, epsilon_high.*not Liger's"),
    ):
        with pytest.raises(RuntimeError, match=message):
            liger.patch(trainer, any_version=True)


@parametrize("loss_type", ["bnpo", "luspo"])
def test_the_class_of_an_untested_liger_is_compared_once(changed, given, loss_type, monkeypatch, recwarn):
    """On the arguments of the first call. LUSPO counts padding in the comparison, and not after it."""
    options = SHORT | {"loss_type": loss_type}
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


@parametrize("changed", [1.0], indirect=True)
def test_an_older_liger_without_an_option(changed, given, monkeypatch):
    """What it lacks is left out where ours has the default, and named where not; a Liger that cannot be imported is none."""

    def older(beta=0.04, compiled=True, use_ref_model=True, loss_type="bnpo"):
        return Theirs(beta, compiled, use_ref_model, loss_type=loss_type)

    monkeypatch.setattr(chunked, "LigerFusedLinearGRPOLoss", older)
    with pytest.warns(UserWarning, match="They agree"):
        Ours(beta=0.0)(*given)
    module = Ours(beta=0.0, delta=1.5)
    with pytest.raises(RuntimeError, match=r"its own function raised TypeError: .*'delta'"):
        module(*given)
    monkeypatch.setitem(sys.modules, "liger_kernel.chunked_loss", None)
    module(*given)
