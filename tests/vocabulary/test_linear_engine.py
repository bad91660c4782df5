"""The engine under both layers: which rows take part in which product, what is allocated, chunks, and how autograd uses it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from grpo_kernels import Objective, TokenBatch, linear_grpo_loss, linear_logprobs
from grpo_kernels.vocabulary import backends, blocks
from grpo_kernels.vocabulary import hidden as linear
from support.allocations import Allocations
from support.cases import OBJECTIVES, same_bits, snapshot
from support.linear_cases import (
    ROUNDING,
    Gradients,
    LinearCase,
    assert_gradients_near,
    assert_gradients_no_worse,
    assert_near,
    build_linear,
    count_products,
    gradients_of,
    run_linear,
    run_logprobs,
)

Tensor = torch.Tensor
BOTH = ("dapo", "grpo, k3 and entropy", "gspo")  # token-level, everything on, sequence-level


# ---- rows in products


@pytest.mark.parametrize("skip_inactive", [False, True])
@pytest.mark.parametrize("name", ["dapo", "cispo", "grpo, k3 and entropy", "dapo, entropy", "gspo", "gspo-token"])
def test_rows_in_products(name: str, skip_inactive: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products of rows with a gradient, one of the other rows that count (none where they are to be skipped), none of
    masked rows; four where the slopes need all log-probs of a sequence first."""
    case, objective = build_linear(), OBJECTIVES[name][0]()
    case.tokens.fields["weights"][0, 0] = 0.0
    mask = case.tokens.fields["mask"]
    contributing = mask & (case.tokens.fields["advantages"] != 0)[:, None]
    if objective.beta != 0 or objective.entropy_coef != 0:
        active = mask
    elif objective.level == "sequence":
        active = contributing  # the token of weight 0 moves the ratio of its sequence
    else:
        active = contributing & (case.tokens.fields["weights"] != 0)
    a, n = int(active.sum()), int(mask.sum())
    rows = count_products(monkeypatch)
    out, _ = run_linear(case, objective, backend, skip_inactive=skip_inactive)
    if (
        objective.level != "token"
    ):  # the slopes are known before the backward's products: those that a clip has zeroed take no part
        _, slopes, _ = objective.token_stage(out.logps.flatten(), out.entropy.flatten(), out.rows, case.tokens.batch())
        sloped = int((slopes != 0).sum())
        assert 0 < sloped < a and not (slopes != 0)[~active.flatten()].any()
        assert rows == {"logits": n + sloped, "d_hidden": sloped, "d_weight": sloped}
    else:
        assert rows == {"logits": a if skip_inactive else n, "d_hidden": a, "d_weight": a}
    assert a < n or objective.entropy_coef != 0


