"""Partials and slopes for tests that call a backend's functions directly."""

from __future__ import annotations

import torch

from grpo_kernels.vocabulary.rows import RowStats, Slopes, partials_of

Tensor = torch.Tensor

LOGPS = partials_of(())
WITH_ENTROPY = partials_of(("entropy",))
EVERYTHING = partials_of(("entropy", "sum_squares", "top_id"))


def slopes_of(stats: RowStats, d_logps: Tensor, d_entropy: Tensor | None = None, d_squares: Tensor | None = None) -> Slopes:
    """The slopes that these derivatives of log-probs, entropy and sum of squares give."""
    given = {"logps": d_logps, "entropy": d_entropy, "sum_squares": d_squares}
    values = {name: getattr(stats, name) for name in ("entropy", "sum_squares") if given[name] is not None}
    return Slopes.of(values, {name: x for name, x in given.items() if x is not None})
