"""Distillation losses of TRL, Liger, VeOmni and verl compared with ours, in value and gradient, and the exact differences. TRL's
and Liger's run as they are installed, verl's where it is (else a stand-in); VeOmni's is transcribed."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from grpo_kernels import Exact, LogitTransform, TokenSets, token_divergence
from grpo_kernels.integrations import trl as trl_distillation
from grpo_kernels.integrations import verl as verl_ours
from grpo_kernels.integrations.liger import LigerFusedLinearJSD
from support.divergences import of_listed_ids
from support.pairs import label, pairs
from support.trainers import assert_same, stand_in, value_and_gradient, without_trainers

parametrize = pytest.mark.parametrize


B, T, V, H, K = 2, 5, 37, 16, 6
BETAS = (0.0, 0.3, 1.0)
MASK = torch.arange(T) < torch.tensor([[T], [T - 2]])
LABELS = torch.where(MASK, 3, -100)
G = torch.Generator().manual_seed(0)
STUDENT, TEACHER = (2.0 * torch.randn(B, T, V, generator=G) for _ in range(2))
TEACHER_LOGPS = torch.log_softmax(TEACHER, -1)
#: Hidden states, weight and bias of the student, and of the teacher, whose width is its own.
HEADS = [
    [torch.randn(B, T, h, generator=G), 0.4 * torch.randn(V, h, generator=G), torch.randn(V, generator=G)] for h in (H, 24)
]


def divergence_of(beta, tail="bin"):
    """TRL's and Liger's beta: 0 is the forward KL, 1 the reverse, in between the jsd with that mixture."""
    return Exact("jsd", mixture=beta, tail=tail) if 0 < beta < 1 else Exact({0.0: "forward", 1.0: "reverse"}[beta], tail=tail)


def both(mine, theirs, leaf=STUDENT):
    """In fp32."""
    assert_same(value_and_gradient(mine, leaf, torch.float32), value_and_gradient(theirs, leaf, torch.float32))


# ---- from hidden states


@parametrize("row", pairs(
    beta=BETAS, items=(None, 23, torch.tensor(23)), leaf=("hidden", "weight", "bias"), how=(
        {}, {"temperature": 0.7, "student_logit_scale": 0.5, "teacher_final_logit_softcapping": 4.0},
        {"temperature": 1.5, "student_final_logit_softcapping": 6.0, "teacher_logit_scale": 1.2}),
), ids=label)  # fmt: skip
def test_trls_loss(row):
    """Its other results too: the sum of the entropies, and the number of tokens."""
    module = pytest.importorskip("trl.trainer.distillation_trainer")
    i = ("hidden", "weight", "bias").index(row["leaf"])

    def of(function):
        def loss(x):
            (h, w, b), (th, tw, tb) = [*HEADS[0][:i], x, *HEADS[0][i + 1 :]], HEADS[1]
            return function(
                h, th, w, tw, MASK, row["beta"], row["items"], student_lm_head_bias=b, teacher_lm_head_bias=tb, **row["how"]
            )

        return value_and_gradient(loss, HEADS[0][i], torch.float32)

    mine, want = of(trl_distillation.divergence_loss), of(module._chunked_divergence_loss)
    assert_same(mine, want)
    assert_close(mine[0][1], want[0][1], rtol=1e-5, atol=1e-5)
    assert int(mine[0][2]) == int(want[0][2]) == int(MASK.sum())


@parametrize("ours", [True, False], ids=("ours", "TRL's"))
def test_fp16_autocast_on_a_cpu_rounds_nothing(ours):
    """TRL's own function rounds states, heads and logits to fp16; ours gives the same bits with autocast and without."""
    module = pytest.importorskip("trl.trainer.distillation_trainer")
    function, found = trl_distillation.divergence_loss if ours else module._chunked_divergence_loss, []
    for autocast in (False, True):
        leaves = [x.clone().requires_grad_() for x in HEADS[0]]
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = function(leaves[0], HEADS[1][0], leaves[1], HEADS[1][1], MASK, 0.3, student_lm_head_bias=leaves[2])[0]
        found.append(torch.autograd.grad(loss, leaves))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b) if ours else (a - b).abs().max() > 1e-4 * a.abs().max()


