"""The token stage against the oracle: every objective, every combination of options, and changes that must not affect a result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kernels import Objective, TokenBatch
from grpo_kernels.formulas.filters import EntropyQuantile, Filter, TrustRegion
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.formulas.surrogates import (
    A2po,
    Clip,
    ClipCov,
    Dro,
    Gmpo,
    ImportanceSampling,
    KlCov,
    Sapo,
    Surrogate,
    Vespo,
)
from support import oracle
from support.cases import OBJECTIVES, Case, build
from support.options import AGGREGATES, BONUSES, BOUNDS, FILTERS, KLS, LEVELS, SURROGATES
from support.oracle import Spec

Tensor = torch.Tensor

# ---- from the log-probs of cases


def log_probs_of(case: Case) -> tuple[Tensor, Tensor]:
    """fp32 log-probs and entropies, 0 where masked."""
    trained = torch.ones(case.targets.numel(), dtype=torch.bool) if case.mask is None else case.mask.reshape(-1)
    _, logps, entropy = oracle.log_probs(case.logits, case.targets)
    return torch.where(trained, logps, 0.0), torch.where(trained, entropy, 0.0)


def stage(case: Case, objective: Objective, normalizer: float | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    batch = case.batch()
    return objective.token_stage(*log_probs_of(case), objective.token_rows(batch, normalizer), batch)


def assert_matches_oracle(
    spec: Spec,
    objective: Objective,
    batch: TokenBatch,
    logps: Tensor,
    entropy: Tensor,
    normalizer: float | None = None,
    what: object = "",
) -> oracle.Result:
    """Loss and both gradients of flat fp32 log-probs and entropies."""
    losses, d_logps, d_entropy = objective.token_stage(logps, entropy, objective.token_rows(batch, normalizer), batch)
    expected, d_x, d_h = of_the_oracle(spec, batch, logps, entropy, normalizer)
    assert d_logps.dtype == losses.dtype == torch.float32
    assert_near(losses.double().sum(), expected.loss, f"{what}: loss")
    assert_near(d_logps, d_x, f"{what}: slopes")
    if spec.entropy_coef == 0:
        assert d_entropy is None
    else:
        assert d_entropy is not None
        assert_near(d_entropy, d_h, f"{what}: slopes of the entropy")
    return expected


def of_the_oracle(
    spec: Spec, batch: TokenBatch, logps: Tensor, entropy: Tensor, normalizer: float | None = None
) -> tuple[oracle.Result, Tensor, Tensor]:
    x, h = logps.double().requires_grad_(), entropy.double().requires_grad_()
    names = (
        "advantages", "mask", "old_logps", "ref_logps", "weights", "sampler_logps", "nll_weights", "groups",
    )  # fmt: skip
    fields = {name: getattr(batch, name) for name in names}
    sequences = oracle.sequences_of(batch.targets, batch.cu_seqlens)
    expected = oracle.objective(spec, x, h, sequences, normalizer=normalizer, **fields)
    d_x, d_h = torch.autograd.grad(expected.loss, [x, h], materialize_grads=True)
    return replace(expected, loss=expected.loss.detach()), d_x, d_h


def assert_near(ours: Tensor, exact: Tensor, what: object) -> None:
    """Within fp32's rounding of sums of a few dozen terms."""
    ours, scale = ours.double(), float(exact.abs().max()) if exact.numel() else 0.0
    error = float((ours - exact).abs().max()) if exact.numel() else 0.0
    assert error <= 1e-5 * scale + 1e-6, f"{what}: {ours.tolist()} instead of {exact.tolist()}"


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("on_policy", [False, True], ids=["old", "on-policy"])
def test_token_stage_matches_oracle(name: str, packed: bool, on_policy: bool) -> None:
    make, spec = OBJECTIVES[name]
    case = build(packed=packed)
    if on_policy:
        case.fields["old_logps"] = None
    assert_matches_oracle(spec, make(), case.batch(), *log_probs_of(case))
    assert stage(case, make())[1].count_nonzero() >= 3


