"""TRL's GRPOTrainer with its loss in one pass: log-probs, loss and gradient are computed together in the head, inside the model's
forward.

    from grpo_kernels.integrations.trl import FusedGRPOTrainer     # in place of trl.GRPOTrainer, same arguments

    trainer = FusedGRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(...), train_dataset=...)
    trainer.train()
    print(trainer.fused_loss.counts)                               # Counter({'fused': 400, 'scored': 100})

or, for an existing trainer, `fused = patch(trainer)`, and `fused.undo()` to restore it.

How it works. TRL's own `_compute_loss` still runs. It calls the model with one more argument, the batch and its objective, which
passes through DDP, FSDP, PEFT and accelerate to the model's forward. There `linear_grpo_loss` computes the loss and the gradient of
the head in one call. TRL gets log-probs and entropies without a graph, so its arithmetic on [B, T] costs almost nothing and still
gives all of its metrics, the adaptive entropy coefficient and its value of the loss. Strict mode compares this value, and its
gradient on [B, T], with ours.

Log-probs of the old policy and of the reference, which TRL computes without gradients, are "scored" by `linear_logprobs`.

Replay. vLLM's log-probs are over the tokens that top-k and top-p kept, but TRL scores over the whole vocabulary. With
`patch(trainer, replay=True)` the sets of the generation (`sampling_mask`: from vLLM in this process, or an extra field of a
rollout_func) are used for every log-prob of the run: old policy, reference and loss. The entropies that TRL logs are then those
over the sets.

Written for TRL 1.16.0 and tested with it, and with 1.15.0; transformers 5.23, PEFT 0.21.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from typing import Any

import torch

from ..architectures import language_model
from ..formulas.token_stage import TokenRows
from ..rows.selection import Sparse
from ..specs import Options
from . import _trl_specs as specs
from ._slots import Trial, untested
from ._trial import Differs, alike
from ._trl_forward import Forward, LossCall
from ._trl_replay import Replay
from .trl_head import TESTED, fused_lm_head

__all__ = ["FusedGRPOTrainer", "FusedLoss", "fused_lm_head", "patch"]  # noqa: F822

Tensor = torch.Tensor
LOSS = "GRPOTrainer._compute_loss"


def patch(
    trainer: Any, *, strict: bool = False, skip_inactive: bool = False, replay: bool = False, sparse_step: float = 0.0,
    any_version: bool = False,
) -> FusedLoss:  # fmt: skip
    """Make this GRPOTrainer, and no other, compute its loss in one pass. Call it after the trainer is made, before `train()` or
    between two calls of it. The result, which is also `trainer.fused_loss`, counts the paths and can undo the patch.

    strict         True: a configuration that needs TRL's own loss raises RuntimeError at the first step. So does a step whose
                   loss, or its gradient with respect to log-probs and entropies, differs from TRL's arithmetic on the same
                   log-probs (in evaluation only the loss is compared). False: such a configuration runs in TRL's code, warns
                   once and is counted.
    skip_inactive  True: tokens that cannot have a gradient (advantage or weight 0, neither KL nor entropy bonus, token level)
                   are not projected, unless a micro-batch has no other tokens. The entropy that TRL logs is then the mean over the
                   projected tokens, and a token of weight 0 counts as not clipped. Nothing else in TRL's log changes.
                   False: they are projected in the forward, for the metrics, but not in the backward.
    replay         True: completions are scored and trained over the sets that their tokens were sampled from, as vLLM in this
                   process or a rollout_func returns them; generation without them raises RuntimeError, and so does a
                   configuration that has to be left to TRL's own loss.
    sparse_step    not 0: the gradient of the head uses only columns drawn on a grid of this probability
                   (`grpo_kernels.Sparse`). Each micro-batch has its own seed, derived from args.seed, the step and the process.
    any_version    True: accept a version of TRL that was not tested, without the comparison below.

    Under a version that was not tested, the first step is also computed by TRL's own head (not with replay) and arithmetic. If
    log-probs, loss and slopes agree, one warning says so. Otherwise the patch is undone, and RuntimeError names the difference
    before any gradient is computed.

    Raises TypeError for an object that is not a GRPOTrainer, RuntimeError for one that is patched already or has another
    loss or forward than TRL's, and ValueError for a head that is not a plain Linear, such as one with a LoRA.
    """
    version = check_trl(any_version)
    from trl import GRPOTrainer

    if not isinstance(trainer, GRPOTrainer):
        raise TypeError(f"trainer is a {type(trainer).__name__}: pass a trl.GRPOTrainer.")
    if "fused_loss" in vars(trainer):
        raise RuntimeError("this trainer is patched already: call trainer.fused_loss.undo() first.")
    if "_compute_loss" in vars(trainer) or type(trainer)._compute_loss is not GRPOTrainer._compute_loss:
        raise RuntimeError(
            f"{type(trainer).__name__} has a _compute_loss of its own, which this patch would replace by GRPOTrainer's: for the "
            "log-probs of any trainer use integrations.trl.fused_lm_head."
        )
    return FusedLoss(trainer, strict, skip_inactive, replay, version, sparse_step)


def check_trl(any_version: bool = False) -> str | None:
    """The result of `untested` for the installed TRL. Raises RuntimeError for a version that cannot be patched."""
    version = untested("trl", TESTED, any_version)
    import trl
    from trl.trainer import utils

    if not hasattr(utils, "add_fused_lm_head"):
        raise RuntimeError(
            f"trl is {trl.__version__}, which has no fused LM head in the forward of its models (trl.trainer.utils.add_fused_lm_head), "
            f"so that there is no place for the whole loss: install TRL {TESTED[-1]}, or train with use_liger_kernel=True: then TRL 1.14 "
            "takes our log-probs by integrations.trl_head.fused_lm_head(), TRL 0.17 to 1.13 our loss by "
            "integrations.liger_slot.patch(trainer)."
        )
    return version


class FusedLoss:
    """What `patch` returns.

    counts   Counter of micro-batches and calls:
             "fused"          losses in one pass
             "scored"         forwards without gradients (old policy, reference) through `linear_logprobs`
             "TRL: <reason>"  losses left to TRL's own code
    """

    def __init__(
        self, trainer: Any, strict: bool, skip_inactive: bool, replay: bool = False, version: str | None = None,
        sparse_step: float = 0.0,
    ) -> None:  # fmt: skip
        self.trial = Trial(version, self.undo)
        self.trainer, self.strict, self.skip_inactive, self.sparse_step = trainer, strict, skip_inactive, sparse_step
        self.counts: Counter[str] = Counter()
        self._columns()  # refuses a wrong step now
        self.replay = Replay(trainer) if replay else None
        models = [trainer.model] + [trainer.ref_model] * (trainer.ref_model is not None)
        self._forwards = [
            Forward(language_model(trainer.accelerator.unwrap_model(model)), self.counts, self.replay) for model in models
        ]
        for forward in self._forwards:
            forward.install()
        if self.replay is not None:
            self.replay.install()
        self._theirs = trainer._compute_loss
        trainer._compute_loss = self._compute_loss
        trainer.fused_loss = self

    def undo(self) -> None:
        """Restore the trainer and its models. Raises RuntimeError on a second call."""
        if vars(self.trainer).get("fused_loss") is not self:
            raise RuntimeError("this patch was undone already.")
        for forward in self._forwards:
            forward.remove()
        if self.replay is not None:
            self.replay.remove()
        del self.trainer._compute_loss, self.trainer.fused_loss

    # ---- the loss of a micro-batch

    def _columns(self) -> Sparse | None:
        """How columns are drawn for the gradient of the head; None: the gradient is dense."""
        if not self.sparse_step:
            return None
        trainer, processes = self.trainer, self.trainer.accelerator
        step = trainer.args.seed * 1_000_003 + trainer.state.global_step
        seed = (step * processes.num_processes + processes.process_index << 20) + self.counts["fused"] % (1 << 20)
        return Sparse(self.sparse_step, seed)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        trainer = self.trainer
        reason, objective = specs.objective_of(specs.Settings.of(trainer))
        if objective is None:
            self.counts[f"TRL: {reason}"] += 1
            message = f"the loss of this configuration is left to TRL's own code: {reason}."
            if self.strict or self.replay is not None:
                raise RuntimeError(f"{'strict' if self.strict else 'replay'}=True, but {message}")
            if self.counts[f"TRL: {reason}"] == 1:
                warnings.warn(message, stacklevel=2)
            return self._theirs(model, inputs)

        batch = specs.token_batch(trainer, inputs, objective)
        # If no token is active, all are projected: the mean entropy that TRL logs needs some tokens.
        first = self.trial.pending(LOSS)
        skip = self.skip_inactive and not first and objective.one_pass and batch.count(objective.active_rows) > 0
        options = Options(skip_inactive=skip, sparse=self._columns())
        call = LossCall(batch, objective, specs.denominator(trainer, inputs, batch), options, with_graph=self.strict or first)
        theirs = self._theirs(call.through(model, self._trls_own if first and self.replay is None else None), inputs)
        assert call.output is not None and call.rows is not None
        loss, aux_loss = call.output.loss, call.output.aux_loss
        self.counts["fused"] += 1
        if aux_loss is not None:
            loss = loss + trainer.router_aux_loss_coef * aux_loss / specs.accumulation(trainer)
        if first:
            with self.trial.refusing(LOSS):
                self._check_log_probs(call)
                _check(loss, theirs, call)
            if theirs.requires_grad:
                self.trial.passed(LOSS)
        elif self.strict:
            try:
                _check(loss, theirs, call)
            except Differs as difference:
                raise RuntimeError(
                    f"strict=True, but {difference}: this is a bug of the adapter, or a TRL that it does not know."
                ) from None
        return loss

    def _trls_own(self, model: Any, kwargs: dict[str, Any]) -> Any:
        """The result of TRL's own head for this call of the model, without gradients and with the same random numbers as the
        next call."""
        device = self.trainer.accelerator.device
        for forward in self._forwards:
            forward.active = False
        try:
            with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                return model(**kwargs)
        finally:
            for forward in self._forwards:
                forward.active = True

    def _check_log_probs(self, call: LossCall) -> None:
        if call.own is None:  # replay: TRL scores over the vocabulary
            return
        assert call.read is not None
        mask, found, wanted = call.batch.mask, [], []
        for name, ours in zip(("log_probs", "entropy"), call.read, strict=True):
            if call.own.get(name) is not None:
                theirs = call.own[name][:, -ours.shape[1] :]
                found.append(ours.detach() if mask is None else ours.detach()[mask])
                wanted.append(theirs if mask is None else theirs[mask])
        dtypes = {p.dtype for p in self._forwards[0].model.parameters()}
        coarse = self.trainer.accelerator.mixed_precision != "no" or dtypes != {torch.float32}
        alike("log-probs and entropies", found, wanted, coarse)


def _check(loss: Tensor, theirs: Tensor, call: LossCall) -> None:
    """Raise Differs unless TRL's arithmetic gives the same loss and slopes for the same log-probs."""
    assert call.rows is not None
    _check_value(loss.detach(), theirs.detach(), call.rows)
    if theirs.requires_grad:
        _check_slopes(call, theirs)


