"""What several ranks share: sequences whose tokens lie on them, batches in data-parallel shards, and parts of a vocabulary, against
the float64 answers of whole problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_kernels import LossOutput, Objective, Options, TokenBatch, grpo_loss, linear_grpo_loss
from grpo_kernels.distributed import VocabShard, global_normalizer
from grpo_kernels.formulas.filters import EntropyQuantile
from grpo_kernels.losses import objective_loss
from grpo_kernels.rewards.corrections import importance_weights, off_policy_sequence_mask, rejection_mask
from support.collectives import counted
from support.doors import batch_of, call_of, compare, exact_of, objective_of, run
from support.objectives import OBJECTIVES
from support.oracle import Answer
from support.processes import WHOLE_PRODUCTS, run_whole_products
from support.recipes import KINDS, Problem, Recipe, covering, cut, legal, problem, sliced

Tensor = torch.Tensor
MODULE = "test_ranks"
LENGTHS = (7, 4, 2, 0, 6, 1, 5, 3)
GROUPS = torch.tensor([0, 0, 1, 2, 2, 3, 4, 4])
AGGREGATES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "group-mean", "token-sum", "constant")
WHOLE_BATCH = ("clip-cov", "kl-cov", "entropy quantile, bonus of its own")  # they look at all tokens


def recipe(name: str, **changes: Any) -> Recipe:
    """With the first seed for which no number lies at a bound."""
    others = ("near",) if "exact" in name else ()
    plain = {"objective": name, "layout": "packed", "lengths": LENGTHS, "others": others, **changes}
    seeds = (legal(Recipe(**plain, seed=i)) for i in range(9))
    return next(r for r in seeds if exact_of(r)[0].clear)


def owners(ranks: int) -> list[Tensor]:
    """The rank of each token: in contiguous pieces, in zigzag within each sequence, all on the last."""
    place = torch.cat([torch.arange(n) for n in LENGTHS])
    n = len(place)
    contiguous = torch.searchsorted(torch.linspace(0, n, ranks + 1)[1:].long(), torch.arange(n), right=True).clamp(
        max=ranks - 1
    )
    zigzag = torch.minimum(place % (2 * ranks), 2 * ranks - 1 - place % (2 * ranks))
    return [contiguous, zigzag, torch.full((n,), ranks - 1)]


def part(p: Problem, mine: Tensor, **fields: Any) -> Problem:
    """A packed problem as a rank sees it that has the tokens `mine`: of each sequence those that are its own."""
    n, at = len(mine), mine.nonzero()[:, 0].tolist()

    def some(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: value if name in ("weight", "bias") else some(value) for name, value in x.items()}
        return x[mine] if isinstance(x, Tensor) and x.dim() and len(x) == n else x

    counts = torch.stack([mine[lo:hi].sum() for lo, hi in pairwise(p.fields["cu_seqlens"].tolist())])
    given = {k: some(v) for k, v in p.fields.items()}
    if p.fields["advantages"].shape == (len(LENGTHS),):
        given["advantages"] = p.fields["advantages"][:, None]  # as many tokens as sequences would read [B] as one a token
    given["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
    given |= {"groups": given.get("groups", GROUPS), "context_group": dist.group.WORLD, **fields}
    others = [
        replace(
            o,
            rows=o.rows[mine],
            given=some(o.given),
            weight=some(o.weight),
            ids=None if o.ids is None else [o.ids[i] for i in at],
        )
        for o in p.others
    ]
    sets = None if p.sets is None else [p.sets[i] for i in at]
    return replace(
        p, given=some(p.given), targets=p.targets[mine], fields=given, sets=sets, others=others, transform=some(p.transform),
        temperature=some(p.temperature),
    )  # fmt: skip


def together(p: Problem, found: Answer, mine: Tensor, group: Any = None) -> Answer:
    """What all ranks found: rows in the order of the whole problem, all else summed."""

    def put(x: Tensor, rows: bool) -> Tensor:
        whole = torch.zeros(len(mine), *x.shape[1:]) if rows else x.detach().clone()
        if rows:
            whole[mine] = x
        dist.all_reduce(whole, group=group)
        return whole

    return Answer(
        {name: put(x, name != "loss") for name, x in found.values.items()},
        {name: put(x, name in ("logits", "hidden")) for name, x in found.gradients.items()},
    )


def agree(p: Problem, mine: Tensor, fields: dict[str, Any] | None = None, **options: Any) -> None:
    compare(p, together(p, run(part(p, mine, **(fields or {})), **options), mine))


def same_as_whole(p: Problem, mine: Tensor, objective: Objective | None = None) -> None:
    """What the ranks find is what one finds that has all."""
    found, whole = together(p, run(part(p, mine), objective=objective), mine), run(p, objective=objective)
    for kind in ("values", "gradients"):
        for name, x in getattr(whole, kind).items():
            torch.testing.assert_close(getattr(found, kind)[name], x, rtol=2e-5, atol=1e-6)


def check_every_objective(rank: int, ranks: int) -> None:
    """Any cut gives the loss and gradients of whole sequences, with the default normaliser, from logits and from hidden states."""
    for i, name in enumerate(name for name in OBJECTIVES if name not in WHOLE_BATCH):
        if ranks == 4 and name not in KINDS and not WHOLE_PRODUCTS:
            continue  # which two ranks have
        p, cuts = problem(recipe(name, source=("logits", "hidden")[i % 2])), owners(ranks)
        for owner in cuts if i % 4 == 0 else [cuts[i % 2]]:
            agree(p, owner == rank)


def check_sets_and_memory(rank: int, ranks: int) -> None:
    """A rank has the sets of its own rows: beside rows without one, of targets that they lack; and memory to add to."""
    for name in ("gspo, k3 by the ratio", "off-policy sequences", "grpo, k3 and entropy", "gspo, exact"):
        for more in ({}, {"source": "hidden", "weight_grad": "float32"}):
            p = problem(recipe(name, kept="some", others=("whole",) if "exact" in name else (), **more))
            for owner in owners(ranks):
                agree(p, owner == rank)


def check_each_aggregate_of_sequence_ratios(rank: int, ranks: int) -> None:
    """Also a mean over groups: as one rank has it. And one denominator over micro-batches of shared sequences."""
    p = problem(recipe("dapo, k3"))
    p = replace(p, fields=p.fields | {"groups": GROUPS})
    whole = batch_of(p)
    for aggregate in AGGREGATES:
        terms = {"beta": 0.2, "entropy_coef": 0.1, "max_tokens": 9, "count_empty": aggregate != "group-mean"}
        objective = Objective(level="sequence", aggregate=aggregate, **terms)
        expected = float(global_normalizer(objective, [whole, whole], reduce=False))
        for owner in owners(ranks):
            same_as_whole(p, owner == rank, objective)
            batch = batch_of(part(p, owner == rank))
            assert abs(float(global_normalizer(objective, [batch, batch])) - expected) <= 1e-6 * expected, aggregate


def check_masked_rank(rank: int, ranks: int) -> None:
    """A rank whose tokens are all masked and hold anything, and a batch in which all tokens are masked."""
    p, owner = problem(recipe("gspo")), owners(ranks)[0]
    for mask in ((owner > 0) & p.trained, torch.zeros_like(p.trained)):
        logits = torch.where(mask[:, None], p.given["logits"], torch.nan)
        q = replace(p, given={"logits": logits}, fields=p.fields | {"mask": mask})
        same_as_whole(q, owner == rank)
        found = run(part(q, owner == rank))
        assert rank != 0 or not (found.values["loss"] or found.gradients["logits"].any())


def check_quantile_over_ranks(rank: int, ranks: int) -> None:
    """The one filter that looks at the whole batch has a group of its own."""
    p = problem(recipe("entropy quantile, bonus of its own"))
    quantile = (EntropyQuantile(0.6, process_group=dist.group.WORLD),)
    for owner in owners(ranks):
        agree(p, owner == rank, objective=replace(objective_of(p.recipe), filters=quantile))


def check_from_log_probs(rank: int, ranks: int) -> None:
    p = problem(recipe("rloo"))
    objective, logps = objective_of(p.recipe), exact_of(p.recipe)[0].values["logps"].float().view(p.shape)
    whole = logps.clone().requires_grad_()
    objective_loss(whole, batch_of(p), objective).loss.backward()
    for owner in owners(ranks):
        mine = owner == rank
        leaf = logps[mine].clone().requires_grad_()
        objective_loss(leaf, batch_of(part(p, mine)), objective).loss.backward()
        assert leaf.grad is not None and whole.grad is not None
        torch.testing.assert_close(leaf.grad, whole.grad[mine], rtol=1e-5, atol=1e-7)


def check_a_mask_that_was_written(rank: int, ranks: int) -> None:
    """What the ranks have told each other of a batch is told again where all of them wrote to what it depends on."""
    g = torch.Generator().manual_seed(rank)
    logits, mask = torch.randn(6, 11, generator=g), torch.ones(6, dtype=torch.bool)
    fields: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 4, 6]), "old_logps": torch.randn(6, generator=g), "mask": mask}

    def batch() -> TokenBatch:
        return TokenBatch(torch.zeros(6).long(), torch.tensor([[1.0], [-2.0]]), context_group=dist.group.WORLD, **fields)

    def loss(of: TokenBatch) -> Tensor:
        return grpo_loss(logits, of, Objective.preset("gspo"), options=Options(backend="eager")).loss

    kept = batch()
    before = loss(kept)
    mask[1] = False
    assert before != loss(kept) and torch.equal(loss(kept), loss(batch()))


def check_metrics_are_no_collective(rank: int, ranks: int) -> None:
    """Metrics need no other rank: one rank may read them alone."""
    for name in ("gspo", "off-policy sequences"):
        p = problem(recipe(name))
        q = part(p, owners(ranks)[0] == rank)
        out, whole = (call_of(x)(x.given["logits"]) for x in (q, p))
        if rank == 0:
            assert all(x.isfinite() for x in out.metrics.values())
        dist.barrier()
        means = (out.metrics["ratio_mean"] * out.metrics["tokens"]).clone()
        dist.all_reduce(means)
        torch.testing.assert_close(means, whole.metrics["ratio_mean"] * whole.metrics["tokens"], rtol=1e-5, atol=0)


def check_collectives(rank: int, ranks: int) -> None:
    """Lengths once a batch, from hidden states contributing sequences as well; the ratio and its slope once a loss; none at token
    level."""
    p = problem(recipe("dapo, k3"))
    q, gspo = part(p, owners(ranks)[0] == rank), Objective(level="sequence", aggregate="token-sum")

    def from_hidden(leaf: Tensor, batch: TokenBatch, objective: Objective) -> LossOutput:
        return linear_grpo_loss(leaf, torch.eye(leaf.shape[-1]), batch, objective)

    for loss, once_a_batch in ((grpo_loss, 1), (from_hidden, 2)):
        leaf, batch = q.given["logits"].clone().requires_grad_(), batch_of(q)
        for first in (True, False):
            with counted() as sizes:
                out = loss(leaf, batch, gspo)
                out.loss.backward()
                assert out.metrics["ratio_mean"] > 0
            assert sizes == {"all_gather": [], "all_reduce": [8 * len(LENGTHS)] * (2 + once_a_batch * first)}, sizes
    with counted() as sizes:
        grpo_loss(leaf, batch_of(q), Objective(aggregate="token-mean"), normalizer=20.0).loss.backward()
    assert sizes == {"all_gather": [], "all_reduce": []}, sizes


#: Corrections that look at whole sequences.
CORRECTIONS: dict[str, Callable[[TokenBatch, Tensor], Tensor]] = {
    "product": lambda b, now: importance_weights(b, level="sequence", high=2.0),
    "geometric": lambda b, now: importance_weights(b, level="geometric", mode="mask", low=0.5, high=2.0),
    "largest": lambda b, now: rejection_mask(b, over="max", high=3.0),
    "smallest": lambda b, now: rejection_mask(b, over="min", low=0.5),
    "mean": lambda b, now: rejection_mask(b, over="mean", low=0.8, high=1.5),
    "off-policy": lambda b, now: off_policy_sequence_mask(b, now, delta=0.1),
}


def check_corrections(rank: int, ranks: int) -> None:
    p = problem(recipe("dapo, k3"))
    whole, logps = batch_of(p), p.seen["old_logps"].float() - 0.3
    for owner in owners(ranks):
        mine = owner == rank
        batch = batch_of(part(p, mine))
        for name, make in CORRECTIONS.items():
            torch.testing.assert_close(make(batch, logps[mine]), make(whole, logps)[mine], rtol=1e-6, atol=0, msg=name)


def check_data_parallel_shards(rank: int, ranks: int) -> None:
    """Whole sequences on each rank, of unequal numbers of tokens, one rank's without any: the sum over ranks is the batch."""
    cuts = {2: [0, 3, 8], 4: [0, 2, 3, 4, 8]}[ranks]
    for name in ("dapo, k3", "grpo, k3 and entropy", "gspo", "luspo", "off-policy sequences"):
        p = problem(recipe(name))
        offsets, own = p.fields["cu_seqlens"], slice(*cuts[rank : rank + 2])
        lo, hi = (int(offsets[cut]) for cut in cuts[rank : rank + 2])
        mine = (torch.arange(len(p.ids)) >= lo) & (torch.arange(len(p.ids)) < hi)
        one_each = p.fields["advantages"].shape[0] == len(mine)
        fields = {"cu_seqlens": offsets[own.start : own.stop + 1] - lo, "groups": None, "context_group": None}
        q = part(p, mine, **fields, advantages=p.fields["advantages"][mine if one_each else own])
        with counted() as sizes:
            normalizer = float(global_normalizer(objective_of(p.recipe), batch_of(q)))
            found = run(replace(q, recipe=replace(q.recipe, normalizer=normalizer)))
        assert sizes == {"all_gather": [], "all_reduce": [24]}, sizes
        compare(p, together(p, found, mine))