@pytest.mark.parametrize("name", OBJECTIVES)
def test_masked_tokens_have_no_loss_and_no_slope(name: str) -> None:
    case = build()
    losses, d_logps, d_entropy = stage(case, OBJECTIVES[name][0]())
    masked = ~case.fields["mask"].reshape(-1)
    assert not losses[masked].any() and not d_logps[masked].any()
    assert d_entropy is None or not d_entropy[masked].any()


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if OBJECTIVES[n][0]().one_pass])
def test_objectives_of_one_pass_take_any_slice(name: str) -> None:
    """Blocks of rows give the same bits as all rows at once, so that kernels may work block by block."""
    case, objective = build(), OBJECTIVES[name][0]()
    logps, entropy = log_probs_of(case)
    rows = objective.token_rows(case.batch())
    losses, d_logps, d_entropy = objective.token_stage(logps, entropy, rows)
    for lo, hi in ((0, 1), (3, 20), (20, 56)):
        a, b, c = objective.token_stage(logps[lo:hi], entropy[lo:hi], rows[lo:hi])
        assert torch.equal(a, losses[lo:hi]) and torch.equal(b, d_logps[lo:hi])
        assert (c is None and d_entropy is None) or (
            c is not None and d_entropy is not None and torch.equal(c, d_entropy[lo:hi])
        )


def test_one_pass_is_what_is_expected() -> None:
    """No objective of one pass has come to need two, which would cost another visit of the logits."""
    for name, (make, spec) in OBJECTIVES.items():
        whole = spec.surrogate in ("clip-cov", "kl-cov") or spec.entropy_share is not None or spec.off_policy is not None
        assert make().one_pass == (spec.level == "token" and not whole), name


@pytest.mark.parametrize("name", ["dapo", "gspo", "grpo, k3 and entropy", "vespo", "kl-cov"])
def test_nll_weights(name: str) -> None:
    """Added as they are: no denominator, no weight, no filter, and at tokens of advantage 0 too."""
    make, spec = OBJECTIVES[name]
    case = build()
    logps, entropy = log_probs_of(case)
    for nll in (torch.rand(case.targets.shape), torch.rand(case.targets.shape[0]), torch.zeros(case.targets.shape)):
        assert_matches_oracle(spec, make(), case.batch(nll_weights=nll), logps, entropy)
        batch = replace(case.batch(nll_weights=nll), advantages=torch.zeros(case.targets.shape[0]))
        losses, slopes, _ = Objective().token_stage(logps, entropy, Objective().token_rows(batch, 5.0), batch)
        torch.testing.assert_close(losses, -batch.flat("nll_weights") * logps)
        torch.testing.assert_close(slopes, -batch.flat("nll_weights"))


@pytest.mark.parametrize("level", ["token", "sequence", "sequence-token", "sequence-sum"])
@pytest.mark.parametrize("surrogate", [Clip(), Sapo(), Vespo(), A2po(), Gmpo(), Dro(), KlCov(), ImportanceSampling()], ids=str)
def test_huge_log_ratios_are_finite(surrogate: Surrogate, level: str) -> None:
    """+-1000 nats from old policy, reference and sampler, at every level: value and slopes stay finite in fp32."""
    if level not in surrogate.levels:
        return
    far = torch.tensor([1000.0, -1000.0, 0.0, 300.0, -80.0, 90.0])
    logps = torch.full((6,), -1.5)
    for sign, kl in product((1.0, -1.0), (Kl("k3", "ratio"), Kl("k2", "score"), Kl("k3"), Kl("abs", "detached-ratio"))):
        objective = Objective(surrogate, level=level, beta=0.1, kl=kl)
        batch = TokenBatch(
            torch.zeros(6, dtype=torch.int64),
            torch.full((2,), sign),
            old_logps=logps - far,
            ref_logps=logps - far.flip(0),
            cu_seqlens=torch.tensor([0, 3, 6]),
        )
        losses, slopes, _ = objective.token_stage(logps, None, objective.token_rows(batch), batch)
        assert torch.isfinite(losses).all() and torch.isfinite(slopes).all(), (sign, kl)


