"""SkyRL: policy losses of its registry, its functions of logits and its Megatron head, compared with a float64 transcription,
and with its own code if that is on the path."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels import Objective
from grpo_kernels.formulas.surrogates import Cispo, Clip, Sapo
from grpo_kernels.integrations import skyrl
from support.trainers import (
    DATA,
    MASK,
    B,
    Data,
    H,
    T,
    V,
    assert_same,
    clipped,
    double,
    log_softmax_of,
    mean_of,
    stand_in,
    their_file,
    their_file_beside,
    value_and_gradient,
)

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins")


HOME = "skyrl.backends.skyrl_train"
SKYRL: dict[str, tuple[str | Objective, dict[str, Any]]] = {
    "dual_clip": (
        Objective.preset("ppo", numerics="skyrl", beta=0.0, surrogate=Clip(0.1, 0.28, 1.6), aggregate="token-sum"),
        {"policy_loss_type": "dual_clip", "eps_clip_low": 0.1, "eps_clip_high": 0.28, "clip_ratio_c": 1.6},
    ),
    "regular": ("grpo", {"policy_loss_type": "regular"}),
    "gspo": ("gspo", {}),
    "sapo": (Objective.preset("sapo", numerics="skyrl", beta=0.0, surrogate=Sapo(0.9, 1.3), aggregate="token-sum"), {}),
    "cispo": (
        Objective.preset("cispo", numerics="skyrl", beta=0.0, surrogate=Cispo(1.3, 0.75), aggregate="token-sum"), {},
    ),
    "dppo": ("dppo_tv", {}),
    "rollout_is": ("rollout_is", {}),
}  # fmt: skip
THEIRS = {
    "dual_clip": "ppo_policy_loss", "regular": "ppo_policy_loss", "gspo": "gspo_policy_loss", "sapo": "sapo_policy_loss",
    "cispo": "compute_policy_loss_cispo", "dppo": "dppo_policy_loss", "rollout_is": "rollout_is_policy_loss",
}  # fmt: skip


def skyrl_config(changes: dict[str, Any], anchor: str = "old") -> SimpleNamespace:
    return SimpleNamespace(
        **{"eps_clip_low": 0.2, "eps_clip_high": 0.2, "clip_ratio_c": 3.0, "loss_reduction": "sequence_mean"} | changes,
        sapo=SimpleNamespace(tau_pos=0.9, tau_neg=1.3),
        cispo=SimpleNamespace(cispo_eps_clip_low=0.25, cispo_eps_clip_high=0.3, cispo_anchor=anchor),
        dppo=SimpleNamespace(dppo_type="binary_tv", delta_low=0.2, delta_high=0.2),
        off_policy_correction=None,
    )


def corrected(loss: Tensor, old: Tensor, rollout: Tensor | None, mask: Tensor, config: Any) -> Any:
    """Stands in for SkyRL's: a weight for each token, and a sequence that is dropped."""
    if rollout is None:
        return loss, mask, {}
    keep = torch.ones(B, 1, dtype=loss.dtype)
    keep[1] = 0
    return loss * (old - rollout).exp().clamp(max=1.2), mask * keep, {"tis": 1.0}


