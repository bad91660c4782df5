"""No public function waits for a device, forward and backward, but those that say so. Tested with meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from grpo_kernels import (
    Exact,
    LogitTransform,
    Objective,
    Options,
    Sparse,
    TokenBatch,
    TokenSets,
    group_advantages,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    loss_from_model,
    token_divergence,
    token_logprobs,
    use,
)
from grpo_kernels.distributed import global_normalizer
from grpo_kernels.losses import objective_loss
from grpo_kernels.rewards.corrections import importance_weights
from grpo_kernels.transform import IDENTITY
from grpo_kernels.vocabulary import shard
from grpo_kernels.vocabulary.backends import eager
from grpo_kernels.vocabulary.rows import RowStats
from grpo_kernels.vocabulary.selection import capacity
from support.cases import OBJECTIVES
from support.linear_cases import LinearCase, build_linear
from support.meta_device import WAITS, CopyError, make_device, on_meta

Tensor = torch.Tensor


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is no CPU, whose tensors have no values and take none from the host."""
    make_device(monkeypatch)


@pytest.mark.usefixtures("meta")
def test_a_wait_of_the_device_is_noticed() -> None:
    x, index = on_meta(torch.ones(3)), torch.tensor([0, 2])
    for wait in (lambda: x.sum().item(), lambda: bool(x[0] > 0), lambda: x.nonzero(), lambda: x[x > 0], lambda: x.tolist()):
        with pytest.raises(WAITS):
            wait()
    for copy in (
        lambda: torch.tensor([1], device="meta"), lambda: torch.as_tensor(1.0, device="meta"), lambda: x.new_tensor([1]),
        lambda: index.to("meta"), lambda: index.to(x), lambda: x.copy_(torch.ones(3)), lambda: x[index], lambda: x[[0, 2]],
        lambda: x.__setitem__(index, 1.0), lambda: index.type_as(x),
    ):  # fmt: skip
        with pytest.raises(CopyError):
            copy()
    (
        torch.full((1,), 3, device="meta"),
        x.new_full((1,), 3),
        x.to(torch.float16),
        x + 1.0,
        x[1:],
        x[torch.empty_like(index, device="meta")],
    )


# ---- every public function, forward and backward


