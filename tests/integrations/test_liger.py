"""Liger's losses by name: Liger 0.8.5 itself, ours in its place, `linear_grpo_loss` of the same options and ours of logits, in
loss, metrics and gradients. Its chunked loss runs here; its Triton functions in Triton's interpreter, in a process of their
own."""

from __future__ import annotations

import functools
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

from grpo_kernels import Cispo, Head, LogitTransform, Objective, TokenBatch, linear_grpo_loss, token_divergence
from grpo_kernels.integrations import liger
from support.pairs import label, pairs
from support.trainers import CLIPPED, CONSTANTS, LOSS_TYPES, assert_same, different, value_and_gradient

parametrize = pytest.mark.parametrize

Theirs, Ours = chunked.LigerFusedLinearGRPOLoss, liger.LigerFusedLinearGRPOLoss
B, T, H, V = 5, 6, 8, 13

# Sequences of unequal length, one of advantage 0, ratios beyond the clip bounds; what is masked is finite, for Liger.
G = torch.Generator().manual_seed(5)
LEAVES = HIDDEN, WEIGHT, BIAS = [x * torch.randn(*n, generator=G) for x, n in ((1, (B, T, H)), (0.6, (V, H)), (0.5, (V,)))]
IDS, LAST = torch.randint(V, (B, T), generator=G), torch.randn(B, 1, V, generator=G)
MASK = torch.arange(T) < torch.tensor([6, 3, 5, 1, 4])[:, None]
ADVANTAGES = torch.tensor([1.2, 0.8, -0.7, 0.0, -1.1])
REFERENCE = {"ref_input": HIDDEN + 0.3 * torch.randn(B, T, H, generator=G), "ref_weight": WEIGHT + 0.1, "ref_bias": -BIAS}


def logps_of(hidden, weight, bias=None, temperature=0.9):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return torch.log_softmax(logits / temperature, -1).gather(2, IDS[..., None])[..., 0]


SHIFT = torch.tensor([-0.4, 0.35, 0.3, -0.1, -0.5])[:, None]
OLD = logps_of(*LEAVES) + SHIFT + 0.15 * torch.randn(B, T, generator=G)
REF = logps_of(*LEAVES) + 0.2 + 0.5 * torch.randn(B, T, generator=G)
WEIGHTS = torch.exp(0.3 * torch.randn(B, T, generator=G))
WEIGHTS[0, 1] = 0.0
KNOWN = {"old_per_token_logps": OLD, "ref_per_token_logps": REF}

GRID = pairs(
    loss_type=LOSS_TYPES, weights=(None, "token", "[B]", "[B, 1]"), mask=("float", "bool", "long", "full"), kl=("none", "plain", "ratio"),
    delta=(None, 1.3, 1.1), reference=("logps", "hidden", "hidden and bias"), items=(None, 37, torch.tensor(41)), level=("token", "sequence"),
    inplace=(True, False, "forward"), old=(True, False), bias=(True, False), chunk_size=(1, 3), upstream=(1.0, -2.5), temperature=(0.9, 1.3),
)  # fmt: skip


def options_of(row):
    """Of Liger's module; delta means nothing to the losses that do not clip."""
    clips, beta = row["loss_type"] in CLIPPED, 0.0 if row["kl"] == "none" else 0.3
    own = {name: x for name, x in CONSTANTS.items() if name.startswith(row["loss_type"])}
    return own | {
        "loss_type": row["loss_type"], "importance_sampling_level": row["level"] if clips else "token", "beta": beta, "delta": row["delta"],
        "use_bias_correction_kl": row["kl"] == "ratio", "max_completion_length": 9, "temperature": row["temperature"],
        "epsilon_low": 0.2, "epsilon_high": 1.25 if row["loss_type"] == "cispo" else 0.27,
    }  # fmt: skip


def arguments_of(row):
    w, old = WEIGHTS, OLD if row["old"] else None
    weights = {None: None, "token": w, "[B]": w[:, 0], "[B, 1]": w[:, :1]}[row["weights"]]
    names = [*REFERENCE][: 2 + row["reference"].endswith("bias")]
    reference = {"ref_per_token_logps": REF} if row["reference"] == "logps" else {name: REFERENCE[name] for name in names}
    return reference | {"num_items_in_batch": row["items"], "vllm_is_ratio": weights, "old_per_token_logps": old}


