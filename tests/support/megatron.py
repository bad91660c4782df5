"""Stand-ins for models of megatron-core that run on a CPU.

They have the arguments of the originals' forward and output processor hook, pipeline stages, and
the sharding of the output layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Config:
    """Fields of a TransformerConfig."""

    sequence_parallel: bool = False
    use_mup: bool = False
    mup_output_mult: float = 1.0
    gradient_accumulation_fusion: bool = False
    mtp_num_layers: int | None = None


class OutputLayer(nn.Module):
    """A ColumnParallelLinear with this rank's rows of the weight. It raises if it is called.

    weight   [V / ranks, H], or None if the embedding is tied
    group    the tensor-parallel group, or None
    """

    def __init__(self, weight: Tensor | None, group: Any, config: Config) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight)
        self.register_parameter("bias", None)
        self.tp_group = group
        ranks = 1 if group is None else dist.get_world_size(group)
        self.sequence_parallel = config.sequence_parallel and ranks > 1
        self.disable_grad_reduce = False
        self.gtp_remat_size = 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the output layer was called: it makes [S, B, V / ranks] logits")


class LanguageModel(nn.Module):
    """The common parts of GPTModel and HybridModel. Hidden states are tanh of `decoder_input`.

    weight   this rank's rows [V / ranks, H] of the weight of the output layer or, if tied, of the
             embedding
    group    the tensor-parallel group, or None
    config   fields of `Config`
    """

    def __init__(
        self, weight: Tensor, group: Any = None, *, tied: bool = False, **config: Any
    ) -> None:
        super().__init__()
        self.config = Config(**config)
        self.pre_process = True
        self.post_process = True
        self.mtp_process = False
        self.share_embeddings_and_output_weights = tied
        embedding = nn.Parameter(weight) if tied else None
        self.embedding = SimpleNamespace(word_embeddings=SimpleNamespace(weight=embedding))
        self.output_layer = OutputLayer(None if tied else weight, group, self.config)

    @property
    def head(self) -> Any:
        """The parameter that the output layer multiplies by."""
        if self.share_embeddings_and_output_weights:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight

    def shared_embedding_or_output_weight(self) -> Any:
        """Return the tied weight."""
        return self.embedding.word_embeddings.weight

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        raise AssertionError("the loss of the model was called")

    def _scale_logits(self, logits: Tensor) -> Tensor:
        if self.config.use_mup and self.config.mup_output_mult != 1.0:
            return logits * self.config.mup_output_mult
        return logits


class GPTModel(LanguageModel):
    """A model with the hook of megatron-core 0.18."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        decoder_input: Tensor = None,
        labels: Tensor = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        extra_block_kwargs: dict | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: Any = None,
        loss_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        output_processor: Any = None,
        output_processor_context: Any = None,
    ) -> Any:
        """Return hidden states, logits, or what the output processor returns.

        These are hidden states on all pipeline stages but the last.
        """
        hidden_states = decoder_input.tanh()
        if not self.post_process:
            return hidden_states
        output_weight = None
        if self.share_embeddings_and_output_weights:
            output_weight = self.shared_embedding_or_output_weight()
        if output_processor is None:
            return self.output_layer(hidden_states, weight=output_weight)
        return output_processor(
            hidden_states=hidden_states,
            output_layer=self.output_layer,
            output_weight=output_weight,
            labels=labels,
            loss_mask=loss_mask,
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            decoder_input=decoder_input,
            inference_context=inference_context,
            packed_seq_params=packed_seq_params,
            runtime_gather_output=runtime_gather_output,
            context=output_processor_context,
            compute_language_model_loss=self.compute_language_model_loss,
            scale_logits=self._scale_logits,
            config=self.config,
        )


class HybridModel(LanguageModel):
    """A model without the hook."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        decoder_input: Tensor = None,
        labels: Tensor = None,
        inference_context: Any = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: Any = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
        compute_mtp_loss: bool = True,
    ) -> Any:
        """Return logits, or hidden states on all pipeline stages but the last."""
        hidden_states = decoder_input.tanh()
        if not self.post_process:
            return hidden_states
        return self.output_layer(hidden_states)


class Wrapper(nn.Module):
    """Stands for Float16Module or DistributedDataParallel, which pass arguments on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class VisionLanguageModel(nn.Module):
    """A multimodal model, whose forward does not have the hook."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.language_model = model

    def forward(self, **inputs: Any) -> Any:
        return self.language_model(**inputs)
