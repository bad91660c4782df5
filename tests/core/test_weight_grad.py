"""`weight_grad=`: memory to which the gradient of a head's weight is added, and the time at which it is computed."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import replace
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
from grpo_kernels.vocabulary import backends
from grpo_kernels.vocabulary.weight_gradient import WeightGradient, WeightMemory
from support.allocations import Allocations
from support.cases import OBJECTIVES, same_bits
from support.linear_cases import LinearCase, build_linear, in_chunks, run_linear, run_logprobs
from support.processes import checks_of

Tensor = torch.Tensor
MODULE = "weight_grad_checks"
MIB = 1 << 20


@pytest.mark.parametrize("check", checks_of(MODULE))
def test_on_two_ranks(on_ranks: Callable[..., dict[str, str]], check: str) -> None:
    assert on_ranks(MODULE, 2)[check] == "ok", on_ranks(MODULE, 2)[check]


def upstream(case: LinearCase) -> Tensor:
    return torch.randn(case.tokens.targets.shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("rows", [64, 8], ids=["one chunk", "several chunks"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "whole"])
@pytest.mark.parametrize(
    ("dtype", "total_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str,
)  # fmt: skip
def test_log_probs_add_to_it(
    dtype: torch.dtype, total_dtype: torch.dtype, kept: bool, rows: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory whose rows are apart, too."""
    in_chunks(monkeypatch, rows)
    case = build_linear(dtype, kept=kept)
    sets = {"kept": case.tokens.fields["kept"]} if kept else {}
    *_, expected = run_logprobs(case, upstream(case), None, backend, **sets)
    memory = torch.randn(61, 24 + 8).to(total_dtype)
    total, start = memory[:, :24], memory.clone()
    leaves = case.leaves
    logps, _ = linear_logprobs(
        leaves["hidden"], leaves["weight"], case.tokens.targets,
        bias=leaves["bias"], mask=case.tokens.mask, backend=backend, weight_grad=total, **sets,
    )  # fmt: skip
    assert same_bits(memory, start)
    logps.backward(upstream(case))
    assert leaves["weight"].grad is None and same_bits(memory[:, 24:], start[:, 24:])
    scale = float(expected["weight"].abs().max())
    rounding = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(
        (total - start[:, :24]).float(), expected["weight"].float(), rtol=rounding, atol=rounding * scale
    )
    torch.testing.assert_close(leaves["hidden"].grad, expected["hidden"])


@pytest.mark.parametrize("name", ["gspo", "log-probs"])
def test_where_the_factor_is_known_products_add_straight_into_it(name: str, backend: str) -> None:
    case, total = build_linear(), torch.zeros(61, 24)
    leaves = case.leaves
    if name == "gspo":
        out = linear_grpo_loss(
            leaves["hidden"],
            leaves["weight"],
            case.tokens.batch(),
            Objective.preset("gspo"),
            weight_grad=total,
            backend=backend,
        ).loss
    else:
        out, _ = linear_logprobs(leaves["hidden"], leaves["weight"], case.tokens.targets, weight_grad=total, backend=backend)
    with Allocations() as seen:
        out.sum().backward()
    assert total.any() and (61, 24) not in seen.shapes


@pytest.mark.parametrize("weight_grad", [True, False], ids=["weight_grad", "autograd"])
def test_hidden_states_may_not_change_before_the_backward(weight_grad: bool, backend: str) -> None:
    """The gradient over sets is made of them then. That over the vocabulary is made before."""
    for kept in (True, False):
        case = build_linear(kept=kept)
        leaves, total = case.leaves, torch.zeros(61, 24)
        hidden = leaves["hidden"] * 1.0
        options: dict[str, Any] = {"weight_grad": total} if weight_grad else {}
        loss = linear_grpo_loss(
            hidden,
            leaves["weight"],
            case.tokens.batch(),
            Objective.preset("dapo"),
            bias=leaves["bias"],
            backend=backend,
            **options,
        ).loss
        with torch.no_grad():
            hidden.zero_()
        if kept:
            with pytest.raises(RuntimeError, match="hidden was written to in place between the forward and the backward"):
                loss.backward()
            assert not total.any() and leaves["weight"].grad is None
        else:
            loss.backward()
            found = total if weight_grad else leaves["weight"].grad
            _, expected = run_linear(case, Objective.preset("dapo"), backend)
            torch.testing.assert_close(found, expected["weight"], rtol=1e-5, atol=1e-7)


