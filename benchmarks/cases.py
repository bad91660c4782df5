"""A cell of a table: its inputs, the loss in plain PyTorch, and the reference results in float64.

Rows form sequences of equal length, 16 by default, with one advantage per sequence: every trainer supports that. No ratio of new to
old policy is near a clip bound. So rounding of the logits changes a gradient by no more than a rounding error, and the accuracy
check can tell that from a wrong formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from grpo_kernels import TokenBatch
from grpo_kernels.diagnosis.step import Output

Tensor = torch.Tensor
Result = dict[str, Any]  # {"loss": 0-d tensor, "d_logits": ..., ...}; "gradients" is a list of tensors

HALF = (torch.bfloat16, torch.float16)
CLIP = (0.2, 0.28)
BETA = 0.04  # of the KL term, in the contracts on logits
CONTRACTS = {
    "logits": "DAPO loss with KL of given logits [N, V]: value and gradient with respect to the logits",
    "logits-forward": "log-probs and entropy of given logits [N, V], no gradient",
    "hidden": "DAPO loss from hidden states [N, H] and the head's weight [V, H]: value, gradients of both",
    "hidden-frozen": "DAPO loss from hidden states with a frozen head: value, gradient of the hidden states",
    "hidden-forward": "log-probs from hidden states and the head's weight, no gradient",
    "kept": "DAPO loss over kept sets from hidden states [N, H] and the head's weight [V, H]: value, gradients of both",
    "sparse": "DAPO loss from hidden states [N, H] of rows of a mean entropy and the head's weight [V, H]: value, gradients of both",
    "cross-entropy": "mean cross-entropy from hidden states [N, H] and the head's weight [V, H]: value, gradients of both",
    "divergence": "mean KL(policy, teacher) from hidden states and weights of both: value, gradients of the policy's",
    "divergence-forward": "mean KL(teacher, policy) from hidden states and weights of both: value, gradients of the policy's",
    "divergence-jsd": "mean Jensen-Shannon divergence from hidden states and weights of both: value, gradients of the policy's",
    "logits-divergence": "mean KL(policy, teacher) of given logits [N, V]: value and gradient with respect to the policy's",
    "step": "a training step end to end: forward, DAPO loss, backward, AdamW",
}


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
    entropy: float | None = None  # mean entropy of the rows, in nats, for the suite "sparse"

    def __post_init__(self) -> None:
        if self.contract not in CONTRACTS:
            raise ValueError(f"contract={self.contract!r}: it must be one of {', '.join(CONTRACTS)}.")
        if self.rows % self.sequences:
            raise ValueError(f"rows={self.rows}: they are {self.sequences} sequences of equal length, pass a multiple of that.")
        if (self.hidden is None) != self.contract.startswith("logits"):
            raise ValueError(f"hidden={self.hidden}: contracts on hidden states need a width, those on logits have none.")
        if (self.entropy is None) == (self.contract == "sparse"):
            raise ValueError(
                f"entropy={self.entropy}: the contract sparse needs the mean of its rows in nats, others have none."
            )

    @property
    def beta(self) -> float:
        return BETA if self.contract == "logits" else 0.0

    @property
    def active_rows(self) -> int:
        """The number of rows with a gradient."""
        return self.rows if self.contract == "cross-entropy" else round(self.active * self.sequences) * self.length

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.rows // self.sequences


@dataclass
class LogitsCase:
    cell: Cell
    batch: TokenBatch
    logits: Tensor  # [N, V], read by a contender, which may overwrite it
    pristine: Tensor  # [N, V], to restore it
    buffer: Tensor  # [N, V], warm memory for a copy

    def restore(self) -> None:
        with torch.no_grad():
            self.logits.copy_(self.pristine)

    def output(self) -> Tensor:
        """The logits for a contender that works in place."""
        return Output.apply(self.logits)

    def gradients(self, loss: Tensor) -> Result:
        return {"loss": loss.detach(), "d_logits": torch.autograd.grad(loss, self.logits)[0]}


@dataclass
class HiddenCase:
    cell: Cell
    batch: TokenBatch
    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]

    @property
    def active(self) -> Tensor:
        """Indices of the rows with a gradient."""
        rows = torch.arange(self.cell.rows, device=self.hidden.device)
        return rows if self.cell.contract == "cross-entropy" else rows[self.batch.advantages != 0]

    def gradients(self, loss: Tensor) -> Result:
        leaves = {"d_hidden": self.hidden, "d_weight": self.weight}
        leaves = {name: x for name, x in leaves.items() if x.requires_grad}
        return {"loss": loss.detach(), **dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))}


@dataclass
class StepCase:
    cell: Cell
    batch: TokenBatch  # [B, T]
    ids: Tensor  # [B, T + 1]
    model: Any
    optimizer: torch.optim.Optimizer

    def hidden(self) -> Tensor:
        return self.model.model(input_ids=self.ids, use_cache=False).last_hidden_state[:, :-1]

    def logits(self) -> Tensor:
        return self.model(input_ids=self.ids, use_cache=False).logits[:, :-1]

    def step(self, loss: Tensor) -> Result:
        """The backward and an optimizer step. The learning rate is 0, so that every run sees the same parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach(), "gradients": [p.grad for p in self.model.parameters()]}


