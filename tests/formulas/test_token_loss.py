"""The token stage against the oracle:

every objective, every pair of options, and which tokens filters keep.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf

import pytest
import torch

from grpo_kernels import Objective
from grpo_kernels.formulas.filters import Filter, TrustRegion
from grpo_kernels.formulas.kl import WEIGHTINGS, Kl
from grpo_kernels.formulas.surrogates import Custom
from support import objectives as stages
from support.call_cases import CallCase, problem
from support.objectives import (
    AGGREGATES,
    BONUSES,
    BOUNDS,
    FILTERS,
    KLS,
    LEVELS,
    SURROGATES,
    Option,
    package_losses,
    packed,
)
from support.oracle import Spec
from support.pairs import MANY, pairs
from support.public_functions import expected_and_tolerance, make_batch

#: Of which no number lies at a bound of an option.
SEED = 21
ONE = Custom(lambda logp, old_logp, advantage, params: (1.0 + 0.0 * logp, 1.0 + 0.0 * logp))


@pytest.mark.parametrize("surrogate", [s for s, _ in SURROGATES], ids=str)
def test_huge_log_ratios_are_finite(surrogate):
    """+-1000 nats and more from old policy and reference, also one that is impossible, at every
    level: value and slopes stay finite in fp32; without an advantage, where a surrogate says so,
    nothing is there, though 0 * -inf would be NaN.
    """
    far = torch.tensor([1000.0, -1000.0, 1e5, -1e5, 89.0, -104.0, 60.5, 1e-30, 0.0, -inf])
    logps, n = torch.full((10,), -1.5), len(far)
    kls = [
        Kl(name, how, straight)
        for name, how, straight in product(("k1", "k2", "k3", "abs"), WEIGHTINGS, (False, True))
    ]
    for level, sign, kl in product(
        surrogate.levels, (1.0, -1.0, 0.0), [*kls, Kl("distillation"), None]
    ):
        given = {
            "old_logps": logps - far.clamp(-1e5),
            "ref_logps": logps + far.flip(0),
            "advantages": torch.full((n,), sign),
        }
        objective = Objective(surrogate, level=level, beta=0.1 if kl else 0.0, kl=kl or "k3")
        losses, slopes, _ = stages.package_losses(objective, packed(n, 5, **given), logps)
        assert losses.isfinite().all() and slopes.isfinite().all(), (level, sign, kl)
        assert (
            sign or kl or not surrogate.zero_at_zero_advantage or not (losses.any() or slopes.any())
        )


# ---- every pair of options

#: layout, mask, fields that a batch lacks, normaliser
BATCHES = [
    ("padded", "some", "", None), ("packed", "some", "", None), ("packed", "some", "old_logps", None),
    ("padded", "some", "weights nll_weights", 7.0), ("packed", "none", "", None), ("padded", "some", "sampler_logps", 3.5),
]  # fmt: skip
AXES = {
    "surrogate": SURROGATES, "level": LEVELS, "filter": FILTERS, "kl": KLS, "aggregate": AGGREGATES, "bonus": BONUSES,
    "bounds": BOUNDS[:2], "batch": BATCHES,
}  # fmt: skip


@cache
def batch_with(layout, mask, without):
    """(batch, log-probs, entropies) of five sequences, one of them without rows; what is masked is
    rubbish.
    """
    p = problem(
        CallCase(
            objective="dppo-kl to the sampler, k3",
            lengths=(3, 2, 0, 6, 4),
            vocab=5,
            spread=1.5,
            given="token",
            layout=layout,
            mask=mask,
            seed=SEED,
        )
    )
    fields = {"groups": torch.tensor([3, 1, 1, 3, 0]), **dict.fromkeys(without.split())}
    logps, entropy = (
        expected_and_tolerance(p.case)[0].values[name].float().reshape(-1)
        for name in ("logps", "entropy")
    )
    return replace(make_batch(p), **fields), logps, entropy


def check_combination(case):
    """Right, or refused with a ValueError, expected, by the objective or by token_inputs, before
    there are any log-probs. Returns how near a number lies to a bound.
    """
    (surrogate, theirs), level, *options, (layout, mask, without, normalizer) = case.values()
    regions = [f for f in case["filter"].ours.get("filters", ()) if isinstance(f, TrustRegion)]
    level = level if level in surrogate.levels else surrogate.levels[0]
    level = "token" if regions and "token" in surrogate.levels else level
    ours, spec = {"level": level}, {"level": level, **theirs}
    for option in options:
        ours.update(option.ours)
        spec.update(option.theirs)
    given = batch_with(layout, mask, without)
    refused = (
        bool(regions and level != "token")
        or any(f.anchor == "sampler" and "sampler_logps" in without for f in regions)
        or ("sampler_mismatch" in spec and "sampler_logps" in without)
        or (surrogate.reads_logp and "log_ratio_bounds" in ours)
    )
    if refused:
        with pytest.raises(ValueError, match=r"^\w+(=| is None)"):
            Objective(surrogate, **ours).token_inputs(given[0], normalizer)
        return inf
    return stages.assert_matches_oracle(
        Spec(**spec), Objective(surrogate, **ours), *given, normalizer
    ).margin


def words(case):
    return ", ".join(
        x.name if isinstance(x, Option) else str(x[0] if isinstance(x, tuple) else x)
        for x in case.values()
    )


@pytest.mark.parametrize("case", pairs(**AXES), ids=words)
def test_every_pair_is_right_or_raises(case):
    assert check_combination(case) > 1e-5


@pytest.mark.nightly
def test_random_combinations_are_right_or_raise():
    draw = random.Random(0)
    for _ in range(MANY):
        check_combination({name: draw.choice(values) for name, values in AXES.items()})


# ---- filters


def kept(f, logps, entropy=None, **fields):
    """The tokens of two sequences that still have a policy term:

    those that the filter says it keeps.
    """
    logps, n = torch.as_tensor(logps), len(logps)
    batch = packed(n, n // 2, **{k: torch.as_tensor(x) for k, x in fields.items()})
    objective = Objective(ONE, filters=(f,))
    found = (package_losses(objective, batch, logps, entropy)[0] != 0).tolist()
    assert (
        found
        == (
            f.keep(logps, entropy, objective.token_inputs(batch), batch)
            & (True if batch.mask is None else batch.mask)
        ).tolist()
    )
    return found


@dataclass(frozen=True)
class EverySecond(Filter):
    """A filter of a user."""

    def keep(self, logps, entropy, rows, batch):
        return torch.arange(len(logps)) % 2 == 0


def test_a_filter_of_yours_is_not_passed_over():
    assert kept(EverySecond(), [-1.0] * 6) == [True, False] * 3
