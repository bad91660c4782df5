"""The pass over chunks of rows (core/linear.py): rows in another order than that of the batch, rows
that hold anything, tensors that change before the backward, and heads that lie in the same memory.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    Exact,
    Head,
    LogitTransform,
    Objective,
    Options,
    TokenBatch,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    token_divergence,
)
from grpo_kernels.core import matmuls
from grpo_kernels.core.autograd import check_weight_is_present
from grpo_kernels.core.backends import cpu_matmuls
from grpo_kernels.core.linear import RowOrder
from grpo_kernels.core.pair_logits import add_pairs
from grpo_kernels.core.sources import RowSource
from grpo_kernels.formulas.filters import Filter
from grpo_kernels.formulas.surrogates import Cispo
from grpo_kernels.inputs import LinearInput, LogitsInput, RowLayout
from support.inside import in_chunks, our_products

B, T, H, V = 4, 5, 8, 30
#: Tokens of the second and of the last sequence have no gradient.
ADVANTAGES = torch.tensor([0.9, 0.0, -1.2, 0.0])


def make_head(**changes: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(B, T, H, generator=generator).requires_grad_()
    weight = torch.randn(V, H, generator=generator).requires_grad_(changes.get("trained", True))
    return hidden, weight


def make_targets() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(4))


def assert_close(x: Tensor | None, y: Tensor | None) -> None:
    assert x is not None and y is not None and y.any()
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


# ---- the order of rows


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("name", ["reinforce", "gspo", "distillation"])
def test_rows_with_a_gradient_are_processed_first(name, has_mask, backend, monkeypatch):
    """In chunks, with a temperature for each token, the results are those of the logits."""
    in_chunks(monkeypatch, 6)
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(5)) > 0.3 if has_mask else None
    batch = TokenBatch(make_targets(), ADVANTAGES, mask=mask)
    transform = LogitTransform(torch.linspace(0.5, 1.5, B * T).view(B, T))
    objective = Objective.preset(name)
    generator = torch.Generator().manual_seed(6)
    ref_hidden = torch.randn(B, T, H, generator=generator)
    hidden, weight = make_head()
    other_hidden, other_weight = make_head()
    reference = ref_logits = None
    if name == "distillation":
        objective = replace(objective, kl=Exact("reverse"))
        reference = (ref_hidden, weight.detach())
        ref_logits = ref_hidden @ weight.detach().t()

    options = Options(backend)
    found = linear_grpo_loss(
        hidden, weight, batch, objective, transform=transform, reference=reference, options=options
    )
    logits = other_hidden @ other_weight.t()
    expected = grpo_loss(
        logits, batch, objective, transform=transform, ref_logits=ref_logits, options=options
    )
    (found.loss + expected.loss).backward()
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-4, atol=1e-6)
    assert_close(found.logps, expected.logps)
    assert_close(found.entropy, expected.entropy)
    assert_close(hidden.grad, other_hidden.grad)
    assert_close(weight.grad, other_weight.grad)


@pytest.mark.parametrize("has_mask", [False, True])
def test_tokens_without_a_gradient_count_in_their_sequence(has_mask, backend, monkeypatch):
    """A ratio per sequence, without a gradient, of tokens some of which have no advantage."""
    in_chunks(monkeypatch, 6)
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(B, T, generator=generator) > 0.2 if has_mask else None
    advantages = torch.randn(B, T, generator=generator)
    advantages[:, ::2] = 0.0
    old_logps = -4.0 + torch.randn(B, T, generator=generator)
    batch = TokenBatch(make_targets(), advantages, mask=mask, old_logps=old_logps)
    objective = Objective(Cispo(50.0), level="sequence")
    options = Options(backend)
    hidden, weight = make_head()
    other_hidden, other_weight = make_head()
    found = linear_grpo_loss(hidden, weight, batch, objective, options=options)
    logits = other_hidden @ other_weight.t()
    expected = grpo_loss(logits, batch, objective, options=options)
    (found.loss + expected.loss).backward()
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-4, atol=1e-6)
    assert_close(found.logps, expected.logps)
    assert_close(hidden.grad, other_hidden.grad)
    assert_close(weight.grad, other_weight.grad)


@pytest.mark.parametrize("of_logits", [False, True])
def test_tokens_that_cannot_contribute_are_skipped_if_that_is_asked_for(of_logits, backend):
    """Their log-probs are 0. Loss and gradient are the same."""
    batch = TokenBatch(make_targets(), ADVANTAGES)
    objective = Objective.preset("reinforce")
    results = []
    for skips in (False, True):
        hidden, weight = make_head()
        options = Options(backend, skip_inactive=skips)
        if of_logits:
            out = grpo_loss(hidden @ weight.t(), batch, objective, options=options)
        else:
            out = linear_grpo_loss(hidden, weight, batch, objective, options=options)
        out.loss.backward()
        is_skipped = (out.logps == 0).all(1)
        assert is_skipped.tolist() == ([False, True] * 2 if skips else [False] * 4)
        results.append((out.loss.detach(), hidden.grad, weight.grad))
    for x, y in zip(*results, strict=True):
        assert_close(x, y)


@pytest.mark.parametrize("of_logits", [False, True])
def test_a_skipped_token_may_hold_nan(of_logits, backend):
    """Nothing of a token that cannot contribute is read."""
    objective = Objective.preset("dapo")
    options = Options(backend, skip_inactive=True)
    hidden, weight = make_head()
    losses = []
    for unread in (-2.0, torch.nan):
        old_logps = torch.where(ADVANTAGES == 0, unread, -2.0)[:, None].expand(B, T)
        batch = TokenBatch(make_targets(), ADVANTAGES, old_logps=old_logps)
        if of_logits:
            out = grpo_loss(hidden @ weight.t(), batch, objective, options=options)
        else:
            out = linear_grpo_loss(hidden, weight, batch, objective, options=options)
        losses.append(out.loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["reinforce", "gspo"])
def test_the_backward_on_a_gpu_leaves_out_rows_without_a_gradient(name, backend, monkeypatch):
    """There the host does not read which upstream gradients are 0, but knows the tokens of
    advantage 0 from the forward."""
    batch = TokenBatch(make_targets(), ADVANTAGES)
    assert (ADVANTAGES == 0).any()
    objective = Objective.preset(name)
    gradients = []
    for is_on_host in (True, False):
        hidden, weight = make_head()
        monkeypatch.setattr(RowOrder, "is_on_host", is_on_host)
        options = Options(backend, grad_in_backward=True)
        linear_grpo_loss(hidden, weight, batch, objective, options=options).loss.backward()
        gradients.append((hidden.grad, weight.grad))
    for x, y in zip(*gradients, strict=True):
        assert_close(x, y)


@pytest.mark.parametrize("name", ["reinforce", "gspo"])
def test_a_trained_bias_gets_the_gradient_of_its_logits(name, backend, monkeypatch):
    in_chunks(monkeypatch, 10)
    batch = TokenBatch(make_targets(), ADVANTAGES)
    options = Options(backend)
    gradients = []
    for of_logits in (False, True):
        hidden, weight = make_head()
        bias = torch.linspace(-1.0, 1.0, V).requires_grad_()
        objective = Objective.preset(name)
        if of_logits:
            logits = hidden @ weight.t() + bias
            loss = grpo_loss(logits, batch, objective, options=options).loss
        else:
            head = Head(weight, bias)
            loss = linear_grpo_loss(hidden, head, batch, objective, options=options).loss
        loss.backward()
        gradients.append((hidden.grad, weight.grad, bias.grad))
    for x, y in zip(*gradients, strict=True):
        assert_close(x, y)


def test_a_frozen_head_gives_the_gradient_of_a_trained_one(backend):
    """Whatever arrives at the log-probs: the forward has computed it for 1."""
    upstream = torch.randn(B, T, generator=torch.Generator().manual_seed(8))
    gradients = []
    for trained in (False, True):
        hidden, weight = make_head(trained=trained)
        logps, _ = linear_logprobs(hidden, weight, make_targets(), options=Options(backend))
        logps.backward(upstream)
        gradients.append(hidden.grad)
    assert_close(*gradients)


def test_the_gradient_of_a_frozen_head_is_rounded_once(backend, monkeypatch):
    """Not before it is multiplied by what arrives at the log-probs."""
    monkeypatch.setattr(cpu_matmuls, "unavailable_reason", lambda: "switched off")  # bf16 operands
    upstream = torch.randn(B, T, generator=torch.Generator().manual_seed(8))
    hidden, weight = (x.detach().bfloat16() for x in make_head())
    exact = hidden.double().requires_grad_()
    log_probs = (exact @ weight.double().t()).log_softmax(-1)
    log_probs.gather(-1, make_targets()[..., None])[..., 0].backward(upstream.double())
    logps, _ = linear_logprobs(
        hidden.requires_grad_(), weight, make_targets(), options=Options(backend)
    )
    logps.backward(upstream)
    assert hidden.grad is not None and exact.grad is not None
    # bf16 has 8 significant bits. The absolute part is the fp32 rounding of sums of V terms.
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=2.0**-8, atol=V * 2.0**-23)


def test_a_16_bit_head_is_converted_in_slices(monkeypatch):
    """7 ids at a time, and 5 at last, in memory that the next slice overwrites."""
    vocab, width = 40, 16
    monkeypatch.setattr(matmuls, "WEIGHT_SLICE_BYTES", 4 * width * 7)
    weight = torch.randn(vocab, width).bfloat16()
    bias = torch.randn(vocab)
    hidden = torch.randn(3, width)
    grad_logits = torch.randn(3, vocab)
    head = matmuls.HeadMatmuls(weight, bias)
    torch.testing.assert_close(head.logits(hidden), hidden @ weight.float().t() + bias)
    torch.testing.assert_close(head.grad_hidden(grad_logits), grad_logits @ weight.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_rounds_nothing_where_no_matmul_is_faster_in_16_bits(dtype, monkeypatch):
    """The matmuls of torch are those of another operator under autocast."""
    monkeypatch.setattr(cpu_matmuls, "unavailable_reason", lambda: "switched off")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    hidden, weight = (x.detach() for x in make_head())
    expected, _ = linear_logprobs(hidden, weight, make_targets())
    with torch.autocast("cpu", dtype):
        found, _ = linear_logprobs(hidden, weight, make_targets())
    assert torch.equal(found, expected)


# ---- rows that hold anything


class AllButTheFirst(Filter):
    """A filter whose decision depends on a token's own sequence at most."""

    is_per_sequence = True

    def keep(self, logps, *_):
        return torch.arange(len(logps)) > 0