def test_trls_slot_is_filled_and_restored():
    module = pytest.importorskip("trl.trainer.distillation_trainer")
    before, (h, w, _), (th, tw, _) = module._chunked_divergence_loss, *HEADS
    with trl_distillation.fused_divergence() as slot:
        module._chunked_divergence_loss(h, th, w, tw, MASK, 1.0)
        with pytest.raises(RuntimeError, match=r"ours already|takes"):
            trl_distillation.fused_divergence()
    assert dict(slot.counts) == {"fused": 1} and module._chunked_divergence_loss is before


def test_a_logit_of_minus_infinity_gives_no_nan():
    """An id that a head has masked, in both models: TRL's loss is NaN."""
    (h, w, b), (th, tw, tb) = HEADS
    masked = [x.index_fill(0, torch.tensor([5]), -torch.inf) for x in (b, tb)]
    loss, gradient = value_and_gradient(
        lambda x: trl_distillation.divergence_loss(x, th, w, tw, MASK, 0.5, student_lm_head_bias=masked[0], teacher_lm_head_bias=masked[1])[0],
        h, torch.float32,
    )  # fmt: skip
    assert loss > 0 and torch.isfinite(gradient).all()


@parametrize("leaf", [0, 1], ids=("hidden", "weight"))
@parametrize("beta", BETAS)
def test_ligers_loss_by_its_name(beta, leaf):
    """Against Liger's loss in plain torch, whose fused kernel needs a GPU, and which masks its cross-entropy only."""
    jsd = pytest.importorskip("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss
    theirs = jsd(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, temperature=0.8, compiled=False)
    ours, rows, keep, labels = (
        LigerFusedLinearJSD(beta, temperature=0.8),
        HEADS[1][0].flatten(0, 1),
        MASK.view(-1),
        LABELS.view(-1),
    )
    student = [HEADS[0][0].flatten(0, 1), HEADS[0][1]]
    given = lambda x: [*student[:leaf], x, *student[leaf + 1 :]]  # noqa: E731
    both(
        lambda x: ours(*given(x), rows, HEADS[1][1], labels),
        lambda x: theirs(given(x)[0][keep], given(x)[1], rows[keep], HEADS[1][1], labels[keep]), student[leaf],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"jsd_beta=1\.5"):
        LigerFusedLinearJSD(1.5)


# ---- TRL's losses of logits


def trl(name, trainer):
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"trl.experimental.{name}.{name}_trainer"), trainer)


def mean(z, teacher, exact, count=None, temperature=1.0):
    found = token_divergence(z, teacher, exact, mask=MASK, transform=LogitTransform(temperature)).sum()
    return found / (MASK.sum() if count is None else count)


def known_at(ids, valid=None):
    """The teacher's log-probs at these ids of each token, without invalid ids."""
    kept = ids if valid is None else ids.masked_fill(~valid, -1)
    return TokenSets.from_padded(kept.flatten(0, 1), values=TEACHER_LOGPS.gather(-1, ids).flatten(0, 1))


def test_gkds_loss_is_at_temperature_1():
    """For any temperature of the sampler."""
    trainer = trl("gkd", "GKDTrainer")
    teacher = lambda **_: SimpleNamespace(logits=TEACHER)  # noqa: E731
    model = type("Teacher", (torch.nn.Module,), {"forward": lambda self, **_: teacher()})()
    this = SimpleNamespace(beta=1.0, temperature=0.5, teacher_model=model, generalized_jsd_loss=trainer.generalized_jsd_loss)
    labels = torch.cat([torch.full((B, 1), -100), LABELS], 1)[:, :T]
    found = trainer.compute_loss(
        this, lambda **_: SimpleNamespace(logits=STUDENT), {"input_ids": None, "attention_mask": None, "labels": labels}
    )
    mask = labels[:, 1:] != -100
    cold, plain = (
        token_divergence(STUDENT[:, :-1], TEACHER[:, :-1], mask=mask, transform=LogitTransform(t)).sum() / mask.sum()
        for t in (0.5, 1.0)
    )
    assert_close(found, plain, rtol=1e-4, atol=1e-6)
    assert abs(cold - found) > 0.1


