"""Estimators of advantages by name. `TokenBatch.from_rewards` and the options of the reference
trainer read this table.

advantages = ADVANTAGES["rloo"](Evidence(rewards, group_size=8))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from torch import Tensor

from ..checks import refuse_unknown, require, require_one_of
from .advantages import (
    gpg_scale,
    greedy_baseline_advantages,
    group_advantages,
    pass_at_k_advantages,
)
from .returns import (
    at_last_token,
    discounted_returns,
    gae,
    optimal_token_advantages,
    process_advantages,
    whiten,
)


@dataclass(frozen=True, eq=False)
class Evidence:
    """The data from which advantages of B completions are estimated. Per token means [B, T], or [N]
    with cu_seqlens.

    rewards      numbers [B]: the reward of each completion; with several reward functions, their
                 sum.
    group_size, groups   which completions answer one prompt, as in `group_advantages`.
    columns, reward_weights   [B, K] rewards of K functions, and their weights.
    lengths      [B]: trained tokens; None: counted in the mask.
    greedy_rewards   [B]: of the greedy completion of the same prompt.
    mask, cu_seqlens   trained tokens, as in a TokenBatch.
    steps        per token: the reward of the step that ends at this token, NaN where none does.
    values       per token: a critic's value before the token.
    old_logps, sum_squares   per token: log-probs under the policy that sampled, and the sum of its
                             squared probabilities.
    """

    rewards: Tensor
    _: KW_ONLY
    group_size: int | None = None
    groups: Tensor | None = None
    columns: Tensor | None = None
    reward_weights: Sequence[float] | Tensor | None = None
    lengths: Tensor | None = None
    greedy_rewards: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    steps: Tensor | None = None
    values: Tensor | None = None
    old_logps: Tensor | None = None
    sum_squares: Tensor | None = None

    @property
    def prompts(self) -> dict[str, Any]:
        return {"group_size": self.group_size, "groups": self.groups}

    @property
    def tokens(self) -> dict[str, Any]:
        return {"mask": self.mask, "cu_seqlens": self.cu_seqlens}


@dataclass(frozen=True)
class Estimator:
    """Computes advantages from an Evidence: calls `function` with it and with `options`, which a
    call may override.

    passes_to   functions whose options it takes too.
    needs       fields that must be given.
    per_token   whether there is an advantage for each token.
    """

    name: str
    function: Callable[..., Tensor]
    passes_to: tuple[Callable[..., Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ("rewards",)
    per_token: bool = False

    @property
    def option_names(self) -> set[str]:
        known = (
            p
            for function in (self.function, *self.passes_to)
            for p in inspect.signature(function).parameters.values()
        )
        return {p.name for p in known if p.kind is p.KEYWORD_ONLY} - {
            f.name for f in fields(Evidence)
        }

    def __call__(self, evidence: Evidence, **options: Any) -> Tensor:
        """fp32 [B], or per token.

        Raises ValueError where evidence is missing, TypeError for an option that it does not have.
        """
        for name in self.needs:
            require(
                getattr(evidence, name) is not None,
                name,
                None,
                f"the advantages {self.name!r} are estimated from it.",
            )
        refuse_unknown(f"the advantages {self.name!r}", options, sorted(self.option_names))
        return self.function(evidence, **{**self.options, **options})


# ---- estimators that combine several functions


def _group(e: Evidence, **options: Any) -> Tensor:
    if (
        isinstance(e.rewards, Tensor) and e.rewards.dim() == 2
    ):  # of several functions, before they are added up
        options["reward_weights"] = e.reward_weights
    if options.get("baseline") == "length":
        options["lengths"] = (
            e.lengths
            if e.lengths is not None or e.mask is None
            else e.mask.reshape(len(e.rewards), -1).sum(1)
        )
    return group_advantages(e.rewards, **e.prompts, **options)


def _gdpo(e: Evidence, **options: Any) -> Tensor:
    """Each reward function normalised by itself (GDPO, arXiv 2601.05242)."""
    return group_advantages(e.columns, reward_weights=e.reward_weights, **e.prompts, **options)  # type: ignore[arg-type]


def _gpg(e: Evidence, **options: Any) -> Tensor:
    """Centred rewards times B / (completions in groups whose rewards differ) (GPG, arXiv
    2504.02546).
    """
    return gpg_scale(e.rewards, **e.prompts) * group_advantages(e.rewards, **e.prompts, **options)


def _reinforce_pp(
    e: Evidence, *, baseline: str = "none", gamma: float = 1.0, **whitening: Any
) -> Tensor:
    """Discounted returns of the completion's reward, minus the baseline of its group if given,
    whitened over all tokens (REINFORCE++, arXiv 2501.03262).
    """
    centred = group_advantages(e.rewards, **e.prompts, baseline=baseline, scale="none")
    return whiten(
        discounted_returns(at_last_token(centred, **e.tokens), gamma=gamma, **e.tokens),
        e.mask,
        **whitening,
    )


def _gae(
    e: Evidence, *, gamma: float = 1.0, lam: float | Tensor = 0.95, **whitening: Any
) -> Tensor:
    """Generalised advantages of the completion's reward and a critic, whitened over all tokens."""
    known: dict[str, Any] = {"values": e.values, "gamma": gamma, "lam": lam, **e.tokens}
    return whiten(gae(at_last_token(e.rewards, **e.tokens), **known)[0], e.mask, **whitening)


