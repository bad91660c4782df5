"""Distillation losses of TRL, Liger and verl compared with ours, in value and gradient. TRL's and
Liger's run as they are installed, verl's where it is, else a stand-in with its formula; NeMo-RL's
are in test_nemo_rl.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from grpo_kernels.integrations import liger
from grpo_kernels.integrations import trl as ours_of_trl
from grpo_kernels.integrations import verl as ours_of_verl
from support import oracle
from support.pairs import label, pairs
from support.trainers import assert_same, stand_in, value_and_gradient, without_trainers

parametrize = pytest.mark.parametrize

B, T, V, K = 2, 5, 37, 6
BETAS, ITEMS = (0.0, 0.3, 1.0), (None, 23, torch.tensor(23))
MASK = torch.arange(T) < torch.tensor([[T], [T - 2]])
LABELS = torch.where(MASK, 3, -100)
G = torch.Generator().manual_seed(0)
STUDENT, TEACHER = (2.0 * torch.randn(B, T, V, generator=G) for _ in range(2))
TEACHER_LOGPS = torch.log_softmax(TEACHER, -1)
#: Hidden states, weight and bias of the student, and of the teacher, whose width is its own.
HEADS = [
    [
        torch.randn(B, T, h, generator=G),
        0.4 * torch.randn(V, h, generator=G),
        torch.randn(V, generator=G),
    ]
    for h in (16, 24)
]


# ---- from hidden states


@pytest.fixture
def module():
    return pytest.importorskip("trl.trainer.distillation_trainer")


@parametrize(
    "row",
    pairs(
        beta=BETAS,
        items=ITEMS,
        how=(
            {},
            {
                "temperature": 0.7,
                "student_logit_scale": 0.5,
                "teacher_final_logit_softcapping": 4.0,
            },
            {
                "temperature": 1.5,
                "student_final_logit_softcapping": 6.0,
                "teacher_logit_scale": 1.2,
            },
        ),
    ),
    ids=label,
)
def test_trls_loss(module, row):
    """Its other results too:

    the sum of the entropies, and the number of tokens. The slot is filled, and restored.
    """
    theirs, (th, tw, tb) = module._chunked_divergence_loss, HEADS[1]

    def loss(h, w, b):
        given = {"student_lm_head_bias": b, "teacher_lm_head_bias": tb, **row["how"]}
        return module._chunked_divergence_loss(
            h, th, w, tw, MASK, row["beta"], row["items"], **given
        )

    want = value_and_gradient(loss, HEADS[0])
    with ours_of_trl.fused_divergence(strict=True) as slot:
        mine = value_and_gradient(loss, HEADS[0])
        with pytest.raises(RuntimeError, match=r"by grpo_kernels already|takes"):
            ours_of_trl.fused_divergence()
    assert dict(slot.counts) == {"fused": 1} and module._chunked_divergence_loss is theirs
    assert_same(mine, want)
    assert_close(mine[0][1], want[0][1], rtol=1e-5, atol=1e-5)
    assert int(mine[0][2]) == int(want[0][2]) == int(MASK.sum())


@parametrize("beta", BETAS)
def test_ligers_loss_by_its_name(beta):
    """Against Liger's loss in plain torch, whose fused kernel needs a GPU, and which masks its
    cross-entropy only.
    """
    theirs = pytest.importorskip("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, temperature=0.8, compiled=False
    )
    ours, keep, labels = (
        liger.LigerFusedLinearJSD(beta, temperature=0.8),
        MASK.view(-1),
        LABELS.view(-1),
    )
    student, rows, weight = (
        [HEADS[0][0].flatten(0, 1), HEADS[0][1]],
        HEADS[1][0].flatten(0, 1),
        HEADS[1][1],
    )
    mine = value_and_gradient(lambda h, w: ours(h, w, rows, weight, labels), student)
    assert_same(
        mine,
        value_and_gradient(
            lambda h, w: theirs(h[keep], w, rows[keep], weight, labels[keep]), student
        ),
    )
    with pytest.raises(ValueError, match=r"mixture=1\.5"):
        liger.LigerFusedLinearJSD(1.5)


# ---- verl's losses over a teacher's largest


def forward_kl_topk(logits, values, ids, config, data_format):
    """verl's formula without its clamps, in the dtype of the logits."""
    values, ids = (x.values()[None] for x in (values, ids))
    logps = torch.log_softmax(logits, -1).gather(-1, ids)
    masses = {"student_mass": logps.exp().sum(-1), "teacher_mass": values.exp().sum(-1)}
    return {"distillation_losses": (values.exp() * (values - logps)).sum(-1), **masses}


HOME = "verl.trainer.distillation.fsdp.losses"


