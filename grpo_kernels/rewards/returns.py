"""Compute advantages of tokens from rewards of tokens: returns, GAE, process supervision, KL in the
reward, whitening.

Inputs are padded [B, T] or packed [N] with cu_seqlens (one sequence without it), as in a
TokenBatch. A token outside the mask (padding, or the output of a tool) is skipped: its values (NaN,
inf) have no effect, no discount is applied for it, and its result is 0. Everything is computed in
fp64, in a fixed order, and returned as fp32 in the shape of the rewards. The host does not wait for
a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..checks import (
    LARGEST,
    as_mask,
    check_offsets,
    per_token,
    require,
    require_number,
    require_one_of,
    require_shape,
    sequence_ids,
)
from ..formulas.kl import Kl, as_kl, kl_terms
from ..formulas.ops import LOG_RATIO_BOUND
from .advantages import group_advantages
from .groups import Groups, GroupStatistics, group_ids, read_rewards, require_finite, require_float

SHARE = "it must be a number in [0, 1]."
FINITE = "it must be finite wherever the mask is True."
GUARDS = ("add", "floor", "std")

#: `whiten(advantages, mask, **WHITENING["verl"])` whitens as that trainer does (TRL: as its RLOO
#: does, over sequences).
WHITENING: dict[str, dict[str, Any]] = {
    "trl": {"eps": 1e-4, "guard": "std"},
    "verl": {},
    "skyrl": {},
    "openrlhf": {"unbiased": False, "guard": "floor"},
    "nemo-rl": {"unbiased": False, "guard": "floor"},
}


def discounted_returns(
    rewards: Tensor,
    *,
    gamma: float = 1.0,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute G_t = r_t + gamma G_{t+1} over the trained tokens of each sequence, fp32.

    The result has the shape of rewards, and is 0 in masked tokens. With gamma = 1 and whitening
    this is REINFORCE++ (arXiv 2501.03262).

    rewards            float [B, T] or [N], finite at trained tokens
    gamma              in [0, 1]
    mask, cu_seqlens   as in a `TokenBatch`

    Raises ValueError naming the argument.
    """
    tokens = _Tokens("rewards", rewards, mask, cu_seqlens)
    require_number("gamma", gamma, SHARE, 0, 1)
    flat_rewards = tokens.values("rewards", rewards)
    return tokens.to_result(tokens.discounted_sums(gamma, flat_rewards))


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates, (advantages, returns), fp32 (arXiv 1506.02438).

        delta_t  = r_t + gamma V_{t+1} - V_t
        A_t      = delta_t + gamma lam A_{t+1}
        return_t = A_t + V_t

    Token t + 1 is the next trained token of the sequence, and V = A = 0 after the last one. Masked
    tokens get 0. The advantages are not whitened: verl and NeMo-RL do that next, see `whiten`.

    rewards            float [B, T] or [N], finite at trained tokens
    values             the same: the critic's values V_t, before token t is chosen
    gamma, lam         in [0, 1]. lam may also be a float tensor [B] or per token (length-adaptive,
                       VAPO, arXiv 2504.05118).
    mask, cu_seqlens   as in a `TokenBatch`

    Raises ValueError naming the argument.
    """
    # Checks the shapes. Its methods take one number for each token, flat [N].
    tokens = _Tokens("rewards", rewards, mask, cu_seqlens)
    require_number("gamma", gamma, SHARE, 0, 1)
    flat_rewards = tokens.values("rewards", rewards)
    flat_values = tokens.values("values", values)
    decay: float | Tensor
    if isinstance(lam, Tensor):
        decay = gamma * per_token("lam", lam, tokens.shape, cu_seqlens).double()
    else:
        require_number("lam", lam, SHARE, 0, 1)
        decay = gamma * lam
    # V of this token if it is trained, else of the next trained token. Shifted by one token, this
    # is V_{t+1}.
    value_from_here = tokens.scan_backwards(torch.where(tokens.trained, 0.0, 1.0), flat_values)
    next_values = tokens.next_values(value_from_here)
    delta = flat_rewards + gamma * next_values - flat_values
    advantages = tokens.discounted_sums(decay, torch.where(tokens.trained, delta, 0.0))
    return tokens.to_result(advantages), tokens.to_result(advantages + flat_values)


def process_advantages(
    rewards: Tensor,
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    gamma: float = 1.0,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute the advantages of GRPO with process supervision, fp32.

    The rewards of all steps of all completions of a prompt are normalised together. The advantage
    of a token is the sum, discounted by gamma, of the normalised rewards of the steps that end at
    this token or later. Masked tokens get 0.

    rewards              float [B, T] or [N]: the reward of the step that ends at this token, NaN if
                         no step ends there
    group_size, groups   which of the B sequences share a prompt, as in `group_advantages`
    gamma                in [0, 1]
    mask, cu_seqlens     as in a `TokenBatch`
    options              other arguments of `group_advantages`: scale, unbiased, eps, ...

    Raises ValueError naming the argument. Source: DeepSeekMath, arXiv 2402.03300, section 4.1.3.
    """
    tokens = _Tokens("rewards", rewards, mask, cu_seqlens)
    require_number("gamma", gamma, SHARE, 0, 1)
    prompt_of_sequence = group_ids(tokens.num_sequences, rewards.device, group_size, groups)
    prompt_of_token = prompt_of_sequence[tokens.sequence_ids]
    # Each token is one reward for `group_advantages`. Where no step ends it is NaN, which is a
    # missing reward: it counts in no mean, and its result is 0.
    step_rewards = torch.where(tokens.trained, rewards.detach().flatten(), math.nan)
    options = {"missing_rewards": "skip", **options}
    normalised = group_advantages(
        step_rewards, groups=prompt_of_token, dtype=torch.float64, **options
    )
    return tokens.to_result(tokens.discounted_sums(gamma, normalised))