def skyrl_loss(what: str, x: Tensor, data: Data, config: Any, rollout: Tensor | None) -> Any:
    old, A = double(data.old, data.advantages)
    to_rollout = what in ("dppo", "rollout_is") or (what == "cispo" and config.cispo.cispo_anchor == "rollout")
    d = (x - (rollout if to_rollout and rollout is not None else old)).clamp(-20, 20)
    more = {}
    low, high = config.eps_clip_low, config.eps_clip_high
    n = MASK.sum(1, keepdim=True).clamp(min=1)
    moved = x.detach().exp() - (old if rollout is None else rollout).exp()
    if what in ("dual_clip", "regular"):
        loss, bound = clipped(d.exp(), A, low, high, config.clip_ratio_c if what == "dual_clip" else None)
    elif what == "gspo":
        own = x - x.detach() + ((d * MASK).sum(1, keepdim=True) / n).detach()
        loss, bound = clipped(own.exp(), A, low, high)
    elif what == "sapo":
        tau = torch.where(A > 0, config.sapo.tau_pos, config.sapo.tau_neg).double()
        loss, bound = -torch.sigmoid(tau * (d.exp() - 1)) * 4 / tau * A, torch.zeros(B, T)
    elif what == "cispo":
        r = d.exp()
        inner = r.clamp(1 - config.cispo.cispo_eps_clip_low, 1 + config.cispo.cispo_eps_clip_high)
        loss, bound = -A * inner.detach() * x, inner != r
        kept = r.detach()[MASK]
        more = {
            "cispo/ratio_mean": kept.mean(), "cispo/ratio_clamped_mean": inner.detach()[MASK].mean(),
            "cispo/ratio_max": kept.max(), "cispo/ratio_min": kept.min(),
        }  # fmt: skip
    elif what == "dppo":
        bound = ~torch.where(A > 0, moved <= 0.2, moved >= -0.2)
        loss = -d.exp() * A * ~bound
    else:
        r = d.exp().detach()
        bound = ~((r > 1 - low) & (r < 1 + high))
        loss = -(r * ~bound) * A * x
    loss, mask, metrics = corrected(loss, old, rollout, MASK.double(), None)
    # Over the tokens that are there before the correction.
    named = {"clip_ratio": mean_of(bound.double()), **more}
    return (loss * mask).sum(), {name: float(value) for name, value in named.items()} | metrics


def check_skyrl(data: Data, theirs: Callable[..., Any], losses: Iterable[str] = THEIRS) -> None:
    for what in losses:
        objective, changes = SKYRL[what]
        config = skyrl_config(changes)
        for rollout in (None, data.sampler):
            if rollout is None and what == "rollout_is":
                continue
            ours = skyrl.policy_loss(objective)
            (loss, metrics), gradient = value_and_gradient(
                lambda x, f=ours, c=config, q=rollout: f(x, data.old, data.advantages, c, MASK.float(), q),
                data.logps,
                torch.float32,
            )
            exact = None if rollout is None else rollout.double()
            (want, named), expected = value_and_gradient(
                lambda x, w=what, c=config, q=exact: theirs(w, x, data, c, q), data.logps, torch.float64
            )
            assert_same((loss, gradient), (want, expected))
            assert set(named) <= set(metrics) and all(isinstance(v, float) for v in metrics.values()), what
            assert all(name in named or name.startswith("cispo/") for name in metrics), what  # which SkyRL 0.3.0 has not yet
            if rollout is None or what == "cispo":  # with one, ours is over the tokens that the correction leaves
                assert metrics == metrics | {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in named.items()}, (
                    what
                )


def test_skyrl_losses() -> None:
    stand_in(f"{HOME}.utils.off_policy_correction_utils", apply_off_policy_correction=corrected)
    check_skyrl(DATA, skyrl_loss)


def test_skyrl_logs_the_ratios_of_cispo_and_anchors_them_where_it_is_told() -> None:
    stand_in(
        f"{HOME}.utils.off_policy_correction_utils", apply_off_policy_correction=lambda loss, old, q, mask, _: (loss, mask, {})
    )
    config = skyrl_config({}, anchor="rollout")
    config.off_policy_correction = SimpleNamespace(tis_ratio_type=None)
    ours = skyrl.policy_loss(SKYRL["cispo"][0])
    args = DATA.old, DATA.advantages, config, MASK.float()
    mine, gradient = value_and_gradient(lambda x: ours(x, *args, DATA.sampler), DATA.logps, torch.float32)
    named: dict[str, float] = {}

    def theirs(x: Tensor) -> Tensor:
        ratio = (x - DATA.sampler.double()).exp()
        inner = ratio.clamp(0.75, 1.3).detach()
        named.update(
            {"clip_ratio": float(mean_of((inner != ratio).double())), "cispo/ratio_mean": float(mean_of(ratio.detach()))}
        )
        named.update(
            {"cispo/ratio_max": float(ratio.detach()[MASK].max()), "cispo/ratio_min": float(ratio.detach()[MASK].min())}
        )
        named["cispo/ratio_clamped_mean"] = float(mean_of(inner))
        return -(DATA.advantages.double() * inner * x * MASK).sum()

    assert_same((mine, gradient), value_and_gradient(theirs, DATA.logps, torch.float64))
    assert mine[1] == pytest.approx(named, rel=1e-5)
    empty = ours(DATA.logps, *args[:3], torch.zeros(B, T), DATA.sampler)[1]
    assert empty["clip_ratio"] == 0 and empty["cispo/ratio_max"] == 1
    with pytest.raises(ValueError, match="rollout_logprobs is None"):
        ours(DATA.logps, *args)
    config.off_policy_correction.tis_ratio_type = "token"
    with pytest.raises(ValueError, match=r"tis_ratio_type='token'.*double-count"):
        ours(DATA.logps, *args, DATA.sampler)