# ---- every combination


#: All of level x filter x KL, twice, so that each meets more of the rest.
TURNS = list(product(range(2), LEVELS, FILTERS, KLS))
#: Which optional tensors a batch lacks, and what its normaliser is.
BATCHES: list[tuple[tuple[str, ...], float | None]] = [
    ((), None),
    (("old_logps",), None),
    (("weights", "nll_weights"), 7.0),
    (("mask",), None),
    (("sampler_logps",), 3.5),
]


def tiny_batches() -> dict[bool, tuple[TokenBatch, Tensor, Tensor]]:
    """padded and packed: five sequences, one masked and one without rows, with log-probs and entropies. Numbers come from a
    table, far from every bound above."""
    lengths, length = (3, 2, 0, 4, 2), 4
    g = torch.Generator().manual_seed(5)
    shape = (len(lengths), length)
    inside = torch.arange(length) < torch.tensor(lengths)[:, None]
    mask = inside.clone()
    mask[1] = False
    mask[3, 1] = False
    logps = -0.3 - 1.5 * torch.rand(shape, generator=g)
    old = logps - 0.8 * torch.randn(shape, generator=g)
    old = torch.minimum(old, torch.tensor(-0.05))
    fields = {
        "mask": mask,
        "old_logps": old,
        "ref_logps": logps + torch.randn(shape, generator=g),
        "weights": 0.4 + torch.rand(shape, generator=g),
        "sampler_logps": torch.minimum(old + 0.5 * torch.randn(shape, generator=g), torch.tensor(-0.04)),
        "nll_weights": 0.1 * torch.rand(shape, generator=g),
        "advantages": torch.tensor([1.2, 0.7, 0.4, -0.9, 0.0])[:, None] + torch.tensor([0.3, -0.2, 0.1, 0.05]),
    }
    fields["weights"][0, 1] = 0.0
    entropy = 1.6 * torch.rand(shape, generator=g)
    targets, groups = torch.zeros(shape, dtype=torch.int64), torch.tensor([3, 1, 1, 3, 0])
    offsets = torch.tensor((0, *lengths)).cumsum(0)
    # Padding has arbitrary values in all of them.
    fields = {k: torch.where(inside, v, math.nan if v.is_floating_point() else 0).to(v.dtype) for k, v in fields.items()}
    padded = TokenBatch(targets, groups=groups, **fields)
    packed = TokenBatch(targets[inside], groups=groups, cu_seqlens=offsets, **{k: v[inside] for k, v in fields.items()})
    return {False: (padded, logps, entropy), True: (packed, logps[inside], entropy[inside])}


TINY = tiny_batches()


def without(batch: TokenBatch, missing: tuple[str, ...]) -> TokenBatch:
    return replace(batch, **dict.fromkeys(missing))


def refused(objective: dict[str, Any], surrogate: Surrogate, batch: TokenBatch) -> bool:
    """Whether this combination has to raise, according to the documentation."""
    filters: tuple[Filter, ...] = objective.get("filters", ())
    regions = [f for f in filters if isinstance(f, TrustRegion)]
    own_levels = {
        Vespo: ("sequence-sum",),
        A2po: ("sequence-sum",),
        Gmpo: ("sequence",),
        Dro: ("token",),
        ClipCov: ("token",),
        KlCov: ("token",),
    }
    return (
        objective["level"] not in own_levels.get(type(surrogate), LEVELS)
        or (bool(regions) and objective["level"] != "token")
        or any(f.anchor == "sampler" and batch.sampler_logps is None for f in regions)
        or (isinstance(surrogate, Dro) and "log_ratio_bounds" in objective)
    )


