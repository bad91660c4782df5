"""Memory that a call writes while it reads other tensors: logits with `inplace=`, and `weight_grad=`."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from dataclasses import replace
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
from grpo_kernels.layout import overlap
from support.cases import same_bits

Tensor = torch.Tensor

B, T, V, H = 3, 5, 40, 6
IDS = torch.arange(B * T).view(B, T) % V
DISTILLATION = Objective.preset("grpo", beta=0.5, kl=Exact("reverse"))


# ---- what shares memory


def elements(x: Tensor) -> set[int]:
    """The addresses of all bytes of all elements."""
    at = torch.tensor([x.data_ptr()])
    for size, stride in zip(x.shape, x.stride(), strict=True):
        at = (at[:, None] + x.element_size() * stride * torch.arange(size)).reshape(-1)
    return {byte for first in at.tolist() for byte in range(first, first + x.element_size())}


def view_of(memory: Tensor, draw: random.Random) -> Tensor:
    memory = draw.choice([memory, memory.view(torch.int16), memory.view(torch.uint8)])
    shape = [draw.choice([0, 1, 2, 2, 3, 4, 5]) for _ in range(draw.choice([1, 2, 2, 3]))]
    strides = [draw.choice([0, 1, 1, 2, 3, 4, 6, 8, 12, 24]) for _ in shape]
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    return memory.as_strided(shape, strides, draw.randrange(min(24, memory.numel() - extent)))


def test_overlap_is_exact() -> None:
    """Against the sets of bytes: strided, interleaved and expanded views of two dtypes and more."""
    draw, memory, found = random.Random(0), torch.zeros(400), {True: 0, False: 0}
    for _ in range(3000):
        x, y = view_of(memory, draw), view_of(memory, draw)
        answer = overlap(x, y)
        assert answer == bool(elements(x) & elements(y)), (
            x.shape,
            x.stride(),
            x.storage_offset(),
            y.shape,
            y.stride(),
            y.dtype,
        )
        found[answer] += 1
    assert min(found.values()) > 300, found


def test_views_that_are_often_taken() -> None:
    z = torch.zeros(64, 100, 130)
    for x, y, shared in (
        (z[..., :128], z[..., 128:], False),  # logits beside padding, or beside a value head
        (z[:, :-1], z[:, 1:], True),
        (z[::2], z[1::2], False),
        (z[:, ::2], z[:, 1::2], False),
        (z[:32], z[32:], False),
        (z[..., ::2], z[..., 1::2], False),
        (z.transpose(0, 1), z[3, 4:5], True),
        (z, z.clone(), False),
        (z, torch.empty(0), False),
        (z.to("meta"), z.to("meta"), False),
    ):
        assert overlap(x, y) == overlap(y, x) == shared, (x.shape, y.shape)


# ---- a second stream in the memory of the policy's logits


def gradients(divergence: str, dtype: torch.dtype, how: str, backend: str, own: bool) -> Tensor:
    """In place beside a teacher that is the same tensor under another transform, or a copy of it (`own`)."""
    leaf = torch.randn(B, T, V, generator=torch.Generator().manual_seed(3)).mul(2).to(dtype).requires_grad_()
    logits = leaf * 1.0
    teacher = (logits.detach().clone() if own else logits.detach(), LogitTransform(2.0))
    exact, options = Exact(divergence), {"inplace": True, "options": Options(backend=backend)}
    if how == "divergence":
        token_divergence(logits, teacher, exact, **options).sum().backward()
    else:
        kept = TokenSets.from_lists([[k, k + 3, 39] if k % 2 else [] for k in range(B * T)]) if how == "kept" else None
        batch = TokenBatch(IDS, torch.tensor([1.0, -0.5, 2.0]), kept=kept)
        objective = replace(Objective.preset("gspo" if how == "gspo" else "grpo"), beta=0.5, kl=exact)
        teachers = [(teacher, 0.3), (teacher, 0.7)] if how == "several" else teacher
        grpo_loss(logits, batch, objective, ref_logits=teachers, **options).loss.backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("how", ["one visit", "gspo", "kept", "several", "divergence"])
@pytest.mark.parametrize("divergence", ["reverse", "forward", "jsd"])
def test_the_same_element_may_be_read_where_it_is_written(divergence: str, how: str, backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        shared, own = (gradients(divergence, dtype, how, backend, x) for x in (False, True))
        assert own.any() and same_bits(shared, own), (shared - own).abs().max()


# ---- refusals

#: What a call in place would overwrite, as the arguments of a call on logits in `x` [B, T, V + 8] fp32.
IN_PLACE: dict[str, tuple[str, Callable[[Tensor], Callable[[], Any]]]] = {
    "shifted rows of a teacher": ("ref_logits", lambda x: functools.partial(loss, x[:, 1:, :V], x[:, :-1, :V])),
    "shifted columns of a teacher": (
        "ref_logits[0]",
        lambda x: functools.partial(loss, x[..., :V], (x[..., 8:], LogitTransform(2.0))),
    ),
    "a teacher of another dtype": (
        "ref_logits",
        lambda x: functools.partial(loss, x.view(torch.bfloat16)[..., :V], x.view(torch.bfloat16)[..., V // 2 : V // 2 + V]),
    ),
    "the second teacher": (
        "ref_logits[1][0]",
        lambda x: functools.partial(loss, x[:, 1:, :V], [(x[:, 1:, :V].clone(), 1.0), (x[:, :-1, :V], 1.0)]),
    ),
    "a teacher's weights": (
        "ref_logits[0][1]",
        lambda x: functools.partial(loss, x[..., :V], [(torch.zeros(B, T, V), x[..., 3].square_())]),
    ),
    "advantages": (
        "batch.advantages",
        lambda x: functools.partial(loss, x[..., :V], torch.zeros(B, T, V), advantages=x[..., 0]),
    ),
    "old log-probs": (
        "batch.old_logps",
        lambda x: functools.partial(loss, x[..., :V], torch.zeros(B, T, V), old_logps=x[..., V - 1]),
    ),
    "a temperature": (
        "transform.temperature",
        lambda x: functools.partial(loss, x[..., :V], torch.zeros(B, T, V), transform=LogitTransform(x[..., 0].fill_(2.0))),
    ),
    "a normalizer": (
        "normalizer",
        lambda x: functools.partial(loss, x[..., :V], torch.zeros(B, T, V), normalizer=x[0, 0, 0].fill_(2.0)),
    ),
    "of a divergence": ("ref_logits", lambda x: functools.partial(token_divergence, x[:, 1:, :V], x[:, :-1, :V], inplace=True)),
    "a mask": (
        "mask",
        lambda x: functools.partial(token_logprobs, x[..., :V], IDS, mask=x.view(torch.bool)[..., 0].fill_(True), inplace=True),
    ),
    "targets": (
        "targets",
        lambda x: functools.partial(token_logprobs, x[..., :V], x.view(torch.int64)[..., 0].zero_(), inplace=True),
    ),
}


def loss(logits: Tensor, teacher: Any, transform: LogitTransform | None = None, normalizer: Any = None, **fields: Any) -> Any:
    fields = {"advantages": torch.ones(B), **fields}
    batch = TokenBatch(IDS[:, : logits.shape[1]], **fields)
    given = {"transform": transform, "normalizer": normalizer, "inplace": True}
    return grpo_loss(logits, batch, DISTILLATION, ref_logits=teacher, **given)


@pytest.mark.parametrize("what", IN_PLACE)
def test_in_place_over_what_is_read_is_refused(what: str) -> None:
    name, call_on = IN_PLACE[what]
    memory = torch.rand(B, T, V + 8)
    call = call_on(memory)
    before = memory.clone()
    with pytest.raises(ValueError, match=f"inplace=True, but logits shares memory with {re.escape(name)}: "):
        call()
    assert same_bits(memory, before)


def test_columns_beside_the_logits_are_free() -> None:
    """As those of a head with one more output, which are never written."""
    x = torch.rand(B, T, V + 8)
    teacher = torch.randn(B, T, V)
    want = loss(x[..., :V].clone(), teacher, old_logps=x[..., V].clone().neg_(), advantages=x[..., V + 1].clone()).loss
    beside = x[..., V].neg_()
    assert torch.equal(loss(x[..., :V], teacher, old_logps=beside, advantages=x[..., V + 1]).loss, want)


#: For each call what it reads: the memory, and the name in the message.
WEIGHT_GRAD: list[tuple[str, str, str]] = [
    *(
        (call, memory, name)
        for call in ("loss", "log-probs", "divergence")
        for memory, name in (("hidden", "hidden"), ("weight", "weight"), ("bias", "bias"))
    ),
    ("loss", "other weight", "reference[1].weight"),
    ("divergence", "other weight", "reference[1].weight"),
    ("divergence", "other hidden", "reference[0]"),
    ("loss", "old", "batch.old_logps"),
]


@pytest.mark.parametrize("call, memory, name", WEIGHT_GRAD)
def test_a_gradient_is_not_added_to_what_is_read(call: str, memory: str, name: str) -> None:
    m = {key: torch.randn(V * H) for key in ("hidden", "weight", "bias", "other hidden", "other weight", "old")}
    before = {key: x.clone() for key, x in m.items()}
    n = B * T
    hidden, other_hidden = (m[key][: n * H].view(B, T, H) for key in ("hidden", "other hidden"))
    weight, other = m["weight"].view(V, H).requires_grad_(), (other_hidden, Head(m["other weight"].view(V, H)))
    head = Head(weight, m["bias"][:V], grad=m[memory].view(V, H).detach())
    batch = TokenBatch(IDS, torch.ones(B), old_logps=m["old"][:n].view(B, T))
    with pytest.raises(ValueError, match=f"weight_grad shares memory with {re.escape(name)}: "):
        if call == "loss":
            linear_grpo_loss(hidden, head, batch, DISTILLATION, reference=other)
        elif call == "log-probs":
            linear_logprobs(hidden, head, IDS)
        else:
            linear_divergence(hidden, head, other)
    assert all(same_bits(x.detach(), before[key]) for key, x in m.items())


def test_rows_of_a_gradient_may_not_share_memory() -> None:
    weight = torch.randn(V, H, requires_grad=True)
    for total in (torch.zeros(1, H).expand(V, H), torch.zeros(V + H).as_strided((V, H), (1, 1))):
        with pytest.raises(ValueError, match=r"weight_grad .* no two rows in one memory"):
            linear_logprobs(torch.randn(2, H), weight, IDS[0, :2], weight_grad=total)


def test_a_gradient_beside_the_weight_in_one_buffer(backend: str) -> None:
    """As allocators that hold parameters and gradients in one block have them."""
    block = torch.randn(2, V, H)
    weight, total = block[0].requires_grad_(), block[1].detach()
    hidden, expected = torch.randn(B * T, H), total.clone()
    logps, _ = linear_logprobs(hidden, weight, IDS.view(-1), backend=backend)
    (gradient,) = torch.autograd.grad(logps.sum(), weight)
    linear_logprobs(hidden, weight, IDS.view(-1), weight_grad=total, backend=backend)[0].sum().backward()
    torch.testing.assert_close(total, expected + gradient)
