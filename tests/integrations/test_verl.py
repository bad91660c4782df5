"""verl 0.9.1 itself, where it is installed, beside ours, on a CPU: corrections of the sampler, advantages and the fused
forward. Its policy losses are in test_policy_losses, its distillation losses in test_trainer_distillation.

    pip install --no-deps verl==0.9.1 && pip install ray tensordict omegaconf hydra-core codetiming orjson pylatexenc"""

from __future__ import annotations

import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch
from test_policy_losses import core
from torch.testing import assert_close

from grpo_kernels import TokenBatch, group_advantages
from grpo_kernels.integrations import verl
from grpo_kernels.rewards.advantages import NUMERICS, gpg_scale, greedy_baseline_advantages, pass_at_k_advantages
from grpo_kernels.rewards.corrections import importance_weights, rejection_mask
from grpo_kernels.rewards.returns import WHITENING, discounted_returns, gae, optimal_token_advantages, whiten
from support.pairs import label, pairs
from support.trainers import DATA, MASK

parametrize = pytest.mark.parametrize


def test_these_are_all_losses_and_estimators_of_verl():
    """One that a new verl adds is noticed here."""
    own = {name for name in core().POLICY_LOSS_REGISTRY if not name.startswith("fused_")}
    assert own == {*verl.LOSSES, "bypass_mode"}
    tested = {name.partition(",")[0] for name in ADVANTAGES}
    assert {str(getattr(name, "value", name)) for name in core().ADV_ESTIMATOR_REGISTRY} == tested | {"gae"}


# ---- corrections, the actor's loss, the fused forward

#: How tokens and sequences are rejected -> the bounds.
REJECTIONS = {
    "token_k1": "0.85_1.2", "token_k2": "0.02", "token_k3": "0.02", "seq_sum_k1": "0.3_3", "seq_sum_k2": "0.2", "seq_sum_k3": "0.2",
    "seq_mean_k1": "0.85_1.2", "seq_mean_k2": "0.03", "seq_mean_k3": "0.03", "seq_max_k2": "0.07", "seq_max_k3": "0.07",
    "token_k1,seq_mean_k3": "0.85_1.2,0.03",
}  # fmt: skip


@parametrize(
    "row",
    pairs(rejection=REJECTIONS, level=("token", "sequence"), threshold=(1.15, "0.8_1.2"), normalize=(False, True)),
    ids=label,
)
def test_rollout_correction(row):
    """Decoupled mode: weights and rejection of the old policy against the sampler, before the step."""
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", exc_type=ImportError)
    shift = torch.tensor([0.0, 0.08, -0.09, 0.0, 0.35, -0.02, 0.15, -0.3])[:, None]
    sampler, threshold, bounds = (
        DATA.old + shift + 0.25 * (DATA.logps - DATA.ref),
        row["threshold"],
        REJECTIONS[row["rejection"]],
    )
    batch = TokenBatch(MASK.long(), DATA.advantages, mask=MASK, old_logps=DATA.old, sampler_logps=sampler)
    proto, kept, _ = helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=DATA.old, rollout_log_prob=sampler, response_mask=MASK.float(), rollout_is=row["level"], rollout_is_threshold=threshold,
        rollout_is_batch_normalize=row["normalize"], rollout_rs=row["rejection"], rollout_rs_threshold=bounds,
    )  # fmt: skip
    mine = MASK
    for option, bound in zip(row["rejection"].split(","), bounds.split(","), strict=True):
        over, metric = option.removeprefix("seq_").split("_")
        low, high = (math.log(float(x)) for x in bound.split("_")) if metric == "k1" else (-math.inf, float(bound))
        mine = mine & (rejection_mask(batch, metric=metric, over=over, low=low, high=high) != 0)
    low, high, mode = (0.0, threshold, "truncate") if isinstance(threshold, float) else (0.8, 1.2, "mask")
    weights = importance_weights(batch, level=row["level"], mode=mode, low=low, high=high, normalize=row["normalize"])
    assert torch.equal(kept.bool(), mine) and 0 < int(mine.sum()) < int(MASK.sum()) and (weights[MASK] != 1).any()
    assert_close(proto.batch["rollout_is_weights"], weights, rtol=1e-5, atol=1e-6)