def test_a_dropped_token_of_a_sequence_may_hold_anything(backend):
    """Its factor is 0, in the gradient of the weight too."""
    objective = Objective.preset("reinforce", filters=(AllButTheFirst(),))
    batch = TokenBatch(make_targets(), ADVANTAGES)
    gradients = []
    for value in (0.0, torch.inf):
        hidden, weight = make_head()
        with torch.no_grad():
            hidden[0, 0] = value
        linear_grpo_loss(hidden, weight, batch, objective, options=Options(backend)).loss.backward()
        gradients.append((hidden.grad, weight.grad))
    for x, y in zip(*gradients, strict=True):
        assert x is not None and x.any() and torch.equal(x, y)


@pytest.mark.parametrize("trained", [False, True])
def test_what_arrives_at_masked_rows_is_not_used(trained, backend):
    hidden, weight = make_head(trained=trained)
    mask = torch.arange(T) < torch.tensor([[5], [2], [0], [3]])
    logps, _ = linear_logprobs(hidden, weight, make_targets(), mask=mask, options=Options(backend))
    logps.backward(torch.where(mask, 1.0, torch.nan))
    assert hidden.grad is not None and hidden.grad[mask].all()
    assert (hidden.grad[~mask] == 0).all()
    assert not trained or (weight.grad is not None and weight.grad.isfinite().all())


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("objective", [None, "reinforce", "gspo"])
def test_a_log_prob_of_nan_has_a_gradient_of_nan(objective, trained, backend):
    """If a gradient arrives at it; at token level in this row alone, at sequence level in its
    sequence.
    """
    hidden, weight = make_head(trained=trained)
    with torch.no_grad():
        hidden[0, 1] = torch.nan
        hidden[1, 1] = torch.nan  # no advantage
    options = Options(backend)
    if objective is None:
        logps, _ = linear_logprobs(hidden, weight, make_targets(), options=options)
        logps.backward(ADVANTAGES[:, None].expand(B, T))
    else:
        batch = TokenBatch(make_targets(), ADVANTAGES)
        linear_grpo_loss(
            hidden, weight, batch, Objective.preset(objective), options=options
        ).loss.backward()
    assert hidden.grad is not None
    is_nan = hidden.grad.isnan()
    if objective == "gspo":
        assert is_nan[0].all() and not is_nan[2:].any()
    else:
        assert is_nan[0, 1].all() and is_nan.sum() == H


