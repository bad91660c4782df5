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

    model     the model whose parameters are recorded; None if no optimizer steps
    calls     the calls of reward functions that `recorded` has wrapped
    updates   the optimizer steps
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        """Begin with no records. Optimizer steps are recorded inside the context only."""
        self.model = model
        self.calls: list[Call] = []
        self.updates: list[Update] = []

    def recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the reward function `function`, changed to add each of its calls to `calls`."""

        def reward(
            prompts: list[str], completions: list[str], *, completion_ids: Any, **columns: Any
        ) -> Any:
            """Return the rewards of `function`, and record the call.

            The trainer passes a text and the sampled ids for each completion, and columns of its
            data set.
            """
            rewards = function(prompts, completions, completion_ids=completion_ids, **columns)
            self.calls.append(Call(prompts, completions, completion_ids, rewards))
            return rewards

        # The trainer reports rewards under the names of their functions.
        reward.__name__ = function.__name__
        return reward

    def _record_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Add an Update to `updates`. PyTorch calls this hook before each optimizer step.

        PyTorch also passes the arguments of `optimizer.step`, which are ignored.
        """
        parameters = {}
        gradients = {}
        for name, parameter in self.model.named_parameters():
            parameters[name] = parameter.detach().clone()
            gradients[name] = parameter.grad.clone()
        self.updates.append(Update(parameters, gradients, optimizer.param_groups[0]["lr"]))

    def __enter__(self) -> Watch:
        """Forget earlier records, and begin to record optimizer steps."""
        self.calls.clear()
        self.updates.clear()
        self.handle = register_optimizer_step_pre_hook(self._record_update)
        return self

    def __exit__(self, *_: Any) -> None:
        """Stop recording optimizer steps, also after an exception, whose details are ignored."""
        self.handle.remove()


def kept_ids(logits: Tensor, config: Any) -> list[int]:
    """Return the candidate set of a row, the ids that sampling may draw, most probable first.

    min-p, top-k and top-p are applied in this order, as in vLLM, in Python floats.

    logits   [V]
    config   the configuration of the trainer: temperature, min_p, top_k, top_p
    """
    largest = float(logits.max())
    # Proportional to the probabilities, with 1 for the most probable id.
    shares = [math.exp((logit - largest) / config.temperature) for logit in logits.tolist()]
    after_min_p = [i for i, share in enumerate(shares) if share >= config.min_p]
    after_min_p.sort(key=lambda i: -shares[i])
    after_top_k = after_min_p[: config.top_k] if config.top_k else after_min_p

    total = sum(shares[i] for i in after_top_k)
    share_so_far = 0.0
    after_top_p = []
    for i in after_top_k:
        if share_so_far >= config.top_p * total:
            break
        after_top_p.append(i)
        share_so_far += shares[i]
    return after_top_p


