"""verl: divergences to a teacher's top-k for its registry of distillation losses, computed from the logits by our kernels.

    # my_losses.py
    from grpo_kernels.integrations import verl_distillation
    verl_distillation.register()
    verl_distillation.bind()

    VERL_USE_EXTERNAL_MODULES=my_losses python -m verl.trainer.main_ppo ... \\
        distillation.distillation_loss.loss_mode=fused_reverse_kl_topk \\
        distillation.distillation_loss.use_policy_gradient=False

`register` adds a name for each of LOSSES, or for divergences of your own. verl computes all top-k losses by one function, which is
called in the forward, where the logits are. `bind` replaces this function for our names; verl's own `forward_kl_topk` is still
computed by verl. Our log-probs at the teacher's ids come from one log-sum-exp over the logits, while verl writes a log-softmax
of all logits in their dtype.

`fused_forward_kl_topk` is verl's formula, the sum over the ids alone, without two clamps: that of log-probs at
`log_prob_min_clamp`, which stops their gradient, and that of the value at 0, which stops the gradient of the whole token.
`loss_max_clamp` is applied by verl, in both directions. Metrics are those of verl, except for the overlap of both top-k sets,
which is not measured. The estimators from the sampled token (k1, k3, ...) remain verl's: they do not use the vocabulary.

The strategies fsdp and fsdp2 are supported, also with sequence parallelism. Megatron and VeOmni's fused loss do not pass logits
to this function, and are refused.
Written for verl 0.9.1, tested with it and with 0.9.0, on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..divergences import token_divergence
from ..formulas.divergence import Exact, divergence_at
from ..logprobs import token_logprobs
from ..token_sets import TokenSets
from ._shared import distinct, no_ids, plain
from ._slots import NotCovered, Ragged, untested

Tensor = torch.Tensor

#: The versions that the tests ran with.
TESTED = ("0.9.0", "0.9.1")
#: Names that are registered, with a prefix in front, and their divergences.
LOSSES: Mapping[str, Exact] = {
    "forward_kl_topk": Exact("forward", tail="ignore"),
    "forward_kl_topk_bin": Exact("forward"),
    "forward_kl_topk_renormalised": Exact("forward", tail="renormalise"),
    "reverse_kl_topk": Exact("reverse"),
    "reverse_kl_topk_generalised": Exact("reverse", tail="generalised"),
    "jsd_topk": Exact("jsd"),
}

HOME, SLOT = "verl.trainer.distillation.fsdp.losses", "compute_forward_kl_topk"

_registered: dict[str, Exact] = {}


def register(losses: Mapping[str, Exact] | None = None, prefix: str = "fused_", *, any_version: bool = False) -> list[str]:
    """Add losses to verl's registry, and return their names: `prefix` with each name of `losses` (None: LOSSES). A module that
    is imported twice may register the same again; another divergence under a name raises ValueError. Raises RuntimeError for a
    version of verl that was not tested, unless any_version."""
    _check_version(any_version)
    from verl.trainer.distillation.losses import DistillationLossSettings, register_distillation_loss

    named = {prefix + name: exact for name, exact in (LOSSES if losses is None else losses).items()}
    for name, exact in named.items():
        if not isinstance(exact, Exact):
            raise ValueError(f"losses[{name!r}] is a {type(exact).__name__}: pass an Exact, for example Exact('reverse').")
        if _registered.get(name, exact) != exact:
            raise ValueError(
                f"losses[{name!r}]={exact}, but {_registered[name]} is registered under that name: pass another prefix."
            )
        if name not in _registered:
            register_distillation_loss(DistillationLossSettings(names=[name], use_topk=True))(_loss)
            _registered[name] = exact
    return list(named)


def bind(*, strict: bool = False, any_version: bool = False) -> Ragged:
    """Replace verl's function of top-k losses from logits by ours, for losses that `register` has added. The returned `Ragged`
    restores it, by `undo()` or as a context manager, and counts the calls. strict: a call of another loss raises RuntimeError.
    Raises RuntimeError for a version of verl that was not tested, unless any_version, and where it is replaced already."""
    _check_version(any_version)
    slots = Ragged("verl", strict)
    slots.bind(HOME, SLOT, topk_divergence)
    return slots


def topk_divergence(
    student_logits: Tensor, teacher_topk_log_probs: Tensor, teacher_topk_ids: Tensor, config: Any, data_format: str
) -> dict[str, Tensor]:
    """`distillation_losses`, `student_mass` and `teacher_mass`, fp32 [1, n], of logits [1, n, V] and nested log-probs and ids
    [n, K] of the teacher, as verl's own function takes them. In a sum over the ids alone an id counts as often as it is listed, as
    in verl; a divergence with a tail has each id once, and a row in which one repeats is padding and gets 0.

    config   verl's DistillationConfig, whose loss_mode is one of ours."""
    from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size, slice_input_tensor

    mode: Any = getattr(config.distillation_loss, "loss_mode", None)  # which verl's own function does not read
    exact = _registered.get(mode)
    if exact is None:
        raise NotCovered(f"loss_mode={mode!r}")
    plain(student_logits)
    ids, values = (x.values().unsqueeze(0) for x in (teacher_topk_ids, teacher_topk_log_probs))
    if get_ulysses_sequence_parallel_world_size() > 1:
        ids, values = slice_input_tensor(ids, dim=1), slice_input_tensor(values, dim=1)
    flat, listed = ids.flatten(0, 1), values.flatten(0, 1).to(torch.float32)
    sets, place = distinct(flat)
    targets, alone = no_ids(student_logits[..., 0]), exact.tail == "ignore"
    with torch.set_grad_enabled(alone and torch.is_grad_enabled()):
        scored = token_logprobs(student_logits, targets, at=sets)
    logps = scored[2]["at"][place]  # [rows, K]
    masses = [x.detach().exp().sum(-1) for x in (logps, listed)]
    if alone:
        offsets = torch.arange(len(logps) + 1, device=logps.device) * ids.shape[-1]
        losses = divergence_at(exact, logps.reshape(-1), listed.reshape(-1), offsets)
    else:
        padding = sets.counts < ids.shape[-1]
        known = TokenSets.from_padded(torch.where(padding[:, None], -1, flat), values=listed)
        losses = token_divergence(student_logits, known, exact)
        masses = [x.masked_fill(padding, 0.0) for x in masses]
    found = dict(zip(("distillation_losses", "student_mass", "teacher_mass"), (losses, *masses), strict=True))
    return {name: x.view(targets.shape) for name, x in found.items()}


