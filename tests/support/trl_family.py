"""The losses that TRL and Liger name alike: one case, our objective of it, and its value and gradients in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from grpo_kernels import LogitTransform, Objective, TokenBatch
from grpo_kernels.formulas.filters import EntropyQuantile, OffPolicySequences
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.formulas.surrogates import Cispo, Clip, Sapo, Vespo
from support import oracle

Tensor = torch.Tensor

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
TEMPERATURE = 0.9
#: loss type -> how the terms of tokens become one number; the others take a mean over tokens.
SUMMED = {"grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "luspo": "seq-mean-token-sum", "dr_grpo": "constant"}


@dataclass(frozen=True)
class Case:
    """A configuration, with numbers that are no defaults."""

    loss_type: str = "dapo"
    level: str = "token"
    beta: float = 0.0
    corrected: bool = False  # the KL is multiplied by the ratio
    delta: float | None = None
    epsilons: tuple[float, float] = (0.2, 0.27)
    cap: float = 1.25
    sapo: tuple[float, float] = (0.9, 1.3)
    vespo: tuple[float, float, float, float] = (1.8, 2.6, 2.7, 2.1)
    share: float = 1.0
    off_policy: float | None = None
    coef: float = 0.0
    budget: int = 12


@dataclass(frozen=True, eq=False)
class Data:
    """Hidden states [B, T, H] and head, which give the log-probs, and what a trainer has beside them."""

    hidden: Tensor
    head: Tensor
    ids: Tensor
    mask: Tensor
    old: Tensor | None
    ref: Tensor
    advantages: Tensor
    bias: Tensor | None = None
    sampler: Tensor | None = None
    weights: Tensor | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.head, self.bias) if x is not None]

    def logits(self, hidden: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(hidden, head, bias)


@dataclass(frozen=True, eq=False)
class Result:
    loss: Tensor
    gradients: list[Tensor]  # of the parameters
    metrics: dict[str, float]


def objective_of(case: Case, numerics: str) -> Objective:
    kinds = {"cispo": Cispo(case.cap), "sapo": Sapo(*case.sapo), "vespo": Vespo(*case.vespo)}
    filters = (EntropyQuantile(case.share),) if case.share < 1 else ()
    if case.off_policy is not None:
        filters += (OffPolicySequences(case.off_policy),)
    return Objective.preset(
        case.loss_type, numerics=numerics, beta=case.beta, filters=filters, entropy_coef=case.coef,
        surrogate=kinds.get(case.loss_type) or Clip(*case.epsilons, case.delta or torch.inf),
        kl=Kl("k3", weighting="ratio" if case.corrected else "none"), max_tokens=case.budget,
        **{} if case.loss_type == "vespo" else {"level": case.level},
    )  # fmt: skip


def batch_of(case: Case, data: Data) -> TokenBatch:
    return TokenBatch(
        data.ids, data.advantages, mask=data.mask, old_logps=data.old, ref_logps=data.ref if case.beta else None,
        sampler_logps=data.sampler, weights=data.weights,
    )  # fmt: skip


def run(data: Data, loss: Any, upstream: float = 1.0) -> Result:
    """`loss(parameters)` gives (loss, metrics)."""
    leaves = [x.clone().requires_grad_() for x in data.parameters]
    value, metrics = loss(leaves)
    return Result(value.detach(), list(torch.autograd.grad(upstream * value, leaves)), metrics)


def ours(
    case: Case, data: Data, loss: Any, objective: Objective, normalizer: Any = None, temperature: float = TEMPERATURE
) -> Result:
    """By `grpo_loss` or `linear_grpo_loss`."""

    def of(leaves: list[Tensor]) -> Any:
        options = {"transform": LogitTransform(temperature), "normalizer": normalizer}
        linear = loss.__name__ == "linear_grpo_loss"
        if linear and data.bias is not None:
            options["bias"] = leaves[2]
        out = loss(*(leaves[:2] if linear else [data.logits(*leaves)]), batch_of(case, data), objective, **options)
        return out.loss, {name: float(x) for name, x in out.metrics.items()}

    return run(data, of)


def exact(case: Case, data: Data, normalizer: Any = None, temperature: float = TEMPERATURE) -> Result:
    spec = oracle.Spec(
        case.loss_type if case.loss_type in ("cispo", "sapo", "vespo") else "clip", *case.epsilons, case.delta, case.cap,
        level="sequence-sum" if case.loss_type == "vespo" else case.level, aggregate=SUMMED.get(case.loss_type, "token-mean"),
        beta=case.beta, entropy_coef=case.coef, max_tokens=case.budget, tau=case.sapo, vespo=case.vespo,
        kl_weighting="ratio" if case.corrected else "none", entropy_aggregate="token-mean", off_policy=case.off_policy,
        entropy_share=case.share if case.share < 1 else None,
    )  # fmt: skip
    leaves = [x.double().requires_grad_() for x in data.parameters]
    logits = data.logits(*leaves)
    found, slopes = oracle.loss(
        spec, logits.detach(), data.ids, mask=data.mask, transform=oracle.Transform(temperature=temperature),
        advantages=data.advantages, old_logps=data.old, ref_logps=data.ref if case.beta else None, weights=data.weights,
        sampler_logps=data.sampler, normalizer=normalizer,
    )  # fmt: skip
    tokens = max(int(data.mask.sum()), 1)
    metrics = {
        "kl": float(found.kl.sum()) / tokens, "entropy": float(found.entropy.sum()) / tokens,
        "clip_low": float(found.clipped_low.sum()) / tokens, "clip_high": float(found.clipped_high.sum()) / tokens,
    }  # fmt: skip
    return Result(found.loss, list(torch.autograd.grad(logits, leaves, slopes)), metrics)


def assert_same(got: Result, want: Result, what: object, tolerance: float = 2e-5) -> None:
    """Rounding errors of a loss are relative to its terms, which are of the size of its gradients."""
    sizes = [float(x.abs().max()) for x in want.gradients]
    assert abs(float(got.loss) - float(want.loss)) <= tolerance * max(abs(float(want.loss)), *sizes), (
        f"{what}: {got.loss}, {want.loss}"
    )
    for a, b, size in zip(got.gradients, want.gradients, sizes, strict=True):
        error = float((a.double() - b.double()).abs().max())
        assert error <= tolerance * size, f"{what}: a gradient {list(b.shape)} is off by {error} of {size}"


def different(a: Result, b: Result, share: float = 0.01) -> bool:
    return float((a.gradients[0].double() - b.gradients[0].double()).abs().max()) > share * float(b.gradients[0].abs().max())


def without_tokens(data: Data) -> Data:
    return replace(data, mask=torch.zeros_like(data.mask))