WHOLE = {"gkd": "GKDTrainer", "gold": "GOLDTrainer", "iw_opd": "IWOPDTrainer"}


@parametrize("row", pairs(name=WHOLE, beta=BETAS, items=(None, 23, torch.tensor(23)), temperature=(1.0, 0.7, 1.6)), ids=label)
def test_whole_rows(row):
    """And TRL's defect: NaN of an id that both heads rule out."""
    theirs, beta = trl(row["name"], WHOLE[row["name"]]).generalized_jsd_loss, row["beta"]
    exact, given = divergence_of(beta), {"beta": beta, "temperature": row["temperature"], "num_items_in_batch": row["items"]}
    both(lambda z: mean(z, TEACHER, exact, row["items"], row["temperature"]), lambda z: theirs(z, TEACHER, LABELS, **given))
    masked = [torch.where(torch.arange(V) == 4, -torch.inf, x) for x in (STUDENT, TEACHER)]
    assert theirs(*masked, LABELS, beta=beta).isnan()
    value, gradient = value_and_gradient(lambda z: token_divergence(z, masked[1], exact).sum(), masked[0], torch.float32)
    without = [torch.cat([x[..., :4], x[..., 5:]], -1) for x in (STUDENT, TEACHER)]
    assert_close(value, token_divergence(*without, exact).sum())
    assert gradient.isfinite().all() and not gradient[..., 4].any()


@parametrize("tail", ["bin", "renormalise"])
@parametrize("beta", BETAS)
def test_a_teacher_at_some_ids(beta, tail):
    """IW-OPD picks the ids from both sides; the other two have what a server sent."""
    add_tail, exact, every = tail == "bin", divergence_of(beta, tail), MASK.sum()
    of_student, of_teacher = STUDENT.topk(3)[1], TEACHER.topk(3)[1]
    ids = {0.0: of_teacher, 1.0: of_student}.get(beta, torch.cat([of_teacher, of_student], -1))
    sets = known_at(ids, ~torch.tril(ids[..., :, None] == ids[..., None, :], -1).any(-1))
    theirs = trl("iw_opd", "IWOPDTrainer").generalized_jsd_loss
    how = {"beta": beta, "temperature": 0.8, "top_k": 3, "add_tail": add_tail}
    both(lambda z: mean(z, sets, exact, temperature=0.8), lambda z: theirs(z, 0.8 * TEACHER, LABELS, **how))

    served, chunk = TEACHER.topk(K)[1], trl("async_distillation", "_jsd_loss_chunk")
    logps, valid = TEACHER_LOGPS.gather(-1, served), torch.ones(int(every), K, dtype=torch.bool)
    of_chunk = lambda z: chunk(  # noqa: E731
        z[MASK], torch.eye(V), torch.zeros(V), 1.0, None, served[MASK], logps[MASK], valid, beta, 1.0, add_tail, None, 1
    )[0] / every  # fmt: skip
    both(lambda z: mean(z, known_at(served), exact), of_chunk)
    if beta == 0:
        trainer = trl("server_distillation", "ServerDistillationTrainer")
        this = SimpleNamespace(loss_add_tail=add_tail, _reduce_divergence_loss=trainer._reduce_divergence_loss)
        sent = {"topk_logprobs": logps, "topk_token_ids": served}
        server = lambda z: trainer._compute_server_forward_kl_loss(this, sent, torch.log_softmax(z, -1), LABELS)  # noqa: E731
        both(lambda z: mean(z, known_at(served), exact), server)


