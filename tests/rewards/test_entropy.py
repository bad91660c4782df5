"""Entropy as a control: the threshold against torch.quantile, the coefficient against TRL's rule, retold."""

from __future__ import annotations

import math
from math import inf, nan

import pytest
import torch

from grpo_kernels import TokenBatch
from grpo_kernels.rewards.corrections import importance_weights
from grpo_kernels.rewards.entropy import AdaptiveEntropyCoef, entropy_threshold
from support.pairs import refusals

Tensor = torch.Tensor
LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("count, share", [(1, 0.2), (2, 0.73), (5, 1.0), (11, 1e-9), (300, 0.05), (300, 0.2), (100, 0.5)])
def test_threshold_is_torchs_quantile(count, share):
    """Of trained tokens, with ties; what is masked or not finite does not count."""
    entropy, mask = 3 * torch.rand(20, 20), torch.zeros(20, 20, dtype=torch.int64)
    entropy[:, ::7] = 0.5
    mask.view(-1)[torch.randperm(400)[:count]] = 1
    expected = torch.quantile(entropy[mask != 0].double(), 1 - share)
    for poison, trained in ((9.0, mask.bool()), (-1e30, mask), *((x, mask * 0 + 1) for x in (nan, inf, -inf))):
        got = entropy_threshold(torch.where(mask != 0, entropy, poison).requires_grad_(), trained, share)
        assert got.shape == () and got.dtype == torch.float32 and not got.requires_grad
        assert float(got) == pytest.approx(float(expected), rel=1e-7)
    assert float(entropy_threshold(entropy.bfloat16(), mask, 1.0)) == float(entropy[mask != 0].bfloat16().min())


@pytest.mark.parametrize("shape", [(0,), (2, 0), (3, 4)])
def test_no_tokens_keep_all(shape):
    assert float(entropy_threshold(torch.rand(shape), torch.zeros(shape, dtype=torch.bool), 0.2)) == LOWEST


@pytest.mark.slow
def test_more_than_torch_quantile_takes():
    n = 2**24 + 3
    entropy = torch.arange(n, dtype=torch.int32).flip(0).to(torch.float32)  # above 2^24 fp32 holds even numbers only
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(entropy, 0.5)
    assert float(entropy_threshold(entropy, torch.ones(n, dtype=torch.bool), 0.25)) == pytest.approx(0.75 * (n - 1), abs=1)


def test_threshold_waits_for_nothing():
    """Meta tensors have no data, so reading a value raises."""
    assert entropy_threshold(torch.rand(3, 4, device="meta"), torch.ones(3, 4, device="meta"), 0.2).shape == ()


# ---- several ranks

#: [B, T] on each of two ranks: different numbers of tokens, then none on the second.
SIZES = (((2, 9), (4, 3)), ((3, 7), (0, 5)))


def batch_of(case, rank):
    """Its old log-probs are entropies but for their sign."""
    g, size = torch.Generator().manual_seed(10 * case + rank), SIZES[case][rank]
    x, mask = -3 * torch.rand(size, generator=g), torch.rand(size, generator=g) < 0.7
    return TokenBatch(mask.long() * 0, torch.ones(len(x)), mask=mask, old_logps=x, sampler_logps=torch.full_like(x, -1.0))


def one_rank(rank, store):
    torch.set_num_threads(1)
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = dist.group.WORLD
    for case in range(len(SIZES)):
        batches = [batch_of(case, r) for r in range(2)]
        own, every = batches[rank], torch.cat([-b.old_logps[b.mask] for b in batches]).double()
        for share in (0.2, 0.5, 1.0):
            got = entropy_threshold(-own.old_logps, own.mask, share, world)
            assert float(got) == pytest.approx(float(torch.quantile(every, 1 - share)), rel=1e-6)
        assert float(entropy_threshold(own.targets.float(), own.targets, 0.2, world)) == LOWEST
        for level in ("token", "sequence"):
            raw = [importance_weights(b, level=level) for b in batches]
            unit = [w[b.mask] if level == "token" else w.amax(1) for w, b in zip(raw, batches, strict=True) if w.numel()]
            assert all(b.mask.any(1).all() for b in batches)  # so that every sequence counts
            got = importance_weights(own, level=level, normalize=True, process_group=world)
            torch.testing.assert_close(got, raw[rank] / torch.cat(unit).mean(), rtol=1e-5, atol=0)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_of_different_size(tmp_path):
    torch.multiprocessing.spawn(one_rank, (str(tmp_path / "store"),), nprocs=2)


