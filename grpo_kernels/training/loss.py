"""The loss of a micro-batch and log-probs of any model, from hidden states or from logits; and the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..batch import TokenBatch
from ..logprobs import linear_logprobs, token_logprobs
from ..losses import grpo_loss, linear_grpo_loss
from ..objective import Denominators, Objective
from ..rows.selection import Sparse
from ..specs import Head, LogitTransform, Options
from .config import TrainConfig
from .ranks import ParallelModel, Ranks
from .rollouts import Completions, completion_logits

Tensor = torch.Tensor


class LossParts(NamedTuple):
    """Of `LossOutput`, the tensors: wrappers of a model look for them in what a forward returns."""

    loss: Tensor
    logps: Tensor
    metrics: dict[str, Tensor]


class Losses:
    """`config.loss` for the model of a run; its methods run inside a forward of that model or of its reference."""

    def __init__(self, config: TrainConfig, policy: ParallelModel, reference: ParallelModel | None) -> None:
        self.config, self.policy, self.reference = config, policy, reference
        self.linear = config.loss == "linear"
        backend = "eager" if config.loss == "eager" else config.backend
        self.options = Options(entropy_over=config.entropy_over, backend=backend)
        for each in (policy, reference):
            if self.linear and each is not None:
                each.without_gradients(check_projection)
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
        sparse = Sparse(self.config.sparse_step, seed) if self.config.sparse_step else None
        options: dict[str, Any] = {"normalizer": normalizer, "options": replace(self.options, sparse=sparse)}
        with self.policy.autocast(self.config.dtype):
            rows, second = self.rows(model, completions), None
            if objective.exact is not None:  # the other side of the divergence
                assert self.reference is not None
                second = self.reference.without_gradients(self.rows, completions)
        own = {"reference": second} if self.linear else {"ref_logits": second, "inplace": self.inplace}
        out = self.of_rows((linear_grpo_loss, grpo_loss), rows, batch, objective, **options, **own)
        return LossParts(out.loss, out.logps, out.metrics)

    def of_rows(self, functions: tuple[Any, Any], rows: Any, *arguments: Any, **options: Any) -> Any:
        """What the function of hidden states and head returns, or that of logits."""
        if not self.linear:
            return functions[1](rows, *arguments, transform=LogitTransform(self.config.temperature), **options)
        with self.policy.autocast(self.config.dtype):
            return functions[0](*rows, *arguments, **options)

    def rows(self, model: Any, completions: Completions) -> Any:
        """A model's hidden states and head, or its logits: rows [B, T], of which row t predicts completion token t."""
        if not self.linear:
            return completion_logits(model, completions)
        hidden = model.get_decoder()(**completions.inputs, use_cache=False).last_hidden_state
        return hidden[:, -completions.targets.shape[1] :], head_of(model, self.config.temperature)

    def logps(self, model: Any, completions: Completions) -> Tensor:
        """[B, T]: log-probs of the sampled tokens, over the sets that they were sampled from where these are replayed."""
        return self._layer_1(model, completions)[0]

    def sum_squares(self, model: Any, completions: Completions) -> Tensor:
        """[B, T]: the sum of the squared probabilities of all tokens that might have been sampled, likewise."""
        return self._layer_1(model, completions, also=("sum_squares",)).also["sum_squares"]

    def _layer_1(self, model: Any, completions: Completions, **options: Any) -> Any:
        options |= {"mask": completions.mask, "kept": completions.kept, "options": self.options}
        with self.policy.autocast(self.config.dtype):
            rows = self.rows(model, completions)
        return self.of_rows((linear_logprobs, token_logprobs), rows, completions.targets, **options)


def head_of(model: Any, temperature: float) -> Head:
    """The projection to logits of a causal language model, with what its own forward does to them. Of a model that is not known
    plain logits are assumed, which `check_projection` compares with its own."""
    try:
        transform = LogitTransform.of(model, temperature=temperature)
    except ValueError:
        transform = LogitTransform(temperature)
    head = model.get_output_embeddings()
    return Head(head.weight, getattr(head, "bias", None), transform)


