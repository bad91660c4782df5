"""NeMo-RL: the whole loss from padded logits, in one pass over each row.

    from grpo_kernels import Objective
    from grpo_kernels.integrations.nemo_rl import PolicyLoss

    loss_fn = PolicyLoss.like(ClippedPGLossFn(config))  # instead of ClippedPGLossFn(config)
    loss_fn = PolicyLoss(Objective.preset("dapo", numerics="nemo-rl", beta=0.01))  # any objective

The object says `input_type = LossInputType.LOGIT`, so NeMo-RL hands it the logits instead of
log-probs. They have been divided by the temperature already. Denominators are its global counts,
`data` its columns; old log-probs are `prev_logprobs`, the reference's `reference_policy_logprobs`,
the sampler's `generation_logprobs`.

Logits may be cut over tensor-parallel ranks: a DTensor with Shard(-1) says so itself; on Megatron,
whose group NeMo-RL does not hand to a loss of logits, pass megatron=True.

Top-k and top-p filtering of the training log-probs: pass NeMo-RL's `TrainingSamplingParams` as
sampling_params=. The policy term then runs over what the filter keeps of the logits; the KL runs
over the vocabulary, as NeMo-RL's reference does, for which the rows are visited whole. A token that
its own filter drops has log-prob 0 and no gradient, as in NeMo-RL, and is counted in
`outside_sampling_set`.

`data["on_policy"]`, bool [B], marks samples whose ratio is 1 and keeps its gradient; NeMo-RL's
`force_on_policy_ratio` is the same for all samples. prev_logprobs may hold anything there.

With `seq_logprob_error_in_loss` the log-probs are computed first, without a gradient. Sequences
whose error is above the threshold are masked, and the loss divides by NeMo-RL's counts of all
sequences: its worker multiplies the gradients by the share of the counts that is left, because
`requires_survivor_normalization` is True.

Log-probs from hidden states: with use_fused_linear_logprobs, NeMo-RL's Megatron worker calls a
function that `bind()` replaces by ours, over tensor-parallel ranks with sequence parallelism.
NeMo-RL divides its result by the temperature, which is right for a temperature of 1 alone.

Not covered: sequence packing (NeMo-RL packs log-probs only), context parallelism, filters of
tensor-parallel logits. A token that the sampler did not score has weight 1 here, 0 there. A weight
that overflows is 0, as there; others, and the two KLs to the sampler among the metrics, end at
e^60. `sampling_importance_ratio` of an objective at sequence level is the mean over the sequences,
where NeMo-RL multiplies it by their number.

Written from the code of August 2026 (7ea279a). Its package on PyPI is empty and it wants Python
3.13: its own tests of the loss were run on ours with stand-ins for what else it imports, and the
tests here compare with a transcription of its loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..batch import TokenBatch
from ..checks import LARGEST, require, require_number, require_one_of, require_whole
from ..formulas.divergence import Exact
from ..formulas.filters import sampler_errors
from ..formulas.kl import Kl, k3, kl_terms
from ..formulas.ops import ops
from ..formulas.surrogates import Cispo, NoPolicyTerm, PolicyGradient
from ..logprobs import token_logprobs
from ..losses import LossOutput, grpo_loss, objective_loss
from ..objective import Objective
from ..options import Options
from ..rewards.corrections import importance_weights, rejection_mask
from ..token_sets import TokenSets
from ._swap import Adapter, NotCovered, Slots, adapt_arguments, with_trainer_names
from ._tensors import (
    LossAndMetrics,
    bounded_clip,
    divergence_over_ids,
    log_probs_of,
    logps_at_ids,
    ratio_terms,
    to_floats,
    vocab_shard,
)
from .megatron import GatherSequence

#: No version: it was written from the code of August 2026.
ADAPTER = Adapter(
    "NeMo-RL",
    "nemo-rl",
    (),
    {
        "from_parallel_hidden_states_to_logprobs": (
            "nemo_rl.distributed.model_utils.from_parallel_hidden_states_to_logprobs"
        )
    },
)
#: NeMo-RL's truncated_importance_sampling_type -> the mode of `importance`.
MODES = {None: "truncate", "tis": "truncate", "icepop": "mask", "seq-mask-tis": "sequence-mask"}
#: The attributes of a `ClippedPGLossFn` that `PolicyLoss.like` reads.
READ = (
    "ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "disable_ppo_ratio", "force_on_policy_ratio", "use_cispo",
    "sequence_level_importance_ratios", "loss_type", "reference_policy_kl_penalty", "reference_policy_kl_type",
    "kl_input_clamp_value", "kl_output_clamp_value", "use_importance_sampling_correction", "truncated_importance_sampling_type",
    "truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min", "use_on_policy_kl_approximation",
    "positive_example_nll_weight", "seq_logprob_error_in_loss",
)  # fmt: skip
#: The attributes of a `DistillationLossFn` that `DistillationLoss.like` reads.
READ_OF_DISTILLATION = (
    "kl_type",
    "mixed_kl_weight",
    "zero_outside_topk",
    "log_infinitesimal",
    "loss_type",
)
#: Attributes of both that follow from other attributes, or have no effect by themselves.
DERIVED = ("input_type", "metric_normalizations", "seq_logprob_error_threshold")
#: Options of NeMo-RL that change what a loss gets or computes, and what to do instead.
UNSUPPORTED = {
    "use_fused_linear_logprobs": (
        "the model then returns log-probs, and this loss needs logits: switch it off."
    ),
    "opd_full": "full-vocabulary distillation is another loss: keep NeMo-RL's own.",
}
#: Metrics of `seq_logprob_error_in_loss`, by which NeMo-RL's worker normalises the gradients.
OF_SURVIVORS = (
    "num_masked_seqs_by_logprob_error",
    "seq_logprob_error_valid_tokens",
    "seq_logprob_error_valid_seqs",
)
#: What NeMo-RL divides its metrics by: tokens, or nothing.
DIVISORS = {
    **dict.fromkeys(("probs_ratio", "probs_ratio_clamped", "token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error",
                     "approx_entropy"), "TOKENS"),
    **dict.fromkeys(("num_valid_samples", "positive_nll_loss", *OF_SURVIVORS, "probs_ratio_min", "probs_ratio_max", "probs_ratio_clamped_min",
                     "probs_ratio_clamped_max"), "NONE"),
}  # fmt: skip
#: NeMo-RL's names of what its columns become.
NAMED = with_trainer_names(
    targets="input_ids", mask="token_mask", old_logps="prev_logprobs", sampler_logps="generation_logprobs",
    ref_logps="reference_policy_logprobs",
)  # fmt: skip
#: Above it a weight overflows.
LARGEST_LOG = math.log(torch.finfo(torch.float32).max)
#: The teacher's log-prob of an id outside of its largest, with zero_outside_topk.
OUTSIDE = -100.0
#: Why NeMo-RL's distillation needs an id, in NeMo-RL's words.
NO_IDS = "topk must be positive: set distillation.topk_logits_k to 1 or more."
FORWARD = Exact("forward", tail="ignore")
REVERSE = Exact("reverse", tail="ignore")


def _refuse_other_options(theirs: Any, read: Sequence[str]) -> None:
    """Raise ValueError if a loss object of NeMo-RL has an option set that this module ignores.

    A newer NeMo-RL may have an option that changes the loss. Without this check our loss would
    silently differ from it.

    theirs   the object, whose attributes are its options. Private attributes are no options.
    read     names of the attributes that the caller reads

    An option with an empty value (None, False, 0, ...) is not set.
    """
    for name, value in vars(theirs).items():
        unset = value is None or value is False
        if not isinstance(value, Tensor):  # `in` would compare the elements of a tensor
            unset = unset or value in (0, "", (), [], {})
        # DERIVED are attributes that follow from others. UNSUPPORTED has remedies by name.
        if name not in (*read, *DERIVED) and not name.startswith("_") and not unset:
            remedy = "this option is not known here: keep NeMo-RL's own loss."
            require(False, name, value, UNSUPPORTED.get(name, remedy))


@dataclass(eq=False)
class PolicyLoss:
    """A policy loss for NeMo-RL, computed from logits, for any objective.

    Calling it returns (loss, metrics) of a micro-batch, as NeMo-RL's own loss functions do.

    objective    the loss. Its aggregate is "token-mean" or "seq-mean-token-mean", NeMo-RL's two
                 loss types; the denominators are NeMo-RL's global counts.
    importance   options of `importance_weights` for the weights exp(prev_logprobs -
                 generation_logprobs), such as {"mode": "truncate", "high": 2.0}. The mode
                 "sequence-mask", with low and high, drops the sequences whose geometric mean of
                 weights is outside of [low, high]; other sequences keep the weights of their tokens
                 (NeMo-RL's seq-mask-tis). None: no weights.
    inplace      whether the gradient overwrites the logits
    megatron     whether logits are sharded over Megatron's tensor-parallel group,
                 [B, S, V / ranks]. If not, plain logits have the whole vocabulary.
    force_on_policy_ratio
                 whether the ratio of every token is 1, as if prev_logprobs were the policy's own
    use_on_policy_kl_approximation
                 whether the KL is weighted by the ratio to the sampler, which takes a second pass
                 over the tokens
    positive_example_nll_weight
                 weight of an additional loss: the mean negative log-likelihood of the tokens of the
                 micro-batch in samples with a reward above 0
    sampling_params
                 NeMo-RL's `TrainingSamplingParams`, whose top_k and top_p define the candidate set
                 of each token. None: no candidate sets.
    seq_logprob_error_threshold
                 sequences whose error is above this number are masked. The error is the mean over
                 the trained tokens of exp |log-prob - generation_logprobs|. As in NeMo-RL it needs
                 force_on_policy_ratio and the aggregate "token-mean". None: no sequence is masked.

    The attributes input_type, loss_type and metric_normalizations tell NeMo-RL what the loss takes,
    how it is averaged, and by what each metric is divided.
    """

    objective: Objective
    _: KW_ONLY
    importance: dict[str, Any] | None = None
    inplace: bool = False
    megatron: bool = False
    force_on_policy_ratio: bool = False
    use_on_policy_kl_approximation: bool = False
    positive_example_nll_weight: float = 0.0
    sampling_params: Any = None
    seq_logprob_error_threshold: float | None = None

    def __post_init__(self) -> None:
        from nemo_rl.algorithms.loss import interfaces

        objective = self.objective
        require_one_of("aggregate", objective.aggregate, ("token-mean", "seq-mean-token-mean"))
        top_k = getattr(self.sampling_params, "top_k", None)
        top_p = getattr(self.sampling_params, "top_p", None)
        #: The arguments of `TokenSets.from_logits` that make the candidate sets; None without sets.
        self.rules: Any = None
        keeps_all = (top_k or 0) <= 0 and top_p in (None, 1)
        if not keeps_all:
            self.rules = {"top_k": top_k, "top_p": top_p}
        remedy = (
            "with sampling_params: the KL runs over the vocabulary, its weight over the sets: use"
            " the weighting 'score' or 'none', or use_on_policy_kl_approximation."
        )
        weighted = objective.beta != 0 and objective.kl_spec.weighting not in ("none", "score")
        require(not (self.rules and weighted), "kl", objective.kl, remedy)
        if self.seq_logprob_error_threshold is not None:
            self._check_threshold()
        #: All options of `importance_weights`. Without importance= they are those of the unclamped
        #: weights, which NeMo-RL reports among its metrics.
        self.correction: dict[str, Any] = {"level": "token", "mode": "truncate", "low": 0.0}
        if self.importance is not None:
            self.correction |= {"high": 2.0, **self.importance}
        else:
            level = "token" if objective.level == "token" else "sequence"
            self.correction |= {"level": level, "high": math.inf}
        #: Whether the metric of the weights is a mean over sequences, and not over tokens.
        self.sequences = objective.level != "token" or self.correction["level"] != "token"
        #: Whether whole sequences are dropped, and not tokens.
        self.drops_sequences = self.correction["mode"] == "sequence-mask"
        #: Whether a weight can be outside of the bounds.
        self.bounded = self.correction["low"] > 0 or self.correction["high"] < math.inf
        if self.force_on_policy_ratio:
            # The ratio of a token and of its sequence are both 1.
            self.objective = replace(objective, level="token")
        self.input_type = interfaces.LossInputType.LOGIT
        self.loss_type = interfaces.LossType.SEQUENCE_LEVEL
        per = "SEQUENCES"
        if objective.aggregate == "token-mean":
            self.loss_type = interfaces.LossType.TOKEN_LEVEL
            per = "TOKENS"
        divisors = DIVISORS | {"loss": per, "kl_penalty": per}
        divisors["sampling_importance_ratio"] = "SEQUENCES" if self.sequences else "TOKENS"
        if self.bounded:
            divisors["is_oob_ratio"] = "SEQUENCES" if self.drops_sequences else "TOKENS"
        if self.rules:
            divisors["outside_sampling_set"] = "TOKENS"
        if self.seq_logprob_error_threshold is None:
            divisors = {name: x for name, x in divisors.items() if name not in OF_SURVIVORS}
        # Older versions of NeMo-RL have no MetricNormalizer.
        kinds = getattr(interfaces, "MetricNormalizer", {})
        self.metric_normalizations = {name: kinds[kind] for name, kind in divisors.items() if kinds}

    @property
    def requires_survivor_normalization(self) -> bool:
        """Whether NeMo-RL's worker rescales gradients by the share of tokens that are left."""
        return self.seq_logprob_error_threshold is not None

    def _check_threshold(self) -> None:
        """Raise ValueError if seq_logprob_error_threshold does not fit the other options.

        With this option, sequences are masked whose error is above the threshold. The error of a
        sequence is the mean over its tokens of exp |log-prob - the sampler's log-prob|. NeMo-RL's
        worker then rescales all gradients by the share of tokens that is left.
        """
        threshold = self.seq_logprob_error_threshold
        require_number(
            "seq_logprob_error_threshold",
            threshold,
            "the mean of exp |difference of log-probs| is at least 1: pass a number above 1.",
            1.0,
            LARGEST,
        )

        def require_for_threshold(ok: bool, remedy: str) -> None:
            require(ok, "seq_logprob_error_threshold", threshold, remedy)

        require_for_threshold(
            self.force_on_policy_ratio and self.objective.aggregate == "token-mean",
            'it needs force_on_policy_ratio=True and aggregate="token-mean", as in NeMo-RL.',
        )
        # The likelihood loss is a mean over tokens of the micro-batch, so the rescaling, which
        # corrects global counts, would be wrong for it.
        require_for_threshold(
            self.positive_example_nll_weight == 0,
            "the counts of tokens by which NeMo-RL's worker rescales gradients do not divide the loss"
            " of positive_example_nll_weight: use one of them.",
        )
        # `rules` are the top-k and top-p of sampling_params, None without them.
        require_for_threshold(
            self.rules is None,
            "with sampling_params the log-probs of policy and sampler run over different candidate"
            " sets, so their difference is no error: use one of them.",
        )

    @classmethod
    def like(cls, theirs: Any, **options: Any) -> PolicyLoss:
        """Return our loss with the options of one of NeMo-RL's.

        theirs    a `ClippedPGLossFn`, whose attributes are its options
        options   inplace=, megatron= and sampling_params=, which `theirs` does not have

        Raises ValueError naming the option of `theirs` that is not supported or not known.
        """
        _refuse_other_options(theirs, READ)  # READ: the options that this function reads
        # force_on_policy_ratio has precedence in NeMo-RL.
        has_no_ratio = theirs.disable_ppo_ratio and not theirs.force_on_policy_ratio
        low = theirs.ratio_clip_min
        high = theirs.ratio_clip_max
        delta = theirs.ratio_clip_c
        remedy = "with disable_ppo_ratio it bounds no ratio: set one of them only."
        require(delta is None or not has_no_ratio, "ratio_clip_c", delta, remedy)
        clip = bounded_clip("NeMo-RL", low, high, delta, "ratio_clip_c", "ratio_clip_max")
        # The policy term: clipped by default.
        surrogate: Any = clip
        if theirs.use_cispo:
            surrogate = Cispo(1 + high, 1 - low)
        elif has_no_ratio:
            surrogate = PolicyGradient()
        level = "sequence" if theirs.sequence_level_importance_ratios else "token"
        is_token_mean = theirs.loss_type.name == "TOKEN_LEVEL"
        # Bounds of the log-ratio to the reference, and of the estimate; None for none.
        log_bound = theirs.kl_input_clamp_value
        bound = theirs.kl_output_clamp_value
        kl = Kl(
            theirs.reference_policy_kl_type,
            weighting="score",
            straight_through=False,
            clamp_log=math.inf if log_bound is None else log_bound,
            clamp=math.inf if bound is None else bound,
        )
        objective = Objective(
            surrogate,
            level=level,
            aggregate="token-mean" if is_token_mean else "seq-mean-token-mean",
            beta=theirs.reference_policy_kl_penalty,
            kl=kl,
        )
        # Weights of policy over sampler. MODES has our name of NeMo-RL's kind of truncation.
        if theirs.use_importance_sampling_correction:
            largest = theirs.truncated_importance_sampling_ratio
            options["importance"] = {
                "level": level,
                "mode": MODES[theirs.truncated_importance_sampling_type],
                "high": math.inf if largest is None else largest,
                "low": theirs.truncated_importance_sampling_ratio_min or 0.0,
            }
        if getattr(theirs, "seq_logprob_error_in_loss", False):
            options["seq_logprob_error_threshold"] = theirs.seq_logprob_error_threshold
        # Options that have the same name and meaning in both.
        names = (
            "force_on_policy_ratio",
            "use_on_policy_kl_approximation",
            "positive_example_nll_weight",
        )
        return cls(objective, **options, **{name: getattr(theirs, name) for name in names})

    @adapt_arguments
    @NAMED
    def __call__(
        self,
        logits: Tensor,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        *,
        vocab_parallel_group: Any = None,
    ) -> LossAndMetrics:
        """Return (loss, metrics) of a micro-batch.

        logits                 [B, S, V], or [B, S, V / ranks]: a DTensor, or Megatron's with
                               megatron=True. They are already divided by the temperature.
        data                   NeMo-RL's columns of the micro-batch, [B, S] or [B]
        global_valid_seqs      0-d, the number of sequences of all micro-batches and ranks
        global_valid_toks      0-d, the number of trained tokens of all micro-batches and ranks
        vocab_parallel_group   the tensor-parallel group of plain logits. A prepare_fn of yours may
                               pass it in place of megatron=True.

        The loss is 0-d, and the metrics are floats under NeMo-RL's names.
        """
        options = Options(shard=vocab_shard(logits, vocab_parallel_group, self.megatron))
        batch = self._batch(data)
        num_tokens = global_valid_toks.float()
        num_sequences = global_valid_seqs.float()
        counted_samples = data["sample_mask"]
        # With sampling_params: the batch with candidate sets, and targets outside of their set.
        batch_over_sets, outside_sets = self._with_candidate_sets(logits, batch, options)
        logps = self._logps_before(logits, batch_over_sets, options)
        counts: dict[str, Tensor] = {}
        if self.seq_logprob_error_threshold is not None:
            assert logps is not None
            errors = sampler_errors(batch, logps.flatten())
            is_kept = errors <= self.seq_logprob_error_threshold  # False for NaN, as in NeMo-RL
            counts = _counts_of_survivors(batch, counted_samples, is_kept)
            counted_samples = counted_samples * is_kept
            survivors = batch.trained.view(batch.targets.shape) & is_kept[:, None]
            batch = replace(batch, mask=survivors)
            batch_over_sets = replace(batch_over_sets, mask=survivors)
        # Importance weights of policy over sampler, and tokens whose weight is out of bounds.
        weights = None
        outside_bounds = None
        if self.importance is not None:
            weights, outside_bounds = self._weights(_with_old_logps(batch, logps))
            batch_over_sets = replace(batch_over_sets, weights=weights)
        is_token_mean = self.objective.aggregate == "token-mean"
        normalizer = num_tokens if is_token_mean else num_sequences
        out, kl = self._loss(logits, batch_over_sets, normalizer, options)
        loss = out.loss if kl is None else out.loss + kl

        metrics = self._metrics(
            out, batch, counted_samples, (num_tokens, num_sequences), weights, outside_bounds
        )
        metrics["loss"] = loss
        metrics |= counts
        if batch.nll_weights is not None:
            nll = -(batch.nll_weights * out.logps).sum()
            metrics["positive_nll_loss"] = nll / self.positive_example_nll_weight
        if kl is not None:
            metrics["kl_penalty"] = kl / self.objective.beta
        if outside_sets is not None:
            num_outside = (outside_sets.flatten() & batch.trained).sum()
            metrics["outside_sampling_set"] = num_outside / num_tokens.clamp(min=1)
        return loss, to_floats(metrics)

    def _batch(self, data: Any) -> TokenBatch:
        """Return NeMo-RL's columns as a batch. Position t has the values of token t + 1.

        data   has input_ids, token_mask, advantages and log-probs [B, S], sample_mask [B], and
               optionally on_policy and rewards [B]
        """

        def column(name: str) -> Tensor:
            # The last position has no next token. It is kept and masked, because a view of the
            # logits without it would cost a second copy of the gradient.
            return torch.nn.functional.pad(data[name][:, 1:], (0, 1))

        mask = (column("token_mask") * data["sample_mask"][:, None]) != 0
        fields = {"mask": mask, "sampler_logps": column("generation_logprobs")}
        if not self.force_on_policy_ratio:
            fields["old_logps"] = column("prev_logprobs")
            if "on_policy" in data:
                fields["on_policy"] = data["on_policy"][:, None] != 0
        if self.objective.beta != 0:
            fields["ref_logps"] = column("reference_policy_logprobs")
        if self.positive_example_nll_weight > 0 and "rewards" in data:
            is_positive = mask & (data["rewards"] > 0)[:, None]
            num_positive = is_positive.sum().clamp(min=1)
            fields["nll_weights"] = is_positive * (self.positive_example_nll_weight / num_positive)
        return TokenBatch(column("input_ids"), column("advantages"), **fields)

    def _logps_before(self, logits: Tensor, batch: TokenBatch, options: Options) -> Tensor | None:
        """Return the policy's log-probs, fp32 [B, S], or None if only the loss needs them.

        The loss computes log-probs itself. Before it, they are needed for the error of sequences
        (seq_logprob_error_threshold), and for importance weights of samples whose old log-probs are
        the policy's own.

        logits    [B, S, V], already divided by the temperature
        batch     targets, mask and candidate sets
        options   options of the kernels

        They have no gradient.
        """
        has_on_policy_samples = self.force_on_policy_ratio or batch.on_policy is not None
        needed_for_weights = self.importance is not None and has_on_policy_samples
        if not needed_for_weights and self.seq_logprob_error_threshold is None:
            return None
        with torch.no_grad():
            scored = token_logprobs(
                logits, batch.targets, mask=batch.mask, kept=batch.kept, options=options
            )
        return scored.logps

    def _with_candidate_sets(
        self, logits: Tensor, batch: TokenBatch, options: Options
    ) -> tuple[TokenBatch, Tensor | None]:
        """Return the batch with the candidate sets of sampling_params, and targets outside of them.

        logits    [B, S, V], whose top-k and top-p ids are the set of each row
        options   options of the kernels, with the shard of sharded logits

        The second result is bool [B, S]. The set of such a row is replaced by its target alone, so
        that its log-prob is 0 and has no gradient, as in NeMo-RL. Without sampling_params, returns
        (batch, None). Raises ValueError for sharded logits.
        """
        if not self.rules:
            return batch, None
        if options.shard is not None:
            raise ValueError(
                "sampling_params: a filter needs whole rows of logits, but these are cut over"
                " tensor-parallel ranks."
            )
        targets = batch.targets.flatten()
        num_rows = len(targets)
        sets = TokenSets.from_logits(logits, order="vllm", **self.rules)
        is_outside = ~sets.contains(targets)
        target_sets = TokenSets.from_padded(targets[:, None].to(sets.ids.dtype))
        # Row i of the result is row i of sets, or if the target is outside, of target_sets.
        row_numbers = torch.arange(num_rows, device=targets.device) + is_outside * num_rows
        kept = TokenSets.cat([sets, target_sets]).take(row_numbers)
        return replace(batch, kept=kept), is_outside.view(batch.targets.shape)

    def _loss(
        self, logits: Tensor, batch: TokenBatch, normalizer: Tensor, options: Options
    ) -> tuple[LossOutput, Tensor | None]:
        """Return the loss, and the KL term if it is not part of this loss.

        logits       [B, S, V], or a part of them on each tensor-parallel rank
        batch        targets, log-probs and weights, [B, S]
        normalizer   0-d, the denominator of both
        options      options of the kernels

        The KL is separate, 0-d, in two cases: the batch has candidate sets (NeMo-RL's KL runs over
        the vocabulary), and with use_on_policy_kl_approximation (its KL has other weights).
        """
        objective = self.objective
        has_kl = objective.beta != 0
        has_sets = batch.kept is not None
        is_weighted = has_kl and self.use_on_policy_kl_approximation
        # A separate KL over the vocabulary needs the logits after the backward of the loss.
        inplace = self.inplace and not (has_sets and has_kl)
        if not (has_sets and has_kl) and not is_weighted:
            # One pass over the logits computes the loss, with its KL if there is one.
            out = grpo_loss(
                logits, batch, objective, normalizer=normalizer, inplace=inplace, options=options
            )
            return out, None
        # Otherwise compute log-probs first, and both terms from them.
        scored = token_logprobs(
            logits,
            batch.targets,
            mask=batch.mask,
            entropy=objective.needs_entropy,
            options=options,
            kept=batch.kept,
            inplace=inplace,
            also=("log_kept_mass",),  # log of the probability of the candidate set
        )
        without_kl = replace(objective, beta=0.0)
        out = objective_loss(
            scored.logps, batch, without_kl, entropy=scored.entropy, normalizer=normalizer
        )
        kl_alone = replace(
            objective,
            surrogate=NoPolicyTerm(),
            level="token",
            filters=(),
            entropy_coef=0.0,
            kl=_by_ratio_to_the_sampler(objective.kl_spec) if is_weighted else objective.kl,
        )
        kl_batch = replace(
            batch,
            old_logps=batch.sampler_logps if is_weighted else None,
            weights=None,
            nll_weights=None,
            kept=None,
        )
        # log p(token) = log p(token | set) + log p(set)
        logps_over_vocabulary = scored.logps + scored.also["log_kept_mass"]
        kl = objective_loss(logps_over_vocabulary, kl_batch, kl_alone, normalizer=normalizer)
        return out, kl.loss

    def _weights(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return (importance weights, is_outside), fp32 and bool [B, S].

        The weight of a token corrects for a sampler that differs from the policy: it is
        exp(old log-prob - the sampler's log-prob), or this of its whole sequence. Weights outside
        of the bounds of `self.correction` are clamped or 0, and is_outside marks their tokens.

        batch   has mask, old_logps and sampler_logps, [B, S]
        """
        level = self.correction["level"]
        low = self.correction["low"]
        high = self.correction["high"]
        log_ratio = torch.where(batch.mask, batch.old_logps - batch.sampler_logps, 0.0)
        # A weight that overflows is 0 in NeMo-RL.
        if level == "token":
            overflows = log_ratio.exp().isinf()
        else:
            log_ratio_of_sequence = log_ratio.nansum(1, keepdim=True)
            if level == "geometric":
                num_trained = batch.mask.sum(1, keepdim=True).clamp(min=1)
                log_ratio_of_sequence = log_ratio_of_sequence / num_trained
            overflows = log_ratio_of_sequence.exp().isinf()
        unbounded = importance_weights(batch, level=level, high=math.inf)
        unbounded = unbounded.masked_fill(overflows, 0.0)
        if self.drops_sequences:
            # An infinite ratio adds 0 to the mean of its sequence in NeMo-RL. So does a token that
            # the sampler did not score (NaN) here.
            finite_logps = batch.sampler_logps.masked_fill(log_ratio.isinf(), math.nan)
            finite = replace(batch, sampler_logps=finite_logps)
            is_kept = rejection_mask(finite, metric="ratio", over="mean", low=low, high=high)
            return is_kept * unbounded, is_kept == 0
        # The weight of 0 is clamped to low, or is masked.
        overflow_weight = low if self.correction["mode"] == "truncate" else 0.0
        weights = importance_weights(batch, **self.correction)
        weights = weights.masked_fill(overflows, overflow_weight)
        return weights, (unbounded < low) | (unbounded > high)

    def _metrics(
        self, out: LossOutput, batch: TokenBatch, samples: Tensor, counts: tuple[Tensor, Tensor], weights: Tensor | None,
        outside: Tensor | None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return NeMo-RL's metrics of a micro-batch under its names, 0-d tensors.

        They are sums over the micro-batch, divided by global numbers of tokens or of sequences.

        out       the result of the loss
        batch     mask and log-probs of the micro-batch, [B, T]
        samples   [B]: 1 for samples that count
        counts    global numbers of tokens and sequences
        weights   importance weights [B, T], None to compute them here
        outside   bool [B, T]: tokens outside of the bounds of the importance weights, or None
        """
        mask: Any = batch.mask
        sampler: Any = batch.sampler_logps
        num_tokens = counts[0].clamp(min=1)
        num_sequences = counts[1].clamp(min=1)
        logps = out.logps
        old: Any = _with_old_logps(batch, out.logps).old_logps
        log_ratio, _, kl = ratio_terms(self.objective, logps, out.rows, batch)
        ratio = log_ratio.view(mask.shape).exp()  # may be infinite, as in NeMo-RL
        clamped_ratio = ratio.clamp(*self.objective.surrogate.ratio_bounds)
        if isinstance(self.objective.surrogate, PolicyGradient) and not self.force_on_policy_ratio:
            # REINFORCE has no ratio. NeMo-RL reports the log-probs in its place.
            ratio = logps
            clamped_ratio = logps

        def mean(values: Tensor) -> Tensor:
            return torch.where(mask, values, 0.0).sum() / num_tokens

        def estimate(logp: Tensor, ref_logp: Tensor) -> Tensor:
            """Return the objective's KL estimate of two log-probs."""
            return self.objective.kl_spec.function(logp, logp, ref_logp)[0]

        # NeMo-RL estimates the JS divergence by k3 = exp(d) - d - 1 to the mean of the two.
        mixture = torch.logaddexp(old, sampler) - math.log(2.0)
        js_divergence = (k3(mixture, mixture, old)[0] + k3(mixture, mixture, sampler)[0]) / 2
        metrics = {
            "token_mult_prob_error": mean((sampler - old).abs().exp()),
            "gen_kl_error": mean(estimate(sampler, old)),
            "policy_kl_error": mean(estimate(old, sampler)),
            "approx_entropy": mean(-(logps - sampler).exp() * logps),
            "js_divergence_error": mean(js_divergence),
            "num_valid_samples": samples.sum(),
            "kl_penalty": ratio.new_zeros(()),
            "positive_nll_loss": ratio.new_zeros(()),
        }
        for name, x in (("probs_ratio", ratio), ("probs_ratio_clamped", clamped_ratio)):
            # The minimum of a batch without tokens is inf, and the maximum -inf.
            no_value = x.new_tensor([torch.inf])
            largest = torch.cat([torch.where(mask, x, -torch.inf).flatten(), -no_value]).amax()
            smallest = torch.cat([torch.where(mask, x, torch.inf).flatten(), no_value]).amin()
            metrics[name] = mean(x)
            metrics[f"{name}_min"] = smallest
            metrics[f"{name}_max"] = largest
        if kl is not None:
            kl_weight: Any = out.rows.kl_weight
            kl_sum = torch.where(kl_weight != 0, kl_weight * kl, 0.0).sum()
            metrics["kl_penalty"] = kl_sum / self.objective.beta
        if weights is None:
            weights, _ = self._weights(replace(batch, old_logps=old))
        if self.sequences:  # a mean over sequences: all tokens of one have the same weight
            sequence_weights = torch.where(mask.any(1), weights.amax(1), 1.0) * samples
            mean_weight = sequence_weights.sum() / num_sequences
        else:
            mean_weight = mean(weights)
        metrics["sampling_importance_ratio"] = mean_weight
        if outside is not None and self.bounded:
            if self.drops_sequences:
                is_dropped = (outside & mask).any(1) * samples
                metrics["is_oob_ratio"] = is_dropped.sum() / num_sequences
            else:
                metrics["is_oob_ratio"] = mean(outside.float())
        return metrics


def _counts_of_survivors(batch: TokenBatch, samples: Tensor, is_kept: Tensor) -> dict[str, Tensor]:
    """Return {metric of NeMo-RL: number}, 0-d: masked sequences, and tokens and sequences left.

    batch     has the number of trained tokens of each sequence
    samples   [B], 1 for samples that count
    is_kept   bool [B], False for sequences that are masked, because their log-probs differ too much
              from the sampler's
    """
    tokens = batch.lengths * samples
    return {
        "num_masked_seqs_by_logprob_error": (samples * ~is_kept).sum(),
        "seq_logprob_error_valid_tokens": (tokens * is_kept).sum(),
        "seq_logprob_error_valid_seqs": (samples * is_kept).sum(),
    }


def _with_old_logps(batch: TokenBatch, logps: Tensor | None) -> TokenBatch:
    """Return the batch with the policy's log-probs as old log-probs of its on-policy samples.

    An on-policy sample was generated by the present policy, so its ratio is 1. The batch marks
    these samples (batch.on_policy), or has no old log-probs at all if all samples are on-policy.

    logps   fp32 [B, S], the policy's log-probs; None if the batch has no on-policy samples
    """
    if logps is None or (batch.old_logps is not None and batch.on_policy is None):
        return batch
    old = logps
    if batch.old_logps is not None and batch.on_policy is not None:
        old = torch.where(batch.on_policy, logps, batch.old_logps)
    return replace(batch, old_logps=old, on_policy=None)


def _by_ratio_to_the_sampler(kl: Kl) -> Kl:
    """Return NeMo-RL's KL that is weighted by the ratio of policy and sampler.

    kl   the estimator, and the bound of its value (clamp)

    The batch has the sampler's log-probs as old_logps. Two things differ from
    `Kl(weighting="ratio")`: clamp bounds the value after the weight is multiplied, and a weight
    that overflows fp32 counts as 0.
    """
    weighted = replace(kl, weighting="ratio", clamp=math.inf)

    def estimator(logp: Any, old_logp: Any, ref_logp: Any) -> tuple[Any, Any]:
        """Return (value, derivative in logp) for one token.

        logp, old_logp, ref_logp   log-probs under policy, sampler and reference
        """
        log_ratio = logp - old_logp
        terms = kl_terms(logp, old_logp, ref_logp, log_ratio, weighted.clamps, **weighted.formula)
        fits = log_ratio < LARGEST_LOG  # exp(log_ratio) does not overflow
        is_not_clamped = fits & (ops.abs(terms.value) <= kl.clamp)
        value = ops.minimum(ops.maximum(terms.value, -kl.clamp), kl.clamp)
        # `grad_both` is the derivative of estimate and weight. A clamped value has none.
        gradient = ops.where(is_not_clamped, terms.grad_both, 0.0)
        return ops.where(fits, value, 0.0), gradient

    return Kl(estimator)


# ---- log-probs from hidden states, on Megatron


def bind(*, strict: bool = False, any_version: bool = False) -> Slots:
    """Replace NeMo-RL's function of log-probs from hidden states by ours.

    It is `nemo_rl.distributed.model_utils.from_parallel_hidden_states_to_logprobs`, which the
    Megatron worker calls with use_fused_linear_logprobs.

    strict        True: a call that ours does not support raises RuntimeError. False: NeMo-RL's
                  function computes it.
    any_version   False: the first call is also computed by NeMo-RL and compared. True: it is not.

    Returns `Slots`: `undo()` restores NeMo-RL's function, `counts` has the number of calls. Raises
    RuntimeError if the function has other arguments or is replaced already.
    """
    return ADAPTER.bind(
        from_parallel_hidden_states_to_logprobs, strict=strict, any_version=any_version
    )


@with_trainer_names(
    hidden="tensor_parallel_hidden_states", weight="output_weight_layer", targets="target"
)
def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool | None,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Return the log-probs of the next tokens, fp32 [B, S - 1].

    tensor_parallel_hidden_states
                    [S / ranks, B, H]: this rank's part of the sequence. Its gradient is summed over
                    the ranks once.
    output_weight_layer
                    [V / ranks, H]. Rows that pad the vocabulary are in the softmax, as in NeMo-RL.
    target          int64 [B, S], token ids that are not shifted
    vocab_start_index, vocab_end_index
                    the ids of this rank's rows
    tp_group        the tensor-parallel group
    inference_only  whether the result has no gradient
    cp_group        the context-parallel group, or None. If it has several ranks, NeMo-RL computes
                    the call (and refuses it).
    runtime_gather_output, chunk_size
                    not used

    Raises ValueError if the ids are not those of this rank of tp_group.

    The decorator makes errors use the names of these arguments.
    """
    if cp_group is not None and torch.distributed.get_world_size(cp_group) > 1:
        raise NotCovered("context parallelism")
    width = len(output_weight_layer)
    ranks = torch.distributed.get_world_size(tp_group)
    start = torch.distributed.get_rank(tp_group) * width
    remedy = f"rank {start // width} of tp_group has the ids from {start} to {start + width}."
    bounds = (vocab_start_index, vocab_end_index)
    require(bounds == (start, start + width), "vocab_start_index, vocab_end_index", bounds, remedy)
    hidden = tensor_parallel_hidden_states
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        if ranks > 1:
            hidden = GatherSequence.apply(hidden, tp_group)
        rows = hidden.transpose(0, 1)[:, :-1]
        return log_probs_of(rows, target[:, 1:], head=output_weight_layer, group=tp_group).logps


# ---- distillation


class DistillationLoss:
    """A distillation loss for NeMo-RL, computed from logits at the ids of the teacher's top-k.

        loss_fn = DistillationLoss.like(DistillationLossFn(config))

    Calling it returns (loss, metrics) of a micro-batch, as NeMo-RL's own loss functions do.

    kl_type            "forward": KL(teacher || policy). "reverse": KL(policy || teacher). "mixed":
                       mixed_kl_weight times the forward KL plus (1 - mixed_kl_weight) times the
                       reverse KL.
    mixed_kl_weight    in [0, 1]
    zero_outside_topk  False: the probabilities of teacher and policy are renormalised over the
                       teacher's k ids. True: the policy's are over the vocabulary, and the
                       teacher's log-prob of all other ids is -100.
    megatron           whether logits are sharded over Megatron's tensor-parallel group,
                       [B, S, V / ranks]
    topk_logits_k      NeMo-RL's `distillation.topk_logits_k`, the number k. If it is passed, 0 is
                       refused here and not in the first step.

    With zero_outside_topk=False only the logits at the k ids are read. With True log-probs and
    entropy come from one pass over each row. The reverse KL then contains 100 times the policy's
    probability of all other ids, as in NeMo-RL, and most of its gradient comes from this term.
    `Exact("reverse")`, which counts all other ids as one outcome, has no such number.

    The forward KL is a sum over the k ids and may be negative, as in NeMo-RL. An id counts as often
    as the teacher lists it. Context parallelism, and losses across tokenizers, are not supported.
    Raises ValueError naming the argument that is wrong.
    """

    def __init__(
        self,
        kl_type: str = "mixed",
        mixed_kl_weight: float = 0.5,
        zero_outside_topk: bool = False,
        *,
        megatron: bool = False,
        topk_logits_k: int | None = None,
    ) -> None:
        """Check the options of the loss, and set the attributes that NeMo-RL reads.

        kl_type, mixed_kl_weight
                            "forward", "reverse" or "mixed", with the weight of the forward KL
        zero_outside_topk   whether the policy is normalised over the vocabulary, and not over the
                            teacher's k ids
        megatron            whether logits are sharded over Megatron's tensor-parallel group
        topk_logits_k       the number k in NeMo-RL's configuration, to check it here; None: it is
                            checked in the first step
        """
        from nemo_rl.algorithms.loss import interfaces

        if topk_logits_k is not None:
            require_whole("topk_logits_k", topk_logits_k, NO_IDS)
        require_one_of("kl_type", kl_type, ("forward", "reverse", "mixed"))
        require_number(
            "mixed_kl_weight",
            mixed_kl_weight,
            "the forward KL's share is a number in [0, 1].",
            0.0,
            1.0,
        )
        #: The weight of the forward KL. The reverse KL has the rest.
        self.forward = {"forward": 1.0, "reverse": 0.0}.get(kl_type, float(mixed_kl_weight))
        self.zero_outside_topk = zero_outside_topk
        self.megatron = megatron
        self.loss_type = interfaces.LossType.TOKEN_LEVEL
        self.input_type = interfaces.LossInputType.LOGIT

    @classmethod
    def like(cls, theirs: Any, **options: Any) -> DistillationLoss:
        """Return our loss with the options of one of NeMo-RL's.

        theirs    a `DistillationLossFn`
        options   megatron= and topk_logits_k=, which `theirs` does not have

        Raises ValueError naming an option of `theirs` that is set and not known here.
        """
        _refuse_other_options(theirs, READ_OF_DISTILLATION)
        return cls(theirs.kl_type, theirs.mixed_kl_weight, theirs.zero_outside_topk, **options)

    @adapt_arguments
    @NAMED
    def __call__(
        self,
        logits: Tensor,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        *,
        vocab_parallel_group: Any = None,
    ) -> LossAndMetrics:
        """Return (loss, metrics) of a micro-batch.

        logits                 [B, S, V], or [B, S, V / ranks]: a DTensor, or Megatron's with
                               megatron=True
        data                   NeMo-RL's columns: input_ids and token_mask [B, S], sample_mask [B],
                               teacher_topk_logits and teacher_topk_indices [B, S, k]. Position t
                               of the logits predicts token t + 1, and the last position nothing.
        global_valid_seqs      not used
        global_valid_toks      0-d, the number of trained tokens of all micro-batches and ranks. The
                               denominator is that of this micro-batch if data has no masks.
        vocab_parallel_group   the tensor-parallel group of plain logits. A prepare_fn of yours may
                               pass it in place of megatron=True.

        The loss is 0-d fp32.
        """
        ids = data["teacher_topk_indices"].to(logits.device)
        if ids.shape[-1] <= 0:
            raise ValueError(f"teacher_topk_indices has no id: topk_logits_k=0. {NO_IDS}")
        has_masks = "token_mask" in data and "sample_mask" in data
        if has_masks:
            mask = data["token_mask"].roll(-1, 1) * data["sample_mask"][:, None] != 0
        else:
            mask = torch.ones_like(ids[..., 0], dtype=torch.bool)
        mask[:, -1] = False
        teacher_logits = data["teacher_topk_logits"].to(logits.device, torch.float32)
        teacher = torch.log_softmax(teacher_logits, -1)
        shard = vocab_shard(logits, vocab_parallel_group, self.megatron)
        entropy = None
        if shard is None and not self.zero_outside_topk:
            # The log-softmax below runs over the k ids, so their logits are enough.
            policy = logits.gather(-1, ids).float()
        else:
            policy, entropy, _ = logps_at_ids(
                logits, ids, mask=mask, entropy=self.zero_outside_topk, options=Options(shard=shard)
            )
        policy = torch.where(mask[..., None], policy, OUTSIDE)  # masked rows may hold anything
        if not self.zero_outside_topk:
            policy = torch.log_softmax(policy, -1)
        divergence = policy.new_zeros(mask.shape)
        if self.forward > 0:
            divergence = divergence + self.forward * divergence_over_ids(FORWARD, policy, teacher)
        if self.forward < 1:
            if entropy is None:
                reverse = divergence_over_ids(REVERSE, policy, teacher)
            else:
                # sum of p log p - p log q over the vocabulary. The first sum is -entropy. In the
                # second, log q is a constant for all ids outside of the teacher's k.
                p = policy.exp()
                reverse = -entropy - (p * teacher).sum(-1) - OUTSIDE * (1.0 - p.sum(-1))
            divergence = divergence + (1.0 - self.forward) * reverse
        num_tokens = (global_valid_toks.float() + 1e-8) if has_masks else mask.sum()
        loss = torch.where(mask, divergence, 0.0).sum() / num_tokens
        return loss, {"loss": float(loss.detach()), "num_valid_samples": data["input_ids"].shape[0]}