# ---- the coefficient


@pytest.mark.parametrize(
    "options",
    [{}, {"initial": 0.1}, {"step": 0.3, "low": 0.1, "high": 0.5, "initial": 0.2}, {"target": 0.35, "step": 0.05, "high": 0.2}],
    ids=str,
)
def test_the_coefficient_moves_as_trls_does(options):
    """The rule of TRL 1.16 (trl/trainer/grpo_trainer.py, `use_adaptive_entropy`), retold with its defaults. Also at the target;
    it is not applied before the first update, and a new run continues where the checkpoint was."""
    trl = {"target": 0.2, "step": 0.005, "low": 0.0, "high": 1.0, "initial": 0.0} | options
    ours, coef, last, applied = AdaptiveEntropyCoef(**options), trl["initial"], inf, set()
    for i, entropy in enumerate([0.5, 0.2, 0.1, 0.1, 0.3, 0.15, *[0.2001] * 4, 0.0, *(torch.rand(30) / 2).tolist()]):
        assert ours.coef == (coef if last <= trl["target"] else 0.0)
        assert ours.state_dict() == {"coef": coef, "entropy": last}
        ours.update(torch.tensor(entropy, dtype=torch.float64) if i % 2 else entropy)
        moved = coef + (trl["step"] if entropy <= trl["target"] else -trl["step"])
        coef, last = min(max(moved, trl["low"]), trl["high"]), entropy
        applied.add(ours.coef)
        state, ours = ours.state_dict(), AdaptiveEntropyCoef(**options)
        ours.load_state_dict(state)
    assert len(applied) > 2 and 0.0 in applied


# ---- refusals

ONES = torch.ones(3)
REFUSED = [
    (
        entropy_threshold,
        {"entropy": ONES, "mask": ONES, "share": 0.2},
        {
            **{rf"share={share!r}.*\(0, 1\]": {"share": share} for share in (0, -0.1, 1.01, nan, "0.2", None)},
            r"mask has shape \[3\], but entropy has \[3, 1\]": {"entropy": ONES[:, None]},
        },
    ),
    (
        AdaptiveEntropyCoef,
        {},
        {
            "target=-1": {"target": -1},
            "target=nan": {"target": nan},
            "step=inf": {"step": inf},
            "step='1'": {"step": "1"},
            "low=None": {"low": None},
            "high=-0.1": {"high": -0.1},
            "initial=2": {"initial": 2},
        },
    ),
    (
        lambda entropy: AdaptiveEntropyCoef().update(entropy),
        {"entropy": 0.1},
        {f"entropy={entropy!r}": {"entropy": entropy} for entropy in (nan, inf, None, "0.1", True)}
        | {r"entropy=tensor\(\[1": {"entropy": ONES[:2]}, "entropy=nan": {"entropy": torch.tensor(nan)}},
    ),
    (
        lambda **state: AdaptiveEntropyCoef().load_state_dict(state),
        {"coef": 0.1, "entropy": 0.1},
        {"state=.*'x'": {"x": 0}, "coef=2": {"coef": 2}, "entropy='a'": {"entropy": "a"}},
    ),
    (AdaptiveEntropyCoef().load_state_dict, {"state": {"coef": 0.1, "entropy": inf}}, {"state={}": {"state": {}}}),
]


@refusals(REFUSED)
def test_refusals(refused):
    refused()


def test_what_is_refused_changes_nothing():
    coef = AdaptiveEntropyCoef()
    for call in (lambda: coef.update(math.nan), lambda: coef.load_state_dict({"coef": 0.1, "entropy": "a"})):
        with pytest.raises(ValueError, match="entropy="):
            call()
    assert coef.state_dict() == {"coef": 0.0, "entropy": inf}
