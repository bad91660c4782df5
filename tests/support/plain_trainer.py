"""Compute a step of the reference trainer in plain float64 PyTorch, one completion at a time.

There is no padding, cache or kernel, and nothing of the package is imported.

`Watch` records what a run does: its reward functions get the sampled ids, and its optimizer steps
show parameters and gradients. From these records, `Plain` computes the expected gradients and
metrics.
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
#: {kl of the configuration: the divergence over the whole vocabulary}
KINDS = {"exact": "reverse", "exact-forward": "forward", "exact-jsd": "jsd", "exact-tv": "tv"}


class Call(NamedTuple):
    """The arguments of a call of a reward function, and the rewards that it returned.

    prompts, completions   texts, one for each completion
    ids                    the sampled ids of each completion
    """

    prompts: list[str]
    completions: list[str]
    ids: list[list[int]]
    rewards: list[Any]


class Update(NamedTuple):
    """Parameters and gradients by name, and the learning rate, just before an optimizer step."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    lr: float


class Watch:
    """A context that records calls of reward functions and optimizer steps.

    model   the model whose parameters are recorded; None if no optimizer steps
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls: list[Call] = []
        self.updates: list[Update] = []

    def told(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a reward function that records its calls."""

        def reward(
            prompts: list[str], completions: list[str], *, completion_ids: Any, **columns: Any
        ) -> Any:
            rewards = function(prompts, completions, completion_ids=completion_ids, **columns)
            self.calls.append(Call(prompts, completions, completion_ids, rewards))
            return rewards

        # The trainer reports rewards under the names of their functions.
        reward.__name__ = function.__name__
        return reward

    def _record_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record an update. PyTorch calls this hook before each optimizer step."""
        parameters = {}
        gradients = {}
        for name, parameter in self.model.named_parameters():
            parameters[name] = parameter.detach().clone()
            gradients[name] = parameter.grad.clone()
        self.updates.append(Update(parameters, gradients, optimizer.param_groups[0]["lr"]))

    def __enter__(self) -> Watch:
        self.calls.clear()
        self.updates.clear()
        self.handle = register_optimizer_step_pre_hook(self._record_update)
        return self

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()


def kept_ids(logits: Tensor, c: Any) -> list[int]:
    """Return the candidate set of a row, the ids that sampling may draw, most probable first.

    min-p, top-k and top-p are applied in this order, as in vLLM, in Python floats.

    logits   [V]
    c        the configuration: temperature, min_p, top_k, top_p
    """
    largest = float(logits.max())
    # Proportional to the probabilities, with 1 for the most probable id.
    shares = [math.exp((logit - largest) / c.temperature) for logit in logits.tolist()]
    after_min_p = [i for i, share in enumerate(shares) if share >= c.min_p]
    after_min_p.sort(key=lambda i: -shares[i])
    after_top_k = after_min_p[: c.top_k] if c.top_k else after_min_p

    total = sum(shares[i] for i in after_top_k)
    share_so_far = 0.0
    after_top_p = []
    for i in after_top_k:
        if share_so_far >= c.top_p * total:
            break
        after_top_p.append(i)
        share_so_far += shares[i]
    return after_top_p


@dataclass
class Plain:
    """Steps of the trainer with the configuration `c`.

    tok          the tokenizer
    model        the policy
    teacher      the reference model; None: a copy of the policy
    spec         the objective
    advantages   returns the advantages from this object and the rewards [K][B] of K functions: a
                 number for each completion, or a list with a number for each token. None:
                 `of_groups`
    weigh        returns the weights of a completion's tokens from (log-probs of the policy - of the
                 sampler, whether the completion ended). NaN: the token is not trained. None: all
                 weights are 1
    prompts      ids of the prompt of each completion, set by `sample`
    ids          ids of each completion, set by `sample`
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
        """Return the logits from which the tokens of all completions are drawn, [N, V]."""
        rows = []
        for prompt, ids in zip(self.prompts, self.ids, strict=True):
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0]
            rows.append(logits[len(prompt) - 1 : -1])
        return torch.cat(rows)

    def over(self, keep: Tensor | None, logits: Tensor) -> oracle.Rows:
        """Return the softmaxes of logits [N, V] over the ids where `keep` [N, V] is True."""
        ids = torch.cat([torch.tensor(row) for row in self.ids])
        transform = {"softcap": None, "scale": 1.0, "temperature": self.c.temperature}
        return oracle.Rows(logits, ids, transform, self.sequences, keep=keep)

    def greedy(self, prompt: list[int], ends: Sequence[int]) -> list[int]:
        """Return the greedy completion of a prompt, up to the first of the end tokens `ends`."""
        ids: list[int] = []
        while len(ids) < self.c.max_new_tokens and not (ids and ids[-1] in ends):
            logits = self.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
        return ids

    def load(self, parameters: dict[str, Tensor]) -> None:
        """Copy parameters into the policy. Tied weights may have only one name."""
        wide = {name: parameter.double() for name, parameter in parameters.items()}
        self.model.load_state_dict(wide, strict=False)

    @property
    def groups(self) -> list[int]:
        """The group of each completion."""
        return [i // self.c.group_size for i in range(len(self.ids))]

    def sample(self, parameters: dict[str, Tensor], call: Call) -> None:
        """Set what sampling knows: ids, candidate sets, log-probs of the sampler and the policy.

        parameters   of the policy that sampled
        call         of a reward function, for all completions
        """
        self.load(parameters)
        self.prompts = [self.tok(text)["input_ids"] for text in call.prompts]
        self.ids = call.ids
        #: For each completion the indices of its rows.
        self.sequences: list[list[int]] = []
        num_rows = 0
        for ids in self.ids:
            self.sequences.append([*range(num_rows, num_rows + len(ids))])
            num_rows += len(ids)

        logits = self.logits(self.model).detach()
        self.keep = torch.zeros_like(logits, dtype=torch.bool)
        for row_logits, row_keep in zip(logits, self.keep, strict=True):
            row_keep[kept_ids(row_logits, self.c)] = True
        self.sampler = self.over(self.keep, logits).chosen
        assert self.sampler.isfinite().all(), "a token that sampling leaves out"
        if self.c.replay is False:
            # The policy then has the softmax over the whole vocabulary.
            self.keep.fill_(True)
        policy = self.over(self.keep, logits)
        self.old = policy.chosen
        self.squares = policy.sum_squares

    def step(
        self, calls: list[Call], updates: list[Update], ends: Sequence[int]
    ) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
        """Return the expected (gradients, metrics) of each update of a step.

        calls     of the reward functions, in the order of the functions
        updates   what the optimizer got
        ends      ids that end a completion
        """
        # Reward functions are also called for fewer completions, such as those of an evaluation.
        num_completions = self.c.prompts_per_step * self.c.group_size
        training_calls = [call for call in calls if len(call.ids) == num_completions]
        self.sample(updates[0].parameters, training_calls[0])
        for ids in self.ids:
            assert ids[-1] in ends or len(ids) == self.c.max_new_tokens
            assert not any(i in ends for i in ids[:-1])

        rewards = [call.rewards for call in training_calls]
        if self.advantages is None:
            values: Sequence[Any] = self.of_groups(rewards)
        else:
            values = self.advantages(self, rewards)
        token_advantages: list[float] = []
        for value, ids in zip(values, self.ids, strict=True):
            is_per_token = isinstance(value, (list, tuple))
            token_advantages += value if is_per_token else [value] * len(ids)
        advantages = torch.tensor(token_advantages).double()

        weights = torch.ones_like(advantages)
        if self.weigh is not None:
            log_ratios = self.old - self.sampler
            weights_of_completions = [
                self.weigh(log_ratios[rows], ids[-1] in ends)
                for rows, ids in zip(self.sequences, self.ids, strict=True)
            ]
            weights = torch.cat(weights_of_completions)
        old = self.sampler if self.c.ratio_to == "sampler" else self.old
        return [self.update(update.parameters, advantages, old, weights) for update in updates]

    def of_groups(self, rewards: list[list[float]], **options: Any) -> list[float]:
        """Return the group advantages of the weighted sums of rewards [K][B].

        options   of `advantage_oracle.group_advantages`
        """
        weights = self.c.reward_weights or [1.0] * len(rewards)
        totals = [
            math.fsum(w * r for w, r in zip(weights, row, strict=True))
            for row in zip(*rewards, strict=True)
        ]
        return advantage_oracle.group_advantages(totals, self.groups, **options)

    def update(
        self, parameters: dict[str, Tensor], advantages: Tensor, old: Tensor, weights: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return (gradients by name, metrics) of one update.

        parameters   of the policy before the update
        advantages   [N], N tokens
        old          [N]: log-probs that ratios refer to
        weights      [N], NaN for tokens that are not trained
        """
        self.load(parameters)
        logits = self.logits(self.model)
        policy = self.over(self.keep, logits)
        with torch.no_grad():
            reference = self.over(self.keep, self.logits(self.reference))
        kind = "reverse" if self.c.preset == "distillation" else KINDS.get(self.c.kl or "")
        divergences = None
        if kind:
            divergences = oracle.divergence(policy.log_p, reference.log_p, kind, 0.5)
        mask = ~weights.isnan()
        result = oracle.objective(
            self.spec,
            policy.chosen,
            policy.entropy,
            self.sequences,
            advantages=advantages,
            old_logps=old,
            ref_logps=reference.chosen,
            mask=mask,
            weights=weights.nan_to_num(1.0),
            divergences=divergences,
        )
        gradients = torch.autograd.grad(result.loss, [*self.model.parameters()])
        names = [name for name, _ in self.model.named_parameters()]

        # Of the trained tokens. Log-ratios and clip counts have only these.
        if self.c.drop_zero_variance:
            is_counted = advantages[mask] != 0
        else:
            is_counted = torch.ones_like(advantages[mask], dtype=torch.bool)
        ratio = result.log_ratio.exp()[is_counted]
        metrics = {
            "loss": result.loss.detach(),
            "kl": result.kl[mask][is_counted].mean(),
            "entropy": result.entropy[mask][is_counted].mean(),
            "ratio_mean": ratio.mean(),
            "ratio_min": ratio.min(),
            "ratio_max": ratio.max(),
            "clip_low": result.clipped_low[is_counted].double().mean(),
            "clip_high": result.clipped_high[is_counted].double().mean(),
            "tokens": is_counted.sum(),
            "grad_norm": torch.stack([gradient.norm() for gradient in gradients]).norm(),
        }
        numbers = {name: float(value) for name, value in metrics.items()}
        return dict(zip(names, gradients, strict=True)), numbers
