"""Kept sets beside vocabulary-parallel heads and logits, on the ranks of a group: run by test_vocab_parallel.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from divergence_parallel_checks import (  # noqa: F401
    check_divergence_from_hidden,
    check_divergence_from_logits_beside_ids,
    check_divergence_in_one_visit,
    check_several_teachers,
    check_the_mass_outside_of_a_teachers_ids,
)
from vocab_parallel_checks import (
    BACKENDS,
    WIDTHS,
    V,
    assert_loss,
    assert_same_everywhere,
    cut,
    in_turn,
    run_head,
    shards,
    whole,
)

from grpo_kernels import Objective, Options, TokenSets, grpo_loss, linear_grpo_loss, linear_logprobs, token_logprobs
from grpo_kernels.distributed import VocabShard
from support import oracle
from support.cases import OBJECTIVES, Case, assert_no_worse, build, same_bits
from support.collectives import counted
from support.linear_cases import LinearCase, assert_gradients_no_worse, assert_near, build_linear
from support.processes import WHOLE_PRODUCTS

Tensor = torch.Tensor
CHOSEN = ("grpo, k3 and entropy", "gspo, k3 by the ratio", "entropy quantile, bonus of its own")

#: (first id, end, size, target) of the sets of rows, in turn: in the first or the last part only, with the target there, or
#: elsewhere (None: the first id of the set); one id alone; in all parts; size 0 is a row without a set.
PATTERNS = (
    (0, 13, 6, None), (48, V, 5, None), (0, 13, 4, 60), (48, V, 7, 2), (0, 0, 0, 33), (60, V, 1, None), (0, 1, 1, 60),
    (0, V, 20, 35), (0, V, V, None), (31, 48, 3, 0), (0, 0, 0, 5),
)  # fmt: skip


def patterned(case: Case, logits: Tensor, mixed: bool = True) -> Case:
    """The case with sets of PATTERNS and their targets; log-probs of others are as far from the policy's as they were. Without
    `mixed` every row has a set."""
    patterns = [p for p in PATTERNS if mixed or p[2]]
    g = torch.Generator().manual_seed(7)
    rows = case.targets.numel()
    lists, targets = [], []
    keep = torch.zeros(rows, V, dtype=torch.bool)
    for row in range(rows):
        low, high, size, target = patterns[row % len(patterns)]
        lists.append((low + torch.randperm(high - low, generator=g))[:size].tolist() if size else [])
        targets.append(lists[-1][0] if target is None else target)
        keep[row, [*lists[-1], targets[-1]] if size else slice(None)] = True
    found = Case(case.logits, case.fields, case.transform, keep.view(logits.shape))
    chosen = torch.tensor(targets).view(case.targets.shape)
    transform = oracle.Transform(**case.transform)
    before = oracle.log_probs(logits.double(), case.targets, transform)[1]
    after = oracle.log_probs(logits.double(), chosen, transform, keep=found.keep)[1]
    moved = {
        name: (x.double() + (after - before).view(x.shape)).float()
        for name, x in case.fields.items() if name in ("old_logps", "ref_logps", "sampler_logps")
    }  # fmt: skip
    return replace(found, fields=case.fields | moved | {"targets": chosen, "kept": TokenSets.from_lists(lists)})


def head_case(mixed: bool = True, dtype: torch.dtype = torch.float32, **transform: float) -> LinearCase:
    case = build_linear(dtype, vocab=V, transform=transform)
    logits = torch.nn.functional.linear(case.hidden.double(), case.weight.double(), case.bias.double())  # type: ignore[union-attr]
    return replace(case, tokens=patterned(case.tokens, logits, mixed))


def logit_case(mixed: bool = True, dtype: torch.dtype = torch.float32) -> Case:
    case = build(dtype, vocab=V, transform={"temperature": 1.3})
    return patterned(case, case.logits, mixed)


def calls(rank: int, ranks: int) -> Iterator[tuple[list[int], VocabShard, str]]:
    for i, (_, widths, shard) in enumerate(shards(rank, ranks)):
        for backend in BACKENDS if i < 2 or 0 in widths else BACKENDS[-1:]:
            yield widths, shard, backend


def check_cases_are_not_trivial(rank: int, ranks: int) -> None:
    case = head_case().tokens
    own = [(case.keep & (torch.arange(V) // 31 == half)).any(-1) for half in (0, 1)]  # type: ignore[operator]
    kept = case.fields["kept"]
    for row in (own[0] & ~own[1], own[1] & ~own[0], own[0] & own[1], ~kept.contains(case.targets).view(case.targets.shape)):
        assert (row & case.mask).sum() > 2
    assert 2 < kept.empty_rows < kept.rows - 2 and (kept.counts == 1).any()


def check_loss_from_hidden(rank: int, ranks: int) -> None:
    for mixed in (True, False):
        case = head_case(mixed, temperature=0.8, softcap=9.0, scale=1.2)
        for name in CHOSEN[: 3 if ranks < 4 and mixed else 2]:
            make, spec = OBJECTIVES[name]
            (value, exact), (naive_value, naive) = case.expected(spec), case.naive(spec)
            for widths, shard, backend in calls(rank, ranks):
                out, gradients = run_head(case, make(), widths, rank, shard, backend)
                assert_same_everywhere(out.loss, out.logps, out.entropy, gradients["hidden"])
                assert_loss(out, value, naive_value)
                assert_gradients_no_worse(whole(gradients, widths), naive, exact)


def check_loss_from_logits(rank: int, ranks: int) -> None:
    """In place too, and whatever the padding holds."""
    for dtype, mixed in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, True)):
        case = logit_case(mixed, dtype)
        for i, name in enumerate(CHOSEN[:2]):
            make, spec = OBJECTIVES[name]
            (value, exact), (naive_value, naive) = case.expected(spec), case.naive(spec)
            for j, (widths, shard, backend) in enumerate(calls(rank, ranks)):
                for inplace in (False, True) if ranks == 1 else in_turn((False, True), i + j):
                    leaf = cut(case.logits, widths, rank, -1, padding=torch.nan).requires_grad_()
                    out = grpo_loss(
                        leaf.clone() if inplace else leaf, case.batch(), make(),
                        transform=case.logit_transform(), inplace=inplace, shard=shard, backend=backend,
                    )  # fmt: skip
                    assert_same_everywhere(out.loss, out.logps, out.entropy)
                    assert_loss(out, value, naive_value)
                    out.loss.backward()
                    assert leaf.grad is not None
                    gradient = whole({"logits": leaf.grad.movedim(-1, 0)}, widths)["logits"].movedim(0, -1)
                    assert_no_worse(gradient, naive.to(dtype), exact, "gradient of the logits")
                    assert not gradient[~case.keep].any()  # type: ignore[operator]


# ---- against one process, which is tested on its own


def log_probs(
    case: LinearCase, parts: tuple[list[int], int, VocabShard] | None, linear: bool, **options: Any
) -> dict[str, Tensor]:
    """All that a call of layer 1 gives, and its gradients, whole: of this rank alone, or of all with their `parts`."""
    tokens = case.tokens
    leaves = {"hidden": case.hidden.clone(), "weight": case.weight.clone(), "bias": case.bias.clone()}  # type: ignore[union-attr]
    if not linear:
        leaves = {"logits": tokens.logits.float()}
    if parts is not None:
        widths, rank, shard = parts
        dims = {"weight": 0, "bias": 0, "logits": -1}
        leaves = {name: cut(x, widths, rank, dims[name]) if name in dims else x for name, x in leaves.items()}
        options["shard"] = shard
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    options = {"kept": tokens.fields["kept"], "mask": tokens.mask, "transform": tokens.logit_transform()} | options
    if linear:
        logps, entropy, *more = linear_logprobs(
            leaves["hidden"], leaves["weight"], tokens.targets, bias=leaves["bias"], **options
        )
    else:
        logps, entropy, *more = token_logprobs(leaves["logits"], tokens.targets, **options)
    found = {"logps": logps} | ({} if entropy is None else {"entropy": entropy}) | (more[0] if more else {})
    g = torch.Generator().manual_seed(5)
    outputs = [x for x in found.values() if x.requires_grad]
    torch.autograd.backward(outputs, [torch.randn(x.shape, generator=g) for x in outputs])
    gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    if parts is not None:
        if not linear:
            gradients["logits"] = gradients["logits"].movedim(-1, 0)
        gradients = whole(gradients, parts[0])
        if not linear:
            gradients["logits"] = gradients["logits"].movedim(0, -1)
    return {name: x.detach() for name, x in found.items()} | {f"gradient of {name}": x for name, x in gradients.items()}


def assert_as_alone(rank: int, ranks: int, case: LinearCase, **options: Any) -> None:
    for linear in (True, False):
        alone = log_probs(case, None, linear, backend="eager", **options)
        for j, (widths, shard, backend) in enumerate(calls(rank, ranks)):
            if ranks > 1 and (j + j // 2 + linear) % 2 and not WHOLE_PRODUCTS:
                continue  # from hidden states the one backend, from logits the other
            found = log_probs(case, (widths, rank, shard), linear, backend=backend, **options)
            assert found.keys() == alone.keys()
            for name, x in alone.items():
                if x.is_floating_point():
                    nothing = x == -torch.inf  # of an id outside of a row's set
                    assert torch.equal(found[name] == -torch.inf, nothing)
                    ours, theirs = (torch.where(nothing, 0.0, y) for y in (found[name], x))
                    assert_near(ours, theirs, 1e-5 if "gradient" in name else 2e-6, f"{name}, {widths}, {backend}")
                else:
                    assert torch.equal(found[name], x), f"{name}, {widths}, {backend}"
            assert_same_everywhere(*(x for name, x in found.items() if "gradient" not in name))


def check_log_probs_and_what_is_asked_beside(rank: int, ranks: int) -> None:
    case = head_case(temperature=0.8, softcap=9.0)
    assert_as_alone(rank, ranks, case)
    assert_as_alone(rank, ranks, case, entropy=True, also=("sum_squares", "top_prob", "top_id"))
    assert_as_alone(rank, ranks, case, entropy=True, also=("log_kept_mass", "top_id"))
    assert_as_alone(rank, ranks, head_case(mixed=False), entropy=True, also=("top_id",))


def check_missing_targets(rank: int, ranks: int) -> None:
    case = head_case()
    for missing in ("include", "full", "mask"):
        assert_as_alone(rank, ranks, case, options=Options(missing=missing))
    assert_as_alone(rank, ranks, case, entropy=True, options=Options(missing="full", entropy_over="vocabulary"))
    _, widths, shard = next(shards(rank, ranks))
    try:
        log_probs(case, (widths, rank, shard), True, options=Options(missing="raise"))
    except ValueError as error:
        assert "is not in its kept set" in str(error)
    else:
        raise AssertionError("not refused")


def check_several_log_probs(rank: int, ranks: int) -> None:
    """Of ids in one part only, in all parts, of no id; in the row's set and outside of it."""
    case = head_case(temperature=0.8)
    g = torch.Generator().manual_seed(9)
    lists = []
    for row in range(case.tokens.targets.numel()):
        low, high, size, _ = PATTERNS[(row + row // 5) % len(PATTERNS)]
        lists.append((low + torch.randperm(high - low, generator=g))[:size].tolist() if size else [])
    at = TokenSets.from_lists(lists)
    assert_as_alone(rank, ranks, case, at=at, kept=None)
    assert_as_alone(rank, ranks, case, at=at, entropy=True)
    assert_as_alone(rank, ranks, head_case(mixed=False), at=at, also=("log_kept_mass",))


# ---- memory to add to, and collectives


def check_weight_grad(rank: int, ranks: int) -> None:
    for mixed in (True, False):
        case = head_case(mixed)
        for name in CHOSEN[:2]:
            objective = OBJECTIVES[name][0]()
            for widths, shard, backend in calls(rank, ranks):
                _, expected = run_head(case, objective, widths, rank, shard, backend)
                hidden, weight = case.hidden.clone().requires_grad_(), cut(case.weight, widths, rank, 0).requires_grad_()
                bias, total = cut(case.bias, widths, rank, 0), torch.full_like(weight, 0.5, requires_grad=False)  # type: ignore[arg-type]
                options: dict[str, Any] = {"bias": bias, "shard": shard, "backend": backend, "weight_grad": total}
                linear_grpo_loss(hidden, weight, case.tokens.batch(), objective, **options).loss.backward()
                assert weight.grad is None and hidden.grad is not None
                torch.testing.assert_close(total - 0.5, expected["weight"], rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(hidden.grad, expected["hidden"], rtol=1e-5, atol=1e-7)


def check_collectives(rank: int, ranks: int) -> None:
    """One exchange for the sets of a call, whatever they are; another for the rows without a set, if there are any."""
    many = ranks > 1
    for mixed in (True, False):
        case, tokens, objective = head_case(mixed), logit_case(mixed), Objective(beta=0.1)
        n = tokens.targets.numel()
        counts = tokens.fields["kept"].counts.view(tokens.targets.shape)
        others = int((tokens.mask & (counts == 0)).sum())  # type: ignore[operator]
        hidden_bytes = case.hidden.numel() * 4
        for _, widths, shard in shards(rank, ranks):
            with counted() as sizes:
                leaf = cut(tokens.logits, widths, rank, -1).requires_grad_()
                grpo_loss(leaf, tokens.batch(), objective, shard=shard).loss.backward()
            assert sizes == {"all_gather": [16 * n] * (many * (1 + mixed)), "all_reduce": []}, sizes
            with counted() as sizes:
                run_head(case, objective, widths, rank, shard, "auto")
            assert sorted(sizes["all_gather"]) == sorted([16 * n] * many + [16 * others] * (many and mixed)), sizes
            assert sizes["all_reduce"] == [hidden_bytes] * many, sizes


def check_nobody_waits_for_a_rank_without_ids_or_rows(rank: int, ranks: int) -> None:
    """No rows, none that is trained, none with more than one id."""
    objective = Objective(beta=0.1)
    for _, widths, shard in shards(rank, ranks):
        case = head_case()
        weight = cut(case.weight, widths, rank, 0).requires_grad_()
        for rows, masked, kept in ((0, False, []), (3, True, [[1], [2, 60], []]), (3, False, [[60], [0], [33]])):
            targets = torch.tensor([60, 0, 33])[:rows]
            hidden = case.hidden.reshape(-1, case.hidden.shape[-1])[:rows].clone().requires_grad_()
            fields: dict[str, Any] = {"advantages": torch.ones(rows), "mask": torch.full((rows,), not masked)}
            fields |= {"old_logps": torch.zeros(rows), "ref_logps": torch.zeros(rows), "kept": TokenSets.from_lists(kept)}
            batch = replace(case.tokens.batch(), targets=targets, weights=None, sampler_logps=None, **fields)
            out = linear_grpo_loss(hidden, weight, batch, objective, shard=shard)
            out.loss.backward()
            assert not out.logps.any() and not out.entropy.any()
            assert hidden.grad is not None and not hidden.grad.any() and weight.grad is not None and not weight.grad.any()
            weight.grad = None
            logits = cut(torch.zeros(rows, V), widths, rank, -1).requires_grad_()
            out = grpo_loss(logits, batch, objective, shard=shard)
            out.loss.backward()
            assert not out.logps.any() and logits.grad is not None and not logits.grad.any()


def check_an_id_of_the_padding_is_refused(rank: int, ranks: int) -> None:
    widths = WIDTHS[ranks]["padded"]
    shard = VocabShard.of(torch.empty(widths[rank], 1), vocab=V)
    case = head_case()
    weight, targets = cut(case.weight, widths, rank, 0), torch.tensor([0, 1])
    try:
        linear_logprobs(torch.zeros(2, weight.shape[1]), weight, targets, kept=TokenSets.from_lists([[0], [1, V]]), shard=shard)
    except ValueError as error:
        assert f"kept holds id {V} in row 1: it is outside of the vocabulary [0, {V})" in str(error), error
    else:
        raise AssertionError("padding of the vocabulary was taken for a token")


def check_bits(rank: int, ranks: int) -> None:
    """The same call gives the same bits."""
    case, objective = head_case(), OBJECTIVES["grpo, k3 and entropy"][0]()
    _, widths, shard = next(shards(rank, ranks))
    (a, d_a), (b, d_b) = (run_head(case, objective, widths, rank, shard, "auto") for _ in range(2))
    assert same_bits(a.loss.detach(), b.loss.detach()) and all(same_bits(d_a[name], d_b[name]) for name in d_a)
