"""A cell of a table: its inputs, its loss in plain PyTorch, the reference results in float64, and
errors against these.

Rows form sequences of equal length, 16 by default, with one advantage per sequence: every trainer
supports that. No ratio of new to old policy is near a clip bound. So rounding of the logits changes
a gradient by no more than a rounding error, and the accuracy check can tell that from a wrong
formula.
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

Result = dict[
    str, Any
]  # {"loss": 0-d tensor, "d_logits": ..., ...}; "gradients" is a list of tensors

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
        "DAPO loss over kept sets from hidden states [N, H] and the head's weight [V, H]: value,"
        " gradients of both"
    ),
    "trees": (
        "DAPO loss of rollouts that share rows of hidden states, and the head's weight [V, H]:"
        " value, gradients of both"
    ),
    "forms": (
        "DAPO loss with terms at 128 listed ids a row, from hidden states [N, H] and the head's"
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
        "DAPO loss with terms at 128 listed ids a row, of given logits [N, V]: value and gradient"
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


#: Those whose head gets no gradient.
FROZEN = ("hidden-frozen", "gspo-frozen", "draft")

#: Those whose ratio is that of a sequence.
OF_SEQUENCES = ("gspo", "gspo-frozen", "vespo")


@dataclass(frozen=True)
class Cell:
    contract: str
    rows: int
    vocab: int
    dtype: torch.dtype
    hidden: int | None = None
    active: float = 1.0  # share of sequences whose advantage is not 0
    layers: int | None = None  # layers of the model in a training step
    sequences: int = 16
    shared: float | None = (
        None  # share of the tokens that need no row of their own, for the suite "trees"
    )
    accumulation: int = (
        1  # micro-batches of a step: the loss is divided by them before its backward
    )

    @property
    def beta(self) -> float:
        return BETA if self.contract == "logits" else 0.0

    @property
    def active_rows(self) -> int:
        """The number of rows with a gradient."""
        return (
            self.rows
            if self.contract == "cross-entropy"
            else round(self.active * self.sequences) * self.length
        )

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.rows // self.sequences


@dataclass
class Case:
    """The inputs of a contract; what it does not have is None."""

    cell: Cell
    batch: TokenBatch
    logits: Any = None  # [N, V], read by a contender, which may overwrite it
    pristine: Any = None  # [N, V], to restore it
    buffer: Any = None  # [N, V], warm memory for a copy
    hidden: Any = None  # [N, H]
    weight: Any = None  # [V, H]
    weight_grad: Any = (
        None  # fp32 [V, H] of kept sets: the caller's memory, to which a gradient is added
    )
    # of the teacher of a divergence: the policy's plus noise of the same standard deviation
    ref_logits: Any = None
    ref_hidden: Any = None
    ref_weight: Any = None
    model: Any = None  # of a training step, whose batch is [B, T]
    optimizer: Any = None
    ids: Any = None  # [B, T + 1]

    def restore(self) -> None:
        """Undoes what a run has overwritten."""
        with torch.no_grad():
            if self.logits is not None:
                self.logits.copy_(self.pristine)
            if self.weight_grad is not None:
                self.weight_grad[self.batch.kept.ids.long()] = 0

    def output(self) -> Tensor:
        """The logits for a contender that works in place:

        of the model [B, T, V], or those that are given.
        """
        if self.model is not None:
            return self.model(input_ids=self.ids, use_cache=False).logits[:, :-1]
        return ModelOutput.apply(self.logits)

    @property
    def leaves(self) -> dict[str, Tensor]:
        every = {"d_logits": self.logits, "d_hidden": self.hidden, "d_weight": self.weight}
        return {name: x for name, x in every.items() if x is not None and x.requires_grad}

    def gradients(self, loss: Tensor, into: bool = False) -> Result:
        """The results of a loss; of a step of training.

        into: the loss adds the weight's gradient to `weight_grad`.
        """
        if self.model is not None:
            return self.step(loss)
        leaves = {name: x for name, x in self.leaves.items() if not (into and name == "d_weight")}
        scaled = loss if self.cell.accumulation == 1 else loss / self.cell.accumulation
        found = {
            "loss": loss.detach(),
            **dict(zip(leaves, torch.autograd.grad(scaled, [*leaves.values()]), strict=True)),
        }
        return found | ({"d_weight": self.weight_grad} if into else {})

    @property
    def active(self) -> Tensor:
        """Indices of the rows with a gradient."""
        if self.batch.rows is not None:
            return self.batch.rows[self.batch.advantages != 0].unique()
        rows = torch.arange(self.cell.rows, device=self.hidden.device)
        return rows if self.cell.contract == "cross-entropy" else rows[self.batch.advantages != 0]

    @property
    def plain_batch(self) -> TokenBatch:
        """The batch without its sets, for implementations that do not support them."""
        return TokenBatch(self.batch.targets, self.batch.advantages, old_logps=self.batch.old_logps)

    def inputs(self) -> tuple[Tensor, ...]:
        """What log-probs are made of: (logits), or (hidden states, weight)."""
        if self.model is not None:
            return self.states().flatten(0, 1), self.model.lm_head.weight
        return (self.logits,) if self.hidden is None else (self.hidden, self.weight)

    def states(self) -> Tensor:
        """The last hidden states of the model, [B, T, H]."""
        return self.model.model(input_ids=self.ids, use_cache=False).last_hidden_state[:, :-1]

    def step(self, loss: Tensor) -> Result:
        """The backward and an optimizer step.

        The learning rate is 0, so that every run sees the same parameters.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach(), "gradients": [p.grad for p in self.model.parameters()]}


