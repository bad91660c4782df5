"""The cells of the benchmarks: inputs, losses in plain PyTorch, float64 results, and errors.

The rows of a cell form sequences of equal length, 16 by default, with one advantage per sequence,
because every trainer supports that. No ratio of new to old policy is near a clip bound. Rounding of
the logits then changes a gradient only by a rounding error, and the check can tell that from a
wrong formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import TokenBatch, TokenSets
from grpo_kernels.diagnosis.step import ModelOutput

#: {"loss": scalar, "d_logits": ..., "d_hidden": ..., ...}. After a training step "gradients" is a
#: list with the gradient of each parameter.
Result = dict[str, Any]

HALF = (torch.bfloat16, torch.float16)
CLIP = (0.2, 0.28)
BETA = 0.04  # of the KL term, in the contracts on logits
CONTRACTS = {
    "logits": (
        "DAPO loss with KL of given logits [N, V]: value and gradient with respect to the logits"
    ),
    "logits-forward": "log-probs and entropy of given logits [N, V], no gradient",
    "hidden": (
        "DAPO loss from hidden states [N, H] and the head's weight [V, H]: value, gradients of both"
    ),
    "hidden-frozen": (
        "DAPO loss from hidden states with a frozen head: value, gradient of the hidden states"
    ),
    "gspo": (
        "GSPO loss from hidden states [N, H] and the head's weight [V, H]: value, gradients of both"
    ),
    "gspo-frozen": (
        "GSPO loss from hidden states with a frozen head: value, gradient of the hidden states"
    ),
    "vespo": (
        "VESPO loss from hidden states [N, H] and the head's weight [V, H]: value, gradients of"
        " both"
    ),
    "hidden-forward": "log-probs from hidden states and the head's weight, no gradient",
    "kept": (
        "DAPO loss over candidate sets (top-k, top-p) from hidden states [N, H] and the head's weight [V, H]: value,"
        " gradients of both"
    ),
    "trees": (
        "DAPO loss of rollouts that share rows of hidden states, and the head's weight [V, H]:"
        " value, gradients of both"
    ),
    "forms": (
        "DAPO loss with terms at 128 extra ids per row, from hidden states [N, H] and the head's"
        " weight [V, H]: value, gradients of both"
    ),
    "cross-entropy": (
        "mean cross-entropy from hidden states [N, H] and the head's weight [V, H]: value,"
        " gradients of both"
    ),
    "divergence": (
        "mean KL(policy, teacher) from hidden states and weights of both: value, gradients of the"
        " policy's"
    ),
    "logits-forms": (
        "DAPO loss with terms at 128 extra ids per row, of given logits [N, V]: value and gradient"
    ),
    "divergence-forward": (
        "mean KL(teacher, policy) from hidden states and weights of both: value, gradients of the"
        " policy's"
    ),
    "divergence-jsd": (
        "mean Jensen-Shannon divergence from hidden states and weights of both: value, gradients of"
        " the policy's"
    ),
    "logits-divergence": (
        "mean KL(policy, teacher) of given logits [N, V]: value and gradient with respect to the"
        " policy's"
    ),
    "draft": (
        "mean cross-entropy of a draft head with the policy's distribution at the next position,"
        " from hidden states of both and one frozen head: value, gradient of the draft's hidden"
        " states"
    ),
    "step": "a training step end to end: forward, DAPO loss, backward, AdamW",
}
#: The direction of each divergence.
DIRECTIONS = {
    "divergence": "reverse", "divergence-forward": "forward", "divergence-jsd": "jsd", "logits-divergence": "reverse"
}  # fmt: skip


#: Contracts in which the head gets no gradient.
FROZEN = ("hidden-frozen", "gspo-frozen", "draft")

#: Contracts with one importance ratio per sequence.
OF_SEQUENCES = ("gspo", "gspo-frozen", "vespo")


@dataclass(frozen=True)
class Cell:
    """The sizes of a problem. `contract` is a key of CONTRACTS."""

    contract: str
    rows: int  # N, the number of tokens
    vocab: int  # V
    dtype: torch.dtype
    hidden: int | None = None  # hidden size. None: from logits
    active: float = 1.0  # share of sequences whose advantage is not 0
    layers: int | None = None  # layers of the model, in "step"
    sequences: int = 16
    #: Share of the tokens that use the hidden state of another token, in "trees".
    shared: float | None = None
    #: Micro-batches per training step. The loss is divided by this before its backward.
    accumulation: int = 1

    @property
    def beta(self) -> float:
        """The coefficient of the KL term."""
        return BETA if self.contract == "logits" else 0.0

    @property
    def active_rows(self) -> int:
        """The number of rows with a gradient."""
        if self.contract == "cross-entropy":
            return self.rows
        return round(self.active * self.sequences) * self.length

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.rows // self.sequences


@dataclass
class Case:
    """The inputs of a cell. N rows, hidden size H, vocabulary V. Unused fields are None.

    Floating-point tensors have the dtype of the cell, unless noted.
    """

    cell: Cell
    batch: TokenBatch
    logits: Any = None  # [N, V]; contenders may overwrite them
    pristine: Any = None  # [N, V], a copy of the logits to restore them from
    buffer: Any = None  # [N, V], memory to copy the logits to
    hidden: Any = None  # [N, H]
    weight: Any = None  # [V, H]
    weight_grad: Any = None  # [V, H], fp32: in "kept", gradients may be added to it
    # Teachers of the divergences are the policy plus noise of the same standard deviation.
    ref_logits: Any = None  # [N, V]
    ref_hidden: Any = None  # [N, H]
    ref_weight: Any = None  # [V, H]
    # In "step", the fields of `batch` have shape [B, T].
    model: Any = None
    optimizer: Any = None
    ids: Any = None  # int64 [B, T + 1]

    def restore(self) -> None:
        """Restore the inputs that a run has overwritten."""
        with torch.no_grad():
            if self.logits is not None:
                self.logits.copy_(self.pristine)
            if self.weight_grad is not None:
                self.weight_grad[self.batch.kept.ids.long()] = 0

    def output(self) -> Tensor:
        """Return logits that a contender may overwrite, [B, T, V] from a model or [N, V]."""
        if self.model is not None:
            return self.model(input_ids=self.ids, use_cache=False).logits[:, :-1]
        return ModelOutput.apply(self.logits)

    @property
    def leaves(self) -> dict[str, Tensor]:
        """{name of the gradient in a Result: the input that gets it}"""
        every = {"d_logits": self.logits, "d_hidden": self.hidden, "d_weight": self.weight}
        return {name: x for name, x in every.items() if x is not None and x.requires_grad}

    def gradients(self, loss: Tensor, into: bool = False) -> Result:
        """Run the backward of a loss, or a training step, and return the results.

        Returns the loss (a scalar, before the division by the number of micro-batches) and the
        gradient of each input that requires one. After a training step, see `step`.

        loss    a scalar
        into    whether the backward adds the gradient of the weight to `weight_grad`. Then this is
                the result "d_weight"
        """
        if self.model is not None:
            return self.step(loss)
        leaves = self.leaves
        if into:
            leaves.pop("d_weight", None)
        accumulation = self.cell.accumulation
        scaled = loss if accumulation == 1 else loss / accumulation
        gradients = torch.autograd.grad(scaled, [*leaves.values()])
        results: Result = {"loss": loss.detach(), **dict(zip(leaves, gradients, strict=True))}
        if into:
            results["d_weight"] = self.weight_grad
        return results

    @property
    def active(self) -> Tensor:
        """Indices of the rows with a gradient, int64. In "trees" rows of the hidden states."""
        if self.batch.rows is not None:
            return self.batch.rows[self.batch.advantages != 0].unique()
        rows = torch.arange(self.cell.rows, device=self.hidden.device)
        return rows if self.cell.contract == "cross-entropy" else rows[self.batch.advantages != 0]

    @property
    def plain_batch(self) -> TokenBatch:
        """The batch without its sets, for implementations that do not support them."""
        return TokenBatch(self.batch.targets, self.batch.advantages, old_logps=self.batch.old_logps)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the inputs of log-probs: (logits,) or (hidden states, weight of the head)."""
        if self.model is not None:
            return self.states().flatten(0, 1), self.model.lm_head.weight
        return (self.logits,) if self.hidden is None else (self.hidden, self.weight)

    def states(self) -> Tensor:
        """Return the last hidden states of the model, [B, T, H]."""
        return self.model.model(input_ids=self.ids, use_cache=False).last_hidden_state[:, :-1]

    def step(self, loss: Tensor) -> Result:
        """Run the backward and an optimizer step, and return the loss and the gradients.

        The learning rate is 0, so that every run sees the same parameters.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach(), "gradients": [p.grad for p in self.model.parameters()]}


# ---- losses in plain PyTorch


def policy_loss(logps: Tensor, batch: TokenBatch, cell: Cell) -> Tensor:
    """Return the loss that a trainer computes from log-probs, a scalar.

    This is the mean over tokens of DAPO's clipped loss, with a KL term (k3) if `cell.beta` is not
    0. For "gspo" the ratio is that of a whole sequence, for "vespo" see `_vespo`.

    logps   [N] or [B, T], as the fields of `batch`
    """
    log_ratio = logps - batch.old_logps
    if cell.contract == "vespo":
        shape = (cell.sequences, -1)
        sequence_log_ratio = log_ratio.view(shape).sum(1)
        return _vespo(sequence_log_ratio, logps.view(shape), batch.advantages.view(shape))
    if cell.contract in OF_SEQUENCES:
        # The ratio of a sequence is the geometric mean over its tokens.
        token_log_ratio = log_ratio.view(cell.sequences, -1)
        sequence_log_ratio = token_log_ratio.mean(1, keepdim=True)
        log_ratio = sequence_log_ratio.expand_as(token_log_ratio).reshape(logps.shape)
    ratio = torch.exp(log_ratio)
    low, high = CLIP
    clipped = ratio.clamp(1 - low, 1 + high)
    loss = -torch.min(ratio * batch.advantages, clipped * batch.advantages)
    if cell.beta:
        difference = batch.ref_logps - logps
        loss = loss + cell.beta * (torch.exp(difference) - difference - 1)
    return loss.sum() / logps.numel()


def _vespo(log_ratio: Tensor, logps: Tensor, advantages: Tensor) -> Tensor:
    """Return VESPO's loss, the mean over tokens of -w A log p.

    The weight w = exp(lambda + k log r - lambda r) of a sequence with ratio r gets no gradient.
    k and lambda depend on the sign of the advantage A.

    log_ratio   [sequences], log r, the sum over the tokens. It is clamped to log 1e-8 and 20
    logps, advantages   [sequences, tokens]
    """
    log_ratio = log_ratio[:, None].clamp(math.log(1e-8), 20.0)
    k = torch.where(advantages >= 0, 2.0, 3.0)
    rate = torch.where(advantages >= 0, 3.0, 2.0)  # lambda
    weight = torch.exp(rate + k * log_ratio - rate * log_ratio.exp()).detach()
    return -(weight * advantages * logps).mean()


def mean_divergence(direction: str, logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return the mean divergence of a policy and a teacher over rows, a scalar.

    direction   "reverse": KL(policy, teacher). "forward": KL(teacher, policy). "jsd": the
                Jensen-Shannon divergence
    logits, teacher_logits  [n, V]
    """

    def kl(a: Tensor, b: Tensor) -> Tensor:
        """Return the mean of KL(a, b) over rows, from log-probs [n, V]."""
        return (a.exp() * (a - b)).sum(-1).mean()

    policy = logits.log_softmax(-1)
    teacher = teacher_logits.log_softmax(-1)
    if direction == "reverse":
        return kl(policy, teacher)
    if direction == "forward":
        return kl(teacher, policy)
    mixture = torch.logaddexp(policy, teacher) - math.log(2.0)
    return 0.5 * (kl(teacher, mixture) + kl(policy, mixture))