def run(kind, options, mask=MASK, bias=True, upstream=1.0, **given):
    """((loss, metrics), gradients) of Liger's module or ours."""

    def loss(hidden, weight, bias=None):
        value, metrics = kind(**options)(hidden, weight, IDS, mask, ADVANTAGES, bias, **given)
        assert type(metrics) is tuple and all(x.dtype == torch.float32 and not x.requires_grad for x in metrics)
        assert value.shape == () and value.dtype == torch.float32
        return upstream * value, metrics

    if kind is Theirs:
        options = {"compiled": False} | options
    try:
        return value_and_gradient(loss, LEAVES[: 2 + bias])
    except (TypeError, ValueError) as error:
        if kind is Ours or metadata.version("liger-kernel") == liger.LIGER_VERSION:
            raise
        pytest.skip(f"this Liger has not all of it: {error}")  # see tests/repository/trainer_versions.py


def same(got, want, rtol=3e-4):
    assert_same(got, want, rtol)
    assert [float(x) for x in got[0][1]] == pytest.approx([float(x) for x in want[0][1]], rel=1e-4, abs=1e-6)


def of_triton(function, row, logits, mask, ref=REF, **more):
    """A call of Liger's function of logits, or of ours."""
    options, given = options_of(row), arguments_of(row)
    options |= {"eps_low": options.pop("epsilon_low"), "eps_high": options.pop("epsilon_high")}
    options |= {name: given[name] for name in ("vllm_is_ratio", "num_items_in_batch")}
    options |= {"delta": row["delta"] if row["loss_type"] in CLIPPED else None} | more
    old = given["old_per_token_logps"]
    return function(logits, old, ref if options["beta"] else None, IDS, ADVANTAGES, mask.long(), **options)


@pytest.mark.filterwarnings("ignore:as_liger=True")
@parametrize("row", GRID, ids=label)
def test_every_way_to_the_loss(row):
    """Liger and ours with as_liger, number by number under masks too. Ours, `linear_grpo_loss` of its objective, and ours of
    logits, reduced or summed up from the losses of tokens, are one number, and Liger's where it counts no padding."""
    options, given, loss_type, upstream = options_of(row), arguments_of(row), row["loss_type"], row["upstream"]
    mask = MASK | (row["mask"] == "full")
    kind = {"float": torch.float32, "long": torch.int64}.get(row["mask"], torch.bool)
    given |= {"mask": mask.to(kind), "bias": row["bias"], "upstream": upstream}
    options |= {"chunk_size": row["chunk_size"], "use_ref_model": options["beta"] != 0}
    theirs, want, as_liger = (
        run(k, options | more, **given) for k, more in ((Theirs, {}), (Ours, {}), (Ours, {"as_liger": True}))
    )
    assert float(theirs[1][0].abs().max()) > 1e-4
    same(as_liger, theirs)
    if loss_type not in ("luspo", "vespo"):
        same(want, theirs)

    lengths, D = mask.sum(1, keepdim=True), None
    if row["items"] is not None and loss_type in ("dapo", "cispo", "vespo"):
        D = float(row["items"])
    names, temperature = [*REFERENCE][: 2 + row["reference"].endswith("bias")], row["temperature"]
    ref = REF if row["reference"] == "logps" else logps_of(*(REFERENCE[name] for name in names), temperature=temperature)
    share = {"grpo": 1 / lengths / B, "sapo": 1 / lengths / B, "luspo": 1 / B, "dr_grpo": 1 / B / 9}.get(
        loss_type, 1 / (D or float(lengths.sum()))
    )

    def core(hidden, weight, bias=None):
        objective, weights = Ours(**options).objective(), given["vllm_is_ratio"]
        if weights is not None and row["weights"] != "token" and loss_type == "vespo":  # a sequence's counts once
            weights = torch.where(torch.arange(T) == 0, weights.view(B, 1).clamp(min=1e-8), 1.0)
        batch = TokenBatch(IDS, ADVANTAGES, mask=mask, old_logps=given["old_per_token_logps"], ref_logps=ref, weights=weights)
        head, transform = Head(weight, bias), LogitTransform(temperature)
        out = linear_grpo_loss(hidden, head, batch, objective, transform=transform, normalizer=D)
        kl = [out.metrics["kl"]] if objective.beta else []
        return upstream * out.loss, [*kl, out.metrics["clip_low"] + out.metrics["clip_high"]]

    def of_logits(*leaves, reduce):
        logits = torch.cat([torch.nn.functional.linear(*leaves), LAST], 1) * 1.0
        before = logits.detach().clone()
        out = of_triton(liger.triton_grpo_loss, row, logits, mask, ref, reduce=reduce, inplace=row["inplace"])
        overwritten = row["inplace"] == "forward" and reduce and options["importance_sampling_level"] == "token"
        assert torch.equal(logits, before) != (overwritten and loss_type != "vespo")
        if reduce:
            return upstream * out[0], out[1]
        return upstream * (out[0] * share).sum(), [x.sum() / lengths.sum() for x in out[1:] if x is not None]

    same(value_and_gradient(core, LEAVES[: 2 + row["bias"]]), want)
    for reduce in (True, False):
        same(value_and_gradient(functools.partial(of_logits, reduce=reduce), LEAVES[: 2 + row["bias"]]), want)


