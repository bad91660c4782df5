"""Stand-ins for models of megatron-core that run on a CPU.

They imitate what grpo_kernels.integrations.megatron uses of the originals: the arguments of forward
and of an output processor, the attributes of pipeline stages, and the sharded output layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Config:
    """The fields of megatron-core's TransformerConfig that the integration reads."""

    #: Whether each tensor-parallel rank has only its part of the sequence in hidden states.
    sequence_parallel: bool = False
    #: Whether logits are multiplied by mup_output_mult (maximal update parametrisation).
    use_mup: bool = False
    mup_output_mult: float = 1.0
    #: Whether the gradient of the weight is added to `weight.main_grad` instead of `weight.grad`.
    gradient_accumulation_fusion: bool = False
    #: The number of layers that predict further tokens (multi-token prediction); None: no layer.
    mtp_num_layers: int | None = None


class OutputLayer(nn.Module):
    """Imitate megatron-core's ColumnParallelLinear, the `output_layer` of a model.

    The integration reads the attributes of the layer and computes the matmul itself, so a call of
    the layer is an error.
    """

    def __init__(
        self, weight: Tensor | None, group: dist.ProcessGroup | None, config: Config
    ) -> None:
        """Set the attributes of a ColumnParallelLinear that the integration reads.

        weight   [V / ranks, H], this rank's rows; None if the model has tied weights, and a caller
                 of the layer passes the embedding's weight
        group    the tensor-parallel group, over whose ranks the vocabulary is split; None: one rank
        config   of the model, for `sequence_parallel`
        """
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight)
        self.register_parameter("bias", None)
        self.tp_group = group
        ranks = 1 if group is None else dist.get_world_size(group)
        self.sequence_parallel = config.sequence_parallel and ranks > 1
        # True: the layers in front of this one sum the gradient of the hidden states over ranks.
        self.disable_grad_reduce = False
        # The number of ranks that each store a part of this rank's weight.
        self.gtp_remat_size = 1

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise, because the integration must never compute all logits."""
        raise AssertionError("the output layer was called: it makes [S, B, V / ranks] logits")


class LanguageModel(nn.Module):
    """Imitate megatron-core's LanguageModule, the base class of its GPTModel and HybridModel.

    It has no layers: subclasses use tanh of `decoder_input` as hidden states.
    """

    def __init__(
        self,
        weight: Tensor,
        group: dist.ProcessGroup | None = None,
        *,
        tied: bool = False,
        **config: Any,
    ) -> None:
        """Set the attributes of a megatron-core model that the integration reads.

        weight   this rank's rows [V / ranks, H] of the weight of the output layer or, if tied, of
                 the embedding
        group    the tensor-parallel group, over whose ranks the vocabulary is split; None: one rank
        tied     whether the output layer multiplies by the weight of the embedding
        config   fields of `Config` that differ from their defaults
        """
        super().__init__()
        self.config = Config(**config)
        # Whether this pipeline stage has the embedding, the output layer, and layers for
        # multi-token prediction.
        self.pre_process = True
        self.post_process = True
        self.mtp_process = False
        self.share_embeddings_and_output_weights = tied
        embedding = nn.Parameter(weight) if tied else None
        self.embedding = SimpleNamespace(word_embeddings=SimpleNamespace(weight=embedding))
        self.output_layer = OutputLayer(None if tied else weight, group, self.config)

    @property
    def head(self) -> Any:
        """The weight [V / ranks, H] that the output layer multiplies by, tied or not."""
        if self.share_embeddings_and_output_weights:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight

    def shared_embedding_or_output_weight(self) -> Any:
        """Return the tied weight [V / ranks, H], as megatron-core's method of this name does."""
        return self.embedding.word_embeddings.weight

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> NoReturn:
        """Raise, because the integration computes the loss itself."""
        raise AssertionError("the loss of the model was called")

    def _scale_logits(self, logits: Tensor) -> Tensor:
        """Return the logits times `mup_output_mult` if the model uses muP."""
        if self.config.use_mup and self.config.mup_output_mult != 1.0:
            return logits * self.config.mup_output_mult
        return logits


class GPTModel(LanguageModel):
    """Imitate GPTModel of megatron-core 0.18, whose forward calls an output processor if given."""

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
        """Return what the output processor returns, and without one, what the output layer returns.

        Pipeline stages other than the last return their hidden states. The signature and the
        keywords of the output processor are those of megatron-core.

        decoder_input              [S, B, H], the input of the layers. Its tanh is the hidden states
        output_processor           computes the output from hidden states, output layer and the
                                   other arguments; None: the output layer is called
        output_processor_context   passed on to the output processor as `context`
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
    """Imitate megatron-core's HybridModel, whose forward takes no output processor."""

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
        """Return what the output layer returns.

        Pipeline stages other than the last return their hidden states, the tanh of `decoder_input`
        [S, B, H]. The signature is that of megatron-core.
        """
        hidden_states = decoder_input.tanh()
        if not self.post_process:
            return hidden_states
        return self.output_layer(hidden_states)


class Wrapper(nn.Module):
    """Imitate Float16Module or DistributedDataParallel, which hold the model as `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pass all arguments on to the wrapped model."""
        return self.module(*args, **kwargs)


class VisionLanguageModel(nn.Module):
    """Imitate a multimodal model, which holds a language model as `language_model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.language_model = model

    def forward(self, **inputs: Any) -> Any:
        """Pass all keywords on to the language model."""
        return self.language_model(**inputs)
