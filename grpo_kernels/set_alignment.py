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
    """The metrics of an earlier call, which have not been compared with the limits yet.

    numbers   fp32 [2]: the share of targets outside of their sets, and the number of trained
              targets
    sent      the copy of `numbers` to the host, which may be under way; None for tensors on a CPU
    """

    numbers: Tensor
    sent: HostCopy | None


_earlier: _Reading | None = None


def warn_of_misaligned_sets(share: Tensor, tokens: Tensor) -> None:
    """Warn once per process if many targets of an earlier call are outside of their sets.

    The numbers of a call are only stored, and a later call compares them with the limits. By then
    they have been copied from the GPU, so that the host does not wait for it.

    share    0-d fp32, `metrics["outside_set"]`: share of trained targets outside of their sets
    tokens   0-d fp32, `metrics["tokens"]`: number of trained targets
    """
    global _earlier
    if _earlier is not None:
        sent = _earlier.sent
        if sent is not None and not sent.event.query():
            return  # the copy has not arrived yet
        numbers = _earlier.numbers if sent is None else sent.sent
        earlier_share, earlier_tokens = numbers.tolist()
        _warn_above_limits(earlier_share, earlier_tokens)
        _earlier = None
    device = share.device
    # The host can read nothing while a CUDA graph is captured or torch.compile traces.
    if is_capturing(device) or torch.compiler.is_compiling():
        return
    if sends_counts_early(device):
        numbers = torch.stack([share, tokens])
        _earlier = _Reading(numbers, HostCopy(numbers))
    elif device.type == "cpu":
        _earlier = _Reading(torch.stack([share, tokens]), None)


def _warn_above_limits(share: float, tokens: float) -> None:
    """Warn once per process if the share is above MOST_OUTSIDE, with enough tokens to tell."""
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
