"""NeMo-RL: the whole loss from padded logits, in one visit of each row.

    from grpo_kernels import Objective
    from grpo_kernels.integrations.nemo_rl import PolicyLoss

    loss_fn = PolicyLoss.like(ClippedPGLossFn(config))                                 # in the place of ClippedPGLossFn(...)
    loss_fn = PolicyLoss(Objective.preset("dapo", numerics="nemo-rl", beta=0.01))      # or any objective

The object says `input_type = LossInputType.LOGIT`, so NeMo-RL hands it the logits instead of log-probs. They have been
divided by the temperature already. Denominators are its global counts, `data` its columns; old log-probs are
`prev_logprobs`, the reference's `reference_policy_logprobs`, the sampler's `generation_logprobs`.

Logits may be cut over tensor-parallel ranks: a DTensor with Shard(-1) says so itself; on Megatron, whose group NeMo-RL does
not hand to a loss of logits, pass megatron=True.

Not covered: sequence packing (NeMo-RL packs log-probs only), context parallelism, top-k and top-p filtering of the
training log-probs. A token that the sampler did not score has weight 1 here, 0 there. `sampling_importance_ratio` of an
objective at sequence level is the mean over the sequences, where NeMo-RL multiplies it by their number.

Written from the code of August 2026 (7ea279a). Its package on PyPI is empty and it wants Python 3.13: its own tests of the
loss were run on ours with stand-ins for what else it imports, and the tests here compare with a transcription of its loss.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ..batch import TokenBatch
from ..distributed import VocabShard
from ..formulas.kl import Kl, k3
from ..formulas.ops import bounded_exp
from ..formulas.surrogates import Cispo, Clip, PolicyGradient
from ..formulas.token_stage import kl_of_rows
from ..logprobs import token_logprobs
from ..losses import LossOutput, grpo_loss, objective_loss
from ..objective import Objective
from ..rewards.corrections import importance_weights, rejection_mask
from ._shared import even_shard

Tensor = torch.Tensor

#: NeMo-RL's truncated_importance_sampling_type -> the mode of `importance`.
MODES = {"tis": "truncate", "icepop": "mask", "seq-mask-tis": "sequence-mask"}


class PolicyLoss:
    """A NeMo-RL loss function: (logits, data, global_valid_seqs, global_valid_toks) -> (loss, metrics).

    objective    aggregate "token-mean" or "seq-mean-token-mean": NeMo-RL's two loss types, over its global counts.
    importance   options of `corrections.importance_weights` between prev_logprobs and generation_logprobs, for example
                 {"mode": "truncate", "high": 2.0}; None: no correction. The mode "sequence-mask", with low and high, drops
                 the sequences whose geometric mean is outside, and the others keep their tokens' weights (seq-mask-tis).
    inplace      True: the gradient overwrites the logits.
    megatron     True: logits are Megatron's, [B, S, V / ranks], cut over its tensor-parallel group, for which the worker's
                 megatron.core is asked on every call. Without it, plain logits are whole rows.
    force_on_policy_ratio, use_on_policy_kl_approximation, positive_example_nll_weight   NeMo-RL's: prev_logprobs are the
                 policy's own; the KL is weighted by the ratio to the sampler (over log-probs, instead of in one visit);
                 weight of the mean NLL of the micro-batch's tokens in samples with a reward above 0.

    metric_normalizations tells NeMo-RL's split workers which metric has which denominator.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        importance: dict[str, Any] | None = None,
        inplace: bool = False,
        megatron: bool = False,
        force_on_policy_ratio: bool = False,
        use_on_policy_kl_approximation: bool = False,
        positive_example_nll_weight: float = 0.0,
    ) -> None:
        if objective.aggregate not in ("token-mean", "seq-mean-token-mean"):
            raise ValueError(f"aggregate={objective.aggregate!r}: it must be token-mean or seq-mean-token-mean.")
        from nemo_rl.algorithms.loss import interfaces

        #: Whether the ratio of the correction is reported per sequence.
        self.sequences = objective.level != "token" or (importance or {}).get("level", "token") != "token"
        # A ratio of 1 is every token's own.
        self.objective = replace(objective, level="token") if force_on_policy_ratio else objective
        self.importance, self.inplace, self.megatron = importance, inplace, megatron
        self.force_on_policy_ratio = force_on_policy_ratio
        self.use_on_policy_kl_approximation = use_on_policy_kl_approximation
        self.positive_example_nll_weight = positive_example_nll_weight
        tokens = objective.aggregate == "token-mean"
        self.loss_type = interfaces.LossType.TOKEN_LEVEL if tokens else interfaces.LossType.SEQUENCE_LEVEL
        self.input_type = interfaces.LossInputType.LOGIT
        #: Whether the correction drops sequences, or tokens.
        self.drops_sequences = (importance or {}).get("mode") == "sequence-mask"
        kinds = getattr(interfaces, "MetricNormalizer", None)  # which not every NeMo-RL has
        self.metric_normalizations = {} if kinds is None else self._normalizations(kinds, tokens)

    @classmethod
    def like(cls, theirs: Any, *, inplace: bool = False, megatron: bool = False) -> PolicyLoss:
        """With the constants of theirs, a `ClippedPGLossFn`. Raises ValueError for what this loss cannot do."""
        if theirs.disable_ppo_ratio and theirs.ratio_clip_c is not None:
            raise ValueError("ratio_clip_c with disable_ppo_ratio bounds no ratio: set one of them only.")
        delta = math.inf if theirs.ratio_clip_c is None else theirs.ratio_clip_c
        if delta < 1 + theirs.ratio_clip_max:
            raise ValueError(
                f"ratio_clip_c={delta}: below 1 + ratio_clip_max, {1 + theirs.ratio_clip_max}, it is NeMo-RL's own."
            )
        surrogate = PolicyGradient() if theirs.disable_ppo_ratio else Clip(theirs.ratio_clip_min, theirs.ratio_clip_max, delta)
        sequences = theirs.sequence_level_importance_ratios
        bounds = (x if x is not None else math.inf for x in (theirs.kl_input_clamp_value, theirs.kl_output_clamp_value))
        importance: dict[str, Any] | None = None
        if theirs.use_importance_sampling_correction:
            kind, high = theirs.truncated_importance_sampling_type, theirs.truncated_importance_sampling_ratio
            importance = {
                "level": "sequence" if sequences else "token", "mode": "truncate" if kind is None else MODES[kind],
                "low": theirs.truncated_importance_sampling_ratio_min or 0.0, "high": math.inf if high is None else high,
            }  # fmt: skip
        objective = Objective(
            surrogate=Cispo(1 + theirs.ratio_clip_max, 1 - theirs.ratio_clip_min) if theirs.use_cispo else surrogate,
            level="sequence" if sequences and not theirs.disable_ppo_ratio else "token",
            aggregate="token-mean" if theirs.loss_type.name == "TOKEN_LEVEL" else "seq-mean-token-mean",
            beta=theirs.reference_policy_kl_penalty,
            kl=Kl(theirs.reference_policy_kl_type, "score", False, *bounds),
        )
        return cls(
            objective, importance=importance, inplace=inplace, megatron=megatron,
            force_on_policy_ratio=theirs.force_on_policy_ratio,
            use_on_policy_kl_approximation=theirs.use_on_policy_kl_approximation,
            positive_example_nll_weight=theirs.positive_example_nll_weight,
        )  # fmt: skip

    def _normalizations(self, kinds: Any, tokens: bool) -> dict[str, Any]:
        names = (
            "probs_ratio", "probs_ratio_clamped", "token_mult_prob_error", "gen_kl_error", "policy_kl_error",
            "js_divergence_error", "approx_entropy",
        )  # fmt: skip
        own = (
            "num_valid_samples",
            "positive_nll_loss",
            *(f"probs_ratio{x}_{y}" for x in ("", "_clamped") for y in ("min", "max")),
        )
        named = dict.fromkeys(names, kinds.TOKENS) | dict.fromkeys(own, kinds.NONE)
        named |= dict.fromkeys(("loss", "kl_penalty"), kinds.TOKENS if tokens else kinds.SEQUENCES)
        named["sampling_importance_ratio"] = kinds.SEQUENCES if self.sequences else kinds.TOKENS
        if self._bounded():
            named["is_oob_ratio"] = kinds.SEQUENCES if self.drops_sequences else kinds.TOKENS
        return named

    def _bounded(self) -> bool:
        options = self.importance
        return options is not None and (options.get("low", 0.0) > 0 or options.get("high", 2.0) < math.inf)

    def __call__(
        self,
        logits: Tensor,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        *,
        vocab_parallel_group: Any = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """vocab_parallel_group: what a prepare_fn of yours hands on, in the place of megatron=True."""
        shard = self._shard(logits, vocab_parallel_group)

        def column(name: str) -> Tensor:
            # The last position is a masked one. A view of the logits without it would cost a second copy of the gradient.
            return torch.nn.functional.pad(data[name][:, 1:], (0, 1))

        sample_mask = data["sample_mask"]
        mask = (column("token_mask") * sample_mask[:, None]) != 0
        fields = {"mask": mask, "sampler_logps": column("generation_logprobs")}
        if not self.force_on_policy_ratio:
            fields["old_logps"] = column("prev_logprobs")
        if self.objective.beta != 0:
            fields["ref_logps"] = column("reference_policy_logprobs")
        positive = torch.zeros_like(mask)
        if self.positive_example_nll_weight > 0 and "rewards" in data:
            positive = mask & (data["rewards"] > 0)[:, None]
            fields["nll_weights"] = positive * (self.positive_example_nll_weight / positive.sum().clamp(min=1))
        batch = TokenBatch(column("input_ids"), column("advantages"), **fields)
        tokens, sequences = (x.to(torch.float32) for x in (global_valid_toks, global_valid_seqs))
        D = tokens if self.objective.aggregate == "token-mean" else sequences
        on_policy_kl = self.use_on_policy_kl_approximation and self.objective.beta != 0
        kl: Tensor | None = None
        if on_policy_kl or (self.force_on_policy_ratio and self.importance is not None):
            # The KL is weighted with another ratio than the policy term, or the weights are those of log-probs yet unknown.
            logps, entropy = token_logprobs(
                logits, batch.targets, mask=mask, entropy=self.objective.needs_entropy, inplace=self.inplace, shard=shard
            )
            old = logps.detach() if batch.old_logps is None else batch.old_logps
            weights, outside = self._weights(replace(batch, old_logps=old))
            policy = replace(self.objective, beta=0.0) if on_policy_kl else self.objective
            out = objective_loss(logps, replace(batch, weights=weights), policy, entropy=entropy, normalizer=D)
            loss = out.loss
            if on_policy_kl:
                kl = self._on_policy_kl(logps, batch, D)
                loss = loss + kl
        else:
            weights, outside = self._weights(batch)
            batch = batch if weights is None else replace(batch, weights=weights)
            out = grpo_loss(logits, batch, self.objective, normalizer=D, inplace=self.inplace, shard=shard)
            loss = out.loss
        named = self._metrics(out, batch, sample_mask, tokens, sequences, weights, outside) | {
            "loss": loss.detach(), "positive_nll_loss": -torch.where(positive, out.logps, 0.0).sum() / positive.sum().clamp(min=1)
        }  # fmt: skip
        if kl is not None:
            named["kl_penalty"] = kl.detach() / self.objective.beta
        values = torch.stack([v.to(torch.float32) for v in named.values()]).tolist()
        return loss, dict(zip(named, values, strict=True))

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

    def _weights(self, batch: TokenBatch) -> tuple[Tensor | None, Tensor | None]:
        """The weights of the correction and which tokens are outside its bounds, both [B, S]; None without a correction."""
        if self.importance is None:
            return None, None
        options = {"low": 0.0, "high": 2.0} | self.importance
        low, high = options["low"], options["high"]
        if self.drops_sequences:
            kept = rejection_mask(batch, metric="ratio", over="mean", low=low, high=high)
            return kept * importance_weights(batch, high=math.inf), kept == 0
        raw = importance_weights(batch, level=options.get("level", "token"), high=math.inf)
        return importance_weights(batch, **options), (raw < low) | (raw > high)

    def _on_policy_kl(self, logps: Tensor, batch: TokenBatch, normalizer: Tensor) -> Tensor:
        """The KL's part of the loss, weighted by the ratio to the sampler. Unlike `Kl`, NeMo-RL bounds the weighted value."""
        spec, kl_weight = self.objective.kl_spec, self.objective.token_rows(batch, normalizer).kl_weight
        assert batch.mask is not None and batch.ref_logps is not None and batch.sampler_logps is not None
        assert kl_weight is not None
        # What is masked may hold anything.
        ref, sampler = (torch.where(batch.mask, x, logps.detach()) for x in (batch.ref_logps, batch.sampler_logps))
        d = ref - logps
        bounded = d.clamp(-spec.clamp_log, spec.clamp_log)
        r = (logps - sampler).exp().nan_to_num(0.0, 0.0, 0.0)
        r = torch.where(d == bounded, r, r.detach())
        value, _ = spec.function(logps, sampler, logps + bounded)
        return ((r * value).clamp(-spec.clamp, spec.clamp) * kl_weight.view_as(logps)).sum()

    def _metrics(
        self,
        out: LossOutput,
        batch: TokenBatch,
        sample_mask: Tensor,
        tokens: Tensor,
        sequences: Tensor,
        weights: Tensor | None,
        outside: Tensor | None,
    ) -> dict[str, Tensor]:
        """Sums over the micro-batch by global counts."""
        mask, sampler, logps = batch.mask, batch.sampler_logps, out.logps
        assert mask is not None and sampler is not None
        old = logps if batch.old_logps is None else batch.old_logps
        x = self.objective.log_ratio(logps.reshape(-1), out.rows, batch).view(mask.shape)
        r = bounded_exp(x)
        clamped = r.clamp(*self.objective.surrogate.ratio_bounds)
        if isinstance(self.objective.surrogate, PolicyGradient) and not self.force_on_policy_ratio:
            r = clamped = logps  # REINFORCE has no ratio, and NeMo-RL shows the log-probs

        def total(values: Tensor) -> Tensor:
            return torch.where(mask, values, 0.0).sum()

        def mean(values: Tensor) -> Tensor:
            return total(values) / tokens.clamp(min=1)

        value, middle = self.objective.kl_spec.function, torch.logaddexp(old, sampler) - math.log(2.0)
        metrics = {
            "probs_ratio": mean(r),
            "probs_ratio_clamped": mean(clamped),
            "token_mult_prob_error": mean(bounded_exp((sampler - old).abs())),
            "gen_kl_error": mean(value(sampler, sampler, old)[0]),
            "policy_kl_error": mean(value(old, old, sampler)[0]),
            "js_divergence_error": mean((k3(middle, middle, old)[0] + k3(middle, middle, sampler)[0]) / 2),
            "approx_entropy": mean(-bounded_exp(logps - sampler) * logps),
            "num_valid_samples": sample_mask.sum(),
            "kl_penalty": r.new_zeros(()),
        }
        for name, ratio in (("probs_ratio", r), ("probs_ratio_clamped", clamped)):
            metrics[f"{name}_min"] = torch.where(mask, ratio, torch.inf).amin() if mask.numel() else r.new_tensor(torch.inf)
            metrics[f"{name}_max"] = torch.where(mask, ratio, -torch.inf).amax() if mask.numel() else r.new_tensor(-torch.inf)
        if out.rows.kl_weight is not None:
            kl = kl_of_rows(self.objective, logps.reshape(-1), out.rows, x.reshape(-1))[0]
            metrics["kl_penalty"] = torch.where(mask.reshape(-1), out.rows.kl_weight * kl, 0.0).sum() / self.objective.beta
        w = torch.where(mask, old - sampler, 0.0)
        samples = sequences.clamp(min=1)
        if self.sequences:
            w = w.sum(1).exp().nan_to_num(0.0, 0.0, 0.0) if weights is None else weights.amax(1)
            metrics["sampling_importance_ratio"] = (torch.where(mask.any(1), w, 1.0) * sample_mask).sum() / samples
        else:
            w = w.exp().nan_to_num(0.0, 0.0, 0.0) if weights is None else weights
            metrics["sampling_importance_ratio"] = mean(w)
        if outside is not None and self._bounded():
            counted = ((outside & mask).any(1) * sample_mask).sum() / samples
            metrics["is_oob_ratio"] = counted if self.drops_sequences else mean(outside.float())
        return metrics
