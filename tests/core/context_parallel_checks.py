"""Sequences whose tokens lie on several ranks, and batches over data-parallel ranks: run by test_context_parallel.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from grpo_kernels import LossOutput, Objective, Options, TokenBatch, grpo_loss, linear_grpo_loss
from grpo_kernels.distributed import VocabShard, global_normalizer
from grpo_kernels.formulas.filters import EntropyQuantile
from grpo_kernels.losses import objective_loss
from grpo_kernels.rewards.corrections import importance_weights, off_policy_sequence_mask, rejection_mask
from support.collectives import counted
from support.doors import batch_of, compare, exact_of, objective_of, run
from support.objectives import OBJECTIVES
from support.oracle import Answer
from support.processes import WHOLE_PRODUCTS
from support.recipes import KINDS, Problem, Recipe, legal, problem, sliced

Tensor = torch.Tensor
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


def agree(p: Problem, mine: Tensor, **fields: Any) -> None:
    compare(p, together(p, run(part(p, mine, **fields)), mine))


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


def check_a_mask_that_was_written(rank: int, ranks: int) -> None:
    """What the ranks have told each other of a batch is told again where all of them wrote to what it depends on."""
    g = torch.Generator().manual_seed(rank)
    logits, mask = torch.randn(6, 11, generator=g), torch.ones(6, dtype=torch.bool)
    fields = {
        "cu_seqlens": torch.tensor([0, 4, 6]),
        "old_logps": torch.randn(6, generator=g),
        "context_group": dist.group.WORLD,
    }

    def batch() -> TokenBatch:
        return TokenBatch(torch.zeros(6).long(), torch.tensor([[1.0], [-2.0]]), mask=mask, **fields)  # type: ignore[arg-type]

    objective, kept = Objective.preset("gspo"), batch()
    before = grpo_loss(logits, kept, objective, options=Options(backend="eager")).loss
    mask[1] = False
    after = grpo_loss(logits, kept, objective, options=Options(backend="eager")).loss
    assert before != after and torch.equal(after, grpo_loss(logits, batch(), objective, options=Options(backend="eager")).loss)


def check_each_aggregate_of_sequence_ratios(rank: int, ranks: int) -> None:
    """Also a mean over groups: as one rank has it."""
    p = problem(recipe("dapo, k3"))
    for aggregate in AGGREGATES:
        objective = Objective(level="sequence", aggregate=aggregate, beta=0.2, entropy_coef=0.1, max_tokens=9)
        whole = p.given["logits"].clone().requires_grad_()
        expected = grpo_loss(whole, batch_of(p, groups=GROUPS), objective)
        expected.loss.backward()
        for owner in owners(ranks):
            mine = owner == rank
            q = part(p, mine)
            leaf = q.given["logits"].clone().requires_grad_()
            out = grpo_loss(leaf, batch_of(q), objective)
            out.loss.backward()
            found = together(p, Answer({"loss": out.loss.detach()}, {"logits": leaf.grad}), mine)  # type: ignore[dict-item]
            torch.testing.assert_close(found.gradients["logits"], whole.grad, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(found.values["loss"], expected.loss.detach(), rtol=2e-5, atol=1e-6)


def check_from_log_probs(rank: int, ranks: int) -> None:
    p = problem(recipe("rloo"))
    objective, logps = objective_of(p.recipe), exact_of(p.recipe)[0].values["logps"].float().view(p.shape)
    whole = logps.clone().requires_grad_()
    objective_loss(whole, batch_of(p), objective).loss.backward()
    for owner in owners(ranks):
        mine = owner == rank
        leaf = logps[mine].clone().requires_grad_()
        objective_loss(leaf, batch_of(part(p, mine)), objective).loss.backward()
        found = together(p, Answer({}, {"logits": leaf.grad}), mine)  # type: ignore[dict-item]
        torch.testing.assert_close(found.gradients["logits"], whole.grad, rtol=1e-5, atol=1e-7)


def check_global_normalizer(rank: int, ranks: int) -> None:
    """Micro-batches of shared sequences: one denominator over all of them and all ranks."""
    p = problem(recipe("dapo, k3"))
    whole = batch_of(p, groups=GROUPS, advantages=p.fields["advantages"])
    for aggregate in AGGREGATES:
        objective = Objective(
            level="sequence", aggregate=aggregate, beta=0.2, max_tokens=9, count_empty=aggregate != "group-mean"
        )
        expected = float(global_normalizer(objective, [whole, whole], reduce=False))
        for owner in owners(ranks):
            batch = batch_of(part(p, owner == rank))
            assert abs(float(global_normalizer(objective, [batch, batch])) - expected) <= 1e-6 * expected, aggregate


def check_metrics_are_no_collective(rank: int, ranks: int) -> None:
    """Metrics need no other rank: one rank may read them alone."""
    for name in ("gspo", "off-policy sequences"):
        p = problem(recipe(name))
        q = part(p, owners(ranks)[0] == rank)
        out = grpo_loss(q.given["logits"], batch_of(q), objective_of(p.recipe))
        if rank == 0:
            assert all(x.isfinite() for x in out.metrics.values())
        whole = grpo_loss(p.given["logits"], batch_of(p), objective_of(p.recipe))
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


def check_corrections(rank: int, ranks: int) -> None:
    p = problem(recipe("dapo, k3"))
    whole, logps = batch_of(p), p.seen["old_logps"].float() - 0.3
    makers = {
        "product": lambda b, now: importance_weights(b, level="sequence", high=2.0),
        "geometric": lambda b, now: importance_weights(b, level="geometric", mode="mask", low=0.5, high=2.0),
        "largest": lambda b, now: rejection_mask(b, over="max", high=3.0),
        "smallest": lambda b, now: rejection_mask(b, over="min", low=0.5),
        "mean": lambda b, now: rejection_mask(b, over="mean", low=0.8, high=1.5),
        "off-policy": lambda b, now: off_policy_sequence_mask(b, now, delta=0.1),
    }
    for kind, owner in enumerate(owners(ranks)):
        mine = owner == rank
        batch = batch_of(part(p, mine))
        for name, make in makers.items():
            expected = make(whole, logps)[mine]
            torch.testing.assert_close(make(batch, logps[mine]), expected, rtol=1e-6, atol=0, msg=f"{name}, {kind}")


def check_masked_rank(rank: int, ranks: int) -> None:
    """A rank whose tokens are all masked and hold anything, and a batch in which all tokens are masked."""
    p, owner = problem(recipe("gspo")), owners(ranks)[0]
    mine, objective = owner == rank, objective_of(p.recipe)
    for mask in ((owner > 0) & p.trained, torch.zeros_like(mine)):
        fields = {**p.fields, "mask": mask}
        logits = torch.where(mask[:, None], p.given["logits"], torch.nan)
        whole = logits.clone().requires_grad_()
        expected = grpo_loss(whole, TokenBatch(p.targets, **fields), objective)
        expected.loss.backward()
        q = part(replace(p, given={"logits": logits}, fields=fields), mine)
        leaf = q.given["logits"].clone().requires_grad_()
        out = grpo_loss(leaf, batch_of(q), objective)
        out.loss.backward()
        assert leaf.grad is not None and (rank != 0 or (float(out.loss) == 0.0 and not leaf.grad.any()))
        found = together(p, Answer({"loss": out.loss.detach()}, {"logits": leaf.grad}), mine)
        torch.testing.assert_close(found.values["loss"], expected.loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.gradients["logits"], whole.grad, rtol=1e-5, atol=1e-7)


def check_data_parallel_shards(rank: int, ranks: int) -> None:
    """Whole sequences on each rank, of unequal numbers of tokens, one rank's without any: the sum over ranks is the batch."""
    cuts = {2: [0, 3, 8], 4: [0, 2, 3, 4, 8]}[ranks]
    for name in ("dapo, k3", "grpo, k3 and entropy", "gspo", "luspo", "off-policy sequences"):
        p = problem(recipe(name))
        offsets, objective = p.fields["cu_seqlens"].tolist(), objective_of(p.recipe)
        lo, hi = (offsets[cut] for cut in cuts[rank : rank + 2])
        mine, some = torch.zeros(len(p.ids), dtype=torch.bool), slice(*cuts[rank : rank + 2])
        mine[lo:hi] = True
        q = part(p, mine, context_group=None, groups=None)
        own = {"cu_seqlens": torch.tensor(offsets[cuts[rank] : cuts[rank + 1] + 1]) - lo, "groups": None}
        batch = batch_of(
            q,
            **own,
            advantages=p.fields["advantages"][mine]
            if len(p.fields["advantages"]) == len(mine)
            else p.fields["advantages"][some],
        )
        leaf = q.given["logits"].clone().requires_grad_()
        with counted() as sizes:
            out = grpo_loss(leaf, batch, objective, normalizer=global_normalizer(objective, batch))
            out.loss.backward()
        assert sizes == {"all_gather": [], "all_reduce": [24]}, sizes
        compare(p, together(p, Answer({"loss": out.loss.detach()}, {"logits": leaf.grad}), mine))  # type: ignore[dict-item]


def check_quantile_over_ranks(rank: int, ranks: int) -> None:
    """The one filter that looks at the whole batch has a group of its own."""
    p = problem(recipe("entropy quantile, bonus of its own"))
    quantile = (EntropyQuantile(0.6, process_group=dist.group.WORLD),)
    objective = replace(objective_of(p.recipe), filters=quantile)
    for owner in owners(ranks):
        mine = owner == rank
        q = part(p, mine)
        leaf = q.given["logits"].clone().requires_grad_()
        out = grpo_loss(leaf, batch_of(q), objective)
        out.loss.backward()
        compare(p, together(p, Answer({"loss": out.loss.detach()}, {"logits": leaf.grad}), mine))  # type: ignore[dict-item]


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
