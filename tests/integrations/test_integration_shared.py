"""Shared parts of the adapters: how names are bound, counted and restored, and the checks of versions."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels.integrations import areal, liger, nemo_rl, openrlhf, prime_rl, skyrl, slime, trl_head, unsloth, verl
from grpo_kernels.integrations._slots import Slots
from support.trainers import MASK, ROOTS, B, T, V, stand_in

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins")


BINDERS: dict[str, Callable[..., Slots]] = {
    "openrlhf": openrlhf.bind, "areal": areal.bind, "slime": slime.bind, "prime-rl": prime_rl.bind, "skyrl": skyrl.bind,
    "unsloth_zoo": lambda **options: unsloth.bind(type("T", (), {"__module__": "unsloth_made"}), **options),
}  # fmt: skip


@pytest.mark.parametrize("name", BINDERS)
@pytest.mark.parametrize("found", ["0.0.1", None])
def test_every_adapter_asks_for_the_version_of_its_trainer(
    name: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was not tested is no obstacle: what is bound is compared in the first step."""
    made: list[Slots] = []
    theirs = Slots.__init__

    def kept(slots: Slots, *args: Any, **kwargs: Any) -> None:
        theirs(slots, *args, **kwargs)
        made.append(slots)

    def version(package: str) -> str:
        assert package == name
        if found is None:
            raise metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(Slots, "__init__", kept)
    monkeypatch.setattr(metadata, "version", version)
    for root in ROOTS:
        stand_in(root)  # hides the trainer, if it is here
    for any_version in (False, True):
        with pytest.raises((ImportError, AttributeError)):  # it looks for the trainer's modules
            BINDERS[name](any_version=any_version)
    said = made[0].trial.version
    assert said is not None and f"{name} 0.0.1" in said if found else f"{name}, whose version is not known" in str(said)
    assert made[1].trial.version is None