class On(NamedTuple):
    """What calls take, on the device."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    logits: Tensor
    batch: TokenBatch
    alone: TokenBatch  # without log-probs of a reference
    kept: TokenBatch  # with sets, of which some have 100 ids
    top: TokenSets  # ids of each row, with log-probs
    second: tuple[Tensor, Tensor]  # hidden states and weight of a reference
    weights: Tensor  # of a teacher, a number for each sequence

    @property
    def targets(self) -> Tensor:
        return self.batch.targets

    @property
    def mask(self) -> Tensor:
        assert self.batch.mask is not None
        return self.batch.mask

    @property
    def head(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.weight

    @property
    def teachers(self) -> list[Any]:
        """From hidden states, in one visit."""
        return [(self.second, 0.5), (self.second, self.weights)]

    @property
    def beside(self) -> list[Any]:
        """From logits, one known at some ids."""
        return [(self.logits.detach(), 0.5), (self.top, self.weights)]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    vocab, case = 301, build_linear(vocab=301)
    rows = case.tokens.targets.numel()
    counts = torch.arange(rows) % 3 * 50  # no id, 50, 100
    sets = TokenSets.from_counts(torch.cat([torch.arange(n) for n in counts.tolist()]), counts)
    top = TokenSets.from_counts(torch.arange(2 * rows) % vocab, torch.full((rows,), 2))
    monkeypatch.setattr(TokenBatch, "count", lambda batch, kind, marked=None: batch.__dict__["_numbers"][kind])

    def batch(**more: Any) -> TokenBatch:
        fields = case.tokens.fields | more
        real, made = TokenBatch(**fields), TokenBatch(**on_meta(fields))
        marks = {kind: real.marked(kind) for kind in real._kinds}  # whose numbers the host of a GPU has by then
        numbers = {kind: real.rows if mark is None else int(mark.sum()) for kind, mark in marks.items()}
        object.__setattr__(made, "_numbers", numbers)
        return made

    leaves = {k: on_meta(x.detach()).requires_grad_() for k, x in case.leaves.items()}
    logits = torch.empty(*case.tokens.targets.shape, vocab, device="meta", requires_grad=True)
    second = torch.empty_like(leaves["hidden"]), torch.empty_like(leaves["weight"])
    weights = torch.empty(case.tokens.targets.shape[0], device="meta")
    return On(
        *leaves.values(), logits, batch(), batch(ref_logps=None), batch(kept=sets),
        on_meta(top.with_values(torch.full((2 * rows,), -1.0))), second, weights,
    )  # fmt: skip


DAPO, GSPO = Objective.preset("dapo", beta=0.04), OBJECTIVES["gspo"][0]()
JSD, OF_IDS = Exact("jsd"), Exact("forward", tail="ignore")
EXACT, TOP = (Objective.preset("dapo", beta=0.04, kl=kl) for kl in (JSD, OF_IDS))
APART = replace(GSPO, beta=0.04, kl=JSD)  # two passes
SPARSE = Options(sparse=Sparse())

#: {name: a call, whose result is differentiable}
CALLS: dict[str, Callable[[On], Tensor]] = {
    "token_logprobs, masked": lambda on: total(*token_logprobs(on.logits, on.targets, mask=on.mask, entropy=True)),
    "token_logprobs, at": lambda on: total(*token_logprobs(on.logits, on.targets, mask=on.mask, at=on.top)),
    "token_logprobs, kept sets": lambda on: total(*token_logprobs(on.logits, on.targets, mask=on.mask, kept=on.kept.kept)),
    "token_logprobs, kept sets and at": lambda on: total(
        *token_logprobs(on.logits, on.targets, mask=on.mask, kept=on.kept.kept, at=on.top)
    ),
    "linear_logprobs": lambda on: total(*linear_logprobs(*on.head, on.targets, entropy=True)),
    "linear_logprobs, masked": lambda on: total(*linear_logprobs(*on.head, on.targets, mask=on.mask)),
    "linear_logprobs, at": lambda on: total(*linear_logprobs(*on.head, on.targets, at=on.top)),
    "linear_logprobs, kept sets": lambda on: total(*linear_logprobs(*on.head, on.targets, kept=on.kept.kept)),
    "linear_logprobs, Sparse": lambda on: total(*linear_logprobs(*on.head, on.targets, options=SPARSE)),
    "linear_logprobs, missing": lambda on: total(
        *linear_logprobs(*on.head, on.targets, kept=on.top, options=Options(missing="full"))
    ),
    "token_divergence, masked": lambda on: token_divergence(on.logits, on.logits.detach(), JSD, mask=on.mask),
    "token_divergence, kept sets": lambda on: token_divergence(on.logits, on.logits.detach(), JSD, kept=on.kept.kept),
    "token_divergence, a teacher's ids": lambda on: token_divergence(on.logits, on.top, OF_IDS, mask=on.mask),
    "token_divergence, several teachers": lambda on: token_divergence(on.logits, on.beside, OF_IDS, mask=on.mask),
    "linear_divergence": lambda on: linear_divergence(*on.head, on.second, JSD),
    "linear_divergence, masked": lambda on: linear_divergence(*on.head, on.second, JSD, mask=on.mask),
    "linear_divergence, kept sets": lambda on: linear_divergence(*on.head, on.second, JSD, kept=on.kept.kept),
    "linear_divergence, a teacher's ids": lambda on: linear_divergence(*on.head, on.top, OF_IDS),
    "linear_divergence, several teachers": lambda on: linear_divergence(*on.head, on.teachers, JSD),
    "grpo_loss": lambda on: grpo_loss(on.logits, on.batch, DAPO).loss,
    "grpo_loss, kept sets": lambda on: grpo_loss(on.logits, on.kept, DAPO).loss,
    "grpo_loss, divergence": lambda on: grpo_loss(on.logits, on.alone, EXACT, ref_logits=on.logits.detach()).loss,
    "grpo_loss, a teacher's ids": lambda on: grpo_loss(on.logits, on.alone, TOP, ref_logits=on.top).loss,
    "grpo_loss, several teachers": lambda on: grpo_loss(on.logits, on.alone, EXACT, ref_logits=on.beside[:1] * 2).loss,
    "grpo_loss, several teachers apart": lambda on: grpo_loss(on.logits, on.alone, TOP, ref_logits=on.beside).loss,
    "linear_grpo_loss": lambda on: linear_grpo_loss(*on.head, on.batch, DAPO, bias=on.bias, skip_inactive=True).loss,
    "linear_grpo_loss, sequence level": lambda on: linear_grpo_loss(*on.head, on.batch, GSPO).loss,
    "linear_grpo_loss, reference": lambda on: linear_grpo_loss(*on.head, on.alone, DAPO, reference=on.second).loss,
    "linear_grpo_loss, kept sets": lambda on: linear_grpo_loss(*on.head, on.kept, DAPO).loss,
    "linear_grpo_loss, Sparse": lambda on: linear_grpo_loss(*on.head, on.batch, DAPO, options=SPARSE).loss,
    "linear_grpo_loss, Sparse and kept sets": lambda on: linear_grpo_loss(*on.head, on.kept, DAPO, options=SPARSE).loss,
    "linear_grpo_loss, divergence": lambda on: linear_grpo_loss(*on.head, on.alone, EXACT, reference=on.second).loss,
    "linear_grpo_loss, a teacher's ids": lambda on: linear_grpo_loss(*on.head, on.alone, TOP, reference=on.top).loss,
    "linear_grpo_loss, several teachers": lambda on: linear_grpo_loss(*on.head, on.alone, EXACT, reference=on.teachers).loss,
    "linear_grpo_loss, several teachers apart": lambda on: (
        linear_grpo_loss(*on.head, on.alone, APART, reference=on.teachers).loss
    ),
    "linear_grpo_loss, ids among several teachers": lambda on: (
        linear_grpo_loss(*on.head, on.alone, TOP, reference=[(on.second, 0.5), (on.top, 0.5)]).loss
    ),
}

#: Where calls are documented to wait.
DOCUMENTED = {
    "linear_logprobs, masked": "forward",
    "linear_logprobs, missing": "forward",
    "linear_divergence, masked": "forward",
    "linear_divergence, several teachers": "forward",
    "linear_grpo_loss, several teachers apart": "forward",
    "linear_grpo_loss, ids among several teachers": "forward",
}


def total(logps: Tensor, entropy: Tensor | None, more: dict[str, Tensor] | None = None) -> Tensor:
    found = [x for x in (logps, entropy, *(more or {}).values()) if x is not None]
    return torch.stack([x.sum() for x in found]).sum()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("meta")
def test_no_call_waits_but_those_that_say_so(name: str, on: On) -> None:
    with use(backend="eager"):
        if DOCUMENTED.get(name) == "forward":
            with pytest.raises(WAITS, match="nonzero"):
                CALLS[name](on)
            return
        loss = CALLS[name](on).sum()
        if DOCUMENTED.get(name) == "backward":
            with pytest.raises(WAITS, match="nonzero"):
                loss.backward()
            return
        loss.backward()
    assert (on.logits.grad is not None) != (on.hidden.grad is not None and on.weight.grad is not None)


@pytest.mark.usefixtures("meta")
def test_columns_of_a_shard_are_drawn_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "_ranks", lambda _: 2)
    monkeypatch.setattr(shard, "all_gather", lambda *_: None)
    logits, (targets, offsets) = torch.empty(5, 30, device="meta"), torch.empty(2, 5, dtype=torch.int64, device="meta")
    stats = RowStats.empty(("max", "sum", "target"), 5, logits.device)
    drawn = shard.VocabParallel(eager, shard.VocabShard(31, 61)).select(logits, targets, stats, IDENTITY, 0.5, offsets)
    assert drawn.ids.shape == drawn.logits.shape == (5, capacity(0.5))


@pytest.fixture
def model() -> Any:
    pytest.importorskip("transformers")
    from support.models import build

    model = build("LlamaForCausalLM").to("meta")
    model.model.forward = lambda input_ids: (model.model.embed_tokens(input_ids),)  # that of transformers waits
    return model


def test_loss_from_model_waits_for_nothing(model: Any, meta: None, on: On) -> None:
    ids = torch.empty(on.targets.shape, dtype=torch.int64, device="meta")
    with use(backend="eager"):
        loss_from_model(model, ids, on.batch, DAPO).loss.backward()
    assert model.model.embed_tokens.weight.grad is not None and model.lm_head.weight.grad is not None


@pytest.mark.usefixtures("meta")
def test_what_goes_before_a_loss_waits_for_nothing(on: On) -> None:
    rewards, entropy = torch.empty(on.targets.shape[0], device="meta"), torch.empty(on.targets.shape, device="meta")
    TokenBatch.from_rewards(on.targets, rewards, group_size=2, mask=on.mask, kept=on.kept.kept, missing="mask")
    importance_weights(on.batch, level="sequence")
    global_normalizer(DAPO, [on.batch, on.alone])
    group_advantages(torch.stack([rewards, rewards], 1), group_size=2, reward_weights=[1.0, 0.5])
    out = objective_loss(entropy.requires_grad_(), on.batch, DAPO)
    out.loss.backward()
    assert len(out.metrics) >= 9


# ---- kept sets

SOME = ("dapo", "grpo, k3 and entropy", "gspo", "vespo")
MISSING = ("include", "full", "mask")


def kept_case(mixed: bool) -> LinearCase:
    """With `mixed` some rows have no set."""
    case = build_linear(kept=True)
    if not mixed:
        rows = case.tokens.targets.numel()
        case.tokens.fields["kept"] = TokenSets.from_counts(torch.arange(2 * rows) % 61, torch.full((rows,), 2))
    return case


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("name", SOME)
def test_what_is_counted_early_is_what_a_loss_asks_for(name: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows of a kind that a GPU sends to the host when the batch is made."""
    count, asked = TokenBatch.count, set()

    def checked(batch: TokenBatch, kind: str, marked: Tensor | None = None) -> int:
        assert kind in batch._kinds and marked is not None
        early = batch._kinds.index(kind)
        numbers = [batch.rows if m is None else int(m.sum()) for m in map(batch.marked, batch._kinds)]
        assert numbers[early] == int(marked.sum()) > 0, kind
        asked.add(kind)
        return count(batch, kind, marked)

    monkeypatch.setattr(TokenBatch, "count", checked)
    case, objective = kept_case(True), OBJECTIVES[name][0]()
    for skip_inactive in (False, True):
        linear_grpo_loss(
            case.hidden, case.weight, case.tokens.batch(missing=missing), objective, bias=case.bias, skip_inactive=skip_inactive
        )  # fmt: skip
    assert asked and all("whole" in kind for kind in asked)


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "sets alone"])
@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.usefixtures("meta")
def test_losses_over_sets(name: str, missing: str, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, from logits and from hidden states, with memory to add to."""
    case, objective = kept_case(mixed), OBJECTIVES[name][0]()
    real = case.tokens.batch(missing=missing)
    numbers = {kind: real.count(kind) for kind in real._kinds}  # which the host of a GPU has by then
    monkeypatch.setattr(TokenBatch, "count", lambda batch, kind, marked=None: numbers[kind])
    fields = on_meta(case.tokens.fields)
    leaves = {k: on_meta(x.detach()).requires_grad_() for k, x in case.leaves.items()}
    batch, transform = TokenBatch(**fields, missing=missing), LogitTransform(0.7, softcap=9.0)
    logits = torch.empty(*batch.targets.shape, 61, device="meta", requires_grad=True)
    out = grpo_loss(logits, batch, objective, transform=transform, backend="eager")
    assert "kept_mass" not in out.metrics and "outside_set" in out.metrics
    out.loss.backward()
    assert logits.grad is not None
    for memory in (None, torch.zeros(61, 24, device="meta")):
        linear_grpo_loss(
            leaves["hidden"], leaves["weight"], batch, objective,
            bias=leaves["bias"], transform=transform, backend="eager", weight_grad=memory,
        ).loss.backward()  # fmt: skip
    assert all(leaf.grad is not None for leaf in leaves.values())


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "sets alone"])
@pytest.mark.usefixtures("meta")
def test_log_probs_over_sets(mixed: bool) -> None:
    case = kept_case(mixed)
    fields = on_meta(case.tokens.fields)
    leaves = {k: on_meta(x.detach()).requires_grad_() for k, x in case.leaves.items()}
    logits = torch.empty(*case.tokens.targets.shape, 61, device="meta", requires_grad=True)
    options: dict[str, Any] = {"kept": fields["kept"], "entropy": True, "also": ("sum_squares", "top_id"), "backend": "eager"}
    for mask in (fields["mask"], None):
        logps, entropy, more = token_logprobs(logits, fields["targets"], mask=mask, **options)
        torch.autograd.backward(logps.sum() + entropy.sum() + more["sum_squares"].sum())
    for call in (options, options | {"also": ("log_kept_mass",)}):
        logps, entropy, more = linear_logprobs(
            leaves["hidden"], leaves["weight"], fields["targets"], bias=leaves["bias"], **call
        )
        torch.autograd.backward(logps.sum() + entropy.sum() + sum(x.sum() for x in more.values() if x.requires_grad))
    assert logits.grad is not None and all(leaf.grad is not None for leaf in leaves.values())
    known = {"kept": fields["kept"], "backend": "eager"}
    if not mixed:
        linear_logprobs(leaves["hidden"], leaves["weight"], fields["targets"], mask=fields["mask"], **known)
        return
    with pytest.raises(NotImplementedError):  # as without sets: rows are picked by a mask that the host reads
        linear_logprobs(leaves["hidden"], leaves["weight"], fields["targets"], mask=fields["mask"], **known)
