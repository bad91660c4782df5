"""Sequences whose tokens lie on several ranks, and batches over data-parallel ranks: run by test_context_parallel.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from grpo_kernels import LossOutput, Objective, TokenBatch, grpo_loss, linear_grpo_loss
from grpo_kernels.distributed import VocabShard, global_normalizer
from grpo_kernels.formulas.filters import EntropyQuantile
from grpo_kernels.losses import objective_loss
from grpo_kernels.objective import AGGREGATES
from grpo_kernels.rewards.corrections import importance_weights, off_policy_sequence_mask, rejection_mask
from support.cases import OBJECTIVES, Case, assert_no_worse, build, near_a_kink, pack, share_answers
from support.collectives import counted
from support.linear_cases import assert_near, build_linear
from support.oracle import Spec
from support.processes import WHOLE_PRODUCTS

Tensor = torch.Tensor
SINGLE = {"advantages"}  # fields with one value per sequence
GROUPS = torch.tensor([0, 0, 1, 2, 2, 3, 4, 4])


def owners(case: Case, ranks: int) -> dict[str, Tensor]:
    """The rank of each token [N] of a packed case, by pattern."""
    n = case.targets.numel()
    at, offsets = torch.arange(n), case.fields["cu_seqlens"].long()
    place = at - offsets[torch.searchsorted(offsets[1:], at, right=True)]
    return {
        "contiguous": torch.searchsorted(torch.linspace(0, n, ranks + 1)[1:].long(), at, right=True).clamp(max=ranks - 1),
        "zigzag": torch.minimum(place % (2 * ranks), 2 * ranks - 1 - place % (2 * ranks)),
        "all on the last": torch.full((n,), ranks - 1),
    }


def part(case: Case, mine: Tensor, **extra: Any) -> tuple[Tensor, TokenBatch]:
    """This rank's logits [n, V] and batch: of each sequence the tokens that are its own."""
    offsets = case.fields["cu_seqlens"].long()
    lengths = torch.stack([mine[lo:hi].sum() for lo, hi in pairwise(offsets)])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    fields = {k: v if k in SINGLE else v[mine] for k, v in case.fields.items() if k != "cu_seqlens"}
    fields["advantages"] = fields["advantages"][:, None]  # as many tokens as sequences would read [B] as one per token
    fields |= {"cu_seqlens": cu_seqlens, "groups": GROUPS, "context_group": dist.group.WORLD} | extra
    return case.logits[mine].clone().requires_grad_(), TokenBatch(**fields)


def parts(rank: int, ranks: int, case: Case) -> Iterator[tuple[str, Tensor]]:
    for name, owner in owners(case, ranks).items():
        yield name, owner == rank


def together(gradient: Tensor | None, mine: Tensor, shape: torch.Size) -> Tensor:
    """The gradients of all ranks' rows, put into the order of the whole case."""
    found = torch.zeros(shape)
    assert gradient is not None
    found[mine] = gradient
    dist.all_reduce(found)
    return found