@pytest.mark.parametrize("trained", [False, True])
def test_nothing_arrives_at_hidden_states_of_rows_without_an_upstream_gradient(trained, backend):
    """Whatever the head holds: an id that is ruled out by a weight of -inf."""
    hidden, weight = make_head(trained=trained)
    with torch.no_grad():
        hidden.abs_()
        weight[5] = -torch.inf
    targets = make_targets() % 5
    logps, _ = linear_logprobs(hidden, weight, targets, options=Options(backend))
    logps.backward(ADVANTAGES[:, None].expand(B, T))
    assert logps.isfinite().all() and hidden.grad is not None
    assert (hidden.grad[ADVANTAGES == 0] == 0).all() and hidden.grad[ADVANTAGES != 0].isnan().all()


# ---- tensors that the backward reads again


@pytest.mark.parametrize("written", ["targets", "mask", "reference hidden", "reference weight"])
def test_a_tensor_that_changes_before_the_backward_is_refused(written, backend):
    hidden, weight = make_head()
    read_again = {
        "targets": make_targets(),
        "mask": torch.ones(B, T, dtype=torch.bool),
        "reference hidden": torch.randn(B, T, H),
        "reference weight": torch.randn(V, H),
    }
    options = Options(backend)
    if written.startswith("reference"):
        reference = (read_again["reference hidden"], read_again["reference weight"])
        value = linear_divergence(hidden, weight, reference, options=options)
    else:
        value, _ = linear_logprobs(
            hidden,
            weight,
            read_again["targets"],
            mask=read_again["mask"],
            options=options,
        )
    read_again[written].zero_()
    with pytest.raises(RuntimeError, match="was written to between forward and backward"):
        value.sum().backward()


