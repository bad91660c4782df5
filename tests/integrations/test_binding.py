"""How the functions of a trainer are replaced, restored, and compared under a version that was not tested: by the adapter of AReaL,
as all others do it."""

from __future__ import annotations

import functools
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from grpo_kernels.integrations import areal, openrlhf, prime_rl, skyrl, slime
from support.processes import finish, start
from support.trainers import MASK, B, T, V, log_softmax_of, stand_in

HOME = "areal.utils.functional.vocab_parallel"

pytestmark = pytest.mark.usefixtures("stand_ins")

G = torch.Generator().manual_seed(0)
LOGITS, LABELS = 2 * torch.randn(9, V, generator=G), torch.randint(V, (9,), generator=G)


def gather_logprobs(logits, labels, temperature=1.0, tp_group=None, chunk_size=1024):
    return log_softmax_of(logits, labels, temperature)[0].float()


def gather_logprobs_entropy(logits, labels, temperature=1.0, tp_group=None, chunk_size=1024):
    logps, entropy = log_softmax_of(logits, labels, temperature)
    return logps.float(), entropy.detach().float()


@pytest.fixture
def home():
    return stand_in(HOME, gather_logprobs=gather_logprobs, gather_logprobs_entropy=gather_logprobs_entropy)


def late_import(code):
    module = stand_in(f"areal.late_{len(sys.modules)}")
    exec(code, vars(module))
    return module


def test_modules_that_were_imported_late_are_given_back(home):
    """Under whatever name, before the binding or after it; also by a second binding."""
    home.again, names = gather_logprobs, ("gather_logprobs", "again", "other", "h")
    early = late_import(f"from {HOME} import gather_logprobs as other")
    for _ in range(2):
        slots = areal.bind()
        late = [late_import(f"from {HOME} import gather_logprobs{more}") for more in ("", " as h")]
        found = [vars(module)[name] for module in (home, early, *late) for name in names if name in vars(module)]
        assert len(found) == 5 and len({*found}) == 1 and found[0].theirs is gather_logprobs
        slots.undo()
        slots.undo()
        assert {vars(m)[name] for m in (home, early, *late) for name in names if name in vars(m)} == {gather_logprobs}


def test_what_went_wrong_inside_comes_first(home):
    """If other code has replaced the name by the end of the block, that is an error, unless the block has raised one already."""
    slots = areal.bind()
    ours, home.gather_logprobs = home.gather_logprobs, len
    with pytest.raises(RuntimeError, match="not ours any more: undo in the reverse order"), slots:
        pass
    with pytest.warns(UserWarning, match="not ours any more"), pytest.raises(KeyError), slots:
        raise KeyError
    home.gather_logprobs = ours
    slots.undo()
    assert home.gather_logprobs is gather_logprobs
    with (
        pytest.raises(RuntimeError, match=r"no call was fused in this block: AReaL did not call areal\."),
        areal.bind(strict=True),
    ):
        pass


def test_the_version_of_the_trainer_is_asked_for(home, monkeypatch):
    """One that was not tested, or is not known, is no obstacle."""

    def version(known, package):
        assert package == "areal"
        if known is None:
            raise metadata.PackageNotFoundError(package)
        return known

    monkeypatch.delenv("GRPO_KERNELS_ANY_VERSION", raising=False)
    said = {"1.0.4": None, "1.0.4.1": None, "1.0.41": "areal 1.0.41 was not tested", None: "areal, whose version is not known"}
    for known, message in said.items():
        monkeypatch.setattr(metadata, "version", functools.partial(version, known))
        for any_version in (False, True):
            with areal.bind(any_version=any_version) as slots:
                found = slots.trial.version
            assert found is None if any_version or message is None else message in found


def test_nothing_stays_bound_after_an_error():
    names = {"logprobs_from_logits": len, "chunked_entropy_from_logits": sum}
    home = stand_in("skyrl.backends.skyrl_train.utils.torch_utils", **names)
    with pytest.raises(ImportError):
        skyrl.bind(megatron=True)  # there is no such module here
    assert home.logprobs_from_logits is len


# ---- what the comparison of an untested version sees


@pytest.fixture
def newer(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "99.1")
    monkeypatch.delenv("GRPO_KERNELS_ANY_VERSION", raising=False)


def needs_a_gpu(*args, **kwargs):
    raise AssertionError("needs a GPU")


def changed(what):
    return lambda logits, labels, temperature=1.0, tp_group=None, chunk_size=1024: what(
        *gather_logprobs_entropy(logits, labels, temperature)
    )


DIFFERENT = {
    "values, tensor 0 of 2": changed(lambda logps, entropy: (1.02 * logps, entropy)),
    "slopes, tensor 0 of 1": changed(lambda logps, entropy: (logps + 0.02 * (logps - logps.detach()), entropy)),
    "values, tensor 1": changed(lambda logps, entropy: (logps, entropy + 0.01)),
    r"shapes \[\[9\], \[9\]\], and its own \[\[9\]\]": changed(lambda logps, entropy: logps),
    "nan apart": changed(lambda logps, entropy: (logps, entropy * torch.nan)),
    "its own function raised AssertionError: needs a GPU": needs_a_gpu,
}