@parametrize("loss_type, kl", [("luspo", 0.3), ("vespo", 0.0)])
def test_ligers_defects_of_padding(loss_type, kl):
    """LUSPO weighs padding and divides by the padded length; VESPO counts the weights of masked positions, and a weight of 0
    silences its sequence. as_liger=True says so, for these two alone."""
    given, options = KNOWN | {"vllm_is_ratio": WEIGHTS}, {"loss_type": loss_type, "beta": kl, "use_ref_model": kl != 0}
    assert different(run(Theirs, options, **given), run(Ours, options, **given), 0.02)
    with pytest.warns(UserWarning, match=f"as_liger=True: loss_type='{loss_type}' counts masked positions"):
        run(Ours, options | {"as_liger": True}, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Ours, options | {"as_liger": True, "loss_type": "sapo"}, **given)


@parametrize("loss_type", LOSS_TYPES)
def test_presets_have_ligers_defaults(loss_type):
    """The options that nobody passed, which are Liger's: see `test_signatures`. CISPO's cap, of which Liger makes an absolute
    ratio of 0.2, is the paper's."""
    budget, cispo = {"max_tokens": 9} if loss_type == "dr_grpo" else {}, loss_type == "cispo"
    objective = Objective.preset(loss_type, numerics="liger", **budget)
    level = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    assert not cispo or (Theirs().epsilon_high == 0.2 and objective.surrogate == Cispo(5.0))
    options = {"loss_type": loss_type, "max_completion_length": 9, **level, **({"epsilon_high": 5.0} if cispo else {})}
    own = Ours(**options).objective()
    assert replace(own, kl=objective.kl) == objective and own.kl_spec == objective.kl_spec


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
    hidden, weight = torch.zeros(rows, columns, H, requires_grad=True), WEIGHT.clone().requires_grad_()
    ids = torch.zeros(rows, columns, dtype=torch.int64)
    loss, metrics = Ours(beta=0.0)(hidden, weight, ids, torch.full(ids.shape, mask), torch.zeros(rows))
    loss.backward()
    assert loss == 0 and metrics[0] == 0 and weight.grad is not None and not weight.grad.any()


def test_options_are_read_on_every_call():
    module, found = Ours(beta=0.0, temperature=0.9), []
    for width in (0.2, 0.01):
        module.epsilon_low = module.epsilon_high = width
        found.append(module(HIDDEN, WEIGHT, IDS, MASK, ADVANTAGES, BIAS, old_per_token_logps=OLD)[0])
    assert abs(float(found[0] - found[1])) > 1e-2


WARNED = {
    "a KL without a reference model": ({"use_ref_model": False}, (), "use_ref_model=False"),  # Liger's is silently 0
    "CISPO's default cap": ({"loss_type": "cispo"}, (), "epsilon_high=0.2 is CISPO's cap"),
    "a reference twice": (
        {}, ("ref_input", "ref_weight"), "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.",
    ),
}  # fmt: skip