@pytest.fixture(params=["stand-in", "itself"])
def verl(request, monkeypatch):
    """The module with verl's function of logits, and ours in verl's registry."""
    monkeypatch.setattr(ours_of_verl, "_registered", {})
    if request.param == "itself":
        pytest.importorskip("verl", minversion="0.9.0", exc_type=ImportError)
        losses = importlib.import_module("verl.trainer.distillation.losses")
        for name in [
            name
            for name in dir(losses)
            if name.endswith("REGISTRY") and isinstance(getattr(losses, name), dict)
        ]:
            monkeypatch.setattr(losses, name, dict(getattr(losses, name)))
        ours_of_verl.register_distillation()
        yield importlib.import_module(HOME)
        return
    monkeypatch.setattr(metadata, "version", lambda _: "0.9.1")
    with without_trainers("verl"):
        named = {}
        stand_in(
            "verl.utils.ulysses",
            get_ulysses_sequence_parallel_world_size=lambda: 1,
            slice_input_tensor=None,
        )
        stand_in(
            "verl.trainer.distillation.losses", DistillationLossSettings=SimpleNamespace, named=named,
            register_distillation_loss=lambda settings: lambda function: named.setdefault(settings.names[0], function),
            compute_forward_kl_topk=lambda *_: (None, {"told": 1}),
        )  # fmt: skip
        stand_in("verl.workers.utils.padding", no_padding_2_padding=lambda x, data: x + 1)
        ours_of_verl.register_distillation()
        yield stand_in(HOME, compute_forward_kl_topk=forward_kl_topk)


def config_of(mode):
    clamps = {
        "log_prob_min_clamp": None,
        "use_chunked_topk": False,
        "loss_max_clamp": None,
        "topk": K,
    }
    return SimpleNamespace(distillation_loss=SimpleNamespace(loss_mode=mode, **clamps))


def given_to(mode, repeated=False):
    """(ids, the teacher's log-probs, what verl passes):

    its largest, or any in which most rows have one twice.
    """
    values, ids = TEACHER_LOGPS.flatten(0, 1).topk(K)
    if repeated:
        g = torch.Generator().manual_seed(2)
        ids, values = (
            torch.randint(V, (B * T, K), generator=g),
            torch.log_softmax(2.0 * torch.randn(B * T, K, generator=g), -1),
        )
        ids[:, 3], ids[1], ids[2] = ids[:, 1], 7, torch.arange(K)
    nested = (
        torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 4, B * T]))
        for x in (values, ids)
    )
    return (
        ids,
        values,
        (*nested, mode if isinstance(mode, SimpleNamespace) else config_of(mode), "thd"),
    )


ROWS = STUDENT.flatten(0, 1)[None]


@parametrize("repeated", [False, True])
@parametrize("name", ours_of_verl.DISTILLATION_LOSSES)
def test_verls_losses(verl, name, repeated):
    """Each is its divergence. In a sum over the ids alone an id counts as often as it is listed;
    with a tail a row in which one repeats is padding: 0 in value, gradient and masses. verl's own
    forward KL, where nothing is clamped, is that sum.
    """
    (ids, values, given), exact = (
        given_to(f"fused_{name}", repeated),
        ours_of_verl.DISTILLATION_LOSSES[name],
    )
    distinct, up, masses = (
        torch.tensor([len({*row}) == K for row in ids.tolist()]),
        torch.linspace(-1, 2, B * T),
        [],
    )
    alone = exact.tail == "ignore"

    def of(function, given=given):
        def loss(z):
            out = function(z, *given)
            masses[:] = [out["student_mass"].detach()[0], out["teacher_mass"].detach()[0]]
            return (out["distillation_losses"] * up).sum()

        return loss

    def by_definition(z):
        log_p = torch.log_softmax(z[0], -1)
        if alone:
            return (
                (values.double().exp() * (values.double() - log_p.gather(-1, ids))).sum(-1) * up
            ).sum()
        listed = [
            row if one_each else [] for row, one_each in zip(ids.tolist(), distinct, strict=True)
        ]
        log_q = torch.zeros(log_p.shape, dtype=log_p.dtype).scatter(-1, ids, values.to(log_p.dtype))
        return (
            oracle.listed_divergence(log_p, log_q, listed, exact.direction, exact.share, exact.tail)
            * up
        ).sum()

    own = verl.compute_forward_kl_topk
    with ours_of_verl.bind_distillation(strict=True) as slots:
        mine = value_and_gradient(of(verl.compute_forward_kl_topk), ROWS)
        assert_same(mine, value_and_gradient(by_definition, ROWS, torch.float64))
        assert {*slots.counts} == {"fused"}
    counted = torch.ones_like(distinct) if alone else distinct
    want = [
        torch.log_softmax(ROWS[0], -1).gather(-1, ids).exp().sum(-1) * counted,
        values.exp().sum(-1) * counted,
    ]
    assert_close(masses, want, rtol=1e-5, atol=1e-6)
    if alone and not repeated:
        assert_same(mine, value_and_gradient(of(own, given_to("forward_kl_topk")[2]), ROWS))
