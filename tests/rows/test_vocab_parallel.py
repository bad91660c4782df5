"""Vocabulary-parallel heads and logits equal whole ones, on 1, 2 and 4 ranks, beside what test_ranks asks, and by merging
parts in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from grpo_kernels import (
    Objective,
    Options,
    Sparse,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
    token_logprobs,
)
from grpo_kernels.distributed import VocabShard
from grpo_kernels.rows import backends
from grpo_kernels.rows import hidden as linear
from grpo_kernels.rows import products as blocks
from grpo_kernels.rows.parallel import on_shard
from grpo_kernels.rows.partials import merge
from support.bits import same_bits
from support.collectives import counted
from support.doors import compare, run
from support.kernel_rows import Rows, visited
from support.oracle import Answer
from support.processes import WHOLE_PRODUCTS, checks_of, run_whole_products
from support.recipes import Problem, Recipe, covering, problem

Tensor = torch.Tensor
V, H = 61, 8
BACKENDS = ("eager", "cpu")
BEFORE_THE_RANKS = ("torch.distributed.tensor.parallel",)
DIMS = {"logits": -1, "weight": 0, "bias": 0}


def widths_of(vocab: int, ranks: int) -> dict[str, list[int]]:
    """Of the ranks' parts: with padding at the end, uneven with an empty part, a part of padding only."""
    even = -(-vocab // ranks)
    rest = [vocab - (ranks - 2), *[1] * (ranks - 2)] if ranks > 1 else [vocab]
    return {
        "padded": [even + (ranks == 1)] * ranks,
        "empty": [0] * (ranks > 1) + rest,
        "only padding": rest + [5] * (ranks > 1),
    }


def cuts(rank: int, ranks: int, vocab: int = V) -> Iterator[tuple[list[int], VocabShard]]:
    for widths in widths_of(vocab, ranks).values():
        yield widths, VocabShard.of(torch.empty(widths[rank], 1), vocab=vocab)


def cut(x: Tensor, widths: list[int], rank: int, dim: int, padding: float = 0.0) -> Tensor:
    """This rank's part of `x` along `dim`, padded to the sum of the widths."""
    extra = sum(widths) - x.shape[dim]
    pad = torch.full_like(x.movedim(dim, 0)[:1].expand(extra, *x.movedim(dim, 0).shape[1:]), padding).movedim(0, dim)
    return torch.cat([x.detach(), pad], dim).split(widths, dim)[rank].clone()


def part(p: Problem, widths: list[int], rank: int) -> Problem:
    """The problem as a rank sees it; whatever the padding of logits and of teachers holds."""

    def of(tensors: dict[str, Tensor], padding: float) -> dict[str, Tensor]:
        own = {
            name: cut(x, widths, rank, DIMS[name], padding if name == "logits" else 0.0)
            for name, x in tensors.items()
            if name in DIMS
        }
        return {**tensors, **own}

    lo, end = sum(widths[:rank]), p.recipe.vocab
    others = [replace(other, given=of(other.given, 50.0)) for other in p.others]
    return replace(p, given=of(p.given, math.nan), others=others, columns=slice(min(lo, end), min(lo + widths[rank], end)))


def without_padding(found: Answer, p: Problem) -> Answer:
    """Its gradient is 0."""
    width, kept = p.columns.stop - p.columns.start, dict(found.gradients)
    for name in kept.keys() & DIMS.keys():
        assert not kept[name].narrow(DIMS[name], width, kept[name].shape[DIMS[name]] - width).any(), name
        kept[name] = kept[name].narrow(DIMS[name], 0, width)
    return replace(found, gradients=kept)


def everywhere(values: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return found


def check_any_cut(rank: int, ranks: int) -> None:
    recipes = covering(ranks=ranks, seed=3)
    for i, recipe in enumerate(recipes if WHOLE_PRODUCTS else recipes[:: 5 * ranks]):
        p, kinds = problem(recipe), list(widths_of(recipe.vocab, ranks).values())
        for widths in kinds if WHOLE_PRODUCTS else [kinds[i % 3]]:
            mine, shard = part(p, widths, rank), VocabShard.of(torch.empty(widths[rank], 1), vocab=recipe.vocab)
            found = run(mine, backend=BACKENDS[i % 2], shard=shard)
            compare(mine, without_padding(found, mine))
            assert all(same_bits(x, theirs[name]) for theirs in everywhere(found.values) for name, x in found.values.items()), (
                recipe
            )


LOSS = Recipe(source="hidden", objective="grpo, k3 and entropy", vocab=V, bias="plain", lengths=(7, 4, 2, 0, 6, 1, 5, 3))


def check_sparse_gradients(rank: int, ranks: int) -> None:
    """The ranks draw what one process draws from whole rows."""
    p, options = problem(LOSS), {"sparse": Sparse(1 / 16, 3)}
    for backend in BACKENDS:
        expected = run(p, backend=backend, **options)
        for widths, shard in cuts(rank, ranks):
            mine = part(p, widths, rank)
            found = without_padding(run(mine, backend=backend, shard=shard, **options), mine)
            for name, x in found.gradients.items():
                want = expected.gradients[name] if name == "hidden" else expected.gradients[name][mine.columns]
                torch.testing.assert_close(x, want, rtol=1e-4, atol=1e-5)


def check_dtensors(rank: int, ranks: int) -> None:
    """The head that parallelize_module has cut, hidden states that are replicated, logits that are a DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    p = problem(LOSS)
    model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(H, V)})
    with torch.no_grad():
        model["lm_head"].weight.copy_(p.given["weight"])
        model["lm_head"].bias.copy_(p.given["bias"])
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    head = {"weight": model["lm_head"].weight, "bias": model["lm_head"].bias}
    shard = VocabShard.of(head["weight"])
    assert shard.start == min(rank * -(-V // ranks), V) and shard.vocab == V
    replicated = distribute_tensor(p.given["hidden"], mesh, [Replicate()])
    of_logits = problem(replace(LOSS, source="logits", bias="none"))
    logits = distribute_tensor(of_logits.given["logits"], mesh, [Shard(2)])
    partial = VocabShard(shard.start, V, reduce_hidden=False)
    for problem_of, given, own in (
        (p, head, shard), (p, {**head, "hidden": replicated}, shard), (p, {**head, "hidden": replicated}, partial),
        (of_logits, {"logits": logits}, VocabShard.of(logits, dim=-1)),
    ):  # fmt: skip
        found = run(replace(problem_of, given={**problem_of.given, **given}), backend="auto", shard=own)
        whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.gradients.items()}
        compare(problem_of, replace(found, gradients=whole))
    refused(lambda: VocabShard.of(distribute_tensor(p.given["weight"], mesh, [Shard(1)])), "must be cut by Shard(0)")
    refused(lambda: run(replace(p, given={**p.given, **head})), "shard=VocabShard.of(weight)")


def refused(call: Callable[[], Any], words: str) -> None:
    """By every rank, before anything is exchanged."""
    try:
        call()
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def chunks_of(rows: int) -> list[int]:
    return [x.numel() for x in torch.arange(rows).tensor_split(-(-rows // 10))]


def check_collectives(rank: int, ranks: int) -> None:
    """One exchange a call from logits, one a chunk from hidden states and another for sets, one sum of d_hidden, whatever the parts
    are."""
    many, start = ranks > 1, linear.Engine.__init__

    def small(self: linear.Engine, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.chunk_rows = 10

    plain = replace(LOSS, objective="dapo, k3", bias="none")
    of_logits = replace(plain, source="logits")
    n, trained = problem(plain).ids.numel(), int(problem(plain).trained.sum())
    chunks = chunks_of(trained)
    d_hidden = [4 * problem(plain).given["hidden"].numel()] * many
    some = problem(replace(plain, kept="some"))
    without = sum(not ids and bool(on) for ids, on in zip(some.sets or [], some.trained, strict=True))
    for widths, shard in cuts(rank, ranks):
        for recipe, gathered, reduced in (
            (of_logits, [16 * n], []),
            (replace(of_logits, door="logprobs", also="nothing", objective="dapo"), [12 * n], []),
            (replace(of_logits, kept="some"), [16 * n, 16 * n], []),
            (replace(of_logits, kept="all"), [16 * n], []),
            (plain, [16 * x for x in chunks], d_hidden),
            (replace(plain, door="logprobs", also="nothing", objective="dapo"), [12 * x for x in chunks], d_hidden),
            (replace(plain, kept="all"), [16 * n], d_hidden),
            (replace(plain, kept="some"), [16 * n, *(16 * x for x in chunks_of(without))], d_hidden),
        ):
            with counted() as sizes, mock.patch.object(linear.Engine, "__init__", small):
                run(part(problem(recipe), widths, rank), backend="auto", shard=shard)
            assert sorted(sizes["all_gather"]) == sorted(gathered * many), (recipe, sizes)
            assert sizes["all_reduce"] == reduced, (recipe, sizes)


def check_equal_chunks(rank: int, ranks: int) -> None:
    """Ranks of unequal width take the same number of chunks, or they would wait for each other forever."""
    p = problem(replace(LOSS, door="logprobs", objective="dapo", lengths=(700,)))
    with mock.patch.dict(blocks.CHUNK_BYTES, cpu=128 * 4 * V):
        for widths, shard in cuts(rank, ranks):
            mine = part(p, widths, rank)
            compare(mine, without_padding(run(mine, shard=shard), mine))


def each_way(rank: int, ranks: int) -> Iterator[tuple[list[int], Options]]:
    """However the vocabulary is cut, and with each backend."""
    for widths, shard in cuts(rank, ranks):
        for backend in BACKENDS:
            yield widths, Options(shard=shard, backend=backend)


def check_misuse_shows(rank: int, ranks: int) -> None:
    """NaN on one rank, or parts that overlap, are no finite log-prob on any."""
    logits, targets = torch.randn(9, V, generator=torch.Generator().manual_seed(4)), torch.arange(9)
    for widths, options in each_way(rank, ranks):
        for broken, columns in ((0, slice(None)), (0, slice(1, 2)), (ranks - 1, slice(None))):
            if widths[broken] > 1 and sum(widths[:broken]) < V:
                mine = cut(logits, widths, rank, -1)
                mine[:, columns] = torch.nan if rank == broken else mine[:, columns]
                logps, entropy = token_logprobs(mine, targets, entropy=True, options=options)
                assert logps.isnan().all() and entropy is not None and entropy.isnan().all()
    if ranks > 1:
        assert token_logprobs(logits, targets, options=Options(shard=VocabShard(0, V)))[0].isnan().all()


def check_extremes(rank: int, ranks: int) -> None:
    """Parts that hold only -inf, a peaked row, logits of 1e4, a row of only -inf; the largest ids count from the first column of
    the vocabulary, whoever holds them, and of equal ones it is the lowest."""
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(4))
    logits[0, 20:] = logits[1, :50] = logits[6] = -torch.inf
    logits[2] *= 1e4
    logits[3, 7] = 80.0
    logits[4, [9, 50]] = 9.0
    targets = torch.tensor([3, 55, int(logits[2].argmax()), 7, 1, 60, 5])
    log_p = logits.double().log_softmax(-1)
    entropy = -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(-1)
    right = {"logps": log_p.gather(1, targets[:, None])[:, 0], "entropy": entropy, "top_prob": log_p.exp().amax(1)}
    for widths, options in each_way(rank, ranks):
        found = token_logprobs(
            cut(logits, widths, rank, -1), targets, entropy=True, also=("top_id", "top_prob"), options=options
        )
        for name, x in {"logps": found.logps, "entropy": found.entropy, "top_prob": found.also["top_prob"]}.items():
            assert x[6].isnan()
            torch.testing.assert_close(x[:6].double(), right[name][:6], rtol=1e-6, atol=2e-6)
        assert found.also["top_id"][:6].tolist() == logits[:6].argmax(1).tolist()


def check_nothing_to_do(rank: int, ranks: int) -> None:
    """No rows, none that is trained, none with more than one id: exact zeros, and no rank waits."""
    objective = Objective(beta=0.1)
    for widths, shard in cuts(rank, ranks):
        for n, on, sets in (
            (0, True, None),
            (3, False, None),
            (0, True, []),
            (3, False, [[1], [2, 60], []]),
            (3, True, [[60], [0], [33]]),
        ):
            fields: dict[str, Any] = {} if sets is None else {"kept": TokenSets.from_lists(sets)}
            targets, zeros = torch.tensor([60, 0, 33])[:n] if on else torch.full((n,), -100), torch.zeros(n)
            batch = TokenBatch(targets, zeros + 1, mask=torch.full((n,), on), old_logps=zeros, ref_logps=zeros, **fields)
            hidden, weight = torch.ones(n, H, requires_grad=True), cut(torch.ones(V, H), widths, rank, 0).requires_grad_()
            logits = torch.full((n, widths[rank]), 0.0 if sets else torch.nan, requires_grad=True)
            for out in (
                linear_grpo_loss(hidden, weight, batch, objective, options=Options(shard=shard)),
                grpo_loss(logits, batch, objective, options=Options(shard=shard)),
            ):
                out.loss.backward()
                assert not out.logps.any() and not out.entropy.any()
            for leaf in (hidden, weight, logits):
                assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


def check_bad_input(rank: int, ranks: int) -> None:
    widths = widths_of(V, ranks)["padded"]
    shard, hidden, weight = (
        VocabShard.of(torch.empty(widths[rank], 1), vocab=V),
        torch.zeros(2, H),
        torch.zeros(widths[rank], H),
    )
    good, padding = torch.tensor([0, 1]), torch.tensor([0, V])  # of the vocabulary, which is no token
    sets, options = TokenSets.from_lists([[0], [1, V]]), Options(missing="raise")
    lacking = TokenSets.from_lists([[0], [5]])
    for call, words in (
        (lambda: linear_logprobs(hidden, weight, padding, options=Options(shard=shard)), f"outside the vocabulary [0, {V})"),
        (lambda: linear_logprobs(hidden, weight, good, kept=sets, options=Options(shard=shard)), f"kept holds id {V} in row 1: it is outside of the vocabulary"),
        (lambda: linear_logprobs(hidden, weight, good, kept=lacking, options=replace(options, shard=shard)), "is not in its kept set"),
        (lambda: linear_logprobs(hidden, weight, good, options=Options(shard=3)), "shard=3: pass a VocabShard"),  # type: ignore[arg-type]
        (lambda: VocabShard(-1, 5), "start=-1"), (lambda: VocabShard(0, 0), "vocab=0"),
        (lambda: VocabShard(0, 5, reduce_hidden=2), "reduce_hidden=2"),  # type: ignore[arg-type]
        (lambda: VocabShard.of(weight, vocab=sum(widths) + 1), f"the ranks hold {sum(widths)} rows in all"),
    ):  # fmt: skip
        refused(call, words)


def check_managed_parameters(rank: int, ranks: int) -> None:
    """What FSDP2 or replicate() holds is no shard of a vocabulary, and no weight of one's own, however it looks."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    hidden, targets = torch.randn(3, H), torch.tensor([0, 1, 2])
    sharded, replicated = (torch.nn.Sequential(torch.nn.Linear(H, V)) for _ in range(2))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)))
    replicate(replicated)
    weight, other = sharded[0].weight, replicated[0].weight
    calls = [
        lambda: VocabShard.of(weight),
        lambda: VocabShard.of(weight.detach()),
        lambda: linear_logprobs(hidden, weight, targets),
    ]
    calls.append(lambda: linear_logprobs(hidden, weight, targets, options=Options(shard=VocabShard(0, V))))
    if hasattr(other, "placements"):
        calls.append(lambda: linear_logprobs(hidden, other, targets))
    for call in calls:
        refused(call, "call FusedLMHead")


