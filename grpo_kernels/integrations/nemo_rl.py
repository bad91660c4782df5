"""NeMo-RL: the whole loss from padded logits, in one visit of each row.

    from grpo_kernels import Objective
    from grpo_kernels.integrations.nemo_rl import PolicyLoss

    loss_fn = PolicyLoss(Objective.preset("dapo", numerics="nemo-rl", beta=0.01))      # in the place of ClippedPGLossFn(...)

The object says `input_type = LossInputType.LOGIT`, so NeMo-RL hands it the logits instead of log-probs. They have been
divided by the temperature already. Denominators are its global counts, `data` its columns; old log-probs are
`prev_logprobs`, the reference's `reference_policy_logprobs`, the sampler's `generation_logprobs`.

Not covered: sequence packing (NeMo-RL packs log-probs only), context parallelism, top-k and top-p filtering of the
training log-probs, and vocabulary-sharded logits (a DTensor is refused). Metrics that are not there: gen_kl_error,
policy_kl_error, js_divergence_error and those of a filter. A token that the sampler did not score has weight 1 here, 0 there.

Written from the code of August 2026 (7ea279a). Its package on PyPI is empty and it wants Python 3.13, so it was not run: the
tests compare with a transcription of its loss.
"""

from __future__ import annotations

from typing import Any

import torch

from ..batch import TokenBatch
from ..corrections import importance_weights
from ..losses import grpo_loss
from ..objective import Objective
from ..ops import bounded_exp
from ..token_stage import kl_of_rows

Tensor = torch.Tensor


class PolicyLoss:
    """A NeMo-RL loss function: (logits, data, global_valid_seqs, global_valid_toks) -> (loss, metrics).

    objective    aggregate "token-mean" or "seq-mean-token-mean": NeMo-RL's two loss types, over its global counts.
    importance   options of `corrections.importance_weights` between prev_logprobs and generation_logprobs, for example
                 {"mode": "truncate", "high": 2.0}; None: no correction.
    inplace      True: the gradient overwrites the logits.
    """

    def __init__(self, objective: Objective, *, importance: dict[str, Any] | None = None, inplace: bool = False) -> None:
        if objective.aggregate not in ("token-mean", "seq-mean-token-mean"):
            raise ValueError(f"aggregate={objective.aggregate!r}: it must be token-mean or seq-mean-token-mean.")
        from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType

        self.objective, self.importance, self.inplace = objective, importance, inplace
        tokens = objective.aggregate == "token-mean"
        self.loss_type = LossType.TOKEN_LEVEL if tokens else LossType.SEQUENCE_LEVEL
        self.input_type = LossInputType.LOGIT

    def __call__(
        self, logits: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor, **_: Any
    ) -> tuple[Tensor, dict[str, float]]:
        if hasattr(logits, "placements"):
            raise ValueError("logits is a DTensor: this loss reads whole rows, on one tensor-parallel rank.")

        def column(name: str) -> Tensor:
            # The last position is a masked one. A view of the logits without it would cost a second copy of the gradient.
            return torch.nn.functional.pad(data[name][:, 1:], (0, 1))

        mask = (column("token_mask") * data["sample_mask"][:, None]) != 0
        fields = {"mask": mask, "old_logps": column("prev_logprobs"), "sampler_logps": column("generation_logprobs")}
        if self.objective.beta != 0:
            fields["ref_logps"] = column("reference_policy_logprobs")
        batch = TokenBatch(column("input_ids"), column("advantages"), **fields)
        if self.importance is not None:
            fields["weights"] = importance_weights(batch, **self.importance)
            batch = TokenBatch(batch.targets, batch.advantages, **fields)
        tokens, sequences = (x.to(torch.float32) for x in (global_valid_toks, global_valid_seqs))
        D = tokens if self.objective.aggregate == "token-mean" else sequences
        out = grpo_loss(logits, batch, self.objective, normalizer=D, inplace=self.inplace)
        return out.loss, self._metrics(out, batch, data["sample_mask"], tokens)

    def _metrics(self, out: Any, batch: TokenBatch, sample_mask: Tensor, tokens: Tensor) -> dict[str, float]:
        """Sums over the micro-batch by global counts, in one trip to the host."""
        mask, old, sampler = batch.mask, batch.old_logps, batch.sampler_logps
        assert mask is not None and old is not None and sampler is not None
        low, high = self.objective.surrogate.ratio_bounds
        rows, logps = out.rows, out.logps.reshape(-1)
        x = self.objective.log_ratio(logps, rows, batch).view(mask.shape)
        r = bounded_exp(x)
        clamped = r.clamp(low, high)

        def mean(values: Tensor) -> Tensor:
            return torch.where(mask, values, 0.0).sum() / tokens.clamp(min=1)

        metrics = {
            "loss": out.loss.detach(),
            "probs_ratio": mean(r),
            "probs_ratio_clamped": mean(clamped),
            "token_mult_prob_error": mean(bounded_exp((sampler - old).abs())),
            "sampling_importance_ratio": mean((old - sampler).exp().nan_to_num(0.0, 0.0, 0.0)),
            "approx_entropy": mean(-bounded_exp(out.logps - sampler) * out.logps),
            "num_valid_samples": sample_mask.sum(),
        }
        for name, ratio in (("probs_ratio", r), ("probs_ratio_clamped", clamped)):
            metrics[f"{name}_min"] = torch.where(mask, ratio, torch.inf).amin() if mask.numel() else r.new_tensor(torch.inf)
            metrics[f"{name}_max"] = torch.where(mask, ratio, -torch.inf).amax() if mask.numel() else r.new_tensor(-torch.inf)
        metrics["kl_penalty"] = r.new_zeros(())
        if rows.kl_weight is not None:
            kl = kl_of_rows(self.objective, logps, rows, x.reshape(-1))[0]
            metrics["kl_penalty"] = torch.where(mask.reshape(-1), rows.kl_weight * kl, 0.0).sum() / self.objective.beta
        values = torch.stack([v.to(torch.float32) for v in metrics.values()]).tolist()
        return dict(zip(metrics, values, strict=True))
