"""TRL's fused LM head on our kernels: log-probs and entropy of every TRL trainer that is built on it.

    from grpo_kernels.integrations.trl_head import fused_lm_head

    with fused_lm_head() as slot:
        trainer.train()
    print(slot.counts)          # Counter({'fused': 120})

TRL looks its function up in a module global, `trl.trainer.utils._ChunkedLogProbFunction`. There is no slot on an instance,
so this one is replaced for all trainers of the process, on request only, and put back by `undo()` or at the end of `with`.
It sits below masks, label shifts, gathers, PEFT, images and mixtures of experts, which stay TRL's. With one exception: of a
head that FSDP2 shards TRL would keep each rank's own gradient, see `average_gathered`; calls left to TRL get its own.

Written for and tested with TRL 1.16.0. For the whole loss in one pass see `integrations.trl`.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch

from ..logprobs import linear_logprobs
from ..transform import LogitTransform
from ._slots import DTYPES, OVERRIDE

Tensor = torch.Tensor

#: What these adapters were tested with: (major, minor).
TESTED = (1, 16)
SLOT = "_ChunkedLogProbFunction"


def check_version(any_version: bool = False) -> None:
    """Raise RuntimeError for a TRL that these adapters were not tested with, unless any_version."""
    import trl

    known = tuple(int(part) if part.isdecimal() else -1 for part in trl.__version__.split(".")[:2])
    if known == TESTED or any_version or os.environ.get(OVERRIDE, "0") == "1":
        return
    raise RuntimeError(
        f"trl is {trl.__version__}, but this adapter was tested with {TESTED[0]}.{TESTED[1]} only: install that one, or pass "
        f"any_version=True (or set {OVERRIDE}=1) and compare your first steps with and without it."
    )


def fused_lm_head(*, strict: bool = False, any_version: bool = False) -> LmHeadSlot:
    """Put `linear_logprobs` into TRL's slot; the result undoes it, by `undo()` or as a context manager.

    strict   True: a call that has to be left to TRL's own function raises RuntimeError instead.
    Raises RuntimeError for a version of TRL that is not known, unless any_version, and where the slot is taken already."""
    check_version(any_version)
    from trl.trainer import utils

    theirs = getattr(utils, SLOT, None)
    if isinstance(theirs, LmHeadSlot):
        raise RuntimeError("the fused LM head of TRL is ours already: call undo() on what fused_lm_head() returned.")
    if not (isinstance(theirs, type) and issubclass(theirs, torch.autograd.Function)):
        raise RuntimeError(f"trl.trainer.utils.{SLOT} is {theirs!r}: another package has taken the slot, or this TRL has none.")
    slot = LmHeadSlot(theirs, strict)
    setattr(utils, SLOT, slot)
    return slot


class LmHeadSlot:
    """Takes the place of `theirs`, TRL's autograd function: `apply` has its arguments and its five results. `strict` as in
    `fused_lm_head`.

    counts   Counter of calls: "fused", or "TRL: " and the reason why TRL's own function was called.
    """

    def __init__(self, theirs: Any, strict: bool = False) -> None:
        self.theirs, self.strict, self.undone = theirs, strict, False
        self.counts: Counter[str] = Counter()

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> tuple[Tensor | None, ...]:
        """(log-probs, entropy or None, None, None, None), fp32 [N], of hidden [N, H], weight [V, H], bias [V] and targets
        [N]. A row whose target is -100 gives 0.

        temperature, final_logit_softcapping, logit_scale   as in `LogitTransform`.
        outputs      what TRL wants beside the log-probs: "entropy"; anything else is left to TRL.
        chunk_size   not needed."""
        reason = self._reason(hidden, weight, logit_scale, outputs)
        if reason is not None:
            self.counts[f"TRL: {reason}"] += 1
            if self.strict:
                raise RuntimeError(f"strict=True, but this call of the fused LM head is left to TRL: {reason}.")
            return self.theirs.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )
        self.counts["fused"] += 1
        average_gathered(weight)
        if bias is not None:
            average_gathered(bias)
        logps, entropy = linear_logprobs(
            hidden, weight, targets.clamp(min=0), bias=bias, entropy="entropy" in outputs,
            transform=LogitTransform(float(temperature), final_logit_softcapping, float(logit_scale)),
        )  # fmt: skip
        counted = targets >= 0
        logps = torch.where(counted, logps, 0.0)
        return logps, None if entropy is None else torch.where(counted, entropy, 0.0), None, None, None

    @staticmethod
    def _reason(hidden: Tensor, weight: Tensor, scale: float, outputs: tuple[str, ...]) -> str | None:
        others = sorted(set(outputs) - {"log_probs", "entropy"})
        if others:
            return f"{', '.join(others)} asked for"
        if hasattr(weight, "ds_id"):
            return "a head under DeepSpeed ZeRO-3 is gathered for TRL's own backward only"
        if hidden.dtype not in DTYPES or weight.dtype not in DTYPES:
            return f"dtypes {hidden.dtype} and {weight.dtype}"
        return "logit_scale is 0" if scale == 0 else None

    def undo(self) -> None:
        """Give the slot back; once it is, nothing more happens. Raises RuntimeError if someone else has it now."""
        if self.undone:
            return
        from trl.trainer import utils

        if getattr(utils, SLOT, None) is not self:
            raise RuntimeError("the slot of TRL's fused LM head is not ours any more: undo in the reverse order of patching.")
        setattr(utils, SLOT, self.theirs)
        self.undone = True

    def __enter__(self) -> LmHeadSlot:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.undo()
        except RuntimeError:
            if error is None:  # what went wrong in the block says more
                raise


def gathered(parameter: Tensor) -> Tensor:
    """The whole of a parameter that FSDP2 keeps in shards (a plain one as it is). Its gradient becomes the mean over ranks,
    as FSDP has it for all others, and is scattered back."""
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import Partial

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    whole = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)  # summed over ranks
    if whole.requires_grad:
        whole.register_hook(lambda gradient: gradient / mesh.size())
    return whole


def average_gathered(whole: Tensor) -> None:
    """`whole` may come from TRL's plain `full_tensor()`, which takes its gradient for the same on all ranks: each would keep
    that of its own data for its own shard. Make it the mean, which is.

    Calls of our own function only: those that `LmHeadSlot` leaves to TRL (counted "TRL: ...") have TRL's gradient, unmended."""
    spec = getattr(whole.grad_fn, "dtensor_spec", None)
    if spec is None or getattr(whole.grad_fn, "grad_placements", None) is not None:
        return
    mesh = spec.mesh

    def average(gradient: Tensor) -> Tensor:
        gradient = gradient / mesh.size()
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(gradient, group=mesh.get_group(dim))
        return gradient

    whole.register_hook(average)
