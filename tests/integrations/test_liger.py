"""Liger's losses by name: Liger 0.8.5 itself, ours in its place, `linear_grpo_loss` of the same
options and ours of logits, in loss, metrics and gradients. Its chunked loss runs here; its Triton
functions in Triton's interpreter, in a process of their own.
"""

from __future__ import annotations

import inspect
from functools import partial
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from support.processes import finish, start, start_ranks

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")

from liger_kernel import chunked_loss as chunked

from grpo_kernels.core import backends
from grpo_kernels.integrations import liger
from support.pairs import label, pairs
from support.trainers import (
    CLIPPED,
    CONSTANTS,
    LOSS_TYPES,
    assert_same,
    refused,
    value_and_gradient,
)

parametrize = pytest.mark.parametrize

Theirs, Ours = chunked.LigerFusedLinearGRPOLoss, liger.LigerFusedLinearGRPOLoss
B, T, H, V = 5, 6, 8, 13

# Sequences of unequal length, one of advantage 0, ratios beyond the clip bounds; what is masked is
# finite, for Liger.
G = torch.Generator().manual_seed(5)
LEAVES = HIDDEN, WEIGHT, BIAS = [
    x * torch.randn(*n, generator=G) for x, n in ((1, (B, T, H)), (0.6, (V, H)), (0.5, (V,)))
]
IDS, LAST = torch.randint(V, (B, T), generator=G), torch.randn(B, 1, V, generator=G)
MASK = torch.arange(T) < torch.tensor([6, 3, 5, 1, 4])[:, None]
ADVANTAGES = torch.tensor([1.2, 0.8, -0.7, 0.0, -1.1])
REFERENCE = {
    "ref_input": HIDDEN + 0.3 * torch.randn(B, T, H, generator=G),
    "ref_weight": WEIGHT + 0.1,
    "ref_bias": -BIAS,
}


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
    reference = (
        {"ref_per_token_logps": REF}
        if row["reference"] == "logps"
        else {name: REFERENCE[name] for name in names}
    )
    return reference | {
        "num_items_in_batch": row["items"],
        "vllm_is_ratio": weights,
        "old_per_token_logps": old,
    }


def run(kind, options, mask=MASK, bias=True, upstream=1.0, **given):
    """((loss, metrics), gradients) of Liger's module or ours."""

    def loss(hidden, weight, bias=None):
        value, metrics = kind(**options)(hidden, weight, IDS, mask, ADVANTAGES, bias, **given)
        assert type(metrics) is tuple and all(
            x.dtype == torch.float32 and not x.requires_grad for x in metrics
        )
        assert value.shape == () and value.dtype == torch.float32
        return upstream * value, metrics

    if kind is Theirs:
        options = {"compiled": False} | options
    try:
        return value_and_gradient(loss, LEAVES[: 2 + bias])
    except (TypeError, ValueError) as error:
        if kind is Ours or metadata.version("liger-kernel") == liger.LIGER_VERSION:
            raise
        pytest.skip(f"this Liger has not all of it: {error}")  # see tests/repository/versions.py


def same(got, want, rtol=3e-4):
    assert_same(got, want, rtol)
    assert [float(x) for x in got[0][1]] == pytest.approx(
        [float(x) for x in want[0][1]], rel=1e-4, abs=1e-6
    )


def of_triton(function, row, logits, mask, ref=REF, **more):
    """A call of Liger's function of logits, or of ours."""
    options, given = options_of(row), arguments_of(row)
    options |= {"eps_low": options.pop("epsilon_low"), "eps_high": options.pop("epsilon_high")}
    options |= {name: given[name] for name in ("vllm_is_ratio", "num_items_in_batch")}
    options |= {"delta": row["delta"] if row["loss_type"] in CLIPPED else None} | more
    old = given["old_per_token_logps"]
    return function(
        logits, old, ref if options["beta"] else None, IDS, ADVANTAGES, mask.long(), **options
    )