# ---- losses in plain PyTorch


def policy_loss(logps: Tensor, batch: TokenBatch, cell: Cell) -> Tensor:
    """What a trainer does with log-probs: ratio, clip, KL (k3), mean over tokens."""
    log_ratio, beta = logps - batch.old_logps, cell.beta
    if cell.contract in OF_SEQUENCES:
        of_sequence = log_ratio.view(cell.sequences, -1)
        if cell.contract == "vespo":
            return _vespo(
                of_sequence.sum(1),
                logps.view_as(of_sequence),
                batch.advantages.view_as(of_sequence),
            )
        log_ratio = of_sequence.mean(1, keepdim=True).expand_as(of_sequence).reshape(logps.shape)
    ratio = torch.exp(log_ratio)
    low, high = CLIP
    loss = -torch.min(ratio * batch.advantages, ratio.clamp(1 - low, 1 + high) * batch.advantages)
    if beta:
        d = batch.ref_logps - logps
        loss = loss + beta * (torch.exp(d) - d - 1)
    return loss.sum() / logps.numel()


def _vespo(log_w: Tensor, logps: Tensor, advantages: Tensor) -> Tensor:
    """-sg(exp(lambda + k log w - lambda w)) A log p, with k and lambda by the sign of A, mean over
    tokens.
    """
    log_w = log_w[:, None].clamp(math.log(1e-8), 20.0)
    k, rate = torch.where(advantages >= 0, 2.0, 3.0), torch.where(advantages >= 0, 3.0, 2.0)
    weight = torch.exp(rate + k * log_w - rate * log_w.exp()).detach()
    return -(weight * advantages * logps).mean()


