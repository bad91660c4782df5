"""Memory that a call shares with its caller: logits that are written in place, `weight_grad=`, and what lies in it beside them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_kernels import (
    Exact,
    Head,
    LogitTransform,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    token_divergence,
    token_logprobs,
)
from support.bits import same_bits
from support.doors import Call
from support.inside import overlap
from support.recipes import Recipe

Tensor = torch.Tensor

# ---- what shares memory


def view_of(memory: Tensor, draw: random.Random) -> Tensor:
    shape = [draw.choice([0, 1, 2, 2, 3, 4, 5]) for _ in range(draw.choice([1, 2, 2, 3]))]
    return memory.as_strided(shape, [draw.choice([0, 1, 1, 2, 3, 4, 6, 8, 12, 24]) for _ in shape], draw.randrange(24))


def test_overlap_is_exact() -> None:
    """Of strided, interleaved and expanded views, whose elements are their own addresses."""
    draw, memory, found = random.Random(0), torch.arange(400), {True: 0, False: 0}
    for _ in range(1500):
        x, y = view_of(memory, draw), view_of(memory, draw)
        found[overlap(x, y)] += 1
        assert overlap(x, y) == bool({*x.reshape(-1).tolist()} & {*y.reshape(-1).tolist()}), (x.shape, x.stride(), y.stride())
    assert min(found.values()) > 150, found
    bytes_of = memory.view(torch.int32)
    assert overlap(memory[2:4], bytes_of[5:6]) and not overlap(memory[2:4], bytes_of[8:])


# ---- logits with `inplace=`

B, T, V, H = 3, 5, 40, 6
IDS = torch.arange(B * T).view(B, T) % V
DISTILLATION = Objective.preset("grpo", beta=0.5, kl=Exact("reverse"))


def loss(logits: Tensor, teacher: Any = None, transform: Any = None, normalizer: Any = None, **fields: Any) -> Any:
    batch = TokenBatch(IDS[:, : logits.shape[1]], **{"advantages": torch.ones(B), **fields})
    teacher = torch.zeros(logits.shape) if teacher is None else teacher
    given = {"transform": transform, "normalizer": normalizer, "inplace": True}
    return grpo_loss(logits, batch, DISTILLATION, ref_logits=teacher, **given)


#: What a call in place would overwrite -> the call, on memory [B, T, V + 8] in fp32.
IN_PLACE: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("ref_logits", lambda x: loss(x[:, 1:, :V], x[:, :-1, :V])),
    ("ref_logits[0]", lambda x: loss(x[..., :V], (x[..., 8:], LogitTransform(2.0)))),
    ("ref_logits[0][1]", lambda x: loss(x[..., :V], [(torch.zeros(B, T, V), x[..., 3])])),
    ("batch.advantages", lambda x: loss(x[..., :V], advantages=x[..., 0])),
    ("transform.temperature", lambda x: loss(x[..., :V], transform=LogitTransform(x[..., 0]))),
    ("normalizer", lambda x: loss(x[..., :V], normalizer=x[0, 0, 0])),
    ("ref_logits", lambda x: token_divergence(x[:, 1:, :V], x[:, :-1, :V], inplace=True)),
    ("mask", lambda x: token_logprobs(x[..., :V], IDS, mask=x.view(torch.bool)[..., 3], inplace=True)),
    ("targets", lambda x: token_logprobs(x.view(torch.bfloat16)[..., 4:V], x.view(torch.int64)[..., 1], inplace=True)),
]  # fmt: skip


@pytest.mark.parametrize("name, make", IN_PLACE, ids=lambda x: x if isinstance(x, str) else "")
def test_in_place_over_what_is_read_is_refused(name: str, make: Callable[[Tensor], Any]) -> None:
    memory = torch.rand(B, T, V + 8) + 0.5
    before = memory.clone()
    with pytest.raises(ValueError, match=f"inplace=True, but logits shares memory with {re.escape(name)}: "):
        make(memory)
    assert same_bits(memory, before)


# ---- `weight_grad=`

#: The call, the memory that it reads and its gradient would be added to, and the name in the message.
WEIGHT_GRAD: list[tuple[str, str, str]] = [
    *((each, name, name) for each in ("loss", "log-probs", "divergence") for name in ("hidden", "weight", "bias")),
    ("loss", "other weight", "reference[1].weight"),
    ("divergence", "other weight", "reference[1].weight"),
    ("divergence", "other hidden", "reference[0]"),
    ("loss", "old", "batch.old_logps"),
]


@pytest.mark.parametrize("each, memory, name", WEIGHT_GRAD)
def test_a_gradient_is_not_added_to_what_is_read(each: str, memory: str, name: str) -> None:
    m = {key: torch.randn(V * H) for key in ("hidden", "weight", "bias", "other hidden", "other weight", "old")}
    before, n = {key: x.clone() for key, x in m.items()}, B * T
    hidden, other_hidden = (m[key][: n * H].view(B, T, H) for key in ("hidden", "other hidden"))
    weight, other = m["weight"].view(V, H).requires_grad_(), (other_hidden, Head(m["other weight"].view(V, H)))
    head, options = Head(weight, m["bias"][:V]), Options(weight_grad=m[memory].view(V, H).detach())
    batch = TokenBatch(IDS, torch.ones(B), old_logps=m["old"][:n].view(B, T))
    with pytest.raises(ValueError, match=f"weight_grad shares memory with {re.escape(name)}: "):
        if each == "loss":
            linear_grpo_loss(hidden, head, batch, DISTILLATION, reference=other, options=options)
        elif each == "log-probs":
            linear_logprobs(hidden, head, IDS, options=options)
        else:
            linear_divergence(hidden, head, other, options=options)
    assert all(same_bits(x.detach(), before[key]) for key, x in m.items())


def with_memory(kept: str, backend: str, objective: str = "dapo", into: Tensor | None = None) -> Call:
    """A loss from hidden states with memory for the weight's gradient, or without."""
    return Call(Recipe(source="hidden", objective=objective, kept=kept, seed=4), backend=backend, weight_grad=into)