def combinations(surrogate: Surrogate, theirs: dict[str, Any], turn: int) -> Iterator[tuple[str, dict[str, Any], Spec, int]]:
    """The combinations of TURNS with the number `turn`, with aggregates, bonuses, bounds and batches rotating at different
    rates."""
    rounds = [cycle(x) for x in (AGGREGATES, BONUSES, BOUNDS)]
    batches = cycle(range(len(BATCHES)))
    # 10, 4, 3 and 5 have common factors with 2 x 4 x 10 x 7: extra shifts keep the rotations from being synchronous.
    for i, (of_turn, level, *chosen) in enumerate(TURNS):
        turning = [next(wheel) for wheel in rounds]
        if i % 7 == 6:
            next(rounds[0]), next(batches)
        which = next(batches)
        if of_turn != turn:
            continue
        ours: dict[str, Any] = {"level": level}
        spec: dict[str, Any] = {"level": level, **theirs}
        for option in (*chosen, *turning):
            ours.update(option.ours)
            spec.update(option.theirs)
        name = ", ".join([str(surrogate), level, *(o.name for o in (*chosen, *turning))])
        yield name, ours, Spec(**spec), which


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("surrogate, theirs", SURROGATES, ids=lambda v: str(v) if isinstance(v, Surrogate) else "")
def test_every_combination_is_right_or_raises(surrogate: Surrogate, theirs: dict[str, Any], turn: int) -> None:
    """A refusal is a ValueError, expected, from the objective or from token_rows, before there are any log-probs."""
    right = raised = 0
    for name, ours, spec, which in combinations(surrogate, theirs, turn):
        missing, normalizer = BATCHES[which]
        # Without a mask padding would be trained on, and that of the packed rows is gone.
        if "mask" in missing:
            packed, packed_logps, packed_entropy = TINY[True]
            layouts = [(without(packed, missing), packed_logps, packed_entropy)]
        else:
            layouts = [(without(TINY[p][0], missing), *TINY[p][1:]) for p in (False, True)]
        if refused(ours, surrogate, layouts[0][0]):
            for batch, _, _ in layouts:
                with pytest.raises(ValueError, match=r"^\w+(=| is None)"):
                    Objective(surrogate, **ours).token_rows(batch, normalizer)
            raised += 1
            continue
        objective = Objective(surrogate, **ours)
        expected: tuple[Tensor, Tensor, Tensor] | None = None
        for batch, logps, entropy in layouts:
            trained = torch.ones_like(batch.targets, dtype=torch.bool) if batch.mask is None else batch.mask
            flat = torch.where(trained, logps, 0.0).reshape(-1), torch.where(trained, entropy, 0.0).reshape(-1)
            losses, d_logps, d_entropy = objective.token_stage(*flat, objective.token_rows(batch, normalizer), batch)
            assert d_logps.dtype == losses.dtype == torch.float32, name
            if expected is None:
                result, d_x, d_h = of_the_oracle(spec, batch, *flat, normalizer)
                assert result.margin > 1e-5, name
                trained_rows = trained.reshape(-1)
                expected = result.loss, d_x[trained_rows], d_h[trained_rows]
            trained_rows = trained.reshape(-1)
            assert_near(losses.double().sum(), expected[0], f"{name}: loss")
            assert_near(d_logps[trained_rows], expected[1], f"{name}: slopes")
            assert not losses[~trained_rows].any() and not d_logps[~trained_rows].any(), name
            if "entropy_coef" in ours:
                assert d_entropy is not None
                assert_near(d_entropy[trained_rows], expected[2], f"{name}: slopes of the entropy")
            else:
                assert d_entropy is None
        right += 1
    assert right >= 10 and right + raised == len(TURNS) // 2


