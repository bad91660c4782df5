"""A step of the reference trainer once more: plain float64, a completion at a time, without
padding, cache or kernel. Imports nothing of the package.

What a run does is seen from outside: its reward functions are told the sampled ids, and each
optimizer step shows parameters and gradients. From these, `Plain` computes the gradients and
metrics that should have come.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from support import advantage_oracle, oracle
from support.oracle import Spec

GRPO = Spec(aggregate="seq-mean-token-mean")
KINDS = {"exact": "reverse", "exact-forward": "forward", "exact-jsd": "jsd", "exact-tv": "tv"}


class Call(NamedTuple):
    """Of a reward function."""

    prompts: list[str]
    completions: list[str]
    ids: list[list[int]]
    rewards: list[Any]


class Update(NamedTuple):
    """What an optimizer is given."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    lr: float


class Watch:
    """Writes down, inside a `with`, what reward functions and the optimizer of `model` are given."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls: list[Call] = []
        self.updates: list[Update] = []

    def told(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def reward(
            prompts: list[str], completions: list[str], *, completion_ids: Any, **columns: Any
        ) -> Any:
            found = function(prompts, completions, completion_ids=completion_ids, **columns)
            self.calls.append(Call(prompts, completions, completion_ids, found))
            return found

        reward.__name__ = function.__name__
        return reward

    def note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        named = [*self.model.named_parameters()]
        gradients = {name: p.grad.clone() for name, p in named}
        self.updates.append(
            Update(
                {n: p.detach().clone() for n, p in named},
                gradients,
                optimizer.param_groups[0]["lr"],
            )
        )

    def __enter__(self) -> Watch:
        self.calls.clear()
        self.updates.clear()
        self.handle = register_optimizer_step_pre_hook(self.note)
        return self

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()


def kept_ids(logits: Tensor, c: Any) -> list[int]:
    """What min-p, top-k and top-p, in the order of vLLM, leave of one row, in Python floats."""
    top = float(logits.max())
    shares = [math.exp((z - top) / c.temperature) for z in logits.tolist()]
    kept = sorted((i for i, s in enumerate(shares) if s >= c.min_p), key=lambda i: -shares[i])[
        : c.top_k or None
    ]
    total, before, count = sum(shares[i] for i in kept), 0.0, 0
    while count < len(kept) and before < c.top_p * total:
        before += shares[kept[count]]
        count += 1
    return kept[:count]


@dataclass
class Plain:
    """The steps of a configuration `c` from a model on. Of the fields, `spec` is the objective;
    `advantages` makes them from the rewards [K][B]: numbers, or a list for each completion; `weigh`
    gives the weights of a completion's tokens from (log-prob of the policy - of the sampler,
    whether it ended), None where it is not trained on.
    """

    c: Any
    tok: Any
    model: Any
    teacher: Any = None
    spec: Spec = GRPO
    advantages: Callable[[Plain, list[list[Any]]], Sequence[Any]] | None = None
    weigh: Callable[[Tensor, bool], Tensor] | None = None
    reference: Any = None
    prompts: list[list[int]] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model).double().eval()
        self.reference = copy.deepcopy(self.teacher or self.model).double().eval()

    def logits(self, model: Any) -> Tensor:
        """[N, V] of the tokens of all completions."""
        pairs = zip(self.prompts, self.ids, strict=True)
        return torch.cat(
            [
                model(input_ids=torch.tensor([p + ids])).logits[0, len(p) - 1 : -1]
                for p, ids in pairs
            ]
        )

    def over(self, keep: Tensor | None, logits: Tensor) -> oracle.Rows:
        """Their softmaxes, over the ids of `keep`."""
        ids, transform = (
            torch.cat([*map(torch.tensor, self.ids)]),
            {"softcap": None, "scale": 1.0, "temperature": self.c.temperature},
        )
        return oracle.Rows(logits, ids, transform, self.sequences, keep=keep)

    def greedy(self, prompt: list[int], ends: Sequence[int]) -> list[int]:
        ids: list[int] = []
        while len(ids) < self.c.max_new_tokens and not (ids and ids[-1] in ends):
            ids.append(
                int(self.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1].argmax())
            )
        return ids

    def load(self, parameters: dict[str, Tensor]) -> None:
        self.model.load_state_dict(
            {name: p.double() for name, p in parameters.items()}, strict=False
        )

    @property
    def groups(self) -> list[int]:
        return [i // self.c.group_size for i in range(len(self.ids))]

    def sample(self, parameters: dict[str, Tensor], call: Call) -> None:
        """What was sampled, and by what: sets, log-probs of the sampler and of the policy."""
        self.load(parameters)
        self.prompts, self.ids = [self.tok(text)["input_ids"] for text in call.prompts], call.ids
        ends = torch.tensor([len(ids) for ids in self.ids]).cumsum(0).tolist()
        self.sequences = [
            [*range(end - len(ids), end)] for end, ids in zip(ends, self.ids, strict=True)
        ]
        logits = self.logits(self.model).detach()
        self.keep = torch.zeros_like(logits, dtype=torch.bool)
        for row, at in zip(logits, self.keep, strict=True):
            at[kept_ids(row, self.c)] = True
        self.sampler = self.over(self.keep, logits).chosen
        assert self.sampler.isfinite().all(), "a token that sampling leaves out"
        self.keep |= self.c.replay is False
        own = self.over(self.keep, logits)
        self.old, self.squares = own.chosen, own.sum_squares

    def step(
        self, calls: list[Call], updates: list[Update], ends: Sequence[int]
    ) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
        """Of each update its gradients and metrics."""
        count = self.c.prompts_per_step * self.c.group_size
        drawn = [call for call in calls if len(call.ids) == count]
        self.sample(updates[0].parameters, drawn[0])
        assert all(ids[-1] in ends or len(ids) == self.c.max_new_tokens for ids in self.ids)
        assert not any(i in ends for ids in self.ids for i in ids[:-1])
        rewards = [call.rewards for call in drawn]
        values = (
            self.of_groups(rewards) if self.advantages is None else self.advantages(self, rewards)
        )
        pairs = zip(values, self.ids, strict=True)
        advantages = torch.tensor(
            [x for v, ids in pairs for x in (v if isinstance(v, (list, tuple)) else [v] * len(ids))]
        ).double()
        weights = torch.ones_like(advantages)
        if self.weigh is not None:
            gaps, both = self.old - self.sampler, zip(self.sequences, self.ids, strict=True)
            weights = torch.cat([self.weigh(gaps[at], ids[-1] in ends) for at, ids in both])
        old = self.sampler if self.c.ratio_to == "sampler" else self.old
        return [self.update(update.parameters, advantages, old, weights) for update in updates]

    def of_groups(self, rewards: list[list[float]], **options: Any) -> list[float]:
        weights = self.c.reward_weights or [1.0] * len(rewards)
        totals = [
            math.fsum(w * r for w, r in zip(weights, row, strict=True))
            for row in zip(*rewards, strict=True)
        ]
        return advantage_oracle.group_advantages(totals, self.groups, **options)

    def update(
        self, parameters: dict[str, Tensor], advantages: Tensor, old: Tensor, weights: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        self.load(parameters)
        logits = self.logits(self.model)
        own = self.over(self.keep, logits)
        with torch.no_grad():
            other = self.over(self.keep, self.logits(self.reference))
        kind = "reverse" if self.c.preset == "distillation" else KINDS.get(self.c.kl or "")
        mask = ~weights.isnan()
        some = (advantages[mask] != 0) | (
            not self.c.drop_zero_variance
        )  # of which the metrics tell
        result = oracle.objective(
            self.spec, own.chosen, own.entropy, self.sequences, advantages=advantages, old_logps=old, ref_logps=other.chosen, mask=mask,
            weights=weights.nan_to_num(1.0), divergences=oracle.divergence(own.log_p, other.log_p, kind, 0.5) if kind else None,
        )  # fmt: skip
        gradients = torch.autograd.grad(result.loss, [*self.model.parameters()])
        ratio = result.log_ratio.exp()[some]
        told = {
            "loss": result.loss.detach(), "kl": result.kl[mask][some].mean(), "entropy": result.entropy[mask][some].mean(), "ratio_mean": ratio.mean(),
            "ratio_min": ratio.min(), "ratio_max": ratio.max(), "clip_low": result.clipped_low[some].double().mean(),
            "clip_high": result.clipped_high[some].double().mean(), "tokens": some.sum(),
            "grad_norm": torch.stack([g.norm() for g in gradients]).norm(),
        }  # fmt: skip
        names = [name for name, _ in self.model.named_parameters()]
        return dict(zip(names, gradients, strict=True)), {
            name: float(x) for name, x in told.items()
        }