def summed(x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


LOCAL = ("clip-cov", "kl-cov")  # they look at the whole batch


def objectives() -> dict[str, tuple[Objective, Spec]]:
    found = {}
    for name, (make, spec) in OBJECTIVES.items():
        if spec.surrogate not in LOCAL and spec.entropy_share is None:
            found[name] = (make(), spec)
    for aggregate in AGGREGATES:
        if aggregate != "group-mean":
            found[f"sequence level, {aggregate}"] = (
                Objective(level="sequence", aggregate=aggregate, beta=0.2, entropy_coef=0.1, max_tokens=9),
                Spec(level="sequence", aggregate=aggregate, beta=0.2, entropy_coef=0.1, max_tokens=9),
            )
    assert len(found) > 40
    return found


def check_every_objective(rank: int, ranks: int) -> None:
    """Any cut gives the loss and gradient of whole sequences, with the default normaliser."""
    case, specs = pack(build()), [spec for _, spec in objectives().values()]
    share_answers(partial(ask, spec) for spec in specs for ask in (case.expected, case.naive))
    for index, (name, (objective, spec)) in enumerate(objectives().items()):
        if ranks == 4 and index % 4 == 3 and not WHOLE_PRODUCTS:
            continue  # which two ranks have
        (exact, d_exact), (naive, d_naive) = case.expected(spec), case.naive(spec)
        if near_a_kink(exact):
            continue
        cuts = list(parts(rank, ranks, case))
        for kind, mine in cuts if index % 4 == 0 else [cuts[index % 2]]:
            leaf, batch = part(case, mine)
            out = grpo_loss(leaf, batch, objective)
            out.loss.backward()
            d_found = together(leaf.grad, mine, case.logits.shape)
            what = f"{name}, {kind}"
            assert_no_worse(summed(out.loss)[None], naive.loss[None], exact.loss[None], f"loss of {what}", tiny=2e-5)
            assert_no_worse(d_found, d_naive, d_exact, f"gradient of {what}")


def check_group_mean(rank: int, ranks: int) -> None:
    case, objective = pack(build()), Objective(aggregate="group-mean", beta=0.1)
    whole = case.logits.clone().requires_grad_()
    fields = case.fields | {"groups": GROUPS, "advantages": case.fields["advantages"][:, None]}
    grpo_loss(whole, TokenBatch(**fields), objective).loss.backward()
    assert whole.grad is not None
    for kind, mine in parts(rank, ranks, case):
        leaf, batch = part(case, mine)
        grpo_loss(leaf, batch, objective).loss.backward()
        assert_near(together(leaf.grad, mine, case.logits.shape), whole.grad, 1e-6, kind)


def check_padded_parts(rank: int, ranks: int) -> None:
    """Columns of a padded batch: a rank may have none."""
    case = build()
    columns = {2: [3, 4], 4: [2, 0, 4, 1]}[ranks]
    lo = sum(columns[:rank])
    piece = slice(lo, lo + columns[rank])
    for objective, spec in ((Objective.preset("gspo", beta=0.1), Spec(eps_low=3e-4, eps_high=4e-4, level="sequence", beta=0.1,
                             aggregate="seq-mean-token-mean")), (Objective(), Spec())):  # fmt: skip
        (exact, d_exact), (naive, d_naive) = case.expected(spec), case.naive(spec)
        fields = {k: v if k in SINGLE else v[:, piece] for k, v in case.fields.items()}
        leaf = case.logits[:, piece].clone().requires_grad_()
        out = grpo_loss(leaf, TokenBatch(**fields, context_group=dist.group.WORLD), objective)
        out.loss.backward()
        assert_no_worse(summed(out.loss)[None], naive.loss[None], exact.loss[None], "loss", tiny=2e-5)
        found = torch.zeros_like(case.logits)
        assert leaf.grad is not None
        found[:, piece] = leaf.grad
        dist.all_reduce(found)
        assert_no_worse(found, d_naive, d_exact, "gradient")


def check_from_hidden_and_from_logps(rank: int, ranks: int) -> None:
    case = build_linear(packed=True)
    spec = Spec(level="sequence-sum", aggregate="seq-mean-token-mean")
    objective = Objective(level="sequence-sum", aggregate="seq-mean-token-mean")
    (_, exact), (_, naive) = case.expected(spec), case.naive(spec)
    for kind, mine in parts(rank, ranks, case.tokens):
        leaves = {"hidden": case.hidden[mine].clone().requires_grad_(), "weight": case.weight.clone().requires_grad_()}
        _, batch = part(case.tokens, mine)
        linear_grpo_loss(leaves["hidden"], leaves["weight"], batch, objective, bias=case.bias).loss.backward()
        assert leaves["weight"].grad is not None
        assert_no_worse(summed(leaves["weight"].grad), naive["weight"], exact["weight"], f"weight, {kind}")
        found = together(leaves["hidden"].grad, mine, case.hidden.shape)
        assert_no_worse(found, naive["hidden"], exact["hidden"], f"hidden, {kind}")

        logits = torch.nn.functional.linear(case.hidden.double(), case.weight.double(), case.bias.double())  # type: ignore[union-attr]
        every = logits.log_softmax(-1).gather(1, case.tokens.targets[:, None])[:, 0].float()
        whole = every.clone().requires_grad_()
        objective_loss(whole, case.tokens.batch(), objective).loss.backward()
        leaf = every[mine].clone().requires_grad_()
        objective_loss(leaf, batch, objective).loss.backward()
        assert whole.grad is not None
        assert_near(together(leaf.grad, mine, every.shape), whole.grad, 1e-6, f"logps, {kind}")


def check_kept_sets(rank: int, ranks: int) -> None:
    """A rank has the sets of its own rows: beside rows without one, of targets that they lack, from logits and from hidden
    states."""
    case, linear = pack(build(kept=True)), build_linear(packed=True, kept=True)
    for name in ("gspo, k3 by the ratio", "off-policy sequences", "grpo, k3 and entropy"):
        make, spec = OBJECTIVES[name]
        (exact, d_exact), (naive, d_naive) = case.expected(spec), case.naive(spec)
        for kind, mine in parts(rank, ranks, case):
            leaf, batch = part(case, mine)
            out = grpo_loss(leaf, batch, make())
            out.loss.backward()
            assert_no_worse(summed(out.loss)[None], naive.loss[None], exact.loss[None], f"loss of {name}, {kind}", tiny=2e-5)
            assert_no_worse(together(leaf.grad, mine, case.logits.shape), d_naive, d_exact, f"gradient of {name}, {kind}")
        (exact, gradients), (naive, naive_gradients) = linear.expected(spec), linear.naive(spec)
        for kind, mine in parts(rank, ranks, linear.tokens):
            hidden, weight = linear.hidden[mine].clone().requires_grad_(), linear.weight.clone().requires_grad_()
            _, batch = part(linear.tokens, mine)
            total = torch.zeros_like(weight, requires_grad=False)
            linear_grpo_loss(hidden, weight, batch, make(), bias=linear.bias, weight_grad=total).loss.backward()
            assert_no_worse(summed(total), naive_gradients["weight"], gradients["weight"], f"weight of {name}, {kind}")
            found = together(hidden.grad, mine, linear.hidden.shape)
            assert_no_worse(found, naive_gradients["hidden"], gradients["hidden"], f"hidden of {name}, {kind}")


def check_global_normalizer(rank: int, ranks: int) -> None:
    """Micro-batches of shared sequences: one denominator over all of them and all ranks."""
    case = pack(build())
    for aggregate in AGGREGATES:
        objective = Objective(
            level="sequence", aggregate=aggregate, beta=0.2, max_tokens=9, count_empty=aggregate != "group-mean"
        )
        advantages = case.fields["advantages"][:, None]
        whole = TokenBatch(**case.fields | {"groups": GROUPS, "advantages": advantages})
        for kind, mine in parts(rank, ranks, case):
            _, batch = part(case, mine)
            found = float(global_normalizer(objective, [batch, batch]))
            expected = float(global_normalizer(objective, [whole, whole], reduce=False))
            assert abs(found - expected) <= 1e-6 * expected, (aggregate, kind, found, expected)


def check_metrics_are_no_collective(rank: int, ranks: int) -> None:
    """Metrics need no other rank: one rank may read them alone."""
    case = pack(build())
    for objective in (Objective.preset("gspo", beta=0.1), OBJECTIVES["off-policy sequences"][0]()):
        _, mine = next(iter(parts(rank, ranks, case)))
        leaf, batch = part(case, mine)
        out = grpo_loss(leaf, batch, objective)
        if rank == 0:
            assert all(x.isfinite() for x in out.metrics.values())
        whole = grpo_loss(case.logits, case.batch(), objective)
        dist.barrier()
        means = out.metrics["ratio_mean"] * out.metrics["tokens"]
        assert_near(summed(means), whole.metrics["ratio_mean"] * whole.metrics["tokens"], 1e-5, "ratio_mean")


def check_collectives(rank: int, ranks: int) -> None:
    """Lengths once a batch, from hidden states contributing sequences as well; the ratio and its slope once a loss; none at token
    level."""
    case = pack(build())
    b = GROUPS.numel() * 8
    _, mine = next(iter(parts(rank, ranks, case)))
    gspo = Objective(level="sequence", aggregate="token-sum")

    def from_hidden(leaf: Tensor, batch: TokenBatch, objective: Objective) -> LossOutput:
        return linear_grpo_loss(leaf, torch.eye(leaf.shape[-1]), batch, objective)

    for loss, once_a_batch in ((grpo_loss, 1), (from_hidden, 2)):
        leaf, batch = part(case, mine)
        for first in (True, False):
            with counted() as sizes:
                out = loss(leaf, batch, gspo)
                out.loss.backward()
                assert out.metrics["ratio_mean"] > 0
            expected = [b] * (2 + once_a_batch * first)
            assert sizes == {"all_gather": [], "all_reduce": expected}, sizes
    leaf, batch = part(case, mine)
    with counted() as sizes:
        grpo_loss(leaf, batch, Objective(aggregate="token-mean"), normalizer=20.0).loss.backward()
    assert sizes == {"all_gather": [], "all_reduce": []}, sizes


def check_corrections(rank: int, ranks: int) -> None:
    case = pack(build())
    whole = case.batch()
    logps = case.fields["old_logps"] - 0.3
    makers = {
        "product": lambda b, now: importance_weights(b, level="sequence", high=2.0),
        "geometric": lambda b, now: importance_weights(b, level="geometric", mode="mask", low=0.5, high=2.0),
        "largest": lambda b, now: rejection_mask(b, over="max", high=3.0),
        "smallest": lambda b, now: rejection_mask(b, over="min", low=0.5),
        "mean": lambda b, now: rejection_mask(b, over="mean", low=0.8, high=1.5),
        "off-policy": lambda b, now: off_policy_sequence_mask(b, now, delta=0.1),
    }
    for kind, mine in parts(rank, ranks, case):
        _, batch = part(case, mine)
        for name, make in makers.items():
            expected = make(whole, logps)[mine]
            torch.testing.assert_close(make(batch, logps[mine]), expected, rtol=1e-6, atol=0, msg=f"{name}, {kind}")


def check_masked_rank(rank: int, ranks: int) -> None:
    """A rank whose tokens are all masked and hold anything, and a batch in which all tokens are masked."""
    case = pack(build())
    mine = owners(case, ranks)["contiguous"] == rank
    first = owners(case, ranks)["contiguous"] == 0
    mask = case.mask & ~first  # type: ignore[operator]
    fields = case.fields | {"mask": mask}
    spec, objective = (
        Spec(level="sequence", aggregate="seq-mean-token-mean"),
        Objective(level="sequence", aggregate="seq-mean-token-mean"),
    )
    masked = Case(case.logits, fields, {})
    (exact, d_exact), (naive, d_naive) = masked.expected(spec), masked.naive(spec)
    logits = torch.where(mask[:, None], case.logits, torch.nan)
    leaf, batch = part(Case(logits, fields, {}), mine)
    out = grpo_loss(leaf, batch, objective)
    out.loss.backward()
    assert rank != 0 or (float(out.loss) == 0.0 and leaf.grad is not None and not leaf.grad.any())
    assert_no_worse(summed(out.loss)[None], naive.loss[None], exact.loss[None], "loss", tiny=2e-5)
    assert_no_worse(together(leaf.grad, mine, case.logits.shape), d_naive, d_exact, "gradient")
    nothing = Case(torch.full_like(case.logits, torch.nan), case.fields | {"mask": torch.zeros_like(mask)}, {})
    leaf, batch = part(nothing, mine)
    out = grpo_loss(leaf, batch, objective)
    out.loss.backward()
    assert float(out.loss) == 0.0 and leaf.grad is not None and not leaf.grad.any()


def check_data_parallel_shards(rank: int, ranks: int) -> None:
    """Whole sequences on each rank, of unequal numbers of tokens, one rank's all masked: the sum over ranks is the batch."""
    case = build()
    rows = {2: [slice(0, 2), slice(2, 8)], 4: [slice(0, 2), slice(2, 3), slice(3, 5), slice(5, 8)]}[ranks][
        rank
    ]  # row 2 is masked
    for name in ("dapo, k3", "grpo, k3 and entropy", "gspo", "luspo", "off-policy sequences"):
        make, spec = OBJECTIVES[name]
        objective = make()
        (exact, d_exact), (naive, d_naive) = case.expected(spec), case.naive(spec)
        batch = TokenBatch(**{k: v[rows] for k, v in case.fields.items()})
        leaf = case.logits[rows].clone().requires_grad_()
        with counted() as sizes:
            out = grpo_loss(leaf, batch, objective, normalizer=global_normalizer(objective, batch))
            out.loss.backward()
        assert sizes == {"all_gather": [], "all_reduce": [24]}, sizes
        found = torch.zeros_like(case.logits)
        assert leaf.grad is not None
        found[rows] = leaf.grad
        dist.all_reduce(found)
        assert_no_worse(summed(out.loss)[None], naive.loss[None], exact.loss[None], f"loss of {name}", tiny=2e-5)
        assert_no_worse(found, d_naive, d_exact, f"gradient of {name}")


def check_quantile_over_ranks(rank: int, ranks: int) -> None:
    """The one filter that looks at the whole batch has a group of its own."""
    case = pack(build())
    quantile = (EntropyQuantile(0.6, process_group=dist.group.WORLD),)
    for options in ({}, {"entropy_coef": 0.2}, {"entropy_coef": 0.2, "entropy_aggregate": "token-mean"}):
        objective, spec = Objective(filters=quantile, **options), Spec(entropy_share=0.6, **options)
        (_, d_exact), (_, d_naive) = case.expected(spec), case.naive(spec)
        for kind, mine in parts(rank, ranks, case):
            leaf, batch = part(case, mine)
            grpo_loss(leaf, batch, objective).loss.backward()
            found = together(leaf.grad, mine, case.logits.shape)
            assert_no_worse(found, d_naive, d_exact, f"{kind}, {options}")


def check_tensor_and_context_parallel(rank: int, ranks: int) -> None:
    """Half of the ranks share a vocabulary, the others the sequences."""
    if ranks != 4:
        return
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    context_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tp, cp = tensor_groups[rank // 2], context_groups[rank % 2]
    case = pack(build())
    widths = [44, 17]
    for name in ("gspo", "grpo, k3 and entropy", "vespo"):
        make, spec = OBJECTIVES[name]
        (exact, d_exact), (naive, d_naive) = case.expected(spec), case.naive(spec)
        mine = owners(case, 2)["zigzag"] == rank // 2
        whole, batch = part(case, mine, context_group=cp)
        leaf = whole.detach().split(widths, -1)[rank % 2].clone().requires_grad_()
        out = grpo_loss(leaf, batch, make(), shard=VocabShard.of(leaf, tp, dim=-1))
        out.loss.backward()
        loss = out.loss.detach().clone()
        dist.all_reduce(loss, group=cp)
        assert_no_worse(loss[None], naive.loss[None], exact.loss[None], f"loss of {name}", tiny=2e-5)
        found = torch.zeros_like(case.logits)
        columns = slice(0, 44) if rank % 2 == 0 else slice(44, 61)
        place = torch.zeros(mine.sum(), 61)
        assert leaf.grad is not None
        place[:, columns] = leaf.grad
        found[mine] = place
        dist.all_reduce(found)
        assert_no_worse(found, d_naive, d_exact, f"gradient of {name}")
