"""Row counts that a GPU sends to the host: read once, and before a graph is captured. A stand-in takes the place of the device."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels import Objective, Options, Sparse, TokenBatch, linear_grpo_loss, row_counts


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
    monkeypatch.setattr(row_counts, "AHEAD", ("cpu",))
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **kind: empty(*shape, **kind))
    return found


@pytest.fixture
def batch(device: Device) -> TokenBatch:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    return TokenBatch(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([1.0, 0.0]), mask=mask)


def loss(batch: TokenBatch, **options: Any) -> Any:
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    return linear_grpo_loss(hidden, torch.randn(7, 4), batch, Objective.preset("dapo"), **options)


def test_the_host_waits_for_the_counts_once(device: Device, batch: TokenBatch) -> None:
    assert (device.recorded, device.waits) == (1, 0)
    assert [batch.count(kind) for kind in batch._kinds] == [3, 2, 2] and device.waits == 1
    assert batch.with_ref_logps(torch.zeros(2, 3)).count("trained") == 3
    loss(batch).loss.backward()
    assert (device.recorded, device.waits) == (1, 1)


def test_nothing_is_kept_of_the_copy_once_it_is_read(device: Device, batch: TokenBatch) -> None:
    counts = batch._counts()
    assert counts.sent is not None
    counts.on_host()
    assert counts.sent is None


def test_a_write_sends_the_counts_again(device: Device, batch: TokenBatch) -> None:
    assert batch.count("contributing") == 2 and batch.mask is not None
    batch.mask[0, 1] = False
    assert batch.count("contributing") == 1 and (device.recorded, device.waits) == (2, 2)


def test_a_loss_is_captured_after_a_first_call(device: Device, batch: TokenBatch) -> None:
    loss(batch)
    device.capturing = True
    loss(batch).loss.backward()
    assert device.waits == 1


def test_a_seed_of_a_captured_graph_is_a_tensor(device: Device, batch: TokenBatch) -> None:
    """The columns of a number would be those of every replay."""
    number, tensor = (Options(sparse=Sparse(seed=seed)) for seed in (3, torch.tensor(3)))
    loss(batch, options=number)
    device.capturing = True
    loss(batch, options=tensor).loss.backward()
    with pytest.raises(RuntimeError, match=r"seed=3.*tensor"):
        loss(batch, options=number)


def test_a_first_read_in_a_capture_is_refused(device: Device, batch: TokenBatch) -> None:
    device.capturing = True
    with pytest.raises(RuntimeError, match="call the loss once on this batch before capturing"):
        loss(batch)
    made = TokenBatch(batch.targets, batch.advantages)  # nothing is sent until the counts are asked for
    assert device.recorded == 1
    with pytest.raises(RuntimeError, match="call the loss once on this batch before capturing"):
        made.count("trained")
    device.capturing = False
    loss(batch), loss(made)


def test_a_write_before_a_capture_wants_another_call(device: Device, batch: TokenBatch) -> None:
    loss(batch)
    batch.advantages.zero_()
    device.capturing = True
    with pytest.raises(RuntimeError, match="call the loss once on this batch before capturing"):
        loss(batch)


def test_devices_whose_kernels_are_triton_s_send_their_counts() -> None:
    """ROCm's devices are called cuda."""
    assert {kind for kind in ("cuda", "xpu", "cpu", "mps", "meta") if row_counts.sends_ahead(torch.device(kind))} == {
        "cuda",
        "xpu",
    }
    for kind in ("cuda", "xpu"):  # what the stand-in stands for
        module = torch.get_device_module(kind)
        assert all(hasattr(module, name) for name in ("device", "Event"))
        assert callable(module.Event.synchronize) and callable(module.Event.record)
