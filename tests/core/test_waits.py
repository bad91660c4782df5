"""No public function waits for a device, forward and backward, but those that say so.

Tested with meta tensors, which have no values that the host could read; row counts, which a GPU sends to the host ahead, with a
stand-in for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels import (
    Exact,
    Head,
    LogitTransform,
    Objective,
    Options,
    Sparse,
    TokenBatch,
    TokenSets,
    group_advantages,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    loss_from_model,
    token_divergence,
    token_logprobs,
    use,
)
from grpo_kernels.batch import sends_ahead
from grpo_kernels.distributed import global_normalizer
from grpo_kernels.losses import objective_loss
from grpo_kernels.rewards.corrections import importance_weights
from support.meta_device import WAITS, CopyError, make_device, on_meta
from support.objectives import OBJECTIVES

Tensor = torch.Tensor
B, T, V, H = 4, 5, 301, 8


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is no CPU, whose tensors have no values and take none from the host."""
    make_device(monkeypatch)


@pytest.mark.usefixtures("meta")
def test_a_wait_of_the_device_is_noticed() -> None:
    x, index = on_meta(torch.ones(3)), torch.tensor([0, 2])
    for wait in (lambda: x.sum().item(), lambda: bool(x[0] > 0), lambda: x.nonzero(), lambda: x[x > 0], lambda: x.tolist()):
        with pytest.raises(WAITS):
            wait()
    for copy in (
        lambda: torch.tensor([1], device="meta"), lambda: torch.as_tensor(1.0, device="meta"), lambda: x.new_tensor([1]),
        lambda: index.to("meta"), lambda: index.to(x), lambda: x.copy_(torch.ones(3)), lambda: x[index], lambda: x[[0, 2]],
        lambda: x.__setitem__(index, 1.0), lambda: index.type_as(x),
    ):  # fmt: skip
        with pytest.raises(CopyError):
            copy()
    fine = torch.full((1,), 3, device="meta"), x.new_full((1,), 3), x.to(torch.float16), x + 1.0, x[1:], x[on_meta(index)]
    assert all(y.is_meta for y in fine)


# ---- every public function, forward and backward


