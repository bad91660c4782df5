"""The loss of a micro-batch, and log-probs of any model, from hidden states or from logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..batch import TokenBatch
from ..logprobs import linear_logprobs, token_logprobs
from ..losses import grpo_loss, linear_grpo_loss
from ..objective import Denominators, Objective
from ..options import Options
from ..projection import Head
from ..sparsity import Sparse
from ..transform import LogitTransform
from .config import TrainConfig
from .head import check_projection, completion_hidden, head_parameters, logit_transform
from .ranks import ParallelModel
from .sampling import Completions, autocast, completion_logits

Tensor = torch.Tensor


class LossParts(NamedTuple):
    """Of `LossOutput`, the tensors: wrappers of a model look for them in what a forward returns."""

    loss: Tensor
    logps: Tensor
    metrics: dict[str, Tensor]


class Losses:
    """`config.loss` for the model of a run; its methods run inside a forward of that model or of its reference."""

    def __init__(
        self, config: TrainConfig, policy: ParallelModel, reference: ParallelModel | None, device: torch.device
    ) -> None:
        self.reference = reference
        self.device, self.dtype, self.sharded = device, getattr(torch, config.dtype), policy.sharded
        self.linear = config.loss == "linear"
        backend = "eager" if config.loss == "eager" else config.backend
        self.options, self.sparse_step = Options(entropy_over=config.entropy_over, backend=backend), config.sparse_step
        self.transform = LogitTransform(config.temperature)  # of logits that the model's own forward gives
        if self.linear:
            policy.without_gradients(check_projection)
            self.transform = logit_transform(policy.model, config.temperature)
            if reference is not None:
                reference.without_gradients(check_projection)
                self.ref_transform = logit_transform(reference.model, config.temperature)
        # A model that softcaps its logits needs their values in its own backward; two gradients, over sets and over all, need
        # them too.
        softcap = getattr(policy.model.config.get_text_config(), "final_logit_softcapping", None)
        both = config.replays and config.entropy_over == "vocabulary"
        self.inplace = config.loss == "logits" and softcap is None and not both

    def loss(
        self, model: Any, completions: Completions, batch: TokenBatch, objective: Objective, normalizer: Tensor | Denominators,
        seed: int = 0,
    ) -> LossParts:  # fmt: skip
        """The objective of one micro-batch: from hidden states, so that logits never exist, or from the model's logits. `seed`: of
        columns that are drawn, another one for each call."""
        how = replace(self.options, sparse=Sparse(self.sparse_step, seed)) if self.sparse_step else self.options
        options: dict[str, Any] = {"transform": self.transform, "normalizer": normalizer, "options": how}
        with self.autocast():
            if objective.exact is not None:
                options |= self.second_stream(completions)
            if self.linear:
                hidden, (weight, bias) = completion_hidden(model, completions), head_parameters(model)
                out = linear_grpo_loss(hidden, weight, batch, objective, bias=bias, **options)
                return LossParts(out.loss, out.logps, out.metrics)
            logits = completion_logits(model, completions)
        out = grpo_loss(logits, batch, objective, inplace=self.inplace, **options)
        return LossParts(out.loss, out.logps, out.metrics)

    def second_stream(self, completions: Completions) -> dict[str, Any]:
        """The other side of an exact divergence: the reference's hidden states and head, or its logits."""
        assert self.reference is not None
        if not self.linear:
            logits = self.reference.without_gradients(completion_logits, completions)
            return {"ref_logits": logits}
        hidden = self.reference.without_gradients(completion_hidden, completions)
        weight, bias = head_parameters(self.reference.model)
        return {"reference": (hidden, Head(weight, bias, self.ref_transform))}

    def logps(self, model: Any, completions: Completions) -> Tensor:
        """[B, T]: log-probs of the sampled tokens, over the sets that they were sampled from where these are replayed."""
        return self._layer_1(model, completions)[0]

    def sum_squares(self, model: Any, completions: Completions) -> Tensor:
        """[B, T]: the sum of the squared probabilities of all tokens that might have been sampled, likewise."""
        return self._layer_1(model, completions, also=("sum_squares",))[2]["sum_squares"]

    def _layer_1(self, model: Any, completions: Completions, **options: Any) -> Any:
        targets = completions.targets
        options |= {"mask": completions.mask, "transform": self.transform, "kept": completions.kept, "options": self.options}
        with self.autocast():
            if self.linear:
                hidden, (weight, bias) = completion_hidden(model, completions), head_parameters(model)
                return linear_logprobs(hidden, weight, targets, bias=bias, **options)
            logits = completion_logits(model, completions)
        return token_logprobs(logits, targets, **options)

    def autocast(self) -> Any:
        return autocast(self.device, self.dtype, cache=not self.sharded)