Case = LogitsCase | HiddenCase | StepCase


def policy_loss(logps: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """What a trainer does with log-probs: ratio, clip, KL (k3), mean over tokens."""
    ratio = torch.exp(logps - batch.old_logps)
    low, high = CLIP
    loss = -torch.min(ratio * batch.advantages, ratio.clamp(1 - low, 1 + high) * batch.advantages)
    if beta:
        d = batch.ref_logps - logps
        loss = loss + beta * (torch.exp(d) - d - 1)
    return loss.sum() / logps.numel()


def loss_of(cell: Cell, logps: Tensor, batch: TokenBatch) -> Tensor:
    """The loss of the cell's contract, from log-probs."""
    return -logps.mean() if cell.contract == "cross-entropy" else policy_loss(logps, batch, cell.beta)


# ---- inputs


def make_case(cell: Cell, device: str, seed: int = 0) -> Case:
    g = torch.Generator(device).manual_seed(seed)
    if cell.contract == "step":
        return _step_case(cell, device, g)
    return _logits_case(cell, device, g) if cell.hidden is None else _hidden_case(cell, device, g)


def _logits_case(cell: Cell, device: str, g: torch.Generator) -> LogitsCase:
    """Logits like those of a policy: a few likely tokens and a flat tail. Targets are sampled from them."""
    pristine = torch.empty(cell.rows, cell.vocab, dtype=cell.dtype, device=device)
    targets = torch.empty(cell.rows, dtype=torch.int64, device=device)
    likely = torch.randperm(cell.vocab, generator=g, device=device)[: min(50, cell.vocab // 4)]
    for part in row_blocks(cell, 4, device):
        x = torch.randn(pristine[part].shape, generator=g, device=device)
        x[:, likely] += 8
        pristine[part] = x
        targets[part] = torch.multinomial(x.softmax(-1), 1, generator=g)[:, 0]
    now = torch.cat([_chosen(pristine[part].float(), targets[part]) for part in row_blocks(cell, 4, device)])
    logits = pristine.clone().requires_grad_(cell.contract == "logits")
    return LogitsCase(cell, tokens(cell, targets, now, g), logits, pristine, torch.empty_like(pristine).copy_(pristine))


def hidden_near(cell: Cell, device: str, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, targets): hidden states near the weight of their target, as a trained head has them."""
    assert cell.hidden is not None
    weight = torch.randn(cell.vocab, cell.hidden, generator=g, device=device) / cell.hidden**0.5
    targets = torch.randint(0, cell.vocab, (cell.rows,), generator=g, device=device)
    confidence = 12 * torch.rand(cell.rows, 1, generator=g, device=device)
    hidden = torch.randn(cell.rows, cell.hidden, generator=g, device=device) + confidence * weight[targets]
    return hidden.to(cell.dtype), weight.to(cell.dtype), targets


def _hidden_case(cell: Cell, device: str, g: torch.Generator) -> HiddenCase:
    hidden, weight, targets = hidden_near(cell, device, g)
    now = _head_logps(cell, hidden, weight, targets, device)
    hidden.requires_grad_(cell.contract != "hidden-forward")
    weight.requires_grad_(cell.contract in ("hidden", "cross-entropy"))
    return HiddenCase(cell, tokens(cell, targets, now, g), hidden, weight)


def _step_case(cell: Cell, device: str, g: torch.Generator) -> StepCase:
    """A Qwen3 with random weights, in the proportions of the small ones."""
    import transformers

    assert cell.hidden is not None and cell.layers is not None
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
    ids = torch.randint(0, cell.vocab, (cell.sequences, cell.length + 1), generator=g, device=device)
    case = StepCase(cell, None, ids, model, optimizer)  # type: ignore[arg-type]  # the batch needs the model's log-probs
    targets = ids[:, 1:].contiguous()
    with torch.no_grad():
        hidden = case.hidden().reshape(cell.rows, cell.hidden)
        now = _head_logps(cell, hidden, model.lm_head.weight, targets.view(-1), device)
    flat = tokens(cell, targets.view(-1), now, g)
    assert flat.old_logps is not None
    case.batch = TokenBatch(targets, flat.advantages.view_as(targets), old_logps=flat.old_logps.view_as(targets))
    return case


def tokens(cell: Cell, targets: Tensor, now: Tensor, g: torch.Generator) -> TokenBatch:
    """`now` are the log-probs of today's policy."""
    random = {"generator": g, "device": targets.device}
    size = torch.randn(cell.sequences, **random)
    size = torch.where(size < 0, size - 0.5, size + 0.5)  # none near 0
    active = torch.randperm(cell.sequences, **random) < round(cell.active * cell.sequences)
    advantages = torch.where(active, size, 0.0).repeat_interleave(cell.length)
    ref_logps = now + 1.5 * torch.randn(cell.rows, **random) if cell.beta else None
    return TokenBatch(targets, advantages, old_logps=now - log_ratios(cell.rows, g), ref_logps=ref_logps)


def log_ratios(rows: int, g: torch.Generator) -> Tensor:
    """Log-ratios of which three fifths lie within 0.1 of 0 and the others 0.4 to 0.6 from it, on either side: log 0.8 is
    -0.22 and log 1.28 is 0.25."""
    kind, near, far = torch.rand(3, rows, generator=g, device=g.device)
    far = 0.4 + 0.2 * far
    return torch.where(kind < 0.6, 0.2 * near - 0.1, torch.where(kind < 0.8, far, -far))


def _head_logps(cell: Cell, hidden: Tensor, weight: Tensor, targets: Tensor, device: str) -> Tensor:
    parts = row_blocks(cell, 4, device)
    return torch.cat([_chosen((hidden[part] @ weight.t()).float(), targets[part]) for part in parts])


def _chosen(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def row_blocks(cell: Cell, size: int, device: str) -> Iterator[slice]:
    """Rows whose logits take some hundred MB at `size` bytes each (2 GB on CUDA)."""
    step = max(1, (2 << 30 if device == "cuda" else 256 << 20) // (size * cell.vocab))
    for lo in range(0, cell.rows, step):
        yield slice(lo, min(lo + step, cell.rows))


# ---- the reference results


@torch.no_grad()
def reference(case: Case) -> Result:
    """The results of the contract, computed in float64, some rows at a time, and returned in fp32. The slope of the loss
    comes from autograd through `loss_of`. The derivative of the softmax, onehot - p, is written out, because a pass
    over logits of this size takes long."""
    if isinstance(case, StepCase):
        return _step_reference(case)
    cell, batch = case.cell, case.batch
    device = batch.targets.device.type
    results: dict[str, Tensor] = {}
    if isinstance(case, HiddenCase):
        hidden, weight = case.hidden.double(), case.weight.double()
        if case.hidden.requires_grad:
            results["d_hidden"] = torch.empty_like(hidden)
        if case.weight.requires_grad:
            results["d_weight"] = torch.zeros_like(weight)
    elif case.logits.requires_grad:
        results["d_logits"] = torch.empty(case.pristine.shape, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    logps, entropy = (torch.empty(cell.rows, dtype=torch.float64, device=device) for _ in range(2))
    for part in row_blocks(cell, 8, device):
        z = case.pristine[part].double() if isinstance(case, LogitsCase) else hidden[part] @ weight.t()
        targets = batch.targets[part, None]
        z -= z.logsumexp(-1, keepdim=True)
        logps[part] = z.gather(1, targets)[:, 0]
        if cell.contract == "logits-forward":
            entropy[part] = -(z.exp() * z).sum(-1)
        if not results:
            continue
        value, slope = loss_and_slope(logps[part], batch, part, cell)
        loss += value
        d_logits = z.exp_().mul_(-slope[:, None]).scatter_add_(1, targets, slope[:, None])
        if "d_logits" in results:
            results["d_logits"][part] = d_logits
        if "d_hidden" in results:
            results["d_hidden"][part] = d_logits @ weight
        if "d_weight" in results:
            results["d_weight"].addmm_(d_logits.t(), hidden[part])
    if results:
        return {name: x.float() for name, x in ({"loss": loss} | results).items()}
    return {"logps": logps.float()} | ({"entropy": entropy.float()} if cell.contract == "logits-forward" else {})


def loss_and_slope(logps: Tensor, batch: TokenBatch, part: slice, cell: Cell) -> tuple[Tensor, Tensor]:
    """The part of the loss from these rows, and its derivative with respect to their log-probs."""
    assert batch.old_logps is not None
    rows = TokenBatch(
        batch.targets[part], batch.advantages[part], old_logps=batch.old_logps[part],
        ref_logps=None if batch.ref_logps is None else batch.ref_logps[part],
    )  # fmt: skip
    with torch.enable_grad():
        leaf = logps.clone().requires_grad_()
        value = loss_of(cell, leaf, rows) * (logps.numel() / cell.rows)
        return value.detach(), torch.autograd.grad(value, leaf)[0]


def _step_reference(case: StepCase) -> Result:
    """The head and the loss are computed in float64. The model's body is not: all contenders share it."""
    assert case.cell.hidden is not None and case.batch.old_logps is not None
    weight = case.model.lm_head.weight
    with torch.enable_grad():
        hidden = case.hidden()
        flat = TokenBatch(
            case.batch.targets.view(-1), case.batch.advantages.reshape(-1), old_logps=case.batch.old_logps.reshape(-1)
        )
        leaf = hidden.detach().reshape(case.cell.rows, case.cell.hidden).requires_grad_()
        head = reference(HiddenCase(case.cell, flat, leaf, weight))
        case.optimizer.zero_grad(set_to_none=True)
        hidden.backward(head["d_hidden"].view(hidden.shape).to(hidden.dtype))
    # The head is tied to the embedding, which has a gradient of its own by now.
    gradients = [p.grad.float() + (head["d_weight"] if p is weight else 0) for p in case.model.parameters()]
    case.optimizer.zero_grad(set_to_none=True)
    return {"loss": head["loss"], "gradients": gradients}
