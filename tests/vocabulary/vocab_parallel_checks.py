"""Vocabulary-parallel heads and logits, on the ranks of a group: run by test_vocab_parallel.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from grpo_kernels import (
    LossOutput,
    Objective,
    Options,
    Sparse,
    TokenBatch,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
    token_logprobs,
)
from grpo_kernels.distributed import VocabShard
from grpo_kernels.vocabulary import blocks
from grpo_kernels.vocabulary import hidden as linear
from support import oracle
from support.cases import OBJECTIVES, Case, assert_no_worse, build, same_bits
from support.collectives import counted
from support.linear_cases import LinearCase, assert_gradients_no_worse, assert_near, build_linear, run_linear
from support.processes import WHOLE_PRODUCTS

Tensor = torch.Tensor
V = 61
BACKENDS = ("eager", "cpu")
BEFORE_THE_RANKS = ("torch.distributed.tensor.parallel",)

#: Widths of the ranks' parts: even as torch.chunk cuts, uneven, with an empty part, with padding, a part of padding only.
WIDTHS = {
    1: {"whole": [61], "padded": [64]},
    2: {"even": [31, 30], "uneven": [44, 17], "empty": [0, 61], "padded": [32, 32], "only padding": [61, 7]},
    4: {"even": [16, 16, 16, 13], "empty": [20, 0, 30, 11], "padded": [16, 16, 16, 16], "only padding": [31, 30, 5, 0]},
}


def cut(x: Tensor, widths: list[int], rank: int, dim: int, padding: float = 0.0) -> Tensor:
    """This rank's part of `x` along `dim`, padded to the sum of the widths."""
    dim %= x.dim()
    extra = sum(widths) - x.shape[dim]
    pad = torch.full((*x.shape[:dim], extra, *x.shape[dim + 1 :]), padding, dtype=x.dtype)
    return torch.cat([x.detach(), pad], dim).split(widths, dim)[rank].clone()


def shards(rank: int, ranks: int) -> Iterator[tuple[str, list[int], VocabShard]]:
    for name, widths in WIDTHS[ranks].items():
        yield name, widths, VocabShard.of(torch.empty(widths[rank], 1), vocab=V)


def run_head(
    case: LinearCase, objective: Objective, widths: list[int], rank: int, shard: VocabShard, backend: str, **options: Any
) -> tuple[LossOutput, dict[str, Tensor]]:
    """Loss and gradients (of the local parts) by name."""
    leaves = {"hidden": case.hidden.clone(), "weight": cut(case.weight, widths, rank, 0)}
    if case.bias is not None:
        leaves["bias"] = cut(case.bias, widths, rank, 0)
    for leaf in leaves.values():
        leaf.requires_grad_()
    out = linear_grpo_loss(
        leaves["hidden"], leaves["weight"], case.tokens.batch(), objective,
        bias=leaves.get("bias"), transform=case.tokens.logit_transform(), shard=shard, backend=backend, **options,
    )  # fmt: skip
    out.loss.backward()
    return out, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def whole(gradients: dict[str, Tensor], widths: list[int]) -> dict[str, Tensor]:
    """Gradients of the local parts put together; those of padding are 0, and cut off."""
    found = dict(gradients)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: x for name, x in gradients.items() if name != "hidden"})
    for name in everyone[0]:
        joined = torch.cat([parts[name] for parts in everyone])
        assert joined.shape[0] == sum(widths) and not joined[V:].any(), f"gradient of the padding of {name}"
        found[name] = joined[:V]
    return found


def assert_same_everywhere(*tensors: Tensor) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [x.detach() for x in tensors])
    assert all(same_bits(a, b) for theirs in everyone for a, b in zip(theirs, everyone[0], strict=True))


def assert_loss(out: LossOutput, exact: oracle.Result, naive: oracle.Result) -> None:
    flat = out.logps.reshape(-1)
    assert_no_worse(out.loss[None], naive.loss[None], exact.loss[None], "loss", tiny=2e-5)
    assert_no_worse(flat, naive.logps, exact.logps, "logps")
    assert_no_worse(out.entropy.reshape(-1), naive.entropy, exact.entropy, "entropy")