def check_tensor_and_context_parallel(rank: int, ranks: int) -> None:
    """Half of the ranks share a vocabulary, the others the sequences."""
    if ranks != 4:
        return
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    context_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tp, cp, columns = tensor_groups[rank // 2], context_groups[rank % 2], (slice(0, 44), slice(44, 61))[rank % 2]
    for name in ("gspo", "grpo, k3 and entropy", "vespo"):
        p = problem(recipe(name))
        mine = owners(2)[1] == rank // 2
        q = part(p, mine, context_group=cp)
        q = replace(q, given=sliced(q.given, columns))
        found = together(p, run(q, shard=VocabShard.of(q.given["logits"], tp, dim=-1)), mine, cp)
        compare(replace(p, columns=columns), found)


# ---- a vocabulary that is cut

#: Axes of what ranks have to exchange.
EXCHANGED = "mask kept missing over others exact tail also weight_grad transform extreme spread".split()


def each_value(recipes: list[Recipe]) -> list[Recipe]:
    """Some of them, in which each value of these axes meets both sources."""
    met: set[tuple[str, str, Any]] = set()
    found = []
    for r in recipes:
        values = {(r.source, name, getattr(r, name)) for name in EXCHANGED}
        found += [r] if values - met else []
        met |= values
    return found


def check_parts_of_a_vocabulary(rank: int, ranks: int) -> None:
    """All ranks have the same values. With reduce_hidden=False each has its own gradient of hidden states, and they add up."""
    recipes = covering(ranks=2) if ranks == 2 else []
    for i, recipe in enumerate(recipes if WHOLE_PRODUCTS else each_value(recipes)):
        p = cut(problem(recipe), rank)
        shard = VocabShard(p.columns.start, recipe.vocab, reduce_hidden=i % 3 > 0)
        found = run(p, backend=("eager", "cpu")[i % 2], shard=shard)
        if "hidden" in found.gradients and not shard.reduce_hidden:
            share = found.gradients["hidden"].float()
            dist.all_reduce(share)
            found.gradients["hidden"] = share.to(p.clean["hidden"].dtype)
        compare(p, found)
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, found.values)
        assert all(torch.equal(x, everyone[0][name]) for name, x in found.values.items()), f"{recipe}: ranks disagree"


# ---- the tests


@pytest.mark.parametrize("check", [name for name in list(globals()) if name.startswith("check_")])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(on_ranks: Callable[..., dict[str, str]], ranks: int, check: str) -> None:
    assert on_ranks(MODULE, ranks)[check] == "ok", on_ranks(MODULE, ranks)[check]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_products(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every objective on four ranks, and every pair of a cut vocabulary."""
    run_whole_products(MODULE, ranks, tmp_path, monkeypatch)