def _process(e: Evidence, **options: Any) -> Tensor:
    return process_advantages(e.steps, **e.prompts, cu_seqlens=e.cu_seqlens, **options)  # type: ignore[arg-type]


def _optimal_token(e: Evidence) -> Tensor:
    known: dict[str, Any] = {
        "old_logps": e.old_logps,
        "sum_squares": e.sum_squares,
        **e.prompts,
        **e.tokens,
    }
    return optimal_token_advantages(at_last_token(e.rewards, **e.tokens), **known)


def _pass_at_k(e: Evidence, **options: Any) -> Tensor:
    return pass_at_k_advantages(e.rewards, **e.prompts, **options)


def _remax(e: Evidence) -> Tensor:
    return greedy_baseline_advantages(e.rewards, e.greedy_rewards)  # type: ignore[arg-type]


_OF_GROUP = (group_advantages,)
_OF_TOKENS: dict[str, Any] = {"passes_to": (whiten,), "per_token": True}
#: The names are those of the papers. Options are arguments of the functions: Dr. GRPO is "group"
#: with scale="none".
ADVANTAGES: dict[str, Estimator] = {
    entry.name: entry
    for entry in (
        Estimator("group", _group, _OF_GROUP),
        Estimator("rloo", _group, _OF_GROUP, {"baseline": "leave-one-out", "scale": "none"}),
        Estimator("opo", _group, _OF_GROUP, {"baseline": "length", "scale": "none"}),
        Estimator("maxrl", _group, _OF_GROUP, {"scale": "mean", "eps": 0.0}),
        Estimator("gdpo", _gdpo, _OF_GROUP, {"combine": "gdpo"}, ("columns", "reward_weights")),
        Estimator("pass_at_k", _pass_at_k, (pass_at_k_advantages,)),
        Estimator("gpg", _gpg, _OF_GROUP, {"scale": "none"}),
        Estimator("remax", _remax, needs=("rewards", "greedy_rewards")),
        Estimator("reinforce_pp", _reinforce_pp, needs=("rewards", "mask"), **_OF_TOKENS),
        Estimator("gae", _gae, needs=("rewards", "values", "mask"), **_OF_TOKENS),
        Estimator(
            "process",
            _process,
            (process_advantages, group_advantages),
            needs=("steps",),
            per_token=True,
        ),
        Estimator(
            "optimal_token",
            _optimal_token,
            needs=("rewards", "old_logps", "sum_squares", "mask"),
            per_token=True,
        ),
    )
}


def lookup(table: Mapping[str, Any], name: str, argument: str) -> Any:
    require_one_of(argument, name, table)
    return table[name]
