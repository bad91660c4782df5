"""Estimators of advantages by name. `TokenBatch.from_rewards` and the options of the reference trainer read this table.

advantages = ADVANTAGES["rloo"](Evidence(rewards, group_size=8))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ..checks import refuse_unknown, require, require_one_of
from .advantages import gpg_scale, greedy_baseline_advantages, group_advantages, pass_at_k_advantages
from .returns import at_last_token, discounted_returns, gae, optimal_token_advantages, process_advantages, whiten

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Evidence:
    """The data from which advantages of B completions are estimated. Per token means [B, T], or [N] with cu_seqlens.

    rewards      numbers [B]: the reward of each completion; with several reward functions, their sum.
    group_size, groups   which completions answer one prompt, as in `group_advantages`.
    columns, reward_weights   [B, K] rewards of K functions, and their weights.
    lengths      [B]: trained tokens; None: counted in the mask.
    greedy_rewards   [B]: of the greedy completion of the same prompt.
    mask, cu_seqlens   trained tokens, as in a TokenBatch.
    steps        per token: the reward of the step that ends at this token, NaN where none does.
    values       per token: a critic's value before the token.
    old_logps, sum_squares   per token: log-probs under the policy that sampled, and the sum of its squared probabilities."""

    rewards: Tensor
    group_size: int | None = field(default=None, kw_only=True)
    groups: Tensor | None = field(default=None, kw_only=True)
    columns: Tensor | None = field(default=None, kw_only=True)
    reward_weights: Sequence[float] | Tensor | None = field(default=None, kw_only=True)
    lengths: Tensor | None = field(default=None, kw_only=True)
    greedy_rewards: Tensor | None = field(default=None, kw_only=True)
    mask: Tensor | None = field(default=None, kw_only=True)
    cu_seqlens: Tensor | None = field(default=None, kw_only=True)
    steps: Tensor | None = field(default=None, kw_only=True)
    values: Tensor | None = field(default=None, kw_only=True)
    old_logps: Tensor | None = field(default=None, kw_only=True)
    sum_squares: Tensor | None = field(default=None, kw_only=True)


_FIELDS = frozenset(f.name for f in fields(Evidence))


@dataclass(frozen=True)
class Estimator:
    """Computes advantages from an Evidence: calls `function` with the fields that it takes and with `options`, which a call may
    override.

    needs    fields that must be given: parameters of the function without a default.
    passes_to   functions whose options it takes too."""

    name: str
    function: Callable[..., Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    passes_to: tuple[Callable[..., Any], ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(name for name, p in self._takes.items() if p.default is p.empty)

    @property
    def per_token(self) -> bool:
        return "mask" in self.needs or "steps" in self.needs

    @property
    def option_names(self) -> set[str]:
        known = (p for function in (self.function, *self.passes_to) for p in inspect.signature(function).parameters.values())
        return {p.name for p in known if p.kind is p.KEYWORD_ONLY} - _FIELDS

    def __call__(self, evidence: Evidence, **options: Any) -> Tensor:
        """fp32 [B], or per token. Raises ValueError where evidence is missing, TypeError for an option that it does not have."""
        for name in self.needs:
            require(getattr(evidence, name) is not None, name, None, f"the advantages {self.name!r} are estimated from it.")
        refuse_unknown(f"the advantages {self.name!r}", options, sorted(self.option_names))
        given = {name: getattr(evidence, name) for name in self._takes}
        return self.function(**given, **{**self.options, **options})

    @property
    def _takes(self) -> dict[str, inspect.Parameter]:
        return {name: p for name, p in inspect.signature(self.function).parameters.items() if name in _FIELDS}


# ---- estimators that combine several functions


def _group(
    rewards: Tensor,
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    reward_weights: Sequence[float] | Tensor | None = None,
    **options: Any,
) -> Tensor:
    if isinstance(rewards, Tensor) and rewards.dim() == 2:  # of several functions, before they are added up
        options["reward_weights"] = reward_weights
    if options.get("baseline") == "length":
        options["lengths"] = lengths if lengths is not None or mask is None else mask.reshape(len(rewards), -1).sum(1)
    return group_advantages(rewards, group_size=group_size, groups=groups, **options)


def _gdpo(
    columns: Tensor,
    reward_weights: Sequence[float] | Tensor,
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Each reward function normalised by itself (GDPO, arXiv 2601.05242)."""
    return group_advantages(columns, reward_weights=reward_weights, group_size=group_size, groups=groups, **options)


