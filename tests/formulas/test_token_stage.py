"""The token stage against the oracle: every objective, every pair of options, and changes that must not affect a result."""

from __future__ import annotations

import random
from itertools import product
from math import inf, nan
from typing import Any

import pytest
import torch

from grpo_kernels import Objective, TokenBatch
from grpo_kernels.formulas.filters import TrustRegion
from grpo_kernels.formulas.kl import WEIGHTINGS, Kl
from grpo_kernels.formulas.surrogates import Dro, Surrogate
from support import stages
from support.doors import batch_of, exact_of
from support.objectives import OBJECTIVES
from support.oracle import Spec
from support.pairs import MANY, pairs
from support.recipes import Recipe, problem
from support.stages import AGGREGATES, BONUSES, BOUNDS, FILTERS, KLS, LEVELS, SURROGATES, Option

Tensor = torch.Tensor


#: Of sequences, one of them empty.
LENGTHS = (7, 4, 2, 0, 6, 1, 5, 3)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if "exact" not in name])
def test_of_one_pass_it_takes_any_slice_of_rows(name: str) -> None:
    """With the same bits, so that kernels may work block by block. No objective has come to need two passes, which would cost
    another visit of the logits."""
    (make, spec), p = OBJECTIVES[name], problem(Recipe(objective=name, lengths=LENGTHS))
    objective, batch = make(), batch_of(p)
    logps, entropy = (exact_of(p.recipe)[0].values[what].reshape(-1).float() for what in ("logps", "entropy"))
    results, rows = stages.run(objective, batch, logps, entropy), objective.token_rows(batch)
    assert results[1].count_nonzero() >= 3
    if objective.one_pass:
        parts = [objective.token_stage(*(x[at] for x in (logps, entropy, rows))) for at in (slice(0, 5), slice(5, None))]
        for one, *cut in zip(results, *parts, strict=True):
            assert one is None or torch.equal(one, torch.cat(cut))
    whole = spec.surrogate in ("clip-cov", "kl-cov") or spec.entropy_share is not None or spec.off_policy is not None
    assert objective.one_pass == (spec.level == "token" and not whole)


@pytest.mark.parametrize("surrogate", [s for s, _ in SURROGATES], ids=str)
def test_huge_log_ratios_are_finite(surrogate: Surrogate) -> None:
    """+-1000 nats and more from old policy and reference, also one that is impossible, at every level: value and slopes stay finite
    in fp32; without an advantage, where a surrogate says so, nothing is there, though 0 * -inf would be NaN."""
    far = torch.tensor([1000.0, -1000.0, 1e5, -1e5, 89.0, -104.0, 60.5, 1e-30, 0.0, -inf])
    logps, n = torch.full((10,), -1.5), len(far)
    kls = [Kl(name, how, straight) for name, how, straight in product(("k1", "k2", "k3", "abs"), WEIGHTINGS, (False, True))]
    for level, sign, kl in product(surrogate.levels, (1.0, -1.0, 0.0), [*kls, Kl("distillation"), None]):
        given = {"old_logps": logps - far.clamp(-1e5), "ref_logps": logps + far.flip(0), "advantages": torch.full((n,), sign)}
        objective = Objective(surrogate, level=level, beta=0.1 if kl else 0.0, kl=kl or "k3")
        losses, slopes, _ = stages.run(objective, stages.packed(n, 5, **given), logps)
        assert losses.isfinite().all() and slopes.isfinite().all(), (level, sign, kl)
        assert sign or kl or not surrogate.zero_at_zero_advantage or not (losses.any() or slopes.any())


# ---- sequences

Columns = dict[str, Tensor]


def sequences() -> Columns:
    """Five sequences of up to four tokens: one masked, one without rows, one with a hole. Per token [B, T], but for `groups`;
    log-probs and entropies are far from every bound of the options."""
    g = torch.Generator().manual_seed(5)
    shape = (5, 4)
    mask = torch.arange(4) < torch.tensor([3, 2, 0, 4, 2])[:, None]
    inside = mask.clone()
    mask[1] = mask[3, 1] = False
    logps = -0.3 - 1.5 * torch.rand(shape, generator=g)
    old = torch.minimum(logps - 0.8 * torch.randn(shape, generator=g), torch.tensor(-0.05))
    columns = {
        "inside": inside,
        "mask": mask,
        "logps": logps,
        "old_logps": old,
        "ref_logps": logps + torch.randn(shape, generator=g),
        "weights": 0.4 + torch.rand(shape, generator=g),
        "sampler_logps": torch.minimum(old + 0.5 * torch.randn(shape, generator=g), torch.tensor(-0.04)),
        "nll_weights": 0.1 * torch.rand(shape, generator=g),
        "entropy": 1.6 * torch.rand(shape, generator=g),
        "advantages": torch.tensor([1.2, 0.7, 0.4, -0.9, 0.0])[:, None] + torch.tensor([0.3, -0.2, 0.1, 0.05]),
        "groups": torch.tensor([3, 1, 1, 3, 0]),
    }
    columns["weights"][0, 1] = 0.0
    return columns


