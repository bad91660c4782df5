"""What several ranks share: sequences whose tokens lie on them, batches in data-parallel shards,
and parts of a vocabulary, of logits and of heads, against the float64 answers of whole problems;
and what they send each other.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import (
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
    token_logprobs,
)
from grpo_kernels.core import vocab_parallel
from grpo_kernels.core.linear_memory import ChunkPlan, LinearMemory
from grpo_kernels.distributed import VocabShard, global_normalizer
from grpo_kernels.formulas.filters import EntropyQuantile
from grpo_kernels.rewards.corrections import (
    importance_weights,
    off_policy_sequence_mask,
    rejection_mask,
)
from support.call_cases import (
    KINDS,
    CallCase,
    covering,
    each_value,
    legal,
    problem,
    select_tokens,
    slice_vocabulary,
)
from support.inside import in_chunks
from support.objectives import OBJECTIVES
from support.oracle import Answer
from support.public_functions import (
    assert_matches_oracle,
    expected_and_tolerance,
    make_batch,
    make_objective,
    run_call,
)

MODULE = "test_ranks"
LENGTHS = (7, 4, 2, 0, 6, 1, 5, 3)
GROUPS = torch.tensor([0, 0, 1, 2, 2, 3, 4, 4])
AGGREGATES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "group-mean",
    "token-sum",
    "constant",
)
WHOLE_BATCH = (
    "clip-cov",
    "kl-cov",
    "entropy quantile, bonus of its own",
)  # they look at all tokens


@contextmanager
def counted():
    """Bytes of each collective, by name; any other than these two fails."""
    sizes = {"all_gather": [], "all_reduce": []}
    gather, reduce = vocab_parallel.gather_from_ranks, dist.all_reduce

    def gathered(x, group):
        sizes["all_gather"].append(x.numel() * x.element_size())
        return gather(x, group)

    def all_reduce(x, *args, **kwargs):
        sizes["all_reduce"].append(x.numel() * x.element_size())
        return reduce(x, *args, **kwargs)

    others = (
        "all_gather",
        "broadcast",
        "barrier",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "all_gather_object",
    )
    refuse = {
        name: mock.Mock(side_effect=AssertionError(f"a collective of its own: {name}"))
        for name in others
    }
    with (
        mock.patch.object(vocab_parallel, "gather_from_ranks", gathered),
        mock.patch.multiple(dist, all_reduce=all_reduce, **refuse),
    ):
        yield sizes


def case(name, **changes):
    """With the first seed for which no number lies at a bound."""
    other = "near" if "exact" in name else "none"
    plain = {"objective": name, "layout": "packed", "lengths": LENGTHS, "other": other, **changes}
    seeds = (legal(CallCase(**plain, seed=i)) for i in range(9))
    return next(r for r in seeds if expected_and_tolerance(r)[0].clear)


def owners(ranks):
    """The rank of each token:

    in contiguous pieces, in zigzag within each sequence, all on the last.
    """
    place = torch.cat([torch.arange(n) for n in LENGTHS])
    n = len(place)
    contiguous = torch.searchsorted(
        torch.linspace(0, n, ranks + 1)[1:].long(), torch.arange(n), right=True
    ).clamp(max=ranks - 1)
    zigzag = torch.minimum(place % (2 * ranks), 2 * ranks - 1 - place % (2 * ranks))
    return [contiguous, zigzag, torch.full((n,), ranks - 1)]


def part(p, mine, **fields):
    """A packed problem as a rank sees it that has the tokens `mine`:

    of each sequence those that are its own.
    """

    def some(x):
        return x[mine] if len(x) == len(mine) else x

    counts = torch.stack(
        [mine[lo:hi].sum() for lo, hi in pairwise(p.fields["cu_seqlens"].tolist())]
    )
    given = {k: some(v) if isinstance(v, Tensor) and v.dim() else v for k, v in p.fields.items()}
    if p.fields["advantages"].shape == (len(LENGTHS),):
        given["advantages"] = p.fields["advantages"][
            :, None
        ]  # as many tokens as sequences would read [B] as one a token
    given["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(
        torch.int32
    )
    given |= {"groups": given.get("groups", GROUPS), "context_group": dist.group.WORLD, **fields}
    return select_tokens(p, mine.nonzero()[:, 0].tolist(), some, fields=given)


def together(p, found, mine, group=None):
    """What all ranks found: rows in the order of the whole problem, all else summed."""

    def put(x, rows):
        whole = torch.zeros(len(mine), *x.shape[1:]) if rows else x.detach().clone()
        if rows:
            whole[mine] = x
        dist.all_reduce(whole, group=group)
        return whole

    return Answer(
        {name: put(x, name != "loss") for name, x in found.values.items()},
        {name: put(x, name in ("logits", "hidden")) for name, x in found.gradients.items()},
    )


def agree(p, mine, fields=None, **options):
    assert_matches_oracle(
        p, together(p, run_call(part(p, mine, **(fields or {})), **options), mine)
    )


def same_as_whole(p, mine, objective=None):
    """What the ranks find is what one finds that has all."""
    found, whole = (
        together(p, run_call(part(p, mine), objective=objective), mine),
        run_call(p, objective=objective),
    )
    for kind in ("values", "gradients"):
        for name, x in getattr(whole, kind).items():
            torch.testing.assert_close(getattr(found, kind)[name], x, rtol=2e-5, atol=1e-6)


def check_every_objective(rank, ranks):
    """Any cut gives the loss and gradients of whole sequences, with the default normaliser, from
    logits and from hidden states.
    """
    # FIPO refuses a context_group: a rank does not know the later tokens of a sequence.
    names = [x for x in OBJECTIVES if x not in WHOLE_BATCH and not x.startswith("fipo")]
    for i, name in enumerate(names):
        if ranks == 4 and name not in KINDS:
            continue  # which two ranks have
        p, cut_by = problem(case(name, source=("logits", "hidden")[i % 2])), owners(ranks)
        for owner in cut_by if i % 4 == 0 else [cut_by[i % 2]]:
            agree(p, owner == rank)


def check_sets_and_memory(rank, ranks):
    """A rank has the sets of its own rows:

    beside rows without one, of targets that they lack; and memory to add to.
    """
    for name in (
        "gspo, k3 by the ratio",
        "off-policy sequences",
        "grpo, k3 and entropy",
        "gspo, exact",
    ):
        for more in ({}, {"source": "hidden", "weight_grad": "float32"}):
            p = problem(
                case(name, kept="some", other="whole" if "exact" in name else "none", **more)
            )
            for owner in owners(ranks):
                agree(p, owner == rank)


def check_each_aggregate_of_sequence_ratios(rank, ranks):
    """Also a mean over groups:

    as one rank has it. And one denominator over micro-batches of shared sequences.
    """
    p = problem(case("dapo, k3"))
    p = replace(p, fields=p.fields | {"groups": GROUPS})
    whole = make_batch(p)
    for aggregate in AGGREGATES:
        terms = {
            "beta": 0.2,
            "entropy_coef": 0.1,
            "max_tokens": 9,
            "count_empty": aggregate != "group-mean",
        }
        objective = Objective(level="sequence", aggregate=aggregate, **terms)
        expected = float(global_normalizer(objective, [whole, whole], reduce=False))
        for owner in owners(ranks):
            same_as_whole(p, owner == rank, objective)
            batch = make_batch(part(p, owner == rank))
            assert (
                abs(float(global_normalizer(objective, [batch, batch])) - expected)
                <= 1e-6 * expected
            ), aggregate


def check_masked_rank(rank, ranks):
    """A rank whose tokens are all masked and hold anything, and a batch in which all tokens are
    masked.
    """
    p, owner = problem(case("gspo")), owners(ranks)[0]
    for mask in ((owner > 0) & p.trained, torch.zeros_like(p.trained)):
        logits = torch.where(mask[:, None], p.given["logits"], torch.nan)
        q = replace(p, given={"logits": logits}, fields=p.fields | {"mask": mask})
        same_as_whole(q, owner == rank)
        found = run_call(part(q, owner == rank))
        assert rank != 0 or not (found.values["loss"] or found.gradients["logits"].any())


def check_quantile_over_ranks(rank, ranks):
    """The one filter that looks at the whole batch has a group of its own."""
    p = problem(case("entropy quantile, bonus of its own"))
    quantile = (EntropyQuantile(0.6, process_group=dist.group.WORLD),)
    for owner in owners(ranks):
        agree(p, owner == rank, objective=replace(make_objective(p.case), filters=quantile))


def check_a_mask_that_was_written(rank, ranks):
    """What the ranks have told each other of a batch is told again where all of them wrote to what
    it depends on.
    """
    g = torch.Generator().manual_seed(rank)
    logits, mask = torch.randn(6, 11, generator=g), torch.ones(6, dtype=torch.bool)
    fields = {
        "cu_seqlens": torch.tensor([0, 4, 6]),
        "old_logps": torch.randn(6, generator=g),
        "mask": mask,
    }

    def batch():
        return TokenBatch(
            torch.zeros(6).long(),
            torch.tensor([[1.0], [-2.0]]),
            context_group=dist.group.WORLD,
            **fields,
        )

    def loss(of):
        return grpo_loss(
            logits, of, Objective.preset("gspo"), options=Options(backend="eager")
        ).loss

    kept = batch()
    before = loss(kept)
    mask[1] = False
    assert before != loss(kept) and torch.equal(loss(kept), loss(batch()))


def check_collectives(rank, ranks):
    """Lengths once a batch; the ratio and its slope once a loss; none at token level."""
    p = problem(case("dapo, k3"))
    q, gspo = part(p, owners(ranks)[0] == rank), Objective(level="sequence", aggregate="token-sum")
    leaf, batch = q.given["logits"].clone().requires_grad_(), make_batch(q)
    for first in (True, False):
        with counted() as sizes:
            out = grpo_loss(leaf, batch, gspo)
            out.loss.backward()
            assert out.metrics["ratio_mean"] > 0  # metrics are of a rank alone
        assert sizes == {"all_gather": [], "all_reduce": [8 * len(LENGTHS)] * (2 + first)}, sizes
    with counted() as sizes:
        grpo_loss(
            leaf, make_batch(q), Objective(aggregate="token-mean"), normalizer=20.0
        ).loss.backward()
    assert sizes == {"all_gather": [], "all_reduce": []}, sizes


#: Corrections that look at whole sequences.
CORRECTIONS = {
    "product": lambda b, now: importance_weights(b, level="sequence", high=2.0),
    "geometric": lambda b, now: importance_weights(
        b, level="geometric", mode="mask", low=0.5, high=2.0
    ),
    "largest": lambda b, now: rejection_mask(b, over="max", high=3.0),
    "mean": lambda b, now: rejection_mask(b, over="mean", low=0.8, high=1.5),
    "off-policy": lambda b, now: off_policy_sequence_mask(b, now, delta=0.1),
}


def check_corrections(rank, ranks):
    p = problem(case("dapo, k3"))
    whole, logps = make_batch(p), p.seen["old_logps"].float() - 0.3
    for owner in owners(ranks):
        mine = owner == rank
        batch = make_batch(part(p, mine))
        for name, make in CORRECTIONS.items():
            torch.testing.assert_close(
                make(batch, logps[mine]), make(whole, logps)[mine], rtol=1e-6, atol=0, msg=name
            )


def check_data_parallel_shards(rank, ranks):
    """Whole sequences on each rank, of unequal numbers of tokens, one rank's without any:

    the sum over ranks is the batch.
    """
    ends = {2: [0, 3, 8], 4: [0, 2, 3, 4, 8]}[ranks]
    for name in ("dapo, k3", "grpo, k3 and entropy", "gspo", "luspo", "off-policy sequences"):
        p = problem(case(name))
        offsets, own = p.fields["cu_seqlens"], slice(*ends[rank : rank + 2])
        lo, hi = (int(offsets[cut]) for cut in ends[rank : rank + 2])
        mine = (torch.arange(len(p.ids)) >= lo) & (torch.arange(len(p.ids)) < hi)
        one_each = p.fields["advantages"].shape[0] == len(mine)
        fields = {
            "cu_seqlens": offsets[own.start : own.stop + 1] - lo,
            "groups": None,
            "context_group": None,
        }
        q = part(p, mine, **fields, advantages=p.fields["advantages"][mine if one_each else own])
        with counted() as sizes:
            normalizer = float(global_normalizer(make_objective(p.case), make_batch(q)))
            found = run_call(replace(q, case=replace(q.case, normalizer=normalizer)))
        assert sizes == {"all_gather": [], "all_reduce": [24]}, sizes
        assert_matches_oracle(p, together(p, found, mine))


def check_tensor_and_context_parallel(rank, ranks):
    """Half of the ranks share a vocabulary, the others the sequences."""
    if ranks != 4:
        return
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    context_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tp, cp, columns = (
        tensor_groups[rank // 2],
        context_groups[rank % 2],
        (slice(0, 44), slice(44, 61))[rank % 2],
    )
    for name in ("gspo", "grpo, k3 and entropy", "vespo"):
        p = problem(case(name))
        mine = owners(2)[1] == rank // 2
        q = part(p, mine, context_group=cp)
        q = replace(q, given=slice_vocabulary(q.given, columns))
        found = together(
            p, run_call(q, shard=VocabShard.of(q.given["logits"], tp, dim=-1)), mine, cp
        )
        assert_matches_oracle(replace(p, columns=columns), found)


# ---- a vocabulary that is cut

V, H = 61, 8
BACKENDS = ("eager", "cpu")
BEFORE_THE_RANKS = ("torch.distributed.tensor.parallel",)
DIMS = {"logits": -1, "weight": 0, "bias": 0}
#: Axes of what ranks have to exchange.
EXCHANGED = "mask kept missing other exact tail also weight_grad transform extreme spread rows listed".split()
#: What ranks add up beside the sums of rows: mixtures over sets, logits at listed ids. And squares
#: that all ranks have a share of.
FURTHER = [
    *(CallCase(objective="dapo, exact", source=source, kept="some", other="whole", exact="jsd", ranks=2) for source in ("logits", "hidden")),
    *(CallCase(source="hidden", listed="some", rows=rows, objective="dapo, k3", given="on-policy", ranks=2) for rows in ("own", "shared", "shuffled")),
    *3 * (CallCase(function="logprobs", also="sum_squares", ranks=2),),  # in every cut
]  # fmt: skip
HEAD = CallCase(
    source="hidden", objective="grpo, k3 and entropy", vocab=V, bias="plain", lengths=LENGTHS
)


def widths_of(vocab, ranks):
    """Of the ranks' parts:

    with padding at the end, uneven with an empty part, a part of padding only.
    """
    even, rest = -(-vocab // ranks), [vocab - (ranks - 2), *[1] * (ranks - 2)]
    return {"padded": [even] * ranks, "empty": [0, *rest], "only padding": [*rest, 5]}


def cuts(rank, ranks, vocab=V):
    for widths in widths_of(vocab, ranks).values():
        yield widths, VocabShard.of(torch.empty(widths[rank], 1), vocab=vocab)


def cut(x, widths, rank, dim, padding=0.0):
    """This rank's part of `x` along `dim`, padded to the sum of the widths."""
    extra = sum(widths) - x.shape[dim]
    pad = torch.full_like(
        x.movedim(dim, 0)[:1].expand(extra, *x.movedim(dim, 0).shape[1:]), padding
    ).movedim(0, dim)
    return torch.cat([x.detach(), pad], dim).split(widths, dim)[rank].clone()


