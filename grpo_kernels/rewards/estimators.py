"""Estimators of advantages by name, for `TokenBatch.from_rewards` and the reference trainer.

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
    """The data from which advantages of B completions are estimated.

    "Per token" means [B, T], or packed [N] with cu_seqlens. Estimators need different fields; the
    others may be None.

    rewards              [B]: the reward of each completion, of several reward functions the sum
    group_size, groups   which completions share a prompt, as in `group_advantages`
    columns              [B, K]: the rewards of K functions
    reward_weights       [K]: the weights of the functions
    lengths              [B]: trained tokens of each completion. None: they are counted in the mask.
    greedy_rewards       [B]: the reward of the greedy completion of the same prompt
    mask, cu_seqlens     trained tokens and sequences, as in a TokenBatch
    steps                per token: the reward of the reasoning step that ends at this token, NaN if
                         no step ends here
    values               per token: a critic's value before the token
    old_logps            per token: log-prob under the policy that sampled
    sum_squares          per token: sum of the squared probabilities of that policy
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
    def group_arguments(self) -> dict[str, Any]:
        """Return {"group_size", "groups"} as keyword arguments."""
        return {"group_size": self.group_size, "groups": self.groups}

    @property
    def token_arguments(self) -> dict[str, Any]:
        """Return {"mask", "cu_seqlens"} as keyword arguments."""
        return {"mask": self.mask, "cu_seqlens": self.cu_seqlens}


