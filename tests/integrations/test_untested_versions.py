"""What adapters do with a trainer's version that they were not tested with: its functions and ours are compared first."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels.integrations import areal, liger, liger_slot, openrlhf, prime_rl, skyrl, slime, unsloth, verl
from grpo_kernels.integrations._slots import OVERRIDE, Slots
from grpo_kernels.integrations._trial import Differs, compare
from support.trainers import DATA, MASK, H, V, log_softmax_of, stand_in

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


# ---- every other trainer, whose first step goes on and whose other arithmetic is refused


class Head:
    """Plain log-probs of a trainer at 1 / `changed` of the temperature, under the names and arguments of its functions."""

    def __init__(self, changed: float) -> None:
        self.changed, self.calls = changed, 0

    def log_probs(self, logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
        self.calls += 1
        return log_softmax_of(logits, labels, temperature / self.changed)[0].float()

    def logprobs_from_logits(self, logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
        return self.log_probs(logits, labels)

    def from_hidden(self, hidden: Tensor, lm_head: Tensor, index: Tensor, chunks: int = 4) -> Tensor:
        return self.log_probs(hidden @ lm_head.T, index)


Bound = tuple[Slots, Callable[[], Tensor]]


def of_openrlhf(head: Head, logits: Tensor, labels: Tensor) -> Bound:
    home = stand_in("openrlhf.models.utils", log_probs_from_logits=head.log_probs, compute_entropy=len)
    return openrlhf.bind(), lambda: home.log_probs_from_logits(logits, labels)


def of_skyrl(head: Head, logits: Tensor, labels: Tensor) -> Bound:
    home = stand_in(
        "skyrl.backends.skyrl_train.utils.torch_utils",
        logprobs_from_logits=head.logprobs_from_logits, chunked_entropy_from_logits=len,
    )  # fmt: skip
    return skyrl.bind(), lambda: home.logprobs_from_logits(logits, labels, inplace_backward=False)


def of_verl(head: Head, logits: Tensor, labels: Tensor) -> Bound:
    home = stand_in("verl.utils.torch_functional", logprobs_from_logits=head.logprobs_from_logits, entropy_from_logits=len)
    return verl.bind(hidden=False), lambda: home.logprobs_from_logits(logits, labels, inplace_backward=False)


def of_unsloth(head: Head, logits: Tensor, labels: Tensor) -> Bound:
    home = stand_in("unsloth_made", chunked_hidden_states_selective_log_softmax=head.from_hidden)
    weight = torch.linspace(-1, 1, V * V).view(V, V)
    trainer = type("UnslothGRPOTrainer", (), {"__module__": "unsloth_made"})
    return unsloth.bind(trainer), lambda: home.chunked_hidden_states_selective_log_softmax(logits[None], weight, labels[None])


TRAINERS = {"openrlhf": of_openrlhf, "skyrl": of_skyrl, "verl": of_verl, "unsloth_zoo": of_unsloth}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("changed", [1.0, 1.02])
def test_log_probs_of_every_trainer(trainer: str, changed: float, without_verl: None) -> None:
    head = Head(changed)
    slots, call = TRAINERS[trainer](head, *operands())
    with slots:
        if changed != 1.0:
            with pytest.raises(
                RuntimeError, match=rf"{trainer} 99\.1.*is not what it was: values, tensor 0 of 1.*any_version=True"
            ):
                call()
            assert head.calls == 1 and not slots.counts
            call()  # its own again
            assert head.calls == 2 and not slots.counts
            return
        with pytest.warns(UserWarning, match=rf"{trainer} 99\.1 was not tested.*They agree"):
            first = call()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(call(), first)
        assert head.calls == 1 and slots.counts == {"fused": 2}


@pytest.fixture
def without_verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins neither overwrite the modules of a verl that is here, nor stay."""

    def of_verl() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "verl"]

    for name in of_verl():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in of_verl():
        del sys.modules[name]


def verls_registry(**losses: Any) -> dict[str, Any]:
    registry: dict[str, Any] = dict(losses)
    stand_in(
        "verl.trainer.ppo.core_algos",
        POLICY_LOSS_REGISTRY=registry, register_policy_loss=lambda name: lambda f: registry.setdefault(name, f),
    )  # fmt: skip
    return registry


def verls_config() -> Any:
    return SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=0.17,
        clip_ratio_high=None,
        clip_ratio_c=100.0,
        global_batch_info={"dp_size": 3},
        policy_loss=None,
    )


@pytest.mark.parametrize("changed", [1.0, 1.02])
def test_losses_in_verls_registry(changed: float, without_verl: None) -> None:
    calls = []

    def vanilla(
        old: Tensor, logps: Tensor, advantages: Tensor, mask: Tensor, mode: str, config: Any, weights: Any = None
    ) -> Any:
        calls.append(mode)
        ratio = (logps - old).exp()
        clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio)
        return changed * -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum() / mask.sum(), {}

    registry = verls_registry(vanilla=vanilla)
    names = verl.register()
    assert {"fused_vanilla", "fused_dapo"} <= set(names) and "fused_dro" not in names  # which this verl has no constants for
    config = verls_config()
    config.global_batch_info = {}
    given = DATA.old, DATA.logps.clone().requires_grad_(), DATA.advantages, MASK, "token-mean", config
    if changed != 1.0:
        with pytest.raises(RuntimeError, match=r"verl 99\.1.*fused_vanilla is not what it was: values"):
            registry["fused_vanilla"](*given)
        return
    with pytest.warns(UserWarning, match=r"verl 99\.1.*They agree"):
        registry["fused_vanilla"](*given)
    registry["fused_vanilla"](*given)
    assert calls == ["token-mean"]


