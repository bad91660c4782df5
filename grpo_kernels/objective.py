"""What is minimised: a surrogate, the level of its ratio, a KL term, an entropy bonus and an aggregation.

Everything but the surrogate and the KL estimator is a weight per token: a kernel sees
    loss_t = policy_weight_t * surrogate_t + token_weight_t * (beta * KL_t - entropy_coef * entropy_t)
and nothing about where the weights came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from .batch import TokenBatch, flat, values_are_checked
from .checks import LARGEST, SMALLEST, require, require_number
from .surrogates import KL_ESTIMATORS, Cispo, Clip, PolicyGradient, Surrogate, token_terms

Tensor = torch.Tensor

AGGREGATES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")
LEVELS = ("token", "sequence", "sequence-token")


@dataclass(frozen=True, eq=False)
class TokenRows:
    """The flat rows of a batch with the weights of an objective; every tensor is [n]."""

    targets: Tensor  # int64
    read: Tensor | None  # bool: rows whose logits are looked at; None = all
    advantages: Tensor  # fp32, like all that follow
    old_logps: Tensor | None
    ref_logps: Tensor | None
    policy_weight: Tensor
    token_weight: Tensor
    trained: Tensor | None  # bool: rows where the batch's mask is set; None = all
    active: Tensor | None = None  # bool: trained rows that can have a gradient; None = all

    def __getitem__(self, rows: slice | Tensor) -> TokenRows:
        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows]

        return TokenRows(
            self.targets[rows], cut(self.read), self.advantages[rows], cut(self.old_logps), cut(self.ref_logps),
            self.policy_weight[rows], self.token_weight[rows], cut(self.trained), cut(self.active),
        )  # fmt: skip


@dataclass(frozen=True)
class Objective:
    """A GRPO-family objective.

    surrogate     Clip, Cispo, PolicyGradient or Custom: the per-token policy term.
    level         "token": r_t = exp(logp_t - old_t). "sequence": one ratio per sequence, exp of the mean log-ratio over
                  its trained tokens, with the gradient through the mean (GSPO, arXiv 2507.18071 eq. 5; a surrogate that
                  detaches the ratio keeps its slope at the token). "sequence-token": that ratio in value, but the
                  gradient of each token stays its own (GSPO-token, eq. 14).
    aggregate     how per-token terms become one number, see `normalizer` below:
                  "token-mean"            sum of all tokens / D, D = number of trained tokens
                  "seq-mean-token-mean"   sum of per-sequence means / D, D = B
                  "seq-mean-token-sum"    sum of all tokens / D, D = B
                  "constant"              sum of all tokens / D, D = B * max_tokens (Dr. GRPO, arXiv 2503.20783)
                  A fully masked sequence adds 0 and counts in B.
    beta, kl      weight and estimator ("k1", "k2", "k3", or a function (logp, old, ref) -> (value, slope)) of the KL to
                  the reference. The KL is not multiplied by the batch's weights.
    entropy_coef  weight of the entropy bonus, which is subtracted from the loss.
    max_tokens    the completion budget of "constant", the paper's constant, not the padded length.

    The denominator D is for one process and one micro-batch. Whoever splits a batch passes `normalizer=` to the loss:
    D over all micro-batches and ranks. Raises ValueError naming the field that is wrong.
    """

    surrogate: Surrogate = field(default_factory=Clip)
    level: str = "token"
    aggregate: str = "token-mean"
    beta: float = 0.0
    kl: str | Callable[..., Any] = "k3"
    entropy_coef: float = 0.0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.surrogate, Surrogate):
            raise ValueError(f"surrogate={self.surrogate!r}: pass Clip(), Cispo(), PolicyGradient() or Custom(your_function).")
        if self.level not in LEVELS:
            raise ValueError(f"level={self.level!r}: it must be one of {', '.join(LEVELS)}.")
        if self.aggregate not in AGGREGATES:
            raise ValueError(f"aggregate={self.aggregate!r}: it must be one of {', '.join(AGGREGATES)}.")
        require_number("beta", self.beta, "the KL weight is a finite number >= 0.", 0, LARGEST)
        require(
            callable(self.kl) or self.kl in KL_ESTIMATORS,
            "kl",
            self.kl,
            f"it must be one of {', '.join(KL_ESTIMATORS)} or a function.",
        )
        require_number("entropy_coef", self.entropy_coef, "it must be a finite number.", -LARGEST, LARGEST)
        if self.max_tokens is not None:
            whole = isinstance(self.max_tokens, int) and self.max_tokens >= 1
            require(whole, "max_tokens", self.max_tokens, "the completion budget is a whole number of at least 1 token.")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Objective:
        """A published objective by name (see PRESETS), with fields replaced by `changes`."""
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is unknown: choose one of {', '.join(PRESETS)}.")
        unknown = [f for f in changes if f not in {known.name for known in fields(cls)}]
        if unknown:
            raise TypeError(f"{unknown[0]!r} is not a field of Objective: it has {', '.join(f.name for f in fields(cls))}.")
        return replace(PRESETS[name], **changes)

    @property
    def kl_function(self) -> Callable[..., Any] | None:
        """The KL estimator, or None when beta is 0 and the reference is not looked at."""
        if self.beta == 0:
            return None
        return self.kl if callable(self.kl) else KL_ESTIMATORS[self.kl]

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0

    @property
    def active_rows(self) -> str:
        """Which rows can have a gradient, as `TokenBatch.marked` names them. The others have exactly none."""
        if not self.surrogate.zero_at_zero_advantage or self.beta != 0 or self.entropy_coef != 0:
            return "trained"
        return "sequences" if self.level == "sequence" else "contributing"

    # ---- weights

    def normalizer(self, batch: TokenBatch) -> float | Tensor:
        """The denominator D of one batch (a 0-d tensor for token-mean). Sum it over micro-batches and ranks."""
        if self.aggregate == "token-mean":
            return float(batch.rows) if batch.mask is None else batch.mask.sum().to(torch.float32)
        sequences = self._sequences(batch)
        if self.aggregate != "constant":
            return float(sequences)
        if self.max_tokens is None:
            raise ValueError(
                'max_tokens is None, but aggregate="constant" divides by B * max_tokens: set it to the completion budget '
                '(Objective.preset("dr_grpo", max_tokens=1024)), or pass normalizer= to the loss.'
            )
        return float(sequences * self.max_tokens)

    def _sequences(self, batch: TokenBatch) -> int:
        if batch.sequences is None:
            raise ValueError(
                f'cu_seqlens is None, but aggregate="{self.aggregate}" and level="{self.level}" need to know the sequences of '
                "packed rows: pass cu_seqlens, or padded targets [B, T]."
            )
        return batch.sequences

    def token_rows(self, batch: TokenBatch, normalizer: float | Tensor | None = None, skip_inactive: bool = False) -> TokenRows:
        """Flat rows and their weights. Nothing here waits for the device. Raises ValueError where the batch lacks
        something that the objective needs.

        skip_inactive leaves rows out of `read` that cannot contribute to value or gradient: zero advantage or weight,
        with no KL and no entropy term, at token level."""
        if self.beta != 0 and batch.ref_logps is None:
            raise ValueError(f"ref_logps is None, but beta={self.beta}: pass the reference's log-probs, or set beta=0.")
        if self.level != "token":
            self._sequences(batch)
        if normalizer is None:
            normalizer = self.normalizer(batch)
            if isinstance(normalizer, Tensor):
                normalizer = normalizer.clamp(min=1.0)  # an all-masked batch is 0 / 1
            else:
                normalizer = max(normalizer, 1.0)
        elif isinstance(normalizer, Tensor):
            if normalizer.numel() != 1:
                raise ValueError(f"normalizer has shape {list(normalizer.shape)}: pass a number or a 0-d tensor.")
            if values_are_checked(normalizer):
                number, nothing = float(normalizer), batch.mask is not None and not batch.mask.any()
                if not (0 < number < math.inf or (number == 0 and nothing)):
                    raise ValueError(f"normalizer={number}: the denominator is a finite number above 0.")
            normalizer = normalizer.detach().reshape(()).to(batch.targets.device, torch.float32, non_blocking=True)
        else:
            remedy = "the denominator is a finite number above 0, over all micro-batches and ranks."
            require_number("normalizer", normalizer, remedy, SMALLEST, LARGEST)
        mask = batch.marked("trained")
        if mask is None:
            weight = torch.ones(batch.rows, device=batch.targets.device)
        else:
            weight = mask.to(torch.float32)
        if self.aggregate == "seq-mean-token-mean":
            self._sequences(batch)
            weight = weight / batch.spread(batch.sequence_sum(weight).clamp(min=1.0)).to(torch.float32)
        # Where nothing is trained a given normalizer may be 0, and 0 / 0 must not reach the loss.
        weight = torch.where(weight != 0, weight / normalizer, 0.0)
        advantages, weights = batch.flat("advantages"), batch.flat("weights")
        assert advantages is not None
        policy_weight = weight if weights is None else weight * weights
        active = batch.marked(self.active_rows)
        return TokenRows(
            targets=flat(batch.targets).to(torch.int64),
            read=active if skip_inactive and self.level == "token" else mask,
            advantages=advantages,
            old_logps=batch.flat("old_logps"),
            ref_logps=batch.flat("ref_logps") if self.beta != 0 else None,
            policy_weight=policy_weight,
            token_weight=weight,
            trained=mask,
            active=active,
        )

    # ---- the token stage

    def token_stage(
        self, logps: Tensor, entropy: Tensor | None, rows: TokenRows, batch: TokenBatch | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(losses, d_logps, d_entropy), each fp32 [n] (d_entropy None without a bonus): sum(losses) is the loss.

        logps and entropy are fp32 [n], exactly 0 where masked. `batch` supplies the sequences for sequence levels; a
        token-level objective treats any slice of rows alone."""
        function: Callable[..., Any] = self.surrogate.function
        weight = rows.policy_weight
        if self.level != "token":
            assert batch is not None
            # It applies the weights itself.
            function, weight = self._sequence_surrogate(rows, batch), torch.ones_like(rows.policy_weight)
        losses, d_logps, d_entropy = token_terms(
            logps, logps if rows.old_logps is None else rows.old_logps, rows.ref_logps, entropy, rows.advantages,
            weight, rows.token_weight, self.beta, self.entropy_coef,
            function, self.surrogate.params, self.kl_function, self.needs_entropy,
        )  # fmt: skip
        return losses, d_logps, d_entropy if self.needs_entropy else None

    def log_ratio(self, logps: Tensor, rows: TokenRows, batch: TokenBatch) -> Tensor:
        """logp - old_logp at this objective's level, fp32 [n]: per token, or the mean over the sequence's trained tokens."""
        difference = torch.zeros_like(logps) if rows.old_logps is None else logps - rows.old_logps
        if self.level == "token":
            return difference
        return batch.spread(batch.sequence_sum(difference) / _trained(rows, batch)[1]).to(torch.float32)

    def _sequence_surrogate(self, rows: TokenRows, batch: TokenBatch) -> Callable[..., Any]:
        """The weighted surrogate with one ratio per sequence, as a function of all tokens of the batch."""

        def surrogate(logps: Tensor, old_logps: Tensor, advantages: Tensor, params: tuple[float, ...]):
            mean = self.log_ratio(logps, rows, batch)
            if self.surrogate.detached_ratio:  # needs logp itself beside the ratio, and keeps its slope at the token
                loss, slope = self.surrogate(logps, logps - mean, advantages)
            else:
                loss, slope = self.surrogate(mean, torch.zeros_like(mean), advantages)
            loss, slope = rows.policy_weight * loss, rows.policy_weight * slope
            if self.level == "sequence" and not self.surrogate.detached_ratio:
                trained, count = _trained(rows, batch)
                d_mean = batch.sequence_sum(slope)  # d loss / d (mean log-ratio), [B]
                slope = torch.where(trained, batch.spread(d_mean / count).to(torch.float32), 0.0)
            return loss, slope

        return surrogate


def _trained(rows: TokenRows, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """([n] bool, [B] fp64 count of them in each sequence, at least 1)."""
    trained = torch.ones_like(rows.targets, dtype=torch.bool) if rows.trained is None else rows.trained
    return trained, batch.sequence_sum(trained).clamp(min=1.0)


_GRPO = Objective(aggregate="seq-mean-token-mean")

#: Published objectives. dapo and bnpo differ in the normaliser only: DAPO's is the token count of the whole batch (pass
#: `normalizer=` when it is split), BNPO's the count of the micro-batch at hand.
PRESETS: dict[str, Objective] = {
    "grpo": _GRPO,
    "dapo": Objective(surrogate=Clip(0.2, 0.28)),
    "bnpo": Objective(),
    "dr_grpo": Objective(aggregate="constant"),
    "gspo": replace(_GRPO, surrogate=Clip(3e-4, 4e-4), level="sequence"),
    "cispo": Objective(surrogate=Cispo(5.0)),
    "reinforce": Objective(surrogate=PolicyGradient()),
}
