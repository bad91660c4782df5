"""`TokenBatch`: the tokens of a batch with all inputs of a loss besides the policy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import (
    DTYPES,
    FLOATING,
    INTEGERS,
    INTEGRAL,
    Checked,
    as_mask,
    check_missing,
    check_offsets,
    check_rows,
    check_token_shape,
    describe,
    expand_to_tokens,
    flat,
    is_capturing,
    refuse_unknown,
    require,
    require_device,
    require_shape,
    require_tensor,
    sequence_ids,
    versions_of,
)
from .rewards.estimators import ADVANTAGES, Evidence, lookup
from .rewards.groups import as_rewards
from .token_sets import TokenSets, check_sets, narrow_mask, rows_without_set

M = TypeVar("M")

#: Dtypes of targets, and what to pass.
IDS = (INTEGERS, "an int64 tensor of token ids, [B, T] or packed [N]")
#: Fields that are tensors, the dtypes that they may have, and what to pass.
FIELDS = {
    **dict.fromkeys(
        ("mask", "cu_seqlens", "groups", "rows"), (DTYPES, "a tensor on the device of targets")
    ),
    **dict.fromkeys(
        ("advantages", "old_logps", "ref_logps", "weights", "sampler_logps", "nll_weights"),
        (FLOATING, "a floating-point tensor on the device of targets"),
    ),
}
#: Dtypes of advantages that are not floating-point.
INTEGERS_OF_ADVANTAGES = frozenset(INTEGRAL) - {torch.bool}
#: Fields that may have one number per sequence.
PER_SEQUENCE_FIELDS = ("advantages", "weights", "nll_weights")
#: Names of masks, see `TokenBatch.named_mask`.
MASK_NAMES = ("trained", "contributing", "sequences")
#: The end of messages about cached counts that do not fit the tensors.
STALE_COUNTS = (
    "changed, but torch saw no write into its tensors (NumPy, DLPack, .data, inference mode): write"
    " by torch operations, or make a new TokenBatch."
)

#: Types of devices with events and asynchronous copies to pinned memory. A batch on such a device
#: sends its row counts to the host when it is made. ROCm's devices are called cuda. xpu is
#: untested.
DEVICES_WITH_EARLY_COUNTS = ("cuda", "xpu")


def sends_counts_early(device: torch.device) -> bool:
    """Return whether a batch on this device sends its row counts to the host when it is made.

    The host then need not wait for the device when a loss asks for the counts. On a CPU the tokens
    are counted when a loss asks.
    """
    return device.type in DEVICES_WITH_EARLY_COUNTS


class HostCopy:
    """Integers that are being copied from a device to the host.

    The copy begins when the object is made, so that it is usually complete when the numbers are
    needed. The first access to `on_host` waits for the copy, but not for work that was queued after
    it. Later accesses do not wait. While a graph is being captured, neither the copy nor the wait
    is possible.
    """

    def __init__(self, on_device: Tensor) -> None:
        """Begin to copy a tensor of integers to pinned memory of the host."""
        refuse_capture(on_device.device)
        module = torch.get_device_module(on_device.device)
        with module.device(on_device.device):
            self.sent = torch.empty(
                on_device.shape, dtype=on_device.dtype, device="cpu", pin_memory=True
            )
            self.sent.copy_(on_device, non_blocking=True)
            self.event = module.Event()
            self.event.record()
        self.on_device = on_device

    @cached_property
    def on_host(self) -> list[Any]:
        """The integers as Python numbers, nested lists of the shape of `on_device`.

        The first access waits until the copy to the host is complete.
        """
        refuse_capture(self.on_device.device)
        self.event.synchronize()  # recorded after the copy
        return self.sent.tolist()


def refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError if a CUDA graph is being captured on the device.

    During a capture nothing may be copied to the host.
    """
    if is_capturing(device):
        raise RuntimeError(
            "a graph is being captured, and the host does not know the row counts of this"
            " TokenBatch yet: call the loss once on this batch before capturing, and again after a"
            " write into its mask, advantages or weights."
        )