def _check_value(ours: Tensor, theirs: Tensor, rows: TokenRows) -> None:
    """Raise Differs unless TRL's loss of the same log-probs is equal. A new version of TRL may have other formulas."""
    if not (ours - theirs).abs() <= 1e-3 * (_size(rows) + theirs.abs()):  # NaN raises too
        raise Differs(
            f"the fused loss is {float(ours):.6g} and TRL's own arithmetic on its log-probs gives {float(theirs):.6g}"
        )


def _check_slopes(call: LossCall, theirs: Tensor) -> None:
    """The same for the gradient, because on-policy the loss is near 0 for any denominator. The absolute differences of all
    tokens are summed, so that a single token whose ratio rounding moves across the edge of the clip range does not raise."""
    assert call.rows is not None and call.read is not None
    gradients = torch.autograd.grad(theirs, call.read, allow_unused=True)
    logps, entropy = (x.detach().reshape(-1) for x in call.read)
    ours = call.objective.token_stage(logps, entropy, call.rows, call.batch)[1:]
    for name, mine, want in zip(("log-probs", "entropies"), ours, gradients, strict=True):
        a, b = (torch.zeros_like(logps) if x is None else x.reshape(-1) for x in (mine, want))
        apart, size = (a - b).abs().sum(), b.abs().sum()
        terms = _size(call.rows) if name == "log-probs" else 0.0  # those of entropies are plain weights
        if not apart <= 1e-3 * (terms + size):
            raise Differs(
                f"the gradient of the fused loss with respect to the {name} is {float(apart):.6g} away, in sum, from "
                f"that of TRL's own arithmetic, which is {float(size):.6g}"
            )