#: All that a trainer calls.
CALLED: dict[str, Callable[..., Any]] = {
    f"{module.__name__.rpartition('.')[2]}.{name}": getattr(module, name)
    for module, names in (
        (areal, ("gather_logprobs", "gather_logprobs_entropy")),
        (nemo_rl, ("PolicyLoss",)),
        (openrlhf, ("PolicyLoss", "log_probs_from_logits", "compute_entropy")),
        (prime_rl, ("chunked_logprobs", "loss")),
        (skyrl, ("logprobs_from_logits", "chunked_entropy_from_logits", "fused_lm_head_logprobs")),
        (slime, ("calculate_log_probs_and_entropy",)),
        (unsloth, ("selective_log_softmax", "log_softmax_and_entropy")), (trl_head, ("log_probs",)),
        (liger, ("triton_grpo_loss", "fused_selective_log_softmax")),
        (verl, ("linear_cross_entropy", "logprobs_from_logits", "entropy_from_logits")),
    )
    for name in names
} | {
    "liger.LigerFusedLinearGRPOLoss": liger.LigerFusedLinearGRPOLoss,
    "liger.LigerFusedLinearGRPOLoss()": liger.LigerFusedLinearGRPOLoss().forward, "openrlhf.PolicyLoss()": openrlhf.PolicyLoss().forward,
    "nemo_rl.PolicyLoss()": nemo_rl.PolicyLoss.__call__.__get__(object()),
    "skyrl.policy_loss()": skyrl.policy_loss("dapo"), "slime.policy_loss()": slime.policy_loss(),
    "verl.policy_loss()": verl.policy_loss("vanilla"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLED)
def test_an_argument_of_a_newer_trainer_is_refused_not_swallowed(name: str) -> None:
    """A new argument may change the result: an unsloth_zoo that passed the head's bias once got log-probs without it."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'of_a_newer_version'"):
        CALLED[name](of_a_newer_version=1)
    parameters = inspect.signature(CALLED[name]).parameters.values()
    assert not [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]


def test_packed_rows_come_back_flat() -> None:
    """As verl's own functions return them: [N] from hidden states with labels [1, N], and from logits [N, V] with such."""
    logits, labels = torch.randn(6, V), torch.randint(V, (1, 6))
    want = torch.log_softmax(logits, -1).gather(1, labels[0, :, None])[:, 0]
    torch.testing.assert_close(verl.logprobs_from_logits(logits, labels), want, rtol=1e-5, atol=1e-6)
    logps, entropy = verl.linear_cross_entropy(logits[None], torch.eye(V), labels)
    torch.testing.assert_close(logps, want, rtol=1e-5, atol=1e-6)
    assert entropy.shape == want.shape
    with pytest.raises(ValueError, match=r"\[1, 6\]"):  # as many labels as rows
        verl.logprobs_from_logits(torch.randn(5, V), labels)


def test_what_is_left_to_the_trainer_is_counted_or_an_error() -> None:
    calls: list[Any] = []
    stand_in("slime.utils.ppo_utils", calculate_log_probs_and_entropy=lambda *args, **_: calls.append(args))
    home = sys.modules["slime.utils.ppo_utils"]
    logits, tokens = torch.randn(3, V, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    with slime.bind() as slots:
        home.calculate_log_probs_and_entropy(logits, tokens, None)
    assert len(calls) == 1 and slots.counts == {"slime: dtype torch.float64": 1}
    with pytest.raises(RuntimeError, match=r"strict=True.*dtype torch\.float64"), slime.bind(strict=True):
        home.calculate_log_probs_and_entropy(logits, tokens, None)
    assert len(calls) == 1


def test_nothing_stays_bound_after_an_error() -> None:
    names = {"logprobs_from_logits": len, "chunked_entropy_from_logits": sum}
    home = stand_in("skyrl.backends.skyrl_train.utils.torch_utils", **names)
    with pytest.raises(ImportError):
        skyrl.bind(megatron=True)  # there is no such module here
    assert home.logprobs_from_logits is len


def late_import(code: str) -> ModuleType:
    module = stand_in(f"areal.late_{len(sys.modules)}")
    exec(code, vars(module))
    return module


def test_modules_that_were_imported_late_are_given_back() -> None:
    home = stand_in("areal.home", f=len, g=len)
    alias = late_import("from areal.home import f as other")
    slots = Slots("areal")
    slots.bind("areal.home", "f", lambda x: "ours")
    assert home.f("x") == home.g("x") == alias.other("x") == "ours"  # whatever its name is
    late, renamed = late_import("from areal.home import f"), late_import("from areal.home import f as h")
    assert late.f("x") == renamed.h("x") == "ours"
    slots.undo()
    slots.undo()
    assert home.f is home.g is alias.other is late.f is renamed.h is len
    with Slots("areal") as again:
        again.bind("areal.home", "f", lambda x: "again")
        assert {m("x") for m in (home.f, alias.other, late.f, renamed.h)} == {"again"}
        again.undo()  # leaving the block then finds nothing to do


def test_what_went_wrong_inside_comes_first() -> None:
    """If other code has replaced the name by the end of the block, that is an error, unless the block has raised one already."""
    home = stand_in("areal.home", f=len)
    slots = Slots("areal")
    slots.bind("areal.home", "f", lambda x: "ours")
    ours, home.f = home.f, sum
    with pytest.raises(RuntimeError, match="not ours any more"), slots:
        pass
    with pytest.warns(UserWarning, match="not ours any more"), pytest.raises(KeyError), slots:
        raise KeyError
    home.f = ours
    slots.undo()
    assert home.f is len


def test_the_swap_in_the_readme() -> None:
    """The two snippets, as they stand there, with the float mask that most trainers have."""
    before, after = re.findall(
        r"```python\n(# (?:before|after): .*?)```", Path(__file__).parents[2].joinpath("README.md").read_text(), re.S
    )
    g = torch.Generator().manual_seed(0)
    targets, logits = torch.randint(V, (B, T), generator=g), torch.randn(B, T, V, generator=g)
    given = {
        "torch": torch, "targets": targets, "mask": MASK.float(), "total_tokens": MASK.sum(),
        **{name: torch.randn(B, T, generator=g) - 3 for name in ("old_logps", "ref_logps", "advantages")},
    }  # fmt: skip
    gradients = []
    for code in (before, after):
        leaf = logits.clone().requires_grad_()
        exec(code, given | {"logits": leaf * 1.0})
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_the_core_does_not_know_them() -> None:
    package = Path(str(importlib.util.find_spec("grpo_kernels").origin)).parent
    for path in package.rglob("*.py"):
        if not {"integrations", "plugins"} & {*path.parts}:
            assert not re.search(r"(from|import) (grpo_kernels)?\.+(integrations|plugins)", path.read_text()), path


def test_verl_sets_of_a_batch() -> None:
    """A stand-in for verl's DataProto; its own is tested beside verl."""
    batch = {"response_mask": torch.tensor([[1, 0, 1], [1, 1, 0]])}
    data = SimpleNamespace(batch=batch, non_tensor_batch={"sampling_mask": [[[4, 1], [7]], None]})
    kept = verl.kept_sets(data)
    assert kept is not None and kept.padded().tolist() == [[4, 1], [-1, -1], [7, -1], *[[-1, -1]] * 3]
    assert verl.kept_sets(data, "other") is None
    data.non_tensor_batch["sampling_mask"][1] = [[2]]
    with pytest.raises(ValueError, match=r"lists\[1\] has 1 records, but generated marks 2 tokens of sequence 1"):
        verl.kept_sets(data)