@dataclass(frozen=True, eq=False, repr=False)
class TokenBatch(Checked):
    """The tokens of a batch, and everything that the loss reads besides the policy itself.

    targets      int64 [B, T] padded, or [N] packed: the chosen token of each position. Row i of the
                 logits (or hidden states) predicts targets[i]; nothing is shifted.
    advantages   float or integer (kept as fp32) [B], [B, 1], [B, T] or [N]. None: for an objective
                 without a policy term, such as Objective.preset("distillation"); others refuse it.
    mask         bool (or 0/1 integer), the shape of targets: True at trained tokens. None: all
                 tokens are trained. At other tokens the values of all fields (NaN, inf, ids out of
                 range) have no effect.
    old_logps    float, the shape of targets: log-probs under the policy at the start of the update.
                 None means on-policy: the ratio is 1 and keeps its gradient.
    ref_logps    float, the shape of targets: log-probs under the frozen reference. Needed if beta
                 is not 0.
    weights      float [B], [B, 1] or the shape of targets: multiplies the policy term, not the KL
                 (sampler mismatch, see corrections.py).
    cu_seqlens   int32 or int64 [B + 1] for packed rows: sequence b is the rows from cu_seqlens[b]
                 to cu_seqlens[b + 1], the last excluded
    sampler_logps  float, the shape of targets: log-probs under the engine that sampled. NaN: the
                   engine did not score the token.
    nll_weights  float [B], [B, 1] or the shape of targets: adds -nll_weight * logp to the loss. No
                 denominator divides it, so divide the weights yourself (SFT on positive examples:
                 VAPO, arXiv 2504.05118).
    groups       integer [B]: sequences with equal numbers answer one prompt. Needed for
                 aggregate="group-mean".
    context_group  process group whose ranks share the tokens of each sequence (context or sequence
                   parallelism). Every rank has the same B sequences, in the same order, and any
                   tokens of each, possibly none. Sums over a sequence are then over the group. See
                   below.

    kept         the candidate set that each token was sampled from (top-k, top-p or min-p), a row
                 of `TokenSets` for each flat row of targets. The policy that sampled is the softmax
                 over this set, so log-probs, ratio, entropy, KL and gradient are computed over it.
                 old_logps, ref_logps and sampler_logps must be over the same sets. A row without
                 ids uses the whole vocabulary.
    missing      what to do if a target is not in its kept set: "include" adds it to the set, "full"
                 uses the whole vocabulary for the row, "mask" masks the row, "raise" raises
                 ValueError (the host waits for a GPU). None: "include", in strict mode "raise".
    logp_terms   `TokenSets` with values c: adds sum_v c_v log p_v over the ids that are listed for
                 a row to its policy term, or what `Objective(listed=)` computes from these. A row
                 without ids has no such term. An infinite value makes the loss infinite or NaN, and
                 the gradient of its row NaN. An id outside of the row's kept set has log-prob -inf:
                 it adds 0 if c = 0, else the loss is infinite. Strict mode raises ValueError for
                 both. With `Objective(listed=)` the function decides what such values mean.
    prob_terms   likewise with values r: adds sum_v r_v p_v. If both are passed, they must list the
                 same ids in the same order. No gradient flows to values. An id outside of the row's
                 kept set has p = 0 and adds 0.
    rows         integer, the shape of targets: the number of the row of logits (or hidden states)
                 that predicts each token. Logits may then have any leading shape, and rows count
                 over it in row-major order. None: row i predicts targets[i]. Several tokens may
                 share a row, such as those of rollouts with a common prefix. All other fields
                 remain per token. See docs/token_sets.md.
    on_policy    bool (or 0/1 integer) [B], [B, 1] or the shape of targets: True if the policy that
                 is trained has sampled the token. The ratio of such a token is 1 and keeps its
                 gradient, and its old_logps have no effect. At a sequence level the token adds 0 to
                 the log-ratio of its sequence.

    With a context_group, the losses and gradients of all ranks add up to those of the whole
    sequences. All ranks of the group must make the batch, compute a loss on it, and call
    `distributed.global_normalizer`. If you write into the mask or the advantages of a batch, do so
    on all ranks. Per batch the ranks all-reduce the lengths of the B sequences; from hidden states
    also whether each has a contributing token. Per loss they all-reduce the ratio and its slope of
    each sequence at a sequence level, and one number for the default normalizer. Metrics and
    log-probs cover the rows of this rank, without communication. ClipCov, KlCov, and
    EntropyQuantile without a process_group also select among the rows of this rank.

    On a GPU the batch copies its row counts to the host for `linear_grpo_loss`. A CUDA graph of
    that loss keeps the counts of the batch it was captured with. Call the loss once on the batch
    before you capture. Between replays, keep the number of trained and of contributing rows
    unchanged, at a sequence level in each sequence. Other numbers stop the program by an assertion
    on the device.

    If packed rows have N == B, a tensor of that length is read per token: write [B, 1] for values
    per sequence. No gradient flows into the fields of a batch.

    If one of these inputs of a trained token is NaN, the loss and the gradient of its row are NaN:
    its log-prob (a NaN in the logits or the hidden state), its advantage, old_logps, weights,
    nll_weights, and with a KL ref_logps. Clips, filters and KL estimators do not hide it. At a
    sequence level a NaN in the ratio of a sequence reaches each of its trained tokens, as in plain
    PyTorch. With `Objective(future_kl=)` a NaN in the ratio of a token reaches the tokens before it
    in its sequence. Exceptions:

    - where the mask is False, a NaN has no effect;
    - a weight of 0 removes the token and its NaN from the policy term, and so does a filter that
      drops the token for a reason other than the NaN (see formulas/filters.py);
    - a NaN in sampler_logps means that the sampler did not score the token (see `TrustRegion`);
    - a NaN in old_logps has no effect where `on_policy` is True;
    - a row with zero advantage, no KL and no entropy bonus gets no gradient from hidden states:
      only the loss is NaN. `Options(skip_inactive=True)` does not read such rows at all.

    In strict mode a NaN at a trained token raises ValueError. Raises ValueError for shapes, dtypes
    or devices that do not fit together.
    """

    targets: Tensor
    advantages: Tensor | None = None
    _: KW_ONLY
    mask: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    weights: Tensor | None = None
    cu_seqlens: Tensor | None = None
    sampler_logps: Tensor | None = None
    nll_weights: Tensor | None = None
    groups: Tensor | None = None
    context_group: Any = None
    kept: TokenSets | None = None
    missing: str | None = None
    logp_terms: TokenSets | None = None
    prob_terms: TokenSets | None = None
    rows: Tensor | None = None
    on_policy: Tensor | None = None
    __repr__ = describe

    def __post_init__(self) -> None:
        """Check all fields, and on a GPU begin to send the row counts to the host.

        The masks become bool, and integer advantages fp32.
        """
        self._check_tensors()
        if self.rows is not None:
            check_rows(self.rows, self.targets)
        if self.mask is not None:
            self._put("mask", as_mask("mask", self.mask, self.targets.shape))
        if self.on_policy is not None:
            self._check_on_policy(self.on_policy)
        self._check_token_sets()
        if self.context_group is not None:
            self._check_context_group()
        if self.groups is not None:
            self._check_groups()
        device = self.targets.device
        if sends_counts_early(device) and not (
            torch.compiler.is_compiling() or is_capturing(device)
        ):
            self._counts()  # start the copy to the host early, so that a loss need not wait for it

    def _check_tensors(self) -> None:
        """Check dtypes, devices and shapes of the fields in FIELDS. Integer advantages become fp32.

        Raises ValueError for a field that does not fit the targets.
        """
        targets = self.targets
        require_tensor("targets", targets, *IDS)
        shape = targets.shape
        if targets.dim() not in (1, 2):
            raise ValueError(
                f"targets has shape {list(shape)}: pass [B, T], or packed [N] with cu_seqlens."
            )
        advantages = self.advantages
        if isinstance(advantages, Tensor) and advantages.dtype in INTEGERS_OF_ADVANTAGES:
            self._put("advantages", advantages.float())
        if self.cu_seqlens is not None:
            check_offsets("targets", targets, self.cu_seqlens)
        for name, (dtypes, remedy) in FIELDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            require_tensor(name, value, dtypes, remedy)
            require_device(name, value, targets.device, "targets")
            if name.endswith("logps"):
                require_shape(name, value, shape, "targets")
            elif name in PER_SEQUENCE_FIELDS:
                check_token_shape(name, value.shape, shape, self.cu_seqlens)

    def _check_on_policy(self, on_policy: Tensor) -> None:
        """Check the field `on_policy`, which marks on-policy tokens, and convert it to bool."""
        require_tensor("on_policy", on_policy, DTYPES, "a bool tensor")
        require_device("on_policy", on_policy, self.targets.device, "targets")
        check_token_shape("on_policy", on_policy.shape, self.targets.shape, self.cu_seqlens)
        self._put("on_policy", as_mask("on_policy", on_policy, on_policy.shape))

    def _check_token_sets(self) -> None:
        """Check the sets of ids: kept, logp_terms and prob_terms.

        With missing="mask" the tokens whose target is not in its candidate set leave the mask. The
        mask that was passed is kept as `_original_mask`.
        """
        if self.missing is not None:
            check_missing(self.missing)
        if self.kept is not None:
            check_sets("kept", self.kept, self.targets)
            self._put("_original_mask", self.mask)
            self._put("mask", narrow_mask(self.kept, self.targets, self.mask, self.missing))
        for name, sets in (("logp_terms", self.logp_terms), ("prob_terms", self.prob_terms)):
            if sets is not None:
                check_sets(name, sets, self.targets)
                remedy = "give each id its coefficient: sets.with_values(...)."
                require(sets.values is not None, name, sets, remedy)
        if self.logp_terms is not None and self.prob_terms is not None:
            remedy = (
                "they list other ids than logp_terms: list the ids of both in both, with the value"
                " 0 where one has none."
            )
            lists_same_ids = self.logp_terms.same_ids(self.prob_terms)
            require(lists_same_ids, "prob_terms", self.prob_terms, remedy)

    def _check_context_group(self) -> None:
        """Raise ValueError unless this rank is in `context_group`, and the sequences are known.

        The ranks of the group share the tokens of each sequence.
        """
        group = self.context_group
        is_ready = dist.is_available() and dist.is_initialized()
        require(is_ready, "context_group", group, "call init_process_group first.")
        remedy = "this rank is not in it: pass the group that it shares sequences with."
        require(dist.get_rank(group) >= 0, "context_group", group, remedy)
        self.check_sequences("a context_group needs")

    def _check_groups(self) -> None:
        """Raise ValueError unless there is one integer group id per sequence."""
        groups = self.groups
        assert groups is not None
        if groups.shape != (self.sequences,) or groups.is_floating_point():
            raise ValueError(
                f"groups has shape {list(groups.shape)} and dtype {groups.dtype}: pass"
                f" one integer id per sequence, [{self.sequences}] (packed targets need cu_seqlens"
                " too)."
            )

    def _put(self, name: str, value: Any) -> None:
        """Set an attribute of this frozen dataclass, which refuses an ordinary assignment."""
        object.__setattr__(self, name, value)

    @classmethod
    def from_rewards(
        cls,
        targets: Tensor,
        rewards: Tensor | Sequence[Any],
        *,
        group_size: int | None = None,
        groups: Tensor | None = None,
        estimator: str = "group",
        **options: Any,
    ) -> TokenBatch:
        """Make a batch whose advantages are estimated from `rewards` [B].

        group_size, groups   which completions answer one prompt, as in `group_advantages`
        estimator            a name in `estimators.ADVANTAGES`. The default normalises rewards in
                             their group (`group_advantages`).
        options              options of the estimator (scale, eps, baseline, ...), the data that it
                             needs (fields of `estimators.Evidence`: greedy_rewards, ...), and
                             fields of TokenBatch (mask, old_logps, ...)

        missing_rewards="skip" leaves out rewards that are NaN. `missing` is the field of TokenBatch
        for targets outside of their candidate sets (`kept`). Raises the errors of the estimator and
        of TokenBatch, and TypeError for an option that none of them has.
        """
        estimate = lookup(ADVANTAGES, estimator, "estimator")
        batch_fields = {f.name for f in fields(cls)}
        evidence_fields = {f.name for f in fields(Evidence)}
        known = batch_fields | evidence_fields | estimate.option_names
        known -= {"targets", "advantages", "rewards"}
        refuse_unknown("TokenBatch.from_rewards", options, sorted(known))
        # Sort the options by receiver. mask and cu_seqlens are fields of TokenBatch and Evidence.
        batch_options = {name: x for name, x in options.items() if name in batch_fields}
        evidence_options = {name: x for name, x in options.items() if name in evidence_fields}
        estimator_options = {
            name: x
            for name, x in options.items()
            if name in estimate.option_names - batch_fields - evidence_fields
        }

        require_tensor("targets", targets, *IDS)
        _check_missing_option(batch_options)
        rewards = as_rewards("rewards", rewards)
        cu_seqlens = batch_options.get("cu_seqlens")
        if cu_seqlens is not None:
            check_offsets("targets", targets, cu_seqlens)
        if "rewards" in estimate.needs:
            _check_number_of_rewards(rewards, targets, cu_seqlens)
        evidence = Evidence(rewards, group_size=group_size, groups=groups, **evidence_options)
        advantages = estimate(evidence, **estimator_options).to(targets.device)
        if groups is None:
            sequence_numbers = torch.arange(len(evidence.rewards), device=targets.device)
            groups = sequence_numbers // (group_size or 1)
        if "cu_seqlens" in batch_options and not estimate.per_token:
            # If a packed batch has as many sequences as tokens, [B] would be read as per token.
            advantages = advantages[:, None]
        return cls(targets, advantages, groups=groups.to(targets.device), **batch_options)

    def to(self, device: torch.device | str | None, *, non_blocking: bool = False) -> TokenBatch:
        """Return the batch on another device, with its sets of ids. Dtypes stay.

        device         for example "cuda". None, or the device of the batch: the batch itself is
                       returned. torch takes "cuda" and "cuda:0" for different devices, so for one
                       in place of the other the result is a new batch.
        non_blocking   as in Tensor.to. From pinned memory the host does not wait for the copies. It
                       waits nevertheless if `missing` is "raise": to raise, the host must know
                       whether a target is outside of its candidate set.

        With a context_group (ranks that share sequences) all ranks must make this call, because a
        new batch on a GPU exchanges row counts with the other ranks. Raises ValueError if `device`
        is not a device.
        """
        if device is None:
            return self
        try:
            new_device = torch.device(device)
        except (TypeError, RuntimeError):
            # A caller may pass a dtype, as Tensor.to allows.
            remedy = "pass a device, for example 'cuda'; dtypes stay as they are."
            raise ValueError(f"device={device!r}: {remedy}") from None
        if new_device == self.targets.device:
            return self
        return self._apply(lambda x: x.to(new_device, non_blocking=non_blocking))

    def _apply(self, change: Callable[[Tensor], Tensor]) -> TokenBatch:
        """Return a new batch with `change` applied to each tensor, also of its token sets.

        change   for example a copy to another device. It must not change the numbers.
        """
        arguments = {f.name: getattr(self, f.name) for f in fields(self)}
        # The new batch narrows the mask by `missing` again, from the mask that the caller passed.
        arguments["mask"] = self._mask_before_missing
        for name, value in arguments.items():
            if isinstance(value, TokenSets):
                arguments[name] = value._apply(change)
            elif isinstance(value, Tensor):
                arguments[name] = change(value)
        if self.logp_terms is not None and self.prob_terms is not None:
            # The two lists of ids are equal. Let them share one tensor, so that the new batch need
            # not compare two.
            assert self.prob_terms.values is not None
            prob_values = change(self.prob_terms.values)
            arguments["prob_terms"] = arguments["logp_terms"].with_values(prob_values)
        return TokenBatch(**arguments)

    def with_ref_logps(self, ref_logps: Tensor) -> TokenBatch:
        """Return this batch with the reference's log-probs, which have the shape of targets.

        Raises ValueError for another shape.
        """
        require_shape("ref_logps", ref_logps, self.targets.shape, "targets")
        if torch.compiler.is_compiling() and self.kept is None:
            # torch 2.9 does not trace copy.copy.
            return replace(self, ref_logps=ref_logps.detach())
        # A copy keeps the row counts that were sent to the host, on which ref_logps have no effect.
        changed = copy.copy(self)
        changed._put("ref_logps", ref_logps.detach())
        return changed

    # ---- the batch as flat rows, row-major

    @property
    def tokens(self) -> int:
        """Number of tokens N, masked ones included."""
        return self.targets.numel()

    @property
    def sequences(self) -> int | None:
        """Number of sequences B (fully masked ones count), or None for packed rows without
        cu_seqlens.
        """
        if self.cu_seqlens is not None:
            return self.cu_seqlens.numel() - 1
        return self.targets.shape[0] if self.targets.dim() == 2 else None

    def check_sequences(self, what: str) -> TokenBatch:
        """Return this batch itself, or raise ValueError if its sequences are not known.

        Packed targets [N] need cu_seqlens for that. The rows of targets [B, T] are sequences.

        what   who needs the sequences, for the message "cu_seqlens is None, but {what} to know the
               sequences of packed rows": for example "a context_group needs"
        """
        if self.sequences is None:
            raise ValueError(
                f"cu_seqlens is None, but {what} to know the sequences of packed rows: pass"
                " cu_seqlens, or padded targets [B, T]."
            )
        return self

    @property
    def trained(self) -> Tensor:
        """bool [N]: the mask, all True if there is none."""
        if self.mask is None:
            return torch.ones(self.tokens, dtype=torch.bool, device=self.targets.device)
        return flat(self.mask)

    @property
    def _mask_before_missing(self) -> Tensor | None:
        """The mask that the caller passed.

        With missing="mask" the field `mask` lacks the tokens whose target is not in its candidate
        set.
        """
        # The attribute exists only in a batch with candidate sets.
        return self.__dict__.get("_original_mask", self.mask)

    @property
    def on_policy_tokens(self) -> Tensor:
        """bool [N]: tokens that the policy itself has sampled, which is being trained.

        The field `on_policy` marks them, for each token or each sequence. It must not be None.
        """
        assert self.on_policy is not None
        return flat(expand_to_tokens(self.on_policy, self.targets.shape, self.cu_seqlens) != 0)

    def flat(self, name: str) -> Tensor | None:
        """Return the float field `name` as fp32 [N], or None if the field is None.

        It has one value per token, 0 where the mask is False.
        """
        return self.table(name).get(name)

    def table(self, *names: str) -> dict[str, Tensor]:
        """Return float fields by name as fp32 [N], one value per token.

        A field that is None is left out. A value per sequence is expanded to its tokens. Values are
        0 where the mask is False.

        names   of the fields
        """
        tensors = {}
        for name in names:
            value = getattr(self, name)
            if value is not None:
                tensors[name] = expand_to_tokens(value, self.targets.shape, self.cu_seqlens)
        if self.mask is None or not tensors:
            return {name: x.flatten() for name, x in tensors.items()}
        # Mask all fields in one operation, which is one kernel launch on a GPU.
        masked = torch.where(self.mask, torch.stack(list(tensors.values())), 0.0)
        return dict(zip(tensors, masked.flatten(1).unbind(), strict=True))

    # ---- which tokens may have a gradient, and how many

    def named_mask(self, name: str) -> Tensor | None:
        """Return a mask of the tokens by name, bool [N]. None stands for all tokens.

        "trained"        the mask of the batch
        "contributing"   trained tokens whose policy term or likelihood term may be nonzero. For
                         the policy term the weight is nonzero, and the advantage is nonzero or the
                         token lists extra ids (`extra_ids`). For the likelihood term the nll weight
                         is nonzero.
        "sequences"      trained tokens of sequences that have a contributing token; the same as
                         "contributing" if the sequences are not known
        """
        mask = None if self.mask is None else flat(self.mask)
        if name == "trained":
            return mask
        contributing = self._contributing()
        if name == "contributing" or self.sequences is None:
            return contributing
        # With a context_group, the contributing tokens of a sequence may be on other ranks.
        num_contributing = self._contributing_over_ranks(self._own_sum(contributing))
        contributes = self.spread(num_contributing > 0)  # the value of each token's sequence
        return contributes if mask is None else contributes & mask

    def _contributing(self) -> Tensor:
        """Return the mask "contributing" of `named_mask`, bool [N].

        A token is in it if it is trained and its policy term or likelihood term may be nonzero:

            (advantage != 0 or the token lists extra ids) and weight != 0, or nll_weight != 0
        """
        shape = self.targets.shape
        if self.advantages is None:
            contributing = torch.zeros(shape, dtype=torch.bool, device=self.targets.device)
        else:
            contributing = expand_to_tokens(self.advantages, shape, self.cu_seqlens)
        # logical_and and logical_or take numbers, of which nonzero ones are True. On a GPU a
        # separate comparison with 0 would be one more kernel launch.
        if self.extra_ids is not None:
            has_ids = (self.extra_ids.counts > 0).view(shape)
            contributing = torch.logical_or(contributing, has_ids)
        if self.weights is not None:
            weights = expand_to_tokens(self.weights, shape, self.cu_seqlens)
            contributing = torch.logical_and(contributing, weights)
        if self.nll_weights is not None:
            nll_weights = expand_to_tokens(self.nll_weights, shape, self.cu_seqlens)
            contributing = torch.logical_or(contributing, nll_weights)
        if self.mask is not None:
            contributing = torch.logical_and(contributing, self.mask)
        return flat(contributing if contributing.dtype == torch.bool else contributing != 0)

    def count_in_mask(self, name: str, mask: Tensor | None = None) -> int:
        """Return the number of tokens of this process in a named mask, as a Python number.

        On a GPU the batch has sent it to the host, see `counts_by_sequence`.

        name   one of MASK_NAMES
        mask   what `named_mask(name)` returned, if the caller has it
        """
        mask = self.named_mask(name) if mask is None else mask
        if not sends_counts_early(self.targets.device):  # on a CPU, count now
            return self.tokens if mask is None else int(mask.sum())
        on_host, _ = self._sent_counts(name)
        count = sum(on_host)  # over all sequences
        if mask is not None:
            # Stop the program if the mask was changed by a write that torch has not seen.
            message = f"the rows of a TokenBatch that are {name} {STALE_COUNTS}"
            torch._assert_async(mask.sum() == count, message)
        return count

    def counts_by_sequence(self, name: str, mask: Tensor | None = None) -> tuple[int, ...]:
        """Return the number of tokens of each sequence in a named mask, as Python numbers.

        Only tokens of this process count. If the sequences are not known, the result is one number
        for all tokens. On a CPU the tokens are counted now. On a GPU the batch has sent the numbers
        to the host when it was made.

        A write on a GPU that torch does not see (through DLPack or `.data`, in inference mode, or
        between replays of a graph) makes these numbers wrong. An asynchronous assertion on the
        device then stops the program. The host does not wait for it.

        name   one of MASK_NAMES
        mask   what `named_mask(name)` returned, if the caller has it
        """
        mask = self.named_mask(name) if mask is None else mask
        counts = self._own_sum(self.trained if mask is None else mask).long()
        if not sends_counts_early(self.targets.device):
            return tuple(counts.tolist())
        on_host, on_device = self._sent_counts(name)
        message = f"the rows of a TokenBatch that are {name}, in a sequence, {STALE_COUNTS}"
        torch._assert_async((counts == on_device).all(), message)
        return on_host

    def _sent_counts(self, name: str) -> tuple[tuple[int, ...], Tensor]:
        """Return (on_host, on_device): the tokens of each sequence in a named mask, as sent.

        on_host     Python numbers. The first access waits for the copy.
        on_device   int64 [B], the tensor that was sent
        """
        counts = self._counts()  # a row for each sequence, a column for each mask
        column = MASK_NAMES.index(name)
        return tuple(row[column] for row in counts.on_host), counts.on_device[:, column]

    def _counts(self) -> HostCopy:
        """Return the number of tokens of each sequence in each mask, int64 [B, len(MASK_NAMES)].

        They are counted and sent to the host once, and again after a write into one of the tensors
        that they depend on.
        """
        versions = versions_of((self.mask, self.advantages, self.weights, self.nll_weights))
        return self._cached("_cached_counts", versions, self._send_counts)

    def _send_counts(self) -> HostCopy:
        """Count the tokens of each sequence in each mask, and begin to send the counts to the host.

        The counts are int64 [B, len(MASK_NAMES)], or [1, len(MASK_NAMES)] if the sequences are not
        known. `named_mask` says what the masks "trained", "contributing" and "sequences" are.
        """
        # Only tokens of this process count. _own_sum adds up both masks of each sequence.
        counts = self._own_sum(torch.stack([self.trained, self._contributing()], 1))
        num_trained, num_contributing = counts.unbind(1)
        in_sequences = num_contributing
        if self.sequences is not None:
            # A sequence with a contributing token, on any rank, counts all of its trained tokens.
            contributes = self._contributing_over_ranks(num_contributing) > 0
            in_sequences = num_trained * contributes
        return HostCopy(torch.stack([num_trained, num_contributing, in_sequences], 1).long())

    def _cached(self, name: str, versions: list[Any], make: Callable[[], M]) -> M:
        """Return the result of `make`, or the cached result of an earlier call.

        name       the attribute of this object that holds the cached result
        versions   torch's version counters of the tensors that the result depends on
                   (`versions_of`). torch counts writes into a tensor. If they differ from those of
                   the cached result, `make` is called again.
        make       computes the result
        """
        cached = self.__dict__.get(name)
        if cached is None or cached[0] != versions:
            cached = versions, make()
            self._put(name, cached)
        return cached[1]

    # ---- sets of ids

    @property
    def extra_ids(self) -> TokenSets | None:
        """The ids that tokens list in addition to their targets, or None.

        They are the ids of `logp_terms` and `prob_terms`. If both are given, their ids are equal.
        """
        return self.prob_terms if self.logp_terms is None else self.logp_terms

    @property
    def without_set(self) -> Tensor:
        """bool [N]: tokens that use the whole vocabulary, in a batch with candidate sets.

        These are tokens with an empty set and, with missing="full", tokens whose target is not in
        their set.
        """
        assert self.kept is not None
        return rows_without_set(self.kept, self.targets, self.missing)

    @property
    def outside_set(self) -> Tensor:
        """The share of the tokens in the mask whose target is not in its candidate set, 0-d fp32.

        The mask is the one that the caller passed: with missing="mask" it includes the tokens that
        were removed because their target is not in its set.
        """
        assert self.kept is not None
        is_inside = self.kept.contains(self.targets)
        mask = self._mask_before_missing
        counted = torch.ones_like(is_inside) if mask is None else flat(mask)
        return (counted & ~is_inside).sum() / counted.sum().clamp(min=1).float()

    # ---- sums over sequences, and over the ranks that share them

    def _contributing_over_ranks(self, num_contributing: Tensor) -> Tensor:
        """Return the number of contributing tokens of each sequence, [B], summed over ranks.

        num_contributing   the number of contributing tokens of this rank, [B]
        """
        return self._sum_over_ranks(
            "contributing tokens",
            num_contributing,
            (self.mask, self.advantages, self.weights, self.nll_weights),
        )

    def _sum_over_ranks(
        self, name: str, own_sums: Tensor, sources: tuple[Tensor | None, ...]
    ) -> Tensor:
        """Add up sums over the tokens of each sequence, [B], over the ranks that share sequences.

        The result is cached, so that ranks communicate once. It is computed again if torch saw a
        write into one of `sources`. A write through NumPy, for example, is not seen. If a sum of
        this rank changed although torch saw no write, an error says so.

        name       what is summed, for messages
        own_sums   sums over the tokens of this rank, [B]
        sources    the tensors that the sums depend on
        """
        if self.context_group is None or torch.compiler.is_compiling():
            return self.over_context(own_sums)
        # The cache holds the sums that the total was computed from, and the total.
        cached_sums, total = self._cached(
            f"_cached_{name}",
            versions_of(sources),
            lambda: (own_sums, self.over_context(own_sums.clone())),
        )
        if cached_sums is own_sums:  # computed just now
            return total
        # The total comes from the cache. Check that the sums of this rank are still the same.
        if sends_counts_early(own_sums.device):
            # On a GPU without a wait of the host: the device stops the program.
            is_same = (own_sums == cached_sums).all()
            torch._assert_async(is_same, f"the {name} of a TokenBatch {STALE_COUNTS}")
        elif not torch.equal(own_sums, cached_sums):
            # All ranks would have to sum again, and the others may not have seen a change.
            raise RuntimeError(f"the {name} of a TokenBatch with a context_group {STALE_COUNTS}")
        return total

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Return the sum of values over the tokens of each sequence, fp64 [B].

        With a context_group the sums are over the tokens of all its ranks. Terms are added in a
        fixed order, without atomics.

        values   [N], or [N, k], for which the result is [B, k]
        """
        return self.over_context(self._own_sum(values))

    def _own_sum(self, values: Tensor) -> Tensor:
        """Return the sum of values over the tokens of each sequence on this rank, fp64 [B].

        If the sequences are not known, the result is the sum over all tokens, [1].

        values   [N], or [N, k], for which the result is [B, k]
        """
        if self.sequences is None:
            return values.sum(0, dtype=torch.float64)[None]
        if self.cu_seqlens is None:
            per_sequence = values.view(*self.targets.shape, *values.shape[1:])
            return per_sequence.sum(1, dtype=torch.float64)
        offsets = self.cu_seqlens.long()
        # unsafe=True skips a check of the offsets, for which the host would wait for a GPU.
        return torch.segment_reduce(values.double(), "sum", offsets=offsets, initial=0, unsafe=True)

    def over_context(self, values: Tensor, how: str = "SUM") -> Tensor:
        """Reduce values in place over the ranks that share the sequences, and return them.

        These are the ranks of `context_group`, all of which must make this call. Without a
        context_group the values are returned as they are.

        values   a tensor, of the same shape on all ranks
        how      "SUM", "MAX" or "MIN"
        """
        if self.context_group is not None:
            dist.all_reduce(values, op=getattr(dist.ReduceOp, how), group=self.context_group)
        return values

    @property
    def context_ranks(self) -> int:
        """How many ranks share each sequence."""
        return 1 if self.context_group is None else dist.get_world_size(self.context_group)

    @property
    def lengths(self) -> Tensor:
        """Number of trained tokens of each sequence, fp64 [B], over all ranks that share it."""
        return self._sum_over_ranks("trained tokens", self._own_sum(self.trained), (self.mask,))

    def same_group(self) -> Tensor:
        """Return fp64 [B, B]: 1 where two sequences answer the same prompt, else 0.

        A product of this matrix with values [B] is the sum of the values over the group of each
        sequence. The sums of the groups themselves would be a tensor whose length depends on values
        on the device, which the host would have to wait for. Raises ValueError if `groups` is None.
        """
        if self.groups is None:
            raise ValueError(
                'groups is None, but aggregate="group-mean" takes one mean over the answers to a'
                " prompt: pass ids [B]."
            )
        return (self.groups[:, None] == self.groups).double()

    def spread(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the value of each token's sequence, [N].

        values   [B], one value per sequence
        dtype    of the result; None: the dtype of values
        """
        per_token = self.broadcast(values).expand(self.targets.shape)
        if dtype is not None:
            per_token = per_token.to(dtype)  # copies, so that flatten need not copy again
        return per_token.flatten()

    def broadcast(self, values: Tensor) -> Tensor:
        """Return the value of each token's sequence, in a shape that broadcasts to targets.

        The result is [B, 1] for targets [B, T], and [N] for packed targets.

        values   [B], one value per sequence
        """
        if self.cu_seqlens is not None:  # packed targets
            return values[sequence_ids(self.cu_seqlens, self.tokens)].view(self.targets.shape)
        return values[:, None]