@pytest.mark.filterwarnings("ignore:as_liger=True")
@parametrize("row", GRID, ids=label)
def test_every_way_to_the_loss(row):
    """Liger and ours with as_liger, number by number under masks too; ours, and Liger where it
    counts no padding; ours, and ours of logits.
    """
    options, given, loss_type, upstream = (
        options_of(row),
        arguments_of(row),
        row["loss_type"],
        row["upstream"],
    )
    mask = MASK | (row["mask"] == "full")
    kind = {"float": torch.float32, "long": torch.int64}.get(row["mask"], torch.bool)
    given |= {"mask": mask.to(kind), "bias": row["bias"], "upstream": upstream}
    options |= {"chunk_size": row["chunk_size"], "use_ref_model": options["beta"] != 0}
    same(run(Ours, options | {"as_liger": True}, **given), theirs := run(Theirs, options, **given))
    assert float(theirs[1][0].abs().max()) > 1e-4
    want = run(Ours, options, **given)
    if loss_type not in ("luspo", "vespo"):
        same(want, theirs)
    elif row["weights"] != "token":  # a weight of 0 silences its sequence in Liger
        whole = given | {"mask": torch.ones(B, T)}
        same(run(Ours, options, **whole), run(Theirs, options, **whole))

    names, temperature = [*REFERENCE][: 2 + row["reference"].endswith("bias")], row["temperature"]
    ref = (
        REF
        if row["reference"] == "logps"
        else logps_of(*(REFERENCE[name] for name in names), temperature=temperature)
    )

    def of_logits(*leaves):
        logits = torch.cat([torch.nn.functional.linear(*leaves), LAST], 1) * 1.0
        before = logits.detach().clone()
        out = of_triton(
            liger.triton_grpo_loss, row, logits, mask, ref, reduce=True, inplace=row["inplace"]
        )
        overwritten = (
            row["inplace"] == "forward" and options["importance_sampling_level"] == "token"
        )
        assert torch.equal(logits, before) != (overwritten and loss_type != "vespo")
        return upstream * out[0], out[1]

    same(value_and_gradient(of_logits, LEAVES[: 2 + row["bias"]]), want)


def test_signatures():
    """An option that a new Liger adds is noticed here."""
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax as selective
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss as theirs

    def of(function):
        return [
            (p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()
        ]

    defaults = {"as_liger": False, "grad_scale": 1.0, "any_version": False}
    own = [(name, inspect.Parameter.KEYWORD_ONLY, default) for name, default in defaults.items()]
    assert of(Ours.__init__) == [*of(Theirs.__init__), *own] and of(Ours.forward) == of(
        Theirs.forward
    )
    assert of(liger.triton_grpo_loss) == of(theirs) and of(liger.fused_selective_log_softmax) == of(
        selective
    )


def test_nothing_to_train_on_is_a_differentiable_0():
    (loss, _), gradients = run(Ours, {"beta": 0.0}, MASK & False)
    assert loss == 0 and not any(x.any() for x in gradients)


#: Options and arguments, and what is said; Liger asserts or goes on.
REFUSED = [
    ({"loss_type": "ppo"}, {}, "loss_type='ppo'"), ({"importance_sampling_level": "batch"}, {}, "importance_sampling_level='batch'"),
    ({}, {"mask": 0.5 * MASK}, "attention_mask holds"),
    ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, {}, "Sequence-level importance sampling is not supported"),
]  # fmt: skip
#: Options of `liger_objective`, and what is said.
NO_OBJECTIVE = [
    ({"temperature": 0.9}, r"temperature=0\.9: .*pass transform="), ({"compiled": True}, "compiled=True: .*leave it out"),
    ({"vespo": (1, 2)}, r"vespo=\(1, 2\): .*pass 4 numbers"),
    ({"sapo_temperatures": (1.0, 2.0), "sapo_temperature_pos": 0.5}, "sapo_temperatures=.*none of these names"),
]  # fmt: skip


def test_refused():
    for options, changes, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            run(Ours, {"beta": 0.0, **options}, **KNOWN | changes)
    for options in ({"loss_type": "sapo", "delta": 2.0}, {"inplace": "backward"}):
        with pytest.raises(ValueError, match=[*options][-1]):
            liger.triton_grpo_loss(LOGITS, None, None, IDS, ADVANTAGES, beta=0.0, **options)
    refused(
        *((partial(liger.liger_objective, **options), message) for options, message in NO_OBJECTIVE)
    )
    both = liger.liger_objective("sapo", sapo_temperatures=(0.9, 1.3))
    assert both == liger.liger_objective("sapo", sapo_temperature_pos=0.9, sapo_temperature_neg=1.3)


# ---- the loss from logits

LOGITS = torch.cat([torch.nn.functional.linear(*LEAVES), LAST], 1)