@pytest.mark.parametrize("by_sequence", [False, True])
def test_gspo_aggregates_as_this_verl_does(by_sequence: bool, without_verl: None) -> None:
    """Before 0.9.1 its mode has no effect. The step of the config has no part in the question."""

    def gspo(old: Tensor, logps: Tensor, advantages: Tensor, mask: Tensor, mode: str, config: Any) -> Any:
        assert not config.global_batch_info and config.clip_ratio_low == 0.17
        sums = (advantages * mask).sum(1)
        means = sums / mask.sum(1)
        return -(means if by_sequence or mode == "seq-mean-token-mean" else sums).mean(), {}

    verls_registry(gspo=gspo)
    config = verls_config()
    for mode in ("token-mean", "seq-mean-token-sum"):
        assert verl.objective_of("gspo", config, mode).aggregate == ("seq-mean-token-mean" if by_sequence else mode)
    assert config.global_batch_info == {"dp_size": 3}


@pytest.mark.parametrize("changed", [1.0, 1.02])
def test_the_loss_in_ligers_place(changed: float) -> None:
    chunked = pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")

    class Other(chunked.LigerFusedLinearGRPOLoss):  # type: ignore[misc]
        def forward(self, *args: Any) -> Any:
            loss, metrics = super().forward(*args)
            return changed * loss, metrics

    Other.__module__ = chunked.__name__
    theirs = Other(beta=0.0, compiled=False, temperature=0.7, loss_type="bnpo", use_ref_model=False)
    g = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(*shape, generator=g).requires_grad_() for shape in ((2, 5, H), (V, H)))
    given = hidden, weight, torch.randint(V, (2, 5), generator=g), torch.ones(2, 5), torch.tensor([1.0, -0.5])
    trainer: Any = SimpleNamespace(liger_loss=theirs)
    slots = liger_slot.patch(trainer)
    if changed != 1.0:
        with pytest.raises(RuntimeError, match=r"liger-kernel 99\.1.*loss is not what it was: values"):
            trainer.liger_loss(*given)
        assert trainer.liger_loss is theirs and hidden.grad is None
        return
    with pytest.warns(UserWarning, match=r"liger-kernel 99\.1.*They agree"):
        trainer.liger_loss(*given)
    trainer.liger_loss(*given)
    assert slots.counts == {"fused": 2}


@pytest.mark.parametrize("changed", [1.0, 1.02])
@pytest.mark.parametrize("loss_type", ["bnpo", "luspo"])
def test_the_class_with_ligers_name(loss_type: str, changed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs Liger's class once, on the arguments of the first call. LUSPO counts padding in the comparison, and not after it."""
    chunked = pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")
    calls = []

    class Other(chunked.LigerFusedLinearGRPOLoss):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(self.loss_type)
            loss, metrics = super().forward(*args, **kwargs)
            return changed * loss, metrics

    monkeypatch.setattr(chunked, "LigerFusedLinearGRPOLoss", Other)
    options = {"beta": 0.0, "temperature": 0.7, "loss_type": loss_type, "use_ref_model": False}
    g = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(*shape, generator=g).requires_grad_() for shape in ((2, 5, H), (V, H)))
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0]])
    given = hidden, weight, torch.randint(V, (2, 5), generator=g), mask, torch.tensor([1.0, -0.2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        want = liger.LigerFusedLinearGRPOLoss(**options, any_version=True)(*given)[0]
        monkeypatch.setattr(metadata, "version", lambda _: liger.LIGER_VERSION)
        assert torch.equal(liger.LigerFusedLinearGRPOLoss(**options)(*given)[0], want) and not calls
    monkeypatch.setattr(metadata, "version", lambda _: "99.1")
    module = liger.LigerFusedLinearGRPOLoss(**options)
    if changed != 1.0:
        for _ in range(2):
            with pytest.raises(
                RuntimeError,
                match=r"liger-kernel 99\.1 was not tested.*LigerFusedLinearGRPOLoss is not what it was: values.*apart.*any_version=True",
            ):
                module(*given)
        assert hidden.grad is None and len(calls) == 2
        return
    with pytest.warns(UserWarning, match=r"liger-kernel 99\.1.*They agree") as said:
        assert torch.equal(module(*given)[0], want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(module(*given)[0], want)
    assert calls == [loss_type] and len(said) == 1


def test_an_older_liger_without_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lacks is left out where ours has the default, and named where not; a Liger that cannot be imported is none."""
    chunked = pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")
    own = chunked.LigerFusedLinearGRPOLoss

    def older(beta: float = 0.04, compiled: bool = True, use_ref_model: bool = True, loss_type: str = "bnpo") -> Any:
        return own(beta, compiled, use_ref_model, loss_type=loss_type)

    monkeypatch.setattr(chunked, "LigerFusedLinearGRPOLoss", older)
    g = torch.Generator().manual_seed(2)
    given = torch.randn(2, 3, H, generator=g), torch.randn(V, H, generator=g).requires_grad_(), torch.ones(2, 3).long()
    given = *given, torch.ones(2, 3), torch.tensor([1.0, -0.5])
    with pytest.warns(UserWarning, match="They agree"):
        liger.LigerFusedLinearGRPOLoss(beta=0.0)(*given)
    module = liger.LigerFusedLinearGRPOLoss(beta=0.0, delta=1.5)
    with pytest.raises(RuntimeError, match=r"its own function raised TypeError: .*'delta'"):
        module(*given)
    monkeypatch.setitem(sys.modules, "liger_kernel.chunked_loss", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(*given)


# ---- what a comparison can see


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
    stand_in("slime.backends.megatron_utils.loss", _build_topp_keep_mask=lambda *_, **__: None)
    stand_in("openrlhf.models.utils", log_probs_from_logits=len, compute_entropy=lambda logits: None)
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
