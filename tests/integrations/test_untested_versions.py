"""What adapters do with a trainer's version that they were not tested with: its functions and ours are compared first."""

from __future__ import annotations

import sys
import warnings
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels.integrations import areal, openrlhf, prime_rl, skyrl, slime
from grpo_kernels.integrations._slots import OVERRIDE
from grpo_kernels.integrations._trial import Differs, compare
from support.trainers import DATA, MASK, V, log_softmax_of, stand_in

Tensor = torch.Tensor


HOME = "areal.utils.functional.vocab_parallel"


class Areal:
    """AReaL's two functions in plain torch, with a count of their calls, and one thing changed."""

    def __init__(self, **changed: float) -> None:
        self.changed, self.calls = changed, 0
        self.module = stand_in(HOME, gather_logprobs=self.logps, gather_logprobs_entropy=self.both)

    def both(
        self, logits: Tensor, labels: Tensor, temperature: float = 1.0, tp_group: Any = None, chunk_size: int = 1024
    ) -> tuple[Tensor, Tensor]:
        self.calls += 1
        logps, entropy = log_softmax_of(logits, labels, temperature * self.changed.get("temperature", 1.0))
        logps = logps + self.changed.get("slopes", 0.0) * (logps - logps.detach())
        return logps.to(torch.float32), entropy.detach().to(torch.float32) + self.changed.get("entropy", 0.0)

    def logps(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.both(*args, **kwargs)[0]


@pytest.fixture(autouse=True)
def newer(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "99.1")
    monkeypatch.delenv(OVERRIDE, raising=False)


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return (2 * torch.randn(9, V, generator=g)).to(dtype).requires_grad_(), torch.randint(V, (9,), generator=g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_arithmetic_goes_on_after_one_message(dtype: torch.dtype) -> None:
    theirs, (logits, labels) = Areal(), operands(dtype)
    kept = logits.detach().clone()
    with areal.bind(strict=True) as slots:
        with pytest.warns(
            UserWarning, match=r"areal 99\.1 was not tested with this adapter \(1\.0\.4 was\).*They agree"
        ) as said:
            first = theirs.module.gather_logprobs(logits, labels, 0.7)
        assert theirs.calls == 1 and len(said) == 1 and torch.equal(logits, kept) and logits.grad is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(theirs.module.gather_logprobs(logits, labels, 0.7), first) and theirs.calls == 1
            theirs.module.gather_logprobs_entropy(logits, labels)  # another function: compared too, without another message
            theirs.module.gather_logprobs_entropy(logits, labels)
        assert theirs.calls == 2
    torch.testing.assert_close(first, log_softmax_of(logits, labels, 0.7)[0].float(), rtol=1e-4, atol=1e-5)
    assert slots.counts == {"fused": 4}


@pytest.mark.parametrize(
    ("changed", "what"),
    [({"temperature": 1.02}, "values, tensor 0 of 2"), ({"slopes": 0.02}, "slopes, tensor 0 of 1"), ({"entropy": 0.01}, "values, tensor 1")],
)  # fmt: skip
def test_other_arithmetic_is_refused_with_the_difference(changed: dict[str, float], what: str) -> None:
    theirs, (logits, labels) = Areal(**changed), operands()
    slots = areal.bind()
    with pytest.raises(
        RuntimeError, match=rf"areal 99\.1.*gather_logprobs_entropy is not what it was: {what}.*apart of.*any_version=True"
    ):
        theirs.module.gather_logprobs_entropy(logits, labels)
    assert theirs.module.gather_logprobs_entropy == theirs.both and theirs.module.gather_logprobs == theirs.logps
    assert not slots.counts and logits.grad is None
    with areal.bind(any_version=True):
        theirs.module.gather_logprobs_entropy(logits, labels)
    assert theirs.calls == 1


def test_slopes_are_compared_in_the_first_call_that_has_them() -> None:
    """Old log-probs come first, without gradients; rows without tokens show nothing at all."""
    theirs, (logits, labels) = Areal(slopes=0.02), operands()
    with areal.bind(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            theirs.module.gather_logprobs(logits, labels)
        theirs.module.gather_logprobs(logits[:0], labels[:0])
        with pytest.raises(RuntimeError, match="slopes"):
            theirs.module.gather_logprobs(logits, labels)
    assert theirs.calls == 3


def test_a_function_that_fails_cannot_be_compared() -> None:
    theirs, (logits, labels) = Areal(), operands()

    def needs_a_gpu(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("needs a GPU")

    theirs.module.gather_logprobs = needs_a_gpu
    with areal.bind(), pytest.raises(RuntimeError, match="its own function raised AssertionError: needs a GPU"):
        theirs.module.gather_logprobs(logits, labels)


def test_a_function_that_overwrites_its_logits() -> None:
    """OpenRLHF divides them by the temperature where they are: on a copy, in the comparison."""

    def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
        logits.div_(temperature)
        return log_softmax_of(logits, labels)[0].float()

    home = stand_in("openrlhf.models.utils", log_probs_from_logits=log_probs_from_logits, compute_entropy=len)
    logits, labels = operands()
    kept = logits.detach().clone()
    with openrlhf.bind(), pytest.warns(UserWarning, match="They agree"):
        home.log_probs_from_logits(logits, labels, 0.7)
    assert torch.equal(logits, kept)


def test_what_cannot_be_compared_is_refused_when_it_is_bound() -> None:
    """Its result is another than the trainer's, or options were chosen that give another."""
    stand_in("slime.utils.ppo_utils", calculate_log_probs_and_entropy=len)
    stand_in("slime.backends.megatron_utils.loss", _build_topp_keep_mask=sum)
    stand_in("openrlhf.models.utils", log_probs_from_logits=len, compute_entropy=sum)
    stand_in("prime_rl.trainer.models.layers.lm_head", _SequenceChunkedLogProbEntropyFn=SimpleNamespace(apply=len))
    for bind in (
        lambda **x: slime.bind(replay=True, **x), lambda **x: openrlhf.bind(entropy_temperature=0.5, **x),
        lambda **x: prime_rl.bind(entropy_over="kept", **x),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="cannot be compared with ours in the first step"):
            bind()
        bind(any_version=True).undo()
    assert sys.modules["slime.utils.ppo_utils"].calculate_log_probs_and_entropy is len


@pytest.mark.parametrize("changed", [1.0, 1.02])
def test_losses_for_skyrls_registry_have_its_own_as_a_witness(changed: float) -> None:
    """Its masked sum of a clipped surrogate, of advantages that are divided already, before the first loss of any name of ours."""
    registry: dict[str, Any] = {}
    calls = []

    def own(
        log_probs: Tensor,
        old: Tensor,
        advantages: Tensor,
        config: Any,
        mask: Tensor | None = None,
        rollout: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        assert config.policy_loss_type == "regular" and mask is not None
        calls.append(config)
        ratio = (log_probs - old).exp()
        clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
        return changed * -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum(), {}

    home = "skyrl.backends.skyrl_train.utils"
    stand_in(f"{home}.ppo_utils", ppo_policy_loss=own, register_policy_loss=lambda name: lambda f: registry.setdefault(name, f))
    stand_in(
        f"{home}.off_policy_correction_utils",
        apply_off_policy_correction=lambda loss, old, rollout, mask, config: (loss, mask, {}),
    )
    assert "fused_cispo" in skyrl.register()
    config = SimpleNamespace(
        eps_clip_low=0.17, eps_clip_high=0.31, policy_loss_type="fused_cispo", off_policy_correction=SimpleNamespace()
    )
    given = DATA.logps.requires_grad_(), DATA.old, DATA.advantages, config, MASK.float()
    if changed != 1.0:
        with pytest.raises(RuntimeError, match=r"skyrl 99\.1.*ppo_policy_loss is not what it was: values"):
            registry["fused_cispo"](*given)
        return
    with pytest.warns(UserWarning, match=r"skyrl 99\.1.*They agree"):
        registry["fused_cispo"](*given)
    registry["fused_sapo"](*given)
    assert len(calls) == 1 and config.policy_loss_type == "fused_cispo"


def test_comparison_of_results() -> None:
    """Nested results, shapes, NaN; a result that has a slope on one side alone has none to compare."""
    x = torch.randn(5, requires_grad=True)

    def of(value: Any) -> Any:
        return compare(lambda y: {"a": [y.exp(), (y * 2).detach()]}, value, (x,), {})

    assert of(lambda y: {"a": [y.exp(), y * 2]}) == (True, True)
    assert of(lambda y: {"a": [y.exp().detach(), y * 2]}) == (True, False)
    with pytest.raises(Differs, match=r"shapes \[\[5\], \[5\]\], and its own \[\[5\]\]"):
        of(lambda y: [y.exp()])
    with pytest.raises(Differs, match="nan apart"):
        of(lambda y: [y.exp(), y * torch.nan])
    assert compare(torch.zeros_like, torch.zeros_like, (x,), {}) == (False, False)
    assert x.grad is None
