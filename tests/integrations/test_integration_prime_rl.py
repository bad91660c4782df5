"""prime-rl: its chunked head and its custom loss, compared with a float64 transcription, and with its own code if that is on
the path."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels import TokenSets
from grpo_kernels.formulas.surrogates import Cispo, Clip
from grpo_kernels.integrations import prime_rl
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
    stand_in,
    their_file,
    value_and_gradient,
)

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins")


def test_prime_rl_head() -> None:
    """A stand-in for the head module: one temperature per token; no gradient through the entropy."""

    class _SequenceChunkedLogProbEntropyFn:
        @staticmethod
        def apply(hidden: Tensor, weight: Tensor, labels: Tensor, inv_temperature: Tensor, chunk_size: int) -> Any:
            logits = hidden.double() @ weight.double().T * inv_temperature.double()[:, None]
            logps, entropy = log_softmax_of(logits, labels)
            return logps, entropy.detach()

    home = "prime_rl.trainer.models.layers.lm_head"
    head = stand_in(home, _SequenceChunkedLogProbEntropyFn=_SequenceChunkedLogProbEntropyFn)
    hidden, weight, labels = torch.randn(12, H), torch.randn(V, H), torch.randint(V, (12,))
    inverse, up = 1 / (0.5 + torch.rand(12)), torch.linspace(-1, 1, 12)

    def use(dtype: torch.dtype) -> tuple[Tensor, ...]:
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        logps, entropy = head._SequenceChunkedLogProbEntropyFn.apply(h, w, labels, inverse, 8)
        assert not entropy.requires_grad
        return tuple(x.double() for x in (logps.detach(), entropy, *torch.autograd.grad((logps * up).sum(), (h, w))))

    want = use(torch.float64)
    with prime_rl.bind(strict=True) as slots:
        for got, expected in zip(use(torch.float32), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert slots.counts == {"fused": 1}
        with pytest.raises(RuntimeError, match="ours already"):
            prime_rl.bind()
    assert head._SequenceChunkedLogProbEntropyFn is _SequenceChunkedLogProbEntropyFn


HEAD = "prime_rl.trainer.models.layers.lm_head"


def replayed(n: int = 24) -> tuple[Tensor, ...]:
    """Hidden states, weight, labels, 1/temperature and a trainer's sets: some empty, some with only the label, some without it."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(n, H, generator=g), torch.randn(V, H, generator=g)
    labels, inverse = torch.randint(V, (n,), generator=g), 1 / (0.5 + torch.rand(n, generator=g))
    sets = torch.stack([torch.randperm(V, generator=g)[:6] for _ in range(n)])
    sets = torch.where((sets == labels[:, None]) | (torch.rand(n, 6, generator=g) < 0.3), -1, sets)
    sets[:, 0] = labels
    sets[::4, 0], sets[1::4], sets[2::4, 1:] = -1, -1, -1
    return hidden, weight, labels, inverse, sets.to(torch.int32)