# ---- inputs


def make_case(cell: Cell, device: str, seed: int = 0) -> Case:
    """Draw the inputs of a cell. The same seed gives the same inputs.

    device  "cpu" or "cuda"
    """
    generator = torch.Generator(device).manual_seed(seed)
    if cell.contract == "step":
        return _case_of_step(cell, device, generator)
    if cell.hidden is None:
        return _case_of_logits(cell, device, generator)
    hidden, weight, targets = _hidden_near_targets(cell, device, generator)
    kept = draw_candidate_sets(targets, cell.vocab, generator) if cell.contract == "kept" else None
    rows = None
    if cell.shared is not None:
        rows, targets = _share_rows(cell, targets)
        hidden = hidden[: int(rows.max()) + 1].clone()
    batch = TokenBatch(targets, torch.ones(cell.rows, device=device), kept=kept, rows=rows)
    case = Case(cell, batch, hidden=hidden, weight=weight)
    if cell.contract in DIRECTIONS:
        case.ref_hidden = _with_noise(hidden, generator).to(cell.dtype)
        case.ref_weight = _with_noise(weight, generator).to(cell.dtype)
    elif cell.contract == "draft":
        # The policy's states one position later are the draft's plus noise.
        case.ref_hidden = _with_noise(hidden, generator).to(cell.dtype).roll(1, 0)
        case.ref_weight = weight
    else:
        case.batch = with_advantages_and_logps(case, generator)
    if cell.contract == "forms":
        case.batch = with_terms(case, generator)
    if kept is not None:
        case.weight_grad = torch.zeros(weight.shape, device=device)
    hidden.requires_grad_(cell.contract != "hidden-forward")
    weight.requires_grad_(cell.contract not in ("hidden-forward", *FROZEN))
    return case


