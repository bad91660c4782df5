"""Row sources (`core.sources.RowSource`) for tests of the compositions.

Float64Source   everything in plain float64 PyTorch: the expected results
LogitsSource    logits in their dtype, with the statistics of `token_logprobs`
LinearSource    hidden states and a head, with the statistics of `linear_logprobs`

The last two take single logits from plain PyTorch, so that a test of a composition shows errors of
the composition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import linear_logprobs, token_logprobs
from grpo_kernels.core.backends import pick
from grpo_kernels.core.linear import Projection
from grpo_kernels.core.softmax import TRANSFORMED
from grpo_kernels.core.sources import GivenLogits, ProjectedLogits, RowSource
from grpo_kernels.logprobs import TokenLogprobs


@dataclass(eq=False)
class Float64Source:
    """Rows of logits, float64 [num_rows, V], in plain PyTorch."""

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
        """Return "logps" and the statistics `names` of each row [num_rows], 0 in masked rows.

        "top_id" is -1 in masked rows. See `RowSource.statistics`.
        """
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

    def statistics_of_rest(
        self,
        targets: Tensor,
        row_ids: Tensor,
        token_ids: Tensor,
        mask: Tensor | None,
        names: tuple[str, ...] = (),
        *,
        detached: tuple[str, ...] = (),
    ) -> dict[str, Tensor]:
        """Return statistics of the softmax over the ids of each row that are in no pair.

        "logps" is the log-odds of the target against these ids: its logit minus their logsumexp.
        See `RowSource.statistics_of_rest`.

        row_ids, token_ids   (row, id) pairs; the id -1 marks an unused pair
        """
        # A last column takes unused pairs.
        is_left_out = self.logits.new_zeros(self.num_rows, self.vocab_size + 1, dtype=torch.bool)
        columns = torch.where(token_ids >= 0, token_ids, self.vocab_size)
        is_left_out = is_left_out.index_put((row_ids, columns), is_left_out.new_ones(()))
        is_left_out = is_left_out[:, : self.vocab_size]
        if mask is None:
            mask = torch.ones_like(targets, dtype=torch.bool)
        logits = torch.where(is_left_out, -torch.inf, self.logits)
        # A row without a rest gets finite numbers, which no gradient reaches.
        is_empty = ~mask | (logits == -torch.inf).all(1)
        logits = torch.where(is_empty[:, None], 0.0, logits)
        logps = logits.log_softmax(1)
        probs = logps.exp()
        target_ids = torch.where(mask, targets, 0)[:, None]
        target_logits = self.logits.gather(1, target_ids)[:, 0]
        is_left_out = is_left_out.gather(1, target_ids)[:, 0]
        target_logits = torch.where(is_left_out, target_logits.detach(), target_logits)
        log_odds = torch.where(is_empty, torch.inf, target_logits - logits.logsumexp(1))
        statistics = {
            "logps": torch.where(target_logits == -torch.inf, -torch.inf, log_odds),
            "entropy": -(probs * torch.where(logits == -torch.inf, 0.0, logps)).sum(1),
            "sum_squares": probs.square().sum(1),
        }
        statistics = {name: torch.where(mask, x, 0.0) for name, x in statistics.items()}
        return {name: statistics[name] for name in ("logps", *names)}

    def logits_at(self, row_ids: Tensor, token_ids: Tensor) -> Tensor:
        """Return the logit of each (row, id) pair, -inf for the id -1."""
        logits = self.logits[row_ids, token_ids.clamp(min=0)]
        return torch.where(token_ids >= 0, logits, -torch.inf)


class PublicFunctionSource:
    """The statistics of a public function, and the package's statistics of the rest of a row."""

    def call(self, targets: Tensor, **keywords: Any) -> TokenLogprobs:
        """Call the public function on these rows."""
        raise NotImplementedError

    def package_source(self) -> RowSource:
        """Return the package's row source of these rows."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        return self.package_source().num_rows

    @property
    def vocab_size(self) -> int:
        return self.package_source().vocab_size

    @property
    def device(self) -> torch.device:
        return self.package_source().device

    def statistics(
        self,
        targets: Tensor,
        mask: Tensor | None,
        names: tuple[str, ...] = (),
        *,
        detached: tuple[str, ...] = (),
        reference: None = None,
    ) -> dict[str, Tensor]:
        """Return "logps" and the statistics `names`, as the public function returns them."""
        also = tuple(name for name in names if name != "entropy")
        result = self.call(targets, mask=mask, entropy=True, also=also)
        assert result.entropy is not None
        statistics = {"logps": result.logps, "entropy": result.entropy, **result.also}
        return {name: statistics[name] for name in ("logps", *names)}

    def statistics_of_rest(self, *arguments: Any, **keywords: Any) -> dict[str, Tensor]:
        return self.package_source().statistics_of_rest(*arguments, **keywords)


@dataclass(eq=False)
class LogitsSource(PublicFunctionSource):
    """Rows of logits in fp32, bf16 or fp16, [num_rows, V]."""

    logits: Tensor

    def call(self, targets: Tensor, **keywords: Any) -> TokenLogprobs:
        return token_logprobs(self.logits, targets, **keywords)

    def package_source(self) -> RowSource:
        return GivenLogits(self.logits[None], TRANSFORMED, pick("auto", self.logits.device))

    def logits_at(self, row_ids: Tensor, token_ids: Tensor) -> Tensor:
        return Float64Source(self.logits).logits_at(row_ids, token_ids).float()


@dataclass(eq=False)
class LinearSource(PublicFunctionSource):
    """Rows of logits hidden @ weight.T: hidden [num_rows, H], weight [V, H]."""

    hidden: Tensor
    weight: Tensor

    def call(self, targets: Tensor, **keywords: Any) -> TokenLogprobs:
        return linear_logprobs(self.hidden, self.weight, targets, **keywords)

    def package_source(self) -> RowSource:
        projection = Projection(
            self.hidden, self.weight, None, TRANSFORMED, matmul_dtype=self.hidden.dtype
        )
        return ProjectedLogits(projection, pick("auto", self.hidden.device))

    def logits_at(self, row_ids: Tensor, token_ids: Tensor) -> Tensor:
        is_used = token_ids >= 0
        hidden = torch.where(is_used[:, None], self.hidden[row_ids], 0.0).float()
        weight = self.weight[token_ids.clamp(min=0)].float()
        return torch.where(is_used, (hidden * weight).sum(1), -torch.inf)