def test_the_combinations_are_not_trivial() -> None:
    """Filters drop some and keep some, both sides of the clip are met, a bound is exceeded, and in each turn every aggregate, bonus
    and kind of batch meets every level."""
    batch, logps, entropy = TINY[True]
    trained = batch.mask
    assert trained is not None
    flat = torch.where(trained, logps, 0.0), torch.where(trained, entropy, 0.0)
    for option in FILTERS[1:]:
        kept, _, _ = of_the_oracle(Spec(**option.theirs), batch, *flat)
        assert 0 < kept.kept.sum() < kept.kept.numel(), option.name
    result, _, _ = of_the_oracle(Spec(), batch, *flat)
    assert result.clipped_low.any() and result.clipped_high.any()
    assert (result.log_ratio > 0.3).any() and (result.log_ratio < -0.35).any()
    for turn in range(2):
        seen = set()
        for _, ours, _, which in combinations(*SURROGATES[0], turn):
            if not refused(ours, Clip(), batch):
                seen.add((ours["level"], ours.get("aggregate", "token-mean"), which))
        assert len({s[:2] for s in seen}) == 4 * 6 and len({(s[0], s[2]) for s in seen}) == 4 * len(BATCHES)


# ---- changes that must not affect a result


@dataclass(frozen=True)
class Sequences:
    """Sequences of random numbers, as lists of flat tensors, to be arranged in any way."""

    fields: list[dict[str, Tensor]]
    advantages: list[float]
    groups: list[int]

    def padded(self, order: list[int], extra: int = 0, rubbish: float = 0.0) -> tuple[TokenBatch, Tensor, Tensor]:
        """(batch, log-probs, entropies) of the sequences in `order`, with `extra` columns of padding; `rubbish` lies where
        the mask is not set."""
        length = max([len(self.fields[i]["mask"]) for i in order], default=0) + extra
        columns: dict[str, Tensor] = {}
        for name in ("mask", "logps", "entropy", "old_logps", "ref_logps", "weights", "sampler_logps", "nll_weights"):
            rows = [
                torch.nn.functional.pad(self.fields[i][name].double(), (0, length - len(self.fields[i][name]))) for i in order
            ]
            columns[name] = torch.stack(rows) if rows else torch.zeros(0, length)
        return self._batch(columns, order, None, rubbish)

    def packed(self, order: list[int], rubbish: float = 0.0) -> tuple[TokenBatch, Tensor, Tensor]:
        columns = {name: torch.cat([self.fields[i][name].double() for i in order]) for name in self.fields[0]}
        lengths = torch.tensor([0, *(len(self.fields[i]["mask"]) for i in order)])
        return self._batch(columns, order, lengths.cumsum(0), rubbish)

    def _batch(
        self, columns: dict[str, Tensor], order: list[int], offsets: Tensor | None, rubbish: float
    ) -> tuple[TokenBatch, Tensor, Tensor]:
        mask = columns.pop("mask") != 0
        clean = {k: torch.where(mask, v, 0.0).float().reshape(-1) for k, v in columns.items() if k in ("logps", "entropy")}
        batch = TokenBatch(
            torch.zeros(mask.shape, dtype=torch.int64),
            # [B, 1]: one of [B] would be read as one of [N] where the two are equal.
            torch.tensor([self.advantages[i] for i in order])[:, None],
            mask=mask,
            groups=torch.tensor([self.groups[i] for i in order], dtype=torch.int64),
            cu_seqlens=offsets,
            **{k: torch.where(mask, v, rubbish).float() for k, v in columns.items() if k not in clean},
        )
        return batch, clean["logps"], clean["entropy"]

    def run(self, objective: Objective, made: tuple[TokenBatch, Tensor, Tensor], normalizer: Any = None) -> tuple[Tensor, ...]:
        """(loss, slopes of the trained tokens, slopes of their entropies)"""
        batch, logps, entropy = made
        losses, slopes, d_entropy = objective.token_stage(logps, entropy, objective.token_rows(batch, normalizer), batch)
        assert batch.mask is not None
        trained = batch.mask.reshape(-1)
        assert not slopes[~trained].any() and not losses[~trained].any()
        return losses.double().sum(), slopes[trained], torch.zeros(0) if d_entropy is None else d_entropy[trained]

    def per_sequence(self, slopes: Tensor, order: list[int]) -> list[Tensor]:
        """Slopes of the trained tokens, by sequence in the order of this object."""
        parts = slopes.split([int(self.fields[i]["mask"].sum()) for i in order] if slopes.numel() else [0] * len(order))
        return [parts[order.index(i)] for i in range(len(order))]