@parametrize("beta", [0.3, 1.0])
def test_a_served_teacher_at_one_or_two_ids(beta):
    """For other directions than forward the teacher's first id and the sampled one stand for all; for reverse the sampled one
    alone, and without the tail its loss is a constant 0."""
    trainer, first = trl("server_distillation", "ServerDistillationTrainer"), TEACHER.argmax(-1)
    sampled = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))
    sampled[0, 0] = first[0, 0]

    def theirs(z, add_tail=True):
        this = SimpleNamespace(beta=beta, loss_add_tail=add_tail, _reduce_divergence_loss=trainer._reduce_divergence_loss)
        of_first, of_sampled = (TEACHER_LOGPS.gather(-1, x[..., None])[..., 0] for x in (first, sampled))
        return trainer._compute_sparse_top_1_divergence_loss(
            this, torch.log_softmax(z, -1), first, of_first, sampled, of_sampled, LABELS
        )

    ids = sampled[..., None] if beta == 1 else torch.stack([first, sampled], -1)
    valid = torch.ones_like(ids, dtype=torch.bool)
    if beta != 1:
        valid[..., 1] = sampled != first
    both(lambda z: mean(z, known_at(ids, valid), divergence_of(beta)), theirs)
    if beta == 1:
        value, gradient = value_and_gradient(lambda z: theirs(z, False), STUDENT, torch.float32)
        assert value.abs() < 1e-6 and gradient.abs().max() < 1e-6


@parametrize("beta", BETAS)
def test_golds_matched_ids(beta):
    """Probabilities at ids that two tokenizers share, whose sum is not 1: the sum over these ids alone. Below 1e-8 a probability of
    theirs counts as 1e-8 and has no gradient."""
    theirs, ids, exact = (
        trl("gold", "GOLDTrainer").generalized_jsd_loss,
        torch.arange(3, 3 + K).expand(B, T, K),
        divergence_of(beta, "ignore"),
    )

    def of_probabilities(z):
        p, q = (torch.softmax(x, -1)[..., 3 : 3 + K].flatten(0, 1) for x in (z, TEACHER))
        return theirs(p, q, beta=beta, reduction="sum", logits_are_probs=True)

    ours = lambda z: token_divergence(z, known_at(ids), exact).sum()  # noqa: E731
    both(ours, of_probabilities)
    if beta == 0:
        far = STUDENT.index_fill(2, torch.tensor([4]), -40.0)
        (value, gradient), (other, stopped) = (value_and_gradient(f, far, torch.float32) for f in (ours, of_probabilities))
        log_p, log_q = (torch.log_softmax(x.double(), -1)[..., 4] for x in (far, TEACHER))
        missing = (log_q.exp() * (torch.tensor(1e-8).double().log() - log_p)).sum()
        assert_close((value - other).double(), missing, rtol=1e-4, atol=1e-4)
        assert_close((gradient - stopped)[..., 4], -log_q.exp(), rtol=1e-4, atol=1e-6)


@parametrize("clamp", [-torch.inf, -4.0])
def test_veomni(clamp):
    """Its `chunk_topk_distill_function`, whose value and gradient are written down there, not left to autograd. Its floor replaces
    log-probs of both sides: ours is the same over the ids at which the student is above it, and the rest is a constant."""
    ids, z = TEACHER.topk(K)[1], STUDENT / 0.8
    at, floored = torch.log_softmax(z, -1).gather(-1, ids), TEACHER_LOGPS.gather(-1, ids).clamp(min=clamp)
    active, weights = at >= clamp, floored.exp()
    value = (weights * (floored - at.clamp(min=clamp))).sum(-1) * MASK
    sparse = torch.zeros_like(z).scatter_add_(-1, ids, weights * active)
    gradient = MASK[..., None] * ((weights * active).sum(-1, keepdim=True) * torch.softmax(z, -1) - sparse) / 0.8
    kept = TokenSets.from_padded(ids.masked_fill(~active, -1).flatten(0, 1), values=floored.flatten(0, 1))
    mine, slopes = value_and_gradient(lambda x: mean(x, kept, Exact("forward", tail="ignore"), 1, 0.8), STUDENT, torch.float32)
    constant = torch.where(active, 0.0, weights * (floored - clamp)).sum(-1) * MASK
    assert (clamp == -torch.inf) == bool((constant == 0).all())
    assert_close(mine + constant.sum(), value.sum(), rtol=1e-4, atol=1e-6)
    assert_close(slopes.float(), gradient, rtol=1e-4, atol=1e-6)


# ---- verl's losses over a teacher's largest


def forward_kl_topk(logits, values, ids, config, data_format):
    """verl's formula without its clamps, in the dtype of the logits."""
    values, ids = (x.values()[None] for x in (values, ids))
    logps = torch.log_softmax(logits, -1).gather(-1, ids)
    masses = {"student_mass": logps.exp().sum(-1), "teacher_mass": values.exp().sum(-1)}
    return {"distillation_losses": (values.exp() * (values - logps)).sum(-1), **masses}


