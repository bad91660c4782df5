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
        """Return "logps" and the statistics `names` of each row by name, float64 [num_rows].

        They are 0 in masked rows, and "top_id", int64, is -1 there. Autograd gives gradients.

        targets     int64 [num_rows]
        mask        bool [num_rows], False: the row is masked; None: no row is
        names       among "entropy", "logsumexp", "sum_squares", "top_prob" and "top_id"
        detached    ignored: statistics that need no gradient
        reference   must be None, because this source computes no divergence
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
        """Return statistics of the softmax over the rest of each row, the ids that are in no pair.

        "logps" is the log-odds of the target against the rest: its logit minus the logsumexp of the
        rest. It is inf if a row has no rest. See `RowSource.statistics_of_rest`.

        targets              int64 [num_rows]. The logit of a target that is in a pair has no
                             gradient.
        row_ids, token_ids   int64 [num_pairs], (row, id) pairs; the id -1 marks an unused pair
        mask                 bool [num_rows], False: the statistics of the row are 0; None: all True
        names                "entropy" and "sum_squares", of the softmax over the rest
        detached             ignored: statistics that need no gradient

        Returns {name: float64 [num_rows]}, with "logps" and `names`.
        """
        # A last column takes unused pairs, and is cut off.
        is_in_pair = self.logits.new_zeros(self.num_rows, self.vocab_size + 1, dtype=torch.bool)
        columns = torch.where(token_ids >= 0, token_ids, self.vocab_size)
        is_in_pair = is_in_pair.index_put((row_ids, columns), is_in_pair.new_ones(()))
        is_in_pair = is_in_pair[:, : self.vocab_size]
        if mask is None:
            mask = torch.ones_like(targets, dtype=torch.bool)
        logits = torch.where(is_in_pair, -torch.inf, self.logits)
        # A row without a rest gets finite numbers, which no gradient reaches.
        is_empty = ~mask | (logits == -torch.inf).all(1)
        logits = torch.where(is_empty[:, None], 0.0, logits)
        logps = logits.log_softmax(1)
        probs = logps.exp()
        target_ids = torch.where(mask, targets, 0)[:, None]
        target_logits = self.logits.gather(1, target_ids)[:, 0]
        target_is_in_pair = is_in_pair.gather(1, target_ids)[:, 0]
        target_logits = torch.where(target_is_in_pair, target_logits.detach(), target_logits)
        log_odds = torch.where(is_empty, torch.inf, target_logits - logits.logsumexp(1))
        statistics = {
            "logps": torch.where(target_logits == -torch.inf, -torch.inf, log_odds),
            "entropy": -(probs * torch.where(logits == -torch.inf, 0.0, logps)).sum(1),
            "sum_squares": probs.square().sum(1),
        }
        statistics = {name: torch.where(mask, x, 0.0) for name, x in statistics.items()}
        return {name: statistics[name] for name in ("logps", *names)}

    def logits_at(self, row_ids: Tensor, token_ids: Tensor) -> Tensor:
        """Return the logit of each (row, id) pair, float64 [num_pairs], and -inf for the id -1.

        row_ids, token_ids   int64 [num_pairs]
        """
        logits = self.logits[row_ids, token_ids.clamp(min=0)]
        return torch.where(token_ids >= 0, logits, -torch.inf)


class PublicFunctionSource:
    """A row source with the statistics of a public function, for subclasses.

    The statistics of the rest of a row, which no public function has, are those of the package's
    own row source.
    """

    def call(self, targets: Tensor, **keywords: Any) -> TokenLogprobs:
        """Return the log-probs and statistics of these rows, from the public function.

        keywords   of the public function
        """
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
        """Return "logps" and the statistics `names` by name, [num_rows] each.

        The numbers are those that the public function returns. See `RowSource.statistics`.

        detached, reference   ignored: everything has its gradient, and there is no divergence
        """
        also = tuple(name for name in names if name != "entropy")
        result = self.call(targets, mask=mask, entropy=True, also=also)
        assert result.entropy is not None
        statistics = {"logps": result.logps, "entropy": result.entropy, **result.also}
        return {name: statistics[name] for name in ("logps", *names)}

    def statistics_of_rest(self, *arguments: Any, **keywords: Any) -> dict[str, Tensor]:
        """Return what `RowSource.statistics_of_rest` of the package returns."""
        return self.package_source().statistics_of_rest(*arguments, **keywords)


@dataclass(eq=False)
class LogitsSource(PublicFunctionSource):
    """Rows of logits in fp32, bf16 or fp16, [num_rows, V]."""

    logits: Tensor

    def call(self, targets: Tensor, **keywords: Any) -> TokenLogprobs:
        return token_logprobs(self.logits, targets, **keywords)

    def package_source(self) -> RowSource:
        """Return the package's row source of these logits."""
        return GivenLogits(self.logits[None], TRANSFORMED, pick("auto", self.logits.device))

    def logits_at(self, row_ids: Tensor, token_ids: Tensor) -> Tensor:
        """Return the logit of each (row, id) pair, fp32 [num_pairs], and -inf for the id -1."""
        return Float64Source(self.logits).logits_at(row_ids, token_ids).float()


@dataclass(eq=False)
class LinearSource(PublicFunctionSource):
    """Rows of logits hidden @ weight.T: hidden [num_rows, H], weight [V, H]."""

    hidden: Tensor
    weight: Tensor

    def call(self, targets: Tensor, **keywords: Any) -> TokenLogprobs:
        return linear_logprobs(self.hidden, self.weight, targets, **keywords)

    def package_source(self) -> RowSource:
        """Return the package's row source of these hidden states and this weight."""
        projection = Projection(
            self.hidden, self.weight, None, TRANSFORMED, matmul_dtype=self.hidden.dtype
        )
        return ProjectedLogits(projection, pick("auto", self.hidden.device))

    def logits_at(self, row_ids: Tensor, token_ids: Tensor) -> Tensor:
        """Return the logit of each (row, id) pair, fp32 [num_pairs], and -inf for the id -1."""
        is_used = token_ids >= 0
        hidden = torch.where(is_used[:, None], self.hidden[row_ids], 0.0).float()
        weight = self.weight[token_ids.clamp(min=0)].float()
        return torch.where(is_used, (hidden * weight).sum(1), -torch.inf)