def test_the_fused_forward():
    """verl's own patched forward, impl_backend=triton, against its torch backend: packed rows, rolled labels, temperature."""
    core()
    transformers = pytest.importorskip("transformers")
    from verl.models.transformers.dense_common import forward_with_torch_backend, forward_with_triton_backend

    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=211, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=True, attn_implementation="eager",
    ))  # fmt: skip
    ids, positions, results = torch.randint(211, (1, 14)), torch.cat([torch.arange(8), torch.arange(6)])[None], []
    given = {
        "input_ids": ids,
        "position_ids": positions,
        "shift_labels": torch.roll(ids, -1, 1),
        "return_dict": True,
        "use_cache": False,
    }
    with verl.bind(strict=True) as slots:
        for forward in (forward_with_torch_backend, forward_with_triton_backend):
            model.zero_grad()
            out = forward(model, temperature=0.7, **given)
            ((out.log_probs * torch.linspace(-1, 1, 14)).sum() + 0.3 * out.entropy.square().sum()).backward()
            results.append(
                [x.detach().float().flatten() for x in (out.log_probs, out.entropy, model.lm_head.weight.grad.clone())]
            )
    assert slots.counts == {"fused": 1}
    for got, want in zip(*results, strict=True):
        assert_close(got, want, rtol=2e-5, atol=1e-5 * float(want.abs().max()))


@parametrize("order", [[0, 1, 2], [2, 0]])
def test_sets_from_the_non_tensor_batch(order):
    """They are cut and reordered with the batch, by verl's own DataProto if it is here, and go to the tokens that were sampled."""
    np = pytest.importorskip("numpy")
    responses, mask = torch.tensor([[4, 9, 7], [3, 5, 0], [6, 0, 0]]), torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 0]])
    record, rows = np.empty(3, dtype=object), [[[4, 1], [], [7]], [[], [], []], [[2, 6, 8], [], []]]
    record[:] = [[[4, 1], [7]], None, [[2, 6, 8]]]
    if importlib.util.find_spec("verl"):
        from verl import DataProto

        data = DataProto.from_dict({"responses": responses, "response_mask": mask}, {"sampling_mask": record})[np.array(order)]
    else:
        data = SimpleNamespace(batch={"response_mask": mask[order]}, non_tensor_batch={"sampling_mask": record[order]})
    kept = verl.kept_sets(data)
    assert [[i for i in row if i >= 0] for row in kept.padded().tolist()] == [x for b in order for x in rows[b]]
    assert verl.kept_sets(data, "other") is None
    data.non_tensor_batch["sampling_mask"][0] = [[2]] * 4
    with pytest.raises(ValueError, match=r"lists\[0\] has 4 records, but generated marks"):
        verl.kept_sets(data)


# ---- advantages

OPTIONS = NUMERICS["verl"]
INDEX = torch.tensor([0, 0, 1, 0, 1, 2, 1, 3, 0, 3])  # one of them alone
WHOLE = torch.arange(6) < torch.tensor([6, 3, 5, 2, 6, 4, 1, 6, 4, 3])[:, None]
#: With a tool's tokens in the middle.
HOLED = WHOLE.clone()
HOLED[0, 2:4] = HOLED[4, 1] = False
REWARDS = torch.tensor([1.0, 0.2, 0.7, -0.4, 0.1, 0.9, 0.5, 0.0, 0.3, 0.8])
OTHER = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 1.0, 0.0])


def groups(rewards=REWARDS, **changes):
    return group_advantages(rewards, groups=INDEX, **OPTIONS | changes)


def whitened(x, mask=WHOLE):
    x = x[:, None].expand(mask.shape) if x.dim() == 1 else x
    return whiten(torch.where(mask, x, 0.0), mask, **WHITENING["verl"])


TWO_REWARDS = {
    "config": {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [0.7, 0.4]}, "non_tensor_batch": {"a": REWARDS.numpy(), "b": OTHER.numpy()},
    "batch": {"prompts": torch.ones(10, 2), "attention_mask": (torch.arange(8) < (2 + WHOLE.sum(1))[:, None]).long()},
}  # fmt: skip
PAIRED = torch.where(INDEX == 2, 1, INDEX)  # verl refuses a group of one
G = torch.Generator().manual_seed(8)
TOKENS, LOGPS = torch.where(HOLED, torch.randn(HOLED.shape, generator=G), 0.0), -2 * torch.rand(HOLED.shape, generator=G)
SQUARES, WEIGHTS, VALUES = (torch.rand(HOLED.shape, generator=G) for _ in range(3))
SCORED = {"old_log_probs": LOGPS, "sum_pi_squared": SQUARES}