def _check_missing_option(options: dict[str, Any]) -> None:
    """Raise ValueError if a caller of `from_rewards` passed `missing` but meant `missing_rewards`.

    `missing` says what to do with a target outside of its candidate set (`kept`). So it has no
    meaning without candidate sets, and "skip" is a value of `missing_rewards` only.

    options   the arguments of `TokenBatch.from_rewards` that are fields of TokenBatch
    """
    missing = options.get("missing")
    if missing is not None and options.get("kept") is None:
        remedy = (
            "it says what to do with a target outside of its candidate set, and kept is None:"
            ' leave it out. For rewards that are NaN pass missing_rewards="raise" or "skip".'
        )
        require(False, "missing", missing, remedy)  # raises
    if missing == "skip":
        # "skip" is not a value of `missing`, so this raises.
        check_missing("skip", ' For rewards that are NaN pass missing_rewards="skip".')


def _check_number_of_rewards(rewards: Tensor, targets: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raise ValueError unless there is one reward per sequence, if the sequences are known.

    They are known for targets [B, T], and for packed targets [N] with cu_seqlens.

    rewards      [B], or another shape, which is refused
    cu_seqlens   int32 or int64 [B + 1] of packed targets, or None
    """
    has_sequences = cu_seqlens is not None or targets.dim() == 2
    if rewards.dim() == 0 or not has_sequences:
        return
    num_sequences = len(targets) if cu_seqlens is None else len(cu_seqlens) - 1
    if len(rewards) == num_sequences:
        return
    if rewards.dim() > 1 and rewards.numel() == num_sequences:
        raise ValueError(
            f"rewards has shape {list(rewards.shape)}, but targets {num_sequences} sequences: pass"
            f" rewards.flatten() with group_size={rewards.shape[-1]}."
        )
    raise ValueError(
        f"rewards has {len(rewards)} numbers, but targets {num_sequences} sequences: pass one a"
        " sequence."
    )


# ---- alignment: a row of a model predicts the next token, so that what was recorded for a token
# moves to the row before it


def shift_targets(
    ids: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (targets, mask) of the shape of ids, with which row i predicts token i + 1.

    targets[i] is ids[i + 1] if token i + 1 is in the same sequence and in the mask.

        targets, mask = shift_targets(ids, mask=completion_mask, cu_seqlens=cu_seqlens)
        logps, _ = linear_logprobs(hidden, lm_head.weight, targets, mask=mask)

    ids          int64 [B, T], or packed [N].
    mask         bool (or 0/1 integer), the shape of ids: tokens that may be a target, for example
                 the tokens of completions. None: all.
    cu_seqlens   int32 or int64 [B + 1] of packed ids: sequence b is ids[cu_seqlens[b] :
                 cu_seqlens[b + 1]].
    segment_ids  integers, the shape of ids, in place of cu_seqlens: equal for neighbours in one
                 sequence. Position ids that start at 0 in each sequence give them by (position_ids
                 == 0).cumsum(-1).

    The last token of a row or sequence predicts nothing: its mask is False, its target 0. Hidden
    states keep their length, so that nothing has to be cut or rolled afterwards. With context
    parallelism, call this before the ranks take their parts: the target of a part's last token is
    on another rank. Raises ValueError on shapes and dtypes that disagree.
    """
    require_tensor("ids", ids, *IDS)
    remedy = "pass token ids [B, T] or packed [N]."
    require(ids.dim() in (1, 2), "ids.shape", list(ids.shape), remedy)
    if cu_seqlens is not None:
        if segment_ids is not None:
            raise ValueError("cu_seqlens and segment_ids are both given: pass one of them.")
        check_offsets("ids", ids, cu_seqlens)
        segment_ids = sequence_ids(cu_seqlens, ids.numel())
    elif segment_ids is not None:
        require_tensor("segment_ids", segment_ids, INTEGRAL, "integers of the shape of ids")
        require_shape("segment_ids", segment_ids, ids.shape, "ids")
    if mask is None:
        is_target = torch.ones_like(ids, dtype=torch.bool)
    else:
        is_target = as_mask("mask", mask, ids.shape)
    if segment_ids is not None:
        # A token can be a target only if it follows a token of its own sequence.
        follows = segment_ids[..., 1:] == segment_ids[..., :-1]
        is_target = torch.cat([is_target[..., :1], is_target[..., 1:] & follows], -1)
    targets = torch.zeros_like(ids)
    targets[..., :-1] = ids[..., 1:]
    shifted_mask = torch.zeros_like(is_target)
    shifted_mask[..., :-1] = is_target[..., 1:]
    return targets, shifted_mask


def shift_sets(
    sets: TokenSets,
    ids: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> TokenSets:
    """Return sets that were recorded for each token, moved to the rows that predict the tokens.

    Row i gets the set of token i + 1.

        targets, mask = shift_targets(ids, mask=completion_mask, cu_seqlens=cu_seqlens)
        kept = shift_sets(TokenSets.from_counts(kept_ids, counts), ids, cu_seqlens=cu_seqlens)

    sets         one row for each token of ids, row-major.
    ids          int64 [B, T], or packed [N], as in `shift_targets`. Only the shape is used.
    cu_seqlens, segment_ids  as in `shift_targets`. The host reads them, which waits if they are on
                             a device.

    The last token of a row or sequence predicts nothing: its set is empty. The set of a first token
    is dropped. prime-rl records sets in this form, with a count of 0 for tokens of prompts and
    tools. Records of generated tokens alone need no shift: see `TokenSets.from_lists`. Raises
    ValueError on shapes that disagree.
    """
    check_sets("sets", sets, ids)
    boundaries = segment_ids if cu_seqlens is None else cu_seqlens
    device = boundaries.device if isinstance(boundaries, Tensor) else "cpu"
    # `shift_targets` moves ids. Give it the numbers of the tokens in place of ids: next_token[i] is
    # then the number of the token that row i predicts.
    token_numbers = torch.arange(ids.numel(), device=device).view(ids.shape)
    next_token, has_next = shift_targets(
        token_numbers, cu_seqlens=cu_seqlens, segment_ids=segment_ids
    )
    # Row i takes the set of this token. -1 gives it an empty set.
    return sets.take(torch.where(has_next, next_token, -1).flatten())