@parametrize("what", WARNED)
def test_liger_s_result_with_a_warning(what):
    options, more, message = WARNED[what]
    given = KNOWN | {name: REFERENCE[name] for name in more}
    with pytest.warns(UserWarning, match=message):
        mine = run(Ours, options, **given)
    with pytest.warns(UserWarning, match=message) if more else warnings.catch_warnings():  # in Liger's words
        same(mine, run(Theirs, options, **given))


LEVEL = "Sequence-level importance sampling is not supported"
#: Of the chunked loss options and arguments, of the loss from logits options, and what is said; Liger asserts or goes on.
REFUSED = [
    ({"loss_type": "ppo"}, {}, "loss_type='ppo'"), ({"loss_type": "dr_grpo"}, {}, "max_tokens is None"), ({"delta": -1.0}, {}, "delta"),
    ({"importance_sampling_level": "batch"}, {}, "importance_sampling_level='batch'"), ({"beta": 0.04}, {"ref_per_token_logps": None}, "ref_logps is None"),
    ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, {}, "tau_neg"), ({}, {"old_per_token_logps": OLD[:, 1:]}, "old_logps has shape"),
    ({}, {"vllm_is_ratio": WEIGHTS[:, :2]}, "weights has shape"), ({}, {"mask": MASK[:, 1:]}, "mask has shape"),
    ({}, {"mask": 0.5 * MASK}, "attention_mask holds"), ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, {}, LEVEL),
]  # fmt: skip
OF_LOGITS = [
    ({"loss_type": "sapo", "delta": 2.0}, "delta"), ({"delta": 0.9}, "delta"), ({"inplace": "backward"}, "inplace"), ({"beta": 0.1}, "ref_logps is None"),
    ({}, "logits has shape"),
]  # fmt: skip


@parametrize("options, changes, message", REFUSED, ids=[message for *_, message in REFUSED])
def test_refused(options, changes, message):
    for kind in [Ours, Theirs] if message == LEVEL else [Ours]:  # in Liger's words
        with pytest.raises(ValueError, match=message):
            run(kind, {"beta": 0.0, "use_ref_model": kind is Ours, **options}, **KNOWN | changes)


@parametrize("options, message", OF_LOGITS)
def test_refused_from_logits(options, message):
    logits = torch.zeros(B, T + bool(options), V)
    with pytest.raises(ValueError, match=message):
        liger.triton_grpo_loss(logits, None, None, IDS, ADVANTAGES, **{"beta": 0.0, **options})


# ---- the loss from logits

LOGITS = torch.cat([torch.nn.functional.linear(*LEAVES), LAST], 1)


def test_a_leaf_is_not_overwritten_and_masked_slopes_are_0():
    """Whatever comes from upstream where masked; without a mask all count; the position after the completion never does."""
    leaf, other = (LOGITS.clone().requires_grad_() for _ in range(2))
    losses, masked = (liger.triton_grpo_loss(x, OLD, REF, IDS, ADVANTAGES, m)[0] for x, m in ((leaf, None), (other, MASK)))
    losses.sum().backward()
    masked.backward(torch.where(MASK, 1.0, math.nan))
    assert torch.equal(leaf, LOGITS) and not leaf.grad[:, -1].any() and (losses != 0).any(1).sum() > 3
    assert_close(other.grad[:, :-1], leaf.grad[:, :-1] * MASK[..., None])


def test_selective_log_softmax():
    """The last L of longer ids and masks, as in Liger's example."""
    longer, mask = (torch.cat([x[:, :3], x], 1) for x in (IDS, MASK.float()))
    found = liger.fused_selective_log_softmax(LOGITS.clone().requires_grad_(), longer, 0.7, mask)
    want = logps_of(*(x.double() for x in LEAVES), temperature=0.7) * MASK
    assert found.dtype == torch.float32 and not found.requires_grad
    assert_close(found.double(), want, rtol=1e-5, atol=1e-6)
    plain = liger.fused_selective_log_softmax(LOGITS, IDS)
    assert torch.equal(plain, liger.fused_selective_log_softmax(LOGITS, longer, 0.9)) and (plain != 0).all()


# ---- Liger's Triton functions, interpreted

