"""No public function waits for a device, forward and backward, but those that say so; and the host
sends few operations to it.

Tested with meta tensors, which have no values that the host could read; row counts, which a GPU
sends to the host ahead, with a stand-in for the device.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_kernels import (
    Head,
    LogitTransform,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    linear_grpo_loss,
    use,
)
from grpo_kernels.batch import MASK_NAMES
from grpo_kernels.core import backends
from grpo_kernels.distributed import global_normalizer
from grpo_kernels.rewards.corrections import importance_weights
from grpo_kernels.set_alignment import warn_of_misaligned_sets
from support.call_cases import CallCase, covering, each_value, legal, problem
from support.inside import in_chunks, of_a_gpu
from support.objectives import OBJECTIVES
from support.public_functions import (
    bind_arguments,
    function_and_arguments,
    make_batch,
    named_outputs,
)

#: What reading a value of a meta tensor raises.
WAITS = (NotImplementedError, RuntimeError)


class CopyError(Exception):
    """The host copies to the device, and waits for that."""


def make_device(monkeypatch):
    """Meta tensors are those of a device that computes eagerly, and that the host cannot copy to
    without a wait.
    """
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda *_: False
    )  # which does not know this device
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    _refuse_copies(monkeypatch)


def _refuse_copies(monkeypatch):
    """Numbers of the host become tensors of a device by factories that fill them (torch.full)
    alone; indices are on the device. No mode of torch does this, because it is off while a backward
    runs.
    """

    def refuse(owner, name, copies):
        given = getattr(owner, name)

        @functools.wraps(given)
        def checked(*args, **kwargs):
            if not kwargs.get("non_blocking") and copies(*args, **kwargs):
                raise CopyError(name)
            return given(*args, **kwargs)

        monkeypatch.setattr(owner, name, checked)

    for name in ("tensor", "as_tensor", "asarray"):
        refuse(
            torch,
            name,
            lambda data, *_, device=None, **__: _is_meta(device) and not _on_device(data),
        )
    refuse(
        Tensor,
        "new_tensor",
        lambda x, data, *_, device=None, **__: _is_meta(device or x) and not _on_device(data),
    )
    refuse(Tensor, "type_as", lambda x, other: _from_host(x) and _is_meta(other))
    refuse(
        Tensor,
        "to",
        lambda x, *args, **named_outputs: (
            _from_host(x) and any(map(_is_meta, (*args, *named_outputs.values())))
        ),
    )
    for name in ("copy_", "set_"):
        refuse(Tensor, name, lambda x, *args: _on_device(x) and any(map(_from_host, args)))
    for name in ("__getitem__", "__setitem__"):
        refuse(Tensor, name, lambda x, index, *_: _on_device(x) and _has_host_indices(index))


def _is_meta(x):
    return _on_device(x) or (isinstance(x, str | torch.device) and torch.device(x).type == "meta")


def _on_device(x):
    return isinstance(x, Tensor) and x.is_meta


def _from_host(x):
    return isinstance(x, Tensor) and x.device.type == "cpu"


def _has_host_indices(index):
    return any(
        isinstance(x, list) or _from_host(x)
        for x in (index if isinstance(index, tuple) else (index,))
    )


def on_meta(x):
    """A tensor, sets, or the values of a dict, in the shape that they have, on the device."""
    if isinstance(x, dict):
        return {name: on_meta(value) for name, value in x.items()}
    if isinstance(x, TokenSets):
        return x._apply(on_meta)
    return torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x


@pytest.fixture
def meta(monkeypatch):
    make_device(monkeypatch)


@pytest.mark.usefixtures("meta")
def test_a_wait_of_the_device_is_noticed():
    """A copy from the host; what is documented to wait, below, shows that reading a value is
    noticed.
    """
    x, index = on_meta(torch.ones(3)), torch.tensor([0, 2])
    for copy in (
        lambda: torch.tensor([1], device="meta"),
        lambda: index.to("meta"),
        lambda: x.copy_(torch.ones(3)),
        lambda: x[index],
    ):
        with pytest.raises(CopyError):
            copy()
    assert all(
        y.is_meta
        for y in (
            torch.full((1,), 3, device="meta"),
            x.to(torch.float16),
            x + 1.0,
            x[on_meta(index)],
        )
    )


# ---- every public function, forward and backward


def marked(batch):
    """On the device, its row counts with the host, which has those of a GPU by then."""
    fields = {name: on_meta(getattr(batch, name)) for name in TokenBatch.__dataclass_fields__}
    if (
        batch.logp_terms is not None and batch.prob_terms is not None
    ):  # of one list of ids, which nobody need compare
        fields["prob_terms"] = fields["logp_terms"].with_values(on_meta(batch.prob_terms.values))
    made = TokenBatch(**fields)
    object.__setattr__(
        made, "_numbers", {name: batch.counts_by_sequence(name) for name in MASK_NAMES}
    )
    return made


def known_counts(monkeypatch):
    monkeypatch.setattr(
        TokenBatch,
        "counts_by_sequence",
        lambda batch, kind, mask=None: batch.__dict__["_numbers"][kind],
    )
    monkeypatch.setattr(
        TokenBatch,
        "count_in_mask",
        lambda batch, kind, mask=None: sum(batch.counts_by_sequence(kind)),
    )


def moved(x):
    """Arguments of a call on the device."""
    if isinstance(x, TokenBatch):
        return marked(x)
    if isinstance(x, LogitTransform | Head | Options):
        return replace(x, **{name: moved(getattr(x, name)) for name in x.__dataclass_fields__})
    if isinstance(x, list | tuple) and type(x) in (list, tuple):
        return type(x)(map(moved, x))
    return {name: moved(value) for name, value in x.items()} if isinstance(x, dict) else on_meta(x)


def runs(case, monkeypatch, **options):
    """Forward and backward on the device; the gradients."""
    p = replace(problem(case), case=replace(case, seed=1))
    if case.weight_grad != "none":
        options["weight_grad"] = torch.zeros(p.given["weight"].shape)
    f, after, given = function_and_arguments(p, **options)
    after, given = moved(after), moved(given)
    front = [torch.empty_like(x, device="meta").requires_grad_() for x in p.given.values()]
    known_counts(monkeypatch)
    make_device(monkeypatch)
    with use(backend="eager"):
        out = bind_arguments(f, after, given)(*front)
        values = named_outputs(out)
        sum(x.sum() for x in values.values() if x.requires_grad).backward()
        if case.function == "loss":
            assert len(out.metrics) >= 9 and ("outside_set" in out.metrics) == (case.kept != "none")
    return [x.grad for x in front if x.grad is not None]


def is_documented(r):
    """Whether a call from hidden states may wait: for masked rows, for rows without a candidate
    set, for rows that tokens share, or for those where a teacher lists no ids.
    """
    masks = problem(r).fields["mask"] is not None or r.missing != "include"
    of_sets = (
        r.kept in ("some", "empty") or r.missing == "full" or r.also in ("log_kept_mass", "all")
    )
    composed = (
        r.rows != "own"
        or (r.kept != "none" and of_sets)
        or (r.function == "divergence" and r.other == "listed")
    )
    return r.source == "hidden" and ((r.function != "loss" and masks) or composed)


#: What meets each function.
FEATURES = "kept missing other also transform mask skip_inactive weight_grad rows listed".split()
#: Calls in which each feature meets each function; every objective; those that ask for different
#: rows, over sets.
CALLS = [
    r
    for r in each_value(
        covering(vocab=61, width=8, frozen="nothing", inplace=False, lengths=(5, 2, 0, 4)),
        ("source", "function"),
        FEATURES,
    )
    if not is_documented(r)
]
CALLS += [
    CallCase(objective=name, source="hidden", normalizer=9.0)
    for name in ("gspo", "off-policy sequences", "clip-cov", "gmpo")
]
CALLS += [
    CallCase(objective=name, skip_inactive=len(name) % 2 > 0)
    for name in OBJECTIVES
    if "exact" not in name
]
CALLS += [
    legal(CallCase(objective=name, kept="some", missing=missing, source=source, weight_grad=grad, skip_inactive=grad != "none"))
    for name in ("dapo", "grpo, k3 and entropy", "gspo", "vespo")
    for missing, source, grad in (("include", "logits", "none"), ("full", "hidden", "float32"), ("mask", "hidden", "none"), ("mask", "logits", "none"))
]  # fmt: skip
CALLS = [r for r in CALLS if not is_documented(r)]


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_no_call_waits(case, monkeypatch):
    found = runs(case, monkeypatch)
    assert len(found) == len(problem(case).given) - (case.weight_grad != "none")


@pytest.mark.usefixtures("meta")
def test_what_goes_before_a_loss_waits_for_nothing(monkeypatch):
    batch, rewards = (
        marked(make_batch(problem(CallCase(objective="grpo, k3 and entropy", kept="some")))),
        on_meta(torch.ones(4)),
    )
    known_counts(monkeypatch)
    TokenBatch.from_rewards(
        batch.targets, rewards, group_size=2, mask=batch.mask, kept=batch.kept, missing="mask"
    )
    importance_weights(batch, level="sequence")
    numbers, batch = (
        batch.__dict__["_numbers"],
        replace(batch, groups=torch.empty(4, dtype=torch.int64, device="meta")),
    )
    object.__setattr__(batch, "_numbers", numbers)
    for make, _ in OBJECTIVES.values():
        global_normalizer(make(), [batch, batch])


#: Calls that are documented to wait, in the forward.
DOCUMENTED = [
    CallCase(function="logprobs", source="hidden"),
    CallCase(
        function="logprobs",
        source="hidden",
        mask="none",
        lengths=(4, 4),
        kept="some",
        missing="full",
    ),
    CallCase(function="divergence", source="hidden", other="whole", also="nothing"),
    CallCase(source="hidden", rows="shared"),
]


@pytest.mark.parametrize("case", DOCUMENTED, ids=str)
def test_what_is_documented_to_wait(case, monkeypatch):
    assert is_documented(case)
    with pytest.raises(WAITS, match="nonzero"):
        runs(case, monkeypatch)


# ---- what the host launches on a GPU
#
# A launch takes the host 4 to 8 us, which is longer than the GPU takes for the numbers of a few
# thousand tokens.

#: Operations of torch that launch no kernel, in addition to views.
FREE = ("aten.detach", "aten.empty", "aten.new_empty", "aten._unsafe_view")


class Operations(TorchDispatchMode):
    """Record the names of the operations of torch that launch a kernel on a GPU, in `launched`.

    An operation counts as one, although some (a sort) launch several kernels.
    """

    def __init__(self):
        super().__init__()
        self.launched = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not str(func).startswith(FREE):
            self.launched.append(str(func))
        return func(*args, **(kwargs or {}))


def launches(case, monkeypatch, chunk=64):
    """Return what a loss and its backward launch on a GPU beside matmuls, by name.

    All rows are one block of 64 rows. The upstream gradient is given, so that none is created.
    """
    kernels = backends.load("triton")
    p = problem(replace(case, lengths=(16,) * 4, dtype="bfloat16"))
    f, after, given = map(moved, function_and_arguments(p))
    tensors = {
        name: torch.empty_like(x, device="meta").requires_grad_(name != case.frozen)
        for name, x in p.given.items()
    }
    monkeypatch.setattr("grpo_kernels.batch.DEVICES_WITH_EARLY_COUNTS", ("meta",))
    monkeypatch.setattr(
        TokenBatch,
        "_sent_counts",
        lambda batch, kind: (
            batch.__dict__["_numbers"][kind],
            torch.empty(len(batch.__dict__["_numbers"][kind]), device="meta"),
        ),
    )
    monkeypatch.setattr(backends, "pick", lambda *_: kernels.Kernels())
    found = []

    def launch(kind, kernel, tensors, num_programs, arguments, **flags):
        if num_programs(1) > 0:
            found.append(kernel.__name__)

    monkeypatch.setattr(kernels.launch, "run", launch)
    in_chunks(monkeypatch, chunk, block=64)
    call = bind_arguments(f, after, given)
    one = torch.empty((), device="meta")
    with of_a_gpu(), Operations() as seen:
        loss = call(*tensors.values()).loss
        torch.autograd.grad(loss, [x for x in tensors.values() if x.requires_grad], one)
    return found + seen.launched


#: How many launches a loss takes at most on a GPU, from logits and from hidden states. The tokens
#: have a mask, importance weights and an SFT term. Where torch computes much of the loss (sequence
#: level, selections from the batch, candidate sets, extra ids), the number is rounded up.
LAUNCHES = {
    "grpo": (13, 35),
    "dapo": (11, 33),
    "dr_grpo": (10, 32),
    "cispo": (11, 33),
    "reinforce": (11, 33),
    "sapo": (13, 35),
    "dapo, k3": (12, 27),
    "dapo, entropy": (12, 27),
    "grpo, k3 and entropy": (15, 30),
    "gspo": (37, 75),
    "gspo-token": (31, 65),
    "gmpo": (50, 90),
    "vespo": (37, 72),
    "clip-cov": (120, 150),
    "dapo, exact": (80, 90),
    "distillation, exact": (80, 90),
}
#: The formula of these is one launch.
SEQUENCE_LEVEL = ("gspo", "gspo-token", "gmpo", "vespo")


@pytest.mark.parametrize("source", ["logits", "hidden"])
@pytest.mark.parametrize("objective", LAUNCHES)
def test_launches_of_a_loss(objective, source, monkeypatch):
    pytest.importorskip("triton")
    other = "whole" if "exact" in objective else "none"
    case = CallCase(objective=objective, source=source, other=other)
    found = launches(case, monkeypatch)
    assert len(found) <= LAUNCHES[objective][source == "hidden"], found
    if objective in SEQUENCE_LEVEL:
        assert found.count("evaluate_formula_kernel") == 1


#: The same of other calls. Each further chunk takes one launch for its loss. Extra ids are left
#: out of the softmax and join it in float64, without repetitions.
OTHER_LAUNCHES = {
    "no mask": (CallCase(mask="none"), 8),
    "no mask, hidden": (CallCase(source="hidden", mask="none"), 18),
    "on-policy": (CallCase(given="on-policy"), 10),
    "on-policy, hidden": (CallCase(source="hidden", given="on-policy"), 30),
    "frozen head": (CallCase(source="hidden", frozen="weight"), 32),
    "16 chunks": (CallCase(source="hidden"), 46),
    "candidate sets": (CallCase(kept="all"), 125),
    "candidate sets, hidden": (CallCase(source="hidden", kept="all"), 145),
    "extra ids": (CallCase(listed="some"), 245),
    "extra ids, hidden": (CallCase(source="hidden", listed="some"), 275),
    "dapo, exact jsd": (CallCase(objective="dapo, exact", other="whole", exact="jsd"), 50),
}


@pytest.mark.parametrize("name", OTHER_LAUNCHES)
def test_launches_of_other_calls(name, monkeypatch):
    pytest.importorskip("triton")
    case, number = OTHER_LAUNCHES[name]
    found = launches(case, monkeypatch, chunk=4 if "chunks" in name else 64)
    assert len(found) <= number, found


# ---- row counts that a GPU sends to the host


class Device(SimpleNamespace):
    """Events and streams of a device whose tensors are on the CPU."""

    def __init__(self):
        super().__init__(capturing=False, waits=0, recorded=0, arrived=True)
        stand_in = self

        class Event:
            def record(self):
                stand_in.recorded += 1

            def query(self):
                return stand_in.arrived

            def synchronize(self):
                assert not stand_in.capturing, "illegal while a graph is captured"
                stand_in.waits += 1

        self.Event = Event

    def device(self, device):
        return contextlib.nullcontext(device)

    def is_current_stream_capturing(self):
        return self.capturing


@pytest.fixture
def device(monkeypatch):
    found, empty, asserted = Device(), torch.empty, torch._assert_async

    def check(condition, message):
        assert len(message) < 255, "CUDA refuses it"
        asserted(condition, message)

    monkeypatch.setattr(torch, "_assert_async", check)
    monkeypatch.setattr(torch, "get_device_module", lambda _: found)
    monkeypatch.setattr("grpo_kernels.batch.DEVICES_WITH_EARLY_COUNTS", ("cpu",))
    monkeypatch.setattr(
        torch, "empty", lambda *shape, pin_memory=False, **kind: empty(*shape, **kind)
    )
    return found


@pytest.fixture
def batch(device):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    return TokenBatch(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([1.0, 0.0]), mask=mask)


def loss(batch, **options):
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    return linear_grpo_loss(
        hidden, torch.randn(7, 4), batch, Objective.preset("dapo"), **options
    ).loss


FIRST = "call the loss once on this batch before capturing"


def test_the_host_waits_for_the_counts_once(device, batch):
    """Also beside other fields; a write sends them again.

    After a first call a loss can be captured.
    """
    assert (device.recorded, device.waits) == (1, 0)
    loss(batch).backward()
    loss(batch.with_ref_logps(torch.zeros(2, 3))).backward()
    assert (device.recorded, device.waits) == (1, 1) and [
        batch.count_in_mask(x) for x in ("trained", "contributing")
    ] == [3, 2]
    device.capturing = True
    loss(batch).backward()
    device.capturing = False
    batch.mask[0, 1] = False
    assert batch.count_in_mask("contributing") == 1 and (device.recorded, device.waits) == (2, 2)


def test_shares_outside_of_sets_are_read_without_a_wait(device, monkeypatch):
    """The copy that a first call makes is looked at once it has arrived; meanwhile no other is
    made, and none in a capture.
    """
    monkeypatch.setattr("grpo_kernels.set_alignment._earlier", None)
    share, tokens = torch.tensor(0.5), torch.tensor(200.0)
    device.capturing = True
    warn_of_misaligned_sets(share, tokens)
    device.capturing = False
    assert device.recorded == 0
    warn_of_misaligned_sets(share, tokens)
    device.arrived = False
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            warn_of_misaligned_sets(share, tokens)
        assert (device.recorded, device.waits) == (1, 0)
    device.arrived = True
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    with pytest.warns(RuntimeWarning, match="50% of the targets"):
        warn_of_misaligned_sets(share, tokens)
    assert (device.recorded, device.waits) == (2, 0)


def test_a_first_read_in_a_capture_is_refused(device, batch):
    """Also after a write, and of a batch that is made in the capture."""
    device.capturing = True
    made = TokenBatch(
        batch.targets, batch.advantages
    )  # nothing is sent until the counts are asked for
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
