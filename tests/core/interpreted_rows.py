"""Bits of rows from the Triton kernels, in Triton's interpreter. Run by test_determinism.py in a process of its own."""

from __future__ import annotations

import math
from unittest import mock

import torch

from grpo_kernels import LogitTransform, Objective, Options, TokenBatch, grpo_loss, token_logprobs
from grpo_kernels.rows.backends import triton as backend
from support.bits import same_bits

Tensor = torch.Tensor
N = 6
ONE_PASS = Objective.preset("dapo", beta=0.1, entropy_coef=0.01)
TWO_PASSES = Objective.preset("gspo", aggregate="token-mean", beta=0.1)


def results(fields: dict[str, Tensor], objective: Objective) -> list[Tensor]:
    """Per row: log-probs, entropy and gradient by the loss, and by layer 1."""
    logits = fields["logits"].clone().requires_grad_()
    options = {"mask": fields["mask"], "old_logps": fields["old"], "ref_logps": fields["ref"]}
    if objective.level != "token":  # each row a sequence of its own
        options["cu_seqlens"] = torch.arange(len(logits) + 1)
    batch = TokenBatch(fields["targets"], fields["advantages"], **options)
    transform = LogitTransform(temperature=0.7)
    out = grpo_loss(logits, batch, objective, transform=transform, normalizer=7.0, options=Options(backend="triton"))
    (gradient,) = torch.autograd.grad(out.loss, logits)
    logps, entropy = token_logprobs(
        logits, fields["targets"], mask=fields["mask"], transform=transform, entropy=True, options=Options(backend="triton")
    )
    assert entropy is not None
    (other,) = torch.autograd.grad([logps, entropy], logits, [fields["advantages"], fields["old"]])
    return [out.logps, out.entropy, gradient, logps.detach(), entropy.detach(), other]


def check(vocab: int, dtype: torch.dtype, objective: Objective) -> None:
    g = torch.Generator().manual_seed(vocab)
    fields = {
        "logits": (3.0 * torch.randn(N, vocab, generator=g)).to(dtype),
        "targets": torch.randint(vocab, (N,), generator=g),
        "advantages": torch.randn(N, generator=g),
        "mask": torch.ones(N, dtype=torch.bool),
        "old": torch.randn(N, generator=g) - math.log(vocab),
        "ref": torch.randn(N, generator=g) - math.log(vocab),
    }

    def rows(index: Tensor | slice, **changes: Tensor) -> list[Tensor]:
        return results({k: v[index] for k, v in (fields | changes).items()}, objective)

    def same(found: list[Tensor], index: Tensor | slice, what: str) -> None:
        assert all(same_bits(a, b[index]) for a, b in zip(found, whole, strict=True)), (vocab, dtype, objective, what)

    whole = rows(slice(None))
    assert all(x.isfinite().all() and x.any() for x in whole)
    same(rows(slice(None)), slice(None), "again")
    order = torch.randperm(N, generator=g)
    same(rows(order), order, "in another order")
    for index in (slice(0, 1), slice(4, 5), slice(1, 5)):
        same(rows(index), index, "in a smaller batch")
    kept = torch.arange(N) % 3 != 1
    poisoned = fields["logits"].clone()
    poisoned[~kept] = math.nan
    found = rows(slice(None), mask=kept, logits=poisoned)
    same([x[kept] for x in found], kept, "beside masked rows")
    for count in (1, 3) if objective.one_pass else ():  # of a GPU: each takes the next row when it is done with one
        choices = {kind: choice._replace(grid=1.0) for kind, choice in backend.launch.LAUNCH.items()}
        with (
            mock.patch.dict(backend.launch.LAUNCH, choices),
            mock.patch.object(backend.launch, "multiprocessors", lambda device, count=count: count),
        ):
            same(rows(slice(None)), slice(None), f"on {count} multiprocessors")


def main() -> None:
    check(40, torch.float32, ONE_PASS)
    check(1031, torch.bfloat16, TWO_PASSES)
    check(9001, torch.float32, ONE_PASS)  # several tiles
