"""NeMo-RL: its distillation loss from the logits, by our kernels.

    from grpo_kernels.integrations.nemo_rl_distillation import DistillationLoss

    loss_fn = DistillationLoss.like(DistillationLossFn(config))      # in the place of DistillationLossFn(config)

NeMo-RL hands it the logits (`input_type = LossInputType.LOGIT`) in place of log-probs at the teacher's ids, and the teacher's
`topk_logits_k` largest logits and their ids in `data`. Both KLs are renormalised over these ids, as with
zero_outside_topk=False, from the logits at the ids alone: nothing of the size of the vocabulary is read. With
zero_outside_topk=True the policy's probabilities are those of the whole vocabulary, and the teacher's log-prob outside of its
ids is -100: log-probs and entropy come from one visit of each row.

The value of that option's reverse KL has about 100 times the mass outside in it, and that mass is the gradient: it is
NeMo-RL's, for parity. `Exact("reverse")`, whose tail is one outcome, has no such number. The sum of NeMo-RL's option `forward`
has no minimum at the teacher's row either way: its value may be negative.

An id counts as often as the teacher lists it, as in NeMo-RL.

Logits may be cut over tensor-parallel ranks, as in `nemo_rl.PolicyLoss`. Not covered: context parallelism, the loss across
tokenizers. Written from the code of August 2026 (7ea279a); the tests here compare with a transcription.
"""

from __future__ import annotations

from typing import Any

import torch

from ..checks import require_number, require_one_of
from ..formulas.divergence import Exact, divergence_at
from ..logprobs import token_logprobs
from ._shared import distinct, no_ids, shard_of

Tensor = torch.Tensor

#: The teacher's log-prob of an id outside of its largest, with zero_outside_topk.
OUTSIDE = -100.0


class DistillationLoss:
    """A NeMo-RL loss function: (logits, data, global_valid_seqs, global_valid_toks) -> (loss, metrics).

    kl_type            "forward", KL(teacher, policy); "reverse"; "mixed": mixed_kl_weight of the forward, and the rest of the
                       reverse.
    mixed_kl_weight    in [0, 1].
    zero_outside_topk  False: both sides are renormalised over the teacher's ids. True: see above.
    megatron           True: logits are Megatron's, [B, S, V / ranks], cut over its tensor-parallel group.

    `data` has token_mask [B, S], sample_mask [B], input_ids, teacher_topk_logits and teacher_topk_indices [B, S, k], k at least
    1; the last row of each sequence predicts nothing. Raises ValueError naming the argument that is wrong."""

    def __init__(
        self, kl_type: str = "mixed", mixed_kl_weight: float = 0.5, zero_outside_topk: bool = False, *, megatron: bool = False
    ) -> None:
        from nemo_rl.algorithms.loss import interfaces

        require_one_of("kl_type", kl_type, ("forward", "reverse", "mixed"))
        require_number("mixed_kl_weight", mixed_kl_weight, "the forward KL's share is a number in [0, 1].", 0.0, 1.0)
        self.kl_type, self.mixed_kl_weight, self.zero_outside_topk = kl_type, float(mixed_kl_weight), zero_outside_topk
        self.megatron = megatron
        self.loss_type, self.input_type = interfaces.LossType.TOKEN_LEVEL, interfaces.LossInputType.LOGIT

    @classmethod
    def like(cls, theirs: Any, *, megatron: bool = False) -> DistillationLoss:
        """This loss with the settings of `theirs`, a `DistillationLossFn`."""
        return cls(theirs.kl_type, theirs.mixed_kl_weight, theirs.zero_outside_topk, megatron=megatron)

    def __call__(
        self,
        logits: Tensor,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        *,
        vocab_parallel_group: Any = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """vocab_parallel_group: what a prepare_fn of yours hands on, in the place of megatron=True."""
        ids = data["teacher_topk_indices"].to(logits.device)
        if ids.shape[-1] <= 0:
            raise ValueError("teacher_topk_indices has no id: topk must be positive.")
        masked = "token_mask" in data and "sample_mask" in data
        mask = torch.ones(ids.shape[:2], dtype=torch.bool, device=logits.device)
        if masked:
            mask = data["token_mask"].roll(-1, 1) * data["sample_mask"][:, None] != 0
        mask[:, -1] = False
        teacher = torch.log_softmax(data["teacher_topk_logits"].to(logits.device, torch.float32), -1)
        shard = shard_of(logits, vocab_parallel_group, self.megatron)
        if shard is None and not self.zero_outside_topk:
            at = torch.where(mask[..., None], logits.gather(-1, ids).to(torch.float32), 0.0)  # masked rows may hold anything
            at, entropy = torch.log_softmax(at, -1), None
        else:
            at, entropy = self._scored(logits, ids, mask, shard)
        forward = 1.0 if self.kl_type == "forward" else 0.0 if self.kl_type == "reverse" else self.mixed_kl_weight
        value = at.new_zeros(mask.shape)
        if forward > 0:
            value = value + forward * self._kl("forward", at, teacher)
        if forward < 1:
            value = value + (1.0 - forward) * self._reverse(at, teacher, entropy)
        value = torch.where(mask, value, 0.0)
        total = (global_valid_toks.to(torch.float32) + 1e-8) if masked else mask.sum()
        loss = value.sum() / total
        return loss, {"loss": float(loss.detach()), "num_valid_samples": data["input_ids"].shape[0]}

    def _scored(self, logits: Tensor, ids: Tensor, mask: Tensor, shard: Any) -> tuple[Tensor, Tensor | None]:
        """(log-probs at ids [B, S, k], entropies [B, S] or None), in one visit of each row that counts."""
        sets, place = distinct(ids.flatten(0, 1))
        scored = token_logprobs(logits, no_ids(ids[..., 0]), mask=mask, entropy=self.zero_outside_topk, at=sets, shard=shard)
        _, entropy, statistics = scored
        at = torch.where(mask[..., None], statistics["at"][place].view(ids.shape), OUTSIDE)  # a row that is not read has 0
        return (at if self.zero_outside_topk else torch.log_softmax(at, -1)), entropy

    def _kl(self, direction: str, at: Tensor, teacher: Tensor) -> Tensor:
        k, shape = at.shape[-1], at.shape[:-1]
        offsets = torch.arange(shape.numel() + 1, device=at.device) * k
        return divergence_at(Exact(direction, tail="ignore"), at.reshape(-1), teacher.reshape(-1), offsets).view(shape)

    def _reverse(self, at: Tensor, teacher: Tensor, entropy: Tensor | None) -> Tensor:
        if entropy is None:
            return self._kl("reverse", at, teacher)
        p = at.exp()  # the sum of p log p over the vocabulary, less that of p log q, whose log q outside is one number
        return -entropy - (p * teacher).sum(-1) - OUTSIDE * (1.0 - p.sum(-1))
