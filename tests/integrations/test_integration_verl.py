"""verl: our policy losses against verl's own in float64, and its fused forward on our heads, on a CPU.

pip install --no-deps verl==0.9.1 && pip install ray tensordict omegaconf hydra-core codetiming orjson pylatexenc
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.trainers import Data

pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed", exc_type=ImportError)

import verl
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional as verl_functional
from verl.utils.kernel import linear_cross_entropy as verl_kernel
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

import grpo_kernels
from grpo_kernels import Objective
from grpo_kernels.integrations import verl as ours
from grpo_kernels.integrations._slots import OVERRIDE
from grpo_kernels.presets import NUMERICS

Tensor = torch.Tensor

B, T = 6, 9
#: These aggregate in one way, whatever the mode.
OWN_MODE = ("sapo", "geo_mean", *(("gspo",) if tuple(map(int, verl.__version__.split(".")[:3])) < (0, 9, 1) else ()))
#: Of our names of verl's losses, those that this verl has: no "dro" before 0.9.0, nor its constant and "token-sum".
NAMES = [name for name in ours.LOSSES if name in core_algos.POLICY_LOSS_REGISTRY]
RECENT = "dro" in NAMES
#: None of them a default.
OTHERS = {"clip_ratio_low": 0.13, "clip_ratio_high": 0.28, "clip_ratio_c": 1.6, "tau_pos": 0.9, "tau_neg": 1.3}
OTHER_OPTIONS = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.4, "clip_cov_ub": 2.5, "kl_cov_ratio": 0.15, "ppo_kl_coef": 0.7}
#: Of a whole step of which this is a micro-batch on one of two ranks.
STEP = {"dp_size": 2, "batch_num_tokens": 173, "global_batch_size": 19, "loss_scale_factor": 20}


@pytest.fixture(scope="module")
def data() -> Data:
    """Unequal lengths, a sequence without tokens, a hole, an advantage of 0, ratios far on both sides of the clip range."""
    g = torch.Generator().manual_seed(3)
    mask = torch.arange(T) < torch.tensor([9, 4, 7, 5, 9, 6])[:, None]
    mask[3] = False
    mask[4, 3:5] = False
    logps = -0.02 - 4 * torch.rand(B, T, generator=g).square()
    shift = torch.tensor([0.3, -0.35, -0.3, 0.1, 0.55, 0.25])[:, None]
    old = (logps - shift - 0.25 * torch.randn(B, T, generator=g)).clamp(max=-0.01)
    old[0, 1], old[2, 2] = logps[0, 1] - 23.0, logps[2, 2] + 21.0  # beyond verl's clamps
    advantages = torch.tensor([1.2, 0.8, -0.7, 0.9, -1.1, 0.0])[:, None] * (1 + 0.2 * torch.randn(B, T, generator=g))
    weights = torch.exp(0.4 * torch.randn(B, T, generator=g)).clamp(max=1.5)
    return Data(logps, old, logps + 0.4 * torch.randn(B, T, generator=g), advantages, mask=mask, weights=weights)


def config_of(info: dict[str, Any], others: bool = False, loss_mode: str = "vanilla", **options: Any) -> Any:
    policy_loss = PolicyLossConfig(
        loss_mode=loss_mode, **(({"dro_beta": 0.3} if RECENT else {}) | (OTHER_OPTIONS if others else {}))
    )
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=4, policy_loss=policy_loss,
        global_batch_info=dict(info), **(OTHERS if others else {}), **options,
    )  # fmt: skip


def evaluate(loss: Any, data: Data, mode: str, config: Any, weights: Tensor | None, dtype: torch.dtype) -> Any:
    logps = data.logps.to(dtype).requires_grad_()
    fields = {"old_log_prob": data.old, "advantages": data.advantages, "rollout_is_weights": weights}
    fields = {name: x if x is None else x.to(dtype) for name, x in fields.items()}
    value, metrics = loss(log_prob=logps, response_mask=data.mask, loss_agg_mode=mode, config=config, **fields)
    return value.detach().double(), torch.autograd.grad(value, logps)[0].double(), metrics


def assert_same(got: Any, want: Any, what: object) -> None:
    (loss, slopes, metrics), (their_loss, their_slopes, their_metrics) = got, want
    torch.testing.assert_close(loss, their_loss, rtol=2e-5, atol=1e-6, msg=lambda m: f"{what}: {m}")
    scale = float(their_slopes.abs().max())
    torch.testing.assert_close(slopes, their_slopes, rtol=2e-5, atol=2e-6 * scale, msg=lambda m: f"{what}: {m}")
    assert scale > 0
    assert metrics == pytest.approx(their_metrics, rel=1e-5, abs=1e-6), what
    assert all(type(x) is float for x in metrics.values())


def modes_of(name: str) -> tuple[str, ...]:
    return ("token-mean",) if name in OWN_MODE else tuple(mode for mode in ours.AGGREGATES if RECENT or mode != "token-sum")


# ---- policy losses


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_of_verl(data: Data, name: str, lots_in_order: None) -> None:
    """Value, gradient and metrics, x aggregation x importance weights x constants x alone and as a part of a step."""
    fused, theirs = ours.policy_loss(name), core_algos.get_policy_loss_fn(name)
    seen = set()
    for mode in modes_of(name):
        for weights in (None, data.weights):
            for others in (False, True):
                for info in ({}, STEP):
                    config = config_of(info, others)
                    want = evaluate(theirs, data, mode, config, weights, torch.float64)
                    assert_same(evaluate(fused, data, mode, config, weights, torch.float32), want, (mode, others, info))
                    seen.add(round(float(want[0]), 9))
    assert len(seen) == len(modes_of(name)) * 2 * (1 if name in ("gpg", "dro") else 2) * (1 if name == "geo_mean" else 2)


def test_the_metrics_are_not_all_zero(data: Data, lots_in_order: None) -> None:
    for name in ("vanilla", "dppo_tv", "dppo_kl", "gspo", "cispo", "geo_mean", "clip_cov"):
        metrics = evaluate(ours.policy_loss(name), data, "token-mean", config_of({}, True), None, torch.float32)[2]
        assert 0 < metrics["actor/pg_clipfrac"] < 1 and metrics["actor/ppo_kl"] != 0, name
        if name in ("vanilla", "geo_mean"):
            assert metrics["actor/pg_clipfrac_lower"] > 0


def test_all_losses_are_registered(data: Data) -> None:
    """Every name of verl's (a new one is noticed), every preset with verl's numbers, and some that verl has not."""
    own = {n for n in core_algos.POLICY_LOSS_REGISTRY if not n.startswith("fused_")}
    assert own == {*NAMES, "bypass_mode"}
    before = dict(core_algos.POLICY_LOSS_REGISTRY)
    names = ours.register()
    try:
        assert {
            f"fused_{name}" for name in (*own - {"bypass_mode"}, *NUMERICS["verl"], "vespo", "luspo") if RECENT or name != "dro"
        } <= set(names)
        assert all(core_algos.POLICY_LOSS_REGISTRY[name] is before[name] for name in own)
        for name in names:
            loss, slopes, metrics = evaluate(
                core_algos.get_policy_loss_fn(name), data, "token-mean", config_of(STEP), None, torch.float32
            )
            assert torch.isfinite(loss) and torch.isfinite(slopes).all() and slopes.any(), name
            assert name == "fused_gpg" or math.isfinite(metrics["actor/ppo_kl"])
    finally:
        core_algos.POLICY_LOSS_REGISTRY.clear()
        core_algos.POLICY_LOSS_REGISTRY.update(before)


def test_presets_have_their_own_constants_and_aggregate(data: Data) -> None:
    vanilla = core_algos.get_policy_loss_fn("vanilla")
    for name, mode, options in (
        ("dapo", "token-mean", {"clip_ratio_high": 0.28}),
        ("grpo", "token-mean", {}),
        ("dr_grpo", "seq-mean-token-sum-norm", {}),
    ):
        for info in ({}, STEP):
            want = evaluate(vanilla, data, mode, config_of(info, **options), None, torch.float64)
            got = evaluate(ours.policy_loss(name), data, "token-sum", config_of(info), None, torch.float32)
            metrics = {"actor/pg_clipfrac_lower": want[2]["actor/pg_clipfrac_lower"]}  # ours has it for "vanilla" only
            assert_same((*got[:2], got[2] | metrics), want, (name, info))
    mine = Objective.preset("dapo", numerics="verl", aggregate="seq-mean-token-sum")
    got = evaluate(ours.policy_loss(mine), data, "token-mean", config_of(STEP), None, torch.float32)
    want = evaluate(vanilla, data, "seq-mean-token-sum", config_of(STEP, clip_ratio_high=0.28), None, torch.float64)
    torch.testing.assert_close(got[1], want[1], rtol=2e-5, atol=1e-7)


def test_nothing_to_train(data: Data) -> None:
    """A micro-batch without tokens: verl alone gives 0/0, ours a differentiable 0; in a step both give 0."""
    nothing = replace(data, mask=torch.zeros_like(data.mask))
    for info in ({}, STEP, STEP | {"batch_num_tokens": 0}):
        loss, slopes, metrics = evaluate(
            ours.policy_loss("vanilla"), nothing, "token-mean", config_of(info), None, torch.float32
        )
        assert loss == 0 and not slopes.any() and not any(metrics.values())


def test_what_a_mask_hides_does_not_matter(data: Data) -> None:
    hidden = {name: torch.where(data.mask, getattr(data, name), math.nan) for name in ("logps", "old", "advantages", "weights")}
    config = config_of(STEP)
    got = evaluate(
        ours.policy_loss("vanilla"), Data(ref=data.ref, mask=data.mask, **hidden), "token-mean", config, hidden["weights"],
        torch.float32,
    )  # fmt: skip
    want = evaluate(core_algos.get_policy_loss_fn("vanilla"), data, "token-mean", config, data.weights, torch.float64)
    assert_same(got, want, "masked NaN")


def test_what_is_refused(data: Data) -> None:
    for bad, message in (
        (Objective.preset("grpo", beta=0.1), "adds KL and entropy itself"),
        (Objective.preset("grpo", entropy_coef=0.1), "adds KL and entropy itself"),
        (Objective.preset("grpo", aggregate="group-mean"), "is not told which prompt"),
        ("nonesuch", "preset=.nonesuch.: it must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.policy_loss(bad)
    loss = ours.policy_loss("vanilla")
    for config, mode, message in (
        (None, "token-mean", "config is None"),
        (config_of({}), "nonesuch", "loss_agg_mode='nonesuch'"),
        (config_of({"dp_size": 2}), "token-mean", "batch_num_tokens is None, but dp_size=2"),
        (config_of({"dp_size": 2}), "seq-mean-token-sum", "global_batch_size is None, but dp_size=2"),
        (config_of({}, clip_ratio_c=1.1), "token-mean", "clip_ratio_c=1.1: below"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(loss, data, mode, config, None, torch.float32)


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo"])
def test_through_the_actor_loss(data: Data, name: str) -> None:
    """verl's `ppo_loss`, which adds entropy and KL to the tensor that it is given, in place."""
    prompt = 2

    def packed(x: Tensor) -> Tensor:
        return torch.cat([torch.nn.functional.pad(row, (prompt - 1, 1)) for row in x])

    def actor_loss(loss_mode: str) -> tuple[Any, ...]:
        logps, entropy = data.logps.clone().requires_grad_(), (-data.logps).requires_grad_()
        fields = {
            "prompts": torch.ones(B, prompt, dtype=torch.int64), "responses": torch.ones(B, T, dtype=torch.int64),
            "attention_mask": torch.ones(B, prompt + T, dtype=torch.int64), "response_mask": data.mask.long(),
            "old_log_probs": data.old, "advantages": data.advantages, "ref_log_prob": data.ref,
            "rollout_is_weights": data.weights,
        }  # fmt: skip
        whole = TensorDict(fields, batch_size=[B])
        for key in ("dp_size", "batch_num_tokens", "global_batch_size"):
            whole.set_non_tensor(key, STEP[key])
        config = config_of({}, loss_mode=loss_mode, entropy_coeff=0.03, use_kl_loss=True, kl_loss_coef=0.2)
        loss, metrics = ppo_loss(config, {"log_probs": packed(logps), "entropy": packed(entropy)}, whole)
        numbers = {k: float(v.aggregate()) if hasattr(v, "aggregate") else float(v) for k, v in metrics.items()}
        return loss.detach(), *torch.autograd.grad(loss, (logps, entropy)), numbers

    before = dict(core_algos.POLICY_LOSS_REGISTRY)
    ours.register("mine_")
    try:
        loss, d_logps, d_entropy, metrics = actor_loss("mine_" + name)
        want = actor_loss(name)
    finally:
        core_algos.POLICY_LOSS_REGISTRY.clear()
        core_algos.POLICY_LOSS_REGISTRY.update(before)
    torch.testing.assert_close((loss, d_logps, d_entropy), want[:3], rtol=2e-5, atol=1e-7)
    assert metrics == pytest.approx(want[3], rel=1e-5, abs=1e-6) and metrics["kl_loss"] != 0 != metrics["actor/entropy_loss"]