# ---- in pytest's own process


@pytest.mark.parametrize("check", checks_of(__name__))
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_ranks(on_ranks: Callable[..., dict[str, str]], ranks: int, check: str) -> None:
    assert on_ranks(__name__, ranks)[check] == "ok", on_ranks(__name__, ranks)[check]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_products(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every recipe with each way to cut its vocabulary."""
    run_whole_products(__name__, ranks, tmp_path, monkeypatch)


def test_no_part_has_the_target() -> None:
    partials = torch.tensor([[[0.0], [1.0], [torch.nan]], [[1.0], [2.0], [torch.nan]]])
    assert merge(partials, ("max", "sum", "target"), None).logps.isnan().all()


def test_a_shards_backend_takes_a_range_of_rows(backend: str) -> None:
    """As every backend does: the block by block visits of a loss ask for it. Padding of those rows becomes 0, others stay."""
    vocab, n = 61, 12
    module = on_shard(backends.load(backend).Kernels(), VocabShard(0, vocab - 3))  # three columns are padding
    r = Rows(torch.randn(2, 6, vocab), targets=torch.randint(vocab - 3, (n,)))
    (whole, gradient), out = visited(module, r), torch.full_like(r.logits, torch.nan)
    part, _ = visited(module, r, out, (5, n - 4))
    assert all(torch.equal(x, whole[name][5 : n - 4]) for name, x in part.items())
    all_rows, some_rows = gradient.view(n, vocab), out.view(n, vocab)
    assert torch.equal(some_rows[5:-4], all_rows[5:-4]) and not all_rows[:, -3:].any() and all_rows.abs().max() > 0.1
    assert some_rows[:5].isnan().all() and some_rows[-4:].isnan().all()