def test_selective_log_softmax():
    """The last L of longer ids and masks, as in Liger's example."""
    longer, mask = (torch.cat([x[:, :3], x], 1) for x in (IDS, MASK.float()))
    found = liger.fused_selective_log_softmax(LOGITS.clone().requires_grad_(), longer, 0.7, mask)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert_close(found, logps_of(*LEAVES, temperature=0.7) * MASK, rtol=1e-5, atol=1e-6)


# ---- Liger's Triton functions, interpreted

INTERPRETED = [row | {"reference": "logps", "temperature": 0.9} for row in pairs(
    loss_type=[name for name in LOSS_TYPES if name not in ("bnpo", "dr_grpo")], weights=(None, "token"), kl=("none", "ratio"), delta=(None, 1.1),
    items=(None,), level=("token", "sequence"), reduce=(True, False), old=(True,),
)]  # fmt: skip
UP = torch.linspace(-1, 1, B * T).view(B, T)


def interpreted_results(function):
    """(results, gradient) of every case.

    LUSPO's reduced gradient reads beyond the end of a tensor in Liger: it is not taken.
    """
    found = []
    for row in INTERPRETED:
        logits, reduce = LOGITS.clone().requires_grad_(), row["reduce"]
        out = of_triton(function, row, logits, MASK, reduce=reduce, inplace=False)
        skipped = reduce and row["loss_type"] == "luspo"
        gradient = (
            None if skipped else torch.autograd.grad(out[0], logits, None if reduce else UP)[0]
        )
        found.append(
            (
                [None if x is None else x.detach() for x in ((out[0], *out[1]) if reduce else out)],
                gradient,
            )
        )
    return found


def interpreted(target):
    """In a process of its own: Liger's results for the cases of this file."""
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax as selective
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss as theirs

    results = (
        interpreted_results(theirs),
        selective(LOGITS, IDS, 0.7, MASK.long()),
    )
    torch.save(results, target)


@pytest.mark.long
def test_the_same_results_as_interpreted_triton(tmp_path):
    """Per token and reduced, in value, metrics and gradient. But for defects of Liger's: LUSPO
    reduced multiplies by the length twice at sequence level; a delta below 1 + eps_high drops the
    gradient of tokens with A < 0 and a ratio between the two.
    """
    pytest.importorskip("triton")
    target = tmp_path / "made.pt"
    finish(
        start(
            "import sys; from test_liger import interpreted; interpreted(sys.argv[1])",
            str(target),
            TRITON_INTERPRET="1",
        )
    )
    results, logps = torch.load(target)
    assert_close(
        liger.fused_selective_log_softmax(LOGITS, IDS, 0.7, MASK), logps, rtol=1e-5, atol=1e-6
    )
    for row, (want, theirs), (got, own) in zip(
        INTERPRETED, results, interpreted_results(liger.triton_grpo_loss), strict=True
    ):
        what = label(row)
        assert [x is None for x in got] == [x is None for x in want], what
        if theirs is None or (
            row["loss_type"] == "vespo" and row["weights"]
        ):  # a weight of 0, as in the chunked loss
            continue
        assert_close(got, want, rtol=1e-4, atol=1e-6, msg=lambda m, what=what: f"{what}: {m}")
        if row["delta"] is None or row["loss_type"] not in CLIPPED:
            assert float((own - theirs).abs().max() / own.abs().max()) < 1e-4, what


def test_the_example(monkeypatch, capsys):
    """examples/liger_swap.py, smaller: it asserts what it claims."""
    swap = pytest.importorskip("examples.liger_swap")
    for name, value in (
        ("VOCAB", 300),
        ("WIDTH", 16),
        ("peak_memory", lambda run, device: (run(), 0)[1]),
    ):
        monkeypatch.setattr(swap, name, value)
    swap.main()
    assert "gradient differs from autograd's by" in capsys.readouterr().out


