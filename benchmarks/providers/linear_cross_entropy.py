"""torch's own linear_cross_entropy (torch 2.13 and later) with its options; also eager PyTorch and torch.compile of the same
loss. It computes a cross-entropy. So it is compared on that contract, and with reduction="none" as the log-probs of a policy's
loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.cases import HALF, HiddenCase, Result, policy_loss
from benchmarks.providers import Unavailable, provider
from benchmarks.providers.pytorch import compiled, whole_logits

Tensor = torch.Tensor
Call = Callable[[], Result]

#: Arguments of LinearCrossEntropyOptions by name. None: no options, all logits at a time. Sums are fp32, as with "auto".
OPTIONS: dict[str, dict[str, Any] | None] = {
    "": None,
    "auto": {},
    "accurate": {"acc_policy": "accurate"},
    "compact": {"acc_policy": "compact"},
    "chunks of 256 rows": {"batch_chunk_size": 256},
}


def _function(how: dict[str, Any] | None, dtype: torch.dtype) -> Callable[..., Tensor]:
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy, 2.13 has")
    if how is None:
        return function
    sums = {"acc_dtype": torch.float32} if dtype in HALF else {}
    options = torch.nn.LinearCrossEntropyOptions(**how, **sums)  # type: ignore[attr-defined]
    return lambda *tensors, **kwargs: function(*tensors, options=options, **kwargs)


def _mean(how: dict[str, Any] | None) -> Callable[[HiddenCase], Call]:
    def make(case: HiddenCase) -> Call:
        function = _function(how, case.cell.dtype)
        return lambda: case.gradients(function(case.hidden, case.weight, case.batch.targets))

    return make


def _with_loss(how: dict[str, Any] | None) -> Callable[[HiddenCase], Call]:
    def make(case: HiddenCase) -> Call:
        function = _function(how, case.cell.dtype)

        def run() -> Result:
            logps = -function(case.hidden, case.weight, case.batch.targets, reduction="none")
            return case.gradients(policy_loss(logps, case.batch, case.cell.beta))

        return run

    return make


for _name, _how in OPTIONS.items():
    _label = f"torch linear_cross_entropy{_name and ', ' + _name}"
    _memory = whole_logits if _how is None else None
    provider(_label, "cross-entropy", memory=_memory)(_mean(_how))
    if _name in ("", "auto"):
        # In chunks it takes minutes on a CPU with reduction="none" and 16 bits.
        _devices = ("cpu", "cuda") if _how is None else ("cuda",)
        provider(f"{_label} + loss", "hidden", memory=_memory, devices=_devices)(_with_loss(_how))


def _eager(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), targets)


@provider("eager PyTorch", "cross-entropy", memory=whole_logits)
def eager(case: HiddenCase) -> Call:
    return lambda: case.gradients(_eager(case.hidden, case.weight, case.batch.targets))


@provider("torch.compile", "cross-entropy", memory=whole_logits)
def compiled_cross_entropy(case: HiddenCase) -> Call:
    function = compiled(_eager)
    return lambda: case.gradients(function(case.hidden, case.weight, case.batch.targets))