@pytest.fixture(params=["stand-in", "itself"])
def verl(request, monkeypatch):
    """The module with verl's function of logits, and ours in verl's registry."""
    monkeypatch.setattr(verl_ours, "_registered", {})
    if request.param == "itself":
        pytest.importorskip("verl", minversion="0.9.0", exc_type=ImportError)
        losses = importlib.import_module("verl.trainer.distillation.losses")
        for name in [name for name in dir(losses) if name.endswith("REGISTRY") and isinstance(getattr(losses, name), dict)]:
            monkeypatch.setattr(losses, name, dict(getattr(losses, name)))
        verl_ours.register_distillation()
        yield importlib.import_module("verl.trainer.distillation.fsdp.losses")
        return
    monkeypatch.setattr(metadata, "version", lambda _: "0.9.1")
    with without_trainers("verl"):
        stand_in("verl.utils.ulysses", get_ulysses_sequence_parallel_world_size=lambda: 1, slice_input_tensor=None)
        named = {}
        register = lambda settings: lambda function: named.setdefault(settings.names[0], function)  # noqa: E731
        stand_in(
            "verl.trainer.distillation.losses", DistillationLossSettings=SimpleNamespace, register_distillation_loss=register, named=named,
            compute_forward_kl_topk=lambda *_: (None, {"told": 1}),
        )  # fmt: skip
        stand_in("verl.workers.utils.padding", no_padding_2_padding=lambda x, data: x + 1)
        verl_ours.register_distillation()
        yield stand_in("verl.trainer.distillation.fsdp.losses", compute_forward_kl_topk=forward_kl_topk)


def jagged(rows):
    return torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 4, len(rows)]))


def config_of(mode):
    clamps = {"log_prob_min_clamp": None, "use_chunked_topk": False, "loss_max_clamp": None, "topk": K}
    return SimpleNamespace(distillation_loss=SimpleNamespace(loss_mode=mode, **clamps))


def listed(repeated):
    """Ids [B T, K] and the teacher's log-probs: its largest, or any in which most rows have one twice."""
    if not repeated:
        values, ids = TEACHER_LOGPS.flatten(0, 1).topk(K)
        return ids, values
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(V, (B * T, K), generator=g)
    ids[:, 3], ids[1], ids[2] = ids[:, 1], 7, torch.arange(K)
    return ids, torch.log_softmax(2.0 * torch.randn(B * T, K, generator=g), -1)


@parametrize("repeated", [False, True])
@parametrize("name", verl_ours.DISTILLATION_LOSSES)
def test_verls_losses(verl, name, repeated):
    """Each is its divergence. In a sum over the ids alone an id counts as often as it is listed; with a tail a row in which one
    repeats is padding: 0 in value, gradient and masses."""
    (ids, values), exact, logits = listed(repeated), verl_ours.DISTILLATION_LOSSES[name], STUDENT.flatten(0, 1)[None]
    distinct = torch.tensor([len({*row}) == K for row in ids.tolist()])
    up, counted = torch.linspace(-1, 2, B * T), torch.ones(B * T, dtype=torch.bool) if exact.tail == "ignore" else distinct
    given = jagged(values), jagged(ids), config_of(f"fused_{name}"), "thd"

    def of(function, masses):
        def loss(z):
            out = function(z, *given)
            masses[:] = [out["student_mass"].detach()[0], out["teacher_mass"].detach()[0]]
            return (out["distillation_losses"] * up).sum()

        return loss

    def by_definition(z):
        log_p = torch.log_softmax(z[0], -1)
        if exact.tail == "ignore":
            return ((values.double().exp() * (values.double() - log_p.gather(-1, ids))).sum(-1) * up).sum()
        sets = TokenSets.from_padded(torch.where(distinct[:, None], ids, -1), values=values)
        return (of_listed_ids(exact, log_p, sets) * up).sum()

    masses = []
    with verl_ours.bind_distillation(strict=True) as slots:
        assert_same(
            value_and_gradient(of(verl.compute_forward_kl_topk, masses), logits, torch.float32),
            value_and_gradient(by_definition, logits, torch.float64),
        )
        assert {*slots.counts} == {"fused"}
    want = torch.log_softmax(logits[0], -1).gather(-1, ids).exp().sum(-1) * counted, values.exp().sum(-1) * counted
    assert_close(masses, [*want], rtol=1e-5, atol=1e-6)


