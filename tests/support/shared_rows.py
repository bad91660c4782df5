"""Calls on tokens that share rows, compared with those on a row for each token."""

from __future__ import annotations

from dataclasses import replace

import torch

from grpo_kernels import TokenSets
from support.doors import arguments_of, called, named, pull
from support.recipes import SPECS, Recipe, problem

Tensor = torch.Tensor
NOBODY = 1  # the row that no token names


def both(r: Recipe, backend: str, reference: bool = False, listed: bool = False, alone: bool = False) -> None:
    """Compare a call of a recipe's tokens on half as many rows with that on a row for each token. `reference`: rows in place of its
    log-probs. `listed`: with terms at listed ids. `alone`: on as many rows, in another order."""
    p, g = problem(r), torch.Generator().manual_seed(r.seed)
    n = p.ids.numel() // 2 + 1
    rows = torch.randint(n, p.shape, generator=g)
    rows[rows == NOBODY] = 0
    if alone:
        n, rows = p.ids.numel(), torch.randperm(p.ids.numel(), generator=g).view(p.shape)
    same = torch.rand(p.shape, generator=g) < 0.6  # tokens of a row that are one id
    mask = p.trained.view(p.shape)
    f, (given, *after), more = arguments_of(p, backend=backend)
    targets = torch.where(same, rows * 7 % r.vocab, p.ids.view(p.shape))
    shared = {name: x.flatten(0, -2)[:n].clone() if name in ("logits", "hidden") else x for name, x in p.clean.items()}
    spec, second = SPECS[r.objective], torch.randn(n, 5 if r.source == "hidden" else r.vocab, generator=g)
    if r.door == "loss":
        given = replace(given, targets=targets, mask=mask)
        second_stream = reference or (spec.kl == "exact" and bool(spec.beta))
        given = replace(given, ref_logps=None if second_stream else given.ref_logps)

    if listed:
        lists = [torch.randperm(r.vocab, generator=g)[: i % 4].tolist() for i in range(p.ids.numel())]
        sets = TokenSets.from_lists(lists)
        c, d = torch.randn(2, sets.ids.numel(), generator=g)
        given = replace(given, logp_terms=sets.with_values(c), prob_terms=sets.with_values(d))

    def run(of_rows: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        leaves = {name: (x if of_rows is not None else x.float()).clone() for name, x in shared.items()}
        for name, x in leaves.items():
            x.requires_grad_(name != r.frozen)
        first, *others = leaves.values()
        with torch.no_grad():
            first[NOBODY] = first[NOBODY] if alone else torch.nan
        front = [first * 1 if of_rows is not None else first[rows], *others]
        keywords = dict(more)
        if r.door == "loss" and second_stream:
            x, head = second if of_rows is not None else second[rows], torch.ones(r.vocab, 5).cumsum(0).sin()
            keywords |= {"ref_logits": x} if r.source == "logits" else {"reference": (x, head)}
        if r.door == "logprobs":
            keywords |= {} if of_rows is None else {"rows": of_rows}
            found = called(f, [targets], keywords)(*front)
        else:
            found = called(f, [replace(given, rows=of_rows), *after], keywords)(*front)
        values = named(found) | (found.metrics if r.door == "loss" else {})
        pull(p, named(found))
        return values, {name: x.grad for name, x in leaves.items() if x.grad is not None}

    if r.door == "loss":  # ratios near 1
        logps = run(None)[0]["logps"].view(p.shape)
        near = {
            name: (logps - 0.2 * torch.randn(p.shape, generator=g)).clamp(max=-0.01)
            for name in ("old_logps", "ref_logps", "sampler_logps")
        }
        given = replace(given, **{name: x for name, x in near.items() if getattr(given, name) is not None})
    values, gradients = run(torch.where(mask, rows, 10**6))
    expected, exact = run(None)
    room = {"float32": 2e-5, "bfloat16": 2.0**-6, "float16": 2.0**-9}[r.dtype]
    assert values.keys() == expected.keys() and gradients.keys() == exact.keys()
    for name, x in expected.items():
        torch.testing.assert_close(
            values[name].float(), x.float(), rtol=room, atol=2 * room, msg=lambda text, name=name: f"{r}, {name}: {text}"
        )
    for name, x in exact.items():
        assert x.any() and not (name in ("logits", "hidden") and gradients[name][NOBODY].any() and not alone)
        x = torch.nan_to_num(x)
        torch.testing.assert_close(
            gradients[name].float(),
            x,
            rtol=0,
            atol=room * float(x.abs().max()),
            msg=lambda text, name=name: f"{r}, d {name}: {text}",
        )