CHOSEN = (
    "grpo", "grpo, k3 and entropy", "gspo, k3 by the ratio", "entropy quantile, bonus of its own", "off-policy sequences", "vespo",
    "distillation", "entropy floor and bonus",
)  # fmt: skip


def chosen(ranks: int = 2) -> dict[str, tuple[Objective, oracle.Spec]]:
    """Fewer where many processes share the processors."""
    return {name: (OBJECTIVES[name][0](), OBJECTIVES[name][1]) for name in CHOSEN[: 8 if ranks < 4 else 3]}


def in_turn(choices: tuple[Any, ...], turn: int) -> tuple[Any, ...]:
    """One of the choices; all of them where whole products are asked for."""
    return choices if WHOLE_PRODUCTS else (choices[turn % len(choices)],)


def check_loss_from_hidden(rank: int, ranks: int) -> None:
    for packed in (False, True) if ranks < 4 else (True,):
        case = build_linear(vocab=V, packed=packed, transform={"temperature": 0.8, "softcap": 9.0, "scale": 1.2})
        for i, (objective, spec) in enumerate(chosen(ranks).values()):
            (value, exact), (naive_value, naive) = case.expected(spec), case.naive(spec)
            for j, (_, widths, shard) in enumerate(shards(rank, ranks)):
                for backend in BACKENDS if ranks == 1 else in_turn(BACKENDS, i + j):
                    out, gradients = run_head(case, objective, widths, rank, shard, backend)
                    assert_same_everywhere(out.loss, out.logps, out.entropy, gradients["hidden"])
                    assert_loss(out, value, naive_value)
                    assert_gradients_no_worse(whole(gradients, widths), naive, exact)


def check_loss_from_bf16_hidden(rank: int, ranks: int) -> None:
    case = build_linear(torch.bfloat16, vocab=V)
    objective, spec = chosen()["gspo, k3 by the ratio"]
    (_, exact), (_, naive) = case.expected(spec), case.naive(spec)
    for _, widths, shard in shards(rank, ranks):
        for backend in BACKENDS:
            _, gradients = run_head(case, objective, widths, rank, shard, backend)
            assert_gradients_no_worse(whole(gradients, widths), naive, exact)


def check_sparse_gradients(rank: int, ranks: int) -> None:
    """The ranks draw what one process draws from whole rows."""
    case, objective = build_linear(vocab=V), Objective.preset("grpo", beta=0.1, entropy_coef=-0.05)
    options = Options(sparse=Sparse(1 / 16, 3))
    for backend in BACKENDS:
        _, expected = run_linear(case, objective, backend, options=options)
        for _, widths, shard in shards(rank, ranks):
            _, found = run_head(case, objective, widths, rank, shard, backend, options=options)
            for name, gradient in whole(found, widths).items():
                assert_near(gradient, expected[name], 1e-5, name)


def check_logprobs_from_hidden(rank: int, ranks: int) -> None:
    case = build_linear(vocab=V)
    mask, targets = case.tokens.mask, case.tokens.targets
    assert mask is not None
    g = torch.Generator().manual_seed(1)
    d_logps, d_entropy = torch.randn(2, *targets.shape, generator=g)
    d_logps[1] = 0.0  # rows that take no part in the backward, as long as no entropy asks for them
    for with_entropy in (False, True):
        exact_leaves = {k: v.detach().double().requires_grad_() for k, v in case.leaves.items()}
        logits = torch.nn.functional.linear(exact_leaves["hidden"], exact_leaves["weight"], exact_leaves["bias"])
        logp = logits.log_softmax(-1)
        expected = (logp.gather(-1, targets[..., None])[..., 0][mask], -(logp.exp() * logp).sum(-1)[mask])
        value = (expected[0] * d_logps[mask]).sum() + with_entropy * (expected[1] * d_entropy[mask]).sum()
        exact = dict(zip(exact_leaves, torch.autograd.grad(value, list(exact_leaves.values())), strict=True))
        for _, widths, shard in shards(rank, ranks):
            for backend in BACKENDS:
                leaves = {"hidden": case.hidden.clone()}
                leaves |= {k: cut(getattr(case, k), widths, rank, 0) for k in ("weight", "bias")}
                for leaf in leaves.values():
                    leaf.requires_grad_()
                logps, entropy = linear_logprobs(
                    leaves["hidden"], leaves["weight"], targets,
                    bias=leaves["bias"], mask=mask, entropy=with_entropy, shard=shard, backend=backend,
                )  # fmt: skip
                assert not logps[~mask].any()
                assert_near(logps[mask], expected[0], 1e-6, "logps")
                outputs, upstream = [logps], [d_logps]
                if entropy is not None:
                    assert_near(entropy[mask], expected[1], 1e-6, "entropy")
                    outputs, upstream = [logps, entropy], [d_logps, d_entropy]
                torch.autograd.backward(outputs, upstream)
                found = whole({k: v.grad for k, v in leaves.items() if v.grad is not None}, widths)
                for name, gradient in found.items():
                    assert_near(gradient, exact[name], 3e-6, f"gradient of {name}")