def mean_divergence(direction: str, z: Tensor, w: Tensor) -> Tensor:
    """The mean divergence from logits [n, V], by its definition."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1).mean()

    log_p, log_q = z.log_softmax(-1), w.log_softmax(-1)
    if direction != "jsd":
        return kl(log_p, log_q) if direction == "reverse" else kl(log_q, log_p)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return 0.5 * (kl(log_q, log_m) + kl(log_p, log_m))


# ---- inputs


def make_case(cell: Cell, device: str, seed: int = 0) -> Case:
    g = torch.Generator(device).manual_seed(seed)
    if cell.contract == "step":
        return _step(cell, device, g)
    if cell.hidden is None:
        return _logits(cell, device, g)
    hidden, weight, targets = _near(cell, device, g)
    kept, rows = sets_of(targets, cell.vocab, g) if cell.contract == "kept" else None, None
    if (
        cell.shared is not None
    ):  # several sequences have the same rows, the last of which predicts another token of each
        sequence, place = (
            torch.arange(cell.rows, device=device) // cell.length,
            torch.arange(cell.rows, device=device) % cell.length,
        )
        rows = sequence // round(1 / (1 - cell.shared)) * cell.length + place
        targets = torch.where(place < cell.length - 1, targets[rows], targets)
        hidden = hidden[: int(rows.max()) + 1].clone()
    batch = TokenBatch(targets, torch.ones(cell.rows, device=device), kept=kept, rows=rows)
    case = Case(cell, batch, hidden=hidden, weight=weight)
    if cell.contract in DIRECTIONS:
        case.ref_hidden, case.ref_weight = (
            (x + x.float().std() * torch.randn(x.shape, generator=g, device=device)).to(cell.dtype)
            for x in (hidden, weight)
        )
    elif cell.contract == "draft":
        # The policy's states one position later are the draft's plus noise.
        noise = torch.randn(hidden.shape, generator=g, device=device)
        next_hidden = hidden + hidden.float().std() * noise
        case.ref_hidden = next_hidden.to(cell.dtype).roll(1, 0)
        case.ref_weight = weight
    else:
        case.batch = tokens(case, g)
    if cell.contract == "forms":
        case.batch = with_terms(case, g)
    if kept is not None:
        case.weight_grad = torch.zeros(weight.shape, device=device)
    hidden.requires_grad_(cell.contract != "hidden-forward")
    weight.requires_grad_(cell.contract not in ("hidden-forward", *FROZEN))
    return case


def _logits(cell: Cell, device: str, g: torch.Generator) -> Case:
    """Logits like those of a policy: a few likely tokens and a flat tail. Targets are sampled from
    them. Those of a teacher are the policy's plus noise.
    """
    pristine = torch.empty(cell.rows, cell.vocab, dtype=cell.dtype, device=device)
    targets = torch.empty(cell.rows, dtype=torch.int64, device=device)
    two = cell.contract in DIRECTIONS
    ref_logits = torch.empty_like(pristine) if two else None
    likely = torch.randperm(cell.vocab, generator=g, device=device)[: min(50, cell.vocab // 4)]
    for part in row_blocks(cell, 4, device):
        x = torch.randn(pristine[part].shape, generator=g, device=device)
        x[:, likely] += 8
        pristine[part] = x
        targets[part] = torch.multinomial(x.softmax(-1), 1, generator=g)[:, 0]
        if two:
            ref_logits[part] = x + torch.randn(x.shape, generator=g, device=device)
    logits = pristine.clone().requires_grad_(cell.contract != "logits-forward")
    batch = TokenBatch(targets, torch.ones(cell.rows, device=device))
    case = Case(cell, batch, logits, pristine, pristine.clone(), ref_logits=ref_logits)
    case.batch = batch if two else tokens(case, g)
    if cell.contract == "logits-forms":
        case.batch = with_terms(case, g)
    return case


def with_terms(case: Case, g: torch.Generator) -> TokenBatch:
    """The batch with both terms at ids that follow one another."""
    device, cell = case.batch.targets.device, case.cell
    first = torch.randint(0, cell.vocab, (cell.rows, 1), generator=g, device=device)
    ids = (first + torch.arange(LISTED, device=device)) % cell.vocab
    terms = (
        TokenSets.from_padded(ids, values=torch.randn(ids.shape, generator=g, device=device))
        for _ in range(2)
    )
    return replace(case.batch, logp_terms=next(terms), prob_terms=next(terms))


def _near(cell: Cell, device: str, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, targets):

    hidden states near the weight of their target, as a trained head has them.
    """
    weight = torch.randn(cell.vocab, cell.hidden, generator=g, device=device) / cell.hidden**0.5
    targets = torch.randint(0, cell.vocab, (cell.rows,), generator=g, device=device)
    confidence = 12 * torch.rand(cell.rows, 1, generator=g, device=device)
    hidden = (
        torch.randn(cell.rows, cell.hidden, generator=g, device=device)
        + confidence * weight[targets]
    )
    return hidden.to(cell.dtype), weight.to(cell.dtype), targets