def at_last_token(rewards: Tensor, *, mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Place the reward of each sequence at its last trained token, fp32 in the shape of the mask.

    All other tokens get 0. The reward of a sequence without a trained token is lost.

    rewards            numbers [B], finite
    mask, cu_seqlens   as in a `TokenBatch`

    Raises ValueError naming the argument.
    """
    tokens = _Tokens("mask", mask.float(), mask, cu_seqlens)
    sequence_rewards, _ = read_rewards(rewards)  # fp64 [B]
    expected_shape = torch.Size([tokens.num_sequences])
    require_shape("rewards", sequence_rewards, expected_shape, "a tensor of one number a sequence")
    return tokens.to_result(tokens.place_at_last(sequence_rewards.to(mask.device)))


def kl_in_reward(
    rewards: Tensor,
    logps: Tensor,
    ref_logps: Tensor,
    *,
    beta: float,
    kl: str | Kl = "k1",
    per: str = "token",
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return r_t - beta KL_t, rewards minus an estimate of the KL to the reference, fp32.

    rewards            float [B], one per completion: each is placed at the last trained token, as
                       in `at_last_token`. Or one per token, the shape of logps.
    logps, ref_logps   float [B, T] or [N]: log-probs under the policy that sampled and under the
                       reference
    beta, kl           weight and estimator: "k1", "k2", "k3", "abs", or a `Kl` for clamps (verl,
                       AReaL and OpenRLHF have Kl("k3", clamp=10.0)). Only the value of the
                       estimator is used.
    per                "token": the result has the shape of logps and is 0 in masked tokens, for
                       `discounted_returns` or `gae`. "sequence": the result is the sum over each
                       sequence, [B], for `group_advantages` (TRL's RLOO).
    mask, cu_seqlens   as in a `TokenBatch`

    Raises ValueError naming the argument.
    """
    tokens = _Tokens("logps", logps, mask, cu_seqlens)
    require_number("beta", beta, "the weight of the KL is a finite number >= 0.", 0, LARGEST)
    require_one_of("per", per, ("token", "sequence"))
    require_float("rewards", rewards)
    estimator = as_kl(kl)
    changes_only_value = (
        estimator.weighting == "none"
        and not estimator.straight_through
        and estimator.estimator not in ("distillation", "sdar")
    )
    remedy = (
        "in a reward only the value of an estimator is used: leave out options of its gradient."
    )
    require(changes_only_value, "kl", kl, remedy)
    policy_logps = tokens.values("logps", logps)
    reference_logps = tokens.values("ref_logps", ref_logps)
    terms = kl_terms(
        policy_logps,
        policy_logps,  # the old log-probs: the policy has not changed since it sampled
        reference_logps,
        torch.zeros_like(policy_logps),  # log-ratios, which weighting="none" does not use
        estimator.clamps,
        **estimator.formula,
    )
    penalty = beta * terms.value
    # Packed sequences of one token each have as many tokens as sequences. Then the rewards are read
    # per token, which gives the same.
    is_per_token = rewards.shape == tokens.shape
    is_per_sequence = rewards.shape == (tokens.num_sequences,) and not is_per_token
    if is_per_sequence:
        sequence_rewards = rewards.detach().double()
        require_finite("rewards", sequence_rewards, FINITE)
        if per == "sequence":
            return (sequence_rewards - tokens.sequence_sums(penalty)).float()
        return tokens.to_result(tokens.place_at_last(sequence_rewards) - penalty)
    token_rewards = tokens.values("rewards", rewards)
    if per == "sequence":
        return (tokens.sequence_sums(token_rewards) - tokens.sequence_sums(penalty)).float()
    return tokens.to_result(token_rewards - penalty)


def optimal_token_advantages(
    rewards: Tensor,
    old_logps: Tensor,
    sum_squares: Tensor,
    *,
    group_size: int | None = None,
    groups: Tensor | None = None,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute G_t - B_t with the optimal token baseline of verl, fp32.

        B_t = sum G_t W_t / (sum W_t + 1e-8)
        W_t = sum over j <= t of (1 - 2 pi_j + sum pi^2) w_j^2

    G_t is the return. W_t estimates the variance of the first t tokens. The sums of B_t are over
    the completions of the group, each at its t-th trained token. A token has no baseline if no
    other completion of the group is as long. Masked tokens get 0. If all returns that share a
    baseline are equal, the result is exactly 0.

    rewards              float [B, T] or [N]
    old_logps            the same shape: log pi of the tokens under the policy that sampled
    sum_squares          the same shape: sum of pi^2 over the vocabulary, from
                         `token_logprobs(..., also=("sum_squares",))`
    group_size, groups   which of the B sequences share a prompt, as in `group_advantages`
    weights              the shape of rewards, or None: truncated importance weights w for the
                         mismatch to the sampler
    mask, cu_seqlens     as in a `TokenBatch`

    Raises ValueError naming the argument.
    """
    tokens = _Tokens("rewards", rewards, mask, cu_seqlens)
    returns = tokens.discounted_sums(1.0, tokens.values("rewards", rewards))
    pi = tokens.values("old_logps", old_logps).exp()
    token_variance = 1.0 - 2.0 * pi + tokens.values("sum_squares", sum_squares)
    if weights is not None:
        token_variance = token_variance * tokens.values("weights", weights).square()
    variance = tokens.sums_up_to(torch.where(tokens.trained, token_variance, 0.0))
    # The number of each trained token in its sequence, from 1. Other tokens get 0.
    step = tokens.sums_up_to(tokens.trained.double()).long()
    step = torch.where(tokens.trained, step, 0)
    prompt_of_sequence = group_ids(tokens.num_sequences, rewards.device, group_size, groups)
    prompt = Groups(prompt_of_sequence[tokens.sequence_ids]).group  # numbers from 0
    # Tokens of one prompt and step share a baseline. A step is at most the number of tokens, so
    # these ids are different for different pairs of prompt and step.
    same_step = Groups(prompt * (len(step) + 1) + step)
    statistics = GroupStatistics(same_step, returns, tokens.trained)
    baseline = same_step.sum(returns * variance) / (same_step.sum(variance) + 1e-8)
    advantages = torch.where(statistics.equal, 0.0, returns - baseline)
    # A token that is alone has no baseline.
    return tokens.to_result(torch.where(statistics.size == 1, returns, advantages))


def self_distilled_advantages(
    advantages: Tensor,
    old_logps: Tensor,
    teacher_logps: Tensor,
    *,
    strength: float = 0.5,
    clip: float = 0.2,
    negative_only: bool = False,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Scale advantages by a self-teacher, fp32 (RLSD, arXiv 2604.03128).

        A_t (1 - strength + strength clip(e^(sign(A_t) d_t), 1 - clip, 1 + clip))

    d_t is teacher_logp - old_logp of the token. The teacher is the policy itself with the solution
    in its prompt. A token that the teacher finds likelier gets a larger share of a positive
    advantage and a smaller share of a negative advantage. No sign changes if clip <= 1. Masked
    tokens get 0.

    advantages      float [B], [B, 1] or the shape of old_logps, finite at trained tokens
    old_logps, teacher_logps   float [B, T] or [N], finite at trained tokens: log-probs of the
                               sampled tokens under the policy that sampled and under the teacher
    strength        in [0, 1]; 0 does not change the advantages
    clip            at least 0: the largest change of an advantage at strength 1, as a share of it
    negative_only   True: advantages of 0 or more do not change
    mask, cu_seqlens   as in a `TokenBatch`

    Raises ValueError naming the argument.
    """
    tokens = _Tokens("old_logps", old_logps, mask, cu_seqlens)
    require_number("strength", strength, SHARE, 0, 1)
    require_number("clip", clip, "the largest change is a finite number >= 0.", 0, LARGEST)
    require_float("advantages", advantages)
    # One advantage for each token, flat [N].
    expanded = per_token("advantages", advantages, tokens.shape, cu_seqlens)
    flat_advantages = tokens.values("advantages", expanded.view(tokens.shape))
    flat_teacher_logps = tokens.values("teacher_logps", teacher_logps)
    log_ratio = flat_teacher_logps - tokens.values("old_logps", old_logps)
    # Bounded, so that exp does not overflow.
    ratio = (flat_advantages.sign() * log_ratio).clamp(max=LOG_RATIO_BOUND).exp()
    weight = 1.0 - strength + strength * ratio.clamp(1.0 - clip, 1.0 + clip)
    if negative_only:
        weight = torch.where(flat_advantages < 0, weight, 1.0)
    return tokens.to_result(flat_advantages * weight)


def whiten(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    unbiased: bool = True,
    eps: float = 1e-8,
    guard: str = "add",
    shift_mean: bool = True,
) -> Tensor:
    """Compute (x - mean) / std over all trained tokens (or sequences) of the batch, fp32.

    Masked tokens get 0. Equal values give exactly 0, or their value with shift_mean=False.

    values      float, any shape: advantages per token (REINFORCE++, arXiv 2501.03262) or per
                sequence
    mask        bool, the shape of values; None: all
    unbiased    True: the variance divides by n - 1 (verl). False: by n (OpenRLHF, NeMo-RL).
    eps, guard  the divisor is sqrt(variance + eps) for guard="add", sqrt(max(variance, eps)) for
                "floor", and std + eps for "std". WHITENING has the trainers' choices.
    shift_mean  False adds the mean again afterwards

    Raises ValueError naming the argument.
    """
    require_one_of("guard", guard, GUARDS)
    remedy = "it keeps the divisor from 0 and must be finite and >= 0."
    require_number("eps", eps, remedy, low=0, high=LARGEST)
    shape = require_float("values", values).shape
    if mask is None:
        trained = torch.ones_like(values, dtype=torch.bool)
    else:
        trained = as_mask("mask", mask, shape)
    x = torch.where(trained, values.detach().double(), 0.0)
    require_finite("values", x, FINITE)
    batch = GroupStatistics(Groups(), x, trained)
    variance = batch.variance(unbiased)
    if guard == "std":
        divisor = variance.sqrt() + eps
    elif guard == "add":
        divisor = (variance + eps).sqrt()
    else:
        divisor = variance.clamp(min=eps).sqrt()
    # The divisor may be 0 if all values are equal and eps is 0.
    white = torch.where(batch.equal, 0.0, batch.centred / divisor)
    if not shift_mean:
        # The rounded mean of equal values may differ from them.
        white = white + torch.where(batch.equal, batch.highest, batch.mean)
    return torch.where(trained, white, 0.0).float()


# ---- tokens of sequences


class _Tokens:
    """The N tokens of a batch as flat vectors, with sums and recurrences along their sequences.

    name         the argument whose shape the tokens have, for errors
    like         float [B, T], or packed [N] with cu_seqlens (without it: one sequence)
    mask         the trained tokens, in the shape of `like`; None: all
    cu_seqlens   as in a TokenBatch

    shape          shape of `like`
    trained        bool [N]
    sequence_ids   int64 [N]: the sequence of each token, a number from 0
    offsets        int64 [sequences + 1]: first token of each sequence, and N
    has_next       bool [N]: whether another token of the sequence follows
    longest        an upper bound of the length of a sequence

    Raises ValueError for shapes and dtypes that do not fit.
    """

    def __init__(
        self, name: str, like: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> None:
        """Check the shapes of mask and cu_seqlens, and find the sequence of each token.

        name         the argument whose shape the tokens have, for errors
        like         float [B, T], or packed [N] with cu_seqlens (without it: one sequence)
        mask         the trained tokens, in the shape of `like`; None: all
        cu_seqlens   [num_sequences + 1], the offsets of packed sequences, or None
        """
        self.name = name
        self.shape = require_float(name, like).shape
        num_tokens = like.numel()
        if cu_seqlens is None:
            if like.dim() not in (1, 2):
                raise ValueError(
                    f"{name} has shape {list(self.shape)}: pass [B, T], or packed [N] with"
                    " cu_seqlens."
                )
            self.longest = self.shape[-1]  # each row [T] is a sequence
            cu_seqlens = torch.arange(like[..., :1].numel() + 1, device=like.device) * self.longest
        else:
            check_offsets(name, like, cu_seqlens)
            self.longest = num_tokens  # an upper bound that needs no values of cu_seqlens
        self.offsets = cu_seqlens.long()
        self.num_sequences = len(self.offsets) - 1
        self.sequence_ids = sequence_ids(self.offsets, num_tokens)
        # The last token of the batch is followed by a token of no sequence.
        no_sequence = self.sequence_ids.new_full((1,), -1)
        self.has_next = self.sequence_ids.diff(append=no_sequence) == 0
        if mask is None:
            self.trained = torch.ones_like(self.has_next)
        else:
            self.trained = as_mask("mask", mask, self.shape).flatten()

    def values(self, name: str, x: Tensor) -> Tensor:
        """Return x, which has the shape of the tokens, as fp64 [N] with 0 for untrained tokens.

        Raises ValueError, which names the argument `name`, for another shape or dtype, and unless x
        is finite at trained tokens.
        """
        require_shape(name, require_float(name, x), self.shape, self.name)
        flat = torch.where(self.trained, x.detach().flatten().double(), 0.0)
        require_finite(name, flat.view(self.shape), FINITE)
        return flat

    def to_result(self, x: Tensor) -> Tensor:
        """Return x [N] as fp32 in the shape of the tokens, with 0 for untrained tokens."""
        return torch.where(self.trained, x, 0.0).float().view(self.shape)

    def next_values(self, x: Tensor) -> Tensor:
        """Return x_{t+1} for each token, 0 for the last token of a sequence. x is [N]."""
        shifted = torch.cat((x[1:], x[:1]))
        return torch.where(self.has_next, shifted, 0.0)

    def scan_backwards(self, decay: Tensor, x: Tensor) -> Tensor:
        """Return y_t = x_t + decay_t y_{t+1} within each sequence, y = 0 after its last token.

        A loop over tokens would be slow. This takes log2(length of the longest sequence) passes.
        After a pass, x_t is the discounted sum over the next `reach` tokens, and decay_t the
        product of their decays.

        decay, x   fp64 [N]
        """
        decay = torch.where(self.has_next, decay, 0.0)  # nothing flows in from the next sequence
        reach = 1
        while reach < self.longest:
            # The last `reach` tokens of the batch have their final values already.
            x = torch.cat((x[:-reach] + decay[:-reach] * x[reach:], x[-reach:]))
            decay = torch.cat((decay[:-reach] * decay[reach:], torch.zeros_like(decay[-reach:])))
            reach *= 2
        return x

    def discounted_sums(self, decay: float | Tensor, x: Tensor) -> Tensor:
        """Return y_t = x_t + decay_t y_{t+1}, fp64 [N], where t + 1 is the next trained token.

        decay   a number, or fp64 [N]
        x       fp64 [N], 0 at untrained tokens
        """
        # An untrained token passes the next value on unchanged.
        decays = torch.where(self.trained, decay * torch.ones_like(x), 1.0)
        return self.scan_backwards(decays, x)

    def sums_up_to(self, x: Tensor) -> Tensor:
        """Return the sum of x over the tokens of the sequence up to and including each token, [N].

        x   fp64 [N], 0 at untrained tokens
        """
        # The sum of the sequence, minus the sum from this token on, plus this token.
        return self.sequence_sums(x)[self.sequence_ids] - self.discounted_sums(1.0, x) + x

    def place_at_last(self, x: Tensor) -> Tensor:
        """Return [N]: x [B] at the last trained token of each sequence, 0 at all other tokens."""
        num_trained_from_here = self.discounted_sums(1.0, self.trained.double())
        is_last = self.trained & (num_trained_from_here == 1)
        return torch.where(is_last, x[self.sequence_ids], 0.0)

    def sequence_sums(self, x: Tensor) -> Tensor:
        """Return the sum of x over each sequence, [B]."""
        return torch.segment_reduce(x, "sum", offsets=self.offsets, initial=0, unsafe=True)
