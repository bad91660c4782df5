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
        """Make the layers. `width` is H, the hidden size of the policy."""
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

    config   the options of the run
    policy   the policy, which the head reads and does not change
    ranks    the ranks of the run

    Raises ValueError if it is not known how the policy computes its logits (`check_projection`).
    """

    def __init__(self, config: TrainConfig, policy: ParallelModel, ranks: Ranks) -> None:
        """Make the draft head on each rank, with the same parameters, and its optimizer.

        config   the options of the run
        policy   the policy, which the head reads and does not change
        ranks    the ranks of the run
        """
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

        The step is skipped if there are no positions, or if the gradient is not finite.

        completions   the completions of this rank

        Returns means over all positions, computed before the step: "draft_loss", "draft_acceptance"
        (the probability that speculative sampling accepts the draft's token) and
        "draft_top1_agreement" (the share of positions where both have the same likeliest token).
        """
        sums = self.accumulate_gradients(completions)
        if self.ranks.world > 1:
            dist.all_reduce(sums)
            self.sum_gradients_over_ranks()
        loss, acceptance, agreement, num_positions = sums.tolist()
        count = max(num_positions, 1.0)
        # The loss is a sum over positions, and so are its gradients.
        gradients = [p.grad for p in self.head.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient /= count
        norm = nn.utils.clip_grad_norm_(self.head.parameters(), self.config.max_grad_norm)
        if num_positions > 0 and math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "draft_loss": loss / count,
            "draft_acceptance": acceptance / count,
            "draft_top1_agreement": agreement / count,
        }

    def accumulate_gradients(self, completions: Completions) -> Tensor:
        """Run forward and backward of each micro-batch, and add up the gradients in `.grad`.

        completions   the completions of this rank

        Returns the sums of `summed_metrics` over this rank, fp64 [4].
        """
        row_ids = torch.arange(len(completions.ids), device=self.ranks.device)
        sums = torch.zeros(4, dtype=torch.float64, device=self.ranks.device)
        for rows in pieces(row_ids, self.config.micro_batch, self.ranks):
            # All ranks must make the same number of forwards. A rank without rows left takes its
            # first row again, without a backward.
            has_rows = len(rows) > 0
            part = completions[rows if has_rows else row_ids[:1]]
            out = self.policy.without_gradients(self.loss, part)
            if has_rows:
                out.loss.backward()
                sums += summed_metrics(out)
        return sums

    def sum_gradients_over_ranks(self) -> None:
        """Replace the gradient of each parameter by the sum over all ranks."""
        for parameter in self.head.parameters():
            if parameter.grad is None:  # this rank has no completions
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def loss(self, model: Any, completions: Completions) -> DraftLoss:
        """Return the loss of the draft, summed over positions.

        Only the draft's parameters get a gradient. This function runs inside a forward of the
        policy (`ParallelModel.without_gradients`), so that sharded weights are gathered.

        model         the policy
        completions   completions with their prompts; the draft is trained on all of these tokens
        """
        config = self.config
        options = Options(backend="eager" if config.loss == "eager" else config.backend)
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
                    options=options,
                )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])


def summed_metrics(out: DraftLoss) -> Tensor:
    """Return sums over the positions of a micro-batch, fp64 [4].

    out   the loss of the draft head on a micro-batch, whose metrics are means over its positions

    They are the sums of loss, acceptance and top-1 agreement, and the number of positions.
    """
    num_positions = out.metrics["positions"].double()
    means = [out.metrics[name] for name in ("loss", "acceptance", "top1_agreement")]
    sums = [mean.double() * num_positions for mean in means]
    return torch.cat([*sums, num_positions])