# ---- log-probs and entropy


@pytest.fixture
def slots() -> Iterator[Any]:
    theirs = verl_kernel.linear_cross_entropy, verl_functional.logprobs_from_logits, verl_functional.entropy_from_logits
    with ours.bind(strict=True) as slots:
        yield slots
    now = verl_kernel.linear_cross_entropy, verl_functional.logprobs_from_logits, verl_functional.entropy_from_logits
    assert all(a is b for a, b in zip(theirs, now, strict=True))


def test_the_fused_forward(slots: Any) -> None:
    """verl's own patched forward, impl_backend=triton, against its torch backend: packed rows, rolled labels, temperature."""
    transformers = pytest.importorskip("transformers")
    from verl.models.transformers.dense_common import forward_with_torch_backend, forward_with_triton_backend

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=211, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    ids = torch.randint(211, (1, 14))
    positions = torch.cat([torch.arange(8), torch.arange(6)])[None]
    labels = torch.roll(ids, -1, 1)
    results = []
    for forward in (forward_with_torch_backend, forward_with_triton_backend):
        model.zero_grad()
        out = forward(
            model,
            input_ids=ids,
            position_ids=positions,
            temperature=0.7,
            shift_labels=labels,
            return_dict=True,
            use_cache=False,
        )
        assert out.log_probs.shape == out.entropy.shape
        (out.log_probs * torch.linspace(-1, 1, 14)).sum().backward(retain_graph=True)
        (0.3 * out.entropy.square().sum()).backward()
        gradient = model.lm_head.weight.grad
        results.append((*(x.detach().float().squeeze(0) for x in (out.log_probs, out.entropy)), gradient.clone()))
    assert slots.counts == {"fused": 1} and out.log_probs.shape == (14,)  # verl's kernel has flat rows too
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("shape", [(7,), (2, 5), (0,)])
def test_from_logits(slots: Any, shape: tuple[int, ...]) -> None:
    log_p, entropy = verl_functional.logprobs_from_logits, verl_functional.entropy_from_logits
    labels = torch.randint(31, shape)
    leaf = torch.randn(*shape, 31).requires_grad_()
    logits = leaf * 2
    total = (log_p(logits, labels, inplace_backward=False) * torch.randn(shape)).sum()
    results = [log_p(logits, labels, False), entropy(logits), *torch.autograd.grad(entropy(logits).sum() + total, leaf)]
    exact = leaf.detach().double() * 2
    p = torch.log_softmax(exact, -1)
    torch.testing.assert_close(results[0].double(), p.gather(-1, labels[..., None])[..., 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[1].double(), -(p.exp() * p).sum(-1), rtol=1e-5, atol=1e-6)
    assert slots.counts == {"fused": 4} and results[2].shape == leaf.shape


def test_labels_in_another_shape(slots: Any) -> None:
    """As verl's own test of its heads passes them: logits of packed rows beside labels [1, N]."""
    labels, logits = torch.randint(31, (1, 9)), torch.randn(9, 31)
    got = verl_functional.logprobs_from_logits(logits, labels, inplace_backward=False)
    torch.testing.assert_close(got, verl_functional.logprobs_from_logits.theirs(logits, labels[0]), rtol=1e-5, atol=1e-6)


def test_gradients_from_logits(slots: Any) -> None:
    """Against verl's own functions, out of place and in place; what still needs the logits raises."""
    labels, leaf, up = torch.randint(31, (9,)), torch.randn(9, 31), torch.randn(9)
    gradients = []
    for log_p, entropy in (
        (verl_functional.logprobs_from_logits, verl_functional.entropy_from_logits),
        (verl_functional.logprobs_from_logits.theirs, verl_functional.entropy_from_logits.theirs),
    ):
        x = leaf.clone().requires_grad_()
        logits = x * 1.5
        loss = (log_p(logits, labels, inplace_backward=False) * up).sum() - 0.1 * entropy(logits).sum()
        gradients.append(torch.autograd.grad(loss, x)[0])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)

    x = leaf.clone().requires_grad_()
    logits = x * 1.5
    (gradient,) = torch.autograd.grad((verl_functional.logprobs_from_logits(logits, labels) * up).sum(), x)
    assert not torch.equal(logits, 1.5 * x) and torch.isfinite(gradient).all()
    logits = x * 1.5
    loss = verl_functional.entropy_from_logits(logits).sum()
    loss = loss + (verl_functional.logprobs_from_logits(logits, labels) * up).sum()  # the promise not to need them is broken
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_left_to_verl() -> None:
    labels, logits = torch.randint(31, (4,)), torch.randn(4, 31, dtype=torch.float64)
    with ours.bind() as slots:
        got = verl_functional.logprobs_from_logits(logits, labels)
        assert got.dtype == torch.float64 and slots.counts == {"verl: dtype torch.float64": 1}
    with pytest.raises(RuntimeError, match=r"strict=True.*dtype torch\.float64"), ours.bind(hidden=False, strict=True):
        verl_functional.logprobs_from_logits(logits, labels)
    with pytest.raises(ValueError, match="reduction='sum'"):
        ours.linear_cross_entropy(torch.randn(4, 8), torch.randn(31, 8), labels, 1.0, "sum")