#: The sizes of the sets follow figures that prime-rl published for top-k and top-p sampling: 46 %
#: of the rows have a single id, the median is 2, the mean about 8, the 99th percentile about 82.
#: For rows with more than one id, sizes are drawn from a log-normal distribution whose parameters
#: reproduce these quantiles.
SINGLE, MU, SIGMA, LARGEST = 0.46, 1.936, 1.185, 512
#: Ids that each row lists in the suites "forms" and "logits-forms".
LISTED = 128


def sets_of(targets: Tensor, vocab: int, g: torch.Generator) -> TokenSets:
    """Sets of such sizes with the targets among them."""
    random = {"generator": g, "device": targets.device}
    several = (
        (SIGMA * torch.randn(targets.shape, **random) + MU)
        .exp()
        .round()
        .clamp(2, min(LARGEST, vocab))
        .long()
    )
    counts = torch.where(torch.rand(targets.shape, **random) < SINGLE, 1, several)
    row, begin = torch.repeat_interleave(counts), counts.cumsum(0) - counts
    inside = torch.arange(row.numel(), device=row.device) - begin[row]
    # The ids of a row are consecutive numbers from a random one on, times a factor that scatters
    # them over the vocabulary.
    start = torch.randint(0, vocab, targets.shape, **random)[row]
    factor = next(
        p for p in (7919, 104729) if vocab % p
    )  # a prime that does not divide V: different ids stay different
    ids = torch.where(inside == 0, targets[row], (start + inside) * factor % vocab)
    again = (inside > 0) & (ids == targets[row])
    return TokenSets.from_counts(
        torch.where(again, (start + counts[row]) * factor % vocab, ids).int(), counts
    )


def _step(cell: Cell, device: str, g: torch.Generator) -> Case:
    """A Qwen3 with random weights, in the proportions of the small ones."""
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
        0, cell.vocab, (cell.sequences, cell.length + 1), generator=g, device=device
    )
    shape, targets = (cell.sequences, cell.length), ids[:, 1:].reshape(-1)
    case = Case(
        cell,
        TokenBatch(targets, torch.ones(cell.rows, device=device)),
        model=model,
        optimizer=optimizer,
        ids=ids,
    )
    with torch.no_grad():
        head = Case(
            cell,
            case.batch,
            hidden=case.states().reshape(cell.rows, cell.hidden),
            weight=model.lm_head.weight,
        )
        flat = tokens(head, g)
    case.batch = TokenBatch(
        *(x.view(shape) for x in (targets, flat.advantages)), old_logps=flat.old_logps.view(shape)
    )
    return case


def tokens(case: Case, g: torch.Generator) -> TokenBatch:
    """The batch of a case with advantages, and with log-probs of other policies near those of its
    own.
    """
    cell, targets, kept = case.cell, case.batch.targets, case.batch.kept
    now = torch.cat([_chosen(z.float(), targets[part]) for part, z in _rows_of_logits(case, 4)])
    random = {"generator": g, "device": targets.device}
    size = torch.randn(cell.sequences, **random)
    size = torch.where(size < 0, size - 0.5, size + 0.5)  # none near 0
    active = torch.randperm(cell.sequences, **random) < round(cell.active * cell.sequences)
    advantages = torch.where(active, size, 0.0).repeat_interleave(cell.length)
    ref_logps = now + 1.5 * torch.randn(cell.rows, **random) if cell.beta else None
    ends = None
    if cell.contract in OF_SEQUENCES:
        ends = torch.arange(0, cell.rows + 1, cell.length, dtype=torch.int32, device=targets.device)
    old_logps = now - log_ratios(cell.rows, g)
    rows = case.batch.rows
    return TokenBatch(
        targets,
        advantages,
        old_logps=old_logps,
        ref_logps=ref_logps,
        kept=kept,
        cu_seqlens=ends,
        rows=rows,
    )


def log_ratios(rows: int, g: torch.Generator) -> Tensor:
    """Log-ratios of which three fifths lie within 0.1 of 0 and the others 0.4 to 0.6 from it, on
    either side: log 0.8 is -0.22 and log 1.28 is 0.25.
    """
    kind, near, far = torch.rand(3, rows, generator=g, device=g.device)
    far = 0.4 + 0.2 * far
    return torch.where(kind < 0.6, 0.2 * near - 0.1, torch.where(kind < 0.8, far, -far))


