"""miles: its log-probs of given logits, which are Megatron's cross-entropy of a vocabulary cut over ranks, with the loss in torch.
Here there is one rank, which has nothing to exchange. miles has no kernel of its own for a loss."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch.distributed

from benchmarks.cases import LogitsCase, Result, policy_loss
from benchmarks.providers import peer, provider

ALONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


@provider("miles log-probs (Megatron, torch.compile) + loss", "logits")
def logprobs(case: LogitsCase) -> Callable[[], Result]:
    nll = peer("megatron.core.fusions.fused_cross_entropy", "megatron-core").fused_vocab_parallel_cross_entropy

    def run() -> Result:
        with mock.patch.object(torch.distributed, "all_reduce"):
            # Its forward overwrites logits of fp32. [sequence, batch, vocabulary]
            logps = -nll(case.output()[:, None], case.batch.targets[:, None], ALONE)[:, 0]
        return case.gradients(policy_loss(logps, case.batch, case.cell.beta))

    return run
