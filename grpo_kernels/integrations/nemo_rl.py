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

Top-k and top-p filtering of the training log-probs: pass NeMo-RL's `TrainingSamplingParams` as sampling_params=. The policy term
then runs over what the filter keeps of the logits; the KL runs over the vocabulary, as NeMo-RL's reference does, for which the
rows are visited whole. A token that its own filter drops has log-prob 0 and no gradient, as in NeMo-RL, and is counted in
`outside_sampling_set`.

Not covered: sequence packing (NeMo-RL packs log-probs only), context parallelism, filters of tensor-parallel logits. A token
that the sampler did not score has weight 1 here, 0 there. `sampling_importance_ratio` of an objective at sequence level is the
mean over the sequences, where NeMo-RL multiplies it by their number.

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
from ..formulas.kl import Kl
from ..formulas.surrogates import Cispo, Clip, PolicyGradient
from ..logprobs import token_logprobs
from ..losses import LossOutput, grpo_loss, objective_loss
from ..objective import Objective
from ..rewards.corrections import importance_weights, rejection_mask
from ._nemo_rl_metrics import metrics_of, normalizations
from ._records import refiltered
from ._shared import shard_of

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

    sampling_params  NeMo-RL's `TrainingSamplingParams`, of which top_k and top_p are read: the filter that prev_logprobs went
                 through. None, or one that keeps everything: no filter.

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
        sampling_params: Any = None,
    ) -> None:
        if objective.aggregate not in ("token-mean", "seq-mean-token-mean"):
            raise ValueError(f"aggregate={objective.aggregate!r}: it must be token-mean or seq-mean-token-mean.")
        from nemo_rl.algorithms.loss import interfaces

        top_k, top_p = getattr(sampling_params, "top_k", None), getattr(sampling_params, "top_p", None)
        #: What the filter keeps, as `TokenSets.from_logits` takes it; None without a filter.
        self.rules = None if (top_k or 0) <= 0 and top_p in (None, 1) else {"top_k": top_k, "top_p": top_p}
        if self.rules and objective.beta != 0 and objective.kl_spec.weighting not in ("none", "score"):
            raise ValueError(
                f"kl={objective.kl_spec} with sampling_params: the KL runs over the vocabulary, its weight over the sets: use the "
                "weighting 'score' or 'none', or use_on_policy_kl_approximation."
            )
        #: Whether the ratio of the correction is reported per sequence.
        self.sequences = objective.level != "token" or (importance or {}).get("level", "token") != "token"
        # With a ratio of 1 the levels do not differ.
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
        self.metric_normalizations = {} if kinds is None else normalizations(self, kinds, tokens)

    @classmethod
    def like(
        cls, theirs: Any, *, inplace: bool = False, megatron: bool = False, sampling_params: Any = None
    ) -> PolicyLoss:  # fmt: skip
        """This loss with the settings of `theirs`, a `ClippedPGLossFn`. Raises ValueError for unsupported ones."""
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
            positive_example_nll_weight=theirs.positive_example_nll_weight, sampling_params=sampling_params,
        )  # fmt: skip

    @property
    def bounded(self) -> bool:
        """Whether the correction has bounds that a ratio can be outside of."""
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
        shard = shard_of(logits, vocab_parallel_group, self.megatron)

        def column(name: str) -> Tensor:
            # The last position is masked. A view of the logits without it would cost a second copy of the gradient.
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
        filtered, dropped = self._filtered(logits, batch, shard)
        kl: Tensor | None = None
        if self.objective.beta != 0 and (self.use_on_policy_kl_approximation or self.rules):
            # The KL is weighted with another ratio than the policy term, or runs over more than that.
            out, kl, weights, outside = self._over_logps(logits, filtered, D, shard)
            assert kl is not None
            loss = out.loss + kl
        elif self.force_on_policy_ratio and self.importance is not None:
            # The weights are those of log-probs yet unknown.
            out, _, weights, outside = self._over_logps(logits, filtered, D, shard)
            loss = out.loss
        else:
            weights, outside = self._weights(batch)
            filtered = filtered if weights is None else replace(filtered, weights=weights)
            out = grpo_loss(logits, filtered, self.objective, normalizer=D, inplace=self.inplace, shard=shard)
            loss = out.loss
        named = metrics_of(self, out, batch, sample_mask, tokens, sequences, weights, outside) | {
            "loss": loss.detach(), "positive_nll_loss": -torch.where(positive, out.logps, 0.0).sum() / positive.sum().clamp(min=1)
        }  # fmt: skip
        if kl is not None:
            named["kl_penalty"] = kl.detach() / self.objective.beta
        if dropped is not None:
            named["outside_sampling_set"] = (dropped & mask).sum() / tokens.clamp(min=1)
        values = torch.stack([v.to(torch.float32) for v in named.values()]).tolist()
        return loss, dict(zip(named, values, strict=True))

    def _filtered(self, logits: Tensor, batch: TokenBatch, shard: VocabShard | None) -> tuple[TokenBatch, Tensor | None]:
        """(the batch with what the filter keeps of these logits, bool [B, S]: targets that it drops), or (the batch, None)."""
        if not self.rules:
            return batch, None
        if shard is not None:
            raise ValueError(
                "sampling_params: a filter needs whole rows of logits, but these are cut over tensor-parallel ranks."
            )
        kept, lacking = refiltered(logits, batch.targets, **self.rules)
        return replace(batch, kept=kept), lacking

    def _over_logps(
        self, logits: Tensor, batch: TokenBatch, normalizer: Tensor, shard: VocabShard | None
    ) -> tuple[LossOutput, Tensor | None, Tensor | None, Tensor | None]:
        """(the loss without a KL that is apart, that KL's part of it, the weights, what is outside their bounds)."""
        kl_apart = self.objective.beta != 0 and (self.use_on_policy_kl_approximation or bool(self.rules))
        mass = batch.kept is not None and kl_apart
        scored = token_logprobs(
            logits, batch.targets, mask=batch.mask, entropy=self.objective.needs_entropy, shard=shard, kept=batch.kept,
            inplace=self.inplace and not mass, also=("log_kept_mass",) if mass else (),
        )  # fmt: skip
        logps, entropy = scored[:2]
        old = logps.detach() if batch.old_logps is None else batch.old_logps
        weights, outside = self._weights(replace(batch, old_logps=old))
        policy = replace(self.objective, beta=0.0) if kl_apart else self.objective
        out = objective_loss(logps, replace(batch, weights=weights), policy, entropy=entropy, normalizer=normalizer)
        if not kl_apart:
            return out, None, weights, outside
        whole = logps + scored[2]["log_kept_mass"] if mass else logps
        part = self._on_policy_kl if self.use_on_policy_kl_approximation else self._kl_alone
        return out, part(whole, batch, normalizer), weights, outside

    def _kl_alone(self, logps: Tensor, batch: TokenBatch, normalizer: Tensor) -> Tensor:
        """The KL's part of the loss, of log-probs over the vocabulary."""
        alone = Objective(PolicyGradient(), aggregate=self.objective.aggregate, beta=self.objective.beta, kl=self.objective.kl)
        silent = replace(batch, advantages=torch.zeros_like(batch.advantages), old_logps=None, nll_weights=None, kept=None)
        return objective_loss(logps, silent, alone, normalizer=normalizer).loss

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
        # Masked positions may hold any value.
        ref, sampler = (torch.where(batch.mask, x, logps.detach()) for x in (batch.ref_logps, batch.sampler_logps))
        d = ref - logps
        bounded = d.clamp(-spec.clamp_log, spec.clamp_log)
        r = (logps - sampler).exp().nan_to_num(0.0, 0.0, 0.0)
        r = torch.where(d == bounded, r, r.detach())
        value, _ = spec.function(logps, sampler, logps + bounded)
        return ((r * value).clamp(-spec.clamp, spec.clamp) * kl_weight.view_as(logps)).sum()