def _gpg(rewards: Tensor, *, group_size: int | None = None, groups: Tensor | None = None, **options: Any) -> Tensor:
    """Centred rewards times B / (completions in groups whose rewards differ) (GPG, arXiv 2504.02546)."""
    which: dict[str, Any] = {"group_size": group_size, "groups": groups}
    return gpg_scale(rewards, **which) * group_advantages(rewards, **which, **options)


def _reinforce_pp(
    rewards: Tensor,
    mask: Tensor,
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    baseline: str = "none",
    gamma: float = 1.0,
    **whitening: Any,
) -> Tensor:
    """Discounted returns of the completion's reward, minus the baseline of its group if given, whitened over all tokens
    (REINFORCE++, arXiv 2501.03262)."""
    centred = group_advantages(rewards, group_size=group_size, groups=groups, baseline=baseline, scale="none")
    per_token = at_last_token(centred, mask=mask, cu_seqlens=cu_seqlens)
    return whiten(discounted_returns(per_token, gamma=gamma, mask=mask, cu_seqlens=cu_seqlens), mask, **whitening)


def _gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    **whitening: Any,
) -> Tensor:
    """Generalised advantages of the completion's reward and a critic, whitened over all tokens."""
    per_token = at_last_token(rewards, mask=mask, cu_seqlens=cu_seqlens)
    return whiten(gae(per_token, values, gamma=gamma, lam=lam, mask=mask, cu_seqlens=cu_seqlens)[0], mask, **whitening)


def _process(
    steps: Tensor,
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    return process_advantages(steps, group_size=group_size, groups=groups, cu_seqlens=cu_seqlens, **options)


def _optimal_token(
    rewards: Tensor,
    old_logps: Tensor,
    sum_squares: Tensor,
    mask: Tensor,
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    which: dict[str, Any] = {"mask": mask, "cu_seqlens": cu_seqlens}
    per_token = at_last_token(rewards, **which)
    return optimal_token_advantages(per_token, old_logps, sum_squares, group_size=group_size, groups=groups, **which)


#: The names are those of the papers. Options are arguments of the functions: Dr. GRPO is "group" with scale="none".
ADVANTAGES: dict[str, Estimator] = {
    entry.name: entry
    for entry in (
        Estimator("group", _group, {}, (group_advantages,)),
        Estimator("rloo", _group, {"baseline": "leave-one-out", "scale": "none"}, (group_advantages,)),
        Estimator("opo", _group, {"baseline": "length", "scale": "none"}, (group_advantages,)),
        Estimator("maxrl", _group, {"scale": "mean", "eps": 0.0}, (group_advantages,)),
        Estimator("gdpo", _gdpo, {"combine": "gdpo"}, (group_advantages,)),
        Estimator("pass_at_k", pass_at_k_advantages),
        Estimator("gpg", _gpg, {"scale": "none"}, (group_advantages,)),
        Estimator("remax", greedy_baseline_advantages),
        Estimator("reinforce_pp", _reinforce_pp, {}, (whiten,)),
        Estimator("gae", _gae, {}, (whiten,)),
        Estimator("process", _process, {}, (process_advantages, group_advantages)),
        Estimator("optimal_token", _optimal_token),
    )
}


def lookup(table: Mapping[str, Any], name: str, argument: str) -> Any:
    require_one_of(argument, name, table)
    return table[name]