INTERPRETED = [row | {"reference": "logps", "temperature": 0.9} for row in pairs(
    loss_type=[name for name in LOSS_TYPES if name != "bnpo"], weights=(None, "token"), kl=("none", "ratio"), delta=(None, 1.1),
    items=(None, 37), level=("token", "sequence"), reduce=(True, False), old=(True, False),
)]  # fmt: skip
TEACHER = LOGITS[:, 1:].reshape(-1, V)
UP = torch.linspace(-1, 1, B * T).view(B, T)


def interpreted_results(function):
    """(results, gradient) of every case. LUSPO's reduced gradient reads beyond the end of a tensor in Liger: it is not taken."""
    found = []
    for row in INTERPRETED:
        logits, reduce = LOGITS.clone().requires_grad_(), row["reduce"]
        out = of_triton(function, row, logits, MASK, reduce=reduce, inplace=False)
        skipped = reduce and row["loss_type"] == "luspo"
        gradient = None if skipped else torch.autograd.grad(out[0], logits, None if reduce else UP)[0]
        found.append(([None if x is None else x.detach() for x in ((out[0], *out[1]) if reduce else out)], gradient))
    return found


def by_default(theirs):
    """The reduced loss by its defaults, and whether its logits are overwritten behind autograd's back."""
    leaf = LOGITS.clone().requires_grad_()
    logits = leaf * 1.0
    loss, _ = theirs(logits, OLD, REF, IDS, ADVANTAGES, MASK.long(), reduce=True)
    version, (gradient,) = logits._version, torch.autograd.grad(loss, leaf)
    return (loss.detach(), gradient), logits._version == version and not torch.equal(logits, leaf)


def interpreted(target):
    """In a process of its own: Liger's results for the cases of this file, and what it leaves of the logits that it overwrites."""
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax as selective
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss as theirs

    results = (
        interpreted_results(theirs),
        selective(LOGITS, IDS, 0.7, MASK.long()),
        *by_default(theirs),
        total_variation(of_liger),
    )
    torch.save(results, target)


def total_variation(loss):
    """Of tokens, and the gradient of the logits. (The kernel of `LigerTVDLoss`, from probabilities, does not run interpreted.)"""
    z = LOGITS[:, :-1].reshape(-1, V).requires_grad_()
    values = loss(z)
    return values.detach(), torch.autograd.grad(values, z, UP.view(-1))[0]


def of_liger(z):
    from liger_kernel.transformers import LigerFusedCETVDLoss

    return LigerFusedCETVDLoss()(z, TEACHER, torch.where(MASK, IDS, -100).view(-1))[1]


def test_the_same_results_as_interpreted_triton(tmp_path):
    """Per token and reduced, in value, metrics and gradient, and by its defaults. But for defects of Liger's: LUSPO reduced
    multiplies by the length twice at sequence level; a delta below 1 + eps_high drops the gradient of tokens with A < 0 and a ratio
    between the two; the version counter of overwritten logits stays."""
    pytest.importorskip("triton")
    target = tmp_path / "made.pt"
    finish(start("import sys; from test_liger import interpreted; interpreted(sys.argv[1])", str(target), TRITON_INTERPRET="1"))
    results, logps, want, unnoticed, variation = torch.load(target)
    ours = total_variation(lambda z: token_divergence(z, TEACHER, "tv", mask=MASK.view(-1)))
    assert_close(ours, variation, rtol=1e-5, atol=1e-6)
    assert_close(liger.fused_selective_log_softmax(LOGITS, IDS, 0.7, MASK), logps, rtol=1e-5, atol=1e-6)
    mine, ours_unnoticed = by_default(liger.triton_grpo_loss)
    assert_close(mine, want, rtol=1e-4, atol=1e-6)
    assert unnoticed and not ours_unnoticed
    for row, (want, theirs), (got, own) in zip(INTERPRETED, results, interpreted_results(liger.triton_grpo_loss), strict=True):
        what = label(row)
        assert [x is None for x in got] == [x is None for x in want], what
        if theirs is None or (row["loss_type"] == "vespo" and row["weights"]):  # a weight of 0, as in the chunked loss
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
    for count in (None, 33):
        for mask in (MASK if rank else ~MASK, MASK * rank):
            given = KNOWN | {"num_items_in_batch": count, "mask": mask}
            mine, theirs = (run(kind, {"chunk_size": B}, **given)[0][0] for kind in (Ours, Theirs))
            assert_close(mine, theirs, rtol=1e-5, atol=1e-6)  # chunks of all: its ranks call once a chunk
    dist.barrier()