def two_ranks(rank, store):
    """Without num_items_in_batch both average their token counts over the ranks, of which one has
    none.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for count in (None, 33):
        for mask in (MASK if rank else ~MASK, MASK * rank):
            given = KNOWN | {"num_items_in_batch": count, "mask": mask}
            mine, theirs = (run(kind, {"chunk_size": B}, **given)[0][0] for kind in (Ours, Theirs))
            assert_close(
                mine, theirs, rtol=1e-5, atol=1e-6
            )  # chunks of all: its ranks call once a chunk
    dist.barrier()


def test_two_ranks(tmp_path):
    finish(start_ranks(2, two_ranks, str(tmp_path / "store")))


# ---- the loss in Liger's place, and versions of Liger that were not tested

SHORT = {"beta": 0.0, "temperature": 0.7, "loss_type": "bnpo", "use_ref_model": False}
GIVEN = (
    HIDDEN.clone().requires_grad_(),
    WEIGHT.clone().requires_grad_(),
    IDS,
    MASK.float(),
    ADVANTAGES,
)


class Counting(Theirs):
    """Liger's class with a count of its calls, and another factor."""

    factor, calls = 1.0, 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        loss, metrics = super().forward(*args, **kwargs)
        return self.factor * loss, metrics


Counting.__module__ = chunked.__name__


@parametrize("attribute", liger.ATTRIBUTES)
@parametrize("factor", [1.0, 1.02])
def test_the_slot_of_one_trainer(factor, attribute, monkeypatch):
    """Under a version that was not tested, which is as it was or has another factor."""
    monkeypatch.setattr(metadata, "version", lambda _: "99.1")
    monkeypatch.delenv("GRPO_KERNELS_ANY_VERSION", raising=False)
    theirs = Counting(compiled=False, **SHORT)
    theirs.factor, trainer = factor, SimpleNamespace(**{attribute: theirs})
    slots = liger.patch(trainer)
    with pytest.raises(RuntimeError, match="grpo_kernels already"):
        liger.patch(trainer)
    if factor != 1:
        with pytest.raises(
            RuntimeError, match=r"liger-kernel 99\.1.*forward computes something else .*: values"
        ):
            getattr(trainer, attribute)(*GIVEN)
    else:
        with pytest.warns(UserWarning, match=r"liger-kernel 99\.1.*They agree"):
            got = [getattr(trainer, attribute)(*GIVEN)[0] for _ in range(2)]
        assert slots.counts == {"fused": 2} and theirs.calls == 1
        slots.undo()
        assert_close(got[1], theirs(*GIVEN)[0])
    assert getattr(trainer, attribute) is theirs and GIVEN[0].grad is None
    with pytest.warns(UserWarning, match=r"99\.1 was not tested .* are as in 0\.8\.5"):
        Ours()


@parametrize("steps", [1, 3, 4])
@parametrize("attribute", liger.ATTRIBUTES)
def test_the_gradient_of_a_patched_trainer_is_scaled_in_the_forward(steps, attribute, monkeypatch):
    """The backward multiplies it by exactly 1, also if the number of steps changes."""
    factors = []
    kernels = type(backends.pick("auto", torch.device("cpu")))
    monkeypatch.setattr(kernels, "scale_", lambda self, x, factor: factors.append(float(factor)))
    trainer = SimpleNamespace(**{attribute: Theirs(compiled=False, **SHORT)})
    liger.patch(trainer)
    trainer.current_gradient_accumulation_steps = steps
    hidden, *others = GIVEN
    loss, _ = getattr(trainer, attribute)(hidden.detach().requires_grad_(), *others)
    (loss / steps).backward()
    assert factors and set(factors) == {1.0}


class Newer(Theirs):
    """Liger's class with an option that ours does not have."""

    def __init__(self, *args, tilt=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.tilt = tilt


Newer.__module__ = chunked.__name__


def test_an_option_of_a_newer_liger_is_left_to_it(monkeypatch):
    """An object with its default is ours; one that has it set is Liger's own, and counted."""
    monkeypatch.setattr(chunked, "LigerFusedLinearGRPOLoss", Newer)
    with liger.bind(any_version=True) as slots:
        ours, theirs = (
            chunked.LigerFusedLinearGRPOLoss(compiled=False, **SHORT, **more)
            for more in ({}, {"tilt": 0.5})
        )
        assert type(theirs) is Newer and not isinstance(ours, Newer)
        ours(*GIVEN)
    assert slots.counts == {
        "fused": 1,
        "Liger: option tilt=0.5, which grpo_kernels does not know": 1,
    }
    with (
        pytest.raises(RuntimeError, match=r"strict=True.*option tilt=0\.5"),
        liger.bind(any_version=True, strict=True),
    ):
        chunked.LigerFusedLinearGRPOLoss(compiled=False, **SHORT, tilt=0.5)
