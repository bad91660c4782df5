"""TRL's fused LM head on our kernels: log-probs and entropy of every TRL trainer that uses it.

    from grpo_kernels.integrations.trl_head import fused_lm_head

    with fused_lm_head() as slot:
        trainer.train()
    print(slot.counts)          # Counter({'fused': 120})

TRL looks its function up in a module global, `trl.trainer.utils._ChunkedLogProbFunction`. It cannot be replaced for a single
trainer, so it is replaced for all trainers of the process, on request only, and restored by `undo()` or at the end of `with`.
Masks, label shifts, gathers, PEFT, images and mixtures of experts are handled above it and remain TRL's. There are two
exceptions. First, for a head that FSDP2 shards the gradient is averaged over the ranks; in calls left to TRL each rank keeps
its own, see `average_gathered`. Second, on a CPU TRL also passes padding and prompts to its function, to keep the shapes of its
tiles. While it is replaced, TRL passes only the rows that it needs, as it does on a GPU.

Written for TRL 1.16.0 and tested with it, and with 1.15.0. TRL 1.14 has the function too, with log-probs and entropy alone: there
trainers call it with use_liger_kernel=True. For the whole loss in one pass see `integrations.trl`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from ..logprobs import linear_logprobs
from ..specs import LogitTransform
from ._shared import plain
from ._slots import NotCovered, Ragged, untested

Tensor = torch.Tensor

#: What these adapters were tested with.
TESTED = ("1.15", "1.16")
SLOT = "_ChunkedLogProbFunction"
EVERY_OUTPUT = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
#: TRL's names of outputs -> the statistic of `linear_logprobs(also=)` from which they are computed.
FUSED_OUTPUTS = {"entropy": None, "log_sum_sq_probs": "sum_squares", "is_top1": "top_id"}


def fused_lm_head(*, strict: bool = False, any_version: bool = False) -> Ragged:
    """Replace TRL's function of its fused head by `linear_logprobs`. The returned `Ragged` restores it, by `undo()` or as a
    context manager, and its `counts` tell which calls were "fused", and which ran in TRL and why.

    strict   True: a call that TRL's own function has to handle raises RuntimeError, and so does the end of a `with` block in
             which TRL did not call ours.
    any_version   True: under a version that was not tested, skip the comparison with TRL's own function, see `_slots.Trial`.
    Raises RuntimeError for a TRL whose function has other arguments, if the function is replaced already, and in the first step
    if that comparison fails."""
    version = untested("trl", TESTED, any_version)
    import trl
    from trl.trainer import utils

    theirs = getattr(utils, SLOT, None)
    if getattr(theirs, "grpo_kernels", False):
        raise RuntimeError("the fused LM head of TRL is ours already: call undo() on what fused_lm_head() returned.")
    if not (isinstance(theirs, type) and issubclass(theirs, torch.autograd.Function)):
        raise RuntimeError(
            f"trl.trainer.utils.{SLOT} is {theirs!r}: another package has taken the slot (undo that), or this TRL has none (trl is "
            f"{trl.__version__}: install {TESTED[-1]})."
        )
    arguments = _names(theirs.forward)[1:]
    # The first is called last_hidden or hidden, and passed by position.
    ours = next((one for one in (log_probs, log_probs_and_entropy) if _names(one)[1:] == arguments[1:]), None)
    if ours is None:
        raise RuntimeError(
            f"trl is {trl.__version__}, whose trl.trainer.utils.{SLOT} takes ({', '.join(arguments)}), but ours takes "
            f"({', '.join(_names(log_probs))}) and returns as many results as there are in TRL {TESTED[-1]}: install that one."
        )
    slots = Ragged("trl", strict, "TRL", version)
    slots.bind(utils.__name__, SLOT, ours, attribute="apply")
    if hasattr(utils, "_use_triton"):  # from 1.16 on
        slots.put(utils, "_use_triton", _wanted_rows_only(utils._use_triton))
    return slots


def _names(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _wanted_rows_only(theirs: Callable[[torch.device], bool]) -> Callable[[torch.device], bool]:
    """TRL's forward calls this to know whether to pass only the rows with a label. Its kernels use another name for it."""
    return lambda device: device.type == "cpu" or theirs(device)


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = EVERY_OUTPUT,
) -> tuple[Tensor | None, ...]:
    """(log-probs, entropy, log of the sum of squared probabilities, None, whether the target is the largest logit), fp32 and
    bool [N], of hidden [N, H], weight [V, H], bias [V] and targets [N]: what `apply` of TRL's autograd function gives, with
    None for what `outputs` does not ask for. A row whose target is -100 gives 0.

    temperature, final_logit_softcapping, logit_scale   as in `LogitTransform`.
    outputs      what TRL asks for besides the log-probs: "entropy", "log_sum_sq_probs", "is_top1"; "mean_logits" is left to TRL.
    chunk_size   not needed."""
    others = sorted(set(outputs) - {"log_probs", *FUSED_OUTPUTS})
    if others:
        raise NotCovered(f"{', '.join(others)} asked for")
    if hasattr(weight, "ds_id"):
        raise NotCovered("a head under DeepSpeed ZeRO-3 is gathered for TRL's own backward only")
    plain(hidden, weight)
    if logit_scale == 0:
        raise NotCovered("logit_scale is 0")
    average_gathered(weight)
    if bias is not None:
        average_gathered(bias)
    also = tuple(statistic for output, statistic in FUSED_OUTPUTS.items() if statistic and output in outputs)
    logps, entropy, *found = linear_logprobs(
        hidden, weight, targets.clamp(min=0), bias=bias, entropy="entropy" in outputs, also=also,
        transform=LogitTransform(float(temperature), final_logit_softcapping, float(logit_scale)),
    )  # fmt: skip
    statistics: dict[str, Tensor] = found[0] if found else {}
    counted = targets >= 0

    def of_counted(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.where(counted, x, 0.0)

    squares, top = statistics.get("sum_squares"), statistics.get("top_id")
    log_squares = None if squares is None else of_counted(squares.detach().log())
    return of_counted(logps), of_counted(entropy), log_squares, None, None if top is None else (top == targets) & counted


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor | None, ...]:
    """What `apply` gives in TRL 1.14: the first two results of `log_probs`."""
    given = hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale
    return log_probs(*given, outputs=("entropy",))[:2]


def gathered(parameter: Tensor) -> Tensor:
    """The full tensor of a parameter that FSDP2 shards; a plain parameter is returned as it is. Its gradient is averaged over
    the ranks, as FSDP does for all other parameters, and scattered back."""
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import Partial

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    whole = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)  # summed over ranks
    if whole.requires_grad:
        whole.register_hook(lambda gradient: gradient / mesh.size())
    return whole


def average_gathered(whole: Tensor) -> None:
    """`whole` may come from TRL's plain `full_tensor()`, whose backward expects the same gradient on all ranks: from its own
    gradient each rank would keep the part for its shard. So the gradient is averaged over the ranks here.

    This holds for calls of our function only: calls that run in TRL (counted "TRL: ...") keep TRL's gradient."""
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
