"""`weight_grad=`: memory of the caller's that the gradient of a head's weight is added to, and when it is made."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_kernels import (
    Exact,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    loss_from_model,
)
from grpo_kernels.batch import shift_targets
from support.bits import same_bits
from support.inside import in_chunks
from support.processes import checks_of

Tensor = torch.Tensor
MODULE = "weight_grad_checks"
N, V, H = 12, 61, 24
MIB = 1 << 20


class Case:
    """Leaves, a batch in which half of the rows may have a set, and calls with memory for the weight's gradient or without."""

    def __init__(self, dtype: torch.dtype = torch.float32, kept: bool = False) -> None:
        g = torch.Generator().manual_seed(3)
        self.hidden, self.weight = torch.randn(N, H, generator=g).to(dtype), (torch.randn(V, H, generator=g) / 3).to(dtype)
        self.targets, self.advantages = torch.randint(V, (N,), generator=g), torch.randn(N, generator=g)
        lists = [sorted({int(t), 5, 9}) if i % 2 else [] for i, t in enumerate(self.targets)]
        self.sets = TokenSets.from_lists(lists) if kept else None
        self.second = torch.randn(N, H, generator=g).to(dtype)

    def batch(self, **fields: Any) -> TokenBatch:
        return TokenBatch(self.targets, self.advantages, kept=self.sets, cu_seqlens=torch.tensor([0, 5, N]), **fields)

    def call(self, name: str, hidden: Tensor, weight: Tensor, options: Options) -> Tensor:
        if name == "log-probs":
            return linear_logprobs(hidden, weight, self.targets, kept=self.sets, options=options)[0] @ self.advantages
        if name == "mass of sets":
            found = linear_logprobs(hidden, weight, self.targets, kept=self.sets, also=("log_kept_mass",), options=options)
            return found.also["log_kept_mass"] @ self.advantages
        teachers: Any = [((self.second, weight.detach()), 0.5), ((-self.second, weight.detach()), 0.5)]
        if name == "divergences":
            return linear_divergence(hidden, weight, teachers, options=options).sum()
        if name in ("dapo", "gspo"):
            return linear_grpo_loss(hidden, weight, self.batch(), Objective.preset(name), options=options).loss
        preset = "gspo" if name == "teachers of sequences" else "dapo"
        objective = Objective.preset(preset, beta=0.3, kl=Exact())
        return linear_grpo_loss(hidden, weight, self.batch(), objective, reference=teachers, options=options).loss

    def run(self, name: str, backend: str, **into: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients of hidden states and weight."""
        leaves = [x.clone().requires_grad_() for x in (self.hidden, self.weight)]
        (1.5 * self.call(name, *leaves, Options(backend=backend, **into))).backward()
        assert leaves[0].grad is not None
        return leaves[0].grad, leaves[1].grad


@pytest.mark.parametrize("check", checks_of(MODULE))
def test_on_two_ranks(on_ranks: Callable[..., dict[str, str]], check: str) -> None:
    assert on_ranks(MODULE, 2)[check] == "ok", on_ranks(MODULE, 2)[check]


@pytest.mark.parametrize(
    "name", ["dapo", "gspo", "log-probs", "mass of sets", "divergences", "teachers of sequences", "teachers of sets"]
)
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str
)
def test_a_gradient_is_added_to_what_is_there(
    dtypes: tuple[torch.dtype, torch.dtype], name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows that are apart; parts of several passes are added in fp32, and a 16-bit gradient is rounded once."""
    in_chunks(monkeypatch, 5)
    case = Case(dtypes[0], kept=name in ("mass of sets", "teachers of sets"))
    d_hidden, expected = case.run(name, backend)
    assert expected is not None and expected.dtype == dtypes[0]
    memory = torch.randn(V, H + 8).to(dtypes[1])
    total, start = memory[:, :H], memory.clone()
    again, none = case.run(name, backend, weight_grad=total)
    assert none is None and same_bits(again, d_hidden) and same_bits(memory[:, H:], start[:, H:])
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
    scale = expected.float().abs().max() * rounding[dtypes[0]] + start.float().abs().max() * rounding[dtypes[1]]
    assert ((total.float() - start[:, :H].float()) - expected.float()).abs().max() <= 2 * scale
    exact = torch.zeros(V, H)
    case.run(name, backend, weight_grad=exact)
    torch.testing.assert_close(expected.float(), exact, rtol=2.0**-7, atol=1e-5 * float(exact.abs().max()))


def test_a_second_backward_adds_nothing(backend: str) -> None:
    case, total = Case(kept=True), torch.zeros(V, H)
    leaves = [x.clone().requires_grad_() for x in (case.hidden, case.weight)]
    loss = case.call("dapo", *leaves, Options(backend=backend, weight_grad=total))
    loss.backward(retain_graph=True)
    once = total.clone()
    with pytest.raises(RuntimeError, match="already handed over"):
        loss.backward()
    assert once.any() and same_bits(total, once)


@pytest.mark.parametrize("into", [True, False], ids=["weight_grad", "autograd"])
@pytest.mark.parametrize("kept", [True, False], ids=["sets", "vocabulary"])
def test_hidden_states_that_change_before_the_backward(kept: bool, into: bool, backend: str) -> None:
    """The gradient over sets is made of them then, so that it is refused; that over the vocabulary is made before."""
    case, total = Case(kept=kept), torch.zeros(V, H)
    case.sets = TokenSets.from_lists([[int(t), 5, 9][: 2 if int(t) in (5, 9) else 3] for t in case.targets]) if kept else None
    leaves = [x.clone().requires_grad_() for x in (case.hidden, case.weight)]
    hidden = leaves[0] * 1.0
    given = {"weight_grad": total} if into else {}
    loss = case.call("dapo", hidden, leaves[1], Options(backend=backend, **given))
    with torch.no_grad():
        hidden.zero_()
    if kept:
        with pytest.raises(RuntimeError, match="hidden was written to in place between the forward and the backward"):
            loss.backward()
        assert not total.any() and leaves[1].grad is None
    else:
        loss.backward()
        expected = case.run("dapo", backend)[1]
        assert expected is not None
        found = total if into else leaves[1].grad
        torch.testing.assert_close(1.5 * found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["dapo", "gspo"])
@pytest.mark.parametrize("kept", [True, False], ids=["sets", "vocabulary"])
def test_megatrons_main_grad(kept: bool, name: str, backend: str) -> None:
    """The flag is set, and autograd's gradient is a placeholder, of zeros where an embedding shares the weight. Other memory sets
    no flag."""
    case = Case(kept=kept)
    expected = case.run(name, backend)[1]
    for shared, other in ((False, False), (True, False), (False, True)):
        weight: Any = case.weight.clone().requires_grad_()
        weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.zeros(V, H), False, shared
        total = torch.zeros(V, H) if other else weight.main_grad
        hidden = case.hidden.clone().requires_grad_()
        loss = 1.5 * case.call(name, hidden, weight, Options(backend=backend, weight_grad=total))
        assert not weight.grad_added_to_main_grad
        (loss + weight[3].sum() if shared else loss).backward()
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-7)
        assert weight.grad_added_to_main_grad is not other and (weight.grad is None) == other
        if shared:
            assert torch.equal(weight.grad, torch.zeros(V, H).index_fill(0, torch.tensor([3]), 1.0))