@dataclass
class Plain:
    """The steps of the trainer, in float64.

    config       the configuration of the run, a TrainConfig
    tokenizer    of the policy
    model        the policy, of which this object has a copy
    teacher      the reference model; None: a copy of the policy
    spec         the objective
    advantages   returns the advantages from this object and the rewards [K][B] of K functions: a
                 number for each completion, or a list with a number for each token. None:
                 `of_groups`
    weigh        returns the weights of a completion's tokens from (log-probs of the policy - of the
                 sampler, whether the completion ended). NaN: the token is not trained. None: all
                 weights are 1
    reference    the reference model in float64, set from `teacher`
    prompts      ids of the prompt of each completion, set by `sample`
    ids          ids of each completion, set by `sample`
    """

    config: Any
    tokenizer: Any
    model: Any
    teacher: Any = None
    spec: Spec = GRPO
    advantages: Callable[[Plain, list[list[Any]]], Sequence[Any]] | None = None
    weigh: Callable[[Tensor, bool], Tensor] | None = None
    reference: Any = None
    prompts: list[list[int]] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Copy the models in float64, so that those of the run are not changed."""
        self.model = copy.deepcopy(self.model).double().eval()
        self.reference = copy.deepcopy(self.teacher or self.model).double().eval()

    def logits(self, model: Any) -> Tensor:
        """Return the logits from which the N tokens of all completions are drawn, [N, V].

        The logits for a token are at the position before it.

        model   the policy or the reference model
        """
        rows = []
        for prompt, ids in zip(self.prompts, self.ids, strict=True):
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0]
            rows.append(logits[len(prompt) - 1 : -1])
        return torch.cat(rows)

    def softmaxes(self, keep: Tensor | None, logits: Tensor) -> oracle.Rows:
        """Return the softmaxes of logits / temperature over the ids where `keep` is True.

        keep     bool [N, V], the candidate set of each token; None: all ids
        logits   [N, V]
        """
        ids = torch.cat([torch.tensor(row) for row in self.ids])
        transform = {"softcap": None, "scale": 1.0, "temperature": self.config.temperature}
        return oracle.Rows(logits, ids, transform, self.sequences, keep=keep)

    def greedy(self, prompt: list[int], ends: Sequence[int]) -> list[int]:
        """Return the ids of the greedy completion of a prompt.

        It ends with the first of the end tokens `ends`, or after max_new_tokens tokens.

        prompt   the ids of the prompt
        """
        ids: list[int] = []
        while len(ids) < self.config.max_new_tokens and not (ids and ids[-1] in ends):
            logits = self.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
        return ids

    def load(self, parameters: dict[str, Tensor]) -> None:
        """Copy parameters into the policy, in float64.

        parameters   by name. Of tied weights, only one name may be there.
        """
        wide = {name: parameter.double() for name, parameter in parameters.items()}
        self.model.load_state_dict(wide, strict=False)

    @property
    def groups(self) -> list[int]:
        """The index of the group (the prompt) of each completion."""
        return [i // self.config.group_size for i in range(len(self.ids))]

    def sample(self, parameters: dict[str, Tensor], call: Call) -> None:
        """Set the attributes of this object that follow from the sampled completions.

        prompts, ids   of each completion
        sequences      for each completion the indices of its tokens among all N tokens
        keep           bool [N, V], the candidate set that the policy's softmax has
        sampler        [N], log-probs of the tokens when they were sampled
        old            [N], their log-probs in the policy's softmax
        squares        [N], the sum of squared probabilities of this softmax

        parameters   of the policy that sampled
        call         of a reward function, for all completions
        """
        self.load(parameters)
        self.prompts = [self.tokenizer(text)["input_ids"] for text in call.prompts]
        self.ids = call.ids
        self.sequences: list[list[int]] = []
        num_rows = 0
        for ids in self.ids:
            self.sequences.append([*range(num_rows, num_rows + len(ids))])
            num_rows += len(ids)

        logits = self.logits(self.model).detach()
        self.keep = torch.zeros_like(logits, dtype=torch.bool)
        for row_logits, row_keep in zip(logits, self.keep, strict=True):
            row_keep[kept_ids(row_logits, self.config)] = True
        self.sampler = self.softmaxes(self.keep, logits).chosen
        assert self.sampler.isfinite().all(), "a token that sampling leaves out"
        if self.config.replay is False:
            # The policy then has the softmax over the whole vocabulary.
            self.keep.fill_(True)
        policy = self.softmaxes(self.keep, logits)
        self.old = policy.chosen
        self.squares = policy.sum_squares

    def step(
        self, calls: list[Call], updates: list[Update], ends: Sequence[int]
    ) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
        """Return for each update of a step its expected (gradients by name, metrics by name).

        calls     of the reward functions, in the order of the functions
        updates   what the optimizer got
        ends      ids that end a completion
        """
        # Reward functions are also called for fewer completions, such as those of an evaluation.
        num_completions = self.config.prompts_per_step * self.config.group_size
        training_calls = [call for call in calls if len(call.ids) == num_completions]
        self.sample(updates[0].parameters, training_calls[0])
        for ids in self.ids:
            assert ids[-1] in ends or len(ids) == self.config.max_new_tokens
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
        old = self.sampler if self.config.ratio_to == "sampler" else self.old
        return [self.update(update.parameters, advantages, old, weights) for update in updates]

    def of_groups(self, rewards: list[list[float]], **options: Any) -> list[float]:
        """Return the group advantage of each completion's weighted sum of rewards.

        rewards   [K][B], of K reward functions for B completions
        options   of `advantage_oracle.group_advantages`
        """
        weights = self.config.reward_weights or [1.0] * len(rewards)
        totals = [
            math.fsum(weight * reward for weight, reward in zip(weights, row, strict=True))
            for row in zip(*rewards, strict=True)
        ]
        return advantage_oracle.group_advantages(totals, self.groups, **options)

    def update(
        self, parameters: dict[str, Tensor], advantages: Tensor, old: Tensor, weights: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return (gradients by name, metrics) of one update.

        parameters   of the policy before the update
        advantages   [N], of all N tokens
        old          [N], the log-probs in the denominator of ratios
        weights      [N], factors of the policy term, NaN for tokens that are not trained
        """
        self.load(parameters)
        logits = self.logits(self.model)
        policy = self.softmaxes(self.keep, logits)
        with torch.no_grad():
            reference = self.softmaxes(self.keep, self.logits(self.reference))
        if self.config.preset == "distillation":
            kind = "reverse"
        else:
            kind = KINDS.get(self.config.kl or "", "")
        divergences = None
        if kind:
            divergences = oracle.divergence(policy.log_p, reference.log_p, kind, mixture=0.5)
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

        # Which of the trained tokens count in metrics. Log-ratios and clip counts of the result
        # have only trained tokens.
        if self.config.drop_zero_variance:
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