@pytest.mark.parametrize("is_freed", [False, True])
def test_a_weight_whose_memory_was_freed_is_gone(is_freed):
    """FSDP keeps the shape. Without this check the matmuls would read freed memory."""
    weight = torch.zeros(V, H)
    if is_freed:
        weight.untyped_storage().resize_(0)
    refusal = pytest.raises(RuntimeError, match="weight is gone before the backward")
    with refusal if is_freed else nullcontext():
        check_weight_is_present(weight, None)


# ---- heads in the same memory


def test_a_reference_has_its_own_transform(backend):
    hidden, weight = (x.detach() for x in make_head())
    logits = hidden @ weight.t()
    other = torch.randn(B, T, V)
    transform = LogitTransform(2.0)
    options = Options(backend)
    found = token_divergence(
        logits, (other, LogitTransform(0.5)), transform=transform, options=options
    )
    expected = token_divergence(logits / 2.0, other / 0.5, options=options)
    assert_close(found, expected)
    without = token_divergence(logits, (other, None), transform=transform, options=options)
    assert_close(without, token_divergence(logits / 2.0, other, options=options))


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "batch.advantages"])
def test_memory_for_a_gradient_is_nothing_that_is_read(name, backend):
    memory = torch.randn(V, H)
    arguments = {
        "hidden": torch.randn(B, T, H),
        "weight": torch.randn(V, H),
        "bias": torch.randn(V),
        "batch.advantages": torch.randn(B, T),
    }
    shape = arguments[name].shape
    arguments[name] = memory.view(-1)[: shape.numel()].view(shape)
    weight = arguments["weight"].requires_grad_()
    batch = TokenBatch(make_targets(), arguments["batch.advantages"])
    head = Head(weight, arguments["bias"])
    options = Options(backend, weight_grad=memory)
    objective = Objective.preset("reinforce")
    with pytest.raises(ValueError, match=f"weight_grad shares memory with {name}"):
        linear_grpo_loss(arguments["hidden"], head, batch, objective, options=options)


def test_a_reference_has_its_own_bias(backend):
    hidden, weight = make_head()
    bias = torch.randn(V)
    reference = (0.5 * hidden.detach(), weight.detach(), bias)
    options = Options(backend)
    found = linear_divergence(hidden, weight, reference, options=options)
    head = Head(reference[1], bias)
    expected = linear_divergence(hidden, weight, (reference[0], head), options=options)
    without = linear_divergence(hidden, weight, reference[:2], options=options)
    assert torch.equal(found, expected) and not torch.equal(found, without)


def test_rows_of_a_reference_at_another_distance_are_another_head(backend):
    """Two heads may begin at the same address and have the same shape."""
    memory = torch.randn(2 * V, H)
    first = memory[:V]
    second = memory.view(V, 2 * H)[:, :H]
    hidden, _ = make_head()
    options = Options(backend)
    found = linear_divergence(hidden, first, (hidden.detach(), second), options=options)
    expected = linear_divergence(
        hidden, first, (hidden.detach(), Head(second.clone())), options=options
    )
    assert first.data_ptr() == second.data_ptr() and first.shape == second.shape
    assert_close(found.detach(), expected.detach())


