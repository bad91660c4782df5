"""Batches for tests, objectives with their specification for the oracle, and the rule by which errors are judged."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from grpo_kernels import LogitTransform, LossOutput, Objective, TokenBatch, TokenSets, grpo_loss
from support import oracle
from support.objectives import OBJECTIVES as EVERY
from support.oracle import Spec

Tensor = torch.Tensor

OBJECTIVES = {name: pair for name, pair in EVERY.items() if "exact" not in name and name != "means of groups"}

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def some(values: Sequence[Any]) -> list[Any]:
    """(objective, value) pairs for values that do not interact with the objective: each objective with the first value, and with
    one of the other values in turn. The whole product runs under -m slow."""
    others = len(values) - 1
    return [
        pytest.param(name, value, id=f"{name}-{value}", marks=() if i in (0, 1 + n % others) else pytest.mark.slow)
        for n, name in enumerate(OBJECTIVES)
        for i, value in enumerate(values)
    ]


#: Log-ratios of the tokens: on both sides of every bound above, and away from the bounds, where min and clamp have a kink.
LOG_RATIOS = (-1.2, -0.6, -0.3, -0.1, 0.05, 0.15, 0.22, 0.4, 0.9, 1.3, 1.9)
LENGTHS = (7, 4, 2, 0, 6, 1, 5, 3)
ADVANTAGES = (1.3, -0.8, 2.0, 0.7, -1.1, 0.6, 0.0, -1.7)
#: Added to the log-ratios of each sequence, so that the means leave the bounds on both sides too.
SEQUENCE_SHIFT = (0.3, -0.5, 0.0, 0.0, 0.35, 0.2, 0.0, -0.6)


#: Cached results of the oracle, by everything that they depend on: many tests ask for the same.
_answers: dict[Any, tuple[oracle.Result, Tensor]] = {}


def content(x: Any) -> Any:
    """A key for the cache: a tensor by its values, anything else unchanged."""
    if not isinstance(x, Tensor):
        return x
    host = x.detach().cpu().contiguous()
    values = ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()) if host.numel() else b""
    return x.dtype, x.shape, x.device, hashlib.sha1(values).digest()


@dataclass
class Case:
    """Logits and the fields of a TokenBatch."""

    logits: Tensor
    fields: dict[str, Any]
    transform: dict[str, Any] = field(default_factory=dict)
    keep: Tensor | None = None  # bool, the shape of logits: the ids that a row's softmax runs over, where it has a set

    @property
    def targets(self) -> Tensor:
        return self.fields["targets"]

    @property
    def mask(self) -> Tensor | None:
        return self.fields.get("mask")

    def batch(self, **changes: Any) -> TokenBatch:
        return TokenBatch(**{**self.fields, **changes})

    def logit_transform(self) -> LogitTransform | None:
        return LogitTransform(**self.transform) if self.transform else None

    def expected(self, spec: Spec, normalizer: float | None = None) -> tuple[oracle.Result, Tensor]:
        return self._oracle(spec, normalizer, torch.float64)

    def naive(self, spec: Spec, normalizer: float | None = None) -> tuple[oracle.Result, Tensor]:
        return self._oracle(spec, normalizer, torch.float32)

    def _oracle(self, spec: Spec, normalizer: float | None, dtype: torch.dtype) -> tuple[oracle.Result, Tensor]:
        fields = {k: v for k, v in self.fields.items() if k != "kept"}
        fields |= {"logits": self.logits, "normalizer": normalizer, "dtype": dtype, "keep": self.keep}
        asked = (spec, *(content(x) for x in (*fields, *fields.values(), *self.transform, *self.transform.values())))
        if asked in _answers:
            return _answers[asked]
        answer = oracle.loss(spec, **fields, transform=oracle.Transform(**self.transform))
        if self.logits.numel() < 1 << 16:
            _answers[asked] = answer
        return answer

    def with_logits(self, logits: Tensor) -> Case:
        return replace(self, logits=logits)


def build(
    dtype: torch.dtype = torch.float32,
    *,
    packed: bool = False,
    vocab: int = 61,
    seed: int = 0,
    transform: dict[str, Any] | None = None,
    kept: bool = False,
) -> Case:
    """Eight sequences of unequal lengths: one fully masked, one empty, holes in the others, an advantage of 0, random
    weights. Old and reference log-probs lie around the policy's own, LOG_RATIOS away. `kept`: most rows have a set of ids."""
    g = torch.Generator().manual_seed(seed)
    logits = (3.0 * torch.randn(len(LENGTHS), max(LENGTHS), vocab, generator=g)).to(dtype)
    case = around(logits, g, transform or {}, kept)
    return pack(case) if packed else case


#: Ids of the sets of rows, in turn: 0 is a row without a set, and a negative set lacks its target.
SET_SIZES = (5, 1, 9, -4, 0, 3, 1, 17, -1, 2, 0, 30)