def returns(gamma):
    return whitened(discounted_returns(TOKENS, gamma=gamma, mask=HOLED), HOLED)


def optimal(mask, weights=None):
    return optimal_token_advantages(TOKENS, LOGPS, SQUARES, groups=INDEX, weights=weights, mask=mask)


#: verl's name -> its options, and our way to write it, [B] or [B, T]. A completion alone in its group has its raw reward.
ADVANTAGES = {
    "grpo": ({}, groups), "grpo, no std": ({"norm_adv_by_std_in_grpo": False}, lambda: groups(scale="none")),
    "grpo_vectorized": ({}, groups), "grpo_vectorized, no std": ({"norm_adv_by_std_in_grpo": False}, lambda: groups(scale="none")),
    "rloo": ({}, lambda: groups(baseline="leave-one-out", scale="none")),
    "rloo_vectorized": ({}, lambda: group_advantages(REWARDS, groups=INDEX, baseline="leave-one-out", scale="none")),
    "opo": ({}, lambda: groups(baseline="length", scale="none", lengths=WHOLE.sum(1))), "gpg": ({}, lambda: gpg_scale(REWARDS) * groups(scale="none")),
    "reinforce_plus_plus_baseline": ({}, lambda: whitened(groups(scale="none"))), "gdpo": ({}, lambda: whitened(groups())),
    "gdpo, two rewards": (TWO_REWARDS, lambda: whitened(0.7 * groups() + 0.4 * groups(OTHER))),
    "remax": ({"reward_baselines": REWARDS.flip(0)}, lambda: greedy_baseline_advantages(REWARDS, REWARDS.flip(0))),
    **{f"grpo_passk, {scale}": ({"config": {"norm_adv_by_std_in_grpo": scale == "group"}, "index": PAIRED.numpy()},
                                lambda scale=scale: pass_at_k_advantages(REWARDS, groups=PAIRED, scale=scale)) for scale in ("group", "none")},
    **{f"reinforce_plus_plus, {gamma}": ({"config": SimpleNamespace(gamma=gamma)}, lambda gamma=gamma: returns(gamma)) for gamma in (1.0, 0.9)},
    "optimal_token_baseline": (SCORED, lambda: optimal(WHOLE)), "tir_optimal_token_baseline": (SCORED, lambda: optimal(HOLED)),
    "optimal_token_baseline, weights": (SCORED | {"rollout_is_weights": WEIGHTS}, lambda: optimal(WHOLE, WEIGHTS)),
}  # fmt: skip


@parametrize("what", ADVANTAGES)
def test_advantages(what):
    """Rewards of completions lie on the last token, as verl's reward managers put them."""
    (options, mine), of_tokens = ADVANTAGES[what], what.startswith(("reinforce_plus_plus,", "optimal", "tir"))
    mask, rewards = HOLED if what.startswith(("reinforce_plus_plus,", "tir")) else WHOLE, TOKENS
    if not of_tokens:
        rewards = torch.zeros(WHOLE.shape).scatter(1, WHOLE.sum(1, keepdim=True) - 1, REWARDS[:, None])
    estimator, given = core().get_adv_estimator_fn(what.partition(",")[0]), {"index": INDEX.numpy()} | options
    want, got = estimator(token_level_rewards=rewards, response_mask=mask.float(), **given)[0], mine()
    assert_close(torch.where(mask, got[:, None] if got.dim() == 1 else got, 0.0), want * mask, rtol=2e-5, atol=1e-5)
    assert len(want.unique()) > 3


@parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0)])
def test_gae(gamma, lam):
    want = core().compute_gae_advantage_return(TOKENS, VALUES, HOLED.float(), gamma, lam)
    advantages, returned = gae(TOKENS, VALUES, gamma=gamma, lam=lam, mask=HOLED)
    for a, b in zip((whitened(advantages, HOLED), returned), want, strict=True):
        assert_close(a[HOLED], b[HOLED], rtol=1e-5, atol=1e-5)