def columns_of(p, widths, rank):
    """The problem as a rank sees it that has some columns; whatever the padding of logits and of
    the teacher holds.
    """

    def of(tensors, padding):
        own = {
            name: cut(x, widths, rank, DIMS[name], padding if name == "logits" else 0.0)
            for name, x in tensors.items()
            if name in DIMS
        }
        return {**tensors, **own}

    lo, end = sum(widths[:rank]), p.case.vocab
    other = None if p.other is None else replace(p.other, given=of(p.other.given, 50.0))
    return replace(
        p,
        given=of(p.given, math.nan),
        other=other,
        columns=slice(min(lo, end), min(lo + widths[rank], end)),
    )


def without_padding(found, p):
    """Its gradient is 0."""
    width, kept = p.columns.stop - p.columns.start, dict(found.gradients)
    for name in kept.keys() & DIMS.keys():
        assert (
            not kept[name].narrow(DIMS[name], width, kept[name].shape[DIMS[name]] - width).any()
        ), name
        kept[name] = kept[name].narrow(DIMS[name], 0, width)
    return replace(found, gradients=kept)


def check_any_cut(rank, ranks):
    """All ranks have the same values.

    With reduce_hidden=False each has its own gradient of hidden states, and they add up.
    """
    cases = each_value(covering(ranks=2), ("source",), EXCHANGED) + FURTHER if ranks == 2 else []
    for i, case in enumerate(cases):
        p, widths = problem(case), list(widths_of(case.vocab, ranks).values())[i % 3]
        mine, shard = (
            columns_of(p, widths, rank),
            VocabShard.of(torch.empty(widths[rank], 1), vocab=case.vocab),
        )
        shard = replace(shard, reduce_hidden=i % 4 > 0)
        found = run_call(mine, backend=BACKENDS[i % 2], shard=shard)
        if "hidden" in found.gradients and not shard.reduce_hidden:
            share = found.gradients["hidden"].float()
            dist.all_reduce(share)
            found.gradients["hidden"] = share.to(p.clean["hidden"].dtype)
        assert_matches_oracle(mine, without_padding(found, mine))
        everyone = [None] * ranks
        dist.all_gather_object(everyone, found.values)
        assert all(torch.equal(x, everyone[0][name]) for name, x in found.values.items()), (
            f"{case}: ranks disagree"
        )