def memory() -> Tensor:
    return torch.zeros(61, 8)


@pytest.mark.parametrize("into", [True, False], ids=["weight_grad", "autograd"])
@pytest.mark.parametrize("kept", ["all", "none"])
def test_hidden_states_that_change_before_the_backward(kept: str, into: bool, backend: str) -> None:
    """The gradient over sets is made of them then, so that it is refused; that over the vocabulary is made before."""
    total = memory()
    expected, call = with_memory(kept, backend).gradients()[1], with_memory(kept, backend, into=total if into else None)
    hidden, weight = call.leaves[0] * 1.0, call.leaves[1]
    loss = call.values(hidden, weight)["loss"]
    with torch.no_grad():
        hidden.zero_()
    if kept == "all":
        with pytest.raises(RuntimeError, match="hidden was written to in place between the forward and the backward"):
            loss.backward()
        assert not total.any() and weight.grad is None
    else:
        loss.backward()
        torch.testing.assert_close(total if into else weight.grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["dapo", "gspo"])
@pytest.mark.parametrize("kept", ["some", "none"])
def test_megatrons_main_grad(kept: str, name: str, backend: str) -> None:
    """The flag is set, and autograd's gradient is a placeholder, of zeros where an embedding shares the weight. Other memory sets
    no flag."""
    expected = with_memory(kept, backend, name).gradients()[1]
    for shared, other in ((False, False), (True, False), (False, True)):
        total = memory()
        call = with_memory(kept, backend, name, total)
        weight: Any = call.leaves[1]
        weight.main_grad, weight.grad_added_to_main_grad = memory() if other else total, False
        weight.zero_out_wgrad = shared
        loss = call.values()["loss"]
        assert not weight.grad_added_to_main_grad
        (loss + weight[3].sum() if shared else loss).backward()
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-7)
        assert weight.grad_added_to_main_grad is not other and (weight.grad is None) == other
        if shared:
            assert torch.equal(weight.grad, memory().index_fill(0, torch.tensor([3]), 1.0))


def test_a_large_gradient_over_many_ids_is_zero_elsewhere(backend: str) -> None:
    """In memory that an earlier gradient has left, which is used again where many rows are to be written."""
    lists = [list(range(i, 140_000, 7 * 20)) for i in range(20)]
    batch = TokenBatch(torch.arange(20), torch.ones(20), kept=TokenSets.from_lists(lists))
    hidden, weight = torch.randn(20, 64), torch.zeros(140_000, 64, requires_grad=True)  # 36 MB
    for _ in range(2):
        linear_grpo_loss(hidden, weight, batch, Objective.preset("dapo"), options=Options(backend=backend)).loss.backward()
        assert weight.grad is not None and weight.grad[:20].any(1).all() and not weight.grad.view(-1, 140, 64)[:, 20:].any()
        weight.grad.fill_(1.0)
        weight.grad = None
