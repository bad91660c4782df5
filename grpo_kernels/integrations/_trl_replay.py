"""The sets that the sampler of a TRL run kept: from its generation to the rows that are scored and trained."""

from __future__ import annotations

from typing import Any

import torch

from ..token_sets import TokenSets

Tensor = torch.Tensor

#: The extra field of a rollout_func: of each completion a list of ids for each token that was generated.
FIELD = "sampling_mask"
#: Under this name the sets travel in TRL's batch of completions, int32 [B, T, K] padded with -1: TRL shuffles and splits tensors.
KEY = "kept_ids"
WRAPPED = ("_generate", "_generate_and_score_completions", "_get_per_token_logps_and_entropies")


def sets_of(inputs: dict[str, Any]) -> TokenSets | None:
    """The sets of a micro-batch's completion tokens; None without replay."""
    return TokenSets.from_padded(inputs[KEY]) if KEY in inputs else None


class Replay:
    """Keeps the record of a generation until its completions are scored, and puts it into TRL's batch."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._theirs = {name: getattr(trainer, name) for name in WRAPPED}
        self._record: tuple[list[Any], list[Any]] | None = None  # lists of ids, and of each completion which tokens they are of
        self._scored: TokenSets | None = None  # of all completions, while they are scored
        self._taken = 0  # completions that were scored already

    def install(self) -> None:
        for name, ours in zip(WRAPPED, (self._generate, self._complete, self._score), strict=True):
            setattr(self.trainer, name, ours)

    def remove(self) -> None:
        for name in WRAPPED:
            delattr(self.trainer, name)

    def rows(self, labels: Tensor) -> TokenSets | None:
        """The sets of the next labels [b, L] that are scored, of which the last belong to completions; None where nothing of a
        generation is scored."""
        if self._scored is None:
            return None
        b, length = labels.shape
        tokens = self._scored.rows // len(self._record[0]) if self._record else 0
        index = torch.full((b, length), -1)
        index[:, length - tokens :] = (torch.arange(b * tokens) + self._taken * tokens).view(b, tokens)
        self._taken += b
        return self._scored.take(index.flatten())

    # ---- TRL's methods

    def _generate(self, prompts: list[Any]) -> Any:
        from trl.generation import vllm_generation

        theirs = vllm_generation.extract_logprobs
        seen: list[list[Any]] = []

        def extract(outputs: Any) -> Any:
            seen.append([getattr(output, FIELD, None) for request in outputs for output in request.outputs])
            return theirs(outputs)

        vllm_generation.extract_logprobs = extract  # type: ignore[assignment]
        try:
            result = self._theirs["_generate"](prompts)
        finally:
            vllm_generation.extract_logprobs = theirs
        completions, environment, extra = result[1], result[2], result[5]
        record = extra.pop(FIELD, None)
        if record is None and len(seen) == 1 and None not in seen[0]:
            record = [mask.token_ids for mask in seen[0]]
        if record is None:
            raise RuntimeError(
                f"replay=True, but the completions came without their sets: return {FIELD!r} from rollout_func, a list of ids for each "
                "generated token, or let vLLM run in this process (vllm_mode='colocate') with return_sampling_mask and a top_k, and "
                "without tools."
            )
        own = [[1] * len(ids) for ids in completions] if environment is None else environment
        self._record = list(record), own
        return result

    def _sets(self, tokens: int) -> TokenSets:
        """Those of each completion, padded to so many tokens."""
        assert self._record is not None
        record, own = self._record
        generated = torch.zeros(len(own), tokens, dtype=torch.bool)
        for row, is_generated in zip(generated, own, strict=True):
            row[: len(is_generated)] = torch.as_tensor(is_generated) != 0
        return TokenSets.from_lists(record, generated=generated).to(self.trainer.accelerator.device)

    def _complete(self, inputs: list[Any]) -> dict[str, Any]:
        try:
            output = self._theirs["_generate_and_score_completions"](inputs)
            batch, tokens = output["completion_ids"].shape
            output[KEY] = self._sets(tokens).padded().view(batch, tokens, -1)
        finally:
            self._record = None
        return output

    def _score(self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **options: Any) -> Any:
        theirs = self._theirs["_get_per_token_logps_and_entropies"]
        if self._record is None:  # in the loss, whose batch has the sets
            return theirs(model, input_ids, attention_mask, logits_to_keep, **options)
        self._scored, self._taken = self._sets(logits_to_keep), 0
        try:
            result = theirs(model, input_ids, attention_mask, logits_to_keep, **options)
        finally:
            self._scored = None
        if self._taken != len(input_ids):
            raise RuntimeError(
                f"replay=True, but {len(input_ids) - self._taken} of {len(input_ids)} completions were scored past our forward, over "
                "the vocabulary: this configuration of TRL cannot replay."
            )
        return result