@dataclass(frozen=True)
class Estimator:
    """A named estimator of advantages, called with an `Evidence`.

    name        its name in `ADVANTAGES`
    function    called with the evidence and the options, returns the advantages
    passes_to   functions whose keyword arguments are options of this estimator too
    options     options that differ from the defaults of the functions; a call may override them
    needs       fields of the evidence that must not be None
    per_token   whether the result has an advantage for each token instead of each completion
    """

    name: str
    function: Callable[..., Tensor]
    passes_to: tuple[Callable[..., Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ("rewards",)
    per_token: bool = False

    @property
    def option_names(self) -> set[str]:
        """Return the names of all options: keyword arguments that are not fields of Evidence."""
        keywords = set[str]()
        for function in (self.function, *self.passes_to):
            for parameter in inspect.signature(function).parameters.values():
                if parameter.kind is parameter.KEYWORD_ONLY:
                    keywords.add(parameter.name)
        return keywords - {f.name for f in fields(Evidence)}

    def __call__(self, evidence: Evidence, **options: Any) -> Tensor:
        """Return the advantages, fp32 [B], or per token.

        evidence   the data of B completions
        options    options of the estimator, in place of those in `self.options`

        Raises ValueError if the evidence lacks a field, TypeError for an unknown option.
        """
        remedy = f"the advantages {self.name!r} are estimated from it."
        for name in self.needs:
            require(getattr(evidence, name) is not None, name, None, remedy)
        refuse_unknown(f"the advantages {self.name!r}", options, sorted(self.option_names))
        return self.function(evidence, **{**self.options, **options})


# ---- estimators that combine several functions


def _group(evidence: Evidence, **options: Any) -> Tensor:
    """Return `group_advantages`, of rewards [B] or of the rewards [B, K] of K functions.

    evidence   the rewards of B completions, and which of them share a prompt
    options    keyword arguments of `group_advantages`
    """
    rewards = evidence.rewards
    if isinstance(rewards, Tensor) and rewards.dim() == 2:
        options["reward_weights"] = evidence.reward_weights
    if options.get("baseline") == "length":
        options["lengths"] = evidence.lengths
        if evidence.lengths is None and evidence.mask is not None:
            # The number of trained tokens of each completion.
            options["lengths"] = evidence.mask.reshape(len(rewards), -1).sum(1)
    return group_advantages(rewards, **evidence.group_arguments, **options)


def _gdpo(evidence: Evidence, **options: Any) -> Tensor:
    """Return advantages that normalise each reward function alone (GDPO, arXiv 2601.05242).

    evidence   the rewards [B, K] of K functions, and their weights
    options    keyword arguments of `group_advantages`
    """
    assert evidence.columns is not None
    return group_advantages(
        evidence.columns,
        reward_weights=evidence.reward_weights,
        **evidence.group_arguments,
        **options,
    )


def _gpg(evidence: Evidence, **options: Any) -> Tensor:
    """Return centred rewards times the factor of `gpg_scale` (GPG, arXiv 2504.02546).

    evidence   the rewards of B completions, and which of them share a prompt
    options    keyword arguments of `group_advantages`
    """
    scale = gpg_scale(evidence.rewards, **evidence.group_arguments)
    return scale * group_advantages(evidence.rewards, **evidence.group_arguments, **options)


def _reinforce_pp(
    evidence: Evidence, *, baseline: str = "none", gamma: float = 1.0, **whitening: Any
) -> Tensor:
    """Return whitened returns of tokens (REINFORCE++, arXiv 2501.03262).

    The reward of a completion, minus the baseline of its group, is the reward of its last token.

    evidence    the rewards of B completions, and the mask of their tokens
    baseline    see `group_advantages`
    gamma       discount of `discounted_returns`
    whitening   keyword arguments of `whiten`
    """
    centred = group_advantages(
        evidence.rewards, **evidence.group_arguments, baseline=baseline, scale="none"
    )
    token_rewards = at_last_token(centred, **evidence.token_arguments)
    returns = discounted_returns(token_rewards, gamma=gamma, **evidence.token_arguments)
    return whiten(returns, evidence.mask, **whitening)


def _gae(
    evidence: Evidence, *, gamma: float = 1.0, lam: float | Tensor = 0.95, **whitening: Any
) -> Tensor:
    """Return whitened advantages of `gae` from rewards of completions and a critic's values.

    evidence     the rewards of B completions, the critic's values, and the mask of their tokens
    gamma, lam   see `gae`
    whitening    keyword arguments of `whiten`
    """
    values = evidence.values
    assert values is not None
    token_rewards = at_last_token(evidence.rewards, **evidence.token_arguments)
    advantages, _ = gae(token_rewards, values, gamma=gamma, lam=lam, **evidence.token_arguments)
    return whiten(advantages, evidence.mask, **whitening)


def _process(evidence: Evidence, **options: Any) -> Tensor:
    """Return `process_advantages` of the rewards of reasoning steps.

    evidence   the rewards of reasoning steps, per token
    options    keyword arguments of `process_advantages` and `group_advantages`
    """
    assert evidence.steps is not None
    return process_advantages(
        evidence.steps, **evidence.group_arguments, cu_seqlens=evidence.cu_seqlens, **options
    )


def _optimal_token(evidence: Evidence) -> Tensor:
    """Return `optimal_token_advantages` of the rewards of completions.

    evidence   the rewards, and of each token its log-prob and the sum of squared probabilities
    """
    assert evidence.old_logps is not None and evidence.sum_squares is not None
    return optimal_token_advantages(
        at_last_token(evidence.rewards, **evidence.token_arguments),
        evidence.old_logps,
        evidence.sum_squares,
        **evidence.group_arguments,
        **evidence.token_arguments,
    )


def _pass_at_k(evidence: Evidence, **options: Any) -> Tensor:
    """Return `pass_at_k_advantages` of the rewards of completions.

    evidence   the rewards of B completions, and which of them share a prompt
    options    keyword arguments of `pass_at_k_advantages`
    """
    return pass_at_k_advantages(evidence.rewards, **evidence.group_arguments, **options)


def _remax(evidence: Evidence) -> Tensor:
    """Return `greedy_baseline_advantages`: rewards minus those of greedy completions.

    evidence   the rewards of B completions, and of the greedy completion of each prompt
    """
    assert evidence.greedy_rewards is not None
    return greedy_baseline_advantages(evidence.rewards, evidence.greedy_rewards)


_GROUP_OPTIONS = (group_advantages,)
_WHITENED: dict[str, Any] = {"passes_to": (whiten,), "per_token": True}
#: All estimators by the names of their papers. Their options are arguments of the functions: Dr.
#: GRPO is "group" with scale="none".
ADVANTAGES: dict[str, Estimator] = {
    entry.name: entry
    for entry in (
        Estimator("group", _group, passes_to=_GROUP_OPTIONS),
        Estimator("rloo", _group, _GROUP_OPTIONS, {"baseline": "leave-one-out", "scale": "none"}),
        Estimator("opo", _group, _GROUP_OPTIONS, {"baseline": "length", "scale": "none"}),
        Estimator("maxrl", _group, _GROUP_OPTIONS, {"scale": "mean", "eps": 0.0}),
        Estimator(
            "gdpo", _gdpo, _GROUP_OPTIONS, {"combine": "gdpo"}, ("columns", "reward_weights")
        ),
        Estimator("pass_at_k", _pass_at_k, (pass_at_k_advantages,)),
        Estimator("gpg", _gpg, _GROUP_OPTIONS, {"scale": "none"}),
        Estimator("remax", _remax, needs=("rewards", "greedy_rewards")),
        Estimator("reinforce_pp", _reinforce_pp, needs=("rewards", "mask"), **_WHITENED),
        Estimator("gae", _gae, needs=("rewards", "values", "mask"), **_WHITENED),
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
    """Return table[name].

    table      a dictionary whose keys are the valid names
    argument   the argument that has this name as its value, for the error

    Raises ValueError, which names the argument and lists the choices, for an unknown name.
    """
    require_one_of(argument, name, table)
    return table[name]