def arranged(
    x: Columns, packed: bool = False, rubbish: float = nan, without: tuple[str, ...] = ()
) -> tuple[TokenBatch, Tensor, Tensor]:
    """(batch, log-probs, entropies) with `rubbish` where the mask is not set."""
    x = {k: v for k, v in x.items() if k not in without}
    inside, groups, mask = x.pop("inside"), x.pop("groups"), x.get("mask", torch.tensor(True))
    flat = {
        k: torch.where(mask, v, 0.0 if k in ("logps", "entropy") else rubbish).to(v.dtype) for k, v in x.items() if k != "mask"
    }
    if "mask" in x:
        flat["mask"] = mask
    if packed:
        flat = {k: v[inside] for k, v in flat.items()}
        flat["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), inside.sum(1).cumsum(0)])
    logps, entropy = (flat.pop(k) for k in ("logps", "entropy"))
    return (
        TokenBatch(torch.zeros(logps.shape, dtype=torch.int64), groups=groups, **flat),
        logps.reshape(-1),
        entropy.reshape(-1),
    )


# ---- every pair of options

BATCHES = [
    Option("whole", {}, {}),
    Option("on policy", {"without": ("old_logps",)}, {}),
    Option("no weights", {"without": ("weights", "nll_weights")}, {"normalizer": 7.0}),
    Option("no mask", {"without": ("mask",)}, {}),
    Option("no sampler", {"without": ("sampler_logps",)}, {"normalizer": 3.5}),
]
AXES = {
    "surrogate": SURROGATES,
    "level": LEVELS,
    "filter": FILTERS,
    "kl": KLS,
    "aggregate": AGGREGATES,
    "bonus": BONUSES,
    "bounds": BOUNDS[:2],
    "batch": BATCHES,
}


def check_combination(case: Any) -> float:
    """Right, or refused with a ValueError, expected, by the objective or by token_rows, before there are any log-probs. Returns how
    near a number lies to a bound."""
    margin = inf
    (surrogate, theirs), level, *options, of_batch = case.values()
    filters = case["filter"].ours.get("filters", ())
    regions = [f for f in filters if isinstance(f, TrustRegion)]
    level = level if level in surrogate.levels else surrogate.levels[0]
    level = "token" if regions and "token" in surrogate.levels else level
    ours, spec = {"level": level}, {"level": level, **theirs}
    for option in options:
        ours.update(option.ours)
        spec.update(option.theirs)
    without, normalizer = of_batch.ours.get("without", ()), of_batch.theirs.get("normalizer")
    refused = (
        bool(regions and level != "token")
        or any(f.anchor == "sampler" and "sampler_logps" in without for f in regions)
        or (isinstance(surrogate, Dro) and "log_ratio_bounds" in ours)
    )
    for packed in (False, True):
        # Without a mask padding would be trained on, and that of the packed rows is gone.
        made = arranged(sequences(), packed or "mask" in without, without=without)
        if refused:
            with pytest.raises(ValueError, match=r"^\w+(=| is None)"):
                Objective(surrogate, **ours).token_rows(made[0], normalizer)
        else:
            margin = min(margin, stages.check(Spec(**spec), Objective(surrogate, **ours), *made, normalizer).margin)
    return margin


def words(case: Any) -> str:
    return ", ".join(x.name if isinstance(x, Option) else str(x[0] if isinstance(x, tuple) else x) for x in case.values())


@pytest.mark.parametrize("case", pairs(**AXES), ids=words)
def test_every_pair_is_right_or_raises(case: Any) -> None:
    assert check_combination(case) > 1e-5


@pytest.mark.nightly
def test_random_combinations_are_right_or_raise() -> None:
    draw = random.Random(0)
    for _ in range(MANY):
        check_combination({name: draw.choice(values) for name, values in AXES.items()})


@pytest.mark.parametrize("option", FILTERS[1:], ids=lambda option: option.name)
def test_a_filter_drops_some_and_keeps_some(option: Option) -> None:
    kept = stages.exact(Spec(**option.theirs), *arranged(sequences(), True))[0].kept
    assert 0 < kept.sum() < kept.numel()