def test_skyrl_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("loguru", reason="loguru, which SkyRL imports, is not installed")
    pytest.importorskip("jaxtyping", reason="jaxtyping, which SkyRL imports, is not installed")
    pytest.importorskip("ray", reason="ray, which SkyRL imports, is not installed")
    utils = their_file(f"{HOME}.utils.torch_utils", monkeypatch, skyrl__train__config={"AlgorithmConfig": object})
    stand_in(f"{HOME}.utils.off_policy_correction_utils", apply_off_policy_correction=corrected)
    ppo = their_file_beside(f"{HOME}.utils.ppo_utils", utils)

    def theirs(what: str, x: Tensor, data: Data, config: Any, rollout: Tensor | None) -> Any:
        return getattr(ppo, THEIRS[what])(x, *double(DATA.old, DATA.advantages), config, MASK.double(), rollout)

    # Before 0.3.0 it has no DPPO.
    check_skyrl(DATA, theirs, [what for what in SKYRL if hasattr(ppo, THEIRS[what])])
    names = skyrl.register()
    assert "fused_dapo" in names and callable(ppo.PolicyLossRegistry.get("fused_dapo"))

    logits, labels = torch.randn(B, T, V), torch.randint(V, (B, T))
    want = utils.logprobs_from_logits(logits, labels), utils.chunked_entropy_from_logits(logits, True, MASK)
    with skyrl.bind(strict=True):
        got = utils.logprobs_from_logits(logits, labels), utils.chunked_entropy_from_logits(logits, True, MASK)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_skyrl_registry() -> None:
    registered: dict[str, Any] = {}

    def register_policy_loss(name: str) -> Any:
        return lambda f: registered.setdefault(name, f)

    stand_in(f"{HOME}.utils.ppo_utils", register_policy_loss=register_policy_loss)
    names = skyrl.register("ours_")
    assert names == list(registered) and {"ours_dapo", "ours_gspo", "ours_vespo"} <= set(names)
    assert not {"ours_clip_cov", "ours_kl_cov", "ours_dro", "ours_a2po", "ours_distillation"} & set(names)
    for bad, message in (
        ("clip_cov", "not linear in the advantage"),
        (Objective.preset("grpo", aggregate="token-sum", beta=0.1), "adds KL and entropy itself"),
        (Objective(), 'aggregate="token-sum"'),
    ):
        with pytest.raises(ValueError, match=message):
            skyrl.policy_loss(bad)