needs_bf16_matmuls = pytest.mark.skipif(
    not our_products(torch.bfloat16), reason="no matmul of this processor takes bf16 operands"
)


@needs_bf16_matmuls
def test_a_reference_in_another_dtype_has_its_own_matmuls(backend):
    """The policy's round the shared fp32 weight to bf16."""
    hidden, weight = (x.detach() for x in make_head())
    options = Options(backend)
    found, expected = (
        linear_divergence(hidden.bfloat16(), weight, (0.5 * hidden, other), options=options)
        for other in (weight, weight.clone())
    )
    assert_close(found, expected)


@needs_bf16_matmuls
def test_matmuls_have_the_dtype_of_autocast(backend):
    hidden, weight = (x.detach() for x in make_head())
    arguments = {"targets": make_targets(), "options": Options(backend)}
    in_fp32, _ = linear_logprobs(hidden, weight, **arguments)
    expected, _ = linear_logprobs(hidden.bfloat16(), weight, **arguments)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = linear_logprobs(hidden, weight, **arguments)
    assert torch.equal(found, expected) and not torch.equal(found, in_fp32)


@pytest.mark.parametrize("is_loss", [False, True])
def test_memory_of_16_bits_is_rounded_once(is_loss, backend):
    """The gradient of the weight is fp32 until it has been added."""
    batch = TokenBatch(make_targets(), ADVANTAGES)
    objective = Objective.preset("reinforce")

    def add_gradient(total: Tensor) -> Tensor:
        hidden, weight = (x.detach().bfloat16().requires_grad_() for x in make_head())
        options = Options(backend, weight_grad=total)
        if is_loss:
            value = linear_grpo_loss(hidden, weight, batch, objective, options=options).loss
        else:
            value = linear_logprobs(hidden, weight, batch.targets, options=options).logps.sum()
        value.backward()
        return total

    gradient = add_gradient(torch.zeros(V, H))
    total = torch.randn(V, H).bfloat16()
    expected = (total.float() + gradient).bfloat16()
    assert torch.equal(add_gradient(total), expected)


def test_the_gradient_of_a_bias_is_a_sum_of_fp32(backend):
    """Also of hidden states in bf16, whose matmuls take a gradient of logits that is rounded."""
    hidden, weight = (x.detach().bfloat16() for x in make_head())
    bias = torch.zeros(V, requires_grad=True)
    targets = make_targets()
    batch = TokenBatch(targets, torch.ones(B))
    head = Head(weight, bias)
    objective = Objective.preset("reinforce")
    linear_grpo_loss(hidden, head, batch, objective, options=Options(backend)).loss.backward()
    probs = (hidden.double() @ weight.double().t()).softmax(-1)
    expected = (probs - torch.nn.functional.one_hot(targets, V)).mean((0, 1))
    assert bias.grad is not None
    # The fp32 rounding of B * T terms and of their softmax, whose logits are below 2^4.
    torch.testing.assert_close(bias.grad.double(), expected, rtol=0, atol=B * T * 2.0**-24)


# ---- single logits


@pytest.mark.parametrize("is_projected", [False, True])
def test_an_id_outside_of_the_vocabulary_has_no_logit(is_projected):
    hidden, weight = make_head()
    transform = LogitTransform(0.5)
    layout = RowLayout(torch.Size([B, T]), hidden.device)
    source: RowSource
    if is_projected:
        source = LinearInput(hidden, weight).make_source(layout, transform, Options())
    else:
        source = LogitsInput(hidden @ weight.t()).make_source(layout, transform, Options())
    row_ids = torch.tensor([0, 2, 7, 7])
    logits = source.logits_at(row_ids, torch.tensor([0, -1, V, 3]))
    expected = (hidden @ weight.t()).view(B * T, V)[[0, 7], [0, 3]] / 0.5
    assert_close(logits[[0, 3]].detach(), expected.detach())
    assert (logits[1:3] == -torch.inf).all()
    logits.backward(torch.ones(4))
    assert hidden.grad is not None
    assert hidden.grad.view(B * T, H).any(1).nonzero().flatten().tolist() == [0, 7]


def test_a_pair_of_no_column_gets_no_gradient():
    """Such as a pair whose id is on another rank of a sharded vocabulary."""
    out = torch.zeros(1, 2, 3)
    row_ids = torch.tensor([0, 1, 1])
    columns = torch.tensor([-1, 2, -1])
    add_pairs(out, row_ids, columns, torch.tensor([5.0, 7.0, torch.nan]))
    assert out.tolist() == [[[0.0, 0.0, 0.0], [0.0, 0.0, 7.0]]]
