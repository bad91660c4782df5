"""Projects of which there is a function or two to call: CCE, Fast-LLM, miles, QuACK, Unsloth."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch.distributed

from benchmarks.cases import CLIP, HALF, Case, Result, Tensor
from benchmarks.providers import Logps, Unavailable, logps_provider, peer, provider

# ---- Cut Cross-Entropy Apple's Cut Cross-Entropy: negative log-probs from hidden states. Its
# kernel skips blocks whose gradients are small. A random head has more such blocks than a trained
# one, so the filtered time here is a lower bound. It is measured with and without that filter. On a
# CPU its torch.compile version is measured.


def _cce(case: Case, **how: object) -> Logps:
    cross_entropy = peer("cut_cross_entropy", "cut-cross-entropy").linear_cross_entropy
    targets = case.batch.targets
    return lambda hidden, weight: -cross_entropy(hidden, weight, targets, reduction="none", **how)


@logps_provider(
    "CCE, filtered (flat states)", "hidden", "hidden-frozen", devices=("cuda",), dtypes=HALF
)
@logps_provider("CCE", "hidden-forward", devices=("cuda",), dtypes=HALF)
def filtered(case: Case) -> Logps:
    return _cce(case)


@logps_provider(
    "CCE, unfiltered", "hidden", "hidden-frozen", "cross-entropy", devices=("cuda",), dtypes=HALF
)
def unfiltered(case: Case) -> Logps:
    return _cce(case, filter_eps=None)


@logps_provider("CCE (torch.compile)", "hidden", "hidden-frozen", "cross-entropy", "hidden-forward")
def compiled(case: Case) -> Logps:
    return _cce(case, impl="torch_compile")


# ---- Fast-LLM Fast-LLM: its Triton kernel for the clipped loss of given logits and their gradient,
# in one launch, between products of torch. It has no KL, so it takes part from hidden states, where
# the loss here has none either.


@provider(
    "Fast-LLM kernel + products",
    "hidden",
    "hidden-frozen",
    devices=("cuda",),
    memory=lambda cell: 2.0 * cell.rows * cell.vocab * cell.dtype.itemsize,
)
def kernel(case: Case) -> Callable[[], Result]:
    loss_and_gradient = peer(
        "fast_llm.functional.triton.grpo_loss", "fast_llm"
    ).triton_grpo_loss_forward_backward
    batch, of_rows = (
        case.batch,
        (case.batch.targets, case.batch.advantages.float(), case.batch.old_logps),
    )
    how = {
        "grad_output": 1.0,
        "epsilon_low": CLIP[0],
        "epsilon_high": CLIP[1],
        "divisor": float(batch.targets.numel()),
    }

    def run() -> Result:
        logits = case.hidden @ case.weight.t()
        loss, d_logits, _ = loss_and_gradient(logits, *(x.contiguous() for x in of_rows), **how)  # type: ignore[union-attr]
        gradients = {
            "d_hidden": lambda: d_logits @ case.weight,
            "d_weight": lambda: d_logits.t() @ case.hidden,
        }
        return {"loss": loss.reshape(())} | {name: gradients[name]() for name in case.leaves}

    return torch.no_grad()(run)


# ---- miles miles: its log-probs of given logits, which are Megatron's cross-entropy of a
# vocabulary cut over ranks. Here there is one rank, which has nothing to exchange. miles has no
# kernel of its own for a loss.


ALONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


@logps_provider("miles log-probs (Megatron, torch.compile)", "logits")
def logprobs(case: Case) -> Logps:
    nll = peer(
        "megatron.core.fusions.fused_cross_entropy", "megatron-core"
    ).fused_vocab_parallel_cross_entropy

    def run(_: Tensor) -> Tensor:
        with mock.patch.object(torch.distributed, "all_reduce"):
            # Its forward overwrites logits of fp32. [sequence, batch, vocabulary]
            return -nll(case.output()[:, None], case.batch.targets[:, None], ALONE)[:, 0]

    return run


# ---- QuACK QuACK: its cross-entropy of given logits. Its linear cross-entropy returns one scalar
# for all tokens, so it cannot take the per-token gradients of a policy loss.


@logps_provider("QuACK cross-entropy", "logits", devices=("cuda",))
def cross_entropy(case: Case) -> Logps:
    nll = peer("quack.cross_entropy", "quack-kernels").cross_entropy
    return lambda logits: -nll(logits, case.batch.targets, reduction="none", inplace_backward=True)


@logps_provider("QuACK linear cross-entropy", "hidden", "hidden-frozen", suffix="")
def linear_cross_entropy(case: Case) -> Logps:
    raise Unavailable(
        "returns one scalar for all tokens, so it cannot take the per-token gradients of a policy"
        " loss"
    )


# ---- Unsloth Unsloth: its chunked log-probs of hidden states. Its package must be imported by
# `unsloth`, which replaces parts of torch and transformers: set UNSLOTH_IS_PRESENT=1, and without a
# GPU UNSLOTH_ZOO_DISABLE_GPU_INIT=1, instead.


@logps_provider("Unsloth chunked log-probs", "hidden", "hidden-frozen")
def chunked(case: Case) -> Logps:
    logps_of = peer(
        "unsloth_zoo.fused_losses.chunked_logprob", "unsloth_zoo"
    ).unsloth_chunked_logprobs
    return lambda hidden, weight: logps_of(hidden, weight, case.batch.targets)
