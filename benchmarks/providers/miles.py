"""miles: its log-probs of given logits, which are Megatron's cross-entropy of a vocabulary cut over ranks. Here there is one
rank, which has nothing to exchange. miles has no kernel of its own for a loss."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch.distributed

from benchmarks.cases import Case, Tensor
from benchmarks.providers import Logps, logps_provider, peer

ALONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


@logps_provider("miles log-probs (Megatron, torch.compile)", "logits")
def logprobs(case: Case) -> Logps:
    nll = peer("megatron.core.fusions.fused_cross_entropy", "megatron-core").fused_vocab_parallel_cross_entropy

    def run(_: Tensor) -> Tensor:
        with mock.patch.object(torch.distributed, "all_reduce"):
            # Its forward overwrites logits of fp32. [sequence, batch, vocabulary]
            return -nll(case.output()[:, None], case.batch.targets[:, None], ALONE)[:, 0]

    return run