def _with_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return x plus Gaussian noise of the same standard deviation, in fp32."""
    noise = torch.randn(x.shape, generator=generator, device=x.device)
    return x + x.float().std() * noise


def _share_rows(cell: Cell, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Let groups of sequences use the same hidden states, as rollouts with a common prefix do.

    Returns (rows, targets), both int64 [N]: the row of the hidden states of each token, and the
    targets. Sequences of a group have the same targets except for the last one of each sequence.

    cell      `cell.shared` is the share of tokens that use the row of another token: 1 - 1 / group
    targets   int64 [N]
    """
    token = torch.arange(cell.rows, device=targets.device)
    sequence = token // cell.length
    position = token % cell.length
    sequences_per_group = round(1 / (1 - cell.shared))
    group = sequence // sequences_per_group
    rows = group * cell.length + position
    return rows, torch.where(position < cell.length - 1, targets[rows], targets)


def _case_of_logits(cell: Cell, device: str, generator: torch.Generator) -> Case:
    """Draw logits like those of a policy: a few likely tokens and a flat tail.

    Targets are sampled from the softmax of the logits. A teacher's logits are the policy's plus
    noise.
    """
    pristine = torch.empty(cell.rows, cell.vocab, dtype=cell.dtype, device=device)
    targets = torch.empty(cell.rows, dtype=torch.int64, device=device)
    has_teacher = cell.contract in DIRECTIONS
    ref_logits = torch.empty_like(pristine) if has_teacher else None
    # The same ids are likely in every row: 50, or a quarter of a small vocabulary.
    shuffled_ids = torch.randperm(cell.vocab, generator=generator, device=device)
    likely = shuffled_ids[: min(50, cell.vocab // 4)]
    for rows in row_blocks(cell, 4, device):
        logits_of_block = torch.randn(pristine[rows].shape, generator=generator, device=device)
        logits_of_block[:, likely] += 8
        pristine[rows] = logits_of_block
        samples = torch.multinomial(logits_of_block.softmax(-1), 1, generator=generator)
        targets[rows] = samples[:, 0]
        if ref_logits is not None:
            ref_logits[rows] = logits_of_block + torch.randn(
                logits_of_block.shape, generator=generator, device=device
            )
    logits = pristine.clone().requires_grad_(cell.contract != "logits-forward")
    batch = TokenBatch(targets, torch.ones(cell.rows, device=device))
    case = Case(cell, batch, logits, pristine, buffer=pristine.clone(), ref_logits=ref_logits)
    if not has_teacher:
        case.batch = with_advantages_and_logps(case, generator)
    if cell.contract == "logits-forms":
        case.batch = with_terms(case, generator)
    return case


def with_terms(case: Case, generator: torch.Generator) -> TokenBatch:
    """Return the batch with random terms at EXTRA_IDS ids of each row.

    The ids of a row are consecutive, from a random one. There is a term in their log-probs and one
    in their probabilities.
    """
    device = case.batch.targets.device
    cell = case.cell
    first = torch.randint(0, cell.vocab, (cell.rows, 1), generator=generator, device=device)
    ids = (first + torch.arange(EXTRA_IDS, device=device)) % cell.vocab

    def random_terms() -> TokenSets:
        coefficients = torch.randn(ids.shape, generator=generator, device=device)
        return TokenSets.from_padded(ids, values=coefficients)

    return replace(case.batch, logp_terms=random_terms(), prob_terms=random_terms())


def _hidden_near_targets(
    cell: Cell, device: str, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw (hidden states [N, H], weight [V, H], targets int64 [N]), in the dtype of the cell.

    A hidden state is noise plus a multiple of the weight of its target, as with a trained head. The
    multiple is between 0 and 12, so that some tokens are likely and others are not.
    """
    weight = torch.randn(cell.vocab, cell.hidden, generator=generator, device=device)
    weight = weight / cell.hidden**0.5
    targets = torch.randint(0, cell.vocab, (cell.rows,), generator=generator, device=device)
    confidence = 12 * torch.rand(cell.rows, 1, generator=generator, device=device)
    hidden = (
        torch.randn(cell.rows, cell.hidden, generator=generator, device=device)
        + confidence * weight[targets]
    )
    return hidden.to(cell.dtype), weight.to(cell.dtype), targets


#: The sizes of candidate sets follow figures that prime-rl published for top-k and top-p sampling:
#: 46 % of the rows have a single id, the median is 2, the mean about 8, the 99th percentile about
#: 82. For rows with more than one id, sizes are drawn from a log-normal distribution whose
#: parameters reproduce these quantiles.
SINGLE = 0.46  # share of the rows with a single id
MU = 1.936  # mean of the logarithm of a size
SIGMA = 1.185  # its standard deviation
LARGEST = 512  # the largest size
#: Extra ids of each row in the suites "forms" and "logits-forms".
EXTRA_IDS = 128


def draw_candidate_sets(targets: Tensor, vocab: int, generator: torch.Generator) -> TokenSets:
    """Draw the candidate set of each row. It contains the target, which is its first id.

    targets  int64 [N]
    vocab    vocabulary size
    """
    random = {"generator": generator, "device": targets.device}  # arguments of torch.rand...
    sizes = (SIGMA * torch.randn(targets.shape, **random) + MU).exp().round()
    sizes = sizes.clamp(2, min(LARGEST, vocab)).long()
    counts = torch.where(torch.rand(targets.shape, **random) < SINGLE, 1, sizes)
    row = torch.repeat_interleave(counts)  # the row of each id, int64 [number of ids]
    row_begin = counts.cumsum(0) - counts  # index of the first id of each row, [N]
    position = torch.arange(row.numel(), device=row.device) - row_begin[row]  # in its set
    # The ids of a row are consecutive numbers from a random one on, times a factor that scatters
    # them over the vocabulary. The factor is a prime that does not divide V, so that the ids of a
    # set differ.
    start = torch.randint(0, vocab, targets.shape, **random)[row]
    factor = next(prime for prime in (7919, 104729) if vocab % prime)
    ids = torch.where(position == 0, targets[row], (start + position) * factor % vocab)
    # An id that is the target again is replaced by the next one after the set.
    is_duplicate = (position > 0) & (ids == targets[row])
    next_ids = (start + counts[row]) * factor % vocab
    return TokenSets.from_counts(torch.where(is_duplicate, next_ids, ids).int(), counts)


def _case_of_step(cell: Cell, device: str, generator: torch.Generator) -> Case:
    """Return the case of a training step of a small Qwen3 with random weights.

    The optimizer has made its state already, so that no timed step allocates it.
    """
    import transformers

    heads = max(2, cell.hidden // 64)
    config = transformers.Qwen3Config(
        vocab_size=cell.vocab, hidden_size=cell.hidden, intermediate_size=4 * cell.hidden, num_hidden_layers=cell.layers,
        num_attention_heads=heads, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
        max_position_embeddings=cell.length + 1, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[0] if device == "cuda" else []):
        torch.manual_seed(0)
        with torch.device(device):
            model = transformers.Qwen3ForCausalLM(config).to(cell.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # creates the optimizer's state
    optimizer.zero_grad(set_to_none=True)
    ids = torch.randint(
        0, cell.vocab, (cell.sequences, cell.length + 1), generator=generator, device=device
    )
    targets = ids[:, 1:].reshape(-1)
    batch = TokenBatch(targets, torch.ones(cell.rows, device=device))
    case = Case(cell, batch, model=model, optimizer=optimizer, ids=ids)
    with torch.no_grad():
        hidden = case.states().reshape(cell.rows, cell.hidden)
        flat = with_advantages_and_logps(
            Case(cell, batch, hidden=hidden, weight=model.lm_head.weight), generator
        )
    shape = (cell.sequences, cell.length)
    case.batch = TokenBatch(
        targets.view(shape), flat.advantages.view(shape), old_logps=flat.old_logps.view(shape)
    )
    return case


def with_advantages_and_logps(case: Case, generator: torch.Generator) -> TokenBatch:
    """Return the batch with random advantages and with log-probs of other policies.

    The old policy is near the current one, see draw_log_ratios. With a KL term there is a
    reference, and with one ratio per sequence there are the boundaries of the sequences.

    case    has the targets, and the logits or the hidden states and the weight
    """
    cell = case.cell
    batch = case.batch
    logps = torch.cat(
        [_target_logps(z.float(), batch.targets[rows]) for rows, z in _logits_in_blocks(case, 4)]
    )
    random = {"generator": generator, "device": batch.targets.device}
    size = torch.randn(cell.sequences, **random)
    size = torch.where(size < 0, size - 0.5, size + 0.5)  # none near 0
    # Whether a sequence has an advantage: a random choice of a fixed number of sequences.
    active = torch.randperm(cell.sequences, **random) < round(cell.active * cell.sequences)
    advantages = torch.where(active, size, 0.0).repeat_interleave(cell.length)
    ref_logps = logps + 1.5 * torch.randn(cell.rows, **random) if cell.beta else None
    cu_seqlens = None
    if cell.contract in OF_SEQUENCES:
        ends = torch.arange(0, cell.rows + 1, cell.length, device=batch.targets.device)
        cu_seqlens = ends.int()
    return replace(
        batch,
        advantages=advantages,
        old_logps=logps - draw_log_ratios(cell.rows, generator),
        ref_logps=ref_logps,
        cu_seqlens=cu_seqlens,
    )


def draw_log_ratios(rows: int, generator: torch.Generator) -> Tensor:
    """Draw log-ratios of new to old policy that keep away from the clip bounds, fp32 [rows].

    The bounds are log 0.8 = -0.22 and log 1.28 = 0.25. Three fifths of the ratios lie within 0.1 of
    0, the others are 0.4 to 0.6 away from it on either side.
    """
    # Three vectors of uniform numbers in [0, 1).
    choice, near, far = torch.rand(3, rows, generator=generator, device=generator.device)
    near = 0.2 * near - 0.1
    far = 0.4 + 0.2 * far
    signed_far = torch.where(choice < 0.8, far, -far)
    return torch.where(choice < 0.6, near, signed_far)


def _target_logps(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-prob of each target [n] from logits [n, V]."""
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def row_blocks(cell: Cell, bytes_per_logit: int, device: str) -> Iterator[slice]:
    """Yield blocks of rows whose logits take at most 256 MiB, or 2 GiB on CUDA.

    A block has at least one row. The slices cover all rows of the cell, in order.
    """
    block_bytes = 2 << 30 if device == "cuda" else 256 << 20
    step = max(1, block_bytes // (bytes_per_logit * cell.vocab))
    for begin in range(0, cell.rows, step):
        yield slice(begin, min(begin + step, cell.rows))


def _rows_of_hidden(batch: TokenBatch, tokens: slice) -> slice | Tensor:
    """Return the rows of the hidden states for some tokens. In "trees" tokens share rows."""
    return tokens if batch.rows is None else batch.rows[tokens]


def _logits_in_blocks(case: Case, bytes_per_logit: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, their logits [n, V]) in blocks.

    Logits have the dtype of the inputs of `case`, and are -inf outside the candidate sets.
    """
    kept = case.batch.kept
    for part in row_blocks(case.cell, bytes_per_logit, case.batch.targets.device.type):
        if case.hidden is None:
            z = case.pristine[part]
        else:
            z = case.hidden[_rows_of_hidden(case.batch, part)] @ case.weight.t()
        if kept is not None:
            z = z.masked_fill(~kept[part].mask(case.cell.vocab), -torch.inf)
        yield part, z


# ---- the reference results, and errors


@torch.no_grad()
def reference(case: Case) -> Result:
    """Return the results of the contract, computed in float64 and rounded to fp32.

    The results have the names and shapes that a provider must return, see `Case.gradients`.
    """
    if case.model is not None:
        return _step_reference(case)
    if case.cell.contract == "draft":
        return _draft_reference(case)
    if not case.leaves:  # contracts without a gradient
        return _forward_reference(case)
    return _gradient_reference(case)


def _in_float64(case: Case) -> Case:
    """Return the case with hidden states and weight in float64. Logits are converted in blocks."""
    if case.hidden is None:
        return Case(case.cell, case.batch, pristine=case.pristine)
    hidden = case.hidden.detach().double()
    return Case(case.cell, case.batch, hidden=hidden, weight=case.weight.detach().double())


def _teacher_in_float64(case: Case) -> Case:
    """Return a case whose logits are those of the teacher, in float64 like `_in_float64`."""
    teacher = Case(
        case.cell,
        case.batch,
        pristine=case.ref_logits,
        hidden=case.ref_hidden,
        weight=case.ref_weight,
    )
    return _in_float64(teacher)


def _forward_reference(case: Case) -> Result:
    """Return {"logps": [N]}, the log-probs of the targets, and from logits also "entropy" [N].

    They are computed in float64 and rounded to fp32.
    """
    logps = []
    entropy = []
    for rows, logits in _logits_in_blocks(_in_float64(case), 8):
        logits = logits.double()
        logps.append(_target_logps(logits, case.batch.targets[rows]))
        entropy.append(torch.special.entr(logits.softmax(-1)).sum(-1))
    results = {"logps": torch.cat(logps).float()}
    if case.hidden is None:
        results["entropy"] = torch.cat(entropy).float()
    return results


def _gradient_reference(case: Case) -> Result:
    """Return the loss and the gradients of the inputs, in fp32.

    They are computed in float64, in blocks of rows, because float64 logits of all rows may not
    fit in memory. The loss is a mean over rows, so a block counts by its share of the rows.
    """
    cell = case.cell
    batch = case.batch
    policy = _in_float64(case)
    is_divergence = cell.contract in DIRECTIONS
    teacher_blocks = _logits_in_blocks(_teacher_in_float64(case), 8) if is_divergence else iter(())
    sequence_loss = _sequence_loss(policy) if cell.contract in OF_SEQUENCES else None
    gradients = {}
    for name, leaf in case.leaves.items():
        # The gradient of the logits is kept in fp32, because it is as large as they are.
        dtype = torch.float32 if name == "d_logits" else torch.float64
        gradients[name] = torch.zeros(leaf.shape, dtype=dtype, device=leaf.device)
    loss = torch.zeros((), dtype=torch.float64, device=batch.targets.device)
    for part, z in _logits_in_blocks(policy, 8):
        z = z.double().requires_grad_()
        with torch.enable_grad():
            if is_divergence:
                _, teacher_logits = next(teacher_blocks)
                value = mean_divergence(DIRECTIONS[cell.contract], z, teacher_logits.double())
            elif sequence_loss is not None:
                value = sequence_loss.mean_over(part, _target_logps(z, batch.targets[part]))
            else:
                value = _token_loss(z, batch, part, cell)
        share = len(z) / cell.rows
        loss += share * value.detach()
        d_logits = share * torch.autograd.grad(value, z)[0]
        if "d_logits" in gradients:
            gradients["d_logits"][part] = d_logits
        hidden_rows = _rows_of_hidden(batch, part)
        if "d_hidden" in gradients:
            # Tokens may share rows, so that the gradients of a row are added.
            every_row = torch.arange(len(policy.hidden), device=policy.hidden.device)
            row_indices = every_row[hidden_rows]
            gradients["d_hidden"].index_add_(0, row_indices, d_logits @ policy.weight)
        if "d_weight" in gradients:
            gradients["d_weight"].addmm_(d_logits.t(), policy.hidden[hidden_rows])
    return {"loss": loss.float()} | {name: x.float() for name, x in gradients.items()}


def _token_loss(z: Tensor, batch: TokenBatch, part: slice, cell: Cell) -> Tensor:
    """Return the mean loss of the rows `part` of a batch, a scalar, from their logits z [n, V].

    This is the cross-entropy for the contract of this name. Otherwise it is `policy_loss`, with the
    terms at extra ids if the batch has them.
    """
    logps = _target_logps(z, batch.targets[part])
    if cell.contract == "cross-entropy":
        return -logps.mean()
    loss = policy_loss(logps, _rows_of_batch(batch, part), cell)
    if batch.logp_terms is not None:
        loss = loss + _extra_terms(z, batch, part)
    return loss


def _extra_terms(z: Tensor, batch: TokenBatch, part: slice) -> Tensor:
    """Return the mean over rows of sum c log p + sum r p over their extra ids, a scalar.

    z       logits [n, V] of the rows `part` of the batch
    batch   its terms have EXTRA_IDS ids for each row: c in `logp_terms`, r in `prob_terms`
    """
    ids = batch.logp_terms.ids.view(-1, EXTRA_IDS)[part].long()
    c = batch.logp_terms.values.view(-1, EXTRA_IDS)[part]
    r = batch.prob_terms.values.view(-1, EXTRA_IDS)[part]
    logps = z.log_softmax(-1).gather(1, ids)
    return (c * logps + r * logps.exp()).sum(1).mean()


@dataclass
class _SequenceLoss:
    """A loss of whole sequences, prepared so that its gradient can be computed in blocks of rows.

    value   the loss, a scalar
    grad_logps  its gradient with respect to the log-probs, times the number of rows, [N]
    """

    value: Tensor
    grad_logps: Tensor

    def mean_over(self, part: slice, logps: Tensor) -> Tensor:
        """Return a scalar with the value of the loss and its gradient for the log-probs of `part`.

        As with other losses, the gradient is that of a mean over the rows of the block.
        """
        grad_logps = self.grad_logps[part]
        return (grad_logps * logps).mean() + self.value - (grad_logps * logps.detach()).mean()


def _sequence_loss(case: Case) -> _SequenceLoss:
    """Compute a loss of whole sequences and its gradient with respect to the log-probs.

    case    a case in float64, with all sequences
    """
    targets = case.batch.targets
    logps = torch.cat(
        [_target_logps(z.double(), targets[rows]) for rows, z in _logits_in_blocks(case, 8)]
    )
    with torch.enable_grad():
        logps.requires_grad_()
        loss = policy_loss(logps, case.batch, case.cell)
        grad_logps = torch.autograd.grad(loss, logps)[0]
    return _SequenceLoss(loss.detach(), len(logps) * grad_logps)


def _rows_of_batch(batch: TokenBatch, part: slice) -> TokenBatch:
    """Return some rows of a batch: targets, advantages, and log-probs of other policies."""
    return TokenBatch(
        batch.targets[part],
        batch.advantages[part],
        old_logps=None if batch.old_logps is None else batch.old_logps[part],
        ref_logps=None if batch.ref_logps is None else batch.ref_logps[part],
    )


def _step_reference(case: Case) -> Result:
    """Return the loss and the gradients of all parameters.

    Head and loss are computed in float64. The body of the model is not, because all contenders
    share it.
    """
    weight = case.model.lm_head.weight
    batch = case.batch
    with torch.enable_grad():
        hidden = case.states()
        flat = TokenBatch(
            batch.targets.reshape(-1),
            batch.advantages.reshape(-1),
            old_logps=batch.old_logps.reshape(-1),
        )
        leaf = hidden.detach().reshape(case.cell.rows, -1).requires_grad_()
        head = reference(Case(case.cell, flat, hidden=leaf, weight=weight))
        case.optimizer.zero_grad(set_to_none=True)
        hidden.backward(head["d_hidden"].view(hidden.shape).to(hidden.dtype))
    gradients = []
    for parameter in case.model.parameters():
        gradient = parameter.grad.float()
        if parameter is weight:
            # The head is tied to the embedding. The backward above gave the embedding's part.
            gradient = gradient + head["d_weight"]
        gradients.append(gradient)
    case.optimizer.zero_grad(set_to_none=True)
    return {"loss": head["loss"], "gradients": gradients}


def _draft_reference(case: Case) -> Result:
    """Return the loss and the gradient of the draft's hidden states.

    The last position of each sequence does not count, because it has no next position.
    """
    cell, weight = case.cell, case.weight.double()
    position = torch.arange(cell.rows, device=weight.device)
    counted = position[position % cell.length != cell.length - 1]
    loss = torch.zeros((), dtype=torch.float64, device=weight.device)
    grad_hidden = torch.zeros(case.hidden.shape, dtype=torch.float64, device=weight.device)
    for part in row_blocks(cell, 8, weight.device.type):
        rows = counted[part]
        log_p = (case.hidden[rows].double() @ weight.t()).log_softmax(-1)
        q = (case.ref_hidden[rows + 1].double() @ weight.t()).softmax(-1)
        loss -= (q * log_p).sum() / len(counted)
        grad_hidden[rows] = (log_p.exp() - q) @ weight / len(counted)
    return {"loss": loss.float(), "d_hidden": grad_hidden.float()}


@torch.no_grad()
def errors(found: Result, expected: Result, scale: float = 1.0) -> dict[str, float]:
    """Return {name: error} of results. A result that is NaN has the error NaN.

    found       results of a provider
    expected    results of `reference`
    scale       a size that errors of the loss are divided by, such as the mean |advantage|

    - The error of the loss is divided by `scale`.
    - The error of log-probs and entropies is the largest absolute error.
    - The error of a gradient is relative, in the Euclidean norm. There are two: of all rows, and
      of the worst row.
    - The error of a model's gradients is that of the worst parameter.

    Raises ValueError if results are missing or not expected.
    """
    if found.keys() != expected.keys():
        raise ValueError(
            f"it returned {sorted(found)}, but the contract asks for {sorted(expected)}"
        )
    error_of: dict[str, float] = {}
    for name, x in expected.items():
        if name == "loss":
            error_of[name] = float((found[name].float() - x).abs()) / scale
        elif name == "gradients":
            parameter_errors = [
                _relative(gradient, expected_gradient)[0]
                for gradient, expected_gradient in zip(found[name], x, strict=True)
            ]
            error_of[name] = float(
                torch.tensor(parameter_errors).max()
            )  # unlike max(), NaN if one is
        elif name.startswith("d_"):
            error_of[name], error_of[f"{name}, worst row"] = _relative(found[name], x)
        else:
            error_of[name] = float((found[name].reshape(x.shape).float() - x).abs().max())
    return error_of


def _relative(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the relative error of all rows together, and that of the worst row.

    A row's norm counts as at least a fifth of the root mean square of all rows that are not 0. If
    the gradient of a row nearly vanishes, its own relative error is only rounding.
    """
    row_errors = []
    row_norms = []
    # 512 rows at a time, so that no copy of the whole gradient is made.
    blocks = zip(found.reshape(expected.shape).split(512), expected.split(512), strict=True)
    for x, y in blocks:
        row_errors.append((x.float() - y).norm(dim=-1).flatten())
        row_norms.append(y.norm(dim=-1).flatten())
    off = torch.cat(row_errors)
    size = torch.cat(row_norms)
    usual = size.norm() / size.count_nonzero().clamp(min=1) ** 0.5
    return float(off.norm() / size.norm()), float((off / size.clamp(min=0.2 * usual)).max())
