"""Losses of draft heads that are trained together with the policy (MTP, EAGLE-3).

A draft head of depth k (k = 0, 1, ...) has a hidden state at each position t. With the output head
of the policy it predicts the token at t + k + 2. The policy itself predicts this token from its
hidden state at t + k + 1. With the draft's distribution p and the policy's q the loss is

    soft   the cross-entropy H(q, p) = KL(q || p) + H(q)
    hard   -log p(token at t + k + 2)

Only the draft's hidden states get a gradient. For the soft loss that is (p - q) @ weight. It is
computed in the forward, a chunk of the policy's positions at a time:

    for chunk in chunks:
        policy_logits = policy_hidden[chunk] @ weight.T                       one matmul
        for k, hidden in enumerate(draft_hidden):
            draft_logits  = hidden[chunk - (k + 1)] @ weight.T                matmul 1 of a depth
            grad_hidden   = (softmax(draft_logits) - softmax(policy_logits)) @ weight   matmul 2
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .checks import (
    DTYPES,
    INTEGERS,
    as_mask,
    check_offsets,
    describe,
    require,
    require_one_of,
    require_shape,
    require_tensor,
    require_whole,
    sequence_ids,
)
from .core.divergence import DivergenceKind
from .core.linear import split_rows, without_autocast
from .core.linear_memory import LinearMemory
from .core.matmuls import HeadMatmuls
from .core.softmax import GradientCoefficients, LogitRows, ReferenceRows, SoftmaxSums, sums_for
from .core.sources import ProjectedLogits
from .inputs import LinearInput, RowLayout
from .logprobs import linear_logprobs
from .options import (
    Head,
    Options,
    as_options,
    is_traced,
    must_break_graph,
    refuse_keywords,
    run_outside_graph,
)
from .transform import LogitTransform

KINDS = ("soft", "hard")


@dataclass(frozen=True, eq=False, repr=False)
class DraftLoss:
    """The result of `draft_head_loss` for D draft heads, one for each depth.

    loss           0-d fp32, differentiable: the mean over depths of the mean over their positions
    token_losses   fp32 [D, *positions], differentiable, 0 at positions that do not count
    mask           bool [D, *positions]: positions that count
    metrics        fp32 [D] each, detached:
                   "loss"             mean loss of a position, in nats
                   "positions"        number of positions that count
                   "acceptance"       mean of 1 - TV(p, q): the probability that speculative
                                      sampling accepts a draft token (only soft)
                   "top1_agreement"   share of positions where the draft's likeliest id is the
                                      policy's (hard: the token)
    """

    loss: Tensor
    token_losses: Tensor
    mask: Tensor
    metrics: dict[str, Tensor]
    __repr__ = describe


def draft_head_loss(
    draft_hidden: Tensor | Sequence[Tensor],
    policy_hidden: Tensor | None,
    weight: Tensor | Head,
    *,
    kind: str = "soft",
    ids: Tensor | None = None,
    depth: int = 0,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    transform: LogitTransform | None = None,
    normalizer: float | Tensor | None = None,
    metrics: bool = True,
    options: Options | None = None,
    **unknown: NoReturn,
) -> DraftLoss:
    """Compute the loss of draft heads from hidden states, without logits [num_positions, V].

        draft_hidden = mtp(hidden.detach(), ids)
        out = draft_head_loss(draft_hidden, hidden, lm_head.weight, mask=attention_mask)
        (policy_loss + 0.1 * out.loss).backward()

    draft_hidden    [B, T, H] or packed [N, H]: what the output head gets from the draft of `depth`,
                    the row of position t at index t. Or a list of such tensors, for consecutive
                    depths from `depth` on. They alone get a gradient.
    policy_hidden   the same shape: what the output head gets from the policy. None for "hard".
    weight          [V, H], or `Head(weight, bias, transform)`: the head of both, which gets no
                    gradient
    kind            "soft" (cross-entropy with the policy's distribution) or "hard" (with `ids`)
    ids             int64 [B, T] or [N], for "hard": the token at each position, not shifted
    depth           depth of the first draft, from 0: depth k predicts the token at t + k + 2
    mask            bool [B, T] or [N]: real tokens, or those that may count. Position t counts if t
                    and t + k + 1 (hard: t + k + 2) are in the mask and in the same sequence. None:
                    all.
    cu_seqlens      int [num_sequences + 1]: boundaries of packed sequences
    transform       temperature, softcap and scale of both sides, see `LogitTransform`. Acceptance
                    is that of sampling at this temperature.
    normalizer      number of positions that each depth's sum is divided by, for example over all
                    micro-batches; a number or 0-d tensor. None: the positions of this call, at
                    least 1.
    metrics         False: only "loss" and "positions". The others cost passes over the logits, but
                    no matmul.
    options         backend, strict mode, vocabulary shard, see `Options`. Padding ids of a shard
                    take no part in either softmax.

    Soft: one matmul for the policy, which all depths share, and two for each depth. Hard: two for
    each depth (`linear_logprobs` with a frozen head). The gradient for unit losses is kept in fp32
    until the backward, [num_positions, H] for each depth. On a GPU the host waits for the
    positions that count: once for a soft loss, once for each depth of a hard one.

    Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2) for the depths; speculative sampling (arXiv
    2211.17192, section 3.2) for the acceptance. Raises ValueError naming the argument that is
    wrong.
    """
    if unknown:
        refuse_keywords(draft_head_loss, unknown)
    options = as_options(options)
    if is_traced() and must_break_graph(options, None, kind):
        return run_outside_graph(
            draft_head_loss,
            draft_hidden,
            policy_hidden,
            weight,
            kind=kind,
            ids=ids,
            depth=depth,
            mask=mask,
            cu_seqlens=cu_seqlens,
            transform=transform,
            normalizer=normalizer,
            metrics=metrics,
            options=options,
        )
    require_one_of("kind", kind, KINDS)
    require_whole("depth", depth, "it is a whole number, 0 for the first draft.", 0)
    drafts = check_drafts(draft_hidden)
    positions = Positions.check(drafts[0], mask, cu_seqlens)
    check_sources_of_kind(kind, policy_hidden, ids, drafts[0])
    inputs, transform = LinearInput.from_arguments(drafts[0], weight, transform)
    head = Head(detached(inputs.weight), detached(inputs.bias))
    call = DraftCall(
        drafts=drafts,
        head=head,
        positions=positions,
        first_depth=depth,
        transform=transform,
        options=options,
        has_metrics=metrics,
    )
    if kind == "soft":
        assert policy_hidden is not None
        token_values = call.soft_values(policy_hidden)
    else:
        assert ids is not None
        token_values = call.hard_values(ids)
    return make_output(token_values, normalizer)


def detached(x: Any) -> Any:
    """Return x.detach() if x is a tensor, else x as it is: a later check refuses it."""
    return x.detach() if isinstance(x, Tensor) else x


# ---- checks


def check_drafts(draft_hidden: Any) -> list[Tensor]:
    """Return the hidden states of the drafts as a list, one tensor for each depth.

    draft_hidden   what the caller passed: a tensor [B, T, H] or [N, H], or a list of such tensors

    Raises ValueError unless all are tensors of one shape.
    """
    remedy = "a tensor [B, T, H] or [N, H], or a list of them, one for each depth"
    drafts = list(draft_hidden) if isinstance(draft_hidden, (list, tuple)) else [draft_hidden]
    require(bool(drafts), "draft_hidden", draft_hidden, f"pass {remedy}.")
    for i, hidden in enumerate(drafts):
        name = f"draft_hidden[{i}]" if len(drafts) > 1 else "draft_hidden"
        require_tensor(name, hidden, DTYPES, remedy)
        require(hidden.dim() > 1, f"{name}.shape", list(hidden.shape), f"pass {remedy}.")
        require_shape(name, hidden, drafts[0].shape, "draft_hidden[0]")
    return drafts


def check_sources_of_kind(kind: str, policy_hidden: Any, ids: Any, draft: Tensor) -> None:
    """Raise ValueError unless a "soft" loss has policy_hidden and a "hard" loss has ids, not both.

    kind            "soft" (learns the policy's distribution) or "hard" (learns the tokens)
    policy_hidden   what the caller passed: for "soft" the shape of draft, for "hard" None
    ids             what the caller passed: for "hard" integers [...], for "soft" None
    draft           hidden states of a draft, [..., H]
    """
    if kind == "soft":
        require(ids is None, "ids", "given", 'kind="soft" learns from policy_hidden: leave it out.')
        remedy = "the policy's hidden states, the shape of draft_hidden"
        require_tensor("policy_hidden", policy_hidden, DTYPES, remedy)
        require_shape("policy_hidden", policy_hidden, draft.shape, "draft_hidden")
    else:
        remedy = 'kind="hard" learns from ids: pass None.'
        require(policy_hidden is None, "policy_hidden", "given", remedy)
        require_tensor("ids", ids, INTEGERS, "int64, the token at each position of draft_hidden")
        require_shape("ids", ids, draft.shape[:-1], "the positions of draft_hidden")


@dataclass(frozen=True, eq=False)
class Positions:
    """The positions of a call, [B, T] or [N], as flat vectors.

    shape          leading shape of the hidden states: [B, T] or [N]
    is_real        bool [num_positions]: the mask; True at all positions without one
    sequence_ids   int64 [num_positions]: the sequence of each position
    cu_seqlens     boundaries of packed sequences, or None
    """

    shape: torch.Size
    is_real: Tensor
    sequence_ids: Tensor
    cu_seqlens: Tensor | None

    @classmethod
    def check(cls, hidden: Tensor, mask: Any, cu_seqlens: Any) -> Positions:
        """Check mask and cu_seqlens, and return the positions of hidden states.

        hidden       [B, T, H]: B sequences of T positions, or [N, H]: packed sequences
        mask         bool [B, T] or [N]: real tokens; None: all
        cu_seqlens   boundaries of packed sequences. None with [N, H]: there is one sequence.

        Raises ValueError naming the argument if mask or cu_seqlens do not fit.
        """
        shape = hidden.shape[:-1]
        device = hidden.device
        is_real = torch.ones(shape, dtype=torch.bool, device=device)
        if mask is not None:
            is_real = as_mask("mask", mask, shape)
        if cu_seqlens is not None:
            check_offsets("draft_hidden[..., 0]", hidden[..., 0], cu_seqlens)
            sequences = sequence_ids(cu_seqlens, shape.numel())
        else:
            # Sequence b of [B, T] has the flat positions b * T to b * T + T - 1.
            length = shape[-1] if len(shape) > 1 else shape.numel()
            sequences = torch.arange(shape.numel(), device=device) // max(length, 1)
        return cls(shape, is_real.flatten(), sequences, cu_seqlens)

    def counted(self, distance: int) -> Tensor:
        """Return whether a draft at position t can learn from position t + distance, for each t.

        It can if both positions are real tokens in one sequence. The result is bool
        [num_positions], and False for the last `distance` positions.
        """
        counts = torch.zeros_like(self.is_real)
        # Index t of these slices compares position t with position t + distance.
        both_real = self.is_real[:-distance] & self.is_real[distance:]
        same_sequence = self.sequence_ids[:-distance] == self.sequence_ids[distance:]
        counts[:-distance] = both_real & same_sequence
        return counts


# ---- from the losses of positions to the result


@dataclass(frozen=True, eq=False)
class TokenValues:
    """Losses and metrics of each depth and position, [D, *positions]. Only those in the mask count.

    losses           fp32, differentiable
    mask             bool: positions that count
    top1_agreement   bool: whether the draft's likeliest id is the policy's (hard: the token); None
                     without metrics
    acceptance       fp32: 1 - TV(p, q); None without metrics and for the hard loss
    """

    losses: Tensor
    mask: Tensor
    top1_agreement: Tensor | None = None
    acceptance: Tensor | None = None


def make_output(values: TokenValues, normalizer: float | Tensor | None) -> DraftLoss:
    """Return the output of a call from the losses and metrics of its positions.

        loss of a depth   sum over the positions that count / normalizer
        loss              mean over the depths

    values       losses and metrics of each depth and position, and which positions count
    normalizer   a number or 0-d tensor; None: the number of positions of a depth that count, at
                 least 1
    """
    mask = values.mask
    losses = torch.where(mask, values.losses, 0.0)
    count = mask.flatten(1).sum(1).float()
    at_least_one = count.clamp(min=1.0)

    def mean_of_counted(x: Tensor) -> Tensor:
        """Return the mean of x [D, *positions] over the positions that count, [D]."""
        return torch.where(mask, x, 0.0).flatten(1).sum(1) / at_least_one

    metrics = {"loss": mean_of_counted(losses.detach()), "positions": count}
    if values.acceptance is not None:
        metrics["acceptance"] = mean_of_counted(values.acceptance)
    if values.top1_agreement is not None:
        metrics["top1_agreement"] = mean_of_counted(values.top1_agreement.float())
    denominator = at_least_one if normalizer is None else normalizer
    loss = (losses.flatten(1).sum(1) / denominator).mean()
    return DraftLoss(loss=loss, token_losses=losses, mask=mask, metrics=metrics)


@dataclass(frozen=True, eq=False)
class DraftCall:
    """The checked arguments of `draft_head_loss`, and the losses of positions of both kinds.

    drafts        hidden states of each depth, [*positions, H]
    head          weight and bias, detached; `transform` has the transform
    first_depth   depth of the first draft; the others follow
    has_metrics   whether acceptance and agreement are computed
    """

    drafts: list[Tensor]
    head: Head
    positions: Positions
    first_depth: int
    transform: LogitTransform | None
    options: Options
    has_metrics: bool

    def hard_values(self, ids: Tensor) -> TokenValues:
        """Return -log p(token at t + depth + 2) for the draft of each depth at each position t.

        Each depth takes one call of `linear_logprobs`. Agreement is whether the draft's likeliest
        id is that token.

        ids   int64 [*positions], the token at each position
        """
        shape = self.positions.shape
        losses = []
        masks = []
        agreements = []
        for depth, hidden in zip(self._depths(), self.drafts, strict=True):
            distance = depth + 2
            mask = self.positions.counted(distance).view(shape)
            # roll moves ids of the beginning to the end. The mask is False there.
            labels = ids.flatten().roll(-distance).view(shape)
            result = linear_logprobs(
                hidden,
                self.head,
                labels,
                mask=mask,
                transform=self.transform,
                also=("top_id",) if self.has_metrics else (),
                options=self.options,
            )
            losses.append(-result.logps)
            masks.append(mask)
            if self.has_metrics:
                agreements.append(result.also["top_id"] == labels)
        return TokenValues(
            losses=torch.stack(losses),
            mask=torch.stack(masks),
            top1_agreement=torch.stack(agreements) if self.has_metrics else None,
        )

    def soft_values(self, policy_hidden: Tensor) -> TokenValues:
        """Return the cross-entropy H(q, p) of each draft head at each position, and the metrics.

        The draft head of depth d at position t predicts what the policy predicts d + 1 positions
        later: p is its distribution at t, and q is the policy's at t + d + 1. One `SoftPass` over
        the policy's positions computes the losses of all depths.

        policy_hidden   hidden states of the policy, [*positions, H]. They get no gradient.
        """
        positions = self.positions
        distances = [depth + 1 for depth in self._depths()]
        masks = torch.stack([positions.counted(distance) for distance in distances])
        # Draft heads and policy have the same output head, and one row for each position.
        drafts = [self._project(hidden) for hidden in self.drafts]
        policy = self._project(policy_hidden.detach())
        # The hidden states as [num_positions, H], which autograd tracks.
        draft_hidden = [draft.projection.hidden for draft in drafts]
        soft_pass = SoftPass(
            drafts=drafts,
            policy=policy,
            distances=distances,
            draft_masks=masks,
            has_metrics=self.has_metrics,
            has_gradients=[torch.is_grad_enabled() and x.requires_grad for x in draft_hidden],
        )
        losses, acceptance, agreement = SoftCrossEntropy.apply(soft_pass, *draft_hidden)
        shape = (len(drafts), *positions.shape)
        return TokenValues(
            losses=losses.view(shape),
            mask=masks.view(shape),
            top1_agreement=agreement.view(shape) if self.has_metrics else None,
            acceptance=acceptance.view(shape) if self.has_metrics else None,
        )

    def _depths(self) -> range:
        """Return the depth of each draft: `first_depth`, `first_depth` + 1, ..."""
        return range(self.first_depth, self.first_depth + len(self.drafts))

    def _project(self, hidden: Tensor) -> ProjectedLogits:
        """Return rows whose logits are hidden @ weight.T + bias, with the output head of the call.

        hidden   [*positions, H], of a draft head or the policy
        """
        positions = self.positions
        layout = RowLayout(
            shape=positions.shape,
            device=positions.is_real.device,
            mask=positions.is_real.view(positions.shape),
            cu_seqlens=positions.cu_seqlens,
        )
        inputs = LinearInput(hidden, self.head.weight, self.head.bias)
        return inputs.make_source(layout, self.transform, self.options)


# ---- the soft loss


#: KL(q || p), which differs from the cross-entropy H(q, p) by the policy's entropy.
FORWARD_KL = DivergenceKind("forward", mixture=0.0)
#: TV(p, q), for the acceptance.
TOTAL_VARIATION = DivergenceKind("tv", mixture=0.0)


class PolicyChunk(NamedTuple):
    """The policy's logits at some positions, and their statistics, which all depths share.

    row_ids   int64 [num_chunk_rows]: the positions
    logits    fp32 [num_chunk_rows, V]
    entropy   fp32 [num_chunk_rows]
    top_ids   int64 [num_chunk_rows], the likeliest ids; zeros without metrics
    """

    row_ids: Tensor
    logits: Tensor
    entropy: Tensor
    top_ids: Tensor


class DraftChunk(NamedTuple):
    """The results of one depth at the positions of a PolicyChunk.

    values          fp32 [3, num_chunk_rows]: cross-entropy, acceptance, agreement (0 or 1). The
                    last two are 0 without metrics.
    unit_gradient   fp32 [num_chunk_rows, H]: gradient of hidden states for unit losses, or None
    """

    values: Tensor
    unit_gradient: Tensor | None


@dataclass(frozen=True, eq=False)
class SoftPass:
    """One pass over the positions of the policy, which compares all drafts with the policy.

    A row of the pass is a position s of the policy. The draft of a depth at position t = s -
    distance learns from it. The arguments `depth` below are indices into `drafts`, from 0.

    drafts          rows of each depth, [num_positions, H]; they get the gradient
    policy          rows of the policy, the same number and the same head
    distances       of each depth: the draft at position t learns from the policy at t + distance
    draft_masks     bool [D, num_positions]: positions of the drafts that count
    has_metrics     whether acceptance and agreement are computed
    has_gradients   whether a gradient is computed, for each depth
    """

    drafts: list[ProjectedLogits]
    policy: ProjectedLogits
    distances: list[int]
    draft_masks: Tensor
    has_metrics: bool
    has_gradients: list[bool]

    @functools.cached_property
    def policy_masks(self) -> Tensor:
        """Whether the draft of each depth learns from position s, bool [D, num_positions].

        It is `draft_masks` moved from the draft's positions t to the policy's s = t + distance.
        """
        masks = torch.zeros_like(self.draft_masks)
        for depth, distance in enumerate(self.distances):
            masks[depth, distance:] = self.draft_masks[depth, :-distance]
        return masks

    @functools.cached_property
    def row_ids(self) -> Tensor:
        """The positions of the policy that any depth learns from, int64 [num_rows].

        On a GPU the host waits for their number.
        """
        return self.policy_masks.any(0).nonzero()[:, 0]

    def draft_row_ids(self, depth: int, row_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (positions, mask): which position of a draft learns from each of the policy's.

        Position s of the policy teaches the draft at s - distance. Where mask is False, the draft
        of this depth does not learn from s. The position is 0 there, which the caller must mask.
        The results are int64 and bool, [num_rows].

        depth     index into `drafts`
        row_ids   int64 [num_rows]: positions s of the policy
        """
        mask = self.policy_masks[depth, row_ids]
        return torch.where(mask, row_ids - self.distances[depth], 0), mask

    def chunks(self) -> list[slice]:
        """Return consecutive slices of `row_ids`, the rows whose logits exist at one time.

        These are the fp32 logits of the policy and of one draft. `LinearMemory` chooses how many
        rows of them fit in memory.
        """
        projection = self.policy.projection
        device_type = self.row_ids.device.type
        memory = LinearMemory.of_head(
            projection.weight,
            matmul_dtype=projection.matmul_dtype,
            vocab_size=2 * self.policy.vocab_size,  # a row of the policy and one of the draft
            ranks=1 if self.policy.shard is None else self.policy.shard.ranks,
            reference_columns=0,
            grad_hidden_bytes=torch.float32.itemsize,
            grad_weight_bytes=0,  # the head gets no gradient
            may_round_weight=False,
            sums_bias=False,
        )
        num_rows = len(self.row_ids)
        max_rows = memory.plan(device_type, max(num_rows, 1)).chunk
        return split_rows(slice(0, num_rows), max_rows, evenly=device_type == "cpu")

    def compute(self) -> tuple[Tensor, dict[int, Tensor]]:
        """Compare the drafts of D depths with the policy at its positions `row_ids`.

        Returns (values, unit_gradients):

            values           fp32 [D, 3, num_rows]: the cross-entropy of each draft with the policy,
                             the probability that speculative sampling accepts its token, and
                             whether both have the same likeliest id (0 or 1)
            unit_gradients   depth -> d cross-entropy / d hidden, fp32 [num_rows, H], for the depths
                             whose hidden states need a gradient
        """
        num_rows = len(self.row_ids)
        device = self.row_ids.device
        width = self.policy.projection.hidden.shape[1]
        values = torch.zeros(len(self.drafts), 3, num_rows, device=device)
        unit_gradients = {
            depth: torch.zeros(num_rows, width, device=device)
            for depth, has_gradient in enumerate(self.has_gradients)
            if has_gradient
        }
        if num_rows == 0:  # no draft learns from any position
            return values, unit_gradients
        projection = self.policy.projection
        policy_matmuls = projection.make_matmuls()
        # Some matmuls reuse the memory of their logits, so each side has its own. The weight is
        # converted once.
        draft_matmuls = replace(projection, weight=policy_matmuls.weight).make_matmuls()
        with without_autocast(device.type):
            for chunk in self.chunks():
                policy = self.policy_chunk(policy_matmuls, self.row_ids[chunk])
                for depth in range(len(self.drafts)):
                    draft = self.draft_chunk(draft_matmuls, depth, policy)
                    values[depth, :, chunk] = draft.values
                    if draft.unit_gradient is not None:
                        unit_gradients[depth][chunk] = draft.unit_gradient
        return values, unit_gradients

    def policy_chunk(self, matmuls: HeadMatmuls, row_ids: Tensor) -> PolicyChunk:
        """Compute the policy's logits, entropy and likeliest ids at some positions.

        matmuls   of the policy. Their next call may overwrite the logits that are returned.
        row_ids   int64 [num_chunk_rows]: the positions
        """
        projection = self.policy.projection
        logits = matmuls.logits(rows_of(projection.hidden, row_ids, matmuls.dtype))
        no_targets = torch.zeros_like(row_ids)  # kernels take targets, whose log-prob is not used
        rows = LogitRows(
            logits=logits[None],
            targets=no_targets,
            transform=projection.transform.select(row_ids),
        )
        statistics = ("entropy", "top_id") if self.has_metrics else ("entropy",)
        sums = self.policy.kernels.softmax_sums(rows, sums_for(statistics))
        top_ids = sums.top_id if self.has_metrics else no_targets
        return PolicyChunk(row_ids=row_ids, logits=logits, entropy=sums.entropy, top_ids=top_ids)

    def draft_chunk(self, matmuls: HeadMatmuls, depth: int, policy: PolicyChunk) -> DraftChunk:
        """Compare the draft of a depth with the policy at the positions of a chunk.

        With p the draft's distribution and q the policy's:

            cross-entropy     KL(q || p) + entropy of q
            acceptance        1 - TV(p, q)                               only with metrics
            top-1 agreement   1 if p and q have the same likeliest id    only with metrics
            unit gradient     (p - q) @ weight                           only if it is needed

        matmuls   of the drafts, which compute logits and gradient
        depth     index into `drafts`
        policy    logits and statistics of the policy at the chunk's positions
        """
        projection = self.drafts[depth].projection
        kernels = self.policy.kernels
        row_ids, mask = self.draft_row_ids(depth, policy.row_ids)
        logits = matmuls.logits(rows_of(projection.hidden, row_ids, matmuls.dtype))
        policy_transform = self.policy.projection.transform.select(policy.row_ids)
        reference = ReferenceRows(policy.logits[None], policy_transform, FORWARD_KL)
        rows = LogitRows(
            logits=logits[None],
            targets=torch.zeros_like(row_ids),  # not used: there are no targets
            mask=mask,
            transform=projection.transform.select(row_ids),
            reference=reference,
        )
        statistics = ("divergence", "top_id") if self.has_metrics else ("divergence",)
        sums = kernels.softmax_sums(rows, sums_for(statistics, FORWARD_KL.direction))
        values = torch.zeros(3, len(row_ids), device=row_ids.device)
        values[0] = sums.divergence + policy.entropy
        if self.has_metrics:
            # The same logits with another divergence, which is a second pass over them.
            tv_rows = rows._replace(reference=reference._replace(kind=TOTAL_VARIATION))
            tv_names = sums_for(("divergence",), TOTAL_VARIATION.direction)
            values[1] = 1.0 - kernels.softmax_sums(tv_rows, tv_names).divergence
            values[2] = sums.top_id == policy.top_ids
        unit_gradient = None
        if self.has_gradients[depth]:
            unit_gradient = self.unit_gradient(matmuls, rows, sums)
        return DraftChunk(values, unit_gradient)

    def unit_gradient(self, matmuls: HeadMatmuls, rows: LogitRows, sums: SoftmaxSums) -> Tensor:
        """Return d cross-entropy / d hidden = (p - q) @ weight of each row, fp32 [num_rows, H].

        p is the draft's distribution and q the policy's. p - q is also the gradient of the forward
        KL(q || p), which the kernels compute.

        matmuls   of the drafts
        rows      the draft's logits, with the policy as reference. The gradient of the logits may
                  overwrite them.
        sums      softmax sums of these rows
        """
        kernels = self.policy.kernels
        # The gradient of the logits is written over them, or to a 16-bit buffer.
        buffer = matmuls.make_grad_buffer(rows.num_rows, sums_bias=False)
        grad_logits = buffer.memory_for(rows.logits[0])
        unit = torch.ones(rows.num_rows, device=grad_logits.device)  # the upstream gradient
        coefficients = GradientCoefficients.from_gradients(sums, {"divergence": unit}, rows.mask)
        kernels.softmax_gradient(rows, sums, coefficients, grad_logits[None])
        buffer.store(grad_logits)
        return matmuls.grad_hidden(buffer.all_rows())

    def to_positions(self, depth: int, values: Tensor) -> Tensor:
        """Return values at the policy's positions s as values at the draft's t = s - distance.

        The result is [num_positions, ...], and 0 at positions of the draft that do not count.

        depth    index into `drafts`
        values   [num_rows, ...], at the policy's positions `self.row_ids`
        """
        row_ids, mask = self.draft_row_ids(depth, self.row_ids)
        trailing_dims = (1,) * (values.dim() - 1)  # so that the mask broadcasts to values
        values = values.masked_fill(~mask.view(-1, *trailing_dims), 0.0)
        positions = values.new_zeros(self.draft_masks.shape[1], *values.shape[1:])
        return positions.index_add_(0, row_ids, values)  # rows that do not count add 0 to row 0

    def grad_hidden(self, depth: int, unit_gradient: Tensor, grad_losses: Tensor) -> Tensor:
        """Return d loss / d hidden of a depth, [num_positions, H] in the dtype of hidden.

        depth           index into `drafts`
        unit_gradient   fp32 [num_rows, H]: the gradient for an upstream gradient of 1, at the
                        policy's positions `self.row_ids`
        grad_losses     fp32 [num_positions]: the upstream gradients, at the draft's positions
        """
        row_ids, mask = self.draft_row_ids(depth, self.row_ids)
        upstream = torch.where(mask, grad_losses[row_ids], 0.0)[:, None]
        # A product with an upstream gradient of 0 would be NaN if the unit gradient is infinite.
        gradient = torch.where(upstream == 0, 0.0, unit_gradient * upstream)
        hidden = self.drafts[depth].projection.hidden
        return self.to_positions(depth, gradient.to(hidden.dtype))


def rows_of(hidden: Tensor, row_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return some rows of hidden states, [num_rows, H], detached and in the dtype of the matmuls.

    hidden    [num_positions, H]
    row_ids   int64 [num_rows], the positions of these rows
    dtype     the dtype of the operands of the matmuls
    """
    return hidden.detach()[row_ids].to(dtype)


class SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy, acceptance and agreement of each position, fp32 [D, num_positions] each.

    The forward computes the gradient of hidden states for an upstream gradient of 1. The backward
    multiplies it by the upstream gradient of the cross-entropy.
    """

    @staticmethod
    def forward(ctx: Any, soft_pass: SoftPass, *hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return cross-entropy, acceptance and agreement, fp32 [D, num_positions] each.

        soft_pass   compares the drafts with the policy, and computes the unit gradients, which are
                    kept for the backward
        hidden      hidden states of the drafts, [num_positions, H] each. Only autograd uses them.
        """
        values, unit_gradients = soft_pass.compute()
        ctx.soft_pass = soft_pass
        ctx.depths_with_gradient = list(unit_gradients)
        ctx.save_for_backward(*unit_gradients.values())
        # fp32 [3, num_positions] for each depth. `to_positions` takes rows first, so transpose.
        values_by_depth = [
            soft_pass.to_positions(depth, values[depth].T).T for depth in range(len(values))
        ]
        losses, acceptance, agreement = torch.stack(values_by_depth, 1).unbind()
        ctx.mark_non_differentiable(acceptance, agreement)
        return losses, acceptance, agreement

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return None for the pass, and the gradient of the hidden states of each depth or None.

        The forward has computed the gradients for an upstream gradient of 1, the unit gradients, of
        the depths whose hidden states need one. Here they are multiplied by the upstream gradients.

        grad_losses   fp32 [D, num_positions]: upstream gradients of the cross-entropy
        """
        soft_pass = ctx.soft_pass
        gradients: list[Tensor | None] = [None] * len(soft_pass.drafts)
        saved = zip(ctx.depths_with_gradient, ctx.saved_tensors, strict=True)
        for depth, unit_gradient in saved:
            gradients[depth] = soft_pass.grad_hidden(depth, unit_gradient, grad_losses[depth])
        return None, *gradients