@st.composite
def sequences(draw: st.DrawFn, least: int = 1) -> Sequences:
    lengths = draw(st.lists(st.integers(0, 4), min_size=least, max_size=6))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    fields = []
    for n in lengths:
        logps = -0.1 - 2.0 * torch.rand(n, generator=g)
        old = torch.minimum(logps - 0.4 * torch.randn(n, generator=g), torch.tensor(-0.01))
        fields.append(
            {
                "mask": torch.rand(n, generator=g) < 0.8,
                "logps": logps,
                "entropy": 2.0 * torch.rand(n, generator=g),
                "old_logps": old,
                "ref_logps": logps + 0.6 * torch.randn(n, generator=g),
                "weights": 0.3 + torch.rand(n, generator=g),
                "sampler_logps": torch.minimum(old + 0.2 * torch.randn(n, generator=g), torch.tensor(-0.01)),
                "nll_weights": 0.1 * torch.rand(n, generator=g),
            }
        )
    advantages = torch.randn(len(lengths), generator=g).tolist()
    if draw(st.booleans()):
        advantages[0] = 0.0
    return Sequences(fields, advantages, [i // 2 for i in range(len(lengths))])


PROPERTIES: dict[str, Objective] = {
    **{name: make() for name, (make, _) in OBJECTIVES.items()},
    "group-mean": Objective(aggregate="group-mean", beta=0.1, entropy_coef=0.1),
    "group-mean, sequence": Objective(Clip(0.5, 0.9), level="sequence", aggregate="group-mean", count_empty=False),
}
#: Their terms are told apart by the whole batch, or have denominators of their own.
WHOLE = {
    n
    for n, o in PROPERTIES.items()
    if o.surrogate.selects or o.filter(EntropyQuantile) or o.kl_aggregate or o.entropy_aggregate
}
every_property = pytest.mark.parametrize("name", PROPERTIES)
few = settings(max_examples=6, deadline=None)


def assert_same(a: tuple[Tensor, ...], b: tuple[Tensor, ...], what: str = "") -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("name", [n for n in PROPERTIES if n != "kl-cov"])  # of equal covariances it takes the first
@few
@given(sequences(), st.randoms(use_true_random=False))
def test_the_order_of_sequences_does_not_matter(name: str, s: Sequences, random: Any) -> None:
    objective, order = PROPERTIES[name], list(range(len(s.advantages)))
    loss, slopes, d_entropy = s.run(objective, s.padded(order))
    shuffled = order.copy()
    random.shuffle(shuffled)
    for made in (s.padded(shuffled), s.packed(shuffled)):
        again, others, d_others = s.run(objective, made)
        assert_same((again, *s.per_sequence(others, shuffled)), (loss, *s.per_sequence(slopes, order)), "slopes")
        assert_same(tuple(s.per_sequence(d_others, shuffled)), tuple(s.per_sequence(d_entropy, order)), "entropy")


@every_property
@few
@given(sequences(), st.integers(0, 3), st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_padding_packing_and_what_is_masked_do_not_matter(name: str, s: Sequences, extra: int, rubbish: float) -> None:
    objective, order = PROPERTIES[name], list(range(len(s.advantages)))
    clean = s.run(objective, s.padded(order))
    assert_same(s.run(objective, s.packed(order)), clean, "packed")
    for a, b in zip(s.run(objective, s.padded(order, rubbish=rubbish)), clean, strict=True):
        assert torch.equal(a, b), "masked values"
    assert_same(s.run(objective, s.padded(order, extra, rubbish)), clean, "padding")
    assert_same(s.run(objective, s.packed(order, rubbish)), clean, "packed, masked values")


@pytest.mark.parametrize("name", [n for n in PROPERTIES if n not in WHOLE])
@few
@given(sequences(least=4), st.sampled_from([1, 2, 4]), st.booleans())
def test_micro_batches_add_up(name: str, s: Sequences, parts: int, packed: bool) -> None:
    """With the normaliser of the whole batch. A further, fully masked micro-batch changes only a normaliser that counts it."""
    objective, order = PROPERTIES[name], list(range(len(s.advantages)))
    arrange = s.packed if packed else s.padded
    masked = [{**f, "mask": torch.zeros_like(f["mask"])} for f in s.fields[:2]]
    s.fields.extend(masked)
    s.advantages.extend([1.0] * len(masked))
    s.groups.extend([99] * len(masked))
    everything = [*order, *range(len(order), len(s.advantages))]
    normalizer = objective.normalizer(arrange(everything)[0])
    if not any(bool(f["mask"].any()) for f in s.fields):
        return
    whole = s.run(objective, arrange(everything), normalizer)
    size = 2 * -(-len(order) // (2 * parts))  # groups, which are pairs, stay together
    batches = [order[i : i + size] for i in range(0, len(order), size)] + [everything[len(order) :]]
    results = [
        s.run(objective, arrange(b), normalizer if isinstance(normalizer, float) else normalizer.clone()) for b in batches
    ]
    assert_same((sum(r[0] for r in results), torch.cat([r[1] for r in results])), whole[:2], "sum")  # type: ignore[arg-type]
    assert_same((torch.cat([r[2] for r in results]),), whole[2:], "entropy")
    assert results[-1][0] == 0
    total = sum(float(objective.normalizer(arrange(b)[0])) for b in batches)
    assert objective.aggregate == "token-sum" or total == pytest.approx(float(normalizer))


@every_property
@few
@given(sequences(), st.floats(0.125, 8.0))
def test_the_normalizer_divides(name: str, s: Sequences, factor: float) -> None:
    objective, order = PROPERTIES[name], list(range(len(s.advantages)))
    batch, *rest = s.padded(order)
    made = (replace(batch, nll_weights=None), *rest)
    objective = replace(objective, kl_aggregate=None, entropy_aggregate=None)
    once, other = s.run(objective, made, 3.0), s.run(objective, made, 3.0 * factor)
    assert_same(tuple(x * factor for x in other), once)


@every_property
@few
@given(sequences(), st.floats(0.0, 4.0))
def test_weights_scale_the_policy_term_alone(name: str, s: Sequences, factor: float) -> None:
    objective, order = PROPERTIES[name], list(range(len(s.advantages)))
    if objective.surrogate.absorbs_weights:
        return
    batch, *rest = s.padded(order)
    assert batch.weights is not None
    nothing, once, scaled = (
        s.run(objective, (replace(batch, weights=batch.weights * c), *rest))
        for c in (0.0, 1.0, factor)  # type: ignore[arg-type]
    )
    for zero, one, f in zip(nothing, once, scaled, strict=True):
        torch.testing.assert_close(f, zero + factor * (one - zero), rtol=2e-5, atol=5e-6)
    if objective.beta == 0 and objective.entropy_coef == 0:
        plain = s.run(objective, (replace(batch, weights=batch.weights * 0, nll_weights=None), *rest))  # type: ignore[arg-type]
        assert plain[0] == 0 and not plain[1].any()


@every_property
@few
@given(sequences())
def test_a_masked_sequence_changes_nothing(name: str, s: Sequences) -> None:
    """With the same normaliser, or if empty sequences do not count."""
    objective, order = replace(PROPERTIES[name], count_empty=False), list(range(len(s.advantages)))
    without_it = s.run(objective, s.padded(order))
    s.fields.insert(0, {**s.fields[-1], "mask": torch.zeros_like(s.fields[-1]["mask"])})
    s.advantages.insert(0, 3.0)
    s.groups.insert(0, 77)
    everyone = list(range(len(s.advantages)))
    for made in (s.padded(everyone), s.packed(everyone)):
        assert_same(s.run(objective, made), without_it)