def test_verls_own_forward_kl_but_for_its_clamps(verl):
    """Where nothing is clamped it is ours; a value below 0 keeps its gradient here."""
    (ids, values), logits = listed(False), STUDENT.flatten(0, 1)[None]
    own = lambda z: verl.compute_forward_kl_topk(z, jagged(values), jagged(ids), config_of("forward_kl_topk"), "thd")  # noqa: E731
    want = value_and_gradient(lambda z: own(z)["distillation_losses"].sum(), logits, torch.float32)
    given = jagged(values), jagged(ids), config_of("fused_forward_kl_topk"), "thd"
    assert_same(
        value_and_gradient(lambda z: verl_ours.topk_divergence(z, *given)["distillation_losses"].sum(), logits, torch.float32),
        want,
    )
    more = torch.full((1, B * T, V), -20.0).scatter(-1, ids[None], values[None] + 0.1 * (torch.arange(K) == 0))
    value, gradient = value_and_gradient(
        lambda z: verl_ours.topk_divergence(z, *given)["distillation_losses"].sum(), more, torch.float32
    )
    assert value < 0 and gradient.abs().max() > 1e-3


@parametrize(
    "config", [SimpleNamespace(distillation_loss=SimpleNamespace()), config_of("another")], ids=("no field", "another")
)
def test_another_loss_is_left_to_verl(verl, config, monkeypatch):
    """verl's own function does not read loss_mode, and its callers need not have it."""
    monkeypatch.setattr(verl, "compute_forward_kl_topk", forward_kl_topk)
    ids, values = listed(False)
    with verl_ours.bind_distillation() as slots:
        verl.compute_forward_kl_topk(STUDENT.flatten(0, 1)[None], jagged(values), jagged(ids), config, "thd")
        with pytest.raises(RuntimeError, match="compute_forward_kl_topk is ours already"):
            verl_ours.bind_distillation()
    assert slots.counts == {f"verl: loss_mode={getattr(config.distillation_loss, 'loss_mode', None)!r}": 1}


def test_what_is_registered_or_refused(verl, monkeypatch):
    assert verl_ours.register_distillation({"jsd_topk": Exact("jsd")}) == [
        "fused_jsd_topk"
    ]  # a second import registers the same again
    for losses, message in (
        ({"jsd_topk": Exact("jsd", mixture=0.1)}, r"losses\['fused_jsd_topk'\]=.*is registered under that name"),
        ({"k9": "reverse"}, r"losses\['fused_k9'\]='reverse': pass an Exact"),
    ):
        with pytest.raises(ValueError, match=message):
            verl_ours.register_distillation(losses)
    losses = sys.modules["verl.trainer.distillation.losses"]
    if hasattr(losses, "named"):  # the contract of a registered loss, which finds what the forward has computed
        loss, config = losses.named["fused_jsd_topk"], config_of("fused_jsd_topk")
        with pytest.raises(ValueError, match=r"strategy='veomni': ours are for fsdp"):
            loss(SimpleNamespace(strategy="veomni"), config, {}, None)
        with pytest.raises(RuntimeError, match=r"call verl\.bind_distillation\(\) in the same module"):
            loss(SimpleNamespace(strategy="fsdp"), config, {}, None)
        with verl_ours.bind_distillation():
            found, metrics = loss(SimpleNamespace(strategy="fsdp2"), config, {"distillation_losses": torch.zeros(2)}, None)
        assert (found == 1).all() and metrics == {"told": 1}
    monkeypatch.setattr(metadata, "version", lambda _: "99.1")
    monkeypatch.delenv("GRPO_KERNELS_ANY_VERSION", raising=False)
    with pytest.raises(RuntimeError, match=r"verl 99\.1 was not tested.*install verl 0\.9\.1"):
        verl_ours.bind_distillation()