def test_a_factor_never_multiplies_what_was_there_before() -> None:
    total = torch.ones(3, 2)
    into = WeightMemory(total, None)
    gradient = WeightGradient(backends.load("eager"), total.shape, total.dtype, total, into, total.device, None, None, None)
    with pytest.raises(RuntimeError, match="only after it was added"):
        gradient.made(torch.tensor(2.0))
    assert torch.equal(total, torch.ones(3, 2)) and gradient.made() is None


def test_a_second_backward_adds_nothing(backend: str) -> None:
    case, total = build_linear(kept=True), torch.zeros(61, 24)
    leaves = case.leaves
    loss = linear_grpo_loss(
        leaves["hidden"], leaves["weight"], case.tokens.batch(), Objective.preset("dapo"), backend=backend, weight_grad=total
    ).loss
    loss.backward(retain_graph=True)
    once = total.clone()
    with pytest.raises(RuntimeError, match="already handed over"):
        loss.backward()
    assert once.any() and same_bits(total, once)


def several_passes(case: LinearCase, name: str, leaves: dict[str, Tensor], **options: Any) -> Tensor:
    """A loss whose gradient comes in parts, which nearly cancel where they can."""
    head, batch, sets = (
        (leaves["hidden"], leaves["weight"]),
        case.tokens.batch(ref_logps=None),
        case.tokens.fields.get("kept"),
    )
    seconds = [torch.randn(*leaves["hidden"].shape, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    if name == "log_kept_mass":
        found: Any = linear_logprobs(*head, case.tokens.targets, bias=leaves["bias"], kept=sets, also=(name,), **options)
        return (found[2][name] * upstream(case)).sum()
    if name == "over the vocabulary":
        options["options"] = replace(options["options"], entropy_over="vocabulary", reference_over="vocabulary")
        objective = Objective.preset("dapo", beta=0.1, entropy_coef=0.1)
        return linear_grpo_loss(*head, case.tokens.batch(), objective, bias=leaves["bias"], **options).loss
    teachers: Any = [((x.to(head[0].dtype), head[1].detach()), 0.5) for x in seconds]
    if name == "divergences":
        return linear_divergence(*head, teachers, bias=leaves["bias"], **options).sum()
    objective = Objective.preset("gspo" if name == "teachers of sequences" else "dapo", beta=0.3, kl=Exact())
    return linear_grpo_loss(*head, batch, objective, bias=leaves["bias"], reference=teachers, **options).loss


@pytest.mark.parametrize(
    "name", ["log_kept_mass", "over the vocabulary", "divergences", "teachers of sequences", "teachers of sets"]
)
def test_parts_of_a_gradient_are_added_in_fp32(name: str, backend: str) -> None:
    """And rounded once: the gradient of a bf16 weight is what fp32 memory has, to the last bit or so."""
    case = build_linear(torch.bfloat16, kept=name != "divergences" and name != "teachers of sequences")
    total, found = torch.zeros(61, 24), []
    for memory in (None, total):
        leaves = case.leaves
        several_passes(case, name, leaves, options=Options(backend=backend), weight_grad=memory).backward()
        found.append(leaves)
    weight = found[0]["weight"].grad
    assert weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    torch.testing.assert_close(weight.float(), total, rtol=2**-8, atol=1e-5 * float(total.abs().max()))  # type: ignore[union-attr]
    for leaf in ("hidden", "bias"):
        assert same_bits(found[0][leaf].grad, found[1][leaf].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["dapo", "gspo"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "whole"])
def test_megatrons_main_grad(kept: bool, name: str, backend: str) -> None:
    """The flag is set, and the gradient is a placeholder that nobody looks at: zeros where an embedding shares the weight."""
    case, objective = build_linear(kept=kept), OBJECTIVES[name][0]()
    _, expected = run_linear(case, objective, backend)
    for shared in (False, True):
        leaves = case.leaves
        weight: Any = leaves["weight"]
        weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.zeros(61, 24), False, shared
        out = linear_grpo_loss(
            leaves["hidden"], weight, case.tokens.batch(), objective,
            bias=leaves["bias"], backend=backend, weight_grad=weight.main_grad,
        )  # fmt: skip
        assert not weight.grad_added_to_main_grad
        (out.loss + weight[3].sum() if shared else out.loss).backward()
        assert weight.grad_added_to_main_grad is True and weight.grad.shape == weight.shape
        torch.testing.assert_close(weight.main_grad, expected["weight"], rtol=1e-5, atol=1e-7)
        if shared:
            of_embedding = torch.zeros(61, 24)
            of_embedding[3] = 1.0
            assert torch.equal(weight.grad, of_embedding)


def test_other_memory_sets_no_flag() -> None:
    case, total = build_linear(), torch.zeros(61, 24)
    leaves = case.leaves
    weight: Any = leaves["weight"]
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(61, 24), False
    linear_grpo_loss(leaves["hidden"], weight, case.tokens.batch(), Objective.preset("dapo"), weight_grad=total).loss.backward()
    assert weight.grad is None and weight.grad_added_to_main_grad is False and total.any() and not weight.main_grad.any()


def test_a_weight_that_zero_3_gathers_is_refused() -> None:
    weight: Any = torch.randn(6, 4, requires_grad=True)
    weight.ds_id = 3
    for call in (
        lambda: linear_logprobs(torch.randn(2, 4), weight, torch.tensor([1, 2]), weight_grad=torch.zeros(6, 4)),
        lambda: linear_grpo_loss(
            torch.randn(2, 4), weight, TokenBatch(torch.tensor([1, 2]), torch.ones(2)), Objective.preset("dapo"),
            weight_grad=torch.zeros(6, 4),
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="ZeRO-3 gathers this weight for a moment"):
            call()


def test_loss_from_model_adds_to_it() -> None:
    models = pytest.importorskip("support.models")
    model = models.build("LlamaForCausalLM")
    ids = torch.randint(models.VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    targets, mask = shift_targets(ids)
    batch, weight = TokenBatch(targets, torch.tensor([1.0, -0.5]), mask=mask), model.lm_head.weight
    loss_from_model(model, ids, batch, Objective.preset("dapo")).loss.backward()
    expected, total, body = weight.grad, torch.zeros_like(weight), model.model.norm.weight.grad
    model.zero_grad(set_to_none=True)
    loss_from_model(model, ids, batch, Objective.preset("dapo"), weight_grad=total).loss.backward()
    assert weight.grad is None
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(model.model.norm.weight.grad, body)


# ---- nothing of the size of the weight


def sets_of_few_ids() -> tuple[TokenBatch, list[int]]:
    lists = [[3, 200], [70], [5, 299, 9], [200, 8]]
    batch = TokenBatch(torch.tensor([3, 70, 9, 8]), torch.tensor([1.0, 2.0, -1.0, 0.5]), kept=TokenSets.from_lists(lists))
    return batch, [3, 5, 8, 9, 200, 299]  # an only id has log-prob 0, and no gradient


@pytest.mark.parametrize("name", ["dapo", "gspo", "log-probs"])
def test_a_step_over_sets_touches_only_the_rows_of_their_ids(name: str, backend: str) -> None:
    batch, ids = sets_of_few_ids()
    hidden, weight = torch.randn(4, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    total = torch.full((300, 16), torch.nan)
    total[ids] = 0.0
    with Allocations() as seen:
        if name == "log-probs":
            out, _ = linear_logprobs(hidden, weight, batch.targets, kept=batch.kept, weight_grad=total, backend=backend)
        else:
            whole = TokenBatch(batch.targets[None], batch.advantages[None], kept=batch.kept)
            out = linear_grpo_loss(hidden[None], weight, whole, Objective.preset(name), weight_grad=total, backend=backend).loss
        out.sum().backward()
    large = [shape for shape in seen.shapes if 300 in shape]
    assert not large and weight.grad is None and hidden.grad is not None and hidden.grad.any()
    others = torch.ones(300, dtype=torch.bool).index_fill(0, torch.tensor(ids), False)
    assert total[others].isnan().all() and total[ids].isfinite().all() and total[ids].any(1).all()


def resident_bytes(x: Tensor) -> int:
    """How much of the memory of x is there, in whole pages."""
    storage = x.untyped_storage()
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), found) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in found)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mincore"), reason="the system does not say which pages are there")
def test_the_pages_of_a_fresh_gradient_are_not_touched(backend: str) -> None:
    batch, ids = sets_of_few_ids()
    hidden, weight = torch.randn(4, 64, requires_grad=True), torch.zeros(400_000, 64, requires_grad=True)  # 102 MB
    linear_grpo_loss(hidden, weight, batch, Objective.preset("dapo"), backend=backend).loss.backward()
    assert weight.grad is not None and weight.grad[ids].any(1).all()
    assert resident_bytes(weight.grad) < 8 * MIB < weight.grad.nbytes
    assert resident_bytes(torch.ones(400_000, 64)) > 90 * MIB