def check_a_rank_without_ids(rank, ranks):
    """Its blocks have several chunks too, as those of ranks that store bf16 gradients."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(10, H, generator=generator).bfloat16()
    weight = torch.randn(V, H, generator=generator).bfloat16()
    targets = torch.randint(V, (10,), generator=generator)
    batch = TokenBatch(targets, torch.linspace(-1.0, 1.0, 10))
    ids = slice(0, V) if rank == 0 else slice(V, V)
    shard = VocabShard(ids.start, V)
    with pytest.MonkeyPatch.context() as patch:
        in_chunks(patch, 2, 6)
        results = []
        for part, options in ((weight[ids], Options(shard=shard)), (weight, Options())):
            leaf = hidden.clone().requires_grad_()
            head = part.clone().requires_grad_()
            dapo = Objective.preset("dapo")
            loss = linear_grpo_loss(leaf, head, batch, dapo, options=options).loss
            loss.backward()
            results.append((loss.detach(), leaf.grad, head.grad))
    (loss, grad_hidden, grad_head), (whole_loss, whole_hidden, whole_head) = results
    torch.testing.assert_close(loss, whole_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad_hidden, whole_hidden, rtol=2e-2, atol=1e-4)
    torch.testing.assert_close(grad_head, whole_head[ids], rtol=2e-2, atol=1e-4)


def check_dtensors(rank, ranks):
    """The head that parallelize_module has cut, hidden states that are replicated, logits that are
    a DTensor.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    p, of_logits = problem(HEAD), problem(replace(HEAD, source="logits", bias="none"))
    model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(H, V)})
    with torch.no_grad():
        model["lm_head"].weight.copy_(p.given["weight"])
        model["lm_head"].bias.copy_(p.given["bias"])
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    head = {"weight": model["lm_head"].weight, "bias": model["lm_head"].bias}
    logits = distribute_tensor(of_logits.given["logits"], mesh, [Shard(2)])
    partial = replace(VocabShard.of(head["weight"]), reduce_hidden=False)
    for whole, given, own in (
        (p, head, VocabShard.of(head["weight"])),
        (p, {**head, "hidden": distribute_tensor(p.given["hidden"], mesh, [Replicate()])}, partial),
        (of_logits, {"logits": logits}, VocabShard.of(logits, dim=-1)),
    ):
        found = run_call(replace(whole, given={**whole.given, **given}), backend="auto", shard=own)
        full = {
            name: x.full_tensor() if isinstance(x, DTensor) else x
            for name, x in found.gradients.items()
        }
        assert_matches_oracle(whole, replace(found, gradients=full))
    refused(
        lambda: VocabShard.of(distribute_tensor(p.given["weight"], mesh, [Shard(1)])),
        "must be cut by Shard(0)",
    )
    refused(lambda: run_call(replace(p, given={**p.given, **head})), "shard=VocabShard.of(weight)")