def test_binding_is_refused_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = verl_functional.logprobs_from_logits
    slots = ours.bind()
    with pytest.raises(RuntimeError, match="ours already"):
        ours.bind()
    ours_now = verl_functional.logprobs_from_logits
    assert ours_now is not theirs and ours_now.theirs is theirs
    verl_functional.logprobs_from_logits = theirs  # someone else's
    with pytest.raises(RuntimeError, match="undo in the reverse order"):
        slots.undo()
    verl_functional.logprobs_from_logits = ours_now
    slots.undo()
    slots.undo()  # nothing is left to undo
    assert verl_functional.logprobs_from_logits is theirs

    monkeypatch.setattr(metadata, "version", lambda _: "0.10.0")
    monkeypatch.delenv(OVERRIDE, raising=False)
    with ours.bind(any_version=True) as unasked:
        assert unasked.trial.version is None
    with ours.bind() as slots:
        logits, labels = torch.randn(3, 7, requires_grad=True), torch.tensor([1, 6, 0])
        with pytest.warns(UserWarning, match=r"verl 0\.10\.0 was not tested.*0\.9\.1 were.*They agree"):
            verl_functional.logprobs_from_logits(logits, labels)
    assert slots.counts == {"fused": 1}


@pytest.mark.parametrize("changed", [False, True])
def test_losses_of_a_version_that_was_not_tested_are_compared_with_verls(
    data: Data, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.10.0")
    monkeypatch.delenv(OVERRIDE, raising=False)
    registry = dict(core_algos.POLICY_LOSS_REGISTRY)
    if changed:
        registry["vanilla"] = lambda *a, own=registry["vanilla"], **k: (lambda loss, metrics: (1.01 * loss, metrics))(
            *own(*a, **k)
        )
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", registry)
    assert ours.register("compared_") == ours.register("compared_")  # names of ours stay
    call = core_algos.get_policy_loss_fn("compared_vanilla")
    given = data.old, data.logps.requires_grad_(), data.advantages, data.mask, "token-mean", config_of(STEP)
    if changed:
        with pytest.raises(RuntimeError, match=r"verl 0\.10\.0 was not tested.*fused_vanilla is not what it was: values"):
            call(*given)
    else:
        with pytest.warns(UserWarning, match="They agree"):
            call(*given)


@pytest.mark.slow
def test_as_an_external_module(tmp_path: Path) -> None:
    """As verl's workers load it: while `import verl` runs."""
    (tmp_path / "my_losses.py").write_text(
        "from grpo_kernels.integrations import verl\nassert verl.register()\nslots = verl.bind()\n"
    )
    code = (
        "import verl, my_losses\n"
        "from verl.trainer.ppo.core_algos import get_policy_loss_fn\n"
        "from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy\n"
        "print(get_policy_loss_fn('fused_vanilla').__module__, linear_cross_entropy.grpo_kernels)\n"
    )
    source = str(Path(grpo_kernels.__file__).parent.parent)
    environment = os.environ | {
        "VERL_USE_EXTERNAL_MODULES": "my_losses",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), source, *sys.path]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == ["grpo_kernels.integrations.verl", "True"]


# ---- sets of a sampler


def test_sets_from_the_non_tensor_batch() -> None:
    """They are cut and reordered with the batch, by verl's own DataProto, and go to the tokens that were sampled."""
    responses, mask = torch.tensor([[4, 9, 7], [3, 5, 0], [6, 0, 0]]), torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 0]])
    record = np.empty(3, dtype=object)
    record[:] = [[[4, 1], [7]], None, [[2, 6, 8]]]
    data = DataProto.from_dict({"responses": responses, "response_mask": mask}, {"sampling_mask": record})
    rows = [[[4, 1], [], [7]], [[], [], []], [[2, 6, 8], [], []]]
    for order in ([0, 1, 2], [2, 0]):
        kept = ours.kept_sets(data[np.array(order)])
        assert kept is not None and kept.contains(responses[order]).all()
        assert [[i for i in row if i >= 0] for row in kept.padded().tolist()] == [x for b in order for x in rows[b]]
    assert ours.kept_sets(DataProto.from_dict({"responses": responses, "response_mask": mask})) is None
    record[2] = [[2], [6]]
    with pytest.raises(ValueError, match=r"lists\[2\] has 2 records, but generated marks 1 tokens of sequence 2"):
        ours.kept_sets(data)