def test_skyrl_functions() -> None:
    """Stand-ins with the signatures of the two functions of logits and of the Megatron dispatcher."""

    def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
        return log_softmax_of(logits, labels)[0]

    def chunked_entropy_from_logits(
        logits: Any, requires_grad: bool = False, attention_mask: Any = None, chunk_size: int = 1
    ) -> Any:
        entropy = log_softmax_of(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))[1]
        entropy = entropy if attention_mask is None else entropy * attention_mask
        return entropy if requires_grad else entropy.detach()

    def _fused_lm_head_logprob_apply(backend: str, hidden: Tensor, weight: Tensor, target: Tensor, *_: Any) -> Tensor:
        return log_softmax_of(hidden.double() @ weight.double().T, target)[0]

    names = {"logprobs_from_logits": logprobs_from_logits, "chunked_entropy_from_logits": chunked_entropy_from_logits}
    stand_in(f"{HOME}.utils.torch_utils", **names)
    wrapper = stand_in(f"{HOME}.workers.model_wrapper", **names)
    home = f"{HOME}.distributed.megatron.model_utils"
    megatron = stand_in(home, _fused_lm_head_logprob_apply=_fused_lm_head_logprob_apply)
    labels, logits, weight = torch.randint(V, (B, T)), torch.randn(B, T, V), torch.randn(V, H)
    up = torch.linspace(-1, 1, T)

    def from_logits(x: Tensor) -> Tensor:
        x = x * 1.0  # a model's output
        entropy = wrapper.chunked_entropy_from_logits(x, requires_grad=True, attention_mask=MASK.long(), chunk_size=3)
        return (wrapper.logprobs_from_logits(x, labels, inplace_backward=False) * up).sum() - entropy.sum()

    def from_hidden(x: Tensor) -> Tensor:
        w = weight.to(x.dtype)
        return (megatron._fused_lm_head_logprob_apply("torch", x, w, labels, 0, V, 4, None, False) * up).sum()

    hidden = torch.randn(B, T, H)
    want = value_and_gradient(from_logits, logits, torch.float64), value_and_gradient(from_hidden, hidden, torch.float64)
    with skyrl.bind(megatron=True, strict=True) as slots:
        assert_same(value_and_gradient(from_logits, logits, torch.float32), want[0])
        assert_same(value_and_gradient(from_hidden, hidden, torch.float32), want[1])
        assert slots.counts == {"fused": 3}
        leaf = hidden.clone().requires_grad_()
        assert not megatron._fused_lm_head_logprob_apply("torch", leaf, weight, labels, 0, V, 4, None, True).requires_grad
        assert not wrapper.chunked_entropy_from_logits(logits.requires_grad_()).requires_grad
    assert wrapper.logprobs_from_logits is logprobs_from_logits


# ---- over recorded sets

REPLAY = f"{HOME}.utils.sample_support_replay"


def supported() -> tuple[Tensor, ...]:
    """Hidden states, weight, sampled ids [B, T], sets [B, T, 5] padded with -1 at their ends: of one id, of several, of none."""
    g = torch.Generator().manual_seed(8)
    hidden, weight, sampled = (
        torch.randn(B, T, H, generator=g),
        torch.randn(V, H, generator=g),
        torch.randint(V, (B, T), generator=g),
    )
    others = torch.stack([torch.randperm(V, generator=g)[:5] for _ in range(B * T)]).view(B, T, 5)
    at = torch.arange(5)
    sets = torch.where((others == sampled[..., None]) | (at > torch.randint(1, 5, (B, T, 1), generator=g)), -1, others)
    sets[..., 0] = sampled
    sets = sets.sort(-1, descending=True).values
    sets[1, :, 1:], sets[1, :, 0], sets[:, 2] = -1, sampled[1], -1
    return hidden, weight, sampled, sets.to(torch.int32)


def over_support(logits: Tensor, sampled: Tensor, sets: Tensor) -> Tensor:
    """In the logits' precision: all others at -inf; 0 where there is no set."""
    keep = torch.zeros(B, T, V + 1, dtype=torch.bool).scatter(2, sets.long() % (V + 1), True)[..., :V]
    has = (sets >= 0).any(-1)
    logps = torch.log_softmax(logits.masked_fill(~keep & has[..., None], -torch.inf), -1)
    return torch.where(has, logps.gather(-1, sampled[..., None])[..., 0], 0.0)


def assert_supported(score: Callable[..., Any], dtype: torch.dtype = torch.float32) -> None:
    """`score` is bound: from logits and from hidden states, value and gradient of each leaf."""
    hidden, weight, sampled, sets = supported()
    up, bounds = torch.linspace(-1, 2, T), {"vocab_start_index": 0, "vocab_end_index": V, "tp_group": None}

    def from_hidden(h: Tensor, w: Tensor) -> Tensor:
        logps, has = score(h, sampled, sets, lm_head_weight=w, temperature=0.7, chunk_size=3, **bounds)
        assert torch.equal(has, (sets >= 0).any(-1)) and (logps[~has] == 0).all()
        assert (logps[1] == 0).all() or dtype != torch.float32
        return (logps * up).sum()

    for name, leaf, other in (("hidden", hidden, weight), ("weight", weight, hidden)):

        def ours(x: Tensor, name: str = name, other: Tensor = other) -> Tensor:
            return from_hidden(x, other.to(x)) if name == "hidden" else from_hidden(other.to(x), x)

        def exact(x: Tensor, name: str = name, other: Tensor = other) -> Tensor:
            h, w = (x, other.double()) if name == "hidden" else (other.double(), x)
            return (over_support(h @ w.T / 0.7, sampled, sets) * up).sum()

        assert_same(value_and_gradient(ours, leaf, dtype), value_and_gradient(exact, leaf, torch.float64))
    logits = hidden @ weight.T
    assert_same(
        value_and_gradient(lambda x: (score(x, sampled, sets, **bounds)[0] * up).sum(), logits, dtype),
        value_and_gradient(lambda x: (over_support(x, sampled, sets) * up).sum(), logits, torch.float64),
    )