def refused(call, words):
    """By every rank, before anything is exchanged."""
    try:
        call()
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def check_collectives_of_a_cut_vocabulary(rank, ranks):
    """One exchange a call from logits, one a chunk from hidden states, one sum of the logits of
    candidates, one sum of d_hidden, whatever the parts are; ranks of unequal width take the same
    number of chunks, or they would wait for each other forever.
    """
    plain = replace(HEAD, objective="dapo, k3", bias="none")

    def chunks_of(rows):
        return [16 * x.numel() for x in torch.arange(rows).tensor_split(-(-rows // 10))]

    def slots_of(p):  # the logit of each candidate and of each target
        return [4 * (sum(map(len, p.sets)) + p.ids.numel())]

    p, some = problem(plain), problem(replace(plain, kept="some"))
    of_logits = problem(replace(plain, source="logits", kept="some"))
    n, d_hidden = 16 * p.ids.numel(), [4 * p.given["hidden"].numel()]
    without = sum(
        not ids and bool(on) for ids, on in zip(some.sets or [], some.trained, strict=True)
    )
    for widths, shard in cuts(rank, ranks):
        for q, gathered, reduced in (
            (problem(replace(plain, source="logits")), [n], []),
            (of_logits, [n], slots_of(of_logits)),
            (p, chunks_of(int(p.trained.sum())), d_hidden),
            (some, chunks_of(without), slots_of(some) + d_hidden),
        ):
            with (
                counted() as sizes,
                mock.patch.object(LinearMemory, "plan", lambda *_, **__: ChunkPlan(10, 10)),
            ):
                run_call(columns_of(q, widths, rank), backend="auto", shard=shard)
            assert (sorted(sizes["all_gather"]), sizes["all_reduce"]) == (
                sorted(gathered),
                reduced,
            ), (q.case, sizes)


def check_extremes(rank, ranks):
    """Parts that hold only -inf, a peaked row, logits of 1e4, a row of only -inf; the largest ids
    count from the first column of the vocabulary, whoever holds them, and of equal ones it is the
    lowest, also over a set.
    """
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(4))
    logits[0, 20:] = logits[1, :50] = logits[6] = -torch.inf
    logits[2] *= 1e4
    logits[3, 7] = 80.0
    logits[4, [9, 50]] = 9.0
    targets = torch.tensor([3, 55, int(logits[2].argmax()), 7, 1, 60, 5])
    log_p = logits.double().log_softmax(-1)
    entropy = -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(-1)
    right = {
        "logps": log_p.gather(1, targets[:, None])[:, 0],
        "entropy": entropy,
        "top_prob": log_p.exp().amax(1),
    }
    ways = [
        (widths, Options(shard=shard, backend=x))
        for widths, shard in cuts(rank, ranks)
        for x in BACKENDS
    ]
    for (widths, options), kept in product(ways, (None, TokenSets.from_lists([[*range(V)]] * 7))):
        asked = {"entropy": True, "also": ("top_id", "top_prob"), "options": options}
        found = token_logprobs(cut(logits, widths, rank, -1), targets, kept=kept, **asked)
        for name, x in {
            "logps": found.logps,
            "entropy": found.entropy,
            "top_prob": found.also["top_prob"],
        }.items():
            assert x[6].isnan()
            torch.testing.assert_close(x[:6].double(), right[name][:6], rtol=1e-6, atol=2e-6)
        assert found.also["top_id"][:6].tolist() == logits[:6].argmax(1).tolist()


def check_bad_input(rank, ranks):
    """Refused by every rank; and NaN on one rank, or parts that overlap, are no finite log-prob on
    any.
    """
    widths = widths_of(V, ranks)["padded"]
    shard = VocabShard.of(torch.empty(widths[rank], 1), vocab=V)
    hidden, weight, padding = (
        torch.zeros(2, H),
        torch.zeros(widths[rank], H),
        torch.tensor([0, V]),
    )  # which is no token
    sets = TokenSets.from_lists([[0], [1, V]])
    for call, words in (
        (lambda: linear_logprobs(hidden, weight, padding, options=Options(shard=shard)), f"outside the vocabulary [0, {V})"),
        (lambda: linear_logprobs(hidden, weight, padding % V, kept=sets, options=Options(shard=shard)), f"kept holds id {V} in row 1"),
        (lambda: linear_logprobs(hidden, weight, padding % V, options=Options(shard=3)), "shard=3: pass a VocabShard"),
        (lambda: VocabShard(-1, 5), "start=-1"), (lambda: VocabShard(0, 0), "vocab=0"),
        (lambda: VocabShard.of(weight, vocab=sum(widths) + 1), f"the ranks hold {sum(widths)} rows in all"),
    ):  # fmt: skip
        refused(call, words)
    logits = torch.randn(9, V, generator=torch.Generator().manual_seed(4))
    mine = cut(logits, widths, rank, -1)
    mine[:, :1] = torch.nan if rank == 0 else mine[:, :1]
    for x, own in ((mine, shard), (logits, VocabShard(0, V))):
        assert token_logprobs(x, torch.arange(9), options=Options(shard=own))[0].isnan().all()


# ---- the tests


@pytest.mark.long
@pytest.mark.parametrize("check", [name for name in list(globals()) if name.startswith("check_")])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(on_ranks, ranks, check):
    assert on_ranks(MODULE, ranks)[check] == "ok", on_ranks(MODULE, ranks)[check]
