"""NeMo-RL: the whole loss from padded logits, in one visit of each row.

    from grpo_kernels import Objective
    from grpo_kernels.integrations.nemo_rl import PolicyLoss

    loss_fn = PolicyLoss(Objective.preset("dapo", numerics="nemo-rl", beta=0.01))      # in the place of ClippedPGLossFn(...)

The object says `input_type = LossInputType.LOGIT`, so NeMo-RL hands it the logits instead of log-probs. They have been
divided by the temperature already. Denominators are its global counts, `data` its columns; old log-probs are
`prev_logprobs`, the reference's `reference_policy_logprobs`, the sampler's `generation_logprobs`.

Logits may be cut over tensor-parallel ranks: a DTensor with Shard(-1) says so itself; on Megatron, whose group NeMo-RL does
not hand to a loss of logits, pass megatron=True.

Not covered: sequence packing (NeMo-RL packs log-probs only), context parallelism, top-k and top-p filtering of the
training log-probs. Metrics that are not there: gen_kl_error,
policy_kl_error, js_divergence_error and those of a filter. A token that the sampler did not score has weight 1 here, 0 there.

Written from the code of August 2026 (7ea279a). Its package on PyPI is empty and it wants Python 3.13, so it was not run: the
tests compare with a transcription of its loss.
"""

from __future__ import annotations

from typing import Any

import torch

from ..batch import TokenBatch
from ..corrections import importance_weights
from ..distributed import VocabShard
from ..losses import grpo_loss
from ..objective import Objective
from ..ops import bounded_exp
from ..token_stage import kl_of_rows
from ._slots import even_shard

Tensor = torch.Tensor


class PolicyLoss:
    """A NeMo-RL loss function: (logits, data, global_valid_seqs, global_valid_toks) -> (loss, metrics).

    objective    aggregate "token-mean" or "seq-mean-token-mean": NeMo-RL's two loss types, over its global counts.
    importance   options of `corrections.importance_weights` between prev_logprobs and generation_logprobs, for example
                 {"mode": "truncate", "high": 2.0}; None: no correction.
    inplace      True: the gradient overwrites the logits.
    megatron     True: logits are Megatron's, [B, S, V / ranks], cut over its tensor-parallel group, for which the worker's
                 megatron.core is asked on every call. Without it, plain logits are whole rows.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        importance: dict[str, Any] | None = None,
        inplace: bool = False,
        megatron: bool = False,
    ) -> None:
        if objective.aggregate not in ("token-mean", "seq-mean-token-mean"):
            raise ValueError(f"aggregate={objective.aggregate!r}: it must be token-mean or seq-mean-token-mean.")
        from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType

        self.objective, self.importance, self.inplace, self.megatron = objective, importance, inplace, megatron
        tokens = objective.aggregate == "token-mean"
        self.loss_type = LossType.TOKEN_LEVEL if tokens else LossType.SEQUENCE_LEVEL
        self.input_type = LossInputType.LOGIT

    def __call__(
        self,
        logits: Tensor,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        *,
        vocab_parallel_group: Any = None,
        **_: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        """vocab_parallel_group: what a prepare_fn of yours hands on, in the place of megatron=True."""
        shard = self._shard(logits, vocab_parallel_group)

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
        out = grpo_loss(logits, batch, self.objective, normalizer=D, inplace=self.inplace, shard=shard)
        return out.loss, self._metrics(out, batch, data["sample_mask"], tokens)

    def _shard(self, logits: Tensor, group: Any) -> VocabShard | None:
        placements = getattr(logits, "placements", None)
        if placements is not None:
            if len(placements) != 1 or not placements[0].is_shard() or placements[0].dim % logits.dim() != logits.dim() - 1:
                raise ValueError(
                    f"logits is a DTensor with placements {placements}: it must be cut by Shard(-1), over a tensor-parallel "
                    "mesh of one dimension."
                )
            return VocabShard.of(logits, dim=-1)
        if group is None and self.megatron:
            from megatron.core import parallel_state

            group = parallel_state.get_tensor_model_parallel_group()
        return even_shard(logits.shape[-1], group)

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