def test_skyrl_scores_over_its_support() -> None:
    stand_in(f"{HOME}.utils.torch_utils", logprobs_from_logits=lambda: None, chunked_entropy_from_logits=lambda: None)
    home = stand_in(REPLAY, sample_support_logprobs=lambda *_, **__: None)
    with skyrl.bind(replay=True, strict=True) as slots:
        assert_supported(home.sample_support_logprobs)
        assert set(slots.counts) == {"fused"}
        hidden, weight, sampled, sets = supported()
        bounds = {"vocab_start_index": 0, "vocab_end_index": V + 1, "tp_group": None}
        with pytest.raises(ValueError, match=rf"vocab_end_index={V + 1}"):
            home.sample_support_logprobs(hidden @ weight.T, sampled, sets, **bounds)
        with pytest.raises(ValueError, match="support_ids has shape"):
            home.sample_support_logprobs(hidden @ weight.T, sampled, sets[:, 1:], **bounds)


@pytest.mark.parametrize("gradient", [False, True])
def test_skyrl_entropy_over_its_support(gradient: bool) -> None:
    """The type and the arguments of newer versions: the entropy of the set, 0 where there is none, with a gradient if asked."""
    stand_in(f"{HOME}.utils.torch_utils", logprobs_from_logits=lambda: None, chunked_entropy_from_logits=lambda: None)
    home = stand_in(REPLAY, sample_support_scores=lambda *_, **__: None, SampleSupportScores=SimpleNamespace)
    hidden, weight, sampled, sets = supported()
    has, up = (sets >= 0).any(-1), torch.linspace(-1, 2, T)
    bounds = {"vocab_start_index": 0, "vocab_end_index": V, "tp_group": None}

    def exact(h: Tensor) -> Tensor:
        keep = torch.zeros(B, T, V + 1, dtype=torch.bool).scatter(2, sets.long() % (V + 1), True)[..., :V] | ~has[..., None]
        z = h @ weight.double().T / 0.7
        logps = torch.log_softmax(torch.where(keep, z, -1e4), -1)
        entropy = torch.where(has, -(logps.exp() * logps).sum(-1), 0.0)
        return ((logps.gather(-1, sampled[..., None])[..., 0] * has + (entropy if gradient else entropy.detach())) * up).sum()

    def ours(h: Tensor) -> Tensor:
        asked = {"compute_entropy": True, "entropy_requires_grad": gradient, "lm_head_weight": weight, "temperature": 0.7}
        found = home.sample_support_scores(h, sampled, sets, **asked, **bounds)
        assert torch.equal(found.valid_mask, has) and (found.entropy[~has] == 0).all()
        assert found.entropy.requires_grad is gradient
        return ((found.logprobs + found.entropy) * up).sum()

    with skyrl.bind(replay=True, strict=True):
        want = value_and_gradient(exact, hidden, torch.float64)
        assert_same(value_and_gradient(ours, hidden, torch.float32), want)
        asked = {"compute_entropy": False, "entropy_requires_grad": False}
        assert home.sample_support_scores(hidden @ weight.T, sampled, sets, **asked, **bounds).entropy is None