def _check_version(any_version: bool) -> None:
    """verl has none of these losses, so a first step cannot be compared with verl's own."""
    version = untested("verl", TESTED, any_version)
    if version is not None:
        raise RuntimeError(f"{version}: install verl {TESTED[-1]}, or pass any_version=True.")


def _loss(config: Any, distillation_config: Any, model_output: Any, data: Any) -> tuple[Tensor, dict[str, Any]]:
    """verl's contract of a registered loss: (losses [B, R], metrics), from what the forward has computed."""
    from verl.trainer.distillation import losses as theirs
    from verl.trainer.distillation.fsdp import losses as of_forward
    from verl.workers.utils.padding import no_padding_2_padding

    mode = distillation_config.distillation_loss.loss_mode
    if config.strategy not in ("fsdp", "fsdp2"):
        raise ValueError(
            f"loss_mode={mode!r} with strategy={config.strategy!r}: ours are for fsdp and fsdp2. Take forward_kl_topk."
        )
    if not getattr(getattr(of_forward, SLOT), "grpo_kernels", False):
        raise RuntimeError(
            f"loss_mode={mode!r}, but verl's own function computed it: call verl_distillation.bind() in the same module."
        )
    _, metrics = theirs.compute_forward_kl_topk(config, distillation_config, model_output, data)
    return no_padding_2_padding(model_output["distillation_losses"], data), metrics