@torch.no_grad()
def check_projection(model: Any) -> None:
    """Raise ValueError unless backbone, head and transform give the logits that the model itself gives."""
    ids = torch.arange(4, device=next(model.parameters()).device)[None]
    training = model.training
    model.eval()
    try:
        head = model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear) or type(head).forward is not torch.nn.Linear.forward:
            raise ValueError(f"the head is a {type(head).__name__}, not a plain linear layer")
        expected = token_logprobs(model(input_ids=ids, use_cache=False).logits, ids)[0]
        found = linear_logprobs(
            model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state, head_of(model, 1.0), ids
        )[0]
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"log-probs differ by up to {float((found - expected).abs().max()):.2g} from those of its own forward"
            )
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"loss='linear' does not know how {type(model).__name__} makes its logits ({error}): use loss='logits'."
        ) from error
    finally:
        model.train(training)


# ---- activations that are computed again in the backward pass, in the network that samples
#
# The policy stays in eval mode for the whole run: completions, old log-probs, reference and gradient then come from one network,
# and before the first step of an update every ratio is 1. Dropout would make a network of its own out of every forward.


@contextmanager
def recomputing(model: Any) -> Iterator[None]:
    """Around forward and backward: layers recompute where this was switched on. They do so in training mode alone, which the
    modules inside them, dropout among them, do not get."""
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@torch.no_grad()
def check_recomputing(model: Any) -> None:
    """Raise ValueError if layers that recompute are another network than the one that samples."""
    ids = torch.arange(8, device=next(model.parameters()).device)[None] % model.config.get_text_config().vocab_size
    expected = model(input_ids=ids, use_cache=False).logits
    with recomputing(model):
        recomputed = model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(recomputed, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise ValueError(
            f"gradient_checkpointing=True switches on the dropout of {type(model).__name__}, and it would train another network "
            "than the one that samples: set the dropout in the model's configuration to 0, or leave gradient_checkpointing off."
        )


# ---- micro-batches


def pieces(rows: Tensor, size: int, ranks: Ranks) -> list[Tensor]:
    """`rows` cut into pieces of `size` (0: all), as many on every rank as on the one that has the most; those beyond are empty."""
    counts = ranks.gather(len(rows))
    size = size or max(counts)
    return [rows[at : at + size] for at in range(0, max(counts), size)]


class Part(NamedTuple):
    """Some completions, with the inputs of their loss."""

    completions: Completions
    batch: TokenBatch


def micro_batches(completions: Completions, batch: TokenBatch, config: TrainConfig, ranks: Ranks) -> tuple[list[Part], float]:
    """Parts of `config.micro_batch` completions, as many on every rank; and the share of completions that was left out because
    nothing pulls at them."""
    assert batch.mask is not None
    total = len(completions.ids)
    kept = torch.arange(total, device=completions.ids.device)
    if config.drop_zero_variance:
        has_gradient = (batch.advantages.reshape(total, -1) != 0).any(1)
        if not ranks.any(bool(has_gradient.any())):
            has_gradient[0] = ranks.main  # an update of nothing is still one: the optimizer's averages decay
        kept = kept[has_gradient]
    parts = []
    for rows in pieces(kept, config.micro_batch, ranks):
        mask = batch.mask[rows]
        if not len(rows):  # a pass for the others
            rows, mask = kept.new_zeros(1), torch.zeros_like(batch.mask[:1])
        weights, some = None if batch.weights is None else batch.weights[rows], completions[rows]
        of_loss = TokenBatch(some.targets, batch.advantages[rows], mask=mask, weights=weights, kept=some.kept)
        parts.append(Part(some, of_loss))
    counts, totals = zip(*ranks.gather((len(kept), total)), strict=True)
    return parts, 1 - sum(counts) / sum(totals)
