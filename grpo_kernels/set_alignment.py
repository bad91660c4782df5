"""A warning for candidate sets that do not belong to the targets of their rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .batch import HostCopy, sends_counts_early
from .checks import is_capturing, warn_once

#: From this share of trained targets outside of their sets on there is a warning.
MOST_OUTSIDE = 0.05
#: Batches with fewer trained targets are not judged: in these a few damaged records are a large
#: share.
FEWEST_TARGETS = 100


class _Reading(NamedTuple):
    """What a metric was. `numbers` is fp32 [2]: the share outside of the sets, and the number of
    trained targets.

    sent   the copy of `numbers` to the host; None for tensors on a CPU.
    """

    numbers: Tensor
    sent: HostCopy | None


_earlier: _Reading | None = None


def warn_of_misaligned_sets(share: Tensor, tokens: Tensor) -> None:
    """Warn once per process if an earlier call had a share of more than MOST_OUTSIDE.

    share, tokens   0-d fp32, `metrics["outside_set"]` and `metrics["tokens"]`.

    The numbers of a call are looked at in a later call. On a GPU they are copied to the host
    without waiting, and looked at once the copy has arrived.
    """
    global _earlier
    if _earlier is not None:
        sent = _earlier.sent
        if sent is not None and not sent.event.query():
            return
        _judge(*(_earlier.numbers if sent is None else sent.sent).tolist())
        _earlier = None
    device = share.device
    if is_capturing(device) or torch.compiler.is_compiling():
        return
    if sends_counts_early(device):
        numbers = torch.stack([share, tokens])
        _earlier = _Reading(numbers, HostCopy(numbers))
    elif device.type == "cpu":
        _earlier = _Reading(torch.stack([share, tokens]), None)


def _judge(share: float, tokens: float) -> None:
    if share <= MOST_OUTSIDE or tokens < FEWEST_TARGETS:
        return
    warn_once(
        f"{share:.0%} of the targets of a batch are outside of their candidate sets"
        ' (metrics["outside_set"]): the sets probably belong to other rows, and the loss is then'
        " wrong. The set of a token goes to the row that predicts it, one before: make targets,"
        " generated = shift_targets(ids, mask=completion_mask), then TokenSets.from_lists(records,"
        " generated=generated), or shift_sets for records of every token.",
        key="misaligned candidate sets",
    )