@pytest.mark.parametrize("message", DIFFERENT)
def test_other_results_are_refused_with_the_difference(home, newer, message):
    """Ours is taken off, and nothing of the caller is touched."""
    home.gather_logprobs_entropy, leaf = DIFFERENT[message], LOGITS.clone().requires_grad_()
    slots = areal.bind()
    with pytest.raises(
        RuntimeError, match=rf"areal 99\.1.*gather_logprobs_entropy is not what it was: .*{message}.*any_version=True"
    ):
        home.gather_logprobs_entropy(leaf, LABELS)
    assert home.gather_logprobs_entropy is DIFFERENT[message] and home.gather_logprobs is gather_logprobs
    assert not slots.counts and leaf.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_function_is_compared_once_with_one_message(home, newer, dtype, recwarn):
    """Slopes in the first call that has them: old log-probs come first, without any; rows without tokens show nothing."""
    calls, leaf = [], LOGITS.to(dtype).requires_grad_()
    home.gather_logprobs = lambda *args, **kwargs: calls.append(torch.is_grad_enabled()) or gather_logprobs(*args, **kwargs)
    with areal.bind(strict=True) as slots:
        with torch.no_grad():
            first = home.gather_logprobs(leaf, LABELS, 0.7)
        home.gather_logprobs(leaf[:0], LABELS[:0])
        assert not [w for w in recwarn if "They agree" in str(w.message)]
        for _ in range(2):
            assert torch.equal(home.gather_logprobs(leaf, LABELS, 0.7), first)
            home.gather_logprobs_entropy(leaf, LABELS)
    said = [str(w.message) for w in recwarn if "They agree" in str(w.message)]
    assert len(said) == 1 and "areal 99.1 was not tested with this adapter (1.0.4 was)" in said[0]
    assert len(calls) == 3 and slots.counts == {"fused": 6}


def test_what_cannot_be_compared_is_refused_when_it_is_bound(newer):
    """Its result is another than the trainer's, or options were chosen that give another."""
    stand_in("slime.utils.ppo_utils", calculate_log_probs_and_entropy=len)
    stand_in("slime.backends.megatron_utils.loss", _build_topp_keep_mask=lambda *_, **__: None)
    stand_in("openrlhf.models.utils", log_probs_from_logits=len, compute_entropy=lambda logits: None)
    stand_in("prime_rl.trainer.models.layers.lm_head", _SequenceChunkedLogProbEntropyFn=type("F", (), {"apply": len}))
    for bind, options in (
        (slime.bind, {"replay": True}),
        (openrlhf.bind, {"entropy_temperature": 0.5}),
        (prime_rl.bind, {"entropy_over": "kept"}),
    ):
        with pytest.raises(RuntimeError, match="cannot be compared with ours in the first step"):
            bind(**options)
        with bind(**options, any_version=True):
            if bind is openrlhf.bind:
                entropy = sys.modules["openrlhf.models.utils"].compute_entropy(LOGITS)
                torch.testing.assert_close(entropy, log_softmax_of(LOGITS, LABELS, 0.5)[1].float(), rtol=1e-5, atol=1e-6)
    assert sys.modules["slime.utils.ppo_utils"].calculate_log_probs_and_entropy is len


# ---- nothing happens at import


def test_importing_adapters_imports_no_trainer():
    finish(start(
        "import sys, grpo_kernels, grpo_kernels.losses, grpo_kernels.distributed\n"
        "assert not any('integrations' in name for name in sys.modules)\n"
        "from grpo_kernels.integrations import adapters, trl\n"
        "assert [*adapters()] == 'areal liger miles nemo_rl openrlhf prime_rl skyrl slime trl unsloth verl'.split()\n"
        "assert not {'trl', 'transformers', 'triton', 'liger_kernel', 'verl'} & {*sys.modules}\n"
        "try: trl.Trainer2\n"
        "except AttributeError as error: assert 'Trainer2' in str(error)\n"
    ))  # fmt: skip


def test_the_swap_in_the_readme():
    """The two snippets, as they stand there, with the float mask that most trainers have."""
    text = Path(__file__).parents[2].joinpath("README.md").read_text()
    before, after = re.findall(r"```python\n(# (?:before|after): .*?)```", text, re.S)
    targets, logits = torch.randint(V, (B, T), generator=G), torch.randn(B, T, V, generator=G)
    given = {
        "torch": torch, "targets": targets, "mask": MASK.float(), "total_tokens": MASK.sum(),
        **{name: torch.randn(B, T, generator=G) - 3 for name in ("old_logps", "ref_logps", "advantages")},
    }  # fmt: skip
    gradients = []
    for code in (before, after):
        leaf = logits.clone().requires_grad_()
        exec(code, given | {"logits": leaf * 1.0})
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