def sets_around(targets: Tensor, vocab: int, g: torch.Generator) -> tuple[TokenSets, Tensor]:
    """(sets of SET_SIZES for the rows of targets, the ids [.., V] that their softmax runs over: the set with its target)."""
    lists: list[list[int]] = []
    keep = torch.zeros(targets.numel(), vocab, dtype=torch.bool)
    for row, target in enumerate(targets.reshape(-1).tolist()):
        size = SET_SIZES[row % len(SET_SIZES)]
        others = [i for i in torch.randperm(vocab, generator=g).tolist() if i != target]
        ids = others[:-size] if size < 0 else [target, *others[: size - 1]]
        lists.append(sorted(ids[: abs(size)], reverse=row % 3 == 0) if size else [])
        keep[row, [*lists[-1], target]] = True
        if not size:
            keep[row] = True
    return TokenSets.from_lists(lists, device=targets.device), keep.view(*targets.shape, vocab)


def around(logits: Tensor, g: torch.Generator, transform: dict[str, Any], kept: bool = False) -> Case:
    """Builds a case around these logits [B, T, V]."""
    (b, t, vocab), lengths = logits.shape, torch.tensor(LENGTHS)
    targets = torch.randint(vocab, (b, t), generator=g)
    # Half of the targets are likely tokens, as in real rollouts.
    targets = torch.where(torch.rand(b, t, generator=g) < 0.5, logits.float().argmax(-1), targets)
    mask = torch.arange(t) < lengths[:, None]
    mask[2] = False
    mask[0, 3] = mask[4, 0] = False
    sets, keep = sets_around(targets, vocab, g) if kept else (None, None)
    with torch.no_grad():
        _, logps, _ = oracle.log_probs(logits.double(), targets, oracle.Transform(**transform), keep=keep)
    logps = logps.view(b, t)
    table = torch.tensor(LOG_RATIOS, dtype=torch.float64)
    steps = (
        table[(6 * torch.arange(b * t).view(b, t) + 2) % len(LOG_RATIOS)]
        + torch.tensor(SEQUENCE_SHIFT, dtype=torch.float64)[:, None]
    )
    fields: dict[str, Any] = {
        "targets": targets,
        "advantages": torch.tensor(ADVANTAGES),
        "mask": mask,
        "old_logps": (logps - steps).float(),
        "ref_logps": (logps + 0.7 * torch.randn(b, t, generator=g)).float(),
        "weights": 0.3 + torch.rand(b, t, generator=g),
        "sampler_logps": (logps - steps + 0.4 * torch.randn(b, t, generator=g)).clamp(max=-0.01).float(),
    }
    if sets is not None:
        fields["kept"] = sets
    return Case(logits, fields, transform, keep)


def inside_lengths() -> Tensor:
    """bool [B, T]: True where a token is not padding."""
    return torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def pack(case: Case) -> Case:
    """The same tokens without padding: [B, T] -> [N] with cu_seqlens."""
    inside = inside_lengths()
    fields = {k: v if k in ("advantages", "kept") else v[inside] for k, v in case.fields.items()}
    if "kept" in fields:
        fields["kept"] = fields["kept"][inside.reshape(-1)]
    fields["cu_seqlens"] = torch.tensor((0, *LENGTHS)).cumsum(0).to(torch.int32)
    return Case(case.logits[inside], fields, case.transform, None if case.keep is None else case.keep[inside])


def run(case: Case, objective: Objective, backend: str, **options: Any) -> tuple[LossOutput, Tensor]:
    """Loss and gradient of the logits."""
    leaf = case.logits.detach().clone().requires_grad_()
    out = grpo_loss(leaf, case.batch(), objective, transform=case.logit_transform(), backend=backend, **options)
    out.loss.backward()
    assert leaf.grad is not None
    return out, leaf.grad


def assert_no_worse(ours: Tensor, naive: Tensor, exact: Tensor, what: str, tiny: float = 4e-6) -> None:
    """Our largest and our rms error are at most those of the naive computation, plus `tiny` times the largest value. A single value
    is a mean of terms of about 1 that may cancel, so there it is `tiny` at least."""
    assert ours.shape == exact.shape, f"{what}: shape {list(ours.shape)}, expected {list(exact.shape)}"
    assert torch.isfinite(ours).all(), f"{what}: not finite"
    if exact.numel() == 0:
        return
    ours, naive, exact = ours.detach(), naive.detach(), exact.detach()
    scale = float(exact.abs().max())
    assert scale > 0, f"{what}: the case is trivial"
    mine, theirs = (ours.double() - exact.double()).abs(), (naive.double() - exact.double()).abs()
    for kind, a, b in (
        ("largest", mine.max(), theirs.max()),
        ("rms", mine.square().mean().sqrt(), theirs.square().mean().sqrt()),
    ):
        assert float(a) <= float(b) + tiny * (max(scale, 1.0) if exact.numel() == 1 else scale), (
            f"{what}: {kind} error {float(a):.3e}, naive {float(b):.3e}, scale {scale:.3e}"
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits (NaN equals itself; -0 does not equal 0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def snapshot(**tensors: Tensor | None) -> Callable[[], None]:
    """Remember tensors; calling the result asserts that their bits have not changed."""
    before = {k: v.detach().clone() for k, v in tensors.items() if isinstance(v, torch.Tensor)}

    def check() -> None:
        for name, old in before.items():
            new = tensors[name]
            assert new is not None and same_bits(old, new.detach()), f"{name} was modified"

    return check


def filtered(spec: Spec) -> bool:
    return not (spec.trust is spec.entropy_floor is spec.entropy_share is spec.off_policy is None)
