"""Entropy as a control: the quantile against torch.quantile and TRL, the coefficient against TRL's transitions."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_kernels import TokenBatch
from grpo_kernels.rewards.corrections import importance_weights
from grpo_kernels.rewards.entropy import AdaptiveEntropyCoef, entropy_threshold

Tensor = torch.Tensor
LOWEST = torch.finfo(torch.float32).min


def quantile(values: list[float], q: float) -> float:
    """Linear interpolation between the two order statistics around q (n - 1)."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@pytest.mark.parametrize("share", [1e-9, 0.05, 0.2, 0.5, 0.73, 1.0])
@pytest.mark.parametrize("count", [1, 2, 5, 11, 300])
def test_threshold_is_torchs_quantile(count: int, share: float) -> None:
    entropy = 3 * torch.rand(400)
    entropy[::7] = 0.5  # ties
    mask = torch.zeros(400, dtype=torch.bool)
    mask[torch.randperm(400)[:count]] = True
    got = entropy_threshold(entropy, mask, share)
    assert got.shape == () and got.dtype == torch.float32
    expected = torch.quantile(entropy[mask].double(), 1 - share)
    assert float(got) == pytest.approx(float(expected), rel=1e-7)
    assert float(got) == pytest.approx(quantile(entropy[mask].tolist(), 1 - share), rel=1e-7)
    kept = int((entropy[mask] >= got).sum())
    assert kept >= max(1, math.floor(share * (count - 1)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 12, width=32), st.booleans()), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_threshold_in_general(tokens: list[tuple[float, bool]], share: float) -> None:
    entropy, mask = torch.tensor([e for e, _ in tokens]), torch.tensor([m for _, m in tokens])
    got = float(entropy_threshold(entropy, mask, share))
    values = [e for e, trained in tokens if trained]
    if not values:
        assert got == LOWEST
        return
    assert got == pytest.approx(quantile(values, 1 - share), rel=1e-6, abs=1e-37)
    assert min(values) <= got <= max(values)


def test_masked_and_non_finite_entropies_do_not_count() -> None:
    entropy = torch.tensor([[1.0, math.nan, 2.0, 9.0, -math.inf], [3.0, 4.0, math.inf, 5.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0, 1], [1, 1, 1, 1, 0]])
    assert float(entropy_threshold(entropy, mask, 0.5)) == 3.0  # of 1, 2, 3, 4, 5
    for poison in (math.nan, math.inf, -math.inf, -1e30):
        entropy[0, 3] = poison
        assert float(entropy_threshold(entropy, mask.bool(), 0.5)) == 3.0
    assert float(entropy_threshold(entropy.bfloat16(), mask, 1.0)) == 1.0
    assert not entropy_threshold(entropy.requires_grad_(), mask, 0.5).requires_grad


@pytest.mark.parametrize("shape", [(0,), (2, 0), (3, 4)])
def test_no_tokens_keep_all(shape: tuple[int, ...]) -> None:
    got = entropy_threshold(torch.rand(shape), torch.zeros(shape, dtype=torch.bool), 0.2)
    assert math.isfinite(got) and float(got) == LOWEST


@pytest.mark.slow
def test_more_than_torch_quantile_takes() -> None:
    n = 2**24 + 3
    entropy = torch.arange(n, dtype=torch.int32).flip(0).to(torch.float32)  # above 2^24 fp32 holds even numbers only
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(entropy, 0.5)
    assert float(entropy_threshold(entropy, torch.ones(n, dtype=torch.bool), 0.25)) == pytest.approx(0.75 * (n - 1), abs=1)


def test_threshold_waits_for_nothing() -> None:
    with FakeTensorMode():
        assert entropy_threshold(torch.rand(3, 4), torch.ones(3, 4, dtype=torch.bool), 0.2).shape == ()