def _chosen(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def row_blocks(cell: Cell, size: int, device: str) -> Iterator[slice]:
    """Rows whose logits take some hundred MB at `size` bytes each (2 GB on CUDA)."""
    step = max(1, (2 << 30 if device == "cuda" else 256 << 20) // (size * cell.vocab))
    for lo in range(0, cell.rows, step):
        yield slice(lo, min(lo + step, cell.rows))


def _states(batch: TokenBatch, part: slice) -> slice | Tensor:
    """Which hidden states these tokens have."""
    return part if batch.rows is None else batch.rows[part]


def _rows_of_logits(case: Case, size: int) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits [n, V] in the dtype of the operands, -inf outside their sets) some at a
    time.
    """
    kept = case.batch.kept
    for part in row_blocks(case.cell, size, case.batch.targets.device.type):
        z = (
            case.pristine[part]
            if case.hidden is None
            else case.hidden[_states(case.batch, part)] @ case.weight.t()
        )
        yield (
            part,
            z if kept is None else z.masked_fill(~kept[part].mask(case.cell.vocab), -torch.inf),
        )


# ---- the reference results, and errors


@torch.no_grad()
def reference(case: Case) -> Result:
    """The results of the contract, computed in float64 by autograd, some rows at a time, and
    returned in fp32.
    """
    if case.model is not None:
        return _step_reference(case)
    if case.cell.contract == "draft":
        return _draft_reference(case)
    cell, batch, wide = (
        case.cell,
        case.batch,
        {"dtype": torch.float64, "device": case.batch.targets.device},
    )
    # The gradient of logits, which is as large as they are, is kept in fp32.
    found = {
        name: torch.zeros(
            x.shape, dtype=torch.float32 if name == "d_logits" else torch.float64, device=x.device
        )
        for name, x in case.leaves.items()
    }
    own, teacher = (
        Case(
            cell,
            batch,
            pristine=z,
            **{name: x.detach().double() for name, x in parts.items() if x is not None},
        )
        for z, parts in (
            (case.pristine, {"hidden": case.hidden, "weight": case.weight}),
            (case.ref_logits, {"hidden": case.ref_hidden, "weight": case.ref_weight}),
        )
    )
    teachers = _rows_of_logits(teacher, 8)
    loss, logps, entropy = (
        torch.zeros((), **wide),
        torch.empty(cell.rows, **wide),
        torch.empty(cell.rows, **wide),
    )
    slopes = None if cell.contract not in OF_SEQUENCES else _slopes(own, batch)
    for part, z in _rows_of_logits(own, 8):
        z = z.double().requires_grad_(bool(found))
        with torch.enable_grad():
            if cell.contract in DIRECTIONS:
                value = mean_divergence(DIRECTIONS[cell.contract], z, next(teachers)[1].double())
            else:
                logps[part] = chosen = _chosen(z, batch.targets[part])
                if slopes is not None:
                    value = (
                        (slopes[1][part] * chosen).mean()
                        + slopes[0]
                        - (slopes[1][part] * chosen.detach()).mean()
                    )
                elif cell.contract == "cross-entropy":
                    value = -chosen.mean()
                else:
                    value = policy_loss(chosen, _part(batch, part), cell)
                    if batch.logp_terms is not None:
                        value = value + _listed(z, batch, part)
        if not found:
            entropy[part] = torch.special.entr(z.softmax(-1)).sum(-1)
            continue
        share = len(z) / cell.rows
        loss += share * value.detach()
        d_logits = share * torch.autograd.grad(value, z)[0]
        if "d_logits" in found:
            found["d_logits"][part] = d_logits
        if "d_hidden" in found:
            states = torch.arange(len(own.hidden), device=own.hidden.device)[_states(batch, part)]
            found["d_hidden"].index_add_(0, states, d_logits @ own.weight)
        if "d_weight" in found:
            found["d_weight"].addmm_(d_logits.t(), own.hidden[_states(batch, part)])
    results = (
        {"loss": loss} | found
        if found
        else {"logps": logps} | ({"entropy": entropy} if case.hidden is None else {})
    )
    return {name: x.float() for name, x in results.items()}


def _listed(z: Tensor, batch: TokenBatch, part: slice) -> Tensor:
    """The mean over rows of sum c log p + sum r p, over their listed ids."""
    ids, c, r = (
        x.view(-1, LISTED)[part]
        for x in (batch.logp_terms.ids, batch.logp_terms.values, batch.prob_terms.values)
    )
    logps = z.log_softmax(-1).gather(1, ids.long())
    return (c * logps + r * logps.exp()).sum(1).mean()


def _slopes(case: Case, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """The loss, and its slopes [N] in log-probs times N, which wait for whole sequences."""
    now = torch.cat(
        [_chosen(z.double(), batch.targets[part]) for part, z in _rows_of_logits(case, 8)]
    )
    with torch.enable_grad():
        leaf = now.requires_grad_()
        loss = policy_loss(leaf, batch, case.cell)
        return loss.detach(), len(now) * torch.autograd.grad(loss, leaf)[0]


def _part(batch: TokenBatch, part: slice) -> TokenBatch:
    """Some rows, without sets."""
    optional = {
        name: x[part]
        for name in ("old_logps", "ref_logps")
        for x in [getattr(batch, name)]
        if x is not None
    }
    return TokenBatch(batch.targets[part], batch.advantages[part], **optional)


def _step_reference(case: Case) -> Result:
    """The head and the loss are computed in float64.

    The model's body is not: all contenders share it.
    """
    weight, batch = case.model.lm_head.weight, case.batch
    with torch.enable_grad():
        hidden = case.states()
        flat = TokenBatch(
            *(x.reshape(-1) for x in (batch.targets, batch.advantages)),
            old_logps=batch.old_logps.reshape(-1),
        )
        leaf = hidden.detach().reshape(case.cell.rows, -1).requires_grad_()
        head = reference(Case(case.cell, flat, hidden=leaf, weight=weight))
        case.optimizer.zero_grad(set_to_none=True)
        hidden.backward(head["d_hidden"].view(hidden.shape).to(hidden.dtype))
    # The head is tied to the embedding, which has a gradient of its own by now.
    gradients = [
        p.grad.float() + (head["d_weight"] if p is weight else 0) for p in case.model.parameters()
    ]
    case.optimizer.zero_grad(set_to_none=True)
    return {"loss": head["loss"], "gradients": gradients}


def _draft_reference(case: Case) -> Result:
    """The last position of each sequence has no next one, and does not count."""
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
    """The error of the loss is divided by `scale`. Of log-probs and entropies it is the largest
    absolute error. Of a gradient it is the relative error in the Euclidean norm, of all rows and of
    the worst row; of a model's gradients, that of the worst parameter.
    """
    if found.keys() != expected.keys():
        raise ValueError(
            f"it returned {sorted(found)}, but the contract asks for {sorted(expected)}"
        )
    off = {}
    for name, x in expected.items():
        if name == "loss":
            off[name] = float((found[name].float() - x).abs()) / scale
        elif name == "gradients":
            every = [_relative(y, z)[0] for y, z in zip(found[name], x, strict=True)]
            off[name] = float(torch.tensor(every).max())  # NaN if one of them is
        elif name.startswith("d_"):
            off[name], off[f"{name}, worst row"] = _relative(found[name], x)
        else:
            off[name] = float((found[name].reshape(x.shape).float() - x).abs().max())
    return off


def _relative(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Relative errors of all rows together, and of the worst row. A row's norm counts as at least a
    fifth of the root mean square of all rows: if the gradient of a row nearly vanishes, its
    relative error is only rounding.
    """
    pairs = zip(
        found.reshape(expected.shape).split(512), expected.split(512), strict=True
    )  # 512: no copies of everything
    norms = [((x.float() - y).norm(dim=-1).flatten(), y.norm(dim=-1).flatten()) for x, y in pairs]
    off, size = (torch.cat(parts) for parts in zip(*norms, strict=True))
    usual = size.norm() / size.count_nonzero().clamp(min=1) ** 0.5
    return float(off.norm() / size.norm()), float((off / size.clamp(min=0.2 * usual)).max())