def _size(rows: TokenRows) -> Tensor:
    """The sum of the absolute values of all terms: rounding errors are relative to it, because terms of different sign
    cancel."""
    size = (rows.policy_weight * rows.advantages).abs().sum()
    return size if rows.kl_weight is None else size + rows.kl_weight.sum()


# ---- the subclass, made at first use, because the core and its tests run without TRL


@functools.cache
def _trainer_class() -> type:
    from trl import GRPOTrainer

    class FusedGRPOTrainer(GRPOTrainer):
        """trl.GRPOTrainer, patched as `patch` does it; `strict`, `skip_inactive`, `replay`, `sparse_step` and `any_version` go
        there, args and kwargs to TRL."""

        def __init__(
            self,
            *args: Any,
            strict: bool = False,
            skip_inactive: bool = False,
            replay: bool = False,
            sparse_step: float = 0.0,
            any_version: bool = False,
            **kwargs: Any,
        ) -> None:
            check_trl(any_version)
            super().__init__(*args, **kwargs)
            given = {"strict": strict, "skip_inactive": skip_inactive, "replay": replay, "sparse_step": sparse_step}
            patch(self, **given, any_version=any_version)  # type: ignore[arg-type]

    FusedGRPOTrainer.__module__, FusedGRPOTrainer.__qualname__ = __name__, "FusedGRPOTrainer"
    return FusedGRPOTrainer


def __getattr__(name: str) -> Any:
    if name == "FusedGRPOTrainer":
        return _trainer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