def test_trl_entropy_mask() -> None:
    """TRL's own function, on one process. torch.quantile ranks in fp32, so counts are kept where both round alike."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    here = SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x)
    entropy = 2 * torch.rand(6, 21)
    mask = torch.rand(6, 21) < 0.8
    for share in (0.1, 0.2, 0.5, 0.8):
        expected = trainer.get_high_entropy_mask(SimpleNamespace(accelerator=here), entropy, mask.int(), 1 - share)
        got = (entropy >= entropy_threshold(entropy, mask, share)) & mask
        assert torch.equal(got, expected)
        assert 0 < got.sum() < mask.sum()


@pytest.mark.parametrize("share", [0, -0.1, 1.01, math.nan, "0.2", None])
def test_bad_share(share: Any) -> None:
    with pytest.raises(ValueError, match=r"share=.*\(0, 1\]"):
        entropy_threshold(torch.rand(3), torch.ones(3), share)


def test_bad_shapes() -> None:
    with pytest.raises(ValueError, match=r"mask has shape \[3\], but entropy has \[3, 1\]"):
        entropy_threshold(torch.rand(3, 1), torch.ones(3), 0.2)


# ---- several ranks

#: [B, T] on each of two ranks: different numbers of tokens, then none on the second.
SIZES = (((2, 9), (4, 3)), ((3, 7), (0, 5)))
SHARES = (0.2, 0.5, 1.0)
LEVELS = ("token", "sequence")


def rank_inputs(case: int, rank: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(10 * case + rank)
    size = SIZES[case][rank]
    return 3 * torch.rand(size, generator=g), torch.rand(size, generator=g) < 0.7


def rank_batch(case: int, rank: int) -> TokenBatch:
    x, mask = rank_inputs(case, rank)
    targets = torch.zeros(x.shape, dtype=torch.int64)
    return TokenBatch(targets, torch.ones(len(x)), mask=mask, old_logps=-x, sampler_logps=torch.full_like(x, -1.0))


def one_rank(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = dist.group.WORLD
    for case in range(len(SIZES)):
        entropy, mask = rank_inputs(case, rank)
        thresholds = [float(entropy_threshold(entropy, mask, share, world)) for share in SHARES]
        nothing = float(entropy_threshold(entropy, torch.zeros_like(mask), 0.2, world))
        local = float(entropy_threshold(entropy, mask, 0.5))
        batch = rank_batch(case, rank)
        weights = [importance_weights(batch, level=level, normalize=True, process_group=world)[mask] for level in LEVELS]
        results.put((case, rank, thresholds, nothing, local, [w.tolist() for w in weights]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_of_different_size(tmp_path: Path) -> None:
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(one_rank, (str(tmp_path / "store"), results), nprocs=2)
    for case, rank, thresholds, nothing, local, weights in (results.get() for _ in range(2 * len(SIZES))):
        inputs = [rank_inputs(case, r) for r in range(2)]
        every = torch.cat([entropy[mask] for entropy, mask in inputs]).tolist()
        assert thresholds == pytest.approx([quantile(every, 1 - share) for share in SHARES], rel=1e-6)
        own = inputs[rank][0][inputs[rank][1]].tolist()
        assert nothing == LOWEST and local == (pytest.approx(quantile(own, 0.5), rel=1e-6) if own else LOWEST)
        assert len(own) == len(every) or local != pytest.approx(thresholds[1], rel=1e-3)
        for got, level in zip(weights, LEVELS, strict=True):
            raw = [importance_weights(rank_batch(case, r), level=level) for r in range(2)]
            unit = [w[mask] if level == "token" else w.amax(1) for w, (_, mask) in zip(raw, inputs, strict=True) if w.numel()]
            assert all(mask.any(1).all() for _, mask in inputs)  # so that every sequence counts
            expected = raw[rank][inputs[rank][1]] / torch.cat(unit).mean()
            assert got == pytest.approx(expected.tolist(), rel=1e-5)


# ---- the coefficient


class Trl:
    """The rule of TRL 1.16 (trl/trainer/grpo_trainer.py, `use_adaptive_entropy`), retold."""

    def __init__(self, coef: float, target: float, delta: float, low: float, high: float) -> None:
        self.coef, self.target, self.delta, self.low, self.high = coef, target, delta, low, high
        self.last = math.inf

    @property
    def applied(self) -> float:
        return self.coef if self.last <= self.target else 0.0

    def step(self, entropy: float) -> None:
        moved = self.coef + (self.delta if entropy <= self.target else -self.delta)
        self.coef = min(max(moved, self.low), self.high)
        self.last = entropy


def test_known_transitions() -> None:
    coef = AdaptiveEntropyCoef()
    assert coef.coef == 0.0
    applied = []
    for entropy in (0.5, 0.2, 0.1, 0.1, 0.3, 0.15, 0.2001, 0.2001, 0.2001, 0.2001, 0.0):
        coef.update(entropy)
        applied.append(coef.coef)
    #                     down at 0, at the target: up, up, up, above: not applied, ...
    assert applied == pytest.approx([0, 0.005, 0.01, 0.015, 0, 0.015, 0, 0, 0, 0, 0.005])


def test_starts_inactive() -> None:
    coef = AdaptiveEntropyCoef(initial=0.1)
    assert coef.coef == 0.0 and coef.state_dict() == {"coef": 0.1, "entropy": math.inf}
    coef.update(torch.tensor(0.1))
    assert coef.coef == pytest.approx(0.105)
    coef.update(0.3)
    assert coef.coef == 0.0 and coef.state_dict()["coef"] == pytest.approx(0.1)


def test_the_coefficient_stays_in_its_range() -> None:
    coef = AdaptiveEntropyCoef(step=0.3, low=0.1, high=0.5, initial=0.2)
    seen = []
    for entropy in (0, 0, 0, 1, 1, 1, 0):
        coef.update(entropy)
        seen.append(coef.state_dict()["coef"])
    assert seen == pytest.approx([0.5, 0.5, 0.5, 0.2, 0.1, 0.1, 0.4])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 0.5), max_size=40), st.floats(0, 0.5), st.floats(0, 0.1), st.floats(0, 0.2), st.floats(0.2, 1.0))
def test_trls_rule(entropies: list[float], target: float, step: float, low: float, high: float) -> None:
    ours = AdaptiveEntropyCoef(target=target, step=step, low=low, high=high, initial=low)
    theirs = Trl(low, target, step, low, high)
    for i, entropy in enumerate(entropies):
        ours.update(entropy)
        theirs.step(entropy)
        assert ours.coef == theirs.applied and ours.state_dict() == {"coef": theirs.coef, "entropy": theirs.last}
        if i == 3:  # a new run continues where the checkpoint was
            state, ours = ours.state_dict(), AdaptiveEntropyCoef(target=target, step=step, low=low, high=high, initial=low)
            ours.load_state_dict(state)


def test_trls_defaults() -> None:
    config = pytest.importorskip("trl.trainer.grpo_config").GRPOConfig
    defaults = {name: config.__dataclass_fields__[name].default for name in config.__dataclass_fields__}
    coef = AdaptiveEntropyCoef()
    assert (coef.target, coef.step) == (defaults["entropy_target"], defaults["entropy_coef_delta"])
    assert (coef.low, coef.high) == (defaults["entropy_coef_min"], defaults["entropy_coef_max"])
    assert coef.state_dict()["coef"] == defaults["entropy_coef"]


@pytest.mark.parametrize(
    "name, value",
    [("target", -1), ("target", math.nan), ("step", math.inf), ("step", "1"), ("low", None), ("high", -0.1), ("initial", 2)],
)
def test_bad_coefficients(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}="):
        AdaptiveEntropyCoef(**{name: value})


@pytest.mark.parametrize("entropy", [math.nan, math.inf, None, "0.1", True, torch.ones(2), torch.tensor(math.nan)], ids=str)
def test_bad_entropies(entropy: Any) -> None:
    coef = AdaptiveEntropyCoef()
    with pytest.raises(ValueError, match="entropy="):
        coef.update(entropy)
    assert coef.state_dict() == {"coef": 0.0, "entropy": math.inf}


@pytest.mark.parametrize(
    "state",
    [{}, {"coef": 0.1}, {"coef": 0.1, "entropy": 0.1, "x": 0}, {"coef": 2, "entropy": 0.1}, {"coef": 0, "entropy": "a"}],
)
def test_bad_states(state: dict[str, Any]) -> None:
    coef = AdaptiveEntropyCoef()
    with pytest.raises(ValueError, match=r"state=|coef=|entropy="):
        coef.load_state_dict(state)
    assert coef.state_dict() == {"coef": 0.0, "entropy": math.inf}
