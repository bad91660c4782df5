"""Row sources for tests of the compositions: in plain float64, and over public functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels import linear_logprobs, token_logprobs
from grpo_kernels.logprobs import TokenLogprobs


@dataclass(eq=False)
class Float64Source:
    """Rows of logits, float64 [num_rows, V], with everything in plain torch."""

    logits: Tensor

    @property
    def num_rows(self) -> int:
        return self.logits.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]

    @property
    def device(self) -> torch.device:
        return self.logits.device

    def statistics(
        self,
        targets: Tensor,
        mask: Tensor | None,
        names: tuple[str, ...] = (),
        *,
        detached: tuple[str, ...] = (),
        reference: None = None,
    ) -> dict[str, Tensor]:
        if mask is None:
            mask = torch.ones_like(targets, dtype=torch.bool)
        logits = torch.where(mask[:, None], self.logits, 0.0)
        logps = logits.log_softmax(1)
        probs = logps.exp()
        target_ids = torch.where(mask, targets, 0)[:, None]
        statistics = {
            "logps": logps.gather(1, target_ids)[:, 0],
            "entropy": -torch.where(probs == 0, 0.0, probs * logps).sum(1),
            "logsumexp": logits.logsumexp(1),
            "sum_squares": probs.square().sum(1),
            "top_prob": probs.detach().amax(1),
        }
        statistics = {name: torch.where(mask, x, 0.0) for name, x in statistics.items()}
        statistics["top_id"] = torch.where(mask, logits.argmax(1), -1)
        return {name: statistics[name] for name in ("logps", *names)}

    def logits_at(self, row_ids: Tensor, token_ids: Tensor) -> Tensor:
        logits = self.logits[row_ids, token_ids.clamp(min=0)]
        return torch.where(token_ids >= 0, logits, -torch.inf)


def named_statistics(result: TokenLogprobs, names: tuple[str, ...]) -> dict[str, Tensor]:
    assert result.entropy is not None
    statistics = {"logps": result.logps, "entropy": result.entropy, **result.also}
    return {name: statistics[name] for name in ("logps", *names)}


@dataclass(eq=False)
class LogitsSource(Float64Source):
    """The same from logits in fp32, bf16 or fp16, with the statistics of `token_logprobs`."""

    def statistics(
        self,
        targets: Tensor,
        mask: Tensor | None,
        names: tuple[str, ...] = (),
        *,
        detached: tuple[str, ...] = (),
        reference: None = None,
    ) -> dict[str, Tensor]:
        also = tuple(name for name in names if name != "entropy")
        result = token_logprobs(self.logits, targets, mask=mask, entropy=True, also=also)
        return named_statistics(result, names)

    def logits_at(self, row_ids: Tensor, token_ids: Tensor) -> Tensor:
        return super().logits_at(row_ids, token_ids).float()


@dataclass(eq=False)
class LinearSource:
    """Rows of logits hidden @ weight.T, with the statistics of `linear_logprobs`."""

    hidden: Tensor
    weight: Tensor

    @property
    def num_rows(self) -> int:
        return self.hidden.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def statistics(
        self,
        targets: Tensor,
        mask: Tensor | None,
        names: tuple[str, ...] = (),
        *,
        detached: tuple[str, ...] = (),
        reference: None = None,
    ) -> dict[str, Tensor]:
        also = tuple(name for name in names if name != "entropy")
        result = linear_logprobs(
            self.hidden,
            self.weight,
            targets,
            mask=mask,
            entropy=True,
            also=also,
        )
        return named_statistics(result, names)

    def logits_at(self, row_ids: Tensor, token_ids: Tensor) -> Tensor:
        is_used = token_ids >= 0
        hidden = torch.where(is_used[:, None], self.hidden[row_ids], 0.0).float()
        weight = self.weight[token_ids.clamp(min=0)].float()
        return torch.where(is_used, (hidden * weight).sum(1), -torch.inf)