class On:
    """What calls take, on the device: leaves, batches whose row counts the host has by then, teachers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = B * T
        lengths = torch.tensor([5, 2, 0, 4])
        counts = torch.arange(rows) % 3 * 50  # no id, 50, 100
        sets = TokenSets.from_counts(torch.cat([torch.arange(n) for n in counts.tolist()]), counts)
        top = TokenSets.from_counts(torch.arange(2 * rows) % V, torch.full((rows,), 2))
        self.real = {
            "targets": torch.randint(V, (B, T)), "advantages": torch.tensor([1.0, -1.0, 0.5, 0.0]),
            "mask": torch.arange(T) < lengths[:, None], "weights": torch.rand(B, T), "groups": torch.tensor([0, 0, 1, 1]),
            **{name: -1 - torch.rand(B, T) for name in ("old_logps", "ref_logps", "sampler_logps")},
        }  # fmt: skip
        monkeypatch.setattr(TokenBatch, "count", lambda batch, kind, marked=None: batch.__dict__["_numbers"][kind])
        self.hidden, self.weight, self.bias, self.logits = (
            torch.empty(*shape, device="meta", requires_grad=True) for shape in ((B, T, H), (V, H), (V,), (B, T, V))
        )
        self.batch, self.alone, self.kept = self.made(), self.made(ref_logps=None), self.made(kept=sets)
        self.every = self.made(kept=top)  # each row has a set
        self.top = on_meta(top.with_values(torch.full((2 * rows,), -1.0)))
        self.targets, self.mask, self.head = self.batch.targets, self.batch.mask, (self.hidden, self.weight)
        self.fixed, second = self.logits.detach(), (torch.empty_like(self.hidden), torch.empty_like(self.weight))
        self.second, weights = second, torch.empty(B, device="meta")
        self.teachers = [(second, 0.5), (second, weights)]  # from hidden states, in one visit
        self.beside = [(self.fixed, 0.5), (self.top, weights)]  # from logits, one known at some ids

    def made(self, **more: Any) -> TokenBatch:
        fields = self.real | more
        real, made = TokenBatch(**fields), TokenBatch(**on_meta(fields))
        marks = {kind: real.marked(kind) for kind in real._kinds}  # whose numbers the host of a GPU has by then
        numbers = {kind: real.rows if mark is None else int(mark.sum()) for kind, mark in marks.items()}
        object.__setattr__(made, "_numbers", numbers)
        return made


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    return On(monkeypatch)


DAPO, GSPO = Objective.preset("dapo", beta=0.04), Objective.preset("gspo")
JSD, OF_IDS = Exact("jsd"), Exact("forward", tail="ignore")
EXACT, TOP = (Objective.preset("dapo", beta=0.04, kl=kl) for kl in (JSD, OF_IDS))
APART = replace(GSPO, beta=0.04, kl=JSD)  # two passes
SPARSE, MEMORY = Options(sparse=Sparse()), lambda: torch.zeros(V, H, device="meta")
ALSO: dict[str, Any] = {"also": ("sum_squares", "top_id"), "entropy": True}

#: {name: a call, whose result is differentiable}
CALLS: dict[str, Callable[[On], Any]] = {
    "token_logprobs, masked": lambda on: token_logprobs(on.logits, on.targets, mask=on.mask, entropy=True),
    "token_logprobs, at": lambda on: token_logprobs(on.logits, on.targets, mask=on.mask, at=on.top),
    "token_logprobs, kept sets": lambda on: token_logprobs(on.logits, on.targets, mask=on.mask, kept=on.kept.kept, **ALSO),
    "token_logprobs, kept sets and at": lambda on: token_logprobs(on.logits, on.targets, mask=on.mask, kept=on.kept.kept, at=on.top),
    "linear_logprobs": lambda on: linear_logprobs(*on.head, on.targets, entropy=True),
    "linear_logprobs, masked": lambda on: linear_logprobs(*on.head, on.targets, mask=on.mask),
    "linear_logprobs, at": lambda on: linear_logprobs(*on.head, on.targets, at=on.top),
    "linear_logprobs, kept sets": lambda on: linear_logprobs(*on.head, on.targets, kept=on.kept.kept, **ALSO),
    "linear_logprobs, the mass of sets": lambda on: linear_logprobs(*on.head, on.targets, kept=on.every.kept, also=("log_kept_mass",)),
    "linear_logprobs, sets alone, masked": lambda on: linear_logprobs(*on.head, on.targets, kept=on.every.kept, mask=on.mask),
    "linear_logprobs, Sparse": lambda on: linear_logprobs(*on.head, on.targets, options=SPARSE),
    "linear_logprobs, missing": lambda on: linear_logprobs(*on.head, on.targets, kept=on.top, options=Options(missing="full")),
    "token_divergence, masked": lambda on: token_divergence(on.logits, on.fixed, JSD, mask=on.mask),
    "token_divergence, kept sets": lambda on: token_divergence(on.logits, on.fixed, JSD, kept=on.kept.kept),
    "token_divergence, a teacher's ids": lambda on: token_divergence(on.logits, on.top, OF_IDS, mask=on.mask),
    "token_divergence, several teachers": lambda on: token_divergence(on.logits, on.beside, OF_IDS, mask=on.mask),
    "linear_divergence": lambda on: linear_divergence(*on.head, on.second, JSD),
    "linear_divergence, masked": lambda on: linear_divergence(*on.head, on.second, JSD, mask=on.mask),
    "linear_divergence, kept sets": lambda on: linear_divergence(*on.head, on.second, JSD, kept=on.kept.kept),
    "linear_divergence, a teacher's ids": lambda on: linear_divergence(*on.head, on.top, OF_IDS),
    "linear_divergence, several teachers": lambda on: linear_divergence(*on.head, on.teachers, JSD),
    "grpo_loss": lambda on: grpo_loss(on.logits, on.batch, DAPO),
    "grpo_loss, temperatures": lambda on: grpo_loss(on.logits, on.batch, DAPO, transform=LogitTransform(torch.empty(B, T, device="meta"))),
    "grpo_loss, kept sets": lambda on: grpo_loss(on.logits, on.kept, DAPO),
    "grpo_loss, divergence": lambda on: grpo_loss(on.logits, on.alone, EXACT, ref_logits=on.fixed),
    "grpo_loss, a teacher's ids": lambda on: grpo_loss(on.logits, on.alone, TOP, ref_logits=on.top),
    "grpo_loss, several teachers": lambda on: grpo_loss(on.logits, on.alone, EXACT, ref_logits=on.beside[:1] * 2),
    "grpo_loss, several teachers apart": lambda on: grpo_loss(on.logits, on.alone, TOP, ref_logits=on.beside),
    "linear_grpo_loss": lambda on: linear_grpo_loss(on.hidden, Head(on.weight, on.bias), on.batch, DAPO, options=Options(skip_inactive=True)),
    "linear_grpo_loss, sequence level": lambda on: linear_grpo_loss(*on.head, on.batch, GSPO),
    "linear_grpo_loss, reference": lambda on: linear_grpo_loss(*on.head, on.alone, DAPO, reference=on.second),
    "linear_grpo_loss, kept sets": lambda on: linear_grpo_loss(*on.head, on.kept, DAPO),
    "linear_grpo_loss, Sparse": lambda on: linear_grpo_loss(*on.head, on.batch, DAPO, options=SPARSE),
    "linear_grpo_loss, Sparse and kept sets": lambda on: linear_grpo_loss(*on.head, on.kept, DAPO, options=SPARSE),
    "linear_grpo_loss, divergence": lambda on: linear_grpo_loss(*on.head, on.alone, EXACT, reference=on.second),
    "linear_grpo_loss, a teacher's ids": lambda on: linear_grpo_loss(*on.head, on.alone, TOP, reference=on.top),
    "linear_grpo_loss, several teachers": lambda on: linear_grpo_loss(*on.head, on.alone, EXACT, reference=on.teachers),
    "linear_grpo_loss, several teachers apart": lambda on: linear_grpo_loss(*on.head, on.alone, APART, reference=on.teachers),
    "linear_grpo_loss, ids among several teachers": lambda on: (
        linear_grpo_loss(*on.head, on.alone, TOP, reference=[(on.second, 0.5), (on.top, 0.5)])
    ),
}  # fmt: skip

#: Calls that are documented to wait, in the forward.
DOCUMENTED = {
    "linear_logprobs, masked", "linear_logprobs, missing", "linear_divergence, masked", "linear_grpo_loss, ids among several teachers",
}  # fmt: skip


def total(found: Any) -> Tensor:
    """The sum of what has a gradient: a loss, a tensor, or log-probs, entropies and what else was asked for."""
    if isinstance(found, Tensor):
        return found.sum()
    if not isinstance(found, tuple):
        assert len(found.metrics) >= 9
        return found.loss
    parts = [*found[:2], *(found[2].values() if len(found) > 2 else ())]
    return torch.stack([x.sum() for x in parts if x is not None and x.requires_grad]).sum()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("meta")
def test_no_call_waits_but_those_that_say_so(name: str, on: On) -> None:
    with use(backend="eager"):
        if name in DOCUMENTED:
            with pytest.raises(WAITS, match="nonzero"):
                CALLS[name](on)
            return
        total(CALLS[name](on)).backward()
    assert (on.logits.grad is not None) != (on.hidden.grad is not None and on.weight.grad is not None)


#: Each objective from logits; over sets and from hidden states, with memory to add to, those that ask for different rows.
WITHOUT_WAITS = [(name, "whole", "logits") for name in OBJECTIVES if "exact" not in name]
WITHOUT_WAITS += [
    (name, missing, source)
    for name in ("dapo", "grpo, k3 and entropy", "gspo", "vespo")
    for missing, source in (
        ("include", "logits"),
        ("full", "hidden"),
        ("mask", "hidden"),
        ("mask", "logits"),
        ("include", "hidden"),
    )
]


@pytest.mark.parametrize("name, missing, source", WITHOUT_WAITS)
@pytest.mark.usefixtures("meta")
def test_no_objective_waits(name: str, missing: str, source: str, on: On) -> None:
    batch = on.batch if missing == "whole" else on.made(kept=on_cpu(on), missing=missing)
    objective = OBJECTIVES[name][0]()
    normalizer = global_normalizer(objective, [batch, batch])
    for skip in (False, True):
        options = Options("eager", skip_inactive=skip)
        if source == "logits":
            out = grpo_loss(on.logits, batch, objective, normalizer=normalizer, options=options)
        else:
            options = replace(options, weight_grad=MEMORY() if skip else None)
            out = linear_grpo_loss(*on.head, batch, objective, normalizer=normalizer, options=options)
        total(out).backward()
        assert missing == "whole" or ("kept_mass" not in out.metrics and "outside_set" in out.metrics)
    assert on.logits.grad is not None if source == "logits" else on.weight.grad is not None


def on_cpu(on: On) -> TokenSets:
    counts = torch.arange(B * T) % 3 * 50
    return TokenSets.from_counts(torch.cat([torch.arange(n) for n in counts.tolist()]), counts)


@pytest.mark.usefixtures("meta")
def test_what_goes_before_a_loss_waits_for_nothing(on: On) -> None:
    rewards, entropy = torch.empty(B, device="meta"), torch.empty(B, T, device="meta", requires_grad=True)
    TokenBatch.from_rewards(on.targets, rewards, group_size=2, mask=on.mask, kept=on.kept.kept, missing="mask")
    importance_weights(on.batch, level="sequence")
    group_advantages(torch.stack([rewards, rewards], 1), group_size=2, reward_weights=[1.0, 0.5])
    total(objective_loss(entropy, on.batch, DAPO)).backward()


def test_loss_from_model_waits_for_nothing(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from support.models import build

    model = build("LlamaForCausalLM").to("meta")
    model.model.forward = lambda input_ids: (model.model.embed_tokens(input_ids),)  # that of transformers waits
    make_device(monkeypatch)
    with use(backend="eager"):
        total(loss_from_model(model, torch.empty(B, T, dtype=torch.int64, device="meta"), on.batch, DAPO)).backward()
    assert model.model.embed_tokens.weight.grad is not None and model.lm_head.weight.grad is not None


# ---- row counts that a GPU sends to the host


class Device(SimpleNamespace):
    """Events and streams of a device whose tensors are on the CPU."""

    def __init__(self) -> None:
        super().__init__(capturing=False, waits=0, recorded=0)
        stand_in = self

        class Event:
            def record(self) -> None:
                stand_in.recorded += 1

            def synchronize(self) -> None:
                assert not stand_in.capturing, "illegal while a graph is captured"
                stand_in.waits += 1

        self.Event = Event

    def device(self, device: torch.device) -> Any:
        return contextlib.nullcontext(device)

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found, empty = Device(), torch.empty
    monkeypatch.setattr(torch, "get_device_module", lambda _: found)
    monkeypatch.setattr("grpo_kernels.batch.AHEAD", ("cpu",))
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **kind: empty(*shape, **kind))
    return found


@pytest.fixture
def batch(device: Device) -> TokenBatch:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    return TokenBatch(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([1.0, 0.0]), mask=mask)


def loss(batch: TokenBatch, **options: Any) -> Tensor:
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    return linear_grpo_loss(hidden, torch.randn(7, 4), batch, Objective.preset("dapo"), **options).loss


FIRST = "call the loss once on this batch before capturing"


def test_the_host_waits_for_the_counts_once(device: Device, batch: TokenBatch) -> None:
    """Also beside other fields; a write sends them again. After a first call a loss can be captured."""
    assert (device.recorded, device.waits) == (1, 0)
    loss(batch).backward()
    loss(batch.with_ref_logps(torch.zeros(2, 3))).backward()
    assert (device.recorded, device.waits) == (1, 1) and [batch.count(x) for x in ("trained", "contributing")] == [3, 2]
    device.capturing = True
    loss(batch).backward()
    device.capturing = False
    batch.mask[0, 1] = False  # type: ignore[index]
    assert batch.count("contributing") == 1 and (device.recorded, device.waits) == (2, 2)


def test_a_first_read_in_a_capture_is_refused(device: Device, batch: TokenBatch) -> None:
    """Also after a write, and of a batch that is made in the capture."""
    device.capturing = True
    made = TokenBatch(batch.targets, batch.advantages)  # nothing is sent until the counts are asked for
    for each in (batch, made):
        with pytest.raises(RuntimeError, match=FIRST):
            loss(each)
    assert device.recorded == 1
    device.capturing = False
    loss(batch), loss(made)
    batch.advantages.zero_()
    device.capturing = True
    with pytest.raises(RuntimeError, match=FIRST):
        loss(batch)


def test_a_seed_of_a_captured_graph_is_a_tensor(device: Device, batch: TokenBatch) -> None:
    """The columns of a number would be those of every replay."""
    number, tensor = (Options(sparse=Sparse(seed=seed)) for seed in (3, torch.tensor(3)))
    loss(batch, options=number)
    device.capturing = True
    loss(batch, options=tensor).backward()
    with pytest.raises(RuntimeError, match=r"seed=3.*tensor"):
        loss(batch, options=number)


def test_devices_whose_kernels_are_triton_s_send_their_counts() -> None:
    """ROCm's devices are called cuda."""
    kinds = ("cuda", "xpu", "cpu", "mps", "meta")
    assert [kind for kind in kinds if sends_ahead(torch.device(kind))] == ["cuda", "xpu"]
    for kind in ("cuda", "xpu"):  # what the stand-in stands for
        module = torch.get_device_module(kind)
        assert hasattr(module, "device") and callable(module.Event.synchronize) and callable(module.Event.record)