def test_dense_rows_cost_three_products(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build_linear()
    case.tokens.fields["mask"], case.tokens.fields["advantages"] = None, torch.ones(8)
    rows = count_products(monkeypatch)
    run_linear(case, Objective.preset("dapo"), backend)
    assert rows == {"logits": 56, "d_hidden": 56, "d_weight": 56}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", BOTH)
def test_no_gradient_wanted_is_forward_only(
    name: str, mode: Callable[[], Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, objective = build_linear(), OBJECTIVES[name][0]()
    full, _ = run_linear(case, objective, backend)
    leaves, batch = case.leaves, case.tokens.batch()
    rows = count_products(monkeypatch)
    with mode():
        logps, entropy = linear_logprobs(
            leaves["hidden"],
            leaves["weight"],
            batch.targets,
            bias=leaves["bias"],
            mask=batch.mask,
            entropy=True,
            backend=backend,
        )
        assert entropy is not None and not logps.requires_grad and not entropy.requires_grad
        assert_near(logps, full.logps, 2e-6, "logps")
        assert rows == {"logits": batch.count("trained")}
        rows.clear()
        out = linear_grpo_loss(leaves["hidden"], leaves["weight"], batch, objective, bias=leaves["bias"], backend=backend)
    assert not out.loss.requires_grad
    assert_near(out.loss, full.loss, 1e-5, "loss")
    assert rows == {"logits": batch.count("trained")}


# ---- frozen parts


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("frozen", [("weight",), ("hidden",), ("bias",), ("weight", "bias"), ("hidden", "bias"), ()], ids=str)
def test_frozen_parts(frozen: tuple[str, ...], layer: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No product and no memory for a gradient that was not requested, and the others are unchanged."""
    case = build_linear(vocab=811, width=96)
    case.tokens.fields["mask"] = None
    objective, d = Objective.preset("dapo", beta=0.1), torch.randn(8, 7)
    exact = run_linear(case, objective, backend)[1] if layer == 2 else run_logprobs(case, d, None, backend)[2]
    leaves, batch = case.leaves, case.tokens.batch()
    for name in frozen:
        leaves[name].requires_grad_(False)
    rows = count_products(monkeypatch)
    with Allocations() as made:
        if layer == 2:
            linear_grpo_loss(
                leaves["hidden"], leaves["weight"], batch, objective, bias=leaves["bias"], backend=backend
            ).loss.backward()
        else:
            logps, _ = linear_logprobs(leaves["hidden"], leaves["weight"], batch.targets, bias=leaves["bias"], backend=backend)
            logps.backward(d)
    wanted = {k: v for k, v in leaves.items() if k not in frozen}
    assert all(leaves[name].grad is None for name in frozen)
    assert_gradients_near(gradients_of(wanted), {k: exact[k] for k in wanted}, 1e-6)
    assert (rows["d_hidden"] > 0) == ("hidden" not in frozen) and (rows["d_weight"] > 0) == ("weight" not in frozen)
    shapes = {tuple(sorted(s)) for s in made.shapes}
    assert ((96, 811) in shapes) == ("weight" not in frozen) and ((811,) in shapes) == ("bias" not in frozen)
    assert ((56, 96) in made.shapes) == ("hidden" not in frozen)  # all rows take part: the hidden states are not copied


def test_tied_weight(backend: str) -> None:
    """The head's weight is the embedding as well: both gradients arrive in one .grad."""
    ids = torch.randint(61, (4, 6))
    embedding, mixing = torch.randn(61, 24), torch.randn(24, 24) / 5
    advantages, objective = torch.tensor([1.0, -1.0, 0.5, 2.0]), Objective.preset("reinforce")

    def hidden_of(weight: Tensor, mix: Tensor) -> Tensor:
        return torch.tanh(F.embedding(ids, weight) @ mix)

    exact_weight, exact_mixing = embedding.double().requires_grad_(), mixing.double().requires_grad_()
    log_p = (hidden_of(exact_weight, exact_mixing) @ exact_weight.t()).log_softmax(-1)
    (-(log_p.gather(-1, ids.roll(-1, 1)[..., None])[..., 0] * advantages[:, None]).mean()).backward()
    weight, mix = embedding.clone().requires_grad_(), mixing.clone().requires_grad_()
    linear_grpo_loss(
        hidden_of(weight, mix), weight, TokenBatch(ids.roll(-1, 1), advantages), objective, backend=backend
    ).loss.backward()
    assert weight.grad is not None and mix.grad is not None and exact_weight.grad is not None and exact_mixing.grad is not None
    assert_near(weight.grad, exact_weight.grad, 5e-6, "gradient of the tied weight")
    assert_near(mix.grad, exact_mixing.grad, 5e-6, "gradient of what is before it")


# ---- chunks


def long_case(dtype: torch.dtype, n: int = 17300) -> LinearCase:
    case = build_linear(dtype, packed=True, vocab=67, width=16)
    g = torch.Generator().manual_seed(3)
    case.hidden = torch.randn(n, 16, generator=g).to(dtype)
    fields = {"targets": torch.randint(67, (n,), generator=g), "advantages": torch.randn(n, generator=g)}
    case.tokens.fields = {**fields, "mask": torch.rand(n, generator=g) < 0.95}
    case.tokens.logits = torch.zeros(n, 67)
    return case


@pytest.mark.parametrize("layer", [1, 2])
def test_chunk_count_changes_only_rounding(
    layer: int, arithmetic: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1, 16 and 256 chunks by the byte budget: each within the naive computation's error, and the error of the weight's
    gradient, whose sum runs over all chunks, does not grow."""
    make, spec = OBJECTIVES["reinforce"]
    case = long_case(arithmetic)
    batch = case.tokens.batch()
    rows = int(batch.count("trained"))
    expected, exact = case.expected(spec)
    _, naive = case.naive(spec)
    errors: dict[int, float] = {}
    for budget in (1 << 30, 4 * 67 * 1024, 1):
        monkeypatch.setitem(blocks.CHUNK_BYTES, "cpu", budget)
        seen: list[int] = []
        chunks = linear.Engine._chunks

        def watched(self: linear.Engine, index: Tensor, chunks: Any = chunks, seen: list[int] = seen) -> Any:
            for at, hidden in chunks(self, index):
                seen.append(at.numel())
                yield at, hidden

        with monkeypatch.context() as patch:
            patch.setattr(linear.Engine, "_chunks", watched)
            if layer == 2:
                out, ours = run_linear(case, make(), backend)
                assert_near(out.loss, expected.loss, 1e-5, "loss")
            else:
                slopes = make().token_stage(expected.logps.float(), None, make().token_rows(batch), batch)[1]
                _, _, ours = run_logprobs(case, slopes, None, backend)
        loops = 1 if layer == 2 else 2  # layer 1 has one in the forward and one in the backward
        assert max(seen) <= max(64, budget // (4 * 67)) and sum(seen) == loops * rows
        assert_gradients_no_worse(ours, naive, exact, tiny=1e-5)
        errors[len(seen)] = float((ours["weight"].double() - exact["weight"]).square().mean().sqrt())
    assert list(errors) == sorted(errors) and min(errors) <= 2 and max(errors) >= 256
    smallest = float(exact["weight"].abs().max()) * 2e-7
    assert max(errors.values()) <= 1.25 * min(errors.values()) + smallest, errors


def test_chunk_rows_do_not_depend_on_the_number_of_rows(backend: str) -> None:
    sizes = set()
    for n in (1, 300, 5000):
        hidden, weight = torch.zeros(n, 4), torch.zeros(9000, 4)
        head = linear.check_head(hidden, weight, None, torch.Size([n]), hidden.device)
        sizes.add(linear.Engine(head, backends.load(backend)).chunk_rows)
    assert len(sizes) == 1


@pytest.mark.parametrize(("n", "sizes"), [(0, []), (1, [1]), (64, [64]), (65, [33, 32]), (190, [64, 63, 63]), (300, [60] * 5)])
def test_chunks_have_one_size(n: int, sizes: list[int], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few as the memory allows, and none with a few last rows, for which the weight would be read once more."""
    monkeypatch.setitem(blocks.CHUNK_BYTES, "cpu", 4 * 50 * 64)
    hidden, weight = torch.randn(n, 4), torch.randn(50, 4)
    engine = linear.Engine(linear.check_head(hidden, weight, None, torch.Size([n]), hidden.device), backends.load(backend))
    parts = list(engine._chunks(torch.arange(n)))
    assert [at.numel() for at, _ in parts] == sizes
    assert not parts or torch.equal(torch.cat([rows for _, rows in parts]), hidden)


# ---- autograd


@pytest.mark.parametrize("upstream", [1.0, 3.5, 0.0])
@pytest.mark.parametrize("name", BOTH)
def test_upstream_scalar(name: str, upstream: float, arithmetic: torch.dtype, backend: str) -> None:
    make, spec = OBJECTIVES[name]
    case = build_linear(arithmetic)
    _, exact = case.expected(spec)
    _, ours = run_linear(case, make(), backend, upstream=upstream)
    for key, gradient in ours.items():
        if upstream == 0:
            assert not gradient.any()
        else:
            assert_near(gradient, upstream * exact[key], ROUNDING[arithmetic], f"gradient of {key}")


@pytest.mark.parametrize("name", BOTH)
def test_fp16_with_a_loss_scale(name: str, backend: str) -> None:
    """What GradScaler does: gradients far below fp16's smallest number survive once the scale is in them."""
    make, spec = OBJECTIVES[name]
    case, scale, normalizer = build_linear(torch.float16), 2.0**16, 3e6
    _, exact = case.expected(spec, normalizer)
    _, ours = run_linear(case, make(), backend, upstream=scale, normalizer=normalizer)
    for key, gradient in ours.items():
        scaled = exact[key] * scale
        relevant = scaled.abs() > 1e-2 * scaled.abs().max()
        assert relevant.sum() > 20 and exact[key][relevant].abs().min() < 2**-24
        torch.testing.assert_close(gradient.double()[relevant], scaled[relevant], rtol=2e-3, atol=2**-24)


def test_second_backward(backend: str) -> None:
    """Layer 2 hands its gradients over once and says so; layer 1 computes them again."""
    case = build_linear()
    leaves = case.leaves
    inputs = list(leaves.values())
    out = linear_grpo_loss(*inputs[:2], case.tokens.batch(), Objective.preset("dapo"), bias=inputs[2], backend=backend)
    torch.autograd.grad(out.loss, inputs, retain_graph=True)
    with pytest.raises(RuntimeError, match="linear_logprobs"):
        torch.autograd.grad(out.loss, inputs)
    logps, _ = linear_logprobs(*inputs[:2], case.tokens.targets, bias=inputs[2], backend=backend)
    first = torch.autograd.grad(logps.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(logps.sum(), inputs)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(logps.sum(), inputs)


def test_gradients_that_are_handed_over_belong_to_the_caller(backend: str) -> None:
    """Written to by clipping and optimizers: no later call may share their memory."""
    case = build_linear()
    _, first = run_linear(case, Objective.preset("dapo"), backend)
    kept = copy.deepcopy(first)
    run_linear(case, Objective.preset("grpo"), backend)
    assert all(same_bits(first[k], kept[k]) for k in first)


def test_double_backward_is_refused(backend: str) -> None:
    case = build_linear()
    leaves = case.leaves
    logps, _ = linear_logprobs(leaves["hidden"], leaves["weight"], case.tokens.targets, backend=backend)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(logps.square().sum(), leaves["hidden"], create_graph=True)


def test_accumulation_into_grad(backend: str) -> None:
    """Three micro-batches of different lengths into the .grad of one head and one layer before it."""
    make, spec = OBJECTIVES["dapo, k3"]
    parts = [build_linear(seed=seed, packed=True) for seed in (34, 35, 36)]
    parts[2].hidden = parts[2].hidden[:13]
    parts[2].tokens.fields = {k: v[:13] for k, v in parts[2].tokens.fields.items() if k not in ("advantages", "cu_seqlens")}
    parts[2].tokens.fields["advantages"] = torch.randn(13)
    total = float(sum(make().normalizer(p.tokens.batch()) for p in parts))
    layer = torch.nn.Linear(24, 24)
    head = parts[0].weight.clone().requires_grad_()
    exact: list[Tensor] = []
    for part in parts:
        part.weight = head.detach()
        hidden = layer(part.hidden)
        out = linear_grpo_loss(hidden, head, part.tokens.batch(), make(), bias=part.bias, normalizer=total, backend=backend)
        out.loss.backward()
        moved = LinearCase(hidden.detach(), part.weight, part.bias, part.tokens)
        _, gradients = moved.expected(spec, total)
        d_layer = torch.einsum("no,ni->oi", gradients["hidden"], part.hidden.double())
        exact = [d_layer, gradients["weight"]] if not exact else [exact[0] + d_layer, exact[1] + gradients["weight"]]
    assert layer.weight.grad is not None and head.grad is not None
    assert_near(layer.weight.grad, exact[0], 1e-5, "gradient of the layer before")
    assert_near(head.grad, exact[1], 1e-5, "gradient of the head")


@pytest.mark.parametrize("layer", [1, 2])
def test_autocast(layer: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 parameters under bf16 autocast: fp32 gradients, no worse than a head under autocast whose logits are rounded."""
    make, spec = OBJECTIVES["reinforce"]
    case = build_linear()
    expected, exact = case.expected(spec)
    batch = case.tokens.batch()
    slopes = make().token_stage(expected.logps.float(), None, make().token_rows(batch), batch)[1].view(8, 7)
    leaves = case.leaves
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(leaves["hidden"], leaves["weight"], leaves["bias"])
        assert logits.dtype == torch.bfloat16
        log_p = logits.float().log_softmax(-1).gather(-1, case.tokens.targets[..., None])[..., 0]
    (log_p * slopes).sum().backward()
    naive = gradients_of(leaves)
    leaves = case.leaves
    make_products, dtypes = linear.products_for, []
    monkeypatch.setattr(linear, "products_for", lambda w, b, dtype: dtypes.append(dtype) or make_products(w, b, dtype))
    with torch.autocast("cpu", torch.bfloat16):
        if layer == 2:
            out = linear_grpo_loss(leaves["hidden"], leaves["weight"], batch, make(), bias=leaves["bias"], backend=backend)
            assert out.loss.dtype == out.logps.dtype == torch.float32
            assert_near(out.logps.reshape(-1), expected.logps, 2**-8, "logps")
        else:
            logps, _ = linear_logprobs(
                leaves["hidden"], leaves["weight"], batch.targets, bias=leaves["bias"], mask=batch.mask, backend=backend
            )
            assert logps.dtype == torch.float32
    (out.loss if layer == 2 else (logps * slopes).sum()).backward()
    ours = gradients_of(leaves)
    assert dtypes == [torch.bfloat16] * (3 - layer)  # layer 1 also in its backward, where autocast is off
    for key, gradient in ours.items():
        error, theirs = (float((g[key].double() - exact[key]).square().mean().sqrt()) for g in (ours, naive))
        assert gradient.dtype == torch.float32 and 0 < error <= 1.1 * theirs, (key, error, theirs)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layer", [1, 2])
def test_activation_checkpointing(layer: int, reentrant: bool, backend: str) -> None:
    """A block that ends in the loss is computed again in the backward."""
    case, objective = build_linear(), Objective.preset("dapo")
    batch, d = case.tokens.batch(), torch.randn(8, 7)
    first = torch.randn(24, 24) / 5

    def block(hidden: Tensor, weight: Tensor, bias: Tensor, mix: Tensor) -> Tensor:
        hidden = torch.tanh(hidden @ mix)
        if layer == 2:
            return linear_grpo_loss(hidden, weight, batch, objective, bias=bias, backend=backend).loss
        return (linear_logprobs(hidden, weight, batch.targets, bias=bias, backend=backend)[0] * d).sum()

    found = []
    for run in (block, lambda *x: checkpoint(block, *x, use_reentrant=reentrant)):
        leaves = {**case.leaves, "mix": first.clone().requires_grad_()}
        run(*leaves.values()).backward()
        found.append(gradients_of(leaves))
    assert all(same_bits(found[0][k], found[1][k]) for k in found[0])


# ---- what the tensors look like


@pytest.mark.parametrize("layer", [1, 2])
def test_inputs_are_not_modified(layer: int, arithmetic: torch.dtype, backend: str) -> None:
    case = build_linear(arithmetic, transform={"temperature": torch.full((8,), 0.8)})
    leaves = case.leaves
    d = torch.randn(8, 7)
    tensors = {**leaves, **case.tokens.fields, **case.tokens.transform, "d": d}
    check, versions = snapshot(**tensors), {k: x._version for k, x in tensors.items()}
    options: dict[str, Any] = {"bias": leaves["bias"], "transform": case.tokens.logit_transform(), "backend": backend}
    if layer == 2:
        out = linear_grpo_loss(
            leaves["hidden"], leaves["weight"], case.tokens.batch(), OBJECTIVES["grpo, k3 and entropy"][0](), **options
        )
        (3.5 * out.loss).backward()
        assert out.metrics
    else:
        logps, entropy = linear_logprobs(
            leaves["hidden"], leaves["weight"], case.tokens.targets, mask=case.tokens.mask, entropy=True, **options
        )
        torch.autograd.backward([logps, entropy], [d, d])
    check()
    assert versions == {k: x._version for k, x in tensors.items()}


LAYOUTS: dict[str, tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    # name: (which tensor, make a base that holds it, take it out of the base again)
    "hidden[:, :-1]": ("hidden", lambda x: torch.cat([x, x.new_full((8, 1, 24), torch.nan)], 1), lambda x: x[:, :-1]),
    "hidden transposed": ("hidden", lambda x: x.transpose(0, 1).contiguous(), lambda x: x.transpose(0, 1)),
    "hidden by columns": ("hidden", lambda x: x.transpose(1, 2).contiguous(), lambda x: x.transpose(1, 2)),
    "every second column": ("hidden", lambda x: torch.stack([x, x * torch.nan], -1).flatten(2), lambda x: x[..., ::2]),
    "weight transposed": ("weight", lambda x: x.t().contiguous(), lambda x: x.t()),
    "part of a padded weight": ("weight", lambda x: torch.cat([x, x.new_full((3, 24), torch.nan)]), lambda x: x[:-3]),
    "columns of a wider weight": ("weight", lambda x: torch.cat([x, x.new_full((61, 5), torch.nan)], 1), lambda x: x[:, :-5]),
    "bias with a stride": ("bias", lambda x: torch.stack([x, x * torch.nan], -1), lambda x: x[..., 0]),
}


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs(layout: str, layer: int, arithmetic: torch.dtype, backend: str) -> None:
    which, make, take = LAYOUTS[layout]
    case, objective, d = build_linear(arithmetic), Objective.preset("dapo"), torch.randn(8, 7)
    exact = run_linear(case, objective, backend)[1] if layer == 2 else run_logprobs(case, d, None, backend)[2]
    leaves = case.leaves
    base = make(leaves[which].detach()).requires_grad_()
    given: Gradients = {**leaves, which: take(base)}
    assert not given[which].is_contiguous() or which == "weight"
    if layer == 2:
        linear_grpo_loss(
            given["hidden"], given["weight"], case.tokens.batch(), objective, bias=given["bias"], backend=backend
        ).loss.backward()
    else:
        linear_logprobs(
            given["hidden"], given["weight"], case.tokens.targets, bias=given["bias"], mask=case.tokens.mask, backend=backend
        )[0].backward(d)
    assert base.grad is not None
    ours = {k: take(base.grad) if k == which else v.grad for k, v in leaves.items()}
    assert_gradients_near(ours, exact, ROUNDING[arithmetic])  # type: ignore[arg-type]
    assert base.grad.count_nonzero() == ours[which].count_nonzero()  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["NumPy", "inference mode", "inference tensor", ".data"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_mask_that_was_rewritten_behind_torchs_back(how: str, level: str) -> None:
    """The next loss of the same TokenBatch is that of the mask as it is now."""
    if how == "NumPy":
        pytest.importorskip("numpy")
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 4, 8, generator=g, requires_grad=True), torch.randn(31, 8, generator=g)
    with torch.inference_mode(how == "inference tensor"):
        mask = torch.zeros(3, 4, dtype=torch.bool)
    mask_now = torch.rand(3, 4, generator=g) < 0.7
    fields = {"targets": torch.randint(31, (3, 4), generator=g), "advantages": torch.randn(3, generator=g)}
    objective = Objective(level=level, aggregate="seq-mean-token-mean")
    batch = TokenBatch(**fields, mask=mask)
    for now in (torch.ones(3, 4, dtype=torch.bool), mask_now):
        if how == "NumPy":
            mask.numpy()[:] = now.numpy()
        elif how == ".data":
            mask.data.copy_(now)
        else:
            with torch.inference_mode():
                mask.copy_(now)
        out = linear_grpo_loss(hidden, weight, batch, objective)
        fresh = linear_grpo_loss(hidden, weight, TokenBatch(**fields, mask=now), objective)
        assert torch.equal(out.loss, fresh.loss) and torch.equal(out.logps, fresh.logps) and fresh.loss != 0
        found, expected = (torch.autograd.grad(x.loss, hidden)[0] for x in (out, fresh))
        assert torch.equal(found, expected) and expected.any()
        assert batch.lengths.tolist() == now.sum(1).tolist() and batch.count("trained") == now.sum()


def test_row_counts_follow_advantages_that_were_written_to() -> None:
    """A trainer may fill the same buffers step after step."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 8, generator=g, requires_grad=True), torch.randn(31, 8, generator=g)
    advantages = torch.zeros(6)
    batch = TokenBatch(torch.randint(31, (6,), generator=g), advantages)
    for nonzero in (1, 6, 3):
        advantages.copy_((torch.arange(6) < nonzero).float())
        (gradient,) = torch.autograd.grad(linear_grpo_loss(hidden, weight, batch, Objective.preset("dapo")).loss, hidden)
        assert int((gradient != 0).any(1).sum()) == nonzero