def test_two_ranks(tmp_path):
    finish(start_ranks(2, two_ranks, str(tmp_path / "store")))


# ---- the loss in Liger's place, and versions of Liger that were not tested

SHORT = {"beta": 0.0, "temperature": 0.7, "loss_type": "bnpo", "use_ref_model": False}
GIVEN = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_(), IDS, MASK.float(), ADVANTAGES


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
def test_the_slot_of_one_trainer(changed, attribute):
    theirs = Counting(compiled=False, **SHORT)
    trainer = SimpleNamespace(**{attribute: theirs})
    slots = liger.patch(trainer)
    with pytest.raises(RuntimeError, match=f"{attribute} of this trainer is ours already"):
        liger.patch(trainer)
    if changed != 1:
        with pytest.raises(RuntimeError, match=r"liger-kernel 99\.1.*loss is not what it was: values"):
            getattr(trainer, attribute)(*GIVEN)
    else:
        with pytest.warns(UserWarning, match=r"liger-kernel 99\.1.*They agree"):
            got = [getattr(trainer, attribute)(*GIVEN)[0] for _ in range(2)]
        assert slots.counts == {"fused": 2} and Counting.calls == 1
        slots.undo()
        assert_close(got[1], theirs(*GIVEN)[0])
    assert getattr(trainer, attribute) is theirs and GIVEN[0].grad is None


def test_trainers_without_a_slot():
    for trainer, message in (
        (SimpleNamespace(), r"SimpleNamespace has no loss of Liger's.*use_liger_kernel=True.*before 0\.17 install.*fused_lm_head"),
        (SimpleNamespace(liger_loss=len), r"has no beta, epsilon_high.*not Liger's"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            liger.patch(trainer, any_version=True)


@parametrize("loss_type", ["bnpo", "luspo"])
def test_the_class_of_an_untested_liger_is_compared_once(changed, loss_type, monkeypatch, recwarn):
    """On the arguments of the first call. LUSPO counts padding in the comparison, and not after it."""
    options = SHORT | {"loss_type": loss_type}
    want = Ours(**options, any_version=True)(*GIVEN)[0]
    with monkeypatch.context() as known:
        known.setattr(metadata, "version", lambda _: liger.LIGER_VERSION)
        assert torch.equal(Ours(**options)(*GIVEN)[0], want) and not Counting.calls
    module, message = (
        Ours(**options),
        r"liger-kernel 99\.1.*LigerFusedLinearGRPOLoss is not what it was: values.*any_version=True",
    )
    for _ in range(2):
        if changed != 1:
            with pytest.raises(RuntimeError, match=message):
                module(*GIVEN)
        else:
            assert torch.equal(module(*GIVEN)[0], want)
    assert GIVEN[0].grad is None and Counting.calls == (1 if changed == 1 else 2)
    assert len([w for w in recwarn if "99.1" in str(w.message) and "They agree" in str(w.message)]) == (changed == 1)


@parametrize("changed", [1.0], indirect=True)
def test_an_older_liger_without_an_option(changed, monkeypatch):
    """What it lacks is left out where ours has the default, and named where not; a Liger that cannot be imported is none."""

    def older(beta=0.04, compiled=True, use_ref_model=True, loss_type="bnpo"):
        return Theirs(beta, compiled, use_ref_model, loss_type=loss_type)

    monkeypatch.setattr(chunked, "LigerFusedLinearGRPOLoss", older)
    with pytest.warns(UserWarning, match="They agree"):
        Ours(beta=0.0, loss_type="grpo")(*GIVEN)
    module = Ours(beta=0.0, delta=1.5)
    with pytest.raises(RuntimeError, match=r"its own function raised TypeError: .*'delta'"):
        module(*GIVEN)
    monkeypatch.setitem(sys.modules, "liger_kernel.chunked_loss", None)
    module(*GIVEN)