def test_loss_from_model_adds_to_it() -> None:
    models = pytest.importorskip("support.models")
    model, found = models.build("LlamaForCausalLM"), []
    ids = torch.randint(models.VOCAB, (2, 9))
    targets, mask = shift_targets(ids)
    batch, weight = TokenBatch(targets, torch.tensor([1.0, -0.5]), mask=mask), model.lm_head.weight
    total = torch.zeros_like(weight)
    for into in (None, total):
        loss_from_model(model, ids, batch, Objective.preset("dapo"), options=Options(weight_grad=into)).loss.backward()
        found.append((weight.grad, model.model.norm.weight.grad))
        model.zero_grad(set_to_none=True)
    (expected, body), (none, same) = found
    assert none is None
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(same, body)


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


def resident_bytes(x: Tensor) -> int:
    """How much of the memory of x is there, in whole pages."""
    storage = x.untyped_storage()
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), found) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in found)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mincore"), reason="the system does not say which pages are there")
def test_the_pages_of_a_fresh_gradient_over_sets_are_not_touched(backend: str) -> None:
    batch = TokenBatch(torch.tensor([3, 70]), torch.ones(2), kept=TokenSets.from_lists([[3, 200], [70, 8]]))
    hidden, weight = torch.randn(2, 64, requires_grad=True), torch.zeros(400_000, 64, requires_grad=True)  # 102 MB
    linear_grpo_loss(hidden, weight, batch, Objective.preset("dapo"), options=Options(backend=backend)).loss.backward()
    assert weight.grad is not None and weight.grad[[3, 200, 70, 8]].any(1).all()
    assert resident_bytes(weight.grad) < 8 * MIB < weight.grad.nbytes
    assert resident_bytes(torch.ones(400_000, 64)) > 90 * MIB