@pytest.mark.parametrize("fault", ["a sampled id outside of its set", "a set that lists an id twice"])
def test_skyrl_scores_what_is_no_set_itself(fault: str) -> None:
    """It adds up the listed ids, each as often as it is listed, and not the sampled id where that is not among them."""

    def listed(logits: Tensor, sampled: Tensor, sets: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        z = torch.where(sets >= 0, logits.gather(-1, sets.clamp(min=0).long()), -torch.inf)
        has = (sets >= 0).any(-1)
        own = logits.gather(-1, sampled[..., None])[..., 0]
        return torch.where(has, own - torch.where(has[..., None], z, 0.0).logsumexp(-1), 0.0), has

    stand_in(f"{HOME}.utils.torch_utils", logprobs_from_logits=lambda: None, chunked_entropy_from_logits=lambda: None)
    home = stand_in(REPLAY, sample_support_logprobs=listed)
    hidden, weight, sampled, sets = supported()
    if fault.startswith("a set"):
        sets[0, 0], sets[0, 1] = sampled[0, 0], torch.tensor([int(sampled[0, 1])] * 2 + [-1] * 3)
    else:
        sets[0, 0], sets[0, 1] = -1, torch.tensor([(int(sampled[0, 1]) + 1) % V] + [-1] * 4)
    logits, bounds = hidden @ weight.T, {"vocab_start_index": 0, "vocab_end_index": V, "tp_group": None}
    up = torch.linspace(-1, 2, T)

    def score(x: Tensor) -> Tensor:
        return (home.sample_support_logprobs(x, sampled, sets, **bounds)[0] * up).sum()

    want = value_and_gradient(score, logits, torch.float64)
    with skyrl.bind(replay=True) as slots:
        assert_same(value_and_gradient(score, logits, torch.float32), want)
        assert slots.counts == {f"skyrl: {fault}": 1}
    with pytest.raises(RuntimeError, match=f"left to skyrl: {fault}"), skyrl.bind(replay=True, strict=True):
        score(logits)


def test_skyrl_support_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL's own function of hidden states and of logits, in fp64, and ours in its place."""
    stubs: dict[str, dict[str, Any]] = {
        "skyrl__backends__skyrl_train__distributed__megatron__token_metadata": dict.fromkeys(
            ("TokenMetadataLayout", "align_token_metadata", "scatter_packed_token_values_to_batch")
        ),
        "skyrl__backends__skyrl_train__utils__packed_tensor": {"PackedTensor": None},
        "skyrl__backends__skyrl_train__utils__sample_support": {
            "SAMPLE_SUPPORT_FIELD": "", "SAMPLE_SUPPORT_NO_ROW": -1, "SAMPLE_SUPPORT_PADDING": -1,
            "SAMPLE_SUPPORT_TORCH_DTYPE": torch.int32, "align_sample_support_row_ids": None,
        },
        "skyrl__backends__skyrl_train__utils__torch_utils": {"logprobs_from_logits": lambda: None, "chunked_entropy_from_logits": lambda: None},
    }  # fmt: skip
    home = their_file(REPLAY, monkeypatch, **{**stubs, "skyrl__utils__token_metadata": dict.fromkeys(
        ("TokenMetadataLayout", "align_token_metadata", "scatter_packed_token_values_to_batch"))})  # fmt: skip

    def score(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not hasattr(home, "sample_support_scores"):
            return home.sample_support_logprobs(*args, **kwargs)
        scores = home.sample_support_scores(*args, compute_entropy=False, entropy_requires_grad=False, **kwargs)
        return scores.logprobs, scores.valid_mask

    assert_supported(score, torch.float64)
    with skyrl.bind(replay=True, strict=True):
        assert_supported(score)


def test_skyrl_records_become_sets() -> None:
    """[B, A, K] and ids with offsets are the same sets; an end token may have none, and no other."""
    padded = torch.tensor(
        [[[4, 2, -1], [7, -1, -1], [-1, -1, -1]], [[1, -1, -1], [-1, -1, -1], [-1, -1, -1]]], dtype=torch.int32
    )
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    sets = skyrl.kept_sets(padded, mask)
    assert sets.padded().tolist() == [[4, 2], [7, -1], [-1, -1], [1, -1], [-1, -1], [-1, -1]]
    ragged = torch.tensor([4, 2, 7, 1], dtype=torch.int32), torch.tensor([0, 2, 3, 3, 4], dtype=torch.int32)
    assert skyrl.kept_sets(ragged, mask).padded().tolist() == sets.padded().tolist()
    with pytest.raises(ValueError, match=r"no ids for tokens \[1, 2\] of sample 0"):
        skyrl.kept_sets(padded.index_fill(1, torch.tensor([1]), -1), mask)
    with pytest.raises(ValueError, match="4 sets, but there are 3 response tokens"):
        skyrl.kept_sets(ragged, mask, torch.tensor([[1, 1, 0], [1, 0, 0]]))