def head_in_float64(apply: Any, given: tuple[Any, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(log-probs, entropy, gradients) of a head's function over hidden, weight and what else it is given."""
    h, w = (x.to(dtype, copy=True).requires_grad_() for x in given[:2])
    logps, entropy = apply(h, w, *given[2:])[:2]
    up = torch.linspace(-1, 1, len(logps), dtype=dtype)
    return tuple(x.detach().double() for x in (logps, entropy, *torch.autograd.grad((logps * up).sum(), (h, w))))


def masked_head(hidden: Tensor, weight: Tensor, labels: Tensor, inverse: Tensor, sets: Tensor) -> tuple[Tensor, Tensor]:
    """All logits outside of a set at -inf, where there is a set and the label is in it; the entropy of all."""
    logits = hidden @ weight.T * inverse[:, None].to(hidden)
    keep = torch.zeros(*logits.shape[:-1], V + 1, dtype=torch.bool).scatter(1, sets.long() % (V + 1), True)[:, :V]
    keep |= ~keep.gather(1, labels[:, None])
    logps = log_softmax_of(logits.masked_fill(~keep, -math.inf), labels)[0]
    return logps, log_softmax_of(logits, labels)[1].detach()


def test_prime_rl_replays_sampling_masks() -> None:
    """Through the name that is bound, with 6 and 7 arguments: no ids and a label outside mean the whole vocabulary."""
    hidden, weight, labels, inverse, sets = replayed()
    want = head_in_float64(masked_head, (hidden, weight, labels, inverse, sets), torch.float64)
    plain = head_in_float64(masked_head, (hidden, weight, labels, inverse, torch.full_like(sets, -1)), torch.float64)
    outside = ~(sets == labels[:, None]).any(1)
    assert outside.sum() == 12 and torch.equal(want[0] == plain[0], outside)

    class _SequenceChunkedLogProbEntropyFn:
        apply = staticmethod(lambda *_: "theirs")

    head = stand_in(HEAD, _SequenceChunkedLogProbEntropyFn=_SequenceChunkedLogProbEntropyFn)
    with prime_rl.bind() as slots:
        apply = head._SequenceChunkedLogProbEntropyFn.apply
        for more in ((sets,), (sets, False)):
            got = head_in_float64(apply, (hidden, weight, labels, inverse, 8, *more), torch.float32)
            for ours, exact in zip(got, want, strict=True):
                torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
        assert len(apply(hidden, weight, labels, inverse, 8, sets)) == 2
        assert apply(hidden, weight, labels, inverse, 8, sets, False)[2] is None
        assert apply(hidden, weight, labels, inverse, 8, sets, True) == "theirs"
        assert slots.counts == {"fused": 4, "prime_rl: score centring": 1}
    with prime_rl.bind(entropy_over="kept", missing="include"):
        logps, entropy = head._SequenceChunkedLogProbEntropyFn.apply(hidden, weight, labels, inverse, 8, sets)
    assert (logps[2::4] == 0).all() and (entropy[2::4] == 0).all()  # of the label alone
    rows, ids = (hidden @ weight.T * inverse[:, None]).double(), torch.cat([sets, labels[:, None].int()], 1)
    for i in [*range(0, 24, 4), *range(3, 24, 4)]:  # the label joins its set
        kept = rows[i, sorted({int(x) for x in ids[i] if x >= 0})].log_softmax(0)
        assert float(entropy[i]) == pytest.approx(float(-(kept.exp() * kept).sum()), abs=1e-5)


def test_prime_rl_replay_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's own function of prime-rl's replay, in fp32, on the same numbers."""
    logger = {
        "prime_rl__utils__logger": {"get_logger": lambda: None},
        "prime_rl__utils__vlm": {"get_final_logit_softcapping": None},
    }
    head = their_file(HEAD, monkeypatch, **logger)
    if "mask" not in head._SequenceChunkedLogProbEntropyFn.forward.__doc__:
        pytest.skip("this prime_rl does not replay")
    hidden, weight, labels, inverse, sets = replayed()
    given = (hidden, weight, labels, inverse, 5, sets)
    want = head_in_float64(head._SequenceChunkedLogProbEntropyFn.apply, given, torch.float32)
    with prime_rl.bind(strict=True):
        got = head_in_float64(head._SequenceChunkedLogProbEntropyFn.apply, given, torch.float32)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_prime_rl_records_go_to_the_rows_that_predict_their_tokens() -> None:
    """The bytes that its orchestrator sends, with a count for each token, of two texts."""

    def data(numbers: list[float], dtype: torch.dtype) -> bytes:
        return torch.tensor(numbers, dtype=dtype).numpy().tobytes()

    ids, cuts = torch.tensor([1, 5, 7, 2, 4]), torch.tensor([0, 3, 5])
    record = SimpleNamespace(ids=data([5, 6, 7, 4], torch.int32), counts=data([0, 2, 1, 0, 1], torch.int32))
    sets = prime_rl.kept_sets(record, ids, cu_seqlens=cuts)
    rows = [[5, 6], [7], [], [4], []]
    assert sets.padded().tolist() == TokenSets.from_lists(rows).padded().tolist() and sets.values is None
    record.logprobs = data([-0.5, -1.0, 0.0, 0.0], torch.float32)
    assert prime_rl.kept_sets(record, ids, cu_seqlens=cuts).values.tolist() == [-0.5, -1.0, 0.0, 0.0]
    record.counts = data([0, 2, 2, 0, 1], torch.int32)
    with pytest.raises(ValueError, match="counts adds up to 5, but there are 4 ids"):
        prime_rl.kept_sets(record, ids)
    record.counts = data([2, 1, 1], torch.int32)
    with pytest.raises(ValueError, match="has 5 tokens, but sets have 3 rows"):
        prime_rl.kept_sets(record, ids)


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    loss: Tensor
    metrics: dict[str, Tensor]


def prime_inputs(data: Data, row: int, logps: Tensor, weights: Tensor | None = None) -> LossInputs:
    return LossInputs(logps[row], data.sampler[row], data.ref[row], data.advantages[row], MASK[row], weights)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["dppo_tv", "ipo", "cispo", "k3 to the reference"])
def test_prime_rl_loss(name: str, weighted: bool) -> None:
    stand_in("prime_rl.trainer.rl.loss", LossOutputs=LossOutputs)
    w = 0.5 + torch.rand(B, T) if weighted else torch.ones(B, T)
    options: dict[str, Any] = {"objective": name}
    if name == "k3 to the reference":
        options = {"objective": "grpo", "changes": {"beta": 0.2, "surrogate": Clip(0.1, 0.3)}}
    elif name == "cispo":
        options["changes"] = {"surrogate": Cispo(1.2)}

    def ours(x: Tensor) -> Any:
        outs = [prime_rl.loss(prime_inputs(DATA, b, x, w[b] if weighted else None), **options) for b in range(B)]
        assert all(set(out.metrics) == {"mismatch_kl", "is_masked"} for out in outs)
        return sum(out.loss for out in outs), outs

    def theirs(x: Tensor) -> Tensor:
        q, ref, A = double(DATA.sampler, DATA.ref, DATA.advantages)
        d = x - q
        moved = x.detach().exp() - q.exp()
        if name == "dppo_tv":
            keep = torch.where(A > 0, moved <= 0.2, moved >= -0.2)
            loss = -A * d.exp() * keep + 1e-3 * d * d
        elif name == "ipo":
            loss = -A * d.exp() * (moved.abs() <= 0.1) + 1e-3 * d * d
        elif name == "cispo":
            loss = -d.exp().clamp(max=1.2).detach() * A * x
        else:
            loss = clipped(d.exp(), A, 0.1, 0.3)[0] + 0.2 * ((ref - x).exp() - (ref - x) - 1)
        return (w * loss * MASK).sum()

    (loss, outs), gradient = value_and_gradient(ours, DATA.logps, torch.float32)
    assert_same((loss, gradient), value_and_gradient(theirs, DATA.logps, torch.float64))
    x = (DATA.logps - DATA.sampler)[0][MASK[0]].double()
    assert float(outs[0].metrics["mismatch_kl"]) == pytest.approx(float((x.exp() - x - 1).mean()), rel=1e-4)
    assert 0 < sum(float(out.metrics["is_masked"]) for out in outs) < B