def check_loss_from_logits(rank: int, ranks: int) -> None:
    """In place too, and whatever the padding holds."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = build(dtype, vocab=V, transform={"temperature": 1.3})
        for i, (objective, spec) in enumerate(chosen(ranks).values()):
            (value, exact), (naive_value, naive) = case.expected(spec), case.naive(spec)
            for j, (_, widths, shard) in enumerate(shards(rank, ranks)):
                for k, backend in enumerate(BACKENDS):
                    for inplace in (False, True) if ranks == 1 else in_turn((False, True), i + j + k):
                        leaf = cut(case.logits, widths, rank, -1, padding=torch.nan).requires_grad_()
                        out = grpo_loss(
                            leaf.clone() if inplace else leaf, case.batch(), objective,
                            transform=case.logit_transform(), inplace=inplace, shard=shard, backend=backend,
                        )  # fmt: skip
                        assert_same_everywhere(out.loss, out.logps, out.entropy)
                        assert_loss(out, value, naive_value)
                        out.loss.backward()
                        assert leaf.grad is not None
                        gradient = whole({"logits": leaf.grad.movedim(-1, 0)}, widths)["logits"].movedim(0, -1)
                        assert_no_worse(gradient, naive.to(dtype), exact, "gradient of the logits")


def check_logprobs_from_logits(rank: int, ranks: int) -> None:
    case = build(vocab=V)
    g = torch.Generator().manual_seed(2)
    d_logps, d_entropy = torch.randn(2, *case.targets.shape, generator=g)
    exact = case.logits.double().requires_grad_()
    logp = exact.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    logps = logp.gather(-1, case.targets[..., None])[..., 0]
    (expected,) = torch.autograd.grad((logps * d_logps).sum() + (entropy * d_entropy).sum(), exact)
    for _, widths, shard in shards(rank, ranks):
        for backend in BACKENDS:
            leaf = cut(case.logits, widths, rank, -1, padding=torch.nan).requires_grad_()
            found = token_logprobs(leaf, case.targets, entropy=True, shard=shard, backend=backend)
            assert found[1] is not None
            assert_near(found[0], logps, 1e-6, "logps")
            assert_near(found[1], entropy, 1e-6, "entropy")
            torch.autograd.backward(list(found), [d_logps, d_entropy])
            assert leaf.grad is not None
            gradient = whole({"logits": leaf.grad.movedim(-1, 0)}, widths)["logits"].movedim(0, -1)
            assert_near(gradient, expected, 3e-6, "gradient of the logits")


def check_dtensor_head(rank: int, ranks: int) -> None:
    """The head that parallelize_module has cut, and logits that are a DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    case = build_linear(vocab=V)
    objective, spec = chosen()["gspo, k3 by the ratio"]
    (_, exact), (_, naive) = case.expected(spec), case.naive(spec)
    model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(case.weight.shape[1], V)})
    with torch.no_grad():
        model["lm_head"].weight.copy_(case.weight)
        model["lm_head"].bias.copy_(case.bias)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    head, hidden = model["lm_head"], case.hidden.clone().requires_grad_()
    shard = VocabShard.of(head.weight)
    assert shard.start == min(rank * -(-V // ranks), V) and shard.vocab == V
    out = linear_grpo_loss(hidden, head.weight, case.tokens.batch(), objective, bias=head.bias, shard=shard)
    out.loss.backward()
    assert isinstance(head.weight.grad, DTensor) and hidden.grad is not None
    gradients = {"hidden": hidden.grad, "weight": head.weight.grad.full_tensor(), "bias": head.bias.grad.full_tensor()}
    assert_gradients_no_worse(gradients, naive, exact)

    tokens = build(vocab=V)
    leaf = distribute_tensor(tokens.logits, mesh, [Shard(2)]).requires_grad_()
    shard = VocabShard.of(leaf, dim=-1)
    grpo_loss(leaf, tokens.batch(), objective, shard=shard).loss.backward()
    assert leaf.grad is not None
    assert_no_worse(leaf.grad.full_tensor(), tokens.naive(spec)[1], tokens.expected(spec)[1], "gradient of the logits")

    try:
        VocabShard.of(distribute_tensor(case.weight, mesh, [Shard(1)]))
    except ValueError as error:
        assert "must be cut by Shard(0)" in str(error)
    else:
        raise AssertionError("a head cut along H was taken")
    try:
        linear_grpo_loss(hidden, head.weight, case.tokens.batch(), objective)
    except ValueError as error:
        assert "shard=VocabShard.of(weight)" in str(error)
    else:
        raise AssertionError("a DTensor was taken without shard=")


def check_collectives(rank: int, ranks: int) -> None:
    """One exchange a call from logits, one a chunk from hidden states, one sum of d_hidden, whatever the parts are."""
    case, objective = build_linear(vocab=V), Objective(beta=0.1)
    tokens = build(vocab=V)
    n, trained = tokens.targets.numel(), int(tokens.mask.sum())  # type: ignore[union-attr]
    for _, widths, shard in shards(rank, ranks):
        many = ranks > 1
        with counted() as sizes:
            leaf = cut(tokens.logits, widths, rank, -1).requires_grad_()
            grpo_loss(leaf, tokens.batch(), objective, shard=shard).loss.backward()
        assert sizes == {"all_gather": [16 * n] * many, "all_reduce": []}, sizes
        with counted() as sizes:
            leaf = cut(tokens.logits, widths, rank, -1).requires_grad_()
            token_logprobs(leaf, tokens.targets, shard=shard)[0].sum().backward()
        assert sizes == {"all_gather": [12 * n] * many, "all_reduce": []}, sizes

        start = linear.Engine.__init__

        def small(self: linear.Engine, *args: Any, start: Any = start, **kwargs: Any) -> None:
            start(self, *args, **kwargs)
            self.chunk_rows = 10

        chunks = [part.numel() for part in torch.arange(trained).tensor_split(-(-trained // 10))]
        with mock.patch.object(linear.Engine, "__init__", small):
            with counted() as sizes:
                run_head(case, objective, widths, rank, shard, "auto")
            hidden_bytes = case.hidden.numel() * 4
            assert sizes == {"all_gather": [16 * c for c in chunks] * many, "all_reduce": [hidden_bytes] * many}, sizes
            weight, hidden = cut(case.weight, widths, rank, 0).requires_grad_(), case.hidden.clone().requires_grad_()
            with counted() as sizes:
                logps, _ = linear_logprobs(hidden, weight, case.tokens.targets, mask=case.tokens.mask, shard=shard)
            assert sizes == {"all_gather": [12 * c for c in chunks] * many, "all_reduce": []}, sizes
            with counted() as sizes:
                logps.sum().backward()
            assert sizes == {"all_gather": [], "all_reduce": [hidden_bytes] * many}, sizes


def check_equal_chunks(rank: int, ranks: int) -> None:
    """Ranks of unequal width take the same number of chunks, or they would wait for each other forever."""
    rows = 700
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(rows, 8, generator=g), torch.randn(V, 8, generator=g)
    targets = torch.randint(V, (rows,), generator=g)
    expected = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    with mock.patch.dict(blocks.CHUNK_BYTES, cpu=128 * 4 * V):
        for _, widths, shard in shards(rank, ranks):
            logps, _ = linear_logprobs(hidden, cut(weight, widths, rank, 0), targets, shard=shard)
            assert_near(logps, expected, 1e-6, "logps")


def check_hidden_left_to_others(rank: int, ranks: int) -> None:
    case, objective = build_linear(vocab=V), Objective(beta=0.1)
    for _, widths, shard in shards(rank, ranks):
        _, summed = run_head(case, objective, widths, rank, shard, "auto")
        own = VocabShard(shard.start, shard.vocab, reduce_hidden=False)
        _, partial = run_head(case, objective, widths, rank, own, "auto")
        total = partial["hidden"].clone()
        dist.all_reduce(total)
        assert same_bits(total, summed["hidden"])
        if widths[rank] == 0:
            assert not partial["hidden"].any()


def check_hidden_as_a_dtensor(rank: int, ranks: int) -> None:
    """Replicated; where the layer in front sums its gradient up, that gradient is a partial one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    case, objective = build_linear(vocab=V), Objective(beta=0.1)
    expected = case.expected(oracle.Spec(beta=0.1))[1]["hidden"]
    for _, widths, shard in shards(rank, ranks):
        for reduce_hidden in (True, False):
            own = VocabShard(shard.start, shard.vocab, reduce_hidden=reduce_hidden)
            hidden = distribute_tensor(case.hidden.clone(), mesh, [Replicate()]).requires_grad_()
            weight, bias = (cut(x, widths, rank, 0) for x in (case.weight, case.bias))  # type: ignore[arg-type]
            linear_grpo_loss(hidden, weight, case.tokens.batch(), objective, bias=bias, shard=own).loss.backward()
            assert_near(hidden.grad.full_tensor(), expected, 1e-5, f"reduce_hidden={reduce_hidden}")


def check_misuse_shows(rank: int, ranks: int) -> None:
    """NaN on one rank, or parts that overlap, are no finite log-prob on any."""
    case = build(vocab=V)
    rows = case.targets.numel()
    for _, widths, shard in shards(rank, ranks):
        for broken, columns in ((0, slice(None)), (0, slice(1, 2)), (ranks - 1, slice(None))):
            if widths[broken] <= 1 or sum(widths[:broken]) >= V:
                continue
            for backend in BACKENDS:
                part = cut(case.logits.reshape(rows, V), widths, rank, -1)
                if rank == broken:
                    part[:, columns] = torch.nan
                logps, H = token_logprobs(part, case.targets.reshape(-1), entropy=True, shard=shard, backend=backend)
                assert logps.isnan().all() and H is not None and H.isnan().all()
    if ranks > 1:
        logps, _ = token_logprobs(case.logits, case.targets, shard=VocabShard(0, V))
        assert logps.isnan().all()


def check_nothing_to_do(rank: int, ranks: int) -> None:
    """No rows, or none that is trained: exact zeros, and no rank waits."""
    case, objective = build_linear(vocab=V), Objective(beta=0.1)
    for _, widths, shard in shards(rank, ranks):
        for n in (0, 5):
            hidden = case.hidden.reshape(-1, case.hidden.shape[-1])[:n].clone().requires_grad_()
            weight = cut(case.weight, widths, rank, 0).requires_grad_()
            zeros = torch.zeros(n)
            targets = torch.full((n,), -100)
            mask = torch.zeros(n, dtype=torch.bool)
            batch = TokenBatch(targets, zeros, mask=mask, old_logps=zeros, ref_logps=zeros)
            out = linear_grpo_loss(hidden, weight, batch, objective, shard=shard)
            out.loss.backward()
            assert float(out.loss) == 0.0 and not out.logps.any() and hidden.grad is not None and weight.grad is not None
            assert not hidden.grad.any() and not weight.grad.any() and weight.grad.shape == weight.shape
            logits = torch.full((n, widths[rank]), torch.nan, requires_grad=True)
            loss = grpo_loss(logits, batch, objective, shard=shard).loss
            loss.backward()
            assert float(loss) == 0.0 and logits.grad is not None and not logits.grad.any()


def check_extremes(rank: int, ranks: int) -> None:
    """Parts that hold only -inf, a peaked row, logits of 1e4, a row of only -inf."""
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(6, V, generator=g)
    logits[0, 20:] = -torch.inf
    logits[1, :50] = -torch.inf
    logits[2] *= 1e4
    logits[3, 7] = 80.0
    logits[4] = -torch.inf
    targets = torch.tensor([3, 55, int(logits[2].argmax()), 7, 1, 60])
    expected = logits.double().log_softmax(-1)
    entropy = -torch.where(expected == -torch.inf, 0.0, expected.exp() * expected).sum(-1)
    chosen = expected.gather(1, targets[:, None])[:, 0]
    for _, widths, shard in shards(rank, ranks):
        for backend in BACKENDS:
            leaf = cut(logits, widths, rank, -1).requires_grad_()
            logps, H = token_logprobs(leaf, targets, entropy="detached", shard=shard, backend=backend)
            assert H is not None and logps[4].isnan() and H[4].isnan()
            rows = torch.tensor([0, 1, 2, 3, 5])
            torch.testing.assert_close(logps[rows].double(), chosen[rows], rtol=1e-6, atol=2e-6)
            torch.testing.assert_close(H[rows].double(), entropy[rows], rtol=1e-6, atol=2e-6)


def check_reference_head(rank: int, ranks: int) -> None:
    """The frozen reference is cut like the policy."""
    case, other = build_linear(vocab=V), build_linear(vocab=V, seed=35)
    objective, spec = Objective(beta=0.4), oracle.Spec(beta=0.4)
    logits = torch.nn.functional.linear(other.hidden.double(), other.weight.double())
    ref = logits.log_softmax(-1).gather(-1, case.tokens.targets[..., None])[..., 0]
    fields = case.tokens.fields
    exact_case = LinearCase(
        case.hidden, case.weight, case.bias, Case(case.tokens.logits, fields | {"ref_logps": ref.float()}, {})
    )
    (_, exact), (_, naive) = exact_case.expected(spec), exact_case.naive(spec)
    own = LinearCase(case.hidden, case.weight, case.bias, Case(case.tokens.logits, fields | {"ref_logps": None}, {}))
    for _, widths, shard in shards(rank, ranks):
        reference = (other.hidden, cut(other.weight, widths, rank, 0))
        _, gradients = run_head(own, objective, widths, rank, shard, "auto", reference=reference)
        assert_gradients_no_worse(whole(gradients, widths), naive, exact, tiny=1e-5)


def check_bad_input(rank: int, ranks: int) -> None:
    """Every rank refuses, before anything is exchanged."""
    case = build_linear(vocab=V)
    widths = WIDTHS[ranks]["padded"]
    shard = VocabShard.of(torch.empty(widths[rank], 1), vocab=V)
    weight = cut(case.weight, widths, rank, 0)
    targets = case.tokens.targets.clone()
    targets[0, 0] = V  # padding of the vocabulary is no token
    for call, words in (
        (lambda: linear_logprobs(case.hidden, weight, targets, shard=shard), f"outside the vocabulary [0, {V})"),
        (lambda: linear_logprobs(case.hidden, weight, case.tokens.targets, shard=3), "shard=3: pass a VocabShard"),  # type: ignore[arg-type]
        (lambda: VocabShard(-1, 5), "start=-1"),
        (lambda: VocabShard(0, 0), "vocab=0"),
        (lambda: VocabShard(0, 5, reduce_hidden=2), "reduce_hidden=2"),  # type: ignore[arg-type]
    ):
        try:
            call()
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")
    try:
        VocabShard.of(weight, vocab=sum(widths) + 1)
    except ValueError as error:
        assert f"the ranks hold {sum(widths)} rows in all" in str(error)
    else:
        raise AssertionError("more ids than rows")


def check_managed_parameters(rank: int, ranks: int) -> None:
    """What FSDP2 or replicate() holds is no shard of a vocabulary, and no weight of one's own, however it looks."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    hidden, targets = torch.randn(3, 8), torch.tensor([0, 1, 2])
    sharded = torch.nn.Sequential(torch.nn.Linear(8, V))
    fully_shard(sharded, mesh=mesh)
    weight = sharded[0].weight
    calls = [
        lambda: VocabShard.of(weight),
        lambda: VocabShard.of(weight.detach()),
        lambda: linear_logprobs(hidden, weight, targets, shard=VocabShard(0, V)),
        lambda: linear_logprobs(hidden, weight, targets),
    ]
    replicated = torch.nn.Sequential(torch.nn.Linear(8, V))
    replicate(replicated)
    if hasattr(replicated[0].weight, "placements"):
        calls.append(lambda: linear_logprobs(hidden, replicated[0].weight, targets))
    for call in calls:
        try:
            call()
        except ValueError as error:
            assert "call FusedLMHead" in str(error), error
        else:
            raise AssertionError("a parameter that hooks manage was taken")
