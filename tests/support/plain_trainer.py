"""A step of the reference trainer once more: plain float64, a completion at a time, without padding, cache or kernel. Imports
nothing of the package.

What a run does is seen from outside: its reward functions are told the sampled ids, and each optimizer step shows parameters
and gradients. From these, `Plain` computes the gradients and metrics that should have come."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from support import advantage_oracle, oracle
from support.oracle import Spec

Tensor = torch.Tensor

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
        def reward(prompts: list[str], completions: list[str], *, completion_ids: Any, **columns: Any) -> Any:
            found = function(prompts, completions, completion_ids=completion_ids, **columns)
            self.calls.append(Call(prompts, completions, completion_ids, found))
            return found

        reward.__name__ = function.__name__
        return reward

    def note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        named = [*self.model.named_parameters()]
        gradients = {name: p.grad.clone() for name, p in named}
        self.updates.append(Update({n: p.detach().clone() for n, p in named}, gradients, optimizer.param_groups[0]["lr"]))

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
    kept = sorted((i for i, s in enumerate(shares) if s >= c.min_p), key=lambda i: -shares[i])[: c.top_k or None]
    total, before, count = sum(shares[i] for i in kept), 0.0, 0
    while count < len(kept) and before < c.top_p * total:
        before += shares[kept[count]]
        count += 1
    return kept[:count]


@dataclass
class Plain:
    """The steps of a configuration `c` from a model on. Of the fields, `spec` is the objective; `advantages` makes them from the
    rewards [K][B]: numbers, or a list for each completion; `weigh` gives the weights of a completion's tokens from
    (log-prob of the policy - of the sampler, whether it ended), None where it is not trained on."""

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

    def logits(self, model: Any) -> list[Tensor]:
        """[T, V] of each completion, over the temperature."""
        pairs = zip(self.prompts, self.ids, strict=True)
        return [model(input_ids=torch.tensor([p + ids])).logits[0, len(p) - 1 : -1] / self.c.temperature for p, ids in pairs]

    def greedy(self, prompt: list[int], ends: Sequence[int]) -> list[int]:
        ids: list[int] = []
        while len(ids) < self.c.max_new_tokens and not (ids and ids[-1] in ends):
            ids.append(int(self.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1].argmax()))
        return ids

    def load(self, parameters: dict[str, Tensor]) -> None:
        self.model.load_state_dict({name: p.double() for name, p in parameters.items()}, strict=False)

    @property
    def groups(self) -> list[int]:
        return [i // self.c.group_size for i in range(len(self.ids))]

    def sample(self, parameters: dict[str, Tensor], call: Call) -> None:
        """What was sampled, and by what: sets, log-probs of the sampler and of the policy."""
        self.load(parameters)
        self.prompts, self.ids = [self.tok(text)["input_ids"] for text in call.prompts], call.ids
        logits = [z.detach() for z in self.logits(self.model)]
        self.masks = [torch.ones_like(z, dtype=torch.bool) for z in logits]
        for z, mask in zip(logits, self.masks, strict=True):
            for row, at in zip(z * self.c.temperature, mask, strict=True):
                at[:] = False
                at[kept_ids(row, self.c)] = True
        self.sampler = self.of_tokens(logits)
        assert all((x > -1e3).all() for x in self.sampler), "a token that sampling leaves out"
        if self.c.replay is False:
            self.masks = [torch.ones_like(mask) for mask in self.masks]
        self.old = self.of_tokens(logits)
        self.squares = [x.exp().square().sum(-1) for x in self.over_sets(logits)]

    def over_sets(self, logits: list[Tensor]) -> list[Tensor]:
        return [z.masked_fill(~m, -1e4).log_softmax(-1) for z, m in zip(logits, self.masks, strict=True)]

    def of_tokens(self, logits: list[Tensor]) -> list[Tensor]:
        return [x[range(len(ids)), ids] for x, ids in zip(self.over_sets(logits), self.ids, strict=True)]

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
        values = self.of_groups(rewards) if self.advantages is None else self.advantages(self, rewards)
        pairs = zip(values, self.ids, strict=True)
        advantages = torch.tensor(
            [x for v, ids in pairs for x in (v if isinstance(v, (list, tuple)) else [v] * len(ids))]
        ).double()
        gaps = [old - sampler for old, sampler in zip(self.old, self.sampler, strict=True)]
        weights = torch.ones_like(advantages)
        if self.weigh is not None:
            weights = torch.cat([self.weigh(gap, ids[-1] in ends) for gap, ids in zip(gaps, self.ids, strict=True)])
        old = torch.cat(self.sampler if self.c.ratio_to == "sampler" else self.old)
        found = [self.update(update.parameters, advantages, old, weights) for update in updates]
        return found

    def of_groups(self, rewards: list[list[float]], **options: Any) -> list[float]:
        weights = self.c.reward_weights or [1.0] * len(rewards)
        totals = [math.fsum(w * r for w, r in zip(weights, row, strict=True)) for row in zip(*rewards, strict=True)]
        return advantage_oracle.group_advantages(totals, self.groups, **options)

    def update(
        self, parameters: dict[str, Tensor], advantages: Tensor, old: Tensor, weights: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        self.load(parameters)
        at = self.logits(self.model)
        with torch.no_grad():
            other = self.over_sets(self.logits(self.reference))
        own = self.over_sets(at)
        logps, ref = (torch.cat([x[range(len(i)), i] for x, i in zip(each, self.ids, strict=True)]) for each in (own, other))
        wide = own if self.c.entropy_over == "kept" else [z.log_softmax(-1) for z in at]
        entropy = -torch.cat([(x.exp() * x).sum(-1) for x in wide])
        ends = torch.tensor([len(ids) for ids in self.ids]).cumsum(0).tolist()
        sequences = [[*range(end - len(ids), end)] for end, ids in zip(ends, self.ids, strict=True)]
        kind = "reverse" if self.c.preset == "distillation" else KINDS.get(self.c.kl or "")
        spec = replace(self.spec, beta=0.0) if kind else self.spec
        mask = ~weights.isnan()
        some = (advantages[mask] != 0) | (not self.c.drop_zero_variance)  # of which the metrics tell
        result = oracle.objective(
            spec, logps, entropy, sequences, advantages=advantages, old_logps=old, ref_logps=ref, mask=mask,
            weights=weights.nan_to_num(1.0),
        )  # fmt: skip
        loss, kl = result.loss, result.kl[mask]
        if kind:
            terms = [oracle.divergence(p, q, kind, 0.5) for p, q in zip(own, other, strict=True)]
            loss = loss + self.spec.beta * oracle.combine(spec, spec.aggregate, terms, None, None, logps[:0].sum())
            kl = torch.cat(terms).detach()
        gradients = torch.autograd.grad(loss, [*self.model.parameters()])
        ratio = result.log_ratio.exp()[some]
        told = {
            "loss": loss.detach(), "kl": kl[some].mean(), "entropy": result.entropy[mask][some].mean(), "ratio_mean": ratio.mean(),
            "ratio_min": ratio.min(), "ratio_max": ratio.max(), "clip_low": result.clipped_low[some].double().mean(),
            "clip_high": result.clipped_high[some].double().mean(), "tokens": some.sum(),
            "grad_norm": torch.stack([g.norm() for g in gradients]).norm(),
        }  # fmt: skip
        names = [name for name, _ in self.model.named_parameters()]
        return dict(zip(names, gradients, strict=True)), {name: float(x) for name, x in told.items()}
