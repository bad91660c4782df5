"""A draft head for speculative decoding, which is trained together with the policy.

At each step it learns the policy's distributions on the completions of that step. Its loss has no
gradient with respect to the policy: its body, embedding and head do not change.

Shape suffixes: B completions, L positions that are fed, H hidden size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ..draft_heads import DraftLoss, draft_head_loss
from ..options import Options
from . import Ranks
from .config import TrainConfig
from .policy import Completions, ParallelModel, check_projection, head_of
from .rollouts import pieces

#: Seed of the draft's parameters, added to that of the run.
SEED_OFFSET = 7_919


class DraftHead(nn.Module):
    """Predicts the token at t + 2 from the policy's hidden state at t and the token at t + 1.

    The inputs are those of the first module of multi-token prediction in DeepSeek-V3 (arXiv
    2412.19437, section 2.2). Its transformer block is a gated MLP here: the policy's hidden state
    has the context already. The result goes through the policy's output head.

    width   H, the hidden size of the policy
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(width)
        self.embedding_norm = nn.RMSNorm(width)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.output_norm = nn.RMSNorm(width)

    def forward(self, hidden: Tensor, next_embeddings: Tensor) -> Tensor:
        """Return the draft's hidden states [B, L, H], the input of the policy's head.

        hidden            [B, L, H]: hidden states of the policy, the input of its head
        next_embeddings   [B, L, H]: embedding of the token at t + 1
        """
        normed = [self.hidden_norm(hidden), self.embedding_norm(next_embeddings)]
        x = self.projection(torch.cat(normed, -1))
        mlp_input = self.mlp_norm(x)
        x = x + self.down(F.silu(self.gate(mlp_input)) * self.up(mlp_input))
        return self.output_norm(x)


class DraftTrainer:
    """The draft head of a run and its optimizer.

    Each rank has a copy of the head. Gradients are summed over all ranks.
    """

    def __init__(self, config: TrainConfig, policy: ParallelModel, ranks: Ranks) -> None:
        self.config = config
        self.policy = policy
        self.ranks = ranks
        policy.without_gradients(check_projection)
        width = policy.model.get_output_embeddings().weight.shape[-1]
        # The run of the policy must draw the same random numbers with and without a draft.
        devices = [ranks.device] if ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(config.seed + SEED_OFFSET)
            self.head = DraftHead(width).to(ranks.device)
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=config.draft_lr, weight_decay=0.0
        )

    def update(self, completions: Completions) -> dict[str, float]:
        """Make one optimizer step on the completions of all ranks.

        completions   those of this rank

        Returns the means over all positions before the step: "draft_loss", "draft_acceptance" (the
        probability that speculative sampling accepts the draft's token) and "draft_top1_agreement".
        """
        every = torch.arange(len(completions.ids), device=self.ranks.device)
        sums = torch.zeros(4, dtype=torch.float64, device=self.ranks.device)
        for rows in pieces(every, self.config.micro_batch, self.ranks):
            # All ranks make the same number of forwards. One without rows left takes any row.
            part = completions[rows if len(rows) else every[:1]]
            out = self.policy.without_gradients(self.loss, part)
            if len(rows):
                out.loss.backward()
                sums += summed_metrics(out)
        gradients = [p.grad for p in self.head.parameters() if p.grad is not None]
        if self.ranks.world > 1:
            for x in (sums, *self.complete_gradients()):
                dist.all_reduce(x)
            gradients = self.complete_gradients()
        loss, acceptance, agreement, positions = sums.tolist()
        count = max(positions, 1.0)
        for gradient in gradients:
            gradient /= count
        norm = nn.utils.clip_grad_norm_(self.head.parameters(), self.config.max_grad_norm)
        if positions and math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "draft_loss": loss / count,
            "draft_acceptance": acceptance / count,
            "draft_top1_agreement": agreement / count,
        }

    def complete_gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter, zeros for a rank without completions."""
        for p in self.head.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return [p.grad for p in self.head.parameters() if p.grad is not None]

    def loss(self, model: Any, completions: Completions) -> DraftLoss:
        """Return the loss of the draft, summed over positions.

        Only the draft's parameters get a gradient. This function runs inside a forward of the
        policy (`ParallelModel.without_gradients`), so that sharded weights are gathered.
        """
        config = self.config
        with self.policy.autocast(config.dtype):
            hidden = model.get_decoder()(**completions.inputs, use_cache=False).last_hidden_state
            embeddings = model.get_input_embeddings()(completions.ids[:, 1:])
            head = head_of(model, config.temperature)
            with torch.enable_grad():
                draft_hidden = self.head(hidden, embeddings)
                return draft_head_loss(
                    draft_hidden,
                    hidden,
                    head,
                    mask=completions.attention[:, :-1],
                    normalizer=1.0,
                    options=Options(backend="eager" if config.loss == "eager" else config.backend),
                )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])


def summed_metrics(out: DraftLoss) -> Tensor:
    """Return the sums over positions of loss, acceptance and agreement, and their number, fp64."""
    positions = out.metrics["positions"].double()
    means = [out.metrics[name] for name in ("loss", "acceptance", "top1_agreement")]
    return torch.cat([*(x.double() * positions for x in means), positions])
